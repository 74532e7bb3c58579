"Chapter 00: what two laws share and what remains, in fractions; rounding; warps against transformers"
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from helpers import CANON, laws, models, pairs, proves, refuses, sizes
from specref.core.rng import tv_outcomes, law_of
from specref.core.law import ROUNDING, sums_to_one, as_law, d_lk, exact, greedy, normalize, overlap, one_hot, residual, tv, warp
from specref.core.target import target_law

many = settings(max_examples=200)


def speculative(p, q, r):
    "Draft from q, keep with min(1, p/q), else draw from r: (draft, output)"
    def run(rng):
        x = rng.pick(q)
        return x, x if rng.coin(p[x], of=q[x]) else rng.pick(r)
    return run


def output(p, q, r): return law_of(speculative(p, q, r)).of(lambda xy: xy[1])


def as_dict(p): return {x: w for x, w in enumerate(p) if w}


def test_canon():
    "The numbers of the book: 3/5, 2/5 and (3/4, 1/4, 0, 0)"
    p, q = CANON
    assert (overlap(p, q), d_lk(p, q)) == (Fraction(3, 5), Fraction(2, 5))
    assert tuple(residual(p, q)) == (Fraction(3, 4), Fraction(1, 4), 0, 0)


@many
@given(st.lists(st.builds(Fraction, st.integers(-1, 4), st.integers(1, 6)), min_size=1, max_size=5) | sizes.flatmap(laws))
def test_whole_numbers_say_what_fractions_say(p):
    "`sums_to_one` is the sum and the least of the fractions; of other numbers it says nothing"
    p = np.array(p, dtype=object)
    assert sums_to_one(p) == (sum(p) == 1 and min(p) >= 0)
    assert not sums_to_one(p.astype(float)) and not sums_to_one(np.array([*p, 0.], dtype=object)) and not sums_to_one(np.array([1, 0], dtype=object))


@proves("lem-dlk")
@many
@given(pairs())
def test_divergence_is_what_is_not_shared(pq):
    "D_LK by its definition, from either side, is 1 - overlap and the largest difference of any event"
    p, q = pq
    m = (p + q) / 2
    assert d_lk(p, q) == abs(q - m).sum() == 1 - sum(map(min, p, q)) == tv(p, q)
    assert tv(p, q) == sum(max(a - b, 0) for a, b in zip(p, q)) == tv_outcomes(as_dict(p), as_dict(q))


@proves("cor-dlk")
@many
@given(pairs(), st.data())
def test_divergence_is_a_metric_on_the_unit_interval(pq, data):
    p, q = pq
    d, third = d_lk(p, q), data.draw(laws(len(p)))
    assert d == d_lk(q, p) and 0 <= d <= 1
    assert (d == 0) == (tuple(p) == tuple(q))
    assert (d == 1) == (not any(a and b for a, b in zip(p, q)))
    assert d <= d_lk(p, third) + d_lk(third, q)


@proves("thm-beta")
@many
@given(pairs())
def test_acceptance_rate(pq):
    "P(kept), by enumeration, is the overlap"
    p, q = pq
    def kept(rng): return rng.coin(p[x := rng.pick(q)], of=q[x])
    assert law_of(kept).get(True, 0) == overlap(p, q) == 1 - d_lk(p, q)


@proves("cor-alpha")
@settings(max_examples=40)
@given(models(), st.integers(0, 2))
def test_expected_acceptance(pair, depth):
    "The acceptance at a random prefix is the mean of the overlaps"
    target, draft = pair
    prefixes = target_law(target, (0,), depth)
    def kept(rng):
        text = (0,)
        for _ in range(depth): text += (rng.pick(target.law(text)),)
        x = rng.pick(q := draft.law(text))
        return rng.coin(target.law(text)[x], of=q[x])
    rows = [(w, target.law((0, *y)), draft.law((0, *y))) for y, w in prefixes.items()]
    assert law_of(kept).get(True, 0) == sum(w * overlap(p, q) for w, p, q in rows) == 1 - sum(w * d_lk(p, q) for w, p, q in rows)


def vertex(p, q, rows, columns):
    "The coupling of p and q that fills the table greedily in the given orders: (V, V)"
    table, a, b = {}, list(p), list(q)
    for x in rows:
        for y in columns:
            table[x, y] = min(a[x], b[y])
            a[x] -= table[x, y]; b[y] -= table[x, y]
    assert not any(a) and not any(b)
    return table


