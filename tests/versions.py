"""Chapters 07 and 09 under other versions of transformers: `make compat-transformers`

Each version has a virtual environment of its own, on top of the packages of this one. What fails there is
printed, and its reasons are counted in docs/benchmarks/transformers.json."""
import json, os, re, subprocess, sys, sysconfig, venv
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from house import ROOT

VERSIONS = '4.57.6', '5.0.0', '5.13.0', '5.23.0'   # the last two: the least of pyproject.toml, the pinned one
TESTS = 'tests/test_transformer.py', 'tests/test_bridge.py', 'tests/test_notebooks.py'
CHAPTERS = 'test_transformer or test_bridge or 07_transformer or 09_bridge'
RECORD = ROOT/'docs'/'benchmarks'/'transformers.json'


def environment(version, home=ROOT/'.venv-transformers'):
    "The Python of an environment with that transformers and, below it, all packages of this environment"
    place = home/version
    python, ready = place/'bin'/'python', place/'ready'
    if ready.exists(): return python
    venv.create(place, clear=True, with_pip=True)
    own = Path(sysconfig.get_path('purelib', vars=dict(base=place, platbase=place)))
    below = sysconfig.get_path('purelib')
    (own/'below.pth').write_text(f'import site; site.addsitedir({below!r})\n')
    subprocess.run([python, '-m', 'pip', 'install', '-q', f'transformers=={version}'], check=True)
    ready.touch()
    return python


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


def tried(version):
    "The outcomes of both chapters under one version of transformers"
    python, report = environment(version), ROOT/'build'/f'transformers-{version}.xml'
    env = os.environ | dict(PYTHONPATH=f'{ROOT}:{ROOT/"models"}', OMP_NUM_THREADS='1')
    which = [python, '-c', 'import transformers; print(transformers.__version__)']
    found = subprocess.run(which, env=env, cwd=ROOT, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == version, found.stdout
    call = [python, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '--continue-on-collection-errors',
            f'--junitxml={report}', '-k', CHAPTERS, *TESTS]
    subprocess.run(call, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    return outcomes(report)


def main(*versions):
    "Try each version; all of them are recorded. The pinned version must fail no test"
    record = {}
    for version in versions or VERSIONS:
        passed, failed = tried(version)
        record[version] = dict(passed=passed, failed=sum(map(len, failed.values())),
                               reasons={why: len(tests) for why, tests in failed.items()})
        print(f'transformers {version}: {passed} passed, {record[version]["failed"]} failed', flush=True)
        for why, tests in failed.items(): print(f'    {why}', *tests, sep='\n        ')
    if not versions: RECORD.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')
    return bool(record.get(VERSIONS[-1], {}).get('failed'))

if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
