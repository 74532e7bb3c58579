"Chapter 21a: the suffix array against sorting, lookups and counts against brute force, REST's judge against one draw a node"
from collections import Counter
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import constant, faithful, laws, models, proves, refuses
from specref.core.rng import Enumerator, tv_outcomes, law_of
from specref.draft.datastore import Datastore, Rest, join_texts, suffix_array
from specref.core.law import exact
from specref.core.loop import loop_law, match
from specref.verify.reject import reject
from specref.core.tree import add_paths
from specref.core.target import target_law
from specref.certify.mutants import redrawn_after, each_path
from specref.core.tree import Tree

V = 3
texts = st.lists(st.lists(st.integers(0, V - 1), max_size=14).map(tuple), min_size=1, max_size=4).filter(any)
contexts = st.lists(st.integers(0, V - 1), min_size=1, max_size=7).map(tuple)
queries = st.lists(st.integers(0, V - 1), min_size=1, max_size=5).map(tuple)


def places(texts, w):
    "Every (text, place) at which `w` stands, by looking everywhere"
    return [(k, i) for k, t in enumerate(texts) for i in range(len(t) - len(w) + 1) if t[i:i+len(w)] == w]


def counted(texts, w, depth):
    "How often each beginning of what follows `w` comes, up to `depth` tokens, no further than its text"
    went_on = [texts[k][i+len(w):][:depth] for k, i in places(texts, w)]
    return Counter(t[:j] for t in went_on for j in range(1, len(t) + 1))


# The suffix array

@proves("lem-doubling")
@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3))
def test_suffix_array(text, times):
    "The order of the suffixes as Python sorts them, a suffix before what goes on from it; on texts that repeat, too"
    text = text * times
    assert suffix_array(text).tolist() == sorted(range(len(text)), key=lambda i: text[i:])


@proves("lem-doubling")
@settings(max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(0, 4))
def test_a_pair_of_ranks_is_a_longer_rank(text, j):
    "Pairs of ranks by k tokens order the places as their first 2k tokens do; m + 1 tokens tell all places apart"
    n, k = len(text), 2**j
    rank = lambda k, i: -1 if i >= n else sum(text[a:a+k] < text[i:i+k] for a in range(n))
    for a in range(n):
        for b in range(n): assert (text[a:a+2*k] < text[b:b+2*k]) == ((rank(k, a), rank(k, a + k)) < (rank(k, b), rank(k, b + k)))
    m = max((m for m in range(n) for a in range(n - m) for b in range(a + 1, n - m + 1) if text[a:a+m] == text[b:b+m]), default=0)
    assert len({rank(m + 1, i) for i in range(n)}) == n


def test_long_texts():
    "A hundred thousand tokens: one token only, a short period, random ones"
    for text in (np.zeros(10**5, int), np.arange(10**5) % 7, np.random.default_rng(0).integers(0, 4, 10**5)):
        order = suffix_array(text)
        assert (np.sort(order) == np.arange(len(text))).all()
        rows = text.astype(np.uint8).tobytes()
        for a, b in zip(order[:-1:997], order[1::997]): assert rows[a:] < rows[b:]


# Lookups

@proves("lem-ranges")
@settings(max_examples=300)
@given(texts, queries)
def test_find(texts, w):
    "A range holds exactly the places where the string stands in one text, and its length is their number"
    store, starts = Datastore(texts, V), np.cumsum([0, *(len(t) + 1 for t in texts)])
    lo, hi, d = store.find(w)
    assert sorted(store.order[lo:hi]) == [starts[k] + i for k, i in places(texts, w)] and d == len(w)


@proves("lem-ranges")
@settings(max_examples=200)
@given(texts, queries)
def test_children(texts, w):
    "The children of a range are the ranges of the longer strings, in order; what is missing are the ends of texts"
    store = Datastore(texts, V)
    lo, hi, d = store.find(w)
    children = store.children((lo, hi, d))
    assert [(n, x) for n, x, _ in children] == [(n, x) for x in range(V) if (n := len(places(texts, (*w, x))))]
    for n, x, span in children: assert span == store.find((*w, x))
    assert hi - lo - sum(n for n, _, _ in children) == sum(i + len(w) == len(texts[k]) for k, i in places(texts, w))


