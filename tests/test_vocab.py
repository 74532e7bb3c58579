"Chapter 27: three rules for a draft with a tokenizer of its own; each is exact, and is the paper's rule"
import json
from functools import cache

import numpy as np, pytest, torch
from hypothesis import example, strategies as st
from tokenizers import Tokenizer, decoders, models as kinds, normalizers
from transformers import PreTrainedTokenizerFast

from contracts import drafter_contract, target_contract
from helpers import constant, examples, faithful, laws, proves, seeds
from published import drafted, having
from specref import (autoregressive, Chain, Drafter, DynamicTree, embedded, exact, generate, greedy, iid,
                     law_of, loop_law, match, normalize, one_hot, overlap, prompts, random_table, reject,
                     rounds, Seeded, StaticTree, TableModel, target_law, tokenizer, Tree)
from specref.core.target import UnwarpedModel
from specref.core.tree import likeliest_points
from specref.draft.vocab import (END, Intersection, StringLaw, StringMatch, TextTokenizer, TokenizerPair,
                                 second_draft, second_tokenizer, text_tokenizer, toy_pair, translated)
from specref.models.embedded import DOMAINS, corpus, domain_ids, raw_model, stored
from specref.train.second import SecondRecipe, encoded_in_stretches, train_second, with_vocabulary

TOYS = toy_pair(3)   # a, b, ab and a, b, ba
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)

@st.composite
def toy_pairs(draw):
    "Two tokenizers on the characters a and b, their tokens of up to three characters in any order"
    strings = "aa", "ab", "ba", "bb", "aab", "aba", "bab"
    def words():
        some = draw(st.lists(st.sampled_from(strings), max_size=3, unique=True))
        return TextTokenizer(draw(st.permutations(["a", "b", *some])))
    return TokenizerPair(words(), words())

@st.composite
def cases(draw):
    "A pair of tokenizers, a target and a draft model for them that depend on the whole text, and a context"
    pair, seed = draw(toy_pairs()), draw(seeds)
    ctx = draw(st.lists(st.integers(0, pair.target.V - 1), min_size=1, max_size=3).map(tuple))
    return pair, random_table(pair.target.V, 2*seed), random_table(pair.draft.V, 2*seed + 1), ctx

# The text of the draft, enumerated

def beginnings(draft, tokens, words, length):
    "{text: probability} of the draft's text, cut when it has at least `length` characters"
    done, todo = {}, [("", tokens, 1)]
    while todo:
        text, ids, w = todo.pop()
        if len(text) >= length: done[text] = done.get(text, 0) + w
        else: todo += [(text + words.strings[d], (*ids, d), w*x) for d, x in enumerate(draft.law(ids)) if x]
    return done

def first_words(draft, pair, ctx):
    "The distribution of the first target token of the draft's text"
    out = 0*one_hot(0, pair.target.V, exact=True)
    for text, w in beginnings(draft, pair.context(ctx), pair.draft, pair.target.longest).items():
        out[pair.target.first(text)] += w
    return out

# Exactness

@proves("thm-string-match", "thm-intersection", "thm-string-law")
@examples(25, cases(), st.sampled_from([reject, match]), st.integers(1, 2))
def test_exact(case, verify, gamma):
    "Every rule, with any tokenizers, keeps the distribution of two tokens; sampled rules state their edges"
    pair, target, draft, ctx = case
    truth = target_law(target, ctx, 2)
    chains = [Chain(Intersection(draft, pair), gamma), Chain(StringLaw(draft, pair), gamma),
              Chain(StringLaw(draft, pair, .1), gamma)]
    points = [StringMatch(draft, pair, gamma, draw, True) for draw in (likeliest_points, iid)]
    for drafter in (*chains, *points): assert loop_law(target, drafter, verify, ctx, 2) == truth
    for drafter in (*chains, points[0]): drafter_contract(drafter, ctx)

@examples(25, cases())
def test_views_are_functions_of_the_text(case):
    "The row of a node is that of its text, so that a view drafts in every shape"
    pair, target, draft, ctx = case
    for view in (Intersection(draft, pair), StringLaw(draft, pair)):
        for drafter in (StaticTree(view, (-1, 0, 0, 1)), DynamicTree(view, 2, 2, 3, exact=True)):
            tree = next(iter(law_of(lambda rng: drafter(ctx, rng))))
            target_contract(view, tree)
            assert loop_law(target, drafter, reject, ctx, 1) == target_law(target, ctx, 1)

# The rules are the paper's

