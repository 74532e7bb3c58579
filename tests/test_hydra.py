"Heads on paths: every head reads what it was told and no more, each path once, prefix rows that look, weights that balance, laws that are kept"
import json
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from helpers import faithful, proves, refuses, shapes
from specref.train.branching import branch_texts, branching, chain_tokens
from specref.core.rng import Seeded, tv_outcomes
from specref.train.hydra import CandidateTree, Hydra, HydraPlus, ScaledUnitRMS, MLPSpeculator, PathNetwork, PathDraft, PrefixDraft, unit_rms, module_at, law_loss, token_loss
from specref.core.law import overlap
from specref.core.loop import generate, loop_law, no_draft, rounds
from specref.models.embedded import DATA, DOMAINS, raw_model, prompts, sample_texts
from specref.verify.reject import Chain, reject
from specref.draft.shapes import DynamicTree, StaticTree
from specref.verify.siblings import Branching
from specref.core.target import random_table, target_law
from specref.train.harness import TargetModel, StateDataset, state_dataset, load_checkpoint, evaluate, set_weights, save_network, train_network
from specref.models.transformer import HFModel
from specref.core.tree import Tree, from_choices, points

FAMILIES = {"hydra": (Hydra, PathDraft), "hydra++": (HydraPlus, PrefixDraft), "mlp": (MLPSpeculator, PathDraft)}
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def tiny(V=5, d=16, layers=2, seed=0):
    "A small target in float64 with uneven laws"
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=d, intermediate_size=2*d, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2,
                                         max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)).double().eval()
    with torch.no_grad(): [w.mul_(12) for w in model.parameters() if w.dim() > 1]
    return TargetModel(model)


def loud(net):
    "The network with every weight drawn anew, none of them zero, in float64"
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for w in net.parameters(): w.copy_(torch.randn(w.shape, generator=gen) * (2 / w.shape[-1]**.5))
    return net.double().eval()


def made(family, base, **settings):
    make, drafts = FAMILIES[family]
    torch.manual_seed(0)
    return loud(make(base, **{"stages" if make is MLPSpeculator else "heads": 3, **settings})), drafts


def told(net, base, ctx, path):
    "The logits after a path, from nothing: one text, one path, no cache"
    with torch.no_grad():
        f = base.model(input_ids=torch.tensor([ctx[:-1]]), output_hidden_states=True, use_cache=False).hidden_states[net.reads[0]]
        s = net.enter({net.reads[0]: f})[0, -1]
        for j, x in enumerate((ctx[-1], *path)): s = net.step(s, torch.tensor(x), j)
        return net.logits(s, len(path)).numpy()


def reader(base, temperature=1.): return HFModel(base.model, temperature=temperature, keep=(base.layers,), check=False)


# What a head reads

@faithful("Hydra")
@pytest.mark.parametrize("layers", [1, 4])
def test_heads_read_the_growing_concatenation(layers):
    "Head i takes (i + 2) d numbers: the state, then the target's own embeddings of x_{t+1} … x_{t+1+i}, in this order; the second matrix of each block begins at zero"
    base = tiny()
    net = Hydra(base, heads=4, layers=layers).double()
    s, xs = torch.randn(base.d, dtype=torch.float64), (3, 1, 4, 2)
    want = s
    for i, x in enumerate(xs):
        s, want = net.step(s, torch.tensor(x), i), torch.cat([want, base.embed(torch.tensor(x))])
        assert torch.equal(s, want) and net.first[i].res_connection.weight.shape == net.first[i].linear.weight.shape == (base.d, (i + 2)*base.d)
        h = net.first[i].res_connection(s)
        assert not net.first[i].linear.weight.any() and torch.allclose(net.logits(s, i), base.head(h), atol=1e-6)   # untrained: a projection, then the target's own matrix
    louder = Hydra(base, heads=4, layers=layers, gain=3.).double()
    assert torch.equal(louder.step(s, torch.tensor(2), 4), torch.cat([s, 3*base.embed(torch.tensor(2))]))   # a constant, as if in the columns
    ours = {id(w) for w in net.parameters()}
    assert not ours & {id(w) for w in base.model.parameters()} and len(net.again) == (4 if layers > 1 else 0) and len(net.lm) == 1


