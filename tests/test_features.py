"30c_features: drafting is the training-time test, the cache never takes a guessed feature for a true one, and a taught network is a draft model"
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from helpers import proves, refuses
from specref.core.rng import Seeded, tv_outcomes, law_of
from specref.train.features import DraftLayer, FeatureDraft, NetworkDraft, UnrolledAttention, causal_attention, layer_config, unroll
from specref.core.loop import generate, match, autoregressive, rounds
from specref.verify.reject import Chain, reject
from specref.draft.shapes import DynamicTree
from specref.verify.siblings import Branching
from specref.core.target import target_law
from specref.train.harness import TargetModel, StateDataset
from specref.models.transformer import RowAnswer, HFModel
from specref.core.tree import Tree

torch.set_num_threads(1)


def tiny(V=32, seed=0, d=32):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=d, intermediate_size=2*d, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                        initializer_range=.4, bos_token_id=None, eos_token_id=None)).double()


class Little(nn.Module):
    "One matrix on token and feature, one layer; attention reads what the stream carries, or (wide) both"
    layers = 1
    def __init__(self, base, wide=False):
        super().__init__()
        self.base, self.reads, self.settings, self.wide = (base,), (base.layers,), {}, wide
        self.fc, self.block = nn.Linear(2*base.d, base.d), DraftLayer(layer_config(base), 2*base.d if wide else None)
    def enter(self, states): return states[self.reads[0]]
    def step(self, f, x, at, attend):
        both = torch.cat([self.base[0].embed(x), f], -1)
        return self.block(both if self.wide else self.fc(both), self.fc(both), at, attend)
    def logits(self, out): return self.base[0].head(out)


def pair(V=32, wide=False, seed=0, **kw):
    "A target that keeps its last state, and a network on it"
    bare = tiny(V, seed); torch.manual_seed(seed + 1)
    net = Little(TargetModel(bare), wide).double()
    with torch.no_grad(): [w.mul_(3) for n, w in net.named_parameters() if "proj" in n]   # attention that tells rows apart
    return HFModel(bare, keep=(2,), check=False, **kw), net


texts = st.lists(st.integers(0, 31), min_size=9, max_size=14).map(tuple)


@proves("thm-unroll")
@settings(max_examples=15)
@given(texts, st.booleans(), st.integers(0, 9))
def test_drafting_is_the_training_time_test(text, wide, seed):
    "Every place t and every depth of the unrolled rows are those of a draft that begins at t, to 1e-10"
    target, net = pair(wide=wide, seed=seed)
    with torch.inference_mode(): z = [net.logits(o)[0] for o in unroll(net, StateDataset(torch.tensor([text]), {2: target.states(text)[2][None]}), 3)]
    for t in range(len(text) - 4):
        tree = Tree(text[:t+2])
        for x in text[t+2:t+4]: tree.add(len(tree) - 1, x)
        said = FeatureDraft(net, target).answers(tree)
        for j in range(3): assert abs(z[j][t] - said[j].logits).max() < 1e-10


def plainly(net, f, x, steps):
    "Mutant: each step attends causally to its own rows"
    for s in range(steps): f = net.step(f, F.pad(x[:, 1+s:], (0, s)), s + torch.arange(f.shape[1])[None], causal_attention)
    return f

def unmoved(net, f, x, steps):
    "Mutant: every step stands at the positions of the first"
    attend = UnrolledAttention()
    for s in range(steps): f = net.step(f, F.pad(x[:, 1+s:], (0, s)), torch.arange(f.shape[1])[None], attend)
    return f

def unshifted(net, f, x, steps):
    "Mutant: every step reads the first step's token"
    attend = UnrolledAttention()
    for s in range(steps): f = net.step(f, x[:, 1:], s + torch.arange(f.shape[1])[None], attend)
    return f

@pytest.mark.parametrize("mutant", [plainly, unmoved, unshifted])
def test_wrong_unrollings_are_seen(mutant):
    "Right at depth 0, wrong from depth 1"
    target, net = pair(); text = tuple(range(3, 13))
    tree = Tree(text[:7]); tree.add(0, text[7])
    said, states = FeatureDraft(net, target).answers(tree), target.states(text)[2][None, :-1]
    with torch.inference_mode():
        off = [abs(net.logits(mutant(net, states, torch.tensor([text]), 1 + j))[0, 5] - said[j].logits).max() for j in range(2)]
    assert off[0] < 1e-10 and off[1] > 1e-4


