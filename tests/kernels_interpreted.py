"The kernels of chapter 42a in Triton's interpreter: `TRITON_INTERPRET=1 python kernels_interpreted.py`"
from dataclasses import replace
from importlib import import_module

import numpy as np
import torch

from helpers import DRAWS, cold
from planted import always, at_equality, given, instead, never, plant, without
from verify_helpers import HIDDEN, corruptions, engines_cases, hidden
from specref.core.law import exact
from specref.core.rng import Seeded, law_of
from specref.core.target import random_table
from specref.core.tree import Tree, iid, in_sequence, points, without_replacement
from specref.gpu import draws as fused, kernels
from specref.gpu.layout import flat, pack, repeat_batch
from specref.gpu.verify import Logits, Probs, decision_cells, verify_chains, verify_trees
from specref.verify.block import block
from specref.verify.reject import reject

LAST, IN_TORCH, VERIFIED = 1 - 2.**-53, dict(trees=verify_trees, chains=verify_chains), []

def same(kind, args, block=4, check=True, **how):
    "Whether the kernel returns the integers of the torch verifier"
    in_torch = IN_TORCH[kind]
    a = in_torch(*args, check=check)
    b = getattr(kernels, f"fused_{in_torch.__name__}")(*args, check=check, block=block, **how)
    VERIFIED.append(args[0].B)
    return all(map(torch.equal, vars(a).values(), vars(b).values()))

def doubles(x): return torch.tensor(np.array(x, dtype=float))

# Every cell of the uniforms

A, B, C = exact(1, 2, 3), exact(2, 0, 1), exact(1, 1, 0, 0)

def fixed(*tokens, V=4): return points([*tokens], V, exact=True)

MIXED = in_sequence(fixed(2, V=3), iid(A), fixed(0, V=3), iid(B))
CHAIN = [(0, iid(A), 1), (1, iid(B), 1)]
PAIRS = [(0, without_replacement(A), 2), (1, without_replacement(B), 2)]
CELLS = {   # the target, (node, draw, number of children), the temperature of logits; None for probabilities
    "iid": (random_table(3, 5), [(0, iid(A), 2), (1, iid(B), 1)], None),
    "without replacement": (random_table(3, 6), PAIRS, 1),
    "support used up": (random_table(4, 1), [(0, without_replacement(C), 3)], None),
    "points": (random_table(4, 2), [(0, fixed(2, 0, 3), 3), (1, fixed(1, 3), 2)], 1),
    "mixed": (random_table(3, 3), [(0, MIXED, 4)], None),
    "mixed without replacement": (random_table(3, 8), [(0, DRAWS["mixed"](B), 3)], 1),
    "chain": (random_table(3, 9), CHAIN, None),
    "greedy": (random_table(3, 4), [(0, iid(A), 1), (1, without_replacement(A), 2)], 0),
    "block": (random_table(3, 7, zeros=False), CHAIN, 1),
}

def grown(rng, steps):
    tree = Tree((0,))
    for node, draw, k in steps:
        if node < len(tree): tree.grow(node, draw, rng, k)
    return tree

def every_cell(name):
    "Coins and picks in the middle of each cell of each draft; the extremes where a cell does not use them"
    table, steps, temperature = CELLS[name]
    target, rule = cold(table) if temperature == 0 else table, block if name == "block" else reject
    found = [(tree, cell) for tree in law_of(lambda rng: grown(rng, steps))
             for cell in decision_cells(lambda rng: rule(target(tree), tree, rng))]
    unused = [(0., LAST)[k % 2] for k in range(len(found))]
    coins = [cell.coins.get(i, u) for (tree, cell), u in zip(found, unused) for i in range(len(tree))]
    picks = [next(iter(cell.picks.values()), u) for (_, cell), u in zip(found, unused)]
    batch, q = pack([tree for tree, _ in found])
    p = doubles([table.law(tree.text(i)) for tree, _ in found for i in range(len(tree))])
    if temperature is not None: p, q = Logits(p.log(), temperature), Logits(q.log())
    kind = "chains" if name == "block" else "trees"
    args = batch, p, q, doubles(coins), doubles(picks)
    assert same(kind, args, 2 if temperature is None else 4), name

def every_cells():
    for name in CELLS: every_cell(name)

# Random batches

