"Chapter 06: what a round costs, what it buys, the numbers called acceptance rate, and why a run is slow"
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from operator import mul

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

import specref.core.cost
from helpers import CANON, constant, killer, models, pairs, proves, refuses, seeds
from specref.core.rng import Seeded, law_of, mean_of
from specref.core.cost import Costs, Rates, best_gamma, explain, measure, arithmetic_factor, reprice, speedup
from specref.core.law import exact, overlap
from specref.draft.lookup import PromptLookup
from specref.core.loop import Ledger, generate, match, no_draft, rounds
from specref.verify.reject import Chain, accepted_at_least, capped_geometric, reject
from specref.verify.siblings import Branching
from specref.core.target import Meter, NgramModel, Rows, TableModel, random_table
from specref.core.tree import Tree

F = Fraction
many = settings(max_examples=80)
shares = st.fractions(0, 1, max_denominator=12)
prices = st.fractions(0, 3, max_denominator=12)
lengths = st.integers(1, 8)


def turned(law): return TableModel(len(law), lambda text: np.roll(law, sum(text)))
def tokens(p, q, gamma): return mean_of(lambda rng: len(next(rounds(p, Chain(q, gamma), reject, (0,), rng)).tokens))


# The theorems of the paper

@proves("thm-walltime")
@settings(max_examples=60)
@given(pairs(st.integers(2, 4)), st.integers(1, 3), prices)
def test_walltime(pq, gamma, c):
    "Tokens counted along every road, over what a round takes, on laws that turn with the text and keep their overlap"
    assert tokens(turned(pq[0]), turned(pq[1]), gamma) / (1 + gamma*c) == speedup(overlap(*pq), gamma, c)


@proves("thm-walltime", "cor-short-texts")
@many
@given(shares, lengths, prices, st.integers(1, 40))
def test_long_texts_reach_the_walltime(α, gamma, c, N):
    "The mean number of rounds for N tokens, by recursion, lies between N/τ and (N + γ)/τ; so the speed-up tends to the theorem's"
    size = {k + 1: α**k * (1 - α) for k in range(gamma)} | {gamma + 1: α**gamma}
    needed = [F(0)]
    for n in range(1, N + 1): needed.append(1 + sum(w * needed[max(n - k, 0)] for k, w in size.items()))
    τ, S = capped_geometric(α, gamma), speedup(α, gamma, c)
    assert N / τ <= needed[N] <= (N + gamma) / τ
    assert S * N / (N + gamma) <= N / (needed[N] * (1 + gamma*c)) <= S


@proves("cor-short-texts")
@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_rounds_of_the_loop(N):
    "The rounds that `generate` takes, along every road, are those of the recursion; what they emit too much is what Wald's identity says"
    p, q, gamma, α = constant(1, 2), constant(2, 1), 2, F(2, 3)
    size = {1: 1 - α, 2: α * (1 - α), 3: α**2}
    needed, surplus = [F(0)], [F(0)]
    for n in range(1, N + 1):
        needed.append(1 + sum(w * needed[max(n - k, 0)] for k, w in size.items()))
        surplus.append(sum(w * (surplus[n - k] if k < n else k - n) for k, w in size.items()))
    counted = mean_of(lambda rng: len(generate(p, Chain(q, gamma), reject, (0,), N, rng).ledger.rounds))
    assert counted == needed[N] and needed[N] * capped_geometric(α, gamma) == N + surplus[N]


@proves("cor-some-gamma")
@many
@given(shares, prices)
def test_some_gamma(α, c):
    "Faster for some γ exactly if α > c; then for γ = 1, and for every γ below one that gains; the best gains at least (1 + α)/(1 + c)"
    gains, best = [speedup(α, g, c) > 1 for g in range(1, 13)], best_gamma(α, c, 12)
    assert any(gains) == gains[0] == (α > c) == bool(best) and gains == sorted(gains, reverse=True)
    assert speedup(α, 1, c) == (1 + α) / (1 + c) and (not best or speedup(α, best, c) >= speedup(α, 1, c))


@proves("thm-operations")
@settings(max_examples=60)
@given(pairs(st.integers(2, 3)), st.integers(1, 3), prices)
def test_operations(pq, gamma, c_hat):
    "The nodes that both models are given in a round, priced, over the tokens counted along every road; never below one"
    def work(rng):
        target, draft = Counting(turned(pq[0])), Counting(turned(pq[1]))
        n = len(next(rounds(target, Chain(draft, gamma), reject, (0,), rng)).tokens)
        return target.new + c_hat * draft.new, n
    seen = law_of(work)
    spent, got = (sum(w * k[i] for k, w in seen.items()) for i in (0, 1))
    assert spent / got == arithmetic_factor(overlap(*pq), gamma, c_hat) >= 1


