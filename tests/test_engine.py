"44_engine: a batch is a map of single rows, the draft lags by one at most, a round asks the host nothing"
import contextlib
import copy
import inspect
import textwrap
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from helpers import g_test, laws, proves, refuses, shapes
from test_cache import doubled, fresh, llama
from test_transformer import REFUSED, SMALL
from specref.models.embedded import prompts, raw_model
from specref.core.rng import Rng, Streams, Tape, tv_outcomes, numpy_generator
from specref.gpu import engine as module
from specref.gpu.engine import Engine, BatchRun, sort_by_level, tree_levels, uniforms, inverse_cdf, tape_of
from specref.gpu.verify import decision_cells, verify_trees
from specref.core.law import warp
from specref.core.loop import generate
from specref.verify.reject import reject
from specref.draft.shapes import StaticTree
from specref.core.target import TableModel, target_law as law_of_target
from specref.models.transformer import HFModel, Unservable
from specref.core.tree import iid, points, without_replacement

torch.set_num_threads(1)
CHAIN, TREE, MIXED, NONE = (-1, 0, 1, 2), (-1, 0, 0, 0, 1, 1, 2, 4), (-1, 0, 1, 1, 0, 2), (-1,)
made = {}


def pair(name="llama"):
    "A target, and a draft that is like it but not equal"
    if name in made: return made[name]
    if name == "embedded":
        made[name] = [doubled(copy.deepcopy(raw_model(x, torch.float64))) for x in ("target", "small")]
    elif name == "tiny": made[name] = near(tiny(4), .15)
    else: made[name] = near(llama(0), .03)
    return made[name]

def tiny(V):
    return llama(3, vocab_size=V, hidden_size=8, intermediate_size=8,
                 num_hidden_layers=1, num_attention_heads=2)

def near(target, by):
    draft = copy.deepcopy(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for w in draft.parameters(): w.add_(by * torch.randn_like(w))
    return [target, doubled(draft)]


def in_order(q): return points(np.argsort(-q, kind="stable"), len(q))

def alone(target, draft, shape, draw, temperature, ctx, n, seed, stop=()):
    "The text and ledger of one row by the loop for one text, on the same table of numbers"
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


def altered(owner, method, old, new):
    "A method or function whose source says `new` in the one place where it said `old`"
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert source.count(old) == 1
    scope = {}
    exec(source.replace(old, new), vars(inspect.getmodule(owner) or owner) | {"__name__": "wrong"}, scope)
    return scope[method]


# ---- a batch is a map

PLANS = [(CHAIN, iid), (TREE, iid), (TREE, without_replacement), (MIXED, without_replacement), (NONE, iid)]

@proves("thm-engine-map")
@pytest.mark.parametrize("shape, draw", PLANS)
def test_a_batch_is_a_map(shape, draw):
    "Every text and every count of its ledger is that of the loop for one text on the same numbers"
    ctxs, n, seeds, stop, temperature = batch(16, 16)
    texts = Engine(*pair(), shape, draw, temperature, every=3).generate(ctxs, n, seeds, stop)
    want = all_alone(pair(), shape, draw, ctxs, n, seeds, stop, temperature)
    assert texts == want and [*map(rounds, texts)] == [*map(rounds, want)]
    assert {len(x) == k for x, k in zip(texts, n)} == {True, False}   # some end by a stop token, some by n
    assert shape == NONE or {0, 1, 2} <= {accepted for t in texts for _, _, accepted, _ in rounds(t)}


@proves("thm-engine-map")
def test_the_embedded_models():
    "The same on the shipped models and real prompts"
    pairs, ctxs = pair("embedded"), [prompts("code", 1, length=k, seed=k)[0] for k in (5, 17, 1)]
    n, seeds, heat = (12, 20, 9), (1, 2, 3), (1., .7, 0.)
    texts = Engine(*pairs, TREE, without_replacement, heat).generate(ctxs, n, seeds, (10,))
    assert texts == all_alone(pairs, TREE, without_replacement, ctxs, n, seeds, [(10,)]*3, heat)
    assert max(t.ledger.mean_acceptance_length for t in texts) > 2


@proves("thm-engine-map")
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), shapes(6), st.sampled_from([iid, without_replacement]), st.integers(1, 4),
       st.randoms(use_true_random=False))
