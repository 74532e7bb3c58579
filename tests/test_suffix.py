"Chapter 21b: suffix trees and automata against counting by hand, and the drafters that stand on them"
from collections import Counter
from fractions import Fraction
from math import floor, prod

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import faithful, models, proves, random_table, refuses, seeds
from specref.core.rng import Enumerator, Seeded
from specref.core.law import one_hot
from specref.core.loop import generate, loop_law, match, rounds
from specref.draft.lookup import PromptLookup
from specref.verify.reject import Chain, reject
from specref.draft.suffix import SEPARATOR, SAM, SuffixCursor, Fallback, SuffixAutomaton, SuffixDecoding, SuffixTree
from specref.core.target import TableModel, target_law
from specref.core.tree import Tree

texts = st.lists(st.integers(0, 2), max_size=14).map(tuple)
shelves = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=4).map(tuple)
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


def counts(texts, depth):
    "How often each string of 1 to `depth` tokens occurs"
    return Counter(t[i:j] for t in texts for i in range(len(t)) for j in range(i + 1, min(i + depth, len(t)) + 1))


def nodes(tree):
    "Each node below the root with its string"
    todo = [(tree.root, ())]
    while todo:
        u, s = todo.pop()
        for x, v in u.below.items():
            label = tuple(v.text[v.start:v.start+v.length])
            assert len(label) == v.length and label[0] == x
            yield v, s + label
            todo.append((v, s + label))


def spelled(tree):
    "The count that the tree gives to each of its strings, its form being looked at on the way"
    found = {}
    for v, s in nodes(tree):
        assert tuple(v.text[v.start+v.length-len(s):v.start+v.length]) == s, "a node stands where its whole string occurs"
        assert sum(w.count for w in v.below.values()) <= v.count and all(w.count < v.count for w in v.below.values()), "joined where it can be"
        found |= {s[:len(s)-k]: v.count for k in range(v.length)}
    return found


def read(texts, depth):
    tree = SuffixTree(depth)
    for t in texts: tree.read(t)
    return tree


# The tree

@proves("thm-suffix-tree")
@faithful("SuffixDecoding")
@settings(max_examples=300)
@given(shelves, texts, st.integers(1, 7))
def test_counts_of_every_string(past, text, depth):
    "After every token the tree holds each string of up to `depth` tokens with its count, in at most two nodes a token and `depth` steps"
    tree = read(past, depth)
    for i, x in enumerate(text, 1):
        tree.add(x)
        assert spelled(tree) == counts((*past, text[:i]), depth)
        assert len(tree.ends) == min(i, depth) and len(list(nodes(tree))) <= 2*sum(map(len, (*past, text[:i])))
    for s in (text[-2:], (0, 1, 2), (2, 2, 2, 2)):
        if 1 <= len(s) <= depth: assert tree.count(s) == counts((*past, text), depth)[s]


@proves("thm-suffix-tree")
@faithful("SuffixDecoding")
@settings(max_examples=300)
@given(shelves, st.integers(1, 7), st.data())
def test_forgetting(past, depth, data):
    "Texts removed in any order leave the tree of the others, whatever the order in which these were read"
    order = data.draw(st.permutations(past))
    k = data.draw(st.integers(0, len(past)))
    tree = read(past, depth)
    for t in order[:k]: tree.remove(t)
    assert tree.root.form() == read(order[k:], depth).root.form() and sorted(tree.held) == sorted(order[k:])
    tree.read((0, 1, 0, 1)); tree.remove((0, 1, 0, 1))
    assert tree.root.form() == read(order[k:], depth).root.form() and spelled(tree) == counts(order[k:], depth)


