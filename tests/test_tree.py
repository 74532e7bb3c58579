"Chapter 02: draws, trees whose edges know their law, masks, other people's encodings, pictures"
from collections import Counter
from math import prod
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import CANON, DRAWS, Plan, draws, laws, models, pairs, plans, proves, refuses, shapes
from specref.core.rng import Seeded, law_of
from specref.core.law import exact, normalize, one_hot
from specref.core.loop import Verdict
from specref.core.tree import Tree, ancestor_mask, edge_laws, node_status, from_choices, from_links, iid, in_sequence, points, positions, to_choices, to_links, without_replacement
from specref.core.picture import draw_tree

many = settings(max_examples=200)


def grown(parent, token=lambda i: i, ctx=(0,), probe=()):
    "The tree of a parent list, node i with a token of its own, offered as a point mass unless it is a probe"
    tree = Tree(ctx)
    for i, u in enumerate(parent[1:], 1): tree.add(u, token(i), None if i in probe else one_hot(token(i), len(parent) + 1, exact=True))
    return tree


def path(tree, i): return () if i == 0 else (*path(tree, tree.parent[i]), tree.token[i])


# Draws

@many
@given(pairs(), st.data())
def test_without_replacement_is_the_law_given_the_others(pq, data):
    "Each next law is q without what is taken; when q is used up, uniform over the untried; then None"
    q, taken, draw = pq[1], [], without_replacement(pq[1])
    while (law := draw(tuple(taken))) is not None:
        free = [x not in taken for x in range(len(q))]
        left = [w*f for w, f in zip(q, free)]
        assert tuple(law) == tuple(normalize(np.array(left if any(left) else [exact(1)[0]*f for f in free], dtype=object)))
        taken.append(data.draw(st.sampled_from([x for x, w in enumerate(law) if w])))
    assert sorted(taken) == list(range(len(q)))
    assert [w is None for w in (draw(tuple(taken[:-1])), draw(tuple(taken)))] == [False, True]


@given(laws(4), st.lists(st.integers(0, 3), max_size=6))
def test_the_other_draws(q, tokens):
    "iid forgets; points gives each token once, in order; in_turn asks one draw for each sibling"
    assert all(tuple(iid(q)(tuple(tokens[:i]))) == tuple(q) for i in range(4))
    given, draw = list(dict.fromkeys(tokens)), points(tokens, 4, exact=True)
    assert [int(np.argmax(draw(tuple(given[:i])))) for i in range(len(given))] == given and draw(tuple(given)) is None
    both = in_sequence(iid(q), points([2], 4), without_replacement(q))
    assert [None if (w := both(e)) is None else tuple(w) for e in ((), (0,), (0, 2), (0, 2, 1))] == [
        tuple(q), (0, 0, 1, 0), tuple(without_replacement(q)((0, 2))), None]


@pytest.mark.parametrize("how", [iid, without_replacement])
def test_floats_draw_floats(how):
    "Floats stay floats, down to the fallback over the untried"
    draw = how(np.array([1., 0, 0]))
    assert draw(()).dtype == float and draw((0,)).dtype == float and draw((0,)).sum() == 1


def test_draw_doors():
    for how in (iid, without_replacement): refuses("q", how, [.5, .6])
    refuses("x", points([3], 3), ())


# The tree

@proves("thm-edges")
@settings(max_examples=60)
@given(models(), plans())
def test_edges_tell_the_tree(pair, steps):
    "A drawn tree has the product of its edges for its probability, and every edge states its conditional law"
    trees = law_of(lambda rng: Plan(pair[1], steps)((0,), rng))
    assert all(w == prod(t.law[i][t.token[i]] for i in range(1, len(t)) if t.law[i] is not None) for t, w in trees.items())
    assert all(stated == true and sum(true) == 1 for _, stated, true in edge_laws(trees))


