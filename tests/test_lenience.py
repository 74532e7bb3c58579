"Chapter 15a: every lossy rule has its stated distribution, and none has a bias below the bound"
from dataclasses import replace
from fractions import Fraction as F
from math import exp, inf, log

import numpy as np, pytest
from hypothesis import assume, example, strategies as st

from contracts import drafter_contract, target_contract
from helpers import (CANON, DRAWS, cold, constant, draws, examples, faithful, laws, models, pairs, proves,
                     seeds, sizes)
from published import drafted, having, verified
from verify_helpers import as_dict
from specref import (AcceptanceRule, autoregressive, Branching, capped_geometric, Chain, exact, generate,
                     greedy, law_of, lenient, loop_law, normalize, overlap, points, random_table, reject,
                     residual, rounds, Seeded, TableModel, target_law, top_beta, Tree, tv, tv_outcomes,
                     typical, Verdict)
from specref.core.rng import verdict_tape
from specref.core.target import UnwarpedModel
from specref.core.tree import likeliest_points
from specref.verify.lossy import (BildDraft, CombinedModel, GreedyModel, bild_rollback, cascade, ensemble,
                                  entropy, lenient_greedy, position_distances, raw_law, reject_toward,
                                  standard_rule, text_law, token_ranks, warped_law)

zero_to_one = st.fractions(0, 1, max_denominator=12)
ls = st.fractions(F(1, 20), 1, max_denominator=20)

def first(rule, p, q):
    "The distribution of (accepted?, token) of a round with one draft token of q"
    def run(rng):
        round = next(rounds(constant(*p), Chain(constant(*q), 1), rule, (0,), rng))
        return round.verdict.node > 0, round.tokens[0]
    return law_of(run)

def token_law(rule, p, q): return first(rule, p, q).of(lambda kx: kx[1])

def acceptance(rule, p, q): return first(rule, p, q).of(lambda kx: kx[0]).get(True, 0)

def other(l): return lenient(l, left=lambda p, q: residual(p, l * q))

@st.composite
def arbitrary(draw, sizes=st.integers(2, 4)):
    "p, q and an arbitrary rule: any share of each token of q, any distribution after a rejection"
    p, q = draw(pairs(sizes))
    share = np.array(draw(st.lists(zero_to_one, min_size=len(p), max_size=len(p))), dtype=object)
    r = draw(laws(len(p)))
    return p, q, AcceptanceRule(lambda p, q: q * share, lambda p, q: r)

RULES = {
    "standard": standard_rule, "lenient": lenient(F(1, 3)), "other residual": other(F(1, 3)),
    "ensemble": reject_toward(ensemble(F(1, 3))), "cascade": reject_toward(cascade(F(1, 2))),
    "greedy lenience": lenient_greedy(F(1, 2)), "top-2": top_beta(2, 1.), "typical": typical(),
    "typical, greedy": typical(.3, .5, greedy), "rollback": bild_rollback(1.),
    "redraw from p": AcceptanceRule(np.minimum, lambda p, q: p),
}
named = st.sampled_from(sorted(RULES)).map(RULES.get)
GATES = {"greedy lenience": lenient_greedy(F(1, 2)), "l = 1": lenient_greedy(1), "top": top_beta(1, inf),
         "top-2": top_beta(2, .7), "tied": top_beta(3, 0), "rollback": bild_rollback(.9),
         "no rollback": bild_rollback(inf), "always": bild_rollback(0),
         "typical": typical(.09, .3, greedy), "looser": typical(.5, .9, greedy)}
GREEDY_ENDS = {"lenient_greedy(1)": lenient_greedy(1), "top_beta(1, inf)": top_beta(1, inf),
               "rollback(0)": bild_rollback(0), "typical, warped row": typical(choice=greedy, row=warped_law)}
contexts, thresholds = st.sampled_from([(0,), (1, 2)]), st.sampled_from([0, .5, 2, inf])
gates = st.sampled_from(sorted(GATES)).map(GATES.get)
at_both = st.sampled_from([lambda model: model, GreedyModel])

# One step

with_named = st.tuples(pairs(), named).map(lambda case: (*case[0], case[1]))

@proves("thm-one-step")
@examples(50, arbitrary() | with_named)
def test_any_rule_has_its_stated_distribution(pqr):
    "k + (1 - a) r, by enumeration of a round: arbitrary k and r, and the published rules"
    p, q, rule = pqr
    assert token_law(rule, p, q) == as_dict(rule.law(p, q))
    assert acceptance(rule, p, q) == rule.acceptance(p, q)

