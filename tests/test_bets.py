"Chapters 17a, 17ab to 17ad: bets at fair odds, numbers that repeat, rounds, and the file of recorded rounds"
import json
import os
import tracemalloc
from fractions import Fraction
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import MISS, cold, killer, models, plans, Plan, proves, random_table, tempered
from specref.certify.bets import ODDS, Bets, Claim, Report, SparseRow, group_bets, stop_bets
from specref.certify.noise import SOURCES, WIDTHS, NoiseBets, cells_of, density
from specref.certify.sequential import RecordedRound, SequentialTest, certify_rounds, certify_sequentially
from specref.certify.sequential import sample_rounds
from specref.certify.logs import certify_log, load_log, logged_round, save_log
from specref.verify.block import block
from specref.core.rng import Seeded, Streams, Uniforms, law_of, numpy_generator
from specref.core.law import normalize, overlap, residual
from specref.core.loop import System, Verdict, clip, match, no_draft, autoregressive, rounds
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching
from specref.core.registry import SYSTEMS
from specref.core.target import TableModel, target_law
from specref.certify.known import Rule, from_r
from specref.certify.tree_mutants import siblings_by_p
from specref.core.tree import Tree, iid, without_replacement

# Bets

def chance_of(bits): return (.2, .5, .7)[sum(bits) % 3]   # of the next event, given those before

@proves("thm-bets")
@pytest.mark.parametrize("odds,alpha", [(ODDS, .1), (np.array([2., .5]), .5), (np.array([9.]), .02)])
def test_wealth_is_a_fair_game(odds, alpha):
    "All 512 futures of nine bets on events that depend on the past: the mean wealth is 1"
    mean = ever = total = 0.
    for bits in product((0, 1), repeat=9):
        bets, p, top = Bets(odds), 1., 1.
        for n, h in enumerate(bits):
            a = chance_of(bits[:n])
            bets.place(a, h)
            p, top = p*(a if h else 1 - a), max(top, bets.wealth)
        mean, ever, total = mean + p*bets.wealth, ever + p*(top >= 1/alpha), total + p
    assert total == pytest.approx(1) and mean == pytest.approx(1) and ever <= alpha
    assert ever > 0 or alpha < .1

@proves("thm-bets")
def test_several_rivals_are_one_fair_game():
    "The mean wealth of a claim, over all texts of five tokens of a distribution that depends on the text: 1"
    target, draft = killer()
    mean = ever = 0
    for y, w in target_law(target, (0,), 5).items():
        claim, top = Claim("draft", "before", sets=dict(groups=group_bets(), stop=stop_bets([1]))), 0
        for i, x in enumerate(y):
            before = target.law((0, *y[:i-1])) if i else None
            claim.observe(target.law((0, *y[:i])), x, draft=draft.law((0, *y[:i])), before=before)
            top = max(top, claim.wealth)
        mean, ever = mean + float(w)*claim.wealth, ever + float(w)*(top >= 20)
    assert mean == pytest.approx(1) and ever <= 1/20

def test_counts_are_bets_too():
    "Hits in many events of one probability, placed at once: the same wealth; certain events are no bets"
    one_by_one, at_once, rich = Bets(), Bets(), Bets()
    for h in (1, 0, 1, 1): one_by_one.place(.3, h, .6)
    at_once.place(.3, 3, .6, of=4)
    for bets in (one_by_one, at_once): assert bets.hits == 3 and bets.expected == pytest.approx(1.2)
    assert one_by_one.wealth == pytest.approx(at_once.wealth)
    for chance in (0., 1., 1.0000001): at_once.place(chance, 1)
    assert at_once.placed == 1 and Bets().wealth == pytest.approx(1) and Bets().share(10) == np.inf
    rich.place(.5, 10**5, of=10**5)
    assert np.isfinite(rich.wealth) and rich.wealth > 1e300

def test_the_odds_cost_little():
    "Published sizes: shifts of .16 and .036 around one half take at most twice the best bettor's tokens"
    for shift, most in ((.16, 1000), (.036, 20_000)):
        h = numpy_generator(3).random(2*most) < .5 + shift
        bets, k = Bets(), 0
        while bets.wealth < 1e9:
            bets.place(.5, bool(h[k]))
            k += 1
        a = .5 + shift
        alone = np.log(1e9) / (a*np.log(2*a) + (1 - a)*np.log(2 - 2*a))
        assert alone/2 < k < 2*alone and k < most

def test_a_stated_share_is_detected():
    "At the share that is stated, all but MISS of 400 runs on random rows are rejected"
    rng = numpy_generator(11, 0)
    rows = rng.dirichlet(np.ones(6), (300, 2))
    p, q = rows[:, 0], rows[:, 1]
    a, r = (p*(q > p)).sum(1), (q*(q > p)).sum(1)
    bets = Bets()
    for c, rival in zip(a, r): bets.place(c, 0, rival)
    share, limit = bets.share(1e4), 1e4
    def found(part):
        h = rng.random((400, 300)) < a + part*(r - a)
        log = np.log(ODDS)*h.sum(1)[:, None] - np.log1p(np.outer(a, ODDS - 1)).sum(0)
        return (np.exp(log).mean(1) >= limit).mean()
    assert share < .6 and found(share) >= 1 - MISS - 6*np.sqrt(MISS/400) and found(share/3) < .2
    assert bets.share(1e9) > share > bets.share(10)

