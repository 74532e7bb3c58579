"""Milliseconds of a forward pass (`make record-passes`): transformers, `LlamaPass` and its parts, with all
weights transposed, with all packed, and in bfloat16 where the processor has it; `CompiledPass`, also with
weights rounded to float16; and the pass as torch's AOTInductor compiles it, with a C++ compiler. A record has
one run for each kind of vectors that torch finds, which decide how the weights are stored"""
import json
from copy import deepcopy
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache

from specref.core.check import provenance_of_run, write_record
from specref.models import llama as module
from specref.models.compiled import CompiledPass
from specref.models.llama import LlamaPass, packed, transposed
from specref.models.recipe import llama
from specref.models.transformer import RowCache, given_cache

SHAPES = {"embedded target": (24, 192, 512, 512), "embedded small draft": (1, 256, 1024, 512),
          "Llama of 340 million": (24, 1024, 2816, 32000)}   # layers, width, MLP, vocabulary
CONTEXT, ROWS, COMMAND = 200, (1, 5, 25), "make record-passes"

def additive(m):  # -> (1, 1, m, CONTEXT + m), or None
    "The mask of a chain of m rows behind the context"
    hide = torch.full((m, CONTEXT + m), torch.finfo(torch.float32).min).triu(CONTEXT + 1)
    return None if m == 1 else hide[None, None]

def module_pass(model, m):  # -> a function without arguments
    "transformers' forward of m rows behind a context, with the cache of `CachedModel`"
    memory, ids = RowCache(), torch.arange(CONTEXT + m)[None] % model.config.vocab_size
    past = given_cache(model, memory)
    model(input_ids=ids[:, :CONTEXT], use_cache=True, **past)
    memory.n, at = CONTEXT, torch.arange(CONTEXT, CONTEXT + m)[None]
    given = dict(position_ids=at, attention_mask=additive(m), use_cache=True, **past)
    return lambda: model(input_ids=ids[:, CONTEXT:], **given).logits[0]

def joined_pass(net, m):
    "The same pass by `LlamaPass`"
    memory, V = net.memory(), len(net.embed)
    ids, at = torch.arange(CONTEXT + m) % V, torch.arange(CONTEXT + m)
    net(ids[:CONTEXT], at[:CONTEXT], memory, 1)
    memory.n, mask = CONTEXT, additive(m)
    mask = None if mask is None else mask.to(net.embed.dtype)
    return lambda: net(ids[CONTEXT:], at[CONTEXT:], memory, m, mask)

class FixedPass(torch.nn.Module):
    "The same pass for one number of rows, in operations that torch can export; plain heads, as in `SHAPES`"
    def __init__(self, model, m):
        super().__init__()
        self.inner, self.head = model.model, model.lm_head
        self.width, config = self.inner.layers[0].self_attn.head_dim, model.config
        rows = torch.randn(config.num_hidden_layers, config.num_key_value_heads, CONTEXT + m, self.width)
        turns = self.inner.rotary_emb(rows, torch.arange(CONTEXT, CONTEXT + m)[None])
        state = dict(keys=rows, values=rows.clone(), turns=torch.stack(turns)[:, 0, :, None])
        for name, x in (state | dict(seen=additive(m))).items(): self.register_buffer(name, x)
    def turned(self, x):
        a, b = x.chunk(2, -1)
        return x*self.turns[0] + torch.cat([-b, a], -1)*self.turns[1]
    def attend(self, i, attention, h):
        q, k, v = (f(h).unflatten(1, (-1, self.width)) for f in
                   (attention.q_proj, attention.k_proj, attention.v_proj))
        for memory, new in (self.keys, self.turned(k)), (self.values, v):
            memory[i, :, CONTEXT:] = new.transpose(0, 1)
        q = self.turned(q).transpose(0, 1)[None]
        y = F.scaled_dot_product_attention(q, self.keys[i, None], self.values[i, None], self.seen)
        return attention.o_proj(y[0].transpose(0, 1).flatten(1))
    def forward(self, ids):  # (m,) -> (m, V)
        x = self.inner.embed_tokens(ids)
        for i, layer in enumerate(self.inner.layers):
            x = x + self.attend(i, layer.self_attn, layer.input_layernorm(x))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.inner.norm(x))

def inductor_pass(model, m):  # -> the pass, seconds until it was compiled
    "The same pass by AOTInductor, its weights as constants of the compiled program"
    start, net = perf_counter(), FixedPass(model, m).eval()
    ids = torch.arange(CONTEXT, CONTEXT + m) % model.config.vocab_size
    with TemporaryDirectory() as folder, fresh_cache(), torch.inference_mode(False), torch.no_grad():
        exported = torch.export.export(deepcopy(net), (ids,))
        file = torch._inductor.aoti_compile_and_package(
            exported, package_path=f"{folder}/pass.pt2", inductor_configs=dict(freezing=True))
        made = torch._inductor.aoti_load_package(file)
    took = perf_counter() - start
    torch.testing.assert_close(made(ids), net(ids), rtol=1e-3, atol=1e-3)
    return partial(made, ids), took