@proves("thm-price")
@examples(25, arbitrary(sizes))
def test_no_rule_is_below_the_bound(pqr):
    p, q, rule = pqr
    assert rule.bias(p, q) >= rule.acceptance(p, q) - overlap(p, q)

@proves("thm-price")
@examples(25, pairs(st.integers(2, 4)), st.data())
def test_no_kernel_is_below_the_bound(pq, data):
    "Any kernel from the draft token to the output, not only a coin and a residual"
    p, q = pq
    kernel = np.array([data.draw(laws(len(p))) for _ in p])
    law, accepted = q @ kernel, sum(q[x] * kernel[x][x] for x in range(len(p)))
    assert tv(law, p) >= accepted - overlap(p, q)

@proves("thm-fair")
@examples(25, pairs(), st.data())
def test_rules_that_attain_the_bound(pq, data):
    "Any share between min(p, q) and q, and the standard residual distribution: bias a - β"
    p, q = pq
    more = np.array(data.draw(st.lists(zero_to_one, min_size=len(p), max_size=len(p))), dtype=object)
    rule = AcceptanceRule(lambda p, q: np.minimum(p, q) + more * (q - np.minimum(p, q)), residual)
    law, k = rule.law(p, q), rule.accepted(p, q)
    assert rule.bias(p, q) == k.sum() - overlap(p, q)
    assert (np.minimum(law, q) == k).all()
    assert (np.maximum(law - q, 0) == (1 - k.sum()) * residual(p, q)).all()
    own = reject_toward(lambda p, q: law)
    assert (own.law(p, q) == law).all() and own.acceptance(p, q) == k.sum()
    assert ((np.minimum(p, q) <= law) & (law <= np.maximum(p, q))).all()

# Lenience

@proves("cor-lenience")
@examples(25, pairs(), ls)
def test_lenience(pq, l):
    "α_l, the bias, and the bound p / l; the other residual has the same bound and no smaller bias"
    p, q = pq
    rule, wide = lenient(l), other(l)
    alpha = sum(min(a / l, b) for a, b in zip(p, q))
    assert rule.acceptance(p, q) == wide.acceptance(p, q) == alpha
    assert rule.bias(p, q) == alpha - overlap(p, q) <= wide.bias(p, q)
    assert (rule.law(p, q) <= p / l).all() and (wide.law(p, q) <= p / l).all()

@proves("cor-lenience")
@examples(25, arbitrary(sizes))
def test_no_rule_with_this_bound_accepts_more(pqr):
    "If 1/l bounds the ratio of a rule's distribution to p, lenience with l accepts at least as much"
    p, q, rule = pqr
    law = rule.law(p, q)
    assume(all(a or not b for a, b in zip(p, law)))
    l = 1 / max(b / a for a, b in zip(p, law) if a)
    assert rule.acceptance(p, q) <= lenient(l).acceptance(p, q)

@examples(25, pairs(), st.integers(1, 4), seeds)
def test_strict_is_reject(pq, gamma, seed):
    "The same verdict from the same noise, in fractions and in floats, at l = 1 too"
    for p, q in (pq, [w.astype(float) for w in pq]):
        tree = Chain(TableModel(len(q), lambda text: q), gamma)((0,), Seeded(seed))
        rules = reject, standard_rule, lenient(1), reject_toward(lambda p, q: p), reject_toward(ensemble(1))
        assert len({rule([p] * len(tree), tree, Seeded(seed + 1)) for rule in rules}) == 1

def test_lenience_on_a_tape():
    "Token 3 of the four at l = 1/2 is accepted below 1/2, not at it; the recovered token is the tape's"
    p, q = CANON
    tree = Tree((0,))
    tree.add(0, 3, q)
    def verdict(u): return lenient(F(1, 2))([p, p], tree, verdict_tape([0, u], [.8, .5]))
    assert verdict(.4999) == Verdict(1, 1) and verdict(.5) == Verdict(0, 1)

# Texts

@proves("thm-text")
@examples(25, models(), at_both, named, st.integers(1, 3), st.integers(0, 4),
          st.sampled_from([(0,), (1, 2, 0)]))
