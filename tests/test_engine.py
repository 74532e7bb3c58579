"44_engine: a batch is a map of single rows, the draft lags by one at most, a round waits for no value"
import contextlib, copy
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np, pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from helpers import examples, g_test, laws, proves, shapes
from planted import instead, planted, without
from test_cache import doubled, fresh, llama
from test_transformer import REFUSED, SMALL
from specref import (Engine, generate, HFModel, iid, points, reject, StaticTree, Tape, warp,
                     without_replacement)
from specref.core.rng import numpy_generator
from specref.gpu import engine as module
from specref.gpu.engine import BatchRun, draw_children, uniforms, inverse_cdf, tape_of
from specref.gpu.verify import verify_trees
from specref.models.transformer import Unservable

CHAIN, TREE, MIXED, NONE = (-1, 0, 1, 2), (-1, 0, 0, 0, 1, 1, 2, 4), (-1, 0, 1, 1, 0, 2), (-1,)

def near(target, by):
    "A target, and a draft with slightly different weights"
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for w in draft.parameters(): w.add_(by * torch.randn_like(w))
    return [target, doubled(draft)]

@cache
def pair(): return near(llama(0), .03)

def tiny(V):
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return llama(3, vocab_size=V, **sizes)

def in_order(q): return points(np.argsort(-q, kind="stable"), len(q))

def alone(target, draft, shape, draw, temperature, ctx, n, seed, stop=()):
    "The text and ledger of one row by the loop for one text, on the same table of uniforms"
    warm = dict(temperature=temperature, check=False)
    drafter = StaticTree(HFModel(draft, **warm), shape, draw)
    if not temperature and draw is without_replacement:
        drafter = StaticTree(HFModel(draft, check=False), shape, in_order)
    tape = tape_of(uniforms(numpy_generator(seed), max(n, 1), len(shape)))
    return generate(HFModel(target, **warm), drafter, reject, ctx, n, tape, stop=stop)

def all_alone(pairs, shape, draw, ctxs, n, seeds, stop, temperature):
    rows = zip(temperature, ctxs, n, seeds, stop)
    return [alone(*pairs, shape, draw, *row) for row in rows]

def batch(seed, B, V=64, longest=20):
    "Prompts, n, seeds, stop tokens and temperatures of B texts; one prompt has one token, two texts 0 and 1"
    rng = np.random.default_rng(seed)
    ctxs = [tuple(rng.integers(V, size=k).tolist()) for k in rng.integers(1, 15, size=B)]
    n = rng.integers(2, longest, size=B).tolist()
    stop = [tuple(rng.integers(V, size=k).tolist()) for k in rng.integers(0, 6, size=B)]
    if B > 2: ctxs[0], n[1], n[2] = ctxs[0][:1], 0, 1
    return ctxs, n, rng.integers(10**6, size=B).tolist(), stop, [(1., .7, 0.)[b % 3] for b in range(B)]

def rounds(text): return [r[:4] for r in text.ledger.rounds]

def run_to_end(run):
    while max(run.wants): run.advance()
    return run.texts()

# ---- a batch is a map

PLANS = [(CHAIN, iid), (TREE, iid), (TREE, without_replacement), (MIXED, without_replacement), (NONE, iid)]

@proves("thm-engine-map")
@pytest.mark.parametrize("shape, draw", PLANS)
def test_a_batch_is_a_map(shape, draw):
    "Every text and every count of its ledger is that of the loop for one text on the same uniforms"
    ctxs, n, seeds, stop, temperature = batch(16, 12)
    texts = Engine(*pair(), shape, draw, temperature, every=3).generate(ctxs, n, seeds, stop)
    want = all_alone(pair(), shape, draw, ctxs, n, seeds, stop, temperature)
    assert texts == want and [*map(rounds, texts)] == [*map(rounds, want)]
    assert {len(x) == k for x, k in zip(texts, n)} == {True, False}   # some end by a stop token, some by n
    assert shape == NONE or {0, 1, 2} <= {accepted for t in texts for _, _, accepted, _ in rounds(t)}

@proves("thm-engine-map")
@pytest.mark.parametrize("cuts", [dict(top_k=[3, 0, 5, 0, 9, 2]), dict(top_p=.6), dict(min_p=[.3]*6, top_k=7),
                                  dict(top_k=(9, 5, 0)*2, top_p=(.9, .5, 1.)*2, min_p=(0., .1)*3)])
