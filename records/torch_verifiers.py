"The torch implementation on this CPU beside the reference that it replaces (`make gpu-torch`, an hour)"
import os
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path

import numpy as np
import torch

from specref.core.rng import verdict_tape
from specref.gpu.bench.clocks import TREE_SHAPES, bounds, bytes_read, make_cases, on_host, or_reason
from specref.gpu.bench.measured import cpu_table, facts_of, print_lines
from specref.gpu.bench.tasks import Task, run_tasks
from specref.gpu.layout import unpack
from specref.gpu.verify import verify_trees
from specref.verify.reject import reject

QUIET = .5   # the load up to which a run is stored

def reference_verify(case, cast=np.float64):  # -> () -> token lists
    "`reject` for every tree of a batch, with all that it needs laid out beforehand"
    rows, N = case.p.numpy().astype(cast), case.batch.n // case.batch.B
    roots = case.batch.token[case.batch.root.long()].tolist()
    trees = unpack(case.batch, case.q, [(x,) for x in roots])
    for tree in trees: tree.law[1:] = [law.astype(cast) for law in tree.law[1:]]
    coins, picks = case.coins.view(-1, N).tolist(), case.picks.tolist()
    tapes = [verdict_tape(u, [w]*N) for u, w in zip(coins, picks)]
    def verify(i): return reject(rows[i*N:(i+1)*N], trees[i], tapes[i]).tokens(trees[i])
    return lambda: [*map(verify, range(len(trees)))]

def token_lists(out): return [tuple(t[:n]) for t, n in zip(out.tokens.tolist(), out.length.tolist())]

def against_reference(tree, V, B, kind, threads, laps, device=torch.device("cpu")):
    "Milliseconds in torch and of the reference for `B` trees, medians over `laps` turns, and the bytes"
    torch.set_num_threads(threads)
    cases, dtype = make_cases(TREE_SHAPES[tree], V, B, 2, .7, device), getattr(torch, kind)
    cases = [c._replace(p=c.p.to(dtype), q=c.q.to(dtype)) for c in cases]
    runs = [(partial(verify_trees, *c, check=False), reference_verify(c, kind)) for c in cases]
    same = all(token_lists(in_torch()) == reference() for in_torch, reference in runs)
    took = [[1e3 * on_host([f], 1) for f in pair] for pair in islice(cycle(runs), laps)]
    in_torch, reference = np.median(took, axis=0)
    ratio = float(np.median([a / b for a, b in took]))
    return dict(torch_ms=float(in_torch), reference_ms=float(reference), ratio=ratio, same=same,
                bytes=or_reason(lambda: bytes_read(cases, verify_trees)[0]))

def copy_speed(threads, size=1 << 28):
    "Bytes a second of a copy with so many threads"
    torch.set_num_threads(threads)
    return dict(copy=bounds(torch.device("cpu"), size)["copy"])

def cpu_tasks(V=32_000, B=64, laps=30, Bs=(1, 4, 16, 64), size=1 << 28):
    "All that is measured on a CPU"
    given, trees = dict(V=V, laps=laps), ("chain 8", "16 nodes")
    for threads in (1, 2):
        yield Task("copy", copy_speed, dict(threads=threads, size=size))
        for kind, tree in product(("float64", "float32"), trees):
            yield Task("torch", against_reference, dict(given, tree=tree, B=B, kind=kind, threads=threads))
    for b, tree in product(Bs, trees):
        yield Task("size", against_reference, dict(given, tree=tree, B=b, kind="float64", threads=1))

def torch_times(out, **sizes):  # -> what is in the file
    "All tasks, on a machine that does nothing else"
    load = os.getloadavg()[0]
    if load > QUIET: raise SystemExit(f"the load of this machine is {load:.1f}, wanted below {QUIET}")
    return run_tasks(cpu_tasks(**sizes), out, facts_of("make gpu-torch", "cpu"))

if __name__ == "__main__": print_lines(cpu_table(torch_times(Path(__file__).with_suffix(".json"))))
