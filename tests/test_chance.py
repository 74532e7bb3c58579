"Chapter 01: enumeration against hand-computed laws, keyed noise, merged loops, seeds and tapes"
from collections import Counter
from fractions import Fraction
from math import nextafter

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from helpers import CANON, Recorder, g_test, laws, pairs, proves, refuses
from specref.core.rng import Outcomes, Seeded, Tape, Uniforms, tv_outcomes, law_of, mean_of, merged_law, numpy_generator, verdict_tape
from specref.core.law import exact, overlap
from specref.core.loop import generate
from specref.app.systems import SYSTEMS
from specref.core.target import random_table

# A program is a leaf (a number) or a question with a program for every answer

leaves = st.integers(0, 3)
picks = lambda kids: st.integers(2, 4).flatmap(lambda V: st.tuples(laws(V), st.lists(kids, min_size=V, max_size=V)))
coins = lambda kids: st.tuples(st.integers(-1, 4), st.integers(1, 3), kids, kids)
programs = st.recursive(leaves, lambda kids: picks(kids) | coins(kids), max_leaves=12)


def run(program, rng):
    match program:
        case (law, kids): return run(kids[rng.pick(law)], rng)
        case (a, b, yes, no): return run(yes if rng.coin(a, of=b) else no, rng)
        case leaf: return leaf


def by_hand(program, mass=Fraction(1)):
    "[(outcome, mass)] of every road with positive mass"
    match program:
        case (law, kids): todo = zip(law, kids)
        case (a, b, yes, no): todo = [(yes_ := min(max(Fraction(a, b), 0), 1), yes), (1 - yes_, no)]
        case leaf: return [(leaf, mass)]
    return [road for w, kid in todo if w > 0 for road in by_hand(kid, mass * w)]


@proves("thm-pushforward")
@settings(max_examples=200)
@given(programs)
def test_enumeration_is_the_law_of_the_program(program):
    "Every program of up to a dozen questions: law, number of roads and mean, computed by recursion instead of replay"
    law, roads, want = law_of(lambda rng: run(program, rng)), by_hand(program), Counter()
    for out, w in roads: want[out] += w
    assert law == want and law.paths == len(roads) and sum(law.values()) == 1
    assert mean_of(lambda rng: run(program, rng)) == sum(k*w for k, w in roads) and law.of(lambda k: k % 2).paths == law.paths


@proves("thm-pushforward")
@settings(max_examples=20)
@given(programs, st.integers(0, 99))
def test_running_agrees_with_enumerating(program, seed):
    "Two thousand seeded runs against the computed law: a false alarm once in 1e9"
    rng = Seeded(seed)
    report = g_test(Counter(run(program, rng) for _ in range(2000)), law_of(lambda rng: run(program, rng)))
    assert report.fits, report


def test_floats_in_floats_out():
    law = law_of(lambda rng: rng.pick(np.array([.5, .25, .25])) + rng.coin(.5))
    assert {k: float(w) for k, w in law.items()} == {0: .25, 1: .375, 2: .25, 3: .125}


@pytest.mark.parametrize("walk", [law_of, mean_of])
def test_an_endless_enumeration_is_refused_with_the_count(walk):
    "Exactly `limit` paths are walked, never more; the message says how many"
    toss = lambda rng: rng.pick(exact(1, 1, 1))
    assert walk(toss, limit=3) == walk(toss)
    with pytest.raises(ValueError, match="^limit: walked 2 paths, 66.7% of the mass"): walk(toss, limit=2)
    def for_ever(rng):
        while rng.coin(1, of=2): pass
        return 1
    with pytest.raises(ValueError, match="^limit: walked 50 paths"): walk(for_ever, limit=50)


def test_a_road_without_end_is_refused():
    def until_heads(rng):
        for _ in range(2000):
            if rng.coin(1, of=3): return 1
        raise RuntimeError("walked 2,000 steps along one road")
    with pytest.raises(ValueError, match="^limit"): law_of(until_heads, limit=100)


def test_an_endless_loop_is_refused():
    with pytest.raises(ValueError, match="^limit"): merged_law(lambda s, rng: (s + rng.coin(1, of=2)) % 2, 0, lambda s: False, limit=100)
    with pytest.raises(ValueError, match="^limit"): merged_law(lambda s, rng: rng.pick(exact(1, 1, 1, 1)) + s + 1, 0, lambda s: s > 99, limit=100)


# Keys

def cut(*laws):
    "The joint law of the inverse cumulated laws of one uniform: the pieces between all breakpoints"
    ends = [np.cumsum(law) for law in laws]
    borders, joint = sorted({0, *(x for e in ends for x in e)}), Counter()
    for a, b in zip(borders, borders[1:]): joint[tuple(int(np.searchsorted(e, a, side="right")) for e in ends)] += b - a
    return joint


@proves("thm-lazy-cells")
@settings(max_examples=150)
@given(st.integers(2, 4).flatmap(lambda V: st.lists(laws(V), min_size=1, max_size=4)))
def test_one_key_is_one_uniform(ls):
    assert law_of(lambda rng: tuple(rng.pick(p, key="u") for p in ls)) == cut(*ls)


