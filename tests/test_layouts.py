"34a_layouts: round trips, checkpoints with public names alone, and invalid checkpoints"
import json
from copy import deepcopy

import numpy as np, pytest, torch
from gguf import GGUFReader
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from helpers import examples, proves, refuses
from networks import small_llama
from specref.models.embedded import raw_model, tokenizer
from specref.train import checkpoints
from specref.train.checkpoints import (EMBEDDING_NAME, LAYOUTS, Constant, Field, add_vocabulary, convert,
                                       fill_form, from_folder, from_layout, neighbours, read_form, to_folder,
                                       to_gguf, to_layout)
from specref.train.diffusion import DFlash
from specref.train.eagle import Eagle
from specref.train.eagle3 import Eagle3, Hass, vocab_maps
from specref.train.features import DraftLayer
from specref.train.harness import TargetModel, StateDataset, load_checkpoint, save_network
from specref.train.medusa import Medusa
from specref.train.registry import load_drafter

every = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
three = pytest.mark.parametrize("layout", [l for l in LAYOUTS.values() if l.make is Eagle3],
                                ids=lambda l: l.name)
layered = pytest.mark.parametrize("layout", [l for l in LAYOUTS.values() if l.make is not Medusa],
                                  ids=lambda l: l.name)

def tiny(V=24, heads=4, kv=2, size=4, L=6, seed=0, **more):
    return small_llama(V, heads*size, L, seed, heads, kv, **more)

def random(make, base, seed=1, **how):
    "An untrained network, all weights perturbed"
    torch.manual_seed(seed)
    net = make(base, **how)
    with torch.no_grad():
        for w in net.parameters(): w.add_(.3*torch.randn_like(w))
    return net.eval()

def on_some_tokens(base, draft, seed=1, **how):
    "An EAGLE-3 on `draft` random tokens"
    ids = torch.randperm(base.V, generator=torch.Generator().manual_seed(seed))[:draft].sort().values
    return random(Eagle3, base, seed, draft=draft, **how).set_draft_vocab(ids)

def example(layout, base, seed=1):
    "A network that the layout can express"
    return {Medusa: lambda: random(Medusa, base, seed, heads=2),
            DFlash: lambda: random(DFlash, base, seed, layers=1, inner=20, mask_token=3),
            Eagle: lambda: random(Eagle, base, seed, inner=20),
            Eagle3: lambda: on_some_tokens(base, base.V//2, seed, inner=20)}[layout.make]()

@torch.inference_mode()
def logits_of(net, base, T=9, depth=3):
    "Logits of a network at every place of two texts, three tokens deep"
    x = torch.randint(base.V, (2, T), generator=torch.Generator().manual_seed(5))
    states = base.model(input_ids=x, output_hidden_states=True).hidden_states
    return net.guesses(StateDataset(x, {k: h.clone() for k, h in enumerate(states)}), depth)

def equal(a, b): return len(a) == len(b) and all(map(torch.equal, a, b))

# Round trips

@proves("prop-back")
@examples(5, st.integers(0, 10**6), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)]),
          st.sampled_from([2, 4, 6]), st.integers(2, 30), st.integers(5, 8), st.data())
def test_round_trip(seed, heads, size, V, L, data):
    "Every layout, targets of every size: the same weights, names and logits, bit for bit, through JSON"
    base = TargetModel(tiny(V, *heads, size, L, seed))
    for layout in LAYOUTS.values():
        heads, draft = data.draw(st.integers(1, 4)), data.draw(st.integers(1, V))
        inner, make = data.draw(st.sampled_from([None, 3])), data.draw(st.sampled_from([Eagle, Hass]))
        net = {Medusa: lambda: random(Medusa, base, seed, heads=heads),
               DFlash: lambda: random(DFlash, base, seed, block=heads + 1, layers=heads, inner=inner,
                                      reads=range(1, heads + 1), mask_token=draft - 1),
               Eagle: lambda: random(make, base, seed, inner=inner),
               Eagle3: lambda: on_some_tokens(base, draft, seed, inner=inner)}[layout.make]()
        weights, config = to_layout(net, layout, "who")
        back = from_layout(weights, json.loads(json.dumps(config)), layout, base)
        assert back.state_dict().keys() == net.state_dict().keys()
        assert equal(list(back.state_dict().values()), list(net.state_dict().values()))
        assert equal(logits_of(net, base), logits_of(back, base))
        again = to_layout(back, layout, "who")
        assert again[1] == config and all(torch.equal(weights[k], w) for k, w in again[0].items())

@pytest.mark.parametrize("layout", ["specforge", "speculators/eagle3"])
@examples(8, st.lists(st.integers(0, 5), min_size=1, max_size=4),
          st.sampled_from([{}, dict(fc_norm=True), dict(norm_before_fc=True)]), st.booleans(), st.booleans())
