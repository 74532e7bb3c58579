"The contracts, inherited by every listed system: what its drafter states, what its verifier may do"
import pytest
from hypothesis import strategies as st

from contracts import drafter_contract, one_round, verifier_contract
from helpers import CANON, Plan, constant, examples, killer, models, plans, proves
from specref import Chain, iid, law_of, match, points, reject, SYSTEMS, Tree, Verdict

contexts = st.sampled_from([(0,), (0, 1, 0), (1, 1, 2, 1), (2, 0, 1, 2, 0)])
small = dict(gamma=2, shape=(2, 1), exact=True)
built = {name: build(constant(*CANON[1]), **small) for name, build in SYSTEMS.items()}
verifiers = {f: name for name, f in reversed([(name, s.verify) for name, s in built.items()])}   # each once
verifiers = dict(sorted((name, f) for f, name in verifiers.items()))
def own_tree(name):
    "What a verifier may ask for: the draw of its system's own tree, or a chain"
    draw = getattr(built[name].drafter, "draw", None)
    return f"`{draw.__name__}`" if draw else "wanted a chain"

@proves("thm-edges")
@pytest.mark.parametrize("name", SYSTEMS)
@examples(20, models(st.integers(3, 4)), contexts, st.integers(1, 3),
          st.sampled_from([(2,), (3,), (1, 2), (2, 1)]))
def test_drafters(name, pair, ctx, gamma, shape):
    "The distribution stated on every edge is its token's conditional one, after several contexts"
    drafter_contract(SYSTEMS[name](pair[1], gamma=gamma, shape=shape, exact=True).drafter, ctx)

cases = (st.tuples(models(), plans(3)) | st.tuples(models(st.integers(4, 5)), plans(2))
         | st.tuples(st.builds(killer), plans(3)))

@pytest.mark.parametrize("name", verifiers)
@examples(25, cases, contexts, st.integers(1, 3))
def test_verifiers(name, case, ctx, n):
    "Any tree with true edges, with probes: exact, no probe accepted, own noise, nothing changed; or refused"
    (target, draft), steps = case
    try: verifier_contract(target, Plan(draft, steps), verifiers[name], ctx, n)
    except ValueError as e: assert str(e).startswith("tree: ") and own_tree(name) in str(e)

# The contracts detect violations

def to_the_end(p, tree, rng): return Verdict(len(tree) - 1, rng.pick(p[len(tree) - 1]))

def changing(p, tree, rng):
    p[0][0], p[0][1] = p[0][1], p[0][0]
    return match(p, tree, rng)

def growing(p, tree, rng):
    tree.add(0, 0)
    return match(p, tree, rng)

def leaking(ctx, rng):
    tree = Tree(ctx)
    tree.grow(0, iid(CANON[1]), rng)
    tree.rng = rng
    return tree

def one_node(token, law=None):
    def draft(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, token, law)
        return tree
    return draft

class Counting:
    "A drafter whose second call differs from its first"
    calls = 0
    def __call__(self, ctx, rng):
        self.calls += 1
        tree = Tree(ctx)
        if self.calls > 1: tree.grow(0, points([1], 4, exact=True), rng)
        return tree

def one(drafter, verify):
    return law_of(lambda rng: one_round(constant(*CANON[0]), drafter, verify, (0,), rng))
def one_step(drafter): verifier_contract(constant(*CANON[0]), drafter, reject, (0,), 1)
def whole(verify): verifier_contract(killer()[0], Chain(killer()[1], 2), verify, (0,), 3)

BROKEN = {
    "a probe accepted": lambda: one(one_node(1), to_the_end),
    "rows changed": lambda: one(one_node(1), changing),
    "tree changed": lambda: one(one_node(1), growing),
    "noise of the draft": lambda: one(leaking, lambda p, tree, rng: match(p, tree, tree.rng)),
    "another distribution": lambda: whole(to_the_end),
    "edge misstated": lambda: drafter_contract(one_node(3, CANON[1]), (0,)),
    "edge misstated, verified": lambda: one_step(one_node(3, CANON[1])),
    "a drafter with hidden state": lambda: drafter_contract(Counting(), (0,)),
}

@pytest.mark.parametrize("what", BROKEN)
def test_contracts_detect_violations(what):
    with pytest.raises((AssertionError, ValueError)): BROKEN[what]()   # rows are read-only: a ValueError
    for verify in (reject, match): whole(verify)
