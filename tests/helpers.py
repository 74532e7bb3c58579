"Shared by the tests: markers, strategies for distributions and models, statistics with stated error rates"
import os, sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import numpy as np, pytest
from hypothesis import Phase, given, settings, strategies as st

# every statistical assertion states its false-alarm rate and the distance that it can detect
from specref import (Drafter, exact, greedy, iid, in_sequence, law_of, points, random_table, reject, rounds,
                     Streams, TableModel, Tree, warp, without_replacement)
from specref.certify.counts import (ALPHA as ALPHA, MISS as MISS, detectable as detectable, g_test as
                                    g_test, pooled as pooled)
from specref.core.rng import Uniforms
from published import Published, part_of

# of a test that may fail: the first failure is enough
first_failure = dict(report_multiple_bugs=False, phases=(Phase.explicit, Phase.reuse, Phase.generate))
LONG = bool(os.environ.get("SPECREF_LONG"))   # `make test-long`: the long statistics

def long(usual, more):
    "A size of a test: the usual one, or more of it in `make test-long`"
    return more if LONG else usual

def proves(*anchors):
    "Marks a test as the evidence for the theorems with these anchors"
    return pytest.mark.proves(*anchors)

def faithful(*systems, part=None, plain=()):
    """Marks a test of what these published systems have and a simpler one lacks. It takes as `subject` each
    system by its name, or the `part` of that name which their rows reach; and it must fail for each entry of
    `plain`, {what it is: another system's name, a change of the system, or a part}; a key (system, what it
    is) is for that system alone"""
    fails = pytest.mark.xfail(strict=True, raises=AssertionError)
    found = {s: part_of(s, part) if part else Published(s) for s in systems}
    if part and len({id(x) for x in found.values()}) == 1: found = {systems[0]: found[systems[0]]}
    shown = [pytest.param(x, id="as published" if len(found) == 1 else f"{s}-as published")
             for s, x in found.items()]
    for s, what, _ in for_each(systems, dict(plain)): STAND_INS.setdefault(s, {})[what] = None
    for s, what, x in for_each(found, dict(plain)):
        name = f"fails for {what}" if len(found) == 1 else f"{s}-fails for {what}"
        shown.append(pytest.param(plainer(s, x, part), id=name, marks=fails))
    given = pytest.mark.parametrize("subject", shown)
    return lambda test: pytest.mark.faithful(*systems)(given(test))

STAND_INS = {}   # system: for what its tests must fail, of the test modules that are loaded

def plainer(system, stand_in, part):
    "What a test takes instead of the published: a part as it is, another system, a changed system"
    if part: return stand_in
    if isinstance(stand_in, str): return Published(system, instead=stand_in)
    return Published(system, stand_in)

def for_each(systems, plain):
    for key, stand_in in plain.items():
        of, what = key if isinstance(key, tuple) else (None, key)
        yield from ((s, what, stand_in) for s in systems if of in (None, s))

def examples(n, *strategies, **how):
    "A test of `n` examples of these strategies"
    return lambda test: settings(max_examples=n, **how)(given(*strategies)(test))

def refuses(name, f, *args, **kw):
    "Assert that `f` raises a `ValueError` for bad input, whose message starts with the argument's name"
    with pytest.raises(ValueError, match=f"^{name}: "): f(*args, **kw)

# Distributions: small whole numbers as fractions, with zeros, ties and point masses

def laws(V, top=6):
    weights = st.lists(st.integers(0, top), min_size=V, max_size=V).filter(any)
    return weights.map(lambda w: exact(*w))

sizes = st.integers(2, 5)

def split(p, q):
    "Two distributions with disjoint supports: one on the even tokens, the other on the odd ones"
    even = np.arange(len(p)) % 2 == 0
    return exact(*np.where(even, p + exact(1)[0], 0 * p)), exact(*np.where(even, 0 * q, q + exact(1)[0]))

KINDS = {
    "independent": lambda p, q: (p, q),
    "equal": lambda p, q: (p, p),
    "near": lambda p, q: (p, (10**15 * p + q) / Fraction(10**15 + 1)),
    "disjoint": split,
    "subset": lambda p, q: ((p + q) / Fraction(2), q),
    "superset": lambda p, q: (p, (p + q) / Fraction(2)),
    "reversed": lambda p, q: (p, p[::-1]),
    "one-hot p": lambda p, q: (greedy(p), q),
    "one-hot q": lambda p, q: (p, greedy(q)),
}
kinds = st.sampled_from(sorted(KINDS))

@st.composite
def pairs(draw, sizes=sizes):
    "Two distributions on one vocabulary, related in one of the ways of `KINDS`"
    V = draw(sizes)
    return KINDS[draw(kinds)](draw(laws(V)), draw(laws(V)))

# Models: every distribution depends on the whole text

seeds = st.integers(0, 10**6)

