"""Speculative decoding: every way derived, run, and checked against the distribution it promises.

The names of `PUBLIC` can be imported from here. Each is loaded when it is first used.
So importing `specref` costs nothing, and the mathematics needs numpy alone. For type checkers and editors
`__init__.pyi` has the same names as imports; `python tests/test_package.py` writes it."""
from importlib import import_module
from importlib.util import find_spec

__version__ = "0.1.0"

PUBLIC = {   # module: the names that stand here as well
    "core.law": "exact as_law one_hot normalize overlap residual tv d_lk warp greedy",
    "core.rng": "Enumerator Seeded Streams Tape Outcomes law_of mean_of tv_outcomes",
    "core.tree": "Tree iid without_replacement points in_sequence add_paths",
    "core.picture": "draw_tree",
    "core.target": "Rows TableModel NgramModel random_table target_law",
    "core.loop": "Drafter Verdict Round rounds match generate generate_texts Generation Ledger System "
                 "autoregressive no_draft trace loop_law",
    "core.cost": "speedup Costs best_gamma",
    "core.rates": "Rates",
    "core.timing": "measure explain",
    "verify.reject": "reject Chain capped_geometric",
    "verify.siblings": "Branching acceptance_prob",
    "verify.block": "block",
    "verify.traversal": "traversal",
    "verify.transport": "transport transport_iid hub_pairs spechub",
    "verify.kseq": "kseq",
    "verify.coupled": "coupled PositionKeyed",
    "verify.lossy": "AcceptanceRule lenient typical top_beta",
    "models.transformer": "HFModel",
    "models.llama": "PackedLlama",
    "models.embedded": "embedded tokenizer prompts",
    "models.bridge": "speculate generate_law",
    "draft.shapes": "StaticTree DynamicTree sequoia opt_tree",
    "draft.lookup": "PromptLookup",
    "draft.datastore": "Datastore Rest",
    "draft.suffix": "SuffixDecoding SAM Fallback",
    "draft.recycling": "Recycling",
    "draft.jacobi": "Jacobi",
    "draft.lookahead": "Lookahead",
    "draft.ouroboros": "Ouroboros",
    "train.registry": "TRAINED load_system",
    "gpu.engine": "Engine",
    "certify.counts": "g_test",
    "certify.certificates": "certify_system certificate",
    "certify.sequential": "certify_rounds certify_sequentially",
    "certify.logs": "certify_log save_log",
    "certify.samplers": "certify_sampler certify_rows",
    "certify.judge": "judge_rule",
    "certify.mutants": "MUTANTS",
    "app.systems": "SYSTEMS LOSSY",
}
_MODULE_OF = {name: module for module, names in PUBLIC.items() for name in names.split()}
__all__ = list(_MODULE_OF)

EXTRAS = {   # extra: the packages of it that are imported
    "models": "torch transformers tokenizers safetensors huggingface_hub specref_models",
    "gpu": "triton", "plots": "matplotlib", "stats": "scipy", "progress": "tqdm", "train": "accelerate",
}
_EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages.split()}


def install_hint(error):
    "The message of an error; where it misses a package that an extra installs, how to install that"
    package = (isinstance(error, ImportError) and error.name or "").partition(".")[0]
    if package not in _EXTRA_OF or find_spec(package): return str(error)
    how = f"`pip install 'specref[{_EXTRA_OF[package]}]'`"
    return f"{package}: it is needed here, and it is not installed; wanted {how}"


def require(module):
    "Import a module; the error for a package that an extra installs has the hint"
    try: return import_module(module)
    except ModuleNotFoundError as e:
        hint = install_hint(e)
        if hint == str(e): raise
        raise ImportError(hint, name=e.name) from None


def __getattr__(name):
    if name not in _MODULE_OF: raise AttributeError(f"module 'specref' has no attribute {name!r}")
    value = globals()[name] = getattr(require(f"specref.{_MODULE_OF[name]}"), name)
    return value


def __dir__(): return sorted([*globals(), *_MODULE_OF])
