"Chapter 31: heads that begin as the target's own, the tree that they need, the judge that is not lossless, and a target that learns with its heads"
from itertools import combinations
from math import log

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from contracts import drafter_contract
from helpers import cold, faithful, laws, models, proves, refuses, seeds
from specref.train.branching import branch_texts, branching, chain_tokens
from specref.core.rng import Seeded, tv_outcomes, law_of
from specref.core.law import exact, overlap, one_hot, tv
from specref.verify.lossy import AcceptanceRule, typical
from specref.core.loop import generate, loop_law, match, autoregressive, rounds
from specref.train.medusa import Adapter, MedusaDraft, HeadMarginals, Medusa, Medusa2, AdaptedStates, MedusaTree, medusa_loss, accept_longest, head_accuracy
from specref.models.embedded import DATA, DOMAINS, raw_model, embedded, prompts
from specref.verify.reject import Chain, reject
from specref.draft.shapes import StaticTree, ParallelHeadTree, medusa_choices, skip_accuracy, top_tokens
from specref.verify.siblings import Branching
from specref.core.target import Rows, TableModel, random_table, target_law
from specref.train.harness import TargetModel, StateDataset, state_dataset, load_checkpoint, evaluate, save_network, train_network
from specref.models.recipe import llama
from specref.models.transformer import HFModel
from specref.core.tree import Tree, from_choices, points

HEADS = DATA / "drafters" / "medusa"
TWO = DATA / "drafters" / "medusa2"


@pytest.fixture(scope="module")
def base(): return TargetModel(raw_model("target"))


def tiny(seed=0, V=3, dtype=torch.float64):
    "A random target of one narrow layer"
    torch.manual_seed(seed)
    model = llama(1, 32, 64, vocab_size=V, positions=64).to(dtype)
    for w in model.parameters(): w.data.mul_(6 if w.dim() > 1 else 1)
    return TargetModel(model)


def learnt(base, heads=3, seed=0, make=Medusa, **kw):
    "Heads whose weights are random, as if they had learnt something"
    torch.manual_seed(seed)
    net = make(base, heads, **kw)
    with torch.no_grad():
        for w in net.heads.parameters(): w.add_(torch.randn_like(w) * .3)
    return net.eval()


def texts(base, n=3, T=12, seed=0): return np.random.default_rng(seed).integers(0, base.V, (n, T)).astype(np.uint16)


def thought(base, x):
    "Lessons that were not rounded on the way to a disk"
    x = torch.as_tensor(x.astype(np.int64))
    with torch.inference_mode(): f = base.model(input_ids=x, output_hidden_states=True, use_cache=False).hidden_states[-1]
    return StateDataset(x, {base.layers: f.clone()})


# Blindness

@proves("thm-blind")
@settings(max_examples=40)
@given(laws(3), laws(6), st.tuples(*[laws(2)] * 3))
def test_what_is_not_read_costs(P, q, inner):
    "Disjoint next laws: no law that is blind to b is kept more often than max P, no n points more often than the n largest; on points the bounds are reached"
    some = [np.concatenate([w if b == c else 0 * w for c in range(3)]) for b, w in enumerate(inner)]   # after b only tokens 2b and 2b + 1
    sharp = [one_hot(2*b, 6, exact=True) for b in range(3)]
    kept = lambda p, q: sum(P[b] * overlap(p[b], q) for b in range(3))
    assert kept(some, q) <= max(P) == kept(sharp, sharp[int(np.argmax(P))]) and sum(P[b] * overlap(some[b], some[b]) for b in range(3)) == 1
    for n in (1, 2, 3):
        hit = lambda p: max(sum(P[b] * p[b][list(C)].sum() for b in range(3)) for C in combinations(range(6), n))
        assert hit(some) <= sum(sorted(P)[-n:]) == hit(sharp)


# The heads

