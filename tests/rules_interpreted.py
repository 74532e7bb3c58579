"The kernels of chapter 42b in Triton's interpreter: `TRITON_INTERPRET=1 python rules_interpreted.py`"
from collections import Counter
from dataclasses import replace
from functools import cache
from math import exp, inf, log
from types import SimpleNamespace

import numpy as np
import torch

from kernels_interpreted import CASES, LAST, doubles, drafted, kinds, numbers, ragged
from planted import at_equality, given, instead, never, plant, without
from verify_helpers import HIDDEN, corruptions, hidden
from specref.core.law import exact
from specref.core.rng import verdict_tape
from specref.core.tree import Tree
from specref.gpu import rules
from specref.gpu.kernels import Watched
from specref.gpu.layout import flat, unpack
from specref.gpu.verify import Logits, Probs, verify_chains, verify_trees
from specref.core.loop import match
from specref.verify import traversal as traversals
from specref.verify.coupled import coupled
from specref.verify.lossy import entropy, typical, warped_law
from specref.verify.traversal import traversal

COUNT = dict(verified=0, mutants=0, watched=0)

def lists(out):
    "For each request the tokens and accepted nodes, or its status"
    rows = zip(out.tokens.tolist(), out.nodes.tolist(), out.length.tolist(), out.status.tolist())
    COUNT["verified"] += len(out.status)
    return [status or (tokens[:n], nodes[:n - 1]) for tokens, nodes, n, status in rows]

def weighed(rows, batch):
    "The rows of p or q as numpy, in the weights that a kernel computes"
    if not isinstance(rows, (Probs, Logits)): rows = Probs(rows)
    m = torch.arange(len(rows.x))
    b = batch.tree.long() if len(rows.x) == batch.n else 0*m
    return rows.weigh(b, m, rows.top and rows.top(b, m)).numpy()

def by_reference(rule, trees, batch, p, coins, picks):  # -> as `lists`
    "What a rule of the book returns on the same numbers"
    p = weighed(p, batch)
    slices = [slice(start, start + len(tree)) for tree, start in zip(trees, batch.root.tolist())]
    return [on_tree(rule, tree, p[own], verdict_tape(coins[own], picks[own]), own.start)
            for tree, own in zip(trees, slices)]

def on_tree(rule, tree, p, rng, start):
    "The tokens of a verdict, and its nodes in the batch"
    v, path = rule([*p], tree, rng), []
    i = v.node
    while i: path, i = [start + i, *path], tree.parent[i]
    return [*v.tokens(tree)], path

def of_each(picks, batch): return picks[batch.tree.long()].numpy()

# Parity with the book, on the same numbers

def uniform(rng, n): return torch.tensor(rng.random(n))

def some_trees(seed, V, chains=False):
    rng = np.random.default_rng(seed)
    trees = [ragged(rng, V, chains) for _ in range(4 if V < 50 else 2)]
    batch, p, q, *_ = drafted(rng, trees, V)
    return rng, trees, batch, p, q

def tokens_at(batch, p, picks):
    "The token after every node, by the torch verifier on lone roots"
    alone = flat([-1]*batch.n, [0]*batch.n)
    if isinstance(p, Logits) and torch.is_tensor(p.temperature):
        p = replace(p, temperature=p.temperature[batch.tree.long()])
    return verify_trees(alone, p, None, picks, picks, check=False).tokens[:, 0].tolist()

def walked(batch, draws):  # -> as `lists`
    "The walk of `match` along the links, from the token drawn after each node"
    found, child, sibling = [], batch.child.tolist(), batch.sibling.tolist()
    for node in batch.root.tolist():
        tokens, nodes, c = [draws[node]], [], child[node]
        while c >= 0:
            if batch.token[c] == tokens[-1]:
                tokens, nodes, c = [*tokens, draws[c]], [*nodes, c], child[c]
            else: c = sibling[c]
        found.append((tokens, nodes))
    return found

