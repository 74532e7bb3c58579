"34_drafters: every system certified with a table in place of its network, and one command trains any"
import json, re, shutil
from types import SimpleNamespace

import numpy as np, pytest, torch
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from helpers import examples, refuses
from house import ROOT
from networks import Interrupted
from specref import autoregressive, Chain, generate, HFModel, load_system, reject, Seeded, tokenizer
from specref.app.commands import main
from specref.models import recipe
from specref.models.embedded import DOMAINS
from specref.models.recipe import llama
from specref.train import registry
from specref.train.checkpoints import LAYOUTS, convert, from_folder
from specref.train.harness import TargetModel, acceptances, label_mean, read_card, written_by_another
from specref.train.registry import TRAINED, load_drafter, train_drafter
from specref.train.texts import OnlineStates, encode_texts, read_texts
from specref.verify.siblings import drawn_at

@examples(10, st.lists(st.integers(-30, 30), min_size=3, max_size=5, unique=True))
def test_the_draw_at_temperature_0_is_the_limit(z):
    "Of sampling without replacement at a small temperature"
    z, earlier = np.array(z) / 10, ()
    (_, warm), (_, cold) = drawn_at(1, None), drawn_at(0, SimpleNamespace(V=len(z), meter=None))
    q, raw = np.exp((z - z.max()) / .004), np.exp(z - z.max())
    assert warm(q / q.sum())(())[int(z.argmax())] > 1 - 1e-9
    for x in np.argsort(-z).tolist():
        law = np.asarray(cold(raw / raw.sum())(earlier), float)
        assert law[x] == 1
        earlier = (*earlier, x)

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "Folders of targets of two families, each with a tokenizer"
    llama_folder, gpt_folder = (tmp_path_factory.mktemp(name) for name in ("llama", "gpt"))
    torch.manual_seed(0)
    llama(6, 32, 64).save_pretrained(llama_folder)
    config = GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=0,
                        eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(gpt_folder)
    for folder in (llama_folder, gpt_folder): tokenizer().save_pretrained(folder)
    return dict(llama=llama_folder, gpt=gpt_folder)

@pytest.fixture
def short(monkeypatch):
    "Six texts of each domain for the corpus, so that encoding it takes no time"
    corpus = registry.corpus()
    def texts(domain): return [r for r in corpus if r["domain"] == domain and not r["held_out"]][:6]
    monkeypatch.setattr(registry, "corpus", lambda: [r for domain in DOMAINS for r in texts(domain)])

def train(name, folder, out, steps, texts=6):
    train_drafter(name, str(folder), out, steps=steps, texts=texts, length=48)

@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("family, system, steps",
                         [("llama", "Medusa-2", 20), ("llama", "MLP Speculator", 150),
                          ("llama", "EAGLE-3.1", 20), ("llama", "Falcon", 20), ("gpt", "EAGLE-2", 20)])
def test_one_command_trains(family, system, steps, folders, tmp_path, capsys):
    "Texts, states, training (of the speculator on the corpus first), card, and decoding of the target's text"
    name = TRAINED.entry(system).recipe.name
    train(name, folders[family], tmp_path, steps)
    card, model = read_card(tmp_path/"data"/name), HFModel.load(folders[family]).model
    assert f"{name}: a chain of" in capsys.readouterr().out
    assert card["recipe"]["steps"] == steps and card["tokens"] >= 1 and len(card["data_sha256"]) == 64
    assert len([*tmp_path.rglob(f"{name}-*-*")]) == (2 if name == "mlp" else 1)   # a folder for each stage
    target, made = load_system(system, 0, tmp_path/"data", model)
    alone = autoregressive(HFModel(target.model, 0), (1, 2, 3), 8, Seeded(0))
    assert made(target, (1, 2, 3), 8, Seeded(0)) == alone

@pytest.mark.usefixtures("short")
def test_interrupted_training_resumes(folders, tmp_path, monkeypatch):
    "Interrupted while sampling and while training, the command ends with the same weights"
    train("eagle", folders["llama"], tmp_path/"a", 20, 40)
    for _ in ("while sampling", "while training"):
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(recipe, "write_whole", Interrupted(2, early=True))
            train("eagle", folders["llama"], tmp_path/"b", 20, 40)
    for steps in (10, 20): train("eagle", folders["llama"], tmp_path/"b", steps, 40)
    a, b = ((tmp_path/x/"data"/"eagle"/"model.safetensors").read_bytes() for x in "ab")
    assert a == b

