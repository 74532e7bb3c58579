"Chapter 22b: the chain of speculative sampling on fewer calls, phrases below it that never cost a token, and phrases from what was refused"
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import constant, faithful, models, proves, refuses, seeds
from specref.certify.certificates import certify_system
from specref.core.rng import Enumerator, Seeded, law_of
from specref.core.law import exact, one_hot
from specref.draft.lookahead import Lookahead, NgramPool
from specref.core.loop import Round, System, Verdict, generate, loop_law, match, autoregressive, rounds
from specref.models.embedded import DOMAINS, embedded, prompts
from specref.draft.ouroboros import Ouroboros, target_answers, child_with_token, fast_chain, corrected_phrase
from specref.verify.reject import Chain, reject
from specref.core.tree import add_paths
from specref.core.target import TableModel, random_table, target_law
from specref.core.tree import Tree, iid

tokens = st.integers(0, 2)
contexts = st.lists(tokens, min_size=1, max_size=3).map(tuple)


@st.composite
def inners(draw, most=3):
    "A Lookahead with a full window and any pool"
    W, N, G = draw(st.tuples(st.integers(1, 3), st.integers(2, most), st.integers(1, 3)))
    rows = tuple(tuple(draw(st.lists(tokens, min_size=k, max_size=k))) for k in (W - 1, *[W]*(N - 2)))
    grams = st.lists(st.tuples(tokens, st.lists(tokens, min_size=N - 1, max_size=N - 1).map(tuple)), max_size=8)
    return Lookahead(3, W, N, G, draw(st.booleans()), True, rows, NgramPool().add(draw(grams), G))


def fast(draft, inner, gamma):
    def draw(ctx, rng):
        tree = Tree(ctx)
        fast_chain(tree, draft, inner, gamma, rng)
        return tree
    return draw


def first(tree, gamma):
    "The chain of a tree: its first `gamma` nodes"
    out = Tree(tree.ctx)
    for i in range(1, gamma + 1): out.add(tree.parent[i], tree.token[i], tree.law[i])
    return out


def mean(target, drafter, ctx): return law_of(lambda rng: len(next(rounds(target, drafter, reject, ctx, rng)).tokens)).mean()


# The fast chain

@proves("thm-fast-chain")
@settings(max_examples=60, deadline=None)
@given(models(), inners(), contexts, st.integers(1, 4), st.integers(0, 999))
def test_the_same_tree(pair, inner, ctx, gamma, seed):
    "From the same noise the very tree of `Chain`, on no more calls; as a law too"
    draft = pair[1]
    before, tree = draft.meter.calls, fast(draft, inner, gamma)(ctx, Seeded(seed))
    assert draft.meter.calls - before <= gamma and tree == Chain(draft, gamma)(ctx, Seeded(seed))
    k = min(gamma, 3)
    assert law_of(lambda rng: fast(draft, inner, k)(ctx, rng)) == law_of(lambda rng: Chain(draft, k)(ctx, rng))


@proves("thm-fast-chain")
@settings(max_examples=40, deadline=None)
@given(models(), inners(), contexts, st.integers(1, 3))
def test_the_inner_rounds_are_lookahead_by_match(pair, inner, ctx, gamma):
    "What the inner drafter learns is what it learns in the loop of chapter 4 with `match`, cut where the draft ends"
    draft, tree = pair[1], Tree(ctx)
    u, after = fast_chain(tree, draft, inner, gamma, Seeded(5))
    text, left, drafter = ctx, list(tree.path(u)), inner
    while left:
        guess = drafter(text, Enumerator())
        i = node = 0
        said = ()
        while left and node is not None: i, said, node = node, (*said, x := left.pop(0)), child_with_token(guess, node, x)
        drafter, text = drafter.learn(Round(guess, draft(guess), Verdict(i, said[-1]))), text + said
    assert drafter == after


# What is learnt

@settings(max_examples=80)
@given(st.lists(st.lists(tokens, max_size=3).map(tuple), max_size=4), st.integers(1, 4), st.integers(0, 99))
def test_answers_and_mended(paths, n, seed):
    "Answers are the greedy path down the tree and one step beyond; a mended phrase is what the target says at each of its places"
    tree, target = add_paths(Tree((0,)), paths, 3, Enumerator(), exact=True), random_table(3, seed)
    p, greedy = target(tree), lambda text: int(np.argmax(target.law(text)))
    nodes = {tree.path(i) for i in range(len(tree))}
    for i in range(len(tree)):
        said, path = (), tree.path(i)
        while path + said in nodes and len(said) < n: said += (greedy((0,) + path + said),)
        assert target_answers(tree, p, i, n) == said
    for g in paths: assert corrected_phrase(tree, p, 0, g) == tuple(greedy((0,) + g[:k]) for k in range(len(g)))


