"Chapter 13: one leaf more changes nothing, so every rule of the family is exact; traversal is one of them; nothing exceeds the bound"
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations
from random import Random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import continued, verifier_contract
from helpers import CANON, DRAWS, Plan, Recorder, constant, draws, killer, laws, models, pairs, plans, proves, refuses, seeds, shapes
from specref.verify.block import mean_accepted_block, block
from specref.certify.certificates import certify_system
from specref.core.rng import Seeded, Tape, tv_outcomes, law_of, verdict_tape
from specref.core.law import exact, normalize
from specref.core.loop import System, Verdict, loop_law
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching
from specref.core.target import Rows, TableModel, random_table, target_law
from specref.verify.traversal import parent_donates, best_rule, acceptance_bound, all_donate, all_donors, by_transfer, later_donate, layer_donors, seen_layers, mean_accepted, not_deeper_donate, reachable, scaled_residual, capped_ratio, transfer_mass, traversal
from specref.core.tree import Tree, iid, without_replacement

F = Fraction
RULES = {"reject": reject, "traversal": traversal, "layered": layer_donors, "generous": all_donors}
ANSWERS = {"alone": parent_donates, "later": later_donate, "no deeper": not_deeper_donate, "everyone": all_donate}
rules, answers = st.sampled_from(sorted(RULES)), st.sampled_from(sorted(ANSWERS))
ORD3 = constant(3, 2, 1), constant(1, 2, 3)


@dataclass(frozen=True)
class Grown:
    "A drafter of trees with the given parents, a node's children drawn together, the nodes in order"
    model: object
    parents: tuple
    draw: object
    @property
    def models(self): return (self.model,)
    def __call__(self, ctx, rng):
        tree = Tree(ctx)
        for u in sorted(set(self.parents[1:])): tree.grow(u, self.draw(self.model.law(tree.text(u))), rng, self.parents.count(u))
        return tree


SHAPES = {"chain": (-1, 0, 1), "siblings": (-1, 0, 0), "asymmetric": (-1, 0, 0, 1, 1), "two chains": (-1, 0, 0, 1, 2), "delayed": (-1, 0, 1, 1), "binary": (-1, 0, 0, 1, 1, 2, 2)}


def ends(p, tree, gives):
    "The verdicts of `transfer_mass`, with their probabilities"
    m, r = transfer_mass(p, tree, gives)
    return {Verdict(v, y): w*z for v, w in m.items() if w for y, z in enumerate(r[v]) if z}


def texts(p, tree, gives):
    "The law of the text that a verdict emits"
    out = {}
    for v, w in ends(p, tree, gives).items(): out[v.tokens(tree)] = out.get(v.tokens(tree), 0) + w
    return out


def depth(p, tree, gives): return sum(w * tree.depth[v] for v, w in transfer_mass(p, tree, gives)[0].items())


def some(seed):
    "Any nodes at all make room, as long as the leaf is not looked at"
    return lambda tree, v, u: Random(f"{seed} {v} {u} {tree.path(v)}").random() < .5


def any_tree(parents, V, seed):
    "A tree of that shape with tokens and edge laws made up at random: no drafter, no promise"
    tree, rng = Tree((0,)), Random(seed)
    for u in parents[1:]:
        q = exact(*(w if any(w := [rng.choice([0, 1, 2, 5]) for _ in range(V)]) else [1]*V))
        tree.add(u, rng.choice([x for x in range(V) if q[x]]), q)
    return tree


# One leaf more

