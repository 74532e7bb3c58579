"Chapter 42: the walk over a batch of trees against the reference, in every cell of the uniforms, on random tapes, at any size"
from dataclasses import replace
from fractions import Fraction as F
from functools import partial
from itertools import product

import numpy as np, pytest, torch
from helpers import laws, refuses
from hypothesis import given, settings, strategies as st
from specref.verify.block import block
from specref.core.rng import Seeded, Streams, law_of, verdict_tape
from specref.gpu import verify as v
from specref.gpu.layout import flat, pack
from specref.gpu.verify import ONE, Logits, Probs, decision_cells, fixed_point, power, verify_trees, verify_chains
from specref.core.law import exact, greedy
from specref.verify.reject import reject
from specref.core.target import random_table, target_law
from specref.core.tree import Tree, in_sequence, iid, points, without_replacement

proves = pytest.mark.proves


@pytest.fixture(params=["asked", "masked"])
def device_way(request, monkeypatch):
    "The walk as on a CPU, where it asks who needs a row, and as on a device, where it may not ask"
    if request.param == "masked": monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def floats(rows): return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float64)

def judged(walk, trees, rows, coins, picks, **kw):
    "What the walk says of trees with rows of p in fractions: tokens and nodes (in the tree) of each"
    batch, q = pack(trees, V=len(rows[0][0]))
    out = walk(batch, floats([r for p in rows for r in p]), q, torch.tensor([float(u) for c in coins for u in c], dtype=torch.float64), torch.tensor([float(u) for u in picks], dtype=torch.float64), **kw)
    for tokens, nodes, n, root in zip(out.tokens.tolist(), out.nodes.tolist(), out.length.tolist(), batch.root.tolist()):
        assert all(x == -1 for x in [*tokens[n:], *nodes[n-1:]])
        yield tuple(tokens[:n]), tuple(i - root for i in nodes[:n-1])

def in_cells(rule, walk, target, drafter):
    "Every cell of every tree of a drafter, in one batch; the law of the walk's text, completed by the target, from volumes alone"
    todo = [(tree, w, cell, p) for tree, w in law_of(lambda rng: drafter((0,), rng)).items()
            for p in [[target.law(tree.text(i)) for i in range(len(tree))]] for cell in decision_cells(lambda rng: rule(p, tree, rng))]
    half = lambda cell, tree: [cell.coins.get(i, F(1, 2)) for i in range(len(tree))]
    said = judged(walk, [t for t, *_ in todo], [p for *_, p in todo], [half(c, t) for t, _, c, _ in todo], [next(iter(c.picks.values()), F(1, 2)) for *_, c, _ in todo])
    law, deep = {}, 1 + max(max(t.depth) for t, *_ in todo)
    for (tree, w, cell, p), (tokens, nodes) in zip(todo, said, strict=True):
        assert (tokens, nodes) == (cell.outcome.tokens(tree), tree.ancestors(cell.outcome.node))
        for rest, m in target_law(target, (0, *tokens), deep - len(tokens)).items(): law[tokens + rest] = law.get(tokens + rest, 0) + w * cell.volume * m
    assert law == target_law(target, (0,), deep)
    return len(todo)


def grown(*draws):
    "The drafter that grows level d by `draws[d](model row) -> draw, k` below every node"
    def draft(q, ctx, rng):
        tree, level = Tree(ctx), [0]
        for draw, k in draws: level = [c for u in level for c in tree.grow(u, draw(q.law(tree.text(u))), rng, k)]
        return tree
    return draft

def heaviest(q): return points(sorted(range(len(q)), key=lambda x: -q[x]), len(q), exact=True)
def mixed(q): return in_sequence(iid(q), heaviest(q), iid(q[::-1].copy()), heaviest(q))
def twice(q): return in_sequence(heaviest(q), iid(q), heaviest(q))   # a point before draws that may repeat it
def narrow(q): return without_replacement(exact(1, 1, *[0]*(len(q) - 2)))   # the third sibling is drawn from those not tried

KINDS = {"chain": [(iid, 1), (iid, 1)], "independent": [(iid, 3), (iid, 1)], "without replacement": [(without_replacement, 2), (without_replacement, 2)],
         "all of them": [(without_replacement, 4)], "support used up": [(narrow, 3)], "points": [(heaviest, 2), (heaviest, 2)], "mixed": [(mixed, 3)], "a point, then draws": [(twice, 2), (iid, 1)], "used up, then more": [(narrow, 3), (iid, 1)], "used up, then used up": [(narrow, 3), (narrow, 3)], "nothing": []}