@given(shelves, shelves, st.integers(1, 5))
def test_first_in_first_out(past, more, depth):
    "`hold` goes from any past to any other; where the oldest goes first, no node refers to a text that is gone"
    tree = read(past, depth)
    for k in range(len(past) + 1):
        assert tree.hold((*past, *more)[k:]) is tree and tree.root.form() == read((*past, *more)[k:], depth).root.form()
        assert {tuple(v.text) for v, _ in nodes(tree)} <= set((*past, *more)[k:])
        assert len({id(v.text) for v, _ in nodes(tree)}) <= len(tree.held)
    assert tree.hold(past).root.form() == read(past, depth).root.form() and tree.held == list(past)


@pytest.mark.parametrize("text", [[0]*3000, [0, 1]*1500, np.random.default_rng(0).integers(0, 2, 3000).tolist(), [0] + [1]*2999])
def test_long_texts(text):
    "Nothing recurses along the text; a few counts by hand, and all forgotten again"
    tree = read([text], 24)
    joined = "".join(map(str, text))
    for s in ((0,), (0, 1), (1, 1, 1), tuple(text[100:124])):
        assert tree.count(s) == sum(joined.startswith("".join(map(str, s)), i) for i in range(len(text)))
    assert len(list(nodes(tree))) <= 2*len(text)
    tree.remove(text)
    assert not tree.root.below


# What is offered

def by_hand(drafter, past, text):
    "(score, p, counts) of the best guess, all strings enumerated"
    n, best = counts(past, drafter.max_tree_depth), (0, 0, [])
    for p in range(1, min(len(text), drafter.max_tree_depth) + 1):
        if not n[m := text[len(text)-p:]]: break
        def widest(s): return sorted((-n[(*s, x)], x) for x in range(drafter.V) if n[(*s, x)])[:drafter.width]
        reach, level = [], [m]
        while level:
            level = [(*s, x) for s in level for c, x in widest(s) if -c/n[m] >= drafter.min_token_prob]
            reach += [n[s] for s in level]
        b = max(0, min(drafter.num_draft_tokens, floor(drafter.max_spec_factor*p + drafter.max_spec_offset)))
        picked = sorted(reach, reverse=True)[:b]
        best = max(best, (Fraction(sum(picked), n[m]), p, picked), key=lambda g: g[:2])
    return best


@st.composite
def drafters(draw):
    return SuffixDecoding(3, draw(st.integers(1, 6)), draw(st.integers(2, 7)), draw(st.sampled_from([0., .5, 1., 2.5])), draw(st.sampled_from([-1., 0., 1.5])),
        draw(st.sampled_from([0., .1, 1/3, .5, 1.])), draw(st.integers(1, 3)), draw(st.sampled_from([0, .5, 1.5])), past=draw(shelves), exact=True)


@proves("prop-suffix-score")
@faithful("SuffixDecoding")
@settings(max_examples=300)
@given(drafters(), texts.filter(len))
def test_the_guess(drafter, text):
    "The best guess is the one of an enumeration: most expected tokens within the budget, over all matches and both trees; nothing below `min_score`"
    own, shared = (drafter.guess(tree, text) for tree in (drafter.own(text), drafter.shared.hold(drafter.past)))
    for guess, past in ((own, (text,)), (shared, drafter.past)):
        score, p, counted = by_hand(drafter, past, text)
        assert guess[:2] == (score, p) and [n for _, n in guess[2]] == counted
    score, p, picked = shared if shared[0] > own[0] else own
    tree = drafter(text, Enumerator())
    paths = {tree.path(i) for i in range(1, len(tree))}
    assert paths == ({path for path, _ in picked} if score >= drafter.min_score else set())
    assert len(paths) == len(tree) - 1 <= max(0, min(drafter.num_draft_tokens, drafter.max_spec_factor*p + drafter.max_spec_offset))
    assert max(tree.depth) <= min(drafter.depth, drafter.max_tree_depth - p) and all(len(tree.children(i)) <= drafter.width for i in range(len(tree)))


