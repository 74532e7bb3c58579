"Chapter 14: the best exact acceptance on siblings, rules close to it, draws designed for them"
from fractions import Fraction as F
from itertools import combinations

import numpy as np, pytest
from hypothesis import given, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import CANON, DRAWS, Plan, constant, examples, laws, models, pairs, plans, proves, refuses, seeds
from verify_helpers import PEAK, SGL, as_dict, depends, star
from specref import (Branching, exact, hub_pairs, iid, in_sequence, kseq, law_of, loop_law, match, one_hot,
                     overlap, points, reject, residual, Seeded, spechub, target_law, transport,
                     transport_iid, traversal, Tree, tv_outcomes, warp, without_replacement)
from specref.core.tree import likeliest_points
from specref.verify.kseq import expected_trials, smallest_rho
from specref.verify.transport import (best_chosen_law, best_levels, bin_starts, choose_then_verify,
                                      greedy_draft, highest_level, importance, importance_choice,
                                      maximal_choice, maximal_plan, optimal_acceptance,
                                      optimal_acceptance_iid, optimal_acceptance_pair, ratio_prefixes,
                                      sibling_sets, sibling_sets_at, support_by_ratio, transport_lp)
from specref.verify.traversal import all_donors

counts = st.integers(1, 3)
small = pairs(st.integers(2, 4))

def joint(verify, p, draw, n):
    "The distribution of (set of siblings, token, whether it was a sibling) at one node, where p is every row"
    def run(rng):
        tree = star(draw, n, rng)
        v = verify([p]*len(tree), tree, rng)
        return tuple(sorted(set(tree.token[1:]))), v.tokens(tree)[0], v.node > 0
    return law_of(run)

def token_law(law): return law.of(lambda sxk: sxk[1])
def acceptance(law): return law.of(lambda sxk: sxk[2]).get(True, 0)
def total(plan): return sum(sum(row.values()) for row in plan.values())

def by_reject(p, draw, n, earlier=()):
    "P(`reject` accepts one of n siblings), by the first of them and the residual after its rejection"
    q = draw(earlier) if n else None
    if q is None: return 0
    rejected = np.maximum(q - p, 0)
    def later(x): return by_reject(residual(p, q), draw, n - 1, (*earlier, x))
    return overlap(p, q) + sum(rejected[x] * later(x) for x in np.flatnonzero(rejected))

def is_plan(f, p, sets):
    "No entry is negative, no set exceeds its probability, no token its own"
    assert all(x in s and w >= 0 for s, row in f.items() for x, w in row.items())
    assert all(sum(row.values()) <= sets[s] for s, row in f.items())
    assert all(sum(row.get(x, 0) for row in f.values()) <= w for x, w in enumerate(p))
    return True

WAYS = {**DRAWS, "greedy": greedy_draft(2), "hub pairs": hub_pairs}
ways = st.sampled_from(sorted(WAYS))

def shares(seed):
    "Arbitrary shares, different for every set; with the missing probability no sibling is chosen"
    def choose(p, sets):
        def row(s):
            w = np.random.default_rng([seed, *s]).integers(0, 4, len(s) + 1) + (np.arange(len(s) + 1) == 0)
            return exact(*map(int, w))[:len(s)]
        return {s: dict(zip(s, row(s) if s else ())) for s in sets}
    return choose

# Plans

@proves("thm-plan")
@examples(25, small, ways, st.integers(1, 2), st.sampled_from([match, reject, transport, importance]))
def test_any_exact_rule_is_a_plan(pq, how, n, verify):
    "Accepted mass of an exact rule, by set of siblings: a plan whose total is its acceptance probability"
    p, draw = pq[0], WAYS[how](pq[1])
    law, sets = joint(verify, p, draw, n), sibling_sets(draw, n)
    f = {s: {x: law.get((s, x, True), 0) for x in s} for s in sets}
    assert token_law(law) == as_dict(p) and is_plan(f, p, sets) and total(f) == acceptance(law)

