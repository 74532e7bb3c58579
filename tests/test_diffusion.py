"""33b_diffusion: blocks and injected rows, what a slot reads, the losses, selector, Markov and confidence
heads, the scheduler, and closed forms on the branching source"""
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from math import prod

import numpy as np, pytest, torch
from hypothesis import strategies as st

from helpers import chain, examples, faithful, proves, refuses, round_tokens, seeds, tiny
from networks import batch_of, random_texts
from published import drafted
from specref import (Chain, Costs, exact, HFModel, law_of, loop_law, normalize, one_hot, random_table,
                     reject, Seeded, TableModel, target_law, Tree, tv_outcomes)
from specref.draft.length import ScheduledChain, budget_by_goodput
from specref.train.diffusion import (DFlash, DFlash2, DiffusionDraft, DSpark, SparkDraft, SurvivalGoodput,
                                     injected_attention, order_tokens, random_anchors, scheduled_block,
                                     sequential_temperatures, slot_overlap, survival_data,
                                     training_candidates)
from specref.train.falcon import block_tokens
from specref.train.harness import TargetModel, evaluate, state_dataset, train_network
from specref.train.synthetic import branch_texts, branching

V, D = 7, 3   # vocabulary; draft tokens of a block
SIZES = {DFlash: dict(block=D + 1), DFlash2: dict(block=D + 1, top=3, rank=4), DSpark: dict(block=D, rank=4)}
networks = pytest.mark.parametrize("make", SIZES)

def size_of(make): return next(kw for kind, kw in SIZES.items() if kind in make.__mro__[:3] and (
    kind is not DFlash or not issubclass(make, (DFlash2, DSpark))))

def small(make, V=V, temperature=1., **kw):
    "A network on a tiny target, all weights perturbed, and the target"
    base = TargetModel(tiny(V, layers=4))
    torch.manual_seed(1)
    net = make(base, **(size_of(make) | dict(reads=(1, 2, 3)) | kw)).double().eval()
    with torch.no_grad():
        for w in net.parameters(): w.add_(.3 * torch.randn_like(w))
    return net, HFModel(base.model, temperature, keep=net.reads, check=False)

texts = partial(random_texts, V, T=12)

# The network, row by row

def hand_rotated(layer, y, s):  # (heads, width) at position s
    cos, sin = layer.rotary(y, torch.tensor([[s]]))
    left, right = y.chunk(2, -1)
    return y * cos[0] + torch.cat([-right, left], -1) * sin[0]

def hand_heads(layer, y): return y.unflatten(-1, (-1, layer.self_attn.head_dim))

def hand_attention(layer, c, u, a):  # context features before a, the block's rows
    "Every row of the block attends to every context feature and to every row of the block"
    m, rows, out = layer.self_attn, [*c, *u], []
    at = [*range(len(c)), *range(a, a + len(u))]
    keys = torch.stack([hand_rotated(layer, layer.k_norm(hand_heads(layer, m.k_proj(x))), s)
                        for x, s in zip(rows, at)])
    values = torch.stack([hand_heads(layer, m.v_proj(x)) for x in rows])   # (rows, 1, width)
    for i, x in enumerate(u):
        q = hand_rotated(layer, layer.q_norm(hand_heads(layer, m.q_proj(x))), a + i)
        w = (keys[:, 0] @ q.T / m.head_dim**.5).softmax(0)   # (rows, heads)
        out.append(m.o_proj((w.T @ values[:, 0]).flatten()))
    return torch.stack(out)

def hand_convolved(conv, sublayer, u):
    "Two taps before and two after, both made from the rows before the first; none reads beyond the block"
    change = conv.proj(u).unflatten(-1, (2, 2, -1))
    def taps(y, side):
        def at(t, j): return conv.base[side, j] + change[t, side, j].repeat_interleave(16)
        return torch.stack([at(t, 0)*y[t] + (at(t, 1)*y[t-1] if t else 0) for t in range(len(y))])
    return taps(sublayer(taps(u, 0)), 1)

