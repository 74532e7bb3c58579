"Chapters 17ca, 17d: a pasted rule is judged by its exact distribution; right rules pass, bugs are named"
import json
import re
from fractions import Fraction as F
from functools import partial
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from helpers import proves
from specref.certify.intervals import CannotEnumerate, Exact, RandomNumber, RuleCalls, UniformSource, boxes
from specref.certify.intervals import choose_token, exactly, law_of_calls, load_rule, positive_part
from specref.certify.judge import JUDGE_CASES, KNOWN_RULES, RIGHT_RULES, TABLE_CASES, JudgeCase, KnownRule
from specref.certify.judge import judge_case, judge_rule, nearest_known, rule_of, turned
from specref.certify.known import P, Q, Rule, free_table
from specref.certify.chain_mutants import NOISE_SHARED, RECOVERED
from specref.certify.reported import MATCH_RULE, POINT_RULE, SAMPLING_RULE
from specref.certify.sampler_mutants import SAMPLER_MUTANTS, chain_of_rows, padded_choice
from specref.certify.samplers import rule_on_rows
from specref.certify.rows import draw_by_cdf
from specref.core.law import exact
from specref.core.rng import Enumerator, law_of
from specref.verify.reject import Chain
from specref.verify.traversal import acceptance_bound

FOUR, TWO, THREE, ZEROS = JUDGE_CASES[:4]

VECTORS = """
def rule(p, q, draft, u):
    n = len(draft)
    accepted = [*(u(n) * q[range(n), draft] < p[range(n), draft]), False]
    k = accepted.index(False)
    row = positive(p[k] - q[k]) if k < n else p[k]
    return [*draft[:k], np.argmax(np.cumsum(row) > u() * row.sum())]
"""
BLOCKS = """
def rule(p, q, draft, u):
    w, k = [1], 0
    for i, x in enumerate(draft): w.append(min(w[-1] * p[i][x] / q[i][x], 1))
    for i in range(1, len(draft) + 1):
        S = positive(w[i] * p[i] - q[i]).sum() if i < len(draft) else w[i]
        if w[i] > 0 and u() * (S + 1 - w[i]) < S: k = i
    return [*draft[:k], choose(positive(w[k] * p[k] - q[k]) if k < len(draft) else p[k], u)]
"""
RACES = SAMPLING_RULE.replace("choose(", "race(")
PADDED = SAMPLING_RULE.replace("u)]\n    return", "u)] + [-1]*(len(draft) - i)\n    return")
EPSILON = SAMPLING_RULE.replace("/ q[i][x]", "/ (q[i][x] + 1e-10)")
FLOATS = SAMPLING_RULE.replace("):\n", "):\n    p, q = p.astype(float), q.astype(float)\n", 1)
PLAIN = "def rule(p, q, draft, u): return [choose(p[0], u)]"
WRITINGS = {   # of right rules: as which they behave
    "loop": (SAMPLING_RULE, "speculative sampling"), "vectors": (VECTORS, "speculative sampling"),
    "races": (RACES, "speculative sampling"), "padded": (PADDED, "speculative sampling"),
    "a generator": (padded_choice, "speculative sampling"),
    "in parts": (chain_of_rows, "speculative sampling"),
    "searchsorted": (rule_on_rows(Rule(), draw_by_cdf), "speculative sampling"),
    "blocks": (BLOCKS, "block verification"), "match": (MATCH_RULE, "sample-and-match"),
    "without q": (POINT_RULE, "sample-and-match"),
    "plain": (PLAIN, "falls back to plain decoding (a fallback without a warning)")}

class Given:
    "`u` with given numbers"
    def __init__(self, numbers): self.numbers = iter(numbers)
    def __call__(self, size=None):
        if size is None: return next(self.numbers)
        return np.array([next(self.numbers) for _ in range(size)], dtype=object)

def numbers_of(cells): return [cells.get(("u", k), (F(0), F(1))) for k in range(8)]
def drafts(case): return [draft for draft, _ in law_of_calls(case, RuleCalls(load_rule(PLAIN)[0]))]

@proves("thm-boxes")
@pytest.mark.parametrize("name", ["loop", "vectors", "blocks", "match"])
def test_boxes_are_a_partition(name):
    "Their volumes sum to one; a random point lies in one box, where the rule returns what it returns there"
    rule, generator = load_rule(WRITINGS[name][0])[0], np.random.default_rng(0)
    for case, draft in ((case, draft) for case in (FOUR, TWO, ZEROS) for draft in drafts(case)):
        found, rows = boxes(rule, case, draft), case.arguments(draft)
        assert sum(prod(b - a for a, b in numbers_of(cells)) for cells, _ in found) == 1
        for _ in range(5):
            point = [Exact(int(x), 2**40) for x in generator.integers(2**40, size=8)]
            inside = [out for cells, out in found
                      if all(a <= x < b for x, (a, b) in zip(point, numbers_of(cells)))]
            assert inside == [tuple(map(int, rule(*rows, Given(point))))]

