"Chapter 17: exact certificates, partitions, the G-test with its proved false-alarm rate, evidence on real laws"
import builtins
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import factorial, lgamma, log

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import binom, chi2, kstest

from helpers import ALPHA, MISS, CANON, cold, constant, detectable, g_test, killer, laws, models, pooled, proves, random_table, refuses, seeds, tempered
from specref.certify.certificates import Certificate, Evidence, certificate, certify_system, evidence, exact_certificate, log_moment, partition, safe_limit, split_row
from specref.core.rng import tv_outcomes, law_of, numpy_generator
from specref.core.law import exact, residual, tv
from specref.core.loop import System, Verdict, loop_law, match, no_draft, autoregressive, rounds
from specref.verify.reject import Chain, accepted_at_least, reject
from specref.app.systems import SYSTEMS
from specref.core.target import TableModel, target_law
from specref.certify.mutants import MUTANTS, SLOW, reject_from, redraw_verifier
from specref.core.tree import iid
from test_statistical import CTX, WRONG, nearby

contexts = st.sampled_from([(0,), (0, 1, 0), (2, 0, 1, 2, 0)])
stops = st.sets(st.integers(0, 2), max_size=2).map(tuple)


def system(target, drafter, verify): return System("under test", drafter, verify)


# The exact certificate

@proves("prop-certificate")
@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=8)
@given(models(), contexts, stops)
def test_a_certificate_covers_what_it_says(name, pair, ctx, stop):
    "Equality for three tokens; then, as the proposition says, for fewer and with any stop tokens"
    target, draft = pair
    s = SYSTEMS[name](draft, gamma=2, shape=(2,), exact=True)
    found = certify_system(s, target, ctx)
    assert found.passes and found.exact and found.tv == 0 and found.texts == len(target_law(target, ctx, 3)) and found.worst[1] == found.worst[2]
    for m in (1, 2, 3): assert loop_law(target, s.drafter, s.verify, ctx, m, stop) == target_law(target, ctx, m, stop)


@proves("prop-certificate")
def test_a_certificate_covers_nothing_else():
    "Wrong systems that pass for fewer tokens, after another context, and on another table"
    wide = random_table(3, 1, zeros=False), random_table(3, 2, zeros=False)
    late = system(wide[0], Chain(wide[1], 1), reject_from(last=lambda p, tree, i: p[tree.parent[i]]))
    assert certify_system(late, wide[0], (0,), 1).passes and not certify_system(late, wide[0], (0,), 2).passes
    shy = system(wide[0], no_draft, lambda p, tree, rng: Verdict(0, 0) if tree.ctx[0] else match(p, tree, rng))
    assert certify_system(shy, wide[0], (0,), 3).passes and not certify_system(shy, wide[0], (1,), 3).passes
    rows, two = reject_from(row=lambda p, tree, i: p[0]), (constant(3, 2, 1), constant(1, 2, 3))
    assert certify_system(system(two[0], Chain(two[1], 2), rows), two[0], (0,)).passes and not certify_system(system(wide[0], Chain(wide[1], 2), rows), wide[0], (0,)).passes


PLAIN = [m for m in MUTANTS if m.wrong.loop is None]


@pytest.mark.parametrize("mutant", PLAIN, ids=lambda m: m.name)
def test_mutants_are_rejected_exactly(mutant):
    "Each known mistake fails by its published distance, at a text that is really off, and the right thing passes"
    w, r = mutant.wrong, mutant.right
    found = certify_system(system(w.target, w.drafter, w.verify), w.target, w.ctx, w.n, w.stop)
    text, got, want = found.worst
    assert not found.passes and found.tv == tv_outcomes(w.law(), w.want()) and mutant.tv in (None, found.tv)
    assert got == w.law().get(text, 0) != want == w.want().get(text, 0) and all(abs(w.law().get(y, 0) - v) <= abs(got - want) for y, v in w.want().items())
    assert found.words.startswith("the law is wrong: at TV") and str(text) in found.words and str(found).startswith("LAW IS WRONG")
    assert certify_system(system(r.target, r.drafter, r.verify), r.target, r.ctx, r.n, r.stop).passes


def test_enough_mutants(): assert len(PLAIN) >= 35


