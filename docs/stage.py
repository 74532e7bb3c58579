"""Notebooks to book: README.md and its pictures from nbs/index.ipynb, CITATION.cff's addresses from
pyproject.toml; `stage.py PLACE` builds the site too.

Each notebook of nbs/ becomes one page, named as the chapter without its number: directives become cell tags,
blockquoted theorems into numbered ones, `@proves` into a line below the theorem and the code that cites it.
conf.py reads `book.json` for the rest."""
import ast, gc, json, math, re, shutil, symtable, sys, tomllib
from functools import cache, partial
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS)]
from book import DOC_PARTS, Notebook, doc_parts, marked, notebooks, public, references, text, works
from book import order   # noqa: F401  conf.py reads `stage.order`
from specref.core.registry import DECLARED

PARTS = {   # the last chapter of each
    'Foundations': 6, 'Models': 9, 'Verification': 15, 'Testing': 19, 'Drafting, untrained': 29,
    'Drafting, trained': 39, 'GPU': 49, 'Serving': 59, 'Reference': math.inf}
FIGURES = 'laws', 'cost', 'batch'   # those of figures.js
FRONT = 'index', 'first_hour'   # what stands before the parts
LOOK_UP = 'questions', 'bring_your_own', 'words', 'symbols', 'theorems', 'api', 'every_name', 'bibliography'
# often used as everyone does
AMBIGUOUS = ('draft tree', 'draw', 'gate', 'lap', 'law', 'lossless', 'peak', 'plain', 'point', 'stand-in',
             'states', 'system', 'top')
ENVS = 'Theorem', 'Lemma', 'Corollary', 'Proposition', 'Definition', 'Remark', 'Example', 'Algorithm'
KINDS = dict(thm='Theorem', lem='Lemma', cor='Corollary', prop='Proposition') | {'def': 'Definition'}
EXPORTS, HIDDEN = {'export', 'exports', 'exporti'}, {'default_exp', 'hide', 'solution'}
KNOWN = EXPORTS | HIDDEN | {'echo', 'alt', 'fold', 'public'}
DIRECTIVE = re.compile(r'^#\|\s*([\w-]+):?[ \t]*(.*)$\n?', re.M)
CONTENTS = '<!-- contents -->'
SEARCH = re.compile(r'\n*<!-- search: (.*?) -->')
FIGURE = re.compile(r'<!-- figure: (\w+) -->(?: (\*.*\*))?')   # where it cannot move, this is read
QUOTE = re.compile(r'(?:^>.*\n?)+', re.M)
HEAD = re.compile(rf'\*\*({"|".join(ENVS)})(?: ([\w-]+))?(?: \((.+?)\))?\.\*\*(?:<a id="([\w-]+)"></a>)? ?')
NAME = re.compile(r'(?![A-Z][a-z])[\w.-]*\w')
MENTION = re.compile(rf'\b({"|".join(ENVS)})s? ({NAME.pattern}(?:(?:, | and ){NAME.pattern})*)')

# -- What a chapter says and defines ----------------------------------------------------------------------

def number(stem): return m[1] if (m := re.match(r'(\d+[a-z]*)_', stem)) else ''

def page(stem): return stem.removeprefix(f'{number(stem)}_')

def short(number): return number.lstrip('0') or number[-1:]   # 05 is 5, 00 is 0

def directives(source):
    "The directives of a cell; one that stands on several lines is joined"
    found = {}
    for key, said in DIRECTIVE.findall(source): found[key] = f'{found[key]} {said}' if key in found else said
    return found

def signature(node):
    "How a function is called or an object made, as written; nothing for a value"
    if isinstance(node, ast.FunctionDef):
        result = ast.unparse(node.returns).strip("'") if node.returns else ''
        return f'({ast.unparse(node.args)})' + f' -> {result}' * bool(result)
    body = getattr(node, 'body', ())
    inits = [f for f in body if isinstance(f, ast.FunctionDef) and f.name in ('__init__', '__new__')]
    made = [re.sub(r'^(self|cls)(, )?', '', ast.unparse(f.args)) for f in inits]
    whose = map(ast.unparse, (*getattr(node, 'decorator_list', ()), *getattr(node, 'bases', ())))
    fielded = any(x.startswith(('dataclass', 'NamedTuple')) for x in whose)
    typed = [s for s in body if isinstance(s, ast.AnnAssign) and fielded]
    def field(s): return f'{s.target.id}: {ast.unparse(s.annotation)}', s.value and ast.unparse(s.value) or ''
    fields = dict(map(field, typed))
    start = {k: default(v) for k, v in fields.items() if 'init=False' not in v}
    if not body or not made and not start and node.bases: return ''
    return f'({made[0] if made else ", ".join(f"{k}={v}" if v else k for k, v in start.items())})'

