"30b_teaching: evaluation is the mean of enumerated rounds, interrupted training resumes, checkpoints"
import json
from functools import cache
from types import SimpleNamespace

import numpy as np, pytest, torch
from torch.nn import functional as F

from helpers import proves, refuses, round_tokens
from networks import Interrupted, small_llama
from specref import Chain, exact, HFModel, law_of, reject, rounds, TableModel
from specref.models import recipe
from specref.models.embedded import sample_texts
from specref.models.transformer import RowAnswer
from specref.train import harness
from specref.train.features import NetworkDraft
from specref.train.harness import (DraftNetwork, StateDataset, TargetModel, acceptances, batch_at, evaluate,
                                   load_checkpoint, no_progress, save_network, state_dataset,
                                   tokens_a_round, train_network, written_by_another)

def tiny(V=8, d=16, **kw): return small_llama(V, d, heads=2, **kw).float()

class Lines(DraftNetwork):
    "A matrix on f_t for each depth"
    layers = 0
    def __init__(self, base, heads=2):
        super().__init__()
        self.settings, self.base, self.reads = dict(heads=heads), (base,), (base.layers,)
        self.w = torch.nn.ModuleList(torch.nn.Linear(base.d, base.d) for _ in range(heads))
    def rows(self, f): return [self.base[0].head(w(f)) for w in self.w]
    def guesses(self, batch, depth): return self.rows(batch.states[self.reads[0]])[:depth]
    def loss(self, batch, at):
        noise = 1 + .1*torch.rand(())   # randomness that a loss may use
        def term(j, z): return F.cross_entropy(z[:, :-2-j].flatten(0, 1), batch.x[:, 2+j:].flatten())
        return noise * sum(term(j, z) for j, z in enumerate(self.guesses(batch, len(self.w))))

class LinesDraft(NetworkDraft):
    "`Lines` as a draft model"
    def answers(self, tree):
        rows = self.net.rows(self.states(tree.ctx)[self.net.reads[0]][-1])
        return [RowAnswer(rows[min(len(tree.path(i)), len(rows) - 1)]) for i in range(len(tree))]

def states_of(model, x):
    with torch.inference_mode(): return model(input_ids=x, output_hidden_states=True).hidden_states

def enumerated(T, depth, begin=None):
    "All texts of `T` of three tokens (that begin so), their probabilities, and their data one by one"
    model = tiny(V=3).double()
    base, net = TargetModel(model), Lines(TargetModel(model), depth).double()
    texts = np.stack(np.meshgrid(*[np.arange(3)]*T, indexing="ij"), -1).reshape(-1, T)
    texts = texts if begin is None else texts[(texts[:, :len(begin)] == begin).all(1)]
    states = states_of(model, torch.from_numpy(texts))[2]
    logp = base.head(states).log_softmax(-1).detach().numpy()
    known = 1 if begin is None else len(begin)
    share = [np.exp(sum(row[i-1, x[i]] for i in range(known, T))) for x, row in zip(texts, logp)]
    data = [StateDataset(torch.from_numpy(x)[None], {2: s[None]}) for x, s in zip(texts, states)]
    return net, base, texts, np.array(share) / (3 if begin is None else 1), data

def chain(net, base, depth):  # -> target, drafter
    target = HFModel(base.model, keep=(2,), check=False)
    return target, Chain(LinesDraft(net, target), depth)

@proves("prop-mark")
@pytest.mark.parametrize("depth", [1, 2])
def test_evaluation_is_the_mean_of_enumerated_rounds(depth):
    "Over all texts with their probabilities: the mean of the enumerated rounds that begin at t = 1"
    net, base, texts, share, data = enumerated(2 + depth, depth)
    target, drafter = chain(net, base, depth)
    def mean_tokens(*ctx): return round_tokens(target, drafter, ctx=ctx).mean()
    want = sum(share[(texts[:, :2] == (a, b)).all(1)].sum() * mean_tokens(a, b)
               for a in range(3) for b in range(3))
    assert abs(sum(w * evaluate(net, base, one, depth)[0] for w, one in zip(share, data)) - want) < 1e-9

