"Chapter 01: enumeration against hand-computed distributions, keyed noise, merged loops, seeds and tapes"
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import count
from math import nextafter
from time import process_time

import numpy as np, pytest
from hypothesis import example, given, settings, strategies as st

from helpers import CANON, Recorder, examples, g_test, laws, pairs, proves
from specref import exact, generate, law_of, mean_of, overlap, random_table, Seeded, SYSTEMS, Tape
from specref.core.rng import (Irreproducible, PathSampler, difference, estimated_paths, in_time, merged_law,
                              step_law, verdict_tape)

# A program is a leaf (a number) or a random draw with a program for every outcome

leaves = st.integers(0, 3)
def picks(kids):
    return st.integers(2, 4).flatmap(lambda V: st.tuples(laws(V), st.lists(kids, min_size=V, max_size=V)))
def coins(kids): return st.tuples(st.integers(-1, 4), st.integers(1, 3), kids, kids)
programs = st.recursive(leaves, lambda kids: picks(kids) | coins(kids), max_leaves=12)

def run(program, rng):
    match program:
        case (law, kids): return run(kids[rng.pick(law)], rng)
        case (a, b, yes, no): return run(yes if rng.coin(a, of=b) else no, rng)
        case leaf: return leaf

def by_hand(program, mass=Fraction(1)):
    "[(outcome, mass)] of every path with positive mass"
    match program:
        case (law, kids): todo = zip(law, kids)
        case (a, b, yes, no): todo = [(yes_ := min(max(Fraction(a, b), 0), 1), yes), (1 - yes_, no)]
        case leaf: return [(leaf, mass)]
    return [path for w, kid in todo if w > 0 for path in by_hand(kid, mass * w)]

@proves("thm-pushforward")
@examples(50, programs)
def test_enumeration_is_the_distribution_of_the_program(program):
    "Programs of up to a dozen draws: distribution, number of paths and mean, by recursion instead of replay"
    law, paths, want = law_of(lambda rng: run(program, rng)), by_hand(program), Counter()
    for out, w in paths: want[out] += w
    assert law == want and law.paths == law.of(lambda k: k % 2).paths == len(paths) and sum(law.values()) == 1
    assert mean_of(lambda rng: run(program, rng)) == sum(k*w for k, w in paths)

@proves("thm-pushforward")
@examples(8, programs, st.integers(0, 99))
def test_running_agrees_with_enumerating(program, seed):
    "Two thousand seeded runs against the computed distribution: a false alarm once in 1e9"
    rng = Seeded(seed)
    report = g_test(Counter(run(program, rng) for _ in range(2000)), law_of(lambda rng: run(program, rng)))
    assert report.fits, report

def cut(*laws):
    "The joint distribution of the inverse CDFs of `laws` at one uniform: the pieces between all breakpoints"
    ends = [np.cumsum(law) for law in laws]
    borders, joint = sorted({0, *(x for e in ends for x in e)}), Counter()
    for a, b in zip(borders, borders[1:]):
        joint[tuple(int(np.searchsorted(e, a, side="right")) for e in ends)] += b - a
    return joint

@proves("thm-lazy-cells")
@examples(30, st.integers(2, 4).flatmap(lambda V: st.lists(laws(V), min_size=1, max_size=4)))
def test_one_key_is_one_uniform(ls):
    assert law_of(lambda rng: tuple(rng.pick(p, key="u") for p in ls)) == cut(*ls)

@proves("thm-lazy-cells")
@examples(25, pairs(st.integers(2, 3)), laws(2))
def test_keys_are_independent_of_each_other_and_of_plain_noise(pq, plain):
    "Two keys used in turn, with a plain pick between: the product of three distributions"
    p, q = pq
    draws = (p, 1), (q, 2), (plain, None), (q, 1), (p, 2)
    got = law_of(lambda rng: tuple(rng.pick(law, key=key) for law, key in draws))
    want = Counter()
    for (a, d), u in cut(p, q).items():
        for (b, e), v in cut(q, p).items():
            for c, w in enumerate(plain): want[a, b, c, d, e] += u*v*w
    assert got == {k: w for k, w in want.items() if w}
    assert sum(w for (a, *_, d, _), w in got.items() if a == d) <= overlap(p, q)