class Counting:
    "A model that keeps what it has read: `new` counts the tokens fed to it beyond its last tree"
    def __init__(self, model): self.model, self.V, self.meter, self.new, self.held = model, model.V, model.meter, 0, None
    def __call__(self, tree):
        texts = {tree.ctx[:n] for n in range(1, len(tree.ctx))} | {tree.text(i) for i in range(len(tree))}
        self.new += len(texts - (self.held or set()))
        self.held = texts
        return self.model(tree)


# The cost curve

curves = st.lists(st.fractions(F(1, 4), 3, max_denominator=12), min_size=1, max_size=4).flatmap(
    lambda ys: st.lists(st.integers(2, 12), min_size=len(ys) - 1, max_size=len(ys) - 1, unique=True).map(lambda ms: dict(zip([1, *ms], ys))))
machines = st.builds(Costs, curves, prices, prices)


def book(accepted, gamma):
    "The ledger of chains of `gamma` drafts of which so many were accepted"
    return Ledger([(gamma, gamma, a, a + 1, (0, 0, 0)) for a in accepted])


runs = lengths.flatmap(lambda g: st.lists(st.integers(0, g), min_size=2, max_size=12).map(lambda a: book(a, g)))


@proves("thm-cost-curve")
@many
@given(runs, machines)
def test_cost_curve(ledger, costs):
    "Tokens at the price of a plain one over the seconds of all rounds, each priced from the table; no condition on what was accepted"
    g, τ = ledger.column(0)[0], F(ledger.num_emitted_tokens, len(ledger.rounds))
    took = sum(sum(s) for s in reprice(ledger, costs).column(4))
    assert ledger.num_emitted_tokens * costs.plain() / took == costs.speedup(τ, g)
    assert costs.round(g) / costs.plain() == g * costs.c + costs.curve(g + 1) + costs.rest / costs.plain()


@many
@given(shares, lengths, prices)
def test_the_flat_curve_is_the_theorem(α, gamma, c):
    assert Costs({1: F(1)}, c).speedup(capped_geometric(α, gamma), gamma) == speedup(α, gamma, c)


@many
@given(machines, st.fractions(1, 30, max_denominator=4))
def test_the_curve_passes_its_points(costs, m):
    "One at one token; the table at its sizes; between two sizes between their values; beyond the last it goes on, never down"
    at = sorted(costs.reading)
    assert costs.curve(1) == 1 and all(costs.curve(k) * costs.plain() == s for k, s in costs.reading.items())
    for a, b in zip(at, at[1:]): assert a > m or m > b or min(costs.curve(a), costs.curve(b)) <= costs.curve(m) <= max(costs.curve(a), costs.curve(b))
    assert m < at[-1] or costs.curve(m) >= costs.curve(at[-1])


def test_beyond_the_curve():
    rising, falling = Costs({1: F(2), 3: F(3), 5: F(5)}, 0), Costs({1: F(2), 5: F(1)}, 0)
    assert rising.curve(4) == 2 and rising.curve(9) == F(9, 2) and falling.curve(3) == F(3, 4) and falling.curve(9) == F(1, 2)


# The best length

@proves("thm-best-gamma")
@settings(max_examples=50)
@given(st.lists(shares, min_size=3, max_size=9).map(lambda xs: sorted(xs, reverse=True)), st.fractions(F(1, 12), 2, max_denominator=12),
       st.lists(st.fractions(0, 1, max_denominator=12), min_size=9, max_size=9).map(sorted), prices)
def test_best_gamma(a, c, more, rest):
    "Rates that never rise, prices that never fall: the speed-up rises exactly while a/d is above it, and then never again"
    n, τ = len(a), lambda g: 1 + sum(a[:g])
    costs = Costs(dict(enumerate(accumulate([F(1), *more[:n]]), 1)), c, rest)
    d = [c + costs.curve(i + 1) - costs.curve(i) for i in range(1, n + 1)]
    S = [costs.speedup(τ(g), g) for g in range(n + 1)]
    rises = [S[g + 1] > S[g] for g in range(n)]
    assert rises == [a[g] / d[g] > S[g] for g in range(n)] == sorted(rises, reverse=True)
    assert costs.best(τ, n) == (sum(rises) if max(S[1:]) > 1 and any(rises) else 1 if S[1] > 1 else 0)