@proves("prop-untrained")
@faithful("Medusa")
def test_untrained_heads_say_the_targets_logits(base):
    "Bit for bit, on real text; with upstream's random bias they do not; and the gradient by the zero matrix is half that by the state, times the state"
    x = torch.tensor([text for d in DOMAINS for text in prompts(d, 2, length=48)])
    with torch.inference_mode(): out = base.model(input_ids=x, output_hidden_states=True)
    net, f = Medusa(base), out.hidden_states[-1].clone()
    assert len(net(f)) == 4 and all(torch.equal(z, out.logits) for z in net(f))
    upstream = Medusa(base)
    for head in upstream.heads: head.step.reset_parameters(); nn.init.zeros_(head.step.weight)
    assert not any(torch.equal(z, out.logits) for z in upstream(f))
    f, w = f[0, :8].requires_grad_(), torch.randn(8, base.V)
    (net.heads[0](f) * w).sum().backward()
    want = (net.heads[0].lm.weight.T @ w.T / 2) @ f.detach()
    assert torch.allclose(net.heads[0].step.weight.grad, want, rtol=1e-3, atol=1e-4) and want.abs().max() > 1


def test_the_targets_head_is_copied_and_not_shared(base):
    "The copy learns, the original keeps every bit"
    net = Medusa(base)
    own = {w.data_ptr() for w in net.parameters()}
    assert not own & {w.data_ptr() for w in base.model.parameters()} and all(w.requires_grad for w in net.parameters())
    assert sum(w.numel() for w in net.parameters()) == 4 * (base.d**2 + base.d + base.d * base.V)
    assert not any("base" in name for name in net.state_dict())


@pytest.mark.parametrize("heads", [1, 3])
def test_the_loss_by_hand(heads):
    "Σ .8^k CE(head k at t, x[t+k+1]): by loops over the places; head 1 has the token after the next for its label"
    b = tiny()
    batch, net = thought(b, texts(b)), learnt(b, heads)
    f, x, total = batch.states[b.layers], batch.x, 0
    for k in range(1, heads + 1):
        each = [-net.heads[k-1](f[i, t]).log_softmax(-1)[x[i, t+k+1]] for i in range(3) for t in range(12 - k - 1)]
        total += .8**k * sum(each) / len(each)
    assert torch.isclose(net.loss(batch, 0.), total, atol=1e-12)


def off_by_one(guesses, x, decay=.8):
    "The mutant: head k learns x[t+k]"
    return sum(decay**k * F.cross_entropy(z[:, :-k].flatten(0, 1), x[:, k:].flatten()) for k, z in enumerate(guesses, 1))


class Mislabelled(Medusa):
    def loss(self, batch, at): return off_by_one(self.guesses(batch, len(self.heads)), batch.x)


