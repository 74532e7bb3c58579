"T4: every known mistake is rejected by the tests that pass the right thing in its place (pytest -s shows the kill matrix)"
from collections import Counter
from fractions import Fraction as F

import numpy as np
import pytest

from contracts import drafter_contract
from helpers import ALPHA, CANON, constant, g_test, refuses
from specref.core.rng import Seeded, tv_outcomes, numpy_generator, verdict_tape
from specref.core.law import exact, overlap
from specref.core.loop import Verdict, rounds
from specref.verify.reject import Chain, accepted_at_least, reject
from specref.certify.mutants import BLOCK, FOUR, MUTANTS, NOISE_SHARED, SLOW, TLI, WIRES, Inclusive, OneStream
from specref.core.tree import Tree, iid

N = 200_000   # draws from a mutant's law: the statistical tier at its full size
SEEN = F(2, 100)   # a distance that the statistical tier may never miss
LIARS = [m for m in MUTANTS if m.wrong.drafter is not m.right.drafter and m not in NOISE_SHARED]
by_name = lambda mutants: pytest.mark.parametrize("mutant", mutants, ids=lambda m: m.name)
matrix = []


@pytest.fixture(scope="module", autouse=True)
def kill_matrix():
    yield
    print("\n\n" + "\n".join(f"{name:50} {seen:60} {tv:>12} {by}" for name, seen, tv, by in matrix))


def sampled(law, seed=0):
    "Counts of N draws from a law of outcomes"
    return dict(zip(law, map(int, numpy_generator(seed).multinomial(N, np.array([float(w) for w in law.values()])))))


@by_name(MUTANTS)
def test_the_exact_tests_reject(mutant):
    "T1: wrong law unequal, by the published distance where there is one; right law equal. T2: the same by counts, from .02 on"
    want, law = mutant.wrong.want(), mutant.wrong.law()
    off, report = tv_outcomes(law, want), g_test(sampled(law), want)
    assert off > 0 and mutant.tv in (None, off) and sum(law.values()) == 1 and "law" in mutant.caught
    assert mutant.right.law() == mutant.right.want() == want and g_test(sampled(want), want).fits
    assert off < SEEN or not report.fits, report
    matrix.append((mutant.name, mutant.seen, str(off) if off.denominator < 10**5 else f"{float(off):.4g}", "T1" + ", T2"*(not report.fits)))


@by_name(LIARS)
def test_the_contract_of_drafters_rejects(mutant):
    "A lying drafter is found without a judge: an edge does not state the conditional law of its token"
    drafter_contract(mutant.right.drafter, mutant.right.ctx)
    with pytest.raises(AssertionError, match="stated"): drafter_contract(mutant.wrong.drafter, mutant.wrong.ctx)
    assert "contract" in mutant.caught


def test_only_liars_are_called_liars(): assert [m for m in MUTANTS if "contract" in m.caught] == LIARS


CHAINS = [m for m in SLOW if m.right.verify is reject and isinstance(m.right.drafter, Chain)]
ORACLES = {   # mean tokens of the first call, right and wrong, from published acceptance
    "shared tokens, q not made a law on them": (1 + F(2, 5) + F(2, 5)**2, 1 + F(3, 10) + F(3, 10)**2),
    "a begin token put before a draft in other tokens": (1 + F(1, 4)*F(1, 4) + F(1, 2)*F(1, 4) + F(1, 4)*F(1, 2) + F(3, 4)*F(1, 4)**2, F(1)),   # Σ p ψ, and a second token unless "ab" is one
    "block verification falls back to tokens": (1 + F(133, 120), 1 + F(21, 20)),
    "the likeliest children, as points": (1 + F(14, 15), 1 + F(4, 5)),
    "the certain child before the sampled one": (1 + F(23, 30), 1 + F(3, 4)),
}


@by_name(SLOW)
def test_the_oracle_of_tokens_rejects(mutant):
    "The law is right, so only the exact mean number of tokens a round can tell"
    right, wrong = mutant.right.tokens(), mutant.wrong.tokens()
    assert mutant.wrong.law() == mutant.wrong.want() == mutant.right.law() and mutant.caught == ("E[tokens]",)
    assert ORACLES.get(mutant.name, (right, wrong)) == (right, wrong) and right > wrong
    if mutant in CHAINS: assert right == 1 + sum(accepted_at_least(mutant.right.target, mutant.right.drafter.model, (0,), i) for i in (1, 2))
    else: assert mutant.name in ORACLES
    matrix.append((mutant.name, mutant.seen, "0", f"E[tokens]: {wrong} for {right}"))


def test_published_acceptance():
    "verification.md §19: the inverted ratio keeps a draft in 103 of 120 cases"
    (inverted,) = [m for m in MUTANTS if m.name == "ratio inverted"]
    assert inverted.wrong.tokens() == 1 + F(103, 120) > inverted.right.tokens()


def test_where_the_oracles_come_from():
    "Two tokenizers: 3/10 becomes 2/5 (verification.md §16); SGLang's pair: 4/5 and 9/10 for one draft"
    p, q = TLI.target.law((0,)), exact(0, 1, 4, 5)
    assert [overlap(p, q), overlap(p, TLI.drafter.model.law((0,)))] == [F(3, 10), F(2, 5)]
    assert overlap(FOUR[0].law((0,)), FOUR[1]) == F(9, 10) and BLOCK.tokens() == F(253, 120)


@pytest.mark.parametrize("wire", WIRES, ids=lambda w: w.name)
def test_a_broken_promise_shows(wire):
    assert wire.test(wire.right) is True and wire.test(wire.wrong) is False
    matrix.append((wire.name, wire.seen, "-", wire.by))


def test_the_suite_is_large_enough():
    everything = MUTANTS + SLOW + WIRES
    assert len(everything) >= 95 and len({m.name for m in everything}) == len(everything) and all(m.seen for m in everything)


def test_an_inclusive_comparison_shows_on_a_tape():
    "sgl-project/sglang#35771: with `<=` a uniform of exactly 0 keeps a token of probability zero; its law is right almost everywhere"
    p, q = exact(1, 0, 1), exact(1, 1, 1)
    tree = Tree((0,)); tree.add(0, 1, q)
    strict = verdict_tape([0, 0.], [.9, 0])
    assert reject([p, p], tree, strict) == Verdict(0, 2) and reject([p, p], tree, Inclusive(strict.table)) == Verdict(1, 0)


def test_one_stream_for_both_sides_shows():
    "A seed handed to draft and judge alike, by counts of real seeds; they fit the exact law of the mistake that keys describe"
    want, keyed = dict(enumerate(CANON[0])), next(m for m in NOISE_SHARED if m.name == "draft and coin share noise").wrong.law().of(lambda y: y[0])
    def counts(rng): return Counter(next(rounds(constant(4, 3, 2, 1), Chain(constant(1, 2, 3, 4), 1), reject, (0,), rng(s))).tokens[0] for s in range(4000))
    right, wrong, fits = g_test(counts(Seeded), want), g_test(counts(OneStream), want), g_test(counts(OneStream), keyed)
    assert right.fits and right.tv < .1 and not wrong.fits and fits.fits and wrong.p_value < ALPHA, (right, wrong, fits)


def test_broken_laws_do_not_pass_the_door():
    "sgl-project/sglang#37134, vllm-project/vllm#41834: a malformed q is refused by name before anything is drawn from it"
    for q in ([np.nan, 1.], [np.inf, 0.], [-.5, 1.5], [.5, .4]): refuses("q", iid, q)
