"Chapter 20: planned and grown trees are the best of their size, by exhaustive search, and exact for every target"
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import cold, constant, draws, DRAWS, faithful, laws, models, pairs, proves, refuses, seeds, shapes
from specref.core.rng import Enumerator, Seeded, tv_outcomes, law_of
from specref.core.cost import Costs
from specref.core.law import as_law, exact, one_hot
from specref.core.loop import generate, loop_law, match, rounds
from specref.models.embedded import DOMAINS, embedded, prompts
from specref.verify.reject import Chain, reject
from specref.draft.shapes import DynamicTree, StaticTree, SkipGrams, ParallelHeadTree, best_size, medusa_choices, skip_accuracy, expected_tokens, expand_pool, heaviest_paths, heaviest_nodes, independent, measure_rank_acceptance, opt_tree, sequoia, top_tokens, tree_values
from specref.verify.siblings import Branching, acceptance_prob
from specref.core.target import TableModel, random_table, target_law
from specref.core.tree import Tree, from_choices, iid, points, to_choices, without_replacement

F = Fraction
PAPER = F(6, 10), F(2, 10), F(1, 10)


def connected(paths): return all(path[:-1] in (set(paths) | {()}) for path in paths)


def best_set(weights, n):
    "The most that `n` connected nodes of a finite pool weigh, by trying every set"
    n = min(n, len(weights))
    return max(sum(weights[v] for v in some) for some in combinations(weights, n) if connected(some))


def draft_tree(model, ctx, depth):
    "{path: the draft's probability of it}, all paths up to a depth"
    paths = [path for d in range(1, depth + 1) for path in product(range(model.V), repeat=d)]
    return {path: prod((model.law((*ctx, *path[:i]))[x] for i, x in enumerate(path)), start=F(1)) for path in paths}


def offered(tree): return [tree.path(i) for i in range(1, len(tree))]


# Rates of exclusive events, as fractions: rising, falling, with zeros

def rates(most=3): return st.lists(st.integers(0, 6), min_size=2, max_size=most + 1).filter(any).map(lambda w: tuple(exact(*w)[:-1]))


@lru_cache(maxsize=None)
def ordered(n, depth):
    "Every ordered tree with `n` nodes below the root and at most `depth` levels, as the tuple of the subtrees of its children"
    if n == 0: return ((),)
    if depth == 0: return ()
    return tuple((first, *rest) for y in range(n) for first in ordered(y, depth - 1) for rest in ordered(n - 1 - y, depth))


def worth(tree, a):
    "The sum over nodes of the product of rates, 0 in all where there are more children than rates"
    return 1 + sum(r*worth(below, a) for r, below in zip(a, tree)) if len(tree) <= len(a) else -10**6


def fits(tree, wide): return len(tree) <= wide and all(fits(below, wide) for below in tree)


def parents(tree):
    todo, parent = [(tree, 0)], [-1]
    while todo:
        kids, at = todo.pop(0)
        for kid in kids: parent.append(at); todo.append((kid, len(parent) - 1))
    return parent


# Best first

@st.composite
def weighted(draw, most=9):
    "A pool of paths with falling weights, ties and zeros among them"
    choices = to_choices(draw(shapes(most)))
    weight = {}
    for path in choices: weight[path] = weight.get(path[:-1], F(1)) * draw(st.sampled_from([F(0), F(1, 3), F(1, 2), F(1)]))
    return weight


def kids(weight): return lambda path: [(w, v[-1], v) for v, w in weight.items() if v[:-1] == path]


@proves("thm-best-first")
@settings(max_examples=200)
@given(weighted(), st.integers(0, 10))
def test_best_first(weight, n):
    "Connected, the heaviest n of all, heaviest first, and as heavy as the best connected set; sorting the pool gives a set of that weight"
    found = heaviest_paths(kids(weight), n)
    paths, ws = [path for path, _ in found], [w for _, w in found]
    assert len(set(paths)) == len(paths) == min(n, len(weight)) and connected(paths) and all(weight[v] == w for v, w in found)
    assert ws == sorted(weight.values(), reverse=True)[:n]
    cut = heaviest_nodes(weight, n)
    assert connected(cut) and sum(ws) == sum(weight[v] for v in cut) == (best_set(weight, n) if weight else 0)


@proves("thm-best-first")
def test_an_infinite_tree():
    "Twenty nodes of a tree without end; the rules of the numbers on the page"
    halves = lambda d: [(F(2, 3)**(d + 1), 0, d + 1), (F(1, 3)*F(2, 3)**d, 1, d + 1)]
    asked = []
    assert len(heaviest_paths(lambda d: asked.append(d) or halves(d), 20, 0)) == 20 == len(asked)   # one question for every node taken
    abc = independent([exact(6, 3, 1)]*9, 4)
    assert [path for path, _ in abc] == [(0,), (0, 0), (1,), (0, 0, 0)] and sum(w for _, w in abc) == F(1476, 1000)


@given(laws(5), st.integers(0, 6))
def test_top(p, k):
    got = top_tokens(p, k)
    assert got == sorted([x for x in range(5) if p[x] > 0], key=lambda x: (-p[x], x))[:k] == top_tokens([float(w) for w in p], k)


# Worth

