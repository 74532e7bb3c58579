"Every notebook runs from top to bottom, and puts out again what it has stored"
import nbformat
import nbformat.v4 as v4
import pytest

from house import PLAIN, CellFailed, changes, notebooks


@pytest.mark.parametrize("path", [nb.path for nb in notebooks()], ids=lambda p: p.stem)
def test_runs_as_stored(path):
    found = "\n".join(changes(path))
    assert not found, f"{path.name} gives other outputs than stored (`make nbs` stores them anew)\n{found}"


def test_run_has_teeth(tmp_path):
    "An output that a run does not give is found; what is measured is not compared; a cell that fails, fails"
    def cell(source, output, **metadata):
        return v4.new_code_cell(source, metadata=metadata, outputs=[v4.new_output("stream", text=output)])
    def found(*cells):
        file = tmp_path/"00_a.ipynb"
        nbformat.write(v4.new_notebook(cells=cells, metadata=PLAIN), file)
        return list(changes(file))
    assert not found(cell("print(1)", "1\n"), cell("print(2)", "3\n", tags=["measured"]))
    assert {"-2", "+1"} <= set(found(cell("print(1)", "2\n")))
    with pytest.raises(CellFailed, match="ZeroDivisionError"): found(cell("1/0", ""))
