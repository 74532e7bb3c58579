"33a_blocks: rollouts in training and drafting, dropped rows, one call a round, the gate, and closed forms"
from fractions import Fraction
from functools import partial

import numpy as np, pytest, torch
from torch.nn import functional as F

from helpers import chain, faithful, proves, refuses, round_tokens, tiny
from networks import batch_of, branch_ahead, branch_row, otherwise, random_texts
from specref import certificate, Chain, HFModel, random_table, reject, rounds, Seeded, System, TableModel
from specref.draft.shapes import ParallelHeadTree
from specref.models.embedded import raw_model
from specref.models.transformer import cache_name, given_cache
from specref.train import blocks
from specref.train.blocks import (MaskedModel, Pard, PardDraft, PEagle, PEagleDraft, Uno, UnoDraft,
                                  cod_counts, nested_rows, parallel_gain, rollout_mask, rows_at, with_text)
from specref.train.falcon import block_tokens, overlap_within
from specref.train.features import FeatureDraft
from specref.train.harness import StateDataset, TargetModel, evaluate, state_dataset, train_network
from specref.train.medusa import HeadMarginals
from specref.train.synthetic import branch_texts, branching

V, K = 5, 4
SMALL = {PEagle: dict(reads=(0, 2, 3)), Pard: dict(hidden=32, inner=32), Uno: dict(rank=2)}

def kind(make): return next(k for k in SMALL if issubclass(make, k))

def small(make, V=V, perturbed=True, base=None, **kw):
    "A network on a tiny target of three layers, in double precision"
    base = TargetModel(tiny(V, layers=3)) if base is None else base
    torch.manual_seed(1)
    net = make(base, **SMALL[kind(make)] | kw).to(base.head.weight.dtype).eval()
    with torch.no_grad():
        for w in net.parameters() if perturbed else (): w.add_(.3 * torch.randn_like(w))
    return net

def target_of(net, temperature=.7):
    model = net.gated[0] if isinstance(net, Uno) else net.base[0].model
    return HFModel(model, temperature, keep=net.reads, check=False)

texts = partial(random_texts, V)

# Rollouts

@torch.no_grad()
def peagle_by_hand(net, batch, n, t):  # -> (k, V)
    "Row by row: the fused features up to x_{t-1}, then the shared vector and the mask, causal attention"
    fused = net.fc(torch.cat([batch.states[k][n, :t] for k in net.reads], -1))
    f = torch.cat([fused, net.shared.expand(K - 1, -1)])[None]
    tokens = torch.tensor([[*batch.x[n, 1:t+1].tolist(), *[V] * (K - 1)]])
    at, m = torch.arange(t + K - 1)[None], net.midlayer
    def causal(q, k, v): return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    u = torch.cat([m.input_layernorm(net.embed.weight[tokens]), m.hidden_norm(f)], -1)
    h = net.upper[0](m(u, f, at, causal), at, causal)
    return net.logits(h[0, t-1:])

@torch.no_grad()
def pard_by_hand(net, batch, n, t):
    "A plain pass of the language model over the text up to x_t and k - 1 mask tokens"
    ids = torch.tensor([[*batch.x[n, :t+1].tolist(), *[V] * (K - 1)]])
    return net.model(input_ids=ids).logits[0, t:, :V]

@torch.no_grad()
def uno_by_hand(net, batch, n, t):
    "Text by the target alone; then every mask by itself, on a copy whose weights are merged"
    model, base = net.gated[0], net.base[0].model
    merged = tiny(V, layers=3)
    for name, module in model.named_modules():
        if not isinstance(module, blocks.GatedLinear): continue
        merged.get_submodule(name).weight.add_(module.scale * module.up @ module.down)
    out = base(input_ids=batch.x[n:n+1, :t+1], use_cache=True)
    rows, past = [out.logits[0, -1]], given_cache(merged, getattr(out, cache_name(base)))
    for j in range(1, K):
        given = dict(inputs_embeds=net.mask.expand(1, 1, -1), position_ids=torch.tensor([[t + j]]))
        out = merged(**given, **past, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows)

