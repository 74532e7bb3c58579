"Chapter 50a: the simulated server against Little's law, exact distributions and the formulas of queues"
import json
from dataclasses import replace
from fractions import Fraction as F
from itertools import pairwise, product

import numpy as np, pytest
from hypothesis import given, strategies as st

from engine import measure_engine
from helpers import proves
from specref import capped_geometric, Costs, law_of, Seeded
from specref.draft.length import AcceptanceEstimate, goodput
from specref.serve.simulator import (Arrival, EngineStep as Step, Run, Served, ServingEngine, Text, advance,
                                     best_lengths, curve_seconds, fixed_length, measured_seconds,
                                     queue_wait, random_requests, roofline_seconds, rounds_law, run_server,
                                     static_steps)
from specref.speed.cost import Machine, ModelSize
from specref.speed.roofline import DEVICES, SHAPES, Device, Workload, model_size, pays

sizes = st.integers(1, 6)
some = st.lists(st.builds(Arrival, st.integers(0, 20).map(F), sizes, sizes), min_size=1, max_size=8)

def usual(step): return F(1) + F(step.texts, 7) + F(step.gamma, 5) + F(step.chunk, 3) + F(step.rows, 90)

@proves("thm-little")
@given(some, sizes, sizes, st.integers(0, 3))
def test_every_run(requests, texts, tokens, gamma):
    "Little's law in fractions; each request once and in order, within the limits of the engine"
    engine = ServingEngine(usual, texts, texts + tokens, rows=14)
    run = run_server(requests, engine, fixed_length(gamma), F(2, 3), Seeded(0))
    assert sorted(x.request.arrival for x in run.served) == sorted(r.arrival for r in requests)
    events = sorted([(x.request.arrival, 1) for x in run.served] + [(x.end, -1) for x in run.served])
    present = np.cumsum([sign for _, sign in events]).tolist()
    area = sum(n*(b - a) for n, ((a, _), (b, _)) in zip(present, pairwise(events)))
    assert area == sum(x.latency for x in run.served) == run.mean_latency*len(requests)
    for x in run.served: assert x.request.arrival < x.first <= x.end
    for _, step in run.steps:
        verified = (gamma + 1)*step.texts
        assert step.texts <= texts and step.gamma <= gamma
        assert verified + step.chunk <= max(texts + tokens, verified + 1)
    ends = [x.first for x in sorted(run.served, key=lambda x: x.request.arrival)] if texts == 1 else []
    assert ends == sorted(ends)

def test_memory_admits_what_fits():
    "Two texts of ten rows in fifteen are served one after the other"
    clock = ServingEngine(lambda step: 1, rows=15)
    two = run_server([Arrival(0, 5, 5)]*2, clock, fixed_length(0), 0, Seeded(0))
    assert max(step.texts for _, step in two.steps) == 1 and two.steps[-1][0] == 10

def test_chunks():
    "A prompt of five in steps of two tokens; a text that decodes goes first and leaves one token"
    clock = ServingEngine(lambda step: 1, texts=2, tokens=2)
    run = run_server([Arrival(0, 5, 1)], clock, fixed_length(0), 0, Seeded(0))
    assert [(step.chunk, step.chunk_rows) for _, step in run.steps] == [(2, 2.), (2, 6.), (1, 4.5)]
    both = run_server([Arrival(0, 1, 9), Arrival(1, 3, 1)], clock, fixed_length(0), 0, Seeded(0))
    assert [(step.texts, step.chunk) for _, step in both.steps][:4] == [(0, 1), (1, 1), (1, 1), (1, 1)]
    full = run_server([Arrival(0, 1, 9)]*2, ServingEngine(lambda step: 1, texts=2, tokens=5), fixed_length(4),
                      1, Seeded(0))
    assert max(step.gamma for _, step in full.steps) == 1   # five tokens for two texts

@proves("thm-full-batch")
@pytest.mark.parametrize("gamma, alpha", [(0, F(1, 2)), (2, F(1, 3)), (3, F(3, 4))])
def test_tokens_of_a_step(gamma, alpha):
    "The mean after three steps of a text without end, in fractions"
    def program(rng):
        text = Text(Arrival(0, 1, 10**6), alpha)
        text.read, text.emitted = 1, 1
        for _ in range(3): advance([text], {}, {text: gamma}, text.seen, 0, rng)
        return text.emitted
    assert law_of(program).mean() == 1 + 3*capped_geometric(alpha, gamma)

