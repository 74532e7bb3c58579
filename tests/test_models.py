"The embedded models: good language models for their size, drafts that agree, a recipe that resumes"
import json
import lzma

import numpy as np
import pytest
import torch
from helpers import proves

from specref.models.embedded import DATA, DOMAINS, END_TEXT, mean_overlap, raw_model, bits_per_byte, corpus, domain_ids, embedded, ids_of, n_bytes, prompts, evenly_spaced, tokenizer, windows, sample_texts
from specref.core.target import NgramModel

MOST = 6_000  # held-out tokens read by each model; xz reads the whole held-out half


@pytest.fixture(scope="module")
def raw(): return {k: raw_model(k) for k in ("target", "large", "small")}


@pytest.fixture(scope="module")
def five(): return NgramModel(np.concatenate([domain_ids(d, held_out=False) for d in DOMAINS]), 512, 5)


@pytest.mark.parametrize("domain", DOMAINS)
def test_beats_compressor_and_ngrams(raw, five, domain):
    "Fewer held-out bits per byte than xz -9e and than an interpolated 5-gram; 0.1 fewer than the larger draft"
    ids = evenly_spaced(domain_ids(domain), MOST)
    whole = "\0".join(r["text"] for r in corpus() if r["domain"] == domain and r["held_out"]).encode()
    xz = 8 * len(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME)) / len(whole)
    some = range(1, len(ids), 8)
    gram = -sum(np.log2(five.law(tuple(ids[max(0, t - 4):t]))[ids[t]]) for t in some) / n_bytes(ids) * len(ids) / len(some)
    target, large = bits_per_byte(raw["target"], ids), bits_per_byte(raw["large"], ids)
    print(f"{domain}: target {target:.3f}, larger draft {large:.3f}, 5-gram {gram:.3f}, xz {xz:.3f} bits per byte")
    assert target < xz and target < gram and target <= large - .1


@pytest.mark.parametrize("domain", DOMAINS)
def test_acceptance(raw, domain):
    "α at temperature 1 on text that the target writes from held-out prompts: at least .55 and .65"
    texts = sample_texts(raw["target"], torch.tensor(prompts(domain, 24, seed=5)), 96, torch.Generator().manual_seed(5))
    rates = {k: mean_overlap(raw["target"], raw[k], texts) for k in ("small", "large")}
    print(domain, rates)
    assert rates["small"] >= .55 and rates["large"] >= .65


def test_shipped_files():
    "Each checkpoint says which recipe, corpus and versions made it; all weights together stay under 35 MB; the corpus has its licence"
    import hashlib
    made = [json.loads((DATA/k/"recipe.json").read_text()) for k in ("target", "large", "small")]
    assert {m["corpus_sha256"] for m in made} == {hashlib.sha256((DATA/"corpus.jsonl.xz").read_bytes()).hexdigest()}
    assert all(m["torch"] and m["transformers"] and m["python"] and m["recipe"]["steps"] for m in made)
    assert sum(f.stat().st_size for f in DATA.glob("*/model.safetensors")) < 35e6
    assert "PSF" in (DATA/"LICENSE-PSF.txt").read_text()


def test_held_out_is_apart():
    "No held-out file, as prose or as code, is in the training half; documents end with the end token"
    side = {h: {r["name"] for r in corpus() if r["held_out"] == h} for h in (True, False)}
    assert side[True] and not side[True] & side[False]
    tok = tokenizer()
    assert list(ids_of(tok, ["a", "b"])) == [*tok.encode("a"), 0, *tok.encode("b"), 0] and tok.decode([0]) == END_TEXT


def test_a_frozen_library_reads_back(tmp_path):
    "`write_corpus` on a tiny library: prose and code apart, nothing twice, no skipped or broken file, and the flag of each name"
    from specref.models.recipe import held_out, write_corpus
    prose = ("This function adds the numbers that it is given, one after another, and gives back what they come to in the end. " * 3).strip()
    code = "\n".join(f"number_{i} = {i} + {i}" for i in range(40))
    lib = tmp_path/"lib"
    pages = {f"idlelib/{f}": f"<p>{f}</p> " + prose for f in "HISTORY.txt NEWS.txt NEWS2x.txt README.txt TODO.txt help.html".split()}
    sources = {"a.py": f'"""{prose}"""\n{code}\n', "pkg/b.py": f'"""{prose}"""\n{code}\nlast = 1\n', "short.py": "x = 1\n", "broken.py": f"def (\n{code}\n", "encodings/c.py": code}
    for name, text in (pages | sources).items():
        (lib/name).parent.mkdir(parents=True, exist_ok=True)
        (lib/name).write_text(text, "utf-8")
    write_corpus(tmp_path/"out"/"corpus.jsonl.xz", lib)
    rows = [json.loads(line) for line in lzma.decompress((tmp_path/"out"/"corpus.jsonl.xz").read_bytes()).decode().split("\n")]
    found = {(r["domain"], r["name"]): r["text"] for r in rows}
    assert {k: t for k, t in found.items() if k[0] == "code"} == {("code", "a.py"): code, ("code", "pkg/b.py"): code + "\nlast = 1"}
    assert found["english", "a.py"] == prose and not {n for _, n in found} & {"short.py", "broken.py", "encodings/c.py"}
    assert ("english", "pkg/b.py") not in found and found["english", "idlelib/help.html"] == "help.html " + prose
    assert len(found) == len(rows) and all(r["held_out"] == held_out(r["name"]) and len(r["text"]) > 200 for r in rows)
    assert [f.name for f in (tmp_path/"out").iterdir()] == ["corpus.jsonl.xz"]


