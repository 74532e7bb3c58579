"Chapter 16: verifiers from parts are the correct rules; published distances, blind tables, false alarms"
from dataclasses import replace
from fractions import Fraction as F
from operator import le, lt

import numpy as np, pytest
from hypothesis import given, settings, strategies as st

from contracts import continued, drafter_contract, one_round, verifier_contract
from helpers import CANON, Plan, constant, examples, killer, laws, models, pairs, plans, proves
from specref import (block, Branching, Chain, exact, greedy, iid, law_of, match, MUTANTS, normalize, points,
                     reject, residual, TableModel, target_law, traversal, Tree, tv_outcomes,
                     without_replacement)
from specref.certify.chain_mutants import EDGE, bracket_state, first_rejection, residual_of_one, uncapped
from specref.certify.known import (BINARY, KILLER, ORDER0, BlockRule, BottomUpRule, Grid, Rule, block_of,
                                   from_r, is_sampled, left_over, on_chain, parent_row, without_token)
from specref.certify.loop_mutants import FALSE_ALARMS, GALLERY, SPELT, WITHHELD
from specref.certify.tree_mutants import (TREE_MUTANTS, each_child, each_path, on_star, point_paths,
                                          redrawn_after, siblings_by_p)
from specref.core.loop import clip
from specref.core.tree import edge_laws
from specref.verify.coupled import inverse_cdf_coupling, reused_noise_law

def named(name): return next(m for m in MUTANTS if m.name == name)

def off(setting, **parts):
    changed = replace(setting, **parts)
    return tv_outcomes(changed.law(), changed.want())

# Blind tables

@proves("prop-blind")
@examples(20, pairs(st.just(2)), st.integers(1, 2))
def test_two_tokens_hide_a_wrong_residual(pq, gamma):
    "On two tokens the residual is p without the rejected token, for one draft token after another"
    wrong = Rule(after=lambda t: without_token(t.r, t.x))
    assert off(on_chain([constant(*law) for law in pq], gamma), verify=wrong) == 0

