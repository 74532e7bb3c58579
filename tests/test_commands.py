"Chapter 63: the command line, on the embedded models and on checkpoints in a folder"
import inspect
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest

from house import ROOT
from specref.commands import COMMANDS, build, main, pair, verdict
from specref.models import tokenizer
from specref.systems import SYSTEMS
from specref.training import llama


def run(capsys, *argv):
    "What a command prints"
    main(argv)
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A target and a draft in a folder, in the Hugging Face format, with the embedded tokenizer"
    import torch
    path = tmp_path_factory.mktemp("checkpoints")
    for seed, (name, layers) in enumerate(dict(target=2, draft=1).items()):
        torch.manual_seed(seed)
        llama(layers, 32, 64).save_pretrained(path/name)
        tokenizer().save_pretrained(path/name)
    return path


@pytest.mark.parametrize("name", SYSTEMS)
def test_decode_prints_equal_texts(capsys, name):
    "At temperature 0: both texts, equal, and everything that was measured"
    said = run(capsys, "decode", "--prompt", "def f(x):", "--n", "12", "--temperature", "0", "--system", name, "--gamma", "2")
    plain, fast = said.split("--- ")[1:3]
    assert plain.startswith("plain\ndef f(x):") and fast.startswith(f"{name}\ndef f(x):") and plain.split("\n", 1)[1] == fast.split("\n", 1)[1]
    for what in "the texts are equal, 12 tokens", "tokens/s", "mean acceptance length", "measured", "predicted": assert what in said


def test_decode_repeats_with_its_seed(capsys):
    "A seed decides a sampled text; another one another"
    texts = [run(capsys, "decode", "--prompt", "The", "--n", "16", "--temperature", "1", "--seed", seed).split("\n--- sampled: each run writes a text of its own")[0] for seed in "778"]
    assert texts[0] == texts[1] != texts[2]


def test_models_of_your_own(capsys, folder):
    "A path for each model; a target alone with a system that drafts without one"
    own = "--target", str(folder/"target")
    said = run(capsys, "decode", "--prompt", "abc", "--n", "8", *own, "--draft", str(folder/"draft"))
    assert "the texts are equal" in said
    assert "the texts are equal" in run(capsys, "decode", "--prompt", "abcabcabc", "--n", "8", *own, "--system", "prompt lookup")
    said = run(capsys, "bench", *own, "--draft", str(folder/"draft"), "--n", "3", "--prompt", "abc")
    assert "c = " in said and "best gamma" in said and "9 tokens x" in said


def test_certify_counts_on_a_named_model(capsys):
    said = run(capsys, "certify", "--target", "target", "--draft", "small", "--system", "speculative sampling", "--runs", "200", "--n", "1")
    assert "equality of 11 probabilities" in said and "no difference seen" in said and "200 runs" in said


BAD = {
    "gamma": ("decode", "--prompt", "x", "--gamma", "0"),
    "n": ("decode", "--prompt", "x", "--n", "-1"),
    "seed": ("decode", "--prompt", "x", "--seed", "-1"),
    "temperature": ("decode", "--prompt", "x", "--temperature", "-1"),
    "prompt": ("decode", "--prompt", ""),
    "system": ("decode", "--prompt", "x", "--system", "magic"),
    "path": ("decode", "--prompt", "x", "--draft", "no/such/folder"),
    "target": ("decode", "--prompt", "x", "--target", "no/such/folder"),
    "--n": ("decode", "--prompt", "x", "--n", "many"),
    "--prompt": ("decode",),
    "COMMAND": (),
    "invalid choice": ("fly",),
    "unrecognized arguments": ("tour", "--speed", "9"),
    "runs": ("certify", "--runs", "0"),
}


@pytest.mark.parametrize("named", BAD)
def test_a_bad_value_is_one_line_and_status_2(capsys, named):
    with pytest.raises(SystemExit) as end: main(BAD[named])
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out
    assert said.err.startswith("specref") and said.err.count("\n") == 1 and named in said.err


def test_a_draft_is_asked_for_by_name(capsys, folder):
    for argv in ("decode", "--prompt", "x"), ("bench",):
        with pytest.raises(SystemExit) as end: main((*argv, "--target", str(folder/"target")))
        assert end.value.code == 2 and "draft: got none, wanted a model" in capsys.readouterr().err


def test_every_option_is_an_argument():
    "The table of commands names functions, and their arguments"
    for name, (chapter, does, options) in COMMANDS.items():
        taken = inspect.signature(getattr(import_module(f"specref.{chapter}"), name)).parameters
        assert does and {flag.lstrip("-") for flag, _, _ in options} <= taken.keys()


def test_what_a_comparison_says():
    assert verdict((1, 2), (1, 2), 0) == "the texts are equal, 2 tokens"
    assert "part at token 1" in verdict((1, 2), (1, 3), 0) and "part at token 2" in verdict((1, 2), (1, 2, 3), 0)
    assert verdict((1,), (2,), .5).startswith("sampled")


def test_a_system_has_caches_of_its_own():
    "Two builds never share what was fed"
    _, p, q = pair(None, None, 0.)
    a, b = build("speculative sampling", p, q), build("speculative sampling", p, q, gamma=2)
    assert a.drafter.model is not b.drafter.model and a.drafter.model.model is b.drafter.model.model and b.drafter.gamma == 2


def test_the_module_and_the_script_are_the_same_door():
    "`python -m specref` prints its help; the installed script calls the same function"
    said = subprocess.run([sys.executable, "-m", "specref", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in said for name in COMMANDS)
    assert tomllib.loads((ROOT/"pyproject.toml").read_text())["project"]["scripts"] == {"specref": "specref.commands:main"}