def begun(a, depth):
    "The expected number of rounds along a text, by a slow reading of Proposition rounds"
    begins = [1.] + [0.]*(len(a) + depth)
    for t, row in enumerate(a.tolist()):
        for j in range(depth + 1):
            begins[t+1+j] += begins[t] * np.prod(row[:j]) * (1 - row[j] if j < depth else 1)
    return sum(begins[:len(a)])

@proves("prop-rounds")
def test_tokens_a_round_are_those_of_the_enumerated_loop(n=2, depth=2):
    """Of rounds that begin within two tokens, the mean number and the mean tokens are found from the texts.
    A round from any place emits another number of tokens"""
    net, base, _, share, data = enumerated(1 + n + depth, depth, (0, 1))
    target, drafter = chain(net, base, depth)
    def run(rng):   # rounds that begin within n tokens, and all that they emit
        made = []
        for found in rounds(target, drafter, reject, (0, 1), rng):
            made.append(len(found.tokens))
            if sum(made) >= n: return len(made), sum(made)
    want = [float(sum(p * made[k] for made, p in law_of(run).items())) for k in (0, 1)]
    rates = [torch.stack([a for a, _ in acceptances(net, base, one, depth)], -1)[0] for one in data]
    counts = [begun(a, depth) for a in rates]
    tokens = [c * tokens_a_round(net, base, one, depth) for c, one in zip(counts, data)]
    assert np.allclose([np.dot(share, counts), np.dot(share, tokens)], want)
    place = sum(w * evaluate(net, base, one, depth)[0] for w, one in zip(share, data))
    assert abs(want[1]/want[0] - place) > 1e-3

@proves("prop-another")
def test_a_bet_has_mean_one_on_the_target_s_own_texts():
    "Over all texts with their probabilities, for either side of the bet"
    net, base, _, share, data = enumerated(6, 1)
    gaps = [(a - beta)[0] for one in data for a, beta in acceptances(net, base, one, 1)]
    for stake in (-.25, .25): assert abs(np.dot(share, [(1 + stake*g).prod() for g in gaps]) - 1) < 1e-9

def two_tables(p):
    "A drafter that has p backwards, its target, and the data of texts"
    z = torch.from_numpy(p.astype(float)).log()
    base = SimpleNamespace(head=lambda states: states, layers=0)
    net = SimpleNamespace(guesses=lambda batch, depth: [z.flip(0).expand(*batch.x.shape, 2)] * depth)
    return net, base, lambda x: StateDataset(x, {0: z.expand(*x.shape, 2)})

def test_a_table_s_own_texts(p=exact(9, 1), depth=4):
    "A drafter that overlaps by a fifth: the tokens of the enumerated loop, over all texts or on some"
    target, draft = TableModel(2, lambda text: p), TableModel(2, lambda text: p[::-1])
    want = round_tokens(target, Chain(draft, depth)).mean()
    net, base, batch = two_tables(p)
    texts = torch.cartesian_prod(*[torch.arange(2)]*(depth + 2))
    share = torch.from_numpy(p.astype(float))[texts].prod(1)
    found = sum(w * evaluate(net, base, batch(x[None]), depth)[0] for w, x in zip(share, texts))
    own = batch((torch.rand(50, 100, generator=torch.Generator().manual_seed(0)) < .1).long())
    assert abs(found - float(want)) < 1e-9 and abs(tokens_a_round(net, base, own, depth) - float(want)) < .02
    assert not written_by_another(net, base, own)

def test_texts_of_others_are_noticed(depth=4):
    "There min(1, q/p) is 1 and would make five tokens; the overlaps bound what is stated"
    net, base, batch = two_tables(exact(9, 1))
    given = net, base, batch(torch.ones(1, 100, dtype=torch.long))
    assert written_by_another(*given)
    assert 1 + sum(a.mean() for a, _ in acceptances(*given, depth)) == 5
    stated, overlaps = evaluate(*given, depth)
    assert max(stated, tokens_a_round(*given, depth)) <= 1 + sum(overlaps) + 1e-9

