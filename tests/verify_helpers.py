"Shared by the tests of the verifiers: pairs of distributions, draws, stars of siblings, broken requests"
from dataclasses import replace

import numpy as np, torch

from specref import exact, Tree

SGL = exact(6, 2, 1, 1), exact(14, 4, 1, 1)    # sgl-project/sglang#10308: a good draft
PEAK = exact(7, 1, 1, 1), exact(1, 6, 2, 1)    # a bad one

def as_dict(p): return {x: w for x, w in enumerate(p) if w}

def star(draw, n, rng):
    "A tree of up to `n` siblings by `draw`"
    tree = Tree((0,))
    tree.grow(0, draw, rng, n)
    return tree

def siblings_of(law, tokens):
    "A tree of these siblings, each with its distribution"
    tree = Tree((0,))
    for x, q in zip(tokens, law): tree.add(0, x, np.asarray(q))
    return tree

def depends(seed, V, ends=0):
    "A draw whose distributions depend arbitrarily on earlier siblings; it ends with probability `ends`"
    def draw(earlier):
        rng = np.random.default_rng([seed, len(earlier), *earlier])
        w = rng.choice([0, 0, 1, 2, 5], V)
        if rng.random() < ends: return None
        return exact(*map(int, w if w.any() else w + 1))
    return draw

def with_entry(batch, name, at, value):
    "The batch with another number in one of its arrays"
    x = getattr(batch, name).clone()
    x[at] = value
    return replace(batch, **{name: x})

def resorted(batch):
    "The links of a batch whose siblings are in the order of their tokens"
    child, sibling = batch.child.clone(), batch.sibling.clone()
    for u, c in enumerate(batch.child.tolist()):
        kids = []
        while c >= 0: kids, c = [*kids, c], int(batch.sibling[c])
        kids.sort(key=batch.token.__getitem__)
        for at, links, i in zip([u, *kids], [child, *[sibling]*len(kids)], [*kids, -1]): links[at] = i
    return child, sibling

nan, inf = np.nan, np.inf
TWO, HALF, THREE = (-1, 0, 0), [.5, .5, 0.], [.25, .5, .25]
HIDDEN = {   # what no later sum shows: parents, tokens, rows, p, q, coin, what is changed, chains?, status
    "infinite p at a token": ((-1, 0), (0, 0), (-1, -1), [[inf, 1., 0.], HALF], [], .5, {}, 0, 1),
    "negative p at a token": ((-1, 0), (0, 0), (-1, -1), [[-1., 1., 1.], HALF], [], .5, {}, 0, 1),
    "negative q at a token": ((-1, 0), (0, 0), (-1, 0), [HALF]*2, [[-1., 1., 1.]], .5, {}, 0, 1),
    "infinite q at a token": ((-1, 0), (0, 0), (-1, 0), [HALF]*2, [[inf, 1., 0.]], .5, {}, 0, 1),
    "infinite q elsewhere": (TWO, (0, 2, 0), (-1, -1, 0), [HALF]*3, [[.1, inf, .8]], 0., {}, 0, 1),
    "negative q elsewhere": (TWO, (0, 2, 0), (-1, -1, 0), [HALF]*3, [[.1, .8, -1.]], 0., {}, 0, 1),
    "NaN at a tried token": (TWO, (0, 1, 0), (-1, -1, 0), [[.1, 0., .9]]*3, [[.5, nan, .5]], .9, {}, 0, 1),
    "no weight at the end": ((-1,), (0,), (-1,), [[0.]*3], [], .5, {}, 0, 1),
    "negative weight at the end": ((-1,), (0,), (-1,), [[.25, -1., .25]], [], .5, {}, 0, 1),
    "too much weight": ((-1,), (0,), (-1,), [[1.5]*3], [], .5, {}, 0, 1),
    "deeper than the height": ((-1, 0, 1), (0, 0, 0), (-1,)*3, [HALF]*3, [], 0., dict(height=1), 0, 2),
    "wider than the width": (TWO, (0, 2, 2), (-1,)*3, [HALF]*3, [], .5, dict(width=1), 0, 2),
    "a chain deeper than the height": (
        (-1, 0, 1), (0, 0, 0), (-1,)*3, [HALF]*3, [], 0., dict(height=1), 1, 2),
    "no q at a token of a chain": (
        (-1, 0), (1, 0), (-1, 0), [[1., 0., 0.], HALF], [[0., .5, .5]], .1, {}, 1, 1),
    "infinite p in a chain": ((-1, 0), (0, 0), (-1, 0), [[inf, 1., 0.], HALF], [HALF], .5, {}, 1, 1),
    "infinite q in a chain": ((-1, 0), (0, 0), (-1, 0), [HALF]*2, [[inf, 1., 0.]], .5, {}, 1, 1),
    "NaN behind a prefix": (
        (-1, 0, 1), (0, 0, 0), (-1, 0, 0), [HALF, [.5, nan, .5], HALF], [[.9, .1, 0.]], .99, {}, 1, 1),
}

