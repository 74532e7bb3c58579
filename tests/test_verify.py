"Chapter 42: batched verification equals the reference, in every cell, on random tapes, at any size"
from dataclasses import replace
from fractions import Fraction as F
from functools import partial

import numpy as np, pytest, torch
from helpers import examples, proves
from planted import at_equality, given as argument, instead, plant, without
from verify_helpers import HIDDEN, corruptions, engines_cases, hidden, resorted, siblings_of
from hypothesis import example, given, settings, strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from specref import (block, exact, greedy, iid, in_sequence, law_of, points, random_table, reject, Seeded,
                     target_law, Tree, without_replacement)
from specref.core.rng import verdict_tape
from specref.gpu import verify as v
from specref.gpu.layout import flat, pack
from specref.gpu.verify import ONE, Logits, Probs, decision_cells, fixed_point, verify_chains, verify_trees

@pytest.fixture(params=["read", "masked"])
def device_way(request, monkeypatch):
    "Verification as on a CPU, where masks are read, and as on a device, where they are not"
    if request.param == "masked": monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

def double(x): return torch.tensor(x, dtype=torch.float64)

def floats(rows): return double([[float(x) for x in row] for row in rows])

def verified(verify, trees, rows, coins, picks, **kw):
    "The verdicts on trees with rows of p in fractions: tokens and nodes (in the tree) of each"
    batch, q = pack(trees, V=len(rows[0][0]))
    u = double([float(u) for c in coins for u in c])
    out = verify(batch, floats([r for p in rows for r in p]), q, u, double([float(u) for u in picks]), **kw)
    for b, root in enumerate(batch.root.tolist()):
        tokens, nodes, n = out.tokens[b].tolist(), out.nodes[b].tolist(), int(out.length[b])
        assert all(x == -1 for x in [*tokens[n:], *nodes[n-1:]])
        yield tuple(tokens[:n]), tuple(i - root for i in nodes[:n-1])

def answer(verdict, tree): return verdict.tokens(tree), tree.ancestors(verdict.node)

def middles(cell, tree): return [cell.coins.get(i, F(1, 2)) for i in range(len(tree))]

def in_cells(rule, verify, target, drafter):
    "Every cell of every tree, in one batch; texts weighted by volume have the target's distribution"
    todo = []
    for tree, w in law_of(lambda rng: drafter((0,), rng)).items():
        p = [target.law(tree.text(i)) for i in range(len(tree))]
        todo += [(tree, w, cell, p) for cell in decision_cells(lambda rng: rule(p, tree, rng))]
    trees, _, cells, rows = zip(*todo)
    picks = [next(iter(cell.picks.values()), F(1, 2)) for cell in cells]
    outputs = verified(verify, trees, rows, [*map(middles, cells, trees)], picks)
    law, deep = {}, 1 + max(max(t.depth) for t in trees)
    for (tree, w, cell, _), (tokens, nodes) in zip(todo, outputs, strict=True):
        assert (tokens, nodes) == answer(cell.outcome, tree)
        for rest, m in target_law(target, (0, *tokens), deep - len(tokens)).items():
            law[tokens + rest] = law.get(tokens + rest, 0) + w * cell.volume * m
    assert law == target_law(target, (0,), deep)
    return len(todo)

def grown(*draws):
    "The drafter that grows level d by `draws[d](model row) -> draw, k` below every node"
    def draft(q, ctx, rng):
        tree, level = Tree(ctx), [0]
        for draw, k in draws:
            level = [c for u in level for c in tree.grow(u, draw(q.law(tree.text(u))), rng, k)]
        return tree
    return draft

def heaviest(q): return points(sorted(range(len(q)), key=lambda x: -q[x]), len(q), exact=True)
def mixed(q): return in_sequence(iid(q), heaviest(q), iid(q[::-1].copy()), heaviest(q))
def twice(q): return in_sequence(heaviest(q), iid(q), heaviest(q))   # a point before draws that may repeat it
def narrow(q): return without_replacement(exact(1, 1, *[0]*(len(q) - 2)))   # its third is from the untried

