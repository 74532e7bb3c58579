"Chapter 22a: the comb is the paper's window, the pool is kept by the book, and no guess changes the law"
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import cold, faithful, models, proves, refuses, seeds
from specref.core.rng import Enumerator, Seeded, law_of
from specref.core.law import one_hot
from specref.draft.lookahead import Lookahead, NgramPool, window_probes, ngrams
from specref.core.loop import Round, generate, loop_law, match, no_draft, autoregressive, rounds
from specref.models.embedded import DOMAINS, embedded, prompts, tokenizer
from specref.verify.reject import reject
from specref.core.target import TableModel, random_table, target_law
from specref.core.tree import Tree, ancestor_mask, points, positions

tokens = st.integers(0, 2)
contexts = st.lists(tokens, min_size=1, max_size=4).map(tuple)
sizes = st.tuples(st.integers(1, 4), st.integers(2, 5), st.integers(1, 3))   # W, N, G


@st.composite
def states(draw, V=3):
    "A drafter in the middle of its work: any full or half full window, any pool"
    W, N, G = draw(sizes)
    R = draw(st.integers(1, N - 1))
    lengths = [W + N - 2 - R, *[W + N - 1 - R]*(R - 1)]
    rows = tuple(tuple(draw(st.lists(tokens, min_size=k, max_size=k))) for k in lengths)
    grams = st.lists(st.tuples(tokens, st.lists(tokens, min_size=N - 1, max_size=N - 1).map(tuple)), max_size=8)
    return Lookahead(V, W, N, G, draw(st.booleans()), True, rows, NgramPool().add(draw(grams), G))


def run(target, drafter, ctx, k, seed=0):
    "The first k rounds, each with the drafter that made its tree and the one that comes after"
    for _, round in zip(range(k), rounds(target, drafter, reject, ctx, Seeded(seed))):
        yield drafter, round, (drafter := drafter.learn(round))


# The comb

def staircase(R, C):
    "What the paper's mask lets each cell see of the window, and where it stands: cells row by row"
    cells = [(r, c) for r in range(R) for c in range(C)]
    see = np.array([[(s == 0 and d <= c) or (s <= r and d == c) for s, d in cells] for r, c in cells])
    return see, np.array([r + c for r, c in cells])


@proves("thm-comb")
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.data())
def test_the_comb_is_the_staircase(R, C, t, data):
    rows = [tuple(data.draw(st.lists(tokens, min_size=k, max_size=k))) for k in (C - 1, *[C]*(R - 1))]
    tree = window_probes(Tree((0,)*t), rows)
    see, at = staircase(R, C)
    assert (ancestor_mask(tree) == see).all() and (positions(tree) == t - 1 + at).all() and len(tree) == R*C
    for r in range(R):
        for c in range(C):
            assert tree.path(r*C + c) == (*rows[0][:c], *(rows[i][c] for i in range(1, r + 1)))
    assert not any(map(tree.children, range(len(tree))))


@proves("thm-comb")
@faithful("Lookahead")
@pytest.mark.parametrize("domain", DOMAINS)
def test_a_cell_is_answered_as_its_own_text(domain):
    "Embedded target, float64: the logits of cell (r, c), with guesses in the same pass, are those of context + row 0 up to c + column c up to r, to 1e-9"
    model, prompt = embedded("target", dtype=torch.float64), prompts(domain, 1)[0]
    full = ((d, r) for d, r, _ in run(model, Lookahead(model.V, 3, 4, 2, pool_from_prompt=True), prompt, 20))
    drafter, round = next((d, r) for d, r in full if any(q is not None for q in r.tree.law))
    logits, ctx, rows = model.logits(round.tree), round.tree.ctx, drafter.rows
    assert len(rows) == 3
    for r in range(3):
        for c in range(3):
            text = (*ctx, *rows[0][:c], *(rows[i][c] for i in range(1, r + 1)))
            assert abs(logits[3*r + c] - model.alone(text)).max() < 1e-9


# The window and the pool

