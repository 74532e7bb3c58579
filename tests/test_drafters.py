"32c_drafters: every taught system decodes what the target says, and one command teaches any drafter for any target"
import json
from collections import Counter
from functools import partial
from types import SimpleNamespace
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode
from hypothesis import given, settings, strategies as st
from transformers import GPT2Config, GPT2LMHeadModel
from helpers import random_table
from specref.certify.certificates import certificate, g_test
from specref.core.rng import Seeded
from specref.app.commands import main
from specref.train.registry import RECIPES, SHIPPED_DRAFTERS, TRAINED, model_and_draw, load_network, trained_system, load_system, train_drafter
from specref.core.loop import autoregressive
from specref.models.embedded import DOMAINS, raw_model, prompts, tokenizer, sample_texts
from specref.core.target import target_law
from specref.train.harness import TargetModel, StateDataset, read_card, evaluate
from specref.models.recipe import llama
from specref.models.transformer import HFModel

torch.set_num_threads(1)
names = pytest.mark.parametrize("name", TRAINED)


@names
def test_greedy_text_is_plain(name):
    "In double precision, at temperature 0, every system writes the text of plain decoding, and keeps some drafts"
    double = raw_model("target", torch.float64)
    for domain in DOMAINS:
        start = prompts(domain, 1, seed=9)[0]
        target, system = load_system(name, 0, model=double)
        out = system(target, start, 20, Seeded(0))
        assert list(out) == list(autoregressive(HFModel(target.model, 0, check=False), start, 20, Seeded(0)))
        assert (target.model is double) == (name != "Medusa-2")   # who alone has a target of its own
        assert out.ledger.num_accepted_tokens > 0


@names
def test_the_targets_states_cost_no_pass(name):
    "After the first round, which reads the prompt for its states, the target is called once a round"
    target, system = load_system(name, 1)
    out = system(target, prompts("code", 1)[0], 16, Seeded(1))
    assert target.meter.calls == len(out.ledger.rounds) + 1


def test_what_is_shipped():
    "A card and weights for every course and no more, made for the embedded target, all of the same lessons; together at most 20 MB; the card says by what recipe, data and versions"
    facts, cards = TargetModel(raw_model("target")).facts(), {name: read_card(SHIPPED_DRAFTERS/name) for name in RECIPES}
    assert sorted(f.name for f in SHIPPED_DRAFTERS.iterdir()) == sorted(RECIPES) and sum(f.stat().st_size for f in SHIPPED_DRAFTERS.glob("*/*")) <= 20e6
    for name, card in cards.items():
        course, recipe = RECIPES[name], card["recipe"]
        assert card["kind"] == course.make.__name__ and card["target"] == facts and card["settings"].items() >= json.loads(json.dumps(course.settings)).items()
        assert (recipe["name"], recipe["peak"], recipe["rows"], recipe["corpus"]) == (name, course.peak, course.rows, course.corpus) and card["specref"] and card["python"] and card["torch"] and card["transformers"]
        assert all(recipe[k] == cards["medusa"]["recipe"][k] for k in ("steps", "texts", "length", "seed")) and card["data_sha256"] == cards["medusa"]["data_sha256"]
        assert [at for at, _ in card["told"]][-1] == recipe["steps"] - int(course.corpus * recipe["steps"])//100 * 100 and card["tokens"] == pytest.approx(max(m for _, m in card["told"]), abs=.02)   # weights are rounded when they are shipped, not when they are marked


@pytest.mark.parametrize("name", RECIPES)
def test_the_mark_on_the_card_can_be_measured_again(name):
    "On other texts that the target wrote the shipped weights are believed as the card says"
    net, card = load_network(name), read_card(SHIPPED_DRAFTERS/name)
    base = TargetModel(RECIPES[name].serves(net))
    x = sample_texts(base.model, torch.tensor([p for d in DOMAINS for p in prompts(d, 12, seed=7)]), 96, torch.Generator().manual_seed(0), half=False)
    with torch.inference_mode(): states = dict(enumerate(base.model(input_ids=x, output_hidden_states=True).hidden_states))
    tokens, overlaps = evaluate(net, base, StateDataset(x, states), min(4, len(card["overlaps"])))
    assert tokens == pytest.approx(card["tokens"], rel=.15) and overlaps == pytest.approx(card["overlaps"], abs=.1)


class Once(HFModel):
    "A target that gives again, for a tree it has seen, the rows that it gave"
    def __init__(self, *args, **kw): super().__init__(*args, **kw); self.given = {}
    def __call__(self, tree): return remembered(self.given, super().__call__, tree)