@proves("thm-lazy-cells")
@examples(30, pairs(), st.integers(0, 999))
def test_seeded_keys_share_one_number(pq, seed):
    "The keyed picks of a seeded rng are those of some single uniform, the same from any stream"
    streams = [Seeded(seed).at(i)[side] for i in range(2) for side in range(2)]
    (answers,) = {tuple(rng.pick(law, key=(3, 4)) for law in pq) for rng in streams}
    assert cut(*pq)[answers] > 0

def zeros_at(ends, V):
    "A row of `V` tokens, large enough to be searched in blocks; some tokens and a whole block have no weight"
    w = np.random.default_rng(V).random(V)**4
    w[ends] = w[1024:1536] = w[-7:] = 0
    return w / w.sum()

@pytest.mark.parametrize("V", [5000, 5120, 128_256])
def test_long_rows_are_searched_in_blocks(V):
    "The token of the cumulative sums of the whole row, also at the ends of blocks; none of weight zero"
    w = zeros_at([0, 511, 512, 2047], V)
    ends = w.cumsum()
    us = [0., 1 - 2**-53, *np.random.default_rng(1).random(200), *ends[[511, 1023, 1535, 2047]]]
    got = [Tape({("pick", None): u}).pick(w) for u in us]
    assert all(w[x] > 0 for x in got)
    want = np.searchsorted(ends, np.array(us)*ends[-1], side="right")
    off = [abs(ends[min(x, y)] - u) for x, y, u in zip(got, want, us) if x != y]
    assert len(off) <= 4 and max(off, default=0) < 1e-12   # only where u is an end of a cell, up to rounding
    assert Tape({("pick", None): .5}).pick(list(exact(*[1]*6000))) == 3000

@proves("thm-merging")
@examples(25, st.lists(laws(3), min_size=3, max_size=3), st.integers(1, 3), st.integers(1, 4))
def test_merged_states_have_the_distribution_of_all_paths(rows, patience, n):
    "A Markov chain with a coin in every step that stops at different times: merged = enumerated in full"
    def step(s, rng):
        x = rng.pick(rows[s[0]])
        return (x if rng.coin(1, of=patience) else 0), s[1] + 1
    def done(s): return s[1] >= n + s[0] - 1
    def whole(rng):
        s = (0, 0)
        while not done(s): s = step(s, rng)
        return s
    assert merged_law(step, (0, 0), done) == law_of(whole)

class Uniform:
    "A numpy generator's `integers` by the picks of an rng"
    def __init__(self, rng): self.rng = rng
    def integers(self, k): return self.rng.pick(exact(*[1]*k))

@proves("prop-knuth")
@examples(40, programs)
def test_the_mean_of_the_estimate_is_the_number_of_paths(program):
    "Over all random walks, exactly; and an equal number of outcomes on every path needs one walk"
    def walk(rng):
        sampler = PathSampler(Uniform(rng))
        run(program, sampler)
        return sampler.paths
    assert mean_of(walk) == law_of(lambda rng: run(program, rng)).paths
    assert estimated_paths(lambda rng: [rng.pick(CANON[0]) for _ in range(5)], walks=1) == 4**5

def test_a_long_enumeration_is_refused_at_once():
    "With the estimate and a time, after the first 500 paths; one a little longer is not"
    start = process_time()
    with pytest.raises(ValueError, match=r"^limit: got about 3.5e9 paths, (some|more)[^;]*; wanted at most"):
        law_of(lambda rng: [rng.pick(exact(1, 1, 1)) for _ in range(20)] and None)
    assert process_time() - start < 2
    assert law_of(lambda rng: sum(rng.pick(exact(1, 1, 1)) for _ in range(7)), 2187).paths == 3**7
    with pytest.raises(ValueError, match="walked 2,186 paths"):
        law_of(lambda rng: sum(rng.pick(exact(1, 1, 1)) for _ in range(7)), 2186)

TIMES = [(3, "some 3 seconds"), (100, "some 100 seconds"), (240, "some 4 minutes"), (1e4, "some 3 hours"),
         (2e6, "some 20 days"), (1e9, "more than ten years")]

