"Every rule of the book side by side: joint laws on the rows of the embedded transformer by counts, and what a verdict holds in memory"
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from helpers import g_test
from test_statistical import enough, nearby

from specref.verify.block import block
from specref.core.rng import Seeded, tv_outcomes
from specref.verify.coupled import PositionKeyed, coupled
from specref.verify.lossy import lenient, lenient_greedy, ensemble, bild_rollback, top_beta, reject_toward, typical
from specref.core.loop import System, loop_law, match
from specref.models.embedded import embedded, prompts
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching
from specref.core.target import Rows, TableModel, target_law
from specref.verify.transport import greedy_draft, importance, kseq, spechub, transport
from specref.verify.traversal import all_donors, layer_donors, traversal
from specref.core.tree import Tree, iid, points, without_replacement

N, SEES, WIDER = 5_000, .12, .3   # runs at most; a lossy rule may have more texts, and rarer ones


def top(q): return points([int(x) for x in np.argsort(-q, kind="stable")[:3]], len(q), q.dtype == object)   # three tokens a row: no more are asked for


def chain(q): return Chain(q, 3)


def siblings(draw, shape=(2, 2)): return lambda q: Branching(q, shape, draw)


LOSSLESS = {
    "match, chain": (chain, match), "match, tree": (siblings(without_replacement), match), "coupled": (lambda q: PositionKeyed(Chain(q, 3)), coupled),
    "reject, chain": (chain, reject), "reject, independent": (siblings(iid), reject), "reject, without replacement": (siblings(without_replacement), reject),
    "reject, points": (siblings(top), reject), "reject, hub pairs": (siblings(spechub), reject), "reject, greedy draft": (siblings(greedy_draft(3), (3, 1)), reject),
    "block": (chain, block), "traversal, independent": (siblings(iid), traversal), "traversal, without replacement": (siblings(without_replacement), traversal),
    "traversal, points": (siblings(top), traversal), "layered": (siblings(without_replacement), layer_donors), "generous": (siblings(iid), all_donors),
    "K-SEQ": (siblings(iid), kseq), "transport, independent": (siblings(iid), transport), "transport, without replacement": (siblings(without_replacement), transport),
    "importance": (siblings(iid), importance),
}
LOSSY = {"lenience": lenient(.5), "greedy lenience": lenient_greedy(.5), "top-beta": top_beta(2, .5), "typical": typical(.3, .6), "rollback": bild_rollback(1.5), "mixture": reject_toward(ensemble(.5))}


@pytest.fixture(scope="module")
def pair():
    "The laws of target and small draft on a held-out text, both cut to three tokens a row, asked for once a text"
    models, prompt = (embedded("target", temperature=1.5, top_k=3), embedded("small", temperature=1.5, top_k=3)), prompts("english", 1, seed=1)[0]
    return (*(TableModel(m.V, lambda text, m=m: m(Tree(text))[0]) for m in models), prompt)


def counted(target, drafter, verify, ctx, n): return Counter(tuple(System("", drafter, verify)(target, ctx, 3, Seeded(0, (0, run)))) for run in range(n))


@pytest.mark.parametrize("name", LOSSLESS)
def test_three_tokens_of_the_transformer(name, pair):
    "The counts fit the target's law at 1e-9, and the same counts do not fit a law at the distance stated"
    (target, draft, ctx), (build, verify) = pair, LOSSLESS[name]
    want = target_law(target, ctx, 3)
    report = g_test(seen := counted(target, build(draft), verify, ctx, enough(want, N, SEES)), want)
    print(f"{name:34} {report}")
    assert report.fits and report.tv < SEES and not g_test(seen, nearby(want, SEES)).fits


@pytest.mark.parametrize("name", LOSSY)
def test_three_tokens_of_a_lossy_rule(name, pair):
    "The counts fit the law that was computed for the rule, and where that is further from the target's than the counts see, they reject the target's"
    target, draft, ctx = pair
    want, plain = loop_law(target, chain(draft), LOSSY[name], ctx, 3), target_law(target, ctx, 3)
    report = g_test(seen := counted(target, chain(draft), LOSSY[name], ctx, N), want)
    print(f"{name:16} off by {tv_outcomes(want, plain):.3f}  {report}")
    assert report.fits and report.tv < WIDER and not g_test(seen, nearby(want, WIDER)).fits
    if tv_outcomes(want, plain) > g_test(seen, plain).tv: assert not g_test(seen, plain).fits


V = 8_000
ON_CHAINS = {"match": match, "reject": reject, "block": block, "traversal": traversal, "layered": layer_donors, "lenience": lenient(.5), "coupled": coupled}
ON_TREES = {"match": match, "reject": reject, "traversal": traversal, "layered": layer_donors, "generous": all_donors}


def peak(tree, verify, seed):
    "Rows that were read, and the most memory that a verdict held beyond them, in rows"
    table, seen = np.random.default_rng(seed).dirichlet([.5] * V, len(tree)), set()
    rows = Rows(lambda i: seen.add(i) or table[i], len(tree), V)
    tracemalloc.start()
    verify(rows, tree, Seeded(seed))
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return len(seen), held / (8 * V)


def grown(shape):
    "A tree of independent siblings on laws of V tokens, one law a level"
    tree, level = Tree((0,)), [0]
    for d, k in enumerate(shape):
        q = np.random.default_rng([9, d]).dirichlet([.5] * V)
        level = [c for u in level for c in tree.grow(u, iid(q), Seeded(0, (d,)), k)]
    return tree


@pytest.mark.parametrize("name,shape", [*((n, (1,) * 8) for n in ON_CHAINS), *((n, (4, 2, 2)) for n in ON_TREES)])
def test_no_rule_copies_all_rows(name, shape):
    "A verdict holds a few rows at a time, and one more at most for each that it has read"
    tree, verify = grown(shape), {**ON_CHAINS, **ON_TREES}[name]
    for seed in range(5):
        read, held = peak(tree, verify, seed)
        assert held <= read + 6, f"{held:.1f} rows held, {read} of {len(tree)} read"
