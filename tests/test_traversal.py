"Chapter 13: one more leaf changes no distribution, so the whole family is exact; the bound holds"
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations
from random import Random

import numpy as np, pytest
from hypothesis import strategies as st

from contracts import continued, verifier_contract
from helpers import DRAWS, Plan, constant, draws, examples, laws, models, pairs, plans, proves, seeds, shapes
from specref import (block, Branching, Chain, Drafter, exact, iid, law_of, normalize, reject, Rows, Seeded,
                     TableModel, Tape, target_law, traversal, Tree, tv_outcomes, Verdict,
                     without_replacement)
from specref.verify.block import mean_accepted_block
from specref.verify.traversal import (acceptance_bound, all_donate, all_donors, best_rule, by_transfer,
                                      capped_ratio, later_donate, layer_donors, mean_accepted,
                                      not_deeper_donate, parent_donates, reachable, seen_layers,
                                      transfer_mass)

F = Fraction
RULES = {"reject": reject, "traversal": traversal, "layered": layer_donors, "all": all_donors}
DONORS = {"parent": parent_donates, "later": later_donate, "no deeper": not_deeper_donate, "all": all_donate}
rules, donors = st.sampled_from(sorted(RULES)), st.sampled_from(sorted(DONORS))
two_draws = st.sampled_from([iid, without_replacement])

@dataclass(frozen=True)
class Grown(Drafter):
    "A drafter of trees with the given parents, a node's children drawn together, the nodes in order"
    model: object
    parents: tuple
    draw: object
    def __call__(self, ctx, rng):
        tree = Tree(ctx)
        for u in sorted(set(self.parents[1:])):
            tree.grow(u, self.draw(self.model.law(tree.text(u))), rng, self.parents.count(u))
        return tree

SHAPES = {"chain": (-1, 0, 1), "siblings": (-1, 0, 0), "asymmetric": (-1, 0, 0, 1, 1),
          "two chains": (-1, 0, 0, 1, 2), "delayed": (-1, 0, 1, 1)}

def ends(p, tree, gives):
    "The verdicts of `transfer_mass`, with their probabilities"
    m, r = transfer_mass(p, tree, gives)
    return {Verdict(v, y): w*z for v, w in m.items() if w for y, z in enumerate(r[v]) if z}

def texts(p, tree, gives):
    "The distribution of the emitted text"
    out = {}
    for v, w in ends(p, tree, gives).items(): out[v.tokens(tree)] = out.get(v.tokens(tree), 0) + w
    return out

def depth(p, tree, gives): return sum(w * tree.depth[v] for v, w in transfer_mass(p, tree, gives)[0].items())

def some(seed):
    "Arbitrary donors, chosen without the leaf's token"
    return lambda tree, v, u: Random(f"{seed} {v} {u} {tree.path(v)}").random() < .5

def any_tree(parents, V, seed):
    "A tree of that shape with arbitrary tokens and edge distributions, drawn by no drafter"
    tree, rng = Tree((0,)), Random(seed)
    for u in parents[1:]:
        weights = [rng.choice([0, 1, 2, 5]) for _ in range(V)]
        q = exact(*(weights if any(weights) else [1]*V))
        tree.add(u, rng.choice([x for x in range(V) if q[x]]), q)
    return tree

# One more leaf

def with_leaf(tree, u, x, q):
    tree.add(u, x, q)
    return tree

def one_longer(found, p, n):
    "The distribution of the continued text, averaged over [(tree, weight, donors)]"
    after = {}
    for tree, w, gives in found:
        law = continued(texts(p(tree), tree, gives), p, (0,), n)
        for y, v in law.items(): after[y] = after.get(y, 0) + w*v
    return after

@proves("thm-leaf")
@examples(25, models(), shapes(4), st.data(), seeds)
def test_one_more_leaf(pair, parents, data, seed):
    "For any tree, leaf distribution and donors: the text's distribution is the same, C β more are accepted"
    p, gives = pair[0], data.draw(st.sampled_from([*DONORS.values(), some(seed)]))
    tree = any_tree(parents, 3, seed)
    u, q, n = data.draw(st.sampled_from(range(len(tree)))), data.draw(laws(3)), max(tree.depth) + 2
    larger = []
    for x in range(3):
        if q[x]: larger.append((with_leaf(any_tree(parents, 3, seed), u, x, q), q[x]))
    before = continued(texts(p(tree), tree, gives), p, (0,), n)
    assert one_longer([(t, w, gives) for t, w in larger], p, n) == before
    m, r = transfer_mass(p(tree), tree, gives)
    assert sum(m.values()) == 1 and min(m.values()) >= 0
    C = sum(m[v] for v in m if v == u or gives(tree, v, u))
    gain = sum(np.minimum(m[u] * r[u], C * q)) if m.get(u) else 0
    assert sum(w * depth(p(t), t, gives) for t, w in larger) - depth(p(tree), tree, gives) == gain >= 0

