"Every notebook runs from top to bottom, and its outputs are those stored"
import nbformat
import nbformat.v4 as v4
import pytest

from house import PLAIN, CellFailed, changes, notebooks, run, text


@pytest.mark.parametrize("path", [nb.path for nb in notebooks()], ids=lambda p: p.stem)
def test_runs_as_stored(path):
    found = "\n".join(changes(path))
    assert not found, f"{path.name} gives other outputs than stored (`make nbs` stores them again)\n{found}"


def test_changed_outputs_are_found(tmp_path, monkeypatch):
    """A changed output is found; `measured` cells are not compared, and `long` ones run in the long profile
    alone; a cell that raises fails the run"""
    def cell(source, output, **metadata):
        return v4.new_code_cell(source, metadata=metadata, outputs=[v4.new_output("stream", text=output)])
    def found(*cells):
        file = tmp_path/"00_a.ipynb"
        nbformat.write(v4.new_notebook(cells=cells, metadata=PLAIN), file)
        return list(changes(file))
    assert not found(cell("print(1)", "1\n"), cell("print(2)", "3\n", tags=["measured"]))
    assert {"-2", "+1"} <= set(found(cell("print(1)", "2\n")))
    monkeypatch.delenv("SPECREF_LONG", raising=False)
    assert not found(long := cell("1/0", "2\n", tags=["measured", "long"]))
    monkeypatch.setenv("SPECREF_LONG", "1")
    for failing in cell("1/0", ""), long:
        with pytest.raises(CellFailed, match="ZeroDivisionError"): found(failing)


def test_cells_that_miss_a_package_say_so(tmp_path):
    "From the next cell on; nothing is skipped where the package is there"
    file = tmp_path/"00_a.ipynb"
    def printed(package):
        first = f"from specref.core.check import skip_cells_without\nskip_cells_without({package!r})"
        cells = [*map(v4.new_code_cell, (first, "print(1)"))]
        nbformat.write(v4.new_notebook(cells=cells, metadata=PLAIN), file)
        return [text(o.text) for c in run(file).cells for o in c.outputs]
    assert printed("numpy") == ["1\n"]
    assert printed("no_such_package") == ["skipped: it needs no_such_package, which is not installed\n"]
