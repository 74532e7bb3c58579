"Chapter 24: a schedule does not anticipate, the schedules are those published, and bounds on their gain"
import sys
from dataclasses import dataclass, replace
from fractions import Fraction as F
from itertools import product
from math import sqrt
from types import ModuleType, SimpleNamespace

import numpy as np, pytest, torch
from hypothesis import example, given, settings, strategies as st
from transformers.generation import candidate_generator
from transformers.generation.stopping_criteria import ConfidenceCriteria

from contracts import drafter_contract, verifier_contract
from helpers import constant, examples, faithful, laws, models, pairs, proves, seeds
from published import drafted, having, maker
from specref import (block, Chain, Costs, exact, iid, law_of, loop_law, Outcomes, overlap, random_table,
                     reject, Round, rounds, Seeded, TableModel, target_law, Tree, tv_outcomes, Verdict)
from specref.core.loop import clip
from specref.draft.length import (AdaEDL, AllOf, ConfidenceLength, ConstantLength, EntropyLength,
                                  AcceptanceEstimate, GoodputLength, HeuristicLength, Schedule,
                                  ScheduledChain, admit, budget_by_goodput, budget_round,
                                  emitted_if_dropped, goodput, goodput_length, next_threshold,
                                  oracle_length, roc_threshold, text_cost)
from specref.verify.lossy import GreedyModel, entropy

@dataclass(frozen=True)
class Arbitrary(Schedule):
    "Any function of the drawn tokens, the next row and the earlier rounds"
    seed: int
    past: tuple = ()
    def more(self, tree, q):
        last = len(tree) - 1
        row = [x.numerator for x in q(last)] if self.seed % 2 else []
        return bool(np.random.default_rng([self.seed, *tree.path(last), *row, *self.past]).random() < .6)
    def learn(self, round):
        return replace(self, past=(round.verdict.node, *round.tree.path(len(round.tree) - 1)))

SCHEDULES = [HeuristicLength(1), ConfidenceLength(.4), EntropyLength(), AdaEDL(most=2), ConstantLength(2),
             AllOf((HeuristicLength(2), ConfidenceLength(.3, True, (.1, .2, .5, .9, .8), (0, 1, 0, 1, 1)))),
             GoodputLength(Costs({1: 10}, draft=1), decay=.5, most=2)]
schedules = st.one_of(st.sampled_from(SCHEDULES), seeds.map(Arbitrary))

# A schedule decides before the draw

@proves("thm-non-anticipation")
@examples(30, models(), schedules, st.sampled_from([reject, block]))
def test_any_schedule_is_exact(pair, schedule, verify):
    "The contract of drafters, one round, and three tokens with all updates of the schedule"
    drafter = ScheduledChain(pair[1], schedule, 2)
    drafter_contract(drafter, (0,))
    verifier_contract(pair[0], drafter, verify, (0,), 2)
    assert loop_law(pair[0], drafter, verify, (0,), 3) == target_law(pair[0], (0,), 3)

@proves("prop-drop")
@examples(40, pairs(st.just(3)), st.lists(st.fractions(0, 1, max_denominator=4), min_size=3, max_size=3))
@example((exact(7, 3, 0), exact(1, 1, 0)), [F(1), F(0), F(0)])
def test_what_dropping_does(pair, s):
    p, q = TableModel(3, lambda text: pair[0]), pair[1]
    def once(rng):
        tree, x = Tree((0,)), rng.pick(q)
        if rng.coin(s[x]): tree.add(0, x, q)
        return reject(p(tree), tree, rng).tokens(tree)[0]
    law, stated = law_of(once), emitted_if_dropped(*pair, np.array(s))
    assert [law.get(x, 0) for x in range(3)] == list(stated)
    assert list(emitted_if_dropped(*pair, np.array([s[0]]*3))) == list(pair[0])

def test_rows_are_computed_when_read():
    "A schedule on earlier tokens costs one draft call a drawn token, one on the next row at most one more"
    cases = (ConfidenceLength(1.), 0), (EntropyLength(threshold=0.), 0), (AdaEDL(threshold=1.), 1)
    for schedule, extra in cases:
        draft = random_table(3, 1, zeros=False)
        tree = ScheduledChain(draft, schedule)((0,), Seeded(0))
        assert (len(tree), draft.meter.calls) == (2, 1 + extra)

