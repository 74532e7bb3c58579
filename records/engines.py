"""Released samplers and engines, tested: `make engines`

engines.py SOURCES [PART ...]: each part of the record is made anew and written at once; without names those
that are not long, with `all` all of them. SOURCES holds the wheels of engines that are not installed; only
their Python files are used."""
import os
os.environ["TRITON_INTERPRET"] = "1"   # before triton is imported
import json
import shutil
import subprocess
import sys
import warnings
import zipfile
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count, islice
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from scipy.stats import chi2

import engines_exact as ee
from specref.certify import black_boxes as bb, engines as en, released as rs
from specref.app.benchmarks import quiet
from specref.models.embedded import generation_view
from specref.certify.counts import ALPHA
from specref.certify.rows import CASES, RowCase
from specref.certify.calls import Interface
from specref.certify.judge import judge_rule
from specref.certify.samplers import certify_sampler
from specref.core.check import provenance_of_run, write_json, write_record
from specref.core.drafters import Chain
from specref.core.law import normalize, tv, warp
from specref.core.loop import generate, match
from specref.core.rng import Seeded, numpy_generator
from specref.core.target import TableModel, random_table
from specref.models.embedded import DATA, END_TEXT, prompts, raw_model, tokenizer
from specref.train.checkpoints import GGUF_FORMS, convert
from specref.train.registry import load_drafter
from specref.verify.block import block
from specref.verify.reject import reject

RECORD, SOURCES = Path(__file__).with_suffix(".json"), Path(sys.argv[1])
SEEDS_EXACT = [0, 3]
BATCH, RUNS, TEXTS, SEEDS = 4096, 130_000, 500_000, 200
TWO = {name: CASES[name] for name in ("different rows", "the draft ranks them backwards")}
ONE = {"the draft ranks them backwards": CASES["the draft ranks them backwards"]}
FLOAT32 = "computed in float32: distances below 1e-6 may be rounding"
FOLDER = Path(gettempdir())/"specref-engines"


# -- Released sources ---------------------------------------------------------------------------------

@cache
def sources(package):
    "The Python files of a wheel, in a folder"
    wheel, = SOURCES.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(FOLDER/package, [name for name in z.namelist() if name.endswith(".py")])
    return FOLDER/package

@cache
def released(package):
    "The version of a wheel or of an installed package"
    try: return version(package)
    except PackageNotFoundError: return next(SOURCES.glob(f"{package}-*.whl")).name.split("-")[1]

@cache
def vllm(): return rs.vllm_modules(sources("vllm"))

@cache
def sglang(): return rs.sglang_modules(sources("sglang"))

@cache
def lmdeploy(): return rs.lmdeploy_modules(sources("lmdeploy"))


# -- Samplers: engine, what was asked, how it is made, the rule, its planted mistakes -----------------

FROM_P, ONE_UNIFORM, NO_Q = "recovered token from p", "one uniform for all places", "draft weight left out"
PREFIX = "acceptance of the prefix alone"
CHAIN, BLOCK = "standard rejection of a chain", "block verification of a chain"
BLOCK_MASS = "residual_mass / (\n" + " "*28 + "residual_mass + 1.0 - prefix_prob\n" + " "*24 + ")"

def kernels():
    "{name: (package, what was asked, sampler of modules, modules, rule, mistakes)}"
    (runner, _, v1, sampling), (chain, _, dspark), (tiles, launcher, plain) = vllm(), sglang(), lmdeploy()
    return {
        "LMDeploy": ("lmdeploy", CHAIN, rs.lmdeploy_kernel_sampler, [tiles, launcher], reject, {
            FROM_P: [("tl.maximum(target_prob - draft_prob, 0.0)", "target_prob")],
            ONE_UNIFORM: [("uniform_probs_ptr + req_idx * draft_stride + pos",
                           "uniform_probs_ptr + req_idx * draft_stride")],
            NO_Q: [("target_prob / draft_prob >=", "target_prob >=")]}),
        "LMDeploy, torch": ("lmdeploy", CHAIN, rs.lmdeploy_torch_sampler, [plain], reject, {
            FROM_P: [("(target_probs - draft_probs).clamp_min_(0)", "target_probs")],
            NO_Q: [("target_draft_probs / draft_token_probs >=", "target_draft_probs >=")]}),
        "vLLM, runner V2": ("vllm", CHAIN, rs.vllm_runner_sampler, [runner], reject, {
            FROM_P: [("ratio < 1.0,", "ratio < 1e30,"),
                     ("target_log_probs + tldevice.log1p(-ratio)", "target_log_probs")],
            ONE_UNIFORM: [("step_seed, pos, includes_zero", "step_seed, pos*0, includes_zero")],
            NO_Q: [("tl.log(u) + draft_logprob", "tl.log(u)")]}),
        "vLLM, runner V2, block": (
            "vllm", BLOCK, partial(rs.vllm_runner_sampler, block=True), [runner], block, {
                FROM_P: [("ratio < 1.0,", "ratio < 1e30,"),
                         ("target_log_probs + tldevice.log1p(-ratio)", "target_log_probs")],
                PREFIX: [("tl.where(denom > 0.0, residual_mass / denom, 1.0)", "prefix_joint_ratio")]}),
        "vLLM, V1": ("vllm", CHAIN, rs.vllm_v1_sampler, [v1, sampling], reject, {
            FROM_P: [("tl.maximum(target_prob - draft_prob, 0.0)", "target_prob")],
            ONE_UNIFORM: [("uniform_probs_ptr + start_idx + pos", "uniform_probs_ptr + start_idx")],
            NO_Q: [("target_prob / draft_prob >=", "target_prob >=")]}),
        "SGLang, chain": ("sglang", CHAIN, rs.sglang_chain_sampler, [chain], reject, {
            FROM_P: [("residual_scale * p_val - q_val", "residual_scale * p_val")],
            ONE_UNIFORM: [("uni_ptr_base + (step - 1) * stride_uni_s", "uni_ptr_base")],
            "the first row for all places": [("cur_prob_row = step", "cur_prob_row = 0")]}),
        "SGLang, chain, block": (
            "sglang", BLOCK, partial(rs.sglang_chain_sampler, block=True), [chain], block, {
                FROM_P: [("residual_scale * p_val - q_val", "residual_scale * p_val")],
                PREFIX: [(BLOCK_MASS, "prefix_prob")]}),
        "SGLang, DSpark": ("sglang", CHAIN, rs.sglang_dspark_sampler, [dspark], reject, {
            FROM_P: [("ratio < 1.0, log_p + libdevice.log1p(-ratio)", "ratio < 1e30, log_p")],
            ONE_UNIFORM: [("(req * STRIDE + i).to(tl.int32)", "(req * STRIDE).to(tl.int32)")]})}