KINDS = {
    "chain": [(iid, 1), (iid, 1)],
    "independent": [(iid, 3), (iid, 1)],
    "without replacement": [(without_replacement, 2), (without_replacement, 2)],
    "all of them": [(without_replacement, 4)],
    "support used up": [(narrow, 3)],
    "points": [(heaviest, 2), (heaviest, 2)],
    "mixed": [(mixed, 3)],
    "a point, then draws": [(twice, 2), (iid, 1)],
    "used up, then more": [(narrow, 3), (iid, 1)],
    "used up, then used up": [(narrow, 3), (narrow, 3)],
    "nothing": [],
}
FOUR = "support used up", "all of them"   # on four tokens

@pytest.mark.parametrize("kind, V", [(kind, 3 + (kind in FOUR)) for kind in KINDS])
@proves("thm-walk")
def test_every_cell(kind, V, device_way):
    "Verdicts of the reference in the middle of each cell; the volumes add up to the target's distribution"
    target, draft = random_table(V, 1), random_table(V, 2)
    assert in_cells(reject, verify_trees, target, partial(grown(*KINDS[kind]), draft)) >= V

@pytest.mark.parametrize("gamma", [1, 2])
def test_every_cell_of_chains(gamma, device_way):
    "Block verification: the same, from the end of the chain"
    drafter = partial(grown(*[(iid, 1)]*gamma), random_table(3, 6))
    assert in_cells(block, verify_chains, random_table(3, 5), drafter) > 6*gamma

# Random batches

def fractions(rng, V): return exact(*rng.multinomial(64, rng.dirichlet(np.full(V, .5))).tolist())

def random_law(rng, V):
    return rng.dirichlet(np.full(V, rng.choice([.05, .5, 5.]))) if V > 9 else fractions(rng, V)

def top(q):
    five = np.argsort(-q.astype(float), kind="stable")[:5]
    return points(five.tolist(), len(q), q.dtype == object)

def random_tree(rng, V, most=16, kinds=4, chain=False):
    "A tree of any draws below any nodes, probes among them"
    tree, open_, draws = Tree((0,)), [0], Seeded(int(rng.integers(2**31)))
    while len(tree) < rng.integers(1, most + 1) and open_:
        u, q, other = open_.pop(int(rng.integers(len(open_)))), random_law(rng, V), random_law(rng, V)
        any_draw = iid(q), without_replacement(q), top(q), in_sequence(iid(q), top(q), iid(other), top(other))
        k = 1 if chain else int(rng.integers(1, 5))
        open_ += tree.grow(u, any_draw[int(rng.integers(kinds))], draws, k)
        if rng.random() < .2: tree.add(u, int(rng.integers(V)))
    return tree

def rows_for(rng, tree, V):
    "Rows of p, some near what was drafted, some equal to it, some with zeros"
    out = []
    for i in range(len(tree)):
        kids, own = tree.children(i), rng.dirichlet(np.full(V, .3))
        if V <= 9: own = fractions(rng, V)
        elif kids:
            mix = rng.choice([0., .7, 1.])
            own = mix * np.asarray(tree.law[kids[0]], dtype=float) + (1 - mix) * own
        out.append(own)
    return out

def number(rng): return float(rng.choice([rng.random(), rng.random(), 0., 1 - 2**-53]))

@pytest.mark.parametrize("chain", [False, True])
@given(st.integers(0, 2**32), st.sampled_from([2, 3, 5, 40]), st.integers(1, 5))
@example(seed=695000, V=40, B=3)   # at w = 1 the sum S + (1 - w) is S, and a coin of 1 - 2^-53 decides
@settings(max_examples=50)
def test_random_tapes(chain, seed, V, B):
    "Ragged trees of every draw, duplicates, probes, zeros and lone roots; numbers from 0 to 1 - 2^-53"
    rule, verify = (block, verify_chains) if chain else (reject, verify_trees)
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, V, chain=chain) for _ in range(B)]
    rows = [rows_for(rng, t, V) for t in trees]
    coins, picks = [[number(rng) for _ in range(len(t))] for t in trees], [number(rng) for _ in trees]
    whole = F if V <= 9 else float
    if V > 9: coins = [[max(u, 2**-40) for u in row] for row in coins]   # below, a truncated sum may be 0
    outputs = [*verified(verify, trees, rows, coins, picks)]
    for b, t in enumerate(trees):
        tape = verdict_tape([whole(u) for u in coins[b]], [whole(picks[b])]*len(t))
        assert outputs[b] == answer(rule(rows[b], t, tape), t)

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_at_size(dtype):
    "A real vocabulary: the integers of the reference"
    V, rng = 151_936, np.random.default_rng(0)
    trees = [random_tree(rng, V, most=8) for _ in range(4)]
    batch, q = pack(trees)
    p = torch.tensor(np.concatenate([rows_for(rng, t, V) for t in trees])).to(dtype)
    coins, picks = torch.tensor(rng.random(batch.n)), torch.tensor(rng.random(4))
    out = verify_trees(batch, p, q.to(dtype), coins, picks)
    for b, (t, o) in enumerate(zip(trees, batch.root.tolist())):
        tape = verdict_tape(coins[o:o+len(t)].numpy(), [float(picks[b])]*len(t))
        verdict = reject(p[o:o+len(t)].double().numpy(), t, tape)
        assert tuple(out.tokens[b, :out.length[b]].tolist()) == verdict.tokens(t)