def dishonest(q, how):
    "Three ways to break the contract: keep the likelier of two, sort two draws, drop an unlikely one"
    def likelier(t, a, b): t.add(0, max(a, b, key=lambda x: q[x]), q)
    def sort(t, a, b):
        for x in sorted((a, b), key=lambda x: -q[x]): t.add(0, x, q)
    def drop(t, a, b):
        if q[a]*2 >= max(q): t.add(t.add(0, a, q), b, q)
    def draft(rng):
        tree = Tree((0,))
        dict(likelier=likelier, sort=sort, drop=drop)[how](tree, rng.pick(q), rng.pick(q))
        return tree
    return draft


@proves("thm-edges")
@settings(max_examples=60)
@given(laws(3), st.sampled_from(["likelier", "sort", "drop"]))
def test_true_edges_tell_any_tree(q, how):
    "Given that it has an edge, even a dishonest tree has the product of the *true* conditional laws; the stated ones miss when they differ"
    trees = {t: w for t, w in law_of(dishonest(q, how)).items() if len(t) > 1}
    edges = {key: (stated, true) for key, stated, true in edge_laws(trees)}
    at = lambda t, i: edges[t.ctx, tuple(t.parent[:i+1]), tuple(t.token[:i]), tuple(t.law[i])]
    chance = lambda t, k: prod(at(t, i)[k][t.token[i]] for i in range(1, len(t)))
    assert all(w / sum(trees.values()) == chance(t, 1) for t, w in trees.items())
    honest = all(stated == true for stated, true in edges.values())
    assert honest == all(w / sum(trees.values()) == chance(t, 0) for t, w in trees.items())


def test_a_liar_is_found():
    "On CANON each way of breaking the contract shows on an edge"
    for how in ("likelier", "sort", "drop"): assert any(stated != true for _, stated, true in edge_laws(law_of(dishonest(CANON[1], how))))


@many
@given(shapes())
def test_a_tree_remembers_its_shape(parent):
    tree = grown(parent)
    assert tree.parent == parent and len(tree) == len(parent)
    assert [sorted(c for c in range(1, len(parent)) if parent[c] == i) for i in range(len(parent))] == [list(tree.children(i)) for i in range(len(parent))]
    assert [tree.path(i) for i in range(len(parent))] == [path(tree, i) for i in range(len(parent))] == [tree.text(i)[1:] for i in range(len(parent))]
    assert tree.depth == [len(path(tree, i)) for i in range(len(parent))] == [len(tree.ancestors(i)) for i in range(len(parent))]
    assert tree == grown(parent) and hash(tree) == hash(grown(parent)) and tree != grown(parent, ctx=(1,)) and (len(tree) == 1 or tree != grown(parent, probe=(1,)))


def test_probes_are_not_offered():
    "A probe has a row and no law, and is nobody's child"
    tree = Tree((0,))
    a, b = tree.add(0, 99), tree.add(0, 1, exact(1, 1))
    assert tree.children(0) == [b] and tree.law[a] is None and tree.text(tree.add(a, 7)) == (0, 99, 7)


def test_a_draw_is_remembered_while_it_explains_all_children():
    "A second growth, or a child added by hand, may have been decided by what the first showed: the node forgets its draw; probes and deeper nodes change nothing"
    q, rng = exact(1, 1), Seeded(0)
    tree = Tree((0,))
    a, = tree.grow(0, draw := iid(q), rng)
    tree.add(0, 5); tree.grow(a, iid(q), rng)
    assert tree.draw[0] is draw and a in tree.draw
    tree.grow(0, draw, rng, 0)
    assert tree.draw[0] is draw
    tree.grow(0, draw, rng)
    assert 0 not in tree.draw and a in tree.draw
    tree.add(a, 1, q)
    assert a not in tree.draw