def matching_cases(seeds, sizes):
    for seed in seeds:
        rng, trees, batch, p, q = some_trees(seed, int(np.random.default_rng(seed).choice(sizes)))
        picks = numbers(rng, batch.n)
        x = kinds(rng, p, q, batch.B)[seed % 5][0]
        yield dict(batch=batch, p=x, picks=picks), walked(batch, tokens_at(batch, x, picks))
        inside = uniform(rng, batch.n)
        want = by_reference(match, trees, batch, p, inside.numpy(), inside.numpy())
        yield dict(batch=batch, p=p, picks=inside), want

def noisy(batch, seed, position):
    "The position and the seed of each node"
    b = batch.tree.long()
    return seed[b], (position[b] + batch.depth)

def coupled_cases(seeds, sizes):
    for seed in seeds:
        rng, trees, batch, p, q = some_trees(seed, int(np.random.default_rng(seed).choice(sizes)))
        numbers = [torch.tensor(rng.integers(0, 2**32, batch.B)) for _ in range(2)]
        x = kinds(rng, p, q, batch.B)[seed % 5][0]
        rows = Probs(x) if torch.is_tensor(x) else x
        if isinstance(rows, Logits) and torch.is_tensor(rows.temperature):
            rows = replace(rows, temperature=rows.temperature[batch.tree.long()])
        draws = rules.race_tokens(rows, *noisy(batch, *numbers)).tolist()
        yield dict(batch=batch, p=x, seed=numbers[0], position=numbers[1]), walked(batch, draws)
        race, roots = rules.PhiloxRace(seed), batch.root.tolist()
        want = [on_tree(coupled, tree, p[start:start + len(tree)].numpy(), race, start)
                for tree, start in zip(trees, roots)]
        lengths = torch.tensor([len(tree.ctx) for tree in trees])
        yield dict(batch=batch, p=p, seed=seed, position=lengths), want

def typical_cases(seeds, sizes):
    for seed in seeds:
        rng, trees, batch, p, q = some_trees(seed, int(np.random.default_rng(seed).choice(sizes)))
        picks, (epsilon, delta) = uniform(rng, batch.B), (float(x) for x in rng.choice([.03, .1, .4, .9], 2))
        x = kinds(rng, p, q, batch.B)[seed % 5][0]
        rule, coins = typical(epsilon, delta, row=warped_law), np.zeros(batch.n)
        want = by_reference(rule, trees, batch, x, coins, of_each(picks, batch))
        yield dict(batch=batch, p=x, picks=picks, epsilon=epsilon, delta=delta), want
        yield gated((epsilon, delta), trees, batch, p, picks)

def gated(limits, trees, batch, p, picks):  # -> a case
    "The row before a low temperature decides, the last token is drawn after it"
    gate, cold, rule = Logits(p.log()), Logits(p.log(), .2), typical(*limits)
    rows, logits, want = weighed(cold, batch), weighed(gate, batch), []
    for tree, start in zip(trees, batch.root.tolist()):
        one = replace(rule, row=lambda p, i, start=start: logits[start + i])
        own = slice(start, start + len(tree))
        tape = verdict_tape([0]*len(tree), of_each(picks, batch)[own])
        want.append(on_tree(one, tree, rows[own], tape, start))
    more = dict(zip(("epsilon", "delta"), limits))
    return dict(batch=batch, p=cold, picks=picks, gate=gate, **more), want

TIED = [.25, .25, .5]
DESIGNED = [   # edges (parent, token), the row of the context and of the others, limits
    ([(0, 2), (0, 1), (2, 2), (1, 1), (1, 0), (2, 0)], TIED, TIED, (.25, .9)),   # a token at the limit
    ([(0, 2), (0, 1), (2, 2), (1, 1), (1, 0), (2, 0)], TIED, TIED, (.2, .9)),    # equal products
    ([(0, 0), (0, 1), (2, 2), (1, 2), (4, 0), (3, 0)], TIED, TIED, (.2, .9)),    # the later path's end first
    ([(0, 0), (1, 1), (0, 2), (3, 0), (4, 0)], [.48, .31, .21], [1/3]*3, (.9, .6)),   # two limits on a path
]