@proves("thm-boxes")
@given(st.integers(1, 9), st.integers(1, 9), st.integers(-5, 12), st.booleans(), st.integers(1, 9))
def test_a_comparison_has_the_length_of_its_interval(a, b, c, negative, d):
    "P(aU/b < c/d), P(c/d - aU/b > 0), and P(the whole part of aU/b = k)"
    def answers(rng):
        x = UniformSource(rng)() * a / b
        return bool(x < F(c, d)), (-x if negative else x) - F(c, d) < 0, bool(x >= F(c, d))
    law = law_of(answers)
    assert law.of(lambda t: t[0]).get(True, 0) == min(max(F(c*b, d*a), 0), 1)
    assert all(first is not last for first, _, last in law)
    wholes = law_of(lambda rng: int(UniformSource(rng)() * a / b))
    assert all(w == (min(F((k + 1)*b, a), 1) - F(k*b, a)) for k, w in wholes.items())

@pytest.mark.parametrize("name", WRITINGS)
def test_right_rules_pass(name):
    "Distance 0 in fractions in all cases, no edge case, and the rule is recognised"
    found = judge_rule(WRITINGS[name][0], known=RECOGNISED)
    assert found.passes and found.tv == 0 and not found.rounded and found.verdict.startswith("EXACT: equal")
    assert found.right and WRITINGS[name][1] in found.nearest and found.distance == 0
    assert all(c.tokens <= c.block and c.sampling <= c.block for c in found.cases)
    assert str(found) == found.words and max(map(len, found.words.splitlines())) <= 100

RECOGNISED = *RIGHT_RULES, *[k for k in KNOWN_RULES if k.name.startswith("falls back")]

@pytest.mark.parametrize("known", KNOWN_RULES, ids=lambda k: k.name)
def test_every_known_bug_is_convicted(known):
    "The known rules: a bug is off in at least one of the tables, a right rule in no case"
    found = [judge_case(case, known.law(case)).tv for case in (JUDGE_CASES if known.right else TABLE_CASES)]
    assert (max(found) == 0) is known.right and len({k.name for k in KNOWN_RULES}) == len(KNOWN_RULES)

def test_lazy_numbers_give_the_law_of_coins_and_picks():
    "The joint distribution of draft and tokens, against the verifiers of this book on an rng of coins"
    for source, known in zip((VECTORS, MATCH_RULE, BLOCKS), RIGHT_RULES):
        for case in JUDGE_CASES: assert law_of_calls(case, RuleCalls(load_rule(source)[0])) == known.law(case)

@pytest.mark.parametrize("mutant", [*RECOVERED, NOISE_SHARED[2], NOISE_SHARED[4]], ids=lambda m: m.name)
def test_a_wrong_rule_is_the_same_on_rows_with_numbers_and_on_coins(mutant):
    "One bug, written once: called with numbers that are not drawn, and enumerated by its coins and picks"
    for case in (FOUR, TWO):
        found = [law_of_calls(case, RuleCalls(read(mutant.wrong.verify))) for read in (rule_on_rows, rule_of)]
        assert found[0] == found[1]

@pytest.mark.parametrize("pasted, bug", {
    "choose(p[i], u)": "recovered token sampled from p", "choose(abs(p[i] - q[i]), u)": "residual |p - q|",
    "argmax(p[i] - q[i])": "recovered token is the argmax of the residual"}.items())
def test_a_bug_is_named(pasted, bug):
    found = judge_rule(SAMPLING_RULE.replace("choose(positive(p[i] - q[i]), u)", pasted))
    assert not found.exact and not found.right and [n.partition(" (")[0] for n in found.nearest] == [bug]
    assert found.likeness.startswith("behaves exactly as: ")
    assert found.verdict.startswith("WRONG: total variation")