def test_the_example_of_the_page():
    "b is refused; below it the target confirms c and says h: the phrase (c, h) under b, (h,) under c, and the phrases under c mended"
    letters = "abcdefgh"
    said = {"": "a", "a": "x", "ab": "c", "abc": "h", "abcd": "f"}
    target = TableModel(24, lambda text: one_hot(ord(said.get("".join(chr(97 + x) for x in text[1:]), "g")) - 97, 24))
    draft = TableModel(24, lambda text: one_hot(min(text[-1] + 1, 23) if len(text) > 1 else 0, 24))
    inner = Lookahead(24, 1, 3, 4, rows=((), (0,)), pool=NgramPool({2: ((3, 4), (3, 5))}))
    drafter = Ouroboros(draft, 3, inner, 2)
    round = next(rounds(target, drafter, reject, (23,), Seeded(0)))
    assert [round.tree.path(i) for i in range(1, len(round.tree))] == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 5), (0, 1, 2, 3, 4)]
    assert round.tokens == (0, 23)
    pool = drafter.learn(round).inner.pool
    assert pool[1][-1] == (2, 7) and pool[2] == ((7, 5), (7,))


@faithful("Ouroboros")
@settings(max_examples=60, deadline=None)
@given(models(), inners(4), contexts, st.integers(1, 4), st.integers(0, 3), st.integers(0, 999))
def test_refused_drafts_become_phrases(pair, inner, ctx, gamma, phrases, seed):
    "Under each refused draft stands what the target says after it, no more than G phrases in all; accepted ones teach nothing; the window is the drafting's"
    target, draft = pair
    drafter = Ouroboros(draft, gamma, inner, phrases)
    round = next(rounds(target, drafter, reject, ctx, Seeded(seed)))
    tree, after = round.tree, drafter.learn(round).inner
    lost = [i for i in range(1, gamma + 1) if i not in tree.ancestors(round.verdict.node)]
    for j, i in enumerate(lost):
        later = [i for i in lost[j + 1:] if tree.token[i] == tree.token[lost[j]]]
        if len(later) < inner.G: assert target_answers(tree, round.p, i, inner.N - 1) in after.pool[tree.token[i]]
        assert target_answers(tree, round.p, i, inner.N - 1)[0] == int(np.argmax(target.law(tree.text(i))))
    assert all(0 < len(gs) <= inner.G and len(set(gs)) == len(gs) for gs in after.pool.values())
    assert after.rows == tree.inner.rows and all(1 <= len(g) < inner.N for gs in after.pool.values() for g in gs)
    if not lost: assert {k: v for k, v in after.pool.items() if k != tree.token[gamma]} == {k: v for k, v in tree.inner.pool.items() if k != tree.token[gamma]}
    assert drafter.learn(round) == drafter.learn(round) and hash(drafter.learn(round)) == hash(drafter.learn(round))


@settings(max_examples=40, deadline=None)
@given(models(), inners(), contexts, st.integers(1, 2))
def test_the_state_that_a_tree_carries_is_told_by_the_tree(pair, inner, ctx, gamma):
    "Equal trees carry equal states: the drafter is a function of what was emitted and drafted"
    drafter = Ouroboros(pair[1], gamma, inner, 2)
    both = law_of(lambda rng: ((tree := drafter(ctx, rng)), tree.inner))
    assert len({tree for tree, _ in both}) == len(both)


def test_a_round_without_a_draft_teaches_nothing():
    target, draft = random_table(3, 0), random_table(3, 1)
    drafter, tree = Ouroboros(draft, 2, Lookahead(3, 2, 3, 2)), Tree((0,))
    assert drafter.learn(Round(tree, target(tree), Verdict(0, 1))) == drafter
    target.most = draft.most = 12
    assert len(generate(target, drafter, reject, (0,), 16, Seeded(0))) == 16


# The law

@settings(max_examples=40, deadline=None)
@given(models(), inners(), contexts, st.integers(1, 3), st.integers(0, 3))
def test_the_drafter_contract(pair, inner, ctx, gamma, phrases): drafter_contract(Ouroboros(pair[1], gamma, inner, phrases), ctx)