def hand_slots(net, batch, n, a):  # -> (slots, d)
    "The states of one block, row by row"
    c = net.context_norm(net.fc(torch.cat([batch.states[k][n, :a] for k in net.reads], -1)))
    masks = [net.mask] * (D - 1 if isinstance(net, DSpark) else D)
    h = torch.stack([net.base[0].embed(batch.x[n, a]), *masks])
    for layer in net.decoder:
        attend, u = partial(hand_attention, layer, c, a=a), layer.input_layernorm(h)
        around = getattr(layer, "convolutions", None)
        h = h + (hand_convolved(around[0], attend, u) if around else attend(u))
        u = layer.post_attention_layernorm(h)
        h = h + (hand_convolved(around[1], layer.mlp, u) if around else layer.mlp(u))
    return net.norm(h)[-D:]

def unlike(kind, method, change):
    "A network with another method"
    return type(kind.__name__, (kind,), {method: change(getattr(kind, method))})

def causal(_):
    "Attention inside the block to rows before alone"
    def attention(self, rows, anchors):
        def attend(i, q, k, v):
            parts = [one_row(i, q, k, v, t) for t in range(self.block)]
            return torch.stack(parts, 3).flatten(2, 3)
        def one_row(i, q, k, v, t):
            def cut(y): return y.unflatten(2, (-1, self.block))[:, :, :, :t+1].flatten(2, 3)
            near = injected_attention(rows, anchors, t + 1)
            return near(i, cut(q), cut(k), cut(v)).unflatten(2, (-1, t + 1))[:, :, :, t]
        return attend
    return attention

def unmasked_anchor(_):
    "The block reads the target's state of its anchor, which the target does not have yet"
    return lambda self, rows, anchors: injected_attention(rows, anchors + 1, self.block)

def once(_):
    "Context features in the first layer alone"
    def attention(self, rows, anchors):
        here = injected_attention(rows, anchors, self.block)
        none = injected_attention([(k[:, :, :0], v[:, :, :0]) for k, v in rows], anchors, self.block)
        return lambda i, *heads: none(i, *heads) if i else here(i, *heads)
    return attention

TOY_ATTENTION = {"a causal block": causal, "the anchor's own state": unmasked_anchor,
                 "features read once": once}

def moved(kind, first):
    "The same number of slots, the anchor as a predictor (`first` 0) or not (1)"
    def init(self, base, block, **kw): kind.__init__(self, base, block=block + (1 if first else -1), **kw)
    return type(kind.__name__, (kind,), dict(first=first, __init__=init))

def toys(kind, method, changes):
    return {what: unlike(kind, method, change) for what, change in changes.items()}

def check_slots(kind):
    net, target = small(kind)
    batch, anchors = batch_of(target, texts()), torch.tensor([[1, 5, 8], [2, 3, 8]])
    with torch.no_grad():
        found = net.slot_states(batch, anchors)
        for n, m in product(range(2), range(3)):
            assert torch.allclose(found[n, m], hand_slots(net, batch, n, int(anchors[n, m])), atol=1e-9)

@faithful("DFlash", part="DFlash", plain={
    **toys(DFlash, "attention", TOY_ATTENTION), "the anchor predicts, labels shifted": moved(DFlash, 0)})
@proves("thm-injected")
def test_a_block_of_dflash_by_hand(subject):
    "Rows of injected features in every layer, the whole block for every row, nothing from the anchor on"
    check_slots(subject)

def without_convolutions(make):
    def make_layers(self, *args):
        make(self, *args)
        for layer in self.decoder: layer.around = lambda i, sublayer, u: sublayer(u)
    return make_layers

@faithful("DFlash 2", part="DFlash2", plain={
    **toys(DFlash2, "attention", TOY_ATTENTION),
    "no convolution": unlike(DFlash2, "make_layers", without_convolutions)})
def test_a_block_of_dflash_2_by_hand(subject):
    "As DFlash, with two taps around attention and MLP that end at the block's edge"
    check_slots(subject)

@faithful("DSpark", part="DSpark", plain={
    **toys(DSpark, "attention", TOY_ATTENTION), "masks alone predict, labels in place": moved(DSpark, 1)})
def test_a_block_of_dspark_by_hand(subject):
    "The anchor is the first of D predictors"
    check_slots(subject)

@proves("prop-no-correction")
@torch.no_grad()
def test_without_correction_dspark_is_parallel():
    "With W1 W2 = 0 the logits are those of the head alone, and the law of a block is a product"
    net, target = small(DSpark, 3)
    net.W2.weight.zero_()
    ctx, draft = (0, 1, 1, 2), SparkDraft(net, target)
    draft.denoise(ctx)
    rows = net.base[0].head(draft.h).softmax(-1).numpy()
    law = law_of(lambda rng: Chain(draft, D)(ctx, rng).path(D))
    for path, w in law.items(): assert abs(w - prod(rows[j][x] for j, x in enumerate(path))) < 1e-12

