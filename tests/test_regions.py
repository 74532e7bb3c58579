"Chapter 17aa: rules with an exception are wrong on some rows, and the rows of every interface have these"
from fractions import Fraction as F

import numpy as np, pytest
from hypothesis import given, strategies as st

from gates import Gate, judged_rows, random_gate, random_rows
from helpers import laws, long, proves
from specref import certificate, judge_rule, overlap, residual, System
from specref.certify.calls import Plan
from specref.certify.known import Rule
from specref.certify.regions import REGION_ODDS, THRESHOLDS, RegionBets, token_features
from specref.certify.samplers import Kit
from specref.core.target import pointed_table
from specref.verify.reject import Chain

TABLES = pointed_table(4, 1), pointed_table(4, 2)

@proves("prop-gates")
@given(laws(4), laws(4), st.sets(st.integers(0, 3)))
def test_the_distance_of_a_gate(p, q, gate):
    "The rule enumerated: accepting at once costs the sum of max(q - p, 0), rejecting at once at least p"
    def law(accept):
        a = np.array([q[x]*accept(x) for x in range(4)])
        return a + (1 - a.sum())*(residual(p, q) if overlap(p, q) < 1 else p)
    def distance(accept): return abs(law(accept) - p).sum()/2
    def usual(x): return min(F(1), F(p[x])/q[x]) if q[x] else 0
    assert distance(usual) == 0
    assert distance(lambda x: 1 if x in gate else usual(x)) == sum(max(q[x] - p[x], 0) for x in gate)
    missing = sum(p[x] for x in gate if q[x] >= p[x])
    if overlap(p, q) < 1: assert distance(lambda x: 0 if x in gate else usual(x)) >= missing

def test_the_features_of_a_token():
    "By hand, of two rows; a class of ten tokens has the features of one of them"
    p, q = np.array([[.7, .1, .2], [.5, .5, 0]]), np.array([[.6, .4, 0], [.25, .25, .5]])
    found = token_features(p, q, np.array([0, 3]), np.array([2, 0]))
    assert [*found] == [*THRESHOLDS] and found["p(x)/q(x)"].tolist()[1] == [2, 2, 0]
    assert found["rank in p"].tolist() == [[0, 2, 1], [0, 0, 2]]
    assert found["rank in q"][0].tolist() == [0, 1, 2]
    assert found["max p"][:, 0].tolist() == [.7, .5] and found["position"][1].tolist() == [3, 3, 3]
    assert np.isclose(found["entropy of p"][1, 0], np.log(2)) and np.isinf(found["p(x)/q(x)"][0, 2])
    of_class = token_features(p[:1], q[:1], np.zeros(1), np.ones(1), np.array([1, 1, 10]))
    assert np.isclose(of_class["p(x)"][0, 2], .02) and of_class["rank in p"][0].tolist() == [0, 1, 2]

def bets_on(p, q, counts): return RegionBets(p, q, counts, np.zeros(len(p)), np.ones(len(p)))

@proves("thm-bets")
def test_the_bets_are_fair():
    "The mean wealth of every bettor over a token of a row is one, and so is that over two tokens"
    p, q = (np.array([m.law((k,)) for k in range(2)], float) for m in TABLES)
    after = {(x, y): [np.exp(log) for log in bets_on(p, q, np.eye(4)[[x, y]]).logs]
             for x in range(4) for y in range(4)}
    for i in range(len(after[0, 0])):
        assert np.allclose(sum(p[0, x]*p[1, y]*after[x, y][i] for x, y in after), 1)
    one = bets_on(p, q, np.eye(4)[[0, 0]])
    assert one.bettors == sum(log.size for log in one.logs) and len(REGION_ODDS) == one.logs[0].shape[-1]