def test_switches_and_layers(layout, reads, norms, norm_output, norm_before_residual):
    """The layers read and the switches are restored: EAGLE-3.1's in both layouts, those of the residual
    stream and of the norm before the fusion in the layout of `speculators` alone"""
    base, layout = TargetModel(tiny()), LAYOUTS[layout]
    net = on_some_tokens(base, 10, reads=tuple(reads), norm_output=norm_output,
                         norm_before_residual=norm_before_residual, **norms)
    foreign = norm_before_residual or "norm_before_fc" in norms
    if foreign and layout.name == "specforge": return refuses("net", to_layout, net, layout)
    back = from_layout(*to_layout(net, layout), layout, base)
    assert back.reads == tuple(reads) and equal(logits_of(net, base), logits_of(back, base))
    assert back.norm_before_residual == norm_before_residual
    net.norm_before_residual ^= True   # the same weights, the other stream
    assert not equal(logits_of(net, base), logits_of(back, base))

# The public names, from public code, without our writer

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")

def layer(at, norms):
    parts = [*(f"self_attn.{k}" for k in ATTENTION), *(f"mlp.{k}" for k in MLP), *norms]
    return [f"{at}{part}.weight" for part in parts]

WIDE = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
QWEN3 = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")
PUBLIC = {"medusa": [f"{k}.{x}" for k in (0, 1) for x in ("0.linear.weight", "0.linear.bias", "1.weight")],
          "eagle": ["embed_tokens.weight", "fc.weight", "fc.bias",
                    *layer("layers.0.", ("post_attention_layernorm",))],
          "eagle3": ["fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *layer("midlayer.", WIDE)],
          "speculators/eagle": ["fusion_fc.weight", "fusion_fc.bias",
                                *layer("transformer.", ("post_attention_layernorm",))],
          "speculators/eagle3": ["embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t",
                                 "t2d", *layer("layers.0.", WIDE)],
          "dflash": ["fc.weight", "hidden_norm.weight", "norm.weight", *layer("layers.0.", QWEN3),
                     *layer("layers.1.", QWEN3)]}
PUBLIC["specforge"] = PUBLIC["eagle3"]

# a decoder layer whose heads and rotation are not the target's
D, HEADS, KV, INNER, V, SHORT = 16, 2, 1, 12, 24, 9
LAYER = dict(model_type="llama", hidden_act="silu", hidden_size=D, intermediate_size=INNER,
             num_attention_heads=HEADS, num_key_value_heads=KV, num_hidden_layers=1, rms_norm_eps=1e-5,
             rope_theta=30., max_position_embeddings=2048, vocab_size=V, bos_token_id=1, eos_token_id=2,
             pad_token_id=0, tie_word_embeddings=False, torch_dtype="float16", use_cache=True,
             transformers_version="4.28.1")
VERIFIER = dict(algorithm="eagle3", default_proposal_method="greedy",
                proposal_methods=[dict(proposal_type="greedy", speculative_tokens=3)],
                verifier=dict(name_or_path="some/target", architectures=["LlamaForCausalLM"]))
CONFIG = {"medusa": dict(base_model_name_or_path="some/target", medusa_num_heads=2, medusa_num_layers=1,
                         transformers_version="4.31.0"),
          "eagle": LAYER, "eagle3": LAYER | dict(draft_vocab_size=SHORT),
          "specforge": LAYER | dict(draft_vocab_size=SHORT, architectures=["LlamaForCausalLMEagle3"],
                                    eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 2],
                                                      use_aux_hidden_state=True)),
          "speculators/eagle": dict(speculators_model_type="eagle", speculators_version="0.1.0",
                                    fusion_bias=True, layernorms=False,
                                    transformer_layer_architecture="LlamaDecoderLayer",
                                    transformer_layer_config=LAYER,
                                    speculators_config=VERIFIER | dict(algorithm="eagle")),
          "speculators/eagle3": dict(speculators_model_type="eagle3", speculators_version="0.1.0.dev14",
                                     draft_vocab_size=SHORT, norm_before_residual=False,
                                     target_hidden_size=None, transformer_layer_config=LAYER,
                                     speculators_config=VERIFIER),
          "dflash": LAYER | dict(architectures=["DFlashDraftModel"], model_type="qwen3", attention_bias=False,
                                 num_hidden_layers=2, num_target_layers=6, block_size=4, is_causal=False,
                                 sliding_window=None, use_sliding_window=False,
                                 layer_types=["full_attention"]*2,
                                 dflash_config=dict(mask_token_id=22, target_layer_ids=[0, 2, 4]))}
