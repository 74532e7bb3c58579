"Chapter 00: overlap and residual of two distributions, in fractions; rounding; warps against transformers"
from fractions import Fraction
from itertools import permutations

import numpy as np, pytest
from hypothesis import example, strategies as st

from helpers import CANON, examples, laws, models, pairs, proves, sizes
from specref import (as_law, d_lk, exact, greedy, law_of, one_hot, overlap, residual, target_law, tv,
                     tv_outcomes, warp)
from specref.core.law import ROUNDING, freeze, sums_to_one

numbers = st.lists(st.builds(Fraction, st.integers(-1, 4), st.integers(1, 6)), min_size=1, max_size=5)

def speculative(p, q, r):
    "Draft from q, accept with min(1, p/q), else sample r: (draft, output)"
    def run(rng):
        x = rng.pick(q)
        return x, x if rng.coin(p[x], of=q[x]) else rng.pick(r)
    return run

def output(p, q, r): return law_of(speculative(p, q, r)).of(lambda xy: xy[1])

def as_dict(p): return {x: w for x, w in enumerate(p) if w}

def test_a_frozen_row_is_checked_once_and_cannot_be_changed():
    "The given array stays writeable; the frozen one raises when written to, and is returned as it is"
    given_row = np.array([.25, .75])
    row = freeze(given_row, size=2)
    assert freeze(row) is row is as_law(row) and row is not given_row
    with pytest.raises(ValueError, match="read-only"): row[0] = 1
    given_row[0] = 1.   # the owner of the numbers may still change them; a new view is checked again
    for bad in lambda: freeze(given_row, "mine"), lambda: as_law(row, "mine", size=3):
        with pytest.raises(ValueError, match="mine: got"): bad()

@examples(30, numbers | sizes.flatmap(laws))
def test_sums_to_one_checks_the_sum_and_the_minimum(p):
    "For fractions alone; for other numbers it is False"
    p = np.array(p, dtype=object)
    assert sums_to_one(p) == (sum(p) == 1 and min(p) >= 0)
    others = p.astype(float), np.array([*p, 0.], object), np.array([1, 0], object)
    assert not any(map(sums_to_one, others))

@proves("lem-dlk", "cor-dlk", "thm-beta")
@examples(60, pairs(), st.data())
def test_divergence_and_acceptance(pq, data):
    "D_LK, from either side, is 1 - overlap and total variation, a metric; P(accepted) is the overlap"
    p, q = pq
    m, d, third = (p + q) / 2, d_lk(p, q), data.draw(laws(len(p)))
    assert d == abs(q - m).sum() == 1 - sum(map(min, p, q)) == tv(p, q) == tv_outcomes(as_dict(p), as_dict(q))
    assert d == sum(max(a - b, 0) for a, b in zip(p, q)) == d_lk(q, p) and 0 <= d <= 1
    assert (d == 0) == (tuple(p) == tuple(q)) and (d == 1) == (not any(a and b for a, b in zip(p, q)))
    assert d <= d_lk(p, third) + d_lk(third, q)
    accepted = law_of(lambda rng: rng.coin(p[x := rng.pick(q)], of=q[x])).get(True, 0)
    assert accepted == overlap(p, q) == 1 - d

@proves("cor-alpha")
@examples(25, models(), st.integers(0, 2))
def test_expected_acceptance(pair, depth):
    "The acceptance at a random prefix is the mean of the overlaps"
    target, draft = pair
    def accepted(rng):
        text = (0,)
        for _ in range(depth): text += (rng.pick(target.law(text)),)
        q = draft.law(text)
        x = rng.pick(q)
        return rng.coin(target.law(text)[x], of=q[x])
    prefixes = target_law(target, (0,), depth).items()
    mean = sum(w * overlap(target.law((0, *y)), draft.law((0, *y))) for y, w in prefixes)
    assert law_of(accepted).get(True, 0) == mean

def vertex(p, q, rows, columns):
    "The mass on the diagonal of the coupling of p and q that fills the table greedily in the given orders"
    a, b, same = list(p), list(q), 0
    for x in rows:
        for y in columns:
            w = min(a[x], b[y])
            a[x] -= w
            b[y] -= w
            if x == y: same += w
    assert not any(a) and not any(b)
    return same

@proves("lem-coupling")
@examples(25, pairs(st.integers(2, 3)))
def test_speculative_sampling_is_the_best_coupling(pq):
    "Its margins are q and p, P(x = y) is their overlap, and no vertex of the polytope has more"
    p, q = pq
    joint, orders = law_of(speculative(p, q, residual(p, q))), list(permutations(range(len(p))))
    assert joint.of(lambda xy: xy[0]) == as_dict(q) and joint.of(lambda xy: xy[1]) == as_dict(p)
    assert joint.of(lambda xy: xy[0] == xy[1]).get(True, 0) == overlap(p, q)
    assert max(vertex(p, q, rows, columns) for rows in orders for columns in orders) <= overlap(p, q)

