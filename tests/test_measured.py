"Chapter 45: what is counted, what is asked of a walk, the clocks, what a run writes and what its table says"
import json
from fractions import Fraction as F
from functools import partial
from itertools import permutations

import numpy as np, pytest, torch
from helpers import proves, refuses
from specref.gpu import measured as m
from specref.gpu.verify import Logits, Probs, walk, walk_back

CPU = torch.device("cpu")
pytest.importorskip("triton", reason="the count of rows stands beside the kernels, which need triton")
small = partial(m.shallow, layers=4, hidden=32, inner=64, heads=4, shared=2, V=600, dtype=torch.float32)


# The floor

@pytest.mark.parametrize("seed", range(2))
@proves("thm-whole-rows")
def test_every_entry_of_a_visited_row_decides(seed):
    "On one tape: an entry raised without bound makes its token the next one, an entry at -inf never gives it; rows that were not visited change nothing"
    case, = m.cases(m.TREES["16 nodes"], 5, 2, 1, .7, CPU, logits=True, seed=seed)
    batch, rows, *rest = case
    rows = rows.x.float()
    ask = lambda x: walk(batch, Logits(x), *rest, check=False)
    was, visited = ask(rows), set()
    for b, (root, nodes) in enumerate(zip(batch.root.tolist(), was.nodes.tolist())):
        for k, u in enumerate([root, *(i for i in nodes if i >= 0)]):
            visited.add(u)
            for v in range(5):
                for z in (1e6, -torch.inf):
                    x = rows.clone(); x[u, v] = z
                    assert (ask(x).tokens[b, k].item() == v) == (z > 0)
    x = rows.clone()
    x[[u for u in range(batch.n) if u not in visited]] = torch.randn(batch.n - len(visited), 5)
    assert 0 < len(visited) < batch.n and torch.equal(ask(x).tokens, was.tokens)

@pytest.mark.parametrize("V", [2, 3, 4, 5])
@proves("prop-half-a-row")
def test_half_a_row(V):
    "Whatever order a program looks in, over points it reads the same number of entries on average: until it has met the point, or all but one"
    def reads(order, point):
        seen = 0
        while seen < V - 1:
            seen += 1
            if order[seen - 1] == point: break
        return seen
    means = {F(sum(reads(order, v) for v in range(V)), V) for order in permutations(range(V))}
    assert means == {F(V + 1, 2) - F(1, V)}


class Noted(Probs):
    "Rows that note which of them are read in full"
    def weigh(self, b, row, top, v=None):
        if v is None: self.seen.update(row.tolist())
        return super().weigh(b, row, top, v)

@pytest.mark.parametrize("regime", m.AGREE)
@pytest.mark.parametrize("tree", ["chain 5", "16 nodes"])
def test_bytes_are_the_rows_that_are_read(tree, regime):
    "The bytes counted are those of the rows that the twin, which may ask on a CPU, reads in full"
    total, given = 0, m.cases(m.TREES[tree], 50, 6, 3, m.AGREE[regime], CPU)
    for c in given:
        p, q = Noted(c.p), Noted(c.q)
        for x in (p, q): object.__setattr__(x, "seen", set())
        walk(c.batch, p, q, c.coins, c.picks, check=False)
        total += 4*50*(len(p.seen) + len(q.seen))
    assert m.bytes_read(given, walk)[0] == total / 3 and total > 0

def test_logits_cost_every_visited_row():
    "With logits, in bfloat16: a row of p for each token emitted; when all is kept, a row of q for each token kept"
    given = m.cases(m.TREES["chain 5"], 40, 4, 2, 1., CPU, logits=True)
    size, tokens = m.bytes_read(given, walk)
    assert tokens == 6 and size == 4 * (6 + 5) * 40 * 2 and given[0].p.x.dtype == torch.bfloat16


# What is asked

@pytest.mark.parametrize("logits", [False, True])
def test_the_cases_are_what_they_are_called(logits):
    "Struck out, nothing is kept; equal rows keep the eldest down to a leaf; in between, something; the door lets them in, and sets differ"
    tokens = {}
    for regime, agree in m.AGREE.items():
        given = m.cases(m.TREES["16 nodes"], 60, 16, 3, agree, CPU, logits)
        outs = [walk(*c) for c in given]
        tokens[regime] = [x for out in outs for x in out.length.tolist()]
        assert len({tuple(c.batch.token.tolist()) for c in given}) == 3
    assert set(tokens["reject at root"]) == {1} and set(tokens["accept all"]) == {5} and len(set(tokens["typical"])) > 2

