"Chapter 25: shared rows never change, the threshold is the paper's, the search beats random masks"
from dataclasses import replace
from functools import cache
from itertools import combinations, islice

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st

from contracts import drafter_contract
from helpers import constant, examples, faithful, models, proves, seeds, shapes, tiny
from published import drafted, having
from specref import (Chain, embedded, exact, generate, HFModel, law_of, loop_law, prompts, reject, Round,
                     rounds, Seeded, TableModel, target_law, Tree, tv_outcomes, Verdict)
from specref.draft import skipping
from specref.draft.skipping import (AdaptiveExit, KERNEL_LENGTHS, MaskRecipe, PartialModel, ScheduledChain,
                                    SkippedModel, attention_share, bayesian_search, found_mask,
                                    hand_made_masks, mask_score, modelled_speedup, random_search, skip_mask,
                                    stored_search, upper_bounds, whole_layers, write_search)
from specref.draft.swift import Swift, inner_blocks, matchness, random_mask
from specref.models.transformer import RowAnswer, cache_name
from test_embedded import SEEN, Once, plain_law

L = 3
MASKS = ((0, 1, 0, 0, 1, 1), (1, 0, 0, 0, 0, 1), (1, 1, 1, 1, 1, 1), (0, 0, 1, 1, 0, 0))

def toy(temperature=1.): return HFModel(tiny(3, L), temperature, check=False)

@torch.inference_mode()
def skipped_row(model, skip, ctx, path):
    "The row after `path` by transformers' own pass: blocks zeroed by hooks, behind the whole model's cache"
    name, past = cache_name(model), None
    if ctx[1:]: past = getattr(model(input_ids=torch.tensor([ctx[:-1]]), use_cache=True), name)
    layers = model.model.layers
    blocks = [*(layer.self_attn for layer in layers), *(layer.mlp for layer in layers)]
    def zero(block, args, out): return (0*out[0], *out[1:]) if isinstance(out, tuple) else 0*out
    hooks = [block.register_forward_hook(zero) for block, s in zip(blocks, skip) if s]
    out = model(input_ids=torch.tensor([[ctx[-1], *path]]), use_cache=True, **{name: past})
    for hook in hooks: hook.remove()
    return out.logits[0, -1].softmax(-1).numpy()

def check_target_rows(target):
    "The target's cache is that of a fresh pass over its text"
    fresh, n = HFModel(target.model, check=False), len(target.trie.text)
    fresh.feed(Tree(target.trie.text), with_answers=False)
    for k, rows in fresh.memory.buffer.items():
        assert (rows[..., :n, :] - target.memory.buffer[k][..., :n, :]).abs().max() < 1e-10

class OwnRows(SkippedModel):
    "Reads the text itself"
    def feed(self, tree, with_answers=True): return PartialModel.feed(self, tree, with_answers)

class KeepsRows(SkippedModel):
    "Keeps its rows of accepted tokens"
    def feed(self, tree, with_answers=True):
        return (PartialModel if self.trie.text else SkippedModel).feed(self, tree, with_answers)

class LeavesRows(SkippedModel):
    "Leaves its rows in the target's cache, with its answers, so that they are not computed again"
    @torch.inference_mode()
    def feed(self, tree, with_answers=True):
        rows, target = super().feed(tree, with_answers), self.target
        n, old, _ = target.trie.turn(tree, with_answers=False)
        target.memory.gather(n, old)
        new = len(target.trie.edge) - (first := self.memory.shared)
        for name, buffer in target.memory.buffer.items():
            own, target.memory.n = self.memory.buffer.get(name, 0*buffer), first
            target.memory.put(name, own[..., :new, :])
        target.memory.n = len(target.trie.edge)
        target.trie.answers.update((r, RowAnswer(z.logits)) for r, z in self.trie.answers.items())
        return rows

class WholeLayers(SkippedModel):
    "Skips whole layers"
    def __init__(self, target, skip):
        either = [a or m for a, m in zip(skip[:L], skip[L:])]
        super().__init__(target, either * 2)

@proves("thm-shared-rows")
@faithful("Draft & Verify", part="SkippedModel", plain={
    "its own rows of the text": OwnRows, "its rows of accepted tokens": KeepsRows,
    "its rows left to the target": LeavesRows, "whole layers": WholeLayers})
