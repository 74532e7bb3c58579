"Chapter 42a: kernels return the torch implementation's integers, compile without spills; mutants detected"
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="triton is made for Linux alone")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from helpers import proves
from specref.gpu import draws, kernels

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


def source_of(kernel, K, p, q, numbers="*fp64"):
    "A kernel for rows of the types p and q; rows, their strides and V are aligned"
    rows = [kernels.RowArrays(f"*{x.split()[0]}", *["i32"]*2, "*fp32", "i32", "*fp64", "i32", "*fp64")
            for x in (p, q)]
    trees = kernels.TreeArrays("i32", *["*i32"]*5, "*i1", "*i32")
    out = kernels.VerdictArrays(*["*i32"]*4, "i32", "*fp64", "*i32")
    given = [*rows, trees, numbers, numbers, out, "i32", "i32"]
    P, Q = (("logits" in x) + ("cut" in x) + 2*("ready" in x) for x in (p, q))
    fixed = dict(K=K, H=8, BLOCK=2048, NB=128, P=P, Q=Q, INDEXED="rows" in p)
    if "SHARED" in kernel.arg_names: fixed["SHARED"] = "shared" in p
    types = dict(zip(kernel.arg_names, given + ["constexpr"]*len(fixed), strict=True))
    whole = [(i, j) for i in (0, 1) for j in (0, 1)] + [(3,), (4,), (6,)]
    return ASTSource(kernel, types, fixed, {at: [["tt.divisibility", 16]] for at in whole})


def compiled(source, generation):
    "Resources and ptx of a kernel compiled for a GPU"
    options = dict(num_warps=8, maxnreg=255, enable_fp_fusion=False)   # as in `launch`
    asm = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options).asm
    binary = Path(os.environ["TRITON_CACHE_DIR"], "kernel.cubin")
    binary.write_bytes(asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout, asm["ptx"]


def float_steps(source, generation, constants=()):
    "The operations of floats in a kernel that needs no memory for its registers, and has these doubles"
    usage, ptx = compiled(source, generation)
    assert {struct.pack(">d", x).hex() for x in constants} <= {*re.findall("0d(\\w{16})", ptx.lower())}
    spilled = [int(re.search(rf"{where}:(\d+)", usage)[1]) for where in ("STACK", "LOCAL")]
    assert spilled == [0, 0], usage
    return set(re.findall(r"\b(?:fma|mad|mul|add|sub|div)\.[\w.]*f(?:32|64)", ptx))


@pytest.mark.parametrize("generation", [80, 90, 100])
def test_the_draws_are_compiled(generation, tmp_path, monkeypatch):
    "No spills, no fused operation"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = kernels.RowArrays("*bf16", *["i32"]*2, "*fp32", "i32", "*fp64", "i32", "*fp64")
    given = [rows, "*fp64", "*i64", *["i32"]*3] + ["constexpr"]*5
    kernel = draws.draw_children_kernel
    source = ASTSource(kernel, dict(zip(kernel.arg_names, given, strict=True)),
                       dict(APART=True, K=4, BLOCK=2048, NB=128, KIND=1), {})
    usage, ptx = compiled(source, generation)
    assert [int(re.search(rf"{where}:(\d+)", usage)[1]) for where in ("STACK", "LOCAL")] == [0, 0], usage
    assert not re.search(r"\bfma\.|\bmad\.\w*f", ptx)


@pytest.mark.parametrize("kind, rows, generation", [("*fp32", 1, 80), ("*bf16", 2, 90)])
def test_the_tops_are_compiled(kind, rows, generation, tmp_path, monkeypatch):
    "No spills, no fused operation"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    p = kernels.RowArrays(kind, *["i32"]*2, "*fp32", "i32", "*fp64", "i32", "*fp64")
    trees = kernels.TreeArrays("i32", *["*i32"]*5, "*i1", "*i32")
    given, kernel = [p, p, trees, "*i64", "i32"] + ["constexpr"]*4, kernels.row_tops_kernel
    fixed = dict(BLOCK=2048, P=rows, Q=rows, INDEXED=False)
    source = ASTSource(kernel, dict(zip(kernel.arg_names, given, strict=True)), fixed, {})
    double = {"div.rn.f64"} | ({"mul.rn.f64"} if rows == 2 else set())   # the share of top-p
    assert float_steps(source, generation) == {f"{step}.rn.f32" for step in ("mul", "add", "sub")} | double


ROWS = [("fp64", "fp32"), ("fp32 logits", "fp32 logits"), ("bf16 logits, cut, rows by number", "bf16 logits")]
COMPILED = [("verify_trees_kernel", 4, *rows, generation) for rows, generation in zip(ROWS, (100, 80, 90))]
SHARED = [("fp64 shared", "fp32"), ("bf16 logits, ready, shared", "fp32 logits, ready")]
COMPILED += [("verify_trees_kernel", 4, *rows, 90) for rows in SHARED]
COMPILED += [("verify_chains_kernel", 8, *rows, generation) for rows, generation in zip(ROWS, (80, 90, 100))]


@pytest.mark.parametrize("name, K, p, q, generation", COMPILED)
def test_compiled(name, K, p, q, generation, tmp_path, monkeypatch):
    "For three generations of GPUs and all types of rows: no spills, no fused operation, rounding to nearest"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    steps = float_steps(source_of(getattr(kernels, name), K, p, q), generation)
    single = {f"{step}.rn.f32" for step in ("mul", "add", "sub")} if "logits" in p else set()
    assert steps == {f"{step}.rn.f64" for step in ("mul", "add", "sub", "div")} | single