def test_the_trees_are_those_of_the_issue():
    "A chain of five, sixteen nodes four deep, sixty-four nodes eight deep"
    deep = lambda parent, i: 0 if i < 0 else deep(parent, parent[i]) + 1
    assert [(len(t), max(deep(t, i) for i in range(len(t))) - 1) for t in (m.TREES[k] for k in ("chain 5", "16 nodes", "64 nodes"))] == [(6, 5), (16, 4), (64, 8)]

def test_drafted_tokens_have_the_law_of_their_rows():
    "The first two siblings of many copies: the exponential race is a draw without replacement"
    from specref.certify import g_test
    torch.manual_seed(0)
    given = m.cases((-1, 0, 0), 4, 20_000, 1, .7, CPU)[0]
    token, q = given.batch.token.view(-1, 3), given.q.double()
    first = torch.zeros(4, dtype=torch.float64).index_add(0, token[:, 1].long(), torch.ones(20_000, dtype=torch.float64))
    due = q.mean(0)   # each tree has a row of its own: the mean of the rows, and a test that is a little too mild
    assert (first - 20_000*due).abs().max() < 6 * (20_000*.25)**.5 and (token[:, 1] != token[:, 2]).all()
    second = q.scatter(1, token[:, 1:2].long(), 0.)
    due = (second / second.sum(1, keepdim=True)).mean(0)
    seen = torch.bincount(token[:, 2].long(), minlength=4)
    assert (seen - 20_000*due).abs().max() < 6 * (20_000*.25)**.5

@pytest.mark.parametrize("rule", m.RULES)
@pytest.mark.parametrize("logits", [False, True])
def test_parity_sees_a_wrong_judge(rule, logits):
    "The twin agrees with itself; a judge whose coins are all its first one does not; one that fails is named"
    twin = walk_back if rule == "block" else walk
    def same_coin(batch, p, q, coins, picks, check): return twin(batch, p, q, coins[:1].expand(len(coins)).clone(), picks, check=check)
    def broken(*args, **kw): raise RuntimeError("no kernel image")
    said = m.parity(dict(kernel=twin, mutant=same_coin, broken=broken), rule, 5, 150, CPU, logits)
    assert said["differ"]["twin"] == said["differ"]["kernel"] == 0 < said["differ"]["mutant"] and said["differ"]["broken"] == "RuntimeError: no kernel image"

def test_forests_have_what_is_claimed():
    "Every kind of child where it should be, lone roots, duplicates among siblings, the extremes among the coins"
    from specref.gpu.layout import checked
    for rule in m.RULES:
        batch, p, q, coins, picks = m.forest(rule, 300, 5)
        checked(batch, 5, len(q))
        kids = batch.parent >= 0
        drawn, apart = batch.q_row[kids] >= 0, batch.apart[kids]
        assert {"points": not drawn.any(), "without replacement": bool(apart.all()), "mixed": 0 < drawn.sum() < len(drawn) and 0 < apart.sum() < len(apart)}.get(rule, bool(drawn.all() and not apart.any()))
        assert (batch.width == 1) == (rule in ("chain", "block")) and (coins == 0).any() and (coins == 1 - 2.**-53).any() and (torch.diff(batch.root) == 1).any()
    pair = (batch := m.forest("independent", 300, 5)[0]).sibling
    assert (batch.token[pair >= 0] == batch.token[pair[pair >= 0].long()]).any()

def test_the_joint_law_fits_and_a_mutant_does_not():
    "200,000 drafts at a false alarm of 1e-9: the walk fits; one coin for both siblings, or a bonus drawn with a coin, does not"
    def shared(batch, p, q, coins, picks, check): return walk(batch, p, q, coins.view(-1, 5)[:, :1].expand(-1, 5).flatten(), picks, check=check)
    said = m.joint_law(dict(kernel=walk, mutant=shared), 200_000, CPU, chunk=70_000)
    assert said["kernel"]["fits"] and said["kernel"]["draws"] == 200_000 and said["kernel"]["sees"] < .02 and not said["mutant"]["fits"]


# The clocks and the parts

