"Chapter 12: a chain judged from its end is exact, accepts its weights and nothing accepts more"
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog

from contracts import continued, verifier_contract
from helpers import CANON, Plan, Recorder, cold, constant, killer, models, pairs, plans, proves, refuses
from specref.core.tree import chain_nodes
from specref.verify.block import mean_accepted_block, block, block_residual, excess_mass, prefix_weights
from specref.core.rng import Seeded, tv_outcomes, law_of, mean_of, verdict_tape
from specref.core.law import exact
from specref.core.loop import Verdict, generate, loop_law, match, no_draft, rounds
from specref.verify.reject import Chain, accepted_at_least, reject
from specref.core.target import Rows, TableModel, random_table, target_law
from specref.core.tree import Tree, iid, points, without_replacement

F = Fraction
BIN = constant(1, 2), constant(2, 1)
lengths = st.integers(1, 3)


def chain(q, tokens, ctx=(0,)):
    "The chain of `tokens`, each edge with the law of the model `q`"
    tree = Tree(ctx)
    for i, x in enumerate(tokens): tree.add(i, x, q.law(tree.text(i)))
    return tree


def chains(q, gamma, ctx=(0,)): return [(chain(q, x, ctx), w) for x, w in target_law(q, ctx, gamma).items()]


def one_round(p, q, verify, gamma, ctx=(0,)): return law_of(lambda rng: next(rounds(p, Chain(q, gamma), verify, ctx, rng)).verdict.node)


def ratios(p, tree): return [p.law(tree.text(c - 1))[tree.token[c]] / tree.law[c][tree.token[c]] for c in range(1, len(tree))]


def by_chain(p, q, gamma, ctx=(0,)): return sum(accepted_at_least(p, q, ctx, i) for i in range(1, gamma + 1))


# Exactness

@proves("thm-block")
@settings(max_examples=80)
@given(models(st.integers(2, 5)), lengths, st.integers(1, 3))
def test_chains(pair, gamma, n):
    "One round and its continuation, on tables that depend on the whole text: zeros, ties, disjoint supports, equal and nearly equal laws"
    verifier_contract(pair[0], Chain(pair[1], gamma if pair[0].V < 5 else min(gamma, 2)), block, (0,), n)


@proves("thm-block")
@settings(max_examples=80)
@given(models(), plans(4, k=1), lengths)
def test_chains_of_every_kind(pair, steps, n):
    "Sampled, looked up and mixed edges, probes between them: whatever the edge, it states its law"
    verifier_contract(pair[0], Plan(pair[1], steps), block, (0,), n)


@proves("thm-block")
@settings(max_examples=20)
@given(models(), st.integers(1, 2), st.sets(st.integers(0, 2), max_size=1))
def test_whole_loops(pair, gamma, stop):
    "Every road of three tokens, nothing merged"
    got = law_of(lambda rng: generate(pair[0], Chain(pair[1], gamma), block, (0, 1), 3, rng, stop=stop))
    assert got == target_law(pair[0], (0, 1), 3, stop=stop)


@proves("thm-block")
@pytest.mark.parametrize("pair,gamma,n", [(killer(), 2, 4), (killer(), 3, 5), (BIN, 4, 6)])
def test_merged_loops(pair, gamma, n):
    "The pair that kills every mutant tried, and two tokens with long chains, beyond one block"
    assert loop_law(pair[0], Chain(pair[1], gamma), block, (0,), n) == target_law(pair[0], (0,), n)


@proves("lem-weight")
@settings(max_examples=40)
@given(models(), lengths, st.integers(0, 3), st.integers(1, 2), st.integers(0, 10**6))
def test_the_weight_of_a_prefix(pair, gamma, i, n, seed):
    "Given that the chain begins with x^i: at least i accepted, and the text goes on with z, has probability w_i P(z | x^i)"
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
    assert continued(got, p, (0, *head), n) == Counter({z: w*v for z, v in target_law(p, (0, *head), n).items() if w})


# How many tokens

@proves("cor-block-accepted")
@settings(max_examples=60)
@given(models(st.integers(2, 4)), lengths)
def test_accepted_tokens(pair, gamma):
    "E[accepted], P(A >= i) and P(A = i), by enumeration of rounds, are the means of weights and surpluses"
    p, q = pair
    got, all_chains = one_round(p, q, block, gamma), chains(q, gamma)
    assert got.mean() == mean_accepted_block(p, q, (0,), gamma) == sum(v * (sum(prefix_weights(p(t), t).values()) - 1) for t, v in all_chains)
    for i in range(gamma + 1):
        assert sum(w for k, w in got.items() if k >= i) == sum(v * prefix_weights(p(t), t).get(i, 0) for t, v in all_chains)
        assert got.get(i, 0) == sum(v * excess_mass(p(t), t, i, prefix_weights(p(t), t).get(i, 0)) for t, v in all_chains)


