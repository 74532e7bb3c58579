"Chapter 21c: the matrix of successors, learnt from every node, and the tree that is looked up in it"
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from math import ceil, prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import cold, faithful, models, proves, refuses, seeds
from specref.core.rng import Enumerator, Seeded
from specref.core.law import exact, one_hot
from specref.core.loop import Round, Verdict, generate, loop_law, match, autoregressive, rounds
from specref.models.embedded import DOMAINS, embedded, prompts
from specref.draft.recycling import RANK_RATES, Recycling, rank_template, children_by_path, node_token
from specref.verify.reject import reject
from specref.core.target import Rows, TableModel, random_table, target_law
from specref.core.tree import Tree

SHAPES = ((0,),), ((0,), (1,), (0, 0)), ((0,), (0, 0), (0, 1), (1,), (1, 0))
shapes = st.sampled_from(SHAPES)
rows = st.lists(st.integers(0, 2), max_size=2, unique=True).map(tuple)
matrices = st.just(()) | st.tuples(rows, rows, rows)


def best(p, k): return tuple(sorted((x for x in range(len(p)) if p[x] > 0), key=lambda x: (-p[x], x))[:k])


def small(shape, matrix=(), V=3): return Recycling(V, 2, shape, exact=True, matrix=matrix)


# The template

@settings(max_examples=80)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(lambda w: tuple(Fraction(x, 10) for x in sorted(w, reverse=True))))
def test_template_is_the_heaviest_paths(n, ranks):
    "Against all paths up to depth n: the same weights, every node with its parent and its elder siblings"
    shape, weight = rank_template(n, ranks), lambda path: prod(ranks[r] for r in path)
    every, level = [], [()]
    for _ in range(n if len(ranks) == 1 else min(n, 6)):
        level = [(*path, r) for path in level for r in range(len(ranks))]
        every += level
    if max(map(len, shape)) < 6 or len(ranks) == 1: assert [weight(p) for p in shape] == sorted(map(weight, every), reverse=True)[:n]
    assert len(set(shape)) == n and all((not p[:-1] or p[:-1] in shape) and (not p[-1] or (*p[:-1], p[-1] - 1) in shape) for p in shape)


def test_the_template_of_the_chapter():
    "80 nodes, close to the published one, which has 8, 21, 25, 15, 8, 3 at depth 1 to 6"
    shape = rank_template(80)
    assert len(shape) == len(set(shape)) == 80 and shape == Recycling(512).shape and Recycling(512).depth == 7
    assert [n for _, n in sorted(Counter(map(len, shape)).items())] == [8, 23, 28, 13, 6, 1, 1] and sum(RANK_RATES) <= 1


# The matrix

@settings(max_examples=100)
@given(models(), shapes, st.integers(1, 3), matrices, seeds)
def test_every_node_overwrites_its_row(pair, shape, k, matrix, seed):
    "Row by row against a dictionary: refused and unseen nodes count, the last node of a token stands, other rows stay"
    drafter = replace(small(shape, matrix), k=max(k, 2))
    for r in islice(rounds(pair[0], drafter, reject, (0, 1), Seeded(seed)), 3):
        rows = dict(enumerate(drafter.matrix or [()] * 3))
        for u in range(len(r.tree)): rows[r.tree.text(u)[-1]] = best(pair[0].law(r.tree.text(u)), drafter.k)
        after = drafter.learn(r)
        assert after.matrix == tuple(rows[x] for x in range(3)) and after == replace(drafter, matrix=after.matrix) and hash(after) == hash(replace(after))
        assert all(a is b for x, (a, b) in enumerate(zip(drafter.matrix, after.matrix)) if x not in {r.tree.text(u)[-1] for u in range(len(r.tree))})
        drafter = after


# The tree

@settings(max_examples=200)
@given(shapes, matrices, st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple))
def test_the_tree_is_looked_up(shape, matrix, ctx):
    "Every path of ranks, followed through the matrix by hand; level by level; siblings by rank; point masses"
    tree, want = small(shape, matrix)(ctx, Enumerator()), []
    for ranks in sorted(shape, key=lambda p: (len(p), p)):
        tokens = [ctx[-1]]
        for r in ranks:
            row = matrix[tokens[-1]] if matrix and tokens else ()
            tokens = [*tokens, row[r]] if r < len(row) else []
        if tokens: want.append(tuple(tokens[1:]))
    assert [tree.path(u) for u in range(1, len(tree))] == want
    assert all(tuple(tree.law[u]) == tuple(one_hot(tree.token[u], 3)) for u in range(1, len(tree)))
    assert max(tree.depth) <= small(shape).depth == max(map(len, shape))


