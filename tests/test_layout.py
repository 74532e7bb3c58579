"Chapter 40: ragged trees as flat arrays, their masks and bits, fixed shapes, and what other encodings tell and leave out"
import subprocess, sys
from dataclasses import replace
from itertools import permutations
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import CANON, DRAWS, laws, proves, refuses, seeds, shapes
from specref.core.rng import Seeded, law_of
from specref.gpu.layout import Batch, check_batch, flat, from_bits, from_paths, ancestor_slots, from_linked, as_lists, renumber, pack, pad_batch, parents_of, batch_positions, repeat_batch, to_slots, to_bits, to_paths, unpack
from specref.core.law import exact, normalize, one_hot
from specref.verify.reject import reject
from specref.core.tree import Tree, ancestor_mask, from_choices, from_links, iid, points, positions as tree_positions, to_choices, to_links, without_replacement

V = 5
some = settings(max_examples=60)


def tree_of(steps, q, seed):
    "A tree grown by steps (which node, which draw or a probe, how many), anywhere: below probes too, and twice at one node"
    tree, rng = Tree((seed % 3, seed % V)), Seeded(seed)
    for at, how, k in steps:
        u = len(tree) - 1 if at == "end" else at % len(tree)
        if how == "probe": tree.add(u, k)
        else: tree.grow(u, DRAWS[how](q), rng, k)
    return tree


def steps(most=6): return st.lists(st.tuples(st.one_of(st.just("end"), st.integers(0, 90)), st.sampled_from([*sorted(DRAWS), "probe"]), st.integers(1, 4)), max_size=most)


@st.composite
def batches(draw, most=6):
    "One to four trees of any sizes, the empty one among them, on laws with zeros and ties"
    return [tree_of(draw(steps(most)), draw(laws(V)), draw(seeds)) for _ in range(draw(st.integers(1, 4)))]


DEEP = [tree_of([("end", "iid", 1)]*16, exact(1, 2, 3, 4, 5), 1), Tree((0,)),
        tree_of([(i, "without replacement", 4) for i in range(24)], exact(1, 2, 3, 4, 5), 2)]   # depth 16; the root alone; 97 nodes


def exact_batch(trees):
    lists, q = as_lists(trees)
    return flat(*lists), np.array(q, dtype=object).reshape(len(q), V)


def bare(parent): return flat(parent, [0]*len(parent))


def reordered(batch, seed):
    "The same nodes, the siblings of each node linked in another order"
    rng, child, sibling = np.random.default_rng(seed), torch.full_like(batch.child, -1), torch.full_like(batch.child, -1)
    offered = {*batch.child.tolist(), *batch.sibling.tolist()} - {-1}
    for u in range(batch.n):
        kids = rng.permutation([c for c in sorted(offered) if batch.parent[c] == u]).astype(int).tolist()
        for a, b in zip([None, *kids], kids):
            if a is None: child[u] = b
            else: sibling[a] = b
    return replace(batch, child=child, sibling=sibling)


# Nothing is lost

@proves("thm-flat")
@some
@given(batches())
@example(DEEP)
def test_packed_trees_come_back_fraction_by_fraction(trees):
    "Parents, tokens, probes, order and laws; rows are stored once; bounds are those of the trees"
    batch, q = exact_batch(trees)
    assert unpack(batch, q, [t.ctx for t in trees]) == trees
    assert len({tuple(row) for row in q}) == len(q)
    offered = [(t, i) for t in trees for i in range(1, len(t)) if t.law[i] is not None]
    assert batch.height == max((t.depth[i] for t, i in offered), default=0)
    assert batch.width == max((len(t.children(i)) for t in trees for i in range(len(t))), default=0)