@proves("thm-lazy-cells")
@settings(max_examples=60)
@given(pairs(), st.data())
def test_keys_are_independent_of_each_other_and_of_plain_noise(pq, data):
    "Two keys asked in turn, with a plain pick between: the product of three laws"
    p, q = pq
    plain = data.draw(laws(2))
    got = law_of(lambda rng: (rng.pick(p, key=1), rng.pick(q, key=2), rng.pick(plain), rng.pick(q, key=1), rng.pick(p, key=2)))
    want = Counter()
    for (a, d), u in cut(p, q).items():
        for (b, e), v in cut(q, p).items():
            for c, w in enumerate(plain): want[a, b, c, d, e] += u*v*w
    assert got == {k: w for k, w in want.items() if w} and sum(w for (a, *_, d, _), w in got.items() if a == d) <= overlap(p, q)


@proves("thm-lazy-cells")
@given(pairs(), st.integers(0, 999))
def test_seeded_keys_share_one_number(pq, seed):
    "A seeded rng gives keyed answers that a single uniform can give, the same ones from any stream"
    p, q = pq
    asked = [(r := Seeded(seed).at(i)[j]).pick(law, key=(3, 4)) for i in range(2) for j in range(2) for law in (p, q)]
    assert len({tuple(asked[i:i+2]) for i in (0, 2, 4, 6)}) == 1 and cut(p, q)[tuple(asked[:2])] > 0


# Loops

@proves("thm-merging")
@settings(max_examples=60)
@given(st.lists(laws(3), min_size=3, max_size=3), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.integers(1, 4))
def test_merged_states_have_the_law_of_all_roads(rows, patience, n):
    "A Markov chain with a coin in every step that stops at different times: merged = walked in full"
    def step(s, rng):
        x = rng.pick(rows[s[0]])
        return (x if rng.coin(1, of=patience[x]) else 0), s[1] + 1
    done = lambda s: s[1] >= n + s[0] - 1
    def whole(rng):
        s = (0, 0)
        while not done(s): s = step(s, rng)
        return s
    merged, plain = merged_law(step, (0, 0), done), law_of(whole)
    assert merged == plain and sum(merged.values()) == 1


@proves("thm-merging")
def test_merging_walks_fewer_roads():
    "Six throws of a three-sided die: 729 roads, merged 3 + 9 + 15 + 21 + 27 + 33"
    die, done = exact(1, 1, 1), lambda s: s[1] == 6
    merged = merged_law(lambda s, rng: (s[0] + rng.pick(die), s[1] + 1), (0, 0), done)
    assert merged.paths == 108 and merged.of(lambda s: s[0]) == law_of(lambda rng: sum(rng.pick(die) for _ in range(6)))
    assert merged_law(None, 7, lambda s: True) == {7: 1}


@proves("thm-merging")
@given(laws(2), st.integers(1, 6))
def test_one_end_in_different_rounds(p, n):
    "Strides of 1 or 2 until n is passed: the same end after many rounds or few"
    def stride(rng):
        s = 0
        while s < n: s += 1 + rng.pick(p)
        return s
    assert merged_law(lambda s, rng: s + 1 + rng.pick(p), 0, lambda s: s >= n) == law_of(stride)


# Numbers

def test_distance_is_total_variation():
    a, b = Outcomes(x=Fraction(1, 2), y=Fraction(1, 2)), dict(y=Fraction(1, 4), z=Fraction(3, 4))
    assert tv_outcomes(a, b) == tv_outcomes(b, a) == Fraction(3, 4) and tv_outcomes(a, a) == 0


units = st.floats(0, 1, exclude_max=True)
rough = st.lists(st.sampled_from([0., 1e-300, 1e-17, .1, .3, 1., 7.]), min_size=2, max_size=6).filter(any).map(lambda w: np.array(w) / sum(w))


@settings(max_examples=300)
@given(rough, units)
@example(np.array([1., 0]), nextafter(1, 0))
@example(np.array([0, 1.]), 0.)
@example(np.array([.1]*10 + [0]), nextafter(1, 0))
def test_a_pick_never_gives_what_has_no_weight(law, u):
    "Whatever the uniform and the rounding, the token has weight; and its cell holds the uniform"
    x = verdict_tape([], [u]).pick(law, at=0)
    assert 0 <= x < len(law) and law[x] > 0
    assert law[:x].sum() - 1e-12 <= u <= law[:x+1].sum() + 1e-12


@settings(max_examples=300)
@given(pairs(), units)
def test_float_and_exact_laws_cut_alike(pq, u):
    "The same uniform gives the same token from fractions and from floats, save within rounding of a border"
    p, borders = pq[0], np.cumsum(pq[0]).astype(float)
    if min(abs(borders - u)) > 1e-12: assert verdict_tape([], [u]).pick(p, at=0) == verdict_tape([], [u]).pick(p.astype(float), at=0) == np.searchsorted(borders, u)