IDS = torch.tensor([0, 1, 3, 7, 8, 11, 15, 20, 23])

def published(name, *more):
    "A checkpoint drawn under its public names and `more`: shapes as in the public code"
    g, head = torch.Generator().manual_seed(3), D//HEADS
    three, wide = "fusion_fc.weight" not in PUBLIC[name] and "eagle" != name, D
    if "lm_head.weight" in PUBLIC[name]: wide = 2*D
    shapes = {"q_proj": (HEADS*head, wide), "k_proj": (KV*head, wide), "v_proj": (KV*head, wide),
              "o_proj": (D, HEADS*head), "gate_proj": (INNER, D), "up_proj": (INNER, D),
              "down_proj": (D, INNER), "fc": (D, 3*D if three else 2*D), "fusion_fc": (D, 2*D),
              "lm_head": (SHORT, D), "linear": (D, D), "1": (V, D), "q_norm": (head,), "k_norm": (head,),
              "input_norm": (3*D,)}
    maps = {"d2t": IDS - torch.arange(SHORT), "t2d": torch.isin(torch.arange(V), IDS)}
    def drawn(k):
        shape = shapes.get(k.split(".")[-2], (D,)) if k.endswith("weight") else (D,)
        return torch.randn(*shape, generator=g, dtype=torch.float64)
    return {k: maps[k] if k in maps else drawn(k) for k in (*PUBLIC[name], *more) if k != EMBEDDING_NAME}

def attention(w, at, u, kind=LlamaAttention, later=float("-inf")):
    "transformers' own attention with a checkpoint's weights on rows u, causal unless `later` is 0"
    own = {k: v for k, v in LAYER.items() if k not in ("model_type", "torch_dtype", "transformers_version")}
    config = LlamaConfig(**own, layer_types=["full_attention"], attn_implementation="eager")
    a, T = kind(config, 0).double(), u.shape[1]
    for k in ATTENTION:
        setattr(a, k, nn.Linear(1, 1, bias=False))
        getattr(a, k).weight = nn.Parameter(w[f"{at}self_attn.{k}.weight"])
    for k in ("q_norm", "k_norm") if kind is Qwen3Attention else ():
        getattr(a, k).weight = nn.Parameter(w[f"{at}self_attn.{k}.weight"])
    turn = LlamaRotaryEmbedding(config)(u, torch.arange(T)[None])
    mask = torch.full((1, 1, T, T), later, dtype=u.dtype).triu(1)
    return a(u, position_embeddings=turn, attention_mask=mask)[0]

def normed(w, x, eps=1e-5): return w * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

def onward(w, at, h):
    m = normed(w[f"{at}post_attention_layernorm.weight"], h)
    gate, up, down = (w[f"{at}mlp.{k}.weight"].T for k in MLP)
    return h + (F.silu(m @ gate) * (m @ up)) @ down

def medusa(w, e, h, base):
    return h[6] + F.silu(h[6] @ w["0.0.linear.weight"].T + w["0.0.linear.bias"]), w["0.1.weight"]

def eagle(w, e, h, base, fc="fc", at="layers.0."):
    u = torch.cat([e, h[6][:, :-1]], -1) @ w[f"{fc}.weight"].T + w.get(f"{fc}.bias", 0)
    return onward(w, at, u + attention(w, at, u)), base.head.weight

def eagle3(w, e, h, base, at="midlayer.", reads=(2, 3, 3), before=False):
    read = torch.cat([h[k][:, :-1] for k in reads], -1)
    g = (normed(w["input_norm.weight"], read) if "input_norm.weight" in w else read) @ w["fc.weight"].T
    m = normed(w[f"{at}hidden_norm.weight"], g)
    u = torch.cat([normed(w[f"{at}input_layernorm.weight"], e), m], -1)
    out = onward(w, at, (m if before else g) + attention(w, at, u))
    return normed(w["norm.weight"], out), w["lm_head.weight"]

def dflash(w, e, h, base):
    "A block behind every token: its rows attend to the features of all tokens before it, and to each other"
    c = normed(w["hidden_norm.weight"], torch.cat([h[k + 1] for k in (0, 2, 4)], -1) @ w["fc.weight"].T)
    masks = base.embed(torch.tensor([[22]*3]))
    def first_slot(a):
        rows = torch.cat([e[:, a-1:a], masks], 1)
        for at in ("layers.0.", "layers.1."):
            u = torch.cat([c[:, :a], normed(w[f"{at}input_layernorm.weight"], rows)], 1)
            rows = onward(w, at, rows + attention(w, at, u, Qwen3Attention, 0.)[:, a:])
        return normed(w["norm.weight"], rows[:, 1:2])
    return torch.cat([first_slot(a) for a in range(1, e.shape[1] + 1)], 1), base.head.weight

