"Chapter 60: the table of systems and its certificates"
from dataclasses import replace

import numpy as np
import pytest

from helpers import random_table, refuses
from specref.certify.certificates import Certificate, certificate
from specref.core.rng import Seeded
from specref.core.loop import System, Verdict
from specref.verify.reject import Chain
from specref.app.systems import LOSSY, SYSTEMS


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


@pytest.mark.parametrize("name", ["REST", "DDTree", "SuffixDecoding", "SAM"])
def test_a_recipe_refuses_a_past_that_is_none(name):
    "No text, an empty one, what is no text, tokens of another vocabulary; a gamma that is none: each by name"
    draft = random_table(3, 1)
    for bad in ((), ((),), 5, (5,), ((7,),), (("a",),)): refuses("past", SYSTEMS[name], draft, past=bad)
    for bad in (0, -1, 1.5, "4"): refuses("gamma", SYSTEMS[name], draft, gamma=bad)
    refuses("gamma", SYSTEMS["Sequoia"], draft, gamma="4")
    assert SYSTEMS[name](draft, past=[np.array([0, 1, 2]), [1, 2]]).name


def test_the_automaton_copies_in_its_certificate():
    "With drafts of two its threshold is two, so that what is certified is a copy and not its substitute alone"
    sam = SYSTEMS["SAM"](random_table(3, 1), gamma=2, exact=True).drafter.first
    assert sam.threshold == 2 and len(sam((0, 1, 2, 0, 1), Seeded(0).at(0).draft)) == 3 and SYSTEMS["SAM"](random_table(3, 1)).drafter.first.threshold == 5


def test_names_differ(): assert len({build(random_table(3, 1)).name for build in SYSTEMS.values()}) == len(SYSTEMS)


def test_a_wrong_system_is_not_certified():
    "A judge that keeps whatever is offered is found out, and the certificate says so"
    def credulous(p, tree, rng, i=0):
        for c in tree.children(i): return credulous(p, tree, rng, c)
        return Verdict(i, rng.pick(p[i]))
    found = certificate(lambda draft, **kw: System("credulous", Chain(draft, 2), credulous))
    assert not found.exact and str(found).startswith("LAW IS WRONG") and str(replace(found, exact=True)).startswith("law = target law")
    assert isinstance(found, Certificate) and found.paths > found.texts > 0
