"Chapter 14: what the best exact rule on siblings accepts, rules that come close, draws made for them"
from fractions import Fraction as F
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import CANON, DRAWS, Plan, Recorder, constant, laws, models, pairs, plans, proves, refuses, seeds
from specref.core.rng import Seeded, Tape, tv_outcomes, law_of
from specref.core.law import exact, overlap, one_hot, residual
from specref.core.loop import loop_law, match, rounds
from specref.verify.reject import reject
from specref.verify.siblings import Branching
from specref.core.target import target_law
from specref.verify.transport import (MAX_SEQUENCES, choose_then_verify, expected_trials, greedy_draft,
                                      importance, importance_choice, kseq, maximal_choice, maximal_plan,
                                      optimal_acceptance, optimal_acceptance_iid, ratio_prefixes,
                                      sibling_sequences, sibling_sets, sibling_sets_at, smallest_rho,
                                      spechub, transport, transport_lp)
from specref.verify.traversal import all_donors, traversal
from specref.core.tree import Tree, iid, in_sequence, points, without_replacement

SGL = exact(6, 2, 1, 1), exact(14, 4, 1, 1)    # verification.md §17
few = settings(max_examples=12)
some = settings(max_examples=25)
counts = st.integers(1, 3)
small = pairs(st.integers(2, 4))


def star(draw, n, rng):
    tree = Tree((0,))
    tree.grow(0, draw, rng, n)
    return tree


def seen(verify, p, draw, n):
    "The law of (the offered set, the token, was it a child?) when one node is judged and p is every row"
    def run(rng):
        tree = star(draw, n, rng)
        v = verify([p]*len(tree), tree, rng)
        return tuple(sorted(set(tree.token[1:]))), v.tokens(tree)[0], v.node > 0
    return law_of(run)


def token_law(law): return law.of(lambda sxk: sxk[1])
def acceptance(law): return law.of(lambda sxk: sxk[2]).get(True, 0)
def as_dict(p): return {x: w for x, w in enumerate(p) if w}
def total(plan): return sum(sum(row.values()) for row in plan.values())


def kept(p, draw, n, earlier=()):
    "P(`reject` accepts one of n siblings), by the first of them and its residual"
    q = draw(earlier) if n else None
    if q is None: return 0
    refused = np.maximum(q - p, 0)
    rest = (refused[x] * kept(residual(p, q), draw, n - 1, (*earlier, x)) for x in np.flatnonzero(refused))
    return overlap(p, q) + sum(rest)


def is_plan(f, p, sets):
    "Nothing negative, no set gives more than it has, no token takes more than its weight"
    assert all(x in s and w >= 0 for s, row in f.items() for x, w in row.items())
    assert all(sum(row.values()) <= sets[s] for s, row in f.items())
    assert all(sum(row.get(x, 0) for row in f.values()) <= w for x, w in enumerate(p))
    return True


def depends(seed, V):
    "A draw whose laws depend on the elder siblings in an arbitrary way"
    def draw(earlier):
        w = np.random.default_rng([seed, len(earlier), *earlier]).choice([0, 0, 1, 2, 5], V)
        return exact(*map(int, w if w.any() else w + 1))
    return draw


WAYS = {**DRAWS, "greedy": greedy_draft(2), "spechub": spechub}
ways = st.sampled_from(sorted(WAYS))
LOSSLESS = {"transport": transport, "importance": importance}
rules = st.sampled_from(sorted(LOSSLESS))


def shares(seed):
    "A way of choosing that is arbitrary, and different for every set"
    def choose(p, sets):
        def row(s):
            w = np.random.default_rng([seed, *s]).integers(0, 4, len(s)) + (np.arange(len(s)) == 0)
            return exact(*map(int, w))
        return {s: dict(zip(s, row(s) if s else ())) for s in sets}
    return choose


# Plans

@proves("thm-plan")
@some
@given(small, ways, st.integers(1, 2), st.sampled_from([match, reject, transport, importance]))
def test_rules_are_plans(pq, how, n, verify):
    "What an exact rule keeps, sorted by what was offers_at, is a plan, and its total is the acceptance"
    p, draw = pq[0], WAYS[how](pq[1])
    law, sets = seen(verify, p, draw, n), sibling_sets(draw, n)
    f = {s: {x: law.get((s, x, True), 0) for x in s} for s in sets}
    assert token_law(law) == as_dict(p) and is_plan(f, p, sets) and total(f) == acceptance(law)