@proves("thm-positional")
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4).flatmap(lambda V: st.tuples(laws(V), laws(V))), shapes(4), draws)
def test_positional(pq, parent, how):
    "Laws that do not change with the text: the sum over nodes is the mean of the enumerated rounds, for every shape and every draw"
    (p, q), draw = pq, DRAWS[how]
    wide = 1 + max((path[-1] for path in to_choices(parent)), default=0)
    a = [acceptance_prob(p, draw(q), b) - acceptance_prob(p, draw(q), b - 1) for b in range(1, wide + 1)]
    drafter = StaticTree(constant(*q), parent, draw)
    mean = law_of(lambda rng: len(next(rounds(constant(*p), drafter, reject, (0,), rng)).tokens)).mean()
    assert mean == expected_tokens(parent, a)


def test_positional_is_an_assumption():
    "Acceptance that depends on the text: the rate at the root is 1 and promises 3 tokens, a round emits 5/2"
    target = TableModel(2, lambda text: exact(1, 0) if text[1:2] == (0,) else exact(0, 1) if text[1:] else exact(1, 1))
    draft = TableModel(2, lambda text: exact(1, 0) if text[1:] else exact(1, 1))
    chain = StaticTree(draft, (-1, 0, 1))
    mean = law_of(lambda rng: len(next(rounds(target, chain, reject, (0,), rng)).tokens)).mean()
    assert mean == F(5, 2) < 3 == expected_tokens(chain.parent, (acceptance_prob(target.law((0,)), iid(draft.law((0,))), 1),))


@settings(max_examples=60)
@given(rates(), st.integers(0, 6))
def test_expected_by_recursion(a, n):
    for tree in ordered(n, n)[:40]:
        if fits(tree, len(a)): assert expected_tokens(parents(tree), a) == worth(tree, a)


# Sequoia

@faithful("Sequoia")
@proves("thm-sequoia")
@settings(max_examples=25, deadline=None)
@given(rates(), st.integers(1, 7))
def test_the_recursion_is_brute_force(a, n):
    "All ordered trees of up to n nodes, every depth: the same worth, and a tree that has it and keeps the limits"
    for depth in range(n + 1):
        parent, value = sequoia(a, n, depth)
        assert value == expected_tokens(parent, a) == max(worth(t, a) for m in range(n + 1) for t in ordered(m, depth))
        assert len(parent) <= n + 1 and max(map(len, to_choices(parent)), default=0) <= depth and value == tree_values(a, n, n)[0][depth][n]


@proves("thm-sequoia")
@settings(max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(1, 20), st.integers(0, 8))
def test_the_recursion_in_floats(w, n, depth):
    a = np.array(w) / max(1, sum(w))
    parent, value = sequoia(a, n, depth)
    assert value == pytest.approx(expected_tokens(parent, a), abs=1e-12) and len(parent) <= n + 1


@faithful("Sequoia")
def test_published_sizes():
    "Eight nodes, five levels, the root among both: 2.7456, a chain of as many levels 2.3056; a limit of depth and the order of ranks matter"
    assert round(float(sequoia(PAPER, 7, 4)[1]), 4) == 2.7456 and round(float(expected_tokens((-1, 0, 1, 2, 3), PAPER)), 4) == 2.3056
    assert sequoia(PAPER, 7, 2)[1] < sequoia(PAPER, 7, 4)[1] and sequoia(PAPER, 7, 1) == ((-1, 0, 0, 0), F(19, 10))
    assert sequoia((F(1, 5), F(4, 5)), 2, 2) == ((-1, 0, 0), 2)


@faithful("Sequoia")
@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True), st.integers(1, 14), st.integers(1, 6))
def test_an_elder_child_carries_no_less(w, n, depth):
    "Rates that fall: the sizes of the subtrees do not rise with the rank, anywhere in the tree"
    parent, _ = sequoia([F(x, sum(w) + 1) for x in sorted(w, reverse=True)], n, depth)
    size = [1] * len(parent)
    for i in range(len(parent) - 1, 0, -1): size[parent[i]] += size[i]
    for u in range(len(parent)):
        below = [size[i] for i in range(len(parent)) if parent[i] == u]
        assert below == sorted(below, reverse=True)


@proves("cor-falling")
@settings(max_examples=100)
@given(rates(4), st.integers(1, 9), st.integers(1, 6))
def test_falling_rates_need_no_recursion(a, n, depth):
    "The heap finds the worth where rates fall, ties and zeros included, and its paths are a draft; in general it is an upper bound"
    down = sorted(a, reverse=True)
    found = independent([down]*depth, n)
    assert 1 + sum(w for _, w in found) == sequoia(down, n, depth)[1]
    assert all(r == 0 or (*path[:-1], r - 1) in dict(found) for path, _ in found for r in path[-1:])
    assert 1 + sum(w for _, w in independent([a]*depth, n)) >= sequoia(a, n, depth)[1]