@proves("lem-longest")
@settings(max_examples=300)
@given(texts, contexts, st.integers(1, 4), st.integers(0, 4))
def test_longest_ending(texts, ctx, shortest, more):
    "Bisection finds what trying every length from the longest down finds; a shorter ending of one that occurs occurs"
    rest = Rest(Datastore(texts, V), shortest + more, shortest)
    tried = [l for l in range(min(shortest + more, len(ctx)), shortest - 1, -1) if places(texts, ctx[len(ctx)-l:])]
    lo, hi, d = rest.ending(ctx)
    assert (hi - lo, d) == ((len(places(texts, ctx[len(ctx)-tried[0]:])), tried[0]) if tried else (0, 0))
    assert not tried or tried == list(range(tried[0], shortest - 1, -1))


def test_few_questions():
    "Lengths 1 to 16 of a text that occurs: at most five ranges are looked for, and the one that is kept"
    store, asked = Datastore([(0, 1, 2) * 20], V), []
    find, store.find = store.find, lambda w: (asked.append(len(w)), find(w))[1]
    assert Rest(store, 16, 1).ending((0, 1, 2) * 6)[2] == 16 and len(asked) <= 6


# The drafter

@faithful("REST")
@settings(max_examples=300)
@given(texts, contexts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 12), st.integers(1, 5))
def test_retrieval_is_brute_force(texts, ctx, shortest, more, most, depth):
    "Weights are the counts of what follows the longest ending; the heaviest are kept, and no node without its parent"
    rest = Rest(Datastore(texts, V), shortest + more, shortest, most, depth, exact=True)
    hit = next((ctx[len(ctx)-l:] for l in range(min(shortest + more, len(ctx)), shortest - 1, -1) if places(texts, ctx[len(ctx)-l:])), None)
    want = counted(texts, hit, depth) if hit else {}
    got = rest.beginnings(ctx)
    assert all(want[path] == n for path, n in got) and len({path for path, _ in got}) == len(got) == min(most, len(want))
    assert [n for _, n in got] == sorted(want.values(), reverse=True)[:most]
    for k, (path, _) in enumerate(got): assert len(path) == 1 or path[:-1] in [p for p, _ in got[:k]]
    tree = rest(ctx, Enumerator())
    assert {tree.path(i) for i in range(1, len(tree))} == {path for path, _ in got} and max(tree.depth) <= rest.depth
    for u in range(len(tree)): assert (w := [want[tree.path(c)] for c in tree.children(u)]) == sorted(w, reverse=True)
    drafter_contract(rest, ctx)


@faithful("REST")
def test_the_longest_span_wins():
    "After `ab` comes `c` nine times; after `xab`, which is longer, `d`: the lone `d` is offered, unless three tokens are too many"
    a, b, c, d, x = range(5)
    store = Datastore([(a, b, c)] * 9 + [(x, a, b, d)], 5)
    assert Rest(store).beginnings((c, x, a, b)) == [((d,), 1)]
    assert Rest(store, longest=2).beginnings((c, x, a, b)) == [((c,), 9), ((d,), 1)]


@faithful("REST")
def test_the_published_numbers():
    "16 down to 2 tokens, 64 nodes, 10 tokens deep, 5000 occurrences; those are the first in sorted order"
    rest = Rest(Datastore([(0, 1)], 2))
    assert (rest.longest, rest.shortest, rest.num_draft_tokens, rest.depth, rest.occurrences) == (16, 2, 64, 10, 5000)
    store = Datastore([(0, 1)] * 3 + [(0, 2)] * 3 + [(0, 3)] * 9, 4)
    assert Rest(store, shortest=1).beginnings((0,)) == [((3,), 9), ((1,), 3), ((2,), 3)]
    assert Rest(store, shortest=1, occurrences=5).beginnings((0,)) == [((1,), 3), ((2,), 2)]
    rng = np.random.default_rng(0)
    wide = Rest(Datastore([rng.integers(0, 40, 20000)], 40), shortest=1)
    tree = wide((7,), Enumerator())
    assert len(tree) == 65 and max(tree.depth) <= 10


