"Chapter 20: planned and grown trees are the best of their size, by exhaustive search, and exact"
from dataclasses import replace
from fractions import Fraction as F
from functools import cache
from itertools import combinations, product
from math import prod

import numpy as np, pytest
from hypothesis import assume, example, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import (DRAWS, constant, draws, examples, faithful, laws, models, proves, random_table,
                     round_tokens, shapes)
from published import drafted, having
from specref import (acceptance_prob, add_paths, Costs, DynamicTree, embedded, Enumerator, exact, iid,
                     law_of, one_hot, points, prompts, reject, rounds, Seeded, sequoia, StaticTree, Tree,
                     without_replacement)
from specref.core.loop import as_drafter
from specref.core.tree import likeliest_points, to_choices
from specref.draft.shapes import (SEQUOIA_RATES, ParallelHeadTree, SkipGrams, best_size, expand_pool,
                                  expected_tokens, heaviest_nodes, heaviest_paths, independent,
                                  measure_rank_acceptance, medusa_choices, skip_accuracy, top_tokens,
                                  tree_values)
from specref.models.embedded import DOMAINS

def connected(paths): return all(path[:-1] in (set(paths) | {()}) for path in paths)
def offered(tree): return [tree.path(i) for i in range(1, len(tree))]
def one_round(target, drafter):
    return law_of(lambda rng: next(rounds(target, as_drafter(drafter), reject, (0,), rng)))

def best_set(weights, n):
    "The largest weight of `n` connected nodes of a finite pool, by exhaustive search"
    sets = combinations(weights, min(n, len(weights)))
    return max(sum(weights[v] for v in some) for some in sets if connected(some))

def path_weights(rows_after, V, depth):
    "{path: product of `rows_after(prefix)[token]`} of all paths up to a depth"
    paths = [path for d in range(1, depth + 1) for path in product(range(V), repeat=d)]
    return {path: prod((rows_after(path[:i])[x] for i, x in enumerate(path)), start=F(1)) for path in paths}

def draft_tree(model, ctx, depth): return path_weights(lambda path: model.law((*ctx, *path)), model.V, depth)

def mean_tokens(target, drafter): return round_tokens(target, as_drafter(drafter)).mean()

def rates(most=3):
    "Rates of exclusive events, as fractions: rising, falling, with zeros"
    weights = st.lists(st.integers(0, 6), min_size=2, max_size=most + 1).filter(any)
    return weights.map(lambda w: tuple(exact(*w)[:-1]))

@cache
def ordered(n, depth):
    "Every ordered tree of `n` nodes below the root in at most `depth` levels: its children's subtrees"
    if n == 0: return ((),)
    if depth == 0: return ()
    sizes = [(first, n - 1 - y) for y in range(n) for first in ordered(y, depth - 1)]
    return tuple((first, *rest) for first, m in sizes for rest in ordered(m, depth))

def value_of(tree, a):
    "The sum over nodes of the product of rates, far below 0 where there are more children than rates"
    return 1 + sum(r*value_of(below, a) for r, below in zip(a, tree)) if len(tree) <= len(a) else -10**6

# Best first

@st.composite
def weighted(draw, most=8):
    "A pool of paths with falling weights, ties and zeros among them"
    weight = {}
    for path in to_choices(draw(shapes(most))):
        weight[path] = weight.get(path[:-1], F(1)) * draw(st.sampled_from([F(0), F(1, 3), F(1, 2), F(1)]))
    return weight

@proves("thm-best-first")
@examples(60, weighted(), st.integers(0, 10))
def test_best_first(weight, n):
    "Connected, the heaviest n of all in order, as heavy as the sorted pool, cut, and as any set"
    children = lambda path: [(w, v[-1], v) for v, w in weight.items() if v[:-1] == path]
    found = heaviest_paths(children, n)
    paths, ws = [path for path, _ in found], [w for _, w in found]
    assert len(found) == min(n, len(weight)) and connected(paths) and dict(found).items() <= weight.items()
    assert ws == sorted(weight.values(), reverse=True)[:n]
    cut = heaviest_nodes(weight, n)
    assert connected(cut) and sum(ws) == sum(weight[v] for v in cut) == (best_set(weight, n) if weight else 0)

