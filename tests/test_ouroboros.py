"Chapter 22b: the chain of speculative sampling on fewer calls, and phrases below it"
from dataclasses import replace
from itertools import islice

import numpy as np, pytest, torch
from hypothesis import example, strategies as st

from contracts import drafter_contract
from helpers import examples, faithful, killer, models, proves, round_tokens
from published import drafted, having
from specref import (add_paths, autoregressive, Chain, embedded, Enumerator, law_of, Lookahead, loop_law,
                     match, Ouroboros, prompts, random_table, reject, Round, rounds, Seeded, target_law,
                     Tree, Verdict)
from specref.core.loop import bounded
from specref.draft.lookahead import NgramPool, ngrams
from specref.draft.ouroboros import child_with_token, corrected_phrase, fast_chain, target_answers
from specref.models.embedded import DOMAINS

tokens = st.integers(0, 2)
contexts = st.lists(tokens, min_size=1, max_size=3).map(tuple)

def runs(k): return st.lists(tokens, min_size=k, max_size=k).map(tuple)

@st.composite
def inners(draw, most=3):
    "A Lookahead with a full window and any pool"
    W, N, G = draw(st.tuples(st.integers(1, 3), st.integers(2, most), st.integers(1, 3)))
    rows = tuple(draw(runs(k)) for k in (W - 1, *[W]*(N - 2)))
    grams = draw(st.lists(st.tuples(tokens, runs(N - 1)), max_size=8))
    return Lookahead(3, W, N, G, draw(st.booleans()), True, rows, NgramPool().add(grams, G))

def fast(draft, inner, gamma, ctx, rng):
    tree = Tree(ctx)
    fast_chain(tree, draft, inner, gamma, rng)
    return tree

def mean(target, drafter, ctx): return round_tokens(target, drafter, ctx=ctx).mean()

# The fast chain

@proves("thm-fast-chain")
@examples(25, models(), inners(), contexts, st.integers(1, 3), st.integers(0, 999))
def test_the_same_tree(pair, inner, ctx, gamma, seed):
    "From the same noise the tree of `Chain`, with no more calls; the same distribution"
    draft, chain = pair[1], Chain(pair[1], gamma)
    before, tree = draft.meter.calls, fast(draft, inner, gamma, ctx, Seeded(seed))
    assert draft.meter.calls - before <= gamma and tree == chain(ctx, Seeded(seed))
    assert law_of(lambda rng: fast(draft, inner, gamma, ctx, rng)) == law_of(lambda rng: chain(ctx, rng))

@proves("thm-fast-chain")
@examples(25, models(), inners(), contexts, st.integers(1, 3))
def test_the_inner_rounds_are_lookahead_by_match(pair, inner, ctx, gamma):
    "The inner drafter's state is that of the loop with `match`, cut where the draft ends"
    draft, tree = pair[1], Tree(ctx)
    u, after = fast_chain(tree, draft, inner, gamma, Seeded(5))
    text, left = ctx, list(tree.path(u))
    while left:
        guess, node, emitted = inner(text, Enumerator()), 0, ()
        while left and node is not None:
            last, x = node, left.pop(0)
            emitted, node = (*emitted, x), child_with_token(guess, node, x)
        inner, text = inner.learn(Round(guess, draft(guess), Verdict(last, emitted[-1]))), text + emitted
    assert inner == after

# State after a round

@examples(40, st.lists(st.lists(tokens, max_size=3).map(tuple), max_size=4), st.integers(1, 4),
          st.integers(0, 99))
def test_target_continuations_and_corrected_phrases(paths, n, seed):
    "A continuation is the greedy path in the tree and one step more; a phrase is corrected place by place"
    tree, target = add_paths(Tree((0,)), paths, 3, Enumerator(), exact=True), random_table(3, seed)
    p, greedy = target(tree), lambda text: int(np.argmax(target.law(text)))
    nodes = {tree.path(i) for i in range(len(tree))}
    for i in range(len(tree)):
        answers, path = (), tree.path(i)
        while path + answers in nodes and len(answers) < n: answers += (greedy((0,) + path + answers),)
        assert target_answers(tree, p, i, n) == answers
    for g in paths:
        assert corrected_phrase(tree, p, 0, g) == tuple(greedy((0,) + g[:k]) for k in range(len(g)))

class Unrecycled(Ouroboros):
    "Phrases are corrected, rejected drafts are not recycled"
    def learn(self, round): return super().learn(replace(round, verdict=Verdict(self.gamma, 0)))

class OwnPhrases(Unrecycled):
    "The n-grams of the draft become phrases, not the target's continuations"
    def learn(self, round):
        after, grams = super().learn(round), ngrams(round.tree.path(self.gamma), self.inner.N)
        return replace(after, inner=replace(after.inner, pool=after.inner.pool.add(grams, self.inner.G)))

@faithful("Ouroboros", plain={
    "not recycled": drafted(Unrecycled), "the draft's n-grams": drafted(OwnPhrases)})
