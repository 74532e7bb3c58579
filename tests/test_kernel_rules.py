"Chapter 42b: kernels return what the rules of the book do, compile without spills; mutants detected"
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is made for Linux alone")

from helpers import proves
from specref.gpu import rules
from test_kernels import ROWS, counts_of, float_steps, launched, torch

@proves("prop-matching", "lem-times", "prop-same-race", "prop-entropy", "prop-one-number",
        "cor-traverse-chains", "prop-rule-reads")
def test_interpreted(tmp_path):
    "The book's verdicts on ragged trees, chains as blocks, rows read, mutants; every cell is in the chapter"
    verified, watched, mutants = counts_of("rules_interpreted.py", tmp_path)
    assert verified > 450 and watched >= 15 and mutants >= 30

def coupled(batch, p, u, **how):
    whole = torch.empty(batch.B, dtype=torch.int64, device="meta")
    return rules.fused_match_coupled(batch, p, whole, whole, **how)

def match(batch, p, u, picks, **how): return rules.fused_match_trees(batch, p, u, **how)
def typical(batch, p, gate, picks, **how): return rules.fused_typical_trees(batch, p, picks, gate=gate, **how)

COMPILED = [(match, *ROWS[1][:1], None, 2, 90), (coupled, *ROWS[0][:1], None, 1, 100),
            (typical, *ROWS[2], 1, 100), (typical, *ROWS[0], 1, 80),
            (rules.fused_traverse_trees, *ROWS[1], 2, 90),
            (rules.fused_traverse_trees, *ROWS[0], 2, 80)]

@pytest.mark.parametrize("f, p, q, numbers, generation", COMPILED)
def test_compiled(f, p, q, numbers, generation, tmp_path, monkeypatch):
    "For three generations of GPUs: no spills, no fused operation, rounding to nearest"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, = launched(f, "16 nodes", p, q, numbers)(generation)
    steps = float_steps(kernel, (rules.LN_TWO, *rules.LOG_SERIES) if f is coupled else ())
    assert "mul.rn.f64" in steps and all(step.split(".")[0] in ("mul", "add", "sub", "div") and
                                         step.split(".")[1] == "rn" for step in steps)