def test_a_new_dspark_is_parallel_and_a_new_dflash_2_is_dflash():
    "At the beginning the corrections are zero and the convolutions are the identity"
    base = TargetModel(tiny(V, layers=4))
    torch.manual_seed(0)
    a, b = DFlash2(base, reads=(1, 2), block=4, top=V, rank=4), DSpark(base, reads=(1, 2), block=3, rank=4)
    assert not b.W2.weight.any() and not a.succ.weight.any()
    plain = DFlash(base, reads=(1, 2), block=4)
    plain.load_state_dict({k: w for k, w in a.state_dict().items() if k in plain.state_dict()})
    batch = batch_of(HFModel(base.model, check=False), texts())
    for z, y in zip(a.guesses(batch, 3), plain.guesses(batch, 3)): assert torch.allclose(z, y)

# Drafting

@networks
def test_one_pass_a_context(make):
    "A chain takes one pass over the block, also where its tokens are drawn one after the other"
    net, target = small(make)
    draft = SparkDraft(net, target) if make is DSpark else DiffusionDraft(net, target)
    Chain(draft, D + 2)((3, 1, 4, 1), Seeded(0))
    assert (draft.meter.calls, draft.meter.tokens, draft.meter.layer_tokens) == (1, net.block, 2*net.block)
    tree = chain((3, 1, 4, 1), [2]*(D + 1))
    assert np.allclose(draft(tree)[D + 1], 1/V) and draft.meter.calls == 1
    assert np.allclose(draft(Tree((3,)))[0], 1/V) and draft.meter.calls == 1

# The losses

@proves("prop-rows-for-tokens")
def test_rows_have_the_gradient_of_tokens_in_the_mean():
    "Over all texts of the target the gradient with its rows as labels is that with sampled tokens"
    net, target = small(DFlash, 2, block=3)
    base, total = net.base[0], {}
    for soft in (True, False):
        net.soft = soft
        net.zero_grad()
        for rest in product(range(2), repeat=3):
            batch = batch_of(target, torch.tensor([(1, *rest)]))
            logp = base.head(batch.states[4])[0].log_softmax(-1)
            w = sum(logp[i, x] for i, x in enumerate(rest)).exp().item()
            (w * net.block_loss(batch, torch.tensor([[1]]))).backward()
        total[soft] = [p.grad.clone() for p in net.parameters()]
    assert max(g.abs().max() for g in total[True]) > 1e-3
    for a, b in zip(*total.values()): assert torch.allclose(a, b, atol=1e-5)   # norms are in single precision

def test_anchors():
    "Different, with a token before and D tokens behind, each place as often as any other"
    torch.manual_seed(0)
    x = torch.zeros(4000, 10, dtype=torch.long)
    anchors = random_anchors(x, 3, D)
    assert anchors.shape == (4000, 3) and anchors.min() == 1 and anchors.max() + D == 9
    assert all(len({*row}) == 3 for row in anchors[:200].tolist())
    share = torch.bincount(anchors.flatten(), minlength=7)[1:] / anchors.numel()   # of 12,000: sigma .0034
    assert (share - 1/6).abs().max() < .02
    assert random_anchors(x, 99, D).shape == (4000, 6)
    refuses("batch", random_anchors, x[:, :4], 3, D)

# The selector

@examples(20, seeds, st.integers(2, 6), st.integers(0, 6))
def test_the_candidates_of_training(seed, top, true):
    "The best, in order; the true token replaces the last one if it is missing"
    z = torch.randn(V, generator=torch.Generator().manual_seed(seed))
    best = z.topk(top).indices.tolist()
    found = training_candidates(z, torch.tensor(true), top).tolist()
    assert found == (best if true in best else [*best[:-1], true])

@proves("thm-selector")
@torch.no_grad()
def test_support_of_the_selector():
    "A distribution on the `top` tokens of the unary scores, whatever token stands before"
    net, target = small(DFlash2)
    h = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for x in range(V):
        q = net.conditional(h, torch.full((5,), x)).softmax(-1)
        best = net.base[0].head(h).topk(3).indices
        assert ((q > 0).sum(-1) == 3).all() and (q.gather(-1, best) > 0).all()
        assert torch.allclose(q.sum(-1), torch.ones(5, dtype=torch.float64))