def test_rows_are_shared(subject):
    "After every round: the draft's rows by transformers' own pass, the target's rows by a fresh one"
    for seed, mask in enumerate(MASKS):
        target = toy()
        draft = subject(target, mask)
        for round in islice(rounds(target, Chain(draft, 3), reject, (0, 2, 1), Seeded(seed)), 5):
            tree = round.tree
            for i in range(1, len(tree)):
                want = skipped_row(target.model, mask, tree.ctx, tree.path(i)[:-1])
                assert abs(tree.law[i] - want).max() < 1e-9
            check_target_rows(target)

@settings(max_examples=15, deadline=None)
@given(seeds, st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), shapes(5)), min_size=2,
                       max_size=4), st.sampled_from(MASKS))
def test_rows_of_trees(seed, calls, mask):
    "On trees, in any order of contexts, each twice: the same rows"
    target, rng = toy(), np.random.default_rng(seed)
    draft = SkippedModel(target, mask, check=False)
    for ctx, parents in [*calls, *calls, *reversed(calls)]:
        tree = Tree(ctx)
        for u in parents[1:]: tree.add(u, int(rng.integers(3)))
        if rng.random() < .3: target(Tree(rng.integers(3, size=3).tolist()))   # another text
        if rng.random() < .1: target.forget()
        q = draft(tree)
        for i in range(len(tree)):
            assert abs(q[i] - skipped_row(target.model, mask, tree.ctx, tree.path(i))).max() < 1e-9
    target(tree)
    check_target_rows(target)

def test_all_blocks_are_the_model():
    "With no block skipped the draft is the target, and everything is accepted"
    target = toy(0)
    drafter = Chain(SkippedModel(target, skip_mask(L)), 3)
    assert generate(target, drafter, reject, (0, 1), 12, Seeded(0)).ledger.draft_acceptance_rate == 1
    with pytest.raises(ValueError, match="^model: "): PartialModel(tiny_gpt2(), whole_layers(0, 1))

def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(vocab_size=3, n_embd=8, n_layer=1, n_head=1, n_positions=16))

def test_the_ledger_counts_blocks():
    "A drafted token is fed once, costs its blocks' share of the weights, and reads the KV rows above it"
    target, mask = toy(), MASKS[0]
    draft = SkippedModel(target, mask)
    ledger = generate(target, Chain(draft, 2), reject, (0, 1, 2), 6, Seeded(3)).ledger
    a = attention_share(target.model)
    assert draft.meter.calls == draft.meter.tokens == ledger.num_draft_tokens
    assert draft.meter.layer_tokens == pytest.approx(ledger.num_draft_tokens * (2*a + (1 - a)))
    assert target.meter.tokens == 2 + sum(d + 1 for d in ledger.column("drafted"))   # the prompt once
    one = target.memory.row_bytes / L   # of a layer; two attentions run
    starts, n = [], 2
    for length, emitted in zip(ledger.column("drafted"), ledger.column("accepted")):
        starts += range(n, n + length)
        n += emitted + 1
    assert draft.meter.kv_bytes == 2*one*sum(starts)

# The threshold

class Fixed(AdaptiveExit):
    def learn(self, round): return self

class LastRound(AdaptiveExit):
    def learn(self, round):
        "The rate of the last round alone"
        return super(LastRound, type(self)(self.threshold, self.accepted(round))).learn(round)
    @staticmethod
    def accepted(round): return round.tree.depth[round.verdict.node] / max(round.tree.depth)

class AtOnce(AdaptiveExit):
    def learn(self, round):
        "Moves by the whole step"
        after = super().learn(round)
        return type(self)(self.threshold + 10*(after.threshold - self.threshold), after.rate)

class FullDraftsLower(AdaptiveExit):
    def learn(self, round):
        "Falls after full drafts too"
        after = super().learn(round)
        same = after.threshold == self.threshold
        return type(self)(self.threshold - self.step/10, after.rate) if same else after

@faithful("Draft & Verify", plain={
    "a fixed threshold": having(schedule=Fixed), "the last round alone": having(schedule=LastRound),
    "the whole step": having(schedule=AtOnce),
    "a lower threshold after full drafts": having(schedule=FullDraftsLower)})
