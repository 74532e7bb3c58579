"Chapter 04: the loop, match, what generate returns and what it refuses"
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import verifier_contract
from helpers import Plan, constant, laws, models, plans, proves, random_table, refuses, seeds
from specref.core.rng import Seeded, tv_outcomes, law_of
from specref.core.law import exact, one_hot
from specref.core.loop import Ledger, Verdict, clip, generate, loop_law, match, no_draft, autoregressive, rounds, trace
from specref.draft.lookup import PromptLookup
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching
from specref.app.systems import SYSTEMS
from specref.core.target import Meter, TableModel, target_law
from specref.core.tree import Tree

some = st.sampled_from(sorted(SYSTEMS))
stops = st.sets(st.integers(0, 2), max_size=2)


def wild(seed):
    "A drafter that lies on every edge: tokens in the order of a hash, stated as point masses on something else or as a far law"
    def draft(ctx, rng):
        tree, r = Tree(ctx), np.random.default_rng([seed, *ctx])
        for _ in range(r.integers(0, 6)):
            x = int(r.integers(3))
            tree.add(int(r.integers(len(tree))), x, None if r.random() < .2 else one_hot(x, 3, exact=True) if r.random() < .5 else exact(1, 1, 1))
        return tree
    return draft


# match

@proves("thm-match")
@settings(max_examples=60)
@given(models(), seeds, st.integers(1, 4), stops)
def test_match_is_exact_for_any_draft(pair, seed, n, stop):
    "Trees made by anybody, with lies, probes and equal siblings: the law is the target's"
    assert loop_law(pair[0], wild(seed), match, (0,), n, stop) == target_law(pair[0], (0,), n, stop)


@proves("thm-match")
@settings(max_examples=60)
@given(models(), plans(2), st.integers(1, 3))
def test_match_keeps_the_verifier_contract(pair, steps, n): verifier_contract(pair[0], Plan(pair[1], steps), match, (0,), n)


@proves("thm-match")
def test_match_needs_noise_of_its_own():
    "A draft that knows the judge's next noise and offers only what suits it: the condition of the theorem is needed"
    fair = constant(1, 1)
    def peek(ctx, rng):
        tree = Tree(ctx)
        if rng.pick(exact(1, 1), key=(len(ctx), 1)):                 # the noise of the second token
            for x in (0, 1): tree.add(0, x, one_hot(x, 2, exact=True))
        return tree
    def keyed(p, tree, rng, i=0):
        y = rng.pick(p[i], key=(len(tree.ctx), tree.depth[i]))
        return next((keyed(p, tree, rng, c) for c in tree.children(i) if tree.token[c] == y), Verdict(i, y))
    assert loop_law(fair, no_draft, keyed, (0,), 2) == target_law(fair, (0,), 2)
    assert tv_outcomes(loop_law(fair, peek, keyed, (0,), 2), target_law(fair, (0,), 2)) == Fraction(1, 4)


@given(laws(4), laws(4), st.integers(1, 3))
def test_match_accepts_what_the_target_says(p, q, k):
    "One sampled draft is kept with probability Σpq; k offered tokens with the sum of their p"
    target = constant(*p)
    kept = lambda drafter: law_of(lambda rng: next(rounds(target, drafter, match, (0,), rng)).verdict.node > 0).get(True, 0)
    assert kept(Chain(constant(*q), 1)) == (p*q).sum()
    def first(ctx, rng):
        tree = Tree(ctx)
        for x in range(k): tree.add(0, x, one_hot(x, 4, exact=True))
        return tree
    assert kept(first) == sum(p[:k])


# Cutting

@proves("thm-cutting")
@settings(max_examples=60)
@given(models(), some, st.integers(0, 2), st.integers(0, 2), stops)
def test_cutting_a_longer_text(pair, name, n, more, stop):
    "The law of n tokens with stop tokens is the image, under the cut, of the law of a longer text without: for target and system alike"
    target, draft = pair
    system, cut = SYSTEMS[name](draft, gamma=2, shape=(2,), exact=True), lambda y: clip(y, n, stop)
    long = loop_law(target, system.drafter, system.verify, (0,), n + more)
    assert loop_law(target, system.drafter, system.verify, (0,), n, stop) == long.of(cut) == target_law(target, (0,), n + more).of(cut)
    assert long.of(cut) == target_law(target, (0,), n, stop)