def default(value):
    "What a field of a dataclass is where it is not given, as written; nothing where it must be"
    if not (made := re.fullmatch(r'field\((?:default(_factory)?=([\w.]+))?.*\)', value)): return value
    return (made[2] or '') + '()' * bool(made[1])

@cache
def parsed(source):
    "The statements of a cell, read once; magics and shell lines are left out"
    try: return ast.parse(source).body
    except SyntaxError: return ast.parse(re.sub(r'^(\s*)[%!].*', r'\1pass', source, flags=re.M)).body

def definitions(cell):
    "Each public name that an exported cell defines: what it is, how it is called, what it does"
    source = DIRECTIVE.sub('', cell['source'])
    for node in parsed(source):
        if isinstance(node, ast.Assign):
            found = [n for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            names = [n.id for n in found if isinstance(n.ctx, ast.Store)]
            said = re.search(r'\s\s# (.*)', source.splitlines()[node.end_lineno - 1])
            kind, doc = 'data', said[1] if said else ''
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            kind = ('class', 'function')[isinstance(node, ast.FunctionDef)]
            names, doc = [node.name], ast.get_docstring(node) or ''
        else: continue
        yield from ((n, kind, signature(node), doc) for n in names if n[0] != '_')

def methods(cell):  # -> {class: texts}
    "The methods and properties that the classes of an exported cell define: how each is called, what it does"
    found = {}
    for kind in (n for n in parsed(DIRECTIVE.sub('', cell['source'])) if isinstance(n, ast.ClassDef)):
        own = [f for f in kind.body if isinstance(f, ast.FunctionDef) and f.name[0] != '_']
        for f in own:
            plain = any('property' in ast.unparse(d) for d in f.decorator_list)
            call = re.sub(r'^\((self|cls)(, )?', '(', signature(f)).removeprefix('()' * plain)
            said = ' '.join((ast.get_docstring(f) or '').split('\n\n')[0].split())
            found.setdefault(kind.name, []).append(f'{{code}}`{f.name}{call}`{": " * bool(said)}{said}')
    return found

def statements(nb):
    "Each statement with an anchor: its kind, its title and its anchor"
    return [(m[1], titled(m), m[4]) for m in heads(nb) if m[4]]

def heads(nb):
    "The beginning of each statement, `**Theorem name (Title).**` and its anchor"
    quotes = [q for c in nb.cells if c['cell_type'] == 'markdown' for q in QUOTE.findall(c['source'])]
    return [m for q in quotes if (m := HEAD.match(re.sub('^> ?', '', q)))]

def titled(head):
    "The name of a statement and its title, if it has one"
    return ': '.join(filter(None, head.group(2, 3)))

def search_words(nb):
    "What readers type for a page: the words in the comment below its title, and the names that it declares"
    typed = SEARCH.search(''.join(c['source'] for c in nb.cells if c['cell_type'] == 'markdown'))
    declared = [name for c in nb.exported for _, name in DECLARED.findall(c['source'])]
    return [*(typed[1].split(', ') if typed else ()), *declared]

@cache
def stand_ins():
    "A table of the simpler versions for which the tests of each system must fail"
    rows = json.loads((DOCS/'stand_ins.json').read_text(encoding='utf-8')).items()
    return '\n'.join(['| system | its tests fail for |', '|---|---|', *(f'| {s} | {x} |' for s, x in rows)])

def names(kind, title, anchor):
    "What prose may call a statement: by its anchor (Theorem siblings) or the paper's number (Theorem 3.5)"
    prefix, _, name = anchor.partition('-')
    paper = re.search(r'(?:^|, )((?:[A-Z]\.)?\d[\d.]*)$', title or '')
    return {f'{k} {n}' for k in (kind, KINDS.get(prefix, kind)) for n in (name, paper and paper[1]) if n}

def mentions(said, known):
    "Where a text names statements: (start, end, anchor), `Theorems reject, siblings` giving two"
    for m in MENTION.finditer(said):
        for i, n in enumerate(NAME.finditer(m[2])):
            anchor = known.get(f'{m[1]} {n[0]}')
            begin = m.start(2) + n.start() if i else m.start()
            if anchor: yield begin, m.start(2) + n.end(), anchor

# -- Cells ------------------------------------------------------------------------------------------------

def proved(tests):
    "The line that names the tests which prove something, each file once"
    files = dict.fromkeys(t.partition('::')[0] for t in tests or ())
    said = []
    for f in files:
        own = [t.partition('::')[2] for t in tests if t.startswith(f'{f}::')]
        said += [f'`{"" if i else f}::{t}`' for i, t in enumerate(own)]
    if not said: return ''
    count = '1 test' if len(said) == 1 else f'{len(said)} tests'
    summary = f'<details class="proved"><summary>checked by {count}</summary>'
    return f'\n\n{summary}\n\n{", ".join(said)}\n\n</details>\n'

def theorem(quote, proofs):
    "A blockquoted statement as a numbered one, with its tests; any other quote as it is"
    body = re.sub(r'^> ?', '', quote[0], flags=re.M)
    if not (m := HEAD.match(body)): return quote[0]
    label = f':label: {m[4]}\n' if m[4] else ''
    said = body[m.end():].rstrip() + proved(proofs.get(m[4]))
    return f':::{{prf:{m[1].lower()}}} {titled(m)}\n{label}\n{said}\n:::\n'

def prose(source, nb, book):
    "Markdown for the site: numbered title and theorems, links, citations, the moving figures"
    formula = r'^((?:> )?)(\$\$.+\$\$[.,;]?)$'
    md = re.sub(formula, r'\1\n\1\2\n\1', source, flags=re.M)   # a paragraph of its own
    md = SEARCH.sub('', md).replace('<!-- stand-ins -->', stand_ins())
    if CONTENTS in md: md = md.replace(CONTENTS, chapter_list(notebooks(nb.path.parent.parent)))
    md = QUOTE.sub(partial(theorem, proofs=book['proofs']), md)
    md = re.sub(r'\A# ', f'# {short(number(nb.path.stem))} '.replace('  ', ' '), md)
    def unlinked(m): return m[1] if m[1] in book['statements'] else m[0]   # a statement is linked by its name
    md = re.sub(r'\[(\w+ [\w-]+)\]\(\w+\.ipynb(?:#[\w-]+)?\)', unlinked, md)
    anchor = r'\[([^]`\n]*)\]\((?:\w+\.ipynb)?#((?:thm|lem|cor|prop|def)-[\w-]+)\)'
    md = re.sub(anchor, r'{prf:ref}`\1 <\2>`', md)
    md = paged(md)
    md = re.sub(r'\(((?:{cite}`[\w,]+`(?:, )?)+)\)', r'\1', md)
    figure = r'<figure class="moving" data-figure="\1">This figure moves where scripts are allowed.</figure>'
    return FIGURE.sub(figure, md)

def pictures(cell):
    "The text for each picture of a cell: `#| alt: ...`, or the title of a drawing"
    for data in (o.get('data', {}) for o in cell['outputs']):
        title = re.search('<title>(.*?)</title>', text(data.get('image/svg+xml', '')))
        alt = directives(cell['source']).get('alt') or (title[1] if title else '')
        if any(k.startswith('image/') for k in data): yield alt

def paged(md):
    "Links between files of the repository as links between pages"
    md = re.sub(r'\]\(\.\./docs/(\w+\.md)', r'](\1', md)
    return re.sub(r'\]\((?:(?:\.\./)?nbs/)?(\w+)\.ipynb', lambda m: f']({page(m[1])}.ipynb', md)

PROTECTED = re.compile(   # what is no running prose
    r"""```.*?```|\{[\w:]+\}`[^`]*`|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$
    |!?\[[^\]]*\]\([^)]*\)|<[^>]*>|^[#|>:].*?$|\*+[^*\n]+\*+|"[^"\n]*"|“[^”]*”""",
    re.M | re.S | re.X)

LINKED = re.compile(r'^## (.+)\n(?:<!-- linked in: (.*) -->\n)?(?:<!-- not in: (.*) -->\n)?', re.M)

def in_sense(md, word, only, never):
    "Where a text uses a word of the book in the sense that the page of words gives it"
    spans = [[m.span() for m in re.finditer(rf'\b(?:{x})\b', md, re.I)] if x else [] for x in (only, never)]
    for use in re.finditer(rf'(?<!in a )\b{word}s?\b', md):
        meant, other = (any(a <= use.start() < b for a, b in found) for found in spans)
        if not other and (meant or not only): yield use

def first_uses(cells, words):
    """The cells of a page, the first use of each of the book's words in prose leading to its meaning
    (`words`: {word: (the phrases in which alone it has that meaning, those in which it has another)})"""
    left = {word: phrases for word, phrases in words.items() if word not in AMBIGUOUS}
    for cell in cells:
        if cell['cell_type'] != 'markdown':
            yield cell
            continue
        md = cell['source']
        for word, phrases in [x for x in left.items() if x[0] in md]:
            safe = [m.span() for m in PROTECTED.finditer(md)]
            uses = in_sense(md, word, *phrases)
            use = next((m for m in uses if not any(a <= m.start() < b for a, b in safe)), None)
            if not use: continue
            md = f'{md[:use.start()]}[{use[0]}](words.md#{word.replace(" ", "-")}){md[use.end():]}'
            del left[word]
        yield cell | dict(source=md)

def book_words(root=ROOT):  # -> {word: phrases of its meaning, phrases of others}
    "The words of the book, with the phrases that the page of words gives in comments"
    return {m[1]: (m[2], m[3]) for m in LINKED.finditer((root/'docs/words.md').read_text(encoding='utf-8'))}

def linked(output):
    "An output whose Markdown links lead to pages"
    data = output.get('data', {})
    if 'text/markdown' not in data: return output
    return output | dict(data=data | {'text/markdown': paged(text(data['text/markdown']))})

def folded(cell):
    "The words on the fold of a cell that a reader may open, and the tag that folds it; None for an open one"
    dirs = directives(cell['source'])
    nodes = parsed(DIRECTIVE.sub('', cell['source']))
    imports = all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes)
    if 'solution' in dirs: return 'Solution', 'hide-cell'
    if 'hide' in dirs and nodes: return 'Imports' if imports else 'Set-up', 'hide-cell'
    return ('Library code', 'hide-input') if 'fold' in dirs else None

