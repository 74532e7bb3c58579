"Chapter 45: what is counted, the inputs of verifiers, the clocks, what a run writes and what its table shows"
import json, subprocess, sys
from fractions import Fraction as F
from functools import partial
from itertools import permutations, product
from pathlib import Path
from time import time
from types import SimpleNamespace

import pytest, torch
from helpers import proves
from test_verify import noted
import torch_verifiers as tv
from rehearsal import Rehearsed
from rehearsal import rehearse
from verdicts import store_verdicts
from specref.core.check import read_record, record_files
from specref.gpu import verify
from specref.gpu.bench import clocks as ck, measured as me, tasks as tk
from specref.gpu.bench.decoding import random_pair
from specref.gpu.verify import Logits, verify_trees, verify_chains

CPU = torch.device("cpu")
pytest.importorskip("triton", reason="the count of rows is in the module of the kernels, which needs triton")

@pytest.fixture
def at_once(monkeypatch):
    "All requests in one masked step, as on a GPU: faster than one by one where the rows are short"
    monkeypatch.setattr(verify, "reading_is_free", lambda mask: False)

def small(device, temperature):
    return random_pair(device, temperature, layers=4, hidden_size=32, intermediate_size=64,
                       num_attention_heads=4, num_key_value_heads=2, vocab_size=600, dtype=torch.float32)

# The floor

@proves("thm-whole-rows")
def test_every_entry_of_a_visited_row_decides():
    "On one tape: a very large entry gives its token, one at -inf never; unvisited rows have no effect"
    case, = ck.make_cases(ck.TREE_SHAPES["16 nodes"], 5, 2, 1, .7, CPU, logits=True)
    batch, rows, *rest = case
    rows = rows.x.float()
    def verified(x): return verify_trees(batch, Logits(x), *rest, check=False)
    was, visited = verified(rows), set()
    for b, (root, nodes) in enumerate(zip(batch.root.tolist(), was.nodes.tolist())):
        for k, u in enumerate([root, *(i for i in nodes if i >= 0)]):
            visited.add(u)
            for v in range(5):
                for z in (1e6, -torch.inf):
                    x = rows.clone()
                    x[u, v] = z
                    assert (verified(x).tokens[b, k].item() == v) == (z > 0)
    x = rows.clone()
    x[[u for u in range(batch.n) if u not in visited]] = torch.randn(batch.n - len(visited), 5)
    assert 0 < len(visited) < batch.n and torch.equal(verified(x).tokens, was.tokens)

@pytest.mark.parametrize("V", [2, 3, 4, 5])
@proves("prop-half-a-row")
def test_half_a_row(V):
    "Over uniform point masses every reading order needs the same mean number of entries"
    def reads(order, point):
        seen = 0
        while seen < V - 1:
            seen += 1
            if order[seen - 1] == point: break
        return seen
    means = {F(sum(reads(order, v) for v in range(V)), V) for order in permutations(range(V))}
    assert means == {F(V + 1, 2) - F(1, V)}

@pytest.mark.parametrize("regime", ck.AGREEMENT)
@pytest.mark.parametrize("tree", ["chain 5", "16 nodes"])
def test_bytes_are_the_rows_that_are_read(tree, regime):
    "The bytes counted are those of the rows that the torch verifier on a CPU reads in full, and no others"
    total, given = 0, ck.make_cases(ck.TREE_SHAPES[tree], 50, 6, 3, ck.AGREEMENT[regime], CPU)
    for c in given:
        p, q = noted(c.p), noted(c.q)
        verify_trees(c.batch, p, q, c.coins, c.picks, check=False)
        total += 4*50*(len({*p.full}) + len({*q.full}))
    assert ck.bytes_read(given, verify_trees)[0] == total / 3 and total > 0

def test_logits_cost_every_visited_row():
    "With logits, in bfloat16: a row of p for each emitted token, one of q for each accepted one"
    given = ck.make_cases(ck.TREE_SHAPES["chain 5"], 40, 4, 2, 1., CPU, logits=True)
    size, tokens = ck.bytes_read(given, verify_trees)
    assert tokens == 6 and size == 4 * (6 + 5) * 40 * 2 and given[0].p.x.dtype == torch.bfloat16

# The inputs

