"Chapter 26a: guesses in flight change no token, and the ticks are those of the formula"
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from helpers import faithful, proves, tiny
from specref.core.loop import autoregressive
from specref.core.rng import Seeded
from specref.draft.pipeline import LoopedRecipe, Pipeline, exit_logits, flight_latency, layer_stages
from specref.draft.pipeline import loop_stages, looped, looped_model, match_rates, most_in_flight, schedule
from specref.draft.pipeline import train_looped
from specref.models.embedded import stored
from specref.models.transformer import HFModel

CTX, N, V = (3, 1, 4, 1, 5), 12, 11


def net(seed=0, layers=4): return tiny(V, layers, seed)
def ring(seed=0, loops=4): return looped(net(seed, 1), loops).eval()   # of one layer


def greedy(model):
    return tuple(autoregressive(HFModel(model, temperature=0, check=False), CTX, N, Seeded(0)))


def guessed(model, text, exit, k):
    "Is each token after the first among the k best of the exit one token earlier?"
    x = torch.tensor([[*CTX, *text]])
    states = model(input_ids=x, output_hidden_states=True).hidden_states[exit]
    best = model.lm_head(model.model.norm(states))[0].topk(k).indices.tolist()
    return [y in best[len(CTX) - 1 + i] for i, y in enumerate(text[:-1])]


@proves("thm-flight-exact", "thm-flight-latency")
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_the_greedy_text_in_the_ticks_of_the_formula(seed, exit, k, shared):
    "Layers of their own or shared, any exit, any number of guesses"
    model = ring(seed) if shared else net(seed)
    stages = loop_stages(model, 4) if shared else layer_stages(model)
    text, flown = greedy(model), Pipeline(model, stages, exit, k).decode(CTX, N)
    right = guessed(model, text, exit, k) if exit < 4 else [True]*(N - 1)
    assert flown.tokens == text and flown.hits == tuple(right)
    assert list(flown.ends) == schedule(flown.hits, exit, 4).ends
    assert flown.passes >= 4*N and (flown.passes == 4*N or exit < 4)


@proves("thm-flight-latency")
def test_how_many_are_in_flight():
    "As many as the sum of powers, in a long enough run; one guess a token: ⌈stages / exit⌉"
    for exit, k in ((1, 2), (2, 3), (3, 2), (1, 1), (4, 3)):
        most, model = 0, net(0)
        class Counting(Pipeline):
            def advance(self, flights):
                nonlocal most
                most = max(most, len(flights))
                super().advance(flights)
        Counting(model, layer_stages(model), exit, k).decode(CTX[:1], N)
        assert most == most_in_flight(exit, 4, k) and most_in_flight(exit, 4) == -(-4 // exit)


class Waiting(Pipeline):
    "The next token starts when this one is complete"
    def __init__(self, model, stages, exit, k): super().__init__(model, stages, len(stages), k)


class Single(Pipeline):
    "One guess, whatever k is"
    def __init__(self, model, stages, exit, k): super().__init__(model, stages, exit, 1)


@faithful("PPD", subject=Pipeline, plain={"no overlap": Waiting, "a single guess": Single})
@pytest.mark.parametrize("exit", [2, 3])
def test_ppd(subject, exit):
    "A token is early by the layers after the exit exactly where one of the exit's k best was right"
    model = net(1)
    text = greedy(model)
    flown = subject(model, layer_stages(model), exit, 4).decode(CTX, N)
    early = [b - a == exit for a, b in pairwise(flown.ends)]
    assert flown.tokens == text and early == guessed(model, text, exit, 4) and any(early)
    assert early != guessed(model, text, exit, 1)


def own_stages(model, loops): return layer_stages(model)


@proves("thm-loads")
@faithful("SPEED", subject=loop_stages, plain={"layers of their own": own_stages})
def test_speed(subject):
    "Several tokens in flight, and the weights are loaded once a tick"
    model, flown = ring(2), None
    for exit in (1, 2):
        flown = Pipeline(model, subject(model, 4), exit).decode(CTX, N)
        assert flown.tokens == greedy(model) and any(flown.hits)
        assert flown.passes > flown.ends[-1] == flown.loads


@proves("thm-flight-latency")
@settings(max_examples=60)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 8), st.data())
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
    monkeypatch.setattr("specref.draft.pipeline.domain_ids", lambda domain, held_out: np.arange(400) % 99)
    recipe = LoopedRecipe(unique=1, loops=2, hidden=32, inner=32, steps=2, rows=1, length=16)
    model, x = train_looped(tmp_path, recipe), torch.tensor([[1, 2, 3]])
    again, card = looped_model(tmp_path/"data"/"looped"), tmp_path/"data"/"looped"/"recipe.json"
    assert torch.allclose(model(input_ids=x).logits, again(input_ids=x).logits, atol=1e-2)
    assert json.loads(card.read_text())["recipe"]["loops"] == 2


def test_the_shipped_decoder():
    "It was made by the recipe of the chapter"
    card = json.loads((stored("looped")/"recipe.json").read_text())["recipe"]
    assert LoopedRecipe(**card) == LoopedRecipe() and len(looped_model().model.layers) == 8