@proves("thm-flat")
@some
@given(batches())
@example(DEEP)
def test_floats_come_back_up_to_rounding(trees):
    "pack gives float64 rows; shapes and tokens are the same, laws to the last digits, from fractions and from floats"
    batch, q = pack(trees, V)
    again = unpack(batch, q, [t.ctx for t in trees])
    assert q.dtype == torch.float64 and q.shape[1] == V
    twice, q2 = pack(again, V)
    assert all(torch.equal(a, b) for a, b in zip(batch.arrays().values(), twice.arrays().values())) and torch.allclose(q, q2, rtol=1e-12, atol=0)
    for t, s in zip(trees, again):
        assert (t.ctx, t.parent, t.token, t.depth) == (s.ctx, s.parent, s.token, s.depth) and [x is None for x in t.law] == [x is None for x in s.law]
        assert all(np.allclose(np.array(x, dtype=float), y, rtol=1e-12, atol=0) for x, y in zip(t.law, s.law) if x is not None)


@given(laws(V).filter(lambda q: np.count_nonzero(q) > 2), seeds)
def test_how_laws_are_stored(q, seed):
    "Siblings without replacement share one row apart, independent ones one row, points none; one child alone is not apart"
    def told(draw, k):
        tree = Tree((0,)); tree.grow(0, draw, Seeded(seed), k)
        batch, rows = pack([tree])
        return batch.q_row.tolist()[1:], batch.without_replacement.tolist()[1:], len(rows)
    assert told(without_replacement(q), V) == ([0]*V, [True]*V, 1)
    assert told(without_replacement(q.astype(float)), V) == ([0]*V, [True]*V, 1)
    assert told(iid(q), 3) == ([0]*3, [False]*3, 1) and told(without_replacement(q), 1) == ([0], [False], 1)
    assert told(points([2, 0], V, exact=True), 2) == ([-1]*2, [False]*2, 0)


def test_what_cannot_be_packed():
    a, b = Tree((0,)), Tree((0,))
    a.add(0, 1, exact(1, 1)); b.add(0, 1, exact(1, 1, 1))
    for trees in ([], [Tree(())], [a, b]): refuses("trees", pack, trees)
    refuses("trees", pack, [a], 3)
    batch, q = pack([a])
    refuses("ctxs", unpack, batch, q, [(0,), (0,)])
    refuses("ctxs", unpack, batch, q, [(1,)])
    refuses("q_row", unpack, batch, q[:0], [(0,)])
    refuses("token", unpack, batch, q[:, :1], [(0,)])
    assert pack([Tree((0,))], V)[1].shape == (0, V)


# The door

WRONG = {   # of the batch of parents -1 0 0 1 | -1 4 4, the last a probe
    "root": [[1, 4], [0, 0], [0, 7], [0, -1]],
    "token": [[-1]*7, [0, 0, 9, 0, 0, 0, 0]],
    "parent": [[-1, 0, 3, 1, -1, 4, 4], [-1, 0, 0, 1, -1, 1, 4], [-1, 0, 0, -1, -1, 4, 4], [-1, 0, 0, 1, 0, 4, 4], [-1, 1, 0, 1, -1, 4, 4], [-1, 0, 0, 9, -1, 4, 4]],
    "depth": [[0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 2, 0, 1, 1], [0, 1, 1, 2, 0, 1, -1]],
    "child": [[1, 3, 3, -1, 5, -1, -1], [0, 3, -1, -1, 5, -1, -1], [1, 9, -1, -1, 5, -1, -1], [1, 3, -1, -2, 5, -1, -1], [3, 3, -1, -1, 5, -1, -1]],
    "sibling": [[-1, 1, -1, -1, -1, -1, -1], [-1, 2, 1, -1, -1, -1, -1], [4, 2, -1, -1, -1, -1, -1], [-1, 3, -1, -1, -1, -1, -1],
                [-1, 9, -1, -1, -1, -1, -1], [-1, 2, -1, -1, -1, -1, 5], [-1, 2, 2, -1, -1, -1, -1]],
    "q_row": [[-1, 0, 0, -1, -1, 2, -1], [0]*7, [-1, -2, 0, -1, -1, 1, -1], [-1, 0, 0, -1, -1, 1, 1]],
}