@proves("thm-leaf")
@settings(max_examples=150)
@given(models(), shapes(4), st.data(), seeds)
def test_one_leaf_more(pair, parents, data, seed):
    "Whatever the tree, the leaf's law and whoever makes room: the continued text keeps its law, and C β tokens more are accepted"
    p, gives = pair[0], data.draw(st.sampled_from([*ANSWERS.values(), some(seed)]))
    tree = any_tree(parents, 3, seed)
    u, q, n = data.draw(st.sampled_from(range(len(tree)))), data.draw(laws(3)), max(tree.depth) + 2
    larger = []
    for x in range(3):
        if q[x]: larger.append((any_tree(parents, 3, seed), q[x])); larger[-1][0].add(u, x, q)
    before = continued(texts(p(tree), tree, gives), p, (0,), n)
    after = {}
    for t, w in larger:
        for y, v in continued(texts(p(t), t, gives), p, (0,), n).items(): after[y] = after.get(y, 0) + w*v
    assert after == before
    m, r = transfer_mass(p(tree), tree, gives)
    C = sum(m[v] for v in m if v == u or gives(tree, v, u))
    gain = sum(np.minimum(m[u] * r[u], C * q)) if m.get(u) else 0
    assert sum(w * depth(p(t), t, gives) for t, w in larger) - depth(p(tree), tree, gives) == gain >= 0


@proves("thm-leaf")
@given(models(st.integers(2, 4)), shapes(6), st.data(), seeds)
def test_an_end_is_certain(pair, parents, data, seed):
    "The masses are probabilities, on every single tree"
    m, r = transfer_mass(pair[0](tree := any_tree(parents, pair[0].V, seed)), tree, data.draw(st.sampled_from([*ANSWERS.values(), some(seed)])))
    assert sum(m.values()) == 1 and min(m.values()) >= 0 and all(sum(r[v]) == 1 and min(r[v]) >= 0 for v in m if m[v])


@dataclass(frozen=True)
class Nosy:
    "Where the next node goes, how its token is drawn and when to stop depend on everything drawn so far"
    model: object
    seed: int
    most: int = 4
    def __call__(self, ctx, rng):
        tree = Tree(ctx)
        while len(tree) <= self.most:
            chance = Random(f"{self.seed} {tree.parent} {tree.token}")
            u, q = chance.randrange(len(tree)), chance.choice([self.model.law(tree.text(0)), exact(*(1 + chance.randrange(3) for _ in range(self.model.V)))])
            if len(tree) > 1 and chance.random() < .2: break
            tree.add(u, rng.pick(q, at=len(tree)), q)
        return tree


@proves("cor-leaves")
@settings(max_examples=60)
@given(models(), seeds, st.data(), st.integers(1, 3))
def test_a_draft_that_looks_at_itself(pair, seed, data, n):
    "Any tree, grown by looking at what was drawn, under every rule and under any choice of who makes room"
    verify = data.draw(st.sampled_from([*RULES.values(), by_transfer(some(seed))]))
    verifier_contract(pair[0], Nosy(pair[1], seed, 3), verify, (0,), n)


@proves("cor-leaves")
@settings(max_examples=100)
@given(models(), plans(3), rules, st.integers(1, 3))
def test_trees(pair, steps, name, n):
    "Honest trees with probes: independent, without replacement, points and mixed siblings; zeros, ties, disjoint supports, near-equal laws"
    verifier_contract(pair[0], Plan(pair[1], steps), RULES[name], (0,), n)


@proves("cor-leaves")
@settings(max_examples=25)
@given(models(st.integers(4, 5)), st.sampled_from([(2,), (1, 2), (3,)]), draws, rules)
def test_larger_vocabularies(pair, shape, how, name): verifier_contract(pair[0], Branching(pair[1], shape, DRAWS[how]), RULES[name], (0,), 2)


@proves("cor-leaves")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "binary"])
@pytest.mark.parametrize("draw", [iid, without_replacement])
def test_the_pair_that_kills_mutants(name, shape, draw):
    "One token beyond the tree, on laws that turn with the last token"
    target, draft = killer()
    verifier_contract(target, Grown(draft, SHAPES[shape], draw), RULES[name], (0,), max(2, len(SHAPES[shape]) - 2))


@proves("cor-leaves")
@settings(max_examples=60)
@given(models(), st.sampled_from([s for s in SHAPES if s != "binary"]), draws, rules)
def test_kinds_of_trees(pair, shape, how, name):
    "Chain, siblings, asymmetric, two chains, delayed, with every way of drawing"
    verifier_contract(pair[0], Grown(pair[1], SHAPES[shape], DRAWS[how]), RULES[name], (0,), 3)