def metadata(cell, nb):
    "The metadata that myst-nb reads: tags, the words for pictures and for a fold, the names it defines"
    dirs, tags, shown = directives(cell['source']), list(cell['metadata'].get('tags', [])), {}
    for alt in pictures(cell): shown['image'] = dict(alt=alt or 'A plot of the numbers above')
    if fold := folded(cell):
        tags.append(fold[1])
        shown |= dict(code_prompt_show=fold[0], code_prompt_hide=fold[0])
    if dirs.get('echo') == 'false': tags.append('remove-input')
    if not EXPORTS & dirs.keys() or HIDDEN & dirs.keys(): return dict(tags=tags, mystnb=shown)
    defines = {n: kind for n, kind, *_ in definitions(cell)}
    return dict(tags=[*tags, 'export'], mystnb=shown, module=f'specref.{nb.module}', defines=defines)

def staged(cell, nb, book):
    "One cell as the cells of its page, none when it has nothing to show"
    if cell['cell_type'] != 'code': return [cell | dict(source=prose(cell['source'], nb, book))]
    if HIDDEN & directives(cell['source']).keys() and not folded(cell): return []
    outputs = [linked(o) for o in cell['outputs']]
    source = DIRECTIVE.sub('', cell['source'])
    shown = cell | dict(source=source, outputs=outputs, metadata=metadata(cell, nb))
    if 'defines' not in shown['metadata']: return [shown]
    cited = [anchor for *_, anchor in mentions(cell['source'], book['statements'])]
    tests = {t: 1 for anchor in cited for t in book['proofs'].get(anchor, [])}
    line = dict(cell_type='markdown', id=f'{cell["id"]}p', metadata={}, source=proved(tests))
    return [shown, line] if tests else [shown]