def good(): return flat([-1, 0, 0, 1, -1, 4, 4], [0]*7, [-1, 0, 0, -1, -1, 1, -1], [0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 1, 0])


@pytest.mark.parametrize("name, at", [(name, i) for name in WRONG for i in range(len(WRONG[name]))])
def test_what_is_no_batch_is_named(name, at):
    "Cycles, later parents, numbers out of range, links that disagree with the parents or meet a node twice"
    assert check_batch(good(), V, 2).n == 7
    refuses(name, check_batch, replace(good(), **{name: torch.tensor(WRONG[name][at], dtype=torch.int32)}), V, 2)


def test_bounds_and_apart():
    batch = good()
    for name, least in (("height", 2), ("width", 2)):
        assert getattr(batch, name) == least and check_batch(replace(batch, **{name: 9}))
        refuses(name, check_batch, replace(batch, **{name: least - 1}))
        refuses(name, replace, batch, **{name: -1})
    refuses("without_replacement", check_batch, replace(batch, without_replacement=torch.ones(7, dtype=torch.bool)))
    for parent in ([-2], [0], [-1, 2, 0]): refuses("parent", bare, parent)
    refuses("parent", bare, [-1, -1, 0])
    refuses("root", bare, [])


@pytest.mark.parametrize("name", [*good().arrays()])
def test_the_constructor_looks_without_reading(name):
    "A wrong dtype, shape, device or type is refused at once, and nothing is read: arrays without numbers will do"
    batch = good()
    x = getattr(batch, name)
    for bad in (x.long(), x.float(), x[None], x.tolist()): refuses(name, replace, batch, **{name: bad})
    if name != "root":
        refuses("(" + name + "|parent|depth)", replace, batch, **{name: x[:-1]})
        refuses(name, replace, batch, **{name: x.to("meta")})
    assert batch.to("meta").device.type == "meta" and batch.to("meta").n == 7


# Masks, positions, bits

@proves("prop-doubling")
@some
@given(batches(), st.integers(0, 40))
@example(DEEP, 0)
def test_masks_and_positions(trees, more):
    "Each row is the tree's own ancestor mask, and positions are the tree's own, for any N that is large enough"
    batch, N = exact_batch(trees)[0], max(map(len, trees)) + more
    mask = ancestor_slots(batch, N)
    where = batch_positions(torch.tensor([len(t.ctx) - 1 for t in trees]), batch.depth, batch.tree)
    assert mask.shape == (batch.n, N)
    for t, r in zip(trees, batch.root.tolist()):
        assert (mask[r:r + len(t), :len(t)].numpy() == ancestor_mask(t)).all() and not mask[r:r + len(t), len(t):].any()
        assert where[r:r + len(t)].tolist() == tree_positions(t).tolist()
        assert batch.slot[r:r + len(t)].tolist() == [*range(len(t))]
    assert [trees[b].token[s] if s else trees[b].ctx[-1] for b, s in zip(batch.tree.tolist(), batch.slot.tolist())] == batch.token.tolist()


