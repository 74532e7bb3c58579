"The page runs as it stands: its own code cells, and what its reports must say"
import matplotlib
import pytest
from house import ROOT, Notebook, measured

from specref.certify.certificates import Certificate, Evidence


@pytest.fixture(scope="module")
def page():
    "The names that the page's code cells define, run in order; clocks left out"
    matplotlib.use("agg")
    cells = [c["source"] for c in Notebook(ROOT/"nbs"/"bring_your_own.ipynb").code if not measured(c)]
    names = {"__name__": "bring_your_own"}
    for source in cells: exec(compile(source, "bring_your_own", "exec"), names)
    return names


def test_the_right_ones_pass(page):
    "The drafter of the page and both ideas done right: proved on the tables, and nothing seen on the real model"
    for name in ("Echo", "Sharp", "Prudent"): assert isinstance(page["reports"][name], Certificate) and page["reports"][name].exact
    assert isinstance(page["reports"]["Echo, real"], Evidence) and page["reports"]["Echo, real"].passes
    assert page["certificate"](page["build"]).passes


def test_the_wrong_ones_are_caught(page):
    "Both almost-right versions break the contract and the law, by an exact distance; the sharpened one is counted out on the real model"
    for name in ("Sharpened", "Picky"):
        found = page["reports"][name]
        assert isinstance(found, Certificate) and not found.exact and found.tv > 0 and found.worst[1] != found.worst[2]
        assert not page["honest"](page[name](page["q"], 2, page["Fraction"](1, 2), 1)) and page["honest"](page["mine"])
    assert isinstance(page["reports"]["Sharpened, real"], Evidence) and not page["reports"]["Sharpened, real"].passes


def test_the_drafter_is_as_short_as_the_page_says(page):
    "Fifteen lines, counted as code"
    from house import counted
    source, = [c["source"] for c in Notebook(ROOT/"nbs"/"bring_your_own.ipynb").code if "class Echo" in c["source"]]
    assert len(counted(source)) <= 15


def test_same_text(page):
    "At temperature 0 every system of the page writes what plain decoding writes, and the echo was accepted more often than nothing"
    texts = {name: [r.text for r in page["runs"][0., name]] for name in page["makers"]}
    assert texts["plain"] == texts["chain"] == texts["echo"]
    assert all(r.text.ledger.num_accepted_tokens > 0 for r in page["runs"][0., "echo"])
