"Chapter 28: the parts of wrong drafts with their correct pieces are correct; what breaks which sentence"
from dataclasses import replace

import pytest

from contracts import drafter_contract
from specref.certify import draft_mutants as wrong
from specref.certify.draft_mutants import DRAFT_MUTANTS, SENTENCES, ahead_from
from specref.certify.known import WIDE, keyed_coin, stated_as, submitted_while
from specref.core.rng import law_of
from specref.draft.parallel import Overlapped, lines_of
from specref.verify.reject import Chain

# Correct pieces in the parts

@pytest.mark.parametrize("drafter", [Chain(WIDE[1], 2), wrong.TWO_INNER.drafter, wrong.BY_STRING.drafter])
def test_a_draft_that_is_kept_whole_is_the_draft(drafter):
    "All tokens submitted, and a chain of a model stated with the model's rows: the same trees"
    def trees(draft): return law_of(lambda rng: draft((0,), rng).key()[:3])
    model = drafter.models[0]
    assert trees(submitted_while(drafter, lambda tree, node: True)) == trees(drafter)
    assert trees(stated_as(drafter, model.law)) == trees(drafter)

@pytest.mark.parametrize("setting", [wrong.TWO_AHEAD, wrong.FREE_AHEAD])
def test_the_verifier_from_parts_is_the_rule(setting):
    assert replace(setting, verify=ahead_from(wrong.own_coin)).law() == setting.law() == setting.want()

def test_keyed_coins_are_correct_with_their_own_keys():
    "One uniform number for each place in the text, not for the length of the prefix"
    def own_key(rng, ratio, place, alone): return keyed_coin(rng, ratio, place)
    assert replace(wrong.SHARED_NUMBER, verify=ahead_from(own_key)).law() == wrong.SHARED_NUMBER.want()

# What each breaks

def breaking(*sentences):
    found = [m for m in DRAFT_MUTANTS if m.breaks in sentences]
    return pytest.mark.parametrize("mutant", found, ids=lambda m: m.name)

@breaking(*SENTENCES)
def test_the_part_that_is_wrong_is_that_of_the_sentence(mutant):
    part = {"submitted": "drafter", "stated": "drafter", "verified": "verify", "committed": "loop"}
    replaced = {name for name in ("target", "drafter", "verify", "n", "ctx", "stop", "loop")
                if getattr(mutant.wrong, name) is not getattr(mutant.right, name)}
    assert replaced == {part[mutant.breaks]}

def edges(setting):
    "Each edge's text with what it states, in the tree or in a line written ahead"
    trees = law_of(lambda rng: setting.drafter(setting.ctx, rng))
    lines = [line for tree in trees for line in lines_of(tree)]
    return {(line.text(i), tuple(line.law[i])) for line in lines for i in range(1, len(line))}

@breaking("submitted")
def test_what_is_submitted_states_what_the_right_draft_states(mutant):
    "The fault is the selection alone: no edge states anything new"
    assert edges(mutant.wrong) <= edges(mutant.right)

@breaking("stated")
def test_a_misstated_draft_drops_nothing(mutant):
    "It has the shapes of the right draft"
    def shapes(s): return {tuple(tree.parent) for tree in law_of(lambda rng: s.drafter((0,), rng))}
    assert shapes(mutant.wrong) == shapes(mutant.right)

def test_the_contract_does_not_cover_what_is_written_ahead():
    "The first tree is empty, and its line is no edge yet: only the output is wrong"
    ahead = [m for m in DRAFT_MUTANTS if isinstance(m.wrong.drafter, Overlapped) and m.breaks == "submitted"]
    for m in ahead:
        drafter_contract(m.wrong.drafter, m.wrong.ctx)
        assert m.off > 0 and m.caught == ("law",)
    assert len(ahead) == 2
