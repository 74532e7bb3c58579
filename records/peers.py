"""Tokens a second of the embedded target in other libraries that run on a CPU: `make peers`

Every contestant decodes the same prompts in turn, at temperature 0, on one thread."""
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import mlx.core as mx
import numpy as np
import onnx
import onnxruntime_genai as ort
import torch
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.utils import load_model

from specref.app.benchmarks import CONSTANT, quiet, transformers_generate
from specref.app.tour import KINDS, UNTRAINED, decode_cold
from specref.core.check import write_record
from specref.models.embedded import DATA, raw_model

GAMMA = CONSTANT["num_assistant_tokens"]


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


def put_head_last(path):
    "The head reads the last norm: the builder takes the first map with V outputs for it, here that of an MLP"
    model = onnx.load(path, load_external_data=False)
    head, = (node for node in model.graph.node if node.name == "/lm_head/MatMul")
    last, = (node for node in model.graph.node if "final_norm" in node.name)
    head.input[0] = last.output[0]
    model.graph.node.remove(head)
    model.graph.node.append(head)
    onnx.save(model, path)


def ours(recipe, draft, prompt, n):
    stop, = (stop for stop in UNTRAINED if (stop.recipe, stop.draft) == (recipe, draft))
    return [*decode_cold(stop, 0., prompt, n, 0).text]

def mlx_plain(model, prompt, n):
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=n)]

def mlx_speculative(model, draft, prompt, n):
    steps = speculative_generate_step(mx.array(prompt), model, draft, num_draft_tokens=GAMMA, max_tokens=n)
    return [token for token, *_ in steps]

def onnx_plain(model, prompt, n):
    "No end token ends it: a shorter text is not wanted"
    options, end = ort.GeneratorParams(model), len(prompt) + n
    options.set_search_options(do_sample=False, min_length=end, max_length=end)
    run = ort.Generator(model, options)
    run.append_tokens(np.array(prompt, dtype=np.int32))
    while not run.is_done(): run.generate_next_token()
    return run.get_sequence(0)[-n:].tolist()

def contestants(folder):  # -> {name: (prompt, n) -> tokens, or None where only the time is taken}
    (target, _), (small, _) = (load_model(folder/name) for name in ("target", "small"))
    return {
        "transformers, generate": lambda prompt, n: transformers_generate("", {}, 0., prompt, n, 0),
        "mlx-lm, plain": partial(mlx_plain, target),
        "onnxruntime-genai, plain": partial(onnx_plain, ort.Model(str(folder/"onnx"))),
        "specref, plain": partial(ours, "autoregressive", ""),
        "transformers, assisted":
            lambda prompt, n: transformers_generate("small", CONSTANT, 0., prompt, n, 0),
        "mlx-lm, speculative": partial(mlx_speculative, target, small),
        "specref, speculative sampling": partial(ours, "speculative sampling", "small")}


def measured_kind(runs, kind, laps, n):  # -> rows
    "Each prompt in a lap of its own; the first lap warms up"
    took, texts = {name: [] for name in runs}, {name: [] for name in runs}
    for lap, prompt in enumerate(KINDS[kind](laps + 1, seed=3)):
        for name, run in runs.items():
            start = perf_counter()
            text = run(prompt, n)
            if lap: took[name].append(perf_counter() - start), texts[name].append(text)
    plain = texts["specref, plain"]
    for name, seconds in took.items():
        equal = sum(a == b for a, b in zip(texts[name], plain)) if texts[name][0] else None
        ratio = np.median(np.divide(took["transformers, generate"], seconds))
        yield dict(kind=kind, contestant=name, tokens_per_s=float(n / np.median(seconds)),
                   over_transformers=float(ratio), equal_texts=equal)

def measure_peers(path, laps=5, n=64, threads=1):
    "Medians over prompts, written to `path`"
    torch.set_num_threads(threads)
    quiet()
    with TemporaryDirectory() as folder:
        exported(Path(folder))
        runs = contestants(Path(folder))
        rows = [row for kind in KINDS for row in measured_kind(runs, kind, laps, n)]
    got = dict(threads=threads, prompts=laps, tokens=n, rows=rows)
    write_record(path, "make peers", got, "mlx-lm", "onnxruntime-genai")

if __name__ == "__main__": measure_peers(Path(__file__).with_suffix(".json"))
