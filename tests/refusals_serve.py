"Serving: invalid arguments, each call with the name of the argument"
from math import inf

from specref.speed.cost import Machine, ModelSize
from specref.core.rng import Seeded
from specref.core.target import random_table
from specref.draft.vocab import TextTokenizer
from specref.bytes.latent import PatchRule
from specref.bytes.characters import CharacterModel
from specref.bytes.patches import HiddenBlockDraft, LocalDraft, PatchEnd, byte_target
from specref.speed.roofline import (SHAPES, Device, Workload, critical_batch, fit_engine, model_size, pays,
                                    prefill_seconds, slack, touched_experts, transfer_seconds)
from specref.serve.servers import export_drafter, read_metrics
from specref.serve.simulator import (Arrival, ServingEngine, best_lengths, curve_seconds, fixed_length,
                                     queue_wait, random_requests, roofline_seconds, rounds_law, run_server,
                                     static_steps)
from specref.serve.steering import Problem, not_before, parsed, smc, smc_speculative, steer, survivors
from specref.core.drafters import Chain

SIZE, MACHINE, DEVICE = ModelSize(10, 2, 3, 5), Machine(4, 8), Device(9, 4, 8, "")
TABLE = random_table(3, 0)
FREE = Problem(TABLE, (0,), lambda text, ended: 1, 2)
COUNTS = [f"vllm:spec_decode_num_drafts_total {n}\nvllm:spec_decode_num_draft_tokens_total {n}\n"
          f"vllm:spec_decode_num_accepted_tokens_total {9 - n}" for n in (5, 3)]
LLAMA = SHAPES["Llama-2-7B"]