WAYS = {"dflash": dflash, "medusa": medusa, "eagle": eagle, "eagle3": eagle3, "specforge": eagle3,
        "speculators/eagle": lambda *a: eagle(*a, "fusion_fc", "transformer."),
        "speculators/eagle3": lambda *a, **kw: eagle3(*a, "layers.0.", **kw)}

NORMS = dict(norm_before_residual=True), dict(norm_before_fc=True)   # switches of `speculators`

@pytest.mark.parametrize("layout, more", [*((l, {}) for l in LAYOUTS.values()),
                                          *((LAYOUTS["speculators/eagle3"], more) for more in NORMS)],
                         ids=[*LAYOUTS, "the normed stream", "the normed states"])
def test_published(layout, more):
    """A checkpoint of public names alone is read as the network that its public code describes, with its own
    heads, norm and rotation, and is written under the same names"""
    base, names = TargetModel(tiny(V)), ["input_norm.weight"]*("norm_before_fc" in more)
    w = published(layout.name, *names)
    net = from_layout(w, CONFIG[layout.name] | more, layout, base)
    x = torch.randint(V, (1, 10), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        h = base.model(input_ids=x, output_hidden_states=True).hidden_states
        before = dict(before=True) if "norm_before_residual" in more else {}
        f, head = WAYS[layout.name](w, base.embed(x[:, 1:]), h, base, **before)
        z = net.guesses(StateDataset(x, dict(enumerate(h))), 1)[0]
        z = z[..., IDS] if layout.make is Eagle3 else z
    assert (z - f @ head.T).abs().max() < 1e-5 * z.abs().max()   # norms count in single precision
    assert sorted(to_layout(net, layout)[0]) == sorted([*PUBLIC[layout.name], *names])

def with_layer(config, entries):
    "The configuration with other entries for its decoder layer"
    inside = "transformer_layer_config"
    return config | ({inside: config[inside] | entries} if inside in config else entries)

def without(entries, *names): return {k: v for k, v in entries.items() if k not in names}

def layer_config(net): return next(m for m in net.modules() if isinstance(m, DraftLayer)).self_attn.config

@layered
def test_the_layer_is_that_of_the_file(layout):
    "Heads, norm and rotation are read and written; without a `rope_theta` it is 10,000, not the target's"
    base, config = TargetModel(tiny(V)), CONFIG[layout.name]
    net = from_layout(published(layout.name), config, layout, base)
    out = to_layout(net, layout)[1]
    there, given = (c.get("transformer_layer_config", c) for c in (out, config))
    assert {k: there[k] for k in there if k in LAYER} == {k: given[k] for k in there if k in LAYER}
    bare = without(config, "rope_theta")
    if "transformer_layer_config" in config: bare["transformer_layer_config"] = without(LAYER, "rope_theta")
    other = from_layout(published(layout.name), bare, layout, base)
    assert layer_config(other).rope_parameters["rope_theta"] == 10000
    assert not equal(logits_of(net, base), logits_of(other, base))

@layered
def test_a_layer_unlike_the_targets_is_restored(layout, tmp_path):
    "Saved and loaded in our own format, heads, norm and rotation are the same; it can be written again"
    base, scaling = TargetModel(tiny(V)), dict(rope_type="linear", factor=2.)
    weights = published(layout.name)
    for k, w in weights.items():
        if w.is_floating_point(): weights[k] = w.half().double()
    net = from_layout(weights, with_layer(CONFIG[layout.name], dict(rope_scaling=scaling)), layout, base)
    save_network(net, base, tmp_path)
    back = load_checkpoint(layout.make, base, tmp_path)
    assert equal(logits_of(net, base), logits_of(back, base))
    assert to_layout(back, layout)[1] == to_layout(net, layout)[1]
    numbers = json.loads((tmp_path/"config.json").read_text())["layer"]
    assert (numbers["rope_scaling"], numbers["num_attention_heads"]) == (scaling, HEADS)

def test_two_ways_to_state_a_rotation():
    "`rope_theta` with `rope_scaling`, or `rope_parameters`: the same rotation"
    base, layout, w = TargetModel(tiny(V)), LAYOUTS["eagle"], published("eagle")
    linear = dict(rope_type="linear", factor=2.)
    old = LAYER | dict(rope_scaling=linear)
    new = without(LAYER, "rope_theta") | dict(rope_parameters=linear | dict(rope_theta=30.))
    a, b, plain = (from_layout(w, config, layout, base) for config in (old, new, LAYER))
    assert equal(logits_of(a, base), logits_of(b, base))
    assert not equal(logits_of(a, base), logits_of(plain, base))
    back = from_layout(*to_layout(a, layout), layout, base)
    assert layer_config(back).rope_parameters["factor"] == 2
    assert linear == dict(rope_type="linear", factor=2.)

# What may be missing

@pytest.mark.parametrize("name, flag", [("eagle", "bias"), ("speculators/eagle", "fusion_bias")])
def test_no_bias(name, flag):
    "A checkpoint without a bias is read with a bias of zero; if its configuration has one, it is refused"
    base, layout = TargetModel(tiny(V)), LAYOUTS[name]
    w = {k: v for k, v in published(name).items() if not k.endswith("bias")}
    assert not from_layout(w, CONFIG[name] | {flag: False}, layout, base).fc.bias.any()
    with pytest.raises(ValueError, match=r"weights: without \w*fc.bias"):
        from_layout(w, CONFIG[name] | {flag: True}, layout, base)

@three
def test_all_tokens_need_no_maps(layout):
    "A draft vocabulary with all tokens needs neither map; any other needs both"
    base = TargetModel(tiny())
    for draft in (24, 23):
        net = on_some_tokens(base, draft)
        weights, config = to_layout(net, layout)
        bare = {k: w for k, w in weights.items() if k not in ("d2t", "t2d")}
        if draft < 24: refuses("weights", from_layout, bare, config, layout, base)
        else: assert equal(logits_of(from_layout(bare, config, layout, base), base), logits_of(net, base))

@layered
def test_copy_of_the_embedding(layout):
    "A copy of the target's embedding may be there, in its own precision, or not; another one is refused"
    base = TargetModel(tiny())
    weights, config = to_layout(example(layout, base), layout)
    less = {k: w for k, w in weights.items() if k != EMBEDDING_NAME}
    for copy in ({}, {EMBEDDING_NAME: base.embed.weight.detach()},
                 {EMBEDDING_NAME: base.embed.weight.detach().half()}):
        assert EMBEDDING_NAME not in from_layout(less | copy, config, layout, base).state_dict()
    with pytest.raises(ValueError, match="embed_tokens.weight that differs from the target's"):
        from_layout(less | {EMBEDDING_NAME: base.embed.weight.detach() + 1}, config, layout, base)

# The two maps

@proves("prop-twice")
@examples(25, st.integers(1, 12), st.data())
def test_the_maps_determine_each_other(V, data):
    "They determine each other, and tokens instead of offsets contradict `t2d`, for two tokens or more"
    ids = torch.tensor(sorted(data.draw(st.sets(st.integers(0, V - 1), min_size=1))))
    d2t, t2d = vocab_maps(ids, V)
    assert torch.equal(t2d.nonzero().flatten() - torch.arange(len(ids)), d2t)
    wrong = ids + torch.arange(len(ids))
    assert len(ids) < 2 or wrong[-1] >= V or not t2d[wrong[-1]]

@three
@settings(max_examples=4)
@given(n=st.integers(2, 24), data=st.data())
def test_inconsistent_maps(layout, n, data):
    "Tokens in d2t, a token too many or too few in t2d, another order: refused on reading and on writing"
    base = TargetModel(tiny())
    net = on_some_tokens(base, n, seed=data.draw(st.integers(0, 99)))
    weights, config = to_layout(net, layout)
    j, x = data.draw(st.integers(0, 23)), net.ids
    flipped, order = weights["t2d"].clone(), x.flip(0) - torch.arange(n)
    flipped[j] ^= True
    for bad in ({"d2t": x}, {"t2d": flipped}, {"d2t": order}, {"d2t": weights["d2t"] - 24}):
        with pytest.raises(ValueError, match="^weights: got (d2t|t2d)"):
            from_layout(weights | bad, config, layout, base)
    net.t2d[j] ^= True
    with pytest.raises(ValueError, match="^weights: got (d2t|t2d)"): to_layout(net, layout)

# Refused

@every
def test_refused_weights(layout):
    "A missing name, an unknown one, another shape: refused by the public name"
    base = TargetModel(tiny())
    weights, config = to_layout(example(layout, base), layout)
    for k in weights.keys() - {EMBEDDING_NAME}:
        with pytest.raises(ValueError, match=f"^weights: without {k}$"):
            from_layout({j: w for j, w in weights.items() if j != k}, config, layout, base)
        with pytest.raises(ValueError, match=f"^weights: got {k} of shape"):
            from_layout(weights | {k: weights[k][..., :-1]}, config, layout, base)
    with pytest.raises(ValueError, match="^weights: with an unknown layers.1.mlp.up_proj.weight$"):
        from_layout(weights | {"layers.1.mlp.up_proj.weight": torch.zeros(2)}, config, layout, base)

@every
def test_refused_targets(layout):
    "Another hidden size, vocabulary, number of layers or head is refused; without our entry, not all of them"
    base = TargetModel(tiny())
    weights, config = to_layout(example(layout, base), layout)
    foreign = {k: v for k, v in config.items() if k != "specref"}
    for other in (tiny(heads=2), tiny(V=25), tiny(L=7), tiny(seed=9)):
        refuses("(config|target|weights)", from_layout, weights, config, layout, TargetModel(other))
    for other in (tiny(heads=2), tiny(V=25)):
        refuses("(config|weights)", from_layout, weights, foreign, layout, TargetModel(other))
    if EMBEDDING_NAME not in weights: from_layout(weights, foreign, layout, TargetModel(tiny(seed=9)))

LESS = {"medusa": [dict(medusa_num_layers=2), dict(medusa_num_heads=3), dict(medusa_num_heads=0)],
        "flat": [dict(num_hidden_layers=2), dict(hidden_act="gelu"), dict(attention_bias=True),
                 dict(mlp_bias=True), dict(model_type="gpt2"), dict(hidden_size=8), dict(vocab_size=25),
                 dict(vocab_size=None), dict(intermediate_size=99), dict(rope_scaling="twice"),
                 dict(num_attention_heads=3, head_dim=None, num_key_value_heads=None),
                 dict(use_sliding_window=True)],
        "three": [dict(draft_vocab_size=11), dict(draft_vocab_size=25), dict(target_hidden_size=99),
                  dict(norm_before_fc=True), dict(fc_norm=True)],
        "eagle": [], "speculators/eagle": [dict(layernorms=True)],
        "dflash": [dict(is_causal=True), dict(num_target_layers=7), dict(dflash_config=None),
                   *(dict(dflash_config=dict(mask_token_id=3, target_layer_ids=[1, 2, 3]) | bad) for bad in (
                       dict(causal=True), dict(use_swa=True), dict(final_logit_softcapping=20.),
                       dict(output_multiplier=.2), dict(block_size=1), dict(mask_token_id=24),
                       dict(mask_token_id=None), dict(target_layer_ids=[1, 2]),
                       dict(target_layer_ids=[1, 2, 5])))],
        "eagle3": [dict(norm_before_residual=True), dict(norm_output=True),
                   dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2])),
                   dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2])],
        "specforge": [dict(norm_before_residual=True), dict(eagle_config=dict(use_aux_hidden_state=False)),
                      dict(eagle_config=[1]),
                      dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 6])),
                      dict(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 2, 5]))],
        "speculators/eagle3": [dict(speculators_model_type="eagle"),
                               dict(eagle_aux_hidden_state_layer_ids=[1, 2]),
                               dict(eagle_aux_hidden_state_layer_ids=[1, 2, 6]),
                               dict(eagle_aux_hidden_state_layer_ids=["a", "b", "c"])]}