HAND = {PEagle: peagle_by_hand, Pard: pard_by_hand, Uno: uno_by_hand}

def wrong_sight(make, sees):
    "The network with another mask of attention"
    return type(f"Wrong{make.__name__}", (make,), dict(sees=lambda self, a, d: sees(a, d)))

def same_anchor(a): return a[..., None] == a[..., None, :]
def later_masks(a, d): return rollout_mask(a, d) | same_anchor(a) & (d[..., None] > 0)
def text_alone(a, d): return rollout_mask(a, d) & ((d[..., None, :] == 0) | (d[..., None] == d[..., None, :]))
def all_rollouts(a, d): return rollout_mask(a, d) | (d[..., None, :] <= d[..., None]) & (
    a[..., None, :] <= a[..., None])

class LastFeature(PEagle):
    "Wrong: masks read the anchor's feature in place of the shared vector"
    def inputs(self, f, tokens, depth): return f, tokens.masked_fill(depth > 0, V)
class LastToken(PEagle):
    "Wrong: masks read the anchor's token"
    def inputs(self, f, tokens, depth): return torch.where((depth > 0)[..., None], self.shared, f), tokens
def set_gates(like, net):
    "Every row of a pass gets the same gate"
    table = net.gated[0].get_input_embeddings()
    table.register_forward_hook(lambda *_: setattr(table.gate, "rows", like(table.gate.rows)))
AdapterEverywhere = otherwise(Uno, partial(set_gates, torch.ones_like))   # in the rows of the text too
NoAdapter = otherwise(Uno, partial(set_gates, torch.zeros_like))   # a mask alone, as in PaSS

def rows_are_those_by_hand(subject):
    "Every depth after every text, in one packed pass and row by row"
    net = small(subject)
    batch = batch_of(net.base[0], texts())
    with torch.no_grad(): found = torch.stack(net.guesses(batch, K), 2)
    for n, t in ((0, 1), (0, 2), (0, 7), (1, 12)):
        want = HAND[kind(subject)](net, batch, n, t)
        assert torch.allclose(found[n, t-1].softmax(-1), want.softmax(-1), atol=1e-10)

WRONG = {"masks that see later masks": later_masks, "masks that see the text alone": text_alone,
         "masks that see other rollouts": all_rollouts}
def wrong_masks(make): return {what: wrong_sight(make, sees) for what, sees in WRONG.items()}

@faithful("P-EAGLE", part="PEagle", plain=wrong_masks(PEagle) | {
    "the last feature at masks": LastFeature, "the last token at masks": LastToken})
@proves("thm-one-pass")
def test_peagle_by_hand(subject): rows_are_those_by_hand(subject)

@faithful("PARD", part="Pard", plain=wrong_masks(Pard))
@proves("thm-one-pass")
def test_pard_by_hand(subject): rows_are_those_by_hand(subject)

@faithful("UNO", part="Uno", plain=wrong_masks(Uno) | {
    "an adapter in every row": AdapterEverywhere, "no adapter": NoAdapter})
@proves("thm-one-pass", "thm-gate")
def test_uno_by_hand(subject): rows_are_those_by_hand(subject)

class MaskRowsStay(PEagleDraft):
    "Wrong: the target's feature is read in place of the shared vector"
    def input_features(self, start, end, ctx):
        f = super().input_features(start, end, ctx)
        last = max(start, len(ctx) - 1) - start
        return torch.cat([f[:, :last], f[:, last-1:last].expand(-1, end - start - last, -1)], 1)

class CallForEachToken(PEagleDraft):
    "The sequential relative: every node is fed by a call of its own, with its token"
    def answers(self, tree): return FeatureDraft.answers(self, tree)
    def tokens_and_places(self, start, end): return FeatureDraft.tokens_and_places(self, start, end)
    def pass_end(self, start, text): return FeatureDraft.pass_end(self, start, text)

