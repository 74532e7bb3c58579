"Chapter 03: one call gives the row of every node; tables and n-gram models against counts by hand"
from fractions import Fraction
from itertools import product

import numpy as np, pytest
from hypothesis import given, strategies as st

from contracts import target_contract
from helpers import examples, models, refuses, seeds, shapes
from specref import exact, NgramModel, random_table, Rows, TableModel, target_law, Tree
from specref.core.check import as_tokens
from specref.core.loop import clip
from specref.core.target import Meter

def probes(parent, tokens, ctx):
    tree = Tree(ctx)
    for u, x in zip(parent[1:], tokens): tree.add(u, x)
    return tree

tokens = st.integers(0, 2)
trees = st.builds(probes, shapes(6), *(st.lists(tokens, min_size=n, max_size=n) for n in (6, 2)))

@pytest.mark.parametrize("weights", [None, [0, 7, 0]])
def test_rows_are_made_when_read_and_once(weights):
    "Raw weights need not sum to one, and reading them makes no row; a missing node ends a for loop"
    computed = []
    p = Rows(lambda i: computed.append(i) or exact(1, i + 1), 3, 2, weights and weights.__getitem__)
    assert len(p) == 3 and computed == []
    assert (p.raw(1) == 7 and computed == []) if weights else (p.raw(1) is p[1] and computed == [1])
    assert p[2] is p[2] and tuple(p[1]) == (Fraction(1, 3), Fraction(2, 3)) and sorted(computed) == [1, 2]
    for i in (-1, 3):
        for read in (p.__getitem__, p.raw): pytest.raises(IndexError, read, i)
    assert len(list(p)) == 3

@examples(30, models(), st.lists(tokens, max_size=40), st.integers(1, 4), trees)
def test_tables_and_ngram_models_satisfy_the_contract(pair, ids, order, tree):
    for model in (pair[0], NgramModel(ids, 3, order, exact=True)): target_contract(model, tree)

@examples(25, seeds, st.integers(1, 6), st.booleans())
def test_random_tables_depend_on_the_whole_text(seed, V, zeros):
    "Rows in fractions, no zeros by default; the same seed, the same rows; the first token changes the row"
    a, b = random_table(V, seed, zeros), random_table(V, seed, zeros)
    texts = [t for n in (1, 2, 3) for t in product(range(min(V, 3)), repeat=n)]
    assert all((a.law(t) == b.law(t)).all() and (zeros or min(a.law(t)) > 0) for t in texts)
    if V >= 3: assert len({tuple(a.law((x, 0, 0))) for x in range(V)} | {tuple(a.law(t)) for t in texts}) > 3

def test_a_table_computes_each_row_once():
    "The row of a text is computed once; the meter counts calls and rows read, raw or not"
    computed = []
    model = TableModel(2, lambda text: computed.append(text) or exact(1, 1))
    for _ in range(2):
        p = model(probes([-1, 0, 0], [1, 1], (0,)))
        assert p.raw(1) is p[1] and p[2] is p[1]
    assert computed == [(0, 1)] and model.meter - Meter(tokens=1) == Meter(calls=2, tokens=3)

@examples(25, models(), st.integers(0, 3), st.sets(tokens, max_size=2))
def test_the_target_distribution(pair, n, stop):
    "The product of the rows, text by text, cut at the first stop token: against every text of n tokens"
    target, want = pair[0], {}
    for y in product(range(3), repeat=n):
        w = Fraction(1)
        for t, x in enumerate(y): w *= target.law((0, *y[:t]))[x]
        if w: want[clip(y, n, stop)] = want.get(clip(y, n, stop), 0) + w
    assert target_law(target, (0,), n, stop) == want

def witten_bell(ids, V, order, text):
    "The definition, counted by hand: c(hx) + t(h) p(x|h') over c(h) + t(h), from the uniform distribution"
    p = [Fraction(1, V)] * V
    for k in range(min(order - 1, len(text)) + 1):
        h = tuple(text[len(text)-k:])
        after = [ids[i+k] for i in range(len(ids) - k) if tuple(ids[i:i+k]) == h]
        if not after: return p
        t = len(set(after))
        p = [(after.count(x) + t*p[x]) / Fraction(len(after) + t) for x in range(V)]
    return p

@examples(30, st.integers(1, 4), st.integers(1, 5), st.data())
def test_witten_bell(V, order, data):
    "Fractions equal the definition; floats follow to 1e-12; every row sums to one and has no zero"
    ids, text = (data.draw(st.lists(st.integers(0, V - 1), max_size=most)) for most in (30, 5))
    want = witten_bell(ids, V, order, text)
    exactly, floats = (NgramModel(ids, V, order, exact).law(tuple(text)) for exact in (True, False))
    assert list(exactly) == want and sum(want) == 1 and min(want) > 0
    assert floats == pytest.approx([float(w) for w in want], abs=1e-12)

def test_the_largest_order_counts_correctly():
    law = NgramModel([999]*20, 1000, 6).law((999,)*6)
    assert law[999] > .9 and law.sum() == pytest.approx(1)

scalars = st.one_of(st.none(), st.integers(-1, 4), st.booleans(), st.floats(), st.text(max_size=2))

@given(st.recursive(scalars, lambda inner: st.lists(inner, max_size=3)), st.integers(1, 3))
def test_tokens_below(given, deep):
    "Nested tuples of equal whole numbers below V, hashable; everything else raises with the argument's name"
    def whole(x, deep):
        if not deep: return isinstance(x, int) and 0 <= x < 3
        return isinstance(x, (list, str)) and all(whole(y, deep - 1) for y in x)
    def tuples(x): return tuple(map(tuples, x)) if isinstance(x, (list, str)) else int(x)
    if not whole(given, deep): return refuses("given", as_tokens, 3, deep, given=given)
    got = as_tokens(3, deep, given=given)
    assert got == tuples(given) == as_tokens(3, deep, given=got) and isinstance(hash(got), int)
    assert type(as_tokens(3, text=np.array([2, 0], np.uint8))[0]) is int
