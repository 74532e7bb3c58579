"Chapters 16c and 17: partitions, the G-test with its proved false-alarm rate, evidence, exact certificates"
import builtins
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, product
from math import lgamma, log
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import binom, chi2, kstest

from helpers import ALPHA, MISS, cold, constant, detectable, g_test, killer, laws, models, pooled
from helpers import proves, random_table, tempered
from specref.core.registry import SYSTEMS
from specref.certify.counts import Evidence, evidence
from specref.certify.certificates import Certificate, certificate, certify_system
from specref.certify.counts import log_moment, partition, safe_limit
from specref.certify.certificates import exact_certificate, sparse_table
from specref.certify.counts import split_row
from specref.certify.judge import JUDGE_CASES, judge_rule
from specref.certify.known import Rule, from_r, is_sampled, parent_row
from specref.certify.tree_mutants import siblings_by_p
from specref.certify.samplers import SamplerReport
from specref.certify.sequential import certify_sequentially
from specref.certify.bets import Finding
from specref.core.law import exact, greedy
from specref.core.loop import Drafter, System, Verdict, autoregressive, loop_law, match, no_draft
from specref.core.rng import Enumerator, numpy_generator, tv_outcomes
from specref.core.target import TableModel, target_law
from specref.core.tree import Tree, iid
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching

CTX = 0, 1, 0
FLOATS = [tempered(m, 1.) for m in killer()]
contexts = st.sampled_from([(0,), (0, 1, 0), (2, 0, 1, 2, 0)])
stops = st.sets(st.integers(0, 2), max_size=2).map(tuple)

def certify(verify, p, q, ctx=(0,), n=3, gamma=1, **kw):
    "The result on chains of `gamma` from `q`, or on `q`, a drafter"
    drafter = Chain(q, gamma) if isinstance(q, TableModel) else q
    return certify_system(System("under test", drafter, verify), p, ctx, n, **kw)

# The exact certificate

@proves("prop-certificate")
@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=2)
@given(models(), contexts, stops)
def test_a_certificate_covers_fewer_tokens_and_any_stop(name, pair, ctx, stop):
    "Equality for three tokens; then, by the proposition, for fewer and with any stop tokens"
    target, draft = pair
    s = SYSTEMS[name](draft, gamma=2, shape=(2,), exact=True)
    found = certify_system(s, target, ctx, 3)
    assert found.passes and found.tv == 0 and found.texts == len(target_law(target, ctx, 3))
    for m in (1, 2, 3):
        assert loop_law(target, s.drafter, s.verify, ctx, m, stop) == target_law(target, ctx, m, stop)

@proves("prop-certificate")
def test_a_certificate_covers_nothing_else():
    "Incorrect systems that pass for fewer tokens, after another context, and on another table"
    wide, two = [random_table(3, s, zeros=False) for s in (1, 2)], (constant(3, 2, 1), constant(1, 2, 3))
    late = Rule(bonus=parent_row)
    assert certify(late, *wide, n=1).passes and not certify(late, *wide, n=2).passes
    def after_one(p, tree, rng): return Verdict(0, 0) if tree.ctx[0] else match(p, tree, rng)
    assert certify(after_one, wide[0], no_draft).passes
    assert not certify(after_one, wide[0], no_draft, (1,)).passes
    rows = Rule(row=lambda p, tree, i: p[0])
    assert certify(rows, *two, gamma=2).passes and not certify(rows, *wide, gamma=2).passes

# Refused: a system that writes into p, has state or randomness of its own, or takes too long

def writer(p, tree, rng):
    "Argmax decoding that writes its own choice into the target's row"
    p[0][:] = greedy(p[0])
    return Verdict(0, rng.pick(p[0]))

def writes_later(p, tree, rng):
    "The same in the row after the last accepted token, in another way"
    found = reject(p, tree, rng)
    row = p[found.node]
    np.multiply(row, 0*row[0], out=row)
    return found

def writes_to_a_copy(p, tree, rng):
    row = p[0].copy()
    row /= row.sum()
    return Verdict(0, rng.pick(row))