@faithful("Hydra++")
def test_four_layers_and_a_prefix():
    "Four residual layers a head, the last three of them one block; a whole decoder layer before them, whose output at t depends on the states up to t and on each of them"
    base = tiny()
    net, _ = made("hydra++", base, layers=4)
    s = torch.randn(2*base.d, dtype=torch.float64)
    h = net.first[0](s)
    for _ in range(3): h = h + F.silu(net.again[0].linear(h))
    assert torch.allclose(net.logits(s, 0), net.lm[0](h), atol=1e-12) and isinstance(net.again[0].res_connection, torch.nn.Identity)
    f = torch.randn(1, 6, base.d, dtype=torch.float64)
    plain = net.enter({base.layers: f})
    for k in range(6):
        g = f.clone(); g[0, k] += 1
        moved = (net.enter({base.layers: g}) - plain).abs().amax(-1)[0] > 1e-9
        assert moved.tolist() == [t >= k for t in range(6)]


@faithful("Hydra++")
def test_the_prefix_is_a_llama_of_one_layer():
    "transformers' own model of one layer and its last norm, with the prefix layer's weights and no embedding, says what `enter` says"
    base = tiny()
    net, _ = made("hydra++", base)
    model = LlamaModel(LlamaConfig(**{**base.config.to_dict(), "num_hidden_layers": 1})).double().eval()
    model.layers[0].load_state_dict({k: w for k, w in net.prefix.state_dict().items() if k in model.layers[0].state_dict()})
    model.norm.load_state_dict(net.norm.state_dict())
    f = torch.randn(2, 7, base.d, dtype=torch.float64)
    with torch.no_grad(): ours, theirs = net.enter({base.layers: f}), model(inputs_embeds=f, use_cache=False).last_hidden_state
    assert abs(ours - theirs).max() < 1e-4 < .1 < abs(ours - f).max()


@faithful("Hydra", "Hydra++", "MLP Speculator")
@families
def test_what_a_guess_depends_on(family):
    "Entry j at place t moves with each of x_{t+1} … x_{t+1+j}, and with no other token, the states being held fixed; an independent head moves with none"
    base, T = tiny(), 9
    net, _ = made(family, base)
    x, f = torch.randint(5, (1, T)), torch.randn(1, T, base.d, dtype=torch.float64)
    blind = torch.nn.Linear(base.d, base.V).double()   # the independent head, in two lines
    independent = lambda x: blind(f)
    with torch.no_grad():
        plain, alone = net.guesses(StateDataset(x, {base.layers: f}), 3), independent(x)
        for k in range(T):
            y = x.clone(); y[0, k] = (x[0, k] + 1) % 5
            assert torch.equal(independent(y), alone)
            for j, (a, b) in enumerate(zip(plain, net.guesses(StateDataset(y, {base.layers: f}), 3))):
                moved = (a - b).abs().amax(-1)[0] > 1e-9
                assert moved.tolist() == [t + 1 <= k <= t + 1 + j for t in range(T - 1)]


@faithful("MLP Speculator")
def test_nothing_but_the_state_is_read():
    "With f_t held fixed the tokens and states before t change nothing, and neither does the target's embedding: the tables are the speculator's own, one a stage"
    base = tiny()
    net, drafts = made("mlp", base, stages=3)
    f = torch.randn(1, 6, base.d, dtype=torch.float64); g = f.clone(); g[0, :3] += 1
    x = torch.randint(5, (1, 6)); y = x.clone(); y[0, :3] = (x[0, :3] + 1) % 5
    with torch.no_grad():
        a, b = (net.guesses(StateDataset(*pair), 3) for pair in ((x, {base.layers: f}), (y, {base.layers: g})))
    assert all(torch.equal(u[:, 3:], v[:, 3:]) for u, v in zip(a, b))
    assert len({e.weight.data_ptr() for e in net.emb}) == 3 and not {e.weight.data_ptr() for e in net.emb} & {base.embed.weight.data_ptr()}
    names = dict(net.named_parameters())
    tied = MLPSpeculator(base, stages=3, tie_weights=True)
    assert {k.split(".")[0]: len([n for n in names if n.startswith(k)]) for k in ("emb", "head", "proj", "ln.")} == {"emb": 3, "head": 3, "proj": 3, "ln": 6}
    assert [len(m) for m in (tied.emb, tied.head, tied.proj, tied.ln)] == [1, 1, 2, 1] and module_at(tied.proj, 2) is module_at(tied.proj, 1) is not module_at(tied.proj, 0)


