"Chapter 10: every lossy rule has the law that is stated for it, and none is below the price"
from fractions import Fraction as F
from math import exp, inf, log, prod

import numpy as np
import pytest
from hypothesis import assume, example, given, settings, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import CANON, DRAWS, cold, constant, draws, killer, laws, models, pairs, proves, refuses, seeds, sizes
from specref.core.rng import Seeded, tv_outcomes, law_of, verdict_tape
from specref.core.cost import best_gamma, speedup
from specref.core.law import exact, greedy, overlap, one_hot, residual, tv
from specref.verify.lossy import CombinedModel, BildDraft, AcceptanceRule, cascade, entropy, accept_set, lenient, lenient_greedy, ensemble, token_ranks, bild_rollback, standard_rule, text_law, top_beta, reject_toward, typical
from specref.core.loop import Verdict, generate, loop_law, no_draft, autoregressive, rounds
from specref.verify.reject import Chain, capped_geometric, reject
from specref.verify.siblings import Branching
from specref.core.target import TableModel, random_table, target_law
from specref.core.tree import Tree, iid, chain_nodes

many = settings(max_examples=120)
some = settings(max_examples=40)
zero_to_one = st.fractions(0, 1, max_denominator=12)
ls = st.fractions(F(1, 20), 1, max_denominator=20)


def as_dict(p): return {x: w for x, w in enumerate(p) if w}


def first(rule, p, q):
    "The law of (kept?, token) when one draft from q is judged, every road of it"
    def run(rng):
        round = next(rounds(constant(*p), Chain(constant(*q), 1), rule, (0,), rng))
        return round.verdict.node > 0, round.tokens[0]
    return law_of(run)


def token_law(rule, p, q): return first(rule, p, q).of(lambda kx: kx[1])


def acceptance(rule, p, q): return first(rule, p, q).of(lambda kx: kx[0]).get(True, 0)


def other(l): return lenient(l, left=lambda p, q: residual(p, l * q))


@st.composite
def judged(draw, sizes=st.integers(2, 4)):
    "p, q and an arbitrary rule: any share of each token of q, any law for the redraw"
    p, q = draw(pairs(sizes))
    share = np.array(draw(st.lists(zero_to_one, min_size=len(p), max_size=len(p))), dtype=object)
    r = draw(laws(len(p)))
    return p, q, AcceptanceRule(lambda p, q: q * share, lambda p, q: r)


RULES = {
    "strict": standard_rule, "lenient": lenient(F(1, 3)), "other residual": other(F(1, 3)), "ensemble": reject_toward(ensemble(F(1, 3))), "cascade": reject_toward(cascade(F(1, 2))),
    "greedy lenience": lenient_greedy(F(1, 2)), "top-2": top_beta(2, 1.), "typical": typical(), "typical, greedy": typical(.3, .5, greedy), "rollback": bild_rollback(1.),
    "redraw from p": AcceptanceRule(np.minimum, lambda p, q: p),
}
named = st.sampled_from(sorted(RULES)).map(RULES.get)
GATES = {"greedy lenience": lenient_greedy(F(1, 2)), "l = 1": lenient_greedy(1), "top": top_beta(1, inf), "top-2": top_beta(2, .7), "tied": top_beta(3, 0), "rollback": bild_rollback(.9),
         "no rollback": bild_rollback(inf), "always": bild_rollback(0), "typical": typical(.09, .3, greedy), "looser": typical(.5, .9, greedy)}
gates = st.sampled_from(sorted(GATES)).map(GATES.get)


# One step

@proves("thm-one-step")
@many
@given(judged())
def test_any_rule_has_its_stated_law(pqr):
    "k + (1 - a) r, by enumeration of the judge, for an arbitrary share and an arbitrary redraw"
    p, q, rule = pqr
    assert token_law(rule, p, q) == as_dict(rule.law(p, q)) and acceptance(rule, p, q) == rule.acceptance(p, q)


