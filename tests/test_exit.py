"Chapter 25a: one trunk, no layer run twice, the published training and adapter, exits that look at no token"
import json
from dataclasses import replace
from functools import partial
from itertools import islice
from math import exp, log

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from helpers import faithful, proves, seeds, shapes, tiny
from published import having
from specref import (Chain, generate, HFModel, loop_law, prompts, reject, rounds, Seeded, target_law, Tree,
                     tv_outcomes)
from specref.draft.length import Schedule
from specref.draft.skipping import PartialModel, ScheduledChain, same_warp, whole_layers
from specref.models.embedded import DOMAINS, domain_ids, raw_model, stored, windows
from specref.models.recipe import llama
from specref.train import early_exit
from specref.train.early_exit import (AdapterDraft, AdapterRecipe, Branch, ExitDraft, ExitTarget,
                                      KangarooAdapter, LayerSkipRecipe, Trunk, adapter_loss, best_exit,
                                      dropped_states, early_exit_loss, exit_rates, exit_scales,
                                      exit_weights, kangaroo_adapter, layerskip_exits, layerskip_model,
                                      second_exit, some_layers, train_layerskip)
from test_embedded import SEEN, plain_law

L = 4

def random_adapter(model, scale=12, seed=0):
    torch.manual_seed(seed)
    adapter = KangarooAdapter(model.config).to(model.dtype).eval()
    with torch.no_grad(): [w.mul_(scale) for w in adapter.parameters() if w.dim() > 1]
    return adapter

def kangaroo_draft(target): return AdapterDraft(target, random_adapter(target.model))
DRAFTS = {"LayerSkip": ExitDraft, "Kangaroo": kangaroo_draft}

class OwnCache(PartialModel):
    "The first layers with a cache of their own, as transformers' early exit"
    def __init__(self, target):
        super().__init__(target.model, whole_layers(0, target.exit), **same_warp(target))
        self.target = target

def own_trunk(draft):
    "Kangaroo's draft on a trunk of its own"
    draft.trunk = Trunk(draft.target.model, whole_layers(0, draft.target.exit))
    return draft

# One trunk

@proves("thm-trunk")
@settings(max_examples=15, deadline=None)
@given(seeds, st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), shapes(5)), min_size=2,
                       max_size=4), st.integers(1, L - 1), st.sampled_from(sorted(DRAFTS)))
def test_the_rows_are_those_of_the_model(seed, calls, exit, kind):
    "On trees, drafts and targets in any order: rows of transformers' own pass over each text"
    model, rng = tiny(3, L), np.random.default_rng(seed)
    target = ExitTarget(model, exit, check=False)
    draft, plain = DRAFTS[kind](target), HFModel(model, check=False)
    for ctx, parents in [*calls, *reversed(calls)]:
        tree = Tree(ctx)
        for u in parents[1:]: tree.add(u, int(rng.integers(3)))
        if rng.random() < .7: draft(tree)
        p = target(tree)
        for i in range(len(tree)):
            assert abs(p[i] - np.exp(z := plain.alone(tree.text(i))) / np.exp(z).sum()).max() < 1e-9

@torch.inference_mode()
def exit_rows(model, exit, text, adapter=None):
    "The draft's rows after every token of a text, without a cache"
    x = torch.tensor([text])
    h = [*dropped_states(model, x, [0.]*exit, None)][-1]
    turns = model.model.rotary_emb(h, position_ids=torch.arange(len(text))[None])
    causal = torch.full((1, 1, len(text), len(text)), -1e9, dtype=h.dtype).triu(1)
    h = adapter(h, turns, causal) if adapter else model.model.norm(h)
    return model.lm_head(h).softmax(-1)[0].numpy()

@pytest.mark.parametrize("kind", DRAFTS)
def test_the_drafts_rows(kind):
    "After five rounds: norm and head, or the adapter and the head, on the states after the exit"
    model = tiny(3, L)
    target = ExitTarget(model, 2)
    adapter = random_adapter(model) if kind == "Kangaroo" else None
    for round in islice(rounds(target, Chain(DRAFTS[kind](target), 3), reject, (0, 1), Seeded(0)), 5):
        tree = round.tree
        want = exit_rows(model, 2, tree.text(len(tree) - 1), adapter)[len(tree.ctx) - 1:]
        for i in range(1, len(tree)): assert abs(tree.law[i] - want[i - 1]).max() < 1e-9