@proves("thm-traversal", "cor-leaves")
@pytest.mark.parametrize("name", RULES)
def test_the_binary_tree(name):
    "Seven nodes, four tokens"
    target, draft = killer()
    verifier_contract(target, Grown(draft, SHAPES["binary"], without_replacement), RULES[name], (0,), 4)


@proves("cor-leaves")
@settings(max_examples=8)
@given(models(), st.sampled_from([(2, 1), (1, 2)]), rules, st.sets(st.integers(0, 2), max_size=1))
def test_whole_loops(pair, shape, name, stop):
    "Every road of three tokens"
    got = loop_law(pair[0], Branching(pair[1], shape), RULES[name], (0, 1), 3, stop)
    assert got == target_law(pair[0], (0, 1), 3, stop)


@proves("cor-leaves")
@settings(max_examples=40)
@given(models(), seeds, answers)
def test_the_gains_add_up(pair, seed, name):
    "E[accepted] is the sum of the gains of the leaves, in the mean over trees, and counts what the rule accepts"
    drafter, gives = Nosy(pair[1], seed, 3), ANSWERS[name]
    trees = law_of(lambda rng: drafter((0,), rng))
    assert mean_accepted(pair[0], drafter, by_transfer(gives), (0,)) == sum(w * depth(pair[0](t), t, gives) for t, w in trees.items())


# The walk

@proves("thm-traversal", "prop-alone")
@settings(max_examples=150)
@given(models(st.integers(2, 4)), shapes(5), seeds)
def test_walks_are_settled(pair, parents, seed):
    "The verdict has the same law on every single tree: the walk and `later_donate`, `reject` and `parent_donates`; a rule of the family and its masses"
    p = pair[0](tree := any_tree(parents, pair[0].V, seed))
    for verify, gives in ((traversal, later_donate), (reject, parent_donates), (all_donors, all_donate), (layer_donors, not_deeper_donate)):
        assert law_of(lambda rng: verify(p, tree, rng)) == ends(p, tree, gives)


@proves("thm-traversal")
@settings(max_examples=60)
@given(models(st.integers(2, 4)), st.integers(0, 4), seeds)
def test_on_chains_and_stars(pair, n, seed):
    "On a chain all but `parent_donates` are block verification; on one layer the walk and `layer_donors` are `reject`"
    V = pair[0].V
    p = pair[0](line := any_tree([-1, *range(n)], V, seed))
    want = law_of(lambda rng: block(p, line, rng))
    assert all(ends(p, line, gives) == want for gives in (later_donate, not_deeper_donate, all_donate)) and law_of(lambda rng: traversal(p, line, rng)) == want
    p = pair[0](star := any_tree([-1, *[0]*n], V, seed))
    assert law_of(lambda rng: traversal(p, star, rng)) == law_of(lambda rng: reject(p, star, rng)) == ends(p, star, later_donate)


@proves("thm-traversal")
@settings(max_examples=60)
@given(models(), plans(4), st.integers(1, 3))
def test_traversal_of_trees(pair, steps, n): verifier_contract(pair[0], Plan(pair[1], steps), traversal, (0,), n)


def test_order_of_the_walk():
    "Children before their parent, elder siblings first"
    tree = any_tree((-1, 0, 0, 1, 1, 2, 3), 2, 0)
    assert sorted(range(7), key=lambda v: sum(later_donate(tree, v, u) for u in range(7))) == [6, 3, 4, 1, 5, 2, 0]


# By hand, and published numbers

def test_by_hand():
    "Token 2 with 0, 1 or 2 below: the pair stands with 1, 1/3, 1/9, and else the second guess does"
    p, q = exact(3, 2, 1), exact(1, 2, 3)
    for x, w in enumerate((1, F(1, 3), F(1, 9))):
        tree = Tree((0,)); elder = tree.add(0, 2, q); tree.add(0, 0, q); tree.add(elder, x, q)
        got = law_of(lambda rng: traversal([p]*4, tree, rng).node)
        assert got == {k: v for k, v in {3: w, 2: 1 - w}.items() if v}


