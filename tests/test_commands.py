"Chapter 63: the command line, on the embedded models and on checkpoints in a folder"
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from inspect import signature
from itertools import islice

import numpy as np
import pytest

from house import ROOT
from specref.app import commands
from specref.app.commands import build_system, compare_texts, corpus_texts, load_pair, main
from specref.app.commands import measured_plan, parser
from specref.app.systems import SYSTEMS
from specref.certify.sequential import sample_rounds, save_log
from specref.core.cost import Costs
from specref.core.loop import System, Verdict, match, no_draft
from specref.core.rng import Seeded
from specref.core.target import random_table
from specref.draft.shapes import sequoia
from specref.models.embedded import corpus, tokenizer
from specref.models.recipe import llama
from specref.verify.reject import Chain, reject

X = "decode", "--prompt", "x"


def run(capsys, *argv):
    "What a command prints"
    main(argv)
    return capsys.readouterr().out


def fails(capsys, words, *argv):
    "One line on standard error that has these words, nothing on standard output, exit status 2"
    with pytest.raises(SystemExit) as end: main(list(argv))
    printed = capsys.readouterr()
    assert end.value.code == 2 and not printed.out and words in printed.err
    assert printed.err.startswith("specref") and printed.err.count("\n") == 1


@pytest.fixture
def priced(monkeypatch):
    "Costs that are not measured"
    monkeypatch.setattr(commands, "measure_pair", lambda p, q, texts: Costs({1: 2., 5: 3., 9: 4.}, .25, .1))


def letters(path, vocab_size=257):
    "A checkpoint whose tokenizer reads single bytes, with 64 positions"
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    signs = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<{i}>" for i in range(vocab_size - 256))]
    tok = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(signs)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    torch.manual_seed(2)
    llama(1, 32, 64, vocab_size, 64).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tok).save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Models in a folder, in the Hugging Face format: two with the embedded tokenizer, two with another"
    import torch
    path = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        llama(2 - seed, 32, 64).save_pretrained(path/name)
        tokenizer().save_pretrained(path/name)
    letters(path/"letters")
    letters(path/"alike", vocab_size=512)
    (path/"empty").mkdir()
    return path


def test_every_system_decodes_the_same_text():
    "At temperature 0, on fresh copies of the embedded pair"
    tok, p, q = load_pair(None, None, 0.)
    ids = tok.encode("def f(x):")
    texts = {name: build_system(name, p, q, 2)(p, ids, 6, Seeded(0)) for name in SYSTEMS}
    assert len(set(texts.values())) == 1 and len(texts["autoregressive"]) == 6


def test_decode_prints_equal_texts(capsys):
    "Both texts, all that was measured, one speed-up in two places, and no line of figures wider than a page"
    given = *X, "--n", "5", "--gamma", "20", "--draft", "target"
    printed = run(capsys, *given)
    _, plain, fast, figures = printed.split("--- ")
    assert plain.startswith("plain\nx") and fast.startswith("speculative sampling\nx")
    assert plain.split("\n", 1)[1] == fast.split("\n", 1)[1]
    for what in "the texts are equal, 5 tokens", "tokens/s", "mean acceptance length", "predicted":
        assert what in figures
    measured, _, words = printed.split("speed-up ")[1].partition("\n")
    assert measured.split()[0] == words.split()[0] and max(map(len, figures.splitlines())) <= 92


def test_a_seed_decides_a_sampled_text(capsys, priced):
    given = "decode", "--prompt", "The", "--n", "12", "--temperature", "1", "--seed"
    texts = [run(capsys, *given, seed).split("\n--- sampled: the texts")[0] for seed in "778"]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_cuts_both_models(capsys, priced):
    "The k likeliest tokens keep their ratios; a system runs on them"
    (tok, *whole), (_, *both) = load_pair(None, None, 1.), load_pair(None, None, 1., 3)
    ids = tuple(tok.encode("def f(x):"))
    for model, full in zip(both, whole):
        law, want = model.law(ids), full.law(ids)
        top = np.argsort(-want)[:3]
        assert set(np.flatnonzero(law)) == set(top) and np.allclose(law[top], want[top] / want[top].sum())
        assert (commands.fresh_copy(model).law(ids) == law).all()
    given = *X, "--n", "4", "--temperature", "1", "--system", "optimal transport", "--top-k", "4"
    assert "--- sampled: the texts of two runs differ" in run(capsys, *given)