@pytest.mark.parametrize("mutant", SLOW, ids=lambda m: m.name)
def test_lost_tokens_show(mutant):
    "A system that keeps the law and loses tokens passes, and its E[tokens] falls short of the oracle that the right one meets"
    w, r = ((certify_system(system(s.target, s.drafter, s.verify), s.target, s.ctx, s.n) for s in (mutant.wrong, mutant.right)))
    assert w.passes and r.passes and r.tokens == mutant.right.tokens() > w.tokens
    if mutant.right.verify is reject and getattr(mutant.right.drafter, "gamma", 0) == 2:   # a chain of two: also the oracle of chapter 05
        assert r.tokens == 1 + sum(accepted_at_least(mutant.right.target, mutant.right.drafter.model, (0,), i) for i in (1, 2))


def test_words_of_a_certificate():
    "What was found, in words: fractions while they are short"
    p, q = CANON
    right, wrong = (certify_system(system(None, Chain(constant(1, 2, 3, 4), 1), v), constant(4, 3, 2, 1), (0,), 1) for v in (reject, reject_from(left=lambda r, q, x: r)))
    assert right.words == f"the law is the target's: equality of 4 probabilities as fractions ({right.paths} paths)\ntokens a target call: 8/5 = 1.6"
    assert "at TV 7/50 = 0.14 from the target's" in wrong.words and isinstance(right, Certificate)
    assert certificate(lambda draft, **kw: autoregressive).passes and certificate(lambda draft, **kw: autoregressive).words.endswith("\ntokens a target call: 1")


# The partition

def texts(target, ctx, n, stop): return target_law(target, ctx, n, stop)


@proves("prop-cells")
@settings(max_examples=60)
@given(models(st.integers(2, 4)), contexts, st.integers(1, 4), st.integers(1, 3000), st.integers(1, 20), stops, st.sampled_from([1, 2, 5, 256]))
def test_cells_are_a_partition_with_exact_weights(pair, ctx, n, runs, due, stop, most):
    "Disjoint, complete, summing to one; each weight is the target's probability of the texts inside; each is due often enough"
    target = pair[0]
    ctx = tuple(x % target.V for x in ctx)
    cells, inside = partition(target, ctx, n, runs, stop, due, most), Counter()
    for y, w in texts(target, ctx, n, stop).items(): inside[cells.of(y)] += w
    assert cells.weight == dict(inside) and sum(cells.weight.values()) == 1
    assert len(cells.weight) == 1 or all(w * runs >= due for w in cells.weight.values())
    assert len(cells.weight) <= most + 1
    alone = Counter(cells.of(y) for y in texts(target, ctx, n, stop))
    assert cells.hidden == pytest.approx(float(sum(w for c, w in cells.weight.items() if None in c or len(c) < n and not set(c) & set(stop))))
    assert all(None not in c for c in cells.weight if cells.whole(c)) and all(alone[c] == 1 for c in cells.weight if None not in c and cells.whole(c))


@proves("prop-cells")
def test_the_law_of_the_counts_is_that_of_the_cells():
    "p-values of a right system on a real partition are uniform, as for draws from the weights themselves"
    target, draft = (tempered(m, 1.) for m in killer())
    cells = partition(target, (0,), 3, 400)
    seen = [certify_system(system(target, Chain(draft, 2), reject), target, (0,), runs=400, seed=s).test for s in range(60)]
    drawn = [g_test(dict(zip(cells.weight, map(int, c))), cells.weight, least=0) for c in numpy_generator(5).multinomial(400, list(cells.weight.values()), 4000)]
    assert {t.cells for t in seen} == {len(cells.weight)} and all(t.fits for t in seen)
    for ps in ([t.p_value for t in seen], [t.p_value for t in drawn][:60]): assert kstest(ps, "uniform").pvalue > 1e-6
    assert abs(np.mean([t.p_value < .05 for t in drawn]) - .05) < 6*np.sqrt(.05 / 4000) + .01


def test_the_partition_by_hand():
    "The worked example of the page"
    cells = partition(constant(4, 3, 2, 1), (0,), 2, 100)
    due = {c: 100*w for c, w in cells.weight.items()}
    assert due == {(0, 0): 16, (0, 1): 12, (0, None): 12, (1, 0): 12, (1, None): 18, (2,): 20, (3,): 10}


def test_impossible_texts_are_no_cell():
    "A token of probability zero, an alien one, a text that ends early, one that runs past a stop or past n"
    cells = partition(constant(2, 1, 1, 0), (0,), 2, 400, stop=(1,))
    for y in ((0, 0), (0, 1), (1,), (2, 2)): assert cells.of(y) in cells.weight
    for y in ((3, 0), (0, 3), (0, 4), (-1, 0), (0,), (), (1, 0), (0, 0, 0)): assert cells.of(y) == (y,)


