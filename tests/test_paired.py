"Chapter 61: pairs of runs in alternating order, the interval of their median, and the predicted speed"
from itertools import product

import pytest

from checkpoints import pair_of
from specref.app import paired
from specref.app.paired import PairedRuns, median_interval, paired_runs

def test_the_interval_contains_the_median_as_often_as_it_states():
    "Counted over all signs of up to ten numbers; the next narrower interval would fail too often"
    for m in range(1, 11):
        rows = [[s * (i + 1) for i, s in enumerate(signs)] for signs in product((-1, 1), repeat=m)]
        found = [median_interval(row) for row in rows]
        inside = sum(low <= 0 <= high for low, high, _ in found) / 2**m
        assert {x.confidence for x in found} == {inside} and (inside >= .99) == (m >= 8)
    assert median_interval(range(12))[:2] == (1, 10) and median_interval(range(11))[:2] == (0, 10)
    assert median_interval([3.]) == (3., 3., 0.)

def test_pairs_cancel_what_order_and_time_do():
    "The first run of a pair takes longer, and all become slower: 1 and 1.5 are in their intervals"
    for true in 1, 1.5:
        now, order = [0.], []
        def run(name, seconds):
            def timed():
                order.append(name)
                took = seconds * (1.3 if len(order) % 2 else 1) * (1 + .01*len(order))
                now[0] += took
                return (0, 0), took
            return timed
        found, (text, seconds) = paired_runs(run("plain", true), run("fast", 1), 40, lambda: now[0])
        assert order[:8] == ["plain", "fast", "fast", "plain"] * 2 and text == (0, 0) and seconds > 1
        (low, high, confidence), first = found.interval, found.ratios[0]
        assert low <= true <= high < 1.3 * true and confidence >= .99 and first > 1.25 * true
        assert ("not distinguishable" in found.words) == (true == 1)
        assert sum(map(sum, found.whole)) == pytest.approx(now[0]) and 40 <= now[0] < 50

def test_an_order_that_is_fixed_finds_a_difference_where_there_is_none():
    "The first run of each pair takes a third longer: alternating pairs have 1 in their interval, others not"
    def missed(pairs):
        low, high, _ = PairedRuns(tuple(pairs), tuple(pairs)).interval
        return not low <= 1 <= high
    fixed = [(4, 3)] * 10
    assert missed(fixed) and not missed([pair[::1 - 2*(i % 2)] for i, pair in enumerate(fixed)])
    found, _ = paired_runs(*slow_start(2), 40, iter(range(100)).__next__)
    assert {*found.ratios} == {4/3, 3/4} and found.interval.low <= 1 <= found.interval.high

def slow_start(each):
    "Two functions alike; of every `each` calls the first takes a third longer"
    calls = []
    def run():
        calls.append(0)
        return (0,), 3 + (len(calls) % each == 1)
    return run, lambda: run()

def test_runs_end_with_a_narrow_interval_or_with_the_time():
    "Eight equal pairs are enough; in no time there is one pair; the run with the median time is returned"
    same = (lambda: ("ab", 2.)), (lambda: ("cd", 1.))
    found, run = paired_runs(*same, 10**6, iter(range(100)).__next__)
    assert len(found.seconds) == 8 and found.seconds[0] == (1, .5)
    assert found.speed_up == 2 and run == ("cd", 1.)
    found, _ = paired_runs(*same, 0, lambda: 0)
    assert len(found.seconds) == 1 and found.words == "2.00 (one pair); eight pairs: --seconds 24"
    times = iter((5., 1., 3.))
    _, run = paired_runs(lambda: ("a", 2.), lambda: ("b", next(times)), 3, iter((0, 1, 2, 3)).__next__)
    assert run == ("b", 3.)

def test_calls_of_a_drafter_are_priced_by_what_they_predict():
    "One call for each token of a chain, or one for all of Medusa's four"
    ids = (1, 2, 3)
    want = dict(eagle=1, medusa=.25)
    assert {name: paired.calls_a_token(pair_of(drafter=name), ids) for name in want} == want
    assert paired.calls_a_token(pair_of(), ids) == 1
