"Chapter 22a: window and pool are those of the paper, and no draft changes the distribution"
from collections import OrderedDict
from dataclasses import replace
from itertools import islice

import numpy as np, torch
from hypothesis import example, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import cold, examples, faithful, models, proves, seeds
from published import drafted
from specref import (autoregressive, embedded, Enumerator, Lookahead, loop_law, match, prompts,
                     random_table, reject, Round, rounds, Seeded, target_law, Tree, Verdict)
from specref.core.loop import bounded
from specref.core.tree import ancestor_mask, positions
from specref.draft.lookahead import NgramPool, ngrams, window_probes

tokens = st.integers(0, 2)
contexts = st.lists(tokens, min_size=1, max_size=4).map(tuple)
sizes = st.tuples(st.integers(1, 4), st.integers(2, 5), st.integers(1, 3))   # W, N, G

def runs(k): return st.lists(tokens, min_size=k, max_size=k).map(tuple)

@st.composite
def states(draw):
    "A drafter after some rounds: any full or partial window, any pool"
    W, N, G = draw(sizes)
    R = draw(st.integers(1, N - 1))
    rows = tuple(draw(runs(k)) for k in [W + N - 2 - R, *[W + N - 1 - R]*(R - 1)])
    grams = draw(st.lists(st.tuples(tokens, runs(N - 1)), max_size=8))
    return Lookahead(3, W, N, G, draw(st.booleans()), True, rows, NgramPool().add(grams, G))

def run(target, drafter, ctx, k, seed=0):
    "The first k rounds, each with the drafter of its tree and the updated one"
    for _, round in zip(range(k), rounds(target, drafter, reject, ctx, Seeded(seed))):
        yield drafter, round, (drafter := drafter.learn(round))

# The window as a tree

@proves("thm-comb")
@examples(40, st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.data())
def test_the_window_as_a_tree(R, C, t, data):
    "Mask and position of each cell of the window are those of the paper"
    rows = [data.draw(runs(k)) for k in (C - 1, *[C]*(R - 1))]
    tree, cells = window_probes(Tree((0,)*t), rows), [(r, c) for r in range(R) for c in range(C)]
    see = [[(s == 0 and d <= c) or (s <= r and d == c) for s, d in cells] for r, c in cells]
    assert (ancestor_mask(tree) == see).all() and list(positions(tree)) == [t - 1 + r + c for r, c in cells]
    for i, (r, c) in enumerate(cells): assert tree.path(i) == (*rows[0][:c], *(row[c] for row in rows[1:r+1]))
    assert not any(map(tree.children, range(len(tree))))

def chains(tree, rows):
    "Each row reads itself, from the context on"
    for row in rows:
        u = 0
        for x in row: u = tree.add(u, x)
    return tree

def columns(tree, rows):
    "Each column reads itself, without the part of row 0 before it"
    for x in rows[0]: tree.add(0, x)
    for row in rows[1:]:
        for x in row: tree.add(len(tree) - len(row), x)
    return tree

@proves("thm-comb")
@faithful("Lookahead", part="window_probes", plain={"rows as chains": chains, "columns as chains": columns})
def test_a_cell_has_the_logits_of_its_text(subject, monkeypatch):
    "Float64, drafts in the same pass: the logits of cell (r, c) are those of its own text"
    monkeypatch.setattr("specref.draft.lookahead.window_probes", subject)
    model, prompt = embedded("target", dtype=torch.float64), prompts("code", 1)[0]
    first = run(model, Lookahead(model.V, 3, 4, 2, pool_from_prompt=True), prompt, 20)
    drafter, tree = next((d, r.tree) for d, r, _ in first if any(q is not None for q in r.tree.law))
    logits, rows = model.logits(tree), drafter.rows
    for r in range(3):
        for c in range(3):
            text = (*tree.ctx, *rows[0][:c], *(rows[i][c] for i in range(1, r + 1)))
            assert abs(logits[3*r + c] - model.alone(text)).max() < 1e-9

# The window and the pool

class FromPaper:
    "A second implementation of window and pool, from the paper, with lists and separate target calls"
    def __init__(self, target, W, N, G, ctx, from_prompt):
        self.target, self.N, self.G, self.from_prompt, self.pool = target, N, G, from_prompt, {}
        self.rows = [[ctx[i % len(ctx)] for i in range(W + N - 3)]]
        for i in range(len(ctx) - N + 1 if from_prompt else 0): self.write(ctx[i], ctx[i+1:i+N])
    def write(self, key, gram):
        "The least recently written n-gram is removed"
        entry = self.pool.setdefault(key, OrderedDict())
        entry.pop(tuple(gram), None)
        entry[tuple(gram)] = True
        if len(entry) > self.G: entry.popitem(last=False)
    def likeliest(self, ctx, c):
        law = self.target.law((*ctx, *self.rows[0][:c], *(row[c] for row in self.rows[1:])))
        return max(range(3), key=lambda x: (law[x], -x))
    def step(self, ctx, emitted):
        rows, new = self.rows, [self.likeliest(ctx, c) for c in range(len(self.rows[0]) + 1)]
        if len(rows) < self.N - 1: self.rows = [row[1:] for row in [*rows, new]]
        else:
            below = [*rows[1:], new]
            for c, key in enumerate([ctx[-1], *rows[0]]): self.write(key, [row[c] for row in below])
            first, *rest = [*rows[1:], new]
            self.rows = [first[1:], *rest]
        for i in range(len(emitted) if self.from_prompt else 0):
            text = (*ctx, *emitted[:i + 1])[-self.N:]
            if len(text) == self.N: self.write(text[0], text[1:])

