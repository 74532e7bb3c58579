"Chapter 40: ragged trees as flat arrays, their masks and bits, fixed shapes, and other encodings"
from dataclasses import replace
from itertools import permutations
from math import prod

import numpy as np, pytest, torch
from hypothesis import example, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import DRAWS, examples, laws, proves, seeds, shapes
from specref import exact, iid, law_of, normalize, points, reject, Seeded, Tree, without_replacement
from specref.core.tree import (ancestor_mask, from_choices, from_links, positions as tree_positions,
                               to_choices, to_links)
from specref.gpu.layout import (ancestor_slots, as_lists, batch_positions, chain_rows, check_batch, flat,
                                from_bits, from_draft_tokens, from_linked, from_paths, pack, pad_batch,
                                parents_of, renumber, repeat_batch, to_bits, to_paths, to_slots, unpack)

V = 5

def tree_of(steps, q, seed):
    "A tree grown by steps (which node, which draw or a probe, how many), also below probes"
    tree, rng = Tree((seed % 3, seed % V)), Seeded(seed)
    for at, how, k in steps:
        u = len(tree) - 1 if at == "end" else at % len(tree)
        if how == "probe": tree.add(u, k)
        else: tree.grow(u, DRAWS[how](q), rng, k)
    return tree

def steps(most=6):
    at, how = st.one_of(st.just("end"), st.integers(0, 90)), st.sampled_from([*sorted(DRAWS), "probe"])
    return st.lists(st.tuples(at, how, st.integers(1, 4)), max_size=most)

@st.composite
def batches(draw, most=6):
    "One to four trees of any sizes, the empty one among them, on distributions with zeros and ties"
    return [tree_of(draw(steps(most)), draw(laws(V)), draw(seeds)) for _ in range(draw(st.integers(1, 4)))]

Q = exact(1, 2, 3, 4, 5)
DEEP = [tree_of([("end", "iid", 1)]*16, Q, 1), Tree((0,)),   # depth 16; the root alone; 97 nodes
        tree_of([(i, "without replacement", 4) for i in range(24)], Q, 2)]

def exact_batch(trees):
    lists, q = as_lists(trees)
    return flat(*lists), np.array(q, dtype=object).reshape(len(q), V)

def bare(parent): return flat(parent, [0]*len(parent))

def contexts(trees): return [t.ctx for t in trees]

def reordered(batch, seed):
    "The same nodes, the siblings of each node linked in another order"
    rng = np.random.default_rng(seed)
    child, sibling = torch.full_like(batch.child, -1), torch.full_like(batch.child, -1)
    offered = {*batch.child.tolist(), *batch.sibling.tolist()} - {-1}
    for u in range(batch.n):
        kids = rng.permutation([c for c in sorted(offered) if batch.parent[c] == u]).astype(int).tolist()
        if kids: child[u] = kids[0]
        for a, b in zip(kids, kids[1:]): sibling[a] = b
    return replace(batch, child=child, sibling=sibling)

# Round trip

@proves("thm-flat")
@examples(40, batches())
@example(DEEP)
def test_pack_then_unpack_in_fractions(trees):
    "Parents, tokens, probes, order and distributions; rows are stored once; bounds are those of the trees"
    batch, q = exact_batch(trees)
    assert unpack(batch, q, contexts(trees)) == trees
    assert len({tuple(row) for row in q}) == len(q)
    offered = [(t, i) for t in trees for i in range(1, len(t)) if t.law[i] is not None]
    assert batch.height == max((t.depth[i] for t, i in offered), default=0)
    assert batch.width == max((len(t.children(i)) for t in trees for i in range(len(t))), default=0)