def test_tokenizer_writes_every_byte():
    "Any text comes back from its tokens"
    tok = tokenizer()
    for text in ("def f(x):\n\treturn x  # é ∑ 漢\0", "".join(map(chr, range(1, 400)))): assert tok.decode(tok.encode(text)) == text


@proves("thm-resume")
@pytest.mark.parametrize("stops", [(1, None), (2, 3, None)])
def test_resumes_to_the_same_weights(tmp_path, stops):
    "Interrupted anywhere, and between saves, training ends with the weights of an uninterrupted run"
    from specref.models.recipe import fit, llama, next_token_loss
    ids = {d: (np.arange(4000, dtype=np.uint16) * 7) % 50 for d in DOMAINS}
    def run(folder, stops):
        for until in stops:
            torch.manual_seed(0)
            model = fit(llama(2, 32, 64), next_token_loss(ids, 2, 16), 5, 1e-2, tmp_path/folder/"m.pt", until=until)
        return model
    a, b = run("a", [None]), run("b", stops)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


@proves("thm-deepen")
@pytest.mark.parametrize("layers", [1, 3])
def test_deepening_keeps_the_law_and_every_layer_learns(layers):
    "Twice the layers give the same logits, bit for bit; the gradient reaches the new last matrices at once, and after one step everything"
    from specref.models.recipe import deepen, llama, next_token_loss, train_step, optimiser
    torch.manual_seed(layers)
    shallow, x = llama(layers, 64, 96), torch.randint(0, 512, (2, 20))
    deep = deepen(shallow)
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 2*layers
    with torch.no_grad(): assert torch.equal(deep(x).logits, shallow(x).logits)
    loss_of, opt = next_token_loss({d: np.arange(4000, dtype=np.uint16) % 50 for d in DOMAINS}, 2, 16), optimiser(deep, 1e-2, 0.)
    loss_of(deep, 0).backward()
    assert all(layer.self_attn.o_proj.weight.grad.abs().max() > 0 and layer.mlp.down_proj.weight.grad.abs().max() > 0 for layer in deep.model.layers)
    opt.zero_grad()
    before = {k: v.clone() for k, v in deep.state_dict().items()}
    for step in range(2): train_step(deep, opt, loss_of, step, 1e-2)
    assert all(not torch.equal(before[k], v) for k, v in deep.state_dict().items())


def test_whole_recipe_runs(tmp_path, monkeypatch):
    "Every stage of `train`, tiny: what it ships can be loaded and decoded with, and a second call changes nothing"
    import specref.models.recipe as t
    from specref.models.transformer import HFModel
    rows = [r for d in DOMAINS for r in [r for r in corpus() if r["domain"] == d and not r["held_out"]][:12]]
    monkeypatch.setattr(t, "corpus", lambda: rows)
    tiny = t.ModelRecipe(target=(2, 32, 64), small=(1, 32, 64), large=(1, 64, 64), steps=2, deep_steps=2, rows=2, length=32, sample_tokens=100, sample_rows=8, distil_steps=2, distil_rows=4, threads=1)
    t.train_models(tmp_path, tiny)
    first = {f: f.read_bytes() for f in tmp_path.rglob("*.safetensors")}
    t.train_models(tmp_path, tiny)
    assert len(first) == 3 and all(f.read_bytes() == b for f, b in first.items()) and not list(tmp_path.rglob("*.part"))
    assert HFModel.load(tmp_path/"data"/"small").V == 512


def test_windows_are_addressed_by_step():
    "The same step gives the same windows, another step others; the domains come in proportion"
    ids = {d: np.full(1000, i, np.uint16) for i, d in enumerate(DOMAINS)}
    assert torch.equal(windows(ids, 3, 8, 16), windows(ids, 3, 8, 16)) and not torch.equal(windows(ids, 3, 64, 4), windows(ids, 4, 64, 4))
    share = np.mean([windows(ids, s, 64, 4).float().mean() for s in range(40)])
    assert abs(share - DOMAINS["code"]) < .05


def test_unknown_name():
    with pytest.raises(ValueError, match="name: got 'huge', wanted one of"): embedded("huge")
