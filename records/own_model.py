"Four drafters trained for two steps on a random model of 1.2 billion weights (`make record-own_model`)"
import json
import resource
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specref.core.check import write_record
from specref.models.embedded import tokenizer
from specref.train.checkpoints import LAYOUTS, from_folder, to_folder
from specref.train.harness import TargetModel
from specref.train.registry import RECIPES, load_drafter, train_for, with_options
from specref.train.texts import find_devices

SHAPE = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
             num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=8192,
             tie_word_embeddings=True)
TEMPLATE = ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")
CHATS = [[dict(role="user", content=f"What is {i}?"), dict(role="assistant", content=f"The number {i}. " * 3)]
         for i in range(20)]

def random_model():
    "A Llama of this shape in bfloat16; normal weights, a head that is the embedding"
    with torch.device("meta"): model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    for w in model.parameters(): torch.nn.init.normal_(w, std=.02) if w.dim() > 1 else torch.nn.init.ones_(w)
    model.tie_weights()
    with torch.no_grad(): model.model.embed_tokens.weight[512:] = 0   # it predicts tokens of the texts
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
    return model

def trained(name, layout, model, tok):
    "Seconds of two steps of two batches, and whether the public format gives the same weights back"
    with TemporaryDirectory() as folder:
        out, start = Path(folder), perf_counter()
        train_for(model, tok, out, CHATS, with_options(RECIPES[name], 2, None), find_devices("cpu", 2), name,
                  texts=20, length=48, steps=2, seed=0, data="chats.jsonl", parts=2, dtype="bfloat16",
                  online=True)
        seconds, base = perf_counter() - start, TargetModel(model)
        net = load_drafter(str(out/"data"/name), model).net
        to_folder(net, LAYOUTS[layout], out/"public", "target")
        again = from_folder(out/"public", LAYOUTS[layout], base)
        same = all(map(torch.equal, net.parameters(), again.parameters()))
        size = sum(f.stat().st_size for f in (out/"public").glob("*.safetensors"))
    return dict(seconds=round(seconds, 1), layout=layout, same=same, bytes=size,
                weights=sum(w.numel() for w in net.parameters()))

if __name__ == "__main__":
    torch.set_num_threads(2)
    tok, model = tokenizer(), random_model()
    tok.chat_template = TEMPLATE
    runs = {name: trained(name, layout, model, tok)
            for name, layout in (("eagle3", "speculators/eagle3"), ("eagle", "eagle"), ("dflash", "dflash"),
                                 ("medusa", "medusa"))}
    found = dict(target=sum(w.numel() for w in model.parameters()), shape=SHAPE, runs=runs,
                 memory_gb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1))
    print(json.dumps(found, indent=1))
    write_record(Path(__file__).with_suffix(".json"), "make record-own_model", found)