@pytest.mark.parametrize("kind, V", [(kind, 3 + (kind in ("support used up", "all of them"))) for kind in KINDS])
@proves("thm-walk")
def test_every_cell(kind, V, device_way):
    "Twin and reference agree in the middle of every cell, and the cells' volumes add up to the target's law, as fractions"
    target, draft = random_table(V, 1), random_table(V, 2)
    assert in_cells(reject, verify_trees, target, partial(grown(*KINDS[kind]), draft)) >= V


@pytest.mark.parametrize("gamma", [1, 2])
def test_every_cell_of_chains(gamma, device_way):
    "Block verification: the same, up from the chain's end"
    assert in_cells(block, verify_chains, random_table(3, 5), partial(grown(*[(iid, 1)]*gamma), random_table(3, 6))) > 6*gamma


# Random batches

def fractions(rng, V): return exact(*rng.multinomial(64, rng.dirichlet(np.full(V, .5))).tolist())

def random_tree(rng, V, most=16, kinds=4, chain=False):
    "A tree of any draws below any nodes, probes among them"
    tree, open_, draws = Tree((0,)), [0], Seeded(int(rng.integers(2**31)))
    law = lambda: rng.dirichlet(np.full(V, rng.choice([.05, .5, 5.]))) if V > 9 else fractions(rng, V)
    while len(tree) < rng.integers(1, most + 1) and open_:
        u, q = open_.pop(int(rng.integers(len(open_)))), law()
        top = lambda q: points([int(x) for x in np.argsort(-q.astype(float), kind="stable")[:5]], V, q.dtype == object)
        draw = (iid(q), without_replacement(q), top(q), in_sequence(iid(q), top(q), iid(law()), top(law())))[int(rng.integers(kinds))]
        open_ += tree.grow(u, draw, draws, 1 if chain else int(rng.integers(1, 5)))
        if rng.random() < .2: tree.add(u, int(rng.integers(V)))
    return tree

def rows_for(rng, tree, V):
    "Rows of p, some near what was drafted, some equal to it, some with zeros"
    out = []
    for i in range(len(tree)):
        kids, own = tree.children(i), rng.dirichlet(np.full(V, .3))
        if V <= 9: out.append(fractions(rng, V)); continue
        mix = rng.choice([0., .7, 1.]) if kids else 0.
        out.append(mix * np.asarray(tree.law[kids[0]], dtype=float) + (1 - mix) * own if kids else own)
    return out

@given(st.integers(0, 2**32), st.sampled_from([2, 3, 5, 40]), st.integers(1, 5))
@settings(max_examples=60)
def test_random_tapes(seed, V, B):
    "Ragged trees of every draw, duplicates, probes, zeros and lone roots; random numbers and the extremes 0 and 1 - 2^-53"
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, V) for _ in range(B)]
    rows = [rows_for(rng, t, V) for t in trees]
    number = lambda: float(rng.choice([rng.random(), rng.random(), 0., 1 - 2**-53]))
    coins, picks = [[number() for _ in range(len(t))] for t in trees], [number() for _ in trees]
    said = list(judged(verify_trees, trees, rows, coins, picks))
    for t, p, c, u, (tokens, nodes) in zip(trees, rows, coins, picks, said, strict=True):
        fr = (lambda xs: [F(x) for x in xs]) if V <= 9 else list
        verdict = reject(p, t, verdict_tape(fr(c), fr([u])*len(t)))
        assert (tokens, nodes) == (verdict.tokens(t), t.ancestors(verdict.node))

@given(st.integers(0, 2**32), st.sampled_from([3, 40]))
@settings(max_examples=60)
def test_random_chains_backwards(seed, V):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, V, chain=True) for _ in range(3)]
    rows = [rows_for(rng, t, V) for t in trees]
    coins, picks = [rng.random(len(t)) for t in trees], rng.random(3)
    for t, p, c, u, (tokens, nodes) in zip(trees, rows, coins, picks, judged(verify_chains, trees, rows, coins, picks), strict=True):
        verdict = block(p, t, verdict_tape([F(x) for x in c] if V < 9 else c, [F(u) if V < 9 else u]*len(t)))
        assert (tokens, nodes) == (verdict.tokens(t), t.ancestors(verdict.node))

@pytest.mark.parametrize("V", [32_000, 151_936])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_at_size(V, dtype):
    "Real vocabularies: the reference's integers"
    rng = np.random.default_rng(V)
    trees = [random_tree(rng, V, most=8) for _ in range(4)]
    batch, q = pack(trees)
    p = torch.tensor(np.concatenate([rows_for(rng, t, V) for t in trees])).to(dtype)
    coins, picks = torch.tensor(rng.random(batch.n)), torch.tensor(rng.random(4))
    out = verify_trees(batch, p, q.to(dtype), coins, picks)
    for b, (t, o) in enumerate(zip(trees, batch.root.tolist())):
        back = Tree(t.ctx)
        for i in range(1, len(t)): back.add(t.parent[i], t.token[i], t.law[i])
        verdict = reject(p[o:o+len(t)].double().numpy(), back, verdict_tape(coins[o:o+len(t)].numpy(), [float(picks[b])]*len(t)))
        assert tuple(out.tokens[b, :out.length[b]].tolist()) == verdict.tokens(t)


