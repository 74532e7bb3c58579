"Chapter 63: the command line, on the embedded models and on checkpoints in a folder"
import io, json, os, subprocess, sys, tomllib
from importlib import import_module
from functools import partial
from inspect import signature
from itertools import count, islice

import numpy as np, pytest

import specref
from checkpoints import folder as folder, mine as mine, pair_of   # noqa: F811  fixtures
from house import ROOT
from specref import (autoregressive, Chain, Costs, generate, HFModel, match, no_draft, random_table, reject,
                     save_log, Seeded, System, SYSTEMS, tokenizer, Verdict)
from specref.app import commands, paired
from specref.app.commands import ProgressLines, TextStream, compare_texts, main, parser
from specref.app.loading import ModelOptions, encode_prompt, translators
from specref.app.tour import drafter_contestants, own_contestants, decode_cold
from specref.certify.reported import ARGMAX_DRAFT, INCLUSIVE_RULE, LATE_RULE, MATCH_RULE, SAMPLING_RULE
from specref.certify.sequential import sample_rounds
from specref.core.registry import Declared
from specref.draft.vocab import translated
from specref.models.embedded import tokenizer_of

X = "decode", "--prompt", "x", "--seconds", "1e-3"   # one pair of runs
SAME = "plain decoding gives the same text"

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

def report(capsys, *argv):
    "The report of a command, which prints one JSON object and nothing else"
    main([*argv, "--json"])
    printed = capsys.readouterr()
    assert not printed.err and printed.out.count("\n") == 1
    return json.loads(printed.out)

@pytest.fixture
def priced(monkeypatch):
    "Costs that are not measured"
    monkeypatch.setattr(commands, "measure_pair", lambda *args: Costs({1: 2., 5: 3., 9: 4.}, .25, .1))

def test_decode_prints_equal_texts(capsys):
    "One text, all that was measured, one speed-up in two places, and no line wider than a page"
    printed = run(capsys, *X, "--n", "5", "--gamma", "20", "--draft", "target", "--seed", "7")
    _, text, figures = printed.split("--- ")
    assert text.startswith("speculative sampling\nx") and figures.startswith(f"{SAME}, 5 tokens\n")
    for what in "tokens/s", "mean acceptance length", "predicted", "one pair", "--draft target", "--seed 7":
        assert what in figures
    measured, _, words = printed.split("speed-up  ")[1].partition("\n")
    again = next(line for line in words.splitlines() if "as fast as" in line)
    assert measured.split()[0] == again.split()[0] and max(map(len, figures.splitlines())) <= 92

def test_a_system_against_itself_has_the_speed_1(capsys, priced, monkeypatch):
    "On a clock that advances by one second a call; the runs end when eight pairs agree"
    seconds = count()
    for module in commands, paired: monkeypatch.setattr(module, "perf_counter", lambda: next(seconds))
    given = "decode", "--prompt", "x", "--n", "2", "--system", "autoregressive", "--seconds", "1000"
    found = report(capsys, *given)
    interval = dict(low=1, high=1, confidence=1 - 2**-7)
    assert found["speed_up"]["median"] == 1 and found["speed_up"]["interval"] == interval
    assert found["speed_up"]["pairs"] == 8 and found["equal"] and found["ledger"]["num_rounds"] == 2

def test_prompts_from_three_places_decoded_once(capsys, tmp_path, monkeypatch):
    "Without seconds there is no plain run and no clock; the texts are those of the timed runs"
    (tmp_path/"prompt.txt").write_text("def f(x):\n    return\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The\n"))
    texts = "x", "def f(x):\n    return", "The"
    file = str(tmp_path/"prompt.txt")
    given = "decode", "--n", "4", "--prompt", "x", "--prompt-file", file, "--prompt", "-"
    main([*given, "--seconds", "0", "--json"])
    once = [*map(json.loads, capsys.readouterr().out.splitlines())]
    assert [found["prompt"] for found in once] == [*texts] and not any("speed_up" in found for found in once)
    assert all(found["ledger"]["num_emitted_tokens"] == len(found["tokens"]) == 4 for found in once)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The"))
    timed = run(capsys, *given, *X[3:]).split("--- speculative sampling\n")[1:]
    shown = run(capsys, "decode", "--n", "4", "--seconds", "0", *(f"--prompt={text}" for text in texts))
    assert shown.count("not compared with plain decoding, and not timed") == len(timed) == 3
    for one, other, text in zip(timed, shown.split("--- speculative sampling\n")[1:], texts):
        assert one.split("\n--- ")[0] == other.split("\n--- ")[0] and one.startswith(text)

