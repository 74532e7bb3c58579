"31a_hydra: inputs of a head, one evaluation a path, prefix rows fed once, balanced weights, candidates"
import math
from dataclasses import replace

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

from helpers import examples, faithful, first_failure, proves, random_table, shapes, tiny
from networks import otherwise
from specref import add_paths, Chain, HFModel, reject, rounds, Seeded, Tree
from specref.models.transformer import RowTrie
from specref.train.harness import TargetModel
from specref.train.hydra import (CandidateTree, Hydra, HydraPlus, MLPSpeculator, PathDraft, PrefixDraft,
                                 ScaledUnitRMS, module_at, unit_rms)

CTX = (1, 4, 0, 2)

def target_on(V=5): return TargetModel(tiny(V))

def network(make, base, **settings):
    "A network with random weights, none of them zero"
    torch.manual_seed(0)
    net = make(base, **{"stages" if issubclass(make, MLPSpeculator) else "heads": 3, **settings})
    with torch.no_grad():
        for w in net.parameters(): w.copy_(torch.randn(w.shape) * (2 / w.shape[-1]**.5))
    return net.double().eval()

def reader(base, temperature=1.):
    return HFModel(base.model, temperature=temperature, keep=(base.layers,), check=False)

class NewestToken(Hydra):
    "Reads the newest token alone"
    def step(self, s, x, i):
        return torch.cat([s[..., :self.base[0].d], 0*s[..., self.base[0].d:], self.base[0].embed(x)], -1)
def random_step(net):   # no projection at first
    for block in net.first: block.linear.reset_parameters()
def random_head(net):
    for lm in net.lm: lm.reset_parameters()

@faithful("Hydra", part="Hydra", plain={
    "the newest token alone": NewestToken, "a random step": otherwise(Hydra, random_step),
    "a random head": otherwise(Hydra, random_head)})
@pytest.mark.parametrize("layers", [1, 4])
def test_heads_read_the_growing_concatenation(layers, subject):
    "Head i takes (i + 2) d numbers: the state, then the target's embeddings of x_{t+1} … x_{t+1+i}"
    base, xs = target_on(), (3, 1, 4, 2)
    net, scaled = (subject(base, heads=4, layers=layers, gain=gain).double() for gain in (1., 3.))
    s = want = torch.randn(base.d, dtype=torch.float64)
    for i, x in enumerate(map(torch.tensor, xs)):
        s, want, block = net.step(s, x, i), torch.cat([want, base.embed(x)]), net.first[i]
        assert torch.equal(s, want)
        assert block.res_connection.weight.shape == block.linear.weight.shape == (base.d, (i + 2)*base.d)
        assert not block.linear.weight.any()
        assert torch.allclose(net.logits(s, i), base.head(block.res_connection(s)), atol=1e-5)
    assert torch.equal(scaled.step(s, torch.tensor(2), 4), torch.cat([s, 3*base.embed(torch.tensor(2))]))
    assert len(net.again) == (4 if layers > 1 else 0) and len(net.lm) == 1

class WithoutNorm(HydraPlus):
    "The last norm of the prefix layer left out"
    def enter(self, states, *args):
        self.norm = torch.nn.Identity()
        return super().enter(states, *args)
class OneLayer(HydraPlus):
    "One residual layer a head, as in Hydra"
    def logits(self, s, i): return module_at(self.lm, i)(self.first[i](s))
class OneNewLayer(HydraPlus):
    "Two residual layers a head: the second block applied once"
    def logits(self, s, i): return module_at(self.lm, i)(self.again[i](self.first[i](s)))

@faithful("Hydra++", part="HydraPlus", plain={
    "no last norm": WithoutNorm, "one residual layer": OneLayer, "two residual layers": OneNewLayer})
def test_four_layers_and_a_prefix_layer_of_llama(subject):
    "Four residual layers a head, the last three of them one block"
    base = target_on()
    net, f = network(subject, base, layers=4), torch.randn(2, 7, base.d, dtype=torch.float64)
    s = torch.randn(2*base.d, dtype=torch.float64)
    h = net.first[0](s)
    for _ in range(3): h = h + F.silu(net.again[0].linear(h))
    assert torch.allclose(net.logits(s, 0), net.lm[0](h), atol=1e-12)
    model = LlamaModel(LlamaConfig(**{**base.config.to_dict(), "num_hidden_layers": 1})).double().eval()
    own = model.layers[0].state_dict()
    model.layers[0].load_state_dict({k: w for k, w in net.prefix.state_dict().items() if k in own})
    model.norm.load_state_dict(net.norm.state_dict())
    with torch.no_grad():
        theirs, ours = model(inputs_embeds=f, use_cache=False).last_hidden_state, net.enter({base.layers: f})
    assert abs(ours - theirs).max() < 1e-4 < .1 < abs(ours - f).max()

