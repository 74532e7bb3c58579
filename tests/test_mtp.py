"31b_mtp: the gradient of the sum one loss at a time, modules by hand, calls of the chain, released layout"
from copy import deepcopy
from functools import partial
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from helpers import faithful, proves, refuses
from specref.core.loop import rounds
from specref.core.rng import Seeded
from specref.core.tree import Tree
from specref.models.embedded import raw_model
from specref.models.transformer import HFModel
from specref.train.features import causal_attention
from specref.train.harness import StateDataset, TargetModel
from specref.train.mtp import (DeepSeek, Gloeckle, ModuleChainDraft, RecursiveMTP, SelfDraft,
                               backward_in_turn, first_head_loss, load_released, released_weights,
                               row_positions, shifted_loss, trunk)
from specref.verify.reject import reject
from specref.core.drafters import Chain

torch.set_num_threads(1)
V, WIDTH = 61, 32

def tiny(seed=0, V=V, tied=False):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=WIDTH, intermediate_size=2*WIDTH, num_hidden_layers=2,
                                        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=.3, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)).double()

def perturbed(net, by=.3):
    torch.manual_seed(0)
    with torch.no_grad():
        for w in net.parameters(): w.add_(by * torch.randn_like(w))
    return net

def batch_of(model, x):
    with torch.no_grad():
        hidden = model(input_ids=x, output_hidden_states=True, use_cache=False).hidden_states
    return StateDataset(x, dict(enumerate(hidden)))

def text(rows=2, T=24, V=V): return torch.randint(V, (rows, T), generator=torch.Generator().manual_seed(0))

# The backward pass

def at_once(z, losses): sum(loss_of(z) for loss_of in losses).backward()

def gradients(model, net, x, way):
    "The gradient of every weight after one backward pass of some kind"
    model.requires_grad_(True)
    for w in (*model.parameters(), *net.parameters()): w.grad = None
    way(trunk(model)(input_ids=x, use_cache=False).last_hidden_state,
        [partial(first_head_loss, model, x), *net.losses(x)])
    return [w.grad for w in (*model.parameters(), *net.parameters())]

class Box:
    def __init__(self, x): self.x = x

def stored_at_once(f):
    "The most tensors of V columns, larger than the head, that autograd stored at once while f ran"
    boxes, most = {}, [0]
    def pack(x):
        if x.shape[-1:] != (V,) or x.numel() <= V*WIDTH: return x
        box = Box(x)
        boxes.setdefault(x.untyped_storage().data_ptr(), WeakSet()).add(box)
        most[0] = max(most[0], sum(map(bool, boxes.values())))
        return box
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.x if isinstance(x, Box) else x): f()
    return most[0]

def frozen_trunk(z, losses):
    "The heads alone are trained"
    total = sum(loss_of(z.detach()) for loss_of in losses)
    total.backward()
    z.backward(gradient=torch.zeros_like(z))
    return total.detach()
def with_ones(z, losses):
    "Ones in place of the gradient"
    total = backward_in_turn(z.detach().requires_grad_(), losses)
    z.backward(gradient=torch.ones_like(z))
    return total

@faithful("multi-token prediction", part="specref.train.mtp.backward_in_turn", plain={
    "all losses at once": at_once, "a frozen trunk": frozen_trunk, "ones as the gradient": with_ones})
@proves("thm-in-turn")
@pytest.mark.parametrize("n, tied", [(2, True), (4, False)])
def test_in_turn_gives_the_gradient_of_the_sum(tied, n, subject):
    "Every weight of trunk and heads, to 1e-12 in double and 1e-6 in single precision"
    model, x, returned = tiny(tied=tied), text(), []
    net = perturbed(Gloeckle(TargetModel(model), n))
    a, b = gradients(model, net, x, at_once), gradients(model, net, x, subject)
    assert max(abs(u - v).max() for u, v in zip(a, b)) < 1e-12 < max(abs(u).max() for u in a)
    assert stored_at_once(lambda: gradients(model, net, x, at_once)) == n
    assert stored_at_once(lambda: gradients(model, net, x, subject)) == 1
    def both(z, losses): returned.extend([subject(z, losses), sum(f(z) for f in losses)])
    gradients(model, net, x, both)
    assert abs(returned[0] - returned[1]) < 1e-12 and not returned[0].requires_grad
    a, b = gradients(model.float(), net.float(), x, at_once), gradients(model, net, x, subject)
    assert max((abs(u - v).max() / abs(u).max().clamp(min=1)).item() for u, v in zip(a, b)) < 1e-6

