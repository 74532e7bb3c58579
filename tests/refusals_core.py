"Core: invalid arguments of the first chapters, each call with the name of the argument"
from fractions import Fraction
from functools import cache

import numpy as np

from specref import (add_paths, as_law, best_gamma, Branching, capped_geometric, Chain, Costs, d_lk, Drafter,
                     DynamicTree, exact, explain, generate, generate_texts, Generation, iid, law_of, Ledger,
                     loop_law, match, mean_of, measure, NgramModel, no_draft, normalize, one_hot, overlap,
                     points, random_table, Rates, reject, residual, rounds, Rows, Seeded, speedup, StaticTree,
                     System, SYSTEMS, TableModel, Tape, target_law, trace, Tree, tv, Verdict, warp,
                     without_replacement)
from specref.core.check import as_tokens, check_switch
from specref.core.loop import RoundCounts
from specref.core.rng import merged_law, verdict_tape
from specref.core.tree import draw_tree, from_choices, from_links, to_choices, to_links
from specref.draft.cascade import Nested
from specref.draft.length import ScheduledChain
from specref.speed.causes import reprice
from specref.speed.cost import (Machine, ModelSize, arithmetic_factor, llama_size,
                                pass_seconds)
from specref.verify.reject import accepted_at_least
from specref.verify.traversal import best_rule, mean_accepted

nan, inf = float("nan"), float("inf")
half, FOUR = exact(1, 1), exact(1, 1, 1, 1)

def each(name, f, *values):
    "One row for each invalid value of the argument of `f` with that name"
    return [(name, lambda x=x: f(x)) for x in values]

@cache
def table(V=3): return random_table(V, 1)

def run(**kw):
    usual = dict(target=table(), drafter=no_draft, verify=reject, ctx=(0,), n=3, rng=Seeded(0))
    return generate(**{**usual, **kw})

def play(**kw):
    "The same by `rounds`"
    usual = dict(target=table(), drafter=no_draft, verify=reject, ctx=(0,), rng=Seeded(0))
    return rounds(**{**usual, **kw})

def decode(name, *values): return each(name, lambda x: run(**{name: x}), *values)

def texts(**kw):
    usual = dict(target=table(), drafter=no_draft, verify=reject, prompts=[(0,), (1,)], n=3, seeds=[0, 1])
    return generate_texts(**{**usual, **kw})

def bounded_table():
    "A target with six positions"
    target = random_table(3, 1)
    target.most = 6
    return target

def until_tails(rng):
    "A program without a bound on its draws"
    while rng.coin(1, of=2): pass

def one_child(q):
    "A tree with one child of node 0, drawn from `q`"
    tree = Tree((0,))
    tree.add(0, 1, q)
    return tree

def ledger(drafted, seconds=(1., 1., 1.), rounds=2):
    "A ledger of equal rounds"
    counts = RoundCounts(drafted, drafted, 0, 1, dict(zip(("draft", "target", "verify"), seconds)))
    return Ledger([counts] * rounds)

LAWS = [
    *each("mine", lambda p: as_law(p, "mine"), [1.5, -.5], [nan, 1], [inf, 0], [-inf, 1], [.5, .6],
          [], [[1.]], 1., exact(1, 1) * Fraction(3, 2), np.array([Fraction(3, 2), Fraction(-1, 2)]),
          exact(1, 1) * Fraction(10**9 + 1, 10**9)),
    ("p", lambda: as_law(exact(1, 1, 1), size=2), "wanted 2"),
    *each("q", lambda f: f(exact(1, 1, 1), half), overlap, d_lk, tv, residual),
    *each("weights", lambda w: exact(*w), [], [0, 0], [2, -1], [nan], [inf], [None]),
    *each("x", lambda x: one_hot(x, 3), -1, 3),
    *each("w", lambda w: normalize(np.array(w)), [0., 0.], [nan, 1], [-1, 3], [inf, 3]),
    *each("logits", warp, [], [[0., 1.]], [nan, 0], [inf, 0], [-inf, -inf]),
    *each("temperature", lambda t: warp([0., 1.], t), -1, inf, nan),
    *each("top_k", lambda k: warp([0., 1.], 1, k), 0, 1.5, nan),
    *each("top_p", lambda t: warp([0., 1.], 1, None, t), 0, 1.1, nan, True),
]