@pytest.mark.usefixtures("short")
def test_one_bar_shows_the_whole_run(folders, tmp_path, monkeypatch):
    "All phases in their order, to the end, with tokens a second; what is stored is no work of a second run"
    bars = []
    class Bar(recipe.tqdm):
        def __init__(self, **kw):
            super().__init__(**kw)
            bars.append(self)
            self.phases = []
        def set_description(self, desc):
            self.phases.append(desc)
            super().set_description(desc)
    monkeypatch.setattr(recipe, "tqdm", Bar)
    for steps in (20, 10): train("eagle", folders["gpt"], tmp_path, steps)
    first, second = bars
    assert [*dict.fromkeys(first.phases)] == ["encode", "sample", "states", "train own"]
    assert second.phases == ["train own"] and "tokens=" in second.postfix and "loss=" in second.postfix
    for bar in bars: assert bar.disable and bar.n == pytest.approx(bar.total)   # closed
    assert second.n == pytest.approx(10 * 16 * 48 * registry.COSTS["train"])

@pytest.mark.usefixtures("short")
def test_the_corpus_is_encoded_once(folders, tmp_path, monkeypatch, capsys):
    "Read from its file while texts and tokenizer are the same, and encoded anew when either has changed"
    made, ids_of, texts = [], registry.ids_of, registry.corpus()
    monkeypatch.setattr(registry, "ids_of", lambda *given: made.append(ids_of(*given)) or made[-1])
    own, model = type(tokenizer()).from_pretrained(folders["gpt"]), HFModel.load(folders["gpt"]).model
    def encoded(words, anew):
        made.clear()
        found = registry.encode_corpus(own, model, tmp_path)
        assert len(made) == 2*anew and words in capsys.readouterr().err
        return found
    first, again = encoded("encoded once", True), encoded("read from", False)
    assert all(np.array_equal(first[d], again[d]) and again[d][-1] == own.eos_token_id for d in DOMAINS)
    monkeypatch.setattr(registry, "corpus", lambda: [texts[0] | dict(text="Another text."), *texts[1:]])
    encoded("encoded anew", True)
    own.add_tokens(["specref"])
    model.resize_token_embeddings(len(own))
    encoded("encoded anew", True)

def test_a_target_without_a_tokenizer(tmp_path):
    "The target is refused, and nothing is written"
    llama(2, 32, 64).save_pretrained(tmp_path/"bare")
    refuses("target", train_drafter, "eagle", str(tmp_path/"bare"), tmp_path/"x")
    assert not (tmp_path/"x").exists()

def test_at_the_command_line(capsys):
    "For an unknown name: one line and exit status 2"
    with pytest.raises(SystemExit) as e: main(["train", "eagle9"])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and "eagle3" in err

def test_what_is_trained_for_the_embedded_target_alone(monkeypatch, tmp_path, capsys):
    "Each by its name, into the folder that is given; `make train` runs all, and the recipes of drafters"
    seen = []
    for name in registry.EMBEDDED_TRAINING:
        monkeypatch.setitem(registry.EMBEDDED_TRAINING, name, lambda out, name=name: seen.append((name, out)))
        train_drafter(name, out=tmp_path)
    assert seen == [(name, tmp_path) for name in registry.EMBEDDED_TRAINING]
    makefile = (ROOT/"Makefile").read_text()
    for variable in "USUAL", "LONGER": exec(re.search(f'{variable} := "(.*)"', makefile)[1], {})
    usual, longer = capsys.readouterr().out.splitlines()
    made, (texts, steps, seed, *others) = [*registry.EMBEDDED_TRAINING, *registry.RECIPES], longer.split()
    assert (texts, steps, seed) == ("10240", "6000", "0")
    assert made[0] is None and sorted(usual.split() + others) == sorted(made[1:])

# Models of one's own

CONVERSATIONS = [dict(messages=[dict(role="user", content=f"What is {i}?"),
                                dict(role="assistant", content=f"It is the number {i}.")]) for i in range(24)]

@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    "A small target with a chat template, and a file of conversations"
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    llama(6, 32, 64).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (folder/"chat_template.jinja").write_text(template)
    (folder/"chat.jsonl").write_text("\n".join(map(json.dumps, CONVERSATIONS)))
    return folder

def own(folder, out, name="eagle3", **kw):
    train_drafter(name, str(folder), out, steps=2, length=48, data=folder/"chat.jsonl", rows=4, **kw)
    return read_card(out/"data"/name)

@pytest.mark.parametrize("name, layout", [("eagle3", "speculators/eagle3"), ("medusa", "medusa"),
                                          ("eagle", "eagle")])