def accepted(drafter, target, ctx):
    "The probability that the first draft token is accepted"
    return law_of(lambda rng: next(rounds(target, drafter, reject, ctx, rng)).verdict.node > 0).get(True, 0)

class Lost(Drafter):
    "Sampled from the draft's whole distribution, and no draft where the target lacks the token"
    depth = 1
    def __init__(self, model, pair): self.model, self.pair = model, pair
    def __call__(self, ctx, rng):
        tree, q = Tree(ctx), self.model.law(self.pair.context(ctx))
        x = self.pair.shared.get(rng.pick(q))
        law = Intersection(self.model, self.pair).law(ctx)
        if x is not None: tree.add(0, x, law)
        return tree

def same_ids(model, pair):
    "A draft id is taken for the target's"
    return Chain(TableModel(3, lambda text: model.law(pair.context(text))), 1)

def one_tokenisation(model, pair):
    "Each target token with the probability of its string under the draft's own tokenisation, normalised"
    def weight(ctx, s, w=1):
        for d in pair.draft.encode(s): w, ctx = w * model.law(ctx)[d], (*ctx, d)
        return w
    def law(text):
        w = np.array([weight(pair.context(text), s) for s in pair.target.strings], dtype=object)
        return normalize(w) if w.any() else exact(1, 1, 1)
    return Chain(TableModel(3, law), 1)

def sampled_points(model, pair): return StringMatch(model, pair, 3, iid, True)
def instead(make): return drafted(lambda chain: make(chain.model.model, chain.model.pair))

MIXED = TokenizerPair(TextTokenizer(("a", "b", "ab")), TextTokenizer(("b", "a", "ba")))
BEFORE = 0, 2

@proves("thm-intersection")
@faithful("TLI", plain={"tokens lost": instead(Lost), "draft ids": instead(same_ids), "strings": having(
    model=lambda view: StringLaw(view.model, view.pair))})
def test_intersection(subject):
    "The acceptance is that of the draft's distribution on the shared tokens; nothing else is drafted"
    p, q = exact(1, 5, 2), exact(2, 1, 3)   # q on b, a, ba
    shared = exact(1, 2, 0)
    drafter = subject.drafter(draft := constant(*q), dict(model=Intersection(draft, MIXED)), gamma=1)
    assert {t.token[1] for t in law_of(lambda rng: drafter(BEFORE, rng)) if len(t) > 1} == {0, 1}
    got = accepted(drafter, constant(*p), BEFORE)
    assert got == overlap(p, shared) > sum(np.minimum(p[:2], q[[1, 0]])) and got <= p[0] + p[1]

@proves("thm-string-law")
@faithful("SLRS", plain={"intersection": "TLI", "one tokenisation": instead(one_tokenisation),
                         "exact match": instead(sampled_points)})
@examples(25, seeds, contexts)
@example(0, (0,))
@example(1, (0, 2))
def test_string_law(subject, seed, ctx):
    "The acceptance is the overlap with the distribution of the first target token of the enumerated text"
    target, draft = random_table(3, 2*seed, zeros=False), random_table(3, 2*seed + 1, zeros=False)
    psi = first_words(draft, TOYS, ctx)
    assert accepted(subject.drafter(draft, gamma=1), target, ctx) == overlap(target.law(ctx), psi)

@proves("thm-string-law")
@examples(40, cases())
def test_string_law_by_prefixes(case):
    "With any tokenizers: the enumeration, and the formula in the probabilities of prefixes"
    pair, target, draft, ctx = case
    row, words = StringLaw(draft, pair).law(ctx), pair.target
    assert tuple(row) == tuple(first_words(draft, pair, ctx)) and sum(row) == 1
    texts = beginnings(draft, pair.context(ctx), pair.draft, words.longest)
    def begins(s): return sum(w for text, w in texts.items() if text.startswith(s))
    for t, s in enumerate(words.strings):
        longer = [u for u in words.strings if u.startswith(s) and u != s]
        next_longer = [u for u in longer if not any(u.startswith(v) and u != v for v in longer)]
        assert row[t] == begins(s) - sum(map(begins, next_longer))
    sampled = accepted(StringMatch(draft, pair, words.longest, iid, True), target, ctx)
    assert sampled <= overlap(target.law(ctx), row)