def test_positions_of_padded_and_of_like_trees():
    "Depths as a table, as one row for all trees, or flat with the tree of each node: the same sums; lengths that are not one a tree are refused"
    lengths, depth = torch.tensor([5, 0, 2]), torch.tensor([[0, 1, 2], [0, 1, 1], [0, 0, 0]])
    want = [[5, 6, 7], [0, 1, 1], [2, 2, 2]]
    assert batch_positions(lengths, depth).tolist() == want and batch_positions(lengths, depth.flatten(), torch.arange(9) // 3).view(3, 3).tolist() == want
    assert batch_positions(lengths, depth[0]).tolist() == [[5, 6, 7], [0, 1, 2], [2, 3, 4]]
    for bad in (lengths[:1], lengths[:2], lengths[0], lengths[:, None]): refuses("lengths", batch_positions, bad, depth)


@proves("prop-doubling")
@given(shapes(12), st.integers(0, 4))
def test_k_steps_reach_two_to_the_k(parent, k):
    "After k steps a row holds the node and its nearest 2**k - 1 ancestors: a mask of 2**k columns is made by k steps"
    N = len(parent)
    mask, up = torch.eye(N, dtype=torch.bool), torch.tensor([max(u, 0) for u in parent])
    for _ in range(k): mask, up = mask | mask[up], up[up]
    def near(i, m): return [i] if m == 1 or i == 0 else [i, *near(parent[i], m - 1)]
    assert [sorted(near(i, 2**k)) for i in range(N)] == [row.nonzero().flatten().tolist() for row in mask]
    if 2**k >= N: assert torch.equal(mask, ancestor_slots(bare(parent), N))


@some
@given(st.integers(1, 130), st.integers(1, 5), seeds)
def test_bits_and_back(N, n, seed):
    "32 columns to a word, the lowest bit first, any number of columns"
    mask = torch.from_numpy(np.random.default_rng(seed).random((2, n, N)) < .5)
    words = to_bits(mask)
    assert words.dtype == torch.int32 and words.shape == (2, n, -(-N // 32)) and torch.equal(from_bits(words, N), mask)
    assert all((int(words[b, i, s // 32]) >> (s % 32)) & 1 == mask[b, i, s] for b in range(2) for i in range(n) for s in range(N))


def test_bits_doors():
    words = to_bits(torch.ones(1, 40, dtype=torch.bool))
    assert words.tolist() == [[-1, 255]]
    for N in (65, -1): refuses("N", from_bits, words, N)


# Fixed shapes

@some
@given(batches(), st.integers(0, 9))
@example(DEEP, 0)
def test_padding_changes_nothing(trees, more):
    "The same nodes at N*tree + slot, the rest below its root and never offered, on any N that holds the largest"
    batch, q = exact_batch(trees)
    N = max(map(len, trees)) + more
    full = check_batch(pad_batch(batch, N), V, len(q))
    at = N*batch.tree + batch.slot
    assert full.n == N*len(trees) and full.root.tolist() == [*range(0, full.n, N)] and (full.height, full.width) == (batch.height, batch.width)
    for name, x in batch.arrays().items():
        if name != "root": assert torch.equal(getattr(full, name)[at.long()], renumber(x, at) if name in ("parent", "child", "sibling") else x)
    assert torch.equal(ancestor_slots(full, N)[at.long()], ancestor_slots(batch, N)) and ancestor_slots(full, N).any(-1).all()
    for t, s in zip(trees, unpack(full, q, [t.ctx for t in trees])):
        assert [s.path(i) for i in range(len(s)) if s.law[i] is not None] == [t.path(i) for i in range(len(t)) if t.law[i] is not None]
    if N > 1: refuses("N", pad_batch, batch, max(map(len, trees)) - 1)


@some
@given(batches(3), st.integers(1, 4), st.booleans())
def test_repeated(trees, B, own):
    "The trees B times over, each time with rows of its own or with the same"
    batch, q = exact_batch(trees)
    many = check_batch(repeat_batch(batch, B, len(q)*own), V, len(q)*B if own else len(q))
    assert many.B == B*batch.B and unpack(many, np.concatenate([q]*B) if own else q, [t.ctx for t in trees]*B) == trees*B
    assert len(q) == 0 or {*many.q_row.tolist()} - {-1} == {*range(len(q)*(B if own else 1))}


# Encodings

@proves("prop-encodings")
@some
@given(st.lists(shapes(12), min_size=1, max_size=3), seeds)
def test_links_tell_parents_and_order(parents, seed):
    "From the links of SGLang alone, their numbers in any order among siblings: parents, depths, what is offered, and the order"
    N = max(map(len, parents))
    batch = reordered(pad_batch(flat([u if u < 0 else u + sum(map(len, parents[:b])) for b, ps in enumerate(parents) for u in ps], [0]*sum(map(len, parents))), N), seed)
    view = lambda x: to_slots(batch, x).view(-1, N).long()
    again = check_batch(from_linked(batch.token.view(-1, N).long(), view(batch.child), view(batch.sibling), batch.height, batch.width))
    assert all(torch.equal(x, y) for x, y in zip(again.arrays().values(), batch.arrays().values()))


@proves("prop-encodings")
@some
@given(shapes(12), seeds)
def test_masks_and_paths_tell_parents_and_no_order(parent, seed):
    "Mask and paths give the parents and back; another order of siblings changes the links and neither of them"
    batch, N = bare(parent), len(parent)
    other = reordered(batch, seed)
    assert parents_of(ancestor_slots(batch, N)).tolist() == parent == from_paths(to_paths(parent))
    assert torch.equal(ancestor_slots(batch, N), ancestor_slots(other, N)) and torch.equal(batch.parent, other.parent)
    t, s = (unpack(b, np.empty((0, 1), dtype=object), [(0,)])[0] for b in (batch, other))
    assert sorted(map(tuple, to_paths(parent).tolist())) == sorted(map(tuple, to_paths(other.parent.tolist()).tolist())) and sorted(t.depth) == sorted(s.depth)


@proves("prop-encodings")
def test_an_order_and_a_probe_that_only_links_show():
    "Two children, turned round, or one of them a probe: one mask, one set of paths, three different links"
    plain = bare([-1, 0, 0])
    turned = replace(plain, child=torch.tensor([2, -1, -1], dtype=torch.int32), sibling=torch.tensor([-1, -1, 1], dtype=torch.int32))
    probe = flat([-1, 0, 0], [0]*3, offered=[0, 1, 0])
    masks, links = [ancestor_slots(check_batch(b), 3) for b in (plain, turned, probe)], {(*b.child.tolist(), *b.sibling.tolist()) for b in (plain, turned, probe)}
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2]) and len(links) == 3


@proves("prop-encodings")
@some
@given(shapes(12))
def test_choices_links_and_flat_agree(parent):
    "Choices give the shape and its order up to the numbers; flat has the links of `to_links`; a trie merges equal siblings"
    assert sorted(to_choices(from_choices(to_choices(parent)))) == sorted(to_choices(parent))
    batch = bare(parent)
    assert (batch.child.tolist(), batch.sibling.tolist()) == to_links(parent) and from_links(batch.child.tolist(), batch.sibling.tolist()) == parent
    tree, = unpack(flat([-1, 0, 0], [0, 1, 1]), np.empty((0, 2), dtype=object), [(0,)])
    assert len(tree) == 3 and len({tree.path(i) for i in range(3)}) == 2


def test_the_links_of_a_kernel_test():
    "The two trees in the test of SGLang's verifier: in the second, node 4 comes before its sibling 1"
    child, sibling = torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]), torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]])
    batch = check_batch(from_linked(torch.arange(12).view(2, 6), child, sibling, 3, 2))
    assert batch.parent.tolist() == [-1, 0, 1, 0, 3, 4, -1, 6, 7, 8, 6, 10] and batch.depth.tolist() == [0, 1, 2, 1, 2, 3, 0, 1, 2, 3, 1, 2]
    assert not (batch.q_row >= 0).any() and torch.equal(torch.cat([to_slots(batch, x).view(2, 6) for x in (batch.child, batch.sibling)]), torch.cat([child, sibling]).int())
    second = unpack(batch, np.empty((0, 12), dtype=object), [(0,), (6,)])[1]
    assert [second.token[c] for c in second.children(0)] == [10, 7] and len(second) == 6