def test_the_walk_through_a_layer_is_the_libraries():
    "`DraftLayer` with causal attention is transformers' own decoder layer behind its input norm"
    base = TargetModel(tiny()); config = layer_config(base); config._attn_implementation = "sdpa"
    torch.manual_seed(0); mine, theirs = DraftLayer(config).double(), LlamaDecoderLayer(config, 0).double()
    theirs.load_state_dict(mine.state_dict(), strict=False)
    h, at = torch.randn(2, 7, 32, dtype=torch.float64), torch.arange(7).expand(2, -1)
    want = theirs(h, position_embeddings=mine.rotary(h, at))
    assert torch.allclose(mine(theirs.input_layernorm(h), h, at, causal_attention), want[0] if isinstance(want, tuple) else want, atol=1e-12)


def test_the_layer_is_of_the_targets_make():
    "Heads, their width, the norm's eps and the rotation are the target's; the MLP is as wide as asked"
    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=.03,
                         rope_parameters=dict(rope_type="default", rope_theta=77.), bos_token_id=None, eos_token_id=None)
    base = TargetModel(LlamaForCausalLM(config)); own, theirs = DraftLayer(layer_config(base)), base.model.model
    assert {k: w.shape for k, w in own.state_dict().items()} == {k: w.shape for k, w in theirs.layers[0].state_dict().items() if k != "input_layernorm.weight"}
    assert torch.equal(own.rotary.inv_freq, theirs.rotary_emb.inv_freq) and own.post_attention_layernorm.variance_epsilon == .03
    assert DraftLayer(layer_config(base, 20)).mlp.up_proj.out_features == 20


class Stale(FeatureDraft):
    "Mutant: a drafted row is kept as a row of the context, though its feature was a guess"
    def drafted(self, x): return x


@settings(max_examples=15)
@given(st.lists(texts, min_size=2, max_size=2), st.integers(0, 31), st.lists(st.tuples(st.booleans(), st.integers(2, 9), st.integers(0, 31)), min_size=2, max_size=6))
def test_texts_that_differ_in_the_first_token(two, other, asked):
    "Calls that jump between texts, two of them equal but for the first token, which has no row: every answer is that of a fresh network"
    target, net = pair(); model = FeatureDraft(net, target); texts = [*two, (other, *two[0][1:])]
    for k, (low, n, x) in enumerate(asked):
        tree = Tree(texts[(k % 2)*2 if low else k % 3][:n]); tree.add(0, x)
        for i in range(2): assert abs(model(tree)[i] - FeatureDraft(net, target)(tree)[i]).max() < 1e-10


histories = st.lists(st.tuples(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=6)), min_size=2, max_size=6)

def history(text, moves):
    "Contexts that grow along one text and sometimes go back, with trees of any shape and order that share its tokens"
    for n, nodes in moves:
        tree = Tree(text[:n + 1])
        for u, x in nodes: tree.add(u % len(tree), text[(n + 1 + x) % len(text)])
        yield tree


@proves("prop-refreshed")
@settings(max_examples=40)
@given(texts, histories)
def test_cached_is_fresh(text, moves):
    "After any history of accepted, rejected and re-drafted tokens every node is answered as by a network that has no past, to 1e-10"
    target, net = pair(); cached = FeatureDraft(net, target)
    for tree in history(text, moves):
        for a, b in zip(cached.answers(tree), FeatureDraft(net, target).answers(tree)): assert abs(a.logits - b.logits).max() < 1e-10


def test_a_stale_feature_is_seen():
    "The mutant agrees until a draft was accepted, and not after"
    target, net = pair(); text, stale = tuple(range(4, 16)), Stale(net, target)
    tree = Tree(text[:6])
    for x in text[6:8]: tree.add(len(tree) - 1, x)
    fresh = lambda t: FeatureDraft(net, target).answers(t)[0].logits
    assert abs(stale.answers(tree)[0].logits - fresh(tree)).max() < 1e-10
    assert abs(stale.answers(Tree(text[:9]))[0].logits - fresh(Tree(text[:9]))).max() > 1e-4


