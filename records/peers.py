"""Tokens a second of the embedded target in other libraries that run on a CPU: `make peers`

Every contestant decodes the same prompts in turn, at temperature 0 and where it can at 1, on one thread. What
llama.cpp's server takes is what its own clock says, without the exchange of messages."""
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from unittest import mock

import mlx.core as mx
import numpy as np
import onnx
import onnxruntime_genai as ort
import torch
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.utils import load_model

from specref.app.benchmarks import CONSTANT, quiet, transformers_generate
from specref.app.tour import CONTESTANTS, KINDS, decode_cold
from specref.certify.black_boxes import ask_llama, llama_server
from specref.core.check import write_record
from specref.core.loop import autoregressive
from specref.core.rng import Seeded
from specref.models.compiled import serve_model
from specref.models.embedded import DATA, raw_model
from specref.models.recipe import llama
from specref.train import checkpoints
from specref.train.checkpoints import convert, to_gguf

from passes import SHAPES

GAMMA = CONSTANT["num_assistant_tokens"]
NGRAMS = dict(size_n=2, size_m=4)   # shorter ones than usual, for short texts
TRAINED = dict(eagle3="DRAFT_EAGLE3", dflash="DRAFT_DFLASH", dspark="DRAFT_DSPARK")   # llama.cpp's names
LLAMA = {   # of llama.cpp: options of its server; all lengths are ours
    "plain": {}, "plain, float16": dict(files="half"),
    "draft model": dict(drafter="small", kind="DRAFT_SIMPLE"),
    "draft model, sampled": dict(drafter="small", kind="DRAFT_SIMPLE", draft=dict(probabilistic=True)),
    "n-grams, simple": dict(kind="NGRAM_SIMPLE", ngram_simple=NGRAMS),
    "n-grams, map": dict(kind="NGRAM_MAP_K", ngram_map_k=NGRAMS)}
LLAMA |= {name: dict(drafter=name, kind=kind, draft=dict(n_max=GAMMA)) for name, kind in TRAINED.items()}
OURS = {"plain": ("autoregressive", ""), "speculative sampling": ("speculative sampling", "small"),
        "speculative sampling, larger draft": ("speculative sampling", "large"),
        "goodput length": ("goodput", "small"), "block verification": ("block verification", "small"),
        "prompt lookup": ("prompt lookup", ""), "SuffixDecoding": ("SuffixDecoding", ""),
        "EAGLE-3": ("EAGLE-3", ""), "DFlash": ("DFlash", ""), "DSpark": ("DSpark", "")}


def exported(folder):
    "The embedded target and its small draft as checkpoints, and the target for onnxruntime-genai"
    for name in ("target", "small"): raw_model(name).save_pretrained(folder/name)
    shutil.copytree(DATA/"tokenizer", folder/"target", dirs_exist_ok=True)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    subprocess.run([*builder, "-i", folder/"target", "-o", folder/"onnx"], check=True, capture_output=True)
    put_head_last(folder/"onnx"/"model.onnx")
    path = folder/"onnx"/"genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = 1
    path.write_text(json.dumps(config))

def halved(net, form, own=checkpoints.gguf_weights):
    "Matrices in float16, which holds the weights of the embedded target exactly"
    return {name: w.half() if w.ndim == 2 else w for name, w in own(net, form).items()}

def llama_files(folder):
    "Targets and drafters in llama.cpp's format"
    for name in ("target", "small", *TRAINED): convert(name, "gguf", folder/"whole"/name)
    with mock.patch.object(checkpoints, "gguf_weights", halved):
        convert("target", "gguf", folder/"half"/"target")
    return folder

def put_head_last(path):
    "The head reads the last norm: the builder takes the first map with V outputs for it, here that of an MLP"
    model = onnx.load(path, load_external_data=False)
    head, = (node for node in model.graph.node if node.name == "/lm_head/MatMul")
    last, = (node for node in model.graph.node if "final_norm" in node.name)
    head.input[0] = last.output[0]
    model.graph.node.remove(head)
    model.graph.node.append(head)
    onnx.save(model, path)


# A contestant: (prompt, n, temperature) -> tokens, or None where they are not compared; or tokens and seconds

def ours(recipe, draft, prompt, n, temperature):
    one, = (one for one in CONTESTANTS if (one.recipe, one.draft) == (recipe, draft))
    return [*decode_cold(one, temperature, prompt, n, 0).text]

def transformers_run(draft, options, prompt, n, temperature):
    transformers_generate(draft, options, temperature, prompt, n, 0)

def mlx_plain(model, prompt, n, temperature):
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=n)]

def mlx_speculative(model, draft, prompt, n, temperature):
    steps = speculative_generate_step(mx.array(prompt), model, draft, num_draft_tokens=GAMMA, max_tokens=n)
    return [token for token, *_ in steps]

