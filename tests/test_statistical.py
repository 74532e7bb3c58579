"Counts of whole continuations against the target distribution; each assertion states error and power"
from collections import Counter

import pytest

from helpers import g_test, random_table, tempered
from specref.app.systems import SYSTEMS
from specref.core.loop import rounds
from specref.core.rng import Seeded, Streams, Uniforms, numpy_generator
from specref.core.target import target_law

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


def nearby(want, off):
    "A distribution at distance `off` from `want`: some of its mass moved to its rarest text"
    y = min(want, key=want.get)
    w = off / (1 - want[y])
    return {k: (1 - w)*v + w*(k == y) for k, v in want.items()}


@pytest.mark.parametrize("name", SYSTEMS)
def test_three_tokens(name):
    "On float tables counts of three tokens fit the target's distribution; one at distance .1 is rejected"
    case = numpy_generator(17, [*SYSTEMS].index(name))   # each system its own tables, temperature and drafts
    temperature, gamma, shape = case.uniform(.7, 2), int(case.integers(1, 5)), SHAPES[case.integers(3)]
    pair = (random_table(3, int(case.integers(10**6)), zeros=bool(case.integers(2))) for _ in range(2))
    target, draft = (tempered(model, temperature) for model in pair)
    want, system = target_law(target, CTX, 3), SYSTEMS[name](draft, gamma=gamma, shape=shape)
    seen = counts(system, target, int(case.integers(2**40)), enough(want))
    report = g_test(seen, want)
    print(f"{system.name:24} T = {temperature:.2f}  {report}")
    assert report.fits and report.tv <= FAR, report
    assert len(want) == 1 or not g_test(seen, nearby(want, FAR)).fits
