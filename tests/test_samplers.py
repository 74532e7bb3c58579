"Chapters 17ae to 17b: rows, calls, twelve checks that each detect their own bug, and samplers of texts"
import re
from collections import Counter
from fractions import Fraction
from functools import cache, partial
from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import ALPHA, proves, random_table, tempered
from specref.certify.bets import Report
from specref.verify.block import block
from specref.core.check import read_record
from specref.core.rng import Outcomes, law_of, numpy_generator
from specref.certify.counts import detectable, partition, safe_limit
from specref.core.law import exact, overlap, tv
from specref.core.loop import match, rounds
from specref.verify.reject import Chain, reject
from specref.certify.sampler_mutants import INNER_CASE, RIGHT_SAMPLERS, SAMPLER_MUTANTS
from specref.certify.known import Numbers, Rule, from_r, left_over, parent_row
from specref.certify.chain_mutants import of_all, of_place
from specref.certify.sampler_mutants import alias_choice, batch_sampler, by_rows, chain_of_rows, excess
from specref.certify.sampler_mutants import first_child, more_noise, padded_choice as theirs, shared_by_two
from specref.certify.sampler_mutants import rule_on_trees, tree_match, tree_of_rows
from specref.certify.acceptance import BET_SIZES, DETECTED, RELATIONS, STRENGTHS, FewerTokensBet, LearnedBets
from specref.certify.acceptance import PlaceBets, expected_blocks, expected_lengths, relation_chances
from specref.certify.calls import EXPERIMENTS, Interface, Plan
from specref.certify.level import SharedLevel
from specref.certify.output import NOT_RUN, REPEAT_STAKES, RepeatBets, repeat_bets
from specref.certify.robustness import KEPT, EdgeGenerator, SeedGenerator, as_views, lags_below, rows_alike
from specref.certify.robustness import rows_are_independent, rows_have_own_seeds
from specref.certify.rows import CASES, PlaceCase, RowCase, chain_drafts, draw_by_cdf, token_classes
from specref.certify.samplers import CHECKS, GROUPS_OF_CHECKS, Kit, certify_rows, certify_sampler
from specref.certify.samplers import count_false_alarms, default_size, rule_on_rows, text_sampler
from specref.core.target import TableModel, target_law
from specref.core.tree import Tree, iid
from specref.verify.kseq import kseq
from specref.verify.transport import transport
from specref.verify.traversal import traversal

quick = partial(certify_rows, depth=2)   # long drafts where a test is about them

# Samplers of texts

def broken(*parts, **named): return rule_on_rows(Rule(*parts, **named))

THEIRS = {"recovered token from p": broken(after=from_r),
          "p and q exchanged": broken(after=lambda t: np.maximum(t.q - t.r, 0)),
          "everything accepted": broken(accept=lambda t: True),
          "bonus from the previous row": broken(bonus=parent_row),
          "bonus from the draft": broken(bonus=lambda p, tree, i: tree.law[i]),
          "one uniform for all": broken(numbers=Numbers(of_all)),
          "|p - q|": broken(after=lambda t: abs(t.r - t.q))}
big, small = random_table(4, 5, zeros=False), random_table(4, 6, zeros=False)

@pytest.mark.parametrize("f, passes", [(theirs, True), (THEIRS["bonus from the previous row"], False)])
def test_functions_of_rows_are_tested_as_texts(f, passes):
    "Plain numpy in, integers out, on tables of floats; padding is cut"
    p, q = tempered(big, 1.), tempered(small, 1.)
    assert certify_sampler(text_sampler(f, p, q, 2), p, (0,), runs=1200).passes == passes

def test_any_sampler_of_texts():
    "Draws of whole texts: longer ones are cut, stop tokens end them, others are reported"
    want = target_law(big, (0,), 4, (1,))
    texts, weights = list(want), np.array([float(w) for w in want.values()])
    def draw(ctx, n, rng): return texts[rng.choice(len(texts), p=weights)]
    def longer(*a): return *draw(*a), 0, 0
    def shorter(*a): return draw(*a)[:2]
    def unknown(*a): return 7, *draw(*a)
    assert certify_sampler(draw, big, (0,), 4, (1,), runs=2000).passes
    for wrong, words in ((longer, "continues after the stop token 1"), (unknown, "impossible"),
                         (shorter, "which ends after 2 of 4 tokens without a stop token")):
        found = certify_sampler(wrong, big, (0,), 4, (1,), runs=500)
        assert not found.passes and words in found.words
    assert "of 5 tokens where 3 were requested" in certify_sampler(longer, big, (0,), 3, runs=500).words

def test_rows_have_the_shapes_of_the_signature():
    "(gamma + 1, V), (gamma, V), (gamma,), floats; and each drafted token has weight in its row"
    def verify(p, q, x, rng):
        g = len(x)
        assert p.shape == (g + 1, 4) and q.shape == (g, 4) and x.dtype.kind == "i"
        assert p.dtype == q.dtype == float
        if not np.isnan(q).any():
            assert all(q[i, x[i]] > 0 for i in range(g))
            assert np.allclose(p.sum(1), 1) and np.allclose(q.sum(1), 1)
        return theirs(p, q, x, rng)
    assert len(text_sampler(verify, big, small, 3)((0,), 5, numpy_generator(1))) >= 5
    assert quick(verify, gamma=3, runs=50).lines[0].passes

# Classes

def length_law(p, drafter, rule):
    "The exact distribution of the number of tokens of one round"
    return law_of(lambda rng: len(next(rounds(p, drafter, rule, (0,), rng)).tokens))

@cache
def lengths(relation, gamma, rule):
    "The same for a rule on the small table of a case"
    case = RowCase(relation, 4)
    return length_law(case.P, Chain(case.Q, gamma), rule)

def spread(P, Q, V):
    "Rows in fractions over `V` tokens, as `Spread` makes them in floats"
    classes, weights = token_classes(V), [Fraction(3 if x % 7 > 2 else 1) for x in range(V)]
    total = [sum(w for w, c in zip(weights, classes) if c == k) for k in range(4)]
    def of(text): return tuple(int(classes[x]) for x in text)
    def rows(table):
        def law(text):
            p = table.law((text[0], *of(text[1:])))
            return np.array([p[c]*w/total[c] for w, c in zip(weights, classes)], dtype=object)
        return TableModel(V, law)
    return rows(P), rows(Q), of

def row(case, side, y): return case.law(side, y)[case.of]*case.w

@proves("prop-classes")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("V", [4, 7])
def test_classes(name, V):
    "In fractions: classes of a text have the small table's distribution, and its total variation"
    case = RowCase(CASES[name], V)
    p, q, of = spread(case.P, case.Q, V)
    for spread_out, table in ((p, case.P), (q, case.Q)):
        want = {k: w for k, w in target_law(table, (0,), 2).items() if w}
        assert target_law(spread_out, (0,), 2).of(of) == want
    for at in ((0,), (0, 0), (0, V - 1)):
        small = (0, *of(at[1:]))
        a, b = p.law(at), q.law(at)
        assert tv(a, b) == tv(case.P.law(small), case.Q.law(small))
        assert overlap(a, b) == overlap(case.P.law(small), case.Q.law(small))
        for k, r in enumerate((a, b)): assert np.allclose(row(case, k, small[1:]), r.astype(float))
    for rule in (reject, block) if V == 4 else (reject,):
        assert length_law(p, Chain(q, 2), rule) == lengths(CASES[name], 2, rule)