def law(rng, V):
    "A distribution with zeros, ties, and sometimes a point mass"
    w = rng.multinomial(int(rng.choice([1, 6, 64])), rng.dirichlet(np.full(V, rng.choice([.05, .5, 5]))))
    return w / w.sum()

def ragged(rng, V, chains=False):
    "A tree of any draw, with duplicates and up to 16 levels; a chain; or nothing but a root"
    tree, todo = Tree((int(rng.integers(V)),)), [0]
    for _ in range(int(rng.choice([0, 1, 4, 16] if chains else [0, 1, 2, 5]))):
        i, q = todo.pop() if chains or rng.random() < .7 else todo.pop(0), law(rng, V)
        alike = points(rng.integers(0, V, 4).tolist(), V)
        draws = [iid(q), alike, without_replacement(q), in_sequence(iid(q), alike, iid(law(rng, V)), alike)]
        draw, seed = draws[rng.integers(2 if chains else 4)], Seeded(int(rng.integers(10**9)))
        todo += tree.grow(i, draw, seed, 1 if chains else int(rng.integers(1, 5)))
        if not todo: break
    return tree

def numbers(rng, n):
    k = rng.integers(0, 8, n)
    return torch.tensor(np.where(k == 0, 0, np.where(k == 1, LAST, rng.random(n))))

def drafted(rng, trees, V):  # -> batch, p, q, coins, picks
    "A batch with rows of p: any distribution, or half or all of a child's row, so that the residual may be 0"
    batch, q = pack(trees, V=V)
    p = np.array([law(rng, V) for _ in range(batch.n)])
    for u, r in zip(batch.parent.tolist(), batch.q_row.tolist()):
        if r >= 0 and rng.random() < .5: p[u] = q[r] if rng.random() < .5 else .5 * p[u] + .5 * q[r].numpy()
    return batch, torch.tensor(p), q, numbers(rng, batch.n), numbers(rng, batch.B)

def kinds(rng, p, q, B):
    "The same rows as float64, float32, logits in float32 and bfloat16, and logits beside probabilities"
    t, s = torch.tensor(rng.choice([0., .5, 1., 2.], B)), float(rng.choice([.7, 1.]))
    logits = Logits((p + 1e-9*(p > 0)).log().bfloat16(), s), Logits(q.log().bfloat16(), t)
    warm = Logits(p.float().log(), t)
    return [(p, q), (p.float(), q.float()), (warm, Logits(q.float().log(), s)), logits, (warm, q)]

def random_batches(seeds, sizes, blocks, kind):
    for seed in seeds:
        rng, chains = np.random.default_rng(seed), kind == "chains"
        V, size = int(rng.choice(sizes)), int(rng.choice(blocks))
        batch, p, q, *uniforms = drafted(rng, [ragged(rng, V, chains) for _ in range(4)], V)
        sound = chains or seed % 3 > 0
        marks = torch.tensor(rng.random(batch.n) < .5) & (batch.q_row >= 0)
        if not sound: batch = replace(batch, without_replacement=marks)
        rows = kinds(rng, p, q, batch.B)
        for k in (seed % 5, (seed + 2) % 5):
            args, how = (batch, *rows[k], *uniforms), {} if chains else dict(programs=(1, 2, 1, 3)[seed % 4])
            assert same(kind, args, size, sound, **how), f"{kind}, seed {seed}, V {V}, block {size}, rows {k}"

def some_trees(seed, shapes=(3, 5, 8), V=11):
    rng = np.random.default_rng(seed)
    return drafted(rng, [ragged(np.random.default_rng(s), V) for s in shapes], V)

def strides():
    "Views: rows cut from wider ones, columns first, one row for all nodes, uniforms and links with gaps"
    batch, p, q, coins, picks = some_trees(1)
    def gaps(x): return torch.stack([x, 1 - x], -1)[..., 0]
    cut = torch.nn.functional.pad(p, (0, 5))[:, :p.shape[1]]
    spread = replace(batch, child=gaps(batch.child), token=gaps(batch.token))
    for x in (cut, p.t().contiguous().t(), p[:1].expand(batch.n, -1), gaps(p)):
        assert not x.is_contiguous() and same("trees", (spread, x, gaps(q), gaps(coins), gaps(picks)))