def test_the_witness_is_the_text_that_is_most_wrong():
    "Greedy correction on the four tokens: 5/10 for token 0, and the text of it and the next"
    rule = load_rule(SAMPLING_RULE.replace("choose(positive(p[i] - q[i]), u)", "argmax(p[i] - q[i])"))[0]
    w = judge_rule(rule, cases=[FOUR]).worst.witness
    law = law_of_calls(FOUR, RuleCalls(rule))
    first = {x: sum(v for (_, out), v in law.items() if out[0] == x) for x in range(4)}
    assert first == {0: F(5, 10), 1: F(2, 10), 2: F(2, 10), 3: F(1, 10)}
    assert w.text[0] in (0, 1) and (w.text[0] == 0) is (w.observed > w.wanted)
    start = f"in 'four tokens', most often after the draft {w.draft}: text {w.text}, probability "
    assert w.words.startswith(start)

def test_another_bug_has_a_distance_to_the_nearest():
    "A ratio times 21/20 is no known rule; speculative sampling is the nearest"
    found = judge_rule(SAMPLING_RULE.replace("p[i][x] /", "p[i][x] * 21/20 /"))
    assert 0 < found.distance < F(1, 20) and found.nearest == ("speculative sampling",)
    assert found.likeness.startswith("nearest known: speculative sampling, at a mean distance of ")
    laws = {case: law_of_calls(case, RuleCalls(load_rule(MATCH_RULE)[0])) for case in (FOUR, TWO)}
    rules = *RIGHT_RULES, KnownRule("again", RIGHT_RULES[1].rule)
    assert [k.name for k in nearest_known(laws, rules)[0]] == ["sample-and-match", "again"]
    assert nearest_known(laws, ()) == ((), None)

def test_an_epsilon_is_convicted_and_rounding_is_not():
    "1e-10 in the denominator is exact to 1e-10 and wrong; rows in floats are exact up to rounding"
    small, floats = judge_rule(EPSILON, known=()), judge_rule(FLOATS, known=())
    assert 0 < small.tv < F(1, 10**6) and not small.exact and not small.rounded
    assert floats.rounded and floats.exact and floats.verdict.startswith("EXACT: equal to the target's up to")

EDGES = {
    "< in place of <=": VECTORS.replace("draft] < p", "draft] <= p"),
    "changes p in place": SAMPLER_MUTANTS["residual written into p"].wrong,
    "never ends": SAMPLING_RULE.replace("return [*draft, ", "while len(draft): pass\n    return ["),
    "returns 4 tokens after a draft of 1": SAMPLING_RULE.replace("u)]\n", "u), 0, 0, 0]\n", 1),
    "returns 0 tokens after a draft of 1": "def rule(p, q, draft, u): return []",
    "raises ZeroDivisionError": "def rule(p, q, draft, u): return [(p[0]/q[0]).sum()] if draft else [0]",
    "returns a token outside the vocabulary": "def rule(p, q, draft, u): return [4 if draft else 0]",
    "returns something other than tokens": "def rule(p, q, draft, u): return u() if draft else [0]"}

@pytest.mark.parametrize("words", EDGES)
def test_edge_cases_have_words(words):
    found = judge_rule(EDGES[words], known=(), cases=[case for case in TABLE_CASES if case.gamma < 3])
    fragile = words.startswith("<")
    assert found.passes is fragile is not found.robust and words in found.words
    assert any(words in edge for edge in (found.fragile if fragile else found.edges))
    assert found.exact is words.startswith(("<", "changes", "returns 0"))

@pytest.mark.parametrize("names, words", [("p, q, draft", "3 positional"), ("p, q, draft, u", "other than")])
def test_a_rule_that_never_answers_is_refused(names, words):
    with pytest.raises(ValueError, match=f"^rule: .*{words}.* in all calls$"):
        judge_rule(f"def rule({names}): pass")

def test_no_bug_is_named_beside_an_exact_rule_and_none_of_a_far_one():
    "A coin between two right rules; a rule that is like none"
    for source in SAMPLING_RULE, FLOATS:   # the second is exact up to rounding
        mixed = judge_rule(source.replace("    for", "    if u() < .5: return [choose(p[0], u)]\n    for", 1))
        assert mixed.exact and mixed.right and mixed.distance > 0
    assert judge_rule("def rule(p, q, draft, u): return [2]").likeness == "behaves as none of the known rules"

def test_a_number_of_the_draft_may_be_used_again():
    "Draft and recovered token share a number: the distance of the same bug in another notation"
    rule = load_rule(SAMPLING_RULE.replace("q[i]), u)", "q[i]), u.of_draft(i))"))[0]
    case = JudgeCase("one token", free_table(*P), free_table(*Q), 1)
    assert judge_rule(rule, cases=[case]).tv == NOISE_SHARED[1].off > 0