def mistaken(sampler, modules, changes):
    "The sampler of a changed module"
    other = rs.changed_module(modules[0], *changes)
    if hasattr(modules[0], "libdevice"): other.libdevice = modules[0].libdevice
    return sampler(other, *modules[1:])

def kernel_rows():
    "Each kernel, as released"
    calls = Interface(batch=BATCH)
    for name, (package, asked, sampler, modules, rule, _) in kernels().items():
        verify = sampler(*modules)
        names = name, released(package), asked
        where = "Triton's interpreter" if hasattr(verify, "one_by_one") else "torch"
        yield checked_row(names, verify, calls, rule, reason=f"released source in {where}")

def checked_row(names, verify, calls, rule, runs=RUNS, **more):
    "All cases with few calls, two with many; a difference is looked for again with another seed"
    few = en.sampler_checks(verify, calls, like=rule)
    kits = [few if few.differs else en.sampler_checks(verify, calls, runs, TWO, like=rule)]
    if kits[0].differs:
        kits.append(en.sampler_checks(verify, calls, runs, TWO, like=rule, seed=1))
        more["again"] = kits[1].differs
    return en.row_of_checks(kits[-1], *names, approximations=FLOAT32, robustness=robustness(few), **more)

def robustness(kit):
    "The checks of robustness that fail"
    return [name for name in ("rows", "zeros", "nan") if kit.finding(name).passes is False]

def interpreter_rows(n=128):
    "Are the tokens those of Triton's own interpreter, one program after another?"
    for name, (_, _, sampler, modules, *_) in kernels().items():
        calls, verify = Interface(batch=n), sampler(*modules)
        if not hasattr(verify, "one_by_one"): continue   # no Triton
        case = RowCase(CASES["different rows"], 4)
        given = calls.arguments(calls.drafts(case, n, 2, numpy_generator(0)))
        seeds = np.array(calls.noises(n, 0))
        together, alone = (f(*given, seeds) for f in (verify, verify.one_by_one))
        yield dict(engine=name, rows=n, equal=int((together == alone).all(1).sum()))

def own_draft_rows():
    "vLLM's drafter and verifier with the seeds of one request"
    (runner, noise, *_), what = vllm(), "drafts by the engine's own noise, verified with the same seed"
    names = "vLLM, runner V2", released("vllm"), what
    yield checked_row(names, rs.vllm_runner_sampler(runner), rs.vllm_drafts(noise), reject,
                      reason="released source in Triton's interpreter")

def tree_rows():
    "SGLang's Triton kernel of trees, with the target's token of each node sampled: the rule `match`"
    names = "SGLang, tree", released("sglang"), "match of a tree with sampled tokens (Triton)"
    calls = Interface("links", batch=BATCH)
    kit = en.sampler_checks(rs.sglang_tree_sampler(sglang()[1]), calls, 8000, TWO, like=match)
    yield en.row_of_checks(kit, *names, reason="released source in Triton's interpreter")

def transformers_rows():
    "transformers' rule, called for each draft"
    names = "transformers", released("transformers"), CHAIN
    yield checked_row(names, rs.transformers_sampler(), Interface(dtype="float32"), reject, 130_000)

def mlx_tables(k=0):
    "Two tables of four tokens: rows, and the target"
    tables = [random_table(4, seed + 2*k, zeros=False) for seed in (4, 7)]
    rows = [np.array([table.law((0, v)).astype(float) for v in range(4)]) for table in tables]
    return rows, TableModel(4, lambda text: rows[0][text[-1]])

def mlx_rows():
    "mlx-lm's loop on tables: texts of four tokens"
    rows, target = mlx_tables()
    found = certify_sampler(rs.mlx_sampler(*rows, 2), target, (0,), 4, runs=TEXTS)
    asked = "mlx-lm", released("mlx-lm"), "its loop on two tables, texts of four tokens"
    yield en.engine_row(*asked, "sampler", runs=TEXTS, verdict="no difference" if found.passes else "differs",
                        distance=found.distance_visible, approximations=FLOAT32,
                        witness=None if found.passes else found.words)


def exact_rows():
    "transformers' drafters with their whole output distribution, for networks of two seeds"
    once, again = (ee.enumerated(seed) for seed in SEEDS_EXACT)
    for name, (stated, off) in once.items():
        worst = max(off, again[name][1])
        witness = dict(reproduce="records/engines_exact.py: enumerated(seed)", seeds=SEEDS_EXACT,
                       output_off_by=[off, again[name][1]], stated_off_by=[stated, again[name][0]])
        if name.startswith("Gemma"): witness["our_loop_off_by"] = [*map(ee.imitated, SEEDS_EXACT)]
        verdict = "differs" if worst > 1e-5 else "no difference"
        yield en.engine_row("transformers", released("transformers"), name, "enumerated", alpha=None,
                            distance=1e-5, verdict=verdict, witness=witness if worst > 1e-5 else None)


# -- Planted mistakes, and right samplers with many seeds ---------------------------------------------

def transformers_mistakes():
    rule = rs.import_module("transformers.generation.utils")._speculative_sampling
    def lost(ids, q, n, p):   # the last token, recovered or bonus
        tokens, k = rule(ids, q, n, p)
        return tokens[:, :max(int(k), 1)], k
    def from_p(ids, q, n, p):   # after a rejection
        tokens, k = rule(ids, q, n, p)
        if k == n: return tokens, k
        return torch.cat([tokens[:, :k], torch.multinomial(p[0, k].softmax(-1), 1)[None]], 1), k
    return {"the last token is left out": rs.transformers_sampler(lost),
            "q stated at a temperature of 5": rs.transformers_sampler(stated=lambda q: q/5),
            "recovered token from p": rs.transformers_sampler(from_p)}

