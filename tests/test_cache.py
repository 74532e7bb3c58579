"43_cache: rows move to the slots of the lemma, every slot holds its text after any history, no host reads"
import random
from functools import cache as once
from itertools import permutations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import given, strategies as st
from helpers import examples, proves, shapes
from test_transformer import SMALL, V, bare
from specref.gpu import cache as module
from specref.gpu.attention import ancestors, node_depths, slot_mask
from specref.gpu.cache import StaticRows, commit, commit_moves
from specref.gpu.layout import batch_positions
from specref.models.transformer import Unservable, given_cache

def whole(x): return torch.tensor(x, dtype=torch.int64)
def path(parent, i): return path(parent, parent[i]) + [i] if i > 0 else []
def padded(paths, height): return whole([s + [-1] * (height - len(s)) for s in paths])
def grow(rng, N): return [-1] + [rng.randrange(max(0, i - 3), i) for i in range(1, N)]

def texts_of(parent, token, text):
    "The text of every node: the context, whose last token is node 0, and its path"
    return [text + tuple(token[j] for j in path(parent, i)) for i in range(len(parent))]

# ---- the destinations of rows

@proves("lem-destinations", "cor-batch-map")
@given(st.lists(st.tuples(shapes(11), st.integers(0, 11), st.integers(0, 9)), min_size=1, max_size=4))
def test_no_row_moves_up_and_each_text_moves_alone(batch):
    "Any paths of any trees: sequential copies, text by text, equal the gather; no other slot changes"
    paths, lengths = [path(up, pick % len(up)) for up, pick, _ in batch], whole([n for *_, n in batch])
    height = max(len(up) for up, _, _ in batch) - 1
    source, into = commit_moves(lengths, padded(paths, height), 0 * lengths)
    rows = torch.arange(2 * len(batch) * 3 * 30 * 2).reshape(2, -1, 3, 30, 2)   # layers, texts, heads, slots
    was, want = rows.clone(), rows.clone()
    commit(rows, source, into)
    for b, (s, (*_, n)) in enumerate(zip(paths, batch)):
        moves = list(zip(source[b].tolist(), into[b].tolist()))
        assert moves[:len(s)] == [(n + i, n + j) for j, i in enumerate(s, 1)]
        assert all(n < j <= i for i, j in moves) and all(i == j for i, j in moves[len(s):])
        for i, j in moves: want[:, b, :, j] = want[:, b, :, i]
        assert torch.equal(rows[:, b, :, n + 1:n + 1 + len(s)], was[:, b, :, [n + i for i in s]])
    assert torch.equal(rows, want)

def copied(s, order):
    "Whether copies in place in this order leave the rows of the nodes `s`"
    rows = list(range(7))
    for k in order: rows[k + 1] = rows[s[k]]
    return rows[1:len(s) + 1] == list(s)

@proves("prop-parallel")
@pytest.mark.parametrize("a", range(1, 5))
def test_in_parallel(a):
    "All sequences of distinct nodes and all orders of copies: which are right; reading first always is"
    rising, in_order = set(), set()
    for s in permutations(range(1, 7), a):
        right = [copied(s, order) for order in permutations(range(a))]
        in_order.add(right[0])
        if list(s) == sorted(s):
            clear = not any(i <= a and i != j for j, i in enumerate(s, 1))
            assert all(right) == clear and right[0]
            rising.add(clear)
        rows = torch.arange(9)[None, None, :, None]
        commit(rows, *commit_moves(whole([2]), whole([s]), whole([0])))
        assert rows.flatten().tolist() == [0, 1, 2, *(2 + i for i in s), *range(3 + a, 9)]
    assert rising == in_order == ({True} if a == 1 else {True, False})

# ---- exactly: a row is a number for its text

class Numbers(dict):
    "A number for each text, in the order of first occurrence"
    def __missing__(self, text): return self.setdefault(text, len(self) + 1)
    def rows(self, texts):  # (B, n) texts -> (layers, 2, B, heads, n, width), which differ by layer and sign
        x = 10 * whole([[self[text] for text in row] for row in texts])[:, None, :, None].expand(-1, 2, -1, 8)
        return torch.stack([torch.stack([x + layer, -x - layer]) for layer in range(2)])

def numbered_round(cache, texts, step, rng, numbers):
    "Write a random tree after each text and accept a random path; -> the texts after it"
    N = rng.randint(1, 7)
    parents = [grow(rng, N) for _ in texts]
    drafts = [texts_of(up, rng.choices(range(3), k=N), text) for up, text in zip(parents, texts)]
    for layer, (keys, values) in enumerate(numbers.rows(drafts)): cache.update(keys, values, layer)
    last, root = [rng.randrange(N) for _ in texts], N * torch.arange(len(texts))   # ids are global
    nodes = padded([path(up, i) for up, i in zip(parents, last)], N - 1)
    step(cache, torch.where(nodes < 0, -1, nodes + root[:, None]), root)
    return [row[i] + (rng.randrange(3),) for row, i in zip(drafts, last)]