@proves("thm-plan")
@some
@given(small, seeds, counts, st.data())
def test_plans_are_rules(pq, seed, n, data):
    "Accept x with probability f(S,x)/Q(S), else draw from the rest of p: the law is p, for any plan"
    p, draw = pq[0], depends(seed, len(pq[0]))
    sets = sibling_sets(draw, n)
    spare, room, f = dict(sets), list(p), {s: {} for s in sets}
    for s, x in data.draw(st.permutations([(s, x) for s in sets for x in s])):
        f[s][x] = min(spare[s], room[x]) * F(data.draw(st.integers(0, 2)), 2)
        spare[s] -= f[s][x]
        room[x] -= f[s][x]
    def run(rng):
        S, left = tuple(sorted(set(star(draw, n, rng).token[1:]))), F(1)
        for x in S:
            if rng.coin(f[S][x], of=left * sets[S]): return x, True
            left -= f[S][x] / sets[S]
        return rng.pick(np.array(room, object) / sum(room)), False
    law = law_of(run)
    assert is_plan(f, p, sets) and law.of(lambda xk: xk[0]) == as_dict(p)
    assert law.of(lambda xk: xk[1]).get(True, 0) == total(f)


@proves("thm-plan", "thm-canonical")
@settings(max_examples=20)
@given(models(), plans(3), rules, st.integers(1, 2))
def test_trees(pair, steps, rule, n):
    "Arbitrary honest trees with probes: one round and its continuation"
    verifier_contract(pair[0], Plan(pair[1], steps), LOSSLESS[rule], (0,), n)


# The optimum

@proves("thm-optimum")
@some
@given(small, seeds, counts)
def test_flow_is_cut(pq, seed, n):
    "A largest plan is a plan, and its total is the minimum over all H, for siblings drawn in any way"
    p = pq[0]
    sets = sibling_sets(depends(seed, len(p)), n)
    f = maximal_plan(p, sets)
    assert is_plan(f, p, sets) and total(f) == optimal_acceptance(p, sets) and sum(sets.values()) == 1


@proves("thm-optimum")
@settings(max_examples=25)
@given(small, ways, counts)
def test_linear_program(pq, how, n):
    "HiGHS finds the same number"
    sets = sibling_sets(WAYS[how](pq[1]), n)
    assert transport_lp(pq[0], sets) == pytest.approx(float(optimal_acceptance(pq[0], sets)), abs=1e-9)


@proves("thm-optimum")
@some
@given(small, ways, st.integers(1, 2), st.sampled_from([match, reject, importance]))
def test_nobody_does_better(pq, how, n, verify):
    "`transport` keeps a child exactly as often as the optimum says, every other rule at most so"
    p, draw = pq[0], WAYS[how](pq[1])
    best = optimal_acceptance(p, sibling_sets(draw, n))
    assert acceptance(seen(verify, p, draw, n)) <= best == acceptance(seen(transport, p, draw, n))


@proves("cor-always")
@some
@given(small, counts)
def test_always(pq, n):
    "A sibling is always kept if and only if p(H) >= q(H)^n for all H; drawn from p itself, always"
    p, q = pq
    sets = [list(H) for k in range(1, len(p) + 1) for H in combinations(range(len(p)), k)]
    hall = all(sum(p[H]) >= sum(q[H])**n for H in sets)
    assert (optimal_acceptance_iid(p, q, n) == 1) == hall and optimal_acceptance_iid(p, p, n) == 1


@proves("prop-more")
@some
@given(small, ways, counts)
def test_more_is_better(pq, how, n):
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
@settings(max_examples=25)
@given(st.integers(2, 5).flatmap(laws), counts)
def test_clocks(q, n):
    assert q_convex(q, sibling_sets(iid(q), n))
    if n <= np.count_nonzero(q): assert q_convex(q, sibling_sets(without_replacement(q), n))


@proves("thm-prefix")
@some
@given(pairs(st.integers(2, 5)), counts)
def test_prefixes(pq, n):
    "The scan finds what the search over all H finds, past the end of the support, with zeros and ties"
    p, q = pq
    for draw in (iid(q), without_replacement(q)):
        sets = sibling_sets(draw, n)
        assert optimal_acceptance(p, sets, ratio_prefixes(p, q)) == optimal_acceptance(p, sets)
    assert optimal_acceptance_iid(p, q, n) == optimal_acceptance(p, sibling_sets(iid(q), n))