def test_a_step_makes_two_tops():
    "Where the curve has a step the first top need not be the best: every length is looked at"
    costs = Costs({1: 1., 2: 1.05, 3: 2., 9: 2., 10: 3.}, .02)
    S = [costs.speedup(capped_geometric(.9, g), g) for g in range(1, 12)]
    tops = [g for g in range(2, 11) if S[g - 1] > max(S[g - 2], S[g])]
    assert S[0] > S[1] and tops == [8] and costs.best_gamma(.9) == 8


@many
@given(shares, prices, st.integers(1, 20))
def test_best_gamma_is_the_first_of_the_largest(α, c, most):
    S = [speedup(α, g, c) for g in range(1, most + 1)]
    assert best_gamma(α, c, most) == (1 + S.index(max(S)) if max(S) > 1 else 0)


@given(shares, prices, machines, st.integers(2, 9))
def test_best_gamma_takes_any_unit(α, c, costs, unit):
    "A table of seconds, of milliseconds and of target calls give the same length"
    tables = costs.reading, {m: unit*s for m, s in costs.reading.items()}, {m: costs.curve(m) for m in costs.reading}
    assert len({best_gamma(α, c, 12, t) for t in tables}) == 1 == len({best_gamma(α, c, 12), best_gamma(α, c, 12, {1: unit})})


# What was published

def test_table_1():
    "Leviathan et al., Table 1: operations and speed where the draft costs nothing"
    table = [(.6, 2, 1.53, 1.96), (.7, 3, 1.58, 2.53), (.8, 2, 1.23, 2.44), (.8, 5, 1.63, 3.69), (.9, 2, 1.11, 2.71), (.9, 10, 1.60, 6.86)]
    for α, γ, ops, speed in table: assert (round(arithmetic_factor(α, γ, 0), 2), round(speedup(α, γ, 0), 2)) == (ops, speed)


@pytest.mark.parametrize("α, γ, c, paper", [(.75, 7, .02, 3.2), (.8, 7, .04, 3.3), (.82, 7, .11, 2.5), (.62, 7, .02, 2.3), (.68, 5, .04, 2.4), (.71, 3, .11, 2.0),
                                            (.65, 5, .02, 2.4), (.73, 5, .04, 2.6), (.74, 3, .11, 2.0), (.53, 5, .02, 1.9), (.55, 3, .04, 1.8), (.56, 3, .11, 1.6)])
def test_table_4(α, γ, c, paper):
    "All twelve predictions: what the rounded inputs can stand for meets what the rounded output can stand for"
    low, high = speedup(α - .005, γ, c + .005), speedup(α + .005, γ, c - .005)
    assert low <= paper + .05 and paper - .05 <= high and high - low < .3


def test_best_lengths():
    "The argmax of Theorem 3.8 over whole numbers, as in Figure 3 of Leviathan et al."
    αs, table = (.5, .6, .7, .8, .9), {.01: [5, 7, 9, 14, 24], .05: [3, 4, 6, 8, 13], .1: [2, 3, 4, 6, 10]}
    for c, row in table.items(): assert [best_gamma(α, c) for α in αs] == row


def test_bigram_and_lenient_drafts():
    "1.25 from a bigram draft; 3.3, 3.3, 3.9, 4.9 at temperature 0 with lenience (A.5)"
    assert speedup(F(1, 5), 3, 0) == F(156, 125) and round(float(F(156, 125)), 2) == 1.25
    assert [round(speedup(α, 8, .015), 1) for α in (.75, .75, .8, .87)] == [3.3, 3.3, 3.9, 4.9]


def test_chinchilla():
    "Chen et al.'s times and r: the walk-through's 2.65 and 2.05; r (K + 1) is what the round emits, so it is the same theorem"
    K, t_draft, t_target = 4, F(18, 10), F(141, 10)
    for r, said in (F(8, 10), 2.65), (F(62, 100), 2.05):
        S = r * (K + 1) * t_target / (K * t_draft + t_target)
        assert S == Costs({1: t_target}, t_draft).speedup(r * (K + 1), K) and round(float(S), 2) == said
        even = Rates.emitting(float(r * (K + 1)), K)
        assert speedup(even.alpha, K, float(t_draft / t_target)) == pytest.approx(float(S), rel=1e-9) and even.r == pytest.approx(float(r), rel=1e-9)


# One word, many numbers

