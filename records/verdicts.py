"The verdicts of the torch implementation, with which a GPU's are compared (`make gpu-verdicts`)"
import numpy as np

from specref.core.check import write_record
from specref.gpu.bench.measured import VERDICTS
from specref.gpu.bench.tasks import GpuSizes, case_digest, forest, torch_verifier, verdict_table

def store_verdicts(path, forests):
    "The verdicts of the torch implementation on the CPU for (rule, V, B, logits)"
    cases = [(rule, forest(rule, *sizes)) for rule, *sizes in forests]
    found = {case_digest(rule, c): verdict_table(torch_verifier(rule)(*c, check=False)) for rule, c in cases}
    np.savez_compressed(path, **{name: x.numpy().astype(np.int16) for name, x in found.items()})

if __name__ == "__main__":
    forests = [*GpuSizes().forests_of()]
    store_verdicts(VERDICTS, forests)
    write_record(VERDICTS.with_suffix(".json"), "make gpu-verdicts", dict(forests=forests))