@examples(25, models(), inners(4), contexts, st.integers(1, 4), st.integers(0, 3), st.integers(0, 999))
@example(killer(), Lookahead(3, 2, 3, 2, False, True, ((0,), (1, 0))), (0,), 3, 1, 0)
def test_rejected_drafts_become_phrases(subject, pair, inner, ctx, gamma, phrases, seed):
    "Each rejected token gets the target's continuation, at most G phrases; the window is that of drafting"
    drafter = subject.drafter(pair[1], dict(inner=inner, phrases=phrases), gamma=gamma, exact=True)
    round = next(rounds(pair[0], drafter, reject, ctx, Seeded(seed)))
    tree, after = round.tree, drafter.learn(round).inner
    rejected = [i for i in range(1, gamma + 1) if i not in tree.ancestors(round.verdict.node)]
    for j, i in enumerate(rejected):
        later, answers = rejected[j + 1:], target_answers(tree, round.p, i, inner.N - 1)
        same = sum(tree.token[k] == tree.token[i] for k in later)
        assert same >= inner.G or answers in after.pool.get(tree.token[i], ())
    grams = [g for gs in after.pool.values() for g in gs]
    assert all(0 < len(gs) <= inner.G and len(set(gs)) == len(gs) for gs in after.pool.values())
    assert after.rows == tree.inner.rows and all(1 <= len(g) < inner.N for g in grams)
    others = lambda pool: {k: v for k, v in pool.items() if k != tree.token[gamma]}
    if not rejected: assert others(after.pool) == others(tree.inner.pool)
    assert hash(drafter.learn(round)) == hash(drafter.learn(round))

def test_a_round_without_a_draft():
    target, draft = random_table(3, 0), random_table(3, 1)
    drafter, tree = Ouroboros(draft, 2, Lookahead(3, 2, 3, 2)), Tree((0,))
    assert drafter.learn(Round(tree, target(tree), Verdict(0, 1))) == drafter
    target.most = draft.most = 12
    turn = [*islice(rounds(target, bounded(target, drafter), reject, (0,), Seeded(0)), 16)]
    assert len(turn[0].tree) > len(turn[-1].tree) == 1

# The distribution

@proves("thm-ouroboros")
@examples(5, models(), inners(), contexts, st.integers(1, 2), st.integers(0, 2),
          st.sampled_from([reject, match]))
def test_exact(pair, inner, ctx, gamma, phrases, verify):
    "Correct edges, and three tokens in fractions with all updates of the state"
    drafter = Ouroboros(pair[1], gamma, inner, phrases)
    drafter_contract(drafter, ctx)
    assert loop_law(pair[0], drafter, verify, ctx, 3) == target_law(pair[0], ctx, 3)

@proves("thm-ouroboros")
@examples(20, models(), inners(), contexts, st.integers(1, 2), st.integers(1, 3))
def test_phrases_add_their_weight(pair, inner, ctx, gamma, phrases):
    "The mean of a round is that of speculative sampling and the sum of the theorem"
    (target, draft), gain = pair, 0
    ours = Ouroboros(draft, gamma, inner, phrases)
    def p(tree, i): return target.law(tree.text(tree.parent[i]))[tree.token[i]]
    def q(tree, i): return draft.law(tree.text(tree.parent[i]))[tree.token[i]]
    for tree in law_of(lambda rng: ours(ctx, rng)):
        accepted, weight = 1, {gamma: 1}
        for i in range(1, gamma + 1): accepted *= min(p(tree, i), q(tree, i))
        for v in range(gamma + 1, len(tree)): weight[v] = weight[tree.parent[v]] * p(tree, v)
        gain += accepted * (sum(weight.values()) - 1)
    alone = replace(ours, phrases=0)
    want = mean(target, ours, ctx) - gain
    assert mean(target, alone, ctx) == mean(target, Chain(draft, gamma), ctx) == want

# At size

class Sampled(Ouroboros):
    "Speculative sampling"
    def __call__(self, ctx, rng): return Chain(self.model, self.gamma)(ctx, rng)
    def learn(self, round): return self

@faithful("Ouroboros", plain={"speculative sampling": drafted(Sampled)})
@pytest.mark.parametrize("temperature", [0, 1])
def test_fewer_draft_calls_at_size(subject, temperature):
    "Without phrases the text of speculative sampling, with fewer than gamma draft calls a round"
    def model(name): return embedded(name, dtype=torch.float64, temperature=temperature)
    target, prompt, system = model("target"), prompts("english", 1)[0], subject(model("small"), gamma=6)
    def run(system): return system(target, prompt, 32, Seeded(2))
    def fewer(out):
        n = len(out.ledger.rounds)
        assert out.ledger.models["target"].calls == n <= out.ledger.models["draft"].calls < 6*n
        return out
    alone, ours = fewer(run(having(phrases=lambda n: 0)(system))), fewer(run(system))
    chain = run(drafted(lambda drafter: Chain(drafter.model, 6))(system))
    assert alone == chain and alone.ledger.column("accepted") == chain.ledger.column("accepted")
    assert temperature or ours == autoregressive(target, prompt, 32, Seeded(0))

@faithful("Ouroboros", plain={"no phrases": having(phrases=lambda n: 0), "not recycled": drafted(Unrecycled)})
def test_phrases_at_size(subject):
    "Greedy: some calls emit more than gamma + 1 tokens; fewer calls; phrases from rejected drafts alone"
    target, draft = (embedded(name, temperature=0) for name in ("target", "small"))
    starts = [prompts(domain, 1)[0] for domain in DOMAINS]
    drafter, short, new = subject.drafter(draft, gamma=6), subject(draft, gamma=2), 0
    for _, round in zip(range(8), rounds(target, drafter, short.verify, starts[0], Seeded(0))):
        drafter, tree = drafter.learn(round), round.tree
        for i in set(range(1, 7)) - set(tree.ancestors(round.verdict.node)):
            x, phrase = tree.token[i], target_answers(tree, round.p, i, drafter.inner.N - 1)
            assert phrase in drafter.inner.pool.get(x, ())
            new += phrase not in tree.inner.pool.get(x, ())
    assert new > 0
    def emitted(system):
        outs = [system(target, start, 32, Seeded(0)) for start in starts]
        return [k for out in outs for k in out.ledger.column("emitted")]
    ours = emitted(short)
    assert max(ours) > 3
    chain = emitted(drafted(lambda drafter: Chain(draft, 2))(short))
    assert max(chain) == 3 and len(ours) < len(chain)
