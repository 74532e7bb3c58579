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
from specref.train.harness import StateDataset, TargetModel, evaluate, mixed_precision, read_card
from specref.train.registry import (RECIPES, SHIPPED_DRAFTERS, TrainingRun, load_network,
                                    tokenizer_and_model, training_rows)
from specref.train.texts import find_devices

TEXTS, HELD, LENGTH, DEPTH = 4160, 128, 256, 4

def prepare(work):  # -> TrainingRun without a recipe
    "The target and its texts, of which the last are held out"
    devices = find_devices()
    tok, model = tokenizer_and_model("target", "float32", devices.device)
    base = TargetModel(model)
    folder = Path(work)/f"{base.key}-{LENGTH}"
    texts = training_rows(tok, base, folder, None, TEXTS + HELD - 64, LENGTH)   # which adds 64
    return TrainingRun(None, base, replace(texts, held=HELD, plain=None), folder, devices)

def row_of(net, run, **made):
    "What was made, with its tokens a round of a chain, text by text, and its overlaps by depth"
    x, counts = run.texts.part(held=True)
    held = run.states(net, x, counts)[:].to(run.devices.device)
    def alone(i): return StateDataset(held.x[i:i+1], {k: s[i:i+1] for k, s in held.states.items()})
    with mixed_precision(run.base): found = [evaluate(net, run.base, alone(i), DEPTH) for i in range(len(x))]
    tokens, overlaps = ([each[k] for each in found] for k in (0, 1))
    return made | dict(tokens=float(np.mean(tokens)), overlaps=np.mean(overlaps, 0).round(4).tolist(),
                       by_text=np.round(tokens, 4).tolist())

def shipped(name, run):
    "The row of the package's own network"
    card, net = read_card(SHIPPED_DRAFTERS/name), load_network(name, model=run.base.model).float()
    made = {k: card["recipe"][k] for k in ("steps", "seed", "peak", "texts", "rows")}
    return row_of(net.to(run.devices.device), run, name=name, **made, evaluations=card["evaluations"])

def trained(name, steps, seed, run):
    "The row of a training run"
    net, evaluations, _ = run.train(name, steps, seed)
    made = dict(steps=steps, seed=seed, peak=run.recipe.peak, texts=TEXTS, rows=run.recipe.rows)
    return row_of(net, run, name=name, **made, evaluations=evaluations)

def add_run(record, name, steps, seed, run):
    "Add a run to the record, and with the first run of a name the network of the package"
    rows = json.loads(record.read_text())["rows"] if record.exists() else []
    known = {(r["name"], r["steps"], r["seed"], r["texts"]) for r in rows}
    if name not in {r["name"] for r in rows}: rows.append(shipped(name, run))
    if (name, steps, seed, TEXTS) not in known: rows.append(trained(name, steps, seed, run))
    about = provenance_of_run(threads=torch.get_num_threads(), held=HELD, length=LENGTH, depth=DEPTH)
    if len(rows) > len(known): write_json(record, about | dict(rows=rows))

if __name__ == "__main__":
    record, work, steps, seed, *names = sys.argv[1:]
    torch.set_num_threads(8 if torch.cuda.is_available() else 1)
    run = prepare(work)
    for name in names: add_run(Path(record), name, int(steps), int(seed), replace(run, recipe=RECIPES[name]))