def test_a_stated_loss_is_detected():
    "The share of accepted tokens whose loss is stated, likewise: the rival has none of them"
    rng, bets = numpy_generator(11, 1), Bets(ODDS[ODDS < 1])
    for c in (chances := rng.uniform(.3, .9, 300)): bets.place(c, 0)
    def found(loss):
        h = rng.random((400, 300)) < chances*(1 - loss)
        log = np.log(bets.odds)*h.sum(1)[:, None] - np.log1p(np.outer(chances, bets.odds - 1)).sum(0)
        return (np.exp(log).mean(1) >= 4e9).mean()
    assert bets.share(4e9) < .5 and found(bets.share(4e9)) >= 1 - MISS - 6*np.sqrt(MISS/400)
    assert found(bets.share(4e9)/3) < .2

# Token by token

def block_law(verify, drafter, target):
    "The distribution of the block of one round"
    return law_of(lambda rng: next(rounds(target, drafter, verify, (0,), rng)).tokens)

def conditional(law, target):
    "Whether each token of a block has the distribution of its row, given the earlier tokens of the block"
    begun = {}
    for y, w in law.items():
        for i in range(len(y)): begun.setdefault(y[:i], {}).setdefault(y[i], []).append(w)
    for y, after in begun.items():
        total = sum(map(sum, after.values()))
        if any(sum(after.get(x, [0])) != total*target.law((0, *y))[x] for x in range(target.V)): return False
    return True

def completed(law, target, n):
    "The distribution of `n` tokens when the target samples the tokens after a block"
    out = {}
    for y, w in law.items():
        for z, v in target_law(target, (0, *y), max(n - len(y), 0)).items():
            out[(y + z)[:n]] = out.get((y + z)[:n], 0) + w*v
    return {y: w for y, w in out.items() if w}

@proves("lem-token-by-token")
@settings(max_examples=25)
@given(models(), plans(probes=False), st.sampled_from(["reject", "match", "all", "p", "bonus"]))
def test_token_by_token(pair, steps, rule):
    "Correct and incorrect rules on any tree"
    target, draft = pair
    verify = dict(reject=reject, match=match, all=Rule(accept=lambda t: True),
                  p=Rule(after=from_r),
                  bonus=Rule(bonus=lambda p, tree, i: p[0]))[rule]
    law = block_law(verify, Plan(draft, steps), target)
    n = max(map(len, law))
    want = {y: w for y, w in target_law(target, (0,), n).items() if w}
    whole = completed(law, target, n) == want
    assert whole == conditional(law, target)
    assert whole or rule not in ("reject", "match")

@proves("lem-token-by-token")
def test_what_must_not_be_conditioned_on():
    "Block verification satisfies the lemma; given a rejected draft, the token has another distribution"
    target, draft = killer()
    assert conditional(block_law(block, Chain(draft, 2), target), target)
    def outcome(rng):
        r = next(rounds(target, Chain(draft, 1), reject, (0,), rng))
        return r.verdict.node == 0, r.tokens[0]
    first = law_of(outcome)
    no = normalize(np.array([first.get((True, x), Fraction(0)) for x in range(3)], dtype=object))
    assert (no == residual(target.law((0,)), draft.law((0,)))).all() and (no != target.law((0,))).any()

# Trials

def system(drafter, verify): return System("under test", drafter, verify)

target, draft = (tempered(random_table(4, s, zeros=False), 1.) for s in (1, 2))
def previous_row(p, tree, i): return p[tree.parent[i]] if i else p[i]

def misstated(model, choose=lambda q: int(np.argmax(q))):
    "Drafts the token that `choose` returns, and states that it was sampled from q"
    def drafter(ctx, rng):
        tree = Tree(ctx)
        q = model(tree)[0]
        tree.add(0, choose(q), q)
        return tree
    return drafter

def warm(model):
    "Samples from the square root of the distribution that it states"
    def drafter(ctx, rng):
        tree = Tree(ctx)
        q = model(tree)[0]
        tree.add(0, rng.pick(normalize(np.sqrt(q))), q)
        return tree
    return drafter

