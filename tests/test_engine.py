"44_engine: a batch is a map of single rows, the draft lags by one at most, ended rows disturb nobody, and a round asks the host nothing"
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
from helpers import ALPHA, g_test, laws, proves, refuses, shapes
from test_cache import doubled, fresh, llama
from test_transformer import REFUSED, SMALL
from specref.models.embedded import prompts, raw_model
from specref.core.rng import Rng, Streams, Tape, tv_outcomes, numpy_generator
from specref.gpu import engine as module
from specref.gpu.cache import StaticRows
from specref.gpu.engine import Engine, BatchRun, sort_by_level, tree_levels, uniforms, inverse_cdf, tape_of
from specref.gpu.verify import decision_cells, verify_trees
from specref.core.law import greedy, warp
from specref.core.loop import generate
from specref.verify.reject import reject
from specref.draft.shapes import StaticTree
from specref.core.target import TableModel, target_law as law_of_target
from specref.models.transformer import HFModel, Unservable
from specref.core.tree import Tree, iid, points, without_replacement

torch.set_num_threads(1)
CHAIN, TREE, MIXED, NONE = (-1, 0, 1, 2), (-1, 0, 0, 0, 1, 1, 2, 4), (-1, 0, 1, 1, 0, 2), (-1,)
made = {}


def pair(name="llama"):
    "A target, and a draft that is like it but not equal"
    if name not in made:
        if name == "embedded": made[name] = [doubled(copy.deepcopy(raw_model(x, torch.float64))) for x in ("target", "small")]
        elif name == "tiny": made[name] = near(llama(3, vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2), .15)
        else: made[name] = near(llama(0), .03)
    return made[name]

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
    if not temperature and draw is without_replacement: drafter = StaticTree(HFModel(draft, check=False), shape, in_order)
    return generate(HFModel(target, **warm), drafter, reject, ctx, n, tape_of(uniforms(numpy_generator(seed), max(n, 1), len(shape))), stop=stop)


def batch(seed, B, V=64, longest=20):
    "Prompts, n, seeds and stop tokens of B texts, all different; one prompt of a single token, one text of no tokens, one of one"
    rng = np.random.default_rng(seed)
    ctxs = [tuple(rng.integers(V, size=k).tolist()) for k in rng.integers(1, 15, size=B)]
    n = rng.integers(2, longest, size=B).tolist()
    stop = [tuple(rng.integers(V, size=k).tolist()) for k in rng.integers(0, 6, size=B)]
    if B > 2: ctxs[0], n[1], n[2] = ctxs[0][:1], 0, 1
    return ctxs, n, rng.integers(10**6, size=B).tolist(), stop, [(1., .7, 0.)[b % 3] for b in range(B)]


def rounds(text): return [r[:4] for r in text.ledger.rounds]


def altered(owner, method, old, new):
    "A method or function whose source says `new` in the one place where it said `old`"
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    assert source.count(old) == 1
    scope = {}
    exec(source.replace(old, new), vars(inspect.getmodule(owner) or owner) | {"__name__": "wrong"}, scope)
    return scope[method]


# ---- a batch is a map

@proves("thm-engine-map")
@pytest.mark.parametrize("B", [1, 3, 16])
@pytest.mark.parametrize("shape", [CHAIN, TREE, MIXED, NONE])
@pytest.mark.parametrize("draw", [iid, without_replacement])
def test_a_batch_is_a_map(B, shape, draw):
    "Every text, and every count of its ledger, is that of the loop for one text on the same numbers; some end by a stop token, some by n"
    models, (ctxs, n, seeds, stop, temperature) = pair(), batch(B, B)
    texts = Engine(*models, shape, draw, temperature, every=3).generate(ctxs, n, seeds, stop)
    want = [alone(*models, shape, draw, t, *rest) for t, *rest in zip(temperature, ctxs, n, seeds, stop)]
    assert texts == want and [*map(rounds, texts)] == [*map(rounds, want)]
    if B == 16:
        assert {len(x) == k for x, k in zip(texts, n)} == {True, False}
        assert shape == NONE or {0, 1, 2} <= {accepted for t in texts for _, _, accepted, _ in rounds(t)}


@proves("thm-engine-map")
@pytest.mark.parametrize("shape, draw", [(CHAIN, iid), (TREE, without_replacement)])
def test_the_embedded_models(shape, draw):
    "The same on the shipped models and real prompts"
    pairs, ctxs = pair("embedded"), [prompts("code", 1, length=k, seed=k)[0] for k in (5, 17, 1)]
    texts = Engine(*pairs, shape, draw, (1., .7, 0.)).generate(ctxs, (20, 30, 12), (1, 2, 3), (10,))
    assert texts == [alone(*pairs, shape, draw, t, c, n, s, (10,)) for t, c, n, s in zip((1., .7, 0.), ctxs, (20, 30, 12), (1, 2, 3))]
    assert max(t.ledger.mean_acceptance_length for t in texts) > 2


