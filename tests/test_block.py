"Chapter 12: block verification is exact, accepts each prefix with its weight, and no rule accepts more"
from collections import Counter
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np, pytest
from hypothesis import given, strategies as st
from scipy.optimize import linprog

from contracts import continued, verifier_contract
from helpers import CANON, Plan, Recorder, cold, constant, examples, models, pairs, plans, proves
from specref import (block, Chain, exact, generate, iid, law_of, match, points, reject, rounds, Rows,
                     Seeded, TableModel, target_law, Tree, tv_outcomes, Verdict)
from specref.core.rng import verdict_tape
from specref.verify.block import mean_accepted_block, excess_mass, prefix_weights
from specref.verify.reject import accepted_at_least

F = Fraction
lengths = st.integers(1, 3)

def chain(q, tokens, ctx=(0,)):
    "The chain of `tokens`, each edge with the distribution of the model `q`"
    tree = Tree(ctx)
    for i, x in enumerate(tokens): tree.add(i, x, q.law(tree.text(i)))
    return tree

def chains(q, gamma, ctx=(0,)): return [(chain(q, x, ctx), w) for x, w in target_law(q, ctx, gamma).items()]

def one_round(p, q, verify, gamma):
    "The distribution of the number of accepted tokens"
    return law_of(lambda rng: next(rounds(p, Chain(q, gamma), verify, (0,), rng)).verdict.node)

def at_least(law, i): return sum(w for k, w in law.items() if k >= i)

def ratios(p, tree):
    drafted = range(1, len(tree))
    return [p.law(tree.text(c - 1))[tree.token[c]] / tree.law[c][tree.token[c]] for c in drafted]

# Exactness

@proves("thm-block")
@examples(40, models(st.integers(2, 4)), plans(4, k=1), lengths)
def test_chains(pair, steps, n):
    "One round and its continuation: edges drawn in every way, probes between them, zeros, ties, p = q"
    verifier_contract(pair[0], Plan(pair[1], steps), block, (0,), n)

@proves("lem-weight")
@examples(25, models(), lengths, st.integers(0, 3), st.integers(1, 2), st.integers(0, 10**6))
def test_the_weight_of_a_prefix(pair, gamma, i, n, seed):
    "Given x^i: at least i tokens are accepted and z follows, with probability w_i P(z | x^i)"
    (p, q), i = pair, min(i, gamma)
    head = Chain(q, gamma)((0,), Seeded(seed)).path(i)
    def run(rng):
        tree = chain(q, head)
        for j in range(i, gamma): tree.grow(j, iid(q.law(tree.text(j))), rng)
        v = block(p(tree), tree, rng)
        return v.tokens(tree)[i:i + n] if v.node >= i else None
    got, start = law_of(run), chain(q, head)
    w = prefix_weights(p(start), start).get(i, 0)
    assert got.pop(None, 0) == 1 - w
    want = {z: w*v for z, v in target_law(p, (0, *head), n).items() if w}
    assert continued(got, p, (0, *head), n) == Counter(want)

# How many tokens

@proves("cor-block-accepted")
@examples(25, models(st.integers(2, 4)), lengths)
def test_accepted_tokens(pair, gamma):
    "E[A], P(A >= i) and P(A = i), by enumeration of rounds, are the means of weights and excess masses"
    p, q = pair
    got = one_round(p, q, block, gamma)
    weighed = [(t, v, prefix_weights(p(t), t)) for t, v in chains(q, gamma)]
    assert got.mean() == mean_accepted_block(p, q, (0,), gamma)
    for i in range(gamma + 1):
        assert at_least(got, i) == sum(v * w.get(i, 0) for _, v, w in weighed)
        assert got.get(i, 0) == sum(v * excess_mass(p(t), t, i, w.get(i, 0)) for t, v, w in weighed)

@proves("thm-block-above")
@examples(20, models(st.integers(2, 4)), st.integers(1, 3))
def test_never_below_token_by_token_verification(pair, gamma):
    "At every prefix of every chain, and so in the mean; with one token the two are equal"
    p, q = pair
    for tree, _ in chains(q, gamma):
        w, t = prefix_weights(p(tree), tree), 1
        for i, ratio in enumerate(ratios(p, tree), 1):
            t *= min(1, ratio)
            assert t <= w.get(i, 0) <= 1
    assert accepted_at_least(p, q, (0,), 1) == mean_accepted_block(p, q, (0,), 1)