def remembered(given, ask, tree):
    key = tree.ctx, tuple(tree.parent), tuple(tree.token)
    if key not in given: given[key] = ask(tree)
    return given[key]


@names
def test_joint_law(name, monkeypatch):
    "Three tokens of the embedded target, its laws and the network's cut to two tokens: G-test at 1e-9 on 1,500 runs, power .999 at the distance asserted"
    (course, *_), make = TRAINED[name], trained_system(name)
    net, given = load_network(course), {}
    target, prompt = Once(RECIPES[course].serves(net), 1.5, top_k=2, keep=net.reads, check=False), prompts("code", 1, seed=2)[0]
    model = RECIPES[course].model(net, target)
    ask = type(model).__call__
    monkeypatch.setattr(type(model), "__call__", lambda draft, tree: remembered(given, partial(ask, draft), tree))
    system = make(model, gamma=2, temperature=1.5, **read_card(SHIPPED_DRAFTERS/course))
    want = target_law(HFModel(target.model, 1.5, top_k=2, check=False), prompt, 3)
    test = g_test(Counter(system(target, prompt, 3, Seeded(i)) for i in range(1500)), want)
    print(f"{name}: {test}")
    assert test.fits and test.tv < .3


@pytest.mark.parametrize("name", RECIPES)
def test_no_law_is_taken_in_half_precision(name):
    "A lesson multiplies in bfloat16, but every softmax of its loss, attention's written out and the laws', is in single precision"
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **(kwargs or {}))
            if f.overloadpacket in (torch.ops.aten._softmax, torch.ops.aten._log_softmax): seen.add(out.dtype)
            if f.overloadpacket is torch.ops.aten.mm: seen.add(("mm", out.dtype))
            return out
    torch.manual_seed(0); seen = set()
    base, course, x = TargetModel(llama(6, 32, 64)), RECIPES[name], torch.randint(512, (2, 24))
    net = course.begin(course.make(base, **course.settings), x.numpy()).train()
    batch = StateDataset(x, {k: h.float() for k, h in enumerate(base.model(input_ids=x, output_hidden_states=True).hidden_states)})
    with Watch(), torch.autocast("cpu", torch.bfloat16): net.loss(batch, .9).backward()
    assert {d for d in seen if isinstance(d, torch.dtype)} == {torch.float32} and ("mm", torch.bfloat16) in seen


@names
def test_every_recipe_is_certified(name):
    "With a table of fractions in the place of the network every way of drafting has the target's law, at both temperatures of the draw"
    make = trained_system(name)
    assert certificate(make).exact and certificate(partial(make, temperature=0), V=4, n=2, seeds=(3, 4), stop=()).exact
    system = make(random_table(3, 1))
    assert system.name.startswith(name) and system.cites


@given(st.lists(st.integers(-30, 30), min_size=3, max_size=5, unique=True))
def test_cooled_is_the_limit(z):
    "The draw at temperature 0 is that of sampling without replacement at a small one"
    z = np.array(z) / 10
    (_, warm), (_, cold) = model_and_draw(None, 1), model_and_draw(SimpleNamespace(V=len(z), meter=None), 0)
    q = np.exp((z - z.max()) / .004); raw = np.exp(z - z.max())
    earlier, a, b = (), warm(q / q.sum()), cold(raw / raw.sum())
    for _ in z:
        left = [x for x in range(len(z)) if x not in earlier]
        law = np.asarray(b(earlier), float)
        assert law.argmax() == max(left, key=lambda x: z[x]) and law.max() == 1
        if len(earlier) == 0: assert a(earlier)[law.argmax()] > 1 - 1e-9
        earlier = (*earlier, int(law.argmax()))


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    "A target of one's own with a tokenizer beside it"
    folder = tmp_path_factory.mktemp("mine"); torch.manual_seed(0)
    llama(6, 32, 64).save_pretrained(folder); tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def short(monkeypatch):
    "A tenth of a percent of the corpus, so that cutting it into tokens takes no time"
    import specref.train.registry as drafters
    rows = [r for d in DOMAINS for r in [r for r in drafters.corpus() if r["domain"] == d and not r["held_out"]][:6]]
    monkeypatch.setattr(drafters, "corpus", lambda: rows)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", RECIPES)
