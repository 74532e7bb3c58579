"Chapter 17f: pytest's fixture `certify` in a project of its own, its shares, its demands, and programs"
import os, re, shutil, subprocess, sys, tomllib
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np, pytest, yaml
from hypothesis import given, strategies as st

from helpers import laws, proves, refuses
from house import ROOT, Notebook
from specref import (certify_rows, certify_sampler, certify_sequentially, Chain, exact, law_of,
                     random_table, reject, save_log, System, TableModel, tv, Verdict)
from specref.certify import plugin
from specref.certify.counts import ALPHA, partition
from specref.certify.plugin import (CheckedSession, Certifier, exit_status, program_texts, runs_within,
                                    SESSION_ALPHA, setting, share_of, visible_distance)
from specref.certify.sampler_mutants import nan_spreads, padded_choice
from specref.certify.samplers import CASES, Interface
from specref.certify.sequential import sample_rounds

# A project: two right samplers, three wrong ones, a test without power, one that cannot run, plain ones

PROGRAM = """#!/usr/bin/env python3
import random, sys
after = [[4, 3, 2, 1], [1, 2, 3, 4], [1, 1, 1, 1], [5, 1, 1, 1]]
if "--squared" in sys.argv: after = [[w*w for w in row] for row in after]
def text(seed):
    rng, tokens = random.Random(int(seed)), [0]
    for _ in range(3): tokens += rng.choices(range(4), after[tokens[-1]])
    return tokens[1:]
if "--seed" in sys.argv:
    first, texts = int(sys.argv[sys.argv.index("--seed") + 1]), 1
    if "--texts" in sys.argv: texts = int(sys.argv[sys.argv.index("--texts") + 1])
    for k in range(texts): print(text(first + k))
else:
    for seed in sys.stdin: print(*text(seed))
"""
TESTS = """
import sys
import numpy as np
import pytest
from specref.certify.known import Rule, from_r, parent_row
from specref.certify.samplers import rule_on_rows
from specref.certify.sampler_mutants import padded_choice
from specref.certify.samplers import CASES, text_sampler
from specref.core.law import exact
from specref.core.target import TableModel, random_table

weights = [(4, 3, 2, 1), (1, 2, 3, 4), (1, 1, 1, 1), (5, 1, 1, 1)]
bigrams = TableModel(4, lambda text: exact(*weights[text[-1]]))
target, draft = random_table(4, 5, zeros=False), random_table(4, 6, zeros=False)
recovered_from_p = rule_on_rows(Rule(after=from_r))
bonus_of_the_row_before = rule_on_rows(Rule(bonus=parent_row))
quick = dict(runs=700, depth=1, cases=dict([*CASES.items()][:1]))

def test_rows(certify): assert certify.rows(padded_choice, **quick).passes_robustness
def test_program(certify): certify.program(["./decode"], bigrams, (0,), runs=1000)
def test_wrong_rows(certify): certify.rows(recovered_from_p, **quick)
def test_wrong_texts(certify):
    certify.texts(text_sampler(bonus_of_the_row_before, target, draft, 2), target, (0,), runs=1500)
def test_wrong_program(certify): certify.program("./decode --squared", bigrams, (0,), runs=1000)
def test_weak(certify): certify.texts(lambda ctx, n, rng: rng.choice(4, 8), bigrams, (0,), n=8, runs=10)
def textbook(p, q, x, rng):
    for i, v in enumerate(x):
        if rng.random() >= p[i, v] / q[i, v]:
            r = np.maximum(p[i] - q[i], 0)
            return [*x[:i], np.searchsorted(r.cumsum(), rng.random()*r.sum(), side="right")]
    return [*x, np.searchsorted(p[-1].cumsum(), rng.random(), side="right")]
def test_textbook(certify): assert certify.rows(textbook, **quick).passes
def test_two(certify):
    certify.program("./decode", bigrams, (0,), runs=1000)
    certify.program("./decode", bigrams, (0,), runs=2000)
@pytest.mark.xfail(strict=True)
def test_old_bug(certify): certify.rows(recovered_from_p, **quick)
def test_no_scipy(certify, monkeypatch):
    for name in [m for m in sys.modules if m.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    certify.program("./decode", bigrams, (0,), runs=1000)
def test_late(request): request.getfixturevalue("certify").program("./decode", bigrams, (0,))
def test_plain(): assert False
"""

