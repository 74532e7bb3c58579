"Chapter 41: ragged trees in one attention call equal every causal run over one path; wrong masks do not"
from functools import partial

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

pytest.importorskip("transformers")
from transformers import Cache

from helpers import examples, proves, seeds, shapes
from specref.gpu.attention import (ancestors, attend, check_room, flex_attend, node_depths, read_bytes,
                                   slot_mask, tree_blocks)
from specref.gpu.layout import batch_positions, flat, pad_batch
from specref.core.tree import Tree, ancestor_mask
from specref.models.transformer import given_cache
from test_transformer import bare as network

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]
TOLERANCE = {"cpu": {torch.float64: 1e-12, torch.float32: 1e-5},
             "cuda": {torch.float64: 1e-12, torch.float32: 1e-3}}   # float32 may be coarser there

def parents(seed, B, N):
    "Random trees of N nodes, parents first, some of them chains or stars"
    rng = np.random.default_rng(seed)
    low = rng.choice(["chain", "star", "any"], B)
    pick = {"chain": lambda i: i - 1, "star": lambda i: 0, "any": lambda i: rng.integers(i)}
    return torch.tensor([[-1] + [int(pick[k](i)) for i in range(1, N)] for k in low])

def path(parent, i):  # one tree -> nodes from the root to i
    return [] if i < 0 else path(parent, int(parent[i])) + [i]

def turned(x, at):
    "Rotary positions: the entries of a row, in pairs, rotated by angles that grow with its position"
    half = x.shape[-1] // 2
    angle = at[..., None] * 10. ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

def placed(see, lengths, size):
    return batch_positions(lengths, node_depths(see)), slot_mask(lengths, see, size)

class Layer:
    "One attention layer on a batch of trees: q, k, v before any position, arbitrary values in unused slots"
    def __init__(self, seed, dtype=torch.float64, device="cpu", B=3, N=9, heads=2, group=2, d=4, longest=20):
        rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.parent, self.N = parents(seed, B, N).to(device), N
        self.size = longest + N + int(rng.integers(4))
        self.lengths = torch.from_numpy(rng.integers(0, longest + 1, B)).to(device)
        def rows(h):
            return torch.randn(B, h, self.size, d, generator=g, dtype=torch.float64).to(device, dtype)
        self.q, self.k, self.v = rows(heads * group), rows(heads), rows(heads)
        self.see = ancestors(self.parent)
        self.at, self.mask = placed(self.see, self.lengths, self.size)

    def alone(self, b, i):  # -> (H, d)
        "Node i of tree b as the last token of a causal run over its own text, in float64"
        L = int(self.lengths[b])
        text = [*range(L), *(L + j for j in path(self.parent[b], i))]
        q, k, v = (x[b, :, text].double() for x in (self.q, self.k, self.v))
        at = torch.arange(len(text), device=q.device)
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (turned(k, at), v))
        return sdpa(turned(q, at)[None], k[None], v[None], is_causal=True)[0, :, -1]
    def want(self):
        def rows(b): return torch.stack([self.alone(b, i) for i in range(self.N)], 1)
        return torch.stack([rows(b) for b in range(len(self.parent))])

    def slotted(self, at, rubbish=1e4):
        "The contents of the slots, nodes at the positions `at`: queries of the nodes, keys, values"
        every, nodes = torch.arange(self.size, device=at.device), torch.arange(self.N, device=at.device)
        slot = every - self.lengths[:, None]
        where = torch.where(slot < 0, every, at.gather(1, slot.clamp(0, self.N - 1)))[:, None]
        q, k, over = turned(self.q, where), turned(self.k, where), (slot >= self.N)[:, None, :, None]
        mine = (self.lengths[:, None] + nodes)[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        return q.gather(2, mine), k.masked_fill(over, rubbish), self.v.masked_fill(over, rubbish)
    def got(self, at=None, mask=None):
        at, mask = self.at if at is None else at, self.mask if mask is None else mask
        return attend(*self.slotted(at), mask)
    def off(self, *wrong): return (self.got(*wrong) - self.want()).abs().max()

# ---- masks and positions

@examples(60, shapes(12), st.randoms(use_true_random=False))
def test_ancestors_by_doubling(parent, random):
    "The mask is that of chapter 2, also with nodes in any order, and the depth is its number of ancestors"
    tree = Tree((0,))
    for u in parent[1:]: tree.add(u, 0)
    order = random.sample(range(len(parent)), len(parent))
    mixed = [None] * len(parent)
    for i, u in enumerate(parent): mixed[order[i]] = -1 if u < 0 else order[u]
    see = ancestors(torch.tensor([parent, mixed], dtype=torch.int32))
    assert (see[0].numpy() == ancestor_mask(tree)).all()
    assert (see[1][order][:, order].numpy() == ancestor_mask(tree)).all()
    assert batch_positions(torch.tensor([7, 0]), node_depths(see))[0].tolist() == [7 + d for d in tree.depth]

@examples(60, seeds, st.integers(1, 4), st.integers(1, 9), st.integers(0, 5))
def test_the_mask_is_its_definition(seed, B, N, spare):
    "Entry by entry: slot < L, or an ancestor in slot - L; the same with 32-bit lengths"
    lengths = torch.from_numpy(np.random.default_rng(seed).integers(0, 7, B))
    parent = parents(seed, B, N)
    mask = slot_mask(lengths.int(), ancestors(parent), size := 6 + N + spare)
    assert mask.shape == (B, 1, N, size) and mask.dtype == torch.bool
    for (b, i), L in zip(np.ndindex(B, N), lengths.repeat_interleave(N).tolist()):
        seen = [*range(L), *(L + j for j in path(parent[b], i))]
        assert mask[b, 0, i].nonzero().flatten().tolist() == seen

def test_nothing_is_read_from_the_device():
    "On the meta device a tensor has no numbers: reading one would fail, so nothing waits for a GPU"
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    see = ancestors(torch.empty(2, 5, dtype=torch.long, device="meta"))
    q, k, v = (torch.empty(2, h, n, 8, device="meta") for h, n in ((4, 5), (2, 16), (2, 16)))
    at, mask = placed(see, lengths, 16)
    assert at.shape == (2, 5) and attend(q, k, v, mask).shape == (2, 4, 5, 8)
    with pytest.raises(RuntimeError): check_room(lengths, 5, 16)   # the one function that reads values

def test_parents_of_a_padded_batch():
    "Chapter 40 numbers nodes across the batch: this chapter's line makes them local, padding included"
    batch = pad_batch(flat([-1, 0, 0, 1, -1, 4, 5, 6, 7], [0]*9), 5)   # node 4 of the first tree is padding
    see = ancestors((batch.parent.view(2, 5) - batch.root[:, None]).clamp(min=-1))
    assert torch.equal(see, ancestors(torch.tensor([[-1, 0, 0, 1, 0], [-1, 0, 1, 2, 3]])))
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    assert torch.equal(batch_positions(lengths, node_depths(see)), lengths[:, None] + batch.depth.view(2, 5))

# ---- one layer

@proves("thm-tree-attention")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=25)
@given(seed=seeds, B=st.integers(1, 4), N=st.integers(1, 14), heads=st.integers(1, 3),
       group=st.integers(1, 4), d=st.sampled_from([2, 4, 8]), longest=st.integers(0, 40))