@proves("thm-layer-count")
@faithful("LayerSkip", plain={"a cache of its own": having(model=lambda draft: OwnCache(draft.target))})
def test_a_round_runs_no_layer_twice(subject):
    "(γ + 1) L layer-tokens in every round but the first, to the unit: γ E and E + (γ + 1)(L - E)"
    for layers in (3, 5, 8):
        for gamma in (1, 2, 4):
            target, system = subject.on(HFModel(tiny(3, layers), 0, check=False), gamma=gamma)
            exit, meters, spent = target.exit, (system.drafter.model.meter, target.meter), []
            run = rounds(target, system.drafter, system.verify, (0, 1, 2), Seeded(gamma))
            for round in islice(run, 6): spent.append([m.layer_tokens for m in meters])
            each = np.diff(spent, axis=0)
            assert (each == [gamma*exit, exit + (gamma + 1)*(layers - exit)]).all()
            assert (each.sum(1) == (gamma + 1)*layers).all()

@faithful("Kangaroo", plain={"a trunk of its own": having(model=own_trunk)})
def test_shallow_layers_run_once(subject):
    "The trunks of draft and target together run once on each token of the text and of the drafts"
    target = ExitTarget(tiny(3, L), 2)
    system = subject(draft := kangaroo_draft(target), gamma=4)
    ledger = system(target, (0, 1, 2), 20, Seeded(0)).ledger
    fed = 2 + ledger.num_draft_tokens + len(ledger.rounds)   # the prompt but its last token, y and drafts
    ran = sum(trunk.meter.tokens for trunk in {id(m.trunk): m.trunk for m in (draft, target)}.values())
    assert ran == fed

def test_the_meters_add_up():
    "Draft and target are charged what the trunk ran; the adapter costs an attention"
    target = ExitTarget(tiny(3, L), 2)
    draft = kangaroo_draft(target)
    ledger = generate(target, Chain(draft, 3), reject, (0, 1, 2), 9, Seeded(1)).ledger
    trunk, own = target.trunk.meter, draft.meter.tokens*draft.cost
    upper = target.meter.tokens*(L - 2)
    both = draft.meter.layer_tokens + target.meter.layer_tokens
    assert both == pytest.approx(trunk.layer_tokens + own + upper)
    assert trunk.layer_tokens == 2*trunk.tokens and ledger.models["draft"].calls == ledger.num_draft_tokens
    assert draft.meter.kv_bytes + target.meter.kv_bytes > trunk.kv_bytes > 0

# The second exit, and the distribution

@faithful("Kangaroo", plain={"full length": having(schedule=lambda rule: Schedule()),
                             "q(x)": having(schedule=lambda rule: replace(rule, largest=False))})
def test_the_second_exit(subject):
    "No token follows one whose row has no probability of .6; drafts have several lengths"
    lengths = set()
    for seed in range(4):
        target = ExitTarget(tiny(3, L, seed), 2)
        system = subject(kangaroo_draft(target))
        for round in islice(rounds(target, system.drafter, system.verify, (0, 1), Seeded(seed)), 12):
            tops = [max(law) for law in round.tree.law[1:]]
            assert all(top >= .6 for top in tops[:-1]) and (len(tops) == 6 or tops[-1] < .6)
            lengths.add(len(tops))
    assert len(lengths) > 2

@proves("thm-early-exit")
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("temperature", (1., 1.6))
def test_early_exits_are_lossless(kind, temperature):
    "A random transformer: every path of the loop, three tokens, up to rounding"
    target = ExitTarget(tiny(3, L), 2, temperature)
    drafter = ScheduledChain(DRAFTS[kind](target), second_exit(.5), 2)
    found = loop_law(target, drafter, reject, (0, 1), 3)
    assert tv_outcomes(found, target_law(HFModel(target.model, temperature, check=False), (0, 1), 3)) < 1e-9

@proves("thm-early-exit")
def test_three_tokens_of_the_embedded_target():
    "Kangaroo with its trained adapter, top 2: every path has the distribution of plain passes"
    adapter, exit = kangaroo_adapter()
    target, ctx = ExitTarget(raw_model(), exit, 1., top_k=2), prompts("english", 1, length=12, seed=2)[0]
    drafter = ScheduledChain(AdapterDraft(target, adapter), second_exit(.8), 2)
    assert tv_outcomes(loop_law(target, drafter, reject, ctx, 3), plain_law(ctx, 3, 1.)) <= SEEN

