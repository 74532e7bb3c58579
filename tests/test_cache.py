"43_cache: rows go where the lemma says, every slot holds its text after any history, a batch is a map, and nothing is read back or allocated"
import copy
import random
import shutil
from itertools import combinations, permutations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import given, settings, strategies as st
from helpers import proves, refuses
from test_transformer import REFUSED, SMALL, V, bare
from specref.models.embedded import prompts, raw_model
from specref.gpu import cache as module
from specref.gpu.cache import StaticRows, commit, commit_moves
from specref.gpu.layout import batch_positions
from specref.models.transformer import Unservable

torch.set_num_threads(1)
whole = lambda x: torch.tensor(x, dtype=torch.int64)


# ---- trees as lists: parents before children, node 0 the root

def path(parent, i): return path(parent, parent[i]) + [i] if i > 0 else []

def depths(parent): return [len(path(parent, i)) for i in range(len(parent))]

parents = st.lists(st.integers(0, 10**6), min_size=1, max_size=12).map(lambda raw: [-1] + [x % (i + 1) for i, x in enumerate(raw)])

def padded(slots, height): return whole([s + [-1] * (height - len(s)) for s in slots])


@proves("lem-destinations")
@given(parents, st.integers(0, 10**6), st.integers(0, 50))
def test_no_row_moves_up_and_in_order_is_right(parent, pick, length):
    "On any path of any tree: sources at or behind destinations, all in the tree's own slots, and one copy after the other is the gather"
    N, s = len(parent), path(parent, pick % len(parent))
    source, into = (x[0].tolist() for x in commit_moves(whole([length]), padded([s], N - 1), whole([0])))
    assert all(j <= i for i, j in zip(source, into)) and all(length < i < length + N for i in source + into)
    assert source[:len(s)] == [length + i for i in s] and into == list(range(length + 1, length + N)) and source[len(s):] == into[len(s):]
    rows, gathered = list(range(length + N)), torch.arange(length + N)[None, None, :, None]
    for i, j in zip(source, into): rows[j] = rows[i]
    commit(gathered, *commit_moves(whole([length]), padded([s], N - 1), whole([0])))
    assert gathered.flatten().tolist() == rows and rows[length + 1:length + 1 + len(s)] == [length + i for i in s]


@proves("prop-parallel")
@pytest.mark.parametrize("a", range(1, 5))
def test_in_parallel(a):
    "Every rising path in six slots, every order of its copies: right in all of them just if no node lies in another's way"
    seen = set()
    for s in combinations(range(1, 7), a):
        ends = []
        for order in permutations(range(a)):
            rows = list(range(7))
            for k in order: rows[k + 1] = rows[s[k]]
            ends.append(rows[1:a + 1] == list(s))
        clear = not any(i in range(1, a + 1) and i != j for j, i in enumerate(s, 1))
        assert all(ends) == clear and ends[0]
        seen.add(clear)
    assert seen == ({True} if a == 1 else {True, False})


@proves("prop-parallel")
@pytest.mark.parametrize("a", range(1, 5))
def test_reading_first_is_right_in_any_numbering(a):
    "Every sequence of distinct nodes, rising or not; copying in order is wrong for some of those that do not rise"
    wrong = 0
    for s in permutations(range(1, 6), a):
        rows, ordered = torch.arange(9)[None, None, :, None], list(range(9))
        commit(rows, *commit_moves(whole([2]), whole([s]), whole([0])))
        for j, i in enumerate(s, 3): ordered[j] = ordered[2 + i]
        assert rows.flatten()[:3].tolist() == [0, 1, 2] and rows.flatten()[3:3 + a].tolist() == [2 + i for i in s]
        assert rows.flatten()[3 + a:].tolist() == list(range(3 + a, 9))
        wrong += ordered[3:3 + a] != [2 + i for i in s]
    assert (wrong > 0) == (a > 1)


# ---- exactly: a row is a number for its text

def named(numbers, text): return numbers.setdefault(text, len(numbers) + 1)