def test_the_distribution_of_a_text(pair, at, rule, gamma, n, ctx):
    "Rounds and their bonus tokens at temperatures 0 and 1, by the loop and predicted by the phases"
    target, draft = at(pair[0]), pair[1]
    assert loop_law(target, Chain(draft, gamma), rule, ctx, n) == text_law(rule, target, draft, gamma, ctx, n)

@proves("cor-diluted")
@examples(20, pairs(st.integers(2, 3)), ls, st.integers(1, 3))
def test_the_share_of_bonus_tokens(pq, l, gamma):
    "In a round: a bonus token with probability a^γ, 1 + a + ... + a^γ tokens on average"
    p, q = pq
    a, rule, drafter = lenient(l).acceptance(p, q), lenient(l), Chain(constant(*q), gamma)
    def round(rng): return next(rounds(constant(*p), drafter, rule, (0,), rng)).verdict.node
    node = law_of(round)
    assert node.get(gamma, 0) == a**gamma and 1 + node.mean() == capped_geometric(a, gamma)

# Gates

def support(rule, p):
    "The tokens that a gate accepts"
    uniform = exact(*[1] * len(p))
    return {int(x) for x in np.flatnonzero(rule.accepted(p, uniform) > 0)}

@proves("prop-gate")
@examples(25, gates, pairs())
def test_gates(rule, pq):
    "What is emitted is in G, the acceptance is q(G), the bias against greedy decoding q(G) - q(argmax)"
    p, q = pq
    uniform = exact(*[1] * len(p))
    good, top, law = rule.accepted(p, uniform) > 0, np.argmax(p), rule.law(p, q)
    assert good[top] and (law[~good] == 0).all() and rule.acceptance(p, q) == q[good].sum()
    assert tv(law, greedy(p)) == q[good].sum() - q[top] == rule.acceptance(p, q) - overlap(greedy(p), q)

@examples(25, models(), st.integers(1, 3), st.sampled_from(sorted(GREEDY_ENDS)))
def test_strict_greedy(pair, gamma, how):
    "At their strict ends the greedy rules emit the greedy text with certainty, whatever the draft"
    target, draft = GreedyModel(pair[0]), pair[1]
    rule, want = GREEDY_ENDS[how], target_law(target, (0,), 4)
    for drafter in (Chain(draft, gamma), Chain(GreedyModel(draft), gamma)):
        assert loop_law(target, drafter, rule, (0,), 4) == want
    for q in (draft.law((0,)), target(Tree((0,)))[0]):   # and accept as greedy decoding does
        p = target(Tree((0,)))
        assert rule.step(p, 0, q)[0].sum() == overlap(p[0], q)

@examples(25, laws(5), st.fractions(F(1, 20), F(19, 20), max_denominator=20))
def test_greedy_lenience(p, l):
    "p(x) >= l max p below l = 1; at l = 1 the first of the likeliest; a smaller l accepts a larger set"
    def good(l): return support(lenient_greedy(l), p)
    assert good(l) == {x for x in range(5) if p[x] >= l * max(p)}
    assert good(1) == {int(np.argmax(p))} and good(1) <= good(l) <= good(l / 2)

@examples(25, laws(5), st.integers(1, 5), st.floats(0, 4))
@example(exact(3, 3, 2, 1, 0), 2, 0.)
def test_top_beta(p, beta, tau):
    "Both conditions, by sorting and by logarithms; β = V and τ = ∞ accept everything; monotone in both"
    def good(*a): return support(top_beta(*a), p)
    order = sorted(range(5), key=lambda x: (-p[x], x))
    gap = lambda x: log(float(max(p))) - log(float(p[x])) if p[x] else inf
    assume(all(abs(gap(x) - tau) > 1e-9 or gap(x) == 0 for x in range(5)))
    assert good(beta, tau) == {x for x in order[:beta] if gap(x) <= tau}
    assert [order[i] for i in token_ranks(p)[order]] == order
    assert good(5, inf) == set(range(5))
    assert good(beta, tau) <= good(min(beta + 1, 5), tau) and good(beta, tau) <= good(beta, tau + .5)
    if len({*p}) == 5: assert good(beta, 0) == {order[0]}

# Typical