@dataclass(frozen=True)
class Adaptive(Drafter):
    "Where the next node goes, how its token is drawn and when to stop depend on everything drawn so far"
    model: object
    seed: int
    most: int = 4
    def __call__(self, ctx, rng):
        tree = Tree(ctx)
        while len(tree) <= self.most:
            chance = Random(f"{self.seed} {tree.parent} {tree.token}")
            u = chance.randrange(len(tree))
            other = exact(*(1 + chance.randrange(3) for _ in range(self.model.V)))
            q = chance.choice([self.model.law(tree.text(0)), other])
            if len(tree) > 1 and chance.random() < .2: break
            tree.add(u, rng.pick(q, at=len(tree)), q)
        return tree

@proves("cor-leaves")
@examples(25, models(), seeds, st.data(), st.integers(1, 3))
def test_a_draft_grown_by_its_own_tokens(pair, seed, data, n):
    "Any tree whose growth depends on earlier tokens, under every rule and with arbitrary donors"
    verify = data.draw(st.sampled_from([*RULES.values(), by_transfer(some(seed))]))
    verifier_contract(pair[0], Adaptive(pair[1], seed, 3), verify, (0,), n)

# Verdicts

@proves("thm-traversal", "prop-alone")
@examples(25, models(st.integers(2, 4)), shapes(5), seeds)
def test_a_verdict_has_the_distribution_of_its_masses(pair, parents, seed):
    "On every tree, by enumeration of its coins: `traversal`, `reject` and the others"
    p = pair[0](tree := any_tree(parents, pair[0].V, seed))
    family = {traversal: later_donate, reject: parent_donates, all_donors: all_donate,
              layer_donors: not_deeper_donate}
    for verify, gives in family.items():
        assert law_of(lambda rng: verify(p, tree, rng)) == ends(p, tree, gives)

@proves("thm-traversal")
@examples(25, models(st.integers(2, 4)), st.integers(0, 4), seeds)
def test_on_chains_and_stars(pair, n, seed):
    "On a chain all but `parent_donates` are block verification; on one layer `traversal` is `reject`"
    V = pair[0].V
    p = pair[0](line := any_tree([-1, *range(n)], V, seed))
    want = law_of(lambda rng: block(p, line, rng))
    assert all(ends(p, line, gives) == want for gives in (later_donate, not_deeper_donate, all_donate))
    assert law_of(lambda rng: traversal(p, line, rng)) == want
    p = pair[0](star := any_tree([-1, *[0]*n], V, seed))
    want = law_of(lambda rng: reject(p, star, rng))
    assert law_of(lambda rng: traversal(p, star, rng)) == want == ends(p, star, later_donate)

# The bound

@proves("thm-bound", "thm-layers")
@examples(20, models(), st.sampled_from(sorted(SHAPES)), draws)
def test_no_rule_exceeds_the_bound(pair, shape, how):
    "Every rule of the family is at most the optimum by layers, and that at most the optimum of all rules"
    target, drafter = pair[0], Grown(pair[1], SHAPES[shape], DRAWS[how])
    family = *RULES.values(), by_transfer(some(len(shape)))
    rates = [float(mean_accepted(target, drafter, verify, (0,))) for verify in family]
    limits = acceptance_bound(target, drafter, (0,), seen_layers), acceptance_bound(target, drafter, (0,))
    assert max(rates) <= limits[0] + 1e-9 and limits[0] <= limits[1] + 1e-9

@proves("thm-bound")
@examples(25, models(st.integers(2, 3)), st.integers(1, 3))
def test_on_chains_block_attains_the_bound(pair, gamma):
    "Block verification in closed form and by enumeration, and the linear program"
    target, draft = pair
    drafter, want = Chain(draft, gamma), float(mean_accepted_block(target, draft, (0,), gamma))
    limits = [acceptance_bound(target, drafter, (0,), *seen) for seen in ((), (seen_layers,))]
    assert limits == pytest.approx([want, want], abs=1e-9)
    assert float(mean_accepted(target, drafter, traversal, (0,))) == pytest.approx(want, abs=1e-12)