@proves("prop-suffix-score")
@settings(max_examples=200)
@given(drafters(), texts.filter(len))
def test_the_score_is_the_mean_over_occurrences(drafter, text):
    "D multiplied out on the way down is the share; the score is how many guesses agree with what followed, averaged over all places of the match"
    n = counts((text,), drafter.max_tree_depth)
    score, p, picked = drafter.guess(drafter.own(text), text)
    m = text[len(text)-p:]
    ends = [i + p for i in range(len(text) - p + 1) if text[i:i+p] == m]
    if picked: assert score == Fraction(sum(text[i:i+len(path)] == path for i in ends for path, _ in picked), len(ends))
    for path, count in picked:
        assert prod(Fraction(n[m + path[:k+1]], n[m + path[:k]]) for k in range(len(path))) == Fraction(count, n[m])


def test_by_hand():
    "The example of the chapter"
    ids = lambda s: tuple(ord(c) - 97 for c in s)
    drafter, text = SuffixDecoding(4, max_tree_depth=8), ids("abcabcab")
    said = lambda d: [d(text, Enumerator()).path(i) for i in range(1, len(d(text, Enumerator())))]
    score, p, picked = drafter.guess(drafter.own(text), text)
    assert (score, p, picked[-1][0]) == (Fraction(3, 2), 5, ids("cab"))
    assert said(drafter)[-1] == ids("cab") and said(drafter.finished(ids("abdd")))[-1] == ids("dd")
    assert said(drafter.finished(ids("abdd")).finished(ids("abca")))[-1] == ids("cab")
    assert not said(SuffixDecoding(4, max_tree_depth=8, min_score=1.6)) and said(SuffixDecoding(4, max_tree_depth=8, min_score=1.5))


def test_thresholds_are_met_at_equality():
    "A share of 1/3 is not below 1/3, as a fraction or a float, nor a score of 3/5 below .6; a factor without bounds asks for all"
    past = ((0, 1), (0, 2), (0, 0, 2))   # in the shared tree a 0 is followed by 2 in half of the cases, by 0 and by 1 in a quarter
    for share, wide in ((Fraction(1, 4), 3), (.25, 3), (.26, 1), (Fraction(1, 2), 1), (.51, 0)):
        drafter = SuffixDecoding(3, max_tree_depth=2, max_spec_factor=3., min_token_prob=share, width=3, past=past)
        assert len(drafter((1, 0), Enumerator())) - 1 == wide
    past = ((0, 1),)*3 + ((0, 2),)*2
    for score, some in ((.6, 1), (Fraction(3, 5), 1), (.61, 0)): assert len(SuffixDecoding(3, min_score=score, past=past)((0,), Enumerator())) - 1 == some
    assert SuffixDecoding(3, max_spec_factor=1e308, max_spec_offset=1e308)((0, 1, 0, 1), Enumerator()).token[1:] == [0, 1]


def test_a_text_may_be_a_list_that_changes():
    tree, text = SuffixTree(3), [0, 1, 2]
    tree.read(text); text.append(5); tree.remove((0, 1, 2))
    assert not tree.root.below and not tree.held


def test_ties():
    "Of equal scores the longer match, but before that the own tree"
    drafter = SuffixDecoding(3, past=((1, 0, 2), (1, 0)))
    own, shared = drafter.guess(drafter.own((0, 1, 0)), (0, 1, 0)), drafter.guess(drafter.shared.hold(drafter.past), (0, 1, 0))
    assert own[:2] == (Fraction(1, 2), 1) and shared[:2] == (Fraction(1, 2), 2) and drafter((0, 1, 0), Enumerator()).token[1:] == [1]