def test_without_convexity_prefixes_miss():
    "A point beside a sampled token is not q-convex, and the scan by q/p finds too large a minimum"
    p, q = CANON
    sets = sibling_sets(in_sequence(points([0], 4, exact=True), iid(q)), 2)
    assert not q_convex(q, sets)
    assert optimal_acceptance(p, sets, ratio_prefixes(p, q)) > optimal_acceptance(p, sets)


# Canonical form

@proves("thm-canonical")
@some
@given(small, ways, st.integers(1, 2), seeds)
def test_any_choice_is_exact(pq, how, n, seed):
    "Arbitrary shares: the token has law p, and a child is kept with probability Σ min(p, z)"
    p, draw, choose = pq[0], WAYS[how](pq[1]), shares(seed)
    law, sets = seen(choose_then_verify(choose), p, draw, n), sibling_sets(draw, n)
    share = choose(p, sets)
    z = sum((w * one_hot(x, len(p), exact=True) * share[s][x] for s, w in sets.items() for x in s), 0*p)
    assert sum(z) == 1 and token_law(law) == as_dict(p) and acceptance(law) == overlap(p, z)


@proves("thm-canonical")
@some
@given(small, seeds, counts)
def test_the_best_choice(pq, seed, n):
    "The shares that follow a largest plan are at least the plan's, and Σ min(p, z) is the optimum"
    p = pq[0]
    sets = sibling_sets(depends(seed, len(p)), n)
    share, f = maximal_choice(p, sets), maximal_plan(p, sets)
    z = sum((w * one_hot(x, len(p), exact=True) * share[s][x] for s, w in sets.items() for x in s), 0*p)
    assert overlap(p, z) == optimal_acceptance(p, sets)
    for row in (share, importance_choice(p, sets)):
        assert all(sum(row[s].values()) == 1 and min(row[s].values()) >= 0 for s in sets)
    assert all(share[s][x] * w >= f[s][x] for s, w in sets.items() for x in s)


# K-SEQ

ratios = st.fractions(1, 4, max_denominator=12)
def at(rho): return lambda p, tree, rng: kseq(p, tree, rng, rho=lambda *_: rho)


@proves("thm-kseq")
@some
@given(small, counts, ratios)
def test_kseq_is_exact(pq, k, rho):
    "Every fraction with T(ρ) <= ρ keeps the law and accepts with 1 - (1-β)^k; any other is refused"
    p, q = pq
    rule, β = at(rho), np.minimum(q, p / rho).sum()
    if expected_trials(p, q, k, rho) > rho:
        return refuses("rho", law_of, lambda rng: rule([p]*4, star(iid(q), k, rng), rng))
    law = seen(rule, p, iid(q), k)
    assert token_law(law) == as_dict(p) and acceptance(law) == 1 - (1 - β)**k


@proves("thm-kseq")
@few
@given(small, counts)
def test_the_root(pq, k):
    "`smallest_rho` keeps the law by itself, and nothing smaller by more than the bisection's last step does"
    p, q = pq
    for steps in (30, 4):
        rho = smallest_rho(p, q, k, steps)
        assert 1 <= rho <= k and expected_trials(p, q, k, rho) <= rho
        below = rho - F(k - 1, 2**steps)
        assert k == 1 or below < 1 or expected_trials(p, q, k, below) > below
        assert token_law(seen(at(rho), p, iid(q), k)) == as_dict(p)
    assert rho == smallest_rho(p, q, k)


def test_published_roots():
    "ρ* = 3/2 exactly for two siblings of the book's pair; the others to the digits of verification.md §6"
    p, q = CANON
    assert smallest_rho(p, q, 2) == F(3, 2)
    assert tuple(residual(p, F(3, 2) * np.minimum(q, p / F(3, 2)))) == (1, 0, 0, 0)
    published = (CANON, 3, 1.939500, .793950), (SGL, 2, 1.270156, .927016), (SGL, 3, 1.502890, .950289)
    for pq, k, rho, A in published:
        assert (float(smallest_rho(*pq, k, 30)), acceptance_kseq(*pq, k)) == pytest.approx((rho, A), abs=1e-6)
        floats = [law.astype(float) for law in pq]
        assert (smallest_rho(*floats, k), acceptance_kseq(*floats, k)) == pytest.approx((rho, A), abs=1e-6)
    assert smallest_rho(p, p, 3) == smallest_rho(p, q, 1) == 1
    assert smallest_rho(*(exact(1, 0), exact(0, 1)), 3) == 3


