"Chapter 07a: the joined pass is the module's function, on any history of trees, for every kind of layer"
from copy import deepcopy
from fractions import Fraction

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

from helpers import proves, seeds
from specref import embedded, HFModel, PackedLlama, Tree
from specref.app.tour import OWN_TARGETS, target_of
from specref.models import llama
from specref.models.embedded import DATA, raw_model
from specref.models.llama import (JoinedRows, LlamaPass, PackedLinear, has_fast_pass, llama_pass,
                                  packed_product)

SCALED = dict(rope_type="llama3", rope_theta=1e4, factor=8., low_freq_factor=1., high_freq_factor=4.,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4., original_max_position_embeddings=50)
KINDS = [("llama", {}), ("llama", dict(attention_bias=True, mlp_bias=True)),
         ("mistral", dict(sliding_window=None)), ("llama", dict(rope_parameters=SCALED)),
         ("llama", dict(rope_parameters=YARN)), ("qwen2", {}), ("qwen3", dict(head_dim=16)),
         ("llama", dict(num_key_value_heads=4, tie_word_embeddings=True))]

def module(kind="llama", seed=0, **sizes):
    torch.manual_seed(seed)
    given = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=200)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given | sizes)).double().eval()
    for w in made.parameters(): torch.nn.init.normal_(w, std=.5)
    return made

def history(rng, turns=6, V=60):
    "Trees, each below a path of the one before, or below another text"
    ctx = tuple(range(1, 50))
    for _ in range(turns):
        tree = Tree(ctx)
        for _ in range(rng.integers(9)): tree.add(int(rng.integers(len(tree))), int(rng.integers(V)))
        yield tree
        ctx = (*tree.text(int(rng.integers(len(tree)))), int(rng.integers(V)))
        if rng.random() < .2: ctx = ctx[:rng.integers(2, len(ctx))]

def deviation(one, other, rng):
    pairs = [(one.logits(tree), other.logits(tree)) for tree in history(rng)]
    return max(abs(a - b).max() / abs(b).max() for a, b in pairs)

@pytest.mark.parametrize("kind, sizes", KINDS, ids=str)
@given(seed=seeds)
@settings(max_examples=5)
def test_the_pass_is_the_module(kind, sizes, seed):
    made = module(kind, seed, **sizes)
    ours, theirs = PackedLlama(made, keep=(0, 1, 2), check=False), HFModel(made, keep=(0, 1, 2), check=False)
    rng = np.random.default_rng(seed)
    assert deviation(ours, theirs, rng) < 1e-12
    text = theirs.trie.text
    for k, h in theirs.states(text[:-1]).items(): assert (ours.states(text[:-1])[k] - h).abs().max() < 1e-10
    for name in ((0, "keys"), (1, "values")):   # the rows that other drafters read
        mine, own = (m.memory.buffer[name].narrow(-2, 0, m.memory.n) for m in (ours, theirs))
        assert (mine - own).abs().max() < 1e-10 and ours.memory.row_bytes == theirs.memory.row_bytes
    assert (*ours.meter,) == (*theirs.meter,)

class Unsigned(PackedLlama):
    "Sines without the signs of the rolled halves"
    def __init__(self, made, **kw):
        super().__init__(made, **kw)
        self.network = LlamaPass(made)
        def rotations(n, own=self.network.rotations):
            cos, sin = own(n).unbind(1)
            return torch.stack([cos, sin.flip(-1)], 1)
        self.network.rotations, self.network.turns = rotations, rotations(64)

@pytest.mark.parametrize("m, n", [(1, 0), (3, 0), (1, 9), (2, 9), (64, 256), (64, 300), (70, 300)])
def test_a_plain_text_is_read_in_causal_order(m, n):
    net = LlamaPass(module(attention_bias=True))
    for _ in range(2):   # the kept strip, and the one that has grown
        mask, causal = net.seen(None, m, n)
        assert causal == (n == 0 and m > 1) and (mask is None) == (m == 1 or not n)
        if mask is not None: assert np.array_equal(mask == 0, np.tri(m, n + m, n, dtype=bool))
    tree = torch.zeros(1, 1, m, n + m)
    assert net.seen(tree, m, n) == (tree, False)

def test_the_check_at_the_start_compares_with_the_module():
    with pytest.raises(llama.Unservable, match="off its plain passes"): Unsigned(module()).check()

@proves("prop-roll")
@given(st.lists(st.floats(-9, 9, width=32), min_size=8, max_size=8), st.integers(0, 500))
def test_a_roll_has_the_same_products_and_sums(t, position):
    net = llama_pass(module())
    t, at = torch.tensor([t]), torch.tensor([[position]])
    cos, sin = net.rotary(t, at)
    own, signed = LlamaPass.rotations(net, 501)[position, :, 0]
    assert torch.equal(t*cos[0] + rotate_half(t)*sin[0], t*own.float() + t.roll(4, -1)*signed.float())

@proves("prop-hypotenuse")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 192), (7, 6, 32)])
@pytest.mark.parametrize("size", [1e-5, 1e-3, 1., 1e15])
def test_the_norm_is_that_of_the_module(dtype, shape, size):
    "Below, at and above the root of epsilon; bit for bit but in single precision"
    gen = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, generator=gen).to(dtype) for n in (shape, shape[1:]))
    theirs, x = LlamaRMSNorm(shape[-1], 1e-6), size * x
    theirs.weight, x[3] = torch.nn.Parameter(weight), 0
    with torch.inference_mode(): ours, want = llama.RMSNorm(weight, 1e-6)(x), theirs(x)
    if dtype == torch.float32: torch.testing.assert_close(ours, want, rtol=1e-6, atol=0)
    else: assert torch.equal(ours, want)