@examples(25, pairs(), st.floats(.01, 1), st.floats(.01, .99))
def test_typical(pq, epsilon, delta):
    "q on the typical set, else the chosen token; the argmax is typical; uniform rows accept everything"
    (p, q), V = pq, len(pq[0])
    good = p > min(epsilon, delta * exp(-entropy(p)))
    for choice in (greedy, lambda p: p):
        rule = typical(epsilon, delta, choice)
        assert (rule.law(p, q) == q * good + (1 - q[good].sum()) * choice(p)).all() and good[np.argmax(p)]
    uniform = exact(*[1] * V)
    assert typical(epsilon, delta).acceptance(uniform, q) == 1 and abs(entropy(uniform) - log(V)) < 1e-12

# BiLD

@examples(25, models(), st.integers(1, 4), st.fractions(0, 1, max_denominator=6), seeds)
def test_confident_drafts(pair, gamma, fallback, seed):
    "The argmax while its weight suffices; correct edges; a higher threshold never drafts more"
    draft = pair[1]
    drafter_contract(BildDraft(draft, gamma, fallback), (0, 1))
    tree = BildDraft(draft, gamma, fallback)((0,), Seeded(seed))
    assert tree.parent == list(range(-1, len(tree) - 1)) and len(tree) <= gamma + 1
    for i in range(1, len(tree)):
        law = draft.law(tree.text(i - 1))
        assert tree.token[i] == np.argmax(law) and max(law) >= fallback
    if len(tree) <= gamma: assert max(draft.law(tree.text(len(tree) - 1))) < fallback
    assert len(BildDraft(draft, gamma, fallback + F(1, 6))((0,), Seeded(seed))) <= len(tree)

@examples(20, models(), st.integers(1, 4), st.fractions(0, 2, max_denominator=6), thresholds, contexts)
def test_the_ends_of_bild(pair, gamma, fallback, rb, ctx):
    "FB > 1: the large model alone; RB = 0: its greedy text; FB = 0 and RB = ∞: every draft token is accepted"
    target, draft = map(GreedyModel, pair)
    alone = lambda model: autoregressive(model, ctx, 6, Seeded(0))
    run = lambda fb, rb: generate(target, BildDraft(draft, gamma, fb), bild_rollback(rb), ctx, 6, Seeded(0))
    never = run(F(11, 10), rb)
    assert never == alone(target) == run(fallback, 0) and never.ledger.models["target"].calls == 6
    free = run(0, inf)
    *whole, last = free.ledger.column("accepted")   # the last round is cut at six tokens
    assert free[:gamma] == alone(draft)[:gamma] and {*whole} <= {gamma}
    assert last == min(gamma, 6 - len(whole) * (gamma + 1))
    assert {step.status for step in free.steps[gamma::gamma + 1]} <= {"B"}

@examples(20, models(), st.integers(1, 4), st.fractions(0, 1, max_denominator=6), contexts)
def test_the_fallback_is_by_the_unwarped_row(pair, gamma, fallback, ctx):
    "A draft model at temperature 0 and one at temperature 1 have the same drafts"
    trees = [BildDraft(at(pair[1]), gamma, fallback)(ctx, Seeded(0)) for at in (GreedyModel, lambda m: m)]
    assert trees[0] == trees[1]

@examples(25, laws(4), st.floats(0, 5))
def test_rollback_in_nats(p, rb):
    "Accepted: tokens of at most α_RB nats, and the argmax"
    cost = lambda x: -log(float(p[x])) if p[x] else inf
    assume(all(abs(cost(x) - rb) > 1e-9 for x in range(4)))
    assert support(bild_rollback(rb), p) == {x for x in range(4) if cost(x) <= rb} | {int(np.argmax(p))}

# Trees

def star(p, tokens):
    "A tree of depth one of these tokens"
    tree = Tree((0,))
    tree.grow(0, points(tokens, len(p), exact=True), Seeded(0), len(tokens))
    return tree

def random_tree(rng, nodes, V):
    "Nodes one by one below a random one, each with a token that its siblings do not have"
    tree = Tree((0,))
    for _ in range(nodes):
        draw = points(rng.permutation(V).tolist(), V, exact=True)
        tree.grow(int(rng.integers(len(tree))), draw, Seeded(0), 1)
    return tree

def passes(rule, p, tree, i):
    "Does every token on the path to node i pass?"
    return all(tree.token[a] in support(rule, raw_law(p, tree.parent[a])) for a in tree.ancestors(i))