@pytest.fixture(scope="module")
def project(tmp_path_factory):
    "Runs pytest in a folder with the program and the tests: exit status, what is printed, {test: properties}"
    folder = tmp_path_factory.mktemp("project")
    for name, text in {"decode": PROGRAM, "test_engine.py": TESTS, "pytest.ini": "[pytest]\n"}.items():
        (folder/name).write_text(text)
        (folder/name).chmod(0o755)
    def run(*options):
        call = [sys.executable, "-m", "pytest", "-p", "specref.certify.plugin", "-p", "no:cacheprovider"]
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        env |= dict(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONPATH=str(ROOT), COLUMNS="120")
        done = subprocess.run([*call, "--junitxml=report.xml", *options], cwd=folder, env=env,
                              capture_output=True, text=True)
        xml = ElementTree.parse(folder/"report.xml").iter("testcase")
        found = {case.get("name"): [(p.get("name"), p.get("value")) for p in case.iter("property")]
                 for case in xml}
        return done.returncode, done.stdout, found
    return run

def test_a_project(project):
    "The wrong samplers are rejected with a witness, and all numbers stand in the XML file"
    status, printed, found = project("-v")
    verdicts = {test: [v for k, v in own if k == "specref_verdict"] for test, own in found.items()}
    assert status == 20 and verdicts == dict(
        test_rows=["no difference"], test_program=["no difference"], test_wrong_rows=["rejected"],
        test_wrong_texts=["rejected"], test_wrong_program=["rejected"], test_weak=["too weak"],
        test_textbook=["no difference"],
        test_two=["no difference"]*2, test_old_bug=["rejected"], test_no_scipy=["not run"], test_plain=[],
        test_late=[])
    for test in "test_rows", "test_program", "test_wrong_rows", "test_wrong_texts", "test_wrong_program":
        numbers = dict(found[test])
        assert int(numbers["specref_runs"]) in (700, 1000, 1500)
        assert float(numbers["specref_alpha"]) == pytest.approx(ALPHA/10/2)
        assert 0 < float(numbers["specref_distance_visible"]) < 1
        assert (float(numbers["specref_p_value"]) < 1e-9) == ("wrong" in test)
    alphas = [float(v) for k, v in found["test_two"] if k == "specref_alpha"]
    assert alphas == pytest.approx([ALPHA/10/2, ALPHA/10/6])
    for words in ("test_wrong_rows REJECTED", "test_weak TOO WEAK", "test_no_scipy NOT RUN",
                  "test_plain FAILED", "rejected: rows(verify)", "rejected: program(decode)", "observed",
                  "pip install 'specref[stats]'", "requested by a running test",
                  "rejected (expected)", "::test_textbook; not robust: nan", "exit status 20"):
        assert words in printed, words
    assert "differs in the case 'different rows'" in printed and "all checks together: 1e-09" in printed

def test_a_test_without_power_has_its_own_status(project):
    "Too weak for any distance or for the one that is demanded, or not run"
    status, printed, found = project("-k", "weak or scipy or test_rows", "--specref-sees", "0.05")
    assert status == 21 and "no distance is detectable" in printed
    assert dict(found["test_rows"])["specref_verdict"] == "too weak"
    weak = r"too weak: rows\(padded_choice\) detects a distance of 0\.\d+ or more, demanded 0\.05"
    assert re.search(weak, printed)

def test_a_correct_rule_that_is_not_robust_has_its_own_status(project):
    "Where robustness is demanded: a textbook rule accepts what it divides by NaN"
    status, printed, found = project("-v", "-k", "test_textbook", "--specref-robust", "1")
    assert status == 22 and "test_textbook NOT ROBUST" in printed
    assert "not robust: rows(textbook) fails nan" in printed
    numbers = dict(found["test_textbook"])
    assert numbers["specref_verdict"] == "not robust" and numbers["specref_not_robust"] == "nan"

def test_the_workflow_of_the_page(project):
    "It parses, and pytest takes the options of its command"
    (text,) = (s for s in blocks("yaml") if "jobs:" in s)
    steps = yaml.safe_load(text)["jobs"]["lossless"]["steps"]
    program, folder, *options = next(s["run"] for s in steps if s.get("run", "").startswith("pytest")).split()
    assert program == "pytest" and options[-1] == f"--junitxml={steps[-1]['with']['path']}"
    status, printed, _ = project("--collect-only", "-q", *options[:-1])
    assert status == 0 and "test_rows" in printed
    assert "stats" in tomllib.loads((ROOT/"pyproject.toml").read_text())["project"]["optional-dependencies"]

