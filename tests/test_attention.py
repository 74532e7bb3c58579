"Chapter 41: a batch of ragged trees in one attention call equals every causal run over one path, and wrong masks and positions do not"
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

pytest.importorskip("transformers")
from transformers import Cache

from helpers import proves, refuses, seeds, shapes
from specref.models.embedded import raw_model
from specref.gpu.attention import ancestors, attend, node_depths, check_room, flex_attend, read_bytes, tree_blocks, slot_mask
from specref.gpu.layout import Batch, batch_positions
from specref.core.tree import Tree, ancestor_mask
from test_transformer import bare as network

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]
TOLERANCE = {"cpu": {torch.float64: 1e-12, torch.float32: 1e-5}, "cuda": {torch.float64: 1e-12, torch.float32: 1e-3}}   # CUDA may multiply float32 in a coarser type


def parents(seed, B, N):
    "Random trees of N nodes, parents first; with some luck chains and stars among them"
    rng = np.random.default_rng(seed)
    low = rng.choice(["chain", "star", "any"], B)
    pick = {"chain": lambda i: i - 1, "star": lambda i: 0, "any": lambda i: rng.integers(i)}
    return torch.tensor([[-1] + [int(pick[k](i)) for i in range(1, N)] for k in low])


def path(parent, i):  # one tree -> nodes from the root to i
    return [] if i < 0 else path(parent, int(parent[i])) + [i]


