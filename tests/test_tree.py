"Chapter 02: draws, trees whose edges state their distributions, masks, other encodings, pictures"
from collections import Counter
from math import prod
from xml.etree import ElementTree

import numpy as np, pytest
from hypothesis import strategies as st

from helpers import CANON, DRAWS, Plan, draws, examples, laws, models, pairs, plans, proves, shapes
from specref import (add_paths, draw_tree, exact, iid, in_sequence, law_of, normalize, one_hot, points,
                     Seeded, Tree, Verdict, without_replacement)
from specref.core.picture import node_status
from specref.core.tree import (ancestor_mask, chain_nodes, edge_laws, from_choices, from_links,
                               likeliest_points, positions, to_choices, to_links)

def grown(parent, token=lambda i: i, ctx=(0,), probe=()):
    "The tree of a parent list, node i with a token of its own, offered as a point mass unless it is a probe"
    tree, V = Tree(ctx), len(parent) + 1
    for i, u in enumerate(parent[1:], 1):
        tree.add(u, token(i), None if i in probe else one_hot(token(i), V, exact=True))
    return tree

@examples(30, pairs(), st.data())
def test_without_replacement_is_conditional_on_the_others(pq, data):
    "q without the earlier tokens, renormalized; without support, uniform over the untried; then None"
    q, taken, draw = pq[1], [], without_replacement(pq[1])
    for _ in q:
        law, free = draw(tuple(taken)), np.array([x not in taken for x in range(len(q))])
        rest = q * free
        assert tuple(law) == tuple(normalize(rest if rest.any() else free * exact(1)[0]))
        taken.append(data.draw(st.sampled_from([x for x, w in enumerate(law) if w])))
    assert sorted(taken) == list(range(len(q))) and draw(tuple(taken)) is None

@examples(30, laws(4), st.lists(st.integers(0, 3), max_size=6, unique=True))
def test_the_other_draws(q, tokens):
    "iid ignores earlier siblings; points gives each token once, in order; in_sequence has a draw for each"
    other, draw = without_replacement(q), points(tokens * 2, 4, exact=True)
    both = in_sequence(iid(q), points([2], 4), other)
    assert all(tuple(iid(q)(tuple(tokens[:i]))) == tuple(q) for i in range(4))
    assert [int(np.argmax(draw(tuple(tokens[:i])))) for i in range(len(tokens))] == tokens
    assert draw(tuple(tokens)) is None is both((0, 2, 1))
    assert [tuple(both(e)) for e in ((), (0,), (0, 2))] == [tuple(q), (0, 0, 1, 0), tuple(other((0, 2)))]

@proves("lem-cold")
@examples(30, st.lists(st.integers(1, 9), min_size=3, max_size=5, unique=True), st.integers(1, 3),
          st.integers(1, 9))
def test_siblings_at_temperature_zero_are_the_likeliest(weights, k, power):
    "Siblings at T = 1/power, enumerated, against the points; and the bound of the lemma, which tightens"
    q, order = exact(*weights), tuple(sorted(range(len(weights)), key=lambda x: -weights[x]))
    def siblings(draw):
        def tokens(rng):
            (tree := Tree((0,))).grow(0, draw, rng, k)
            return tuple(tree.token[1:])
        return law_of(tokens)
    ratio = max(b / a for i, a in enumerate(q[list(order)]) for b in q[list(order)][i + 1:])
    assert siblings(likeliest_points(q)) == {order[:k]: 1}
    hot = siblings(without_replacement(normalize(q**power)))
    assert hot[order[:k]] >= 1 - k * len(q) * ratio**power

def test_likeliest_points_takes_equal_tokens_in_order_and_no_token_of_weight_zero():
    draw = likeliest_points(exact(1, 2, 0, 2))
    tree = Tree((0,))
    assert tree.grow(0, draw, Seeded(0), 4) == [1, 2, 3] and tree.token[1:] == [1, 3, 0]
    assert draw((0, 1, 3)) is None and draw(()).dtype == object
    assert likeliest_points(np.array([.5, .5]))(()).dtype == float