def test_models_of_your_own(capsys, folder):
    "A path for each model; a target alone with a system that drafts without one"
    own = "--target", str(folder/"target")
    both = *own, "--draft", str(folder/"draft")
    assert "the texts are equal" in run(capsys, *X, "--n", "8", *both)
    assert "the texts are equal" in run(capsys, *X, "--n", "8", *own, "--system", "prompt lookup")
    printed = run(capsys, "bench", *both, "--n", "3", "--prompt", "abc")
    assert "c = " in printed and "best gamma" in printed and "9 tokens x" in printed
    for argv in X, ("bench",): fails(capsys, "draft: got none, wanted a model", *argv, *own)


def test_a_path_brings_its_own_tokenizer(capsys, folder):
    "It encodes the prompt; a draft with another one runs, after one line on standard error"
    tok, p, _ = load_pair(str(folder/"letters"), str(folder/"letters"), 0.)
    assert len(tok.encode("abc")) == 3 and tok.decode(tok.encode("abc")) == "abc" and p.V == 257
    for name, lines in ("alike", 1), ("draft", 0):
        main([*X, "--n", "4", "--target", str(folder/"target"), "--draft", str(folder/name)])
        printed = capsys.readouterr()
        warnings = printed.err.count("tokenizer is not the target's")
        assert "the texts are equal" in printed.out and warnings == printed.err.count("\n") == lines


@pytest.mark.parametrize("length, n", [(1, 64), (63, 2), (60, 1)])
def test_decode_reaches_the_last_position(capsys, folder, length, n):
    "As many tokens as a model has positions for, and one more raises an error"
    own = "--target", str(folder/"letters"), "--draft", str(folder/"letters"), "--gamma", "1"
    assert "the texts are equal" in run(capsys, "decode", "--prompt", "a" * length, "--n", str(n), *own)
    fails(capsys, "n: got 65, wanted at most 64", "decode", "--prompt", "a", "--n", "65", *own)


@pytest.mark.parametrize("prompt", ["\n\n", " ", "Größe ☃ 日本語", "-x", 'tab\t"q"'])
def test_a_prompt_is_printed_as_it_was_given(capsys, priced, prompt):
    printed = run(capsys, "decode", "--n", "2", "--system", "autoregressive", f"--prompt={prompt}")
    assert printed.startswith(f"--- plain\n{prompt}") and f"--- autoregressive\n{prompt}" in printed


def test_the_words_of_a_comparison():
    assert compare_texts((1,), (1,), 0) == "the texts are equal, 1 token"
    assert "differ at token 1" in compare_texts((1, 2), (1, 3), 0)
    assert "differ at token 2" in compare_texts((1, 2), (1, 2, 3), 0)


def test_a_system_has_caches_of_its_own():
    "Two builds never share a cache"
    _, p, q = load_pair(None, None, 0.)
    a, b = (build_system("speculative sampling", p, q).drafter.model for _ in range(2))
    assert a is not b and a.model is b.model


def test_a_tree_is_planned_from_what_was_measured(monkeypatch):
    "Sequoia's size is the best for the measured rates and costs, or gamma; each plan is made once"
    _, p, q = load_pair(None, None, 0.)
    asked = []
    def best(rates, costs, most, depth):
        asked.append((rates, costs))
        return 5, 3, 1.
    monkeypatch.setattr(commands, "best_size", best)
    monkeypatch.setattr(commands, "measure_pair", lambda *args: "costs")
    plan = measured_plan(p, q, (1, 2, 3, 4))
    def tree(gamma=None): return build_system("Sequoia", p, q, gamma, plan=plan).drafter.parent
    first, larger = tree(), tree(gamma=7)
    (rates, costs), = asked
    assert costs == "costs" and sorted(rates, reverse=True) == list(rates) and 0 < sum(rates) <= 1
    assert first == tree() == sequoia(rates, 5, 3)[0] and larger == sequoia(rates, 7, 6)[0]


def test_earlier_texts_are_the_corpus_in_the_tokens_of_the_model(folder):
    "Of another tokenizer too"
    for name in "target", "letters":
        tok, p, _ = load_pair(str(folder/name), None, 0.)
        texts = corpus_texts(tok)
        whole = "".join(row["text"] for row in corpus())
        assert sum(map(len, texts)) > 10**5 and tok.decode(texts[0]) in whole