def test_cuts_are_the_warps_of_the_target(cuts):
    "Top-k, top-p and min-p, one for all or one for each; the texts without them are others"
    target, draft = map(single, pair())
    ctxs, n, seeds, stop, heat = batch(21, 6)
    texts = Engine(target, draft, TREE, temperature=heat, **cuts).generate(ctxs, n, seeds, stop)
    each = [{k: x[b] if np.ndim(x) else x for k, x in cuts.items()} for b in range(6)]
    want = [warped(target, draft, cut, *row) for cut, row in zip(each, zip(heat, ctxs, n, seeds, stop))]
    assert texts == want != Engine(target, draft, TREE, temperature=heat).generate(ctxs, n, seeds, stop)

def single(net):
    "A copy in single precision, with the norms of transformers"
    net = copy.deepcopy(net)
    for m in net.modules(): vars(m).pop("forward", None)
    return net.float()

def warped(target, draft, cut, heat, ctx, n, seed, stop):
    "The text of the loop, with transformers' warps around the target alone"
    if not heat: return alone(target, draft, TREE, without_replacement, 0., ctx, n, seed, stop)
    w = transformers.generation.logits_process
    warps = [w.TemperatureLogitsWarper(heat)] if heat != 1 else []
    if cut.get("top_k"): warps.append(w.TopKLogitsWarper(cut["top_k"]))
    if cut.get("top_p", 1.) < 1: warps.append(w.TopPLogitsWarper(cut["top_p"]))
    if cut.get("min_p"): warps.append(w.MinPLogitsWarper(cut["min_p"]))
    drafter = StaticTree(HFModel(draft, temperature=heat, check=False), TREE, without_replacement)
    tape = tape_of(uniforms(numpy_generator(seed), max(n, 1), len(TREE)))
    return generate(HFModel(target, processors=warps, check=False), drafter, reject, ctx, n, tape, stop=stop)

@proves("thm-engine-map")
@examples(10, st.integers(0, 10**6), shapes(6), st.sampled_from([iid, without_replacement]),
          st.integers(1, 4))
def test_any_shape_in_any_batch(seed, shape, draw, every):
    "The same for random shapes in any numbering, however often the host reads the results"
    ctxs, n, seeds, stop, heat = batch(seed, 6, longest=8)
    texts = Engine(*pair(), shape, draw, heat, every=every).generate(ctxs, n, seeds, stop)
    assert texts == all_alone(pair(), shape, draw, ctxs, n, seeds, stop, heat)

@given(laws(5), st.integers(0, 2**12 - 1))
def test_a_pick_is_the_pick_of_chapter_one(law, k):
    "On distributions and uniforms that floats represent exactly, integer sums give the same token"
    law = np.array([int(64 * x) for x in law], dtype=float)
    law[0] += 2**9 - law.sum()
    law, u = law / 2**9, k / 2**12
    token = inverse_cdf(torch.tensor(law)[None], torch.tensor([u], dtype=torch.float64)).item()
    assert token == Tape({("pick", 0): u}).pick(law, at=0)

def children(z, u, temperature, exclusive):  # (B, m, V), (B, m, K) -> (B, m, K)
    heat, u = torch.tensor(temperature, dtype=torch.float64), torch.as_tensor(u, dtype=torch.float64)
    return draw_children(z, u, heat, exclusive).view(u.shape)

@proves("prop-cold")
@examples(25, st.permutations([-3., -1., 0., 1.5, 2., 4.]), st.integers(1, 6), st.integers(0, 10**6))
def test_cold_draws(z, K, seed):
    "The tokens in order of their logits get a probability that tends to one, and T = 0 draws them"
    order = np.argsort(-np.array(z))
    for T in (.2, .05, .01):
        draw = without_replacement(warp(z, T))
        prob = np.prod([draw(tuple(order[:j]))[order[j]] for j in range(K)])
        assert prob >= 1 - K * len(z) * np.exp(-.5 / T) - 1e-12
    u, rows = np.random.default_rng(seed).random((2, 1, K)), torch.tensor([[z], [z]])
    assert children(rows, u, [0., .01], True)[0, 0].tolist() == order[:K].tolist()
    assert set(children(rows, u, [0., .01], False)[0, 0].tolist()) == {order[0]}

