"Chapter 44a: early layers as a draft of any acceptance rate, and timed runs in alternating order"
import pytest, torch
from specref import Engine, prompts
from specref.gpu.bench import decoding as r
from specref.gpu.verify import verify_trees
from specref.models.embedded import raw_model

CPU = torch.device("cpu")
SIZES = dict(layers=4, hidden_size=32, intermediate_size=64, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=600, dtype=torch.float32)
def small(device, temperature=1., wanted=.8): return r.random_pair(device, temperature, wanted, **SIZES)
def tokens(seed=1): return torch.randint(600, (4, 64), generator=torch.Generator().manual_seed(seed))

def test_early_layers_are_a_draft():
    "The draft shares the target's weights: an eighth of the bytes at full size, about a billion parameters"
    target, draft = small(CPU)
    assert draft.model.layers[0] is target.model.layers[0] and len(draft.model.layers) == 2
    assert draft.lm_head.weight is target.lm_head.weight and draft.model.norm is target.model.norm
    sizes = dict(vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_attention_heads=32,
                 num_key_value_heads=4, tie_word_embeddings=True)
    def of_layers(n): return r.AutoModelForCausalLM.from_config(r.LlamaConfig(num_hidden_layers=n, **sizes))
    with torch.device("meta"): whole, early = map(of_layers, (26, 2))
    assert .12 < r.weight_bytes(early) / r.weight_bytes(whole) < .13
    assert 1e9 < sum(w.numel() for w in whole.parameters()) < 1.4e9

@pytest.mark.parametrize("temperature", [0., .7])
def test_acceptance_falls_with_the_scale(temperature):
    "With late layers that write nothing all is accepted; the larger their writes, the less"
    target, draft = small(CPU, wanted=0.)
    full, found = [w.clone() for w in r.late_writes(target, 2)], []
    for scale in (0., .1, .3, 1.):
        for w, v in zip(r.late_writes(target, 2), full): w.copy_(v * scale)
        found.append(r.overlap_on_texts(target, draft, temperature, tokens()))
    assert found[0] == pytest.approx(1, abs=1e-5) and found == sorted(found, reverse=True) and found[-1] < .7

@pytest.mark.parametrize("temperature", [0., 1.])
@pytest.mark.parametrize("wanted", [.6, .95])
def test_the_acceptance_is_the_requested_one(wanted, temperature):
    "Also on tokens that the bisection did not use"
    found = r.overlap_on_texts(*small(CPU, temperature, wanted), temperature, tokens())
    assert found == pytest.approx(wanted, abs=.08)

def test_acceptance_is_the_overlap():
    "By hand, from the logits; at temperature 0 how often the heaviest tokens agree; from a position on"
    target, draft = small(CPU)
    with torch.inference_mode(): p, q = (f(input_ids=tokens()).logits for f in (target, draft))
    overlap = torch.minimum((2*p).softmax(-1), (2*q).softmax(-1)).sum(-1)[:, 60:].mean().item()
    assert r.overlap_on_texts(target, draft, .5, tokens(), 60) == pytest.approx(overlap, abs=1e-6)
    agree = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert r.overlap_on_texts(target, draft, 0., tokens()) == pytest.approx(agree, abs=.02)

def test_shipped_models_are_copies():
    "Moving them to a device does not change the models of other chapters"
    target, draft = r.embedded_pair(CPU)
    assert target is not raw_model("target") and draft is not raw_model("small")
    assert torch.equal(target.lm_head.weight, raw_model("target").lm_head.weight)

@pytest.mark.parametrize("temperature, B", [(0., 1), (1., 2)])
def test_the_race(temperature, B):
    "Every program that can run has a speed; at temperature 0 all give the same text"
    row = r.decoding_speed("x", (-1, 0, 1), temperature, B, 8, 1, CPU, models=dict(x=small))
    speeds, tau = row["tokens_per_s"], row["tokens_a_round"]
    assert set(speeds) == {"plain", "engine", "generate", "static cache", *(["assisted"] if B == 1 else [])}
    assert all(x > 0 for x in speeds.values()) and row["engine over plain"] > 0 and 0 < row["alpha"] <= 1
    assert 1 <= tau <= 3 and row["predicted"] == pytest.approx(tau / (1 + 2*row["c"]))
    if temperature: return
    (target, draft), ctxs = small(CPU, temperature), prompts("code", 1)
    def engine(shape): return Engine(target, draft, shape, temperature=0., verify=verify_trees)
    engines = map(engine, ((-1,), (-1, 0, 1)))
    ours = [list(r.timed_engine_run(e, ctxs, 8, 0)[1][0]) for e in engines]
    other = [r.transformers_run(target, ctxs, 8, 0., 0, *more)[1][0] for more in ((), (draft, 2))]
    assert row["same"] == B and ours[0] == ours[1] == other[0] == other[1]

@pytest.mark.parametrize("name", ["timed_engine_run", "transformers_run"])
def test_the_race_continues_without_a_failed_program(name, monkeypatch):
    "The error of a failed program is in its row, and the others have speeds"
    def broken(*args, **options): raise RuntimeError("out of memory")
    monkeypatch.setattr(r, name, broken)
    row = r.decoding_speed("x", (-1, 0), 1., 1, 4, 1, CPU, models=dict(x=small))
    both = ("plain", "engine"), ("generate", "static cache", "assisted")
    failed, rest = both[::1 if name == "timed_engine_run" else -1]
    speeds = row["tokens_per_s"]
    assert {speeds[k] for k in failed} == {"RuntimeError: out of memory"} and all(speeds[k] > 0 for k in rest)
    assert ("engine over plain" in row) == (name == "transformers_run") and "engine over generate" not in row
    assert 0 < row["alpha"] <= 1

def test_each_program_runs_first_once():
    "The order alternates, and the first turn is not counted; a program that fails later has no speed"
    order = []
    def run(name): return lambda k: (order.append((name, k)), (len(order), name))[1]
    def fails(k):
        if k > 2: raise ValueError("late")
        return 1., "x"
    took, texts, wrong = r.paired_turns(dict(a=run("a"), b=run("b"), c=fails), 2, 2)
    assert order == [("a", 0), ("b", 0), ("b", 2), ("a", 2), ("a", 4), ("b", 4)]
    assert set(took) == {"a", "b"} and len(took["a"]) == 2
    assert wrong == dict(c="ValueError: late") and texts["a"] == "a"