def fractions(text): return [F(x) for x in text.split()]


ORACLES = {  # verification.md §9.1 and §17: E[accepted], independent and without replacement
    ("ORD3", "reject"): {"chain": "10/9 10/9", "siblings": "13/18 7/9", "asymmetric": "65/54 35/27", "two chains": "65/54 35/27", "delayed": "31/27 32/27", "binary": "403/324 112/81"},
    ("ORD3", "traversal"): {"chain": "7/6 7/6", "siblings": "13/18 7/9", "asymmetric": "5/4 4/3", "two chains": "34/27 73/54", "delayed": "43/36 11/9", "binary": "209/162 115/81"},
    ("KILLER", "reject"): {"chain": "21/20 21/20", "siblings": "13/16 7/8", "asymmetric": "487/400 41/28", "two chains": "91/80 49/40", "delayed": "231/200 75/56", "binary": "1001/800 25/16"},
    ("KILLER", "traversal"): {"chain": "133/120 133/120", "siblings": "13/16 7/8", "asymmetric": "2299/1800 3/2", "two chains": "287/240 77/60", "delayed": "4373/3600 11/8", "binary": "9439/7200 179/112"},
}
PAIRS = {"ORD3": ORD3, "KILLER": killer()}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_accepted_by_enumeration(pair, shape):
    "Every road of the draft and of the verdict"
    for name in ("reject", "traversal"):
        target, draft = PAIRS[pair]
        got = [mean_accepted(target, Grown(draft, SHAPES[shape], draw), RULES[name], (0,)) for draw in (iid, without_replacement)]
        assert got == fractions(ORACLES[pair, name][shape])


# What no rule can exceed

LIMITS = {  # verification.md §9.3 and §17: the best weights by layers on ORD3, the best rule of all on KILLER
    ("ORD3", seen_layers): {"siblings": (.805556, .916667), "asymmetric": (1.330247, 1.465278), "two chains": (1.435957, 1.622685), "delayed": (1.236111, 1.291667), "binary": (1.547840, 1.798611)},
    ("KILLER", None): {"siblings": (.9375, 1), "asymmetric": (1.423681, 1.696726), "two chains": (1.438889, 1.557870), "delayed": (1.238889, 1.401190)},
    ("ORD3", None): {"asymmetric": (1.390432, 1.5)},
}


@proves("thm-bound", "thm-layers")
@pytest.mark.parametrize("pair,seen", LIMITS)
def test_published_limits(pair, seen):
    target, draft = PAIRS[pair]
    for shape, want in LIMITS[pair, seen].items():
        got = [acceptance_bound(target, Grown(draft, SHAPES[shape], draw), (0,), *[seen][:bool(seen)]) for draw in (iid, without_replacement)]
        assert got == pytest.approx(want, abs=6e-7)


@proves("thm-bound", "thm-layers")
@settings(max_examples=40)
@given(models(), st.sampled_from([s for s in SHAPES if s != "binary"]), draws)
def test_no_rule_exceeds_the_bound(pair, shape, how):
    "Every rule of the family stays below the best of the layers, and that below the best of all"
    target, drafter = pair[0], Grown(pair[1], SHAPES[shape], DRAWS[how])
    rates = [float(mean_accepted(target, drafter, verify, (0,))) for verify in (*RULES.values(), by_transfer(some(len(shape))))]
    limits = acceptance_bound(target, drafter, (0,), seen_layers), acceptance_bound(target, drafter, (0,))
    assert max(rates) <= limits[0] + 1e-9 and limits[0] <= limits[1] + 1e-9


@proves("thm-bound")
@settings(max_examples=25)
@given(models(st.integers(2, 3)), st.integers(1, 3))
def test_on_chains_block_attains_it(pair, gamma):
    "The closed form of block verification, the enumeration of it, and the program"
    target, draft = pair
    drafter, want = Chain(draft, gamma), float(mean_accepted_block(target, draft, (0,), gamma))
    assert acceptance_bound(target, drafter, (0,)) == pytest.approx(want, abs=1e-9) == acceptance_bound(target, drafter, (0,), seen_layers)
    assert float(mean_accepted(target, drafter, traversal, (0,))) == pytest.approx(want, abs=1e-12)