@proves("prop-rates")
@settings(max_examples=60)
@given(models(), st.integers(1, 3))
def test_rates(pair, gamma):
    "Each number by its own definition, from the law of what a round accepts, along every road"
    got = law_of(lambda rng: next(rounds(pair[0], Chain(pair[1], gamma), reject, (0,), rng)).verdict.node)
    mean = lambda f: sum(w * f(k) for k, w in got.items())
    rates = Rates(mean(lambda k: k >= i) for i in range(1, gamma + 1))
    assert rates.position == tuple(accepted_at_least(*pair, (0,), i) for i in range(1, gamma + 1))
    assert rates.accepted == got.mean() and rates.mean_acceptance_length == mean(lambda k: k + 1)
    assert rates.draft_acceptance_rate == got.mean() / gamma and rates.r == mean(lambda k: F(k + 1, gamma + 1)) >= F(1, gamma + 1)
    looked_at = mean(lambda k: min(k + 1, gamma))
    assert rates.alpha == got.mean() / looked_at
    for i, b in enumerate(rates.conditional, 1):
        reached = mean(lambda k: k >= i - 1)
        assert b == (mean(lambda k: k >= i) / reached if reached else 0)


@proves("prop-rates")
@many
@given(shares, lengths)
def test_even_rates(α, gamma):
    "One α everywhere gives all the others, and is found again"
    rates = Rates.even(α, gamma)
    assert rates == Rates.chained([α] * gamma) and rates.alpha == α and rates.mean_acceptance_length == capped_geometric(α, gamma)
    assert all(rates.tokens(g) == capped_geometric(α, g) for g in range(1, 12))
    assert Rates.emitting(float(rates.mean_acceptance_length), gamma).alpha == pytest.approx(float(α), abs=1e-6)


@many
@given(st.lists(shares, min_size=1, max_size=6))
def test_rates_return(conditional):
    "From conditional rates and back, as far as drafts are reached; the old SGLang formula is Chen's r; r is the larger by (k - m)/(k(k + 1))"
    rates, k = Rates.chained(conditional), len(conditional)
    reached = (*conditional[:1], *(b if a else 0 for a, b in zip(accumulate(conditional, mul), conditional[1:])))
    m = rates.accepted
    assert rates.conditional == reached and Rates.chained(rates.conditional) == rates
    assert rates.r == (m + 1) / (k + 1) and rates.r - rates.draft_acceptance_rate == (k - m) / (k * (k + 1))
    assert [rates.tokens(g) for g in range(1, k + 1)] == [1 + sum(rates.position[:g]) for g in range(1, k + 1)]


def test_published_rates():
    "What three engines printed for a run of theirs, each from its own counts"
    def of(histogram): return Rates(sum(histogram[i:]) / sum(histogram) for i in range(1, len(histogram)))
    sglang = of([11, 14, 11, 4, 0, 3])
    assert (round(sglang.draft_acceptance_rate, 12), round(sglang.mean_acceptance_length, 12)) == (.293023255814, 2.465116279070)
    vllm = Rates([.7617, .6158, .5125, .4243, .3640, .3094, .2722, .2365])
    assert vllm.draft_acceptance_rate == pytest.approx(38611 / 88344, abs=1e-4) and vllm.mean_acceptance_length == pytest.approx(1 + 38611 / 11043, abs=1e-3)
    llama = Rates([.805, .632, .483])
    assert round(llama.mean_acceptance_length, 2) == 2.92 == round(1 + 167/87, 2)


@settings(max_examples=30)
@given(models(), st.integers(1, 4), seeds)
def test_rates_of_a_ledger(pair, gamma, seed):
    "A run of chains: the ledger's own fields and the rates agree"
    ledger = generate(pair[0], Chain(pair[1], gamma), reject, (0,), 20, Seeded(seed)).ledger
    rates, near = Rates.seen(ledger), lambda x: pytest.approx(x, abs=1e-12)
    assert rates.mean_acceptance_length == near(ledger.mean_acceptance_length) and rates.draft_acceptance_rate == near(ledger.draft_acceptance_rate)
    assert rates.accepted * len(ledger.rounds) == near(ledger.num_accepted_tokens) and rates.gamma == gamma
    assert rates.r == near(1 / (gamma + 1) + ledger.num_accepted_tokens / len(ledger.rounds) / (gamma + 1))


def test_one_run_two_acceptance_rates():
    "A good draft and long rounds: most drafts that are looked at are accepted, most drafts that are made are not; the text says so in full"
    rates = Rates.even(.85, 12)
    assert rates.alpha > .84 and rates.draft_acceptance_rate < .42 and rates.mean_acceptance_length > 5.8
    for name in ("alpha", "draft_acceptance_rate", "position", "conditional", "r", "mean_acceptance_length", "accepted"): assert f"{name} " in str(rates)