WRONG = {   # drafter, verifier, the check that fails
    "everything accepted": (Chain(draft, 2), Rule(accept=lambda t: True), "distribution"),
    "recovered token from p": (Chain(draft, 2), Rule(after=from_r), "distribution"),
    "|p - q|": (Chain(draft, 2), Rule(after=lambda t: normalize(abs(t.r - t.q))), "distribution"),
    "bonus from the previous row": (Chain(draft, 2), Rule(bonus=previous_row), "distribution"),
    "every row is the first": (Chain(draft, 2), Rule(row=lambda p, tree, i: p[0]), "distribution"),
    "argmax of the target": (no_draft, lambda p, tree, rng: Verdict(0, int(np.argmax(p[0]))), "distribution"),
    "the target too warm": (no_draft, lambda p, tree, rng: Verdict(0, rng.pick(normalize(np.sqrt(p[0])))),
                            "distribution"),
    "siblings verified by p alone": (Branching(draft, (3, 1), iid), siblings_by_p, "distribution"),
    "argmax stated as sampled": (misstated(draft), reject, "draft"),
    "always token 2": (misstated(draft, lambda q: 2), reject, "draft"),
    "sampled too warm": (warm(draft), reject, "draft"),
    "draft tokens ignored": (Chain(draft, 2), lambda p, tree, rng: Verdict(0, rng.pick(p[0])), "tokens"),
    "match for reject": (Chain(draft, 2), match, "tokens"),
}

EARLIER = {"argmax of the target": "noise", "always token 2": "distribution"}   # repetition, one token alone

@pytest.mark.parametrize("name", WRONG)
def test_incorrect_systems_are_rejected(name):
    "Each by the check that concerns its bug, in fewer than 6,000 rounds"
    drafter, verify, line = WRONG[name]
    test = SequentialTest(like="reject")
    for round in islice(sample_rounds(system(drafter, verify), target, (0,), 8, 0), 6000):
        test.observe(round)
        if test.over: break
    found = test.report()
    assert not found.passes and found.wrong == (EARLIER.get(name, line),) and "FAILED" in str(found), found
    bets = dict(distribution=test.law, draft=test.draft, tokens=test.accepted)[line]
    for round in islice(sample_rounds(system(drafter, verify), target, (0,), 8, 1), 6000 - test.rounds):
        if bets.wealth >= test.limit: break
        test.observe(round)
    assert line in test.report().wrong and test.rounds < 6000

@pytest.mark.parametrize("name", SYSTEMS)
def test_correct_systems_pass(name):
    "Every listed system, on trees and chains, in floats"
    s = SYSTEMS[name](draft, gamma=2, shape=(2, 1))
    like = overlap if s.verify is reject else None
    found = certify_sequentially(s, target, (0,), most=120, n=7, seed=4, like=like)
    assert not found.wrong and found.title.startswith("120 rounds") and "1e-09" in found.title
    sees = found.share <= 1   # for some of them 120 rounds are too few
    assert [x.passes for x in found.lines if x.check == "distribution"] == [True if sees else None]
    assert sees is not bool(found.weak) and found.passes is sees

TREES = Branching(draft, (2, 2), without_replacement)

@pytest.mark.parametrize("verify,drafter", [(block, Chain(draft, 3)), (reject, TREES)])
def test_correct_rules_pass_a_long_test(verify, drafter):
    "1,000 rounds; 40 % of the tokens from the draft are detectable"
    test = SequentialTest(like=overlap)
    played = sample_rounds(system(drafter, verify), target, (0,), 8, 5)
    for round in islice(played, 1000): test.observe(round)
    assert not test.over and test.law.wealth < 1e3 and test.law.bets["draft"].share(test.limit) < .4

def never(token, rule=None):
    "Samples again, from the row without it, where `rule` emits the token; or always, from the target alone"
    def without(p, node, rng):
        return Verdict(node, rng.pick(normalize(p[node]*(np.arange(len(p[node])) != token))))
    def verify(p, tree, rng):
        found = rule(p, tree, rng) if rule else None
        if found and token not in found.tokens(tree): return found
        first = found.tokens(tree).index(token) if found else 0
        return without(p, (0, *tree.ancestors(found.node))[first] if found else 0, rng)
    return verify

@pytest.mark.parametrize("s", [system(Chain(draft, 2), never(1, reject)), system(no_draft, never(1))])
def test_a_token_that_is_never_emitted(s):
    "With a draft and without: found by the bets on its own group, and not by those on random numbers"
    found = certify_sequentially(s, target, (0,), most=300)
    assert found.wrong == ("distribution",) and "; tokens 1 modulo 64: observed 0," in found.lines[0].words

def masked_rounds(n, V=300, stop=7):
    "Rounds of an engine without drafts, whose stop token, a tenth of each row, is never emitted"
    rng, at = numpy_generator(3), np.arange(V) == stop
    for _ in range(n):
        rest = .5*(np.arange(V) == 0) + .5*normalize(rng.random(V)*~at)
        yield logged_round([.9*rest + .1*at], None, [], [rng.choice(V, p=rest)])

