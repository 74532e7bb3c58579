"07b_encoder_decoder: tree rows, cached rows and texts of T5, Bart, Marian and others: those of plain passes"
import warnings

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration
from transformers import M2M100Config, M2M100ForConditionalGeneration
from transformers import MarianConfig, MarianMTModel, MBartConfig, MBartForConditionalGeneration
from transformers import NoRepeatNGramLogitsProcessor, PegasusConfig, PegasusForConditionalGeneration
from transformers import T5Config, T5ForConditionalGeneration

from helpers import proves, refuses, tiny
from specref.core.loop import autoregressive, generate, loop_law, match
from specref.core.rng import Seeded, tv_outcomes
from specref.core.target import target_law
from specref.core.tree import Tree
from specref.draft.jacobi import Jacobi
from specref.draft.lookup import PromptLookup
from specref.draft.shapes import DynamicTree, StaticTree
from specref.models import encoder_decoder
from specref.models.encoder_decoder import EncoderDecoderModel, SourceDecoder, WithSource, stated_positions
from specref.models.transformer import Unservable
from specref.verify.reject import reject
from specref.core.drafters import Chain
from test_transformer import grown, history

torch.set_num_threads(1)
V, SOURCE = 11, (5, 6, 7, 3, 9)
BARTS = {"Bart": (BartConfig, BartForConditionalGeneration), "Marian": (MarianConfig, MarianMTModel),
         "MBart": (MBartConfig, MBartForConditionalGeneration),
         "Pegasus": (PegasusConfig, PegasusForConditionalGeneration),
         "M2M100": (M2M100Config, M2M100ForConditionalGeneration)}
KINDS = "T5", "Bart", "Marian", "MBart", "Pegasus"


def configured(kind, start, V, layers):
    "A network of one encoder and `layers` decoder layers, with random weights of its own"
    common = dict(vocab_size=V, d_model=16, decoder_start_token_id=start, pad_token_id=0, eos_token_id=1,
                  bos_token_id=None, tie_word_embeddings=False)
    if kind == "T5":
        return T5ForConditionalGeneration(T5Config(
            d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=layers, num_heads=2,
            relative_attention_num_buckets=8, relative_attention_max_distance=6, **common))
    config, make = BARTS[kind]
    return make(config(encoder_layers=1, decoder_layers=layers, encoder_attention_heads=2,
                       decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
                       max_position_embeddings=64, forced_eos_token_id=None, forced_bos_token_id=None,
                       num_beams=1, **common))


def network(kind, start=2, V=V, layers=2, seed=0):
    "The same in double precision throughout, with large random weights"
    torch.manual_seed(seed)
    model = configured(kind, start, V, layers).double().eval()
    with torch.no_grad():
        for name, w in model.named_parameters():
            scale = 3. if "relative_attention_bias" in name else 1. if "ncoder_attn" in name else .4
            if w.requires_grad: w.normal_(0, scale) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    for module in model.modules():
        if type(module).__name__ == "T5LayerNorm": module.forward = wide_norm(module)
    return model


def wide_norm(norm):
    "T5's norm in double precision (its own rounds to single precision)"
    return lambda x: norm.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.variance_epsilon)


@torch.inference_mode()
def plain_logits(model, source, text):  # -> (V,)
    "By the bare model, without a cache"
    out = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([text]), use_cache=False)
    return out.logits[0, -1].numpy()


def deviation(target, tree):
    rows = target.logits(tree)
    return max(abs(rows[i] - plain_logits(target.network, target.source, tree.text(i))).max()
               for i in range(len(tree)))


