"Chapters 60a and 62: the contestants, what is timed, what is predicted, and what is written"
import json
from types import SimpleNamespace

import pytest, torch

from specref import autoregressive, Costs, embedded, Ledger, prompts, Seeded
from specref.app import benchmarks as b, tour
from specref.app.tour import KINDS
from specref.core.check import read_record
from specref.core.loop import RoundCounts
from specref.models.embedded import raw_model

PROMPT = prompts("code", 1)[0]
THEIRS = [name for name in b.CONTEST if name[0].startswith("transformers")]

@pytest.fixture
def seen(monkeypatch):
    "(assistant, output) of every call of transformers' `generate` on the target"
    calls, view = [], b.generation_view
    def spy(name, **how):
        model = view(name, **how)
        generate = model.generate
        def spied(*args, **kw):
            calls.append((kw.get("assistant_model"), generate(*args, **kw)))
            return calls[-1][1]
        if name == "target": model.generate = spied
        return model
    monkeypatch.setattr(b, "generation_view", spy)
    return calls

@pytest.mark.parametrize("name", THEIRS, ids="-".join)
def test_transformers_runs_with_the_named_settings(name, seen):
    "The text of ours at temperature 0; the assistant has the named settings; no configuration is changed"
    chosen = {("goodput length", draft) for draft in ("small", "large")}
    ours = {(contestant.recipe, contestant.draft) for contestant in b.RACED} | chosen
    assert len(THEIRS) == 6 and b.CONTEST.keys() - {*THEIRS} == ours
    before = {k: raw_model(k).generation_config.to_dict() for k in ("target", "small", "large")}
    b.CONTEST[name](0., PROMPT, 9, 0)
    (assistant, out), = seen
    plain = autoregressive(embedded(temperature=0), PROMPT, 9, Seeded(0))
    assert tuple(out[0, len(PROMPT):].tolist()) == plain and (assistant is None) == (name[1] == "")
    assert before == {k: raw_model(k).generation_config.to_dict() for k in before}
    if name[0] == b.SAME_SETTINGS: assert b.CONSTANT.items() <= assistant.generation_config.to_dict().items()

def test_the_goodput_contestant_drafts_what_its_costs_favour(monkeypatch):
    "Free drafts: the longest; drafts that cost a target call: none but a probe; the text of plain decoding"
    plain, drafted = autoregressive(embedded(temperature=0), PROMPT, 30, Seeded(0)), []
    for draft in (0., 1.):
        monkeypatch.setattr(b, "pair_costs", lambda name, temperature: Costs({1: 1., 65: 1.}, draft))
        ledger = b.CONTEST["goodput length", "small"](0., PROMPT, 30, 0)
        drafted.append(ledger.column("drafted"))
        assert ledger.num_emitted_tokens == len(plain) == 30
    assert drafted[0][0] == 20 and drafted[1] == [int(i % 21 == 20) for i in range(len(drafted[1]))]

def test_time_inside_is_that_of_the_forward_passes(monkeypatch):
    "On a clock that only the forward pass moves, everything is inside; the hooks are removed"
    now, model = [0.], raw_model("small")
    monkeypatch.setattr(b, "perf_counter", lambda: now[0])
    tick = model.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 2.))
    with b.ModelSeconds(model) as inside:
        for _ in range(3): model(torch.tensor([[1, 2]]))
        now[0] += 5.
    tick.remove()
    assert inside.seconds == 6. and not model._forward_hooks and not model._forward_pre_hooks

COSTS = Costs({1: 2., 5: 3., 9: 4.}, .25, .1)
FREE = SimpleNamespace(seconds=lambda m: 0 if m == 7 else COSTS.seconds(m))   # after a prompt of 7 tokens

