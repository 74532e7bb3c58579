"Objects that change, in two threads at once: the texts of each thread alone; copies begin without a cache"
import pickle
import threading
import time
from copy import copy, deepcopy

import pytest
import torch

import test_encoder_decoder as enc_dec
import test_recurrent as recurrent
import test_sparse as sparse
from helpers import at_once, tiny
from specref.core.loop import generate, match
from specref.core.rng import Seeded
from specref.core.target import Meter, run_in_thread
from specref.core.tree import Tree
from specref.train.early_exit import ExitDraft, ExitTarget
from specref.draft.lookup import PromptLookup
from specref.draft.pipeline import Pipeline, layer_stages
from specref.draft.shapes import StaticTree
from specref.draft.skipping import SkippedModel, skip_mask
from specref.gpu.engine import Engine
from specref.models.bridge import speculate
from specref.models.encoder_decoder import EncoderDecoderModel
from specref.models.llama import PackedLlama
from specref.models.recurrent import RecurrentModel
from specref.models.transformer import HFModel
from specref.verify.reject import reject
from specref.core.drafters import Chain

torch.set_num_threads(1)
CTXS, N = ((1, 0, 2, 1, 1), (2, 1)), 24


def model(seed=0, layers=2, of=HFModel): return of(tiny(8, layers, seed), check=False)

def chain(target, draft): return target, Chain(draft, 3), reject
def skipping():
    target = model(layers=3)
    return chain(target, SkippedModel(target, skip_mask(3, attention=(1,), mlp=(2,)), check=False))
def exiting():
    target = ExitTarget(tiny(8, 3), 1, check=False)
    return chain(target, ExitDraft(target))
def flying():
    line = Pipeline(tiny(8, 4), layer_stages(tiny(8, 4)), 2)
    return line.target, Chain(line.draft, 2), match
def state(name):
    net = recurrent.bare(name)
    with recurrent.in_double(): both = RecurrentModel(net), RecurrentModel(net, 1.3)   # one token a pass?
    for x in both: x.unchecked = []   # the check of a window empties the cache of one thread
    return chain(*both)
def of_source(kind):
    target = EncoderDecoderModel(enc_dec.network(kind), enc_dec.SOURCE, check=False)
    return target, StaticTree(target, (-1, 0, 0, 1)), reject

def selecting():
    target = sparse.toy()
    return chain(target, sparse.SparseModel(target, sparse.SnapKV(8, 2), 4, check=False))

KINDS = {
    "two models": lambda: chain(model(), model(1)),
    "the packed pass": lambda: chain(model(of=PackedLlama), model(1, of=PackedLlama)),
    "lookup": lambda: (model(), PromptLookup(8, 3), reject),
    "skipped blocks": skipping, "an early exit": exiting, "selected rows": selecting,
    "a pipeline": flying, "a state in the cache": lambda: state("Mamba2"),
    "a state in the modules": lambda: state("RecurrentGemma"),
    "an encoder with hooks": lambda: of_source("T5")}

@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_on_one_system(kind):
    "Each has the text and the work that it has alone"
    shared, alone = KINDS[kind](), [generate(*KINDS[kind](), ctx, N, Seeded(i)) for i, ctx in enumerate(CTXS)]
    both = at_once(*(lambda i=i, ctx=ctx: generate(*shared, ctx, N, Seeded(i)) for i, ctx in enumerate(CTXS)))
    assert both == alone and [x.ledger.models for x in both] == [x.ledger.models for x in alone]

def test_two_threads_on_one_engine():
    engine = Engine(tiny(8), tiny(8, seed=1), (-1, 0, 1))
    def texts(ctx): return lambda: engine.generate([ctx, ctx], N, seeds=[0, 1])
    assert at_once(*map(texts, CTXS)) == [texts(ctx)() for ctx in CTXS]

def test_two_threads_on_one_network_through_generate():
    net = tiny(8).eval()
    def text(ctx):
        how = dict(custom_generate=speculate, drafter=PromptLookup(8, 3), max_new_tokens=N, do_sample=False)
        return lambda: net.generate(torch.tensor([ctx]), **how).tolist()
    assert at_once(*map(text, CTXS)) == [text(ctx)() for ctx in CTXS]

def test_a_window_is_checked_before_any_thread_passes_it(monkeypatch):
    "A thread whose text is longer waits for the check that another has begun"
    target, begun, order = model(), threading.Event(), []
    target.windows = target.unchecked = [4]
    def check(n):
        begun.set()
        time.sleep(.05)
        order.append("checked")
    def second():
        begun.wait()
        target.check_windows(5)
        order.append("passed")
    monkeypatch.setattr(target, "check", check)
    at_once(lambda: target.check_windows(5), second)
    assert order == ["checked", "passed"]

@pytest.mark.parametrize("of", [HFModel, PackedLlama])
def test_copies_begin_without_a_cache(of):
    target = model(of=of)
    target(Tree(CTXS[0]))
    for other in copy(target), deepcopy(target), pickle.loads(pickle.dumps(target)):
        assert other.memory.n == 0 and target.memory.n == len(CTXS[0])
        assert (other.law(CTXS[0]) == target.law(CTXS[0])).all()
        assert target.memory is not other.memory

def test_each_thread_counts_its_own_work():
    work = Meter(calls=2)
    work.calls += 1
    with work.paused(): work.calls += 5
    assert work == Meter(3) == pickle.loads(pickle.dumps(work)) and run_in_thread(lambda: work.calls) == 2