# Logits

def test_power_is_exp():
    "Within two units of the last place of exp, and 0 far below"
    x = -700 * torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert ((power(x) - x.exp()).abs() / x.exp()).max() < 5e-16
    assert power(torch.tensor([0., -701., -1e9, -torch.inf], dtype=torch.float64)).tolist() == [1., 0., 0., 0.]

@pytest.mark.parametrize("spread", [0., 3., 40.])
def test_a_softmax_is_too_large_by_one_factor(spread):
    "Between 1 and 1 + V/2^44, whatever the logits"
    V, x = 151_936, torch.randn(1, 151_936, generator=torch.Generator().manual_seed(2)) * spread
    rows, one = Logits(x), torch.tensor([0])
    share = rows.weigh(one, one, rows.top(one, one))[0] / (x[0].double() - x.max()).exp() * (x[0].double() - x.max()).exp().sum()
    assert -1e-12 < (share - 1).min() and (share - 1).max() < V * 2**-44 + 1e-12

@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_logits_are_their_softmax(kind, device_way):
    "Logits at a temperature for each request, point targets at 0 (the first of equals), tokens masked by -inf: the walk on the laws they stand for"
    rng, V, temps = np.random.default_rng(3), 50, [1., .5, 0., 2., 0., 1.3]
    trees = [random_tree(rng, V, kinds=2) for _ in temps]
    batch, q = pack(trees)
    x = torch.tensor(rng.normal(size=(batch.n, V)) * 2).to(kind)
    x[:, ::7] = -torch.inf
    z = (torch.tensor(rng.normal(size=(len(q), V)) * 2)).to(kind)
    soft = lambda x, t: (x.double() / t).softmax(-1) if t else torch.tensor(np.stack([greedy(row) for row in x.double().numpy()]))
    of = batch.tree.tolist()
    p = torch.stack([soft(x[i:i+1], temps[of[i]])[0] for i in range(batch.n)])
    for _ in range(20):
        coins, picks = torch.tensor(rng.random(batch.n)), torch.tensor(rng.random(len(temps)))
        a, b = verify_trees(batch, Logits(x, torch.tensor(temps)), Logits(z), coins, picks), verify_trees(batch, p, z.double().softmax(-1), coins, picks)
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.nodes, b.nodes) and torch.equal(a.length, b.length)
    tied = Logits(torch.tensor([[1., 3., 3., 0.]]), 0.)
    one, _ = pack([Tree((0,))], V=4)
    assert [verify_trees(one, tied, None, torch.tensor([.5], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)).tokens.item() for u in (0., .5, .999)] == [1, 1, 1]


def test_logits_of_several_rows_at_a_node(device_way):
    "Siblings drawn from rows of their own, with points between them: each is judged by the top of its own row of logits"
    of_rows(verify_trees)

def of_rows(walk):
    "Asserts that logits give the walk on the laws they stand for, where a node's offers come from several rows of q"
    rng, V, temps = np.random.default_rng(5), 20, torch.tensor([1., .5, 2., 1.])
    parent, N = [-1, 0, 0, 0, 0, 2, 2], 7
    row = [-1, 0, 1, -1, 2, 1, 3]
    batch = flat([u if u < 0 else u + N*b for b in range(4) for u in parent], rng.integers(0, V, 4*N).tolist(), row*4)
    x, z = torch.tensor(rng.normal(size=(batch.n, V))), torch.tensor(rng.normal(size=(4, V)) * torch.tensor([[1.], [3.], [.1], [2.]]).numpy())
    z[1] += 30; z[2] -= 20
    p = torch.cat([(x[N*b:N*b + N] / t).softmax(-1) for b, t in enumerate(temps)])
    for _ in range(60):
        coins, picks = torch.tensor(rng.random(batch.n)**.3), torch.tensor(rng.random(4))
        a, b = walk(batch, Logits(x, temps), Logits(z), coins, picks), walk(batch, p, z.softmax(-1), coins, picks)
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.nodes, b.nodes)

