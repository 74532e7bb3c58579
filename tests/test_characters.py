"Chapter 52: characters of token models, in fractions; speculation on them keeps the target's distribution"
from fractions import Fraction as F

import numpy as np, pytest
from hypothesis import strategies as st

from helpers import examples, proves, seeds
from specref import Chain, exact, law_of, loop_law, normalize, random_table, reject, TableModel, target_law
from specref.bytes.characters import CharacterModel, pick_cover
from specref.draft.vocab import END, TextTokenizer

VOCABULARIES = ("a", "b", "ab"), ("a", "b", "ab", "ba"), ("a", "aa", "ab", "b"), ("a", "b", "bab", END), (
    "a", "b", None, "ab")
vocabularies = st.sampled_from(VOCABULARIES).map(TextTokenizer)

def spelled(table, words):
    "The model without the tokens that have no string, whose probability the others share"
    def f(text): return normalize(table.law(text) * np.array([int(bool(s)) for s in words.strings]))
    return TableModel(words.V, f)

def beginnings(table, words, n):  # -> {string of n characters, or one that ended before: probability}
    "By every sequence of n tokens"
    found = {}
    for tokens, w in target_law(table, (0,), n).items():
        text = words.decode(tokens)
        text = text[:text.index(END) + 1] if END in text[:n] else text[:n]
        found[text] = found.get(text, 0) + w
    return found

@proves("thm-covers")
@examples(30, vocabularies, seeds, st.integers(1, 3))
def test_probabilities_by_enumeration(words, seed, n):
    table = spelled(random_table(words.V, seed, zeros=seed % 2 == 0 and None not in words.strings), words)
    view = CharacterModel(random_table(words.V, seed, zeros=False) if None in words.strings else table, words)
    wanted = beginnings(table, words, n)
    for text, w in wanted.items():
        assert view.probability(text) == w
        tokens = [x.tokens for x in view.covers(text)]
        assert len({*tokens}) == len(tokens)
        for x in view.covers(text):
            assert words.decode(x.tokens) == text + x.rest and len(words.decode(x.tokens[:-1])) < len(text)
    assert law_of(lambda rng: written(view, n, rng)) == wanted

def written(view, n, rng):
    text = ""
    while len(text) < n and not text.endswith(END): text += view.alphabet[rng.pick(view.law(text))]
    return text

def test_a_view_without_the_rest_is_another(monkeypatch):
    "Without the covers whose last token reaches beyond the string the numbers differ"
    words, table = TextTokenizer(VOCABULARIES[1]), random_table(4, 3, zeros=False)
    right = CharacterModel(table, words)
    wrong = CharacterModel(table, words)
    whole = wrong.covers
    monkeypatch.setattr(wrong, "covers", lambda text: tuple(x for x in whole(text) if not x.rest))
    assert right.probability("ab") == beginnings(table, words, 2)["ab"] != wrong.probability("ab")
    assert (right.law("ab") != wrong.law("ab")).any()

@proves("thm-tokens-of")
@examples(15, st.sampled_from(VOCABULARIES[:3]).map(TextTokenizer), seeds)
def test_characters_and_then_tokens(words, seed):
    "Two characters, their cover, and a token more if it has but one: the token model's own distribution"
    table = random_table(words.V, seed, zeros=False)
    view = CharacterModel(table, words)
    def program(rng):
        tokens = pick_cover(view, written(view, 2, rng), rng)
        return tokens if len(tokens) == 2 else (*tokens, rng.pick(table.law((0, *tokens))))
    assert law_of(program) == target_law(table, (0,), 2)

@examples(8, seeds, st.integers(1, 2))
def test_two_tokenizers_on_characters(seed, gamma):
    "The loop with the usual verifier emits the target's characters, though the tokens differ"
    target = CharacterModel(random_table(3, seed, zeros=False), TextTokenizer(("a", "b", "ab")))
    draft = CharacterModel(random_table(4, seed + 1, zeros=False), TextTokenizer(("a", "b", "ba", "bb")))
    start = target.encode("ab")
    assert loop_law(target, Chain(draft, gamma), reject, start, 3) == target_law(target, start, 3)

def test_few_covers_and_their_share():
    "The heaviest are kept, and the share is what is left of the probability"
    words, table = TextTokenizer(("a", "aa")), TableModel(2, lambda text: exact(2, 1))
    few, whole = CharacterModel(table, words, beam=1), CharacterModel(table, words)
    assert [x.tokens for x in few.covers("a")] == [(0,)] and few.known_to("a")[1] == F(2, 3)
    assert few.probability("aa") == F(4, 9) and whole.probability("aa") == 1
    assert few.known_to("aa")[1] == F(2, 3)*F(2, 3) and whole.known_to("aaaa")[1] == 1
    assert whole.decode(whole.encode("aa" + END)) == "aa" + END and whole.law("a" + END)[-1] == 1

def test_what_cannot_be_written():
    view = CharacterModel(TableModel(2, lambda text: exact(1, 0)), TextTokenizer(("a", "b")))
    with pytest.raises(ValueError, match="ctx: .*'ab'"): view.law("ab")
    assert view.probability("aaa") == 1 and list(view.law("aa")) == [1, 0, 0]
    with pytest.raises(ValueError, match="ctx: .*after the end"): view.covers("a" + END + "a")
    assert view.probability("a"*150) == 1 and view.most == float("inf")
