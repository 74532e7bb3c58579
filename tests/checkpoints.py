"Checkpoints in a folder, and pairs of models by their names, for the tests of the commands"
import shutil

import pytest

from specref.app.loading import ModelOptions, load_pair
from specref.models.embedded import tokenizer
from specref.models.recipe import llama
from specref.train.registry import SHIPPED_DRAFTERS

def pair_of(temperature=0., **options): return load_pair(ModelOptions(temperature=temperature, **options))

def letters(path, vocab_size=257):
    "A checkpoint whose tokenizer reads single bytes, with 64 positions"
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<{i}>" for i in range(vocab_size - 256))]
    tok = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(signs)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    torch.manual_seed(2)
    llama(1, 32, 64, vocab_size, 64).save_pretrained(path)
    template = "{{ messages[0].content }}?" if vocab_size == 257 else None
    PreTrainedTokenizerFast(tokenizer_object=tok, chat_template=template).save_pretrained(path)

def whole_words(path):
    "A checkpoint whose tokenizer has three words and no bytes"
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.WordLevel(dict(a=0, b=1, x=2), unk_token="x"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    llama(1, 32, 64, 3, 64).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tok).save_pretrained(path)

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Models in a folder, in the Hugging Face format: two with the embedded tokenizer, three with others"
    import torch
    path = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        llama(2 - seed, 32, 64).save_pretrained(path/name)
        tokenizer().save_pretrained(path/name)
    letters(path/"letters")
    letters(path/"alike", vocab_size=512)
    whole_words(path/"words")
    shutil.copytree(path/"draft", path/"padded")
    padded = tokenizer().from_pretrained(path/"draft")
    padded.add_special_tokens(dict(pad_token="<pad>"))
    padded.save_pretrained(path/"padded")
    (path/"empty").mkdir()
    return path

@pytest.fixture
def mine(tmp_path):
    "A trained drafter in a folder of another name"
    shutil.copytree(SHIPPED_DRAFTERS/"eagle", tmp_path/"my own")
    return str(tmp_path/"my own")
