"Chapter 22: greedy decoding as a fixed point, alone and in the loop; what the target said last time as a draft"
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import cold, faithful, models, proves, refuses, seeds
from specref.verify.block import block
from specref.core.rng import Enumerator, Seeded
from specref.draft.jacobi import Jacobi, ResampledJacobi, jacobi, jacobi_sweep
from specref.core.law import greedy, one_hot
from specref.core.loop import generate, loop_law, match, autoregressive, rounds
from specref.models.embedded import DOMAINS, embedded, prompts
from specref.verify.reject import Chain, reject
from specref.core.target import TableModel, random_table, target_law
from specref.core.tree import Tree

tables = st.builds(random_table, st.integers(2, 4), seeds, st.booleans())
kinds = st.sampled_from([Jacobi, ResampledJacobi])


def greedy_text(target, ctx, m):
    "One token after another, by hand"
    out = ()
    for _ in range(m): out += (int(np.argmax(target.law(ctx + out))),)
    return out


def right(y, g): return next((i for i, (a, b) in enumerate(zip(y, g)) if a != b), len(g))


def starts(V, m): return st.lists(st.integers(0, V - 1), min_size=m, max_size=m).map(tuple)


# The iteration

@settings(max_examples=150)
@given(tables, st.integers(1, 6), st.data())
def test_a_sweep_is_every_equation_at_once(target, m, data):
    y, calls = data.draw(starts(target.V, m)), target.meter.calls
    new = jacobi_sweep(target, (0, 1), y)
    assert target.meter.calls == calls + 1
    assert new == tuple(int(np.argmax(target.law((0, 1) + y[:i]))) for i in range(m))


@proves("thm-jacobi")
@settings(max_examples=200)
@given(tables, st.integers(1, 6), st.data())
def test_the_fixed_point_is_the_greedy_text(target, m, data):
    "Any start: one more token a sweep, at most m + 1 sweeps, the end is greedy; the greedy text stops at once"
    g, start = greedy_text(target, (0,), m), data.draw(starts(target.V, m))
    ys = jacobi(target, (0,), m, start)
    prefix = [right(y, g) for y in ys]
    assert ys[0] == start and ys[-1] == g and len(ys) - 1 <= m + 1
    assert all(b >= min(a + 1, m) for a, b in zip(prefix, prefix[1:])) and all(k >= min(i, m) for i, k in enumerate(prefix))
    assert all(ys[i] != ys[i+1] for i in range(len(ys) - 2)) and jacobi(target, (0,), m, g) == [g, g]


@proves("thm-jacobi")
@settings(max_examples=40)
@given(st.integers(2, 3), seeds, st.integers(1, 4))
def test_there_is_no_other_fixed_point(V, seed, m):
    target = random_table(V, seed)
    every = [tuple(y) for y in np.ndindex(*[V] * m)]
    assert [y for y in every if jacobi_sweep(target, (0,), y) == y] == [greedy_text(target, (0,), m)]


def test_worst_and_best():
    "A chain of dependences takes m rounds, none takes two"
    worst, best = TableModel(5, lambda t: one_hot((t[-1] + 1) % 5, 5)), TableModel(5, lambda t: one_hot(len(t) % 5, 5))
    for m in range(2, 8):
        assert [len(jacobi(t, (0,), m, (0,)*m)) - 1 for t in (worst, best)] == [m + 1, 2]
        assert [len(generate(t, Jacobi(5, m), reject, (0,), m, Seeded(0)).ledger.rounds) for t in (worst, best)] == [m, 2]


# The same iteration in the loop

@proves("cor-passes")
@settings(max_examples=200)
@given(tables, st.integers(1, 6), st.sampled_from([reject, match]), st.sampled_from([Jacobi, ResampledJacobi]), st.data())
def test_rounds_are_sweeps(table, m, verify, kind, data):
    "What is emitted and what is guessed make the iterate, round by round; the counts relate as stated"
    target, start = cold(table), data.draw(starts(table.V, m))
    ys = jacobi(target, (0,), m, start)
    y = lambda t: ys[min(t, len(ys) - 1)]
    drafter, out, t = kind(target.V, m, start, exact=True), (), 0
    for round in rounds(target, drafter, verify, (0,), Enumerator()):
        assert round.tree.path(len(round.tree) - 1) == y(t)[len(out):m-1]
        t, out, drafter = t + 1, out + round.tokens, drafter.learn(round)
        said = tuple(drafter.said) if kind is Jacobi else tuple(int(np.argmax(q)) for q in drafter.said)
        assert out + said == y(t)
        if len(out) == m: break
    assert t == next(t for t in range(1, len(ys)) if ys[t][:m-1] == ys[t-1][:m-1])
    assert out == ys[-1] and t <= m and len(ys) - 1 == t + (ys[t] != ys[t-1])