def fold_of(cell): return cell.get('metadata', {}).get('mystnb', {}).get('code_prompt_show')

def shown(cell): return cell['cell_type'] == 'code' and 'remove-input' not in cell['metadata']['tags']

@cache
def scopes(source):  # -> bound, read, called
    "The global names that a cell binds, those it reads from earlier cells, and those its functions read"
    bound, read, called = set(), set(), set()
    for node in parsed(source):
        names, now, later = globals_of(ast.unparse(node))
        read |= now - bound - (set() if isinstance(node, (ast.Assign, ast.AugAssign)) else names)
        bound |= names
        called |= later
    return bound, read, called - bound

COMPREHENSIONS = 'listcomp', 'setcomp', 'dictcomp', 'genexpr'

def globals_of(statement):
    "The global names that a statement binds, that it reads, and that functions inside it read"
    top = symtable.symtable(statement, '', 'exec')
    symbols, inner = top.get_symbols(), [(top, 0)]
    reads = {s.get_name() for s in symbols if s.is_referenced()}, set()
    for table, when in inner:
        below = [(t, int(when or t.get_name() not in COMPREHENSIONS)) for t in table.get_children()]
        for t, later in below:   # of a function called `top` symtable takes the locals for globals too
            reads[later].update(s.get_name() for s in t.get_symbols() if s.is_global() and not s.is_local())
        inner += below
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}, *reads

