"The kernels of chapter 42a, group by group: `python kernels_interpreted.py GROUP`, interpreted or not"
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from helpers import DRAWS
from specref.verify.block import block
from specref.core.rng import Enumerator, Seeded
from specref.gpu import kernels
from specref.gpu.layout import flat, pack
from specref.gpu.verify import Logits, decision_cells, verify_trees, verify_chains
from specref.core.law import exact, greedy
from specref.verify.reject import reject
from specref.core.target import TableModel, random_table, target_law
from specref.core.tree import Tree, iid, in_sequence, points, without_replacement

LAST, known, CHECKS = 1 - 2.**-53, set(), {}


def called(self, *args, **kw):
    "A function inside a kernel: the interpreter patches the language at each call; once a module is enough"
    if id(self.fn.__globals__) not in known: interpreter._patch_lang(self.fn)
    known.add(id(self.fn.__globals__))
    return self.rewrite()(*args, **kw)


interpreter.InterpretedFunction.__call__ = called


def check(group):
    "Registers a check, which may return a count"
    def note(f):
        CHECKS.setdefault(group, []).append(f)
        return f
    return note


def same(a, b): return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values()))


def floats(laws): return torch.tensor(np.array([law.astype(float) for law in laws]))


# Every cell of the uniforms

def drafts(f):
    "What `f(rng)` may draw, with probabilities"
    todo = [[]]
    while todo:
        rng = Enumerator(todo.pop())
        yield f(rng), rng.mass
        todo += rng.todo


def grown(*draws):
    "A drafter whose k-th step gives (node, draw, count) children"
    def draft(rng):
        tree = Tree((0,))
        for node, draw, k in draws:
            if node < len(tree): tree.grow(node, draw, rng, k)
        return tree
    return draft


A, B, C = exact(1, 2, 3), exact(2, 0, 1), exact(1, 1, 0, 0)
def exact_points(*tokens, V=4): return points([*tokens], V, exact=True)


MIXED = in_sequence(exact_points(2, V=3), iid(A), exact_points(0, V=3), iid(B))
CHAIN = grown((0, iid(A), 1), (1, iid(B), 1))
COLD = TableModel(3, lambda text: greedy(random_table(3, 4).law(text)))
RULES = {  # the target, the drafter, the temperature of the target's logits
    "iid": (random_table(3, 5), grown((0, iid(A), 2), (1, iid(B), 1)), 1),
    "without replacement": (random_table(3, 6), grown((0, without_replacement(A), 2),
                                                      (1, without_replacement(B), 2)), 1),
    "support used up": (random_table(4, 1), grown((0, without_replacement(C), 3)), 1),
    "points": (random_table(4, 2), grown((0, exact_points(2, 0, 3), 3), (1, exact_points(1, 3), 2)), 1),
    "mixed": (random_table(3, 3), grown((0, MIXED, 4)), 1),
    "mixed without replacement": (random_table(3, 8), grown((0, DRAWS["mixed"](B), 3)), 1),
    "chain": (random_table(3, 9), CHAIN, 1),
    "greedy": (COLD, grown((0, iid(A), 2), (1, without_replacement(A), 2)), 0),
    "block": (random_table(3, 7, zeros=False), CHAIN, 1),
}


def celled(name):
    "Each cell of each draft: tree, rows of p, volume (times that of the draft), the cell"
    target, draft, _ = RULES[name]
    verify = block if name == "block" else reject
    for tree, mass in drafts(draft):
        p = target(tree)
        for cell in decision_cells(lambda rng: verify(p, tree, rng)):
            yield tree, [p[i] for i in range(len(tree))], mass * cell.volume, cell


TREES = verify_trees, kernels.fused_verify_trees
CHAINS = verify_chains, kernels.fused_verify_chains


def doubles(x): return torch.tensor([float(u) for u in x], dtype=torch.float64)


def celled_numbers(found):
    "Coins and picks in the middle of each cell, and the extremes where the cell does not use them"
    coins, picks = [], []
    for k, (tree, *_, cell) in enumerate(found):
        free = (0., LAST)[k % 2]
        coins += [cell.coins.get(i, free) for i in range(len(tree))]
        picks.append(next(iter(cell.picks.values()), free))
    return doubles(coins), doubles(picks)


