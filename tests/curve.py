"""Trained drafters on more and more data (`make curve`): curve.py RECORD WORK STEPS SEED NAME [NAME ...]

A run that is in the record is not repeated; what is interrupted goes on. RECORD also has the networks of
the package. Every network is evaluated on the same texts of the target, which none was trained on."""
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from specref.app.tour import provenance_of_run
from specref.core.check import write_json
from specref.train.harness import (StateDataset, TargetModel, evaluate, mixed_precision, read_card,
                                   save_network)
from specref.train.registry import (RECIPES, SHIPPED_DRAFTERS, TrainingRun, load_network, provenance,
                                    tokenizer_and_model, training_rows)
from specref.train.texts import find_devices

TEXTS, HELD, LENGTH, DEPTH = 4224, 128, 256, 4
PEAKS = {}   # where another rate than the recipe's is the best of those tried

def prepare(work):
    "The target and its texts, of which the last are held out"
    devices = find_devices()
    tok, model = tokenizer_and_model("target", "float32", devices.device)
    base = TargetModel(model)
    texts = training_rows(tok, base, Path(work)/f"{base.key}-{LENGTH}", None, TEXTS, LENGTH)
    return base, replace(texts, held=HELD), devices

def by_text(net, run):
    "Tokens a round of a chain and overlaps by depth, text by text"
    x, counts = run.texts.part(held=True)
    held = run.states(net, x, counts)[:].to(run.devices.device)
    def alone(i): return StateDataset(held.x[i:i+1], {k: s[i:i+1] for k, s in held.states.items()})
    with mixed_precision(run.base): found = [evaluate(net, run.base, alone(i), DEPTH) for i in range(len(x))]
    return [round(mean, 4) for mean, _ in found], np.mean([b for _, b in found], 0).round(4).tolist()

def row_of(name, net, run, **made):
    tokens, overlaps = by_text(net, run)
    return dict(name=name, **made, tokens=float(np.mean(tokens)), overlaps=overlaps, by_text=tokens)

def shipped(name, run):
    "The row of the package's own network"
    card, net = read_card(SHIPPED_DRAFTERS/name), load_network(name, model=run.base.model).float()
    made = {k: card["recipe"][k] for k in ("steps", "seed", "peak", "texts", "rows")}
    return row_of(name, net.to(run.devices.device), run, **made, evaluations=card["evaluations"])

def trained(name, steps, seed, run):
    "The row of a training run; the network is stored, too"
    net, evaluations, _ = run.train(name, steps, seed)
    folder = run.work/f"{name}-{steps}-{seed}"
    texts, how = len(run.texts.x) - HELD, run.recipe
    made = dict(steps=steps, seed=seed, peak=how.peak, texts=texts, rows=how.rows)
    row = row_of(name, net, run, **made, evaluations=evaluations)
    card = dict(name=name, corpus=0., length=LENGTH, threads=torch.get_num_threads(), **made)
    save_network(net, run.base, folder, recipe=card, evaluations=evaluations, tokens=row["tokens"],
                 overlaps=row["overlaps"], **provenance(run.texts.x))
    return row

def add_run(record, name, steps, seed, given):
    "Add a run to the record, and with the first run of a name the network of the package"
    base, texts, devices = given
    recipe = replace(RECIPES[name], peak=PEAKS.get(name, RECIPES[name].peak))
    run = TrainingRun(recipe, base, replace(texts, plain=None), texts_folder(base), devices)
    def has(**want): return any(want.items() <= row.items() for row in rows_of(record))
    found = []
    if not has(name=name, texts=2048): found.append(shipped(name, run))
    if not has(name=name, steps=steps, seed=seed, texts=TEXTS + 64 - HELD):
        found.append(trained(name, steps, seed, run))
    about = provenance_of_run(threads=torch.get_num_threads(), held=HELD, length=LENGTH, depth=DEPTH)
    if found: write_json(record, about | dict(rows=rows_of(record) + found))

def texts_folder(base): return Path(sys.argv[2])/f"{base.key}-{LENGTH}"
def rows_of(record): return json.loads(Path(record).read_text())["rows"] if Path(record).exists() else []

if __name__ == "__main__":
    record, work, steps, seed, *names = sys.argv[1:]
    torch.set_num_threads(1 if not torch.cuda.is_available() else 8)
    given = prepare(work)
    for name in names: add_run(record, name, int(steps), int(seed), given)
