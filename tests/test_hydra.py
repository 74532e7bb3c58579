"31a_hydra: inputs of a head, one evaluation a path, prefix rows fed once, balanced weights, candidates"
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

from helpers import faithful, proves, random_table, shapes, tiny
from specref.core.loop import rounds
from specref.core.rng import Seeded
from specref.core.tree import Tree
from specref.models.transformer import HFModel
from specref.train.harness import TargetModel
from specref.train.hydra import (CandidateTree, Hydra, HydraPlus, MLPSpeculator, PathDraft, PrefixDraft,
                                 ScaledUnitRMS, module_at, unit_rms)
from specref.verify.reject import Chain, reject

torch.set_num_threads(1)
FAMILIES = {"hydra": (Hydra, PathDraft), "hydra++": (HydraPlus, PrefixDraft),
            "mlp": (MLPSpeculator, PathDraft)}
CTX = (1, 4, 0, 2)

def target_on(V=5): return TargetModel(tiny(V))

def network(make, base, **settings):
    "A network with random weights, none of them zero"
    torch.manual_seed(0)
    net = make(base, **{"stages" if make is MLPSpeculator else "heads": 3, **settings})
    with torch.no_grad():
        for w in net.parameters(): w.copy_(torch.randn(w.shape) * (2 / w.shape[-1]**.5))
    return net.double().eval()

def reader(base, temperature=1.):
    return HFModel(base.model, temperature=temperature, keep=(base.layers,), check=False)

@faithful("Hydra")
@pytest.mark.parametrize("layers", [1, 4])
def test_heads_read_the_growing_concatenation(layers):
    "Head i takes (i + 2) d numbers: the state, then the target's embeddings of x_{t+1} … x_{t+1+i}"
    base, xs = target_on(), (3, 1, 4, 2)
    net, scaled = (Hydra(base, heads=4, layers=layers, gain=gain).double() for gain in (1., 3.))
    s = want = torch.randn(base.d, dtype=torch.float64)
    for i, x in enumerate(xs):
        s, want, block = net.step(s, torch.tensor(x),
                                  i), torch.cat([want, base.embed(torch.tensor(x))]), net.first[i]
        assert torch.equal(s, want)
        assert block.res_connection.weight.shape == block.linear.weight.shape == (base.d, (i + 2)*base.d)
        assert not block.linear.weight.any()
        assert torch.allclose(net.logits(s, i), base.head(block.res_connection(s)), atol=1e-5)
    assert torch.equal(scaled.step(s, torch.tensor(2), 4), torch.cat([s, 3*base.embed(torch.tensor(2))]))
    assert len(net.again) == (4 if layers > 1 else 0) and len(net.lm) == 1

@faithful("Hydra++")
def test_four_layers_and_a_prefix_layer_of_llama():
    "Four residual layers a head, the last three of them one block"
    base = target_on()
    net, f = network(HydraPlus, base, layers=4), torch.randn(2, 7, base.d, dtype=torch.float64)
    s = torch.randn(2*base.d, dtype=torch.float64)
    h = net.first[0](s)
    for _ in range(3): h = h + F.silu(net.again[0].linear(h))
    assert torch.allclose(net.logits(s, 0), net.lm[0](h), atol=1e-12)
    model = LlamaModel(LlamaConfig(**{**base.config.to_dict(), "num_hidden_layers": 1})).double().eval()
    own = model.layers[0].state_dict()
    model.layers[0].load_state_dict({k: w for k, w in net.prefix.state_dict().items() if k in own})
    model.norm.load_state_dict(net.norm.state_dict())
    with torch.no_grad():
        ours, theirs = net.enter({base.layers: f}), model(inputs_embeds=f, use_cache=False).last_hidden_state
    assert abs(ours - theirs).max() < 1e-4 < .1 < abs(ours - f).max()

@faithful("MLP Speculator")
def test_the_speculators_tables_are_its_own():
    "An embedding, a head and a norm for each stage, none of the target's"
    base = target_on()
    net, tied = network(MLPSpeculator, base), MLPSpeculator(base, stages=3, tie_weights=True)
    assert len({e.weight.data_ptr() for e in (*net.emb, base.embed)}) == 4
    assert [len(m) for m in (net.emb, net.head, net.proj, net.ln)] == [3, 3, 3, 3]
    assert [len(m) for m in (tied.emb, tied.head, tied.proj, tied.ln)] == [1, 1, 2, 1]
    assert module_at(tied.proj, 2) is module_at(tied.proj, 1) is not module_at(tied.proj, 0)

# The variance of the terms

GELU = 1/3 + 1/(2*math.pi*3**.5)   # the mean square of gelu(z), z a unit normal

def ratios(base, stages, seed=0, power=1.):
    "Var(token term) / Var(state term) at every stage, at initialisation"
    torch.manual_seed(seed)
    net, out = MLPSpeculator(base, stages=stages, inner=256, scale_input=True), []
    net.weight *= power
    s = net.enter({base.layers: 3*torch.randn(400, base.d)})
    for i in range(stages):
        x = torch.randint(base.V, (400,))
        state, token = net.terms(s, x, i)
        out.append((token.var() / state.var()).item())
        s = net.step(s, x, i)
    return np.array(out)

