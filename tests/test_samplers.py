"Chapter 17b: samplers of texts, functions of rows, and ten checks that each detect their own bug"
import re
from collections import Counter
from fractions import Fraction
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from helpers import ALPHA, proves, random_table, tempered
from specref.certify.sequential import Report
from specref.verify.block import block
from specref.core.rng import Outcomes, law_of, numpy_generator
from specref.certify.certificates import detectable, partition, safe_limit
from specref.core.law import exact, overlap, tv
from specref.core.loop import match, rounds
from specref.verify.reject import Chain, reject
from specref.certify.samplers import BET_SIZES, CASES, CHECKS, NOT_RUN
from specref.certify.samplers import EdgeGenerator, FewerTokensBet, Interface, PlaceCase, RowCase
from specref.certify.samplers import SeedGenerator
from specref.certify.samplers import certify_rows, certify_sampler, chain_drafts, draw_by_cdf
from specref.certify.samplers import as_views, token_classes, token_parts
from specref.certify.samplers import rule_on_rows, text_sampler, expected_lengths
from specref.core.target import TableModel, target_law
from specref.core.tree import Tree, iid
from specref.verify.kseq import kseq
from specref.verify.transport import transport

quick = partial(certify_rows, depth=2)   # long drafts where a test is about them


def theirs(p, q, x, rng):
    "Speculative sampling as it is often written, padded with -1"
    for i in range(len(x)):
        if not rng.random()*q[i, x[i]] < p[i, x[i]]:
            r = np.maximum(p[i] - q[i], 0)
            return [*x[:i], rng.choice(len(r), p=r/r.sum()), *[-1]*(len(x) - i)]
    return [*x, rng.choice(p.shape[1], p=p[-1])]


def excess(p, q): return np.maximum(p - q, 0)
def choice(w, rng): return rng.choice(len(w), p=w/w.sum())


def broken(left=excess, bonus=lambda p, q: p[-1], accept=lambda u, p, q: u*q < p, once=False,
           seeded=lambda rng: rng, find=choice):
    "The same with one piece replaced"
    def verify(p, q, x, rng):
        rng = seeded(rng)
        u = np.full(len(x), rng.random()) if once else rng.random(len(x))
        for i in range(len(x)):
            if not accept(u[i], p[i, x[i]], q[i, x[i]]):
                r = left(p[i], q[i])
                return np.array([*x[:i], find(r if r.sum() > 0 else p[i], rng)])
        return np.array([*x, find(bonus(p, q), rng)])
    return verify


# Samplers of texts

THEIRS = {"recovered token from p": broken(left=lambda p, q: p),
          "p and q exchanged": broken(left=lambda p, q: np.maximum(q - p, 0)),
          "everything accepted": broken(accept=lambda *_: True),
          "bonus from the previous row": broken(bonus=lambda p, q: p[-2]),
          "bonus from the draft": broken(bonus=lambda p, q: q[-1]), "one uniform for all": broken(once=True),
          "|p - q|": broken(left=lambda p, q: abs(p - q))}
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
    "All ten checks, in lines of at most 88 columns"
    f, how = RIGHT[name]
    found = quick(f, **dict(dict(runs=600), **how))
    words = " ".join(found.words.split())
    assert isinstance(found, Report) and found.passes and found.wrong == ()
    want = [(q, None if q == "draft" else True) for q in CHECKS]
    assert [(x.check, x.passes) for x in found.lines] == want
    assert found.title.endswith("rate 1e-09); distribution: ok; acceptance: ok; robustness: ok")
    assert all(s in words for s in STATED)
    assert max(map(len, found.words.splitlines())) <= 88


def test_three_drafts():
    "A correct function passes with its own drafter, an incorrect one fails the check `distribution`"
    assert quick(theirs, gamma=3, runs=500, draft=draw_by_cdf, cases=FEW).passes
    assert "distribution" in quick(THEIRS["recovered token from p"], gamma=3, runs=500, cases=FEW).wrong


@pytest.mark.parametrize("rule", [kseq, transport])
def test_rules_that_read_how_siblings_were_drawn(rule):
    "Rows are one draft each, drawn from q: the rules of siblings verify them too"
    assert quick(rule_on_rows(rule), cases=FEW, runs=300, like=None).passes


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


