"Chapter 11: children offered in turn are exact for every way of drawing them, in an order that does not look at them"
from fractions import Fraction
from math import prod

import numpy as np
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import CANON, DRAWS, Plan, draws, laws, models, pairs, plans, proves, refuses
from specref.chance import Seeded, distance, law_of
from specref.law import exact, overlap, residual
from specref.reject import Chain, reject
from specref.siblings import Branching
from specref.tree import Tree, iid, in_turn, points, without_replacement


def drawn(draw, k, rng):
    tree = Tree((0,)); tree.grow(0, draw, rng, k)
    return tree


def verdict(p, tree, rng):
    "(kept?, token) of `reject` on the children of node 0, where p is every row"
    v = reject([p]*len(tree), tree, rng)
    return v.node > 0, v.tokens(tree)[0]


def offered(p, draw, k): return law_of(lambda rng: verdict(p, drawn(draw, k, rng), rng))


def token_law(p, draw, k): return offered(p, draw, k).of(lambda kx: kx[1])


def acceptance(p, draw, k): return offered(p, draw, k).of(lambda kx: kx[0]).get(True, 0)


def as_dict(p): return {x: w for x, w in enumerate(p) if w}


def depends(seed, V):
    "A draw whose laws depend on the elder siblings in an arbitrary way, and end at random"
    def draw(earlier):
        r = np.random.default_rng([seed, len(earlier), *earlier])
        w = r.choice([0, 0, 1, 2, 5], V)
        return exact(*map(int, w)) if w.any() and r.random() < .9 else None
    return draw


# Exactness

@proves("thm-siblings")
@settings(max_examples=150)
@given(st.integers(2, 4).flatmap(laws), st.integers(0, 999), st.integers(0, 3))
def test_any_laws_given_the_elder_siblings(p, seed, k):
    "Each child from a law that depends on the ones before, however: the token has law p"
    assert token_law(p, depends(seed, len(p)), k) == as_dict(p)


@proves("thm-siblings")
@settings(max_examples=150)
@given(pairs(), draws, st.integers(1, 3))
def test_the_ways_of_drawing(pq, how, k):
    "Independent, without replacement past the end of the support, points, mixed"
    assert token_law(pq[0], DRAWS[how](pq[1]), k) == as_dict(pq[0])


@proves("thm-siblings", "thm-reject")
@settings(max_examples=100)
@given(models(), plans(3), st.integers(1, 3))
def test_trees(pair, steps, n):
    "Arbitrary honest trees with probes, on tables that depend on the whole text: one round and its continuation"
    verifier_contract(pair[0], Plan(pair[1], steps), reject, (0,), n)


def test_published_acceptance():
    "The four-token pair: independent, without replacement, and the top n as point masses (verification.md §3, §4, §7)"
    p, q = CANON
    F = Fraction
    assert [acceptance(p, iid(q), k) for k in (1, 2, 3, 4, 5)] == [F(3, 5), F(18, 25), F(96, 125), F(989, 1250), F(10151, 12500)]
    assert [acceptance(p, without_replacement(q), k) for k in (1, 2, 3, 4)] == [F(3, 5), F(107, 140), F(14117, 16800), 1]
    assert [acceptance(p, points([3, 2, 1, 0], 4, exact=True), k) for k in (2, 3)] == [F(3, 10), F(3, 5)]


def test_a_sampled_child_before_a_certain_one():
    "Greedy drafts: the law never depends on which comes first, the acceptance does: 23/30 and 3/4"
    (p, q), top = CANON, points([3], 4, exact=True)
    tail = iid(exact(1, 2, 3, 0))
    orders = in_turn(tail, top), in_turn(top, tail)
    assert [acceptance(p, draw, 2) for draw in orders] == [Fraction(23, 30), Fraction(3, 4)]
    assert all(token_law(p, draw, 2) == as_dict(p) for draw in orders)


@settings(max_examples=80)
@given(pairs(), st.integers(1, 3))
def test_acceptance_in_closed_form(pq, k):
    "Independent children are refused together with probability Π(1 - β_j); the whole support, without replacement, is never refused"
    (r, q), refused = pq, 1
    for _ in range(k): refused *= 1 - overlap(r, q); r = residual(r, q)
    assert acceptance(pq[0], iid(q), k) == 1 - refused
    if all(b or not a for a, b in zip(*pq)): assert acceptance(pq[0], without_replacement(q), sum(map(bool, q))) == 1