@proves("prop-reflected")
@examples(40, models(st.integers(2, 4)), st.integers(1, 6), st.integers(0, 10**6))
def test_reflected_walk(pair, gamma, seed):
    "w_i = R_i / max(1, R_1, ..., R_i), and 0 from the first ratio of 0 on"
    tree = Chain(pair[1], gamma)((0,), Seeded(seed))
    R = [prod(ratios(pair[0], tree)[:i]) for i in range(gamma + 1)]
    w = prefix_weights(pair[0](tree), tree)
    assert [w.get(i, 0) for i in range(gamma + 1)] == [R[i] / max(R[:i + 1]) for i in range(gamma + 1)]
    assert all(w.values()) and list(w) == list(range(len(w)))

# Optimality

def prefix_rates(p, q, verify, gamma):
    "P(the chain begins with s, and at least len(s) tokens are accepted), for every string s"
    a = Counter()
    for tree, v in chains(q, gamma):
        for node, w in law_of(lambda rng: verify(p(tree), tree, rng).node).items():
            for i in range(node + 1): a[tree.path(i)] += v*w
    return a

def either(p, tree, rng): return block(p, tree, rng) if rng.coin(1, of=3) else match(p, tree, rng)

RULES = dict(reject=reject, match=match, either=either)

@proves("thm-block-optimal")
@examples(25, models(), st.sampled_from(sorted(RULES)), st.integers(1, 3))
def test_other_rules_stay_below(pair, rule, gamma):
    "Other exact rules: at every string at most Q(s) w(s), which block attains"
    p, q = pair
    most = {}
    for tree, _ in chains(q, gamma):
        for i, w in prefix_weights(p(tree), tree).items():
            most[tree.path(i)] = target_law(q, (0,), i)[tree.path(i)] * w
    verifier_contract(p, Chain(q, min(gamma, 2)), RULES[rule], (0,), 2)
    assert prefix_rates(p, q, block, gamma) == Counter(most)
    assert all(a <= most.get(s, 0) for s, a in prefix_rates(p, q, RULES[rule], gamma).items())

def best(p, q, gamma, worth):
    "The largest mean of worth(accepted) of a lossless rule: a linear program on (chain, accepted, token)"
    drafted = target_law(q, (0,), gamma)
    outs = [(x, i, y) for x in drafted for i in range(gamma + 1) for y in range(p.V)]
    def begins(text, z):
        "The probability that `text`, continued by the target, begins with z"
        if text[:len(z)] != z[:len(text)]: return 0.
        return float(prod((p.law((0, *z[:k]))[z[k]] for k in range(len(text), len(z))), start=F(1)))
    rows, due = [[float(out[0] == x) for out in outs] for x in drafted], [*map(float, drafted.values())]
    for n in range(1, gamma + 2):
        for z in product(range(p.V), repeat=n):
            rows.append([begins((*x[:i], y), z) for x, i, y in outs])
            due.append(float(target_law(p, (0,), n).get(z, 0)))
    found = linprog([-float(worth(i)) for _, i, _ in outs], A_eq=rows, b_eq=due, method="highs")
    assert found.success, found.message
    return -found.fun

@proves("thm-block-optimal")
@examples(8, models(st.integers(2, 3)))
def test_the_best_rule_by_a_linear_program(pair):
    "Over all rules on chains of two: block has the most accepted tokens and the most full chains"
    p, q = pair
    assert abs(best(p, q, 2, lambda i: i) - float(mean_accepted_block(p, q, (0,), 2))) < 1e-7
    assert abs(best(p, q, 2, lambda i: i == 2) - float(one_round(p, q, block, 2).get(2, 0))) < 1e-7

def ceiling(p, q, i):
    Q = target_law(q, (0,), i)
    return sum(min(w, Q.get(s, 0)) for s, w in target_law(p, (0,), i).items())