def one_coin(p, q, x, rng):
    "The uniform number that rejected the draft samples the recovered token too"
    for i in range(len(x)):
        if np.isnan(q).any(): raise ValueError("q: NaN")
        u = rng.random()
        if not u*q[i, x[i]] < p[i, x[i]]:
            r = np.cumsum(excess(p[i], q[i]))
            return [*x[:i], int(np.searchsorted(r, u*r[-1], side="right"))]
    return [*x, rng.choice(p.shape[1], p=p[-1])]


def verifies_after_rejection(p, q, x, rng):
    "Continues after a rejection, with rows that follow the rejected token"
    tokens = []
    for i, v in enumerate(x):
        tokens.append(int(v) if rng.random()*q[i, v] < p[i, v] else draw_by_cdf(excess(p[i], q[i]), rng))
    return [*tokens, draw_by_cdf(p[-1], rng)]


def careless(p, q, x, rng):
    "Changes the arrays that it was given"
    tokens = theirs(p.copy(), q.copy(), x, rng)
    p -= .1
    return tokens


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
    return broken(left=lambda a, b: np.where(np.arange(len(a)) == x[0], 0, a))(p, q, x, rng)


def likeliest_excess(p, q):
    r = excess(p, q)
    return r*(r == r.max())


def search_left(w, rng): return int(np.searchsorted(np.cumsum(w), rng.random()*w.sum()))


def search_short(w, rng):
    "By sums that end below 1"
    return int(np.searchsorted(np.cumsum(w/w.sum())*(1 - 1e-12), rng.random(), side="right"))


def fixed_seed(rng): return np.random.default_rng(1)
def argmax(q, rng): return int(np.argmax(q))
def argmin(q, rng): return int(np.argmin(q))


ONE = {"different rows": CASES["different rows"]}
EQUAL = {"equal rows": CASES["equal rows"]}
own = np.random.default_rng(5)
WRONG = "distribution", "noise"
FLOAT64 = Interface(dtype="float64")
BUGS = {name: (dict(verify=f), {"distribution", "noise"}) for name, f in THEIRS.items()} | {
    "bonus from the previous row": (dict(verify=THEIRS["bonus from the previous row"]), {"distribution"}),
    "|p - q|": (dict(verify=THEIRS["|p - q|"]), {"distribution", "noise", "zeros"}),
    "p and q exchanged": (dict(verify=THEIRS["p and q exchanged"]), {"distribution", "noise", "zeros"}),
    "everything accepted": (dict(verify=THEIRS["everything accepted"]), {*WRONG, "zeros", "nan"}),
    "q/p": (dict(verify=broken(accept=lambda u, p, q: u*p < q)), {"distribution", "noise", "zeros"}),
    "accepted iff p >= q": (dict(verify=broken(accept=lambda u, p, q: q <= p)), {*WRONG, "tokens"}),
    "ratio times 1.5": (dict(verify=broken(accept=lambda u, p, q: u*q < 1.5*p)), {"distribution", "noise"}),
    "p without the token": (dict(verify=without_first, runs=2000), {"distribution", "noise"}),
    "likeliest recovered token": (dict(verify=broken(left=likeliest_excess)), {"distribution", "noise"}),
    "q of the next row": (dict(verify=lambda p, q, x, rng: theirs(p, np.roll(q, 1, 0), x, rng)),
                          {"distribution", "noise"}),
    "one uniform number for draft and recovered token": (dict(verify=one_coin), {"distribution", "noise"}),
    "verifies after a rejection": (dict(verify=verifies_after_rejection, runs=100), {"form"}),
    "one token too many": (dict(verify=lambda p, q, x, rng: [*x, 0, 0], runs=100), {"form", "nan"}),
    "no token": (dict(verify=lambda p, q, x, rng: [-1], runs=100), {"form"}),
    "halves": (dict(verify=lambda p, q, x, rng: [.5], runs=100), {"form"}),
    "fails on equal rows": (dict(verify=fragile, cases=EQUAL, runs=50), {"form"}),
    "outside of the vocabulary": (dict(verify=lambda p, q, x, rng: [4]),
                                  {"distribution", "noise", "seeds", "tokens", "nan"}),
    "no bonus": (dict(verify=lambda p, q, x, rng: theirs(p, q, x, rng)[:len(x)], runs=300), {"tokens"}),
    "the target alone": (dict(verify=lambda p, q, x, rng: [draw_by_cdf(p[0], rng)]), {"tokens"}),
    "match, stated as reject": (dict(verify=rule_on_rows(match), like=reject), {"tokens"}),
    "reject, stated as block": (dict(verify=rule_on_rows(reject), like=block, gamma=8, runs=600, cases=ONE),
                                {"tokens"}),
    "seeds itself with the same seed": (dict(verify=broken(seeded=reseeded)), {"noise"}),
    "one race for draft and last token": (dict(verify=racer.verify, draft=racer.draft, runs=3000, cases=ONE),
                                          {"noise"}),
    "the likeliest token, stated as drawn": (dict(verify=theirs, draft=argmax), {"noise", "draft"}),
    "from the top 2, stated as drawn": (dict(verify=theirs, draft=lambda q, rng: draw_by_cdf(top2(q), rng)),
                                        {"draft"}),
    "a token of weight 0": (dict(verify=theirs, draft=argmin), {"noise", "draft"}),
    "random numbers of its own": (dict(verify=broken(seeded=lambda rng: own), runs=300), {"seeds"}),
    "always one seed": (dict(verify=broken(seeded=fixed_seed)), {"distribution", "noise", "seeds", "tokens"}),
    "writes in p": (dict(verify=careless, runs=300), {"rows"}),
    "u <= p/q": (dict(verify=broken(accept=lambda u, p, q: u*q <= p), runs=300), {"zeros"}),
    "search from the left": (dict(verify=broken(find=search_left), runs=300), {"zeros"}),
    "the last sum below 1": (dict(verify=broken(find=search_short), runs=99, interface=FLOAT64), {"zeros"}),
    "NaN accepts": (dict(verify=nan_accepts, runs=300), {"nan"}),
}