@proves("prop-longest")
@examples(25, gates, models(4), at_both, seeds, st.integers(0, 9))
def test_the_longest_path(rule, pair, at, seed, nodes):
    "Against all paths of a random tree; at every node a larger tree adds, no accepted token is lost"
    target, rng = at(pair[0]), np.random.default_rng(seed)
    tree = random_tree(rng, nodes, 4)
    p = target(tree)
    def score(i):
        chances = [raw_law(p, tree.parent[a])[tree.token[a]] for a in tree.ancestors(i)]
        return len(chances), np.prod(np.array(chances, dtype=object))
    best = max(score(i) for i in range(len(tree)) if passes(rule, p, tree, i))
    assert score(rule(p, tree, Seeded(0)).node) == best
    depth, grown = [], Tree((0,))
    for u, x, q in zip(tree.parent[1:], tree.token[1:], tree.law[1:]):
        grown.add(u, x, q)
        depth.append(grown.depth[rule(target(grown), grown, Seeded(0)).node])
    assert depth == sorted(depth) and depth[-1:] == [best[0]] * (len(tree) > 1)

@proves("prop-longest")
@examples(25, gates, pairs(), seeds)
def test_a_tree_of_depth_one(rule, pq, seed):
    "The most probable draft token that passes; the argmax where it is the only one and was drafted"
    p, rng = pq[0], np.random.default_rng(seed)
    tree = star(p, rng.permutation(len(p))[:rng.integers(1, len(p) + 1)].tolist())
    good = [p[x] for x in tree.token[1:] if x in support(rule, p)]
    verdict = rule([p] * len(tree), tree, Seeded(0))
    assert p[verdict.tokens(tree)[0]] == max(good) if good else not verdict.node
    if np.argmax(p) in tree.token and sum(p == max(p)) == 1: assert verdict.tokens(tree)[0] == np.argmax(p)

@proves("prop-longest")
@examples(25, gates, models(), at_both, st.integers(1, 3), draws)
def test_a_chain_is_a_tree(rule, pair, at, gamma, how):
    "The law of a round on chains: the longest path, and one step after another"
    target, drafter = at(pair[0]), Branching(pair[1], (1,) * gamma, DRAWS[how])
    def step_by_step(p, tree, rng):
        nodes = range(len(tree))
        last = max(i for i in nodes if passes(rule, p, tree, i))
        return Verdict(last, rng.pick(rule.step(p, last, 0 * p[last])[1]))
    assert loop_law(target, drafter, rule, (0,), 3) == loop_law(target, drafter, step_by_step, (0,), 3)

LIKELIEST = [(2, 1), (1, 2), (3, 2)]

@examples(25, models(), at_both, st.sampled_from(LIKELIEST), st.sampled_from([typical(), typical(.3, .6)]))
def test_the_distribution_on_trees(pair, at, shape, rule):
    "Trees of the draft's likeliest tokens, deterministic: accepted tokens, then one by the target's row"
    target, drafter = at(pair[0]), Branching(UnwarpedModel(GreedyModel(pair[1])), shape, likeliest_points)
    want, now = {}, {(): 1}
    while now:
        out, w = now.popitem()
        tree = drafter((0, *out), Seeded(0))
        p = target(tree)
        paths = [tree.path(i) for i in range(len(tree)) if passes(rule, p, tree, i)]
        def chance(path): return np.prod([raw_law(target(Tree((0, *out, *path[:k]))), 0)[x]
                                          for k, x in enumerate(path)] or [1])
        path = max(paths, key=lambda path: (len(path), chance(path)))
        row = target(Tree((0, *out, *path)))[0]
        for x in np.flatnonzero(row > 0):
            text = (*out, *path, int(x))[:3]
            into = want if len(text) == 3 else now
            into[text] = into.get(text, 0) + w * row[x]
    assert loop_law(target, drafter, rule, (0,), 3) == want

def test_what_a_chain_lacks():
    "The first child passes and ends there, the second leads further; a chain of the likeliest stops at one"
    sure = {(0, 0): exact(0, 0, 1), (0, 1): exact(0, 1, 0)}
    target = TableModel(3, lambda text: sure.get(text[:2], exact(5, 4, 1)))
    tree = Tree((0,))
    for u, x in ((0, 0), (0, 1), (1, 1), (2, 1)): tree.add(u, x, points([x], 3, exact=True)(()))
    p, chain = target(tree), Tree((0,))
    for u, x in ((0, 0), (1, 1)): chain.add(u, x, points([x], 3, exact=True)(()))
    assert typical()(p, tree, Seeded(0)) == Verdict(4, 1)
    assert typical()(target(chain), chain, Seeded(0)) == Verdict(1, 2)
    with pytest.raises(ValueError, match="wanted a chain"): standard_rule(p, tree, Seeded(0))