def test_a_stop_token_that_is_never_emitted():
    "In a vocabulary of 300, given as a stop token; by its group of five tokens it takes longer"
    given, alone = (certify_rounds(masked_rounds(600), stop=stop) for stop in ((7,), ()))
    assert given.wrong == alone.wrong == ("distribution",)
    for found, words in (given, "; stop tokens: observed 0,"), (alone, "; tokens 7 modulo 64: observed"):
        assert words in found.lines[0].words
    needed = [int(found.title.split()[0]) for found in (given, alone)]
    assert needed[0] < needed[1]
    for rounds_seen, stated in (needed[0] - 1, False), (needed[0] + 30, True):
        test = SequentialTest(stop=(7,))
        for r in islice(masked_rounds(600), rounds_seen): test.law.observe(r.p[0], 0)
        assert ("stop tokens that never occur" in test.law.missing_sets(test.limit)) == stated

def test_it_stops_at_the_first_rejection():
    "One token of probability zero is enough, and no further round is played"
    zero = TableModel(3, lambda text: np.array([.5, .5, 0.]))
    calls = []
    def wrong(p, tree, rng):
        calls.append(1)
        return Verdict(0, 2 if len(calls) == 5 else rng.pick(p[0]))
    found = certify_sequentially(system(no_draft, wrong), zero, (0,), most=100)
    assert found.wrong == ("distribution",) and len(calls) == 5
    assert "token 2 has probability 0 (observation 5)" in found.words
    undrafted = certify_sequentially(autoregressive, zero, (0,), most=20)
    assert undrafted.lines[-1].passes is None

def test_a_larger_rate_rejects_earlier():
    "Of false alarms, for the same incorrect system"
    wrong = system(Chain(draft, 2), Rule(after=from_r))
    titles = [certify_sequentially(wrong, target, (0,), most=6000, n=8, alpha=a).title for a in (.01, 1e-9)]
    early, late = (int(title.split()[0].replace(",", "")) for title in titles)
    assert early < late

def test_fractions_and_floats_alike():
    "Bets on a table of fractions"
    exact_target, exact_draft = killer()
    wrong = system(Chain(exact_draft, 2), Rule(accept=lambda t: True))
    assert certify_sequentially(system(Chain(exact_draft, 2), reject), exact_target, (0,), most=60).passes
    assert not certify_sequentially(wrong, exact_target, (0,), most=600).passes

def test_a_rule_is_tested_only_where_it_is_claimed(tmp_path):
    "Match is exact and accepts fewer: reported by default, rejected only where reject is claimed"
    slow = system(Chain(draft, 2), match)
    played = recorded(700, verify=match)
    for found in (certify_sequentially(slow, target, (0,), most=300), certify_rounds(played)):
        assert found.passes and found.lines[-1].passes is None
        assert "fewer than by speculative sampling, which is no error" in found.lines[-1].words
    save_log(file := tmp_path/"rounds.npz", played)
    wrong = [certify_log(file, like=like).wrong for like in (None, "match", "reject", overlap)]
    assert wrong == [(), (), ("tokens",), ("tokens",)]
    right = certify_sequentially(system(Chain(draft, 2), reject), target, (0,), most=200)
    assert "fewer than" not in right.words
    claimed = certify_sequentially(system(Chain(draft, 2), reject), target, (0,), most=200, like="reject")
    assert "detectable with power 0.999: the loss of " in claimed.lines[-1].words

def test_false_alarms_at_a_measurable_rate():
    "At alpha = 1/10, 25 tests of 60 correct rounds: at most 1/10 false alarms (and six standard deviations)"
    correct, how = system(Chain(draft, 2), reject), dict(most=60, n=9, alpha=.1)
    alarms = sum(certify_sequentially(correct, target, (0,), seed=s, **how).wrong != () for s in range(25))
    assert alarms <= 25*.1 + 6*np.sqrt(25*.1*.9)

def test_a_report_that_could_see_nothing_does_not_pass():
    "Ten rounds show no share of draft tokens; greedy rows show every other token, in one round too"
    few = certify_sequentially(system(Chain(draft, 2), reject), target, (0,), most=10, n=9)
    assert not few.passes and few.weak == ("distribution",) and "too weak: distribution" in few.title
    sharp = [cold(m) for m in (target, draft)]
    greedy = certify_sequentially(system(Chain(sharp[1], 2), reject), sharp[0], (0,), most=10, n=9)
    assert greedy.passes and 0 < greedy.share < .6

# Repeated random numbers

@proves("thm-noise")
@pytest.mark.parametrize("tolerance", [0., .1])
def test_bets_on_repeated_numbers_are_a_fair_game(tolerance):
    "All futures of three texts of two rounds; with a tolerance, rows that are wrong within it: at most 1"
    rows, q = {x: np.roll([.5, .3, .2], x) for x in range(3)}, np.array([.2, .5, .3])
    true = {x: p + tolerance*np.array([.2, -.1, -.1]) for x, p in rows.items()}
    mean = ever = total = 0.
    for y in product(range(3), repeat=6):
        noise, weight, top = NoiseBets(tolerance), 1., 0.
        for k in range(3):
            for at, (x, last) in enumerate([(y[2*k], 0), (y[2*k + 1], y[2*k])]):
                weight *= true[last][x]
                noise.observe(k, [cells_of(rows[last], x, q)], at, (0, last)[:at + 1])
            top = max(top, noise.wealth)
        mean, ever, total = mean + weight*noise.wealth, ever + weight*(top >= 3), total + weight
    assert total == pytest.approx(1) and 0 < ever <= 1/3
    assert mean == pytest.approx(1) if not tolerance else mean < 1