@pytest.mark.parametrize("logits", [False, True])
def test_the_cases_match_their_names(logits, at_once):
    "Rejected at the root, all accepted down to a leaf, or in between; the sets differ"
    tokens = {}
    for regime, agree in ck.AGREEMENT.items():
        given = ck.make_cases(ck.TREE_SHAPES["16 nodes"], 60, 16, 3, agree, CPU, logits)
        outs = [verify_trees(*c) for c in given]
        tokens[regime] = [x for out in outs for x in out.length.tolist()]
        assert len({tuple(c.batch.token.tolist()) for c in given}) == 3
    assert set(tokens["reject at root"]) == {1} and set(tokens["accept all"]) == {5}
    assert len(set(tokens["typical"])) > 2

def test_drafted_tokens_have_the_distribution_of_their_rows():
    "The first two siblings of many copies: the exponential race draws without replacement"
    torch.manual_seed(0)
    given = ck.make_cases((-1, 0, 0), 4, 20_000, 1, .7, CPU)[0]
    token, q = given.batch.token.view(-1, 3), given.q.double()
    first = torch.bincount(token[:, 1].long(), minlength=4)
    due = q.mean(0)   # each tree has its own row: so their mean, and a wider margin than needed
    assert (first - 20_000*due).abs().max() < 6 * (20_000*.25)**.5 and (token[:, 1] != token[:, 2]).all()
    second = q.scatter(1, token[:, 1:2].long(), 0.)
    due = (second / second.sum(1, keepdim=True)).mean(0)
    seen = torch.bincount(token[:, 2].long(), minlength=4)
    assert (seen - 20_000*due).abs().max() < 6 * (20_000*.25)**.5

@pytest.mark.parametrize("rule", tk.RULES)
@pytest.mark.parametrize("logits", [False, True])
def test_parity_detects_a_wrong_verifier(rule, logits, at_once):
    "The torch verifier agrees with itself, one coin for all nodes does not; a failing verifier is named"
    in_torch = verify_chains if rule == "block" else verify_trees
    def same_coin(batch, p, q, coins, picks, check):
        return in_torch(batch, p, q, coins[:1].expand(len(coins)).clone(), picks, check=check)
    def broken(*args, **kw): raise RuntimeError("no kernel image")
    verifiers = dict(kernel=in_torch, mutant=same_coin, broken=broken)
    differ = tk.tree_parity(verifiers, rule, 5, 150, CPU, logits)["differ"]
    assert differ["torch"] == differ["kernel"] == 0 < differ["mutant"]
    assert differ["broken"] == "RuntimeError: no kernel image"

def test_random_trees_cover_every_case():
    "The children of each rule, trees of a root alone, duplicates among siblings, extreme coins"
    from specref.gpu.layout import check_batch
    for rule in tk.RULES:
        batch, p, q, coins, picks = tk.random_trees(rule, 300, 5)
        check_batch(batch, 5, len(q))
        kids = batch.parent >= 0
        drawn, apart = batch.q_row[kids] >= 0, batch.without_replacement[kids]
        some = 0 < drawn.sum() < len(drawn) and 0 < apart.sum() < len(apart)
        claims = {"points": not drawn.any(), "without replacement": apart.all(), "mixed": some}
        assert claims.get(rule, drawn.all() and not apart.any())
        assert (batch.width == 1) == (rule in ("chain", "block")) and (torch.diff(batch.root) == 1).any()
        assert (coins == 0).any() and (coins == 1 - 2.**-53).any()
    batch = tk.random_trees("independent", 300, 5)[0]
    pair = batch.sibling
    assert (batch.token[pair >= 0] == batch.token[pair[pair >= 0].long()]).any()

def test_the_joint_distribution_fits_and_a_mutants_does_not(at_once):
    "200,000 drafts, false-alarm rate 1e-9, all trees at once: the verifier fits; one shared coin does not"
    def shared(batch, p, q, coins, picks, check):
        coins = coins.view(-1, 5)[:, :1].expand(-1, 5).flatten()
        return verify_trees(batch, p, q, coins, picks, check=check)
    found = tk.joint_law(dict(kernel=verify_trees, mutant=shared), 200_000, CPU, chunk=70_000)
    right = found["kernel"]
    assert right["fits"] and right["draws"] == 200_000 and right["sees"] < .02 and not found["mutant"]["fits"]