@pytest.mark.parametrize("how", [iid, without_replacement])
def test_draws_of_float_rows_are_floats(how):
    "Also the uniform row over untried tokens"
    draw = how(np.array([1., 0, 0]))
    assert draw(()).dtype == draw((0,)).dtype == float and draw((0,)).sum() == 1

@proves("thm-edges")
@examples(25, models(), plans())
def test_edges_give_the_probability_of_the_tree(pair, steps):
    "A tree's probability is the product of its edges; every edge states its conditional distribution"
    trees = law_of(lambda rng: Plan(pair[1], steps)((0,), rng))
    for tree, w in trees.items():
        assert w == prod(law[x] for law, x in zip(tree.law, tree.token) if law is not None)
    assert all(stated == true and sum(true) == 1 for _, stated, true in edge_laws(trees))

def likelier(tree, q, a, b): tree.add(0, max(a, b, key=lambda x: q[x]), q)
def sort(tree, q, a, b):
    for x in sorted((a, b), key=lambda x: -q[x]): tree.add(0, x, q)
def drop(tree, q, a, b):
    if q[a]*2 >= max(q): tree.add(tree.add(0, a, q), b, q)

@proves("thm-edges")
@pytest.mark.parametrize("break_it", [likelier, sort, drop])
def test_drafters_with_wrong_edges_are_detected(break_it):
    "Three violations of the contract: the likelier of two draws, two draws sorted, an unlikely one dropped"
    q = CANON[1]
    def draft(rng):
        tree = Tree((0,))
        break_it(tree, q, rng.pick(q), rng.pick(q))
        return tree
    assert any(stated != true for _, stated, true in edge_laws(law_of(draft)))

@examples(30, shapes())
def test_paths_and_texts(parent):
    "A path follows the parents up to the root; depth is its length; probes are no children"
    tree = grown(parent, ctx=(7, 8), probe={1})
    for i, u in enumerate(parent[1:], 1):
        assert tree.path(i) == (*tree.path(u), i) and tree.text(i) == (7, 8, *tree.path(i))
        assert tree.ancestors(i) == tree.path(i) and tree.depth[i] == len(tree.path(i))
        assert (i in tree.children(u)) == (i != 1)

def test_trees_are_values_and_may_be_deep():
    "Equal if nodes and distributions are equal, with equal hashes; no recursion"
    trees = [Tree((0,)) for _ in range(4)]
    for tree, law in zip(trees, (exact(1, 1), exact(1, 1), exact(1, 2), None)): tree.add(0, 1, law)
    assert trees[0] == trees[1] != (0,) and len(set(trees)) == 3
    deep = grown([-1, *range(1200)], token=lambda i: 0)
    assert len(deep.path(1200)) == 1200 == len(chain_nodes(deep)) - 1

def test_the_stored_draw_of_a_nodes_children():
    "Another child removes it; probes and deeper nodes do not"
    q, rng, tree = exact(1, 1), Seeded(0), Tree((0,))
    draw = iid(q)
    a, = tree.grow(0, draw, rng)
    tree.add(0, 5)
    tree.grow(a, iid(q), rng)
    tree.grow(0, draw, rng, 0)
    assert tree.draw[0] is draw and a in tree.draw
    tree.grow(0, draw, rng)
    assert 0 not in tree.draw and a in tree.draw
    tree.add(a, 1, q)
    assert a not in tree.draw

@examples(30, models(), draws, st.integers(1, 4), st.integers(0, 99))
def test_grow_draws_children_in_turn(pair, how, k, seed):
    "Children come from the draw, given their earlier siblings, until it ends"
    q = pair[1].law((0,))
    tree, draw = Tree((0,)), DRAWS[how](q)
    new = tree.grow(0, draw, Seeded(seed), k)
    assert tree.draw[0] is draw and len(new) <= k and new == tree.children(0)
    assert all((tree.law[c] == draw(tuple(tree.token[1:c]))).all() for c in new)
    assert len(new) == k or draw(tuple(tree.token[1:])) is None