@given(models(), draws, st.integers(1, 4), st.integers(0, 99))
def test_grow_draws_one_by_one(pair, how, k, seed):
    "Children come from the draw, told of their elder siblings, until it ends"
    q = pair[1].law((0,))
    tree, draw = Tree((0,)), DRAWS[how](q)
    new = tree.grow(0, draw, Seeded(seed), k)
    assert tree.draw[0] is draw and len(new) <= k and new == tree.children(0)
    assert all((tree.law[c] == draw(tuple(tree.token[1:c]))).all() for c in new)
    assert len(new) == k or draw(tuple(tree.token[1:])) is None


def test_tree_doors():
    tree, q = Tree((0,)), exact(1, 0, 1)
    for parent in (-1, 1): refuses("parent", tree.add, parent, 0)
    for token in (-1, 1, 3): refuses("token", tree.add, 0, token, q)
    for node in (-1, 1): refuses("node", tree.grow, node, iid(q), Seeded(0))
    assert len(tree) == 1


# One pass for all nodes

@proves("thm-prefixes")
@many
@given(shapes())
def test_a_tree_is_its_set_of_prefixes(parent):
    "Without equal siblings: nodes and paths are one to one, the mask is `is a prefix of`, and the paths in any order of growth give the same set"
    tree = grown(parent)
    paths = [tree.path(i) for i in range(len(tree))]
    assert len(set(paths)) == len(tree) and {p[:-1] for p in paths if p} <= set(paths)
    assert [[p[:len(o)] == o for o in paths] for p in paths] == ancestor_mask(tree).tolist()
    again, at = Tree((0,)), {(): 0}
    for p in sorted(paths, key=lambda p: (len(p), p))[1:]: at[p] = again.add(at[p[:-1]], p[-1])
    assert {again.path(i) for i in range(len(again))} == set(paths)


@proves("thm-prefixes")
def test_equal_siblings_break_it():
    "Two equal siblings are two nodes with one path, and not each other's ancestor"
    tree = grown([-1, 0, 0], token=lambda i: 1)
    assert tree.path(1) == tree.path(2) and not ancestor_mask(tree)[1, 2] and tree.children(0) == [1, 2]


@many
@given(shapes(), st.integers(1, 4))
def test_mask_and_positions(parent, n):
    "Entry (i, j) says whether j is met on the way up from i; a node's position is that of its last token in its text"
    tree = grown(parent, ctx=range(n))
    def up(i): return {i} | (up(parent[i]) if i else set())
    assert ancestor_mask(tree).tolist() == [[j in up(i) for j in range(len(parent))] for i in range(len(parent))]
    assert positions(tree).tolist() == [len(tree.text(i)) - 1 for i in range(len(parent))]


# Other people's trees

@many
@given(shapes(12))
def test_links_and_back(parent):
    child, sibling = to_links(parent)
    assert from_links(child, sibling) == parent
    def walk(c): return [] if c < 0 else [c, *walk(sibling[c])]
    assert [walk(child[i]) for i in range(len(parent))] == [[c for c in range(1, len(parent)) if parent[c] == i] for i in range(len(parent))]


@many
@given(shapes(12), st.randoms(use_true_random=False))
def test_choices_and_back(parent, random):
    "Medusa's paths of ranks name the nodes once each, with their parents, and give the same tree from any order"
    choices = to_choices(parent)
    assert len(set(choices)) == len(parent) - 1 and [len(c) for c in choices] == grown(parent).depth[1:]
    assert all(c[:-1] in choices or len(c) == 1 for c in choices) and all((*c[:-1], c[-1] - 1) in choices or c[-1] == 0 for c in choices)
    back = from_choices(random.sample(choices, len(choices)))
    assert sorted(to_choices(back)) == sorted(choices) and back == sorted(back) and from_choices(to_choices(back)) == back


def test_a_published_shape():
    "The first choices of Medusa's mc_sim_7b_63, typed as there"
    mc = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0], [2], [0, 2], [0, 0, 1], [0, 3], [3], [0, 1, 0]]
    parent = from_choices(mc)
    assert Counter(grown(parent).depth) == {0: 1, 1: 4, 2: 5, 3: 3} and sorted(to_choices(parent)) == sorted(map(tuple, mc))