@every
def test_refused_configurations(layout):
    "A configuration of another network is refused, one entry at a time"
    base = TargetModel(tiny())
    weights, config = to_layout(example(layout, base), layout)
    from_layout(weights, config, layout, base)
    flat = [with_layer(config, bad) for bad in LESS["flat"]*(layout.make is not Medusa)]
    other = [config | bad for bad in [*LESS["three"]*(layout.make is Eagle3), *LESS[layout.name]]]
    for bad in [*flat, *other]:
        refuses("(config|weights|reads|heads|ids|draft|block|mask_token)",
                from_layout, weights, bad, layout, base)

def test_refused_networks():
    "What a layout cannot express is not written: another class, other layers, switches, the last state"
    base = TargetModel(tiny())
    refuses("net", to_layout, random(Medusa, base), LAYOUTS["eagle"])
    refuses("net", to_layout, random(Eagle, base), LAYOUTS["eagle3"])
    for other in (dict(reads=(1, 2, 3)), dict(fc_norm=True), dict(norm_output=True)):
        refuses("net", to_layout, on_some_tokens(base, 9, **other), LAYOUTS["eagle3"])
    refuses("reads", to_layout, on_some_tokens(base, 9, reads=(1, 2, 6)), LAYOUTS["specforge"])
    refuses("net", to_layout, random(DFlash, base), LAYOUTS["dflash"])

