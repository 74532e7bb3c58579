"Chapter 15: keyed noise makes the text a function of noise and target; how often two couplings agree; why the noise is not for `reject`"
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import CANON, Plan, constant, g_test, models, pairs, plans, proves, refuses, seeds, tempered
from specref.core.rng import Seeded, tv_outcomes, law_of
from specref.verify.coupled import PositionKeyed, PositionKeyedRng, GumbelMax, inverse_cdf_coupling, by_position, gumbel_max_coupling, coupled, chain_position, list_position, reused_noise_law, list_match_prob
from specref.core.law import exact, overlap, residual, tv
from specref.core.loop import generate, loop_law, match, no_draft, rounds
from specref.models.embedded import embedded, prompts
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching
from specref.core.target import TableModel, target_law
from specref.core.tree import Tree, iid

F = Fraction
SGL, PEAK = (exact(6, 2, 1, 1), exact(14, 4, 1, 1)), (exact(7, 1, 1, 1), exact(1, 6, 2, 1))   # verification.md §17
PAIRS = CANON, SGL, PEAK, (exact(3, 0, 2, 0, 1), exact(0, 1, 2, 0, 2))
noises = st.sampled_from([Seeded, GumbelMax, lambda s: GumbelMax(s, lists=3)])


def as_dict(p): return {x: w for x, w in enumerate(p) if w}


def as_joint(J): return {at: w for at, w in np.ndenumerate(J) if w}


def contrary(model): return TableModel(model.V, lambda text: model.law(text)[::-1])


def peek(target, turn):
    "A drafter that reads the judge's noise, of the future too, and offers what will be said, turned by `turn`"
    def drafter(ctx, rng):
        tree, node = Tree(ctx), 0
        for _ in range(2):
            text = tree.text(node)
            node = tree.add(node, (rng.pick(target.law(text), key=len(text)) + turn) % target.V, exact(*[1]*target.V))
        return tree
    return drafter


DRAFTERS = {
    "chain": lambda p, q: PositionKeyed(Chain(q, 2)),
    "the target": lambda p, q: PositionKeyed(Chain(p, 3)),
    "plainly bad": lambda p, q: PositionKeyed(Chain(contrary(p), 1)),
    "lists": lambda p, q: PositionKeyed(Branching(q, (2,), iid), list_position(2)),
    "noise of its own": lambda p, q: Chain(q, 1),
    "a tree": lambda p, q: Branching(q, (2,)),
    "clairvoyant": lambda p, q: peek(p, 0),
    "perverse": lambda p, q: peek(p, 1),
}
kinds = pytest.mark.parametrize("kind", DRAFTERS)


# The text

@proves("thm-invariant", "cor-keyed")
@kinds
@settings(max_examples=5)
@given(models(), st.integers(1, 3))
def test_all_noise(kind, pair, n):
    "One noise, with a draft and without: on every road the same text, and its law is the target's, unmerged"
    target, draft = pair
    drafter, n = DRAFTERS[kind](target, draft), min(n, 2 if kind in ("lists", "a tree") else 3)   # these toss by the dozen in every round
    both = law_of(lambda rng: tuple(generate(target, d, coupled, (0,), n, rng) for d in (drafter, no_draft)))
    assert all(a == b for a, b in both)
    assert both.of(lambda ab: ab[0]) == target_law(target, (0,), n)


@proves("thm-invariant")
@settings(max_examples=40)
@given(models(), noises, seeds, st.integers(1, 5), st.sampled_from([.5, 1, 1.7]), st.sets(st.integers(0, 2), max_size=1))
def test_same_seed_same_text(pair, noise, seed, gamma, temperature, stop):
    "Any noise, any drafter, any γ, any temperature, with a stop token"
    target, draft = (tempered(m, temperature) for m in pair)
    text = lambda d: generate(target, d, coupled, (0, 1), 24, noise(seed), stop)
    alone = text(no_draft)
    for d in (PositionKeyed(Chain(draft, gamma)), PositionKeyed(Chain(contrary(target), 2)), Chain(draft, gamma), PositionKeyed(Branching(draft, (3, 1), iid), list_position(3)), Branching(draft, (2, 2))):
        assert text(d) == alone
    sure = text(PositionKeyed(Chain(target, gamma))) if getattr(noise(0), "lists", 1) == 1 else alone
    assert sure == alone and (sure is alone or sure.ledger.num_accepted_tokens >= len(sure) - len(sure.ledger.rounds))