def ledger(rounds, probes=0, share=1., draft_calls=0):
    "Rounds (drafted, accepted) after a prompt of 7 tokens, on a target of 10 layers"
    seconds = [dict(draft=d*COSTS.draft, target=1., verify=0) for d, _ in rounds]
    out = Ledger([RoundCounts(d, d, a, a + 1, s) for (d, a), s in zip(rounds, seconds)])
    tokens = 6 + sum(1 + d + probes for d, _ in rounds)
    out.models = dict(target=SimpleNamespace(tokens=tokens, layer_tokens=10*share*tokens),
                      draft=SimpleNamespace(calls=draft_calls))
    return out

def reading(costs, *args, **kw): return b.reading_seconds(costs, ledger(*args, **kw), 7, 10)

def test_the_prediction_is_the_theorem():
    "`Costs.speedup` where the prompt costs nothing; else with its cost; probes are read too"
    rounds, more = [(4, 2), (4, 4), (4, 0)], COSTS.seconds(9) - COSTS.seconds(5)
    prices = b.Prices(FREE, 1., COSTS.draft, COSTS.rest, 10)
    seconds = sum(prices.parts(ledger(rounds, draft_calls=12), 7).values())
    assert 9*COSTS.plain() / seconds == pytest.approx(COSTS.speedup(3, 4))
    assert reading(FREE, rounds, 4) - reading(FREE, rounds) == pytest.approx(3*more)
    assert reading(COSTS, rounds) - reading(FREE, rounds) == pytest.approx(COSTS.seconds(7))

def test_the_prediction_takes_the_mean_of_the_costs():
    "Not the cost of the mean; layers that have run in drafting are not read again, and a call is never free"
    assert reading(FREE, [(0, 0), (8, 8)]) == pytest.approx(COSTS.seconds(1) + COSTS.seconds(9))
    assert reading(COSTS, [(9, 9)], share=.5) == pytest.approx(COSTS.seconds(3.5) + COSTS.seconds(5))
    assert reading(COSTS, [(9, 9)], share=.01) == pytest.approx(2*COSTS.seconds(1))

def test_prices_are_those_of_a_run():
    "Per call of the drafts, or per round where there is none; the rest is neither target nor draft"
    for calls, price in (6, 8*COSTS.draft / 6), (0, 8*COSTS.draft / 2):
        lap = b.Lap((5.,), ledgers=(ledger([(4, 2), (4, 0)], draft_calls=calls),))
        got = b.Prices.of(COSTS, lap, 7, 10)
        assert got.level == pytest.approx(2 / reading(COSTS, [(4, 2), (4, 0)]))
        assert got.parts(lap.ledgers[0], 7)["target"] == pytest.approx(2)
        assert got.draft == pytest.approx(price) and got.rest == pytest.approx((5 - 2 - 8*COSTS.draft) / 2)

def test_a_mean_round_is_that_of_all_rounds():
    "Not the mean of the ledgers' means: a long text counts more than a short one"
    got = b.mean_round([ledger([(4, 2), (4, 4), (4, 0)]), ledger([(2, 2)])], [ledger([(0, 0)])])
    assert got == pytest.approx(dict(tokens_a_round=3, accepted=8/14, draft_cost=14*COSTS.draft / 4))

SOME = ("autoregressive", ""), ("speculative sampling", "small"), ("transformers", ""), b.LOOKUP

def laps(**seconds):
    "Laps of contestants without ledgers, plain decoding among them"
    seen = {("autoregressive" if k == "plain" else k, ""): [b.Lap(x)] for k, x in seconds.items()}
    return b.Laps(seen, {}, [], [[(1, 2)]])

def test_ratios_are_paired_by_prompt():
    "The median of the ratios, and an interval whose confidence is that of the median's ranks"
    row = b.result_row(("a", ""), laps(plain=(2., 4., 6., 8., 90.), a=(1., 4., 2., 8., 9.)), 10)
    assert row["over_plain"] == 2 and (row["low"], row["high"]) == (1, 10) and row["tokens_per_s"] == 2.5
    assert row["confidence"] == 1 - 2 / 2**5 and "predicted" not in row

