"Chapter 21: prompt lookup against searches by hand and the generator of transformers, its index read along, and its exactness"
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import faithful, models, proves, refuses, seeds
from specref.core.rng import Enumerator, Seeded, law_of
from specref.core.law import one_hot
from specref.core.loop import generate, loop_law, match, rounds
from specref.draft.lookup import MostFrequent, NgramPlaces, PromptLookup, IncrementalReader, continuation, first_place, last_place, longest_ending
from specref.models.embedded import DOMAINS, embedded, prompts
from specref.verify.reject import reject
from specref.core.target import TableModel, target_law
from specref.core.tree import Tree

texts = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
takes = st.sampled_from([first_place, last_place, MostFrequent(), MostFrequent(2, 2/3)])
domains = pytest.mark.parametrize("domain", DOMAINS)


def by_hand(text, most, wanted):
    "All pairs of an earlier place and an ending, the longest ending first, then the first place"
    ends = [(-k, i) for k in range(1, most + 1) for i in range(len(text)) if i + k < len(text) and text[i:i+k] == text[len(text)-k:]]
    if not ends: return text[:0]
    k, i = min(ends)
    return text[i-k:][:wanted]


def by_search(text, most, fewest=1, hits=1, tail=1, forbidden=()):
    "The longest ending with enough places, and these, by looking everywhere for each"
    for k in range(min(most, len(text)), fewest - 1, -1):
        places = [e for e in range(k, len(text) - tail + 1) if text[e-k:e] == text[len(text)-k:] and text[e] not in forbidden]
        if len(places) >= hits: return k, places
    return 0, []


@settings(max_examples=500)
@given(texts, st.integers(1, 5), st.integers(1, 6))
def test_continuation(text, most, wanted):
    "The longest ending first, the first earlier place, never the ending itself, a short tail allowed: on tuples and on strings"
    assert continuation(text, most, wanted) == by_hand(text, most, wanted)
    assert "".join(continuation("".join(map(str, text)), most, wanted)) == "".join(map(str, by_hand(text, most, wanted)))


@pytest.mark.parametrize("text, offer", [("abcdab", "cdab"), ("abab", "ab"), ("aaaa", "a"), ("xaya", "ya"), ("abxabyab", "xaby"), ("abxbyab", "xbya")])
def test_examples(text, offer): assert continuation(text, 3, 4) == offer


def test_no_match():
    "Nothing repeated, one token, no token: nothing is offered"
    for text in ("abcd", "a", ""): assert continuation(text, 3, 4) == () and longest_ending(text, 1, 3) == longest_ending(text, 1, 10**12) == (0, len(text))


# The failure table

class Counted:
    "A token that counts its comparisons"
    seen = 0
    def __init__(self, x): self.x = x
    def __eq__(self, other):
        Counted.seen += 1
        return self.x == other.x


@proves("thm-failure-table")
@settings(max_examples=2000)
@given(st.lists(st.integers(0, 1), max_size=40).map(tuple) | st.lists(st.integers(0, 2), max_size=25).map(tuple), st.integers(1, 8), st.integers(0, 3))
def test_failure_table(text, most, short):
    "The longest ending within the bounds and its first place, as by brute force, with at most three comparisons a token"
    fewest, Counted.seen = max(1, most - short), 0
    k, places = by_search(text, most, fewest)
    assert longest_ending(text, fewest, most) == (k, places[0] if places else len(text))
    longest_ending([Counted(x) for x in text], fewest, most)
    assert Counted.seen <= 3 * len(text)


@proves("thm-failure-table")
@pytest.mark.parametrize("most", [1, 2, 5, 1000])
def test_failure_table_is_linear_on_hard_texts(most):
    "Runs, almost-runs and Fibonacci's word"
    a, b = "a", "ab"
    while len(b) < 2000: a, b = b, b + a
    for text in ("a" * 2000, ("a" * 40 + "b") * 50, "b" + "a" * 2000, b):
        Counted.seen = 0
        longest_ending([Counted(x) for x in text], 1, most)
        assert Counted.seen <= 3 * len(text)


