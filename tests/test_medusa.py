"31_medusa: untrained heads, their tree, the lossy verifier, a target trained with its heads"
from dataclasses import replace
from itertools import combinations
from math import log

import numpy as np, pytest, torch
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from helpers import cold, constant, examples, faithful, laws, models, proves, seeds
from networks import batch_of, otherwise
from published import verified
from helpers import tiny as tiny_llama
from specref import (Chain, embedded, exact, HFModel, loop_law, one_hot, overlap, points, prompts,
                     random_table, reject, rounds, Rows, Seeded, TableModel, target_law, Tree, tv,
                     tv_outcomes, typical)
from specref.core.target import Target
from specref.core.tree import from_choices
from specref.draft.shapes import skip_accuracy, top_tokens
from specref.models.embedded import DOMAINS, raw_model
from specref.train.harness import StateDataset, TargetModel, evaluate
from specref.train.medusa import (AdaptedStates, Adapter, HeadMarginals, Medusa, Medusa2, MedusaDraft,
                                  MedusaHead, MedusaTree, head_accuracy, medusa_loss)
from specref.train.registry import load_network
from specref.verify.lossy import lenient_greedy

@pytest.fixture(scope="module")
def base(): return TargetModel(raw_model("target"))

def tiny(seed=0, V=3): return TargetModel(tiny_llama(V, 1, seed))

def trained(base, heads=3, make=Medusa, up=0., **kw):
    "Heads with random weights, as after training; an adapter of size `up`"
    torch.manual_seed(0)
    net = make(base, heads, **kw)
    with torch.no_grad():
        for w in net.heads.parameters(): w.add_(torch.randn_like(w) * .3)
        for w in net.adapter.up if up else (): w.normal_(std=up)
    return net.eval()

def random_batch(base, n=3, T=12): return batch_of(base, np.random.default_rng(0).integers(0, base.V, (n, T)))

# Heads that do not read a token

@proves("thm-blind")
@examples(25, laws(3), laws(6), st.tuples(*[laws(2)] * 3))
def test_the_bound_for_heads_that_do_not_read_a_token(P, q, inner):
    "Disjoint next distributions: one that ignores b overlaps by max P at most, n points have the n largest"
    # tokens 2b, 2b + 1
    after = [np.concatenate([w if b == c else 0 * w for c in range(3)]) for b, w in enumerate(inner)]
    sharp = [one_hot(2*b, 6, exact=True) for b in range(3)]
    mean = lambda p, q: sum(P[b] * overlap(p[b], q) for b in range(3))
    assert mean(after, q) <= max(P) == mean(sharp, sharp[int(np.argmax(P))])
    for n in (1, 2, 3):
        hit = lambda p: max(sum(P[b] * p[b][list(C)].sum() for b in range(3))
                            for C in combinations(range(6), n))
        assert hit(after) <= sum(sorted(P)[-n:]) == hit(sharp)

# The heads

def random_heads(net):
    for head in net.heads: head.lm.reset_parameters()
class WithoutResidual(MedusaHead):
    def forward(self, f): return self.lm(nn.functional.silu(self.step(f)))
class WithoutBlock(MedusaHead):
    "A copy of the target's head alone"
    def forward(self, f): return self.lm(f) + 0*self.step(f).sum()
def with_heads(kind):
    def make(base, heads=4):
        net = Medusa(base, heads)
        net.heads = nn.ModuleList(kind(base.head) for _ in range(heads))
        return net
    return make
def random_bias(net):
    "As upstream: the weights of the step are zero, its bias is not"
    for head in net.heads:
        head.step.reset_parameters()
        nn.init.zeros_(head.step.weight)

@proves("prop-untrained")
@faithful("Medusa", part="Medusa", plain={
    "random heads": otherwise(Medusa, random_heads), "no residual": with_heads(WithoutResidual),
    "no block": with_heads(WithoutBlock), "upstream's random bias": otherwise(Medusa, random_bias)})