@proves("thm-noise")
@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=6).filter(any), st.integers(0, 8), st.integers(1, 8))
def test_the_factor_is_the_mean_over_the_transform(weights, first, length):
    "Over the tokens the mean is 1; given a token it is the share of its cell that is inside, in both orders"
    p, q = np.array(weights) / sum(weights), np.arange(len(weights)) % 3 / 3
    low, high = first/16, (first + length)/16
    v = (np.arange(4000) + .5) / 4000
    means = []
    for order in (0, 1):
        seen = [cells_of(p, x, q)[0][order] for x in range(len(p))]
        d = np.array([density(c, np.array([low, high]), WIDTHS[:1])[0] for c in seen])
        means.append(p @ d)
        for (a, b), mine in zip(seen, d):
            u = a + (b - a)*v
            if b > a: assert mine == pytest.approx(((low <= u) & (u < high)).mean() / (high - low), abs=5e-3)
    assert means == pytest.approx([1, 1])

class Kept(Seeded):
    "The numbers of the first round in every round"
    def at(self, i): return super().at(0)

class KeptByVerifier(Seeded):
    def at(self, i): return Streams(super().at(i).draft, super().at(0).verify)

class ByNode(Uniforms):
    "Numbers keyed by the text, the node and the kind of draw, not by the round"
    def __init__(self, *address): self.address = address
    def at(self, i): return Streams(ByNode(*self.address, 0), ByNode(*self.address, 1))
    def uniform(self, kind, at, key):
        return numpy_generator(0, *self.address, kind == "coin", at or 0).random()

GENERATORS = {   # rng of text k, tokens that suffice
    "kept between rounds": (lambda k: Kept(0, (0, k)), 500),
    "kept by the verifier": (lambda k: KeptByVerifier(0, (0, k)), 2500),
    "keyed without the round": (ByNode, 500),
    "shared between texts": (lambda k: Seeded(0), 120),
    "reseeded each round": (lambda k: Kept(0), 120)}

def run_test(rng, tokens, n=32, verify=reject):
    "The test of rounds of a generator, up to a number of tokens"
    test = SequentialTest()
    for round in sample_rounds(system(Chain(draft, 2), verify), target, (0,), n, 0, rng):
        test.observe(round)
        if test.over or test.noise.tokens >= tokens: return test

@pytest.mark.parametrize("name", GENERATORS)
def test_repeated_numbers_are_found(name):
    "A correct rule with a generator that repeats itself, within the stated number of tokens"
    rng, most = GENERATORS[name]
    test = run_test(rng, most)
    assert test.report().wrong == ("noise",) and test.noise.tokens < most, test.report()
    assert "random numbers return" in " ".join(test.report().words.split())

class ByKey(Uniforms):
    "Numbers keyed by the text itself"
    def __init__(self, *key): self.key = key
    def uniform(self, kind, at, key): return numpy_generator(0, *self.key, kind == "coin", at or 0).random()

KEYS = {   # of the tree and the text's number; tokens that suffice for the target alone, and with drafts
    "position": (lambda tree, text: (len(tree.ctx),), 100, 1400),
    "last 2 tokens": (lambda tree, text: tree.ctx[-2:], 200, 1400),
    "text, last 3 tokens": (lambda tree, text: (text, *tree.ctx[-3:]), 300, None)}

@pytest.mark.parametrize("name", KEYS)
def test_numbers_keyed_by_the_text_are_found(name):
    "Watermark keys, and keys of the position alone, from rounds and from their log without contexts"
    key, *most = KEYS[name]
    for tokens, drafter, rule in zip(most, (no_draft, Chain(draft, 2)), (match, reject)):
        def keyed(p, tree, rng): return rule(p, tree, ByKey(*key(tree, rng.address[1])))
        played, test = [], SequentialTest()
        for r in sample_rounds(system(drafter, keyed), target, (0,), 64, 0) if tokens else ():
            played.append(RecordedRound(Tree(()), r.p, r.verdict, r.text))   # a log has no context
            test.observe(r)
            if test.over or test.noise.tokens >= tokens: break
        found = [test.report()] if tokens else []
        if drafter is no_draft: found.append(certify_rounds(played))
        for report in found: assert report.wrong == ("noise",), report

def test_new_numbers_are_no_repetition():
    "The right engine beside the mutants, over as many tokens as most of them need, and the power there"
    test = run_test(lambda k: Seeded(0, (0, k)), 1500)
    assert not test.over and test.noise.wealth < 10 and test.noise.share(test.limit) < .3

