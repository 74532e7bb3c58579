"T1: every listed system has the target's distribution in fractions: whole and merged loops, temperature 0"
import pytest
from hypothesis import strategies as st

from helpers import cold, examples, models, proves
from specref import generate, law_of, loop_law, SYSTEMS, target_law
from specref.core import law
from specref.verify import kseq, transport

systems = pytest.mark.parametrize("name", SYSTEMS)
contexts = st.sampled_from([(0,), (0, 1, 0), (1, 1, 0, 1)])
stops = st.sets(st.integers(0, 2), max_size=2)
shapes = st.sampled_from([(2,), (1, 2), (2, 1)])

def once(f, laws):
    "`f`, a function of `laws` arrays and some numbers, computed once for the same ones"
    known = {}
    def g(*args):
        key = (*map(id, args[:laws]), *args[laws:])
        if key not in known: known[key] = f(*args), args   # the arrays stay alive, so their ids stay unique
        return known[key][0]
    return g

def certify(name, target, draft, ctx, n, stop, gamma, shape, merged=True):
    "The distribution of `n` tokens by the system, in fractions, is the target's; every path, unless `merged`"
    system = SYSTEMS[name](draft, gamma=gamma, shape=shape, exact=True)
    want = target_law(target, ctx, n, stop := {x for x in stop if x < target.V})
    drafter, verify = system.drafter, system.verify
    with pytest.MonkeyPatch.context() as patch:   # half of the time: plans, and checks of inputs
        patch.setattr(kseq, "expected_trials", once(kseq.expected_trials, 2))
        patch.setattr(transport, "best_levels", once(transport.best_levels, 2))
        patch.setattr(law, "why_not_law", once(law.why_not_law, 1))
        if merged: found = loop_law(target, drafter, verify, ctx, n, stop)
        else: found = law_of(lambda rng: generate(target, drafter, verify, ctx, n, rng, stop=stop))
    assert found == want, max(want, key=lambda y: abs(found.get(y, 0) - want[y]))
    assert sum(found.values()) == 1 and all(isinstance(w, type(want[y])) for y, w in found.items())

@proves("thm-match", "thm-reject", "thm-siblings", "thm-lookup")
@systems
@examples(4, models(), contexts, stops, st.integers(1, 2), st.sampled_from([(1,), (2,), (1, 1)]))
def test_whole_loops(name, pair, ctx, stop, gamma, shape):
    """Every path of three tokens, V = 3, nothing merged: rounds of 2 and 3 tokens, the last is clipped; SSD
    draws a second chain ahead, TriForce and staged speculation have two levels, boosted drafts are two, and
    rounds of 3 tokens would have too many paths; optimal transport and K-SEQ solve a program at every node of
    every path, here of two tokens (three below, and on the page of all systems)"""
    solved = "optimal transport", "K-SEQ"
    few = *solved, "SSD", "TriForce", "staged speculation", "boosted drafts"
    gamma, shape = (1, (2,)) if name in few else (gamma, shape)
    certify(name, *pair, ctx, 2 if name in solved else 3, stop, gamma, shape, merged=False)

few = st.tuples(models(), st.integers(1, 3))      # a pair of models, how many tokens
many = st.tuples(models(2), st.integers(4, 5))

@proves("thm-match", "thm-reject", "thm-siblings", "thm-lookup", "thm-merging", "thm-cutting")
@systems
@examples(12, few | many, contexts, stops, st.integers(1, 2), shapes)
def test_merged_loops(name, case, ctx, stop, gamma, shape):
    "Up to three tokens where V = 3, up to five where V = 2: many rounds, equal states merged"
    (target, draft), n = case
    certify(name, target, draft, ctx, n, stop, gamma, shape)

@systems
@examples(12, models(), contexts, st.integers(1, 4), stops)
def test_temperature_zero(name, pair, ctx, n, stop):
    "Target and draft as point masses: one text, the greedy one, with probability 1; and a sampled draft"
    target, draft = map(cold, pair)
    assert len(target_law(target, ctx, n, stop)) == 1
    certify(name, target, draft, ctx, n, stop, 3, (2, 2), merged=False)
    certify(name, target, pair[1], ctx, n, stop, 2, (2, 1))
