"Chapter 50: rooflines in fractions, experts by enumeration, sizes by the parameters of real networks"
from fractions import Fraction as F
from itertools import combinations, product

import pytest, torch
from hypothesis import given, strategies as st
from transformers import (AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig, Qwen2MoeConfig,
                          Qwen3Config, Qwen3MoeConfig)

from helpers import proves
from specref.speed.cost import Machine, ModelSize, pass_seconds
from specref.speed.roofline import (DEVICES, SHAPES, Device, MixtureSize, Workload, critical_batch,
                                    crossings, fit_engine, model_size, pays, prefill_seconds, slack,
                                    touched_experts, transfer_seconds)

small = st.integers(1, 9)

@proves("thm-free-tokens")
@given(*[small]*8)
def test_what_is_free(W, w, r, a, bandwidth, flops, m, B):
    machine = Machine(F(bandwidth), F(flops))
    linear, attention = ModelSize(F(W), F(w), 0, 0), ModelSize(0, 0, F(r), F(a))
    R = F(flops, bandwidth)
    free = pass_seconds(linear, machine, 0, m, B) == F(W*w, bandwidth)   # the reading alone
    assert free == (m*B <= w*R/2)
    same = pass_seconds(attention, machine, 5, m, B) == pass_seconds(attention, machine, 5, 1, B)
    assert same == (m == 1 or m <= R*r/a)

def chain_speedup(size, machine, rows, gamma, tau, c, batch):
    "Drafts read no rows and take the share `c` of a plain pass without rows"
    plain, verify = (pass_seconds(size, machine, rows, m, batch) for m in (1, gamma + 1))
    return tau*plain / (gamma*c*pass_seconds(size, machine, 0, 1, batch) + verify)

@proves("thm-critical-batch")
@given(small, st.integers(1, 6), st.fractions(0, 1, max_denominator=9), st.fractions(0, 1, max_denominator=9))
def test_the_critical_batch(w, gamma, high, c):
    size, machine, tau = ModelSize(F(10), F(w), 0, 0), Machine(F(4), F(9)), 1 + gamma*high
    def gain(batch): return chain_speedup(size, machine, 0, gamma, tau, c, batch)
    room, at = F(w*9, 8), critical_batch(size, machine, gamma, tau, c)
    batches = sorted({room*F(i, 7) for i in range(1, 22)} | {at or room})
    gains = [*map(gain, batches)]
    assert gains == sorted(gains, reverse=True) and (at > 0) == (tau > 1 + gamma*c)
    for batch, found in zip(batches, gains):
        if batch > at: assert found < 1 or tau == gamma + 1 and not c or tau == 1 + gamma*c
        if at and batch <= at: assert found >= 1
    if at: assert gain(at) == 1 and at <= room
    if tau == gamma + 1 and not c: assert gain(2*room) == 1

@proves("thm-critical-context")
@given(st.integers(0, 40), st.integers(1, 6), st.fractions(0, 1, max_denominator=9),
       st.fractions(0, F(1, 2), max_denominator=9))
def test_the_critical_context(S, gamma, high, c):
    "At one text, at the ends of the middle range and far out: between them the gain is linear"
    size, machine, tau = ModelSize(F(10), F(2), F(1, 3), 0), Machine(F(4), F(40)), 1 + gamma*high
    room, reading = F(10), F(20, 4)   # n* and the seconds of reading the weights, which the theorem calls 1
    batches = 1, max(1, room/(gamma + 1)), room, 3*room, 90*room
    everywhere = all(chain_speedup(size, machine, S, gamma, tau, c, batch) > 1 for batch in batches)
    kappa, one = F(1, 12)/reading, chain_speedup(size, machine, S, gamma, tau, c, 1) > 1
    assert everywhere == (one and S*kappa*(tau - 1) > (gamma + 1 + gamma*c - tau)/room)

@proves("thm-experts")
@pytest.mark.parametrize("E, k, t", [(4, 2, 2), (5, 2, 3), (4, 1, 3), (3, 3, 2)])
def test_experts_by_enumeration(E, k, t):
    "(a) exactly; chosen with replacement, or k times the experts of one, they are others"
    sets = [frozenset(s) for s in combinations(range(E), k)]
    read = [len(frozenset().union(*some)) for some in product(sets, repeat=t)]
    assert abs(touched_experts(E, k, t) - F(sum(read), len(read))) < 1e-12
    if 1 < k < E: assert E*(1 - (1 - 1/E)**(k*t)) < touched_experts(E, k, t) - .05 < min(E, k*t)

@proves("thm-experts")
def test_favourites_and_topics_read_fewer():
    "(b) and (c), in fractions: three experts, one a token, two topics"
    topics, t = [[F(7, 10), F(2, 10), F(1, 10)], [F(1, 10), F(3, 10), F(6, 10)]], 3
    def read(law):   # by enumeration
        found = 0
        for path in product(range(3), repeat=t):
            weight = F(1)
            for e in path: weight *= law[e]
            found += weight*len({*path})
        return found
    both = [(a + b)/2 for a, b in zip(*topics)]
    assert read(both) == sum(1 - (1 - p)**t for p in both)
    assert sum(map(read, topics))/2 < read(both) < touched_experts(3, 1, t)

@proves("prop-shared-slack")
@given(small, st.integers(0, 60))
def test_the_slack_is_shared(w, verified):
    size, machine = ModelSize(F(10), F(w), 0, 0), Machine(F(4), F(40))
    room = slack(size, machine, verified)
    if not room: return
    def step(tokens): return pass_seconds(size, machine, 0, 1, tokens)
    assert step(verified + room) == step(1) < step(verified + room + 1)

