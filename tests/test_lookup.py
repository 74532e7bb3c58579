"Chapter 21: prompt lookup against searches by hand and the generator of transformers, and its exactness"
import numpy as np
from hypothesis import strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import examples, faithful, models, proves, seeds
from published import having
from specref import (embedded, Enumerator, law_of, loop_law, match, one_hot, PromptLookup, prompts, reject,
                     rounds, Seeded, target_law, Tree)
from specref.core.loop import as_drafter
from specref.draft.lookup import (IncrementalReader, MostFrequent, NgramPlaces, continuation, first_place,
                                  last_place, longest_ending)

texts = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)

def by_search(text, most, fewest=1, hits=1, tail=1, forbidden=()):
    "The longest ending with enough occurrences, and their places, by exhaustive search"
    for k in range(min(most, len(text)), fewest - 1, -1):
        ends = [e for e in range(k, len(text) - tail + 1) if text[e-k:e] == text[len(text)-k:]]
        places = [e for e in ends if text[e] not in forbidden]
        if len(places) >= hits: return k, places
    return 0, []

# The longest ending, three ways

class Counted:
    "A token that counts its comparisons"
    seen = 0
    def __init__(self, x): self.x = x
    def __eq__(self, other):
        Counted.seen += 1
        return self.x == other.x

def comparisons(text, fewest, most):
    Counted.seen = 0
    longest_ending([Counted(x) for x in text], fewest, most)
    return Counted.seen

@proves("thm-failure-table")
@examples(300, st.lists(st.integers(0, 1), max_size=40).map(tuple) | texts, st.integers(1, 8),
          st.integers(0, 3))
def test_failure_table(text, most, short):
    "The longest ending within the bounds and its first place, in three comparisons a token"
    fewest = max(1, most - short)
    k, places = by_search(text, most, fewest)
    assert longest_ending(text, fewest, most) == (k, places[0] if places else len(text))
    assert comparisons(text, fewest, most) <= 3 * len(text)

@proves("thm-failure-table")
def test_failure_table_is_linear_on_hard_texts():
    "Runs, almost-runs and Fibonacci's word"
    a, b = "a", "ab"
    while len(b) < 2000: a, b = b, b + a
    for text in ("a" * 2000, ("a" * 40 + "b") * 50, "b" + "a" * 2000, b):
        for most in (2, 5, 1000): assert comparisons(text, 1, most) <= 3 * len(text)

@examples(150, texts, st.integers(1, 4), st.integers(1, 6))
def test_three_implementations_agree(text, most, wanted):
    "The quadratic search on tuples and strings, the index and brute force give the same draft"
    places = by_search(text, most)[1]
    want = text[places[0]:places[0] + wanted] if places else ()
    assert continuation(text, most, wanted) == want == PromptLookup(3, most, wanted).find(text)
    assert "".join(continuation("".join(map(str, text)), most, wanted)) == "".join(map(str, want))

# The index, read token by token

@examples(150, texts, st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4),
          st.sampled_from([(), (0,), (0, 2)]))
def test_places(text, most, fewest, hits, tail, forbidden):
    "The places of an exhaustive search, with at most `most` n-grams and `most` places a token"
    index = NgramPlaces(most, tail, forbidden)
    for x in text: index.add(x)
    assert index.longest(fewest, hits) == by_search(text, most, fewest, hits, tail, forbidden)
    assert len(index.below) <= most * len(text) and sum(map(len, index.places.values())) <= most * len(text)

class Noted:
    "The tokens read, with a count of all that were ever read"
    work = 0
    def __init__(self): self.seen = []
    def add(self, x):
        self.seen.append(x)
        Noted.work += 1

@examples(60, st.lists(st.tuples(st.integers(0, 14), texts), min_size=1, max_size=6))
def test_the_reader(steps):
    "Texts that continue, go back, fork or repeat: it holds the last; a continued one costs its new tokens"
    reader, before = IncrementalReader(Noted), ()
    for cut, more in steps:
        text, work = before[:cut] + more, Noted.work
        assert tuple(reader(list(text)).seen) == text
        assert Noted.work - work == len(text) - len(before) * (text[:len(before)] == before)
        before = text

# The drafter

@st.composite
def variants(draw):
    most = draw(st.integers(1, 4))
    takes = st.sampled_from([first_place, last_place, MostFrequent(), MostFrequent(2, 2/3)])
    return PromptLookup(3, most, draw(st.integers(1, 3)), True, draw(st.integers(1, most)), draw(takes),
                        draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1.5, 10])),
                        draw(st.sampled_from([(), (2,)])), draw(st.sampled_from([(), (0,), (1, 2)])))