def short_runs():
    "(engine, right sampler, {mistake: sampler}, how it is called, rule, runs of the right and of wrong ones)"
    calls = Interface(batch=BATCH)
    for name, (_, _, sampler, modules, rule, mistakes) in kernels().items():
        wrong = {what: mistaken(sampler, modules, changes) for what, changes in mistakes.items()}
        yield name, sampler(*modules), wrong, calls, rule, (2000, 8000)
    calls = Interface(dtype="float32")
    yield "transformers", rs.transformers_sampler(), transformers_mistakes(), calls, reject, (300, 2500)

def mlx_short(seed, runs, loop=None):
    rows, target = mlx_tables()
    return certify_sampler(rs.mlx_sampler(*rows, 2, loop), target, (0,), 4, runs=runs, seed=seed).passes

def mlx_mistakes():
    module, rejected = rs.import_module("mlx_lm.generate"), "([*draft_tokens, tokens[-1]])[n]"
    always = [("if tn != dtn:", "if tn != dtn and n:")]
    returned = [("yield tokens[n], logprobs[n], False", f"yield {rejected}, logprobs[n], False"),
                ("y = mx.array([tokens[n]], mx.uint32)", f"y = mx.array([{rejected}], mx.uint32)")]
    return {"the first draft token is always accepted": rs.changed_module(module, *always),
            "a rejected draft token is returned": rs.changed_module(module, *returned)}

def convicted(verify, calls, rule, runs, seed):
    return bool(en.sampler_checks(verify, calls, runs, ONE, like=rule, seed=seed).differs_quickly)

def right_rows():
    "How many of the seeds convict a right sampler"
    for name, right, _, calls, rule, (runs, _) in short_runs():
        alarms = sum(convicted(right, calls, rule, runs, seed) for seed in range(SEEDS))
        yield dict(engine=name, runs=runs, seeds=SEEDS, alarms=alarms)
    alarms = sum(not mlx_short(seed, 300) for seed in range(SEEDS))
    yield dict(engine="mlx-lm", runs=300, seeds=SEEDS, alarms=alarms)

def planted_rows(seeds=10):
    "How many of the seeds convict a wrong sampler"
    for name, _, wrong, calls, rule, (_, runs) in short_runs():
        found = {what: sum(convicted(f, calls, rule, runs, seed) for seed in range(seeds))
                 for what, f in wrong.items()}
        yield dict(engine=name, runs=runs, seeds=seeds, convicted=found)
    (runner, noise, *_), what = vllm(), "draft and recovered token from one noise"
    shared = rs.vllm_runner_sampler(runner), rs.vllm_drafts(noise, salted=False), reject, RUNS
    yield dict(engine="vLLM, runner V2, its own drafts", runs=RUNS, seeds=3,
               convicted={what: sum(convicted(*shared, seed) for seed in range(3))})
    found = {what: sum(not mlx_short(seed, 1500, m.speculative_generate_step) for seed in range(seeds))
             for what, m in mlx_mistakes().items()}
    yield dict(engine="mlx-lm", runs=1500, seeds=seeds, convicted=found)


# -- Engines as black boxes ---------------------------------------------------------------------------

def starts():
    "Prompts in turn, of both kinds, each once"
    for k in count(): yield prompts(("english", "code")[k % 2], 1, seed=k)[0]

def texts_row(names, engine, tokens, seeded=True, small=0., n=64, each=1, prompts=starts, skip=0, **more):
    "Bets with one set of prompts, `each` asked so often; a difference is looked for again with other prompts"
    asked = (prompt for prompt in islice(prompts(), skip, None) for _ in range(each))
    found = bb.bet_on_texts(engine, asked, n, tokens, seeded, small=small, seed=skip)
    if found.over:
        later = islice(prompts(), skip + 10_000, None)
        again = bb.bet_on_texts(engine, later, n, tokens, seeded)
        more["again"] = again.words
        if not again.over: found = again
    return en.row_of_bets(found, *names, **dict(approximations=FLOAT32) | more)

def identity_row(names, engine, plain, texts=40, n=48):
    "Temperature 0: how many texts are those of plain decoding"
    same, first = 0, None
    for k, prompt in zip(range(texts), starts()):
        a, b = ([*map(int, e.generate(prompt, n, k))] for e in (engine, plain))
        same += a == b
        if a != b and first is None: first = dict(prompt=[*map(int, prompt)], engine=a, plain=b)
    verdict = "same texts as plain decoding" if same == texts else "other texts"
    return en.engine_row(*names, "black box", runs=texts, alpha=None, equal_texts=same, verdict=verdict,
                         witness=first)

COLD = dict(do_sample=False, temperature=None, top_p=None, top_k=None)
PAIR, AS_DOCUMENTED = dict(target="large", draft="small"), "the weight mixes target and draft, as documented"

def listed_by_id(tok):
    "A tokenizer whose `get_vocab` lists its tokens by id"
    vocab, out = dict(sorted(tok.get_vocab().items(), key=lambda kv: kv[1])), copy(tok)
    out.get_vocab = lambda: vocab
    return out

def other_tokenizer(listed=lambda tok: tok):
    "A fresh draft model with another tokenizer: transformers changes it"
    second = rs.import_module("specref.draft.vocab")
    return dict(assistant_model=deepcopy(second.second_module()), tokenizer=listed(tokenizer()),
                assistant_tokenizer=listed(second.second_tokenizer()))

