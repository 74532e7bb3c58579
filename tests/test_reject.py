"Chapter 05: speculative sampling is exact, and how many tokens it gives"
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import verifier_contract
from helpers import CANON, constant, killer, models, pairs, proves, refuses
from specref.core.rng import Seeded, tv_outcomes, law_of, mean_of, verdict_tape
from specref.core.law import exact, overlap
from specref.core.loop import Verdict, rounds
from specref.verify.reject import Chain, accepted_at_least, capped_geometric, rejection_sampling_rate, reject
from specref.core.target import TableModel
from specref.core.tree import Tree

many = settings(max_examples=150)


def first(p, q): return law_of(lambda rng: next(rounds(constant(*p), Chain(constant(*q), 1), reject, (0,), rng)))


def one(p, q, x, rng):
    "The verdict on one child x of law q where the target's rows are p"
    tree = Tree((0,)); tree.add(0, x, q)
    return reject([p, p], tree, rng)


def as_dict(p): return {x: w for x, w in enumerate(p) if w}


# Exactness

@proves("thm-reject")
@many
@given(pairs())
def test_one_step(pq):
    "x ~ q, kept with probability min(1, p/q), else from the residual: the token has law p, and is kept with probability β"
    p, q = pq
    got = law_of(lambda rng: ((v := one(p, q, x := rng.pick(q), rng)).node, x if v.node else v.token))
    assert got.of(lambda nx: nx[1]) == as_dict(p) and got.of(lambda nx: nx[0]).get(1, 0) == overlap(p, q)
    assert all(got.get((1, x), 0) == min(a, b) for x, (a, b) in enumerate(zip(p, q)))


@proves("thm-reject")
@settings(max_examples=60)
@given(models(st.integers(2, 4)), st.integers(1, 3), st.integers(1, 3))
def test_chains(pair, gamma, n):
    "One round of a chain, continued by the target, on tables that depend on the whole text"
    verifier_contract(pair[0], Chain(pair[1], gamma), reject, (0,), n)


@proves("thm-reject")
@many
@given(pairs(), st.integers(0, 3))
def test_floats(pq, ulps):
    "In float64, and with q a few ulps from p, the law is p to twelve digits"
    p = pq[0].astype(float)
    near = np.array([np.nextafter(x, x + (-1)**i) if ulps and x else x for i, x in enumerate(p)])
    for q in (pq[1].astype(float), near):
        got = law_of(lambda rng: (v := one(p, q, x := rng.pick(q), rng)).node * (1 + x) or -1 - v.token)
        assert tv_outcomes(got.of(lambda k: abs(k) - 1), as_dict(p)) < 1e-12


def test_canon_by_hand():
    "Token 0 always kept, token 3 in one case of four; else 0 or 1, three to one"
    p, q = CANON
    assert [law_of(lambda rng: one(p, q, x, rng).node).get(1, 0) for x in range(4)] == [1, 1, Fraction(2, 3), Fraction(1, 4)]
    assert law_of(lambda rng: one(p, q, 3, rng)) == {Verdict(1, x): w/4 for x, w in enumerate(p)} | {Verdict(0, 0): Fraction(9, 16), Verdict(0, 1): Fraction(3, 16)}


@pytest.mark.parametrize("u", [0., .24999, .25, .9999])
def test_a_verdict_on_a_tape(u):
    "Strict: at u = p/q exactly the token is refused; a token of weight 0 is refused at u = 0; the correction comes from the tape"
    p, q = CANON
    assert one(p, q, 3, verdict_tape([0, u], [.8, .5])) == (Verdict(1, 1) if u < .25 else Verdict(0, 1))
    assert one(exact(1, 0, 1, 0), exact(0, 1, 0, 1), 3, verdict_tape([0, 0.], [.8, 0])) == Verdict(0, 2)


# How many tokens

@proves("thm-accepted")
@settings(max_examples=80)
@given(models(), st.integers(1, 3))
def test_accepted_tokens(pair, gamma):
    "P(at least i accepted), by enumeration, is the sum over texts of the product of the smaller weights"
    target, draft = pair
    got = law_of(lambda rng: next(rounds(target, Chain(draft, gamma), reject, (0,), rng)).verdict.node)
    for i in range(gamma + 1):
        texts = product(range(3), repeat=i)
        want = sum(prod(min(target.law((0, *y[:j]))[y[j]], draft.law((0, *y[:j]))[y[j]]) for j in range(i)) for y in texts)
        assert sum(w for k, w in got.items() if k >= i) == accepted_at_least(target, draft, (0,), i) == want