def tied_paths():
    "Paths of equal probability, and limits that decide"
    for edges, root, row, (epsilon, delta) in DESIGNED:
        tree = Tree((0,))
        for parent, x in edges: tree.add(parent, x, exact(1, 1, 2))
        batch, picks = flat(tree.parent, [0, *tree.token[1:]]), doubles([.3])
        rows = doubles([root] + [row]*len(edges))
        rule = typical(epsilon, delta, row=warped_law)
        want = by_reference(rule, [tree], batch, rows, [0]*len(tree), [.3]*len(tree))
        yield dict(batch=batch, p=rows, picks=picks, epsilon=epsilon, delta=delta), want
    tree = Tree((0,))
    for parent in (0, 1): tree.add(parent, 1, exact(1, 1, 2))
    yield gated((.25, .9), [tree], flat([-1, 0, 1], [0, 1, 1]), doubles([[.5, .3, .2]]*3), doubles([.3]))

STARS = "duplicates", "order", "exclusion", "little", "twice", "uniform"

def stars():
    "Trees of one layer, which traversal verifies as `reject` does"
    for name in STARS:
        args = dict(zip(("batch", "p", "q", "coins", "picks"), CASES[name]))
        yield args, lists(verify_trees(*CASES[name]))

def traversal_cases(seeds, sizes):
    for seed in seeds:
        chains = seed % 4 == 3
        rng, trees, batch, p, q = some_trees(seed, int(np.random.default_rng(seed).choice(sizes)), chains)
        if not len(q): continue
        coins, picks = uniform(rng, batch.n), uniform(rng, batch.B)
        x, y = kinds(rng, p, q, batch.B)[(0, 1, 2, 4)[seed % 4]]
        same = unpack(batch, torch.tensor(q_weights(y)), [tree.ctx for tree in trees])
        want = by_reference(traversal, same, batch, x, coins.numpy(), of_each(picks, batch))
        yield dict(batch=batch, p=x, q=y, coins=coins, picks=picks), want

def q_weights(q):
    rows, m = q if isinstance(q, Logits) else Probs(q), torch.arange(len(getattr(q, "x", q)))
    return rows.weigh(0*m, m, rows.top and rows.top(0*m, m)).numpy()

SUITES = dict(match_trees=matching_cases, match_coupled=coupled_cases, typical_trees=typical_cases,
              traverse_trees=traversal_cases)
SEEDS = dict(match_trees=range(4), match_coupled=range(3), typical_trees=range(3), traverse_trees=range(6))

def agrees(rule, args, want, block=4):
    return lists(getattr(rules, f"fused_{rule}")(**args, check=False, block=block)) == want

@cache
def cases(rule):
    designed = dict(typical_trees=tied_paths, traverse_trees=stars).get(rule, list)
    return [*designed(), *SUITES[rule](SEEDS[rule], (2, 3, 5, 11))]

def everything_agrees():
    for rule, suite in SUITES.items():
        for k, (args, want) in enumerate(cases(rule)):
            assert agrees(rule, args, want, block=(2, 4, 16)[k % 3]), f"{rule}, case {k}"
        for seed, V in ((101, 60), (301, 1)):
            for args, want in suite((seed,), (V,)): assert agrees(rule, args, want, block=16), rule
        for args, want in suite((202,), (4099,)): assert agrees(rule, args, want, block=2048), rule

# Chains, broken requests

def same_as_chains(args):
    "Whether traversal returns the integers of block verification"
    found, want = (f(*args, check=False) for f in (rules.fused_traverse_trees, verify_chains))
    COUNT["verified"] += args[0].B
    return all(map(torch.equal, vars(found).values(), vars(want).values()))

def chains():
    for seed in range(4):
        rng = np.random.default_rng(seed)
        batch, p, q, *u = drafted(rng, [ragged(rng, 5, True) for _ in range(4)], 5)
        for k in (seed, seed + 1):
            assert same_as_chains((batch, *kinds(rng, p, q, batch.B)[k], *u)), f"seed {seed}, rows {k}"
        if seed == 1:
            for name, _, *bad in [*corruptions(batch, p, q, 1)][::2]:
                assert "sibling" in name or same_as_chains((*bad, *u)), name
    for name in HIDDEN:
        args, are_chains, _ = hidden(name)
        if are_chains: assert same_as_chains(args), name

