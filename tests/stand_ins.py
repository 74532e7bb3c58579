"Writes for which simpler versions the faithful tests of each system must fail, for the page of all systems"
import json
from importlib import import_module

from helpers import STAND_INS
from house import ROOT, declared

FILE = ROOT/"docs"/"stand_ins.json"

def modules():
    "The test modules with faithful tests"
    files = sorted(ROOT.glob("tests/test_*.py"))
    return [f.stem for f in files if "\n@faithful(" in f.read_text(encoding="utf-8")]

def listed():  # -> {system: words}
    return {s: "; ".join(sorted(STAND_INS[s])) for s in sorted(declared()) if s in STAND_INS}

if __name__ == "__main__":
    for module in modules(): import_module(module)
    FILE.write_text(json.dumps(listed(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