# Logits

@pytest.mark.parametrize("spread", [0., 3., 40.])
def test_the_weights_of_a_softmax_have_one_factor(spread):
    "Between 1 and 1 + V/2^44, whatever the logits; rounding moves the distribution by less than 10^-6"
    V, x = 151_936, torch.randn(1, 151_936, generator=torch.Generator().manual_seed(2)) * spread
    rows, one = Logits(x), torch.tensor([0])
    w, law = v.power(x[0] - x.max()).double(), rows.weigh(one, one, rows.top(one, one))[0]
    factor = (law / w * w.sum())[w > 0]
    assert -1e-12 < (factor - 1).min() and (factor - 1).max() < V * 2**-44 + 1e-12
    assert (law - x[0].double().softmax(0)).abs().sum() / 2 < 1e-6

def softmax(row, t):
    return (row.double() / t).softmax(-1) if t else torch.tensor(greedy(row.double().numpy()))

def same(a, b): return torch.equal(a.tokens, b.tokens) and torch.equal(a.nodes, b.nodes)

def uniforms(rng, batch, power=1):
    return torch.tensor(rng.random(batch.n)**power), torch.tensor(rng.random(batch.B))

@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_logits_equal_their_softmax(kind, device_way):
    "Logits at a temperature for each request, point targets at 0, masked tokens: as on their probabilities"
    rng, V, temps = np.random.default_rng(3), 50, [1., .5, 0., 2., 0., 1.3]
    trees = [random_tree(rng, V, kinds=2) for _ in temps]
    batch, q = pack(trees)
    x, z = (torch.tensor(rng.normal(size=(n, V)) * 2).to(kind) for n in (batch.n, len(q)))
    x[:, ::7] = -torch.inf
    p = torch.stack([softmax(row, temps[b]) for row, b in zip(x, batch.tree.tolist())])
    for _ in range(10):
        numbers = uniforms(rng, batch)
        laws = verify_trees(batch, p, z.double().softmax(-1), *numbers)
        assert same(verify_trees(batch, Logits(x, torch.tensor(temps)), Logits(z), *numbers), laws)

@pytest.mark.parametrize("logits, temperature, u, token", [
    *[([1., 3., 3., 0.], 0., u, 1) for u in (0., .5, .999)],
    ([3., 1.], 1e300, .5, 1), ([3., 1.], -0., .5, 0)])
def test_extreme_temperatures(logits, temperature, u, token):
    "At temperature 0 the first of equals for every number; at a very high one, a uniform draw"
    one, _ = pack([Tree((0,))], V=len(logits))
    out = verify_trees(one, Logits(torch.tensor([logits]), temperature), None, double([.5]), double([u]))
    assert out.tokens.item() == token

def test_logits_of_several_rows_at_a_node(device_way):
    "Siblings from different rows, and point masses: each uses the maximum of its own logits"
    of_rows(verify_trees)

def of_rows(verify):
    "Asserts that logits give the result of their probabilities, where siblings come from several rows of q"
    rng, V, temps = np.random.default_rng(5), 20, torch.tensor([1., .5, 2., 1.])
    parent, row, N = [-1, 0, 0, 0, 0, 2, 2], [-1, 0, 1, -1, 2, 1, 3], 7
    parents = [u if u < 0 else u + N*b for b in range(4) for u in parent]
    batch = flat(parents, rng.integers(0, V, 4*N).tolist(), row*4)
    for _ in range(30):
        x, numbers = torch.tensor(rng.normal(size=(batch.n, V))), uniforms(rng, batch, power=.3)
        z = torch.tensor(rng.normal(size=(4, V)) * [[1.], [3.], [.1], [2.]] + [[0.], [30.], [-20.], [0.]])
        p = torch.cat([(x[N*b:N*b + N] / t).softmax(-1) for b, t in enumerate(temps)])
        laws = verify(batch, p, z.softmax(-1), *numbers)
        assert same(verify(batch, Logits(x, temps), Logits(z), *numbers), laws)

