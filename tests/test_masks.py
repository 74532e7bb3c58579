"33_masks: slots and masks, what sees them, rows of training and drafting, exact laws, the released rule"
import json
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial

import numpy as np, pytest, torch

from helpers import examples, faithful, pairs, proves, round_tokens, tiny
from networks import random_texts
from published import drafted, having, verified
from specref import (Chain, exact, generate, HFModel, law_of, loop_law, random_table, reject, rounds,
                     Seeded, target_law, Tree)
from specref.core.target import ModelView
from specref.models.embedded import DATA, raw_model
from specref.models.recipe import llama
from specref.train.harness import StateDataset, TargetModel
from specref.train.masks import (PaSS, PassDraft, SlotRows, append_groups, extend_table, group_labels,
                                 group_logits, random_cuts, random_span, slot_chain)
from specref.train.space import (Space, SpaceRecipe, mask_overlaps, redraw, redraw_distance,
                                 space_evaluation, space_loss, space_target, with_mask)
from specref.train.synthetic import branch_texts, chain_tokens, overlap_at

V, L = 5, 3

texts = partial(random_texts, V)

def network(make=PaSS, **kw):
    "Slots on a tiny target, in double precision"
    base = TargetModel(tiny(V, layers=3))
    torch.manual_seed(1)
    return make(base, L, **kw).double().eval()

def drafting(net, temperature=.7, make=PassDraft):
    target = HFModel(net.extended(), temperature, check=False)
    return make(net, target)

# What is trained

def test_what_is_trained():
    "L d numbers"
    assert sum(w.numel() for w in network().parameters()) == L * 16

def test_cuts_and_spans():
    "Different places, none so late that a label is missing; a span is a run of the text"
    x = torch.arange(40).repeat(3, 1)
    cuts = random_cuts(x, L, 9)
    assert len({tuple(row) for row in cuts.tolist()}) == 3   # each text has its own
    assert cuts.shape == (3, 9) and all(len({*row}) == 9 for row in cuts.tolist()) and cuts.max() <= 35
    assert group_labels(x, cuts, L)[0, 0].tolist() == [int(cuts[0, 0]) + j + 1 for j in range(1, L + 1)]
    part = random_span(StateDataset(x, {}, x > 20), 12)
    assert part.x[0].tolist() == [*range(int(part.x[0, 0]), int(part.x[0, 0]) + 12)]
    assert torch.equal(part.counts, part.x > 20) and random_span(StateDataset(x, {}), 99).x.shape == (3, 40)

# Who sees what

def seen_by_all(x, cuts, slots):
    tokens, at, see = append_groups(x, cuts, slots)
    return tokens, at, torch.ones_like(see).tril()
def slots_in_the_text(x, cuts, slots):
    tokens, at, see = append_groups(x, cuts, slots)
    later = (at[:, None] < at[:, :, None]) & (torch.arange(at.shape[1]) >= x.shape[1])
    return tokens, at, see | later

@faithful("PaSS", "SPACE", part="append_groups", plain={
    "groups that see other groups": seen_by_all, "slots that later tokens see": slots_in_the_text})
@proves("thm-groups")
def test_groups_are_separate_texts(subject, monkeypatch):
    "The rows of the text are those without groups, those of a group those of its own text"
    monkeypatch.setattr("specref.train.masks.append_groups", subject)
    model, x, slots = tiny(V + 2), texts(2, 9), torch.tensor([5, 6])
    cuts = torch.tensor([[0, 3, 4], [1, 2, 6]])
    with torch.no_grad():
        text, groups = group_logits(model, x, cuts, slots, torch.float64)
        assert torch.allclose(text, model(input_ids=x).logits, atol=1e-10)
        for n, m in np.ndindex(2, 3):
            alone = torch.cat([x[n, :cuts[n, m] + 1], slots])[None]
            assert torch.allclose(groups[n, m], model(input_ids=alone).logits[0, -2:], atol=1e-10)

class StoredSlots(ModelView):
    "Wrong: slots of the first drafting call stay in the cache, before all later tokens"
    def __call__(self, tree):
        kept = Tree((*tree.ctx[:3], *range(V, V + L), *tree.ctx[3:]) if len(tree.ctx) > 3 else tree.ctx)
        for u, x in zip(tree.parent[1:], tree.token[1:]): kept.add(u, x)
        return self.model(kept)

