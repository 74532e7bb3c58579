"Chapter 21c: the adjacency matrix, updated at every node, and the tree that is looked up in it"
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice, product
from math import prod

import numpy as np, torch
from hypothesis import strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import examples, faithful, models, proves, seeds
from published import drafted
from specref import (Drafter, embedded, Enumerator, loop_law, match, one_hot, prompts, Recycling, reject,
                     Round, rounds, Seeded, target_law, Tree, Verdict)
from specref.draft.recycling import RANK_RATES, rank_template

shapes = st.sampled_from([((0,),), ((0,), (1,), (0, 0)), ((0,), (0, 0), (0, 1), (1,), (1, 0))])
rows = st.lists(st.integers(0, 2), max_size=2, unique=True).map(tuple)
matrices = st.just(()) | st.tuples(rows, rows, rows)

def best(p, k): return tuple(sorted((x for x in range(len(p)) if p[x] > 0), key=lambda x: (-p[x], x))[:k])
def small(shape, matrix=()): return Recycling(3, 2, shape, exact=True, matrix=matrix)

# The template and the tree

@examples(40, st.integers(1, 10), st.lists(st.integers(1, 9), min_size=2, max_size=3))
def test_the_template_has_the_heaviest_paths(n, weights):
    "Against all paths: the same weights, every node with its parent and its earlier siblings"
    ranks = tuple(Fraction(x, 10) for x in sorted(weights, reverse=True))
    shape, weight = rank_template(n, ranks), lambda path: prod(ranks[r] for r in path)
    every = [path for d in range(1, 6) for path in product(range(len(ranks)), repeat=d)]
    deepest = max(map(len, shape))
    if deepest < 6: assert [weight(p) for p in shape] == sorted(map(weight, every), reverse=True)[:n]
    paths = {(), *shape}
    assert len(paths) == n + 1 and all(p[:-1] in paths for p in shape)
    assert all(not r or (*p, r - 1) in paths for *p, r in shape)
    assert sum(RANK_RATES) <= 1 and Recycling(3, 2, [[0], [0, 1]]) == Recycling(3, 2, ((0,), (0, 1)))

@examples(80, shapes, matrices, st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple))
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

# State after a round

@examples(40, models(), shapes, matrices, seeds)
def test_every_node_overwrites_its_row(pair, shape, matrix, seed):
    "Against a dictionary: rejected and unreached nodes too, a token's last node, other rows unchanged"
    drafter = small(shape, matrix)
    for r in islice(rounds(pair[0], drafter, reject, (0, 1), Seeded(seed)), 3):
        rows = dict(enumerate(drafter.matrix or [()] * 3))
        for u in range(len(r.tree)): rows[r.tree.text(u)[-1]] = best(pair[0].law(r.tree.text(u)), 2)
        after = drafter.learn(r)
        assert after == replace(drafter, matrix=(rows[0], rows[1], rows[2])) and hash(after)
        drafter = after

@proves("thm-learning")
@examples(20, models(), shapes, matrices, st.sampled_from([reject, match]))
def test_the_distribution_is_the_targets(pair, shape, matrix, verify):
    drafter, ctx = small(shape, matrix), (0, 1)
    drafter_contract(drafter, ctx)
    verifier_contract(pair[0], drafter, verify, ctx, 2)
    assert loop_law(pair[0], drafter, verify, ctx, 4, stop={2}) == target_law(pair[0], ctx, 4, stop={2})

@dataclass(frozen=True)
class Anything(Drafter):
    "Mixes all of a round, rejected tokens, rows and verdict, into a state that determines shape and tokens"
    state: int
    depth = 2
    def __call__(self, ctx, rng):
        tree, r = Tree(ctx), np.random.default_rng(self.state)
        for u in (0, 0, 1):
            x = int(r.integers(3))
            tree.add(min(u, len(tree) - 1), x, one_hot(x, 3, exact=True))
        return tree
    def learn(self, round):
        rows = (int(np.argmax(round.p[u])) for u in range(len(round.tree)))
        verdict = round.verdict
        return Anything(hash((self.state, *round.tree.token[1:], verdict.node, verdict.token, *rows)) % 1000)

@proves("thm-learning")
@examples(15, models(), seeds)
def test_a_drafters_state_may_be_any_function(pair, seed):
    for verify in (reject, match):
        assert loop_law(pair[0], Anything(seed % 1000), verify, (0,), 3) == target_law(pair[0], (0,), 3)

# A real model

class AcceptedOnly(Recycling):
    "Stores the rows of accepted tokens, as an n-gram pool of the text does"
    def read_nodes(self, round): return 0, *round.tree.ancestors(round.verdict.node)

class FirstCounts(Recycling):
    "Of the nodes with one token the first counts, not the last"
    def read_nodes(self, round): return reversed(range(len(round.tree)))

class FirstRows(Recycling):
    "A row is stored once and never overwritten"
    def learn(self, round):
        new = super().learn(round)
        before = self.matrix or [()] * self.V
        return replace(new, matrix=tuple(old or row for old, row in zip(before, new.matrix)))

@faithful("Token Recycling", plain={
    "accepted tokens": drafted(AcceptedOnly), "the first node": drafted(FirstCounts),
    "the first rows": drafted(FirstRows)})
def test_rejected_nodes_update_the_matrix_and_are_drafted_later(subject):
    """Greedy: the matrix is the top eight scores at the last node of each token, rejected nodes too;
    the next tree is looked up in it; what was rejected is accepted later; one call a round"""
    target, ctx = embedded("target", dtype=torch.float64, temperature=0), prompts("english", 1)[0]
    drafter, known, from_rejected = subject.drafter(target), {}, 0
    for k, r in enumerate(islice(rounds(target, drafter, reject, ctx, Seeded(0)), 20)):
        path, logits = (0, *r.tree.ancestors(r.verdict.node)), target.logits(r.tree)
        for u in range(1, len(r.tree)):
            row, accepted = known[r.tree.text(r.tree.parent[u])[-1]]
            assert r.tree.token[u] in row
            from_rejected += u in path and not accepted
        for u in range(len(r.tree)):
            known[r.tree.text(u)[-1]] = tuple(np.argsort(-logits[u], kind="stable")[:8]), u in path
        drafter = drafter.learn(r)
        assert all(row == known.get(x, ((), 0))[0] for x, row in enumerate(drafter.matrix))
        assert target.meter.calls == k + 1 and len(r.tree) <= 25
    assert from_rejected > 0

class Warped(Recycling):
    "Stores the likeliest tokens at the temperature of decoding"
    def learn(self, round): return super().learn(replace(round, p=[*round.p]))

@faithful("Token Recycling", plain={"warped rows": drafted(Warped)})
def test_temperature_does_not_change_the_matrix(subject):
    "The same round of the same tree gives the same matrix at every temperature and under top-k"
    ctx, learnt = prompts("code", 1)[0], set()
    matrix = tuple(((x + 1) % 512, (x + 2) % 512) for x in range(512))
    drafter = subject.drafter(embedded("target"), dict(matrix=matrix))
    for options in ({}, dict(temperature=0), dict(temperature=.5, top_k=2), dict(top_p=.3)):
        target = embedded("target", dtype=torch.float64, **options)
        tree = drafter(ctx, Seeded(0))
        learnt.add(drafter.learn(Round(tree, target(tree), Verdict(0, 0))).matrix)
    assert len(learnt) == 1
    (matrix,) = learnt
    assert len(matrix[ctx[-1]]) == 8 and len(tree) == 1 + sum(max(path) < 2 for path in drafter.shape)