def outcomes(out, root):
    "Tokens and nodes (in the tree) of each request"
    tokens = [tuple(t[:n]) for t, n in zip(out.tokens.tolist(), out.length.tolist())]
    return tokens, [[i - r for i in nodes if i >= 0] for r, nodes in zip(root.tolist(), out.nodes.tolist())]


def agreed(name):
    "Reference, twin and kernel on all cells of a rule, with the target's law by volumes"
    target, _, temperature = RULES[name]
    found, (twin, kernel) = [*celled(name)], CHAINS if name == "block" else TREES
    batch, q = pack([tree for tree, *_ in found])
    numbers, p = celled_numbers(found), floats([law for _, rows, *_ in found for law in rows])
    hot = [random_table(3, 4).law(tree.text(i)) for tree, *_ in found for i in range(len(tree))]
    x = Logits((p if temperature else floats(hot)).log(), temperature)
    want = ([cell.outcome.tokens(tree) for tree, *_, cell in found],
            [path(tree, cell.outcome.node) for tree, *_, cell in found])
    for size, args in (4, (p, q)), (2, (x, Logits(q.log()))):
        a = twin(batch, *args, *numbers)
        assert outcomes(a, batch.root)[0] == want[0], f"{name}: the twin is not the reference"
        if size == 2 and name != "greedy": args = args[0], q      # logits and probabilities together
        b = kernel(batch, *args, *numbers, block=size)
        assert same(a, b) and outcomes(b, batch.root) == want, f"{name}: the kernel is not the twin"
    complete(name, target, batch.height + 1, zip(want[0], [volume for *_, volume, _ in found]))
    return 2 * len(found)


def complete(name, target, n, texts):
    "Asserts that the texts' volumes, continued by the target, are its law of n tokens"
    law = {}
    for text, volume in texts: law[text] = law.get(text, 0) + volume
    assert sum(law.values()) == 1
    got, want = continued(law, target, n), target_law(target, (0,), n)
    assert {t: w for t, w in got.items() if w} == {t: w for t, w in want.items() if w}, f"{name}: another law"


def path(tree, i): return [] if i == 0 else path(tree, tree.parent[i]) + [i]


def continued(law, target, n):
    "The law of texts of `n` tokens whose beginnings have the law given, the rest sampled from the target"
    for k in range(n):
        out = {text: w for text, w in law.items() if len(text) != k}
        for text in [text for text in law if len(text) == k]:
            for x, share in enumerate(target.law((0,) + text)):
                out[text + (x,)] = out.get(text + (x,), 0) + law[text] * share
        law = out
    return law


for rule in RULES:
    def one(rule=rule): return agreed(rule)
    one.__name__ = rule
    check("cells")(one)


# Random batches

def law(rng, V):
    "A law with zeros, ties, and now and then a point"
    w = rng.multinomial(int(rng.choice([1, 6, 64])), rng.dirichlet(np.full(V, rng.choice([.05, .5, 5]))))
    return w / w.sum()


def ragged(rng, V, chains):
    "A tree of any draw, with duplicates and up to 16 levels; a chain; or nothing but a root"
    tree, todo = Tree((int(rng.integers(V)),)), [0]
    for _ in range(int(rng.choice([0, 1, 4, 16] if chains else [0, 1, 2, 5]))):
        i, q = todo.pop() if chains or rng.random() < .7 else todo.pop(0), law(rng, V)
        some = [int(x) for x in rng.integers(0, V, 4)]
        alike = points(some, V)
        draws = [iid(q), alike, without_replacement(q), in_sequence(iid(q), alike, iid(law(rng, V)), alike)]
        draw, seed = draws[rng.integers(2 if chains else 4)], Seeded(int(rng.integers(10**9)))
        todo += tree.grow(i, draw, seed, 1 if chains else int(rng.integers(1, 5)))
        if not todo: break
    return tree


def numbers(rng, n):
    k = rng.integers(0, 8, n)
    return torch.tensor(np.where(k == 0, 0, np.where(k == 1, LAST, rng.random(n))))