@proves("thm-engine-map")
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), shapes(6), st.sampled_from([iid, without_replacement]), st.integers(1, 4), st.randoms(use_true_random=False))
def test_neighbours_and_their_order_do_not_matter(seed, shape, draw, every, random):
    "Any shape, any order, any subset, however often the host looks: each row's text is the same"
    pairs, rows = pair(), [*zip(*batch(seed, 4, longest=8))]
    chosen = random.sample(rows, random.randint(1, 4))
    def texts(rows, every):
        ctxs, n, seeds, stop, temperature = zip(*rows)
        return dict(zip(seeds, Engine(*pairs, shape, draw, temperature, every=every).generate(ctxs, n, seeds, stop)))
    whole, part = texts(rows, 1), texts(chosen, every)
    assert all(part[s] == whole[s] for s in part)


@proves("thm-engine-map")
def test_the_law_of_a_plan_is_told_to_the_judge():
    "At temperature 0 every child is a point; else it has its parent's row, and is apart from its siblings just if they are drawn so"
    for draw in iid, without_replacement:
        e = Engine(*pair(), TREE, draw, (0., 1.))
        b = BatchRun(e, e.requests([(1,), (2,)], 5, (0, 1))).batch
        assert b.q_row.tolist() == [-1]*8 + [-1, *(7 + u for u in TREE[1:])]
        assert b.without_replacement.tolist() == [False]*9 + [draw is without_replacement]*7