def transformers_cases():
    "{what is asked: (engine, tokens, options of `texts_row`)}"
    make = bb.transformers_engine
    eos = tokenizer().convert_tokens_to_ids(END_TEXT)
    cut = dict(temperature=.7, top_k=20, top_p=.9)
    return {
        "assistant model, no seed": (make(**PAIR), 4_000, dict(seeded=False)),
        "assistant model, a target of 24 layers": (make("target", "small"), 4_000, {}),
        "assistant model, temperature .7, top-k 20, top-p .9": (make(**PAIR, **cut), 4_000, {}),
        "prompt lookup": (make("large", prompt_lookup_num_tokens=4), 4_000, {}),
        "early exit after one layer": (make("large", assistant_early_exit=1), 4_000, {}),
        "assistant model with another tokenizer": (make("large", **other_tokenizer()), 4_000, {}),
        "assistant model with another tokenizer, both listed by id": (
            make("large", **other_tokenizer(listed_by_id)), 4_000, {}),
        "assistant model, end-of-text token": (make(**PAIR, stop=(eos,)), 4_000, dict(n=128)),
        "assistant model, ensemble weight .5": (
            make(**PAIR, assistant_ensemble_weight=.5), 8_000,
            dict(approximations=AS_DOCUMENTED, by_design=True))}

def transformers_long_rows():
    asked = "transformers", released("transformers"), "assistant model"
    yield texts_row(asked, bb.transformers_engine(**PAIR), 60_000, small=.02)

def transformers_text_rows():
    names, make = ("transformers", released("transformers")), bb.transformers_engine
    for asked, (engine, tokens, how) in transformers_cases().items():
        yield texts_row((*names, asked), engine, tokens, **how)
    cold = make(**PAIR, **COLD), make("large", **COLD)
    yield identity_row((*names, "assistant model, temperature 0"), *cold)
    yield refused_row((*names, "assistant model, two texts at once"), two_texts_of_transformers)

@cache
def whole_checkpoint(name):
    "A shipped model as a checkpoint with the tokenizer's files, for engines that export it"
    raw_model(name).save_pretrained(FOLDER/name)
    shutil.copytree(DATA/"tokenizer", FOLDER/name, dirs_exist_ok=True)
    return FOLDER/name

@cache
def onnx_models():
    "The large and the small model for onnxruntime-genai, and a folder with one as the draft of the other"
    from peers import put_head_last
    for name in ("large", "small"):
        whole_checkpoint(name)
        build = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
        build += ["-i", FOLDER/name, "-o", FOLDER/f"onnx-{name}"]
        subprocess.run(build, check=True, capture_output=True)
        put_head_last(FOLDER/f"onnx-{name}"/"model.onnx")
    shutil.copytree(FOLDER/"onnx-large", FOLDER/"onnx-pair", dirs_exist_ok=True)
    files = [FOLDER/f"onnx-{name}"/"genai_config.json" for name in ("pair", "small")]
    config, draft = (json.loads(file.read_text()) for file in files)
    config["model"]["draft"] = draft["model"]["decoder"] | dict(filename="../onnx-small/model.onnx")
    for side in "decoder", "draft": config["model"][side]["session_options"]["intra_op_num_threads"] = 1
    files[0].write_text(json.dumps(config | dict(speculative=dict(max_draft_tokens=4))))
    return FOLDER/"onnx-pair", FOLDER/"onnx-large"

NUCLEUS = ("asked with top-k 511 of 512: with top-k 0 its plain decoding, too, returns tokens outside "
           f"the nucleus; {FLOAT32}")

def onnx_text_rows():
    (pair, alone), make = onnx_models(), partial(bb.onnx_engine, stop=(0,))
    lookup = dict(ngram_size=3, max_draft_tokens=4)
    cases = {"draft model": (make(pair), 90_000, dict(small=.02)),
             "draft model, no seed": (make(pair), 10_000, dict(seeded=False)),
             "draft model, top-k 20": (make(pair, top_k=20), 10_000, {}),
             "draft model, top-p .9": (make(pair, top_p=.9, top_k=511), 10_000, dict(approximations=NUCLEUS)),
             "draft model, temperature .7": (make(pair, temperature=.7), 10_000, {}),
             "lookup of n-grams": (make(alone, lookup=lookup), 90_000, dict(small=.02))}
    names = "onnxruntime-genai", released("onnxruntime-genai")
    for asked, (engine, tokens, how) in cases.items(): yield texts_row((*names, asked), engine, tokens, **how)
    cold = make(pair, do_sample=False), bb.transformers_engine("large", stop=(0,), **COLD)
    yield identity_row((*names, "draft model, temperature 0"), *cold)
    yield refused_row((*names, "draft model, two texts at once"), partial(two_texts_of_onnx, pair))

@cache
def checkpoints():
    "The models as checkpoints, for mlx-lm"
    for name in ("target", "large", "small"): raw_model(name).save_pretrained(FOLDER/name)
    return FOLDER

def mlx_text_rows():
    make, names = partial(bb.mlx_engine, checkpoints(), "large"), ("mlx-lm", released("mlx-lm"))
    cases = {"draft model": (make(), 60_000, dict(small=.02)),
             "draft model, no seed": (make(), 1_000, dict(seeded=False)),
             "draft model, top-p .9": (make(top_p=.9), 1_000, {}),
             "draft model, top-k 20": (make(top_k=20), 1_000, {})}
    for asked, (engine, tokens, how) in cases.items(): yield texts_row((*names, asked), engine, tokens, **how)
    plain = bb.transformers_engine("large", **COLD)
    yield identity_row((*names, "draft model, temperature 0"), make(temp=0.), plain, 20)


# -- OpenVINO GenAI -----------------------------------------------------------------------------------

@cache
def openvino_models():
    "The large and the small model as OpenVINO's, by its exporter, which has an environment of its own"
    export = [SOURCES.parent/"exporter"/"bin"/"optimum-cli", "export", "openvino", "--weight-format", "fp32",
              "--task", "text-generation-with-past"]
    for name in ("large", "small"):
        named = "--model", whole_checkpoint(name), FOLDER/"openvino"/name
        subprocess.run([*export, *named], check=True, capture_output=True)
    return FOLDER/"openvino"

SEED_0 = "a request without a seed has the seed 0, its default, so texts share their random numbers"