@proves("thm-ouroboros")
@settings(max_examples=40, deadline=None)
@given(models(), inners(), contexts, st.integers(1, 2), st.integers(0, 2))
def test_one_round(pair, inner, ctx, gamma, phrases): verifier_contract(pair[0], Ouroboros(pair[1], gamma, inner, phrases), reject, ctx, 3)


@proves("thm-ouroboros")
@settings(max_examples=25, deadline=None)
@given(models(), inners(), contexts, st.integers(1, 2), st.integers(0, 2), st.sampled_from([reject, match]))
def test_loops_are_exact(pair, inner, ctx, gamma, phrases, verify):
    "Three tokens in fractions, with all that is learnt on the way"
    assert loop_law(pair[0], Ouroboros(pair[1], gamma, inner, phrases), verify, ctx, 3) == target_law(pair[0], ctx, 3)


@proves("thm-ouroboros")
@settings(max_examples=40, deadline=None)
@given(models(), inners(), contexts, st.integers(1, 2), st.integers(1, 3))
def test_phrases_add_their_weight(pair, inner, ctx, gamma, phrases):
    "The mean of a round is that of speculative sampling and the sum of the theorem, and no less"
    target, draft = pair
    ours, gain = Ouroboros(draft, gamma, inner, phrases), 0
    for tree in law_of(lambda rng: ours(ctx, rng)):
        kept = 1
        for i in range(1, gamma + 1): kept *= min(target.law(tree.text(i - 1))[tree.token[i]], draft.law(tree.text(i - 1))[tree.token[i]])
        weight = {gamma: 1}
        for v in range(gamma + 1, len(tree)): weight[v] = weight[tree.parent[v]] * target.law(tree.text(tree.parent[v]))[tree.token[v]]
        gain += kept * (sum(weight.values()) - 1)
    assert mean(target, replace(ours, phrases=0), ctx) == mean(target, Chain(draft, gamma), ctx) == mean(target, ours, ctx) - gain


# Without phrases: speculative sampling

@faithful("Ouroboros")
@settings(max_examples=30, deadline=None)
@given(models(), inners(), contexts, st.integers(1, 4), st.integers(0, 999))
def test_without_phrases_it_is_speculative_sampling(pair, inner, ctx, gamma, seed):
    "The same trees and the same text, round by round, from the same seed; with phrases still the same chain in the first round"
    target, draft = pair
    ours = zip(rounds(target, Ouroboros(draft, gamma, inner, 0), reject, ctx, Seeded(seed)), rounds(target, Chain(draft, gamma), reject, ctx, Seeded(seed)), range(5))
    for a, b, _ in ours: assert a.tree == b.tree and a.tokens == b.tokens
    with_phrases = next(rounds(target, Ouroboros(draft, gamma, inner, 3), reject, ctx, Seeded(seed))).tree
    assert first(with_phrases, gamma) == Chain(draft, gamma)(ctx, Seeded(seed).at(0).draft)


@faithful("Ouroboros")
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_fewer_draft_calls_at_size(domain, temperature):
    "Embedded pair, float64: without phrases the text of speculative sampling; fewer than gamma draft calls a round; one target call a round"
    target = embedded("target", dtype=torch.float64, temperature=temperature)
    prompt, draft = prompts(domain, 1)[0], lambda: embedded("small", dtype=torch.float64, temperature=temperature)
    inner = Lookahead(target.V, 7, 5, 7)
    chain, ours, more = (generate(target, d, reject, prompt, 40, Seeded(2)) for d in (Chain(draft(), 6), Ouroboros(draft(), 6, inner, 0), Ouroboros(draft(), 6, inner, 3)))
    assert ours == chain and ours.ledger.column(2) == chain.ledger.column(2)
    for out in (ours, more):
        n = len(out.ledger.rounds)
        assert out.ledger.models["target"].calls == n and n <= out.ledger.models["draft"].calls < 6*n
    assert chain.ledger.models["draft"].calls == 6*len(chain.ledger.rounds)
    if temperature == 0: assert more == autoregressive(target, prompt, 40, Seeded(0)) and len(more.ledger.rounds) <= len(chain.ledger.rounds)


@faithful("Ouroboros")
def test_more_than_gamma_and_one():
    "Greedy: some target calls emit more than gamma + 1 tokens, the most a chain can; and in the end fewer calls are made"
    target, draft = (embedded(name, temperature=0) for name in ("target", "small"))
    ours, chain = ([generate(target, d, reject, prompts(domain, 1)[0], 48, Seeded(0)).ledger for domain in DOMAINS] for d in (Ouroboros(draft, 2, Lookahead(target.V, 7, 5, 7)), Chain(draft, 2)))
    assert max(max(o.column(3)) for o in ours) > 3 == max(max(o.column(3)) for o in chain)
    assert sum(len(o.rounds) for o in ours) < sum(len(o.rounds) for o in chain)