def test_published_numbers():
    "Accepted tokens for γ = 1..4 on two tokens, for γ = 2, 3 on the pair that kills every mutant, beside those of the chain rule"
    assert [mean_accepted_block(*BIN, (0,), g) for g in range(5)] == [0, F(2, 3), F(11, 9), F(5, 3), F(166, 81)]
    assert [by_chain(*BIN, g) for g in (1, 2, 3, 4)] == [F(2, 3), F(10, 9), F(38, 27), F(130, 81)]
    assert [mean_accepted_block(*killer(), (0,), g) for g in (2, 3)] == [F(133, 120), F(2359, 1800)]
    assert [by_chain(*killer(), g) for g in (2, 3)] == [F(21, 20), F(117, 100)]
    assert mean_accepted_block(constant(3, 2, 1), constant(1, 2, 3), (0,), 2) == F(7, 6)


@proves("thm-block-above")
@settings(max_examples=80)
@given(models(st.integers(2, 4)), st.integers(1, 4))
def test_never_below_the_chain_rule(pair, gamma):
    "At every prefix of every chain, and so in the mean; with one token they are the same"
    p, q = pair
    for tree, _ in chains(q, gamma):
        w, t = prefix_weights(p(tree), tree), 1
        for i, r in enumerate(ratios(p, tree), 1): assert (t := t*min(1, r)) <= w.get(i, 0) <= 1
    assert by_chain(p, q, gamma) <= mean_accepted_block(p, q, (0,), gamma)
    assert by_chain(p, q, 1) == mean_accepted_block(p, q, (0,), 1)


@proves("thm-block-above")
@settings(max_examples=30)
@given(models(), lengths)
def test_never_below_by_enumeration(pair, gamma):
    "P(A >= i) of the two judges, from every road of one round"
    a, b = (one_round(*pair, verify, gamma) for verify in (reject, block))
    for i in range(1, gamma + 1): assert sum(w for k, w in a.items() if k >= i) <= sum(w for k, w in b.items() if k >= i)


@proves("prop-reflected")
@settings(max_examples=80)
@given(models(st.integers(2, 4)), st.integers(1, 6), st.integers(0, 10**6))
def test_reflected_walk(pair, gamma, seed):
    "w_i = R_i / max(1, R_1, ..., R_i), and 0 from the first ratio of 0 on"
    tree = Chain(pair[1], gamma)((0,), Seeded(seed))
    R, w = [prod(ratios(pair[0], tree)[:i]) for i in range(gamma + 1)], prefix_weights(pair[0](tree), tree)
    assert [w.get(i, 0) for i in range(gamma + 1)] == [R[i] / max(R[:i + 1]) for i in range(gamma + 1)]
    assert all(w.values()) and list(w) == list(range(len(w)))


# Nothing does better

def stands(p, q, verify, gamma):
    "P(the chain begins with s and at least len(s) tokens are accepted), for every s"
    a = Counter()
    for tree, v in chains(q, gamma):
        for node, w in law_of(lambda rng: verify(p(tree), tree, rng).node).items():
            for i in range(node + 1): a[tree.path(i)] += v*w
    return a


def first_only(p, tree, rng):
    "Judges the first token and forgets the others"
    short = chain_of(tree, 1)
    return reject(p, short, rng)


def chain_of(tree, n):
    "The first n tokens of a chain"
    out = Tree(tree.ctx)
    for i in range(min(n, len(tree) - 1)): out.add(i, tree.token[i + 1], tree.law[i + 1])
    return out


def either(p, tree, rng): return block(p, tree, rng) if rng.coin(1, of=3) else match(p, tree, rng)


RULES = dict(reject=reject, match=match, first_only=first_only, either=either)


@proves("thm-block-optimal")
@settings(max_examples=40)
@given(models(), st.sampled_from(sorted(RULES)), st.integers(1, 3))
def test_other_rules_stay_below(pair, rule, gamma):
    "Exact rules of other kinds: at every string below Q(s) w(s), which block attains"
    p, q = pair
    most = {tree.path(i): target_law(q, (0,), i)[tree.path(i)] * w for tree, _ in chains(q, gamma) for i, w in prefix_weights(p(tree), tree).items()}
    verifier_contract(p, Chain(q, min(gamma, 2)), RULES[rule], (0,), 2)
    assert stands(p, q, block, gamma) == Counter(most)
    assert all(a <= most.get(s, 0) for s, a in stands(p, q, RULES[rule], gamma).items())


