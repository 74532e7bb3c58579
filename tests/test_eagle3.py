"""32a_eagle3: HASS's and EAGLE-3's own rules, the draft vocabulary, the fusion, the switches, and the
gain of unrolled training"""
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import numpy as np, pytest, torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from helpers import examples, faithful, first_failure, laws, proves, round_tokens, seeds
from networks import batch_of, random_texts, small_llama
from specref import (Chain, DynamicTree, HFModel, loop_law, overlap, prompts, reject, Seeded, TableModel,
                     target_law, Tree)
from specref.core.target import UnwarpedModel
from specref.models.embedded import DOMAINS, raw_model
from specref.train import eagle3
from specref.train.eagle import Eagle
from specref.train.eagle3 import Eagle3, Hass, frequent_tokens, top_k_loss, vocab_maps
from specref.train.features import FeatureDraft, causal_attention, unroll
from specref.train.harness import (StateDataset, TargetModel, evaluate, load_checkpoint, save_network,
                                   state_dataset, train_network)
from specref.train.registry import load_network

double = torch.float64

tiny = partial(small_llama, layers=4)

def pair(V=32, make=Eagle3, **kw):
    "A target that returns its states, an untrained network on it, and random texts"
    base = TargetModel(tiny(V))
    torch.manual_seed(1)
    net = make(base, **(dict(reads=(1, 2, 3)) if issubclass(make, Eagle3) else dict(noise=0.)), **kw)
    with torch.no_grad():   # attention that distinguishes rows
        for n, w in net.named_parameters(): w.mul_(3 if "proj" in n else 1)
    return HFModel(base.model, keep=(1, 2, 3, 4), check=False), net, batch_of(base, random_texts(V, T=9))

# The network

class OneState(Eagle3):
    "Reads one state alone, the last before the head"
    def __init__(self, base, draft=None, reads=None, **kw):
        super().__init__(base, draft, reads=(base.layers,), **kw)
class Averaged(Eagle3):
    "Reads the mean of the three states"
    def enter(self, states): return sum(states[k] for k in self.reads) / len(self.reads)
class FirstOfThree(Eagle3):
    def enter(self, states):
        return super().enter({k: h if k == self.reads[0] else 0*h for k, h in states.items()})
class Biased(Eagle3):
    def make_layers(self, base, *args):
        super().make_layers(base, *args)
        self.fc = nn.Linear(3*base.d, base.d)
class NarrowAttention(Eagle3):
    "Attention reads d numbers, as in EAGLE"
    def make_layers(self, base, config, *args):
        super().make_layers(base, config, *args)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.midlayer.self_attn, name)
            setattr(self.midlayer.self_attn, name, nn.Linear(base.d, old.out_features, bias=False))

@faithful("EAGLE-3", part="Eagle3", plain={
    "one state": OneState, "a bias": Biased, "EAGLE's attention": NarrowAttention})
