"Bad input of the application: systems, tour, benchmarks and comparison"
from functools import cache

from specref.core.target import random_table


@cache
def draft(): return random_table(3, 1)

def built(name, **kw):
    from specref.core.registry import SYSTEMS
    return SYSTEMS[name](draft(), **kw)

def benchmarks():
    from specref.app import benchmarks
    return benchmarks

def comparison():
    from specref.app import comparison
    return comparison

def tour(**kw):
    from specref.app.tour import tour
    return tour(out="/dev/null/never", **kw)

def stop(folder):
    from specref.app.tour import TrainedContestant
    return TrainedContestant("EAGLE", folder=folder).build(0.)


def decode(**kw):
    from specref.app.commands import decode
    return decode("x", **kw)


NEVER = "/dev/null/never.json"   # nothing can be written there
ROWS = [
    *[("past", lambda past=past: built("REST", past=past))
      for past in ((), ((),), 5, (5,), ((7,),), (("a",),))],
    *[("past", lambda name=name: built(name, past=())) for name in ("DDTree", "SuffixDecoding", "SAM")],
    *[("gamma", lambda gamma=gamma: built("REST", gamma=gamma)) for gamma in (0, -1, 1.5, "4")],
    ("gamma", lambda: built("Sequoia", gamma="4")),
    *[(role, lambda role=role: decode(**{role: draft()}), "got the model TableModel, wanted a name or a path")
      for role in ("target", "draft", "drafter")],
    *[("system", lambda system=system: decode(system=system), "wanted one of autoregressive")
      for system in (built("Jacobi"), built)],
    ("n", lambda: tour(n=0)),
    ("each", lambda: tour(each=0)),
    ("folder", lambda: stop("no/such/folder")),
    *[("drafter", lambda name=name: tour(drafter=name)) for name in ("no/such/folder", ".")],
    *[(name, lambda name=name: benchmarks().record(NEVER, **{name: 0}))
      for name in ("laps", "each", "n", "threads")],
    *[(name, lambda name=name: benchmarks().time_verifiers(NEVER, **{name: 0}))
      for name in ("threads", "V", "gamma")],
    ("sizes", lambda: benchmarks().lookups(NEVER, sizes=(5,))),
    *[("again", lambda again=again: comparison().compare(NEVER, again=again)) for again in (".", "no/such")],
    *[(name, lambda name=name: comparison().compare(NEVER, **{name: 0}))
      for name in ("laps", "each", "n", "threads")],
]