@proves("thm-one-step")
@many
@given(named, pairs())
def test_the_published_rules_have_their_stated_law(rule, pq): assert token_law(rule, *pq) == as_dict(rule.law(*pq)) and acceptance(rule, *pq) == rule.acceptance(*pq)


@proves("thm-price")
@settings(max_examples=300)
@given(judged(sizes))
def test_no_rule_is_below_the_price(pqr):
    p, q, rule = pqr
    assert rule.bias(p, q) >= rule.acceptance(p, q) - overlap(p, q)


@proves("thm-price")
@many
@given(pairs(st.integers(2, 4)), st.data())
def test_no_judge_of_one_draft_is_below_the_price(pq, data):
    "Any kernel from the draft to the token, not only a coin and a redraw"
    p, q = pq
    kernel = np.array([data.draw(laws(len(p))) for _ in p])
    law, kept = q @ kernel, sum(q[x] * kernel[x][x] for x in range(len(p)))
    assert tv(law, p) >= kept - overlap(p, q)


@proves("thm-fair")
@settings(max_examples=200)
@given(pairs(), st.data())
def test_a_surplus_costs_what_it_is_worth(pq, data):
    "Any share between min(p, q) and q, with the strict redraw: bias = a - β, and the rule is speculative sampling of its own law"
    p, q = pq
    more = np.array(data.draw(st.lists(zero_to_one, min_size=len(p), max_size=len(p))), dtype=object)
    rule = AcceptanceRule(lambda p, q: np.minimum(p, q) + more * (q - np.minimum(p, q)), residual)
    law, k = rule.law(p, q), rule.kept(p, q)
    assert rule.bias(p, q) == k.sum() - overlap(p, q)
    assert (np.minimum(law, q) == k).all() and (np.maximum(law - q, 0) == (1 - k.sum()) * residual(p, q)).all()
    assert (reject_toward(lambda p, q: law).law(p, q) == law).all() and reject_toward(lambda p, q: law).acceptance(p, q) == k.sum()
    assert ((np.minimum(p, q) <= law) & (law <= np.maximum(p, q))).all()


def test_a_judge_that_wastes():
    "The strict share with a redraw from p: nothing is gained, and 7/50 is paid"
    careless = RULES["redraw from p"]
    assert careless.acceptance(*CANON) == overlap(*CANON) and careless.bias(*CANON) == F(7, 50)


# Lenience

@proves("cor-lenience")
@many
@given(pairs(), ls)
def test_lenience(pq, l):
    "α_l, the bias, the promise; the other redraw keeps the promise and never costs less"
    p, q = pq
    rule, wide = lenient(l), other(l)
    alpha = sum(min(a / l, b) for a, b in zip(p, q))
    assert rule.acceptance(p, q) == wide.acceptance(p, q) == alpha and rule.bias(p, q) == alpha - overlap(p, q) <= wide.bias(p, q)
    assert (rule.law(p, q) <= p / l).all() and (wide.law(p, q) <= p / l).all()


@proves("cor-lenience")
@settings(max_examples=200)
@given(judged(sizes))
def test_no_rule_with_the_promise_accepts_more(pqr):
    "The smallest 1/l that bounds law/p of an arbitrary rule: lenience with that l accepts at least as much"
    p, q, rule = pqr
    law = rule.law(p, q)
    assume(all(a or not b for a, b in zip(p, law)))
    l = 1 / max(b / a for a, b in zip(p, law) if a)
    assert rule.acceptance(p, q) <= lenient(l).acceptance(p, q)


def test_lenience_on_the_four_tokens():
    "Both readings, to the digit (verification.md §1.1)"
    want = {F(1, 2): ((.8,), (.25, .25, .30, .20), .2, (.2167, .2667, .3167, .2), .2167), F(3, 10): ((.9333,), None, .3333, None, .3435),
            F(1, 10): ((1.,), (.1, .2, .3, .4), .4, (.1, .2, .3, .4), .4)}
    for l, ((accepted,), law, bias, wide, more) in want.items():
        a, b = lenient(l), other(l)
        assert round(float(a.acceptance(*CANON)), 4) == accepted and round(float(a.bias(*CANON)), 4) == bias and round(float(b.bias(*CANON)), 4) == more
        for rule, row in ((a, law), (b, wide)):
            if row: assert tuple(round(float(x), 4) for x in rule.law(*CANON)) == row
    assert lenient(F(1, 2)).acceptance(*CANON) == F(4, 5) and lenient(F(3, 10)).acceptance(*CANON) == F(14, 15) and other(F(1, 2)).bias(*CANON) == F(13, 60)