@proves("thm-conditional", "prop-biases")
@pytest.mark.parametrize("chunk", [2, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_plain_rows_after_any_history(kind, chunk):
    "In one pass a call; trees with branches, probes and equal siblings; texts that grow, go back and change"
    target = EncoderDecoderModel(network(kind), SOURCE, paths=False, chunk=chunk)
    for seed in range(2):
        for tree in history(seed, V=V):
            before = target.meter.calls
            assert deviation(target, tree) < 1e-10
            assert chunk < 1024 or target.meter.calls <= before + 1


@proves("prop-biases")
@pytest.mark.parametrize("kind", KINDS)
def test_stored_branches_keep_their_positions(kind):
    "A tree that grows behind one context: new nodes attend to stored ones out of order"
    target = EncoderDecoderModel(network(kind), SOURCE, paths=False)
    nodes = (0, 8), (0, 4), (0, 9), (3, 3), (4, 1)
    for n in (3, 4, 5): assert deviation(target, grown((2, 5, 6), nodes[:n])) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_without_stated_positions_the_check_fails(kind, monkeypatch):
    "By places in memory a tree pass is refused, or replaced by plain passes with a warning"
    def by_places(decoder, at, m): return stated_positions(decoder, torch.arange(len(at)), m)
    monkeypatch.setattr(encoder_decoder, "stated_positions", by_places)
    with pytest.raises(Unservable, match="tree pass is .* off"):
        EncoderDecoderModel(network(kind), SOURCE, paths=False)
    with pytest.warns(UserWarning, match="reads each path"):
        target = EncoderDecoderModel(network(kind), SOURCE)
    assert target.by_paths and target.with_source(SOURCE[:2]).by_paths
    assert all(deviation(target, tree) < 1e-10 for tree in history(0, 3, V=V))


def test_a_network_that_computes_positions_itself_is_read_by_paths():
    "M2M100 numbers a text by its tokens that are no padding"
    with pytest.warns(UserWarning, match="reads each path"):
        target = EncoderDecoderModel(network("M2M100"), SOURCE)
    for ctx in ((2, 5), (2, 5, 8, 4), (2, 5, 7)):
        tree = Tree(ctx)
        for u, x in ((0, 8), (0, 7), (1, 4), (2, 9)): tree.add(u, x)
        assert deviation(target, tree) < 1e-10


@pytest.mark.parametrize("kind, start", [("T5", 0), ("T5", 2), ("Bart", 2), ("Marian", 0), ("Marian", 4)])
def test_greedy_texts_are_those_of_generate(kind, start):
    "For several sources, up to the end token, with a logits processor; drafted by a smaller model"
    model, draft, lengths = network(kind, start), network(kind, start, layers=1, seed=1), set()
    target = EncoderDecoderModel(model, SOURCE, temperature=0, processors=[NoRepeatNGramLogitsProcessor(1)])
    assert target.start == (start,) and target.end == (1,)
    for source in (SOURCE, (4, 4), (9, 2, 10, 8, 8, 3, 6, 5, 7)):
        p, q = target.with_source(source), EncoderDecoderModel(draft, source, temperature=0)
        want = model.generate(torch.tensor([source]), max_new_tokens=9, do_sample=False, num_beams=1,
                              attention_mask=torch.ones(1, len(source)), no_repeat_ngram_size=1,
                              use_cache=False)[0, 1:].tolist()
        out = generate(p, Chain(q, 3), reject, p.start, 9, Seeded(0), stop=p.end)
        assert list(out) == want
        lengths.add(tuple(want))
    assert len(lengths) >= 2


SYSTEMS = {
    "a smaller model": lambda draft, V: (Chain(draft, 3), reject),
    "a tree": lambda draft, V: (StaticTree(draft, (-1, 0, 0, 1)), reject),
    "a tree of points": lambda draft, V: (DynamicTree(draft, 2, 2, 4), reject),
    "Jacobi": lambda draft, V: (Jacobi(V, 3), match),
    "lookup in the source": lambda draft, V: (
        WithSource(PromptLookup(V, num_draft_tokens=3), draft.source), match)}


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_decodes_it(name):
    "The same greedy text in fewer passes or as many; at temperature 1 the exact law of three tokens"
    model, small = network("T5"), network("Marian", layers=1)
    draft = EncoderDecoderModel(small, SOURCE)
    target = EncoderDecoderModel(model, SOURCE, temperature=0)
    out = generate(target, *SYSTEMS[name](draft, V), target.start, 12, Seeded(0))
    assert out == autoregressive(target.with_source(SOURCE), target.start, 12, Seeded(0))
    assert out.ledger.models["target"].calls <= 12
    p, q = (EncoderDecoderModel(network(kind, V=4, start=0), (2, 3), check=False) for kind in ("T5", "Bart"))
    drafter, verify = SYSTEMS[name](q, 4)
    law = loop_law(p, drafter, verify, (0,), 2)
    assert tv_outcomes(law, target_law(p, (0,), 2)) < 1e-9


def test_lookup_in_the_source_copies_it():
    "A text that repeats the source: all tokens after the first match are drafted from it"
    drafter = WithSource(PromptLookup(V, num_draft_tokens=3), (4, 5, 6, 7, 8))
    tree = drafter((0, 4, 5), Seeded(0))
    assert tree.ctx == (0, 4, 5) and tree.token[1:] == [6, 7, 8]
    assert PromptLookup(V, num_draft_tokens=3)((0, 4, 5), Seeded(0)).token[1:] == []


@proves("thm-conditional")
@pytest.mark.parametrize("kind", KINDS)
def test_the_source_is_read_once(kind):
    "One pass of the encoder, one projection to cross keys a layer, however many rounds"
    model, calls = network(kind), []
    target = EncoderDecoderModel(model, SOURCE, check=False)
    model.get_encoder().register_forward_hook(lambda *a: calls.append("encoder"))
    for name, module in model.get_decoder().named_modules():
        if name.endswith(("EncDecAttention.k", "encoder_attn.k_proj")):
            module.register_forward_hook(lambda *a: calls.append("keys"))
    draft = EncoderDecoderModel(network(kind, seed=1), SOURCE, check=False)
    run = generate(target, Chain(draft, 3), reject, target.start, 12, Seeded(0))
    assert calls.count("encoder") == 1 and calls.count("keys") == 2
    m, other = run.ledger.models["target"], target.with_source((4, 4))
    assert m.calls == len(run.ledger.rounds) and m.layer_tokens == 2 * m.tokens + 1 * len(SOURCE)
    assert other.meter.calls == 0 and not np.allclose(other.law((2, 5)), target.law((2, 5)))


def test_a_source_that_is_read_again_is_counted_again():
    target = EncoderDecoderModel(network("T5"), SOURCE, check=False)
    target.law((2, 5))
    target.forget()
    before = target.meter.layer_tokens
    target.law((2, 5))
    assert target.meter.layer_tokens - before == 2 * 2 + 1 * len(SOURCE)


def test_a_pass_reads_the_rows_of_the_source():
    "Keys and values, in two layers, of the source's tokens, of width 16 and 8 bytes; and those of the text"
    target = EncoderDecoderModel(network("T5"), SOURCE, check=False)
    for n in range(1, 4):
        before = target.meter.kv_bytes
        target.law((2, 5, 6)[:n])
        assert target.meter.kv_bytes - before == 2 * 2 * (len(SOURCE) + n - 1) * 16 * 8


def test_states_are_those_of_the_decoder():
    model = network("T5")
    target, text = EncoderDecoderModel(model, SOURCE, keep=(2,)), (2, 5, 6)
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([SOURCE]), decoder_input_ids=torch.tensor([text]),
                    output_hidden_states=True).decoder_hidden_states
    for layer in (1, 2):
        assert torch.allclose(target.states(text, (layer,))[layer], out[layer][0], atol=1e-12)


def test_bad_input_is_refused_in_words():
    model = network("Marian")
    refuses("source", EncoderDecoderModel, model, ())
    refuses("source", EncoderDecoderModel, model, (5, V))
    refuses("source", EncoderDecoderModel, model, (5, 0, 6))
    refuses("source", EncoderDecoderModel, model, "text")
    refuses("source", EncoderDecoderModel, model, (5,) * 65)
    refuses("model", EncoderDecoderModel, tiny(), SOURCE)
    refuses("model", EncoderDecoderModel, object(), SOURCE)
    refuses("V", EncoderDecoderModel, model, SOURCE, V=2)
    target = EncoderDecoderModel(model, SOURCE, check=False)
    refuses("n", generate, target, Chain(target, 2), reject, target.start, 65, Seeded(0))
    other = network("T5")
    other.generation_config.decoder_start_token_id = other.config.decoder_start_token_id = None
    refuses("model", EncoderDecoderModel, other, SOURCE)


def test_start_and_end_are_those_of_generate():
    "The decoder's start of its settings, else the first token of a text; one end token or several"
    model = network("Bart")
    settings = model.generation_config
    settings.bos_token_id, settings.eos_token_id = 3, [1, 7]
    target = EncoderDecoderModel(model, SOURCE, check=False)
    assert target.start == (2,) and target.end == (1, 7)
    settings.decoder_start_token_id = model.config.decoder_start_token_id = None
    assert EncoderDecoderModel(model, SOURCE, check=False).start == (3,)


def test_load(tmp_path):
    model = network("Marian")
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = EncoderDecoderModel.load(tmp_path, SOURCE, dtype=torch.float64, temperature=.5)
    assert isinstance(target.model, SourceDecoder) and target.temperature == .5
    assert np.allclose(target.law((2, 5)), EncoderDecoderModel(model, SOURCE, temperature=.5).law((2, 5)))
    refuses("path", EncoderDecoderModel.load, tmp_path/"none", SOURCE)
    fewer = {name: w for name, w in model.state_dict().items() if "decoder.layers.1.fc1" not in name}
    model.save_pretrained(tmp_path/"fewer", state_dict=fewer)
    refuses("path", EncoderDecoderModel.load, tmp_path/"fewer", SOURCE)