def turned(x, at):
    "Rotary positions: the numbers of a row, in pairs, turned by angles that grow with its position"
    half = x.shape[-1] // 2
    angle = at[..., None] * 10. ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Layer:
    "One attention layer on a batch of trees: rows of q, k, v before any position, with rubbish in every slot that is nobody's"
    def __init__(self, seed, dtype=torch.float64, device="cpu", B=3, N=9, heads=2, group=2, d=4, longest=20):
        rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.parent, self.N, self.size = parents(seed, B, N).to(device), N, longest + N + int(rng.integers(4))
        self.lengths = torch.from_numpy(rng.integers(0, longest + 1, B)).to(device)
        self.q, self.k, self.v = (torch.randn(B, h, self.size, d, generator=g, dtype=torch.float64).to(device, dtype) for h in (heads * group, heads, heads))
        self.see = ancestors(self.parent)
        self.at, self.mask = batch_positions(self.lengths, node_depths(self.see)), slot_mask(self.lengths, self.see, self.size)

    def alone(self, b, i):  # -> (H, d)
        "Node i of tree b as the last token of a causal run over its own text, in float64"
        text = [*range(int(self.lengths[b])), *(int(self.lengths[b]) + j for j in path(self.parent[b], i))]
        q, k, v = (x[b, :, text].double() for x in (self.q, self.k, self.v))
        at = torch.arange(len(text), device=q.device)
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (turned(k, at), v))
        return sdpa(turned(q, at)[None], k[None], v[None], is_causal=True)[0, :, -1]
    def want(self): return torch.stack([torch.stack([self.alone(b, i) for i in range(self.N)], 1) for b in range(len(self.parent))])

    def slotted(self, at, rubbish=1e4):
        "What stands in the slots, nodes at the positions `at`: queries of the nodes, keys, values"
        slot = torch.arange(self.size, device=at.device) - self.lengths[:, None]
        where = torch.where(slot < 0, torch.arange(self.size, device=at.device), at.gather(1, slot.clamp(0, self.N - 1)))[:, None]
        q, k, over = turned(self.q, where), turned(self.k, where), (slot >= self.N)[:, None, :, None]
        mine = (self.lengths[:, None] + torch.arange(self.N, device=at.device))[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        return q.gather(2, mine), k.masked_fill(over, rubbish), self.v.masked_fill(over, rubbish)
    def got(self, at=None, mask=None): return attend(*self.slotted(self.at if at is None else at), self.mask if mask is None else mask)


# ---- masks and positions

@settings(max_examples=60)
@given(shapes(12), st.randoms(use_true_random=False))
def test_ancestors_by_doubling(parent, random):
    "The bits are those of chapter 2, also when the nodes are numbered in an order of no kind, and the depth is their number"
    tree = Tree((0,))
    for u in parent[1:]: tree.add(u, 0)
    order = random.sample(range(len(parent)), len(parent))
    mixed = [None] * len(parent)
    for i, u in enumerate(parent): mixed[order[i]] = -1 if u < 0 else order[u]
    see = ancestors(torch.tensor([parent, mixed], dtype=torch.int32))
    assert (see[0].numpy() == ancestor_mask(tree)).all()
    assert (see[1][order][:, order].numpy() == ancestor_mask(tree)).all()
    assert batch_positions(torch.tensor([7, 0]), node_depths(see))[0].tolist() == [7 + d for d in tree.depth]


@settings(max_examples=60)
@given(seeds, st.integers(1, 4), st.integers(1, 9), st.integers(0, 5))
def test_the_mask_is_its_definition(seed, B, N, spare):
    "Entry by entry: slot < L, or an ancestor in slot - L; the same with 32-bit lengths"
    lengths = torch.from_numpy(np.random.default_rng(seed).integers(0, 7, B))
    parent = parents(seed, B, N)
    mask = slot_mask(lengths.int(), ancestors(parent), size := 6 + N + spare)
    assert mask.shape == (B, 1, N, size) and mask.dtype == torch.bool
    for b, L in enumerate(lengths.tolist()):
        for i in range(N):
            assert [s for s in range(size) if mask[b, 0, i, s]] == [*range(L), *(L + j for j in path(parent[b], i))]


def test_nothing_is_read_from_the_device():
    "On the meta device a tensor has no numbers: whoever asked for one would fail, so nothing waits for a GPU"
    parent, lengths = torch.empty(2, 5, dtype=torch.long, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    see = ancestors(parent)
    q, k, v = (torch.empty(2, h, n, 8, device="meta") for h, n in ((4, 5), (2, 16), (2, 16)))
    assert batch_positions(lengths, node_depths(see)).shape == (2, 5) and attend(q, k, v, slot_mask(lengths, see, 16)).shape == (2, 4, 5, 8)
    with pytest.raises(RuntimeError): check_room(lengths, 5, 16)   # the one that reads, and says so


def test_parents_of_a_padded_batch():
    "Chapter 40 numbers nodes through the batch: the chapter's line makes them local, padding included"
    local = [[-1, 0, 0, 1, 0], [-1, 0, 1, 2, 3]]
    ids = lambda x: torch.tensor(x, dtype=torch.int32)
    none = ids([-1] * 10)
    batch = Batch(ids([0, 5]), ids(range(10)), ids([*local[0], -1, 5, 6, 7, 8]), ids([0, 1, 1, 2, 1, 0, 1, 2, 3, 4]),
                  ids([1, 3, *[-1] * 3, 6, 7, 8, 9, -1]), ids([-1, 2, *[-1] * 8]), none, none < -1, 4, 2)   # node 4 is padding: nothing links to it
    see = ancestors((batch.parent.view(2, 5) - batch.root[:, None]).clamp(min=-1))
    assert torch.equal(see, ancestors(torch.tensor(local)))
    assert torch.equal(batch_positions(ids([3, 8]), node_depths(see)), ids([[3], [8]]) + batch.depth.view(2, 5))


# ---- one layer

@proves("thm-tree-attention")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=40)
@given(seed=seeds, B=st.integers(1, 4), N=st.integers(1, 14), heads=st.integers(1, 3), group=st.integers(1, 4), d=st.sampled_from([2, 4, 8]), longest=st.integers(0, 40))
def test_every_node_is_a_causal_run(device, dtype, seed, B, N, heads, group, d, longest):
    "Random trees, ragged lengths, grouped heads: each row is the last row of a causal run over its own text"
    layer = Layer(seed, dtype, device, B, N, heads, group, d, longest)
    assert (layer.got() - layer.want()).abs().max() < TOLERANCE[device][dtype]


WRONG = {
    "position by slot": lambda x: (x.lengths[:, None] + torch.arange(x.N), x.mask),
    "mask transposed": lambda x: (x.at, slot_mask(x.lengths, x.see.mT, x.size)),
    "siblings seen": lambda x: (x.at, slot_mask(x.lengths, torch.ones_like(x.see).tril(), x.size)),
    "length one short": lambda x: (batch_positions(x.lengths - 1, node_depths(x.see)), slot_mask(x.lengths - 1, x.see, x.size)),
    "length one long": lambda x: (batch_positions(x.lengths + 1, node_depths(x.see)), slot_mask(x.lengths + 1, x.see, x.size)),
    "mask alone one short": lambda x: (x.at, slot_mask(x.lengths - 1, x.see, x.size)),
    "itself not seen": lambda x: (x.at, slot_mask(x.lengths, x.see & ~torch.eye(x.N, dtype=torch.bool), x.size)),
    "parent alone seen": lambda x: (x.at, slot_mask(x.lengths, (x.parent[..., None] == torch.arange(x.N)) | torch.eye(x.N, dtype=torch.bool), x.size)),
    "rows mixed up": lambda x: (x.at, x.mask.roll(1, 0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_killed(name):
    "Each is far from the causal runs, on trees that the right one serves to 1e-12"
    layer = Layer(3, N=12)
    assert (layer.got() - layer.want()).abs().max() < 1e-12
    assert (layer.got(*WRONG[name](layer)) - layer.want()).abs().max() > 1e-2


def test_chains_alone_would_not_see_two_of_them():
    "On a chain position by slot and visible siblings are right: tests of masks need trees"
    layer = Layer(3, N=12)
    layer.parent = torch.arange(-1, 11).expand(3, -1)
    layer.see = ancestors(layer.parent)
    layer.at, layer.mask = batch_positions(layer.lengths, node_depths(layer.see)), slot_mask(layer.lengths, layer.see, layer.size)
    for name in WRONG:
        blind = name in ("position by slot", "siblings seen")
        assert ((layer.got(*WRONG[name](layer)) - layer.want()).abs().max() < 1e-12) == blind


@proves("cor-node-order")
@settings(max_examples=30)
@given(seeds, st.randoms(use_true_random=False))
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
    moved = attend(moved_q, moved_k, moved_v, slot_mask(layer.lengths, ancestors(parent), layer.size))
    assert (moved[:, :, order] - layer.got()).abs().max() < 1e-12
    assert (batch_positions(layer.lengths, node_depths(ancestors(parent)))[:, order] == layer.at).all()


@proves("cor-padding")
@settings(max_examples=30)
@given(seeds, st.integers(0, 8))
def test_a_node_disturbs_its_descendants_alone(seed, i):
    "Another key and value in one node: not one bit of a row that is not below it changes; what is left over changes nothing"
    layer = Layer(seed)
    q, k, v = layer.slotted(layer.at)
    before = attend(q, k, v, layer.mask)
    mine = (layer.lengths + i)[:, None, None, None]
    there = torch.arange(layer.size)[:, None] == mine
    after = attend(q, torch.where(there, k + 1, k), torch.where(there, v + 1, v), layer.mask)
    changed = (before != after).any(3).any(1)
    assert (changed == layer.see[:, :, i]).all()
    assert torch.equal(before, attend(*layer.slotted(layer.at, rubbish=-3.), layer.mask))


def test_empty_rows_and_hidden_nans():
    "A row that sees nothing gets zeros and disturbs no one; a hidden NaN is not hidden, so a cache starts with zeros"
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer = Layer(1, dtype)
        q, k, v = layer.slotted(layer.at)
        none, kept = layer.mask.clone(), layer.got()
        none[:, :, 4] = False
        got = attend(q, k, v, none)
        assert (got[:, :, 4] == 0).all() and torch.equal(got[:, :, :4], kept[:, :, :4]) and torch.equal(got[:, :, 5:], kept[:, :, 5:])
        assert attend(*layer.slotted(layer.at, rubbish=float("nan")), layer.mask).isnan().any() and kept.isfinite().all()


@proves("prop-grouped-heads")
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30)
@given(seed=seeds, heads=st.integers(1, 3), group=st.integers(1, 5))
def test_groups_are_rows(device, seed, heads, group):
    "The same as keys and values copied for each query head, and as PyTorch's own switch"
    layer = Layer(seed, device=device, heads=heads, group=group)
    q, k, v = layer.slotted(layer.at)
    got, bare = attend(q, k, v, layer.mask, scale=.3), lambda k, v, **kw: sdpa(q, k, v, attn_mask=layer.mask, scale=.3, **kw)
    assert (got - bare(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))).abs().max() < 1e-12
    assert (got - bare(k, v, enable_gqa=True)).abs().max() < 1e-12


def test_the_fused_kernel_takes_mask_and_groups():
    "What the chapter says of the CPU: with a mask, and with the switch, the fused kernel runs and nothing is copied"
    layer = Layer(0, torch.float32)
    q, k, v = layer.slotted(layer.at)
    for f in (lambda: attend(q, k, v, layer.mask), lambda: sdpa(q, k, v, attn_mask=layer.mask, enable_gqa=True)):
        with torch.profiler.profile() as seen: f()
        ops = {e.key for e in seen.key_averages()}
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ops and not any("repeat" in op or "softmax" in op for op in ops)


def test_values_may_have_their_own_width():
    "Keys of width 4 and values of width 6"
    layer = Layer(2)
    q, k, v = layer.slotted(layer.at)
    wide = torch.cat([v, v[..., :2]], -1)
    assert torch.allclose(attend(q, k, wide, layer.mask), torch.cat([layer.got(), layer.got()[..., :2]], -1), atol=1e-12)


# ---- FlexAttention

def of_layer(layer, **kw):
    blocks = tree_blocks(layer.lengths, layer.see, layer.size)
    return flex_attend(*layer.slotted(layer.at), blocks, **kw)


@pytest.mark.parametrize("seed, shape", [(0, {}), (1, {}), (2, {}), (3, dict(B=1, N=1, heads=1, group=1)), (4, dict(group=3, longest=300))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_flex_equals_sdpa(seed, shape, dtype):
    "Run uncompiled, it gives the rows of `attend`, also where whole blocks are left out"
    layer = Layer(seed, dtype, **shape)
    assert (of_layer(layer) - layer.got()).abs().max() < TOLERANCE["cpu"][dtype]
    assert (of_layer(layer, scale=.2) - attend(*layer.slotted(layer.at), layer.mask, scale=.2)).abs().max() < TOLERANCE["cpu"][dtype]


def test_blocks_follow_the_length():
    "As many blocks of 128 slots as context and tree reach into, whatever the size of the cache"
    lengths, see = torch.tensor([0, 100, 119, 120, 700, 2000]), ancestors(parents(0, 6, 9))
    blocks = tree_blocks(lengths, see, 4096)
    assert (blocks.kv_num_blocks + blocks.full_kv_num_blocks).flatten().tolist() == [1, 1, 1, 2, 6, 16]


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
    "Keys and values of each layer in slots; `at` says where the next rows go"
    def __init__(self, size): super().__init__(layers=[]); self.size, self.kept = size, {}
    def update(self, keys, values, layer, *args, **kw):
        kept = self.kept.setdefault(layer, [x.new_zeros(*x.shape[:2], self.size, x.shape[3]) for x in (keys, values)])
        for old, new in zip(kept, (keys, values)): old.scatter_(2, self.at[:, None, :, None].expand_as(new), new)
        return kept


@torch.inference_mode()
def tree_pass(model, cache, lengths, tokens, at, mask):
    cache.at = lengths[:, None] + torch.arange(tokens.shape[1])
    return model(input_ids=tokens, position_ids=at, attention_mask=mask, past_key_values=cache).logits


class Requests:
    "Three requests of different length in slots, the prompts read as chains, and a tree below each"
    def __init__(self, model, V, seed=0, N=12, sizes=(17, 1, 6), spare=3):
        g = torch.Generator().manual_seed(seed)
        self.model, self.N, self.size, top = model, N, max(sizes) + N + spare, max(sizes)
        self.texts, self.tokens = torch.randint(V, (3, top), generator=g), torch.randint(V, (3, N), generator=g)
        self.lengths, self.parent = torch.tensor(sizes) - 1, parents(seed, 2, N)
        self.parent = torch.cat([self.parent, torch.tensor([[-1] + [i // 2 for i in range(N - 1)]])])
        self.tokens[:, 0] = self.texts[torch.arange(3), self.lengths]
        self.see, self.cache, zero = ancestors(self.parent), Slots(self.size), torch.zeros(3, dtype=torch.long)
        self.at, self.mask = batch_positions(self.lengths, node_depths(self.see)), slot_mask(self.lengths, self.see, self.size)
        chain = ancestors(torch.arange(-1, top - 1).expand(3, -1))
        tree_pass(model, self.cache, zero, self.texts, batch_positions(zero, node_depths(chain)), slot_mask(zero, chain, self.size))
    def said(self, at, mask): return tree_pass(self.model, self.cache, self.lengths, self.tokens, at, mask)
    @torch.inference_mode()
    def plainly(self, b, i):
        text = self.texts[b, :self.lengths[b]].tolist() + self.tokens[b, path(self.parent[b], i)].tolist()
        return self.model(torch.tensor([text]), use_cache=False).logits[0, -1]
    def want(self): return torch.stack([torch.stack([self.plainly(b, i) for i in range(self.N)]) for b in range(3)])


@proves("thm-tree-attention")
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2"])
def test_a_batch_of_trees_through_a_transformer(name):
    "Rotary and learnt positions, heads alone and in groups: one pass over three trees is 36 passes over texts; wrong variants are not"
    batch = Requests(network(name), 64)
    want = batch.want()
    assert (batch.said(batch.at, batch.mask) - want).abs().max() < 1e-10
    for wrong in list(WRONG)[:-1]:
        if name == "GPT2" and "short" in wrong: continue   # learnt positions have none before 0
        assert (batch.said(*WRONG[wrong](batch)) - want).abs().max() > 1e-3, wrong


def test_the_embedded_target_reads_a_batch_of_trees():
    "24 layers in float64, whose norms stay in float32 by transformers' own code"
    batch = Requests(raw_model("target", torch.float64), 512, sizes=(40, 5, 13))
    assert (batch.said(batch.at, batch.mask) - batch.want()).abs().max() < 1e-4


def test_eager_attention_adds_a_boolean_mask():
    "The chapter's warning: transformers' `eager` reads a boolean mask as numbers to add, `sdpa` as what is seen"
    batch = Requests(network("Llama"), 64)
    batch.model.set_attn_implementation("eager")
    eager = Requests(batch.model, 64)
    assert (eager.said(eager.at, eager.mask) - eager.want()).abs().max() > 1e-3


# ---- bytes

@given(st.integers(0, 4096), st.integers(1, 128), st.sampled_from([1, 2, 8]), st.sampled_from([32, 64, 128]), st.sampled_from([2, 4, 8]))
@settings(max_examples=50)
def test_bytes_are_those_of_the_tensors(length, nodes, heads, width, itemsize):
    "The count is that of real tensors, a mask entry being one bit; the ratio does not depend on the length"
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    k = torch.empty(1, heads, length + nodes, width, dtype=dtype, device="meta")
    mask = slot_mask(torch.empty(1, dtype=torch.long, device="meta"), torch.empty(1, nodes, nodes, dtype=torch.bool, device="meta"), length + nodes)
    cached, bits = read_bytes(length, nodes, heads, width, itemsize)
    assert cached == 2 * k.nbytes and bits == mask.numel() / 8 and mask.nbytes == 8 * bits
    assert cached / bits == pytest.approx(16 * heads * width * itemsize / nodes)


def test_numbers_of_the_chapter():
    "A model of the 8-billion class below 4,096 tokens"
    cached, bits = read_bytes(4096, 64, 8, 128, 2)
    assert (cached, bits, cached / bits) == (17_039_360, 33_280, 512)


# ---- what is refused

def test_bad_input_is_named():
    see, lengths, parent = torch.ones(2, 3, 3, dtype=torch.bool), torch.tensor([1, 2]), torch.tensor([[-1, 0, 0]])
    far = lambda x: x.to("meta")
    for bad in ([[-1, 0]], parent[0], parent.double(), torch.empty(0, 3, dtype=torch.long)): refuses("parent", ancestors, bad)
    for bad in (see.int(), see[0], torch.tensor(True), None): refuses("ancestors", node_depths, bad)
    for f in (lambda *a: slot_mask(*a, 9), lambda *a: tree_blocks(*a, 9)):
        for bad in (see.int(), see[0], see[:, :2], see[:, :, :2], torch.tensor(True), None): refuses("ancestors", f, lengths, bad)
        for bad in (lengths.double(), lengths[:1], lengths[:, None], far(lengths), [1, 2]): refuses("lengths", f, bad, see)
    for bad in (2, 0, 4., None, True):
        refuses("size", slot_mask, lengths, see, bad)
        refuses("size", tree_blocks, lengths, see, bad)
    layer = Layer(0)
    q, k, v = layer.slotted(layer.at)
    blocks = tree_blocks(layer.lengths, layer.see, layer.size)
    for f, last in (attend, layer.mask), (flex_attend, blocks):
        for bad in (q[0], q.int(), q[:, :3], q.numpy(), q[:, :, :0]): refuses("q", f, bad, k, v, last)
        for bad in (k[..., :2], k[:1], k.float(), far(k)): refuses("k", f, q, bad, v, last)
        for bad in (v[:, :1], v[:, :, :-1], v.float(), far(v)): refuses("v", f, q, k, bad, last)
    m = layer.mask
    for bad in (m.double(), m.int(), m[:, 0], m[:1], m[..., :-1], m[:, :, :-1], m.expand(-1, 4, -1, -1), far(m)): refuses("mask", attend, q, k, v, bad)
    refuses("blocks", flex_attend, q[:, :, :-1], k, v, blocks)
    refuses("blocks", flex_attend, q, k[:, :, :-1], v[:, :, :-1], blocks)


def test_lengths_that_leave_no_room():
    "Read once, where a request is admitted"
    check_room(torch.tensor([0, 5]), 4, 9)
    for bad in ([0, 6], [-1, 2]): refuses("lengths", check_room, torch.tensor(bad), 4, 9)
    refuses("lengths", check_room, torch.tensor([1.]), 4, 9)


def test_bad_counts():
    for name, bad in dict(length=-1, nodes=0, heads=1.5, width=0, itemsize=0).items():
        refuses(name, read_bytes, **(dict(length=5, nodes=4, heads=2, width=8, itemsize=2) | {name: bad}))
