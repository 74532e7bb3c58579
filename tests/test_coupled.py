"Chapter 15: keyed noise makes the text a function of noise and target; how often two couplings agree"
from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np, pytest
from hypothesis import given, strategies as st

from contracts import drafter_contract
from helpers import CANON, constant, examples, g_test, models, pairs, proves, seeds, tempered
from verify_helpers import PEAK, SGL, as_dict
from specref import (Branching, Chain, coupled, exact, generate, iid, law_of, loop_law, match, no_draft,
                     overlap, PositionKeyed, reject, residual, rounds, Seeded, TableModel, target_law, Tree,
                     tv, tv_outcomes)
from specref.core.drafters import chain_position
from specref.verify.coupled import (GumbelMax, PositionKeyedRng, by_position, gumbel_max_coupling,
                                    inverse_cdf_coupling, list_match_prob, list_position, reused_noise_law)

F = Fraction
PAIRS = CANON, SGL, PEAK, (exact(3, 0, 2, 0, 1), exact(0, 1, 2, 0, 2))
noises = st.sampled_from([Seeded, GumbelMax, lambda s: GumbelMax(s, lists=3)])

def as_joint(J): return {at: w for at, w in np.ndenumerate(J) if w}

def contrary(model): return TableModel(model.V, lambda text: model.law(text)[::-1])

def peek(target, turn):
    "A drafter that reads the verifier's noise, later positions too, and drafts its tokens, shifted by `turn`"
    def drafter(ctx, rng):
        tree, node = Tree(ctx), 0
        for _ in range(2):
            text = tree.text(node)
            token = rng.pick(target.law(text), key=len(text)) + turn
            node = tree.add(node, token % target.V, exact(*[1]*target.V))
        return tree
    return drafter

DRAFTERS = {
    "chain": lambda p, q: PositionKeyed(Chain(q, 2)),
    "the target": lambda p, q: PositionKeyed(Chain(p, 3)),
    "the target reversed": lambda p, q: PositionKeyed(Chain(contrary(p), 1)),
    "lists": lambda p, q: PositionKeyed(Branching(q, (2,), iid), list_position(2)),
    "noise of its own": lambda p, q: Chain(q, 1),
    "a tree": lambda p, q: Branching(q, (2,)),
    "the noise read in advance": lambda p, q: peek(p, 0),
    "the noise read, and missed": lambda p, q: peek(p, 1),
}
kinds = pytest.mark.parametrize("kind", DRAFTERS)

# The text

@proves("thm-invariant", "cor-keyed")
@kinds
@examples(4, models(), st.integers(1, 3))
def test_all_noise(kind, pair, n):
    "One noise, with a draft and without: on every path the same text, distributed as the target's, unmerged"
    target, draft = pair
    drafter = DRAFTERS[kind](target, draft)
    n = min(n, 2 if kind in ("lists", "a tree") else 3)   # many coins a round
    both = law_of(lambda rng: tuple(generate(target, d, coupled, (0,), n, rng) for d in (drafter, no_draft)))
    assert all(a == b for a, b in both)
    assert both.of(lambda ab: ab[0]) == target_law(target, (0,), n)

stops = st.sets(st.integers(0, 2), max_size=1)

@proves("thm-invariant")
@examples(12, models(), noises, seeds, st.integers(1, 5), st.sampled_from([.5, 1, 1.7]), stops)
def test_same_seed_same_text(pair, noise, seed, gamma, temperature, stop):
    "Any noise, any drafter, any γ, any temperature, with a stop token"
    target, draft = (tempered(m, temperature) for m in pair)
    text = lambda d: generate(target, d, coupled, (0, 1), 24, noise(seed), stop)
    alone = text(no_draft)
    lists = PositionKeyed(Branching(draft, (3, 1), iid), list_position(3))
    keyed = PositionKeyed(Chain(draft, gamma)), PositionKeyed(Chain(contrary(target), 2)), lists
    for d in (*keyed, PositionKeyed(Chain(target, gamma)), Chain(draft, gamma), Branching(draft, (2, 2))):
        assert text(d) == alone

# The key is the position in the text

def by(name): return lambda p, tree, rng: match(p, tree, PositionKeyedRng(rng, lambda i: name(tree, i)))

WRONG_KEYS = {
    "depth in the round": lambda tree, i: tree.depth[i],
    "node in the round": lambda tree, i: i,
    "one for all": lambda tree, i: 0,
    "every other position": lambda tree, i: (len(tree.ctx) + tree.depth[i]) // 2,
}