UNARY = exact(5, 3, 1, 1), exact(1, 2, 4, 3), exact(2, 2, 3, 3)   # by slot; the first two are candidates
def weights(j, x):  # fractions: the candidates' unary weights times a pair weight; zero elsewhere
    best = sorted(range(4), key=lambda y: -UNARY[j][y])[:2]
    return np.array([UNARY[j][y] * (1 + (x + 2*y) % 3) if y in best else Fraction(0) for y in range(4)])
def candidate_row(text): return normalize(weights((len(text) - 1) % 3, text[-1]))

def walk(state=candidate_row, draw=lambda q: q):
    "A chain of three drawn from `draw` of the candidates' row, with the edge law `state`"
    def drafter(ctx, rng):
        tree = Tree(ctx)
        for node in range(3):
            x = rng.pick(draw(candidate_row(tree.text(node))), at=node + 1)
            tree.add(node, x, state(tree.text(node)), check=False)
        return tree
    return drafted(lambda chain: drafter)

def unnormalised(text): return weights((len(text) - 1) % 3, text[-1])
def likeliest(q): return one_hot(int(np.argmax(q)), 4, exact=True)

@faithful("DFlash 2", plain={
    "weights that do not sum to one": walk(unnormalised),
    "soft rows for a draft of the likeliest": walk(draw=likeliest),
    "the unary row": walk(lambda text: UNARY[(len(text) - 1) % 3])})
@proves("thm-selector")
def test_the_selector_exactly(subject):
    "In fractions: a chain has the product of its rows, and the first two tokens are the target's"
    system, target = subject(TableModel(4, candidate_row), gamma=3), random_table(4, 3, zeros=False)
    law = law_of(lambda rng: system.drafter((0,), rng).path(3))
    for path, w in law.items(): assert w == prod(candidate_row((0, *path[:j]))[x] for j, x in enumerate(path))
    assert law_of(lambda rng: tuple(system(target, (0,), 2, rng))) == target_law(target, (0,), 2)

# The confidence and the scheduler

@torch.no_grad()
def test_the_confidence_does_not_read_the_token_it_is_about():
    "sigmoid of h and W1 of the token before; the same for every token drawn after it; 0 behind the block"
    net, target = small(DSpark)
    draft, ctx = SparkDraft(net, target), (3, 1, 4, 1)
    tree = chain(ctx, (2, 6, 5))
    found = [draft.confidence(tree, i) for i in range(4)]
    for j, x in enumerate((1, 2, 6)):
        c = net.confidence.weight[0] @ torch.cat([draft.h[j], net.W1.weight[x]]) + net.confidence.bias[0]
        assert found[j] == pytest.approx(torch.sigmoid(c).item())
        cooled = draft.confidence(tree, j, (2., 3., 4.))
        assert cooled == pytest.approx(torch.sigmoid(c / (2. + j)).item())
        assert draft.confidence(chain(ctx, (2, 6, 5)[:j]), j) == found[j]
    assert found[3] == 0 and draft.confidence(Tree((3,)), 0) == 0
    assert abs(draft.confidence(chain(ctx, (0,)), 1) - found[1]) > 1e-6

SLOW = Costs({1: 1, 2: 2, 3: 20/9}, draft=0)   # tokens a second: 1, 1/2, .45
P, Q = TableModel(2, lambda text: exact(7, 3)), TableModel(2, lambda text: exact(1, 1))
def sure(tree, node): return .8 if node == 0 else .9 * (tree.token[node] == 0)
def retrospective(ctx, rng):
    "Wrong: draws both tokens, and verifies as many as have the largest goodput of all"
    full, cut, rule = ScheduledChain(Q, most=2)(ctx, rng), Tree(ctx), SurvivalGoodput(sure, SLOW)
    survival = [sure(full, 0), sure(full, 0) * sure(full, 1)]
    for i in range(budget_by_goodput([survival], rule.seconds, False)):
        cut.add(i, full.token[i + 1], full.law[i + 1])
    return cut

def by_drawn_token(ctx, rng):
    "Wrong: a token that is not the likelier one of the target is dropped after it was drawn"
    full = ScheduledChain(Q, most=1)(ctx, rng)
    return full if full.token[1] == 0 else Tree(ctx)