@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_terminal_that_knows_ascii_alone(monkeypatch, as_json):
    "Other characters are written as escapes, and JSON stays JSON"
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    main(["decode", "--prompt", "é☃", "--n", "1", "--seconds", "0", *as_json])
    printed = out.buffer.getvalue().decode("ascii")
    assert json.loads(printed)["prompt"] == "é☃" if as_json else "\\xe9\\u2603" in printed

def test_a_seed_decides_a_sampled_text(capsys, priced):
    given = "decode", "--prompt", "The", "--n", "6", "--temperature", "1", "--seconds", "0", "--seed"
    texts = [run(capsys, *given, seed).split("\n--- ")[0] for seed in "778"]
    assert texts[0] == texts[1] != texts[2]

def test_a_sampled_run_with_warps(capsys, priced):
    given = *X, "--n", "4", "--temperature", "1", "--top-k", "4", "--top-p", ".9", "--draft-top-k", "2"
    printed = run(capsys, *given, "--system", "optimal transport")
    assert "sampled: plain decoding with this seed gives another text" in printed

def test_models_of_your_own(capsys, folder):
    "A path for each model; a target alone with a system that drafts without one"
    own = "--target", str(folder/"target")
    both = *own, "--draft", str(folder/"draft")
    assert SAME in run(capsys, *X, "--n", "8", *both)
    assert SAME in run(capsys, *X, "--n", "8", *own, "--system", "prompt lookup")
    printed = run(capsys, "bench", *both, "--n", "3", "--prompt", "abc", "--seed", "4")
    assert "c = " in printed and "best gamma" in printed and "9 tokens x" in printed and "--seed 4" in printed
    for argv in X, ("bench",), (*X, "--system", "Sequoia", "--n", "4"):
        fails(capsys, "draft: got none, wanted a model", *argv, *own)

def test_a_path_brings_its_own_tokenizer(capsys, folder, priced):
    "It encodes the prompt; a draft of other words runs, after one line on standard error with their share"
    pair = pair_of(target=str(folder/"letters"), draft=str(folder/"letters"))
    ids = pair.tok.encode("abc")
    assert len(ids) == 3 and pair.tok.decode(ids) == "abc" and pair.target.V == 257
    for name, lines in ("alike", 1), ("draft", 0), ("padded", 0):
        main([*X, "--n", "4", "--target", str(folder/"target"), "--draft", str(folder/name)])
        printed = capsys.readouterr()
        warnings = printed.err.count("% of its tokenizer's words are not the target's")
        assert SAME in printed.out and warnings == printed.err.count("\n") == lines

@pytest.mark.parametrize("system", translators())
@pytest.mark.parametrize("names", [("target", "letters"), ("letters", "draft"), ("target", "draft")], ids=str)
def test_a_draft_with_any_tokenizer(capsys, folder, priced, system, names):
    "The text is that of plain decoding; it and the accepted tokens are those of the translated draft"
    target, draft = (str(folder/name) for name in names)
    given = "--system", system, "--target", target, "--draft", draft, "--gamma", "3", "--n", "8"
    found = report(capsys, *X, *given)
    (p, words), (q, own) = ((HFModel.load(name, temperature=0), tokenizer_of("", name))
                            for name in (target, draft))
    drafter = translated(q, own, words, translators()[system].keywords["rule"], 3)
    want = generate(p, drafter, reject, tuple(words.encode("x")), 8, Seeded(123))
    assert found["equal"] and tuple(found["tokens"]) == want and found["draft"] == draft
    for name in "num_draft_tokens", "num_accepted_tokens":
        assert found["ledger"][name] == getattr(want.ledger, name)

def test_the_draft_of_the_second_tokenizer(capsys, folder):
    "Where no draft is named; for another target, and for another system, a draft of other words is refused"
    assert SAME in run(capsys, *X, "--n", "6", "--system", "TLI")
    words = f"the systems {', '.join(translators())} take a draft with another tokenizer"
    target, letters = str(folder/"target"), str(folder/"letters")
    own = "--target", target, "--draft", letters
    for argv in X, (*X, "--system", "SpecHub"), ("bench",), ("tour",), ("certify",):
        fails(capsys, words, *argv, *own)
    fails(capsys, "or a draft model with its tokenizer", *X, "--system", "TLI", "--target", target)
    found = report(capsys, "certify", "--system", "TLI", *own, "--n", "1", "--runs", "90", "--top-k", "2")
    assert found["passes"] and found["systems"]["TLI"]["model"]["test"]["n"] == 90

