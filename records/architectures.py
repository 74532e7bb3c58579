"""Every causal architecture of transformers, tiny and random: six systems against its own `generate`, greedy

`make record-architectures`; `architectures.py NAME ...` prints the outcomes of some and records nothing.
Each model is in a process of its own, with a limit of CPU seconds.
`right`, or `right by paths`: all six texts are its own, and the logits of a tree are those of plain passes.
`refused`: in words. `failed`: another error, or no time. `wrong`: none may be.
`not built`: transformers' `generate` served no tiny model of it.
"""
import multiprocessing
import resource
import sys
import warnings
from collections import Counter
from copy import deepcopy
from itertools import product
from pathlib import Path
from time import process_time

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, NoRepeatNGramLogitsProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specref.core.check import write_record
from specref.core.loop import System
from specref.core.rng import Seeded
from specref.core.tree import Tree
from specref.draft.lookup import PromptLookup
from specref.draft.recycling import Recycling, rank_template
from specref.draft.shapes import DynamicTree
from specref.models.transformer import HFModel, releases
from specref.verify.block import block
from specref.verify.reject import reject
from specref.core.drafters import Chain
from specref.core.drafters import Branching

RECORD = Path(__file__).with_suffix(".json")
OUTCOMES = "right", "right by paths", "refused", "failed", "wrong", "not built"
V, SECONDS, PROMPT, TOKENS = 64, 60, (3, 1, 4, 1, 5, 9, 2, 6), 24
WINDOWS = "sliding_window", "attention_chunk_size", "window_size"   # of 8 tokens in every tiny model
SIZES = {   # of an attribute, where a configuration has it
    8: "attention_chunk_size attention_head_dim block_size d_kv head_dim hidden_size_per_layer_input "
       "index_head_dim kv_channels kv_lora_rank local_window_size o_lora_rank qk_nope_head_dim "
       "qk_rope_head_dim rotary_dim sliding_window swa_head_dim swa_v_head_dim v_head_dim window_size",
    2: "decoder_layers encoder_layers encoder_n_layers moe_k moe_topk n_group n_layer n_layers "
       "num_attention_groups num_decoder_layers num_encoder_layers num_experts_per_tok "
       "num_hidden_layers num_key_value_heads num_key_value_heads_swa num_kv_heads num_layers "
       "swa_num_key_value_heads top_k_experts topk_group",
    1: "first_k_dense_replace n_shared_experts num_hash_layers num_shared_experts",
    4: "decoder_attention_heads encoder_attention_heads index_topk mamba_d_state mamba_n_heads "
       "mamba_num_heads moe_num_experts n_head n_heads n_routed_experts num_attention_heads num_experts "
       "num_heads num_local_experts ssm_state_size state_size swa_num_attention_heads",
    16: "index_n_heads mamba_d_head mamba_head_dim",
    32: "attention_hidden_size d_model dim dim_model emb_dim embedding_size hidden_dim hidden_size "
       "n_embd q_lora_rank word_embed_proj_dim",
    64: "d_ff d_inner decoder_ffn_dim dff dim_ff encoder_ffn_dim expert_ffn_hidden_size ffn_dim "
       "ffn_hidden_size inner_dim intermediate_size intermediate_size_mlp mamba_intermediate_size "
       "mlp_hidden_size moe_intermediate_size n_inner shared_expert_intermediate_size "
       "shared_intermediate_size unpadded_vocab_size vocab_size vocab_size_per_layer_input",
    256: "max_position_embeddings max_seq_len max_sequence_length n_positions seq_length",
}
SIZE = {name: n for n, names in SIZES.items() for name in names.split()}
IDS = {"pad_token_id", "bos_token_id", "eos_token_id"}
SAME, UNSET = object(), ("head_dim", "num_key_value_heads")
PLAIN = dict(attention_dropout=0., use_cache=True)


def shrunk(config, depth=0, end=None):  # -> dict
    "The small options of a default configuration, those of its parts too; `end` for the special tokens"
    given = config.to_dict()
    small = {name: small_value(name, x, vars(config).get(name), depth, end) for name, x in given.items()}
    kind = {k: given[k] for k in ("model_type",) if depth and k in given}
    return {name: x for name, x in small.items() if x is not SAME} | kind


def small_value(name, value, part, depth, end):
    whole = isinstance(value, int) and not isinstance(value, bool)
    if hasattr(part, "to_dict"): return shrunk(part, depth + 1, end)
    if name in SIZE and (whole or value is None and name in UNSET): return SIZE[name]
    if name in IDS: return end
    if isinstance(value, list) and name.endswith(("layer_types", "block_types")): return two_kinds(value)
    return PLAIN.get(name, SAME)


def two_kinds(kinds):  # -> two entries
    "One layer of each of the first two kinds that a list names"
    first = list(dict.fromkeys(kinds))
    return (first + first)[:2] if first else kinds


def made(name, heads, end):
    "A tiny random model in float64, its weights large, by the configuration class of `name`"
    torch.manual_seed(0)
    cls = CONFIG_MAPPING[name]
    more = dict(num_key_value_heads=heads) if "num_key_value_heads" in cls().to_dict() else {}
    config = cls(**shrunk(cls(), end=end) | more | MORE.get(name, {}))
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder: config.is_decoder = True
    model = AutoModelForCausalLM.from_config(config).double().eval()
    model.generation_config = GenerationConfig()
    with torch.no_grad():
        for w in model.parameters(): w.normal_(0, .3) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    return model


def noisy(model):
    "A draft: a second copy, with noise on its weights"
    torch.manual_seed(1)
    model = deepcopy(model)
    with torch.no_grad():
        for w in model.parameters(): w.add_(.03 * torch.randn_like(w))
    return model


