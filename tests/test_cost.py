"Chapters 06 to 06b: what a round costs, the numbers called acceptance rate, and why a run is slow"
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from operator import mul

import numpy as np, pytest
from hypothesis import example, strategies as st

from helpers import constant, examples, models, pairs, proves
from specref import (best_gamma, Branching, capped_geometric, Chain, Costs, exact, explain, generate,
                     law_of, Ledger, measure, NgramModel, overlap, PromptLookup, random_table, Rates,
                     reject, rounds, Seeded, speedup, TableModel)
from specref.core import loop
from specref.core.loop import RoundCounts
from specref.core.target import Target
from specref.speed import causes
from specref.speed.causes import reprice
from specref.speed.cost import Machine, ModelSize, arithmetic_factor, llama_size, pass_seconds
from specref.verify.reject import accepted_at_least

F, near = Fraction, pytest.approx
def parts_of_12(low, high): return st.fractions(low, high, max_denominator=12)
shares, prices, lengths = parts_of_12(0, 1), parts_of_12(0, 3), st.integers(1, 8)

# The theorems of the paper

class Counting(Target):
    "A model with a cache: `new` counts the tokens fed to it beyond its last tree"
    def __init__(self, model): self.model, self.V, self.new, self.read = model, model.V, 0, set()
    def __call__(self, tree):
        texts = {tree.ctx[:n] for n in range(1, len(tree.ctx))} | {tree.text(i) for i in range(len(tree))}
        self.new += len(texts - self.read)
        self.read = texts
        return self.model(tree)

@proves("thm-walltime", "thm-operations")
@examples(25, pairs(st.integers(2, 4)), st.integers(1, 3), prices)
def test_walltime_and_operations(pq, gamma, c):
    "Tokens and nodes fed, counted on every path, for distributions rotated by the text at constant overlap"
    def work(rng):
        turned = [TableModel(len(law), lambda text, law=law: np.roll(law, sum(text))) for law in pq]
        target, draft = map(Counting, turned)
        emitted = len(next(rounds(target, Chain(draft, gamma), reject, (0,), rng)).tokens)
        return target.new + c * draft.new, emitted
    seen = law_of(work)
    spent, emitted = (sum(w * k[i] for k, w in seen.items()) for i in (0, 1))
    assert emitted / (1 + gamma*c) == speedup(overlap(*pq), gamma, c)
    assert spent / emitted == arithmetic_factor(overlap(*pq), gamma, c) >= 1

@proves("thm-walltime", "cor-short-texts")
@examples(30, shares, lengths, prices, st.integers(1, 40))
def test_long_texts_reach_the_walltime(α, gamma, c, N):
    "The mean number of rounds for N tokens, by recursion: from N/τ to (N + γ)/τ, so the speed-up tends to S"
    size = {k + 1: α**k * (1 - α) for k in range(gamma)} | {gamma + 1: α**gamma}
    needed = [F(0)]
    for n in range(1, N + 1): needed.append(1 + sum(w * needed[max(n - k, 0)] for k, w in size.items()))
    τ, S = capped_geometric(α, gamma), speedup(α, gamma, c)
    assert N / τ <= needed[N] <= (N + gamma) / τ
    assert S * N / (N + gamma) <= N / (needed[N] * (1 + gamma*c)) <= S

@proves("cor-some-gamma")
@examples(30, shares, prices)
def test_some_gamma(α, c):
    "Faster for some γ exactly if α > c; then for γ = 1, and below any that gains; the best is found"
    S = [speedup(α, g, c) for g in range(1, 13)]
    gains = [s > 1 for s in S]
    assert any(gains) == gains[0] == (α > c) and gains == sorted(gains, reverse=True)
    assert S[0] == (1 + α) / (1 + c)
    assert best_gamma(α, c, 12) == (1 + S.index(max(S)) if any(gains) else 0)

# The cost curve

curves = st.dictionaries(st.integers(2, 12), parts_of_12(F(1, 4), 3), max_size=3)
tables = st.builds(lambda one, more: {1: one, **more}, parts_of_12(F(1, 4), 3), curves)
machines = st.builds(Costs, tables, prices, prices)

def counts(drafted, accepted, seconds=(0, 0, 0)):
    named = dict(zip(("draft", "target", "verify"), seconds))
    return RoundCounts(drafted, drafted, accepted, accepted + 1, named)

