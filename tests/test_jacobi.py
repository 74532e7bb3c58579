"Chapter 22: greedy decoding as a fixed point, alone and in the loop; the last iterate as a draft"
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np, torch
from hypothesis import strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import cold, examples, faithful, models, proves, seeds
from published import drafted, having
from specref import (autoregressive, block, embedded, Enumerator, generate, Jacobi, loop_law, match,
                     one_hot, prompts, random_table, reject, rounds, Seeded, TableModel, target_law)
from specref.core.loop import bounded
from specref.draft.jacobi import ResampledJacobi, jacobi, jacobi_sweep

tables = st.builds(random_table, st.integers(2, 4), seeds, st.booleans())
kinds = st.sampled_from([Jacobi, ResampledJacobi])
by_place = TableModel(3, lambda t: one_hot(len(t) % 3, 3, exact=True))

def greedy_text(target, ctx, m):
    "One token after another, by hand"
    out = ()
    for _ in range(m): out += (int(np.argmax(target.law(ctx + out))),)
    return out

def exact_prefix(y, g): return next((i for i, (a, b) in enumerate(zip(y, g)) if a != b), len(g))
def starts(V, m): return st.lists(st.integers(0, V - 1), min_size=m, max_size=m).map(tuple)

# The iteration

@proves("thm-jacobi")
@examples(80, tables, st.integers(1, 6), st.data())
def test_the_fixed_point_is_the_greedy_text(target, m, data):
    "A sweep evaluates every equation in one call; from any start the correct prefix grows with each sweep"
    g, start, calls = greedy_text(target, (0,), m), data.draw(starts(target.V, m)), target.meter.calls
    by_hand = tuple(int(np.argmax(target.law((0,) + start[:i]))) for i in range(m))
    assert jacobi_sweep(target, (0,), start) == by_hand and target.meter.calls == calls + 1
    ys = jacobi(target, (0,), m, start)
    prefix = [exact_prefix(y, g) for y in ys]
    assert ys[0] == start and ys[-1] == g and len(ys) - 1 <= m + 1 and jacobi(target, (0,), m, g) == [g, g]
    assert all(b >= min(a + 1, m) for a, b in zip(prefix, prefix[1:]))
    assert all(ys[i] != ys[i+1] for i in range(len(ys) - 2))

@proves("thm-jacobi")
@examples(20, st.integers(2, 3), seeds, st.integers(1, 4))
def test_there_is_no_other_fixed_point(V, seed, m):
    target, every = random_table(V, seed), [tuple(y) for y in np.ndindex(*[V] * m)]
    assert [y for y in every if jacobi_sweep(target, (0,), y) == y] == [greedy_text(target, (0,), m)]

# The same iteration in the loop

@proves("cor-passes")
@examples(80, tables, st.integers(1, 6), st.sampled_from([reject, match]), kinds, st.data())
def test_rounds_are_sweeps(table, m, verify, kind, data):
    "Emitted and drafted tokens are the iterate of each round; the numbers of rounds and sweeps agree"
    target, start = cold(table), data.draw(starts(table.V, m))
    ys = jacobi(target, (0,), m, start)
    y = lambda t: ys[min(t, len(ys) - 1)]
    drafter, out, t = kind(target.V, m, start, exact=True), (), 0
    for round in rounds(target, drafter, verify, (0,), Enumerator()):
        assert round.tree.path(len(round.tree) - 1) == y(t)[len(out):m-1]
        t, out, drafter = t + 1, out + round.tokens, drafter.learn(round)
        guesses = drafter.iterate if kind is Jacobi else tuple(int(np.argmax(q)) for q in drafter.iterate)
        assert out + guesses == y(t)
        if len(out) == m: break
    assert t == next(t for t in range(1, len(ys)) if ys[t][:m-1] == ys[t-1][:m-1])
    assert out == ys[-1] and t <= m and len(ys) - 1 == t + (ys[t] != ys[t-1])

@examples(25, tables, st.integers(1, 4), st.integers(0, 6), st.integers(1, 7), st.data())
def test_blocks(table, b, h, n, data):
    "Blocks in turn, each from the same start, then plain decoding: the rounds add up"
    target, start = cold(table), data.draw(starts(table.V, b))
    out = generate(target, Jacobi(target.V, b, start, first=h), reject, (0,), h + n, Seeded(0))
    want, ctx = 0, (0,)
    for at in range(0, h, b):
        m = min(b, h - at)
        ys = jacobi(target, ctx, m, start[:m])
        want += next(t for t in range(1, len(ys)) if ys[t][:m-1] == ys[t-1][:m-1])
        ctx += ys[-1]
    assert out == greedy_text(target, (0,), h + n) and len(out.ledger.rounds) == want + n

