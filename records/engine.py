"Seconds of a round of the batch engine on this CPU, by batch and draft length (`make record-engine`)"
from itertools import product
from pathlib import Path

import numpy as np
import torch

from specref.core.check import write_record
from specref.gpu.bench.decoding import embedded_pair, timed_engine_run
from specref.gpu.engine import Engine
from specref.models.embedded import prompts

def measured_rounds(pair, batch, gammas, n, repeats):  # -> rows
    "Rounds of one batch at temperature 1, the draft lengths in turn; the first turn does not count"
    ctxs, found = prompts("code", batch), {g: [] for g in gammas}
    for k, g in product(range(repeats + 1), gammas):
        took, texts = timed_engine_run(Engine(*pair, (-1, *range(g))), ctxs, n, k*batch)
        rounds = [len(text.ledger.rounds) for text in texts]
        if k: found[g].append((took / max(rounds), n*batch / sum(rounds)))
    return [dict(batch=batch, gamma=g, seconds=float(np.median([s for s, _ in runs])),
                 tokens=float(np.mean([tokens for _, tokens in runs]))) for g, runs in found.items()]

def measure_engine(path, batches=(1, 2, 4, 8, 16, 32), gammas=(0, 2, 4), n=32, repeats=5, threads=1):
    "Median seconds of a round and mean tokens a round, written to `path`"
    torch.set_num_threads(threads)
    pair = embedded_pair("cpu")
    rows = [row for batch in batches for row in measured_rounds(pair, batch, gammas, n, repeats)]
    write_record(path, "make record-engine", dict(threads=threads, repeats=repeats, tokens=n, rows=rows))

if __name__ == "__main__": measure_engine(Path(__file__).with_suffix(".json"))