class Book:
    "Lookahead's bookkeeping once more, with lists, straight from the paper and on separate calls of the target"
    def __init__(self, target, W, N, G, ctx, from_prompt):
        self.target, self.W, self.N, self.G, self.from_prompt = target, W, N, G, from_prompt
        self.past, self.pool = [[ctx[i % len(ctx)] for i in range(W + N - 3)]] + [None]*(N - 2), {}
        if from_prompt:
            for i in range(len(ctx) - N + 1): self.write(ctx[i], ctx[i+1:i+N])
    def write(self, key, gram):
        "Least recently written out"
        entry = self.pool.setdefault(key, OrderedDict())
        entry.pop(tuple(gram), None)
        entry[tuple(gram)] = True
        if len(entry) > self.G: entry.popitem(last=False)
    def step(self, ctx, emitted):
        rows = [row for row in self.past if row is not None]
        def likeliest(c):
            text = (*ctx, *rows[0][:c], *(row[c] for row in rows[1:]))
            law = self.target.law(text)
            return max(range(self.target.V), key=lambda x: (law[x], -x))
        new = [likeliest(c) for c in range(len(rows[0]) + 1)]
        if len(rows) < self.N - 1:
            for k in range(len(rows)): self.past[k] = self.past[k][1:]
            self.past[len(rows)] = new[1:]
        else:
            for c in range(self.W): self.write(ctx[-1] if c == 0 else rows[0][c - 1], [*(row[c] for row in rows[1:]), new[c]])
            self.past = [([*rows[1:], new][0])[1:], *[*rows[1:], new][1:]]
        for i in range(len(emitted) if self.from_prompt else 0):
            text = (*ctx, *emitted[:i + 1])[-self.N:]
            if len(text) == self.N: self.write(text[0], text[1:])


@settings(max_examples=60, deadline=None)
@given(seeds, sizes, contexts, st.booleans())
def test_window_and_pool_by_the_book(seed, size, ctx, from_prompt):
    "Round after round: the same rows, the same runs under the same tokens in the same order, never more than G"
    target = random_table(3, seed)
    book = Book(target, *size, ctx, from_prompt)
    for _, round, after in run(target, Lookahead(3, *size, from_prompt, True), ctx, 9, seed):
        book.step(round.tree.ctx, round.tokens)
        assert after.rows == tuple(tuple(row) for row in book.past if row is not None)
        assert after.pool == {k: tuple(v) for k, v in book.pool.items()} and all(len(v) <= size[2] for v in after.pool.values())


@given(sizes, contexts)
def test_warm_up(size, ctx):
    "N - 2 passes offer nothing: the first row, W + N - 3 tokens of the prompt, shrinks by one a pass to W - 1; no path is deeper than said"
    W, N, G = size
    for k, (_, round, after) in enumerate(run(random_table(3, 1), Lookahead(3, W, N, G, exact=True), ctx, N + 2), 1):
        if k < N: assert all(q is None for q in round.tree.law)
        assert len(after.rows) == min(k + 1, N - 1) and len(after.rows[0]) == max(W + N - 3 - k, W - 1) and all(len(r) == len(after.rows[0]) + 1 for r in after.rows[1:])
        assert bool(after.pool) == (k >= N - 1) and max(round.tree.depth) <= after.depth
        if k == 1: assert Lookahead(3, W, N, G).begun(ctx).rows == ((ctx*(W + N))[:W + N - 3],)


@given(st.lists(st.tuples(tokens, st.tuples(tokens, tokens)), max_size=20), st.integers(1, 4))
def test_the_pool(grams, most):
    "The runs written last, each once, oldest first; a value: adding leaves it alone, equal pools are equal however made"
    pool = NgramPool().add(grams, most)
    for key in range(3):
        mine = [g for k, g in grams if k == key]
        assert list(pool.get(key, ())) == sorted(set(mine), key=lambda g: len(mine) - mine[::-1].index(g))[-most:]
    assert NgramPool().add(grams, most) == pool and hash(NgramPool(reversed(pool.items()))) == hash(pool)
    before = dict(pool)
    assert pool.add([(0, (9, 9))], most) != pool == before


