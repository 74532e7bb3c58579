"Chapters 64b, 64c, 65: the record of engines, and the adapters that need none but transformers"
import json, sys
from dataclasses import replace
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import numpy as np, pytest, torch
from hypothesis import given, strategies as st

from helpers import proves
from specref import exact, prompts, reject, tv
from specref.certify import black_boxes as bb, engines as en, released as rs
from specref.certify.counts import ALPHA
from specref.certify.samplers import CASES, Interface
from specref.core.check import read_record
from specref.core.law import warp
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
    "Four samplers and four black boxes, at least, with a visible distance of .02"
    near = [row for row in RECORD["rows"] if (row["distance"] or 1) <= .02 and row["alpha"] == ALPHA]
    assert len({row["engine"] for row in near if row["how"] == "sampler"}) >= 4
    assert len({row["engine"] for row in near if row["how"] == "black box"}) >= 4

def test_planted_mistakes_are_convicted_and_right_samplers_not():
    right = RECORD["right"] + RECORD["right_texts"]
    assert all(found["alarms"] == 0 and found["seeds"] >= 200 for found in right)
    wrong = RECORD["planted"] + RECORD["planted_texts"]
    assert {found["engine"] for found in right} <= {found["engine"] for found in wrong}
    for found in wrong:
        assert found["convicted"] and set(found["convicted"].values()) == {found["seeds"]}
    assert all(found["equal"] == found["rows"] for found in RECORD["interpreter"])

def test_our_drafters_draft_the_same_in_engines():
    """Each text and the rounds of each, or the row says why not; with queries and keys in another order there
    are more rounds"""
    by_engine = {}
    for row in RECORD["served"]:
        by_engine.setdefault(row["engine"], set()).add(row["drafter"])
        assert row["same_texts"] == row["our_texts"] == row["texts"] == len(row["rounds_here"]) >= 10
        assert (row["rounds_there"] != row["rounds_here"]) is bool(row.get("why"))
        other = row.get("rounds_in_another_order")
        assert other is None or sum(other) > 1.1*sum(row["rounds_here"])
    assert by_engine == {"llama.cpp": {"eagle3", "dflash", "dspark"},
                         "vLLM (CPU)": {"eagle3", "eagle31", "eagle", "hass", "dflash", "peagle"}}

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
            one | dict(verdict="differs", by_design=True), one | dict(verdict="other texts", distance=None),
            one | dict(verdict="not run", how=None)]
    _, line = en.engine_summary(dict(rows=rows)).splitlines()
    assert line.split() == ["mine", "1", "sampler", "5", "0.01", "differs", "in", "2", "of", "5"]
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
    def together(requests): return [(request[0], generate(*request)) for request in requests]
    alone, starts = bb.BlackBox(generate, "small", "large"), prompts("code", 2, seed=1)
    for engine, most in ((alone, 4), (replace(alone, generate=None, at_once=3, together=together), 6)):
        asked.clear()
        bb.bet_on_texts(engine, starts, 2, 7, seed=10)
        assert asked == [(starts[k % 2], 10 + k) for k in range(most)]
    engine = alone
    with pytest.raises(ValueError, match="starts"): bb.bet_on_texts(engine, [], 2, 7)
    with pytest.raises(ValueError, match="tokens"): bb.bet_on_texts(engine, starts, 2, 0)

def test_vllm_is_asked_together(monkeypatch):
    "What each request asks; two texts of one prompt are two texts; one text alone"
    asked = []
    class Engine:
        def generate(self, given, params, use_tqdm):
            asked.extend(zip((x["prompt_token_ids"] for x in given), params))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(len(asked), j)) for j in range(2)])
                    for _ in given]
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    engine = bb.vllm_engine(Engine(), "large", stop=(0,), at_once=2, top_p=.9, n=2)
    assert engine.warped == dict(temperature=1., top_p=.9)
    texts = [*engine.texts((((5, k), 8, k) for k in range(3)))]
    assert [prompt for prompt, _ in texts] == [(5, 0)]*2 + [(5, 1)]*2 + [(5, 2)]*2
    assert texts[1][1] == [2, 1] and engine.generate((9,), 4, None) == [4, 0]
    told = dict(stop_token_ids=[0], ignore_eos=True, temperature=1., top_p=.9, n=2)
    assert asked[1] == ([5, 1], dict(max_tokens=8, seed=1, **told)) and asked[-1][1]["seed"] is None

