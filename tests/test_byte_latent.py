"Chapter 52a: patches do not depend on later bytes, incremental is batch, the network is causal over patches"
from copy import deepcopy

import numpy as np, pytest, torch
from hypothesis import given, strategies as st
from torch import nn

from helpers import examples, proves
from specref.bytes import latent as byte_latent
from specref.bytes.latent import (BOS, ByteLatent, ByteModel, ByteRecipe, Patcher, PatchRule, block_logits,
                                  byte_bits, byte_ids, hashed_grams, latest_patch, row_entropy, train_bytes)

RULES = [PatchRule(1.2), PatchRule(rise=.1), PatchRule(1., .05), PatchRule(1.2, most=3),
         PatchRule(9., most=2)]
rules = st.sampled_from(RULES)
entropies = st.lists(st.floats(0, 5.5), min_size=1, max_size=12).map(torch.tensor)

@given(rules, entropies)
def test_starts_by_their_definition(rule, h):
    wanted, length = [True, True], 1
    for before, now in zip(h.tolist(), h.tolist()[1:]):
        over = rule.threshold is None or now > rule.threshold
        risen = rule.rise is None or now - before > rule.rise
        wanted.append(bool(over and risen or length == rule.most))
        length = 1 if wanted[-1] else length + 1
    assert rule.starts(h.double()).tolist() == wanted

@proves("thm-incremental")
@given(rules, entropies, st.integers(1, 12))
def test_later_bytes_move_no_start(rule, h, n):
    n = min(n, len(h))
    assert torch.equal(rule.starts(h[:n]), rule.starts(h)[:n+1])