@proves("thm-plan")
@examples(25, small, seeds, counts, st.data())
def test_any_plan_is_a_rule(pq, seed, n, data):
    "Accept x with probability f(S,x)/Q(S), else draw from the residual: the distribution is p, for any plan"
    p, draw = pq[0], depends(seed, len(pq[0]))
    sets = sibling_sets(draw, n)
    spare, room, f = dict(sets), list(p), {s: {} for s in sets}
    for s, x in data.draw(st.permutations([(s, x) for s in sets for x in s])):
        f[s][x] = min(spare[s], room[x]) * F(data.draw(st.integers(0, 2)), 2)
        spare[s] -= f[s][x]
        room[x] -= f[s][x]
    def run(rng):
        S, rest = tuple(sorted(set(star(draw, n, rng).token[1:]))), F(1)
        for x in S:
            if rng.coin(f[S][x], of=rest * sets[S]): return x, True
            rest -= f[S][x] / sets[S]
        return rng.pick(np.array(room, object) / sum(room)), False
    law = law_of(run)
    assert is_plan(f, p, sets) and law.of(lambda xk: xk[0]) == as_dict(p)
    assert law.of(lambda xk: xk[1]).get(True, 0) == total(f)

@proves("thm-plan", "thm-canonical")
@examples(20, models(), plans(3), st.integers(1, 2))
def test_importance_on_trees(pair, steps, n):
    "The contract of every verifier; `transport` is listed in test_contracts"
    verifier_contract(pair[0], Plan(pair[1], steps), importance, (0,), n)

# The optimum

@proves("thm-optimum", "thm-canonical")
@examples(25, small, seeds, counts)
def test_max_flow_is_min_cut(pq, seed, n):
    "A largest plan has the value of the minimum over all H and of the linear program; so has its choice"
    p = pq[0]
    sets = sibling_sets(depends(seed, len(p)), n)
    f, best, share = maximal_plan(p, sets), optimal_acceptance(p, sets), maximal_choice(p, sets)
    assert is_plan(f, p, sets) and total(f) == best and sum(sets.values()) == 1
    assert transport_lp(p, sets) == pytest.approx(float(best), abs=1e-9)
    for row in (share, importance_choice(p, sets)):
        assert all(sum(row[s].values()) == 1 and min(row[s].values()) >= 0 for s in sets)
    assert all(share[s][x] * w >= f[s][x] for s, w in sets.items() for x in s)
    assert overlap(p, law_of_choice(p, sets, share)) == best

@proves("thm-optimum")
@examples(25, small, ways, st.integers(1, 2), st.sampled_from([match, reject, importance]))
def test_no_rule_accepts_more(pq, how, n, verify):
    "The acceptance probability of `transport` is the optimum, that of every other rule at most this"
    p, draw = pq[0], WAYS[how](pq[1])
    best = optimal_acceptance(p, sibling_sets(draw, n))
    assert acceptance(joint(verify, p, draw, n)) <= best == acceptance(joint(transport, p, draw, n))

@proves("cor-always")
@examples(25, small, counts)
def test_acceptance_one(pq, n):
    "Acceptance 1 if and only if p(H) >= q(H)^n for all H; so it is for siblings drawn from p itself"
    p, q = pq
    sets = [list(H) for k in range(1, len(p) + 1) for H in combinations(range(len(p)), k)]
    hall = all(sum(p[H]) >= sum(q[H])**n for H in sets)
    assert (optimal_acceptance_iid(p, q, n) == 1) == hall and optimal_acceptance_iid(p, p, n) == 1

@proves("prop-more")
@examples(25, small, ways, counts)
def test_more_siblings_are_accepted_at_least_as_often(pq, how, n):
    "One more sibling never lowers the optimum; different siblings are never worse than independent ones"
    p, q = pq
    fewer, more = (optimal_acceptance(p, sibling_sets(WAYS[how](q), k)) for k in (n, n + 1))
    assert fewer <= more
    assert optimal_acceptance_iid(p, q, n) <= optimal_acceptance(p, sibling_sets(without_replacement(q), n))