def test_ranks_below():
    assert dict(children_by_path(((0, 1), (0,), (2,), (0, 0)))) == {(): [0, 2], (0,): [0, 1]}
    tree = Tree((5, 6))
    tree.add(0, 2)
    assert [node_token(tree, u) for u in (0, 1)] == [6, 2]


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3), st.integers(0, 2))
def test_the_weights_before_the_warp_are_learnt_from(w, x):
    "From `raw` where the rows have it, from the rows where they are a list or were made of nothing else"
    p, tree, verdict = [exact(1, 2, 4), one_hot(x, 3, exact=True)], Tree((2,)), Verdict(0, 1)
    tree.add(0, 1)
    learnt = lambda p: small(SHAPES[0]).learn(Round(tree, p, verdict)).matrix
    assert learnt(p) == learnt(Rows(p.__getitem__, 2, 3)) == ((), (x,), (2, 1))
    assert learnt(Rows(p.__getitem__, 2, 3, lambda i: np.array([p[0], w][i]))) == ((), best(w, 2), (2, 1))


def test_the_round_of_the_chapter():
    "b is refused, d is not looked at: both teach"
    a, b, c, d = range(4)
    asked = {(a,): (1, 3, 4, 2), (a, b): (4, 1, 3, 2), (a, b, d): (1, 2, 1, 4), (a, c): (2, 4, 0, 1)}
    target = TableModel(4, lambda text: exact(*asked.get(text[1:], (1, 1, 1, 1))))
    drafter = Recycling(4, 2, SHAPES[1], exact=True, matrix=((b, c), (d, a), (), ()))
    tree = drafter((d, a), Enumerator())
    assert [tree.path(u) for u in range(1, 4)] == [(b,), (c,), (b, d)]
    for r in islice(rounds(target, drafter, reject, (d, a), Seeded(3)), 1): assert drafter.learn(r).matrix == ((c, b), (a, c), (b, a), (d, b))


# Exactness

@settings(max_examples=60)
@given(models(), shapes, matrices, st.integers(1, 2))
def test_contract(pair, shape, matrix, n):
    drafter_contract(small(shape, matrix), (0, 1))
    verifier_contract(pair[0], small(shape, matrix), reject, (0, 1), n)


@proves("thm-learning")
@settings(max_examples=40, deadline=None)
@given(models(), shapes, matrices, st.sampled_from([reject, match]))
def test_the_law_is_the_targets(pair, shape, matrix, verify):
    assert loop_law(pair[0], small(shape, matrix), verify, (0, 1), 4, stop={2}) == target_law(pair[0], (0, 1), 4, stop={2})


@proves("thm-learning")
@settings(max_examples=25, deadline=None)
@given(models(), seeds)
def test_a_drafter_may_remember_anything(pair, seed):
    "A state that mixes all that a round has seen, refused tokens, answers and verdict, and decides shape and laws by it: exact"
    class Mind:
        depth = 2
        def __init__(self, state): self.state = state
        def __eq__(self, other): return self.state == other.state
        def __hash__(self): return hash(self.state)
        def __call__(self, ctx, rng):
            tree, r = Tree(ctx), np.random.default_rng(self.state)
            for u in (0, 0, 1): tree.add(min(u, len(tree) - 1), x := int(r.integers(3)), one_hot(x, 3, exact=True))
            return tree
        def learn(self, round):
            seen = (self.state, *round.tree.token[1:], round.verdict.node, round.verdict.token, *(int(np.argmax(round.p[u])) for u in range(len(round.tree))))
            return Mind(hash(seen) % 1000)
    for verify in (reject, match): assert loop_law(pair[0], Mind(seed % 1000), verify, (0,), 3) == target_law(pair[0], (0,), 3)


# A real model

def start(domain): return embedded("target", dtype=torch.float64, temperature=0), prompts(domain, 1)[0]


class OfTheRows(Recycling):
    "Told the rows alone, that is points: one column"
    def learn(self, round): return super().learn(replace(round, p=list(round.p)))


@faithful("Token Recycling")
@pytest.mark.parametrize("domain", DOMAINS)
def test_trash_is_learnt_and_comes_back(domain):
    """Greedy: at every round the rows of the matrix are the top eight of the target's scores at the last node of each token, refused and unseen
    ones included; the next tree is looked up in them; tokens are accepted that were never written; no call but the round's own"""
    target, ctx = start(domain)
    drafter, refused, new, emitted = Recycling(512), 0, 0, 0
    known = {}
    for k, r in enumerate(islice(rounds(target, drafter, reject, ctx, Seeded(0)), 20)):
        path = (0, *r.tree.ancestors(r.verdict.node))
        for ranks, u in zip(sorted(drafter.shape, key=lambda p: (len(p), p)), range(1, len(r.tree))):
            above = r.tree.text(r.tree.parent[u])[-1]
            assert r.tree.token[u] in known[above][0]
            if u in path:
                refused += not known[above][1]
                new += (above, r.tree.token[u]) not in zip(r.tree.ctx, r.tree.ctx[1:])
        logits = target.logits(r.tree)
        for u in range(len(r.tree)):
            best = sorted(range(512), key=lambda x: (-logits[u][x], x))[:8]
            known[r.tree.text(u)[-1]] = tuple(best), u in path
        drafter, emitted = drafter.learn(r), emitted + len(r.tokens)
        assert {x: row for x, row in enumerate(drafter.matrix) if row} == {x: row for x, (row, _) in known.items()}
        assert target.meter.calls == k + 1
    assert len(r.tree) - 1 <= 80 and refused > 0 and new > 0 and emitted > 20