# The clocks and the parts

def test_times_are_positive_and_a_failing_verifier_is_named():
    "All verifiers on the same inputs; the row holds what the table needs"
    def broken(*args, **kw): raise ValueError("p: got none")
    case = "chain 5", 40, 2, "typical", CPU
    row = ck.verify_times({"kernel": verify_trees, "broken": broken}, *case, least=4, repeats=1)
    assert row["us"]["kernel"] > 0 and row["us"]["broken"] == "ValueError: p: got none"
    assert row["bytes"] > 0 and 1 <= row["tokens"] <= 6 and row["sets"] >= 1
    contestants = {"kernel": verify_trees, "first": partial(ck.softmax_first, verify_trees)}
    first = ck.verify_times(contestants, *case, logits=True, least=4, repeats=1)
    assert all(x > 0 for x in first["us"].values())

def test_softmax_first_gives_the_same_tokens():
    "The baseline gives the tokens of verification on logits"
    for c in ck.make_cases(ck.TREE_SHAPES["16 nodes"], 30, 8, 2, .7, CPU, logits=True):
        assert torch.equal(ck.softmax_first(verify_trees, *c).tokens, verify_trees(*c, check=False).tokens)

def test_the_number_of_inputs_fits_the_memory():
    "On a CPU four, fewer where they exceed a gigabyte, at least one"
    sizes = ("chain 5", 1000, 1), ("64 nodes", 151_936, 8), ("64 nodes", 151_936, 256)
    assert [ck.batches_beyond_cache(ck.TREE_SHAPES[tree], V, B, CPU) for tree, V, B in sizes] == [4, 2, 1]

class Fake:
    "A device whose calls take 2 ms each, in a queue"
    now = 0.
    def __init__(self, **kw): self.held, Fake.last = [], self
    def record(self): self.at = Fake.now
    def synchronize(self): pass
    def elapsed_time(self, end): return end.at - self.at
    def replay(self): Fake.now += 2. * self.held.count(1)
    def __enter__(self): self.held.append("open")
    def __exit__(self, *_): self.held.append("closed")

@pytest.mark.parametrize("clock", [ck.on_graph, ck.on_queue])
def test_the_clocks_of_a_device(clock, monkeypatch):
    "On a fake device: two milliseconds a call, sleep and recording not counted, every call in the graph"
    Fake.now, graphs = 0., []
    monkeypatch.setattr(torch.cuda, "Event", Fake)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(Fake()) or graphs[-1])
    monkeypatch.setattr(torch.cuda, "graph", lambda g: g)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda n: setattr(Fake, "now", Fake.now + 100.), raising=False)
    def call():
        if graphs and graphs[0].held[-1] != "closed": graphs[0].held.append(1)
        else: Fake.now += 2.
    assert clock([call] * 7, 3) == pytest.approx(2e-3)
    assert not graphs or graphs[0].held == ["open", *[1]*7, "closed"]

def test_bounds_of_this_machine():
    "A copy and a launch take time"
    found = ck.bounds(CPU, 1 << 20)
    assert found["copy"] > 1e6 and found["read"] > 1e6 and found["launch_us"] > 0

def test_flashinfer_gets_the_same_rows(monkeypatch):
    "Shapes and order of the arguments of its kernel"
    seen = []
    fake = SimpleNamespace(chain_speculative_sampling=lambda *args: seen.extend(args))
    monkeypatch.setattr(ck, "import_module", lambda name: fake)
    c, = ck.make_cases(ck.TREE_SHAPES["chain 5"], 40, 3, 1, .7, CPU)
    ck.flashinfer(*c)
    q, ids, p = seen
    assert q.shape == (3, 5, 40) and p.shape == (3, 6, 40) and ids.dtype == torch.int32
    assert torch.equal(ids[1], c.batch.token[7:12]) and torch.equal(p[2, 0], c.p[12])

