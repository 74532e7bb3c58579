"Notebooks are read, run, exported, compared and checked; `run` and `compat` are commands"
import ast, configparser, difflib, json, multiprocessing, os, re
import shutil, subprocess, sys, tempfile, tomllib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from warm import execute

sys.path.append(str(Path(__file__).resolve().parents[1]/'docs'))
from book import DOC_PARTS, ROOT, Notebook, anchors, by_name, declared, doc_parts, marked, marks, notebooks
from book import order, text, works

import specref

WIDTH = 110
BY_HAND = {'__init__.py', '__main__.py', '_modidx.py'}  # nbdev writes _modidx.py, git does not track it
PLAIN = dict(kernelspec=dict(display_name='Python 3', language='python', name='python3'),
             language_info=dict(name='python'))
MACHINE = re.compile(r'(?<![\w.~])/(?:home|root|work|Users|opt|tmp|private)/\w|\w:\\Users|site[-]packages'
                     r'|pypi[.](?:org|io)|[p]ythonhosted|download[.]pytorch|registry[.]npm|deb[.]debian')

# -- Reading ---------------------------------------------------------------------------------------

def modules(root=ROOT): return sorted(f for f in (root/'specref').rglob('*.py') if f.name not in BY_HAND)

def parse(source):
    "The syntax tree of a cell, magics and shell lines left out"
    return ast.parse(re.sub(r'^(\s*)[%!].*', r'\1pass', source, flags=re.M))

def shown_output(cell):
    "The outputs that a run must reproduce: standard output, text of every kind, and that a picture is there"
    for o in cell['outputs']:
        if o['output_type'] == 'stream' and o['name'] == 'stdout': yield text(o['text'])
        for kind, x in sorted(o.get('data', {}).items()):
            yield text(x) if kind.startswith('text/') else f'<{kind}>'

# -- Running ---------------------------------------------------------------------------------------

class CellFailed(Exception): pass

@dataclass
class Spent:
    "CPU seconds of notebooks, which are no children of this process"
    seconds: float = 0.
    warm: bool = False

SPENT = Spent()

@cache
def warm_process():
    "A context whose processes are forked from one that has imports, models and corpus loaded (preload.py)"
    context, old = multiprocessing.get_context('forkserver'), dict(os.environ)
    paths = f'{ROOT}:{ROOT/"tests"}'
    os.environ |= dict(OMP_NUM_THREADS='1', PYTHONHASHSEED='0', PYTHONPATH=paths, TRITON_INTERPRET='1',
                       IPYTHONDIR=tempfile.mkdtemp(), MPLBACKEND='module://matplotlib_inline.backend_inline')
    context.set_forkserver_preload(['preload'])
    multiprocessing.forkserver.ensure_running()
    os.environ.clear()
    os.environ |= old
    return context

def in_fork(path, sources, patience):
    "The result of `execute` in a fork of the warm process"
    answer, pipe = warm_process().Pipe(duplex=False)
    process = warm_process().Process(target=execute, args=(path, sources, pipe))
    process.start()
    pipe.close()
    if not answer.poll(patience): process.kill()
    try: return answer.recv()
    except EOFError:
        raise CellFailed(f'{path.name}: the process ended, or took more than {patience} seconds') from None

def run(path, patience=600):
    "The notebook run from top to bottom on one thread, in a fork of the warm process, in plain form"
    import nbformat
    path, nb = Path(path).resolve(), nbformat.read(path, 4)
    code = [c for c in nb.cells if c.cell_type == 'code']
    sources = ['' if skipped(c) else c.source for c in code]
    outputs, seconds, start, failure = in_fork(path, sources, patience)
    SPENT.seconds, SPENT.warm = SPENT.seconds + seconds + (not SPENT.warm)*start, True
    if failure: raise CellFailed(f'{path.name}: {failure}')
    for c, out in zip(code, outputs, strict=True): c.outputs = [nbformat.from_dict(o) for o in out]
    return plain(nb)

def plain(nb):
    "The notebook without what differs from run to run: counts, times, standard error, the kernel's version"
    nb.metadata = PLAIN
    for c in nb.cells:
        c.metadata = {k: v for k, v in c.metadata.items() if k == 'tags'}
        if c.cell_type != 'code': continue
        c.execution_count, c.outputs = None, [o for o in c.outputs if o.get('name') != 'stderr']
        for o in c.outputs:
            if 'execution_count' in o: o.execution_count = None
    return nb

def measured(cell): return 'measured' in cell['metadata'].get('tags', [])