def test_a_column_out_of_step():
    "On the page's alphabet: after several tokens at once, column 0 writes a run that the language lacks; the other columns do not"
    target = TableModel(8, lambda text: one_hot((text[-1] + 1) % 8, 8))
    *_, (_, round, after) = run(target, Lookahead(8, 3, 3, 2, rows=((5, 2), (1, 6, 3))), (0,), 4)
    assert round.tree.ctx[-1] == 5 and [(k, g) for k, gs in after.pool.items() for g in gs if (k, *g) != tuple((k + i) % 8 for i in range(3))] == [(5, (4, 5))]


def test_ngrams(): assert ngrams((1, 2, 3), 2) == [(1, (2,)), (2, (3,))] and ngrams((1,), 2) == []


@settings(max_examples=60)
@given(states(), contexts)
def test_what_is_offered(drafter, ctx):
    "The window first; below the context the pool's runs of the current token, shared beginnings once, and only from a full window"
    tree, C = drafter(ctx, Enumerator()), len(drafter.rows[0]) + 1
    runs = drafter.pool.get(ctx[-1], ()) if len(drafter.rows) == drafter.N - 1 else ()
    offered = [tree.path(i) for i in range(len(tree)) if tree.law[i] is not None]
    assert sorted(offered) == sorted({g[:i] for g in runs for i in range(1, len(g) + 1)})
    assert all(q is None for q in tree.law[:C*len(drafter.rows)]) and len(tree) <= (drafter.W + drafter.G)*(drafter.N - 1)
    drafter_contract(drafter, ctx)


def test_a_round_without_a_window_teaches_nothing():
    drafter, tree = Lookahead(3), Tree((0, 1))
    assert drafter.learn(Round(tree, random_table(3, 0)(tree), match(random_table(3, 0)(tree), tree, Seeded(0)))) == drafter
    target = random_table(3, 0); target.most = 9
    assert len(generate(target, Lookahead(3, 2, 3, 2), reject, (0,), 14, Seeded(0))) == 14


@faithful("Lookahead")
@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 6), contexts)
def test_one_row_is_the_jacobi_window(seed, W, ctx):
    "N = 2: row 0 of the next round is the Jacobi iterate of this one, every place from the old places before it; nothing is forgotten but the emitted place"
    target = cold(random_table(3, seed, zeros=False))
    for drafter, round, after in run(target, Lookahead(3, W, 2, 1, exact=True), ctx, 6):
        y = (*drafter.begun(ctx).rows[0], None)
        iterate = [int(np.argmax(target.law((*round.tree.ctx, *y[:i])))) for i in range(W)]
        assert after.rows == (tuple(iterate[1:]),) and iterate[0] == round.tokens[0]


# The law

@proves("thm-lookahead")
@settings(max_examples=60, deadline=None)
@given(models(), states(), contexts, st.sampled_from([reject, match]), st.integers(1, 3))
def test_one_round_from_any_state(pair, drafter, ctx, verify, n):
    verifier_contract(pair[0], drafter, verify, ctx, n)


@proves("thm-lookahead")
@settings(max_examples=40, deadline=None)
@given(models(), states(), contexts, st.sampled_from([reject, match]))
def test_loops_are_exact(pair, drafter, ctx, verify):
    "Three tokens in fractions, from any state, with all that is learnt on the way"
    assert loop_law(pair[0], drafter, verify, ctx, 3) == target_law(pair[0], ctx, 3)


@proves("thm-lookahead")
@settings(max_examples=15, deadline=None)
@given(models(), st.sampled_from([(2, 2, 2), (3, 2, 1), (2, 3, 2)]), st.booleans())
def test_longer_loops_are_exact(pair, size, from_prompt):
    "Five tokens from an empty window, warm-up and offers among them"
    assert loop_law(pair[0], Lookahead(3, *size, from_prompt, True), reject, (0, 1, 0), 5) == target_law(pair[0], (0, 1, 0), 5)


@settings(max_examples=40, deadline=None)
@given(models(), states(), contexts)
def test_states_are_values(pair, drafter, ctx):
    "Equal and of equal hash when learnt from the same round; the round itself decides, not a memory"
    round = next(rounds(pair[0], drafter, reject, ctx, Seeded(0)))
    a, b = drafter.learn(round), replace(drafter).learn(round)
    assert a == b and hash(a) == hash(b) and drafter.learn(round) == a


# At size

