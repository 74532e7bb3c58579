"""Every recurrent architecture of transformers, tiny and random: five systems of chains against its own text

`make record-recurrent`; `recurrent.py NAME ...` prints the outcomes of some and records nothing."""
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
from transformers import NoRepeatNGramLogitsProcessor

import architectures as sweep
from specref.core.check import write_record
from specref.core.loop import System, match
from specref.core.rng import Seeded
from specref.core.tree import Tree
from specref.draft.jacobi import Jacobi
from specref.draft.lookup import PromptLookup
from specref.draft.suffix import SuffixDecoding
from specref.models.recurrent import RecurrentModel, keeps_state
from specref.verify.block import block
from specref.verify.reject import reject
from specref.core.drafters import Chain


def line(ctx, drafted=()):
    tree = Tree(ctx)
    for u, x in enumerate(drafted): tree.add(u, x)
    return tree


def histories(seed, rounds=7, V=16):
    "Chains whose context grows by some accepted tokens and another, goes back, or changes in one place"
    rng, ctx, out = random.Random(seed), (3, 1), []
    token = lambda: rng.randrange(V)
    for _ in range(rounds):
        drafted = tuple(token() for _ in range(rng.choice([0, 1, 3, 4, 5])))
        out.append((ctx, drafted))
        kept = rng.choice([0, len(drafted) // 2, max(0, len(drafted) - 1), len(drafted)])
        longer, at = ctx + drafted[:kept] + (token(),), rng.randrange(len(ctx))
        other = longer[:at] + (token(),) + longer[at+1:]
        ctx = rng.choice([*[longer] * 9, other, ctx[:at + 1], (token(),)])
    return out


def deviation(model, rounds):
    "The largest difference of logits from plain passes, in multiples of the largest logit"
    off = largest = 0
    for ctx, drafted in rounds:
        want = np.stack([model.alone(ctx + drafted[:i]) for i in range(len(drafted) + 1)])
        off = max(off, abs(model.logits(line(ctx, drafted)) - want).max())
        largest = max(largest, abs(want).max())
    return off / largest


OPTIONS = dict(   # of configurations that architectures.py does not build
    zamba=dict(num_hidden_layers=5, attention_hidden_size=64, attention_head_dim=16, mamba_dt_rank=4,
               layers_block_type=["linear_attention", "hybrid"] * 2 + ["linear_attention"],
               n_mamba_heads=2, num_attention_heads=4, num_key_value_heads=4),
    zamba2=dict(num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "linear_attention"],
                attention_hidden_size=64, attention_head_dim=16, n_mamba_heads=4, mamba_headdim=16,
                num_attention_heads=4, num_key_value_heads=4, hybrid_layer_ids=[1], mamba_d_state=8),
    nemotron_h=dict(mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=8, num_hidden_layers=4,
                    layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"]),
    kimi_linear=dict(num_experts=4, num_experts_per_token=2, num_expert_group=1, topk_group=1,
                     mlp_layer_types=["dense", "sparse"], layer_types=["linear_attention", "full_attention"],
                     linear_head_dim=8, linear_num_heads=4, num_key_value_heads=4, head_dim=16),
    bailing_hybrid=dict(num_experts=4, num_experts_per_token=2, num_expert_group=2, topk_group=1, head_dim=8,
                        num_attention_heads=4, num_key_value_heads=4, mlp_layer_types=["dense", "sparse"],
                        layer_types=["linear_attention", "full_attention"], linear_head_dim=8,
                        linear_num_heads=4, v_head_dim=8),
    qwen4_exp_text=dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
                        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, hc_count=2,
                        hc_lowrank=8, ngram_vocab_size_base=64, split_ngram_parts=2, indexer_n_heads=2,
                        indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=1,
                        ple_embed_dim=16),
    zaya=dict(num_experts_per_tok=1, layer_types=["hybrid", "hybrid"], num_experts=4, router_hidden_size=16),
    xlstm=dict(hidden_size=64, embedding_dim=64, num_heads=4, qk_dim_factor=1., v_dim_factor=1., num_blocks=2,
               num_hidden_layers=2, chunk_size=8),
    lfm2=dict(layer_types=["conv", "full_attention"]))


def swept(name):  # -> dict
    "Five systems of chains against the model's own greedy text, and logits after rejections"
    try: model, own = sweep.built(name)
    except Exception as e: return dict(outcome="not built", why=sweep.words(e))
    if not keeps_state(model): return dict(outcome="no recurrent state")
    try: return compared(model, own)
    except Exception as e:
        return dict(outcome="refused" if sweep.in_words(e) else "failed", why=sweep.words(e))


def compared(model, own):
    same = [NoRepeatNGramLogitsProcessor(3)]
    target = RecurrentModel(model, 0, processors=same)
    draft = RecurrentModel(sweep.noisy(model), processors=same, stepwise=target.stepwise)
    got = {name: list(make(draft)(target, sweep.PROMPT, sweep.TOKENS, Seeded(0)))
           for name, make in CHAINS.items()}
    off = deviation(target, histories(0, V=sweep.V))
    state = target.trie.states[max(target.trie.states)]
    wrong = [name for name, text in got.items() if text != own] + ["logits"] * bool(off > 1e-3)
    how = "right, one token a pass" if target.stepwise else "right, one pass"
    return dict(outcome="wrong" if wrong else how, why=", ".join(wrong), deviation=float(f"{off:.1g}"),
                state_bytes=state.copied_bytes, row_bytes=state.row_bytes, dtype=str(model.dtype))


CHAINS = {
    "speculative sampling": lambda d: System("chain", Chain(d, 4), reject),
    "block verification": lambda d: System("block", Chain(d, 4), block),
    "prompt lookup": lambda d: System("lookup", PromptLookup(d.V, 2, 4), reject),
    "suffix decoding": lambda d: System("suffix", SuffixDecoding(d.V), reject),
    "Jacobi": lambda d: System("jacobi", Jacobi(d.V, 4), match)}


def main(*names):
    "Every architecture is recorded; the outcomes of some are printed alone"
    warnings.simplefilter("ignore")
    sweep.MORE.update(OPTIONS)
    rows = {}
    for name in names or SWEPT:
        rows[name] = swept(name)
        print(f"{name:24} {rows[name]}", flush=True)
    counts = Counter(row["outcome"] for row in rows.values())
    got = dict(counts=dict(sorted(counts.items())), architectures=rows)
    if not names: write_record(Path(__file__).with_suffix(".json"), "make record-recurrent", got)


SWEPT = ("bailing_hybrid bamba deepseek_v4 falcon_h1 falcon_mamba granitemoehybrid inkling2_text "
         "inkling_text jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid "
         "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma rwkv "
         "xlstm zamba zamba2 zaya").split()
if __name__ == "__main__": main(*sys.argv[1:])
