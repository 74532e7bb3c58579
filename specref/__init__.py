"Speculative decoding: every way derived, run, and checked against the law it promises"
from importlib import import_module

__version__ = "0.1.0"
_CHAPTERS = "law chance tree target loop reject cost lenience siblings block traversal transport coupled certify bets samplers shapes lookup datastore suffix recycling jacobi lookahead ouroboros systems".split()  # those that need numpy alone


def __getattr__(name):
    "`specref.generate` and every other public name of the numpy chapters, found when first asked for; the name of a chapter is the chapter"
    if name.startswith("_"): raise AttributeError(name)
    if name in _CHAPTERS: return import_module(f"specref.{name}")
    for chapter in _CHAPTERS:
        if name in (module := import_module(f"specref.{chapter}")).__all__: return getattr(module, name)
    raise AttributeError(f"module 'specref' has no attribute {name!r}")
