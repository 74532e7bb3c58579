"T4: every known mistake is rejected by the tests that pass the right thing in its place (pytest -s shows the kill matrix)"
from collections import Counter

import numpy as np
import pytest

from helpers import ALPHA, constant, g_test, refuses
from mutants import MUTANTS, SLOW, P, Setting, canon_p, canon_q, judge, kill_p, kill_q
from specref.chance import Seeded, Streams, Tape, distance, stream, tape
from specref.law import exact
from specref.loop import Verdict, rounds
from specref.reject import Chain, accepted_at_least, reject
from specref.tree import Tree, iid

N = 200_000   # draws from a mutant's law: the statistical tier at its full size
by_name = lambda mutants: pytest.mark.parametrize("mutant", mutants, ids=lambda m: m.name)
matrix = []


@pytest.fixture(scope="module", autouse=True)
def kill_matrix():
    yield
    print("\n\n" + "\n".join(f"{name:45} {seen:45} {tv:>12} {by}" for name, seen, tv, by in matrix))


def sampled(law, seed=0):
    "Counts of N draws from a law of outcomes"
    return dict(zip(law, map(int, stream(seed).multinomial(N, np.array([float(w) for w in law.values()])))))


@by_name(MUTANTS)
def test_the_exact_tests_reject(mutant):
    "T1: wrong law unequal, by the published distance where there is one; right law equal. T2: the same by counts, where they can see it"
    want, law = mutant.wrong.want(), mutant.wrong.law()
    off, report = distance(law, want), g_test(sampled(law), want)
    assert off > 0 and mutant.tv in (None, off) and sum(law.values()) == 1
    assert mutant.right.law() == mutant.right.want() and g_test(sampled(want), want).fits
    assert off < report.tv or not report.fits, report
    matrix.append((mutant.name, mutant.seen, str(off) if off.denominator < 10**5 else f"{float(off):.4f}", "T1" + ", T2"*(not report.fits)))


@by_name(SLOW)
def test_the_oracle_of_tokens_rejects(mutant):
    "The law is right, so only the exact mean number of tokens a round can tell"
    assert mutant.wrong.law() == mutant.wrong.want() == mutant.right.law()
    target, draft = mutant.right.target, mutant.right.drafter.model
    oracle = 1 + sum(accepted_at_least(target, draft, (0,), i) for i in (1, 2))
    assert mutant.right.tokens() == oracle > mutant.wrong.tokens()
    matrix.append((mutant.name, mutant.seen, "0", f"E[tokens]: {mutant.wrong.tokens()} for {oracle}"))


def test_the_suite_is_large_enough(): assert len(MUTANTS) + len(SLOW) >= 45 and len({m.name for m in MUTANTS + SLOW}) == len(MUTANTS) + len(SLOW)


class Inclusive(Tape):
    def coin(self, a, of=1, at=None): return bool(self.uniform("coin", at, None) * of <= a)


def test_an_inclusive_comparison_shows_on_a_tape():
    "sgl-project/sglang#35771: with `<=` a uniform of exactly 0 keeps a token of probability zero; its law is right almost everywhere"
    p, q = exact(1, 0, 1), exact(1, 1, 1)
    tree = Tree((0,)); tree.add(0, 1, q)
    strict = tape([0, 0.], [.9, 0])
    assert reject([p, p], tree, strict) == Verdict(0, 2) and reject([p, p], tree, Inclusive(strict.table)) == Verdict(1, 0)
    matrix.append(("<= for <", "sgl-project/sglang#35771", "0", "tape: a token of probability 0 at u = 0"))


class OneStream(Seeded):
    "The same numbers on both sides of a round"
    def at(self, i): return Streams(*(Seeded(self.seed, (*self.address, i)) for _ in range(2)))


def test_one_stream_for_both_sides_shows():
    "A seed handed to draft and judge alike: exact enumeration cannot see it, counts of real seeds do"
    def counts(rng): return g_test(Counter(next(rounds(canon_p, Chain(canon_q, 1), reject, (0,), rng(s))).tokens[0] for s in range(4000)), dict(enumerate(P)))
    right, wrong = counts(Seeded), counts(OneStream)
    assert right.fits and right.tv < .1 and not wrong.fits, (right, wrong)
    matrix.append(("one stream for draft and judge", "a seed handed to both", "1/10", f"T2: p-value {wrong.p_value:.0e} < {ALPHA:.0e}"))


def test_broken_laws_do_not_pass_the_door():
    "sgl-project/sglang#37134, vllm-project/vllm#41834: a malformed q is refused by name before anything is drawn from it"
    for q in ([np.nan, 1.], [np.inf, 0.], [-.5, 1.5], [.5, .4]): refuses("q", iid, q)
    matrix.append(("NaN, inf or negative q", "sgl-project/sglang#37134", "-", "ValueError at the door"))


def test_blind_instances():
    "Why the instances are what they are: wrong residuals hide at V = 2, wrong rows on order-0 models"
    two = constant(1, 2), constant(2, 1)
    hidden = Setting(two[0], Chain(two[1], 2), judge(left=lambda r, q, x: exact(*(y != x for y in range(2)))), 3)
    assert hidden.law() == hidden.want()
    rows = judge(row=lambda p, tree, i: p[0])
    order0, context = Setting(constant(3, 2, 1), Chain(constant(1, 2, 3), 2), rows, 3), Setting(kill_p, Chain(kill_q, 2), rows, 3)
    assert order0.law() == order0.want() and context.law() != context.want()