@pytest.mark.parametrize("tokens, gamma, alpha", [(1, 2, F(1, 2)), (5, 1, F(1, 3)), (6, 3, F(3, 4))])
def test_rounds_are_those_of_the_simulation(tokens, gamma, alpha):
    clock, one = ServingEngine(lambda step: 1), [Arrival(0, 1, tokens + 1)]
    def program(rng): return run_server(one, clock, fixed_length(gamma), alpha, rng).served[0].end
    assert law_of(program) == {1 + k: p for k, p in rounds_law(tokens, gamma, alpha).items()}

def test_the_queue():
    "Batch means of 3,000 requests: four standard errors, which see a wait that is a quarter off"
    services = {2*k: p for k, p in rounds_law(8, 2, .6).items()}
    requests = random_requests(1/18, 3000, 1, (9,), seed=4)
    def step(step): return 0 if step.chunk else 2
    run = run_server(requests, ServingEngine(step, texts=1), fixed_length(2), .6, Seeded(5))
    waits = np.reshape([x.first_token for x in run.served], (20, -1)).mean(1)
    error, wanted = waits.std(ddof=1)/20**.5, queue_wait(1/18, services)
    assert abs(waits.mean() - wanted) < 4*error < wanted/2
    assert queue_wait(1, {1: 1}) == queue_wait(2, {1: 1}) == float("inf")

@proves("cor-waiting")
@given(st.fractions(F(1, 9), F(8, 9), max_denominator=20), st.fractions(1, 4, max_denominator=7))
def test_waiting_falls_by_more_than_the_square(busy, s):
    services = {F(1, 2): F(2, 3), F(2): F(1, 3)}   # mean 1
    quick = {x/s: p for x, p in services.items()}
    factor = queue_wait(busy, services) / queue_wait(busy, quick)
    assert factor == s**2 * (1 - busy/s) / (1 - busy) >= s**2 and (s == 1 or factor > s**2)

@proves("prop-static")
def test_static_batches():
    "The longest of two answers of mean 2 is 8/3 long; simulated batches that start together, too"
    assert static_steps(2, 2) == pytest.approx(8/3) and static_steps(1, 7) == pytest.approx(7)
    longest = np.random.default_rng(0).geometric(1/5, (20_000, 8)).max(1)
    assert abs(longest.mean() - static_steps(8, 5)) < 4*longest.std()/20_000**.5 < .25

def test_steps_of_a_roofline_are_those_of_pays():
    size, w = model_size(SHAPES["Llama-3.1-8B"]), Workload(batch=48, context=700, gamma=5, tau=3.)
    found = pays(size, "L40S", w, draft=.07, rest=.002)
    seconds = roofline_seconds(size, DEVICES["L40S"].machine(), draft=.07, rest=.002)
    assert seconds(Step(48, 0, 48*700)) == pytest.approx(found.plain)
    assert seconds(Step(48, 5, 48*700)) == pytest.approx(found.round)
    draft = ModelSize(2e8, 2, 4000, 8000)
    own = roofline_seconds(size, DEVICES["L40S"].machine(), draft=draft)
    assert own(Step(48, 5, 48*700)) == pytest.approx(pays(size, "L40S", w, draft).round)
    assert own(Step(48, 5, 48*700, 300, 0)) > own(Step(48, 5, 48*700)) < own(Step(48, 5, 48*700, 0, 10**6))

def test_measured_steps_are_those_of_goodput():
    costs = Costs({1: .010, 101: .020}, draft=.001, rest=.0005)
    seconds = measured_seconds(costs)
    assert 3*seconds(Step(1))/seconds(Step(1, 2)) == pytest.approx(costs.speedup(tau=3, gamma=2))
    for batch in (1, 16, 300):
        for k in range(1, 5):
            found = batch*capped_geometric(.8, k) / seconds(Step(batch, k))
            assert found == pytest.approx(goodput(k, .8, batch, costs))
    assert seconds(Step(0, 0, 0, 30)) == costs.seconds(30)

def decoding(*alphas):
    "Texts that decode, whose rate is known"
    texts = [Text(Arrival(0, 1, 99), alpha, AcceptanceEstimate(alpha)) for alpha in alphas]
    for text in texts: text.read = text.emitted = 1
    return texts