def test_a_right_sampler_gives_0_also_with_workers(project):
    "With pytest-xdist and a demand in the configuration file: all is taken from the reports"
    status, printed, found = project("-p", "xdist", "-n", "1", "-k", "test_program", "-o", "specref_sees=0.4")
    assert status == 0 and printed.count("all checks together") == 1 and "exit status" not in printed
    assert re.search("no difference +1,000 runs.*test_program\n", printed)
    assert float(dict(found["test_program"])["specref_alpha"]) == ALPHA/2

def test_loading_costs_nothing():
    "No numpy, scipy or torch before a method is called"
    code = "import sys, specref.certify.plugin; print(*{m.partition('.')[0] for m in sys.modules})"
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert "specref" in (loaded := done.stdout.split()) and not {"numpy", "scipy", "torch"} & {*loaded}

# Shares and visible distances

@proves("prop-shares")
@given(st.integers(1, 2), st.integers(1, 4), st.sampled_from([Fraction(1), Fraction(1, 3)]))
def test_shares(tests, most, alpha):
    "Exactly: checks that go on or stop after what they found raise an alarm with probability below alpha"
    def session(rng):
        found = []
        for _ in range(tests):
            for k in range(1, most + 1):
                found.append(rng.coin(share_of(alpha, tests, k)))
                if sum(found) % 2: break   # depends on all that came before
        return any(found)
    alarm = law_of(session).get(True, 0)
    assert alarm <= alpha and sum(share_of(alpha, tests, k) for k in range(1, 100)) < alpha/tests
    assert alarm >= share_of(alpha, tests, 1)*(1 if tests == 1 else 2 - share_of(alpha, tests, 1))

@proves("prop-visible")
@given(laws(6), laws(6), st.integers(1, 60))
def test_visible_distance(p, s, runs):
    "In fractions: the distance of texts is at most that on the cells and the mass in shared cells"
    cells = partition(TableModel(6, lambda text: p), (0,), 1, runs, due=2)
    got, shared = {}, sum(w for c, w in cells.weight.items() if None in c or not cells.whole(c))
    for x in range(6): got[cells.of((x,))] = got.get(cells.of((x,)), 0) + s[x]
    on_cells = sum(max(w - got.get(c, 0), 0) for c, w in cells.weight.items())
    assert tv(p, s) <= on_cells + shared

@pytest.mark.parametrize("n, runs", [(1, 1500), (2, 1500)])
def test_what_is_visible_is_rejected(n, runs):
    "A sampler at the visible distance is rejected with each of five seeds, and a right one is not"
    fair = TableModel(4, lambda text: exact(1, 1, 1, 1))
    found = certify_sampler(lambda ctx, n, rng: rng.integers(4, size=n), fair, (0,), n=n, runs=runs)
    d = visible_distance(found)
    assert found.passes and found.mass_in_shared_cells == 0 and .05 < d < .2
    def off(ctx, n, rng):   # the first token, or the last: two tokens too often by d
        y = rng.integers(4, size=n)
        y[-1] = rng.choice(4, p=[.25 + d/2, .25 + d/2, .25 - d/2, .25 - d/2])
        return y
    assert not any(certify_sampler(off, fair, (0,), n=n, runs=runs, seed=k).passes for k in range(5))

def test_the_rate_of_a_session_is_that_of_a_report(): assert SESSION_ALPHA == ALPHA

# The methods, without a session of pytest

def config(**given):
    def option(name): return given.get(name.removeprefix("specref_"))
    return SimpleNamespace(getoption=option, getini=lambda name: "")

def fixture(**given):
    "The fixture of a test `t`, alone in its session"
    session = CheckedSession(config(**given))
    session.tests.add("t")
    return Certifier(SimpleNamespace(nodeid="t", user_properties=[]), session)

def outcome(certify, *names):
    found = plugin.checks_of(certify.node.user_properties)[-1]
    return [found.get(name) for name in ("verdict", *names)]

target, draft = random_table(4, 1, zeros=False), random_table(4, 2, zeros=False)
def system(verify=reject): return System("mine", Chain(draft, 2), verify)
def flat(p, tree, rng): return Verdict(0, rng.pick(np.ones(4)))