def best(p, q, gamma, worth):
    "The largest mean of worth(accepted) over all rules that keep the law: a linear program with a variable for (chain, accepted, token)"
    V, tokens = p.V, range(p.V)
    outs = [(x, i, y) for x in target_law(q, (0,), gamma) for i in range(gamma + 1) for y in tokens]
    rows, due = [], []
    for x, w in target_law(q, (0,), gamma).items():
        rows.append([float(o[0] == x) for o in outs]); due.append(float(w))
    for n in range(1, gamma + 2):
        for z in product(tokens, repeat=n):   # what is emitted, continued by the target, begins with z
            said = [target_law(p, (0,), n).get(z, F(0))]
            more = lambda s: prod((p.law((0, *z[:k]))[z[k]] for k in range(len(s), n)), start=F(1)) if s[:n] == z[:len(s)] else 0
            rows.append([float(more((*x[:i], y))) for x, i, y in outs]); due += map(float, said)
    found = linprog([-float(worth(i)) for _, i, _ in outs], A_eq=rows, b_eq=due, method="highs")
    assert found.success, found.message
    return -found.fun


@proves("thm-block-optimal")
@settings(max_examples=12)
@given(models(st.integers(2, 3)))
def test_the_best_rule_by_a_linear_program(pair):
    "Over all rules on chains of two: the most accepted tokens, and the most full chains, are those of block"
    p, q = pair
    assert abs(best(p, q, 2, lambda i: i) - float(mean_accepted_block(p, q, (0,), 2))) < 1e-7
    assert abs(best(p, q, 2, lambda i: i == 2) - float(one_round(p, q, block, 2).get(2, 0))) < 1e-7


def ceiling(p, q, i):
    Q = target_law(q, (0,), i)
    return sum(min(w, Q.get(s, 0)) for s, w in target_law(p, (0,), i).items())


@proves("prop-block-ceiling")
@settings(max_examples=40)
@given(models(), lengths)
def test_the_ceiling(pair, gamma):
    "P(A >= i) <= Σ min(P, Q) over strings of i tokens; for the first token it is touched"
    got = one_round(*pair, block, gamma)
    for i in range(1, gamma + 1): assert sum(w for k, w in got.items() if k >= i) <= ceiling(*pair, i)
    assert 1 - got.get(0, 0) <= ceiling(*pair, 1) and mean_accepted_block(*pair, (0,), 1) == ceiling(*pair, 1)


def test_the_ceiling_is_not_reached():
    "Two tokens, γ = 2: 4/3 by the ceilings, 11/9 at most"
    assert sum(ceiling(*BIN, i) for i in (1, 2)) == F(4, 3) > mean_accepted_block(*BIN, (0,), 2) == F(11, 9)


# Capped hierarchical speculative decoding, from its own definitions: joint products, capped ratios, two divergences

def hsd_terms(p, q, x, ctx=(0,)):
    "For each prefix of the chain x: min(1, R*), D*(p, q), D*(q, p) and the masses (R* - 1)+ Q of the next token"
    joint = lambda m, s: prod((m.law((*ctx, *s[:k]))[s[k]] for k in range(len(s))), start=F(1))
    R = [joint(p, x[:i]) / joint(q, x[:i]) for i in range(len(x) + 1)]
    for t in range(len(x) + 1):
        cap = max([F(1), *R[:t + 1]])
        above = [joint(p, (*x[:t], y)) / cap - joint(q, (*x[:t], y)) for y in range(p.V)]
        plus = [max(a, 0) for a in above]
        yield min(1, R[t] / max([F(1), *R[:t]])), sum(plus), sum(max(-a, 0) for a in above), plus


def hsd(q, ctx=(0,)):
    "The judge made of these terms"
    def verify(p, tree, rng):
        x = tree.path(len(tree) - 1)
        terms = list(hsd_terms(p, q, x, ctx))
        if rng.coin(terms[-1][0]): return Verdict(len(x), rng.pick(p.law(ctx + x)))
        for t in reversed(range(len(x))):
            _, up, down, plus = terms[t]
            if t == 0 or rng.coin(up, of=down): return Verdict(t, rng.pick(exact(*plus)))
    return verify