def test_times_are_positive_and_a_failing_judge_is_named():
    "All judges on the same inputs; the row holds what the table needs"
    def broken(*args, **kw): raise ValueError("p: got none")
    row = m.timed({"kernel": walk, "broken": broken}, "chain 5", 40, 2, "typical", CPU, least=4, repeats=1)
    assert row["us"]["kernel"] > 0 and row["us"]["broken"] == "ValueError: p: got none" and row["bytes"] > 0 and 1 <= row["tokens"] <= 6 and row["sets"] >= 1
    first = m.timed({"kernel": walk, "first": partial(m.softmax_first, walk)}, "chain 5", 40, 2, "typical", CPU, logits=True, least=4, repeats=1)
    assert all(x > 0 for x in first["us"].values())

def test_softmax_first_is_the_same_walk():
    "The baseline gives the tokens of the walk on logits"
    for c in m.cases(m.TREES["16 nodes"], 30, 8, 2, .7, CPU, logits=True):
        assert torch.equal(m.softmax_first(walk, *c).tokens, walk(*c, check=False).tokens)

def test_the_number_of_inputs_fits_the_memory():
    "On a CPU four, fewer where a gigabyte does not hold them, never none"
    assert m.how_many(m.TREES["chain 5"], 1000, 1, CPU) == 4 and m.how_many(m.TREES["64 nodes"], 151_936, 8, CPU) == 2 and m.how_many(m.TREES["64 nodes"], 151_936, 256, CPU) == 1

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

@pytest.mark.parametrize("clock", [m.replayed, m.queued])
def test_the_clocks_of_a_device(clock, monkeypatch):
    "On a device of which all is known: two milliseconds a call, the sleep and the recording not counted, every call in the graph"
    graphs = []
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
    found = m.bounds(CPU, 1 << 20)
    assert found["copy"] > 1e6 and found["launch_us"] > 0

def test_flashinfer_is_asked_for_the_same_rows(monkeypatch):
    "Shapes and order of what its kernel is given"
    from types import SimpleNamespace
    seen = []
    monkeypatch.setattr(m, "import_module", lambda name: SimpleNamespace(chain_speculative_sampling=lambda *args: seen.extend(args)))
    c, = m.cases(m.TREES["chain 5"], 40, 3, 1, .7, CPU)
    m.flashinfer(*c)
    q, ids, p = seen
    assert q.shape == (3, 5, 40) and p.shape == (3, 6, 40) and ids.dtype == torch.int32 and torch.equal(ids[1], c.batch.token[7:12]) and torch.equal(p[2, 0], c.p[12])

def test_early_layers_are_a_draft():
    "The draft shares weights with the target; what the late layers add is scaled; the smaller the scale, the more the two agree; an eighth of the bytes at full size"
    agree, x = [], torch.tensor([[1, 2, 3, 4]])
    for scale in (0., .1, 1.):
        target, draft = small(CPU, scale=scale)
        assert draft.model.layers[0] is target.model.layers[0] and draft.lm_head.weight is target.lm_head.weight and len(draft.model.layers) == 2
        with torch.inference_mode(): agree.append(torch.minimum(*(f(input_ids=x).logits.softmax(-1) for f in (target, draft))).sum(-1).mean().item())
    assert agree[0] == pytest.approx(1) and agree[0] > agree[1] > agree[2]
    with torch.device("meta"): full = [m.AutoModelForCausalLM.from_config(m.LlamaConfig(num_hidden_layers=n, vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=True)) for n in (26, 2)]
    assert .1 < m.weight_bytes(full[1]) / m.weight_bytes(full[0]) < .15 and 1e9 < sum(w.numel() for w in full[0].parameters()) < 1.4e9

def test_shipped_models_are_copies():
    "What is moved to a device is not what other chapters hold"
    target, draft = m.shipped(CPU)
    assert target is not m.bare("target") and draft is not m.bare("small") and torch.equal(target.lm_head.weight, m.bare("target").lm_head.weight)