def offered_weightless(q, k):
    "Siblings of all kinds, one of them with weight 0 in its row"
    last = int(np.argsort(q * (np.arange(9) != 1))[-1 - k % 2])
    rows = points([7], 9)(()), q, without_replacement(q)((1,)), points([8], 9)(())
    tree = siblings_of(rows, [7, 1, last, 8])
    tree.add(0, int(q.argmax()), q)
    return tree

def test_a_token_of_weight_zero_in_its_row(device_way):
    "It is verified as any other: marked or not, after point masses and independent draws"
    rng, V = np.random.default_rng(6), 9
    for k in range(30):
        q = np.where(np.arange(V) < 5, rng.dirichlet(np.full(V, .7)), 0.)
        q /= q.sum()
        tree = offered_weightless(q, k)
        batch, rows = pack([tree]*8)
        rows, r = torch.cat([rows, floats([q])]), len(rows)
        batch = replace(batch, q_row=torch.tensor([-1, -1, r, r, -1, r]*8, dtype=torch.int32))
        marks = [torch.tensor([False, False, first, True, False, False]*8) for first in (False, True)]
        p, (coins, picks) = floats(rng.dirichlet(np.full(V, .7), batch.n)), uniforms(rng, batch, power=.3)
        one, two = (verify_trees(replace(batch, without_replacement=mark), p, rows, coins, picks, check=False)
                    for mark in marks)
        assert same(one, two)
        for b in range(8):
            own = slice(6*b, 6*b + 6)
            verdict = reject(p[own].numpy(), tree, verdict_tape(coins[own].tolist(), [float(picks[b])]*6))
            assert tuple(one.tokens[b, :one.length[b]].tolist()) == verdict.tokens(tree)

# Whole numbers

any_weight = st.one_of(st.just(0.), st.floats(0, 1), st.floats(0, 2**-40))
weights_ = st.lists(any_weight, min_size=1, max_size=30).filter(lambda w: sum(w) > 2**-20)
inner = st.integers(0, 2**53 - 1).map(lambda k: k * 2**-53)
last_numbers = st.one_of(st.sampled_from([0., 1 - 2**-53]), inner)

@given(weights_, last_numbers)
@proves("lem-never-zero")
def test_a_token_of_weight_zero_is_never_drawn(w, u):
    "Any weights, any number of [0, 1): the token is that of the definition, and its weight is positive"
    one, _ = pack([Tree((0,))], V=len(w))
    p = torch.tensor([w], dtype=torch.float64)
    p = p / p.sum()
    y = verify_trees(one, p, None, double([0.]), double([u])).tokens.item()
    f = fixed_point(p[0]).tolist()
    mark = int(u * sum(f))
    assert f[y] >= 1 and sum(f[:y]) <= mark < sum(f[:y + 1])

def borders(p, q, x, find=verify_trees):
    "The distribution of the recovered token of `find` after `x` from `q` is rejected, by bisection"
    V, tree = len(p), siblings_of([q], [x])
    batch, rows = pack([tree]*V)
    low, high = torch.zeros(V, dtype=torch.int64), torch.full((V,), 2**53, dtype=torch.int64)
    coins = torch.full((batch.n,), 1 - 2**-53, dtype=torch.float64)
    while (high - low).max() > 1:   # request v: a number below `high` ends with v or less
        mid = (low + high) // 2
        out = find(batch, torch.tensor(p).expand(batch.n, V), rows, coins, mid.double() * 2**-53, check=False)
        below = out.tokens[:, 0] <= torch.arange(V)
        low, high = torch.where(below, mid, low), torch.where(below, high, mid)
    ends = [0, *high[:-1].tolist(), 2**53]
    return [F(b - a, 2**53) for a, b in zip(ends, ends[1:])]