@settings(max_examples=60)
@given(tables, st.integers(1, 4), st.integers(0, 6), st.integers(1, 7), st.data())
def test_blocks(table, b, h, n, data):
    "Blocks one after another, each from the same start, then plainly: the rounds are the sum of those of the blocks and of what is left"
    target, start = cold(table), data.draw(starts(table.V, b))
    out = generate(target, Jacobi(target.V, b, start, first=h), reject, (0,), h + n, Seeded(0))
    want, ctx = 0, (0,)
    for at in range(0, h, b):
        m = min(b, h - at)
        ys = jacobi(target, ctx, m, start[:m])
        want += next(t for t in range(1, len(ys)) if ys[t][:m-1] == ys[t-1][:m-1])
        ctx += ys[-1]
    assert out == greedy_text(target, (0,), h + n) and len(out.ledger.rounds) == want + n


def test_a_chain_is_cut_at_an_end_token():
    assert Jacobi(3, 5, (0, 1, 2), end=(1,))((0,), Enumerator()).path(2) == (0, 1)
    assert len(Jacobi(3, 5, (0, 1, 2), end=(1,))((0,), Enumerator())) == 3 and len(Jacobi(3, 5, (0, 1, 2))((0,), Enumerator())) == 5


def test_passes_around_an_end_token():
    "Tokens by place, 1 2 0 1 2 0 …: blocks of four take two passes each; after the first 2 has been emitted every token takes one, h or no h"
    by_place = TableModel(3, lambda t: one_hot(len(t) % 3, 3, exact=True))
    def passes(n, block=4, **how):
        out = generate(by_place, Jacobi(3, block, exact=True, **how), reject, (0,), n, Seeded(0))
        assert out == tuple((i + 1) % 3 for i in range(n))
        return out.ledger.column(3)
    assert passes(9) == [1, 3, 1, 3, 1] and passes(9, first=4) == [1, 3, 1, 1, 1, 1, 1]
    for h in (None, 2, 4, 8): assert passes(9, first=h, end=(2,)) == [1, 1 if h == 2 else 2] + [1] * (7 if h == 2 else 6)
    assert passes(9, end=(0,)) == [1, 3] + [1] * 5 and passes(9, block=9, end=(1,)) == [1] * 9
    only = TableModel(3, lambda t: one_hot(2, 3, exact=True))   # the end token comes as a correction, with guesses below it
    assert [len(generate(only, Jacobi(3, 5, end=e, exact=True), reject, (0,), 5, Seeded(0)).ledger.rounds) for e in ((), (2,))] == [2, 5]


@settings(max_examples=100)
@given(tables, kinds, st.integers(2, 5), st.sampled_from([None, 3, 9]), st.integers(1, 9), st.booleans())
def test_after_an_end_token_nothing_is_offered(table, kind, b, first, n, greedy):
    "Whatever the target: no guess behind an end token, none after one was emitted, and a pass for each token from there on"
    target = cold(table) if greedy else table
    drafter, out, late = kind(table.V, b, (0, 1), first=first, end=(1,), exact=True), (), 0
    for r in rounds(target, drafter, reject, (0,), Seeded(n)):
        drafted = r.tree.path(len(r.tree) - 1)
        assert 1 not in drafted[:-1] and (1 not in out or drafted == ())
        late += 1 in out
        out, drafter = out + r.tokens, drafter.learn(r)
        if 1 not in out: end, known = len(out), drafter.first == first
        elif not late: end, known = len(out), (drafter.depth, drafter.said, drafter.first) == (0, (), len(out))
        assert known and late == len(out) - end
        if len(out) >= 2 * n: break


