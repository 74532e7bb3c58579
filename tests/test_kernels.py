"Chapter 42a: the kernels return the twin's integers, in the interpreter, and compile for GPUs without spills; every mutant is caught"
import json, os, subprocess, sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is made for Linux alone")

from helpers import proves, refuses
from specref.gpu.kernels import fused_verify_trees, fused_verify_chains
from specref.gpu.layout import flat

HERE = Path(__file__).parent


def checked(group, tmp_path, interpreted=True):
    "What the checks of a group found; the interpreter is chosen before triton is imported, so each group has a process of its own"
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]), TRITON_CACHE_DIR=str(tmp_path), TMPDIR=str(tmp_path), OMP_NUM_THREADS="1", TRITON_INTERPRET="01"[interpreted])
    done = subprocess.run([sys.executable, "-W", "ignore::RuntimeWarning", HERE/"kernels_interpreted.py", group], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert not said["failed"], f"{group}: {said['failed']}\n{done.stdout}"
    return said["found"]


@proves("thm-same-integers")
def test_every_cell(tmp_path):
    "At the middle of every cell of every draft, for each rule: fractions, twin and kernel agree, and the volumes by the kernel's outcome are the target's law"
    found = checked("cells", tmp_path)
    assert found.keys() == {"iid", "without replacement", "support used up", "points", "mixed", "mixed without replacement", "chain", "greedy", "block"}
    assert sum(found.values()) > 500


@proves("thm-same-integers")
@pytest.mark.parametrize("group, walks", [("walks", 200), ("chains", 200)])
def test_random_batches(group, walks, tmp_path):
    "Ragged batches with duplicates, zeros, nothing remaining, coins 0 and 1 - 2^-53, vocabularies up to 4,099 and blocks of any size: the twin's integers"
    assert sum(checked(group, tmp_path).values()) >= walks


@proves("prop-reads")
def test_reads(tmp_path):
    "The rows loaded in blocks, watched in the interpreter, are those that the proposition counts"
    assert checked("reads", tmp_path)["reads"] >= 15


def test_mutants(tmp_path):
    "Each known-wrong kernel is caught by a check that the right one passes"
    found = checked("mutants", tmp_path)
    assert len(found) >= 20 and found.pop("right") >= 10


def test_compiled(tmp_path):
    "Both kernels for three generations of GPUs and all types of rows: no stack, no local memory, no contracted steps"
    found = checked("compiled", tmp_path, interpreted=False)
    assert {name: len(regs) for name, regs in found.items()} == dict(sm_80=8, sm_90=8, sm_100=8)
    assert all(0 < r <= 255 for regs in found.values() for r in regs.values())


def test_refusals():
    "What is wrong is said before a launch: there is no device here to launch on"
    assert "TRITON_INTERPRET" not in os.environ
    batch, p, u = flat([-1, 0, 0], [0, 1, 0], [-1, 0, 0]), torch.eye(2, dtype=torch.float64)[[0, 1, 0]], torch.zeros(3, dtype=torch.float64)
    q, pick = p[:1], u[:1]
    refuses("batch", fused_verify_chains, batch, p, q, u, pick)
    chain = flat([-1, 0], [0, 1], [-1, 0])
    for kernel in (fused_verify_trees, fused_verify_chains):
        p2, u2 = p[:2], u[:2]
        for wrong in 3, 0, -2, 4., "4", True, None, 2**19: refuses("block", kernel, chain, p2, q, u2, pick, block=wrong)
        for wrong in 0, 64, 8.: refuses("warps", kernel, chain, p2, q, u2, pick, warps=wrong)
        refuses("batch", kernel, None, p2, q, u2, pick)
        refuses("coins", kernel, chain, p2, q, u2 + 1, pick)
        refuses("coins", kernel, chain, p2, q, u2.float(), pick)
        refuses("picks", kernel, chain, p2, q, u2, u2)
        refuses("p", kernel, chain, p2 * 2, q, u2, pick)
        refuses("q", kernel, chain, p2, q[:, :1], u2, pick)