@faithful("Sequoia")
@settings(max_examples=80)
@given(pairs())
def test_cover(pq):
    "Where the draft has weight wherever the target has, on k tokens, k children without replacement keep one for sure; independent ones do not"
    p, q = pq
    k = int((q > 0).sum())
    if p[q == 0].any(): return
    star = lambda draw: StaticTree(constant(*q), (-1, *[0]*k), draw)
    won = lambda drafter: law_of(lambda rng: next(rounds(constant(*p), drafter, reject, (0,), rng)).verdict.node > 0).get(True, 0)
    if k <= 3: assert won(star(without_replacement)) == 1
    assert acceptance_prob(p, without_replacement(q), k) == 1


def test_independent_children_do_not_cover():
    p, q = exact(3, 1), exact(1, 3)
    won = lambda draw: law_of(lambda rng: next(rounds(constant(*p), StaticTree(constant(*q), (-1, 0, 0), draw), reject, (0,), rng)).verdict.node > 0).get(True)
    assert won(without_replacement) == 1 > won(iid)


def test_measured_rates():
    "On laws that do not change, the counted rates are the exact ones to five standard errors: P(rank b is the one), not P(kept when looked at)"
    p, q, n = exact(4, 3, 2, 1), exact(1, 2, 3, 4), 4000
    a = [float(acceptance_prob(p, without_replacement(q), b) - acceptance_prob(p, without_replacement(q), b - 1)) for b in (1, 2, 3)]
    found = measure_rank_acceptance(constant(*p), constant(*q), [(0,)]*(n//4), 3, each=4)
    assert (abs(found - a) < 5*np.sqrt(np.array(a)*(1 - np.array(a))/n)).all() and sum(a) < .9 and measure_rank_acceptance(constant(*p), constant(*q), [(0,)]*20, 4).sum() == pytest.approx(1)
    given_a_look = found / (1 - np.cumsum([0, *found])[:-1])
    assert given_a_look[1] > found[1] + .1


@settings(max_examples=40, deadline=None)
@given(rates(), st.floats(0, .5), st.floats(0, .3), st.lists(st.floats(1, 4), min_size=2, max_size=2), st.integers(1, 6), st.integers(1, 5))
def test_best_size_is_exhaustive(a, c, rest, ks, most, depth):
    "Every ordered tree up to the limits, each with its own price: none decodes faster"
    costs = Costs({1: 1., 3: min(ks), 8: max(ks)}, c, rest)
    n, levels, gain = best_size(a, costs, most, depth)
    every = [(float(worth(t, a)) / (D*c + costs.seconds(m + 1) + rest), m, D) for m in range(most + 1) for D in range(depth + 1) for t in ordered(m, D)]
    assert gain == pytest.approx(max(every)[0]) and n <= most and levels <= depth
    assert gain == pytest.approx(float(sequoia(a, n, levels)[1] if n else 1) / (levels*c + costs.seconds(n + 1) + rest))


def test_best_size_may_be_none():
    "Where reading two tokens costs three times one, nothing is drafted"
    assert best_size(PAPER, Costs({1: 1, 2: 3}, .1), 8, 8) == (0, 0, 1.)


# Shaped

@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from([(2,), (1, 1, 1), (2, 1), (1, 2), (3, 2), (2, 2, 1)]), draws, seeds)
def test_a_balanced_shape_is_branching(pair, shape, how, seed):
    "The same trees from the same noise, and the same law"
    parent, level = [-1], [0]
    for k in shape:
        level = [len(parent) + i for i, u in enumerate([u for u in level for _ in range(k)])]
        parent += [u for u in ([0] if len(parent) == 1 else last) for _ in range(k)]
        last = level
    ours, theirs = StaticTree(pair[1], parent, DRAWS[how]), Branching(pair[1], shape, DRAWS[how])
    wide = lambda tree: [len(tree.children(u)) for u in range(len(tree)) if tree.depth[u] < len(shape)]
    t = theirs((0,), Seeded(seed))
    assert ours((0,), Seeded(seed)) == t and ours.depth == theirs.depth
    if len(shape) < 3 and shape != (3, 2): assert law_of(lambda rng: ours((0,), rng)) == law_of(lambda rng: theirs((0,), rng))


@settings(max_examples=60, deadline=None)
@given(models(), shapes(4), draws)
def test_shaped_keeps_the_contract(pair, parent, how):
    "Honest edges; the planned shape, less the subtrees of what could not be drawn; one call a level"
    drafter = StaticTree(pair[1], parent, DRAWS[how])
    drafter_contract(drafter, (0, 1))
    before = pair[1].meter.calls
    tree = drafter((0, 1), Seeded(0))
    assert pair[1].meter.calls - before <= drafter.depth and max(tree.depth) <= drafter.depth
    assert set(to_choices(tree.parent)) <= set(to_choices(parent)) and (how != "iid" or len(tree) == len(parent))


@settings(max_examples=40, deadline=None)
@given(models(), shapes(4), draws)
def test_shaped_is_exact(pair, parent, how): verifier_contract(pair[0], StaticTree(pair[1], parent, DRAWS[how]), reject, (0,), 2)


def test_a_subtree_vanishes_with_its_node():
    "Points on a draft that is sure: one child is drawn of three planned, and the nodes below the others are gone"
    drafter = StaticTree(constant(1, 0, 0), (-1, 0, 0, 0, 1, 2, 3), lambda q: points(top_tokens(q, 3), 3, exact=True))
    assert drafter((0,), Enumerator()).parent == [-1, 0, 1] and StaticTree(constant(1, 1), (-1,))((0,), Enumerator()) == Tree((0,))


# Medusa

tables = st.lists(rates(), min_size=1, max_size=3)


@proves("prop-ranks")
@settings(max_examples=80, deadline=None)
@given(tables, st.integers(1, 4))
def test_the_calibrated_tree_is_the_best(accuracy, n):
    "Every connected set of n paths of ranks: none has a larger sum of products"
    weight = {path: prod((accuracy[j][r] for j, r in enumerate(path)), start=F(1))
              for d in range(1, len(accuracy) + 1) for path in product(*(range(len(row)) for row in accuracy[:d]))}
    choices = medusa_choices(accuracy, n)
    assert connected(choices) and len(choices) <= n and sum(weight[c] for c in choices) == best_set(weight, n)


@proves("prop-ranks")
def test_ranks_that_are_not_independent():
    "The table of single places takes 00, worth 6/5 in all; the joint law of the ranks takes 01, worth 7/5"
    truth = {(0, 0): F(2, 10), (0, 1): F(4, 10), (1, 0): F(4, 10)}
    table = [[sum(w for ranks, w in truth.items() if ranks[j] == r) for r in (0, 1)] for j in (0, 1)]
    accepts = lambda paths: sum(w for path in paths for ranks, w in truth.items() if ranks[:len(path)] == path)
    every = [path for d in (1, 2) for path in product((0, 1), repeat=d)]
    assert accepts(medusa_choices(table, 3)) == F(6, 5) < max(accepts(some) for some in combinations(every, 3) if connected(some)) == F(7, 5)
    joint = {a + b: table[0][a[0]]*table[1][b[0]] for a in [(0,), (1,)] for b in [(0,), (1,)]}
    truth.clear(); truth.update(joint)
    assert accepts(medusa_choices(table, 3)) == max(accepts(some) for some in combinations(every, 3) if connected(some))


class Hash:
    "Any rows: a function of the whole context, with ties and zeros"
    def __init__(self, V, depth, seed): self.V, self.depth, self.seed = V, depth, seed
    def __call__(self, ctx): return [exact(1, *np.random.default_rng([self.seed, j, *ctx]).integers(0, 3, self.V - 1)) for j in range(self.depth)]


@proves("prop-ranks")
@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 5), seeds, st.booleans())
def test_counted(texts, depth, k, seed, skip):
    "Against counting place by place, with the ranks sorted by hand; the tree is the best under independence, and one level of it is what really comes true"
    source = SkipGrams([0, 1, 2, 0, 1, 1, 3, 0, 2], 4, depth) if skip else Hash(4, depth, seed)
    places = [(text[:i], text[i:i + depth]) for text in texts for i in range(1, len(text)) if i + depth <= len(text)]
    if not places: return refuses("texts", skip_accuracy, source, texts, k)
    ranked = lambda row: sorted([x for x in range(4) if row[x] > 0], key=lambda x: (-row[x], x))[:k]
    said = [[ranked(row) for row in source(tuple(ctx))] for ctx, _ in places]
    ranks = [[best.index(x) if x in best else None for best, x in zip(bests, came)] for bests, (_, came) in zip(said, places)]
    share = [[F(sum(R[j] == r for R in ranks), len(places)) for r in range(k)] for j in range(depth)]
    found = skip_accuracy(source, [np.array(text, int) for text in texts], k)
    assert found.shape == (depth, k) and (found == np.array(share, float)).all() and (found == skip_accuracy(source, map(tuple, texts), k)).all()
    weight = {path: prod((found[j, r] for j, r in enumerate(path)), start=1.) for d in range(1, min(depth, 2) + 1) for path in product(range(min(k, 3)), repeat=d)}
    for n in (1, 2, 3):
        assert sum(weight[c] for c in medusa_choices(found[:2, :3], n)) == pytest.approx(best_set(weight, n))
        assert sum(share[0][r] for r, in medusa_choices(found[:1], n)) == F(sum((R[0],) in medusa_choices(found[:1], n) for R in ranks), len(places))