def book(accepted, gamma):
    "The ledger of chains of `gamma` drafts with these numbers of accepted ones"
    return Ledger([counts(gamma, a) for a in accepted])

def books(g): return st.lists(st.integers(0, g), min_size=2, max_size=12).map(lambda a: book(a, g))
accepts = lengths.flatmap(books)

@proves("thm-cost-curve")
@examples(30, accepts, machines)
def test_cost_curve(ledger, costs):
    "Tokens at the cost of a plain one over the seconds of all rounds, each computed from the table"
    (g, *_), τ = ledger.column("drafted"), F(ledger.num_emitted_tokens, len(ledger.rounds))
    took = sum(reprice(ledger, costs).seconds.values())
    assert ledger.num_emitted_tokens * costs.plain() / took == costs.speedup(τ, g)
    assert costs.round(g) / costs.plain() == g * costs.c + costs.curve(g + 1) + costs.rest / costs.plain()

@examples(30, machines, st.fractions(1, 30, max_denominator=4))
def test_the_curve_passes_its_points(costs, m):
    "The table at its sizes; linear between two; beyond the last the last slope goes on, if it rises"
    sizes, row = sorted(costs.reading), costs.reading
    assert all(costs.seconds(k) == s == costs.curve(k) * costs.plain() for k, s in row.items())
    for a, b in zip(sizes, sizes[1:]):
        line = row[a] + (row[b] - row[a]) * (m - a) / (b - a)
        if a <= m <= b or m > sizes[-1] == b and row[b] > row[a]: assert costs.seconds(m) == line
    if m > sizes[-1] and row[sizes[-1]] <= row[sizes[-2 if sizes[1:] else -1]]:
        assert costs.seconds(m) == row[sizes[-1]]

@proves("thm-best-gamma")
@examples(25, st.lists(shares, min_size=3, max_size=9), parts_of_12(F(1, 12), 2),
          st.lists(shares, min_size=9, max_size=9), prices)
def test_best_gamma(a, c, more, rest):
    "Rates that never rise, costs that never fall: the speed-up rises exactly while a/d is above it"
    a, n = sorted(a, reverse=True), len(a)
    def τ(g): return 1 + sum(a[:g])
    costs = Costs(dict(enumerate(accumulate([F(1), *sorted(more)[:n]]), 1)), c, rest)
    d = [c + costs.curve(i + 1) - costs.curve(i) for i in range(1, n + 1)]
    S = [costs.speedup(τ(g), g) for g in range(n + 1)]
    rises = [S[g + 1] > S[g] for g in range(n)]
    assert rises == [a[g] / d[g] > S[g] for g in range(n)] == sorted(rises, reverse=True)
    assert costs.best(τ, n) == (max(sum(rises), 1) if max(S[1:]) > 1 else 0)

def test_a_step_makes_two_tops():
    "Where the curve has a step the first top need not be the best; and tables may have any unit"
    table = {1: 1., 2: 1.05, 3: 2., 9: 2., 10: 3.}
    S = [Costs(table, .02).speedup(capped_geometric(.9, g), g) for g in range(1, 12)]
    tops = [g for g in range(2, 11) if S[g - 1] > max(S[g - 2], S[g])]
    assert S[0] > S[1] and tops == [8] and Costs(table, .02).best_gamma(.9) == 8
    assert best_gamma(.9, .02, reading={m: 7 * s for m, s in table.items()}) == 8

# The glossary of acceptance rates

@proves("prop-rates")
@examples(25, models(), st.integers(1, 3))
def test_rates(pair, gamma):
    "Each rate by its own definition, from the distribution of the accepted tokens, along every path"
    got = law_of(lambda rng: next(rounds(pair[0], Chain(pair[1], gamma), reject, (0,), rng)).verdict.node)
    def mean(f): return sum(w * f(k) for k, w in got.items())
    at_least = [mean(lambda k: k >= i) for i in range(gamma + 1)]
    rates, m, looked_at = Rates(at_least[1:]), got.mean(), mean(lambda k: min(k + 1, gamma))
    assert rates.position == tuple(accepted_at_least(*pair, (0,), i) for i in range(1, gamma + 1))
    assert rates.mean_acceptance_length == 1 + rates.accepted == 1 + m
    assert rates.draft_acceptance_rate == m / gamma and rates.rho == (m + 1) / (gamma + 1)
    assert rates.alpha == m / looked_at
    assert rates.conditional == tuple(b / a if a else 0 for a, b in zip(at_least, at_least[1:]))