@settings(max_examples=50)
@given(laws(5), st.integers(1, 60).map(lambda k: Fraction(k, 60)), st.integers(1, 6))
def test_split(row, share, room):
    "The named are the likeliest and heavy enough; the others weigh nothing or enough; nothing is lost"
    named_, others = split_row(row, share, room)
    assert len(named_) <= room and all(row[x] >= share for x in named_) and (others == 0 or others >= share or not len(named_))
    assert sum(row[x] for x in named_) + others == 1 and min((row[x] for x in named_), default=1) >= max((row[x] for x in range(5) if x not in named_), default=0)


def test_cells_do_not_depend_on_the_system():
    "Only the target is asked, at the prefixes that are split, and twice the same"
    asked = []
    target = TableModel(3, lambda text: asked.append(text) or exact(3, 2, 1))
    a = partition(target, (0,), 2, 200)
    assert set(asked) == {(0, *at) for at in a.rows} and a.weight == partition(target, (0,), 2, 200).weight


# The G-test

def every_count(n, weights):  # -> probability, G
    "All outcomes of `n` counts, with their probabilities"
    for ks in product(range(n + 1), repeat=len(weights) - 1):
        if sum(ks) > n: continue
        ks = (*ks, n - sum(ks))
        log_p = lgamma(n + 1) + sum(k*log(w) - lgamma(k + 1) for k, w in zip(ks, weights))
        yield np.exp(log_p), 2*sum(k*log(k/(n*w)) for k, w in zip(ks, weights) if k)


COUNTS = [(6, (.5, .5)), (12, (.7, .2, .1)), (30, (.6, .3, .1)), (9, (.4, .3, .2, .1)), (60, (.9, .1)), (25, (.96, .03, .01))]


@proves("thm-false-alarm")
@pytest.mark.parametrize("n,weights", COUNTS)
def test_the_moment_is_the_moment(n, weights):
    "The coefficient of the product of series is the mean of exp(tG/2) over all counts; folding may only add"
    for t in (.01, .3, .7, .9, .97):
        direct = np.log(sum(p*np.exp(t*g/2) for p, g in every_count(n, weights)))
        assert direct - 1e-9 <= log_moment(n, weights, t) <= direct + 1e-6


@proves("thm-false-alarm")
@pytest.mark.parametrize("n,weights", COUNTS)
@pytest.mark.parametrize("alpha", [.5, .1, 1e-3, 1e-6, 1e-9])
def test_false_alarms_are_rarer_than_stated(n, weights, alpha):
    "The probability of exceeding the limit, summed over all counts: at most alpha, also where every cell is nearly empty"
    limit = safe_limit(n, weights, alpha)
    assert sum(p for p, g in every_count(n, weights) if g >= limit) <= alpha


@proves("thm-false-alarm")
@pytest.mark.parametrize("n,w", [(3000, .5), (3000, .01), (200_000, .3), (200_000, .001)])
def test_false_alarms_of_many_runs(n, w):
    "Two cells, thousands of runs: the tail of the binomial law beyond the limit is below alpha, and above alpha/200: the limit is not idle"
    k = np.arange(n + 1)
    with np.errstate(divide="ignore", invalid="ignore"): G = 2*(np.where(k, k*np.log(k/(n*w)), 0) + np.where(n - k, (n - k)*np.log((n - k)/(n*(1 - w))), 0))
    for alpha in (1e-3, 1e-6, 1e-9):
        tail = binom.pmf(k[G >= safe_limit(n, (w, 1 - w), alpha)], n, w).sum()
        assert alpha/200 < tail <= alpha


def test_the_limit_is_near_the_textbook():
    "The safe limit is above the chi-square quantile, by less than the Agrawal bound would be, also for thousands of cells"
    for k, due in ((2, 1000), (16, 10), (16, 1000), (256, 10), (5000, 10)):
        mine, book = safe_limit(k*due, (1/k,)*k), chi2.isf(ALPHA, k - 1)
        t = 1 - (k - 1)/mine
        assert book < mine < 1.25*book and mine < 2*(-(k - 1)*np.log(1 - t) - np.log(ALPHA))/t
    assert safe_limit(10, (1.,)) == 0 and ALPHA <= 1e-9
    refuses("alpha", safe_limit, 10, (.5, .5), 0.)