def acceptance_kseq(p, q, k): return float(np.minimum(p, smallest_rho(p, q, k, 30) * q).sum())


# Order

def judged(p, q, k):
    "T_k: how many independent siblings `reject` judges on average"
    T = F(0)
    for _ in range(k): T += 1 - np.minimum(p, T*q).sum()
    return T


@proves("thm-between")
@some
@given(small, counts)
def test_the_order_of_the_rules(pq, k):
    "match <= reject = G(T_k) <= K-SEQ = G(ρ*) <= optimum <= G(k), with independent siblings"
    p, q = pq
    G = lambda T: np.minimum(p, T*q).sum()
    by_reject, rho = kept(p, iid(q), k), smallest_rho(p, q, k, 30)
    by_match, β = (p * (1 - (1 - q)**k)).sum(), np.minimum(q, p / rho).sum()
    assert by_match <= by_reject == G(judged(p, q, k)) and judged(p, q, k) <= rho <= k
    assert by_reject <= G(rho)
    assert 0 <= G(rho) - (1 - (1 - β)**k) <= F(k, 2**30)   # equal at the root
    assert 1 - (1 - β)**k <= optimal_acceptance_iid(p, q, k) <= G(k)


@proves("thm-kseq-guarantee")
@settings(max_examples=25)
@given(pairs(st.integers(2, 5)), st.integers(1, 8))
def test_guarantee(pq, k):
    "K-SEQ keeps at least 1 - (1 - 1/k)^k of the optimum, even with ρ = k"
    p, q = pq
    factor, rho = 1 - (1 - F(1, k))**k, smallest_rho(p, q, k, 30)
    keeps = lambda rho: 1 - (1 - np.minimum(q, p / rho).sum())**k
    assert keeps(rho) >= keeps(F(k)) >= factor * optimal_acceptance_iid(p, q, k) and factor > 1 - 1 / np.e


# Draws

@proves("thm-greedy-draft")
@some
@given(pairs(st.integers(2, 5)), counts)
def test_greedy_draft(pq, n):
    "p(Top) + Σ min(p, tail) is the optimum, and `reject` accepts exactly that, the sampled token first"
    p, q = pq
    top, draw = [int(x) for x in np.argsort(-q, kind="stable")[:n - 1]], greedy_draft(n)(q)
    tail = without_replacement(q)(top)
    want = p[top].sum() + (0 if tail is None else np.minimum(p, tail).sum())
    assert optimal_acceptance(p, sibling_sets(draw, n)) == want == kept(p, draw, n)
    law = seen(reject, p, draw, min(n, 2))
    if n <= 2: assert acceptance(law) == want and token_law(law) == as_dict(p)


@proves("thm-greedy-draft")
@given(pairs(st.integers(2, 5)))
def test_spechub_offers_the_greedy_sets(pq):
    p, q = pq
    assert sibling_sets(spechub(q), 2) == sibling_sets(greedy_draft(2)(q), 2)
    pairs, hub = sibling_sequences(spechub(q), 2), int(np.argmax(q))
    if q[hub] < 1:
        for x in range(len(q)):
            if x == hub or not q[x]: continue
            assert pairs[x, hub] == q[x] and pairs[hub, x] == q[hub] * q[x] / (1 - q[hub])
    assert token_law(seen(reject, p, spechub(q), 2)) == as_dict(p)


new_draws = st.sampled_from([greedy_draft(2), greedy_draft(3), spechub])


@few
@given(models(), st.sampled_from([(1,), (2,), (3,), (2, 2)]), new_draws)
def test_the_draws_keep_the_drafter_contract(pair, shape, draw):
    drafter_contract(Branching(pair[1], shape, draw), (0, 1))


# The tables of verification.md §7.1


# Floats, addresses, supports