@given(st.fractions(0, 2), st.fractions(Fraction(1, 9), 1), units)
def test_coin_is_strict(a, b, u):
    "u b < a: nothing of weight 0 at u = 0, and everything sure at any u"
    toss = verdict_tape([u, 0.], []).coin
    assert toss(a, of=b, at=0) == (u*b < a)
    assert toss(a, of=b, at=1) == (a > 0) and not toss(0*a, of=b, at=0) and (a < b or toss(a, of=b, at=0))


# Seeds, streams, tapes

def first(rng, n=3): return tuple(rng.uniform("coin", None, None) for _ in range(n))


def test_streams_have_their_own_noise():
    "Every round and side its own numbers, the same on every call; the plain stream and the keys apart from all"
    streams = lambda: [Seeded(5), *(r for i in range(40) for r in Seeded(5).at(i)), *(r for i in range(5) for r in Seeded(5, (0, 7)).at(i)), Seeded(6)]
    seen = [first(r) for r in streams()]
    keyed = [Seeded(5, root).uniform("pick", None, k) for root in ((0,), (0, 7), (0, 1)) for k in (0, 1, 2, (0, 0), (0, 1), (0, 1, 0))]
    flat = [u for s in seen for u in s] + keyed
    assert len(set(flat)) == len(flat) and seen == [first(r) for r in streams()]
    assert keyed == [Seeded(5, root).at(3).verify.at(1).draft.uniform("pick", None, k) for root in ((0,), (0, 7), (0, 1)) for k in (0, 1, 2, (0, 0), (0, 1), (0, 1, 0))]
    assert Seeded(5).at(3).draft is not Seeded(5).at(3).verify and first(stream_rng := Seeded(5).at(3).draft) != first(stream_rng)


def test_draft_and_judge_are_independent():
    "The joint law of both sides' first coins in two rounds, over 4,500 seeds"
    p = exact(1, 1)
    joint = lambda s: tuple(r.pick(p) for i in range(2) for r in Seeded(s).at(i))
    report = g_test(Counter(joint(s) for s in range(4500)), law_of(lambda rng: tuple(rng.pick(p) for _ in range(4))))
    assert report.fits and report.tv < .09, report


def test_numpy_seeds_are_seeds():
    assert first(Seeded(np.int64(3))) == first(Seeded(3)) and 0 <= numpy_generator(3, 1, 2).random() < 1


def test_bad_seeds_are_refused():
    for seed in (-1, 1.5, "7", None, np.nan, Fraction(1)): refuses("seed", Seeded, seed)


def test_an_unknown_address_is_refused():
    for ask in (lambda t: t.coin(1, at=9), lambda t: t.pick(exact(1, 1), at=2), lambda t: t.pick(exact(1, 1), key=1), lambda t: t.at(0).draft.coin(1, at=1)):
        refuses("table", ask, verdict_tape([.5]*2, [.5]*2))


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=15)
@given(seed=st.integers(0, 999), V=st.integers(2, 6))
def test_a_tape_replays_a_seeded_run(name, seed, V):
    "Every number that a seeded generation used, written down by address, gives the same integers again; no address is used twice"
    target, draft = random_table(V, 2*seed), random_table(V, 2*seed + 1)
    system, table = SYSTEMS[name](draft, gamma=3, shape=(2, 2), exact=True), {}
    once = generate(target, system.drafter, system.verify, (0, 1), 9, Recorder(Seeded(seed), table))
    again = generate(target, system.drafter, system.verify, (0, 1), 9, Tape(table))
    assert once == again == generate(target, system.drafter, system.verify, (0, 1), 9, Seeded(seed)) and once.sources == again.sources
    assert {a[1] for a in table if a[0] != "key"} <= {"draft", "verify"}


@given(st.lists(units, min_size=4, max_size=4), st.lists(units, min_size=4, max_size=4))
def test_a_tape_is_read_by_address(coins, picks):
    t, p = verdict_tape(coins, picks), CANON[0]
    for i in (2, 0, 3, 2): assert t.coin(p[1], of=p[0], at=i) == (coins[i]*p[0] < p[1]) and t.pick(p, at=i) == np.searchsorted(np.cumsum(p), picks[i], side="right")


def test_a_pick_is_a_token_with_weight():
    "At the last number below one, single precision and a tail of zeros included; a law that weighs nothing, or not a number, is refused"
    class Last(Uniforms):
        def uniform(self, kind, at, key): return 1 - 2**-53
    for seed in range(300):
        law = np.append(np.random.default_rng(seed).dirichlet([.3] * 7), [0, 0])
        for row in (law, law.astype(np.float32), law.tolist()):
            x = Last().pick(row)
            assert x < 7 and row[x] > 0
    assert Last().pick(np.array([0, 1, 0])) == 1 and Last().pick(exact(1, 2, 0)) == 1
    for bad in (np.zeros(3), np.full(3, np.nan), np.array([1, np.nan, 0]), np.array([np.inf, 1.])): refuses("law", Seeded(0).pick, bad)