BOUNDS = [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, .05)]

@pytest.mark.parametrize("dtype, bound", BOUNDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("m", [1, 2, 30])
@pytest.mark.parametrize("packed, large", [(True, True), (True, False), (False, False)])
def test_joined_maps_have_the_products(monkeypatch, dtype, bound, bias, m, packed, large):
    "Packed where oneDNN has the type, or transposed; a large matrix is stored once"
    monkeypatch.setattr(llama, "CACHED", 100 if large else 10**4)
    packed &= torch.backends.mkldnn.is_available() and dtype != torch.float64
    if dtype == torch.bfloat16: packed &= torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.setattr(llama, "worth_packing", lambda weight: packed)
    torch.manual_seed(0)
    maps = [torch.nn.Linear(40, n, bias=bias).to(dtype) for n in (24, 8)]
    x = torch.randn(m, 40).to(dtype)
    with torch.inference_mode():
        joined, want = PackedLinear(*maps), torch.cat([f(x) for f in maps], 1)
        ways = [way[1] is packed_product for way in (joined.few, joined.several)]
        assert ways == [packed and large, packed]
        assert (joined(x) - want).abs().max() < bound and joined(x).dtype == dtype

@pytest.mark.parametrize("capability, size, dtype, packed", [
    ("AVX512", 8, torch.float32, True), ("AVX2", 8, torch.float32, False),
    ("AVX2", 1025, torch.float32, True),
    ("AVX512", 8, torch.float64, False), ("AVX512", 8, torch.bfloat16, None)])
def test_where_packing_pays(monkeypatch, capability, size, dtype, packed):
    "On wide vectors or for large matrices; where oneDNN lacks a type it is not asked for it"
    if packed is None: packed = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    weight = torch.ones(1024, size, dtype=dtype)
    assert llama.worth_packing(weight) == (packed and torch.backends.mkldnn.is_available())
    assert not llama.worth_packing(weight.to("meta"))

def test_rounding_is_that_of_the_module():
    "Embedded target: both single-precision passes have errors of the same size, far below 1e-5"
    exact, single = HFModel(raw_model("target", torch.float64), check=False), raw_model("target")
    errors = [deviation(one, exact, np.random.default_rng(0))
              for one in (PackedLlama(single, check=False), HFModel(single, check=False))]
    assert max(errors) < 1e-5 and Fraction(1, 3) < errors[0]/errors[1] < 3

def test_the_memory_grows_with_its_views():
    memory, like = JoinedRows(2, 3, 4), torch.ones(1)
    for store in memory.reserve(5, like): store(torch.full((5, 6, 4), 7.))
    memory.n = 5
    new = torch.arange(100*6*4.).view(100, 6, 4)
    keys, values = memory.reserve(100, like)[1](new)
    assert memory.joined.shape == (2, 6, 210, 4)
    assert all((x[..., :5, :] == 7).all() for x in (keys, values, memory.joined))
    assert torch.equal(torch.cat([keys, values], 1)[0, :, 5:], new.transpose(0, 1))
    assert (memory.buffer[1, "keys"][:, :, :105] == keys).all()
    assert memory.row_bytes == 2*6*4*4

class Adapted(torch.nn.Linear):
    "A map with an adapter, whose weight alone is not its function"
    def forward(self, x): return super().forward(x) + 1

def test_what_no_pass_serves_is_left_to_the_module():
    "An adapter in a projection, double precision, another architecture"
    single, gpt = module().float(), AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1))
    assert [has_fast_pass(m) for m in (single, module(), gpt)] == [True, False, False]
    single.model.layers[1].mlp.up_proj.__class__ = Adapted
    assert not has_fast_pass(single)

@pytest.mark.parametrize("name", sorted(OWN_TARGETS))
def test_the_other_targets_of_the_race(name):
    "Also a looped one, whose layers share weights, and one of bfloat16"
    made = OWN_TARGETS[name]()
    ours, theirs = PackedLlama(made, check=False), HFModel(made, check=False)
    most = 1e-5 if made.dtype == torch.float32 else .05
    assert deviation(ours, theirs, np.random.default_rng(0)) < most and target_of(name, 1.).V == 512
    layers, own = ours.network.layers, made.model.layers
    assert len({id(x) for x in layers}) == len({id(x.mlp.up_proj) for x in own})

def test_a_checkpoint_is_loaded_with_the_options_of_a_model():
    loaded = PackedLlama.load(DATA/"small", top_k=3, keep=(1,))
    assert (loaded.law((1, 2)) > 0).sum() == 3 and loaded.keep == (1,) and loaded.unchecked == loaded.windows

def test_a_copy_shares_the_packed_weights():
    net = PackedLlama(raw_model("small"), check=False).network
    again = deepcopy(net)
    assert again is not net and again.head is net.head and again.layers[0].qkv is net.layers[0].qkv

def test_a_module_that_was_trained_is_packed_again():
    made = module().float()
    before = llama_pass(made)
    assert llama_pass(made) is before
    with torch.no_grad(): made.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert llama_pass(made) is not before
    ours, theirs = PackedLlama(made, check=False), HFModel(made, check=False)
    assert deviation(ours, theirs, np.random.default_rng(0)) < 1e-4

def test_modules_are_packed_once():
    assert embedded("small").network is embedded("small", temperature=0).network
    assert isinstance(embedded("target"), PackedLlama)
