"Chapter 63: the command line, on the embedded models and on checkpoints in a folder"
import inspect
import os
import subprocess
import sys
import tomllib
from importlib import import_module

import numpy as np
import pytest

from house import ROOT
from specref.app import commands
from specref.app.commands import COMMANDS, build_system, main, load_pair, compare_texts
from specref.models.embedded import tokenizer
from specref.app.systems import SYSTEMS
from specref.models.recipe import llama


def run(capsys, *argv):
    "What a command prints"
    main(argv)
    return capsys.readouterr().out


def letters(path, vocab_size=257, positions=64):
    "A checkpoint in `path` whose tokenizer reads single bytes, and knows nothing of the embedded one"
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<{i}>" for i in range(vocab_size - 256))]
    tok = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(signs)}, merges=[]))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    torch.manual_seed(2)
    llama(1, 32, 64, vocab_size, positions).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tok).save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A target and a draft in a folder, in the Hugging Face format, with the embedded tokenizer"
    import torch
    path = tmp_path_factory.mktemp("checkpoints")
    for seed, (name, layers) in enumerate(dict(target=2, draft=1).items()):
        torch.manual_seed(seed)
        llama(layers, 32, 64).save_pretrained(path/name)
        tokenizer().save_pretrained(path/name)
    letters(path/"letters")
    letters(path/"alike", vocab_size=512)
    (path/"empty").mkdir()
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


def test_a_system_that_refuses_a_large_vocabulary_runs_after_top_k(capsys):
    "Optimal transport on 512 tokens is refused in one line that says what would help; on the four likeliest it decodes"
    given = "decode", "--prompt", "def f(x):", "--n", "6", "--temperature", "1", "--gamma", "2", "--system", "optimal transport"
    refused(capsys, "wanted at most", *given)
    assert "--- sampled: each run writes a text of its own" in run(capsys, *given, "--top-k", "4")


def test_top_k_cuts_both_models(capsys):
    "The k likeliest tokens keep their ratios, in the target and the draft, also with empty caches; one token is temperature 0"
    tok, *whole = load_pair(None, None, 1.)
    _, *both = load_pair(None, None, 1., 3)
    ids = tuple(tok.encode("def f(x):"))
    for model, full in zip(both, whole):
        law, want = model.law(ids), full.law(ids)
        kept = np.argsort(-want)[:3]
        assert np.flatnonzero(law).tolist() == sorted(kept) and np.allclose(law[kept], want[kept] / want[kept].sum())
        assert (commands.fresh_copy(model).law(ids) == law).all()
    said = run(capsys, "decode", "--prompt", "def f(x):", "--n", "12", "--temperature", "1", "--top-k", "1")
    greedy = run(capsys, "decode", "--prompt", "def f(x):", "--n", "12")
    assert "the texts are equal, 12 tokens" in said and said.split("---")[1] == greedy.split("---")[1]


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


def logged(path, verify=None):
    "A file of 900 recorded rounds on four tokens"
    from itertools import islice
    from specref.certify.sequential import play_rounds, save_log
    from specref.core.loop import System
    from specref.verify.reject import Chain, reject
    from specref.core.target import random_table
    target, draft = (random_table(4, s, zeros=False) for s in (1, 2))
    save_log(path, islice(play_rounds(System("", Chain(draft, 2), verify or reject), target, (0,), 6, 1), 900))
    return str(path)


def test_certify_judges_recorded_rounds(capsys, tmp_path):
    "A right log is told of, with status 0; a wrong one with status 1"
    from specref.core.loop import Verdict
    said = run(capsys, "certify", "--log", logged(tmp_path/"right.npz"), "--like", "reject")
    assert said.startswith("900 rounds") and all(f"\n{k:8} ok" in said for k in ("law", "draft", "tokens"))
    everything = lambda p, tree, rng: Verdict(len(tree) - 1, rng.pick(p[len(tree) - 1]))
    with pytest.raises(SystemExit) as end: main(["certify", "--log", logged(tmp_path/"wrong.npz", everything)])
    said = capsys.readouterr()
    assert end.value.code == 1 and "law      WRONG" in said.out and not said.err