def rows_by_number():
    "Rows of p in any order, and more of them than nodes; a number of no row ends its request alone"
    batch, p, q, *uniforms = some_trees(4)
    order = torch.randperm(2*batch.n, generator=torch.Generator().manual_seed(0))[:batch.n]
    x = torch.full((2*batch.n, p.shape[1]), torch.nan, dtype=p.dtype)
    x[order] = p
    for kind in (torch.int64, torch.int32):
        for n, rows in (1, Probs(x, order.to(kind))), (2, Logits(x.log(), row=order.to(kind))):
            assert same("trees", (batch, rows, q, *uniforms), programs=n)
    for wrong in (-1, 2*batch.n):
        order[batch.root[1]] = wrong
        assert same("trees", (batch, Probs(x, order), q, *uniforms), check=False)
        assert same("trees", (batch, Logits(x.log(), row=order), q, *uniforms), check=False, programs=2)

def shared_rows():
    "Requests with temperatures of their own that share rows; and parents that nothing may read"
    two, row = flat([-1, -1], [0, 0]), torch.tensor([0, 0])
    rows = Logits(torch.zeros(1, 4), torch.tensor([1., 0.]), row=row)
    assert same("trees", (two, rows, None, doubles([0, 0]), doubles([.6, .6])), 2, programs=2)
    batch, p, q, *uniforms = some_trees(3)
    hot = torch.tensor([.5, 1., 2.])
    for parent in batch.parent, 0*batch.parent, batch.parent.flip(0):
        args = replace(batch, parent=parent), Logits(p.log(), hot), Logits(q.log(), hot), *uniforms
        assert same("trees", args, check=False, programs=2)

def broken(seed, kind, V=5):
    "Every corruption of one tree, for half of the seeds on logits: statuses and integers are those in torch"
    rng = np.random.default_rng(seed)
    trees = [Tree((0,)) for _ in range(3)]
    for tree in trees[::2]: tree.grow(0, iid(law(rng, V)), Seeded(seed), 1)
    while len(trees[1]) == 1: trees[1] = ragged(rng, V, kind == "chains")
    batch, p, q, *uniforms = drafted(rng, trees, V)
    for k, (name, _, bad, x, y) in enumerate(corruptions(batch, p, q, 1)):
        rows = (Logits(x.log()), Logits(y.log())) if (k + seed) % 2 else (x, y)
        assert same(kind, (bad, *rows, *uniforms), check=False), f"{name}, seed {seed}"
    for name in ("height", "width"):
        args = replace(batch, **{name: 1}), p, q, *uniforms
        if kind == "trees": assert same(kind, args, check=False, programs=2), f"{name}, seed {seed}"

def published_cases():
    for args, _ in engines_cases():
        assert same("trees", args, 32) and (args[0].width > 1 or same("chains", args, 32))

def hidden_faults():
    for name in HIDDEN:
        args, chains, _ = hidden(name)
        assert same("chains" if chains else "trees", args, check=False), name

def temperatures():
    "From nearly 0 to 1e300, one for all or for each, bfloat16 logits, masked tokens, logits far from 0"
    batch, p, q, *uniforms = some_trees(2)
    each = doubles([[5e-324, 1e-300, 1e-3], [0., -0., 1e3], [1e300, 1e-30, 1e30]])
    for t in (*each, torch.tensor([.7]).expand(3), 1e-300):
        for kind, scale in (torch.float64, 1e30), (torch.bfloat16, 1):
            args = batch, Logits((scale * p.log()).to(kind), t), Logits(q.log().to(kind)), *uniforms
            assert same("trees", args), f"temperature {t}, {kind}"

def cuts():
    "Top-k, top-p and min-p, alone and together, for all or for each; ties, masked tokens, greedy requests"
    batch, p, q, *uniforms = some_trees(5, (3, 5, 8, 3, 8))
    one, heat = dict(top_k=4, top_p=.8, min_p=.1), torch.tensor([1., .5, 2., .7, 0.])
    each = dict(top_k=torch.tensor([2, 0, 0, 4, 99]), top_p=torch.tensor([1., .6, 1., .8, .999]),
                min_p=torch.tensor([0., 0., .3, .1, 0.]))
    for some, kind in (one, torch.float32), (each, torch.bfloat16):
        rows = (Logits((k*x.log()).to(kind), heat, **some) for k, x in ((3, p), (1, q)))
        assert same("trees", (batch, *rows, *uniforms), 16, False), f"{some}, {kind}"
    assert same("trees", CASES["both"], 8, False, programs=2)
    batch, *rows, coins, picks = CASES["chain"]
    rows = [Logits(x.log().float(), .8, top_k=3, top_p=.9) for x in rows]
    assert same("chains", (batch, *rows, coins, picks), check=False)