def openvino_text_rows():
    make, names = partial(bb.openvino_engine, openvino_models(), stop=(0,)), openvino_names()
    drafted, ngrams = dict(draft="small"), dict(lookup=dict(max_ngram_size=2))
    cut = dict(temperature=.7, top_k=20, top_p=.9)
    cases = {"plain": ({}, 10_000, {}), "draft model": (drafted, 4_000, {}),
             "draft model, temperature .7, top-k 20, top-p .9": (drafted | cut, 4_000, {}),
             "prompt lookup, temperature .7, top-k 20, top-p .9": (ngrams | cut, 4_000, {}),
             "prompt lookup, no seed": (ngrams, 4_000, dict(seeded=False, by_design=True,
                                                            approximations=SEED_0))}
    for asked, (how, tokens, more) in cases.items():
        yield texts_row((*names, asked), make(**how), tokens, **more)
    plain = bb.transformers_engine("large", stop=(0,), **COLD)
    for asked, how in {"draft model": drafted, "prompt lookup": ngrams}.items():
        yield identity_row((*names, f"{asked}, temperature 0"), make(do_sample=False, **how), plain)

def openvino_long_rows():
    engine = bb.openvino_engine(openvino_models(), stop=(0,), lookup=dict(max_ngram_size=2))
    yield texts_row((*openvino_names(), "prompt lookup"), engine, 90_000, small=.02)

def openvino_names(): return "openvino-genai", released("openvino-genai")

OPENVINO_RULE = """
def rule(p, q, draft, u):
    for i, x in enumerate(draft):
        y = choose(p[i], u)                       # the target's own token
        if u() < q[i][x] / p[i][y]: continue      # its probability, and the draft token's under q
        return [*draft[:i], choose(p[i + 1], u)]  # from the row after the rejected token
    return [*draft, choose(p[-1], u)]
"""

@torch.inference_mode()
def last_rows(name, texts):  # -> (n, V)
    "The row of a model after each text"
    return raw_model(name)(input_ids=torch.tensor(texts)).logits[:, -1].double().softmax(-1).numpy()

def emitted_by_rule(text):  # -> rows of the target, of the draft, and what the rule emits
    "Of the token after a text of the large model, by OPENVINO_RULE"
    (p,), (q,) = last_rows("large", [text]), last_rows("small", [text])
    after = last_rows("large", [[*text, x] for x in range(len(p))])
    steps = (np.floor(100*q[:, None]/p) + 1)/101   # its uniform numbers are 0, .01, ..., 1
    accepted = np.minimum(1, steps) @ p
    return p, q, q*accepted + (q*(1 - accepted)) @ after

def openvino_rule(runs=2000):
    "Is that what it does? The token after a prompt and a first token, against the target and the rule"
    engine, start = bb.openvino_engine(openvino_models(), draft="small"), prompts("code", 1, seed=3)[0]
    texts = [engine.generate(start, 8, seed)[:2] for seed in range(runs)]
    heads = [text[0] for text in texts]
    first = max({*heads}, key=heads.count)
    p, q, stated = emitted_by_rule([*start, first])
    seen = np.bincount([y for x, y in texts if x == first], minlength=len(p))
    found = {name: p_value(seen, row) for name, row in dict(target=p, rule=stated).items()}
    name, release = openvino_names()
    return dict(engine=name, version=release, rule=OPENVINO_RULE.strip(), runs=int(seen.sum()),
                p_values=found, distance=tv(stated, p), distance_of_draft=tv(q, p),
                judged=str(judge_rule(OPENVINO_RULE, name="rule")))

def p_value(seen, row, least=20):
    "Of the chi-square test, cells of at least `least` expected tokens"
    order, cells, n = np.argsort(-row), [[0, 0.]], seen.sum()
    for x in order:
        if cells[-1][1] >= least: cells.append([0, 0.])
        cells[-1] = [cells[-1][0] + seen[x], cells[-1][1] + n*row[x]]
    if cells[-1][1] < least: cells[-2:] = [np.sum(cells[-2:], 0)]
    got, want = np.array(cells).T
    return float(chi2.sf(((got - want)**2/want).sum(), len(cells) - 1))


# -- llama.cpp ----------------------------------------------------------------------------------------

LLAMA = "llama.cpp"
SMALL = dict(drafter="small", kind="DRAFT_SIMPLE")
SAMPLED = SMALL | dict(draft=dict(probabilistic=True))   # the draft's tokens are sampled, and q is used
LOOKUPS = {   # shorter n-grams than usual, for short texts
    "lookup, simple": dict(kind="NGRAM_SIMPLE", ngram_simple=dict(size_n=2, size_m=4)),
    "lookup, map": dict(kind="NGRAM_MAP_K", ngram_map_k=dict(size_n=2, size_m=4)),
    "lookup, map with values": dict(kind="NGRAM_MAP_K4V", ngram_map_k4v=dict(size_n=2, size_m=4)),
    "lookup, hashed": dict(kind="NGRAM_MOD", ngram_mod=dict(n_match=3, n_min=1, n_max=4)),
    "lookup, cache": dict(kind="NGRAM_CACHE")}
TRAINED_DRAFTERS = {   # our name: how the engine is told, and the draft tokens of a round
    "eagle3": (dict(drafter="eagle3", kind="DRAFT_EAGLE3"), 4),
    "dflash": (dict(drafter="dflash", kind="DRAFT_DFLASH", draft=dict(n_max=7)), 7),
    "dspark": (dict(drafter="dspark", kind="DRAFT_DSPARK", draft=dict(n_max=7)), 7)}

@cache
def llama_names(): return LLAMA, f"xllamacpp {released('xllamacpp')}"

@cache
def llama_files():
    "Targets and drafters in its format"
    for name in ("target", "large", "small", *TRAINED_DRAFTERS):
        shutil.rmtree(FOLDER/"llama"/name, ignore_errors=True)
        convert(name, "gguf", FOLDER/"llama"/name)
    return FOLDER/"llama"

def its_rows(server, prompt, n):  # -> tokens, (n, V) log-probabilities
    "The server's own rows along a text that it samples"
    reply = bb.ask_llama(server, prompt, n, n_probs=tokenizer().vocab_size, seed=0, ignore_eos=True)
    rows = [{x["id"]: x["logprob"] for x in one["top_logprobs"]} for one in reply["completion_probabilities"]]
    return reply["tokens"], np.array([[row[x] for x in range(len(row))] for row in rows])

