"Two distributions, built and installed where nothing else is; names for editors; hints for what is missing"
import inspect, os, re, runpy, shutil, subprocess, sys, tomllib
from importlib.metadata import version
from pathlib import Path

import pytest, specref, versions
from helpers import LONG
from book import public, references
from house import ROOT, anchors, foreign, tracked, undescribed
from written import STUB, stub
from specref.app.commands import parser
from specref.core import check
from specref.core.check import read_record, record_files

PINS = dict(line.split('==') for line in (ROOT/'constraints.txt').read_text().split())
PYPROJECT, MODELS = (tomllib.loads((ROOT/d/'pyproject.toml').read_text())['project'] for d in ('', 'models'))

# -- What is imported when it is first used ---------------------------------------------------------------

def test_editors_find_the_lazy_names():
    "`__init__.pyi` has what the chapters mark as public, and `dir` lists the same names"
    assert STUB.read_text(encoding='utf-8') == stub(), '`python tests/written.py` writes it again'
    assert {*specref.__all__, 'require', 'install_hint'} <= {*dir(specref)}

def run_without(packages, code):
    "What `code` prints where some packages are not installed"
    hidden = f'import sys; sys.modules.update(dict.fromkeys({packages!r}))\n{code}'
    call = [sys.executable, '-c', hidden]
    env = os.environ | dict(PYTHONPATH=f'{ROOT}:{ROOT/"models"}')
    return subprocess.run(call, env=env, check=True, capture_output=True, text=True).stdout

def refused(statement): return f'try: {statement}\nexcept ImportError as e: print(e)\n'

def test_the_error_for_a_missing_package_names_its_extra():
    "By a public name, by a module of the package and by `require`; an unknown module has no extra"
    asked = 'import specref', 'specref.HFModel', 'import specref.gpu.layout', 'specref.require("torch")'
    hints = run_without(['torch'], ''.join(map(refused, asked))).splitlines()
    assert len(hints) == 3
    assert all(re.match(r"torch: .*; wanted `pip install 'specref\[models\]'`", hint) for hint in hints)
    with pytest.raises(ModuleNotFoundError, match="^No module named 'specref.nothing'"):
        specref.require('specref.nothing')

def test_every_extra_installs_what_it_is_named_for():
    for extra, packages in specref.EXTRAS.items():
        wanted = {re.match(r'[\w-]+', need)[0] for need in PYPROJECT['optional-dependencies'][extra]}
        assert {p.replace('_', '-') for p in packages.split()} <= wanted, extra

OF_MODELS = ' '.join(PYPROJECT['optional-dependencies']['models'])
INCLUDED = re.search(r'specref\[([\w,]+)\]', OF_MODELS)[1].split(',')   # other extras
EXTRA = {p for extra in ('models', *INCLUDED) for p in specref.EXTRAS[extra].split()}
BESIDE = {'IPython': 'skips cells, in a notebook', 'accelerate': 'joins processes; its absence has a hint',
          'gguf': 'files for llama.cpp; its absence has a hint', 'numba': 'compiled passes',
          'llvmlite': 'comes with numba'} | dict.fromkeys(
    ('mlx', 'mlx_lm', 'onnxruntime_genai', 'openvino', 'openvino_genai', 'vllm', 'xllamacpp'),
    'engines as black boxes; no command calls them')

def test_the_extra_models_is_all_that_the_commands_import():
    "And each package of it is imported; an import in a function counts"
    subs = next(x for x in parser()._subparsers._group_actions if x.dest == 'command').choices.values()
    found = foreign({f'specref.{sub.get_default("runs_function").partition(":")[0]}' for sub in subs})
    assert found == {*EXTRA, *BESIDE, 'numpy'}

MISSING = """
import sys; sys.stderr = sys.stdout
from specref.app import commands
for argv in {}:
    try: commands.main(argv)
    except SystemExit: pass
print('torch' if sys.modules.get('torch') else '')
"""
MODELS_ONLY = [['tour'], ['decode', '--prompt', 'x'], ['bench'], ['certify', '--target', 'small'], ['record'],
               ['compare'], ['train'], ['convert', 'eagle', '--out', 'x', '--layout', 'eagle'],
               ['export', 'eagle', '--out', 'x', '--for', 'vllm']]

def test_a_command_without_its_packages_names_the_extra_in_one_line():
    "What needs no model runs with numpy alone; what is needed last is looked for before torch is loaded"
    *lines, _ = run_without([*EXTRA], MISSING.format(MODELS_ONLY)).splitlines()
    for argv, line in zip(MODELS_ONLY, lines, strict=True):
        assert re.match(rf"specref: {argv[0]}: \w+: .* wanted `pip install 'specref\[models\]'`$", line), line
    alone = [['metrics', os.devnull], ['judge', os.devnull], ['certify', '--system', 'autoregressive']]
    said = run_without([*EXTRA], MISSING.format(alone))
    words = 'wanted the counts of a server', 'judge: rule', 'mean tokens per target call'
    assert all(w in said for w in words) and 'pip install' not in said
    for package, argv in ('matplotlib', ['tour']), ('scipy', ['certify', '--target', 'small']):
        line, torch = run_without([package], MISSING.format([argv])).splitlines()
        assert line.startswith(f'specref: {argv[0]}: {package}: ') and not torch