def taught(make, b, x, folder, steps=120, heads=3, **kw):
    torch.manual_seed(0)
    train = state_dataset(b, x, (b.layers,), folder / "states")
    held = train[slice(0, 32)]
    return train_network(make(b, heads, **kw), b, train, held, steps, 3e-2, folder / make.__name__, look=steps//2, rows=16, depth=heads)[0], held


@faithful("Medusa")
def test_the_branching_source_caps_medusa(tmp_path):
    "A few seconds of teaching reach the closed form for independent heads and not more; with labels one place early nothing beyond the first token is gained"
    b, gamma = TargetModel(branching(4, 3).float()), 3
    x = branch_texts(4, 3, 64, 48)
    net, held = taught(Medusa, b, x, tmp_path)
    bound = float(chain_tokens(4, 3, gamma))
    total, betas = evaluate(net, b, held, gamma)
    assert abs(total - bound) < .05 and bound < gamma + 1 - .5, (total, bound)
    wrong, _ = taught(Mislabelled, b, x, tmp_path)
    assert evaluate(wrong, b, held, gamma)[0] < total - .5
    assert evaluate(Medusa(b), b, held, gamma)[0] < total - .5


# In the loop

def test_heads_read_the_state_before_the_last_token():
    "The law after a node of depth j is head j + 1 on the state of the last token but one; another last token changes nothing; the path changes nothing"
    b = tiny()
    net, model = learnt(b), HFModel(b.model, keep=(b.layers,), check=False)
    heads = MedusaDraft(net, model)
    f = model.states((1, 0, 2))[b.layers][-1]
    tree = Tree((1, 0, 2, 1))
    for u, x in ((0, 0), (0, 2), (1, 1), (3, 0)): tree.add(u, x)
    p = heads(tree)
    with torch.inference_mode(): want = [z.softmax(-1).numpy() for z in net(f)] + [np.full(3, 1/3)]
    assert all(abs(p[i] - want[d]).max() < 1e-12 for i, d in enumerate(tree.depth))
    other = Tree((1, 0, 2, 0))
    for u, x in ((0, 1), (1, 2)): other.add(u, x)
    assert all(abs(heads(other)[i] - want[i]).max() < 1e-12 for i in range(3))
    class Late(MedusaDraft):   # the mutant reads the state of x_{t+1}, which nobody has
        def states(self, ctx): return self.target.states(ctx, self.net.reads)
    assert abs(Late(net, model)(tree)[0] - want[0]).max() > 1e-3


def test_contexts_do_not_mix():
    "A context of the same length, and back again: each is answered as by heads that have seen nothing"
    b = tiny()
    net, model = learnt(b), HFModel(b.model, keep=(b.layers,), check=False)
    heads, fresh = MedusaDraft(net, model), lambda ctx: MedusaDraft(net, model)(Tree(ctx))[0]
    for ctx in ((1, 0, 2), (1, 2, 2), (1, 0, 2), (0, 0, 2, 1), (2, 1)): assert abs(heads(Tree(ctx))[0] - fresh(ctx)).max() < 1e-12
    assert abs(fresh((1, 0, 2)) - fresh((1, 2, 2))).max() > 1e-3


@faithful("Medusa")
def test_a_drafted_token_changes_no_head(base):
    "On real text: whatever stands at x_{t+1}, and whatever was drafted, every head says the same"
    net, model = load_checkpoint(Medusa, base, HEADS), embedded(keep=(base.layers,))
    heads, ctx = MedusaDraft(net, model), prompts("code", 1)[0]
    seen = []
    for x in (1, 100, 500):
        tree = Tree((*ctx, x))
        for j in range(3): tree.add(j, (x + 7*j) % base.V)
        p = heads(tree)
        seen.append(np.stack([p[j] for j in range(4)]))
    assert np.allclose(seen[0], seen[1], atol=1e-5) and np.allclose(seen[0], seen[2], atol=1e-5)
    assert all(abs(a - c).sum() > .05 for a, c in combinations(seen[0], 2))   # and the heads are four different ones


@faithful("Medusa")
def test_one_pass_of_the_heads_a_round(base):
    "The target reads the root and the drafts once each and nothing for the heads' sake; the heads are asked once a round, for a chain of four too; reading the last token's state costs a target call more"
    net, prompt = load_checkpoint(Medusa, base, HEADS), prompts("english", 1)[0]
    class Late(MedusaDraft):
        def states(self, ctx): return self.target.states(ctx, self.net.reads)
    calls = {}
    for make in (MedusaDraft, Late):
        model = embedded(keep=(base.layers,))
        heads = make(net, model)
        seen = [r for _, r in zip(range(8), rounds(model, Chain(heads, 4), reject, prompt, Seeded(0)))]
        assert heads.meter.calls == heads.meter.tokens == 8
        calls[make] = model.meter.calls
    assert calls[MedusaDraft] == 1 + 8   # the prompt before the first draft, and a pass a round
    assert calls[Late] > calls[MedusaDraft]


@pytest.mark.parametrize("temperature", [1., .7])
@pytest.mark.parametrize("drafter", ["chain", "shape", "ranked", "slots"])
def test_the_law_is_the_targets(drafter, temperature):
    "All of the drafter's code on a random target of three tokens, every path enumerated"
    b = tiny(1)
    net, model = learnt(b, 2), HFModel(b.model, temperature=temperature, keep=(b.layers,), check=False)
    heads = MedusaDraft(net, model)
    rows = HeadMarginals(heads, 2)
    make = {"chain": Chain(heads, 2), "shape": StaticTree(heads, (-1, 0, 0, 1)),
            "ranked": MedusaTree(rows, [(0,), (1,), (0, 0), (0, 1)]), "slots": ParallelHeadTree(rows, 4)}[drafter]
    assert tv_outcomes(loop_law(model, make, reject, (0, 1), 3), target_law(model, (0, 1), 3)) < 1e-12


class Table:
    "Tabular heads in fractions: a law for each place after the last token but one"
    def __init__(self, V, seed, depth=3): self.V, self.depth, self.rows = V, depth, random_table(V, seed)
    @property
    def meter(self): return self.rows.meter
    def __call__(self, tree): return Rows(lambda i: self.rows.law((*tree.ctx[:-1], tree.depth[i] % self.V)), len(tree), self.V)


@settings(max_examples=25)
@given(models(3), seeds)
def test_the_law_in_fractions(both, seed):
    "Perfect or not, tabular heads are lossless: an independent sampled chain, siblings, a planned tree and slots; every edge states its law"
    target, heads = both[0], Table(3, seed)
    rows, want = HeadMarginals(heads, 2), target_law(target, (0, 1), 2)
    drafters = Chain(heads, 2), Branching(heads, (2,)), MedusaTree(rows, ((0,), (1,), (0, 0)), exact=True), ParallelHeadTree(rows, 3, exact=True)
    for drafter in drafters:
        drafter_contract(drafter, (0, 1))
        assert loop_law(target, drafter, reject, (0, 1), 2) == want


class Claimed(MedusaTree):
    "The mutant: first choices, said to be drawn from the heads' law"
    def __call__(self, ctx, rng):
        tree = Tree(ctx)
        for i, q in enumerate(self.marginals(ctx)): tree.add(i, top_tokens(q, 1)[0], q)
        return tree


def reranked(heads):
    "The mutant: two sampled children, and only the one that the heads think likelier is offered, with the law that it was drawn from"
    def draft(ctx, rng):
        tree, q = Tree(ctx), heads(Tree(ctx))[0]
        x = max(rng.pick(q, at=1), rng.pick(q, at=2), key=lambda x: q[x])
        tree.add(0, x, q)
        return tree
    return draft


def test_liars_are_found():
    "A soft law claimed for first choices, and sampled children ranked by their own value, break the law and the contract; the honest ones keep both"
    target, heads = random_table(3, 1, zeros=False), Table(3, 8)
    assert len(set(map(float, heads(Tree((0, 1)))[0]))) == 3
    want, rows = target_law(target, (0, 1), 2), HeadMarginals(heads, 1)
    honest, wrong = MedusaTree(rows, ((0,),), exact=True), Claimed(rows, ((0,),), exact=True)
    assert loop_law(target, honest, reject, (0, 1), 2) == want == loop_law(target, Chain(heads, 1), reject, (0, 1), 2)
    for liar in (wrong, reranked(heads)):
        assert tv_outcomes(loop_law(target, liar, reject, (0, 1), 2), want) > .01
        with pytest.raises(AssertionError, match="stated"): drafter_contract(liar, (0, 1))


@pytest.mark.parametrize("domain", DOMAINS)
def test_greedy_text_is_plain_text(domain):
    "In double precision at temperature 0, a chain, a planned tree, slots and a match judge all give plain decoding's text, in fewer rounds"
    b = TargetModel(raw_model("target", torch.float64))
    net, model, prompt = load_checkpoint(Medusa, b, HEADS), HFModel(b.model, temperature=0, keep=(b.layers,), check=False), prompts(domain, 1, seed=4)[0]
    heads = MedusaDraft(net, model)
    rows, want = HeadMarginals(heads, 4), autoregressive(model, prompt, 24, Seeded(0))
    choices = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]
    for drafter, judge in ((Chain(heads, 4), reject), (ParallelHeadTree(rows, 8), match), (MedusaTree(rows, choices), accept_longest(typical()))):
        out = generate(model, drafter, judge, prompt, 24, Seeded(0))
        assert out == want and len(out.ledger.rounds) < 23
    assert set(out.ledger.models) == {"target", "draft"}


