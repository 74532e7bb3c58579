"The rules of the repository hold, and each rule detects a planted violation"
import json, os, re, shutil, subprocess, sys, zipfile
from functools import partial
from pathlib import Path

import house, pytest
from house import PLAIN, ROOT, disagreements, export, light, tracked
from specref.core.check import provenance_of_run

RULES = (house.mirror, house.upward, house.downward, house.ambiguous, house.wide, house.linted,
         house.multiplied, house.untidy,
         house.machine_words, house.unproved, house.unfaithful, house.heavy, house.outside,
         house.unprepared, house.unrecorded, house.stale, house.remeasured, house.typed, house.cluttered,
         house.ungraded)

def none(found, hint=''):
    found = list(found)
    assert not found, '\n'.join([hint, *found])

@pytest.mark.parametrize('rule', RULES, ids=lambda r: r.__name__)
def test_rule(rule): none(rule(), rule.__doc__)

def test_rooms_are_those_of_the_guide():
    listed = re.findall(r'^\| `([\w.]+)` \|', (ROOT/'CONTRIBUTING.md').read_text(encoding='utf-8'), re.M)
    assert listed == house.ROOMS

def test_package_is_its_notebooks(tmp_path):
    "An export gives the modules of the package, byte for byte"
    if any((ROOT/'nbs').glob('*.ipynb')):
        made = export(ROOT/'nbs', ROOT/'pyproject.toml', tmp_path)
        none(disagreements(ROOT/'specref', made), '`make export` writes the package again')

# -- The wheel -----------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "The wheel, built from what git tracks, and the folder it is installed in"
    src, out, site = (tmp_path_factory.mktemp(d) for d in ('src', 'wheel', 'site'))
    for f in (f.relative_to(ROOT) for f in tracked()):
        if f.parts[0] in ('specref', 'pyproject.toml', 'README.md', 'LICENSE'):
            (src/f).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT/f, src/f)
    pip = partial(subprocess.run, check=True, capture_output=True)
    quiet = '-q', '--no-deps', '--no-index'
    pip([sys.executable, '-m', 'pip', 'wheel', *quiet, '--no-build-isolation', '-w', out, src])
    pip([sys.executable, '-m', 'pip', 'install', *quiet, '-t', site, *out.glob('*.whl')])
    return next(out.glob('*.whl')), site

def test_wheel_is_complete(wheel):
    "Every module and all package data are inside, and numpy alone is required"
    with zipfile.ZipFile(wheel[0]) as z:
        names = set(z.namelist())
        meta = z.read(next(n for n in names if n.endswith('/METADATA'))).decode()
    want = {f.relative_to(ROOT).as_posix() for f in tracked() if (ROOT/'specref') in f.parents}
    assert want <= names, f'missing: {sorted(want - names)}'
    needs = [l.split()[1] for l in meta.splitlines() if l.startswith('Requires-Dist') and 'extra ==' not in l]
    assert [re.match('\\w+', n)[0] for n in needs] == ['numpy'], needs

def test_wheel_brings_the_plugin(wheel):
    "The entry point names a module of the wheel, and a pytest that finds the wheel has its options"
    with zipfile.ZipFile(wheel[0]) as z:
        names = z.namelist()
        points = z.read(next(n for n in names if n.endswith('/entry_points.txt'))).decode()
    assert '[pytest11]\nspecref = specref.certify.plugin\n' in points
    assert 'specref/certify/plugin.py' in names
    env = {k: v for k, v in os.environ.items() if not k.startswith('PYTEST')} | dict(PYTHONPATH=str(wheel[1]))
    call = [sys.executable, '-m', 'pytest', '--help', '-p', 'no:hypothesispytest', '-p', 'no:cacheprovider']
    done = subprocess.run(call, cwd=wheel[1], env=env, check=True, capture_output=True, text=True)
    assert '--specref-sees' in done.stdout and 'specref_alpha' in done.stdout