@proves("prop-block-ceiling")
@examples(20, models(), lengths)
def test_the_ceiling(pair, gamma):
    "P(A >= i) <= Σ min(P, Q) over strings of i tokens, with equality for the first token"
    got = one_round(*pair, block, gamma)
    for i in range(1, gamma + 1): assert at_least(got, i) <= ceiling(*pair, i)
    assert mean_accepted_block(*pair, (0,), 1) == ceiling(*pair, 1)

# Capped hierarchical speculative decoding, from its own definitions

def hsd_terms(p, q, x, ctx=(0,)):
    "For each prefix of the chain x: min(1, R*), D*(p, q), D*(q, p), and (R* - 1)+ Q of each next token"
    def joint(m, s): return prod((m.law((*ctx, *s[:k]))[s[k]] for k in range(len(s))), start=F(1))
    R = [joint(p, x[:i]) / joint(q, x[:i]) for i in range(len(x) + 1)]
    for t in range(len(x) + 1):
        cap = max([F(1), *R[:t + 1]])
        above = [joint(p, (*x[:t], y)) / cap - joint(q, (*x[:t], y)) for y in range(p.V)]
        plus = [max(a, 0) for a in above]
        yield min(1, R[t] / max([F(1), *R[:t]])), sum(plus), sum(max(-a, 0) for a in above), plus

@proves("prop-hsd")
@examples(20, models(), st.integers(1, 3))
def test_hsd_term_by_term(pair, gamma):
    "Weights, both divergences and the masses of the correction, at every prefix of every chain"
    p, q = pair
    for tree, _ in chains(q, gamma):
        w, Q = prefix_weights(p(tree), tree), 1
        for t, (capped, up, down, plus) in enumerate(hsd_terms(p, q, tree.path(gamma))):
            wt = w.get(t, 0)
            assert capped == wt
            if t == gamma: break
            S, row = excess_mass(p(tree), tree, t, wt), wt*p.law(tree.text(t)) - tree.law[t + 1]
            assert (up, down, plus) == (Q*S, Q*(S + 1 - wt), [Q*max(a, 0) for a in row])
            Q *= tree.law[t + 1][tree.token[t + 1]]

# The tokens after a rejection

def rest(p, q, verify, gamma):
    "The distributions of the draft tokens after the rejected one, given the emitted tokens"
    def run(rng):
        r = next(rounds(p, Chain(q, gamma), verify, (0,), rng))
        return r.tokens, r.tree.path(gamma)[len(r.tokens):]
    groups = {}
    for (emitted, behind), w in law_of(run).items(): groups.setdefault(emitted, Counter())[behind] += w
    return {emitted: {b: w / sum(g.values()) for b, w in g.items()} for emitted, g in groups.items()}

@proves("prop-unseen")
@examples(25, models(), pairs(st.just(3)), st.integers(2, 3))
def test_the_draft_tokens_after_a_rejection(pair, pq, gamma):
    "If q ignores the text, the draft tokens after a rejection still have q with `reject`, not with `block`"
    p, q = pair[0], constant(*pq[1])
    for emitted, behind in rest(p, q, reject, gamma).items():
        assert behind == target_law(q, (0,), max(0, gamma - len(emitted)))
    p, q = (constant(*law) for law in CANON)
    found = rest(p, q, block, 2).items()
    assert any(behind != target_law(q, (0,), max(0, 2 - len(emitted))) for emitted, behind in found)

# Deterministic proposals

@examples(25, models(), st.lists(st.integers(0, 2), max_size=3))
def test_deterministic_proposals(pair, tokens):
    "Point masses for q: the verdicts of `reject`; against a target at temperature 0, those of `match`"
    tree = Tree((0,))
    for i, x in enumerate(tokens): tree.grow(i, points([x], 3, exact=True), Seeded(0))
    for p, verify in ((pair[0], reject), (cold(pair[0]), match)):
        found, want = (law_of(lambda rng: rule(p(tree), tree, rng)) for rule in (block, verify))
        assert found == want

# Floats