# transformers

def own_roc(matches, probs):
    "False and true positive rates at each threshold, the first one above all probabilities"
    levels = np.array([np.inf, *sorted(set(probs), reverse=True)])
    yes, no = (np.array([p for p, m in zip(probs, matches) if m == k]) for k in (1, 0))
    rate = lambda some: np.array([(some >= t).sum() for t in levels]) / len(some)
    return rate(no), rate(yes), levels

class Theirs:
    "The update of transformers' own class, without its models"
    def __init__(self, monkeypatch, schedule, k, threshold):
        stub = ModuleType("sklearn.metrics")
        stub.roc_curve = own_roc
        monkeypatch.setitem(sys.modules, "sklearn", ModuleType("sklearn"))
        monkeypatch.setitem(sys.modules, "sklearn.metrics", stub)
        monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: True)
        self.own = object.__new__(candidate_generator.AssistedCandidateGenerator)
        config = SimpleNamespace(num_assistant_tokens_schedule=schedule,
                                 assistant_confidence_threshold=threshold)
        vars(self.own).update(assistant_generation_config=config, generation_config=SimpleNamespace(),
                              num_assistant_tokens=k, probs=[], matches=[])
    def update(self, probs, accepted):
        self.own.probs.extend(probs)
        self.own.update_candidate_strategy(None, [[None] * (len(probs) + 1)], accepted)
    @property
    def k(self): return self.own.num_assistant_tokens
    @property
    def threshold(self): return self.own.assistant_generation_config.assistant_confidence_threshold

def played(seed, n=40):
    "Rounds with random chains and verdicts, and the probabilities of their tokens"
    rng = np.random.default_rng(seed)
    for _ in range(n):
        tree, drafted = Tree((0,)), int(rng.integers(1, 6))
        for i in range(drafted): tree.add(i, 0, np.array([w := round(float(rng.uniform(.05, 1)), 2), 1 - w]))
        probs = [tree.law[i][0] for i in range(1, drafted + 1)]
        accepted = next((i for i, w in enumerate(probs) if rng.random() > w), drafted)
        yield probs, Round(tree, None, Verdict(accepted, 0))

class Halved(HeuristicLength):
    "Half as many draft tokens after a rejection"
    def learn(self, round):
        all_accepted = round.verdict.node == len(round.tree) - 1
        return super().learn(round) if all_accepted else replace(self, k=max(1, self.k//2))

@faithful("heuristic length", plain={
    "constant": having(schedule=ConstantLength), "halved": having(schedule=Halved)})
def test_heuristic_is_transformers(subject, monkeypatch):
    "The same number of tokens after every round as transformers' own update"
    theirs, ours = Theirs(monkeypatch, "heuristic", 5, None), subject(constant(1, 1), gamma=40).drafter
    for probs, round in played(0):
        theirs.update(probs, round.verdict.node)
        ours = ours.learn(round)
        assert ours.schedule.k == theirs.k == len(ours((0,), Seeded(0))) - 1

class Symmetric(ConfidenceLength):
    "False negatives cost as much as false positives"
    def learn(self, round):
        after = super().learn(round)
        if after.threshold == self.threshold: return after
        fpr, tpr, levels = own_roc(after.matches, after.probs)
        return replace(after, threshold=float(levels[np.argmin(fpr + 1 - tpr)]))

def confidence(change):
    "The rule of confidence changed, beside the most tokens of a round"
    return having(schedule=lambda both: AllOf((both.schedules[0], maker(change)(both.schedules[1]))))

@faithful("confidence length", plain={
    "fixed": confidence(lambda rule: replace(rule, adaptive=False)),
    "symmetric": confidence(Symmetric)})
def test_confidence_is_transformers(subject, monkeypatch):
    "Samples and threshold after every round are those of transformers' own update, and so is where it stops"
    theirs, drafter = Theirs(monkeypatch, "constant", 20, .4), subject(constant(1, 1), gamma=20).drafter
    for probs, round in played(1):
        theirs.update(probs, round.verdict.node)
        drafter = drafter.learn(round)
        most, ours = drafter.schedule.schedules
        assert most.k == 20 == drafter.most
        assert (list(ours.probs), list(ours.matches)) == (theirs.own.probs, theirs.own.matches)
        assert ours.threshold == theirs.threshold
        stops = ConfidenceCriteria(theirs.threshold)
        for w, node in zip(probs, range(1, len(round.tree))):
            cut = Tree((0,))
            for i in range(node): cut.add(i, 0, round.tree.law[i + 1])
            scores = (torch.tensor([[w, 1 - w]], dtype=torch.float64).log(),)
            same = ours.more(cut, None) != stops(torch.tensor([[0, 0]]), scores)
            assert same or abs(w - theirs.threshold) < 1e-9   # at equality the logarithm decides

@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9).map(lambda x: x / 10), st.booleans()), min_size=2, max_size=12))
def test_the_threshold_of_the_roc(samples):
    "No observed probability has a smaller fpr + 3 fnr"
    probs, matches = zip(*samples)
    if len({*matches}) < 2: return
    def cost(t):
        fp, fn = (sum(m == k and (w >= t) != k for w, m in samples) for k in (0, 1))
        return F(fp, matches.count(False)) + 3 * F(fn, matches.count(True))
    assert cost(roc_threshold(probs, matches)) == min(map(cost, probs))

