"The embedded transformer: greedy identity with transformers, and the joint law of three tokens by a G-test"
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
from helpers import g_test, pooled
from hypothesis import Phase, assume, given, settings, strategies as st

from specref.core.rng import Seeded
from specref.models.embedded import DOMAINS, raw_model, prompts
from specref.app.systems import SYSTEMS
from specref.core.target import target_law
from specref.app.tour import earlier_text
from specref.models.transformer import HFModel

N = 16


class Once(HFModel):
    "A model that reads each tree once: asked again, it gives the rows that it gave"
    def __init__(self, *args, **kw): super().__init__(*args, **kw); self.given = {}
    def __call__(self, tree):
        key = tree.ctx, *map(tuple, (tree.parent, tree.token))
        if key not in self.given: self.given[key] = super().__call__(tree)
        return self.given[key]


@cache
def greedy_texts(domain):
    "25 held-out prompts and what transformers' own `generate` says after them, in float64"
    model, out = raw_model("target", torch.float64), []
    for p in prompts(domain, 25, seed=3):
        ids = model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), max_new_tokens=N, do_sample=False,
                             eos_token_id=0, pad_token_id=0)
        out.append((p, tuple(ids[0, len(p):].tolist())))
    return out


@pytest.mark.parametrize("domain,name", list(product(DOMAINS, SYSTEMS)))
def test_greedy_identity(domain, name):
    "At temperature 0, float64, 50 prompts: every lossless system returns exactly what transformers' own `generate` returns"
    target, draft = (HFModel(raw_model(k, torch.float64), temperature=0, check=False) for k in ("target", "small"))
    system = SYSTEMS[name](draft, past=earlier_text(20_000))
    for p, want in greedy_texts(domain): assert system(target, p, N, Seeded(0), stop=(0,)) == want


@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=2, phases=[Phase.generate])
@given(gamma=st.integers(1, 4), temperature=st.sampled_from([1., 1.5, 2.]), draft=st.sampled_from(["small", "large"]),
       domain=st.sampled_from(sorted(DOMAINS)), seed=st.integers(0, 10**6))
def test_joint_law(name, gamma, temperature, draft, domain, seed):
    "Three tokens from the embedded models, top-2 laws: G-test at 1e-9, power .999 at the distance printed"
    n, prompt, warp = 2000, prompts(domain, 1, seed=seed)[0], dict(temperature=temperature, top_k=2, check=False)
    want = target_law(HFModel(raw_model("target"), **warp), prompt, 3)
    assume(len(pooled(want, n)) >= 4)   # a law that is nearly one text shows nothing
    target, system = Once(raw_model("target"), **warp), SYSTEMS[name](Once(raw_model(draft), **warp), gamma=gamma, shape=(2, 1), past=earlier_text(20_000))
    test = g_test(Counter(system(target, prompt, 3, Seeded(seed + i)) for i in range(n)), want)
    print(f"{name}, {draft}, γ = {gamma}, T = {temperature}: {test}")
    assert test.fits and test.tv < .3