def same_draws(*seeds):
    "Children of nodes: the tokens of the torch implementation, at all temperatures, masked, few tokens left"
    engine = import_module("specref.gpu.engine")   # brings transformers
    for seed in seeds:
        rng = np.random.default_rng(seed)
        B, m, K, V = (int(rng.integers(1, n)) for n in (4, 3, 5, 12))
        z = torch.from_numpy(rng.normal(size=(B, m, V + K)) * rng.choice([1., 20., 200.])).float()
        z[..., 1:][torch.from_numpy(rng.random((B, m, V + K - 1)) < .3)] = -torch.inf
        u, heat = numbers(rng, B*m*K).view(B, m, K), torch.from_numpy(rng.choice([0., .5, 1., 2.], B))
        for apart in (True, False):
            want = engine.draw_children(z, u, heat, apart)
            found = [fused.fused_draw_children(z, u, heat, apart, block=size) for size in (2, 16)[seed % 2:]]
            if not all(torch.equal(x, want) for x in found): return False
    return True

def draws(): assert same_draws(1, 9, 17, 33, 35, 39)

def next_to_nothing():
    "A row with a denormal residual: all untried tokens are equally likely"
    batch = flat([-1, 0, 0], [0, 0, 1], [-1, 0, 0], [False, True, True])
    p, u = doubles([[.1, .2, .3, .4]]*3), doubles([.99]*3)
    for least in (5e-324, 2.**-1023, 2.**-1021):
        assert same("trees", (batch, p, doubles([[1., least, 0., 0.]]), u, u[:1]), check=False), least

def every_depth():
    "Chains of up to 16 tokens by both kernels, long prefixes accepted"
    rng, trees = np.random.default_rng(0), []
    for d in (0, 1, 2, 3, 8, 16):
        trees.append(Tree((0,)))
        for i in range(d): trees[-1].add(i, int(np.argmax(q := rng.dirichlet([1] * 5))), q)
    batch, q = pack(trees)
    p = torch.tensor(rng.dirichlet([1] * 5, batch.n))
    for u, r in zip(batch.parent.tolist(), batch.q_row.tolist()):
        if r >= 0: p[u] = .9 * q[r] + .1 * p[u]
    args = batch, p, q, torch.tensor(rng.random(batch.n)), torch.tensor(rng.random(batch.B))
    assert all(same(kind, args) and IN_TORCH[kind](*args).length.max() > 8 for kind in IN_TORCH)

def alone():
    "A batch without a draft token, without q, and one that asks for wider vectors than it needs"
    batch, u = flat([-1, -1, -1], [0, 1, 2]), doubles([0., .5, LAST])
    for b in (batch, replace(batch, height=3), replace(batch, width=1)):
        assert all(same(kind, (b, torch.eye(3).double(), None, u, u)) for kind in IN_TORCH)

# What is read

def reads(V=5):
    "The rows loaded in blocks are those of `rows_read`, for probabilities and logits"
    n = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        batch, p, q, *uniforms = drafted(rng, [ragged(rng, V)], V)
        if not len(q): continue
        for x, y in (p, q), (Logits(p.log()), Logits(q.log())), (p, Logits(q.log())):
            with kernels.Watched(p=getattr(x, "x", x), q=getattr(y, "x", y)) as watched:
                out = kernels.fused_verify_trees(batch, x, y, *uniforms, check=False, block=4)
            found = [watched.full("p")], [watched.full("q")]
            assert kernels.rows_read(batch, out, x, y) == found, f"seed {seed}"
            n += 1
    return n

# Mutants: each is detected by a case that the kernel itself passes

def star(tokens, q, p, coins, picks, apart=False, temperature=None, **cut):
    "A batch of one root with children from one row, once for each row of coins and pick"
    k, m = len(tokens), len(picks)
    batch = repeat_batch(flat([-1] + [0]*k, [0, *tokens], [-1] + [0]*k, [False] + [apart]*k), m)
    rows = doubles([p] + [p[::-1]]*k).repeat(m, 1), doubles([q])
    if temperature is not None: rows = tuple(Logits(x.log().float(), temperature, **cut) for x in rows)
    return batch, *rows, doubles([u for row in coins for u in (0., *row)]), doubles(picks)