@pytest.mark.parametrize("temperature, B", [(0., 1), (1., 2)])
def test_the_race(temperature, B):
    "Everyone who can run has run, and the figures stand beside each other; at temperature 0 all write the same text"
    row = m.raced(dict(x=small), walk, "x", (-1, 0, 1), temperature, B, 8, 1, CPU)
    assert set(row["tokens_per_s"]) == {"plain", "engine", "generate", *(["assisted"] if B == 1 else [])} and all(x > 0 for x in row["tokens_per_s"].values())
    assert 1 <= row["tokens_a_round"] <= 3 and row["predicted"] == pytest.approx(row["tokens_a_round"] / (1 + 2*row["c"])) and row["engine over plain"] > 0
    if not temperature:
        target, draft = small(CPU)
        ctxs = m.prompts("code", 1)
        ours = [list(m.timed_run(m.Engine(target, draft, shape, temperature=0., judge=walk), ctxs, 8, 0)[1][0]) for shape in ((-1,), (-1, 0, 1))]
        other = [m.theirs(target, ctxs, 8, 0., 0, *more)[1][0] for more in ((), (draft, 2))]
        assert ours[0] == ours[1] == other[0] == other[1]

def test_the_race_goes_on_without_one(monkeypatch):
    "A contestant that fails is named, and the others have figures"
    def broken(*args): raise RuntimeError("out of memory")
    monkeypatch.setattr(m, "theirs", broken)
    row = m.raced(dict(x=small), walk, "x", (-1, 0), 1., 1, 4, 1, CPU)
    assert row["tokens_per_s"]["generate"] == "RuntimeError: out of memory" and row["tokens_per_s"]["engine"] > 0 and "engine over generate" not in row


# The file and the table

KNOWN = dict(device="a card", driver="1", cuda="13", torch="2", triton="3", numpy="2", date="2026-01-01", machine="a machine", load=.1, copy=1e12, launch_us=2.)

def tiny_run(tmp_path):
    tasks = m.gpu_tasks(CPU, (walk, walk_back), Vs=(40,), Bs=(1, 2), trees=("chain 5",), forests=((5, 20),), draws=3000, models=dict(shallow=small), texts=(1,), n=4, repeats=1)
    return m.recorded([t for t in tasks if t.part != "twin"], tmp_path/"gpu.json", 60., KNOWN)

def test_a_run_is_written_whole(tmp_path):
    "Every part with every setting; the file is what was returned; no row is skipped, and only FlashInfer, which is not here, has failed"
    got = tiny_run(tmp_path)
    assert json.loads((tmp_path/"gpu.json").read_text()) == json.loads(json.dumps(got)) and [f.name for f in tmp_path.iterdir()] == ["gpu.json"]
    assert {part: len(rows) for part, rows in got["parts"].items()} == dict(parity=12, law=1, probabilities=6, logits=2, flashinfer=2, engine=2)
    assert not any({"error", "skipped"} & r.keys() for rows in got["parts"].values() for r in rows)
    lines = list(m.gpu_table(got))
    assert any("judged otherwise: twin 0, kernel 0" in l for l in lines) and any(l.startswith("law, kernel") and l.endswith("fits") for l in lines) and any("ModuleNotFoundError" in l for l in lines)
    assert max(map(len, lines)) <= 90

def test_a_failure_costs_one_row_and_time_the_rest(tmp_path):
    "What fails is in the file in words; what comes too late is named; the others stand"
    def boom(x): raise MemoryError("no more")
    tasks = [m.Task("a", 1., lambda x: dict(y=x), dict(x=1)), m.Task("a", 1., boom, dict(x=2)), m.Task("b", 0., lambda: {}, {}), m.Task("a", 1., lambda x: dict(y=x), dict(x=3))]
    got = m.recorded(tasks, tmp_path/"x.json", 1., {})
    assert got["parts"] == dict(a=[dict(x=1, y=1), dict(x=2, error="MemoryError: no more"), dict(x=3, y=3)], b=[dict(skipped="no time was left")])
    assert m.sound(got, "a") == [dict(x=1, y=1), dict(x=3, y=3)] and m.sound(got, "a", x=3) == [dict(x=3, y=3)] and m.sound(got, "c") == []
    assert list(m.failures(got)) == ["1 failures, 1 tasks skipped", "a: MemoryError: no more"]

def test_an_interrupted_run_keeps_what_it_has(tmp_path):
    "Ctrl-C in the third task leaves the first two on disk"
    def stop(): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): m.recorded([m.Task("a", 1., lambda: dict(y=1), {})]*2 + [m.Task("a", 1., stop, {})], tmp_path/"x.json", 1., {})
    assert json.loads((tmp_path/"x.json").read_text())["parts"] == dict(a=[dict(y=1)]*2)

