"The embedded transformer: greedy identity with transformers, and the joint law of three tokens by a G-test"
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from helpers import MISS, g_test
from hypothesis import given, settings, strategies as st

from specref.chance import Seeded
from specref.models import DOMAINS, bare, prompts
from specref.systems import SYSTEMS
from specref.target import target_law
from specref.transformer import HFModel

N = 16


@cache
def greedy_texts(domain):
    "25 held-out prompts and what transformers' own `generate` says after them, in float64"
    model, out = bare("target", torch.float64), []
    for p in prompts(domain, 25, seed=3):
        ids = model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), max_new_tokens=N, do_sample=False,
                             eos_token_id=[-1], pad_token_id=0)
        out.append((p, tuple(ids[0, len(p):].tolist())))
    return out


@pytest.mark.parametrize("domain,name", product(DOMAINS, SYSTEMS))
def test_greedy_identity(domain, name):
    "At temperature 0, float64, 50 prompts: every lossless system returns exactly what transformers' own `generate` returns"
    target, draft = (HFModel(bare(k, torch.float64), temperature=0, check=False) for k in ("target", "small"))
    system = SYSTEMS[name](draft)
    for p, want in greedy_texts(domain): assert system(target, p, N, Seeded(0)) == want


@settings(max_examples=2 * len(SYSTEMS))
@given(name=st.sampled_from(sorted(SYSTEMS)), gamma=st.integers(1, 4), temperature=st.sampled_from([.7, 1., 1.5]), draft=st.sampled_from(["small", "large"]),
       domain=st.sampled_from(sorted(DOMAINS)), seed=st.integers(0, 10**6))
def test_joint_law(name, gamma, temperature, draft, domain, seed, n=900):
    "Three tokens from the embedded models, top-3 laws: G-test at 1e-9, power .999 at the distance printed"
    prompt, warp = prompts(domain, 1, seed=seed)[0], dict(temperature=temperature, top_k=3, check=False)
    target = HFModel(bare("target"), **warp)
    system = SYSTEMS[name](HFModel(bare(draft), **warp), gamma=gamma, shape=(2, 1))
    counts = {}
    for i in range(n):
        text = system(target, prompt, 3, Seeded(seed + i))
        counts[text] = counts.get(text, 0) + 1
    test = g_test(counts, target_law(HFModel(bare("target"), **warp), prompt, 3))
    print(f"{name}, {draft}, γ = {gamma}, T = {temperature}: {test}")
    assert test.fits and test.tv < .35