@proves("thm-groups")
@pytest.mark.parametrize("view, nothing", [(lambda target: target, True), (StoredSlots, False)])
def test_slots_leave_nothing_behind(view, nothing):
    "After drafting calls the rows of the target are those of plain passes; with stored slots they are not"
    net = network()
    draft = drafting(net, 1.)
    run = rounds(view(draft.target), Chain(draft, L + 1), reject, (0, 1, 2), Seeded(0))
    plain = HFModel(net.base[0].model, check=False)
    same = [np.allclose(round.p[i], plain.law(round.tree.text(i)), atol=1e-9)
            for _, round in zip(range(6), run) for i in range(len(round.tree))]
    assert all(same) == nothing

# PaSS decodes

class HeadsAlone(SlotRows):
    "The slots' rows alone: the first token is not the target's"
    def __call__(self, tree):
        shifted = Tree(tree.ctx)
        for d in range(1, max(tree.depth) + 2): shifted.add(d - 1, 0)
        rows = super().__call__(shifted)
        return [rows[min(d + 1, len(rows) - 1)] for d in tree.depth]

def by_slots(make): return having(model=lambda draft: make(draft.target, draft.slots))

@faithful("PaSS", plain={"slots without the exact token": by_slots(HeadsAlone)})
@proves("prop-first-edge")
def test_the_first_token_is_exact(subject):
    "Its edge states p, and it is never rejected; by enumeration"
    for seed in range(4):
        target = random_table(3, seed)
        system = subject(SlotRows(target, (3, 4)), gamma=2)
        def first(rng):
            tree = system.drafter((0,), rng.draft)
            return tuple(tree.law[1]), system.verify(target(tree), tree, rng.verify).node > 0
        found = law_of(lambda rng: first(rng.at(0)))
        assert found == {(tuple(target.law((0,))), True): 1}

def test_rows_of_slots_are_those_of_their_context():
    "Also of one as long as the context before"
    target = random_table(3, seed=0)
    draft = SlotRows(target, (3,))
    for ctx in ((0,), (1,), (1, 2), (2, 2)):
        rows, want = draft(slot_chain(ctx, (0,))), target(slot_chain(ctx, (3,)))
        assert all((rows[i] == want[i]).all() for i in range(2))

@pytest.mark.parametrize("make", [PassDraft, lambda net, target: SlotRows(target, net.ids.tolist())])
def test_slots_end_with_the_positions(make):
    "A draft of one token has a slot chain of L: it stops before the slots have no position left"
    draft = drafting(network(), 1., make)
    draft.target.most = 12
    run = generate(draft.target, Chain(draft, 1), reject, (0, 1), 11, Seeded(0))
    assert draft.most == 12 - L and len(run) == 11

def expected(target, ctx, rows):
    "1 + Σ_x min(p, q_1)(x) (1 + Σ min(p, q_2) ...), over the paths of a round"
    if not rows: return 1
    share = np.minimum(target.law(ctx), rows[0])
    return 1 + sum(w * expected(target, (*ctx, x), rows[1:]) for x, w in enumerate(share) if w > 0)

def after_slots(target, ctx, n):
    p = target(slot_chain(ctx, range(target.V, target.V + n)))
    return [p[i] for i in range(n + 1)]

class WastedToken(SlotRows):
    "The slots behind the text without its last token, which is known: as heads are used"
    def __call__(self, tree):
        rows = self.target(slot_chain(tree.ctx[:-1], self.slots))
        return [rows[min(d + 1, len(self.slots))] for d in tree.depth]

@faithful("PaSS", plain={"the exact token not offered": by_slots(WastedToken)})
@proves("thm-two-calls")
def test_two_to_l_plus_two_tokens_in_two_calls(subject):
    "The mean in fractions, two calls of the target a round, and the bounds"
    for seed in range(4):
        target = random_table(3, seed)
        system = subject(SlotRows(target, (3, 4)), gamma=3)
        found = round_tokens(target, system.drafter, system.verify, (0, 1))
        rows = after_slots(target, (0, 1), 2)
        assert found.keys() <= {2, 3, 4} and found.mean() == expected(target, (0, 1), rows)
    run = subject(SlotRows(target, (3, 4)), gamma=3)(target, (0, 1), 30, Seeded(0))
    calls = run.ledger.models["target"].calls
    assert calls == 2 * len(run.ledger.rounds) <= 30

# SPACE