def onnx_plain(model, prompt, n, temperature):
    "No end token ends it: a shorter text is not wanted"
    options, end = ort.GeneratorParams(model), len(prompt) + n
    options.set_search_options(do_sample=False, min_length=end, max_length=end)
    run = ort.Generator(model, options)
    run.append_tokens(np.array(prompt, dtype=np.int32))
    while not run.is_done(): run.generate_next_token()
    return run.get_sequence(0)[-n:].tolist()

def llama_cpp(server, prompt, n, temperature):
    reply = ask_llama(server, prompt, n, temperature=temperature, seed=0, ignore_eos=True)
    took = reply["timings"]
    return reply["tokens"], (took["prompt_ms"] + took["predicted_ms"])/1e3

def contestants(folder):  # -> {name: contestant}
    (target, _), (small, _) = (load_model(folder/name) for name in ("target", "small"))
    onnx_model, llama = ort.Model(str(folder/"onnx")), llama_files(folder/"llama")
    def server(files="whole", **how): return llama_server(llama/files, "target", **how)
    return {
        "transformers, generate": partial(transformers_run, "", {}),
        "transformers, assisted": partial(transformers_run, "small", CONSTANT),
        "mlx-lm, plain": partial(mlx_plain, target),
        "mlx-lm, speculative": partial(mlx_speculative, target, small),
        "onnxruntime-genai, plain": partial(onnx_plain, onnx_model),
        **{f"llama.cpp, {name}": partial(llama_cpp, server(**how)) for name, how in LLAMA.items()},
        **{f"specref, {name}": partial(ours, *which) for name, which in OURS.items()}}

BASELINES = "transformers, generate", "llama.cpp, plain", "llama.cpp, plain, float16"
COLD = "mlx-lm", "onnxruntime-genai", "llama.cpp, n-grams"   # are run at temperature 0 alone

def timed(run, prompt, n, temperature):  # -> tokens or None, seconds
    start = perf_counter()
    found = run(prompt, n, temperature)
    return found if isinstance(found, tuple) else (found, perf_counter() - start)

def random_llama(folder):  # -> {name: contestant}
    "A Llama of 340 million random weights, as in `make record-passes`, with llama.cpp and by us"
    torch.manual_seed(0)
    model = llama(*SHAPES["Llama of 340 million"]).eval()
    to_gguf(model, folder/"random")
    ours = serve_model(model, 0)
    def plain(prompt, n, temperature): return [*autoregressive(ours, (*prompt,), n, Seeded(0))]
    return {"llama.cpp, plain": partial(llama_cpp, llama_server(folder, "random")), "specref, plain": plain}

def random_prompts(count, tokens=64):
    *_, V = SHAPES["Llama of 340 million"]
    return np.random.default_rng(0).integers(1, V, (count, tokens)).tolist()

def measured_cell(runs, kind, temperature, prompts, n):  # -> rows
    "Each prompt in a lap of its own; the first lap warms up"
    runs = {name: run for name, run in runs.items() if not (temperature and name.startswith(COLD))}
    found = {name: [] for name in runs}
    for lap, prompt in enumerate(prompts):
        order = [*runs.items()]
        for name, run in order[::1 - 2*(lap % 2)]:
            if lap: found[name].append(timed(run, prompt, n, temperature))
            else: timed(run, prompt, n, temperature)
    took = {name: np.array([seconds for _, seconds in runs]) for name, runs in found.items()}
    plain = [text for text, _ in found["specref, plain"]]
    for name, texts in found.items():
        known = not temperature and texts[0][0] is not None
        equal = sum(a == b for (a, _), b in zip(texts, plain)) if known else None
        over = {other: float(np.median(took[other] / took[name])) for other in BASELINES if other in took}
        yield dict(kind=kind, temperature=temperature, contestant=name, over=over, equal_texts=equal,
                   tokens_per_s=float(n / np.median(took[name])))

def measure_peers(path, laps=8, n=64, threads=1):
    "Medians over prompts, written to `path`"
    torch.set_num_threads(threads)
    quiet()
    with TemporaryDirectory() as folder:
        exported(Path(folder))
        runs = contestants(Path(folder))
        rows = [row for kind in KINDS for temperature in (0., 1.)
                for row in measured_cell(runs, kind, temperature, KINDS[kind](laps + 1, seed=3), n)]
        random = random_llama(Path(folder))
        alone = [*measured_cell(random, "random tokens", 0., random_prompts(laps + 1), n)]
    got = dict(threads=threads, prompts=laps, tokens=n, rows=rows, random=alone)
    write_record(path, "make peers", got, "mlx-lm", "onnxruntime-genai", "xllamacpp", "numba")

if __name__ == "__main__": measure_peers(Path(__file__).with_suffix(".json"))