ROWS = [
    # chapter 50: rooflines
    ("config", lambda: model_size({"hidden_size": 8}), "num_hidden_layers"),
    ("config", lambda: model_size({k: v for k, v in LLAMA.items() if k != "intermediate_size"})),
    ("bytes", lambda: model_size(LLAMA, bytes=0)),
    ("kv_bytes", lambda: model_size(LLAMA, kv_bytes=16)),
    ("chosen", lambda: touched_experts(4, 5, 1)),
    ("experts", lambda: touched_experts(0, 1, 1)),
    ("tokens", lambda: touched_experts(4, 2, -1)),
    ("device", lambda: pays(SIZE, "H1000", Workload()), "H100 SXM"),
    ("share", lambda: pays(SIZE, DEVICE, Workload(), share=0)),
    ("number", lambda: pays(SIZE, DEVICE, Workload(), number=0)),
    ("draft", lambda: pays(SIZE, DEVICE, Workload(), draft=-.1)),
    ("rest", lambda: pays(SIZE, DEVICE, Workload(), rest=-1)),
    ("batch", lambda: Workload(batch=0)),
    ("context", lambda: Workload(context=-1)),
    ("gamma", lambda: Workload(gamma=-1)),
    ("tau", lambda: Workload(gamma=2, tau=3.5)),
    ("size", lambda: critical_batch(model_size(SHAPES["Mixtral-8x7B"]), MACHINE, 2, 2, .1), "crossings"),
    ("size", lambda: slack(model_size(SHAPES["Mixtral-8x7B"]), MACHINE, 2)),
    ("nodes", lambda: Workload(gamma=4, nodes=3)),
    ("tau", lambda: critical_batch(SIZE, MACHINE, 2, 4, .1)),
    ("gamma", lambda: critical_batch(SIZE, MACHINE, 0, 1, .1)),
    ("c", lambda: critical_batch(SIZE, MACHINE, 2, 2, -1)),
    ("prompt", lambda: prefill_seconds(SIZE, MACHINE, 0)),
    ("cached", lambda: prefill_seconds(SIZE, MACHINE, 5, 5)),
    ("verified", lambda: slack(SIZE, MACHINE, -1)),
    ("rows", lambda: transfer_seconds(SIZE, -1, 5)),
    ("link", lambda: transfer_seconds(SIZE, 1, 0)),
    ("measured", lambda: fit_engine([1], [1])),
    ("measured", lambda: fit_engine([1, 2], [1, 2, 3])),
    ("measured", lambda: fit_engine([1, 2], [1, 0])),
    # chapter 50a: the simulated engine
    ("arrival", lambda: Arrival(-1, 1, 1)),
    ("prompt", lambda: Arrival(0, 0, 1)),
    ("answer", lambda: Arrival(0, 1, 0)),
    ("texts", lambda: ServingEngine(len, texts=0)),
    ("tokens", lambda: ServingEngine(len, texts=64, tokens=63)),
    ("requests", lambda: run_server([], ServingEngine(len), fixed_length(1), .5, None)),
    ("requests", lambda: run_server([Arrival(0, 5, 5)], ServingEngine(len, rows=9), fixed_length(1), 1, 0)),
    ("gamma", lambda: rounds_law(3, -1, .5)),
    ("draft", lambda: roofline_seconds(SIZE, MACHINE, draft=-1)),
    ("rest", lambda: roofline_seconds(SIZE, MACHINE, rest=-1)),
    ("alpha", lambda: run_server([Arrival(0, 1, 1)], ServingEngine(len), fixed_length(1), 2, None)),
    ("gamma", lambda: fixed_length(-1)),
    ("most", lambda: best_lengths(len, -1)),
    ("probe", lambda: best_lengths(len, probe=0)),
    ("rate", lambda: queue_wait(-1, {1: 1})),
    ("rate", lambda: random_requests(0, 3, 1, 5)),
    ("n", lambda: random_requests(1, 0, 1, 5)),
    ("answer", lambda: random_requests(1, 3, 1, .5)),
    ("rows", lambda: curve_seconds([dict(batch=1, gamma=0, seconds=1.)])),
    ("rows", lambda: curve_seconds([dict(batch=b, gamma=2, seconds=1.) for b in (1, 2)])),
    ("texts", lambda: static_steps(0, 5)),
    ("mean", lambda: static_steps(2, .5)),
    # chapter 51: particles
    ("length", lambda: Problem(TABLE, (0,), max, 0)),
    ("ctx", lambda: Problem(TABLE, (), max, 2)),
    ("potential", lambda: smc(Problem(TABLE, (0,), lambda text, ended: -1, 2), 1, Seeded(0))),
    ("particles", lambda: smc(FREE, 0, Seeded(0))),
    ("threshold", lambda: smc(FREE, 1, Seeded(0), threshold=2)),
    ("particles", lambda: steer(FREE, 0, Seeded(0))),
    ("extensions", lambda: steer(FREE, 1, Seeded(0), 0)),
    ("n", lambda: survivors([1, 2], 0, Seeded(0))),
    ("gamma", lambda: smc_speculative(FREE, TABLE, 1, 0, Seeded(0))),
    ("particles", lambda: smc_speculative(FREE, TABLE, 0, 1, Seeded(0))),
    ("length", lambda: not_before(-1)),
    *[("pattern", lambda bad=bad: parsed(bad))
      for bad in ("(a", "a)", "[a", "[^a]", "[]", "*a", "a|+", "\\", "\\d")],
    ("potential", lambda: smc(Problem(TABLE, (0,), lambda text, ended: inf, 2), 1, Seeded(0))),
    ("draft", lambda: smc_speculative(FREE, random_table(4, 0), 1, 1, Seeded(0))),
    # chapter 50b: servers
    ("server", lambda: export_drafter("eagle", "llama.cpp", "nowhere"), "vllm"),
    ("gamma", lambda: export_drafter("eagle", "vllm", "nowhere", gamma=0)),
    ("drafter", lambda: export_drafter("falcon", "vllm", "nowhere"), "eagle3"),
    ("drafter", lambda: export_drafter("nobody", "vllm", "nowhere")),
    ("out", lambda: export_drafter("eagle", "sglang", ".")),
    ("text", lambda: read_metrics("")),
    ("text", lambda: read_metrics("vllm:spec_decode_num_drafts_total 0.0")),
    ("text", lambda: read_metrics("\n".join(COUNTS[0].splitlines()[:2]))),
    ("text", lambda: read_metrics(COUNTS[0], before=COUNTS[0])),
    ("before", lambda: read_metrics("sglang:spec_accept_length 2.9", before="")),
    ("before", lambda: read_metrics(*COUNTS)),
    # chapter 52: characters
    ("tokenizer", lambda: CharacterModel(TABLE, ("a", "b"))),
    ("tokenizer", lambda: CharacterModel(TABLE, TextTokenizer(("a", "b")))),
    ("beam", lambda: CharacterModel(TABLE, TextTokenizer(("a", "b", "ab")), beam=0)),
    ("ctx", lambda: CharacterModel(TABLE, TextTokenizer(("a", "b", "ab")), begin=())),
    # chapters 52a and 52b: bytes
    ("threshold", lambda: PatchRule()),
    ("most", lambda: PatchRule(1., most=0)),
    ("patcher", lambda: PatchEnd(None)),
    ("beyond", lambda: PatchEnd(len, -1)),
    ("target", lambda: LocalDraft(TABLE), "PatchTarget"),
    ("target", lambda: HiddenBlockDraft(TABLE)),
    ("size", lambda: HiddenBlockDraft(byte_target(), 9), "8"),
    ("tree", lambda: Chain(HiddenBlockDraft(byte_target(), 1), 2)((65, 66), Seeded(0))),
    ("temperature", lambda: byte_target(-1)),
    ("ctx", lambda: byte_target().law((65, 256))),
    ("ctx", lambda: byte_target().law(())),
]