def test_a_finished_request_makes_another_drafter():
    "A value with one text more, the oldest gone beyond the cap; the earlier drafter is as it was, and both are asked in turn"
    one = SuffixDecoding(3, max_tree_depth=6, max_cached_requests=2, exact=True)
    two = one.finished((0, 1, 2, 0)); three = two.finished((1, 1, 2)); four = three.finished([np.int64(2), 2, 0])
    assert [d.past for d in (one, two, three, four)] == [(), ((0, 1, 2, 0),), ((0, 1, 2, 0), (1, 1, 2)), ((1, 1, 2), (2, 2, 0))]
    assert len({one, two, three, four}) == 4 and two == SuffixDecoding(3, max_tree_depth=6, max_cached_requests=2, past=[[0, 1, 2, 0]], exact=True)
    assert SuffixDecoding(3, past=((0,), (1,), (2,)), max_cached_requests=2).past == ((1,), (2,))
    for d in (four, one, three, two, four, three):
        fresh = SuffixDecoding(3, max_tree_depth=6, max_cached_requests=2, past=d.past, exact=True)
        assert d.shared.hold(d.past).root.form() == read(d.past, 6).root.form()
        for text in ((0, 1), (1,), (2, 2), (0, 1, 2)): assert d(text, Enumerator()) == fresh(text, Enumerator())
    assert four.shared is one.shared and one.finished(()).past == ()


def greedy_target():
    from specref.models.embedded import embedded
    return embedded("target", temperature=0)


@faithful("SuffixDecoding")
def test_the_second_time_is_faster():
    "On the embedded model: the same request again takes a fraction of the calls, the answer is the same; a drafter that forgets gains nothing"
    from specref.models.embedded import prompts
    target, (A, B) = greedy_target(), prompts("code", 2, 24, seed=1)
    drafter = SuffixDecoding(target.V)
    assert generate(target, drafter, reject, A, 24, Seeded(0)).ledger.num_draft_tokens > 0
    for ctx in (A, B):
        first = generate(target, drafter, reject, ctx, 24, Seeded(0))
        wiser = drafter.finished(first)
        second = generate(target, wiser, reject, ctx, 24, Seeded(0))
        assert second == first and second.ledger.mean_acceptance_length > 2.5*first.ledger.mean_acceptance_length
        assert len(second.ledger.rounds) <= 8
        for round, _ in zip(rounds(target, wiser, reject, ctx, Seeded(0)), range(4)):
            score, p, picked = max((wiser.guess(t, round.tree.ctx) for t in (wiser.own(round.tree.ctx), wiser.shared.hold(wiser.past))), key=lambda g: g[0])
            assert len(round.tree) - 1 == len(picked) <= p


# The automaton

def automaton(text, links=list):
    a = SuffixAutomaton()
    a.link = links(a.link)
    for x in text: a.add(x)
    return a


class Counting(list):
    reads = 0
    def __getitem__(self, i): self.reads += 1; return super().__getitem__(i)


def ends(text, s): return tuple(i for i in range(len(text)) if i + 1 >= len(s) and text[i+1-len(s):i+1] == s)


@proves("thm-automaton")
@settings(max_examples=150)
@given(st.lists(st.integers(0, 2), max_size=12).map(tuple))
@example((0, 1, 2, 1, 2))
def test_states_are_classes_of_alike_strings(text):
    "After every token: one state a class, with its longest string, its first end, the link and the transitions that the definition asks for"
    for n in range(len(text) + 1):
        t, a = text[:n], automaton(text[:n])
        alike = {}
        for s in counts((t,), n or 1): alike.setdefault(ends(t, s), []).append(s)
        at = {e: max(strings, key=len) for e, strings in alike.items()}          # the longest string of a class
        def state(s):
            u = 0
            for x in s: u = a.below[u][x]
            return u
        assert len(a.link) == len(alike) + 1 and len({state(s) for s in at.values()}) == len(at)
        for e, strings in alike.items():
            u, shortest = state(at[e]), min(strings, key=len)
            assert {state(s) for s in strings} == {u} and len(strings) == a.length[u] - len(shortest) + 1
            assert a.length[u] == len(at[e]) and a.first[u] == e[0] and a.link[u] == state(shortest[1:])
            assert a.below[u] == {x: state((*at[e], x)) for x in range(3) if ends(t, (*at[e], x))}
        assert a.below[0] == {x: state((x,)) for x in set(t)}