def skipped(cell):
    "Cells that measure for long and define nothing for others: once stored, `make test-long` alone runs them"
    stored = measured(cell) and 'long' in cell['metadata']['tags'] and cell['outputs']
    return bool(stored) and not os.environ.get('SPECREF_LONG')

def store(path):
    "Run a notebook and store its outputs in place; those of a `measured` cell stay as they are"
    import nbformat
    old = {c.id: c for c in nbformat.read(path, 4).cells}
    nb = run(path)
    for c in nb.cells:
        if measured(c) and old[c.id].outputs: c.outputs = old[c.id].outputs
    nbformat.write(nb, path)

def changes(path):
    "How a fresh run differs from the stored outputs, as a diff per cell"
    for old, new in zip(Notebook(Path(path)).cells, run(path).cells, strict=True):
        if new.cell_type == 'code' and not measured(new):
            before, after = (''.join(shown_output(cell)) for cell in (old, new))
            yield from diff(f'stored {new.id}', f'run {new.id}', before, after)

# -- Exporting -------------------------------------------------------------------------------------

EXPORT = 'from nbdev.doclinks import nbdev_export; nbdev_export()'   # of both versions of nbdev
def export(nbs, config, into):
    "Export a copy of the notebooks, with that configuration alone beside it"
    shutil.copytree(nbs, into/'nbs', ignore=shutil.ignore_patterns('.*', '_*'))
    shutil.copy(config, into)
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}  # nbdev exports nothing where it stands
    r = subprocess.run([sys.executable, '-c', EXPORT], cwd=into, env=env, capture_output=True, text=True)
    if r.returncode: raise RuntimeError(f'nbdev failed:\n{r.stderr}')
    return into/'specref'

def sources(lib): return {f.relative_to(lib).as_posix(): f.read_bytes().decode() for f in modules(lib.parent)}

def diff(a, b, old, new):
    "The unified diff of two texts, without context"
    return difflib.unified_diff(old.splitlines(), new.splitlines(), a, b, n=0, lineterm='')

def disagreements(here, there, view=lambda text: text):
    "How the modules in one package differ from those in another"
    a, b = sources(here), sources(there)
    for f in sorted(a.keys() | b.keys()):
        if f not in b: yield f'{f} comes from no notebook'
        elif f not in a: yield f'{f} was never exported'
        elif view(a[f]) != view(b[f]):
            yield f'{f} is not what its notebook exports'
            yield from diff(f'specref/{f}', f'notebook of {f}', view(a[f]), view(b[f]))

def unmarked(text): return '\n'.join(l for l in text.splitlines() if not l.startswith('# %%'))

def compat(root=ROOT):
    "Whether this Python's nbdev 2 exports, given `settings.ini` alone, the sources in the package"
    with tempfile.TemporaryDirectory() as d:
        lib = export(root/'nbs', root/'settings.ini', Path(d))
        exact = list(disagreements(root/'specref', lib))
        rest = list(disagreements(root/'specref', lib, unmarked))
        n = len(sources(lib))
    print(*rest, sep='\n', end='\n'*bool(rest))
    less = ', cell markers (`# %%` lines) left out' if exact and not rest else ''
    verdict = 'different' if rest else 'the same' + less
    print(f'nbdev 2 from settings.ini: {n} modules, {verdict}; not compared: {", ".join(sorted(BY_HAND))}')
    return bool(rest) or not n

# -- Rules: each yields its violations -------------------------------------------------------------

def mirror(root=ROOT):
    "`settings.ini`, `CITATION.cff` and `CHANGELOG.md` agree with `pyproject.toml` and `__version__`"
    toml = tomllib.loads((root/'pyproject.toml').read_text())
    proj, nbdev = toml['project'], toml['tool']['nbdev']
    version = re.search(r'__version__ = "(.+)"', (root/nbdev['lib_path']/'__init__.py').read_text())[1]
    want = dict(repo=proj['name'], lib_name=proj['name'], version=version,
        min_python=proj['requires-python'].lstrip('>='),
        license={'Apache-2.0': 'apache2'}[proj['license']], description=proj['description'],
        keywords=' '.join(proj['keywords']),
        author=proj['authors'][0]['name'], requirements=' '.join(proj['dependencies']),
        **{k: nbdev[k] for k in ('lib_path', 'nbs_path', 'doc_path')},
        update_pyproject=str(nbdev['update_pyproject']))
    ini = configparser.ConfigParser()
    ini.read(root/'settings.ini')
    for k, v in want.items():
        got = ini['DEFAULT'].get(k)
        if got != v: yield f'settings.ini: {k} = {got}, pyproject.toml: {v}'
    wants = {'CITATION.cff': f'\nversion: {version}\n', 'CHANGELOG.md': f'## [{version}]'}
    for file, wanted in wants.items():
        if wanted not in (root/file).read_text(): yield f'{file}: nothing about {version}'