@pytest.mark.parametrize("name", WRONG_KEYS)
def test_a_wrong_key_is_detected(name):
    "Noise that is used twice changes the distribution of all paths; that of merged states may be right"
    target, draft = constant(3, 2, 1), constant(1, 2, 3)
    want, wrong = target_law(target, (0,), 3), by(WRONG_KEYS[name])
    for d in (no_draft, PositionKeyed(Chain(draft, 1))):
        law = law_of(lambda rng: generate(target, d, wrong, (0,), 3, rng))
        assert tv_outcomes(law, want) > F(1, 8)
    assert loop_law(target, no_draft, wrong, (0,), 3) == want

def test_another_draft_detects_a_wrong_key():
    "A depth in the key preserves the distribution and loses invariance: the same seed, other texts"
    target, draft = constant(3, 2, 1), constant(1, 2, 3)
    laned = by(lambda tree, i: (len(tree.ctx) + tree.depth[i], tree.depth[i]))
    def text(gamma, n, rng):
        drafter = PositionKeyed(Chain(draft, gamma)) if gamma else no_draft
        return generate(target, drafter, laned, (0,), n, rng)
    assert law_of(lambda rng: text(1, 3, rng)) == target_law(target, (0,), 3)
    assert any(text(0, 12, Seeded(s)) != text(2, 12, Seeded(s)) for s in range(3))

# The drafter

@examples(15, models(), st.integers(1, 2))
def test_keyed_drafters(pair, gamma):
    "A keyed chain, and keyed chains side by side, satisfy the contract of every drafter"
    drafter_contract(PositionKeyed(Chain(pair[1], gamma)), (0, 1))
    drafter_contract(PositionKeyed(Branching(pair[1], (2,) + (1,)*(gamma - 1), iid), list_position(2)), (0,))

def test_positions_of_nodes():
    "Node i of a chain, and of chains side by side, as Chain and Branching number them"
    for K, gamma in product((1, 2, 3), repeat=2):
        tree = Branching(constant(1, 1, 1), (K,) + (1,)*(gamma - 1), iid)((0, 0), Seeded(0))
        for i in range(1, len(tree)):
            t, k = list_position(K)(2, i)
            assert t == 1 + tree.depth[i] and k == tree.ancestors(i)[0] - 1
            if K == 1: assert chain_position(2, i) == t

# Agreement: cells

@proves("thm-cells")
@examples(25, pairs())
def test_cells_are_two_picks_with_one_key(pq):
    "The formula is the distribution of two picks with one key; on each token they agree at most min(p, q)"
    p, q = pq
    J = inverse_cdf_coupling(p, q)
    assert law_of(lambda rng: (rng.pick(q, key=0), rng.pick(p, key=0))) == as_joint(J)
    assert all(isinstance(w, Fraction) for w in J.flat)
    assert (J.sum(1) == q).all() and (J.sum(0) == p).all() and all(np.diag(J) <= np.minimum(p, q))

@proves("thm-cells")
@examples(20, models())
def test_a_round_accepts_with_the_trace(pair):
    "The first draft of a round, in the loop"
    target, draft = pair
    drafter = PositionKeyed(Chain(draft, 2))
    accepted = law_of(lambda rng: next(rounds(target, drafter, coupled, (0,), rng)).verdict.node > 0)
    assert accepted.get(True, 0) == np.trace(inverse_cdf_coupling(target.law((0,)), draft.law((0,))))

# Agreement: the race

def races(p, q, n=100_000, K=1, seed=0):  # -> times (n, K, V), winners under q (n, K), p (n,)
    "Exponential races drawn by numpy, without the code under test"
    E = np.random.default_rng([seed, K]).standard_exponential((n, K, len(p)))
    with np.errstate(divide="ignore"):
        return E, (E / q.astype(float)).argmin(2), (E.min(1) / p.astype(float)).argmin(1)

@proves("thm-race")
@examples(25, pairs())
def test_the_race_in_fractions(pq):
    "The marginals are q and p, exchanging the players transposes, the diagonal is the one-line formula"
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
    "100,000 races: the joint distribution, every cell of it; a false alarm once in 10^9"
    _, x, y = races(*pq)
    report = g_test(Counter(zip(x[:, 0].tolist(), y.tolist())), as_joint(gumbel_max_coupling(*pq)))
    assert report.fits and report.tv < .03, report

@proves("cor-agreement")
@examples(25, pairs())
def test_agreement_lies_between_its_bounds(pq):
    p, q = pq
    agree, d = list_match_prob(p, q), tv(p, q)
    assert agree == np.trace(gumbel_max_coupling(p, q))
    assert (1 - d)/(1 + d) <= agree <= 1 - d == overlap(p, q)

# GumbelMax

def test_gumbel_max_is_the_race():
    "Keyed picks of two players from one seed: the theorem's joint distribution; fresh noise at the next key"
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