def holds(seed, step, B=3, rounds=12, size=150):
    "Whether, after each of `rounds` random rounds, every slot before the length holds the number of its text, in all layers and heads"
    rng, numbers = random.Random(seed), {}
    cache = StaticRows(model("gqa"), B, size, dtype=torch.int64, check=True)
    texts, firsts = [(0,)] * B, cache.rows.data_ptr()
    for _ in range(rounds):
        N = rng.randint(1, 7)
        ups = [[-1] + [rng.randrange(max(0, i - 3), i) for i in range(1, N)] for _ in range(B)]
        told = [[t + tuple(y[j] for j in path(up, i)) for i in range(N)] for t, up, y in ((t, up, rng.choices(range(3), k=N)) for t, up in zip(texts, ups))]
        new = whole([[named(numbers, t) for t in row] for row in told])[:, None, :, None]
        for layer in range(2): cache.update(*(sign * (10 * new + layer).expand(-1, 2, -1, 8) for sign in (1, -1)), layer)
        ends = [rng.randrange(N) for _ in range(B)]
        root = whole([N * b for b in range(B)])   # a padded batch has global ids
        nodes = padded([path(up, i) for up, i in zip(ups, ends)], N - 1)
        step(cache, torch.where(nodes < 0, -1, nodes + root[:, None]), root)
        texts = [row[i] + (rng.randrange(3),) for row, i in zip(told, ends)]
        if cache.lengths.tolist() != [len(t) - 1 for t in texts]: return False
        for b, t in enumerate(texts):
            want = 10 * whole([named(numbers, t[:i + 1]) for i in range(len(t) - 1)])
            for layer in range(2):
                if not all((sign * cache.rows[layer, i, b, :, :len(t) - 1] == (want + layer)[:, None]).all() for i, sign in ((0, 1), (1, -1))): return False
    assert cache.rows.data_ptr() == firsts
    return True


def backwards(cache, nodes, root):
    source, into = commit_moves(cache.lengths, nodes, root)
    for j in reversed(range(nodes.shape[1])): commit(cache.rows, source[:, j:j + 1], into[:, j:j + 1])
    cache.lengths += 1 + (nodes >= 0).sum(1)
def without_root(cache, nodes, root):
    source, into = commit_moves(cache.lengths, nodes, root)
    commit(cache.rows, source, into - (nodes >= 0).long())
    cache.lengths += (nodes >= 0).sum(1)
def by_depth(cache, nodes, root): cache.lengths += 1 + (nodes >= 0).sum(1)
def too_short(cache, nodes, root): cache.commit(nodes, root, (nodes >= 0).sum(1))
def too_long(cache, nodes, root): cache.commit(nodes, root); cache.lengths += 1
def all_alike(cache, nodes, root): cache.commit(nodes, root, (1 + (nodes >= 0).sum(1)).min().expand(len(root)))
def keys_only(cache, nodes, root):
    commit(cache.rows[:, 0], *commit_moves(cache.lengths, nodes, root))
    cache.lengths += 1 + (nodes >= 0).sum(1)
def first_layer_only(cache, nodes, root):
    commit(cache.rows[:1], *commit_moves(cache.lengths, nodes, root))
    cache.lengths += 1 + (nodes >= 0).sum(1)

WRONG = [backwards, without_root, by_depth, too_short, too_long, all_alike, keys_only, first_layer_only]


@proves("thm-static-cache")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_every_slot_holds_its_text(seed):
    "Exactly, after every round of a random history, with global node ids and every check on"
    assert holds(seed, StaticRows.commit)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_are_seen(wrong):
    "Each known mistake fails in every one of ten histories in which the right commit passes"
    for seed in range(10): assert holds(seed, StaticRows.commit) and not holds(seed, wrong)


# ---- real networks

def doubled(net):
    "The model with norms that stay in double precision: transformers' own round to single, where equal sums may part by a rounding"
    def wide(norm): return lambda x: norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    for m in net.modules():
        if type(m).__name__.endswith("RMSNorm"): m.forward = wide(m)
    return net

