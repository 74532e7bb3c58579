"""Speculative decoding: every way derived, run, and checked against the distribution it promises.

The names of `__init__.pyi` can be imported from here: those that a chapter marks where it defines them
(`#| public: name`). `python tests/written.py` writes that file. Each name is loaded when it is first
used, so importing `specref` costs nothing, and the mathematics needs numpy alone."""
from importlib import import_module
from importlib.util import find_spec

__version__ = "0.2.0"

EXTRAS = {   # extra: the packages of it that are imported
    "models": "torch transformers tokenizers safetensors huggingface_hub specref_models",
    "gpu": "triton", "plots": "matplotlib", "stats": "scipy", "progress": "tqdm", "train": "accelerate",
    "gguf": "gguf",
}
_EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages.split()}


_PUBLIC = {}

def public():  # -> {name: module}
    "The names that stand here as well, as type checkers and editors read them"
    from pathlib import Path
    for line in () if _PUBLIC else Path(__file__).with_suffix(".pyi").read_text().splitlines():
        if " as " in line: _PUBLIC[line.split()[-1]] = line.split()[1][1:]
    return _PUBLIC


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
    if name == "__all__": return [*public()]
    if name not in public(): raise AttributeError(f"module 'specref' has no attribute {name!r}")
    value = globals()[name] = getattr(require(f"specref.{public()[name]}"), name)
    return value


def __dir__(): return sorted([*globals(), *public()])