@given(pairs(), ls, ls)
def test_lenience_is_monotone(pq, a, b):
    "A smaller l accepts no less and is no nearer to p"
    low, high = lenient(min(a, b)), lenient(max(a, b))
    assert low.acceptance(*pq) >= high.acceptance(*pq) and low.bias(*pq) >= high.bias(*pq)


@many
@given(pairs(), st.integers(1, 4), seeds)
def test_strict_is_reject(pq, gamma, seed):
    "The same verdict from the same noise, in fractions and in floats, at l = 1 too"
    for p, q in (pq, [w.astype(float) for w in pq]):
        tree = Chain(TableModel(len(q), lambda text: q), gamma)((0,), Seeded(seed))
        assert len({rule([p] * len(tree), tree, Seeded(seed + 1)) for rule in (reject, standard_rule, lenient(1), reject_toward(lambda p, q: p), reject_toward(ensemble(1)))}) == 1


@some
@given(models(), st.integers(1, 3), st.integers(1, 3))
def test_strict_keeps_the_contract(pair, gamma, n): verifier_contract(pair[0], Chain(pair[1], gamma), standard_rule, (0,), n)


def test_lenience_on_a_tape():
    "Token 3 of the book's pair at l = 1/2 is kept below 1/2 and not at it; the redraw comes from the tape"
    p, q = CANON
    tree = Tree((0,)); tree.add(0, 3, q)
    judge = lambda u: lenient(F(1, 2))([p, p], tree, verdict_tape([0, u], [.8, .5]))
    assert judge(.4999) == Verdict(1, 1) and judge(.5) == Verdict(0, 1)


@many
@given(pairs(), ls)
def test_floats(pq, l):
    "In float64 the law is that of the fractions to twelve digits, and it is a law"
    p, q = (w.astype(float) for w in pq)
    law = lenient(float(l)).law(p, q)
    assert abs(law - lenient(l).law(*pq).astype(float)).max() < 1e-9 and abs(law.sum() - 1) < 1e-12
    assert tv_outcomes(token_law_of_floats(lenient(float(l)), p, q), as_dict(law)) < 1e-12


def token_law_of_floats(rule, p, q):
    target, draft = (TableModel(len(w), lambda text, w=w: w) for w in (p, q))
    return law_of(lambda rng: next(rounds(target, Chain(draft, 1), rule, (0,), rng)).tokens[0])


# Texts

@proves("thm-text")
@settings(max_examples=60)
@given(models(), named, st.integers(1, 3), st.integers(0, 4), st.sampled_from([(0,), (1, 2, 0)]))
def test_the_law_of_a_text(pair, rule, gamma, n, ctx):
    "Rounds and their bonus tokens, enumerated by the loop and predicted by the phases"
    assert loop_law(pair[0], Chain(pair[1], gamma), rule, ctx, n) == text_law(rule, *pair, gamma, ctx, n)


@proves("thm-text")
@some
@given(models(), named, st.integers(1, 3), st.integers(0, 3))
def test_within_one_chain_a_text_is_step_after_step(pair, rule, gamma, more):
    "For n up to γ the law is the product of the one-step laws"
    target, draft = pair
    law = text_law(rule, target, draft, gamma + more, (0,), gamma)
    step = lambda text: rule.law(target.law(text), draft.law(text))
    for y, w in law.items(): assert w == prod(step((0, *y[:i]))[y[i]] for i in range(gamma))
    assert sum(law.values()) == 1