def test_a_cut_round_is_no_rejection():
    "Runs that end in every round of a drafter that is never rejected: all rates are 1, of what was emitted"
    cut = [RoundCounts(4, 4, emitted, emitted, {}) for emitted in (1, 2, 3, 4)]
    ledger = Ledger([*cut, counts(4, 4)])
    assert Rates.seen(ledger) == Rates((1, 1, 1, 1)) and ledger.mean_acceptance_length == 15/5
    report = explain(reprice(Ledger([counts(4, 4), cut[2]]), Costs({1: 1.}, .1)), Costs({1: 1.}, .1))
    assert report.alpha == 1 and report.tokens == 4 and report.gains["rejections"] == 1

@proves("prop-rates")
@examples(30, shares, st.lists(shares, min_size=1, max_size=6))
def test_rates_from_fewer_numbers(α, conditional):
    "One α everywhere gives all the others, and is recovered; so are conditional rates, as far as reached"
    gamma = len(conditional)
    even, rates = Rates.even(α, gamma), Rates.chained(conditional)
    assert even == Rates.chained([α] * gamma) and even.alpha == α
    assert all(even.tokens(g) == capped_geometric(α, g) for g in range(1, 12))
    assert Rates.emitting(float(even.mean_acceptance_length), gamma).alpha == near(float(α), abs=1e-6)
    reached = [all(conditional[:i]) for i in range(gamma)]
    assert rates.conditional == tuple(b * on for b, on in zip(conditional, reached))
    assert rates.position == tuple(accumulate(conditional, mul))
    assert all(rates.tokens(g) == 1 + sum(rates.position[:g]) for g in range(1, gamma + 1))

# Measuring, by a clock that only the models move

class Time:
    now = 0.
    def __call__(self): return self.now

class Timed(Counting):
    "A model with a cache, whose calls take `seconds(new tokens)`"
    def __init__(self, model, time, seconds):
        super().__init__(model)
        self.time, self.seconds, self.fed = time, seconds, []
    def __call__(self, tree):
        before, rows = self.new, super().__call__(tree)
        self.fed.append(self.new - before)
        if self.fed[-1]: self.time.now += self.seconds(self.fed[-1])
        return rows

@pytest.fixture
def time(monkeypatch):
    time = Time()
    for module in (causes, loop): monkeypatch.setattr(module, "perf_counter", time)
    def slow_reject(p, tree, rng):
        time.now += .25
        return reject(p, tree, rng)
    monkeypatch.setattr(causes, "reject", slow_reject)
    return time

def test_measure_finds_the_costs(time):
    "Sizes, draft and rest come out as put in; each size was fed as many new tokens; calls may stall"
    k, stalls = {1: 2., 2: 2., 3: 2.5, 5: 4., 9: 8.}, iter(np.random.default_rng(0).random(9**5) < .1)
    draft = Timed(constant(3, 2, 1), time, lambda m: .5 * m)
    target = Timed(constant(1, 2, 3), time, lambda m: k.get(m, 99.))
    assert measure(target, draft, [(0, 1), (2,)], repeats=3) == Costs(k, .5, .25) and {*k} <= {*target.fed}
    assert measure(target, draft, [(0, 1)], (3, 1, 3), repeats=1, gamma=2) == Costs({1: 2., 3: 2.5}, .5, .25)
    first = iter([100., 50., 25.])
    slow = Timed(constant(1, 2, 3), time, lambda m: 2. + next(first, 0.))   # loads a kernel in the first pass
    assert measure(slow, draft, [(0,)], repeats=1) == Costs(dict.fromkeys(k, 2.), .5, .25)
    stalling = Timed(constant(1, 2, 3), time, lambda m: 2. + m/4 + 40. * next(stalls))
    assert measure(stalling, draft, [(0, 1)], repeats=41).reading == {m: 2. + m/4 for m in k}

