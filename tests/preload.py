"Modules, models and corpus of most notebooks, loaded once in the process they are forked from (warm.py)"
from importlib import import_module

for name in ("execnb.shell", "matplotlib.pyplot", "psutil", "scipy.optimize", "scipy.special", "scipy.stats",
             "torch", "tqdm.auto", "transformers.generation", "transformers.models.auto",
             "transformers.models.llama.modeling_llama"):
    import_module(name)

from specref.models.embedded import DOMAINS, domain_ids, raw_model, tokenizer

for name in ("target", "small", "large"): raw_model(name)
for domain in DOMAINS: domain_ids(domain)
tokenizer()