# Other interfaces, and bugs that need a certain door

def by_cdf(w, u):  # (n, V), (n,) -> (n,)
    c = w.cumsum(1)
    return (u[:, None]*c[:, -1:] >= c).sum(1)


def in_batches(P, Q, X, seeds, last=lambda r: r, seeded=lambda seeds: seeds, padding=True,
               wrong_at=-1):
    "Speculative sampling of a batch of padded drafts; a row without mass samples its target"
    (B, g), b, i = X.shape, np.arange(len(X)), np.arange(X.shape[1])
    u, x = np.random.default_rng(seeded(seeds)).random((B, g + 2)), X % P.shape[2]
    ok = (u[:, :g]*Q[b[:, None], i, x] < P[b[:, None], i, x]) & (X >= 0) | (X < 0 if not padding else False)
    k = np.logical_and.accumulate(ok, 1).sum(1)
    rejected = k < ((X >= 0).sum(1) if padding else g)
    rejected &= k != wrong_at   # where the target is sampled instead of the residual
    r = last(np.maximum(P[b, k] - np.where(rejected[:, None], Q[b, np.minimum(k, g - 1)], 0), 0))
    good = np.isfinite(r).all(1) & (r.sum(1) > 0)
    y = np.c_[np.where(i < k[:, None], x, -1), np.full(B, -1)]
    y[b, k] = by_cdf(np.where(good[:, None], r, P[b, k]), u[:, -1])
    return y


def neighbours(P, Q, X, seeds): return in_batches(P, Q, X, seeds, last=lambda r: np.roll(r, 1, 0))
def first_seed(P, Q, X, seeds):
    "Every row uses the seed of the first"
    return np.concatenate([in_batches(*(a[i:i+1] for a in (P, Q, X)), seeds[:1]) for i in range(len(X))])


def nan_spreads(P, Q, X, seeds):
    "One NaN in the batch, and every row takes the likeliest token of the draft"
    if np.isnan(Q).any(): return np.nan_to_num(Q[:, :1], nan=1.).argmax(2)
    return in_batches(P, Q, X, seeds)


def wrong_at_15(P, Q, X, seeds): return in_batches(P, Q, X, seeds, wrong_at=15)
def pads_are_tokens(P, Q, X, seeds): return in_batches(P, Q, X, seeds, padding=False)
def eight_bits(P, Q, X, seeds): return in_batches(P, Q, X, seeds, seeded=lambda s: s & 255)