def imported(nodes, package='specref'):
    "Every dotted name that these syntax nodes import, relative ones resolved in `package`"
    for n in nodes:
        if isinstance(n, ast.Import): yield from (a.name for a in n.names)
        if isinstance(n, ast.ImportFrom):
            parts = package.split('.')[:len(package.split('.')) - n.level + 1] if n.level else []
            base = '.'.join(parts + [n.module]*bool(n.module))
            yield base
            yield from (f'{base}.{a.name}' for a in n.names)

def dotted(file, root=ROOT): return '.'.join(file.relative_to(root).with_suffix('').parts)

def package(file, root=ROOT): return '.'.join(file.relative_to(root).parent.parts)

def leaves(root=ROOT):
    "The modules that import nothing of this package: their chapters may stand anywhere"
    for f in modules(root):
        names = imported(ast.walk(ast.parse(f.read_text(encoding='utf-8'))), package(f, root))
        own = any(name.split('.')[0] == 'specref' for name in names)
        if not own: yield dotted(f, root)

def upward(root=ROOT):
    """Imports that do not run downward in chapter number, in modules and cells; leaves may stand anywhere,
    and a chapter without a module may import that of its own appendix (16 from 16a)"""
    nbs, free = notebooks(root), set(leaves(root))
    at = {f'specref.{nb.module}': nb for nb in nbs if nb.module and f'specref.{nb.module}' not in free}
    def trees(nb):
        file = root/'specref'/f'{(nb.module or "").replace(".", "/")}.py'
        if file.is_file(): yield ast.parse(file.read_text(encoding='utf-8')), package(file, root)
        yield from ((parse(c['source']), 'specref') for c in nb.code)
    for nb in nbs:
        names = {name for tree, pkg in trees(nb) for name in imported(ast.walk(tree), pkg)}
        for name in sorted(names & at.keys()):
            place = at[name]
            appendix = not nb.module and place.order[0] == nb.order[0]
            if place.order >= nb.order and not appendix:
                yield f'{nb.path.stem} imports {name}, which is {place.path.stem}'

ROOMS = 'core verify speed models draft gpu train serve bytes certify gpu.bench app'.split()

def downward(root=ROOT):
    """Imports that do not run down the list of rooms: a folder imports from itself and from those before it;
    and training that stands before its room"""
    def room(name): return next((r for r in reversed(ROOMS) if f'{name}.'.startswith(f'specref.{r}.')), None)
    for f in modules(root):
        tree, own = ast.parse(f.read_text(encoding='utf-8')), room(dotted(f, root))
        if own is None: continue
        for name in sorted({*imported(ast.walk(tree), package(f, root))}):
            if room(name) and ROOMS.index(room(name)) > ROOMS.index(own):
                yield f'{dotted(f, root)} imports {name}, whose room comes later'
            if name == 'specref.models.recipe.fit' and ROOMS.index(own) < ROOMS.index('train'):
                yield f'{dotted(f, root)} trains, which is done in train'

def eager(tree):
    "The nodes that run when a module is imported: all but the insides of functions"
    for n in ast.iter_child_nodes(tree):
        yield n
        if not isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)): yield from eager(n)

OPTIONAL = 'tqdm', 'matplotlib', 'accelerate', 'triton', 'gguf'   # required where one asks for what they do

def needs(root=ROOT, later=False):  # -> {module: packages}
    "The packages of others that importing a module imports; `later`: or that its functions do"
    trees = {dotted(f, root): (f, ast.parse(f.read_text(encoding='utf-8'))) for f in modules(root)}
    def said(f, tree):
        now = set(imported(eager(tree), package(f, root)))
        inside = {*imported(ast.walk(tree), package(f, root)), *looked_up(ast.walk(tree))} if later else ()
        return now | {n for n in inside if n.split('.')[0] not in OPTIONAL}
    names = {m: said(f, tree) for m, (f, tree) in trees.items()}
    def beyond(known): return known.union(*(names[n] for n in known & names.keys()))
    while more := {m: beyond(known) for m, known in names.items() if beyond(known) != known}: names |= more
    return {m: {n.split('.')[0] for n in found} - sys.stdlib_module_names - {'specref'}
            for m, found in names.items()}