def test_neighbours_and_their_order_do_not_matter(seed, shape, draw, every, random):
    "Any shape, any order, any subset, however often the host looks: each row's text is the same"
    rows = [*zip(*batch(seed, 4, longest=8))]
    chosen = random.sample(rows, random.randint(1, 4))
    def texts(rows, every):
        ctxs, n, seeds, stop, temperature = zip(*rows)
        engine = Engine(*pair(), shape, draw, temperature, every=every)
        return dict(zip(seeds, engine.generate(ctxs, n, seeds, stop)))
    whole, part = texts(rows, 1), texts(chosen, every)
    assert all(part[s] == whole[s] for s in part)


@proves("thm-engine-map")
@pytest.mark.parametrize("draw", [iid, without_replacement])
def test_the_law_of_a_plan_reaches_the_verifier(draw):
    "At temperature 0 every child is a point; else it has its parent's row, and is exclusive if drawn so"
    e = Engine(*pair(), TREE, draw, (0., 1.))
    b = BatchRun(e, e.requests([(1,), (2,)], 5, (0, 1))).batch
    assert b.q_row.tolist() == [-1]*8 + [-1, *(7 + u for u in TREE[1:])]
    assert b.without_replacement.tolist() == [False]*9 + [draw is without_replacement]*7


@given(shapes(9))
def test_levels_are_those_of_a_static_tree(parent):
    "The numbering is that of `StaticTree`; each level names its parents and their children in order"
    plan = sort_by_level(parent)
    flat = TableModel(2, lambda text: np.ones(2) / 2)
    grown = StaticTree(flat, tuple(parent), iid)((0,), Tape({("pick", c): .5 for c in range(20)}))
    assert list(plan) == grown.parent
    seen = [0]
    for start, end, inner, kids, there in tree_levels(grown):
        assert {grown.depth[i] for i in range(start, end)} == {grown.depth[start]} and len(inner) == len(kids)
        edges = [(start + inner[i // len(kids[0])], sum(kids, [])[i]) for i in there]
        assert edges == [(grown.parent[c], c) for u in range(start, end) for c in grown.children(u)]
        seen += [c for _, c in edges]
    assert seen == [*range(len(parent))]


@given(laws(5), st.integers(0, 2**12 - 1))
def test_a_pick_is_the_pick_of_chapter_one(law, k):
    "On laws and numbers that floats hold exactly, the sums in whole numbers give the same token"
    law = np.array([int(64 * x) for x in law], dtype=float)
    law[0] += 2**9 - law.sum()
    law, u = law / 2**9, k / 2**12
    token = inverse_cdf(torch.tensor(law)[None], torch.tensor([u], dtype=torch.float64)).item()
    assert token == Tape({("pick", 0): u}).pick(law, at=0)


def children(z, u, temperature, exclusive):  # (B, m, V), (B, m, K) -> (B, m, K)
    run = SimpleNamespace(b=torch.arange(len(z)), temperature=torch.tensor(temperature, dtype=torch.float64),
                          engine=SimpleNamespace(without_replacement=exclusive))
    return BatchRun.children(run, z, torch.as_tensor(u, dtype=torch.float64)).view(u.shape)


@proves("prop-cold")
@settings(max_examples=25, deadline=None)
@given(st.permutations([-3., -1., 0., 1.5, 2., 4.]), st.integers(1, 6), st.integers(0, 10**6))
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
def test_when_nothing_is_left(temperature, u, want):
    "One token in the support: the next siblings are uniform over the others (Sequoia); in order at T = 0"
    z = torch.tensor([[[0., -1e5, -2e5, -1.5e5]]])
    assert children(z, np.array([[u]]), [temperature], True).flatten().tolist() == want


# ---- the law

def target_law(target, ctx, n, temperature):
    "The law of n tokens, by passes that have no past"
    law = {(): 1.}
    for _ in range(n):
        rows = {t: warp(fresh(target, ctx + t)[1].numpy(), temperature) for t in law}
        law = {(*t, x): w * v for t, w in law.items() for x, v in enumerate(rows[t])}
    return law


class Addressed(Rng):
    "The questions of one round and one side, put to an enumerating rng under addresses of their own"
    def __init__(self, rng, *address): self.rng, self.address = rng, address
    def at(self, i): return Streams(Addressed(self.rng, i, "draft"), Addressed(self.rng, i, "verify"))
    def pick(self, law, at=None, key=None): return self.rng.pick(law, at=(*self.address, at))
    def coin(self, a, of=1, at=None): return self.rng.coin(a, of, at=(*self.address, at))


def table_of(net, temperature):
    "The laws of a network as fractions: every float is one, and they are scaled to sum to one"
    def f(text):
        w = np.array([Fraction(x) for x in warp(fresh(net, text)[1].numpy(), temperature)])
        return w / w.sum()
    return TableModel(net.config.vocab_size, f)


class Middles:
    "In the place of a text's generator: the middle of one cell, and .5 for what the cell does not ask"
    def __init__(self, cell, rounds, N):
        self.table, self.done = np.full((rounds, 2, N), .5), 0
        for (i, side, c), u in cell.coins.items(): self.table[i, 1, c] = u
        for (i, side, c), u in cell.picks.items(): self.table[i, 0, c if side == "draft" else 0] = u
    def random(self, shape):
        part = self.table[self.done:self.done + shape[0]]
        self.done += len(part)
        return np.concatenate([part, np.full((shape[0] - len(part), *shape[1:]), .5)])


ROUNDS = [
    (3, (-1, 0, 0), without_replacement, 2., 2), (3, CHAIN[:3], iid, 1., 2),
    (3, (-1, 0, 0, 0), without_replacement, 1., 2), (2, (-1, 0, 0, 1, 1, 2), without_replacement, 1., 2),
    (2, CHAIN, iid, 2., 2), (3, NONE, iid, 1., 2)]

def through_the_engine(monkeypatch, V, shape, draw, temperature, n, ctx=(0, 1)):
    "Every cell of the numbers that n tokens ask for, as one batch: cells, texts, the target's law"
    nets = near(tiny(V), .3)
    p, q = (table_of(net, temperature) for net in nets)
    def program(rng): return generate(p, StaticTree(q, shape, draw), reject, ctx, n, Addressed(rng))
    case = V, shape, draw, temperature, n
    if case not in made: made[case] = [*decision_cells(program)]
    boxes = made[case]
    with monkeypatch.context() as m:
        m.setattr(module, "numpy_generator", lambda seed: Middles(boxes[seed], n, len(shape)))
        engine = Engine(*nets, shape, draw, temperature, every=2)
        texts = engine.generate([ctx]*len(boxes), n, range(len(boxes)))
    return boxes, texts, law_of_target(p, ctx, n)

def law_in(boxes, texts):
    law = Counter()
    for box, text in zip(boxes, texts): law[tuple(text)] += box.volume
    return law


@proves("cor-engine-law", "thm-engine-map")
def test_the_law_exactly(monkeypatch):
    "In the middle of every cell the engine gives the reference's text; the volumes sum to the target's law"
    depths, accepted = set(), set()
    for V, shape, draw, temperature, n in ROUNDS:
        boxes, texts, want = through_the_engine(monkeypatch, V, shape, draw, temperature, n)
        assert sum(box.volume for box in boxes) == 1 and min(box.volume for box in boxes) > 1e-12
        assert texts == [box.outcome for box in boxes]
        assert [*map(rounds, texts)] == [rounds(box.outcome) for box in boxes]
        assert law_in(boxes, texts) == want and len(want) == V**n
        depths |= {len(text.ledger.rounds) for text in texts}
        accepted |= {r[2] for text in texts for r in text.ledger.rounds}
    assert depths == {1, 2} and {0, 1, 2} <= accepted


@pytest.mark.parametrize("method, old, new", [
    ("round", "coins.flatten()", "picks.flatten()"),
    ("round", "picks[:, 0].clone()", "picks[:, 1].clone()"),
    ("children", "w, z = remove_token(w, z, tokens[-1], cold)", "pass"),
    ("draft", "u[:, level.kids]", "u[:, level.kids] * .5"),
    ("draft", "u[:, level.kids]", "u[:, level.kids].roll(1, 2)")])
def test_the_exact_law_sees_wrong_numbers(method, old, new, monkeypatch):
    "A number read twice, halved or by another node, or a repeated sibling: the law is another one"
    monkeypatch.setattr(BatchRun, method, altered(BatchRun, method, old, new))
    boxes, texts, want = through_the_engine(monkeypatch, *ROUNDS[0])
    assert tv_outcomes(law_in(boxes, texts), want) > 1e-4


@proves("cor-engine-law")
def test_the_law():
    "Joint law of the first tokens of 2,000 texts: false alarm 1e-9, and what distance is seen"
    target, draft = pair("tiny")
    texts = Engine(target, draft, TREE, without_replacement).generate([(0, 3, 1)]*2000, 2, range(2000))
    test = g_test(Counter(map(tuple, texts)), target_law(target, (0, 3, 1), 2, 1.))
    assert test.fits and test.tv < .25, test


@proves("cor-engine-law")
def test_texts_are_independent():
    "The first tokens of neighbours, in 1,000 pairs, have the product law; with shared numbers they do not"
    target, draft = pair("tiny")
    law = target_law(target, (2,), 1, 1.)
    both = {(*a, *b): v * w for (a, v), (b, w) in product(law.items(), law.items())}
    def test(seeds):
        texts = [*map(tuple, Engine(target, draft, CHAIN[:3], iid).generate([(2,)]*len(seeds), 1, seeds))]
        return g_test(Counter(a + b for a, b in zip(texts[::2], texts[1::2])), both)
    assert test(range(2000)).fits and not test([s // 2 for s in range(2000)]).fits


# ---- the caches, the lag, the room

def far(net, rows, text, n):
    return (rows[:, :, :, :n] - fresh(net, text[:n])[0]).abs().max().item() if n else 0.


def checked_run(e, *asked):
    run = BatchRun(e, e.requests(*asked))
    run.rows.check = run.drafts.check = True
    return run


@proves("thm-engine-map", "lem-lag")
@pytest.mark.parametrize("name, shape", [("llama", CHAIN), ("llama", MIXED), ("embedded", TREE)])
def test_the_caches_after_every_round(name, shape):
    "Both caches hold fresh rows; the draft lacks one more just after a node of the last level was accepted"
    B, (target, draft) = 3 if name == "embedded" else 4, pair(name)
    ctxs, n, seeds, _, heat = (x[:B] for x in batch(5, 4))
    e = Engine(target, draft, shape, temperature=heat, every=1)
    run, seen = checked_run(e, ctxs, [k + 12 for k in n], seeds), set()
    while max(run.wants):
        for b in (b for b in range(B) if run.wants[b]):
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
    "A verifier that is offered nothing"
    return verify_trees(replace(batch, child=torch.full_like(batch.child, -1)), *rest, **kw)


@proves("prop-room")
@pytest.mark.parametrize("n", [0, 1, 5])
def test_room(n, monkeypatch):
    "All stated slots are written where every draft is rejected, none more; one less is too few and raises"
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


def test_ended_rows_stand_still():
    "Ten rounds after the end, lengths, roots and the slots before them are what they were, in both caches"
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

@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("ctxs", [[(3,)], [(3,), (5,), (3, 5)]])
def test_short_texts(n, ctxs):
    "n = 0, 1, 2 for prompts of one token, alone and together; a text without rounds has an empty ledger"
    texts = Engine(*pair(), TREE).generate(ctxs, n, range(len(ctxs)))
    assert texts == [alone(*pair(), TREE, without_replacement, 1., c, n, s) for s, c in enumerate(ctxs)]
    assert all(len(t) == n for t in texts)
    assert n or all(t.ledger.num_drafts == t.ledger.num_emitted_tokens == 0 for t in texts)


def test_a_stop_token_inside_an_accepted_run():
    "The text ends with the first occurrence of its stop token, whichever; a prompt's tokens end nothing"
    e = Engine(*pair("embedded"), CHAIN, temperature=0.)
    ctx = prompts("code", 1, length=12, seed=4)[0]
    whole = e.generate([ctx], 20, [0])[0]
    assert any(r[2] >= 2 for r in whole.ledger.rounds)
    stops = sorted({*whole, *ctx})
    texts = e.generate([ctx]*len(stops), 20, [0]*len(stops), [{s} for s in stops])
    assert {*ctx} - {*whole} and {*ctx} & {*whole}
    assert texts == [whole[:whole.index(s) + 1] if s in whole else whole for s in stops]


def test_to_the_last_position():
    "A text may fill the model's positions but for the tree's room, and one more is rejected at the door"
    target, draft = near(llama(0, max_position_embeddings=40), .08)
    e, n = Engine(target, draft, TREE), 40 + 2 - 8 - 4
    want = alone(target, draft, TREE, without_replacement, 1., (1, 2, 3, 4), n, 0)
    assert e.generate([(1, 2, 3, 4), (5,)], (n, 3), (0, 1))[0] == want
    most = f"at most {n} beside a tree of 8 nodes: the model knows no later position"
    with pytest.raises(ValueError, match=f"^n: got {n + 1} after a prompt of 4 tokens, wanted {most}"):
        e.generate([(1, 2, 3, 4), (5,)], (n + 1, 3), (0, 1))
    with pytest.raises(ValueError, match="^prompts: got one of 34 tokens, wanted at most 33 beside a tree"):
        e.generate([(1,)*34], 1, [0])
    assert len(e.generate([(1,)*33], 1, [0])[0]) == 1


def test_a_tree_as_large_as_the_model():
    "Eight positions hold a tree of eight nodes and one new token after a prompt of one; seven do not"
    target, draft = near(llama(0, max_position_embeddings=8), .08)
    want = alone(target, draft, TREE, without_replacement, 1., (5,), 1, 0)
    assert Engine(target, draft, TREE).generate([(5,)], 1, [0])[0] == want
    refuses("shape", Engine, *near(llama(0, max_position_embeddings=7), .08), TREE)


def test_unservable_models_are_named_by_their_place():
    "A target or a draft that one masked pass does not serve: `Unservable`, under the argument's own name"
    good = pair()[0]
    sick = copy.deepcopy(good)
    with torch.no_grad(): next(sick.parameters()).fill_(float("nan"))
    unserved = [REFUSED[why][0]() for why in ("recurrent state", "ALiBi", "encoder-decoder", "no head")]
    for bad in sick, *unserved:
        with pytest.raises(Unservable, match="^target: got "): Engine(bad, good, TREE)
        with pytest.raises(Unservable, match="^draft: got "): Engine(good, bad, TREE)


def test_stop_tokens_in_any_collection():
    "A set, a list, an array, an iterator that can be read once, for all or for each: the same ends"
    e, ctxs, every5 = Engine(*pair(), CHAIN), [(1, 2, 3), (4,), (5, 6)], range(0, 64, 5)
    want = e.generate(ctxs, 15, range(3), every5)
    assert min(map(len, want)) < 15
    for stop in ({*every5}, [*every5], np.arange(0, 64, 5), iter(every5), [every5]*3,
                 (iter(every5) for _ in ctxs)):
        assert e.generate(ctxs, 15, range(3), stop) == want


def test_extreme_temperatures():
    "Nearly uniform laws, and laws that are nearly points: still the text of each row alone"
    (ctxs, n, seeds, stop, _), heat = batch(6, 8), (1e300, 1e9, 1e-3, 1e-12)*2
    want = all_alone(pair(), TREE, without_replacement, ctxs, n, seeds, stop, heat)
    assert Engine(*pair(), TREE, temperature=heat).generate(ctxs, n, seeds, stop) == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_models_in_few_bits(dtype):
    "Neither model in double precision, or one alone: texts of the wanted lengths in the vocabulary"
    config = transformers.LlamaConfig(**SMALL)
    def net(): return transformers.AutoModelForCausalLM.from_config(config).eval()
    for p, q in (net().to(dtype), net().to(dtype)), (net().to(dtype), net().double()):
        e = Engine(p, q, TREE, temperature=(1., 0., .7))
        texts = e.generate([(1, 2), (3,), (4, 5, 6)], 9, range(3))
        assert [*map(len, texts)] == [9]*3 and {x for t in texts for x in t} <= {*range(64)}


# ---- known mistakes

COUNT, DRAFTS = "count = torch.where(self.room > 0, length, 0)", "self.drafts.commit(nodes, self.batch.root, "
UP_TO = "count.clamp_max(self.height))"
LAST_TWO = "return z.gather(1, lag[..., None].expand(-1, -1, z.shape[2]))"
LAWS = "(Logits(z.flatten(0, 1), self.temperature) for z in (p, q))"
LENGTHS = "lengths = [len(r.ctx) - 1 for r in self.requests]"
WRONG = [
    ("commit", COUNT, "count = torch.where(self.room > 0, length - 1, 0)"),
    ("commit", COUNT, "count = torch.where(self.room > 0, length + 1, 0)"),
    ("commit", COUNT, "count = length"),
    ("commit", COUNT, "count = torch.where(self.room > 0, length.min(), 0)"),
    ("commit", DRAFTS + UP_TO, "self.drafts.lengths += " + UP_TO[:-1]),
    ("commit", DRAFTS + UP_TO, "pass"),
    ("commit", "count.clamp_max(self.height)", "count"),
    ("commit", "self.drafts.lengths.copy_(base)", "pass"),
    ("commit", "self.last.copy_(tokens[:, max(self.height - 1, 0)])", "self.last.copy_(self.root)"),
    ("commit", "self.rows.commit(nodes, self.batch.root, count)", "self.rows.lengths += count"),
    ("commit", "torch.where(new == until, 0, self.room - new)", "self.room - new"),
    ("emitted", "torch.where(ends, place + 1", "torch.where(ends, place + 2"),
    ("catch_up", LAST_TWO, "return z[:, :1]"),
    ("catch_up", LAST_TWO, "return z[:, 1:]"),
    ("catch_up", "lag, at = (base", "base = self.drafts.lengths; lag, at = (base"),
    ("draft", "self.drafts.lengths.copy_(base + level.start)", "pass"),
    ("draft", "batch_positions(base, self.depth[own])",
     "base[:, None] + torch.arange(level.start, level.end)"),
    ("draft", "u[:, level.kids]", "u[:1, level.kids].expand(len(base), -1, -1)"),
    ("children", "w, z = remove_token(w, z, tokens[-1], cold)", "pass"),
    ("children", "Logits(z, self.temperature)", "Logits(z, 1.)"),
    ("round", "batch_positions(base, self.depth)", "base[:, None] + torch.arange(self.N)"),
    ("round", "coins.flatten()", "coins[:1].expand_as(coins).flatten()"),
    ("round", "picks[:, 0].clone()", "picks[:, 1].clone()"),
    ("round", LAWS, LAWS.replace("temperature", "temperature.mean()")),
    ("prefill", LENGTHS, "lengths = [max(len(r.ctx) for r in self.requests) - 1 for r in self.requests]"),
]

def eight_texts(shape):
    "What the engine gives for eight requests, and (made once) what each gives alone"
    ctxs, n, seeds, stop, heat = batch(3, 8)
    asked = ctxs, [k + 12 for k in n], seeds, [*stop[:4], *[range(0, 64, 4)]*4]
    if shape not in made: made[shape] = all_alone(pair(), shape, without_replacement, *asked, heat)
    return Engine(*pair(), shape, without_replacement, heat).generate(*asked), made[shape]

def limited(advance, calls=40):
    "An `advance` that breaks off where a run never ends"
    left = iter(range(calls))
    def wrapped(run):
        if next(left, None) is None: raise RuntimeError("no end")
        advance(run)
    return wrapped

def is_seen():
    "Whether some text of a chain or a tree differs, or the run breaks off"
    try: return any(texts != want for texts, want in map(eight_texts, (CHAIN, TREE)))
    except (RuntimeError, IndexError, ValueError): return True

def test_the_right_round_is_not_seen(monkeypatch):
    "Without a mistake the texts are those of each row alone, well within the calls that a run may take"
    monkeypatch.setattr(BatchRun, "advance", limited(BatchRun.advance))
    assert not is_seen()

@pytest.mark.parametrize("method, old, new", WRONG, ids=range(len(WRONG)))
def test_wrong_variants_are_seen(method, old, new, monkeypatch):
    "Each known mistake, written into the round, changes a text, breaks off, or never ends"
    monkeypatch.setattr(BatchRun, method, altered(BatchRun, method, old, new))
    monkeypatch.setattr(BatchRun, "advance", limited(BatchRun.advance))
    assert is_seen()


# ---- on the device

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "unique", "equal",
             "allclose", "bincount")

def boolean(x): return torch.is_tensor(x) and x.dtype in (torch.bool, torch.uint8)

class Asynchronous(TorchDispatchMode):
    "Refuses what waits for a GPU: a number read back, a shape that depends on values, the host's numbers"
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
def test_a_round_asks_the_host_nothing(shape, draw, monkeypatch):
    "With the walk as on a GPU: nothing in a round waits, all tensors stay where they were, same texts"
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
def test_the_watch_sees_a_wait(waits):
    "Each kind of waiting is refused"
    x = torch.arange(3)
    with pytest.raises(AssertionError), Asynchronous(): waits(x)


class Graph:
    "A CUDA graph's manners without one: recording runs nothing, replaying runs what was recorded"
    def __init__(self): self.recorded = None
    def replay(self): self.recorded()


def test_the_warm_up_leaves_no_trace(monkeypatch):
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
    "Rounds replayed from a graph, under the watch for synchronisation, give the texts of the CPU"
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
    "A batch takes as many rounds as its slowest text alone, and each text is noted in as many as alone"
    e, (ctxs, n, seeds, _, _) = Engine(*pair(), TREE, every=1), batch(2, 5)
    run, steps = BatchRun(e, e.requests(ctxs, n, seeds)), []
    step = run.step
    run.step = lambda: (steps.append(1), step())
    run_to_end(run)
    texts = all_alone(pair(), TREE, without_replacement, ctxs, n, seeds, [()]*5, [1.]*5)
    R = [len(text.ledger.rounds) for text in texts]
    assert len(steps) == max(R) and [len(l.rounds) for l in run.ledgers] == R and len(set(R)) > 2