@pytest.mark.parametrize("wrong", [
    lambda h: torch.cat([h[1:], h[-1:]]),   # the entropy after the byte: it reads the byte
    lambda h: 2.*(h >= h.sort(descending=True).values[len(h) // 4]),   # the largest quarter of all
])
def test_rules_that_read_later_bytes_move_starts(wrong):
    rule, moved, gen = PatchRule(1.), 0, torch.Generator().manual_seed(0)
    for _ in range(20):
        h = 3*torch.rand(12, generator=gen)
        moved += not torch.equal(rule.starts(wrong(h[:8])), rule.starts(wrong(h))[:9])
    assert moved > 5

@proves("prop-threshold")
@given(entropies, st.floats(0, 5), st.floats(0, 5))
def test_a_higher_threshold_adds_no_start(h, a, b):
    low, high = (PatchRule(x).starts(h) for x in sorted((a, b)))
    assert not (high & ~low).any()

def small(make, seed=0, **sizes):
    torch.manual_seed(seed)
    net = make(**sizes).double().eval()
    for w in net.parameters(): nn.init.normal_(w, std=.3)
    return net

MODEL = small(ByteModel, layers=1, d=32, window=8)
NET = small(ByteLatent, d=32, layers=(1, 2, 2), rows=64, window=8, block=4)
texts = st.lists(st.integers(0, 255), min_size=1, max_size=30).map(tuple)

def in_one_pass(text, rule):
    with torch.inference_mode(): z = MODEL(torch.tensor([(BOS, *text)]))[0]
    return rule.starts(row_entropy(z)).tolist()

@proves("thm-incremental")
@examples(25, st.lists(texts, min_size=1, max_size=4), st.sampled_from([PatchRule(4.), PatchRule(rise=0.)]))
def test_the_patcher_is_the_pass_over_all(some, rule):
    patcher = Patcher(MODEL, rule)
    for text in some:
        for part in (text, text[:len(text)//2], (*text, 7)): assert patcher(part) == in_one_pass(part, rule)

def hashed(text, size, rows):
    "The number of the last `size` bytes: a polynomial, as in the released code of Pagnoni et al. 2025"
    gram = ([0]*size + [*text])[-size:]
    return sum(b * pow(1_000_000_007, j, 2**61 - 1) for j, b in enumerate(gram)) % rows

@given(texts, st.integers(3, 8))
def test_hashed_grams_read_the_last_bytes(text, size):
    found = hashed_grams(torch.tensor([text]), size, 64)[0].tolist()
    assert found == [hashed(text[:i+1], size, 64) for i in range(len(text))]

def patches_at(*places, n=20): return torch.tensor([[i < 2 or i in places for i in range(n + 1)]])

def test_which_patch_a_byte_reads():
    "begin | b1 b2 b3 | b4 b5 | ...: b3 predicts the first byte of the next patch and reads its own"
    assert latest_patch(patches_at(4, 6, n=7)).tolist() == [[0, 0, 0, 1, 1, 2, 2]]

def rows_of(net, x, starts):
    with torch.inference_mode(): return net(x, starts)[0]

BYTES = torch.tensor([[BOS, *np.random.default_rng(1).integers(256, size=19)]])
STARTS = patches_at(4, 6, 9, 13, 17)

@proves("thm-patch-causal")
@pytest.mark.parametrize("i", [1, 5, 8, 9, 12, 16])
def test_a_row_depends_on_no_later_byte(i):
    changed, starts = BYTES.clone(), STARTS.clone()
    changed[0, i] = (changed[0, i] + 99) % 256
    starts[0, i+2:] = patches_at(i + 3)[0, i+2:]   # the later starts may change with it
    before, after = rows_of(NET, BYTES, STARTS), rows_of(NET, changed, starts)
    same = (before == after).all(-1)
    assert same[:i].all() and not same[i]

# The network against its equations (Pagnoni et al. 2025, Section 3), one byte after the other, in numpy

def norm(x, w): return x / np.sqrt((x*x).mean(-1, keepdims=True) + 1e-6) * w

def attend(q, k, v):  # (d,), (m, d), (m, d) -> (d,)
    "Attention of one row, in heads of 32"
    heads = [slice(a, a + 32) for a in range(0, len(q), 32)]
    weights = [np.exp(k[:, s] @ q[s] / 32**.5) for s in heads]
    return np.concatenate([w @ v[:, s] / w.sum() for w, s in zip(weights, heads)])

def rotated(x, at):  # (d,) at a position -> (d,)
    a, (u, v) = at * 10000.**(-np.arange(16) / 16), x.reshape(-1, 2, 16).transpose(1, 0, 2)
    return np.stack([u*np.cos(a) - v*np.sin(a), v*np.cos(a) + u*np.sin(a)], 1).ravel()

def layer(w, h, window):  # the weights of one layer by name, (T, d) -> (T, d)
    x = norm(h, w["input_layernorm"])
    q, k, v = (x @ w[f"self_attn.{c}_proj"].T for c in "qkv")
    q, k = (np.array([rotated(row, i) for i, row in enumerate(y)]) for y in (q, k))
    reads = [slice(max(0, i - window + 1), i + 1) for i in range(len(h))]
    h = h + np.array([attend(q[i], k[s], v[s]) for i, s in enumerate(reads)]) @ w["self_attn.o_proj"].T
    x = norm(h, w["post_attention_layernorm"])
    gate, up = (x @ w[f"mlp.{c}_proj"].T for c in ("gate", "up"))
    return h + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj"].T

def cross(w, x, rows):  # (d,), (m, d) -> (d,), with what it has read of the rows
    rows = norm(rows, w["norm_k"])
    return x + attend(w["q"] @ norm(x, w["norm_q"]), rows @ w["k"].T, rows @ w["v"].T) @ w["o"].T

def part(w, name): return {k.removeprefix(name): x for k, x in w.items() if k.startswith(name)}

def stack(w, name, layers, h, window):
    for i in range(layers): h = layer(part(w, f"{name}.layers.{i}."), h, window)
    return h

def entered(net, w, text):  # Section 3.2.1, but for the root
    grams = [w[f"grams.{n-3}"][hashed(text, n, net.rows)] for n in range(3, 9)]
    return (w["embed"][text[-1]] + sum(grams)) / 7**.5

def patch(net, w, own):  # Section 3.2.2
    slots = (w["pool"] @ own.max(0)).reshape(net.k, -1)
    return np.concatenate([cross(part(w, "gather."), slot, own) for slot in slots])

def by_equations(net, x, starts):  # (T,), (T + 1,) -> (T, 256) logits
    w = {name.removesuffix(".weight"): x.numpy() for name, x in net.state_dict().items()}
    encoder, latent, decoder = (len(part.layers) for part in (net.encoder, net.latent, net.decoder))
    h = np.array([entered(net, w, x[:i+1]) for i in range(len(x))])
    h = stack(w, "encoder", encoder, h, net.encoder.window)
    edges = [i for i, start in enumerate(starts) if start]
    patches = [patch(net, w, h[a:b]) for a, b in zip(edges, edges[1:])]   # those that are complete
    o = stack(w, "latent", latent, np.array(patches), len(x)) @ w["spread"].T
    complete = [sum(b <= i + 1 for b in edges[1:]) for i in range(len(x))]
    slots = [o[n - 1].reshape(net.k, -1) for n in complete]
    for j in range(decoder):   # Section 3.3.1
        h = np.array([cross(part(w, f"reads.{j}."), *pair) for pair in zip(h, slots)])
        h = layer(part(w, f"decoder.layers.{j}."), h, net.decoder.window)
    return norm(h, w["norm"]) @ w["head"].T

def without(*names):
    "The network, with parts that return zeros"
    def change(net):
        net = deepcopy(net)
        for name in names: net.get_submodule(name).weight.data.zero_()
        return net
    return change

def windowed(part, window):
    def change(net):
        net = deepcopy(net)
        getattr(net, part).window = window
        return net
    return change

CHANGES = {
    "as published": without(), "an encoder without cross-attention": without("gather.o"),
    "cross-attention in the decoder's first layer only": without("reads.1.o"),
    "no cross-attention in the decoder": without("reads.0.o", "reads.1.o"),
    "no n-grams": without(*(f"grams.{i}" for i in range(6))), "no 8-grams": without("grams.5"),
    "another window of the encoder": windowed("encoder", 9),
    "another window of the decoder": windowed("decoder", 7)}

@pytest.mark.parametrize("what", CHANGES)
def test_the_network_is_its_equations(what):
    "As published, and with no change"
    found = rows_of(CHANGES[what](NET), BYTES, STARTS)
    wanted = by_equations(NET, BYTES[0].tolist(), STARTS[0])
    assert (abs(found.numpy() - wanted).max() < 1e-4 * abs(wanted).max()) == (what == "as published")

def test_reading_ones_own_patch_is_not_causal(monkeypatch):
    monkeypatch.setattr(byte_latent, "latest_patch", lambda starts: starts.long().cumsum(1)[:, :-1] - 1)
    changed = BYTES.clone()
    changed[0, 11] = (changed[0, 11] + 99) % 256   # inside of the patch 9 .. 12
    same = (rows_of(NET, BYTES, STARTS) == rows_of(NET, changed, STARTS)).all(-1)
    assert not same[9:11].any()

def block_of(x, hidden, cut=9):
    with torch.inference_mode():
        return block_logits(NET, x, STARTS, torch.tensor([[cut]]), torch.tensor([hidden]))

def test_blocks_read_the_text_before_and_their_shown_bytes():
    hidden = [True, False, True, True]
    text, block = block_of(BYTES, hidden)
    assert (text[0] - rows_of(NET, BYTES, STARTS)).abs().max() < 1e-12
    def changes(i):
        x = BYTES.clone()
        x[0, i] = (x[0, i] + 99) % 256
        return ((block_of(x, hidden)[1] - block).abs().amax(-1) > 1e-9)[0].tolist()
    assert changes(10) == changes(12) == changes(13) == [False]*4   # hidden ones
    assert changes(15) == [False]*4                                 # behind the block
    assert changes(11) == changes(9) == [True]*4                    # shown: both directions

def test_trains_resumes_and_stores(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_latent, "corpus", lambda: [
        dict(domain=d, held_out=False, text="some text of the domain " * 20) for d in ("english", "code")])
    byte_ids.cache_clear()
    sizes = dict(entropy_steps=2, steps=2, rows=2, length=48, cuts=2)
    train_bytes(tmp_path, ByteRecipe(**sizes))
    assert (tmp_path/"data"/"bytes"/"recipe.json").exists()
    first = (tmp_path/"data"/"bytes"/"model.safetensors").read_bytes()
    (tmp_path/"data"/"bytes"/"model.safetensors").unlink()
    train_bytes(tmp_path, ByteRecipe(**sizes))   # both are complete: nothing is trained again
    assert (tmp_path/"data"/"bytes"/"model.safetensors").read_bytes() == first
    byte_ids.cache_clear()

def test_stored_networks_are_small_and_better_than_the_byte_model():
    from specref.models.embedded import stored
    from specref.bytes.latent import byte_latent_rows, byte_model_rows
    assert stored("bytes/model.safetensors").stat().st_size < 8e6
    text = tuple(byte_ids("code")[:1500].tolist())
    assert byte_bits(byte_latent_rows, text) < byte_bits(byte_model_rows, text) < 2.5

def test_a_batch_is_each_text():
    "Texts of fewer patches are padded with patches without bytes, which no row reads"
    x = torch.cat([BYTES, (BYTES + 5) % 256])
    x[:, 0], starts = BOS, torch.cat([STARTS, patches_at(7)])
    with torch.inference_mode(): both = NET(x, starts)
    for i in range(2): assert (both[i] - rows_of(NET, x[i:i+1], starts[i:i+1])).abs().max() < 1e-12