@proves("thm-string-match")
@examples(25, laws(3), seeds, contexts)
def test_acceptance_of_strings(p, seed, ctx):
    "Σ p ψ for a sampled draft, long enough to decide the first token; p of the first token for a greedy one"
    draft = random_table(3, seed)
    psi = first_words(draft, TOYS, ctx)
    assert accepted(StringMatch(draft, TOYS, 3, iid, True), constant(*p), ctx) == (p*psi).sum()
    tree = StringMatch(draft, TOYS, 3, exact=True)(ctx, Seeded(0))
    assert accepted(StringMatch(draft, TOYS, 3, exact=True), constant(*p), ctx) == p[tree.token[1]]

@proves("thm-tokenisations")
@pytest.mark.parametrize("m", [1, 2, 4, 7])
def test_the_number_of_tokenisations(m):
    "2^(m - 1) rows where every run is a token, fewer where some are not; a bound on strings reads fewer"
    runs = TextTokenizer(["a"*i for i in range(1, m + 1)])
    def rows(words, least=0):
        model = constant(*[1]*words.V)
        StringLaw(model, TokenizerPair(runs, words), least).law((0,))
        return model.meter.tokens
    assert rows(runs) == 2**(m - 1) and rows(TextTokenizer(["a"])) == m
    assert m < 4 or rows(runs, .1) < 2**(m - 1)

# Real tokenizers

@cache
def real_pair(): return TokenizerPair(text_tokenizer(tokenizer()), text_tokenizer(second_tokenizer()))

def in_bytes(text): return text.encode("utf-8", "surrogatepass").decode("latin-1")

texts = st.text(max_size=12).map(in_bytes) | st.binary(max_size=12).map(lambda b: b.decode("latin-1"))

def told(pair, side, text):
    "A model of one text: its tokens in a tokenizer's own split, from any place on"
    words = getattr(pair, side)
    def law(tokens):
        so_far = words.decode(tokens)
        rest = text[len(so_far):] if text.startswith(so_far) else ""
        return one_hot(words.encode(rest)[0] if rest else 0, words.V)
    return TableModel(words.V, law)

class EachTokenAlone(TokenizerPair):
    "Draft tokens are encoded one by one"
    def proposal(self, before, new):
        return tuple(x for d in self.draft.encode(new) for x in self.target.encode(self.draft.strings[d]))

class ContextByToken(TokenizerPair):
    "The context is encoded token by token"
    def context(self, tokens, *room):
        return tuple(d for x in tokens for d in self.draft.encode(self.target.strings[x]))

def spelled_only(tokens):
    "A model that is certain of its text after the tokenizer's own split of it, and else writes `e`"
    model, words = told(real_pair(), "draft", tokens), real_pair().draft
    def law(ids):
        usual = words.encode(words.decode(ids))
        return model.law(ids) if ids[:8] == usual[:8] else one_hot(words.ids["e"], words.V)
    return TableModel(words.V, law)

@faithful("universal assisted generation", plain={
    "each token alone": having(pair=EachTokenAlone), "context token by token": having(pair=ContextByToken)})
def test_a_text_that_both_write(subject):
    "Target and draft write one text in their own tokens: a round rejects at most its unfinished word"
    pair = real_pair()
    text = "    def assertRaises(self, options):\n        self.assertEqual(len(options), 0)\n" * 2
    ids, start = pair.target.encode(text), 12
    model, usual = spelled_only(text), random_table(3, 0)
    system = subject(usual, dict(model=model, pair=pair))
    out = system(told(pair, "target", text), ids[:start], len(ids) - start, Seeded(0))
    assert out == ids[start:]
    rejected = [r.drafted - r.accepted for r in out.ledger.rounds]
    assert max(rejected) <= 2 and out.ledger.mean_acceptance_length > 4.5

@examples(60, texts, texts.filter(bool))
def test_every_proposal_spells_its_draft(before, new):
    "Any bytes: valid tokens that spell the draft's text; every text is its tokens' strings"
    pair = real_pair()
    ids = pair.proposal(before, new)
    assert pair.target.decode(ids) == new and all(0 <= x < pair.target.V for x in ids)
    for words in (pair.target, pair.draft): assert words.decode(words.encode(before + new)) == before + new

@cache
def noise(V, seed): return TableModel(V, lambda text: one_hot(hash((seed, text)) % V, V))