# Prefixes

def inside(sets, H): return sum(w for s, w in sets.items() if set(s) <= set(H))

def q_convex(q, sets):
    support = [x for x in range(len(q)) if q[x]]
    rise = lambda H, x: (inside(sets, {*H, x}) - inside(sets, H)) / q[x]
    cases = [H for k in range(len(support) - 1) for H in combinations(support, k)]
    return all(rise(H, x) <= rise((*H, x), y) for H in cases
               for x in support for y in support if len({*H, x, y}) == len(H) + 2)

@proves("lem-clocks")
@examples(25, st.integers(2, 5).flatmap(laws), counts)
def test_q_convexity(q, n):
    assert q_convex(q, sibling_sets(iid(q), n))
    if n <= np.count_nonzero(q): assert q_convex(q, sibling_sets(without_replacement(q), n))

@proves("thm-prefix")
@examples(25, pairs(st.integers(2, 5)), counts)
def test_prefixes(pq, n):
    "The scan agrees with the search over all H, also beyond the support, with zeros and ties"
    p, q = pq
    for draw in (iid(q), without_replacement(q)):
        sets = sibling_sets(draw, n)
        assert optimal_acceptance(p, sets, ratio_prefixes(p, q)) == optimal_acceptance(p, sets)
    assert optimal_acceptance_iid(p, q, n) == optimal_acceptance(p, sibling_sets(iid(q), n))

def test_without_convexity_the_scan_is_wrong():
    "A point beside a sampled token is not q-convex, and the scan by q/p finds too large a minimum"
    p, q = CANON
    sets = sibling_sets(in_sequence(points([0], 4, exact=True), iid(q)), 2)
    assert not q_convex(q, sets)
    assert optimal_acceptance(p, sets, ratio_prefixes(p, q)) > optimal_acceptance(p, sets)

# Canonical form

def law_of_choice(p, sets, share):
    "Σ over the sets of their probability times the share of each token"
    return sum((w * one_hot(x, len(p), exact=True) * share[s][x] for s, w in sets.items() for x in s), 0*p)

@proves("thm-canonical")
@examples(25, small, ways, st.integers(1, 2), seeds)
def test_any_choice_is_exact(pq, how, n, seed):
    "Arbitrary shares: the token has distribution p, and a sibling is accepted with probability Σ min(p, z)"
    p, draw, choose = pq[0], WAYS[how](pq[1]), shares(seed)
    law, sets = joint(choose_then_verify(choose), p, draw, n), sibling_sets(draw, n)
    z = law_of_choice(p, sets, choose(p, sets))
    assert token_law(law) == as_dict(p) and acceptance(law) == overlap(p, z)

# K-SEQ

ratios = st.fractions(1, 4, max_denominator=12)
def at(rho): return lambda p, tree, rng: kseq(p, tree, rng, rho=lambda *_: rho)

@proves("thm-kseq")
@examples(25, small, counts, ratios)
def test_kseq_is_exact(pq, k, rho):
    "Every fraction with T(ρ) <= ρ is lossless and accepts with 1 - (1-β)^k; any other is refused"
    p, q = pq
    rule, β = at(rho), np.minimum(q, p / rho).sum()
    if expected_trials(p, q, k, rho) > rho:
        return refuses("rho", law_of, lambda rng: rule([p]*4, star(iid(q), k, rng), rng))
    law = joint(rule, p, iid(q), k)
    assert token_law(law) == as_dict(p) and acceptance(law) == 1 - (1 - β)**k

@proves("thm-kseq")
@examples(12, small, counts)
def test_the_smallest_rho(pq, k):
    "`smallest_rho` is lossless, and nothing smaller by more than the last step of the bisection is"
    p, q = pq
    for steps in (30, 4):
        rho = smallest_rho(p, q, k, steps)
        assert 1 <= rho <= k and expected_trials(p, q, k, rho) <= rho
        below = rho - F(k - 1, 2**steps)
        assert k == 1 or below < 1 or expected_trials(p, q, k, below) > below
        assert token_law(joint(at(rho), p, iid(q), k)) == as_dict(p)
    assert rho == smallest_rho(p, q, k)

