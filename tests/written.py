"Writes what is made of chapters and tests: the names for editors, and for what each system's tests must fail"
import json
import sys
from importlib import import_module

from house import ROOT, declared
from book import public
from helpers import STAND_INS

STUB, FAILING = ROOT/"specref"/"__init__.pyi", ROOT/"docs"/"stand_ins.json"

def stub():
    "The public names as plain imports, for tools that read code and do not run it"
    rows = [f"from .{module} import {name} as {name}" for name, module in public().items()]
    return "\n".join([
        "# for type checkers and editors; `python tests/written.py` writes it",
        "from types import ModuleType", *rows, "__version__: str", "EXTRAS: dict[str, str]",
        "def public() -> dict[str, str]: ...", "def install_hint(error: BaseException) -> str: ...",
        "def require(module: str) -> ModuleType: ...", ""])

def modules():
    "The test modules with faithful tests"
    files = sorted(ROOT.glob("tests/test_*.py"))
    return [f.stem for f in files if "\n@faithful(" in f.read_text(encoding="utf-8")]

def listed():  # -> {system: words}
    return {s: "; ".join(sorted(STAND_INS[s])) for s in sorted(declared()) if s in STAND_INS}

if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    sys.path.append(str(ROOT/"records"))
    for module in modules(): import_module(module)
    FAILING.write_text(json.dumps(listed(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