def test_vllm_gets_the_same_rows(monkeypatch):
    "Logits of every node and of every draft, the tokens of the chain with its root"
    seen = []
    fake = SimpleNamespace(vllm_verdict=lambda *args: seen.extend(args))
    monkeypatch.setattr(ck, "import_module", lambda name: fake)
    monkeypatch.setattr(ck, "vllm_kernels", lambda: None)
    c, = ck.make_cases(ck.TREE_SHAPES["chain 5"], 40, 3, 1, .7, CPU, logits=True)
    ck.vllm(*c)
    _, p, q, tokens, seeds = seen
    assert p.shape == (3, 6, 40) and q.shape == (3, 5, 40) and torch.equal(p[2, 0], c.p.x[12])
    assert torch.equal(tokens[1], c.batch.token[6:12].long()) and len(seeds) == 3

def test_the_two_attentions_agree():
    "On the same rows, in the form that the compiler gets; if the compiler fails, only its figure is missing"
    sizes = dict(heads=4, shared=2, width=16, dtype=torch.float32)
    row = tk.attention_times("16 nodes", 2, 20, CPU, **sizes, compiler=lambda f: f, clock=None)
    assert row["apart"] < 1e-5 and all(x > 0 for x in row["us"].values())
    def broken(f):
        def g(*args, **kw): raise RuntimeError("no inductor")
        return g
    row = tk.attention_times("16 nodes", 2, 20, CPU, **sizes, compiler=broken)
    assert row["us"]["FlexAttention"] == row["apart"] == "RuntimeError: no inductor" and row["us"]["SDPA"] > 0

@pytest.mark.parametrize("logits", [False, True])
def test_large_trees_are_compared(logits):
    "The torch verifier agrees with itself; one whose addresses wrap to the first tree's rows does not"
    def wraps(batch, p, q, coins, picks, check):
        rows = Logits(p.x[:16].repeat(6, 1)) if logits else p[:16].repeat(6, 1)
        return verify_trees(batch, rows, q, coins, picks, check=check)
    case = "16 nodes", 60, 6, "typical", CPU, logits
    right, wrong = (tk.parity_at_size(f, *case) for f in (verify_trees, wraps))
    assert right == dict(entries=6*16*60, differ=0) and wrong["differ"] > 0

def test_inputs_are_laid_out_alike():
    "Every array begins where an allocation begins, so that a kernel specialised for the first fits all"
    for tree, B in ("chain 5", 1), ("64 nodes", 1):
        for c in ck.make_cases(ck.TREE_SHAPES[tree], 40, B, 3, .7, CPU):
            for x in (c.batch.token, c.coins, c.picks):
                assert x.storage_offset() == 0 and x.is_contiguous()
                assert x.untyped_storage().nbytes() == x.nbytes

# The file and the table

KNOWN = dict(device="a card", driver="1", cuda="13", versions=dict(torch="2", triton="3", numpy="2"),
             date="2026-01-01", machine="a machine", load=.1, commit="0123456789")
BOUNDS = [dict(copy=1e12, read=2e12, launch_us=2.)]

def shaped(verify):
    "A verifier that takes the options of a launch, and ignores them"
    def f(*args, block=0, warps=0, registers=0, programs=0, **kw): return verify(*args, **kw)
    return f

def tiny_run(folder, verifiers=(shaped(verify_trees), shaped(verify_chains)),
             race=dict(models=dict(shallow=small))):
    size = tk.GpuSizes(V=40, others=(30,), Bs=(1, 2), most=2, forests=((5, 20),), draws=800, race=race,
                       texts=(1,), n=4, repeats=1, lengths=(), programs=(1, 2),
                       trees=("chain 5", "16 nodes"), least=2)
    apart = "compile", "profile", "sanitizer"   # they need a GPU's compiler or tools
    bounds, *others = (t for t in tk.gpu_tasks(CPU, verifiers, size) if t.part not in apart)
    bounds = bounds._replace(run=partial(bounds.run, 1 << 20))   # bytes that are copied
    return tk.run_tasks([bounds, *others], folder/"gpu.json", KNOWN)

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A small run of every part, and the file that it wrote"
    folder = tmp_path_factory.mktemp("whole")
    return tiny_run(folder), folder/"gpu.json"

