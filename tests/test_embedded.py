"Embedded transformers: greedy identity, and a G-test of the joint distribution of three tokens"
from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from helpers import g_test, long
from specref.app.systems import SYSTEMS
from specref.app.tour import earlier_text
from specref.core.rng import Seeded
from specref.core.target import target_law
from specref.models.embedded import DOMAINS, prompts, raw_model
from specref.models.transformer import HFModel

N, PROMPTS, RUNS = long(8, 16), long(1, 25), 800


class Once(HFModel):
    "A model that computes each tree once: called again, it returns the same rows"
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.given = {}
    def __call__(self, tree):
        key = tree.ctx, *map(tuple, (tree.parent, tree.token))
        if key not in self.given: self.given[key] = super().__call__(tree)
        return self.given[key]


@cache
def greedy_texts(domain):
    "Held-out prompts and what transformers' own `generate` returns after them, in float64"
    model, out = raw_model("target", torch.float64), []
    for p in prompts(domain, PROMPTS, seed=3):
        text = torch.tensor([p])
        ids = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=N, do_sample=False,
                             eos_token_id=0, pad_token_id=0)
        out.append((p, tuple(ids[0, len(p):].tolist())))
    return out


@pytest.mark.parametrize("domain,name", list(product(DOMAINS, SYSTEMS)))
def test_greedy_identity(domain, name):
    "At temperature 0, float64: every lossless system returns what transformers' own `generate` returns"
    names = "target", "small"
    target, draft = (HFModel(raw_model(k, torch.float64), temperature=0, check=False) for k in names)
    system = SYSTEMS[name](draft, past=earlier_text(20_000))
    for p, want in greedy_texts(domain): assert system(target, p, N, Seeded(0), stop=(0,)) == want


def case(seed):
    "A draft, its length, a prompt and its distribution of three tokens by the seed; the test can detect .3"
    rng = np.random.default_rng(seed)
    draft, domain = rng.choice(["small", "large"]), rng.choice(sorted(DOMAINS))
    gamma = int(rng.integers(1, 5))
    warp = dict(temperature=float(rng.choice([1., 1.5, 2.])), top_k=2, check=False)
    target = HFModel(raw_model("target"), **warp)
    laws = ((prompt, target_law(target, prompt, 3)) for prompt in prompts(domain, 20, seed=seed))
    sees = lambda want: g_test({text: round(RUNS * float(w)) for text, w in want.items()}, want).tv
    return draft, gamma, warp, *next((prompt, want) for prompt, want in laws if sees(want) < .3)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("turn", range(long(1, 4)))
def test_joint_distribution(name, turn):
    "Three tokens from the embedded models, top 2: G-test at 1e-9, power .999 at the distance printed"
    draft, gamma, warp, prompt, want = case(seed := 100*turn + list(SYSTEMS).index(name))
    target, drafts = Once(raw_model("target"), **warp), Once(raw_model(draft), **warp)
    system = SYSTEMS[name](drafts, gamma=gamma, shape=(2, 1), past=earlier_text(20_000))
    test = g_test(Counter(system(target, prompt, 3, Seeded(seed + i)) for i in range(RUNS)), want)
    print(f"{name}, {draft}, γ = {gamma}, T = {warp['temperature']}: {test}")
    assert test.fits and test.tv < .3