SHAPES = {"a": [0]*5000, "ab": [0] + [1]*4999, "abab": [0, 1]*2500, "abbbc": [0] + [1]*4998 + [2], "aab": ([0]*49 + [1])*100,
          "two": np.random.default_rng(0).integers(0, 2, 5000).tolist(), "many": np.random.default_rng(0).integers(0, 500, 5000).tolist()}


@proves("thm-automaton")
@faithful("SAM")
@pytest.mark.parametrize("name", SHAPES)
def test_linear_work(name):
    "At most 2n - 1 states, 3n transitions, 4n links gone up: building it, and following another text through it"
    text, n = SHAPES[name], len(SHAPES[name])
    a = automaton(text, Counting)
    clones = len(a.link) - 1 - n
    assert len(a.link) <= 2*n - 1 and sum(map(len, a.below)) <= 3*n and a.link.reads - clones <= 4*n
    a.link.reads, cursor = 0, SuffixCursor(a)
    for x in SHAPES["two"] + [7] + SHAPES["aab"]: cursor.add(x)
    assert a.link.reads <= 2*5000 + 1


@proves("thm-automaton")
@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_few_states_and_links(text):
    a = automaton(text, Counting)
    assert len(a.link) <= 2*len(text) - 1 and a.link.reads - (len(a.link) - 1 - len(text)) <= 4*len(text)


def longest(endings, text): return max((k for k in range(len(text) + 1) if endings(text[len(text)-k:])), default=0)


@proves("cor-cursor")
@faithful("SAM")
@settings(max_examples=200)
@given(texts, texts)
def test_matched_length(text, other):
    "At every step: the longest ending that occurs earlier, as the link of the text and as a cursor that goes ahead of it (Hu et al.); and that of another text"
    a = SuffixAutomaton()
    ahead = SuffixCursor(a)
    for i, x in enumerate(text, 1):
        ahead.add(x); a.add(x)
        t = text[:i]
        k = longest(lambda s: any(e < i - 1 for e in ends(t, s)), t)
        link = a.link[a.last]
        assert ahead.at[1] == a.length[link] == k
        if k: assert a.first[link] == ends(t, t[i-k:])[0] == a.first[ahead.at[0]]
    beside = SuffixCursor(a)
    for i, x in enumerate(other, 1):
        beside.add(x)
        k = longest(lambda s: not s or bool(ends(text, s)), other[:i])
        assert beside.at[1] == k and (k == 0 or a.first[beside.at[0]] == ends(text, other[i-k:i])[0])


@settings(max_examples=200)
@given(texts.filter(len), st.integers(1, 5))
def test_copied(text, n):
    "What followed the first place of the longest ending with enough behind it, else of the last that has most; at most n links are gone up"
    a = automaton(text, Counting)
    a.link.reads = 0
    s = a.link[a.last]
    got = a.copied(s, n)
    assert a.link.reads <= n + 1
    follow = [text[ends(text, text[len(text)-k:])[0] + 1:][:n] for k in range(a.length[s], 0, -1)]
    want = next((f for f in follow if len(f) == n), max(follow, key=len, default=()))
    assert tuple(got) == tuple(want)


