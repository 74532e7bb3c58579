"Chapters 64b, 64c, 65: the record of engines, and the adapters that need none but transformers"
import sys
from fractions import Fraction

import numpy as np, pytest, torch
from hypothesis import given, strategies as st

from helpers import proves
from specref import exact, prompts, reject, tv
from specref.certify import black_boxes as bb, engines as en, released as rs
from specref.certify.counts import ALPHA
from specref.certify.samplers import CASES, Interface
from specref.core.check import read_record
from specref.models.embedded import raw_model, sample_texts

RECORD = read_record("engines")
TWO = {name: CASES[name] for name in ("different rows", "the draft ranks them backwards")}
FLOAT32 = Interface(dtype="float32")

# The record

VERDICTS = "no difference", "differs", "not run", "same texts as plain decoding", "other texts"

def test_rows_are_complete():
    "Every row says what was asked and found; one not run has a reason, a difference a witness, found twice"
    for row in RECORD["rows"]:
        assert set(en.COLUMNS_OF_ENGINES) <= row.keys() and row["asked"] and row["date"], row
        assert row["verdict"] in VERDICTS
        if row["verdict"] == "not run": assert row["reason"] and row["runs"] is None
        else: assert row["version"] and (row["distance"] is None or 0 < row["distance"] <= 1)
        if row["verdict"] == "differs":
            assert row["witness"] and (row.get("again") or row["how"] == "enumerated")

def test_small_distances_would_have_been_seen():
    "Four samplers and two black boxes, at least, with a visible distance of .02"
    near = [row for row in RECORD["rows"] if (row["distance"] or 1) <= .02 and row["alpha"] == ALPHA]
    assert len({row["engine"] for row in near if row["how"] == "sampler"}) >= 4
    assert len({row["engine"] for row in near if row["how"] == "black box"}) >= 2

def test_planted_mistakes_are_convicted_and_right_samplers_not():
    assert all(found["alarms"] == 0 and found["seeds"] >= 200 for found in RECORD["right"])
    assert {found["engine"] for found in RECORD["right"]} <= {found["engine"] for found in RECORD["planted"]}
    for found in RECORD["planted"]:
        assert found["convicted"] and set(found["convicted"].values()) == {found["seeds"]}
    assert all(found["equal"] == found["rows"] for found in RECORD["interpreter"])

def test_reported_bugs_have_an_answer():
    assert len(RECORD["reported"]) >= 6
    for found in RECORD["reported"].values():
        assert found["version"] and found["how"] and found["still"] in (True, False, None, "refused")

def test_every_row_stands_in_a_table():
    "Those that were run in one, the others in the list; another record gives another table"
    rows = [row for row in RECORD["rows"] if row["verdict"] != "not run"]
    table, others = en.engine_table(RECORD), " ".join(en.unasked(RECORD).split())
    assert sum(line.startswith("  ") for line in table.splitlines()) == len(rows) + 1
    for row in RECORD["rows"]:
        if row in rows: assert en.engine_line(row).rstrip() in table
        else: assert f"{row['asked']}: {row['reason']}" in others
    assert "0.1235" in en.engine_table(RECORD | dict(rows=[rows[0] | dict(distance=.123456)]))

def test_the_summary_counts_differences_that_nobody_asked_for():
    mine = dict(engine="mine", version="1", how="sampler", verdict="no difference", distance=.02)
    one = RECORD["rows"][0] | mine
    rows = [one, one | dict(distance=.01), one | dict(verdict="differs", distance=1e-5),
            one | dict(verdict="differs", by_design=True), one | dict(verdict="not run", how=None)]
    _, line = en.engine_summary(dict(rows=rows)).splitlines()
    assert line.split() == ["mine", "1", "sampler", "4", "0.01", "differs", "in", "1", "of", "4"]
    assert en.engine_summary(dict(rows=rows[:2])).endswith("no difference")

# Adapters

