"Runs a notebook in a fork of the warm process; both processes import this, so heavy imports are inside"
import os
import resource
import sys
import traceback
from pathlib import Path

def execute(path, sources, pipe):
    "Run the cells `sources` of the notebook at `path`; send outputs, CPU seconds and any failure"
    import psutil
    from execnb.shell import CaptureShell
    warm = sum(psutil.Process(os.getppid()).cpu_times()[:2])   # start-up, counted once
    os.chdir(Path(path).parent)
    shell, outputs, failure = CaptureShell(path=Path(path).parent, mpl_format="png"), [], ""
    for i, source in enumerate(sources):
        outputs.append([simple(out) for out in shell.run(source)])
        if shell.exc:
            failure = f"cell {i}: {''.join(traceback.format_exception(shell.exc))}"
            break
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    pipe.send((outputs, used, warm, failure))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)   # without waiting for threads of the notebook

def simple(x):
    "An output as plain dictionaries and lists"
    if hasattr(x, "items"): return {k: simple(v) for k, v in x.items()}
    return [simple(v) for v in x] if isinstance(x, list) else x
