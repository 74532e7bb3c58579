"Counts of whole continuations against the target distribution; each assertion states error and power"
from collections import Counter
from itertools import islice
from zlib import crc32

import pytest

from helpers import g_test, random_table, tempered
from specref.core.registry import SYSTEMS
from specref.core.loop import Verdict, loop_law, rounds
from specref.core.rng import Seeded, Streams, Uniforms, numpy_generator, tv_outcomes
from specref.core.target import target_law
from specref.draft.parallel import lines_of

N, FAR, CTX = 9_000, .1, (0, 1, 0)   # most runs of a system, and the distance that its test detects
SHAPES = (2,), (3, 1), (2, 2)

class OneGenerator(Uniforms):
    "Independent numbers from one generator, and one for each key: cheaper than `Seeded`"
    def __init__(self, generator): self.generator, self.keyed = generator, {}
    def at(self, i): return Streams(self, self)
    def uniform(self, kind, at, key):
        u = self.generator.random()
        return u if key is None else self.keyed.setdefault(key, u)

def three_tokens(system, target, rng):
    "The tokens of `generate`, by its loop alone: no ledger, no log-probabilities"
    text = ()
    for round in rounds(target, system.drafter, system.verify, CTX, rng):
        text += round.tokens
        if len(text) >= 3: return text[:3]

def counts(system, target, seed, n):
    "Counts of `n` texts, each a run of its own; for the first 50 seeds `generate` emits the same"
    for seeded in (Seeded(seed, (0, run)) for run in range(50)):
        again = Seeded(seed, seeded.address)
        assert system(target, CTX, 3, seeded).tokens == three_tokens(system, target, again)
    generator = numpy_generator(seed)
    return Counter(three_tokens(system, target, OneGenerator(generator)) for _ in range(n))

def enough(want, most=N, distance=FAR):
    "The fewest runs, in steps of 500 up to `most`, whose counts detect `distance` from `want`"
    one = max(want, key=want.get)
    return next((n for n in range(500, most, 500) if g_test({one: n}, want).tv <= distance), most)

def recovered_from_p(verify):
    "The nearest wrong relative: after a rejection the token is sampled from p instead of the residual"
    def wrong(p, tree, rng):
        verdict = verify(p, tree, rng)
        recovered = tree.children(verdict.node) or ahead_rejected(tree, verdict)
        return Verdict(verdict.node, rng.pick(p[verdict.node])) if recovered else verdict
    return wrong

def ahead_rejected(tree, verdict):
    "Is the token another one than was written ahead in its place?"
    line, place = lines_of(tree)[0], verdict.node + 1
    return line is not tree and place < len(line) and verdict.token != line.token[place]

def cases(name):
    "Tables, temperatures and drafts of a system's own: target, system, distribution of three tokens, a seed"
    case = numpy_generator(17, crc32(name.encode()))
    while True:
        temperature, gamma, shape = case.uniform(.7, 2), int(case.integers(1, 5)), SHAPES[case.integers(3)]
        pair = (random_table(3, int(case.integers(10**6)), zeros=bool(case.integers(2))) for _ in range(2))
        target, draft = (tempered(model, temperature) for model in pair)
        system = SYSTEMS[name](draft, gamma=gamma, shape=shape)
        yield target, system, target_law(target, CTX, 3), int(case.integers(2**40))

def wrong_law(target, system, k):
    "The distribution of the nearest wrong relative; None where it has more paths than are enumerated"
    try: return loop_law(target, system.drafter, recovered_from_p(system.verify), CTX, k)
    except ValueError: return None

@pytest.mark.parametrize("name", SYSTEMS)
def test_three_tokens(name):
    """On float tables counts of three tokens fit the target's distribution. The distance that the test sees
    is at most that of the nearest wrong relative in the first token, whose expected counts it rejects; in all
    three where the first round drafts nothing"""
    for target, system, want, seed in islice(cases(name), 40):
        tree = system.drafter(CTX, Seeded(0))
        k = 1 if any(law is not None for law in tree.law[1:]) else 3
        first = target_law(target, CTX, k)
        wrong = wrong_law(target, system, k)
        if wrong and (off := tv_outcomes(wrong, first)) >= FAR: break
    else: assert name == "autoregressive"   # which has no draft to reject
    seen = counts(system, target, seed, n := enough(want))
    report, one = g_test(seen, want), Counter()
    for text, count in seen.items(): one[text[:k]] += count
    print(f"{system.name:24} {report}; the wrong relative is off by {off:.3f}")
    assert report.fits and report.tv <= FAR and g_test(one, first).fits, report
    if off >= FAR: assert not g_test({y: round(n * w) for y, w in wrong.items()}, first).fits