def shorter(p, q, x, rng):
    "Padded drafts, cut first"
    n = (x >= 0).sum()
    return theirs(p[:n + 1], q[:n], x[:n], rng)


def in_place(p, q, x, rng):
    "The residual is written into the target's row"
    for i in range(len(x)):
        if rng.random()*q[i, x[i]] < p[i, x[i]]: continue
        np.maximum(p[i] - q[i], 0, out=p[i])
        return [*x[:i], choice(p[i], rng)]
    return [*x, choice(p[-1], rng)]


def strikes_out(p, q, x, rng):
    "A rejected token is struck out of the target's row, as in trees of deterministic drafts"
    tokens = theirs(p, q, x, rng)
    k = sum(v >= 0 for v in tokens)
    if k <= len(x) and tokens[k - 1] != x[k - 1]: p[k - 1, x[k - 1]] = 0
    return tokens


def scales_bonus(p, q, x, rng):
    "The row of an accepted draft's bonus is divided by its peak in place"
    tokens = theirs(p, q, x, rng)
    if len([v for v in tokens if v >= 0]) > len(x): p[-1] /= p[-1].max()
    return tokens


def late(depth):
    "The target instead of the residual from `depth` on"
    def verify(p, q, x, rng):
        for i in range(len(x)):
            if rng.random()*q[i, x[i]] < p[i, x[i]]: continue
            return [*x[:i], choice(excess(p[i], q[i]) if i < depth else p[i], rng)]
        return [*x, choice(p[-1], rng)]
    return verify


def first_lanes(p, q, x, rng):
    "The first token of each tile of 64 is read as its neighbour"
    *accepted, y = [v for v in theirs(p, q, x, rng) if v >= 0]
    return [*accepted, y + 1 if 0 < y < p.shape[1] - 2 and y % 64 == 0 else y]