def test_helpers_are_known_to_any_function():
    "A function that was defined elsewhere, without an import, and a partial one"
    rule = eval("lambda p, q, draft, u: [choose(normalize(positive(p[0])), u)]")
    assert judge_rule(rule, known=()).passes and judge_rule(partial(rule), known=()).passes

def test_a_draft_may_state_another_distribution():
    "`draw` samples the draft: by default from q itself"
    rule = load_rule(SAMPLING_RULE)[0]
    assert judge_rule(rule, choose_token, known=RIGHT_RULES).nearest == ("speculative sampling",)
    assert not judge_rule(rule, lambda q, u: 0, known=(), cases=[FOUR]).exact

def test_block_verification_is_the_optimum():
    "Against the linear program of all lossless rules"
    for case in (TWO, FOUR):
        bound = acceptance_bound(case.target, Chain(case.draft, case.gamma), case.ctx)
        assert abs(float(judge_case(case, RIGHT_RULES[2].law(case)).block) - 1 - bound) < 1e-8

@given(st.integers(-9, 9), st.floats(-4, 4), st.integers(1, 9))
@settings(max_examples=50)
def test_fractions_remain_beside_floats(a, x, b):
    "Sums, products and quotients of an `Exact` and a float are exact"
    n, f = Exact(a, b), F(x)
    assume(f and n)
    pairs = (n + x, F(n) + f), (x - n, f - n), (n*x, F(n)*f), (n/x, F(n)/f), (x/n, f/F(n)), (-n, -F(n))
    assert all(type(got) is Exact and got == want for got, want in pairs)
    assert exactly(np.float64(x)) == f and exactly(np.int64(a)) == a and type(exactly(True)) is Exact

def test_numbers_of_one_source_keep_what_was_decided():
    "After U < 1/2 the comparison with 3/4 forks no more, and 1/4 is fair; numbers apart are compared"
    def answers(rng):
        x = UniformSource(rng)()
        return bool(x < .5), bool(x < F(3, 4)), bool(1 - x < x)
    halves = {(True, True, False): F(1, 2), (False, True, True): F(1, 4), (False, False, True): F(1, 4)}
    assert law_of(answers) == halves
    def apart(rng):
        u = UniformSource(rng)
        x, y = u(2)
        return bool(x < y + 1), bool(x + 1 > y), bool(x/2 < (y + 1)/2)
    assert law_of(apart) == {(True, True, True): 1}
    def itself(rng):
        x = UniformSource(rng)()
        same = x*1 == x <= x + 0 >= x, not x < x, not x > x*1, hash(x*1) == hash(x), x + 1 != x < x + 1
        return all(same) and not any((x < np.nan, x <= np.nan, x > np.nan, x >= np.nan))
    assert law_of(itself) == {True: 1}

def test_the_names_of_a_generator():
    "random, uniform, integers and choice; what it lacks is refused"
    def drawn(rng):
        u = UniformSource(rng)
        sides = bool(u.uniform(1, 3) < 2), bool(u.random((1, 1))[0, 0] < .5)
        return u.choice(3, p=exact(1, 2, 3)), u.integers(2), *sides
    law = law_of(drawn)
    assert len(law) == 24 and law[2, 0, True, True] == F(1, 2)*F(1, 8)
    with pytest.raises(CannotEnumerate, match=r"u\.exponential"): UniformSource(Enumerator()).exponential()

def test_a_report_is_plain_values():
    "Each case, in order, with the tokens of three rules; JSON states it"
    from dataclasses import asdict
    from specref.app.commands import json_value
    found = judge_rule(MATCH_RULE, name="mine")
    assert [c.name for c in found.cases] == [case.name for case in JUDGE_CASES]
    assert json.loads(json.dumps(json_value(asdict(found))))["name"] == "mine"
    assert found.words.startswith("mine  EXACT") and {c.name for c in found.families} == {
        line[2:26].strip() for line in found.words.splitlines() if re.match(r"  \w.{23} +\d+ ", line)}
    assert isinstance(RandomNumber(Enumerator(), 0).range, list) and positive_part(P - Q).sum() == F(2, 5)

def test_cases_depend_on_the_text():
    "Every case with several rows has different ones, at other positions and after other tokens"
    for case in (case for case in JUDGE_CASES if case.gamma < 4):
        texts = [text for n in range(case.gamma + 1) for text in product(range(case.target.V), repeat=n)]
        rows = {tuple(case.row(0, text)) for text in texts}
        assert len(rows) > 1 or case.gamma == 0
    assert tuple(turned(1, 2).law((0,))) != tuple(turned(1, 2).law((0, 0)))