def test_conversations_to_a_public_checkpoint(name, layout, chat_model, tmp_path):
    "Trained in bfloat16 on answers, two batches a step, states on demand; then in a public format"
    card = own(chat_model, tmp_path, name, parts=2, dtype="bfloat16", online=True)
    assert card["recipe"]["parts"] == 2 and card["recipe"]["online"] and not [*tmp_path.rglob("states")]
    convert(tmp_path/"data"/name, layout, tmp_path/"public", str(chat_model))
    base = TargetModel(HFModel.load(chat_model).model)
    net, mine = from_folder(tmp_path/"public", LAYOUTS[layout], base), load_drafter(
        str(tmp_path/"data"/name), base.model).net
    assert all(map(torch.equal, net.parameters(), mine.parameters()))

@pytest.fixture
def misled(chat_model, tmp_path, capsys):
    "A drafter trained on answers that its target would not write, the answers, and what the command printed"
    mine, model = shutil.copytree(chat_model, tmp_path/"mine"), HFModel.load(chat_model).model
    with torch.no_grad(): model.model.norm.weight.mul_(20)   # far from uniform
    model.save_pretrained(mine)
    file = mine/"chat.jsonl"
    file.write_text("\n".join(map(json.dumps, CONVERSATIONS * 10)))
    train_drafter("medusa", str(mine), tmp_path, steps=60, length=48, data=file, rows=8)
    texts = encode_texts(type(tokenizer()).from_pretrained(mine), read_texts(file), 48, 512)
    return load_drafter(str(tmp_path/"data"/"medusa"), model), texts, capsys.readouterr().out

def measured(made, texts):
    "Tokens a round of the loop behind the questions"
    target = made.target()
    drafter, starts = Chain(made.draft(target), 4), zip(texts.x[:12], texts.counts.argmax(1))
    runs = [generate(target, drafter, reject, tuple(x[:k].tolist()), 48 - k, Seeded(i)).ledger
            for i, (x, k) in enumerate(starts)]
    return sum(run.num_emitted_tokens for run in runs) / sum(len(run.rounds) for run in runs)

def test_answers_of_others_do_not_raise_the_number(misled):
    "The card has the tokens of the loop; min(1, q/p) along the answers of the file makes them many more"
    made, texts, printed = misled
    others = OnlineStates(made.net.base[0], texts.x, (6,), texts.counts)[:]
    given, stated = (made.net, made.net.base[0], others), made.card["tokens"]
    rates = torch.stack([a for a, _ in acceptances(*given, 4)]).cumprod(0)
    old = 1 + sum(label_mean(a, others.counts, 2).item() for a in rates)
    assert abs(measured(made, texts) - stated) < .3 < 3 < old and written_by_another(*given)
    assert stated <= 1 + sum(made.card["overlaps"]) and f"{stated:.2f} tokens" in printed

def test_the_weights_depend_on_what_is_asked_for(chat_model, tmp_path):
    "Half precision, batches a step and a rate give other runs; disk or demand differ by rounding alone"
    runs = dict(plain={}, online=dict(online=True), half=dict(dtype="bfloat16"), parts=dict(parts=2),
                peak=dict(peak=1e-4))
    tokens = {k: own(chat_model, tmp_path/k, **kw)["tokens"] for k, kw in runs.items()}
    assert abs(tokens["online"] - tokens["plain"]) < 1e-3 and len({*tokens.values()}) >= 4

def test_a_loss_that_is_no_number(chat_model, tmp_path):
    "Nothing is stored; a smaller rate trains in a folder of its own"
    refuses("peak", own, chat_model, tmp_path, peak=1e30)
    assert not (tmp_path/"data").exists()
    own(chat_model, tmp_path, peak=1e-3)

@pytest.mark.usefixtures("short")
def test_bad_options(chat_model, folders, tmp_path):
    "Each is refused by its name before anything is written"
    for kw in (dict(rows=0), dict(parts=0), dict(peak=-1.), dict(dtype="int3"), dict(device="nowhere"),
               dict(data=tmp_path/"none.jsonl"), dict(target=str(tmp_path/"none")), dict(length=600)):
        given = dict(target=str(chat_model), out=tmp_path/"x", steps=2, length=48) | kw
        refuses(next(iter(kw)), train_drafter, "eagle3", **given)
    assert not (tmp_path/"x").exists()
    refuses("target", train_drafter, "eagle3", str(folders["gpt"]), tmp_path/"x", 2, 6, 48)   # two layers
    refuses("data", train_drafter, "lengths", data=chat_model/"chat.jsonl")
    truncated = tmp_path/"half"
    shutil.copytree(chat_model, truncated)
    weights = truncated/"model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])   # a download that was interrupted
    refuses("target", train_drafter, "medusa", str(truncated), tmp_path/"x")
