"30b_teaching: marks are the mean of enumerated rounds, a lesson that was interrupted ends the same, and a checkpoint knows its target"
import json
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from helpers import proves
from specref.train import harness
from specref.models import recipe
from specref.core.rng import Seeded, law_of
from specref.train.features import NetworkDraft
from specref.core.loop import rounds
from specref.models.embedded import sample_texts
from specref.verify.reject import Chain, reject
from specref.train.harness import TargetModel, StateDataset, batch_at, state_dataset, load_checkpoint, evaluate, set_weights, save_network, no_progress, train_network
from specref.models.transformer import RowAnswer, HFModel

torch.set_num_threads(1)


def refuses(f, name, part=""):
    "`f` answers with a `ValueError` that begins with the argument's name and tells `part`"
    with pytest.raises(ValueError, match=f"^{name}: .*{part}"): f()


def tiny(V=8, seed=0, d=16, **kw):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=d, intermediate_size=2*d, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                                        initializer_range=.4, bos_token_id=None, eos_token_id=None, **kw))


class Lines(torch.nn.Module):
    "A matrix on f_t for each depth"
    layers = 0
    def __init__(self, base, heads=2):
        super().__init__()
        self.settings, self.base, self.reads = dict(heads=heads), (base,), (base.layers,)
        self.w = torch.nn.ModuleList(torch.nn.Linear(base.d, base.d) for _ in range(heads))
    def rows(self, f): return [self.base[0].head(w(f)) for w in self.w]
    def guesses(self, batch, depth): return self.rows(batch.states[self.reads[0]])[:depth]
    def loss(self, batch, at):
        noise = 1 + .1*torch.rand(())   # chance that a loss may use
        return noise * sum(torch.nn.functional.cross_entropy(z[:, :-2-j].flatten(0, 1), batch.x[:, 2+j:].flatten()) for j, z in enumerate(self.guesses(batch, len(self.w))))


class Blind(NetworkDraft):
    "`Lines` as a draft model"
    def answers(self, tree):
        rows = self.net.rows(self.states(tree.ctx)[self.net.reads[0]][-1])
        return [RowAnswer(rows[min(len(tree.path(i)), len(rows) - 1)]) for i in range(len(tree))]


@proves("prop-mark")
@pytest.mark.parametrize("depth", [1, 2])
def test_marks_are_the_mean_of_enumerated_rounds(depth):
    "All texts of five tokens with their probabilities in place of written ones: the mark is the mean of the enumerated rounds that begin at t = 1, for which alone they are long enough"
    V, model = 3, tiny(V=3).double()
    base, target = TargetModel(model), HFModel(model, keep=(2,), check=False)
    torch.manual_seed(1)
    net, T = Lines(base, depth).double(), 2 + depth
    texts = np.stack(np.meshgrid(*[np.arange(V)]*T, indexing="ij"), -1).reshape(-1, T)
    with torch.inference_mode(): states = model(input_ids=torch.from_numpy(texts), output_hidden_states=True).hidden_states[2]
    logp, share = base.head(states).log_softmax(-1).detach().numpy(), []
    for x, row in zip(texts, logp): share.append(np.exp(sum(row[i-1, x[i]] for i in range(1, T))) / V)   # the first token is uniform
    mean = sum(w * evaluate(net, base, StateDataset(torch.from_numpy(x)[None], {2: s[None]}), depth)[0] for w, x, s in zip(share, texts, states))
    def begun(a, b): return law_of(lambda rng: len(next(rounds(target, Chain(Blind(net, target), depth), reject, (a, b), rng)).tokens)).mean()
    first = target.states((0,), (2,))
    want = sum(np.exp(logp[np.flatnonzero((texts[:, 0] == a))[0], 0, b]) / V * begun(a, b) for a in range(V) for b in range(V))
    assert abs(mean - want) < 1e-9 and first[2].shape == (1, 16)