@faithful("MLP Speculator")
@proves("prop-half")
@pytest.mark.parametrize("stages", [3, 5])
def test_the_variances_of_the_terms(stages):
    "Ratio 2^(1/n) - 1 at the first stage, over twice GELU's mean square later; another weight is detected"
    base, want = target_on(61), 2**(1/stages) - 1
    found = np.mean([ratios(base, stages, seed) for seed in range(8)], 0)
    assert abs(found[0]/want - 1) < .03 and np.all(abs(found[1:]/want*2*GELU - 1) < .1)
    # the share of state_0 in the variance
    assert MLPSpeculator(base, stages=stages).w_s**(2*stages) == pytest.approx(.5)
    assert abs(ratios(base, stages, power=256**-.25)[0]/want - 1) > .5
    z = np.linspace(-10, 10, 20001)
    weight = np.exp(-z*z/2) / (2*math.pi)**.5 * (z[1] - z[0])
    assert abs((weight * F.gelu(torch.from_numpy(z)).numpy()**2).sum() - GELU) < 1e-9

def test_the_norm_subtracts_no_mean():
    "A row's mean square becomes 1, then it is scaled and shifted"
    x, norm = 5 + torch.randn(3, 64, dtype=torch.float64), ScaledUnitRMS(64).double()
    want = x / x.square().mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        norm.weight.fill_(2.)
        norm.bias.fill_(3.)
    assert torch.allclose(unit_rms(x), want, atol=1e-6) and torch.allclose(norm(x), 2*want + 3, atol=1e-6)

# Paths

@proves("thm-paths")
@faithful("Hydra", "Hydra++", "MLP Speculator")
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(st.lists(st.tuples(shapes(6), st.lists(st.integers(0, 2), min_size=6, max_size=6)), min_size=2,
                max_size=2))
def test_each_path_is_evaluated_once(family, trees):
    "A head is evaluated once for each distinct path of a context, in one pass for each depth"
    base, (make, model) = target_on(), FAMILIES[family]
    draft, seen = model(network(make, base), reader(base)), set()
    for parent, tokens in (*trees, trees[0]):
        tree, before = Tree(CTX), draft.meter.copy()
        for u, x in zip(parent[1:], tokens):
            if u < len(tree) and tree.depth[u] < 2: tree.add(u, x)
        draft(tree)
        paths = {tree.path(i) for i in range(len(tree))}
        spent, new = draft.meter - before, paths - seen
        prefix = len(CTX) - 1 if not seen and family == "hydra++" else 0   # the rows of the prefix
        assert spent.tokens == len(new) + prefix
        assert spent.calls == len({len(path) for path in new}) + bool(prefix)
        seen |= paths

@faithful("Hydra++")
def test_the_prefix_layer_reads_new_rows_only():
    "Each round feeds the rows that were accepted since, and no others"
    base = target_on()
    net, target, fed, emitted = network(HydraPlus, base), reader(base), [], []
    draft = PrefixDraft(net, target)
    read, enter = draft.read, net.enter
    draft.read = lambda start, end, ctx: (fed.append(end - start), read(start, end, ctx))
    for _, r in zip(range(12), rounds(target, Chain(draft, 2), reject, (1, 2, 3), Seeded(0))):
        emitted.append(len(r.tokens))
    # one pass for the prompt's states, then one a round
    assert fed == [2, *emitted[:-1]] and target.meter.calls <= 12 + 1
    net.enter = lambda *a: 1/0
    with pytest.raises(ZeroDivisionError): draft(Tree((*CTX, 3)))
    net.enter = enter
    assert abs(draft(Tree((*CTX, 3)))[0] - PrefixDraft(net, reader(base))(Tree((*CTX, 3)))[0]).max() < 1e-12

# Candidates

@faithful("MLP Speculator")
@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_the_best_sequences_are_chosen(seed, n):
    "Against an enumeration of all sequences: the n of largest probability, a shared prefix once"
    model, ks = random_table(4, seed), (3, 2, 2)
    law = lambda path: model.law((0, *path))
    top = lambda path, k: sorted((x for x in range(4) if law(path)[x] > 0), key=lambda x: -law(path)[x])[:k]
    every = {(): 1}
    for k in ks: every = {(*path, x): w*law(path)[x] for path, w in every.items() for x in top(path, k)}
    best = sorted(every, key=lambda path: -every[path])[:n]
    tree = CandidateTree(model, ks, n, exact=True)((0,), Seeded(0))
    assert {tree.path(i) for i in range(len(tree)) if not tree.children(i)} == set(best)
    assert len(tree) - 1 == len({path[:i] for path in best for i in (1, 2, 3)})
    assert all(max(tree.law[i]) == 1 for i in range(1, len(tree)))

def test_candidates_are_ranked_before_the_warp():
    "At temperature 0 a distribution is a point mass, but the ranks of all tokens stay: the same tree"
    base = target_on()
    net = network(MLPSpeculator, base)
    hot, cold = (CandidateTree(PathDraft(net, reader(base, T)), (3, 2, 2), 4)((1, 2, 0), Seeded(0))
                 for T in (1., 0))
    assert hot == cold and len(hot) > 4