# The variance of the terms

GELU = 1/3 + 1/(2*math.pi*3**.5)   # the mean square of gelu(z), z a unit normal

def ratios(m, stages, scale_input, seed=0, power=1.):
    "Var(token term) / Var(state term) at every stage, at initialisation"
    torch.manual_seed(seed)
    base = tiny(V=61, d=m, layers=1)
    net, out = MLPSpeculator(base, stages=stages, scale_input=scale_input), []
    net.weight *= power
    s = net.enter({base.layers: 3*torch.randn(400, m)})
    for i in range(stages):
        x = torch.randint(61, (400,))
        state, token = net.terms(s, x, i)
        out.append((token.var() / state.var()).item())
        s = net.step(s, x, i)
    return np.array(out)


@faithful("MLP Speculator")
@proves("prop-half")
@pytest.mark.parametrize("stages", [3, 5])
def test_the_terms_keep_their_proportion(stages):
    "2^(1/n) - 1 at the first stage, where the mean square is a half; the same number at all later ones, larger by what GELU leaves of that half; weights set for one stage fewer or for no root are seen"
    found, want = np.mean([ratios(256, stages, True, seed) for seed in range(8)], 0), 2**(1/stages) - 1
    assert abs(found[0]/want - 1) < .03 and np.all(abs(found[1:]/want*2*GELU - 1) < .1)
    w_s = MLPSpeculator(tiny(), stages=stages).w_s
    assert w_s**(2*stages) == pytest.approx(.5)   # what is left of state_0 in the variance
    assert abs(ratios(256, stages, True, power=256**-.25)[0]/want - 1) > .5


def test_the_norm_takes_no_mean_away():
    "A row's mean square becomes 1, its mean stays where it was in proportion, and then it is scaled and shifted"
    x, norm = 5 + torch.randn(3, 64, dtype=torch.float64), ScaledUnitRMS(64).double()
    assert torch.allclose(norm(x), x / x.square().mean(-1, keepdim=True).sqrt(), atol=1e-6)
    with torch.no_grad(): norm.weight.fill_(2.); norm.bias.fill_(3.)
    assert torch.allclose(norm(x), 2*unit_rms(x) + 3) and torch.allclose(unit_rms(x).mean(-1), x.mean(-1) / x.square().mean(-1).sqrt(), atol=1e-6)


def test_gelu_of_a_normal():
    "The mean square that the text states, by quadrature; a relu would leave exactly a half"
    z = np.linspace(-10, 10, 20001); w = np.exp(-z*z/2) / (2*math.pi)**.5 * (z[1] - z[0])
    assert abs((w * F.gelu(torch.from_numpy(z)).numpy()**2).sum() - GELU) < 1e-9 and abs(GELU - .4252) < 1e-4


# Labels

def test_the_labels_of_every_depth():
    "Entry j at place t is asked for x_{t+2+j}, and for the law after x_{t+1+j}: what answers so has no loss (or the entropy); one place off is seen, both ways"
    V, x = 7, torch.randint(7, (3, 12))
    say = lambda shift: [40*F.one_hot(x.roll(-(shift + j), 1)[:, :-1], V).double() for j in range(3)]
    assert token_loss(say(2), x) < 1e-6 and all(token_loss(say(k), x) > 10 for k in (1, 3))
    z = torch.randn(3, 3, 11, V, dtype=torch.float64)
    by_hand = [-z[j, :, t].log_softmax(-1).gather(-1, x[:, 2+j+t, None]).mean() / (10 - j) for j in range(3) for t in range(10 - j)]
    assert torch.allclose(token_loss(z, x), sum(by_hand))   # each depth weighs 1
    p = torch.randn(3, 12, V, dtype=torch.float64).mul(2).softmax(-1)
    law = lambda shift: [p.log().roll(-(shift + j), 1)[:, :-1] for j in range(3)]
    entropy = sum(-(p*p.log()).sum(-1)[:, 1+j:].mean() for j in range(3))
    assert torch.allclose(law_loss(law(1), p), entropy) and all(law_loss(law(k), p) > entropy + 1 for k in (0, 2))


