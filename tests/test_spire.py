"31c_spire: memories, rows of training and of drafting, a constant cache, the loss, and the shipped weights"
from functools import partial

import numpy as np, pytest, torch

from helpers import chain, faithful, proves, refuses, tiny
from networks import batch_of, random_texts
from specref import Chain, HFModel, prompts, Seeded
from specref.models.embedded import raw_model
from specref.train.harness import StateDataset, TargetModel
from specref.train.spire import (ABLATIONS, LayerInputs, OwnMemory, RandomStart, Spire, SpireDraft,
                                 ablation, block_starts, mixed_loss)

V = 5

def small(make=Spire, perturbed=True, V=V, **kw):
    "A network on a tiny target of four layers, and the target"
    base = TargetModel(tiny(V, layers=4))
    torch.manual_seed(1)
    net = make(base, **kw).double().eval()
    with torch.no_grad():
        for w in net.parameters() if perturbed else (): w.add_(.3 * torch.randn_like(w))
    return net, HFModel(base.model, .7, keep=net.reads, check=False)

texts = partial(random_texts, V)

# The network

def hand_heads(net, y, s=None):
    "The heads of a row, rotated by the angles of position s"
    y = y.unflatten(-1, (-1, net.blocks[0].self_attn.head_dim))
    if s is None: return y
    cos, sin = net.base[0].model.base_model.rotary_emb(y, torch.tensor([[s]]))
    left, right = y.chunk(2, -1)
    return y * cos[0] + torch.cat([-right, left], -1) * sin[0]

def hand_layer(net, i, x, t, memories):  # (d,), {position: (d,)} -> (d,)
    "A layer on one token, the sums of its attention written out; one key head"
    layer, a = net.blocks[i], net.blocks[i].self_attn
    normed = {s: layer.input_layernorm(m) for s, m in memories.items()}
    keys = torch.cat([hand_heads(net, a.k_proj(m), s) for s, m in normed.items()])
    values = torch.cat([hand_heads(net, a.v_proj(m)) for m in normed.values()])
    q = hand_heads(net, a.q_proj(layer.input_layernorm(x)), t)
    w = (keys @ q.T / a.head_dim**.5).softmax(0)   # (rows, heads)
    h = x + a.o_proj((w.T @ values).flatten())
    return h + layer.mlp(layer.post_attention_layernorm(h))

def by_hand(net, batch, n, first, depth):
    "The logits of one run, a token at a time"
    own, out, mix = {}, [], net.mix.softmax(-1)
    for t in range(first, first + depth):
        states = [net.embed(batch.x[n, t])]
        places = {*range(min(t, net.sinks)), *range(max(0, t - net.window), t)}
        for i in range(net.layers):
            memories = {s: batch.states[net.reads[i]][n, s] if s < first else own[s][i] for s in places}
            states.append(hand_layer(net, i, states[-1], t, memories))
        own[t] = [sum(mix[i, k] * x for k, x in enumerate(states)) for i in range(net.layers)]
        out.append((net.head or net.embed).weight @ net.norm(states[-1]))
    return torch.stack(out)

class SwappedMemories(Spire):
    def memories(self, batch): return super().memories(batch)[::-1]
class LateMemories(Spire):
    def memories(self, batch): return [batch.states[k + 1] for k in self.reads]
class Windowless(Spire):
    def attends(self, t, s): return s < t
class WithoutSink(Spire):
    def attends(self, t, s): return (s < t) & (s >= t - self.window)

@faithful("SPIRe", part="Spire", plain={
    "no feedback": LayerInputs, "no window": Windowless, "no sink": WithoutSink,
    "memories in the other order": SwappedMemories, "memories one layer late": LateMemories,
    "no target activations": OwnMemory})
@proves("thm-drafting-runs")
def test_runs_by_hand(subject):
    "Memories of the target before the run and mixed states inside it; window and sink; a run of six"
    net, target = small(subject, window=3, sinks=1)
    batch, spire = batch_of(target, texts()), Spire.unroll
    with torch.no_grad():
        found = torch.stack(spire(net, batch, torch.tensor([[2, 6], [1, 7]]), 6), 2)
        for n, m, first in ((0, 0, 2), (0, 1, 6), (1, 0, 1), (1, 1, 7)):
            assert torch.allclose(found[n, m], by_hand(net, batch, n, first, 6), atol=1e-10)

def last_rows(net, target, x):
    "Of each layer: the draft's keys and values of a text, and those in the target's cache"
    states, at = target.states(x), torch.arange(len(x))[None]
    batch = StateDataset(torch.tensor([x]), {k: s[None] for k, s in states.items()})
    for i, (layer, memory) in enumerate(zip(net.reads, net.memories(batch))):
        for kind, mine in zip(("keys", "values"), net.rows(i, memory, at)):
            yield mine, target.memory.buffer[layer, kind][:, :, :len(x)]

class FirstLayers(Spire):
    "The first layers of the target in place of the last"
    def __init__(self, base, **kw):
        super().__init__(base, **kw)
        first = base.model.base_model.layers
        for mine, layer in zip(self.blocks, first): mine.load_state_dict(layer.state_dict())

@faithful("SPIRe", part="Spire", plain={
    "a random beginning": RandomStart, "the first layers": FirstLayers, "the other order": SwappedMemories})