@proves("thm-bound")
@examples(20, pairs(st.integers(2, 4)), st.sampled_from([iid, without_replacement]), st.integers(1, 3))
def test_on_one_layer_the_bound_is_the_optimal_coupling(pq, draw, k):
    "1 + min over sets H of p(H) - P(all children in H) (verification.md §7.1)"
    p, q = pq
    target, drafter = constant(*p), Grown(constant(*q), (-1, *[0]*k), draw)
    inside = law_of(lambda rng: frozenset(drafter((0,), rng).token[1:]))
    sets = chain.from_iterable(combinations(range(len(p)), n) for n in range(len(p) + 1))
    want = 1 + min(sum(p[list(H)], F(0)) - sum(w for S, w in inside.items() if S <= set(H)) for H in sets)
    assert acceptance_bound(target, drafter, (0,)) == pytest.approx(float(want), abs=1e-9)

def looked_up(plan):
    "The rule that reads its verdicts from the solution of the linear program"
    def verify(p, tree, rng):
        masses = np.maximum([*plan[tree].values()], 0) + 1e-18   # a rare tree may have all zeros
        text = [*plan[tree]][rng.pick(normalize(masses))]
        return Verdict(next(v for v in reachable(tree) if tree.path(v) == text[:-1]), text[-1])
    return verify

@proves("thm-bound")
@examples(12, models(), st.sampled_from(["siblings", "asymmetric", "delayed"]), draws)
def test_the_bound_is_attained(pair, shape, how):
    "By a lossless rule, the solution of the linear program"
    target, drafter = pair[0], Grown(pair[1], SHAPES[shape], DRAWS[how])
    verify, n = looked_up(best_rule(target, drafter, (0,))), 3
    def first(rng):
        tree = drafter((0,), rng)
        return verify(None, tree, rng).tokens(tree)
    some = law_of(first)
    assert tv_outcomes(continued(some, target, (0,), n), target_law(target, (0,), n)) < 1e-8
    bound = acceptance_bound(target, drafter, (0,))
    assert mean_accepted(target, drafter, verify, (0,)) == pytest.approx(bound, abs=1e-8)

# Layers

def prefix(tree, d):
    "The layers of a tree down to depth d"
    out = Tree(tree.ctx)
    for i in range(1, len(tree)):
        if tree.depth[i] <= d: out.add(tree.parent[i], tree.token[i], tree.law[i])
    return out

class Flow:
    "The sweep of Theorem layers, with weights that are feasible and otherwise arbitrary"
    def __init__(self, target, drafter, seed):
        self.target, self.drafter, self.seed, self.memo = target, drafter, seed, {}

    def weights(self, tree):
        "A child has its share of its parent's mass, at most the remaining mass of its layer, or a part of it"
        w, p = {0: F(1)}, self.target(tree)
        for c in range(1, len(tree)):
            u, x, used = tree.parent[c], tree.token[c], sum(w[v] for v in w if tree.depth[v] == tree.depth[c])
            rest = 1 - used
            some = F(Random(f"{self.seed} {tree.path(c)} {c}").randrange(1, 4), 3)
            w[c] = some * min(rest, w[u] * p[u][x] / len(tree.children(u)) / tree.law[c][x])
        return w

    def missing(self, tree, d):
        "w p, less the mean weight of the children over the next layer, for each node of layer d"
        here = prefix(tree, d)
        if here not in self.memo:
            w, p, trees = self.weights(here), self.target(here), law_of(lambda rng: self.drafter((0,), rng))
            R = {u: w[u] * p[u] for u in range(len(here)) if here.depth[u] == d}
            given = {t: v for t, v in trees.items() if prefix(t, d) == here}
            for t, v in given.items():
                for c, z in self.weights(prefix(t, d + 1)).items():
                    if t.depth[c] == d + 1: R[t.parent[c]][t.token[c]] -= z * v / sum(given.values())
            self.memo[here] = R
        return self.memo[here]

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
@examples(10, models(), st.sampled_from([(-1, 0, 1), (-1, 0, 0, 1), (-1, 0, 1, 1)]), two_draws, seeds)
def test_any_feasible_weights(pair, shape, draw, seed):
    "The sweep has the target's distribution, and accepts each layer's weights"
    target, drafter = pair[0], Grown(pair[1], shape, draw)
    flow = Flow(target, drafter, seed)
    verifier_contract(target, drafter, flow, (0,), 3)
    trees = law_of(lambda rng: drafter((0,), rng))
    want = sum(v * (sum(flow.weights(t).values()) - 1) for t, v in trees.items())
    assert mean_accepted(target, drafter, flow, (0,)) == want