def related_pair(kind, V, seed, zeros=True):
    "A target and a draft whose distributions after every text are related in the way `kind`"
    a, b = random_table(V, 2*seed, zeros), random_table(V, 2*seed + 1, zeros)
    both = lambda k: TableModel(V, lambda text: KINDS[kind](a.law(text), b.law(text))[k])
    return both(0), both(1)

def models(V=3):
    "Pairs of a target and a draft on `V` tokens, the tables with and without zeros"
    return st.builds(related_pair, kinds, st.just(V) if isinstance(V, int) else V, seeds, st.booleans())

def constant(*weights): return TableModel(len(weights), lambda text: exact(*weights))

def cold(model):
    "The model at temperature 0"
    return TableModel(model.V, lambda text: greedy(model.law(text)))

def tempered(model, temperature):
    "The model in float64, at a temperature"
    def f(text):
        with np.errstate(divide="ignore"): z = np.log(model.law(text).astype(float))
        return warp(z, temperature)
    return TableModel(model.V, f)

def round_tokens(target, drafter, verify=reject, ctx=(0,)):
    "The distribution of the number of tokens of a round"
    return law_of(lambda rng: len(next(rounds(target, drafter, verify, ctx, rng)).tokens))

CANON = exact(4, 3, 2, 1), exact(1, 2, 3, 4)   # the four-token pair of the book

def killer():
    "A target and a draft on three tokens that depend on the last: the pair that detects every mutant tried"
    def first_order(root, after):
        turn = lambda k: np.roll(exact(*after), -k)
        return TableModel(3, lambda text: exact(*root) if len(text) == 1 else turn(text[-1]))
    return first_order((1, 1, 2), (3, 2, 1)), first_order((2, 1, 1), (6, 1, 23))

def tiny(V=3, layers=2, seed=0):
    "A random Llama in double precision, with weights so large that every text has its own distribution"
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=None)).double()
    with torch.no_grad(): [w.mul_(24) for w in model.parameters() if w.dim() > 1]
    return model

def at_once(*calls):
    "The results of calls in as many threads, which change places after every few instructions"
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            return [x.result() for x in [pool.submit(call) for call in calls]]
    finally: sys.setswitchinterval(usual)

# Randomness, recorded

class Recorder(Uniforms):
    "An rng with the uniforms of `rng`, which it records in `table` at a tape's addresses"
    def __init__(self, rng, table, address=()): self.rng, self.table, self.address = rng, table, address
    def at(self, i):
        sides = zip(self.rng.at(i), ("draft", "verify"))
        return Streams(*(Recorder(rng, self.table, (*self.address, i, name)) for rng, name in sides))
    def uniform(self, kind, at, key):
        where = (*self.address, kind, at) if key is None else ("key", key)
        assert key is not None or where not in self.table, f"two draws at {where}"
        return self.table.setdefault(where, self.rng.uniform(kind, at, key))

# Trees: shapes, and drafts with true edges

def shapes(most=8):
    "Parent lists: node 0 and up to `most` more, each below an earlier one"
    earlier = lambda n: st.tuples(*(st.integers(0, i) for i in range(n)))
    return st.integers(0, most).flatmap(earlier).map(lambda parents: [-1, *parents])

def added(ctx, nodes):
    "The tree of (parent, token), none of them offered"
    tree = Tree(ctx)
    for u, x in nodes: tree.add(u, x)
    return tree

def chain(ctx, tokens): return added(ctx, enumerate(tokens))

DRAWS = {
    "iid": iid,
    "without replacement": without_replacement,
    "points": lambda q: points(np.argsort(-q, kind="stable"), len(q), exact=True),
    "mixed": lambda q: in_sequence(points([len(q) - 1], len(q), exact=True), without_replacement(q), iid(q),
                                   without_replacement(q)),
}
draws = st.sampled_from(sorted(DRAWS))

@dataclass(frozen=True)
class Plan(Drafter):
    "A drafter with true edges: a step gives children by a draw of `model`, or adds a probe"
    model: object
    steps: tuple   # (which node, name of a draw or "probe", how many)
    @property
    def models(self): return (self.model,)
    def __call__(self, ctx, rng):
        tree = Tree(ctx)
        for at, how, k in self.steps:
            offered = lambda i: all(tree.law[a] is not None for a in tree.ancestors(i))
            free = [i for i in range(len(tree)) if i not in tree.draw and offered(i)]
            if how == "probe": tree.add(at % len(tree), at % self.model.V)
            else: tree.grow(u := free[at % len(free)], DRAWS[how](self.model.law(tree.text(u))), rng, k)
        return tree

def plans(most=3, k=2, probes=True):
    "Steps of a `Plan`: chains, stars and trees between them, some with probes"
    how = st.sampled_from(sorted(DRAWS)*2 + ["probe"]*probes)
    step = st.tuples(st.integers(0, 5), how, st.integers(1, k))
    return st.lists(step, min_size=2, max_size=most).map(tuple)