# Order

def trials(p, q, k):
    "T_k: how many of k independent siblings `reject` verifies on average"
    T = F(0)
    for _ in range(k): T += 1 - np.minimum(p, T*q).sum()
    return T

@proves("thm-between")
@examples(25, small, counts)
def test_the_order_of_the_rules(pq, k):
    "match <= reject = G(T_k) <= K-SEQ = G(ρ*) <= optimum <= G(k), with independent siblings"
    p, q = pq
    G = lambda T: np.minimum(p, T*q).sum()
    rate, T, rho = by_reject(p, iid(q), k), trials(p, q, k), smallest_rho(p, q, k, 30)
    by_match, β = (p * (1 - (1 - q)**k)).sum(), np.minimum(q, p / rho).sum()
    assert by_match <= rate == G(T) <= G(rho) and T <= rho <= k
    assert 0 <= G(rho) - (1 - (1 - β)**k) <= F(k, 2**30)   # equal at the root
    assert 1 - (1 - β)**k <= optimal_acceptance_iid(p, q, k) <= G(k)

@proves("thm-kseq-guarantee")
@examples(25, pairs(st.integers(2, 5)), st.integers(1, 8))
def test_guarantee(pq, k):
    "K-SEQ accepts at least 1 - (1 - 1/k)^k of the optimum, even with ρ = k"
    p, q = pq
    factor, rho = 1 - (1 - F(1, k))**k, smallest_rho(p, q, k, 30)
    def rate(rho): return 1 - (1 - np.minimum(q, p / rho).sum())**k
    assert rate(rho) >= rate(F(k)) >= factor * optimal_acceptance_iid(p, q, k) and factor > 1 - 1 / np.e

# Draws

@proves("thm-greedy-draft")
@examples(25, pairs(st.integers(2, 5)), counts)
def test_greedy_draft(pq, n):
    "p(Top) + Σ min(p, tail) is the optimum, and `reject` accepts exactly that, the sampled token first"
    p, q = pq
    top, draw = [int(x) for x in np.argsort(-q, kind="stable")[:n - 1]], greedy_draft(n)(q)
    tail = without_replacement(q)(top)
    want = p[top].sum() + (0 if tail is None else np.minimum(p, tail).sum())
    assert optimal_acceptance(p, sibling_sets(draw, n)) == want == by_reject(p, draw, n)
    law = joint(reject, p, draw, min(n, 2))
    if n <= 2: assert acceptance(law) == want and token_law(law) == as_dict(p)

@proves("thm-greedy-draft")
@given(pairs(st.integers(2, 5)))
def test_hub_pairs_have_the_greedy_sets(pq):
    p, q = pq
    assert sibling_sets(hub_pairs(q), 2) == sibling_sets(greedy_draft(2)(q), 2)
    assert token_law(joint(reject, p, hub_pairs(q), 2)) == as_dict(p)

new_draws = st.sampled_from([greedy_draft(2), greedy_draft(3), hub_pairs])

@examples(12, models(), st.sampled_from([(1,), (2,), (3,), (2, 2)]), new_draws)
def test_the_drafter_contract(pair, shape, draw): drafter_contract(Branching(pair[1], shape, draw), (0, 1))

# SpecHub

@proves("thm-spechub")
@examples(120, pairs(st.integers(2, 5)))
def test_spechub_reaches_the_optimum_of_its_pairs(pq):
    "Exact; accepts p(hub) + Σ min(p, tail), as `reject` on the greedy draft; never less than on the pairs"
    p, q = pq
    law, hub = joint(spechub, p, hub_pairs(q), 2), int(np.argmax(q))
    rate, tail = acceptance(law), without_replacement(q)((hub,))
    assert token_law(law) == as_dict(p) and rate == p[hub] + overlap(np.delete(p, hub), np.delete(tail, hub))
    assert rate == optimal_acceptance(p, sibling_sets(hub_pairs(q), 2)) == by_reject(p, greedy_draft(2)(q), 2)
    assert rate >= by_reject(p, hub_pairs(q), 2)