def off_by(name, texts=10, **how):  # -> largest difference of log-probabilities, largest distance of rows
    "How far the server's rows are from ours"
    server, off = bb.llama_server(llama_files(), name, **how), []
    for _, prompt in zip(range(texts), starts()):
        new, z = its_rows(server, prompt, 50)
        ids = torch.tensor([[*prompt, *new]])
        with torch.inference_mode(): logits = raw_model(name)(input_ids=ids).logits
        ours = logits[0, len(prompt)-1:-1].double().log_softmax(-1).numpy()
        off.append((abs(z - ours).max(), abs(np.exp(z) - np.exp(ours)).sum(1).max()/2))
    return [float(max(x)) for x in zip(*off)]

def llama_row_rows(limit=1e-5):
    "Are its rows ours?"
    cases = {"float32 caches, no flash attention": {},
             "float32 caches, flash attention": dict(flash="ENABLED"),
             "its usual settings": dict(cache="F16", flash="AUTO")}
    for asked, how in cases.items():
        logs, distance = map(max, zip(*(off_by(name, **how) for name in ("large", "target"))))
        same = distance <= limit
        yield en.engine_row(
            *llama_names(), f"rows: {asked}", "enumerated", runs=1000, alpha=None, distance=limit,
            verdict="no difference" if same else "differs", by_design=not same, off_by=distance,
            witness=None if same else f"rows differ by up to {distance:.1e}, log-probabilities by {logs:.1e}",
            approximations=f"rounding: rows differ by up to {distance:.0e}")

def likely_enough(logits, text):
    "min-p .1"
    p = warp(logits)
    return normalize(np.where(p < .1*p.max(), 0, p))

PENALTIES = dict(repeat_penalty=1.2, frequency_penalty=.1, presence_penalty=.3, repeat_last_n=64)

def penalised(logits, text):
    "A token of the last 64 is less likely: three penalties"
    seen = np.bincount(text[-64:], minlength=len(logits))
    z = np.where(seen, np.where(logits > 0, logits/1.2, logits*1.2), logits)
    return warp(z - .1*seen - .3*(seen > 0))

PLAIN_LETTERS = "abcdefghijklmnopqrstuvwxyz ,."

@cache
def written_plainly():  # -> (V,)
    "The tokens that the grammar allows anywhere; the end token is one"
    words = [tokenizer().decode([x]) for x in range(tokenizer().vocab_size)]
    plain = np.array([bool(word) and {*word} <= {*PLAIN_LETTERS} for word in words])
    plain[tokenizer().convert_tokens_to_ids(END_TEXT)] = True
    return plain

def in_grammar(logits, text): return warp(np.where(written_plainly(), logits, -np.inf))

ASKED = {   # beside temperature 1
    "temperature .7": dict(temperature=.7), "top-k 20": dict(top_k=20), "top-p .9": dict(top_p=.9),
    "temperature .7, top-k 20, top-p .9": dict(temperature=.7, top_k=20, top_p=.9),
    "min-p .1": dict(warped=likely_enough, min_p=.1), "penalties": dict(warped=penalised, **PENALTIES),
    "a grammar": dict(warped=in_grammar, grammar="root ::= [a-z ,.]*"), "four texts at once": dict(slots=4)}

def llama_cases():
    "{what is asked: (options of the engine, tokens, options of `texts_row`)}"
    sampled = "draft model, sampled"
    cases = {"draft model": (dict(server=SMALL), 5000, {}),
             "draft model, penalties": (dict(server=SMALL, **ASKED["penalties"]), 5000, {}),
             "draft model, a grammar": (dict(server=SMALL, **ASKED["a grammar"]), 5000, {}),
             f"{sampled}, no seed": (dict(server=SAMPLED), 5000, dict(seeded=False)),
             f"{sampled}, p_min .5": (
                 dict(server=SMALL | dict(draft=dict(probabilistic=True, p_min=.5))), 12_000, {}),
             f"{sampled}, prompt cache": (dict(server=SAMPLED, cache_prompt=True), 5000, dict(each=5))}
    cases |= {f"{sampled}, {what}": (dict(server=SAMPLED, **how), 5000, {}) for what, how in ASKED.items()}
    cases |= {what: (dict(server=how), 5000, {}) for what, how in LOOKUPS.items()}
    return cases | {f"trained drafter, {name}": (dict(target="target", server=how), 4000, {})
                    for name, (how, _) in TRAINED_DRAFTERS.items()}

def llama_row(asked, how, tokens, more):
    "The row of some texts, with the draft tokens of all of them"
    replies = []
    engine = bb.llama_engine(llama_files(), watch=replies.append, **how)
    row = texts_row((*llama_names(), asked), engine, tokens, **more)
    return row | {key: sum(reply["timings"].get(name, 0) for reply in replies)
                  for key, name in dict(drafted="draft_n", accepted="draft_n_accepted").items()}

def llama_text_rows():
    for asked, case in llama_cases().items(): yield llama_row(asked, *case)

def llama_long_rows():
    for asked, server in {"plain": {}, "draft model, sampled": SAMPLED}.items():
        yield llama_row(asked, dict(server=server), 90_000, dict(small=.02))

def llama_identity_rows():
    "Temperature 0; and temperature 1 with the seeds of plain decoding, where drafts are only compared"
    make, cold = partial(bb.llama_engine, llama_files()), dict(temperature=0.)
    plain = {name: make(name, **cold) for name in ("large", "target")}
    ways = {"draft model": ("large", SMALL), "draft model, sampled": ("large", SAMPLED)}
    ways |= {what: ("large", how) for what, how in LOOKUPS.items()}
    ways |= {f"trained drafter, {name}": ("target", how) for name, (how, _) in TRAINED_DRAFTERS.items()}
    names = *llama_names(), "plain, temperature 0, and transformers' generate"
    yield identity_row(names, plain["large"], bb.transformers_engine("large", stop=(0,), **COLD))
    for what, (name, how) in ways.items():
        names = *llama_names(), f"{what}, temperature 0"
        yield identity_row(names, make(name, server=how, **cold), plain[name])
        if how is SAMPLED: continue   # its random numbers are used for drafts, too
        names = *llama_names(), f"{what}, temperature 1, the seed of plain decoding"
        yield identity_row(names, make(name, server=how), make(name))


# -- Our drafters in engines --------------------------------------------------------------------------