def test_the_draft_has_a_temperature_of_its_own(capsys):
    _, p, q = load_pair(None, None, 0., None, .5)
    assert (p.temperature, q.temperature) == (0., .5) and load_pair(None, None, 1.)[2].temperature == 1
    printed = run(capsys, *X, "--n", "5", "--system", "sampled tree", "--draft-temperature", "1")
    assert "the texts are equal" in printed
    fails(capsys, "draft_temperature: got -1", *X, "--n", "5", "--draft-temperature", "-1")


def test_certify_counts_on_a_named_model(capsys):
    "The exact certificate and the counted one, no wider than a page"
    given = "--target", "target", "--system", "autoregressive", "--runs", "120", "--n", "1"
    printed = run(capsys, "certify", *given)
    assert "exact: 41 probabilities compared as fractions" in printed and "120 runs" in printed
    assert max(map(len, printed.splitlines())) <= 92


def test_certify_fails_with_status_1(capsys, monkeypatch):
    "A certificate that does not pass is exit status 1"
    wrong = System("wrong", no_draft, lambda p, tree, rng: Verdict(0, 0))
    monkeypatch.setitem(SYSTEMS, "wrong", lambda draft, **kw: wrong)
    with pytest.raises(SystemExit) as end: main(["certify", "--system", "wrong"])
    assert end.value.code == 1 and "OUTPUT DISTRIBUTION DIFFERS" in capsys.readouterr().out


@pytest.fixture
def log(tmp_path):
    "What writes 900 rounds of a verifier on four tokens to a file"
    def write(verify):
        target, draft = (random_table(4, seed, zeros=False) for seed in (1, 2))
        played = sample_rounds(System("", Chain(draft, 2), verify), target, (0,), 6, 1)
        save_log(tmp_path/"log.npz", islice(played, 900))
        return "certify", "--log", str(tmp_path/"log.npz")
    return write


def test_certify_checks_recorded_rounds(capsys, log):
    "A correct log ends with status 0, an incorrect one with status 1; a rule is tested where it is claimed"
    printed = run(capsys, *log(reject), "--like", "reject")
    assert printed.startswith("900 rounds")
    for name in "law", "draft", "tokens": assert f"\n{name:8} ok" in printed
    everything = lambda p, tree, rng: Verdict(len(tree) - 1, rng.pick(p[len(tree) - 1]))   # noqa: E731
    wrong = (everything, "law      FAILED", ()), (match, "tokens   FAILED", ("--like", "reject"))
    for verify, words, like in wrong:
        with pytest.raises(SystemExit) as end: main([*log(verify), *like])
        assert end.value.code == 1 and words in capsys.readouterr().out
    assert "\ntokens   -" in run(capsys, *log(match))
    assert "\ntokens   ok" in run(capsys, *log(match), "--like", "match")


def test_logs_that_cannot_be_checked(capsys, tmp_path):
    "No file, a file of something else, arrays that do not fit"
    (tmp_path/"text.npz").write_text("x")
    for name in "none.npz", "text.npz", ".":
        fails(capsys, "log: got", "certify", "--log", str(tmp_path/name))
    np.savez(tmp_path/"part.npz", p=np.ones((1, 1, 2))/2)
    fails(capsys, "log: got no array 'x'", "certify", "--log", str(tmp_path/"part.npz"))
    np.savez(tmp_path/"sum.npz", p=np.ones((1, 1, 2)), x=np.zeros((1, 0), int), y=np.array([[1]]))
    fails(capsys, "log: round 0: p[0]: got weights that sum", "certify", "--log", str(tmp_path/"sum.npz"))