def test_the_published_recurrence(subject):
    "300 rounds against the published recurrence, up to 1e-12"
    schedule = subject.drafter(constant(1), temperature=0).schedule
    rng, rate, threshold = np.random.default_rng(0), 0., .8
    for _ in range(300):
        drafted = int(rng.integers(1, 9))
        accepted = int(rng.integers(drafted - 1, drafted + 1)) if rng.random() < .9 else 0
        tree = Tree((0,))
        for i in range(drafted): tree.add(i, 0, exact(1))
        schedule = schedule.learn(Round(tree, None, Verdict(accepted, 0)))
        rate = .5*rate + .5*accepted/drafted
        moved = threshold + .01 if rate < .9 else threshold if drafted == 8 else threshold - .01
        threshold = .9*threshold + .1*moved
        assert schedule.rate == pytest.approx(rate, abs=1e-12)
        assert schedule.threshold == pytest.approx(threshold, abs=1e-12)

@examples(15, models(), st.sampled_from((0, .2, .4, .6, 1)))
def test_a_draft_ends_after_an_unlikely_token(pair, threshold):
    "It keeps the token; no other token is the last but that of a draft of full length"
    drafter = ScheduledChain(pair[1], AdaptiveExit(threshold, most=3), 3)
    drafter_contract(drafter, (0,))
    for tree in law_of(lambda rng: drafter((0,), rng)):
        likely = [tree.law[i][tree.token[i]] >= threshold for i in range(1, len(tree))]
        assert all(likely[:-1]) and (len(likely) == 3 or not likely[-1])

@proves("thm-skipping")
@pytest.mark.parametrize("temperature", (1., 2.))
def test_three_tokens_of_a_transformer(temperature):
    "The embedded target, top 2: every path of the loop has the distribution of plain passes"
    target, ctx = Once("target", temperature), prompts("english", 1, length=12, seed=2)[0]
    draft = SkippedModel(target, skip_mask(24, range(1, 24, 3), range(0, 24, 5)), check=False)
    drafter = ScheduledChain(draft, AdaptiveExit(.6, most=2), 2)
    found = loop_law(target, drafter, reject, ctx, 3)
    assert tv_outcomes(found, plain_law(ctx, 3, temperature)) <= SEEN

# The search

@faithful("Draft & Verify", part="found_mask", plain={
    "the best random mask": lambda: max(stored_search()["random"], key=lambda found: found[1])[0],
    "nothing skipped": lambda: skip_mask(24)})
def test_the_search_beats_random_masks(subject):
    "As many masks each; the score of the found one is computed again"
    made, recipe = stored_search(), MaskRecipe()
    searched, drawn = made["bayesian"], made["random"]
    assert len(searched) == len(drawn) == recipe.trials == made["recipe"]["trials"]
    assert np.shape(made["texts"]) == (recipe.texts, recipe.length)
    score = cache(mask_score(embedded("target", temperature=0), [*map(tuple, made["texts"])], recipe.tokens))
    assert score(subject()) > max(s for _, s in drawn)
    assert score(found_mask()) == pytest.approx(max(s for _, s in searched), rel=1e-6)
    assert [mask for mask, _ in searched[:3]] == [*hand_made_masks(24)]

def test_the_stored_search_is_what_was_written(tmp_path, monkeypatch):
    "Masks and scores come back from the card, which names recipe, corpus and versions"
    found = dict(bayesian=[(skip_mask(2, [0]), 1.5)], random=[(skip_mask(2), .5), (skip_mask(2, [1]), 1.)])
    monkeypatch.setattr(skipping, "search_texts", lambda recipe: [(3, 4)])
    monkeypatch.setattr(skipping, "search_masks", lambda texts, recipe: found)
    write_search(tmp_path, MaskRecipe(trials=2))
    monkeypatch.setattr(skipping, "stored", lambda name: tmp_path/"data"/name)
    made = stored_search.__wrapped__()
    assert {name: made[name] for name in found} == found and made["recipe"]["trials"] == 2
    assert made["corpus_sha256"] and made["texts"] == [[3, 4]]

def test_modelled_speed():
    "Emitted tokens by target calls, and the share of the layers of every draft call"
    target = toy(0)
    ledger = generate(target, Chain(SkippedModel(target, skip_mask(L, [0], [0])), 2), reject, (0, 1), 9,
                      Seeded(0)).ledger
    calls = len(ledger.rounds) + ledger.num_draft_tokens*2/3
    assert modelled_speedup(ledger, L) == pytest.approx(9 / calls)

