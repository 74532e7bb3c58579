"Chapter 42a: the kernels return the twin's integers, compile for GPUs without spills, and mutants are caught"
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is made for Linux alone")

from helpers import proves

HERE = Path(__file__).parent


def checked(group, tmp_path, interpreted=True):
    "What the checks of a group found, in a process of its own, which chooses the interpreter"
    here = str(tmp_path)
    env = os.environ | dict(PYTHONPATH=os.pathsep.join([str(HERE.parent), str(HERE)]), TRITON_CACHE_DIR=here,
                            TMPDIR=here, OMP_NUM_THREADS="1", TRITON_INTERPRET="01"[interpreted])
    command = [sys.executable, "-W", "ignore::RuntimeWarning", HERE/"kernels_interpreted.py", group]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["failed"], f"{group}: {report['failed']}\n{done.stdout}"
    return report["found"]


@proves("thm-same-integers")
def test_every_cell(tmp_path):
    "In every cell of every draft: fractions, twin and kernel agree, and the volumes are the target's law"
    found = checked("cells", tmp_path)
    assert len(found) == 9 and sum(found.values()) > 500


@proves("thm-same-integers")
@pytest.mark.parametrize("group", ["walks", "chains"])
def test_random_batches(group, tmp_path):
    "Ragged batches, duplicates, zeros, extreme coins, up to 4,099 tokens, any block: the twin's integers"
    assert sum(checked(group, tmp_path).values()) >= 200


@proves("prop-reads")
def test_reads(tmp_path):
    "The rows loaded in blocks, watched in the interpreter, are those that the proposition counts"
    assert checked("reads", tmp_path)["reads"] >= 15


def test_mutants(tmp_path):
    "Each known-wrong kernel is caught by a check that the right one passes"
    found = checked("mutants", tmp_path)
    assert len(found) >= 20 and found.pop("right") >= 10


def test_compiled(tmp_path):
    "Both kernels for three generations of GPUs and all types of rows: no spills, no contracted steps"
    found = checked("compiled", tmp_path, interpreted=False)
    assert {name: len(regs) for name, regs in found.items()} == dict(sm_80=8, sm_90=8, sm_100=8)
    assert all(0 < r <= 255 for regs in found.values() for r in regs.values())