def test_choices_are_medusas():
    choices = medusa_choices([(.6, .2, .1)]*4, 7)
    assert from_choices(choices) == list(sequoia((.6, .2, .1), 7, 4)[0])


# Grown trees

def pool_of(model, ctx, width, depth): return dict([*expand_pool(model, ctx, width, depth)][-1])


def by_hand(model, ctx, width, depth):
    "What EAGLE-2 may look at: in each layer the `width` heaviest give their `width` likeliest; the lowest id among equals"
    asked, pool = [()], {(): F(1)}
    for _ in range(depth):
        layer = []
        for path in asked:
            row = model.law((*ctx, *path))
            for x in sorted(range(model.V), key=lambda x: (-row[x], x))[:width]:
                if row[x]: pool[(*path, x)] = pool[path]*row[x]; layer.append((*path, x))
        asked = sorted(layer, key=lambda v: -pool[v])[:width]
    del pool[()]
    return pool


@faithful("expand and rerank")
@proves("prop-pool")
@settings(max_examples=80, deadline=None)
@given(models(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_expand_and_rerank(pair, width, depth, n):
    "The pool is that of the definition, and what is offered is the best connected set of n in it, by trying all; all layers take part"
    q, drafter = pair[1], DynamicTree(pair[1], width, depth, n, exact=True)
    pool, tree = by_hand(q, (0, 1), width, depth), drafter((0, 1), Enumerator())
    assert pool == pool_of(q, (0, 1), width, depth)
    paths = offered(tree)
    assert connected(paths) and len(paths) == min(n, len(pool)) and max(tree.depth) <= depth
    assert sum(pool[v] for v in paths) == best_set(pool, n) if len(pool) < 16 else sorted(pool.values())[-n:] == sorted(pool[v] for v in paths)
    assert all(tuple(law) == tuple(one_hot(x, 3)) for law, x in zip(tree.law[1:], tree.token[1:]))


def unsure():  # -> the embedded draft, texts, the entropy of its first row after each
    small, texts = embedded("small"), [text for domain in DOMAINS for text in prompts(domain, 20, seed=3)]
    return small, texts, [-sum(w*np.log(w) for w in small(Tree(text))[0] if w > 0) for text in texts]


@faithful("expand and rerank")
def test_the_shape_follows_the_text():
    "On the embedded draft: narrow and deep where it is sure, wide and flat where it is not; a planned tree never changes"
    small, texts, entropy = unsure()
    trees = [DynamicTree(small, 4, 5, 12)(text, Seeded(0)) for text in texts]
    wide = [len(t.children(0)) for t in trees]
    assert len({tuple(t.parent) for t in trees}) > 10 and {len(t) for t in trees} == {13}
    assert np.corrcoef(entropy, wide)[0, 1] > .5
    for text, tree in list(zip(texts, trees))[:4]:
        pool = pool_of(small, text, 4, 5)
        assert sum(pool[v] for v in offered(tree)) == pytest.approx(sum(sorted(pool.values())[-12:])) and connected(offered(tree))
    assert len({tuple(StaticTree(small, (-1, 0, 0, 1))(text, Seeded(0)).parent) for text in texts}) == 1


@faithful("OPT-Tree")
@proves("prop-pool")
@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 4), st.integers(1, 3))
def test_opt_tree_is_the_best_tree(pair, n, depth):
    "As many asked as offered: of *all* paths of the draft to that depth, no connected n weigh more"
    q = pair[1]
    everything, tree = draft_tree(q, (0,), depth), opt_tree(q, n, depth, threshold=0, exact=True)((0,), Enumerator())
    ws = [everything[v] for v in offered(tree)]
    assert connected(offered(tree)) and sum(ws) == sum(sorted(everything.values())[-n:])
    if depth < 3 and n < 4: assert sum(ws) == best_set(everything, n)