def llama(seed=0, **kw):
    torch.manual_seed(seed)
    net = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 2, **kw}))
    with torch.no_grad():
        for w in net.parameters(): w.normal_(0, .3) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    return doubled(net.double().eval())

MADE = {"gqa": llama, "gpt2": lambda: bare("GPT2"), "qwen": lambda: bare("Qwen2"), "neox": lambda: bare("GPTNeoX"), "opt": lambda: bare("OPT"),
        "embedded": lambda: doubled(copy.deepcopy(raw_model("target", torch.float64)))}
made = {}
def model(name):
    if name not in made: made[name] = MADE[name]()
    return made[name]


def visible(cache, parent):  # (B, N) -> (B, 1, N, size) bool
    "Slots before the length, ancestors, and the node itself"
    B, N = parent.shape
    see = torch.eye(N, dtype=torch.bool).repeat(B, 1, 1)
    for i in range(1, N): see[:, i] |= see[torch.arange(B), parent[:, i]]
    node = torch.arange(cache.size) - cache.lengths[:, None]
    return ((node < 0)[:, None] | see.gather(2, node.clamp(0, N - 1)[:, None].expand(-1, N, -1)) & (node < N)[:, None])[:, None]


@torch.inference_mode()
def read(net, cache, token, parent):  # lists (B, N) -> (B, N, V)
    "One pass over a tree for each row of the batch"
    depth = whole([depths(up) for up in parent])
    return net(input_ids=whole(token), position_ids=batch_positions(cache.lengths, depth), attention_mask=visible(cache, whole(parent)), past_key_values=cache, use_cache=True).logits


def prompted(net, texts, size, check=True):
    "A cache that holds every token of the texts but the last: one pass over chains of equal length, with rubbish behind the shorter ones"
    cache, m = StaticRows(net, len(texts), size, check=check), max(map(len, texts))
    read(net, cache, [t + (1,) * (m - len(t)) for t in texts], [list(range(-1, m - 1))] * len(texts))
    cache.commit(whole([list(range(1, m))] * len(texts)), whole([0] * len(texts)), whole([len(t) - 1 for t in texts]))
    return cache


def draws(seed, B, N, vocab):
    "What happens to each row of a batch in one round, by its own stream of chance: parents, tokens, the last accepted node, the extra token, fate"
    for b in range(B):
        rng = random.Random(f"{seed} {b}")
        up = [-1] + [rng.randrange(max(0, i - 3), i) for i in range(1, N)]
        yield up, [rng.randrange(vocab) for _ in range(N)], rng.choice([0, N - 1, rng.randrange(N)]), rng.randrange(vocab), rng.random()


def turn(net, cache, texts, seed, N=6, first=0):
    "One round; some rows stop before the end of their walk, some are finished and keep nothing; -> texts, logits of the pass with their texts"
    B, vocab = len(texts), net.config.vocab_size
    fate = list(draws(seed, first + B, N, vocab))[first:]
    token = [[t[-1], *y[1:]] for t, (_, y, *_) in zip(texts, fate)]
    logits = read(net, cache, token, [up for up, *_ in fate])
    told = [[t + tuple(y[j] for j in path(up, i)) for i in range(N)] for t, y, (up, *_) in zip(texts, token, fate)]
    ways = [path(up, last) for up, _, last, _, _ in fate]
    count = [0 if luck < .1 else 1 + len(w) // 2 if luck < .3 else 1 + len(w) for w, (*_, luck) in zip(ways, fate)]
    cache.commit(padded(ways, N - 1).int(), torch.zeros(B, dtype=torch.int32), whole(count))
    texts = [t if c == 0 else row[([0] + w)[c - 1]] + (extra,) for t, row, w, c, (*_, extra, _) in zip(texts, told, ways, count, fate)]
    return texts, [(text, z) for row, out in zip(told, logits) for text, z in zip(row, out)]


@torch.inference_mode()
def fresh(net, text):  # -> (layers, 2, heads, len(text), width), (V,)
    "What a plain pass over one text alone stores, and says at its end"
    out = net(input_ids=whole([text]), past_key_values=transformers.DynamicCache(config=net.config), use_cache=True)
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in out.past_key_values.layers]), out.logits[0, -1]


