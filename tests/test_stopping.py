"Chapter 24a: when the best schedule stops, and the two networks that predict acceptance"
from dataclasses import replace
from fractions import Fraction as F
from itertools import chain, combinations
from math import prod

import numpy as np, pytest, torch
from hypothesis import strategies as st
from torch import nn

from helpers import constant, examples, faithful, models, proves, seeds, tiny
from published import having
from specref import (embedded, exact, HFModel, law_of, overlap, prompts, reject, rounds, Seeded, TableModel,
                     Tree)
from specref.draft.length import ConfidenceLength, Disco, Schedule, ScheduledChain, SpecDecPP
from specref.models.embedded import DATA, raw_model
from specref.train import stopping
from specref.train.stopping import (AcceptanceHead, LengthRecipe, Recorded, StateHead, acceptance_loss,
                                    best_stopping, classifier_data, draft_features, length_prompts,
                                    mixed_texts, rate_difference, reliability, replay, rollouts,
                                    stopping_network, train_lengths, unweighted)

class Listed(Schedule):
    "Goes on after the listed texts"
    def __init__(self, go): self.go = go
    def more(self, tree, q): return tree.text(len(tree) - 1) in self.go

def rate(p, q, schedule, c, most):
    "Tokens per cost of one round"
    def once(rng):
        round = next(rounds(p, ScheduledChain(q, schedule, most), reject, (0,), rng))
        return len(round.tokens), 1 + c * (len(round.tree) - 1)
    law = law_of(once)
    return law.of(lambda o: o[0]).mean() / law.of(lambda o: o[1]).mean()

costs = st.sampled_from([F(1, 10), F(1, 3), F(3, 4)])

@proves("thm-stopping")
@examples(15, models(2), costs)
def test_no_schedule_is_better(pair, c):
    "The value by dynamic programming is that of the best of all sets of texts after which a draft goes on"
    texts = [(0,), (0, 0), (0, 1)]
    every = chain.from_iterable(combinations(texts, k) for k in range(4))
    best = max(rate(*pair, Listed({*go}), c, 2) for go in every)
    ratio, go = best_stopping(*pair, (0,), c, 2)
    assert ratio == best == rate(*pair, Listed(go), c, 2)

@proves("thm-stopping")
@examples(25, models(), costs)
def test_where_the_best_schedule_stops(pair, c):
    "It stops where S <= ρc, and goes on where the next token gains more than its price"
    p, q = pair
    ratio, go = best_stopping(p, q, (0,), c, 3)
    level = [((0,), 1)]
    for _ in range(3):
        for text, S in level:
            gains = S * overlap(p.law(text), q.law(text)) > ratio*c
            assert (text not in go or S > ratio*c) and (text in go or not gains)
        level = [((*text, x), S * min(1, p.law(text)[x] / q.law(text)[x])) for text, S in level
                 if text in go for x in range(3) if q.law(text)[x]]

@proves("thm-stopping")
@examples(25, st.sampled_from([(exact(4, 3, 2), exact(2, 3, 4)), (exact(7, 2, 1), exact(4, 3, 3))]), costs)
def test_one_acceptance_rate_everywhere(laws, c):
    "Then the rule S β > ρc is the best one, the last token's own acceptance included"
    p, q = (TableModel(3, lambda text, law=law: law) for law in laws)
    ratio, go = best_stopping(p, q, (0,), c, 3)
    beta, level = overlap(*laws), [((0,), 1)]
    for _ in range(3):
        assert all((text in go) == (S * beta > ratio*c) for text, S in level)
        a = [min(1, laws[0][x] / laws[1][x]) for x in range(3)]
        level = [((*text, x), S * a[x]) for text, S in level if text in go for x in range(3)]

# SpecDec++

def drafted_until(rule): return having(schedule=rule)

class Newest(SpecDecPP):
    "The prediction for the last examined token alone"
    def more(self, tree, q):
        return len(tree) <= self.shortest or 1 - self.head(tree, len(tree) - 2) <= self.threshold

class Five(SpecDecPP):
    def more(self, tree, q): return len(tree) <= 5