class ForgetsItsPass(PardDraft):
    "A pass for each question"
    def mask_rows(self, line):
        self.model.forget()
        return super().mask_rows(line)

class ForgetsTheText(UnoDraft):
    def mask_rows(self, line):
        self.target.forget()
        return super().mask_rows(line)

def drafting_is_training(make, subject):
    "Contexts that grow, go back and differ: one call each; the rows are those of training for every path"
    net = small(make)
    target, x = target_of(net), texts(2, 20)
    draft = subject(net, target)
    with torch.no_grad(): rows = torch.stack(net.guesses(batch_of(net.base[0], x), K)) / .7
    meter = target.meter if make is Uno else draft.meter
    for n, t, depth in ((0, 3, 3), (0, 5, 2), (0, 9, 3), (1, 12, 3), (0, 4, 1)):
        ctx, calls = tuple(x[n, :t].tolist()), meter.calls
        if make is PEagle: target.states(ctx[:-1])
        for path in (x[n, t:t+depth].tolist(), [0] * depth):
            tree = chain(ctx, ())
            for j in range(depth + 1):
                assert np.allclose(draft(tree)[j], rows[j, n, t-2].softmax(-1).numpy(), atol=1e-10)
                if j < depth: tree.add(j, path[j])
        assert meter.calls == calls + 1

@faithful("P-EAGLE", part="PEagleDraft", plain={
    "the last feature at masks": MaskRowsStay, "a call for each token": CallForEachToken})
@proves("thm-one-pass")
def test_peagle_drafts_in_one_call(subject): drafting_is_training(PEagle, subject)

@faithful("PARD", part="PardDraft", plain={"a call for each question": ForgetsItsPass})
@proves("thm-one-pass")
def test_pard_drafts_in_one_call(subject): drafting_is_training(Pard, subject)

@faithful("UNO", part="UnoDraft", plain={"a call for each question": ForgetsTheText})
@proves("thm-one-pass", "thm-gate")
def test_uno_drafts_in_one_call(subject): drafting_is_training(Uno, subject)

# Dropped rows

def separate_rows(n, A, counts, device=None):
    "Wrong: a random set for each depth"
    anchor = torch.cat([torch.rand(n, A).argsort(1)[:, :m] for m in counts], 1)
    return anchor, nested_rows(n, A, counts)[1]

@faithful("P-EAGLE", "PARD", part="nested_rows", plain={"a set for each depth": separate_rows})
@proves("prop-cod")
@pytest.mark.parametrize("make", [PEagle, Pard])
def test_kept_rows_are_rows_of_the_whole_pass(make, subject):
    "Rows of 9 anchors, 6, 4 and 3, equal those of all; a row without its ancestors does not"
    net = small(make)
    batch, N = batch_of(net.base[0], texts()), 14 - net.first
    torch.manual_seed(0)
    anchor, depth = with_text(2, N, *subject(2, 9, cod_counts(9, K)[1:]))
    with torch.no_grad():
        found = net.rows(batch, anchor, depth)
        whole = net.rows(batch, *net.all_rows(batch.x))
    assert torch.allclose(found, rows_at(whole, depth*N + anchor), atol=1e-9)

@proves("prop-cod")
def test_counts_and_means_of_kept_rows():
    "The shares of the paper, the bound, nested sets, and every anchor equally likely"
    assert cod_counts(10, 4) == [10, 7, 4, 3] and cod_counts(1000, 8)[4:] == [240, 200, 200, 200]
    for A, k, r, least in ((100, 8, .7, .2), (1000, 8, .7, .2), (50, 3, .5, 0.)):
        assert sum(cod_counts(A, k, r, least)) <= A * (1/(1 - r) + k*least)
    torch.manual_seed(0)
    anchor, depth = nested_rows(4000, 6, [4, 2])
    assert depth[0].tolist() == [1]*4 + [2]*2
    assert all({*a[4:].tolist()} <= {*a[:4].tolist()} and len({*a[:4].tolist()}) == 4 for a in anchor[:50])
    share = torch.bincount(anchor[:, 4:].flatten(), minlength=6) / 4000
    assert (share - 2/6).abs().max() < 6 * (2/6 * 4/6 / 4000)**.5   # six standard deviations