@proves("thm-early-exit")
@pytest.mark.parametrize("temperature", (1., 2.))
def test_three_tokens_of_the_layerskip_model(temperature):
    "LayerSkip with its trained model, top 2: every path has the distribution of plain passes"
    ctx = prompts("english", 1, length=12, seed=2)[0]
    for exit in (1, 3):
        target = ExitTarget(layerskip_model(), exit, temperature, top_k=2)
        found = loop_law(target, Chain(ExitDraft(target), 2), reject, ctx, 3)
        assert tv_outcomes(found, plain_law(ctx, 3, temperature, layerskip_model)) <= SEEN

# Training

def constant(layers, most, scale=1.): return np.full(layers, most * scale)
def linear(layers, most, scale=1.): return scale * most * np.arange(layers) / (layers - 1)

@faithful("LayerSkip", part="dropout_rates", plain={"the same for all layers": constant, "linear": linear})
def test_layer_dropout(subject):
    "The published rates, by the exponential"
    for layers, most, scale in ((8, .1, 1.), (24, .2, .5), (2, .3, 1.)):
        want = [scale*most*(exp(i*log(2)/(layers - 1)) - 1) for i in range(layers)]
        assert subject(layers, most, scale) == pytest.approx(want)

def test_exit_weights():
    "e(l) by its double sum; every R-th layer and the last at a step, each of the others once in R steps"
    for layers, scale, every in ((8, 1., 4), (6, .2, 2), (5, .5, 1)):
        e = [scale*sum(range(i + 1)) for i in range(layers - 1)] + [layers - 1 + scale*sum(range(layers - 1))]
        assert exit_scales(layers, scale) == pytest.approx(e)
        met = np.zeros(layers)
        for step in range(every):
            on = [i for i in range(layers) if i % every == step % every or i == layers - 1]
            want = [e[i]*(i in on) / sum(e[i] for i in on) for i in range(layers)]
            assert exit_weights(step, layers, scale, every) == pytest.approx(want)
            met += [i in on for i in range(layers)]
        assert (met[:-1] == 1).all() and met[-1] == every

@faithful("LayerSkip", part="LayerSkipRecipe", plain={
    "every exit in every step": partial(LayerSkipRecipe, every=1)})
def test_the_exits_take_turns(subject):
    "The recipe of the shipped model: a step scores two exits and the last layer, R steps each exit once"
    model, recipe, scored = tiny(512, 8).float(), replace(subject(), rows=1, length=8), []
    ids = {d: np.arange(900, dtype=np.uint16) % 512 for d in DOMAINS}
    model.lm_head.register_forward_hook(lambda *call: scored.append(step))
    for step in range(recipe.every): early_exit_loss(ids, recipe)(model, step)
    each = np.bincount(scored)
    assert max(each) <= 3 and sum(each) == 6 + recipe.every   # after layers 2 to 7, and always after the last

def test_the_loss_of_the_exits():
    "The weighted sum of cross-entropies after each layer of a plain pass; gradients reach every layer"
    model = tiny(512, 3).float()
    ids = {d: np.arange(900, dtype=np.uint16) % 512 for d in DOMAINS}
    recipe = LayerSkipRecipe(dropout=0., rows=2, length=12, every=2)
    x, weights, want = windows(ids, 1, 2, 12, seed=5), exit_weights(1, 3, 1., 2), 0.
    with torch.no_grad(): states = model(input_ids=x, output_hidden_states=True).hidden_states
    for k, w in enumerate(weights, 1):
        z = model.lm_head(states[k] if k == 3 else model.model.norm(states[k]))[:, :-1]
        want += w*F.cross_entropy(z.flatten(0, 1), x[:, 1:].flatten()).item()
    loss = early_exit_loss(ids, recipe)(model.train(), 1)
    assert loss.item() == pytest.approx(want, rel=1e-4)
    loss.backward()
    assert all(layer.mlp.down_proj.weight.grad.abs().max() > 0 for layer in model.model.layers)