def test_the_formula_needs_its_condition():
    "On a pair that looks at the text, the exact sum counts right and the formula with the mean β does not"
    target, draft = killer()
    τ = 1 + sum(accepted_at_least(target, draft, (0,), i) for i in (1, 2))
    α = (accepted_at_least(target, draft, (0,), 1) + sum(w * overlap(target.law((0, x)), draft.law((0, x))) for x, w in enumerate(target.law((0,))))) / 2
    assert tokens(target, draft, 2) == τ != capped_geometric(α, 2)


# Measuring, by a clock that only the models move

class Time:
    def __init__(self): self.now = 0.
    def __call__(self): return self.now


class Timed(Counting):
    "A model that keeps what it has read, and whose calls take `seconds(new tokens)`"
    def __init__(self, model, time, seconds): super().__init__(model); self.time, self.seconds, self.fed = time, seconds, []
    def __call__(self, tree):
        before, answer = self.new, super().__call__(tree)
        self.fed.append(self.new - before)
        if self.new > before: self.time.now += self.seconds(self.new - before)
        return answer


@pytest.fixture
def time(monkeypatch):
    time = Time()
    for module in ("cost", "loop"): monkeypatch.setattr(f"specref.core.{module}.perf_counter", time)
    def judge(p, tree, rng): time.now += .25; return reject(p, tree, rng)
    monkeypatch.setattr("specref.core.cost.reject", judge)
    return time


def test_measure_finds_the_costs(time):
    "Sizes, draft and rest come out as they were put in; each size was fed as many new tokens"
    k = {1: 2., 2: 2., 3: 2.5, 5: 4., 9: 8.}
    target, draft = Timed(constant(1, 2, 3), time, lambda m: k.get(m, 99.)), Timed(constant(3, 2, 1), time, lambda m: .5 * m)
    costs = measure(target, draft, [(0, 1), (2,)], repeats=3)
    assert costs == Costs(k, .5, .25) and set(k) <= set(target.fed)
    assert measure(target, draft, [(0, 1)], sizes=(3, 1, 3), repeats=1, gamma=2) == Costs({1: 2., 3: 2.5}, .5, .25)


def test_measure_reads_the_rows(time):
    "A model that does its work when a row is read, as tables and n-grams do, is timed for all its rows"
    def lazy(law, each):
        def row(text): time.now += each; return exact(*law)
        model = TableModel(3, None)
        model.law = row
        return model
    costs = measure(lazy((1, 2, 3), 2.), lazy((3, 2, 1), .5), [(0, 1)], sizes=(1, 4), repeats=2)
    assert costs.reading == {1: 2., 4: 8.} and costs.draft == .5


def test_measure_forgets_the_first_turn(time):
    "What is slow only once, such as loading a kernel, is not in the costs"
    late = iter([100., 50., 25.])
    slow = lambda m: 2. + next(late, 0.)
    target, draft = Timed(constant(1, 2, 3), time, slow), Timed(constant(3, 2, 1), time, lambda m: .5 * m)
    assert measure(target, draft, [(0,)], repeats=1) == Costs(dict.fromkeys((1, 2, 3, 5, 9), 2.), .5, .25)


def test_measure_outlives_stalls(time):
    "A machine that stops for a while in a quarter of the calls does not move the medians"
    stall = iter(lambda rng=np.random.default_rng(0): 40. * (rng.random() < .15), None)
    target, draft = Timed(constant(1, 2, 3), time, lambda m: 2. + m/4 + next(stall)), Timed(constant(3, 2, 1), time, lambda m: .5 * m)
    costs = measure(target, draft, [(0, 1)], repeats=41)
    assert costs.reading == {m: 2. + m/4 for m in (1, 2, 3, 5, 9)} and costs.draft == .5


def test_measure_takes_transformers(monkeypatch):
    "A cached model is fed exactly the tokens that are timed, and the costs of a real pair are numbers that `explain` can use"
    pytest.importorskip("torch")
    from specref.models.embedded import embedded
    small, draft, ctx, fed = embedded("small"), embedded("small"), (5, 6, 7), []
    with monkeypatch.context() as watched:
        watched.setattr("specref.core.cost.stopwatch", lambda f: (before := small.meter.tokens, f(), fed.append(small.meter.tokens - before)))
        for m in (1, 4, 2, 9, 1): specref.core.cost.seconds_of_call(small, ctx, m)
    costs = measure(small, draft, [ctx], sizes=(1, 3), repeats=1, gamma=2)
    told = explain(generate(small, Chain(draft, 2), reject, ctx, 12, Seeded(0)).ledger, costs)
    assert fed == [1, 4, 2, 9, 1]
    assert told.measured > 0 and told.cause in specref.core.cost.SAYS and "times as fast as plain decoding" in str(told)


