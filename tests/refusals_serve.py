"Serving: invalid arguments, each call with the name of the argument"
from functools import partial
from math import inf

from kinds import at_least, number
from specref import Chain, random_table, Seeded
from specref.bytes.characters import CharacterModel
from specref.bytes.latent import PatchRule
from specref.bytes.patches import HiddenBlockDraft, LocalDraft, PatchEnd, byte_target
from specref.draft.vocab import TextTokenizer
from specref.serve.servers import export_drafter, read_metrics
from specref.serve.simulator import (Arrival, ServingEngine, best_lengths, curve_seconds, fixed_length,
                                     queue_wait, random_requests, roofline_seconds, rounds_law, run_server,
                                     static_steps)
from specref.serve.steering import Problem, not_before, parsed, smc, smc_speculative, steer, survivors
from specref.speed.cost import Machine, ModelSize
from specref.speed.roofline import (SHAPES, Device, Workload, critical_batch, fit_engine, model_size, pays,
                                    prefill_seconds, slack, touched_experts, transfer_seconds)

SIZE, MACHINE, DEVICE = ModelSize(10, 2, 3, 5), Machine(4, 8), Device(9, 4, 8, "")
TABLE = random_table(3, 0)
FREE = Problem(TABLE, (0,), lambda text, ended: 1, 2)
COUNTS = [f"vllm:spec_decode_num_drafts_total {n}\nvllm:spec_decode_num_draft_tokens_total {n}\n"
          f"vllm:spec_decode_num_accepted_tokens_total {9 - n}" for n in (5, 3)]
LLAMA = SHAPES["Llama-2-7B"]