LAYERS = dict(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, head_dim=6, tie_word_embeddings=False)
MIXED = LAYERS | dict(num_experts_per_tok=2, moe_intermediate_size=10)
CONFIGS = {
    "Llama": LlamaConfig(**LAYERS), "Qwen3": Qwen3Config(**LAYERS),
    "Mixtral": MixtralConfig(**LAYERS, num_local_experts=6, num_experts_per_tok=2),
    "Qwen3Moe": Qwen3MoeConfig(**MIXED, num_experts=6),
    "Qwen2Moe": Qwen2MoeConfig(**MIXED | dict(head_dim=4), num_experts=6, shared_expert_intermediate_size=14),
    "DeepseekV3": DeepseekV3Config(**MIXED | dict(num_key_value_heads=4), n_routed_experts=8, n_group=2,
                                   topk_group=1, first_k_dense_replace=1, n_shared_experts=2, q_lora_rank=7,
                                   kv_lora_rank=5, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8),
    "no q_lora": DeepseekV3Config(**MIXED | dict(num_key_value_heads=4), n_routed_experts=8, n_group=2,
                                  topk_group=1, first_k_dense_replace=1, n_shared_experts=1, q_lora_rank=None,
                                  kv_lora_rank=5, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=8),
}

@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_network(name):
    "Its matrices, without the embeddings and Qwen2Moe's gate of one row; the experts of a token are `used`"
    config = CONFIGS[name]
    with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)
    matrices = {k: w.numel() for k, w in model.named_parameters()
                if w.dim() > 1 and "embed" not in k and "shared_expert_gate" not in k}
    size = model_size(config)
    assert size.held == sum(matrices.values())
    mixed = sum(n for k, n in matrices.items() if ".experts." in k)
    share = F(config.num_experts_per_tok, size.experts) if mixed else 0
    assert size.used == size.held - mixed*(1 - share)
    assert size.read(1) == pytest.approx(size.used) and size.read(10**6) == pytest.approx(size.held)

def test_rows_are_those_of_the_cache():
    "Grouped heads and latent vectors, two layers' more with each; four operations a query head and number"
    grouped, latent = model_size(CONFIGS["Llama"], kv_bytes=1), model_size(CONFIGS["DeepseekV3"], kv_bytes=1)
    assert (grouped.row_bytes, grouped.row_flops) == (3*2*2*6, 3*4*4*6)
    assert (latent.row_bytes, latent.row_flops) == (3*(5 + 4), 3*4*(4*5 + 2*4))

DEVICE, SIZE, DRAFT = Device(10**3, 4., 8., "by hand"), ModelSize(10, 2, 3, 5), ModelSize(2, 2, 1, 1)
WORK = Workload(batch=3, context=6, gamma=2, tau=2., nodes=5)

def test_pays():
    "Its parts by hand; a tree verifies its nodes; what is in memory, and whether it fits"
    found, machine = pays(SIZE, DEVICE, WORK, DRAFT), Machine(4., 8.)
    assert found.plain == pass_seconds(SIZE, machine, 6, 1, 3)
    verify = pass_seconds(SIZE, machine, 6, 6, 3)
    assert found.round == 2*pass_seconds(DRAFT, machine, 6, 1, 3) + verify
    assert found.memory == 10*2 + 3*6*3 + 2*2 + 1*6*3 and found.fits and not bool(found)
    assert found.speedup == 2*found.plain/found.round and found.tokens_per_s == 3*2/found.round
    late = pays(SIZE, DEVICE, WORK, .25, rest=7.)
    assert late.plain == found.plain + 7 and late.round == pytest.approx(7 + 2*.25*found.plain + verify)
    assert not pays(SIZE, Device(50, 4., 8., ""), WORK).fits
    assert bool(pays(SHAPES["Llama-2-7B"], DEVICES["L4"], Workload(tau=2.)))
    tied = dict(SHAPES["Llama-2-7B"], tie_word_embeddings=True)
    both = [pays(config, "L4", Workload()).memory for config in (SHAPES["Llama-2-7B"], tied)]
    assert both[0] - both[1] == 2*32000*4096
    assert Workload(gamma=1, nodes=7, tau=4.).read == 7   # a block of seven in one pass

def test_devices_and_shares_scale():
    one, four = pays(SIZE, DEVICE, WORK, DRAFT), pays(SIZE, DEVICE, WORK, DRAFT, share=.5, number=4)
    assert (four.plain, four.round) == (one.plain/2, one.round/2)

def test_the_other_functions():
    mixed = MixtureSize(10, 2, 3, 5, expert=4, experts=2, chosen=1)
    assert (mixed.used, mixed.held, mixed.read(2)) == (14, 18, 16)
    size, machine = ModelSize(F(10), 2, 3, 5), Machine(F(4), F(8))
    assert prefill_seconds(size, machine, 6, 2) == pass_seconds(size, machine, 4, 4)
    assert transfer_seconds(size, 6, F(9)) == 2
    assert crossings(lambda x: x % 3, [0, 1, 2, 3, 5]) == [(1, 2), (2, 3), (3, 5)]
    share, rest = fit_engine([1, 2, 5], [2.5, 4.5, 10.5])
    assert (share, rest) == pytest.approx((.5, .5))
    assert len(DEVICES) >= 12 and all(d.source and d.memory for d in DEVICES.values())