def test_a_text_of_one_token_has_no_state():
    "There the heads know nothing, and the law is the target's all the same"
    b = tiny(2)
    model = HFModel(b.model, keep=(b.layers,), check=False)
    heads = MedusaDraft(learnt(b, 2), model)
    assert np.allclose(heads(Tree((1,)))[0], 1/3)
    for drafter in (Chain(heads, 2), MedusaTree(HeadMarginals(heads, 2), ((0,), (0, 1)))):
        assert tv_outcomes(loop_law(model, drafter, reject, (1,), 3), target_law(model, (1,), 3)) < 1e-12


# The tree

def test_choices_come_from_the_unwarped_rows():
    "At temperature 0 the draft model's law is a point; the rows for a tree still have a second choice, and are laws"
    b = tiny(3)
    net = learnt(b, 2)
    for T in (0, 1):
        heads = MedusaDraft(net, HFModel(b.model, temperature=T, keep=(b.layers,), check=False))
        assert (heads(Tree((0, 1)))[0] == 1).any() == (T == 0)
        rows = HeadMarginals(heads, 2)((0, 1))
        with torch.inference_mode(): z = net(heads.target.states((0,))[b.layers][-1])
        assert all(abs(row - z[j].softmax(-1).numpy()).max() < 1e-12 for j, row in enumerate(rows))