@proves("prop-seen")
@settings(max_examples=60)
@given(models(), st.integers(20, 2000))
def test_cells_never_exaggerate(pair, runs):
    "The distance on the cells is at most that of the texts; the relative entropy is at least twice its square"
    want, other = (target_law(m, (0,), 3) for m in pair)
    cells = partition(pair[0], (0,), 3, runs)
    a, b = Counter(), Counter()
    for y, w in want.items(): a[cells.of(y)] += w
    for y, w in other.items(): b[cells.of(y)] += w
    off = tv_outcomes(a, b)
    assert off <= tv_outcomes(want, other)
    if set(b) <= set(a): assert sum(float(w)*log(w/a[c]) for c, w in b.items()) >= 2*float(off)**2 - 1e-12


def halves(want, off):
    "A law at distance `off` from `want` that raises one half of its mass evenly and lowers the other: the hardest to see"
    up, mass = set(), 0.
    for k in sorted(want, key=want.get, reverse=True):
        if mass + want[k] <= .5 + 1e-12: up.add(k); mass += want[k]
    return {k: w*(1 + off/mass if k in up else 1 - off/(1 - mass)) for k, w in want.items()}


@proves("prop-seen")
@pytest.mark.parametrize("n,weights", [(500, (8, 4, 2, 1, 1)), (200, (6, 5, 4, 3, 2, 2, 1, 1)), (2000, (1,)*64), (1000, (90, 4, 2, 2, 1, 1)), (300, (1, 1))])
def test_misses_are_as_rare_as_stated(n, weights):
    "At the distance stated, in a hard direction and in an easy one, misses are at most MISS: 4,000 multinomial samples of each"
    want = dict(enumerate(np.array(weights) / sum(weights)))
    limit = safe_limit(n, tuple(want.values()))
    off, rng = detectable(n, len(want) - 1, limit), numpy_generator(7)
    for law in (halves(want, min(off, .499)), nearby(want, off)):
        assert tv_outcomes(law, want) == pytest.approx(min(off, .499)) or tv_outcomes(law, want) == pytest.approx(off)
        missed = sum(g_test(dict(enumerate(map(int, c))), want, least=0).fits for c in rng.multinomial(n, list(law.values()), 4000))
        assert missed <= 4000*MISS + 6*np.sqrt(4000*MISS)


def test_p_values():
    "Under the law itself the textbook's p-values are what they say (2,000 multinomial samples)"
    want = dict(enumerate(np.array([8, 4, 2, 1, 1]) / 16))
    p = np.array([g_test(dict(enumerate(map(int, c))), want, least=0).p_value for c in numpy_generator(7).multinomial(500, list(want.values()), 2000)])
    for level in (.01, .05, .5): assert abs((p < level).mean() - level) < 6*np.sqrt(level / 2000)


def test_what_it_sees():
    "The distance seen falls as 1/√n and grows slowly with the cells; with the textbook's limit, the published sample sizes for a distance of .05"
    book = lambda n, k: detectable(n, k - 1, chi2.isf(ALPHA, k - 1))
    assert book(4000, 27) == pytest.approx(2*book(16_000, 27)) and book(4000, 27) < book(4000, 1024) < 2.1*book(4000, 27)
    for k, n in ((2, 8.5e3), (16, 1.2e4), (32, 1.4e4), (1024, 4.8e4)): assert book(n, k) == pytest.approx(.05, rel=.02)
    for k, n in ((2, 8500), (16, 12_000), (1024, 48_000)): assert 1 < detectable(n, k - 1, safe_limit(n, (1/k,)*k)) / book(n, k) < 1.08


def test_pooling():
    "Every cell is due at least 50 counts, small ones share one, and what a shared cell could hide is added to the distance"
    want = {0: .6, 1: .38, 2: .012, 3: .008}
    assert pooled(want, 1000) == [[0], [2, 3, 1]] and pooled(want, 5000) == [[0], [1], [3, 2]] and pooled(want, 100_000) == [[0], [1], [2], [3]]
    big = g_test({0: 3000, 1: 1900, 2: 100}, want)
    assert big.cells == 3 and big.tv == pytest.approx(detectable(5000, 2, big.limit) + .02) and big.limit == pytest.approx(safe_limit(5000, (.6, .38, .02)))


