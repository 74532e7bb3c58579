"What a toy lacks, by enumeration given the draft; each test must fail for a plainer part in its place"
import json, sys
from functools import partial
from itertools import product

import numpy as np, pytest, torch

import house, written
from helpers import STAND_INS, faithful
from published import Published, drafted, part_of, rebound, verified
from specref import (Branching, Chain, embedded, generate, HFModel, kseq, law_of, match, no_draft, overlap,
                     PromptLookup, prompts, reject, Round, rounds, Seeded, transport_iid, Tree)
from specref.core.target import Meter, Target
from specref.draft.suffix import SuffixTree
from specref.models.embedded import raw_model
from specref.verify.kseq import smallest_rho
from specref.verify.transport import optimal_acceptance_iid
from specref.verify.traversal import all_donate, parent_donates, transfer_mass

N = 32
def sure(p, q, k): return k   # the factor of K-SEQ that is valid for all distributions

class Fed(Target):
    "A model that records how many tokens each of its calls fed"
    def __init__(self, model): self.model, self.V, self.most, self.calls = model, model.V, model.most, []
    @property
    def meter(self): return self.model.meter
    def __call__(self, tree):
        before, p = self.meter.tokens, self.model(tree)
        self.calls.append(self.meter.tokens - before)
        return p

def first(system, target, prompt, k, seed=0):
    "The first `k` rounds"
    return [r for _, r in zip(range(k), rounds(target, system.drafter, system.verify, prompt, Seeded(seed)))]

class CoinsOnly:
    "An rng whose picks return a fixed token: for the node where a verdict ends, if picks do not decide it"
    def __init__(self, rng): self.rng = rng
    def coin(self, a, of=1, at=None): return self.rng.coin(a, of, at)
    def pick(self, law, at=None, key=None): return 0

def ends(verify, r, picks=False):  # -> {node: probability}
    "The distribution of the last accepted node of a round, given its draft and rows, on the verifier's coins"
    return law_of(lambda rng: verify(r.p, r.tree, rng if picks else CoinsOnly(rng)).node)

def accepts(verify, r):
    "The probability that a child of the root is accepted, given the draft"
    return 1 - ends(verify, r, picks=verify is match).get(0, 0)

def near(a, b): return np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=0, atol=1e-9)

class Uncached(Target):
    "A model that reads the whole text again in every call"
    def __init__(self, model): self.model, self.V, self.most, self.meter = model, model.V, model.most, Meter()
    def __call__(self, tree):
        fresh = HFModel(self.model.model, check=False)
        p, self.meter.tokens = fresh(tree), self.meter.tokens + len(tree.ctx) + len(tree) - 1
        return p

def rereading(fed):
    fed.model = Uncached(fed.model)
    return fed

def target_without_cache(system): return lambda fed, *how: system(rereading(fed), *how)

def draft_without_cache(system):
    rereading(system.drafter.model)
    return system

@faithful("autoregressive", plain={"no cache": target_without_cache})
def test_plain_decoding_reads_every_token_once(subject):
    "The cache is used, no text is read again: one call a token, the prompt in the first"
    target, prompt = Fed(embedded()), prompts("code", 1)[0]
    subject(target)(target, prompt, N, Seeded(0))
    assert target.calls == [len(prompt)] + [1] * (N - 1)

@faithful("speculative sampling", plain={"no cache": draft_without_cache})
@pytest.mark.parametrize("gamma", [1, 4])
def test_a_chain_feeds_what_is_new(subject, gamma):
    """The target reads its own last token and the drafts, in one call; the draft model reads one token a
    call, and two after a full acceptance, when its last was never read; rejected tokens are not read again"""
    target, draft, prompt = Fed(embedded()), Fed(embedded("small")), prompts("code", 1)[0]
    seen = first(subject(draft, gamma=gamma), target, prompt, 12)
    assert target.calls == [len(prompt) + gamma] + [1 + gamma] * 11
    full = [r.verdict.node == gamma for r in seen]
    assert any(full) and not all(full)
    later = [[2 if f else 1] + [1] * (gamma - 1) for f in full[:-1]]
    assert draft.calls == [len(prompt)] + [1] * (gamma - 1) + sum(later, [])