# The index, and reading along

@settings(max_examples=500)
@given(texts, st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.sampled_from([(), (0,), (0, 2)]))
def test_places(text, most, fewest, hits, tail, forbidden):
    "The same places as by looking everywhere, with at most `most` runs and `most` places a token"
    index = NgramPlaces(most, tail, forbidden)
    for x in text: index.add(x)
    assert index.longest(fewest, hits) == by_search(text, most, fewest, hits, tail, forbidden)
    assert len(index.below) <= most * len(text) and sum(map(len, index.places.values())) <= most * len(text)


class Noted:
    "What was read, with a count of all tokens ever read"
    work = 0
    def __init__(self): self.seen = []
    def add(self, x):
        self.seen.append(x)
        Noted.work += 1


def state(index): return index.text, index.below, {k: v for k, v in index.places.items() if v}, list(index.runs)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 14), texts), min_size=1, max_size=6), st.integers(1, 3))
def test_reading_along_is_reading_anew(steps, tail):
    "Texts that go on, go back, fork or repeat: the index is that of the last text alone; a text that goes on costs its new tokens, any other its length"
    kept, notes, before, Noted.work = IncrementalReader(lambda: NgramPlaces(3, tail)), IncrementalReader(Noted), (), 0
    for cut, more in steps:
        text, work = before[:cut] + more, Noted.work
        fresh = NgramPlaces(3, tail)
        for x in text: fresh.add(x)
        assert state(kept(text)) == state(fresh) and tuple(notes(text).seen) == text
        on = text[:len(before)] == before
        assert Noted.work - work == len(text) - on * len(before)
        before = text


def test_a_list_that_grows_is_read_as_it_is_now():
    "Lists and arrays are texts too, and what was read is no alias of them"
    lookup, text = PromptLookup(5), [0, 1, 2, 0, 1]
    assert lookup.find(text) == lookup.find(np.array(text)) == (2, 0, 1)
    text.append(2)
    assert lookup.find(text) == (0, 1, 2)


def test_reading_costs_the_new_tokens():
    "A text of n tokens in any number of pieces is read once; `find` reads nothing twice"
    reading, Noted.work, text = IncrementalReader(Noted), 0, tuple(i * i % 7 for i in range(3000))
    for n in range(0, 3001, 3): reading(text[:n])
    assert Noted.work == 3000
    lookup = PromptLookup(7)
    for n in range(10, 3001, 10): lookup.find(text[:n])
    assert len(lookup.reading.read.text) == 3000 and sum(map(len, lookup.reading.read.places.values())) <= 3 * 3000


# The drafter

@settings(max_examples=100)
@given(texts, st.integers(1, 3), st.integers(1, 4))
def test_the_drafter(ctx, most, wanted):
    "A chain of point masses with the tokens that were found, a function of the text alone"
    lookup, tokens = PromptLookup(3, most, wanted, exact=True), continuation(ctx, most, wanted)
    tree = lookup(ctx, Enumerator())
    assert tree.parent == list(range(-1, len(tokens))) and tuple(tree.token[1:]) == tokens
    assert all(tuple(q) == tuple(one_hot(x, 3)) for q, x in zip(tree.law[1:], tree.token[1:]))
    drafter_contract(lookup, ctx)


@st.composite
def variants(draw):
    most = draw(st.integers(1, 4))
    return PromptLookup(3, most, draw(st.integers(1, 3)), True, draw(st.integers(1, most)), draw(takes), draw(st.integers(1, 2)), draw(st.integers(1, 3)),
                        draw(st.sampled_from([1, 1.5, 10])), draw(st.sampled_from([(), (2,)])), draw(st.sampled_from([(), (0,), (1, 2)])))


