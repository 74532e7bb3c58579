"Properties of each system that a toy lacks, on the embedded transformers: every count below is exact"
import numpy as np
import pytest
import torch

from helpers import faithful
from specref.core.rng import Seeded
from specref.verify.block import block, prefix_weights
from specref.verify.coupled import coupled
from specref.core.law import overlap
from specref.core.loop import generate, match, no_draft, rounds
from specref.draft.lookup import PromptLookup
from specref.models.embedded import raw_model, embedded, prompts
from specref.verify.reject import Chain, reject
from specref.core.target import Target
from specref.verify.siblings import Branching
from specref.app.systems import SYSTEMS
from specref.models.transformer import HFModel
from specref.verify.kseq import expected_trials, smallest_rho
from specref.verify.transport import optimal_acceptance, sibling_sets_at
from specref.verify.traversal import parent_donates, all_donate, transfer_mass, traversal

N = 32


class Fed(Target):
    "A model that records how many tokens each of its calls fed"
    def __init__(self, model):
        self.model, self.V, self.most, self.calls = model, model.V, model.most, []
    @property
    def meter(self): return self.model.meter
    def __call__(self, tree):
        before, p = self.meter.tokens, self.model(tree)
        self.calls.append(self.meter.tokens - before)
        return p


def first(drafter, verify, target, prompt, k, seed=0):
    "The first `k` rounds"
    return [r for _, r in zip(range(k), rounds(target, drafter, verify, prompt, Seeded(seed)))]


def agree(hits, chances):
    "The share of hits is the mean of their exact probabilities, to five standard errors"
    chances = np.asarray(chances, float)
    return abs(np.mean(hits) - chances.mean()) < 5 * np.sqrt((chances * (1 - chances)).sum()) / len(chances)


@faithful("autoregressive")
def test_plain_decoding_reads_every_token_once():
    "The cache is used, no text is read again: one call a token, the prompt in the first"
    target, prompt = Fed(embedded()), prompts("code", 1)[0]
    SYSTEMS["autoregressive"](target)(target, prompt, N, Seeded(0))
    assert target.calls == [len(prompt)] + [1] * (N - 1)


@faithful("speculative sampling")
@pytest.mark.parametrize("gamma", [1, 4])
def test_a_chain_feeds_what_is_new(gamma):
    """The target reads its own last token and the drafts, in one call; the draft model reads one token a
    call, and two after a full acceptance, when its last was never read; rejected tokens are not read again"""
    target, draft, prompt = Fed(embedded()), Fed(embedded("small")), prompts("code", 1)[0]
    seen = first(Chain(draft, gamma), reject, target, prompt, 12)
    assert target.calls == [len(prompt) + gamma] + [1 + gamma] * 11
    full = [r.verdict.node == gamma for r in seen]
    assert any(full) and not all(full)
    later = [[2 if f else 1] + [1] * (gamma - 1) for f in full[:-1]]
    assert draft.calls == [len(prompt)] + [1] * (gamma - 1) + sum(later, [])


@faithful("speculative sampling")
def test_a_chain_of_one_is_accepted_with_the_overlap():
    "On a real pair the share of accepted drafts is the mean of Σ min(p, q) at the very same places"
    target, draft = embedded(), embedded("small")
    seen = first(Chain(draft, 1), reject, target, prompts("code", 1)[0], 90)
    beta = np.array([overlap(np.asarray(r.p[0]), np.asarray(r.tree.law[1])) for r in seen])
    assert agree([r.verdict.node for r in seen], beta)
    assert beta.std() > .1


@faithful("sample and match")
def test_matching_draws_as_if_there_were_no_draft():
    "The first token of a round is drawn from p alone"
    prompt, seeds = prompts("code", 1)[0], range(20)
    target, small, large = embedded(), embedded("small"), embedded("large")
    def firsts(drafter): return [generate(target, drafter, match, prompt, 1, Seeded(s)) for s in seeds]
    tokens = firsts(Chain(small, 3))
    assert len(set(tokens)) > 3
    others = Chain(large, 2), Branching(small, (2, 1)), PromptLookup(target.V)
    assert all(firsts(other) == tokens for other in others)
    for s, (x,) in zip(seeds, tokens):
        r = first(Chain(small, 3), match, target, prompt, 1, s)[0]
        assert (r.verdict.node > 0) == (r.tree.token[1] == x)


@faithful("prompt lookup")
def test_lookup_copies_from_generated_text():
    "No draft model is called; generated text counts as prompt"
    target, prompt = embedded(temperature=0), prompts("code", 1)[0]
    system = SYSTEMS["prompt lookup"](target)
    seen = []
    for r in first(system.drafter, system.verify, target, prompt * 2, 12):
        seen.append(len(r.tree) - 1)
        ctx = r.tree.ctx
        places = [i for i in range(len(ctx) - 3) if ctx[i:i+3] == ctx[-3:]]
        if places: assert r.tree.path(len(r.tree) - 1) == ctx[places[0] + 3:places[0] + 13]
    text = generate(target, system.drafter, system.verify, prompt * 2, 9, Seeded(0))
    assert seen[0] == 10 and list(text.ledger.models) == ["target"]