def test_overlaps_are_those_of_the_laws():
    "The second value of `evaluate` is Σ min(p, q), depth by depth, and depth j is judged by the state after x_{t+1+j}"
    model = tiny().double(); base = TargetModel(model); torch.manual_seed(1); net = Lines(base).double()
    x = torch.randint(0, 8, (2, 7))
    with torch.inference_mode(): s = model(input_ids=x, output_hidden_states=True).hidden_states[2]
    _, betas = evaluate(net, base, StateDataset(x, {2: s}), 2)
    for j in range(2):
        with torch.inference_mode():
            want = [torch.minimum(base.head(s[n, t+1+j]).softmax(-1), net.rows(s[n, t])[j].softmax(-1)).sum() for n in range(2) for t in range(4)]
        assert abs(betas[j] - np.mean(want)) < 1e-9


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    "A target, and lessons that it wrote"
    model = tiny(V=16, d=16); base = TargetModel(model)
    x = sample_texts(model, torch.arange(16).repeat(4)[:, None], 20, torch.Generator().manual_seed(0), half=False).numpy().astype(np.uint16)
    folder = tmp_path_factory.mktemp("states")
    return base, state_dataset(base, x[:48], (2,), folder), state_dataset(base, x[48:], (2,), folder), x, folder


def lesson(school, folder, stops=(None,), **kw):
    base, train, held, *_ = school
    for until in stops:
        torch.manual_seed(0); net = Lines(base); torch.seed()   # chance outside is another each time
        net, told = train_network(net, base, train, held[:], folder=folder/"net", until=until, **{**dict(steps=40, peak=1e-2, look=10, depth=2, rows=8), **kw})
    return net, told


@proves("prop-taught")
def test_an_interrupted_lesson_ends_the_same(school, tmp_path):
    "Interrupted after each look, and inside one (marks.json lost behind last.pt), the weights and the marks are the same; another seed gives others"
    one, told = lesson(school, tmp_path/"a")
    two, again = lesson(school, tmp_path/"b", (10, 30, None))
    lesson(school, tmp_path/"c", (20,))
    marks_file = tmp_path/"c"/"net"/"marks.json"
    marks_file.write_text(json.dumps(json.loads(marks_file.read_text())[:1]))
    three, third = lesson(school, tmp_path/"c")
    other, _ = lesson(school, tmp_path/"d", seed=1)
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    assert len(told) == 4 and told == again == third and same(one, two) and same(one, three) and not same(one, other)


@proves("prop-taught")
def test_interrupted_anywhere(school, tmp_path, monkeypatch):
    "Killed while any of its files is written, or right after, a lesson goes on to the same marks and weights; what is half written is never read"
    def gone_on(folder, at, early):
        left, keep = [at], recipe.write_whole
        def whole(path, write):
            left[0] -= 1
            if not left[0] and early: keep(path.with_name(path.name + ".part"), lambda f: f.write_bytes(b"half")); raise KeyboardInterrupt
            keep(path, write)
            if not left[0]: raise KeyboardInterrupt
        with monkeypatch.context() as m:
            for home in (harness, recipe): m.setattr(home, "write_whole", whole)
            with pytest.raises(KeyboardInterrupt): lesson(school, folder, steps=20)
        return lesson(school, folder, steps=20)
    net, told = lesson(school, tmp_path/"whole", steps=20)
    writes = 1 + 2*len(told) + sum(m > max([0, *(n for _, n in told[:i])]) for i, (_, m) in enumerate(told))   # recipe; last, marks and sometimes the best
    for at in range(1, writes + 1):
        for early in (True, False):
            folder = tmp_path/f"{at}{early}"
            two, again = gone_on(folder, at, early)
            assert again == told and all(torch.equal(a, b) for a, b in zip(net.parameters(), two.parameters()))
            assert (folder/"net"/"marks.json").read_bytes() == (tmp_path/"whole"/"net"/"marks.json").read_bytes()


