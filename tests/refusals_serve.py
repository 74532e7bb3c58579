"Serving: invalid arguments, each call with the name of the argument"
from specref.core.cost import Machine, ModelSize
from specref.serve.roofline import (SHAPES, Device, Workload, critical_batch, fit_engine, model_size, pays,
                                    prefill_seconds, slack, touched_experts, transfer_seconds)

SIZE, MACHINE, DEVICE = ModelSize(10, 2, 3, 5), Machine(4, 8), Device(9, 4, 8, "")
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
]