def shared_links():
    "Nodes that are offered by many parents: more children than nodes, and no circle"
    n = 7
    batch = flat([-1, 0, 0, 1, 1, 3, 3], [0, 0, 1, 0, 1, 0, 1])
    batch = replace(batch, child=torch.tensor([1, 3, 3, 5, 5, -1, -1], dtype=torch.int32))
    return batch, doubles([[.5, .5]]*n), doubles([.5]*n)

def of_shared_links():
    "What the two rules that come back to a node return for such links"
    batch, p, u = shared_links()
    found = (rules.fused_typical_trees(batch, p, u[:1], check=False),
             rules.fused_traverse_trees(batch, p, None, u*0 + LAST, u[:1], check=False))
    return [*map(lists, found)]

def calls_on(batch, p, q, coins, picks, skipped=()):
    "What the four kernels return"
    given = dict(match_trees=dict(picks=coins), match_coupled=dict(seed=1, position=0),
                 typical_trees=dict(picks=picks), traverse_trees=dict(q=q, coins=coins, picks=picks))
    for rule in given.keys() - {*skipped}:
        yield rule, lists(getattr(rules, f"fused_{rule}")(batch, p, **given[rule], check=False, block=8))

ROTATED = ("match_trees", "typical_trees"), ("match_coupled",), ("match_trees", "traverse_trees")

def broken():
    "A broken request has a status, the others their tokens; what a rule does not read may be wrong"
    rng = np.random.default_rng(24)
    trees = [ragged(rng, 5) for _ in range(3)]
    batch, p, q, *u = drafted(rng, trees, 5)
    for rows in (lambda x: x, lambda x: Logits(x.log())):
        whole = dict(calls_on(batch, rows(p), rows(q), *u))
        for k, (name, right, bad, x, y) in enumerate(corruptions(batch, p, q, 1)):
            if isinstance(rows(p), Logits) and " in " not in name: continue
            for rule, found in calls_on(bad, rows(x), rows(y), *u, ROTATED[k % 3]):
                unread = "q" in name and rule != "traverse_trees" or "one" in name
                status = found[1] if isinstance(found[1], int) else 0
                assert status in [*right, *[0]*unread], f"{rule}: {name}"
                assert found[::2] == whole[rule][::2], f"{rule}: {name}"
    assert of_shared_links() == [[2], [2]]

# What is read

def recorded(p, tree, coins, picks):  # -> {node: rejected children}, {node tested: its scale}, verdict
    "What `traversal` does at each node"
    rejected, scales = Counter(), {}
    class Recorded(traversals.LeafResiduals):
        def __setitem__(self, u, r):
            rejected[u] += 1
            super().__setitem__(u, r)
    def first_accepted(p, tree, rng, u, a):
        scales[u] = a
        return plain.first_accepted(p, tree, rng, u, a)
    plain = SimpleNamespace(**vars(traversals))
    traversals.LeafResiduals, traversals.first_accepted = Recorded, first_accepted
    try: return rejected, scales, traversal(p, tree, verdict_tape(coins, picks))
    finally: traversals.LeafResiduals, traversals.first_accepted = plain.LeafResiduals, plain.first_accepted

def loaded(call, **tensors):
    with Watched(**tensors) as watched: out = call()
    COUNT["watched"] += 1
    return out, *(watched.full(name) for name in tensors)

def path_of(out): return [0, *(i for i in out.nodes[0].tolist() if i >= 0)]

def typical_reads(p, tree, end, limits):
    "Nodes with children that typical paths reach, and the end"
    epsilon, delta = limits
    reached, todo = {end}, [0]
    for u in todo:
        bound = min(epsilon, delta * exp(-entropy(p[u])))
        todo += [c for c in tree.children(u) if p[u][tree.token[c]] > bound]
        if tree.children(u): reached.add(u)
    return reached

