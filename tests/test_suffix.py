"Chapter 21b: suffix trees and automata against counts by hand, and the drafters that use them"
from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

import numpy as np
from hypothesis import example, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import examples, faithful, models, proves, seeds
from published import drafted, having
from specref import (Chain, Drafter, Enumerator, Fallback, loop_law, match, one_hot, PromptLookup,
                     random_table, reject, SAM, SuffixDecoding, TableModel, target_law)
from specref.draft.suffix import SuffixAutomaton, SuffixCursor, SuffixNode, SuffixTree

texts = st.lists(st.integers(0, 2), max_size=14).map(tuple)
collections = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), max_size=4).map(tuple)
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)

def counts(texts, depth):
    "How often each string of 1 to `depth` tokens occurs"
    spans = lambda t: [(i, j) for i in range(len(t)) for j in range(i + 1, min(i + depth, len(t)) + 1)]
    return Counter(t[i:j] for t in texts for i, j in spans(t))

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
    "The count of each string in the tree; the structure of the tree is asserted"
    found = {}
    for v, s in nodes(tree):
        assert tuple(v.text[v.start+v.length-len(s):v.start+v.length]) == s, "wrong text"
        below = [w.count for w in v.below.values()]
        assert sum(below) <= v.count and all(n < v.count for n in below), "nodes not merged"
        found |= {s[:len(s)-k]: v.count for k in range(v.length)}
    return found

def read(texts, tree):
    for t in texts: tree.read(t)
    return tree

# The tree

class Trie(SuffixTree):
    "A node for each token of each string"
    def onward(self, u, x):
        v = u.below.setdefault(x, SuffixNode(self.text, 0, 1, 0))
        v.text, v.start, v.count = self.text, len(self.text) - 1, v.count + 1
        return v

class OneText(SuffixTree):
    "The strings of the text itself, none of past texts"
    def read(self, text): self.held.append(tuple(text))

@proves("thm-suffix-tree")
@faithful("SuffixDecoding", part="SuffixTree", plain={"a trie": Trie, "one text": OneText})
@examples(80, collections, texts, st.integers(1, 7))
@example(((0, 1, 2),), (0, 1, 1), 3)
def test_counts_of_every_string(subject, past, text, depth):
    "After every token each string of up to `depth` tokens with its count, in two nodes a token"
    tree = read(past, subject(depth))
    for i, x in enumerate(text, 1):
        tree.add(x)
        assert spelled(tree) == counts((*past, text[:i]), depth)
        assert len(tree.ends) == min(i, depth) and len([*nodes(tree)]) <= 2*(i + sum(map(len, past)))
    for s in (text[-2:], (0, 1, 2), (2, 2, 2, 2)):
        if 1 <= len(s) <= depth: assert tree.count(s) == counts((*past, text), depth)[s]

class Kept(SuffixTree):
    "Texts are added, never removed"
    def remove(self, text): self.held.remove(tuple(text))

class Unmerged(SuffixTree):
    "A removed text leaves a node for each of its branches"
    def forget(self, ending):
        for k in range(len(ending)):
            (u, _), (v, j) = self.find(ending[:k]), self.find(ending[:k+1])
            v.count -= j == 1
            if not v.count: return u.below.pop(ending[k])

@proves("thm-suffix-tree")
@faithful("SuffixDecoding", part="SuffixTree", plain={"texts stay": Kept, "branches stay": Unmerged})
@examples(80, collections, collections, st.integers(1, 7), seeds)
@example(((0, 1), (0, 2)), ((1,),), 3, 0)
def test_removed_texts(subject, past, more, depth, seed):
    "Texts removed in any order leave the tree of the others; removed oldest first, no node refers to them"
    order = np.random.default_rng(seed).permutation(len(past))
    fresh = lambda texts: read(texts, SuffixTree(depth))
    for k in range(len(past) + 1):
        tree, others = read(past, subject(depth)), [past[i] for i in order[k:]]
        for i in order[:k]: tree.remove(list(past[i]))
        assert tree.root.form() == fresh(others).root.form() and spelled(tree) == counts(others, depth)
    tree = read(past, subject(depth))
    for k in range(len(past) + 1):
        now = (*past, *more)[k:]
        assert tree.hold(now) is tree and tree.root.form() == fresh(now).root.form()
        assert {tuple(v.text) for v, _ in nodes(tree)} <= set(now)
        assert len({id(v.text) for v, _ in nodes(tree)}) <= len(tree.held)