# Entropy

@proves("thm-entropy-bound")
@examples(80, laws(4), laws(4))
def test_acceptance_from_divergence(p, q):
    p, q = ((x.astype(float) + .01) / (x.astype(float) + .01).sum() for x in (p, q))
    kl = (q * np.log(q / p)).sum()
    assert overlap(p, q) >= 1 - sqrt(kl / 2) - 1e-12
    kappa = kl / entropy(q)
    assert overlap(p, q) >= 1 - sqrt(kappa / 2 * entropy(q)) - 1e-9

def stop_lengths(drafter, rows, most=40):
    "How many tokens are drafted where row i has the distribution rows[i], for 20 seeds"
    draft = TableModel(len(rows[0]), lambda text: rows[(len(text) - 1) % len(rows)])
    drafter = replace(drafter, model=draft, most=most)
    return [len(drafter((0,), Seeded(i))) - 1 for i in range(20)]

ROWS = [np.array(w) / sum(w) for w in ([96, 2, 1, 1], [97, 1, 1, 1], [90, 9, .5, .5], [1, 1, 1, 1])]

class NextRow(EntropyLength):
    "Tests the next row, before its token is drawn"
    def more(self, tree, q): return sqrt(self.scale * entropy(q(len(tree) - 1))) <= self.threshold

@faithful("SVIP", plain={"confidence": having(schedule=lambda rule: ConfidenceLength(.7, False)),
                         "next row": having(schedule=NextRow)})
def test_svip_keeps_the_token_of_the_uncertain_row(subject):
    "It stops after the token of the first row with sqrt(.15 H) > .3, whichever token was drawn"
    for start in range(4):
        rows = ROWS[start:] + ROWS[:start]
        stop = next(i for i, q in enumerate(rows) if torch.sqrt(
            .15 * torch.distributions.Categorical(torch.tensor(q)).entropy()) > .3)
        assert stop_lengths(subject(constant(1)).drafter, rows) == [stop + 1] * 20

class Fixed(AdaEDL):
    def learn(self, round): return self

@faithful("AdaEDL", plain={"fixed": having(schedule=Fixed),
                           "SVIP": having(schedule=lambda rule: EntropyLength(rule.scale, .6))})