@examples(200, variants(), texts)
def test_variants(d, text):   # noqa: PLR0915  one exhaustive search
    "Every argument, against an exhaustive search; a chain of point masses"
    most, fewest = d.max_matching_ngram_size, d.min_matching_ngram_size
    k, places = by_search(text, most, fewest, d.hits, d.tail, d.forbidden)
    num = min(d.num_draft_tokens, int(d.per_match * k))
    tails = {e: text[e:e+num] for e in places}
    if isinstance(d.take, MostFrequent):
        seen = [tails[e] for e in places[-d.take.window:]]
        best = max(places[-d.take.window:], key=lambda e: (seen.count(tails[e]), -e), default=None)
        if best is not None and seen.count(tails[best]) < d.take.share * len(seen): best = None
    else: best = max(places, default=None) if d.take is last_place else min(places, default=None)
    want = () if best is None else tails[best]
    cut = next((i for i, x in enumerate(want) if x in d.stop or x in d.forbidden), len(want))
    assert d.find(text) == want[:cut] and len(want[:cut]) <= d.depth
    tree = d(text, Enumerator())
    assert tree.parent == list(range(-1, cut)) and tuple(tree.token[1:]) == want[:cut]
    assert all(tuple(q) == tuple(one_hot(x, 3)) for q, x in zip(tree.law[1:], tree.token[1:]))

@examples(50, st.lists(st.integers(0, 4), min_size=2, max_size=30).map(tuple), st.integers(1, 4),
          st.integers(1, 8), st.sets(st.integers(0, 4), min_size=1, max_size=2),
          st.sets(st.integers(0, 4), max_size=2))
def test_transformers_drafts_the_same(text, most, wanted, stop, forbidden):
    "With its end tokens and its forbidden tokens, on any text"
    import torch
    from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
    suppress = [SuppressTokensLogitsProcessor(sorted(forbidden))] if forbidden else []
    processors = LogitsProcessorList(suppress)
    generator = PromptLookupCandidateGenerator(torch.tensor(sorted(stop)), wanted, most, 10**6, processors, 5)
    theirs = tuple(generator.get_candidates(torch.tensor([text]))[0][0, len(text):].tolist())
    assert theirs == PromptLookup(5, most, wanted, stop=stop, forbidden=forbidden).find(text)

def test_a_drafter_is_a_value():
    "Equal, with equal hashes, after any text; a list that changes later does not change it"
    a, b, text = PromptLookup(5, take=MostFrequent()), PromptLookup(5, take=MostFrequent()), [0, 1, 2, 0, 1]
    assert a.find(text) == a.find(np.array(text)) == (2, 0, 1)
    text.append(2)
    assert a.find(text) == (0, 1, 2)
    assert a == b and hash(a) == hash(b) and a != PromptLookup(5) and repr(a) == repr(b)
    assert hash(PromptLookup(3, stop=[1, 0, 1])) == hash(PromptLookup(3, stop=(0, 1)))

# The distribution

@proves("thm-lookup")
@examples(25, models(), contexts, variants(), st.integers(1, 3))
def test_lookup_is_exact(pair, ctx, lookup, n):
    "Under both verifiers the distribution is the target's; a draft token is accepted with its probability"
    target = pair[0]
    drafter_contract(lookup, ctx)
    for verify in (reject, match):
        verifier_contract(target, lookup, verify, ctx, n)
        ends = law_of(lambda rng: next(rounds(target, lookup, verify, ctx, rng)).verdict.node)
        weight, text = 1, ctx
        for i, x in enumerate(lookup(ctx, Enumerator()).token[1:], 1):
            weight, text = weight * target.law(text)[x], (*text, x)
            assert sum(w for k, w in ends.items() if k >= i) == weight
    assert loop_law(target, lookup, reject, (0, 1, 0) + ctx, n) == target_law(target, (0, 1, 0) + ctx, n)

@proves("thm-lookup")
@examples(25, models(), seeds)
def test_any_function_of_the_context(pair, seed):
    "A tree of point masses that is any function of the text: both verifiers give the same distribution"
    def draft(ctx, rng):
        tree, noise = Tree(ctx), np.random.default_rng([seed, *ctx])
        for i in range(noise.integers(4)):
            x = int(noise.integers(3))
            tree.add(int(noise.integers(i + 1)), x, one_hot(x, 3, exact=True))
        return tree
    def tokens(verify):
        return law_of(lambda rng: next(rounds(pair[0], as_drafter(draft), verify, (0,), rng)).tokens)
    assert tokens(reject) == tokens(match)
    assert loop_law(pair[0], draft, reject, (0,), 2) == target_law(pair[0], (0,), 2)

# Thresholds and a real model

def test_a_share_at_equality():
    "7 of 100 are a share of .07, though .07 * 100 > 7"
    text = (0,)*7 + tuple(range(1, 94))
    assert [MostFrequent(100, share)(range(100), text, 1) for share in (.07, .08)] == [0, None]

@faithful("n-gram map", plain={
    "prompt lookup": "prompt lookup", "the first place": having(take=lambda most_frequent: first_place),
    "the last place": having(take=lambda most_frequent: last_place)})
def test_the_map_on_a_transformers_text(subject):
    "Every draft of a real run continues an ending that occurred twice, and no continuation is more frequent"
    target, (a, b, c, d) = embedded(temperature=0), prompts("english", 4, 12)
    prompt = a + b + a + c + a + c + a + d + a   # first b, then c twice, at last d
    system, offered = subject(target), 0
    for _, r in zip(range(10), rounds(target, system.drafter, system.verify, prompt, Seeded(0))):
        text, draft = r.tree.ctx, tuple(r.tree.token[1:])
        tails = [text[e:e+10] for e in by_search(text, 3, hits=2)[1]]
        assert draft == max(tails, key=tails.count, default=()) and (not draft or len(tails) > 1)
        offered += bool(draft)
    assert offered > 3