def far(net, cache, texts):
    "The largest deviation of the cached rows from those of fresh passes"
    assert cache.lengths.tolist() == [len(t) - 1 for t in texts]
    return max((cache.rows[:, :, b, :, :len(t) - 1] - fresh(net, t[:-1])[0]).abs().max().item() for b, t in enumerate(texts) if len(t) > 1)


@proves("thm-static-cache")
@pytest.mark.parametrize("name", ["gqa", "gpt2", "qwen", "neox", "opt"])
@pytest.mark.parametrize("seed", range(2))
def test_the_rows_are_those_of_the_text(name, seed):
    "Ten rounds of a ragged batch of four: keys, values, and every node's logits, against passes that have no past; the table stays where it was"
    net, texts = model(name), [(3, 1, 4), (1, 5, 9, 2, 6, 5, 3), (5, 8), (9, 7, 9, 3)]
    cache = prompted(net, texts, 90)
    address = cache.rows.data_ptr(), cache.lengths.data_ptr()
    for r in range(10):
        texts, said = turn(net, cache, texts, (seed, r))
        assert far(net, cache, texts) < 1e-10
        assert max((z - fresh(net, t)[1]).abs().max().item() for t, z in said[::3]) < 1e-9
    assert (cache.rows.data_ptr(), cache.lengths.data_ptr()) == address and len({len(t) for t in texts}) > 1


@proves("thm-static-cache")
def test_the_embedded_target():
    "The same on the shipped model, on prompts of different lengths"
    net, texts = model("embedded"), [prompts("code", 1, length=n)[0] for n in (9, 33, 20)]
    cache = prompted(net, texts, 128)
    for r in range(4):
        texts, said = turn(net, cache, texts, r, N=10)
        assert far(net, cache, texts) < 1e-10
    assert max((z - fresh(net, t)[1]).abs().max().item() for t, z in said) < 1e-9


@proves("cor-batch-map")
@pytest.mark.parametrize("name", ["gqa", "gpt2"])
def test_a_batch_is_a_map(name):
    "Three texts together, and each in a cache of its own with the same drafts and fates"
    net, begun = model(name), [(3, 1, 4), (1, 5, 9, 2, 6), (5, 8)]
    together, texts = prompted(net, begun, 90), begun
    for r in range(8): texts, _ = turn(net, together, texts, r)
    for b, text in enumerate(begun):
        alone, own = prompted(net, [text], 90), [text]
        for r in range(8): own, _ = turn(net, alone, own, r, first=b)
        assert own == [texts[b]] and alone.lengths.tolist() == [together.lengths[b]]
        n = len(own[0]) - 1
        assert (alone.rows[:, :, 0, :, :n] - together.rows[:, :, b, :, :n]).abs().max() < 1e-10


@proves("cor-batch-map")
@given(st.lists(st.tuples(parents, st.integers(0, 10**6), st.integers(0, 9)), min_size=1, max_size=4))
def test_a_commit_is_a_map_bit_by_bit(drawn):
    "Rows of a batch are moved as in batches of one, and no other slot changes"
    height = max(len(up) for up, _, _ in drawn) - 1
    slots, lengths = [path(up, pick % len(up)) for up, pick, _ in drawn], whole([n for *_, n in drawn])
    rows = torch.randn(2, 2, len(drawn), 3, 30, 4)
    was, root = rows.clone(), torch.zeros(len(drawn), dtype=torch.int64)
    commit(rows, *commit_moves(lengths, padded(slots, height), root))
    for b, s in enumerate(slots):
        alone, n = was[:, :, b:b + 1].clone(), int(lengths[b])
        commit(alone, *commit_moves(lengths[b:b + 1], padded([s], height), root[:1]))
        assert torch.equal(alone, rows[:, :, b:b + 1])
        assert torch.equal(rows[:, :, b, :, n + 1:n + 1 + len(s)], was[:, :, b, :, [n + i for i in s]])
        for part in (slice(n + 1), slice(n + 1 + len(s), None)): assert torch.equal(rows[:, :, b, :, part], was[:, :, b, :, part])


