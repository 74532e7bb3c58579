"Chapter 11: siblings are exact for every draw, in an order that does not depend on their tokens"
from fractions import Fraction
from itertools import combinations, permutations
from math import prod

import numpy as np, pytest
from hypothesis import strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import CANON, DRAWS, draws, examples, killer, laws, models, pairs, proves, seeds
from verify_helpers import PEAK, SGL, as_dict, depends, star
from specref import (acceptance_prob, add_paths, Branching, Chain, exact, generate, iid, in_sequence,
                     law_of, loop_law, match, normalize, one_hot, overlap, random_table, reject, residual,
                     rounds, Seeded, target_law, Tree, tv, tv_outcomes, Verdict, without_replacement)
from specref.core.drafters import round_robin
from specref.core.loop import as_drafter
from specref.verify.siblings import acceptance_prob_iid

F = Fraction
few = st.integers(2, 4)

def verdict(p, tree, rng):
    "(accepted?, token) of `reject` on the children of node 0, where p is every row"
    v = reject([p]*len(tree), tree, rng)
    return v.node > 0, v.tokens(tree)[0]

def outcome(p, draft):
    "The distribution of the token and the acceptance probability, when `draft(rng)` is the tree"
    law = law_of(lambda rng: verdict(p, draft(rng), rng))
    return law.of(lambda won_x: won_x[1]), law.of(lambda won_x: won_x[0]).get(True, 0)

def acceptance(p, draw, k): return outcome(p, lambda rng: star(draw, k, rng))[1]

# Exactness

@proves("thm-siblings")
@examples(50, few.flatmap(laws), seeds, st.integers(0, 2))
def test_any_draw_given_the_earlier_siblings(p, seed, k):
    "The distribution of each child depends on the ones before and on a coin: the token has distribution p"
    law, _ = outcome(p, lambda rng: star(depends(2*seed + rng.pick(exact(1, 2)), len(p), .1), k, rng))
    assert law == as_dict(p)

@proves("thm-siblings")
@examples(25, models(st.integers(3, 4)), seeds, st.sampled_from([(2,), (3,), (1, 2), (2, 1)]), draws)
def test_two_models_in_turn(pair, seed, shape, how):
    target, draft = pair
    drafter = Branching((draft, random_table(draft.V, seed)), shape, round_robin(DRAWS[how]))
    verifier_contract(target, drafter, reject, (0,), 2)
    drafter_contract(drafter, (0, 1))

MEANS = {(2,): ("13/16", "7/8"), (2, 1): ("91/80", "49/40"), (1, 2): ("231/200", "75/56")}

@pytest.mark.parametrize("shape", MEANS)
def test_the_pair_that_detects_every_mutant(shape):
    "Exact loops, and the published mean accepted tokens of independent and of different siblings"
    target, draft = killer()
    def accepted(rng):
        round = next(rounds(target, drafter, reject, (0,), rng))
        return round.tree.depth[round.verdict.node]
    for draw, mean in zip((iid, without_replacement), MEANS[shape]):
        drafter = Branching(draft, shape, draw)
        assert law_of(accepted).mean() == F(mean)
        assert loop_law(target, drafter, reject, (0,), 2) == target_law(target, (0,), 2)

# Whole trees

def mixed_tree(draft, seed, n):
    """A drafter of up to `n` nodes, at least two of them in a row: each node's children come by a draw of its
    own, and where the next node is placed depends on all tokens drawn before"""
    def drafter(ctx, rng):
        tree = Tree(ctx)
        for i in range(n):
            r = np.random.default_rng([seed, *tree.token[1:]])
            u = i if i < 2 else int(r.integers(min(i, 3)))
            draw = DRAWS[sorted(DRAWS)[(seed + u) % len(DRAWS)]](draft.law(tree.text(u)))
            law = draw(tuple(tree.token[c] for c in tree.children(u)))
            if law is None: break
            tree.add(u, rng.pick(law), law)
        return tree
    return drafter