def test_hydra_plus_is_taught_laws_and_hydra_tokens():
    "The tokens behind x_{t+1+j} do not enter the loss of Hydra++ but as inputs; Hydra's and the speculator's loss is to the tokens, all depths in it"
    base = tiny()
    f, x = torch.randn(2, 8, base.d, dtype=torch.float64), torch.randint(5, (2, 8))
    b = StateDataset(x, {base.layers: f})
    for family in FAMILIES:
        net, _ = made(family, base)
        guesses, p = net.guesses(b, 3), base.head(f).softmax(-1)
        assert torch.allclose(net.loss(b, 0.), law_loss(guesses, p) if family == "hydra++" else token_loss(guesses, x), atol=1e-12)
        net.loss(b, 0.).backward()
        grads = [w.grad for w in net.parameters()]
        assert all(g is not None and torch.isfinite(g).all() for g in grads) and all(w.grad is None for w in base.model.parameters())


# Paths

def grown(parent, tokens, ctx):
    tree = Tree(ctx)
    for u, x in zip(parent[1:], tokens): tree.add(u, x)
    return tree


trees = shapes(6).flatmap(lambda parent: st.tuples(st.just(parent), st.lists(st.integers(0, 2), min_size=len(parent), max_size=len(parent))))
CTX = (1, 4, 0, 2)


def shallow(parent):
    depth = [0]
    for u in parent[1:]: depth.append(depth[u] + 1)
    return max(depth) < 3


@proves("thm-paths")
@faithful("Hydra", "Hydra++", "MLP Speculator")
@families
@settings(max_examples=25)
@given(trees.filter(lambda t: shallow(t[0])), trees.filter(lambda t: shallow(t[0])))
def test_each_path_once(family, one, two):
    "Every node is answered as its path would be alone; a head runs once for every distinct path of a context, in one pass a depth, and no path is asked twice"
    base = tiny()
    net, drafts = made(family, base)
    model, seen = drafts(net, reader(base)), set()
    for parent, tokens in (one, two, one):
        tree = grown(parent, tokens, CTX)
        before = model.meter.copy()
        p = model(tree)
        paths = {tree.path(i) for i in range(len(tree))}
        for i in range(len(tree)):
            z = told(net, base, CTX, tree.path(i))
            assert abs(p.raw(i)/p.raw(i).sum() - np.exp(z - z.max())/np.exp(z - z.max()).sum()).max() < 1e-12 and abs(p[i] - p.raw(i)/p.raw(i).sum()).max() < 1e-12
        spent, new, first = model.meter - before, paths - seen, not seen
        own = len(CTX) - 1 if first and family == "hydra++" else 0   # the rows of the prefix
        assert spent.tokens == len(new) + own and spent.calls == len({len(path) for path in new}) + bool(own)
        seen |= paths


@families
def test_contexts_do_not_mix(family):
    "The same text, split elsewhere: a path from the newer state is another path; and back again"
    base = tiny()
    net, drafts = made(family, base)
    model = drafts(net, reader(base))
    for ctx, path in (((1, 4, 0), (2, 3)), ((1, 4, 0, 2), (3,)), ((1, 4, 0), (2, 3)), ((1, 0, 0), (2, 3)), ((1, 4), ()), ((1,), ())):
        tree = Tree(ctx)
        for u, x in enumerate(path): tree.add(u, x)
        row = model(tree)[len(path)]
        if len(ctx) == 1: assert np.allclose(row, 1/5); continue
        z = told(net, base, ctx, path)
        assert abs(row - np.exp(z - z.max())/np.exp(z - z.max()).sum()).max() < 1e-12
    assert abs(told(net, base, (1, 4, 0), (2, 3)) - told(net, base, (1, 4, 0, 2), (3,))).max() > 1e-3


class Greedy(PathDraft):
    "Mutant: one evaluation a depth, on the path of likeliest tokens, for all nodes of that depth"
    def answers(self, tree):
        line = Tree(tree.ctx)
        for u in range(max(tree.depth)): line.add(u, int(super().answers(line)[u].logits.argmax()))
        said = super().answers(line)
        return [said[d] for d in tree.depth]


class Unshifted(PathDraft):
    "Mutant: x_{t+1} is not told, but the token before it"
    def answers(self, tree):
        late = Tree((*tree.ctx[:-1], tree.ctx[-2]))
        for u, x in zip(tree.parent[1:], tree.token[1:]): late.add(u, x)
        return super().answers(late)