@given(st.lists(st.integers(0, 4)), st.integers(0, 6), st.sets(st.integers(0, 4)))
def test_clip(tokens, room, stop):
    "Never more than there is room for, never anything after a stop token, and nothing less than that"
    out = clip(tuple(tokens), room, stop)
    assert out == tuple(tokens[:len(out)]) and len(out) <= room and not stop & set(out[:-1])
    assert len(out) == min(room, len(tokens)) or out[-1] in stop


# generate

def case(): return st.tuples(models(), some, st.integers(0, 9), stops, st.integers(0, 99))


def test_drafts_that_never_fit():
    "A window, or a chain, as long as all that the target can read is refused, not quietly left out; one that fits is not"
    target = random_table(3, 1)
    target.most = 6
    drafter_of = lambda depth: type("Deep", (), dict(V=3, depth=depth, __call__=lambda self, ctx, rng: Tree(ctx)))()
    assert len(generate(target, drafter_of(5), match, (0,), 3, Seeded(0))) == 3
    for depth in (6, 7): refuses("drafter", generate, target, drafter_of(depth), match, (0,), 3, Seeded(0))
    refuses("drafter", loop_law, target, drafter_of(6), match, (0,), 1)


def built(pair, name): return pair[0], SYSTEMS[name](pair[1], gamma=3, shape=(2, 1), exact=True)


@settings(max_examples=150)
@given(case())
def test_a_text_and_what_was_noticed(case):
    "n tokens, or fewer and a stop token last; watched text = returned text; log-probabilities, fates and rounds are those of the rounds"
    pair, name, n, stop, seed = case
    (target, system), seen = built(pair, name), []
    text = system(target, (0, 1), n, Seeded(seed), stop=stop, watch=seen.append)
    assert [x for new in seen for x in new] == list(text) and all(seen) and len(text) <= n
    assert not stop & set(text[:-1]) and (len(text) == n or text[-1] in stop)
    assert text.logprobs == tuple(s.logprob for s in text.sources) and [s.token for s in text.sources] == list(text)
    rows = [float(target.law((0, 1, *text[:t]))[x]) for t, x in enumerate(text)]
    assert text.logprobs == pytest.approx([np.log(w) for w in rows])
    assert [[s.token for s in text.sources if s.round == i] for i in range(len(seen))] == [list(new) for new in seen]


@settings(max_examples=150)
@given(case())
def test_the_ledger_counts_the_rounds(case):
    "Every figure again, from the rounds themselves"
    pair, name, n, stop, seed = case
    target, system = built(pair, name)
    text = system(target, (0, 1), n, Seeded(seed), stop=stop)
    led, turn = text.ledger, rounds(target, system.drafter, system.verify, (0, 1), Seeded(seed))
    all_rounds = [next(turn) for _ in led.rounds]
    offered = [sum(len(r.tree.children(i)) for i in range(len(r.tree))) for r in all_rounds]
    kept = [len(r.tokens) - 1 for r in all_rounds]
    assert (led.num_drafts, led.num_draft_tokens, led.num_accepted_tokens) == (sum(map(bool, offered)), sum(offered), sum(kept))
    assert led.num_emitted_tokens == len(text) == len(clip(sum((r.tokens for r in all_rounds), ()), n, stop))
    assert led.mean_acceptance_length == pytest.approx(np.mean([k + 1 for k in kept]) if kept else 1)
    assert led.draft_acceptance_rate == (sum(kept) / sum(offered) if any(offered) else 0)
    deepest = max((r.tree.depth[c] for r in all_rounds for i in range(len(r.tree)) for c in r.tree.children(i)), default=0)   # offered: probes are no drafts
    assert led.acceptance_rate_per_position == [np.mean([k >= i for k in kept]) for i in range(1, deepest + 1)]
    assert led.models["target"].calls == len(all_rounds) and sum(led.acceptance_rate_per_position) == pytest.approx(led.mean_acceptance_length - 1)
    fates = [s.fate for s in text.sources]
    assert fates == [f for r, k in zip(all_rounds, kept) for f in "A"*k + ("Y" if r.tree.children(r.verdict.node) else "B")][:len(text)]