def reads(V=5):
    "The rows loaded in blocks are those of Proposition rule-reads"
    for seed in range(8):
        rng = np.random.default_rng(seed)
        tree = ragged(rng, V)
        batch, p, q, *_ = drafted(rng, [tree], V)
        coins, picks = uniform(rng, batch.n), uniform(rng, 1)
        if not len(q): continue
        def fused(name, *args): return getattr(rules, f"fused_{name}")(batch, p, *args, check=False, block=4)
        for name, args in dict(match_trees=(coins,), match_coupled=(seed, 3)).items():
            out, of_p = loaded(lambda: fused(name, *args), p=p)
            assert of_p == {*path_of(out)}, seed
        out, of_p = loaded(lambda: fused("typical_trees", picks, .1, .4), p=p)
        assert of_p == typical_reads(p.numpy(), tree, path_of(out)[-1], (.1, .4)), seed
        traversal_reads(batch, tree, p, q, coins, picks)

def traversal_reads(batch, tree, p, q, coins, picks):
    "Rows of nodes with a rejected child, of the end, and of the rejected children; of logits those tested"
    def fused(p, q): return rules.fused_traverse_trees(batch, p, q, coins, picks, check=False, block=4)
    rejected, scales, v = recorded([*p.numpy()], tree, coins, picks.repeat(batch.n))
    out, of_p, of_q = loaded(lambda: fused(p, q), p=p, q=q)
    assert path_of(out)[-1] == v.node and of_p == {*rejected, v.node}
    rows = rows_of(batch, [c for u, n in rejected.items() for c in tree.children(u)[:n]])
    tested = rows_of(batch, [c for c in scales if batch.without_replacement[c]])
    assert rows <= of_q <= rows | tested
    p, q = p.log(), q.log()
    _, of_p, of_q = loaded(lambda: fused(Logits(p), Logits(q)), p=p, q=q)
    assert of_p == {u for u, a in scales.items() if a > 0} and of_q == rows_of(batch, scales)

def rows_of(batch, nodes): return {int(batch.q_row[c]) for c in nodes} - {-1}

# Mutants: each is detected by the suite of its rule

SEARCH, WALK, NEXT = "typical_search", "traverse_trees_kernel", "tl.load(tree.sibling + at.node)"
LATER, LEAST = "position + n", "tl.minimum(tl.load(limits), limit)"
MUTANTS = {   # name: (function, change), of each rule
    "match_trees": {
        "only the first child": ("matching_child", instead("tl.load(tree.sibling + c)", "-1")),
        "one number for all nodes": ("draw_uniform", instead("picks + at.node", "picks")),
        "the last level again": (
            "match_walk", instead("enter_node(_, _1, c, _2)", "enter_node(_, _1, tree.first, _2)")),
    },
    "match_coupled": {
        "noise of the round": ("draw_race", instead(LATER, "n")),
        "one noise for all depths": ("draw_race", instead(LATER, "position")),
        "the first seed": ("match_coupled_kernel", instead("seed + b", "seed")),
        "the first position": ("match_coupled_kernel", instead("position + b", "position")),
        "tokens of weight zero": ("draw_race", instead("(w > 0) & _", "(w >= 0) & _")),
        "nine rounds": ("philox_words", instead("tl.static_range(10)", "tl.static_range(9)")),
        "the key stays": ("philox_words", without("key += STEP")),
        "words exchanged": ("token_times", instead("(a << 20) | (b >> 12)", "(b << 20) | (a >> 12)")),
        "times upside down": ("token_times", instead("-logarithm(_)", "1 / -logarithm(_)")),
        "the last block wins": ("draw_race", without("there < times")),
    },
    "typical_trees": {
        "at the limit": (SEARCH, at_equality("px > limit")),
        "epsilon alone": ("typical_limit", instead(LEAST, "tl.load(limits) + 0 * limit")),
        "delta alone": ("typical_limit", instead(LEAST, "limit")),
        "no entropy": ("typical_limit", without("power(_).to(tl.float64)")),
        "the first path": ("longer_path", without("(n == best.n) & first")),
        "the last of equals": ("longer_path", at_equality("weight > best.weight")),
        "the first of equals": ("longer_path", never("parent < best.parent")),
        "the most probable path": ("longer_path", instead("_ | ((n == best.n) & first)", "first")),
        "the last token's probability": (SEARCH, without("at.scale")),
        "the decoded row decides": ("typical_trees_kernel", instead(
            "own_rows(q, q_rows, q_each, b, V, Q)", "own_rows(p, p_rows, p_each, b, V, P)")),
        "no way back": (SEARCH, instead(NEXT, "-1")),
        "the limit below": (SEARCH, instead("entry(bounds, d)", "limit")),
    },
    "traverse_trees": {
        "K without 1 - a": ("scale_of", without("1 - at.scale")),
        "K = 1": ("scale_of", never("j > 0")),
        "the scale is lost": (WALK, instead("with_scale(at, scale)", "with_scale(at, one)")),
        "the root's coin": (WALK, instead("coins + at.node", "coins + tree.first")),
        "not divided by K": (WALK, instead("u * _ < S", "u < S")),
        "S not renewed": (WALK, never("d > 0")),
        "children not restored": (
            WALK, instead("at, past, j = off_stack(stack, d)", "at, _, j = off_stack(stack, d)")),
        "rejected once more": (WALK, without("j += 1")),
        "the first child alone": (WALK, instead(NEXT, "-1")),
        "parents first": (WALK, instead("tl.load(tree.child + c)", "-1")),
        "last draw from p": (WALK, given("drawn_token", "j", "0")),
        "not capped at 1": ("child_scale", instead("tl.minimum(r, most)", "r")),
    },
}
BOUNDS = {   # broken links that a kernel must not follow
    "more children than nodes": (WALK, without("left >= 0")),
    "more paths than nodes": (SEARCH, without("left >= 0")),
}
DETECTING = dict(traverse_trees=(1, 11, 7, 10))   # tried first