def test_what_a_round_feeds():
    "A chain of four: the accepted tokens and the target's own with true features in one pass, then three drafted ones, a pass each; the target's states cost no pass"
    target, net = pair(); model = FeatureDraft(net, target); start = (5, 2, 8)
    fed, calls, last = [], [], None
    for _, r in zip(range(12), rounds(target, Chain(model, 4), reject, start, Seeded(1))):
        fed.append(model.meter.tokens); calls.append((model.meter.calls, target.meter.calls))
        if last is not None: assert fed[-1] - fed[-2] == last + 1 + 3 and calls[-1][0] - calls[-2][0] == 4 and calls[-1][1] - calls[-2][1] == 1
        last = r.verdict.node


def test_a_failed_pass_forgets():
    "After an error in the network the cache is empty, and the next answer right"
    target, net = pair(); model = FeatureDraft(net, target); model(Tree((1, 2, 3)))[0]
    step, net.step = net.step, lambda *a: 1/0
    with pytest.raises(ZeroDivisionError): model(Tree((1, 2, 3, 4, 5)))[0]   # two rows that were promised and not fed
    net.step = step
    assert abs(model(Tree((1, 2, 3, 4, 5)))[0] - FeatureDraft(net, target)(Tree((1, 2, 3, 4, 5)))[0]).max() < 1e-12


@pytest.mark.parametrize("drafter", [lambda m: Chain(m, 2), lambda m: Branching(m, (2,)), lambda m: DynamicTree(m, 2, 2, 3)], ids=["chain", "tree", "grown"])
def test_the_law_is_the_targets(drafter):
    "All paths of two tokens from V = 3, over drawn chains and trees and over points"
    target, net = pair(V=3)
    spoken = law_of(lambda rng: tuple(generate(target, drafter(FeatureDraft(net, target)), reject, (0, 1), 2, rng)))
    assert tv_outcomes(spoken, target_law(target, (0, 1), 2)) < 1e-9


class Table(FeatureDraft):
    "`FeatureDraft` with exact laws in place of the network's: the same rows are fed, in the same passes"
    def __init__(self, net, target, law): super().__init__(net, target); self.exact = law
    def __call__(self, tree):
        rows = super().__call__(tree)
        rows.row = lambda i: self.exact(tree.text(i))
        return rows

def test_tabular_laws_through_the_same_rows():
    "The drafter's code path with a table's laws on the edges: the target's law again, and the table's laws on the tree"
    from specref.core.target import random_table
    target, net = pair(V=3); table = random_table(3, 4, zeros=True)
    model = Table(net, target, lambda text: table.law(text).astype(float))
    tree = Chain(model, 2)((0, 1), Seeded(0))
    assert np.allclose(tree.law[1].astype(float), table.law((0, 1)).astype(float))
    spoken = law_of(lambda rng: tuple(generate(target, Chain(model, 2), reject, (0, 1), 2, rng)))
    assert tv_outcomes(spoken, target_law(target, (0, 1), 2)) < 1e-9


def test_greedy_is_plain():
    "At temperature 0 the warp makes points of the network's laws too, and the text is that of plain decoding"
    target, net = pair(temperature=0); model = FeatureDraft(net, target)
    want = list(autoregressive(target, (3, 1), 24, Seeded(0)))
    assert set(model(Tree((3, 1)))[0]) == {0, 1}
    for verify in (match, reject): assert list(generate(target, Chain(model, 3), verify, (3, 1), 24, Seeded(0))) == want


def test_laws_are_warped_as_the_targets():
    "Temperature and top-k of the target act on the network's logits"
    target, net = pair(temperature=.5, top_k=3); tree = Tree((3, 1, 4)); model = FeatureDraft(net, target)
    z = model.answers(tree)[0].logits
    top = torch.topk(z, 3).indices
    want = torch.zeros(32, dtype=torch.float64); want[top] = (z[top] / .5).softmax(-1)
    assert abs(model(tree)[0] - want.numpy()).max() < 1e-12
    assert np.allclose(model(tree).raw(0), (z - z.max()).exp().numpy())


def test_a_draft_is_no_lesson():
    "Put to draft, the network is out of training, and each of its layers is paid for"
    target, net = pair(); net.train().layers = 3; model = FeatureDraft(net, target); model(Tree((1, 2, 3, 4)))
    assert not net.training and (model.meter.calls, model.meter.tokens, model.meter.layer_tokens) == (1, 3, 9)