def test_a_round_without_a_draft_is_understood():
    "Near the end of a model's positions the loop drafts nothing; the places count all the same"
    target = TableModel(4, lambda t: one_hot((t[-1] + 1) % 4, 4))
    target.most = 6
    assert generate(target, Jacobi(4, 4), reject, (0,), 8, Seeded(0)) == (1, 2, 3, 0, 1, 2, 3, 0)
    r = next(rounds(target, Jacobi(4, 4, said=(1, 2)), reject, (0,)*5, Seeded(0)))
    assert len(r.tree) == 1 and Jacobi(4, 4).learn(r).room == 3


# Exactness

@settings(max_examples=60)
@given(kinds, models(), st.integers(1, 4), st.integers(0, 3), seeds)
def test_contract(kind, pair, b, k, seed):
    "After any number of rounds the edges state the truth; a state is a value"
    drafter, ctx = kind(3, b, (1, 0), exact=True), (0, 1)
    for _, r in zip(range(k), rounds(pair[0], drafter, reject, ctx, Seeded(seed))): drafter, ctx = drafter.learn(r), ctx + r.tokens
    drafter_contract(drafter, ctx)
    assert hash(drafter) == hash(replace(drafter)) and drafter == replace(drafter) and drafter != replace(drafter, done=drafter.done + 1)
    assert len(drafter.said) <= drafter.room <= b and len(drafter(ctx, Seeded(0))) == drafter.depth + 1
    verifier_contract(pair[0], drafter, reject, ctx, 2)


@settings(max_examples=40, deadline=None)
@given(models(), st.sampled_from([(2, (0,)), (3, (2, 1)), (4, (1, 0, 2))]), st.sampled_from([reject, match, block]), st.sampled_from([None, 2]), st.sampled_from([(), (2,)]))
def test_points_have_the_target_law(pair, shape, verify, first, stop):
    "With a text that ends at the end token, and with one that goes on"
    drafter = Jacobi(3, *shape, first=first, end=(2,), exact=True)
    assert loop_law(pair[0], drafter, verify, (0,), 4, stop=stop) == target_law(pair[0], (0,), 4, stop=stop)


@settings(max_examples=30, deadline=None)
@given(models(), st.sampled_from([2, 3]), st.sampled_from([reject, match, block]))
def test_draws_have_the_target_law(pair, b, verify):
    "In one block and in several, with an end token that cuts drawn chains and without"
    for drafter in (ResampledJacobi(3, b, exact=True), ResampledJacobi(3, b, (2, 1), first=2, end=(2,), exact=True)):
        assert loop_law(pair[0], drafter, verify, (0,), 3) == target_law(pair[0], (0,), 3)


def test_the_law_that_is_stated_is_the_answer_of_the_round_before():
    target = random_table(3, 8, zeros=False)
    seen = [r for _, r in zip(range(30), rounds(target, ResampledJacobi(3, 4, exact=True), reject, (0,), Seeded(1)))]
    checked = 0
    for a, b in zip(seen, seen[1:]):
        below = [tuple(a.p[i]) for i in range(a.verdict.node + 1, len(a.tree))]
        assert [tuple(q) for q in b.tree.law[1:]][:len(below)] == below[:len(b.tree) - 1]
        checked += len(below[:len(b.tree) - 1])
    assert checked > 10


@dataclass(frozen=True)
class Again:
    "Solution 2: unseen drafts may be offered again"
    drafter: object
    unseen: tuple = ()
    def __call__(self, ctx, rng):
        if not self.unseen: return self.drafter(ctx, rng)
        tree = Tree(ctx)
        for i, (x, q) in enumerate(self.unseen): tree.add(i, x, np.array(q))
        return tree
    def learn(self, round):
        tree = round.tree
        return replace(self, unseen=tuple((tree.token[i], tuple(tree.law[i])) for i in range(round.verdict.node + 2, len(tree))))


@settings(max_examples=25, deadline=None)
@given(models())
def test_unseen_tokens_are_as_good_as_new(pair):
    "What `reject` has not looked at may come again; `match` never looks"
    for verify in (reject, match): assert loop_law(pair[0], Again(Chain(pair[1], 3)), verify, (0,), 3) == target_law(pair[0], (0,), 3)