def test_an_elder_that_its_row_does_not_know(device_way):
    "A token drawn without elders to which its row gives no weight is judged as any other: with the mark and without, for points and flat draws before it"
    rng, V = np.random.default_rng(6), 9
    for k in range(30):
        q = np.where(np.arange(V) < 5, rng.dirichlet(np.full(V, .7)), 0.)
        q /= q.sum()
        tree = star([points([7], V)(()), q, without_replacement(q)((1,)), points([8], V)(())], [7, 1, int(np.argsort(q * (np.arange(V) != 1))[-1 - k % 2]), 8])
        tree.add(0, int(q.argmax()), q)
        batch, rows = pack([tree]*8)
        rows = torch.cat([rows, floats([q])])
        batch = replace(batch, q_row=torch.tensor([-1, -1, len(rows) - 1, len(rows) - 1, -1, len(rows) - 1]*8, dtype=torch.int32))
        marked = [replace(batch, without_replacement=torch.tensor([False, False, first, True, False, False]*8)) for first in (False, True)]
        p, coins, picks = floats(rng.dirichlet(np.full(V, .7), batch.n)), torch.tensor(rng.random(batch.n)**.3), torch.tensor(rng.random(8))
        one, two = (verify_trees(b, p, rows, coins, picks, check=False) for b in marked)
        assert torch.equal(one.tokens, two.tokens) and torch.equal(one.nodes, two.nodes)
        for b in range(8):
            verdict = reject(p[6*b:6*b + 6].numpy(), tree, verdict_tape(coins[6*b:6*b + 6].tolist(), [float(picks[b])]*6))
            assert tuple(one.tokens[b, :one.length[b]].tolist()) == verdict.tokens(tree)


# Whole numbers

weights_ = st.lists(st.one_of(st.just(0.), st.floats(0, 1), st.floats(0, 2**-40)), min_size=1, max_size=30).filter(lambda w: sum(w) > 2**-20)

@given(weights_, st.one_of(st.just(0.), st.just(1 - 2**-53), st.integers(0, 2**53 - 1).map(lambda k: k * 2**-53)))
@proves("lem-never-zero")
def test_a_token_without_weight_is_never_drawn(w, u):
    "Any weights, any number of [0, 1): a token that counts is found, the one that the definition names"
    one, _ = pack([Tree((0,))], V=len(w))
    p = torch.tensor([w], dtype=torch.float64)
    p = p / p.sum()
    y = verify_trees(one, p, None, torch.zeros(1, dtype=torch.float64), torch.tensor([u], dtype=torch.float64)).tokens.item()
    f = fixed_point(p[0]).tolist()
    mark = int(u * sum(f))
    assert f[y] >= 1 and sum(f[:y]) <= mark < sum(f[:y + 1])

@given(st.integers(0, 2**32), st.integers(2, 60))
@proves("thm-fixed-point")
def test_what_cutting_off_costs(seed, V):
    "The law of the counts is within V·2^-52/S of that of the weights, which is V·2^-52 once weighted by the probability S to get there"
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(V, .3)), rng.dirichlet(np.full(V, .3))
    r = np.maximum(p - q, 0)
    w, f = [F(x) for x in r], [F(int(x)) for x in fixed_point(torch.tensor(r))]
    if not sum(f): return
    off = sum(abs(a / sum(w) - b / sum(f)) for a, b in zip(w, f)) / 2
    assert off * sum(w) <= V * F(1, 2**52) and all(0 <= x * 2**52 - k < 1 for x, k in zip(w, f))


def borders(p, q, x, find=verify_trees):
    "The law of the token that `find` ends with once `x` from `q` was refused, as fractions: where the last number passes from one token to the next, by bisection"
    V, tree = len(p), star([q], [x])
    batch, rows = pack([tree]*V)
    low, high = torch.zeros(V, dtype=torch.int64), torch.full((V,), 2**53, dtype=torch.int64)   # request v: the last number, in units of 2^-53, that ends with v or less is below `high`
    while (high - low).max() > 1:
        mid = (low + high) // 2
        said = find(batch, torch.tensor(p).expand(batch.n, V), rows, torch.full((batch.n,), 1 - 2**-53, dtype=torch.float64), mid.double() * 2**-53, check=False).tokens[:, 0]
        low, high = torch.where(said <= torch.arange(V), mid, low), torch.where(said <= torch.arange(V), high, mid)
    ends = [0, *high[:-1].tolist(), 2**53]
    return [F(b - a, 2**53) for a, b in zip(ends, ends[1:])]

def far(law, p, q):
    "How far a law is from what remains of p, times the probability to get there"
    r = [max(F(a) - F(b), 0) for a, b in zip(p, q)]
    return sum(abs(a / sum(r) - b) for a, b in zip(r, law)) / 2 * sum(r)