@settings(max_examples=50)
@given(seeds, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), unique=True, min_size=1, max_size=9))
def test_ranks_become_tokens(seed, some):
    "Node by node: a path of ranks is the path of the heads' choices of these ranks"
    choices = sorted({v[:i] for v in some for i in range(1, len(v) + 1)}, key=lambda v: (len(v), v))
    rows = HeadMarginals(TableModel(4, lambda text: exact(*np.random.default_rng([seed, len(text)]).permutation([1, 2, 3, 5]).tolist())), 3)
    tree = MedusaTree(rows, choices, exact=True)((0, 1), Seeded(0))
    best = [top_tokens(row, 3) for row in rows((0, 1))]
    assert {tree.path(i) for i in range(1, len(tree))} == {tuple(best[j][r] for j, r in enumerate(v)) for v in choices}
    assert len(tree) == len(choices) + 1 and all(tree.law[i][tree.token[i]] == 1 for i in range(1, len(tree)))


def test_a_head_of_few_choices_gives_fewer_nodes():
    "A rank that a head has no token for is left out, with all that hangs on it"
    rows = HeadMarginals(TableModel(3, lambda text: exact(1, 0, 0)), 2)
    assert MedusaTree(rows, ((0,), (1,), (0, 0), (1, 0)), exact=True)((0, 1), Seeded(0)).path(2) == (0, 0)
    assert len(MedusaTree(rows, ((0,), (1,), (0, 0), (1, 0)), exact=True)((0, 1), Seeded(0))) == 3


def connected(nodes, n):
    "Every set of n paths that holds all beginnings of its paths"
    return [c for c in combinations(nodes, n) if all(len(v) == 1 or v[:-1] in c for v in c)]


@faithful("Medusa")
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_calibrated_tree_is_the_best_of_all(base, tmp_path, n):
    "On the table of the shipped heads: no connected tree of n nodes, among all of three ranks and three places, is worth more"
    x = np.array([text for d in DOMAINS for text in prompts(d, 8, length=48, seed=5)], np.uint16)
    table = head_accuracy(load_checkpoint(Medusa, base, HEADS), state_dataset(base, x, (base.layers,), tmp_path)[:], 3)[:3]
    worth = lambda paths: sum(np.prod([table[j][r] for j, r in enumerate(v)]) for v in paths)
    nodes = [(a,) for a in range(3)] + [(a, c) for a in range(3) for c in range(3)] + [(0, a, c) for a in range(3) for c in range(3)] + [(a, c, d) for a in (1, 2) for c in range(3) for d in range(3)]
    assert abs(worth(medusa_choices(table, n)) - max(map(worth, connected(nodes, n)))) < 1e-12
    from_choices(medusa_choices(table, n))


def test_ranked_counts_what_counted_counts():
    "The batch count is the place-by-place count of chapter 20, less the first places, where there is no state to read"
    b, k = tiny(4, V=5), 3
    net, x = learnt(b, 2, seed=3), texts(b, 3, 14)
    heads = MedusaDraft(net, HFModel(b.model, keep=(b.layers,), check=False))
    slow = skip_accuracy(HeadMarginals(heads, 2), x.tolist(), k) * (3 * 12)
    for text in x.tolist():
        for j in range(2): slow[j, [r for r in range(k) if r == text[1 + j]]] -= 1
    assert np.allclose(head_accuracy(net, thought(b, x), k), slow / (3 * 11))
    by_hand, f = np.zeros((2, k)), thought(b, x)
    for i in range(3):
        for t in range(14 - 3):
            for j in range(2):
                order = net.heads[j](f.states[b.layers][i, t]).argsort(descending=True)[:k].tolist()
                by_hand[j] += [y == x[i, t + 2 + j] for y in order]
    assert np.allclose(head_accuracy(net, f, k), by_hand / 33)


# Typical acceptance

@proves("prop-typical")
@faithful("Medusa")
def test_the_threshold_falls_with_the_entropy():
    "1 of the 4 tokens of (.97, .01, .01, .01), all 50 of a uniform law; the likeliest of any law"
    keeps = lambda p: int((typical(.09, .3).kept(p, exact(*[1] * len(p))) > 0).sum())
    assert keeps(exact(97, 1, 1, 1)) == 1 and keeps(exact(*[1] * 50)) == 50