def rows(rng, batch, q, V):
    "Rows for p: any law, or the row that a child was drawn from, so that nothing remains"
    p = np.array([law(rng, V) for _ in range(batch.n)]).reshape(batch.n, V)
    for u, r in zip(batch.parent.tolist(), batch.q_row.tolist()):
        if r >= 0 and rng.random() < .5: p[u] = q[r] if rng.random() < .5 else .5 * p[u] + .5 * q[r].numpy()
    return torch.tensor(p)


def kinds(rng, p, q, B):
    "The same rows as float64, float32, float32 logits and bfloat16 logits"
    t, s = torch.tensor(rng.choice([0., .5, 1., 2.], B)), float(rng.choice([.7, 1.]))
    yield p, q
    yield p.float(), q.float()
    yield Logits(p.float().log(), t), Logits(q.float().log(), s)
    yield Logits((p + 1e-9*(p > 0)).log().bfloat16(), s), Logits(q.log().bfloat16(), t)


def compared(seeds, sizes, blocks, chains):
    "How many walks of random batches agree: all, or an error"
    n, (twin, kernel) = 0, CHAINS if chains else TREES
    for seed in seeds:
        rng = np.random.default_rng(seed)
        V, size = int(rng.choice(sizes)), int(rng.choice(blocks))
        batch, q = pack([ragged(rng, V, chains) for _ in range(4)], V=V)
        sound = chains or seed % 3 > 0
        marks = torch.tensor(rng.random(batch.n) < .5) & (batch.q_row >= 0)
        if not sound: batch = replace(batch, without_replacement=marks)
        p, coins, picks = rows(rng, batch, q, V), numbers(rng, batch.n), numbers(rng, batch.B)
        for k, args in enumerate(kinds(rng, p, q, batch.B)):
            a = twin(batch, *args, coins, picks, check=sound)
            b = kernel(batch, *args, coins, picks, check=sound, block=size)
            assert same(a, b), f"seed {seed}, V {V}, block {size}, rows of kind {k}"
            n += batch.B
    return n


@check("walks")
def small(): return compared(range(7), (2, 3, 5), (1, 2, 4, 8), False)


@check("walks")
def tails(): return compared(range(100, 104), (37, 129, 1000), (16, 128, 1024), False)


@check("walks")
def wide(): return compared(range(200, 202), (4099,), (2048, 4096, 8192), False)


@check("walks")
def strides():
    "Views: rows cut from wider ones, columns first, one row for all nodes, uniforms and links with gaps"
    V, rng = 11, np.random.default_rng(1)
    batch, q = pack([ragged(np.random.default_rng(s), V, False) for s in (3, 5, 8)], V=V)
    gaps = lambda x: torch.stack([x, torch.full_like(x, 1) - x], -1)[..., 0]
    p, coins, picks = rows(rng, batch, q, V), numbers(rng, batch.n), numbers(rng, batch.B)
    padded = torch.nn.functional.pad(p, (0, 5))
    views = [padded[:, :V], p.t().contiguous().t(), p[:1].expand(batch.n, V), gaps(p)]
    spread = replace(batch, child=gaps(batch.child), token=gaps(batch.token))
    for x in views:
        args = x, gaps(q), gaps(coins), gaps(picks)
        assert not x.is_contiguous()
        assert same(verify_trees(batch, *args), kernels.fused_verify_trees(spread, *args, block=4))
    return len(views) * batch.B


@check("walks")
def temperatures():
    "From nearly 0 to 1e300, one for all or for each, bfloat16 logits, masked tokens, logits far from 0"
    V, n, rng = 11, 0, np.random.default_rng(2)
    batch, q = pack([ragged(np.random.default_rng(s), V, False) for s in (3, 5, 8)], V=V)
    p, coins, picks = rows(rng, batch, q, V), numbers(rng, batch.n), numbers(rng, batch.B)
    each = torch.tensor([1e-30, 0., 1e30]), torch.tensor([.7]).expand(3)
    for t in (5e-324, 1e-300, 1e-3, 0., -0., 1e3, 1e300, *each):
        for kind in (torch.float64, torch.bfloat16):
            scale = 1e30 if n % 4 else 1
            args = Logits((scale * p.log()).to(kind), t), Logits(q.log().to(kind)), coins, picks
            b = kernels.fused_verify_trees(batch, *args, block=4)
            assert same(verify_trees(batch, *args), b), f"temperature {t}, {kind}"
            n += batch.B
    return n