def test_every_node_is_a_causal_run(device, dtype, seed, B, N, heads, group, d, longest):
    "Random trees, ragged lengths, grouped heads: each row is the last row of a causal run over its own text"
    assert Layer(seed, dtype, device, B, N, heads, group, d, longest).off() < TOLERANCE[device][dtype]

def only_parents(x): return (x.parent[..., None] == torch.arange(x.N)) | torch.eye(x.N, dtype=torch.bool)

WRONG = {
    "position by slot": lambda x: (x.lengths[:, None] + torch.arange(x.N), x.mask),
    "mask transposed": lambda x: (x.at, slot_mask(x.lengths, x.see.mT, x.size)),
    "siblings seen": lambda x: (x.at, slot_mask(x.lengths, torch.ones_like(x.see).tril(), x.size)),
    "length one short": lambda x: placed(x.see, x.lengths - 1, x.size),
    "length one long": lambda x: placed(x.see, x.lengths + 1, x.size),
    "mask alone one short": lambda x: (x.at, slot_mask(x.lengths - 1, x.see, x.size)),
    "itself not seen": lambda x: (x.at, slot_mask(x.lengths, x.see & ~torch.eye(x.N).bool(), x.size)),
    "parent alone seen": lambda x: (x.at, slot_mask(x.lengths, only_parents(x), x.size)),
    "rows mixed up": lambda x: (x.at, x.mask.roll(1, 0)),
}

@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_detected(name):
    "Each is far from the causal runs, on trees where the right one is within 1e-12"
    layer = Layer(3, N=12)
    assert layer.off() < 1e-12 and layer.off(*WRONG[name](layer)) > 1e-2