def test_the_impossible_is_not_pooled():
    "One count of a text of probability zero fails at once, whatever the rest; a law of one outcome sees any other"
    assert not g_test({0: 10**6, 1: 10**6, 2: 1}, {0: .5, 1: .5, 2: 0}).fits and not g_test({0: 99, (3,): 1}, {0: 1.}).fits
    assert g_test({0: 5000, 1: 5000}, {0: .5, 1: .5, 2: 0}).fits and g_test({7: 100}, {7: 1}).fits
    assert g_test({7: 100}, {7: 1}).tv == pytest.approx(1 - MISS**.01) and g_test({0: 10, 1: 10}, {0: .5, 1: .5}).tv == 1
    refuses("counts", g_test, {}, {0: 1.})


# Evidence

def test_the_laws_decide():
    "Fractions give a certificate, floats give evidence; a right system passes both, and the mean tokens agree"
    target, draft = killer()
    sure, seen = certify_system(system(0, Chain(draft, 2), reject), target, CTX), certify_system(system(0, Chain(tempered(draft, 1.), 2), reject), tempered(target, 1.), CTX, seed=3)
    assert isinstance(sure, Certificate) and isinstance(seen, Evidence) and sure.passes and seen.passes
    mean, error = seen.tokens
    assert abs(mean - float(sure.tokens)) < 6*error and 0 < error < .1
    refuses("system", certify_system, system(0, Chain(tempered(draft, 1.), 2), reject), target, CTX)


@pytest.mark.parametrize("name", SYSTEMS)
def test_listed_systems_pass_by_counts(name):
    "Every listed system on float tables, with a stop token; the report says what would have been seen"
    target, draft = (tempered(m, .9) for m in killer())
    found = certify_system(SYSTEMS[name](draft, gamma=2, shape=(2, 1)), target, CTX, 3, {2}, runs=1500, seed=11)
    assert found.passes and found.words.startswith("no difference seen\n1,500 runs") and f"TV >= {found.test.tv:.3f}" in found.words and found.test.tv < .2
    assert str(found).startswith("no difference seen") and "1e-09" in found.words


@pytest.mark.parametrize("name", WRONG)
def test_wrong_systems_are_caught_by_counts(name):
    "Each is further off, on the very cells of the report, than the distance that the report would have seen; and it is found out"
    target, draft = (tempered(m, .8) for m in killer())
    drafter, verify = WRONG[name][0](draft), WRONG[name][1]
    found, cells, off = certify_system(system(0, drafter, verify), target, CTX, runs=6000), partition(target, CTX, 3, 6000), Counter()
    for y, w in loop_law(target, drafter, verify, CTX, 3).items(): off[cells.of(y)] += w
    assert tv_outcomes(off, cells.weight) > found.test.tv and not found.passes, found
    cell, due, seen = found.worst
    assert found.words.startswith("the law is wrong: ") and due == pytest.approx(6000*cells.weight[cell]) and abs(seen - due) > 5*np.sqrt(due)
    assert str(found).startswith("LAW IS WRONG")


def test_two_large_vocabularies():
    "512 tokens, three of them: 134 million texts on a few dozen cells; the right judge passes, a wrong one does not"
    rng = np.random.default_rng(3)
    base, turn = 3*rng.standard_normal(512), rng.standard_normal((2, 512))
    def model(k, heat):
        def f(text):
            z = np.roll(base, 7*text[-1] + 3*len(text)) + .8*turn[k]
            w = np.exp((z - z.max())/heat)
            return w / w.sum()
        return TableModel(512, f)
    target, draft = model(0, .5), model(1, .5)
    right = certify_system(system(0, Chain(draft, 2), reject), target, (0,), runs=1500)
    wrong = certify_system(system(0, Chain(draft, 2), reject_from(row=lambda p, tree, i: p[0])), target, (0,), runs=1500)
    assert right.passes and right.test.cells > 20 and 0 < right.hidden < 1 and not wrong.passes


def test_one_text():
    "A greedy target has one text: every run must say it, and one that does not is impossible"
    target, draft = (cold(m) for m in killer())
    floats = lambda m: TableModel(3, lambda text: m.law(text).astype(float))
    right = certify_system(system(0, Chain(floats(draft), 2), reject), floats(target), (0,), runs=50)
    assert right.passes and right.test.cells == 1 and right.hidden == 0 and 0 < right.test.tv < .2 and right.words
    with np.errstate(divide="ignore"): wrong = certify_system(system(0, no_draft, lambda p, tree, rng: Verdict(0, rng.pick(np.ones(3)/3))), floats(target), (0,), runs=50)
    assert not wrong.passes and "impossible for the target" in wrong.words


def test_small_p_values_ask_for_more():
    "A pass with a small p-value says that more runs are called for"
    found = certify_system(system(0, no_draft, match), tempered(killer()[0], 1.), (0,), runs=400)
    assert "more runs" not in found.words and "more runs" in replace(found, test=replace(found.test, p_value=1e-5)).words