@faithful("DSpark", plain={"the best of all lengths": drafted(lambda chain: retrospective),
                           "a look at the drawn token": drafted(lambda chain: by_drawn_token)})
@proves("prop-scheduler")
def test_the_scheduler_does_not_anticipate(subject):
    "7/10 and 3/10 for the first token; a scheduler that compares all lengths emits 17/20 and 3/20"
    system = subject(Q, dict(schedule=SurvivalGoodput(sure, SLOW)), gamma=2)
    assert law_of(lambda rng: tuple(system(P, (0,), 1, rng))) == target_law(P, (0,), 1)

def test_it_stops_at_the_first_decrease():
    "Longer while (1 + Σ survival) / seconds does not fall, by hand"
    for c, slope, want in ((.9, .1, 5), (.7, .3, 2), (.2, 1., 0)):
        rule = SurvivalGoodput(lambda tree, node, c=c: c, Costs({1: 1, 2: 1 + slope}, draft=.2))
        rate = [sum(c**k for k in range(n + 1)) / (1.2 + slope*n) for n in range(6)]
        n = next((n for n in range(5) if rate[n + 1] < rate[n]), 5)
        lengths = [k for k in range(5) if rule.more(chain((0,), [0]*k), None)]
        assert lengths == [*range(n)] and n == want
    refuses("confidence", SurvivalGoodput, .8, SLOW)
    refuses("costs", SurvivalGoodput, sure, 3)

def test_a_scheduled_network_is_exact():
    "Lengths from the confidence head: two tokens of a vocabulary of two to 1e-12"
    net, target = small(DSpark, 2, .7)
    drafter = scheduled_block(SparkDraft(net, target), Costs({1: 1, 2: 1.4}, draft=.2), 3, (1., 2., 2.))
    lengths = {len(tree) - 1 for tree in law_of(lambda rng: drafter((0, 1, 1), rng))}
    found = loop_law(target, drafter, reject, (0, 1, 1), 3)
    assert len(lengths) > 1
    assert tv_outcomes(found, target_law(HFModel(target.model, .7, check=False), (0, 1, 1), 3)) < 1e-12

@torch.no_grad()
def test_survival_by_hand():
    "At every anchor: the logits, and the product of min(1, q/p) along the text"
    net, target = small(DSpark)
    batch, rows = batch_of(target, texts()), []
    for n, a in product(range(2), range(1, 12 - D)):
        h, alive = hand_slots(net, batch, n, a), 1.
        for k in range(D):
            x, y = batch.x[n, a + k], int(batch.x[n, a + k + 1])
            q = net.conditional(h[k], x).softmax(-1)[y]
            alive = alive * (q / net.base[0].head(batch.states[4][n, a + k]).softmax(-1)[y]).clamp(max=1)
            rows.append((net.confidence_logits(h[k], x).item(), alive.item()))
    found = np.stack(survival_data(net, batch), -1).reshape(-1, 2)
    assert np.allclose(found, rows, atol=1e-9)
    marks = torch.arange(12).expand(2, -1) == 4   # the anchor before the token that counts, in both texts
    counted = np.stack(survival_data(net, replace(batch, counts=marks)), -1)
    assert np.allclose(counted, found.reshape(2, -1, D, 2)[:, 2], atol=1e-9)

def test_temperatures_are_recovered():
    "Confidences twice and half as sure as they should be: 2 and 1/2, whatever those of earlier slots"
    g = np.random.default_rng(0)
    true = g.normal(0, 1.5, (4000, 3))
    survival = np.cumprod(1 / (1 + np.exp(-true)), 1)
    found = sequential_temperatures(true * (2, .5, 1), survival)
    assert np.allclose(found, (2, .5, 1), rtol=.05)
    refuses("survival", sequential_temperatures, true, survival[:, :2])

# Closed forms

def gap_row(text, B, gap, tail, V):
    "The source: branch b is token b, fillers follow, then tail token i of branch b"
    last = max(i for i, x in enumerate(text) if x < B)
    f, b = len(text) - 1 - last, text[last]   # the phase of the last token
    if f == gap + tail: return exact(*[1]*B, *[0]*(V - B))
    return one_hot(B + f if f < gap else B + gap + b*tail + f - gap, V, exact=True)