def test_a_dropped_layer_is_skipped_by_a_text():
    "At rate 1 the state stays, at rate 0 it does not; texts of a batch are skipped by themselves"
    model, x = tiny(5, 2), torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 1]])
    with torch.inference_mode():
        first, same = dropped_states(model, x, [0., 1.], torch.Generator().manual_seed(0))
        some, = dropped_states(model, x, [.5], torch.Generator().manual_seed(0))
        h = model.model.embed_tokens(x)
    assert torch.equal(first, same) and not torch.equal(first, h)
    kept = [torch.equal(a, b) for a, b in zip(some, h)]
    assert any(kept) and not all(kept)
    assert all(k or torch.allclose(a, b) for k, a, b in zip(kept, some, first))

def untrained(): return some_layers(raw_model(), LayerSkipRecipe().taken)

@faithful("LayerSkip", part="layerskip_model", plain={"the layers it began with": untrained})
@torch.inference_mode()
def test_training_for_the_exit(subject):
    "Half of the layers predict more than six tenths of what all of them do, on held-out text"
    model, x = subject(), windows({d: domain_ids(d) for d in DOMAINS}, 0, 4, 96, seed=3)
    states = [*dropped_states(model, x, [0.]*model.config.num_hidden_layers, None)]
    logits = [model.lm_head(model.model.norm(h))[:, :-1] for h in states]
    right = [(z.argmax(-1) == x[:, 1:]).float().mean() for z in logits]
    assert right[3] > .6*right[-1] and right[-1] > .5

def test_what_is_measured_after_each_layer():
    "Loss, acceptance rate and equal argmax of every exit, from rows that are computed alone"
    model = tiny(512, 3).float()
    ids = {d: np.arange(900, dtype=np.uint16) % 512 for d in DOMAINS}
    found, x = exit_rates(model, ids, rows=2, length=12, prompt=4), windows(ids, 0, 2, 12, seed=9)
    p = np.stack([exit_rows(model, 3, tuple(row)) for row in x.tolist()])[:, 3:-1]
    for exit in (1, 2, 3):
        q = np.stack([exit_rows(model, exit, tuple(row)) for row in x.tolist()])[:, 3:-1]
        own = np.take_along_axis(q, x[:, 4:, None].numpy(), -1)
        assert found["loss"][exit - 1] == pytest.approx(-np.log(own).mean(), rel=1e-4)
        assert found["accepted"][exit - 1] == pytest.approx(np.minimum(p, q).sum(-1).mean(), abs=1e-5)
        assert found["same"][exit - 1] == pytest.approx((q.argmax(-1) == p.argmax(-1)).mean())

def test_the_choice_of_exit_and_length():
    "No other pair has a larger (1 + α + ... + α^γ) / (1 + γ E/L)"
    rng = np.random.default_rng(0)
    for _ in range(20):
        rates = [*np.sort(rng.random(5)), 1.]
        speeds = {(e, g): sum(rates[e - 1]**i for i in range(g + 1)) / (1 + g*e/6)
                  for e in range(1, 6) for g in range(1, 9)}
        assert speeds[best_exit(rates)] == pytest.approx(max(speeds.values()))

def test_the_shipped_model_beside_its_baseline():
    "Every exit is accepted more often than the baseline's; the record is that of weights made by the recipe"
    exits, model = layerskip_exits(), layerskip_model()
    ours, plain = exits["layerskip"]["held-out"], exits["plain"]["held-out"]
    assert all(a > b + .03 for a, b in zip(ours["accepted"][:-1], plain["accepted"]))
    assert ours["loss"][-1] < plain["loss"][-1] + .3
    again = exit_rates(model)
    for name, row in again.items(): assert row == pytest.approx(ours[name], abs=5e-3)
    card = json.loads((stored("layerskip")/"recipe.json").read_text())["recipe"]
    assert card == json.loads(json.dumps(vars(LayerSkipRecipe())))