def test_the_stated_share_is_detected():
    "Of the drafts where a condition holds, the stated share accepted unverified exceeds the limit"
    texts = [(i, j) for i in range(20) for j in range(20)]
    p, q = (np.array([m.law(text) for text in texts], float) for m in TABLES)
    rng, limit = np.random.default_rng(0), 1e10
    bets = bets_on(p, q, rng.multinomial(20, p/p.sum(1, keepdims=True)))
    share, i = bets.shares(limit)["p(x) >= 0.3"], bets.names.index("p(x) >= 0.3")
    more = share*np.maximum(q - p, 0)*bets.sides[i]
    rest = np.maximum(p - q, 1e-12)
    rows = p + more - more.sum(1, keepdims=True)*rest/rest.sum(1, keepdims=True)
    assert 0 < share < .5 and bets.wealth < 10
    assert all(bets_on(p, q, rng.multinomial(20, rows.clip(0)/rows.sum(1, keepdims=True))).wealth > limit
               for _ in range(5))

def test_no_gate_escapes_the_judge():
    "All gates made at random whose mean distance on rows of all kinds is .001 or more are wrong on its rows"
    rng, mine = np.random.default_rng(long(3, 4)), judged_rows()
    rows = random_rows(rng, long(1000, 4000))
    every = [random_gate(rng) for _ in range(long(200, 5000))]
    gates = [gate for gate in every if gate.distances(*rows).mean() >= .001]
    assert len(gates) > len(every)/2 and all(gate.distances(*mine).max() >= 1e-9 for gate in gates)

SGLANG = Gate((("p(x)", .6, True),), "accept")
LIKELY = Gate((("max p", .8, True),), "argmax")
SKIPPED = Gate((("q(x)", .95, True), ("place", 1, True)), "reject")

NARROW = (   # each holds on few rows
    Gate((("p(x)", .376, True), ("max p", .496, False)), "accept"),
    Gate((("q(x)", .67, True), ("max q", .706, False)), "reject"),
    Gate((("max p", .884, True), ("max q", .304, False)), "reject"),
    Gate((("max q", .319, False), ("rank in p", 1, False)), "accept"),
    Gate((("p(x)", .46, True), ("entropy", .00215, False)), "reject"),
    Gate((("max q", .737, False), ("p(x)", .635, True)), "argmax"),
    Gate((("p(x)", .827, True), ("q(x)", .988, False)), "argmax"),
    Gate((("entropy", .904, True), ("p(x)", .65, True)), "argmax"),
    Gate((("max p", .571, False), ("entropy", .686, False)), "accept"),
    Gate((("rank in q", 2, True), ("p(x)", .627, True)), "reject"),
    Gate((("ratio", 1.42, True), ("q(x)", .528, True)), "reject"),
    Gate((("p(x)", .982, True), ("place", 9, True)), "reject"))

def test_narrow_gates_are_wrong_on_rows_of_the_judge():
    mine = judged_rows()
    for gate in NARROW: assert gate.distances(*mine).max() > .005, gate

@pytest.mark.parametrize("gate", [SGLANG, LIKELY, SKIPPED], ids=str)
def test_gates_are_convicted(gate):
    "By the judge in fractions, and by the kit, which names the region; their formula is the judge's distance"
    rng = np.random.default_rng(0)
    found = judge_rule(gate.rule, known=())
    assert not found.exact and float(found.tv) > .1 and gate.distances(*random_rows(rng)).max() > .1
    failed = Kit(gate.verify, Plan(runs=1500, depth=5)).finding("gates")
    assert failed.passes is False and "tokens where" in failed.words

def test_no_gate_passes():
    right = Kit(Gate((("p(x)", 2., True),), "accept").verify, Plan(runs=500, depth=5)).finding("gates")
    assert right.passes and "conditions" in right.words

@pytest.mark.parametrize("least", [.3, .5, .6, .7, .8, .9])
def test_the_default_certificate_finds_gates(least):
    "A draft token accepted at once where its probability is high: the tables have one at every threshold"
    def accept(t): return t.px >= least or t.coin(t.px, t.qx)
    verify = Rule(accept=accept)
    assert certificate(lambda draft: System("gate", Chain(draft, 2), verify)).tv > .05