def needed(cells):
    "The cells of a page without the hidden ones that define nothing for a shown one; the others on a fold"
    kept, later = [], set()
    for cell in reversed([*cells]):
        if cell['cell_type'] == 'code':
            bound, read, called = scopes(text(cell['source']))
            used, plain = bound & later, shown(cell)
            if not used and fold_of(cell) in ('Imports', 'Set-up'): continue
            if used and not plain: cell = opened(cell)
            if used or plain: later = later - bound | read | called
        kept.append(cell)
    return kept[::-1]

def opened(cell):
    "A cell of which only the outputs are shown, with its code on a fold"
    meta = cell['metadata']
    tags = [*({*meta['tags']} - {'remove-input'}), 'hide-input']
    words = dict(code_prompt_show='Code of this output', code_prompt_hide='Code of this output')
    return cell | dict(metadata=meta | dict(tags=tags, mystnb=meta['mystnb'] | words))

def page_cells(nb, book):
    "The cells of a page, imports as one cell before the first shown code that uses them"
    held = []
    for cell in needed(s for c in nb.cells for s in staged(c, nb, book)):
        if fold_of(cell) == 'Imports': held.append(cell)
        elif shown(cell) and (used := [c for c in held if uses(cell, c)]):
            held = [c for c in held if c not in used]
            yield used[0] | dict(source='\n'.join(text(c['source']) for c in used))
            yield cell
        else: yield cell

def uses(cell, imports):
    "Whether one of the imported names is read by the cell"
    (names, *_), (_, read, called) = (scopes(text(c['source'])) for c in (imports, cell))
    return bool(names & (read | called))

def wordless(nbs):
    "Pictures without a text for readers who do not see them"
    says = 'a picture without words; `#| alt: ...` says what it shows'
    for nb in nbs: yield from (f'{nb.path.name} cell {c["id"]}: {says}' for c in nb.code if '' in pictures(c))

# -- Pages ------------------------------------------------------------------------------------------------

def parts(nbs):
    "The parts of the book, each with its chapters"
    first = 0
    for part, last in PARTS.items():
        here = [nb for nb in nbs if first <= nb.order[0] <= last and nb.order[0] < math.inf]
        if here: yield part, here
        first = last + 1

def chapter_list(nbs):
    "The table of contents that readers see where there is no sidebar"
    def chapters(here): return ', '.join(f'[{nb.title}]({nb.path.name})' for nb in here)
    rows = (f'| {part} | {chapters(here)} |' for part, here in parts(nbs))
    return '\n'.join(['| part | chapters |', '|---|---|', *rows])