@proves("thm-lookahead")
@faithful("Lookahead")
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_one_call_a_round(domain, temperature):
    "Window and guesses are one pass: calls are rounds; fewer rounds than tokens; a pass feeds (W + G)(N - 1) tokens at most; greedy text is the plain one"
    model, prompt = embedded("target", dtype=torch.float64, temperature=temperature), prompts(domain, 1, seed=3)[0]
    model(Tree(prompt[:-1]))
    out = generate(model, Lookahead(model.V), reject, prompt, 48, Seeded(1))
    calls, n = out.ledger.models["target"], len(out.ledger.rounds)
    assert calls.calls == n < 48 and calls.tokens <= n*14*4 + out.ledger.num_accepted_tokens
    if temperature == 0: assert out == autoregressive(model, prompt, 48, Seeded(1)) and n < 42


@faithful("Lookahead")
@pytest.mark.parametrize("domain", DOMAINS)
def test_the_pool_holds_what_was_never_read(domain):
    "Most runs of the pool stand nowhere in prompt or text, and some that were accepted had two tokens that never stood together: written by the model, not looked up"
    model, prompt, news = embedded("target", temperature=0), prompts(domain, 2)[1], 0
    for _, round, after in run(model, Lookahead(model.V), prompt, 24):
        seen, kept = set(round.tree.ctx[i:i + 2] for i in range(len(round.tree.ctx))), round.tokens[:-1]
        news += any(pair not in seen for pair in zip((round.tree.ctx[-1], *kept), kept))
    seen = set(ngrams(round.tree.ctx + round.tokens, 5))
    runs = [(key, g) for key, gs in after.pool.items() for g in gs]
    assert sum(r not in seen for r in runs) > len(runs)/2 and news > 0


@faithful("Lookahead")
def test_a_wider_window_takes_fewer_steps():
    "Greedy, both domains: the steps fall from W = 1 to 4 to 12"
    model = embedded("target", temperature=0)
    steps = [sum(len(generate(model, Lookahead(model.V, W, 5, W), reject, prompts(d, 1)[0], 48, Seeded(0)).ledger.rounds) for d in DOMAINS) for W in (1, 4, 12)]
    assert steps[0] > steps[1] > steps[2]


# Doors and exercises

def test_doors():
    for bad in (0, -1, 1.5, None):
        for name in "VWG": refuses(name, Lookahead, **{"V": 3, name: bad})
        refuses("N", Lookahead, 3, N=bad)
    refuses("N", Lookahead, 3, N=1)
    for rows in (((0,),), ((0, 1), (1,)), ((0,), (0, 1), (0, 1)), 5, None, (0,), ((3,), (0, 1)), ((.5,), (0, 1))): refuses("rows", Lookahead, 3, 2, 3, rows=rows)
    for pool in ({}, {0: ((1, 2),)}, 5, None): refuses("pool", Lookahead, 3, pool=pool)
    assert hash(Lookahead(3, 2, 3, rows=[[0], [0, 1]])) == hash(Lookahead(3, 2, 3, rows=((0,), (0, 1))))
    for rows in ((), ((0,), (0,)), ((0,), (0, 1), (0,))): refuses("rows", window_probes, Tree((0,)), rows)
    refuses("drafter", generate, random_table(3, 0), Lookahead(4), reject, (0,), 2, Seeded(0))


def test_exercise_1():
    "W = G = 15, N = 5: 120 tokens a pass, 60 of them the window"
    runs = tuple((x, 0, 0, 0) for x in range(15))
    tree = Lookahead(15, 15, 5, 15, rows=((0,)*14, *[(0,)*15]*3), pool=NgramPool({3: runs}))((3,), Enumerator())
    assert len(tree) == 120 and sum(q is None for q in tree.law) == 60


class Worst(Lookahead):
    "The window keeps the least likely token"
    def learn(self, round): return super().learn(replace(round, p=[-round.p[i] for i in range(len(round.tree))]))


@settings(max_examples=20, deadline=None)
@given(models(), contexts)
def test_exercise_2(pair, ctx): assert loop_law(pair[0], Worst(3, 2, 2, 2, exact=True), reject, ctx, 4) == target_law(pair[0], ctx, 4)