@settings(max_examples=400)
@given(variants(), texts)
def test_variants(d, text):
    "Every argument does what it says, against the search everywhere"
    k, places = by_search(text, d.max_matching_ngram_size, d.min_matching_ngram_size, d.hits, d.tail, d.forbidden)
    num = min(d.num_draft_tokens, int(d.per_match * k))
    tails = {e: text[e:e+num] for e in places}
    if isinstance(d.take, MostFrequent):
        seen = list(tails.values())[-d.take.window:]
        best = max(places[-d.take.window:], key=lambda e: (seen.count(tails[e]), -e), default=None)
        if best is not None and seen.count(tails[best]) < d.take.share * len(seen): best = None
    else: best = max(places, default=None) if d.take is last_place else min(places, default=None)
    want = () if best is None else tails[best]
    cut = next((i for i, x in enumerate(want) if x in d.stop or x in d.forbidden), len(want))
    assert d.find(text) == want[:cut] and not {*d.stop, *d.forbidden} & {*d.find(text)} and len(d.find(text)) <= d.depth


@settings(max_examples=300)
@given(texts, st.integers(1, 4), st.integers(1, 6))
def test_one_answer_three_ways(text, most, wanted):
    "The quadratic search, the failure table and the index offer the same"
    at = longest_ending(text, 1, most)[1]
    assert continuation(text, most, wanted) == text[at:at + wanted] == PromptLookup(3, most, wanted).find(text)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=30).map(tuple), st.integers(1, 4), st.integers(1, 8), st.sets(st.integers(0, 4), min_size=1, max_size=2), st.sets(st.integers(0, 4), max_size=2))
def test_transformers_offers_the_same(text, most, wanted, stop, forbidden):
    "With its end tokens and its forbidden tokens, on any text"
    import torch
    from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
    processors = LogitsProcessorList([SuppressTokensLogitsProcessor(sorted(forbidden))]) if forbidden else None
    theirs = PromptLookupCandidateGenerator(torch.tensor(sorted(stop)), wanted, most, 10**6, processors, 5).get_candidates(torch.tensor([text]))[0]
    assert tuple(theirs[0, len(text):].tolist()) == PromptLookup(5, most, wanted, stop=frozenset(stop), forbidden=tuple(forbidden)).find(text)


@settings(max_examples=300)
@given(texts, st.integers(1, 3), st.integers(1, 3))
def test_the_original_wants_a_whole_tail(text, most, more):
    "The first place that all tokens wanted follow, and that does not touch the ending, when more are wanted than matched"
    n, wanted = len(text), most + more
    ends = [(k, i + k) for k in range(most, 0, -1) for i in range(n) if text[i:i+k] == text[n-k:] and i + k + wanted <= n and i + k < n - k]
    assert PromptLookup(3, most, wanted, tail=wanted).find(text) == (text[ends[0][1]:][:wanted] if ends else ())


def test_longest_match_wins():
    "Where one token and three tell different stories, three are believed; where only one occurs, it is"
    text = (1, 9, 5, 6, 1, 7, 8, 5, 6, 1)
    assert PromptLookup(10, 3, 1).find(text) == (7,) and PromptLookup(10, 1, 1).find(text) == (9,)
    assert PromptLookup(10, 3, 1).find((1, 9, 5, 2, 1)) == (9,) and PromptLookup(10, 3, 1, min_matching_ngram_size=2).find((1, 9, 5, 2, 1)) == ()


def test_a_drafter_is_a_value():
    "Equal and hashed alike whatever it has read"
    a, b = PromptLookup(3, take=MostFrequent()), PromptLookup(3, take=MostFrequent())
    a((0, 1, 0, 1), Enumerator())
    assert a == b and hash(a) == hash(b) and a != PromptLookup(3) and repr(a) == repr(b)
    assert PromptLookup(7) == PromptLookup(7, 3, 10, False)


# The law