@examples(30, seeds, sizes, contexts, st.booleans())
def test_window_and_pool_are_the_papers(seed, size, ctx, from_prompt):
    "In each round the same rows, the same n-grams in the same order, at most G; N - 2 passes offer nothing"
    target, (W, N, _) = random_table(3, seed), size
    paper = FromPaper(target, *size, ctx, from_prompt)
    drafter = Lookahead(3, *size, from_prompt, True)
    for k, (_, round, after) in enumerate(run(target, drafter, ctx, 8, seed), 1):
        paper.step(round.tree.ctx, round.tokens)
        assert after.rows == tuple(map(tuple, paper.rows)) and len(after.rows[0]) == max(W + N - 3 - k, W - 1)
        assert after.pool == {key: tuple(v) for key, v in paper.pool.items()}
        assert k >= N - 1 or all(q is None for q in round.tree.law)

@examples(25, states(), contexts)
def test_the_window_and_then_the_pool(drafter, ctx):
    "The window first; then the pool's n-grams of the current token, from a full window only"
    tree, cells = drafter(ctx, Enumerator()), (len(drafter.rows[0]) + 1)*len(drafter.rows)
    grams = drafter.pool.get(ctx[-1], ()) if len(drafter.rows) == drafter.N - 1 else ()
    offered = [tree.path(i) for i in range(len(tree)) if tree.law[i] is not None]
    assert sorted(offered) == sorted({g[:i] for g in grams for i in range(1, len(g) + 1)})
    assert all(q is None for q in tree.law[:cells]) and max(tree.depth) <= drafter.depth
    assert len(tree) <= (drafter.W + drafter.G)*(drafter.N - 1)
    drafter_contract(drafter, ctx)

def test_a_round_without_a_window():
    drafter, tree, target = Lookahead(3, 2, 3, 2), Tree((0, 1)), random_table(3, 0)
    assert drafter.learn(Round(tree, target(tree), Verdict(0, 0))) == drafter
    target.most = 9
    turn = [*islice(rounds(target, bounded(target, drafter), reject, (0,), Seeded(0)), 14)]
    assert len(turn[0].tree) > len(turn[-1].tree) == 1

class Still(Lookahead):
    "The window is always the prompt's tokens"
    def learn(self, round): return replace(super().learn(round), rows=self.with_window(round.tree.ctx).rows)

class Unshifted(Lookahead):
    "The window stays where it is when a token is emitted"
    def learn(self, round):
        after = super().learn(round)
        return replace(after, rows=((round.tokens[0], *after.rows[0][:-1]),))

@faithful("Lookahead", plain={"the prompt": drafted(Still), "not shifted": drafted(Unshifted)})
@examples(20, seeds, st.integers(1, 6), contexts)
@example(0, 4, (0, 1))
def test_one_row_is_the_jacobi_window(subject, seed, W, ctx):
    "N = 2: row 0 of the next round is the Jacobi iterate of this one, without the emitted token"
    target = cold(random_table(3, seed, zeros=False))
    one_row = subject.drafter(target, dict(N=2, G=1), gamma=W, exact=True)
    for drafter, round, after in run(target, one_row, ctx, 6):
        y = drafter.with_window(ctx).rows[0]
        iterate = [int(np.argmax(target.law((*round.tree.ctx, *y[:i])))) for i in range(W)]
        assert after.rows == (tuple(iterate[1:]),) and iterate[0] == round.tokens[0]

# The distribution

@proves("thm-lookahead")
@examples(25, models(), states(), contexts, st.sampled_from([reject, match]))
def test_exact_from_any_state(pair, drafter, ctx, verify):
    "One round, and three tokens with all updates of the state; a state is a value"
    verifier_contract(pair[0], drafter, verify, ctx, 3)
    assert loop_law(pair[0], drafter, verify, ctx, 3) == target_law(pair[0], ctx, 3)
    round = next(rounds(pair[0], drafter, reject, ctx, Seeded(0)))
    a, b = drafter.learn(round), replace(drafter).learn(round)
    assert a == b and hash(a) == hash(b)

# At size

class NoPool(Lookahead):
    "The window alone"
    def __call__(self, ctx, rng): return window_probes(Tree(ctx), self.with_window(ctx).rows)

@faithful("Lookahead", plain={"no pool": drafted(NoPool), "prompt lookup": "prompt lookup"})
def test_one_call_a_round(subject):
    "Window and drafts are one pass, with fewer rounds than tokens; n-grams that no text has are accepted"
    model, prompt = embedded("target", dtype=torch.float64, temperature=0), prompts("english", 1, seed=1)[0]
    model(Tree(prompt[:-1]))
    out = subject(model)(model, prompt, 16, Seeded(1))
    work, n = out.ledger.models["target"], len(out.ledger.rounds)
    assert work.calls == n < 12 and work.tokens <= n*14*4 + out.ledger.num_accepted_tokens
    assert out == autoregressive(model, prompt, 16, Seeded(1))
    text, at, new = prompt + out, len(prompt), 0
    for k in out.ledger.column("emitted"):
        first, *rest = text[at-1:at+k-1]
        at, new = at + k, new + ((first, tuple(rest)) not in ngrams(text[:at], len(rest) + 1))
    assert new
