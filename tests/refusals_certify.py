"Bad input of the certificates, the bets and the tests of samplers: (argument, call, words of the message)"
import json
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from helpers import constant, killer, random_table, tempered
from specref import (Branching, Chain, Drafter, iid, match, normalize, reject, System, TableModel, Tree,
                     Verdict)
from specref.certify import (certificates, counts, intervals, judge, logs, rows as rows_module, samplers,
                             sequential)

@cache
def pair(floats=True): return [tempered(m, 1.) if floats else m for m in killer()]
def system(drafter=None, verify=reject): return System("under test", drafter or Chain(pair()[1], 2), verify)
def certify(s=None, target=None, ctx=(0,), **kw):
    return certificates.certify_system(s or system(), target or pair()[0], ctx, **kw)
def sequentially(s=None, target=None, ctx=(0,), **kw):
    return sequential.certify_sequentially(s or system(), target or pair()[0], ctx, **kw)
def g_test(found, want, *alpha): return counts.g_test(found, want, *alpha)
HALVES = {0: .5, 1: .5}
BAD_VERDICTS = [None, 3, Verdict(0, None), Verdict(0, 1.), Verdict(0, float("nan")), Verdict(-1, 0),
                Verdict(9, 0), Verdict(0, 3), Verdict(0, -1)]
def returns(found): return system(verify=lambda p, tree, rng: found)
@dataclass
class Counting(Drafter):   # it is compared by its parts, and has no hash
    seen: int = 0
    def __call__(self, ctx, rng): return Tree(ctx)
    def learn(self, round): return Counting(self.seen + 1)
def by_name(draw): return system(verify=lambda p, tree, rng: Verdict(0, draw(p[0], rng)))
OWN_ERRORS = [   # on fractions: the line of one's own code, and what the rng or the rows lack
    (by_name(lambda row, rng: int(rng.random() < row[0])), r"AttributeError: .*line .*an rng has pick"),
    (by_name(lambda row, rng: int(np.log(row).argmax())), r"TypeError: .*line .*rows here are fractions"),
    (system(Counting()), "unhashable.*; equal states are merged"),
    (by_name(lambda row, rng: rng.pick(row[7])), r"IndexError: .*line .*row\[7\]")]
OF_FRACTIONS = partial(certify, target=pair(False)[0])
def floats_on_fractions():
    flat = TableModel(3, lambda text: np.ones(3)/3)
    return certificates.exact_certificate(system(Chain(flat, 1)), pair(False)[0], (0,), 2, ())

# Bets and logs

@cache
def recorded(n=3, V=3, drafter=None):
    target, draft = random_table(V, 1, zeros=False), random_table(V, 2, zeros=False)
    s = System("recorded", (drafter or partial(Chain, gamma=2))(draft), reject)
    return list(islice(sequential.sample_rounds(s, target, (0,), 5, 3), n))
@cache
def folder(): return Path(mkdtemp())
def save(*witnesses, path=None): return logs.save_log(path or folder()/"x.npz", list(witnesses))
def stars(draft): return Branching(draft, (2,), iid)

GOOD = dict(p=np.full((2, 3, 4), .25), q=np.full((2, 2, 4), .25), x=np.array([[1, 2], [3, -1]]),
            y=np.array([[1, 0, -1], [3, 3, -1]]))
P, Q, X, Y = GOOD["p"], GOOD["q"], GOOD["x"], GOOD["y"]
def log(**changed):
    np.savez(folder()/"log.npz", **{k: v for k, v in (GOOD | changed).items() if v is not None})
    return logs.certify_log(folder()/"log.npz")
def file(name, content=b""):
    (folder()/name).write_bytes(content)
    return logs.certify_log(folder()/name)
def half_file():
    np.savez(folder()/"good.npz", **GOOD)
    return file("half.npz", (folder()/"good.npz").read_bytes()[:200])
def one_array():
    np.save(folder()/"one.npy", np.ones(3))
    return logs.certify_log(folder()/"one.npy")
def objects():
    np.savez(folder()/"objects.npz", p=np.array([None]), x=np.ones(1), y=np.ones(1))
    return logs.certify_log(folder()/"objects.npz")
LINE = dict(x=[1], y=[1, 0], p=[[.5, .5], {"0": .5}], q=[{"1": .5, "0": .2}])
def line(**changed):
    found = {k: v for k, v in (LINE | changed).items() if v is not None}
    return file("lines.jsonl", f"{json.dumps(LINE)}\n{json.dumps(found)}\n".encode())