@proves("thm-bound")
@settings(max_examples=40)
@given(pairs(st.integers(2, 4)), st.sampled_from([iid, without_replacement]), st.integers(1, 3))
def test_on_one_layer_it_is_the_optimal_coupling(pq, draw, k):
    "1 + min over sets H of p(H) - P(all children in H) (verification.md §7.1)"
    p, q = pq
    target, drafter = constant(*p), Grown(constant(*q), (-1, *[0]*k), draw)
    inside = law_of(lambda rng: frozenset(drafter((0,), rng).token[1:]))
    sets = chain.from_iterable(combinations(range(len(p)), n) for n in range(len(p) + 1))
    want = 1 + min(sum(p[list(H)], F(0)) - sum(w for S, w in inside.items() if S <= set(H)) for H in sets)
    assert acceptance_bound(target, drafter, (0,)) == pytest.approx(float(want), abs=1e-9)


def test_published_optimal_couplings():
    "The four-token pair: 79/100 and 871/1000 for independent children, 701/840 and 1 without replacement; `all_donors` comes closer than `reject`"
    p, q = CANON
    for draw, want in ((iid, (F(79, 100), F(871, 1000))), (without_replacement, (F(701, 840), 1))):
        for k, w in zip((2, 3), want): assert acceptance_bound(constant(*p), Grown(constant(*q), (-1, *[0]*k), draw), (0,)) == pytest.approx(float(w), abs=1e-9)
    two = Grown(constant(*q), (-1, 0, 0), iid)
    assert [mean_accepted(constant(*p), two, RULES[name], (0,)) for name in ("reject", "generous")] == [F(18, 25), F(77, 100)]


def looked_up(plan):
    "The rule that looks its answers up in the solution of the program"
    def verify(p, tree, rng):
        text = [*plan[tree]][rng.pick(normalize(np.maximum([*plan[tree].values()], 0) + 1e-18))]   # a tree of next to no probability may have all zeros
        return Verdict(next(v for v in reachable(tree) if tree.path(v) == text[:-1]), text[-1])
    return verify


@proves("thm-bound")
@settings(max_examples=12)
@given(models(), st.sampled_from(["siblings", "asymmetric", "delayed"]), draws)
def test_the_bound_is_attained(pair, shape, how):
    "By a lossless rule: the solution, looked up; the conditions of the theorem are neither too weak nor too strong"
    target, drafter = pair[0], Grown(pair[1], SHAPES[shape], DRAWS[how])
    verify, n = looked_up(best_rule(target, drafter, (0,))), 3
    some = law_of(lambda rng: (v := verify(None, tree := drafter((0,), rng), rng)).tokens(tree))
    assert tv_outcomes(continued(some, target, (0,), n), target_law(target, (0,), n)) < 1e-8
    assert mean_accepted(target, drafter, verify, (0,)) == pytest.approx(acceptance_bound(target, drafter, (0,)), abs=1e-8)


def test_a_rule_above_the_bound_is_lossy():
    def lenient(p, tree, rng, i=0):
        for c in tree.children(i):
            if rng.coin(2*p[i][tree.token[c]], of=tree.law[c][tree.token[c]], at=c): return lenient(p, tree, rng, c)
        return Verdict(i, rng.pick(p[i], at=i))
    target, draft = killer()
    drafter = Grown(draft, SHAPES["asymmetric"], iid)
    assert mean_accepted(target, drafter, lenient, (0,)) > acceptance_bound(target, drafter, (0,)) + .1
    assert tv_outcomes(loop_law(target, drafter, lenient, (0,), 1), target_law(target, (0,), 1)) > 0


# Layers

def prefix(tree, d):
    "The layers of a tree down to depth d"
    out = Tree(tree.ctx)
    for i in range(1, len(tree)):
        if tree.depth[i] <= d: out.add(tree.parent[i], tree.token[i], tree.law[i])
    return out


