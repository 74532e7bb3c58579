"Chapter 21a: the suffix array against sorting, lookups by brute force, REST's verifier"
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import example, strategies as st

from contracts import drafter_contract
from helpers import constant, examples, faithful, laws, proves
from published import drafted
from specref import (add_paths, Datastore, Enumerator, law_of, match, PromptLookup, reject, Rest, Tree,
                     tv_outcomes)
from specref.certify.tree_mutants import each_path, redrawn_after
from specref.draft.datastore import join_texts, suffix_array

V = 3
texts = st.lists(st.lists(st.integers(0, V - 1), max_size=14).map(tuple), min_size=1, max_size=4).filter(any)
contexts = st.lists(st.integers(0, V - 1), min_size=1, max_size=7).map(tuple)
queries = st.lists(st.integers(0, V - 1), min_size=1, max_size=5).map(tuple)

def places(texts, w):
    "Every (text, place) where `w` occurs, by exhaustive search"
    return [(k, i) for k, t in enumerate(texts) for i in range(len(t) - len(w) + 1) if t[i:i+len(w)] == w]

def counted(texts, w, depth):
    "Counts of the continuations of `w`, of up to `depth` tokens, within their text"
    tails = [texts[k][i+len(w):][:depth] for k, i in places(texts, w)]
    return Counter(t[:j] for t in tails for j in range(1, len(t) + 1))

# The suffix array

@proves("lem-doubling")
@examples(100, st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3))
def test_suffix_array(text, times):
    "The order of the suffixes is that of Python's sort, on periodic texts too"
    text = text * times
    assert suffix_array(text).tolist() == sorted(range(len(text)), key=lambda i: text[i:])

def test_long_texts():
    "Fifty thousand tokens: one token only, a short period, random ones"
    n = 50_000
    for text in (np.zeros(n, int), np.arange(n) % 7, np.random.default_rng(0).integers(0, 4, n)):
        order, rows = suffix_array(text), text.astype(np.uint8).tobytes()
        assert (np.sort(order) == np.arange(n)).all()
        for a, b in zip(order[:-1:997], order[1::997]): assert rows[a:] < rows[b:]

# Lookups

@proves("lem-ranges")
@examples(100, texts, queries)
def test_find_and_children(texts, w):
    "A range holds the places of a string; its children are the ranges of the strings one token longer"
    store, starts = Datastore(texts, V), np.cumsum([0, *(len(t) + 1 for t in texts)])
    lo, hi, d = store.find(w)
    assert sorted(store.order[lo:hi]) == [starts[k] + i for k, i in places(texts, w)] and d == len(w)
    longer = [(len(places(texts, (*w, x))), x, store.find((*w, x))) for x in range(V)]
    assert store.children((lo, hi, d)) == [child for child in longer if child[0]]

@proves("lem-longest")
@examples(100, texts, contexts, st.integers(1, 4), st.integers(0, 4))
def test_longest_ending(texts, ctx, shortest, more):
    "Bisection agrees with trying every length, because the endings of a string that occurs occur"
    lengths = range(shortest, min(shortest + more, len(ctx)) + 1)
    found = [(len(places(texts, ctx[len(ctx)-l:])), l) for l in lengths]
    lo, hi, d = Rest(Datastore(texts, V), shortest + more, shortest).ending(ctx)
    hits = [n > 0 for n, _ in found]
    assert hits == sorted(hits, reverse=True)
    assert (hi - lo, d) == (found[sum(hits) - 1] if any(hits) else (0, 0))

def test_dtypes_and_borders():
    "Tokens take as few bytes as they need; no match and no continuation crosses a border"
    for size, kind in ((255, np.uint8), (256, np.uint16), (65536, np.uint32)):
        store = Datastore([np.array([1, 2, 1], np.uint16)], size)
        lo, hi, _ = store.find((1, 2))
        assert store.text.dtype == kind and store.text[-1] == size and hi - lo == 1
    assert join_texts([(0, 1), (), (2, 1)], 3).tolist() == [0, 1, 3, 3, 2, 1, 3]
    assert len(Rest(Datastore([(0, 1, 2)], 4))((1, 2), Enumerator())) == 1