def our_rounds(name, gamma, starts, n):  # -> texts, rounds of each
    "Texts of `n` tokens at temperature 0, each after a prompt and a first token"
    made = load_drafter(name)
    target = made.target(temperature=0)
    drafter = Chain(made.draft(target), gamma)
    found = [generate(target, drafter, match, ctx, n, Seeded(0), stop=(0,)) for ctx in starts]
    return [[*text.tokens] for text in found], [text.ledger.num_rounds for text in found]

def their_rounds(how, asked, n, folder=None):  # -> texts, rounds of each
    "The same of llama.cpp, whose first token is that of the pass over the prompt"
    server = bb.llama_server(folder or llama_files(), "target", **how)
    replies = [bb.ask_llama(server, prompt, n, temperature=0) for prompt in asked]
    rounds = [len(x["tokens"]) - 1 - x["timings"].get("draft_n_accepted", 0) for x in replies]
    return [x["tokens"] for x in replies], rounds

def rows_in_another_order(name):
    "A folder with the drafter whose queries and keys are in the order of another architecture"
    net, folder = load_drafter(name).net, FOLDER/"llama-order"
    shutil.rmtree(folder, ignore_errors=True)
    form = GGUF_FORMS[type(net)]
    wrong = replace(form, turns_neighbours=not form.turns_neighbours)
    with mock.patch.dict(GGUF_FORMS, {type(net): wrong}): convert(name, "gguf", folder/name)
    shutil.copytree(llama_files()/"target", folder/"target")
    return folder

def llama_served(name, texts=10, n=48):
    "The row of a drafter: does it load, are texts and rounds the same?"
    how, gamma = TRAINED_DRAFTERS[name]
    asked = [prompt for _, prompt in zip(range(texts), starts())]
    plain, _ = their_rounds({}, asked, n)
    drafted, there = their_rounds(how, asked, n)
    ours, here = our_rounds(name, gamma, [(*prompt, new[0]) for prompt, new in zip(asked, plain)], n - 1)
    _, planted = their_rounds(how, asked, n, rows_in_another_order(name))
    return dict(engine=LLAMA, version=llama_names()[1], drafter=name, layout="gguf", gamma=gamma, texts=texts,
                same_texts=sum(map(list.__eq__, drafted, plain)), tokens=sum(map(len, ours)),
                our_texts=sum(a[1:] == b for a, b in zip(drafted, ours)), rounds_there=there,
                rounds_here=here, rounds_in_another_order=planted)

def served_rows():
    for name in TRAINED_DRAFTERS: yield llama_served(name)


# -- Black boxes with planted mistakes, and right ones with many seeds --------------------------------

def llama_mistakes():
    "{mistake: engine}: what it does is not what is stated, or its random numbers return"
    make = partial(bb.llama_engine, llama_files(), server=SAMPLED)
    plain, swapped = bb.llama_engine(llama_files()), ["top_p", "temperature"]
    def repeated(prompt, n, seed): return plain.generate(prompt, n, 0)
    return {"temperature .8 instead of 1": replace(make(temperature=.8), warped={}),
            "top-k 10, not stated": replace(make(top_k=10), warped={}),
            "penalties, not stated": make(**PENALTIES),
            "top-p before the temperature": make(temperature=.5, top_p=.8, samplers=swapped),
            "texts of the draft model": replace(bb.llama_engine(llama_files(), "small"), target="large"),
            "one seed for all texts": replace(plain, generate=repeated)}