@proves("thm-flat")
@examples(40, batches())
@example(DEEP)
def test_pack_then_unpack_in_floats(trees):
    "Shapes and tokens are the same, distributions to the last digits, from fractions and from floats"
    batch, q = pack(trees, V)
    again = unpack(batch, q, contexts(trees))
    assert q.dtype == torch.float64 and q.shape[1] == V
    twice, q2 = pack(again, V)
    assert all(torch.equal(a, b) for a, b in zip(batch.arrays().values(), twice.arrays().values()))
    assert torch.allclose(q, q2, rtol=1e-12, atol=0)
    for t, s in zip(trees, again):
        assert (t.ctx, t.parent, t.token, t.depth) == (s.ctx, s.parent, s.token, s.depth)
        drawn = [i for i in range(len(t)) if t.law[i] is not None]
        assert drawn == [i for i in range(len(t)) if s.law[i] is not None]
        assert all(np.allclose(t.law[i].astype(float), s.law[i], rtol=1e-12, atol=0) for i in drawn)

@examples(25, laws(V).filter(lambda q: np.count_nonzero(q) > 2), seeds)
def test_how_distributions_are_stored(q, seed):
    "Siblings without replacement share one marked row, independent ones one row, point masses have none"
    def stored(draw, k):
        tree = Tree((0,))
        tree.grow(0, draw, Seeded(seed), k)
        batch, rows = pack([tree])
        return batch.q_row.tolist()[1:], batch.without_replacement.tolist()[1:], len(rows)
    assert stored(without_replacement(q), V) == ([0]*V, [True]*V, 1)
    assert stored(without_replacement(q.astype(float)), V) == ([0]*V, [True]*V, 1)
    assert stored(iid(q), 3) == ([0]*3, [False]*3, 1)
    assert stored(without_replacement(q), 1) == ([0], [False], 1)   # a single child needs no mark
    assert stored(points([2, 0], V, exact=True), 2) == ([-1]*2, [False]*2, 0)

# Masks, positions, bits

@proves("prop-doubling")
@examples(40, batches(), st.integers(0, 40))
@example(DEEP, 0)
def test_masks_and_positions(trees, more):
    "Each row is the tree's own ancestor mask, positions are the tree's own, for any N large enough"
    batch, N = exact_batch(trees)[0], max(map(len, trees)) + more
    mask = ancestor_slots(batch, N)
    where = batch_positions(torch.tensor([len(t.ctx) - 1 for t in trees]), batch.depth, batch.tree)
    assert mask.shape == (batch.n, N)
    for t, r in zip(trees, batch.root.tolist()):
        own = slice(r, r + len(t))
        assert (mask[own, :len(t)].numpy() == ancestor_mask(t)).all() and not mask[own, len(t):].any()
        assert where[own].tolist() == tree_positions(t).tolist()
        assert batch.slot[own].tolist() == [*range(len(t))]
    assert batch.token.tolist() == [x for t in trees for x in (t.ctx[-1], *t.token[1:])]

def test_positions_of_padded_trees():
    "Depths as a table, or as one row for all trees"
    lengths, depth = torch.tensor([5, 0]), torch.tensor([[0, 1, 2], [0, 1, 1]])
    assert batch_positions(lengths, depth).tolist() == [[5, 6, 7], [0, 1, 1]]
    assert batch_positions(lengths, depth[0]).tolist() == [[5, 6, 7], [0, 1, 2]]