@faithful("sampled tree")
def test_a_tree_is_read_in_one_pass_and_its_siblings_differ():
    "One target call a round feeds every node once, each with the row of its text alone"
    target, draft, prompt = Fed(embedded()), Fed(embedded("small")), prompts("code", 1)[0]
    system = SYSTEMS["sampled tree"](draft, shape=(3, 2))
    for k, r in enumerate(first(system.drafter, system.verify, target, prompt, 6)):
        kids = [[r.tree.token[c] for c in r.tree.children(u)] for u in range(len(r.tree))]
        assert [len(x) for x in kids] == [3, 2, 2, 2] + [0] * 6
        assert all(len(set(x)) == len(x) for x in kids)
        assert target.calls[k] == 9 + (len(prompt) if k == 0 else 1)
        alone = HFModel(target.model.model, check=False)
        assert max(abs(alone.law(r.tree.text(i)) - r.p[i]).max() for i in range(len(r.tree))) < 1e-4
    assert len(draft.calls) == 2 * 6


@faithful("block verification")
def test_a_chain_is_verified_as_a_whole():
    """At least i drafts are accepted as often as the weight of the prefix states, on real rows; the weight is
    above the product of the capped ratios where a token drawn too rarely follows one drawn too often"""
    target, draft = embedded(), embedded("small")
    seen = first(SYSTEMS["block verification"](draft).drafter, block, target, prompts("code", 1)[0], 90)
    def ratio(r, i): return min(1, r.p[i-1][r.tree.token[i]] / r.tree.law[i][r.tree.token[i]])
    above = 0
    for i in range(1, 5):
        weight = np.array([prefix_weights(r.p, r.tree).get(i, 0.) for r in seen])
        product = np.array([np.prod([ratio(r, j) for j in range(1, i + 1)]) for r in seen])
        assert agree([r.verdict.node >= i for r in seen], weight) and (weight >= product - 1e-9).all()
        above += (weight > product + .01).sum()
    assert above > 12


@faithful("Gumbel coupling")
def test_the_text_depends_on_no_drafter():
    "Temperature 1, one seed: plain decoding, two drafts and two lengths emit one and the same text"
    def fresh(name): return HFModel(raw_model(name, torch.float64), check=False)
    prompt = prompts("code", 1)[0]
    drafters = [no_draft, *(SYSTEMS["Gumbel coupling"](fresh(name), gamma=gamma).drafter
                            for name, gamma in (("small", 4), ("large", 4), ("small", 2)))]
    pairs = [(fresh("target"), drafter) for drafter in drafters]
    texts = [generate(target, drafter, coupled, prompt, N, Seeded(0)) for target, drafter in pairs]
    assert len(set(texts)) == 1 and len(texts[0]) == N
    assert len({len(text.ledger.rounds) for text in texts}) == len(drafters)   # each drafted in its own way


@faithful("independent siblings", "K-SEQ")
def test_equal_siblings_are_separate_trials():
    "Independent children repeat tokens, and are separate nodes with one distribution"
    target, draft, prompt = Fed(embedded()), Fed(embedded("small")), prompts("code", 1)[0]
    twice = 0
    for k, r in enumerate(first(SYSTEMS["independent siblings"](draft).drafter, reject, target, prompt, 25)):
        kids = r.tree.children(0)
        twice += len({r.tree.token[c] for c in kids}) < 3
        assert len(kids) == 3 and len(r.tree) == 10
        assert all(r.tree.law[c] is r.tree.law[kids[0]] for c in kids)
        texts = len({r.tree.text(i) for i in range(1, 10)})
        if k == 0: assert target.calls[k] == texts + len(prompt)
        else: assert target.calls[k] <= texts + 1   # fewer where the round before has read the same text
    assert twice > 3 and len(draft.calls) == 3 * 25


@faithful("K-SEQ")
def test_k_seq_verifies_every_sibling_by_one_stricter_test():
    "Its ρ is computed anew at every position of a real text"
    system = SYSTEMS["K-SEQ"](embedded("small"), shape=(3,))
    seen = first(system.drafter, system.verify, embedded(), prompts("code", 1)[0], 90)
    laws = [(r.p[0], r.tree.law[1]) for r in seen]
    rho = [smallest_rho(p, q, 3) for p, q in laws]
    chances = [expected_trials(p, q, 3, x) * np.minimum(q, p / x).sum() for (p, q), x in zip(laws, rho)]
    assert agree([r.verdict.node > 0 for r in seen], chances)
    assert np.std(rho) > .05 and 1 <= min(rho) and max(rho) < 3