def chain(tokens, q_row, p, q, coins, picks):
    "A chain of two, once for each row of coins and pick"
    batch = repeat_batch(flat([-1, 0, 1], [0, *tokens], [-1, *q_row]), len(picks))
    return batch, doubles(p).repeat(len(picks), 1), doubles(q), doubles(coins).flatten(), doubles(picks)

def soft_borders():
    "Picks at the borders of the cells of a softmax"
    rows, one = Logits(doubles([WIDE]).log().float(), .9), torch.tensor([0])
    sums = torch.floor(rows.weigh(one, one, rows.top(one, one))[0] * 2.**52).cumsum(0)
    picks = (sums[5:61:14] / sums[-1]).tolist()
    return star([], [1.] + [0.]*63, [*WIDE], [()]*4, picks, temperature=.9)

def twice():
    "A token offered twice as a point mass, then one drawn without both"
    batch, *rest = star([3, 3, 2], [.1, .3, .3, .3], P4, [(.9, .9, u) for u in EDGE], EDGE, apart=True)
    point = batch.token == 3
    drawn = batch.without_replacement & ~point
    return replace(batch, q_row=torch.where(point, -1, batch.q_row), without_replacement=drawn), *rest

EDGE, P4, Q4, NEAR = [.25, .5, .97], [.4, .3, .2, .1], [.1, .2, .3, .4], [.4, .22, .2, .18]
WIDE = np.random.default_rng(0).dirichlet(np.ones(64))
HALF16, PICKS = [.5, .5] + [0.]*14, np.linspace(0, .999, 4)
BORDERS = np.cumsum(np.floor(WIDE * 2.**52))[[*range(5, 61, 14), 63]]   # where one unit decides
FOUR = [(0., a, b) for a in (0., .6) for b in (0., .6)]
CASES = {
    "duplicates": star([3, 3, 2], Q4, P4, [(.9, u, .9) for u in EDGE], EDGE),
    "order": star([3, 1], Q4, P4, [*zip(EDGE, EDGE[::-1])], EDGE, apart=True),
    "fresh": star([3, 1], Q4, NEAR, [(.9, u) for u in EDGE], EDGE),
    "strict": star([3], [0, 0, 0, 1], [.5, .5, 0, 0], [(0.,)], [.5]),
    "bonus": star([0], Q4, P4, [(.1,)]*3, [.1, .5, .9]),
    "exclusion": star([3, 2], Q4, P4, [(.9, u) for u in EDGE], EDGE, apart=True),
    "little": star([3, 2], [.05, .05, .1, .8], P4, [(.9, u) for u in EDGE], EDGE, apart=True),
    "twice": twice(),
    "uniform": star([3, 2, 1], [0, 0, 0, 1], P4, [(.9, u, u) for u in EDGE], EDGE, apart=True),
    "tail": star([4], [.1, .1, .1, .1, .6], [.1, .1, .2, .2, .4], [(u,) for u in EDGE[::-1]], EDGE),
    "top-k": star([], HALF16, WIDE[:16], [()]*4, PICKS, temperature=1, top_k=5),
    "both": star([], HALF16, WIDE[:16], [()]*4, PICKS, temperature=1, top_k=9, top_p=.7),
    "min-p": star([], HALF16, WIDE[:16], [()]*4, PICKS, temperature=1, min_p=.3),
    "several programs": star([], HALF16, WIDE[:16], [()]*4, PICKS),
    "several programs, logits": star([], HALF16, WIDE[:16], [()]*4, PICKS, min_p=.3,
                                     temperature=torch.linspace(.2, 2, 4)),
    "several programs, one row of q": star([0, 1], WIDE[16:32] / WIDE[16:32].sum(), WIDE[:16],
                                           [(u, v) for u in (.5, .9) for v in (.05, .7)], PICKS,
                                           temperature=torch.linspace(.2, 2, 4)),
    "soft borders": soft_borders(),
    "borders": star([], [1.] + [0.]*63, [*WIDE], [()]*4, BORDERS[:-1] / BORDERS[-1]),
    "negative": star([], [1.] + [0.]*7, [.25, 0., 0., 0., -.75, .5, -.4, 0.], [()], [.5]),
    "chain": chain([3, 0], [0, 0], [P4, [.05, .05, .1, .8], P4], [Q4], FOUR, [.05]*4),
    "ends": chain([1, 0], [0, 1], [[.75, .25], [.25, .75], [.5, .5]], [[0., 1.], [.25, .75]],
                  [(0., 0., .9)], [.5]),   # a prefix of weight 1/4 with S = 0: the coin 0 must not accept it
}