@pytest.mark.parametrize("temperature, u, want", [
    (1., [.3, .1, .99], [0, 1, 3]), (1., [.3, .5, .1], [0, 2, 1]), (0., [.3, .1, .99], [0, 1, 3])])
def test_no_residual_mass(temperature, u, want):
    "One token in the support: the next siblings are uniform over the others (Sequoia); in order at T = 0"
    z = torch.tensor([[[0., -1e5, -2e5, -1.5e5]]])
    assert children(z, np.array([[u]]), [temperature], True).flatten().tolist() == want

# ---- the distribution

@proves("cor-engine-law")
def test_texts_are_independent(monkeypatch):
    "The first tokens of neighbours, in 1,000 pairs, have the product distribution; with shared uniforms not"
    monkeypatch.setattr("specref.gpu.verify.reading_is_free", lambda mask: False)   # all rows at once
    target, draft = near(tiny(4), .15)
    law = fresh(target, (2,))[1].softmax(0).tolist()
    both = {(x, y): law[x] * law[y] for x, y in product(range(4), repeat=2)}
    def test(seeds):
        texts = [*map(tuple, Engine(target, draft, CHAIN[:3], iid).generate([(2,)]*len(seeds), 1, seeds))]
        return g_test(Counter(a + b for a, b in zip(texts[::2], texts[1::2])), both)
    assert test(range(2000)).fits and not test([s // 2 for s in range(2000)]).fits

# ---- the caches, the lag, the room

def far(net, rows, text, n):
    return (rows[:, :, :, :n] - fresh(net, text[:n])[0]).abs().max().item() if n else 0.

@proves("thm-engine-map", "lem-lag")
@pytest.mark.parametrize("shape", [CHAIN, MIXED])
def test_the_caches_after_every_round(shape):
    "Both caches hold the right rows; the draft lags by one just after a node of the last level was accepted"
    (target, draft), (ctxs, n, seeds, _, heat) = pair(), batch(5, 4)
    e = Engine(target, draft, shape, temperature=heat, every=1)
    run, seen = BatchRun(e, e.requests(ctxs, [k + 12 for k in n], seeds)), set()
    run.rows.check = run.drafts.check = True
    while max(run.wants):
        for b in (b for b in range(4) if run.wants[b]):
            text, length = ctxs[b] + tuple(run.out[b]), run.rows.lengths[b].item()
            lag = length - run.drafts.lengths[b].item()
            accepted = run.ledgers[b].rounds[-1].accepted if run.out[b] else -1
            assert length == len(text) - 1 and run.root[b] == text[-1] and lag == (accepted == run.height)
            assert far(target, run.rows.rows[:, :, b], text, length) < 1e-10
            assert far(draft, run.drafts.rows[:, :, b], text, length - lag) < 1e-10
            seen.add((accepted, lag))
        run.advance()
    assert {lag for _, lag in seen} == {0, 1} and {d for d, _ in seen} == {-1, *range(run.height + 1)}

def refusing(batch, *rest, **kw):
    "A verifier without draft tokens"
    return verify_trees(replace(batch, child=torch.full_like(batch.child, -1)), *rest, **kw)

@proves("prop-room")
@pytest.mark.parametrize("n", [0, 1, 5])
def test_room(n, monkeypatch):
    "Every slot is written where every draft is rejected, none beyond; with one slot less a run raises"
    e = Engine(*pair(), TREE, verify=refusing, every=1)
    run = BatchRun(e, e.requests([(1, 2, 3), (4,)], (n, 3), (0, 1)))
    assert run.size == max(3 + max(n, 1), 4) - 2 + 8
    for _ in range(7):
        run.wants[0] = max(run.wants[0], 1)
        run.advance()
    assert run.rows.rows[:, :, 0 if n else 1].abs().sum((0, 1, 2, 4)).gt(0).all() or n < 2
    if n < 5: return
    monkeypatch.setattr(Engine, "slots", lambda self, a: len(a.ctx) + max(a.n, 1) - 3 + len(self.plan))
    with pytest.raises((RuntimeError, IndexError)): e.generate([(1, 2, 3), (4,)], (n, 3), (0, 1))

def test_finished_rows_do_not_change():
    "Ten rounds after the end, lengths, roots and the slots before them are unchanged, in both caches"
    e = Engine(*pair(), TREE, every=5)
    run = BatchRun(e, e.requests([(1, 2, 3), (4,), (5, 6)], (9, 3, 0), (0, 1, 2), [(), range(64), ()]))
    assert [*map(len, run_to_end(run))] == [9, 1, 0]
    def state():
        rows = [c.rows[:, :, b, :, :k].clone() for c in (run.rows, run.drafts)
                for b, k in enumerate(run.rows.lengths.tolist())]
        return [run.root.clone(), run.rows.lengths.clone(), *rows]
    def five_rounds():
        run.noise.copy_(torch.rand_like(run.noise))
        run.turn.zero_()
        for _ in range(5): run.round()
    five_rounds()
    was = state()
    for _ in range(2): five_rounds()
    assert all(torch.allclose(a.double(), b.double(), rtol=0, atol=1e-12) for a, b in zip(was, state()))
    assert not run.results[:, :, 0].any()

# ---- ends

def test_no_token_is_requested():
    "n = 0 for the only text: no round, no token, an empty ledger"
    text, = Engine(*pair(), TREE).generate([(3,)], 0, [0])
    assert not text and not text.ledger.rounds and text.ledger.num_drafts == 0

def test_a_stop_token_inside_an_accepted_run():
    "A text ends with the first occurrence of its stop token; stop tokens in the prompt have no effect"
    e, ctx = Engine(*pair(), CHAIN), (1, 2, 3)
    whole, = e.generate([ctx], 20, [0])
    assert any(r.accepted >= 2 for r in whole.ledger.rounds) and not {*ctx} & {*whole}
    stops = sorted({*whole, *ctx})
    texts = e.generate([ctx]*len(stops), 20, [0]*len(stops), [{s} for s in stops])
    assert texts == [whole[:whole.index(s) + 1] if s in whole else whole for s in stops]

def test_to_the_last_position():
    "A text may fill the model's positions except those of the tree (one more token is refused)"
    target, draft = near(llama(0, max_position_embeddings=40), .08)
    e, n = Engine(target, draft, TREE), 40 + 2 - 8 - 4
    want = alone(target, draft, TREE, without_replacement, 1., (1, 2, 3, 4), n, 0)
    assert e.generate([(1, 2, 3, 4), (5,)], (n, 3), (0, 1))[0] == want
    assert len(e.generate([(1,)*33], 1, [0])[0]) == 1

def test_a_tree_as_large_as_the_model():
    "Eight positions hold a tree of eight nodes and one new token after a prompt of one"
    target, draft = near(llama(0, max_position_embeddings=8), .08)
    want = alone(target, draft, TREE, without_replacement, 1., (5,), 1, 0)
    assert Engine(target, draft, TREE).generate([(5,)], 1, [0])[0] == want

def test_unservable_models_are_named_by_their_argument():
    "A target or a draft that one masked pass cannot serve: `Unservable`, with the argument's name"
    good = pair()[0]
    sick = copy.deepcopy(good)
    with torch.no_grad(): next(sick.parameters()).fill_(float("nan"))
    for bad in sick, REFUSED["no head"][0]():
        with pytest.raises(Unservable, match="^target: got "): Engine(bad, good, TREE)
        with pytest.raises(Unservable, match="^draft: got "): Engine(good, bad, TREE)

@pytest.mark.parametrize("who", [0, 1])
def test_a_row_of_its_own_pass_is_compared(who, monkeypatch):
    "A release whose forward pass returns the new row in every place of the static cache"
    def newest(cache, keys, values, *args, **kw):
        return (x.expand(-1, -1, cache.size, -1) for x in (keys, values))
    own, model = module.TreePass.__call__, pair()[who]
    def changed(read, cache, *args):
        if read.model is model: monkeypatch.setattr(module.StaticRows, "update", newest)
        return own(read, cache, *args)
    monkeypatch.setattr(module.TreePass, "__call__", changed)
    words = f"^{('target', 'draft')[who]}: .*static cache is .* off.*{transformers.__version__}"
    with pytest.raises(Unservable, match=words): Engine(*pair(), CHAIN)

def test_stop_tokens_in_any_collection():
    "A set, a list, an array, an iterator that can be read once, for all or for each: the same texts"
    e, ctxs, every5 = Engine(*pair(), CHAIN), [(1, 2, 3), (4,), (5, 6)], range(0, 64, 5)
    want = e.generate(ctxs, 9, range(3), every5)
    assert min(map(len, want)) < 9
    for stop in ({*every5}, [*every5], np.arange(0, 64, 5), iter(every5), [every5]*3,
                 (iter(every5) for _ in ctxs)):
        assert e.generate(ctxs, 9, range(3), stop) == want

def test_extreme_temperatures():
    "Nearly uniform distributions, and near point masses: still the text of each row alone"
    (ctxs, n, seeds, stop, _), heat = batch(6, 8), (1e300, 1e9, 1e-3, 1e-12)*2
    want = all_alone(pair(), TREE, without_replacement, ctxs, n, seeds, stop, heat)
    assert Engine(*pair(), TREE, temperature=heat).generate(ctxs, n, seeds, stop) == want

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_models(dtype):
    "Neither model in double precision, or one alone: texts of the requested lengths in the vocabulary"
    config = transformers.LlamaConfig(**SMALL)
    def net(): return transformers.AutoModelForCausalLM.from_config(config).eval()
    for p, q in (net().to(dtype), net().to(dtype)), (net().to(dtype), net().double()):
        e = Engine(p, q, TREE, temperature=(1., 0., .7))
        texts = e.generate([(1, 2), (3,), (4, 5, 6)], 9, range(3))
        assert [*map(len, texts)] == [9]*3 and {x for t in texts for x in t} <= {*range(64)}

def test_llamas_are_read_by_the_pass_of_07a(monkeypatch):
    """Single precision, ragged texts, heads in groups: the rows of transformers' module at every node, and of
    the last node alone; nothing waits; positions behind those that were turned before"""
    config = transformers.LlamaConfig(**dict(SMALL, num_attention_heads=4, num_key_value_heads=2))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    e = Engine(model, model, TREE, temperature=1.)
    def rows(able):
        monkeypatch.setattr(module, "has_fast_pass", lambda model: able)
        run = BatchRun(e, e.requests([(1, 2, 3)*20, (3,), (4, 5, 6)], 9, range(3)))
        base, token = run.rows.lengths.clone(), torch.arange(24).view(3, 8)
        with torch.inference_mode(), Asynchronous():
            found = run.target_rows(base, run.mask(), token)
            at, mask = base[:, None] + run.two, run.mask()[:, :, :2]
            last = run.target(run.rows, token[:, :2], at, mask, 1)
        return torch.cat([found, last], 1)
    theirs, ours = rows(False), rows(True)
    assert ours.shape == (3, 9, 64) and not torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

# ---- known bugs

@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_text_with_nan_ends_alone(who, shape):
    "A token in one prompt has an embedding of NaN: that text ends with a warning, the others are as ever"
    models = [copy.deepcopy(m) for m in pair()]
    ctxs, n, seeds, engine = [(1, 2), (3, 62, 4), (5,)], 8, [1, 2, 3], Engine(*models, shape)
    whole = engine.generate(ctxs, n, seeds)
    assert 62 not in {*whole[0], *whole[2]}
    table = models[who == "draft"].get_input_embeddings().weight
    with torch.no_grad(): table[62] = torch.nan
    with pytest.warns(RuntimeWarning, match="text 1 ends after 0 tokens: a row that was read"):
        texts = engine.generate(ctxs, n, seeds)
    assert texts[::2] == whole[::2] and len(whole[1]) == n and not texts[1]

def eight_requests():
    "Some end by n, some by a stop token"
    ctxs, n, seeds, stop, heat = batch(3, 8)
    return ctxs, [k + 12 for k in n], seeds, [*stop[:4], *[range(0, 64, 4)]*4], heat

EIGHT = eight_requests()
ROOM_LEFT, KIDS, DRAFTS = "torch.where(_, length, 0)", "u[:, level.kids]", "self.drafts.commit(_1, _2, _)"
WRONG = [
    *(("commit", instead(ROOM_LEFT, n)) for n in (
        "torch.where(_, length - 1, 0)", "torch.where(_, length + 1, 0)", "length",
        "torch.where(_, length.min(), 0)")),
    ("commit", instead(DRAFTS, "self.drafts.lengths.add_(_)")), ("commit", without(DRAFTS)),
    ("commit", instead("count.clamp_max(self.height)", "count")),
    ("commit", without("self.drafts.lengths.copy_(base)")),
    ("commit", instead("tokens[:, max(self.height - 1, 0)]", "self.root")),
    ("commit", instead("self.rows.commit(_, _1, count)", "self.rows.lengths.add_(count)")),
    ("commit", instead("torch.where((new == until) | _1, 0, _)", "_")),
    ("emitted", instead("place + 1", "place + 2")),
    *(("catch_up", instead("z.gather(1, _)", place)) for place in ("z[:, :1]", "z[:, 1:]")),
    ("catch_up", instead("base - self.drafts.lengths", "0 * base")),
    ("draft", without("self.drafts.lengths.copy_(base + level.start)")),
    ("draft", instead("batch_positions(_, _1)", "base[:, None] + torch.arange(level.start, level.end)")),
    ("draft", instead(KIDS, "u[:1, level.kids].expand(len(base), -1, -1)")),
    ("draft", instead(KIDS, f"{KIDS} * .5")), ("draft", instead(KIDS, f"{KIDS}.roll(1, 2)")),
    ("children", instead("self.engine.without_replacement", "False")),
    ("children", instead("self.temperature", "self.temperature*0 + 1")),
    ("target_rows", instead("batch_positions(_, _1)", "base[:, None] + torch.arange(self.N)")),
    ("verdict", instead("coins", "coins[:1].expand_as(coins)")), ("verdict", instead("coins", "picks")),
    ("verdict", instead("picks[:, 0]", "picks[:, 1]")),
    ("verdict", instead("self.temperature", "self.temperature.mean()")),
    ("prefill", instead("len(r.ctx) - 1", "max(len(r.ctx) for r in self.requests) - 1")),
]

@cache
def eight_alone(shape): return all_alone(pair(), shape, without_replacement, *EIGHT)

def eight_texts(shape):
    "The texts of the engine for eight requests, and those of each request alone"
    *asked, heat = EIGHT
    return Engine(*pair(), shape, without_replacement, heat).generate(*asked), eight_alone(shape)

def limited(advance, calls=12):
    "An `advance` that raises after `calls` calls, where a run would never end"
    left = iter(range(calls))
    def wrapped(run):
        if next(left, None) is None: raise RuntimeError("no end")
        advance(run)
    return wrapped

def is_detected():
    "Whether some text of a chain or a tree differs, or the run raises"
    try: return any(texts != want for texts, want in map(eight_texts, (CHAIN, TREE)))
    except (RuntimeError, IndexError, ValueError): return True

def test_the_correct_round_passes(monkeypatch):
    "Without a bug the texts are those of each row alone, within the calls that a run may take"
    monkeypatch.setattr(BatchRun, "advance", limited(BatchRun.advance))
    assert not is_detected()

@pytest.mark.parametrize("method, change", WRONG, ids=range(len(WRONG)))
def test_wrong_variants_are_detected(method, change, monkeypatch):
    "Each known bug, written into the round, changes a text, raises, or never ends"
    monkeypatch.setattr(BatchRun, method, planted(getattr(BatchRun, method), change))
    monkeypatch.setattr(BatchRun, "advance", limited(BatchRun.advance))
    assert is_detected()

# ---- on the device

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "unique", "equal",
             "allclose", "bincount")

def boolean(x): return torch.is_tensor(x) and x.dtype in (torch.bool, torch.uint8)

class Asynchronous(TorchDispatchMode):
    "Raises where a GPU would wait: a value read back, a shape that depends on values, values of the host"
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name, kwargs = f.overloadpacket.__name__, kwargs or {}
        waits = name.startswith(FORBIDDEN)
        indices = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        waits |= any(map(boolean, indices))
        if name == "repeat_interleave" and torch.is_tensor(args[0]):
            waits |= kwargs.get("output_size") is None
        if waits: raise AssertionError(f"{name} waits for the device")
        return f(*args, **kwargs)

@pytest.mark.parametrize("shape, draw", [(CHAIN, iid), (TREE, without_replacement)])
def test_a_round_waits_for_no_value(shape, draw, monkeypatch):
    "With verification as on a GPU: nothing in a round waits, no tensor is reallocated, same texts"
    ctxs, n, seeds, stop, temperature = batch(3, 6)
    e = Engine(*pair(), shape, draw, temperature)
    want, run = e.generate(ctxs, n, seeds, stop), BatchRun(e, e.requests(ctxs, n, seeds, stop))
    def places():
        tensors = vars(run) | dict(rows=run.rows.rows, drafts=run.drafts.rows)
        return {k: x.data_ptr() for k, x in tensors.items() if torch.is_tensor(x)}
    was, step = places(), run.step
    def watched():
        with monkeypatch.context() as m, Asynchronous():
            m.setattr(torch.compiler, "is_compiling", lambda: True)
            step()
    run.step = watched
    assert run_to_end(run) == want and places() == was

@pytest.mark.parametrize("waits", [lambda x: x.max().item(), lambda x: x[x > 1], lambda x: int(x[0]),
    lambda x: x.nonzero(), lambda x: bool((x > 0).all()), lambda x: x.new_tensor([1, 2]),
    lambda x: x.repeat_interleave(x)])
def test_every_kind_of_wait_is_detected(waits):
    "Each operation that would wait raises"
    x = torch.arange(3)
    with pytest.raises(AssertionError), Asynchronous(): waits(x)

class Graph:
    "What a CUDA graph does, without one: recording runs nothing, replaying runs what was recorded"
    def __init__(self): self.recorded = None
    def replay(self): self.recorded()

def test_warm_up_changes_nothing(monkeypatch):
    "The calls for a CUDA graph in order, with fakes: three rounds of warm-up change neither state nor texts"
    ctxs, n, seeds, stop, temperature = batch(4, 5)
    e, warm = Engine(*pair(), TREE, temperature=temperature), []
    want, run = e.generate(ctxs, n, seeds, stop), BatchRun(e, e.requests(ctxs, n, seeds, stop))
    def state(): return [x.clone() for x in (run.room, run.root, run.rows.lengths, run.drafts.lengths)]
    was, stream = state(), SimpleNamespace(wait_stream=lambda other: warm.append("wait"))
    shown = SimpleNamespace(root=SimpleNamespace(device=torch.device("cuda")), room=run.room, turn=run.turn,
                            round=lambda: (warm.append("round"), run.round()))
    @contextlib.contextmanager
    def recording(graph):
        shown.round, graph.recorded = (lambda: warm.append("recorded")), run.round
        yield
    fakes = dict(Stream=lambda: stream, CUDAGraph=Graph, current_stream=lambda: stream,
                 stream=lambda s: contextlib.nullcontext(), graph=recording)
    for name, fake in fakes.items(): monkeypatch.setattr(torch.cuda, name, fake)
    run.step = module.cuda_graph(shown)
    assert warm == ["wait", *["round"]*3, "wait", "recorded"]
    assert all(map(torch.equal, was, state())) and run_to_end(run) == want

@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_round_on_cuda():
    "Rounds replayed from a graph, with an error at any synchronisation, give the texts of the CPU"
    ctxs, n, seeds, stop, temperature = batch(3, 6)
    e = Engine(*(copy.deepcopy(m).cuda() for m in near(llama(0), .03)), TREE, temperature=temperature)
    run = BatchRun(e, e.requests(ctxs, n, seeds, stop))
    step = run.step
    def watched():
        torch.cuda.set_sync_debug_mode("error")
        try: step()
        finally: torch.cuda.set_sync_debug_mode("default")
    run.step = watched
    want = Engine(*pair(), TREE, temperature=temperature).generate(ctxs, n, seeds, stop)
    assert run_to_end(run) == want

@proves("prop-waiting")
def test_the_batch_waits_for_its_slowest_text():
    "A batch takes as many rounds as its slowest text alone, and each text has as many in its ledger as alone"
    e, (ctxs, n, seeds, _, _) = Engine(*pair(), TREE, every=1), batch(2, 5)
    run, steps = BatchRun(e, e.requests(ctxs, n, seeds)), []
    step = run.step
    run.step = lambda: (steps.append(1), step())
    run_to_end(run)
    texts = all_alone(pair(), TREE, without_replacement, ctxs, n, seeds, [()]*5, [1.]*5)
    R = [len(text.ledger.rounds) for text in texts]
    assert len(steps) == max(R) and [len(l.rounds) for l in run.ledgers] == R and len(set(R)) > 2