def test_another_recipe_is_refused(school, tmp_path):
    "A lesson does not go on with other numbers, texts, settings or another target: each is named, and nothing is changed; more patience is allowed"
    base, train, held, x, folder = school
    lesson(school, tmp_path)
    before = {f.name: f.read_bytes() for f in (tmp_path/"net").iterdir()}
    for name, other in dict(steps=50, peak=2e-2, look=20, rows=4, depth=1, seed=1, decay=.1).items(): refuses(lambda: lesson(school, tmp_path, **{name: other}), name, str(other))
    kw = dict(steps=40, peak=1e-2, look=10, depth=2, rows=8, folder=tmp_path/"net")
    refuses(lambda: train_network(Lines(base, 3), base, train, held[:], **kw), "net", "heads")
    refuses(lambda: train_network(Lines(base), base, state_dataset(base, x[:40], (2,), folder), held[:], **kw), "train")
    other = TargetModel(tiny(V=16, seed=3)); refuses(lambda: train_network(Lines(other), other, train, held[:], **kw), "base")
    assert before == {f.name: f.read_bytes() for f in (tmp_path/"net").iterdir()}
    assert lesson(school, tmp_path, patience=9)[1] == lesson(school, tmp_path)[1]


def test_until_and_ruin(school, tmp_path):
    "Until no step nothing is learnt; a rate at which numbers end is refused by its name, and so is the next call"
    base, train, held, *_ = school
    net, told = lesson(school, tmp_path/"a", (0,))
    torch.manual_seed(0)
    assert told == [] and all(torch.equal(a, b) for a, b in zip(net.parameters(), Lines(base).parameters()))
    for _ in range(2): refuses(lambda: lesson(school, tmp_path/"b", peak=float("inf")), "peak", "inf")


def test_the_best_weights_are_kept_and_enough_is_enough(school, tmp_path):
    "With a ruinous rate the marks fall: the net returned has the best mark, and the lesson ends `patience` looks after it"
    base, train, held, *_ = school
    net, told = lesson(school, tmp_path, peak=3., steps=100, patience=2, look=5)
    best = max(m for _, m in told)
    assert evaluate(net, base, held[:], 2)[0] == best and len(told) < 20 and no_progress(told, 2) and not no_progress(told[:-1], 2)


def test_teaching_teaches(school, tmp_path):
    "After forty steps the mark is above that of the beginning, and the target is as it was"
    base, train, held, *_ = school
    before = [w.clone() for w in base.model.parameters()]
    torch.manual_seed(0); start = evaluate(Lines(base), base, held[:], 2)[0]
    net, told = lesson(school, tmp_path)
    assert told[-1][1] > start + .05 and told[-1] == max(told, key=lambda m: m[1]) and evaluate(net, base, held[:], 2)[0] == told[-1][1]
    assert all(torch.equal(a, b) for a, b in zip(before, base.model.parameters()))


def test_every_step_is_taken(school, tmp_path):
    "Steps that are fewer than a look, or no multiple of it, are taken and marked all the same"
    for steps, stops in ((7, [7]), (25, [10, 20, 25])):
        _, told = lesson(school, tmp_path/str(steps), steps=steps)
        assert [at for at, _ in told] == stops and torch.load(tmp_path/str(steps)/"net"/"last.pt")["step"] == steps