def counts_left():
    "What launches of several programs have left in the counters, from which the next one counts"
    batch = CASES["several programs"][0]
    return kernels.launch_counters(batch.B, batch.device).any()

def passes(name):
    if name in HIDDEN:
        args, chains, _ = hidden(name)
        return same("chains" if chains else "trees", args, 4, False)
    size = 16 if name in ("borders", "soft borders", "top-k", "both", "min-p") else 4
    how = dict(programs=3) if name.startswith("several") else {}
    return same("chains" if name in ("chain", "ends") else "trees", CASES[name], size, False, **how)

TREE, CHAIN_END, CUT, OF_ROW = "try_children", "verify_chains_kernel", "largest_cut", "relative_weights"
SAME_TOKEN = "tl.load(tree.token + c + 1, mask=c + 1 < tree.end, other=-1) == x"
MUTANTS = {  # name: (case, function, change)
    "duplicate siblings merged": (
        "duplicates", TREE, instead("tree.sibling + c", f"tree.sibling + c + tl.where({SAME_TOKEN}, 1, 0)")),
    "siblings sorted again": ("order", "launch", instead(
        "batch.root, batch.token, batch.child, batch.sibling, _, _1",
        "batch.root, batch.token, *__import__('verify_helpers').resorted(batch), _, _1")),
    "one uniform for all siblings": (
        "fresh", TREE, instead("coins + c", "coins + tl.load(tree.child + at.node)")),
    "one coin for all requests": ("fresh", TREE, instead("coins + c", "coins + c - tree.first")),
    "<= in the test": ("strict", TREE, at_equality("_ < r")),
    "<= in the search": ("borders", "token_in_blocks", at_equality("tl.cumsum(w, 0) + before <= mark")),
    "last block dropped": ("tail", "share_of_blocks", instead("tl.cdiv(p.V, BLOCK)", "p.V // BLOCK")),
    "last block unmasked": ("tail", "load_row", instead("v < rows.V", "v >= 0")),
    "float32 sums": ("borders", "share_of_blocks", instead(
        "tl.sum(w, 0)", "tl.sum(w.to(tl.float32), 0).to(tl.float64)")),
    "float32 weights": ("borders", "fixed_point", instead(
        "w * ONE", "(w.to(tl.float32) * ONE).to(tl.float64)")),
    "bfloat16 softmax": ("soft borders", OF_ROW, instead(
        "power(_)", "power(_).to(tl.bfloat16).to(tl.float32)")),
    "extra token from the root's row": ("bonus", "verify_trees_kernel", given(
        "token_in_blocks", "at", "NodeState(tree.first, tree.first, at.top, at.scale)")),
    "exclusion forgotten": (
        "little", "child_row_weights", never("entry(past.without_replacement, l) > 0")),
    "c not renewed": ("exclusion", "next_child", never("(alone > 0) & (j > 0)")),
    "tried tokens counted twice": ("twice", "covered_weight", instead("tl.where(_, 0.0, new)", "new")),
    "no uniform fallback": ("uniform", "next_child", given("tl.where", "nothing", "0")),
    "S not renewed": ("fresh", TREE, instead("tl.where(row >= 0, 1, stale)", "stale")),
    "rejections forgotten at the end": ("fresh", "verify_trees_kernel", given("share_of_blocks", "j", "0")),
    "always the first block": ("tail", "share_of_blocks", without("x, y = next_x, next_y")),
    "the second program ends": ("several programs", "blocks_of_all", instead("n - 1", "1")),
    "one block of each program": ("several programs", "blocks_of_all", instead("k % n == s", "k == s")),
    "tops of the first request": (
        "several programs, one row of q", "request_of", instead("_ <= i", "_ > i")),
    "tops by row": ("several programs, one row of q", TREE, given("top_of_node", "c", "row")),
    "no cut of prepared rows": ("several programs, logits", "own_rows", without("KIND == 4")),
    "block: <=": ("ends", CHAIN_END, at_equality("_ < S")),
    "block: weight left out": (
        "chain", "prefix_child", instead("tl.where(j > 0, entry(path.weight, d), 1.0)", "1.0")),
    "block: from the front": ("chain", CHAIN_END, instead("prefixes - 1", "tl.minimum(prefixes - 1, 1)")),
    "block: the root's coin": ("chain", CHAIN_END, instead("coins + at.node", "coins + tree.first")),
    "one token less by top-k": ("top-k", CUT, at_equality("n >= tokens")),
    "one token less by top-p": ("both", OF_ROW, at_equality("x >= top.least")),
    "top-p of the whole row": ("both", "cut_off", given("sum_from", "least", "float('-inf')")),
    "no min-p": ("min-p", OF_ROW, without("warm >= tl.load(rows.cut + 2)")),
    "any p is a weight": ("infinite p at a token", TREE, without("is_weight(r)")),
    "any q is a weight": ("negative q at a token", TREE, without("is_weight(w)")),
    "any q of a tried token": (
        "negative q elsewhere", "covered_weight", instead("tl.where(is_weight(w), w, _)", "w")),
    "any sum of q": ("infinite q elsewhere", "recounted_weight", never("tl.max(odd, 0) > 0")),
    "any sum of p": ("too much weight", "token_in_blocks", without("total < 2 * ONE")),
    "negative sums": ("negative", "token_in_blocks", without("total >= 0")),
    "NaN is no weight": ("NaN at a tried token", "residual_of", instead(
        "tl.where(_, r, _1)", "tl.where(offered > 0, _1, r)")),
    "any depth": ("deeper than the height", TREE, never("(c >= 0) & (deeper == 0)")),
    "any width": ("wider than the width", TREE, always("j < width")),
    "block: any depth": ("a chain deeper than the height", "descend", always("n < height")),
    "block: any p": ("infinite p in a chain", "longer_weight", given("tl.where", "ROW", "FINE")),
    "block: any q": ("infinite q in a chain", "longer_weight", without("is_weight(covers)")),
    "block: drawn without weight": (
        "no q at a token of a chain", "longer_weight", without("covers > 0")),
    "block: NaN rejects": ("NaN behind a prefix", CHAIN_END, always("S == S")),
}
DRAWN_WRONG = {   # name: (a seed of `same_draws` that detects it, function, change)
    "drawn tokens stay": (35, "left_weights", instead("range(0, j)", "()")),
    "masked tokens too": (35, "left_weights", instead("_ > float('-inf')", "_ < 1e30")),
    "one number for all children": (35, "draw_children_kernel", instead("u + _ + i", "u + _")),
    "the first temperature": (33, "draw_children_kernel", given("own_rows", "row // m", "0")),
    "the likeliest again": (33, "next_likeliest", instead("range(0, j)", "()")),
    "never all alike": (35, "draw_children_kernel", never("most == 0")),
    "removed though independent": (35, "draw_children_kernel", instead("i if APART else 0", "i")),
    "counts of the whole row": (35, "counts", instead("2046 - _", "tl.full((), 1023, tl.int64)")),
}