def test_a_target_of_its_own_has_its_own_plain_decoding():
    assert b.plain_of(("LayerSkip", "own")) == b.plain_of(("autoregressive", "LayerSkip"))
    assert b.plain_of(("Kangaroo", "own")) == b.plain_of(("transformers", "")) == ("autoregressive", "")
    for name in b.CONTEST: assert b.plain_of(name) in b.CONTEST
    names = *SOME, ("autoregressive", "SPEED")
    own = b.Laps({name: [b.Lap((1.,), .9)] for name in names}, {}, [], [])
    others = {"over_transformers", "over_lookup", "outside"}   # of the embedded models alone
    assert not others & b.result_row(("autoregressive", "SPEED"), own, 1).keys()
    assert others <= b.result_row(SOME[1], own, 1).keys()

def test_each_run_is_between_two_plain_runs(monkeypatch):
    "Prompt by prompt: the plain run after one contestant is the one before the next, on the same target"
    contestants, done = [tour.Contestant("a"), tour.SourceContestant("LayerSkip"), tour.Contestant("b")], []
    def cold(contestant, temperature, prompt, n, seed):
        done.append((contestant.recipe + contestant.draft, prompt))
        return tour.TourRun(contestant, None, prompt, (), len(done))
    monkeypatch.setattr(tour, "decode_cold", cold)
    monkeypatch.setitem(tour.KINDS, "copy", lambda n, seed: range(n))
    bar = SimpleNamespace(update=lambda: None)
    runs = tour.decode_beside(contestants, "copy", 0., 5, 2, bar)
    plain, own = "autoregressive", "autoregressiveLayerSkip"
    order = plain, "a", plain, own, "LayerSkip", own, plain, "b", plain
    assert done == [(name, k) for k in (0, 1) for name in order]
    beside = {s.recipe: [tuple(p.seconds for p in run.beside) for run in runs[s]] for s in contestants}
    assert beside == dict(a=[(1, 3), (10, 12)], LayerSkip=[(4, 6), (13, 15)], b=[(7, 9), (16, 18)])

def test_a_different_text_has_a_reason():
    "Another target, or the first token that differs"
    contestant, target, other = tour.PLAIN, embedded(temperature=0), SimpleNamespace(model=None)
    def run(text, target=target): return tour.TourRun(contestant, None, PROMPT, text, 1., target)
    plain = run(tuple(autoregressive(target, PROMPT, 3, Seeded(0))))
    changed = run((*plain.text[:2], plain.text[2] + 1))
    assert tour.why_different(run(plain.text, other), plain) == ""
    assert tour.why_different(run(changed.text, other), plain) == "a target of its own"
    assert tour.why_different(changed, plain).startswith("NOT ROUNDING at token 2: logits ")

def test_a_window_of_probes_is_read():
    "Lookahead's target reads the probes of its window beside the drafts: here a second a token"
    ledger = b.CONTEST["Lookahead", ""](0., PROMPT, 12, 0)
    seconds = b.reading_seconds(Costs({1: 1., 101: 101.}, 0.), ledger, len(PROMPT), b.layers_run(ledger))
    assert seconds == pytest.approx(ledger.models["target"].tokens + 1)

@pytest.fixture
def short(monkeypatch):
    "A race of four systems, on one kind of text, with fixed costs"
    fakes = dict(
        lookups=lambda out: None, large_model_share=lambda: dict(parameters=1, ms_a_round=1., outside=.5),
        RACE_KINDS={"copy": KINDS["copy"]}, verifier_times=lambda V, gamma: dict.fromkeys(b.VERIFIERS, 1.),
        CONTEST={k: b.CONTEST[k] for k in SOME}, best_size=lambda *args: (8, 4, 1.5),
        sibling_rates=lambda draft, temperature: None, measure=lambda *args, **kw: COSTS,
        growth=lambda: dict(enumeration=[(3, 1.5, 4)]))
    for name, fake in fakes.items(): monkeypatch.setattr(b, name, fake)

