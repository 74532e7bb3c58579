"Chapter 07d: the compiled pass is the module's function, and a row has the same bits alone and in a tree"
from copy import deepcopy

import numpy as np, pytest, torch, transformers
from hypothesis import given, settings, strategies as st

from helpers import proves, seeds
from specref import (autoregressive, Branching, CompiledLlama, generate, HFModel, match, PackedLlama, prompts,
                     Seeded, Tree)
from specref.models import compiled
from specref.models.compiled import (AS_BITS, Blocks, CompiledPass, add_narrow, exponential, fast_pass,
                                     serve_model, smallest_type)
from specref.models.embedded import raw_model
from specref.models.llama import stored_rows
from specref.models.transformer import RowCache, Unservable, softmax_row
from specref.train import diffusion, features
from specref.train.registry import load_drafter
from test_llama import KINDS, deviation, history, module

class DoubleNorm(torch.nn.Module):
    "transformers' norms are in single precision for every type; this one is not"
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon
    def forward(self, x): return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight

def double(kind="llama", seed=0, **sizes):
    made = module(kind, seed, **sizes)
    for parent in [*made.modules()]:
        for name, part in [*parent.named_children()]:
            if hasattr(part, "variance_epsilon"): setattr(parent, name, DoubleNorm(part))
    return made

@pytest.mark.parametrize("kind, sizes", KINDS, ids=str)
@given(seed=seeds)
@settings(max_examples=4)
def test_the_pass_is_the_module(kind, sizes, seed):
    made, keep = double(kind, seed, **sizes), (0, 1, 2)
    ours, theirs = CompiledLlama(made, keep=keep, check=False), HFModel(made, keep=keep, check=False)
    assert deviation(ours, theirs, np.random.default_rng(seed)) < 1e-12
    text = theirs.trie.text
    for k, h in theirs.states(text[:-1]).items(): assert (ours.states(text[:-1])[k] - h).abs().max() < 1e-10
    memory, n = ours.memory, ours.memory.n
    for name in ((0, "keys"), (1, "values")):   # the rows that other drafters read
        mine, own = (m.memory.buffer[name].narrow(-2, 0, n) for m in (ours, theirs))
        assert (mine - own).abs().max() < 1e-10 and memory.row_bytes == theirs.memory.row_bytes
    assert torch.equal(memory.joined[:, :2, :n] if sizes.get("num_key_value_heads") != 4 else
                       memory.joined[:, :4, :n], memory.turned[..., :n].mT)

def same_bits(one, fresh, V):
    "The share of rows of trees that have the same bits when their text is read alone, by another model"
    rows = [(z, fresh().logits(Tree(tree.text(i)))[0]) for tree in history(np.random.default_rng(0), V=V)
            for i, z in enumerate(one.logits(tree))]
    return np.mean([np.array_equal(a, b) for a, b in rows])

@proves("thm-same-bits")
@pytest.mark.parametrize("kind, sizes", KINDS, ids=str)
@pytest.mark.parametrize("width", [8, 32])
def test_a_row_has_the_same_bits_alone_and_in_a_tree(kind, sizes, width):
    made = module(kind, **sizes | dict(head_dim=width)).float()
    assert same_bits(CompiledLlama(made, check=False), lambda: CompiledLlama(made, check=False), 60) == 1

def test_sums_of_the_usual_products_have_other_orders():
    made = raw_model("large")
    assert same_bits(PackedLlama(made, check=False), lambda: PackedLlama(made, check=False), 512) < .5
    assert same_bits(CompiledLlama(made, check=False), lambda: CompiledLlama(made, check=False), 512) == 1

def test_texts_at_temperature_0_are_those_of_plain_decoding():
    target = CompiledLlama(raw_model("large"), temperature=0, check=False)
    drafter = Branching(CompiledLlama(raw_model("small"), temperature=0, check=False), (2, 2, 1))
    for ctx in prompts("english", 2) + prompts("code", 2):
        plain, drafted = (run(target, *more, ctx, 40, Seeded(0)) for run, more in
                          ((autoregressive, ()), (generate, (drafter, match))))
        assert tuple(plain) == tuple(drafted)