@pytest.mark.parametrize("above, inside, block", [(6, {}, 6), (None, dict(block_size=6), 6), (None, {}, 16),
                                                  (8, dict(block_size=6), 6)])
def test_the_block_of_dflash(above, inside, block):
    "Its size stands at the top or in `dflash_config`, which counts where they differ; written to both"
    base, config = TargetModel(tiny(V)), CONFIG["dflash"] | dict(block_size=above)
    config["dflash_config"] = config["dflash_config"] | inside
    net = from_layout(published("dflash"), config, LAYOUTS["dflash"], base)
    out = to_layout(net, LAYOUTS["dflash"])[1]
    assert net.block == out["block_size"] == out["dflash_config"]["block_size"] == block

# Forms

known = st.fixed_dictionaries(dict(a=st.integers(), b=st.lists(st.integers(), max_size=3).map(tuple),
                                   c=st.text(max_size=3)))

@examples(25, known, st.integers(0, 2))
def test_a_form_is_read_as_it_was_filled_in(facts, first):
    "Filling in and reading are inverse to each other, nested or not, with lists that count from any number"
    assert read_form({"a": Field("x", 5), "b": 1}, {}) == {"x": 5}
    refuses("config", read_form, {"a": Field("x")}, {})
    form = {"x": Field("a"), "same": 3, "in": {"y": Field("b", first=first), "z": Field("c")},
            "by": Constant("us"), "no": None}
    config = json.loads(json.dumps(fill_form(form, facts)))
    assert read_form(form, config) == facts and "no" not in config and config["by"] == "us"
    assert config["in"]["y"] == [k - first for k in facts["b"]]
    assert read_form(form, config | {"by": "others", "no": False, "more": 1}) == facts
    for bad in ({"same": 4}, {"no": 1}, {"x": None}, {"in": 7}, {"in": {}}):
        refuses("config", read_form, form, config | bad)