def test_paths_doors():
    "Two parents, a lost node, a later parent"
    for paths in ([[0, 1, 2], [0, 2, -1]], [[0, 1], [0, 3]], [[0, 2, 1]], [[1, 2]], []): refuses("paths", from_paths, paths)
    refuses("parent", to_paths, [-1, 2, 0])
    assert to_paths([-1]).tolist() == [[0]] and to_paths([-1, 0, 0, 1, 2, 1]).tolist() == [[0, 1, 3], [0, 1, 5], [0, 2, 4]]


# Order

def handed(p, q, how, k, read, below=lambda x: 0):
    "The law of two tokens after k children of one row were read back as `read` says; a child with token x has `below(x)` children of row q"
    def run(rng):
        drawn = Tree((0,)); drawn.grow(0, DRAWS[how](q), rng, k)
        kids = read(tuple(drawn.token[1:]), rng)
        under = [(i, rng.pick(q)) for i, x in enumerate(kids, 1) for _ in range(below(x))]
        n, m = len(kids), len(under)
        tree, = unpack(flat([-1] + [0]*n + [i for i, _ in under], [0, *kids, *(x for _, x in under)], [-1] + [0]*(n + m),
                            [False] + [how == "without replacement"]*n + [False]*m), np.array([q]), [(0,)])
        out = reject([p]*len(tree), tree, rng).tokens(tree)
        return (*out, rng.pick(p))[:2] if len(out) == 1 else out[:2]
    return law_of(run)