class SharedGroups(Space):
    "Wrong: the masks of a group see those of the group before"
    def __call__(self, ctx, rng):
        tree, other = super().__call__(ctx, rng), Tree(ctx)
        for i in range(1, len(tree)):
            first = tree.law[i] is None and tree.parent[i] and tree.law[tree.parent[i]] is not None
            other.add(i - 1 if first else tree.parent[i], tree.token[i], tree.law[i])
        return other

class LateRows(Space):
    "Wrong: the rows of the group behind the context, whatever was accepted"
    def learn(self, round): return super().learn(replace(round, verdict=replace(round.verdict, node=0)))

@faithful("SPACE", part="Space", plain={"masks that see another group": SharedGroups,
                                         "the first group's rows": LateRows})
@proves("thm-fused")
def test_the_next_rows_are_those_of_a_separate_pass(subject):
    "Each round's candidates have the rows of masks behind the accepted text alone, in double precision"
    model, k = tiny(V + 1), 2
    target, plain = (HFModel(model, .7, V=V, check=False) for _ in range(2))
    drafter, accepted = subject(V, k), set()
    for round in rounds(target, drafter, reject, (0, 1, 2), Seeded(2)):
        drafter, end = drafter.learn(round), round.tree.text(round.verdict.node)
        p = plain(slot_chain(end, (V,) * k))
        for j in range(k): assert np.allclose(drafter.rows[j], p[j + 1], atol=1e-10)
        accepted.add(round.verdict.node)
        if accepted == {0, 1, 2}: break

@faithful("SPACE", plain={"a drafting call and a validation call": drafted(
    lambda space: Chain(SlotRows(random_table(3, seed=1), (0,) * space.k), space.k + 1))})
@proves("thm-fused")
def test_one_call_a_step(subject):
    "Of (k + 1)² rows, from the second step on; 1 to k + 1 tokens"
    target, k = random_table(3, seed=1), 2
    run = subject(target, gamma=k)(target, (0,), 40, Seeded(0))
    assert run.ledger.models["target"].calls == len(run.ledger.rounds)
    assert {*run.ledger.column("drafted")[1:]} == {k} and {*run.ledger.column("emitted")[:-1]} <= {1, 2, 3}
    target = HFModel(tiny(V + 1), V=V, check=False)
    run, fed = rounds(target, subject.drafter(target, dict(mask=V), gamma=k), reject, (0, 1), Seeded(0)), []
    for _ in range(5):
        next(run)
        fed.append(target.meter.tokens - sum(fed))
    assert fed == [2 + k] + [(k + 1)**2] * 4

@faithful("SPACE", plain={"SPACE's released rule": verified(redraw)})
@proves("thm-fused")
def test_the_text_of_space_is_its_models(subject):
    "Every path enumerated, over four tokens of three rounds and more"
    for seed in range(3):
        target = random_table(3, seed)
        system = subject(target, dict(mask=3), gamma=2)
        assert loop_law(target, system.drafter, system.verify, (0,), 4) == target_law(target, (0,), 4)

@proves("thm-redraw")
@examples(60, pairs())
def test_the_distance_of_the_released_rule(pair):
    "The distribution of the token after a rejection or acceptance, enumerated in fractions"
    p, q = pair
    def token(rng):
        tree = Tree((0,))
        node = tree.add(0, x := rng.pick(q, at="draft"), q)
        verdict = redraw([p, p], tree, rng)
        return x if verdict.node == node else verdict.token
    found = law_of(token)
    assert sum(abs(found.get(x, 0) - p[x]) for x in range(len(p))) / 2 == redraw_distance(p, q)

def test_a_rejection_is_followed_by_the_row_of_its_node():
    "The first token is accepted, the second has probability 0: the row after the first is sampled"
    tree, p = Tree((0,)), (exact(1, 0, 0), exact(0, 1, 1), exact(1, 1, 1))
    for node in (0, 1): tree.add(node, 0, exact(1, 0, 0))
    assert law_of(lambda rng: redraw(p, tree, rng).token) == {1: Fraction(1, 2), 2: Fraction(1, 2)}

def test_a_chain_that_is_cut_has_no_next_candidates():
    "At the longest text of the model no tree is drafted, and decoding goes on"
    target = HFModel(tiny(V + 1), V=V, check=False)
    target.most = 12
    text = generate(target, Space(V, 2), reject, (0, 1), 11, Seeded(0))
    assert len(text) == 11 and text.ledger.column("drafted")[-2:] == [0, 0]