def test_places_that_do_not_count():
    "Marked rows alone: the numbers of the part of a text that is marked"
    net, base, texts, _, data = enumerated(6, 1)
    x = torch.randint(0, 3, (2, 12), generator=torch.Generator().manual_seed(0))
    s, marks = states_of(base.model, x)[2], torch.arange(12) >= torch.tensor([[5], [5]])
    counted, part = StateDataset(x, {2: s}, marks), StateDataset(x[:, 3:], {2: s[:, 3:]})
    assert np.allclose(evaluate(net, base, counted, 1)[1], evaluate(net, base, part, 1)[1])
    assert np.isclose(tokens_a_round(net, base, counted, 1), tokens_a_round(net, base, part, 1))

def test_overlaps_are_those_of_the_distributions():
    "The second value of `evaluate` is Σ min(p, q), depth by depth"
    model = tiny().double()
    base, x = TargetModel(model), torch.randint(0, 8, (2, 7))
    net, s = Lines(base).double(), states_of(model, x)[2]
    _, betas = evaluate(net, base, StateDataset(x, {2: s}), 2)
    with torch.inference_mode(): p, q = base.head(s).softmax(-1), [z.softmax(-1) for z in net.rows(s)]
    for j in range(2):
        overlaps = [torch.minimum(p[n, t+1+j], q[j][n, t]).sum().item() for n in range(2) for t in range(4)]
        assert abs(betas[j] - np.mean(overlaps)) < 1e-9

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    "A target, training and held-out texts of it with states, all texts, and the folder of the states"
    base = TargetModel(tiny(V=16))
    start = torch.arange(16).repeat(4)[:, None]
    x = sample_texts(base.model, start, 20, torch.Generator().manual_seed(0),
                     half=False).numpy().astype(np.uint16)
    folder = tmp_path_factory.mktemp("states")
    return base, *(state_dataset(base, part, (2,), folder) for part in (x[:48], x[48:])), x, folder

def run(data, folder, stops=(None,), **kw):
    "A training run, stopped and resumed at `stops`, with another global random state each time"
    base, train, held, *_ = data
    for until in stops:
        torch.manual_seed(0)
        net = Lines(base)
        torch.seed()
        how = dict(steps=40, peak=1e-2, eval_steps=10, depth=2, rows=8) | kw
        net, evaluations = train_network(net, base, train, held[:], folder=folder/"net", until=until, **how)
    return net, evaluations

def same(a, b): return all(map(torch.equal, a.parameters(), b.parameters()))

@proves("prop-taught")
def test_interrupted_training_ends_the_same(data, tmp_path):
    "Stopped after an evaluation, or inside one (evaluations.json older than last.pt): the same result"
    one, evaluations = run(data, tmp_path/"a")
    two, again = run(data, tmp_path/"b", (10, 30, None))
    run(data, tmp_path/"c", (20,))
    file = tmp_path/"c"/"net"/"evaluations.json"
    file.write_text(json.dumps(json.loads(file.read_text())[:1]))
    three, third = run(data, tmp_path/"c")
    assert len(evaluations) == 4 and evaluations == again == third and same(one, two) and same(one, three)
    assert not same(one, run(data, tmp_path/"d", seed=1)[0])

@proves("prop-taught")
def test_interrupted_anywhere(data, tmp_path, monkeypatch):
    "Interrupted while any of its files is written, or right after, training resumes to the same result"
    net, evaluations = run(data, tmp_path/"whole", steps=20)
    means = [mean for _, mean in evaluations]
    best = sum(mean > max(means[:i], default=0) for i, mean in enumerate(means))
    for at in range(1, 2 + 2*len(means) + best):   # the recipe; last.pt, evaluations.json and a new best.pt
        for early in (True, False):
            folder = tmp_path/f"{at}{early}"
            with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
                interrupted = Interrupted(at, early)
                for home in (harness, recipe): m.setattr(home, "write_whole", interrupted)
                run(data, folder, steps=20)
            two, again = run(data, folder, steps=20)
            assert again == evaluations and same(net, two)