def target_tables(net):
    for i in range(len(net.emb)): net.emb[i] = net.base[0].embed
def one_table(net):
    for i in range(len(net.emb)): net.emb[i] = net.emb[0]

@faithful("MLP Speculator", part="MLPSpeculator", plain={
    "the target's embedding": otherwise(MLPSpeculator, target_tables),
    "one embedding": otherwise(MLPSpeculator, one_table)})
def test_the_speculators_tables_are_its_own(subject):
    "An embedding, a head and a norm for each stage, none of the target's"
    base = target_on()
    net, tied = network(subject, base), subject(base, stages=3, tie_weights=True)
    assert len({e.weight.data_ptr() for e in (*net.emb, base.embed)}) == 4
    assert [len(m) for m in (net.emb, net.head, net.proj, net.ln)] == [3, 3, 3, 3]
    assert [len(m) for m in (tied.emb, tied.head, tied.proj, tied.ln)] == [1, 1, 2, 1]
    assert module_at(tied.proj, 2) is module_at(tied.proj, 1) is not module_at(tied.proj, 0)

# The variance of the terms

GELU = 1/3 + 1/(2*math.pi*3**.5)   # the mean square of gelu(z), z a unit normal

def ratios(base, stages, make, seed):
    "Var(token term) / Var(state term) at every stage, at initialisation"
    torch.manual_seed(seed)
    net, out = make(base, stages=stages, inner=256, scale_input=True), []
    s = net.enter({base.layers: 3*torch.randn(400, base.d)})
    for i in range(stages):
        x = torch.randint(base.V, (400,))
        state, token = net.terms(s, x, i)
        out.append((token.var() / state.var()).item())
        s = net.step(s, x, i)
    return np.array(out)

def no_weight(net): net.weight = 1.
class UnscaledInput(MLPSpeculator):
    def __init__(self, base, scale_input=True, **kw): super().__init__(base, scale_input=False, **kw)
def half_at_each_stage(net): net.w_s, net.weight = .5**.5, (256/2)**.5   # of an inner width of 256

@faithful("MLP Speculator", part="MLPSpeculator", plain={
    "no weight": otherwise(MLPSpeculator, no_weight), "the state as it is": UnscaledInput,
    "a half at each stage": otherwise(MLPSpeculator, half_at_each_stage)})
@proves("prop-half")
@pytest.mark.parametrize("stages", [3, 5])
def test_the_variances_of_the_terms(stages, subject):
    """Ratio 2^(1/n) - 1 at the first stage, exactly for weights of their mean square, and over twice GELU's
    mean square later"""
    base, want = target_on(61), 2**(1/stages) - 1
    found = np.mean([ratios(base, stages, subject, seed) for seed in range(8)], 0)
    assert abs(found[0]/want - 1) < .03 and np.all(abs(found[1:]/want*2*GELU - 1) < .1)
    net = subject(base, stages=stages, inner=256, scale_input=True)
    state = net.enter({base.layers: 3*torch.randn(400, base.d)}).square().mean(-1)
    assert torch.allclose(net.weight**2/256 / state, torch.full((400,), want), rtol=1e-4)
    # the share of state_0 in the variance
    assert net.w_s**(2*stages) == pytest.approx(.5)
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

def drafting(change):
    "A recipe whose draft model is changed"
    return lambda recipe: replace(recipe, draft_model=change(recipe.draft_model))

def forgetful(model):
    "Runs every head again in each call"
    class Forgetful(model):
        def answers(self, tree):
            self.ctx = None
            return super().answers(tree)
    return Forgetful

def one_by_one(model):
    "A pass for each path"
    class OneByOne(model):
        def extend(self, new, j):
            for path in new: super().extend([path], j)
    return OneByOne

@proves("thm-paths")
@faithful("Hydra", "Hydra++", "MLP Speculator", plain={
    "no memory of the paths": drafting(forgetful), "a pass for each path": drafting(one_by_one)})