def test_what_begins_as_a_copy():
    "PARD as the embedded small model, P-EAGLE's embeddings as the target's, UNO's adapter at zero"
    base = TargetModel(raw_model("target"))
    small_one, pard = raw_model("small"), Pard(base).start_from(raw_model("small"))
    x = torch.randint(512, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(pard.model(input_ids=x).logits[..., :512], small_one(input_ids=x).logits)
        plain, gated = base.model(input_ids=x).logits, Uno(base).gated[0](input_ids=x).logits
    assert torch.equal(plain, gated) and torch.equal(PEagle(base).embed.weight[:512], base.embed.weight)
    refuses("model", Pard(base, hidden=64).start_from, raw_model("small"))
    for make, kw in ((PEagle, dict(draft=320, inner=384)), (Pard, {}), (Uno, {})):
        assert 2*sum(w.numel() for w in make(base, **kw).parameters()) < 2.5e6

# Targets

def test_pard_drafts_for_every_target():
    "The same rows for two targets; the loss needs no state"
    net = small(Pard)
    targets = [HFModel(tiny(V, layers=n, seed=n), check=False) for n in (1, 2)]
    first, second = (PardDraft(net, t)(chain((1, 2, 3), (4, 0)))[2] for t in targets)
    assert np.array_equal(first, second)
    assert net.loss(StateDataset(texts(), {}), 0.) > 0
    refuses("target", PardDraft, net, HFModel(tiny(V + 1), check=False))

@faithful("UNO", part="Uno", plain={"an adapter in every row": AdapterEverywhere})
@proves("thm-gate", "prop-calls")
def test_rows_of_text_are_the_targets(subject):
    """With and without drafting, bit for bit, in every accepted and rejected round; the first draft token is
    always accepted, and two passes emit two tokens or more"""
    net = small(subject)
    target, plain = target_of(net), HFModel(net.base[0].model, .7, check=False)
    draft, ctx = UnoDraft(net, target), (1, 3)
    for i, played in zip(range(8), rounds(target, Chain(draft, 3), reject, ctx, Seeded(2))):
        for node in range(len(played.tree)):
            assert np.allclose(played.p[node], plain(played.tree)[node], atol=1e-12)
        assert np.allclose(played.tree.law[1], played.p[0], atol=1e-12) and len(played.tokens) >= 2
        assert target.meter.calls == 2*(i + 1)
    refuses("target", UnoDraft, net, plain)

# Exactness

def parallel_of(draft, gamma): return MaskedModel(draft, gamma, 0)
def tree_system(draft, gamma, **_):
    return System("tree", ParallelHeadTree(HeadMarginals(parallel_of(draft, gamma), gamma), 5, True), reject)

@pytest.mark.parametrize("build", [
    lambda draft, gamma, **_: System("chain", Chain(parallel_of(draft, gamma), gamma), reject), tree_system])
def test_exact_certificates(build): assert certificate(build).exact

def test_a_masked_model():
    "One call for all depths; a node deeper than the masks is an error"
    table = random_table(3, 4)
    draft, before = MaskedModel(table, 3, 1), table.meter.calls
    for path in ((0, 2), (2, 2), ()):
        rows = draft(chain((2,), path))
        assert all((rows[j] == table.law((2, *[1]*j))).all() for j in range(len(path) + 1))
    assert table.meter.calls == before + 1
    refuses("tree", draft, chain((2,), (0, 0, 0)))
    refuses("k", MaskedModel, table, 0, 1)
    refuses("mask", MaskedModel, table, 3, 3)

def test_near_the_last_position():
    "Fewer masks fit: the rows that there are stay right"
    net = small(Pard)
    target = target_of(net)
    target.most = 9
    draft, x = PardDraft(net, target), tuple(texts(1, 8)[0].tolist())
    draft.model.most = 9
    rows = draft(chain(x, (0, 1)))
    full = PardDraft(net, target_of(net))(chain(x, (0, 1)))
    assert np.allclose(rows[1], full[1]) and np.allclose(rows[2], 1/V)

# What one call costs

@proves("prop-calls")
@pytest.mark.parametrize("B, tail, gamma", [(2, 1, 2), (2, 2, 3), (3, 1, 3)])
def test_the_closed_form_of_independent_rows(B, tail, gamma):
    """Every path of a round, from every phase: the best rows that do not read the draft tokens reach the
    closed form, sequential ones gamma + 1"""
    target = TableModel(B*(tail + 1), lambda text: branch_row(B, tail, text[-1]))
    def mean(x, draft): return round_tokens(target, Chain(draft, gamma), ctx=(x,)).mean()
    means = []
    for x in range(tail + 1):
        masks = TableModel(target.V, lambda text: branch_ahead(B, tail, x, len(text)))
        means.append(mean(x, MaskedModel(masks, gamma, 0)))
        betas = [overlap_within(B, tail, x, j, gamma) for j in range(gamma)]
        assert means[-1] == 1 + sum(np.prod(betas[:j+1]) for j in range(gamma))
        assert mean(x, target) == gamma + 1
    assert sum(means) / Fraction(tail + 1) == block_tokens(B, tail, gamma, gamma)

@proves("prop-calls")
def test_the_example_by_hand():
    "5/2 tokens in 5/4, 3 tokens in 3/2; and the marginal of the second row"
    assert list(branch_ahead(2, 1, 1, 2)) == [0, Fraction(1, 2), 0, Fraction(1, 2)]
    betas = [overlap_within(2, 1, 1, j, 2) for j in range(2)]
    assert 1 + betas[0] + betas[0]*betas[1] == Fraction(5, 2)
    c = Fraction(1, 4)
    assert parallel_gain(Fraction(5, 2), 3, 2, c) == 1 == Fraction(5, 2) / (1 + c) / (3 / (1 + 2*c))
    assert parallel_gain(Fraction(2), 2, 4, Fraction(1, 24), Fraction(2, 24)) == Fraction(28, 26)
    refuses("parallel", parallel_gain, 9, 3, 2, .1)

B, TAIL, GAMMA = 4, 3, 3
@pytest.mark.parametrize("make, steps, peak", [(PEagle, 200, 1e-2), (Pard, 200, 1e-2)])
def test_training_approaches_the_closed_form(make, steps, peak, tmp_path):
    "Trained on the source it comes within .2 tokens, and stays .4 below a sequential draft"
    base = TargetModel(branching(B, TAIL).float())
    def data(n, seed): return state_dataset(base, branch_texts(B, TAIL, n, 25, seed), (0, 1), tmp_path)
    net = small(make, base=base, perturbed=False, k=GAMMA,
                **dict(reads=(0, 1, 1)) if make is PEagle else dict(hidden=32, inner=64))
    how = dict(eval_steps=steps, depth=2)
    train_network(net, base, data(256, 0), data(16, 2)[:], steps, peak, tmp_path/"net", **how)
    tokens, overlaps = evaluate(net, base, data(96, 1)[:], GAMMA)
    reach = float(block_tokens(B, TAIL, GAMMA, GAMMA))
    assert abs(tokens - reach) < .2 < .4 < GAMMA + 1 - tokens, (tokens, reach, overlaps)

def test_texts_too_short():
    for make in SMALL: refuses("batch", small(make).loss, batch_of(small(make).base[0], texts(2, 5)), 0.)