def test_untrained_heads_are_the_targets(base, subject):
    "Its logits bit for bit, on real text; the gradient of the block is that of a step of slope 1/2"
    x = torch.tensor([text for d in DOMAINS for text in prompts(d, 2, length=48)])
    with torch.inference_mode(): out = base.model(input_ids=x, output_hidden_states=True)
    net, f = subject(base), out.hidden_states[-1].clone()
    assert len(net(f)) == 4 and all(torch.equal(z, out.logits) for z in net(f))
    f, w = f[0, :8].requires_grad_(), torch.randn(8, base.V)
    (net.heads[0](f) * w).sum().backward()
    want = (net.heads[0].lm.weight.T @ w.T / 2) @ f.detach()
    assert torch.allclose(net.heads[0].step.weight.grad, want, rtol=1e-3, atol=1e-4) and want.abs().max() > 1
    assert sum(w.numel() for w in net.parameters()) == 4 * (base.d**2 + base.d + base.d * base.V)

class PassForEachHead(MedusaDraft):
    def answers(self, tree):
        self.last = ((), [])
        return super().answers(tree)

@faithful("Medusa", part="MedusaDraft", plain={"a pass for each head": PassForEachHead})
def test_one_pass_of_the_heads_a_round(base, subject):
    "Also for a chain of four; the target is called once a round, and once for the prompt"
    net, prompt, model = load_network("medusa"), prompts("english", 1)[0], embedded(keep=(base.layers,))
    heads = subject(net, model)
    for _ in zip(range(6), rounds(model, Chain(heads, 4), reject, prompt, Seeded(0))): pass
    assert heads.meter.calls == heads.meter.tokens == 6
    assert model.meter.calls == 1 + 6   # the prompt before the first draft, and a pass a round

# The tree

class Table(Target):
    "Tabular heads in fractions: a distribution for each place after the last token but one"
    def __init__(self, V, seed): self.V, self.rows = V, random_table(V, seed)
    def __call__(self, tree):
        return Rows(lambda i: self.rows.law((*tree.ctx[:-1], tree.depth[i] % self.V)), len(tree), self.V)

def test_choices_come_from_the_unwarped_rows():
    "At temperature 0 the draft distribution is a point mass; a tree is chosen from the unwarped rows"
    b = tiny(3)
    net = trained(b, 2)
    for T in (0, 1):
        heads = MedusaDraft(net, HFModel(b.model, temperature=T, keep=(b.layers,), check=False))
        assert (heads(Tree((0, 1)))[0] == 1).any() == (T == 0)
        with torch.inference_mode(): z = net(heads.target.states((0,))[b.layers][-1])
        assert all(abs(row - z[j].softmax(-1).numpy()).max() < 1e-12 for j,
                   row in enumerate(HeadMarginals(heads, 2)((0, 1))))

paths = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)

@examples(25, seeds, st.lists(paths, unique=True, min_size=1, max_size=9), st.booleans())
def test_ranks_become_tokens(seed, some, short):
    "A path of ranks is the path of the heads' choices of these ranks"
    choices = sorted({v[:i] for v in some for i in range(1, len(v) + 1)}, key=lambda v: (len(v), v))
    weights = [0, 0, 3, 5] if short else [1, 2, 3, 5]
    law = lambda text: exact(*np.random.default_rng([seed, len(text)]).permutation(weights).tolist())
    rows = HeadMarginals(TableModel(4, law), 3)
    tree = MedusaTree(rows, choices, exact=True)((0, 1), Seeded(0))
    best = [top_tokens(row, 3) for row in rows((0, 1))]
    there = [v for v in choices if all(r < len(best[j]) for j, r in enumerate(v))]
    want = {tuple(best[j][r] for j, r in enumerate(v)) for v in there}
    assert {tree.path(i) for i in range(1, len(tree))} == want
    assert len(tree) == len(there) + 1 and all(tree.law[i][tree.token[i]] == 1 for i in range(1, len(tree)))

@pytest.fixture(scope="module")
def table(base):
    "The accuracy of the shipped heads by place and rank"
    batch = batch_of(base, [text for d in DOMAINS for text in prompts(d, 8, length=48, seed=5)])
    return head_accuracy(load_network("medusa"), batch, 3)[:3]