@proves("prop-classes")
def test_block_verification_needs_ratios_alone_too():
    "Its number of tokens on seven tokens, one draft, is the small table's; that of match is not"
    different = CASES["different rows"]
    case = RowCase(different, 7)
    p, q, _ = spread(case.P, case.Q, 7)
    assert length_law(p, Chain(q, 1), block) == lengths(different, 1, block)
    assert length_law(p, Chain(q, 1), match) != lengths(different, 1, match)

@settings(max_examples=10)
@given(st.integers(4, 300))
def test_every_token_has_a_class(V):
    "The ends are alone, the others share two classes; shares sum to one in each"
    classes, case = token_classes(V), RowCase(CASES["equal rows"], V)
    assert classes[0] == 0 and classes[-1] == 3 and set(classes) == {0, 1, 2, 3}
    assert (classes == 0).sum() == (classes == 3).sum() == 1
    assert np.allclose(np.bincount(classes, case.w), 1) and row(case, 0, (2,)).sum() == pytest.approx(1)
    ends = V//2, V - 1
    other = RowCase(CASES["equal rows"], V, *ends)
    assert set(other.of) == {0, 1, 2, 3} and [(other.of == c).sum() for c in (0, 3)] == [1, 1]
    assert other.of[ends[0]] == 0 and np.allclose(np.bincount(other.of, other.w), 1)

def test_rows_differ():
    "From one position to the next, and after another token"
    case = RowCase(CASES["different rows"], 4)
    rows = [tuple(case.law(0, y)) for y in ((), (0,), (1,), (0, 0), (0, 1))]
    assert len(set(rows)) == 5 and (case.law(0, (1, 2)) == case.law(0, (3, 2))).all()

# Correct functions

FEW = {k: CASES[k] for k in ("different rows", "the draft ranks them backwards", "zeros at both ends")}
RIGHT = {"theirs": (theirs, dict(depth=16)), "reject": (rule_on_rows(reject), {}),
         "block": (rule_on_rows(block), dict(like=block)),
         "match": (rule_on_rows(match), dict(like=match, cases=FEW)),
         "block is more than reject": (rule_on_rows(block), dict(cases=FEW, runs=1000))}
STATED = ("detectable distance: total variation", "power 0.999", "token by token, detectable",
          "tokens per call", "no token of probability 0")

@pytest.mark.parametrize("name", RIGHT)
def test_correct_functions_pass(name):
    "All twelve checks, in lines of at most 88 columns"
    f, how = RIGHT[name]
    found = quick(f, **dict(dict(runs=600), **how))
    words = " ".join(found.words.split())
    assert isinstance(found, Report) and found.passes and found.wrong == ()
    want = [(q, None if q == "draft" else True) for q in CHECKS]
    assert [(x.check, x.passes) for x in found.lines] == want
    assert found.title.endswith("rate 1e-09); distribution: ok; acceptance: ok; calls: ok; robustness: ok")
    assert all(s in words for s in STATED)
    assert max(map(len, found.words.splitlines())) <= 88

def test_three_drafts():
    "A correct function passes with its own drafter, an incorrect one fails the check `distribution`"
    assert quick(theirs, gamma=3, runs=500, draft=draw_by_cdf, cases=FEW).passes
    assert "distribution" in quick(THEIRS["recovered token from p"], gamma=3, runs=500, cases=FEW).wrong

@pytest.mark.parametrize("rule", [kseq, transport, traversal])
def test_rules_that_read_how_siblings_were_drawn(rule):
    "Rows are one draft each, drawn from q: the rules of siblings verify them too, and are detected"
    assert quick(rule_on_rows(rule), cases=FEW, runs=300).passes

# Incorrect ones: each fails the checks that concern it, and no other

def reseeded(rng): return np.random.default_rng(rng.bit_generator.seed_seq)

class Racer:
    "Draws by exponential noise that belongs to the generator's seed and to the position"
    def __init__(self): self.drawn = Counter()
    def race(self, w, rng, i):
        noise = np.random.default_rng([*rng.bit_generator.seed_seq.spawn_key, i])
        return int(np.argmin(noise.exponential(size=len(w)) / np.maximum(w, 1e-300)))
    def draft(self, q, rng):
        text = rng.bit_generator.seed_seq.spawn_key
        self.drawn[text] += 1
        return self.race(q, rng, self.drawn[text])
    def verify(self, p, q, x, rng):
        if np.isnan(q).any(): raise ValueError("q: NaN")
        for i in range(len(x)):
            if not rng.random()*q[i, x[i]] < p[i, x[i]]:
                return [*x[:i], self.race(excess(p[i], q[i]), rng, i + 1)]
        return [*x, rng.choice(p.shape[1], p=p[-1])]

racer = Racer()

one_coin = broken(numbers=Numbers(of_place, of_place))   # what rejected a draft samples the recovered token

def verifies_after_rejection(p, q, x, rng):
    "Continues after a rejection, with rows that follow the rejected token"
    tokens = []
    for i, v in enumerate(x):
        tokens.append(int(v) if rng.random()*q[i, v] < p[i, v] else draw_by_cdf(excess(p[i], q[i]), rng))
    return [*tokens, draw_by_cdf(p[-1], rng)]

def fragile(p, q, x, rng):
    "Divides by the residual mass, also when it is zero"
    r = np.maximum(p[:-1] - q, 0)
    if (r.sum(1) == 0).any(): raise ZeroDivisionError("no residual mass")
    return theirs(p, q, x, rng)

def nan_accepts(p, q, x, rng):
    for i in range(len(x)):
        if rng.random()*q[i, x[i]] >= p[i, x[i]]:
            return [*x[:i], draw_by_cdf(np.maximum(p[i] - q[i], 0), rng)]
    return [*x, draw_by_cdf(p[-1], rng)]

def top2(q): return np.where(q >= np.sort(q)[-2], q, 0)

def without_first(p, q, x, rng):
    "Corrects by p without the first drafted token"
    return broken(after=lambda t: np.where(np.arange(len(t.r)) == x[0], 0, t.r))(p, q, x, rng)

def likeliest_excess(t):
    r = left_over(t)
    return r*(r == r.max())

def search_left(w, rng): return int(np.searchsorted(np.cumsum(w), rng.random()*w.sum()))

def search_short(w, rng):
    "By sums that end below 1"
    return int(np.searchsorted(np.cumsum(w/w.sum())*(1 - 1e-12), rng.random(), side="right"))

def numbered(f): return rule_on_rows(Rule(), numbers=lambda rng, x: f(rng))
one_number_twice, tile_masked = (SAMPLER_MUTANTS[name].wrong for name in (
    "one number for both tokens", "rejected token's tile masked"))
def fixed_seed(rng): return np.random.default_rng(1)
def argmax(q, rng): return int(np.argmax(q))
def argmin(q, rng): return int(np.argmin(q))