def contents(nbs, pages):
    "The table of contents, part by part; what has no number stands in front"
    def tree(caption, docs):
        head = ['```{toctree}', ':hidden:', ':maxdepth: 1', *[f':caption: {caption}'] * bool(caption)]
        return '\n'.join([*head, '', *docs, '```'])
    def place(p): return FRONT.index(p) if p in FRONT else 99, p
    front = sorted((p for p in pages if p not in ('index', *LOOK_UP)), key=place)
    yield tree('', front)
    yield from (tree(part, [page(nb.path.stem) for nb in here]) for part, here in parts(nbs))
    made = {*pages, 'theorems', 'api', 'every_name', 'bibliography'}
    yield tree('Look up', [p for p in LOOK_UP if p in made])

def as_in_papers(said):
    "A text whose numbered statements are those of papers, and not read as those of the book"
    return re.sub(rf'({"|".join(ENVS)}) (?=\d)', '\\1\N{NO-BREAK SPACE}', said)

def terms(parts, keys):  # -> {term: texts}
    "The parts of a docstring as a page lists them: sources cited, related names linked"
    args = [f'**{arg.replace("*", chr(92) + "*")}**: {text}' for arg, text in parts['Args'].items()]
    found = dict(Parameters=args) | {part: [parts[part]] for part in DOC_PARTS[1:] if part in parts}
    source = as_in_papers(parts.get('Source', ''))
    for work, key in works(source, keys).items(): source = source.replace(work, f'{work} {{cite}}`{key}`')
    related = [f'[{x}](#{x.lower()})' for x in parts.get('See also', '').split(', ') if x]
    return found | {'Source': [source] * bool(source), 'See also': [', '.join(related)] * bool(related)}

def folded_methods(own):
    "Methods as a list on a fold that says how many there are"
    if not own: return ''
    count = '1 method' if len(own) == 1 else f'{len(own)} methods'
    return '\n'.join([f'\n<details><summary>{count}</summary>\n', *(f'- {x}' for x in own), '\n</details>\n'])

def described(name, full, sig, doc, own, keys):
    "A public name: how it is called, what it does, the parts of its docstring, methods, code, an example"
    text, mark, example = doc.partition('>>> ')
    parts, (said, *_) = doc_parts(text), text.split('\n\n')
    args = rf'`({"|".join(parts["Args"]) or "-"})`'.replace('*', '')   # no link leads away from a parameter
    def plain(text): return re.sub(args, r'{code}`\1`', ' '.join(text.split()))
    yield f'\n### {name}\n\n```python\n{name}{sig}\n```\n\n{plain(said)}.\n'
    for term, texts in (terms(parts, keys) | {'Code': [f'{{py:obj}}`{full} <{full}>`']}).items():
        if texts: yield '\n'.join([f'\n{term}', *(f': {plain(text)}' for text in texts)])
    yield folded_methods(own)
    if mark: yield f'\n```pycon\n{mark}{example}\n```'

def api(nbs, names):
    "The page of what can be imported from `specref` itself"
    yield '# API\n\nWhat can be imported from `specref` itself; [every name](every_name.md) has its own page.'
    keys = references(ROOT)
    for nb in nbs:
        module = f'specref.{nb.module}'
        found = ((d, c) for c in nb.exported if nb.module for d in definitions(c))
        here = [(*d, methods(c).get(d[0], [])) for d, c in found if names.get(d[0]) == nb.module]
        if here: yield f'\n## {module}'
        for name, _, *said in here: yield from described(name, f'{module}.{name}', *said, keys)

def every_name(nbs):
    "The page of every name that a module exports"
    yield '# Every name\n\nEach name leads to the cell that defines it.'
    for nb in nbs:
        found = [d for c in nb.exported if nb.module for d in definitions(c)]
        if found: yield f'\n## specref.{nb.module}\n\n| | |\n|---|---|'
        for name, kind, sig, doc in found:
            says = as_in_papers(re.split(r'(?<=[^.]\.) |; raises|\n', doc)[0].replace('|', r'\|'))
            call = (f'`{sig}`' if sig else '').replace('|', r'\|')
            yield f'| {{py:obj}}`{name} <specref.{nb.module}.{name}>`{call} | {says} |'