def test_a_run_is_written_whole(whole):
    "Every part with every setting; the file equals the returned value; what is not installed is named"
    got, file = whole
    assert json.loads(file.read_text()) == json.loads(json.dumps(got))
    assert [f.name for f in file.parent.iterdir()] == ["gpu.json"]
    made = {part: len(rows) for part, rows in got["parts"].items()}
    assert made == dict(bounds=1, parity=12, speed=8, baselines=10, engine=2, programs=8, law=1, rest=8)
    assert not any({"error", "skipped"} & r.keys() for rows in got["parts"].values() for r in rows)
    lines = list(me.gpu_table(got))
    assert any("torch 0, kernel 0" in l for l in lines)
    assert any(l.startswith("distribution, kernel") and l.endswith("fits") for l in lines)
    for module in ("flashinfer", "sgl_kernel", "vllm"):
        assert any(f"ModuleNotFoundError: No module named '{module}" in l for l in lines)
    assert sum("us by programs a tree 1: " in l and l.endswith("; 0 verdicts differ") for l in lines) == 8
    assert any(l.startswith("a round, B = 1, us: draft ") and " commit " in l for l in lines)

def test_the_full_run():
    "Parity of 10,000 trees a rule; every batch in three shapes; parts in their order; each launch once"
    tasks = tk.gpu_tasks(CPU, (verify_trees, verify_chains))
    def given(part): return [t.given for t in tasks if t.part == part]
    for rule in tk.RULES:
        assert sum(g["B"] for g in given("parity") if g["rule"] == rule and not g["logits"]) == 10_000
    assert [g["draws"] for g in given("law")] == [10**7]
    both = False, True
    grid = {*product(("chain 5", "64 nodes"), (1, 64, 256), both), *product(("chain 5",), (1024,), both)}
    assert {(g["tree"], g["B"], g["logits"]) for g in given("speed")} == grid
    assert {g["B"] for g in given("engine")} == {1, 16}
    assert any(64*256*151_936 > 2**31 and g["B"] == 256 for g in given("rest"))
    assert [*dict.fromkeys(t.part for t in tasks)] == [*tk.SECONDS] and sum(tk.SECONDS.values()) <= 8*60
    assert sum(tk.SECONDS[part] for part in me.parts_through("speed")) <= 3*60
    launches = tasks[1].run.args[0]
    assert len({*map(str, launches)}) == len(launches) < 45
    assert {str(x) for t in tasks for x in t.launches} == {*map(str, launches)}

@pytest.mark.parametrize("logits", [False, True])
def test_stored_verdicts_are_found_by_their_arguments(logits, tmp_path):
    "Those of the same numbers are used; of others the torch implementation is run"
    path, sizes = tmp_path/"v.npz", ("mixed", 5, 30, logits)
    assert tk.stored_verdicts(path) == {}
    store_verdicts(path, [sizes])
    stored = tk.stored_verdicts(path)
    found = tk.tree_parity({}, *sizes[:3], CPU, logits, stored)
    assert found["stored"] and found["differ"] == dict(torch=0)
    (key, table), = stored.items()
    table[0] += 1
    assert tk.tree_parity({}, *sizes[:3], CPU, logits, {key: table})["differ"] == dict(torch=1)
    assert not tk.tree_parity({}, "mixed", 5, 31, CPU, logits, stored)["stored"]
    store_verdicts(path, [(rule, *sizes[1:]) for rule in ("chain", "block")])   # of the same numbers
    for rule in "chain", "block":
        found = tk.tree_parity({}, rule, *sizes[1:3], CPU, logits, tk.stored_verdicts(path))
        assert found["stored"] and found["differ"] == dict(torch=0)

def test_what_is_compiled_ahead_is_what_is_launched():
    "A rehearsed task notes no kernel that its own launches have not compiled; without them it does"
    size = tk.GpuSizes(V=4096, Bs=(1,), trees=("chain 4", "16 nodes"), shapes=((2048, 4, 255),), least=1,
                       repeats=1, clock=ck.on_host, forests=())
    verifiers, known = [*map(Rehearsed, tk.fused_kernels(), (verify_trees, verify_chains))], set()
    task = next(t for t in tk.speed_tasks(CPU, verifiers[0], size) if t.given["tree"] == "chain 4")
    bare = rehearse(task, verifiers, set()).run(**task.given)
    known.update(k["hash"] for x in task.launches for k in tk.compile_launch(**x))
    ahead = rehearse(task, verifiers, known).run(**task.given)
    assert bare["not_ahead"] == ["verify_trees_kernel"] and ahead["not_ahead"] == [] and ahead["us"]

