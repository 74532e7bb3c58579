"Invalid arguments of the untrained drafters: chapters 20 to 22b"
from functools import cache, partial

import torch

from kinds import RATE, at_least, number
from specref import (Chain, Costs, Datastore, DynamicTree, Fallback, generate, Jacobi, Lookahead, opt_tree,
                     Ouroboros, PromptLookup, random_table, Recycling, reject, Rest, SAM, Seeded, sequoia,
                     StaticTree, SuffixDecoding, Tree)
from specref.draft.cascade import (InTurn, MaxGram, Nested, StagedTree, check_cascade, cs_drafting,
                                   horizontal_speedup, lenient_inside, mean_rounds, vertical_speedup)
from specref.draft.datastore import suffix_array
from specref.draft.jacobi import jacobi
from specref.draft.length import (AdaEDL, AllOf, ConfidenceLength, ConstantLength, EntropyLength,
                                  AcceptanceEstimate, GoodputLength, HeuristicLength, ScheduledChain, admit,
                                  Disco, SpecDecPP, goodput_length, text_cost)
from specref.draft.lookahead import NgramPool, window_probes
from specref.draft.lookup import MostFrequent, NgramPlaces, longest_ending
from specref.draft.parallel import (Amusd, EventLog, Pearl, Saguaro, SSD, fan_out, pearl_tokens, simulate,
                                    whole_fan_out)
from specref.draft.pipeline import InFlight, Pipeline, flight_latency, layer_stages, match_rates, schedule
from specref.draft.recycling import rank_template
from specref.draft.shapes import (ParallelHeadTree, SkipGrams, best_size, expected_tokens,
                                  measure_rank_acceptance, medusa_choices, skip_accuracy)
from specref.draft.skipping import AdaptiveExit, SkippedModel, random_search, skip_mask
from specref.draft.sparse import (Retrieval, SnapKV, SparseModel, StreamingWindow, critical_length,
                                  sparse_speedup, triforce, triforce_speedup)
from specref.speed.cost import Machine, ModelSize
from specref.draft.suffix import SuffixTree
from specref.draft.swift import Swift, matchness, random_mask
from specref.draft.vocab import (Intersection, StringLaw, StringMatch, TextTokenizer, TokenizerPair,
                                 text_tokenizer, toy_pair, translated)
from specref.train.early_exit import (AdapterDraft, ExitDraft, ExitTarget, dropout_rates, exit_scales,
                                      exit_weights)
from specref.train.looped import LoopedRecipe, looped
from specref.train.stopping import StateHead, best_stopping, stopping_network

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