RNG = [
    *each("seed", Seeded, -1, 1.5, "7", None, True),
    *each("law", lambda p: Seeded(0).pick(np.array(p)), [0., 0.], [nan, nan], [1, nan, 0], [inf, 1.]),
    ("table", lambda: Tape({}).coin(.5, at=0)),
    *each("table", lambda draw: draw(verdict_tape([.5], [.5])), lambda t: t.coin(1, at=9),
          lambda t: t.pick(half, at=2), lambda t: t.pick(half, key=1), lambda t: t.at(0).draft.coin(1, at=0)),
    ("limit", lambda: law_of(lambda rng: rng.pick(exact(1, 1, 1)), 2), "walked 2 paths, 66.7% of the mass"),
    ("limit", lambda: mean_of(until_tails, 50), "walked 50 paths"),
    ("limit", lambda: law_of(lambda rng: tuple(rng.coin(1, of=3) for _ in range(2000)), 100), "100 forks"),
    ("limit", lambda: merged_law(lambda s, rng: (s + rng.coin(1, of=2)) % 2, 0, lambda s: False, 100)),
    ("limit", lambda: merged_law(lambda s, rng: rng.pick(FOUR) + s + 1, 0, lambda s: s > 99, 100)),
]

TREES = [
    *each("q", lambda draw: draw([.5, .6]), iid, without_replacement), ("x", lambda: points([3], 3)(())),
    *each("parent", lambda u: Tree((0,)).add(u, 0), -1, 1),
    *each("token", lambda x: Tree((0,)).add(0, x, exact(1, 0, 1)), -1, 1, 3),
    *each("law", lambda law: Tree((0,)).add(0, 1, law), [-1., 4.], [.5, .6], [nan, 1.], [[.5, .5]]),
    *each("draw", lambda q: Tree((0,)).grow(0, lambda earlier: np.array(q), Seeded(0)), [.5, .6], [2., 3.]),
    *each("node", lambda u: Tree((0,)).grow(u, iid(half), Seeded(0)), -1, 1),
    *each("choices", from_choices, [(0,), (1, 0)], [(0, 0)], [(0,), (0,), (0, 0)], [(), (0,)]),
    *each("child", lambda links: from_links(*links), ([1, 0], [-1, -1]), ([2, -1], [-1, -1]),
          ([1, -1], [-1, 1]), ([1, 1], [-1, -1]), ([-1, -1], [-1, -1])),
    *each("sibling", lambda links: from_links(*links), ([1, -1, -1], [-1, 2]), ([], [])),
    *each("parent", to_links, [-1, 5], [-1, 2, 0], []), ("parent", lambda: to_choices([-1, 5])),
]

TARGETS = [
    *each("p[1]", lambda bad: Rows(lambda i: bad, 3, 2)[1], [.5, .6], [nan, 1.], [1.], [2., -1.]),
    *each("V", lambda V: TableModel(V, None), 0, -1),
    *each("seed", lambda seed: random_table(3, seed), -1, .5),
    ("guesses", lambda: add_paths(Tree((0,)), [(1, 3)], 3, Seeded(0))),
    *each("f(text)", lambda bad: TableModel(2, lambda text: bad).law((0,)), [.5, .6], [1.]),
    ("V", lambda: NgramModel([], 0, 1)),
    *each("ids", lambda ids: NgramModel(ids, 3, 2), [3], [-1, 0], [.5], [[0, 1]]),
    *each("order", lambda k: NgramModel([0], 3, k), 0, 1.5), ("order", lambda: NgramModel([0], 1000, 7)),
    *each("ctx", lambda ctx: target_law(table(), ctx, 1), (5,), ()),
    ("n", lambda: target_law(table(), (0,), -1)),
    ("stop", lambda: target_law(table(), (0,), 1, stop=[3]), "whole numbers from 0 to 2"),
    *each("text", lambda xs: as_tokens(3, text=xs), np.zeros((1, 2), int), np.zeros(2), [3], [-1]),
]

MINE = System("mine", no_draft, reject)
STOPS = 2, ["a"], [3], [-1], {"eos": 1}, "."

class Unmade(Drafter):
    "A drafter whose model is none"
    models = (3,)
    def __call__(self, ctx, rng): return Tree(ctx)

class Forgetful(Unmade):
    "Learns, and does not return what it learned"
    models = ()
    def learn(self, round): pass

def each_door(drafter=no_draft, verify=reject):
    "The parts of the loop, with a part that returns something wrong"
    yield lambda: run(drafter=drafter, verify=verify)
    yield lambda: next(play(drafter=drafter, verify=verify))
    yield lambda: loop_law(table(), drafter, verify, (0,), 1)
    yield lambda: System("s", drafter, verify)(table(), (0,), 1, Seeded(0))

