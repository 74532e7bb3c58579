"30c_features: rows are those of plain passes, the layer, what a round feeds, and targets of every kind"
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from helpers import proves
from specref.core.loop import autoregressive, generate, match, rounds
from specref.core.rng import Seeded
from specref.core.tree import Tree
from specref.models.transformer import HFModel
from specref.train.falcon import BlockDraft, Falcon
from specref.train.features import DraftLayer, FeatureDraft, causal_attention, layer_config
from specref.train.harness import DraftNetwork, TargetModel
from specref.verify.reject import reject
from specref.core.drafters import Chain

torch.set_num_threads(1)

def tiny(V=32, seed=0, d=32):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=d, intermediate_size=2*d, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=.4, bos_token_id=None, eos_token_id=None)).double()

def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=None,
                                      eos_token_id=None)).double()

class Little(DraftNetwork):
    "One matrix on token and feature, one layer; attention reads the residual stream, or (wide) both inputs"
    layers = 1
    def __init__(self, base, wide=False):
        super().__init__()
        self.base, self.reads, self.settings, self.wide = (base,), (base.layers,), {}, wide
        self.fc = nn.Linear(2*base.d, base.d)
        self.block = DraftLayer(layer_config(base), 2*base.d if wide else None)
    def enter(self, states): return states[self.reads[0]]
    def step(self, f, x, at, attend):
        both = torch.cat([self.base[0].embed(x), f], -1)
        return self.block(both if self.wide else self.fc(both), self.fc(both), at, attend)
    def logits(self, out): return self.base[0].head(out)

def pair(V=32, make=Little, **kw):
    "A target that returns its last state, and a network on it whose attention differs from row to row"
    bare = tiny(V)
    torch.manual_seed(1)
    net = make(TargetModel(bare)).double()
    with torch.no_grad():
        for n, w in net.named_parameters(): w.mul_(3 if "proj" in n else 1)
    return HFModel(bare, keep=(2,), check=False, **kw), net

@torch.inference_mode()
def plain(net, target, ctx, path):
    "The logits after a path: a pass with the target's features, then a row at a time with the network's own"
    hidden = target.model(input_ids=torch.tensor([ctx[:-1]]), output_hidden_states=True).hidden_states
    f, x = net.enter(dict(enumerate(hidden))), list(ctx[1:])
    for y in (*path, None):
        out = net.step(f, torch.tensor([x]), torch.arange(len(x))[None], causal_attention)
        f, x = torch.cat([f, out[:, -1:]], 1), [*x, y]
    return net.logits(out[0, -1])

texts = st.lists(st.integers(0, 31), min_size=9, max_size=14).map(tuple)
nodes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=5)
visits = st.tuples(st.integers(0, 31), st.integers(2, 9), nodes)   # first token, length, tree

@proves("prop-refreshed")
@settings(max_examples=10)
@given(texts, st.booleans(), st.lists(visits, min_size=2, max_size=4))
def test_rows_are_those_of_plain_passes(text, wide, history):
    "After any history of trees and contexts, also with another first token, which has no row of its own"
    target, net = pair(make=partial(Little, wide=wide))
    draft = FeatureDraft(net, target)
    for first, n, some in history:
        tree = Tree((first % 2, *text[1:n]))
        for u, x in some: tree.add(u % len(tree), text[(n + x) % len(text)])
        rows = draft(tree)
        for i in range(len(tree)):
            want = plain(net, target, tree.ctx, tree.path(i)).softmax(-1).numpy()
            assert abs(rows[i] - want).max() < 1e-10

def test_the_layer_is_that_of_transformers():
    "`DraftLayer` with causal attention is transformers' own decoder layer behind its input norm"
    config = layer_config(TargetModel(tiny()))
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    mine, theirs = DraftLayer(config).double(), LlamaDecoderLayer(config, 0).double()
    theirs.load_state_dict(mine.state_dict(), strict=False)
    h, at = torch.randn(2, 7, 32, dtype=torch.float64), torch.arange(7).expand(2, -1)
    want = theirs(h, position_embeddings=mine.rotary(h, at))
    want = want[0] if isinstance(want, tuple) else want
    assert torch.allclose(mine(theirs.input_layernorm(h), h, at, causal_attention), want, atol=1e-12)

def test_the_layer_has_the_targets_shapes():
    "Heads, their width, the norm's eps and the rotation are the target's; the MLP's width is an argument"
    base = TargetModel(LlamaForCausalLM(LlamaConfig(
        vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, rms_norm_eps=.03, bos_token_id=None, eos_token_id=None,
        rope_parameters=dict(rope_type="default", rope_theta=77.))))
    own, theirs = DraftLayer(layer_config(base)), base.model.model
    shapes = {k: w.shape for k, w in theirs.layers[0].state_dict().items() if k != "input_layernorm.weight"}
    assert {k: w.shape for k, w in own.state_dict().items()} == shapes
    assert torch.equal(own.rotary.inv_freq, theirs.rotary_emb.inv_freq)
    assert own.post_attention_layernorm.variance_epsilon == .03
    assert DraftLayer(layer_config(base, 20)).mlp.up_proj.out_features == 20