@proves("thm-layers")
@examples(30, models(), st.sampled_from(sorted(SHAPES)), two_draws, donors)
def test_the_family_is_lossless_given_the_layers(pair, shape, draw, name):
    "Given a layer, the mean mass of texts that continue a node with a token is the node's weight times p"
    target, drafter, gives = pair[0], Grown(pair[1], SHAPES[shape], draw), DONORS[name]
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
@examples(20, models(), st.sampled_from([(2, 1), (1, 2), (3,), (1, 2, 1), (3, 1)]))
def test_siblings_with_equal_subtrees(pair, shape):
    "Independent siblings with equal subtrees: `traversal` accepts at least as many as `reject`"
    trees = law_of(lambda rng: Branching(pair[1], shape, iid)((0,), rng))
    def mean(gives): return sum(w * depth(pair[0](t), t, gives) for t, w in trees.items())
    assert mean(later_donate) >= mean(parent_donates)

@proves("prop-order")
def test_no_rule_is_always_best():
    "Two tokens, five nodes: 385/216 by `reject`, 375/216 by `traversal`, 7/4 by the others"
    target, drafter = constant(2, 1), Grown(constant(1, 1), (-1, 0, 1, 1, 3), without_replacement)
    found = [mean_accepted(target, drafter, verify, (0,)) for verify in RULES.values()]
    assert found == [F(385, 216), F(375, 216), F(7, 4), F(7, 4)]

# Floats, size, rows read

@examples(25, models(), plans(3), rules, st.integers(0, 2))
def test_floats(pair, steps, name, ulps):
    "In float64, and with a draft a few ulps from the target, the distribution is exact to twelve digits"
    soft = [TableModel(3, lambda text, m=m: m.law(text).astype(float)) for m in pair]
    def nudge(row): return np.array([np.nextafter(x, x + (-1)**i) if x else x for i, x in enumerate(row)])
    nudged = TableModel(3, lambda text: nudge(soft[0].law(text)))
    steps = tuple((at, "iid" if how in ("mixed", "points") else how, k) for at, how, k in steps)
    drafter = Plan(nudged if ulps else soft[1], steps)
    def first(rng):
        tree = drafter((0,), rng)
        return RULES[name](soft[0](tree), tree, rng).tokens(tree)[:2]
    some = law_of(first)
    assert tv_outcomes(continued(some, soft[0], (0,), 2), target_law(soft[0], (0,), 2)) < 1e-12

@pytest.mark.parametrize("name", RULES)
def test_a_deep_chain(name):
    "Five hundred nodes"
    V, rng = 4, np.random.default_rng(0)
    rows = rng.dirichlet(np.ones(V), 501)
    tree = Tree((0,))
    for i in range(500): tree.grow(i, iid(.99*rows[i] + .01/V), Seeded(i))
    v = RULES[name](rows, tree, Seeded(1))
    assert v.node > 0 and 0 <= v.token < V

def test_rows_are_read_only_where_they_are_needed():
    "No row of a rejected leaf, none below an impossible token, none of branches after the accepted one"
    p, q = exact(1, 1, 0), exact(0, 1, 1)
    tree = Tree((0,))
    never = tree.add(0, 2, q)
    tree.add(never, 1, q)
    first = tree.add(0, 1, q)
    tree.add(first, 2, q)
    second = tree.add(0, 1, q)
    tree.add(second, 1, q)
    for verify in (traversal, all_donors):
        rows = Rows(lambda i: p, len(tree), 3)
        verify(rows, tree, Tape({("coin", i): 0. for i in range(7)} | {("pick", i): .5 for i in range(8)}))
        assert set(rows.made) <= {0, first}

def test_capped_ratio():
    "min(1, a/b), also where b is the least float"
    assert capped_ratio(1., 5e-324) == 1 and capped_ratio(0., .5) == 0
    assert capped_ratio(F(1, 6), F(1, 2)) == F(1, 3)