def elsewhere(ctx, rng): return Tree((9, 9))
RETURNED = [
    *(("drafter", f, r"got a tree after \(9, 9\) from elsewhere, wanted a Tree after \(0,\)")
      for f in each_door(elsewhere)),
    *(("drafter", f, r"got \[1\] from <lambda>, wanted a Tree") for f in each_door(lambda ctx, rng: [1])),
    ("learn", lambda: run(drafter=Forgetful()), "got None, wanted a function"),
    *(("drafter", lambda f=f: f(table(), elsewhere, (0,))) for f in (
        lambda p, d, ctx: mean_accepted(p, d, reject, ctx), best_rule)),
    ("verify", lambda: mean_accepted(table(), no_draft, lambda *_: None, (0,))),
    ("drafter", lambda: run(ctx=(0,)*9, drafter=elsewhere), "9 tokens that end in"),
    *(("verify", f, "from <lambda>, wanted a Verdict: a node from 0 to 0 and a token")
      for bad in (None, 3, Verdict(1, 0), Verdict(-1, 0), Verdict(0, 3), Verdict(0, -1), Verdict(0, .5))
      for f in each_door(verify=lambda p, tree, rng, bad=bad: bad))]
VERIFIERS = [   # name, what was given, words
    *(("verify", bad, r"wanted a function \(p, tree, rng\) -> Verdict, such as reject")
      for bad in (None, "reject", Chain(table(), 2), Chain, no_draft, table())),
    ("verify", MINE, r"system.drafter, verify=system.verify"),
    *(("verify", SYSTEMS[name], r"build\(draft\).verify") for name in ("speculative sampling", "Jacobi"))]
LOOP = [
    *decode("ctx", (), (3,), (-1,), (.5,)), *decode("n", -1, 1.5, None),
    *decode("drafter", Chain(table(4), 2), Branching(table(2), (2,)), None, 3),
    *decode("target", None, reject), *each("stop", lambda stop: run(stop=stop), *STOPS),
    *each("stop", lambda stop: texts(stop=stop), *STOPS),
    *each("stop", lambda stop: loop_law(table(), no_draft, match, (0,), 1, stop), *STOPS),
    *decode("watch", 3, lambda: None), *each("show", lambda show: draw_tree(Tree((0,)), show=show), 3, None),
    ("show", lambda: trace(Generation(()), show=3)), *each("axes", ledger(2).plot, 3, (3, 4), ()),
    ("drafter", lambda: run(drafter=table()), "wanted a drafter that calls it, such as Chain"),
    *[(name, f, words) for start in (run, play) for name, f, words in (
        ("drafter", lambda start=start: start(drafter=MINE), "system.drafter, verify=system.verify"),
        ("drafter", lambda start=start: start(drafter=lambda draft, **kw: MINE), r"build\(draft\).drafter"),
        ("rng", lambda start=start: start(rng=0), r"got 0, wanted an rng, such as Seeded\(0\)"),
        ("rng", lambda start=start: start(rng=Seeded), "got the class Seeded"),
        ("drafter", lambda start=start: start(drafter=Chain), r"got the class Chain, .*such as Chain\("),
        ("drafter", lambda start=start: start(drafter=reject), r"a function \(ctx, rng\) -> Tree"),
        ("drafter", lambda start=start: start(drafter=SYSTEMS["Jacobi"]), r"build\(draft\).drafter"),
        *((name, lambda start=start, bad=bad: start(verify=bad), words) for name, bad, words in VERIFIERS),
        ("target", lambda start=start: start(target=MINE), "a subclass of Target"),
        ("ctx", lambda start=start: start(ctx=[3]), "got token 3"))],
    ("n", lambda: run(target=bounded_table(), n=7), "at most 6 after a context of 1 tokens: the model reads"),
    *RETURNED,
    *each("model", lambda model: Chain(model, 3), "small", None, 3, MINE, Chain(table(), 1), TableModel),
    *each("model", lambda make: make(None), lambda model: Branching(model, (1,)), DynamicTree, ScheduledChain,
          lambda model: StaticTree(model, (-1, 0))),
    ("drafter", lambda: run(drafter=Unmade()), r"Unmade\(\) with 3 as its model, wanted a subclass of"),
    ("verify", lambda: Nested(table(), 2, no_draft, Chain(table(), 1))),
    *((name, lambda bad=bad: System("s", no_draft, bad), words) for name, bad, words in VERIFIERS),
    ("drafter", lambda: System("s", Chain, reject), "got the class Chain"),
    ("name", lambda: System(3, no_draft, reject)),
    *each("cites", lambda cites: System("s", no_draft, reject, cites), "x2023", (3,)),
    *each("seeds", lambda seeds: texts(seeds=seeds), [0], 3, None),
    *each("paths", lambda x: check_switch(paths=x), "no", 0),
    *each("prompts", lambda prompts: texts(prompts=prompts), [(0,), (3,)], (0, 1), None),
    ("ctx", lambda: texts(prompts=[(0,), ()])),
    *each("seed", lambda seeds: texts(seeds=seeds), [0, -1], [0, True]),
    *each("drafter", lambda depth: run(target=bounded_table(), drafter=Chain(table(), depth)), 6, 7),
    ("drafter", lambda: loop_law(bounded_table(), Chain(table(), 6), match, (0,), 1), "below the 6 tokens"),
    ("drafter", lambda: loop_law(table(), Chain(table(4), 2), match, (0,), 1)),
    ("ctx", lambda: loop_law(table(), no_draft, match, (), 1)),
    ("n", lambda: loop_law(table(), no_draft, match, (0,), -1)),
    *each("gamma", lambda gamma: Chain(table(), gamma), 0, 1.5, "4", None),
    ("q", lambda: reject([exact(1, 1, 1)] * 2, one_child(half), Seeded(0))),
    *each("alpha", lambda a: capped_geometric(a, 2), -.1, 1.1, nan),
    ("gamma", lambda: capped_geometric(.5, -1)), ("i", lambda: accepted_at_least(table(), table(), (0,), -1)),
]

