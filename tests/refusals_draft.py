"Invalid arguments of the untrained drafters: chapters 20 to 22b"
from functools import cache

from specref.core.cost import Costs
from specref.core.loop import generate
from specref.core.rng import Seeded
from specref.core.target import random_table
from specref.core.tree import Tree
from specref.draft.datastore import Datastore, Rest, suffix_array
from specref.draft.jacobi import Jacobi, jacobi
from specref.draft.lookahead import Lookahead, NgramPool, window_probes
from specref.draft.lookup import MostFrequent, NgramPlaces, PromptLookup, longest_ending
from specref.draft.ouroboros import Ouroboros
from specref.draft.recycling import Recycling, rank_template
from specref.draft.shapes import DynamicTree, ParallelHeadTree, SkipGrams, StaticTree, best_size
from specref.draft.shapes import expected_tokens, measure_rank_acceptance, medusa_choices, opt_tree
from specref.draft.shapes import sequoia, skip_accuracy
from specref.draft.suffix import SAM, Fallback, SuffixDecoding, SuffixTree
from specref.verify.reject import Chain, reject

RATES, NAN, INF = (.6, .2, .1), float("nan"), float("inf")


@cache
def model(V=3): return random_table(V, 0)


@cache
def skips(depth=1): return SkipGrams([0, 1], 3, depth)


@cache
def store(): return Datastore([(0, 1)], 2)


def measured(texts=((0,),), k=1, each=1): return measure_rank_acceptance(model(), model(), texts, k, each)
def refused_by(V, drafter): return lambda: generate(model(V), drafter(), reject, (0,), 2, Seeded(0))