@pytest.mark.parametrize("near", [0., .9, .999999])
@proves("thm-fixed-point")
def test_the_bound_holds_for_the_walk(near, monkeypatch):
    "The walk's own law, found by bisection of its last number, is within V·2^-52 (and the 2^-53 of a number itself) of what remains; counted in units of 2^-30 it is not"
    rng, V, far_off = np.random.default_rng(4), 6, []
    for _ in range(6):
        q, own = rng.dirichlet(np.full(V, .4), 2)
        p = near*q + (1 - near)*own
        x = int(np.argmax(q - p))
        bound = F(3*V, 2**53) + F(4*V, 2**53)*sum(F(max(a - b, 0)) for a, b in zip(p, q))   # cut off; a number of 53 bits, and p and q that sum to one in floats only
        assert far(borders(p, q, x), p, q) <= bound
        with monkeypatch.context() as coarse:
            coarse.setattr(v, "ONE", 2.**30)
            far_off.append(far(borders(p, q, x), p, q) > bound)
    assert sum(far_off) > 3

@given(st.integers(0, 2**32))
@settings(max_examples=25)
@proves("cor-no-pass")
def test_a_point_takes_its_own(seed):
    "S_{j+1} = S_j - R_j(x_j), as whole numbers: the sum kept in `left` falls by what the sum of the whole row falls, behind drawn offers too"
    rng, V, on, one = np.random.default_rng(seed), 7, torch.tensor([True]), slice(0, 1)
    q, tokens = rng.dirichlet(np.full(V, .5)), rng.integers(0, V, 5)
    drawn = rng.random(5) < .4
    batch, rows = pack([star([q if d else points([int(x)], V)(()) for x, d in zip(tokens, drawn)], tokens.tolist())])
    if not len(rows): rows = floats([q])
    s, falls = v.Offers(batch, Probs(floats([rng.dirichlet(np.full(V, .5))]*6)), Probs(rows)), 0
    s.enter(on)
    s.left = fixed_point(s.residual(one)).sum(1)
    for j in range(5):
        s.note(on, torch.tensor([j + 1]))
        _, _, r = v.offer_weights(s, j, on)
        before = fixed_point(s.residual(one)).sum(1)
        assert s.left == before
        s.reject(on, j, s.left / ONE)
        if not drawn[j]:
            s.left = s.left - fixed_point(r)
            assert s.left == fixed_point(s.residual(one)).sum(1)
            falls += 1
    assert falls == (~drawn).sum()

share = st.one_of(st.floats(0, 1), st.floats(0, 2**-1000), st.sampled_from([0., 5e-324, 1.]))

@given(share, st.floats(0, 4), share, st.floats(0, 1, exclude_max=True))
@proves("lem-nothing-left")
def test_of_a_refused_token_nothing_is_left(r, a, w, u):
    "In floats, denormal ones too: where the test says no, the difference is not positive"
    if not u * (a * w) < r: assert max(r - a * w, 0) == 0


def test_little_of_q_is_left():
    "Without replacement from a row whose second token is 1e-17 or next to nothing: the sum of what is left is right to many digits"
    for small in (1e-17, 1e-200, 1e-307):
        q, p = np.array([1 - 4*small, small, 3*small]), np.array([.2, .5, .3])
        tree = star([q, without_replacement(q)((0,))], [0, 2])
        batch, rows = pack([tree])
        assert batch.without_replacement.tolist() == [False, True, True]
        s = v.Offers(batch, Probs(floats([p]*3)), Probs(rows))
        one = torch.tensor([True])
        s.note(one, torch.tensor([1])); s.reject(one, 0, torch.ones(1, dtype=torch.float64)); s.note(one, torch.tensor([2]))
        full, flat = s.cover(slice(None))
        assert full.item() / ONE == pytest.approx(4*small, rel=1e-9) and not flat

def test_less_than_the_least_float_is_left(device_way):
    "A row of which a denormal number is left: refused at the door; past it, all untried tokens are equal, and no answer is beyond the vocabulary"
    batch, q = flat([-1, 0, 0], [0, 0, 1], [-1, 0, 0], [False, True, True]), torch.tensor([[1., 5e-324, 0., 0.]], dtype=torch.float64)
    numbers = torch.full((3,), .99, dtype=torch.float64), torch.tensor([.5], dtype=torch.float64)
    refuses("token", verify_trees, batch, floats([[.1, .2, .3, .4]]*3), q, *numbers)
    assert verify_trees(batch, floats([[.1, .2, .3, .4]]*3), q, *numbers, check=False).tokens[0, 0] in (2, 3)

def test_points_beside_hot_logits():
    "A point that was refused reads no row: logits far above zero elsewhere do not matter"
    a, b = Tree((0,)), Tree((0,))
    a.grow(0, points([1], 3), Seeded(0)); b.grow(0, iid(np.array([1., 0., 0.])*.8 + .2/3), Seeded(0))
    batch, q = pack([a, b])
    out = verify_trees(batch, floats([[.8, .1, .1]]*batch.n), Logits(torch.tensor([[710., 0., 0.]])), torch.full((batch.n,), .9, dtype=torch.float64), torch.full((2,), .5, dtype=torch.float64), check=False)
    assert out.tokens[0].tolist() == [0, -1]