def distance(law, p, q):
    "The distance of a distribution from the residual of p, times the probability of a rejection"
    r = [max(F(a) - F(b), 0) for a, b in zip(p, q)]
    return sum(abs(a / sum(r) - b) for a, b in zip(r, law)) / 2 * sum(r)

@pytest.mark.parametrize("near", [0., .9, .999999])
@proves("thm-fixed-point")
def test_the_bound_on_the_recovered_token(near, monkeypatch):
    "Within V·2^-52 (and a number's 2^-53) of the residual; in units of 2^-30 it is not"
    rng, V, far_off = np.random.default_rng(4), 6, []
    for _ in range(6):
        q, own = rng.dirichlet(np.full(V, .4), 2)
        p = near*q + (1 - near)*own
        x = int(np.argmax(q - p))
        rest = sum(F(max(a - b, 0)) for a, b in zip(p, q))
        bound = F(3*V, 2**53) + F(4*V, 2**53)*rest   # truncation; p and q sum to one in floats only
        assert distance(borders(p, q, x), p, q) <= bound
        with monkeypatch.context() as coarse:
            coarse.setattr(v, "ONE", 2.**30)
            far_off.append(distance(borders(p, q, x), p, q) > bound)
    assert sum(far_off) > 3

share = st.one_of(st.floats(0, 1), st.floats(0, 2**-1000), st.sampled_from([0., 5e-324, 1.]))

@given(share, st.floats(0, 4), share, st.floats(0, 1, exclude_max=True))
@proves("lem-nothing-left")
def test_a_rejected_token_has_no_residual_mass(r, a, w, u):
    "In floats, denormal ones too: where the test rejects, the difference is not positive"
    if not u * (a * w) < r: assert max(r - a * w, 0) == 0

@pytest.mark.parametrize("small", [1e-17, 1e-200, 1e-307])
def test_without_replacement_with_little_mass(small):
    "Without replacement from a row with nearly all weight on its first: the rest is summed to many digits"
    q, p = np.array([1 - 4*small, small, 3*small]), np.array([.2, .5, .3])
    batch, rows = pack([siblings_of([q, without_replacement(q)((0,))], [0, 2])])
    assert batch.without_replacement.tolist() == [False, True, True]
    s, one = v.WalkState(batch, Probs(floats([p]*3)), Probs(rows)), torch.tensor([True])
    s.note(one, torch.tensor([1]))
    s.reject(one, 0, double([1.]))
    s.note(one, torch.tensor([2]))
    full, flat = s.recount(slice(None))
    assert s.cover() < v.LITTLE and full.item() / ONE == pytest.approx(4*small, rel=1e-9) and not flat

def const(n, x): return torch.full((n,), x, dtype=torch.float64)

def test_denormal_remaining_mass(device_way):
    "A row with a denormal remaining mass, without the check: untried tokens are equal, none beyond V"
    batch, q = flat([-1, 0, 0], [0, 0, 1], [-1, 0, 0], [False, True, True]), double([[1., 5e-324, 0., 0.]])
    out = verify_trees(batch, double([[.1, .2, .3, .4]]*3), q, const(3, .99), const(1, .5), check=False)
    assert out.tokens[0, 0] in (2, 3)

def test_points_beside_large_logits():
    "A rejected point mass reads no row: large logits elsewhere do not matter"
    a, b = Tree((0,)), Tree((0,))
    a.grow(0, points([1], 3), Seeded(0))
    b.grow(0, iid(np.array([1., 0., 0.])*.8 + .2/3), Seeded(0))
    batch, _ = pack([a, b])
    p, q = double([[.8, .1, .1]]*batch.n), Logits(torch.tensor([[710., 0., 0.]]))
    out = verify_trees(batch, p, q, const(batch.n, .9), const(2, .5), check=False)
    assert out.tokens[0].tolist() == [0, -1]

def test_a_loose_bound_changes_nothing(device_way):
    "A height larger than needed: a token rejected at the end stays rejected"
    q = exact(1, 1, 0, 0, 0)
    laws = [q, without_replacement(q)((0,)), without_replacement(q)((0, 1))]
    batch, rows = pack([siblings_of(laws, [0, 1, 2])])
    for height in (1, 2, 5):
        loose, p = replace(batch, height=height), floats([exact(1, 1, 1, 1, 4)]*4)
        assert verify_trees(loose, p, rows, const(4, .9), const(1, .1)).tokens[0, 0] == 4