ONE = {"different rows": CASES["different rows"]}
EQUAL = {"equal rows": CASES["equal rows"]}
own = np.random.default_rng(5)
WRONG = "distribution", "noise"
FLOAT64 = Interface(dtype="float64")
ZEROS = dict.fromkeys(("|p - q|", "p and q exchanged", "everything accepted"), {*WRONG, "zeros"})
FAILED = ZEROS | {"bonus from the previous row": {"distribution"}}
BUGS = {name: (dict(verify=f), FAILED.get(name, {*WRONG})) for name, f in THEIRS.items()} | {
    "q/p": (dict(verify=broken(lambda t: t.coin(t.qx, t.px))), {"distribution", "noise", "zeros"}),
    "accepted iff p >= q": (dict(verify=broken(lambda t: t.qx <= t.px)), {*WRONG, "tokens"}),
    "ratio times 1.5": (dict(verify=broken(lambda t: t.coin(1.5*t.px, t.qx))), {"distribution", "noise"}),
    "p without the token": (dict(verify=without_first, runs=2000), {"distribution", "noise"}),
    "likeliest recovered token": (dict(verify=broken(after=likeliest_excess)), {"distribution", "noise"}),
    "q of the next row": (dict(verify=lambda p, q, x, rng: theirs(p, np.roll(q, 1, 0), x, rng)),
                          {"distribution", "noise"}),
    "one uniform number for draft and recovered token": (dict(verify=one_coin, runs=1000),
                                                         {"distribution", "noise"}),
    "verifies after a rejection": (dict(verify=verifies_after_rejection, runs=100), {"form"}),
    "one token too many": (dict(verify=lambda p, q, x, rng: [*x, 0, 0], runs=100), {"form", "nan"}),
    "no token": (dict(verify=lambda p, q, x, rng: [-1], runs=100), {"form"}),
    "halves": (dict(verify=lambda p, q, x, rng: [.5], runs=100), {"form"}),
    "fails on equal rows": (dict(verify=fragile, cases=EQUAL, runs=50), {"form"}),
    "outside of the vocabulary": (dict(verify=lambda p, q, x, rng: [4]),
                                  {"form", "distribution", "noise", "seeds", "tokens", "nan"}),
    "no bonus": (dict(verify=lambda p, q, x, rng: theirs(p, q, x, rng)[:len(x)], runs=300), {"tokens"}),
    "the target alone": (dict(verify=lambda p, q, x, rng: [draw_by_cdf(p[0], rng)]), {"tokens"}),
    "match, stated as reject": (dict(verify=rule_on_rows(match), like=reject), {"tokens"}),
    "reject, stated as block": (dict(verify=rule_on_rows(reject), like=block, gamma=8, runs=600, cases=ONE),
                                {"tokens"}),
    "seeds itself with the same seed": (dict(verify=numbered(reseeded)), {"noise"}),
    "one race for draft and last token": (dict(verify=racer.verify, draft=racer.draft, runs=3000, cases=ONE),
                                          {"noise"}),
    "the likeliest token, stated as drawn": (dict(verify=theirs, draft=argmax), {"noise", "draft"}),
    "from the top 2, stated as drawn": (dict(verify=theirs, draft=lambda q, rng: draw_by_cdf(top2(q), rng)),
                                        {"draft"}),
    "a token of weight 0": (dict(verify=theirs, draft=argmin), {"noise", "draft"}),
    "random numbers of its own": (dict(verify=numbered(lambda rng: own), runs=300), {"seeds"}),
    "always one seed": (dict(verify=numbered(fixed_seed)), {"distribution", "noise", "seeds", "tokens"}),
    "writes in p": (dict(verify=SAMPLER_MUTANTS["bonus row scaled in p"].wrong, runs=300), {"rows"}),
    "u <= p/q": (dict(verify=broken(lambda t: t.rng.generator.random()*t.qx <= t.px), runs=300), {"zeros"}),
    "search from the left": (dict(verify=rule_on_rows(Rule(), search_left), runs=300), {"zeros"}),
    "the last sum below 1": (
        dict(verify=rule_on_rows(Rule(), search_short), runs=99, interface=FLOAT64), {"zeros"}),
    "NaN accepts": (dict(verify=nan_accepts, runs=300), {"nan"}),
}

# Other interfaces, and bugs that need a certain one

FIRST = {"different rows": CASES["different rows"]}

reports = {}   # several bugs have one right function

def report_on(verify, runs, how):
    key = verify, runs, str(how)
    if key not in reports: reports[key] = quick(verify, runs=runs, **dict(cases=FIRST, depth=2) | how)
    return reports[key]

@pytest.mark.parametrize("name", SAMPLER_MUTANTS)
def test_each_door_finds_its_bug(name):
    "The wrong function fails the check, the right one passes with the same runs"
    bug = SAMPLER_MUTANTS[name]
    assert bug.found(bug.runs)
    found = report_on(bug.right, bug.runs, bug.how)
    assert found.passes_distribution and found.passes_acceptance and bug.by not in found.wrong, found

def test_what_could_see_nothing_does_not_pass():
    "One run in each case: no check failed, and the report is too weak; it also says what was not called"
    found = certify_rows(theirs, runs=1, depth=2)
    assert not found.passes and not found.wrong and "distribution" in found.weak and "TOO WEAK" in found.words
    enough = certify_rows(theirs, runs=600, depth=2)
    assert enough.passes and "not called with: drafts of more than 2 tokens, special tokens" in enough.words

class Token:
    "A number as a tensor is one"
    def __init__(self, x): self.x = x
    def __index__(self): return self.x

def test_a_drafter_may_return_tensors():
    plan = Plan(drafter=lambda q, rng: Token(draw_by_cdf(q, rng)), runs=60, cases=FIRST)
    assert Kit(theirs, plan).finding("draft").passes is not False

def test_texts_that_share_random_numbers():
    "Two requests with one seed return one text; each alone has the right distribution"
    made = []
    def sample(ctx, n, rng):
        made.append(rng.integers(4, size=n) if len(made) % 2 == 0 else made[-1])
        return made[-1]
    found = certify_sampler(sample, FAIR_TABLE, (0,), n=2, runs=2000)
    assert not found.passes and found.test.fits and "texts 1 runs apart share random numbers" in found.words
    assert found.verdict == "TEXTS DEPEND ON ONE ANOTHER"
FAIR_TABLE = TableModel(4, lambda text: exact(1, 1, 1, 1))

def of_text(step, cut=True):
    "A sampler of texts: one token after another by `step(p, text, rng)`"
    def sample(ctx, n, rng):
        text = tuple(ctx)
        while len(text) < len(ctx) + n and not (cut and text[-1] in STOP and len(text) > len(ctx)):
            text += (step(np.asarray(big.law(text), float), text, rng),)
        return text[len(ctx):]
    return sample

STOP = 1,
def right_step(p, text, rng): return draw_by_cdf(p, rng)
def same_every_round(p, text, rng): return draw_by_cdf(p, np.random.default_rng(rng.bit_generator.seed_seq))
def wrong_when_long(p, text, rng): return draw_by_cdf(p if len(text) < 8 else p*p, rng)