def parts(net, m):  # -> {part: function}: what one layer does
    "The operations of one layer for m rows, timed alone; `products` read the weights of all layers in turn"
    x, width = torch.randn(m, net.embed.shape[1]), net.width
    a = torch.randn(m, net.heads + 2*net.groups, width)
    (cos, sin), t = net.turns[:m].unbind(1), a[:, :net.heads + net.groups]
    inner = net.layers[0].gate_up.shape[0] // 2
    rows, y = torch.randn(2*net.groups, CONTEXT + m, width), torch.randn(m, 2*inner)
    q, k, v = a[:, :net.heads].transpose(0, 1)[None], rows[None, :net.groups], rows[None, net.groups:]
    mask, norm, heads = additive(m), net.layers[0].norm, a[:, :net.heads].reshape(m, -1)
    def attention(): return F.scaled_dot_product_attention(q, k, v, mask)[0].transpose(0, 1).reshape(m, -1)
    def products():
        for layer in net.layers:
            layer.qkv(x), layer.out.add(x, heads), layer.gate_up(x), layer.down.add(x, y[:, :inner])
    return {"products": products, "two norms": lambda: (norm(x), norm(x)),
            "rotation": lambda: t.mul_(cos).addcmul_(t.roll(width // 2, -1), sin),
            "copy of k and v": lambda: rows[:, CONTEXT:].copy_(a[:, net.heads:].transpose(0, 1)),
            "attention": attention,
            "gate": lambda: F.silu(y[:, :inner]) * y[:, inner:]}

def medians(calls, laps):  # {name: function} -> {name: milliseconds}
    "The functions in turn; the first lap does not count"
    took = {name: [] for name in calls}
    for _ in range(laps + 1):
        for name, call in calls.items():
            start = perf_counter()
            call()
            took[name].append(1e3*(perf_counter() - start))
    return {name: float(np.median(times[1:])) for name, times in took.items()}

def many(call, n):
    for _ in range(n): call()

def bandwidth(size=2**27):  # -> bytes a second
    "The speed of reading a tensor that no cache holds"
    w = torch.ones(size // 4)
    return size / medians(dict(read=w.sum), 20)["read"] * 1e3

def contestants(model):  # -> {way of storing weights: pass}
    "`LlamaPass` as it is, with all weights stored in one way, and in bfloat16; `CompiledPass` in two types"
    nets = dict(ours=LlamaPass(model))
    for way, stored in dict(transposed=transposed, packed=packed).items():
        with patch.object(module, "stored_for", lambda weight, stored=stored: (stored(weight),)*2):
            nets[way] = LlamaPass(model)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported(): nets["bfloat16"] = LlamaPass(deepcopy(model).bfloat16())
    rounded = deepcopy(model).half().float()
    return nets | {"compiled": CompiledPass(model), "compiled, float16": CompiledPass(rounded)}

def measured_shape(name, shape, laps):  # -> rows
    "Every contestant at every number of rows"
    torch.manual_seed(0)
    model = llama(*shape).eval()
    nets = contestants(model)
    net = nets["ours"]
    size = prod(net.head.shape) + sum(
        prod(w.shape) for x in net.layers for w in (x.qkv, x.out, x.gate_up, x.down))
    for m in ROWS:
        calls = dict(transformers=module_pass(model, m)) | {k: joined_pass(x, m) for k, x in nets.items()}
        calls["AOTInductor"], built = inductor_pass(model, m)
        runs = {part: 1 if part == "products" else 50 for part in parts(net, m)}
        alone = {part: partial(many, call, runs[part]) for part, call in parts(net, m).items()}
        layer = {part: ms / (len(net.layers) if part == "products" else 50)
                 for part, ms in medians(alone, laps).items()}
        yield dict(model=name, rows=m, **medians(calls, laps), layer=layer, layers=len(net.layers),
                   weight_bytes=4*size, seconds_of_inductor=built)

def measure_passes(path, laps=40, threads=1):
    "Medians over paired laps, written to `path` beside the runs on processors of other kinds"
    torch.set_num_threads(threads)
    with torch.inference_mode():
        rows = [row for name, shape in SHAPES.items() for row in measured_shape(name, shape, laps)]
        run = provenance_of_run(COMMAND, threads=threads, laps=laps, context=CONTEXT,
                                read_bytes_per_second=bandwidth(), rows=rows)
    others = json.loads(path.read_text())["runs"] if path.exists() else {}
    write_record(path, COMMAND, dict(runs=others | {torch.backends.cpu.get_cpu_capability(): run}))

if __name__ == "__main__": measure_passes(Path(__file__).with_suffix(".json"))