def test_bonus_tokens_make_the_product_wrong():
    "γ = 1 on the pair that kills: two tokens are not two steps, and the bias falls with γ"
    (p, q), rule = killer(), lenient(F(1, 4))
    steps = TableModel(3, lambda text: rule.law(p.law(text), q.law(text)))
    off = [tv_outcomes(text_law(rule, p, q, gamma, (0,), 4), target_law(p, (0,), 4)) for gamma in (1, 2, 4)]
    assert text_law(rule, p, q, 1, (0,), 2) != target_law(steps, (0,), 2) == text_law(rule, p, q, 2, (0,), 2) and off == sorted(set(off))


@proves("cor-diluted")
@some
@given(pairs(st.integers(2, 3)), ls, st.integers(1, 3))
def test_the_share_of_bonus_tokens(pq, l, gamma):
    "In a round: a bonus token with probability a^γ, 1 + a + ... + a^γ tokens on average"
    p, q = pq
    a, round = lenient(l).acceptance(p, q), lambda rng: next(rounds(constant(*p), Chain(constant(*q), gamma), lenient(l), (0,), rng)).verdict.node
    node = law_of(round)
    assert node.get(gamma, 0) == a**gamma and 1 + node.mean() == capped_geometric(a, gamma)


@proves("cor-diluted")
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_the_share_in_the_long_run(gamma):
    "A rule that marks its bonus tokens: their share among many tokens approaches a^γ/(1 + ... + a^γ)"
    a, q = F(1, 2), exact(1, 1)
    rule = AcceptanceRule(lambda p, q: q * np.array([F(1), F(0)], dtype=object), lambda p, q: one_hot(0 if q.any() else 1, 2, exact=True))
    marked = [sum(w for y, w in text_law(rule, constant(1, 1), constant(*q), gamma, (0,), n).items() if y[-1]) for n in (9, 10, 11)]
    assert rule.acceptance(q, q) == a and all(abs(m - a**gamma / capped_geometric(a, gamma)) < F(1, 100) for m in marked)


# Gates

@proves("prop-gate")
@settings(max_examples=200)
@given(gates, pairs())
def test_gates(rule, pq):
    "What is emitted is in G, the acceptance is q(G), the bias against greedy decoding q(G) - q(argmax): fair"
    p, q = pq
    uniform = exact(*[1] * len(p))
    good, top, law = rule.kept(p, uniform) > 0, np.argmax(p), rule.law(p, q)
    assert good[top] and (law[~good] == 0).all() and rule.acceptance(p, q) == q[good].sum()
    assert tv(law, greedy(p)) == q[good].sum() - q[top] == rule.acceptance(p, q) - overlap(greedy(p), q)


@proves("prop-gate")
@some
@given(models(), gates, st.integers(1, 3), seeds)
def test_every_emitted_token_is_good_enough(pair, rule, gamma, seed):
    target, draft = pair
    text, uniform = generate(target, Chain(draft, gamma), rule, (0,), 6, Seeded(seed)), exact(1, 1, 1)
    for i, x in enumerate(text): assert rule.kept(target.law((0, *text[:i])), uniform)[x] > 0


@settings(max_examples=60)
@given(models(), st.integers(1, 3), st.sampled_from(["lenient_greedy(1)", "top_beta(1, inf)", "rollback(0)", "typical at T = 0"]))
def test_strict_greedy(pair, gamma, how):
    "At their strict ends the greedy rules emit the greedy text with certainty, whatever is drafted, ties and all"
    target, draft = pair
    rule = {"lenient_greedy(1)": lenient_greedy(1), "top_beta(1, inf)": top_beta(1, inf), "rollback(0)": bild_rollback(0), "typical at T = 0": typical()}[how]
    rows = cold(target) if how == "typical at T = 0" else target
    want = target_law(cold(target), (0,), 4)
    for drafter in (Chain(draft, gamma), Chain(cold(draft), gamma)): assert loop_law(rows, drafter, rule, (0,), 4) == want
    for q in (draft.law((0,)), greedy(target.law((0,)))):   # and accept what greedy decoding would
        assert rule.acceptance(rows.law((0,)), q) == overlap(greedy(target.law((0,))), q)