# Why is mine slower?

def like(α, gamma, n=4000):
    "A ledger whose rounds accept as often as drafts of rate `α` would"
    ends = np.round(n * np.array(Rates.even(α, gamma).position)).astype(int)
    return book([int((i < ends).sum()) for i in range(n)], gamma)


CAUSES = {
    "drafting": [(like(.8, 4), Costs({1: .01}, .01)), (like(.7, 2), Costs({1: .01, 3: .011}, .006, .0002)), (like(.95, 6), Costs({1: .01, 9: .012}, .008))],
    "rejections": [(like(.1, 4), Costs({1: .01}, .0005)), (like(.3, 2), Costs({1: .01, 5: .011}, .0005, .0005)), (like(.02, 3), Costs({1: .01}, .0005))],
    "reading": [(like(.8, 4), Costs({1: .01, 5: .03}, .0005)), (like(.7, 4), Costs({1: .01, 2: .025, 9: .03}, .0002, .001))],
    "overhead": [(like(.8, 4), Costs({1: .01}, .0005, .03)), (like(.6, 3), Costs({1: .01, 9: .015}, .0005, .04))],
    "length": [(like(.5, 12), Costs({1: .01}, .001)), (like(.9, 1), Costs({1: .01, 9: .011}, .0002)), (like(.7, 16), Costs({1: .01, 17: .02}, .001))],
}


@pytest.mark.parametrize("cause, ledger, costs", [(cause, *case) for cause, cases in CAUSES.items() for case in cases])
def test_the_cause_is_named(cause, ledger, costs):
    told = explain(reprice(ledger, costs), costs)
    assert told.cause == cause and specref.core.cost.SAYS[cause][:8] in told.words and f"{told.measured:.2f} times as fast" in told.words
    assert told.predicted == pytest.approx(told.measured, rel=1e-9) == pytest.approx(costs.speedup(ledger.mean_acceptance_length, told.gamma))


def test_the_words_say_which_way():
    for (ledger, costs), said in zip(CAUSES["length"], ("12 is too long. With 2 ", "1 is too short. With 2 ", "16 is too long. With 3 ")):
        assert said in explain(reprice(ledger, costs), costs).words
    slow, fast = (explain(reprice(l, c), c).words for l, c in (CAUSES["drafting"][0], CAUSES["length"][1]))
    assert "What costs most is drafting: a drafted token costs 1.00 target calls" in slow and "no length of draft is faster" in slow
    assert "What holds it back most" in fast and "no length" not in fast


@settings(max_examples=50)
@given(st.floats(.02, .98), st.integers(1, 8), st.floats(.01, 2), st.floats(0, 3), st.floats(0, 3))
def test_the_gains_are_what_the_change_would_do(α, gamma, c, more, rest):
    "Each change made on the machine or on the rounds, and the run priced again: the factor is the one foretold, and the cause the largest"
    ledger, costs = like(α, gamma, 200), Costs({1: 1., gamma + 1: 1 + more}, c, rest)
    told = explain(reprice(ledger, costs), costs)
    changed = {"drafting": replace(costs, draft=c/2), "reading": replace(costs, reading={1: 1., gamma + 1: 1 + more/2}), "overhead": replace(costs, rest=rest/2)}
    for cause, then in changed.items(): assert told.gains[cause] == pytest.approx(explain(reprice(ledger, then), then).measured / told.measured, rel=1e-9)
    if told.best and told.best <= gamma:
        cut = book([min(a, told.best) for a in ledger.column(2)], told.best)
        assert told.gains["length"] == pytest.approx(explain(reprice(cut, costs), costs).measured / told.measured, rel=1e-9)
        assert all(costs.speedup(told.rates.tokens(g), g) <= told.gains["length"] * told.measured * (1 + 1e-9) for g in range(1, gamma + 1))
    assert told.cause == max(told.gains, key=told.gains.get) and min(told.gains.values()) >= 1 - 1e-12
    assert sum(told.seconds.values()) == pytest.approx(costs.round(gamma), rel=1e-9)


@many
@given(runs)
def test_chains_with_half_the_errors(ledger):
    "For chains of one length: every conditional rate half-way to one, as far as drafts were reached, and the proposition's α"
    assume(ledger.num_draft_tokens)
    told, rates = explain(reprice(ledger, Costs({1: 1.}, .1))), Rates.seen(ledger)
    reached = 1 + sum(a > 0 for a in rates.position[:-1])
    assert told.better.position[:reached] == pytest.approx(Rates.chained((1 + b) / 2 for b in rates.conditional[:reached]).position)
    assert told.alpha == pytest.approx(rates.alpha) and (reached == rates.gamma or not any(told.better.position[reached:]))