def test_one_token_has_no_state():
    "The law is uniform, and decoding from one token works"
    target, net = pair(); model = FeatureDraft(net, target)
    assert np.allclose(model(Tree((3,)))[0], 1/32) and len(generate(target, Chain(model, 2), reject, (3,), 5, Seeded(0))) == 5


def test_on_another_family():
    "On GPT-2, which has no rotation and no gate, the layer is a Llama's of its width"
    torch.manual_seed(0)
    bare = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)).double()
    target, net = HFModel(bare, keep=(2,), check=False), Little(TargetModel(bare)).double()
    assert list(generate(HFModel(bare, temperature=0, keep=(2,)), Chain(FeatureDraft(net, HFModel(bare, temperature=0, keep=(2,))), 3), reject, (1, 2), 12, Seeded(0))) == list(autoregressive(HFModel(bare, temperature=0), (1, 2), 12, Seeded(0)))
    assert FeatureDraft(net, target)(Tree((1, 2)))[0].shape == (16,)


def test_where_one_token_stands_each_node_has_its_own_law():
    "A processor that looks back sees the text of each node, also where there is no state"
    target, net = pair(V=4, processors=[lambda ids, z: z.index_fill(1, ids[0, -1:], -1e9)])   # never the last token again
    tree = Tree((3,)); tree.add(0, 1); tree.add(0, 2)
    assert [[round(float(w), 3) for w in row] for row in FeatureDraft(net, target)(tree)] == [[.333, .333, .333, 0], [.333, 0, .333, .333], [.333, .333, 0, .333]]


def test_the_target_is_used_in_between():
    "Somebody else asks the target about other texts, and a call is broken off in the target: the draft's answers stay those of a fresh network"
    target, net = pair(); model = FeatureDraft(net, target); text = tuple(range(3, 15))
    for n in range(4, 10):
        target(Tree((9, 8, 7, n)))[0]
        if n == 6:
            forward, target.forward = target.forward, lambda end: 1/0
            with pytest.raises(ZeroDivisionError): model(Tree(text[:n]))[0]
            target.forward = forward
        assert abs(model(Tree(text[:n]))[0] - FeatureDraft(net, target)(Tree(text[:n]))[0]).max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    "In the target's own precision, whatever it is, laws are laws, and greedy text is plain decoding's wherever that is sure of its choice"
    bare = tiny().to(dtype); target = HFModel(bare, keep=(2,), check=False); model = FeatureDraft(Little(TargetModel(bare)).to(dtype), target)
    assert abs(model(Tree((1, 2, 3)))[0].sum() - 1) < 1e-12
    ledger = generate(target, Chain(model, 3), reject, (1, 2, 3), 12, Seeded(0))
    assert len(ledger) == 12


def test_bad_requests():
    "A target that is none, one that keeps other layers, and one that the network was not made for: with the name of what differs; tokens that are none; a lesson longer than its text; an MLP without width"
    target, net = pair()
    for other, what in ((tiny(V=48), "vocab_size"), (tiny(d=64), "hidden_size"), (tiny(seed=7), "head_sha256")):
        with pytest.raises(ValueError, match=f"^target: .*{what}"): FeatureDraft(net, HFModel(other, keep=(2,), check=False))
    FeatureDraft(net, HFModel(tiny(), keep=(2,), check=False))   # the same weights again
    with pytest.raises(ValueError, match="^target: .*float32"): FeatureDraft(net, HFModel(tiny().float(), keep=(2,), check=False))   # and in another precision
    one = Tree((1, 2, 3)); one.add(0, 32)
    for tree in (Tree((1, 2, 32)), Tree((1, 32, 2)), Tree((1, 2, -1)), Tree((32,)), one): refuses("token", FeatureDraft(net, target), tree)
    states = {2: target.states((1, 2, 3))[2][None]}
    for depth in (0, 3): refuses("depth", unroll, net, StateDataset(torch.tensor([[1, 2, 3]]), states), depth)
    assert len(unroll(net, StateDataset(torch.tensor([[1, 2, 3]]), states), 2)) == 2
    refuses("inner", layer_config, net.base[0], 0)
    for bad in (target.model, HFModel(target.model, check=False), HFModel(target.model, keep=(1,), check=False)):
        with pytest.raises(ValueError, match="^target: "): FeatureDraft(net, bad)
