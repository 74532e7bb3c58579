"Invalid arguments of verifiers and their drafters: the argument, the call, words of the message"
from functools import cache, partial
from math import inf, nan

import numpy as np

from kinds import at_least
from helpers import CANON, constant
from verify_helpers import star as star_by
from specref import (acceptance_prob, AcceptanceRule, block, Branching, Chain, exact, generate, hub_pairs,
                     iid, kseq, lenient, points, PositionKeyed, reject, residual, Seeded, spechub, top_beta,
                     transport, transport_iid, traversal, Tree, typical, without_replacement)
from specref.core.drafters import round_robin
from specref.verify.block import mean_accepted_block, prefix_weights
from specref.verify.coupled import (GumbelMax, gumbel_max_coupling, inverse_cdf_coupling, list_match_prob,
                                    list_position, reused_noise_law)
from specref.verify.kseq import smallest_rho
from specref.verify.lossy import (BildDraft, CombinedModel, bild_rollback, cascade, ensemble,
                                  lenient_greedy, standard_rule, text_law)
from specref.verify.siblings import acceptance_prob_iid
from specref.verify.transport import (greedy_draft, importance, optimal_acceptance_iid,
                                      optimal_acceptance_pair, sibling_sets)
from specref.verify.traversal import acceptance_bound, all_donors, best_rule, layer_donors, mean_accepted

P, Q = CANON

@cache
def two(): return constant(1, 1)

@cache
def three(): return constant(1, 1, 1)

@cache
def pair(): return constant(*P), constant(*Q)

def star(draw, k, seed=0): return star_by(draw, k, Seeded(seed))

def added(*parents):
    "Nodes added without a draw"
    tree = Tree((0,))
    for parent in parents: tree.add(parent, 3, Q)
    return tree

def ragged(seed):
    "One child if it is token 3, as with seed 0, else two"
    return star(lambda earlier: Q if len(earlier) < 2 and 3 not in earlier else None, 3, seed)

def grown_twice():
    tree = star(iid(Q), 1)
    tree.grow(0, without_replacement(Q), Seeded(0), 1)
    return tree

def other_tail(earlier):
    "Pairs around token 3, but the token after the hub is drawn from the wrong distribution"
    return exact(1, 1, 1, 0) if earlier == (3,) else hub_pairs(Q)(earlier)

def flat(): return star(iid(np.full(512, 1/512)), 2)

def verdict(verify, tree, row=P): return verify([row]*9, tree, Seeded(0))

def round_of(drafter, ctx=(0,)): return drafter(ctx, Seeded(0))

def mixed():
    models = constant(1, 1), constant(1, 1, 1)
    return generate(models[0], Branching(models, (1,), round_robin(iid)), reject, (0,), 1, Seeded(0))

