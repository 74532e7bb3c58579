"Chapter 60: the table of systems and its certificates"
from fractions import Fraction
from dataclasses import replace
from functools import partial

import pytest

from helpers import random_table
from book import references
from specref import certificate, certify_system, Chain, LOSSY, Seeded, System, SYSTEMS, TRAINED, Verdict
from specref.core.registry import BYTE_SYSTEMS, TABLES, declared
from specref.core.tree import likeliest_points
from specref.verify.lossy import GreedyModel

LOSSLESS = [*SYSTEMS, *BYTE_SYSTEMS, *TRAINED]

@pytest.mark.parametrize("name", LOSSLESS)
def test_every_system_decodes(name):
    "The notebook has the certificate of each"
    system = declared(name).build(random_table(3, 1))
    assert isinstance(system, System)
    assert len(system(random_table(3, 2), (0, 1), 5, Seeded(0))) == 5

def test_papers_are_in_the_bibliography():
    "Under their keys; the name of every declaration is its own"
    assert {key for table in TABLES for entry in table.entries() for key in entry.cites} <= references()
    assert len({name for table in TABLES for name in table}) == sum(map(len, TABLES))

def test_a_system_is_declared_where_it_is_used(monkeypatch):
    "It is in its table, last, and in no other; a chapter's own comes from its module"
    monkeypatch.setattr(LOSSY, "declared", {**LOSSY.declared})
    LOSSY.declare("mine", lambda name, cites: lambda draft: (name, cites, draft), "cai2024", near=GreedyModel)
    assert [*LOSSY][-1] == "mine" and LOSSY["mine"](1) == ("mine", ("cai2024",), 1) and "mine" not in SYSTEMS
    assert declared("mine") is LOSSY.entry("mine") and LOSSY.entry("mine").module == "__main__"
    assert declared("REST").module == "specref.draft.datastore" and len({*LOSSY}) == len(LOSSY)
    for absent in "nothing", "Medusa":
        with pytest.raises(KeyError): SYSTEMS[absent]

def draw_of(name, temperature):
    drafter = declared(name).build(random_table(5, 3, zeros=False), temperature=temperature).drafter
    return getattr(drafter, "draw", None)

DRAWN = [name for name in LOSSLESS if draw_of(name, 0) is likeliest_points is not draw_of(name, 1.)]

@pytest.mark.parametrize("name", DRAWN)
def test_a_sampled_tree_at_temperature_0_has_the_likeliest_tokens(name):
    "Each draft token is a point mass, the likeliest untried by the unwarped row; the system is still exact"
    cold, draft = partial(declared(name).build, temperature=0), random_table(5, 3, zeros=False)
    assert certificate(cold, V=4, n=2, seeds=(3, 4), stop=()).exact
    tree = cold(draft).drafter((0,), Seeded(0))
    for u in range(len(tree)):
        ranked = sorted(range(5), key=lambda x: -draft.law(tree.text(u))[x])
        kids = tree.children(u)
        assert [tree.token[c] for c in kids] == ranked[:len(kids)]
        assert all(tree.law[c][tree.token[c]] == 1 for c in kids)
    assert max(len(tree.children(u)) for u in range(len(tree))) > 1

def test_ranked_trees_are_ranked_by_the_unwarped_rows():
    "A draft whose rows are point masses still has second choices"
    table = random_table(5, 3, zeros=False)
    for name in "EAGLE-2 tree", "OPT-Tree":
        systems = (SYSTEMS[name](draft, exact=True) for draft in (GreedyModel(table), table))
        a, b = (system.drafter((0,), Seeded(0)) for system in systems)
        assert a == b and len(a.children(0)) > 1

@pytest.mark.parametrize("name", LOSSY)
def test_lossy_systems_are_not_certified(name):
    """They are not lossless, by a total variation above .01 from what they approximate: the greedy rules
    from the greedy text, after some context"""
    target, draft = LOSSY.entry(name).near(random_table(3, 1)), random_table(3, 2)
    system = LOSSY[name](draft, gamma=2, shape=(2, 1), exact=True)
    found = [certify_system(system, target, (0, x), 3) for x in range(3)]
    assert max(f.tv for f in found) > .01 and not all(f.passes for f in found)
    assert name not in SYSTEMS

def test_the_certificate_of_the_automaton_copies():
    "With drafts of two its threshold is two, so the certificate covers copies, not the fallback alone"
    sam = SYSTEMS["SAM"](random_table(3, 1), gamma=2, exact=True).drafter.first
    assert sam.threshold == 2 and len(sam((0, 1, 2, 0, 1), Seeded(0).at(0).draft)) == 3
    assert SYSTEMS["SAM"](random_table(3, 1)).drafter.first.threshold == 5

def test_a_certificate_names_the_shapes_that_were_verified():
    "Sequoia's has siblings, at the options that its chapter declares; with two nodes it would be a chain"
    sequoia, plain = SYSTEMS.entry("Sequoia"), SYSTEMS["speculative sampling"]
    assert certificate(sequoia.build, **sequoia.certified, n=2).trees == "a tree of 4 nodes"
    assert certificate(sequoia.build).shapes == certificate(plain).shapes == ((-1, 0, 1),)
    found = certificate(plain)
    def words(*shapes): return replace(found, shapes=shapes).trees
    assert (found.trees, words((-1,))) == ("a chain of 2", "no tree")
    assert words((-1,), (-1, 0)) == "2 shapes, up to 1 node" and words((-1, 0, 0)) == "a tree of 2 nodes"

def test_a_wrong_system_is_not_certified():
    "A verifier that accepts every draft"
    def accept_all(p, tree, rng): return Verdict(len(tree) - 1, rng.pick(p[len(tree) - 1]))
    found = certificate(lambda draft, **kw: System("accept all", Chain(draft, 2), accept_all))
    assert not found.exact and str(found).startswith("OUTPUT DISTRIBUTION DIFFERS")

def test_weights_below_zero_do_not_cancel():
    "Half of the drafts are accepted and the rest drawn from 2p - q, which is no distribution; the mean is p"
    def signed(p, tree, rng):
        if rng.coin(Fraction(1, 2), at=1): return Verdict(1, rng.pick(p[1], at=1))
        return Verdict(0, rng.pick(2*p[0] - tree.law[1], at=0))
    with pytest.raises(ValueError, match="probabilities that sum to"):
        certificate(lambda draft, **kw: System("signed", Chain(draft, 1), signed))