@given(laws(4), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_certain_children_are_kept_with_their_weight(p, tokens):
    "Top-k children, as point masses: accepted with the sum of their p, each with its own"
    got = offered(p, points(tokens, 4, exact=True), 4)
    assert {x: w for (kept, x), w in got.items() if kept} == {x: p[x] for x in set(tokens) if p[x]}


# Order

def reordered(q, k, order):
    "k independent children, offered in the order that `order(tokens, rng)` says, each with the law q"
    def draft(rng):
        tree, tokens = Tree((0,)), drawn(iid(q), k, rng).token[1:]
        for j in order(tokens, rng): tree.add(0, tokens[j], q)
        return tree
    return draft


def shuffled(tokens, rng):
    left = list(range(len(tokens)))
    return [left.pop(rng.pick(exact(*[1]*len(left)))) for _ in range(len(left))]


@proves("thm-order")
@settings(max_examples=50)
@given(pairs(st.integers(2, 3)), st.integers(1, 3), st.data())
def test_an_order_that_does_not_look(pq, k, data):
    "Independent children, reordered in a fixed way or at random: still p"
    p, q = pq
    fixed = data.draw(st.permutations(range(k)))
    for order in (lambda tokens, rng: fixed, shuffled):
        assert law_of(lambda rng: verdict(p, reordered(q, k, order)(rng), rng)[1]) == as_dict(p)


def by(law): return lambda tokens, rng: sorted(range(len(tokens)), key=lambda j: -law[tokens[j]])


def moved(draw, law):
    "How far the law is off when two children are drawn by `draw` and offered with the heavier in `law` first, each with the law it was drawn from"
    p, q = CANON
    def run(rng):
        tree, old = Tree((0,)), drawn(draw, 2, rng)
        for j in by(law)(old.token[1:], rng): tree.add(0, old.token[j + 1], old.law[j + 1] if old.law[j + 1][old.token[j + 1]] else q)
        return verdict(p, tree, rng)[1]
    return distance(law_of(run), as_dict(p))


@proves("thm-order")
def test_an_order_that_looks():
    "Sorted by q or by p: 3/50 and 3/50 on the book's pair"
    p, q = CANON
    assert moved(iid(q), q) == moved(iid(q), p) == Fraction(3, 50)


def test_without_replacement_the_order_is_part_of_the_law():
    "Second first, each with the law it was drawn from: off, although nobody looked at a value. The theorem's proof is about independent draws"
    p, q = CANON
    def run(rng):
        tree, old = Tree((0,)), drawn(without_replacement(q), 2, rng)
        for j in (2, 1): tree.add(0, old.token[j], old.law[j])
        return verdict(p, tree, rng)[1]
    assert distance(law_of(run), as_dict(p)) > 0


# Branching

@settings(max_examples=40)
@given(models(), st.sampled_from([(1,), (2,), (3,), (1, 2), (2, 1), (2, 2)]), draws)
def test_branching_keeps_the_drafter_contract(pair, shape, how): drafter_contract(Branching(pair[1], shape, DRAWS[how]), (0, 1))


@given(models(), st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.integers(0, 99))
def test_branching_has_its_shape(pair, shape, seed):
    "shape[d] different children below every node of depth d, as far as the vocabulary goes; one call of the model a level"
    calls = pair[1].meter.calls
    tree = Branching(pair[1], shape)((0,), Seeded(seed))
    for i in range(len(tree)):
        kids = [tree.token[c] for c in tree.children(i)]
        assert len(kids) == len(set(kids)) == (shape[tree.depth[i]] if tree.depth[i] < len(shape) else 0)
    assert pair[1].meter.calls - calls == len(shape) and len(tree) == 1 + sum(prod(shape[:d + 1]) for d in range(len(shape)))


@given(models(), st.integers(1, 4), st.integers(0, 99))
def test_a_chain_is_a_thin_tree(pair, gamma, seed):
    "Shape (1, ..., 1) draws the same tree as a chain, from the same noise"
    assert Branching(pair[1], (1,)*gamma)((0,), Seeded(seed)) == Chain(pair[1], gamma)((0,), Seeded(seed))


def test_doors():
    for shape in ((), (0,), (2, -1), None, (1.5,), 3, ("2",)): refuses("shape", Branching, CANON, shape)
