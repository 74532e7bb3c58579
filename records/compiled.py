"""Every kernel, compiled for Hopper with the Triton that is installed: registers, spills, barriers; recorded

`compiled.py` compares with the record of this version and ends with 1 where a kernel needs more than there;
a version without a record is added.
"""
import json
import sys
from functools import partial
from pathlib import Path

import torch
import triton
from tqdm import tqdm

from specref.core.check import write_record
from specref.gpu import draws, kernels, rules
from specref.gpu.bench.clocks import TREE_SHAPES, case_shapes
from specref.gpu.bench.tasks import compile_launch, gpu_tasks
from specref.gpu.verify import verify_chains, verify_trees

RECORD = Path(__file__).with_suffix(".json")
LIMITS = "registers", "spilled", "barriers"


def rule_launches(tree="64 nodes", V=151_936):  # -> name, launch
    "The rules of chapter 42b and the draws of 44b, on probabilities and on logits"
    whole = torch.empty(4, dtype=torch.int64, device="meta")
    for kind, logits in (("probabilities", False), ("logits", True)):
        batch, p, q, coins, picks = case_shapes(TREE_SHAPES[tree], V, 4, logits)
        for f, *args in ((rules.fused_match_trees, p, coins), (rules.fused_match_coupled, p, whole, whole),
                         (rules.fused_typical_trees, p, picks),
                         (rules.fused_traverse_trees, p, q, coins, picks)):
            yield f"{f.__name__}, {kind}", partial(f, batch, *args, check=False)
    z, u = torch.empty(4, 1, V, dtype=torch.bfloat16, device="meta"), coins.view(4, 1, -1)[..., :4]
    yield "fused_draw_children, logits", partial(draws.fused_draw_children, z, u, picks, True)


def compiled(launch):  # -> resources of each kernel
    with kernels.CompileOnly() as found: launch()
    return [dict(name=k.name, **kernels.resources(k)) for k in found.kernels]


def words(given): return ", ".join(f"{k} {x}" for k, x in given.items() if x or k == "logits")


def found():  # -> name, resources
    "What the benchmark compiles ahead, then the other rules"
    compiling = gpu_tasks(torch.device("cpu"), (verify_trees, verify_chains))[1]
    for given in tqdm(compiling.run.args[0]):
        yield words(given), [{k: x for k, x in of.items() if k != "hash"} for of in compile_launch(**given)]
    for name, launch in tqdm([*rule_launches()]): yield name, compiled(launch)


def worse(name, now, was):  # -> lines
    "Where a kernel needs more than on record, and those that spill with all registers there are"
    for new, old in zip(now, was, strict=True):
        more = [f"{k} {new[k]}, was {old[k]}" for k in LIMITS if new[k] > old[k]]
        if more: yield f"{name}: {new['name']}: " + ", ".join(more)
        if new["spilled"] and "registers 128" not in name: yield f"{name}: spills {new['spilled']} bytes"


if __name__ == "__main__":
    releases = json.loads(RECORD.read_text())["releases"] if RECORD.exists() else {}
    now = dict(found())
    was = releases.get(triton.__version__, now)
    wrong = [line for name, x in now.items() for line in worse(name, x, was.get(name, x))]
    print(*wrong, f"{len(now)} launches, {len(wrong)} worse than on record", sep="\n")
    if not wrong:
        got = dict(releases=releases | {triton.__version__: now})
        write_record(RECORD, "make compat-triton", got, "triton")
    sys.exit(bool(wrong))