# Distances

def test_exact_distances_by_hand():
    """The four tokens, drafts sampled from q, greedy lenience 1/2: each step errs with q(1) + q(2) = 1/2; the
    third of three tokens is a bonus token, and right, after two accepted ones, (6/10)^2"""
    p, q = CANON
    target, rule = GreedyModel(constant(*p)), lenient_greedy(F(1, 2))
    want = target_law(target, (0,), 3)
    got = loop_law(target, Chain(constant(*q), 2), rule, (0,), 3)
    assert position_distances(got, want, 3) == [F(1, 2), F(1, 2), F(16, 25) / 2]
    assert tv_outcomes(got, want) == 1 - F(13, 100)
    sampled = constant(*p), constant(*q)   # temperature 1, against p: one token is α_l - β off
    hot = loop_law(sampled[0], Chain(sampled[1], 2), lenient(F(1, 2)), (0,), 1)
    assert position_distances(hot, target_law(sampled[0], (0,), 1), 1) == [F(1, 5)]

@examples(20, models(), named, st.integers(1, 3), contexts)
def test_distances_from_a_text(pair, rule, n, ctx):
    "Against the greedy text: the probability that a token differs; their mean, the expected share"
    target = GreedyModel(pair[0])
    got, want = loop_law(target, Chain(pair[1], 2), rule, ctx, n), target_law(target, ctx, n)
    (right,), each = want, position_distances(got, want, n)
    assert each == [sum(w for y, w in got.items() if y[t] != right[t]) for t in range(n)]
    share = sum(w * F(sum(a != b for a, b in zip(y, right)), n) for y, w in got.items())
    assert sum(each) / n == share and max(each) <= tv_outcomes(got, want) <= sum(each)

def test_lenience_is_strict_at_temperature_zero():
    "It divides 0 by l: the greedy text with certainty; the ensemble mixes two argmaxes"
    target, draft = map(GreedyModel, (random_table(3, 5), random_table(3, 6)))
    want = target_law(target, (0,), 4)
    assert loop_law(target, Chain(draft, 2), lenient(F(1, 20)), (0,), 4) == want
    mixed = loop_law(target, Chain(draft, 2), reject_toward(ensemble(F(1, 2))), (0, 1), 1)
    p, q = (model(Tree((0, 1)))[0] for model in (target, draft))
    assert tv_outcomes(mixed, target_law(target, (0, 1), 1)) == F(1, 2) * tv(p, q)

# Temperature 0

@examples(20, models(4), seeds)
def test_greedy_models(pair, seed):
    "Point masses on the argmax, the model's own rows before the warp"
    model, tree = pair[0], random_tree(np.random.default_rng(seed), 5, 4)
    target_contract(GreedyModel(model), tree)
    p, cooled, raw = (m(tree) for m in (GreedyModel(model), cold(model), model))
    assert all((p[i] == cooled[i]).all() and (raw_law(p, i) == raw[i]).all() for i in range(len(tree)))

def chains(model): return Chain(model, 4)
def trees(model): return Branching(UnwarpedModel(model), (3, 2, 1), likeliest_points)
def bild(model): return BildDraft(model, 4, .3)

N = 36
LENIENT = {"greedy lenience": (chains, lenient_greedy(.5)), "SpecDec": (chains, top_beta(3, 1.)),
           "typical": (chains, typical()), "typical, tree": (trees, typical()),
           "BiLD": (bild, bild_rollback(2.))}
STRICT = {"greedy lenience": (chains, lenient_greedy(1)), "SpecDec, β": (chains, top_beta(1, inf)),
          "SpecDec, τ": (chains, top_beta(3, 0)), "typical": (chains, typical(row=warped_law)),
          "typical, tree": (trees, typical(row=warped_law)), "BiLD": (bild, bild_rollback(0))}