@faithful("OPT-Tree")
@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 4), st.sampled_from([F(0), F(1, 10), F(1, 4), F(1, 2), F(2)]))
def test_it_stops_after_the_first_layer_that_adds_too_little(pair, n, threshold):
    "The calls are one more than the layers that added more than the threshold, and the tree is the best of the layers seen"
    q, before = pair[1], pair[1].meter.calls
    E = [F(0), *(sum(sorted(draft_tree(q, (0,), d).values())[-n:]) for d in (1, 2, 3, 4))]
    tree = opt_tree(q, n, 4, threshold, exact=True)((0,), Enumerator())
    calls = q.meter.calls - before
    assert calls == next((d for d in (1, 2, 3) if E[d] - E[d-1] <= threshold), 4)
    assert sum(draft_tree(q, (0,), 4)[v] for v in offered(tree)) == E[calls]


@faithful("OPT-Tree")
def test_it_asks_less_often_where_the_draft_is_unsure():
    "On the embedded draft: calls a text fall with the entropy of the first row, and a lower threshold asks more"
    small, texts, entropy = unsure()
    def asked(drafter, text):
        before = small.meter.calls
        drafter(text, Seeded(0))
        return small.meter.calls - before
    half, tenth = ([asked(opt_tree(small, 8, 6, t), text) for text in texts] for t in (.5, .1))
    assert np.corrcoef(entropy, half)[0, 1] < -.4 and len(set(half)) > 2 and all(a <= b for a, b in zip(half, tenth)) and np.mean(half) < np.mean(tenth)


@proves("prop-pool")
@settings(max_examples=40, deadline=None)
@given(models(), st.integers(1, 4), st.integers(1, 3))
def test_the_weight_is_what_is_accepted_if_the_draft_is_the_target(pair, n, depth):
    "E[accepted] is the sum of the target's path probabilities: the weight itself where p = q"
    for target in pair:
        tree = DynamicTree(pair[1], n, depth, n, exact=True)((0,), Enumerator())
        mean = law_of(lambda rng: (r := next(rounds(target, lambda ctx, rng: tree, reject, (0,), rng))).tree.depth[r.verdict.node]).mean()
        assert mean == sum(draft_tree(target, (0,), depth)[v] for v in offered(tree))


def promise(q, p, n, depth):
    "What OPT-Tree's weight says that a round accepts, and what it accepts, in the mean"
    tree = opt_tree(q, n, depth, threshold=0, exact=True)((0,), Enumerator())
    return [sum(draft_tree(model, (0,), depth)[v] for v in offered(tree)) for model in (q, p)]


