"The contracts, inherited by every listed system: what its drafter states, what its judge may do"
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract, judged, verifier_contract
from helpers import CANON, Plan, constant, killer, models, plans, proves
from specref.core.rng import law_of
from specref.core.loop import Verdict, match
from specref.verify.reject import Chain, reject
from specref.app.systems import SYSTEMS
from specref.core.tree import Tree, iid, points

contexts = st.sampled_from([(0,), (0, 1, 0), (1, 1, 2, 1), (2, 0, 1, 2, 0)])
built = {name: build(constant(*CANON[1]), gamma=2, shape=(2, 1), exact=True) for name, build in SYSTEMS.items()}
judges = {f: name for name, f in reversed([(name, s.verify) for name, s in built.items()])}   # each once, by the first system that has it
judges = dict(sorted((name, f) for f, name in judges.items()))
CHOOSY = {"block verification": "wanted a chain", "K-SEQ": "wanted those of `iid`"}   # exact for some trees, tested in their chapters, and refusing the others


def keeps_or_refuses(name, *case):
    "The contract, or where the judge is not made for such a tree a refusal that says so"
    try: verifier_contract(*case)
    except ValueError as e: assert str(e).startswith("tree: ") and CHOOSY[name] in str(e)


@proves("thm-edges")
@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=50)
@given(models(st.integers(3, 4)), contexts, st.integers(1, 3), st.sampled_from([(2,), (3,), (1, 2), (2, 1)]))
def test_drafters(name, pair, ctx, gamma, shape):
    "The law stated on every edge is the conditional law of its token, after several contexts"
    drafter_contract(SYSTEMS[name](pair[1], gamma=gamma, shape=shape, exact=True).drafter, ctx)


@pytest.mark.parametrize("name", judges)
@settings(max_examples=70)
@given(st.tuples(models(), plans(3)) | st.tuples(models(st.integers(4, 5)), plans(2)), contexts, st.integers(1, 3))
def test_judges(name, drawn, ctx, n):
    "Any honest tree: chains, independent, without replacement, points, mixed, with probes; exact, no probe kept, own noise, nothing changed"
    (target, draft), steps = drawn
    keeps_or_refuses(name, target, Plan(draft, steps), judges[name], ctx, n)


@pytest.mark.parametrize("name", judges)
@settings(max_examples=40)
@given(plans(3), st.integers(1, 3))
def test_judges_on_the_pair_that_kills(name, steps, n): keeps_or_refuses(name, killer()[0], Plan(killer()[1], steps), judges[name], (0,), n)


# The contracts have teeth

def keeps(verify): return lambda: verifier_contract(*(lambda p, q: (p, Chain(q, 2)))(*killer()), verify, (0,), 3)


def probing(p, tree, rng):
    "Walks to the last node, offered or not"
    return Verdict(len(tree) - 1, rng.pick(p[len(tree) - 1]))


def changing(p, tree, rng):
    p[0][0], p[0][1] = p[0][1], p[0][0]
    return match(p, tree, rng)


def growing(p, tree, rng):
    tree.add(0, 0)
    return match(p, tree, rng)


def cheating(ctx, rng):
    "Leaves the draft's rng in the tree, for the judge to find"
    tree = Tree(ctx); tree.grow(0, iid(CANON[1]), rng); tree.rng = rng
    return tree


def test_contracts_bite():
    "A kept probe, changed rows, a changed tree, the draft's noise in the judge's hands, a stated law that is not the drawn one"
    target = constant(*CANON[0])
    one = lambda drafter, verify: lambda: law_of(lambda rng: judged(constant(*CANON[0]), drafter, verify, (0,), rng))
    def probes(ctx, rng): tree = Tree(ctx); tree.add(0, 1); return tree
    def argmax(ctx, rng): tree = Tree(ctx); tree.add(0, 3, CANON[1]); return tree
    for broken in (one(probes, probing), one(probes, changing), one(probes, growing), one(cheating, lambda p, t, rng: match(p, t, t.rng)),
                   keeps(probing), lambda: drafter_contract(argmax, (0,)), lambda: verifier_contract(target, argmax, reject, (0,), 1)):
        with pytest.raises(AssertionError): broken()
    for verify in (reject, match): keeps(verify)()


def test_a_drafter_that_remembers_is_found():
    "A drafter whose second call differs from its first breaks the contract: what it knows must come from the context or from `learn`"
    class Counting:
        calls = 0
        def __call__(self, ctx, rng):
            self.calls += 1
            tree = Tree(ctx)
            for i in range(min(self.calls - 1, 1)): tree.grow(0, points([1], 4, exact=True), rng)
            return tree
    with pytest.raises(AssertionError): drafter_contract(Counting(), (0,))


def test_rows_are_arrays_that_a_judge_shares():
    "The rows of a table are the table's own arrays: a judge that writes into one would change the model"
    target = constant(*CANON[0])
    tree = Tree((0,))
    before = np.array(target(tree)[0])
    for verify in (reject, match): law_of(lambda rng: verify(target(tree), tree, rng))
    assert (target(tree)[0] == before).all()
