"Chapter 60: the table of systems and its certificates"
import pytest

from helpers import random_table
from specref.app.systems import LOSSY, SYSTEMS
from specref.certify.certificates import certificate
from specref.core.loop import System, Verdict
from specref.core.rng import Seeded
from specref.verify.reject import Chain

OURS = {"autoregressive", "mass-transfer tree"}   # no paper: plain decoding, a rule of chapter 13


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_certified(name):
    "For V = 4; the notebook has V = 3. The system has a drafter, a verifier and its papers"
    assert certificate(SYSTEMS[name], V=4, n=2, seeds=(3, 4), stop=()).exact
    system = SYSTEMS[name](random_table(3, 1))
    assert isinstance(system, System) and (system.cites or name in OURS)
    assert len(system(random_table(3, 2), (0, 1), 5, Seeded(0))) == 5


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_systems_are_not_certified(name):
    "They are not lossless, by a total variation above .01"
    found = certificate(LOSSY[name])
    assert found.tv > .01 and not found.passes and name not in SYSTEMS
    assert LOSSY[name](random_table(3, 1)).cites


def test_the_certificate_of_the_automaton_copies():
    "With drafts of two its threshold is two, so the certificate covers copies, not the fallback alone"
    sam = SYSTEMS["SAM"](random_table(3, 1), gamma=2, exact=True).drafter.first
    assert sam.threshold == 2 and len(sam((0, 1, 2, 0, 1), Seeded(0).at(0).draft)) == 3
    assert SYSTEMS["SAM"](random_table(3, 1)).drafter.first.threshold == 5


def test_a_wrong_system_is_not_certified():
    "A verifier that accepts every draft"
    def accept_all(p, tree, rng): return Verdict(len(tree) - 1, rng.pick(p[len(tree) - 1]))
    found = certificate(lambda draft, **kw: System("accept all", Chain(draft, 2), accept_all))
    assert not found.exact and str(found).startswith("OUTPUT DISTRIBUTION DIFFERS")