def holds(seed, step, rounds=12):
    "Whether all slots before the lengths hold their texts' numbers after each round, in every layer and head"
    rng, numbers, texts = random.Random(seed), Numbers(), [(0,)] * 3
    cache = StaticRows(model("gqa"), 3, 150, dtype=torch.int64, check=True)
    for _ in range(rounds):
        texts = numbered_round(cache, texts, step, rng, numbers)
        if cache.lengths.tolist() != [len(text) - 1 for text in texts]: return False
        for b, text in enumerate(texts):
            n = len(text) - 1
            want = numbers.rows([[text[:i + 1] for i in range(n)]])
            if not torch.equal(cache.rows[:, :, b:b + 1, :, :n], want): return False
    return True

@proves("thm-static-cache")
@examples(60, st.integers(0, 10**9))
def test_every_slot_holds_its_text(seed): assert holds(seed, StaticRows.commit)

def variant(part=..., up=0, grows=1):
    "A commit of a part of the rows, `up` slots too early; lengths grow by the path and `grows`"
    def step(cache, nodes, root):
        source, into = commit_moves(cache.lengths, nodes, root)
        commit(cache.rows[part], source, into - up * (nodes >= 0).long())
        cache.lengths += grows + (nodes >= 0).sum(1)
    return step

def backwards(cache, nodes, root):
    source, into = commit_moves(cache.lengths, nodes, root)
    for j in reversed(range(nodes.shape[1])): commit(cache.rows, source[:, j:j + 1], into[:, j:j + 1])
    cache.lengths += 1 + (nodes >= 0).sum(1)

def all_as_the_shortest(cache, nodes, root):
    cache.commit(nodes, root, (1 + (nodes >= 0).sum(1)).min().expand(len(root)))

WRONG = {
    "the last node first": backwards,
    "over the row of the root": variant(up=1, grows=0),
    "nothing is moved": variant(slice(0)),
    "one row too short": variant(grows=0),
    "one row too long": variant(grows=2),
    "keys only": variant((slice(None), 0)),
    "the first layer only": variant(slice(1)),
    "all as the shortest": all_as_the_shortest,
}

@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_are_detected(wrong):
    "Each known bug fails in all ten histories in which the right commit passes"
    for seed in range(10): assert holds(seed, variant()) and not holds(seed, WRONG[wrong])

# ---- real networks

def doubled(net):
    "The model with norms in double precision: those of transformers round to single, where sums may differ"
    def wide(norm):
        root = lambda x: torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return lambda x: norm.weight * x * root(x)
    for m in net.modules():
        if type(m).__name__.endswith("RMSNorm"): m.forward = wide(m)
    return net

def widely(net):
    "The model in double precision, with large random weights"
    with torch.no_grad():
        for w in net.parameters(): w.normal_(0, .3) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    return doubled(net.double().eval())

def llama(seed=0, **kw):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SMALL | dict(num_key_value_heads=2) | kw)
    return widely(transformers.AutoModelForCausalLM.from_config(config))

@once
def model(name): return llama() if name == "gqa" else bare(name)

def forward(net, cache, ids, at, mask):
    given = dict(input_ids=ids, position_ids=at, attention_mask=mask)
    return net(**given, **given_cache(net, cache), use_cache=True).logits

@torch.inference_mode()
def read(net, cache, token, parent):  # lists (B, N) -> (B, N, V)
    "One pass over a tree for each row of the batch"
    see = ancestors(whole(parent))
    at, mask = batch_positions(cache.lengths, node_depths(see)), slot_mask(cache.lengths, see, cache.size)
    return forward(net, cache, whole(token), at, mask)

def prompted(net, texts, size):
    "A cache that holds every token of the texts but the last: one pass over chains, the shorter ones padded"
    cache, m = StaticRows(net, len(texts), size, check=True), max(map(len, texts))
    read(net, cache, [t + (1,) * (m - len(t)) for t in texts], [list(range(-1, m - 1))] * len(texts))
    nodes, root = whole([list(range(1, m))] * len(texts)), whole([0] * len(texts))
    cache.commit(nodes, root, whole([len(t) - 1 for t in texts]))
    return cache

