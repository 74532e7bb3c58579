"The tasks of `make gpu` on this CPU, one tree or text each, kernels compiled alone (`make gpu-rehearsal`)"
from importlib import import_module
from pathlib import Path

import torch

from specref.gpu.bench.clocks import on_host
from specref.gpu.bench.decoding import random_pair
from specref.gpu.bench.measured import VERDICTS, facts_of, print_lines, rehearsal_table
from specref.gpu.bench.tasks import GpuSizes, fused_kernels, gpu_tasks, run_tasks, stored_verdicts
from specref.gpu.bench.tasks import torch_verifier

class Rehearsed:
    "A verifier that compiles its launch and returns the verdict in torch; it notes what was compiled"
    def __init__(self, fused, in_torch): self.fused, self.in_torch, self.noted = fused, in_torch, {}
    def __call__(self, *args, check=True, **shape):
        with import_module("specref.gpu.kernels").CompileOnly() as compiled:
            self.fused(*args, check=False, **shape)
        self.noted |= {k.hash: k for k in compiled.kernels}
        return self.in_torch(*args, check=check)

def rehearse(task, verifiers, known):  # -> Task
    "The same task on one tree or text, with a note of the kernels that `known` has not"
    small = dict(B=1, draws=1000, length=64)
    def run(**given):
        for v in verifiers: v.noted.clear()
        found = task.run(**{k: min(x, small[k]) if k in small else x for k, x in given.items()})
        new = [k for v in verifiers for key, k in v.noted.items() if key not in known]
        ahead = [x["kernels"] for x in found.get("compiled", ()) if not isinstance(x["kernels"], str)]
        known.update([k.hash for k in new], [k["hash"] for kernels in ahead for k in kernels])
        return dict(found, not_ahead=[k.name for k in new])
    return task._replace(run=run)

def tiny_pair(device, temperature):
    "A random pair of the vocabulary that is measured, small in all else"
    small = dict(layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    return random_pair(device, temperature, **small)

def rehearsal(out, processes=2):  # -> what is in the file
    "All tasks of a GPU on this CPU, on one tree or text each; kernels are compiled, torch decides"
    size = GpuSizes(stored=stored_verdicts(VERDICTS), processes=processes, least=1, repeats=1, clock=on_host,
                    n=2, race=dict(models=dict(shallow=tiny_pair)))
    verifiers, known = [*map(Rehearsed, fused_kernels(), map(torch_verifier, ("", "block")))], set()
    tasks = [rehearse(task, verifiers, known) for task in gpu_tasks(torch.device("cpu"), verifiers, size)]
    out.unlink(missing_ok=True)
    return run_tasks(tasks, out, facts_of("make gpu-rehearsal", "cpu"), {})   # without limits of time

if __name__ == "__main__": print_lines(rehearsal_table(rehearsal(Path(__file__).with_suffix(".json"))))