def test_adaedl_adapts_its_threshold(subject):
    "It draws while 1 - sqrt(γ H) of the next row is at least λ; λ follows the acceptance rate of past rounds"
    drafter, lam, rate = subject(constant(1), gamma=20).drafter, .4, .9
    for probs, round in played(2):
        assert stop_lengths(drafter, ROWS[2:], 20)[0] == (1 if 1 - sqrt(.2 * np.log(4)) < lam else 20)
        rate = (rate + round.verdict.node / len(probs)) / 2
        lam = .9 * lam + .1 * (lam + .01 if rate < .9 else lam - .01)
        drafter = drafter.learn(round)
        assert abs(drafter.schedule.threshold - lam) < 1e-12
    for high in (.48, .46):
        schedule = replace(drafter.schedule, threshold=high)
        stop = 1 if 1 - sqrt(.2 * np.log(4)) < high else 20
        assert stop_lengths(replace(drafter, schedule=schedule), ROWS[2:], 20)[0] == stop

def test_the_threshold_stays_where_a_full_draft_was_accepted():
    assert next_threshold(.5, .95, .9, .01, full=True) == .5 > next_threshold(.5, .95, .9, .01, full=False)

# The oracle

@proves("thm-bits")
@examples(15, models(), st.integers(0, 2))
def test_bits_of_a_text(pair, k):
    "Tokens and accepted count of a round: from the target's text and its bits, or from speculative sampling"
    p, q = pair
    def by_bits(rng):
        text, accepted = (), 0
        for i in range(k + 1):
            row, draft = p.law((0, *text)), q.law((0, *text))
            text = (*text, x := rng.pick(row))
            if i == k or not rng.coin(draft[x], of=row[x]): return text, accepted
            accepted += 1
    def by_rounds(rng):
        drafter = Chain(q, k) if k else ScheduledChain(q, Arbitrary(0), 1)
        round = next(rounds(p, drafter, reject, (0,), rng))
        return round.tokens, round.verdict.node
    if k: assert law_of(by_bits) == law_of(by_rounds)
    else: assert law_of(lambda rng: by_bits(rng)[0]) == target_law(p, (0,), 1)

@proves("thm-oracle")
@pytest.mark.parametrize("c", [0, F(1, 3), 1])
def test_no_lengths_cost_less_than_the_oracle(c):
    "All texts of 4 places, all bits, all choices of a length at each place"
    for bits in product((0, 1), repeat=4):
        best = min(text_cost(bits, choice.__getitem__, c) for choice in product(range(4), repeat=4))
        assert text_cost(bits, oracle_length(bits), c) == best

def test_a_text_costs_its_rounds():
    "3 tokens accepted, one recovered, then a round with nothing left to draft"
    assert text_cost((1, 1, 0, 1), lambda at: 3, F(1, 2)) == 1 + F(3, 2) + 1
    assert text_cost((1,) * 4, lambda at: 0, F(1, 2)) == 4

# Batches

@st.composite
def costs(draw):
    a, b, d = (F(draw(st.integers(1, 40)), 4) for _ in range(3))
    return a, b, d, Costs({1: a + b, 2: a + 2*b}, draft=d)

@proves("thm-goodput")
@examples(60, costs(),
          st.lists(st.fractions(0, F(19, 20), max_denominator=20), min_size=3, max_size=3).map(sorted))
@example((F(10), F(1, 10), F(1), Costs({1: F(101, 10), 2: F(102, 10)}, draft=F(1))),
         [F(1, 2), F(4, 5), F(9, 10)])
def test_the_goodput_length(given_costs, alphas):
    "Nondecreasing with the acceptance rate, nonincreasing with the batch, 0 from the knee on and not before"
    a, b, d, costs = given_costs
    batches = (1, 2, 5, 30, 350)
    table = [[goodput_length(alpha, B, costs, 6) for B in batches] for alpha in alphas]
    assert all(row == sorted(row, reverse=True) for row in table)
    assert all(list(column) == sorted(column) for column in zip(*table))
    for alpha, row in zip(alphas, table):
        assert [k == 0 for k in row] == [B * b * (1 - alpha) >= alpha*a - d for B in batches]