@pytest.mark.parametrize("bits", [16, 62])
def test_short_seeds(bits):
    "Seeds of 16 bits repeat whole texts of 32 tokens after some hundred; those of 62 bits do not"
    noise, p = NoiseBets(), np.array([.4, .3, .2, .1])
    for k in range(360):
        u = numpy_generator(int(numpy_generator(5, k).integers(2**bits))).random(32)
        noise.observe(k, [cells_of(p, int(x)) for x in p.cumsum().searchsorted(u)])
        if noise.wealth >= 4e9: break
    assert (noise.wealth >= 4e9) == (bits == 16)
    assert ("texts before" in noise.source()) == (bits == 16)

def test_requests_of_one_batch_share_no_numbers():
    "Texts whose rounds alternate in a log: one generator for all of them is found"
    def batch(rng):
        parts = [sample_rounds(system(Chain(draft, 2), reject), target, (k,), 400, 0, rng) for k in range(3)]
        for rounds_of_all in zip(*parts):
            for k, r in enumerate(rounds_of_all): yield RecordedRound(r.tree, r.p, r.verdict, (k, r.text))
    shared = certify_rounds(islice(batch(lambda k: Seeded(0, (0, k))), 600))
    own = (Seeded(0, (0, k)) for k in range(10**6))
    assert shared.wrong == ("noise",) and certify_rounds(islice(batch(lambda k: next(own)), 300)).passes

def test_wrong_only_in_long_contexts():
    "Bettors that begin late in each text need a third of the tokens; the right rule stays poor"
    everything = Rule(accept=lambda t: True)
    def late(p, tree, rng): return (everything if len(tree.ctx) > 34 else reject)(p, tree, rng)
    needed = {}
    for starts in (0, 32, 128, 512), (0,):
        test = SequentialTest()
        test.law = Claim("draft", "before", starts=starts)
        for r in islice(sample_rounds(system(Chain(draft, 2), late), target, (0,), 48, 0), 3000):
            test.observe(r)
            if test.over: break
        needed[starts] = test.law.tokens
        assert test.report().wrong == ("distribution",)
    assert 2*needed[0, 32, 128, 512] < needed[0,]

# Texts as returned

def returned(cut, n=12, texts=60):
    "Rounds of texts whose blocks an engine cuts by `cut(tokens, room)`"
    for k in range(texts):
        room = n
        for r in rounds(target, Chain(draft, 2), reject, (0,), Seeded(1, (0, k))):
            y = cut(r.tokens, room)
            room -= len(y)
            yield RecordedRound(r.tree, r.p, Verdict(len(y) - 1, y[-1]), k)
            if room <= 0 or y[-1] == 3: break

CUTS = {"": lambda tokens, room: clip(tokens, room, (3,)),
        "after a stop token": lambda tokens, room: tokens[:room],
        "more than 12 tokens": lambda tokens, room: clip(tokens, 99, (3,))}

@pytest.mark.parametrize("kind", ["npz", "jsonl"])
@pytest.mark.parametrize("words", CUTS)
def test_texts_are_tested_as_returned(tmp_path, words, kind):
    "A stop token that is seen at the end of a block only, and a text that is too long; clipping hides both"
    save_log(file := tmp_path/f"rounds.{kind}", returned(CUTS[words]))
    found = certify_log(file, stop=(3,), n=12)
    assert found.wrong == (("text",) if words else ()) and words in found.words
    assert not certify_log(file).wrong
    if not words: assert not certify_log(file, n=13).wrong and "60 texts" in found.words

def test_without_the_numbers_of_texts_a_stop_token_ends_a_round():
    plain = [RecordedRound(r.tree, r.p, r.verdict) for r in returned(CUTS[""])]
    assert not certify_rounds(plain, stop=(3,)).wrong
    plain = [RecordedRound(r.tree, r.p, r.verdict) for r in returned(CUTS["after a stop token"])]
    assert certify_rounds(plain, stop=(3,)).wrong == ("text",)

# Rounded and sparse rows

def bfloat16(a): return ((np.asarray(a, np.float32).view(np.uint32) + 0x8000) & 0xffff0000).view(np.float32)

def row_within(p, tolerance, rng):  # -> (V,) or None
    "A random row within the tolerance of `p`"
    true = p*(1 + tolerance*rng.choice([-1, 1, 0], len(p)))
    missing, zero = 1 - true.sum(), p == 0
    to = zero if 0 < missing <= tolerance and zero.any() else p
    true = true + missing*to / to.sum()
    return true if (abs(true - p) <= tolerance*p + 1e-12)[~zero].all() else None