wrong_rates, wrong_costs = (-.1, 1.1, nan, "1", True), (-.1, nan, inf, "1", None, True)
wrong_numbers = 0, 1.5, "2", True
price = Costs({1: 1.}, .1)
SIZE, MACHINE = ModelSize(10, 2, 3, 5), Machine(4, 8)
COST = [
    *each("alpha", lambda a: speedup(a, 2, .1), *wrong_rates, np.array([.5])),
    *each("alpha", lambda f: f(1.1), lambda a: arithmetic_factor(a, 2, .1), lambda a: best_gamma(a, .1),
          price.best_gamma, lambda a: Rates.even(a, 2)),
    *each("c", lambda c: speedup(.5, 2, c), *wrong_costs), *each("c", lambda c: best_gamma(.5, c), -.1),
    *each("c_hat", lambda c: arithmetic_factor(.5, 2, c), -.1),
    *each("draft", lambda s: Costs({1: 1.}, s), -.1, inf),
    *each("rest", lambda s: Costs({1: 1.}, .1, s), -.1, inf),
    *each("gamma", lambda f: f(-.1), price.round, lambda g: price.speedup(2, g)),
    *each("tau", lambda tau: price.speedup(tau, 2), -.1, nan),
    *each("gamma", lambda g: speedup(.5, g, .1), *wrong_numbers),
    *each("gamma", lambda f: f(0), lambda g: arithmetic_factor(.5, g, .1), lambda g: Rates.even(.5, g),
          lambda g: Rates.emitting(1., g)),
    *each("most", lambda n: best_gamma(.5, .1, n), *wrong_numbers),
    *each("reading", lambda t: Costs(t, .1), {}, {2: 1.}, {1: 0.}, {1: -1.}, {1: 1., 2: inf}, {0: 1., 1: 1.},
          {1: 1., 2.5: 1.}, {1: "1"}, [1.], None),
    ("reading", lambda: best_gamma(.5, .1, 9, {2: 1.})), ("m", lambda: price.curve(.5)),
    ("tokens", lambda: pass_seconds(SIZE, MACHINE, 8, 0)), ("rows", lambda: pass_seconds(SIZE, MACHINE, -1)),
    ("batch", lambda: pass_seconds(SIZE, MACHINE, 8, 1, -1)),
    ("layers", lambda: llama_size(0, 8, 2, 1, 8, 8)),
    *each("tau", lambda tau: Rates.emitting(tau, 2), .9, 3.1, nan),
    *each("position", Rates, (), (.5, .6), (1.2,), (nan,), ("a",), .5),
    *each("ledger", lambda led: explain(led, price), Ledger(), ledger(0), None, []),
    *each("ledger", lambda f: f(Ledger()), explain, Rates.seen),
    *each("ledger", lambda s: explain(ledger(2, s)), (0, 0, 0), (1., 0., 1.), (-1., 1., 1.), (1., 1., -1.),
          (nan, 1., 1.)),
    *each("ledger", lambda led: reprice(led, price), None, 3),
    *each("costs", lambda costs: explain(ledger(2), costs), 3, {1: 1.}),
    ("costs", lambda: reprice(ledger(2), None)),
    *each("prompts", lambda x: measure(table(), table(), x), 5, None, []),
    *each("sizes", lambda x: measure(table(), table(), [(0,)], x), 3, (), (2, 3), (1, 0), (1, 1.5)),
    ("draft", lambda: measure(table(), table(4), [(0,)])),
    *each("ctx", lambda ctx: measure(table(), table(), [ctx]), (5,), ()),
    *each("repeats", lambda n: measure(table(), table(), [(0,)], repeats=n), 0, 1.5),
    ("gamma", lambda: measure(table(), table(), [(0,)], gamma=0)),
    *each("shared", lambda n: measure(table(), table(), [(0,)], shared=n), -1, 1.5, nan),
]

ROWS = LAWS + RNG + TREES + TARGETS + LOOP + COST
