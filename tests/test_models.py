"The embedded models: shipped files, a corpus with a held-out part, and training that resumes"
import hashlib, json, lzma

import numpy as np, pytest, torch
from helpers import proves
from safetensors.torch import load_file

from specref import HFModel, tokenizer
from specref.models import recipe
from specref.models.embedded import DATA, DOMAINS, END_TEXT, corpus, ids_of, windows

def counting(n=4000): return {d: np.arange(n, dtype=np.uint16) * 7 % 50 for d in DOMAINS}

def test_shipped_files():
    "Beside the trained drafters: each checkpoint names what made it; all files stay below an index's 100 MB"
    weights = [f for f in DATA.glob("**/*.safetensors") if DATA/"drafters" not in f.parents]
    made = [json.loads((f.parent/"recipe.json").read_text()) for f in weights]
    digest = hashlib.sha256((DATA/"corpus.jsonl.xz").read_bytes()).hexdigest()
    assert len(made) == 14 and {m["corpus_sha256"] for m in made} == {digest}
    assert all(m["torch"] and m["transformers"] and m["python"] and m["recipe"] for m in made)
    assert sum(f.stat().st_size for f in weights) < 58e6
    assert sum(f.stat().st_size for f in DATA.glob("**/*") if f.is_file()) < 100e6
    assert "PSF" in (DATA/"LICENSE-PSF.txt").read_text()

def test_cards(tmp_path):
    "Model and network are written in half precision, each with its recipe, the corpus, versions and notes"
    made, net = recipe.ModelRecipe(steps=3), torch.nn.Linear(2, 3)
    recipe.save_model(recipe.llama(1, 32, 32), tmp_path/"model", made, loss=.5)
    recipe.write_network(net, tmp_path/"net", made, loss=.5)
    cards = [json.loads((tmp_path/name/"recipe.json").read_text()) for name in ("model", "net")]
    assert cards[0] == cards[1] and cards[0]["loss"] == .5 and cards[0]["recipe"]["steps"] == 3
    assert cards[0].keys() == {"recipe", "corpus_sha256", "python", "torch", "transformers", "loss"}
    weights = load_file(tmp_path/"net"/"model.safetensors")
    assert torch.equal(weights["weight"], net.weight.half()) and net.weight.dtype == torch.float32
    assert HFModel.load(tmp_path/"model").V == 512

def test_held_out_files_are_disjoint_and_tokens_encode_every_byte():
    names = {h: {r["name"] for r in corpus() if r["held_out"] == h} for h in (True, False)}
    assert names[True] and not names[True] & names[False]
    tok = tokenizer()
    assert list(ids_of(tok, ["a", "b"])) == [*tok.encode("a"), 0, *tok.encode("b"), 0]
    assert tok.decode([0]) == END_TEXT
    text = "def f(x):\n\treturn x  # é ∑ 漢\0" + "".join(map(chr, range(1, 400)))
    assert tok.decode(tok.encode(text)) == text

WORDS = "This function adds the numbers that it is given, one after another, and returns their sum. "

def write_library(lib, prose, code):
    pages = "HISTORY.txt NEWS.txt NEWS2x.txt README.txt TODO.txt help.html".split()
    files = {f"idlelib/{f}": f"<p>{f}</p> " + prose for f in pages}
    files |= {"a.py": f'"""{prose}"""\n{code}\n', "pkg/b.py": f'"""{prose}"""\n{code}\nlast = 1\n'}
    files |= {"short.py": "x = 1\n", "broken.py": f"def (\n{code}\n", "encodings/c.py": code}
    for name, text in files.items():
        (lib/name).parent.mkdir(parents=True, exist_ok=True)
        (lib/name).write_text(text, "utf-8")