@proves("prop-hsd")
@settings(max_examples=60)
@given(models(), st.integers(1, 3))
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


@proves("prop-hsd")
@settings(max_examples=25)
@given(models(), st.integers(1, 2))
def test_hsd_is_the_same_judge(pair, gamma):
    "The law of verdicts on every chain"
    p, q = pair
    for tree, _ in chains(q, gamma):
        assert law_of(lambda rng: hsd(q)(p, tree, rng)) == law_of(lambda rng: block(p(tree), tree, rng))


# What it has looked at

def rest(p, q, verify, gamma):
    "Given what was accepted and emitted: the laws of the drafted tokens behind the refused one"
    def run(rng):
        r = next(rounds(p, Chain(q, gamma), verify, (0,), rng))
        return r.tokens, r.tree.path(gamma)[len(r.tokens):]
    groups = {}
    for (said, behind), w in law_of(run).items(): groups.setdefault(said, Counter())[behind] += w
    return {said: {b: w / sum(g.values()) for b, w in g.items()} for said, g in groups.items()}


@proves("prop-unseen")
@settings(max_examples=25)
@given(models(), pairs(st.just(3)), st.integers(2, 3))
def test_the_unseen_rest(pair, pq, gamma):
    "A target that depends on the text, a draft that does not: what lies behind the first no of `reject` has the law it was drawn from"
    p, q = pair[0], constant(*pq[1])
    for said, behind in rest(p, q, reject, gamma).items(): assert behind == target_law(q, (0,), max(0, gamma - len(said)))


@proves("prop-unseen")
def test_the_seen_rest():
    "Behind the refusals of `block` it has not"
    p, q = (constant(*law) for law in CANON)
    assert any(behind != target_law(q, (0,), max(0, 2 - len(said))) for said, behind in rest(p, q, block, 2).items())


@dataclass(frozen=True)
class Until:
    "Draws on while a coin of the text so far, its last token included, says so"
    model: object
    seed: int
    def __call__(self, ctx, rng):
        tree, i = Tree(ctx), 0
        while i < 3 and np.random.default_rng([self.seed, *tree.text(i)]).random() < .7: i, = tree.grow(i, iid(self.model(tree)[i]), rng)
        return tree


@settings(max_examples=40)
@given(models(), st.integers(0, 999))
def test_a_length_that_does_not_look_ahead(pair, seed):
    "Stopping by what was drawn so far keeps the law; empty drafts among them"
    verifier_contract(pair[0], Until(pair[1], seed), block, (0,), 3)


@pytest.mark.parametrize("verify", [reject, block])
def test_taking_a_token_back(verify):
    "Equal laws (3/4, 1/4), the unlikely token dropped once it was seen: (15/16, 1/16)"
    both = constant(3, 1)
    def choosy(ctx, rng):
        tree, law = Tree(ctx), both.law(ctx)
        if (x := rng.pick(law)) == 0: tree.add(0, x, law)
        return tree
    assert loop_law(both, choosy, verify, (0,), 1) == {(0,): F(15, 16), (1,): F(1, 16)}


# Corner cases

def test_the_empty_chain():
    "γ = 0: one token from p"
    p = exact(1, 2, 3)
    assert law_of(lambda rng: block([p], Tree((0,)), rng)) == {Verdict(0, x): w for x, w in enumerate(p)}


@given(models(), st.integers(1, 3))
def test_equal_laws(pair, gamma):
    "p = q: everything is accepted, and the bonus comes from p"
    assert one_round(pair[0], pair[0], block, gamma) == {gamma: 1}


def test_disjoint_laws():
    "Nothing is accepted, and the token comes from p"
    p, q = constant(1, 0, 2), constant(0, 1, 0)
    assert law_of(lambda rng: next(rounds(p, Chain(q, 3), block, (0,), rng)).tokens) == {(0,): F(1, 3), (2,): F(2, 3)}


@settings(max_examples=60)
@given(models(), st.lists(st.integers(0, 2), min_size=1, max_size=3))
def test_certain_tokens(pair, tokens):
    "Points for laws: the same law of verdicts as the chain rule; against a target at temperature 0, the longest common beginning"
    tree = Tree((0,))
    for i, x in enumerate(tokens): tree.grow(i, points([x], 3, exact=True), Seeded(0))
    p = pair[0]
    assert law_of(lambda rng: block(p(tree), tree, rng)) == law_of(lambda rng: reject(p(tree), tree, rng))
    assert law_of(lambda rng: block(cold(p)(tree), tree, rng)) == law_of(lambda rng: match(cold(p)(tree), tree, rng))