@pytest.mark.parametrize("mutant", [Greedy, Unshifted])
def test_mutants_of_the_paths(mutant):
    "Evaluated on the greedy path only, or not told the token that the target just gave: some node is not answered as its path would be"
    base = tiny()
    net, _ = made("hydra", base)
    tree = grown((-1, 0, 0, 1, 2), (0, 1, 1, 3), CTX)
    off = lambda model: max(abs(np.asarray(model(tree).raw(i))/np.asarray(model(tree).raw(i)).sum() - torch.tensor(told(net, base, CTX, tree.path(i))).softmax(-1).numpy()).max() for i in range(5))
    assert off(PathDraft(net, reader(base))) < 1e-12 and off(mutant(net, reader(base))) > .01


# Prefix rows

histories = st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 4), min_size=1, max_size=4)), min_size=2, max_size=8)


def prefix_error(drafts, history):
    "The worst deviation from a fresh drafter, over contexts that are cut somewhere and go on elsewhere"
    base = tiny()
    net, _ = made("hydra++", base)
    model, ctx, worst = drafts(net, reader(base)), (1, 2), 0.
    said = torch.no_grad()(lambda model: model.answers(Tree(ctx))[0].logits)
    for cut, more in history:
        ctx = (*ctx[:max(1, cut)], *more)
        worst = max(worst, (said(model) - said(PrefixDraft(net, reader(base)))).abs().max().item())
    return worst, model


@proves("prop-prefix-rows")
@faithful("Hydra++")
@settings(max_examples=20)
@given(histories)
def test_the_prefix_cache_equals_a_fresh_run(history):
    "After any history of accepted, refused and replaced texts, to 1e-10"
    assert prefix_error(PrefixDraft, history)[0] < 1e-10


class Stale(PrefixDraft):
    "Mutant: rows are counted, not looked at"
    def begin(self, ctx):
        if self.trie.text and len(ctx) - 1 <= len(self.trie.text): return self.memory.buffer["out"][0, len(ctx) - 2].clone()
        return super().begin(ctx)


def test_a_stale_prefix_row_is_seen():
    "A drafted token was replaced by the target's: a cache that only counts keeps the old row"
    history = [(2, [3, 4, 0]), (3, [1, 0])]
    assert prefix_error(PrefixDraft, history)[0] < 1e-10 and prefix_error(Stale, history)[0] > 1e-3


@faithful("Hydra++")
def test_the_prefix_layer_reads_what_is_new():
    "Each round feeds the rows that were accepted since, and no others; the states come from the target's own pass"
    base = tiny()
    net, _ = made("hydra++", base)
    target = reader(base)
    model, fed = PrefixDraft(net, target), []
    read = model.read
    model.read = lambda start, end, ctx: (fed.append(end - start), read(start, end, ctx))
    drafter, emitted = Chain(model, 2), []
    for _, r in zip(range(12), rounds(target, drafter, reject, (1, 2, 3), Seeded(0))): emitted.append(len(r.tokens))
    assert fed == [2, *emitted[:-1]] and target.meter.calls <= 12 + 1   # one pass for the prompt's states, then one a round


def test_a_failure_leaves_an_empty_cache():
    base = tiny()
    net, _ = made("hydra++", base)
    model = PrefixDraft(net, reader(base))
    want = model(Tree(CTX))[0].copy()
    enter, model.net.enter = model.net.enter, lambda *a: 1/0
    with pytest.raises(ZeroDivisionError): model(Tree((*CTX, 3)))
    model.net.enter = enter
    assert abs(model(Tree((*CTX, 3)))[0] - PrefixDraft(net, reader(base))(Tree((*CTX, 3)))[0]).max() < 1e-12 and abs(model(Tree(CTX))[0] - want).max() < 1e-12


# Laws

