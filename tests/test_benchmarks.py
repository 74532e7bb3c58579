"Chapters 60a and 62: the contestants, what is timed, what is predicted, and what is written"
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specref.app import benchmarks as b, tour
from specref.app.tour import KINDS, UNTRAINED
from specref.core.cost import Costs
from specref.core.loop import Ledger, RoundCounts, autoregressive
from specref.core.rng import Seeded
from specref.models.embedded import embedded, prompts, raw_model

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
    ours = {(stop.recipe, stop.draft) for stop in UNTRAINED}
    assert len(THEIRS) == 6 and b.CONTEST.keys() - {*THEIRS} == ours
    before = {k: raw_model(k).generation_config.to_dict() for k in ("target", "small", "large")}
    b.CONTEST[name](0., PROMPT, 9, 0)
    (assistant, out), = seen
    plain = autoregressive(embedded(temperature=0), PROMPT, 9, Seeded(0))
    assert tuple(out[0, len(PROMPT):].tolist()) == plain and (assistant is None) == (name[1] == "")
    assert before == {k: raw_model(k).generation_config.to_dict() for k in before}
    if name[0] == b.SAME_SETTINGS: assert b.CONSTANT.items() <= assistant.generation_config.to_dict().items()


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


def ledger(rounds, probes=0):
    "Rounds (drafted, accepted) after a prompt of 7 tokens"
    seconds = [dict(draft=d*COSTS.draft, target=0, verify=0) for d, _ in rounds]
    out = Ledger([RoundCounts(d, d, a, a + 1, s) for (d, a), s in zip(rounds, seconds)])
    out.models = {"target": SimpleNamespace(tokens=6 + sum(1 + d + probes for d, _ in rounds))}
    return out


def predicted(costs, *args, loop=0): return b.predicted_seconds(costs, loop, [ledger(*args)], 7)


def test_the_prediction_is_the_theorem():
    "`Costs.speedup` where the prompt costs nothing; else with its cost; probes are read too"
    rounds, read = [(4, 2), (4, 4), (4, 0)], COSTS.seconds(9) - COSTS.seconds(5)
    assert COSTS.plain() / predicted(FREE, rounds, loop=COSTS.rest) == pytest.approx(COSTS.speedup(3, 4))
    assert predicted(FREE, rounds, 4) - predicted(FREE, rounds) == pytest.approx(3*read / 9)
    assert predicted(COSTS, rounds) - predicted(FREE, rounds) == pytest.approx(COSTS.seconds(7) / 9)


def test_the_prediction_takes_the_mean_of_the_costs():
    "Not the cost of the mean; the time of plain decoding beyond its calls is the loop's overhead"
    total = COSTS.seconds(1) + COSTS.seconds(9) + 8*COSTS.draft
    assert predicted(FREE, [(0, 0), (8, 8)]) == pytest.approx(total / 10)
    plain = b.Lap(20*(2 + .5) + COSTS.seconds(7), 0., (ledger([(0, 0)]*20),))
    assert b.overhead(COSTS, plain, 7) == pytest.approx(.5)


def test_a_mean_round_is_that_of_all_rounds():
    "Not the mean of the ledgers' means: a long text counts more than a short one"
    got = b.mean_round([ledger([(4, 2), (4, 4), (4, 0)]), ledger([(2, 2)])], COSTS)
    assert got["tokens_a_round"] == 3 == 1 / got["calls_a_token"] and got["accepted"] == 8/14
    assert got["draft_cost"] == pytest.approx(14*COSTS.draft / 4 / COSTS.plain())


def test_each_run_is_between_two_plain_runs(monkeypatch):
    "Prompt by prompt: the plain run after one stop is the one before the next"
    stops, done = [tour.Stop("a"), tour.Stop("b")], []
    def cold(stop, temperature, prompt, n, seed):
        done.append((stop.recipe, prompt))
        return tour.TourRun(stop, None, prompt, (), len(done))
    monkeypatch.setattr(tour, "decode_cold", cold)
    monkeypatch.setitem(tour.KINDS, "copy", lambda n, seed: range(n))
    bar = SimpleNamespace(update=lambda: None)
    runs = tour.decode_beside(stops, "copy", 0., 5, 2, bar)
    order = "autoregressive", "a", "autoregressive", "b", "autoregressive"
    assert done == [(name, k) for k in (0, 1) for name in order]
    beside = {s.recipe: [tuple(p.seconds for p in run.beside) for run in runs[s]] for s in stops}
    assert beside == dict(a=[(1, 3), (6, 8)], b=[(3, 5), (8, 10)])


def test_a_different_text_has_a_reason():
    "Another target, or the first token that differs: rounding only where two logits are nearly equal"
    stop, target, other = tour.PLAIN, embedded(temperature=0), SimpleNamespace(model=None)
    def run(text, target=target): return tour.TourRun(stop, None, PROMPT, text, 1., target)
    plain = run(tuple(autoregressive(target, PROMPT, 3, Seeded(0))))
    changed = run((*plain.text[:2], plain.text[2] + 1))
    assert tour.why_different(run(plain.text, other), plain) == ""
    assert tour.why_different(run(changed.text, other), plain) == "a target of its own"
    first, second = np.sort(np.log(embedded().law((*PROMPT, *plain.text[:2]))))[:-3:-1]
    gap = f"at token 2: the two likeliest logits differ by {first - second:.1e}"
    assert tour.why_different(changed, plain) == f"NOT ROUNDING {gap}"
    assert tour.why_different(changed, plain, enough=2*(first - second)) == f"rounding {gap}"


def test_a_window_of_probes_is_read():
    "Lookahead's target reads the probes of its window beside the drafts: here a second a token"
    ledger = b.CONTEST["Lookahead", ""](0., PROMPT, 12, 0)
    seconds = b.predicted_seconds(Costs({1: 1., 101: 101.}, 0.), 0., [ledger], len(PROMPT))
    paid = ledger.models["target"].tokens + 1 + ledger.seconds["draft"] + ledger.seconds["verify"]
    assert seconds * 12 == pytest.approx(paid)


SOME = ("autoregressive", ""), ("speculative sampling", "small"), ("transformers", ""), b.LOOKUP


@pytest.fixture
def short(monkeypatch):
    "A race of four systems, on one kind of text, with fixed costs"
    fakes = dict(
        lookups=lambda out: None, large_model_share=lambda: dict(parameters=1, ms_a_round=1., outside=.5),
        KINDS={"copy": KINDS["copy"]}, verifier_times=lambda V, gamma: dict.fromkeys(b.VERIFIERS, 1.),
        CONTEST={k: b.CONTEST[k] for k in SOME}, best_size=lambda *args: (8, 4, 1.5),
        sibling_rates=lambda draft, temperature: None, measure=lambda *args, **kw: COSTS)
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