def test_training_both(tmp_path, monkeypatch):
    "Two steps in small: weights that load, a card with both records; the baseline has no exits, no dropout"
    ids = np.arange(900, dtype=np.uint16) % 512
    base = llama(3, 32, 32)
    monkeypatch.setattr(early_exit, "raw_model", lambda: base)
    monkeypatch.setattr(early_exit, "domain_ids", lambda d, held_out=True: ids)
    recipe = LayerSkipRecipe(taken=(0, 2), steps=2, rows=2, length=16)
    assert (exit_weights(1, 8, recipe.plain.exit_scale, 1) == [0]*7 + [1]).all() and not recipe.plain.dropout
    train_layerskip(tmp_path, recipe)
    folder = tmp_path/"data"/"layerskip"
    card = json.loads((folder/"recipe.json").read_text())
    assert HFModel.load(folder).layers == 2 and card["recipe"]["taken"] == [0, 2]
    assert {(a, b) for a, rows in card["exits"].items() for b in rows} == {
        (a, b) for a in ("plain", "layerskip") for b in ("training", "held-out")}
    ours, plain = (torch.load(tmp_path/f"{name}.pt", weights_only=True)["model"] for name in card["exits"])
    assert any(not torch.equal(w, plain[k]) for k, w in ours.items())

class WithMLP(KangarooAdapter):
    "A decoder layer"
    def __init__(self, config):
        super().__init__(config)
        from transformers.models.llama.modeling_llama import LlamaMLP
        self.mlp = LlamaMLP(config)
    def forward(self, h, *args): return super().forward(h, *args) + self.mlp(h)

class OneNorm(KangarooAdapter):
    "No norm before the head"
    def forward(self, h, turns, mask=None, memory=None):
        return h + self.self_attn(self.input_layernorm(h), turns, mask, memory)[0]

@faithful("Kangaroo", part="KangarooAdapter", plain={"a decoder layer": WithMLP, "one norm": OneNorm})
def test_the_adapter(subject):
    "The published adapter: an attention and two norms; a decoder layer and norm, with the MLP at zero"
    model = tiny(3, 1)
    torch.manual_seed(0)
    adapter, (layer,) = subject(model.config).double(), model.model.layers
    d, kv = model.config.hidden_size, model.config.hidden_size // 2   # one of two heads
    assert sum(w.numel() for w in adapter.parameters()) == 2*d*d + 2*d*kv + 2*d
    layer.load_state_dict(adapter.state_dict(), strict=False)
    torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    h = torch.randn(1, 5, d, dtype=torch.float64)
    turns = model.model.rotary_emb(h, position_ids=torch.arange(5)[None])
    with torch.inference_mode():
        want = adapter.norm(layer(h, position_embeddings=turns))
        assert torch.allclose(adapter(h, turns), want)

def test_the_adapters_loss():
    "The soft cross-entropy of the exit's rows against the model's"
    model = tiny(512, L).float()
    ids = {d: np.arange(900, dtype=np.uint16) % 512 for d in DOMAINS}
    recipe = AdapterRecipe(2, rows=2, length=12)
    adapter, x = random_adapter(model, 2), windows(ids, 0, 2, 12, seed=6)
    with torch.inference_mode(): p = model(input_ids=x).logits.softmax(-1).numpy()
    q = np.stack([exit_rows(model, 2, tuple(row), adapter) for row in x.tolist()])
    with torch.no_grad(): loss = adapter_loss(model, ids, recipe)(adapter, 0)
    assert loss.item() == pytest.approx(-(p * np.log(q)).sum(-1).mean(), rel=1e-3)

def test_the_trained_adapter():
    "On held-out text it is accepted nearly half of the time, and much more often than the bare exit"
    adapter, exit = kangaroo_adapter()
    model, x = raw_model(), windows({d: domain_ids(d) for d in DOMAINS}, 0, 4, 96, seed=3)
    with torch.inference_mode(): p = model(input_ids=x).logits.softmax(-1).numpy()
    def overlap(net):
        q = np.stack([exit_rows(model, exit, tuple(row), net) for row in x.tolist()])
        return np.minimum(p, q).sum(-1).mean()
    assert overlap(adapter) > max(.45, overlap(None) + .2)

def test_a_branch_reads_its_trunk_by_path():
    "Siblings with one token below different parents read different states"
    target = ExitTarget(tiny(3, L), 2)
    tree = Tree((0,))
    for u, x in ((0, 1), (0, 2), (1, 1), (2, 1)): tree.add(u, x)
    rows = target.feed(tree)
    states = Branch.enter(target, 0, len(target.trie.edge))[0]
    assert (states[rows[3]] - states[rows[4]]).abs().max() > 1e-3