def node_by_node(rules, row_of=lambda tree, u: u):
    "The verifier that goes down the tree by one rule at even depths, another at odd ones, with these rows"
    def verify(p, tree, rng, u=0):
        row, kids, level = p[row_of(tree, u)], tree.children(u), Tree(tree.text(u))
        for c in kids: level.add(0, tree.token[c], tree.law[c])
        v = rules[tree.depth[u] % 2]([row]*len(level), level, rng)
        return verify(p, tree, rng, kids[v.node - 1]) if v.node else Verdict(u, v.token)
    return verify

@proves("thm-descent")
@examples(40, models(), seeds, st.integers(2, 4))
def test_what_is_exact_at_each_node_is_exact_on_the_tree(pair, seed, n):
    "Any order of drawing, any mixture of draws, other rules at other nodes; four tokens, in fractions"
    target, draft = pair
    drafter = mixed_tree(draft, seed, n)
    drafter_contract(drafter, (0,))
    for verify in (reject, node_by_node((reject, match)), node_by_node((match, reject))):
        verifier_contract(target, drafter, verify, (0,), 4)

@proves("thm-descent")
@pytest.mark.parametrize("seed", range(4))
def test_the_row_of_the_parent_at_a_child_is_wrong(seed):
    "The first token is right and the next ones are not; with each node's own row all are"
    target, draft = killer()
    drafter = as_drafter(mixed_tree(draft, seed, 3))
    def off(verify, n):
        return tv_outcomes(loop_law(target, drafter, verify, (0,), n), target_law(target, (0,), n))
    stale = node_by_node((reject, reject), lambda tree, u: max(tree.parent[u], 0))
    assert off(stale, 1) == off(node_by_node((reject, reject)), 3) == 0 < off(stale, 3)

# Acceptance

PUBLISHED = [   # verification.md §3, §4, §7, §7.1
    (CANON, "iid", {1: "3/5", 2: "18/25", 3: "96/125", 4: "989/1250", 5: "10151/12500"}),
    (CANON, "without replacement", {1: "3/5", 2: "107/140", 3: "14117/16800", 4: 1}),
    (CANON, "points", {2: "3/10", 3: "3/5"}), (SGL, "points", {1: "3/5", 2: "4/5", 3: "9/10"}),
    (SGL, "iid", {1: "9/10", 2: "91/100", 3: "919/1000"}), (SGL, "without replacement", {2: "14/15", 3: 1}),
    (PEAK, "iid", {2: "23/50", 3: "257/500"}), (PEAK, "without replacement", {2: "43/80", 3: "1249/1680"}),
]

@pytest.mark.parametrize("pair, how, rates", PUBLISHED)
def test_published_acceptance(pair, how, rates):
    p, q = pair
    for k, rate in rates.items(): assert acceptance_prob(p, DRAWS[how](q), k) == F(rate)

@proves("prop-kept")
@examples(60, pairs(few), st.sampled_from([*DRAWS, None]), seeds, st.integers(0, 3))
def test_acceptance_prob_is_the_enumerated_one(pq, how, seed, k):
    "The sum over rejected tokens is the enumerated probability, and does not fall with k"
    p, q = pq
    draw = DRAWS[how](q) if how else depends(seed, len(p), .1)
    assert acceptance_prob(p, draw, k) == acceptance(p, draw, k) <= acceptance_prob(p, draw, k + 1) <= 1

@proves("cor-independent", "thm-order")
@examples(40, few.flatmap(lambda V: st.tuples(laws(V), st.lists(laws(V), max_size=3))))
def test_independent_children_of_several_distributions(case):
    "1 - Π(1 - β_j) with the current residual, and the output has distribution p, in every order"
    p, qs = case
    for order in permutations(qs):
        rejected, r = F(1), p
        for q in order: rejected, r = rejected * (1 - overlap(r, q)), residual(r, q)
        draw = in_sequence(*map(iid, order))
        law, accepted = outcome(p, lambda rng: star(draw, len(qs), rng))
        assert acceptance_prob_iid(p, order) == acceptance_prob(p, draw, len(qs)) == accepted == 1 - rejected
        assert law == as_dict(p)