def test_lookups_with_half_the_errors():
    "Rounds that offered nothing are no errors: of four rounds two drafted, one of them in vain"
    ledger = Ledger([(2, 2, 2, 3, (0, 1., 0)), (2, 2, 0, 1, (0, 1., 0)), (0, 0, 0, 1, (0, 1., 0)), (1, 1, 1, 2, (0, 1., 0))])
    told = explain(ledger, Costs({1: 1.}, 0))
    assert told.alpha == 3/4 and told.rates.position == (.5, .25) and told.better.position == (.625, .625 * .5) and told.gamma == 5/4


def test_half_the_errors():
    "Even rates: a draft of rate (1 + α)/2 in place of α, no further than the best length"
    ledger, costs = like(.5, 8, 2**12), Costs({1: 1.}, .1)
    told = explain(reprice(ledger, costs), costs)
    assert told.best == told.useful == 2 and told.gains["rejections"] == pytest.approx(capped_geometric(.75, 2) / capped_geometric(.5, 2), rel=1e-3)


def test_the_bill():
    "Draft, target and judge as the ledger has them; rows made for the judge are reading, up to its price; the loop is what the ledger did not see"
    def bill(seconds, costs):
        ledger = Ledger([(4, 4, 2, 3, (9., 9., 9.))] + [(4, 4, 2, 3, seconds)] * 3)   # the first round reads the prompt
        return explain(ledger, costs).seconds
    assert bill((.4, 1., .2), Costs({1: 1.}, .1, .5)) == pytest.approx(dict(draft=.4, reading=1., verifying=.2, loop=.3))
    assert bill((.4, 1., .2), Costs({1: 1.}, .1, .1)) == pytest.approx(dict(draft=.4, reading=1., verifying=.2, loop=0.))
    assert bill((.4, 1., .2), Costs({1: 1., 5: 1.15}, .1, .5)) == pytest.approx(dict(draft=.4, reading=1.15, verifying=.05, loop=.45))
    assert bill((.4, .5, .2), Costs({1: 1.}, .1)) == pytest.approx(dict(draft=.4, reading=.7, verifying=0., loop=0.))
    assert bill((.4, .01, 1.2), Costs({1: 1.}, .1)) == pytest.approx(dict(draft=.4, reading=1., verifying=.21, loop=0.))
    assert bill((.4, 2., .2), None) == pytest.approx(dict(draft=.4, reading=2., verifying=.2, loop=0.))


def test_without_costs():
    "The run's own seconds: c from its drafting, reading taken to be flat, nothing measured"
    told = explain(Ledger([(4, 4, 3, 4, (.8, 1., .2))] * 5))
    assert told.measured is None and (told.costs.reading, told.costs.draft) == ({1: 1.}, .2) and told.predicted == pytest.approx(4 / 2)
    assert told.gains["reading"] == 1 and "no costs given" in str(told) and "measured" not in str(told)


def test_runs_that_are_no_chains():
    "Trees and lookups: explained, without advice on the length"
    target, draft, costs = random_table(4, 1), random_table(4, 2), Costs({1: .01, 9: .012}, .001)
    tree = generate(target, Branching(draft, (2, 1)), reject, (0,), 40, Seeded(0)).ledger
    text = generate(NgramModel([0, 1, 2, 3] * 20, 4, 3), PromptLookup(4), reject, (0, 1, 2, 3, 0, 1), 60, Seeded(0)).ledger
    for ledger in (tree, text):
        told = explain(reprice(ledger, costs), costs)
        assert told.best is None and "length" not in told.gains and "gamma" not in str(told) and told.tokens == ledger.mean_acceptance_length
        assert told.predicted == pytest.approx(ledger.mean_acceptance_length * costs.plain() / np.mean([costs.round(d) for d in ledger.column(0)]))
    assert len(set(text.column(0))) > 1 and tree.num_draft_tokens == 4 * len(tree.rounds)


def test_extremes():
    "All accepted, none accepted, one round, drafts for nothing"
    free = Costs({1: .01}, 0)
    assert explain(reprice(book([4, 4], 4), free), free).best == 8 and explain(reprice(book([0, 0], 4), free), free).best == 0
    assert explain(reprice(book([1], 2), free), free).gamma == 2 and best_gamma(1, 0, 7) == 7 and best_gamma(0, 0) == 0
    none = explain(reprice(book([0, 0], 3), free), free)
    assert none.cause == "rejections" and none.measured == 1 and none.alpha == 0 and none.gains["rejections"] == 1.5


