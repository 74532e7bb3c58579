"""The adapters of transformers under other releases

`make compat-transformers` tries the versions below. What fails there is printed, and its reasons are counted
in versions.json. `make compat-newest` tries the newest release of each package that can
change a row, a test or a page, and says which upper bounds of pyproject.toml are reached. Each has a virtual
environment of its own, on top of the packages of this one."""
import os, re, subprocess, sys, sysconfig, tomllib, venv
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

from specref.core.check import write_record

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")

VERSIONS = '5.0.0', '5.13.0', '5.17.0', '5.23.0', '5.24.0'   # too old, the least admitted, ..., the pinned
NEWEST = 'numpy', 'torch', 'transformers', 'tokenizers', 'safetensors', 'hypothesis', 'nbdev', 'sphinx'
ADAPTERS = 'transformer', 'llama', 'encoder_decoder', 'recurrent', 'bridge', 'engine', 'notebooks'
PAGES = 'not test_notebooks or 07_transformer or 09_bridge'   # of the notebooks, these two


def bounds():
    "The packages on which rows depend, each with the versions that pyproject.toml admits"
    project = tomllib.loads((ROOT/'pyproject.toml').read_text())['project']
    needs = map(Requirement, project['dependencies'] + project['optional-dependencies']['models'])
    return {need.name: need.specifier for need in needs if limit(need.specifier, '<')}


def limit(admitted, operator):
    "The version behind `<` or `>=`; empty where there is none"
    return next((part.version for part in admitted if part.operator == operator), '')


def environment(name, *packages, home=ROOT/'.venv-transformers'):
    "The Python of an environment with those packages and, below them, all packages of this environment"
    place = home/name
    python, ready = place/'bin'/'python', place/'ready'
    if ready.exists(): return python
    venv.create(place, clear=True, with_pip=True)
    own = Path(sysconfig.get_path('purelib', vars=dict(base=place, platbase=place)))
    below = sysconfig.get_path('purelib')
    (own/'below.pth').write_text(f'import site; site.addsitedir({below!r})\n')
    if packages: subprocess.run([python, '-m', 'pip', 'install', '-q', *packages], check=True)
    ready.touch()
    return python


def printed(*call):
    env = os.environ | dict(PYTHONPATH=f'{ROOT}:{ROOT/"models"}')
    return subprocess.run(call, env=env, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def installed(python, *packages):
    "The versions of those packages that a Python imports"
    code = 'import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))'
    return dict(zip(packages, printed(python, '-c', code, *packages).split()))


def cpu_torch(python):
    "The newest torch that the package index has as a wheel for CPUs by name; none where it names none"
    offered = printed(python, '-m', 'pip', 'index', 'versions', 'torch')
    wheels = re.findall(r'[\d.]+\+cpu\b', offered)
    return [f'torch=={wheels[0]}'] if wheels else []


def reason(fault):
    "The error of a failed test in one line, without the path of a file"
    lines = [line[1:].strip() for line in (fault.text or '').splitlines() if line.startswith('E ')]
    named = [line for line in lines if re.match(r'[\w.]+(Error|Exception)\b', line)]
    return re.sub(r' \(/.*', '', (named or lines or [fault.get('message')])[0])[:160]


def outcomes(report):
    "The number of tests that passed in a JUnit report, and {reason: the tests that failed for it}"
    passed, failed = 0, defaultdict(list)
    for case in ElementTree.parse(report).iter('testcase'):
        faults = [*case.iter('failure'), *case.iter('error')]
        passed += not faults and case.find('skipped') is None
        name = f'{case.get("classname")}::{case.get("name")}'.lstrip(':')
        if faults: failed[reason(faults[0])].append(name)
    return passed, failed


def tried(python, name, *parts):
    "The outcomes of those parts of the suite under another Python, printed"
    report = ROOT/'build'/f'transformers-{name}.xml'
    env = os.environ | dict(PYTHONPATH=f'{ROOT}:{ROOT/"models"}', OMP_NUM_THREADS='1')
    call = [python, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '--continue-on-collection-errors',
            f'--junitxml={report}', '-k', PAGES, *(f'tests/test_{part}.py' for part in parts)]
    subprocess.run(call, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    passed, failed = outcomes(report)
    print(f'{name}: {passed} passed, {sum(map(len, failed.values()))} failed', flush=True)
    for why, tests in failed.items(): print(f'    {why}', *tests, sep='\n        ')
    return passed, failed


def main(*versions):
    "Try each version of transformers; all of them are recorded. The pinned version must fail no test"
    record = {}
    for version in versions or VERSIONS:
        python = environment(version, f'transformers=={version}')
        assert installed(python, 'transformers') == dict(transformers=version)
        passed, failed = tried(python, version, *ADAPTERS)
        record[version] = dict(passed=passed, failed=sum(map(len, failed.values())),
                               reasons={why: len(tests) for why, tests in failed.items()})
    if not versions: write_record(RECORD, 'make compat-transformers', dict(releases=record))
    return bool(record.get(VERSIONS[-1], {}).get('failed'))


def newest():
    "Try the newest of each package together; where a release is newer than any that is admitted, say so"
    python = environment('newest')
    wanted = cpu_torch(python) + [name for name in NEWEST if name != 'torch']   # its range brings gigabytes
    subprocess.run([python, '-m', 'pip', 'install', '-q', '--upgrade', *wanted], check=True)
    found, admitted = installed(python, *NEWEST), bounds()
    for name, version in found.items():
        reached = name in admitted and not admitted[name].contains(version)
        print(f'{name} {version}', f'pyproject.toml admits {admitted[name]}' if reached else '', flush=True)
    return bool(tried(python, 'newest', *ADAPTERS, 'house')[1])


if __name__ == '__main__': sys.exit(newest() if sys.argv[1:] == ['newest'] else main(*sys.argv[1:]))