def test_another_recipe_is_refused(data, tmp_path):
    "Training does not resume with other hyperparameters, texts, settings or target, and no file changes"
    base, train, held, x, folder = data
    one, evaluations = run(data, tmp_path)
    before = {f.name: f.read_bytes() for f in (tmp_path/"net").iterdir()}
    for name, other in dict(steps=50, peak=2e-2, eval_steps=20, rows=4, depth=1, seed=1, decay=.1).items():
        refuses(name, run, data, tmp_path, **{name: other})
    kw = dict(steps=40, peak=1e-2, eval_steps=10, depth=2, rows=8, folder=tmp_path/"net")
    other, fewer = TargetModel(tiny(V=16, seed=3)), state_dataset(base, x[:40], (2,), folder)
    refuses("net", train_network, Lines(base, 3), base, train, held[:], **kw)
    refuses("train", train_network, Lines(base), base, fewer, held[:], **kw)
    refuses("base", train_network, Lines(other), other, train, held[:], **kw)
    assert before == {f.name: f.read_bytes() for f in (tmp_path/"net").iterdir()}
    assert run(data, tmp_path, patience=9)[1] == evaluations

def test_training_improves_and_stops(data, tmp_path):
    "The best weights are returned, the target is unchanged; until step 0 nothing is trained"
    base, _, held, *_ = data
    before = [w.clone() for w in base.model.parameters()]
    untrained, none = run(data, tmp_path/"none", (0,))
    net, evaluations = run(data, tmp_path/"a")
    best = evaluate(net, base, held[:], 2)[0]
    assert none == [] and best == max(m for _, m in evaluations)
    assert best > evaluate(untrained, base, held[:], 2)[0] + .05
    assert all(map(torch.equal, before, base.model.parameters()))
    worse, evaluations = run(data, tmp_path/"b", peak=3., steps=100, patience=2, eval_steps=5)
    assert evaluate(worse, base, held[:], 2)[0] == max(m for _, m in evaluations) and len(evaluations) < 20
    assert no_progress(evaluations, 2) and not no_progress(evaluations[:-1], 2)
    for _ in range(2): refuses("peak", run, data, tmp_path/"c", peak=float("inf"))

@pytest.mark.parametrize("steps, stops", [(7, [7]), (25, [10, 20, 25])])
def test_every_step_is_taken(data, tmp_path, steps, stops):
    "Fewer steps than the evaluation interval, or no multiple of it, are all taken and evaluated"
    _, evaluations = run(data, tmp_path, steps=steps)
    assert [at for at, _ in evaluations] == stops and torch.load(tmp_path/"net"/"last.pt")["step"] == steps

@cache
def key(name=None, **kw):
    "The key of a target in which one entry of the weight `name` is changed"
    model = tiny(V=16, **kw)
    with torch.no_grad():
        for w in [model.get_parameter(name).view(-1)] if name else (): w[len(w)//2].add_(1e-3)
    return TargetModel(model).key

def test_states_belong_to_a_target(data):
    "The key depends on every weight, and on a setting outside the weights"
    base, train, _, x, folder = data
    other = tiny(V=16, seed=3)
    other.lm_head.load_state_dict(base.model.lm_head.state_dict())
    assert not np.array_equal(state_dataset(TargetModel(other), x[:48], (2,), folder).states[2],
                              train.states[2])
    assert key() == base.key and key(rope_theta=20.) != base.key
    assert all(key(name) != base.key for name, _ in base.model.named_parameters())

class Reading(TargetModel):
    "A target whose passes are counted, and fail at one of them"
    def __init__(self, base, fails):
        self.__dict__ = {**base.__dict__, "model": self.read, "real": base.model, "left": fails}
    def read(self, **kw):
        self.left -= 1
        if self.left == 0: raise KeyboardInterrupt
        return self.real(**kw)

def test_states_are_read_once_and_whole(data, tmp_path):
    "States are those of a plain pass in half precision, for the texts as shaped; stored files are reused"
    base, train, _, x, folder = data
    want = states_of(base.model, torch.from_numpy(x[:48].astype(np.int64)))
    assert torch.equal(train[:].states[2], want[2].half().float())
    assert np.array_equal(state_dataset(Reading(base, 1), x[:48], (2,), folder).states[2], train.states[2])
    more = state_dataset(base, x[:48], (1, 2), folder)
    assert torch.equal(more[:].states[1], want[1].half().float())
    one, two = (state_dataset(base, y, (2,), tmp_path/"a") for y in (x[:4], x[:4].reshape(8, -1)))
    assert one.states[2].shape == (4, 20, 16) and two.states[2].shape == (8, 10, 16)
    with pytest.raises(KeyboardInterrupt):
        state_dataset(Reading(base, 2), x[:8], (1, 2), tmp_path/"b", rows=4)
    assert not list((tmp_path/"b").iterdir())

def test_states_need_room(data, tmp_path, monkeypatch):
    "The folder, the bytes needed and the bytes free are named, and nothing is written"
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=20_479))
    wanted = r"^folder: got '.*/b' with 20,479 bytes free, wanted 20,480"   # 16 texts of 20, two layers
    with pytest.raises(ValueError, match=wanted): state_dataset(data[0], data[3][:16], (1, 2), tmp_path/"b")
    assert not (tmp_path/"b").exists()
    state_dataset(data[0], data[3][:16], (1,), tmp_path/"b")