@few
@given(small, ways, st.integers(1, 2), rules)
def test_floats(pq, how, n, rule):
    "The same law to rounding; and the same acceptance"
    p, q = (law.astype(float) for law in pq)
    how = "iid" if how in ("points", "mixed") else how   # these make points of fractions
    law, want = (seen(LOSSLESS[rule], p, WAYS[how](q), n) for p, q in ((p, q), pq))
    got = token_law(law)
    assert max(abs(got.get(x, 0) - float(w)) for x, w in enumerate(pq[0])) < 1e-12
    assert acceptance(law) == pytest.approx(float(acceptance(want)), abs=1e-9)


def test_a_plan_that_falls_short_keeps_the_law():
    "Stop the flow after one step, as a solver at its tolerance does: acceptance is lost, the law is not"
    p, q = CANON
    def early(p, sets):
        s = max(sets, key=sets.get)
        return {t: {x: F(x == s[0], 2) for x in t} for t in sets}
    law = seen(choose_then_verify(early), p, iid(q), 2)
    assert token_law(law) == as_dict(p) and acceptance(law) < optimal_acceptance_iid(p, q, 2)


def test_the_wrong_sets_break_the_law():
    "What must be right is the law of the sets: siblings without replacement, verified as if independent"
    p, q = CANON
    def run(rng):
        tree = star(without_replacement(q), 2, rng)
        lie = star(iid(q), 2, Seeded(0))
        lie.token[1:] = tree.token[1:]
        lie.law[1:] = [q, q]
        v = transport([p]*3, lie, rng)
        return v.tokens(lie)[0]
    assert tv_outcomes(law_of(run), as_dict(p)) > 0


@given(models(), seeds, ways, st.sampled_from(["transport", "importance", "kseq"]))
@few
def test_one_question_an_address(pair, seed, how, rule):
    "Every answer has an address of its own: a tape of them replays the round"
    table, drafter = {}, Branching(pair[1], (2, 2), iid if rule == "kseq" else WAYS[how])
    verify = {**LOSSLESS, "kseq": kseq}[rule]
    one = next(rounds(pair[0], drafter, verify, (0,), Recorder(Seeded(seed), table)))
    assert next(rounds(pair[0], drafter, verify, (0,), Tape(table))).verdict == one.verdict


def test_a_large_vocabulary_with_small_supports():
    "512 tokens, four of them likely: the sets are listed; with two full rows they are not, and it is said so"
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
    assert 512**2 > MAX_SEQUENCES
    refuses("top_k", transport, [p]*3, star(iid(flat), 2, Seeded(0)), Seeded(0))
    assert kseq([p]*3, star(iid(flat), 2, Seeded(0)), Seeded(0)).token < 512


# Doors


@pytest.mark.parametrize("verify", [transport, importance, kseq])
def test_rows_of_whole_numbers(verify):
    "A target that is sure, in integers: only its token, whatever was drawn"
    q = CANON[1].astype(float)
    for x in range(4):
        rows = [np.eye(4, dtype=int)[x]]*3
        for s in range(30):
            v = verify(rows, tree := star(iid(q), 2, Seeded(s)), Seeded(s))
            assert v.token == x and (not v.node or tree.token[v.node] == x)


def second_by_elder(q):
    "A second child of node 0 if the first one says 3"
    def draft(ctx, rng):
        tree = Tree(ctx)
        c, = tree.grow(0, iid(q), rng)
        if tree.token[c] == 3: tree.grow(0, iid(q), rng)
        return tree
    return draft


def second_by_nephew(q):
    "A second child of node 0 if the token below the first one is 3"
    def draft(ctx, rng):
        tree = Tree(ctx)
        c, = tree.grow(0, iid(q), rng)
        d, = tree.grow(c, iid(q), rng)
        if tree.token[d] == 3: tree.grow(0, iid(q), rng)
        return tree
    return draft


@proves("thm-plan")
@pytest.mark.parametrize("nosy", [second_by_elder, second_by_nephew])
def test_a_number_of_children_that_was_decided_by_looking_is_refused(nosy):
    "Rules that read only edges are exact; those that read what else might have been drawn refuse"
    p, q = CANON
    drafter, target, ctx = nosy(q), constant(*p), (0,)
    drafter_contract(drafter, ctx)
    for verify in (reject, traversal, all_donors):
        assert loop_law(target, drafter, verify, ctx, 2) == target_law(target, ctx, 2)
    for verify in (transport, importance, kseq):
        with pytest.raises(ValueError, match="^tree: "): loop_law(target, drafter, verify, ctx, 2)
