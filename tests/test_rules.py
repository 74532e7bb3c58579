"All rules on the same input: exact on rows of the embedded transformer, and the memory of a verdict"
import tracemalloc

import numpy as np
import pytest

from contracts import continued
from helpers import Recorder
from specref.core.loop import loop_law, match, rounds
from specref.core.rng import Seeded, Tape, law_of, tv_outcomes
from specref.core.target import Rows, TableModel, target_law
from specref.core.tree import Tree, iid, points, without_replacement
from specref.models.embedded import embedded, prompts
from specref.verify.block import block
from specref.verify.coupled import coupled
from specref.core.drafters import PositionKeyed
from specref.verify.lossy import bild_rollback, ensemble, lenient, lenient_greedy
from specref.verify.lossy import reject_toward, text_law, top_beta, typical
from specref.verify.reject import reject
from specref.core.drafters import Chain
from specref.core.drafters import Branching
from specref.verify.kseq import kseq
from specref.verify.transport import greedy_draft, hub_pairs, importance, spechub, transport, transport_iid
from specref.verify.traversal import all_donors, layer_donors, traversal


def top(q):
    "The three likeliest tokens, as points"
    return points([int(x) for x in np.argsort(-q, kind="stable")[:3]], len(q))


def chain(q): return Chain(q, 3)
def keyed(q): return PositionKeyed(Chain(q, 3))
def siblings(draw, shape=(2, 1)): return lambda q: Branching(q, shape, draw)


LOSSLESS = {
    "match, chain": (chain, match), "match, tree": (siblings(without_replacement), match),
    "coupled": (keyed, coupled), "reject, chain": (chain, reject),
    "reject, independent": (siblings(iid), reject), "reject, points": (siblings(top), reject),
    "reject, without replacement": (siblings(without_replacement), reject),
    "reject, hub pairs": (siblings(hub_pairs), reject),
    "SpecHub": (siblings(hub_pairs), spechub),
    "reject, greedy draft": (siblings(greedy_draft(3), (3, 1)), reject),
    "block": (chain, block), "traversal, independent": (siblings(iid), traversal),
    "traversal, without replacement": (siblings(without_replacement), traversal),
    "traversal, points": (siblings(top), traversal),
    "layered": (siblings(without_replacement), layer_donors), "all donors": (siblings(iid), all_donors),
    "K-SEQ": (siblings(iid), kseq), "transport, independent": (siblings(iid), transport),
    "transport, without replacement": (siblings(without_replacement), transport),
    "importance": (siblings(iid), importance), "levels": (siblings(iid), transport_iid),
}
LOSSY = {
    "lenience": lenient(.5), "greedy lenience": lenient_greedy(.5), "top-beta": top_beta(2, .5),
    "typical": typical(.3, .6), "rollback": bild_rollback(1.5), "mixture": reject_toward(ensemble(.5)),
}


@pytest.fixture(scope="module")
def pair():
    "Target and small draft on a held-out text, both with top-k 3, evaluated once for each text"
    warp, prompt = dict(temperature=1.5, top_k=3), prompts("english", 1, seed=1)[0]
    models = embedded("target", **warp), embedded("small", **warp)
    return (*(TableModel(m.V, lambda text, m=m: m(Tree(text))[0]) for m in models), prompt)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_round_of_the_transformer(name, pair):
    "Every path of a round, continued by the target: the target's distribution, up to rounding"
    (target, draft, ctx), (build, verify) = pair, LOSSLESS[name]
    drafter = build(draft)
    n = drafter.depth + 1
    law = law_of(lambda rng: next(rounds(target, drafter, verify, ctx, rng)).tokens)
    assert tv_outcomes(continued(law, target, ctx, n), target_law(target, ctx, n)) < 1e-12


@pytest.mark.parametrize("name", LOSSY)
def test_three_tokens_of_a_lossy_rule(name, pair):
    "The loop on chains of two has the rule's computed distribution, which is far from the target's"
    target, draft, ctx = pair
    law = loop_law(target, Chain(draft, 2), LOSSY[name], ctx, 3)
    assert tv_outcomes(law, text_law(LOSSY[name], target, draft, 2, ctx, 3)) < 1e-12
    assert tv_outcomes(law, target_law(target, ctx, 3)) > .1


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_tape_replays_a_round(name, pair):
    "Each number that a rule draws has its own address, and their tape gives the same round"
    (target, draft, ctx), (build, verify) = pair, LOSSLESS[name]
    for seed in range(5):
        table = {}
        noises = Recorder(Seeded(seed), table), Tape(table)
        first, again = (next(rounds(target, build(draft), verify, ctx, noise)) for noise in noises)
        assert first.verdict == again.verdict and first.tree == again.tree


V = 4_000
ON_BOTH = {"match": match, "reject": reject, "traversal": traversal, "layered": layer_donors}
ON_TREES = ON_BOTH | {"all donors": all_donors}
ON_CHAINS = ON_BOTH | dict(block=block, lenience=lenient(.5), coupled=coupled)
SIZES = [*((rule, (1,) * 8) for rule in ON_CHAINS), *((rule, (4, 2, 2)) for rule in ON_TREES)]


def peak(tree, verify, seed):
    "Rows that were read, and the peak memory of a verdict beyond them, in rows"
    table, seen = np.random.default_rng(seed).dirichlet([.5] * V, len(tree)), set()
    rows = Rows(lambda i: seen.add(i) or table[i], len(tree), V)
    tracemalloc.start()
    verify(rows, tree, Seeded(seed))
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return len(seen), held / (8 * V)


def grown(shape):
    "A tree of independent siblings on V tokens, one distribution a level"
    tree, level = Tree((0,)), [0]
    for d, k in enumerate(shape):
        q = np.random.default_rng([9, d]).dirichlet([.5] * V)
        level = [c for u in level for c in tree.grow(u, iid(q), Seeded(0, (d,)), k)]
    return tree


@pytest.mark.parametrize("name,shape", SIZES)
def test_no_rule_copies_all_rows(name, shape):
    "A verdict stores a few rows at a time, and at most one more for each row that it has read"
    tree, verify = grown(shape), {**ON_CHAINS, **ON_TREES}[name]
    for seed in range(3):
        read, held = peak(tree, verify, seed)
        assert held <= read + 6, f"{held:.1f} rows held, {read} of {len(tree)} read"