def test_one_token(): assert one_round(constant(1), constant(1), block, 3) == {3: 1}


# Floats

@settings(max_examples=60)
@given(models(), st.integers(1, 2), st.integers(0, 2))
def test_floats(pair, gamma, ulps):
    "In float64, and with q a few ulps from p: the law to twelve digits"
    floats = TableModel(3, lambda text: pair[0].law(text).astype(float))
    shift = lambda row: np.array([np.nextafter(x, x + (-1)**i) if x else x for i, x in enumerate(row)])
    q = TableModel(3, lambda text: shift(floats.law(text)) if ulps else pair[1].law(text).astype(float))
    got = law_of(lambda rng: generate(floats, Chain(q, gamma), block, (0,), 3, rng))
    assert tv_outcomes(got, target_law(pair[0], (0,), 3)) < 1e-12


@settings(max_examples=60)
@given(models(), st.integers(1, 5), st.integers(0, 10**6))
def test_fractions_and_floats_agree(pair, gamma, seed):
    "The same noise, the same verdict"
    tree, float_tree = Chain(pair[1], gamma)((0,), Seeded(seed)), Tree((0,))
    for c in range(1, len(tree)): float_tree.add(c - 1, tree.token[c], tree.law[c].astype(float))
    rows = [pair[0].law(tree.text(i)) for i in range(len(tree))]
    assert block(rows, tree, Seeded(seed)) == block([r.astype(float) for r in rows], float_tree, Seeded(seed))


def test_no_overflow():
    "A ratio beyond the largest float is a weight of one"
    tree = Tree((0,)); tree.add(0, 0, np.array([1e-310, 1.]))
    with np.errstate(all="raise", under="ignore"):
        assert prefix_weights([np.array([.5, .5])], tree) == {0: 1, 1: 1}
        assert block([np.array([.5, .5])]*2, tree, Seeded(0)).node == 1


# What is read, and what is thrown

def wide(V, gamma, seed=0, spread=.3):
    "Rows of a target and a chain from laws near them"
    rng = np.random.default_rng(seed)
    p = rng.standard_exponential((gamma + 1, V)); p /= p.sum(1, keepdims=True)
    q = p * rng.lognormal(0, spread, p.shape); q /= q.sum(1, keepdims=True)
    tree = Tree((0,))
    for i in range(gamma): tree.grow(i, iid(q[i]), Seeded(seed, (i,)))
    return p, tree


class Counted:
    "Rows that count how often each is made, and refuse everything but one row at a time"
    def __init__(self, rows): self.made, self.rows = Counter(), Rows(lambda i: self.note(i, rows), len(rows), len(rows[0]))
    def note(self, i, rows): self.made[i] += 1; return rows[i]
    def __getitem__(self, i):
        assert isinstance(i, int), "more than one row at a time"
        return self.rows[i]
    def __array__(self, *args, **kw): raise AssertionError("rows were stacked")
    def __iter__(self): raise AssertionError("all rows were asked for")


@given(st.integers(0, 10**6), st.floats(.1, 3))
def test_rows_are_read_when_needed(seed, spread):
    "Each at most once, one at a time; the last only when the whole chain was accepted"
    rows, tree = wide(16, 6, seed, spread)
    p = Counted(rows)
    node = block(p, tree, Seeded(seed)).node
    assert p.made == {i: 1 for i in range(6 + (node == 6))}


def test_nothing_is_read_behind_an_impossible_token():
    "The target gives the second token no weight: neither the rows behind it nor coins for what stands there"
    p, tree, table = constant(1, 1, 0), Tree((0,)), {}
    for i, x in enumerate((0, 2, 1, 1)): tree.add(i, x, exact(1, 1, 1))
    rows = Counted([p.law(tree.text(i)) for i in range(5)])
    assert block(rows, tree, Recorder(Seeded(0), table)).node <= 1
    assert set(rows.made) == {0, 1} and not {("coin", c) for c in (2, 3, 4)} & set(table)


@given(st.integers(0, 10**6))
def test_coins_are_thrown_when_needed(seed):
    "From the end back to the accepted node, and none for the root; one pick, at the accepted node"
    (rows, tree), table = wide(8, 5, seed, 1.), {}
    node = block(rows, tree, Recorder(Seeded(seed), table)).node
    assert set(table) == {("coin", c) for c in range(max(node, 1), 6)} | {("pick", node)}