@pytest.mark.parametrize("length, n", [(1, 64), (63, 2), (60, 1)])
def test_decode_reaches_the_last_position(capsys, folder, length, n):
    "As many tokens as a model has positions for, and one more raises an error"
    own = "--target", str(folder/"letters"), "--draft", str(folder/"letters"), "--gamma", "1"
    assert SAME in run(capsys, "decode", "--prompt", "a" * length, "--n", str(n), *own, *X[3:])
    fails(capsys, "n: got 65, wanted at most 64", "decode", "--prompt", "a", "--n", "65", *own)

@pytest.mark.parametrize("prompt", ["\n\n", " ", "Größe ☃ 日本語", "-x", 'tab\t"q"'])
def test_a_prompt_is_printed_as_it_was_given(capsys, priced, prompt):
    "At once, or while it is decoded"
    given = "decode", "--n", "2", "--system", "autoregressive", f"--prompt={prompt}", *X[3:]
    printed = run(capsys, *given)
    assert printed.startswith(f"--- autoregressive\n{prompt}")
    assert run(capsys, *given, "--stream").split("\n--- ")[0] == printed.split("\n--- ")[0]

def test_a_stream_prints_whole_characters(capsys):
    tok, pieces = tokenizer(), []
    ids = tok.encode("a☃é")
    show = TextStream(tok, ids[:1])
    for token in ids[1:]:
        show((token,))
        pieces.append(capsys.readouterr().out)
    show((), last=True)
    assert "".join(pieces) == "a☃é" and "" in pieces and capsys.readouterr().out == "\n"

def test_the_words_of_a_comparison():
    "Texts of decoding; another token is no rounding; a system with a target of its own is named as that"
    pair = pair_of()
    ids = encode_prompt(pair, "x", pair.target, 3)
    plain = tuple(autoregressive(pair.fresh()[0], ids, 3, Seeded(0)))
    words = partial(compare_texts, pair, "speculative sampling", ids, plain)
    assert words(plain) == f"{SAME}, 3 tokens"
    assert words((*plain[:2], plain[2] + 1)).startswith("the texts differ: NOT ROUNDING at token 2: logits ")
    assert compare_texts(pair, "CLLM", ids, plain, (0,)).endswith("by a target of its own")

def test_the_draft_has_a_temperature_of_its_own(capsys, priced):
    pair = pair_of(draft_temperature=.5)
    assert (pair.target.temperature, pair.draft.temperature) == (0., .5)
    assert pair_of(1.).draft.temperature == 1
    assert SAME in run(capsys, *X, "--n", "5", "--system", "sampled tree", "--draft-temperature", "1")
    fails(capsys, "draft_temperature: got -1", *X, "--n", "5", "--draft-temperature", "-1")

def test_a_trained_drafter_by_folder_or_by_name(capsys, mine, priced):
    "Its first system, or one that is named; a system's name selects the embedded drafter"
    given = *X, "--n", "4"
    for argv, system, drafter in ((("--drafter", mine), "EAGLE", mine),
                                  (("--drafter", "eagle", "--system", "EAGLE-2"), "EAGLE-2", "eagle"),
                                  (("--system", "Medusa"), "Medusa", "medusa")):
        found = report(capsys, *given, *argv)
        assert found["equal"] and (found["system"], found["drafter"]) == (system, drafter)
        assert found["ledger"]["models"]["draft"]["calls"] > 0
    found = report(capsys, "bench", "--drafter", mine, "--n", "2", "--prompt", "abc")
    assert 0 < found["acceptance"] < 1 and found["drafter"] == mine
    fails(capsys, "system: got 'Medusa', wanted one of", *given, "--drafter", mine, "--system", "Medusa")

