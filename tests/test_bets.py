"Chapter 17a: bets at fair odds, tests of rounds, and the file of recorded rounds"
import os
from fractions import Fraction
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import MISS, killer, models, plans, Plan, proves, random_table, tempered
from specref.certify.sequential import ODDS, Bets, Claim, Report, SequentialTest, certify_log, certify_rounds
from specref.certify.sequential import certify_sequentially, load_log, logged_round, sample_rounds, save_log
from specref.verify.block import block
from specref.core.rng import law_of, numpy_generator
from specref.core.law import normalize, overlap, residual
from specref.core.loop import System, Verdict, match, no_draft, autoregressive, rounds
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching
from specref.app.systems import SYSTEMS
from specref.core.target import TableModel, target_law
from specref.certify.mutants import reject_from, siblings_by_p
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
        claim, top = Claim("draft", "before"), 0
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
    verify = dict(reject=reject, match=match, all=reject_from(accept=lambda *_: True),
                  p=reject_from(after=lambda r, q, x: r),
                  bonus=reject_from(last=lambda p, tree, i: p[0]))[rule]
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
    "everything accepted": (Chain(draft, 2), reject_from(accept=lambda *_: True), "law"),
    "correction from p": (Chain(draft, 2), reject_from(after=lambda r, q, x: r), "law"),
    "|p - q|": (Chain(draft, 2), reject_from(after=lambda r, q, x: normalize(abs(r - q))), "law"),
    "bonus from the previous row": (Chain(draft, 2), reject_from(last=previous_row), "law"),
    "every row is the first": (Chain(draft, 2), reject_from(row=lambda p, tree, i: p[0]), "law"),
    "argmax of the target": (no_draft, lambda p, tree, rng: Verdict(0, int(np.argmax(p[0]))), "law"),
    "the target too warm": (no_draft, lambda p, tree, rng: Verdict(0, rng.pick(normalize(np.sqrt(p[0])))),
                            "law"),
    "siblings verified by p alone": (Branching(draft, (3, 1), iid), siblings_by_p, "law"),
    "argmax stated as sampled": (misstated(draft), reject, "draft"),
    "always token 2": (misstated(draft, lambda q: 2), reject, "draft"),
    "sampled too warm": (warm(draft), reject, "draft"),
    "draft tokens ignored": (Chain(draft, 2), lambda p, tree, rng: Verdict(0, rng.pick(p[0])), "tokens"),
    "match for reject": (Chain(draft, 2), match, "tokens"),
}


EARLIER = {"argmax of the target": "noise", "always token 2": "noise"}   # without randomness: repetition


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
    for round in islice(sample_rounds(system(drafter, verify), target, (0,), 8, 1), 6000 - test.rounds):
        if line in test.report().wrong: break
        test.observe(round)
    assert line in test.report().wrong and test.rounds < 6000


@pytest.mark.parametrize("name", SYSTEMS)
def test_correct_systems_pass(name):
    "Every listed system, on trees and chains, in floats"
    s = SYSTEMS[name](draft, gamma=2, shape=(2, 1))
    found = certify_sequentially(s, target, (0,), most=120, n=7, seed=4, like=overlap if s.verify is reject else None)
    assert found.passes and found.title.startswith("120 rounds") and "1e-09" in found.title
    assert "law      ok" in found.words


TREES = Branching(draft, (2, 2), without_replacement)


@pytest.mark.parametrize("verify,drafter", [(block, Chain(draft, 3)), (reject, TREES)])
def test_correct_rules_pass_a_long_test(verify, drafter):
    "1,000 rounds; 40 % of the tokens from the draft are detectable"
    trial = SequentialTest(like=overlap)
    for round in islice(sample_rounds(system(drafter, verify), target, (0,), 8, 5), 1000): trial.observe(round)
    assert not trial.over and trial.law.wealth < 1e3 and trial.law.bets["draft"].share(trial.limit) < .4


def test_it_stops_at_the_first_rejection():
    "One token of probability zero is enough, and no further round is played"
    zero = TableModel(3, lambda text: np.array([.5, .5, 0.]))
    calls = []
    def wrong(p, tree, rng):
        calls.append(1)
        return Verdict(0, 2 if len(calls) == 5 else rng.pick(p[0]))
    found = certify_sequentially(system(no_draft, wrong), zero, (0,), most=100)
    assert found.wrong == ("law",) and len(calls) == 5
    assert "token 2 has probability 0 (observation 5)" in found.words
    assert certify_sequentially(autoregressive, zero, (0,), most=20).lines[-1].passes is None   # nothing was drafted


def test_a_larger_rate_rejects_earlier():
    "Of false alarms, for the same incorrect system"
    wrong = system(Chain(draft, 2), reject_from(after=lambda r, q, x: r))
    titles = [certify_sequentially(wrong, target, (0,), most=6000, n=8, alpha=a).title for a in (.01, 1e-9)]
    early, late = (int(title.split()[0].replace(",", "")) for title in titles)
    assert early < late


def test_fractions_and_floats_alike():
    "Bets on a table of fractions"
    exact_target, exact_draft = killer()
    wrong = system(Chain(exact_draft, 2), reject_from(accept=lambda *_: True))
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
    assert "fewer than" not in certify_sequentially(system(Chain(draft, 2), reject), target, (0,), most=200).words


def test_false_alarms_at_a_measurable_rate():
    "At alpha = 1/10, 25 tests of 60 correct rounds: at most 1/10 false alarms (and six standard deviations)"
    correct, how = system(Chain(draft, 2), reject), dict(most=60, n=9, alpha=.1)
    alarms = sum(not certify_sequentially(correct, target, (0,), seed=s, **how).passes for s in range(25))
    assert alarms <= 25*.1 + 6*np.sqrt(25*.1*.9)


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
    assert direct.passes and read.passes and [x.check for x in read.lines] == ["law", "draft", "noise", "tokens"]
    assert direct.lines[2].words == read.lines[2].words and os.listdir(tmp_path) == ["rounds.npz"]


def test_logs_of_all_lengths(tmp_path):
    "Chains of one round longer than those of another, and rounds without a draft"
    mixed = [*recorded(5, Chain(draft, 3)), *recorded(5, Chain(draft, 1)), *recorded(5, no_draft, match)]
    save_log(file := tmp_path/"rounds.npz", mixed)
    assert [r.tokens for r in load_log(file)] == [r.tokens for r in mixed]
    assert [len(r.tree) for r in load_log(file)] == [4]*5 + [2]*5 + [1]*5


LOGGED = ["everything accepted", "bonus from the previous row", "correction from p", "draft tokens ignored",
          "argmax stated as sampled"]


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