def test_without_residual_mass_the_token_is_from_p():
    "Point masses cover a row whose sum is a little below one: the token is sampled from p itself"
    batch, rows = pack([siblings_of([exact(1, 0), exact(0, 1)], [0, 1])])
    out = verify_trees(batch, double([[.5 - 3e-6]*2]*3), rows, const(3, 1 - 2**-53), const(1, .9))
    assert out.tokens[0].tolist() == [1, -1]

@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16]))
@proves("prop-cut-off")
def test_cuts_are_the_warps_of_transformers(seed, kind):
    "Top-k, top-p and min-p of each request: the tokens and probabilities; of tokens tied at top-p all stay"
    rng, V = np.random.default_rng(seed), int(np.random.default_rng(seed).integers(2, 40))
    x = torch.from_numpy(rng.normal(size=(3, V)) * 2).to(kind)
    heat, k, p, m = (rng.uniform(.2, 2, 3), rng.integers(0, V + 3, 3), rng.uniform(.01, 1, 3),
                     rng.uniform(0, .4, 3))
    t, *cut = map(torch.from_numpy, (heat, k, p, m))
    rows, b = Logits(x, t, None, *cut), torch.arange(3)
    found = rows.weigh(b, b, rows.top(b, b))
    for i in range(3):
        z = x[i:i + 1].double() / heat[i]
        if k[i]: z = TopKLogitsWarper(int(k[i]))(None, z)
        kept = TopPLogitsWarper(float(p[i]))(None, z).isfinite()
        z = z.masked_fill(z < z[kept].min(), -torch.inf)   # with all that are tied to the last one
        want = MinPLogitsWarper(float(m[i]))(None, z).softmax(-1)[0]
        assert torch.equal(found[i] > 0, want > 0) and (found[i] - want).abs().max() < 1e-6

# Rows read

class Noted(Probs):
    "Rows that record which of them are read in full"
    def weigh(self, b, row, top, v=None):
        if v is None: self.full.extend(row.tolist())
        return super().weigh(b, row, top, v)

def noted(x):
    rows = Noted(x)
    object.__setattr__(rows, "full", [])
    return rows

def offered(batch, i, visited):
    "The children of a node in order, up to the accepted one"
    c, found = int(batch.child[i]), []
    while c >= 0:
        found.append(c)
        if c in visited: break
        c = int(batch.sibling[c])
    return found

@examples(25, st.integers(0, 2**32))
@proves("cor-no-pass")
def test_only_visited_rows_are_read(seed):
    "In full: p at the end and where a sibling follows a rejected draw; of q, rows of visited nodes alone"
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, 12) for _ in range(4)]
    batch, q = pack(trees, V=12)
    p, q = noted(torch.tensor(np.concatenate([rows_for(rng, t, 12) for t in trees]))), noted(q)
    out = verify_trees(batch, p, q if len(q.x) else None, *uniforms(rng, batch), check=False)
    results = zip(out.nodes, out.length, batch.root)
    ends = [int(n[k - 2]) if k > 1 else int(r) for n, k, r in results]
    visited = {*batch.root.tolist(), *out.nodes[out.nodes >= 0].tolist()}
    kids = {i: offered(batch, i, visited) for i in visited}
    twice = [i for i in visited if any(batch.q_row[c] >= 0 for c in kids[i][:-1])]
    assert set(p.full) == {*ends, *twice}   # row 0 of q instead of a point mass's
    assert set(q.full) <= {max(int(batch.q_row[c]), 0) for i in visited for c in kids[i]}

# Broken requests

@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("verify", [verify_trees, verify_chains])
@proves("prop-broken")
def test_a_broken_request_ends_alone(seed, verify, device_way):
    "A status of the right kind, nothing emitted; the requests beside it are as without it"
    rng, V, trees = np.random.default_rng(seed), 12, [Tree((0,))]*3
    while not trees[1].children(0):
        trees = [random_tree(rng, V, chain=verify is verify_chains) for _ in range(3)]
    batch, q = pack(trees, V=V)
    p, u = torch.tensor(np.concatenate([rows_for(rng, t, V) for t in trees])), uniforms(rng, batch)
    want = vars(verify(batch, p, q, *u))
    for name, right, bad, x, y in corruptions(batch, p, q, 1):
        for rows in (x, y), (Logits(x.log()), Logits(y.log())):
            found = vars(verify(bad, *rows, *u, check=False))
            tokens, nodes, length, status = (x[1].tolist() for x in found.values())
            assert status in right, f"{name}: {status}"
            assert not status or (length, {*tokens}, {*nodes}) == (0, {-1}, {-1}), name
            beside = (torch.equal(a[::2], b[::2]) for a, b in zip(found.values(), want.values()))
            assert rows[0] is not x or all(beside), name