BAD_LINES = {
    "line 2: got no list 'p'": dict(p=None), "line 2: got no list 'y'": dict(y=3),
    "line 2: got 'z', wanted p, x, y": dict(z=1), "line 2: text: wanted a number or a name": dict(text=[1]),
    r"line 2: p\[0\]: got weights that sum": dict(p=[[.5, .6], [.5, .5]]),
    r"line 2: p\[0\]: got weights that sum to 1.5": dict(p=[{"0": 1.5}, [.5, .5]]),
    r"line 2: p\[0\]: got .*wanted weights of tokens": dict(p=[{"a": .5}, [.5, .5]]),
    r"line 2: p\[1\]: got .*wanted numbers": dict(p=[[.5, .5], ["a", "b"]]),
    r"line 2: p: got 1 rows, wanted 2 rows": dict(p=[[.5, .5]]),
    r"line 2: p: got rows of \[2, 3\] weights": dict(p=[[.5, .5], [.5, .5, 0]]),
    r"line 2: q: got 0 rows": dict(q=[]), "line 2: y: got token 7": dict(y=[1, 7]),
    r"line 2: y: got \(0, 1\)": dict(y=[0, 1]),
    r"line 2: p\[0\]: got nan": dict(p=[[float("nan"), 1], [.5, .5]]),
    "line 2: x: got float64": dict(x=[.5])}
def save_good():
    np.savez(folder()/"good.npz", **GOOD)
    return folder()/"good.npz"
def with_option(**option): return logs.certify_log(save_good(), **option)
def tokens(out): return logs.token_list(out, "x")

# Functions of rows

def never(*given): raise AssertionError("called")
def one(p, q, x, rng): return [0]
def one_text(ctx, n, rng): return [0]
def rows(verify=never, **kw): return samplers.certify_rows(verify, **kw)
def texts(sample, ctx=(0,), **kw): return samplers.certify_sampler(sample, pair()[0], ctx, runs=500, **kw)
def on_texts(verify): return texts(samplers.text_sampler(verify, *pair(), 2))
def padded():
    rule = samplers.rule_on_rows(reject)
    return rule(np.full((2, 3), 1/3), np.full((1, 3), 1/3), np.array([-1]), np.random.default_rng(0))

# Pasted rules

def pasted(line, start=""):
    return judge.judge_rule(f"{start}def rule(p, q, draft, u):\n    {line}\n    return [1]", known=())
TWO_DRAWS = "def rule(p, q, draft, u): return [0]\ndef draw(q, u): return 0"
NOT_ENUMERATED = {   # a line of a rule: what the error names
    "if np.log(u()) < -1: return [0]": r"the logarithm of a random number .*race\(weights, u\)",
    "import math; math.log(u())": "a random number as a float", "np.array([u()], float)": "as a float",
    "if u() < u(): return [0]": "a comparison of two random numbers", "u() * u()": "a product of two random",
    "u() + u()": "a sum or difference of two", "u() / u()": "a quotient of two", "1 / u()": "a division",
    "u() ** 2": "a power", "u() % 1": "a remainder", "abs(np.sqrt(u()))": "a function of a random number",
    "if u(): return [0]": "a truth value", "int(u() - 1)": "the whole part of a random number that may be",
    "u.integers(2**63)": "a whole number of a large range, as for a seed", "u.exponential()": "u.exponential",
    "if u < p[0][0]: return [0]": r"u itself as a number, which is u\(\)",
    "race([1, 1], u())": "takes u itself",
    "import random": "random in line 2, which has random numbers other than u",
    "from numpy.random import rand": "numpy.random in line 2", "np.random.rand()": "np.random in line 2",
    "while u() < .5: pass": "a call with more than 64 random numbers"}
COUNTS = []
def counted(p, q, draft, u):
    COUNTS.append(0)
    return [len(COUNTS) % 3]

BAD_RELATIONS = [lambda p, q: 3, lambda p, q: (p, q, p), lambda p, q: (p[:2]*2, q), lambda p: (p, p),
                 lambda p, q: (normalize(p[:3]), normalize(q[:3]))]