def test_a_failing_part_affects_no_other(tmp_path):
    "With failing kernels and engine: their entries are messages, the others numbers; the table is printed"
    def broken(*args, **kw): raise RuntimeError("PassManager::run failed")
    parts = tiny_run(tmp_path, (broken, broken), dict(models={}))["parts"]
    assert parts["law"][0]["torch"]["fits"] and {r["differ"]["torch"] for r in parts["parity"]} == {0}
    assert parts["engine"][0]["error"] == "KeyError: 'shallow'"
    lines = list(me.gpu_table(json.loads((tmp_path/"gpu.json").read_text())))
    for words in ("PassManager", "KeyError", "not measured yet"): assert any(words in l for l in lines)

def test_the_table_with_missing_parts(whole):
    "Without any one part, without the bounds, with lost rows: lines, and no exception"
    got, _ = whole
    for part in got["parts"]:
        others = {k: v for k, v in got["parts"].items() if k != part}
        assert list(me.gpu_table(got | dict(parts=others)))
    bare = got | dict(parts={k: v for k, v in got["parts"].items() if k != "bounds"})
    lines = [*me.gpu_table(bare)]
    assert any("nan" in l for l in lines) and not any("wanted 70%" in l and "worst" in l for l in lines)
    lost = got | dict(parts={k: [dict(r, error=tk.NOT_RETURNED) for r in v] for k, v in got["parts"].items()})
    assert sum(l.endswith(tk.NOT_RETURNED) for l in me.gpu_table(lost)) == len(got["parts"])
    assert list(me.gpu_table(KNOWN | dict(parts={}, seconds={})))

def task(part, run, **given): return tk.Task(part, run, given)

def test_failed_and_late_tasks(tmp_path):
    "A failed task has its error in the file, a late one the reason; the others are complete"
    def boom(x): raise MemoryError("no more")
    def fine(x): return task("a", lambda x: dict(y=x), x=x)
    tasks = [fine(1), task("a", boom, x=2), task("b", dict), fine(3)]
    got = tk.run_tasks(tasks, tmp_path/"x.json", {}, dict(a=60, b=-1))
    first, last = dict(x=1, y=1), dict(x=3, y=3)
    a = [first, dict(x=2, error="MemoryError: no more"), last]
    assert got["parts"] == dict(a=a, b=[dict(skipped="no time was left")])
    assert me.valid_rows(got, "a") == [first, last] and me.valid_rows(got, "a", x=3) == [last]
    assert me.valid_rows(got, "c") == []
    assert list(me.failures(got)) == ["1 failures, 1 tasks skipped", "a: MemoryError: no more"]

def test_a_run_goes_on_after_a_lost_task(tmp_path):
    "A lost row stays, the rest of its part is skipped, the others run; time already spent counts"
    tasks = [task(part, lambda x: dict(y=x), x=i) for i, part in enumerate("aaba")]
    was = dict(parts=dict(a=[dict(x=0, y=0), dict(x=1, error=tk.NOT_RETURNED)]), seconds={})
    got = tk.run_tasks(tasks, tmp_path/"x.json", was)
    skipped = dict(x=3, skipped="a task of this part did not come back")
    a = [dict(x=0, y=0), dict(x=1, error=tk.NOT_RETURNED), skipped]
    assert got["parts"] == dict(a=a, b=[dict(x=2, y=2)])
    late = tk.run_tasks(tasks, tmp_path/"y.json", dict(parts={}, seconds=dict(a=61.)), dict(a=60))["parts"]
    assert {r.get("skipped") for r in late["a"]} == {"no time was left"} and late["b"] == [dict(x=2, y=2)]

def test_a_broken_device_ends_the_process(tmp_path, monkeypatch):
    "Where the device fails for good, the row is written and the program ends with an error"
    def sticky(): raise RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", sticky)
    tasks = [task("a", sticky), task("b", dict)]
    with pytest.raises(SystemExit, match="illegal"): tk.run_tasks(tasks, tmp_path/"x.json", {})
    error = "RuntimeError: an illegal memory access was encountered"
    assert json.loads((tmp_path/"x.json").read_text())["parts"] == dict(a=[dict(error=error)])