@proves("thm-tolerance")
@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([.004, .05, .3]))
def test_bets_are_fair_within_the_tolerance(seed, tolerance):
    "Random rows within the tolerance of a stated row with zeros: no bet gains on average"
    rng, mean = numpy_generator(seed), np.zeros(2)
    p, (q, source) = rng.dirichlet(np.ones(5)), rng.random((2, 5))
    p = normalize(p * (np.arange(5) > rng.integers(3)))
    true, q = row_within(p, tolerance, rng), q / q.sum()
    if true is None: return
    for x in range(5):
        sets = dict(groups=group_bets(tolerance), stop=stop_bets([1, 3], tolerance))
        claim, noise = Claim("draft", tolerance=tolerance, sets=sets), NoiseBets(tolerance)
        claim.observe(p, x, draft=q)
        noise.place(cells_of(p, x, q)[0][None], np.tile(np.sort(source[:2]), (1, len(SOURCES), 2, 1)))
        mean += true[x]*np.array([claim.wealth, 2*noise.wealth - 1])
    assert np.isfinite(mean).all() and (mean <= 1 + 1e-9).all()
    rates = dict(reject=np.minimum(true, q*(1 - tolerance)).sum(), match=true @ q*(1 - tolerance))
    for like, rate in rates.items():
        assert SequentialTest(like=like, tolerance=tolerance).acceptance(p, q) <= rate + 1e-12

def coarse(r):
    "The round with rows in bfloat16, and small weights recorded as 0"
    def rough(rows): return [a * (a > a.max()/100) for a in bfloat16(rows)]
    g = len(r.tree)
    p, q = rough([r.p[i] for i in range(g)]), rough([r.tree.law[i] for i in range(1, g)])
    return logged_round(p, q, r.tree.token[1:], r.tokens, r.text, .05)

def test_rounded_logs():
    "A rejection without a tolerance, and none with it; a wrong rule is still found"
    p, q = (tempered(random_table(4, s, zeros=False), .4) for s in (1, 2))
    right, wrong = ([coarse(r) for r in islice(sample_rounds(system(Chain(q, 2), rule), p, (0,), 8, 3), 400)]
                    for rule in (reject, Rule(accept=lambda t: True)))
    assert "has probability 0" in certify_rounds(right).words
    found = certify_rounds(right, tolerance=.05, like="reject")
    assert found.passes and "relative error of 0.05" in found.title
    assert certify_rounds(wrong, tolerance=.05).wrong == ("distribution",)

def test_too_many_tokens_of_stated_probability_zero():
    "One is no rejection, a run of them is"
    zeros = Claim("draft", tolerance=.004)
    for k in range(14):
        zeros.observe(np.array([.5, .5, 0.]), 2, draft=np.ones(3)/3)
        if not k: assert zeros.wealth < 10
    assert zeros.wealth > 4e9 and "stated probability 0" in zeros.words(4e9)

def test_the_power_lost_by_a_tolerance():
    "Detectable shares grow with the tolerance; at .004, by less than a fiftieth of the tokens"
    shares = []
    played = recorded(250)
    for tolerance in (0, .004, .05):
        test = SequentialTest(tolerance=tolerance)
        for r in played: test.observe(r)
        shares.append((test.law.bets["draft"].share(test.limit), test.noise.share(test.limit)))
    none, little, much = np.array(shares)
    assert (little - none <= .02).all() and (much >= little).all() and (much > none).any()

@proves("lem-sparse")
def test_sparse_rows_are_classes():
    "Bets on sparse rows are those on the classes; the acceptance probability is a lower bound"
    for p, q, order in numpy_generator(3).dirichlet(np.ones(6), (50, 3)):
        at = np.sort(np.argsort(order)[:3])
        sparse, weights = SparseRow(at[::-1], p[at][::-1]), []
        classes, rival = (np.append(a[at], 1 - a[at].sum()) for a in (p, q))
        for x in range(6):
            full, part = Claim("draft"), Claim("draft")
            part.observe(sparse, x, draft=q)
            full.observe(classes, (*at, x).index(x), draft=rival)
            assert part.wealth == pytest.approx(full.wealth)
            weights.append(part.wealth)
        assert p @ weights == pytest.approx(1)
        test = SequentialTest(like="reject")
        for other in (q, SparseRow(at[:2], q[at[:2]])):
            assert test.acceptance(sparse, other) <= overlap(p, q) + 1e-12
        assert test.acceptance(p, q) == pytest.approx(overlap(p, q))

def test_a_sparse_log_rejects_and_passes(tmp_path):
    "The two most likely of four tokens of each row: enough for the same results"
    wrong = [WRONG[name] for name in ("everything accepted", "argmax stated as sampled")]
    for drafter, verify, *failed in ((Chain(draft, 2), reject), *wrong):
        save_log(file := tmp_path/"rounds.jsonl", recorded(600, drafter, verify), top=2)
        assert '"p": [{"' in file.read_text()[:400] and certify_log(file, like="reject").wrong == (*failed,)

# Recorded rounds

def recorded(n=40, drafter=Chain(draft, 2), verify=reject):
    return list(islice(sample_rounds(system(drafter, verify), target, (0,), 5, 3), n))