def test_wheel_runs_on_numpy_alone(wheel, tmp_path):
    "Each module that needs numpy alone is imported from the installed wheel, with no other package"
    import numpy
    for f in Path(numpy.__file__).parents[1].glob('numpy*'): (tmp_path/f.name).symlink_to(f)
    code = ('import sys, importlib as i; sys.path[:0] = sys.argv[1:3]; '
            '[print(i.import_module(m).__file__) for m in sys.argv[3:]]')
    python = [sys.executable, '-IS', '-c', code, wheel[1], tmp_path, 'specref', *light()]
    r = subprocess.run(python, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert all(Path(l).is_relative_to(wheel[1]) for l in r.stdout.split()), r.stdout

def first_import(root):
    "Seconds that `import specref` takes after numpy, the least of five, and the other modules it loads"
    code = ('import sys, time, numpy\nold, start = set(sys.modules), time.perf_counter()\nimport specref\n'
            'seconds, new = time.perf_counter() - start, {m.split(".")[0] for m in set(sys.modules) - old}\n'
            'print(seconds, *new - sys.stdlib_module_names - {"numpy", "specref"})')
    def once():
        env = os.environ | dict(PYTHONPATH=str(root))
        done = subprocess.run([sys.executable, '-c', code], cwd=root, env=env,
                              check=True, capture_output=True, text=True)
        return done.stdout.split()
    runs = [once() for _ in range(5)]
    return min(float(r[0]) for r in runs), runs[0][1:]

def test_import_is_quick_and_needs_numpy_alone():
    seconds, foreign = first_import(ROOT)
    assert not foreign and seconds <= .2, f'import specref takes {seconds:.2f} s and loads {foreign}'

def test_the_lazy_names():
    "Each public name is the object its module defines; the front page and names of systems need numpy alone"
    import specref
    from importlib import import_module
    for name, module in specref.public().items():
        assert getattr(specref, name) is getattr(import_module(f'specref.{module}'), name)
        assert not (ROOT/'specref'/name).exists() and name in dir(specref)
    code = ('from specref import Chain, reject, block, exact, generate, law_of, Seeded, SYSTEMS, TRAINED\n'
            'SYSTEMS["K-SEQ"], [*SYSTEMS, *TRAINED]\n'
            'import sys\nprint(*{m.split(".")[0] for m in sys.modules})')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=os.environ | dict(PYTHONPATH=str(ROOT)),
                          check=True, capture_output=True, text=True)
    assert not {'torch', 'transformers', 'scipy', 'matplotlib'} & set(done.stdout.split())

# -- A small repository, correct until a violation is planted in it ------------------------------------

def code(source, *outputs, **metadata):
    own = dict(cell_type='code', metadata=metadata, execution_count=None, outputs=list(outputs))
    return prose(source) | own

def prose(source):
    return dict(cell_type='markdown', id=str(abs(hash(source)))[:8], metadata={}, source=source)

def result(value):
    return dict(output_type='execute_result', execution_count=None, metadata={}, data={'text/plain': value})

def write(root, stem, *cells, metadata=PLAIN):
    file = root/'nbs'/f'{stem}.ipynb'
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(dict(cells=cells, metadata=metadata, nbformat=4, nbformat_minor=5)))

def drawn(said, x):
    "A drawing of a box with a text in its middle, and a line up at x = 80"
    box = f'<rect x="10" y="4" width="{100 if x == 80 else 20}" height="20"/>'
    words = f'<text x="{x}" y="18" text-anchor="middle">{said}</text>'
    line = '<path d="M80 0L80 40" fill="none"/>'
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 120 40">'
    return result('Picture') | dict(data={'image/svg+xml': f'{head}{box}{words}{line}</svg>'})

TWICE = '#| export\ndef twice(x):\n    "Two of them"\n    return 2*x'
THRICE = '#| export\nfrom specref.core.law import twice\n\ndef thrice(x): return twice(x) + x'
RUN = '*To run it:* `pip install specref`.'
ASKED = '\n\n## Exercises\n\n1. One.\n2. Two.\n3. *Break it.* Three.'
LAW = [prose(f'# Law\n\n{RUN}\n\n> **Theorem two.**<a id="thm-two"></a> One and one.{ASKED}'),
       code('#| default_exp core.law'), code(TWICE), code('twice(1) + 1', result('3'))]