# Drafts

def by_hand(drafter, past, text):
    "(score, p, counts) of the best draft, all strings enumerated"
    n, best = counts(past, drafter.max_tree_depth), (0, 0, [])
    def widest(s): return sorted((-n[(*s, x)], x) for x in range(drafter.V) if n[(*s, x)])[:drafter.width]
    for p in range(1, min(len(text), drafter.max_tree_depth) + 1):
        m = text[len(text)-p:]
        if not n[m]: break
        reach, level = [], [m]
        while level:
            level = [(*s, x) for s in level for c, x in widest(s) if -c/n[m] >= drafter.min_token_prob]
            reach += [n[s] for s in level]
        budget = min(drafter.num_draft_tokens, floor(drafter.max_spec_factor*p + drafter.max_spec_offset))
        picked = sorted(reach, reverse=True)[:max(0, budget)]
        best = max(best, (Fraction(sum(picked), n[m]), p, picked), key=lambda g: g[:2])
    return best

@st.composite
def options(draw):
    some = lambda *xs: draw(st.sampled_from(xs))
    sizes = some(1, 2, 4, 6), some(2, 3, 5, 7), some(0., .5, 1., 2.5), some(-1., 0., 1.5)
    return *sizes, some(0., .1, 1/3, .5, 1.), some(1, 2, 3), some(0, .5, 1.5)

def suffix(options, past, kind=SuffixDecoding): return kind(3, *options, past=past, exact=True)

class LongestMatch(SuffixDecoding):
    "The commonest continuation of the longest match that has one, as of an n-gram map"
    def best_draft(self, tree, text):
        only, lengths = copy(self), range(1, min(len(text), self.max_tree_depth) + 1)
        found = {p: tree.find(text[-p:]) for p in lengths}
        longest = max((p for p, at in found.items() if at and tree.after(at)), default=0)
        object.__setattr__(only, "budget", lambda p: self.budget(p) if p == longest else 0)
        return SuffixDecoding.best_draft(only, tree, text)

class FixedBudget(SuffixDecoding):
    "As many tokens after a short match as after a long one"
    def budget(self, p): return self.num_draft_tokens

class OwnText(SuffixDecoding):
    "The draft of the text itself, not of past texts"
    def __call__(self, ctx, rng): return SuffixDecoding.__call__(replace(self, past=()), ctx, rng)

OPTIONS = ("num_draft_tokens", "max_tree_depth", "max_spec_factor", "max_spec_offset", "min_token_prob",
           "width", "min_score")

def lookup(kind):
    "Prompt lookup in place of a drafter: n-grams of at most three tokens of the text itself"
    class Lookup(kind):
        def __call__(self, ctx, rng): return PromptLookup(3, 3, self.num_draft_tokens, True)(ctx, rng)
    return Lookup

@proves("prop-suffix-score")
@faithful("SuffixDecoding", plain={
    "the longest match": drafted(LongestMatch), "a fixed budget": drafted(FixedBudget),
    "its own text": drafted(OwnText), "prompt lookup": drafted(lookup(SuffixDecoding))})