def test_a_loose_bound_changes_nothing(device_way):
    "A height larger than needed: what was refused at the end stays refused"
    q = exact(1, 1, 0, 0, 0)
    tree = star([q, without_replacement(q)((0,)), without_replacement(q)((0, 1))], [0, 1, 2])
    batch, rows = pack([tree])
    for height in (1, 2, 5):
        out = verify_trees(replace(batch, height=height), floats([exact(1, 1, 1, 1, 4)]*4), rows, torch.full((4,), .9, dtype=torch.float64), torch.tensor([.1], dtype=torch.float64))
        assert out.tokens[0, 0] == 4

def test_from_p_where_nothing_remains():
    "Points cover all of a row whose sum is a little below one: the token is drawn from p itself, never one that is not there"
    tree = star([exact(1, 0), exact(0, 1)], [0, 1])
    batch, rows = pack([tree])
    out = verify_trees(batch, floats([[.5 - 3e-6, .5 - 3e-6]]*3), rows, torch.full((3,), 1 - 2**-53, dtype=torch.float64), torch.tensor([.9], dtype=torch.float64))
    assert out.tokens[0].tolist() == [1, -1]


# What is read

class Noted(Probs):
    "Rows that note what is read of them"
    def weigh(self, b, row, top, v=None):
        if v is None: self.full.extend(row.tolist())
        return super().weigh(b, row, top, v)
def noted(x):
    rows = Noted(x)
    object.__setattr__(rows, "full", [])
    return rows

@given(st.integers(0, 2**32))
@settings(max_examples=25)
@proves("cor-no-pass")
def test_only_visited_rows_are_read(seed):
    "In full: p where the walk ended or where a drawn token was refused and another was offered; q where such a token was refused or judged again"
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, 12) for _ in range(4)]
    batch, q = pack(trees, V=12)
    p, q = noted(torch.tensor(np.concatenate([rows_for(rng, t, 12) for t in trees]))), noted(q)
    coins, picks = torch.tensor(rng.random(batch.n)), torch.tensor(rng.random(4))
    out = verify_trees(batch, p, q if len(q.x) else None, coins, picks, check=False)
    ends = [int(n[k - 2]) if k > 1 else int(r) for n, k, r in zip(out.nodes, out.length, batch.root)]
    visited = {*batch.root.tolist(), *out.nodes[out.nodes >= 0].tolist()}
    refused = lambda i: [c for c in kids(i) if c not in visited]
    def kids(i):
        c, found = int(batch.child[i]), []
        while c >= 0: found.append(c); c = int(batch.sibling[c])
        return found[:next((k + 1 for k, c in enumerate(found) if c in visited), len(found))]
    twice = [i for i in visited for j, c in enumerate(kids(i)) if j and any(batch.q_row[e] >= 0 for e in kids(i)[:j])]
    assert set(p.full) == {*ends, *twice} and set(q.full) <= {max(int(batch.q_row[c]), 0) for i in visited for c in kids(i)}   # row 0 stands in where a point has none

def test_points_need_no_pass():
    "Deterministic children, all refused but the last: one row of p is read in full, none of q"
    tree = Tree((0,))
    tree.grow(0, points([1, 2, 3], 5), Seeded(0), 3)
    batch, q = pack([tree], V=5)
    rows = noted(torch.full((4, 5), .2, dtype=torch.float64))
    out = verify_trees(batch, rows, q, torch.full((4,), .9, dtype=torch.float64), torch.tensor([.6], dtype=torch.float64), check=False)
    assert out.tokens.tolist() == [[4, -1]] and set(rows.full) == {0}


# Without the host