CHILD = """
import sys, os, time, json, pathlib
out = pathlib.Path(sys.argv[1])
done = len(out.read_text()) if out.exists() else 0
for i in range(done, 4):
    out.write_text("x" * (i + 1))
    if i == 1: os._exit(139)      # exits in the second task
    if i == 2: time.sleep(600)    # hangs in the third
"""

@pytest.mark.parametrize("hangs", [True, False])
def test_a_supervised_child(hangs, tmp_path):
    "A child that exits or hangs is restarted after its task, unless it wrote nothing; all end in time"
    out, then = tmp_path/"x", time()
    if not hangs:
        tk.supervise([sys.executable, "-c", "import sys; sys.exit(1)"], out, 60.)
        assert not out.exists() and time() - then < 10
    else:
        tk.supervise([sys.executable, "-c", CHILD, str(out)], out, 60., patience=1.)
        assert out.read_text() == "xxxx" and 1 < time() - then < 15
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        tk.supervise(sleeper, out, 1., patience=60.)
        assert time() - then < 25

def test_an_interrupted_run_is_stored_so_far(tmp_path):
    "Ctrl-C in the third task leaves the first two on disk"
    def stop(): raise KeyboardInterrupt
    tasks = [task("a", lambda: dict(y=1))]*2 + [task("a", stop)]
    with pytest.raises(KeyboardInterrupt): tk.run_tasks(tasks, tmp_path/"x.json", {})
    rows = [*[dict(y=1)]*2, dict(error=tk.NOT_RETURNED)]
    assert json.loads((tmp_path/"x.json").read_text())["parts"] == dict(a=rows)

def test_goals_beside_what_was_reached():
    "Nothing measured, nothing stated; else the worst and the median, in the units of the goal"
    nothing = [*me.wanted_table(dict(parts={}))]
    assert all(l.endswith("not measured yet") for l in nothing) and len(nothing) == 13
    def row(us, B, tree="chain 5"): return dict(us=us, B=B, bytes=1e8, tree=tree, logits=False)
    speed = [row(dict(a=200., b=125., c="ValueError"), 256), row(dict(a=400.), 64, "64 nodes"),
             row(dict(a=9.), 64)]
    others = {"softmax of all rows first": 250., "vLLM": 40., "FlashInfer": "ModuleNotFoundError"}
    parts = dict(bounds=[dict(copy=1e12)], speed=speed,
                 programs=[row({"1": 60., "16": us, "64": "ValueError"}, 1) for us in (8., 9.)],
                 baselines=[row({"kernel": 50., name: us}, 64) for name, us in others.items()],
                 engine=[{"B": B, "tokens_per_s": dict(plain=300.), "weight_bytes": 2e9,
                          "engine over plain": over, "predicted": 2.} for B, over in ((1, 2.1), (16, 1.6))])
    ends = ["80% at worst, median 80%", "25% at worst, median 25%", "9.0 us at worst, median 8.5 us",
            "0.20 at worst, median 0.20", "1.25 at worst, median 1.25",
            *["not measured yet"]*2, "60% at worst, median 60%", "0.80 at worst, median 0.93"]
    assert all(line.endswith(end) for line, end in zip(me.wanted_table(dict(parts=parts)), ends))

def test_without_triton_times_are_measured(monkeypatch):
    "The count of bytes is an error text, and the table has no share of a copy"
    monkeypatch.setattr(tv, "bytes_read", lambda *a: __import__("no_triton_here"))
    row = tv.against_reference("chain 8", 30, 2, "float64", 1, 1)
    assert row["bytes"].startswith("ModuleNotFoundError") and row["torch_ms"] > 0
    in_torch = dict(row, tree="chain 8", kind="float64", threads=1)
    got = dict(KNOWN, seconds={}, parts=dict(copy=[dict(threads=1, copy=1e9)], torch=[in_torch]))
    assert "nan% of a copy" in list(me.cpu_table(got))[3] and "1 failures" in list(me.cpu_table(got))[4]