TEXTS = {   # a wrong sampler, the tokens of its context
    "noise keyed without the round": (of_text(same_every_round), 1),
    "wrong after eight tokens": (of_text(wrong_when_long), 8),
    "stops at the end of a block": (of_text(right_step, cut=False), 1)}

@pytest.mark.parametrize("name", TEXTS)
def test_samplers_of_texts(name):
    sample, n = TEXTS[name]
    for f, passes in ((sample, False), (of_text(right_step), True)):
        assert certify_sampler(f, big, (0,)*n, 4, STOP, runs=2000).passes == passes

def every_seventeenth(p, text, rng): return draw_by_cdf(p*p if len(text) % 17 == 16 else p, rng)

def test_what_the_texts_do_not_reach():
    "Wrong at every 17th token: the cells of 20 tokens end before it; a context of 16 puts it first"
    sample = of_text(every_seventeenth)
    found = certify_sampler(sample, big, (0,), 20, STOP, runs=400)
    assert found.passes and found.mass_in_shared_cells > .3
    assert not certify_sampler(sample, big, (0,)*16, 3, STOP, runs=1000).passes

def test_equal_rows_are_given_as_one_array():
    "Views of one buffer overlap where target and draft are equal, and do not elsewhere"
    for relation, shared in (("equal rows", True), ("different rows", False)):
        d = chain_drafts(RowCase(CASES[relation], 4), 3, 2, numpy_generator(1))
        before = d.p.copy(), d.q.copy()
        p, q, _ = as_views((d.p, d.q, d.x))
        assert np.array_equal(p, before[0]) and np.array_equal(q, before[1])
        assert np.shares_memory(p, q) == shared and (shared or p.base is q.base)

def test_long_drafts_agree_above_a_place():
    "One token above the place, half of the mass in common from there on; peaks move with the token before"
    case, half = PlaceCase(3, 4), Fraction(1, 2)
    rows = [case.pair((0, *y)) for y in ((), (0,), (0, 3), (0, 3, 3), (0, 3, 3, 1), (0, 3, 3, 2))]
    assert [overlap(*pair) for pair in rows] == [1, 1, 1, half, half, half]
    peaks = [int(np.argmax(p)) for p, _ in rows]
    assert peaks[3] == case.peak == (3 + 3) % 4 and peaks[4] != peaks[5]

def test_the_rule_is_detected():
    "Speculative sampling and block verification accept where rows are equal; match seldom does"
    how = dict(cases=FIRST, runs=100, depth=1)
    for rule, name in ((reject, "reject"), (block, "reject"), (match, "match")):
        assert f"({name}, detected" in " ".join(quick(rule_on_rows(rule), **how).words.split())
    assert quick(rule_on_rows(match), like=reject, **how | dict(runs=600)).passes_distribution
    assert not quick(rule_on_rows(match), like=reject, **how | dict(runs=600)).passes_acceptance

def gumbel(p, q, x, rng):
    "Recovered and bonus tokens by an exponential race, which takes a noise for each token"
    def race(w):
        noise = -np.log(rng.random(len(w)))
        return int(np.argmin(np.divide(noise, w, out=np.full(len(w), np.inf), where=w > 0)))
    for i in range(len(x)):
        if not rng.random()*q[i, x[i]] < p[i, x[i]]: return [*x[:i], race(excess(p[i], np.nan_to_num(q[i])))]
    return [*x, race(p[-1])]

def half_precision(p, q, x, rng):
    "Uniform numbers, rows and sums in float32, as in SGLang's kernels"
    p, q, u = p.astype(np.float32), q.astype(np.float32), rng.random(len(x) + 1).astype(np.float32)
    k = next((i for i, v in enumerate(x) if not u[i]*q[i, v] < p[i, v]), len(x))
    r = np.maximum(p[k] - np.nan_to_num(q[k]), 0) if k < len(x) else p[k]
    c = r.cumsum(dtype=np.float32)
    return [*x[:k], int(np.searchsorted(c, u[-1]*c[-1], side="right"))]

@pytest.mark.parametrize("f", [gumbel, half_precision, more_noise])
def test_correct_functions_of_other_kinds_are_not_rejected(f):
    "An infinite noise of an impossible token, a uniform number rounded to 1, and extra noise are no failure"
    with np.errstate(all="ignore"): found = quick(f, cases=FEW, runs=300, depth=2)
    assert not found.wrong
    if f is half_precision:
        assert "`dtype` states which applies" in " ".join(found.words.split())
        assert not quick(f, cases=FEW, runs=100, interface=FLOAT64).passes_robustness
        assert not quick(f, cases=FEW, runs=100, interface=Interface(dtype="float32")).wrong

def test_interfaces_may_be_combined():
    "Padded batches with a drafter and special tokens, and trees of independent siblings"
    assert quick(batch_sampler, V=70, gamma=4, cases=FIRST, runs=200, draft=draw_by_cdf, special=(7, 69),
                 interface=Interface(batch=8, padded=True)).passes
    assert quick(tree_of_rows, cases=FIRST, runs=200, interface=Interface("parents", siblings=iid)).passes

def test_false_alarms_are_counted():
    "Right functions in turn, at the usual rate and at 1/5; a wrong function is an alarm in every report"
    right = count_false_alarms(RIGHT_SAMPLERS, len(RIGHT_SAMPLERS), (ALPHA, .2), 60)
    assert [row["alarms"] for row in right["counts"]][0] == 0 and right["functions"] == [*RIGHT_SAMPLERS]
    assert right["counts"][1]["alarms"] <= len(RIGHT_SAMPLERS)*.2 + 6
    wrong = count_false_alarms({"wrong": (THEIRS["p and q exchanged"], {})}, 1, runs=300)
    assert all(row["alarms"] == 1 for row in wrong["counts"])

def test_stored_false_alarms():
    "The stored counts concern the right functions of today, 1,000 reports at each rate"
    stored = read_record("false_alarms")
    assert stored["functions"] == [*RIGHT_SAMPLERS] and re.fullmatch(r"20\d\d-\d\d-\d\d", stored["date"])
    for row in stored["counts"]:
        limit = 1000*row["alpha"] + 4*np.sqrt(1000*row["alpha"])
        assert row["reports"] == 1000 and row["alarms"] == sum(row["of"].values()) <= limit

LONG = set(), {"position", "gates"}   # what fails `distribution` may fail with long drafts and other rows too

def renamed(move):
    "The extra token under another name; the accepted drafts as they are"
    def verify(p, q, x, rng):
        *accepted, y = [v for v in theirs(p, q, x, rng) if v >= 0]
        return [*accepted, move(int(y), p.shape[1])]
    return verify

def two_further_on(y, V): return y + 2 if 0 < y < V - 3 else y
def first_of_class(y, V): return int(np.argmax(token_classes(V) == token_classes(V)[y]))

def few_of_class(y, V):
    same = np.flatnonzero(token_classes(V) == token_classes(V)[y])
    return int(same[np.searchsorted(same, y) % 14])

@pytest.mark.parametrize("move, V", [(two_further_on, 8), (few_of_class, 64), (first_of_class, 1000)])
def test_a_token_is_more_than_its_class(move, V):
    "Incorrect within a class, correct at the ends: `distribution` fails, for few tokens and for many"
    assert "distribution" in quick(renamed(move), V=V, cases=FEW, runs=1000).wrong