@proves("thm-prefixes")
@examples(30, shapes(), st.integers(1, 4))
def test_a_tree_is_its_set_of_prefixes(parent, n):
    "Without equal siblings: nodes and paths are one to one, the mask is `is a prefix of`"
    tree, V = grown(parent, ctx=range(n)), len(parent) + 1
    paths = [tree.path(i) for i in range(len(tree))]
    assert len(set(paths)) == len(tree) and {p[:-1] for p in paths if p} <= set(paths)
    assert [[p[:len(o)] == o for o in paths] for p in paths] == ancestor_mask(tree).tolist()
    assert positions(tree).tolist() == [len(tree.text(i)) - 1 for i in range(len(tree))]
    again = add_paths(Tree(range(n)), reversed(paths), V, Seeded(0), exact=True)   # in any order of growth
    assert {again.path(i) for i in range(len(again))} == set(paths) and len(again) == len(tree)

@proves("thm-prefixes")
def test_equal_siblings_share_a_path():
    tree = grown([-1, 0, 0], token=lambda i: 1)
    assert tree.path(1) == tree.path(2) and not ancestor_mask(tree)[1, 2] and tree.children(0) == [1, 2]

@examples(30, shapes(12), st.randoms(use_true_random=False))
def test_encodings_round_trip(parent, random):
    "Links give each node's children in order; choices name each node once and give the tree in any order"
    child, sibling = to_links(parent)
    def linked(c): return [] if c < 0 else [c, *linked(sibling[c])]
    assert from_links(child, sibling) == parent and [linked(c) for c in child] == grown(parent).kids
    choices = to_choices(parent)
    assert len(set(choices)) == len(parent) - 1 and [len(c) for c in choices] == grown(parent).depth[1:]
    assert all({c[:-1], (*c[:-1], max(c[-1] - 1, 0))} <= {(), *choices} for c in choices)
    back = from_choices(random.sample(choices, len(choices)))
    assert sorted(to_choices(back)) == sorted(choices) and back == sorted(back)

def verified(parent):
    "A tree, some of whose leaves are probes, and an end that was offered"
    leaves = [i for i in range(1, len(parent)) if i not in parent]
    probes = st.sets(st.sampled_from(leaves)) if leaves else st.just(set())
    def ends(probe): return st.sampled_from([i for i in range(len(parent)) if i not in probe])
    return probes.flatmap(lambda probe: st.tuples(st.just(parent), st.just(probe), ends(probe)))

@examples(30, shapes().flatmap(verified))
def test_status_and_picture(case):
    "Accepted: the path; rejected: earlier siblings of it, and all children of its end. In letters and words"
    parent, probe, end = case
    tree, show = grown(parent, probe=probe), lambda x: f"<{x}&\""
    path = [0, *tree.ancestors(end)]
    def status(i):
        if i in path: return "A"
        below = [c for c in path if c and parent[c] == parent[i]]
        return "R" if parent[i] in path and i not in probe and (not below or i < below[0]) else "-"
    letters = node_status(tree, end)
    assert letters == [status(i) for i in range(len(parent))] and set(node_status(tree)) == {"-"}
    svg, count = ElementTree.fromstring(draw_tree(tree, Verdict(end, 0), show)), Counter(letters[1:])
    shown, title = Counter(svg.itertext()), svg.get("aria-label")
    assert [shown[k] for k in ("A", "R", "Y" if tree.children(end) else "B")] == [count["A"], count["R"], 1]
    assert [title.count(w) for w in ("accepted", "rejected", "not reached")] == [count[k] for k in "AR-"]
    assert len(svg.findall("{*}g")) == len(tree) + 1
    assert title.endswith("then " + show(0)) and svg.find("{*}title").text == title

def test_a_tree_draws_itself():
    "Its text has no address and no long context; sixty leaves fit on a screen; control characters are shown"
    tree = Tree(range(99))
    for x in range(60): tree.add(0, x)
    drawn = ElementTree.fromstring(tree._repr_svg_())
    assert len(drawn.findall("{*}g")) == 61 and float(drawn.get("height")) < 1000
    tokens = draw_tree(tree, show=lambda x: f"{x}\0\t\x1b\ud800\uffff")
    assert "59␀\t␛\ufffd\ufffd" in ElementTree.fromstring(tokens).find("{*}title").text
    assert repr(tree).startswith("Tree(ctx=<99 tokens>, parent=[-1, 0, 0,") and "at 0x" not in repr(tree)
