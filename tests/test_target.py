"Chapter 03: one call answers every node; table models and n-gram models against counting by hand"
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import target_contract
from helpers import models, refuses, seeds, shapes
from specref.core.law import exact
from specref.core.loop import clip
from specref.core.target import Meter, NgramModel, Rows, TableModel, random_table, target_law
from specref.core.check import as_tokens
from specref.core.tree import Tree

many = settings(max_examples=100)


def probes(parent, tokens, ctx):
    tree = Tree(ctx)
    for u, x in zip(parent[1:], tokens): tree.add(u, x)
    return tree


trees = st.tuples(shapes(6), st.lists(st.integers(0, 2), min_size=6, max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=3)).map(lambda t: probes(*t))


# Rows

def test_rows_are_made_when_read_and_once():
    asked = []
    p = Rows(lambda i: asked.append(i) or exact(1, i + 1), 5, 2)
    assert len(p) == 5 and asked == []
    assert p[3] is p[3] and tuple(p[1]) == (Fraction(1, 3), Fraction(2, 3)) and asked == [3, 1]


def test_rows_refuse_what_is_no_law():
    "A bad row is refused when read, by the number of its node; a node that is not there ends a for loop"
    for bad in ([.5, .6], [np.nan, 1.], [1.], [2., -1.]): refuses(r"p\[1\]", Rows(lambda i: bad, 3, 2).__getitem__, 1)
    for i in (-1, 3): pytest.raises(IndexError, Rows(lambda i: [1., 0], 3, 2).__getitem__, i)
    assert len(list(Rows(lambda i: [1., 0], 3, 2))) == 3


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_raw_weights_are_the_row_unless_others_are_told(w):
    "The default is the row itself, made once; other weights need be no law, and reading them makes no row"
    asked = []
    row = lambda i: asked.append(i) or exact(1, i + 1)
    p, q = Rows(row, 3, 2), Rows(row, 3, 2, w.__getitem__)
    assert p.raw(2) is p[2] is p.raw(2) and asked == [2]
    assert [q.raw(i) for i in range(3)] == w and asked == [2] and tuple(q[1]) == (Fraction(1, 3), Fraction(2, 3))
    for rows in (p, q):
        for i in (-1, 3): pytest.raises(IndexError, rows.raw, i)


def test_raw_weights_of_tables_cost_what_their_rows_do():
    "Counting models warp nothing: the row, read once for both questions"
    tree = probes([-1, 0], [1], (0,))
    for model in (random_table(3, 0), NgramModel([0, 1, 2], 3, 2, exact=True)):
        p = model(tree)
        assert all(p.raw(i) is p[i] for i in range(2)) and (model.meter.calls, model.meter.tokens) == (1, 2)


# Table models

@many
@given(models(), trees)
def test_a_table_keeps_the_target_contract(pair, tree): target_contract(pair[0], tree)


@many
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4), trees)
def test_an_ngram_model_keeps_the_target_contract(ids, order, tree): target_contract(NgramModel(ids, 3, order, exact=True), tree)


@given(seeds, st.integers(1, 6), st.booleans())
def test_random_tables_are_laws_that_depend_on_the_whole_text(seed, V, zeros):
    "Rows are laws of fractions, with no zeros unless asked; the same seed, the same rows; far tokens matter"
    a, b = random_table(V, seed, zeros), random_table(V, seed, zeros)
    texts = [t for n in (1, 2, 3) for t in product(range(min(V, 3)), repeat=n)]
    assert all((a.law(t) == b.law(t)).all() and sum(a.law(t)) == 1 and (zeros or min(a.law(t)) > 0) for t in texts)
    if V >= 3: assert len({tuple(a.law((x, 0, 0))) for x in range(V)} | {tuple(a.law(t)) for t in texts}) > 3


def test_a_table_asks_once_and_counts():
    "The law of a text is computed once; the meter counts calls and rows read"
    asked = []
    model = TableModel(2, lambda text: asked.append(text) or exact(1, 1))
    tree = probes([-1, 0, 0], [1, 1], (0,))
    for _ in range(2): p = model(tree); p[1], p[2], p[1]
    assert asked == [(0, 1)] and (model.meter.calls, model.meter.tokens) == (2, 4)
    before = model.meter.copy(); model(tree)[0]
    assert model.meter - before == Meter(calls=1, tokens=1)


def test_table_doors():
    for V in (0, -1): refuses("V", TableModel, V, None)
    for bad in ([.5, .6], [1.], [np.nan, 1]): refuses(r"f\(text\)", TableModel(2, lambda text: bad).law, (0,))


# The law of a text