@proves("prop-classes")
@pytest.mark.parametrize("rule, V", [(reject, 1000), (block, 8)])
def test_correct_rules_pass_within_classes(rule, V):
    "The distance that is detectable within a class is stated"
    found = quick(rule_on_rows(rule), V=V, cases=FEW, runs=800, like=None)
    words = " ".join(found.words.split())
    assert found.passes and "cells of classes" in words
    assert 0 < float(words.split("within a class total variation ")[1][:5]) < .5

def test_no_power_is_claimed_where_there_is_none():
    "Ten runs fill one cell, without power: no ok, and no distance; the bets may still reject"
    line = quick(rule_on_rows(reject), runs=10, cases={"a": CASES["different rows"]}).lines[1]
    assert line.passes is None and "total variation" not in line.words
    no_power = "more runs are needed: no distance is detectable in the case 'a' with 10 runs"
    assert line.words.startswith(f"no difference detected, but {no_power}")
    rarest = quick(lambda p, q, x, rng: [int(np.argmin(p[0]))], runs=10,
                          cases={"a": CASES["nothing in common"]})
    assert rarest.lines[1].passes is False

@pytest.mark.parametrize("V", [4, 90])
@pytest.mark.parametrize("rule", [reject, block, match])
@pytest.mark.parametrize("name", ["different rows", "zeros at both ends", "a draft of one token"])
def test_the_length_after_a_draft(name, rule, V):
    "The lengths expected after each draft, summed over all drafts of two, have the exact distribution"
    case, law = RowCase(CASES[name], 4), Outcomes()
    for x, v in target_law(case.Q, (0,), 2).items():
        for k, w in expected_lengths(case, x, (1., 1.), rule).items(): law[k] = law.get(k, 0) + float(v*w)
    want = lengths(CASES[name], 2, rule)
    assert all(abs(law.get(k, 0) - float(want.get(k, 0))) < 1e-12 for k in (1, 2, 3))
    big = RowCase(CASES[name], V)
    d = chain_drafts(big, 1, 3, numpy_generator(1))
    rows, x, tree = d.p[0], d.x[0], chained(d.q[0], d.x[0])
    tokens = law_of(lambda rng: len(rule(rows, tree, rng).tokens(tree)))
    short = expected_lengths(big, tuple(d.at[0, 1:].tolist()), tuple(big.w[x]), rule)
    assert all(abs(tokens.get(k, 0) - short.get(k, 0)) < 1e-9 for k in range(1, 5))

def chained(q, x):
    "A chain of given tokens and rows"
    tree = Tree((0,))
    for i, v in enumerate(x): tree.grow(i, iid(q[i]), SimpleNamespace(pick=lambda law, at: int(v)))
    return tree

def test_long_drafts():
    "Eight drafts, 90 tokens: block verification has its own length; the loss that is stated is detected"
    how = dict(V=90, gamma=8, cases=ONE, runs=350, like=block)
    found = quick(rule_on_rows(block), **how)
    words = " ".join(found.words.split())
    assert found.passes and found.lines[2].passes is True and "on the same drafts" in words
    least = float(re.search(r"a function that drops the draft in ([\d.]+)%", words)[1]) / 100
    def drops(p, q, x, rng):
        if rng.random() < least + .02: return [draw_by_cdf(p[0], rng)]
        return rule_on_rows(block)(p, q, x, rng)
    assert least < .9 and quick(drops, **how).wrong == ("tokens",)

def test_the_bet_on_fewer_tokens_is_fair():
    "Its mean wealth under the rule itself is 1, for every stake"
    case, forks = RowCase(CASES["different rows"], 4), 0
    for x in ((1, 2, 1), (2, 2, 0), (3, 0, 3)):
        law, mean = expected_blocks(case, x, (1., 1., 1.), block), np.zeros(len(BET_SIZES))
        for y, w in law.items():
            bet = FewerTokensBet()
            bet.place(law, {y: 1})
            mean += w*np.exp(bet.log)
        assert np.allclose(mean, 1)
        if len(law.of(len)) == 1: continue
        full, none, forks = FewerTokensBet(), FewerTokensBet(), forks + 1
        full.place(law, {(0,)*4: 100})
        none.place(law, {(0,): 100})
        assert full.wealth < 1 < none.wealth and 0 < none.share(10.) <= 1
        assert (full.emitted, full.due) == (4, pytest.approx(law.of(len).mean()))
    assert forks

# The draft and what is emitted after it, together

def placed(strengths, *calls):  # (key, law, outcomes) -> wealth of each strength
    bets = LearnedBets()
    for key, law, found in calls: bets.place(key, law, Counter(found))
    return np.exp(bets.log)

@proves("prop-learned")
def test_learned_bets_are_fair():
    "The mean wealth is 1, over all outcomes of calls with two distributions; less for one below the floor"
    a, b = dict(enumerate((.5, .3, .2))), dict(enumerate((.1, .6, .3)))
    rare = {0: .7, 1: .3 - 1e-9, 2: 1e-9}
    for laws, want in (((a, a, a), 1), ((a, b, a), 1), ((a, rare, rare), .9)):
        mean = np.zeros(len(STRENGTHS))
        for ys in product(range(3), repeat=3):
            weight = prod(law[y] for law, y in zip(laws, ys))
            mean += weight*placed(None, *(("key", law, [y]) for law, y in zip(laws, ys)))
        assert (mean <= 1 + 1e-9).all() and (mean >= want - 1e-9).all()

@proves("prop-learned")
def test_learned_bets_in_any_order():
    "All at once, one by one and backwards; the factor of one outcome is its weight over the stated one"
    law, ys = dict(enumerate((.5, .3, .2))), (0, 0, 2, 1, 0, 2)
    at_once = placed(None, ("key", law, ys))
    for order in (ys, ys[::-1]):
        assert np.allclose(at_once, placed(None, *(("key", law, [y]) for y in order)))
    seen, wealth = Counter(), 1
    for i, y in enumerate(ys):
        wealth = wealth*(STRENGTHS*law[y] + seen[y])/(STRENGTHS + i)/law[y]
        seen[y] += 1
    assert np.allclose(at_once, wealth)
    assert np.allclose(placed(None, (1, law, ys), (2, law, ys)), at_once**2)   # other keys learn nothing

def test_places_are_bet_on_as_single_events():
    "The probability that two tokens share a cell, by counting tokens; and bets on all calls at once"
    case, rng = RowCase(CASES["different rows"], 150), numpy_generator(3)
    x, y = rng.integers(150, size=(2, 60))
    x, y = x[x != y], y[x != y]
    for relate, size in product(RELATIONS.values(), (64, 128)):
        cell = relate(np.arange(150), size)
        chances, hits = relation_chances(case, x, y, cell)
        for i, (a, b) in enumerate(zip(x, y)):
            others = (case.of == case.of[b]) & (np.arange(150) != a)
            assert chances[i] == pytest.approx(case.w[others & (cell == cell[a])].sum()/case.w[others].sum())
        one, many = PlaceBets(), PlaceBets()
        for chance, hit in zip(chances, hits): one.place(float(chance), int(hit))
        many.place_all(chances, hits)
        assert np.allclose(one.log, many.log) and np.allclose(one.sums[:4], many.sums[:4])