USE = [prose(f'# Use\n\n{RUN}{ASKED}'), code('#| default_exp core.use'), code(THRICE),
       code('twice(2), 4', result('(4, 4)'))]

@pytest.fixture
def small(tmp_path):
    "A repository of two chapters and a module of checks below them"
    for f in ('pyproject.toml', 'settings.ini', 'CITATION.cff', 'CHANGELOG.md'): shutil.copy(ROOT/f, tmp_path)
    for d in ('specref/core', 'tests', 'docs', 'records'): (tmp_path/d).mkdir(parents=True)
    (tmp_path/'docs/refs.bib').write_text('@misc{first2023,\n}\n')
    shutil.copy(ROOT/'specref/__init__.py', tmp_path/'specref')
    write(tmp_path, '00_law', *LAW)
    write(tmp_path, '01_use', *USE)
    for name, source in dict(check='def check_this(x): return x\n',
                             law='from .check import check_this\n\ndef twice(x): return 2*check_this(x)\n',
                             use='from .law import twice\n\ndef thrice(x): return twice(x) + x\n').items():
        (tmp_path/f'specref/core/{name}.py').write_text(source)
    (tmp_path/'tests/test_law.py').write_text('proves = print\n\n@proves("thm-two")\ndef test_two(): pass\n')
    subprocess.run(['git', 'init', '-q', tmp_path], check=True)
    return tmp_path

def law(*cells, **kw): return lambda root: write(root, '00_law', *LAW, *cells, **kw)
def file(name, content): return lambda root: (root/name).write_text(content)
def swap(name, old, new):
    return lambda root: (root/name).write_text((root/name).read_text().replace(old, new))
def both(*plants):
    def plant(root):
        (root/'specref/app').mkdir(exist_ok=True)
        for p in plants: p(root)
    return plant

table = both(file('specref/app/systems.py', 'SYSTEMS.declare("chain", chain_system(2), "first2023")\n'))
def stored(**more):
    "A record of 1.2499 as it is written, and the target that makes it"
    def plant(root):
        made = provenance_of_run('make one')
        (root/'Makefile').write_text('one:\n\nrecord-%:\n')
        (root/'records/one.json').write_text(json.dumps(made | dict(rows=[dict(tokens=1.2499)]) | more))
    return plant

def read(*cells): return both(stored(), law(code('read_record("one")["date"]', result('2')), *cells))
def faithful_test(how): return file('tests/test_chain.py', f'@faithful({how})\ndef test_chain(): pass\n')