def test_a_trained_drafter_joins_the_tour(mine):
    contestants = drafter_contestants(pair_of(1., drafter=mine))
    assert [(found.recipe, found.draft) for found in contestants] == [("EAGLE", "own"), ("EAGLE-2", "own")]
    run = decode_cold(contestants[0], 0., (1, 2, 3), 3, 0)
    assert len(run.text) == 3 and run.system.name.startswith("EAGLE") and run.text.ledger.num_draft_tokens

def test_the_tour_on_models_of_your_own(mine, folder):
    "A pair runs what it can: with a draft all systems, alone those without one, and those of its drafter"
    def names(**given):
        return [(x.recipe, x.draft) for x in own_contestants(pair_of(**given), every=False)]
    alone = names(target=str(folder/"target"))
    assert alone[0] == ("autoregressive", "") and ("prompt lookup", "") in alone
    assert not any(draft for _, draft in alone)
    both = names(target=str(folder/"target"), draft=str(folder/"draft"))
    assert {*alone} < {*both} and ("speculative sampling", "own") in both
    assert names(target="target", drafter=mine) == [*alone, ("EAGLE", "own"), ("EAGLE-2", "own")]
    letters = pair_of(target=str(folder/"letters"), draft=str(folder/"letters"))
    plain, *others = own_contestants(letters, every=True)
    assert {stop.recipe for stop in (plain, *others)} == {
        entry.name for entry in SYSTEMS.entries() if not entry.for_embedded}
    assert plain.tok is letters.tok
    with pytest.raises(ValueError, match="^prompt: got"): plain.prompts("copy", 1, 12)

@pytest.mark.parametrize("temperature", [0., 1.])
def test_a_contestant_of_ones_own_is_a_cold_run_on_that_pair(folder, temperature):
    "At the temperature that is asked for; at 0 the text is that of plain decoding"
    pair = pair_of(target=str(folder/"target"), draft=str(folder/"draft"))
    contestants = {found.recipe: found for found in own_contestants(pair, every=True)}
    prompt = contestants["autoregressive"].prompts("code", 1, 6)[0]
    plain = decode_cold(contestants["autoregressive"], temperature, prompt, 6, 0)
    of_the_target = "LayerSkip", "SWIFT", "TriForce", "MagicDec"
    for name in "speculative sampling", "SuffixDecoding", "Sequoia", *of_the_target:
        run = decode_cold(contestants[name], temperature, prompt, 6, 0)
        assert run.target.model is pair.target.model and run.target.temperature == temperature
        assert run.text.ledger.num_draft_tokens and (temperature or run.text == plain.text)

def test_drafters_that_do_not_fit(capsys, mine, folder):
    "Another target, a card without entries, a folder without weights"
    other = "--target", str(folder/"target")
    fails(capsys, "target: got a model with hidden_size", *X, *other, "--drafter", mine)
    os.remove(f"{mine}/model.safetensors")
    fails(capsys, "drafter: got '", *X, "--drafter", mine)
    for card in "{}", '{"kind": "Eagle", "settings": {}, "target": {}, "recipe": {"name": "no"}}', "[]":
        with open(f"{mine}/config.json", "w") as f: f.write(card)
        fails(capsys, "drafter: ", *X, "--drafter", mine)

def test_certify_counts_on_a_named_model(capsys):
    "The exact certificate and the counted one, no wider than a page"
    given = "--target", "target", "--system", "autoregressive", "--runs", "120", "--n", "1"
    printed = run(capsys, "certify", *given)
    assert "probabilities compared as fractions" in printed and "120 runs" in printed
    assert max(map(len, printed.splitlines())) <= 92 and "--seed 0" in printed
    found = report(capsys, "certify", "--drafter", "medusa", "--runs", "80", "--n", "1", "--seed", "3")
    certificates = found["systems"]["Medusa"]
    assert found["passes"] and found["seed"] == 3 and found["drafter"] == "medusa"
    assert certificates["tables"]["exact"] and certificates["model"]["test"]["n"] == 80

def test_too_few_runs_leave_the_proof_on_tables(capsys):
    "The error names a number of runs, and that number is enough"
    given = "certify", "--target", "small", "--system", "autoregressive", "--n", "1", "--runs"
    with pytest.raises(SystemExit) as end: main([*given, "7"])
    printed = capsys.readouterr()
    assert end.value.code == 2 and "exact: " in printed.out and "not counted" in printed.out
    assert printed.err.count("\n") == 1
    head, _, needed = printed.err.split(": with fewer")[0].partition(" at least ")
    assert head == "specref: certify: runs: got 7, wanted"
    assert f"in {needed} runs" in run(capsys, *given, needed)
    with pytest.raises(SystemExit): main([*given, "7", "--json"])
    found = json.loads(capsys.readouterr().out)
    tables = found["systems"]["autoregressive"]["tables"]
    assert tables["exact"] and f"wanted at least {needed}" in found["error"]