def packed(project):
    "The data files that the wheel of the project in this folder will have"
    from setuptools.dist import Distribution
    dist = Distribution()
    dist.parse_config_files(['pyproject.toml'])
    build = dist.get_command_obj('build_py')
    build.ensure_finalized()
    build.manifest_files = {}   # no files are added beside those of the patterns
    return build.find_data_files(project, project)

def test_records_are_read_in_a_clone_and_from_the_wheel(monkeypatch, tmp_path):
    "The wheel of the models has what is JSON in records, and nothing else of it"
    monkeypatch.chdir(ROOT/'models')
    copies = {Path(f).name for f in packed('specref_models') if '/records/' in f}
    clone = record_files()
    stored = {f.name for f in (ROOT/'records').glob('*.json')}
    assert copies == {f.name for f in clone.values()} == stored
    folders = dict(specref=tmp_path, specref_models=ROOT/'models'/'specref_models')
    monkeypatch.setattr(check, 'package_folder', folders.get)
    assert {*clone} == {*record_files()} and clone != record_files() and read_record('noise')
    folders['specref_models'] = tmp_path
    with pytest.raises(ImportError, match=r'specref\[models\]'): read_record('noise')

def test_without_the_weights(monkeypatch):
    "The folder need not exist until a file of it is read; then the error says what to install"
    from specref.models import embedded
    monkeypatch.setitem(sys.modules, 'specref_models', None)
    assert not embedded.package_folder('specref_models').is_absolute() and embedded.is_embedded('small')
    for read, *args in [embedded.tokenizer], [embedded.corpus], [embedded.load_raw_model, 'small', None]:
        uncached = read.__wrapped__
        with pytest.raises(ImportError, match=r'^specref_models: .*specref\[models\]'): uncached(*args)

# -- Annotations and examples ------------------------------------------------------------------------------

def functions(x):
    "A function itself; of a class the constructor, the call, the public methods and properties of specref"
    if not inspect.isclass(x): return [x]
    bases = [vars(base) for base in x.__mro__[::-1] if base.__module__.startswith('specref')]
    own = {name: f for base in bases for name, f in base.items()
           if name[0] != '_' or name in ('__init__', '__call__')}
    def inside(f): return next((getattr(f, k) for k in ('fget', 'func', '__func__') if hasattr(f, k)), f)
    return [inside(f) for f in own.values() if inspect.isfunction(inside(f))]

def bare(f):
    "The parameters of a function, and its result, whose types are not stated; `object` states none"
    call, unknown = inspect.signature(f), (inspect.Parameter.empty, object)
    stars = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    named = [p for p in call.parameters.values() if p.kind not in stars and p.name not in ('self', 'cls')]
    result = call.return_annotation in unknown and not f.__name__.endswith(('__init__', '_init'))
    return [p.name for p in named if p.annotation in unknown] + ['its result'] * result

def test_public_names_are_annotated_and_have_an_example():
    "And each has its own name, also in `help`"
    found = {name: getattr(specref, name) for name in specref.__all__}
    called = {name: x for name, x in found.items() if callable(x)}
    missing = {(name, f.__name__): bare(f) for name, x in called.items() for f in functions(x) if bare(f)}
    assert len(called) >= 90 and not missing
    assert not [name for name, x in called.items() if '>>> ' not in (inspect.getdoc(x) or '')]
    assert not [name for name, x in called.items() if getattr(x, '__name__', name) != name]

def test_signatures_are_short_enough_for_help():
    "A table as a default would be printed in full"
    called = [x for x in map(specref.__getattr__, specref.__all__) if callable(x)]
    assert not [f.__name__ for x in called for f in functions(x) if len(str(inspect.signature(f))) > 1200]

def test_missing_annotations_are_found():
    def f(x: int, y, **more) -> object: return x
    class Rule:
        __module__ = 'specref'
        def step(self, p): return p
        @property
        def law(self) -> int: return 1
    assert bare(f) == ['y', 'its result']
    assert [bare(g) for g in functions(Rule)] == [['p', 'its result'], []]

STARS = {inspect.Parameter.VAR_POSITIONAL: '*', inspect.Parameter.VAR_KEYWORD: '**'}