@check("walks")
def next_to_nothing():
    "A row of which a denormal number is left: all untried tokens are equal, for twin and kernel"
    batch = flat([-1, 0, 0], [0, 0, 1], [-1, 0, 0], [False, True, True])
    p, u = torch.tensor([[.1, .2, .3, .4]]*3).double(), torch.full((3,), .99).double()
    for least in (5e-324, 2.**-1023, 2.**-1021):
        args = batch, p, torch.tensor([[1., least, 0., 0.]]).double(), u, u[:1]
        b = kernels.fused_verify_trees(*args, check=False, block=4)
        assert same(verify_trees(*args, check=False), b) and 0 <= b.tokens[0, 0] < 4
    return 3


@check("chains")
def short(): return compared(range(6), (2, 3, 5), (1, 2, 4, 8), True)


@check("chains")
def long(): return compared(range(100, 103), (37, 1000), (16, 128, 1024), True)


@check("chains")
def widest(): return compared(range(200, 202), (4099,), (2048, 8192), True)


@check("chains")
def every_depth():
    "Chains of 0 to 16 tokens by both kernels, and the reject rule on chains"
    rng, n = np.random.default_rng(0), 0
    trees = [Tree((0,)) for _ in range(17)]
    for d, tree in enumerate(trees):
        for i in range(d): tree.add(i, int(np.argmax(q := rng.dirichlet([1] * 5))), q)
    batch, q = pack(trees)
    p = torch.tensor(rng.dirichlet([1] * 5, batch.n))
    for u, r in zip(batch.parent.tolist(), batch.q_row.tolist()):
        if r >= 0: p[u] = .9 * q[r] + .1 * p[u]
    coins, picks = torch.tensor(rng.random(batch.n)), torch.tensor(rng.random(17))
    for twin, kernel in (TREES, CHAINS):
        a = twin(batch, p, q, coins, picks)
        assert same(a, kernel(batch, p, q, coins, picks, block=4)) and a.length.max() > 8
        n += 17
    return n


@check("chains")
def alone():
    "A batch without a single offer, without q, and one that asks for wider vectors than it needs"
    batch = flat([-1, -1, -1], [0, 1, 2])
    p, u = torch.eye(3, dtype=torch.float64), torch.tensor([0., .5, LAST], dtype=torch.float64)
    for kernel in (kernels.fused_verify_trees, kernels.fused_verify_chains):
        for b in (batch, replace(batch, height=3), replace(batch, width=1)):
            out = kernel(b, p, None, u, u, block=4)
            assert out.tokens[:, 0].tolist() == [0, 1, 2]
            assert out.length.tolist() == [1, 1, 1] and out.nodes.shape == (3, b.height)
    return 18


# What is read