def pieces(p, q, n=3000):  # -> (V, V): probability of the draft token and the token returned
    "The joint distribution of `one_number_twice` with one draft token, by the midpoints of `n` numbers"
    joint = np.zeros((len(p), len(p)))
    for v, u in product(range(len(p)), (np.arange(n) + .5)/n):
        rng = SimpleNamespace(random=lambda u=u: u)
        y = one_number_twice(np.array([p, p]), np.array([q]), [v], rng)[0] if q[v] else 0
        joint[v, y] += q[v]/n
    return joint

def test_one_number_for_both_tokens_has_the_right_distribution():
    "The output is the target's, the acceptance that of the rule, and the pairs are others"
    case = RowCase(CASES["the draft ranks them backwards"], 4)
    p, q = case.law(0, ()), case.law(1, ())
    joint = pieces(p, q)
    assert np.allclose(joint.sum(0), p, atol=2e-3)
    assert np.allclose(np.diag(joint), np.minimum(p, q), atol=2e-3)
    rejected, r = np.maximum(q - p, 0), excess(p, q)/excess(p, q).sum()
    assert abs(joint - np.diag(np.diag(joint)) - np.outer(rejected, r)).sum()/2 > .1

def last_child_first(p, tree, rng):
    "Independent siblings in reverse order: lossless, and in the mean as many tokens"
    for children in tree.kids: children.reverse()
    return reject(p, tree, rng)

PAIRS = {   # a sampler whose pairs alone are wrong, a right one, and how both are called
    "one number": (one_number_twice, chain_of_rows, dict(cases=FEW, runs=300)),
    "one number, stated rule": (one_number_twice, theirs, dict(cases=FEW, runs=300, like=reject)),
    "one number, longer drafts": (one_number_twice, theirs, dict(cases=FEW, runs=600, gamma=4)),
    "one number, 90 tokens": (one_number_twice, theirs, dict(cases=FEW, runs=500, V=90)),
    "a tile of 64": (tile_masked, chain_of_rows,
                     dict(V=4096, gamma=1, cases=INNER_CASE, runs=3000)),
    "siblings in reverse": (rule_on_trees(last_child_first), tree_of_rows, dict(
        cases=FEW, runs=400, like=reject, interface=Interface("parents", siblings=iid)))}

@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    "`joint` fails alone: no other check detects the wrong function; the right one passes"
    wrong, right, how = PAIRS[name]
    with np.errstate(all="ignore"): found = quick(wrong, **how)
    assert set(found.wrong) - {"nan"} == {"joint"}, found
    assert found.passes_distribution and "joint" not in quick(right, **how).wrong

def test_first_children_alone_lose_tokens():
    "A tree whose second children are never tried has the right distribution: `tokens` fails alone"
    found = quick(first_child, cases=FEW, runs=600, interface=Interface("parents"))
    assert found.wrong == ("tokens",) and "(reject on the same drafts)" in " ".join(found.words.split())

def test_the_rule_of_trees_is_detected():
    for f, layout, name in ((tree_of_rows, "parents", "reject"), (tree_match, "links", "match")):
        found = quick(f, cases=FIRST, runs=100, depth=1, interface=Interface(layout))
        assert not found.wrong and f"({name}, detected" in " ".join(found.words.split())

def test_what_is_not_compared():
    "Trees of many tokens, rules of too many paths, no rule; and pairs where another check failed"
    def forks(p, tree, rng): return [rng.coin(.5) for _ in range(12)] and reject(p, tree, rng)
    how = dict(cases=FIRST, runs=60, depth=1, interface=Interface("parents"))
    for more, words in ((dict(V=8), "on four tokens only"), (dict(like=forks), "paths of forks on a tree"),
                        (dict(like=None), "no rule")):
        lines = {l.check: l for l in quick(tree_of_rows, **how | more).lines}
        assert lines["tokens"].passes is None and words in lines["tokens"].words
        assert lines["joint"].passes is None
    lines = {l.check: l for l in quick(THEIRS["everything accepted"], cases=FEW, runs=600).lines}
    assert lines["joint"].words == "not compared, because the check distribution failed"

@pytest.mark.parametrize("rule", [match, block])
def test_pairs_where_the_shares_matter(rule):
    "On 90 tokens `match` accepts the likelier tokens of a class more often; its pairs are its own"
    found = quick(rule_on_rows(rule), V=90, like=rule, cases=FEW, runs=500)
    assert found.passes and {l.check: l.passes for l in found.lines}["joint"]

def test_the_stated_distance_of_pairs_is_detected():
    "A function whose final token is off by a little more than the stated distance, after every draft"
    laws = exact(1, 1, 0, 0), exact(0, 0, 1, 1)
    how = dict(gamma=1, runs=1000, depth=1, cases={"apart": lambda p, q: laws})
    words = " ".join(quick(theirs, **how).words.split())
    off = float(re.search(r"off by total variation ([\d.]+)", words)[1])
    def often(p, q, x, rng):   # the pairs (2, 0) and (3, 1) alone: off by one half
        return (one_number_twice if rng.random() < 2*off + .02 else theirs)(p, q, x, rng)
    assert off < .3 and all("joint" in quick(often, seed=s, **how).wrong for s in range(3))

def test_no_draft_in_rows():
    p, rng = np.array([[0., 1., 0.]]), numpy_generator(0)
    assert rule_on_rows(reject)(p, np.zeros((0, 3)), np.zeros(0, int), rng) == (1,)

@pytest.mark.parametrize("name", BUGS)
def test_each_bug_fails_its_checks(name):
    "The checks that concern it, and no other"
    how, checks = BUGS[name]
    with np.errstate(all="ignore"): found = quick(**dict(dict(cases=FEW, runs=700), **how))
    assert set(found.wrong) - LONG[bool({"distribution"} & checks)] == checks, found
    groups = {CHECKS[name].group for name in found.wrong}
    assert groups == {g for g in GROUPS_OF_CHECKS if not getattr(found, f"passes_{g}")}