KINDS = [   # what is wrong, and each call with the arguments for which it is
    (RATE, (partial(GoodputLength, Costs({1: 1}, .1)), "decay")),
    (at_least(0), (partial(sequoia, RATES, 3), "depth"), (partial(SAM, 3), "len_bias"),
        (partial(Jacobi, 3), "done"), (partial(Ouroboros, model(), 2, Lookahead(3)), "phrases"),
        (partial(mean_rounds, .5, 1), "gamma"), (partial(admit, [(.2, .1)]), "budget"),
        (partial(StreamingWindow, 8), "sinks"), (partial(whole_fan_out, .5, 2), "budget"),
        (partial(Saguaro, C=.5), "top"), (partial(InFlight, model()), "ahead")),
    (at_least(1), (partial(sequoia, RATES, depth=2), "n"), (partial(medusa_choices, [RATES]), "n"),
        (partial(best_size, RATES, Costs({1: 1}, .1), depth=2), "most"), (measured, "k each"),
        (partial(DynamicTree, model()), "width depth n"), (partial(ParallelHeadTree, skips()), "n"),
        (partial(SkipGrams, [0], depth=1), "V"), (partial(SkipGrams, [0], 1), "depth"),
        (partial(skip_accuracy, skips(), [(0, 1)]), "k"), (NgramPlaces, "most"),
        (partial(NgramPlaces, 3), "tail"), (partial(longest_ending, "ab", most=3), "fewest"),
        (MostFrequent, "window"), (partial(Datastore, [(0,)]), "V"), (SuffixTree, "depth"), (Recycling, "V"),
        (partial(Recycling, 3), "k"), (rank_template, "n"), (Jacobi, "V"), (partial(Jacobi, 3), "block"),
        (partial(jacobi, model(), (0,), start=()), "m"),
        (partial(Ouroboros, model(), inner=Lookahead(3)), "gamma"),
        (partial(MaxGram, (0, 1)), "num_draft_tokens"),
        (partial(vertical_speedup, .5, .5, k=1, c1=0, c2=0), "n"),
        (partial(StringMatch, model(), toy_pair(3)), "gamma"), (partial(ScheduledChain, model()), "most"),
        (HeuristicLength, "k"), (AdaEDL, "most"), (partial(GoodputLength, Costs({1: 1}, .1)), "probe"),
        (partial(goodput_length, .5, costs=Costs({1: 1}, .1)), "batch"), (AdaptiveExit, "most"),
        (partial(random_search, len, 4), "trials"), (partial(random_search, len, trials=4), "size"),
        (partial(matchness, model(), (0, 1)), "window"), (partial(exit_weights, 0, 4, 1.), "every"),
        (partial(Retrieval, 8), "chunk"), (partial(SnapKV, 8), "observed"),
        (partial(SparseModel, network(), SnapKV(64)), "every"),
        (partial(triforce, network(), network()), "k"), (partial(Pearl, model()), "gamma"),
        (partial(Amusd, model(), .5), "most"), (partial(pearl_tokens, .5), "gamma"),
        (partial(schedule, [], 1), "stages"), (partial(InFlight, model(), 2), "k"),
        (partial(Pipeline(network().model, layer_stages(network().model), 1).decode, (0,)), "n"),
        (partial(layer_stages, network().model), "per"), (partial(looped, network().model), "loops"),
        (partial(PromptLookup, V=3), "V max_matching_ngram_size num_draft_tokens min_matching_ngram_size"),
        (partial(PromptLookup, V=3), "hits tail"), (partial(SAM, V=3), "V num_draft_tokens threshold"),
        (partial(Rest, store()), "shortest num_draft_tokens depth occurrences"),
        (partial(SuffixDecoding, V=3), "V num_draft_tokens width max_cached_requests"),
        (partial(Lookahead, V=3), "V W G"), (LoopedRecipe, "unique loops steps rows"),
        (partial(Swift, model, 4, (0,)*8), "most window every"), (partial(SpecDecPP, max), "shortest"),
        (partial(best_stopping, model(), model(), (0,), .1), "most")),
    (at_least(2), (partial(SuffixDecoding, 3), "max_tree_depth"), (partial(Lookahead, 3), "N"),
        (toy_pair, "V"), (partial(dropout_rates, most=.1), "layers"),
        (partial(exit_scales, scale=1.), "layers")),
    (at_least(3), (partial(longest_ending, "ab", 3), "most"), (partial(Rest, store(), shortest=3), "longest"),
        (partial(random_mask, ratio=.5, rng=None), "layers")),
    (at_least(4), (partial(PromptLookup, 3, min_matching_ngram_size=4), "max_matching_ngram_size")),
    (number(-1), (partial(opt_tree, model()), "threshold")),
    (number(-24), (partial(SuffixDecoding, 3), "max_spec_offset")),
    (number(0), (partial(SuffixDecoding, V=3), "max_spec_factor min_score"), (EntropyLength, "scale"),
        (AcceptanceEstimate, "weight"),
        (partial(text_cost, (1, 0), lambda at: 1), "c"), (partial(fan_out, .5, 2), "budget"),
        (partial(fan_out, .5, 2, 6), "r"), (partial(EventLog().add, "draft"), "time"),
        (partial(simulate, []), "draft"), (partial(simulate, [], 1), "target")),
    (number(0, 1), (ConfidenceLength, "threshold"), (EntropyLength, "threshold"), (AdaEDL, "threshold"),
        (AdaptiveExit, "threshold rate wanted step"),
        (partial(Swift, model, 4, (0,)*8), "threshold ratio enough"),
        (partial(pearl_tokens, gamma=2), "alpha"), (partial(fan_out, gamma=2, budget=6), "alpha"),
        (partial(whole_fan_out, gamma=2, budget=6), "alpha"), (partial(SpecDecPP, max), "threshold"),
        (partial(Disco, max), "threshold"), (partial(best_stopping, model(), model(), (0,), most=3), "c"),
        (MostFrequent, "share"), (partial(SuffixDecoding, 3), "min_token_prob"),
        (partial(mean_rounds, k=1, gamma=1), "inner"), (partial(horizontal_speedup, costs=[0]), "alphas"),
        (partial(StringLaw, model(), toy_pair(3)), "least"), (AdaEDL, "target"), (AcceptanceEstimate, "rate"),
        (partial(goodput_length, batch=1, costs=Costs({1: 1}, .1)), "alpha"),
        (partial(random_mask, 4, rng=None), "ratio"), (partial(dropout_rates, 4), "most"),
        (partial(triforce_speedup, SIZE, SIZE, MACHINE, 8, 4, 2, 2, inner=.5), "alpha"),
        (partial(flight_latency, exit=1, stages=4), "right")),
    (number(1), (lenient_inside, "lenience")), (number(1, 1), (partial(ExitTarget, network().model), "exit")),
]
ROWS = [
    # chapter 20: shapes
    *[("acceptance", lambda bad=bad: sequoia(bad, 3, 3))
      for bad in ((), 5, (1.5,), (-.1, .2), (.6, .6), (NAN,), ("x",))],
    ("acceptance", lambda: expected_tokens((-1, 0, 0), (.5,)), "each of 2 siblings"),
    ("acceptance", lambda: best_size((.6, .6), Costs({1: 1}, .1), 4, 4)),
    *[("accuracy", lambda bad=bad: medusa_choices(bad, 3)) for bad in ([], None, [(.6, .6)])],
    *[("parent", lambda bad=bad: StaticTree(model(), bad))
      for bad in ((), (0,), (-1, 1), 5, ("x",), (-1, .5))],
    ("parent", lambda: expected_tokens((-1, 1), RATES)), ("model", lambda: StaticTree(None, (-1, 0))),
    ("draw", lambda: StaticTree(model(), (-1, 0), "iid")), ("costs", lambda: best_size(RATES, None, 3, 3)),
    ("texts", lambda: measured([])), ("texts", lambda: measured([(0, 3)])),
    ("target", lambda: measure_rank_acceptance(None, model(), [(0,)], 1)),
    ("draft", lambda: measure_rank_acceptance(model(), None, [(0,)], 1)),
    ("model", lambda: DynamicTree(None)), ("marginals", lambda: ParallelHeadTree(5)),
    ("drafter", refused_by(4, lambda: ParallelHeadTree(skips()))),
    *[("tokens", lambda bad=bad: SkipGrams(bad, 3, 1)) for bad in ([3], [-1], [.5], [[0]])],
    ("marginals", lambda: skip_accuracy(None, [(0, 1)], 1)),
    ("texts", lambda: skip_accuracy(skips(), [(0, 3)], 1)),
    ("texts", lambda: skip_accuracy(skips(2), [(0, 1)], 1), "no place"),
    # chapter 21: lookup
    *[("per_match", lambda bad=bad: PromptLookup(3, per_match=bad)) for bad in (.5, NAN, "a")],
    ("take", lambda: PromptLookup(3, take="first")),
    *[("stop", lambda bad=bad: PromptLookup(3, stop=bad)) for bad in (3, (3,), (.5,), "a")],
    ("forbidden", lambda: PromptLookup(3, forbidden=(-1,))),
    ("x", lambda: PromptLookup(2)((2, 0, 2), Seeded(0))),
    # chapter 21a: datastore
    *[("texts", lambda bad=bad: Datastore(bad, 2))
      for bad in ([], [()], [(0, 2)], [(-1,)], ["ab"], (0, 1), [[[0]]], 5)],
    ("text", lambda: suffix_array([])), ("text", lambda: suffix_array(3)), ("store", lambda: Rest([(0, 1)])),
    ("ctx", lambda: store().find((0, 2))),
    ("ctx", lambda: store().find(())),
    # chapter 21b: suffix trees and automata
    ("text", lambda: SuffixTree(3).remove((1, 0))),
    *[("past", lambda bad=bad: SuffixDecoding(3, past=bad))
      for bad in (5, ["ab"], [(0, 3)], [(-1,)], [(.5,)])],
    ("text", lambda: SuffixDecoding(3).finished((3,))), ("corpus", lambda: SAM(3, corpus=[(0, 3)])),
    ("second", lambda: Fallback(SAM(3), SAM(4)), "one size"),
    ("second", lambda: Fallback(SAM(3), Chain(model(4), 2)), "one size"),
    ("first", lambda: Fallback("SAM", SAM(3))),
    # chapter 21c: token recycling
    *[("shape", lambda bad=bad: Recycling(9, 8, bad))
      for bad in ((), ((),), ((1, 0),), ((0,), (8,)), 5, (0, 1), ((.5,),))],
    *[("matrix", lambda bad=bad: Recycling(3, matrix=bad))
      for bad in (((),), ((), (), (3,)), (0, 1, 2), None)],
    *[("ranks", lambda bad=bad: rank_template(3, bad))
      for bad in ((), (.5, .6), (.5, 0), (1.5,), 5, ("a",), (None,))],
    # chapter 22: Jacobi
    ("first", lambda: Jacobi(3, 2, first=-1)),
    *[("start", lambda bad=bad: Jacobi(3, 2, bad)) for bad in ((), (3,), (.5,), "a", 5)],
    ("end", lambda: Jacobi(3, end=(9,))), ("ctx", lambda: jacobi(model(), (), 1, (0,))),
    ("start", lambda: jacobi(model(), (0,), 1, (7,))),
    ("start", lambda: jacobi(model(), (0,), 3, (0, 0)), "wanted 3"),
    # chapter 22a: Lookahead
    *[("rows", lambda bad=bad: Lookahead(3, 2, 3, rows=bad))
      for bad in (((0,),), ((0, 1), (1,)), ((0,), (0, 1), (0, 1)), 5, ((3,), (0, 1)))],
    ("pool", lambda: Lookahead(3, pool={0: ((1, 2),)})),
    *[("rows", lambda bad=bad: window_probes(Tree((0,)), bad))
      for bad in ((), ((0,), (0,)), ((0,), (0, 1), (0,)))],
    ("drafter", refused_by(3, lambda: Lookahead(4))),
    # chapter 22b: Ouroboros
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
    ("parts", lambda: InTurn(())), ("parts", lambda: InTurn((5,))),
    ("parts", lambda: InTurn((Chain(model(3), 1), Chain(model(4), 1))), "one size"),
    *[("bigrams", lambda bad=bad: MaxGram(bad)) for bad in (5, (3, 0), (.5,), "ab")],
    ("models", lambda: check_cascade((), ((4,),))),
    ("models", lambda: check_cascade((m := model(), m), ((1, 2, 3), (0, 1, 2), (0, 0, 1))), "1 of them"),
    *[("K", lambda bad=bad: check_cascade((model(),), bad))
      for bad in (((1, 2),), ((1, 2), (0,)), ((1, 2), (1, 2)), ((2, 1), (0, 1)), ((0, 1), (0, 1)),
                  ((1, 2), (0, 0)), ((-1, 2), (0, 1)), ((1.5, 2), (0, 1)), 5)],
    ("bottom", lambda: cs_drafting((model(),), ((1, 2), (0, 1)), Chain(model(), 1))),
    ("costs", lambda: horizontal_speedup([.5], [])),
    ("joint", lambda: vertical_speedup(.5, .5, 1, 1, 0, 0, joint=.6)),
    # chapter 27: two tokenizers
    *[("strings", lambda bad=bad: TextTokenizer(bad)) for bad in ((), (None,), ("a", ""), (b"a",))],
    ("text", lambda: words("a").encode("ab"), "got 'b'"), ("target", lambda: TokenizerPair(None, words("a"))),
    ("draft", lambda: TokenizerPair(words("a"), words("b")), "a string that both have"),
    ("draft", lambda: TokenizerPair(words("a", "b"), words("a")), "got no token for 'b'"),
    ("target", lambda: TokenizerPair(words("a"), words("a", "ab", "b")), "got no token for 'b'"),
    *[("pair", lambda f=f: f(model(), None)) for f in (Intersection, StringLaw, StringMatch)],
    *[("model", lambda f=f: f(model(4), toy_pair(3)), "wanted the 3") for f in (Intersection, StringMatch)],
    ("draw", lambda: StringMatch(model(), toy_pair(3), 2, "iid")),
    ("tokenizer", lambda: text_tokenizer("gpt2"), "a fast tokenizer"),
    ("tokenizer", lambda: text_tokenizer(word_pieces()), "a token for every byte"),
    ("V", lambda: text_tokenizer(word_pieces(), 0)),
    ("rule", lambda: translated(model(), words("a"), words("a"), "uag"), "slem, tli, slrs"),
    ("drafter", refused_by(4, lambda: StringMatch(model(), toy_pair(3), 2))),
    # chapters 24 and 24a: draft lengths
    ("schedule", lambda: ScheduledChain(model(), 5)), ("schedules", lambda: AllOf((ConstantLength(2), 5))),
    ("seen", lambda: GoodputLength(Costs({1: 1}, .1), seen=.5)), ("costs", lambda: goodput_length(.5, 1, .1)),
    ("survival", lambda: admit([(.1, .2)], 1), "do not increase"),
    *[(what, lambda make=make: make()) for what, make in (
        ("head", lambda: SpecDecPP(5)), ("classify", lambda: Disco(None)),
        ("name", lambda: stopping_network("adaedl")), ("model", lambda: StateHead(None, network())))],
    # chapters 25 and 25a: layers skipped, early exits
    ("target", lambda: SkippedModel(model(), (0,)*4), "HFModel"),
    *[("skip", lambda bad=bad: SkippedModel(network(), bad), "wanted 4")
      for bad in ((), (0,)*3, (0,)*48, (0, 1, 2, 0))],
    *[("attention", lambda bad=bad: skip_mask(2, [bad])) for bad in (2, -1, .5)],
    ("mlp", lambda: skip_mask(2, (), range(3))), ("text", lambda: matchness(model(), (0, 1), 2)),
    ("skip", lambda: Swift(model, 4, (0,)*7)), ("target", lambda: ExitDraft(network()), "ExitTarget"),
    ("target", lambda: AdapterDraft(network(), None), "ExitTarget"),
    ("adapter", lambda: AdapterDraft(ExitTarget(network().model, 1, check=False), None), "KangarooAdapter"),
    # chapter 25b: sparse caches
    *[("budget", lambda make=make: make()) for make in (
        lambda: StreamingWindow(4), lambda: StreamingWindow(0, sinks=0), lambda: Retrieval(12),
        lambda: Retrieval(8), lambda: SnapKV(32), lambda: SparseModel(network(), Retrieval(16), 16))],
    *[("kernel", lambda bad=bad: SnapKV(64, kernel=bad)) for bad in (0, 4)],
    ("rule", lambda: SparseModel(network(), 8), "Selection"),
    ("target", lambda: SparseModel(model(), StreamingWindow(8)), "HFModel"),
    ("every", lambda: SparseModel(network(), Retrieval(64), 12), "a multiple of 8"),
    ("alpha", lambda: sparse_speedup(ModelSize(10, 2, 3, 5), Machine(4, 8), 8, 4, 2, 1.5)),
    ("gamma", lambda: sparse_speedup(ModelSize(10, 2, 3, 5), Machine(4, 8), 8, 4, 0, .5)),
    ("gamma", lambda: critical_length(ModelSize(10, 2, 3, 5), Machine(4, 8), 4, 1)),
    # chapters 26 and 26a: parallel drafting, guesses in flight
    *[("c", lambda bad=bad: Amusd(model(), bad)) for bad in (0, -1, NAN, INF, "x")],
    *[("fan", lambda bad=bad: SSD(model(), 2, bad)) for bad in ((1, 1), (1, -1, 1), [1, 1, 1], (1, .5, 1))],
    *[("C", lambda bad=bad: Saguaro(2, bad)) for bad in (0, 1.5, -1, "x")],
    *[("exit", lambda bad=bad: flight_latency(.5, bad, 4)) for bad in (0, 5, 1.5)],
    ("model", lambda: Pipeline(model(), [[]], 1)),
    ("ctx", lambda: Pipeline(network().model, layer_stages(network().model), 1).decode((), 2)),
    ("ks", lambda: match_rates(network().model, torch.zeros(1, 40, dtype=int), [1], [0])),
    ("exits", lambda: match_rates(network().model, torch.zeros(1, 40, dtype=int), [3], [1])),
]