@given(pairs(), ls)
def test_lenience_does_nothing_at_temperature_0(pq, l): assert lenient(l).acceptance(greedy(pq[0]), pq[1]) == overlap(greedy(pq[0]), pq[1])


@many
@given(laws(5), st.fractions(F(1, 20), F(19, 20), max_denominator=20))
def test_greedy_lenience_reads_at_least(p, l):
    "p(x) >= l max p below l = 1; at l = 1 the lowest of the likeliest; a smaller l keeps a larger set"
    q = exact(*[1] * 5)
    keeps = lambda l: {int(x) for x in np.flatnonzero(lenient_greedy(l).kept(p, q) > 0)}
    assert keeps(l) == {x for x in range(5) if p[x] >= l * max(p)} and keeps(1) == {int(np.argmax(p))} and keeps(1) <= keeps(l) <= keeps(l / 2)


def test_the_misprint():
    "p(x) <= l max p keeps everything at l = 1, and below that it refuses the argmax and keeps the rarest"
    p = exact(10, 6, 3, 1)   # drafting2.md §1
    keeps = lambda good: set(map(int, np.flatnonzero(good)))
    assert keeps(p <= p.max()) == {0, 1, 2, 3} and keeps(p <= F(1, 2) * p.max()) == {2, 3} and keeps(lenient_greedy(F(1, 2)).kept(p, p) > 0) == {0, 1}


def test_speeds_of_the_paper():
    "The greedy line follows from the walltime theorem to the printed digit; no γ explains the sampled line, at either end of the rounding"
    assert [round(speedup(a, 8, .015), 3) for a in (.75, .75, .80, .87)] == [3.303, 3.303, 3.865, 4.907]
    best = lambda a, c=.015: speedup(a, best_gamma(a, c), c)
    assert [round(best(a), 2) for a in (.62, .71, .76, .84)] == [2.33, 2.94, 3.45, 4.79]
    assert all(best(a + .005, .0145) < printed - .05 for a, printed in zip((.62, .71, .76, .84), (2.5, 3.1, 3.6, 5)))


@many
@given(laws(5), st.integers(1, 5), st.floats(0, 4))
@example(exact(3, 3, 2, 1, 0), 2, 0.)
def test_top_beta(p, beta, tau):
    "Both conditions, by sorting and by logarithms; β = V and τ = ∞ accept everything; monotone in both"
    q = exact(*[1] * 5)
    keeps = lambda *a: {int(x) for x in np.flatnonzero(top_beta(*a).kept(p, q) > 0)}
    order = sorted(range(5), key=lambda x: (-p[x], x))
    gap = lambda x: log(float(max(p))) - log(float(p[x])) if p[x] else inf
    assume(all(abs(gap(x) - tau) > 1e-9 or gap(x) == 0 for x in range(5)))
    assert keeps(beta, tau) == {x for x in order[:beta] if gap(x) <= tau} and [order[i] for i in token_ranks(p)[order]] == order
    assert keeps(5, inf) == set(range(5)) and keeps(beta, tau) <= keeps(min(beta + 1, 5), tau) and keeps(beta, tau) <= keeps(beta, tau + .5)
    if len({*p}) == 5: assert keeps(beta, 0) == {order[0]}


@given(laws(5), st.floats(.05, 4))
def test_top_beta_without_its_gate_is_greedy_lenience(p, tau):
    "l = exp(-τ)"
    q = exact(1, 2, 3, 4, 5)
    assert (top_beta(5, tau).kept(p, q) == lenient_greedy(exp(-tau)).kept(p, q)).all()


# Typical