def two_of_each(table, n): return [v for k in (1, 2) for v in np.ndindex(*[2]*k)][:n]
def one_chain(table, n): return [(0,)*k for k in range(1, min(n, 3) + 1)]
def by_last_rank(table, n):
    "The ranks of largest accuracy, with the first choices before them"
    cells = sorted(np.ndindex(3, 3), key=lambda c: -table[c])
    paths = dict.fromkeys(path for j, r in cells for path in [*one_chain(table, j), (*[0]*j, r)])
    return [*paths][:n]

@faithful("Medusa", part="medusa_choices", plain={
    "two choices at each place": two_of_each, "a chain": one_chain,
    "the accuracy of the last rank": by_last_rank})
def test_the_calibrated_tree_is_the_best_of_all(table, subject):
    """On the table of the shipped heads: no connected tree of n nodes, among all of three ranks and places,
    has a larger expected number of accepted tokens"""
    worth = lambda paths: sum(np.prod([table[j][r] for j, r in enumerate(v)]) for v in paths)
    nodes = [v for k in (1, 2) for v in np.ndindex(*[3]*k)] + [(0, *v) for v in np.ndindex(3, 3)]
    for n in (2, 4):
        connected = [c for c in combinations(nodes, n) if all(len(v) == 1 or v[:-1] in c for v in c)]
        assert abs(worth(subject(table, n)) - max(map(worth, connected))) < 1e-12
        from_choices(subject(table, n))

def test_head_accuracy_counts_ranks():
    "By hand, and by chapter 20's counts, without the first places, where there is no state"
    b, k = tiny(4, V=5), 3
    net, batch = trained(b, 2), random_batch(b, 3, 14)
    x, f = batch.x.tolist(), batch.states[b.layers]
    heads = MedusaDraft(net, HFModel(b.model, keep=(b.layers,), check=False))
    slow, by_hand = skip_accuracy(HeadMarginals(heads, 2), x, k) * (3 * 12), np.zeros((2, k))
    for text in x:
        for j in range(2): slow[j, [r for r in range(k) if r == text[1 + j]]] -= 1
    for n, t, j in np.ndindex(3, 11, 2):
        best = net.heads[j](f[n, t]).argsort(descending=True)[:k].tolist()
        by_hand[j] += [y == x[n][t + 2 + j] for y in best]
    assert np.allclose(head_accuracy(net, batch, k), slow / 33) and np.allclose(by_hand, slow)
    marks, late = torch.arange(14).expand(3, -1) >= 5, StateDataset(batch.x[:, 3:], {b.layers: f[:, 3:]})
    counted = head_accuracy(net, replace(batch, counts=marks), k)   # the tokens from the sixth on
    assert np.allclose(counted, head_accuracy(net, late, k)) and not np.allclose(counted, by_hand / 33)

# Typical acceptance

def fixed_threshold(system):
    "Accepts what has a probability of .09, whatever the entropy"
    return verified(replace(system.verify, accepted=lambda p, q: np.where(p > .09, q, 0*q)))(system)

@proves("prop-typical")
@faithful("typical acceptance", plain={
    "a fixed threshold": fixed_threshold, "the likeliest token": verified(lenient_greedy(1)),
    "a share of the likeliest": "greedy lenience"})
def test_the_threshold_falls_with_the_entropy(subject):
    "1 of the 4 tokens of (.97, .01, .01, .01), all of (.5, .2, .1, .1, .1) and of 50 equal ones"
    rule = subject(constant(1, 1)).verify
    many = lambda p: int((rule.accepted(p, exact(*[1] * len(p))) > 0).sum())
    assert [many(exact(*w)) for w in ((97, 1, 1, 1), (5, 2, 1, 1, 1), [1]*50)] == [1, 5, 50]

@proves("prop-typical")
@examples(15, models(3), seeds)
def test_typical_is_greedy_where_the_target_is(both, seed):
    "Rows that are point masses: the longest typical path is plain greedy decoding"
    target, rows = cold(both[0]), HeadMarginals(Table(3, seed), 2)
    drafter = MedusaTree(rows, ((0,), (1,), (0, 0), (0, 1), (1, 0)), exact=True)
    assert loop_law(target, drafter, typical(), (0, 1), 4) == target_law(target, (0, 1), 4)
    p = both[0].law((0, 1))
    assert typical().accepted(p, p)[int(np.argmax(p))] > 0