ROWS = [
    # chapter 20: shapes
    *[("acceptance", lambda bad=bad: sequoia(bad, 3, 3))
      for bad in ((), 5, (1.5,), (-.1, .2), (.6, .6), (NAN,), ("x",))],
    ("acceptance", lambda: expected_tokens((-1, 0, 0), (.5,)), "each of 2 siblings"),
    ("acceptance", lambda: best_size((.6, .6), Costs({1: 1}, .1), 4, 4)),
    *[("accuracy", lambda bad=bad: medusa_choices(bad, 3)) for bad in ([], None, [(.6, .6)])],
    *[("parent", lambda bad=bad: StaticTree(model(), bad))
      for bad in ((), (0,), (-1, 1), 5, ("x",), (-1, .5))],
    ("parent", lambda: expected_tokens((-1, 1), RATES)),
    ("model", lambda: StaticTree(None, (-1, 0))),
    ("draw", lambda: StaticTree(model(), (-1, 0), "iid")),
    ("n", lambda: sequoia(RATES, 0, 2)),
    ("depth", lambda: sequoia(RATES, 3, -1)),
    ("n", lambda: medusa_choices([RATES], True)),
    ("most", lambda: best_size(RATES, Costs({1: 1}, .1), 0, 2)),
    ("costs", lambda: best_size(RATES, None, 3, 3)),
    ("k", lambda: measured(k=0)),
    ("each", lambda: measured(each=0)),
    ("texts", lambda: measured([])),
    ("texts", lambda: measured([(0, 3)])),
    ("target", lambda: measure_rank_acceptance(None, model(), [(0,)], 1)),
    ("draft", lambda: measure_rank_acceptance(model(), None, [(0,)], 1)),
    ("model", lambda: DynamicTree(None)),
    ("width", lambda: DynamicTree(model(), 0)),
    ("depth", lambda: DynamicTree(model(), 1, 0)),
    ("n", lambda: DynamicTree(model(), 1, 1, 0)),
    *[("threshold", lambda bad=bad: opt_tree(model(), threshold=bad)) for bad in (NAN, -2, INF, "x")],
    ("marginals", lambda: ParallelHeadTree(5)),
    ("n", lambda: ParallelHeadTree(skips(), 0)),
    ("drafter", refused_by(4, lambda: ParallelHeadTree(skips()))),
    ("V", lambda: SkipGrams([0], 0, 1)),
    ("depth", lambda: SkipGrams([0], 1, 0)),
    *[("tokens", lambda bad=bad: SkipGrams(bad, 3, 1)) for bad in ([3], [-1], [.5], [[0]])],
    ("marginals", lambda: skip_accuracy(None, [(0, 1)], 1)),
    ("k", lambda: skip_accuracy(skips(), [(0, 1)], 0)),
    ("texts", lambda: skip_accuracy(skips(), [(0, 3)], 1)),
    ("texts", lambda: skip_accuracy(skips(2), [(0, 1)], 1), "no place"),
    # chapter 21: lookup
    *[(name, lambda name=name: PromptLookup(**{"V": 3, name: 0}))
      for name in ("V", "max_matching_ngram_size", "num_draft_tokens", "min_matching_ngram_size",
                   "hits", "tail")],
    ("max_matching_ngram_size", lambda: PromptLookup(3, 3, min_matching_ngram_size=4)),
    *[("per_match", lambda bad=bad: PromptLookup(3, per_match=bad)) for bad in (.5, NAN, "a")],
    ("take", lambda: PromptLookup(3, take="first")),
    *[("stop", lambda bad=bad: PromptLookup(3, stop=bad)) for bad in (3, (3,), (.5,), "a")],
    ("forbidden", lambda: PromptLookup(3, forbidden=(-1,))),
    ("x", lambda: PromptLookup(2)((2, 0, 2), Seeded(0))),
    ("most", lambda: NgramPlaces(0)),
    ("tail", lambda: NgramPlaces(3, 0)),
    ("fewest", lambda: longest_ending("ab", 0, 3)),
    ("most", lambda: longest_ending("ab", 3, 2)),
    ("window", lambda: MostFrequent(0)),
    *[("share", lambda bad=bad: MostFrequent(4, bad)) for bad in (-.1, 1.1, NAN, None)],
    # chapter 21a: datastore
    *[("texts", lambda bad=bad: Datastore(bad, 2))
      for bad in ([], [()], [(0, 2)], [(-1,)], ["ab"], (0, 1), [[[0]]], 5)],
    ("V", lambda: Datastore([(0,)], 0)),
    ("text", lambda: suffix_array([])),
    ("text", lambda: suffix_array(3)),
    ("store", lambda: Rest([(0, 1)])),
    *[(name, lambda name=name: Rest(store(), **{name: 0}))
      for name in ("longest", "shortest", "num_draft_tokens", "depth", "occurrences")],
    ("longest", lambda: Rest(store(), longest=2, shortest=3)),
    ("ctx", lambda: store().find((0, 2))),
    ("ctx", lambda: store().find(())),
    # chapter 21b: suffix trees and automata
    ("depth", lambda: SuffixTree(0)),
    ("text", lambda: SuffixTree(3).remove((1, 0))),
    *[(name, lambda name=name: SuffixDecoding(**{"V": 3, name: 0}))
      for name in ("V", "num_draft_tokens", "width", "max_cached_requests")],
    ("max_tree_depth", lambda: SuffixDecoding(3, max_tree_depth=1)),
    *[(name, lambda name=name, bad=bad: SuffixDecoding(3, **{name: bad}))
      for name in ("max_spec_factor", "min_score") for bad in (-1, NAN, INF, "1")],
    *[("max_spec_offset", lambda bad=bad: SuffixDecoding(3, max_spec_offset=bad)) for bad in (-1e9, INF)],
    *[("min_token_prob", lambda bad=bad: SuffixDecoding(3, min_token_prob=bad)) for bad in (-.1, 1.1, NAN)],
    *[("past", lambda bad=bad: SuffixDecoding(3, past=bad))
      for bad in (5, ["ab"], [(0, 3)], [(-1,)], [(.5,)])],
    ("text", lambda: SuffixDecoding(3).finished((3,))),
    *[(name, lambda name=name: SAM(**{"V": 3, name: 0})) for name in ("V", "num_draft_tokens", "threshold")],
    ("len_bias", lambda: SAM(3, len_bias=-1)),
    ("corpus", lambda: SAM(3, corpus=[(0, 3)])),
    ("second", lambda: Fallback(SAM(3), SAM(4)), "one size"),
    ("second", lambda: Fallback(SAM(3), Chain(model(4), 2)), "one size"),
    ("first", lambda: Fallback("SAM", SAM(3))),
    # chapter 21c: token recycling
    ("V", lambda: Recycling(0)),
    ("k", lambda: Recycling(3, 0)),
    *[("shape", lambda bad=bad: Recycling(9, 8, bad))
      for bad in ((), ((),), ((1, 0),), ((0,), (8,)), 5, (0, 1), ((.5,),))],
    *[("matrix", lambda bad=bad: Recycling(3, matrix=bad))
      for bad in (((),), ((), (), (3,)), (0, 1, 2), None)],
    ("n", lambda: rank_template(0)),
    *[("ranks", lambda bad=bad: rank_template(3, bad))
      for bad in ((), (.5, .6), (.5, 0), (1.5,), 5, ("a",), (None,))],
    # chapter 22: Jacobi
    ("V", lambda: Jacobi(0)),
    ("block", lambda: Jacobi(3, 0)),
    ("first", lambda: Jacobi(3, 2, first=-1)),
    ("done", lambda: Jacobi(3, 2, done=-1)),
    *[("start", lambda bad=bad: Jacobi(3, 2, bad)) for bad in ((), (3,), (.5,), "a", 5)],
    ("end", lambda: Jacobi(3, end=(9,))),
    ("m", lambda: jacobi(model(), (0,), 0, ())),
    ("ctx", lambda: jacobi(model(), (), 1, (0,))),
    ("start", lambda: jacobi(model(), (0,), 1, (7,))),
    ("start", lambda: jacobi(model(), (0,), 3, (0, 0)), "wanted 3"),
    # chapter 22a: Lookahead
    *[(name, lambda name=name: Lookahead(**{"V": 3, name: 0})) for name in "VWG"],
    ("N", lambda: Lookahead(3, N=1)),
    *[("rows", lambda bad=bad: Lookahead(3, 2, 3, rows=bad))
      for bad in (((0,),), ((0, 1), (1,)), ((0,), (0, 1), (0, 1)), 5, ((3,), (0, 1)))],
    ("pool", lambda: Lookahead(3, pool={0: ((1, 2),)})),
    *[("rows", lambda bad=bad: window_probes(Tree((0,)), bad))
      for bad in ((), ((0,), (0,)), ((0,), (0, 1), (0,)))],
    ("drafter", refused_by(3, lambda: Lookahead(4))),
    # chapter 22b: Ouroboros
    ("gamma", lambda: Ouroboros(model(), 0, Lookahead(3))),
    ("phrases", lambda: Ouroboros(model(), 2, Lookahead(3), -1)),
    ("model", lambda: Ouroboros(None, 2, Lookahead(3))),
    ("inner", lambda: Ouroboros(model(), 2, NgramPool())),
    ("inner", lambda: Ouroboros(model(), 2, Lookahead(4)), "wanted the model's 3"),
    ("drafter", refused_by(4, lambda: Ouroboros(model(), 2, Lookahead(3)))),
]
