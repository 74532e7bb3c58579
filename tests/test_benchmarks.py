"Chapter 62: who races, what is timed, what is predicted, and what is written"
import json
from fractions import Fraction

import pytest
import torch

from helpers import refuses
from specref import benchmarks as b
from specref.chance import Seeded
from specref.cost import Costs, measure
from specref.loop import plain
from specref.models import bare, embedded, prompts
from specref.tour import STOPS

PROMPT = prompts("code", 1)[0]


def test_everybody_races():
    "Every stop of the tour; transformers plainly; and assisted by each draft, with our settings and with its own"
    names = list(b.CONTEST)
    assert {(s.recipe, s.draft) for s in STOPS} <= set(names) and ("transformers", "") in names and len(set(names)) == len(names)
    assert {("transformers, assisted, " + how, d) for how in ("same settings", "its defaults") for d in ("small", "large")} <= set(names)
    assert b.CONSTANT == dict(num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.)


@pytest.mark.parametrize("name", [n for n in b.CONTEST if n[0].startswith("transformers")], ids="-".join)
def test_transformers_writes_what_it_is_asked_for(name, monkeypatch):
    "n tokens, the same as ours at temperature 0; the assistant is given, with the settings that the name says; no configuration is left changed"
    seen, before = [], {k: bare(k).generation_config.to_dict() for k in ("target", "small", "large")}
    view = b.view
    def spy(name, **how):
        model = view(name, **how)
        if name != "target": return model
        generate = model.generate
        model.generate = lambda *args, **kw: seen.append((kw.get("assistant_model"), out := generate(*args, **kw))) or out
        return model
    monkeypatch.setattr(b, "view", spy)
    b.CONTEST[name](0., PROMPT, 9, 0)
    (assistant, out), = seen
    assert tuple(out[0, len(PROMPT):].tolist()) == plain(embedded(temperature=0), PROMPT, 9, Seeded(0))
    assert (assistant is None) == (name[1] == "") and before == {k: bare(k).generation_config.to_dict() for k in before}
    if name[0].endswith("same settings"): assert b.CONSTANT.items() <= assistant.generation_config.to_dict().items()


def test_time_inside_is_that_of_the_forward_passes(monkeypatch):
    "On a clock that only the forward pass moves, everything is inside; on one that moves at every look, as many ticks as passes; the hooks are taken off"
    now, model = [0.], bare("small")
    monkeypatch.setattr(b, "perf_counter", lambda: now[0])
    tick = model.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 2.))
    with b.Inside(model) as inside:
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
    "tokens over the price of a round; for a chain it is `Costs.speedup`; the mean round is that of all rounds together"
    costs = Costs({1: Fraction(2), 5: Fraction(3)}, Fraction(1, 4), Fraction(1, 10))
    assert b.predicted(costs, Fraction(3), 4, 4) == costs.speedup(Fraction(3), 4)
    assert b.predicted(costs, Fraction(3), 4, 2) > b.predicted(costs, Fraction(3), 4, 4) > b.predicted(costs, Fraction(2), 4, 4)
    ledgers = [b.CONTEST["speculative sampling", "small"](1., p, n, 3) for p, n in zip(prompts("english", 2), (5, 20))]
    rounds = sum(len(l.rounds) for l in ledgers)
    assert b.mean_round(ledgers) == (25 / rounds, 4., 4.)


def test_the_record_is_written_whole(tmp_path, monkeypatch, capsys):
    "A tiny race: a row for everyone in every kind; a file that reads back to the printed table; nothing for bad numbers"
    monkeypatch.setattr(b, "large", lambda: dict(parameters=1, ms_a_round=1., outside=.5))
    monkeypatch.setattr(b, "DOMAINS", {"code": 1.})
    monkeypatch.setattr(b, "measure", lambda target, draft, ctxs: measure(target, draft, ctxs[:1], repeats=1))
    b.record(tmp_path/"deep"/"run.json", laps=1, each=1, n=6)
    got = json.loads((tmp_path/"deep"/"run.json").read_text())
    judged = json.loads((tmp_path/"deep"/"judges.json").read_text())
    assert capsys.readouterr().out.strip() == f"{b.text(got)}\n{b.in_words(judged)}" and sorted(f.name for f in (tmp_path/"deep").iterdir()) == ["judges.json", "run.json"]
    assert list(judged["verdict_ms"]) == list(b.JUDGES) and min(judged["verdict_ms"].values()) > 0 and judged["roads_per_s"] > 0 and (judged["tokens"], judged["drafts"]) == (32_000, 8)
    for t in (0., 1.): assert [(r["system"], r["draft"]) for r in got["rows"] if r["temperature"] == t] == list(b.CONTEST)
    for r in got["rows"]:
        assert r["tokens_per_s"] > 0 and 0 < r["outside"] < 1 and ("predicted" in r) >= (r["draft"] != "" and not r["system"].startswith("transformers"))
        assert ("c" in r) == ("predicted" in r and r["draft"] != "") and ("predicted" in r) <= (r["system"] != "autoregressive")
        if (r["system"], r["draft"]) == ("autoregressive", ""): assert r["over_plain"] == 1
        if "predicted" in r: assert r["measured_over_predicted"] == pytest.approx(r["over_plain"] / r["predicted"])
    for bad in dict(laps=0), dict(each=0), dict(n=-1), dict(threads=0): refuses(*bad, b.record, tmp_path/"never.json", **bad)
    refuses("threads", b.weigh, tmp_path/"never.json", threads=0)
    assert not (tmp_path/"never.json").exists()


def test_a_large_model_is_measured_apart():
    "A small stand-in: the parameters of its target, a share of its rounds"
    got = b.large(turns=2, gamma=2, shape=(2, 32, 64), V=70)
    assert got["parameters"] == 70*32 + 2*(4*32*32 + 3*32*64 + 2*32) + 32 and 0 < got["outside"] < 1 and got["ms_a_round"] > 0