def one_by_one(verify, p, q, runs, gamma=1):
    return certify_sequentially(System("under test", Chain(q, gamma), verify), p, (0,), most=runs // 5)

@pytest.mark.parametrize("verify", [writer, writes_later])
def test_a_verifier_that_writes_into_p_is_refused(verify):
    "Exactly, by counts and round by round; in a copy it may write"
    for test, pair in (certify, killer()), (certify, FLOATS), (one_by_one, FLOATS):
        with pytest.raises(ValueError, match="^verify: writes into the target's rows p, which are read-only"):
            test(verify, *pair, runs=50)
        assert test(writes_to_a_copy, *pair, runs=3000 if test is one_by_one else 500).passes

@pytest.mark.parametrize("n", [1, 3])
def test_the_target_is_what_it_was_before_the_system_ran(n):
    "A verifier with a hand on the table itself: the distance is that to the untouched target"
    target, draft = (random_table(3, s, zeros=False) for s in (1, 2))
    want = target_law(random_table(3, 1, zeros=False), (0,), n)
    def greedy_table(p, tree, rng):
        target.laws[tree.ctx] = greedy(target.f(tree.ctx))
        return Verdict(0, rng.pick(target.laws[tree.ctx]))
    found = certify(greedy_table, target, draft, n=n)
    assert not found.passes and found.tv == 1 - want[found.worst[0]]

class Counting(Drafter):
    "Drafts from `q`, and after some rounds nothing: state in the object itself"
    def __init__(self, q): self.q, self.rounds = q, 0
    def __call__(self, ctx, rng): return self.q(ctx, rng) if self.rounds < 3 else Tree(ctx)
    def learn(self, round):
        self.rounds += 1
        return self

@dataclass(frozen=True)
class HiddenCount(Drafter):
    q: Drafter
    rounds: int = field(default=0, compare=False)
    def __call__(self, ctx, rng): return self.q(ctx, rng) if self.rounds < 2 else Tree(ctx)
    def learn(self, round): return replace(self, rounds=self.rounds + 1)

@dataclass(frozen=True)
class OpenCount(HiddenCount):
    rounds: int = 0

def test_state_and_randomness_of_its_own_are_refused():
    "A count in the object, one that is not compared, a draw outside the rng; a compared count passes"
    target, draft = (random_table(3, s, zeros=False) for s in (1, 2))
    coin, calls = np.random.default_rng(0), count()
    def outside(p, tree, rng): return Verdict(0, int(coin.choice(3, p=p[0].astype(float))))
    def every_fifth(p, tree, rng): return match(p, tree, rng) if next(calls) % 5 else Verdict(0, 0)
    def fitted(p, tree, rng): return match(p, Tree(tree.ctx) if coin.integers(2) else tree, rng)
    for verify in outside, every_fifth, fitted:
        with pytest.raises(ValueError, match="^system: answers differ on the same random choices"):
            certify(verify, target, draft, gamma=2)
    one = Chain(draft, 1)
    with pytest.raises(ValueError, match="^system: answers differ"): certify(reject, target, Counting(one))
    with pytest.raises(ValueError, match=r"^system: got two states .* differ in [\w.]*rounds"):
        certify(reject, target, HiddenCount(one))
    assert certify(reject, target, OpenCount(one)).passes

def test_floats_and_lost_mass_are_refused():
    "Rows of floats in a table of fractions, and probabilities that do not sum to one"
    mixed = TableModel(3, lambda text: np.array([.5, .25, .25], dtype=object))
    with pytest.raises(ValueError, match="^target: got rows in floats"): certify(reject, mixed, no_draft)
    class Losing(TableModel):
        def __call__(self, tree): return [2*self.law(tree.text(i)) for i in range(len(tree))]
    with pytest.raises(ValueError, match="^target: got probabilities that sum to 8"):
        certify(match, Losing(2, lambda text: exact(1, 1)), no_draft)

def in_a_second(call, words):
    start = process_time()
    with pytest.raises(ValueError, match=words): call()
    assert process_time() - start < 2   # a tenth of a second, on a slow machine more

def test_an_enumeration_that_takes_long_is_refused_at_once():
    "Wide trees and long texts, with an estimate; the default is as long as is cheap"
    target, draft = (random_table(4, s, zeros=False) for s in (1, 2))
    words = r"^limit: got about \d\.\de\d+ paths, (some|more) .*; wanted at most 200,000: fewer tokens"
    for shape in (3, 2), (2, 2, 1):
        in_a_second(lambda: certify(reject, target, Branching(draft, shape)), words)
    in_a_second(lambda: certify(reject, target, draft, n=30), words)
    in_a_second(lambda: certify(reject, target, draft, n=2, gamma=12), words)
    assert certify(match, target, no_draft, n=4, limit=400).paths == 340 == sum(4**k for k in range(1, 5))
    in_a_second(lambda: certify(match, target, no_draft, n=4, limit=300), "got about [23].[0-9]e2 paths")
    few, more = (certify(match, target, drafter, n=None) for drafter in (no_draft, Chain(draft, 1)))
    assert few.n == more.n == 3 and "texts of at most 3 tokens" in few.words
    three = [random_table(3, s, zeros=False) for s in (1, 2)]
    assert [certify(reject, *three, n=None, gamma=gamma).n for gamma in (1, 2)] == [3, 4]

def third_draft(p, tree, rng):
    "Wrong where three draft tokens are accepted: never in a text of three tokens"
    found = reject(p, tree, rng)
    return Verdict(found.node, 0) if tree.depth[found.node] == 3 else found

def test_a_text_shorter_than_a_block_is_no_headline():
    "By default a block is covered where it is affordable, and else the verdict itself has the words"
    target, draft = (random_table(3, s) for s in (1, 2))
    def after_few_paths(verify, some):
        return exact_certificate(System("3", Chain(draft, 3), verify), target, (0,), few=9, some=some)
    wrong, right, short = map(after_few_paths, (third_draft, reject, third_draft), (50_000, 50_000, 0))
    assert not wrong.passes and wrong.n == right.n == right.block == 4 and "shorter" not in right.words
    assert short.passes and (short.n, short.block) == (3, 4)
    for words in short.verdict, str(short), short.words.splitlines()[0]:
        assert "total variation 0 on texts of 3 tokens (shorter than a block of 4)" in words
    def undeclared(ctx, rng): return Chain(draft, 3)(ctx, rng)   # a function without a depth
    assert certify(match, target, undeclared).verdict == short.verdict

def test_a_verdict_in_integers_of_numpy():
    "Right ones pass the exact test and the counts, with the same result as ints"
    def numpy_ints(p, tree, rng):
        found = reject(p, tree, rng)
        return Verdict(np.int64(found.node), np.int32(found.token))
    for test, pair in (certify, killer()), (certify, FLOATS), (one_by_one, FLOATS):
        ints, same = (test(verify, *pair, gamma=2, runs=300) for verify in (numpy_ints, reject))
        assert ints == same and (ints.passes or test is one_by_one)

def test_the_progress_of_an_enumeration(capsys):
    "A bar of paths on request alone"
    pair = [random_table(3, s, zeros=False) for s in (1, 2)]
    certify(reject, *pair)
    assert not capsys.readouterr().err
    certify(reject, *pair, progress=True)
    assert "path" in capsys.readouterr().err

# Longer than a block, after contexts of several lengths

def only_after(k, wrong):
    "`wrong` after texts of `k` tokens, else the target's own distribution"
    def verify(p, tree, rng): return wrong(p, tree, rng) if len(tree.ctx) == k else match(p, tree, rng)
    return verify

def second_block(p, tree, rng):
    "Wrong where five tokens of text have been verified: in no first block"
    return Verdict(0, 0) if len(tree.ctx) >= 6 else reject(p, tree, rng)

@pytest.mark.parametrize("k", [1, 2, 3])
def test_contexts_of_several_lengths(k):
    "Wrong after one length alone: the worst is reported, with its context"
    wrong = only_after(k, lambda p, tree, rng: Verdict(0, 0))
    found = certificate(lambda draft, **kw: System("wrong", no_draft, wrong))
    assert not found.passes and found.tv > 0 and found.lengths == (1, 3) and len(found.ctx) <= k
    for words in f"after the context {found.ctx}", "after contexts of 1, 3 tokens":
        assert words in found.words

def test_code_that_examines_its_rng():
    "A verifier that is right for the enumerating rng alone"
    def behaves(p, tree, rng): return reject(p, tree, rng) if isinstance(rng, Enumerator) else Verdict(0, 0)
    def build(verify): return lambda draft: System("mine", Chain(draft, 2), verify)
    assert certificate(build(reject)).exact
    with pytest.raises(ValueError, match="system: texts with a seeded rng"): certificate(build(behaves))

def test_a_loop_that_may_not_end_is_refused():
    "A rejection loop has no longest path: an error after some thousand forks, not hours"
    def until(p, tree, rng):
        while True:
            x = rng.pick(p[0])
            if rng.coin(1, of=2): return Verdict(0, x)
    with pytest.raises(ValueError, match="forks along one path"):
        certificate(lambda draft: System("until", Chain(draft, 1), until))

def test_longer_than_a_block():
    "The default is a block and one token more: a wrong second block is found, and is not by a shorter text"
    def build(draft, gamma, **kw): return System("late", Chain(draft, gamma), second_block)
    assert certificate(build, n=3, stop=()).passes
    found = certificate(build, stop=())
    assert not found.passes and found.n == 4 and len(found.worst[0]) == 4
    assert certificate(lambda draft, **kw: System("right", Chain(draft, 2), reject), stop=()).passes

@pytest.mark.parametrize("verify,right", [(reject, True), (Rule(bonus=parent_row), False)])
def test_eight_drafts_on_eight_tokens(verify, right):
    "On sparse rows, texts of ten tokens; the wrong bonus token comes after eight accepted drafts"
    p, q = (sparse_table(8, s) for s in (1, 2))
    found = certify(verify, p, q, (3,), gamma=8, n=9)
    assert found.passes == right and found.paths > 1000
    assert 1 <= min((p.law(t) > 0).sum() for t in p.laws) <= max((p.law(t) > 0).sum() for t in p.laws) == 2
    assert all(((p.law(t) > 0) == (q.law(t) > 0)).all() for t in p.laws)

def test_a_failure_has_a_distance():
    "However small it is; and a failure by an impossible text reports no distance at all"
    tiny = Fraction(1, 10**400)
    target = TableModel(2, lambda text: exact(1, 1))
    biased = TableModel(2, lambda text: np.array([Fraction(1, 2) + tiny, Fraction(1, 2) - tiny]))
    def off(p, tree, rng): return Verdict(0, rng.pick(biased.law(tree.ctx)))
    found = certify(off, target, no_draft, n=1)
    assert not found.passes and found.tv == tiny
    assert "less than 1e-300" in found.verdict and "variation 0" not in found.words
    assert "impossible under the target (rejected)" in str(g_test({0: 1, 1: 9}, {0: 1.}))
    assert "0.000" not in str(g_test({0: 1, 1: 9}, {0: 1.}))

# The partition

@proves("prop-cells")
@settings(max_examples=40)
@given(models(st.integers(2, 4)), contexts, st.integers(1, 4), st.integers(1, 3000), st.integers(1, 20),
       stops, st.sampled_from([1, 2, 5, 256]))
def test_cells_are_a_partition_with_exact_weights(pair, ctx, n, runs, due, stop, most):
    "Disjoint, complete, with the exact weights of the texts inside; each expected count is large enough"
    target = pair[0]
    ctx, stop = (tuple(x % target.V for x in tokens) for tokens in (ctx, stop))
    cells, inside = partition(target, ctx, n, runs, stop, due, most), Counter()
    law = target_law(target, ctx, n, stop)
    for y, w in law.items(): inside[cells.of(y)] += w
    assert cells.weight == dict(inside) and sum(cells.weight.values()) == 1 and len(cells.weight) <= most + 1
    assert len(cells.weight) == 1 or all(w * runs >= due for w in cells.weight.values())
    shared = {c for c in cells.weight if None in c or len(c) < n and not set(c) & set(stop)}
    assert cells.mass_in_shared_cells == pytest.approx(float(sum(cells.weight[c] for c in shared)))
    alone = Counter(map(cells.of, law))
    assert all(alone[c] == 1 and cells.whole(c) for c in set(cells.weight) - shared)

@proves("prop-cells")
def test_the_distribution_of_the_counts_is_that_of_the_cells():
    "p-values of a correct system on a real partition are uniform, as for samples from the weights"
    target, draft = (tempered(m, 1.) for m in killer())
    cells, rng = partition(target, (0,), 3, 400), numpy_generator(5)
    seen = [certify(reject, target, draft, gamma=2, runs=400, seed=s).test for s in range(10)]
    counts = rng.multinomial(400, list(cells.weight.values()), 2000)
    drawn = [g_test(dict(zip(cells.weight, map(int, c))), cells.weight, least=0) for c in counts]
    assert {t.cells for t in seen} == {len(cells.weight)} and all(t.fits for t in seen)
    for tests in (seen, drawn): assert kstest([t.p_value for t in tests], "uniform").pvalue > 1e-6
    assert abs(np.mean([t.p_value < .05 for t in drawn]) - .05) < 6*np.sqrt(.05 / 4000) + .01

def test_impossible_texts_are_no_cell():
    "A token of probability zero or out of vocabulary, a text that ends early, or runs past a stop or past n"
    cells = partition(constant(2, 1, 1, 0), (0,), 2, 400, stop=(1,))
    for y in ((0, 0), (0, 1), (1,), (2, 2)): assert cells.of(y) in cells.weight
    for y in ((3, 0), (0, 3), (0, 4), (-1, 0), (0,), (), (1, 0), (0, 0, 0)): assert cells.of(y) == (y,)

@settings(max_examples=40)
@given(laws(5), st.integers(1, 60).map(lambda k: Fraction(k, 60)), st.integers(1, 6))
def test_split(row, share, room):
    "The named tokens are the likeliest, with enough weight; the others have none or enough; the sum is 1"
    named, others = split_row(row, share, room)
    rest = [row[x] for x in range(5) if x not in named]
    assert len(named) <= room and all(row[x] >= share for x in named)
    assert sum(row[x] for x in named) + others == 1
    assert others == 0 or others >= share or not len(named)
    assert min((row[x] for x in named), default=1) >= max(rest, default=0)

# The G-test

def every_count(n, weights):  # -> probability, G
    "All outcomes of `n` counts, with their probabilities"
    for ks in product(range(n + 1), repeat=len(weights) - 1):
        if sum(ks) > n: continue
        cells = list(zip((*ks, n - sum(ks)), weights))
        log_p = lgamma(n + 1) + sum(k*log(w) - lgamma(k + 1) for k, w in cells)
        yield np.exp(log_p), 2*sum(k*log(k/(n*w)) for k, w in cells if k)

COUNTS = [(6, (.5, .5)), (12, (.7, .2, .1)), (30, (.6, .3, .1)), (9, (.4, .3, .2, .1)), (25, (.96, .03, .01))]

@proves("thm-false-alarm")
@pytest.mark.parametrize("n,weights", COUNTS)
def test_the_moment_and_the_limit(n, weights):
    "The series' coefficient is the mean of exp(tG/2); the limit is exceeded with probability alpha at most"
    outcomes = list(every_count(n, weights))
    for t in (.01, .3, .7, .9, .97):
        direct = np.log(sum(p*np.exp(t*g/2) for p, g in outcomes))
        assert direct - 1e-9 <= log_moment(n, weights, t) <= direct + 1e-6
    for alpha in (.5, .1, 1e-3, 1e-6, 1e-9):
        limit = safe_limit(n, weights, alpha)
        assert sum(p for p, g in outcomes if g >= limit) <= alpha

@proves("thm-false-alarm")
@pytest.mark.parametrize("n,w", [(3000, .5), (3000, .01), (200_000, .3), (200_000, .001)])
def test_false_alarms_of_many_runs(n, w):
    "Two cells, thousands of runs: the binomial tail beyond the limit is below alpha and above alpha/200"
    k = np.arange(n + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        yes, no = k*np.log(k/(n*w)), (n - k)*np.log((n - k)/(n*(1 - w)))
    G = 2*(np.where(k, yes, 0) + np.where(n - k, no, 0))
    for alpha in (1e-3, 1e-6, 1e-9):
        tail = binom.pmf(k[G >= safe_limit(n, (w, 1 - w), alpha)], n, w).sum()
        assert alpha/200 < tail <= alpha

def test_the_limit_is_near_the_chi_square_quantile():
    "Above the chi-square quantile, by less than the Agrawal bound would be, also for thousands of cells"
    for k, due in ((2, 1000), (16, 10), (256, 10), (5000, 10)):
        mine, quantile = safe_limit(k*due, (1/k,)*k), chi2.isf(ALPHA, k - 1)
        t = 1 - (k - 1)/mine
        assert quantile < mine < 1.25*quantile and mine < 2*(-(k - 1)*np.log(1 - t) - np.log(ALPHA))/t
    assert safe_limit(10, (1.,)) == 0 and ALPHA <= 1e-9

@proves("prop-seen")
@settings(max_examples=25)
@given(models(), st.integers(20, 2000))
def test_the_distance_on_cells_is_a_lower_bound(pair, runs):
    "The distance on the cells is at most that of the texts; the entropy at least twice its square"
    want, other = (target_law(m, (0,), 3) for m in pair)
    cells, a, b = partition(pair[0], (0,), 3, runs), Counter(), Counter()
    for y, w in want.items(): a[cells.of(y)] += w
    for y, w in other.items(): b[cells.of(y)] += w
    off = tv_outcomes(a, b)
    assert off <= tv_outcomes(want, other)
    if set(b) <= set(a): assert sum(float(w)*log(w/a[c]) for c, w in b.items()) >= 2*float(off)**2 - 1e-12

def halves(want, off):
    "A distribution at distance `off` from `want`, one half of its mass raised evenly: the least detectable"
    up, mass = set(), 0.
    for k in sorted(want, key=want.get, reverse=True):
        if mass + want[k] > .5 + 1e-12: continue
        up.add(k)
        mass += want[k]
    return {k: w*(1 + off/mass if k in up else 1 - off/(1 - mass)) for k, w in want.items()}

def nearby(want, off):
    "A distribution at distance `off` from `want`: some of its mass moved to its rarest text"
    y = min(want, key=want.get)
    w = off / (1 - want[y])
    return {k: (1 - w)*v + w*(k == y) for k, v in want.items()}

@proves("prop-seen")
@pytest.mark.parametrize("n,weights", [(500, (8, 4, 2, 1, 1)), (2000, (1,)*64), (1000, (90, 4, 2, 2, 1, 1)),
                                       (300, (1, 1))])
def test_misses_are_as_rare_as_stated(n, weights):
    "At the stated distance, in a hard direction and an easy one: 2,000 multinomial samples of each"
    want = dict(enumerate(np.array(weights) / sum(weights)))
    off, rng = detectable(n, len(want) - 1, safe_limit(n, tuple(want.values()))), numpy_generator(7)
    for law in (halves(want, min(off, .499)), nearby(want, off)):
        assert any(tv_outcomes(law, want) == pytest.approx(d) for d in (off, min(off, .499)))
        counts = rng.multinomial(n, list(law.values()), 2000)
        missed = sum(g_test(dict(enumerate(map(int, c))), want, least=0).fits for c in counts)
        assert missed <= 2000*MISS + 6*np.sqrt(2000*MISS)

def test_detectable_distances():
    "The distance falls as 1/√n and grows slowly with the cells; published sample sizes for a distance of .05"
    def by_chi_square(n, k): return detectable(n, k - 1, chi2.isf(ALPHA, k - 1))
    assert by_chi_square(4000, 27) == pytest.approx(2*by_chi_square(16_000, 27))
    for k, n in ((2, 8.5e3), (16, 1.2e4), (32, 1.4e4), (1024, 4.8e4)):
        assert by_chi_square(n, k) == pytest.approx(.05, rel=.02)
    for k, n in ((2, 8500), (1024, 48_000)):
        assert 1 < detectable(n, k - 1, safe_limit(n, (1/k,)*k)) / by_chi_square(n, k) < 1.08

def test_pooling():
    "Small cells share one, whose mass is added to the distance; one impossible text fails at once"
    want = {0: .6, 1: .38, 2: .012, 3: .008}
    assert pooled(want, 1000) == [[0], [2, 3, 1]] and pooled(want, 5000) == [[0], [1], [3, 2]]
    big = g_test({0: 3000, 1: 1900, 2: 100}, want)
    assert big.cells == 3 and big.tv == pytest.approx(detectable(5000, 2, big.limit) + .02)
    assert not g_test({0: 10**6, 1: 10**6, 2: 1}, {0: .5, 1: .5, 2: 0}).fits
    assert g_test({0: 5000, 1: 5000}, {0: .5, 1: .5, 2: 0}).fits
    assert not g_test({0: 99, (3,): 1}, {0: 1.}).fits
    assert g_test({7: 100}, {7: 1}).tv == pytest.approx(1 - MISS**.01)
    assert g_test({0: 10, 1: 10}, {0: .5, 1: .5}).tv == 1

# Evidence

def test_the_type_of_the_rows_selects_the_test():
    "Fractions give a certificate, floats give evidence; a correct system passes both, the mean tokens agree"
    pair = killer()
    exact = certify(reject, *pair, CTX, gamma=2)
    counted = certify(reject, *(tempered(m, 1.) for m in pair), CTX, gamma=2, seed=3, runs=1000)
    assert isinstance(exact, Certificate) and isinstance(counted, Evidence)
    assert exact.passes and counted.passes
    mean, error = counted.tokens
    assert abs(mean - float(exact.tokens)) < 6*error and 0 < error < .1

@pytest.mark.parametrize("name", ["sampled tree", "SuffixDecoding"])
def test_listed_systems_pass_by_counts(name):
    "On float tables, with a stop token; the report states runs, error rates and the detectable distance"
    target, draft = (tempered(m, .9) for m in killer())
    system = SYSTEMS[name](draft, gamma=2, shape=(2, 1))
    found = certify_system(system, target, CTX, 3, {2}, runs=1200, seed=11)
    assert found.passes and found.words.startswith("no difference detected in 1,200 runs: p-value")
    for stated in "false-alarm rate 1e-09", f"total variation {found.test.tv:.3f}", "power 0.999":
        assert stated in found.words
    assert found.test.tv < .2
    unlikely = replace(found, test=replace(found.test, p_value=1e-5))
    assert "more runs" in unlikely.words and "more runs" not in found.words

WRONG = {   # drafter, verifier, runs
    "recovered token from p": (lambda q: Chain(q, 2), Rule(after=from_r), 2500),
    "everything accepted": (lambda q: Chain(q, 2), Rule(lambda t: True), 2500),
    "match, then a fresh draw": (lambda q: Chain(q, 2), Rule(is_sampled, from_r), 2500),
    "siblings verified by p alone": (lambda q: Branching(q, (2, 1), iid), siblings_by_p, 2500),
    "bonus from the previous row": (lambda q: Chain(q, 1), Rule(bonus=parent_row), 4000),
}

@pytest.mark.parametrize("name", WRONG)
def test_incorrect_systems_are_rejected_by_counts(name):
    "Each has, on the cells of the report, more than the detectable distance; and it is rejected"
    target, draft = (tempered(m, .8) for m in killer())
    drafts, verify, runs = WRONG[name]
    drafter = drafts(draft)
    found, cells = certify(verify, target, drafter, CTX, runs=runs), partition(target, CTX, 3, runs)
    law = loop_law(target, drafter, verify, CTX, 3).of(cells.of)
    assert tv_outcomes(law, cells.weight) > found.test.tv and not found.passes, found
    cell, expected, count = found.worst
    assert expected == pytest.approx(runs*cells.weight[cell]) and abs(count - expected) > 5*np.sqrt(expected)
    for words in (found.words, str(found)): assert words.startswith("OUTPUT DISTRIBUTION DIFFERS")

def test_two_large_vocabularies():
    "512 tokens, texts of three: 134 million texts on a few dozen cells; correct passes, incorrect fails"
    rng = np.random.default_rng(3)
    base, turn = 3*rng.standard_normal(512), rng.standard_normal((2, 512))
    def model(k):
        def f(text):
            z = (np.roll(base, 7*text[-1] + 3*len(text)) + .8*turn[k])/.5
            w = np.exp(z - z.max())
            return w / w.sum()
        return TableModel(512, f)
    rules = reject, Rule(row=lambda p, tree, i: p[0])
    right, wrong = (certify(rule, model(0), model(1), gamma=2, runs=1500) for rule in rules)
    assert right.passes and right.test.cells > 20 and 0 < right.mass_in_shared_cells < 1 and not wrong.passes

def test_one_text():
    "A greedy target has one text: every run must return it, and another is impossible"
    target, draft = (TableModel(3, lambda text, m=cold(m): m.law(text).astype(float)) for m in killer())
    right = certify(reject, target, draft, gamma=2, runs=50)
    assert right.passes and 0 < right.test.tv < .2
    assert (right.test.cells, right.mass_in_shared_cells) == (1, 0)
    with np.errstate(divide="ignore"):
        wrong = certify(lambda p, tree, rng: Verdict(0, rng.pick(np.ones(3)/3)), target, no_draft, runs=50)
    assert not wrong.passes and "impossible under the target" in wrong.words

def test_reproducible_and_independent(capsys):
    "The same seed, the same counts; another seed, others; a progress bar on request alone"
    target = tempered(killer()[0], 1.)
    a, b, c = (certify_system(autoregressive, target, (0,), runs=300, seed=s) for s in (1, 1, 2))
    assert a == b != c and not capsys.readouterr().err
    certify_system(autoregressive, target, (0,), runs=200, progress=True)
    assert "200/200" in capsys.readouterr().err

def test_without_scipy(monkeypatch):
    "Exact certificates need numpy alone; counts name the missing package, before anything is run"
    target, draft = killer()
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    for name in [m for m in sys.modules if m.split(".")[0] == "scipy"]: monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    safe_limit.cache_clear()
    detectable.cache_clear()
    assert certify(reject, target, draft, gamma=2).passes
    with pytest.raises(ImportError, match=r"^scipy: .*specref\[stats\]"):
        certify(reject, tempered(target, 1.), lambda ctx, rng: 1/0)

def test_the_worst_cell():
    "The cell, its observed and expected count; `of` names its numbers, but never those of an impossible text"
    target = tempered(random_table(3, 1, zeros=False), 1.)
    cells = partition(target, (0,), 2, 200)
    first = next(iter(cells.weight))
    where = evidence(cells, {first: 200}).where
    assert where().endswith(f": observed 200 of 200, expected {200*float(cells.weight[first]):.1f}")
    assert where("classes ").replace("classes (", "(") == where() != where("classes ")
    impossible = evidence(cells, {first: 100, ((9, 9),): 1}).where
    text = "the text (9, 9), impossible under the target: observed 1 of 101, expected 0.0"
    assert impossible("classes ") == impossible() == text

# What a notebook shows

def test_results_are_tables():
    "Verdict and lines of a certificate, of evidence, of a report and of a judgement; escaped"
    target, draft = (random_table(3, s, zeros=False) for s in (1, 2))
    sampled = certify(reject, *(tempered(m, 1.) for m in (target, draft)), runs=500)
    for found in certify(reject, target, draft), sampled:
        html = found._repr_html_()
        title, *lines = found.words.split("\n")
        assert f"<b>✓ {title}</b>" in html and html.count("<tr>") == len(lines)
    lines = Finding("form", True, "a < b"), Finding("noise", False, "c")
    report = SamplerReport("a <title>", lines)
    shown = "<td>noise</td><td>FAILED</td><td>c</td>", "a &lt; b", "<b>a &lt;title&gt;</b>"
    assert all(part in report._repr_html_() for part in shown) and "special" not in report._repr_html_()
    passed = replace(report, lines=report.lines[:1], note="not called with special tokens")
    assert "<td>not called with special tokens</td>" in passed._repr_html_()
    judged = judge_rule("def rule(p, q, draft, u): return [choose(p[0], u)]", cases=JUDGE_CASES[:2], known=())
    assert "<td>four tokens</td><td>1</td><td>0</td>" in judged._repr_html_()
    assert "<b>✓ rule  EXACT: equal to the target&#x27;s in all 2 cases" in judged._repr_html_()
