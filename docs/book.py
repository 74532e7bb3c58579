"""The book as data: its notebooks in order, their statements and the tests that check them, the works cited,
and the parts of a docstring"""
import ast, json, math, re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specref.core.registry import DECLARED, TABLES

ROOT = Path(__file__).resolve().parents[1]

# -- Notebooks -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Notebook:
    "A chapter as it is stored"
    path: Path

    @cached_property
    def raw(self): return json.loads(self.path.read_text(encoding='utf-8'))
    @cached_property
    def cells(self): return [c | dict(source=''.join(c['source'])) for c in self.raw['cells']]
    @property
    def code(self): return [c for c in self.cells if c['cell_type'] == 'code']
    @property
    def exported(self): return [c for c in self.code if re.search(r'^#\|\s*export', c['source'], re.M)]
    @property
    def header(self):
        return next((c for c in self.code if '#|' in c['source'] and 'default_exp' in c['source']), None)
    @property
    def module(self): return self.header and re.search(r'default_exp:?\s*([\w.]+)', self.header['source'])[1]
    @property
    def order(self): return order(self.path.stem)
    @property
    def title(self):
        first = next(c['source'] for c in self.cells if c['cell_type'] == 'markdown')
        return first.partition('\n')[0].lstrip('# ')

def order(stem):
    "A chapter's place, (number, letters): 21 < 21a < 21b < a chapter without a number"
    m = re.match(r'(\d+)([a-z]*)_', stem)
    return (int(m[1]), m[2]) if m else (math.inf, '')

def notebooks(root=ROOT):
    found = map(Notebook, (root/'nbs').glob('*.ipynb'))
    return sorted(found, key=lambda nb: (nb.order, nb.path.stem))

def text(x): return ''.join(x) if isinstance(x, list) else x

# -- Statements, tests and works -------------------------------------------------------------------

def anchors(root=ROOT):
    "Each anchor of a statement in the notebooks, with its chapter"
    found = [(a, nb.path.stem) for nb in notebooks(root) for c in nb.cells if c['cell_type'] == 'markdown'
             for a in re.findall(r'<a id="((?:thm|lem|cor|prop|def)-[\w-]+)"', c['source'])]
    return found

def marks(mark, root=ROOT):
    "Each test that carries `@mark(...)`, the names in the mark, and which other arguments it has"
    for f in sorted((root/'tests').glob('test_*.py')):
        for n in ast.walk(ast.parse(f.read_text(encoding='utf-8'))):
            for d in getattr(n, 'decorator_list', []):
                if isinstance(d, ast.Call) and getattr(d.func, 'id', '') == mark:
                    names = [name for a in d.args for name in marked_names(a, root)]
                    yield f'tests/{f.name}::{n.name}', names, {k.arg for k in d.keywords}

def marked_names(arg, root=ROOT):
    "The name that an argument of a mark is, or for `*TABLE` what is declared in that table"
    if not isinstance(arg, ast.Starred): return [ast.literal_eval(arg)]
    return [name for name, table in declared(root).items() if table == getattr(arg.value, 'id', None)]

def declared(root=ROOT):  # -> {name: table}
    "What the chapters declare in the tables that are tested by their names"
    texts = (f.read_text(encoding='utf-8') for f in sorted((root/'specref').rglob('*.py')))
    tested = {table.title for table in TABLES}
    return {name: table for text in texts for table, name in DECLARED.findall(text) if table in tested}

def by_name(marks):
    "Each name that stands in one of these marks, with the tests that carry it"
    found = defaultdict(list)
    for test, names, _ in marks:
        for name in names: found[name].append(test)
    return dict(found)

def marked(mark, root=ROOT): return by_name(marks(mark, root))

def references(root=ROOT):
    "The keys of the bibliography"
    return set(re.findall(r'^@\w+\{([\w-]+),', (root/'docs/refs.bib').read_text(encoding='utf-8'), re.M))

# -- Public names and their docstrings -------------------------------------------------------------

def public(root=ROOT):  # -> {name: module}
    "What can be imported from `specref` itself: the names after `#| public:`, in the order of the chapters"
    found = [(nb.module, names) for nb in notebooks(root) for c in nb.exported
             for names in re.findall(r'^#\| public: (.*)', c['source'], re.M)]
    return {name: module for module, names in found for name in names.split()}

DOC_PARTS = 'Args', 'Returns', 'Raises', 'Source', 'See also'

def doc_parts(doc):  # -> {part: text}, where Args is {parameter: text}
    "The parts of a docstring: `Args:` with a line for each parameter, then the others of `DOC_PARTS`"
    def joined(found): return {name: ' '.join(said.split()) for name, said in found}
    parts = dict(re.findall(rf'^({"|".join(DOC_PARTS)}):(.*(?:\n +.*)*)', doc, re.M))
    args = re.findall(r'^ {4}(\*{0,2}\w+): (.*(?:\n {8}.*)*)', parts.get('Args', ''), re.M)
    return joined(parts.items()) | dict(Args=joined(args))

def works(said, keys):  # -> {work: its key, or None}
    """The works that a text names as `Leviathan et al. 2023`, with their keys in the bibliography; of several
    by one author in one year a word in brackets tells which, as in `Chen et al. 2024 (Sequoia)`"""
    named = re.findall(r'((([A-Z]\w+)(?: et al\.| and ([A-Z]\w+))? (\d{4}))(?: \(([\w-]+)\))?)', said)
    def key(first, second, year, word):
        exact = f'{first}{year}{word}', f'{first}{second}{year}', f'{first}{year}'
        alike = [k for k in keys if k.startswith(f'{first}{year}')]
        return next((k for k in exact if k in keys), alike[0] if len(alike) == 1 else None)
    return {whole: key(*(x.lower().replace('-', '') for x in how)) for whole, _, *how in named}