# The drafter

class Unranked(Rest):
    "The first continuations in sorted order, not the most frequent"
    def beginnings(self, ctx):
        return sorted(Rest.beginnings(replace(self, num_draft_tokens=999), ctx))[:self.num_draft_tokens]

class ShortEnding(Rest):
    "The shortest ending, not the longest"
    def ending(self, ctx): return Rest.ending(replace(self, longest=self.shortest), ctx)

class OwnText(Rest):
    "Prompt lookup: what followed the ending in the text itself"
    def beginnings(self, ctx):
        found = PromptLookup(V, self.longest, min(self.num_draft_tokens, self.depth)).find(ctx)
        return [(found[:i], 1) for i in range(1, len(found) + 1)]

@faithful("REST", plain={"unranked": drafted(Unranked), "short endings": drafted(ShortEnding),
                         "prompt lookup": drafted(OwnText)})
@examples(100, texts, contexts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 12), st.integers(1, 5))
@example([(0, 1, 0, 0, 1, 2, 0, 1, 2, 1, 1)], (0, 1), 1, 2, 3, 2)
def test_retrieval_against_brute_force(subject, texts, ctx, shortest, more, most, depth):
    "Weights are the counts of continuations of the longest ending; the heaviest are drafted"
    how = dict(store=Datastore(texts, V), longest=shortest + more, shortest=shortest, depth=depth)
    rest = subject.drafter(constant(1, 1, 1), how, gamma=most, past=((0,),), exact=True)
    endings = [ctx[len(ctx)-l:] for l in range(min(shortest + more, len(ctx)), shortest - 1, -1)]
    hit = next((w for w in endings if places(texts, w)), None)
    want, got, tree = counted(texts, hit, depth) if hit else {}, rest.beginnings(ctx), rest(ctx, Enumerator())
    assert dict(got).items() <= want.items() and len(dict(got)) == len(got)
    assert [n for _, n in got] == sorted(want.values(), reverse=True)[:most]
    for k, (path, _) in enumerate(got): assert len(path) == 1 or path[:-1] in dict(got[:k])
    assert {tree.path(i) for i in range(1, len(tree))} == set(dict(got)) and max(tree.depth) <= rest.depth
    for u in range(len(tree)):
        siblings = [want[tree.path(c)] for c in tree.children(u)]
        assert siblings == sorted(siblings, reverse=True)
    drafter_contract(rest, ctx)

# One draw a node

def path_tree(paths, V): return add_paths(Tree((0,)), paths, V, Enumerator(), exact=True)

def off(p, paths, verify):
    "Distribution of the first token on a tree of `paths`, with row `p` everywhere, and its distance from `p`"
    tree = path_tree(paths, len(p))
    law = law_of(lambda rng: verify([p]*len(tree), tree, rng).tokens(tree)[0])
    return law, tv_outcomes(law, {x: w for x, w in enumerate(p) if w})

@proves("prop-asked")
@examples(25, laws(4), st.lists(queries.map(lambda w: w[:2]), min_size=1, max_size=3))
def test_a_second_draw(p, paths):
    "A token x of no child has mass M p(x): a bound on the distance for a draw a path, equality for one"
    first, tree = {g[0] for g in paths}, path_tree(paths, 4)
    ways = Counter(tree.path(i)[0] for i in range(1, len(tree)) if not tree.children(i))
    hit, M = sum(p[x] for x in first), np.prod([(1 - p[x])**k for x, k in ways.items()])
    law, far = off(p, paths, redrawn_after(each_path))
    assert all(law.get(x, 0) == M*p[x] for x in range(4) if x not in first) and far >= (1 - hit)*(1 - M)
    law, far = off(p, paths, redrawn_after(match))
    assert far == hit*(1 - hit) and all(law.get(x, 0) == (1 - hit)*p[x] for x in range(4) if x not in first)
    assert off(p, paths, match)[1] == off(p, paths, reject)[1] == 0