SECONDS = roofline_seconds(model_size(SHAPES["Llama-3.1-8B"]), DEVICES["H100 SXM"].machine(), draft=.05)

def test_the_goodput_rule():
    "It never increases with the texts, ends at no draft, and is faster under load than each fixed length"
    rule = best_lengths(SECONDS)
    lengths = [rule(decoding(*[.7]*n))[0] for n in (1, 16, 64, 128, 256, 512)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 3 and lengths[-1] == 0
    engine, requests = ServingEngine(SECONDS, texts=300, tokens=3000), random_requests(380, 1500, 20, 80)
    def late(lengths): return run_server(requests, engine, lengths, .7, Seeded(1)).mean_latency
    assert late(rule) < min(late(fixed_length(gamma)) for gamma in (0, 3, 6))

def test_each_text_has_its_length():
    "Of all lengths of three texts those with the most tokens a second; a probe where nothing else is drafted"
    texts, costs = decoding(.9, .5, .1), measured_seconds(Costs({1: 1., 11: 2.}, draft=.2))
    def goodput(lengths):
        step = Step(3, max(lengths), 6, shorter=3*max(lengths) - sum(lengths))
        return sum(capped_geometric(text.alpha, k) for text, k in zip(texts, lengths)) / costs(step)
    assert best_lengths(costs, 4)(texts) == list(max(product(range(5), repeat=3), key=goodput))
    hopeless = decoding(.05)
    assert best_lengths(costs)(hopeless) == [0]
    hopeless[0].idle = 20
    assert best_lengths(costs)(hopeless) == [1]

def test_rates_are_estimated():
    "Texts of two kinds: as fast as with the true rates, and faster than a short or a long draft for all"
    mixed = [replace(r, alpha=(.9, .4)[i % 2]) for i, r in enumerate(random_requests(200, 300, 20, 80))]
    engine = ServingEngine(SECONDS, texts=300, tokens=3000)
    def late(lengths): return run_server(mixed, engine, lengths, 0, Seeded(1)).mean_latency
    found, known = late(best_lengths(SECONDS)), late(best_lengths(SECONDS, rate=lambda text: text.alpha))
    assert found < 1.03*known and found < min(late(fixed_length(gamma)) for gamma in (0, 1, 8))

def test_what_a_run_says():
    a, b = (Served(Arrival(t, 3, n), first, end) for t, n, first, end in ((1, 5, 2, 4), (2, 1, 5, 5)))
    run = Run((a, b), ((5, Step(1)),))
    assert (a.first_token, a.latency, a.per_token, b.per_token) == (1, 3, .5, 0)
    assert (run.seconds, run.tokens_per_s, run.mean_latency) == (4, 1.5, 3)
    assert (run.goodput(1, .5), run.goodput(3, .5), run.goodput(3, .1)) == (.25, .5, .25)
    assert Device(1, 2., 4., "").machine(.5) == Machine(1., 2.)

CURVE = [dict(batch=b, gamma=g, seconds=s) for b, g, s in
         ((1, 0, 10.), (4, 0, 16.), (8, 0, 20.), (1, 4, 20.), (4, 4, 44.), (8, 4, 80.))]

@pytest.mark.parametrize("step,seconds", [
    (Step(4), 16), (Step(8, 4), 80), (Step(2), 12), (Step(12), 24),
    (Step(1, 2), 15), (Step(0, chunk=8), 20), (Step(4, chunk=4), 20), (Step(4, 4, chunk=4), 48)])
def test_measured_rounds_are_interpolated(step, seconds):
    "At measured points, between batches and lengths, beyond the largest batch, and with a chunk of a prompt"
    assert curve_seconds(CURVE)(step) == pytest.approx(seconds)

def test_the_engine_is_measured(tmp_path):
    measure_engine(tmp_path/"engine.json", batches=(1, 2), gammas=(0, 2), n=4, repeats=1)
    rows = json.loads((tmp_path/"engine.json").read_text())["rows"]
    assert [(row["batch"], row["gamma"]) for row in rows] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert all(row["seconds"] > 0 and 1 <= row["tokens"] <= 1 + row["gamma"] for row in rows)
    assert curve_seconds(rows)(Step(2, 2)) == rows[-1]["seconds"]