@faithful("OPT-Tree")
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 4)), min_size=3, max_size=3), st.integers(1, 4))
def test_even_errors_promise_too_much(nodes, n):
    "Drafts that err up as often as down at every node: the mean promise is no less than what *any* tree of n nodes gets, so no less than what theirs get"
    p, e = [F(a, 8) for a, _ in nodes], [F(min(d, a, 8 - a), 8) for a, d in nodes]
    def model(w): return TableModel(2, lambda text: np.array([x := w[1 + text[1] if text[1:] else 0], 1 - x]))
    pairs = [promise(model([a + s*b for a, s, b in zip(p, signs, e)]), model(p), n, 2) for signs in product((-1, 1), repeat=3)]
    said, got = (sum(xs)/8 for xs in zip(*pairs))
    assert said >= best_set(draft_tree(model(p), (0,), 2), n) >= got
    if not any(e): assert said == got


@faithful("OPT-Tree")
def test_the_promise_may_be_too_high_or_too_low():
    "One node, enumerated: 3/4 promised and 1/2 accepted, 3/5 promised and 1 accepted; the embedded draft promises too much"
    even = constant(1, 1)
    for q, p, said, got in (constant(3, 1), even, F(3, 4), F(1, 2)), (constant(1, 3), even, F(3, 4), F(1, 2)), (constant(3, 2), constant(1, 0), F(3, 5), 1), (even, even, F(1, 2), F(1, 2)):
        assert promise(q, p, 1, 1) == [said, got]
        assert law_of(lambda rng: len(next(rounds(p, opt_tree(q, 1, 1, exact=True), reject, (0,), rng)).tokens)).mean() == 1 + got
    big, small = embedded(), embedded("small")
    def weight(model, tree):
        p, w = model(tree), [1.]
        for u, x in list(zip(tree.parent, tree.token))[1:]: w.append(w[u]*p[u][x])
        return sum(w) - 1
    trees = [opt_tree(small, 8)(text, Seeded(0)) for domain in DOMAINS for text in prompts(domain, 10, seed=1)]
    said, got = (np.mean([weight(model, tree) for tree in trees]) for model in (small, big))
    assert said > got + .1


def test_asked_nodes_are_fed_once():
    "A pool of width² candidates a layer: the draft is given the width heaviest of them, and no others"
    small, text = embedded("small"), prompts("code", 1)[0]
    DynamicTree(small, 4, 4, 12)(text, Seeded(0))
    assert small.meter.calls == 4 and small.meter.tokens == len(text) + 3*4


# Slots

@faithful("DDTree")
@proves("thm-best-first")
@settings(max_examples=60, deadline=None)
@given(st.lists(laws(3), min_size=1, max_size=3), st.integers(1, 4))
def test_slots_are_exhaustive(rows, n):
    "Of all prefixes, the n with the largest products: no connected set of n has a larger sum; none has weight zero"
    class Fixed:
        V, depth = 3, len(rows)
        def __call__(self, ctx): return rows
    weight = {path: prod((rows[j][x] for j, x in enumerate(path)), start=F(1)) for d in range(1, len(rows) + 1) for path in product(range(3), repeat=d)}
    tree = ParallelHeadTree(Fixed(), n, exact=True)((0,), Enumerator())
    got = [weight[v] for v in offered(tree)]
    assert connected(offered(tree)) and min(got) > 0 and len(got) == min(n, sum(w > 0 for w in weight.values()))
    assert sorted(got) == sorted(weight.values())[-n:][-len(got):] and (len(rows) > 2 or sum(got) == best_set(weight, n))


@faithful("DDTree")
@settings(max_examples=100)
@given(st.lists(laws(4), min_size=1, max_size=4), st.integers(1, 12))
def test_next_sibling_and_first_child_are_enough(rows, n):
    "A heap that gets two entries for each node taken, as the published code's, takes nodes of the same weights"
    ranked = [top_tokens(row, 4) for row in rows]
    def at(ranks): return prod((rows[j][ranked[j][r]] for j, r in enumerate(ranks)), start=F(1))
    def fits(ranks): return len(ranks) <= len(rows) and ranks[-1] < len(ranked[len(ranks) - 1])
    heap, taken = [(0,)], []
    while heap and len(taken) < n:
        heap.remove(best := max(heap, key=at))
        taken.append(at(best))
        heap += filter(fits, [(*best[:-1], best[-1] + 1), (*best, 0)])
    assert taken == [w for _, w in independent(rows, n)]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), max_size=15), st.integers(1, 4), st.integers(0, 3))
def test_skips_count(tokens, depth, x):
    "Against counting by hand: only places with all of `depth` tokens after them count"
    skips, floats = SkipGrams(np.array(tokens, int), 4, depth, exact=True), SkipGrams(np.array(tokens, int), 4, depth)
    at = [i for i in range(len(tokens) - depth) if tokens[i] == x]
    for j, row in enumerate(skips((3, x)), 1):
        assert list(row) == [F(sum(tokens[i + j] == y for i in at), max(len(at), 1)) for y in range(4)]
        assert np.allclose(floats((x,))[j-1], row.astype(float)) and floats((x,))[j-1].dtype == float
        if at: as_law(row)