def test_transformers_rule_passes_and_a_wrong_one_is_convicted():
    "Few runs: the released rule, and one that subtracts nothing after a rejection"
    rule = rs.import_module("transformers.generation.utils")._speculative_sampling
    def from_p(ids, q, n, p):
        tokens, k = rule(ids, q, n, p)
        if k == n: return tokens, k
        return torch.cat([tokens[:, :k], torch.multinomial(p[0, k].softmax(-1), 1)[None]], 1), k
    def found(rule): return en.sampler_checks(rs.transformers_sampler(rule), FLOAT32, 1000, TWO, like=reject)
    right = found(rule)
    assert not right.differs_quickly and right.finding("distribution").passes
    assert .3 < right.visible < .5   # of texts; on the cells alone it is about .2
    assert "differs in the case 'different rows'" in found(from_p).differs_quickly

def test_a_released_module_is_imported_alone(tmp_path):
    "Its other imports are stand-ins, what is given is real; one change of its text is another module"
    folder = tmp_path/"engine_of_a_test"/"deep"
    folder.mkdir(parents=True)
    (folder/"rule.py").write_text(
        "from engine_of_a_test.config import Config\nfrom engine_of_a_test.tools import three\n"
        "@Config.register(1)\nclass Unused: pass\ndef limit(x): return x < three\n")
    given = {"engine_of_a_test.tools": dict(three=3)}
    rule, = rs.released_modules(tmp_path, "engine_of_a_test", ["engine_of_a_test.deep.rule"], given)
    other = rs.changed_module(rule, ("x < three", "x <= three"))
    assert not rule.limit(3) and other.limit(3) and rule.limit(2)
    with pytest.raises(ValueError, match="changes"): rs.changed_module(rule, ("not there", ""))
    with pytest.raises(ValueError, match="root"): rs.released_modules(tmp_path, "no_such_engine", [])
    sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "package", None) != "engine_of_a_test"]

# Black boxes

@pytest.fixture(scope="module")
def texts():
    "Texts of the small model, sampled by itself, with their prompts"
    starts = torch.tensor(prompts("code", 40, seed=5))
    x = sample_texts(raw_model("small"), starts, 96, torch.Generator().manual_seed(0), half=False)
    return [(row[:32], row[32:]) for row in x.tolist()]

def bets(texts, **engine):
    found = bb.TextBets(bb.BlackBox(None, **engine))
    for prompt, new in texts:
        found.observe(prompt, new)
        if found.over: break
    return found

def test_right_texts_pass_and_those_of_another_model_are_convicted(texts):
    right, wrong = bets(texts, target="small", rival="large"), bets(texts, target="large", rival="small")
    assert not right.over and right.visible < .2 and right.claim.tokens == 40*64
    assert wrong.over and wrong.texts < 40 and "rejected" in wrong.words

def test_prompts_are_used_in_turn_until_the_tokens_are_seen():
    "Two prompts over and over, with seeds of their own; at least one prompt is needed"
    asked = []
    def generate(prompt, n, seed):
        asked.append((prompt, seed))
        return [seed % 5]*n
    engine, starts = bb.BlackBox(generate, "small", "large"), prompts("code", 2, seed=1)
    bb.bet_on_texts(engine, starts, 2, 7, seed=10)
    assert asked == [(starts[k % 2], 10 + k) for k in range(len(asked))] and len(asked) == 4
    with pytest.raises(ValueError, match="starts"): bb.bet_on_texts(engine, [], 2, 7)
    with pytest.raises(ValueError, match="tokens"): bb.bet_on_texts(engine, starts, 2, 0)

def test_repeated_noise_and_a_missed_stop_token_are_convicted(texts):
    "One text again and again, after one prompt; and a text that goes on after its stop token"
    assert bets(texts[:1]*40, target="small", rival="large").over
    stop = texts[0][1][3]
    found = bets(texts[:1], target="small", rival="large", stop=(stop,))
    assert found.over and "after a stop token" in found.words

@proves("prop-part-of-draft")
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=5)
       .filter(lambda w: all(map(any, zip(*w)))), st.fractions(0, 1))
def test_shares(weights, s):
    p, q = (exact(*w) for w in zip(*weights))
    assert tv((1 - s)*p + s*q, p) == s*tv(p, q)
    assert isinstance(tv(p, q), (Fraction, int)) and np.all(p >= 0)