def test_the_longest_path_is_chosen_and_of_equals_the_likeliest():
    "Against an enumeration of all paths"
    target, rule = random_table(4, 5, zeros=False), typical(.2, .5)
    for seed in range(20):
        rng, tree = np.random.default_rng(seed), Tree((0,))
        for _ in range(8):
            tree.grow(int(rng.integers(len(tree))), points(rng.permutation(4).tolist(), 4, exact=True),
                      Seeded(0), 1)
        p = target(tree)
        chance = lambda a: p[tree.parent[a]][tree.token[a]]
        good = lambda i: all(rule.accepted(p[tree.parent[a]], tree.law[a])[tree.token[a]] > 0
                             for a in tree.ancestors(i))
        score = lambda i: (tree.depth[i], sum(log(chance(a)) for a in tree.ancestors(i)))
        found = rule(p, tree, Seeded(0)).node
        assert score(found) == max(score(i) for i in range(len(tree)) if good(i))

# Medusa-2

def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=7, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=None,
                        eos_token_id=None)
    return TargetModel(GPT2LMHeadModel(config).double())

@pytest.mark.parametrize("make, names", [(lambda: tiny(5, V=7), 7), (gpt2, 8)])
def test_the_adapter_starts_at_zero_and_never_changes_the_target(make, names):
    "At zero the changed target is the target bit for bit; later a merged copy equals the changed one"
    b = make()
    batch, adapter = random_batch(b), Adapter(b, 2)
    before = {n: w.clone() for n, w in b.model.named_parameters()}
    original = batch.states[b.layers]
    assert torch.equal(adapter.states(batch.x), original) and len(adapter.names) == names
    assert not any("embed" in n or "lm_head" in n for n in adapter.names)
    with torch.no_grad():
        for w in adapter.up: w.normal_(std=.3)
    changed = batch_of(TargetModel(adapter.merged()), batch.x).states[b.layers]
    assert torch.allclose(changed, adapter.states(batch.x), atol=1e-12)
    assert abs(changed - original).max() > 1e-3
    assert all(torch.equal(w, before[n]) for n, w in b.model.named_parameters())

def test_the_adapter_adds_a_matrix_of_low_rank():
    b = tiny(5, V=7)
    adapter = Adapter(b, 2)
    with torch.no_grad(): adapter.up[0].normal_(std=.3)
    name = adapter.names[0]
    added = adapter.weights()[name] - b.model.get_parameter(name)
    assert torch.allclose(added, 8 * adapter.up[0] @ adapter.down[0])   # alpha / rank = 16/2
    assert torch.linalg.matrix_rank(added) == 2

class FrozenTarget(Medusa2):
    "Medusa-1: the heads alone"
    def base_loss(self, f, batch): return 0*sum(w.sum() for w in self.adapter.up)
    def loss(self, batch, at):
        return medusa_loss(self(batch.states[self.reads[0]]), batch.x) + self.base_loss(None, batch)
def random_adapter(net):
    "Neither factor of the adapter is zero at first"
    with torch.no_grad():
        for w in net.adapter.up: w.normal_(std=.05)
class NoWarmUp(Medusa2):
    "Heads and target together from the first step"
    def loss(self, batch, at): return super().loss(batch, 1.)
class HardLabels(Medusa2):
    "The changed target trained on the tokens, not on the original target"
    def base_loss(self, f, batch):
        z = self.base[0].head(f[:, :-1])
        return nn.functional.cross_entropy(z.flatten(0, 1), batch.x[:, 1:].flatten())

@faithful("Medusa-2", part="Medusa2", plain={
    "a frozen target": FrozenTarget, "an adapter that is not zero": otherwise(Medusa2, random_adapter),
    "hard labels": HardLabels})