SYSTEMS = dict(
    chain=lambda d: System("chain", Chain(d, 4), reject),
    tree=lambda d: System("tree", Branching(d, (2, 2, 1)), reject),
    dynamic=lambda d: System("dynamic", DynamicTree(d, width=3, depth=4, n=8), reject),
    lookup=lambda d: System("lookup", PromptLookup(d.V, 2, 4), reject),
    block=lambda d: System("block", Chain(d, 4), block),
    recycling=lambda d: System("recycling", Recycling(d.V, shape=rank_template(8)), reject))


def plain(model):  # -> text
    "transformers' own greedy text, in which no three tokens occur twice"
    ids = torch.tensor([PROMPT])
    own = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
        do_sample=False, no_repeat_ngram_size=3, eos_token_id=None, pad_token_id=0)
    return own[0, len(PROMPT):].tolist()


def built(name):  # -> model, its plain text
    "The first that its own `generate` can use, of 2 key heads or 4, no padding or 0, float64 or float32"
    start = process_time()
    for heads, end, kind in product((2, 4), (None, 0), (torch.float64, torch.float32)):
        try:
            model = made(name, heads, end).to(kind)
            model(torch.tensor([PROMPT]))
            return model, plain(model)
        except Exception as e: last = e
        if process_time() - start > SECONDS / 4: break
    raise last


def compared(model, own):  # -> the systems whose texts differ, the deviation of a tree's logits, the target
    "The six texts, and the raw logits of a tree at their end; the drafts are warm, so the trees branch"
    same = [NoRepeatNGramLogitsProcessor(3)]
    target = HFModel(model, temperature=0, processors=same)
    draft = HFModel(noisy(model), processors=same)
    got = {name: list(make(draft)(target, PROMPT, TOKENS, Seeded(0))) for name, make in SYSTEMS.items()}
    tree = Tree((*PROMPT, *own))
    for u, x in (0, 7), (0, 8), (1, 9), (2, 9), (2, 5), (5, 1): tree.add(u, x)
    want = np.stack([target.alone(tree.text(i)) for i in range(len(tree))])
    off = abs(target.logits(tree) - want).max() / abs(want).max()
    return [name for name in got if got[name] != own], off, target


def outcome(name):  # -> dict
    try: model, own = built(name)
    except Exception as e: return dict(outcome="not built", why=words(e))
    try: off, deviation, target = compared(model, own)
    except Exception as e: return dict(outcome="refused" if in_words(e) else "failed", why=words(e))
    if deviation > 1e-4: off.append(f"logits {deviation:.1g} off")
    config = model.config.get_text_config(decoder=True)
    how = " by paths" if getattr(target, "by_paths", False) else ""
    windows = [w for w in (getattr(config, k, None) for k in WINDOWS) if w]
    return dict(outcome="wrong" if off else "right" + how, why=", ".join(off), own=own, windows=windows,
                deviation=float(deviation), dtype=str(model.dtype))


def in_words(e): return isinstance(e, ValueError) and "wanted " in str(e)
def words(e): return f"{type(e).__name__}: {' '.join(str(e).split())}"[:400]


def child(name, pipe):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    spent = int(process_time())   # by the parent too, where it is counted
    resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, spent + SECONDS))
    pipe.send(outcome(name))


def limited(name):  # -> dict
    "The outcome of one model, computed in a process of its own"
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(name, there), daemon=True)
    process.start()
    there.close()
    try: return here.recv()
    except EOFError: return dict(outcome="failed", why=f"no answer in {SECONDS} processor seconds")
    finally:
        process.kill()
        process.join()


def table(found):
    "The counts, then a line for each model that is not right"
    counts = Counter(f["outcome"] for f in found.values())
    rest = sorted((f["outcome"], name, f["why"][:150]) for name, f in found.items())
    return "\n".join([*(f"{n:4} {what}" for what, n in counts.most_common()),
                      *(f"{what:9} {name:24} {why}" for what, name, why in rest if "right" not in what)])


def reason(found):  # -> str
    "The words of a refusal or an error in one line, without the parts that every refusal has"
    why = found["why"].removeprefix("Unservable: ").removeprefix("model: got ")
    why = why.removesuffix(f" ({releases()})")
    return why.split("wanted one that a masked pass serves: ")[-1][:160]


def record(found):  # -> dict
    "The counts, and each architecture's outcome, with the reason of what is not right"
    counts = Counter(f["outcome"] for f in found.values())
    rows = {name: ": ".join(filter(None, (f["outcome"], reason(f)))) for name, f in sorted(found.items())}
    return dict(counts={name: counts[name] for name in OUTCOMES}, architectures=rows)


def main(*names):
    found = {}
    for name in names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found[name] = limited(name)
        print(f"{name:24} {found[name]['outcome']:9} {found[name]['why'][:150]}", flush=True)
    print(table(found))
    if not names: write_record(RECORD, "make record-architectures", record(found))
    sys.exit(any(f["outcome"] == "wrong" for f in found.values()))


MORE = {   # options that must fit each other
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]), "mamba2": dict(num_heads=8),
    "bamba": dict(attn_layer_indices=[1]), "deepseek_v2": dict(topk_method="greedy", num_experts_per_tok=2),
    "dots1": dict(num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1), "dbrx": dict(attn_config=dict(rope_theta=1e4)),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "gemma3n_text": dict(num_kv_shared_layers=0), "falcon_h1": dict(mamba_d_ssm=64),
    "lfm2_moe": dict(layer_types=["full_attention", "conv"])}
transformers.logging.set_verbosity_error()
if __name__ == "__main__": main(*sys.argv[1:])