@examples(40, st.integers(1, 130), st.integers(1, 5), seeds)
def test_bits_round_trip(N, n, seed):
    "32 columns to a word, the lowest bit first, any number of columns"
    mask = torch.from_numpy(np.random.default_rng(seed).random((2, n, N)) < .5)
    words = to_bits(mask)
    assert words.dtype == torch.int32 and words.shape == (2, n, -(-N // 32))
    assert torch.equal(from_bits(words, N), mask)
    s = torch.arange(N)
    assert torch.equal(words[..., s // 32] >> (s % 32) & 1 == 1, mask)

# Fixed shapes

@examples(40, batches(), st.integers(0, 9))
@example(DEEP, 0)
def test_padding_changes_nothing(trees, more):
    "The same nodes at N*tree + slot, the rest below its root and never offered, for any N large enough"
    batch, q = exact_batch(trees)
    N = max(map(len, trees)) + more
    full = check_batch(pad_batch(batch, N), V, len(q))
    at = N*batch.tree + batch.slot
    assert full.n == N*len(trees) and full.root.tolist() == [*range(0, full.n, N)]
    assert (full.height, full.width) == (batch.height, batch.width)
    for name, x in batch.arrays().items():
        want = renumber(x, at) if name in ("parent", "child", "sibling") else x
        assert name == "root" or torch.equal(getattr(full, name)[at.long()], want)
    mask = ancestor_slots(full, N)
    assert torch.equal(mask[at.long()], ancestor_slots(batch, N)) and mask.any(-1).all()
    def offered(t): return [t.path(i) for i in range(len(t)) if t.law[i] is not None]
    assert [*map(offered, unpack(full, q, contexts(trees)))] == [*map(offered, trees)]

@examples(40, batches(3), st.integers(1, 4), st.booleans())
def test_repeated(trees, B, own):
    "The trees B times over, each time with rows of its own or with the same"
    batch, q = exact_batch(trees)
    rows = np.concatenate([q]*B) if own else q
    many = check_batch(repeat_batch(batch, B, len(q)*own), V, len(rows))
    assert many.B == B*batch.B and unpack(many, rows, contexts(trees)*B) == trees*B
    assert {*many.q_row.tolist()} - {-1} == {*range(len(rows))}

# Encodings

@proves("prop-encodings")
@examples(40, st.lists(shapes(12), min_size=1, max_size=3), seeds)
def test_links_give_parents_and_order(parents, seed):
    "From the links of SGLang alone, siblings in any order: parents, depths, what is offered, the order"
    N, first = max(map(len, parents)), np.cumsum([0, *map(len, parents)])
    joined = [u if u < 0 else u + int(r) for r, own in zip(first, parents) for u in own]
    batch = reordered(pad_batch(bare(joined), N), seed)
    def view(x): return to_slots(batch, x).view(-1, N).long()
    token, child, sibling = batch.token.view(-1, N).long(), view(batch.child), view(batch.sibling)
    again = check_batch(from_linked(token, child, sibling, batch.height, batch.width))
    assert all(torch.equal(x, y) for x, y in zip(again.arrays().values(), batch.arrays().values()))

@proves("prop-encodings")
@examples(40, shapes(12), seeds)
def test_masks_and_paths_give_parents_but_no_order(parent, seed):
    "Mask and paths give the parents; another order of siblings, or probes, change the links and no mask"
    batch, N = bare(parent), len(parent)
    mask, probes = ancestor_slots(batch, N), flat(parent, [0]*N, offered=[0]*N)
    assert parents_of(mask).tolist() == parent == from_paths(to_paths(parent))
    assert all(torch.equal(mask, ancestor_slots(check_batch(b), N)) for b in (reordered(batch, seed), probes))

@proves("prop-encodings")
@examples(40, shapes(12))
def test_choices_links_and_flat_agree(parent):
    "Choices give the shape up to the numbers; flat has the links of `to_links`; a trie merges equal siblings"
    choices, batch = to_choices(parent), bare(parent)
    child, sibling = batch.child.tolist(), batch.sibling.tolist()
    assert sorted(to_choices(from_choices(choices))) == sorted(choices)
    assert (child, sibling) == to_links(parent) and from_links(child, sibling) == parent
    tree, = unpack(flat([-1, 0, 0], [0, 1, 1]), torch.empty(0, 2), [(0,)])
    assert len(tree) == 3 and len({tree.path(i) for i in range(3)}) == 2

# Order

def verified(p, q, how, k, read, below=lambda x: 0):
    "The distribution of two tokens after k children read by `read`, with `below(x)` children below token x"
    def run(rng):
        drawn = Tree((0,))
        drawn.grow(0, DRAWS[how](q), rng, k)
        kids = read(tuple(drawn.token[1:]), rng)
        under = [(i, rng.pick(q)) for i, x in enumerate(kids, 1) for _ in range(below(x))]
        n, m = len(kids), len(under)
        parent, token = [-1] + [0]*n + [i for i, _ in under], [0, *kids, *(x for _, x in under)]
        marks = [False] + [how == "without replacement"]*n + [False]*m
        tree, = unpack(flat(parent, token, [-1] + [0]*(n + m), marks), np.array([q]), [(0,)])
        out = reject([p]*len(tree), tree, rng).tokens(tree)
        return (*out, rng.pick(p))[:2] if len(out) == 1 else out[:2]
    return law_of(run)

def redraw(q, how):
    draw = DRAWS[how](q)
    def chance(order): return prod(draw(order[:j])[x] for j, x in enumerate(order))
    def read(kids, rng):
        orders = sorted({*permutations(kids)})
        return orders[rng.pick(normalize(np.array([*map(chance, orders)])))]
    return read

ONE_BELOW = [lambda x: 0, lambda x: int(x == 1)]

@proves("thm-redrawn")
@examples(8, laws(3, 4), laws(3, 4), st.sampled_from(["iid", "without replacement"]), st.integers(2, 3),
          st.sampled_from(ONE_BELOW))
def test_a_redrawn_order_is_exact(p, q, how, k, below):
    "Two tokens, each exactly p, with and without a grandchild that depends on the token of its parent"
    want = {(x, y): p[x]*p[y] for x, y in np.ndindex(3, 3) if p[x]*p[y]}
    assert verified(p, q, how, k, redraw(q, how), below) == want

@examples(40, st.lists(st.integers(0, 4), min_size=1, max_size=5), st.booleans(), seeds)
def test_chains_of_draft_tokens(counts, drawn, seed):
    "Lengths with and without zeros: the batch of `flat`; each node has the row that vLLM's numbers name"
    rng, m = np.random.default_rng(seed), sum(counts)
    drafts, ends = torch.from_numpy(rng.integers(0, 9, m)), torch.tensor(np.cumsum(counts))
    parent, token, rows, i = [], [], [], 0
    for k in counts:
        parent += [-1, *range(len(parent), len(parent) + k)]
        token, rows, i = [*token, 0, *drafts[i:i + k].tolist()], [*rows, -1, *range(i, i + k)], i + k
    want = flat(parent, token, rows if drawn else None)
    again = check_batch(from_draft_tokens(drafts, ends, max(counts), drawn))
    assert all(torch.equal(x, y) for x, y in zip(again.arrays().values(), want.arrays().values()))
    row, inner = torch.from_numpy(rng.permutation(m + len(counts))), want.child >= 0
    assert torch.equal(chain_rows(again, row[inner], row[~inner]), row)

# On the device

def test_no_value_is_read_on_the_host():
    "The loop's functions run on tensors without values; `pad_batch`, which reads one, fails there"
    offered, without = [0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0]
    good = flat([-1, 0, 0, 1, -1, 4, 4], [0]*7, [-1, 0, 0, -1, -1, 1, -1], without, offered)
    batch, N, mode = pad_batch(good, 8), 8, FakeTensorMode()
    with mode:
        fake = replace(batch, **{name: mode.from_tensor(x) for name, x in batch.arrays().items()})
        mask = from_bits(to_bits(ancestor_slots(fake, N)), N)
        where = batch_positions(torch.ones(2, dtype=torch.int32), fake.depth, fake.tree)
        links = [to_slots(fake, x).view(2, N) for x in (fake.token, fake.child, fake.sibling)]
        assert parents_of(mask.view(2, N, N)).shape == (2, N) and where.shape == (16,)
        assert repeat_batch(fake, 3, 2).n == 48 and from_linked(*links, 2, 2).n == 16
        ragged = from_draft_tokens(links[0].flatten(), links[0].amax(1), 4)
        assert chain_rows(ragged, ragged.token[:16], ragged.root).shape == (18,)
        with pytest.raises(Exception, match="data-dependent|DataDependent|aten._local_scalar_dense"):
            pad_batch(fake, 9)