def test_the_copied_listing_fails():
    "`d.requires_grad = False` and `z.backward()` raise, and the trunk has no gradient"
    model, x = tiny(), text()
    net, below = perturbed(Gloeckle(TargetModel(model))), trunk(model)
    def copied(z, losses):
        d = z.detach()
        for loss_of in losses: loss_of(d).backward()
        assert d.grad is None
        for how in ({}, dict(gradient=d.grad)):
            with pytest.raises(RuntimeError, match="scalar"): z.backward(**how)
    gradients(model, net, x, copied)
    assert all(w.grad is None for w in below.parameters())

def test_ones_in_place_of_the_gradient_are_wrong():
    model, x = tiny(), text()
    net = perturbed(Gloeckle(TargetModel(model)))
    def ones(z, losses):
        for loss_of in losses: loss_of(z.detach()).backward()
        z.backward(gradient=torch.ones_like(z))
    a, b = gradients(model, net, x, backward_in_turn)[0], gradients(model, net, x, ones)[0]
    assert abs(a - b).max() > 1e-3

def test_the_trunk_is_the_model_without_its_last_layer():
    "It shares the model's weights; with the last layer, norm and head its loss is the model's"
    model, x = tiny(), text()
    z = trunk(model)(input_ids=x, use_cache=False).last_hidden_state
    out = model(input_ids=x, output_hidden_states=True, use_cache=False)
    assert torch.equal(z, out.hidden_states[1])
    assert abs(first_head_loss(model, x, z) - shifted_loss(out.logits, x, 1)) < 1e-12
    assert {id(w) for w in trunk(model).parameters()} < {id(w) for w in model.parameters()}
    assert len(model.model.layers) == 2 and not isinstance(model.model.norm, nn.Identity)

class RandomLayers(Gloeckle):
    "Heads that do not begin as the last layer"
    def __init__(self, base, n=4):
        super().__init__(base, n)
        for w in self.heads.parameters():
            if w.dim() > 1: nn.init.normal_(w, std=.1)
class AfterTheLastLayer(Gloeckle):
    "Heads on the last state, as Medusa's"
    def __init__(self, base, n=4):
        super().__init__(base, n)
        self.reads = (base.layers,)
class OwnNorm(Gloeckle):
    def __init__(self, base, n=4):
        super().__init__(base, n)
        self.norm = deepcopy(self.body[0].norm).requires_grad_(True)
    def logits(self, h): return self.base[0].head(getattr(self, "norm", self.body[0].norm)(h))

@faithful("multi-token prediction", part="Gloeckle", plain={
    "random layers": RandomLayers, "the last state": AfterTheLastLayer, "a norm of its own": OwnNorm})
@pytest.mark.parametrize("make", [tiny, lambda: raw_model("target", torch.float64)])
def test_untrained_heads_are_the_target(make, subject):
    "Each head is a copy of the last layer; norm and output head are the target's"
    model = make()
    base = TargetModel(model)
    net, x = subject(base), text(V=base.V)
    logits = model(input_ids=x, use_cache=False).logits
    for z in net.guesses(batch_of(model, x), 3): assert abs(z - logits).max() < 1e-10
    layer = sum(w.numel() for w in model.base_model.layers[-1].parameters())
    assert sum(w.numel() for w in net.parameters()) == 3*layer and net.body[0].norm is model.base_model.norm

# The modules