def test_nothing_found():
    "An ending that does not occur, one that only ends a text, a context that is too short: the empty tree"
    store = Datastore([(0, 1, 2)], 4)
    for ctx in ((3, 3), (1, 2), (0,)): assert len(Rest(store)(ctx, Enumerator())) == 1


def test_no_way_across_texts():
    "Nothing is found across a border, and nothing goes on across one"
    store = Datastore([(0, 1), (), (2, 1)], 3)
    assert store.find((1, 2))[0] == store.find((1, 2))[1] and store.children(store.find((1,))) == []
    assert join_texts([(0, 1), (), (2, 1)], 3).tolist() == [0, 1, 3, 3, 2, 1, 3]


def test_small_numbers():
    "Tokens and places are kept in as few bytes as they need; 16-bit tokens are taken as they come"
    for V, kind in ((255, np.uint8), (256, np.uint16), (65536, np.uint32)):
        store = Datastore([np.array([1, 2, 1], np.uint16)], V)
        assert store.text.dtype == kind and store.text[-1] == V and store.find((1, 2)) == store.find((np.uint16(1), 2)) and len(store) == 4


# One draw a node

@settings(max_examples=40)
@given(models(), texts, contexts, st.integers(1, 2), st.integers(1, 5))
def test_exact(pair, texts, ctx, shortest, most):
    "Two or three tokens by the loop have the target's law, under both judges"
    rest = Rest(Datastore(texts, V), 3, shortest, most, 3, exact=True)
    for verify in (reject, match):
        assert loop_law(pair[0], rest, verify, ctx, 2) == target_law(pair[0], ctx, 2)
        verifier_contract(pair[0], rest, verify, ctx, 3)


def off(p, paths, verify):
    "The law of the first token on a tree of `paths`, with row `p` everywhere, and its distance from `p`"
    tree = law_of(lambda rng: add_paths(Tree((0,)), paths, len(p), rng, exact=True)).popitem()[0]
    law = law_of(lambda rng: verify([p]*len(tree), tree, rng).tokens(tree)[0])
    return law, tv_outcomes(law, {x: w for x, w in enumerate(p) if w})


paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3)


@proves("prop-asked")
@settings(max_examples=80)
@given(laws(4), paths)
def test_asked_again(p, paths):
    "What no child has comes with M p(x) after a fresh draw: the bound for a draw a path, the equality for one draw"
    first = {g[0] for g in paths}
    tree = law_of(lambda rng: add_paths(Tree((0,)), paths, 4, rng, exact=True)).popitem()[0]
    ways = Counter(tree.path(i)[0] for i in range(1, len(tree)) if not tree.children(i))
    hit, M = sum(p[x] for x in first), np.prod([(1 - p[x])**k for x, k in ways.items()])
    law, far = off(p, paths, redrawn_after(each_path))
    assert all(law.get(x, 0) == M*p[x] for x in range(4) if x not in first) and far >= (1 - hit)*(1 - M)
    law, far = off(p, paths, redrawn_after(match))
    assert far == hit*(1 - hit) <= F(1, 4) and all(law.get(x, 0) == (1 - hit)*p[x] for x in range(4) if x not in first)
    assert off(p, paths, match)[1] == off(p, paths, reject)[1] == 0


@proves("prop-asked")
@settings(max_examples=40)
@given(laws(4), st.integers(1, 3))
def test_an_only_child_on_k_paths(p, k):
    "(1 - p)(1 - (1 - p)^k) with a fresh draw, (1 - p) - (1 - p)^k without, p(1 - p) for one draw and a fresh one"
    shared, w = [(3, x) for x in range(k)], p[3]
    assert off(p, shared, redrawn_after(each_path))[1] == (1 - w)*(1 - (1 - w)**k)
    assert off(p, shared, each_path)[1] == (1 - w) - (1 - w)**k
    assert off(p, shared, redrawn_after(match))[1] == w*(1 - w)