class Flow:
    "The sweep of Theorem layers, with weights that are feasible and otherwise arbitrary, what is missing found by enumeration"
    def __init__(self, target, drafter, seed): self.target, self.drafter, self.seed, self.know = target, drafter, seed, {}

    def weights(self, tree):
        "A child may have its share of its parent's mass, what its layer has left, or a part of that"
        w, p = {0: F(1)}, self.target(tree)
        for c in range(1, len(tree)):
            u, x, left = tree.parent[c], tree.token[c], 1 - sum(w[v] for v in w if tree.depth[v] == tree.depth[c])
            some = F(Random(f"{self.seed} {tree.path(c)} {c}").randrange(1, 4), 3)
            w[c] = some * min(left, w[u] * p[u][x] / len(tree.children(u)) / tree.law[c][x])
        return w

    def missing(self, tree, d):
        "w p, less the weight of the children in the mean over the next layer, for each node of layer d"
        here = prefix(tree, d)
        if here not in self.know:
            w, p, trees = self.weights(here), self.target(here), law_of(lambda rng: self.drafter((0,), rng))
            R = {u: w[u] * p[u] for u in range(len(here)) if here.depth[u] == d}
            given = {t: v for t, v in trees.items() if prefix(t, d) == here}
            for t, v in given.items():
                for c, z in self.weights(prefix(t, d + 1)).items():
                    if t.depth[c] == d + 1: R[t.parent[c]][t.token[c]] -= z * v / sum(given.values())
            self.know[here] = R
        return self.know[here]

    def __call__(self, p, tree, rng):
        w = self.weights(tree)
        for d in reversed(range(max(tree.depth) + 1)):
            R = self.missing(tree, d)
            mass, free = sum(r.sum() for r in R.values()), 1 - sum(w[u] for u in R)
            assert free >= 0 and min(r.min() for r in R.values()) >= 0, "the weights are not feasible"
            if mass and rng.coin(mass, of=mass + free, at=f"layer {d}"):
                u = [*R][rng.pick([r.sum() / mass for r in R.values()])]
                return Verdict(u, rng.pick(R[u] / R[u].sum()))


@proves("thm-layers")
@settings(max_examples=10)
@given(models(), st.sampled_from([(-1, 0, 1), (-1, 0, 0, 1), (-1, 0, 1, 1)]), st.sampled_from([iid, without_replacement]), seeds)
def test_any_feasible_weights(pair, shape, draw, seed):
    "The sweep has the law of the target, and accepts each layer's weights"
    target, drafter = pair[0], Grown(pair[1], shape, draw)
    flow = Flow(target, drafter, seed)
    verifier_contract(target, drafter, flow, (0,), 3)
    trees = law_of(lambda rng: drafter((0,), rng))
    assert mean_accepted(target, drafter, flow, (0,)) == sum(v * (sum(flow.weights(t).values()) - 1) for t, v in trees.items())


@proves("thm-layers")
@settings(max_examples=30)
@given(models(), st.sampled_from([s for s in SHAPES if s != "binary"]), st.sampled_from([iid, without_replacement]), answers)
def test_the_family_is_lossless_given_the_layers(pair, shape, draw, name):
    "Given a layer, the mean mass of texts that go on from a node with a token is the node's weight times p"
    target, drafter, gives = pair[0], Grown(pair[1], SHAPES[shape], draw), ANSWERS[name]
    trees = law_of(lambda rng: drafter((0,), rng))
    for d in range(2):
        seen = {}
        for t, v in trees.items(): seen.setdefault(prefix(t, d), []).append((t, v))
        for here, group in seen.items():
            w, total = transfer_mass(target(here), here, gives)[0], sum(v for _, v in group)
            for u in (u for u in range(len(here)) if here.depth[u] == d):
                on = np.zeros(3, dtype=object)
                for t, v in group:
                    for verdict, z in ends(target(t), t, gives).items():
                        if u in (0, *t.ancestors(verdict.node)): on[verdict.tokens(t)[d]] += z * v / total
                assert (on == w.get(u, 0) * target(here)[u]).all()