@proves("thm-different")
@examples(60, pairs(), st.integers(1, 4))
def test_different_siblings_are_accepted_at_least_as_often(pq, k):
    "Also the step of the proof: after k rejections the residual is (p - tq)+, at a level t, on every path"
    p, q = pq
    assert acceptance_prob(p, without_replacement(q), k) >= acceptance_prob_iid(p, [q]*k)
    def above(t): return np.maximum(p - t*q, 0)
    def rejecting(r, t, earlier, draw):
        rest, law = above(t), draw(earlier)
        assert (rest == rest.sum() * r).all()
        if len(earlier) == k or law is None or law @ (q == 0): return rest.sum()
        rejected, up = np.maximum(law - r, 0), t + rest.sum() * law.sum() / q[law > 0].sum()
        if not rejected.any(): return 0
        return sum(w / rejected.sum() * rejecting(residual(r, law), up, (*earlier, x), draw)
                   for x, w in enumerate(rejected) if w)
    assert rejecting(p, 0, (), iid(q)) == 1 - acceptance_prob_iid(p, [q]*k)
    different = without_replacement(q)
    if k <= (q > 0).sum(): assert rejecting(p, 0, (), different) == 1 - acceptance_prob(p, different, k)

# Cover and transport

@proves("prop-cover")
@examples(50, pairs())
def test_transport_and_cover(pq):
    "One child: 1 - TV. All of the support of q, when it contains that of p: acceptance 1"
    p, q = pq
    sets = [list(H) for k in range(len(p) + 1) for H in combinations(range(len(p)), k)]
    assert acceptance_prob(p, iid(q), 1) == 1 - tv(p, q) == min(1 - q[H].sum() + p[H].sum() for H in sets)
    for draw in (without_replacement(q), DRAWS["points"](q)): assert acceptance_prob(p, draw, len(p)) == 1
    if not p[q == 0].any(): assert acceptance_prob(p, without_replacement(q), int((q > 0).sum())) == 1

@proves("prop-cover")
@examples(40, few.flatmap(laws), seeds, st.integers(1, 3))
def test_children_that_contain_the_support_of_p(p, seed, k):
    "If their tokens contain the support of p one is accepted, and a rejected token is never the output"
    def run(rng):
        tree = star(depends(seed, len(p), .1), k, rng)
        won, y = verdict(p, tree, rng)
        assert won or y not in tree.token[1:] and not set(np.flatnonzero(p)) <= set(tree.token[1:])
        return won
    assert sum(law_of(run).values()) == 1

# Mixtures

def two_children(ws, qs, first, second=None):
    "Children from qs[i] with probability ws[i]; their edges state `first(i, x)` and `second(i, x)`"
    def draft(rng):
        i, tree = rng.pick(ws), Tree((0,))
        x = rng.pick(qs[i])
        tree.add(0, x, first(i, x))
        if second: tree.add(0, rng.pick(qs[i]), second(i, x))
        return tree
    return draft

def mixture(ws, qs): return sum(w*q for w, q in zip(ws, qs))

mixtures = few.flatmap(lambda V: st.tuples(laws(V), laws(3), st.lists(laws(V), min_size=3, max_size=3)))