def reading(order, B, gap, tail, V):
    "The distribution of a slot given the context and the `order` tokens before the slot alone"
    def runs(text, n):
        if n == 0: return {text: Fraction(1)}
        out = {}
        for x, w in enumerate(gap_row(text, B, gap, tail, V)):
            for path, v in (runs((*text, x), n - 1) if w else {}).items(): out[path] = w*v
        return out
    def law(text, n):   # a context of n tokens
        k = len(text) - n
        seen, keep = runs(text[:n], k), min(order, k)
        same = {path: w for path, w in seen.items() if path[len(path) - keep:] == text[len(text) - keep:]}
        mass = sum(same.values())
        return sum(w/mass * gap_row(path, B, gap, tail, V) for path, w in same.items())
    return law

@proves("thm-correction-order")
@pytest.mark.parametrize("B, gap, tail, gamma", [(2, 0, 2, 3), (2, 1, 2, 4), (3, 2, 1, 4), (2, 1, 1, 5)])
def test_orders_enumerated(B, gap, tail, gamma):
    "Every path of a round, from every phase, in fractions: the overlaps and the mean tokens of the theorem"
    V, period = B*(tail + 1) + gap, 1 + gap + tail
    whole = (0, *range(B, B + gap), *range(B + gap, B + gap + tail))   # one branch, from its first token
    for order in range(4):
        law, means = reading(order, B, gap, tail, V), []
        for f in range(period):
            ctx = whole[:f + 1]
            target = TableModel(V, lambda text: gap_row(text, B, gap, tail, V))
            draft = TableModel(V, lambda text: law(text, f + 1))
            means.append(round_tokens(target, Chain(draft, gamma), ctx=ctx).mean())
        assert sum(means) / Fraction(period) == order_tokens(B, gap, tail, gamma, order)

@proves("thm-correction-order")
def test_orders():
    "Order 0 without a gap is Falcon's block; one token repairs all but the place after a gap; more, all"
    for B, tail, gamma in product((2, 4), (1, 3), (2, 5)):
        assert order_tokens(B, 0, tail, gamma, 0) == block_tokens(B, tail, gamma, gamma)
        assert order_tokens(B, 0, tail, gamma, 1) == gamma + 1
        for gap in (1, 2):
            found = [order_tokens(B, gap, tail, gamma, order) for order in range(gap + 2)]
            assert found == sorted(found) and found[-1] == gamma + 1
    assert slot_overlap(4, 1, 3, 4, 3, 0) == slot_overlap(4, 1, 3, 4, 3, 1) == Fraction(1, 4)
    assert slot_overlap(4, 1, 3, 4, 4, 0) == Fraction(1, 4) and slot_overlap(4, 1, 3, 4, 4, 1) == 1

@proves("prop-rank-one")
@examples(20, st.integers(2, 9), st.integers(1, 12))
def test_rank_one_is_enough(B, c):
    "U(y) = -c y², W1 W2 = 2 c x y: the right tail has probability at least 1 - 2/(e^c - 1)"
    y = np.arange(B)
    for x in range(B):
        z = -c*y**2 + 2*c*x*y
        q = np.exp(z - z.max())
        assert q[x] / q.sum() >= 1 - 2/(np.exp(c) - 1)

B, TAIL, GAMMA = 4, 3, 3
HERE = {"DFlash": (DFlash, dict(block=4), 0, 200), "DSpark": (DSpark, dict(block=3, rank=8), 1, 160),
        "DFlash 2": (DFlash2, dict(block=4, rank=8, top=4), 1, 160)}

@proves("thm-correction-order")
@pytest.mark.parametrize("name", HERE)
def test_training_reaches_the_closed_form(name, tmp_path):
    "On the branching source, to a tenth of a token; the closed form of the other family is a token away"
    make, size, order, steps = HERE[name]
    base = TargetModel(branching(B, TAIL).float())
    def part(n, seed): return state_dataset(base, branch_texts(B, TAIL, n, 25, seed), (0, 1), tmp_path)
    torch.manual_seed(0)
    net = make(base, reads=(0, 1), layers=1, anchors=8, **size)
    how = dict(eval_steps=steps, depth=3)
    train_network(net, base, part(256, 0), part(16, 1)[:], steps, 2e-2, tmp_path/"net", **how)
    tokens, overlaps = evaluate(net, base, part(64, 2)[:], GAMMA)
    want, other = (float(order_tokens(B, 0, TAIL, GAMMA, o)) for o in (order, 1 - order))
    assert abs(tokens - want) < .1 < .5 < abs(want - other), (tokens, overlaps)
