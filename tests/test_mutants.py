"Chapters 16, 16a, 28: every known bug fails a test that the correct code passes (-s prints which)"
from collections import Counter
from fractions import Fraction as F
from hashlib import sha256

import numpy as np
import pytest

from contracts import drafter_contract
from helpers import ALPHA, CANON, constant, g_test
from specref.certify.certificates import certify_system
from specref.certify.draft_mutants import DRAFT_GALLERY, DRAFT_MUTANTS, DRAFT_SLOW, KNOWN
from specref.certify.chain_mutants import BLOCK, NOISE_SHARED
from specref.certify.loop_mutants import FOUR, GALLERY, MUTANTS, TLI, OneStream, InterfaceBug
from specref.core.law import exact, overlap
from specref.core.loop import System, rounds
from specref.core.rng import Seeded, numpy_generator, tv_outcomes
from specref.draft.parallel import Overlapped
from specref.verify.reject import Chain, accepted_at_least, reject

N = 200_000   # samples from the output distribution of a mutant
DETECTABLE = F(2, 100)   # a distance that so many samples must detect
ALL, SLOWER = ([m for m in KNOWN if m.by == by] for by in ("law", "E[tokens]"))
INTERFACES = [m for m in KNOWN if isinstance(m, InterfaceBug)]
AHEAD = [m for m in DRAFT_MUTANTS if isinstance(m.wrong.drafter, Overlapped)]   # what it writes is no edge
MISSTATING = [m for m in ALL if m.wrong.drafter is not m.right.drafter and m not in NOISE_SHARED + AHEAD]
FAMILIES = *GALLERY.values(), *DRAFT_GALLERY.values()
PLAIN = [m for family in FAMILIES for m in family[:3] if m.wrong.loop is None]
matrix = []

def by_name(mutants): return pytest.mark.parametrize("mutant", mutants, ids=lambda m: m.name)

@pytest.fixture(scope="module", autouse=True)
def kill_matrix():
    yield
    print("\n\n" + "\n".join(f"{name:50} {seen:60} {tv:>12} {by}" for name, seen, tv, by in matrix))

def sampled(law, seed=0):
    "Counts of N samples from a distribution of outcomes"
    weights = np.array([float(w) for w in law.values()])
    return dict(zip(law, map(int, numpy_generator(seed).multinomial(N, weights))))

def certified(setting):
    "The exact certificate of a setting"
    s = setting
    return certify_system(System("under test", s.drafter, s.verify), s.target, s.ctx, s.n, s.stop)

@by_name(ALL)
def test_exact_distributions_reject(mutant):
    "The exact distribution is wrong, by the published distance; counts of samples detect it from .02 on"
    want, law = mutant.wrong.want(), mutant.wrong.law()
    off, report = tv_outcomes(law, want), g_test(sampled(law), want)
    assert off > 0 and mutant.tv in (None, off) and sum(law.values()) == 1 and "law" in mutant.caught
    assert mutant.right.law() == mutant.right.want() == want and g_test(sampled(want), want).fits
    assert off < DETECTABLE or not report.fits, report
    tv = str(off) if off.denominator < 10**5 else f"{float(off):.4g}"
    matrix.append((mutant.name, mutant.seen, tv, "exact" + ", counts"*(not report.fits)))

@by_name(PLAIN)
def test_certificates_reject(mutant):
    "Three of each family: the certificate fails, and states the distance; the correct code passes"
    law, want, found = mutant.wrong.law(), mutant.wrong.want(), certified(mutant.wrong)
    text, got, due = found.worst
    assert not found.passes and found.tv == mutant.off and got == law.get(text, 0) != due == want.get(text, 0)
    assert all(abs(law.get(y, 0) - v) <= abs(got - due) for y, v in want.items())
    for words in (found.words, str(found)): assert words.startswith("OUTPUT DISTRIBUTION DIFFERS: total")
    assert certified(mutant.right).passes

@by_name(MISSTATING)
def test_the_contract_of_drafters_rejects(mutant):
    "Found without a verifier: an edge does not state the conditional distribution of its token"
    drafter_contract(mutant.right.drafter, mutant.right.ctx)
    with pytest.raises(AssertionError, match="stated"):
        drafter_contract(mutant.wrong.drafter, mutant.wrong.ctx)

def test_no_other_drafter_is_misstated(): assert [m for m in ALL if "contract" in m.caught] == MISSTATING