def test_rounds_of_a_system():
    "A right one passes, a wrong one is rejected, and ten rounds show nothing"
    certify = fixture()
    report = certify.rounds(system(), target, (0,), runs=300, n=8, like="reject")
    verdict, runs, wealth, seen = outcome(certify, "runs", "wealth", "share_visible")
    assert (verdict, runs) == ("no difference", 300) and wealth < 100 and seen == report.share < 1
    with pytest.raises(pytest.fail.Exception, match="(?s)^rejected: rounds.mine.*tokens more likely"):
        certify.rounds(system(flat), target, (0,), n=8)
    assert outcome(certify, "wealth")[1] > 4/ALPHA
    with pytest.raises(pytest.fail.Exception, match="^too weak: rounds.mine. detects no distance"):
        fixture(runs="10").rounds(system(), target, (0,))

def test_the_numbers_of_a_report_on_rounds():
    "Rounds, the largest wealth and the share of tokens from the draft, as the words state them"
    found = certify_sequentially(system(), target, (0,), most=300, n=8)
    assert found.rounds == 300 and f"{found.share:.1%} of the tokens from the draft" in found.words
    wrong = certify_sequentially(system(flat), target, (0,), n=8)
    assert not wrong.passes and f"wealth {wrong.wealth:.1e}" in wrong.words

def test_a_clock_stops_the_bets(monkeypatch):
    "A second a record: nine rounds, and the tenth comes too late"
    seconds = iter(range(1000))
    monkeypatch.setattr(plugin, "perf_counter", lambda: next(seconds))
    certify = fixture(seconds="10", sees="1")
    with pytest.raises(pytest.fail.Exception): certify.rounds(system(), target, (0,))
    assert outcome(certify, "runs") == ["too weak", 9]

def test_a_budget_in_seconds_becomes_runs(monkeypatch):
    "A run that imports, then attempts of 25, 100, ... until one is long enough; the rest is filled"
    clock = SimpleNamespace(now=0.)
    monkeypatch.setattr(plugin, "perf_counter", lambda: clock.now)
    def attempt(k):
        tried.append(k)
        clock.now += fixed + k/64
    for fixed, seconds, tries, runs in ((0, 64, [1, 25, 100, 400], 3571), (1, 64, [1, 25, 100, 400], 3315),
                                        (0, 1/8, [1, 25], 25), (0, 1e9, None, 2**20)):
        clock.now, tried = 0., []
        assert runs_within(seconds, attempt) == runs and tries in (None, tried)
        if runs > 25 and tries: attempt(runs)
        clock.now -= fixed + 1/64   # of the first run
        assert not tries or seconds < 1 or seconds - 1/64 < clock.now <= seconds

def test_seconds_in_a_test(monkeypatch):
    "The numbers of runs differ by the clock; the counted runs have other random numbers than the attempts"
    monkeypatch.setattr(plugin, "runs_within", lambda seconds, attempt: attempt(3) and 900)
    seeds = []
    def sample(ctx, n, rng):
        seeds.append(rng.bit_generator.seed_seq.entropy)
        return rng.integers(4, size=n)
    certify = fixture(seconds="5")
    certify.texts(sample, TableModel(4, lambda text: exact(1, 1, 1, 1)), (0,), n=1)
    assert outcome(certify, "runs") == ["no difference", 900] and len(seeds) == 903
    assert len({*seeds[:3]}) == len({*seeds[3:]}) == 1 and seeds[0] != seeds[3]

def test_a_log(tmp_path):
    "Recorded rounds; a file that is missing is no verdict"
    records = sample_rounds(system(), target, (0,), 8, 0)
    save_log(tmp_path/"log.jsonl", [next(records) for _ in range(400)])
    certify = fixture()
    certify.log(tmp_path/"log.jsonl", like="reject")
    assert outcome(certify, "runs") == ["no difference", 400]
    with pytest.raises(ValueError, match="^log: "): certify.log(tmp_path/"none.jsonl")
    assert outcome(certify) == ["not run"]

def test_checks_that_may_fail():
    "A row of NaN changes the rows beside it: correct, not robust; an error where it is demanded, or ignored"
    how = dict(runs=1500, depth=1, interface=Interface(batch=200))
    certify = fixture()
    report = certify.rows(nan_spreads, **how)
    assert report.passes and report.wrong == ("nan",) and report.title.endswith("ok; not robust: nan")
    assert outcome(certify, "not_robust") == ["no difference", "nan"]
    words = "^not robust: rows.nan_spreads. fails nan"
    with pytest.raises(pytest.fail.Exception, match=words): certify.rows(nan_spreads, robust=True, **how)
    certify.rows(nan_spreads, robust=True, ignore=("nan",), **how)
    assert outcome(certify, "not_robust") == ["no difference", None]