# No order among the rules

@proves("prop-alike")
@settings(max_examples=40)
@given(models(), st.sampled_from([(2, 1), (1, 2), (3,), (1, 2, 1), (3, 1)]))
def test_alike_siblings(pair, shape):
    "Independent siblings with equal trees below: the walk accepts at least as much as `reject`"
    trees = law_of(lambda rng: Branching(pair[1], shape, iid)((0,), rng))
    walk, turns = (sum(w * depth(pair[0](t), t, gives) for t, w in trees.items()) for gives in (later_donate, parent_donates))
    assert walk >= turns


@proves("prop-order")
def test_no_order():
    "Two tokens, five nodes: 385/216 by `reject`, 375/216 by the walk, 7/4 by the others"
    target, drafter = constant(2, 1), Grown(constant(1, 1), (-1, 0, 1, 1, 3), without_replacement)
    assert [mean_accepted(target, drafter, verify, (0,)) for verify in RULES.values()] == [F(385, 216), F(375, 216), F(7, 4), F(7, 4)]


@proves("prop-order")
def test_no_order_the_other_way():
    "One node deeper the two new rules are above `reject`; and where the third of three siblings has a child, `all_donors` is below it"
    target, drafter = constant(2, 1), Grown(constant(1, 1), (-1, 0, 1, 1, 3, 4), iid)
    rates = {name: mean_accepted(target, drafter, verify, (0,)) for name, verify in RULES.items()}
    assert rates["traversal"] < rates["reject"] < rates["layered"] < rates["generous"]
    target, draft = ORD3
    drafter = Grown(draft, (-1, 0, 0, 0, 3), without_replacement)
    assert [mean_accepted(target, drafter, verify, (0,)) for verify in RULES.values()] == [F(31, 27), F(31, 27), F(7, 6), F(41, 36)]


# Floats, size, doors

@settings(max_examples=60)
@given(models(), plans(3), rules, st.integers(0, 2))
def test_floats(pair, steps, name, ulps):
    "In float64, and with a draft a few ulps from the target, the law is the target's to twelve digits"
    soft = [TableModel(3, lambda text, m=m: m.law(text).astype(float)) for m in pair]
    nudged = TableModel(3, lambda text: np.array([np.nextafter(x, x + (-1)**i) if x else x for i, x in enumerate(soft[0].law(text))]))
    drafter = Plan(nudged if ulps else soft[1], tuple((at, "iid" if how in ("mixed", "points") else how, k) for at, how, k in steps))
    some = law_of(lambda rng: RULES[name](soft[0](tree := drafter((0,), rng)), tree, rng).tokens(tree)[:2])
    assert tv_outcomes(continued(some, soft[0], (0,), 2), target_law(soft[0], (0,), 2)) < 1e-12


@given(models(), seeds, rules)
def test_masses_in_floats(pair, seed, name):
    "The masses agree with the fractions to twelve digits"
    tree = Nosy(pair[1], seed)((0,), Seeded(seed))
    soft = Tree((0,))
    for u, x, q in zip(tree.parent[1:], tree.token[1:], tree.law[1:]): soft.add(u, x, q.astype(float))
    for gives in ANSWERS.values():
        exactly, nearly = (transfer_mass(p, t, gives)[0] for p, t in ((pair[0](tree), tree), ([pair[0](tree)[i].astype(float) for i in range(len(tree))], soft)))
        assert all(abs(float(exactly.get(v, 0)) - nearly.get(v, 0)) < 1e-12 for v in range(len(tree)))


@pytest.mark.parametrize("name", RULES)
def test_a_deep_chain(name):
    "Five hundred nodes"
    V, rng = 4, np.random.default_rng(0)
    rows = rng.dirichlet(np.ones(V), 501)
    tree = Tree((0,))
    for i in range(500): tree.grow(i, iid(.99*rows[i] + .01/V), Seeded(i))
    v = RULES[name](rows, tree, Seeded(1))
    assert v.node > 0 and 0 <= v.token < V