def test_progress_is_a_line_now_and_then(capsys, monkeypatch):
    "Without a terminal: on a clock of one second a call, every tenth text"
    seconds = count()
    monkeypatch.setattr(commands, "perf_counter", lambda: next(seconds) / 2)
    lines = ProgressLines("texts counted", 60)
    for _ in range(60): lines()
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "specref: texts counted: 20 of 60" and len(printed) == 2
    main(["certify", "--target", "small", "--system", "autoregressive", "--n", "1", "--runs", "60"])
    assert "specref: autoregressive: texts counted: " in capsys.readouterr().err

def test_certify_fails_with_status_1(capsys, monkeypatch):
    "A certificate that does not pass is exit status 1"
    wrong = System("wrong", no_draft, lambda p, tree, rng: Verdict(0, 0))
    monkeypatch.setitem(SYSTEMS.declared, "wrong", Declared("wrong", lambda draft, **kw: wrong))
    with pytest.raises(SystemExit) as end: main(["certify", "--system", "wrong"])
    assert end.value.code == 1 and "OUTPUT DISTRIBUTION DIFFERS" in capsys.readouterr().out

@pytest.fixture
def pasted(tmp_path):
    "What writes a rule to a file; the command that judges it"
    def write(text):
        (tmp_path/"rule.py").write_text(text)
        return "judge", str(tmp_path/"rule.py")
    return write

def test_judge_prints_the_verdict_on_a_rule(capsys, pasted, monkeypatch):
    "A right rule ends with status 0, a wrong one with 1, one that is not robust with 3; a file or not"
    printed = run(capsys, *pasted(SAMPLING_RULE))
    assert "EXACT: equal to the target's" in printed and "behaves exactly as: speculative sampling" in printed
    found = report(capsys, *pasted(MATCH_RULE))
    assert found["command"] == "judge" and found["passes"] and found["exact"] and found["tv"] == 0
    assert found["cases"][0]["name"] == "four tokens" and "sample-and-match" in found["nearest"]
    ends = (1, LATE_RULE, "openvino.genai#4190"), (3, INCLUSIVE_RULE, "edge case: where a random")
    for status, text, words in ends:
        with pytest.raises(SystemExit) as end: main(list(pasted(text)))
        printed = capsys.readouterr().out
        assert end.value.code == status and words in printed and max(map(len, printed.splitlines()[1:])) <= 92
    monkeypatch.setattr(sys, "stdin", io.StringIO(ARGMAX_DRAFT))
    with pytest.raises(SystemExit): main(["judge", "-"])
    assert "argmax draft, stated with the softmax q" in capsys.readouterr().out

def test_rules_that_cannot_be_judged(capsys, pasted, tmp_path):
    "No file, a folder, no rule, a rule that is not enumerated"
    fails(capsys, "No such file", "judge", str(tmp_path/"none.py"))
    fails(capsys, "directory", "judge", str(tmp_path))
    fails(capsys, "rule: got no function", *pasted("x = 1"))
    fails(capsys, "rule: line 1: ", *pasted("def rule("))
    fails(capsys, "certify_rows tests any rule", *pasted("def rule(p, q, draft, u): return [u() < u()]"))
    fails(capsys, "the following arguments are required: file", "judge")

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
    for name in "distribution", "draft", "tokens": assert f"\n{name:13}ok" in printed
    everything = lambda p, tree, rng: Verdict(len(tree) - 1, rng.pick(p[len(tree) - 1]))   # noqa: E731
    wrong = (everything, "distribution FAILED", ()), (match, "tokens       FAILED", ("--like", "reject"))
    for verify, words, like in wrong:
        with pytest.raises(SystemExit) as end: main([*log(verify), *like])
        assert end.value.code == 1 and words in capsys.readouterr().out
    assert "\ntokens       -" in run(capsys, *log(match))
    found = report(capsys, *log(match), "--like", "match")
    passed = {line["check"]: line["passes"] for line in found["lines"]}
    assert found["passes"] and passed["tokens"] and passed["distribution"]