def test_a_function_that_never_returns_is_no_verdict():
    certify = fixture()
    def broken(p, q, x, rng): raise RuntimeError("no device")
    words = "^verify: no call returned.*no device"
    with pytest.raises(ValueError, match=words): certify.rows(broken, runs=20, depth=1)
    assert outcome(certify) == ["not run"]
    refuses("verify", certify.rows, 3)

def test_a_seed_changes_the_counts():
    "The same settings and the same test give the same report, another seed another one"
    def p_value(seed):
        certify = fixture(seed=seed)
        certify.rows(padded_choice, runs=1500, depth=1)
        return outcome(certify, "p_value")
    assert p_value("1") == p_value("1") != p_value("2")

BAD_SETTINGS = dict(runs="0", seconds="-1", sees="2", alpha="0", seed="1.5", robust="2")

@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_bad_setting(name):
    words = f"^--specref-{name}: got '{re.escape(BAD_SETTINGS[name])}', wanted"
    with pytest.raises(pytest.UsageError, match=words): setting(config(**BAD_SETTINGS), name)

@pytest.mark.parametrize("verdicts, status", [
    ({"a": ["rejected"], "b": ["too weak"], "c": []}, 20), ({"a": ["too weak"], "b": ["not run"]}, 21),
    ({"a": ["too weak"], "c": []}, 1), ({"a": ["no difference"]}, 1), ({"a": ["rejected", "too weak"]}, 21),
    ({"a": ["not robust"]}, 22), ({"a": ["not robust"], "b": ["not run"]}, 21),
    ({"a": ["not robust"], "c": []}, 1)])
def test_exit_statuses(verdicts, status):
    "The last check of a failed test decides; a test that passes decides nothing"
    found = [(test, dict(verdict=v)) for test, some in verdicts.items() for v in some]
    assert exit_status({*verdicts}, [*found, ("passed", dict(verdict="rejected"))]) == status

# Programs

@pytest.fixture
def decode(tmp_path):
    (tmp_path/"decode").write_text(PROGRAM)
    (tmp_path/"decode").chmod(0o755)
    return str(tmp_path/"decode")

def test_three_ways_to_call_a_program(decode):
    "Seeds on standard input and a process for each give the same texts, so many from one seed others"
    seeds = [5, 9, 7]
    lines, each = ([*program_texts(c, seeds, 3, (0,))] for c in ([decode], f"{decode} --seed {{seed}}"))
    many = [*program_texts([decode, "--seed", "{seed}", "--texts", "{runs}"], seeds, 3, (0,))]
    assert lines == each and many[0] == lines[0] and many[1:] != lines[1:] and len(many) == 3

def test_context_and_length_of_a_program():
    words = ["-c", "import sys; print(sys.argv[1:])", "{ctx}", "{n}"]
    refuses("command", lambda: [*program_texts([sys.executable, *words], [1], 3, (0, 2))])   # no numbers
    echo = [sys.executable, "-c", "import sys; print(sys.argv[1], len(input()) > 0)"]
    refuses("command", lambda: [*program_texts([*echo, "{ctx}"], [1], 3, (0, 2))])
    plain = [sys.executable, "-c", "import sys; print(sys.argv[1], sys.argv[2])", "{ctx}", "{n}"]
    assert [*program_texts(plain, [1], 3, (0, 2))] == [[0, 2, 3]]

@pytest.mark.parametrize("code, words", [
    ("import sys; sys.exit('no weights')", "exit status 1, wanted 0 .no weights"),
    ("print('1 2\\n3')", "2 lines, wanted 3"),
    ("for _ in range(3): print('end of text')", "'end of text', wanted numbers of tokens"),
    ("import time; time.sleep(60)", "took more than 0.5 seconds")])
def test_what_a_program_does_wrong(code, words):
    with pytest.raises(ValueError, match=f"^command: .*{words}"):
        [*program_texts([sys.executable, "-c", code], [1, 2, 3], 2, (0,), .5)]

def test_a_program_that_is_none():
    with pytest.raises(ValueError, match="^command: ./no-such-program: got No such file"):
        [*program_texts("./no-such-program", [1], 2, (0,))]
    refuses("command", lambda: [*program_texts([], [1], 2, (0,))])

# Adapters of the page, run with stand-ins that have the engines' arguments