def test_one_graph():
    "Compiled whole, without a question to the host; the integers stay the same"
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, 11, most=6) for _ in range(3)]
    batch, q = pack(trees)
    p = torch.tensor(np.concatenate([rows_for(rng, t, 11) for t in trees]))
    run = torch.compile(lambda coins, picks: verify_trees(batch, p, q, coins, picks, check=False).tokens, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        coins, picks = torch.tensor(rng.random(batch.n)), torch.tensor(rng.random(3))
        assert torch.equal(run(coins, picks), verify_trees(batch, p, q, coins, picks).tokens)


# Wrong walks

def star(law, tokens):
    tree = Tree((0,))
    for x, q in zip(tokens, law): tree.add(0, x, q)
    return tree

WRONG = {
    "a coin of the threshold is a yes": lambda s: s.replace("(a * w) < r)", "(a * w) <= r)"),
    "one coin for all siblings": lambda s: s.replace("(coins[c] *", "(coins[s.batch.root.long()] *"),
    "what was refused is forgotten": lambda s: s.replace("self.a[i] > 0", "self.a[i] < 0"),
    "refused twice": lambda s: s.replace("torch.where(stale, 0., s.a)", "s.a"),
    "what remained is forgotten": lambda s: s.replace("self.cached[i], lambda: cached", "self.cached[i] & False, lambda: cached"),
    "what remains is taken along to the next node": lambda s: s.replace("self.cached & ~on", "self.cached"),
    "refusals are taken along to the next node": lambda s: s.replace("self.stale & ~on", "self.stale"),
    "tokens tried are taken along": lambda s: s.replace("torch.where(on[:, None], -1, self.tried)", "self.tried"),
    "all equal, also at the next node": lambda s: s.replace("torch.zeros_like(here)", "s.now.flat.clone()"),
    "the untried are counted on": lambda s: s.replace("torch.where(on, self.V, self.untried)", "self.untried"),
    "what is left is counted on": lambda s: s.replace("torch.where(on, ONE, self.left)", "self.left"),
    "the top of another row": lambda s: s.replace("(row >= 0) & (row != old)", "(row >= 0) & (old < 0)"),
    "the top of the row before": lambda s: s.replace("row[i].clamp_min(0)), top[i])", "old[i].clamp_min(0)), top[i])"),
    "the top of the first request": lambda s: s.replace("of.top[i], v)", "of.top[:1].expand(len(self.b[i]), 3), v)"),
    "the top of the present offer": lambda s: s.replace("self.offer(i, self.last)", "self.offer(i, self.last._replace(top=self.now.top))"),
    "points stay": lambda s: s.replace("torch.where(self.tried[i] < 0, r.gather(1, tried), 0.)", "r.gather(1, tried)"),
    "tried tokens stay in the cover": lambda s: s.replace("self.offer(i, self.now).scatter_(1, self.tried[i].clamp_min(0), 0.)", "self.offer(i, self.now)"),
    "never renormalised": lambda s: s.replace("(a * w) < r", "w < r"),
    "uniform over all": lambda s: s.replace("self.untried[i] * ONE", "self.V * ONE"),
    "the row before": lambda s: s.replace("self.p.weigh(self.b[i], self.node[i], self.ptop[i])", "self.p.weigh(self.b[i], self.batch.root[i].long(), self.ptop[i])"),
    "siblings in order of their tokens": None,
}

SHORT = [("chain", 3), ("without replacement", 3), ("independent", 3), ("support used up", 4), ("points", 3), ("used up, then used up", 4)]

def stubborn(walk):
    "Asserts the reference's integers where six siblings of all draws meet coins near one"
    rng, V = np.random.default_rng(0), 8
    trees, rows = [], []
    for i in range(60):
        q, other = rng.dirichlet(np.full(V, .8), 2)
        tree = Tree((0,))
        tree.grow(0, [iid(q), without_replacement(q), in_sequence(iid(q), points([int(q.argmax())], V), iid(other), iid(q), points([0, 1], V), iid(q))][i % 3], Seeded(i), 6)
        trees.append(tree); rows.append([.5*q + .5*rng.dirichlet(np.full(V, .8)) for _ in range(len(tree))])
    coins, picks = [.9 + .1*rng.random(len(t)) for t in trees], rng.random(60)
    for t, p, c, u, (tokens, nodes) in zip(trees, rows, coins, picks, judged(walk, trees, rows, coins, picks), strict=True):
        verdict = reject(p, t, verdict_tape(c, [u]*len(t)))
        assert (tokens, nodes) == (verdict.tokens(t), t.ancestors(verdict.node))

def test_the_reference_where_much_is_refused(device_way):
    "Six siblings, coins near one"
    stubborn(verify_trees)

@pytest.mark.parametrize("name", WRONG)
def test_wrong_walks_are_seen(name):
    "Each breaks the law in some cell, or says something else where much is refused; the walk itself passes both in the tests above"
    source = open(v.__file__, encoding="utf-8").read()
    def outcome(walk):
        try:
            stubborn(walk); of_rows(walk)
            for kind, V in SHORT: in_cells(reject, walk, random_table(V, 1), partial(grown(*KINDS[kind]), random_table(V, 2)))
            return "right"
        except (AssertionError, KeyError, ValueError, IndexError): return "wrong"
    def built(text):
        space = dict(vars(v), __name__="specref.gpu.verify")
        exec(compile(text, name, "exec"), space)
        return space["verify_trees"]
    def resorted(batch, *args, **kw):
        child, sibling = batch.child.clone(), batch.sibling.clone()
        for i in range(batch.n):
            kids, c = [], int(batch.child[i])
            while c >= 0: kids.append(c); c = int(batch.sibling[c])
            kids.sort(key=lambda c: int(batch.token[c]))
            for a, b in zip(kids, [*kids[1:], -1]): sibling[a] = b
            if kids: child[i] = kids[0]
        return verify_trees(replace(batch, child=child, sibling=sibling), *args, **kw | dict(check=False))
    changed = resorted if WRONG[name] is None else built(WRONG[name](source))
    assert WRONG[name] is None or WRONG[name](source) != source
    if name == "a coin of the threshold is a yes": return edge(changed)
    assert outcome(changed) == "wrong"

def edge(wrong):
    "A token without weight, and the number 0"
    tree = star([np.array([.5, .5])], [1])
    batch, q = pack([tree])
    zero, args = torch.zeros(2, dtype=torch.float64), (torch.tensor([[1., 0.]]*2, dtype=torch.float64), q)
    assert verify_trees(batch, *args, zero, zero[:1]).tokens[0, 0] == 0 and wrong(batch, *args, zero, zero[:1]).tokens[0, 0] == 1


# At the door

def proper():
    tree = star([np.array([.5, .25, .25]), np.array([.5, .25, .25])], [1, 2])
    batch, q = pack([tree])
    u = torch.full((3,), .5, dtype=torch.float64)
    return dict(batch=batch, p=torch.full((3, 3), 1/3, dtype=torch.float64), q=q, coins=u, picks=u[:1].clone())

@pytest.mark.parametrize("name, change", [
    ("p", lambda a: a["p"].long()), ("p", lambda a: a["p"][:2]), ("p", lambda a: a["p"] * 2), ("p", lambda a: -a["p"]), ("p", lambda a: a["p"] * torch.nan), ("p", lambda a: "rows"),
    ("q", lambda a: a["q"][:, :2]), ("q", lambda a: a["q"] / 2), ("q", lambda a: a["q"].to("meta")), ("coins", lambda a: a["coins"].float()), ("coins", lambda a: a["coins"] + .5), ("coins", lambda a: a["coins"][:2]),
    ("picks", lambda a: -a["picks"]), ("picks", lambda a: a["picks"].expand(2)), ("picks", lambda a: [.5]), ("p", lambda a: Logits(a["p"] * torch.inf)), ("p", lambda a: Logits(a["p"] * torch.nan))])
def test_doors(name, change):
    args = proper()
    for f in (verify_trees, partial(verify_trees, check=True)): f(**args)
    refuses(name, verify_trees, **args | {name: change(args)})

def test_more_doors():
    args = proper()
    twins = star([np.array([.5, .5])]*2, [1, 1])
    same, rows = pack([twins])
    refuses("token", verify_trees, replace(same, without_replacement=same.q_row >= 0), floats([[.5, .5]]*3), rows, args["coins"], args["picks"])
    refuses("token", verify_trees, **args | dict(q=torch.tensor([[.75, 0., .25]], dtype=torch.float64)))
    refuses("batch", verify_trees, **args | dict(batch=None))
    refuses("p", verify_trees, **args | dict(p=Logits(torch.full((3, 3), -torch.inf))))
    refuses("x", Logits, [[1.]])
    for t in "hot", None, [1.]: refuses("temperature", Logits, args["p"], t)
    refuses("temperature", verify_trees, **args | dict(p=Logits(args["p"], -1.)))
    refuses("temperature", verify_trees, **args | dict(p=Logits(args["p"], torch.tensor([1., 1.]))))
    refuses("q_row", verify_trees, **args | dict(q=args["q"][:0]))
    one, _ = pack([Tree((0,))], V=2)
    for x in torch.full((1, 2**18), 2.**-18), Logits(torch.zeros(1, 2**18)), torch.zeros(1, 0): refuses("p", verify_trees, one, x, None, args["coins"][:1], args["picks"])
    for t in 1e300, -0.: assert verify_trees(one, Logits(torch.tensor([[3., 1.]]), t), None, args["coins"][:1], args["picks"]).tokens[0, 0] == (t > 0)
    refuses("batch", verify_chains, **args)
    refuses("token", verify_trees, **args | dict(p=args["p"][:, :2] * 1.5, q=args["q"][:, :2]))

def test_cells_are_a_partition():
    "Volumes add up to one, and each middle lies in its cell: replayed, it gives the cell's outcome"
    tree = star([q := exact(1, 2, 3), without_replacement(q)((2,))], [2, 1])
    p = [exact(3, 2, 1)]*4
    found = list(decision_cells(lambda rng: reject(p, tree, rng)))
    assert sum(c.volume for c in found) == 1 and len(found) == 4
    for c in found: assert reject(p, tree, verdict_tape([c.coins.get(i, F(1, 2)) for i in range(4)], [*c.picks.values(), F(1, 2)][:1]*4)) == c.outcome