def test_passes_around_an_end_token():
    "A token for each position: a block of four takes two passes, a token after the first end token one"
    def passes(**how):
        out = generate(by_place, Jacobi(3, 4, exact=True, **how), reject, (0,), 9, Seeded(0))
        assert out == tuple((i + 1) % 3 for i in range(9))
        return out.ledger.column("emitted")
    for h in (None, 4): assert passes(first=h, end=(2,)) == [1, 2] + [1] * 6
    assert Jacobi(3, 5, (0, 1, 2), end=(1,))((0,), Enumerator()).token[1:] == [0, 1]   # cut after it
    only = TableModel(3, lambda t: one_hot(2, 3, exact=True))
    ways = [Jacobi(3, 5, end=e, exact=True) for e in ((), (2,))]
    outs = [generate(only, drafter, reject, (0,), 5, Seeded(0)) for drafter in ways]
    assert [len(out.ledger.rounds) for out in outs] == [2, 5]   # the end token was the recovered token

def test_a_round_without_a_draft():
    "Near the end of a model's positions the loop drafts nothing; positions in the block advance as before"
    target = TableModel(4, lambda t: one_hot((t[-1] + 1) % 4, 4))
    target.most = 6
    turn = islice(rounds(target, bounded(target, Jacobi(4, 4)), reject, (0,), Seeded(0)), 8)
    text = sum((r.tokens for r in turn), ())
    assert text[:8] == (1, 2, 3, 0, 1, 2, 3, 0)

# Exactness

@examples(25, kinds, models(), st.integers(1, 4), st.integers(0, 3), seeds)
def test_contract(kind, pair, b, k, seed):
    "After any number of rounds the edges state their true distributions; a state is a value"
    drafter, ctx = kind(3, b, (1, 0), exact=True), (0, 1)
    for _, r in zip(range(k), rounds(pair[0], drafter, reject, ctx, Seeded(seed))):
        below = [tuple(r.p[i]) for i in range(r.verdict.node + 1, len(r.tree))]
        drafter, ctx = drafter.learn(r), ctx + r.tokens
        stated = [tuple(q) for q in drafter(ctx, Enumerator()).law[1:]][:len(below)]
        assert kind is Jacobi or stated == below[:len(stated)]   # the rows of the round before
    drafter_contract(drafter, ctx)
    assert hash(drafter) == hash(replace(drafter)) and drafter != replace(drafter, done=drafter.done + 1)
    verifier_contract(pair[0], drafter, reject, ctx, 2)

@examples(25, models(), kinds, st.sampled_from([(2, (0,)), (3, (2, 1))]),
          st.sampled_from([reject, match, block]), st.sampled_from([None, 2]), st.sampled_from([(), (2,)]))
def test_whole_loops(pair, kind, shape, verify, first, stop):
    "With and without a stop at the end token"
    drafter = kind(3, *shape, first=first, end=(2,), exact=True)
    assert loop_law(pair[0], drafter, verify, (0,), 3, stop=stop) == target_law(pair[0], (0,), 3, stop=stop)

# A real model

def fresh(): return embedded("target", dtype=torch.float64, temperature=0)

@cache
def greedy_run(prompt, m):
    "The text of plain decoding, and all Jacobi iterates"
    return autoregressive(fresh(), prompt, m, Seeded(0)), jacobi(fresh(), prompt, m, (0,)*m)

class Restarted(Jacobi):
    "Each round drafts the start token at all places"
    def learn(self, round): return replace(super().learn(round), iterate=())

class Shifted(Jacobi):
    "The last accepted token's row counts for the next place as well"
    def learn(self, round):
        after = super().learn(round)
        return replace(after, iterate=round.tokens[-1:] + after.iterate[:-1])

@faithful("Jacobi", plain={"restarts": drafted(Restarted), "prompt lookup": "prompt lookup",
                           "shifted by one place": drafted(Shifted)})
def test_the_target_drafts_for_itself(subject):
    "Greedy, in double precision: the text of plain decoding; each draft is the previous round's argmax"
    prompt, m = prompts("code", 1)[0], 16
    (g, ys), target, out = greedy_run(prompt, m), fresh(), ()
    assert ys[-1] == g and all(exact_prefix(y, g) >= min(i, m) for i, y in enumerate(ys))
    system = subject(target, gamma=m)
    for t, r in enumerate(rounds(target, system.drafter, system.verify, prompt, Seeded(0)), 1):
        assert r.tree.path(len(r.tree) - 1) == ys[t-1][len(out):m-1]
        out += r.tokens
        if len(out) == m: break
    assert out == g and len(ys) - 1 in (t, t + 1) and target.meter.calls == t
    from_the_text = having(start=lambda start: tuple(g))(system)
    assert len(from_the_text(target, prompt, m, Seeded(0)).ledger.rounds) == 1