@proves("cor-keyed")
@settings(max_examples=30)
@given(models(), plans(3), st.integers(1, 3))
def test_any_tree(pair, steps, n):
    "Trees of every shape with probes: one round and its continuation; and the judge changes nothing"
    verifier_contract(pair[0], Plan(pair[1], steps), coupled, (0,), n)


@proves("thm-invariant")
@settings(max_examples=20)
@given(models(), seeds)
def test_a_drafter_that_learns_stays_itself(pair, seed):
    "Keyed passes on what its drafter learns, and what it says of itself"
    @dataclass(frozen=True)
    class Longer(Chain):
        def learn(self, round): return Longer(self.model, self.gamma % 3 + 1)
    target, draft = pair
    keyed, seen = PositionKeyed(Longer(draft, 1)), []
    assert (keyed.models, keyed.depth) == ((draft,), 1) and keyed == PositionKeyed(Longer(draft, 1))
    for _, round in zip(range(4), rounds(target, keyed, coupled, (0,), Seeded(seed))): seen.append(len(round.tree) - 1)
    assert seen == [1, 2, 3, 1]
    assert generate(target, keyed, coupled, (0,), 9, Seeded(seed)) == generate(target, no_draft, coupled, (0,), 9, Seeded(seed))


def test_match_is_not_invariant():
    "The contrast: with fresh noise a draft changes the text, though not its law"
    target, draft = constant(3, 2, 1), constant(1, 2, 3)
    texts = [[generate(target, d, match, (0,), 12, Seeded(s)) for d in (no_draft, Chain(draft, 2))] for s in range(5)]
    assert all(a != b for a, b in texts)


# The key is the place in the text

def by(name): return lambda p, tree, rng: match(p, tree, PositionKeyedRng(rng, lambda i: name(tree, i)))