@settings(max_examples=200)
@given(shelves, texts.filter(len), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
@faithful("SAM")
def test_the_switch(corpus, text, n, threshold, bias):
    "Something is offered just when the longer of the two matches reaches the threshold, the corpus being behind by its bias; a copy stays within its text"
    sam = SAM(3, n, threshold, bias, corpus, exact=True)
    here = longest(lambda s: not s or any(e < len(text) - 1 for e in ends(text, s)), text)
    there = longest(lambda s: not s or any(ends(t, s) for t in corpus), text)
    assert [m[0] for m in sam.matches(text)] == [here, there - bias]
    tree = sam(text, Enumerator())
    tokens = tuple(tree.token[1:])
    assert tree.parent == list(range(-1, len(tokens))) and len(tokens) <= n
    if max(here, there - bias) < threshold: assert not tokens
    elif here >= there - bias: assert tokens and tokens in {text[i:i+len(tokens)] for i in range(len(text))}
    else: assert not tokens and all(t[-1:] == (text[-1],) for t in corpus if text[-1] in t[-1:]) or any(ends(t, (text[-1], *tokens)) for t in corpus)
    model = Chain(TableModel(3, lambda t: one_hot(0, 3, exact=True)), 1)
    assert (Fallback(sam, model)(text, Enumerator()) == tree) == (len(tokens) > 0) or tokens == (0,)


@faithful("SAM")
def test_the_switch_at_five():
    "With the published numbers: a match of four is left to the other drafter, one of five is copied; in the corpus it takes ten"
    model = Chain(TableModel(30, lambda text: one_hot(29, 30)), 2)
    either = Fallback(SAM(30), model)
    again = tuple(range(12))
    for k in range(1, 9):
        tree = either((*again, 20, *again[2:2+k]), Enumerator())
        assert tree.token[1:] == ([29, 29] if k < 5 else [*again[2+k:], 20, *again[2:2+k]])
    either = Fallback(SAM(30, corpus=(again, again[::-1])), model)
    for k in range(1, 12):
        assert either((20, *again[:k]), Enumerator()).token[1:] == ([29, 29] if k < 10 else [*again[k:]])


def test_texts_of_a_corpus_are_apart():
    "No match and no copy goes from one text to the next"
    sam = SAM(3, 4, 1, 0, corpus=((0, 1), (2, 0)))
    assert sam((1,), Enumerator()).token[1:] == [] and sam((2,), Enumerator()).token[1:] == [0]
    assert sam((1, 2), Enumerator()).token[1:] == [0] and sam.matches((1, 2))[1][0] == 1
    assert SEPARATOR not in range(3) and sam((0,), Enumerator()).token[1:] == [1]


# The drafters in the loop

@proves("prop-either")
@settings(max_examples=60)
@given(models(), contexts, drafters(), shelves, st.integers(1, 2), st.integers(1, 3), st.sampled_from([reject, match]))
def test_exact(pair, ctx, tree, corpus, threshold, n, verify):
    "Each of them, and each joined to a model or to another, keeps the law of the target and states its edges"
    target, draft = pair
    sam = SAM(3, 3, threshold, 1, corpus, exact=True)
    for drafter in (tree, sam, Fallback(sam, tree), Fallback(sam, Chain(draft, 2)), Fallback(tree, Fallback(sam, Chain(draft, 1)))):
        drafter_contract(drafter, ctx)
        verifier_contract(target, drafter, verify, ctx, n)


@proves("prop-either")
@settings(max_examples=20)
@given(models(), contexts, seeds)
def test_whole_loops(pair, ctx, seed):
    target, draft = pair
    past = (tuple(int(x) for x in np.random.default_rng(seed).integers(0, 3, 9)),)
    for drafter in (SuffixDecoding(3, 3, 5, width=2, past=past, exact=True), Fallback(SAM(3, 2, 2, 1, past, exact=True), Chain(draft, 2))):
        assert loop_law(target, drafter, reject, ctx, 3, stop={2}) == target_law(target, ctx, 3, stop={2})


def test_a_threshold_on_what_was_sampled_is_no_longer_exact():
    "The drafter of the chapter that shows its token only if it was likely"
    target, draft = random_table(3, seed=3), random_table(3, seed=4)
    def picky(ctx, rng):
        tree = Chain(draft, 1)(ctx, rng)
        return tree if tree.law[1][tree.token[1]] > Fraction(1, 3) else Tree(ctx)
    law = lambda drafter: loop_law(target, drafter, reject, (0,), 1)
    assert law(Fallback(picky, Chain(draft, 1))) != target_law(target, (0,), 1) == law(Fallback(SAM(3, threshold=1, exact=True), Chain(draft, 1)))


def test_either_is_a_drafter():
    "Depth, models and vocabulary of both; both learn; probes alone are no offer"
    class Learner:
        def __init__(self, k=0): self.k = k
        def __call__(self, ctx, rng):
            tree = Tree(ctx); tree.add(0, 1)
            return tree
        def learn(self, round): return Learner(self.k + 1)
    draft = random_table(3, seed=4)
    either = Fallback(Learner(), Chain(draft, 2))
    assert either.depth == 2 and either.models == (draft,) and len(either((0,), Seeded(0))) == 3
    round = next(rounds(random_table(3, seed=3), either, reject, (0,), Seeded(0)))
    after = either.learn(round)
    assert after.first.k == 1 and after.second is either.second
    assert Fallback(SAM(3), Chain(draft, 2)) == Fallback(SAM(3), Chain(draft, 2)) and hash(SAM(3, corpus=[[0, 1]])) == hash(SAM(3, corpus=((0, 1),)))
    assert Fallback(SAM(3), SuffixDecoding(3)).depth == 40 and Fallback(PromptLookup(3), Fallback(SAM(3), Chain(draft, 1))).models == (draft,)


def test_doors():
    for bad in (0, -1, 1.5, None):
        refuses("depth", SuffixTree, bad)
        for name in ("V", "num_draft_tokens", "width", "max_cached_requests"): refuses(name, SuffixDecoding, **dict(V=3) | {name: bad})
        for name in ("V", "num_draft_tokens", "threshold"): refuses(name, SAM, **dict(V=3) | {name: bad})
    refuses("max_tree_depth", SuffixDecoding, 3, max_tree_depth=1)
    refuses("len_bias", SAM, 3, len_bias=-1)
    for bad in (-1, float("nan"), float("inf"), "1"):
        refuses("max_spec_factor", SuffixDecoding, 3, max_spec_factor=bad)
        refuses("min_score", SuffixDecoding, 3, min_score=bad)
    for bad in (-1e9, float("inf"), None): refuses("max_spec_offset", SuffixDecoding, 3, max_spec_offset=bad)
    for bad in (-.1, 1.1, float("nan")): refuses("min_token_prob", SuffixDecoding, 3, min_token_prob=bad)
    for bad in (5, [5], ["ab"], [(0, 3)], [(-1,)], [(.5,)], (0, 1)):
        refuses("past", SuffixDecoding, 3, past=bad)
        refuses("corpus", SAM, 3, corpus=bad)
    for bad in (5, "ab", (3,), (-1,)): refuses("text", SuffixDecoding(3).finished, bad)
    refuses("text", read([(0, 1)], 3).remove, (1, 0))
    refuses("second", Fallback, SAM(3), SAM(4))
    refuses("second", Fallback, SAM(3), Chain(random_table(4, 1), 2))
    for bad in (None, "SAM"): refuses("first", Fallback, bad, SAM(3)); refuses("second", Fallback, SAM(3), bad)


def test_exercises():
    "Seven are matched, and five copied from; without the text's end in the counts the same match wins, with twice the score"
    a = automaton("a"*8)
    assert a.length[a.link[a.last]] == 7 and a.copied(a.link[a.last], 3) == ["a"]*3
    assert next(k for k in range(7, 0, -1) if 8 - k >= 3) == 5
    n = counts(("abcabcab",), 8)
    share = lambda p, less: sum(Fraction(n["abcabcab"[-p:] + "cab"[:k]], n["abcabcab"[-p:]] - less) for k in range(1, min(p, 3) + 1))
    assert [share(p, 0) for p in range(1, 6)] == [Fraction(2, 3), Fraction(4, 3)] + [Fraction(3, 2)]*3
    assert [share(p, 1) for p in range(1, 6)] == [1, 2, 3, 3, 3]