@proves("prop-typical")
@settings(max_examples=30)
@given(models(3), seeds)
def test_typical_is_greedy_where_the_target_is(both, seed):
    "Rows that are points: the longest typical path is plain greedy decoding; the likeliest token of every row is typical"
    target, rows = cold(both[0]), HeadMarginals(Table(3, seed), 2)
    drafter = MedusaTree(rows, ((0,), (1,), (0, 0), (0, 1), (1, 0)), exact=True)
    assert loop_law(target, drafter, accept_longest(typical()), (0, 1), 4) == target_law(target, (0, 1), 4)
    p = both[0].law((0, 1))
    assert typical().kept(p, p)[int(np.argmax(p))] > 0


def test_the_longest_path_wins_and_of_equals_the_likeliest():
    "Against an enumeration of all paths"
    target, rule = random_table(4, 5, zeros=False), typical(.2, .5)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tree = Tree((0,))
        for _ in range(8): tree.grow(int(rng.integers(len(tree))), points(rng.permutation(4).tolist(), 4, exact=True), Seeded(0), 1)
        p = target(tree)
        good = lambda i: all(rule.kept(p[tree.parent[a]], tree.law[a])[tree.token[a]] > 0 for a in tree.ancestors(i))
        score = lambda i: (tree.depth[i], sum(log(p[tree.parent[a]][tree.token[a]]) for a in tree.ancestors(i)))
        assert score(accept_longest(rule)(p, tree, Seeded(0)).node) == max(score(i) for i in range(len(tree)) if good(i))


def test_a_point_that_is_kept_in_part_is_not_followed():
    "A rule that keeps points with their probability keeps none whole, where nothing is sure; where all is sure, it follows the text"
    part, tree = AcceptanceRule(np.minimum, lambda p, q: p), Tree((0,))
    tree.grow(0, points([1, 0], 2, exact=True), Seeded(0), 2)
    assert accept_longest(part)([exact(1, 3)] * 3, tree, Seeded(0)).node == 0 and accept_longest(part)([exact(0, 1)] * 3, tree, Seeded(0)).node == 1


def test_typical_is_not_lossless():
    "Its distance on a table, exactly: reject has none"
    target, rows = random_table(3, 1, zeros=False), HeadMarginals(Table(3, 8), 2)
    drafter, want = MedusaTree(rows, ((0,), (1,), (0, 0)), exact=True), target_law(target, (0, 1), 2)
    assert loop_law(target, drafter, reject, (0, 1), 2) == want
    assert tv_outcomes(loop_law(target, drafter, accept_longest(typical()), (0, 1), 2), want) > .1


# Medusa-2

def test_the_adapter_is_off_at_first_and_never_touches_the_target():
    "At zero the changed target is the target bit for bit; after steps of learning the target still is, and the copy with merged weights says what the changed one says"
    b = tiny(5, V=7)
    x = torch.as_tensor(texts(b).astype(np.int64))
    before, adapter = {n: w.clone() for n, w in b.model.named_parameters()}, Adapter(b, 2)
    original = thought(b, x.numpy()).states[b.layers]
    assert torch.equal(adapter.states(x), original) and len(adapter.names) == 7 and b.head.weight.shape == (7, 32)
    assert not any("embed" in n or "lm_head" in n for n in adapter.names)
    with torch.no_grad():
        for w in adapter.up: w.normal_()
    changed = TargetModel(adapter.merged())
    assert torch.allclose(thought(changed, x.numpy()).states[b.layers], adapter.states(x), atol=1e-12) and not torch.allclose(adapter.states(x), original)
    assert torch.equal(thought(b, x.numpy()).states[b.layers], original) and all(torch.equal(w, before[n]) for n, w in b.model.named_parameters())
    n, W = adapter.names[0], adapter.weights()
    assert torch.equal(W[n], before[n] + 8 * adapter.up[0] @ adapter.down[0])   # alpha / rank = 16/2
    assert torch.linalg.matrix_rank(W[n] - before[n]) == 2