def test_typical_on_known_laws():
    "The entropies, the thresholds and the swapped constants (verification.md §10)"
    sure, (p, q) = exact(92, 8), CANON
    assert abs(entropy(sure) - .278769) < 5e-7 and abs(exp(-entropy(sure)) - .756714) < 5e-7 and abs(.09 * exp(-entropy(sure)) - .068104) < 1e-6
    keeps = lambda rule, p: set(map(int, np.flatnonzero(rule.kept(p, exact(*[1] * len(p))) > 0)))
    assert keeps(typical(), sure) == {0} and keeps(typical(.3, .09), sure) == {0, 1}
    assert abs(entropy(p) - 1.279854) < 5e-7 and abs(.3 * exp(-entropy(p)) - .083423) < 5e-7
    assert keeps(typical(), p) == {0, 1, 2, 3} and (typical().law(p, q) == q).all() and typical().acceptance(p, q) == 1


@many
@given(pairs(), st.floats(.01, 1), st.floats(.01, .99))
def test_typical(pq, epsilon, delta):
    "q on the typical set and the choice for the rest; the argmax is typical; uniform rows accept everything"
    (p, q), V = pq, len(pq[0])
    good = p > min(epsilon, delta * exp(-entropy(p)))
    for choice in (greedy, lambda p: p):
        rule = typical(epsilon, delta, choice)
        assert (rule.law(p, q) == q * good + (1 - q[good].sum()) * choice(p)).all() and good[np.argmax(p)]
    assert typical(epsilon, delta).acceptance(exact(*[1] * V), q) == 1 and abs(entropy(exact(*[1] * V)) - log(V)) < 1e-12


# BiLD

@settings(max_examples=60)
@given(models(), st.integers(1, 4), st.fractions(0, 1, max_denominator=6), seeds)
def test_confident_drafts(pair, gamma, fallback, seed):
    "The argmax while it has enough weight; honest edges; a higher threshold never drafts more"
    draft = pair[1]
    drafter_contract(BildDraft(draft, gamma, fallback), (0, 1))
    tree = BildDraft(draft, gamma, fallback)((0,), Seeded(seed))
    assert tree.parent == list(range(-1, len(tree) - 1)) and len(tree) <= gamma + 1
    for i in range(1, len(tree)): assert tree.token[i] == np.argmax(draft.law(tree.text(i - 1))) and max(draft.law(tree.text(i - 1))) >= fallback
    if len(tree) <= gamma: assert max(draft.law(tree.text(len(tree) - 1))) < fallback
    assert len(BildDraft(draft, gamma, fallback + F(1, 6))((0,), Seeded(seed))) <= len(tree)


@some
@given(models(), st.integers(1, 4), st.fractions(0, 2, max_denominator=6), st.sampled_from([0, .5, 2, 5, inf]), st.sampled_from([(0,), (1, 2)]))
def test_the_ends_of_bild(pair, gamma, fallback, rb, ctx):
    "FB > 1: the large model alone, a call a token; RB = 0: its greedy text; FB = 0 and RB = ∞: every draft of the small one stands"
    target, draft = pair
    alone = lambda model: autoregressive(cold(model), ctx, 6, Seeded(0))
    run = lambda fb, rb: generate(target, BildDraft(draft, gamma, fb), bild_rollback(rb), ctx, 6, Seeded(0))
    never = run(F(11, 10), rb)
    assert never == alone(target) and never.ledger.models["target"].calls == 6 and run(fallback, 0) == alone(target)
    free = run(0, inf)
    assert free[:gamma] == alone(draft)[:gamma] and set(free.ledger.column(2)) == {gamma} and {s.fate for s in free.sources[gamma::gamma + 1]} <= {"B"}


@many
@given(laws(4), st.floats(0, 5))
def test_rollback_in_nats(p, rb):
    "Kept: what costs at most α_RB nats, and the argmax"
    cost = lambda x: -log(float(p[x])) if p[x] else inf
    assume(all(abs(cost(x) - rb) > 1e-9 for x in range(4)))
    assert set(map(int, np.flatnonzero(bild_rollback(rb).kept(p, exact(1, 1, 1, 1)) > 0))) == {x for x in range(4) if cost(x) <= rb} | {int(np.argmax(p))}