# Planned trees

@proves("thm-positional")
@examples(25, st.integers(2, 4).flatmap(lambda V: st.tuples(laws(V), laws(V))), shapes(4), draws)
def test_positional(pq, parent, how):
    "Constant rows: the sum over nodes is the enumerated mean, for every draw"
    (p, q), draw = pq, DRAWS[how]
    wide = 1 + max((path[-1] for path in to_choices(parent)), default=0)
    best_of = [acceptance_prob(p, draw(q), b) for b in range(wide + 1)]
    a = [more - less for less, more in zip(best_of, best_of[1:])]
    assert mean_tokens(constant(*p), StaticTree(constant(*q), parent, draw)) == expected_tokens(parent, a)

def chain_plan(a, n, depth):
    parent = range(-1, min(n, depth))
    return parent, expected_tokens(parent, a)

def balanced_plan(a, n, depth):
    "As many children as rates at every node, level by level"
    most = sum(len(a)**level for level in range(1, depth + 1))
    parent = [-1, *(i // len(a) for i in range(min(n, most)))]
    return parent, expected_tokens(parent, a)

@faithful("Sequoia", part="sequoia", plain={"a chain": chain_plan, "a balanced tree": balanced_plan})
@proves("thm-sequoia")
@examples(15, rates(), st.integers(1, 6))
@example((F(1, 2), F(1, 4)), 6)
def test_the_recursion_against_exhaustive_search(subject, a, n):
    "All ordered trees of up to n nodes, every depth: the same value, by a tree within the limits"
    for depth in range(n + 1):
        parent, value = subject(a, n, depth)
        assert value == expected_tokens(parent, a) == tree_values(a, n, n)[0][depth][n]
        assert value == max(value_of(t, a) for m in range(n + 1) for t in ordered(m, depth))
        assert len(parent) <= n + 1 and max(map(len, to_choices(parent)), default=0) <= depth
        assert subject(np.array(a, float), n, depth)[1] == pytest.approx(float(value))

@faithful("Sequoia", plain={"a chain": "speculative sampling", "a fixed tree": "sampled tree",
                            "independent siblings": having(draw=lambda draw: iid)})
def test_the_planned_tree_is_drawn_without_replacement(subject):
    "The recursion's tree for the rates of the table; no sibling can have the token of an earlier one"
    tree = subject(random_table(8, 3, zeros=False), gamma=8).drafter((0,), Seeded(0))
    assert sorted(to_choices(tree.parent)) == sorted(to_choices(sequoia(SEQUOIA_RATES, 8, 6)[0]))
    for u in range(len(tree)):
        for earlier, c in combinations(tree.children(u), 2): assert tree.law[c][tree.token[earlier]] == 0

@proves("cor-falling")
@examples(40, rates(4), st.integers(1, 9), st.integers(1, 6))
def test_falling_rates_need_no_recursion(a, n, depth):
    "The heap finds the value where rates fall, and its paths are a draft; else a bound"
    down = sorted(a, reverse=True)
    found = dict(independent([down]*depth, n))
    assert 1 + sum(found.values()) == sequoia(down, n, depth)[1]
    assert all(r == 0 or (*path, r - 1) in found for *path, r in found)
    assert 1 + sum(w for _, w in independent([a]*depth, n)) >= sequoia(a, n, depth)[1]

def test_measured_rates():
    "Constant rows, the exact rates to five standard errors: P(b is accepted), not given that it is tried"
    p, q, n = exact(2, 8, 6, 2), exact(15, 2, 2, 1), 500
    def rates(draw): return np.diff([float(acceptance_prob(p, draw(q), b)) for b in range(4)])
    a = rates(without_replacement)
    seen = 5*np.sqrt(a*(1 - a)/n)
    found = measure_rank_acceptance(constant(*p), constant(*q), [(0,)]*(n//4), 3, each=4)
    assert (abs(found - a) < seen).all()
    given_a_try = a / (1 - np.cumsum([0, *a[:-1]]))
    for other in (given_a_try, rates(iid), rates(likeliest_points)):
        assert (abs(other - a) > 3*seen).any()   # so each of them would be detected

@examples(20, rates(), st.floats(0, .5), st.floats(0, .3), st.tuples(st.floats(1, 4), st.floats(1, 4)),
          st.integers(1, 4), st.integers(1, 3))
def test_best_size_against_exhaustive_search(a, c, rest, ks, most, depth):
    "Every ordered tree up to the limits, each with its own cost: none decodes faster"
    costs = Costs({1: 1., 3: min(ks), 8: max(ks)}, c, rest)
    def speed(value, m, levels): return float(value) / (levels*c + costs.seconds(m + 1) + rest)
    n, levels, gain = best_size(a, costs, most, depth)
    sizes = product(range(most + 1), range(depth + 1))
    every = [speed(value_of(t, a), m, D) for m, D in sizes for t in ordered(m, D)]
    assert gain == pytest.approx(max(every))
    again = speed(sequoia(a, n, levels)[1] if n else 1, n, levels)
    assert n <= most and levels <= depth and gain == pytest.approx(again)
    costly = Costs({1: 1., 2: 3.}, 2.)
    assert best_size(a, costly, most, depth) == (0, 0, 1)   # no tree is faster: plain decoding

@examples(25, models(), shapes(4), draws)
def test_a_static_tree(pair, parent, how):
    "Correct edges; the planned shape, without subtrees that could not be drawn; one call a level; exact"
    drafter, calls = StaticTree(pair[1], parent, DRAWS[how]), pair[1].meter.calls
    tree = drafter((0, 1), Seeded(0))
    assert pair[1].meter.calls - calls <= drafter.depth and max(tree.depth) <= drafter.depth
    assert set(to_choices(tree.parent)) <= set(to_choices(parent))
    assert how != "iid" or len(tree) == len(parent)
    drafter_contract(drafter, (0, 1))
    verifier_contract(pair[0], drafter, reject, (0,), 2)

# Medusa

@proves("prop-ranks")
@examples(25, st.lists(rates(), min_size=1, max_size=3), st.integers(1, 3))
def test_the_calibrated_tree_is_the_best(accuracy, n):
    "Every connected set of n paths of ranks: none has a larger sum of products"
    rows = [(*row, *[F(0)]*3)[:3] for row in accuracy]
    weight = path_weights(lambda path: rows[len(path)], 3, len(rows))
    choices = medusa_choices(accuracy, n)
    assert connected(choices) and len(choices) <= n and sum(weight[c] for c in choices) == best_set(weight, n)

texts = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4)

@examples(25, texts, st.integers(1, 3), st.integers(1, 5))
def test_skip_accuracy(texts, depth, k):
    "Against counting place by place, with the ranks sorted by hand"
    source = SkipGrams([0, 1, 2, 0, 1, 1, 3, 0, 2], 4, depth)
    every = [(text, i) for text in texts for i in range(1, len(text)) if i + depth <= len(text)]
    places = [(text[:i], text[i:i + depth]) for text, i in every]
    assume(places)
    hits = np.zeros((depth, k))
    for ctx, came in places:
        for j, row in enumerate(source(tuple(ctx))):
            ranked = sorted([x for x in range(4) if row[x] > 0], key=lambda x: (-row[x], x))[:k]
            hits[j] += [x == came[j] for x in ranked] + [0]*(k - len(ranked))
    assert (skip_accuracy(source, texts, k) == hits / len(places)).all()

# Grown trees

def pool_of(model, ctx, width, depth): return dict([*expand_pool(model, ctx, width, depth)][-1])

def by_hand(model, ctx, width, depth):
    "In each layer the `width` heaviest get their `width` likeliest children, ties by the lowest id"
    front, pool = [()], {(): F(1)}
    for _ in range(depth):
        layer = []
        for path in front:
            row = model.law((*ctx, *path))
            likeliest = sorted(range(model.V), key=lambda x: (-row[x], x))[:width]
            layer += [(*path, x) for x in likeliest if row[x]]
            pool |= {(*path, x): pool[path]*row[x] for x in likeliest if row[x]}
        front = sorted(layer, key=lambda v: -pool[v])[:width]
    del pool[()]
    return pool

class Sorted(DynamicTree):
    "The first nodes of the pool in another order"
    def __call__(self, ctx, rng):
        *_, pool = expand_pool(self.model, ctx, self.width, self.depth)
        ranked = sorted(pool, key=lambda path: self.key(pool, path))
        return add_paths(Tree(ctx), ranked[:self.n], self.model.V, rng, self.exact)

class ByLayer(Sorted):
    "The heaviest of the first layer, then of the next"
    def key(self, pool, path): return len(path), -pool[path]

class ByToken(Sorted):
    "By the probability of the last token, not of the path"
    def key(self, pool, path): return -pool[path] / pool.get(path[:-1], 1), len(path)

@faithful("EAGLE-2 tree", plain={"by layer": drafted(ByLayer), "by token": drafted(ByToken)})
@proves("prop-pool")
@examples(25, models(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
@example((constant(1, 1, 1), constant(5, 1, 1)), 2, 3, 3)
def test_expand_and_rerank(subject, pair, width, depth, n):
    "The pool of the definition, and the best n of it; the sum is the mean when draft is target"
    q, drafter = pair[1], subject.drafter(pair[1], dict(width=width, depth=depth), gamma=n, exact=True)
    pool, tree = by_hand(q, (0,), width, depth), drafter((0,), Enumerator())
    assert pool == pool_of(q, (0,), width, depth)
    weight = sum(pool[v] for v in offered(tree))
    assert connected(offered(tree)) and len(tree) - 1 == min(n, len(pool)) and max(tree.depth) <= depth
    assert weight == sum(sorted(pool.values())[-n:]) and (len(pool) > 9 or weight == best_set(pool, n))
    assert all(tuple(law) == tuple(one_hot(x, 3)) for law, x in zip(tree.law[1:], tree.token[1:]))
    assert mean_tokens(q, drafter) == 1 + weight
    truth = draft_tree(pair[0], (0,), depth)
    assert mean_tokens(pair[0], drafter) == 1 + sum(truth[v] for v in offered(tree))

@faithful("EAGLE-2 tree", plain={"a static tree": "Sequoia"})
def test_the_shape_follows_the_text(subject):
    "Wide where the embedded draft's first row has much entropy; a layer evaluates `width` nodes"
    small, texts = embedded("small"), [text for domain in DOMAINS for text in prompts(domain, 8, seed=3)]
    entropy = [-sum(w*np.log(w) for w in small(Tree(text))[0] if w > 0) for text in texts]
    trees = [subject(small).drafter(text, Seeded(0)) for text in texts]
    assert len({tuple(t.parent) for t in trees}) > 8 and {len(t) for t in trees} == {13}
    assert np.corrcoef(entropy, [len(t.children(0)) for t in trees])[0, 1] > .5
    fresh = embedded("small")
    subject(fresh).drafter(texts[0], Seeded(0))
    assert fresh.meter.calls == 4 and fresh.meter.tokens == len(texts[0]) + 3*4

class Goes(DynamicTree):
    "No threshold"
    def __call__(self, ctx, rng): return DynamicTree.__call__(replace(self, threshold=-1), ctx, rng)

@faithful("OPT-Tree", plain={"a fixed width": having(width=lambda n: 2), "no threshold": drafted(Goes)})
@proves("prop-pool")
@examples(25, models(), st.integers(1, 4), st.sampled_from([F(-1), F(0), F(1, 10), F(1, 4), F(1, 2), F(2)]))
@example((constant(1, 1, 1), constant(1, 1, 1)), 3, F(1, 10))
def test_opt_tree_is_the_best_tree_of_the_layers_evaluated(subject, pair, n, threshold):
    "No n of *all* paths weigh more; it stops after the first layer that adds no more than the threshold"
    q, before = pair[1], pair[1].meter.calls
    best = [F(0), *(sum(sorted(draft_tree(q, (0,), d).values())[-n:]) for d in (1, 2, 3))]
    drafter = subject.drafter(q, dict(depth=3, threshold=threshold), gamma=n, exact=True)
    tree = drafter((0,), Enumerator())
    calls = q.meter.calls - before
    assert calls == next((d for d in (1, 2) if best[d] - best[d-1] <= threshold), 3)
    assert connected(offered(tree)) and sum(draft_tree(q, (0,), 3)[v] for v in offered(tree)) == best[calls]

# Slots

class GreedyRows(ParallelHeadTree):
    "The likeliest token of each head, a chain"
    def __call__(self, ctx, rng):
        path = [top_tokens(row, 1)[0] for row in self.marginals(ctx)]
        return add_paths(Tree(ctx), [path[:self.n]], self.V, rng, self.exact)

class Levels(ParallelHeadTree):
    "The heaviest paths of one token, then of two"
    def __call__(self, ctx, rng):
        paths = [path for path, _ in independent(self.marginals(ctx), 99)]
        return add_paths(Tree(ctx), sorted(paths, key=len)[:self.n], self.V, rng, self.exact)

@faithful("DDTree", plain={"greedy rows": drafted(GreedyRows), "level by level": drafted(Levels)})
@proves("thm-best-first")
@examples(25, st.lists(laws(3), min_size=1, max_size=3), st.integers(1, 4))
@example([exact(3, 2, 1), exact(3, 2, 1)], 3)
def test_slots_against_exhaustive_search(subject, rows, n):
    "The n prefixes with the largest products, none of weight zero; the published heap takes the same weights"
    class Fixed:
        V, depth, __call__ = 3, len(rows), lambda self, ctx: rows
    weight = path_weights(lambda path: rows[len(path)], 3, len(rows))
    drafter = subject.drafter(constant(1, 1, 1), dict(marginals=Fixed()), gamma=n, exact=True)
    paths = offered(drafter((0,), Enumerator()))
    got = sorted((weight[v] for v in paths), reverse=True)
    assert connected(paths) and got == [w for w in sorted(weight.values(), reverse=True)[:n] if w]
    ranked, heap, taken = [top_tokens(row, 3) for row in rows], [(0,)], []
    def at(ranks): return weight[tuple(ranked[j][r] for j, r in enumerate(ranks))]
    fit = lambda ranks: len(ranks) <= len(rows) and ranks[-1] < len(ranked[len(ranks) - 1])
    while heap and len(taken) < n:   # next sibling and first child, as in the published code
        heap.remove(best := max(heap, key=at))
        taken.append(at(best))
        heap += filter(fit, [(*best[:-1], best[-1] + 1), (*best, 0)])
    assert taken == got

@examples(40, st.lists(st.integers(0, 3), max_size=15), st.integers(1, 4), st.integers(0, 3))
def test_skip_grams_count(tokens, depth, x):
    "Against counting by hand: only places with all of `depth` tokens after them; none for a new token"
    skips = SkipGrams(np.array(tokens, int), 4, depth, exact=True)
    at = [i for i in range(len(tokens) - depth) if tokens[i] == x]
    for j, row in enumerate(skips((3, x)), 1):
        assert list(row) == [F(sum(tokens[i + j] == y for i in at), max(len(at), 1)) for y in range(4)]
    assert (len(ParallelHeadTree(skips, 4)((x,), Enumerator())) > 1) == bool(at)

# Tokens dropped after sampling

@proves("prop-own-value")
def test_a_drawn_child_may_not_be_dropped_by_its_token():
    "(85/100, 15/100), not (7/10, 3/10); dropped without regard to the token, or a point mass: exact"
    def first_token(draw, offer):
        def draft(ctx, rng):
            tree, drawn = Tree(ctx), Tree(ctx)
            drawn.grow(0, draw, rng)
            if offer(drawn.token[1]): tree.add(0, drawn.token[1], drawn.law[1])
            return tree
        return one_round(constant(7, 3), draft).of(lambda r: r.tokens[0])
    coin, truth = iid(exact(1, 1)), {0: F(7, 10), 1: F(3, 10)}
    assert first_token(coin, lambda x: x == 0) == {0: F(85, 100), 1: F(15, 100)}
    assert first_token(coin, lambda x: True) == first_token(coin, lambda x: False) == truth
    for x in (0, 1): assert first_token(points([x], 2, exact=True), lambda y: y == 0) == truth