def test_logs_that_cannot_be_judged(capsys, tmp_path):
    "One line each: no file, a file of something else, arrays that do not fit, a system beside the log"
    (tmp_path/"text.npz").write_text("x")
    for name in ("none.npz", "text.npz", "."): refused(capsys, "log: got", "certify", "--log", str(tmp_path/name))
    np.savez(tmp_path/"part.npz", p=np.ones((1, 1, 2))/2)
    refused(capsys, "log: got no array 'x'", "certify", "--log", str(tmp_path/"part.npz"))
    np.savez(tmp_path/"sum.npz", p=np.ones((1, 1, 2)), x=np.zeros((1, 0), int), y=np.array([[1]]))
    refused(capsys, "log: round 0: p[0]: got weights that sum to 2.0", "certify", "--log", str(tmp_path/"sum.npz"))
    refused(capsys, "target: got 'small' beside a log", "certify", "--log", str(tmp_path/"sum.npz"), "--target", "small")


@pytest.mark.parametrize("name,value", [("system", "block verification"), ("target", "target"), ("draft", "small"), ("n", 5), ("runs", 7), ("seed", 1), ("prompt", "x")])
def test_nothing_else_is_asked_of_a_log(capsys, tmp_path, name, value):
    "Every other option is refused by its name, never ignored"
    refused(capsys, f"{name}: got {value!r} beside a log, wanted the log alone", "certify", "--log", logged(tmp_path/"right.npz"), f"--{name}", str(value))


def test_the_rule_of_a_log(capsys, tmp_path):
    "Drafts of match are too few for reject: convicted when that is claimed, else noted; a rule means nothing without a log"
    from specref.core.loop import match
    path = logged(tmp_path/"match.npz", match)
    assert "\ntokens   -" in run(capsys, "certify", "--log", path) and "\ntokens   ok" in run(capsys, "certify", "--log", path, "--like", "match")
    with pytest.raises(SystemExit) as end: main(["certify", "--log", path, "--like", "reject"])
    assert end.value.code == 1 and "tokens   WRONG" in capsys.readouterr().out
    refused(capsys, "like: got 'block', wanted reject, match", "certify", "--log", path, "--like", "block")
    refused(capsys, "like: got 'match', wanted it beside a log", "certify", "--like", "match")