def light(root=ROOT, also=()):
    "The modules that need numpy alone to be imported, or these packages too"
    return sorted(m for m, found in needs(root).items() if found <= {'numpy', *also})

EXTRA_OF = {package: extra for extra, packages in specref.EXTRAS.items() for package in packages.split()}

def to_install(nb, needed):  # -> extras and packages
    "What must be installed for the cells of a notebook; `needed`: what `needs` returns"
    nodes = [node for c in nb.code for node in ast.walk(parse(c['source']))]
    names = {*imported(nodes), *(n for n in looked_up(nodes) if n.split('.')[0] not in OPTIONAL)}
    names |= {f'specref.{specref.public().get(n.partition(".")[2], "")}' for n in names}
    found = {n.split('.')[0] for n in names}.union(*(needed[n] for n in names & needed.keys()))
    run = ''.join(c['source'] for c in nb.code if c not in nb.exported)
    if re.search(r'\b(read_record|record_files)\(', run): found |= {'specref_models'}
    ours = found & EXTRA_OF.keys() | {'specref', 'numpy', 'IPython'}
    return {EXTRA_OF[p] for p in found & EXTRA_OF.keys()} | {'pytest'} & found - ours

def stated_install(nb):  # -> extras and packages
    "What the first cell of a notebook says to install"
    first = next(c['source'] for c in nb.cells if c['cell_type'] == 'markdown')
    line = re.search(r"[*]To run it:[*] `pip install '?specref(?:\[([\w,]+)\])?'?(.*?)`", first)
    said = {*(line[1] or '').split(','), *line[2].split()} if line else set()
    return said | {'plots', 'stats', 'progress'} if 'models' in said else said

def unprepared(root=ROOT):
    "Notebooks whose first cell does not say what to install for them (the front page says it below)"
    needed = needs(root, later=True)
    for nb in notebooks(root):
        missing = to_install(nb, needed) - stated_install(nb)
        if nb.path.stem != 'index' and (missing or not stated_install(nb)):
            yield f'{nb.path.name}: its first cell does not say to install {missing or "specref"}'

def looked_up(nodes):
    "The dotted names, or their beginnings, that these syntax nodes import by a call"
    for n in nodes:
        if isinstance(n, ast.Call) and getattr(n.func, 'id', '') in ('require', 'import_module') and n.args:
            name = n.args[0].values[0] if isinstance(n.args[0], ast.JoinedStr) else n.args[0]
            if isinstance(name, ast.Constant): yield name.value

def foreign(names, root=ROOT):
    "The packages of others that these modules import, or what they import does, in functions too"
    files = {dotted(f, root).removesuffix('.__init__'): f for f in (root/'specref').rglob('*.py')}
    seen, new = set(), {*names}
    while new:
        seen |= new
        inside = {p: [*ast.walk(ast.parse(files[p].read_text(encoding='utf-8')))] for p in new & files.keys()}
        found = {name for p, nodes in inside.items() for name in (*imported(nodes, package(files[p], root)),
                                                                  *looked_up(nodes))}
        new = found | {name.rpartition('.')[0] for name in found}
        new = {name for name in new if name} - seen
    return {name.partition('.')[0] for name in seen} - sys.stdlib_module_names - {'specref'}

def bound(n):
    "The names that a statement defines"
    if isinstance(n, (ast.FunctionDef, ast.ClassDef)): return [n.name]
    return [x.id for t in getattr(n, 'targets', ()) for x in ast.walk(t) if isinstance(x, ast.Name)]

def ambiguous(root=ROOT):
    "Names that two modules define; a kernel has the names of its torch implementation"
    defined = defaultdict(list)
    for f in modules(root):
        module = f.relative_to(root).with_suffix('').as_posix()
        for n in ast.parse(f.read_text(encoding='utf-8')).body:
            for name in bound(n):
                if name != '__all__' and module not in defined[name]: defined[name].append(module)
    allowed = ['specref/gpu/kernels', 'specref/gpu/verify']
    for name, found in sorted(defined.items()):
        if len(found) > 1 and sorted(found) != allowed: yield f'{name} is defined in {" and ".join(found)}'

def heavy(root=ROOT):
    "Chapters that come before any framework (00 to 06, 10 to 19) but need more than numpy (and pytest)"
    numpy_only = light(root, {'pytest'})
    for nb in notebooks(root):
        first = nb.order[0] < 7 or 10 <= nb.order[0] < 20
        if nb.module and first and f'specref.{nb.module}' not in numpy_only:
            yield f'{nb.path.stem} needs more than numpy'

