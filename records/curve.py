"""Trained drafters on more and more data (`make curve`)

curve.py [--anew] RECORD WORK TEXTS STEPS SEED NAME[@PEAK]...

A run that is in the record is not repeated, and without `--anew` none that made a network of the package;
what is interrupted goes on. Every network is evaluated on the same texts of the target, which none was
trained on; PEAK is the highest learning rate, where it is not the recipe's. `tokens` of a row are those of
a round that begins at any place (`evaluate`), also in the prompt: of what the rows compare, a hundredth."""
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from specref.core.check import write_record
from specref.train.harness import StateDataset, TargetModel, evaluate, mixed_precision, read_card
from specref.train.registry import (RECIPES, SHIPPED_DRAFTERS, TrainingRun, load_network, store_drafter,
                                    tokenizer_and_model, training_rows, with_options)
from specref.train.texts import find_devices

HELD, LENGTH, DEPTH = 128, 256, 4
FIRST = 4160   # the texts before those that are held out

def prepare(work, texts):  # -> TrainingRun without a recipe
    "The target and its texts: so many to train on, then those that are held out"
    devices = find_devices()
    tok, model = tokenizer_and_model("target", "float32", devices.device)
    base = TargetModel(model)
    folder, held = Path(work)/f"{base.key}-{LENGTH}", np.arange(FIRST, FIRST + HELD)
    made = training_rows(tok, base, folder, None, max(texts, FIRST) + HELD - 64, LENGTH)   # which adds 64
    others = np.setdiff1d(np.arange(len(made.x)), held)[:texts]
    own = replace(made, x=made.x[np.r_[others, held]], held=HELD, plain=None, written=())
    return TrainingRun(None, base, own, folder, devices)

def row_of(net, run, **made):
    "What was made, with its tokens a round of a chain, text by text, and its overlaps by depth"
    x, counts = run.texts.part(held=True)
    held = run.states(net, x, counts)[:].to(run.devices.device)
    def alone(i): return StateDataset(held.x[i:i+1], {k: s[i:i+1] for k, s in held.states.items()})
    with mixed_precision(run.base): found = [evaluate(net, run.base, alone(i), DEPTH) for i in range(len(x))]
    tokens, overlaps = ([each[k] for each in found] for k in (0, 1))
    return made | dict(tokens=float(np.mean(tokens)), overlaps=np.mean(overlaps, 0).round(4).tolist(),
                       by_text=np.round(tokens, 4).tolist())

def shipped(name, run, made):
    "The row of the package's own network"
    net = load_network(name, model=run.base.model).float().to(run.devices.device)
    return row_of(net, run, name=name, **made, evaluations=read_card(SHIPPED_DRAFTERS/name)["evaluations"])

def trained(name, run, made, folder):
    "The row of a training run, whose network is stored in `folder` as `specref train` stores it"
    net, evaluations, held = run.train(name, made["steps"], made["seed"])
    usual = dict(data=None, length=LENGTH, parts=1, dtype=None, online=False)
    store_drafter(run, net, evaluations, held, folder, **usual | made)
    return row_of(net, run, name=name, **made, evaluations=evaluations)

def add_row(record, make, **key):  # read again after the training: several runs may write one record
    "Add the row that `make` gives, unless the record has one that agrees with `key`"
    def rows(): return json.loads(record.read_text())["rows"] if record.exists() else []
    if any(all(row[k] == x for k, x in key.items()) for row in rows()): return
    row = make()
    about = dict(threads=torch.get_num_threads(), held=HELD, length=LENGTH, depth=DEPTH)
    write_record(record, "make curve", about | dict(rows=rows() + [row]))

if __name__ == "__main__":
    anew = "--anew" in sys.argv
    record, work, texts, steps, seed, *names = (given for given in sys.argv[1:] if given != "--anew")
    torch.set_num_threads(8 if torch.cuda.is_available() else 1)
    run = prepare(work, int(texts))
    for name in names:
        name, _, peak = name.partition("@")
        recipe = with_options(RECIPES[name], None, float(peak) if peak else None)
        own = replace(run, recipe=recipe)
        made = dict(texts=int(texts), steps=int(steps), seed=int(seed), peak=recipe.peak, rows=recipe.rows)
        folder = Path(work)/"data"/f"{texts}-{steps}-{seed}"/name
        mine = not anew and made.items() <= read_card(SHIPPED_DRAFTERS/name)["recipe"].items()
        make = partial(shipped, name, own, made) if mine else partial(trained, name, own, made, folder)
        add_row(Path(record), make, name=name, **made)