@pytest.mark.parametrize("seconds,words", TIMES)
def test_times_in_words(seconds, words): assert in_time(seconds).startswith(words)

@proves("thm-pushforward")
@examples(30, programs, programs, pairs(st.just(3)))
def test_two_stages_are_one_program(a, b, pq):
    "The same distribution and number of paths, also with a key in both stages; the first runs less often"
    calls = []
    def first(rng): return calls.append(1) or (run(a, rng), rng.pick(pq[0], key=1))
    def then(x, rng): return x, run(b, rng), rng.pick(pq[1], key=1)
    law, runs = step_law(first, then, 10**5), len(calls)
    whole = law_of(lambda rng: then(first(rng), rng))
    assert law == whole and law.paths == whole.paths and runs == law_of(first).paths

# What has no distribution: state outside, randomness outside, states that hide a part

@dataclass(frozen=True)
class Hidden:
    at: int
    hidden: object = field(compare=False, default=0)

class Opaque:
    "A state that equals itself alone"
    def __init__(self, at): self.at = at

def forgetful(make, rounds=3):
    "A loop of coins whose state is `make(coins so far, heads)`"
    def step(s, rng): return make(s.at + 1, rng.coin(1, of=2))
    return merged_law(step, make(0, False), lambda s: s.at == rounds, careful=True)

def test_hidden_state_is_refused():
    "A field left out of the comparison that differs; the same where it is equal, or compared, passes"
    with pytest.raises(Irreproducible, match="compare equal and differ in Hidden.hidden"): forgetful(Hidden)
    with pytest.raises(Irreproducible, match="differ in Hidden.hidden.1"):
        forgetful(lambda at, heads: Hidden(at, (0, [heads])))
    assert len(forgetful(lambda at, heads: Hidden(at, at))) == 1
    assert len(forgetful(lambda at, heads: Hidden(at, (3, lambda: at)))) == 1
    assert len(forgetful(lambda at, heads: Opaque(at))) == 8   # never merged, and never wrong