# Another target

BLENDS = {"ensemble": ensemble(F(1, 3)), "target": ensemble(1), "draft": ensemble(0), "cascade": cascade(F(1, 2)), "squares": lambda p, q: exact(*(p * p + q)), "opposite": lambda p, q: p[::-1]}
blends = st.sampled_from(sorted(BLENDS)).map(BLENDS.get)


@proves("thm-another-target")
@some
@given(models(), blends, st.sampled_from([(1,), (1, 1), (2,), (2, 1)]), draws, st.integers(1, 3))
def test_blends_are_targets(pair, f, shape, how, n):
    "Chains and trees, drafted from q in every way, judged against f(p, q): the law is that of f"
    blend = CombinedModel(*pair, f)
    assert loop_law(blend, Branching(pair[1], shape, DRAWS[how]), reject, (0,), n) == target_law(blend, (0,), n)


@proves("thm-another-target")
@many
@given(pairs(), st.data())
def test_one_step_towards_another_target(pq, data):
    "Law f, acceptance 1 - TV(f, q), bias TV(f, p); fair exactly when f lies between p and q"
    p, q = pq
    w = data.draw(zero_to_one)
    for f in (data.draw(laws(len(p))), w * p + (1 - w) * q, lenient(F(1, 3)).law(p, q), p, q):
        rule = reject_toward(lambda p, q: f)
        assert (rule.law(p, q) == f).all() and rule.acceptance(p, q) == 1 - tv(f, q) and rule.bias(p, q) == tv(f, p)
        between = ((np.minimum(p, q) <= f) & (f <= np.maximum(p, q))).all()
        assert (rule.bias(p, q) == rule.acceptance(p, q) - overlap(p, q)) == between
    assert token_law(reject_toward(lambda p, q: f), p, q) == as_dict(f)


@given(pairs(), zero_to_one)
def test_ensembles(pq, w):
    "Acceptance 1 - w(1 - β), bias (1 - w)(1 - β), and the strict redraw"
    (p, q), rule = pq, reject_toward(ensemble(w))
    left = 1 - overlap(p, q)
    assert rule.acceptance(p, q) == 1 - w * left and rule.bias(p, q) == (1 - w) * left
    if w and left: assert (rule.otherwise(p, q) == residual(p, q)).all()
    assert (rule.otherwise(p, 0 * p) == p).all()


def test_a_target_that_looks_at_the_draft():
    "f = q for the token that q is sure of and p for the others: the law is neither"
    p, q = CANON
    peeking = AcceptanceRule(lambda p, q: np.where(q >= F(4, 10), q, np.minimum(p, q)), residual)
    law = token_law(peeking, p, q)
    assert law == as_dict(peeking.law(p, q)) and law not in (as_dict(p), as_dict(q)) and peeking.bias(p, q) == F(3, 10)


def test_transformers_weighs_in_the_same_way():
    "`assistant_ensemble_weight`: the same verdicts from the same uniforms, the same redraw, the bonus token from p"
    torch = pytest.importorskip("torch")
    from unittest.mock import patch
    from transformers.generation.utils import _speculative_sampling
    (p, q), w = (a.astype(float) for a in CANON), .4
    rule, logs = reject_toward(ensemble(w)), lambda *rows: torch.tensor(np.log(rows))[None]
    for x in range(4):
        for u in np.arange(.025, 1, .05):
            seen = []
            def pick(probs, num_samples): seen.append(probs.numpy().ravel()); return torch.zeros(1, 1, dtype=torch.long)
            with patch("torch.rand_like", lambda ratio: torch.full_like(ratio, u)), patch("torch.multinomial", pick):
                _, n = _speculative_sampling(torch.tensor([[0, x]]), logs(q), 1, logs(p, p), assistant_ensemble_weight=w)
            tree = Tree((0,)); tree.add(0, x, q)
            assert rule([p, p], tree, verdict_tape([0, u], [.5, .5])).node == int(n)
            np.testing.assert_allclose(seen[0], p if n else rule.otherwise(p, q), atol=1e-6)