@given(shapes(9))
def test_levels_are_those_of_shaped(parent):
    "The numbering is that of the tree that `StaticTree` grows, and each level names its parents and all of its children in order"
    plan = sort_by_level(parent)
    grown = StaticTree(TableModel(2, lambda text: np.ones(2) / 2), tuple(parent), iid)((0,), Tape({("pick", c): .5 for c in range(20)}))
    assert list(plan) == grown.parent
    seen = [0]
    for start, end, who, kids, there in tree_levels(grown):
        assert {grown.depth[i] for i in range(start, end)} == {grown.depth[start]} and len(who) == len(kids)
        assert [(start + who[i // len(kids[0])], sum(kids, [])[i]) for i in there] == [(grown.parent[c], c) for u in range(start, end) for c in grown.children(u)]
        seen += [sum(kids, [])[i] for i in there]
    assert seen == [*range(len(parent))]


@given(laws(5), st.integers(0, 2**12 - 1))
def test_a_pick_is_the_pick_of_chapter_one(law, k):
    "On laws and numbers that floats hold exactly, the sums in whole numbers give the same token"
    law = np.array([int(64 * x) for x in law], dtype=float)
    if law.sum():
        law[0] += 2**9 - law.sum()
        w = torch.tensor(law / 2**9)[None]
        assert inverse_cdf(w, torch.tensor([k / 2**12], dtype=torch.float64)).item() == Tape({("pick", 0): k / 2**12}).pick(law / 2**9, at=0)


def children(z, u, temperature, apart):  # (B, m, V), (B, m, K) -> (B, m, K)
    run = SimpleNamespace(b=torch.arange(len(z)), temperature=torch.tensor(temperature, dtype=torch.float64), engine=SimpleNamespace(without_replacement=apart))
    return BatchRun.children(run, z, torch.as_tensor(u, dtype=torch.float64)).view(u.shape)


@proves("prop-cold")
@given(st.permutations([-3., -1., 0., 1.5, 2., 4.]), st.integers(1, 6), st.integers(0, 10**6))
def test_cold_draws(z, K, seed):
    "The probability of the tokens in order of their logits tends to one as bounded, and temperature 0 draws just these, whatever the numbers"
    order = np.argsort(-np.array(z))
    for T in (.2, .05, .01):
        draw = without_replacement(warp(z, T))
        kept = np.prod([draw(tuple(order[:j]))[order[j]] for j in range(K)])
        assert kept >= 1 - K * len(z) * np.exp(-.5 / T) - 1e-12
    u, rows = np.random.default_rng(seed).random((2, 1, K)), torch.tensor([[z], [z]])
    assert children(rows, u, [0., .01], True)[0, 0].tolist() == order[:K].tolist()
    assert set(children(rows, u, [0., .01], False)[0, 0].tolist()) == {order[0]}


def test_when_nothing_is_left():
    "A row with one token in its support: the next siblings are uniform over the others, as Sequoia has it; with temperature 0, in order"
    z, u = torch.tensor([[[0., -1e5, -2e5, -1.5e5]]]), np.array([[[.3, .1, .99]]])
    assert children(z, u, [1.], True).flatten().tolist() == [0, 1, 3] and children(z, u, [0.], True).flatten().tolist() == [0, 1, 3]
    assert children(z, np.array([[[.3, .5, .1]]]), [1.], True).flatten().tolist() == [0, 2, 1]


# ---- the law

def target_law(target, ctx, n, temperature):
    "The law of n tokens, by passes that have no past"
    law = {(): 1.}
    for _ in range(n): law = {(*t, x): w * v for t, w in law.items() for x, v in enumerate(warp(fresh(target, ctx + t)[1].numpy(), temperature))}
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
    "In the place of a text's generator: the middle of one cell, round after round, and .5 for what the cell does not ask"
    def __init__(self, cell, rounds, N):
        self.table, self.done = np.full((rounds, 2, N), .5), 0
        for (i, side, c), u in cell.coins.items(): self.table[i, 1, c] = u
        for (i, side, c), u in cell.picks.items(): self.table[i, 0, c if side == "draft" else 0] = u
    def random(self, shape):
        part = self.table[self.done:self.done + shape[0]]
        self.done += len(part)
        return np.concatenate([part, np.full((shape[0] - len(part), *shape[1:]), .5)])


ROUNDS = [(3, (-1, 0, 0), without_replacement, 2., 2), (3, CHAIN[:3], iid, 1., 2), (3, (-1, 0, 0, 0), without_replacement, 1., 2), (2, (-1, 0, 0, 1, 1, 2), without_replacement, 1., 2),
          (2, CHAIN, iid, 2., 2), (3, NONE, iid, 1., 2)]

def through_the_engine(monkeypatch, V, shape, draw, temperature, n, ctx=(0, 1)):
    "Every cell of the numbers that n tokens ask for, all of them as one batch: cells, texts of the engine, and the target's law in fractions"
    nets = near(llama(3, vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2), .3)
    p, q = (table_of(net, temperature) for net in nets)
    if (case := (V, shape, draw, temperature, n)) not in made: made[case] = [*decision_cells(lambda rng: generate(p, StaticTree(q, shape, draw), reject, ctx, n, Addressed(rng)))]
    boxes = made[case]
    with monkeypatch.context() as m:
        m.setattr(module, "numpy_generator", lambda seed: Middles(boxes[seed], n, len(shape)))
        texts = Engine(*nets, shape, draw, temperature, every=2).generate([ctx]*len(boxes), n, range(len(boxes)))
    return boxes, texts, law_of_target(p, ctx, n)

def law_in(boxes, texts):
    law = Counter()
    for box, text in zip(boxes, texts): law[tuple(text)] += box.volume
    return law


@proves("cor-engine-law", "thm-engine-map")
@pytest.mark.parametrize("V, shape, draw, temperature, n", ROUNDS)
def test_the_law_exactly(V, shape, draw, temperature, n, monkeypatch):
    "One round and more, from draws to commit: in the middle of every cell of all numbers the engine's text and ledger are the reference's, and the volumes of the cells sum to the target's law, fraction by fraction"
    boxes, texts, want = through_the_engine(monkeypatch, V, shape, draw, temperature, n)
    assert sum(box.volume for box in boxes) == 1 and min(box.volume for box in boxes) > 1e-12
    assert texts == [box.outcome for box in boxes] and [*map(rounds, texts)] == [rounds(box.outcome) for box in boxes]
    assert law_in(boxes, texts) == want and len(want) == V**n


def test_the_exact_laws_take_a_round_and_two():
    "Among the cells are texts of one round and of two, with nothing, one and two tokens accepted"
    assert {len(box.outcome.ledger.rounds) for case in ROUNDS[:5] for box in made[case]} == {1, 2}
    assert {r[2] for box in made[ROUNDS[1]] for r in box.outcome.ledger.rounds} == {0, 1, 2}


@pytest.mark.parametrize("method, old, new", [("round", "coins.flatten()", "picks.flatten()"), ("round", "picks[:, 0].clone()", "picks[:, 1].clone()"),
                                              ("children", "w, z = remove_token(w, z, tokens[-1], cold)", "pass"), ("draft", "u[:, level.kids]", "u[:, level.kids] * .5"), ("draft", "u[:, level.kids]", "u[:, level.kids].roll(1, 2)")])
def test_the_exact_law_sees_wrong_numbers(method, old, new, monkeypatch):
    "A number read twice, halved or by another node, or a draw with replacement that claims to be without: the law is another one"
    monkeypatch.setattr(BatchRun, method, altered(BatchRun, method, old, new))
    boxes, texts, want = through_the_engine(monkeypatch, *ROUNDS[0])
    assert tv_outcomes(law_in(boxes, texts), want) > 1e-4


@proves("cor-engine-law")
@pytest.mark.parametrize("shape, draw", [(CHAIN, iid), (TREE, without_replacement)])
def test_the_law(shape, draw):
    "Joint law of the first tokens of 1,500 texts: false alarm 1e-9, and what distance is seen"
    target, draft = pair("tiny")
    for temperature, n, sees in (1., 2, .35),:
        e = Engine(target, draft, shape, draw, temperature)
        test = g_test(Counter(map(tuple, e.generate([(0, 3, 1)]*1500, n, range(1500)))), target_law(target, (0, 3, 1), n, temperature))
        assert test.fits and test.tv < sees, test


@proves("cor-engine-law")
def test_texts_are_independent():
    "The first two tokens of neighbours, over 1,500 pairs, have the product law; with shared numbers they do not"
    target, draft = pair("tiny")
    law = target_law(target, (2,), 2, 1.)
    both = {(*a, *b): v * w for (a, v), (b, w) in product(law.items(), law.items())}
    def test(seeds):
        texts = [*map(tuple, Engine(target, draft, CHAIN, iid).generate([(2,)]*3000, 2, seeds))]
        return g_test(Counter(a + b for a, b in zip(texts[::2], texts[1::2])), both)
    assert test(range(3000)).fits and not test([s // 2 for s in range(3000)]).fits


# ---- the caches, the lag, the room

def turns(e, *asked):
    "A run, looked at after every round, with every check on"
    run = BatchRun(e, e.requests(*asked))
    run.rows.check = run.drafts.check = True
    yield run
    while max(run.wants):
        run.advance()
        yield run


def far(net, rows, text, n):
    return (rows[:, :, :, :n] - fresh(net, text[:n])[0]).abs().max().item() if n else 0.


@proves("thm-engine-map", "lem-lag")
@pytest.mark.parametrize("name, shape", [("llama", CHAIN), ("llama", TREE), ("llama", MIXED), ("embedded", TREE)])
def test_the_caches_after_every_round(name, shape):
    "Both caches of every live row are those of fresh passes, whatever the depth of the last refusal; the draft lacks one row more just after a node of the last level was kept"
    pairs, (ctxs, n, seeds, _, temperature) = pair(name), batch(5, 4)
    if name == "embedded": ctxs, n = ctxs[:3], n[:3]
    n, seen = [k + 12 for k in n[:len(ctxs)]], set()
    for run in turns(Engine(*pairs, shape, temperature=temperature[:len(ctxs)], every=1), ctxs, n, seeds[:len(ctxs)]):
        for b, (ctx, out) in enumerate(zip(ctxs, run.out)):
            text, length, lag = ctx + tuple(out), run.rows.lengths[b].item(), (run.rows.lengths - run.drafts.lengths)[b].item()
            if not run.wants[b]: continue
            last = run.ledgers[b].rounds[-1] if out else (0, 0, -1)
            assert length == len(text) - 1 and run.root[b] == text[-1] and lag == (last[2] == run.height)
            assert far(pairs[0], run.rows.rows[:, :, b], text, length) < 1e-10 and far(pairs[1], run.drafts.rows[:, :, b], text, length - lag) < 1e-10
            seen.add((last[2], lag))
    assert {lag for _, lag in seen} == {0, 1} and {d for d, _ in seen} == {-1, *range(run.height + 1)}


def refusing(batch, *rest, **kw):
    "A judge that is offered nothing"
    return verify_trees(replace(batch, child=torch.full_like(batch.child, -1)), *rest, **kw)


@proves("prop-room")
@pytest.mark.parametrize("n", [0, 1, 5])
def test_room(n, monkeypatch):
    "The stated slots are all written where every draft is refused, none more is, and one less is too few; a slot past the end raises"
    e = Engine(*pair(), TREE, verify=refusing)
    run = BatchRun(e, e.requests([(1, 2, 3), (4,)], (n, 3), (0, 1)))
    assert run.size == max(3 + max(n, 1), 4) - 2 + 8
    for _ in range(7): run.engine.every = 1; run.wants[0] = max(run.wants[0], 1); run.advance()
    assert run.rows.rows[:, :, 0 if n else 1].abs().sum((0, 1, 2, 4)).gt(0).all() or n < 2
    run.wants = [0, 0]
    if n == 5:
        monkeypatch.setattr(Engine, "slots", lambda self, a: len(a.ctx) + max(a.n, 1) - 3 + len(self.plan))
        with pytest.raises((RuntimeError, IndexError)): e.generate([(1, 2, 3), (4,)], (n, 3), (0, 1))


def test_ended_rows_stand_still():
    "Ten rounds after the end, lengths, roots and slots before the lengths are what they were, in both caches"
    e = Engine(*pair(), TREE, every=5)
    run = BatchRun(e, e.requests([(1, 2, 3), (4,), (5, 6)], (9, 3, 0), (0, 1, 2), [(), range(64), ()]))
    while max(run.wants): run.advance()
    def state(): return [run.root.clone(), run.rows.lengths.clone(), *(c.rows[:, :, b, :, :k].clone() for c in (run.rows, run.drafts) for b, k in enumerate(run.rows.lengths.tolist()))]
    def tell(): run.noise.copy_(torch.rand_like(run.noise)); run.turn.zero_(); [run.round() for _ in range(5)]
    tell()
    was = state()
    tell(); tell()
    assert all(torch.allclose(a.double(), b.double(), rtol=0, atol=1e-12) for a, b in zip(was, state())) and not run.results[:, :, 0].any()
    assert [*map(len, run.texts())] == [9, 1, 0]


# ---- ends

@pytest.mark.parametrize("n", [0, 1, 2])
def test_short_texts(n):
    "n = 0, 1, 2 for prompts of one token, alone and together; the ledger of a text without rounds is empty"
    for ctxs in [(3,)], [(3,), (5,), (3, 5)]:
        texts = Engine(*pair(), TREE).generate(ctxs, n, range(len(ctxs)))
        assert texts == [alone(*pair(), TREE, without_replacement, 1., c, n, s) for s, c in enumerate(ctxs)] and all(len(t) == n for t in texts)
        assert n or all(t.ledger.num_drafts == t.ledger.num_emitted_tokens == 0 for t in texts)


def test_a_stop_token_inside_an_accepted_run():
    "Whatever token of a text is made a stop token, the text ends with its first occurrence, and a prompt's last token stops nothing"
    e = Engine(*pair("embedded"), CHAIN, temperature=0.)
    ctx = prompts("code", 1, length=12, seed=4)[0]
    whole = e.generate([ctx], 20, [0])[0]
    assert any(r[2] >= 2 for r in whole.ledger.rounds)
    stops = sorted(set(whole)) + [ctx[-1]]
    texts = e.generate([ctx]*len(stops), 20, [0]*len(stops), [{s} for s in stops])
    assert texts == [whole[:whole.index(s) + 1] if s in whole else whole for s in stops]


def test_to_the_last_position():
    "A text may fill the model's positions but for the tree's room, and one more is refused"
    target, draft = near(llama(0, max_position_embeddings=40), .08)
    e = Engine(target, draft, TREE)
    n = 40 + 2 - 8 - 4
    assert e.generate([(1, 2, 3, 4), (5,)], (n, 3), (0, 1))[0] == alone(target, draft, TREE, without_replacement, 1., (1, 2, 3, 4), n, 0)
    with pytest.raises(ValueError, match=f"^n: got {n + 1} after a prompt of 4 tokens, wanted at most {n} beside a tree of 8 nodes: the model knows no later position"): e.generate([(1, 2, 3, 4), (5,)], (n + 1, 3), (0, 1))
    with pytest.raises(ValueError, match="^prompts: got one of 34 tokens, wanted at most 33 beside a tree of 8 nodes"): e.generate([(1,)*34], 1, [0])
    assert len(e.generate([(1,)*33], 1, [0])[0]) == 1


def test_a_tree_as_large_as_the_model():
    "Eight positions hold a tree of eight nodes and one new token after a prompt of one; seven do not"
    target, draft = near(llama(0, max_position_embeddings=8), .08)
    assert Engine(target, draft, TREE).generate([(5,)], 1, [0])[0] == alone(target, draft, TREE, without_replacement, 1., (5,), 1, 0)
    refuses("shape", Engine, *near(llama(0, max_position_embeddings=7), .08), TREE)


def test_the_door(monkeypatch):
    "Bad input is named before anything is allocated or run"
    target, draft = pair()
    e = Engine(target, draft, TREE)
    monkeypatch.setattr(module, "StaticRows", None)
    for name, args in [("prompts", ([], 3, [])), ("prompts", ([()], 3, [0])), ("prompts", ([(1,), ()], 3, [0, 1])), ("prompts", ([(64,)], 3, [0])), ("prompts", ([(-1,)], 3, [0])),
                       ("prompts", ((1, 2), 3, [0])), ("prompts", (["ab"], 3, [0])), ("prompts", (5, 3, [0])), ("n", ([(1,)], -1, [0])), ("n", ([(1,)], 2.5, [0])), ("n", ([(1,)], [3, 3], [0])),
                       ("n", ([(1,)], [2.5], [0])), ("n", ([(1,)], 10**6, [0])), ("prompts", ([(1,)*3000], 1, [0])), ("prompts", ([(1,), (1,)*2042], 0, [0, 1])), ("n", ([(1,)*2041], 2, [0])), ("prompts", (None, 3, [0])), ("seeds", ([(1,)], 3, None)), ("stop", ([(1,)], 3, [0], None)), ("seeds", ([(1,)], 3, 0)), ("seeds", ([(1,)], 3, [])), ("seeds", ([(1,)], 3, [0, 1])),
                       ("seeds", ([(1,)], 3, [-1])), ("seeds", ([(1,)], 3, [.5])), ("stop", ([(1,)], 3, [0], 7)), ("stop", ([(1,)], 3, [0], (64,))), ("stop", ([(1,)], 3, [0], [(1,), (2,)])),
                       ("stop", ([(1,)], 3, [0], [("a",)]))]:
        refuses(name, e.generate, *args)
    for t in -1., float("inf"), float("nan"), (1., 1.), "warm", None, [None], "1", 10**400, 1j: refuses("temperature", Engine(target, draft, TREE, temperature=t).generate, [(1,)], 3, [0])
    refuses("temperature", Engine(target, draft, TREE, temperature="warm").generate, [(1,)]*4, 3, range(4))
    small = llama(0, vocab_size=32)
    for name, f in [("target", lambda: Engine(HFModel(target), draft, TREE)), ("draft", lambda: Engine(target, None, TREE)), ("draft", lambda: Engine(target, small, TREE)),
                    ("draft", lambda: Engine(target, copy.deepcopy(draft).to("meta"), TREE)), ("shape", lambda: Engine(target, draft, (-1, 2, 0))), ("shape", lambda: Engine(target, draft, ())), ("shape", lambda: Engine(target, draft, 5)), ("shape", lambda: Engine(target, draft, "abc")),
                    ("shape", lambda: Engine(target, llama(0, max_position_embeddings=7), TREE)),
                    ("draw", lambda: Engine(target, draft, TREE, "iid")), ("shape", lambda: Engine(*pair("tiny"), (-1, 0, 0, 0, 0, 0))), ("verify", lambda: Engine(target, draft, TREE, verify=None)),
                    ("every", lambda: Engine(target, draft, TREE, every=0))]: refuses(name, f)


def test_unservable_models_are_named_by_their_place():
    "A target or a draft that one masked pass does not serve, or whose weights are no numbers: `Unservable`, under the argument's own name"
    good = pair()[0]
    sick = copy.deepcopy(good)
    with torch.no_grad(): next(sick.parameters()).fill_(float("nan"))
    for bad in sick, *(REFUSED[why][0]() for why in ("recurrent state", "ALiBi", "encoder-decoder", "no head")):
        with pytest.raises(Unservable, match="^target: got "): Engine(bad, good, TREE)
        with pytest.raises(Unservable, match="^draft: got "): Engine(good, bad, TREE)


def test_stop_tokens_in_any_collection():
    "A set, a list, an array, an iterator that can be read once, for all or for each: the same ends"
    e, ctxs = Engine(*pair(), CHAIN), [(1, 2, 3), (4,), (5, 6)]
    want = e.generate(ctxs, 15, range(3), range(0, 64, 5))
    assert min(map(len, want)) < 15
    for stop in {*range(0, 64, 5)}, [*range(0, 64, 5)], np.arange(0, 64, 5), iter(range(0, 64, 5)), [range(0, 64, 5)]*3, (iter(range(0, 64, 5)) for _ in ctxs): assert e.generate(ctxs, 15, range(3), stop) == want


def test_a_stop_token_that_the_prompt_holds():
    "Tokens of a prompt end nothing, wherever they stand in it; the same token ends the text when it is new"
    e = Engine(*pair(), CHAIN)
    for ctx in (7, 1, 2), (1, 7, 2), (1, 2, 7):
        plain = e.generate([ctx], 25, [3])[0]
        for x in 7, plain[4]:
            got = e.generate([(x, *ctx)], 25, [3], (x,))[0]
            whole = e.generate([(x, *ctx)], 25, [3])[0]
            assert got == (whole[:whole.index(x) + 1] if x in whole else whole) and len(got) > 0


@pytest.mark.parametrize("temperature", [1e300, 1e9, 1e-3, 1e-12])
def test_extreme_temperatures(temperature):
    "Nearly uniform laws, and laws that are nearly points: still the text of each row alone"
    ctxs, n, seeds, stop, _ = batch(6, 3)
    assert Engine(*pair(), TREE, temperature=temperature).generate(ctxs, n, seeds, stop) == [alone(*pair(), TREE, without_replacement, temperature, *rest) for rest in zip(ctxs, n, seeds, stop)]


def test_equal_prompts():
    "Equal prompts and seeds give equal texts; equal prompts with other seeds do not"
    texts = Engine(*pair(), TREE).generate([(1, 2, 3)]*4, 12, [5, 5, 6, 7])
    assert texts[0] == texts[1] and len({*map(tuple, texts)}) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_models_in_few_bits(dtype):
    "Neither model in double precision, or one alone: texts of the wanted lengths with tokens of the vocabulary"
    def net(seed): return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL)).eval()
    for p, q in (net(0).to(dtype), net(1).to(dtype)), (net(0).to(dtype), net(1).double()):
        texts = Engine(p, q, TREE, temperature=(1., 0., .7)).generate([(1, 2), (3,), (4, 5, 6)], 9, range(3))
        assert [*map(len, texts)] == [9]*3 and {x for t in texts for x in t} <= {*range(64)}


# ---- known mistakes

WRONG = [
    ("commit", "count = torch.where(self.room > 0, length, 0)", "count = torch.where(self.room > 0, length - 1, 0)"),
    ("commit", "count = torch.where(self.room > 0, length, 0)", "count = torch.where(self.room > 0, length + 1, 0)"),
    ("commit", "count = torch.where(self.room > 0, length, 0)", "count = length"),
    ("commit", "count = torch.where(self.room > 0, length, 0)", "count = torch.where(self.room > 0, length.min(), 0)"),
    ("commit", "self.drafts.commit(nodes, self.batch.root, count.clamp_max(self.height))", "self.drafts.lengths += count.clamp_max(self.height)"),
    ("commit", "self.drafts.commit(nodes, self.batch.root, count.clamp_max(self.height))", "pass"),
    ("commit", "count.clamp_max(self.height)", "count"),
    ("commit", "self.drafts.lengths.copy_(base)", "pass"),
    ("commit", "self.last.copy_(tokens[:, max(self.height - 1, 0)])", "self.last.copy_(self.root)"),
    ("commit", "self.rows.commit(nodes, self.batch.root, count)", "self.rows.lengths += count"),
    ("commit", "torch.where(new == until, 0, self.room - new)", "self.room - new"),
    ("emitted", "torch.where(ends, place + 1", "torch.where(ends, place + 2"),
    ("catch_up", "return z.gather(1, lag[..., None].expand(-1, -1, z.shape[2]))", "return z[:, :1]"),
    ("catch_up", "return z.gather(1, lag[..., None].expand(-1, -1, z.shape[2]))", "return z[:, 1:]"),
    ("catch_up", "lag, at = (base", "base = self.drafts.lengths; lag, at = (base"),
    ("draft", "self.drafts.lengths.copy_(base + level.start)", "pass"),
    ("draft", "batch_positions(base, self.depth[own])", "base[:, None] + torch.arange(level.start, level.end)"),
    ("draft", "u[:, level.kids]", "u[:1, level.kids].expand(len(base), -1, -1)"),
    ("children", "w, z = remove_token(w, z, tokens[-1], cold)", "pass"),
    ("children", "Logits(z, self.temperature)", "Logits(z, 1.)"),
    ("round", "batch_positions(base, self.depth)", "base[:, None] + torch.arange(self.N)"),
    ("round", "coins.flatten()", "coins[:1].expand_as(coins).flatten()"),
    ("round", "picks[:, 0].clone()", "picks[:, 1].clone()"),
    ("round", "(Logits(z.flatten(0, 1), self.temperature) for z in (p, q))", "(Logits(z.flatten(0, 1), self.temperature.mean()) for z in (p, q))"),
    ("prefill", "lengths = [len(r.ctx) - 1 for r in self.requests]", "lengths = [max(len(r.ctx) for r in self.requests) - 1 for r in self.requests]"),
]

@pytest.mark.parametrize("method, old, new", WRONG, ids=range(len(WRONG)))
def test_wrong_variants_are_seen(method, old, new, monkeypatch):
    "Each known mistake, written into the round, changes a text, breaks off, or never ends, where the right round gives what each row gives alone"
    ctxs, n, seeds, stop, temperature = batch(3, 8)
    n, stop = [k + 12 for k in n], [*stop[:4], *[range(0, 64, 4)]*4]
    def run(): return [t for shape in (CHAIN, TREE) for t in Engine(*pair(), shape, without_replacement, temperature).generate(ctxs, n, seeds, stop)]
    if "texts" not in made: made["texts"] = [alone(*pair(), shape, without_replacement, t, *rest) for shape in (CHAIN, TREE) for t, *rest in zip(temperature, ctxs, n, seeds, stop)]
    assert run() == made["texts"]
    monkeypatch.setattr(BatchRun, method, altered(BatchRun, method, old, new))
    calls, advance = [], BatchRun.advance
    def limited(self):
        calls.append(1)
        if len(calls) > 100: raise RuntimeError("no end")
        advance(self)
    monkeypatch.setattr(BatchRun, "advance", limited)
    try: assert run() != made["texts"]
    except (RuntimeError, IndexError, ValueError): pass


# ---- on the device

FORBIDDEN = "_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "unique", "equal", "allclose", "bincount"

class Asynchronous(TorchDispatchMode):
    "Refuses what waits for a GPU: a number read back, a shape that depends on values, a tensor made from the host's numbers"
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        name = f.overloadpacket.__name__
        if any(name.startswith(x) for x in FORBIDDEN): raise AssertionError(f"{name} waits for the device")
        if name.startswith("index") and any(torch.is_tensor(i) and i.dtype in (torch.bool, torch.uint8) for i in (args[1] if isinstance(args[1], (list, tuple)) else ())):
            raise AssertionError("a boolean index waits for the device")
        if name == "repeat_interleave" and torch.is_tensor(args[0]) and kwargs.get("output_size") is None: raise AssertionError("repeat_interleave waits for the device")
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize("draw", [iid, without_replacement])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_round_asks_the_host_nothing(shape, draw, monkeypatch):
    "With the walk as on a GPU: no operation of a round waits, all of its tensors stay where they were, and the texts are the same"
    ctxs, n, seeds, stop, temperature = batch(3, 6)
    e = Engine(*pair(), shape, draw, temperature)
    want, run = e.generate(ctxs, n, seeds, stop), BatchRun(e, e.requests(ctxs, n, seeds, stop))
    places = {k: x.data_ptr() for k, x in vars(run).items() if torch.is_tensor(x)} | {k: getattr(run, k).rows.data_ptr() for k in ("rows", "drafts")}
    step = run.step
    def watched():
        with monkeypatch.context() as m, Asynchronous():
            m.setattr(torch.compiler, "is_compiling", lambda: True)
            step()
    run.step = watched
    while max(run.wants): run.advance()
    assert run.texts() == want
    assert places == {k: x.data_ptr() for k, x in vars(run).items() if torch.is_tensor(x)} | {k: getattr(run, k).rows.data_ptr() for k in ("rows", "drafts")}


def test_the_watch_sees_a_wait():
    "Each kind of waiting is refused"
    x = torch.arange(3)
    for f in (lambda: x.max().item(), lambda: x[x > 1], lambda: int(x[0]), lambda: x.nonzero(), lambda: bool((x > 0).all()), lambda: x.new_tensor([1, 2]), lambda: x.repeat_interleave(x)):
        with pytest.raises(AssertionError), Asynchronous(): f()


class Graph:
    "A CUDA graph's manners without one: recording runs nothing, replaying runs what was recorded"
    def __init__(self): self.recorded = None
    def replay(self): self.recorded()


@pytest.mark.parametrize("every", [1, 4])
def test_the_warm_up_leaves_no_trace(every, monkeypatch):
    "The calls for a CUDA graph in their order, with fakes: three rounds of warm-up change neither lengths nor roots nor any text"
    ctxs, n, seeds, stop, temperature = batch(4, 5)
    e = Engine(*pair(), TREE, temperature=temperature, every=every)
    want, run, warm = e.generate(ctxs, n, seeds, stop), BatchRun(e, e.requests(ctxs, n, seeds, stop)), []
    was = [run.room.clone(), run.root.clone(), run.rows.lengths.clone(), run.drafts.lengths.clone()]
    stream = SimpleNamespace(wait_stream=lambda other: warm.append("wait"))
    for name, fake in dict(Stream=lambda: stream, CUDAGraph=Graph, current_stream=lambda: stream, stream=lambda s: contextlib.nullcontext()).items(): monkeypatch.setattr(torch.cuda, name, fake)
    class Shown:
        root, room, turn = SimpleNamespace(device=torch.device("cuda")), run.room, run.turn
        recording = False
        def round(self): return warm.append("recorded") if self.recording else (warm.append("round"), run.round())
    shown = Shown()
    @contextlib.contextmanager
    def recording(graph):
        shown.recording, graph.recorded = True, run.round
        yield
    monkeypatch.setattr(torch.cuda, "graph", recording)
    run.step = module.cuda_graph(shown)
    assert warm == ["wait", *["round"]*3, "wait", "recorded"]
    assert all(torch.equal(a, b) for a, b in zip(was, [run.room, run.root, run.rows.lengths, run.drafts.lengths]))
    while max(run.wants): run.advance()
    assert run.texts() == want


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_round_on_cuda():
    "Where there is a GPU: rounds replayed from a graph, under the watch for synchronisation, give the texts of the CPU"
    cuda = [copy.deepcopy(m).cuda() for m in near(llama(0), .03)]
    ctxs, n, seeds, stop, temperature = batch(3, 6)
    run = BatchRun(e := Engine(*cuda, TREE, temperature=temperature), e.requests(ctxs, n, seeds, stop))
    step = run.step
    def watched():
        torch.cuda.set_sync_debug_mode("error")
        try: step()
        finally: torch.cuda.set_sync_debug_mode("default")
    run.step = watched
    while max(run.wants): run.advance()
    assert run.texts() == Engine(*pair(), TREE, temperature=temperature).generate(ctxs, n, seeds, stop)


@proves("prop-waiting")
def test_the_batch_waits_for_its_slowest_text():
    "Looked at every round, a batch takes as many rounds as its slowest text alone, and each text is noted in as many as it takes alone"
    e, (ctxs, n, seeds, _, _) = Engine(*pair(), TREE, every=1), batch(2, 5)
    run = BatchRun(e, e.requests(ctxs, n, seeds))
    steps, step = [], run.step
    run.step = lambda: (steps.append(1), step())
    while max(run.wants): run.advance()
    R = [len(alone(*pair(), TREE, without_replacement, 1., *rest).ledger.rounds) for rest in zip(ctxs, n, seeds)]
    assert len(steps) == max(R) and [len(l.rounds) for l in run.ledgers] == R and len(set(R)) > 2