def test_nothing_seen_nothing_offered():
    assert ParallelHeadTree(SkipGrams([0, 1, 0], 3, 1), 4)((2,), Enumerator()) == Tree((2,)) and ParallelHeadTree(SkipGrams(np.array([], int), 3, 1), 4)((2,), Enumerator()) == Tree((2,))


# All of them

def drafters(q, seed):
    "One of each kind on the model `q`"
    text = np.random.default_rng(seed).integers(0, 3, 12)
    return [StaticTree(q, sequoia(PAPER[:2], 3, 2)[0]), DynamicTree(q, 2, 2, 3, exact=True), opt_tree(q, 3, 2, exact=True), ParallelHeadTree(SkipGrams(text, 3, 2, exact=True), 3, exact=True)]


@settings(max_examples=15, deadline=None)
@given(models(), seeds)
def test_loops_are_exact(pair, seed):
    "Whole loops in fractions, with a stop token, and the contract of drafters"
    for drafter in drafters(pair[1], seed):
        drafter_contract(drafter, (0, 1))
        assert loop_law(pair[0], drafter, reject, (0, 1), 3, stop={2}) == target_law(pair[0], (0, 1), 3, stop={2})
        assert drafter == drafter and hash(drafter) == hash(drafter) and max(drafter((0, 1), Seeded(seed)).depth) <= drafter.depth


@settings(max_examples=15, deadline=None)
@given(models(), seeds)
def test_at_temperature_zero(pair, seed):
    "The greedy text, and `match` agrees with `reject`"
    target = cold(pair[0])
    for drafter in drafters(pair[1], seed):
        assert loop_law(target, drafter, reject, (0, 1), 3) == loop_law(target, drafter, match, (0, 1), 3) == target_law(target, (0, 1), 3)


def test_floats_and_ledger():
    target, q = embedded(), embedded("small")
    for drafter in (StaticTree(q, sequoia((.6, .2, .1), 5, 3)[0]), DynamicTree(q, 3, 3, 6), opt_tree(q, 6, 3)):
        out = generate(target, drafter, reject, prompts("code", 1)[0], 12, Seeded(0))
        assert len(out) == 12 and "draft" in out.ledger.models and 1 <= out.ledger.mean_acceptance_length


# Chosen is not drawn

def confident(draw, keep):
    "One child by `draw`, offered if `keep(token)`"
    def draft(ctx, rng):
        tree, drawn = Tree(ctx), Tree(ctx)
        drawn.grow(0, draw, rng)
        if keep(drawn.token[1]): tree.add(0, drawn.token[1], drawn.law[1])
        return tree
    return draft


def first_token(p, drafter): return law_of(lambda rng: next(rounds(constant(*p), drafter, reject, (0,), rng)).tokens[0])


@proves("prop-own-value")
def test_a_drawn_child_may_not_be_dropped_for_what_it_is():
    "(85/100, 15/100) in the place of (7/10, 3/10); decided without looking, or for a point, nothing is lost"
    p, q = exact(7, 3), exact(1, 1)
    assert first_token(p, confident(iid(q), lambda x: x == 0)) == {0: F(85, 100), 1: F(15, 100)}
    for keep in (True, False): assert first_token(p, confident(iid(q), lambda x: keep)) == {0: F(7, 10), 1: F(3, 10)}
    for x in (0, 1): assert first_token(p, confident(points([x], 2, exact=True), lambda y: y == 0)) == {0: F(7, 10), 1: F(3, 10)}


@proves("prop-own-value")
@settings(max_examples=40, deadline=None)
@given(models(), seeds, st.integers(0, 4))
def test_points_may_be_cut_by_anything(pair, seed, n):
    "Any function of the context that ranks and cuts a tree of points: exact"
    def draft(ctx, rng):
        paths = [path for d in (1, 2) for path in product(range(3), repeat=d)]
        order = np.random.default_rng([seed, *ctx]).random(len(paths))
        some = [v for _, v in sorted(zip(order, paths))][:n]
        tree, at = Tree(ctx), {(): 0}
        for v in sorted(some, key=len):
            if v[:-1] in at: at[v] = tree.add(at[v[:-1]], v[-1], one_hot(v[-1], 3, exact=True))
        return tree
    verifier_contract(pair[0], draft, reject, (0,), 2)


def test_reranking_drawn_trees_is_wrong():
    "A drawn tree, cut to its likeliest half as EAGLE-2 would: off; the same cut of the likeliest tokens: exact"
    target, q = random_table(3, 1, zeros=False), random_table(3, 2, zeros=False)
    def cut(draw):
        def draft(ctx, rng):
            full, tree, at = Branching(q, (2, 1), draw)(ctx, rng), Tree(ctx), {0: 0}
            weight = {i: prod(q.law(full.text(full.parent[j]))[full.token[j]] for j in full.ancestors(i)) for i in range(1, len(full))}
            for i in sorted(sorted(weight, key=lambda i: -weight[i])[:2]): at[i] = tree.add(at[full.parent[i]], full.token[i], full.law[i])
            return tree
        return draft
    want = target_law(target, (0,), 2)
    likeliest = lambda row: points(top_tokens(row, 3), 3, exact=True)
    assert tv_outcomes(loop_law(target, cut(iid), reject, (0,), 2), want) > F(1, 100)
    assert loop_law(target, cut(likeliest), reject, (0,), 2) == want