def test_a_written_corpus_reads_back(tmp_path):
    "`write_corpus` on a tiny library: prose and code separated, nothing twice, no skipped or broken file"
    prose, code = (WORDS * 3).strip(), "\n".join(f"number_{i} = {i} + {i}" for i in range(40))
    write_library(tmp_path/"lib", prose, code)
    out = tmp_path/"out"/"corpus.jsonl.xz"
    recipe.write_corpus(out, tmp_path/"lib")
    rows = [json.loads(line) for line in lzma.decompress(out.read_bytes()).decode().split("\n")]
    found = {(r["domain"], r["name"]): r["text"] for r in rows}
    assert {k: t for k, t in found.items() if k[0] == "code"} == {
        ("code", "a.py"): code, ("code", "pkg/b.py"): code + "\nlast = 1"}
    assert not {name for _, name in found} & {"short.py", "broken.py", "encodings/c.py"}
    assert ("english", "pkg/b.py") not in found
    assert found["english", "a.py"] == prose and found["english", "idlelib/help.html"] == "help.html " + prose
    assert len(found) == len(rows) and [f.name for f in out.parent.iterdir()] == [out.name]
    assert all(r["held_out"] == recipe.held_out(r["name"]) and len(r["text"]) > 200 for r in rows)

@proves("thm-resume")
@pytest.mark.parametrize("stops", [(1, None), (2, 3, None)])
def test_training_resumes_to_the_same_weights(tmp_path, stops):
    "Interrupted anywhere, and between saves, training ends with the weights of an uninterrupted run"
    def run(folder, stops):
        for until in stops:
            torch.manual_seed(0)
            loss, path = recipe.next_token_loss(counting(), 2, 16), tmp_path/folder/"m.pt"
            model = recipe.fit(recipe.llama(2, 32, 64), loss, 5, 1e-2, path, until=until)
        return model.state_dict().values()
    assert all(torch.equal(x, y) for x, y in zip(run("a", [None]), run("b", stops)))

@proves("thm-deepen")
def test_deepening_has_the_same_logits_and_trains_every_layer(layers=3):
    "Twice the layers: the same logits, bit for bit; gradients reach new layers; two steps move all weights"
    torch.manual_seed(layers)
    shallow, x = recipe.llama(layers, 64, 96), torch.randint(0, 512, (2, 20))
    deep = recipe.deepen(shallow)
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 2*layers
    with torch.no_grad(): assert torch.equal(deep(x).logits, shallow(x).logits)
    loss_of, opt = recipe.next_token_loss(counting(), 2, 16), recipe.optimiser(deep, 1e-2, 0.)
    loss_of(deep, 0).backward()
    last = [m.weight for layer in deep.model.layers for m in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    assert all(w.grad.abs().max() > 0 for w in last)
    opt.zero_grad()
    before = {k: v.clone() for k, v in deep.state_dict().items()}
    for step in range(2): recipe.train_step(deep, opt, loss_of, step, 1e-2)
    assert not any(torch.equal(before[k], v) for k, v in deep.state_dict().items())

def test_whole_recipe_runs(tmp_path, monkeypatch):
    "Every stage of `train_models`, tiny: its files can be loaded, and a second call changes nothing"
    side = {d: [r for r in corpus() if r["domain"] == d and not r["held_out"]][:12] for d in DOMAINS}
    monkeypatch.setattr(recipe, "corpus", lambda: sum(side.values(), []))
    tiny = recipe.ModelRecipe(
        target=(2, 32, 64), small=(1, 32, 64), large=(1, 64, 64), steps=2, deep_steps=2, rows=2, length=32,
        sample_tokens=100, sample_rows=8, distil_steps=2, distil_rows=4, threads=1)
    recipe.train_models(tmp_path, tiny)
    first = {f: f.read_bytes() for f in tmp_path.rglob("*.safetensors")}
    recipe.train_models(tmp_path, tiny)
    assert len(first) == 3 and all(f.read_bytes() == b for f, b in first.items())
    assert not list(tmp_path.rglob("*.part")) and HFModel.load(tmp_path/"data"/"small").V == 512

def test_windows_are_addressed_by_step():
    "The same step gives the same windows, another step others; the domains have their shares"
    ids = {d: np.full(1000, i, np.uint16) for i, d in enumerate(DOMAINS)}
    assert torch.equal(windows(ids, 3, 64, 4), windows(ids, 3, 64, 4))
    assert not torch.equal(windows(ids, 3, 64, 4), windows(ids, 4, 64, 4))
    share = np.mean([windows(ids, s, 64, 4).float().mean() for s in range(40)])
    assert abs(share - DOMAINS["code"]) < .05