def blocks(language):
    cells = Notebook(ROOT/"nbs"/"17f_plugin.ipynb").cells
    text = "\n".join(c["source"] for c in cells if c["cell_type"] == "markdown")
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)

def rejection_sample(x, lengths, most, ends, q, logits, bonus, how):
    "vLLM's arguments: flattened drafts, request after request; one generator for each request"
    import torch
    p = (logits / how.temperature.repeat_interleave(torch.tensor(lengths))[:, None]).softmax(-1)
    out = torch.full((len(lengths), most + 1), -1)
    for b, n in enumerate(lengths):
        start, own = int(ends[b]) - n, how.generators[b]
        u, out[b, n] = torch.rand(n, generator=own), bonus[b, 0]
        for i, v in enumerate(x[start:start + n]):
            out[b, i], (pi, qi) = v, (a[start + i] for a in (p, q))
            if u[i]*qi[v] < pi[v]: continue
            out[b, i] = torch.multinomial((pi - qi).clamp(min=0), 1, generator=own)
            out[b, i + 1:] = -1
            break
    return out

def tree_speculative_sampling_target_only(predicts, accepted, count, *arrays):
    "SGLang's arguments: the first three are written; nodes are found by links"
    predicts, accepted, count, x, index, child, sibling, u, last, p, _ = (
        a.numpy() for a in (predicts, accepted, count, *arrays))
    for b in range(len(x)):
        node, coin, accepted[b, 0] = 0, u[b, 0], index[b, 0]
        while True:
            c, rest = child[b, node], p[b, node].copy()
            while c >= 0 and coin >= p[b, node].sum() - rest.sum() + rest[x[b, c]]:
                rest[x[b, c]], c = 0, sibling[b, c]
            if c < 0: break
            predicts[index[b, node]], count[b], coin = x[b, c], count[b] + 1, u[b, c]
            node, accepted[b, count[b]] = c, index[b, c]
        ends = (rest if rest.sum() > 0 else p[b, node]).cumsum()
        predicts[index[b, node]] = ends.searchsorted(last[b]*ends[-1], side="right")

@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler of C++")
def test_a_program_in_cpp(tmp_path, monkeypatch):
    "The program of the page, compiled, has the distribution of its table, and not of another one"
    weights = [(4, 3, 2, 1), (1, 2, 3, 4), (1, 1, 1, 1), (5, 1, 1, 1)]
    (tmp_path/"decode.cpp").write_text(next(s for s in blocks("cpp") if "int main" in s))
    subprocess.run(["g++", "-o", tmp_path/"decode", tmp_path/"decode.cpp"], check=True)
    monkeypatch.chdir(tmp_path)
    for rows, passes in ((weights, True), (weights[::-1], False)):
        certify, table = fixture(runs="600"), TableModel(4, lambda text: exact(*rows[text[-1]]))
        wrong = pytest.raises(pytest.fail.Exception, match="^rejected: program.decode")
        with nullcontext() if passes else wrong: certify.program("./decode", table, (0,))
        assert (outcome(certify) == ["no difference"]) == passes

@pytest.mark.parametrize("engine, bug", [
    ("vllm", ("P[np.arange(len(X)), n]", "P[:, -1]")),
    ("sglang", ("gpu(u[:, m], f)", "gpu(u[:, 0], f)"))])
def test_adapters(engine, bug):
    "The code of the page on a CPU, and the same with the wrong row, or one number used twice"
    import torch
    source = next(s for s in blocks("python") if f"def by_{engine}" in s)
    source = source.replace(".cuda()", "").replace('"cuda"', '"cpu"')
    imports = re.findall(r"(?m)^(?:from|import) .*\n", source)   # the engine's among them
    for line in imports: source = source.replace(line, "")
    how, runs = dict(vllm=(dict(padded=True), 120), sglang=(dict(layout="links"), 500))[engine]
    interface, one = Interface(batch=64, dtype="float32", **how), dict([*CASES.items()][:1])
    small = dict(V=4, gamma=3, runs=runs, depth=1, like=None, interface=interface, cases=one)
    for right, code in ((True, source), (False, source.replace(*bug))):
        assert right or code != source
        kernels = {f.__name__: f for f in (rejection_sample, tree_speculative_sampling_target_only)}
        names = dict(np=np, torch=torch, SimpleNamespace=SimpleNamespace, Interface=Interface, **kernels)
        exec(code, names)
        report = certify_rows(names[f"by_{engine}"], **small)
        assert report.lines[0].passes and report.passes_distribution == right, report.words