def convicts(engine, tokens, seed):
    "Is a difference found in texts of its own for this seed?"
    asked = prompts(("english", "code")[seed % 2], -(-tokens//64), seed=1000 + seed)
    return bb.bet_on_texts(engine, asked, 64, tokens, seed=10_000*seed).over

def planted_text_rows(seeds=10, tokens=12_000):
    "How many of the seeds convict an engine with a mistake"
    found = {what: sum(convicts(engine, tokens, seed) for seed in range(seeds))
             for what, engine in llama_mistakes().items()}
    yield dict(engine=LLAMA, version=llama_names()[1], runs=tokens, seeds=seeds, convicted=found)

def right_text_rows(tokens=320):
    "How many of the seeds convict an engine without one"
    engine = bb.llama_engine(llama_files(), server=SAMPLED)
    alarms = sum(convicts(engine, tokens, seed) for seed in range(SEEDS))
    yield dict(engine=LLAMA, version=llama_names()[1], runs=tokens, seeds=SEEDS, alarms=alarms)



# -- What was not run ---------------------------------------------------------------------------------

GPU = "a CUDA kernel: no GPU here"
NOT_RUN = {   # engine, version on the day of the record, what would be asked: the reason
    ("SGLang, tree", "0.5.23", "target-only sampling of a tree (CUDA)"): GPU,
    ("FlashInfer", "0.7.4", "chain_speculative_sampling"): GPU,
    ("TensorRT-LLM", "1.2.1", "rejection of chains and trees"): "its release was not to be had; CUDA kernels",
    ("vLLM Ascend", "0.23.0.post1", "rejection of chains"): "its source release does not build here",
    ("exllamav3", "1.6.5", "draft model"): "its import compiles CUDA kernels, and stops here",
    ("LMDeploy, engine", "0.18.0", "draft model"): "its devices are cuda, ascend, maca and camb: no CPU",
    ("SGLang, engine", "0.5.23", "draft model"): "no package has its kernels for CPUs (sgl-kernel-cpu)",
    ("mistralrs", "0.9.5", "draft model"): "installed; its Python interface has no draft model, only heads",
    ("CTranslate2", "4.8.5", "draft model"): "installed; its generators have no draft"}

def not_run_rows():
    for names, why in NOT_RUN.items():
        yield en.engine_row(*names, None, verdict="not run", reason=why, alpha=None)

def refused_row(names, ask):
    "Two texts at once, refused: the reason in the engine's own words"
    try: ask()
    except (ValueError, RuntimeError) as e:
        if "batch" not in str(e): raise
        why = f"refused: {e}".split(". ")[0][:160]
    else: raise AssertionError(f"{names}: it is no longer refused, and can be tested")
    return en.engine_row(*names, "black box", verdict="not run", reason=why, alpha=None)

def two_texts_of_transformers():
    ids = torch.tensor(prompts("code", 2))
    how = dict(max_new_tokens=8, assistant_model=generation_view("small"))
    generation_view("large").generate(ids, attention_mask=torch.ones_like(ids), **how)

def two_texts_of_onnx(folder):
    genai = rs.import_module("onnxruntime_genai")
    model = genai.Model(str(folder))
    params = genai.GeneratorParams(model)
    params.set_search_options(batch_size=2, max_length=40)
    genai.Generator(model, params)


PARTS = dict(kernels=kernel_rows, own_drafts=own_draft_rows, trees=tree_rows, exact=exact_rows,
             transformers=transformers_rows, mlx=mlx_rows, transformers_texts=transformers_text_rows,
             transformers_long=transformers_long_rows, onnx_texts=onnx_text_rows, mlx_texts=mlx_text_rows,
             openvino_texts=openvino_text_rows, openvino_long=openvino_long_rows,
             llama_rows=llama_row_rows, llama_texts=llama_text_rows, llama_long=llama_long_rows,
             llama_identity=llama_identity_rows, not_run=not_run_rows)


# -- Reported bugs ------------------------------------------------------------------------------------

def issue(engine, still, how): return dict(engine=engine, version=released(engine), still=still, how=how)

def reported():
    "{issue: does the release of the record still have it?}"
    once, rows = ee.enumerated(0), json.loads(RECORD.read_text())["rows"]
    own_drafts, = (row for row in rows if row["part"] == "own_drafts")
    exact = "exact output and stated distributions of a random network (records/engines_exact.py)"
    def wrong(*names): return any(max(x or 0 for x in once[name]) > 1e-5 for name in names)
    return {
        "huggingface/transformers#32867": issue("transformers", wrong("assistant model"), exact),
        "huggingface/transformers#47932": issue(
            "transformers", wrong("DFlash block", "multi-token heads"), exact),
        "huggingface/transformers#49036": issue("transformers", *ee.recurrent()),
        "huggingface/transformers: Gemma 4's assistant": issue(
            "transformers", wrong("Gemma 4's assistant"), f"{exact}; the network is a stand-in"),
        "huggingface/transformers: vocabulary not listed by id": issue(
            "transformers", wrong("two tokenizers, listed backwards"), exact),
        "vllm-project/vllm#47386": issue("vllm", own_drafts["verdict"] == "differs", OWN_DRAFTS),
        "vllm-project/vllm#54282": issue("vllm", own_drafts["verdict"] == "differs", OWN_DRAFTS),
        "vllm-project/vllm#40149": issue("vllm", None, "it is in the engine, not in its kernels"),
        "sgl-project/sglang#35771": issue("sglang", *zero_coins())}

OWN_DRAFTS = "the released drafter and verifier with the seed of one request, in Triton's interpreter"

def zero_coins():
    "The kernel of chains at uniform numbers of 0, where no draft token is possible; that of trees by reading"
    verify, calls = rs.sglang_chain_sampler(sglang()[0]), Interface(batch=64)
    case = RowCase(CASES["nothing in common"], 4)
    given = calls.arguments(calls.drafts(case, 64, 2, numpy_generator(0)))
    with mock.patch.object(np.random, "default_rng", lambda seed: SimpleNamespace(random=np.zeros)):
        y = verify(*given, np.arange(64))
    found = bool((given[0][:, 0][np.arange(64), y[:, 0]] == 0).any())
    return found, ("the kernel of chains was run at uniform numbers of 0; of the CUDA kernel of trees the "
                   "source was read: it asks for a positive probability and compares with <")


LISTS = dict(interpreter=lambda: [*interpreter_rows()], right=lambda: [*right_rows()],
             planted=lambda: [*planted_rows()], reported=reported, served=lambda: [*served_rows()],
             right_texts=lambda: [*right_text_rows()], planted_texts=lambda: [*planted_text_rows()],
             openvino_rule=openvino_rule)

# of many tokens, or of many seeds
LONG = "transformers_long", "openvino_long", "llama_long", "right", "right_texts", "planted", "planted_texts"

def chosen(names, parts, long=LONG):  # -> names of parts
    "Those named; without names all that are not long; with `all` all"
    wrong = {*names} - {*parts, "all"}
    if wrong: raise SystemExit(f"PART: got {', '.join(wrong)}, wanted some of {', '.join(parts)}")
    return [*parts] if "all" in names else names or [part for part in parts if part not in long]

def main(names, rows=PARTS, lists=LISTS):
    "Make parts of the record anew, see `chosen`, and note how long each took"
    quiet()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    own = rows is PARTS
    for part in chosen(names, rows | lists):
        start = perf_counter()
        if part in lists:
            found = lists[part]()
            update(lambda record: {part: merged(record.get(part), found)}, own)
        else: make_rows(part, rows[part], own)
        took = {part if own else f"vLLM, {part}": round(perf_counter() - start)}
        update(lambda record: dict(seconds=record.get("seconds", {}) | took), own)
        print(took, flush=True)

def make_rows(part, make, own):
    "The rows of a part, in place of those that are recorded"
    update(lambda record: dict(rows=[row for row in record["rows"] if row["part"] != part]), own)
    for row in make():
        update(lambda record: dict(rows=[*record["rows"], dict(part=part) | row]), own)
        print(row, flush=True)

def merged(old, new):
    "What was found, beside what another run found of other engines or reports"
    if isinstance(new, dict): return (old or {}) | new
    engines = {x["engine"] for x in new}
    return [*(x for x in old or [] if x["engine"] not in engines), *new]

def update(change, anew=True):
    "A change of the record as it is now; other environments leave the versions of this one in it"
    record = json.loads(RECORD.read_text()) if RECORD.exists() else dict(rows=[])
    if not anew: return write_json(RECORD, record | change(record))
    made = dict.fromkeys((*provenance_of_run(""), "threads", "alpha"))
    old = {key: x for key, x in record.items() if key not in made}
    write_record(RECORD, "make engines", dict(threads=1, alpha=ALPHA) | old | change(record))

if __name__ == "__main__": main(sys.argv[2:])