def test_measure_reads_the_rows(time):
    "A model that does its work when a row is read, as tables and n-grams do, is timed for all its rows"
    class Lazy(TableModel):
        def law(self, text):
            time.now += self.each
            return exact(1, 2, 3)
    target, draft = Lazy(3, None), Lazy(3, None)
    target.each, draft.each = 2., .5
    costs = measure(target, draft, [(0, 1)], sizes=(1, 4), repeats=2)
    assert costs.reading == {1: 2., 4: 8.} and costs.draft == .5

def test_measure_takes_transformers(monkeypatch):
    "A cached model is fed exactly the tokens that are timed, and `explain` takes the costs of a real pair"
    pytest.importorskip("torch")
    from specref.models.embedded import embedded
    model, ctx, fed = embedded("small"), (5, 6, 7), []
    def tokens_of(f):
        before = model.meter.tokens
        f()
        fed.append(model.meter.tokens - before)
    with monkeypatch.context() as watched:
        watched.setattr(causes, "stopwatch", tokens_of)
        for m in (1, 4, 2, 9, 1): causes.seconds_of_call(model, ctx, m)
    costs = measure(model, embedded("small"), [ctx], sizes=(1, 3), repeats=1, gamma=2)
    ledger = generate(model, Chain(embedded("small"), 2), reject, ctx, 12, Seeded(0)).ledger
    assert fed == [1, 4, 2, 9, 1] and "times as fast as plain decoding" in str(explain(ledger, costs))

# Why is my run slow?

def like(α, gamma, n=4000):
    "A ledger whose rounds accept as often as drafts of rate `α` would"
    ends = np.round(n * np.array(Rates.even(α, gamma).position)).astype(int)
    return book([int((i < ends).sum()) for i in range(n)], gamma)

@pytest.mark.parametrize("cause, α, gamma, costs, words", [
    ("drafting", .8, 4, Costs({1: .01}, .01), "costs most is drafting: a drafted token costs 1.00 target"),
    ("rejections", .3, 2, Costs({1: .01, 5: .011}, .0005, .0005), "holds it back most is rejections"),
    ("reading", .7, 4, Costs({1: .01, 2: .025, 9: .03}, .0002, .001), "reading"),
    ("overhead", .6, 3, Costs({1: .01, 9: .015}, .0005, .04), "overhead"),
    ("length", .5, 12, Costs({1: .01}, .001), "12 is too long. With 2 "),
    ("length", .9, 1, Costs({1: .01, 9: .011}, .0002), "1 is too short. With 2 ")])
def test_the_cause_is_named(cause, α, gamma, costs, words):
    report = explain(reprice(like(α, gamma), costs), costs)
    sentence = " ".join(report.words.split())
    assert report.cause == cause and words in sentence and f"{report.measured:.2f} times as fast" in sentence
    assert ("no length of draft is faster" in sentence) == (report.best == 0)

@examples(25, st.floats(.02, .98), lengths, st.floats(.01, 2), st.floats(0, 3), st.floats(0, 3))
def test_the_gains_are_those_of_the_changes(α, gamma, c, more, rest):
    "Each change made on the machine or on the rounds, and the run repriced"
    ledger, costs = like(α, gamma, 200), Costs({1: 1., gamma + 1: 1 + more}, c, rest)
    report = explain(reprice(ledger, costs), costs)
    length = ledger.mean_acceptance_length
    assert report.predicted == near(report.measured) == near(costs.speedup(length, gamma))
    changed = dict(drafting=replace(costs, draft=c/2), overhead=replace(costs, rest=rest/2),
                   reading=replace(costs, reading={1: 1., gamma + 1: 1 + more/2}))
    for cause, then in changed.items():
        assert report.gains[cause] == near(explain(reprice(ledger, then), then).measured / report.measured)
    if report.best and report.best <= gamma:
        cut = book([min(a, report.best) for a in ledger.column("accepted")], report.best)
        assert report.gains["length"] == near(explain(reprice(cut, costs), costs).measured / report.measured)
    assert report.cause == max(report.gains, key=report.gains.get) and min(report.gains.values()) >= 1 - 1e-12