@faithful("Ouroboros")
@pytest.mark.parametrize("domain", DOMAINS)
def test_phrases_of_refused_drafts_at_size(domain):
    "Phrases that were learnt from refused drafts, and that the drafting would not have put there; all by one target call a round"
    target, draft = (embedded(name, temperature=0) for name in ("target", "small"))
    drafter, new = Ouroboros(draft, 6, Lookahead(target.V, 7, 5, 7)), 0
    for _, round in zip(range(8), rounds(target, drafter, reject, prompts(domain, 1)[0], Seeded(0))):
        drafter, kept = drafter.learn(round), round.tree.ancestors(round.verdict.node)
        lost = {(round.tree.token[i], target_answers(round.tree, round.p, i, 4)) for i in range(1, 7) if i not in kept}
        new += sum(g in drafter.inner.pool[x] and g not in round.tree.inner.pool.get(x, ()) for x, g in lost)
    assert new > 0


@faithful("Ouroboros")
def test_the_pool_is_carried_on():
    "A drafter that has read one text brings its phrases and its full window to the next: it offers from the first round, and the law is the same"
    target, draft = (embedded(name, temperature=0) for name in ("target", "small"))
    a, b = prompts("english", 2)
    drafter = Ouroboros(draft, 3, Lookahead(target.V, 7, 5, 7))
    for _, round in zip(range(10), rounds(target, drafter, reject, a, Seeded(0))): drafter = drafter.learn(round)
    assert len(drafter.inner.rows) == 4 and len(drafter.inner.pool) > 10
    assert generate(target, drafter, reject, b, 24, Seeded(0)) == autoregressive(target, b, 24, Seeded(0))


def test_certificate_at_size():
    "Sampled texts after a held-out one: no difference is seen, and one of .4 would be"
    target, draft = embedded("target", top_k=8), embedded("small", top_k=8)
    found = certify_system(System("ouroboros", Ouroboros(draft, 2, Lookahead(target.V, 4, 2, 4)), reject), target, prompts("code", 1, seed=2)[0], n=2, runs=300)
    print(found.words)
    assert found.passes and found.test.tv < .4, found.words


# Doors and exercises

def test_doors():
    draft, inner = random_table(3, 0), Lookahead(3)
    for bad in (0, -1, 1.5, None): refuses("gamma", Ouroboros, draft, bad, inner)
    for bad in (-1, 1.5, None): refuses("phrases", Ouroboros, draft, 2, inner, bad)
    refuses("inner", Ouroboros, draft, 2, None); refuses("model", Ouroboros, None, 2, inner)
    refuses("inner", Ouroboros, draft, 2, Lookahead(4))
    refuses("drafter", generate, random_table(4, 0), Ouroboros(draft, 2, inner), reject, (0,), 2, Seeded(0))


def test_exercise_1():
    "29/96: a draft accepted with 1/4, and phrases d e, d f, g below it"
    F = Fraction
    after = {(): (F(1, 4), 0, 0, 0, 0), (0,): (0, F(1, 2), 0, 0, F(1, 3)), (0, 1): (0, 0, F(1, 2), F(1, 4), 0)}
    def law(text):
        w = after.get(text[1:], (0,)*5)
        return exact(*w, 1 - sum(w))
    target, draft = TableModel(6, law), TableModel(6, lambda text: one_hot(0, 6, exact=True))
    pool = NgramPool({0: ((1, 2), (1, 3), (4,))})
    ours = Ouroboros(draft, 1, Lookahead(6, 1, 3, 3, exact=True, rows=((), (5,)), pool=pool))
    gain = mean(target, ours, (5,)) - mean(target, replace(ours, phrases=0), (5,))
    assert gain == F(29, 96)


def test_exercise_2():
    "A guess that is always taken is a point mass: stated as the draft's law it is off, stated as what it is it is right"
    always = constant(1, 1, 1)
    def taken(law): return lambda ctx, rng: (tree := Tree(ctx), tree.add(0, 0, law))[0]
    assert loop_law(always, taken(exact(1, 1, 1)), reject, (0,), 1) == {(0,): 1}
    assert loop_law(always, taken(one_hot(0, 3, exact=True)), reject, (0,), 1) == target_law(always, (0,), 1)