ROWS = [
    ("system", lambda: certify(reject)), ("system", lambda: certify(lambda draft: None), r"build\(draft\)"),
    ("target", lambda: certificates.certify_system(system(), None, (0,))),
    ("target", lambda: certify(target=reject)),
    ("ctx", lambda: certify(ctx=())), ("ctx", lambda: certify(ctx=(3,))),
    ("n", lambda: certify(n=0)), ("n", lambda: certify(n=2.5)),
    ("stop", lambda: certify(stop=7)), ("stop", lambda: certify(target=pair(False)[0], stop=7)),
    *(("stop", partial(certify, stop=bad)) for bad in ("2", (3,), (-1,), [[2]], (1.,))),
    *(("verify", partial(test, returns(bad))) for test in (certify, sequentially) for bad in BAD_VERDICTS),
    *(("verify", partial(certify, returns(bad), pair(False)[0])) for bad in BAD_VERDICTS),
    ("runs", lambda: certify(runs=0)), ("runs", lambda: certify(runs=15)),
    ("runs", lambda: certify(target=pair(False)[0], runs=0)),
    ("seed", lambda: certify(seed=-1)), ("due", lambda: certify(due=0)),
    ("due", lambda: certify(target=pair(False)[0], due=0)),
    *(("alpha", partial(certify, alpha=x)) for x in (0., 1., 2, -1, "x", None, float("nan"))),
    ("alpha", lambda: certify(target=pair(False)[0], alpha=0.)),
    ("drafter", lambda: certify(system(Chain(constant(1, 1), 2)))),
    ("limit", lambda: certify(limit=0)), ("limit", lambda: certify(target=pair(False)[0], n=40)),
    ("V", lambda: certificates.sparse_table(0, 1)), ("most", lambda: certificates.sparse_table(3, 1, 0)),
    ("system", floats_on_fractions),
    *(("build", lambda x=x: certificates.certificate(x)) for x in (None, system().drafter)),
    ("build", lambda: certificates.certificate(system()), "got the system 'under test', wanted a function"),
    *((name, partial(certificates.certificate, lambda draft, **_: system(), **{name: x})) for name, x in (
        ("seeds", (1,)), ("seeds", 3), ("seeds", "ab"), ("seeds", (1, -1)),
        ("ctx", "a"), ("ctx", ()), ("ctx", 3),
        ("ctx", (0, 9)), ("tables", 3), ("tables", lambda V: 3), ("tables", lambda V, seed: 3), ("n", 2.5),
        ("shape", 3), ("shape", ()), ("shape", (0,)))),
    *((name, partial(certificates.certificate, lambda draft, **_: system(), **{name: x}),
       "for a build without a parameter of that name") for name, x in (("shape", (2, 2)), ("gamma", 3))),
    ("build", lambda: certificates.certificate(lambda draft: draft.no), "AttributeError: .*line .*draft.no"),
    *((name, lambda x={name: x}: certificates.certificate(lambda draft, **_: system(), **x))
      for name, x in (("n", 0), ("V", 0), ("gamma", 0), ("stop", (9,)))),
    *(("system", partial(OF_FRACTIONS, s), words) for s, words in OWN_ERRORS),
    ("alpha", lambda: counts.safe_limit(10, (.5, .5), 0.)),
    ("most", lambda: counts.partition(pair()[0], (0,), 2, 100, most=0)),
    ("counts", lambda: g_test({}, {0: 1.})), ("counts", lambda: g_test({0: -1, 1: 101}, HALVES)),
    *(("want", partial(g_test, {0: 50, 1: 50}, want))
      for want in ({0: .5, 1: .6}, {0: .5}, {0: 1.5, 1: -.5}, {0: float("nan")}, {})),
    ("alpha", lambda: g_test({0: 50, 1: 50}, HALVES, 2)),
    # bets
    ("system", lambda: sequentially(reject)), ("target", lambda: sequentially(target=reject)),
    ("ctx", lambda: sequentially(ctx=())),
    ("most", lambda: sequentially(most=0)), ("n", lambda: sequentially(n=0)),
    ("seed", lambda: sequentially(seed=-1)),
    ("alpha", lambda: sequentially(alpha=0.)), ("alpha", lambda: sequentially(alpha=2)),
    *(("like", partial(sequentially, system(verify=match), like=like))
      for like in ("block", 3, *(lambda p, q, x=x: x for x in (np.nan, 2., -1., None, "a", [1, 2])))),
    ("records", lambda: sequential.certify_rounds([])),
    # logs
    ("records", lambda: save()), ("records", lambda: save(1, 2)),
    ("records", lambda: save(*recorded(), None)), ("records", lambda: save(*recorded(), *recorded(V=4))),
    ("records", lambda: save(*recorded(drafter=stars))), ("path", lambda: logs.save_log(None, recorded())),
    ("path", lambda: save(*recorded(), path=folder())),
    ("log", lambda: log(p=None), "no array 'p'"), ("log", lambda: log(x=None), "no array 'x'"),
    ("log", lambda: log(y=None), "no array 'y'"),
    ("log", lambda: log(p=P[:, :2]), r"got p with float64 of shape \(2, 2, 4\)"),
    ("log", lambda: log(q=Q[:, :, :3]), r"got q with float64 of shape \(2, 2, 3\)"),
    ("log", lambda: log(y=Y + .5), "got y with float64"),
    ("log", lambda: log(p=P.astype(int)), "got p with int64"),
    ("log", lambda: log(x=X[0]), r"got x with int64 of shape \(2,\), wanted \(rounds, drafts\)"),
    ("log", lambda: log(p=np.ones(())), "got p with float64 of shape"),
    ("log", lambda: log(p=P*np.array([1, 1.2, 1])[None, :, None]),
     r"round 0: p\[1\]: got weights that sum to"),
    ("log", lambda: log(q=Q*2), r"round 0: q\[0\]: got weights"), ("log", lambda: log(p=-P), "round 0: p"),
    ("log", lambda: log(p=P*np.nan), r"round 0: p\[0\]: got nan"),
    ("log", lambda: log(x=np.array([[1, 2], [4, -1]]), y=np.array([[1, 0, -1], [4, 3, -1]])),
     "round 1: x: got token 4"),
    ("log", lambda: log(y=np.array([[1, 0, -1], [3, 9, -1]])), "round 1: y: got token 9"),
    ("log", lambda: log(y=np.array([[2, 2, -1], [3, 3, -1]])), r"round 0: y: got \(2, 2\)"),
    ("log", lambda: log(y=np.array([[1, 0, -1], [-1, -1, -1]])), r"round 1: y: got \(\)"),
    ("log", lambda: log(y=np.array([[1, 0, -1], [3, 3, 3]])), r"round 1: y: got \(3, 3, 3\)"),
    ("log", lambda: log(x=np.array([[-1, 2], [3, -1]])), "round 0: x: got .*wanted nothing but padding"),
    ("log", lambda: log(y=np.array([[-1, 2, 3], [3, 3, -1]])),
     "round 0: y: got .*wanted nothing but padding"),
    ("log", lambda: log(**{k: v[:0] for k, v in GOOD.items()}), "without a round"),
    ("log", lambda: log(text=np.zeros(3, int)), r"got text with int64 of shape \(3,\)"),
    ("log", lambda: log(p=np.asfortranarray(P)), "Fortran order"),
    ("tolerance", lambda: sequential.certify_rounds(recorded(), tolerance=.6)),
    ("tolerance", lambda: sequential.certify_rounds(recorded(), tolerance=-1)),
    ("n", lambda: logs.certify_log(save_good(), n=3), "without the numbers of texts"),
    *((name, partial(with_option, **{name: bad})) for name, bad in (
        ("n", "12"), ("n", 0), *(("stop", bad) for bad in ("3", 3, [[3]], (99,), (1.,), None)))),
    *(("path", partial(logs.certify_log, path)) for path in (3, None, b"rounds.npz")),
    ("log", lambda: file("deep.jsonl", b'{"p": ' + b"["*100_000), "line 1: got .*wanted one JSON object"),
    ("top", lambda: logs.save_log(folder()/"x.npz", recorded(), top=2), "wanted a name in .jsonl"),
    ("top", lambda: logs.save_log(folder()/"x.jsonl", recorded(), top=0)),
    *(("log", partial(line, **changed), words) for words, changed in BAD_LINES.items()),
    ("log", lambda: file("cut.jsonl", f"{json.dumps(LINE)}\n{json.dumps(LINE)[:60]}".encode()),
     "line 2: got .*wanted one JSON object"),
    ("log", lambda: file("list.jsonl", f"{json.dumps(LINE)}\n[1]\n".encode()), "line 2: got"),
    ("log", lambda: file("empty.jsonl", f"{json.dumps(LINE)}\n\n".encode()), "line 2: got"),
    ("log", lambda: line(q=None), r"line 2: got \['p', 'x', 'y'\], wanted"),
    ("log", lambda: logs.certify_log(folder()/"none.npz")), ("log", lambda: logs.certify_log(folder())),
    ("log", lambda: file("text.npz", b"hello")), ("log", lambda: file("empty.npz")), ("log", half_file),
    ("log", one_array), ("log", objects),
    *(("x", partial(tokens, bad)) for bad in ([.5], [[1]], "text", None)),
    ("x", lambda: tokens(([1, 2], 3)), "a tuple of list, int, wanted a one-dimensional array of integers$"),
    ("x", lambda: tokens((np.ones(2, int), 1)), "got a tuple of ndarray, int"),
    # functions of rows
    *((name, partial(rows, **{name: x})) for name, x in (
        ("V", 3), ("V", 4.), ("gamma", 0), ("runs", 0), ("seed", -1), ("alpha", 0.), ("alpha", 1),
    ("draft", 3),
        ("like", "reject"), ("cases", {}), ("cases", {"a": 1}), ("cases", [reject]))),
    ("like", lambda: rows(one, like="reject"), "wanted a function, 'detect' or None"),
    ("depth", lambda: rows(one, depth=0)), ("special", lambda: rows(one, special=(4,))),
    ("interface", lambda: rows(one, interface="chain")), ("layout", lambda: samplers.Interface("ring")),
    ("batch", lambda: samplers.Interface(batch=-1)),
    ("padded", lambda: samplers.Interface("links", padded=True)),
    ("logits", lambda: samplers.Interface(logits=(1., 0.))),
    ("dtype", lambda: samplers.Interface(dtype="half")),
    ("draft", lambda: rows(one, draft=rows_module.draw_by_cdf, interface=samplers.Interface("parents"))),
    *(("like", partial(rows, one, like=like)) for like in (lambda p, tree, rng: 3, lambda p: None)),
    *(("cases", partial(rows, one, cases={"mine": bad})) for bad in BAD_RELATIONS),
    *(("draft", partial(rows, one, runs=20, draft=lambda q, rng, x=x: x)) for x in (4, -1, .5, None)),
    ("verify", lambda: rows(None)), ("verify", lambda: samplers.text_sampler(None, *pair(), 2)),
    ("gamma", lambda: samplers.text_sampler(one, *pair(), 0)), ("rule", lambda: samplers.rule_on_rows(None)),
    ("x", padded), ("q", lambda: rows_module.draw_by_cdf(np.zeros(3), np.random.default_rng(0))),
    ("target", lambda: samplers.certify_sampler(one_text, None, (0,))),
    ("sample", lambda: texts([1, 2])), ("seed", lambda: texts(one_text, seed=-1)),
    ("ctx", lambda: texts(one_text, ctx=(9,))), ("sample", lambda: texts(samplers.rule_on_rows(reject))),
    ("sample", lambda: texts(lambda ctx, n, rng: len(3)), "<lambda> raised TypeError: object of type 'int'"),
    ("sample", lambda: texts(lambda ctx, n, rng: iter((0, 1))), "got a tuple_iterator, wanted a list or an"),
    *(("stop", partial(texts, one_text, stop=bad)) for bad in ("3", 3, (99,), None)),
    *(("special", partial(rows, one, special=bad)) for bad in (3, ("a",), "1")),
    *(("logits", partial(samplers.Interface, logits=bad)) for bad in (1., ("a", "b"), (1.,), (1., True))),
    ("siblings", lambda: samplers.Interface("parents", siblings=3)),
    *(("sample", partial(texts, lambda ctx, n, rng, bad=bad: bad)) for bad in ([.5, .5], [[1, 2, 3]])),
    *(("verify", partial(on_texts, lambda *a, bad=bad: bad)) for bad in ([-1, -1], "text")),
    # pasted rules
    *(("rule", partial(pasted, line), f"{words}.*certify_rows") for line, words in NOT_ENUMERATED.items()),
    ("rule", lambda: pasted("pass", "import torch\n"), "torch in line 1"),
    ("rule", lambda: pasted("return [0"), "line [23]: "),
    ("rule", lambda: pasted("pass", "1/0\n"), "raised ZeroDivisionError"),
    ("rule", lambda: judge.judge_rule("x = 1"), "got no function of that name, wanted rule"),
    *(("rule", partial(judge.judge_rule, text), "SystemExit") for text in (
        "raise SystemExit(0)", "def rule(p, q, draft, u): raise SystemExit(0)")),
    *(("rule", partial(judge.judge_rule, bad), "wanted a function") for bad in (None, 3)),
    ("rule", lambda: judge.judge_rule(counted, known=()), "random outside its rng, or keeps state"),
    ("rule", lambda: intervals.load_rule(3)), ("draw", lambda: judge.judge_rule(one, draw=3)),
    *(("draw", partial(judge.judge_rule, one, draw=lambda q, u, x=x: x), words) for x, words in (
        (4, "got token 4, wanted one from 0 to 3"), (-1, "got token -1"), (None, "raised TypeError"))),
    ("draw", lambda: judge.judge_rule(TWO_DRAWS, draw=min), "the text defines one too"),
    *(("cases", partial(judge.judge_rule, one, cases=bad)) for bad in ((), [3])),
]