def wide(root=ROOT):
    "Lines above 110 columns in modules and notebooks, except those that nbdev writes and directives"
    for nb in notebooks(root):
        for c in nb.code:
            lines = c['source'].splitlines()
            long = [line for line in lines if len(line) > WIDTH and not line.startswith('#|')]
            yield from (f'{nb.path.name} cell {c.get("id")}: {len(line)} columns' for line in long)
    for f in modules(root):
        for i, line in enumerate(f.read_text(encoding='utf-8').splitlines(), 1):
            theirs = re.match(r"# %%|__all__|           '", line)
            if len(line) > WIDTH and not theirs: yield f'{f.relative_to(root)}:{i}: {len(line)} columns'

def linted(root=ROOT):
    "What ruff finds: width, unused names, several statements in a line, functions of too many statements"
    ruff = [sys.executable, '-m', 'ruff', 'check', '-q', '--no-cache', '--output-format', 'concise', '.']
    r = subprocess.run(ruff, cwd=root, capture_output=True, text=True)
    yield from r.stdout.splitlines()

def shows(cell):
    "Whether a cell must have an output: it prints, or ends on a value that is no call"
    body = parse(cell['source']).body
    calls = [s.value for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
    prints = [c for c in calls if getattr(c.func, 'id', '') in ('print', 'display')]
    if any('file' not in [k.arg for k in c.keywords] for c in prints): return True
    if not body or not isinstance(body[-1], ast.Expr): return False
    return not isinstance(body[-1].value, (ast.Call, ast.Constant)) \
        and not cell['source'].rstrip().endswith(';')

def multiplied(root=ROOT):
    "Lists and texts multiplied by a condition, instead of an `if`"
    def text(n): return isinstance(n, (ast.List, ast.Tuple, ast.JoinedStr)) or isinstance(n, ast.Constant) \
        and isinstance(n.value, str)
    def condition(n): return isinstance(n, (ast.Compare, ast.BoolOp)) or isinstance(n, ast.Call) \
        and getattr(n.func, 'id', '') == 'bool'
    for f in modules(root):
        for n in ast.walk(ast.parse(f.read_text(encoding='utf-8'))):
            if not (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)): continue
            if text(n.left) and condition(n.right) or text(n.right) and condition(n.left):
                yield f'{dotted(f, root)}:{n.lineno}: {ast.unparse(n)}'

def untidy(root=ROOT):
    "Notebooks that are not plain: no outputs, errors, machine paths, addresses, timings, other kernels"
    for nb in notebooks(root):
        def bad(what, c=None): return f'{nb.path.name}{c and " cell " + str(c.get("id")) or ""}: {what}'
        if len({c['id'] for c in nb.cells}) < len(nb.cells): yield bad('two cells share an id')
        if nb.raw['metadata'] != PLAIN: yield bad('metadata is not that of a plain python3 notebook')
        if nb.code and not any(c['outputs'] for c in nb.code): yield bad('no output is stored')
        for c in nb.cells:
            if not set(c['metadata']) <= {'tags'}: yield bad(f'metadata {sorted(c["metadata"])}', c)
            if c['cell_type'] == 'code': yield from (bad(what, c) for what in untidy_outputs(c))
            if m := MACHINE.search(c['source']): yield bad(f'names a machine path or host: {m[0]}', c)

def untidy_outputs(c):
    "What is wrong with the stored outputs of one code cell"
    out = ''.join(shown_output(c))
    if any(o['output_type'] == 'error' for o in c['outputs']): yield 'a stored error'
    if any(o.get('name') == 'stderr' for o in c['outputs']): yield 'standard error is stored'
    if shows(c) and not c['outputs']: yield 'shows something, and no output is stored'
    if any(o.get('execution_count') for o in (c, *c['outputs'])): yield 'an execution count is stored'
    found = MACHINE.search(out) or re.search(r' at 0x[0-9a-f]{6,}', out)
    if found: yield f'the output names this machine: {found[0]}'

def outside(root=ROOT):
    """Notebooks that read beyond their folder by a path, another notebook without `cells_beside`, or import
    from tests and the like: no wheel has those"""
    own = {f.stem for d in ('docs', 'records', 'tests') for f in (root/d).glob('*.py')}
    for nb in notebooks(root):
        for c in nb.code:
            names = {name.partition('.')[0] for name in imported(ast.walk(parse(c['source'])))}
            paths = r'["\']\.\.(?:/[^"\']*)?["\']|Path\(f?["\'][^"\']*\.ipynb["\']\)'
            found = [] if 'def cells_beside' in c['source'] else re.findall(paths, c['source'])
            found += sorted(own & names)
            yield from (f'{nb.path.name} cell {c.get("id")}: reads {what}' for what in found)

