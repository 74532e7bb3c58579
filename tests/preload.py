"All modules, and models and corpus of most notebooks, loaded once in the process they are forked from (warm.py)"
from importlib import import_module
from pathlib import Path

import torch

import specref
from specref.models.embedded import DOMAINS, domain_ids, embedded, tokenizer

ROOT = Path(specref.__file__).parent
OTHERS = "execnb.shell", "matplotlib.pyplot", "psutil", "scipy.optimize", "scipy.special", "scipy.stats"
MODULES = [f.relative_to(ROOT.parent).with_suffix("") for f in sorted(ROOT.rglob("*.py")) if f.stem[:1] != "_"]
for name in (*OTHERS, *(".".join(module.parts) for module in MODULES)): import_module(name)

for name in ("target", "small"):
    for dtype in (torch.float32, torch.float64): embedded(name, dtype)
embedded("large")
for domain in DOMAINS: domain_ids(domain)
tokenizer()