@proves("cor-node-order")
@examples(20, seeds, st.randoms(use_true_random=False))
def test_nodes_in_any_order(seed, random):
    "Renumbered nodes give renumbered rows, whether parents come first or not"
    layer = Layer(seed)
    order = torch.tensor(random.sample(range(layer.N), layer.N))   # node i is now called order[i]
    q, k, v = layer.slotted(layer.at)
    parent = torch.empty_like(layer.parent)
    parent[:, order] = torch.where(layer.parent < 0, -1, order[layer.parent])
    moved_q, moved_k, moved_v = q.clone(), k.clone(), v.clone()
    moved_q[:, :, order] = q
    for b, L in enumerate(layer.lengths.tolist()):
        for new, old in ((moved_k, k), (moved_v, v)): new[b, :, L + order] = old[b, :, L:L+layer.N]
    at, mask = placed(ancestors(parent), layer.lengths, layer.size)
    moved = attend(moved_q, moved_k, moved_v, mask)
    assert (moved[:, :, order] - layer.got()).abs().max() < 1e-12 and (at[:, order] == layer.at).all()

@proves("cor-padding")
@examples(20, seeds, st.integers(0, 8))
def test_a_node_affects_its_descendants_alone(seed, i):
    "Another key and value in one node: no bit of another row changes; unused slots change nothing"
    layer = Layer(seed)
    q, k, v = layer.slotted(layer.at)
    before = attend(q, k, v, layer.mask)
    there = torch.arange(layer.size)[:, None] == (layer.lengths + i)[:, None, None, None]
    after = attend(q, torch.where(there, k + 1, k), torch.where(there, v + 1, v), layer.mask)
    assert ((before != after).any(3).any(1) == layer.see[:, :, i]).all()
    assert torch.equal(before, attend(*layer.slotted(layer.at, rubbish=-3.), layer.mask))

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_empty_rows_and_hidden_nans(dtype):
    "An empty row gets zeros and changes no other; a masked NaN still counts, so a cache starts with zeros"
    layer = Layer(1, dtype)
    empty, right = layer.mask.clone(), layer.got()
    empty[:, :, 4] = False
    right[:, :, 4] = 0
    assert torch.equal(layer.got(mask=empty), right) and right.isfinite().all()
    assert attend(*layer.slotted(layer.at, rubbish=float("nan")), layer.mask).isnan().any()

@proves("prop-grouped-heads")
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=20)
@given(seed=seeds, heads=st.integers(1, 3), group=st.integers(1, 5))
def test_groups_are_rows(device, seed, heads, group):
    "As keys and values copied for each query head, and as by PyTorch's `enable_gqa`; values wider than keys"
    layer = Layer(seed, device=device, heads=heads, group=group)
    q, k, v = layer.slotted(layer.at)
    v = torch.cat([v, v[..., :2]], -1)
    got = attend(q, k, v, layer.mask, scale=.3)
    every_k, every_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    copied = sdpa(q, every_k, every_v, attn_mask=layer.mask, scale=.3)
    switched = sdpa(q, k, v, attn_mask=layer.mask, scale=.3, enable_gqa=True)
    assert (got - copied).abs().max() < 1e-12 and (got - switched).abs().max() < 1e-12

def test_the_fused_kernel_takes_mask_and_groups():
    "On the CPU, with a mask and with `enable_gqa`, the fused kernel runs and nothing is copied"
    layer = Layer(0, torch.float32)
    q, k, v = layer.slotted(layer.at)
    calls = partial(attend, mask=layer.mask), partial(sdpa, attn_mask=layer.mask, enable_gqa=True)
    for f in calls:
        with torch.profiler.profile() as seen: f(q, k, v)
        ops = {e.key for e in seen.key_averages()}
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ops
        assert not any("repeat" in op or "softmax" in op for op in ops)

# ---- FlexAttention

SHAPES = [{}, dict(B=1, N=1, heads=1, group=1), dict(group=3, longest=300)]

@pytest.mark.parametrize("dtype, seed", [*((torch.float64, k) for k in range(3)), (torch.float32, 2)])
def test_flex_equals_sdpa(dtype, seed):
    "Run uncompiled, it gives the rows of `attend`, also where whole blocks are left out"
    layer = Layer(seed, dtype, **SHAPES[seed])
    rows, blocks = layer.slotted(layer.at), tree_blocks(layer.lengths, layer.see, layer.size)
    for scale in (None, .2):
        off = flex_attend(*rows, blocks, scale=scale) - attend(*rows, layer.mask, scale=scale)
        assert off.abs().max() < TOLERANCE["cpu"][dtype]