def test_the_command_teaches(name, mine, tmp_path, capsys):
    "Texts, states, lesson, checkpoint, and a system that decodes the target's text: one command and three lines, for every course"
    train_drafter(name, str(mine), tmp_path, steps=100, texts=6, length=48)
    assert f"{name}: a chain of" in capsys.readouterr().out
    card = read_card(tmp_path/"data"/name)
    assert card["recipe"]["steps"] == 100 and card["tokens"] >= 1 and len(card["data_sha256"]) == 64
    system = next(s for s, (course, *_) in TRAINED.items() if course == name)
    model = HFModel.load(mine).model
    target, made = load_system(system, 0, tmp_path/"data", model)
    assert list(made(target, (1, 2, 3), 8, Seeded(0))) == list(autoregressive(HFModel(target.model, 0), (1, 2, 3), 8, Seeded(0)))


@pytest.mark.usefixtures("short")
def test_interrupted_it_goes_on(mine, tmp_path, monkeypatch):
    "Stopped while writing and while learning, the command ends with the same weights"
    import specref.models.recipe as training
    train_drafter("eagle", str(mine), tmp_path/"a", steps=200, texts=80, length=48)
    saves, whole = [], training.write_whole
    for stop in (1, 3):
        def failing(path, write, stop=stop, seen=[]):
            seen.append(path)
            if len(seen) > stop: raise KeyboardInterrupt
            whole(path, write)
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(training, "write_whole", failing)
            train_drafter("eagle", str(mine), tmp_path/"b", steps=200, texts=80, length=48)
    train_drafter("eagle", str(mine), tmp_path/"b", steps=200, texts=80, length=48)
    assert (tmp_path/"a"/"data"/"eagle"/"model.safetensors").read_bytes() == (tmp_path/"b"/"data"/"eagle"/"model.safetensors").read_bytes()


@pytest.mark.usefixtures("short")
def test_one_folder_for_two_lessons(mine, tmp_path):
    "Another number of steps is another lesson, also in the folder of the first"
    train_drafter("eagle", str(mine), tmp_path/"a", steps=30, texts=6, length=48)
    for steps in (20, 30): train_drafter("eagle", str(mine), tmp_path/"b", steps=steps, texts=6, length=48)
    a, b = (read_card(tmp_path/x/"data"/"eagle") for x in "ab")
    assert a["told"] == b["told"] and [at for at, _ in a["told"]] == [30]


@pytest.mark.usefixtures("short")
def test_on_another_family(tmp_path):
    "EAGLE for a GPT-2"
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path/"gpt")
    tokenizer().save_pretrained(tmp_path/"gpt")
    train_drafter("eagle", str(tmp_path/"gpt"), tmp_path, steps=100, texts=4, length=48)
    model = HFModel.load(tmp_path/"gpt").model
    target, system = load_system("EAGLE-2", 0, tmp_path/"data", model)
    assert list(system(target, (1, 2), 6, Seeded(0))) == list(autoregressive(HFModel(model, 0), (1, 2), 6, Seeded(0)))


def refuses(f, start):
    with pytest.raises(ValueError, match=start): f()


def test_bad_requests(mine, tmp_path):
    "Unknown names, a folder without a drafter, another target, numbers out of range, a target without a tokenizer; nothing is written"
    refuses(lambda: load_system("EAGLE-9"), "^system: .*EAGLE-2")
    refuses(lambda: train_drafter("eagle9", out=tmp_path/"x"), "^name: .*eagle3")
    refuses(lambda: load_system("EAGLE", folder=tmp_path), "^folder: ")
    refuses(lambda: load_system("EAGLE", model=llama(24, 192, 512)), "^target: .*head_sha256")
    refuses(lambda: train_drafter("eagle", out=tmp_path/"x", steps=0), "^steps: ")
    refuses(lambda: train_drafter("eagle", out=tmp_path/"x", length=4), "^length: ")
    torch.manual_seed(0); llama(2, 32, 64).save_pretrained(tmp_path/"bare")
    refuses(lambda: train_drafter("eagle", str(tmp_path/"bare"), tmp_path/"x"), "^target: ")
    refuses(lambda: train_drafter("eagle", str(tmp_path/"nowhere"), tmp_path/"x"), "^path: ")
    assert not (tmp_path/"x").exists()


def test_at_the_command_line(capsys):
    "A wrong name is one line and status 2"
    with pytest.raises(SystemExit) as e: main(["train", "eagle9"])
    said = capsys.readouterr()
    assert e.value.code == 2 and said.err.count("\n") == 1 and "eagle3" in said.err
