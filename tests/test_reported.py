"Chapter 17e: reported bugs as rules; exact distances, and which reports concern correct rules"
import re
from fractions import Fraction as F

import pytest

from specref.certify.intervals import RuleCalls, law_of_calls
from specref.certify.judge import KNOWN_RULES, JudgeCase, judge_rule
from specref.certify.known import P, Q, free_table
from specref.certify.reported import NOISE_OFF, REPORTS, SharedRace, known_rules, still_in_releases

BY_ID = {r.id: r for r in REPORTS}
FOUR = JudgeCase("the four tokens", free_table(*P), free_table(*Q), 1)
PUBLISHED = {   # total variation on the four tokens, one draft token, from the dossier of known bugs
    "transformers#32867": F(5, 16), "transformers#47932": F(11, 70), "xllm#2175": F(7, 60),
    "transformers#28508": F(2, 5), "vllm#40149": 0, "mlx-swift-lm#459": 0, "dflash#74": 0, "EAGLE#183": 0}

def by_report(reports): return pytest.mark.parametrize("report", reports, ids=lambda r: r.id)

@pytest.mark.parametrize("id", PUBLISHED)
def test_published_distances(id):
    "Of the first token, by enumeration: the distances that were computed for these bugs before"
    rule, draw = BY_ID[id].parts
    assert judge_rule(rule, draw, cases=[FOUR], known=()).tv == PUBLISHED[id]

@by_report([r for r in REPORTS if r.parts])
def test_a_bug_is_off_and_a_correct_rule_is_not(report):
    "Exactly, in the cases of the judge; one bug shows only where a number is exactly 0"
    found = report.judged
    assert (found.passes and found.robust) is not report.wrong and found.name == report.id
    assert report.distance == found.tv and (found.tv > 0) is (report.wrong and report.id != "sglang#35771")
    edge = report.verdict.startswith("0, but where a random number is exactly 0")
    assert edge is (report.id == "sglang#35771")

@by_report(REPORTS)
def test_an_entry_has_a_thread(report):
    "An owner, a repository and a number, the number of the id; a date; a rule or a sampler, and words"
    assert re.fullmatch(r"[\w.-]+/[\w.-]+/(issues|pull)/\d+", report.thread)
    number = report.thread.rpartition("/")[2]
    assert report.id.endswith(f"#{number}") and report.link == f"https://github.com/{report.thread}"
    assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", report.date)
    assert [*map(bool, (report.parts, report.sampler, report.of_texts))].count(True) == 1
    assert report.said and report.bug and (report.parts or report.off is None or report.off > 0)

def test_the_reports_are_in_order_and_none_is_lost():
    months = [r.date[:7] for r in REPORTS]
    assert months == sorted(months) and len(BY_ID) == len(REPORTS) == 22
    right = {r.id for r in REPORTS if not r.wrong}
    assert right == {"EAGLE#183", "vllm#40149", "dflash#74", "mlx-swift-lm#459"}
    asked = "32867 47932 49036 40149 54282 35771 4190 7807 74 459 55005".split()
    assert set(asked) <= {r.id.partition("#")[2] for r in REPORTS}

def test_reported_rules_are_recognised():
    "The late rejection of OpenVINO, written otherwise"
    source = """
def rule(p, q, draft, u):
    for i in range(len(draft)):
        ratio = p[i, draft[i]] / q[i, draft[i]]
        if not u() < ratio: return [*draft[:i], race(p[i + 1], u)]
    return [*draft, race(p[-1], u)]
"""
    found = judge_rule(source, known=known_rules())
    assert len({k.name for k in known_rules()}) == len(known_rules()) > len(KNOWN_RULES)
    assert found.distance == 0 and found.nearest == (
        "recovered token from the row after the rejected one (openvino.genai#4190)",)

def test_shared_noise_is_off_by_the_proposition():
    "The distance of reused times on the four tokens, by the published Monte Carlo value of .034"
    assert isinstance(NOISE_OFF, F) and abs(float(NOISE_OFF) - .034) < .001 and SharedRace().times == {}

def test_releases_are_read_from_a_record():
    "Nothing was run where the record says nothing; else what it says"
    assert set(still_in_releases({}).values()) == {"not run"}
    runs = {"vllm#54282": dict(version="0.33.0", still=False, how="counts"),
            "xLLM-AI/xllm#2175": dict(version="1", still=True, how="a test"),
            "dflash#74": dict(version="2", still=None)}
    said = still_in_releases(dict(reported=runs))
    assert said["vllm#54282"] == "gone in 0.33.0: counts" and said["xllm#2175"] == "still there in 1: a test"
    assert said["dflash#74"].startswith("not run in 2") and said["sglang#35771"] == "not run"

def test_the_four_tokens_have_the_law_of_their_rule():
    "The argmax of the target is the only text that SGLang's rule emits"
    law = law_of_calls(FOUR, RuleCalls(BY_ID["sglang#31214"].parts[0])).of(lambda pair: pair[1])
    assert law == {(0,): 1 - Q[0], (0, 0): Q[0]}