def test_shapes_and_names(subject):
    "Attention reads 2d, the fusion 3d without a bias, the head has the draft vocabulary"
    base = TargetModel(tiny())
    net, normed = (subject(base, 20, reads=(1, 2, 3), fc_norm=on) for on in (False, True))
    d = base.d
    q, k, v = (net.midlayer.self_attn.get_submodule(f"{x}_proj").weight.shape for x in "qkv")
    assert q == (d, 2*d) and k == v == (d//2, 2*d)
    assert net.fc.weight.shape == (d, 3*d) and net.fc.bias is None and net.lm_head.weight.shape == (20, d)
    layer = [*(f"self_attn.{k}_proj" for k in "qkvo"), *(f"mlp.{k}_proj" for k in ("gate", "up", "down")),
             "post_attention_layernorm", "input_layernorm", "hidden_norm"]
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(net.state_dict()) == {f"midlayer.{k}.weight" for k in layer} | rest
    assert set(normed.state_dict()) - set(net.state_dict()) == {f"fc_norm.{i}.weight" for i in range(3)}
    assert subject(TargetModel(raw_model("target"))).reads == (2, 12, 21)

def test_what_attention_and_the_stream_read():
    "Attention reads embedding and feature, each behind a norm; the residual stream carries the feature alone"
    _, net, _ = pair()
    x, f, at, seen = torch.tensor([[5, 7]]), torch.randn(1, 2, 32, dtype=double), torch.arange(2)[None], []
    step, forward = lambda f, x: net.step(f, x, at, causal_attention), net.midlayer.forward
    net.midlayer.forward = lambda u, *a: seen.append(u) or forward(u, *a)
    with torch.no_grad():
        for c in (1, 9): step(c*f, x)
        assert torch.allclose(seen[0], seen[1], atol=1e-4)
        sizes = seen[0].unflatten(-1, (2, 32)).square().mean(-1)
        assert torch.allclose(sizes, torch.ones_like(sizes), atol=1e-3)
        similar = F.cosine_similarity(seen[0][..., :32], net.base[0].embed(x), -1)
        assert torch.allclose(similar, torch.ones_like(similar))
        assert not torch.equal(step(f, x), step(f, x + 1))
        net.midlayer.self_attn.o_proj.weight.zero_()
        assert torch.equal(step(f, x), step(f, x + 1)) and not torch.equal(step(f, x), step(2*f, x))

@faithful("EAGLE-3", part="Eagle3", plain={
    "one state": OneState, "the mean of three": Averaged, "the first of three": FirstOfThree})
@torch.no_grad()
def test_every_layer_is_read(subject):
    "Zeroing the columns of any of the three states changes the logits, those of the last layer do not"
    for layer in (0, 1, 2):
        _, net, batch = pair(make=subject)
        without = lambda k: StateDataset(batch.x, {**batch.states, k: 0*batch.states[k]})
        z, other = net.guesses(batch, 2), net.guesses(without(4), 2)
        net.fc.weight[:, 32*layer:32*(layer+1)] = 0
        silent, gone = net.guesses(batch, 2), net.guesses(without(layer + 1), 2)
        assert all(map(torch.equal, other, z)) and all(map(torch.equal, gone, silent))
        assert all((a - b).abs().max() > 1e-2 for a, b in zip(silent, z))

# The draft vocabulary

def some_of(V): return st.sets(st.integers(0, V-1), min_size=1)

vocabularies = st.integers(2, 40).flatmap(lambda V: st.tuples(st.just(V), some_of(V).map(sorted)))

@faithful("EAGLE-3", part="vocab_maps", plain={
    "tokens in place of offsets": lambda ids, V: (ids, vocab_maps(ids, V)[1]),
    "the first tokens": lambda ids, V: vocab_maps(torch.arange(len(ids)), V)})
@examples(30, vocabularies, **first_failure)
def test_the_maps_agree(subject, some):
    "j + d2t[j] is the j-th token that t2d allows, there and back"
    V, ids = some
    d2t, t2d = subject(torch.tensor(ids), V)
    assert (torch.arange(len(ids)) + d2t).tolist() == ids == t2d.nonzero()[:, 0].tolist()
    assert t2d.sum() == len(ids)
    assert (d2t.tolist() == ids) == (len(ids) == 1)

@examples(30, st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(1, 12))
def test_the_most_frequent(x, n):
    "No excluded token is more frequent than an included one, ties go to the lower"
    ids = frequent_tokens(np.array([x]), n, 12).tolist()
    assert ids == sorted(sorted(range(12), key=lambda y: (-x.count(y), y))[:n])

@proves("prop-missing")
@examples(30, st.integers(2, 5).flatmap(lambda V: st.tuples(laws(V), laws(V), some_of(V))))
def test_missing_tokens_cost_acceptance_only(given):
    "No distribution on D overlaps p by more than p(D), the renormalised p attains it"
    p, w, D = given
    inside = np.array([x in D for x in range(len(p))])
    mass, w = sum(p[inside]), np.where(inside, w, 0*w)
    if sum(w): assert overlap(p, w / sum(w)) <= mass
    if not mass: return
    q = np.where(inside, p, 0*p) / mass
    target, drafter = TableModel(len(p), lambda text: p), Chain(TableModel(len(p), lambda text: q), 2)
    assert overlap(p, q) == mass and loop_law(target, drafter, reject, (0,), 3) == target_law(target, (0,), 3)
    assert round_tokens(target, drafter).mean() == 1 + mass + mass**2

class OffsetAsToken(Eagle3):
    "Wrong: uses the offset as the token"
    ids = property(lambda self: self.d2t)
class ZeroLogits(Eagle3):
    "Wrong: a token outside the draft vocabulary has a logit of zero"
    def logits(self, f): return super().logits(f).clamp(min=0)
class RandomHead(Eagle3):
    "Wrong: the head does not begin with the target's rows"
    def set_draft_vocab(self, ids):
        super().set_draft_vocab(ids).lm_head.reset_parameters()
        return self

@faithful("EAGLE-3", part="Eagle3", plain={
    "the offset as the token": OffsetAsToken, "no mask": ZeroLogits, "an untrained head": RandomHead})
@examples(10, st.sets(st.integers(0, 31), min_size=1, max_size=20).map(sorted), seeds, **first_failure)
def test_drafted_tokens_are_in_the_draft_vocabulary(subject, ids, seed):
    "Rows are zero outside the draft vocabulary and the softmax of the short logits within"
    target, net, _ = pair(make=subject, draft=len(ids))
    net.set_draft_vocab(torch.tensor(ids))
    draft = FeatureDraft(net, target)
    for drafter in (Chain(draft, 3), DynamicTree(UnwarpedModel(draft), 2, 2, 4)):
        assert all(net.t2d[x] for x in drafter((1, 2, 3), Seeded(seed)).token[1:])
    q = draft(Tree((1, 2, 3)))[0]
    with torch.inference_mode(): z = net.draft_logits(draft.memory.buffer["out"][0, 1]).softmax(-1).numpy()
    assert not q[~net.t2d.numpy()].any() and abs(q.sum() - 1) < 1e-12 and np.allclose(q[ids], z)
    assert torch.equal(net.lm_head.weight, net.base[0].head.weight[ids])

def test_an_offset_is_no_token():
    "On a vocabulary with gaps the wrong network gives weight to tokens outside the draft vocabulary"
    target, net, _ = pair(V=8, draft=3)
    for n, bad in ((net, False), (OffsetAsToken(net.base[0], 3, reads=(1, 2, 3)), True)):
        n.set_draft_vocab(torch.tensor([2, 5, 7]))
        assert bool(FeatureDraft(n, target)(Tree((1, 2, 3)))[0][~n.t2d.numpy()].any()) is bad

def test_the_maps_in_a_checkpoint(tmp_path):
    "Offsets too large for half precision are stored exactly"
    base, ids = TargetModel(tiny(6000, d=16)), [3, 2049, 4099, 5999]
    net = Eagle3(base, 4, reads=(0, 4), steps=2).set_draft_vocab(torch.tensor(ids))
    save_network(net, base, tmp_path)
    back = load_checkpoint(Eagle3, base, tmp_path)
    assert back.ids.tolist() == ids and torch.equal(back.t2d, net.t2d) and back.reads == (0, 4)

# HASS's training

def gradients(net, batch):
    "Which outputs each step's loss has a gradient to"
    outs, step = [], net.step
    net.step = lambda *a: outs.append(step(*a)) or outs[-1]
    losses, net.step = net.losses(batch), step
    grads = [torch.autograd.grad(l, outs, retain_graph=True, allow_unused=True) for l in losses]
    return [[g is not None and bool(g.any()) for g in row] for row in grads]

def with_unroll(kind, how):
    "The network, its training unrolled by `how`"
    class Other(kind):
        def losses(self, *args):
            with patch.object(eagle3, "unroll", how): return super().losses(*args)
    return Other

def connected(net, batch, steps, between=None, **kw): return unroll(net, batch, steps, **kw)
def fed_by_target(net, batch, steps, **kw):
    "Every step reads the target's fused feature: no training-time test"
    return unroll(net, batch, steps, between=lambda f: net.enter(batch.states)[:, :-1])
class OneStep(Hass):
    def __init__(self, base, **kw): super().__init__(base, steps=1, **kw)

@faithful("HASS", part="Hass", plain={
    "gradients between steps": with_unroll(Hass, connected), "EAGLE's one step": OneStep})
@proves("prop-detached")
def test_no_gradient_between_steps(subject):
    "The loss of step s has a gradient to output s alone, EAGLE-3's to all up to it"
    _, net, batch = pair(make=subject)
    assert gradients(net, batch) == [[s == t for t in range(3)] for s in range(3)]
    assert gradients(pair(steps=3)[1], batch) == [[t <= s for t in range(3)] for s in range(3)]
    other = pair(make=with_unroll(Hass, connected))[1]
    for n in (net, other): n.loss(batch, 0.).backward()
    assert (net.fc.weight.grad - other.fc.weight.grad).abs().max() > 1e-4

def every_token(p, z, k): return top_k_loss(p, z, p.shape[-1])
def renormalised(p, z, k):
    best = p.topk(min(k, p.shape[-1]), -1)
    weights = best.values / best.values.sum(-1, keepdim=True)
    return -(weights * z.log_softmax(-1).gather(-1, best.indices)).sum(-1)

@faithful("HASS", part="top_k_loss", plain={"every token": every_token, "renormalised": renormalised})
@proves("prop-likely")
@examples(20, st.integers(2, 12), st.integers(1, 14), seeds, **first_failure)
def test_the_gradient_of_the_likeliest(subject, V, k, seed):
    "m q - p on the k likeliest and m q elsewhere: outside it is the normaliser's alone; least at p/m on them"
    g = torch.Generator().manual_seed(seed)
    p, z = (torch.randn(3, V, generator=g, dtype=double) for _ in range(2))
    p, z = p.softmax(-1), z.requires_grad_()
    best = torch.zeros_like(p).scatter(-1, p.topk(min(k, V), -1).indices, 1.)
    m, loss = (p*best).sum(-1, keepdim=True), subject(p, z, k).mean()
    loss.backward()
    assert torch.allclose(3*z.grad, (m*z.softmax(-1) - p*best).detach(), atol=1e-12)
    assert subject(p, (p*best/m).clamp_min(1e-300).log(), k).mean() <= loss + 1e-12

def test_hass_is_eagle_before_it_begins():
    "With one step and no weight, or before `begin`, the loss is EAGLE's, noise and all"
    _, net, batch = pair(make=Hass)
    net.noise, net.steps, net.begin = .1, 1, .8
    def losses(at):
        torch.manual_seed(0)
        mine = net.loss(batch, at)
        torch.manual_seed(0)
        return mine - Eagle.loss(net, batch, at)
    assert abs(losses(.79)) < 1e-12 and losses(.8) > 1e-3
    fed, outs, step, net.steps = [], [], net.step, 3
    net.step = lambda f, *a: fed.append(f) or outs.append(step(f, *a)) or outs[-1]
    net.losses(batch)
    assert 0 < (fed[0] - batch.states[4][:, :-1]).abs().max() <= .1
    assert len(fed) == 3 and all(torch.equal(f, o) for f, o in zip(fed[1:], outs))

# EAGLE-3's training and switches

def test_no_loss_on_the_feature():
    "The loss depends on the feature through the logits alone: states with equal logits have equal losses"
    _, net, batch = pair(V=8)
    # a direction that the head does not read: V = 8 < d
    blind = torch.linalg.svd(net.base[0].head.weight.detach())[2][-1]
    moved = StateDataset(batch.x, {**batch.states, 4: batch.states[4] + 7*blind})
    assert abs(net.loss(batch, 0.) - net.loss(moved, 0.)) < 1e-8

def switched(**switches): return lambda recipe: replace(recipe, settings=switches)
def switches(subject):
    settings = dict(subject.recipe.settings)
    settings.pop("draft", None)
    return settings

def largest_move(switches, layer):
    "The largest change of a logit when the state of one layer is ten times as large"
    _, net, batch = pair(**switches)
    large = StateDataset(batch.x, {**batch.states, layer: 10*batch.states[layer]})
    with torch.no_grad():
        return max((a - b).abs().max() for a, b in zip(net.guesses(large, 3), net.guesses(batch, 3)))

@faithful("EAGLE-3.1", plain={"EAGLE-3": "EAGLE-3", "the last norm alone": switched(norm_output=True)})
@proves("prop-scaled")
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_large_state(layer, subject):
    """One captured state times ten: with fc_norm the logits stay and the normed state grows by less than 1 +
    eps/2μ; without, they move"""
    assert largest_move(switches(subject), layer) < 1e-3
    assert largest_move({}, layer) > 1e-1 and largest_move(dict(norm_output=True), layer) > 1e-1
    assert largest_move(dict(fc_norm=True), layer) < 1e-3
    h, norm = pair()[2].states[layer], nn.RMSNorm(32, eps=.05, dtype=double)   # large: the bound is visible
    with torch.no_grad(): ratio = norm(10*h).norm(dim=-1) / norm(h).norm(dim=-1)
    assert (ratio > 1 + 1e-6).all() and (ratio < 1 + .05 / 2 / h.square().mean(-1) + 1e-6).all()

@faithful("EAGLE-3.1", plain={"EAGLE-3": "EAGLE-3", "the first norms alone": switched(fc_norm=True)})
def test_what_is_fed_back_stays_small(subject):
    """With norm_output it has the final norm's size at every step, and the head reads it as it is; EAGLE-3's
    has not, and the head reads its norm"""
    (_, net, batch), (_, old, _) = pair(**switches(subject)), pair()
    with torch.no_grad():
        for n, small in ((net, True), (old, False)):
            outs = unroll(n, batch, 4)
            sizes = [o.square().mean(-1) for o in outs]
            assert all(torch.allclose(s, torch.ones_like(s), atol=1e-3) == small for s in sizes)
            assert torch.equal(n.draft_logits(outs[0]), n.lm_head(outs[0] if small else n.norm(outs[0])))

@pytest.mark.parametrize("name", ["eagle3", "eagle31"])
def test_shipped(name):
    "The maps agree, the layers are the published ones, the switch is on in EAGLE-3.1"
    net = load_network(name)
    assert all(map(torch.equal, (net.d2t, net.t2d), vocab_maps(net.ids, 512)))
    assert net.reads == (2, 12, 21) and net.norm_output == (name == "eagle31")

@cache
def written(folder):
    "Short texts, with the states of the embedded target, to train on and to evaluate on"
    base = TargetModel(raw_model("target"))
    def states(n, seed):
        texts = [text for d in DOMAINS for text in prompts(d, n, length=40, seed=seed)]
        return state_dataset(base, np.array(texts, np.uint16), (2, 12, 21, 24), folder)
    return base, states(48, 5), states(16, 6)

@cache
def trained_overlaps(make, folder):  # -> (4,), by depth
    "The overlaps after fifty steps from the same weights"
    base, train, held = written(folder/"states")
    torch.manual_seed(0)
    net, how = make(base), dict(eval_steps=50, rows=8, depth=4)
    net, _ = train_network(net, base, train, held[:], 50, 5e-3, folder/str(id(make)), **how)
    return evaluate(net, base, held[:], 4)[1]

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("runs")

one_step = partial(Eagle3, steps=1)

@faithful("EAGLE-3", part="Eagle3", plain={
    "one step": one_step, "the target's features": with_unroll(Eagle3, fed_by_target)})
def test_flat_with_unrolled_training_and_not_without(subject, folder):
    """Trained on its own outputs the fourth draft has three quarters of the first's overlap at least (here
    .82; of the target's features: .67); trained in one step the second loses a quarter"""
    one, four = trained_overlaps(one_step, folder), trained_overlaps(subject, folder)
    assert one[1] < .75*one[0] and one[3] < one[1] and four[3] > .75*four[0]
    assert one[0] > four[0] and four[3] > one[3]   # its cost, and its gain