def test_wishes_beside_what_was_reached():
    "Nothing measured, nothing claimed; else the worst and the median, in the units of the wish"
    assert all(l.endswith("not measured yet") for l in m.wanted(dict(parts={}))) and len(list(m.wanted(dict(parts={})))) == 8
    row = lambda us, B, **kw: dict(us=us, B=B, bytes=1e8, tree="64 nodes", **kw)
    got = dict(copy=1e12, parts=dict(probabilities=[row(dict(kernel=125.), 256), row(dict(kernel=200.), 256), row(dict(kernel=9.), 1)], flashinfer=[row({"kernel": 2., "FlashInfer": "ModuleNotFoundError"}, 1)],
               logits=[row({"kernel": 10., "softmax of all rows first": 250.}, 64)], engine=[dict(name="shallow", B=1, tokens_per_s=dict(plain=300.), weight_bytes=2e9)]))
    said = list(m.wanted(got))
    assert said[0].endswith("50% at worst, median 65%") and said[1].endswith("9.0 us at worst, median 9.0 us") and said[2].endswith("25.0 at worst, median 25.0")
    assert said[3].endswith("not measured yet") and said[4].endswith("60% at worst, median 60%")

def test_the_cpu_run(tmp_path):
    "Twin and reference give the same tokens, in both precisions; the table states the share of a copy's speed"
    got = m.recorded([*m.cpu_tasks(V=50, B=3, laps=2, Bs=(1,), size=1 << 16)], tmp_path/"twin.json", 9., dict(KNOWN))
    torch.set_num_threads(1)
    assert {part: len(rows) for part, rows in got["parts"].items()} == dict(copy=2, twin=8, size=2)
    assert all(r["same"] and r["twin_ms"] > 0 and r["ratio"] > 0 for part in ("twin", "size") for r in got["parts"][part])
    lines = list(m.cpu_table(got))
    assert len(lines) == 12 and lines[-1] == "0 failures, 0 tasks skipped" and "of a copy" in lines[3] and "DIFFERENT" not in "".join(lines)
    got["parts"]["twin"][0]["same"] = False
    assert list(m.cpu_table(got))[3].endswith("DIFFERENT")

@pytest.mark.parametrize("args, what", [(["--minutes", "0"], "minutes: got 0"), (["--minutes", "nan"], "minutes: got nan"), (["--cpu", "--out", __file__], "out: got"), ([], "no GPU"), (["--what"], "unrecognized")])
def test_bad_arguments(args, what, monkeypatch, capsys):
    "Answered before anything is measured"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(m, "recorded", None)
    with pytest.raises(SystemExit) as e: m.main(args)
    assert e.value.code == 2 and what in capsys.readouterr().err

def test_the_command_writes_and_prints_last(tmp_path, monkeypatch, capsys):
    "`--cpu --out DIR` makes the directory, writes the file, and the table is the end of what it prints"
    monkeypatch.setattr(m, "cpu_tasks", partial(m.cpu_tasks, V=30, B=2, laps=1, Bs=(1,), size=1 << 16))
    m.main(["--cpu", "--out", str(tmp_path/"new")])
    torch.set_num_threads(1)
    got = json.loads((tmp_path/"new"/"twin.json").read_text())
    assert capsys.readouterr().out.splitlines() == list(m.cpu_table(got)) and got["machine"] and got["torch"] == torch.__version__

def test_the_stored_runs_are_readable():
    "Where a run is stored, its table can be printed and no tokens differ"
    from pathlib import Path
    for name, table in (("twin", m.cpu_table), ("gpu", m.gpu_table)):
        path = Path(__file__).parents[1]/"docs"/"benchmarks"/f"{name}.json"
        if not path.exists(): continue
        got = json.loads(path.read_text())
        assert len(list(table(got))) > 3 and all(r["same"] for r in m.sound(got, "twin") if "same" in r)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_on_a_gpu():
    "Kernel, graph and queue on the device, at small sizes"
    kernel, _ = m.fused()
    cuda = torch.device("cuda")
    assert m.parity({"kernel": kernel}, "mixed", 7, 200, cuda)["differ"] == dict(twin=0, kernel=0)
    for clock in (m.replayed, m.queued): assert m.timed({"kernel": kernel, "twin": walk}, "16 nodes", 1000, 4, "typical", cuda, clock=clock)["us"]["kernel"] > 0