@settings(max_examples=40)
@given(models(), st.integers(0, 3), st.sets(st.integers(0, 2), max_size=2))
def test_the_promise(pair, n, stop):
    "The product of the rows, text by text, cut at the first stop token: against every text of n tokens"
    target, want = pair[0], {}
    for y in product(range(3), repeat=n):
        w = Fraction(1)
        for t, x in enumerate(y): w *= target.law((0, *y[:t]))[x]
        if w: want[clip(y, n, stop)] = want.get(clip(y, n, stop), 0) + w
    assert target_law(target, (0,), n, stop) == want and sum(want.values()) == 1


# n-grams

def witten_bell(ids, V, order, text):
    "The definition, counted by hand: c(hx) + t(h) p(x|h') over c(h) + t(h), from the uniform law up"
    p = [Fraction(1, V)] * V
    for k in range(min(order - 1, len(text)) + 1):
        h = tuple(text[len(text)-k:])
        after = [ids[i+k] for i in range(len(ids) - k) if tuple(ids[i:i+k]) == h]
        if not after: return p
        c, t = [after.count(x) for x in range(V)], len(set(after))
        p = [(c[x] + t*p[x]) / Fraction(len(after) + t) for x in range(V)]
    return p


@settings(max_examples=150)
@given(st.integers(1, 4).flatmap(lambda V: st.tuples(st.just(V), *(st.lists(st.integers(0, V - 1), max_size=m) for m in (30, 5)))), st.integers(1, 5))
def test_witten_bell(case, order):
    "Fractions equal the definition; floats follow to 1e-12; every row sums to one and forbids nothing"
    V, ids, text = case
    want = witten_bell(ids, V, order, text)
    got = NgramModel(ids, V, order, exact=True).law(tuple(text))
    assert list(got) == want and sum(want) == 1 and min(want) > 0
    assert NgramModel(ids, V, order).law(tuple(text)) == pytest.approx([float(w) for w in want], abs=1e-12)


def test_the_example_of_the_chapter():
    "0 1 0 1 1: p(1) = 4/7 and p(1|0) = 6/7"
    model = NgramModel([0, 1, 0, 1, 1], 2, 2, exact=True)
    assert (model.law(())[1], model.law((0,))[1]) == (Fraction(4, 7), Fraction(6, 7))


def test_large_vocabularies_do_not_overflow():
    "The largest order that is allowed still counts right"
    V = 1000
    model, ids = NgramModel([V - 1]*20, V, 6), (V - 1,)*6
    assert model.law(ids)[V - 1] > .9 and model.law(ids).sum() == pytest.approx(1)
    refuses("order", NgramModel, [0], V, 7)


def test_ngram_doors():
    for ids in ([3], [-1, 0]): refuses("ids", NgramModel, ids, 3, 2)
    for order in (0, -1): refuses("order", NgramModel, [0], 3, order)


@pytest.mark.parametrize("name, args", [("V", ([], 0, 1)), ("order", ([0], 3, 1.5)), ("ids", ([.5], 3, 1)), ("ids", ([[0, 1]], 3, 1))])
def test_more_ngram_doors(name, args): refuses(name, NgramModel, *args)


@pytest.mark.parametrize("name, args", [("ctx", ((5,), 1)), ("ctx", ((), 1)), ("n", ((0,), -1))])
def test_target_law_doors(name, args): refuses(name, target_law, random_table(3, 0), *args)


@given(st.recursive(st.one_of(st.none(), st.integers(-1, 4), st.booleans(), st.floats(), st.text(max_size=2)), lambda inner: st.lists(inner, max_size=3)), st.integers(1, 3))
def test_tokens_below(given, deep):
    "Nested tuples of equal whole numbers below V, a hash for all of them; everything else is refused by its name"
    def whole(x, deep): return isinstance(x, (list, str)) and all(whole(y, deep - 1) for y in x) if deep else isinstance(x, int) and 0 <= x < 3
    def tuples(x): return tuple(map(tuples, x)) if isinstance(x, (list, str)) else int(x)
    if not whole(given, deep): return refuses("given", as_tokens, 3, deep, given=given)
    kept = as_tokens(3, deep, given=given)
    assert kept == tuples(given) == as_tokens(3, deep, given=kept) and isinstance(hash(kept), int)


def test_tokens_of_arrays():
    "Arrays of any whole kind, as Python's own numbers; two axes, shares and a row that is too long for V are refused by name"
    for kind in (np.uint8, np.int64): assert (got := as_tokens(3, text=np.array([2, 0], kind))) == (2, 0) and type(got[0]) is int
    for bad in (np.zeros((1, 2), int), np.zeros(2), np.array([3]), np.array([-1]), np.array(1)): refuses("text", as_tokens, 3, text=bad)
