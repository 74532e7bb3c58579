"Bad input raises a `ValueError` with the argument, the value given and the one wanted; a table a part"
import re
from importlib import import_module
from pathlib import Path

import pytest

TABLES = sorted(f.stem for f in Path(__file__).parent.glob("refusals_*.py"))
KINDS = [(table, *row) for table in TABLES for row in getattr(import_module(table), "KINDS", [])]
ROWS = [(table, i, *row) for table in TABLES for i, row in enumerate(import_module(table).ROWS)]

@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].removeprefix('refusals_')}-{row[1]}-{row[2]}")
def test_the_error_names_the_argument(row):
    _, _, argument, call, *words = row
    with pytest.raises(ValueError, match=f"^{re.escape(argument)}: ") as error: call()
    assert not words or re.search(words[0], str(error.value)), f"{error.value} does not contain {words[0]!r}"

def refusal(f, name, x):
    "The message of the `ValueError` for this value of an argument; nothing where it is taken"
    try: f(**{name: x})
    except ValueError as error: return str(error)

@pytest.mark.parametrize("row", KINDS, ids=lambda row: f"{row[0].removeprefix('refusals_')}-{row[1][:2]}")
def test_values_of_another_kind(row):
    "Every argument of a kind refuses all that is not of it"
    _, wrong, *calls = row
    for f, name, x in ((f, name, x) for f, names in calls for name in names.split() for x in wrong):
        found = refusal(f, name, x)
        assert found and found.startswith(f"{name}: "), f"{f}, {name}={x!r}: {found}"