@pytest.mark.parametrize("seed", range(4))
def test_memory(seed):
    "On 32,000 tokens a verdict needs room for a few rows, however many it has seen"
    V = 32_000
    rows, tree = wide(V, 8, seed)
    class No(Seeded):
        def coin(self, a, of=1, at=None): return False
    tracemalloc.start()
    try:
        assert block(list(rows), tree, No(seed)).node == 0
        assert tracemalloc.get_traced_memory()[1] < 4.5 * 8*V
    finally: tracemalloc.stop()


@pytest.mark.parametrize("first,last,verdict", [(0., .24999, Verdict(2, 1)), (0., .25, Verdict(0, 1)), (.9, .9, Verdict(0, 1))])
def test_a_verdict_on_a_tape(first, last, verdict):
    "The chain 0 0 on two tokens: yes at the end below its weight of 1/4, strictly; at the first token, whose surplus is 0, never"
    p, q = BIN
    tree = chain(q, (0, 0))
    assert block(p(tree), tree, verdict_tape([0, first, last], [.5, .5, .5])) == verdict


def test_weights_by_hand():
    "The four chains of the page, and the terms of the first"
    p, q = BIN
    assert [list(prefix_weights(p(t), t).values()) for t, _ in chains(q, 2)] == [[1, F(1, 2), F(1, 4)], [1, F(1, 2), 1], [1, 1, F(1, 2)], [1, 1, 1]]
    t = chain(q, (0, 0))
    assert [excess_mass(p(t), t, i, w) for i, w in prefix_weights(p(t), t).items()] == [F(1, 3), 0, F(1, 4)]
    assert tuple(block_residual(p(t), t, 0, 1)) == (0, 1) and tuple(block_residual(p(t), t, 2, F(1, 4))) == tuple(p.law(()))


# Doors

def test_the_worked_example_of_hsd():
    "Prefix ratios .8159, 1.0327, 1.5855, 6.1171, 0: the capped ratios are the weights, and the chain rule keeps only .8159 of the first four"
    R = [Fraction(x) for x in ("1", ".8159", "1.0327", "1.5855", "6.1171", "0")]
    steps, q = [b / a for a, b in zip(R, R[1:])], exact(*[1]*8)
    rows = [np.array([r / 8, *[(1 - r / 8) / 7]*7], dtype=object) for r in steps] + [q]
    w = prefix_weights(rows, chain(constant(*[1]*8), [0]*5))
    assert w == {0: 1, 1: R[1], 2: 1, 3: 1, 4: 1} and prod(min(1, r) for r in steps[:4]) == R[1]


def test_doors():
    p, q = CANON
    tree = Tree((0,)); tree.grow(0, without_replacement(q), Seeded(0), 2)
    for f in (chain_nodes, lambda t: prefix_weights([p]*9, t), lambda t: block([p]*9, t, Seeded(0))): refuses("tree", f, tree)
    deep = chain(constant(*q), (0, 1)); deep.add(1, 2, q)
    with pytest.raises(ValueError, match="^tree: got node 1 with 2 children, wanted a chain"): block([p]*9, deep, Seeded(0))
    refuses("q", block, [exact(1, 1, 1)]*2, chain(constant(*q), (0,)), Seeded(0))
    for gamma in (-1, 1.5, None): refuses("gamma", mean_accepted_block, constant(*p), constant(*q), (0,), gamma)
    for ctx in ((), (9,), (-1,), None): refuses("ctx", mean_accepted_block, constant(*p), constant(*q), ctx, 2)
    refuses("q", mean_accepted_block, constant(*p), constant(1, 1), (0,), 2); refuses("q", mean_accepted_block, constant(1), constant(*q), (0,), 2)
    refuses("q", block, [exact(1)]*2, chain(constant(*q), (0,)), Seeded(0))


def test_probes_are_no_part_of_the_chain():
    "A probe beside an offered token is no sibling"
    tree = Tree((0,)); tree.add(0, 2); c = tree.add(0, 1, CANON[1]); tree.add(c, 0)
    assert chain_nodes(tree) == [0, c] and block([CANON[0]]*4, tree, Seeded(0)).node in (0, c)


def test_it_decodes(): assert len(generate(killer()[0], no_draft, block, (0,), 5, Seeded(0))) == 5 == len(generate(random_table(3, 1), Chain(random_table(3, 2), 3), block, (0,), 5, Seeded(0)))