class Included(SpecDecPP):
    "The newest token is in the product"
    def more(self, tree, q):
        survival = prod(self.head(tree, i) for i in range(1, len(tree)))
        return len(tree) <= self.shortest or 1 - survival <= self.threshold

@faithful("SpecDec++", plain={
    "newest token alone": drafted_until(Newest), "newest included": drafted_until(Included),
    "constant length": drafted_until(Five)})
@examples(40, st.data())
def test_the_product_of_predicted_acceptances(subject, data):
    "It ends at the first n >= 2 with 1 - Π_{i<n} a_i > h, at most 20"
    a = data.draw(st.lists(st.integers(5, 10).map(lambda x: x / 10), min_size=20, max_size=20))
    h = data.draw(st.sampled_from([.25, .45, .75]))
    tree = judged(subject(constant(1, 1), gamma=20), head=lambda tree, node: a[node - 1], threshold=h)
    ends = [n for n in range(2, 21) if 1 - prod(a[:n - 1]) > h]
    assert len(tree) - 1 == min([*ends, 20])

def judged(system, seed=0, **judge):  # -> tree
    "A draft of the system, whose network is given"
    return having(schedule=lambda rule: replace(rule, **judge))(system).drafter((0,), Seeded(seed))

class Free(AcceptanceHead):
    "A head without residual connections"
    def forward(self, s):
        for block in [*self.blocks] * self.times: s = nn.functional.silu(block(s))
        return self.out(s)

@faithful("SpecDec++", part="AcceptanceHead", plain={
    "no residual": Free, "linear": lambda width: AcceptanceHead(width, depth=0, shared=False)})
def test_the_head_is_residual(subject):
    "Depth 3, x + SiLU(Wx + b) each time with one block, as in the authors' code"
    torch.manual_seed(0)
    head, s = subject(8), torch.randn(5, 8)
    assert len(head.blocks) == 1
    block, want = head.blocks[0], s
    for _ in range(3): want = want + nn.SiLU()(want @ block.weight.T + block.bias)
    assert torch.allclose(head(s), head.out(want), atol=1e-6)
    assert len({id(b) for b in AcceptanceHead(8, shared=False).blocks}) == 3

def unbalanced(logits, accepted, weight): return acceptance_loss(logits, accepted, 1.)
def hard(logits, accepted, weight): return acceptance_loss(logits, accepted.round(), weight)

@faithful("SpecDec++", part="acceptance_loss", plain={"no weight": unbalanced, "hard labels": hard})
def test_soft_labels_and_a_weight_of_six(subject):
    "The loss is torch's weighted cross-entropy, mixed by the soft labels; its optimum is inverted"
    torch.manual_seed(0)
    z, a = torch.randn(40, 2), torch.rand(40)
    loss = nn.CrossEntropyLoss(torch.tensor([6., 1.]), reduction="none")
    no, yes = (loss(z, torch.full((40,), k)) for k in (0, 1))
    want = (no * (1 - a) + yes * a).sum() / (6 * (1 - a) + a).sum()
    assert torch.allclose(subject(z, a, 6.), want)

@examples(30, st.floats(.01, .99), st.sampled_from([1., 6.]))
def test_the_optimum_of_the_weighted_loss(a, w):
    "At the stated prediction the derivative is 0, and inverting it gives the label"
    found = a / (a + w * (1 - a))
    z = torch.tensor([[np.log(1 - found), np.log(found)]], requires_grad=True)
    acceptance_loss(z, torch.tensor([a]), w).backward()
    assert z.grad.abs().max() < 1e-6 and abs(unweighted(found, w) - a) < 1e-9

# Data

def both(): return tiny(V=7, seed=0).float(), tiny(V=7, layers=1, seed=1).float()

def gen(seed=0): return torch.Generator().manual_seed(seed)