# Files

@every
def test_folders(layout, tmp_path):
    "Round trip through files; the first public file name; an old binary file is read as well"
    base = TargetModel(tiny())
    net = example(layout, base)
    to_folder(net, layout, tmp_path/"a"/"b", "who")
    folder = tmp_path/"a"/"b"
    assert sorted(f.name for f in folder.iterdir()) == sorted(["config.json", layout.files[0]])
    assert [f.name for f in folder.parent.iterdir()] == ["b"]
    assert equal(logits_of(net, base), logits_of(from_folder(folder, layout, base), base))
    torch.save(load_file(folder/layout.files[0]), folder/layout.files[1])
    (folder/layout.files[0]).unlink()
    assert equal(logits_of(net, base), logits_of(from_folder(folder, layout, base), base))

def test_no_partial_folder_is_left(tmp_path, monkeypatch):
    "An invalid network, or an interruption at either file, leaves no folder"
    base, layout = TargetModel(tiny()), LAYOUTS["eagle3"]
    net = on_some_tokens(base, 9)
    refuses("net", to_folder, on_some_tokens(base, 9, reads=(1, 2, 3)), layout, tmp_path/"x")
    assert not list(tmp_path.iterdir())
    for name in ("save_file", "json"):
        with monkeypatch.context() as m:
            m.setattr(checkpoints, name, None)   # fails when it is reached
            with pytest.raises((TypeError, AttributeError)): to_folder(net, layout, tmp_path/"x")
        assert not (tmp_path/"x").exists()
    to_folder(net, layout, tmp_path/"x")
    assert [f.name for f in tmp_path.iterdir()] == ["x"]
    before = {f.name: f.read_bytes() for f in (tmp_path/"x").iterdir()}
    refuses("folder", to_folder, on_some_tokens(base, 9, seed=2), layout, tmp_path/"x")
    assert before == {f.name: f.read_bytes() for f in (tmp_path/"x").iterdir()}

def test_broken_folders(tmp_path):
    "No folder, a file that is missing, cut off, or no configuration: a ValueError about the folder"
    base, layout = TargetModel(tiny()), LAYOUTS["eagle"]
    refuses("folder", from_folder, tmp_path/"none", layout, base)
    net, broken = random(Eagle, base), [("config.json", None), ("config.json", b"{"), ("config.json", b"[1]"),
                                        ("model.safetensors", None), ("model.safetensors", b"half")]
    for k, (name, content) in enumerate(broken):
        to_folder(net, layout, tmp_path/str(k))
        file = tmp_path/str(k)/name
        if content is None: file.unlink()
        else: file.write_bytes(content)
        refuses("folder", from_folder, tmp_path/str(k), layout, base)

# Files for llama.cpp

def score(q, k, places, at):
    "The attention score of whole numbers at two positions: the pairs at `places` turn by (3, 4), (4, 3)"
    turn = np.array([3+4j, 4+3j])
    first, second = ((x[places[0]] + 1j*x[places[1]])*np.prod([turn]*n, 0) for x, n in zip((q, k), at))
    return (first*second.conj()).sum().real

HALVES, BESIDE = np.array([[0, 1], [2, 3]]), np.array([[0, 2], [1, 3]])
head = st.lists(st.integers(-9, 9), min_size=4, max_size=4).map(np.array)

