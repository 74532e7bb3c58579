"Chapter 60: the table of systems and its certificates"
from dataclasses import replace

import pytest

from helpers import random_table
from specref.certify import Certificate, certificate
from specref.chance import Seeded
from specref.loop import System, Verdict
from specref.reject import Chain
from specref.systems import LOSSY, SYSTEMS


OURS = {"autoregressive", "generous tree"}   # no paper: plain decoding, and a rule that chapter 13 derives


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_certified(name):
    "The certificate says yes, in fractions, for V = 3 and 4; the system has a name, a drafter, a judge and its papers"
    build = SYSTEMS[name]
    assert certificate(build).exact and certificate(build, V=4, n=2, seeds=(3, 4), stop=()).exact
    system = build(random_table(3, 1))
    assert isinstance(system, System) and system.name and (system.cites or name in OURS)
    assert len(system(random_table(3, 2), (0, 1), 5, Seeded(0))) == 5


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_systems_say_so(name):
    "Not lossless, and not by a hair; they run, have papers, and no name of a lossless one"
    build = LOSSY[name]
    assert certificate(build).tv > .01 and not certificate(build).passes and name not in SYSTEMS
    system = build(random_table(3, 1))
    assert system.cites and len(system(random_table(3, 2), (0, 1), 5, Seeded(0))) == 5


def test_names_differ(): assert len({build(random_table(3, 1)).name for build in SYSTEMS.values()}) == len(SYSTEMS)


def test_a_wrong_system_is_not_certified():
    "A judge that keeps whatever is offered is found out, and the certificate says so"
    def credulous(p, tree, rng, i=0):
        for c in tree.children(i): return credulous(p, tree, rng, c)
        return Verdict(i, rng.pick(p[i]))
    found = certificate(lambda draft, **kw: System("credulous", Chain(draft, 2), credulous))
    assert not found.exact and str(found).startswith("LAW IS WRONG") and str(replace(found, exact=True)).startswith("law = target law")
    assert isinstance(found, Certificate) and found.paths > found.texts > 0