@examples(40, texts.filter(bool), seeds)
@example("\xe9", 0)
def test_greedy_text_is_the_targets(prompt, seed):
    "Whatever the draft returns after whatever text, ends and half characters included"
    pair = real_pair()
    ctx, target = pair.target.encode(prompt), noise(pair.target.V, seed)
    drafters = [StringMatch(noise(pair.draft.V, seed + 1), pair, 3),
                Chain(Intersection(noise(pair.draft.V, seed + 1), pair), 2)]
    plain = autoregressive(target, ctx, 5, Seeded(0))
    for drafter in drafters:
        assert generate(target, drafter, reject, ctx, 5, Seeded(0)) == plain
        assert all(0 <= x < pair.target.V for x in drafter(ctx, Seeded(0)).token[1:])

def test_tokens_of_one_text_agree():
    "Our split of a text is the tokenizer's own; the end token is one string, its name another"
    pair, text = real_pair(), "def f(x):\n    return 'é😀'  # two\n"
    for tok, words in ((tokenizer(), pair.target), (second_tokenizer(), pair.draft)):
        assert list(words.encode(in_bytes(text))) == tok(text, add_special_tokens=False)["input_ids"]
        assert tok.eos_token_id not in words.encode(tok.eos_token)
        assert words.encode(END) == (tok.eos_token_id,)
    assert pair.draft.decode(pair.context(pair.target.encode("a" + END))) == "a" + END
    assert pair.proposal("x", f"y{END}")[-1] == tokenizer().eos_token_id

def test_a_draft_ends_with_its_text():
    pair = TokenizerPair(TextTokenizer(("a", "b", END)), TextTokenizer(("b", "a", END)))
    ends = constant(1, 1, 5)
    assert StringMatch(ends, pair, 3, exact=True)((0,), Seeded(0)).token == [None, 2]
    without = TokenizerPair(TextTokenizer(("a", "b", None)), pair.draft)
    assert StringMatch(ends, without, 2, exact=True)((0,), Seeded(0)).token == [None, 1, 1]
    for view in (Intersection(ends, without), StringLaw(ends, without)):
        assert tuple(view.law((0,))) == tuple(exact(1, 1, 0))
    assert without.context((2,)) == (2,)

# Other kinds of tokenizers