def test_rows_are_read_where_the_walk_comes_by():
    "No row of a leaf that is refused, none below a token that the target cannot say, none of a younger branch than the one that is accepted"
    p, q = exact(1, 1, 0), exact(0, 1, 1)
    tree = Tree((0,)); never = tree.add(0, 2, q); tree.add(never, 1, q); elder = tree.add(0, 1, q); tree.add(elder, 2, q); younger = tree.add(0, 1, q); tree.add(younger, 1, q)
    for verify in (traversal, all_donors):
        rows = Rows(lambda i: p, len(tree), 3)
        verify(rows, tree, Tape({("coin", i): 0. for i in range(7)} | {("pick", i): .5 for i in range(8)}))
        assert set(rows.made) <= {0, elder}


def test_memory_and_reading_at_size():
    "Eight nodes at V = 32,000: no copies of all rows are held, whoever makes room"
    V, rng = 32_000, np.random.default_rng(0)
    rows = rng.dirichlet(np.ones(V), 9)
    tree = Tree((0,))
    for i in range(8): tree.grow(i, iid(rows[i]*.5 + .5/V), Seeded(i))
    tracemalloc.start()
    traversal(rows, tree, Seeded(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 13 * rows[0].nbytes   # what is left at each of eight nodes, and a few rows in the making


@settings(max_examples=30)
@given(models(), plans(3), rules, seeds)
def test_noise_is_asked_for_once(pair, steps, name, seed):
    "Each question has an address of its own, and the tape of a verdict repeats it"
    tree, table = Plan(pair[1], steps)((0,), Seeded(seed)), {}
    v = RULES[name](pair[0](tree), tree, Recorder(Seeded(seed + 1), table))
    assert RULES[name](pair[0](tree), tree, Tape(table)) == v


@pytest.mark.parametrize("name", ["traversal", "layered", "generous"])
def test_counts(name):
    "Eight tokens in floats: three tokens of text, counted"
    target, draft = (TableModel(8, lambda text, m=random_table(8, seed, zeros=False): m.law(text).astype(float)) for seed in (5, 6))
    found = certify_system(System(name, Branching(draft, (2, 2)), RULES[name]), target, (0,), n=3, runs=1500)
    assert found.passes and found.test.tv < .25


def test_doors():
    "A law of another size, a context of other tokens, a draft of another vocabulary"
    tree = Tree((0,)); tree.add(0, 1, exact(1, 1))
    for verify in RULES.values():
        for row in (exact(1, 1, 1), exact(1)): refuses("q", verify, [row]*2, tree, verdict_tape([0, 1.], [0, 0, 0]))
    for f in (acceptance_bound, best_rule): refuses("ctx", f, constant(1, 1), Chain(constant(1, 1), 1), ())
    refuses("ctx", mean_accepted, constant(1, 1), Chain(constant(1, 1), 1), traversal, (2,))
    refuses("drafter", acceptance_bound, constant(1, 1), Chain(constant(1, 1, 1), 1), (0,))


def test_the_empty_tree():
    "Plain decoding"
    for verify in RULES.values(): assert law_of(lambda rng: verify([exact(1, 2)], Tree((0,)), rng)) == {Verdict(0, 0): F(1, 3), Verdict(0, 1): F(2, 3)}


def test_what_is_left():
    "β, the scale and the law after a refusal; `capped_ratio` never divides by too little"
    β, a, r = scaled_residual(F(2, 3), exact(2, 1), exact(1, 1))
    assert (β, a) == (F(2, 3), 0) and scaled_residual(1, exact(2, 1), exact(2, 1))[1] == 1
    assert scaled_residual(1, exact(2, 1), exact(1, 1))[1] == 1 and tuple(scaled_residual(1, exact(2, 1), exact(1, 1))[2]) == (1, 0)
    assert capped_ratio(1., 5e-324) == 1 and capped_ratio(0., .5) == 0 and capped_ratio(F(1, 6), F(1, 2)) == F(1, 3)