def test_the_layers_of_gpt2_are_changed_too():
    "GPT-2 keeps its matrices the other way round, in modules of another name: adapter, merged copy and gradient are there; a model with nothing to change is refused"
    torch.manual_seed(0)
    b = TargetModel(GPT2LMHeadModel(GPT2Config(vocab_size=7, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None)).double())
    batch, net = thought(b, texts(b)), learnt(b, 2, make=Medusa2, rank=2)
    assert len(net.adapter.names) == 8
    with torch.no_grad():
        for w in net.adapter.up: w.normal_(std=.1)
    net.loss(batch, .9).backward()
    assert all(w.grad.abs().max() > 0 for w in net.adapter.up)
    other = thought(TargetModel(net.adapter.merged()), texts(b)).states[b.layers]
    assert torch.allclose(other, net.adapter.states(batch.x), atol=1e-10) and abs(other - batch.states[b.layers]).max() > 1e-3
    class Bare:
        model = nn.Sequential(nn.Embedding(3, 2), head := nn.Linear(2, 3))
    refuses("base", Adapter, Bare)


@faithful("Medusa-2")
@proves("prop-held-back")
def test_at_first_only_the_heads_pull():
    "With the adapter at zero, KL and its gradient are zero; the heads' loss has one; away from zero KL is positive and pulls back"
    b = tiny(6, V=7)
    batch, net = thought(b, texts(b)), learnt(b, 2, make=Medusa2, rank=2)
    kl = net.kept(net.adapter.states(batch.x), batch)
    grads = torch.autograd.grad(kl, list(net.adapter.up))
    assert abs(kl) < 1e-12 and all(g.abs().max() < 1e-12 for g in grads)
    pull = torch.autograd.grad(medusa_loss(net(net.adapter.states(batch.x)), batch.x), list(net.adapter.up))
    assert max(g.abs().max() for g in pull) > 1e-4
    with torch.no_grad():
        for w in net.adapter.up: w.normal_(std=.05)
    kl = net.kept(net.adapter.states(batch.x), batch)
    p, q = (b.head(s).softmax(-1) for s in (batch.states[b.layers], net.adapter.states(batch.x)))
    assert torch.isclose(kl, (p * (p.log() - q.log())).sum(-1).mean(), atol=1e-9) and kl > 1e-5
    assert sum((g * w).sum() for g, w in zip(torch.autograd.grad(kl, list(net.adapter.up)), net.adapter.up)) > 0


@faithful("Medusa-2")
def test_who_gets_a_gradient():
    "Medusa-1: the heads alone. Medusa-2: in the warm-up the heads alone, then heads and adapter; the target never"
    b = tiny(7, V=7)
    batch = thought(b, texts(b))
    def moved(net, at):
        net.zero_grad(set_to_none=True)
        net.loss(batch, at).backward()
        assert all(w.grad is None and not w.requires_grad for w in b.model.parameters())
        return {name.split(".")[0] for name, w in net.named_parameters() if w.grad is not None and w.grad.abs().max() > 1e-9}   # more than rounding: at adapter zero the heads alone pull
    assert moved(learnt(b), .9) == {"heads"}
    two = learnt(b, make=Medusa2, rank=2, warm=.2)
    assert moved(two, .1) == {"heads"} and moved(two, .2) == moved(two, .9) == {"heads", "adapter"}


def test_the_joint_loss_is_the_sum():
    "KL + weight · Σ .8^k CE, the heads reading the changed state; marks read it too"
    b = tiny(8, V=7)
    batch, net = thought(b, texts(b)), learnt(b, 2, make=Medusa2, rank=2, weight=.3)
    with torch.no_grad():
        for w in net.adapter.up: w.normal_(std=.1)
    changed = TargetModel(net.adapter.merged())
    other = thought(changed, texts(b))
    want = net.kept(other.states[b.layers], batch) + .3 * medusa_loss(net.guesses(other, 2), batch.x)
    assert torch.isclose(net.loss(batch, .5), want, atol=1e-10)
    got, same = evaluate(net, b, AdaptedStates(net, batch.x), 2), evaluate(net, changed, other, 2)
    assert abs(got[0] - same[0]) < 1e-9 and np.allclose(got[1], same[1]) and abs(got[0] - evaluate(net, b, batch, 2)[0]) > 1e-4