def theorems(nbs):
    "The page of every statement"
    yield ('# Theorems\n\nEvery numbered statement of the book. Its address (the link) stays the same in '
           'every version, and its number need not. A title names the paper that a statement is from. '
           'The others are proved here without a source: some are common knowledge, and none is claimed to '
           'be new.')
    for nb in nbs:
        found = [s for s in statements(nb) if not s[2].startswith('def-')]
        if found: yield f'\n## {nb.title}\n\n| | |\n|---|---|'
        yield from (f'| {{prf:ref}}`{anchor}` | {name or ""} |' for _, name, anchor in found)

def contents_cell(nbs, pages):
    "The cell below the front page that holds the table of contents"
    loose = [page(n.path.stem) for n in nbs if n.order[0] == math.inf]
    loose += [p for p in pages if p != 'bibliography']
    toc = '\n\n'.join(contents(nbs, loose))
    return dict(cell_type='markdown', id='contents', metadata={}, source=toc)

def make_book(nbs, pages, root):
    "What every page needs: tests by anchor, statements and public names with their pages"
    book = dict(proofs=marked('proves', root), statements={}, pages={}, searched={}, defined={},
                full_names={}, addresses=addresses(root))
    for nb in nbs:
        here = page(nb.path.stem)
        taken = book['pages'].keys() | pages | {'api', 'every_name', 'search', 'theorems'}
        if here in taken: yield f'{nb.path.name}: another page has its name'
        book['pages'][here], book['searched'][here] = number(nb.path.stem), search_words(nb)
        for s in statements(nb): book['statements'] |= dict.fromkeys(names(*s), s[2])
        for c in nb.exported if nb.module else ():
            for n, *_ in definitions(c):
                book['defined'][full := f'specref.{nb.module}.{n}'] = here
                book['full_names'].setdefault(n, []).append(full)
    return book

def complaints(nb):
    "Figures and directives that do not exist, figures without a place, names that are not their anchor's"
    for m in heads(nb):
        same = not m[4] or m[2] == m[4].partition('-')[2]
        if not same: yield f'{nb.path.name}: {m[1]} {m[2]} has the anchor {m[4]}'
    for name, said in FIGURE.findall('\n'.join(c['source'] for c in nb.cells)):
        if name not in FIGURES: yield f'{nb.path.name}: no figure is called {name}'
        place = f'{page(nb.path.stem)}.html'
        if place not in said: yield f'{nb.path.name}: the figure {name} is on {place}, which is not said'
    for c in nb.code:
        unknown = ', '.join(directives(c['source']).keys() - KNOWN)
        if unknown: yield f'{nb.path.name} cell {c["id"]}: no directive is called {unknown}'

def stage(out, root=ROOT):
    "Write the sources of the site and say what is wrong with them"
    nbs, pages = notebooks(root), {p.stem: p for p in (root/'docs').glob('*.md')}
    book = yield from make_book(nbs, pages.keys(), root)
    words = book_words(root) if 'words' in pages else {}
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for nb in nbs: yield from complaints(nb)
    for nb in nbs:
        cells = first_uses(page_cells(nb, book), words)
        if nb.path.stem == 'index': cells = [*cells, contents_cell(nbs, pages)]
        staged_nb = out/f'{page(nb.path.stem)}.ipynb'
        staged_nb.write_text(json.dumps(nb.raw | dict(cells=[*cells])), encoding='utf-8')
    for p in pages.values(): (out/p.name).write_text(paged(p.read_text(encoding='utf-8')), encoding='utf-8')
    made = {'api.md': api(nbs, public(root)), 'every_name.md': every_name(nbs), 'theorems.md': theorems(nbs),
            'book.json': [json.dumps(book)]}
    for name, lines in made.items(): (out/name).write_text('\n'.join(lines), encoding='utf-8')