@pytest.mark.parametrize("name", HIDDEN)
@proves("prop-broken")
def test_what_no_sum_would_show_is_found(name, device_way):
    args, chains, status = hidden(name)
    found = (verify_chains if chains else verify_trees)(*args, check=False).status.tolist()
    assert found[1:] == [status, 0] and (found[0] == 0 or args[0].height == 1 or args[0].width == 1)

def test_rows_of_p_by_number():
    "Any order, unused rows with NaN: the same verdicts; each wrong number is found"
    rng, V = np.random.default_rng(0), 12
    trees = [random_tree(rng, V) for _ in range(4)]
    batch, q = pack(trees, V=V)
    p, u = torch.tensor(np.concatenate([rows_for(rng, t, V) for t in trees])), uniforms(rng, batch)
    order = torch.from_numpy(rng.permutation(2*batch.n)[:batch.n])
    x = torch.full((2*batch.n, V), torch.nan, dtype=p.dtype).index_copy(0, order, p)
    want, found = verify_trees(batch, p, q, *u), verify_trees(batch, Probs(x, order), q, *u)
    assert all(map(torch.equal, vars(found).values(), vars(want).values()))
    for wrong in (-1, 2*batch.n, 10**12):
        order[batch.root[2]] = wrong
        found = verify_trees(batch, Probs(x, order), q, *u, check=False)
        assert found.status.tolist() == [0, 0, v.LINKS, 0] and torch.equal(found.tokens[3], want.tokens[3])

# Engines

def test_published_tests_of_engines():
    "SGLang's tree and vLLM's chains: the tokens that their tests expect, and SGLang's three arrays"
    cases = [*engines_cases()]
    for args, tokens in cases:
        assert verify_trees(*args).tokens.tolist() == tokens
        if args[0].width == 1: assert verify_chains(*args).tokens.tolist() == tokens
    predicts, index, number = v.accepted_lists(cases[0][0][0], verify_trees(*cases[0][0]))
    assert predicts.tolist() == [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]
    assert (index.tolist(), number.tolist()) == ([[0, 3, 4, 5], [6, 10, 11, -1]], [3, 2])
    args, _, status = hidden("infinite p at a token")
    predicts, index, number = v.accepted_lists(args[0], verify_trees(*args, check=False))
    root = int(args[0].root[1])
    assert status and number[1] == -1 and {*index[1].tolist(), *predicts[root:root + 2].tolist()} == {-1}

# Compilation

