"Invalid arguments of the untrained drafters: chapters 20 to 22b"
from functools import cache

import torch

from specref.speed.cost import Costs, Machine, ModelSize
from specref.core.loop import generate
from specref.core.rng import Seeded
from specref.core.target import random_table
from specref.core.tree import Tree
from specref.draft.datastore import Datastore, Rest, suffix_array
from specref.draft.jacobi import Jacobi, jacobi
from specref.draft.length import AdaEDL, AllOf, ConfidenceLength, ConstantLength, EntropyLength
from specref.draft.length import AcceptanceEstimate, GoodputLength, HeuristicLength, Schedule
from specref.draft.length import ScheduledChain, admit
from specref.draft.length import Disco, SpecDecPP, goodput_length, text_cost
from specref.draft.lookahead import Lookahead, NgramPool, window_probes
from specref.draft.lookup import MostFrequent, NgramPlaces, PromptLookup, longest_ending
from specref.draft.ouroboros import Ouroboros
from specref.draft.cascade import InTurn, MaxGram, Nested, StagedTree, check_cascade, cs_drafting
from specref.draft.cascade import horizontal_speedup, lenient_inside, mean_rounds, vertical_speedup
from specref.draft.recycling import Recycling, rank_template
from specref.train.early_exit import AdapterDraft, ExitDraft, ExitTarget
from specref.train.early_exit import dropout_rates, exit_scales, exit_weights
from specref.draft.parallel import Amusd, EventLog, Pearl, Saguaro, SSD, fan_out, pearl_tokens, simulate
from specref.draft.parallel import whole_fan_out
from specref.draft.pipeline import InFlight, Pipeline, flight_latency, layer_stages
from specref.train.looped import LoopedRecipe, looped
from specref.draft.pipeline import match_rates, schedule
from specref.draft.shapes import DynamicTree, ParallelHeadTree, SkipGrams, StaticTree, best_size
from specref.draft.shapes import expected_tokens, measure_rank_acceptance, medusa_choices, opt_tree
from specref.draft.shapes import sequoia, skip_accuracy
from specref.draft.skipping import AdaptiveExit, SkippedModel
from specref.draft.swift import Swift, matchness, random_mask
from specref.draft.skipping import random_search, skip_mask
from specref.draft.sparse import Retrieval, SnapKV, SparseModel, StreamingWindow, triforce, triforce_speedup
from specref.train.stopping import StateHead, best_stopping, stopping_network
from specref.draft.suffix import SAM, Fallback, SuffixDecoding, SuffixTree
from specref.draft.vocab import Intersection, StringLaw, StringMatch, TextTokenizer, TokenizerPair
from specref.draft.vocab import text_tokenizer, toy_pair, translated
from specref.verify.reject import reject
from specref.core.drafters import Chain

RATES, NAN, INF = (.6, .2, .1), float("nan"), float("inf")
SIZE, MACHINE = ModelSize(10, 2, 3, 5), Machine(4, 8)


@cache
def network():
    from helpers import tiny
    from specref.models.transformer import HFModel
    return HFModel(tiny(3, 2), check=False)


@cache
def model(V=3): return random_table(V, 0)


@cache
def skips(depth=1): return SkipGrams([0, 1], 3, depth)


@cache
def store(): return Datastore([(0, 1)], 2)


def measured(texts=((0,),), k=1, each=1): return measure_rank_acceptance(model(), model(), texts, k, each)
def refused_by(V, drafter): return lambda: generate(model(V), drafter(), reject, (0,), 2, Seeded(0))


def words(*strings): return TextTokenizer(strings)