@examples(30, accepts)
@example(book([0, 0, 2, 2, 2], 2))   # rounding would make the second rate larger than the first
def test_chains_with_half_the_errors(ledger):
    "Every conditional rate half-way to one, as far as drafts were reached, and the proposition's α"
    report, rates = explain(reprice(ledger, Costs({1: 1.}, .1))), Rates.seen(ledger)
    reached = 1 + sum(a > 0 for a in rates.position[:-1])
    better = Rates.chained((1 + b) / 2 for b in rates.conditional[:reached])
    assert report.better.position[:reached] == near(better.position) and report.alpha == near(rates.alpha)
    assert not any(report.better.position[reached:])

def test_lookups_with_half_the_errors():
    "Rounds without drafts are no errors: of four rounds three drafted, one without acceptance"
    ledger = Ledger([counts(*row, (0, 1., 0)) for row in ((2, 2), (2, 0), (0, 0), (1, 1))])
    report = explain(ledger, Costs({1: 1.}, 0))
    assert (report.alpha, report.gamma, report.rates.position) == (3/4, 5/4, (.5, .25))
    assert report.better.position == (.625, .625 * .5)

@pytest.mark.parametrize("seconds, costs, want", [
    ((.4, 1., .2), Costs({1: 1.}, .1, .5), (.4, 1., .2, .3)),
    ((.4, 1., .2), Costs({1: 1.}, .1, .1), (.4, 1., .2, 0.)),
    ((.4, 1., .2), Costs({1: 1., 5: 1.15}, .1, .5), (.4, 1.15, .05, .45)),
    ((.4, .5, .2), Costs({1: 1.}, .1), (.4, .7, 0., 0.)),
    ((.4, .01, 1.2), Costs({1: 1.}, .1), (.4, 1., .21, 0.)),
    ((.4, 2., .2), None, (.4, 2., .2, 0.))])
def test_the_costs_of_a_round(seconds, costs, want):
    "Rows made for the verifier are reading, up to its cost; overhead is the time outside the ledger"
    ledger = Ledger([counts(4, 2, (9., 9., 9.))] + [counts(4, 2, seconds)] * 3)   # the first reads the prompt
    report = explain(ledger, costs)
    assert tuple(report.seconds.values()) == near(want)
    assert (report.measured is None) == (costs is None) == ("no costs given" in str(report))
    if not costs: assert report.costs.draft == near(.1) and report.gains["reading"] == 1

def test_runs_that_are_no_chains():
    "Trees and lookups: explained, without advice on the length; and the counts of a repriced run stay"
    target, draft, costs = random_table(4, 1), random_table(4, 2), Costs({1: .01, 9: .012}, .001)
    tree = generate(target, Branching(draft, (2, 1)), reject, (0,), 40, Seeded(0)).ledger
    counted, ctx = NgramModel([0, 1, 2, 3] * 20, 4, 3), (0, 1, 2, 3, 0, 1)
    text = generate(counted, PromptLookup(4), reject, ctx, 60, Seeded(0)).ledger
    for ledger in (tree, text):
        report = explain(reprice(ledger, costs), costs)
        price = np.mean([costs.round(drafted) for drafted in ledger.column("drafted")])
        assert report.best is None and "length" not in report.gains and "gamma" not in str(report)
        assert report.predicted == near(report.tokens * costs.plain() / price)
        assert repr(reprice(ledger, costs)) == repr(ledger)

def test_extremes():
    "All accepted, none accepted, one round, free drafts"
    free = Costs({1: .01}, 0)
    ledgers = book([4, 4], 4), book([0, 0], 3), book([1], 2)
    every, none, one = (explain(reprice(ledger, free), free) for ledger in ledgers)
    assert (every.best, none.best, one.gamma, best_gamma(1, 0, 7), best_gamma(0, 0)) == (8, 0, 2, 7, 0)
    assert (none.cause, none.measured, none.alpha, none.gains["rejections"]) == ("rejections", 1, 0, 1.5)

# A roofline

def test_seconds_by_hand():
    "Weights once, rows for every text; arithmetic for every token; the longer of two times for each part"
    size, machine = ModelSize(F(10), 2, 3, 5), Machine(F(4), F(8))
    assert pass_seconds(size, machine, 6) == F(20, 4) + F(6*3, 4)
    assert pass_seconds(size, machine, 6, tokens=4, batch=3) == F(2*10*12, 8) + F(6*5*4*3, 8)
    llama = llama_size(32, 4096, 32, 32, 11008, 32000)
    assert llama.weights + 32000*4096 + 65*4096 == 6_738_415_616   # with embedding and norms