@cuda
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_flex_compiled_on_a_gpu(dtype, tolerance):
    "Both the attention and the blocks compiled, against the causal runs"
    layer = Layer(0, dtype, "cuda", d=32, longest=500)
    blocks = tree_blocks(layer.lengths, layer.see, layer.size, torch.compile(create_block_mask))
    got = flex_attend(*layer.slotted(layer.at), blocks, torch.compile(flex_attention, dynamic=False))
    assert (got - layer.want()).abs().max() < tolerance

# ---- transformers

class Slots(Cache):
    "Keys and values of each layer in slots; `at` is where the next rows go"
    def __init__(self, size):
        super().__init__(layers=[])
        self.size, self.stored = size, {}
    def update(self, keys, values, layer, *args, **kw):
        def empty(x): return x.new_zeros(*x.shape[:2], self.size, x.shape[3])
        stored = self.stored.setdefault(layer, [empty(keys), empty(values)])
        for old, new in zip(stored, (keys, values)):
            old.scatter_(2, self.at[:, None, :, None].expand_as(new), new)
        return stored

@torch.inference_mode()
def tree_pass(model, cache, lengths, tokens, at, mask):
    cache.at = lengths[:, None] + torch.arange(tokens.shape[1])
    return model(input_ids=tokens, position_ids=at, attention_mask=mask, **given_cache(model, cache)).logits

class Requests:
    "Three requests of different length in slots, the prompts read as chains, and a tree below each"
    def __init__(self, model, V, N=12, sizes=(17, 1, 6)):
        g = torch.Generator().manual_seed(0)
        self.model, self.N, self.size, top = model, N, max(sizes) + N + 3, max(sizes)
        self.texts, self.tokens = (torch.randint(V, (3, n), generator=g) for n in (top, N))
        self.lengths = torch.tensor(sizes) - 1
        self.parent = torch.cat([parents(0, 2, N), torch.tensor([[-1] + [i // 2 for i in range(N - 1)]])])
        self.tokens[:, 0] = self.texts[torch.arange(3), self.lengths]
        self.see, self.cache = ancestors(self.parent), Slots(self.size)
        zero = torch.zeros(3, dtype=torch.long)
        self.at, self.mask = placed(self.see, self.lengths, self.size)
        chain = ancestors(torch.arange(-1, top - 1).expand(3, -1))
        tree_pass(model, self.cache, zero, self.texts, *placed(chain, zero, self.size))
    @torch.inference_mode()
    def plain(self, b, i):
        text = self.texts[b, :self.lengths[b]].tolist() + self.tokens[b, path(self.parent[b], i)].tolist()
        return self.model(torch.tensor([text]), use_cache=False).logits[0, -1]
    def want(self): return torch.stack([self.plain(b, i) for b in range(3) for i in range(self.N)])
    def off(self, want, at, mask):
        got = tree_pass(self.model, self.cache, self.lengths, self.tokens, at, mask)
        return (got.flatten(0, 1) - want).abs().max()

@proves("thm-tree-attention")
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2"])
def test_a_batch_of_trees_through_a_transformer(name):
    "One pass over three trees is 36 passes over texts, for all kinds of positions; the wrong variants differ"
    batch = Requests(network(name), 64)
    want = batch.want()
    assert batch.off(want, batch.at, batch.mask) < 1e-10
    for wrong in list(WRONG)[:-1]:
        if name == "GPT2" and "short" in wrong: continue   # learned positions begin at 0
        assert batch.off(want, *WRONG[wrong](batch)) > 1e-3, wrong

def test_eager_attention_adds_a_boolean_mask():
    "Transformers' `eager` adds a boolean mask as numbers, `sdpa` masks by it"
    model = network("Llama")
    model.set_attn_implementation("eager")
    eager = Requests(model, 64)
    assert eager.off(eager.want(), eager.at, eager.mask) > 1e-3

# ---- bytes

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length, nodes, heads, width", [(0, 1, 1, 32), (4096, 64, 8, 128)])
def test_bytes_are_those_of_the_tensors(length, nodes, heads, width, dtype):
    "The count is that of real tensors, a mask entry being one bit; the ratio does not depend on the length"
    k = torch.empty(1, heads, length + nodes, width, dtype=dtype, device="meta")
    cached, bits = read_bytes(length, nodes, heads, width, dtype.itemsize)
    assert cached == 2 * k.nbytes and 8 * bits == nodes * k.shape[2]
    assert cached / bits == 16 * heads * width * dtype.itemsize / nodes