@proves("lem-coupling")
@settings(max_examples=100)
@given(pairs(), st.randoms(use_true_random=False))
def test_no_coupling_agrees_more_often(pq, random):
    "Vertices of the polytope of couplings stay below the overlap; speculative sampling is a coupling and attains it"
    p, q = pq
    order = lambda: random.sample(range(len(p)), len(p))
    for _ in range(5): assert sum(w for (x, y), w in vertex(p, q, order(), order()).items() if x == y) <= overlap(p, q)
    joint = law_of(speculative(p, q, residual(p, q)))
    assert joint.of(lambda xy: xy[0]) == as_dict(q) and joint.of(lambda xy: xy[1]) == as_dict(p)
    assert joint.of(lambda xy: xy[0] == xy[1]).get(True, 0) == overlap(p, q)


@proves("lem-coupling")
def test_every_vertex_of_a_small_polytope():
    "On CANON cut to three tokens, all 36 orders: the best is the overlap, and it is attained"
    p, q = exact(4, 3, 2), exact(2, 3, 4)
    agree = {sum(w for (x, y), w in vertex(p, q, r, c).items() if x == y) for r in permutations(range(3)) for c in permutations(range(3))}
    assert max(agree) <= overlap(p, q) == Fraction(7, 9)


@proves("lem-residual")
@many
@given(pairs())
def test_shared_and_remaining_make_p(pq):
    p, q = pq
    r, β = residual(p, q), overlap(p, q)
    assert np.maximum(p - q, 0).sum() == 1 - β
    assert (np.minimum(p, q) + (1 - β)*r == p).all()
    assert r.sum() == 1 and (β == 1 or all((w > 0) == (a > b) for w, a, b in zip(r, p, q)))


@proves("lem-noise")
@many
@given(pairs(), st.data())
def test_a_wrong_residual_costs_at_most_its_mass(pq, data):
    "Any law in the place of the residual moves the output by at most 1 - β, and a disjoint one by exactly that"
    p, q = pq
    r, wrong, ε = residual(p, q), data.draw(laws(len(p))), 1 - overlap(p, q)
    moved = tv_outcomes(output(p, q, wrong), as_dict(p))
    assert moved == ε*tv(wrong, r) <= ε


# Rounding

def ulps(p, steps): return np.array([np.nextafter(x, 2 if s > 0 else -1) if s and x else x for x, s in zip(p.astype(float), steps)])


@proves("lem-noise")
@many
@given(sizes.flatmap(lambda V: st.tuples(laws(V), st.lists(st.integers(-1, 1), min_size=V, max_size=V))))
@example((CANON[0], [1, -1, 1, -1]))
def test_laws_one_ulp_apart(case):
    "Where nothing but rounding remains, the residual is p, and what comes out is p to twelve digits"
    p = case[0].astype(float)
    q = ulps(p, case[1])
    r = residual(p, q)
    assert r is p
    assert tv(np.minimum(p, q) + (1 - overlap(p, q))*r, p) < 1e-12
    assert tv_outcomes(output(p, q, r), as_dict(p)) < 1e-12


@given(pairs())
def test_floats_follow_fractions(pq):
    p, q = pq
    a, b = p.astype(float), q.astype(float)
    assert overlap(a, b) == pytest.approx(float(overlap(p, q)), abs=1e-14)
    assert np.minimum(a, b) + (1 - overlap(a, b))*residual(a, b) == pytest.approx(a, abs=1e-11)
    assert residual(a, b).min() >= 0 and residual(a, b).sum() == pytest.approx(1)


def test_the_threshold_of_noise():
    "A residual above the threshold is divided out, one below is not"
    p = np.array([.5, .5])
    for ε, noise in ((ROUNDING*4, False), (ROUNDING/4, True)): assert (residual(p, p + [ε, -ε]) is p) == noise


def test_inputs_are_left_alone():
    for p, q in (CANON, [a.astype(float) for a in CANON]):
        before = list(p), list(q)
        for f in (overlap, d_lk, tv, residual): f(p, q)
        greedy(p), normalize(p), as_law(p)
        assert (list(p), list(q)) == before


# Warps

halves = st.lists(st.integers(-8, 8).map(lambda k: k/2), min_size=2, max_size=12)


@settings(max_examples=60)
@given(halves, st.sampled_from([.25, .7, 1., 2.]), st.none() | st.floats(.01, 1))
def test_warp_is_transformers_warp(z, temperature, top_p):
    "The same law as the library's processors in the same order, up to which of several *tied* tokens top-p cuts"
    torch, T = pytest.importorskip("torch"), pytest.importorskip("transformers")
    for top_k in (None, *range(1, len(z) + 2)): compare(torch, T, z, temperature, top_k, top_p)