# Σ p ψ, and a second token unless "ab" is one
SPELT_TOKENS = F(1, 4)*F(1, 4) + F(1, 2)*F(1, 4) + F(1, 4)*F(1, 2) + F(3, 4)*F(1, 4)**2
PUBLISHED_TOKENS = {   # mean tokens of the first call, right and wrong, from published acceptance
    "q not normalized on the shared tokens": (1 + F(2, 5) + F(2, 5)**2, 1 + F(3, 10) + F(3, 10)**2),
    "begin token inserted before a draft of another tokenizer": (1 + SPELT_TOKENS, F(1)),
    "block verification falls back to token verification": (1 + F(133, 120), 1 + F(21, 20)),
    "likeliest children as point masses": (1 + F(14, 15), 1 + F(4, 5)),
    "deterministic child before the sampled one": (1 + F(23, 30), 1 + F(3, 4)),
}
CERTAIN_TOKENS = {m.name: (3, 1) for m in DRAFT_SLOW} | {   # of a text without chance, by hand
    "unfinished character at the end of the draft replaced": (3, 2),
    "text changed by the tokenizer's normaliser": (4, 1),
}
PUBLISHED_TOKENS |= CERTAIN_TOKENS

@by_name(SLOWER)
def test_the_mean_number_of_tokens_rejects(mutant):
    "The output distribution is correct, the exact mean number of tokens is not, and certificates state it"
    right, wrong, s = mutant.right.tokens(), mutant.wrong.tokens(), mutant.right
    assert mutant.wrong.law() == mutant.wrong.want() == s.law() and mutant.caught == ("E[tokens]",)
    assert PUBLISHED_TOKENS.get(mutant.name, (right, wrong)) == (right, wrong) and right > wrong
    found = certified(mutant.wrong), certified(s)
    assert all(f.passes for f in found) and [f.tokens for f in found] == [wrong, right]
    if s.verify is reject and isinstance(s.drafter, Chain):
        assert right == 1 + sum(accepted_at_least(s.target, s.drafter.model, (0,), i) for i in (1, 2))
    else: assert mutant.name in PUBLISHED_TOKENS
    matrix.append((mutant.name, mutant.seen, "0", f"E[tokens]: {wrong} for {right}"))

def test_published_acceptance():
    "Published acceptance: the inverted ratio; two tokenizers; SGLang's pair"
    (inverted,) = [m for m in MUTANTS if m.name == "ratio inverted"]
    assert inverted.wrong.tokens() == 1 + F(103, 120) > inverted.right.tokens()
    p, q = TLI.target.law((0,)), exact(0, 1, 4, 5)
    assert [overlap(p, q), overlap(p, TLI.drafter.model.law((0,)))] == [F(3, 10), F(2, 5)]
    assert overlap(FOUR[0].law((0,)), FOUR[1]) == F(9, 10) and BLOCK.tokens() == F(253, 120)

@pytest.mark.parametrize("bug", INTERFACES, ids=lambda w: w.name)
def test_a_violated_interface_is_found(bug):
    assert bug.test(bug.right) is True and bug.test(bug.wrong) is False
    matrix.append((bug.name, bug.seen, "-", bug.by))

def test_no_bug_is_lost():
    "The names have a fixed digest; an issue has an owner, a repository and a number"
    everything = ALL + SLOWER + INTERFACES
    assert [*map(len, (ALL, SLOWER, INTERFACES))] == [90 + 31, 11 + 5, 8 + 1]
    digests = {146: "58b83d1754649036", 179: "aa0d6a3edbfe924d"}
    for found in (everything, KNOWN):
        names = sorted({m.name for m in found})
        assert sha256("\n".join(names).encode()).hexdigest()[:16] == digests[len(names)]
    for word in " ".join(m.seen for m in KNOWN).replace(";", " ").replace(",", " ").split():
        assert "#" not in word or "/" in word, word

def test_counts_detect_one_stream_for_both_sides():
    "A seed shared by draft and verifier: the counts of 2,000 seeds fit the exact distribution of that bug"
    (keyed,) = [m for m in NOISE_SHARED if m.name == "draft and acceptance test share a random number"]
    want, chain = dict(enumerate(CANON[0])), Chain(constant(1, 2, 3, 4), 1)
    def first(rng): return next(rounds(constant(4, 3, 2, 1), chain, reject, (0,), rng)).tokens[0]
    right, wrong = (Counter(first(rng(s)) for s in range(2000)) for rng in (Seeded, OneStream))
    fits = g_test(wrong, keyed.wrong.law().of(lambda y: y[0]))
    assert g_test(right, want).fits and not g_test(wrong, want).fits and fits.fits
    assert g_test(right, want).tv < .15 and g_test(wrong, want).p_value < ALPHA