def test_the_searches():
    "Both return every mask with its score; the probes come first"
    score = lambda mask: sum(mask[:3]) - sum(mask[3:])
    drawn = random_search(score, 6, 20, seed=3)
    assert len(drawn) == 20 and drawn == random_search(score, 6, 20, seed=3)
    assert all(s == score(mask) for mask, s in drawn) and len({mask for mask, _ in drawn}) > 5
    probe = skip_mask(3, [0])
    found = bayesian_search(score, 6, 8, [probe])
    assert len(found) == 8 and found[0] == (probe, 1) and all(s == score(mask) for mask, s in found)

# SWIFT

def swift(temperature=0, **kw):
    target = HFModel(tiny(3, 5), temperature, check=False)
    return target, Swift.of(target, **{"window": 3, "most": 2, "threshold": .5} | kw)

def learned(target, drafter, n, seed=0):
    "The drafter after each of n rounds, and their texts"
    for round in islice(rounds(target, drafter, reject, (0, 1), Seeded(seed)), n):
        drafter = drafter.learn(round)
        yield drafter, round.tree.ctx + round.tokens

class AnyLayer(Swift):
    "Skips the first and the last layer too"
    def proposal(self):
        rng = np.random.default_rng((self.seed, self.tried))
        return tuple((rng.random(2*self.layers) < self.ratio).tolist())

class NewestMask(Swift):
    "Takes every mask that is proposed"
    def learn(self, round): return Swift.learn(replace(self, score=0.), round)

class NeverEnds(Swift):
    searching = True

class RandomMasks(Swift):
    def proposal(self):
        return random_mask(self.layers, self.ratio, np.random.default_rng((self.seed, self.tried)))

@faithful("SWIFT", plain={"any layer skipped": drafted(AnyLayer), "every mask taken": drafted(NewestMask),
                          "a search without an end": drafted(NeverEnds)})
def test_the_mask_is_found_while_decoding(subject):
    "First and last layers stay, as many blocks are skipped, the best score never falls, the search ends"
    how = dict(window=3, enough=.99, patience=6)
    target, system = subject.on(HFModel(tiny(3, 6), 0, check=False), values=how, gamma=2)
    scores, L6, drafter = [], 6, system.drafter
    for drafter, text in learned(target, drafter, 40):
        edges = [drafter.skip[i] for i in (0, L6 - 1, L6, 2*L6 - 1)]
        assert not any(edges) and (sum(drafter.skip) == int(.45*8) or not drafter.score)
        scores.append(drafter.score)
    assert scores == sorted(scores) and scores[-1] > 0
    assert drafter.tried < 38 and (drafter.score > .99 or drafter.stale == 7)

def test_matchness():
    "One parallel pass of the skipping model, by transformers' own pass; charged to the draft's meter"
    target = toy()
    draft, text = SkippedModel(target, MASKS[0]), (0, 2, 1, 1, 0, 2, 0)
    rows = [skipped_row(target.model, MASKS[0], text[:3], text[3:i]) for i in range(3, 7)]
    assert matchness(draft, text, 4) == np.mean([np.argmax(row) == x for row, x in zip(rows, text[3:])])
    assert draft.meter.tokens == 4 and draft.meter.calls == 1
    target(Tree((*text, 1)))
    before = target.meter.copy()
    matchness(draft, text, 4)
    assert target.meter == before   # its rows of a longer text are enough

def test_the_search_is_on_the_ledger():
    "The draft's tokens are those of its chains, and a window for each mask that was tried"
    target, drafter = swift(1., patience=1000, enough=1.)
    meter, ctx, steps = drafter.models[0].meter, (0, 1), 0
    for i in range(12):
        tree = drafter(ctx, Seeded(i))
        round = Round(tree, p := target(tree), reject(p, tree, Seeded(i, (1,))))
        drafter, ctx = drafter.learn(round), ctx + round.tokens
        steps += sum(bool(tree.children(node)) for node in range(len(tree)))
    assert drafter.tried > 5 and meter.calls == steps + drafter.tried
    assert meter.tokens == steps + 3*drafter.tried   # no token for siblings