@examples(120, options(), collections, texts.filter(len))
@example((4, 5, .5, .5, .1, 1, 0), ((2, 0, 0), (0, 2, 0)), (0, 2, 1, 1, 2, 1, 0, 2))
def test_the_best_draft(subject, options, past, text):
    "The best of an enumeration: most expected tokens within the budget, over all matches and both trees"
    how = dict(zip(OPTIONS, options), past=past)
    drafter = subject.drafter(random_table(3, 0), how, past=((0,),), exact=True)
    own, shared = (drafter.best_draft(t, text) for t in (drafter.own(text), drafter.shared.hold(past)))
    for draft, past in ((own, (text,)), (shared, drafter.past)):
        score, p, counted = by_hand(drafter, past, text)
        assert draft[:2] == (score, p) and [n for _, n in draft[2]] == counted
        ends = [(t, i) for t in past for i in range(p, len(t) + 1) if t[i-p:i] == text[len(text)-p:]]
        agree = sum(t[i:i+len(path)] == path for t, i in ends for path, _ in draft[2])
        assert score == (Fraction(agree, len(ends)) if counted else 0)
    score, p, picked = shared if shared[0] > own[0] else own
    tree = drafter(text, Enumerator())
    paths = {path for path, _ in picked if score >= drafter.min_score}
    assert {tree.path(i) for i in range(1, len(tree))} == paths
    assert max(tree.depth) <= min(drafter.depth, drafter.max_tree_depth - p)
    assert all(len(tree.children(i)) <= drafter.width for i in range(len(tree)))

def test_thresholds_hold_at_equality():
    "A share of 1/4 is not below 1/4, as a fraction or a float, nor a score of 3/5 below .6"
    past = (0, 1), (0, 2), (0, 0, 2)   # a 0 is followed by 2 in half of the cases, by 0 and by 1 in a quarter
    how = dict(max_tree_depth=2, max_spec_factor=3., width=3, past=past)
    for share, wide in ((Fraction(1, 4), 3), (.25, 3), (.26, 1), (Fraction(1, 2), 1), (.51, 0)):
        assert len(SuffixDecoding(3, min_token_prob=share, **how)((1, 0), Enumerator())) - 1 == wide
    past = ((0, 1),)*3 + ((0, 2),)*2
    for score, some in ((.6, 1), (Fraction(3, 5), 1), (.61, 0)):
        assert len(SuffixDecoding(3, min_score=score, past=past)((0,), Enumerator())) - 1 == some

def test_a_finished_request_makes_another_drafter():
    "A value with one text more, without the oldest above the cap; earlier drafters do not change"
    how = dict(max_tree_depth=6, max_cached_requests=2, exact=True)
    made = [SuffixDecoding(3, **how)]
    for text in ((0, 1, 2, 0), (1, 1, 2), [np.int64(2), 2, 0]): made.append(made[-1].finished(text))
    assert [len(d.past) for d in made] == [0, 1, 2, 2] and made[3].past == ((1, 1, 2), (2, 2, 0))
    assert len(set(made)) == 4 and made[1] == SuffixDecoding(3, past=[[0, 1, 2, 0]], **how)
    for d in (made[3], made[0], made[2], made[1], made[3]):
        fresh = SuffixDecoding(3, past=d.past, **how)
        for text in ((0, 1), (1,), (2, 2)): assert d(text, Enumerator()) == fresh(text, Enumerator())

# The automaton

def automaton(text, links=list, a=None):
    a = a or SuffixAutomaton()
    a.link = links(a.link)
    for x in text: a.add(x)
    return a

class Counting(list):
    reads = 0
    def __getitem__(self, i):
        self.reads += 1
        return super().__getitem__(i)

def ends(text, s): return tuple(i for i in range(len(text)) if i + 1 >= len(s) and text[i+1-len(s):i+1] == s)

@proves("thm-automaton")
@examples(60, st.lists(st.integers(0, 2), max_size=12).map(tuple))
@example((0, 1, 2, 1, 2))
def test_states_are_classes_of_strings_with_the_same_ends(text):
    "After every token: one state a class, with its longest string, first end, link and transitions"
    for n in range(len(text) + 1):
        t, a, classes = text[:n], automaton(text[:n]), {}
        for s in counts((t,), n or 1): classes.setdefault(ends(t, s), []).append(s)
        def state(s):
            u = 0
            for x in s: u = a.below[u][x]
            return u
        states = {state(s) for strings in classes.values() for s in strings}
        assert len(a.link) == len(classes) + 1 == len(states) + 1
        for e, strings in classes.items():
            longest, shortest = max(strings, key=len), min(strings, key=len)
            u = state(longest)
            assert {state(s) for s in strings} == {u} and len(strings) == a.length[u] - len(shortest) + 1
            assert a.length[u] == len(longest) and a.first[u] == e[0] and a.link[u] == state(shortest[1:])
            assert a.below[u] == {x: state((*longest, x)) for x in range(3) if ends(t, (*longest, x))}
        assert a.below[0] == {x: state((x,)) for x in set(t)}