def test_what_is_kept_belongs_to_a_target(school):
    "Two targets of one head and other bodies read the same texts in the same folder, and keep states of their own"
    base, train, _, x, folder = school
    other = tiny(V=16, seed=3); other.lm_head.load_state_dict(base.model.lm_head.state_dict())
    assert not np.array_equal(state_dataset(TargetModel(other), x[:48], (2,), folder).states[2], train.states[2])
    def near(change):
        model = tiny(V=16, d=16)
        with torch.no_grad(): change(model)
        return TargetModel(model).key
    same = near(lambda model: None)
    assert same == base.key != TargetModel(tiny(V=16, d=16, rope_theta=20.)).key   # what no weight tells is heard
    for name, _ in base.model.named_parameters(): assert near(lambda model: (w := model.get_parameter(name).view(-1))[len(w)//2].add_(1e-3)) != same, name   # of the embedding a row that no probe reads


def test_texts_of_another_cut(school, tmp_path):
    "The same tokens cut into texts of another length, or kept in another type, are other lessons; tokens that there are not are refused, and an interrupted reading leaves nothing"
    base, *_, x, _ = school
    one, two, three = (state_dataset(base, y, (2,), tmp_path/"a") for y in (x[:4], x[:4].reshape(8, -1), x[:4].astype(np.int64)))
    assert one.states[2].shape == (4, 20, 16) and two.states[2].shape == (8, 10, 16) and np.array_equal(one.states[2], three.states[2])
    for bad in (x[0], x[:4].astype(float), x[:0], x[:4] + 16, x[:4].astype(int) - 16): refuses(lambda: state_dataset(base, bad, (2,), tmp_path/"b"), "x")
    calls = []
    class Stops(TargetModel):
        def __init__(self, base): self.__dict__ = {**base.__dict__, "model": self.read}
        def read(self, **kw):
            calls.append(1)
            if len(calls) == 2: raise KeyboardInterrupt
            return base.model(**kw)
    with pytest.raises(KeyboardInterrupt): state_dataset(Stops(base), x[:8], (1, 2), tmp_path/"c", rows=4)
    assert not list((tmp_path/"c").iterdir())
    assert np.array_equal(state_dataset(Stops(base), x[:8], (1, 2), tmp_path/"c", rows=4).states[2], state_dataset(base, x[:8], (2,), tmp_path/"d", rows=4).states[2])


def test_lessons_are_read_once(school):
    "States are those of a plain pass, to half precision; a second call reads files and makes no pass"
    base, train, _, x, folder = school
    with torch.inference_mode(): want = base.model(input_ids=torch.from_numpy(x[:48].astype(np.int64)), output_hidden_states=True).hidden_states
    assert torch.equal(train[:].states[2], want[2].half().float())
    class Silent(TargetModel):
        def __init__(self, base): self.__dict__ = {**base.__dict__, "model": None}
    assert np.array_equal(state_dataset(Silent(base), x[:48], (2,), folder).states[2], train.states[2])
    more = state_dataset(base, x[:48], (1, 2), folder)
    assert torch.equal(more[:].states[1], want[1].half().float())


def test_batches_are_numbered(school):
    "Batch number 3 is the same whenever it is asked for, without a text twice, and another than number 4"
    _, train, *_ = school
    a, b, c = batch_at(train, 3, 8, 0), batch_at(train, 3, 8, 0), batch_at(train, 4, 8, 0)
    assert torch.equal(a.x, b.x) and not torch.equal(a.x, c.x) and not torch.equal(a.x, batch_at(train, 3, 8, 1).x) and a.x.shape == (8, 20) and a.states[2].shape == (8, 20, 16)
    assert len(batch_at(train, 0, 100, 0).x) == 48


def test_a_checkpoint_comes_back(school, tmp_path):
    "The same weights to half precision, with the recipe; nothing of the target is written"
    base = school[0]
    net = Lines(base, heads=3)
    save_network(net, base, tmp_path, recipe=dict(steps=7))
    back, card = load_checkpoint(Lines, base, tmp_path), json.loads((tmp_path/"config.json").read_text())
    assert len(back.w) == 3 and card["recipe"] == dict(steps=7) and card["target"]["hidden_size"] == 16
    assert all(torch.equal(a.half().float(), b) for a, b in zip(net.parameters(), back.parameters()))
    assert len(back.state_dict()) == 6


def test_a_checkpoint_is_whole_or_not_there(school, tmp_path, monkeypatch):
    "Interrupted between the weights and the card, the folder is refused, and no weights lie beside the card of others; a file that is cut off or of another kind is refused by its folder"
    base, home = school[0], tmp_path/"net"
    old, new = Lines(base), Lines(base)
    save_network(old, base, home)
    for at in (1, 2):
        left, keep = [at], recipe.write_whole
        def whole(path, write):
            left[0] -= 1
            if not left[0]: raise KeyboardInterrupt
            keep(path, write)
        with monkeypatch.context() as m:
            m.setattr(harness, "write_whole", whole)
            with pytest.raises(KeyboardInterrupt): save_network(new, base, home)
        refuses(lambda: load_checkpoint(Lines, base, home), "folder")
    save_network(new, base, home)
    assert torch.equal(load_checkpoint(Lines, base, home).w[0].weight, new.w[0].weight.half().float())
    for name, broken in (("config.json", b"{"), ("config.json", b"[1]"), ("config.json", b"{}"), ("model.safetensors", (home/"model.safetensors").read_bytes()[:99])):
        save_network(new, base, home)
        (home/name).write_bytes(broken)
        refuses(lambda: load_checkpoint(Lines, base, home), "folder")
    (home/"model.safetensors").unlink(); save_network(new, base, home); (home/"model.safetensors").unlink()
    refuses(lambda: load_checkpoint(Lines, base, home), "folder")


def test_what_half_precision_cannot_hold(school, tmp_path):
    "A weight beyond 65,504, or one that is no number, is not written as infinity: it is refused by its name, and what was there stays"
    base = school[0]
    save_network(Lines(base), base, tmp_path)
    for bad in (1e5, float("nan")):
        net = Lines(base)
        with torch.no_grad(): net.w[1].weight[0, 0] = bad
        refuses(lambda: save_network(net, base, tmp_path), "net", "w.1.weight")
    assert load_checkpoint(Lines, base, tmp_path)


def test_a_checkpoint_of_another_target_is_refused(school, tmp_path):
    "By size, by vocabulary, by number of layers, and where all sizes agree by the head"
    base = school[0]
    save_network(Lines(base), base, tmp_path)
    for other, says in ((tiny(V=16, d=32), "hidden_size"), (tiny(V=8), "vocab_size"), (tiny(V=16, seed=5), "head_sha256")):
        refuses(lambda: load_checkpoint(Lines, TargetModel(other), tmp_path), "target", says)
    class Other(Lines): pass
    refuses(lambda: load_checkpoint(Other, base, tmp_path), "folder", "Lines")
    refuses(lambda: set_weights(Lines(base), {}), "weights", "w.0.bias")
    refuses(lambda: set_weights(Lines(base), {**Lines(base).state_dict(), "x": torch.ones(1)}), "weights", "x")
    refuses(lambda: set_weights(Lines(base), {**Lines(base).state_dict(), "w.0.bias": torch.ones(3)}), "weights", "w.0.bias")


def test_bad_requests(school, tmp_path):
    "A layer that does not exist, lessons of no steps, a head that is not plain, states too large for half precision"
    base, train, held, x, _ = school
    refuses(lambda: state_dataset(base, x, (3,), tmp_path), "layers", "3")
    refuses(lambda: train_network(Lines(base), base, train, held[:], 0, 1e-2, tmp_path), "steps")
    class Soft(type(base.model)):
        def forward(self, **kw): out = super().forward(**kw); out.logits = out.logits.tanh(); return out
    soft = tiny(); soft.__class__ = Soft
    refuses(lambda: TargetModel(soft), "model", "head")
    refuses(lambda: TargetModel(tiny().model), "model", "LlamaModel")
    for depth in (3, 18): refuses(lambda: evaluate(Lines(base), base, held[:], depth), "depth", "at most 2")
    for depth in (19, 0, 2.): refuses(lambda: evaluate(Lines(base), base, held[:], depth), "depth")
    huge = tiny(V=16)
    assert not list(tmp_path.glob("*.npy"))
    with torch.no_grad(): huge.model.norm.weight.mul_(1e6)
    refuses(lambda: state_dataset(TargetModel(huge), x, (2,), tmp_path), "layers", "65,504")
    assert not list(tmp_path.glob("*.npy"))


def test_other_families_have_a_base():
    "GPT-2's head on its last state is its logits too"
    assert TargetModel(GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None))).facts()["num_hidden_layers"] == 2