def test_learning_together_through_the_harness(tmp_path):
    "Through the shared harness: warm-up, then adapter and heads, marked on the changed states; the target that was given keeps every bit"
    b = tiny(9, V=7, dtype=torch.float32)
    x = np.random.default_rng(0).integers(0, 7, (64, 24)).astype(np.uint16)
    train, folder = state_dataset(b, x, (b.layers,), tmp_path / "states"), tmp_path / "two"
    torch.manual_seed(0)
    net = Medusa2(b, 2, rank=2, warm=.3)
    net, told = train_network(net, b, train, AdaptedStates(net, train[slice(0, 8)].x), 40, 1e-3, folder, look=20, rows=8, depth=2)
    assert len(told) == 2 and max(w.abs().max() for w in net.adapter.up) > 0
    assert b.facts() == tiny(9, V=7, dtype=torch.float32).facts()


@proves("prop-other")
@settings(max_examples=30)
@given(models(3))
def test_two_targets_are_as_far_apart_as_their_steps(both):
    "TV of the laws of three tokens is at most the mean, over p's texts, of the sum of the steps' TV"
    p, q = both
    steps = sum(w * sum(tv(p.law((0, *y[:i])), q.law((0, *y[:i]))) for i in range(3)) for y, w in target_law(p, (0,), 3).items())
    assert tv_outcomes(target_law(p, (0,), 3), target_law(q, (0,), 3)) <= steps


@faithful("Medusa-2")
@pytest.mark.parametrize("make", [lambda heads: Chain(heads, 2), lambda heads: MedusaTree(HeadMarginals(heads, 2), ((0,), (1,), (0, 0)))])
def test_decoding_is_lossless_for_the_changed_target(make):
    "And not for the original"
    b = tiny(10)
    net = learnt(b, 2, make=Medusa2, rank=2)
    with torch.no_grad():
        for w in net.adapter.up: w.normal_(std=.3)
    changed, original = (HFModel(m, keep=(b.layers,), check=False) for m in (net.adapter.merged(), b.model))
    law = loop_law(changed, make(MedusaDraft(net, changed)), reject, (0, 1), 3)
    assert tv_outcomes(law, target_law(changed, (0, 1), 3)) < 1e-12 and tv_outcomes(law, target_law(original, (0, 1), 3)) > .01


@faithful("Medusa-2")
def test_the_shipped_pair(base):
    "Medusa-2's heads, believed by the target that learnt with them, are as good as Medusa-1's, nearly, and worse on the original; the changed target is near the original and not it"
    one, two = load_checkpoint(Medusa, base, HEADS), load_checkpoint(Medusa2, base, TWO)
    x = np.array([text for d in DOMAINS for text in prompts(d, 12, length=96, seed=3)], np.uint16)
    human, changed = thought(base, x), TargetModel(two.adapter.merged())
    theirs = thought(changed, x)
    first, second = evaluate(one, base, human, 4), evaluate(two, changed, theirs, 4)
    assert min(first[0], second[0] + .1) > evaluate(Medusa(base), base, human, 4)[0] + .2
    assert second[0] > first[0] - .1 and second[0] > evaluate(two, base, human, 4)[0]
    p, q = (base.head(s.states[base.layers]).softmax(-1) for s in (human, theirs))
    assert .001 < (p - q).abs().sum(-1).mean() / 2 < .2
    assert sum(f.stat().st_size for f in HEADS.iterdir()) < 1.3e6 and sum(f.stat().st_size for f in TWO.iterdir()) < 3e6


# Bad input

def test_bad_input(tmp_path):
    b, other = tiny(), tiny(V=5)
    net = learnt(b)
    model = HFModel(b.model, keep=(b.layers,), check=False)
    rows = HeadMarginals(MedusaDraft(net, model), 3)
    refuses("heads", Medusa, b, 0); refuses("rank", Adapter, b, 0)
    refuses("target", MedusaDraft, net, random_table(3, 0)); refuses("target", MedusaDraft, net, HFModel(b.model, check=False))
    refuses("model", HeadMarginals, None, 2); refuses("depth", HeadMarginals, MedusaDraft(net, model), 0); refuses("marginals", MedusaTree, None, ((0,),))
    refuses("choices", MedusaTree, rows, ((0, 0),)); refuses("choices", MedusaTree, rows, ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))
    refuses("rule", accept_longest, reject)
    save_network(net, b, tmp_path)
    assert all(torch.allclose(w, net.state_dict()[k], atol=1e-2) for k, w in load_checkpoint(Medusa, b, tmp_path).state_dict().items())
    refuses("target", load_checkpoint, Medusa, other, tmp_path); refuses("folder", load_checkpoint, Medusa2, b, tmp_path)
