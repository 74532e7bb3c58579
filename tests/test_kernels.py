"Chapter 42a: kernels return the torch implementation's integers, compile without spills; mutants detected"
import os
import re
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="triton is made for Linux alone")

from helpers import proves
from specref.gpu import draws, kernels
from specref.gpu.bench.clocks import TREE_SHAPES, equal_trees
from specref.gpu.verify import Logits, Probs

HERE = Path(__file__).parent

def counts_of(script, tmp_path):
    "The numbers on the last line of a script that runs in Triton's interpreter"
    paths = dict(PYTHONPATH=f"{HERE.parent}{os.pathsep}{HERE}", TRITON_CACHE_DIR=str(tmp_path))
    env = os.environ | paths | dict(TMPDIR=str(tmp_path), OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    command = [sys.executable, "-W", "ignore::RuntimeWarning", HERE/script]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return map(int, done.stdout.split())

@proves("thm-same-integers", "prop-reads", "prop-same-draws")
def test_interpreted(tmp_path):
    "The torch implementation's integers in every cell and on ragged batches, rows read, mutants detected"
    verified, watched, mutants = counts_of("kernels_interpreted.py", tmp_path)
    assert verified > 450 and watched >= 15 and mutants >= 20

KINDS = dict(fp64=torch.float64, fp32=torch.float32, bf16=torch.bfloat16)
V, B = 4096, 4

def rows_of(words, n, nodes):
    "Rows without numbers, as the words say: their type, logits, a cut, rows by number"
    x = torch.empty(n, V, dtype=KINDS[words.split()[0].strip(",")], device="meta")
    row = torch.empty(nodes, dtype=torch.int64, device="meta") if "by number" in words else None
    cut = dict(top_k=5, top_p=.9) if "cut" in words else {}
    return Logits(x, .7, row, **cut) if "logits" in words else Probs(x, row)

def launched(f, tree, p, q=None, numbers=2, **how):  # -> a function of a generation, which compiles
    "A launch on equal trees; so many arguments of random numbers, the first for the nodes"
    batch = equal_trees(TREE_SHAPES[tree], B).to("meta")
    u = [torch.empty(n, dtype=torch.float64, device="meta") for n in (batch.n, B)][-numbers:]
    n = batch.n * (1 + ("by number" in p))
    rows = [rows_of(x, n, batch.n) for x in (p, q) if x]
    def compiled(generation):
        with kernels.CompileOnly(generation) as found: f(batch, *rows, *u, check=False, **how)
        return found.kernels
    return compiled

def float_steps(kernel, constants=()):
    "The operations of floats in a kernel that needs no memory for its registers, and has these doubles"
    needs, ptx = kernels.resources(kernel), kernel.asm["ptx"]
    assert {struct.pack(">d", x).hex() for x in constants} <= {*re.findall("0d(\\w{16})", ptx.lower())}
    assert needs["spilled"] == 0, needs
    return set(re.findall(r"\b(?:fma|mad|mul|add|sub|div)\.[\w.]*f(?:32|64)", ptx))

@pytest.mark.parametrize("generation", [80, 90, 100])
def test_the_draws_are_compiled(generation, tmp_path, monkeypatch):
    "No spills, no fused operation"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    z, u, heat = (torch.empty(*shape, dtype=kind, device="meta") for shape, kind in
                  (((4, 1, V), torch.bfloat16), ((4, 1, 4), torch.float64), ((4,), torch.float64)))
    with kernels.CompileOnly(generation) as found: draws.fused_draw_children(z, u, heat, True)
    assert not any(re.match("fma|mad", step) for step in float_steps(*found.kernels))

ROWS = [("fp64", "fp32"), ("fp32 logits", "fp32 logits"), ("bf16 logits, cut, rows by number", "bf16 logits")]
TREES, CHAINS = (kernels.fused_verify_trees, "16 nodes"), (kernels.fused_verify_chains, "chain 5")
COMPILED = [(*TREES, *rows, generation) for rows, generation in zip(ROWS, (100, 80, 90))]
COMPILED += [(partial(TREES[0], programs=2), "16 nodes", "fp64", "fp32", 90),
             (partial(TREES[0], programs=2), "16 nodes", "bf16 logits", "fp32 logits", 90)]   # with tops
COMPILED += [(*CHAINS, *rows, generation) for rows, generation in zip(ROWS, (80, 90, 100))]

@pytest.mark.parametrize("f, tree, p, q, generation", COMPILED)
def test_compiled(f, tree, p, q, generation, tmp_path, monkeypatch):
    "For three generations of GPUs and all types of rows: no spills, no fused operation, rounding to nearest"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    *tops, kernel = launched(f, tree, p, q)(generation)
    single = {f"{step}.rn.f32" for step in ("mul", "add", "sub")} if "logits" in p else set()
    assert float_steps(kernel) == {f"{step}.rn.f64" for step in ("mul", "add", "sub", "div")} | single
    for x in tops: assert float_steps(x) == single | {"div.rn.f64"}

def test_one_kernel_serves_all_sizes():
    "Any number of trees, of rows and of temperatures, any height up to a power of two: one compilation"
    hashes = set()
    for tree, B in ("chain 4", 1), ("chain 4", 16), ("chain 5", 3), ("chain 5", 33):
        batch = equal_trees(TREE_SHAPES[tree], B).to("meta")
        p, q = (Logits(torch.empty(n, V, device="meta"), torch.empty(B, dtype=torch.float64, device="meta"))
                for n in (batch.n, batch.n - B))
        u = [torch.empty(n, dtype=torch.float64, device="meta") for n in (batch.n, B)]
        with kernels.CompileOnly() as found: kernels.fused_verify_trees(batch, p, q, *u, check=False)
        hashes |= {k.hash for k in found.kernels}
    assert len(hashes) == 1