def test_tokens_that_a_judge_has_seen_may_not_come_again():
    "Block verification reads the whole chain before it refuses: the law breaks"
    p, q = random_table(3, 2), random_table(3, 3, zeros=False)
    law, truth = loop_law(p, Again(Chain(q, 3)), block, (0,), 3), target_law(p, (0,), 3)
    assert sum(law.values()) == 1 and sum(abs(law.get(k, 0) - truth.get(k, 0)) for k in {**law, **truth}) / 2 > Fraction(1, 100)


# A real model

@faithful("Jacobi")
@pytest.mark.parametrize("domain", DOMAINS)
def test_the_target_drafts_for_itself(domain):
    """Greedy, in double precision: the text of plain decoding; each guess is what the target said in that place one round before, on a prefix
    that was wrong; the exact prefix grows every round, and a block from the truth takes one"""
    fresh, prompt, m = lambda: embedded("target", dtype=torch.float64, temperature=0), prompts(domain, 1)[0], 24
    g, target = autoregressive(fresh(), prompt, m, Seeded(0)), fresh()
    ys = jacobi(fresh(), prompt, m, (0,)*m)
    prefix, out = [right(y, g) for y in ys], ()
    assert ys[-1] == g and len(ys) - 1 <= m + 1 and all(k >= min(i, m) for i, k in enumerate(prefix))
    luck = 0
    for t, r in enumerate(rounds(target, Jacobi(target.V, m), reject, prompt, Seeded(0)), 1):
        assert r.tree.path(len(r.tree) - 1) == ys[t-1][len(out):m-1]
        out += r.tokens
        luck += sum(a == b for a, b in zip(ys[t][len(out):], g[len(out):]))
        if len(out) == m: break
    assert out == g and len(ys) - 1 in (t, t + 1) and target.meter.calls == t and luck > 0
    assert list(generate(target, Jacobi(target.V, m), reject, prompt, 8, Seeded(0)).ledger.models) == ["target"]
    assert len(generate(fresh(), Jacobi(target.V, m, tuple(g)), reject, prompt, m, Seeded(0)).ledger.rounds) == 1


@faithful("Jacobi")
@pytest.mark.parametrize("domain", DOMAINS)
def test_greedy_text_in_blocks(domain):
    fresh, prompt, n = lambda: embedded("target", dtype=torch.float64, temperature=0), prompts(domain, 1)[0], 32
    text = autoregressive(fresh(), prompt, n, Seeded(0))
    for drafter in (Jacobi(512, 4), Jacobi(512, 16, first=20), ResampledJacobi(512, 8), Jacobi(512, 8, prompt[-8:])):
        out = generate(fresh(), drafter, reject, prompt, n, Seeded(0))
        assert out == text and .8 * n < len(out.ledger.rounds) <= n   # plain models gain a few per cent


# Bad input, and the first exercise

def test_doors():
    target = random_table(3, 0)
    for bad in (0, -1, 1.5, None):
        refuses("V", Jacobi, bad)
        refuses("block", Jacobi, 3, bad)
        refuses("m", jacobi, target, (0,), bad, ())
    for bad in ((), (3,), (-1, 0), (.5,), "a", 5, (None,)): refuses("start", Jacobi, 3, 2, bad)
    for bad in (5, (9,), (-1,), "a", None): refuses("end", Jacobi, 3, end=bad)
    assert hash(Jacobi(3, 2, [0, 1], end=[2])) == hash(Jacobi(3, 2, (0, 1), end=(2,)))
    refuses("first", Jacobi, 3, 2, first=-1)
    refuses("done", Jacobi, 3, 2, done=-1)
    refuses("start", jacobi, target, (0,), 3, (0, 0))
    refuses("ctx", jacobi, target, (), 1, (0,))
    for bad in ((7,), (.5,), ("a",), 5, None): refuses("start", jacobi, target, (0,), 1, bad)


def test_the_best_start_is_the_answer():
    "Solution 1: one round, one sweep"
    target = TableModel(3, lambda t: greedy(random_table(3, 4).law(t)))
    g = greedy_text(target, (0,), 6)
    assert len(generate(target, Jacobi(3, 6, g, exact=True), reject, (0,), 6, Seeded(0)).ledger.rounds) == 1 == len(jacobi(target, (0,), 6, g)) - 1