def test_gumbel_max_is_seeded_without_a_key():
    "Picks without a key and coins are those of Seeded; a key is the same noise in every round"
    a, b = GumbelMax(5, lists=2), Seeded(5)
    law = exact(1, 2, 3)
    def draws(rng): return [rng.pick(law) for _ in range(9)] + [rng.coin(1, of=2) for _ in range(9)]
    assert draws(a) == draws(b)
    assert [a.at(1).verify.pick(law) for _ in range(3)] == [b.at(1).verify.pick(law) for _ in range(3)]
    sides = [side for i in range(3) for side in a.at(i)]
    assert all(side.lists == 2 for side in sides)
    assert all((side.times(k, 6) == a.times(k, 6)).all() for side in sides for k in (0, 3, (3, 1)))

@given(seeds, st.integers(0, 99), st.integers(1, 4))
def test_times_belong_to_tokens(seed, t, lists):
    "The best of the lists, each list with its own, the same for a larger vocabulary"
    rng = GumbelMax(seed, lists=lists)
    each = [rng.times((t, k), 8) for k in range(lists)]
    assert (rng.times(t, 8) == np.min(each, axis=0)).all() and (rng.times(t, 5) == rng.times(t, 8)[:5]).all()
    assert len({*np.concatenate([*each, rng.times((t + 1, 0), 8)])}) == 8*(lists + 1)

@given(seeds, pairs())
def test_gumbel_max_stays_in_the_support(seed, pq):
    "No token of weight 0; tiny weights raise no error"
    x = GumbelMax(seed).pick(pq[0], key=3)
    assert pq[0][x] > 0 and type(x) is int
    assert GumbelMax(seed).pick(np.array([0, 1 - 1e-300, 1e-300, 5e-324]), key=3) == 1

# Lists

@proves("thm-lists")
@examples(25, pairs(), st.integers(1, 6))
def test_more_lists_are_not_worse(pq, K):
    p, q = pq
    assert list_match_prob(p, q, K) <= list_match_prob(p, q, K + 1) <= p[q > 0].sum()
    slowed = {j: sum(max(p[i]/p[j], q[i]/q[j]) for i in range(len(p))) for j in range(len(p)) if p[j]*q[j]}
    direct = sum(K / (total + (K - 1)/p[j]) for j, total in slowed.items())
    assert list_match_prob(p, q, K) == direct

@proves("thm-lists")
@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("pq", PAIRS[:3], ids=("canon", "sgl", "peak"))
def test_lists_by_counts(pq, K):
    "100,000 races: the target's tokens follow p, drafted by the winning list as often as in the theorem"
    p, q = pq
    E, x, y = races(p, q, K=K)
    assert g_test(Counter(y.tolist()), as_dict(p)).fits
    n = np.arange(len(y))
    same, any_list = x[n, E[n, :, y].argmin(1)] == y, (x == y[:, None]).any(1)
    agree = list_match_prob(p, q, K)
    report = g_test(Counter(same.tolist()), {True: agree, False: 1 - agree})
    assert report.fits and report.tv < .02 and same.sum() <= any_list.sum(), report

# Never with reject

leaky = lambda p, tree, rng: reject(p, tree, by_position(tree, rng))

@proves("prop-reused")
@examples(25, pairs())
def test_reused_is_reject_with_shared_noise(pq):
    "By enumeration; and the formula gives p where the noises are independent"
    p, q = (TableModel(len(l), lambda text, l=l: l) for l in pq)
    drafter = PositionKeyed(Chain(q, 1))
    run = law_of(lambda rng: generate(p, drafter, leaky, (0,), 1, rng)[0])
    assert run == as_dict(reused_noise_law(*pq, inverse_cdf_coupling))
    assert (reused_noise_law(*pq, lambda r, q: np.outer(q, r)) == pq[0]).all()

@proves("prop-reused")
@pytest.mark.parametrize("pq", PAIRS, ids=("canon", "sgl", "peak", "zeros"))
def test_reused_race_by_counts(pq):
    "100,000 corrections with the draft's exponential times: the distribution of the formula, and not p"
    p, q = pq
    E, x, _ = races(p, q)
    x, u = x[:, 0], np.random.default_rng(1).random(len(x))
    y = np.where(u * q.astype(float)[x] < p.astype(float)[x], x, races(residual(p, q), q)[2])
    wrong = reused_noise_law(p, q, gumbel_max_coupling)
    assert g_test(Counter(y.tolist()), as_dict(wrong)).fits
    if tv(wrong, p) > F(1, 40): assert not g_test(Counter(y.tolist()), as_dict(p)).fits
