"""Chapter 07 on quantized and offloaded weights: `make compat-quantised`

Each way of loading the embedded target is compared with its own `generate`, and recorded in
quantised.json: what the check of `HFModel` says, how far the rows of a tree are from plain
passes, and how many greedy texts are those of `generate`."""
import logging
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers
from transformers import BitsAndBytesConfig, TorchAoConfig

from specref.core.check import write_record
from specref.core.law import tv, warp
from specref.core.loop import generate
from specref.core.rng import Seeded
from specref.core.tree import Tree
from specref.models.embedded import prompts, raw_model, stored
from specref.models.transformer import HFModel, Unservable
from specref.verify.reject import reject
from specref.core.drafters import Chain

RECORD = Path(__file__).with_suffix(".json")
TEXTS, TOKENS = 4, 32


def quantised(**options): return dict(quantization_config=BitsAndBytesConfig(**options))
def int8(name):
    import torchao.quantization as ao
    return dict(quantization_config=TorchAoConfig(getattr(ao, name)()))


def half_on_disk(folder):
    "The device of each part of the target: the second half of its layers is read from disk"
    n = raw_model("target").config.num_hidden_layers
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    layers = {f"model.layers.{i}": "cpu" if i < n // 2 else "disk" for i in range(n)}
    return dict(device_map=dict.fromkeys(parts, "cpu") | layers, offload_folder=folder)


WAYS = {   # name -> (a folder) -> options of `from_pretrained`
    "float32": lambda folder: {},
    "device_map: cpu": lambda folder: dict(device_map="cpu"),
    "device_map: auto": lambda folder: dict(device_map="auto"),
    "device_map: half on disk": half_on_disk,
    "torchao int8 weights": lambda folder: int8("Int8WeightOnlyConfig"),
    "torchao int8 weights and activations": lambda folder: int8("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes 4 bits, fp4": lambda folder: quantised(load_in_4bit=True),
    "bitsandbytes 4 bits, nf4": lambda folder: quantised(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes 8 bits": lambda folder: quantised(load_in_8bit=True),
}


def loaded(options):  # -> model, the answer of its check
    "Served, with a warning or without one; or refused"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try: model = HFModel.load(stored("target"), **options)
        except ValueError as e:
            if not isinstance(e, Unservable): raise
            return HFModel.load(stored("target"), check=False, **options), f"refused: {e}"
    ours = [str(w.message) for w in said if str(w.message).startswith("model: got")]
    return model, ("warned: " + ours[0]) if ours else "served"


def rows_off(model, ctx):  # -> the largest deviation of the logits, the largest total variation
    "A tree of six nodes after `ctx`: its rows against a plain pass over each text"
    tree = Tree(ctx)
    for u, x in (0, 7), (0, 8), (1, 9), (2, 9), (2, 5), (5, 1): tree.add(u, x)
    got, want = model.logits(tree), [model.alone(tree.text(i)) for i in range(len(tree))]
    return max(abs(a - b).max() for a, b in zip(got, want)), max(map(far, got, want))


def far(a, b): return float(tv(warp(a), warp(b)))


def own_off(model, ctx):  # -> deviation
    "`generate`'s own two ways to the same row: one plain pass, and one token after a cached pass"
    return abs(model.alone(ctx) - model.decoded(ctx)).max()


def same_texts(model, texts):  # -> how many of `generate`'s own
    target = HFModel(model.model, temperature=0, check=False)
    draft, same = HFModel(raw_model("small"), check=False), 0
    for ctx in texts:
        ids = torch.tensor([ctx])
        own = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        out = list(generate(target, Chain(draft, 4), reject, ctx, own.shape[1] - len(ctx), Seeded(0)))
        same += out == own[0, len(ctx):].tolist()
    return same


def tried(options):  # -> dict
    try: model, answer = loaded(options)
    except Exception as e:
        return dict(check=f"not loaded: {type(e).__name__}: {' '.join(str(e).split())}"[:300])
    texts = prompts("english", TEXTS, seed=0)
    off, law = np.max([rows_off(model, ctx) for ctx in texts], 0)
    own = max(own_off(model, ctx) for ctx in texts)
    return dict(check=answer, logits_off=float(f"{off:.2g}"), law_off=float(f"{law:.2g}"),
                own_off=float(f"{own:.2g}"), same=same_texts(model, texts), of=TEXTS)


def main(*names):
    "Try each way; all of them are recorded. Full-precision weights must give `generate`'s own texts"
    torch.set_num_threads(1)
    found = {}
    for name in names or WAYS:
        with TemporaryDirectory() as folder: found[name] = tried(WAYS[name](folder))
        print(name, found[name], flush=True)
    got = dict(texts=TEXTS, tokens=TOKENS, ways=found)
    if not names: write_record(RECORD, "make compat-quantised", got, "accelerate", "bitsandbytes", "torchao")
    whole = [f for name, f in found.items() if name.startswith(("float32", "device_map"))]
    return any(f.get("same") != TEXTS for f in whole)


transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
logging.disable(logging.WARNING)
if __name__ == "__main__": sys.exit(main(*sys.argv[1:]))