def tracked(root=ROOT):
    "Files that git tracks or would"
    listing = ['git', 'ls-files', '-coz', '--exclude-standard']
    r = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True)
    return [root/f for f in r.stdout.split('\0') if f and (root/f).is_file()]

def machine_words(root=ROOT):
    "Machine paths and registry hosts in text files; `untidy` reads notebooks"
    for f in tracked(root):
        if f.suffix == '.ipynb': continue
        try: lines = f.read_text(encoding='utf-8').splitlines()
        except UnicodeDecodeError: continue
        for i, l in enumerate(lines, 1):
            if m := MACHINE.search(l): yield f'{f.relative_to(root)}:{i}: {m[0]}'

# -- Theorems and their tests ----------------------------------------------------------------------

def unproved(root=ROOT):
    "Statements that no test checks, marks of no theorem, anchors given twice, marks on what is no test"
    stated, named = anchors(root), marked('proves', root)
    names = [a for a, _ in stated]
    for a, where in stated:
        if names.count(a) > 1: yield f'{where}: the anchor {a} stands more than once'
        if not a.startswith('def-') and a not in named: yield f'{where}: no test checks {a}'
    for a, tests in named.items():
        if a not in names: yield f'{tests[0]} checks {a}, which no notebook states'
        yield from (f'{t} is no test' for t in tests if not t.split('::')[1].startswith('test_'))

UNREACHED = {   # parts that have a faithful test, though no declaration runs them, and why
    ('BLT-S', 'specref.bytes.patches.LocalDraft'): 'no command builds a model of bytes',
    ('BLT-DV', 'specref.bytes.patches.HiddenBlockDraft'): 'no command builds a model of bytes',
    ('boosted drafts', 'specref.train.boosted.agrees'):
        'the series of drafts is trained in its chapter; none is shipped',
    ('multi-token prediction', 'specref.train.mtp.backward_in_turn'):
        'the recipe adds all losses; one after the other gives the same gradient in less memory',
    ('SpecDec, exact', 'specref.train.specdec.spec_decoder'):
        'its target has an encoder, and no command builds such a target'}

def unfaithful(root=ROOT):
    """Systems that no test builds by name to show what a simpler one lacks, tests of systems that no chapter
    declares, and such tests without a plainer system or part for which they must fail"""
    found, known = [*marks('faithful', root)], declared(root).keys()
    built = by_name(mark for mark in found if 'part' not in mark[2])
    yield from (f'no test builds {s} by its name' for s in sorted(known - built.keys()))
    for test, names, given in found:
        yield from (f'{test} is faithful to {s}, which is no system' for s in {*names} - known)
        if 'plain' not in given: yield f'{test} has nothing plainer for which it must fail'

# -- Records ---------------------------------------------------------------------------------------

FIELDS = dict(command=r'make [\w-]+', date=r'\d{4}-\d\d-\d\d', machine='.+', commit='[0-9a-f]{40}',
              versions='{.+}')

def unrecorded(root=ROOT):
    """Records without a field, or whose command is no target of the Makefile (`record-x` runs `x.py`); other
    data without a record of the same name"""
    stored = sorted((root/'records').glob('*'))
    records = {f.stem: json.loads(f.read_text(encoding='utf-8')) for f in stored if f.suffix == '.json'}
    targets = set(re.findall(r'^([\w%-]+):', (root/'Makefile').read_text(), re.M)) if records else set()
    if 'record-%' in targets: targets |= {f'record-{f.stem}' for f in stored if f.suffix == '.py'}
    for name, record in records.items():
        for field, form in FIELDS.items():
            if not re.fullmatch(form, str(record.get(field, ''))): yield f'{name}: no {field}'
        made = record.get('command', '').removeprefix('make ')
        if made not in targets - {f'record-{other}' for other in records.keys() - {name}}:
            yield f'{name}: no target of the Makefile is called {made!r}'
    others = [f for f in stored if f.suffix not in ('.json', '.py', '') and f.stem not in records]
    yield from (f'{f.name}: no record' for f in others)

def stale(root=ROOT):
    "Records' scripts, and the Makefile, that import from the package a name that no module has"
    there = {'specref', *(dotted(f, root).removesuffix('.__init__') for f in (root/'specref').rglob('*.py'))}
    for f in modules(root):
        there |= {f'{dotted(f, root)}.{name}' for n in ast.parse(f.read_text()).body for name in bound(n)}
    sources = {f.name: f.read_text() for f in sorted((root/'records').glob('*.py'))}
    for make in root.glob('Makefile'):
        lines = re.findall(r'from specref[\w.]* import \w+(?:, \w+)*', make.read_text())
        sources[make.name] = '\n'.join(lines)
    for file, source in sources.items():
        for name in imported(ast.walk(ast.parse(source))):
            if name.startswith('specref.') and name not in there: yield f'{file}: there is no {name}'