def test_long_vocabularies():
    "150,000 tokens, 80 runs: a correct kernel passes, one that omits the last tile does not"
    right = chain_of_rows
    def tiled(p, q, x, rng):
        p = p.copy()
        p[:, p.shape[1]//1024*1024:] = 0
        return right(p / p.sum(1, keepdims=True), q, x, rng)
    laws = exact(1, 1, 1, 7), exact(7, 1, 1, 1)
    how = dict(V=150_000, gamma=1, runs=80, depth=1, cases={"the ends": lambda p, q: laws})
    found = quick(right, **how)
    assert "distribution" not in found.wrong and found.title.startswith("150,000 tokens")
    assert float(" ".join(found.words.split()).split("total variation ")[1][:5]) < tv(*laws)
    assert "distribution" in quick(tiled, **how).wrong

def test_the_distance_in_the_report_is_computed():
    "The detectable distance in the report is that of 1,000 runs on the cells of the case"
    words = " ".join(quick(theirs, runs=1000, cases=ONE).words.split())
    cells = partition(RowCase(CASES["different rows"], 4).P, (0,), 3, 1000)
    w = tuple(float(v) for v in cells.weight.values())
    distance = detectable(1000, len(w) - 1, safe_limit(1000, w, ALPHA/(2 + 12 + 2*3 + 1)))
    assert f"total variation {distance:.3f}" in words and f"up to {len(w)} cells" in words

def test_false_alarms_at_a_measurable_rate():
    "At alpha = 1/5 for the whole report, 20 reports on a correct function"
    how = dict(gamma=1, cases=ONE, runs=120, depth=2, alpha=.2, draft=draw_by_cdf)
    alarms = sum(not quick(theirs, seed=s, **how).passes for s in range(20))
    assert alarms <= 20*.2 + 6*np.sqrt(20*.2*.8)

@proves("prop-level")
@pytest.mark.parametrize("how", [{}, dict(V=200, special=(7, 199), gamma=3), dict(depth=4, cases=ONE),
                                 dict(V=5000, interface=Interface("parents"), cases=FEW)])
def test_the_tests_of_a_report_are_counted(how):
    "The sum of what the checks plan, against the count by hand; and no check takes more than it planned"
    plan = Plan(**how)
    cells = ["parts", *(size for size in (64, 128, 1024) if size < plan.V)]
    within = 2*(plan.gamma + 1)*(len(cells) + 4) if plan.V > 4 else 0   # classes, positions, cells and parts
    places, bets, streams = 2*(plan.depth + 1), 5, 1   # tokens, places, regions, pairs, one draft
    by_hand = 2*len(plan.made) + within + places + bets + 1 + 2*2 + streams + 2
    assert Kit(None, plan).level.rate == ALPHA/by_hand == ALPHA/sum(c.tests(plan) for c in CHECKS.values())

def test_edges():
    "One number is the edge, of a call, of an array or in place; the others are random"
    e, out = EdgeGenerator(2), np.ones(3)
    assert e.random() > 0 and e.random(out=out) is out and out[1] == 0 and out[[0, 2]].all() and e.drawn == 4
    assert EdgeGenerator(0).uniform(2., 3.) == 2. and EdgeGenerator(0).choice(4, p=[0, .5, .5, 0]) == 1
    assert EdgeGenerator(0, True).choice(4, p=[0, .5, .5, 0]) == 2
    assert EdgeGenerator(0, True).random() == 1 - 2.**-53
    assert EdgeGenerator(0, True).random(dtype=np.float32) == np.float32(1 - 2.**-24) < 1

def test_seeds_that_agree_in_low_bits():
    "Whole numbers with equal low bits, of any range, and different high ones"
    for bits, high in ((8, 2**63), (24, 2**31), (8, 1000)):
        numbers = [int(SeedGenerator(k, bits).integers(high)) for k in range(40)]
        assert all(0 <= n < high for n in numbers) and len(set(numbers)) > 1
        if high > 1000: assert len({n % 2**bits for n in numbers}) == 1

def sixteen_bits(w, rng):
    "By two whole numbers of 16 bits"
    high, low = rng.integers(2**16, size=2).tolist()
    return draw_by_cdf(w, SimpleNamespace(random=lambda: (2**16*high + low)/2**32))

@pytest.mark.parametrize("find", [alias_choice, sixteen_bits])
def test_small_whole_numbers_are_no_seeds(find):
    "A right function that requests numbers below V, or of 16 bits, passes; a seed of 32 bits is mixed"
    assert not quick(rule_on_rows(Rule(), find), cases=ONE, runs=100, depth=1).wrong
    assert {int(SeedGenerator(k, 8).integers(2**16)) % 256 for k in range(9)} != {0}
    for kind in (np.int32, np.uint32, np.int64, "uint64"):
        assert len({int(SeedGenerator(k, 8).integers(2**31 - 1, dtype=kind)) % 256 for k in range(9)}) == 1

def test_a_generator_for_each_seed():
    "The natural right function of a batch passes; with a drafter its numbers are those of the draft"
    how = dict(cases=ONE, runs=600, interface=Interface(batch=64))
    found = {l.check: l for l in quick(by_rows, **how).lines}
    assert found["seeds"].passes and "rows of a batch are independent" in found["seeds"].words
    assert found["noise"].passes is None and "np.random.default_rng(its seed)" in found["noise"].words
    assert "noise" in quick(by_rows, draft=draw_by_cdf, **how).wrong

def words_of(check, verify, **how):
    result = Kit(verify, Plan(**dict(cases=ONE) | how)).finding(check)
    return result.passes, result.words

def test_rows_of_a_batch_share_nothing():
    "Coincidences at each distance of rows, and one seed changed at a time; all seeds together are allowed"
    how = dict(runs=100, interface=Interface(batch=64))
    for share, lag in ((lambda s: s + np.roll(s, 3), 0), (lambda s: s[np.arange(len(s)) % 32], 32)):
        def verify(P, Q, X, seeds, share=share): return by_rows(P, Q, X, share(seeds))
        calls = Kit(verify, Plan(cases=ONE, **how)).calls
        assert rows_are_independent(calls, SharedLevel(ALPHA, seeds=30))[0] == (lag == 0)
        assert not (lag and rows_have_own_seeds(calls, SharedLevel(ALPHA, seeds=30))[0])
    def together(P, Q, X, seeds): return by_rows(P, Q, X, np.minimum(seeds, seeds[np.arange(len(seeds)) ^ 1]))
    kit = Kit(together, Plan(cases=ONE, **how))
    assert "rows 1 apart in a batch share random numbers" in rows_are_independent(kit.calls, kit.level)[1]
    assert "does not depend on its own seed" in words_of("seeds", shared_by_two, **how)[1]
    assert "a row depends on the seeds beside it too" in words_of("seeds", batch_sampler, **how)[1]
    assert "seeds beside it" not in words_of("seeds", by_rows, **how)[1]

def test_pairs_of_rows_are_disjoint():
    "Every row is in at most one pair; all pairs of a distance are in one of the two halves"
    assert lags_below(5) == [1, 2, 3, 4] and lags_below(300)[-3:] == [64, 128, 256] and not lags_below(1)
    for lag in (1, 3, 8):
        sizes = [rows_alike(np.arange(20)[None], lag, parity, .5) for parity in (0, 1)]
        assert sum(n for *_, n in sizes) == 20 - lag and all(same == 0 for _, same, _ in sizes)
    p, same, n = rows_alike(np.array([[1, 1, 2, 2, -1, -1, 3, 4]]), 1, 0, .5)
    assert (same, n) == (2, 3) and p == pytest.approx(.5)

def test_the_bet_on_repeats_is_fair():
    "Its mean wealth over all texts of equally likely tokens is 1 for every stake"
    total = np.zeros(len(REPEAT_STAKES))
    for tokens in product(range(3), repeat=5):
        bets = repeat_bets(np.array(tokens), np.full(3, 1/3))
        total += np.exp(bets.gain(bets.again, bets.seen))
    assert np.allclose(total/3**5, 1)
    bets = repeat_bets(np.array([5, 1, 5, 0, 1, 9]), np.array([0, .2, .2, .2, .2, .2]))   # 0, 9: impossible
    assert bets.again.tolist() == [False, False, True, True] and bets.most == pytest.approx(.2)

def test_the_stated_number_of_streams_is_detected():
    "So many generators, each with one token of 4,096: nearly every time; and random numbers never"
    n, V, rng = 2000, 4096, numpy_generator(8)
    row = np.full(V, 1/V)
    most = RepeatBets(V, 1/V, np.zeros(n, bool), np.zeros(n)).streams(1e10)
    found = [repeat_bets(rng.integers(V, size=most)[rng.integers(most, size=n)], row).wealth > 1e10
             for _ in range(200)]
    assert most == 4096 and np.mean(found) > .98
    assert not any(repeat_bets(rng.integers(V, size=n), row).wealth > 1e3 for _ in range(100))

def test_sizes_follow_the_vocabulary():
    "Fewer runs and places for long rows; the calls that are planned are made"
    assert default_size(4) == default_size(10_000) == (4000, 13) and default_size(50_000) == (1000, 5)
    assert default_size(128_000) == default_size(50_000, tree=True) == (400, 5)
    for f, how in ((theirs, {}), (batch_sampler, dict(interface=Interface(batch=8), drafter=draw_by_cdf))):
        calls = []
        kit = Kit(f, Plan(runs=40, depth=2, cases=ONE, **how), tick=calls.append)
        for check in ("form", "position", "gates", "noise", "tokens"): kit.finding(check)
        assert sum(calls) == kit.plan.calls and {*kit.calls.made} == {*EXPERIMENTS}

def lists(P, Q, X, seeds): return [[v for v in row if v >= 0] for row in by_rows(P, Q, X, seeds).tolist()]

def kept_where_equal(p, q, x, rng, calls=[]):
    "A number of the call before, where target and draft are equal"
    calls.append(rng.random())
    return [*x, int(calls[-2]*p.shape[1])] if len(calls) > 1 and (p[:-1] == q).all() else theirs(p, q, x, rng)

def test_words_for_what_went_wrong():
    "State, ragged lists, generators, functions of few tokens, a rule that was detected and not stated"
    batch = Interface(batch=64)
    for verify, how, check, words in (
            (lists, dict(interface=batch), "form", "got rows of different lengths, wanted 64 of one length"),
            (lambda *a: iter(theirs(*a)), {}, "form", "got a list_iterator, wanted a list or an array"),
            (kept_where_equal, {}, "rows", KEPT),
            (lambda *a: len(3), {}, "form", "raised TypeError: object of type 'int' has no len()"),
            (one_number_twice, dict(runs=300, cases=FEW), "joint", DETECTED),
            (lambda p, q, x, rng: [draw_by_cdf(p[0], rng)], dict(runs=700), "tokens", DETECTED)):
        passes, found = words_of(check, verify, **dict(runs=64) | how)
        assert passes is False and words in found, found
    def int8(*a): return np.array(theirs(*a)).astype(np.int8)
    passes, found = words_of("seeds", int8, runs=300)
    assert passes and "with 4,096 tokens failed" in found and words_of("distribution", int8, runs=300)[0]
    stated = words_of("tokens", lambda p, q, x, rng: [draw_by_cdf(p[0], rng)], runs=700, like=reject)
    assert not stated[0] and DETECTED not in stated[1]

def test_another_coupling_is_no_wrong_distribution():
    "A lossless function that follows no rule of the book fails `joint` alone, and nothing with like=None"
    def north_west(p, q, x, rng):
        for i, v in enumerate(x):
            if rng.random()*q[i, v] < p[i, v]: continue
            if np.isnan(q).any(): raise ValueError("q: NaN")
            a, b = excess(q[i], p[i]).cumsum(), excess(p[i], q[i]).cumsum()
            low = a[v - 1] if v else 0.
            u = (low + rng.random()*(a[v] - low))/a[-1]
            return [*x[:i], int(min(b.searchsorted(u*b[-1], side="right"), b.searchsorted(b[-1])))]
        return [*x, draw_by_cdf(p[-1], rng)]
    found = quick(north_west, cases=FEW, runs=600)
    assert found.wrong == ("joint",) and found.passes_distribution and "like=None" in found.words
    assert quick(north_west, cases=FEW, runs=300, like=None).passes

def test_a_function_that_takes_a_seed_leaves_zeros_open():
    "Its uniform numbers come from its own generator: the report states it, and the check does not apply"
    def reseeding(p, q, x, rng): return theirs(p, q, x, np.random.default_rng(rng.integers(2**63)))
    found = quick(reseeding, cases=FEW, runs=300)
    assert found.passes and {l.check: l.passes for l in found.lines}["zeros"] is None
    assert "the function took no uniform number from the generator" in found.words

def test_reproducible():
    "The same seed, the same report; without a rule to compare with no check of tokens"
    a, b, c = (quick(theirs, runs=100, cases=ONE, seed=s).words for s in (3, 3, 4))
    alone = quick(theirs, runs=50, like=None, cases=ONE).words
    assert a == b != c and "no rule to compare with" in alone and "acceptance: not run" in alone

def raises(p, q, x, rng): raise RuntimeError("no such kernel")
def batched(p, q, x, rng): return np.array([theirs(p, q, x, rng)])
def pair(p, q, x, rng): return np.array(theirs(p, q, x, rng)), 1

NO_TOKENS = [(raises, "raised RuntimeError: no such kernel"), (batched, ""),
             (pair, "verify: got a tuple of ndarray, int, wanted a one-dimensional array of integers"),
             (lambda *a: [-1], ""), (lambda *a: None, "")]

@pytest.mark.parametrize("verify, words", NO_TOKENS)
def test_a_function_that_never_returns_tokens_is_not_tested(verify, words):
    "`form` fails, with an error message that is not numpy's; nothing else is tested"
    found = quick(verify, cases=FEW, runs=20, draft=draw_by_cdf)
    first, *others = found.lines
    assert found.wrong == ("form",)
    assert first.words.startswith("60 of 60 calls failed, most often (")
    assert words in first.words and "inhomogeneous" not in first.words
    assert {(l.passes, l.words) for l in others} == {(None, NOT_RUN)}
    assert found.verdicts == ("distribution: FAILED (form); acceptance: not run; calls: not run; "
                              "robustness: not run")

def test_all_failed_calls_are_counted():
    "Many messages, none of them common: the sum comes first, and the case where the commonest began"
    def by_turns(p, q, x, rng, calls=iter(range(10**6))):
        if not (p[:-1] == q).all(): return theirs(p, q, x, rng)
        raise ValueError(f"after {min(next(calls), 3)}")
    line = quick(by_turns, runs=50).lines[0]
    assert not line.passes
    assert line.words.startswith("50 of 350 calls failed, most often (47, first in the case 'equal rows'): "
                                 "raised ValueError: after 3 (line ")

def test_classes_are_called_classes():
    "Where the numbers of a cell are classes, the report names them so"
    line = quick(THEIRS["everything accepted"], V=7, cases=ONE, runs=600).lines[1]
    assert not line.passes and re.search(r"texts .*classes \(\d.*: observed \d+ of 600, expected", line.words)