def test_verification_is_measured_without_transformers():
    "The module is imported without transformers; only the decoding speed needs it"
    program = ("import sys; sys.modules['transformers'] = None\n"
               "from specref.gpu.bench import measured, tasks as tk\n"
               "call = lambda: tk.imported_call('bench.decoding', 'decoding_speed', name='shallow')\n"
               "print(tk.or_reason(call))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=Path(me.__file__).parents[3])
    assert "transformers" in done.stdout and "Error" in done.stdout, done.stderr

def test_a_gpu_run_from_the_command_line(tmp_path, monkeypatch, capsys):
    "A supervised child runs this module with --here; the table is printed last"
    got, called = dict(KNOWN, parts={}, seconds={}), []
    def supervised(command, out, seconds):
        assert seconds == 20 + sum(tk.SECONDS[part] for part in me.parts_through("speed"))
        called[:] = command, tk.write_json(out, got)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(me, "fused_kernels", lambda: (verify_trees, verify_chains))
    monkeypatch.setattr(me, "supervise", supervised)
    me.run(["--out", str(tmp_path), "--through", "speed"])
    assert called[0][2:] == ["specref.gpu.bench", "--here", "--out", str(tmp_path), "--through", "speed"]
    assert capsys.readouterr().out.splitlines() == list(me.gpu_table(got))
    monkeypatch.setattr(me, "supervise", lambda *a: None)
    with pytest.raises(SystemExit, match="was not written"): me.run(["--out", str(tmp_path/"none")])

@pytest.mark.parametrize("args, what", [
    (["--through", "nothing"], "invalid choice"), (["--out", __file__], "out: got"),
    ([], "no GPU"), (["--what"], "unrecognized")])
def test_bad_arguments(args, what, monkeypatch, capsys):
    "Refused before anything is measured"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(me, "run_tasks", None)
    with pytest.raises(SystemExit) as e: me.run(args)
    assert e.value.code == 2 and what in capsys.readouterr().err

def test_a_run_on_a_cpu(tmp_path, monkeypatch):
    "The same tokens as the reference, in both precisions; the file is written, its table is whole"
    monkeypatch.setattr(tv.os, "getloadavg", lambda: (.1, 9., 9.))
    got = tv.torch_times(tmp_path/"torch_verifiers.json", V=50, B=3, laps=2, Bs=(1,), size=1 << 16)
    torch.set_num_threads(1)
    assert got == json.loads((tmp_path/"torch_verifiers.json").read_text())
    lines, rows = list(me.cpu_table(got)), got["parts"]["torch"] + got["parts"]["size"]
    assert {part: len(rows) for part, rows in got["parts"].items()} == dict(copy=2, torch=8, size=2)
    assert all(r["same"] and r["torch_ms"] > 0 and r["ratio"] > 0 for r in rows)
    assert len(lines) == 12 and lines[-1] == "0 failures, 0 tasks skipped"
    assert "of a copy" in lines[3] and "DIFFERENT" not in "".join(lines)
    got["parts"]["torch"][0]["same"] = False
    assert list(me.cpu_table(got))[3].endswith("DIFFERENT")
    assert got["machine"] and got["versions"]["torch"] == torch.__version__

def test_a_busy_machine_is_refused(tmp_path, monkeypatch):
    "A run on a CPU is not begun beside other programs, and nothing is written"
    monkeypatch.setattr(tv.os, "getloadavg", lambda: (1.2, 0., 0.))
    file = tmp_path/"torch_verifiers.json"
    with pytest.raises(SystemExit, match="load of this machine is 1.2"): tv.torch_times(file)
    assert not file.exists()

def test_the_stored_runs_are_readable():
    "Where a run is stored, its table can be printed and no tokens differ"
    for name, table in (("torch_verifiers", me.cpu_table), ("gpu", me.gpu_table)):
        if name not in record_files(): continue
        got = read_record(name)
        same = [r["same"] for r in me.valid_rows(got, "torch") if "same" in r]
        assert len(list(table(got))) > 3 and all(same)

@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_on_a_gpu():
    "Kernel, graph and queue on the device, at small sizes"
    kernel, _ = tk.fused_kernels()
    cuda = torch.device("cuda")
    assert tk.tree_parity({"kernel": kernel}, "mixed", 7, 200, cuda)["differ"] == dict(torch=0, kernel=0)
    both = {"kernel": kernel, "torch": verify_trees}
    for clock in (ck.on_graph, ck.on_queue):
        assert ck.verify_times(both, "16 nodes", 1000, 4, "typical", cuda, clock=clock)["us"]["kernel"] > 0