def test_what_a_round_feeds():
    "A chain of four: the accepted tokens and the target's in one pass, then three drafted tokens"
    target, net = pair()
    net.train().layers = 3
    draft, seen = FeatureDraft(net, target), []
    for _, r in zip(range(12), rounds(target, Chain(draft, 4), reject, (5, 2, 8), Seeded(1))):
        seen.append((draft.meter.tokens, draft.meter.calls, target.meter.calls, r.verdict.node))
    for (a, b, c, accepted), (d, e, f, _) in zip(seen, seen[1:]):
        assert (d - a, e - b, f - c) == (accepted + 1 + 3, 4, 1)
    assert draft.meter.layer_tokens == 3*draft.meter.tokens and not net.training

def test_a_failed_pass_leaves_no_state():
    "After an error in the network or the target, and after other use of the target, the next row is right"
    target, net = pair()
    draft, text = FeatureDraft(net, target), tuple(range(3, 15))
    step, forward = net.step, target.forward
    for n in range(4, 10):
        target(Tree((9, 8, 7, n)))[0]
        if n == 6: net.step = lambda *a: 1/0
        if n == 8: target.forward = lambda end: 1/0
        if n in (6, 8):
            with pytest.raises(ZeroDivisionError): draft(Tree(text[:n]))[0]
        net.step, target.forward = step, forward
        assert abs(draft(Tree(text[:n]))[0] - FeatureDraft(net, target)(Tree(text[:n]))[0]).max() < 1e-10

def test_draft_rows_are_warped_as_the_targets():
    "Temperature and top-k of the target act on the network's logits; the raw weights are those before"
    target, net = pair(temperature=.5, top_k=3)
    tree, draft = Tree((3, 1, 4)), FeatureDraft(net, target)
    z = plain(net, target, tree.ctx, ())
    top = torch.topk(z, 3).indices
    want = torch.zeros(32, dtype=torch.float64)
    want[top] = (z[top] / .5).softmax(-1)
    assert abs(draft(tree)[0] - want.numpy()).max() < 1e-12
    assert np.allclose(draft(tree).raw(0), (z - z.max()).exp().numpy())

@pytest.mark.parametrize("text, make, kind", [
    ((3,), Little, FeatureDraft), ((0, 3), Falcon, BlockDraft),
    ((1, 0, 3), partial(Falcon, k=3), BlockDraft)])
def test_without_a_state_each_node_has_its_own_row(text, make, kind):
    "Contexts of one token, in blocks of k tokens: a processor that reads the text reads that of each node"
    target, net = pair(V=4, make=make, processors=[never_the_last_again])
    tree = Tree(text)
    for x in (1, 2): tree.add(0, x)
    want = [[1/3, 1/3, 1/3, 0], [1/3, 0, 1/3, 1/3], [1/3, 1/3, 0, 1/3]]
    assert np.allclose([list(row) for row in kind(net, target)(tree)], want, atol=1e-6)

def never_the_last_again(ids, z): return z.index_fill(1, ids[0, -1:], -1e9)

def test_on_another_family():
    "On GPT-2, without rotation and gate, the layer is a Llama's of its width; greedy text is plain text"
    bare = gpt2()
    target = HFModel(bare, temperature=0, keep=(2,), check=False)
    draft = FeatureDraft(Little(TargetModel(bare)).double(), target)
    want = autoregressive(target, (1, 2), 12, Seeded(0))
    for verify in (match, reject):
        assert generate(target, Chain(draft, 3), verify, (1, 2), 12, Seeded(0)) == want

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    "In the target's own precision rows sum to one, and decoding works"
    bare = tiny().to(dtype)
    target = HFModel(bare, keep=(2,), check=False)
    draft = FeatureDraft(Little(TargetModel(bare)).to(dtype), target)
    assert abs(draft(Tree((1, 2, 3)))[0].sum() - 1) < 1e-12
    assert len(generate(target, Chain(draft, 3), reject, (1, 2, 3), 12, Seeded(0))) == 12

@pytest.mark.parametrize("other, differs", [(dict(V=48), "vocab_size"), (dict(d=64), "hidden_size"),
                                            (dict(seed=7), "head_sha256")])
def test_a_target_that_it_was_not_made_for(other, differs):
    "The message names what differs, the precision too"
    _, net = pair()
    with pytest.raises(ValueError, match=f"^target: .*{differs}"):
        FeatureDraft(net, HFModel(tiny(**other), keep=(2,), check=False))
    with pytest.raises(ValueError, match="^target: .*float32"):
        FeatureDraft(net, HFModel(tiny().float(), keep=(2,), check=False))
    FeatureDraft(net, HFModel(tiny(), keep=(2,), check=False))