def test_token_mixing():
    "The kept share has no label; the others are labelled by the ratio after the target's own text"
    target, draft = both()
    x = torch.randint(7, (40, 30), generator=gen())
    z, a = mixed_texts(target, draft, x, 10, .15, gen(1))
    kept = a < 0
    assert (z[:, :10] == x[:, :10]).all() and (z[:, 10:][kept] == x[:, 10:][kept]).all()
    assert abs(kept.float().mean() - .15) < .05
    p, q = HFModel(target, check=False), HFModel(draft, check=False)
    for i, j in ((0, 10), (3, 17), (7, 29)):
        text, y = tuple(x[i, :j].tolist()), int(z[i, j])
        if not kept[i, j - 10]: assert abs(a[i, j-10] - min(1, p.law(text)[y] / q.law(text)[y])) < 1e-4

def test_rollouts_are_drafts_that_were_tested():
    "Rows, acceptance and states of the models; accepted counts with the acceptance's mean"
    target, draft = both()
    n = 600
    drafts = rollouts(target, draft, torch.zeros(n, 2, dtype=torch.int64), 4, gen())
    p, q = HFModel(target, check=False), HFModel(draft, keep=(1,), check=False)
    text = tuple(drafts.x[5].tolist())
    for i in range(4):
        assert abs(drafts.q[5, i] - q.law(text[:2 + i])).max() < 1e-5
        ratio = p.law(text[:2 + i])[text[2 + i]] / q.law(text[:2 + i])[text[2 + i]]
        assert abs(drafts.a[5, i] - min(1, ratio)) < 1e-4
    assert (drafts.states[5] - q.states(text)[1][2:]).abs().max() < 1e-4
    mean, passed = drafts.a[:, 0].mean(), (drafts.accepted > 0).mean()
    assert abs(passed - mean) < 5.5 * (mean * (1 - mean) / n)**.5 + 1e-3

def test_a_replay_is_the_schedule_on_the_same_draft():
    "Length and accepted tokens of `replay` are those of the rule on the recorded tokens"
    drafts = rollouts(*both(), torch.cartesian_prod(torch.arange(6), torch.arange(6)), 6, gen())
    counts = replay(ConfidenceLength(.3, adaptive=False), drafts)
    for x, q, A, (n, accepted) in zip(drafts.x, drafts.q, drafts.accepted, counts.T):
        sure = [q[i][x[2 + i]] >= .3 for i in range(6)]
        assert n == min(6, 1 + [*sure, False].index(False)) and accepted == min(A, n)
    heads = Recorded(drafts, drafts.a)
    tree = Tree(tuple(drafts.x[4, :2].tolist()))
    assert heads(tree, 3) == drafts.a[4, 2]

# DISCO

class Three(Disco):
    def more(self, tree, q): return len(tree) <= 3

class Peak(Disco):
    "A threshold on the largest probability"
    def more(self, tree, q): return len(tree) == 1 or max(tree.law[len(tree) - 1]) >= self.threshold

@faithful("DISCO", plain={"largest probability": drafted_until(Peak), "constant": drafted_until(Three)})
@examples(30, seeds)
def test_disco_asks_its_classifier(subject, seed):
    "It ends after the first token whose row and position the classifier predicts to be rejected"
    rng = np.random.default_rng(seed)
    rows = rng.dirichlet(np.ones(4), 21)
    draft = TableModel(4, lambda text: rows[len(text) - 1])
    weight = rng.normal(size=4)
    def classify(row, position): return 1 / (1 + np.exp(-(weight @ row * 6 - .2 * position + 1)))
    tree = judged(subject(draft, gamma=20), seed, classify=classify)
    stops = [n for n in range(1, 21) if classify(rows[n - 1], n) < .5]
    assert len(tree) - 1 == min([*stops, 20])

def no_position(q, position, most=20): return draft_features(q, 0, most)
def no_entropy(q, position, most=20):
    return draft_features(q, position, most) * np.array([1]*10 + [0, 1], np.float32)

@faithful("DISCO", part="draft_features", plain={"no position": no_position, "no entropy": no_entropy})
def test_the_features_of_disco(subject, monkeypatch):
    "The 10 largest probabilities, the entropy, the position; oracle labels up to the first rejection"
    monkeypatch.setattr(stopping, "draft_features", subject)
    drafts = rollouts(*both(), torch.zeros(40, 2, dtype=torch.int64), 5, gen())
    x, b = classifier_data(drafts)
    want = [(q[i], i, float(i < A)) for q, A in zip(drafts.q, drafts.accepted) for i in range(min(A + 1, 5))]
    assert b.tolist() == [label for _, _, label in want]
    for row, (q, i, _) in zip(x.numpy(), want):
        top = sorted(q, reverse=True) + [0]*3
        assert np.allclose(row, [*top, -(q * np.log(q)).sum(), (i + 1) / 5], atol=1e-5)

