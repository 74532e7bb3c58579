"The house keeps its rules, and each rule is seen to fail where a violation is planted"
import json, os, shutil, subprocess, sys, zipfile
from functools import partial
from pathlib import Path

import house, pytest
from house import BY_HAND, PLAIN, ROOT, disagreements, export, light, notebooks, tracked

RULES = house.mirror, house.upward, house.overlong, house.untidy, house.machine_words, house.unproved, house.unfaithful, house.heavy

def none(found, hint=''):
    found = list(found)
    assert not found, '\n'.join([hint, *found])

@pytest.mark.parametrize('rule', RULES, ids=lambda r: r.__name__)
def test_rule(rule): none(rule(), rule.__doc__)

def test_package_is_its_notebooks(tmp_path):
    "An export makes the modules of the package, byte for byte"
    if any((ROOT/'nbs').glob('*.ipynb')):
        none(disagreements(ROOT/'specref', export(ROOT/'nbs', ROOT/'pyproject.toml', tmp_path, 'nbdev-export')), '`make export` writes the package anew')

# -- The wheel -------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "The wheel, built from what git tracks, and the folder it is installed in"
    src, out, site = (tmp_path_factory.mktemp(d) for d in ('src', 'wheel', 'site'))
    for f in (f.relative_to(ROOT) for f in tracked()):
        if f.parts[0] in ('specref', 'pyproject.toml', 'README.md', 'LICENSE'):
            (src/f).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT/f, src/f)
    pip = partial(subprocess.run, check=True, capture_output=True)
    pip([sys.executable, '-m', 'pip', 'wheel', '-q', '--no-build-isolation', '--no-deps', '--no-index', '-w', out, src])
    pip([sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--no-index', '-t', site, *out.glob('*.whl')])
    return next(out.glob('*.whl')), site

def test_wheel_is_complete(wheel):
    "Every module and all package data are inside, and numpy alone is asked for"
    with zipfile.ZipFile(wheel[0]) as z:
        names, meta = set(z.namelist()), z.read(next(n for n in z.namelist() if n.endswith('/METADATA'))).decode()
    want = {f.relative_to(ROOT).as_posix() for f in tracked() if (ROOT/'specref') in f.parents}
    assert want <= names, f'missing: {sorted(want - names)}'
    needs = [l.split()[1] for l in meta.splitlines() if l.startswith('Requires-Dist') and 'extra ==' not in l]
    assert [n.split('>')[0] for n in needs] == ['numpy'], needs

def test_wheel_runs_on_numpy_alone(wheel, tmp_path):
    "Each module that needs numpy alone is imported from the installed wheel where numpy is all there is"
    import numpy
    for f in Path(numpy.__file__).parents[1].glob('numpy*'): (tmp_path/f.name).symlink_to(f)
    code = 'import sys, importlib as i; sys.path[:0] = sys.argv[1:3]; [print(i.import_module(m).__file__) for m in sys.argv[3:]]'
    r = subprocess.run([sys.executable, '-IS', '-c', code, wheel[1], tmp_path, 'specref', *light()], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert all(Path(l).is_relative_to(wheel[1]) for l in r.stdout.split()), r.stdout

def first_import(root):
    "Seconds that `import specref` takes after numpy, the least of five, and the foreign modules it brings"
    code = 'import sys, time, numpy; old = set(sys.modules); t = time.perf_counter(); import specref; t = time.perf_counter() - t\n' \
           'print(t, *{m.split(".")[0] for m in set(sys.modules) - old} - sys.stdlib_module_names - {"numpy", "specref"})'
    runs = [subprocess.run([sys.executable, '-c', code], cwd=root, env=os.environ | dict(PYTHONPATH=str(root)), check=True,
                           capture_output=True, text=True).stdout.split() for _ in range(5)]
    return min(float(r[0]) for r in runs), runs[0][1:]

def test_import_is_quick_and_needs_numpy_alone():
    seconds, foreign = first_import(ROOT)
    assert not foreign and seconds <= .2, f'import specref takes {seconds:.2f} s and brings {foreign}'

def test_a_name_means_one_thing():
    "Whatever was imported before: the name of a chapter is the chapter, any other public name is what the chapter defines"
    asks = 'assert specref.verify.reject.__name__ == "specref.verify.reject" and specref.certify.certificates.__name__ == "specref.certify.certificates" and specref.generate is specref.core.loop.generate'
    for first in ('pass', 'from specref.verify.reject import reject', 'import specref.certify.certificates', 'from specref import reject, Chain, generate'):
        subprocess.run([sys.executable, '-c', f'import specref\n{first}\n{asks}'], cwd=ROOT, env=os.environ | dict(PYTHONPATH=str(ROOT)), check=True)
    assert not hasattr(__import__('specref'), 'nonsense')

# -- Teeth: a small house, sound until something is planted in it ----------------------------------------------------------

def code(source, *outputs, **metadata):
    return dict(cell_type='code', id=str(abs(hash(source)))[:8], metadata=metadata, execution_count=None, source=source, outputs=list(outputs))

def prose(source): return dict(cell_type='markdown', id=str(abs(hash(source)))[:8], metadata={}, source=source)

def result(value): return dict(output_type='execute_result', execution_count=None, metadata={}, data={'text/plain': value})

def write(root, stem, *cells, metadata=PLAIN):
    file = root/'nbs'/f'{stem}.ipynb'
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(dict(cells=cells, metadata=metadata, nbformat=4, nbformat_minor=5)))

TWICE = '#| export\ndef twice(x):\n    "Two of them"\n    return 2*x'
LAW = [prose('# Law\n\n> **Theorem (Two).**<a id="thm-two"></a> One and one.'), code('#| default_exp law'), code(TWICE), code('twice(1) + 1', result('3'))]
USE = [prose('# Use'), code('#| default_exp use'), code('#| export\nfrom specref.core.law import twice'), code('twice(2), 4', result('(4, 4)'))]

@pytest.fixture
def small(tmp_path):
    "A house of two chapters"
    for f in ('pyproject.toml', 'settings.ini', 'CITATION.cff', 'CHANGELOG.md'): shutil.copy(ROOT/f, tmp_path)
    for d in ('specref', 'tests'): (tmp_path/d).mkdir()
    shutil.copy(ROOT/'specref/__init__.py', tmp_path/'specref')
    write(tmp_path, '00_law', *LAW)
    write(tmp_path, '01_use', *USE)
    (tmp_path/'specref/law.py').write_text('def twice(x): return 2*x\n')
    (tmp_path/'specref/use.py').write_text('from .law import twice\n')
    (tmp_path/'tests/test_law.py').write_text('@proves("thm-two")\ndef test_two(): pass\n')
    subprocess.run(['git', 'init', '-q', tmp_path], check=True)
    return tmp_path

def law(*cells, **kw): return lambda root: write(root, '00_law', *LAW, *cells, **kw)
def file(name, content): return lambda root: (root/name).write_text(content)
def swap(name, old, new): return lambda root: (root/name).write_text((root/name).read_text().replace(old, new))

BODY = '\n'.join(f'    x += {i}' for i in range(house.PAGE))
PLANTS = {
    'another version in settings.ini': (house.mirror, swap('settings.ini', 'version = ', 'version = 9.')),
    'another description': (house.mirror, swap('pyproject.toml', 'description = "', 'description = "No ')),
    'another version cited': (house.mirror, swap('CITATION.cff', 'version: 0', 'version: 9')),
    'a release without a word': (house.mirror, swap('CHANGELOG.md', '## ', '## 9')),
    'a cell that imports upward': (house.upward, law(code('from specref.use import twice'))),
    'a name imported upward': (house.upward, law(code('def f():\n    from specref import use'))),
    'a module that imports upward': (house.upward, file('specref/law.py', 'from .use import twice')),
    'a chapter that imports itself': (house.upward, law(code('import specref.core.law'))),
    'letters out of order': (house.upward, lambda root: (write(root, '21a_b', code('#| default_exp b')), write(root, '21_a', code('import specref.b')))),
    'a long function': (house.overlong, file('specref/law.py', f'def f(x):\n{BODY}')),
    'a long method': (house.overlong, file('specref/law.py', f'class A:\n  def f(x):\n{BODY}')),
    'a long cell': (house.overlong, law(code('#| export\nx = 0\n' + BODY.replace('    ', '')))),
    'a long chapter': (house.overlong, law(*[code(f'#| export\nx{i} = {i}') for i in range(house.CHAPTER)])),
    'another kernel': (house.untidy, law(metadata=PLAIN | dict(kernelspec=dict(name='venv')))),
    'an id given twice': (house.untidy, law(LAW[0])),
    'a timing': (house.untidy, law(code('pass', execution=dict(busy=1)))),
    'an unstored value': (house.untidy, law(code('1 + 1'))),
    'an unstored print': (house.untidy, law(code('print(1); x = 2'))),
    'a chapter that shows nothing': (house.untidy, lambda root: write(root, '03_a', code('x = 1'))),
    'an error': (house.untidy, law(code('1/0', dict(output_type='error', ename='ZeroDivisionError', evalue='', traceback=[])))),
    'a warning': (house.untidy, law(code('f()', dict(output_type='stream', name='stderr', text='slow')))),
    'a count': (house.untidy, law(code('5', result('5') | dict(execution_count=3)))),
    'a path in the source': (house.untidy, law(prose('See /ho' 'me/me/notes.'))),
    'a path in an output': (house.untidy, law(code('f.name', result("'/tm" "p/a1'")))),
    'an address': (house.untidy, law(code('f', result('<f at 0x7fe0123456>')))),
    'a name that is not its module': (house.untidy, lambda root: write(root, '02_tree', code('#| default_exp trees'))),
    'a path in a file': (house.machine_words, file('notes.md', 'in /ro' 'ot/a')),
    'a host in a file': (house.machine_words, file('notes.txt', 'from py' 'pi.org')),
    'a theorem without a proof': (house.unproved, law(prose('<a id="thm-three"></a>'))),
    'a theorem stated twice': (house.unproved, law(prose('<a id="thm-two"></a>'))),
    'a proof of nothing': (house.unproved, file('tests/test_b.py', '@proves("thm-ten")\ndef test_b(): pass')),
    'a proof that is no test': (house.unproved, file('tests/test_law.py', '@proves("thm-two")\ndef two(): pass')),
    'a system without its test': (house.unfaithful, file('specref/systems.py', 'SYSTEMS = {"chain": None}')),
    'a test of no system': (house.unfaithful, file('tests/test_b.py', '@faithful("chain")\ndef test_b(): pass')),
    'a framework in a first chapter': (house.heavy, file('specref/law.py', 'import torch')),
    'a framework behind a first chapter': (house.heavy, lambda root: (file('specref/big.py', 'import torch')(root), file('specref/law.py', 'from .big import x')(root))),
}

@pytest.mark.parametrize('what', PLANTS)
def test_rule_has_teeth(small, what):
    rule, plant = PLANTS[what]
    for r in RULES: none(r(small))
    plant(small)
    assert list(rule(small))

def test_reason_is_heard(small):
    "A stated reason lets a function, a cell and a chapter grow"
    file('specref/law.py', f'def f(x):\n    # long: one table\n{BODY}')(small)
    cells = [code('#| default_exp law\n# long: one table'), code('#| export\n# long: one table\nx = 0\n' + BODY.replace('    ', ''))]
    write(small, '00_law', *cells, *[code(f'#| export\nx{i} = {i}') for i in range(house.CHAPTER)])
    none(house.overlong(small))

def test_disagreement_has_teeth(small, tmp_path_factory):
    "A module edited by hand, an orphan and a chapter never exported are each found"
    other = tmp_path_factory.mktemp('other')/'specref'
    shutil.copytree(small/'specref', other)
    none(disagreements(small/'specref', other))
    (other/'law.py').write_text('def twice(x): return 3*x\n')
    (other/'new.py').write_text('')
    (small/'specref/old.py').write_text('')
    (small/'specref/__main__.py').write_text('')
    assert [l for l in disagreements(small/'specref', other) if l[0] not in '-+@'] == [
        'law.py is not what its notebook exports', 'new.py was never exported', 'old.py comes from no notebook']
    assert '+def twice(x): return 3*x' in disagreements(small/'specref', other)

def test_first_import_has_teeth(small):
    file('specref/__init__.py', 'import time, scipy; time.sleep(.2)')(small)
    seconds, foreign = first_import(small)
    assert seconds > .2 and 'scipy' in foreign