@proves("prop-estimate")
@pytest.mark.parametrize("alpha", [F(1, 5), F(1, 2), F(4, 5)])
def test_sums_then_the_quotient(alpha):
    "In fractions: the means of accepted and of tested tokens have the quotient α, rounds a smaller mean"
    for k in range(1, 7):
        law = {i: alpha**i * (1 if i == k else 1 - alpha) for i in range(k + 1)}
        accepted, tested = (sum(w*f(i) for i, w in law.items()) for f in (int, lambda i: min(i + 1, k)))
        share = sum(w*F(i, min(i + 1, k)) for i, w in law.items())
        assert accepted/tested == alpha >= share and (share < alpha) == (k > 1)
    long = 1 + (1 - float(alpha))/float(alpha)*np.log(1 - float(alpha))
    assert abs(sum(float(alpha**i * (1 - alpha)) * i/(i + 1) for i in range(400)) - long) < 1e-12

def test_the_estimate_is_the_quotient_of_discounted_sums():
    "Given α it is the start; no update without a tested token but of the rounds that are idle"
    schedule, sums = GoodputLength(Costs({1: 10}, draft=1), decay=.5), [7., 10.]
    for length, accepted in ((4, 4), (3, 0), (0, 0), (5, 2)):
        tested = min(accepted + 1, length)
        schedule = schedule.learn(Round(range(length + 1), None, Verdict(accepted, 0)))
        if tested: sums = [.5*sums[0] + accepted, .5*sums[1] + tested]
        assert (schedule.seen.rate, schedule.seen.weight) == pytest.approx((sums[0]/sums[1], sums[1]))
        assert schedule.idle == (length == 0)

class MeanOfShares(GoodputLength):
    "The moving average of the rounds' shares"
    def learn(self, round):
        after, old = super().learn(round), self.seen.rate
        tested = min(round.verdict.node + 1, len(round.tree) - 1)
        rate = .95*old + .05*round.verdict.node/tested if tested else old
        return replace(after, seen=AcceptanceEstimate(rate))

class Final(GoodputLength):
    "Never drafts again after a length of 0"
    def learn(self, round): return replace(super().learn(round), idle=0)

@faithful("goodput", plain={
    "mean of shares": having(schedule=MeanOfShares), "no probe": having(schedule=Final)})
def test_goodput_is_that_of_the_best_length(subject):
    """At α = .8, 500 rounds after an estimate that is too small: the mean of 1,000 estimates is off by at
    most .03, three standard errors or more, and the goodput is 97 % of the best length's, or more"""
    costs, own = Costs({1: .010, 101: .020}, draft=.001), subject(constant(1, 1), gamma=20).drafter.schedule
    for batch in (1, 64):
        schedule = replace(own, costs=costs, batch=batch, seen=AcceptanceEstimate(.2))
        rates, tokens, seconds, rng = [], 0, 0, np.random.default_rng(0)
        for i in range(1500):
            k = schedule.k
            accepted = int(np.argmin([*(rng.random(k) < .8), False]))
            schedule = schedule.learn(Round(range(k + 1), None, Verdict(accepted, 0)))
            if i < 500: continue
            tokens += batch*(accepted + 1)
            seconds += k*costs.draft + costs.seconds(batch*(k + 1))
            rates.append(schedule.seen.rate)
        assert abs(np.mean(rates) - .8) < .03
        assert tokens/seconds > .97*goodput(goodput_length(.8, batch, costs), .8, batch, costs)

def joint(p, q, lengths, n=2):
    "The distribution of the first n tokens of two requests, their rounds continued by the target"
    law = law_of(lambda rng: tuple(clip(t, n, ()) for t in budget_round(p, q, ((0,), (1,)), 2, lengths, rng)))
    out = Outcomes()
    for (s, t), w in law.items():
        ends = target_law(p, (0, *s), n - len(s)), target_law(p, (1, *t), n - len(t))
        for (x, v), (y, u) in product(*(end.items() for end in ends)):
            out[s + x, t + y] = out.get((s + x, t + y), 0) + w*v*u
    return out

def surviving(drafts, confidence):
    "Products of confidences along each draft"
    each = [[confidence(d, i) for i in (1, 2)] for d in drafts]
    return [(a, a * b) for a, b in each]

def of_row(draft, i): return max(draft.law[i])
def of_token(draft, i): return draft.law[i][draft.token[i]]

