"Consistency training by every objective, short and long (`make record-consistency`, hours)"
import json
from pathlib import Path

from specref.core.check import write_record
from specref.train.consistency import ConsistencyRecipe, compare_objectives

def compared(folder, name, recipe, seeds):
    compare_objectives(folder, folder/name, recipe, seeds)
    return json.loads((folder/name).read_text())

if __name__ == "__main__":
    work, short = Path("trained"), ConsistencyRecipe(steps=120, peak=1e-3)
    runs = [compared(work/"short", "objectives.json", short, (0, 1)),
            compared(work, "objectives.json", ConsistencyRecipe(), (0,))]
    write_record(Path(__file__).with_suffix(".json"), "make record-consistency", dict(runs=runs))