@pytest.mark.parametrize("drafter, calls", [(lambda m: Chain(m, 3), 3), (lambda m: Branching(m, (2, 2)), 2)])
def test_the_ledger_meters_the_models(drafter, calls):
    "A chain calls its model once a token, a tree of siblings once a level; meters of earlier runs are left out"
    target, draft = random_table(3, 1), random_table(3, 2)
    for _ in range(2):
        led = generate(target, drafter(draft), reject, (0,), 9, Seeded(0)).ledger
        assert (led.models["target"].calls, led.models["draft"].calls) == (len(led.rounds), calls*len(led.rounds))
    assert str(len(led.rounds)) in repr(led) and set(led.seconds) == {"draft", "target", "verify"} and min(led.seconds.values()) >= 0


def offers(*tokens):
    "The drafter that always offers these tokens in a row"
    def draft(ctx, rng):
        tree = Tree(ctx)
        for i, x in enumerate(tokens): tree.add(i, x, one_hot(x, 3, exact=True))
        return tree
    return draft


@pytest.mark.parametrize("verify", [match, reject])
def test_a_stop_token_inside_an_accepted_run(verify):
    "The text ends exactly there, the bonus is dropped, and the same for a run longer than n"
    sure = TableModel(3, lambda text: one_hot(len(text) % 3, 3, exact=True))
    run = lambda n, stop: generate(sure, offers(1, 2, 0, 1, 2), verify, (0,), n, Seeded(0), stop=stop)
    assert run(20, {2}) == (1, 2) and run(20, {2}).ledger.column(3) == [2] and [s.fate for s in run(20, {2}).sources] == ["A", "A"]
    assert run(20, {1}) == (1,) and run(4, ()) == (1, 2, 0, 1) and run(20, {0}) == (1, 2, 0)
    assert run(8, ()) == (1, 2, 0, 1, 2, 0, 1, 2) and run(6, ()).sources[-1].fate == "B"
    assert generate(sure, offers(2), verify, (0,), 9, Seeded(0), stop={1}) == (1,)


def test_nothing_is_asked_for_no_tokens():
    "n = 0: an empty text, and no model was called"
    target, draft = random_table(3, 1), random_table(3, 2)
    text = generate(target, Chain(draft, 2), reject, (0,), 0, Seeded(0), watch=lambda new: 1/0)
    assert text == () and text.logprobs == text.sources == () and text.ledger.rounds == []
    assert (text.ledger.mean_acceptance_length, text.ledger.draft_acceptance_rate, text.ledger.acceptance_rate_per_position) == (1, 0, [])
    assert target.meter.calls == draft.meter.calls == 0 and repr(text.ledger) and trace(text) == ""
    assert loop_law(target, no_draft, match, (0,), 0) == {(): 1}


@given(case())
def test_the_trace_shows_every_token(case):
    pair, name, n, stop, seed = case
    target, system = built(pair, name)
    text = system(target, (0, 1), n, Seeded(seed), stop=stop)
    lines = trace(text, show=lambda x: f"<{x}>").split("\n") if text else []
    assert len(lines) == len(text.ledger.rounds) and [int(s.split(">")[0]) for line in lines for s in line.split("<")[1:]] == list(text)
    assert all(f"{s.fate}:<{s.token}> ({np.exp(s.logprob):.2f})" in lines[s.round] for s in text.sources)