def test_one_graph():
    "Compiled as one graph, without host synchronization; the integers are the same"
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, 11, most=4) for _ in range(3)]
    batch, q = pack(trees)
    p = torch.tensor(np.concatenate([rows_for(rng, t, 11) for t in trees]))
    def verdicts(coins, picks): return verify_trees(batch, p, q, coins, picks, check=False).tokens
    run = torch.compile(verdicts, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        coins, picks = torch.tensor(rng.random(batch.n)), torch.tensor(rng.random(3))
        assert torch.equal(run(coins, picks), verify_trees(batch, p, q, coins, picks).tokens)

# Wrong verifiers

EDGE = "a coin at the threshold accepts"
WRONG = {   # a function or a method of `WalkState`, and what is changed in it
    EDGE: ("verify_level", at_equality("_ < r")),
    "one coin for all siblings": ("verify_level", instead("coins[c]", "coins[s.batch.root.long()]")),
    "rejections are ignored": ("residual", instead("self.a[i] > 0", "self.a[i] < 0")),
    "subtracted twice": ("tested_weights", instead("torch.where(stale, 0., s.a)", "s.a")),
    "the residual is ignored": ("residual", instead("self.cached[i]", "self.cached[i] & False")),
    "the residual is carried to the next node": ("enter", instead("self.cached & ~on", "self.cached")),
    "rejections are carried to the next node": ("enter", instead("self.stale & ~on", "self.stale")),
    "tried tokens are carried to the next node": ("enter", instead("torch.where(_, -1, _1)", "_1")),
    "all equal, also at the next node": (
        "tested_weights", instead("torch.zeros_like(here)", "s.now.flat.clone()")),
    "the count of untried tokens is not reset": ("enter", instead("torch.where(_, self.V, _1)", "_1")),
    "the sum of the residual is carried over": ("enter", instead("torch.where(_, ONE, _1)", "_1")),
    "the maximum of another row": ("note", instead("row != old", "old < 0")),
    "the maximum of the row before": ("note", instead("row[i]", "old[i]")),
    "the maximum of the first request": (
        "child_weights", instead("of.top[i]", "of.top[:1].expand_as(of.top[i])")),
    "the maximum of the present child": (
        "subtract", argument("self.child_weights", "self.last", "self.last._replace(top=self.now.top)")),
    "point masses stay": ("residual", instead("torch.where(_, there, 0*there)", "there")),
    "tried tokens stay in the draft's mass": ("recount", instead("_.scatter_(1, _1, 0.)", "_")),
    "never renormalised": ("verify_level", without("a")),
    "uniform over all": ("recount", instead("self.untried[i]", "self.V")),
    "the row before": ("start", argument("self.p.weigh", "self.row[i]", "self.batch.root[i].long()")),
}

SHORT = [("chain", 3), ("without replacement", 3), ("independent", 3), ("support used up", 4), ("points", 3),
         ("used up, then more", 3), ("used up, then used up", 4)]

def crowded(i, q, other):
    "Six siblings: independent, without replacement, or mixed with points"
    V, tree = len(q), Tree((0,))
    alike = points([int(q.argmax())], V)
    mix = in_sequence(iid(q), alike, iid(other), iid(q), points([0, 1], V), iid(q))
    tree.grow(0, [iid(q), without_replacement(q), mix][i % 3], Seeded(i), 6)
    return tree

def many_rejections(verify):
    "Asserts the reference's integers for six siblings of all draws and coins near one"
    rng, V = np.random.default_rng(0), 8
    trees, rows = [], []
    for i in range(60):
        q, other = rng.dirichlet(np.full(V, .8), 2)
        trees.append(crowded(i, q, other))
        rows.append([.5*q + .5*rng.dirichlet(np.full(V, .8)) for _ in range(len(trees[-1]))])
    coins, picks = [.9 + .1*rng.random(len(t)) for t in trees], rng.random(60)
    outputs = [*verified(verify, trees, rows, coins, picks)]
    for b, t in enumerate(trees):
        assert outputs[b] == answer(reject(rows[b], t, verdict_tape(coins[b], [picks[b]]*len(t))), t)

def test_the_reference_with_many_rejections(device_way):
    "Six siblings, coins near one"
    many_rejections(verify_trees)

def is_right(verify):
    try:
        many_rejections(verify)
        of_rows(verify)
        for kind, V in SHORT:
            in_cells(reject, verify, random_table(V, 1), partial(grown(*KINDS[kind]), random_table(V, 2)))
    except AssertionError: return False
    return True

def planted_in(name):
    function, change = WRONG[name]
    return plant(v if hasattr(v, function) else v.WalkState, function, change)

def in_order(batch, *args, **kw):
    "Verification of siblings in the order of their tokens"
    child, sibling = resorted(batch)
    return verify_trees(replace(batch, child=child, sibling=sibling), *args, **kw | dict(check=False))

@pytest.mark.parametrize("name", [name for name in WRONG if name != EDGE])
def test_wrong_verifiers_are_detected(name):
    "Each fails in some cell or after many rejections; `verify_trees` passes above"
    with planted_in(name): assert not is_right(verify_trees)

def test_siblings_sorted_again_are_detected(): assert not is_right(in_order)

def test_a_coin_at_the_threshold_is_detected():
    "A token of weight 0, and the number 0"
    batch, q = pack([siblings_of([np.array([.5, .5])], [1])])
    def drawn(): return verify_trees(batch, double([[1., 0.]]*2), q, const(2, 0.), const(1, 0.)).tokens[0, 0]
    assert drawn() == 0
    with planted_in(EDGE): assert drawn() == 1