def test_a_log_holds_what_was_played(tmp_path):
    "Written and read: the same drafts, verdicts and rows, to the digits of float32, and the same report"
    played_rounds = recorded(300)
    save_log(file := tmp_path/"rounds.npz", played_rounds)
    for a, b in zip(played_rounds, load_log(file), strict=True):
        assert a.tokens == b.tokens and a.verdict == b.verdict and a.tree.token == b.tree.token
        assert a.tree.parent == b.tree.parent
        for i in range(len(a.tree)):
            assert np.allclose(a.p[i], b.p[i], atol=1e-6)
            if i: assert np.allclose(a.tree.law[i], b.tree.law[i], atol=1e-6)
    direct, read = certify_rounds(played_rounds, like=overlap), certify_log(file, like=overlap)
    assert direct.passes and read.passes
    assert [x.check for x in read.lines] == ["distribution", "draft", "noise", "tokens"]
    assert direct.lines[3].words == read.lines[3].words and os.listdir(tmp_path) == ["rounds.npz"]
    save_log(lines := tmp_path/"rounds.jsonl", played_rounds)
    assert certify_log(lines, like=overlap) == direct and [r.text for r in load_log(lines)] == [
        r.text for r in load_log(file)] == [r.text for r in played_rounds]

def test_logs_of_all_lengths(tmp_path):
    "Chains of one round longer than those of another, and rounds without a draft"
    mixed = [*recorded(5, Chain(draft, 3)), *recorded(5, Chain(draft, 1)), *recorded(5, no_draft, match)]
    save_log(file := tmp_path/"rounds.npz", mixed)
    assert [r.tokens for r in load_log(file)] == [r.tokens for r in mixed]
    assert [len(r.tree) for r in load_log(file)] == [4]*5 + [2]*5 + [1]*5

LOGGED = ["everything accepted", "bonus from the previous row", "recovered token from p",
          "draft tokens ignored", "argmax stated as sampled"]

@pytest.mark.parametrize("name", LOGGED)
def test_a_log_rejects(tmp_path, name):
    drafter, verify, line = WRONG[name]
    save_log(file := tmp_path/"rounds.npz", recorded(1500, drafter, verify))
    assert certify_log(file, like="reject").wrong == (line,)

def test_drafts_without_probabilities(tmp_path):
    "A file without q: the drafts are point masses, and match is the rule of ratios"
    def looked_up(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, len(ctx) % 4, np.eye(4)[len(ctx) % 4])
        return tree
    rs = recorded(400, looked_up, match)
    save_log(file := tmp_path/"rounds.npz", rs)
    with np.load(file) as a: np.savez(tmp_path/"bare.npz", **{k: a[k] for k in ("p", "x", "y", "text")})
    full, bare = certify_log(file), certify_log(tmp_path/"bare.npz")
    assert bare.passes and full.lines == bare.lines
    assert bare.title == f"{full.title}; no q: each draft token is a point mass"

def test_recorded_rows_are_assumed_correct(tmp_path):
    "The log of an engine that computed wrong rows, used them and logged them passes"
    wrong = TableModel(4, lambda text: target.law(text)[::-1])
    played = sample_rounds(system(Chain(draft, 2), reject), wrong, (0,), 5, 3)
    save_log(file := tmp_path/"rounds.npz", list(islice(played, 600)))
    assert certify_log(file).passes

def test_an_impossible_draft_is_a_finding():
    "A drafted token with probability 0 under its stated distribution is a finding, not bad input"
    p, q = np.full((2, 3), 1/3), np.array([[.5, .5, 0.]])
    found = certify_rounds([logged_round(p, q, (2,), (2, 0))])
    assert found.wrong == ("draft",) and "token 2 has probability 0" in found.words

def test_a_failed_writing_leaves_the_old_file(tmp_path, monkeypatch):
    save_log(file := tmp_path/"rounds.npz", recorded(3))
    old = file.read_bytes()
    def broken(f, **kw):
        f.write(b"half")
        raise OSError("full")
    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="full"): save_log(file, recorded(5))
    assert file.read_bytes() == old

def test_a_report_in_words():
    found = certify_rounds(recorded(200))
    assert isinstance(found, Report) and str(found) == repr(found) == found.words and found.wrong == ()
    assert all(len(l) <= 92 for l in found.words.splitlines())
    words = " ".join(found.words.split())
    assert "detectable with power 0.999: " in words and " of the tokens from the draft" in words

def flat_log(file, N, V=500):
    "A log of N equal rounds, as an .npz or as JSON lines"
    p, x, y = np.full((N, 2, V), 1/V), np.full((N, 1), 3), np.tile([4, -1], (N, 1))
    if file.suffix == ".npz": np.savez(file, p=p, x=x, y=y)
    else: file.write_text((json.dumps(dict(p=p[0].tolist(), x=[3], y=[4])) + "\n")*N)
    return file

@pytest.mark.parametrize("kind", ["npz", "jsonl"])
def test_memory_does_not_grow_with_the_log(tmp_path, kind):
    "The peak of reading 200 rounds is that of 10, within a tenth of what the file grows by"
    peaks, files = [], [flat_log(tmp_path/f"{N}.{kind}", N) for N in (10, 200)]
    for file in files:
        tracemalloc.start()
        assert sum(1 for _ in load_log(file)) == int(file.stem)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    short, long_file = (file.stat().st_size for file in files)
    assert peaks[1] - peaks[0] < (long_file - short) / 10
