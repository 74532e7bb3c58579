"Chapter 21: prompt lookup against a search by hand, and its exactness"
import pytest
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import models, proves, refuses, seeds
from specref.chance import Branch, Seeded, law_of
from specref.law import point
from specref.loop import generate, loop_law, match, rounds
from specref.lookup import PromptLookup, continuation
from specref.reject import reject
from specref.target import TableModel, target_law
from specref.tree import Tree

texts = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def by_hand(text, most, wanted):
    "All pairs of an earlier place and an ending, the longest ending first, then the first place"
    ends = [(-k, i) for k in range(1, most + 1) for i in range(len(text)) if i + k < len(text) and text[i:i+k] == text[len(text)-k:]]
    if not ends: return text[:0]
    k, i = min(ends)
    return text[i-k:][:wanted]


@settings(max_examples=500)
@given(texts, st.integers(1, 5), st.integers(1, 6))
def test_continuation(text, most, wanted):
    "The longest ending first, the first earlier place, never the ending itself, a short tail allowed: on tuples and on strings"
    assert continuation(text, most, wanted) == by_hand(text, most, wanted)
    assert "".join(continuation("".join(map(str, text)), most, wanted)) == "".join(map(str, by_hand(text, most, wanted)))


@pytest.mark.parametrize("text, offer", [("abcdab", "cdab"), ("abab", "ab"), ("aaaa", "a"), ("xaya", "ya"), ("abxabyab", "xaby")])
def test_examples(text, offer): assert continuation(text, 3, 4) == offer


def test_no_match():
    "Nothing repeated, one token, no token: nothing is offered"
    for text in ("abcd", "a", ""): assert continuation(text, 3, 4) == ()


@settings(max_examples=60)
@given(texts, st.integers(1, 3), st.integers(1, 4))
def test_the_drafter(ctx, most, wanted):
    "A chain of point masses with the tokens that were found, a function of the text alone"
    lookup, tokens = PromptLookup(3, most, wanted, exact=True), continuation(ctx, most, wanted)
    tree = lookup(ctx, Branch())
    assert tree.parent == list(range(-1, len(tokens))) and tuple(tree.token[1:]) == tokens
    assert all(tuple(q) == tuple(point(x, 3)) for q, x in zip(tree.law[1:], tree.token[1:]))
    drafter_contract(lookup, ctx)


@proves("thm-lookup")
@settings(max_examples=80)
@given(models(), contexts, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_lookup_is_exact_and_kept_with_the_weight_of_its_token(pair, ctx, most, wanted, n):
    "Under both judges the law is the target's, and each offered token is accepted with its weight"
    target, lookup = pair[0], PromptLookup(3, most, wanted, exact=True)
    for verify in (reject, match):
        verifier_contract(target, lookup, verify, ctx, n)
        ends, sure, text = law_of(lambda rng: next(rounds(target, lookup, verify, ctx, rng)).verdict.node), 1, ctx
        for i, x in enumerate(lookup(ctx, Branch()).token[1:], 1):
            sure, text = sure * target.law(text)[x], (*text, x)
            assert sum(w for k, w in ends.items() if k >= i) == sure


@proves("thm-lookup")
@settings(max_examples=40)
@given(models(), seeds)
def test_any_function_of_the_context(pair, seed):
    "A tree of point masses that is any function of the text: both judges give the same law of verdicts"
    def draft(ctx, rng):
        tree, x = Tree(ctx), hash((seed, *ctx))
        for i in range(x % 4): tree.add(i and (x >> i) % i, (x >> 2*i) % 3, point((x >> 2*i) % 3, 3, exact=True))
        return tree
    tokens = [law_of(lambda rng: next(rounds(pair[0], draft, verify, (0,), rng)).tokens) for verify in (reject, match)]
    assert tokens[0] == tokens[1] and loop_law(pair[0], draft, reject, (0,), 2) == target_law(pair[0], (0,), 2)


def test_a_text_that_repeats_is_copied():
    "A target that goes on as before accepts whole runs"
    out = generate(TableModel(4, lambda text: point((text[-1] + 1) % 4, 4)), PromptLookup(4, 2, 3), reject, (0, 1, 2, 3, 0, 1), 16, Seeded(0))
    assert out == tuple((2 + i) % 4 for i in range(16)) and out.ledger.mean_acceptance_length > 3.5


def test_doors():
    for bad in (0, -1, 1.5, None):
        refuses("V", PromptLookup, bad)
        refuses("max_matching_ngram_size", PromptLookup, 3, bad)
        refuses("num_draft_tokens", PromptLookup, 3, 1, bad)
    refuses("x", PromptLookup(2), (2, 0, 2), Branch())