@proves("thm-static-cache")
def test_a_row_begins_anew_over_rubbish():
    "A finished text makes room for another by its length alone; what it left behind does not matter"
    net, texts = model("gqa"), [(3, 1, 4), (1, 5, 9, 2, 6)]
    cache = prompted(net, texts, 90)
    for r in range(6): texts, _ = turn(net, cache, texts, r)
    cache.lengths[0] = 0
    texts[0] = (7,)
    for r in range(6, 10):
        texts, _ = turn(net, cache, texts, r)
        assert far(net, cache, texts) < 1e-10
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]


@proves("thm-static-cache")
def test_the_table_must_begin_finite():
    "One NaN in a slot that nothing sees reaches every logit, large numbers there reach none; the table is finite even where fresh memory is filled with NaN"
    torch.use_deterministic_algorithms(True)   # fresh memory then holds NaN
    try: assert torch.empty(9).isnan().all() and StaticRows(model("gqa"), 2, 9).rows.isfinite().all()
    finally: torch.use_deterministic_algorithms(False)
    net, texts = model("gqa"), [(3, 1, 4)]
    cache, clean = prompted(net, texts, 20), None
    for rubbish in 0., 1e30, float("nan"):
        cache.rows[..., 12, :] = rubbish
        said = read(net, cache, [[4, 2]], [[-1, 0]])
        if clean is None: clean = said
        assert torch.equal(said, clean) if rubbish == rubbish else said.isnan().all()


@pytest.mark.parametrize("spoil", ["mask", "positions"])
def test_the_mask_and_the_positions_matter(spoil, monkeypatch):
    "A causal mask over the slots, or slots for positions, is off by far more than rounding"
    net, texts = model("gqa"), [(3, 1, 4), (1, 5, 9, 2, 6)]
    cache = prompted(net, texts, 90)
    if spoil == "positions": monkeypatch.setitem(globals(), "batch_positions", lambda lengths, depth: lengths[:, None] + torch.arange(depth.shape[1]))
    else: monkeypatch.setitem(globals(), "visible", lambda cache, parent: (torch.arange(cache.size) <= (cache.lengths[:, None] + torch.arange(parent.shape[1]))[:, :, None])[:, None])
    for r in range(4): texts, _ = turn(net, cache, texts, r)
    assert far(net, cache, texts) > 1e-3


# ---- cost

@proves("prop-cache-bytes")
@pytest.mark.parametrize("name, layers, heads, width", [("gqa", 2, 2, 8), ("gpt2", 2, 4, 8), ("embedded", 24, 6, 32)])
@pytest.mark.parametrize("dtype, size", [(torch.float64, 8), (torch.bfloat16, 2)])
def test_bytes(name, layers, heads, width, dtype, size):
    "A token's bytes, the table's, and what one commit touches whatever is accepted"
    cache = StaticRows(model(name), 3, 50, dtype=dtype)
    assert cache.token_bytes == 2 * layers * heads * width * size and cache.rows.nbytes == 3 * 50 * cache.token_bytes
    assert cache.rows.is_contiguous() and cache.rows.dtype == dtype
    for nodes in ([[-1] * 4] * 3, [[1, 2, 3, 4]] * 3, [[2, -1, -1, -1], [1, 4, -1, -1], [3, 4, 5, 6]]):
        source, into = commit_moves(cache.lengths, whole(nodes), torch.zeros(3, dtype=torch.int64))
        assert source.shape == into.shape == (3, 4)


def test_a_chain_moves_nothing():
    "On a chain every source is its destination, however many are accepted"
    for a in range(5):
        source, into = commit_moves(whole([7]), padded([list(range(1, a + 1))], 4), whole([0]))
        assert torch.equal(source, into)