def test_siblings_by_confidence():
    "The published numbers of siblings, and the end of the chain"
    for temperature, counts in ((0, (3, 5, 8, 10)), (1., (1, 3, 5, 10))):
        for top, k in zip((.96, .9, .7, .3), counts):
            row = np.array([top, *[(1 - top)/19]*19])
            model = TableModel(20, lambda text: row)
            drafter = Swift(lambda skip: model, 4, skip_mask(4), temperature=temperature, most=3)
            tree = next(t for t in (drafter((0,), Seeded(s)) for s in range(99)) if t.token[1] == 0)
            assert len(tree.children(0)) == k
            assert bool(tree.children(1)) == (top >= .8)

def test_swift_is_lossless_on_a_transformer():
    "Greedy, its text is the target's; sampled, two tokens in the middle of the search have its distribution"
    target, drafter = swift()
    plain = generate(target, Chain(target, 1), reject, (0, 1), 30, Seeded(0))
    assert generate(target, drafter, reject, (0, 1), 30, Seeded(0)) == plain
    target, drafter = swift(1.)
    *_, (drafter, text) = learned(target, drafter, 5)
    assert drafter.tried and tv_outcomes(loop_law(target, drafter, reject, text, 2),
                                         target_law(target, text, 2)) < 1e-9

@proves("thm-skipping")
@pytest.mark.parametrize("seed", (1, 2))
def test_three_tokens_while_the_mask_is_found(seed):
    "The embedded target, top 2, in the middle of the search: the masks change, the distribution does not"
    target, ctx, masks = Once("target", 1.), prompts("english", 1, length=12, seed=2)[0], set()
    class Watched(Swift):
        def learn(self, round):
            after = super().learn(round)
            masks.add(after.skip)
            return after
    drafter = Watched.of(target, most=2, window=3, enough=1., threshold=.3)
    for round in islice(rounds(target, drafter, reject, ctx, Seeded(seed)), 4): drafter = drafter.learn(round)
    masks.clear()
    ctx = round.tree.ctx + round.tokens
    assert tv_outcomes(loop_law(target, drafter, reject, ctx, 3), plain_law(ctx, 3, 1.)) <= SEEN
    assert drafter.tried and len(masks) > 2

@faithful("SWIFT", plain={"no Bayesian optimisation": drafted(RandomMasks)})
def test_every_so_many_th_mask_is_suggested_by_the_scores(subject):
    "Of all masks of as many inner blocks it has the largest upper confidence bound, κ = 2.5"
    model, how = HFModel(tiny(3, 6), 1., check=False), dict(window=3, every=4, patience=1000, enough=1.)
    assert subject.on(model, gamma=2)[1].drafter.every == 25
    target, system = subject.on(model, values=how, gamma=2)
    *_, (drafter, _) = learned(target, system.drafter, 20)
    free, suggested = inner_blocks(6), range(3, drafter.tried, 4)
    masks = [tuple(i in some for i in range(12)) for some in combinations(free, int(.45*len(free)))]
    assert len(suggested) > 2 and len(drafter.history) == drafter.tried
    for k in suggested:
        bounds = dict(zip(masks, upper_bounds(drafter.history[:k], masks, 2.5)))
        assert bounds[drafter.history[k][0]] == pytest.approx(max(bounds.values()))

def test_upper_bounds_are_those_of_a_gaussian_process():
    "By inverses and determinants, at the likeliest of the lengths; the scores in units of their deviation"
    rng = np.random.default_rng(0)
    x, masks, y = rng.random((7, 5)) < .5, rng.random((9, 5)) < .5, rng.normal(3, 2, 7)
    unit = (y - y.mean()) / y.std()
    def kernel(a, b, length):
        d = np.sqrt(5 * (a[:, None] != b).sum(-1)) / length
        return (1 + d + d**2/3) * np.exp(-d)
    def evidence(length):
        K = kernel(x, x, length) + .01*np.eye(7)
        return -unit @ np.linalg.inv(K) @ unit - np.linalg.slogdet(K)[1]
    length = max(KERNEL_LENGTHS, key=evidence)
    K, k = kernel(x, x, length) + .01*np.eye(7), kernel(masks, x, length)
    mean, var = k @ np.linalg.inv(K) @ unit, 1 - np.einsum("ij,jk,ik->i", k, np.linalg.inv(K), k)
    found = upper_bounds([*zip(map(tuple, x), y)], masks, 2.5)
    assert found == pytest.approx(y.mean() + y.std() * (mean + 2.5*np.sqrt(var)))