# Doors

@pytest.mark.parametrize("bad", [(), None, 5, (1.5,), (-.1, .2), (.6, .6), (float("nan"),), ("x",)])
def test_bad_rates(bad):
    for f in (lambda: expected_tokens((-1, 0), bad), lambda: sequoia(bad, 3, 3), lambda: best_size(bad, Costs({1: 1}, .1), 4, 4)): refuses("acceptance", f)
    refuses("accuracy", medusa_choices, [bad], 2)


def test_doors():
    q = random_table(3, 0)
    refuses("acceptance", expected_tokens, (-1, 0, 0), (.5,))
    for bad in (0, -1, 1.5, None, True, "3"):
        refuses("n", sequoia, PAPER, bad, 2); refuses("n", medusa_choices, [PAPER], bad); refuses("n", ParallelHeadTree, SkipGrams([0], 2, 1), bad)
        refuses("width", DynamicTree, q, bad); refuses("depth", DynamicTree, q, 1, bad); refuses("n", DynamicTree, q, 1, 1, bad)
        refuses("most", best_size, PAPER, Costs({1: 1}, .1), bad, 2)
        refuses("k", measure_rank_acceptance, q, q, [(0,)], bad); refuses("each", measure_rank_acceptance, q, q, [(0,)], 1, bad)
        refuses("V", SkipGrams, [0], bad, 1); refuses("depth", SkipGrams, [0], 1, bad)
    for bad in (-1, "2", None): refuses("depth", sequoia, PAPER, 3, bad); refuses("depth", best_size, PAPER, Costs({1: 1}, .1), 3, bad)
    refuses("texts", measure_rank_acceptance, q, q, [], 2)
    for bad in (float("nan"), -2, float("inf"), "x"): refuses("threshold", opt_tree, q, threshold=bad)
    for bad in ([3], [-1], [.5], [[0]]): refuses("tokens", SkipGrams, bad, 3, 1)
    for bad in ((), (0,), (-1, 1), (-1, 0, 3)): refuses("parent", StaticTree, q, bad); refuses("parent", expected_tokens, bad, PAPER)
    for bad in (5, None, ("x",), (-1, .5), (-1, "a"), "ab"): refuses("parent", StaticTree, q, bad); refuses("parent", expected_tokens, bad, PAPER)
    for bad in (5, None, "x", "three"):
        refuses("model", StaticTree, bad, (-1, 0)); refuses("draw", StaticTree, q, (-1, 0), bad); refuses("model", DynamicTree, bad); refuses("model", opt_tree, bad)
        refuses("marginals", ParallelHeadTree, bad); refuses("marginals", skip_accuracy, bad, [(0, 1)], 1); refuses("costs", best_size, PAPER, bad, 3, 3)
        refuses("target", measure_rank_acceptance, bad, q, [(0,)], 1); refuses("draft", measure_rank_acceptance, q, bad, [(0,)], 1); refuses("acceptance", sequoia, bad, 3, 3)
        for f in (lambda texts: measure_rank_acceptance(q, q, texts, 1), lambda texts: skip_accuracy(SkipGrams([0, 1], 3, 1), texts, 1)): refuses("texts", f, bad); refuses("texts", f, [bad]); refuses("texts", f, [(0, 3)])
    for bad in ([], (), 5, None, "x", "abc"): refuses("accuracy", medusa_choices, bad, 3)
    for bad in (0, 1.5, None, "x"): refuses("k", skip_accuracy, SkipGrams([0, 1], 3, 1), [(0, 1)], bad); refuses("n", opt_tree, q, bad)
    refuses("texts", skip_accuracy, SkipGrams([0, 1], 3, 2), [(0, 1)], 1)
    refuses("drafter", generate, random_table(4, 0), ParallelHeadTree(SkipGrams([0, 1], 3, 1)), reject, (0,), 2, Seeded(0))


# Exercises

def test_exercise_what_need_not_be_asked():
    "Of the last layer only the nodes among the n heaviest of all: the same tree, with fewer asked"
    q, n = random_table(3, 5), 6
    pool, level, asked = {}, {(): F(1)}, 0
    for _ in range(4):
        asked += len(level)
        layer = {(*v, x): w*q.law((0, *v))[x] for v, w in level.items() for x in top_tokens(q.law((0, *v)), n)}
        pool |= layer
        level = {v: layer[v] for v in heaviest_nodes(pool, n) if v in layer}
    assert heaviest_nodes(pool, n) == heaviest_nodes(pool_of(q, (0,), n, 4), n) and asked == 8


@given(st.integers(2, 9).flatmap(lambda b: st.tuples(st.integers(1, b), st.just(b))), st.integers(1, 9))
def test_exercise_the_second_child(ab, n):
    "A second child at the root once the next node of the chain, a^n, is worth less than it"
    a = F(ab[0], ab[1] + ab[0]), F(ab[0], ab[1] + ab[0])**2 * F(9, 10)
    second = (1,) in to_choices(sequoia(a, n, n)[0])
    assert second == (a[0]**n < a[1])
