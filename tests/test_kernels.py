"Chapter 42a: kernels return the torch implementation's integers, compile without spills; mutants detected"
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="triton is made for Linux alone")

from helpers import proves
from specref.gpu import kernels

HERE = Path(__file__).parent


@proves("thm-same-integers", "prop-reads")
def test_interpreted(tmp_path):
    "The torch implementation's integers in every cell and on ragged batches, rows read, mutants detected"
    paths = dict(PYTHONPATH=f"{HERE.parent}{os.pathsep}{HERE}", TRITON_CACHE_DIR=str(tmp_path))
    env = os.environ | paths | dict(TMPDIR=str(tmp_path), OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    command = [sys.executable, "-W", "ignore::RuntimeWarning", HERE/"kernels_interpreted.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    verified, watched, mutants = map(int, done.stdout.split())
    assert verified > 450 and watched >= 15 and mutants >= 20


def compiled(kernel, K, p, q, generation):
    "Resources and ptx of a kernel compiled for a GPU, with rows of the types p and q"
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    rows = [f"*{x.split()[0]}" for x in (p, q)] + ["i32"]*4 + ["*fp64"]*2 + ["i32"]*2
    links, out = ["*i32"]*5 + ["*i1", "*i32"] + ["*fp64"]*2, ["*i32"]*4 + ["i32"]*4
    types = dict(zip(kernel.arg_names, rows + links + out + ["constexpr"]*7, strict=True))
    aligned = [i for i, (name, t) in enumerate(types.items()) if t[0] == "*" or name in ("V", "p_stride")]
    fixed = dict(K=K, H=8, BLOCK=2048, NB=128, P="logits" in p, Q="logits" in q, INDEXED="rows" in p)
    source = ASTSource(kernel, types, fixed, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = dict(num_warps=8, maxnreg=255, enable_fp_fusion=False)   # as in `launch`
    asm = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options).asm
    binary = Path(os.environ["TRITON_CACHE_DIR"], "kernel.cubin")
    binary.write_bytes(asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout, asm["ptx"]


ROWS = [("fp64", "fp32"), ("fp32 logits", "fp32 logits"), ("bf16 logits, rows by number", "bf16 logits")]
COMPILED = [("verify_trees_kernel", 4, *rows, generation) for rows, generation in zip(ROWS, (100, 80, 90))]
COMPILED += [("verify_chains_kernel", 8, *rows, generation) for rows, generation in zip(ROWS, (80, 90, 100))]


@pytest.mark.parametrize("name, K, p, q, generation", COMPILED)
def test_compiled(name, K, p, q, generation, tmp_path, monkeypatch):
    "For three generations of GPUs and all types of rows: no spills, no fused operation, rounding to nearest"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    usage, ptx = compiled(getattr(kernels, name), K, p, q, generation)
    spilled = [int(re.search(rf"{where}:(\d+)", usage)[1]) for where in ("STACK", "LOCAL")]
    assert spilled == [0, 0], usage
    steps = set(re.findall(r"\b(?:fma|mad|mul|add|sub|div)\.[\w.]*f(?:32|64)", ptx))
    assert steps == {f"{step}.rn.f64" for step in ("mul", "add", "sub", "div")}