def last_tile(p, q, x, rng):
    "The last tile, which is not full, is omitted, but for the last token"
    p = p.copy()
    p[:, p.shape[1]//128*128:-1] = 0
    return broken(find=draw_by_cdf)(p / p.sum(1, keepdims=True), q, x, rng)


def copies_within(p, q, x, rng):
    "The bonus lies in the same part of its class as the last accepted token"
    *accepted, y = [v for v in theirs(p, q, x, rng) if v >= 0]
    if len(accepted) < len(x) or not 0 < y < p.shape[1] - 1: return [*accepted, y]
    V, part = p.shape[1], token_parts(p.shape[1])
    same = (token_classes(V) == token_classes(V)[y]) & (part == part[accepted[-1]])
    return [*accepted, choice(np.where(same, p[-1], 0), rng)]


def never_recovered(token):
    "A special token is masked out of the residual"
    def left(p, q):
        r = excess(p, q)
        r[token] = 0
        return r
    return broken(left=left, find=draw_by_cdf)


def seed_of_few_bits(p, q, x, rng):
    return theirs(p, q, x, np.random.default_rng(rng.integers(2**63) & 0xFFFF))


def walk(p, q, x, parent, rng, ratio=lambda p, r: r):
    "Recursive rejection along a tree (Theorem siblings)"
    node, path = 0, []
    while True:
        r = p[node]
        for c in np.flatnonzero(parent == node):
            if rng.random()*q[c, x[c]] < ratio(p[node], r)[x[c]]: break
            r = excess(r, q[c])
            r = r/r.sum() if r.sum() > 0 else p[node]
        else: return [*path, choice(r, rng)]
        path.append(x[c])
        node = c


def first_ratio(*a): return walk(*a, ratio=lambda p, r: p)   # each sibling against the original target


def only_target(p, q, x, index, child, sibling, rng, coin=None):
    "SGLang's rule: a token of the target decides, by the sum over the children; it reads no q"
    node, path = 0, []
    while True:
        u, c, r = coin if coin is not None else rng.random(), child[node], p[node].copy()
        while c >= 0 and u >= p[node].sum() - r.sum() + r[x[c]]:
            r[x[c]], c = 0, sibling[c]
        if c < 0: return [*path, choice(r if r.sum() > 0 else p[node], rng)]
        path.append(x[c])
        node = c


def one_coin_a_tree(*a): return only_target(*a, coin=a[-1].random())


def softmax(a):
    e = np.exp(a - a.max(1, keepdims=True))
    return e/e.sum(1, keepdims=True)


def of_logits(p, q, x, rng, T=.5): return theirs(softmax(p), softmax(q/T), x, rng)
def unscaled(p, q, x, rng): return of_logits(p, q, x, rng, T=1)


LARGE = Interface(batch=4000)
BATCH, PADDED = Interface(batch=64), Interface(batch=64, padded=True)
TREE, LINKS, LOGITS = Interface("parents"), Interface("links"), Interface(logits=(1., .5))
BACKWARDS = {"backwards": CASES["the draft ranks them backwards"]}
FIRST = {"different rows": CASES["different rows"]}
DEEP = dict(cases=FIRST, depth=16)
SHORT = dict(depth=1, cases=BACKWARDS)
QUICK = dict(cases=FIRST, depth=2)
DOORS = {   # a wrong sampler, a right one, the interface, the runs that suffice, and the check that fails
    "in-place residual": (in_place, theirs, QUICK, 100, "rows"),
    "rejected token struck out": (strikes_out, theirs, QUICK, 100, "rows"),
    "bonus row scaled in place": (scales_bonus, theirs, QUICK, 100, "rows"),
    "wrong from depth 3": (late(3), theirs, DEEP, 1000, "position"),
    "wrong from depth 6": (late(6), theirs, DEEP, 1000, "position"),
    "wrong at depth 15": (wrong_at_15, in_batches, dict(interface=LARGE, **DEEP), 12_000, "position"),
    "16 bits of the seed": (seed_of_few_bits, theirs, QUICK, 100, "seeds"),
    "8 bits of each seed": (eight_bits, in_batches, dict(interface=BATCH, depth=2), 300, "seeds"),
    "bonus of the neighbour": (neighbours, in_batches, dict(interface=BATCH, depth=2), 300, "distribution"),
    "seed of the first row": (first_seed, in_batches, dict(interface=BATCH, depth=2), 300, "seeds"),
    "NaN beside it": (nan_spreads, in_batches, dict(interface=BATCH, depth=2), 300, "nan"),
    "padding verified": (pads_are_tokens, in_batches, dict(interface=PADDED, depth=2), 300, "form"),
    "padding not cut": (theirs, shorter, dict(interface=Interface(padded=True), depth=2), 300, "form"),
    "tree: original ratio": (first_ratio, walk, dict(interface=TREE, **SHORT), 1000, "distribution"),
    "tree: one coin": (one_coin_a_tree, only_target, dict(interface=LINKS, **SHORT), 600, "distribution"),
    "draft logits not scaled": (unscaled, of_logits, dict(interface=LOGITS, depth=2), 400, "tokens"),
    "first lane of a tile": (first_lanes, theirs, dict(V=1000, cases=FEW), 1000, "distribution"),
    "last tile": (last_tile, theirs, dict(V=1000, cases=FIRST), 2000, "distribution"),
    "copied within a class": (copies_within, theirs, dict(V=200, cases=FIRST), 3000, "distribution"),
    "special token": (never_recovered(2), broken(find=draw_by_cdf),
                      dict(V=32_000, cases=FIRST, depth=1, gamma=1, special=(2,)), 100, "distribution"),
}


@pytest.mark.parametrize("name", DOORS)
def test_each_door_finds_its_bug(name):
    "The wrong function fails the check, the right one passes with the same runs"
    wrong, right, how, runs, check = DOORS[name]
    assert check in quick(wrong, runs=runs, **how).wrong
    found = quick(right, runs=runs, **how)
    assert found.passes_distribution and found.passes_acceptance and check not in found.wrong, found


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
    assert found.passes and found.hidden > .3
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


def wasteful(p, q, x, rng):
    "More noise than it uses"
    rng.random(3)
    return theirs(p, q, x, rng)


@pytest.mark.parametrize("f", [gumbel, half_precision, wasteful])
def test_correct_functions_of_other_kinds_are_not_rejected(f):
    "An infinite noise of an impossible token, a uniform number rounded to 1, and extra noise are no failure"
    with np.errstate(all="ignore"): found = quick(f, cases=FEW, runs=300, depth=2)
    assert found.passes
    if f is half_precision:
        assert "`dtype` states which applies" in " ".join(found.words.split())
        assert not quick(f, cases=FEW, runs=100, interface=FLOAT64).passes_robustness
        assert quick(f, cases=FEW, runs=100, interface=Interface(dtype="float32")).passes


def test_interfaces_may_be_combined():
    "Padded batches with a drafter and special tokens, and trees of independent siblings"
    assert quick(in_batches, V=70, gamma=4, cases=FIRST, runs=200, draft=draw_by_cdf, special=(7, 69),
                 interface=Interface(batch=8, padded=True)).passes
    assert quick(walk, cases=FIRST, runs=200, interface=Interface("parents", siblings=iid)).passes


def test_no_false_alarm_in_many_seeds():
    "Reports on right functions at the usual rate, in batches"
    how = dict(interface=Interface(batch=512), cases=FEW, runs=150, depth=3)
    assert all(quick(in_batches, seed=s, **how).passes for s in range(15))


LONG = set(), {"position"}   # what fails `distribution` may fail with long drafts too


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
        law, mean = expected_lengths(case, x, (1., 1., 1.), block), np.zeros(len(BET_SIZES))
        for k, w in law.items():
            bet = FewerTokensBet()
            bet.place(law, {k: 1})
            mean += w*np.exp(bet.log)
        assert np.allclose(mean, 1)
        if len(law) == 1: continue
        full, none, forks = FewerTokensBet(), FewerTokensBet(), forks + 1
        full.place(law, {4: 100})
        none.place(law, {1: 100})
        assert full.wealth < 1 < none.wealth and 0 < none.share(10.) <= 1
        assert full.due == pytest.approx(sum(k*w for k, w in law.items()))
    assert forks


def test_no_draft_in_rows():
    p, rng = np.array([[0., 1., 0.]]), numpy_generator(0)
    assert rule_on_rows(reject)(p, np.zeros((0, 3)), np.zeros(0, int), rng) == (1,)


@pytest.mark.parametrize("name", BUGS)
def test_each_bug_fails_its_checks(name):
    "The checks that concern it, and no other"
    how, checks = BUGS[name]
    with np.errstate(all="ignore"): found = quick(**dict(dict(cases=FEW, runs=1000), **how))
    assert set(found.wrong) - LONG[bool({"distribution"} & checks)] == checks, found
    groups = {CHECKS[name] for name in found.wrong}
    assert groups == {g for g in set(CHECKS.values()) if not getattr(found, f"passes_{g}")}


def test_long_vocabularies():
    "150,000 tokens, 80 runs: a correct kernel passes, one that omits the last tile does not"
    right = broken(find=draw_by_cdf)
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
    distance = detectable(1000, len(w) - 1, safe_limit(1000, w, ALPHA/(2 + 5 + 2*3 + 1)))
    assert f"total variation {distance:.3f}" in words and f"up to {len(w)} cells" in words


def test_false_alarms_at_a_measurable_rate():
    "At alpha = 1/5 for the whole report, 20 reports on a correct function"
    how = dict(gamma=1, cases=ONE, runs=120, depth=2, alpha=.2, draft=draw_by_cdf)
    alarms = sum(not quick(theirs, seed=s, **how).passes for s in range(20))
    assert alarms <= 20*.2 + 6*np.sqrt(20*.2*.8)


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
    assert a == b != c and "no rule to compare with" in alone


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


def test_all_failed_calls_are_counted():
    "Many messages, none of them common: the sum comes first, and the case where the commonest began"
    def by_turns(p, q, x, rng, calls=iter(range(10**6))):
        if not (p[:-1] == q).all(): return theirs(p, q, x, rng)
        raise ValueError(f"after {min(next(calls), 3)}")
    line = quick(by_turns, runs=50).lines[0]
    assert not line.passes
    assert line.words == ("50 of 350 calls failed, most often (47, first in the case 'equal rows'): "
                          "raised ValueError: after 3")


def test_classes_are_called_classes():
    "Where the numbers of a cell are classes, the report names them so"
    line = quick(THEIRS["everything accepted"], V=7, cases=ONE, runs=600).lines[1]
    assert not line.passes and re.search(r"texts .*classes \(\d.*: observed \d+ of 600, expected", line.words)