RUNS, TWO = ([0]*49 + [1])*20, np.random.default_rng(0).integers(0, 2, 1000).tolist()
HARD = [0]*1000, [0] + [1]*999, [0] + [1]*998 + [2], RUNS, TWO

class EveryEnding(SuffixAutomaton):
    "Follows all links after each token, as if all endings were counted"
    def add(self, x):
        super().add(x)
        p = self.last
        while p >= 0: p = self.link[p]

class FromTheRoot(SuffixAutomaton):
    "A cursor that goes back to the root before each token"
    def follow(self, at, x):
        s = at[0]
        while s > 0: s = self.link[s]
        return super().follow(at, x)

@proves("thm-automaton")
@faithful("SAM", part="SuffixAutomaton", plain={"every ending": EveryEnding, "from the root": FromTheRoot})
def test_linear_work(subject):
    "At most 2n - 1 states, 3n transitions, 4n links followed; as few for a cursor on another text"
    for text in HARD:
        a, n = automaton(text, Counting, subject()), len(text)
        clones = len(a.link) - 1 - n
        assert len(a.link) <= 2*n - 1 and sum(map(len, a.below)) <= 3*n and a.link.reads - clones <= 4*n
        a.link.reads, cursor = 0, SuffixCursor(a)
        for x in TWO + [7] + RUNS: cursor.add(x)
        assert a.link.reads <= 2*n*2

def longest(found, text): return max(k for k in range(len(text) + 1) if not k or found(text[len(text)-k:]))

class Unsplit(SuffixAutomaton):
    "A string shares the state of a longer one with more ends"
    def clone(self, p, x, q): return q

class ThreeGrams(SuffixAutomaton):
    "Matches of at most three tokens, as of prompt lookup"
    def follow(self, at, x):
        s, n = super().follow(at, x)
        return s, min(n, 3)

@proves("cor-cursor")
@faithful("SAM", part="SuffixAutomaton", plain={"without clones": Unsplit, "n-grams": ThreeGrams})
@examples(80, texts, texts)
@example((0, 1, 2, 0, 1, 2, 0, 2, 1), (1, 2, 0, 1))
def test_matched_length(subject, text, other):
    "At every step the longest ending that occurred earlier, by the link and by a cursor; of another text too"
    a = subject()
    ahead = SuffixCursor(a)
    for i, x in enumerate(text, 1):
        ahead.add(x)
        a.add(x)
        k, link = longest(lambda s: len(ends(text[:i], s)) > 1, text[:i]), a.link[a.last]
        assert ahead.at[1] == a.length[link] == k
        if k: assert a.first[link] == ends(text, text[i-k:i])[0] == a.first[ahead.at[0]]
    beside = SuffixCursor(a)
    for i, x in enumerate(other, 1):
        beside.add(x)
        k = longest(lambda s: ends(text, s), other[:i])
        assert beside.at[1] == k and (k == 0 or a.first[beside.at[0]] == ends(text, other[i-k:i])[0])

def copy_by_hand(texts, string, n):
    "The tokens after the first place of the longest ending with enough of them, else of the one with most"
    places = [next((t, i) for t in texts for i in ends(t, string[j:])) for j in range(len(string))]
    follow = [t[i+1:][:n] for t, i in places]
    return next((f for f in follow if len(f) == n), max(follow, key=len, default=()))