def like_llama():
    "A tokenizer with byte fallback and a space before every text"
    bytes_ = {f"<0x{b:02X}>": b + 1 for b in range(256)}
    vocab = {"</s>": 0, **bytes_, "▁": 257, "a": 258, "b": 259, "▁a": 260, "ab": 261, "▁ab": 262}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tok = Tokenizer(kinds.BPE(vocab, merges, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="</s>")

def test_byte_fallback_and_a_space_before_the_text():
    "The space that the tokenizer adds is not proposed; a letter is its own token, not that of its byte"
    words = text_tokenizer(like_llama())
    assert words.ids["a"] == 258 and words.ids["é".encode().decode("latin-1")[0]] == 1 + 0xc3
    assert words.strings[262] == " ab" and words.strings[words.encode("ab")[0]] == " ab"
    pair = TokenizerPair(words, real_pair().draft)
    assert pair.proposal("b", "ab") == (261,) and pair.proposal("b", " ab") == (262,)
    assert pair.target.decode(pair.proposal("a", in_bytes("é")[:1])) == in_bytes("é")[:1]
    back = TokenizerPair(real_pair().target, words)
    assert back.draft.decode(back.context(back.target.encode("ab"))).strip() == "ab"
    assert pair.shared[real_pair().draft.ids["a"]] == 258

def test_a_tokenizer_that_changes_the_text():
    "A split that does not spell the draft is not proposed: the longest tokens first instead"
    lower = TextTokenizer(("a", "b", "A", "ab"), lambda text: [dict(a=0, b=1)[c] for c in text.lower()])
    pair = TokenizerPair(lower, TextTokenizer(("a", "b", "A")))
    assert pair.proposal("b", "ab") == (0, 1) and pair.proposal("b", "Aab") == (2, 3)

def test_a_long_context_is_cut():
    "The draft model reads the last tokens that fit, and its row is a distribution"
    draft = random_table(3, 0)
    draft.most = 70
    for view in (Intersection(draft, TOYS), StringLaw(draft, TOYS)):
        assert view.most == np.inf and sum(view.law((0, 1)*200)) == 1
    assert len(TOYS.context((0,)*200, 70)) == 200 - 3*64 and len(TOYS.context((0,)*69, 70)) == 69
    assert TOYS.context((0,)*5, 2) == (0,)

def test_a_draft_without_mass_on_the_shared_tokens():
    "Temperature 0 on a token that the target lacks: the likeliest shared token, before any warp"
    draft = UnwarpedModel(constant(1, 2, 5))
    class Cold(UnwarpedModel):
        def __call__(self, tree):
            q = super().__call__(tree)
            return type(q)(lambda i: greedy(q[i]), len(q), self.V, lambda i: q[i])
    assert tuple(Intersection(Cold(draft), TOYS).law((0,))) == (0, 1, 0)
    assert tuple(Intersection(constant(0, 0, 1), TOYS).law((0,))) == (1, 0, 0)

# At size

def test_all_rules_at_temperature_zero():
    "The embedded pair with two tokenizers, in double precision: the greedy text, in fewer calls than tokens"
    target, prompt = embedded("target", dtype=torch.float64, temperature=0), prompts("code", 1, seed=6)[0]
    plain = autoregressive(target, prompt, 16, Seeded(0))
    for rule in ("slem", "tli", "slrs"):
        draft = second_draft(temperature=0)
        drafter = translated(draft, second_tokenizer(), tokenizer(), rule)
        out = generate(target, drafter, reject, prompt, 16, Seeded(0))
        assert out == plain and len(out.ledger.rounds) < 16
        assert out.ledger.models["draft"].tokens >= out.ledger.num_draft_tokens

def test_the_shipped_draft():
    "Its card names the recipe; its bits per byte of held-out text are those of a language model"
    card = json.loads((stored("vocab")/"recipe.json").read_text())
    assert card["recipe"] == json.loads(json.dumps(vars(SecondRecipe())))
    for domain in DOMAINS:
        text = real_pair().target.decode([int(x) for x in domain_ids(domain)[:400]])
        ids, tree = real_pair().draft.encode(text), Tree((0,))
        for u, x in enumerate(ids): tree.add(u, x)
        rows = second_draft()(tree)
        assert -sum(np.log2(rows[u][x]) for u, x in enumerate(ids)) / len(text) < 3

def test_the_draft_begins_as_the_small_one():
    "The same layers; a shared token has its embedding, another the mean of those of its pieces"
    small, pair = raw_model("small"), real_pair()
    new = with_vocabulary(small, second_tokenizer())
    old, rows = (net.get_input_embeddings().weight for net in (small, new))
    for x, s in enumerate(pair.draft.strings):
        pieces = [pair.shared[x]] if x in pair.shared else pair.target.encode(s)
        assert torch.allclose(rows[x], sum(old[i] for i in pieces) / len(pieces), atol=1e-6)
    assert all(torch.equal(w, small.state_dict()[k]) for k, w in new.state_dict().items() if "layers" in k)
    assert new.lm_head.weight is rows and torch.equal(new.model.norm.weight, small.model.norm.weight)

def test_stretches():
    "The texts come back whole; some tokens end where no token of the text, encoded as a whole, does"
    tok, texts = second_tokenizer(), [domain_ids(d)[:200] for d in DOMAINS]
    words, text = real_pair().draft, real_pair().target.decode(np.concatenate(texts).tolist())
    for most in (1, 4):
        ids = encoded_in_stretches(tok, texts, most, np.random.default_rng(0)).tolist()
        assert words.decode(ids) == text
        ends, whole = (set(np.cumsum([len(words.strings[x]) for x in row]))
                       for row in (ids, words.encode(text)))
        assert len(ends - whole) > 10
    alone = [x for y in np.concatenate(texts) for x in words.encode(real_pair().target.strings[y])]
    assert encoded_in_stretches(tok, texts, 1, np.random.default_rng(0)).tolist() == alone

def test_training_runs(tmp_path, monkeypatch):
    "A small recipe on a few texts writes a model that loads with its tokenizer"
    from transformers import AutoTokenizer
    from specref.models.transformer import HFModel
    rows = [next(r for r in corpus() if r["domain"] == d and not r["held_out"]) for d in DOMAINS]
    monkeypatch.setattr("specref.train.second.corpus", lambda: rows)
    ids = {d: np.array(tokenizer()(r["text"])["input_ids"], np.uint16) for d, r in zip(DOMAINS, rows)}
    monkeypatch.setattr("specref.train.second.domain_ids", lambda domain, held_out: ids[domain])
    small = SecondRecipe(vocab_size=300, sample_tokens=64, sample_rows=2, steps=2, rows=2, length=48)
    train_second(tmp_path, small)
    folder = tmp_path/"data"/"vocab"
    assert len(AutoTokenizer.from_pretrained(folder)) == HFModel.load(folder).V == 300
    assert json.loads((folder/"recipe.json").read_text())["recipe"]["steps"] == 2