@faithful("speculative sampling", plain={"match": "sample and match", "half of it is enough": "lenience"})
def test_a_draft_token_is_accepted_by_the_capped_ratio(subject):
    "Given the token, min(1, p/q): averaged over the draft's row, the overlap of the rows"
    system = subject(embedded("small"), gamma=1)
    for r in first(system, embedded(), prompts("code", 1)[0], 12):
        p, q, x = r.p[0], r.tree.law[1], r.tree.token[1]
        assert near(accepts(system.verify, r), min(1, p[x] / q[x]))
        assert near(sum(q[y] * min(1, p[y] / q[y]) for y in np.flatnonzero(q)), overlap(p, q))

@faithful("sample and match", plain={"rejection": "speculative sampling"})
def test_matching_draws_as_if_there_were_no_draft(subject):
    "The first token of a round is drawn from p alone"
    prompt, seeds = prompts("code", 1)[0], range(20)
    target, small, large = embedded(), embedded("small"), embedded("large")
    system = subject(small, gamma=3)
    def firsts(d): return [generate(target, d, system.verify, prompt, 1, Seeded(s)) for s in seeds]
    tokens = firsts(system.drafter)
    assert len(set(tokens)) > 3
    others = Chain(large, 2), Branching(small, (2, 1)), PromptLookup(target.V)
    assert all(firsts(other) == tokens for other in others)
    for s, (x,) in zip(seeds, tokens):
        r = first(system, target, prompt, 1, s)[0]
        assert (r.verdict.node > 0) == (r.tree.token[1] == x)

@faithful("prompt lookup", plain={"the commonest continuation": "n-gram map", "a draft model": "OPT-Tree"})
def test_lookup_copies_from_generated_text(subject):
    "No draft model is called; generated text counts as prompt"
    target, prompt = embedded(temperature=0), prompts("code", 1)[0]
    system, seen = subject(target), []
    for r in first(system, target, prompt * 2, 12):
        seen.append(len(r.tree) - 1)
        ctx = r.tree.ctx
        places = [i for i in range(len(ctx) - 3) if ctx[i:i+3] == ctx[-3:]]
        if places: assert r.tree.path(len(r.tree) - 1) == ctx[places[0] + 3:places[0] + 13]
    text = system(target, prompt * 2, 9, Seeded(0))
    assert seen[0] == 10 and list(text.ledger.models) == ["target"]

@faithful("sampled tree", plain={"independent siblings": "independent siblings"})
def test_a_tree_is_read_in_one_pass_and_its_siblings_differ(subject):
    "One target call a round feeds every node once, each with the row of its text alone"
    target, draft, prompt = Fed(embedded()), Fed(embedded("small")), prompts("code", 1)[0]
    system = subject(draft, shape=(3, 2))
    for k, r in enumerate(first(system, target, prompt, 6)):
        kids = [[r.tree.token[c] for c in r.tree.children(u)] for u in range(len(r.tree))]
        assert [len(x) for x in kids] == [3, 2, 2, 2] + [0] * 6
        assert all(len(set(x)) == len(x) for x in kids)
        assert target.calls[k] == 9 + (len(prompt) if k == 0 else 1)
        alone = HFModel(target.model.model, check=False)
        assert max(abs(alone.law(r.tree.text(i)) - r.p[i]).max() for i in range(len(r.tree))) < 1e-4
    assert len(draft.calls) == 2 * 6

@faithful("block verification", plain={"token by token": "speculative sampling"})
def test_a_chain_is_verified_as_a_whole(subject):
    """All are accepted with the weight of the chain, at least i with 1 - Π (1 - h_j) over j >= i. The weight
    is above the product of the capped ratios where a token drawn too rarely follows one drawn too often"""
    system, above = subject(embedded("small"), gamma=4), 0
    for r in first(system, embedded(), prompts("code", 1)[0], 40):
        end, w, product, h = ends(system.verify, r), 1, 1, []
        for i in range(1, 5):
            x, q = r.tree.token[i], r.tree.law[i]
            ratio = r.p[i-1][x] / q[x]
            w, product = min(1, w * ratio), product * min(1, ratio)
            S = np.maximum(w * r.p[i] - r.tree.law[i+1], 0).sum() if i < 4 else w
            h.append(S / (S + (1 - w)) if S else 0)
            above += w > product + .01
        for i in range(1, 5):
            at_least = sum(weight for node, weight in end.items() if node >= i)
            assert near(at_least, 1 - np.prod([1 - a for a in h[i-1:]]))
        assert near(end.get(4, 0), w)
    assert above > 5

