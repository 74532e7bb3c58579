"T2: counts of whole continuations against the target law; every assertion says how often it is wrong and what it sees"
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import ALPHA, MISS, detectable, g_test, killer, pooled, random_table, seeds, tempered
from mutants import judge, redraw, siblings_by_p
from specref.chance import Seeded, distance, stream
from specref.loop import System, loop_law
from specref.reject import Chain
from specref.siblings import Branching
from specref.systems import SYSTEMS
from specref.target import target_law
from specref.tree import iid

N, SEES, CTX = 8_000, .1, (0, 1, 0)   # runs an example; every example sees a distance of SEES with power 1 - MISS


def counts(system, target, seed, n=N): return Counter(tuple(system(target, CTX, 3, Seeded(seed, (0, run)))) for run in range(n))


def nearby(want, off):
    "A law at distance `off` from `want`: some of its mass moved to its rarest text"
    y = min(want, key=want.get)
    w = off / (1 - want[y])
    return {k: (1 - w)*v + w*(k == y) for k, v in want.items()}


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=3)
@given(st.tuples(seeds, seeds), st.booleans(), st.floats(.5, 2), st.integers(1, 4), st.sampled_from([(2,), (3, 1), (2, 2)]), st.integers(0, 2**40))
def test_three_tokens(name, models, zeros, temperature, gamma, shape, seed):
    "The joint law of three tokens on float tables: fits the target's, and the same counts reject a law at the distance stated"
    target, draft = (tempered(random_table(3, 2*s + i, zeros), temperature) for i, s in enumerate(models))
    want, system = target_law(target, CTX, 3), SYSTEMS[name](draft, gamma=gamma, shape=shape)
    report = g_test(seen := counts(system, target, seed), want)
    print(f"{system.name:24} T = {temperature:.2f}  {report}")
    assert report.fits and report.tv <= SEES, report
    assert len(want) == 1 or not g_test(seen, nearby(want, SEES)).fits


WRONG = {
    "correction from p": (lambda q: Chain(q, 2), judge(left=lambda r, q, x: r)),
    "everything kept": (lambda q: Chain(q, 2), judge(keep=lambda *_: True)),
    "match, then a fresh draw": (lambda q: Chain(q, 2), redraw(lambda r, q: r)),
    "siblings judged by p alone": (lambda q: Branching(q, (2, 1), iid), siblings_by_p),
    "bonus from the row before": (lambda q: Chain(q, 1), judge(last=lambda p, tree, i: p[tree.parent[i]])),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_system_is_rejected(name):
    "Each of them is further off than the test sees, by its exact law on the same tables, and its own counts give it away"
    target, draft = (tempered(m, .8) for m in killer())
    drafter, verify = WRONG[name][0](draft), WRONG[name][1]
    want, off = target_law(target, CTX, 3), distance(loop_law(target, drafter, verify, CTX, 3), target_law(target, CTX, 3))
    report = g_test(counts(System(name, drafter, verify), target, 1, 6000), want)
    print(f"{name:28} off by {off:.3f}  {report}")
    assert off > report.tv and not report.fits, report


# The test itself

def test_error_rates():
    "Under the law itself p-values are what they say; at the distance stated, misses are at most MISS (2,000 multinomial samples of each)"
    rng, want = stream(7), {k: w for k, w in enumerate(np.array([8, 4, 2, 1, 1]) / 16)}
    def runs(law, n=500): return [g_test(dict(enumerate(map(int, c))), want) for c in rng.multinomial(n, list(law.values()), 2000)]
    p = np.array([r.p_value for r in runs(want)])
    for level in (.01, .05, .5): assert abs((p < level).mean() - level) < 6*np.sqrt(level / 2000)
    off = detectable(500, 4)
    assert sum(r.fits for r in runs(nearby(want, off))) <= 2000*MISS + 6*np.sqrt(2000*MISS) and ALPHA <= 1e-9


def test_what_it_sees_grows_with_n():
    "The distance seen falls as 1/√n; a thousand cells cost a factor, not an order; the table of the dossier"
    assert detectable(4000, 26) == pytest.approx(2*detectable(16000, 26)) and detectable(4000, 26) < detectable(4000, 1023)
    for cells, n in ((2, 8.5e3), (16, 1.2e4), (32, 1.4e4), (1024, 4.8e4)): assert detectable(n, cells - 1) == pytest.approx(.05, rel=.06)


def test_pooling():
    "Every cell is due at least 50 counts, small ones share one, and what a shared cell could hide is added to the distance"
    want = {0: .6, 1: .38, 2: .012, 3: .008}
    assert pooled(want, 1000) == [[0], [2, 3, 1]] and pooled(want, 5000) == [[0], [1], [3, 2]] and pooled(want, 100_000) == [[0], [1], [2], [3]]
    big = g_test({0: 3000, 1: 1900, 2: 100}, want)
    assert big.cells == 3 and big.tv == pytest.approx(detectable(5000, 2) + .02)


def test_the_impossible_is_not_pooled():
    "One count of a text of probability zero fails at once, whatever the rest"
    assert not g_test({0: 10**6, 1: 10**6, 2: 1}, {0: .5, 1: .5, 2: 0}).fits and not g_test({0: 99, (3,): 1}, {0: 1.}).fits
    assert g_test({0: 5000, 1: 5000}, {0: .5, 1: .5, 2: 0}).fits and g_test({7: 100}, {7: 1}).fits