@faithful("REST")
@pytest.mark.parametrize("w, one, path, both", [((3, 3, 3, 1), F(9, 100), F(171, 1000), F(2439, 10000)), ((1, 1, 2, 4), F(1, 4), F(3, 8), F(7, 16)),
                                                ((1, 0, 0, 3), F(3, 16), F(15, 64), F(63, 256))])
def test_the_published_judge_is_off(w, one, path, both):
    "A retrieved token shared by three paths: exact with one draw a node, off by these fractions otherwise"
    rest = Rest(Datastore([(2, 3, x) for x in range(3)], 4), 1, 1, 4, exact=True)
    target = constant(*w)
    far = lambda verify: tv_outcomes(loop_law(target, rest, verify, (2,), 1), target_law(target, (2,), 1))
    assert [far(v) for v in (reject, match, redrawn_after(match), each_path, redrawn_after(each_path))] == [0, 0, one, path, both]


def test_the_fork_by_hand():
    "The numbers of the page: 3/16 without a hit, 3/64 for the two tokens that were not retrieved, where 1/4 is right"
    letters = lambda s: tuple(ord(c) - 97 for c in s)
    rest = Rest(Datastore([letters("abcabd"), letters("abcc")], 4), num_draft_tokens=4, exact=True)
    assert rest.beginnings(letters("dab")) == [((2,), 2), ((3,), 1), ((2, 0), 1), ((2, 2), 1)]
    law = loop_law(constant(1, 1, 4, 2), rest, redrawn_after(each_path), letters("dab"), 1)
    assert law[0,] + law[1,] == F(3, 64) and loop_law(constant(1, 1, 4, 2), rest, reject, letters("dab"), 1)[2,] == F(1, 2)


@faithful("REST")
def test_no_harm_at_temperature_0():
    "Draws from a point are all alike: the published judge gives the target's text"
    rest = Rest(Datastore([(2, 3, x) for x in range(3)], 4), 1, 1, 4, exact=True)
    for target in (constant(0, 0, 0, 1), constant(1, 0, 0, 0)):
        assert loop_law(target, rest, redrawn_after(each_path), (2,), 3) == target_law(target, (2,), 3)


# Doors and exercises

def test_doors():
    store = Datastore([(0, 1)], 2)
    for bad in ([], [()], [(0, 2)], [(-1,)], [(0.5,)], ["ab"], (0, 1), [[[0]]], [[[0], [0, 1]]], None, 5): refuses("texts", Datastore, bad, 2)
    for bad in (None, [(0, 1)]): refuses("store", Rest, bad)
    refuses("V", Datastore, [(0,)], 0)
    refuses("text", suffix_array, []); refuses("text", suffix_array, 3)
    for bad in (0, -1, 1.5, None):
        for name in ("longest", "shortest", "num_draft_tokens", "depth", "occurrences"): refuses(name, Rest, store, **{name: bad})
    refuses("longest", Rest, store, longest=2, shortest=3)
    refuses("ctx", store.find, (0, 2)); refuses("ctx", store.find, ()); refuses("ctx", Rest(store), (0, 2), Enumerator())


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(0, 5))
def test_exercise_1(text, j):
    "After j doublings places are sorted by 2^j tokens; 2^5 are more than a lookup with the defaults reads"
    assert 2**4 < 16 + 10 <= 2**5
    order = suffix_array(text)
    heads = [text[i:i + 2**j] for i in order]
    assert heads == sorted(heads)


@settings(max_examples=50)
@given(texts)
def test_exercise_2(texts):
    "Going down three levels of children counts every string of three tokens"
    store = Datastore(texts, V)
    def strings(k, span, path=()):
        for n, x, below in store.children(span):
            if k == 1: yield (*path, x), n
            else: yield from strings(k - 1, below, (*path, x))
    assert dict(strings(3, (0, len(store), 0))) == Counter(t[i:i+3] for t in texts for i in range(len(t) - 2))