@proves("thm-lookup")
@settings(max_examples=80)
@given(models(), contexts, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_lookup_is_exact_and_kept_with_the_weight_of_its_token(pair, ctx, most, wanted, n):
    "Under both judges the law is the target's, and each offered token is accepted with its weight"
    target, lookup = pair[0], PromptLookup(3, most, wanted, exact=True)
    for verify in (reject, match):
        verifier_contract(target, lookup, verify, ctx, n)
        ends, sure, text = law_of(lambda rng: next(rounds(target, lookup, verify, ctx, rng)).verdict.node), 1, ctx
        for i, x in enumerate(lookup(ctx, Enumerator()).token[1:], 1):
            sure, text = sure * target.law(text)[x], (*text, x)
            assert sum(w for k, w in ends.items() if k >= i) == sure


@proves("thm-lookup")
@settings(max_examples=60)
@given(models(), variants(), contexts, st.integers(1, 3))
def test_every_variant_is_exact(pair, lookup, ctx, n):
    "Whole loops in fractions; one drafter serves texts that fork"
    assert loop_law(pair[0], lookup, reject, (0, 1, 0) + ctx, n) == target_law(pair[0], (0, 1, 0) + ctx, n)
    drafter_contract(lookup, ctx)


@proves("thm-lookup")
@settings(max_examples=40)
@given(models(), seeds)
def test_any_function_of_the_context(pair, seed):
    "A tree of point masses that is any function of the text: both judges give the same law of verdicts"
    def draft(ctx, rng):
        tree, x = Tree(ctx), hash((seed, *ctx))
        for i in range(x % 4): tree.add(i and (x >> i) % i, (x >> 2*i) % 3, one_hot((x >> 2*i) % 3, 3, exact=True))
        return tree
    tokens = [law_of(lambda rng: next(rounds(pair[0], draft, verify, (0,), rng)).tokens) for verify in (reject, match)]
    assert tokens[0] == tokens[1] and loop_law(pair[0], draft, reject, (0,), 2) == target_law(pair[0], (0,), 2)


# What it is for

def test_a_text_that_repeats_is_copied():
    "A target that goes on as before accepts whole runs: as many as were offered, and one more"
    out = generate(TableModel(4, lambda text: one_hot((text[-1] + 1) % 4, 4)), PromptLookup(4, 2, 3), reject, (0, 1, 2, 3, 0, 1, 2), 16, Seeded(0))
    assert out == tuple((3 + i) % 4 for i in range(16)) and out.ledger.mean_acceptance_length == 4 and len(out.ledger.rounds) == 4


def test_noise_is_plain_decoding():
    "On tokens drawn at random nothing is found: as many target calls as tokens, and no other model"
    import numpy as np
    book = np.random.default_rng(3).integers(0, 10**4, 300).tolist()
    ledger = generate(TableModel(10**4, lambda text: one_hot(book[len(text)], 10**4)), PromptLookup(10**4), reject, book[:50], 250, Seeded(0)).ledger
    assert len(ledger.rounds) == ledger.models["target"].calls == 250 and list(ledger.models) == ["target"] and ledger.mean_acceptance_length == 1


def test_a_transformer_that_copies_gives_m_plus_one():
    "A passage twice and its beginning: ten offered and eleven tokens, every round"
    target, passage = embedded(temperature=0), prompts("code", 1, length=48)[0]
    seen = [r for _, r in zip(range(3), rounds(target, PromptLookup(target.V), reject, passage * 2 + passage[:8], Seeded(0)))]
    assert [len(r.tokens) for r in seen] == [11] * 3 and sum((r.tokens for r in seen), ()) == (passage * 2)[8:41]


@faithful("n-gram map")
def test_what_was_seen_once_is_not_offered_and_what_came_oftenest_is():
    "Two hits are wanted; the commonest continuation is offered although another came first, another last, and a longer ending came once"
    d = PromptLookup(10, take=MostFrequent(), hits=2)
    once, twice = (1, 2, 3, 4, 1, 2), (1, 2, 3, 4, 1, 2, 3, 5, 1, 2)
    assert d.find(once) == () and PromptLookup(10).find(once) == (3, 4, 1, 2) and d.find(twice) != ()
    votes = (1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2, 9, 6, 1, 2)
    one = dict(num_draft_tokens=1, max_matching_ngram_size=2)
    assert [PromptLookup(10, take=take, hits=2, **one).find(votes) for take in (first_place, MostFrequent(), last_place)] == [(7,), (8,), (9,)]
    assert PromptLookup(10, take=MostFrequent(share=2/3), **one).find(votes) == () and PromptLookup(10, take=MostFrequent(2), **one).find(votes) == (8,)
    assert [MostFrequent(share=share)((2, 5), (1, 2, 7, 1, 2, 8, 1, 2), 1) for share in (.5, .51)] == [2, None]
    hundred = (0,)*7 + tuple(range(1, 94))   # 7 of 100, where .07 * 100 > 7
    assert MostFrequent(100, .07)(range(100), hundred, 1) == 0 and [MostFrequent(share=s)((0, 1, 2), (0, 1, 2), 1) for s in (Fraction(1, 3), .34)] == [0, None]
    longer = (1, 2, 7, 1, 2, 8, 1, 2, 8, 6, 1, 2, 9, 6, 1, 2)
    assert PromptLookup(10, 3, 1).find(longer) == (9,) and PromptLookup(10, 3, 1, take=MostFrequent(), hits=2).find(longer) == (8,)


@faithful("n-gram map")
@domains
def test_the_map_counts_what_a_transformer_wrote(domain):
    "Every draft of a real run is a continuation of an ending that occurred twice, and none is commoner; a lookup of one hit offers more often"
    target, prompt = embedded(temperature=0), prompts(domain, 1)[0]
    d, offered = PromptLookup(target.V, take=MostFrequent(), hits=2), 0
    for _, r in zip(range(14), rounds(target, d, reject, prompt * 2, Seeded(0))):
        text, draft = r.tree.ctx, tuple(r.tree.token[1:])
        k, places = by_search(text, 3, hits=2)
        tails = [text[e:e+10] for e in places]
        assert draft == max(tails, key=tails.count, default=()) and (not draft or len(places) > 1)
        assert draft == () or PromptLookup(target.V).find(text) != ()
        offered += bool(draft)
    assert offered > 3


def test_exercises():
    "Solutions: the end of a run; a draft that is the target's own sample; a text of period d"
    assert continuation("aaaa", 3, 4) == "a"
    for d, m in ((1, 4), (3, 9), (5, 9)):
        text = tuple(range(d)) * 40
        for kw, want in ((dict(take=last_place), d), ({}, m), (dict(take=last_place, tail=m), m)):
            assert len(PromptLookup(d, 3, m, **kw).find(text[:-5])) == want


def test_doors():
    for bad in (0, -1, 1.5, None):
        refuses("V", PromptLookup, bad)
        refuses("max_matching_ngram_size", PromptLookup, 3, bad)
        for name in ("num_draft_tokens", "min_matching_ngram_size", "hits", "tail"): refuses(name, PromptLookup, 3, **{name: bad})
        refuses("most", NgramPlaces, bad)
        refuses("tail", NgramPlaces, 3, bad)
        refuses("fewest", longest_ending, "ab", bad, 3)
        refuses("window", MostFrequent, bad)
    refuses("max_matching_ngram_size", PromptLookup, 3, 3, min_matching_ngram_size=4)
    refuses("most", longest_ending, "ab", 3, 2)
    for bad in (-.1, 1.1, float("nan"), "x", None): refuses("share", MostFrequent, 4, bad)
    for bad in (0, .5, float("nan"), "a", None): refuses("per_match", PromptLookup, 3, per_match=bad)
    refuses("take", PromptLookup, 3, take="first")
    for name in ("stop", "forbidden"):
        for bad in (3, (3,), (-1,), (.5,), ([1],), "a", None): refuses(name, PromptLookup, 3, **{name: bad})
        assert hash(PromptLookup(3, **{name: [1, 0, 1]})) == hash(PromptLookup(3, **{name: (0, 1)}))
    refuses("x", PromptLookup(2), (2, 0, 2), Enumerator())