def site(place, root=ROOT, work=None):
    "Stage and build; whatever is wrong with a notebook, and whatever Sphinx warns of, is an error at the end"
    from sphinx.cmd.build import build_main
    gc.disable()   # a fifth of the time, and the process ends soon
    root, place, work = Path(root), Path(place), Path(work or Path(root)/'build'/'site')
    wrong, silent = list(stage(work/'source', root)), list(wordless(notebooks(root)))
    for w in wrong + silent: print('WARNING:', w, file=sys.stderr)
    for old in (work/'html', place):   # an older build, and pages that are gone
        if (old/'objects.inv').is_file(): shutil.rmtree(old)
    failed = build_main(['-q', '-W', '--keep-going', '-E', '-a', '-c', str(DOCS), '-d', str(work/'doctrees'),
                         str(work/'source'), str(work/'html')])   # myst-nb writes beside its output too
    shutil.copytree(work/'html', place, dirs_exist_ok=True)
    print(f'{len(list(place.glob("*.html")))} pages; open {place}/index.html')
    return int(bool(failed or wrong or silent))

# -- README -----------------------------------------------------------------------------------------------

def relative(md): return re.sub(r'\]\((?=\w+\.ipynb)', '](nbs/', md).replace('](../docs/', '](docs/')

def addresses(root=ROOT):  # -> {'Repository': address, 'Documentation': that of the site}
    "The public addresses that pyproject.toml gives; none until its owner fills them in"
    if not (file := root/'pyproject.toml').is_file(): return {}
    urls = tomllib.loads(file.read_text(encoding='utf-8'))['project'].get('urls', {})
    return {name: address.rstrip('/') for name, address in urls.items() if address}

def citation(root=ROOT):
    "CITATION.cff with the public addresses"
    keys = {'repository-code': 'Repository', 'url': 'Documentation'}
    said, urls = (root/'CITATION.cff').read_text(encoding='utf-8'), addresses(root)
    said = re.sub(rf'^({"|".join(keys)}): .*\n', '', said, flags=re.M)
    return said + ''.join(f'{key}: "{urls[name]}"\n' for key, name in keys.items() if name in urls)

def bibtex(page, title, cite, urls):
    "How a page is cited: by its title without the number of the chapter, which may change, and its address"
    site, source = (urls.get(name, '') for name in ('Documentation', 'Repository'))
    entry = dict(
        title=f'{title}, in: {cite["title"]}', author=f'{{{cite["authors"][0]["name"]}}}',
        year=cite['date-released'].year, note=f'version {cite["version"]}, page {page}.html',
        url=f'{site}/{page}.html' if site else source)
    lines = [f'  {name:6} = {{{value}}},' for name, value in entry.items() if value]
    return '\n'.join([f'@misc{{specref_{page.replace("-", "_")},', *lines, '}'])

def absolute(md, address):
    "Links that also work on the page of a package index: files of the repository by their public address"
    if not address: return md
    for folder, kind in dict(nbs='blob', docs='raw').items():
        md = re.sub(rf'\]\((?={folder}/)', f']({address}/{kind}/HEAD/', md)
    return md

def result(output, name):
    "One stored output as Markdown, and the file that a drawing becomes"
    data = output.get('data', {})
    if svg := text(data.get('image/svg+xml', '')):
        file = f'docs/images/{name}.svg'
        return f'![{re.search("<title>(.*?)</title>", svg)[1]}]({file})', {file: svg + '\n'}
    if 'text/markdown' in data: return relative(text(data['text/markdown'])), {}
    return f'```\n{text(output.get("text") or data.get("text/plain") or "").rstrip()}\n```', {}

def readme(root=ROOT):
    "README.md, its pictures and CITATION.cff, {path: text}: prose as it is, code fenced, results below it"
    said, files, nbs = [], {}, notebooks(root)
    for i, c in enumerate(Notebook(root/'nbs/index.ipynb').cells):
        dirs, source = directives(c['source']), DIRECTIVE.sub('', c['source'])
        if HIDDEN & dirs.keys(): continue
        if c['cell_type'] == 'markdown': said.append(relative(source.replace(CONTENTS, chapter_list(nbs))))
        elif dirs.get('echo') != 'false': said.append(f'```python\n{source}\n```')
        for md, more in (result(o, f'index-{i}') for o in c.get('outputs', ())):
            said.append(md)
            files |= more
    said = absolute('\n\n'.join(said), addresses(root).get('Repository'))
    return files | {'README.md': f'{said}\n', 'CITATION.cff': citation(root)}

if __name__ == '__main__':
    for file, content in readme().items(): (ROOT/file).write_text(content, encoding='utf-8')
    if sys.argv[1:]: sys.exit(site(sys.argv[1]))