BESIDE = dict(system="block verification", target="target", draft="small", n=5, runs=7, seed=1, prompt="x")
ONE = "--target", "small", "--system", "autoregressive"
BAD = [   # words, command
    ("gamma: got 0", *X, "--gamma", "0"),
    ("gamma: got 600", *X, "--gamma", "600"),
    ("n: got -1", *X, "--n", "-1"),
    ("n: got 600", *X, "--n", "600"),
    ("n: got 300", "bench", "--prompt", "x", "--n", "300"),
    ("n: got 700", "certify", *ONE, "--n", "700"),
    ("argument --n: invalid int value: 'many'", *X, "--n", "many"),
    ("seed: got -1", *X, "--seed", "-1"),
    ("temperature: got -1", *X, "--temperature", "-1"),
    ("temperature: got nan", *X, "--temperature", "nan"),
    ("temperature: got inf", "bench", "--temperature", "inf"),
    ("top_k: got 0", *X, "--top-k", "0"),
    ("unrecognized arguments: --top-k", "bench", "--top-k", "4"),
    ("prompt: got 0 tokens", "bench", "--prompt", ""),
    ("prompt: got 600 tokens", "decode", "--prompt", "\x01" * 600),
    ("prompt: got 'a\\udcff'", "decode", "--prompt", "a\udcff"),
    ("prompt: got 0 tokens", "certify", *ONE, "--prompt", ""),
    ("required: --prompt", "decode"),
    ("runs: got 0", "certify", "--runs", "0"),
    ("runs: got 1", "certify", *ONE, "--runs", "1"),
    ("system: got 'magic'", *X, "--system", "magic"),
    ("target: got 'no/such/folder'", *X, "--target", "no/such/folder"),
    ("draft: got 'no/such/folder'", *X, "--draft", "no/such/folder"),
    *((f"{role}: got ''", *X, f"--{role}", "") for role in ("target", "draft")),
    ("draft: got none", "certify", "--target", "small"),
    ("required: COMMAND",),
    ("invalid choice: 'fly'", "fly"),
    ("argument --out: got '', wanted a folder", "tour", "--out", ""),
    ("wanted a folder that can be written", "train", "--out", f"{__file__}/below"),
    ("wanted the name of a file", "record", "--out", str(ROOT)),
    ("like: got 'match' without a log", "certify", "--like", "match"),
    ("like: got 'block', wanted reject, match", "LOG", "--like", "block"),
    *((f"{name}: got {x!r} together with a log", "LOG", f"--{name}", str(x)) for name, x in BESIDE.items()),
]


@pytest.mark.parametrize("row", BAD, ids=lambda row: row[0])
def test_a_bad_value_is_one_line_and_status_2(capsys, log, row):
    words, *argv = row
    if argv[:1] == ["LOG"]: argv = [*log(reject), *argv[1:]]
    fails(capsys, words, *argv)


def test_models_that_cannot_be_had(capsys, folder):
    "Each error names the argument that was wrong"
    own, target, empty = (str(folder/x) for x in ("letters", "target", "empty"))
    fails(capsys, "draft: got a vocabulary of 257 tokens, wanted the target's 512", *X,
            "--target", target, "--draft", own)
    fails(capsys, "target: got '", *X, "--target", empty, "--draft", "small")
    fails(capsys, "draft: got '", *X, "--draft", empty)


def test_every_option_is_an_argument():
    "Of the function that its command names, and its help ends with the function's default"
    subs = parser()._subparsers._group_actions[0].choices
    for name, sub in subs.items():
        module, _, function = sub.get_default("runs_function").partition(":")
        taken = signature(getattr(import_module(f"specref.{module}"), function)).parameters
        options = {action.dest for action in sub._actions} - {"help"}
        assert options <= taken.keys(), name
    printed = " ".join(subs["decode"].format_help().split())
    assert "number of new tokens (default: 128)" in printed and "None" not in printed


def test_the_module_and_the_script_are_one():
    "Help comes without torch; the installed script calls the same function (the next test: so does -m)"
    code = ("import sys; from specref.app.commands import main\ntry: main(['--help'])\n"
            "except SystemExit: assert 'torch' not in sys.modules")
    call = [sys.executable, "-c", code]
    printed = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in printed.stdout for name in ("tour", "decode", "bench", "certify", "train"))
    scripts = tomllib.loads((ROOT/"pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"specref": "specref.app.commands:main"}


def test_a_closed_pipe_and_an_interrupt(monkeypatch, capsys):
    "A closed pipe ends a command without a message; an interrupt ends it with one line"
    here, there = os.pipe()
    os.close(here)
    call = [sys.executable, "-m", "specref", "certify", "--system", "autoregressive"]
    done = subprocess.run(call, cwd=ROOT, stdout=there, stderr=subprocess.PIPE, text=True)
    os.close(there)
    assert done.returncode == 141 and not done.stderr
    def stopped(*given): raise KeyboardInterrupt
    monkeypatch.setattr(commands, "load_pair", stopped)
    with pytest.raises(SystemExit) as end: main(["bench"])
    assert end.value.code == 130 and capsys.readouterr().err == "\nspecref: bench: stopped\n"