@settings(max_examples=10, **first_failure)
@given(st.lists(st.tuples(shapes(6), st.lists(st.integers(0, 2), min_size=6, max_size=6)), min_size=2,
                max_size=2))
def test_each_path_is_evaluated_once(subject, trees):
    "A head is evaluated once for each distinct path of a context, in one pass for each depth"
    base, recipe, seen = target_on(), subject.recipe, set()
    draft = recipe.draft_model(network(recipe.make, base), reader(base))
    for parent, tokens in (*trees, trees[0]):
        tree, before = Tree(CTX), draft.meter.copy()
        for u, x in zip(parent[1:], tokens):
            if u < len(tree) and tree.depth[u] < 2: tree.add(u, x)
        draft(tree)
        paths = {tree.path(i) for i in range(len(tree))}
        spent, new = draft.meter - before, paths - seen
        prefix = len(CTX) - 1 if not seen and subject.name == "Hydra++" else 0   # the rows of the prefix
        assert spent.tokens == len(new) + prefix
        assert spent.calls == len({len(path) for path in new}) + bool(prefix)
        seen |= paths

class WholePrefix(PrefixDraft):
    "Reads the whole prefix in every round"
    def start_state(self, ctx):
        self.trie, self.memory.n = RowTrie(), 0
        return super().start_state(ctx)
class RowByRow(PrefixDraft):
    "A pass for each row"
    def read(self, start, end, ctx):
        for r in range(start, end): super().read(r, r + 1, ctx)

@faithful("Hydra++", part="PrefixDraft", plain={
    "the whole prefix in every round": WholePrefix, "a pass for each row": RowByRow})
def test_the_prefix_layer_reads_new_rows_only(subject):
    "Each round feeds the rows that were accepted since, and no others"
    base = target_on()
    net, target, fed, emitted = network(HydraPlus, base), reader(base), [], []
    draft = subject(net, target)
    read, enter = draft.read, net.enter
    draft.read = lambda start, end, ctx: (fed.append(end - start), read(start, end, ctx))
    for _, r in zip(range(12), rounds(target, Chain(draft, 2), reject, (1, 2, 3), Seeded(0))):
        emitted.append(len(r.tokens))
    # one pass for the prompt's states, then one a round; two heads are run in a round of two drafts
    assert fed == [2, *emitted[:-1]] and target.meter.calls <= 12 + 1
    assert draft.meter.calls == 12 * (1 + 2)
    net.enter = lambda *a: 1/0
    with pytest.raises(ZeroDivisionError): draft(Tree((*CTX, 3)))
    net.enter = enter
    assert abs(draft(Tree((*CTX, 3)))[0] - subject(net, reader(base))(Tree((*CTX, 3)))[0]).max() < 1e-12

# Candidates

def every_sequence(model, ks, n, exact): return CandidateTree(model, ks, 10**6, exact)
def likeliest_chain(model, ks, n, exact): return CandidateTree(model, (1,)*len(ks), n, exact)
def by_last_token(model, ks, n, exact):
    "Ranked by the probability of the last token, not of the sequence"
    def draft(ctx, rng):
        every = CandidateTree(model, ks, 10**6, exact)(ctx, rng)
        q, ends = model(every), [i for i in range(len(every)) if not every.children(i)]
        best = sorted(ends, key=lambda i: -q[every.parent[i]][every.token[i]])[:n]
        return add_paths(Tree(ctx), [every.path(i) for i in best], model.V, rng, exact)
    return draft

@faithful("MLP Speculator", part="CandidateTree", plain={
    "every sequence": every_sequence, "the likeliest chain": likeliest_chain,
    "the last token's probability": by_last_token})
@examples(20, st.integers(0, 10**6), st.integers(1, 6), **first_failure)
def test_the_best_sequences_are_chosen(subject, seed, n):
    "Against an enumeration of all sequences: the n of largest probability, a shared prefix once"
    model, ks = random_table(4, seed), (3, 2, 2)
    law = lambda path: model.law((0, *path))
    top = lambda path, k: sorted((x for x in range(4) if law(path)[x] > 0), key=lambda x: -law(path)[x])[:k]
    every = {(): 1}
    for k in ks: every = {(*path, x): w*law(path)[x] for path, w in every.items() for x in top(path, k)}
    best = sorted(every, key=lambda path: -every[path])[:n]
    tree = subject(model, ks, n, exact=True)((0,), Seeded(0))
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