KINDS = [   # what is wrong, and each call with the arguments for which it is
    (at_least(0), (partial(acceptance_prob, P, iid(Q)), "k"), (partial(sibling_sets, iid(Q)), "n"),
        (GumbelMax, "seed"), (partial(text_law, standard_rule, two(), two(), 1, (0,)), "n")),
    (at_least(1), (partial(list_match_prob, P, Q), "K"), (list_position, "K"),
        (partial(GumbelMax, 1), "lists"), (partial(top_beta, tau=1.), "beta"),
        (partial(BildDraft, two(), fallback=.5), "gamma"),
        (partial(text_law, standard_rule, two(), two(), ctx=(0,), n=1), "gamma")),
]
ROWS = [
    # siblings
    *(("shape", lambda bad=bad: Branching(two(), bad))
      for bad in ((), (0,), (2, -1), None, (1.5,), 3, ("2",))),
    ("model", lambda: Branching((), (1,))),
    *(("draw", lambda bad=bad: Branching(two(), (1,), bad)) for bad in (3, lambda a, b: iid(a))),
    ("draw", lambda: Branching((two(), two()), (1,))), ("drafter", mixed),
    ("q", lambda: acceptance_prob(P, iid(exact(1, 1)), 1)),
    ("q", lambda: acceptance_prob_iid(P, [exact(1, 1)])),
    # rules for chains only
    *(("tree", lambda f=f: verdict(f, star(without_replacement(Q), 2)))
      for f in (block, standard_rule, lenient(1))),
    *(("tree", lambda f=f: verdict(f, added(0, 1, 1)), "node 1 with 2 children, wanted a chain")
      for f in (block, standard_rule, lenient(1))),
    ("tree", lambda: prefix_weights([P]*9, added(0, 0))),
    # a row and an edge with different vocabularies
    *(("q", lambda f=f, row=row: verdict(f, star(iid(Q), 1), row)) for row in (exact(1, 1, 1), exact(1))
      for f in (
        block, reject, traversal, layer_donors, all_donors, transport, importance, kseq, transport_iid,
        standard_rule,
        typical())),
    # block
    *(("gamma", lambda bad=bad: mean_accepted_block(*pair(), (0,), bad)) for bad in (-1, 1.5, None)),
    *(("ctx", lambda bad=bad: mean_accepted_block(*pair(), bad, 2)) for bad in ((), (9,), (-1,), None)),
    ("q", lambda: mean_accepted_block(two(), three(), (0,), 2)),
    # traversal
    *(("ctx", lambda f=f: f(two(), Chain(two(), 1), ())) for f in (acceptance_bound, best_rule)),
    ("ctx", lambda: mean_accepted(two(), Chain(two(), 1), traversal, (2,))),
    ("drafter", lambda: acceptance_bound(two(), Chain(three(), 1), (0,))),
    # transport
    *(("tree", lambda f=f: verdict(f, added(0, 0)), "draw does not explain|drawn independently|drawn by one")
      for f in (transport, importance, kseq, transport_iid, spechub)),
    *(("tree", lambda f=f, seed=seed: verdict(f, ragged(seed)),
       "may depend on their tokens|independently|drawn by one")
      for f in (transport, importance, kseq, transport_iid, spechub) for seed in (0, 3)),
    *(("tree", lambda f=f, tree=tree: verdict(f, tree()), "wanted those of `iid`")
      for f in (kseq, transport_iid) for tree in (
        grown_twice, lambda: star(without_replacement(Q), 2), lambda: star(points([3, 2], 4, exact=True), 2),
        lambda: star(greedy_draft(2)(Q), 2), lambda: star(hub_pairs(Q), 2))),
    *(("tree", lambda draw=draw, k=k: verdict(spechub, star(draw, k)), "a pair of it, or its first")
      for draw, k in (
        (iid(Q), 1), (iid(Q), 2), (without_replacement(Q), 2), (greedy_draft(2)(Q), 2), (other_tail, 2))),
    ("q", lambda: verdict(spechub, star(hub_pairs(Q), 2), exact(1, 1, 1))),
    ("q", lambda: optimal_acceptance_pair(P, exact(1, 1))),
    ("rho", lambda: kseq([P]*3, star(iid(Q), 2), Seeded(0), rho=lambda *_: P.sum()),
     "residual would be negative"),
    ("top_k", lambda: verdict(transport, flat(), np.full(512, 1/512)), "ways to draw"),
    *((name, lambda f=f, bad=bad: f(bad)) for bad in (0, -1, 1.5) for name, f in (
        ("n", lambda n: optimal_acceptance_iid(P, Q, n)), ("n", greedy_draft),
        ("k", lambda k: smallest_rho(P, Q, k)))),
    *(("q", lambda f=f: f(P, exact(1, 1), 2)) for f in (optimal_acceptance_iid, smallest_rho)),
    *(("q", lambda f=f, bad=bad: f(np.array(bad))) for bad in ([.5, .6], [[1.]])
      for f in (hub_pairs, greedy_draft(2))),
    # coupled
    *(("q", lambda f=f: f(P, Q[:3])) for f in (inverse_cdf_coupling, gumbel_max_coupling, list_match_prob)),
    ("q", lambda: reused_noise_law(P, Q[:3], gumbel_max_coupling)),
    *((name, lambda law=law: gumbel_max_coupling(*law)) for bad in ([0., 0.], [nan, 1.])
      for name, law in (("p", (np.array(bad), np.full(2, .5))), ("q", (np.full(2, .5), np.array(bad))))),
    *(("law", lambda bad=bad: GumbelMax(1).pick(np.array(bad), key=3))
      for bad in ([0., 0.], [nan, 1.], [inf, 0.])),
    ("drafter", lambda: round_of(PositionKeyed(Branching(three(), (2, 1)))), "drawn with the noise of"),
    ("drafter", lambda: round_of(PositionKeyed(Chain(two(), 2), lambda t, i: i), (0, 0))),
    ("drafter", lambda: round_of(PositionKeyed(Branching(three(), (2, 1), iid), list_position(3)))),
    # lossy
    *(("l", lambda f=f, bad=bad: f(bad)) for bad in (0, -1, 1.1, nan, inf, None, "1", True)
      for f in (lenient, lenient_greedy)),
    *(("tau", lambda bad=bad: top_beta(1, bad)) for bad in (-1, nan, None, "1", -inf)),
    *(("alpha_rb", lambda bad=bad: bild_rollback(bad)) for bad in (-1, nan, None, -inf)),
    *((name, lambda f=f, bad=bad: f(bad)) for bad in (-.1, 1.1, nan, None) for name, f in (
        ("epsilon", typical), ("delta", lambda delta: typical(.09, delta)), ("w", ensemble))),
    ("choice", lambda: typical(choice=3)),
    ("delta", lambda: typical(1, 1)),   # no token of a uniform row is typical, not even the argmax
    *((name, lambda f=f, bad=bad: f(bad)) for bad in (-.1, nan, inf, None) for name, f in (
        ("fallback", lambda fallback: BildDraft(two(), 2, fallback)), ("sure", cascade))),
    ("ctx", lambda: text_law(standard_rule, two(), two(), 1, (), 1)),
    ("draft", lambda: text_law(standard_rule, two(), three(), 1, (0,), 1)),
    ("draft", lambda: CombinedModel(two(), three(), ensemble(.5))),
    ("accepted", lambda: AcceptanceRule(None, residual)),
    ("otherwise", lambda: AcceptanceRule(np.minimum, 1)), ("row", lambda: typical(row=None)),
    *(("q", lambda f=f: f(exact(1, 1), exact(1, 1, 1)))
      for f in (standard_rule.law, standard_rule.acceptance, standard_rule.bias, lenient_greedy(1).law)),
]