def step(rows, lengths, nodes, root):
    commit(rows, *commit_moves(lengths, nodes, root))
    lengths += 1 + (nodes >= 0).sum(1)

def example():
    torch.manual_seed(0)
    return torch.randn(2, 2, 3, 2, 40, 8), whole([3, 17, 0]), whole([[2, 3, -1, -1], [-1] * 4, [11, 12, 14, 15]]).int(), whole([0, 5, 10]).int()


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler for torch.compile here")
def test_compiled_is_eager():
    "The commit as one compiled graph, bit for bit, from other lengths and nodes without compiling again"
    torch._dynamo.reset(); torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True)
    for shift in range(3):
        eager, graph = example(), example()
        eager[1].add_(shift); graph[1].add_(shift)
        step(*eager); compiled(*graph)
        assert all(torch.equal(a, b) for a, b in zip(eager, graph))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_round_is_one_graph():
    "Pass and commit are captured whole, with no break to look at a number, and do what they do uncaptured; later rounds need no new graph"
    torch._dynamo.reset(); torch._dynamo.utils.counters.clear()
    net, begun = model("gqa"), [(3, 1, 4), (1, 5, 9, 2, 6)]
    def whole_round(cache, token, parent, depth, nodes, root):
        z = net(input_ids=token, position_ids=batch_positions(cache.lengths, depth), attention_mask=visible(cache, parent), past_key_values=cache, use_cache=True).logits
        cache.commit(nodes, root)
        return z
    captured = torch.compile(whole_round, fullgraph=True, backend="eager", dynamic=False)
    one, other = prompted(net, begun, 60, check=False), prompted(net, begun, 60, check=False)
    up = [-1, 0, 0, 2, 1]
    for nodes in [[2, 3], [1, -1]], [[-1, -1], [1, 4]], [[1, 4], [2, -1]]:
        given = whole([[1, 2, 3, 4, 5]] * 2), whole([up] * 2), whole([depths(up)] * 2), whole(nodes), whole([0, 0])
        with torch.inference_mode(): assert torch.equal(whole_round(one, *given), captured(other, *given))
        assert torch.equal(one.rows, other.rows) and torch.equal(one.lengths, other.lengths)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_no_number_comes_back():
    "On the meta device, where no tensor has a value that could be read, a round runs through; with `check=True` it cannot"
    def round(check):
        net = llama().to("meta")
        cache = StaticRows(net, 2, 30, check=check)
        assert cache.rows.is_meta and cache.lengths.is_meta
        ids = torch.zeros(2, 4, dtype=torch.int64, device="meta")
        mask = torch.zeros(2, 1, 4, 30, dtype=torch.bool, device="meta")
        with torch.inference_mode(): z = net(input_ids=ids, position_ids=batch_positions(cache.lengths, ids), attention_mask=mask, past_key_values=cache, use_cache=True).logits
        cache.commit(ids[:, 1:], ids[:, 0])
        return z
    assert round(False).shape == (2, 4, V)
    with pytest.raises(RuntimeError, match="meta"): round(True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_replayed_in_a_cuda_graph():
    "Pass and commit captured once and replayed for three rounds, without a synchronisation, give the rows of uncaptured rounds"
    net, up = llama().cuda(), [-1, 0, 0, 2, 1]
    one, other = StaticRows(net, 2, 60), StaticRows(net, 2, 60)
    token, nodes, root = (whole(x).cuda() for x in ([[1, 2, 3, 4, 5]] * 2, [[2, 3], [1, -1]], [0, 0]))
    depth = whole([depths(up)] * 2).cuda()
    see = torch.eye(5, dtype=torch.bool)
    for i in range(1, 5): see[i] |= see[up[i]]
    see = see.cuda()
    def round(cache):
        node = cache.places - cache.lengths[:, None]
        mask = ((node < 0)[:, None] | see[:, node.clamp(0, 4)].transpose(0, 1) & (node < 5)[:, None])[:, None]
        net(input_ids=token, position_ids=batch_positions(cache.lengths, depth), attention_mask=mask, past_key_values=cache, use_cache=True)
        cache.commit(nodes, root)
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2): round(other)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): round(other)
        other.reset()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3): round(one); graph.replay()
        finally: torch.cuda.set_sync_debug_mode("default")
    assert one.lengths.tolist() == other.lengths.tolist() == [9, 6]
    for b, n in enumerate((9, 6)): assert (one.rows[:, :, b, :, :n] - other.rows[:, :, b, :, :n]).abs().max() < 1e-10