def survivors(module, mutants, passes):
    "The names of the mutants that pass"
    for name, (case, *change) in mutants.items():
        kernels.counters.cache_clear()   # that a mutant has not left at zero
        with plant(module, *change):
            if passes(case): yield name

def main():
    "Run everything; the last line counts verified trees, batches with recorded reads, detected mutants"
    random_batches(range(7), (2, 3, 5), (1, 2, 4, 8), "trees")
    random_batches(range(100, 103), (37, 129, 1000), (16, 128, 1024), "trees")
    random_batches(range(200, 202), (4099,), (2048, 4096, 8192), "trees")
    random_batches(range(5), (2, 3, 5), (1, 2, 4, 8), "chains")
    random_batches(range(100, 103), (37, 1000), (16, 128, 1024), "chains")
    random_batches(range(200, 202), (4099,), (2048, 8192), "chains")
    for seed in range(2):
        for kind in IN_TORCH: broken(seed, kind)
    for check in (every_cells, strides, rows_by_number, shared_rows, published_cases, hidden_faults,
                  temperatures, cuts,
                  draws, next_to_nothing, every_depth, alone): check()
    watched_batches = reads()
    assert all(map(passes, [*CASES, "several programs"])) and not counts_left()
    alive = [*survivors(kernels, MUTANTS, passes), *survivors(fused, DRAWN_WRONG, same_draws)]
    assert not alive, alive
    print(sum(VERIFIED), watched_batches, len(MUTANTS) + len(DRAWN_WRONG))

if __name__ == "__main__": main()