def remeasured(root=ROOT):
    "Cells tagged `measured` that read a record: what they print is the record's, and is compared"
    for nb in notebooks(root):
        lines = (names for c in nb.code
                 for names in re.findall(r'^ *([\w, ]+?) = .*read_record', c['source'], re.M))
        names = '|'.join(['read_record', *(name for line in lines for name in line.split(', '))])
        read = [c['id'] for c in nb.code if measured(c) and re.search(rf'\b({names})\b', c['source'])]
        yield from (f'{nb.path.name} cell {id}' for id in read)

def numbers_in(x):
    "The numbers in nested lists and dictionaries"
    for y in x.values() if isinstance(x, dict) else x if isinstance(x, list) else ():
        if isinstance(y, float): yield y
        yield from numbers_in(y)

DECIMALS = re.compile(r'(?<![\w.,-])-?(\d*\.(\d\d+))(?!\w|\.\d)')
OTHERS = re.compile(r'paper|report|authors|model card|version|since|Python \d')   # in sentences on others
TYPED = {'.999': 'the power of the tests', 'questions': 'its cells assert the numbers of its answers'}

def decimals(source):
    """The numbers with two decimals or more in the sentences of a markdown cell, without quotes, code,
    sentences about others, and formulas that state no error"""
    plain = re.sub(r'^>.*$|```.*?```|`[^`]*`|\$(?:(?!\\pm)[^$])*\$', '', source, flags=re.M | re.S)
    for sentence in re.split(r'(?<=[.?!]) |\n', plain):
        if not OTHERS.search(sentence): yield from DECIMALS.findall(sentence)

def typed(root=ROOT):
    "Numbers in the prose of a page that reads records: rounded from a record, or printed by one of its cells"
    files = {f.stem: f for f in (root/'records').glob('*.json')}
    for nb in notebooks(root):
        code = ''.join(c['source'] for c in nb.code if 'read_record' in c['source'])
        used = files.keys() & set(re.findall(r'["\'](\w+)["\']', code))
        if not used or nb.path.stem in TYPED: continue
        values = [abs(x) for name in used for x in numbers_in(json.loads(files[name].read_text()))]
        shown = {float(x) for c in nb.code for out in shown_output(c) for x in re.findall(r'\d*\.\d+', out)}
        for c in nb.cells:
            for x, places in decimals(c['source']) if c['cell_type'] == 'markdown' else ():
                own = float(x) in shown or any(round(y, len(places)) == float(x) for y in values)
                if own and x not in TYPED: yield f'{nb.path.name} cell {c["id"]}: types {x}'

# -- Drawings ---------------------------------------------------------------------------------------

@cache
def font():
    from matplotlib import ft2font, get_data_path
    made = ft2font.FT2Font(f'{get_data_path()}/fonts/ttf/DejaVuSans.ttf')   # the widest of the usual ones
    made.set_size(12, 72)
    return made

def text_place(e):  # -> left, top, right, bottom
    font().set_text(''.join(e.itertext()))
    wide, x, y = font().get_width_height()[0]/64, float(e.get('x')), float(e.get('y'))
    left = x - wide*dict(middle=.5, end=1).get(e.get('text-anchor'), 0)
    return left, y - 9, left + wide, y + 2

def box_place(e):
    x, y, wide, high = (float(e.get(k)) for k in ('x', 'y', 'width', 'height'))
    return x, y, x + wide, y + high

def shared(a, b):
    "How much of its height and width a place shares with another, the smaller of the two"
    return min(min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1]))

def room(a, b):
    "The least distance of a place from the border of another around it, below 0 if it crosses that"
    return min(a[0] - b[0], b[2] - a[2], a[1] - b[1], b[3] - a[3])

def crosses(line, place, margin):
    "Does a straight line go through a place, further inside than the margin?"
    (x, y, u, v), (left, top, right, low) = line, place
    points = ((x + (u - x)*i/200, y + (v - y)*i/200) for i in range(201))
    return any(left + margin < h < right - margin and top + margin < z < low - margin for h, z in points)