def test_the_help_says_what_a_log_holds(capsys):
    with pytest.raises(SystemExit) as end: main(["certify", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and all(x in said for x in ("p (N,g+1,V)", "q (N,g,V)", "x (N,g)", "y (N,g+1)", "-1 for padding", "exit 0 all ok, 1 a check failed, 2 bad file"))


def test_decode_and_bench_fit_a_page(capsys):
    "Every line but those of the text itself, also where two texts part"
    said = run(capsys, "decode", "--prompt", "The", "--n", "8").split("--- ")[-1] + run(capsys, "bench", "--n", "2", "--prompt", "The")
    assert max(map(len, said.splitlines())) <= 92


def test_certificates_fit_a_page(capsys):
    "Exact ones, a report on a log, and evidence"
    for argv in ((), ("--target", "target", "--system", "autoregressive", "--runs", "120", "--n", "1")):
        assert max(map(len, run(capsys, "certify", *argv).splitlines())) <= 92


def test_certify_fails_aloud(capsys, monkeypatch):
    "A certificate that does not pass is exit status 1, after all are printed"
    from specref.core.loop import System, Verdict, no_draft
    monkeypatch.setitem(SYSTEMS, "wrong", lambda draft, **kw: System("wrong", no_draft, lambda p, tree, rng: Verdict(0, 0)))
    with pytest.raises(SystemExit) as end: main(["certify", "--system", "wrong"])
    assert end.value.code == 1 and "the law is wrong" in capsys.readouterr().out


def test_a_path_brings_its_own_tokenizer(folder):
    "An absolute path is a checkpoint: its model is checked, and its own tokenizer reads the prompt"
    tok, p, _ = load_pair(str(folder/"letters"), str(folder/"letters"), 0.)
    assert len(tok.encode("abc")) == 3 and tok.decode(tok.encode("abc")) == "abc" and p.V == 257
    assert len(tokenizer().encode("class")) < len(tok.encode("class"))


def test_a_draft_with_other_words_is_told_of(capsys, folder):
    "The law holds whatever the draft's tokenizer says, so it runs, with one line on standard error; the same words need none"
    for name, lines in ("alike", 1), ("draft", 0):
        main(["decode", "--prompt", "abc", "--n", "4", "--target", str(folder/"target"), "--draft", str(folder/name)])
        said = capsys.readouterr()
        assert "the texts are equal" in said.out and said.err.count("tokenizer is not the target's") == said.err.count("\n") == lines


@pytest.mark.parametrize("prompt, n", [("a", 64), ("a" * 63, 2), ("a" * 60, 1)])
def test_decode_reaches_the_last_position(capsys, folder, prompt, n):
    "As many tokens as a model has positions for, and one line for one more"
    own = "--target", str(folder/"letters"), "--draft", str(folder/"letters")
    said = run(capsys, "decode", "--prompt", prompt, "--n", str(n), "--gamma", "1", *own)
    assert "the texts are equal" in said and "predicted" in said
    refused(capsys, "n: got 65, wanted at most 64", "decode", "--prompt", "a", "--n", "65", *own)


def test_what_is_said_last_agrees_with_what_was_measured(capsys):
    "One measured speed-up, also where the last round is cut"
    said = run(capsys, "decode", "--prompt", "The", "--n", "4", "--gamma", "20", "--draft", "target")
    measured, _, words = said.split("speed-up ")[1].partition("\n")
    assert measured.split()[0] == words.split()[0]


def refused(capsys, words, *argv):
    "One line on standard error that has these words, nothing on standard output, exit status 2"
    with pytest.raises(SystemExit) as end: main(list(argv))
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out and words in said.err
    assert said.err.startswith("specref") and said.err.count("\n") == 1


def test_models_that_cannot_be_had(capsys, folder, tmp_path):
    "Each refusal names the argument that was wrong"
    letters, target, empty = (str(folder/x) for x in ("letters", "target", "empty"))
    refused(capsys, "draft: got a vocabulary of 257 tokens, wanted the target's 512", "decode", "--prompt", "x", "--target", target, "--draft", letters)
    refused(capsys, "draft: got a vocabulary of 512 tokens, wanted the target's 257", "bench", "--target", letters, "--draft", target)
    refused(capsys, "target: got '", "decode", "--prompt", "x", "--target", empty, "--draft", "small")
    refused(capsys, "draft: got '", "decode", "--prompt", "x", "--draft", empty)
    for role in "target", "draft":
        for command in ("decode", "--prompt", "x"), ("bench",), ("certify",): refused(capsys, f"{role}: got ''", *command, f"--{role}", "")


BAD = {
    "gamma": ("decode", "--prompt", "x", "--gamma", "0"),
    "n": ("decode", "--prompt", "x", "--n", "-1"),
    "seed": ("decode", "--prompt", "x", "--seed", "-1"),
    "temperature": ("decode", "--prompt", "x", "--temperature", "-1"),
    "prompt": ("decode", "--prompt", ""),
    "system": ("decode", "--prompt", "x", "--system", "magic"),
    "draft: got 'no/such/folder'": ("decode", "--prompt", "x", "--draft", "no/such/folder"),
    "target": ("decode", "--prompt", "x", "--target", "no/such/folder"),
    "--n": ("decode", "--prompt", "x", "--n", "many"),
    "--prompt": ("decode",),
    "COMMAND": (),
    "invalid choice": ("fly",),
    "unrecognized arguments": ("tour", "--speed", "9"),
    "runs": ("certify", "--runs", "0"),
    "n: got 600": ("decode", "--prompt", "x", "--n", "600"),
    "n: got 300": ("bench", "--prompt", "x", "--n", "300"),
    "n: got 700": ("certify", "--target", "small", "--system", "autoregressive", "--n", "700"),
    "top_k: got 0": ("decode", "--prompt", "x", "--top-k", "0"),
    "top_k: got -3": ("decode", "--prompt", "x", "--top-k", "-3"),
    "argument --top-k: invalid int value: '2.5'": ("decode", "--prompt", "x", "--top-k", "2.5"),
    "unrecognized arguments: --top-k": ("bench", "--top-k", "4"),
    "gamma: got 600": ("decode", "--prompt", "x", "--gamma", "600"),
    "prompt: got 0 tokens": ("bench", "--prompt", ""),
    "prompt: got 600 tokens": ("decode", "--prompt", "\x01" * 600),
    "prompt: got 'a\\udcff'": ("decode", "--prompt", "a\udcff"),
    "prompt: got 0": ("certify", "--target", "small", "--system", "autoregressive", "--prompt", ""),
    "runs: got 1": ("certify", "--target", "small", "--system", "autoregressive", "--runs", "1"),
    "draft: got none": ("certify", "--target", "small"),
    "temperature: got nan": ("decode", "--prompt", "x", "--temperature", "nan"),
    "temperature: got inf": ("bench", "--temperature", "inf"),
    "argument --out: got '', wanted a folder": ("tour", "--out", ""),
    "wanted a folder that can be written": ("train", "--out", f"{__file__}/below"),
    "wanted the name of a file": ("record", "--out", str(ROOT)),
}


@pytest.mark.parametrize("named", BAD)
def test_a_bad_value_is_one_line_and_status_2(capsys, named): refused(capsys, named, *BAD[named])


def test_a_draft_is_asked_for_by_name(capsys, folder):
    for argv in ("decode", "--prompt", "x"), ("bench",):
        with pytest.raises(SystemExit) as end: main((*argv, "--target", str(folder/"target")))
        assert end.value.code == 2 and "draft: got none, wanted a model" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["\n\n", " ", "Größe ☃ 日本語", "-x", 'tab\t"q"'])
def test_a_prompt_is_printed_as_it_was_given(capsys, prompt):
    said = run(capsys, "decode", "--n", "2", "--system", "autoregressive", f"--prompt={prompt}")
    assert said.startswith(f"--- plain\n{prompt}") and f"--- autoregressive\n{prompt}" in said


def test_a_reader_that_leaves_and_a_hand_that_stops(monkeypatch, capsys):
    "A closed pipe ends a command without a word; an interrupt ends it with one line"
    here, there = os.pipe()
    os.close(here)
    done = subprocess.run([sys.executable, "-m", "specref", "certify", "--system", "autoregressive"], cwd=ROOT, stdout=there, stderr=subprocess.PIPE, text=True)
    os.close(there)
    assert done.returncode == 141 and not done.stderr
    def stopped(*given): raise KeyboardInterrupt
    monkeypatch.setattr(commands, "load_pair", stopped)
    with pytest.raises(SystemExit) as end: main(["bench"])
    assert end.value.code == 130 and capsys.readouterr().err == "\nspecref: bench: stopped\n"


def test_help_tells_the_defaults(capsys):
    "They are read from the functions"
    with pytest.raises(SystemExit): main(["decode", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    usual = inspect.signature(commands.decode).parameters
    assert f"how many new tokens ({usual['n'].default})" in said and f"({usual['system'].default})" in said and "None" not in said
    assert "--top-k TOP_K keeps the k likeliest tokens of both models" in said


def test_every_option_is_an_argument():
    "The table of commands names functions, and their arguments"
    for name, (chapter, does, options) in COMMANDS.items():
        taken = inspect.signature(getattr(import_module(f"specref.{chapter}"), name)).parameters
        assert does and {flag.lstrip("-").replace("-", "_") for flag, _, _ in options} <= taken.keys()


def test_what_a_comparison_says():
    assert compare_texts((1, 2), (1, 2), 0) == "the texts are equal, 2 tokens" and compare_texts((1,), (1,), 0) == "the texts are equal, 1 token"
    assert "part at token 1" in compare_texts((1, 2), (1, 3), 0) and "part at token 2" in compare_texts((1, 2), (1, 2, 3), 0)
    assert compare_texts((1,), (2,), .5).startswith("sampled")


def test_a_system_has_caches_of_its_own():
    "Two builds never share what was fed"
    _, p, q = load_pair(None, None, 0.)
    a, b = build_system("speculative sampling", p, q), build_system("speculative sampling", p, q, gamma=2)
    assert a.drafter.model is not b.drafter.model and a.drafter.model.model is b.drafter.model.model and b.drafter.gamma == 2


def test_the_module_and_the_script_are_the_same_door():
    "`python -m specref` prints its help; the installed script calls the same function"
    said = subprocess.run([sys.executable, "-m", "specref", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in said for name in COMMANDS)
    assert tomllib.loads((ROOT/"pyproject.toml").read_text())["project"]["scripts"] == {"specref": "specref.app.commands:main"}