def parameters(x):
    "The names in the signature; of a class that is made by no call of its own, its attributes"
    try: own = inspect.signature(x).parameters.values()
    except ValueError: own = ()   # a built-in base
    if inspect.isclass(x) and [p.name for p in own] in ([], ['args', 'kwargs']):
        return [*inspect.get_annotations(x)]
    return [f'{STARS.get(p.kind, "")}{p.name}' for p in own]

def test_public_names_describe_their_parameters():
    "By the names of the signature, with result, errors, source and see also; a planted fault is found"
    stated, keys, names = {a.partition('-')[2] for a, _ in anchors()}, references(), public()
    found = {name: getattr(specref, name) for name in names}
    def lacking(x, doc):
        return [*undescribed(doc, parameters(x), not inspect.isclass(x), names, stated, keys)]
    described = {name: x for name, x in found.items() if callable(x) and hasattr(x, '__name__')}
    assert not {name: lacks for name, x in described.items() if (lacks := lacking(x, inspect.getdoc(x)))}
    right, plants = inspect.getdoc(specref.generate), {
        '    ctx: ': '    text: ', 'Raises:': 'Errors:', 'Returns:': 'Gives:', 'rounds,': 'round,',
        'et al. 2023': 'et al. 2022', 'learning,': 'earning,', '>>> ': '> '}
    for part, wrong in plants.items(): assert len(lacking(specref.generate, right.replace(part, wrong))) == 1

def test_errors_are_raised_as_described():
    "A name with a `ValueError` has an invalid call in a table of refusals; other errors are raised somewhere"
    calls = ''.join(f.read_text() for f in (ROOT/'tests').glob('refusals_*.py'))
    code = ''.join(f.read_text() for f in (ROOT/'specref').rglob('*.py'))
    for name in public():
        raised = re.search('^Raises: (.*(?:\n +.*)*)', inspect.getdoc(getattr(specref, name)) or '', re.M)
        kinds = {*re.findall(r'\b(?:\w+Error|Unservable|Irreproducible)\b', raised[1] if raised else '')}
        assert 'ValueError' not in kinds or re.search(rf'\b{name}\b', calls), name
        assert all(re.search(rf'raise {kind}\b', code) for kind in kinds), (name, kinds)

def test_a_users_script_runs(capsys): runpy.run_path(str(ROOT/'tests'/'typed.py'))

# -- Two distributions ------------------------------------------------------------------------------------

def test_code_and_weights_are_apart():
    "No data stands in specref; the weights are a distribution of their own, in the version that is wanted"
    code = [f for f in tracked() if ROOT/'specref' in f.parents]
    assert {f.suffix or f.name for f in code} <= {'.py', '.pyi', '.typed'}
    version = MODELS['version'].rpartition('.')[0]
    assert f'{MODELS["name"]}=={version}.*' in PYPROJECT['optional-dependencies']['models']
    assert (ROOT/'models'/'LICENSE').read_bytes() == (ROOT/'LICENSE').read_bytes()

def build(project, out):
    "The source distribution of what git tracks in a folder, and the wheel that is built from that"
    source = out/f'source of {MODELS["name"] if project != ROOT else PYPROJECT["name"]}'
    for f in tracked():
        if project not in f.parents or (project == ROOT and ROOT/'models' in f.parents): continue
        to = source/f.relative_to(project)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f, to)
    records = project/'specref_models'/'records'   # a link, which git lists as no file
    if records.exists(): shutil.copytree(records, source/records.relative_to(project))
    call = [sys.executable, '-m', 'build', '--no-isolation', '-o', out/'dist', source]
    subprocess.run(call, check=True, capture_output=True, cwd=out)

@pytest.fixture
def dist(tmp_path):
    "The folder with both source distributions and both wheels"
    for project in ROOT, ROOT/'models': build(project, tmp_path)
    return tmp_path/'dist'

@pytest.fixture
def empty(tmp_path):
    "Calls the Python of a new virtual environment, away from the checkout, with no variable that leads there"
    subprocess.run([sys.executable, '-m', 'venv', tmp_path/'venv'], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith('PYTHON')}
    def run(*call):
        done = subprocess.run([tmp_path/'venv'/'bin'/'python', *call], cwd=tmp_path, env=env,
                              capture_output=True, text=True)
        assert not done.returncode, done.stderr[-3000:]
        return done.stdout
    yield run
    shutil.rmtree(tmp_path/'venv')   # a gigabyte