# Both, exact and trained

def test_the_head_reads_the_states_of_the_draft():
    "No further draft call, and the state of the token that a fresh pass computes"
    head = AcceptanceHead(256)
    model, prompt = embedded("small", keep=(1,)), prompts("code", 1)[0]
    read = StateHead(head, model)
    tree = ScheduledChain(model, SpecDecPP(read, 1.), 5)(prompt, Seeded(0))
    with torch.inference_mode():
        fresh = raw_model("small")(input_ids=torch.tensor([tree.text(5)]), output_hidden_states=True)
        want = head(fresh.hidden_states[-1][0, len(prompt):]).softmax(-1)[:, 1].tolist()
    assert [read(tree, i) for i in range(1, 4)] == pytest.approx(want[:3], abs=1e-4)
    assert model.meter.calls == 5

def test_the_shipped_networks():
    "Small files with their recipe; on held-out drafts better than the best constant prediction"
    files = [*DATA.glob("lengths/*/model.safetensors")]
    assert len(files) == 2 and all(f.stat().st_size < 200_000 for f in files)
    drafts = rollouts(raw_model("target"), raw_model("small"), length_prompts(True, 96, 32, 5), 8, gen(5))
    tested = torch.from_numpy(np.arange(8) <= drafts.accepted[:, None])
    a = torch.from_numpy(drafts.a)[tested]
    rows = torch.tensor(np.array([[draft_features(q[i], i + 1) for i in range(8)] for q in drafts.q]))
    with torch.inference_mode():
        found = {"specdec++": (stopping_network("specdec++")(drafts.states), 6.),
                 "disco": (stopping_network("disco")(rows), 1.)}
        for name, (z, w) in found.items():
            share = (w * (1 - a)).sum() / (w * (1 - a) + a).sum()
            plain = torch.stack([share, 1 - share]).log().expand(len(a), 2)
            assert acceptance_loss(z[tested], a, w) < acceptance_loss(plain, a, w) - .005, name

def test_training(tmp_path, monkeypatch):
    "One command trains both; an interrupted run ends with the same weights"
    target, draft = both()
    monkeypatch.setattr(stopping, "raw_model", dict(target=target, small=draft).get)
    monkeypatch.setattr(stopping, "domain_ids", lambda d, held_out: np.arange(500) % 7)
    recipe = LengthRecipe(tokens=200, texts=4, length=40, prompt=8, drafts=12, most=4, head_steps=4,
                          classifier_steps=4, rows=16)
    for name in ("a", "b"):
        train_lengths(tmp_path/name, recipe)
        if name == "b": (tmp_path/"b/classifier.pt").unlink()
    train_lengths(tmp_path/"b", recipe)
    for file in ("specdec++/model.safetensors", "disco/model.safetensors", "disco/recipe.json"):
        assert (tmp_path/"a/lengths"/file).read_bytes() == (tmp_path/"b/lengths"/file).read_bytes()

# Reports

def test_intervals_and_bins():
    "The paired interval covers the difference at its rate; bins of equal size, and their error"
    rng, inside = np.random.default_rng(0), 0
    for _ in range(300):
        A = rng.geometric(.4, 200) - 1
        one, two = (np.stack([np.full(200, k), np.minimum(A, k)]) for k in (2, 3))
        true = [sum(.6**i for i in range(k + 1)) / (1 + k/10) for k in (2, 3)]
        difference, half = rate_difference(one, two, .1)
        inside += abs(difference - (true[0] - true[1])) <= half
    assert .90 <= inside / 300 <= .985
    rows, error = reliability(np.array([.1, .2, .6, .8]), np.array([0., 1., 1., 1.]), bins=2)
    assert [n for _, _, n in rows] == [2, 2] and np.isclose(error, (.35 + .3) / 2)
