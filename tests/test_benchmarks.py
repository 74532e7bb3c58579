"Chapter 62: who races, what is timed, what is predicted, and what is written"
import json
from types import SimpleNamespace

import pytest
import torch

from helpers import refuses
from specref.app import benchmarks as b
from specref.core.rng import Seeded
from specref.core.cost import Costs, measure
from specref.core.loop import Ledger, autoregressive
from specref.models.embedded import raw_model, embedded, prompts
from specref.app.tour import KINDS, UNTRAINED

PROMPT = prompts("code", 1)[0]


def test_everybody_races():
    "Every untaught stop of the tour; transformers plainly, with its prompt lookup; and assisted by each draft, with our settings and with its own"
    names = list(b.CONTEST)
    assert {(s.recipe, s.draft) for s in UNTRAINED} <= set(names) and ("transformers", "") in names and b.LOOKUP in names and len(set(names)) == len(names)
    assert {("transformers, assisted, " + how, d) for how in ("same settings", "its defaults") for d in ("small", "large")} <= set(names)
    assert b.CONSTANT == dict(num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.)


@pytest.mark.parametrize("name", [n for n in b.CONTEST if n[0].startswith("transformers")], ids="-".join)
def test_transformers_writes_what_it_is_asked_for(name, monkeypatch):
    "n tokens, the same as ours at temperature 0; the assistant is given, with the settings that the name says; no configuration is left changed"
    seen, before = [], {k: raw_model(k).generation_config.to_dict() for k in ("target", "small", "large")}
    view = b.generation_view
    def spy(name, **how):
        model = view(name, **how)
        if name != "target": return model
        generate = model.generate
        model.generate = lambda *args, **kw: seen.append((kw.get("assistant_model"), out := generate(*args, **kw))) or out
        return model
    monkeypatch.setattr(b, "generation_view", spy)
    b.CONTEST[name](0., PROMPT, 9, 0)
    (assistant, out), = seen
    assert tuple(out[0, len(PROMPT):].tolist()) == autoregressive(embedded(temperature=0), PROMPT, 9, Seeded(0))
    assert (assistant is None) == (name[1] == "") and before == {k: raw_model(k).generation_config.to_dict() for k in before}
    if name[0].endswith("same settings"): assert b.CONSTANT.items() <= assistant.generation_config.to_dict().items()


def test_time_inside_is_that_of_the_forward_passes(monkeypatch):
    "On a clock that only the forward pass moves, everything is inside; on one that moves at every look, as many ticks as passes; the hooks are taken off"
    now, model = [0.], raw_model("small")
    monkeypatch.setattr(b, "perf_counter", lambda: now[0])
    tick = model.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 2.))
    with b.ModelSeconds(model) as inside:
        for _ in range(3): model(torch.tensor([[1, 2]]))
        now[0] += 5.
    tick.remove()
    assert inside.seconds == 6. and not model._forward_hooks and not model._forward_pre_hooks


def test_a_lap_keeps_the_ledgers_of_ours():
    "One ledger a prompt from us, none from transformers; a part of the time is outside"
    ours = b.lap(b.CONTEST["speculative sampling", "small"], prompts("code", 2), 8, 0., 0)
    theirs = b.lap(b.CONTEST["transformers", ""], prompts("code", 2), 8, 0., 0)
    assert [l.num_emitted_tokens for l in ours.ledgers] == [8, 8] and theirs.ledgers == ()
    assert all(x.seconds > 0 and 0 < x.outside < 1 for x in (ours, theirs))


def test_the_prediction_is_the_theorem():
    "For chains it is `Costs.speedup` when the loop's own time is `rest`, the prompt costs nothing and drafting what it is priced at; probes are read too"
    costs = Costs({1: 2., 5: 3., 9: 4.}, .25, .1)
    def ledger(rounds, probes=0):
        "Rounds (drafted, accepted) after a prompt of 7 tokens"
        book = Ledger([(d, d, a, a + 1, (d*costs.draft, 0, 0)) for d, a in rounds])
        book.models = {"target": SimpleNamespace(tokens=6 + sum(1 + d + probes for d, _ in rounds))}
        return book
    free, rounds = SimpleNamespace(seconds=lambda m: 0 if m == 7 else costs.seconds(m)), [(4, 2), (4, 4), (4, 0)]
    token = b.predicted_seconds(free, costs.rest, [ledger(rounds)], 7)
    assert costs.plain() / token == pytest.approx(costs.speedup(3, 4))
    assert b.predicted_seconds(free, 0, [ledger(rounds, probes=4)], 7) - b.predicted_seconds(free, 0, [ledger(rounds)], 7) == pytest.approx(3*(costs.seconds(9) - costs.seconds(5)) / 9)
    assert b.predicted_seconds(free, 0, [ledger([(0, 0), (8, 8)])], 7) == pytest.approx((costs.seconds(1) + costs.seconds(9) + 8*costs.draft) / 10)   # the mean of the prices, not the price of the mean
    assert b.predicted_seconds(costs, 0, [ledger(rounds)], 7) - b.predicted_seconds(free, 0, [ledger(rounds)], 7) == pytest.approx(costs.seconds(7) / 9)
    plain = b.Lap(20*(2 + .5) + costs.seconds(7), 0., (ledger([(0, 0)]*20),))
    assert b.overhead(costs, plain, 7) == pytest.approx(.5)


