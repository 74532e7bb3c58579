"T4: the gallery of chapter 16 under the names that the tests use"
from specref.reject import reject
from specref.traps import MUTANTS, SLOW as ALL_SLOW, WIRES, judge, redraw, siblings_by_p

SLOW = [m for m in ALL_SLOW if m.right.verify is reject and getattr(m.right.drafter, "gamma", 0) == 2]   # those whose oracle is that of a chain of two