@proves("prop-pruned-rows")
def test_the_beginning_has_the_targets_rows(subject):
    "Keys and values of verified tokens are those of the target's cache in its last layers, before training"
    net, _ = small(subject, perturbed=False)
    target = HFModel(net.base[0].model, keep=(2, 3, 4), check=False)
    with torch.inference_mode():
        for mine, cached in last_rows(net, target, tuple(texts(1)[0].tolist())):
            assert torch.allclose(mine, cached, atol=1e-12)

def test_what_is_trained():
    "Copies of the embedding, two layers, norm and head, and the weights of two mixtures"
    net = Spire(TargetModel(raw_model("target")))
    target = dict(net.base[0].model.model.named_parameters())
    mine = dict(net.named_parameters())
    assert torch.equal(mine["embed.weight"], target["embed_tokens.weight"]) and net.head is None
    assert not {w.data_ptr() for w in mine.values()} & {w.data_ptr() for w in target.values()}
    for name, w in mine.items():
        if name.startswith("blocks"): assert torch.equal(w, target[f"layers.{22 + int(name[7])}{name[8:]}"])
    assert mine["mix"].shape == (2, 3) and sum(2*w.numel() for w in mine.values()) < 2e6
    untied, _ = small(perturbed=False)
    assert torch.equal(untied.head.weight, untied.base[0].head.weight) and not torch.equal(
        untied.head.weight, untied.embed.weight)

# The loss

def test_blocks_do_not_overlap_and_fit():
    "Row r begins at 1 + r mod k; each block and the token after it is in the text"
    starts = block_starts(texts(6, 19), 4)
    assert starts.tolist() == [[1 + r % 4, 5 + r % 4, 9 + r % 4] for r in range(6)]
    assert starts.max() + 4 <= 18
    refuses("batch", block_starts, texts(1, 8), 4)

def test_the_mixed_loss_of_equal_distributions():
    p = torch.tensor([[.5, .25, .25], [1., 0, 0]]).clamp(min=1e-9)
    entropy = -(p * p.log()).sum(-1)
    assert torch.allclose(mixed_loss(p, p.log(), .25), (.25*entropy - .75).mean())

@pytest.fixture(scope="module")
def data():
    base = TargetModel(tiny(V, layers=4).float())
    target = HFModel(base.model, check=False)
    def part(n, seed):
        batch = batch_of(target, texts(n, 24, seed))
        return StateDataset(batch.x.numpy(), {k: s.numpy() for k, s in batch.states.items()})
    return base, part(32, 0), part(8, 1)

def test_the_ablation_trains_every_variant_alike(data, tmp_path):
    "Every part changes the result but the window, which is longer than these texts"
    base, train, held = data
    found = ablation(base, train, held[:], tmp_path, steps=2, peak=1e-2, rows=4)
    assert found.keys() == ABLATIONS.keys() and found["nothing"] == found["the window"]
    assert len({tuple(f["overlaps"]) for f in found.values()}) == len(found) - 1
    assert all(1 < f["tokens"] < 5 and len(f["overlaps"]) == 4 for f in found.values())

# As a draft model

class KeepsItsRows(SpireDraft):
    "Wrong: rows of accepted draft tokens stay, although the target has states of them"
    def turn(self, ctx):
        if ctx[:len(self.ctx)] == self.ctx: self.ctx = ctx
        super().turn(ctx)

@faithful("SPIRe", part="SpireDraft", plain={"drafted rows of accepted tokens": KeepsItsRows})
@proves("thm-drafting-runs")
def test_rows_of_drafting_are_those_of_training(subject):
    "Contexts that grow by accepted tokens, go back and differ: the rows of every path, wherever it begins"
    net, target = small(window=4, sinks=2)
    draft, x = subject(net, target), texts(2, 20)
    with torch.no_grad(): rows = torch.stack(net.guesses(batch_of(target, x), 4)) / .7
    for n, t, depth in ((0, 3, 3), (0, 5, 2), (0, 9, 3), (0, 12, 0), (1, 12, 3), (0, 4, 1), (1, 16, 2)):
        q = draft(chain(tuple(x[n, :t].tolist()), x[n, t:t+depth].tolist()))
        for j in range(depth + 1): assert np.allclose(q[j], rows[j, n, t - 2].softmax(-1).numpy(), atol=1e-10)

class Unbounded(SpireDraft):
    "Stores and reads a row for every token of the context"
    def turn(self, ctx):
        self.net.window, window = len(ctx), self.net.window
        super().turn(ctx)
        self.net.window = window
    def attention_mask(self, paths): return torch.ones(len(paths), len(self.at), dtype=torch.bool)

@faithful("SPIRe", part="SpireDraft", plain={"a row for every token": Unbounded})
@proves("thm-constant-cache")
def test_a_constant_number_of_rows(subject):
    "KV bytes of a draft call and stored rows are the same after 100, 200 and 400 tokens"
    net = Spire(TargetModel(raw_model("target")))
    draft, spent = subject(net, HFModel(net.base[0].model, keep=net.reads, check=False)), []
    x = prompts("code", 1, length=400)[0]
    for n in (100, 200, 400):
        before = draft.meter.copy()
        Chain(draft, 4)(x[:n], Seeded(0))
        spent.append(((draft.meter - before).kv_bytes, draft.memory.n))
    assert len({*spent}) == 1 and spent[0][1] == 64 + 1 + 4
    assert spent[0][0] == 4 * 65 * 2 * 2 * 192 * 4   # calls, rows, layers, keys and values, numbers, bytes