@proves("prop-mixture", "thm-match")
@examples(25, mixtures, st.booleans())
def test_an_edge_may_state_a_mixture_or_its_component(case, known):
    "Stated token, component, mixture: exact, more accepted each time; a second child's edge, given the first"
    p, ws, qs = case
    mean = mixture(ws, qs)
    stated = (lambda i, x: one_hot(x, len(p), exact=True)), (lambda i, x: qs[i]), (lambda i, x: mean)
    found = [outcome(p, two_children(ws, qs, state)) for state in stated]
    assert all(law == as_dict(p) for law, _ in found)
    rates = [(p*mean).sum(), sum(w*overlap(p, q) for w, q in zip(ws, qs)), overlap(p, mean)]
    assert [rate for _, rate in found] == rates == sorted(rates)
    def given_first(i, x):
        posterior = normalize(np.array([w*q[x] for w, q in zip(ws, qs)], dtype=object))
        return qs[i] if known else mixture(posterior, qs)
    assert outcome(p, two_children(ws, qs, stated[2], given_first))[0] == as_dict(p)

def test_a_second_mixture_after_a_stated_component_is_wrong():
    "The first edge states the component, which determines the coin; the second states the mixture"
    p, q = CANON
    qs = one_hot(1, 4, exact=True), q
    draft = two_children(exact(1, 1), qs, lambda i, x: qs[i], lambda i, x: mixture(exact(1, 1), qs))
    assert tv_outcomes(outcome(p, draft)[0], as_dict(p)) > 0

# Points

ngrams = st.lists(st.lists(st.integers(0, 2), max_size=3).map(tuple), max_size=4)

def as_trie(guesses): return as_drafter(lambda ctx, rng: add_paths(Tree(ctx), guesses, 3, rng, exact=True))

def as_chains(guesses):
    "Each draft as a separate chain from the root"
    def draft(ctx, rng):
        tree = Tree(ctx)
        for guess in guesses:
            at = 0
            for x in guess: at = tree.add(at, x, one_hot(x, 3, exact=True))
        return tree
    return as_drafter(draft)

@proves("prop-points")
@examples(25, models(), ngrams)
def test_reject_is_match_on_points(pair, guesses):
    "The verdict has the same distribution, with equal siblings too; a trie accepts at least as many"
    def law(build, verify):
        return law_of(lambda rng: next(rounds(pair[0], build(guesses), verify, (0,), rng)))
    found = {build: law(build, reject).of(lambda round: round.verdict) for build in (as_trie, as_chains)}
    for build in found: assert found[build] == law(build, match).of(lambda round: round.verdict)
    lengths = [law(build, reject).of(lambda round: len(round.tokens)).mean() for build in found]
    assert lengths[0] >= lengths[1]

