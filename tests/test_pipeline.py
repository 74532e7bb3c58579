"Chapter 26a: guesses in flight change no token, and the ticks are those of the formula"
import json
from copy import deepcopy
from itertools import pairwise

import numpy as np, pytest, torch
from hypothesis import strategies as st

from contracts import drafter_contract
from helpers import examples, faithful, models, proves, tiny
from published import Published, having
from specref import (autoregressive, Chain, generate, HFModel, loop_law, match, reject, Seeded, target_law,
                     Tree, tv_outcomes)
from specref.draft.parallel import reject_ahead
from specref.draft.pipeline import (InFlight, Pipeline, flight_latency, layer_stages, match_rates,
                                    most_in_flight, schedule)
from specref.draft.shapes import drawn_at
from specref.models.embedded import stored
from specref.train.looped import LoopedRecipe, exit_logits, looped, looped_model, train_looped

CTX, N, V = (3, 1, 4, 1, 5), 12, 11

def net(seed=0, layers=4): return tiny(V, layers, seed)
def ring(seed=0, loops=4): return looped(net(seed, 1), loops).eval()   # of one layer

def greedy(model): return tuple(autoregressive(HFModel(model, temperature=0, check=False), CTX, N, Seeded(0)))

def guessed(model, text, exit, k):
    "Is each token after the first among the k best of the exit one token earlier?"
    x = torch.tensor([[*CTX, *text]])
    states = model(input_ids=x, output_hidden_states=True).hidden_states[exit]
    best = model.lm_head(model.model.norm(states))[0].topk(k).indices.tolist()
    return [y in best[len(CTX) - 1 + i] for i, y in enumerate(text[:-1])]