@proves("prop-neighbours")
@given(head, head, st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_rows_of_neighbours_have_the_scores_of_halves(q, k, at):
    "In whole numbers; and without the other order a score changes"
    moved = [neighbours(torch.tensor(x), 1).numpy() for x in (q, k)]
    assert score(*moved, BESIDE, at) == score(q, k, HALVES, at)
    one = np.array([1, 2, 3, 4])
    assert score(one, one, HALVES, (1, 2)) != score(one, one, BESIDE, (1, 2))

def in_gguf(name, folder):  # -> entries, tensors
    convert(name, "gguf", folder/name)
    file = GGUFReader(folder/name/"model.gguf")
    tensors = {t.name: np.array(t.data) for t in file.tensors}
    return {k: f.contents() for k, f in file.fields.items()}, tensors

def test_a_target_for_llama_cpp(tmp_path):
    "Entries, vocabulary, and the order of queries and keys; a tied head is stored once"
    own, (facts, w) = raw_model("small").state_dict(), in_gguf("small", tmp_path)
    assert facts["general.architecture"] == "llama" and "output.weight" not in w
    sizes = "block_count", "context_length", "vocab_size"
    assert [facts[f"llama.{name}"] for name in sizes] == [1, 512, 512]
    assert facts["tokenizer.ggml.tokens"] == tokenizer().convert_ids_to_tokens(range(512))
    assert facts["tokenizer.ggml.token_type"][:2] == [3, 1] and facts["tokenizer.ggml.eos_token_id"] == 0
    assert np.array_equal(w["token_embd.weight"], own["model.embed_tokens.weight"])
    size = facts["llama.attention.key_length"]
    for ours, theirs in ("q_proj", "attn_q"), ("k_proj", "attn_k"):
        rows = own[f"model.layers.0.self_attn.{ours}.weight"].numpy()
        assert np.array_equal(w[f"blk.0.{theirs}.weight"][:4], rows[[0, size//2, 1, size//2 + 1]])

def test_drafters_for_llama_cpp(tmp_path):
    "Entries and names; rows are moved for EAGLE-3 and not for DSpark; `d2t` has tokens, not offsets"
    net, (facts, w) = load_drafter("eagle3").net, in_gguf("eagle3", tmp_path)
    assert facts["eagle3.target_layers"] == list(net.reads) and facts["eagle3.norm_before_residual"] is False
    assert np.array_equal(w["d2t"], np.flatnonzero(net.t2d)) and len(w) == len([*net.parameters()]) + 1
    assert np.array_equal(w["blk.0.attn_norm_2.weight"], net.midlayer.hidden_norm.weight.detach())
    assert np.array_equal(w["blk.0.attn_q.weight"][1], net.midlayer.self_attn.q_proj.weight[16].detach())
    net, (facts, w) = load_drafter("dspark").net, in_gguf("dspark", tmp_path)
    assert facts["dflash.block_size"] == net.block and facts["dflash.attention.causal"] is False
    assert facts["tokenizer.ggml.mask_token_id"] == net.mask_token and len(w) == len([*net.parameters()])
    assert np.array_equal(w["blk.1.attn_k.weight"], net.decoder[1].self_attn.k_proj.weight.detach())
    assert np.array_equal(w["markov_w2.weight"], net.W2.weight.detach())

def test_what_llama_cpp_does_not_read(tmp_path):
    "A network without an architecture, a switch, a rotation, an activation, a tokenizer; a target elsewhere"
    base, other = TargetModel(tiny()), deepcopy(tokenizer())
    other.backend_tokenizer.pre_tokenizer = Whitespace()
    cases = {"wanted one that llama.cpp reads: LlamaForCausalLM": example(LAYOUTS["medusa"], base),
             "norm_output": on_some_tokens(base, 9, fc_norm=True, norm_output=True),
             "for which eagle3 has no name": on_some_tokens(base, 9, norm_before_fc=True),
             "trained vector": random(DFlash, base),
             "rope_scaling": tiny(rope_parameters=dict(rope_type="linear", factor=2., rope_theta=1e4)),
             "hidden_act": tiny(hidden_act="gelu")}
    for words, net in cases.items():
        with pytest.raises(ValueError, match=words): to_gguf(net, tmp_path/"x")
    with pytest.raises(ValueError, match="target: got a tokenizer"): add_vocabulary(None, other, 512, True)
    for words, layout in ("net: got a LlamaForCausalLM", "medusa"), ("layout: .*gguf", "ggml"):
        with pytest.raises(ValueError, match=words): convert("small", layout, tmp_path/"x")
    assert not [*tmp_path.iterdir()]
