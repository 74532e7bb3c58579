"The examples in the docstrings: each runs by itself and prints its stated output"
from doctest import DocTestFinder, DocTestRunner
from importlib import import_module

import specref
from house import light

def examples():
    "Those of the modules that need numpy alone and of those with public names, which an example may use"
    public = {f"specref.{module}" for module in specref.public().values()}
    modules, find = sorted({*light(), *public}), DocTestFinder().find
    known = {name: getattr(specref, name) for name in specref.__all__}
    found = (test for m in modules for test in find(import_module(m), m, extraglobs=known))
    return [test for test in found if test.examples]

def failed(test): return DocTestRunner(verbose=False).run(test).failed   # pytest shows what it prints

def test_every_example_prints_its_stated_output():
    found = examples()
    assert len(found) >= 100 and not [test.name for test in found if failed(test)]

def test_another_output_is_a_failure():
    for test in examples():
        test.examples[-1].want = "other\n"
        assert failed(test), test.name