BUDGETS = {"stale": lambda drafts: admit([(F(2, 3), F(1, 3)), (F(1, 2), F(1, 2))], 2),
           "fixed": lambda drafts: admit(surviving(drafts, of_row), 2),
           "first drop": lambda drafts: admit(a := surviving(drafts, of_row), budget_by_goodput(
               a, (F(1), F(6, 5), F(3, 2), F(8, 5), F(2)).__getitem__, True))}

@proves("thm-budget")
@pytest.mark.parametrize("rule", BUDGETS)
@examples(6, models(2))
def test_budgets(rule, pair):
    "Two tokens of two requests, jointly"
    want = {(s, t): v*w for s, v in target_law(pair[0], (0,), 2).items()
            for t, w in target_law(pair[0], (1,), 2).items()}
    assert joint(*pair, BUDGETS[rule]) == want

@proves("thm-budget")
def test_biased_budgets():
    "The goodput over all budgets, and the confidence of the drawn token, on the models of the chapter"
    p, q = constant(7, 3), TableModel(2, lambda text: exact(
        *((9, 1) if text[1:] == (0,) else (1, 1) if text[1:] else (1, 2))))
    steps = (F(1), F(6, 5), F(8, 5), F(19, 10), F(2))
    rules = {F(1, 30): lambda drafts: admit(a := surviving(drafts, of_row), budget_by_goodput(
                 a, steps.__getitem__, False)),
             F(1, 15): lambda drafts: admit(surviving(drafts, of_token), 2)}
    want = {(x, y): exact(7, 3)[x] * exact(7, 3)[y] for x in (0, 1) for y in (0, 1)}
    for distance, lengths in rules.items():
        law = joint(p, q, lengths, 1).of(lambda o: (o[0][0], o[1][0]))
        assert tv_outcomes(law, want) == distance

@given(st.lists(st.lists(st.integers(0, 5), max_size=4).map(lambda x: sorted(x, reverse=True)), max_size=4),
       st.integers(0, 8))
def test_the_most_probable_tokens_are_admitted(survival, budget):
    "As many as the budget allows, none more probable is left out"
    length = admit(survival, budget)
    assert sum(length) == min(budget, sum(map(len, survival)))
    taken = [a for row, n in zip(survival, length) for a in row[:n]]
    left = [a for row, n in zip(survival, length) for a in row[n:]]
    assert not taken or not left or min(taken) >= max(left)

class Warped(ScheduledChain):
    "The schedule reads the rows that tokens are drawn from"
    def __call__(self, ctx, rng):
        tree = Tree(ctx)
        for node in range(self.most):
            if not self.schedule.more(tree, lambda i: self.model(tree)[i]): break
            tree.grow(node, iid(self.model(tree)[node]), rng)
        return tree

FAILS = {   # the rule of each schedule: the row fails it, and it is that of the token after a node
    "confidence length": (lambda row: max(row) < .4, False),
    "SVIP": (lambda row: .15*entropy(row) > .3**2, False),
    "AdaEDL": (lambda row: 1 - sqrt(.2*entropy(row)) < .4, True)}

@faithful("confidence length", "SVIP", "AdaEDL", plain={"warped rows": drafted(Warped)})
def test_a_greedy_draft_is_ended_by_the_rows_before_the_warp(subject):
    "The likeliest tokens, up to the first whose row fails the rule; a point mass never fails it"
    lengths, (fails, of_next) = [], FAILS[subject.name]
    for seed in range(8):
        draft = random_table(8, seed, zeros=False)
        tree = subject(GreedyModel(draft), gamma=5).drafter((0,), Seeded(0))
        rows = [draft.law(tree.text(i)) for i in range(len(tree))]
        assert tree.path(len(tree) - 1) == tuple(int(np.argmax(row)) for row in rows[:-1])
        failed = [fails(row) for row in (rows[1:] if of_next else rows[:-1])]
        assert not any(failed[:-1]) and (failed[-1] or len(tree) == 6)
        lengths.append(len(tree))
    assert min(lengths) < 6