def test_repeated_noise_and_a_missed_stop_token_are_convicted(texts):
    "One text again and again, after one prompt; and a text that goes on after its stop token"
    assert bets(texts[:1]*40, target="small", rival="large").over
    stop = texts[0][1][3]
    found = bets(texts[:1], target="small", rival="large", stop=(stop,))
    assert found.over and "after a stop token" in found.words

def test_a_law_may_depend_on_the_text(texts):
    "A law in which no token stands twice in a row, stated for texts in which some do"
    def unrepeated(logits, text): return warp(np.where(np.arange(len(logits)) == text[-1], -np.inf, logits))
    assert bb.BlackBox(None, warped=unrepeated).law(np.zeros(3), [1]).tolist() == [.5, 0, .5]
    assert bets(texts, target="small", rival="large", warped=unrepeated).texts < 10

class Settings:
    "Options that are set by name, with options of their own"
    def __getattr__(self, name): return self.__dict__.setdefault(name, Settings())

class Named:
    "Constants by name"
    def __getattr__(self, name): return name

class Reply(BaseHTTPRequestHandler):
    "What was asked, and the beginning of the prompt as tokens"
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        reply = dict(asked=asked, tokens=asked["prompt"][:asked["n_predict"]])
        self.wfile.write(json.dumps(reply).encode())
    def log_message(self, *args): pass

@pytest.fixture
def stand_in(monkeypatch):
    "A stand-in of llama.cpp's package: it keeps the settings, and its server answers with what it was asked"
    with ThreadingHTTPServer(("127.0.0.1", 0), Reply) as http:
        Thread(target=http.serve_forever).start()
        address = "http://%s:%d" % http.server_address
        def serve(params): return SimpleNamespace(listening_address=address, of=params)
        names = dict.fromkeys(("ggml_type", "llama_flash_attn_type", "common_speculative_type"), Named())
        monkeypatch.setitem(sys.modules, "xllamacpp", SimpleNamespace(
            CommonParams=Settings, Server=serve, **names))
        yield
        http.shutdown()

def test_llama_cpp_is_given_the_question(stand_in):
    "Its files and settings, then one request for each text and for each neighbour"
    set_to = bb.llama_server("in", "large", "small", "DRAFT_SIMPLE", draft=dict(probabilistic=True)).of
    draft = set_to.speculative.draft
    assert set_to.model.path == "in/large/model.gguf" and draft.mparams.path == "in/small/model.gguf"
    assert (draft.probabilistic, draft.n_max, set_to.n_ctx, draft.cpuparams.n_threads) == (True, 4, 512, 1)
    seen = []
    engine = bb.llama_engine("in", slots=2, watch=seen.append, temperature=.7)
    assert engine.generate((5, 6, 7), 2, None) == [5, 6] and engine.warped == dict(temperature=.7)
    (asked,) = (reply["asked"] for reply in seen)
    assert asked["seed"] == -1 and asked["samplers"] == bb.SAMPLERS and not asked["ignore_eos"]

@proves("prop-part-of-draft")
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=5)
       .filter(lambda w: all(map(any, zip(*w)))), st.fractions(0, 1))
def test_shares(weights, s):
    p, q = (exact(*w) for w in zip(*weights))
    assert tv((1 - s)*p + s*q, p) == s*tv(p, q)
    assert isinstance(tv(p, q), (Fraction, int)) and np.all(p >= 0)