class Tabular(PathNetwork):
    "A table in place of the network: the state numbers the path, the logits are drawn once for each number"
    def __init__(self, base, depth=3):
        super().__init__(base, depth)
        self.table = 2*torch.randn(997, base.V, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    def enter(self, states): return (states[self.reads[0]].sum(-1, keepdim=True)*1e3).round() % 97
    def step(self, s, x, i): return (s*7 + x[..., None] + 1) % 997
    def logits(self, s, i): return self.table[s[..., 0].long()]


@cache
def tabular():
    base = tiny(V=3, d=16)
    return base, Tabular(base)


TREES = {
    "chain": lambda model: Chain(model, 2),
    "siblings": lambda model: Branching(model, (2, 1)),
    "ranks": lambda model: StaticTree(model, from_choices([(0,), (1,), (0, 0)]), lambda q: points(np.argsort(-q, kind="stable"), len(q))),
    "expanded": lambda model: DynamicTree(model, 2, 2, 3),
    "candidates": lambda model: CandidateTree(model, (2, 2), 3),
}


@pytest.mark.parametrize("how", TREES)
@pytest.mark.parametrize("drafts", [PathDraft, PrefixDraft])
def test_exact_law(how, drafts):
    "Every way of drafting from paths has the target's law, through the drafter's own code; the tables are another law than the target's"
    base, net = tabular()
    if drafts is PrefixDraft:
        net, _ = made("hydra++", base, heads=2)
    target, ctx = reader(base), (0, 2)
    drafter = TREES[how](drafts(net, target))
    n = 2 if how == "siblings" else 3
    assert tv_outcomes(loop_law(target, drafter, reject, ctx, n), target_law(target, ctx, n)) < 1e-12
    assert max(abs(np.asarray(drafter.model(Tree(c))[0]) - target.law(c)).max() for c in ((0, 2), (0, 1), (0, 2, 1))) > .1


def test_soft_laws_on_chosen_tokens_are_refused():
    "Mutant: the likeliest token, with the whole law on its edge as if drawn: another law comes out"
    base, net = tabular()
    target, ctx = reader(base), (0, 2)
    model = PathDraft(net, target)
    def draft(ctx, rng):
        tree, q = Tree(ctx), model(Tree(ctx))[0]
        tree.add(0, int(np.argmax(q)), q)
        return tree
    assert tv_outcomes(loop_law(target, draft, reject, ctx, 2), target_law(target, ctx, 2)) > .01


@families
@pytest.mark.parametrize("how", TREES)
def test_greedy_identity(family, how):
    "At temperature 0 the tokens are those of plain decoding, whatever the heads say"
    base = tiny()
    net, drafts = made(family, base)
    target = reader(base, temperature=0)
    out = generate(target, TREES[how](drafts(net, target)), reject, (1, 2), 20, Seeded(0))
    assert out == generate(reader(base, temperature=0), no_draft, reject, (1, 2), 20, Seeded(0))


# Candidates

@faithful("MLP Speculator")
@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_the_best_sequences_are_kept(seed, n):
    "Against all sequences written out: the n of largest probability, each whole, a shared beginning once"
    model = random_table(4, seed)
    ks, law = (3, 2, 2), lambda path: model.law((0, *path))
    top = lambda path, k: sorted((x for x in range(4) if law(path)[x] > 0), key=lambda x: -law(path)[x])[:k]
    every = {(): 1}
    for k in ks: every = {(*path, x): w*law(path)[x] for path, w in every.items() for x in top(path, k)}
    best = sorted(every, key=lambda path: -every[path])[:n]
    tree = CandidateTree(model, ks, n, exact=True)((0,), Seeded(0))
    leaves = {tree.path(i) for i in range(len(tree)) if not tree.children(i)}
    assert leaves == set(best) and len(tree) - 1 == len({path[:i] for path in best for i in (1, 2, 3)}) < 1 + 3*len(best)
    assert all(max(tree.law[i]) == 1 for i in range(1, len(tree)))


def test_candidates_are_ranked_before_the_warp():
    "At temperature 0 a law is a point, but the second guess is still known: the same tree as at temperature 1"
    base = tiny()
    net, drafts = made("mlp", base)
    hot, cold = (CandidateTree(drafts(net, reader(base, T)), (3, 2, 2), 4)((1, 2, 0), Seeded(0)) for T in (1., 0))
    assert hot == cold and len(hot) > 4


# The branching source

B, TAIL, GAMMA = 4, 3, 3
SETTINGS = {"hydra": dict(heads=GAMMA), "hydra++": dict(heads=GAMMA, inner=32), "mlp": dict(stages=GAMMA, inner=32)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("branching")
    base = TargetModel(branching(B, TAIL).float())
    train, held = (state_dataset(base, branch_texts(B, TAIL, n, 65, seed), (base.layers,), folder) for n, seed in ((128, 0), (64, 1)))
    return base, train, held[np.arange(64)], folder


def schooled(source, net, name, steps=200):
    base, train, held, folder = source
    torch.set_num_threads(1)
    return train_network(net, base, train, held, steps, 1e-2, folder/name, look=steps, rows=8, depth=GAMMA)[0]


def blinded(net):
    "The network with nothing in the place of the tokens"
    if isinstance(net, MLPSpeculator): net.terms = lambda s, x, i: (module_at(net.proj, i)(s), 0*module_at(net.emb, i)(x))
    else: net.step = lambda s, x, i: torch.cat([s, 0*net.base[0].embed(x)], -1)
    return net


@faithful("Hydra", "Hydra++", "MLP Speculator")
@families
def test_told_heads_pass_the_branch(source, family):
    "Taught for seconds: nearly every draft is right where independent heads are capped; without its tokens, at once or taught so, a head is capped too"
    base, _, held, _ = source
    make, _ = FAMILIES[family]
    settings = SETTINGS[family]
    torch.manual_seed(0)
    net, cap = schooled(source, make(base, **settings), family), float(chain_tokens(B, TAIL, GAMMA))
    assert evaluate(net, base, held, GAMMA)[0] > GAMMA + 1 - .1 > cap + 1
    assert evaluate(blinded(net), base, held, GAMMA)[0] < cap + .05
    torch.manual_seed(0)
    blind = schooled(source, blinded(make(base, **settings)), family + "-blind")
    assert cap - .3 < evaluate(blind, base, held, GAMMA)[0] < cap + .05


def test_wrong_labels_and_late_tokens_are_capped(source):
    "Mutants, taught alike: labels one place early or late, or x_{t+1} left out of what is told, stay far below"
    base, _, held, _ = source
    class Early(Hydra):
        def loss(self, batch, at): return token_loss([z[:, 1:] for z in self.guesses(batch, self.depth)], batch.x[:, :-1])
    class Late(Hydra):
        def loss(self, batch, at): return token_loss([z[:, :-1] for z in self.guesses(batch, self.depth)], batch.x[:, 1:])
    class Untold(Hydra):
        def step(self, s, x, i): return super().step(s, x, i) if i else torch.cat([s, 0*self.base[0].embed(x)], -1)
    for mutant in (Early, Late, Untold):
        torch.manual_seed(0)
        net = schooled(source, mutant(base, heads=GAMMA), mutant.__name__)
        assert evaluate(net, base, held, GAMMA)[0] < GAMMA + 1 - .5


@families
def test_the_branch_decoded(source, family):
    "The same by decoding: rounds of a taught head on the source at temperature 1 emit γ + 1 tokens nearly always, in one pass a depth"
    base, _, _, _ = source
    make, drafts = FAMILIES[family]
    torch.manual_seed(0)
    net = schooled(source, make(base, **SETTINGS[family]), family)
    target = HFModel(base.model, keep=(base.layers,), check=False)
    model = drafts(net, target)
    seen = [len(r.tokens) for _, r in zip(range(60), rounds(target, Chain(model, GAMMA), reject, (2, 3, 4), Seeded(0)))]
    assert np.mean(seen) > GAMMA + 1 - .2 > float(chain_tokens(B, TAIL, GAMMA)) + .5


# Checkpoints

SHIPPED = {"hydra": 2.5, "hydra++": 3.5, "mlp": 1.5}   # and the most megabytes each may have


@cache
def shipped(name):
    base = TargetModel(raw_model("target"))
    return base, load_checkpoint(FAMILIES[name][0], base, DATA/"drafters"/name)


@cache
def written():
    "What the target writes after held-out prompts, and its states"
    gen, base = torch.Generator().manual_seed(5), TargetModel(raw_model("target"))
    with torch.inference_mode():
        x = torch.cat([sample_texts(base.model, torch.tensor(prompts(d, 6, seed=9)), 96, gen, half=False) for d in DOMAINS])
        return StateDataset(x, {base.layers: base.model(input_ids=x, output_hidden_states=True).hidden_states[base.layers]})


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name):
    "Small enough, with its recipe, for this target and no other; on text that was not taught a chain of four emits what the card says, nearly"
    base, net = shipped(name)
    folder = DATA/"drafters"/name
    assert (folder/"model.safetensors").stat().st_size < SHIPPED[name] * 1e6
    card = json.loads((folder/"config.json").read_text())
    assert card["target"] == base.facts() and card["recipe"]["steps"]
    tokens, betas = evaluate(net, base, written(), 4)
    assert tokens > 1.6 and min(betas) > .33 and abs(tokens - card["tokens"]) < .3


@families
def test_hearing_matters(family):
    "With nothing in the place of the tokens a shipped checkpoint loses a third of a token a round or more"
    base, net = shipped(family)
    silent = blinded(load_checkpoint(FAMILIES[family][0], base, DATA/"drafters"/family))
    assert evaluate(silent, base, written(), 4)[0] < evaluate(net, base, written(), 4)[0] - .3


@faithful("Hydra", "Hydra++", "MLP Speculator")
@families
def test_a_sampled_head_is_kept_with_the_overlap(family):
    "On the embedded target the share of accepted first drafts is the mean of Σ min(p, q) at the very same places, to five standard errors"
    base, net = shipped(family)
    target = HFModel(base.model, keep=(base.layers,), check=False)
    model = FAMILIES[family][1](net, target)
    seen = [r for _, r in zip(range(150), rounds(target, Chain(model, 1), reject, prompts("code", 1)[0], Seeded(0)))]
    beta = np.array([overlap(np.asarray(r.p[0]), np.asarray(r.tree.law[1])) for r in seen])
    assert abs(np.mean([r.verdict.node for r in seen]) - beta.mean()) < 5*np.sqrt((beta*(1 - beta)).sum())/len(beta) and beta.std() > .1


@families
def test_greedy_on_the_embedded_target(family):
    "Forty tokens of English and of code at temperature 0, in float64, by a tree of the shipped heads: those of plain decoding, in fewer calls"
    base = TargetModel(raw_model("target", torch.float64))
    make, drafts = FAMILIES[family]
    net, calls = load_checkpoint(make, base, DATA/"drafters"/family), 0
    for d in DOMAINS:
        target, start = reader(base, 0), prompts(d, 1, seed=5)[0]
        out = generate(target, CandidateTree(drafts(net, target)), reject, start, 40, Seeded(0))
        assert out == generate(reader(base, 0), no_draft, reject, start, 40, Seeded(0))
        calls += len(out.ledger.rounds)
    assert calls < 70   # 80 without drafts


def test_a_checkpoint_goes_round_and_is_refused(tmp_path):
    "What is saved is what is loaded, to float16; another kind, another target, another shape are refused by name"
    base, other = tiny(), tiny(V=6)
    for family, (make, _) in FAMILIES.items():
        net, _ = made(family, base)
        save_network(net, base, tmp_path/family)
        back = load_checkpoint(make, base, tmp_path/family)
        assert back.settings == net.settings and all(torch.equal(v, net.state_dict()[k].half().to(v.dtype)) for k, v in back.state_dict().items())
        refuses("target", load_checkpoint, make, other, tmp_path/family)
    refuses("folder", load_checkpoint, Hydra, base, tmp_path/"mlp")
    weights = Hydra(base, heads=2).state_dict()
    refuses("weights", set_weights, Hydra(base, heads=3), weights)
    refuses("weights", set_weights, Hydra(tiny(d=32), heads=2), weights)


def test_bad_input():
    "Arguments that make no network, and questions it cannot answer"
    base = tiny()
    for make, wrong in ((Hydra, dict(heads=0)), (Hydra, dict(layers=0)), (HydraPlus, dict(matrices=0)), (MLPSpeculator, dict(stages=0)), (MLPSpeculator, dict(inner=-1))):
        refuses(*wrong, make, base, **wrong)
    net, drafts = made("hydra", base)
    refuses("target", drafts, net, random_table(5, 0))
    refuses("target", drafts, net, HFModel(base.model, check=False))
    deep = grown((-1, 0, 1, 2), (0, 0, 0), CTX)
    refuses("tree", drafts(net, reader(base)), deep)
    refuses("ks", CandidateTree, drafts(net, reader(base)), (5, 0)); refuses("n", CandidateTree, drafts(net, reader(base)), (5,), 0); refuses("model", CandidateTree, 3)
    refuses("ks", CandidateTree, drafts(net, reader(base)), ())