@examples(12, models(), st.integers(1, 2), st.booleans())
def test_floats(pair, gamma, near):
    "In float64, and with q an ulp from p: the distribution to twelve digits"
    floats = TableModel(3, lambda text: pair[0].law(text).astype(float))
    def shifted(row): return np.array([np.nextafter(x, x + (-1)**i) if x else x for i, x in enumerate(row)])
    q = TableModel(3, lambda text: shifted(floats.law(text)) if near else pair[1].law(text).astype(float))
    got = law_of(lambda rng: generate(floats, Chain(q, gamma), block, (0,), 2, rng))
    assert tv_outcomes(got, target_law(pair[0], (0,), 2)) < 1e-12

def test_no_overflow():
    "A ratio beyond the largest float is a weight of one"
    tree = Tree((0,))
    tree.add(0, 0, np.array([1e-310, 1.]))
    with np.errstate(all="raise", under="ignore"):
        assert prefix_weights([np.array([.5, .5])], tree) == {0: 1, 1: 1}
        assert block([np.array([.5, .5])]*2, tree, Seeded(0)).node == 1

# Which rows are read, which coins are drawn

def near_chain(V, gamma, seed=0, spread=.3):
    "Rows of a target and a chain from distributions near them"
    rng = np.random.default_rng(seed)
    p = rng.standard_exponential((gamma + 1, V))
    q = p * rng.lognormal(0, spread, p.shape)
    p, q = (w / w.sum(1, keepdims=True) for w in (p, q))
    tree = Tree((0,))
    for i in range(gamma): tree.grow(i, iid(q[i]), Seeded(seed, (i,)))
    return p, tree

class Counted:
    "Rows that count how often each is made, and return one row at a time only"
    def __init__(self, given):
        self.made, self.given = Counter(), given
        self.rows = Rows(self.note, len(given), len(given[0]))
    def note(self, i):
        self.made[i] += 1
        return self.given[i]
    def __getitem__(self, i):
        assert isinstance(i, int), "more than one row at a time"
        return self.rows[i]
    def __array__(self, *args, **kw): raise AssertionError("rows were stacked")
    def __iter__(self): raise AssertionError("all rows were read")

@given(st.integers(0, 10**6), st.floats(.1, 3))
def test_rows_are_read_when_needed(seed, spread):
    "Each at most once, one at a time; the last only when the whole chain was accepted"
    rows, tree = near_chain(16, 6, seed, spread)
    p = Counted(rows)
    node = block(p, tree, Seeded(seed)).node
    assert p.made == {i: 1 for i in range(6 + (node == 6))}

def test_nothing_is_read_after_an_impossible_token():
    "The target gives the second token probability 0: no row after it is read, no coin drawn there"
    p, tree, table = constant(1, 1, 0), Tree((0,)), {}
    for i, x in enumerate((0, 2, 1, 1)): tree.add(i, x, exact(1, 1, 1))
    rows = Counted([p.law(tree.text(i)) for i in range(5)])
    assert block(rows, tree, Recorder(Seeded(0), table)).node <= 1
    assert set(rows.made) == {0, 1} and not {("coin", c) for c in (2, 3, 4)} & set(table)

@given(st.integers(0, 10**6))
def test_coins_are_drawn_when_needed(seed):
    "From the end back to the accepted node, and none for the root; one pick, at the accepted node"
    (rows, tree), table = near_chain(8, 5, seed, 1.), {}
    node = block(rows, tree, Recorder(Seeded(seed), table)).node
    assert set(table) == {("coin", c) for c in range(max(node, 1), 6)} | {("pick", node)}

TAPES = (0., .24999, Verdict(2, 1)), (0., .25, Verdict(0, 1)), (.9, .9, Verdict(0, 1))

@pytest.mark.parametrize("first,last,verdict", TAPES)
def test_a_verdict_on_a_tape(first, last, verdict):
    "The chain 0 0: accepted below its weight of 1/4, strictly; at the first token, of excess 0, never"
    p, q = constant(1, 2), constant(2, 1)
    tree = chain(q, (0, 0))
    assert block(p(tree), tree, verdict_tape([0, first, last], [.5, .5, .5])) == verdict