def test_priced_keeps_the_rounds():
    ledger = generate(random_table(3, 1), Chain(random_table(3, 2), 2), reject, (0,), 12, Seeded(0)).ledger
    costs = Costs({1: 2., 3: 3.}, .5, .25)
    again = reprice(ledger, costs)
    assert [r[:4] for r in again.rounds] == [r[:4] for r in ledger.rounds] and again.models == ledger.models
    assert set(again.column(4)) == {(1., 3., .25)} and repr(again) == repr(ledger)


# Doors

BAD = (-.1, 1.1, float("nan"), float("inf"), "1", None, True, np.array([.5]))


def test_doors():
    for x in BAD:
        for f in (lambda a: speedup(a, 2, .1), lambda a: arithmetic_factor(a, 2, .1), lambda a: best_gamma(a, .1), lambda a: Costs({1: 1.}, .1).best_gamma(a), lambda a: Rates.even(a, 2)):
            refuses("alpha", f, x)
    for x in (-.1, float("nan"), float("inf"), "1", None, True):
        refuses("c", speedup, .5, 2, x); refuses("c", best_gamma, .5, x); refuses("c_hat", arithmetic_factor, .5, 2, x)
        refuses("draft", Costs, {1: 1.}, x); refuses("rest", Costs, {1: 1.}, .1, x)
        refuses("gamma", Costs({1: 1.}, .1).round, x); refuses("tau", Costs({1: 1.}, .1).speedup, x, 2)
    for x in (0, -1, 1.5, "2", None, True):
        refuses("gamma", speedup, .5, x, .1); refuses("gamma", arithmetic_factor, .5, x, .1); refuses("gamma", Rates.even, .5, x)
        refuses("most", best_gamma, .5, .1, x); refuses("gamma", Rates.emitting, 1., x)
    for table in ({}, {2: 1.}, {1: 0.}, {1: -1.}, {1: 1., 2: 0}, {1: float("nan")}, {1: 1., 2: float("inf")}, {0: 1., 1: 1.}, {1: 1., 2.5: 1.}, {1: "1"}, [1.], None, 3):
        refuses("reading", Costs, table, .1)
        if table is not None: refuses("reading", best_gamma, .5, .1, 9, table)
    refuses("m", Costs({1: 1.}, .1).curve, .5)
    for x in (.9, 3.1, float("nan")): refuses("tau", Rates.emitting, x, 2)
    for row in ((), (.5, .6), (1.2,), (-.1,), (float("nan"),), ("a",), .5): refuses("position", Rates, row)


def test_doors_of_ledgers():
    costs, free = Costs({1: 1.}, .1), [(0, 0, 0, 1, (.1, 1., .1))]
    for ledger in (Ledger(), Ledger(free), generate(constant(1, 1), no_draft, match, (0,), 3, Seeded(0)).ledger):
        refuses("ledger", explain, ledger, costs); refuses("ledger", explain, ledger); refuses("ledger", Rates.seen, ledger)
    for seconds in ((0, 0, 0), (1., 0., 1.), (-1., 1., 1.), (1., 1., -1.), (float("nan"), 1., 1.)):
        refuses("ledger", explain, Ledger([(2, 2, 1, 2, seconds)] * 2), costs); refuses("ledger", explain, Ledger([(2, 2, 1, 2, seconds)] * 2))


    good = Ledger([(2, 2, 1, 2, (1., 1., 1.))] * 2)
    for x in (None, 3, []): refuses("ledger", explain, x); refuses("ledger", explain, x, costs); refuses("ledger", reprice, x, costs); refuses("ledger", Rates.seen, x)
    for x in (3, 0, {1: 1.}): refuses("costs", explain, good, x); refuses("costs", reprice, good, x)
    refuses("costs", reprice, good, None)


def test_doors_of_measure():
    p, q = constant(1, 1), constant(1, 2)
    refuses("prompts", measure, p, q, 5); refuses("prompts", measure, p, q, None); refuses("sizes", measure, p, q, [(0,)], 3); refuses("sizes", measure, p, q, [(0,)], None)
    refuses("prompts", measure, p, q, []); refuses("draft", measure, p, constant(1, 1, 1), [(0,)]); refuses("ctx", measure, p, q, [(5,)]); refuses("ctx", measure, p, q, [()])
    for sizes in ((), (2, 3)): refuses("sizes", measure, p, q, [(0,)], sizes)
    for x in (0, 1.5, "1"): refuses("sizes", measure, p, q, [(0,)], (1, x)); refuses("repeats", measure, p, q, [(0,)], repeats=x); refuses("gamma", measure, p, q, [(0,)], gamma=x)