def test_blends_of_transformers():
    "Rows of the embedded models, mixed at every node of a drafted tree; the shorter reach of the two counts"
    from specref.models.embedded import embedded
    big, small = embedded("target"), embedded("small")
    blend = CombinedModel(big, small, ensemble(.25))
    tree = Branching(small, (2, 1))((5, 6, 7), Seeded(1))
    rows, p, q = blend(tree), embedded("target")(tree), embedded("small")(tree)
    for i in range(len(tree)): np.testing.assert_allclose(rows[i], .25 * p[i] + .75 * q[i], atol=1e-5)
    text = generate(blend, Chain(small, 3), reject, (5, 6, 7), 8, Seeded(0))
    assert len(text) == 8 and blend.most == min(big.most, small.most) and text.ledger.models["target"].calls == len(text.ledger.rounds)


# Trees and doors

def test_siblings_are_refused():
    "A tree with siblings anywhere, even where the judge would not look; probes and the empty tree are fine"
    p, q = CANON
    for parents in ((0, 0), (0, 1, 1), (0, 1, 0)):
        tree = Tree((0,))
        for u in parents: tree.add(u, 3, q)
        for rule in RULES.values(): refuses("tree", rule, [p] * len(tree), tree, Seeded(0))
    tree = Tree((0,)); tree.add(0, 1); c = tree.add(0, 3, q); tree.add(c, 2)
    assert chain_nodes(tree) == [0, c] and lenient(F(1, 10))([p] * len(tree), tree, Seeded(0)).node == c
    assert loop_law(constant(*p), no_draft, lenient(F(1, 10)), (0,), 2) == target_law(constant(*p), (0,), 2)
    assert loop_law(constant(*p), no_draft, lenient_greedy(F(1, 10)), (0,), 2) == {(0, 0): 1}


def test_doors():
    nan = float("nan")
    for l in (0, -1, 1.1, nan, inf, None, "1", True): refuses("l", lenient, l); refuses("l", lenient_greedy, l)
    for beta in (0, -1, 1.5, None, True): refuses("beta", top_beta, beta, 1.)
    for bad in (-1, nan, None, "1", -inf): refuses("tau", top_beta, 1, bad); refuses("alpha_rb", bild_rollback, bad)
    for bad in (-.1, 1.1, nan, inf, None):
        refuses("epsilon", typical, bad); refuses("delta", typical, .09, bad); refuses("w", ensemble, bad)
    for bad in (1, 1., F(1)): refuses("delta", typical, 1, bad)   # nothing is typical of a uniform law, the argmax too
    for bad in (-.1, nan, inf, None): refuses("fallback", BildDraft, None, 2, bad); refuses("sure", cascade, bad)
    for bad in (0, -1, 1.5, None): refuses("gamma", BildDraft, None, bad, .5); refuses("gamma", text_law, standard_rule, constant(1, 1), constant(1, 1), bad, (0,), 1)
    refuses("n", text_law, standard_rule, constant(1, 1), constant(1, 1), 1, (0,), -1); refuses("ctx", text_law, standard_rule, constant(1, 1), constant(1, 1), 1, (), 1)
    refuses("kept", AcceptanceRule, None, residual); refuses("otherwise", AcceptanceRule, np.minimum, 1)
    refuses("draft", CombinedModel, constant(1, 1), constant(1, 1, 1), ensemble(.5))
    refuses("draft", text_law, standard_rule, constant(1, 1), constant(1, 1, 1), 1, (0,), 1)
    tree = Tree((0,)); tree.add(0, 1, exact(1, 1, 1))
    for rule in RULES.values():
        for short in ([1], [1, 1], [1, 1, 1, 1]): refuses("q", rule, [exact(*short)] * 2, tree, Seeded(0))
    for ask in (standard_rule.law, standard_rule.acceptance, standard_rule.bias, lenient_greedy(1).law): refuses("q", ask, exact(1, 1), exact(1, 1, 1))