# ---- what is refused

@pytest.mark.parametrize("net", [make for why in ("recurrent state", "ALiBi", "encoder-decoder", "no head") for make in REFUSED[why][:1]])
def test_models_that_are_refused(net): refuses("model", StaticRows, net(), 1, 8)


def test_sizes_that_are_refused():
    "A table in which a text could pass the model's window or its last position; a batch or a size that is no number of rows"
    mistral = transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=9))
    with pytest.raises(Unservable, match="size: got 10, wanted at most 9: .*sliding window"): StaticRows(mistral, 1, 10)
    assert StaticRows(mistral, 1, 9).rows.shape == (2, 2, 1, 2, 9, 8)
    with pytest.raises(Unservable, match="size: got 13, wanted at most 12: .*no later position"): StaticRows(bare("GPT2", n_positions=12), 1, 13)
    for name, batch, size in ("batch", 0, 5), ("size", 1, 0), ("batch", 1.5, 5), ("size", 1, True): refuses(name, StaticRows, model("gqa"), batch, size)
    for dtype in "float32", float, 0: refuses("dtype", StaticRows, model("gqa"), 1, 5, dtype)


def local(): return doubled(transformers.AutoModelForCausalLM.from_config(transformers.GPTNeoConfig(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4,
    max_position_embeddings=16, attention_types=[[["global", "local"], 1]], window_size=9, bos_token_id=None, eos_token_id=None, embed_dropout=0, attention_dropout=0, resid_dropout=0)).double().eval())

def test_why_a_table_is_held_to_the_models_positions(monkeypatch):
    "GPT-Neo counts its window from the end of the table, and has no mask beyond its positions: a table at the bound serves it, a longer one does not, although the text is as short"
    net, text, up, boolean = local(), (3, 1, 4, 1), [-1, 0, 0, 2], visible
    monkeypatch.setitem(globals(), "visible", lambda cache, parent: (~boolean(cache, parent)).double() * torch.finfo(torch.float64).min)   # its attention adds the mask
    with torch.no_grad():
        for w in net.parameters(): w.normal_(0, .3) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    def off(size):
        said = read(net, prompted(net, [text], size), [[1, 5, 9, 2]], [up])
        told = [text[:3] + tuple([1, 5, 9, 2][j] for j in [0, *path(up, i)]) for i in range(4)]
        return max((z - fresh(net, t)[1]).abs().max().item() for z, t in zip(said[0], told))
    assert off(9) < 1e-10
    with pytest.raises(Unservable, match="size: got 10, wanted at most 9"): off(10)
    monkeypatch.setattr(module, "context_limit", lambda config: (99, ""))
    assert off(9) < 1e-10 and off(16) > 1e-3
    with pytest.raises(RuntimeError): off(17)


def test_texts_that_do_not_fit():
    "The greatest text beside a tree is admitted, one token more is not; where values are checked, a pass that would go past the end is stopped"
    net = model("gqa")
    cache = StaticRows(net, 1, 10, check=True)
    cache.check_room(6, 5)
    refuses("tokens", cache.check_room, 7, 5)
    for bad in 0, -1, 2.5, True:
        refuses("tokens", cache.check_room, bad, 5)
        refuses("nodes", cache.check_room, 6, bad)
    rows = torch.zeros(1, 2, 5, 8, dtype=torch.float64)
    cache.lengths[0] = 5
    cache.update(rows, rows, 0)
    cache.lengths[0] = 6
    refuses("tokens", cache.update, rows, rows, 0)
    with pytest.raises((RuntimeError, IndexError)): (cache := StaticRows(net, 1, 10)).lengths.add_(6), cache.update(rows, rows, 0)