KINDS = [   # what is wrong, and each call with the arguments for which it is
    (at_least(0), (Workload, "gamma"), (partial(rounds_law, 3, alpha=.5), "gamma"), (fixed_length, "gamma"),
        (partial(best_lengths, len), "most"), (not_before, "length"), (partial(PatchEnd, len), "beyond")),
    (at_least(1), (partial(touched_experts, chosen=1, tokens=1), "experts"),
        (partial(pays, SIZE, DEVICE, Workload()), "number"),
        (partial(critical_batch, SIZE, MACHINE, tau=1, c=.1), "gamma"),
        (partial(prefill_seconds, SIZE, MACHINE), "prompt"), (partial(Arrival, 0, answer=1), "prompt"),
        (partial(Arrival, 0, 1), "answer"), (partial(ServingEngine, len), "texts"),
        (partial(best_lengths, len), "probe"), (partial(random_requests, 1, prompt=1, answer=5), "n"),
        (partial(static_steps, mean=5), "texts"), (partial(Problem, TABLE, (0,), max), "length"),
        (partial(smc, FREE, rng=Seeded(0)), "particles"), (partial(steer, FREE, rng=Seeded(0)), "particles"),
        (partial(survivors, [1, 2], rng=Seeded(0)), "n"),
        (partial(smc_speculative, FREE, TABLE, 1, rng=Seeded(0)), "gamma"),
        (partial(smc_speculative, FREE, TABLE, gamma=1, rng=Seeded(0)), "particles")),
    ([x for x in at_least(1) if x is not None],   # without it the drafter's own length
        (partial(export_drafter, "eagle", "vllm", "nowhere"), "gamma")),
    (at_least(64), (partial(ServingEngine, len), "tokens")),
    (number(0), (partial(touched_experts, 4, 2), "tokens"), (partial(pays, SIZE, DEVICE, Workload()), "rest"),
        (Workload, "context"), (partial(critical_batch, SIZE, MACHINE, 2, 2), "c"),
        (partial(slack, SIZE, MACHINE), "verified"), (partial(transfer_seconds, SIZE, link=5), "rows"),
        (partial(Arrival, prompt=1, answer=1), "arrival"),
        (partial(roofline_seconds, SIZE, MACHINE), "draft rest"),
        (partial(queue_wait, services={1: 1}), "rate"), (byte_target, "temperature")),
    (number(0, 1),
        (partial(run_server, [Arrival(0, 1, 1)], ServingEngine(len), fixed_length(1), rng=None), "alpha"),
        (partial(smc, FREE, 1, Seeded(0)), "threshold")),
    (number(0, 4), (partial(prefill_seconds, SIZE, MACHINE, 5), "cached")),
    (number(0.001, 2), (partial(pays, SIZE, DEVICE, Workload()), "share")),
    (number(0.25, 8), (partial(model_size, LLAMA), "bytes kv_bytes")),
    (number(1), (partial(random_requests, 1, 3, 1), "answer"), (partial(static_steps, 2), "mean")),
    (number(1, 3), (partial(Workload, gamma=2), "tau"),
        (partial(critical_batch, SIZE, MACHINE, 2, c=.1), "tau")),
    (number(1, 4), (partial(touched_experts, 4, tokens=1), "chosen")),
    (number(1e-09), (Workload, "batch"), (partial(transfer_seconds, SIZE, 1), "link")),
    (number(1e-12), (partial(random_requests, n=3, prompt=1, answer=5), "rate")),
]
ROWS = [
    # chapter 50: rooflines
    ("config", lambda: model_size({"hidden_size": 8}), "num_hidden_layers"),
    ("config", lambda: model_size({k: v for k, v in LLAMA.items() if k != "intermediate_size"})),
    ("device", lambda: pays(SIZE, "H1000", Workload()), "H100 SXM"),
    ("draft", lambda: pays(SIZE, DEVICE, Workload(), draft=-.1)),
    ("size", lambda: critical_batch(model_size(SHAPES["Mixtral-8x7B"]), MACHINE, 2, 2, .1), "crossings"),
    ("size", lambda: slack(model_size(SHAPES["Mixtral-8x7B"]), MACHINE, 2)),
    ("nodes", lambda: Workload(gamma=4, nodes=3)), ("measured", lambda: fit_engine([1], [1])),
    ("measured", lambda: fit_engine([1, 2], [1, 2, 3])),
    ("measured", lambda: fit_engine([1, 2], [1, 0])),
    # chapter 50a: the simulated engine
    ("requests", lambda: run_server([], ServingEngine(len), fixed_length(1), .5, None)),
    ("requests", lambda: run_server([Arrival(0, 5, 5)], ServingEngine(len, rows=9), fixed_length(1), 1, 0)),
    ("rows", lambda: curve_seconds([dict(batch=1, gamma=0, seconds=1.)])),
    ("rows", lambda: curve_seconds([dict(batch=b, gamma=2, seconds=1.) for b in (1, 2)])),
    # chapter 51: particles
    ("ctx", lambda: Problem(TABLE, (), max, 2)),
    ("potential", lambda: smc(Problem(TABLE, (0,), lambda text, ended: -1, 2), 1, Seeded(0))),
    ("extensions", lambda: steer(FREE, 1, Seeded(0), 0)),
    *[("pattern", lambda bad=bad: parsed(bad))
      for bad in ("(a", "a)", "[a", "[^a]", "[]", "*a", "a|+", "\\", "\\d")],
    ("potential", lambda: smc(Problem(TABLE, (0,), lambda text, ended: inf, 2), 1, Seeded(0))),
    ("draft", lambda: smc_speculative(FREE, random_table(4, 0), 1, 1, Seeded(0))),
    # chapter 50b: servers
    ("server", lambda: export_drafter("eagle", "llama.cpp", "nowhere"), "vllm"),
    ("drafter", lambda: export_drafter("falcon", "vllm", "nowhere"), "eagle3"),
    ("drafter", lambda: export_drafter("nobody", "vllm", "nowhere")),
    ("out", lambda: export_drafter("eagle", "sglang", ".")), ("text", lambda: read_metrics("")),
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
    ("threshold", lambda: PatchRule()), ("most", lambda: PatchRule(1., most=0)),
    ("patcher", lambda: PatchEnd(None)), ("target", lambda: LocalDraft(TABLE), "PatchTarget"),
    ("target", lambda: HiddenBlockDraft(TABLE)), ("size", lambda: HiddenBlockDraft(byte_target(), 9), "8"),
    ("tree", lambda: Chain(HiddenBlockDraft(byte_target(), 1), 2)((65, 66), Seeded(0))),
    ("ctx", lambda: byte_target().law((65, 256))), ("ctx", lambda: byte_target().law(())),
]