@faithful("SpecHub")
def test_every_pair_has_the_hub():
    "The hub, the draft's likeliest token, is one of the two; the other is a sample of the other tokens"
    system = SYSTEMS["SpecHub"](embedded("small"), shape=(2,))
    hits, chances, hub_first = [], [], 0
    for r in first(system.drafter, system.verify, embedded(), prompts("code", 1)[0], 90):
        p, q, (a, b) = r.p[0], r.tree.law[1], r.tree.children(0)
        hub = int(np.argmax(q))
        assert hub in (r.tree.token[a], r.tree.token[b]) and r.tree.token[a] != r.tree.token[b]
        hub_first += r.tree.token[a] == hub
        tail = np.where(np.arange(len(q)) == hub, 0, q) / (1 - q[hub])
        hits.append(r.verdict.node > 0)
        chances.append(p[hub] + np.minimum(p, tail)[np.arange(len(p)) != hub].sum())
    assert agree(hits, chances) and 0 < hub_first < 90


@faithful("optimal transport")
def test_siblings_are_accepted_as_often_as_possible():
    """On the eight likeliest tokens of real rows a child is accepted as often as the closed form allows any
    exact rule, and more often than in sequence"""
    system = SYSTEMS["optimal transport"](embedded("small", top_k=8), shape=(2,))
    hits, chances, in_turn = [], [], []
    for r in first(system.drafter, system.verify, embedded(top_k=8), prompts("code", 1)[0], 80):
        hits.append(r.verdict.node > 0)
        chances.append(optimal_acceptance(r.p[0], sibling_sets_at(r.tree, 0)))
        in_turn.append(two_in_sequence(r.p[0], r.tree.law[1]))
    assert agree(hits, chances) and (np.array(chances) >= np.array(in_turn) - 1e-9).all()
    assert np.mean(chances) > np.mean(in_turn) + .001


def two_in_sequence(p, q):
    "The acceptance probability of two children without replacement, verified one after the other"
    residual = np.maximum(p - q, 0)
    if residual.sum() <= 1e-9: return 1.
    def second(x): return np.where(np.arange(len(q)) == x, 0, q) / (1 - q[x])
    rejected = [(x, max(q[x] - p[x], 0)) for x in np.flatnonzero(q)]
    return overlap(p, q) + sum(w * overlap(residual / residual.sum(), second(x)) for x, w in rejected)


@faithful("mass-transfer tree")
def test_every_node_transfers_mass():
    "On real rows the masses of the last nodes sum to one; the mean depth is theirs, above that of `reject`"
    system = SYSTEMS["mass-transfer tree"](embedded("small"), shape=(3, 1, 1))
    depth, expected, in_turn = [], [], []
    for r in first(system.drafter, system.verify, embedded(), prompts("code", 1)[0], 80):
        ends = [transfer_mass(r.p, r.tree, gives)[0] for gives in (all_donate, parent_donates)]
        assert all(abs(sum(m.values()) - 1) < 1e-9 and min(m.values()) >= 0 for m in ends)
        expected.append(sum(w * r.tree.depth[v] for v, w in ends[0].items()))
        in_turn.append(sum(w * r.tree.depth[v] for v, w in ends[1].items()))
        depth.append(r.tree.depth[r.verdict.node])
    gap = np.subtract(depth, expected)
    assert abs(gap.mean()) < 5 * gap.std() / len(gap)**.5 and np.mean(expected) > np.mean(in_turn) + .02


@faithful("traversal verification")
def test_leaves_are_verified_before_their_parents():
    """On a chain of a real pair it is block verification, verdict by verdict from the same noise; on trees
    leaves come first, so a node is accepted whose parent alone would have been rejected, in one pass"""
    target, draft, prompt = Fed(embedded()), embedded("small"), prompts("code", 1)[0]
    for k, r in enumerate(first(Chain(draft, 4), block, embedded(), prompt, 20)):
        assert traversal(r.p, r.tree, Seeded(k)) == block(r.p, r.tree, Seeded(k))
    system = SYSTEMS["traversal verification"](draft, shape=(2, 2))
    saved = 0
    for k, r in enumerate(first(system.drafter, system.verify, target, prompt, 45)):
        assert len(r.tree) == 7 and target.calls[k] == 6 + (len(prompt) if k == 0 else 1)
        deep = r.tree.depth[r.verdict.node] == 2
        first_child = deep and r.tree.ancestors(r.verdict.node)[0] == 1
        saved += first_child and r.p[0][r.tree.token[1]] < r.tree.law[1][r.tree.token[1]]
    assert saved > 3