# SAR-SFT

def hand_space_loss(model, x, k, weight):
    "All places cut: the mean of the next tokens' losses, plus that of every mask of every group"
    nats = lambda z, y: -z.log_softmax(-1)[y]
    rows = [model(input_ids=y[None]).logits[0] for y in x]
    text = [nats(z, y) for row, own in zip(rows, x) for z, y in zip(row, own[1:])]
    masks = []
    for n in range(len(x)):
        for t in range(x.shape[1] - k - 1):
            alone = torch.cat([x[n, :t+1], torch.full((k,), V)])[None]
            rows = model(input_ids=alone).logits[0, -k:]
            masks += [nats(z, y) for z, y in zip(rows, x[n, t+2:])]
    return torch.stack(text).mean() + weight * torch.stack(masks).mean()

def test_the_loss_of_space_by_hand():
    model, x = tiny(V + 1), texts(2, 8)
    assert torch.allclose(space_loss(model, x, 2, 99, .3), hand_space_loss(model, x, 2, .3), atol=1e-9)

def test_the_model_begins_as_it_was():
    "The rows of its tokens are those of the model, and the mask begins as the mean embedding"
    model = llama(2, 64, 64, V)
    new, x = with_mask(model), texts()
    with torch.no_grad():
        assert torch.allclose(new(input_ids=x).logits[..., :V], model(input_ids=x).logits, atol=1e-5)
        assert torch.allclose(new.lm_head.weight[V], model.lm_head.weight.mean(0))
    assert new.lm_head.weight is new.model.embed_tokens.weight and len(new.lm_head.weight) == V + 1

def test_the_tables_rows_are_the_only_copy():
    model = tiny(V)
    longer = extend_table(model, torch.ones(2, 16, dtype=torch.float64))
    shared = {n for n, w in longer.named_parameters() if w.data_ptr() == model.get_parameter(n).data_ptr()}
    assert {n for n, _ in model.named_parameters()} - shared == {"model.embed_tokens.weight"}
    assert longer.get_input_embeddings().num_embeddings == V + 2
    assert len(model.get_input_embeddings().weight) == V

# The branching source

B, TAIL = 4, 2

@pytest.fixture(scope="module")
def tuned():
    "A small model trained by SPACE's loss on the branching source"
    torch.manual_seed(0)
    model = llama(2, 64, 64, B*(TAIL + 1) + 1)
    opt = torch.optim.AdamW(model.parameters())
    for step in range(120):
        torch.manual_seed(step)
        x = torch.from_numpy(branch_texts(B, TAIL, 12, 20, (1, step)).astype(np.int64))
        opt.param_groups[0]["lr"] = 5e-3 * min(1, (step + 1)/20) * (1 - step/120)
        space_loss(model, x, 3, 8, 1.).backward()
        opt.step()
        opt.zero_grad()
    return model.eval()

def test_masks_reach_the_bound_of_independent_heads(tuned):
    "Overlaps at most the closed form of Theorem capped, and near it; well below sequential heads"
    x = torch.from_numpy(branch_texts(B, TAIL, 64, 25, 7).astype(np.int64))
    overlaps, tokens = mask_overlaps(tuned, x, 3)
    def bound(j): return float(sum(overlap_at(B, TAIL, i, j) for i in range(TAIL + 1)) / (TAIL + 1))
    most = [bound(j) for j in range(3)]
    assert all(a - .12 < b < a + .03 for a, b in zip(most, overlaps))
    assert chain_tokens(B, TAIL, 3) - .3 < tokens < chain_tokens(B, TAIL, 3) + .1

# The embedded models

def untrained(): return with_mask(raw_model("large"))

@faithful("SPACE", part="space_model", plain={"no fine-tuning": untrained})
def test_the_shipped_model_fills_in_masks(subject):
    "The card is the recipe's, and its numbers are found again"
    made = json.loads((DATA/"space"/"recipe.json").read_text())
    found = space_evaluation(subject(), made["recipe"]["k"])
    assert made["recipe"] == asdict(SpaceRecipe())
    assert found["overlaps"] == pytest.approx(made["evaluation"]["overlaps"], abs=.01)
    assert found["loss"] < found["before"] + .2 and subject().config.vocab_size == 513
    assert sum(file.stat().st_size for file in (DATA/"space").iterdir()) < 3e6

def test_the_mask_is_no_token_of_the_target(): assert space_target().V == 512 == Space(512).mask
