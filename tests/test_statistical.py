"T2: counts of whole continuations against the target law; every assertion says how often it is wrong and what it sees"
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from helpers import g_test, killer, random_table, seeds, tempered
from specref.core.rng import Seeded, tv_outcomes
from specref.core.loop import System, loop_law
from specref.verify.reject import Chain
from specref.verify.siblings import Branching
from specref.app.systems import SYSTEMS
from specref.core.target import target_law
from specref.certify.mutants import reject_from, redraw_verifier, siblings_by_p
from specref.core.tree import iid

N, SEES, CTX = 9_000, .1, (0, 1, 0)   # runs an example, at most; every example sees a distance of SEES with power 1 - MISS


def counts(system, target, seed, n=N): return Counter(tuple(system(target, CTX, 3, Seeded(seed, (0, run)))) for run in range(n))


def enough(want, most=N, sees=SEES):
    "The fewest runs, in steps of 500 and `most` at most, whose counts of the law `want` see a distance of `sees`"
    one = max(want, key=want.get)
    return next((n for n in range(500, most, 500) if g_test({one: n}, want).tv <= sees), most)


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
    report = g_test(seen := counts(system, target, seed, enough(want)), want)
    print(f"{system.name:24} T = {temperature:.2f}  {report}")
    assert report.fits and report.tv <= SEES, report
    assert len(want) == 1 or not g_test(seen, nearby(want, SEES)).fits


WRONG = {
    "correction from p": (lambda q: Chain(q, 2), reject_from(left=lambda r, q, x: r)),
    "everything kept": (lambda q: Chain(q, 2), reject_from(keep=lambda *_: True)),
    "match, then a fresh draw": (lambda q: Chain(q, 2), redraw_verifier(lambda r, q: r)),
    "siblings judged by p alone": (lambda q: Branching(q, (2, 1), iid), siblings_by_p),
    "bonus from the row before": (lambda q: Chain(q, 1), reject_from(last=lambda p, tree, i: p[tree.parent[i]])),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_system_is_rejected(name):
    "Each of them is further off than the test sees, by its exact law on the same tables, and its own counts give it away"
    target, draft = (tempered(m, .8) for m in killer())
    drafter, verify = WRONG[name][0](draft), WRONG[name][1]
    want, off = target_law(target, CTX, 3), tv_outcomes(loop_law(target, drafter, verify, CTX, 3), target_law(target, CTX, 3))
    report = g_test(counts(System(name, drafter, verify), target, 1, 6000), want)
    print(f"{name:28} off by {off:.3f}  {report}")
    assert off > report.tv and not report.fits, report