@proves("thm-chain-rows")
def test_the_chain_evaluates_a_module_once_for_each_token():
    """A context of c tokens and a chain of D drafts: D layers for each row of the context, D - j for the
    draft at depth j; uniform beyond"""
    model, D, c = tiny(), 3, 9
    draft, ctx = ModuleChainDraft(DeepSeek(TargetModel(model), D),
                                  HFModel(model, keep=(2,), check=False)), text()[0, :9].tolist()
    next(rounds(draft.target, Chain(draft, D), reject, ctx, Seeded(0)))
    assert draft.meter.layer_tokens == D*(c - 1) + sum(D - j for j in range(1, D))
    assert draft.meter.tokens == c - 1 + D - 1
    heads, deep = SelfDraft(Gloeckle(TargetModel(model)), HFModel(model, keep=(1,), check=False)), Tree(ctx)
    for j in range(D): deep.add(j, 1)
    assert all(np.allclose(q(deep)[D], 1/V) for q in (draft, heads))

class FrozenTrunk(DeepSeek):
    "The modules alone are trained"
    def states(self, batch):
        return super().states(StateDataset(batch.x, {k: h.detach() for k, h in batch.states.items()}))
class SharedModule(DeepSeek):
    "One module for all depths, as in FastMTP"
    def __init__(self, base, D=1):
        super().__init__(base, D)
        self.chain = nn.ModuleList([self.chain[0]]*D)
class TrainedHead(DeepSeek):
    "Trains the target's embedding and head as its own weights"
    def __init__(self, base, D=1):
        super().__init__(base, D)
        self.embed, self.head = base.embed, base.head

@faithful("DeepSeek MTP", part="DeepSeek", plain={
    "a frozen trunk": FrozenTrunk, "one module for all depths": SharedModule,
    "embedding and head as its own": TrainedHead})
def test_embedding_and_head_are_the_targets_and_the_trunk_is_trained(subject):
    """With states in the graph every weight has a gradient, the embedding also from the modules, and each
    depth has its own module"""
    model, x = tiny(), text()
    base = TargetModel(model)
    net = subject(base, 2)
    assert sum(w.numel() for w in net.parameters()) == 2*sum(w.numel() for w in net.chain[0].parameters())
    model.requires_grad_(True)
    assert not {w.data_ptr() for w in net.parameters()} & {w.data_ptr() for w in model.parameters()}
    assert all(m.proj.weight.shape == (WIDTH, 2*WIDTH) for m in net.chain)
    out = model(input_ids=x, output_hidden_states=True, use_cache=False)
    net.loss(StateDataset(x, {2: out.hidden_states[-1]}), 0).backward()
    assert all(w.grad is not None and w.grad.any() for w in (*model.parameters(), *net.parameters()))

def one_layer(config, layer, u, at):
    "The output of transformers' own model of one layer on `u`, without its last norm"
    model = LlamaModel(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})).double().eval()
    own = model.layers[0].state_dict()
    model.layers[0].load_state_dict({k: w for k, w in layer.state_dict().items() if k in own})
    model.norm = nn.Identity()
    return model(inputs_embeds=u, position_ids=at, use_cache=False).last_hidden_state

class Parallel(DeepSeek):
    "Every module on the states of the trunk"
    def states(self, batch):
        h = batch.states[self.reads[0]]
        return [module(h[:, :-k], batch.x[:, k:], row_positions(h[:, :-k], k - 1), causal_attention)
                for k, module in enumerate(self.chain, 1)]
class Unnormed(DeepSeek):
    "State and embedding as they are"
    def __init__(self, base, D=1):
        super().__init__(base, D)
        for module in self.chain: module.hnorm.forward = module.enorm.forward = lambda y: y
class EmbeddingFirst(DeepSeek):
    "The halves in the order of the release, the matrix as in the paper"
    def states(self, batch):
        for module in self.chain: module.proj.weight.data = module.proj.weight.roll(WIDTH, -1)
        out = super().states(batch)
        for module in self.chain: module.proj.weight.data = module.proj.weight.roll(-WIDTH, -1)
        return out
class DetachedChain(DeepSeek):
    "No gradient from a module into the one before it"
    def states(self, batch):
        h = [batch.states[self.reads[0]]]
        for k, module in enumerate(self.chain, 1):
            above = h[-1][:, :-1].detach()
            h.append(module(above, batch.x[:, k:], row_positions(above, k - 1), causal_attention))
        return h[1:]