def test_the_record_is_written_whole(short, tmp_path, capsys):
    "A row for every system; a file that reads back to the printed table"
    b.record(tmp_path/"deep"/"run.json", laps=1, each=1, n=6)
    files = (tmp_path/"deep"/f"{name}.json" for name in ("run", "verifiers"))
    got, verifiers = (json.loads(file.read_text()) for file in files)
    assert capsys.readouterr().out.strip() == f"{b.result_table(got)}\n{b.verifier_words(verifiers)}"
    assert [(row["system"], row["draft"]) for row in got["rows"]] == [*SOME, *SOME]
    for row in got["rows"]:
        ours = not row["system"].startswith("transformers")
        assert row["tokens_per_s"] > 0 and 0 < row["outside"] < 1 and ("predicted" in row) == ours
        if row["system"] == "autoregressive": assert row["over_plain"] == 1 == row["tokens_a_round"]

def test_a_large_tree_is_not_read_whole():
    "Rows that a verdict reads, in trees of 4 and of 340 nodes; paths and their estimate"
    rows = b.growth_with_trees((1, 4), V=50, turns=5)
    assert [(row["verifier"], row["nodes"]) for row in rows] == [
        (name, n) for n in (4, 340) for name in ("reject", "traversal")]
    assert all(1 <= row["read"] < 10 and row["ms"] > 0 for row in rows)
    for paths, seconds, guess in b.growth_of_enumeration((1, 2), turns=1):
        assert seconds > 0 and .5 < guess / paths < 2

def test_the_share_of_a_large_model_is_measured():
    "A small model: the parameters of its target, a share of its rounds; and every verifier is timed"
    got = b.large_model_share(turns=2, gamma=2, shape=(2, 32, 64), V=70)
    assert got["parameters"] == 70*32 + 2*(4*32*32 + 3*32*64 + 2*32) + 32
    assert 0 < got["outside"] < 1 and got["ms_a_round"] > 0
    assert min(b.verifier_times(50, 3, turns=2).values()) > 0

def test_structures_are_timed_and_weighed(tmp_path, monkeypatch):
    "A row for each structure, seconds for each size, bytes that grow with what is stored"
    monkeypatch.setattr(b, "domain_ids", lambda domain, held_out: [x**2 % 97 for x in range(500)])
    b.lookups(tmp_path/"lookups.json", sizes=(100, 1000))
    got = json.loads((tmp_path/"lookups.json").read_text())
    assert [row["structure"] for row in got["rows"]] == list(b.STRUCTURES) and got["held_after"] == 1000
    assert all(len(row["seconds"]) == 2 and 4 <= row["bytes_a_token"] < 4000 for row in got["rows"])
    assert b.memory_of(lambda tokens: [0]*8*len(tokens), [1]*1000) > 60_000 > b.memory_of(len, [1]*1000)

def test_other_libraries_decode_the_same_prompts():
    "In the stored run of `make peers`: everyone on every kind of text, and the texts of plain decoding"
    got = read_record("peers")
    kinds = {kind: {row["contestant"]: row for row in got["rows"]
                    if (row["kind"], row["temperature"]) == (kind, 0)} for kind in KINDS}
    for rows in kinds.values():
        libraries = {name.partition(",")[0] for name in rows}
        assert libraries == {"transformers", "mlx-lm", "onnxruntime-genai", "llama.cpp", "specref"}
        assert all(row["equal_texts"] == got["prompts"] for name, row in rows.items() if "specref" in name)
        for name in "transformers, generate", "llama.cpp, plain": assert rows[name]["over"][name] == 1

def test_plain_decoding_is_ahead_of_llama_cpp_and_of_generate():
    "On every kind of text, at both temperatures, of all that they offer without a draft"
    for row in read_record("peers")["rows"]:
        if row["contestant"] != "specref, plain": continue
        assert row["over"]["llama.cpp, plain"] > 1.3 and row["over"]["llama.cpp, plain, float16"] > 1.2
        assert row["over"]["transformers, generate"] > 4
    theirs, ours = read_record("peers")["random"]
    assert ours["over"][theirs["contestant"]] > 1 and ours["equal_texts"] == read_record("peers")["prompts"]