@proves("lem-residual", "lem-noise")
@examples(50, pairs(), st.data())
def test_overlap_and_residual_make_p(pq, data):
    "min(p, q) + (1 - β) r is p; with another w for r the output is off by (1 - β) TV(w, r)"
    p, q = pq
    r, β, wrong = residual(p, q), overlap(p, q), data.draw(laws(len(p)))
    assert np.maximum(p - q, 0).sum() == 1 - β and r.sum() == 1
    assert (np.minimum(p, q) + (1 - β)*r == p).all()
    assert β == 1 or all((w > 0) == (a > b) for w, a, b in zip(r, p, q))
    assert tv_outcomes(output(p, q, wrong), as_dict(p)) == (1 - β)*tv(wrong, r) <= 1 - β

# Rounding

@proves("lem-noise")
@examples(30, sizes.flatmap(laws), st.lists(st.integers(-1, 1), min_size=5, max_size=5))
@example(CANON[0], [1, -1, 1, -1])
def test_distributions_one_ulp_apart(law, steps):
    "Where p - q is rounding alone, the residual is p, and the output is p to twelve digits"
    p = law.astype(float)
    q = np.array([np.nextafter(x, 2*s) if s and x else x for x, s in zip(p, steps)])
    r = residual(p, q)
    assert r is p and tv_outcomes(output(p, q, r), as_dict(p)) < 1e-12

@examples(30, pairs())
def test_floats_follow_fractions(pq):
    a, b = (law.astype(float) for law in pq)
    assert overlap(a, b) == pytest.approx(float(overlap(*pq)), abs=1e-14)
    assert np.minimum(a, b) + (1 - overlap(a, b))*residual(a, b) == pytest.approx(a, abs=1e-11)
    assert residual(a, b).min() >= 0 and residual(a, b).sum() == pytest.approx(1)
    assert (a == pq[0].astype(float)).all() and (b == pq[1].astype(float)).all()   # inputs do not change

def test_the_threshold_of_rounding():
    p, ε = np.array([.5, .5]), np.array([1, -1]) * ROUNDING
    assert residual(p, p + ε/4) is p is not residual(p, p + 4*ε)

# Warps

halves = st.lists(st.integers(-8, 8).map(lambda k: k/2), min_size=2, max_size=12)

@examples(25, halves, st.sampled_from([.25, 1., 2.]), st.none() | st.floats(.01, 1),
          st.none() | st.integers(1, 9))
def test_warp_equals_transformers(z, temperature, top_p, top_k):
    "Its processors in the same order; which of several *tied* tokens top-p cuts may differ"
    torch, T = pytest.importorskip("torch"), pytest.importorskip("transformers")
    row = T.TemperatureLogitsWarper(temperature)(None, torch.tensor([z], dtype=torch.float64))
    if top_k: row = T.TopKLogitsWarper(top_k)(None, row)
    if top_p: row = T.TopPLogitsWarper(top_p)(None, row)
    theirs, ours = row.softmax(-1)[0].numpy(), warp(z, temperature, top_k, top_p)
    assert sorted(ours) == pytest.approx(sorted(theirs), abs=1e-12)
    if top_p in (None, 1) or len(set(z)) == len(z): assert ours == pytest.approx(theirs, abs=1e-12)

@examples(30, halves)
def test_temperature_zero_is_the_limit(z):
    "A point mass on the first of the largest, and the limit of low temperatures"
    zero = warp(z, 0)
    assert tuple(zero) == tuple(one_hot(z.index(max(z)), len(z))) == tuple(greedy(warp(z)))
    assert (greedy(exact(*(int(2*x) + 20 for x in z))) == zero).all()
    if z.count(max(z)) == 1: assert tv(warp(z, 1e-3), zero) < 1e-12

def test_ties_and_extremes():
    "At the k-th place all stay; at the edge of top-p the lowest ids; masked tokens have mass 0; no overflow"
    assert tuple(warp([1, 1, 1, 0], top_k=2)) == pytest.approx((1/3, 1/3, 1/3, 0))
    assert np.flatnonzero(warp(1e3*(np.arange(200) % 2), top_p=.495)).tolist() == list(range(1, 100, 2))
    assert tuple(warp([-np.inf, 0, -np.inf])) == (0, 1, 0)
    for z in ([1e4, -1e4], [8e307, -8e307], [5e-324, 0]): assert warp(z).sum() == pytest.approx(1)