@pytest.mark.parametrize("kind", [*AS_BITS, torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 19])
def test_products_of_any_number_of_rows(kind, m):
    "Of weights that are exact in half precision: bit for bit those of the same weights as they are"
    torch.manual_seed(m)
    real = torch.promote_types(kind, torch.float32)
    maps = [torch.nn.Linear(37, n, bias=n < 70).to(kind).to(real) for n in (70, 3)]
    x = torch.randn(m, 37).to(real)
    with torch.inference_mode():
        ours, whole = Blocks(*maps, kind=kind), Blocks(*maps, kind=real)
        want = torch.cat([f(x) for f in maps], 1)
        assert torch.equal(ours(x), whole(x)) and (ours(x) - want).abs().max() < 1e-5
        assert (ours.add(want, x) - 2*want).abs().max() < 1e-5
    narrow = np.zeros((m, 21))
    add_narrow(x.double().numpy(), w := np.random.default_rng(0).normal(size=(37, 21)), narrow)
    assert abs(narrow - x.double().numpy() @ w).max() < 1e-12

def test_weights_are_kept_in_the_smallest_type_that_holds_them():
    made = module().float()
    assert smallest_type(made) == torch.float32 and smallest_type(module()) == torch.float64
    for kind, size in zip(AS_BITS, (1, 2**20)):   # beyond the range of float16
        with torch.no_grad(): made.model.embed_tokens.weight[0, 0] = size
        rounded = deepcopy(made).to(kind).float()
        assert smallest_type(rounded) == kind
        assert CompiledPass(rounded).weights.down.itemsize == 2
        ours, half = (CompiledLlama(x, check=False) for x in (rounded, deepcopy(made).to(kind)))
        assert deviation(half, ours, np.random.default_rng(0)) < 1e-5   # but for the rotation's table
    assert smallest_type(raw_model("target")) == torch.float16

def test_without_a_folder_for_machine_code_it_is_compiled_anew(monkeypatch):
    def unwritable(cache=False, own=compiled.njit, **how):
        if cache: raise RuntimeError("cannot cache function: no locator available")
        return own(**how)
    monkeypatch.setattr(compiled, "njit", unwritable)
    assert compiled.compiled(lambda x: x + 1)(1) == 2

@compiled.compiled
def one_exponential(x): return exponential(x)

@proves("prop-exponential")
@given(st.floats(-700, 700))
def test_the_exponential_is_a_polynomial(x):
    want = np.exp(np.longdouble(x))
    assert abs(one_exponential(x)/want - 1) < 5e-16
    assert one_exponential(2000.) == one_exponential(700.) and one_exponential(-2000.) < 1e-300

@pytest.mark.parametrize("kind, sizes", KINDS[:2] + KINDS[5:], ids=str)
def test_layers_one_by_one_are_those_of_the_pass(kind, sizes):
    "Bit for bit, with rows that another memory keeps"
    made = module(kind, **sizes).float()
    with torch.inference_mode():
        net, ids, at = fast_pass(made), torch.tensor([5, 9, 7, 9]), torch.arange(4)
        whole, other = net.memory(), RowCache()
        want = net(ids, at, whole, 4, keep=(1, 2))
        runs = [(i, lambda new, i=i: stored_rows(other, i, new), True) for i in range(2)]
        x, states = net.run_layers(net.embed[ids], net.turn(at, 4), runs, net.seen(None, 4, 0), keep=(1,))
        assert torch.equal(net.score(x), want) and torch.equal(states[1], whole.buffer[1][0, :4])
        assert torch.equal(other.buffer[1, "values"][:, :, :4], whole.buffer[1, "values"][:, :, :4])

def test_what_is_not_compiled(monkeypatch):
    single = module().float()
    def kind(model=single, **kw):
        served = serve_model(model, .5, check=False, **kw)
        assert served.temperature == .5
        return type(served)
    assert (kind(), kind(deepcopy(single).bfloat16())) == (CompiledLlama, PackedLlama)
    assert (kind(module()), kind(paths=True)) == (HFModel, HFModel)
    with pytest.raises(Unservable, match="wanted a Llama that is compiled: its weights are on meta"):
        CompiledLlama(module().to("meta"), check=False)
    monkeypatch.setattr(compiled, "njit", None)
    with pytest.raises(Unservable, match=r"numba is not installed; `pip install 'specref\[fast\]'`"):
        CompiledLlama(single)
    assert kind() is PackedLlama
    assert not isinstance(fast_pass(single), CompiledPass)

