"What each system has and a toy lacks, on the embedded transformers: every count below is exact"
import numpy as np
import pytest

from helpers import faithful
from specref.chance import Seeded
from specref.law import overlap
from specref.loop import generate, match, rounds
from specref.lookup import PromptLookup
from specref.models import DOMAINS, embedded, prompts
from specref.reject import Chain, reject
from specref.siblings import Branching
from specref.systems import SYSTEMS
from specref.transformer import HFModel

N = 40
domains = pytest.mark.parametrize("domain", DOMAINS)


class Fed:
    "A model that notes how many tokens each of its calls fed"
    def __init__(self, model): self.model, self.V, self.meter, self.calls = model, model.V, model.meter, []
    def __call__(self, tree):
        before, p = self.meter.tokens, self.model(tree)
        self.calls.append(self.meter.tokens - before)
        return p


def first(drafter, verify, target, prompt, k, seed=0):
    "The first `k` rounds"
    return [r for _, r in zip(range(k), rounds(target, drafter, verify, prompt, Seeded(seed)))]


@faithful("autoregressive")
@domains
def test_plain_decoding_reads_every_token_once(domain):
    "A cache, and not a growing text read again: one call a token, the prompt in the first"
    target, prompt = Fed(embedded()), prompts(domain, 1)[0]
    SYSTEMS["autoregressive"](target)(target, prompt, N, Seeded(0))
    assert target.calls == [len(prompt)] + [1] * (N - 1)


@faithful("speculative sampling")
@domains
@pytest.mark.parametrize("gamma", [1, 4])
def test_a_chain_feeds_what_is_new(domain, gamma):
    """The target reads its own last token and the drafts, in one call; the draft model reads one token a call, and two after a full
    acceptance, when its last token was never read; the rejected are read by nobody again"""
    target, draft, prompt = Fed(embedded()), Fed(embedded("small")), prompts(domain, 1)[0]
    seen = first(Chain(draft, gamma), reject, target, prompt, 12)
    assert target.calls == [len(prompt) + gamma] + [1 + gamma] * 11
    full = [r.verdict.node == gamma for r in seen]
    assert any(full) and not all(full)
    assert draft.calls == [len(prompt)] + [1] * (gamma - 1) + [n for f in full[:-1] for n in [2 if f else 1] + [1] * (gamma - 1)]


@faithful("speculative sampling")
@domains
def test_a_chain_of_one_is_accepted_with_the_overlap(domain):
    "On a real pair the share of accepted drafts is the mean of Σ min(p, q) at the very same places, to five standard errors"
    target, draft = embedded(), embedded("small")
    seen = first(Chain(draft, 1), reject, target, prompts(domain, 1)[0], 250)
    beta = np.array([overlap(np.asarray(r.p[0]), np.asarray(r.tree.law[1])) for r in seen])
    assert abs(np.mean([r.verdict.node for r in seen]) - beta.mean()) < 5 * np.sqrt((beta * (1 - beta)).sum()) / len(beta) and beta.std() > .1


@faithful("sample and match")
@domains
def test_matching_draws_as_if_there_were_no_draft(domain):
    "The judge of a round draws its first token from p alone: with the same noise it is the same after any draft, and the draft is kept where it said so"
    prompt, seeds = prompts(domain, 1)[0], range(30)
    firsts = lambda drafter: [generate(target, drafter, match, prompt, 1, Seeded(s)) for s in seeds]
    target, small, large = embedded(), embedded("small"), embedded("large")
    said = firsts(Chain(small, 3))
    assert len(set(said)) > 3 and said == firsts(Chain(large, 2)) == firsts(Branching(small, (2, 1))) == firsts(PromptLookup(target.V))
    for s, (x,) in zip(seeds, said):
        r = first(Chain(small, 3), match, target, prompt, 1, s)[0]
        assert (r.verdict.node > 0) == (r.tree.token[1] == x)


@faithful("prompt lookup")
@domains
def test_lookup_copies_from_what_was_just_written(domain):
    "No model is asked; the text that was generated counts as prompt, so a repetition that the target itself begins is copied"
    target, prompt = embedded(temperature=0), prompts(domain, 1)[0]
    system = SYSTEMS["prompt lookup"](target)
    seen = []
    for r in first(system.drafter, system.verify, target, prompt * 2, 12):
        seen.append(len(r.tree) - 1)
        places = [i for i in range(len(r.tree.ctx) - 3) if r.tree.ctx[i:i+3] == r.tree.ctx[-3:]]
        if places: assert r.tree.path(len(r.tree) - 1) == r.tree.ctx[places[0] + 3:places[0] + 13]
    assert seen[0] == 10 and list(generate(target, system.drafter, system.verify, prompt * 2, 9, Seeded(0)).ledger.models) == ["target"]


@faithful("sampled tree")
@domains
def test_a_tree_is_read_in_one_pass_and_its_siblings_differ(domain):
    "One target call a round feeds every node once, each answered as if its text were alone; siblings are different; the draft is called once a level"
    target, draft, prompt = Fed(embedded()), Fed(embedded("small")), prompts(domain, 1)[0]
    system = SYSTEMS["sampled tree"](draft, shape=(3, 2))
    for k, r in enumerate(first(system.drafter, system.verify, target, prompt, 6)):
        kids = [[r.tree.token[c] for c in r.tree.children(u)] for u in range(len(r.tree))]
        assert [len(x) for x in kids] == [3, 2, 2, 2] + [0] * 6 and all(len(set(x)) == len(x) for x in kids)
        assert target.calls[k] == 9 + (len(prompt) if k == 0 else 1)
        alone = HFModel(target.model.model, check=False)
        assert max(abs(alone.law(r.tree.text(i)) - r.p[i]).max() for i in range(len(r.tree))) < 1e-4
    assert len(draft.calls) == 2 * 6