PLANTS = {
    'another version in settings.ini': (house.mirror, swap('settings.ini', 'version = ', 'version = 9.')),
    'a module that imports upward': (
        house.upward, file('specref/core/law.py', 'from .use import thrice\n\ntwice = thrice\n')),
    'a room that imports from a later one': (
        house.downward, file('specref/core/law.py', 'def f():\n    from ..app import use\n')),
    'training below its room': (
        house.downward, file('specref/core/law.py', 'from ..models.recipe import fit\n')),
    'a chapter without a module that imports a later number': (house.upward, lambda root: write(
        root, '00a_read', prose('# Read'), code('from specref.core.use import thrice'))),
    'a name with two meanings': (house.ambiguous, file('specref/core/use.py', 'def twice(x): return 3*x\n')),
    'a wide line in a module': (house.wide, file('specref/core/law.py', f'x = "{"a"*110}"\n')),
    'a wide line in a cell': (house.wide, law(code(f'x = "{"a"*110}"'))),
    'two statements in a line': (house.linted, law(code('x = 1; y = 2'))),
    'a function of sixteen statements': (house.linted, law(code('def f(x):\n' + '    x += 1\n'*16))),
    'an if by multiplication': (
        house.multiplied, file('specref/core/law.py', 'def s(n): return "s" * (n > 1)\n')),
    'an unstored value': (house.untidy, law(code('1 + 1'))),
    'a file beside the notebooks': (house.outside, law(code('open("../docs/a.json")'))),
    'another notebook, which may not be there': (
        house.outside, law(code('Path("00_law.ipynb").read_text()'))),
    'an import from the tests': (house.outside, law(code('from test_law import test_two'))),
    'a package that the first cell does not name': (house.unprepared, law(code('import torch'))),
    'a path in an output': (house.untidy, law(code('f.name', result("'/tm" "p/a1'")))),
    'a host in a file': (house.machine_words, file('notes.txt', 'from py' 'pi.org')),
    'a theorem without a test': (house.unproved, law(prose('<a id="thm-three"></a>'))),
    'a test of no theorem': (house.unproved, swap('tests/test_law.py', 'thm-two', 'thm-ten')),
    'a system without its test': (house.unfaithful, table),
    'a test of a part alone': (
        house.unfaithful, both(table, faithful_test('"chain", part="Chain", plain={"a star": 1}'))),
    'a test that nothing plainer fails': (house.unfaithful, both(table, faithful_test('"chain"'))),
    'a test of a system of no table': (house.unfaithful, faithful_test('"star", plain={"a chain": 1}')),
    'a record without its command': (house.unrecorded, stored(command='')),
    'a record without versions': (house.unrecorded, stored(versions={})),
    'a command that no target has': (house.unrecorded, stored(command='make two')),
    'a command whose script is not there': (house.unrecorded, stored(command='make record-one')),
    'a script of a record whose import is gone': (
        house.stale, file('records/one.py', 'from specref.core.law import thrice\n')),
    'an import of the Makefile that is gone': (
        house.stale, file('Makefile', 'one:\n\tpython -c "from specref.core.law import thrice; thrice()"\n')),
    'a record printed by a measured cell': (house.remeasured, read(
        code('print(read_record("one")["date"])', tags=['measured']))),
    'data without a record': (house.unrecorded, file('records/two.npz', '')),
    'a number of a record, rounded, in prose': (house.typed, read(prose('So it is 1.25 tokens.'))),
    'a number that a cell prints, in prose': (
        house.typed, both(read(code('.07/2', result('0.035')), prose('It rises by $.035\\pm.01$.')))),
    'a text that leaves its box': (house.cluttered, law(code('1 + 1;', drawn('too long', 20)))),
    'a line behind a box': (house.cluttered, law(code('1 + 1;', drawn('a', 80)))),
    'a chapter without exercises': (house.ungraded, lambda root: write(root, '02_more', prose('# More'))),
    'two exercises': (house.ungraded, law(prose('## Exercises\n\n1. One.\n2. *Break it.* Two.'))),
    'exercises that break nothing': (
        house.ungraded, law(prose('## Exercises\n\n1. One.\n2. Two.\n3. Three.'))),
    'a framework behind a first chapter': (
        house.heavy, both(file('specref/core/big.py', 'import torch\n\nx = torch\n'),
                          file('specref/core/law.py', 'from .big import x\n\ntwice = x\n'))),
}

def test_a_faithful_system_violates_nothing(small):
    both(table, faithful_test('"chain", plain={"a star": 1}'))(small)
    none(house.unfaithful(small))

def test_numbers_of_others_and_of_formulas_may_be_typed(small):
    read(prose('The paper reports 1.25 tokens. Python 1.25 suffices. Let $x=1.25$.'))(small)
    none((*house.typed(small), *house.unrecorded(small)))

@pytest.mark.parametrize('what', PLANTS)
def test_rule_detects_a_violation(small, what):
    rule, plant = PLANTS[what]
    none(rule(small))
    plant(small)
    assert list(rule(small))

def test_disagreements_are_found(small, tmp_path_factory):
    "A module edited by hand, one without a notebook and a chapter never exported are each found"
    other = tmp_path_factory.mktemp('other')/'specref'
    shutil.copytree(small/'specref', other)
    none(disagreements(small/'specref', other))
    (other/'core/law.py').write_text('def twice(x): return 3*x\n')
    (other/'core/new.py').write_text('')
    (small/'specref/core/old.py').write_text('')
    assert [l for l in disagreements(small/'specref', other) if l[0] not in '-+@'] == [
        'core/law.py is not what its notebook exports', 'core/new.py was never exported',
        'core/old.py comes from no notebook']