def test_reproducible_and_independent():
    "The same seed, the same counts; another seed, others; runs are streams of their own, so more runs begin with the same ones"
    target = tempered(killer()[0], 1.)
    a, b, c = (certify_system(autoregressive, target, (0,), runs=300, seed=s) for s in (1, 1, 2))
    assert a == b != c


def test_progress(capsys):
    "A bar of runs, on request"
    target = tempered(killer()[0], 1.)
    certify_system(autoregressive, target, (0,), runs=200)
    assert not capsys.readouterr().err
    certify_system(autoregressive, target, (0,), runs=200, progress=True)
    assert "200/200" in capsys.readouterr().err


def test_without_scipy(monkeypatch):
    "Exact certificates need numpy alone; counts say what is missing, before anything is run"
    target, draft = killer()
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    for name in [m for m in sys.modules if m == "scipy" or m.startswith("scipy.")]: monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    safe_limit.cache_clear(); detectable.cache_clear()
    assert certify_system(system(0, Chain(draft, 2), reject), target, (0,)).passes
    with pytest.raises(ImportError, match=r"^scipy: .*specref\[stats\]"): certify_system(system(0, lambda ctx, rng: 1/0, reject), tempered(target, 1.), (0,))


# Doors

def test_doors():
    "Bad input is answered by name, before anything is run"
    target, draft = (tempered(m, 1.) for m in killer())
    s = system(0, Chain(draft, 2), reject)
    for given, name in (((reject, target, (0,)), "system"), ((s, None, (0,)), "target"), ((s, reject, (0,)), "target"), ((s, target, ()), "ctx"), ((s, target, (3,)), "ctx"), ((s, target, (0,), 0), "n"), ((s, target, (0,), 2.5), "n"),
                        ((s, target, (0,), 3, 7), "stop"), ((s, target, (0,), 3, (), 0), "runs"), ((s, target, (0,), 3, (), 15), "runs"), ((s, target, (0,), 3, (), 100, -1), "seed"),
                        ((s, target, (0,), 3, (), 100, 0, 0), "due"), ((s, target, (0,), 3, (), 500, 0, 10, 0.), "alpha"), ((s, target, (0,), 3, (), 500, 0, 10, 1.), "alpha"),
                        ((system(0, Chain(constant(1, 1), 2), reject), target, (0,)), "drafter")): refuses(name, certify_system, *given)
    refuses("stop", certify_system, s, killer()[0], (0,), 3, 7)
    for m in (killer()[0], target):
        for x in (2, 0., 1, -1, "x", None, float("nan")): refuses("alpha", certify_system, s, m, (0,), alpha=x)
        refuses("runs", certify_system, s, m, (0,), runs=0); refuses("due", certify_system, s, m, (0,), due=0)
    refuses("build", certificate, None)
    refuses("counts", g_test, {0: -1, 1: 101}, {0: .5, 1: .5}); refuses("counts", g_test, {}, {0: .5, 1: .5})
    for want in ({0: .5, 1: .6}, {0: .5}, {0: 1.5, 1: -.5}, {0: float("nan")}, {}): refuses("want", g_test, {0: 50, 1: 50}, want)
    refuses("alpha", g_test, {0: 50, 1: 50}, {0: .5, 1: .5}, 2)
    refuses("most", partition, killer()[0], (0,), 2, 100, most=0)
    refuses("system", exact_certificate, system(0, Chain(TableModel(3, lambda t: np.ones(3)/3), 1), reject), killer()[0], (0,), 2, ())


def test_where_it_was_furthest_off():
    "The cell, what came and what was due; `of` names what its numbers are, but never those of an impossible text"
    target = tempered(random_table(3, 1, zeros=False), 1.)
    cells = partition(target, (0,), 2, 200)
    first = next(iter(cells.weight))
    found = evidence(cells, {first: 200})
    due = f"came 200 times and was due {200*float(cells.weight[first]):.1f} times"
    assert found.where().endswith(due) and found.words.startswith(f"the law is wrong: {found.where()}")
    assert found.where("classes ") == found.where().replace("begins with (", "begins with classes (").replace("token after (", "token after classes (") != found.where()
    alien = evidence(cells, {first: 100, ((9, 9),): 1})
    assert alien.where("classes ") == alien.where() == "the text (9, 9), impossible for the target, came 1 times and was due 0.0 times"