def test_the_mean_round_is_that_of_all_rounds_together():
    ledgers = [b.CONTEST["speculative sampling", "small"](1., p, n, 3) for p, n in zip(prompts("english", 2), (5, 20))]
    rounds, got = sum(len(l.rounds) for l in ledgers), b.mean_round(ledgers, Costs({1: 2.}, 0.))
    assert got["tokens_a_round"] == 25/rounds and got["calls_a_token"] == pytest.approx(rounds/25) and got["draft_cost"] == pytest.approx(sum(l.seconds["draft"] for l in ledgers) / rounds / 2)
    assert got["accepted"] == sum(l.num_accepted_tokens for l in ledgers) / (4*rounds)


def test_a_window_of_probes_is_read():
    "Lookahead's own books: the tokens that its target reads beyond drafts are the probes of its window"
    ledger = b.CONTEST["Lookahead", ""](0., PROMPT, 12, 0)
    costs = Costs({1: 1., 101: 101.}, 0.)   # a second a token
    assert b.predicted_seconds(costs, 0., [ledger], len(PROMPT)) * 12 == pytest.approx(ledger.models["target"].tokens + 1 + ledger.seconds["draft"] + ledger.seconds["verify"])


def test_the_record_is_written_whole(tmp_path, monkeypatch, capsys):
    "A tiny race: a row for everyone in every kind; a file that reads back to the printed table; nothing for bad numbers"
    monkeypatch.setattr(b, "lookups", lambda out: None)
    monkeypatch.setattr(b, "large_model_share", lambda: dict(parameters=1, ms_a_round=1., outside=.5))
    some = [("autoregressive", ""), ("speculative sampling", "small"), ("Lookahead", ""), ("transformers", ""), b.LOOKUP, *(k for k in b.CONTEST if "same settings" in k[0])]
    monkeypatch.setattr(b, "KINDS", {"copy": KINDS["copy"]})
    monkeypatch.setattr(b, "CONTEST", {k: b.CONTEST[k] for k in some})
    monkeypatch.setattr(b, "measure", lambda target, draft, ctxs, sizes, repeats: measure(target, draft, ctxs[:1], repeats=1))
    b.record(tmp_path/"deep"/"run.json", laps=1, each=1, n=6)
    got = json.loads((tmp_path/"deep"/"run.json").read_text())
    judged = json.loads((tmp_path/"deep"/"judges.json").read_text())
    assert capsys.readouterr().out.strip() == f"{b.result_table(got)}\n{b.verifier_words(judged)}" and sorted(f.name for f in (tmp_path/"deep").iterdir()) == ["judges.json", "run.json"]   # `lookups` has a test of its own
    assert list(judged["verdict_ms"]) == list(b.VERIFIERS) and min(judged["verdict_ms"].values()) > 0 and judged["roads_per_s"] > 0 and (judged["tokens"], judged["drafts"]) == (32_000, 8)
    for t in (0., 1.): assert [(r["system"], r["draft"]) for r in got["rows"] if r["temperature"] == t] == list(b.CONTEST)
    for r in got["rows"]:
        assert r["tokens_per_s"] > 0 and 0 < r["outside"] < 1 and r["kind"] == "copy"
        assert ("predicted" in r) == (not r["system"].startswith("transformers")) == ("draft_cost" in r) and r["over_lookup"] > 0
        if (r["system"], r["draft"]) == ("autoregressive", ""): assert r["over_plain"] == 1
        if "predicted" in r: assert r["measured_over_predicted"] == pytest.approx(r["over_plain"] / r["predicted"])
    for bad in dict(laps=0), dict(each=0), dict(n=-1), dict(threads=0): refuses(*bad, b.record, tmp_path/"never.json", **bad)
    refuses("threads", b.time_verifiers, tmp_path/"never.json", threads=0)
    assert not (tmp_path/"never.json").exists()


def test_a_large_model_is_measured_apart():
    "A small stand-in: the parameters of its target, a share of its rounds"
    got = b.large_model_share(turns=2, gamma=2, shape=(2, 32, 64), V=70)
    assert got["parameters"] == 70*32 + 2*(4*32*32 + 3*32*64 + 2*32) + 32 and 0 < got["outside"] < 1 and got["ms_a_round"] > 0


def test_structures_are_timed_and_weighed(tmp_path, capsys):
    "A row for each structure, seconds for each size, bytes that grow with what is held; bad sizes are refused before anything is written"
    b.lookups(tmp_path/"lookups.json", sizes=(100, 1000))
    got = json.loads((tmp_path/"lookups.json").read_text())
    assert [r["structure"] for r in got["rows"]] == list(b.STRUCTURES) and got["sizes"] == [100, 1000] and got["held_after"] == 1000
    assert all(len(r["seconds"]) == 2 and min(r["seconds"]) > 0 and 4 <= r["bytes_a_token"] < 4000 for r in got["rows"]) and len(capsys.readouterr().out.splitlines()) == len(b.STRUCTURES)
    assert b.memory_of(lambda tokens: [0]*8*len(tokens), [1]*1000) > 60_000 > b.memory_of(lambda tokens: [0], [1]*1000)
    refuses("sizes", b.lookups, tmp_path/"never.json", sizes=(5,))
    assert not (tmp_path/"never.json").exists()