@proves("prop-points")
@examples(50, laws(4), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_one_uniform_for_all_children(p, children):
    "The first with u < Σ p over different tokens is accepted as often as by `reject`"
    new = [x for j, x in enumerate(children) if x not in children[:j]]
    ends = np.cumsum([0, *p[new]])
    cuts, measure = sorted({F(0), *ends, F(1)}), {}
    for lo, hi in zip(cuts, cuts[1:]):
        j = next((j for j, S in enumerate(ends[1:]) if (lo + hi)/2 < S), None)
        measure[j] = measure.get(j, 0) + hi - lo
    tree = Tree((0,))
    for x in children: tree.add(0, x, one_hot(x, 4, exact=True))
    got = law_of(lambda rng: reject([p]*len(tree), tree, rng))
    for j, x in enumerate(new):
        share = sum(w for v, w in got.items() if v.node == 1 + children.index(x))
        assert measure.get(j, 0) == p[x] == share
    recovered = {v.token: w for v, w in got.items() if not v.node}
    assert recovered == {y: p[y] for y in range(4) if y not in new and p[y]}

def lookahead(target, ctx, guesses, rng):
    "The sampling verification of hao-ai-lab/LookaheadDecoding: offer the remaining n-grams in order"
    out, live = (), list(guesses)
    while True:
        r, token = target.law(ctx + out), None
        for x in [guess[len(out)] for guess in live if len(guess) > len(out)]:
            if rng.coin(r[x]): token = x
            if token is not None: break
            r = normalize(np.where(np.arange(len(r)) == x, 0*r, r))
        if token is None: return len(out), (*out, rng.pick(r))
        out, live = (*out, token), [g for g in live if g[len(out):len(out) + 1] == (token,)]

@proves("prop-points")
@examples(25, models(), ngrams)
def test_lookahead_verification_is_reject_on_the_trie(pair, guesses):
    "The same distribution of accepted number and tokens as `reject` on the trie"
    def run(rng):
        round = next(rounds(pair[0], as_trie(guesses), reject, (0,), rng))
        return round.tree.depth[round.verdict.node], round.tokens
    assert law_of(lambda rng: lookahead(pair[0], (0,), guesses, rng)) == law_of(run)

# Order

def reordered(draw, k, order):
    "k children by `draw`, each with its distribution, offered in the order of `order(tokens, rng)`"
    def draft(rng):
        tree, old = Tree((0,)), star(draw, k, rng)
        for j in order(old.token[1:], rng): tree.add(0, old.token[j + 1], old.law[j + 1])
        return tree
    return draft

def shuffled(tokens, rng):
    rest = list(range(len(tokens)))
    return [rest.pop(rng.pick(exact(*[1]*len(rest)))) for _ in range(len(rest))]

def by(law): return lambda tokens, rng: sorted(range(len(tokens)), key=lambda j: -law[tokens[j]])
def backwards(tokens, rng): return reversed(range(len(tokens)))

@proves("thm-order")
@examples(25, pairs(st.integers(2, 3)), st.integers(1, 3), st.data())
def test_an_order_independent_of_the_tokens(pq, k, data):
    "Independent children, reordered in a fixed way or at random: still p"
    p, q = pq
    fixed = data.draw(st.permutations(range(k)))
    for order in (lambda tokens, rng: fixed, shuffled):
        assert outcome(p, reordered(iid(q), k, order))[0] == as_dict(p)

@proves("thm-order")
def test_orders_that_change_the_distribution():
    "The examples of the proof, and sorting by q or by p on the four tokens"
    p, q = CANON
    for law in CANON: assert tv_outcomes(outcome(p, reordered(iid(q), 2, by(law)))[0], as_dict(p)) == F(3, 50)
    p = exact(2, 1)
    assert outcome(p, reordered(iid(p), 2, by(p)))[0] == {0: F(8, 9), 1: F(1, 9)}
    law, _ = outcome(exact(1, 1, 1), reordered(without_replacement(exact(1, 1, 0)), 2, backwards))
    assert law == {0: F(1, 2), 1: F(1, 2)}

# Branching

@examples(25, models(), st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.integers(0, 99))
def test_the_shape_of_branching(pair, shape, seed):
    "shape[d] different children below every node of depth d; with two models in turn"
    tree = Branching(pair[1], shape)((0,), Seeded(seed))
    assert len(tree) == 1 + sum(prod(shape[:d + 1]) for d in range(len(shape)))
    for i in range(len(tree)):
        kids = [tree.token[c] for c in tree.children(i)]
        assert len(kids) == len(set(kids)) == (*shape, 0)[tree.depth[i]]
    turns = Branching(pair, shape, round_robin(iid))
    tree = turns((0,), Seeded(seed))
    for i in range(len(tree)):
        for j, c in enumerate(tree.children(i)): assert (tree.law[c] == pair[j % 2].law(tree.text(i))).all()
    assert turns.models == pair and turns.depth == len(shape)
    assert Branching(pair[1], (1, 1))((0,), Seeded(seed)) == Chain(pair[1], 2)((0,), Seeded(seed))

def test_every_model_is_called_once_a_level():
    target, *drafts = (random_table(3, s) for s in (1, 2, 3))
    drafter = Branching(tuple(drafts), (2, 1), round_robin(iid))
    ledger = generate(target, drafter, reject, (0,), 12, Seeded(0)).ledger
    n = len(ledger.rounds)
    assert {name: m.calls for name, m in ledger.models.items()} == {"target": n, "draft": 2*n, "draft1": 2*n}