@proves("thm-flight-exact", "thm-flight-latency")
@examples(12, st.integers(0, 5), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_the_greedy_text_in_the_ticks_of_the_formula(seed, exit, k, shared):
    "Layers of their own or shared, any exit, any number of guesses"
    model = ring(seed) if shared else net(seed)
    text, flown = greedy(model), Pipeline(model, layer_stages(model), exit).decode(CTX, N, k)
    right = guessed(model, text, exit, k) if exit < 4 else [False]*(N - 1)
    assert flown.tokens == text and flown.hits == tuple(right)
    assert list(flown.ends) == schedule(flown.hits, exit, 4).ends
    assert flown.passes >= 4*N and (flown.passes == 4*N or exit < 4)

@proves("thm-flight-latency")
def test_how_many_are_in_flight():
    "As many as the sum of powers, in a long enough run; one guess a token: ⌈stages / exit⌉"
    for exit, k in ((1, 2), (2, 3), (3, 2), (1, 1), (4, 3)):
        most, model = 0, net(0)
        class Counting(Pipeline):
            def tick(self):
                nonlocal most
                most = max(most, sum(f.stage < 4 for f in self.flights.values()))
                super().tick()
        Counting(model, layer_stages(model), exit).decode(CTX[:1], N, k)
        assert most == most_in_flight(exit, 4, k) and most_in_flight(exit, 4) == -(-4 // exit)

def timed(target, system):
    "The text of a system, and the ticks of the target's pipeline after each token"
    assert isinstance(system.drafter, InFlight)
    ticks = []
    text = generate(target, *(system.drafter, system.verify), CTX, N, Seeded(0),
                    watch=lambda new: ticks.append(target.pipeline.ticks))
    return tuple(text), ticks

def at_0(model): return HFModel(model, 0, check=False)
WAITING = having(ahead=lambda several: 0)   # no token starts before the one above it is complete

@faithful("PPD", plain={"an early exit's chain": "LayerSkip", "no overlap": WAITING,
                        "a single guess": having(k=lambda several: 1)})
def test_ppd(subject):
    "A token is early by the layers after the exit exactly where one of the exit's k best was right"
    model = net(1)
    (text, ticks), exit = timed(*subject.on(at_0(model), gamma=4)), 3
    early = [b - a == exit for a, b in pairwise(ticks)]
    assert text == greedy(model) and early == guessed(model, text, exit, 4) and any(early)
    assert early != guessed(model, text, exit, 1)

def unshared(model):
    "The same numbers, stored for every layer"
    own = deepcopy(model)
    own.model.layers = torch.nn.ModuleList(map(deepcopy, own.model.layers))
    return own

@proves("thm-loads")
@faithful("SPEED", plain={"an early exit's chain": "LayerSkip", "no overlap": WAITING})
def test_speed(subject):
    "A right guess costs a loop, a wrong one all; the weights are loaded once a tick for all tokens in flight"
    model = ring(2)
    target, system = subject.on(at_0(model))
    (text, ticks), line = timed(target, system), target.pipeline
    right = guessed(model, text, 1, 1)
    assert text == greedy(model) and [b - a for a, b in pairwise(ticks)] == [1 if hit else 4 for hit in right]
    assert any(right) and line.passes > line.ticks == line.loads
    own, system = subject.on(at_0(unshared(model)))
    assert timed(own, system)[0] == text and own.pipeline.loads > own.pipeline.ticks
    assert target.meter.tokens == len(CTX) + N - 1
    assert sum(view.meter.layer_tokens for view in (target, line.draft)) == line.passes

@proves("thm-flight-law")
@examples(12, models(), st.integers(0, 2), st.integers(1, 2))
def test_guesses_are_lossless(pair, ahead, k):
    "Tables in fractions: any number of guesses, points or drawn; nothing is offered to the target"
    target, draft = pair
    model, draw = drawn_at(0, draft)
    for drafter, verify in ((InFlight(model, ahead, k, draw), match), (InFlight(draft, ahead), reject_ahead)):
        drafter_contract(drafter, (0,))
        assert drafter((0,), Seeded(0)) == Tree((0,))
        assert loop_law(target, drafter, verify, (0,), 3) == target_law(target, (0,), 3)

@proves("thm-flight-law")
@pytest.mark.parametrize("name", ["PPD", "SPEED"])
@pytest.mark.parametrize("temperature", [1., 1.6])
def test_a_pipeline_has_the_models_distribution(name, temperature):
    "A random transformer: every path of the loop, three tokens, up to rounding"
    plain = HFModel(tiny(3, 3), temperature, check=False)
    target, system = Published(name).on(plain, gamma=2)
    found = loop_law(target, system.drafter, system.verify, (0, 1), 3)
    assert tv_outcomes(found, target_law(plain, (0, 1), 3)) < 1e-9

def test_a_view_reads_any_tree():
    "Chains and trees, in any order of contexts, by the target's view alone: the rows of the model"
    plain, line = HFModel(net(3), 0, check=False), Pipeline(net(3), layer_stages(net(3)), 2)
    for ctx, parents in (CTX, (0, 0, 1, 1)), (CTX[:2], (0, 1)), ((*CTX, 2), (0, 0)), (CTX, (0, 0, 1, 1)):
        tree = Tree(ctx)
        for i, u in enumerate(parents): tree.add(u, (3*i + 1) % V)
        assert np.allclose(line.target.logits(tree), plain.logits(tree), atol=1e-9)
    text = generate(line.target, Chain(line.draft, 2), reject, CTX, N, Seeded(0))
    assert tuple(text) == greedy(net(3))

@proves("thm-flight-latency")
@examples(60, st.lists(st.booleans(), max_size=12), st.integers(1, 8), st.data())
def test_the_schedule(hits, stages, data):
    "The formula; no call waits for its device; with one device fewer, one would"
    exit = data.draw(st.integers(1, stages))
    log, n = schedule(hits, exit, stages), len(hits)
    assert log.ends[-1] == stages + sum(exit if hit else stages for hit in hits)
    assert [call.end - call.start for call in log.calls] == [stages]*(n + 1)
    starts = [call.start for call in log.calls]
    assert all(b - a == (exit if hit else stages) for a, b, hit in zip(starts, starts[1:], hits))
    if n:
        mean = (log.ends[-1] - stages) / (n*stages)
        assert abs(mean - flight_latency(sum(hits) / n, exit, stages)) < 1e-9

def test_a_looped_decoder_is_a_llama_with_shared_layers():
    "Its exits are those of the layers of the core, run again and again"
    core, x = net(3, 2), torch.tensor([[1, 2, 3, 4]])
    model = looped(core, 3).eval()
    assert sum(w.numel() for w in model.parameters()) == sum(w.numel() for w in core.parameters())
    h = core.model.embed_tokens(x)
    at = torch.arange(4)[None]
    mask = torch.full((4, 4), -torch.inf, dtype=h.dtype).triu(1)[None, None]
    for logits in exit_logits(model, x, 2):
        for layer in core.model.layers:
            turned = core.model.rotary_emb(h, position_ids=at)
            h = layer(h, attention_mask=mask, position_ids=at, position_embeddings=turned)
        assert torch.allclose(core.lm_head(core.model.norm(h)), logits)

def test_match_rates():
    "Counted by hand; more guesses are right more often; the last exit always is"
    model, x = net(0), torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(0))
    rates = match_rates(model, x, [1, 3, 4], (1, 2, V), prompt=8)
    states = model(input_ids=x, output_hidden_states=True).hidden_states
    best = model.lm_head(states[-1]).argmax(-1)[:, 7:]
    top = model.lm_head(model.model.norm(states[3])).topk(2).indices[:, 7:]
    assert abs(rates[1][1] - (top == best[..., None]).any(-1).float().mean().item()) < 1e-6
    assert rates[2] == [1, 1, 1] and all(a <= b <= c == 1 for a, b, c in rates)

def test_the_recipe_runs(tmp_path, monkeypatch):
    "Two steps; the weights that are stored give the model back, in half precision"
    monkeypatch.setattr("specref.train.looped.domain_ids", lambda domain, held_out: np.arange(400) % 99)
    recipe = LoopedRecipe(unique=1, loops=2, hidden=32, inner=32, steps=2, rows=1, length=16)
    model, x = train_looped(tmp_path, recipe), torch.tensor([[1, 2, 3]])
    again, card = looped_model(tmp_path/"data"/"looped"), tmp_path/"data"/"looped"/"recipe.json"
    assert torch.allclose(model(input_ids=x).logits, again(input_ids=x).logits, atol=1e-2)
    assert json.loads(card.read_text())["recipe"]["loops"] == 2

def test_the_shipped_decoder():
    "It was made by the recipe of the chapter"
    card = json.loads((stored("looped")/"recipe.json").read_text())["recipe"]
    assert LoopedRecipe(**card) == LoopedRecipe() and len(looped_model().model.layers) == 8