WRONG_KEYS = {
    "depth in the round": lambda tree, i: tree.depth[i],
    "node in the round": lambda tree, i: i,
    "one for all": lambda tree, i: 0,
    "every other position": lambda tree, i: (len(tree.ctx) + tree.depth[i]) // 2,
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_a_wrong_key_is_caught(name):
    "Noise that comes back breaks the law. Every road shows it; merged states, which assume fresh noise in every round, may not"
    target, draft = constant(3, 2, 1), constant(1, 2, 3)
    want, wrong = target_law(target, (0,), 3), by(WRONG_KEYS[name])
    for d in (no_draft, PositionKeyed(Chain(draft, 1))): assert tv_outcomes(law_of(lambda rng: generate(target, d, wrong, (0,), 3, rng)), want) > F(1, 8)
    assert loop_law(target, no_draft, wrong, (0,), 3) == want


@settings(max_examples=8)
@given(models(), st.integers(1, 3))
def test_the_right_key_may_be_merged(pair, gamma):
    "A state is a function of noise that is never asked again"
    assert loop_law(pair[0], PositionKeyed(Chain(pair[1], gamma)), coupled, (0,), 3) == target_law(pair[0], (0,), 3)


def test_another_draft_finds_a_wrong_key():
    "A lane or a round in the key keeps the law and loses invariance: the same seed, other texts"
    target, draft = constant(3, 2, 1), constant(1, 2, 3)
    laned = by(lambda tree, i: (len(tree.ctx) + tree.depth[i], tree.depth[i]))
    assert law_of(lambda rng: generate(target, PositionKeyed(Chain(draft, 1)), laned, (0,), 3, rng)) == target_law(target, (0,), 3)
    assert any(generate(target, no_draft, laned, (0,), 12, Seeded(s)) != generate(target, PositionKeyed(Chain(draft, 2)), laned, (0,), 12, Seeded(s)) for s in range(3))


# The drafter

@settings(max_examples=15)
@given(models(), st.integers(1, 2))
def test_edges_state_the_truth(pair, gamma):
    "A keyed chain, and keyed chains side by side, keep the contract of every drafter"
    drafter_contract(PositionKeyed(Chain(pair[1], gamma)), (0, 1))
    drafter_contract(PositionKeyed(Branching(pair[1], (2,) + (1,)*(gamma - 1), iid), list_position(2)), (0,))


@settings(max_examples=10)
@given(models(), st.integers(1, 2))
def test_a_keyed_draft_under_reject(pair, gamma):
    "Exact, on every road: the judge has noise of its own, and leaves unseen what it rejects"
    target, draft = pair
    assert law_of(lambda rng: generate(target, PositionKeyed(Chain(draft, gamma)), reject, (0,), 3, rng)) == target_law(target, (0,), 3)


def test_names():
    "Node i of a chain, and of chains side by side, as Chain and Branching number them"
    for K, gamma in product((1, 2, 3), repeat=2):
        tree = Branching(constant(1, 1, 1), (K,) + (1,)*(gamma - 1), iid)((0, 0), Seeded(0))
        for i in range(1, len(tree)):
            t, k = list_position(K)(2, i)
            assert t == 1 + tree.depth[i] and k == tree.ancestors(i)[0] - 1
            if K == 1: assert chain_position(2, i) == t


# Agreement: cells

@proves("thm-cells")
@settings(max_examples=150)
@given(pairs())
def test_cells_are_what_a_shared_uniform_does(pq):
    "The formula is the law of two picks with one key, and never agrees more often than β"
    p, q = pq
    J = inverse_cdf_coupling(p, q)
    assert law_of(lambda rng: (rng.pick(q, key=0), rng.pick(p, key=0))) == as_joint(J) and all(isinstance(w, Fraction) for w in J.flat)
    assert (J.sum(1) == q).all() and (J.sum(0) == p).all() and all(np.diag(J) <= np.minimum(p, q))


@proves("thm-cells")
@pytest.mark.parametrize("n", [1, 2, 5, 50])
def test_cells_may_never_agree(n):
    p, q = exact(0, *[1]*n), exact(*[1]*n, 0)
    assert tv(p, q) == F(1, n) and np.trace(inverse_cdf_coupling(p, q)) == 0


@proves("thm-cells")
@settings(max_examples=40)
@given(models())
def test_a_round_accepts_with_the_trace(pair):
    "The first draft of a round, in the loop"
    target, draft = pair
    accepted = law_of(lambda rng: next(rounds(target, PositionKeyed(Chain(draft, 2)), coupled, (0,), rng)).verdict.node > 0)
    assert accepted.get(True, 0) == np.trace(inverse_cdf_coupling(target.law((0,)), draft.law((0,))))


# Agreement: the race

def races(p, q, n=100_000, K=1, seed=0):  # -> times (n, K, V), who wins under q on each list (n, K), under p on the best (n,)
    "Exponential races drawn by numpy, without the code under test"
    E = np.random.default_rng([seed, K]).standard_exponential((n, K, len(p)))
    with np.errstate(divide="ignore"): return E, (E / q.astype(float)).argmin(2), (E.min(1) / p.astype(float)).argmin(1)


@proves("thm-race")
@settings(max_examples=150)
@given(pairs())
def test_the_race_in_fractions(pq):
    "Both sums are the laws, exchanging the players transposes, the diagonal is the one-line formula, and nobody disagrees against his liking"
    p, q = pq
    J = gumbel_max_coupling(p, q)
    assert all(isinstance(w, Fraction) and w >= 0 for w in J.flat)
    assert (J.sum(1) == q).all() and (J.sum(0) == p).all() and (J.T == gumbel_max_coupling(q, p)).all()
    for j, k in product(range(len(p)), repeat=2):
        if j == k and p[j]*q[j]: assert J[j, j] == 1 / sum(max(p[i]/p[j], q[i]/q[j]) for i in range(len(p)))
        elif j != k and J[j, k]: assert q[j]*p[k] > q[k]*p[j]
        elif j != k: assert q[j]*p[k] <= q[k]*p[j] or not q[j]*p[k]
    assert abs(gumbel_max_coupling(p.astype(float), q.astype(float)) - J.astype(float)).max() < 1e-12


@proves("thm-race")
@pytest.mark.parametrize("pq", PAIRS, ids=("canon", "sgl", "peak", "zeros"))
def test_the_race_by_counts(pq):
    "100,000 races: the joint law, every cell of it; a false alarm once in 10^9"
    _, x, y = races(*pq)
    report = g_test(Counter(zip(x[:, 0].tolist(), y.tolist())), as_joint(gumbel_max_coupling(*pq)))
    assert report.fits and report.tv < .03, report


@proves("thm-race")
def test_the_counts_would_see_the_cells():
    "The same counts refuse the other coupling, and independence"
    _, x, y = races(*CANON)
    counts = Counter(zip(x[:, 0].tolist(), y.tolist()))
    assert not g_test(counts, as_joint(inverse_cdf_coupling(*CANON))).fits and not g_test(counts, as_joint(np.outer(*CANON[::-1]))).fits


@proves("cor-agreement")
@settings(max_examples=150)
@given(pairs())
def test_agreement_lies_between_its_bounds(pq):
    p, q = pq
    agree, d = list_match_prob(p, q), tv(p, q)
    assert agree == np.trace(gumbel_max_coupling(p, q))
    assert (1 - d)/(1 + d) <= agree <= 1 - d == overlap(p, q)


@proves("cor-agreement")
def test_published_agreement():
    "verification.md §14: 19/35 (bound 3/7), 97/110 (9/11), 83/240; by cells, 1/5 and 3/4"
    assert [list_match_prob(*pq) for pq in (CANON, SGL, PEAK)] == [F(19, 35), F(97, 110), F(83, 240)]
    assert [(1 - tv(*pq))/(1 + tv(*pq)) for pq in (CANON, SGL)] == [F(3, 7), F(9, 11)]
    assert [np.trace(inverse_cdf_coupling(*pq)) for pq in (CANON, SGL)] == [F(1, 5), F(3, 4)]


# Racing

def test_racing_is_the_race():
    "Keyed picks of two players from one seed: the joint law of the theorem, and fresh noise at the next position"
    p, q = CANON
    counts, later = Counter(), Counter()
    for s in range(20_000):
        rng = GumbelMax(s).at(s % 3)
        x, y = rng.draft.pick(q, key=7), rng.verify.pick(p, key=7)
        counts[x, y] += 1
        later[y, rng.verify.pick(p, key=8)] += 1
    assert g_test(counts, as_joint(gumbel_max_coupling(p, q))).fits
    report = g_test(later, as_joint(np.outer(p, p)))
    assert report.fits and report.tv < .06, report


def test_racing_is_seeded_elsewhere():
    "Picks without a key and coins are those of Seeded; a key is the same noise in every round, on either side; streams keep their lists"
    a, b = GumbelMax(5, lists=2), Seeded(5)
    law = exact(1, 2, 3)
    assert [a.pick(law) for _ in range(9)] + [a.coin(1, of=2) for _ in range(9)] == [b.pick(law) for _ in range(9)] + [b.coin(1, of=2) for _ in range(9)]
    assert [a.at(1).verify.pick(law) for _ in range(3)] == [b.at(1).verify.pick(law) for _ in range(3)]
    assert all(side.lists == 2 and (side.times(k, 6) == a.times(k, 6)).all() for i in range(3) for side in a.at(i) for k in (0, 3, (3, 1)))


def test_racing_runs_are_independent():
    "Runs at other addresses below one seed have other noise, each its own in all of its rounds"
    runs = [GumbelMax(5, (0, r), lists=2) for r in range(9)]
    assert len({t for run in runs for t in run.times(3, 4)}) == 36
    assert all((side.times(3, 4) == run.times(3, 4)).all() for run in runs for side in run.at(2))


@given(seeds, st.integers(0, 99), st.integers(1, 4))
def test_times_belong_to_tokens(seed, t, lists):
    "The best of the lists, a list for itself, the same for a larger vocabulary; all different from place to place"
    rng = GumbelMax(seed, lists=lists)
    each = [rng.times((t, k), 8) for k in range(lists)]
    assert (rng.times(t, 8) == np.min(each, axis=0)).all() and (rng.times(t, 5) == rng.times(t, 8)[:5]).all()
    assert len({*np.concatenate([*each, rng.times((t + 1, 0), 8)])}) == 8*(lists + 1)


@given(seeds, pairs())
def test_racing_gives_only_what_the_law_can(seed, pq):
    "No token of weight 0; the tiniest weight is no error"
    x = GumbelMax(seed).pick(pq[0], key=3)
    assert pq[0][x] > 0 and type(x) is int
    assert GumbelMax(seed).pick(np.array([0, 1 - 1e-300, 1e-300, 5e-324]), key=3) == 1


def accepted_by_lists(K, runs=3000):
    p, q = CANON
    drafter = PositionKeyed(Branching(constant(1, 2, 3, 4), (K,), iid), list_position(K))
    return Counter((v.node > 0, v.tokens(r.tree)[0]) for s in range(runs) for r in [next(rounds(constant(4, 3, 2, 1), drafter, coupled, (0,), GumbelMax(s, lists=K)))] for v in [r.verdict])


@pytest.mark.parametrize("pair, published", [(CANON, (.684, .764)), (SGL, (.928, .949))], ids=["canonical", "sglang"])
def test_published_acceptance_of_lists(pair, published):
    "verification.md §7.1: acceptance with two and three lists, counted there and here (100,000 races, a standard error of at most .0015)"
    p, q = pair
    for K, known in zip((2, 3), published):
        _, x, y = races(p, q, K=K)
        assert abs((x == y[:, None]).any(1).mean() - known) < .006


def test_a_race_without_runners_is_refused():
    "Rows that are no laws: by name, not token 0"
    for bad in ([0., 0.], [np.nan, 1.], [np.inf, 0.]): refuses("law", GumbelMax(1).pick, np.array(bad), key=3)
    for bad in ([0., 0.], [np.nan, 1.]):
        refuses("p", gumbel_max_coupling, np.array(bad), np.array([.5, .5])); refuses("q", gumbel_max_coupling, np.array([.5, .5]), np.array(bad))
    refuses("q", gumbel_max_coupling, np.array([.5, .5]), np.array([1.]))


@pytest.mark.parametrize("lists", [1, 2])
def test_racing_texts(lists):
    "Whole texts, counted: the joint law of three tokens; sees a distance of 0.1, a false alarm once in 10^9"
    target, draft = (TableModel(3, lambda text, w=w: exact(*np.roll(w, sum(text)))) for w in ((5, 4, 3), (1, 3, 2)))
    drafter = PositionKeyed(Branching(draft, (lists,), iid), list_position(lists)) if lists > 1 else PositionKeyed(Chain(draft, 2))
    report = g_test(Counter(generate(target, drafter, coupled, (0,), 3, GumbelMax(s, lists=lists)) for s in range(4000)), target_law(target, (0,), 3))
    assert report.fits and report.tv < .1, report


# Lists

@proves("thm-lists")
def test_published_lists():
    "verification.md §14, and the limits: what the draft can say at all, and certainty where the laws are equal"
    p, q = CANON
    assert [list_match_prob(p, q, K) for K in (1, 2, 3, 4)] == [F(19, 35), F(4739, 7150), F(693, 950), F(25709, 33250)]
    half = exact(1, 1, 0, 0)
    assert F(7, 10) - F(1, 10**5) < list_match_prob(p, half, 10**6) < F(7, 10) and list_match_prob(p, p, 3) == 1


@proves("thm-lists")
@settings(max_examples=80)
@given(pairs(), st.integers(1, 6))
def test_more_lists_are_not_worse(pq, K):
    p, q = pq
    assert list_match_prob(p, q, K) <= list_match_prob(p, q, K + 1) <= p[q > 0].sum()
    direct = sum(K / (sum(max(p[i]/p[j], q[i]/q[j]) for i in range(len(p))) + (K - 1)/p[j]) for j in range(len(p)) if p[j]*q[j])
    assert list_match_prob(p, q, K) == direct


@proves("thm-lists")
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("pq", PAIRS[:3], ids=("canon", "sgl", "peak"))
def test_lists_by_counts(pq, K):
    "100,000 races: the target's law is p, and it is drafted by the list that it won on as often as the theorem says, never accepted less"
    p, q = pq
    E, x, y = races(p, q, K=K)
    assert g_test(Counter(y.tolist()), as_dict(p)).fits
    n = np.arange(len(y))
    same, any_list = x[n, E[n, :, y].argmin(1)] == y, (x == y[:, None]).any(1)
    report = g_test(Counter(same.tolist()), {True: list_match_prob(p, q, K), False: 1 - list_match_prob(p, q, K)})
    assert report.fits and report.tv < .02 and same.sum() <= any_list.sum(), report


@proves("thm-lists")
def test_lists_in_the_loop():
    "Drafted, judged and accepted by the library: as often as numpy's races are, and with the target's law"
    p, q = CANON
    counts = accepted_by_lists(3)
    _, x, y = races(p, q, K=3)
    accepted = (x == y[:, None]).any(1).mean()
    assert abs(sum(n for (kept, _), n in counts.items() if kept)/3000 - accepted) < 6.5*(accepted*(1 - accepted)/3000)**.5   # 10^-10, and the error of `accepted` is six times smaller
    assert g_test(Counter({y: sum(n for (_, z), n in counts.items() if z == y) for y in range(4)}), as_dict(p)).fits


# Never with reject

leaky = lambda p, tree, rng: reject(p, tree, by_position(tree, rng))


@proves("prop-reused")
@settings(max_examples=100)
@given(pairs())
def test_reused_is_reject_with_shared_noise(pq):
    "By enumeration; and the formula gives p where the noises are independent"
    p, q = (TableModel(len(l), lambda text, l=l: l) for l in pq)
    run = law_of(lambda rng: generate(p, PositionKeyed(Chain(q, 1)), leaky, (0,), 1, rng)).of(lambda text: text[0])
    assert run == as_dict(reused_noise_law(*pq, inverse_cdf_coupling))
    assert (reused_noise_law(*pq, lambda r, q: np.outer(q, r)) == pq[0]).all()


@proves("prop-reused")
@pytest.mark.parametrize("pq", PAIRS, ids=("canon", "sgl", "peak", "zeros"))
def test_reused_race_by_counts(pq):
    "100,000 corrections with the draft's exponential times: the law of the formula, and not p"
    p, q = pq
    E, x, _ = races(p, q)
    x, u = x[:, 0], np.random.default_rng(1).random(len(x))
    y = np.where(u * q.astype(float)[x] < p.astype(float)[x], x, races(residual(p, q), q)[2])
    wrong = reused_noise_law(p, q, gumbel_max_coupling)
    assert g_test(Counter(y.tolist()), as_dict(wrong)).fits
    if tv(wrong, p) > F(1, 40): assert not g_test(Counter(y.tolist()), as_dict(p)).fits


@proves("prop-reused")
def test_how_far_off():
    "The four-token pair: 7/80 by cells, 1/30 by race; the true law is missed by whole generations too"
    p, q = CANON
    assert (reused_noise_law(p, q, inverse_cdf_coupling) == [F(5, 16), F(31, 80), F(1, 5), F(1, 10)]).all() and (reused_noise_law(p, q, gumbel_max_coupling) == [F(13, 30), F(4, 15), F(1, 5), F(1, 10)]).all()
    assert [tv(reused_noise_law(p, q, how), p) for how in (inverse_cdf_coupling, gumbel_max_coupling)] == [F(7, 80), F(1, 30)]
    drawn_anew = lambda joint: np.diag(joint) + (1 - np.trace(joint)) * p   # a fresh pick after a mismatch
    assert [tv(drawn_anew(how(p, q)), p) for how in (inverse_cdf_coupling, gumbel_max_coupling)] == [F(1, 10), F(41, 350)]
    target, draft = constant(4, 3, 2, 1), constant(1, 2, 3, 4)
    assert tv_outcomes(law_of(lambda rng: generate(target, PositionKeyed(Chain(draft, 1)), leaky, (0,), 2, rng)), target_law(target, (0,), 2)) >= F(7, 80)


# Seen at size

@pytest.mark.parametrize("noise", [Seeded, GumbelMax])
def test_transformers(noise):
    "The embedded models in float64: plain, small and large draft, chains and lists write one text, and the drafts save calls"
    big, small, large = (embedded(name, torch.float64, temperature=.9) for name in ("target", "small", "large"))
    start = prompts("code", 1, 24, seed=2)[0]
    texts = [generate(big, d, coupled, start, 24, noise(3)) for d in (no_draft, PositionKeyed(Chain(small, 2)), PositionKeyed(Chain(large, 4)), PositionKeyed(Branching(small, (2, 1), iid), list_position(2)))]
    assert len(set(texts)) == 1 and len(texts[0].ledger.rounds) == 24 > max(len(t.ledger.rounds) for t in texts[1:])


# Doors

def test_doors():
    p, q = CANON
    for f in (inverse_cdf_coupling, gumbel_max_coupling, list_match_prob, lambda p, q: reused_noise_law(p, q, gumbel_max_coupling)): refuses("q", f, p, q[:3])
    refuses("K", list_match_prob, p, q, 0)
    refuses("K", list_position, 0)
    for lists in (0, 1.5, True): refuses("lists", GumbelMax, 1, lists=lists)
    refuses("seed", GumbelMax, -1)
    tree = Branching(constant(1, 1, 1), (2, 1))
    refuses("drafter", PositionKeyed(tree), (0,), Seeded(0))
    refuses("drafter", PositionKeyed(Chain(constant(1, 1), 2), lambda t, i: i), (0, 0), Seeded(0))
    refuses("drafter", PositionKeyed(Branching(constant(1, 1, 1), (2, 1), iid), list_position(3)), (0,), Seeded(0))