@pytest.fixture(scope="module")
def transformer():
    "The embedded target and draft by temperature, three prompts, the greedy texts"
    embedded = pytest.importorskip("specref.models.embedded")
    models = {t: [embedded.embedded(name, temperature=t) for name in ("target", "small")] for t in (0, 1)}
    starts = embedded.prompts("english", 2, seed=1)
    return models, starts, [autoregressive(models[0][0], ctx, N, Seeded(0)).tokens for ctx in starts]

def decoded(transformer, drafter, rule, t=0):
    target, draft = transformer[0][t]
    if t: target, draft = GreedyModel(target), GreedyModel(draft)
    return [generate(target, drafter(draft), rule, ctx, N, Seeded(0)).tokens for ctx in transformer[1]]

@pytest.mark.parametrize("name", LENIENT)
def test_lenient_at_temperature_zero(transformer, name):
    """Every text differs from the greedy one, by tokens that pass; by the warped row in place of the unwarped
    none would. `GreedyModel`s of the models at temperature 1 have the same texts"""
    (drafter, rule), (models, starts, strict) = LENIENT[name], transformer
    texts = decoded(transformer, drafter, rule)
    assert all(text != want for text, want in zip(texts, strict))
    for ctx, text in zip(starts, texts):
        assert all(x in support(rule, models[1][0].law((*ctx, *text[:i]))) for i, x in enumerate(text))
    assert decoded(transformer, drafter, replace(rule, row=warped_law)) == strict
    assert decoded(transformer, drafter, rule, t=1) == texts

@pytest.mark.parametrize("name", STRICT)
def test_strict_at_temperature_zero(transformer, name):
    "At the strict setting of each rule the greedy text"
    assert decoded(transformer, *STRICT[name]) == transformer[2]

@examples(20, gates, models(), st.integers(1, 3))
def test_the_warped_row_makes_every_gate_strict(rule, pair, gamma):
    "On tables: by the warped row a gate with a bound below certainty emits the greedy text"
    target, want = GreedyModel(pair[0]), target_law(GreedyModel(pair[0]), (0,), 3)
    assume(len(support(rule, exact(1, 0, 0))) == 1)   # not the settings that accept any token
    law = loop_law(target, Chain(GreedyModel(pair[1]), gamma), replace(rule, row=warped_law), (0,), 3)
    assert law == want

# Another target

BLENDS = {"ensemble": ensemble(F(1, 3)), "target": ensemble(1), "draft": ensemble(0),
          "cascade": cascade(F(1, 2)), "squares": lambda p, q: exact(*(p * p + q)),
          "opposite": lambda p, q: p[::-1]}
blends = st.sampled_from(sorted(BLENDS)).map(BLENDS.get)

@proves("thm-another-target")
@examples(20, models(), blends, st.sampled_from([(1,), (1, 1), (2,), (2, 1)]), draws, st.integers(1, 3))
def test_blends_are_targets(pair, f, shape, how, n):
    "Chains and trees, drafted from q in every way, verified against f(p, q): the distribution is that of f"
    blend = CombinedModel(*pair, f)
    drafter = Branching(pair[1], shape, DRAWS[how])
    assert loop_law(blend, drafter, reject, (0,), n) == target_law(blend, (0,), n)

@proves("thm-another-target")
@examples(25, pairs(), st.data())
def test_one_step_towards_another_target(pq, data):
    "Output f, acceptance 1 - TV(f, q), bias TV(f, p); the bound is attained iff f is between p and q"
    p, q = pq
    w = data.draw(zero_to_one)
    for f in (data.draw(laws(len(p))), w * p + (1 - w) * q, lenient(F(1, 3)).law(p, q), p, q):
        rule = reject_toward(lambda p, q: f)
        assert (rule.law(p, q) == f).all()
        assert rule.acceptance(p, q) == 1 - tv(f, q) and rule.bias(p, q) == tv(f, p)
        between = ((np.minimum(p, q) <= f) & (f <= np.maximum(p, q))).all()
        assert (rule.bias(p, q) == rule.acceptance(p, q) - overlap(p, q)) == between
    assert token_law(reject_toward(lambda p, q: f), p, q) == as_dict(f)