class WithoutTokens(DeepSeek):
    "The next token is not read"
    def __init__(self, base, D=1):
        super().__init__(base, D)
        for module in self.chain: module.enorm.forward = torch.zeros_like

@faithful("DeepSeek MTP", part="DeepSeek", plain={
    "modules side by side": Parallel, "no norms": Unnormed, "halves exchanged": EmbeddingFirst,
    "a chain without gradient": DetachedChain, "no token": WithoutTokens})
def test_the_modules_by_hand(subject):
    "Module k: a decoder layer on the projected norms of state and embedding, then norm and head"
    model, x = tiny(), text()
    base, batch = TargetModel(model), batch_of(model, x)
    net, h = perturbed(subject(base, 2)), batch.states[2]
    rms = lambda y, w: w * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    guesses = net.guesses(batch, 2)
    with torch.no_grad():
        for k, m in enumerate(net.chain, 1):
            u = torch.cat([rms(h[:, :-1], m.hnorm.weight), rms(base.embed(x[:, k:]), m.enorm.weight)],
                          -1) @ m.proj.weight.T
            h = one_layer(model.config, m, u, torch.arange(k - 1, 23)[None])
            assert abs(guesses[k-1] - base.head(rms(h, m.norm.weight))).max() < 1e-4 < abs(guesses[k-1]).max()
    # the second loss trains the first module too, except its last norm
    shifted_loss(net.guesses(batch, 2)[1], x, 3).backward()
    trained = {name for name, w in net.chain[0].named_parameters() if w.grad is not None and w.grad.any()}
    assert trained == {name for name, _ in net.chain[0].named_parameters()} - {"norm.weight"}

def test_one_application_is_one_module():
    "RecursiveMTP with one step has DeepSeek's loss with D = 1"
    model = tiny()
    base, batch = TargetModel(model), batch_of(model, text())
    one, again = DeepSeek(base, 1), RecursiveMTP(base, 1)
    again.load_state_dict(one.state_dict())
    assert abs(one.loss(batch, 0) - again.loss(batch, 0)) < 1e-12

# The released layout

def test_released_layout_round_trip():
    "Names, shared weights and halves; a matrix whose halves are not exchanged gives other logits"
    model = tiny()
    base, batch = TargetModel(model), batch_of(model, text())
    net = perturbed(DeepSeek(base, 2))
    weights, (h, e) = released_weights(net), torch.randn(2, WIDTH).double()
    assert {k.split(".")[2] for k in weights} == {"2", "3"}
    assert torch.equal(weights["model.layers.3.embed_tokens.weight"], base.embed.weight)
    theirs = weights["model.layers.2.eh_proj.weight"]
    assert torch.allclose(theirs @ torch.cat([e, h]), net.chain[0].proj.weight @ torch.cat([h, e]),
                          atol=1e-12)
    again = load_released(DeepSeek(base, 2), weights)
    assert all(map(torch.equal, net.guesses(batch, 2), again.guesses(batch, 2)))
    rolled = {k: w.roll(WIDTH, -1) if "eh_proj" in k else w for k, w in weights.items()}
    swapped = load_released(DeepSeek(base, 2), rolled)
    assert abs(net.guesses(batch, 1)[0] - swapped.guesses(batch, 1)[0]).max() > .1

@pytest.mark.parametrize("name, w", [("model.layers.2.enorm.weight", None), ("other", torch.zeros(1)),
                                     ("model.layers.2.eh_proj.weight", torch.zeros(3)),
                                     ("model.layers.7.enorm.weight", torch.zeros(WIDTH)),
                                     ("model.layers.2.embed_tokens.weight", torch.zeros(V, WIDTH))])
def test_invalid_released_weights(name, w):
    "A weight that is missing, unknown, of another shape or not the target's is refused"
    net = DeepSeek(TargetModel(tiny()))
    weights = {k: v for k, v in released_weights(net).items() if k != name} | ({} if w is None else {name: w})
    refuses("weights", load_released, net, weights)