def compare(torch, T, z, temperature, top_k, top_p):
    row = T.TemperatureLogitsWarper(temperature)(None, torch.tensor([z], dtype=torch.float64))
    if top_k: row = T.TopKLogitsWarper(top_k)(None, row)
    if top_p: row = T.TopPLogitsWarper(top_p)(None, row)
    theirs, ours = row.softmax(-1)[0].numpy(), warp(z, temperature, top_k, top_p)
    assert sorted(ours) == pytest.approx(sorted(theirs), abs=1e-12)
    for v in set(z): assert sum(ours[np.equal(z, v)]) == pytest.approx(sum(theirs[np.equal(z, v)]), abs=1e-12)
    if top_p in (None, 1) or len(set(z)) == len(z): assert ours == pytest.approx(theirs, abs=1e-12)


@many
@given(halves)
def test_temperature_zero_is_the_limit(z):
    "A point mass on the first of the largest, and what a low temperature tends to"
    zero = warp(z, 0)
    assert tuple(zero) == tuple(one_hot(z.index(max(z)), len(z))) == tuple(greedy(warp(z)))
    assert (greedy(exact(*(int(2*x) + 20 for x in z))) == zero).all()
    if z.count(max(z)) == 1: assert tv(warp(z, 1e-3), zero) < 1e-12


@given(halves, st.floats(.01, 1))
def test_top_p_keeps_the_fewest(z, top_p):
    "What is kept holds top_p of the mass, would not without its lightest token, and keeps its proportions"
    p, kept = warp(z), warp(z, top_p=top_p)
    on = kept > 0
    assert p[on].sum() >= top_p - 1e-12 and p[on].sum() - p[on].min() < top_p + 1e-12
    assert min(p[on]) >= max(p[~on], default=0) and kept == pytest.approx(p*on / p[on].sum())


def test_ties():
    "At the k-th place all are kept; at the edge of top-p the lowest ids stay (transformers keeps others there)"
    assert tuple(warp([1, 1, 1, 0], top_k=2)) == pytest.approx((1/3, 1/3, 1/3, 0))
    two = np.arange(200) % 2
    assert np.flatnonzero(warp(1e3*two, top_p=.495)).tolist() == list(range(1, 100, 2))


def test_extreme_logits():
    "Masked tokens get exactly nothing; huge logits do not overflow"
    assert tuple(warp([-np.inf, 0, -np.inf])) == (0, 1, 0)
    for z in ([1e4, -1e4], [8e307, -8e307], [5e-324, 0]): assert warp(z).sum() == pytest.approx(1)


# Bad input, answered at the door

BAD = {"negative": [1.5, -.5], "NaN": [np.nan, 1], "inf": [np.inf, 0], "-inf": [-np.inf, 1], "sum": [.5, .6], "empty": [], "two axes": [[1.]], "scalar": 1.,
       "exact sum": exact(1, 1) * Fraction(3, 2), "exact negative": np.array([Fraction(3, 2), Fraction(-1, 2)]), "nearly": exact(1, 1) * Fraction(10**9 + 1, 10**9)}


@pytest.mark.parametrize("bad", BAD)
def test_no_law(bad): refuses("mine", as_law, BAD[bad], "mine")


def test_doors():
    "Every public function names the argument that it refuses"
    p, q = exact(1, 1, 1), exact(1, 1)
    refuses("p", as_law, p, size=2)
    for f in (overlap, d_lk, tv, residual): refuses("q", f, p, q)
    for w in ([], [0, 0], [2, -1]): refuses("weights", exact, *w)
    for x in (-1, 3): refuses("x", one_hot, x, 3)
    refuses("w", normalize, np.zeros(3))
    for w in ([np.nan, 1], [-1, 3], [np.inf, 3]): refuses("w", normalize, np.array(w))
    for z in ([], [[0., 1.]], [np.nan, 0], [np.inf, 0], [-np.inf, -np.inf]): refuses("logits", warp, z)
    for t in (-1, np.inf, np.nan): refuses("temperature", warp, [0., 1.], t)
    for k in (0, -1, np.nan): refuses("top_k", warp, [0., 1.], 1, k)
    for t in (0, -.1, 1.1, np.nan): refuses("top_p", warp, [0., 1.], 1, None, t)


def test_top_k_is_whole(): refuses("top_k", warp, [0., 1., 2.], 1, 1.5)
