"All modules, models and corpus, loaded once in the process from which notebooks are forked (warm.py)"
import atexit
import gc
from importlib import import_module
from pathlib import Path

import torch

import specref
from specref.models.embedded import DOMAINS, domain_ids, embedded, tokenizer

ROOT = Path(specref.__file__).parent
OTHERS = "execnb.shell", "matplotlib.pyplot", "psutil", "scipy.optimize", "scipy.special", "scipy.stats"
FILES = [f.relative_to(ROOT.parent) for f in sorted(ROOT.rglob("*.py")) if not f.stem.startswith("_")]
for name in (*OTHERS, *(".".join(f.with_suffix("").parts) for f in FILES)): import_module(name)

for name in ("target", "small"):
    for dtype in (torch.float32, torch.float64): embedded(name, dtype)
embedded("large")
for domain in DOMAINS: domain_ids(domain)
tokenizer()
gc.collect()
gc.freeze()   # else each fork goes through all of it at its first collection
atexit.register(gc.unfreeze)   # some modules report at exit what was not collected