@faithful("Token Recycling")
@pytest.mark.parametrize("domain", DOMAINS)
def test_greedy_text(domain):
    "With eight columns and with one, from an empty matrix and a used one: the text of plain decoding, in fewer calls"
    target, prompt = start(domain)
    text = autoregressive(target, prompt, 40, Seeded(0))
    for drafter in (OfTheRows(512), Recycling(512), Recycling(512, matrix=tuple((x,) for x in range(512)))):
        out = generate(start(domain)[0], drafter, reject, prompt, 40, Seeded(0))
        assert out == text and list(out.ledger.models) == ["target"] and len(out.ledger.rounds) == out.ledger.models["target"].calls < 40


@faithful("Token Recycling")
def test_a_full_matrix_gives_the_whole_template():
    "Eight successors of every token: 80 nodes, and a row of eight numbers a token, whatever was read"
    drafter = Recycling(512, matrix=tuple(tuple((x + i) % 512 for i in range(1, 9)) for x in range(512)))
    tree = drafter((7,), Seeded(0))
    assert len(tree) == 81 and [tree.path(u) for u in range(1, 9)] == [(7 + i,) for i in range(1, 9)] and max(map(len, drafter.matrix)) == 8


# Bad input, and the exercises

def test_doors():
    for bad in (0, -1, 1.5, None):
        refuses("V", Recycling, bad)
        refuses("k", Recycling, 3, bad)
        refuses("n", rank_template, bad)
    for bad in ((), ((),), ((1, 0),), ((0,), (8,)), ((0,), (0, -1)), 5, (0, 1), ((.5,),), None): refuses("shape", Recycling, 9, 8, bad)
    for bad in (((),), ((), (), (3,)), ((), (), (-1,)), (0, 1, 2), 5, None): refuses("matrix", Recycling, 3, matrix=bad)
    assert Recycling(3, 2, [[0], [0, 1]]) == Recycling(3, 2, ((0,), (0, 1)))   # lists, as they are published, are taken
    assert hash(Recycling(3, matrix=[[1], [], [0, 2]])) == hash(Recycling(3, matrix=((1,), (), (0, 2))))
    assert rank_template(9, np.array((.5, .25))) == rank_template(9, (.5, .25))
    for bad in ((), (0.5, 0.6), (0.5, 0), (1.5,), 5, None, ("a",), (None,), np.array([.5, .6]), np.ones((2, 2))): refuses("ranks", rank_template, 3, bad)


def test_one_token_for_ever():
    "Solution 1: one round to learn, then the whole depth and one more"
    target = TableModel(2, lambda text: exact(0, 1))
    for n in (1, 9, 25, 30): assert len(generate(target, Recycling(2, exact=True), reject, (1,), n, Seeded(0)).ledger.rounds) == 1 + ceil((n - 1) / 8)


@faithful("Token Recycling")
def test_temperature_does_not_change_what_is_learnt():
    "The same round of the same tree teaches the same at every temperature and under top-k: all eight columns, of the scores"
    ctx, taught = prompts("code", 1)[0], set()
    drafter = Recycling(512, matrix=tuple(((x + 1) % 512, (x + 2) % 512) for x in range(512)))
    for options in ({}, dict(temperature=0), dict(temperature=.5, top_k=2), dict(top_p=.3)):
        target = embedded("target", dtype=torch.float64, **options)
        tree = drafter(ctx, Seeded(0))
        taught.add(drafter.learn(Round(tree, target(tree), Verdict(0, 0))).matrix)
        assert target.meter.calls == 1
    (matrix,) = taught
    assert len(matrix[ctx[-1]]) == 8 and matrix[ctx[-1]] == best(target.logits(tree)[0] + 100, 8)


class Pushing(OfTheRows):
    "Solution 2: new successors push the old ones to the right"
    def learn(self, round):
        new, old = super().learn(round).matrix, self.matrix or ((),) * self.V
        return replace(self, matrix=tuple((*a, *(x for x in b if x not in a))[:self.k] for a, b in zip(new, old)))


@settings(max_examples=15, deadline=None)
@given(models(), shapes)
def test_pushing_is_exact(pair, shape):
    for target in (pair[0], cold(pair[0])):
        assert loop_law(target, Pushing(3, 2, shape, exact=True), reject, (0, 1), 4) == target_law(target, (0, 1), 4)