def test_encoding_doors():
    refuses("choices", from_choices, [(0,), (1, 0)])
    refuses("choices", from_choices, [(0, 0)])
    for child, sibling in (([1, 0], [-1, -1]), ([2, -1], [-1, -1]), ([1, -1], [-1, 1]), ([1, 1], [-1, -1])): refuses("child", from_links, child, sibling)


BROKEN = {
    "a repeated choice": (from_choices, [(0,), (0,), (0, 0)]),
    "the root as a choice": (from_choices, [(), (0,)]),
    "a link that skips a node": (from_links, [-1, -1], [-1, -1]),
    "links of two lengths": (from_links, [1, -1, -1], [-1, 2]),
    "no links": (from_links, [], []),
    "a parent that does not exist (links)": (to_links, [-1, 5]),
    "a parent that comes later (links)": (to_links, [-1, 2, 0]),
    "a parent that does not exist (choices)": (to_choices, [-1, 5]),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_encodings(broken):
    f, *args = BROKEN[broken]
    refuses("(choices|child|sibling|parent)", f, *args)


def test_a_tree_equals_no_stranger(): assert Tree((0,)) != None  # noqa: E711


def test_a_deep_chain():
    tree = grown([-1, *range(1200)], token=lambda i: 0)
    assert len(tree.path(1200)) == 1200


# Fates and pictures

def judged():
    "A tree, with some probes among its leaves, and an end that was offered"
    def some(parent):
        leaf = [i for i in range(1, len(parent)) if i not in parent]
        return st.sets(st.sampled_from(leaf)) if leaf else st.just(set())
    return shapes().flatmap(lambda ps: st.tuples(st.just(ps), some(ps))).flatmap(
        lambda case: st.tuples(*map(st.just, case), st.sampled_from([i for i in range(len(case[0])) if i not in case[1]])))


@many
@given(judged())
def test_fates(case):
    "Accepted: the path. Rejected: what was offered before a step of it, and all that was offered at its end. The rest was not looked at"
    parent, probe, end = case
    tree = grown(parent, probe=probe)
    on = [end, *(j for j in range(len(parent)) if ancestor_mask(tree)[end, j])]
    def fate(i):
        if i in on: return "A"
        elder = [c for c in on if c and parent[c] == parent[i]]
        return "R" if parent[i] in on and i not in probe and (not elder or i < elder[0]) else "-"
    assert node_status(tree, end) == [fate(i) for i in range(len(parent))] and set(node_status(tree)) == {"-"}


@settings(max_examples=60)
@given(judged())
def test_a_picture_says_it_thrice(case):
    "Well-formed SVG: a shape and a letter for each fate beside its colour, a text for those who do not see it, and every token escaped"
    parent, probe, end = case
    tree, show = grown(parent, probe=probe), lambda x: f"<{x}&\""
    svg = ElementTree.fromstring(draw_tree(tree, Verdict(end, 0), show))
    name = lambda e: e.tag.split("}")[1]
    nodes, told = [g for g in svg if name(g) == "g"], svg.get("aria-label")
    fate = Counter(node_status(tree, end)[1:])
    letters = Counter(t.text for g in nodes for t in g if name(t) == "text" and t.text in ("A", "R", "Y"))
    assert letters == Counter({k: n for k, n in dict(A=fate["A"], R=fate["R"], Y=1).items() if n}) and len(nodes) == len(tree) + 1
    assert svg.get("role") == "img" and svg.find("{*}title").text == told
    assert [told.count(w) for w in ("accepted", "rejected", "not looked at")] == [fate[k] for k in "AR-"] and told.endswith("then " + show(0))
    assert "not looked at" in draw_tree(tree) or len(tree) == 1


def test_the_picture_shows_itself(): assert draw_tree(grown([-1, 0]))._repr_svg_().startswith("<svg")