@pytest.mark.parametrize("name, change", [("keys", lambda x: x.float()), ("keys", lambda x: x[:1]), ("keys", lambda x: x[:, :1]), ("keys", lambda x: x[..., :4]),
                                          ("keys", lambda x: x.expand(-1, -1, 11, -1)), ("keys", lambda x: x.to("meta")), ("values", lambda x: x.float()),
                                          ("values", lambda x: x[..., :4]), ("values", lambda x: x.expand(-1, -1, 2, -1)), ("keys", lambda x: x[:, :, :0].expand(-1, -1, 0, -1)[..., :3])])
def test_rows_that_are_refused(name, change):
    cache, good = StaticRows(model("gqa"), 2, 10), torch.zeros(2, 2, 1, 8, dtype=torch.float64)
    cache.update(good, good, 0)
    refuses(name, lambda **new: cache.update(new["keys"], new["values"], 0), **{"keys": good, "values": good, name: change(good)})


@pytest.mark.parametrize("name, change", [("nodes", lambda x: x.float()), ("nodes", lambda x: x[:1]), ("nodes", lambda x: x[0]), ("nodes", lambda x: x[..., None]), ("nodes", lambda x: x.to("meta")), ("nodes", lambda x: x.tolist()), ("nodes", lambda x: None), ("nodes", lambda x: x[0, 0]), ("root", lambda x: x.tolist()), ("count", lambda x: 3),
                                          ("root", lambda x: x[:1]), ("root", lambda x: x.bool()), ("count", lambda x: x[:1]), ("count", lambda x: x.double()), ("count", lambda x: x[:, None])])
def test_walks_of_a_wrong_form_are_refused(name, change):
    "By form, which the host knows: always, and before anything moves"
    cache = StaticRows(model("gqa"), 2, 10)
    good = dict(nodes=whole([[1, 2], [2, -1]]), root=whole([0, 0]), count=whole([3, 1]))
    refuses(name, cache.commit, **{**good, name: change(good[name])})
    assert cache.lengths.tolist() == [0, 0]
    cache.commit(**good)
    assert cache.lengths.tolist() == [3, 1]


@pytest.mark.parametrize("name, bad", [("nodes", [[0, 1], [2, -1]]), ("nodes", [[2, 1], [2, -1]]), ("nodes", [[1, 1], [2, -1]]), ("nodes", [[1, 2], [-1, 2]]), ("nodes", [[1, 9], [2, -1]]),
                                       ("nodes", [[1, 10], [2, -1]]), ("nodes", [[-3, 2], [2, -1]]), ("count", [3, 3]), ("count", [4, 1]), ("count", [-1, 1])])
def test_walks_of_wrong_values_are_refused(name, bad):
    "By value, which costs a wait: where `check=True` asks for it"
    cache = StaticRows(model("gqa"), 2, 10, check=True)
    cache.lengths += 1
    good = dict(nodes=whole([[1, 8], [2, -1]]), root=whole([0, 0]), count=whole([3, 2]))
    refuses(name, cache.commit, **{**good, name: whole(bad)})
    assert cache.lengths.tolist() == [1, 1]
    cache.commit(**good)
    assert cache.lengths.tolist() == [4, 3]


def test_what_a_cache_of_ragged_rows_cannot_answer():
    "A pass without a mask of its own, a crop, and positions left to the model, which would count from one length for all"
    net, ids = model("gqa"), whole([[1, 2, 3]] * 2)
    cache = StaticRows(net, 2, 10)
    refuses("attention_mask", lambda: net(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True))
    refuses("tokens_to_remove", cache.crop, -1)
    assert not cache.is_croppable and cache.get_max_length() == 10
    for name in "gqa", "gpt2":
        with pytest.raises((RuntimeError, ValueError)): model(name)(input_ids=ids, attention_mask=visible(StaticRows(model(name), 2, 10), whole([[-1, 0, 1]] * 2)), past_key_values=StaticRows(model(name), 2, 10), use_cache=True)