CORE = """
import specref
from specref import Chain, Seeded, TableModel, exact, law_of, reject, target_law
def laws(*w): return TableModel(3, lambda text: exact(*(w[(x + sum(text)) % 3] for x in range(3))))
target, drafter = laws(4, 2, 2), Chain(laws(1, 4, 3), gamma=2)
def decode(rng): return specref.generate(target, drafter, reject, ctx=(0,), n=3, rng=rng)
assert len(decode(Seeded(0))) == 3 and law_of(decode) == target_law(target, (0,), 3)
try: specref.embedded
except ImportError as e: print(e)
print(specref.__file__)
"""
PAIR = """
import torch
from specref import Chain, Seeded, embedded, generate, load_system, prompts, reject
target, draft = embedded('target', temperature=0), embedded('small', temperature=0)
print(*generate(target, Chain(draft, 4), reject, prompts('english', 1)[0], 16, Seeded(0)))
load_system('EAGLE')
from specref.core.check import read_record
print(read_record('noise'))
"""
INSTALLED = 'import importlib.metadata as m; print(*(d.name for d in m.distributions()))'

@pytest.mark.skipif(not LONG, reason='`make test-long` installs both distributions in an empty environment')
def test_both_wheels_in_an_empty_environment(dist, empty):
    """The core has at most 1 MB, runs with numpy alone and names the extra for the rest; `specref[models]`
    brings transformers, weights, texts and records, and the embedded pair decodes the same tokens as here"""
    def pip(*call): empty('-m', 'pip', 'install', '-q', *call)
    core, models = (next(dist.glob(f'{name}-*.whl')) for name in ('specref', 'specref_models'))
    assert core.stat().st_size <= 1e6 and len([*dist.glob('*.tar.gz')]) == 2
    pip(core)
    assert {*empty('-c', INSTALLED).split()} - {'pip', 'setuptools'} == {'numpy', 'specref'}
    hint, where = empty('-c', CORE).splitlines()
    assert re.match(r'torch: .*specref\[models\]', hint) and not Path(where).is_relative_to(ROOT)
    pins = '-c', ROOT/'constraints.txt'
    pip(*pins, 'torch')   # by itself, as in the Makefile
    pip(*pins, models, f'{core}[models]')
    here = subprocess.run([sys.executable, '-c', PAIR], cwd=ROOT, check=True, capture_output=True, text=True)
    assert here.stdout and empty('-c', PAIR) == here.stdout
    assert 'plot: ' in empty('-m', 'specref', 'tour', '--n', '4')

@pytest.mark.skipif(not LONG, reason='`make test-long` checks the types of a script in an empty environment')
def test_a_type_checker_accepts_a_users_script(dist, empty, tmp_path):
    "Beside the installed wheel of the core, whose own sources are not examined"
    empty('-m', 'pip', 'install', '-q', next(dist.glob('specref-*.whl')), 'mypy')
    script = tmp_path/'typed.py'
    shutil.copy(ROOT/'tests'/'typed.py', script)
    check = '-m', 'mypy', '--check-untyped-defs', '--cache-dir', tmp_path/'cache', script
    assert 'no issues found' in empty(*check)
    script.write_text(script.read_text() + 'generate(target, no_draft, block, (0,), "two", Seeded(0))\n')
    with pytest.raises(AssertionError): empty(*check)

def test_the_wheel_of_the_models_is_whole():
    """Its patterns hold every file of the folder. They alone count: of files beside them setuptools asks, in
    twenty lines for each folder, whether it was to be a package"""
    own = tomllib.loads((ROOT/'models'/'pyproject.toml').read_text())['tool']['setuptools']
    folder = ROOT/'models'/'specref_models'
    packed = {f for pattern in own['package-data']['specref_models'] for f in folder.glob(pattern)}
    files = {f for f in folder.rglob('*') if f.is_file() and f.suffix not in ('.py', '.pyc')}
    assert own['include-package-data'] is False and packed == files

# -- Versions of transformers -----------------------------------------------------------------------------

def test_the_versions_of_transformers_are_recorded():
    "The least version of pyproject.toml and the pinned one are tried; the pinned one fails nothing"
    record = read_record('versions')['releases']
    admitted = versions.bounds()['transformers']
    assert tuple(record) == versions.VERSIONS and versions.VERSIONS[-1] == PINS['transformers']
    assert [admitted.contains(version) for version in record] == [False, *[True]*(len(record) - 1)]
    assert versions.VERSIONS[1] == f'{versions.limit(admitted, ">=")}.0'
    pinned = record[PINS['transformers']]
    assert not pinned['failed'] and pinned['passed'] > 100

@pytest.mark.parametrize('package', versions.bounds())
def test_no_release_is_newer_than_those_that_were_tried(package):
    "The bound is the next release after the pin: the next major of numpy, the next minor of the others"
    admitted, here = versions.bounds()[package], version(package).partition('+')[0]
    major, minor = PINS[package].split('.')[:2]
    after = f'{int(major) + 1}' if package == 'numpy' else f'{major}.{int(minor) + 1}'
    assert versions.limit(admitted, '<') == after, 'a new pin moves the bound in pyproject.toml'
    assert admitted.contains(here), f'{package} {here}: `make compat-newest`, then move pin and bound'
