"EAGLE, trained with noise on the features that it reads and without (`make record-noise`, an hour)"
from dataclasses import replace
from pathlib import Path

from specref.core.check import write_record
from specref.train.harness import read_card
from specref.train.registry import RECIPES, tokenizer_and_model, train_for
from specref.train.texts import find_devices

RUNS = {"eagle": .1, "eagle-0": 0.}   # name: noise
GIVEN = dict(steps=600, texts=2048, length=256, seed=0, data=None, parts=1, dtype=None, online=False)

def measure_noise(path, work, **given):
    "The evaluations of both runs, which differ in the noise alone, written to `path`"
    devices, runs = find_devices("cpu"), {}
    tok, model = tokenizer_and_model("target", None, devices.device)
    for name, noise in RUNS.items():
        recipe = replace(RECIPES["eagle"], settings=RECIPES["eagle"].settings | dict(noise=noise))
        train_for(model, tok, work, None, recipe, devices, name, **GIVEN | given)
        card = read_card(work/"data"/name)
        runs[f"{noise:g}"] = {key: card[key] for key in ("recipe", "tokens", "overlaps")}
    write_record(path, "make record-noise", dict(runs=runs))

if __name__ == "__main__": measure_noise(Path(__file__).with_suffix(".json"), Path("trained"))