def places(svg):  # -> the whole and the boxes, straight lines, (text, place)
    root, parts = ElementTree.fromstring(svg), defaultdict(list)
    for e in root: parts[e.tag.rpartition('}')[2]].append(e)
    whole = 0, 0, *map(float, root.get('viewBox').split()[2:])
    open_paths = (e.get('d') for e in parts['path'] if e.get('fill') == 'none')
    straight = (re.fullmatch('M(.+) (.+)L(.+) (.+)', d) for d in open_paths)
    texts = [(''.join(e.itertext()), text_place(e)) for e in parts['text']]
    lines = [tuple(map(float, m.groups())) for m in straight if m]
    return [whole, *map(box_place, parts['rect'])], lines, texts

def clutter(svg):
    "What is wrong in a drawing: texts that leave their box, meet others or are crossed, lines behind boxes"
    boxes, lines, texts = places(svg)
    for i, (said, at) in enumerate(texts):
        own = [b for b in boxes if shared(((at[0] + at[2])/2, (at[1] + at[3])/2)*2, b) >= 0]
        tight = any(room(at, b) < (b != boxes[0]) for b in own)   # one pixel in a box
        if tight or not own: yield f'{said!r} leaves its box'
        if any(shared(at, b) > 2 for b in boxes if b not in own): yield f'{said!r} touches a box'
        if any(crosses(line, at, 1) for line in lines): yield f'a line crosses {said!r}'
        yield from (f'{said!r} meets {other!r}' for other, b in texts[:i] if shared(at, b) > 2)
    behind = [b for line in lines for b in boxes[1:] if crosses(line, b, 3)]
    yield from (f'a line runs behind the box at {b[:2]}' for b in behind)

def cluttered(root=ROOT):
    "Drawings in which a text leaves its box, meets another or is crossed, or a line runs behind a box"
    for nb in notebooks(root):
        for c in nb.code:
            drawings = [text(o.get('data', {}).get('image/svg+xml', '')) for o in c['outputs']]
            found = [fault for svg in drawings if svg for fault in clutter(svg)]
            yield from (f'{nb.path.name} cell {c["id"]}: {fault}' for fault in found)

def ungraded(root=ROOT):
    "Exercises of the first chapters (to 15) that are fewer than three, or of which none breaks something"
    for nb in notebooks(root):
        asked = ''.join(c['source'] for c in nb.cells).rpartition('## Exercises\n')[2]
        asked = re.findall(r'^\d[.] (.+)$', asked, re.M)
        if nb.order[0] <= 15 and (len(asked) < 3 or not any('*Break it.*' in x for x in asked)):
            yield f'{nb.path.name}: {len(asked)} exercises, or none that breaks something'

# -- Docstrings of the public names ----------------------------------------------------------------

def uncited(source, stated, keys):
    "Works that no bibliography has, statements that no notebook makes, or that there is neither"
    found = works(source, keys)
    kinds = 'Theorem|Proposition|Lemma|Corollary|Definition'
    lists = re.findall(rf'(?:{kinds})s? ((?:[a-z][\w-]*(?:, )?)+)', source)
    named = {name for names in lists for name in names.rstrip(', ').split(', ')}
    yield from (f'{work} is in no bibliography' for work, key in found.items() if not key)
    yield from (f'no statement is called {name}' for name in named - stated)
    if not (found or named or re.search('this book|vLLM', source)): yield 'names no source'

def undescribed(doc, parameters, returns, names, stated, keys):
    """What the docstring of a public name lacks: a part, a parameter, a source (a statement of `stated`, a
    work under `keys` of the bibliography), an example; names in its last part that are none of `names`"""
    parts = doc_parts(doc)
    wanted = [part for part in DOC_PARTS[1:] if part != 'Returns' or returns]
    yield from (f'no part {part}' for part in wanted if part not in parts)
    if [*parts['Args']] != parameters: yield f'describes {[*parts["Args"]]}, takes {parameters}'
    yield from uncited(parts.get('Source', ''), stated, keys)
    others = parts.get('See also', '').split(', ')
    yield from (f'{name} does not exist' for name in others if name not in names)
    if '>>> ' not in doc: yield 'no example'

# -- Commands --------------------------------------------------------------------------------------

def main(command, *paths):
    "`run NOTEBOOKS` stores outputs in place; `compat` exports with nbdev 2"
    if command == 'compat': sys.exit(compat())
    for p in sorted(map(Path, paths), key=lambda p: (order(p.stem), p.stem)):
        before = SPENT.seconds
        store(p)
        print(f'{p}  {SPENT.seconds - before:.1f} CPU seconds', flush=True)

if __name__ == '__main__': main(*sys.argv[1:])