@proves("prop-held-back")
def test_at_first_only_the_heads_loss_has_a_gradient(subject):
    "With the adapter at zero, KL and its gradient are zero, the gradient of the heads' loss is not"
    b = tiny(6, V=7)
    batch, net = random_batch(b), trained(b, 2, subject, rank=2)
    up, kl_of = list(net.adapter.up), lambda: net.base_loss(net.adapter.states(batch.x), batch)
    kl = kl_of()
    assert abs(kl) < 1e-12 and all(g.abs().max() < 1e-12 for g in torch.autograd.grad(kl, up))
    heads = torch.autograd.grad(medusa_loss(net(net.adapter.states(batch.x)), batch.x), up)
    after_warm_up = torch.autograd.grad(net.loss(batch, 1.), up)
    assert max(g.abs().max() for g in heads) > 1e-4
    assert all(torch.allclose(a, .2*g, rtol=1e-4, atol=1e-6) for a, g in zip(after_warm_up, heads))
    with torch.no_grad():
        for w in up: w.normal_(std=.05)
    kl = kl_of()
    assert kl > 1e-5 and sum((g * w).sum() for g, w in zip(torch.autograd.grad(kl, up), up)) > 0

@faithful("Medusa-2", part="Medusa2", plain={"a frozen target": FrozenTarget, "no warm-up": NoWarmUp})
def test_which_weights_are_trained(subject):
    "In the warm-up the heads alone, then heads and adapter; evaluation reads the changed states"
    b = tiny(7, V=7)
    batch, net = random_batch(b), trained(b, make=subject, rank=2, warm=.2)
    def moved(at):
        net.zero_grad(set_to_none=True)
        net.loss(batch, at).backward()
        return {n.split(".")[0] for n, w in net.named_parameters() if w.grad is not None
                and w.grad.abs().max() > 1e-9}
    assert moved(.1) == {"heads"} and moved(.2) == moved(.9) == {"heads", "adapter"}
    net = trained(b, 2, subject, up=.3, rank=2)
    changed = TargetModel(net.adapter.merged())
    got = evaluate(net, b, AdaptedStates(net, batch.x), 2)
    same = evaluate(net, changed, batch_of(changed, batch.x), 2)
    assert abs(got[0] - same[0]) < 1e-9 and np.allclose(got[1], same[1])
    assert abs(got[0] - evaluate(net, b, batch, 2)[0]) > 1e-4

@proves("prop-other")
@examples(20, models(3))
def test_distance_of_two_targets_by_their_steps(both):
    "TV of three tokens is at most the mean, over p's texts, of the sum of the steps' TV"
    p, q = both
    steps = lambda y: sum(tv(p.law((0, *y[:i])), q.law((0, *y[:i]))) for i in range(3))
    bound = sum(w * steps(y) for y, w in target_law(p, (0,), 3).items())
    assert tv_outcomes(target_law(p, (0,), 3), target_law(q, (0,), 3)) <= bound

def with_original_target(net):
    with torch.no_grad(): [w.zero_() for w in net.adapter.up]
    return net
def heads_in_reverse(net):
    net.heads = nn.ModuleList([*net.heads][::-1])
    return net

@pytest.fixture(scope="module")
def human(base): return batch_of(base, [text for d in DOMAINS for text in prompts(d, 12, length=64, seed=3)])

@pytest.fixture(scope="module")
def first_and_untrained(base, human):
    return [evaluate(net, base, human, 4)[0] for net in (load_network("medusa"), Medusa(base))]

def by_text(net, base, data):  # -> (texts,)
    "Mean tokens of a round in each text"
    at, = net.reads
    rows = [StateDataset(x[None], {at: h[None]}) for x, h in zip(data.x, data.states[at])]
    return np.array([evaluate(net, base, row, 4)[0] for row in rows])

@faithful("Medusa-2", plain={
    "the original target": with_original_target, "the heads in reverse": heads_in_reverse})
def test_the_shipped_pair(base, human, first_and_untrained, subject):
    """Medusa-2's heads are better on the changed target than Medusa-1's on the original, and better than they
    are there themselves, by three standard errors"""
    two, (first, untrained) = subject.shipped(), first_and_untrained
    changed = TargetModel(two.adapter.merged())
    theirs = batch_of(changed, human.x)
    second = by_text(two, changed, theirs)
    gain = second - by_text(two, base, human)
    assert second.mean() > first > untrained + .2
    assert gain.mean() > 3*gain.std(ddof=1)/len(gain)**.5 > 0
    p, q = (base.head(s.states[base.layers]).softmax(-1) for s in (human, theirs))
    assert .001 < (p - q).abs().sum(-1).mean() / 2 < .2