def hidden(name, at=1):
    "A case of `HIDDEN` as the middle one of three requests, the others whole: arguments, chains?, statuses"
    from specref.gpu.layout import flat
    parent, token, row, p, q, coin, changes, chains, status = HIDDEN[name]
    one, rows = len(parent), torch.tensor([HALF] + q, dtype=torch.float64)
    trees = [*parent, *(u if u < 0 else u + one for u in parent), -1]
    rows_of_q = [*(r if r < 0 else 0 for r in row), *(r if r < 0 else r + 1 for r in row), -1]
    alone = [False]*(one + 1) + ["elsewhere" in name and u > 1 for u in range(1, one)] + [False]
    batch = replace(flat(trees, [*token, *token, 0], rows_of_q, alone), **changes)
    x = torch.tensor([THREE]*one + p + [THREE], dtype=torch.float64)
    coins = torch.full((batch.n,), coin, dtype=torch.float64)
    return (batch, x, rows, coins, coins[:3] * 0 + .5), bool(chains), status

ENGINES = (   # drafts, the target's most probable tokens and the result of each request, in vLLM's tests
    ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]), ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]]),
    ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4, -1]]), ([[1]], [[1, 2]], [[1, 2]]),
    ([[]], [[5]], [[5]]), ([[1]], [[2, 3]], [[2, -1]]),
    ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7, -1], [4, 8, -1, -1]]),
    ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5, -1], [3, 4, 7]]))

def peaked(tokens, low, high, V):
    "Logits with one high value in each row"
    z = torch.full((len(tokens), V), low)
    z[range(len(tokens)), tokens] = high
    return z

def engines_cases():
    "Published tests of SGLang (two trees, sampled and greedy) and vLLM: a verifier's arguments, its tokens"
    from specref.gpu.layout import from_draft_tokens, from_linked
    from specref.gpu.verify import Logits
    u = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    child = torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]])
    sibling = torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]])
    trees = from_linked(torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]), child, sibling, 3, 2)
    z = peaked([3, 18, 18, 4, 5, 18, 11, 18, 18, 18, 12, 18], 1., 10., 20)
    for temperature in (.01, 0):
        yield (trees, Logits(z, temperature), None, u[:12], u[:2]), [[3, 4, 5, 18], [11, 12, 18, -1]]
    for drafts, target, tokens in ENGINES:
        counts, joined = torch.tensor([*map(len, drafts)]).cumsum(0), torch.tensor(sum(drafts, [])).long()
        batch = from_draft_tokens(joined, counts, max(map(len, drafts)), drawn=False)
        z = peaked(sum(target, []), -100., 100., 100)
        yield (batch, Logits(z, 0), None, u[:batch.n], u[:batch.B]), tokens

def filled(x, at, value):
    "A copy with one value in some places"
    x = x.clone()
    x[at] = value
    return x

def corruptions(batch, p, q, b):
    """Wrong arrays of tree `b`, which has a child at its root: name, statuses that are right, batch, p, q

    Rows of q that the tree uses are copied, so that no other tree reads what is changed.
    """
    n, rows, (root, end) = batch.n, len(q), [*batch.root.tolist(), batch.n][b:b + 2]
    own, first, behind = slice(root, end), int(batch.child[root]), slice(rows, None)
    moved = torch.where(batch.q_row[own] >= 0, batch.q_row[own] + rows, -1)
    batch, q = with_entry(batch, "q_row", own, moved), torch.cat([q, q])
    for value in (nan, inf, -inf): yield f"{value} in p", [1], batch, filled(p, own, value), q
    if int(batch.q_row[first]) >= 0: yield "NaN in q", [1], batch, p, filled(q, behind, nan)
    yield "one NaN in p", [0, 1], batch, filled(p, (own, 0), nan), q
    yield "one NaN in q", [0, 1], batch, p, filled(q, (behind, 0), nan)
    far = [("child", root, x) for x in (n, n + 9, 2**31 - 1, root, int(batch.root[b - 1]))]
    far += [("q_row", first, x) for x in (2*rows, -2, 2**31 - 1)]
    circles = [("sibling", first, first), ("child", first, first)]
    strange = [("token", first, x) for x in (p.shape[1], -1, 2**31 - 1, -2**31)]
    for right, changes in ([2], far), ([0, 2], circles), ([3], strange):
        for change in changes: yield f"{change}", right, with_entry(batch, *change), p, q