def redraw(q, how):
    draw = DRAWS[how](q)
    def read(kids, rng):
        orders = sorted({*permutations(kids)})
        return orders[rng.pick(normalize(np.array([prod(draw(o[:j])[x] for j, x in enumerate(o)) for o in orders])))]
    return read


@proves("thm-redrawn")
@settings(max_examples=25)
@given(laws(3, 4), laws(3, 4), st.sampled_from(["iid", "without replacement"]), st.integers(2, 3), st.sampled_from([lambda x: 0, lambda x: int(x == 1)]))
def test_a_redrawn_order_is_as_good(p, q, how, k, below):
    "Two tokens, each exactly p, with and without a grandchild that depends on the token of its parent"
    assert handed(p, q, how, k, redraw(q, how), below) == {(x, y): p[x]*p[y] for x, y in np.ndindex(3, 3) if p[x]*p[y]}


@proves("thm-redrawn")
def test_orders_that_bias():
    "On CANON: the links are exact; sorting, and shuffling what was drawn apart, are off by the fractions in the chapter; a plain shuffle of independent ones is exact"
    p, q = CANON
    off = lambda how, read: sum(abs(w - handed(p, q, how, 2, read).of(lambda xs: xs[0]).get(x, 0)) for x, w in enumerate(p)) / 2
    by_token, kept = (lambda xs, rng: sorted(xs)), (lambda xs, rng: xs)
    def shuffle(xs, rng): return xs if rng.coin(1, of=2) else xs[::-1]
    assert [off("without replacement", read) for read in (kept, by_token, shuffle)] == [0, *(exact(17, 103)[0], exact(503, 39817)[0])]
    assert [off("iid", read) for read in (kept, by_token, shuffle)] == [0, exact(3, 47)[0], 0]


# On the device

def test_nothing_is_read_on_the_host():
    "Every function for the loop runs on tensors that have no numbers, where reading one is an error; `pad_batch`, which says that it reads, fails there"
    batch, N = pad_batch(good(), 8), 8
    mode = FakeTensorMode()
    with mode:
        fake = replace(batch, **{name: mode.from_tensor(x) for name, x in batch.arrays().items()})
        mask = ancestor_slots(fake, N)
        from_bits(to_bits(mask), N), parents_of(mask.view(2, N, N)), batch_positions(torch.ones(2, dtype=torch.int32), fake.depth, fake.tree), repeat_batch(fake, 3, 2)
        again = from_linked(*(to_slots(fake, x).view(2, N) for x in (fake.token, fake.child, fake.sibling)), 2, 2)
        assert again.n == 16 and mask.shape == (16, 8)
        with pytest.raises(Exception, match="data-dependent|DataDependent|aten._local_scalar_dense"): pad_batch(fake, 9)


def test_the_package_is_light():
    "`import specref.gpu` loads neither torch nor triton"
    code = "import sys, specref.gpu; sys.exit(bool({'torch', 'triton'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