def one_round(net, cache, texts, rng, N=6):
    "Some texts end before their path does, some accept none; -> the texts, the text and logits of each node"
    parents = [grow(rng, N) for _ in texts]
    token = [[t[-1], *rng.choices(range(V), k=N - 1)] for t in texts]
    logits = read(net, cache, token, parents)
    drafts = [texts_of(*one) for one in zip(parents, token, texts)]
    paths = [path(up, rng.choice([0, N - 1, rng.randrange(N)])) for up in parents]
    count = [rng.choice([0, 1 + len(s) // 2, 1 + len(s), 1 + len(s)]) for s in paths]
    cache.commit(padded(paths, N - 1).int(), torch.zeros(len(texts), dtype=torch.int32), whole(count))
    ends = [([0] + s)[n - 1] for s, n in zip(paths, count)]
    grown = [row[i] + (rng.randrange(V),) for row, i in zip(drafts, ends)]
    texts = [after if n else text for after, text, n in zip(grown, texts, count)]
    return texts, [node for row, z in zip(drafts, logits) for node in zip(row, z)]

@torch.inference_mode()
def fresh(net, text):  # -> (layers, 2, heads, len(text), width), (V,)
    "What a plain pass over one text alone stores, and its last logits"
    past = transformers.DynamicCache(config=net.config)
    out = net(input_ids=whole([text]), **given_cache(net, past), use_cache=True)
    return torch.stack([torch.cat([layer.keys, layer.values]) for layer in past.layers]), out.logits[0, -1]

def far(net, cache, texts):
    "The largest deviation of the cached rows from those of fresh passes"
    assert cache.lengths.tolist() == [len(t) - 1 for t in texts]
    held = [cache.rows[:, :, b, :, :len(t) - 1] for b, t in enumerate(texts)]
    return max((x - fresh(net, t[:-1])[0]).abs().max().item() for x, t in zip(held, texts) if t[1:])

@proves("thm-static-cache", "cor-batch-map")
@pytest.mark.parametrize("name", ["gqa", "GPT2", "Qwen2", "GPTNeoX", "OPT"])
def test_the_rows_are_those_of_the_text(name):
    "Twelve rounds of a ragged batch, one text restarted: as in passes over each text alone"
    net, texts, rng = model(name), [(3, 1, 4), (1, 5, 9, 2, 6, 5, 3), (5, 8), (9, 7, 9, 3)], random.Random(0)
    cache = prompted(net, texts, 90)
    address = cache.rows.data_ptr(), cache.lengths.data_ptr()
    for r in range(12):
        if r == 6: texts[0], cache.lengths[0] = (7,), 0
        texts, nodes = one_round(net, cache, texts, rng)
        assert far(net, cache, texts) < 1e-10
        assert max((z - fresh(net, text)[1]).abs().max().item() for text, z in nodes[::3]) < 1e-9
    assert (cache.rows.data_ptr(), cache.lengths.data_ptr()) == address and len(set(map(len, texts))) > 1
    cache.reset()
    assert cache.lengths.tolist() == [0] * 4

def causal(lengths, see, size, mask=slot_mask): return mask(lengths, torch.ones_like(see).tril(), size)
def in_slots(lengths, depth): return lengths[:, None] + torch.arange(depth.shape[1])

@pytest.mark.parametrize("name, wrong", [("slot_mask", causal), ("batch_positions", in_slots)])
def test_the_mask_and_the_positions_matter(name, wrong, monkeypatch):
    "A causal mask over the slots, or slots for positions, is off by far more than rounding"
    net, texts, rng = model("gqa"), [(3, 1, 4), (1, 5, 9, 2, 6)], random.Random(0)
    cache = prompted(net, texts, 90)
    monkeypatch.setitem(globals(), name, wrong)
    for _ in range(4): texts, _ = one_round(net, cache, texts, rng)
    assert far(net, cache, texts) > 1e-3

@proves("thm-static-cache")
def test_the_table_must_begin_finite():
    "A NaN in a slot masked for all nodes reaches every logit, a large number none; fresh memory may hold NaN"
    torch.use_deterministic_algorithms(True)   # fresh memory then holds NaN
    try: assert torch.empty(9).isnan().all() and StaticRows(model("gqa"), 2, 9).rows.isfinite().all()
    finally: torch.use_deterministic_algorithms(False)
    cache, logits = prompted(model("gqa"), [(3, 1, 4)], 20), []
    for filler in 0., 1e30, float("nan"):
        cache.rows[..., 12, :] = filler
        logits.append(read(model("gqa"), cache, [[4, 2]], [[-1, 0]]))
    assert torch.equal(logits[0], logits[1]) and logits[2].isnan().all()

def neo():
    "A model whose local layers count their window from the end of the table"
    torch.manual_seed(0)
    still = dict.fromkeys(("embed_dropout", "attention_dropout", "resid_dropout"), 0)
    config = transformers.GPTNeoConfig(
        vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=16, window_size=9,
        attention_types=[[["global", "local"], 1]], bos_token_id=None, eos_token_id=None, **still)
    return widely(transformers.AutoModelForCausalLM.from_config(config))

def test_why_a_table_is_limited_to_the_models_positions(monkeypatch):
    "GPT-Neo is right in a table at the bound and wrong in a longer one, although the text is as short"
    net, text, up, boolean = neo(), (3, 1, 4, 1), [-1, 0, 0, 2], slot_mask
    lowest = torch.finfo(torch.float64).min   # its attention adds the mask
    monkeypatch.setitem(globals(), "slot_mask", lambda *args: (~boolean(*args)).double() * lowest)
    def off(size):
        logits = read(net, prompted(net, [text], size), [[1, 5, 9, 2]], [up])[0]
        wanted = [fresh(net, node)[1] for node in texts_of(up, [1, 5, 9, 2], text)]
        return (logits - torch.stack(wanted)).abs().max().item()
    assert off(9) < 1e-10
    with pytest.raises(Unservable, match="size: got 10, wanted at most 9"): off(10)
    monkeypatch.setattr(module, "context_limit", lambda config: (99, ""))
    assert off(9) < 1e-10 and off(16) > 1e-3
    with pytest.raises(RuntimeError): off(17)

# ---- cost, and what the host may read

@proves("prop-cache-bytes")
@pytest.mark.parametrize("name, heads", [("gqa", 2), ("GPT2", 4)])
@pytest.mark.parametrize("dtype, size", [(torch.float64, 8), (torch.bfloat16, 2)])
def test_bytes(name, heads, dtype, size):
    "A token's bytes, the table's, and what one commit moves whatever is accepted"
    cache = StaticRows(model(name), 3, 50, dtype=dtype)
    assert cache.token_bytes == 2 * 2 * heads * 8 * size and cache.rows.nbytes == 3 * 50 * cache.token_bytes
    assert cache.rows.is_contiguous() and cache.rows.dtype == dtype
    for nodes in [[-1] * 4] * 3, [[2, -1, -1, -1], [1, 4, -1, -1], [3, 4, 5, 6]]:
        moves = commit_moves(cache.lengths, whole(nodes), whole([0, 0, 0]))
        assert [x.shape for x in moves] == [(3, 4)] * 2

def meta_round(check):
    "Pass and commit on the meta device, where no tensor has a value that could be read"
    net, ids = llama().to("meta"), torch.zeros(2, 4, dtype=torch.int64, device="meta")
    cache = StaticRows(net, 2, 30, check=check)
    mask, at = torch.zeros(2, 1, 4, 30, dtype=torch.bool, device="meta"), batch_positions(cache.lengths, ids)
    with torch.inference_mode(): z = forward(net, cache, ids, at, mask)
    cache.commit(ids[:, 1:], ids[:, 0])
    return z, cache

def test_no_value_is_read_back():
    "A round completes without reading a value; with `check=True` it cannot"
    z, cache = meta_round(False)
    assert z.shape == (2, 4, V) and cache.rows.is_meta and cache.lengths.is_meta
    with pytest.raises(RuntimeError, match="meta"): meta_round(True)

def test_the_last_slot_is_used_and_a_refusal_changes_nothing():
    "Ten slots: ten tokens beside one node, six beside five; past the end a pass raises, checked or not"
    cache, new = StaticRows(model("gqa"), 1, 10, check=True), torch.zeros(1, 2, 5, 8, dtype=torch.float64)
    cache.lengths += 5
    cache.check_room(6, 5)
    cache.update(new, new, 0)
    with pytest.raises(ValueError, match="^nodes: "): cache.commit(whole([[1, 5]]), whole([0]))
    assert cache.lengths.tolist() == [5]
    cache.commit(whole([[1, 4]]), whole([0]))
    assert cache.lengths.tolist() == [8]
    cache.check = False
    with pytest.raises((RuntimeError, IndexError)): cache.update(new, new, 0)

@pytest.mark.parametrize("name", ["gqa", "GPT2"])
def test_positions_must_be_given_to_the_model(name):
    "The model would count from one length for all texts, and fails"
    cache, ids = StaticRows(model(name), 2, 10), whole([[1, 2, 3]] * 2)
    mask = slot_mask(cache.lengths, torch.ones(2, 3, 3, dtype=torch.bool).tril(), 10)
    with pytest.raises((RuntimeError, ValueError)): forward(model(name), cache, ids, None, mask)
    assert not cache.is_croppable and cache.get_max_length() == 10