def watched(tensors, V, call):
    "What `call` returns, and the rows of each tensor of which it loads blocks"
    seen, load = [set() for _ in tensors], type(interpreter.interpreter_builder).create_masked_load
    def loaded(ptrs, mask, *rest):
        for x, s in zip(tensors, seen):
            at = (ptrs.data[mask.data].astype(np.int64) - x.data_ptr()) // x.element_size()
            inside = len(at) and (0 <= at).all() and (at < x.numel()).all()
            if ptrs.data.size > 1 and inside: s |= {i // V for i in at.tolist()}
        return load(interpreter.interpreter_builder, ptrs, mask, *rest)
    interpreter.interpreter_builder.create_masked_load = loaded
    try: return call(), seen
    finally: del interpreter.interpreter_builder.create_masked_load


@check("reads")
def reads():
    "The rows loaded in blocks are those of `rows_read`, for probabilities and logits"
    n, V = 0, 5
    for seed in range(8):
        rng = np.random.default_rng(seed)
        batch, q = pack([ragged(rng, V, False)], V=V)
        if not len(q): continue
        p, coins, picks = rows(rng, batch, q, V), numbers(rng, batch.n), numbers(rng, 1)
        for p, q in ((p, q), (Logits(p.log()), Logits(q.log())), (p, Logits(q.log()))):
            args = batch, p, q, coins, picks
            def run(args=args): return kernels.fused_verify_trees(*args, check=False, block=4)
            out, seen = watched([getattr(x, "x", x) for x in (p, q)], V, run)
            assert kernels.rows_read(batch, out, p, q) == ([seen[0]], [seen[1]]), f"seed {seed}"
            n += 1
    return n


# Mutants: each is caught by the check of its name, which the kernel passes

def star(tokens, q, p, coins, picks, apart=False, temperature=None):
    "Batches of one root with children from one row, one for each row of coins and pick"
    k, m = len(tokens), len(picks)
    parent = [u if u < 0 else i * (k + 1) for i in range(m) for u in [-1] + [0] * k]
    batch = flat(parent, ([0] + tokens) * m, ([-1] + [0] * k) * m, ([False] + [apart] * k) * m)
    own = torch.tensor([p] + [p[::-1]] * k, dtype=torch.float64).repeat(m, 1)
    rows = own, torch.tensor([q], dtype=torch.float64)
    if temperature is not None: rows = tuple(Logits(x.log(), temperature) for x in rows)
    return batch, *rows, doubles(u for c in coins for u in (0., *c)), doubles(picks)


EDGE = np.array([.05, .25, .5, .7, .9, .97])
def agree(K, args, size=4, back=False):
    twin, kernel = (verify_chains, K.fused_verify_chains) if back else (verify_trees, K.fused_verify_trees)
    return same(twin(*args, check=False), kernel(*args, check=False, block=size))


P4, Q4, NEAR = [.4, .3, .2, .1], [.1, .2, .3, .4], [.4, .22, .2, .18]
def duplicates(K): return agree(K, star([3, 3, 2], Q4, P4, [(.9, u, .9) for u in EDGE], EDGE))
def order(K):
    coins = [(u, v) for u in EDGE[::2] for v in EDGE[::2]]
    return agree(K, star([3, 1], Q4, P4, coins, [*EDGE, *EDGE[::2]], apart=True))
def fresh(K): return agree(K, star([3, 1], Q4, NEAR, [(.9, u) for u in EDGE], EDGE))
def leaf(K): return agree(K, star([3, 0], Q4, NEAR, [(.9, 0.)] * 3, [.1, .5, .9]))
def strict(K): return agree(K, star([3], [0, 0, 0, 1], [.5, .5, 0, 0], [(0.,)], [.5]))
def bonus(K): return agree(K, star([0], Q4, P4, [(.1,)] * 3, [.1, .5, .9]))
def exclusion(K): return agree(K, star([3, 2], Q4, P4, [(.9, u) for u in EDGE], EDGE, apart=True))
def uniform(K):
    return agree(K, star([3, 2, 1], [0, 0, 0, 1], P4, [(.9, u, u) for u in EDGE], EDGE, apart=True))
def tail(K):
    return agree(K, star([4], [.1, .1, .1, .1, .6], [.1, .1, .2, .2, .4], [(u,) for u in EDGE[::-1]], EDGE))
def softmax(K): return agree(K, star([3], Q4, P4, [(u,) for u in EDGE], EDGE, temperature=.9))


def borders(K):
    "Picks that lie on the borders between tokens, where one unit decides"
    p = np.random.default_rng(0).dirichlet(np.ones(64))
    sums = np.cumsum(np.floor(p * 2.**52))
    return agree(K, star([], [1.] + [0.] * 63, [*p], [()] * 8, [*(sums[5:61:7] / sums[-1])]), size=16)


def chain(K, coins=(.0, .6)):
    "A chain of two whose first token weighs less than 1, judged from its end"
    batch = flat([-1, 0, 1], [0, 3, 0], [-1, 0, 0])
    p, q = torch.tensor([P4, [.05, .05, .1, .8], P4]).double(), torch.tensor([Q4]).double()
    tapes = [(doubles([0., a, b]), doubles([u])) for a in coins for b in coins for u in (.05, .6)]
    return all(agree(K, (batch, p, q, *tape), back=True) for tape in tapes)


def ends(K):
    "A prefix of weight 1/4 with S = 0: the coin 0 must not let it stand"
    batch = flat([-1, 0, 1], [0, 1, 0], [-1, 0, 0])
    p = torch.tensor([[.75, .25], [.25, .75], [.5, .5]]).double()
    rows = torch.tensor([[0., 1.], [.25, .75]]).double()
    batch = replace(batch, q_row=torch.tensor([-1, 0, 1], dtype=torch.int32))
    return agree(K, (batch, p, rows, doubles([0., 0., .9]), doubles([.5])), back=True)


SORTED = '''

def resorted(batch):
    child, sibling, kids = batch.child.clone(), batch.sibling.clone(), {}
    for i, u in enumerate(batch.parent.tolist()): kids.setdefault(u, []).append(i)
    for u, cs in kids.items():
        cs.sort(key=lambda i: batch.token[i])
        if u >= 0: child[u] = cs[0]
        for a, b in zip(cs, [*cs[1:], -1]):
            if u >= 0: sibling[a] = b
    return child, sibling
'''
TEST = "            if tl.load(coins + c) * (share * offer(q, x, j, past)) < r:"
DRAWN = "drawn_token(p, q, at, j, past, tl.load(picks + b), BLOCK, NB))\n    tl.store(length + b, n + 1)"
PART = "part = tl.where(tl.arange(0, NB) == s, tl.sum(w, 0), part)"
MERGED = ("            if (alone == 0) & (tl.sum(((tok == x) & (k < j)).to(tl.int32), 0) > 0):\n"
          "                c = tl.load(sibling + c)\n") + TEST.replace("if", "elif", 1)
MUTANTS = {  # name: (check, text, instead, what is added at the end)
    "duplicate siblings merged": (duplicates, TEST, MERGED),
    "siblings sorted again": (order, "batch.child, batch.sibling", "*resorted(batch)", SORTED),
    "one uniform for all siblings": (fresh, "tl.load(coins + c)", "tl.load(coins + tl.load(child + node))"),
    "the pick as a coin": (fresh, "tl.load(coins + c)", "tl.load(picks + b)"),
    "<= in the test": (strict, TEST, TEST.replace("< r", "<= r")),
    "<= in the search": (borders, "tl.cumsum(w, 0) + before <= mark", "tl.cumsum(w, 0) + before < mark"),
    "last block dropped": (tail, "range(0, tl.cdiv(p.V, BLOCK))", "range(0, p.V // BLOCK)"),
    "last block unmasked": (tail, "mask=v < rows.V, other=none", "mask=v >= 0, other=none"),
    "float32 sums": (
        borders, PART, PART.replace("tl.sum(w, 0)", "tl.sum(w.to(tl.float32), 0).to(tl.float64)")),
    "float32 weights": (
        borders, "tl.floor(w * ONE)", "tl.floor(w.to(tl.float32) * ONE).to(tl.float64)"),
    "bfloat16 softmax": (softmax, "power((x - top.most) * rows.slope)",
                         "power((x - top.most) * rows.slope).to(tl.bfloat16).to(tl.float64)"),
    "extra token from the root's row": (
        bonus, DRAWN, DRAWN.replace(" at,", " NodeState(tl.load(root + b), at.top, at.scale),")),
    "exclusion forgotten": (
        exclusion, "if entry(past.without_replacement, l) > 0:",
        "if entry(past.without_replacement, l) > 1:"),
    "c not renewed": (exclusion, "if (alone > 0) & (j > 0):", "if (alone > 0) & (j > 99):"),
    "no uniform fallback": (
        uniform, "flat = tl.where(here, nothing, flat)", "flat = tl.where(here, 0, flat)"),
    "S not renewed": (fresh, "tl.where(r_row >= 0, 1, stale)", "stale"),
    "refusals forgotten at the end": (fresh, DRAWN, DRAWN.replace(" j,", " 0,")),
    "refusal kept from the node before": (leaf, "accepted, stale, j = -1, 0, 0", "accepted, stale = -1, 0"),
    "block: <=": (ends, "(S + 1 - w) < S", "(S + 1 - w) <= S"),
    "block: weight left out": (chain, "tl.where(j > 0, entry(path.weight, d), 1.0)", "1.0"),
    "block: judged from the front": (chain, "d, looking = n - 1, 1", "d, looking = tl.minimum(n - 1, 1), 1"),
    "block: the root's coin": (chain, "tl.load(coins + at.node)", "tl.load(coins + tl.load(root + b))"),
}


def mutated(text, instead, more=""):
    "The kernels with one text replaced, as another module"
    source = Path(kernels.__file__).read_text(encoding="utf-8")
    assert text in source, f"not in the kernels: {text}"
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as f:
        f.write(source.replace(text, instead) + more)
    spec = importlib.util.spec_from_file_location(f"specref.gpu.{Path(f.name).stem}", f.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@check("mutants")
def right():
    "The kernel itself passes every check that catches a mutant"
    named = {f for f, *_ in MUTANTS.values()}
    for f in named: assert f(kernels), f.__name__
    return len(named)


def catches(name):
    f, *change = MUTANTS[name]
    assert not f(mutated(*change)), f"{f.__name__} does not see it"
    return 1


for mutant in MUTANTS:
    def one(mutant=mutant): return catches(mutant)
    one.__name__ = mutant
    check("mutants")(one)


# Ahead of time

def compiled(kernel, dtype, logits, cc, K, warps=8):  # noqa: PLR0915  one long call of the compiler
    "Registers, bytes of stack and local memory, and the ptx, of a kernel compiled for a GPU"
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    rows, links = [f"*{dtype}"] * 2 + ["*fp64"] * 2 + ["i32"] * 2, ["*i32"] * 5 + ["*i1"]
    out = ["*fp64"] * 2 + ["*i32"] * 3 + ["i32"] * 2
    types = dict(zip(kernel.arg_names, rows + links + out + ["constexpr"] * 5))
    aligned = [i for i, (name, t) in enumerate(types.items()) if t[0] == "*" or name == "V"]
    hints, constants = {(i,): [["tt.divisibility", 16]] for i in aligned}, dict(K=K, BLOCK=2048, NB=128)
    source = ASTSource(kernel, signature=types, constexprs=constants | dict(P=logits, Q=logits), attrs=hints)
    options = dict(num_warps=warps, maxnreg=min(255, 2048 // warps), enable_fp_fusion=False)
    made = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(made.asm["cubin"])
        f.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", f.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL"))
    return *numbers, made.asm["ptx"]


for cc in (80, 90, 100):
    def one(cc=cc):
        "Both kernels for one architecture: no spills, nothing contracted, float64 rounded to nearest"
        found = {}
        for kernel, K in (kernels.verify_trees_kernel, 4), (kernels.verify_chains_kernel, 8):
            for dtype, logits in ("fp64", False), ("fp32", False), ("fp32", True), ("bf16", True):
                reg, stack, local, ptx = compiled(kernel, dtype, logits, cc, K)
                assert (stack, local) == (0, 0), f"{kernel.__name__}, {dtype}, sm_{cc}: {stack}, {local}"
                steps = set(re.findall(r"\b(?:fma|mad|mul|add|sub|div)\.[\w.]*f(?:32|64)", ptx))
                assert steps <= {f"{s}.rn.f64" for s in "mul add sub div".split()} and len(steps) == 4, steps
                found[f"{kernel.__name__} {dtype}{' logits' * logits}"] = reg
        return found
    one.__name__ = f"sm_{cc}"
    check("compiled")(one)


def main(group):
    "Runs the checks of a group; prints what each found, or how it failed; the last line is a table of all"
    found, failed = {}, []
    for f in CHECKS[group]:
        try: found[f.__name__] = f()
        except Exception:
            failed.append(f.__name__)
            print(f"--- {f.__name__}")
            traceback.print_exc(file=sys.stdout)
    print(json.dumps(dict(failed=failed, found=found, seconds=round(time.process_time(), 1))))


if __name__ == "__main__": main(sys.argv[1])