@faithful("Gumbel coupling", plain={"noise of its own": "sample and match", "rejection": verified(reject)})
def test_the_text_depends_on_no_drafter(subject):
    "Temperature 1, one seed: plain decoding, two drafts and two lengths emit one and the same text"
    def fresh(name): return HFModel(raw_model(name, torch.float64), check=False)
    drafts, prompt = (("small", 4), ("large", 4), ("small", 2)), prompts("code", 1)[0]
    systems = [subject(fresh(name), gamma=gamma) for name, gamma in drafts]
    systems.append(drafted(lambda drafter: no_draft)(systems[0]))
    texts = [system(fresh("target"), prompt, N, Seeded(0)) for system in systems]
    assert len(set(texts)) == 1 and len(texts[0]) == N
    assert len({len(text.ledger.rounds) for text in texts}) == len(systems)   # each drafted in its own way

@faithful("independent siblings", plain={"siblings that differ": "sampled tree"})
def test_equal_siblings_are_separate_trials(subject):
    "Independent children repeat tokens, and are separate nodes with one distribution"
    target, draft, prompt = Fed(embedded()), Fed(embedded("small")), prompts("code", 1)[0]
    twice = 0
    for k, r in enumerate(first(subject(draft), target, prompt, 25)):
        kids = r.tree.children(0)
        twice += len({r.tree.token[c] for c in kids}) < 3
        assert len(kids) == 3 and len(r.tree) == 10
        assert all(r.tree.law[c] is r.tree.law[kids[0]] for c in kids)
        texts = len({r.tree.text(i) for i in range(1, 10)})
        if k == 0: assert target.calls[k] == texts + len(prompt)
        else: assert target.calls[k] <= texts + 1   # fewer where the round before has read the same text
    assert twice > 3 and len(draft.calls) == 3 * 25

@faithful("K-SEQ", plain={
    "one after the other": verified(reject), "the sure factor": verified(partial(kseq, rho=sure))})
def test_k_seq_verifies_every_sibling_by_one_stricter_test(subject):
    "Given three siblings, each is accepted with min(1, p/(ρq)), with the smallest ρ at every position"
    system, rho = subject(embedded("small"), shape=(3,)), []
    for r in first(system, embedded(), prompts("code", 1)[0], 25):
        p, q, tokens = r.p[0], r.tree.law[1], r.tree.token[1:]
        rho.append(smallest_rho(p, q, 3))
        each = [1 - min(1, p[x] / (rho[-1] * q[x])) for x in tokens]
        assert near(accepts(system.verify, r), 1 - np.prod(each))
    assert np.std(rho) > .05 and 1 <= min(rho) and max(rho) < 3

class Fixed:
    "An rng whose picks are given tokens: a tree with these children"
    def __init__(self, tokens): self.tokens = iter(tokens)
    def pick(self, law, at=None, key=None): return next(self.tokens)

def with_children(r, draw, tokens):
    "The round with these children of the root, drawn by `draw`, and none below them"
    tree = Tree(r.tree.ctx)
    tree.grow(0, draw, Fixed(tokens), len(tokens))
    return Round(tree, [r.p[0]] * len(tree), r.verdict)

@faithful("SpecHub", plain={"one after the other": verified(reject)})
def test_every_hub_pair_is_transported_whole(subject):
    "Averaged over the pairs of a real row, around its likeliest token: p(hub) + Σ min(p, tail), the optimum"
    system, hub_first = subject(embedded("small", top_k=6), shape=(2,)), 0
    for r in first(system, embedded(top_k=6), prompts("code", 1)[0], 25):
        p, q, tokens = r.p[0], r.tree.law[1], r.tree.token[1:]
        hub = int(np.argmax(q))
        assert hub in tokens and tokens[0] != tokens[1]
        hub_first += tokens[0] == hub
        tail = np.where(np.arange(len(q)) == hub, 0, q) / np.delete(q, hub).sum()
        pairs = {(x, hub): q[x] for x in np.flatnonzero(tail)}
        pairs |= {(hub, x): q[hub] * tail[x] for x in np.flatnonzero(tail)}
        given = {t: with_children(r, system.drafter.draw(q), t) for t in pairs}
        mean = sum(w * accepts(system.verify, given[t]) for t, w in pairs.items())
        assert near(mean, p[hub] + np.delete(np.minimum(p, tail), hub).sum())
    assert 0 < hub_first < 25

@faithful("optimal transport", plain={
    "one after the other": "independent siblings", "K-SEQ": "K-SEQ",
    "two bins": verified(partial(transport_iid, bins=2))})