def test_learning_is_a_value():
    "The drafter of a round is what the last one learnt; the loop never changes the first"
    class Counting:
        def __init__(self, n=0): self.n = n
        def __call__(self, ctx, rng): return offers(*[1]*self.n)(ctx, rng)
        def learn(self, round): return Counting(len(round.tree))
    first, turn = Counting(), None
    turn = rounds(random_table(3, 1), first, match, (0,), Seeded(0))
    assert [len(next(turn).tree) for _ in range(4)] == [1, 2, 3, 4] and first.n == 0 and no_draft.learn(None) is no_draft


def test_rounds_follow_each_other():
    "The context grows by the tokens of the round, and each round has noise of its own"
    even = constant(1, 1, 1, 1)
    for drafter in (Chain(even, 2), no_draft):
        turn = rounds(even, drafter, match, (0,), Seeded(0))
        some = [next(turn) for _ in range(20)]
        assert all(b.tree.ctx == a.tree.ctx + a.tokens for a, b in pairwise(some))
        assert len({r.tree.path(len(r.tree) - 1) for r in some}) > (5 if drafter is not no_draft else 0) and {r.verdict.token for r in some} == set(range(4))


def test_numpy_input():
    "An array for a context and a numpy integer for n give plain integers"
    text = generate(random_table(3, 1), no_draft, match, np.array([0, 1]), np.int64(3), Seeded(0))
    assert text == generate(random_table(3, 1), no_draft, match, (0, 1), 3, Seeded(0)) and all(type(x) is int for x in text)


def test_progress_is_shown_on_request(capsys):
    pytest.importorskip("tqdm")
    assert len(autoregressive(random_table(3, 1), (0,), 5, Seeded(0), progress=True)) == 5 and "5/5" in capsys.readouterr().err


# Bad input

def test_doors():
    "An empty or alien context, a bad number, models of another vocabulary: refused by name before any model is called"
    target = random_table(3, 1)
    for f in (lambda *a: generate(target, *a, Seeded(0)), lambda *a: loop_law(target, *a)):
        for ctx in ((), (3,), (-1,), (0, 5, 0)): refuses("ctx", f, no_draft, match, ctx, 3)
        for n in (-1, 1.5, "3", None): refuses("n", f, no_draft, match, (0,), n)
        for other in (Chain(random_table(4, 1), 2), Branching(random_table(2, 1), (2,))): refuses("drafter", f, other, reject, (0,), 3)
    assert target.meter.calls == 0


OPEN = {
    "a fraction of a token": ("ctx", dict(ctx=(.5,))),
    "a lookup on another vocabulary": ("drafter", dict(drafter=PromptLookup(5, exact=True), ctx=(0, 1, 0, 1))),
    "a stop token instead of a set": ("stop", dict(stop=2)),
    "a seed instead of an rng": ("rng", dict(rng=0)),
    "no target": ("target", dict(target=None)),
    "no drafter": ("drafter", dict(drafter=None)),
    "the name of a judge": ("verify", dict(verify="reject")),
}


@pytest.mark.parametrize("what", OPEN)
def test_open_doors(what):
    name, kw = OPEN[what]
    refuses(name, generate, **{**dict(target=random_table(3, 1), drafter=no_draft, verify=reject, ctx=(0,), n=3, rng=Seeded(0)), **kw})


def test_seconds_of_nothing(): assert Ledger().seconds == dict(draft=0, target=0, verify=0)


def test_what_a_ledger_shows_of_its_models():
    "Each model behind a semicolon of its own, and none behind the rates where no model is counted"
    shown = [repr(Ledger(models=models)) for models in ({}, dict(target=Meter(2, 5)), dict(target=Meter(2, 5), draft=Meter(3, 7)))]
    assert shown[0].endswith("per position []")
    assert [text[len(shown[0]):] for text in shown] == ["", "; target: 2 calls, 5 tokens", "; target: 2 calls, 5 tokens; draft: 3 calls, 7 tokens"]


def test_probes_have_no_position():
    def probing(ctx, rng):
        tree = Tree(ctx)
        tree.add(tree.add(0, 1), 2)
        return tree
    assert generate(random_table(3, 1), probing, reject, (0,), 3, Seeded(0)).ledger.acceptance_rate_per_position == []