def word_pieces():
    "A tokenizer without a token for every byte"
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast
    tok = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    tok.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tok)


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
    # chapter 23: cascades
    *[(name, lambda name=name: Nested(**{"middle": model(), "gamma": 2, "inner": Chain(model(), 1), name: 0}))
      for name in ("gamma", "most", "verify", "middle", "inner")],
    ("inner", lambda: Nested(model(3), 2, Chain(model(4), 1)), "wanted the middle model's 3"),
    ("inner", lambda: Nested(m := model(), 2, Chain(m, 1)), "calls the middle model itself"),
    ("inner", lambda: Nested(m := model(), 2, Nested(model(), 2, Chain(m, 1))), "itself"),
    ("inner", lambda: StagedTree(m := model(), (-1, 0), guess=Chain(m, 1)), "itself"),
    ("parts", lambda: InTurn(())),
    ("parts", lambda: InTurn((5,))),
    ("parts", lambda: InTurn((Chain(model(3), 1), Chain(model(4), 1))), "one size"),
    *[("bigrams", lambda bad=bad: MaxGram(bad)) for bad in (5, (3, 0), (.5,), "ab")],
    ("num_draft_tokens", lambda: MaxGram((0, 1), 0)),
    *[("lenience", lambda bad=bad: lenient_inside(bad)) for bad in (.5, 0, -1, NAN, INF, None)],
    ("models", lambda: check_cascade((), ((4,),))),
    ("models", lambda: check_cascade((m := model(), m), ((1, 2, 3), (0, 1, 2), (0, 0, 1))), "1 of them"),
    *[("K", lambda bad=bad: check_cascade((model(),), bad))
      for bad in (((1, 2),), ((1, 2), (0,)), ((1, 2), (1, 2)), ((2, 1), (0, 1)), ((0, 1), (0, 1)),
                  ((1, 2), (0, 0)), ((-1, 2), (0, 1)), ((1.5, 2), (0, 1)), 5)],
    ("bottom", lambda: cs_drafting((model(),), ((1, 2), (0, 1)), Chain(model(), 1))),
    ("inner", lambda: mean_rounds(1.5, 1, 1)),
    ("gamma", lambda: mean_rounds(.5, 1, -1)),
    ("costs", lambda: horizontal_speedup([.5], [])),
    ("alphas", lambda: horizontal_speedup([1.5], [0])),
    ("joint", lambda: vertical_speedup(.5, .5, 1, 1, 0, 0, joint=.6)),
    ("n", lambda: vertical_speedup(.5, .5, 0, 1, 0, 0)),
    # chapter 27: two tokenizers
    *[("strings", lambda bad=bad: TextTokenizer(bad)) for bad in ((), (None,), ("a", ""), (b"a",))],
    ("text", lambda: words("a").encode("ab"), "got 'b'"),
    ("target", lambda: TokenizerPair(None, words("a"))),
    ("draft", lambda: TokenizerPair(words("a"), words("b")), "a string that both have"),
    ("draft", lambda: TokenizerPair(words("a", "b"), words("a")), "got no token for 'b'"),
    ("target", lambda: TokenizerPair(words("a"), words("a", "ab", "b")), "got no token for 'b'"),
    ("V", lambda: toy_pair(1)),
    *[("pair", lambda f=f: f(model(), None)) for f in (Intersection, StringLaw, StringMatch)],
    *[("model", lambda f=f: f(model(4), toy_pair(3)), "wanted the 3") for f in (Intersection, StringMatch)],
    ("least", lambda: StringLaw(model(), toy_pair(3), 2)),
    ("gamma", lambda: StringMatch(model(), toy_pair(3), 0)),
    ("draw", lambda: StringMatch(model(), toy_pair(3), 2, "iid")),
    ("tokenizer", lambda: text_tokenizer("gpt2"), "a fast tokenizer"),
    ("tokenizer", lambda: text_tokenizer(word_pieces()), "a token for every byte"),
    ("V", lambda: text_tokenizer(word_pieces(), 0)),
    ("rule", lambda: translated(model(), words("a"), words("a"), "uag"), "slem, tli, slrs"),
    ("drafter", refused_by(4, lambda: StringMatch(model(), toy_pair(3), 2))),
    # chapters 24 and 24a: draft lengths
    *[("most", lambda bad=bad: ScheduledChain(model(), Schedule(), bad)) for bad in (0, -1, 2.5, None)],
    ("schedule", lambda: ScheduledChain(model(), 5)),
    ("schedules", lambda: AllOf((ConstantLength(2), 5))),
    *[("k", lambda bad=bad: HeuristicLength(bad)) for bad in (0, 1.5, "x")],
    *[("threshold", lambda bad=bad, make=make: make(bad)) for bad in (-.1, 1.1, NAN, "x")
      for make in (ConfidenceLength, lambda t: EntropyLength(threshold=t), lambda t: AdaEDL(threshold=t))],
    ("scale", lambda: EntropyLength(scale=-1)),
    ("most", lambda: AdaEDL(most=0)),
    *[("target", lambda bad=bad: AdaEDL(target=bad)) for bad in (-.1, 2)],
    ("decay", lambda: GoodputLength(Costs({1: 1}, .1), decay=1.)),
    ("seen", lambda: GoodputLength(Costs({1: 1}, .1), seen=.5)),
    ("probe", lambda: GoodputLength(Costs({1: 1}, .1), probe=0)),
    ("rate", lambda: AcceptanceEstimate(1.5)),
    ("weight", lambda: AcceptanceEstimate(.5, -1)),
    ("alpha", lambda: goodput_length(1.5, 1, Costs({1: 1}, .1))),
    ("batch", lambda: goodput_length(.5, 0, Costs({1: 1}, .1))),
    ("costs", lambda: goodput_length(.5, 1, .1)),
    ("c", lambda: text_cost((1, 0), lambda at: 1, -1)),
    ("survival", lambda: admit([(.1, .2)], 1), "do not increase"),
    ("budget", lambda: admit([(.2, .1)], -1)),
    *[(what, lambda make=make: make()) for what, make in (
        ("head", lambda: SpecDecPP(5)), ("threshold", lambda: SpecDecPP(max, 1.5)),
        ("shortest", lambda: SpecDecPP(max, .5, 0)), ("classify", lambda: Disco(None)),
        ("threshold", lambda: Disco(max, -1)), ("name", lambda: stopping_network("adaedl")),
        ("model", lambda: StateHead(None, network())),
        ("c", lambda: best_stopping(model(), model(), (0,), 2, 3)),
        ("most", lambda: best_stopping(model(), model(), (0,), .1, 0)))],
    # chapters 25 and 25a: layers skipped, early exits
    ("target", lambda: SkippedModel(model(), (0,)*4), "HFModel"),
    *[("skip", lambda bad=bad: SkippedModel(network(), bad), "wanted 4")
      for bad in ((), (0,)*3, (0,)*48, (0, 1, 2, 0))],
    *[("attention", lambda bad=bad: skip_mask(2, [bad])) for bad in (2, -1, .5)],
    ("mlp", lambda: skip_mask(2, (), range(3))),
    *[(name, lambda bad=bad, name=name: AdaptiveExit(**{name: bad}))
      for name in ("threshold", "rate", "wanted", "step") for bad in (-.1, 1.1, NAN, "x")],
    ("most", lambda: AdaptiveExit(most=0)),
    ("trials", lambda: random_search(len, 4, 0)),
    ("size", lambda: random_search(len, 0, 4)),
    ("ratio", lambda: random_mask(4, 1.5, None)),
    ("layers", lambda: random_mask(2, .5, None)),
    ("window", lambda: matchness(model(), (0, 1), 0)),
    ("text", lambda: matchness(model(), (0, 1), 2)),
    ("skip", lambda: Swift(model, 4, (0,)*7)),
    *[(name, lambda bad=bad, name=name: Swift(model, 4, (0,)*8, **{name: bad}))
      for name in ("threshold", "ratio", "enough") for bad in (-.1, 1.1)],
    *[(name, lambda name=name: Swift(model, 4, (0,)*8, **{name: 0})) for name in ("most", "window", "every")],
    *[("exit", lambda bad=bad: ExitTarget(network().model, bad)) for bad in (0, 2, -1, 1.5)],
    ("target", lambda: ExitDraft(network()), "ExitTarget"),
    ("target", lambda: AdapterDraft(network(), None), "ExitTarget"),
    ("adapter", lambda: AdapterDraft(ExitTarget(network().model, 1, check=False), None), "KangarooAdapter"),
    ("layers", lambda: dropout_rates(1, .1)),
    ("most", lambda: dropout_rates(4, 1.1)),
    ("layers", lambda: exit_scales(1, 1.)),
    ("every", lambda: exit_weights(0, 4, 1., 0)),
    # chapter 25b: sparse caches
    *[("budget", lambda make=make: make()) for make in (
        lambda: StreamingWindow(4), lambda: StreamingWindow(0, sinks=0), lambda: Retrieval(12),
        lambda: Retrieval(8), lambda: SnapKV(32), lambda: SparseModel(network(), Retrieval(16), 16))],
    ("sinks", lambda: StreamingWindow(8, sinks=-1)),
    *[("chunk", lambda bad=bad: Retrieval(8, chunk=bad)) for bad in (0, -1, 1.5)],
    *[("kernel", lambda bad=bad: SnapKV(64, kernel=bad)) for bad in (0, 4)],
    ("observed", lambda: SnapKV(8, observed=0)),
    ("rule", lambda: SparseModel(network(), 8), "Selection"),
    ("target", lambda: SparseModel(model(), StreamingWindow(8)), "HFModel"),
    ("every", lambda: SparseModel(network(), Retrieval(64), 12), "a multiple of 8"),
    ("every", lambda: SparseModel(network(), SnapKV(64), 0)),
    ("k", lambda: triforce(network(), network(), k=0)),
    ("alpha", lambda: triforce_speedup(SIZE, SIZE, MACHINE, 8, 4, 2, 2, -1, .5)),
    # chapters 26 and 26a: parallel drafting, guesses in flight
    *[("gamma", lambda bad=bad: Pearl(model(), bad)) for bad in (0, 1.5, None)],
    *[("c", lambda bad=bad: Amusd(model(), bad)) for bad in (0, -1, NAN, INF, "x")],
    ("most", lambda: Amusd(model(), .5, 0)),
    *[("fan", lambda bad=bad: SSD(model(), 2, bad)) for bad in ((1, 1), (1, -1, 1), [1, 1, 1], (1, .5, 1))],
    *[("alpha", lambda f=f: f(1.5)) for f in (lambda a: pearl_tokens(a, 2), lambda a: fan_out(a, 2, 6),
                                              lambda a: whole_fan_out(a, 2, 6))],
    ("gamma", lambda: pearl_tokens(.5, 0)),
    ("budget", lambda: fan_out(.5, 2, NAN)),
    ("budget", lambda: whole_fan_out(.5, 2, 2.5)),
    ("r", lambda: fan_out(.5, 2, 6, -1)),
    ("top", lambda: Saguaro(-1, .5)),
    *[("C", lambda bad=bad: Saguaro(2, bad)) for bad in (0, 1.5, -1, "x")],
    ("time", lambda: EventLog().add("draft", -1)),
    ("draft", lambda: simulate([], -1)),
    ("target", lambda: simulate([], 1, INF)),
    *[("exit", lambda bad=bad: flight_latency(.5, bad, 4)) for bad in (0, 5, 1.5)],
    ("right", lambda: flight_latency(1.5, 1, 4)),
    ("stages", lambda: schedule([], 1, 0)),
    ("model", lambda: Pipeline(model(), [[]], 1)),
    *[("k", lambda bad=bad: InFlight(model(), 2, bad)) for bad in (0, .5)],
    ("ahead", lambda: InFlight(model(), -1)),
    ("n", lambda: Pipeline(network().model, layer_stages(network().model), 1).decode((0,), 0)),
    ("ctx", lambda: Pipeline(network().model, layer_stages(network().model), 1).decode((), 2)),
    ("per", lambda: layer_stages(network().model, 0)),
    ("loops", lambda: looped(network().model, 0)),
    ("ks", lambda: match_rates(network().model, torch.zeros(1, 40, dtype=int), [1], [0])),
    ("exits", lambda: match_rates(network().model, torch.zeros(1, 40, dtype=int), [3], [1])),
    *[(name, lambda name=name: LoopedRecipe(**{name: 0})) for name in ("unique", "loops", "steps", "rows")],
]