def test_spechub_accepts_more_than_reject():
    "On more than half of 200 random pairs strictly (on the book's: chapter 14)"
    rng = np.random.default_rng(0)
    random_pairs = [[exact(*map(int, rng.integers(1, 30, 5))) for _ in range(2)] for _ in range(200)]
    gains = [by_reject(p, greedy_draft(2)(q), 2) - by_reject(p, hub_pairs(q), 2) for p, q in random_pairs]
    assert min(gains) >= 0 and sum(gain > 0 for gain in gains) > 100

@proves("thm-spechub")
@examples(12, models(), st.booleans(), st.sampled_from([(2, 2), (2, 1)]))
def test_spechub_in_the_loop(pair, cold, shape):
    "Pairs and single children; in the cold the limit of the pairs, the two likeliest as points, or one"
    (target, draft), draw = pair, likeliest_points if cold else hub_pairs
    law = loop_law(target, Branching(draft, shape, draw), spechub, (0,), 2)
    assert law == target_law(target, (0,), 2)

# Levels: the optimum of independent siblings

def law_by_levels(p, q, levels, z, choose=lambda xs: xs[0]):
    "The emitted token with two siblings, where `choose` takes one of those at the highest level"
    def run(rng):
        tokens = [rng.pick(q) for _ in range(2)]
        last = [rng.pick(levels.of(x)) for x in tokens]
        x = choose([x for x, level in zip(tokens, last) if level == max(last)])
        return x if rng.coin(p[x], of=z[x]) else rng.pick(residual(p, z))
    return law_of(run)

def chosen(q, levels): return q * levels.ratio[levels.bin]

@proves("thm-levels", "thm-clipped")
@examples(25, small, counts)
def test_transport_iid_is_optimal(pq, k):
    "Exact; accepts as often as the closed form and as `transport` with all sets listed"
    (p, q), k = pq, min(k, 6 - len(pq[0]))
    law = joint(transport_iid, p, iid(q), k)
    assert token_law(law) == as_dict(p)
    assert acceptance(law) == optimal_acceptance_iid(p, q, k) == acceptance(joint(transport, p, iid(q), k))

@pytest.mark.parametrize("pq,want", [(CANON, {2: F(79, 100), 3: F(871, 1000)}),
                                     (SGL, {2: F(99, 100)}),
                                     (PEAK, {2: F(49, 100), 3: F(571, 1000)})])
def test_known_values(pq, want):
    "Optima of three pairs of the literature, computed elsewhere by linear programming"
    for k, rate in want.items():
        law = joint(transport_iid, pq[0], iid(pq[1]), k)
        assert acceptance(law) == rate and token_law(law) == as_dict(pq[0])

@proves("thm-levels")
@examples(12, models(), st.sampled_from([(2,), (3,), (2, 1), (1, 2)]), st.sampled_from([1, 2, 9]))
def test_levels_in_the_loop(pair, shape, bins):
    "Whole generations, with any number of bins"
    target, draft = pair
    def verify(p, tree, rng): return transport_iid(p, tree, rng, bins=bins)
    law = loop_law(target, Branching(draft, shape, iid), verify, (0,), 2)
    assert law == target_law(target, (0,), 2)