@proves("prop-blind")
@examples(20, laws(3), laws(3), st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_tables_without_context_hide_a_wrong_row(p, q, rows):
    "Any row at any node, for p or for the bonus token, is correct; not on a table that depends on the text"
    wrong = Rule(row=lambda p, tree, i: p[rows[i]], bonus=lambda p, tree, i: p[rows[0]])
    assert off(on_chain((constant(*p), constant(*q)), 2), verify=wrong) == 0
    detected = off(on_chain(killer(), 2), verify=Rule(row=lambda p, tree, i: p[rows[i]]))
    assert rows == [0, 1, 2] or detected > 0

@proves("prop-blind")
def test_short_texts_hide_what_comes_later():
    "A bonus token from the row before is correct for texts of one token, wrong for two"
    wrong = Rule(bonus=parent_row)
    assert off(on_chain(KILLER, 1, n=1), verify=wrong) == 0 < off(on_chain(KILLER, 1, n=2), verify=wrong)

@examples(25, laws(4), laws(4))
def test_two_descriptions_of_one_bug(p, q):
    "xllm#2175: q subtracted at the rejected token alone is p without that token"
    for x in np.flatnonzero(p < q):
        there = [max(w - q[y], 0) if y == x else w for y, w in enumerate(p)]
        assert (normalize(np.array(there, dtype=object)) == without_token(p, x)).all()

# Dropping and withholding a draft token

@proves("thm-dropping")
@examples(50, pairs(), st.data())
def test_dropping(pq, data):
    "The output distribution when draft tokens in D are dropped, and its distance for a perfect draft"
    (p, q), D = pq, data.draw(st.sets(st.integers(0, len(pq[0]) - 1)))
    def run(rng):
        x, tree = rng.pick(q), Tree((0,))
        if x not in D: tree.add(0, x, q)
        return reject([p]*2, tree, rng).tokens(tree)[0]
    inside, missing = np.array([x in D for x in range(len(p))]), sum(max(q[x] - p[x], 0) for x in D)
    law = p + (q*inside).sum()*p - np.minimum(p, q)*inside - missing*residual(p, q)
    assert law_of(run) == {x: w for x, w in enumerate(law) if w}
    mass = (p*inside).sum()
    assert (p != q).any() or tv_outcomes(law_of(run), dict(enumerate(p))) == mass * (1 - mass)

def growing(model, gamma, go_on):
    "A chain that grows while `go_on(tokens so far, noise)`; it samples nothing after it stops"
    def draft(ctx, rng):
        tree, noise = Tree(ctx), rng.pick(exact(1, 1))
        while len(tree) <= gamma and go_on(tree.token[1:], noise):
            tree.grow(len(tree) - 1, iid(model.law(tree.text(len(tree) - 1))), rng)
        return tree
    return draft

@proves("thm-silence")
@examples(25, models(), st.integers(0, 999), st.integers(1, 3))
def test_a_decision_by_earlier_tokens_is_lossless(pair, seed, n):
    "(i) Any decision by the tokens before and by independent noise: stated edges, lossless"
    def go_on(seen, noise):
        return np.random.default_rng([seed, noise + 1, *(x + 1 for x in seen)]).random() < .6
    draft = growing(pair[1], 2, go_on)
    assert all(stated == true for _, stated, true in edge_laws(law_of(lambda rng: draft((0,), rng))))
    verifier_contract(pair[0], draft, reject, (0,), n)

def cut(chain, K):
    "The first K(all its tokens) tokens of a chain that was sampled in full"
    def draft(ctx, rng):
        old, tree = chain(ctx, rng), Tree(ctx)
        for i in range(1, 1 + K(old.token[1:])): tree.add(i - 1, old.token[i], old.law[i])
        return tree
    return draft

@proves("thm-silence")
@examples(25, models(), st.integers(0, 999), st.integers(1, 3))
def test_a_deterministic_draft_and_match_allow_any_decision(pair, seed, n):
    "(ii) A draft that is a function of the context, and (iii) `match` with any draft, cut by the whole chain"
    def K(tokens): return int(np.random.default_rng([seed, *tokens]).integers(0, len(tokens) + 1))
    argmax = TableModel(pair[1].V, lambda text: greedy(pair[1].law(text)))
    drafter_contract(cut(Chain(argmax, 2), K), (0,))
    verifier_contract(pair[0], cut(Chain(argmax, 2), K), reject, (0,), n)
    verifier_contract(pair[0], cut(Chain(pair[1], 2), K), match, (0,), n)

@proves("thm-silence")
def test_a_decision_by_the_token_itself_is_lossy():
    "The same cut with `reject` and a sampled draft is not lossless, even for a perfect draft"
    def K(tokens): return 1 + (tokens[1] != 2) if tokens[0] != 2 else 0
    for p, q in (killer(), (killer()[0],)*2):
        draft = cut(Chain(q, 2), K)
        some = law_of(lambda rng: clip(one_round(p, draft, reject, (0,), rng), 2, ()))
        assert tv_outcomes(continued(some, p, (0,), 2), target_law(p, (0,), 2)) > 0
        with pytest.raises(AssertionError, match="stated"): drafter_contract(draft, (0,))

@pytest.mark.parametrize("name", FALSE_ALARMS)
def test_false_alarms_are_false(name):
    "Distance 0; with the ratio test, every edge also states its token's distribution"
    s = FALSE_ALARMS[name]
    assert s.law() == s.want() and (s.verify is match or s.well_stated())

def test_harmless_only_under_match():
    "Two drafts that are lossless with match are not with reject, and their edges are misstated"
    assert len(FALSE_ALARMS) == 17
    names = "unlikely token dropped, verified by match", "token dropped by looking ahead, verified by match"
    for name in names: assert off(WITHHELD[name], verify=reject) > 0 and not WITHHELD[name].well_stated()

# The parts, with their defaults, are the correct rules

SHAPES = st.sampled_from([(1, 1), (2,), (2, 1), (1, 2), (3,)])
DRAWS = st.sampled_from([iid, without_replacement])
PARTS = {   # from parts, the rule, its drafts of a model
    "reject": (Rule, reject, lambda q: st.builds(Plan, st.just(q), plans(2))),
    "block": (BlockRule, block, lambda q: st.builds(Chain, st.just(q), st.integers(1, 3))),
    "traversal": (BottomUpRule, traversal, lambda q: st.builds(Branching, st.just(q), SHAPES, DRAWS)),
}

@pytest.mark.parametrize("name", PARTS)
@settings(max_examples=20)
@given(pair=models(), data=st.data())
def test_the_parts_make_the_rule(name, pair, data):
    from_parts, rule, drafts = PARTS[name]
    draft = data.draw(drafts(pair[1]))
    def tokens(verify, rng):
        tree = draft((0,), rng)
        return verify(pair[0](tree), tree, rng).tokens(tree)
    assert law_of(lambda rng: tokens(from_parts(), rng)) == law_of(lambda rng: tokens(rule, rng))

PUBLISHED = [   # mean accepted tokens of traversal, i.i.d. and without replacement
    (ORDER0, (2,), F(13, 18), F(7, 9)), (ORDER0, (2, 2), F(209, 162), F(115, 81)),
    (ORDER0, (1, 2), F(43, 36), F(11, 9)), (ORDER0, (1, 1), F(7, 6), None),
    (KILLER, (2,), F(13, 16), F(7, 8)),
    (KILLER, (2, 2), F(9439, 7200), F(179, 112)), (KILLER, (1, 2), F(4373, 3600), F(11, 8))]

@pytest.mark.parametrize("pair,shape,independent,distinct", PUBLISHED)
def test_traversal_accepts_the_published_number(pair, shape, independent, distinct):
    for draw, want in ((iid, independent), (without_replacement, distinct)):
        s = replace(TREE_MUTANTS, target=pair[0], drafter=Branching(pair[1], shape, draw))
        assert want is None or s.tokens() - 1 == want

def test_a_strict_comparison_on_a_grid_is_exact():
    "Twelve bits, ratios of 0 or above 1: strict is exact, inclusive is off by one in 3 · 4096"
    strict, inclusive = (off(EDGE, verify=Rule(numbers=Grid(less=how))) for how in (lt, le))
    assert strict == 0 and inclusive == F(1, 3 * 2**12)
    assert (1,) in named("inclusive comparison, <= for <").wrong.law() and (1,) not in EDGE.want()

# Published numbers that are not among the distances of the list

def test_longer_blocks():
    "Three draft tokens on KILLER; the residual of one token is correct on two easy tables"
    three, one = block_of(KILLER, 3), BlockRule(after=residual_of_one)
    wrong = (BlockRule(uncapped), BlockRule(end=first_rejection), one,
             BlockRule(lambda p, t, i, w: (w[i], 1)))
    found = [off(three, verify=v) for v in wrong]
    assert [round(float(d), 4) for d in found] == [.0872, .1620, .0289, .1453] and found[2] == F(13, 450)
    assert all(off(block_of(pair, 2), verify=one) == 0 for pair in (BINARY, ORDER0))
    assert three.tokens() == 1 + F(2359, 1800) and replace(three, verify=reject).tokens() == 1 + F(117, 100)
    assert [round(float(m.off), 4) for m in GALLERY["tree"]] == [.1197, .1012, .1724]   # bottom-up

def test_a_sample_for_every_candidate():
    "Medusa's candidates 0 and 1: the published distribution; an only child is tried twice"
    law = {(0,): F(71, 125), (1,): F(153, 500), (2,): F(21, 250), (3,): F(21, 500)}
    assert named("a target sample for every candidate").wrong.law() == law
    p = CANON[0]
    hit = {(x,): p[0]*(x == 0) + (1 - p[0])*p[x] for x in range(4)}
    assert on_star(points([0], 4, exact=True), 1, each_child).law() == hit

@pytest.mark.parametrize("w", [F(1, 10), F(3, 4)])
def test_a_sample_for_every_path(w):
    "An only child of weight w, on three paths: the distance of each half of the rule, and of both"
    p, paths = exact(1 - w, 0, 0, w), point_paths((3, 0), (3, 1), (3, 2))
    tree = law_of(lambda rng: paths((0,), rng)).popitem()[0]
    def off(verify):
        law = law_of(lambda rng: verify([p]*len(tree), tree, rng).tokens(tree)[0])
        return tv_outcomes(law, {0: 1 - w, 3: w})
    assert off(match) == 0 and off(redrawn_after(match)) == w*(1 - w)
    assert off(each_path) == (1 - w) - (1 - w)**3
    assert off(redrawn_after(each_path)) == (1 - w)*(1 - (1 - w)**3)

def test_a_grammar_that_is_not_rolled_back_gives_invalid_texts():
    "A bracket opened twice; never with the state computed from the text"
    m = named("grammar state not rolled back after a rejection")
    def valid(y): return all(x == 0 or (x == 1) != bracket_state(y[:i]) for i, x in enumerate(y))
    assert all(map(valid, m.right.law())) and [y for y in m.wrong.law() if not valid(y)] == [(1, 0, 1)]

def test_a_begin_token_between_two_rounds():
    "Over n tokens off by the probability that the first round is shorter than n: 11/16 by hand for two"
    m = named("begin token inserted before every draft but the first")
    first = law_of(lambda rng: len(SPELT.round(rng).tokens))
    a, b, ab = F(1, 4), F(1, 4), F(1, 2)   # the target's distribution; the draft is aa, ab, ba or bb
    assert first[1] == 1 - (a + ab + b + b)/4 == F(11, 16) == m.off
    for n in (1, 2, 3):
        wrong = replace(m.wrong, n=n)
        twice = sum(w for y, w in wrong.law().items() if 0 in y)
        assert off(wrong) == sum(w for k, w in first.items() if k < n) == twice

def test_reused_noise_by_another_path():
    "The distribution of a recovered token sampled with the draft's noise, from the joint distribution"
    law = reused_noise_law(*CANON, inverse_cdf_coupling)
    m = named("draft and recovered token share a random number")
    assert m.wrong.law() == {(x,): w for x, w in enumerate(law)}

@examples(25, pairs())
def test_redraws_in_closed_form(pq):
    "Match, then p: pq + (1 - Σpq) p; match, then the residual: pq + (1 - Σpq) r"
    p, q = pq
    chain = on_chain((constant(*p), constant(*q)), 1, n=1)
    for after, r in ((from_r, p), (left_over, residual(p, q))):
        want = {(x,): w for x, w in enumerate(p*q + (1 - (p*q).sum())*r) if w}
        assert replace(chain, verify=Rule(is_sampled, after)).law() == want

@pytest.mark.parametrize("k", [1, 3])
def test_the_warning_of_spectr(k):
    "Siblings verified against p alone: of two equal tokens, a one-hot draft is emitted with 1 - 2^-k"
    p, q = exact(1, 1), exact(1, 0)
    def run(rng):
        tree = Tree((0,))
        tree.grow(0, iid(q), rng, k)
        return siblings_by_p([p]*len(tree), tree, rng).tokens(tree)[0]
    assert law_of(run)[0] == 1 - F(1, 2**k)