def test_large_networks(monkeypatch):
    "Several threads of torch read one faster; and no second copy of one is made unasked"
    single = module().float()
    monkeypatch.setattr(compiled, "ALONE", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert type(serve_model(single, check=False)) is PackedLlama
    monkeypatch.setattr(compiled, "MOST_COPIED", 10)
    assert type(serve_model(single, check=False)) is HFModel

class Shifted(transformers.LlamaForCausalLM):
    "A Llama by its configuration, with a forward pass of its own"
    def forward(self, *args, **kw):
        out = super().forward(*args, **kw)
        return type(out)(**out | dict(logits=out.logits.roll(1, -1)))

def test_a_network_with_a_pass_of_its_own_keeps_it():
    plain = module().float()
    own = Shifted(plain.config)
    own.load_state_dict(plain.state_dict())
    assert type(serve_model(own)) is HFModel and type(serve_model(plain)) is CompiledLlama
    assert np.allclose(serve_model(own).law((1, 2)), np.roll(serve_model(plain).law((1, 2)), 1), atol=1e-6)

def test_a_copy_shares_the_weights():
    net = fast_pass(module().float())
    assert deepcopy(net) is net

def draft_rows(made):
    "After a context, and as rows of a draft"
    draft, tree = made.draft(made.target(temperature=1.)), Tree(prompts("english", 1)[0])
    for u, x in (0, 5), (1, 9): tree.add(u, x)
    found = draft(tree)
    return np.array([found[i] for i in range(len(found))])

@pytest.mark.parametrize("module, name", [*((features, name) for name in ("eagle", "eagle3", "mtp")),
                                          (diffusion, "dflash")])
def test_layers_of_drafters_are_those_of_transformers(monkeypatch, module, name):
    "In inference alone: in training the layer of transformers stays"
    made, made_of = load_drafter(name), []
    own = module.compiled_layer
    def watched(layer, u):
        made_of.append(own(layer, u))
        return made_of[-1]
    monkeypatch.setattr(module, "compiled_layer", watched)
    fast = draft_rows(made)
    assert made_of and all(made_of)
    monkeypatch.setattr(module, "compiled_layer", lambda layer, u: None)
    assert abs(fast - draft_rows(made)).max() < 1e-5

def test_layers_that_are_not_compiled():
    "Outside inference, where torch rounds by itself, and with weights of half precision"
    layer = next(m for m in load_drafter("eagle").net.modules() if isinstance(m, features.DraftLayer))
    u = torch.zeros(1, 2, 8)
    assert features.compiled_layer(layer, u) is None
    with torch.inference_mode():
        assert features.compiled_layer(layer, u)
        assert features.compiled_layer(deepcopy(layer).bfloat16(), u) is None
        with torch.autocast("cpu", torch.bfloat16): assert features.compiled_layer(layer, u) is None

@given(st.lists(st.floats(-900, 900, width=32), min_size=1, max_size=70), st.integers(0, 3))
def test_rows_are_softmaxes(z, hidden):
    "Also where a processor would have hidden tokens; infinities and what is no number are left to say so"
    z = torch.tensor([*z, 0.] + hidden*[-np.inf])
    law, right = compiled.softmax(z.numpy())
    assert right and abs(law - softmax_row(z, False)).max() < 1e-15 and abs(law.sum() - 1) < 1e-12
    for wrong in np.nan, np.inf: assert not compiled.softmax(np.append(z.numpy(), np.float32(wrong)))[1]
    assert not compiled.softmax(np.full(3, -np.inf, np.float32))[1]

def test_a_row_that_is_no_distribution_is_refused():
    made = module().float()
    with torch.no_grad(): made.lm_head.weight[3] = np.inf
    with pytest.raises(ValueError, match="logits: got a largest value of"):
        CompiledLlama(made, check=False).law((1, 2))