def tokens(target, draft, gamma, ctx=(0,)): return mean_of(lambda rng: len(next(rounds(target, Chain(draft, gamma), reject, ctx, rng)).tokens))


@proves("cor-capped-geometric")
@settings(max_examples=60)
@given(pairs(st.integers(2, 4)), st.integers(1, 3))
def test_capped_geometric(pq, gamma):
    "With the same β everywhere, though on laws that turn with the text: (1 - α^(γ+1))/(1 - α) tokens a round"
    turned = lambda law: TableModel(len(law), lambda text: np.roll(law, sum(text)))
    α, got = overlap(*pq), tokens(turned(pq[0]), turned(pq[1]), gamma)
    assert got == capped_geometric(α, gamma) == (gamma + 1 if α == 1 else (1 - α**(gamma + 1)) / (1 - α))


def test_published_numbers():
    "Drafts accepted for γ = 1..4 on the two-token pair, and for γ = 2, 3 on the pair that kills every mutant"
    F, bin_p, bin_q = Fraction, constant(1, 2), constant(2, 1)
    assert [tokens(bin_p, bin_q, g) - 1 for g in (1, 2, 3, 4)] == [F(2, 3), F(10, 9), F(38, 27), F(130, 81)]
    assert [tokens(*killer(), g) - 1 for g in (2, 3)] == [F(21, 20), F(117, 100)]


def test_the_formula_needs_its_condition():
    "Where easy tokens follow easy tokens the capped geometric of the first β is wrong"
    target, draft = killer()
    assert tokens(target, draft, 2) != capped_geometric(overlap(target.law((0,)), draft.law((0,))), 2)


# Against rejection sampling

@proves("thm-rejection-sampling")
@many
@given(pairs())
def test_rejection_sampling(pq):
    "One try accepts with probability 1/M <= β, and what it accepts has law p; without support it accepts nothing"
    p, q = pq
    on, β = p > 0, overlap(p, q)
    if (q[on] == 0).any(): assert rejection_sampling_rate(p, q) == 0; return
    M = max(p[on] / q[on])
    got = law_of(lambda rng: x if rng.coin(p[x := rng.pick(q)], of=M*q[x]) else None)
    assert 1 - got.get(None, 0) == rejection_sampling_rate(p, q) == 1/M <= β
    assert {x: w*M for x, w in got.items() if x is not None} == as_dict(p)


def test_rejection_on_canon(): assert (rejection_sampling_rate(*CANON), overlap(*CANON)) == (Fraction(1, 4), Fraction(3, 5))


# Doors, and the loop

def test_doors():
    for gamma in (0, -1, 1.5, "4", None): refuses("gamma", Chain, constant(1, 1), gamma)
    tree = Tree((0,)); tree.add(0, 1, exact(1, 1))
    for alpha in (-.1, 1.1, float("nan")): refuses("alpha", capped_geometric, alpha, 2)
    refuses("gamma", capped_geometric, .5, -1)
    refuses("i", accepted_at_least, constant(1, 1), constant(1, 1), (0,), -1)
    refuses("q", reject, [exact(1, 1, 1)]*2, tree, verdict_tape([0, 1.], [0, 0]))


def test_systems_are_values():
    "Equal drafters are equal, so that loops can be merged"
    model = constant(1, 1)
    assert Chain(model, 2) == Chain(model, 2) and hash(Chain(model, 2)) == hash(Chain(model, 2)) and Chain(model, 2) != Chain(model, 3)


@settings(max_examples=30)
@given(models(), st.integers(0, 99))
def test_a_chain_is_drawn_from_its_model(pair, seed):
    "Every edge is the model's row after the text so far"
    tree = Chain(pair[1], 4)((0, 1), Seeded(seed))
    assert tree.parent == [-1, 0, 1, 2, 3] and all((tree.law[i + 1] == pair[1].law(tree.text(i))).all() for i in range(4))
