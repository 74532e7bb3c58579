"Chapter 42b: kernels return what the rules of the book do, compile without spills; mutants detected"
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is made for Linux alone")

from helpers import proves
from specref.gpu import rules
from test_kernels import ROWS, counts_of, float_steps, source_of


@proves("prop-matching", "lem-times", "prop-same-race", "prop-entropy", "prop-one-number",
        "cor-traverse-chains", "prop-rule-reads")
def test_interpreted(tmp_path):
    "The book's verdicts on ragged trees, chains as blocks, rows read, mutants; every cell is in the chapter"
    verified, watched, mutants = counts_of("rules_interpreted.py", tmp_path)
    assert verified > 450 and watched >= 15 and mutants >= 30


COMPILED = [("match_trees_kernel", 1, *ROWS[1], 90), ("match_coupled_kernel", 1, *ROWS[0], 100),
            ("typical_trees_kernel", 1, *ROWS[2], 100), ("typical_trees_kernel", 1, *ROWS[0], 80),
            ("traverse_trees_kernel", 4, *ROWS[1], 90), ("traverse_trees_kernel", 4, *ROWS[0], 80)]


@pytest.mark.parametrize("name, K, p, q, generation", COMPILED)
def test_compiled(name, K, p, q, generation, tmp_path, monkeypatch):
    "For three generations of GPUs: no spills, no fused operation, rounding to nearest"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = "*i64" if "coupled" in name else "*fp64"
    constants = (rules.LN_TWO, *rules.LOG_SERIES) if "coupled" in name else ()
    steps = float_steps(source_of(getattr(rules, name), K, p, q, numbers), generation, constants)
    assert "mul.rn.f64" in steps and all(step.split(".")[0] in ("mul", "add", "sub", "div") and
                                         step.split(".")[1] == "rn" for step in steps)