def test_batches_are_numbered(data):
    "Batch 3 is the same at every call, has no text twice, and differs from batch 4"
    _, train, *_ = data
    a, b, c, d = (batch_at(train, step, 8, seed).x for step, seed in ((3, 0), (3, 0), (4, 0), (3, 1)))
    assert torch.equal(a, b) and not torch.equal(a, c) and not torch.equal(a, d) and a.shape == (8, 20)
    assert len(batch_at(train, 0, 100, 0).x) == 48

def test_an_incomplete_checkpoint_is_refused(data, tmp_path, monkeypatch):
    "Without card, truncated, of another kind or without weights: the folder is refused"
    base, old, new = data[0], Lines(data[0]), Lines(data[0])
    save_network(old, base, tmp_path, recipe=dict(steps=7))
    assert json.loads((tmp_path/"config.json").read_text())["recipe"] == dict(steps=7)
    for at in (1, 2):
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(harness, "write_whole", Interrupted(at, True))
            save_network(new, base, tmp_path)
        refuses("folder", load_checkpoint, Lines, base, tmp_path)
    save_network(new, base, tmp_path)
    cut = (tmp_path/"model.safetensors").read_bytes()[:99]
    for name, broken in (("config.json", b"{"), ("config.json", b"[1]"), ("config.json", b"{}"),
                         ("model.safetensors", cut)):
        save_network(new, base, tmp_path)
        (tmp_path/name).write_bytes(broken)
        refuses("folder", load_checkpoint, Lines, base, tmp_path)
    (tmp_path/"model.safetensors").unlink()
    refuses("folder", load_checkpoint, Lines, base, tmp_path)

@pytest.mark.parametrize("bad", [1e5, float("nan")])
def test_weights_beyond_half_precision_are_refused(data, tmp_path, bad):
    "A weight beyond 65,504, or a NaN, is refused by its name, and the stored checkpoint is unchanged"
    base, net = data[0], Lines(data[0])
    save_network(Lines(base), base, tmp_path)
    with torch.no_grad(): net.w[1].weight[0, 0] = bad
    with pytest.raises(ValueError, match="^net: got w.1.weight"): save_network(net, base, tmp_path)
    assert load_checkpoint(Lines, base, tmp_path)

@pytest.mark.parametrize("how, differs", [(dict(V=16, d=32), "hidden_size"), (dict(V=8), "vocab_size"),
                                          (dict(V=16, seed=5), "head_sha256")])
def test_a_checkpoint_of_another_target_is_refused(data, tmp_path, how, differs):
    "By size, by vocabulary, and by the head where all sizes agree"
    save_network(Lines(data[0]), data[0], tmp_path)
    with pytest.raises(ValueError, match=f"^target: .*{differs}"):
        load_checkpoint(Lines, TargetModel(tiny(**how)), tmp_path)