def test_parity_with_transformers():  # noqa: PLR0915  one body: the patches share its names
    "`assistant_ensemble_weight`: the same verdicts from the same uniforms, the same residual and bonus rows"
    torch = pytest.importorskip("torch")
    from unittest.mock import patch
    from transformers.generation.utils import _speculative_sampling
    (p, q), w = (a.astype(float) for a in CANON), .4
    rule, logs = reject_toward(ensemble(w)), lambda *rows: torch.tensor(np.log(rows))[None]
    for x in range(4):
        for u in np.arange(.025, 1, .05):
            seen = []
            def pick(probs, num_samples):
                seen.append(probs.numpy().ravel())
                return torch.zeros(1, 1, dtype=torch.long)
            fixed = patch("torch.rand_like", lambda ratio: torch.full_like(ratio, u))
            with fixed, patch("torch.multinomial", pick):
                draft, given_rows = torch.tensor([[0, x]]), (logs(q), 1, logs(p, p))
                _, n = _speculative_sampling(draft, *given_rows, assistant_ensemble_weight=w)
            tree = Tree((0,))
            tree.add(0, x, q)
            assert rule([p, p], tree, verdict_tape([0, u], [.5, .5])).node == int(n)
            np.testing.assert_allclose(seen[0], p if n else rule.otherwise(p, q), atol=1e-6)

# The rules of the table, by name

HALF = F(1, 2)
ONE_TOKEN = {   # the share of the draft's row that is accepted, and the distribution otherwise
    "lenience": lambda p, q: (np.minimum(q, 2*p), residual(p, q)),
    "ensemble": lambda p, q: (np.minimum(q, HALF*p + HALF*q), residual(HALF*p + HALF*q, q))}

@faithful("lenience", "ensemble", plain={
    "the exact rule": "speculative sampling", ("lenience", "half and half"): "ensemble",
    ("ensemble", "half is enough"): "lenience"})
def test_the_sampled_rules_of_the_table(subject):
    "The distribution of a token after a draft of one"
    for seed in range(4):
        (p, target), (q, draft) = ((m.law((0,)), m) for m in (random_table(4, 2*seed + i) for i in range(2)))
        system, (accepted, otherwise) = subject(draft, gamma=1), ONE_TOKEN[subject.name](p, q)
        want = as_dict(accepted + (1 - accepted.sum()) * otherwise)
        assert loop_law(target, system.drafter, system.verify, (0,), 1).of(lambda text: text[0]) == want

@faithful("greedy lenience", plain={
    "the likeliest token": verified(lenient_greedy(1)), "three tokens within a nat": "SpecDec",
    "a threshold of the entropy": "typical acceptance"})
def test_half_of_the_largest_probability_is_enough(subject):
    "Of every row; a rejected token is replaced by the likeliest"
    rule = subject(constant(1, 1)).verify
    for seed in range(40):
        p, every = random_table(6, seed).law((0,)), exact(*[1]*6)
        assert [*(rule.accepted(p, every) > 0)] == [*(2*p >= p.max())]
        assert [*rule.otherwise(p, every)] == [*greedy(p)]

def sharp(seed): return TableModel(5, lambda text: normalize(random_table(5, seed).law(text)**3))

@faithful("BiLD", plain={
    "no rollback": verified(bild_rollback(inf)), "the likeliest token alone": verified(bild_rollback(0)),
    "no fallback": drafted(lambda bild: Chain(GreedyModel(bild.model), bild.gamma)),
    "no least share": having(fallback=lambda share: 0), "a sampled draft": "speculative sampling"})
def test_bild_falls_back_and_rolls_back(subject):
    """The draft ends where no token has .6, and is taken back to the first token that costs the target more
    than 3 nats, where the target's own likeliest stands"""
    ends = set()
    for seed in range(24):
        target, draft, path = GreedyModel(sharp(2*seed)), sharp(2*seed + 1), ()
        system = subject(draft, gamma=4)
        round = next(rounds(target, system.drafter, system.verify, (0,), Seeded(0)))
        while len(path) < 4 and max(q := draft.law((0, *path))) >= F(6, 10): path += int(np.argmax(q)),
        rows = [target.model.law((0, *path[:i])).astype(float) for i in range(len(path) + 1)]
        good = [x == np.argmax(p) or -np.log(max(p[x], 1e-99)) <= 3 for p, x in zip(rows, path)]
        kept = [*good, False].index(False)
        assert round.tree.path(len(round.tree) - 1) == path
        assert round.tokens == (*path[:kept], int(np.argmax(rows[kept])))
        ends |= {(len(path) < 4, kept < len(path), any(x != np.argmax(p) for p, x in zip(rows, path[:kept])))}
    assert all(len(set(cases)) == 2 for cases in zip(*ends))
