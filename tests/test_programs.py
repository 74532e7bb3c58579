"Chapter 64a: the programs of a launch run together, with the integers of Triton's own interpreter"
import os, subprocess, sys

import pytest

from helpers import proves
from house import ROOT

@proves("prop-together")
def test_the_integers_of_one_program_after_another():
    "In a process of its own: chains that part at every place, launches of two axes, few beginnings, refusals"
    pytest.importorskip("triton")
    env = os.environ | dict(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=f"{ROOT}:{ROOT/'tests'}")
    call = [sys.executable, "-W", "ignore", ROOT/"tests"/"programs_interpreted.py"]
    done = subprocess.run(call, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-2000:]