@proves("thm-levels", "thm-clipped")
@examples(100, pairs(st.integers(2, 30)), st.integers(1, 6), st.sampled_from([1, 2, 5, 99]))
def test_exchanges(pq, k, bins):
    "Probabilities that preserve the levels; z adds up to one; the optimum, or less by at most the bound"
    p, q = pq
    levels, order = best_levels(p, q, k, bins), support_by_ratio(p, q)
    m = np.array([q[order][levels.bin[order] == b].sum() for b in range(len(levels.ratio))])
    assert len(levels.exchanges) < len(m) <= max(1, bins)
    assert all(0 < a <= 1 and 0 < b <= 1 and m[i]*a == m[j]*b for i, j, a, b in levels.exchanges)
    W = np.array([levels.of(next(x for x in order if levels.bin[x] == b)) for b in range(len(m))])
    assert (W.sum(1) == 1).all() and (m @ W == m).all()
    assert (W @ highest_level(m, k) == levels.ratio).all() and chosen(q, levels).sum() == 1
    best, z = optimal_acceptance_iid(p, q, k), best_chosen_law(p[order], q[order], k)
    assert z.sum() == 1 and overlap(p[order], z) == best
    ratio, start = z / q[order], bin_starts(q[order], z, bins)
    spans = np.maximum.reduceat(ratio, start) - np.minimum.reduceat(ratio, start)
    assert 0 <= best - overlap(p, chosen(q, levels)) <= (m * spans).sum() / 4

def test_fewer_bins_accept_less():
    "With two bins for the four tokens the output is exact, and the acceptance below the optimum"
    p, q = CANON[0], exact(1, 1, 1, 1)
    law = joint(lambda p, tree, rng: transport_iid(p, tree, rng, bins=2), p, iid(q), 2)
    assert token_law(law) == as_dict(p) and acceptance(law) < 1 == optimal_acceptance_iid(p, q, 2)

def test_wrong_levels_change_the_distribution():
    "Exchanges that do not preserve the levels, z* for another choice, a choice that depends on the tokens"
    p, q = CANON
    levels, coarse = best_levels(p, q, 2), best_levels(p, q, 2, bins=2)
    order, z = support_by_ratio(p, q), 0*q
    z[order] = best_chosen_law(p[order], q[order], 2)
    def token(levels, z, *choose): return tv_outcomes(law_by_levels(p, q, levels, z, *choose), as_dict(p))
    assert token(levels, z) == token(coarse, chosen(q, coarse)) == 0
    assert token(levels, z, lambda xs: xs[-1]) == 0   # a choice by the place among the siblings is allowed
    same_rates = [(i, j, a, a) for i, j, a, _ in levels.exchanges]
    assert token(levels._replace(exchanges=same_rates), z) > 0
    assert token(levels._replace(exchanges=levels.exchanges[:1]), z) > 0 and token(coarse, z) > 0
    assert token(levels, z, lambda xs: max(xs, key=lambda x: p[x] / q[x])) > 0

@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1, .02])
def test_levels_in_floats(temperature):
    "3,000 tokens in bins: rows of W against z, its column sums, the loss; a sampled verdict"
    rng = np.random.default_rng(1)
    logits = 3 * rng.standard_normal(3000)
    p, q = warp(logits, temperature), warp(logits + rng.standard_normal(3000), temperature)
    levels = best_levels(p, q, 4, bins=200)
    m = np.bincount(levels.bin, q, len(levels.ratio))
    W = np.array([levels.of(np.flatnonzero((levels.bin == b) & (q > 0))[0]) for b in range(len(m))])
    assert np.allclose(W.sum(1), 1, rtol=0, atol=1e-12) and np.allclose(m @ W, m, rtol=0, atol=1e-12)
    assert np.allclose(W @ highest_level(m, 4), levels.ratio, rtol=1e-9, atol=1e-12)
    z = chosen(q, levels)
    assert abs(z.sum() - 1) < 1e-12 and 0 <= optimal_acceptance_iid(p, q, 4) - overlap(p, z) + 1e-12 < 1e-3
    verdict = transport_iid([p]*5, star(iid(q), 4, Seeded(0)), Seeded(1))
    assert p[verdict.token] > 0

