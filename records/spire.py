"""SPIRe with each of its parts left out (`make record-spire`, hours)

The texts are those that `specref train spire` has sampled from the target into `trained`."""
from pathlib import Path

import numpy as np

from specref.core.check import write_record
from specref.models.embedded import raw_model
from specref.train.harness import TargetModel, state_dataset
from specref.train.spire import ablation

if __name__ == "__main__":
    base, runs = TargetModel(raw_model()), []
    work = next(Path("trained").glob("*-256"))
    own = np.concatenate([np.load(f) for f in sorted((work/"samples").glob("*.npy"))])
    train, held = (state_dataset(base, x, (22, 23, 24), work/"states") for x in (own[:2048], own[2048:2112]))
    for steps in (120, 240):
        how = dict(steps=steps, peak=1e-2, rows=8)
        found = ablation(base, train, held[:], f"trained/ablation-{steps}", **how)
        runs.append(dict(recipe=how | dict(length=256), left_out=found))
    write_record(Path(__file__).with_suffix(".json"), "make record-spire", dict(runs=runs))