def test_siblings_are_accepted_as_often_as_possible(subject):
    "Averaged over the pairs of a real row, a child is accepted as often as any exact rule can accept one"
    system, in_turn = subject(embedded("small", top_k=4), shape=(2,)), []
    for r in first(system, embedded(top_k=4), prompts("code", 1)[0], 10):
        p, q = r.p[0], r.tree.law[1]
        assert r.tree.law[2] is q
        rate = 0
        for pair in product(np.flatnonzero(q).tolist(), repeat=2):
            found = ends(system.verify, with_children(r, system.drafter.draw(q), pair), picks=True)
            rate += q[list(pair)].prod() * (1 - found.get(0, 0))
        assert near(rate, optimal_acceptance_iid(p, q, 2))
        in_turn.append(rate - overlap(p, q))
    assert np.mean(in_turn) > .01

@faithful("mass-transfer tree", plain={
    "one after the other": "sampled tree", "from the leaves": "traversal verification"})
def test_every_node_transfers_mass(subject):
    """Given the tree, the masses of the last nodes: every earlier node gives to the next child. They sum to
    one, and the mean depth is above that of `reject`, whose parents alone give"""
    system, gain = subject(embedded("small", top_k=8), shape=(3, 1, 1)), []
    for r in first(system, embedded(top_k=8), prompts("code", 1)[0], 20):
        every, parents = (transfer_mass(r.p, r.tree, gives)[0] for gives in (all_donate, parent_donates))
        end = ends(system.verify, r, picks=True)
        assert near([end.get(u, 0) for u in range(10)], [every.get(u, 0) for u in range(10)])
        assert near(sum(every.values()), 1) and min(every.values()) >= 0
        gain.append(sum(r.tree.depth[u] * (every.get(u, 0) - parents.get(u, 0)) for u in range(10)))
    assert np.mean(gain) > .02

@faithful("traversal verification", plain={"from the root": "sampled tree"})
def test_leaves_are_verified_before_their_parents(subject):
    """The first leaf of a tree is accepted with the weight of its path, as the end of a chain by block
    verification; so it can be accepted where the capped ratio of its parent is small"""
    system, saved = subject(embedded("small"), shape=(2, 2)), 0
    for r in first(system, embedded(), prompts("code", 1)[0], 40):
        tree, weight, product = r.tree, 1, 1
        leaf = tree.children(tree.children(0)[0])[0]
        for u in tree.ancestors(leaf):
            ratio = r.p[tree.parent[u]][tree.token[u]] / tree.law[u][tree.token[u]]
            weight, product = min(1, weight * ratio), product * min(1, ratio)
        assert len(tree) == 7 and near(ends(system.verify, r).get(leaf, 0), weight)
        saved += weight > product + .01
    assert saved > 3

# The tests' own rules

@pytest.mark.parametrize("of", house.UNREACHED, ids=lambda of: f"{': '.join(of)}, {house.UNREACHED[of]}")
def test_a_part_that_no_system_reaches(of):
    "An exception is a part that a test names and no row of its system reaches; no other part is allowed"
    system, part = of
    with pytest.raises(LookupError): part_of(system, part.rpartition(".")[2])
    assert any(f'part="{part}"' in f.read_text() for f in house.ROOT.glob("tests/test_*.py"))
    with pytest.raises(LookupError): part_of("prompt lookup", part)

def test_the_stand_ins_are_stored():
    "The page of all systems has them from a file, with those of every test module that is loaded"
    stored = json.loads(written.FAILING.read_text(encoding="utf-8"))
    found = {s: {*whats} - {*stored.get(s, "").split("; ")} for s, whats in STAND_INS.items()}
    assert not any(found.values()), "`python tests/written.py` writes the file again"
    if {*written.modules()} <= sys.modules.keys(): assert stored == written.listed()

def test_a_subject_is_a_name():
    "Not an object made by hand, not a system of no table, and not a part of another system"
    with pytest.raises(TypeError): faithful("prompt lookup", subject=PromptLookup, plain={})
    with pytest.raises(LookupError): Published("prompt look-up")(embedded())
    with pytest.raises(LookupError): faithful("prompt lookup", part="SuffixTree", plain={})
    assert part_of("SuffixDecoding", "SuffixTree") is SuffixTree

def test_a_function_with_other_parts():
    "The published one does not change, and a part that it does not name is refused"
    other = rebound(accepts, ends=lambda verify, r, picks: {0: .25})
    assert other(match, None) == .75 and accepts is not other
    with pytest.raises(LookupError): rebound(accepts, survivors=None)