@examples(80, texts.filter(len), st.integers(1, 5))
def test_copied(text, n):
    "By the automaton and by hand"
    a = automaton(text)
    s = a.link[a.last]
    assert tuple(a.copied(s, n)) == copy_by_hand([text], text[len(text)-a.length[s]:], n)

class Unbiased(SAM):
    def matches(self, text): return SAM.matches(replace(self, len_bias=0), text)

@faithful("SAM", plain={"prompt lookup": having(first=lookup(SAM)), "no bias": having(first=Unbiased)})
@examples(80, collections, texts.filter(len), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
@example(((2, 1, 0, 0, 2), (2, 1, 0, 1)), (0, 1, 0, 1, 2, 1, 0), 3, 3, 1)
def test_the_switch(subject, corpus, text, n, threshold, bias):
    "A copy only when the longer match reaches the threshold, the corpus less its bias; within its text"
    how = dict(threshold=threshold, len_bias=bias, corpus=corpus)
    sam = replace(subject.drafter(random_table(3, 0), gamma=n, past=((0,),), exact=True).first, **how)
    here = longest(lambda s: len(ends(text, s)) > 1, text)
    there = longest(lambda s: any(ends(t, s) for t in corpus), text)
    assert [m[0] for m in sam.matches(text)] == [here, there - bias]
    tokens = tuple(sam(text, Enumerator()).token[1:])
    if max(here, there - bias) < threshold: assert not tokens
    elif here >= there - bias: assert tokens == copy_by_hand([text], text[len(text)-here:], n)
    else: assert tokens == copy_by_hand(corpus, text[len(text)-there:], n)

@faithful("SAM", plain={
    "any match": having(first=lambda sam: replace(sam, threshold=1)),
    "no bias": having(first=lambda sam: replace(sam, len_bias=0)),
    "prompt lookup": having(first=lambda sam: PromptLookup(sam.V))})
def test_the_switch_at_five(subject):
    "The published numbers: after a match of four the other drafter, from five a copy; in the corpus ten"
    model, again = TableModel(30, lambda text: one_hot(29, 30)), tuple(range(12))
    def built(*past): return subject.drafter(model, dict(second=Chain(model, 2)), past=past)
    for k in range(1, 9):
        tree = built((28,))((*again, 20, *again[2:2+k]), Enumerator())
        assert tree.token[1:] == ([29, 29] if k < 5 else [*again[2+k:], 20, *again[2:2+k]])
    either = built(again, again[::-1])
    for k in range(1, 12):
        assert either((20, *again[:k]), Enumerator()).token[1:] == ([29, 29] if k < 10 else [*again[k:]])

# The drafters in the loop

@dataclass(frozen=True)
class Noted(Drafter):
    "Stores every round passed to `learn`"
    depth: int
    models: tuple
    rounds: tuple = ()
    def learn(self, round): return replace(self, rounds=(*self.rounds, round))

def test_a_fallback_updates_both():
    "Both drafters are updated after every round; it has the models of both, and the larger depth"
    one, two = random_table(3, 0), random_table(3, 1)
    either = Fallback(Noted(2, (one,)), Noted(1, (two,)))
    after = either.learn("round").learn("next")
    assert either.models == after.models == (one, two) and either.depth == after.depth == 2
    assert after.first.rounds == after.second.rounds == ("round", "next") and not either.first.rounds

@proves("prop-either")
@examples(20, models(), contexts, options(), collections, collections, st.integers(1, 2),
          st.sampled_from([reject, match]))
def test_exact(pair, ctx, options, past, corpus, threshold, verify):
    "Each, alone or with a fallback, is exact and has correct edges"
    tree, sam = suffix(options, past), SAM(3, 3, threshold, 1, corpus, exact=True)
    either = Fallback(sam, Chain(pair[1], 2)), Fallback(tree, Fallback(sam, Chain(pair[1], 1)))
    for drafter in (tree, sam, *either):
        drafter_contract(drafter, ctx)
        verifier_contract(pair[0], drafter, verify, ctx, 3)
        assert loop_law(pair[0], drafter, reject, ctx, 2) == target_law(pair[0], ctx, 2)