def test_logs_that_cannot_be_checked(capsys, tmp_path):
    "No file, a file of something else, arrays that do not fit"
    (tmp_path/"text.npz").write_text("x")
    for name in "none.npz", "text.npz", ".": fails(capsys, "log: got", "certify", "--log", str(tmp_path/name))
    np.savez(tmp_path/"part.npz", p=np.ones((1, 1, 2))/2)
    fails(capsys, "log: got no array 'x'", "certify", "--log", str(tmp_path/"part.npz"))
    np.savez(tmp_path/"sum.npz", p=np.ones((1, 1, 2)), x=np.zeros((1, 0), int), y=np.array([[1]]))
    fails(capsys, "log: round 0: p[0]: got weights that sum", "certify", "--log", str(tmp_path/"sum.npz"))

BESIDE = dict(system="block verification", target="target", draft="small", n=5, runs=7, seed=1, prompt="x")
ONE = "--target", "small", "--system", "autoregressive"
BAD = [   # words, command
    ("gamma: got 0", *X, "--gamma", "0"), ("gamma: got 600", *X, "--gamma", "600"),
    ("n: got -1", *X, "--n", "-1"), ("n: got 600", *X, "--n", "600"),
    ("n: got 300", "bench", "--prompt", "x", "--n", "300"), ("n: got 700", "certify", *ONE, "--n", "700"),
    ("argument --n: invalid int value: 'many'", *X, "--n", "many"), ("seed: got -1", *X, "--seed", "-1"),
    ("temperature: got -1", *X, "--temperature", "-1"), ("temperature: got nan", *X, "--temperature", "nan"),
    ("temperature: got inf", "bench", "--temperature", "inf"), ("top_k: got 0", *X, "--top-k", "0"),
    ("draft_top_k: got 0", "bench", "--draft-top-k", "0"), ("top_p: got 2", "certify", *ONE, "--top-p", "2"),
    ("draft_top_p: got 0", *X, "--draft-top-p", "0"), ("seconds: got -1", *X, "--seconds", "-1"),
    ("stream: got it together with json", *X, "--stream", "--json"),
    ("chat: got a tokenizer without a chat template", *X, "--chat"),
    ("drafter: got 'no/such/folder'", *X, "--drafter", "no/such/folder"),
    ("drafter: got 'no/such/folder'", "tour", "--drafter", "no/such/folder"),
    ("drafter: got ''", "bench", "--drafter", ""), ("or one of medusa, medusa2", *X, "--drafter", "EAGLE"),
    ("target: got 'no/', wanted a folder", *X, "--target", "no/"),
    ("draft: got 'small' together with a trained drafter", *X, "--drafter", "eagle", "--draft", "small"),
    ("draft_top_k: got 2 together with a trained", "bench", "--drafter", "eagle", "--draft-top-k", "2"),
    ("unrecognized arguments: --gamma", "bench", "--gamma", "4"),
    ("prompt: got 0 tokens", "bench", "--prompt", ""),
    ("prompt: got 600 tokens", "decode", "--prompt", "\x01" * 600),
    ("prompt: got 'a\\udcff'", "decode", "--prompt", "a\udcff"),
    ("prompt: got 0 tokens", "certify", *ONE, "--prompt", ""), ("prompt: got none, wanted a text", "decode"),
    ("argument --prompt-file: got 'no/file', wanted a file of text", "decode", "--prompt-file", "no/file"),
    ("gamma: got 3, wanted none", *X, "--system", "autoregressive", "--gamma", "3"),
    ("draft: got 'small' for 'REST'", *X, "--system", "REST", "--draft", "small"),
    ("drafter: got 'eagle' for 'Jacobi'", *X, "--system", "Jacobi", "--drafter", "eagle"),
    ("draft_temperature: got 0.5 for 'LayerSkip'", *X, "--system", "LayerSkip", "--draft-temperature", ".5"),
    ("draft: got 'small' for 'DISCO'", "certify", "--system", "DISCO", "--draft", "small"),
    *((f"{name}: got {x!r} on tables", "certify", f"--{name}", str(x))
      for name, x in dict(n=5, runs=7, seed=1, prompt="x", temperature=0.).items()),
    ("draft_top_k: got 2 on tables alone", "certify", "--draft-top-k", "2"),
    ("chat: got True on tables alone", "certify", "--chat"),
    ("texts: got 3 together with data", "train", "medusa", "--data", "x", "--texts", "3"),
    ("runs: got 0", "certify", "--runs", "0"), ("system: got 'magic'", *X, "--system", "magic"),
    ("target: got 'no/such/folder'", *X, "--target", "no/such/folder"),
    ("draft: got 'no/such/folder'", *X, "--draft", "no/such/folder"),
    *((f"{role}: got ''", *X, f"--{role}", "") for role in ("target", "draft")),
    ("draft: got none", "certify", "--target", "small"),
    ("target: got './no', wanted a folder: nothing has this path", *X, "--target", "./no"),
    ("draft: got 'no/such/folder', wanted a folder", "tour", "--draft", "no/such/folder"),
    ("draft: got 'small' together with a trained", "tour", "--drafter", "eagle", "--draft", "small"),
    ("steps: got 5 for the embedded models", "train", "--steps", "5"),
    ("target: got 'x' for layerskip", "train", "layerskip", "--target", "x"),
    ("target: got 'small' for the embedded models", "train", "--target", "small"), ("required: COMMAND",),
    ("invalid choice: 'fly'", "fly"), ("argument --out: got '', wanted a folder", "tour", "--out", ""),
    ("wanted a folder that can be written", "train", "--out", f"{__file__}/below"),
    ("got '/proc/below', wanted a folder that can be written", "train", "--out", "/proc/below"),
    ("file: got 'no/file', wanted a file of Python", "judge", "no/file"),
    ("file: got 'no/file', wanted a file of counts", "metrics", "no/file"),
    ("before: got 'no/file', wanted a file of counts", "metrics", __file__, "--before", "no/file"),
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
    translate = *X, "--system", "TLI", "--target"
    words = " with decoder null, wanted one that has a token for every byte"
    fails(capsys, words, *translate, target, "--draft", str(folder/"words"))
    fails(capsys, "target: got", *translate, str(folder/"words"), "--draft", target)
    fails(capsys, "draft: got '", *translate, target, "--draft", empty)
    fails(capsys, "draft: got '", *X, "--draft", empty)

def test_embeddings_padded_to_another_size_are_cut(capsys, folder, tmp_path):
    "The target's 512 rows and the draft's 576 of one tokenizer: the text of the draft as it was"
    import torch
    from transformers import AutoModelForCausalLM
    wide = AutoModelForCausalLM.from_pretrained(folder/"draft")
    wide.resize_token_embeddings(576, mean_resizing=False)
    with torch.no_grad(): wide.lm_head.weight[512:] = 9.   # much mass on tokens that the target lacks
    wide.save_pretrained(tmp_path/"wide")
    tokenizer().save_pretrained(tmp_path/"wide")
    def decoded(draft):
        found = json.loads(run(capsys, *X, "--target", str(folder/"target"), "--draft", str(draft), "--json"))
        return found["tokens"], found["ledger"]["num_accepted_tokens_per_pos"]
    assert decoded(tmp_path/"wide") == decoded(folder/"draft")

def test_every_option_is_an_argument():
    "Of the function that its command names, and its help ends with the function's default"
    subs = next(x for x in parser()._subparsers._group_actions if x.dest == "command").choices
    for name, sub in subs.items():
        module, _, function = sub.get_default("runs_function").partition(":")
        taken = signature(getattr(import_module(f"specref.{module}"), function)).parameters
        options = {action.dest for action in sub._actions} - {"help"}
        if "models" in taken: options -= vars(ModelOptions()).keys()
        assert options <= taken.keys(), name
    printed = " ".join(subs["decode"].format_help().split())
    assert "number of new tokens (default: 64)" in printed and "None" not in printed

def test_the_module_and_the_script_are_one():
    "Help comes without torch; the installed script calls the same function (the next test: so does -m)"
    code = ("import sys; from specref.app.commands import main\ntry: main(['--help'])\n"
            "except SystemExit: assert 'torch' not in sys.modules")
    call = [sys.executable, "-c", code]
    printed = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in printed.stdout for name in ("tour", "decode", "bench", "certify", "train"))
    scripts = tomllib.loads((ROOT/"pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"specref": "specref.app.commands:main"}
    call[2] = code.replace("help", "version")
    version = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert version.stdout == f"specref {specref.__version__}\n"

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