def test_answers_from_outside_are_refused():
    """Randomness and state outside the rng, in the outcome or in the draws; refused by replaying two paths,
    in nine enumerations: a coin outside shows the same side again in a quarter of them"""
    coin, half = np.random.default_rng(0), exact(1, 1)
    def programs():
        yield lambda s, rng: (rng.pick(half), int(coin.integers(2)))
        yield lambda s, rng, calls=count(): (rng.pick(half), next(calls) % 2)
        yield lambda s, rng, calls=count(): (rng.pick(half), next(calls) // 3)
        yield lambda s, rng, calls=count(): (rng.pick(half if next(calls) < 2 else exact(1, 3)), 0)
        yield lambda s, rng: (sum(rng.pick(half) for _ in range(int(coin.integers(1, 4)))), 0)
    for step in programs():
        with pytest.raises(Irreproducible, match="answers differ on the same random choices"):
            for _ in range(9): merged_law(step, None, lambda s: s is not None, careful=True)

SAME = [(1, 1), ((1, [2]), (1, [2])), ({1: "a"}, {1: "a"}), (np.ones(2), np.ones(2)), (Hidden(1), Hidden(1)),
        (*(lambda: x for x in (1, 1)), ), (Opaque((1,)), Opaque((1,))), ({1}, {1}),
        (partial(max, 1), partial(max, 1))]
OTHER = [(1, 2, "int"), (1, 1., "int"), ((1, [2]), (1, [3]), "tuple.1"), ({1: "a"}, {2: "a"}, "dict"),
         (np.ones(2), np.zeros(2), "ndarray"), (Hidden(1, 2), Hidden(1, 3), "Hidden.hidden"),
         (Opaque([1]), Opaque([2]), "Opaque.at"), (Opaque({1}), Opaque({2}), "Opaque.at"),
         (partial(max, 1), partial(max, 2), "partial.args")]

@pytest.mark.parametrize("a,b", SAME)
def test_no_difference(a, b): assert difference(a, b) == ""

@pytest.mark.parametrize("a,b,where", OTHER)
def test_a_difference_is_named(a, b, where): assert difference(a, b).startswith(where)

def test_a_value_that_contains_itself():
    a, b = ([], 1), ([], 1)
    for x in a, b: x[0].append(x)
    assert difference(a, b) == ""

units = st.floats(0, 1, exclude_max=True)
weights = st.sampled_from([0., 1e-300, 1e-17, .1, .3, 1., 7.])
rough = st.lists(weights, min_size=2, max_size=6).filter(any).map(lambda w: np.array(w) / sum(w))

@examples(100, rough, units)
@example(np.array([1., 0]), nextafter(1, 0))
@example(np.array([0, 1.]), 0.)
@example(np.array([.1]*10 + [0]), nextafter(1, 0))
def test_a_pick_has_weight(law, u):
    "Whatever the uniform, the rounding and the precision; and its cell holds the uniform"
    for row in (law, law.astype(np.float32), law.tolist()):
        x = verdict_tape([], [u]).pick(row, at=0)
        assert 0 <= x < len(law) and row[x] > 0
        if row is law: assert law[:x].sum() - 1e-12 <= u <= law[:x+1].sum() + 1e-12

@examples(50, st.fractions(0, 2), st.fractions(Fraction(1, 9), 1), units, st.integers(0, 3))
def test_coins_and_tapes(a, b, u, i):
    "u b < a, strictly: nothing of weight 0 at u = 0; and a tape is read by address"
    p, us = CANON[0], [0., u, .5, u]
    tape, x = verdict_tape(us, us), np.searchsorted(np.cumsum(p), us[i], side="right")
    assert tape.coin(a, of=b, at=i) == (us[i]*b < a) and tape.coin(a, of=b, at=0) == (a > 0)
    assert tape.pick(p, at=i) == tape.pick(p.astype(float), at=i) == x

def test_streams_have_their_own_noise():
    "Each round and side has its own uniforms, the same on every call; plain stream and keys have others"
    roots, keys = ((0,), (0, 7), (0, 1)), (0, 1, 2, (0, 0), (0, 1), (0, 1, 0))
    def streams():
        rounds = [rng for root in roots[:2] for i in range(20) for rng in Seeded(5, root).at(i)]
        return [tuple(rng.uniform("coin", None, None) for _ in range(3)) for rng in (Seeded(5), *rounds)]
    def keyed(of): return [of(Seeded(5, root)).uniform("pick", None, k) for root in roots for k in keys]
    own = keyed(lambda rng: rng)
    flat = [u for numbers in streams() for u in numbers] + own
    assert len(set(flat)) == len(flat) and streams() == streams()
    assert own == keyed(lambda rng: rng.at(3).verify.at(1).draft)

def test_draft_and_verifier_are_independent():
    "The joint distribution of both sides' first coins in two rounds, over 4,500 seeds"
    p = exact(1, 1)
    joint = Counter(tuple(r.pick(p) for i in range(2) for r in Seeded(s).at(i)) for s in range(4500))
    report = g_test(joint, law_of(lambda rng: tuple(rng.pick(p) for _ in range(4))))
    assert report.fits and report.tv < .09, report

@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=3)
@given(seed=st.integers(0, 999), V=st.integers(2, 6))
def test_a_tape_replays_a_seeded_run(name, seed, V):
    "The uniforms of a seeded generation, recorded by address, give the same integers; no address twice"
    target, draft = random_table(V, 2*seed), random_table(V, 2*seed + 1)
    system, table = SYSTEMS[name](draft, gamma=3, shape=(2, 2), exact=True), {}
    def decode(rng): return generate(target, system.drafter, system.verify, (0, 1), 9, rng)
    once, again = decode(Recorder(Seeded(seed), table)), decode(Tape(table))
    assert once == again == decode(Seeded(seed)) and once.steps == again.steps
    assert {a[1] for a in table if a[0] != "key"} <= {"draft", "verify"}

def test_a_bar_counts_paths_against_their_estimate(capsys):
    law = law_of(lambda rng: [rng.coin(Fraction(1, 3)) for _ in range(5)] == [True]*5, progress=True)
    assert law == {True: Fraction(1, 243), False: Fraction(242, 243)} and "32/32" in capsys.readouterr().err