def test_levels_of_a_point_mass():
    "At temperature 0 there is one bin and no exchange"
    p, q = np.full(50_000, 1/50_000), one_hot(7, 50_000)
    levels = best_levels(p, q, 4)
    assert len(levels.ratio) == 1 and not levels.exchanges and (chosen(q, levels) == q).all()

@proves("prop-pair")
@examples(100, pairs(st.integers(2, 5)))
def test_pairs_without_replacement(pq):
    "The closed form against the list of sets, also for point masses"
    p, q = pq
    assert optimal_acceptance_pair(p, q) == optimal_acceptance(p, sibling_sets(without_replacement(q), 2))

def test_pairs_of_a_near_point_mass():
    "In floats, where 1 - q of the likeliest token has lost its digits"
    p, tail = np.array([.1, .2, .3, .4]), np.array([1e-15, 3e-15, 4e-15])
    q = np.array([1 - tail.sum(), *tail])
    want = optimal_acceptance_pair(exact(1, 2, 3, 4), exact(*map(F, q)))
    assert optimal_acceptance_pair(p, q) == pytest.approx(float(want), abs=1e-12)

# Wrong sets, large vocabularies, whole numbers

def test_wrong_sets_change_the_distribution():
    "Siblings without replacement, verified with the sets of independent ones"
    p, q = CANON
    def run(rng):
        tree = star(without_replacement(q), 2, rng)
        wrong = star(iid(q), 2, Seeded(0))
        wrong.token[1:] = tree.token[1:]
        wrong.law[1:] = [q, q]
        v = transport([p]*3, wrong, rng)
        return v.tokens(wrong)[0]
    assert tv_outcomes(law_of(run), as_dict(p)) > 0

def test_a_large_vocabulary_with_small_supports():
    "512 tokens, four of them likely: the sets are listed; K-SEQ needs no list"
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(512, .1)), np.zeros(512)
    q[:4] = .1, .2, .3, .4
    for draw in (iid(q), without_replacement(q), greedy_draft(3)(q)):
        tree = star(draw, 3, Seeded(1))
        sets = sibling_sets_at(tree, 0)
        total_mass = total(maximal_plan(p, sets))
        assert total_mass == pytest.approx(float(transport_lp(p, sets)), abs=1e-9) and len(sets) <= 14
        assert 0 <= transport([p]*4, tree, Seeded(2)).token < 512
    flat = np.full(512, 1/512)
    assert kseq([p]*3, star(iid(flat), 2, Seeded(0)), Seeded(0)).token < 512

@pytest.mark.parametrize("verify", [transport, importance, kseq, transport_iid])
def test_rows_of_whole_numbers(verify):
    "A deterministic target in integers: only its token is emitted"
    q = CANON[1].astype(float)
    for s in range(60):
        rows, tree = [np.eye(4, dtype=int)[s % 4]]*3, star(iid(q), 2, Seeded(s))
        assert set(verify(rows, tree, Seeded(s)).tokens(tree)) == {s % 4}

def second_child_if(below, q):
    "A second child of node 0 if a token, of the first child or of the node below it, is 3"
    def draft(ctx, rng):
        tree = Tree(ctx)
        first, = tree.grow(0, iid(q), rng)
        last, = tree.grow(first, iid(q), rng) if below else (first,)
        if tree.token[last] == 3: tree.grow(0, iid(q), rng)
        return tree
    return draft

@proves("thm-plan")
@pytest.mark.parametrize("below", [False, True])
def test_a_number_of_children_that_depends_on_tokens_is_refused(below):
    "Rules that read only edges are exact; those that need the distribution of the sets raise"
    p, q = CANON
    drafter, target, ctx = second_child_if(below, q), constant(*p), (0,)
    drafter_contract(drafter, ctx)
    for verify in (reject, traversal, all_donors):
        assert loop_law(target, drafter, verify, ctx, 2) == target_law(target, ctx, 2)
    for verify in (transport, importance, kseq, transport_iid, spechub):
        refuses("tree", loop_law, target, drafter, verify, ctx, 2)