def alive():
    "Mutants that return what the rules of the book do"
    for rule, mutants in MUTANTS.items():
        tried = [cases(rule)[k] for k in DETECTING.get(rule, ())] + cases(rule)
        for name, change in mutants.items():
            COUNT["mutants"] += 1
            with plant(rules, *change):
                k = next((k for k, case in enumerate(tried) if not agrees(rule, *case)), None)
            if k is None: yield name
            else: tried.insert(0, tried.pop(k))   # what detects one mutant often detects the next
    for name, change in BOUNDS.items():
        COUNT["mutants"] += 1
        with plant(rules, *change):
            if of_shared_links() == [[2], [2]]: yield name

def noise():
    "The published vectors of Philox; the logarithm; the least and the greatest time"
    vectors = {(0, 0, 0): (0xff1dae59, 0x6cd10df2), (2**32 - 1,)*3: (0x2c3f628b, 0xab4fd7ad),
               (0x243f6a88, 0x85a308d3, 0x13198a2e): (0xdd7ce038, 0xf62a4c12)}
    for words, want in vectors.items():
        assert tuple(map(int, rules.philox(*torch.tensor(words)[:, None]))) == want
    odd = torch.tensor(np.random.default_rng(0).integers(0, 2**52, 20_000) * 2 + 1)
    small = odd >> torch.arange(20_000) % 52 | 1
    odd = torch.cat([odd, small, 2**53 - small])
    x = odd.double() * 2.**-53
    found, want = -rules.natural_log(x).numpy(), np.array([-log(u) for u in x.tolist()])
    assert (np.abs(found - want) < 2.**-50 * want).all() and (found > 0).all() and (found < inf).all()
    times = rules.exponential_times(torch.tensor([3]), torch.tensor([7]), 60_000)[0].sort()[0].numpy()
    steps = np.arange(60_001) / 60_000
    gap = np.maximum(np.abs(1 - np.exp(-times) - steps[1:]), np.abs(1 - np.exp(-times) - steps[:-1])).max()
    assert gap * 60_000**.5 < 2   # Kolmogorov: exceeded with probability 2 e^-8

def main():
    "Run everything; the last line counts verified trees, recorded programs, detected mutants"
    for check in (noise, everything_agrees, chains, broken, reads): check()
    left = [*alive()]
    assert not left, left
    print(COUNT["verified"], COUNT["watched"], COUNT["mutants"])

if __name__ == "__main__": main()
