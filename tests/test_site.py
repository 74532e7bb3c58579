"The book, built once and opened in a Chromium without network: complete, linked, typeset, accessible"
import ast, builtins, fcntl, json, os, re, shutil, subprocess, sys
from collections import Counter
from html import unescape
from urllib.parse import urljoin

import pytest, yaml
from browser import Browser
from book import Notebook, public
from house import PLAIN, ROOT, anchors, marked, modules, notebooks

from specref.speed.cost import best_gamma, speedup
from specref.core.law import exact, overlap, residual
from specref.core.registry import BYTE_SYSTEMS, SYSTEMS
from specref.speed.roofline import SHAPES, Workload, pays
from specref.verify.reject import capped_geometric

import stage

CHROMIUM = shutil.which('chromium')
reads = pytest.mark.skipif(not CHROMIUM, reason='no chromium on this machine to open the site with')
# pages that no notebook makes
WRITTEN = 'words', 'symbols', 'theorems', 'api', 'every_name', 'bibliography', 'search'
OPENED = *WRITTEN, 'index', 'first_hour', 'law', 'cost', 'roofline', 'samplers', 'kernels'   # in a browser
FORMULAS = 'formulas'   # all of them on one page, while the site is tested
MATH = re.compile(r'<(span|div) class="math [^"]*">.*?</\1>', re.S)
PAGES = sorted({*WRITTEN, *(stage.page(n.path.stem) for n in notebooks())})

# What is measured on a page, in JavaScript

FACTS = r"""(() => {
  const all = (css, f) => [...document.querySelectorAll(css)].map(f);
  const article = document.querySelector('article') ?? document.querySelector('main');
  const ids = all('[id]', e => e.id), images = [...document.images];
  const named = e => e.innerText.trim() || e.ariaLabel || e.title || e.labels?.length || e.placeholder
    || e.querySelector('title');
  const controls = [...document.querySelectorAll('a, button, input')].filter(e => e.checkVisibility());
  return {
    ids, twice: ids.filter((x, i) => ids.indexOf(x) < i),
    lang: document.documentElement.lang, links: [...document.links].map(a => a.href),
    headings: [...article.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => +h.tagName[1]),
    wordless: images.filter(i => !i.alt || /\.(png|svg)$/.test(i.alt)).map(i => i.src),
    empty: images.filter(i => !i.naturalWidth).map(i => i.src),
    formulas: all('.math', e => e).length, typeset: all('.math mjx-container', e => e).length,
    wrong: all('[data-mml-node=merror]', e => e.textContent), raw: /\\[(\[]/.test(article.innerText),
    nameless: controls.filter(e => !named(e)).map(e => e.outerHTML.slice(0, 200)),
    wide: document.documentElement.scrollWidth - innerWidth,
    footer: document.querySelector('footer.bd-footer-content, .bd-footer-content').innerText };
})()"""

CONTRAST = r"""(theme => {
  document.documentElement.dataset.theme = theme;
  const still = {textContent: '* { transition: none !important }'};
  document.head.append(Object.assign(document.createElement('style'), still));
  const parse = c => {
    const [r, g, b, a = 1] = c.match(/[\d.]+/g).map(Number), whole = c.startsWith('color(srgb') ? 255 : 1;
    return [r*whole, g*whole, b*whole, a];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i]*top[3] + below[i]*(1 - top[3])).concat(1);
  const linear = v => v <= .04045 ? v/12.92 : ((v + .055)/1.055)**2.4;
  const light = c => [.2126, .7152, .0722].reduce((s, w, i) => s + w*linear(c[i]/255), 0);
  const grounds = new Map([[null, [255, 255, 255, 1]]]);
  const ground = e => {
    if (!grounds.has(e))
      grounds.set(e, over(parse(getComputedStyle(e).backgroundColor), ground(e.parentElement)));
    return grounds.get(e);
  };
  const shown = e => e.checkVisibility({checkVisibilityCSS: true}) && !e.closest('mjx-assistive-mml')
    && !['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(e.tagName);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = {}, elements = new Set();
  while (texts.nextNode()) if (texts.currentNode.data.trim()) elements.add(texts.currentNode.parentElement);
  const visible = [...elements].filter(shown);
  for (const e of visible) {
    const s = getComputedStyle(e), below = ground(e), size = parseFloat(s.fontSize);
    const [a, b] = [light(over(parse(e.closest('svg') ? s.fill : s.color), below)), light(below)];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const least = size >= 24 || size >= 18.66 && s.fontWeight >= 700 ? 3 : 4.5;
    const where = `${e.tagName}.${e.className} in ${e.parentElement.className}`;
    if (ratio < least) found[where] = [ratio.toFixed(2), s.color, below.join(), e.textContent.slice(0, 30)];
  }
  return {seen: visible.length, found};
})"""


def build(place, root=ROOT):
    "`make site`, in a process of its own"
    code = 'import sys, stage; sys.exit(stage.site(*sys.argv[1:]))'
    call = [sys.executable, '-W', 'ignore', '-c', code, place, root, place.with_name('work')]
    return subprocess.run(call, cwd=ROOT/'docs', capture_output=True, text=True)


@pytest.fixture(scope='session')
def built(tmp_path_factory):
    "The site, the warnings of its build, and the measurements of every page: made once for all workers"
    base = tmp_path_factory.getbasetemp()
    base = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
    with open(base/'site.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base/'site.json').exists():
            made = build(base/'site')
            facts = visit(base/'site', base/'reader') if CHROMIUM else {}
            record = dict(failed=made.returncode, warnings=made.stderr, facts=facts)
            (base/'site.json').write_text(json.dumps(record))
    return base/'site', json.loads((base/'site.json').read_text())


def visit(site, home):
    "Open some pages and measure them, read the others, and open all their formulas on one page more"
    (site/f'{FORMULAS}.html').write_text(formulas(site))
    facts, browser = {f.stem: parsed(f) for f in sorted(site.glob('*.html'))}, hidden(home)
    for page in (*OPENED, FORMULAS):
        try: facts[page] |= measured(browser, site/f'{page}.html')
        except TimeoutError:   # a page that hangs, which happens on a busy machine, has a second browser
            browser.close()
            browser = hidden(home.with_name(f'{home.name}-{page}'))
            facts[page] |= measured(browser, site/f'{page}.html')
    browser.close()
    (site/f'{FORMULAS}.html').unlink()
    return facts

def formulas(site):
    "The plainest page with the formulas of all chapters instead of its article"
    found = {m[0] for f in site.glob('*.html') for m in MATH.finditer(html(site, f.stem))}
    start, end = re.split('<article.*</article>', html(site, 'symbols'), flags=re.S)
    return f"{start}<article><h1>All</h1>{'<br>'.join(sorted(found))}</article>{end}"

def parsed(file):
    "What a page's file tells of itself, by the names of `FACTS`"
    text = re.sub(r'<(script|style)\b.*?</\1>', '', file.read_text(encoding='utf-8'), flags=re.S)
    article = (re.search('<article.*</article>', text, re.S) or re.search('<main.*</main>', text, re.S))[0]
    ids, pictures = re.findall(r'<[^>]*\sid="([^"]*)"', text), re.findall('<img [^>]*>', text)
    sources = {picture: unescape(re.search('src="([^"]*)"', picture)[1]) for picture in pictures}
    named = re.compile(r'<[^>]*\s(?:aria-label|title)="[^"]|>[^<]*[^<\s]|<title|type="checkbox"')
    controls = [m[0] for m in re.finditer(r'<(a|button)\s(?=[^>]*href|[^>]*type).*?</\1>', text, re.S)]
    return dict(
        ids=ids, twice=[x for x, n in Counter(ids).items() if n > 1], errors=[],
        lang=re.search('lang="([^"]*)"', text)[1], formulas=len(MATH.findall(text)),
        links=[urljoin(file.as_uri(), unescape(x)) for x in re.findall(r'<a\s[^>]*href="([^"]*)"', text)],
        headings=[int(n) for n in re.findall('<h([1-6])', article)],
        wordless=[x for x in pictures if not re.search(r'alt="(?!")(?!\S+\.(png|svg)")', x)],
        empty=[x for x in sources.values() if ':' not in x and not (file.parent/x).is_file()],
        nameless=[c[:200] for c in controls if not named.search(c)],
        footer=re.search('<footer class="bd-footer-content.*?</footer>', text, re.S)[0])

def hidden(home):
    "A browser whose window is not painted"
    browser = Browser(home)
    window = browser('Browser.getWindowForTarget')['windowId']
    browser('Browser.setWindowBounds', windowId=window, bounds=dict(windowState='minimized'))
    return browser

def measured(browser, file):
    "What is measured on a page"
    browser('Emulation.clearDeviceMetricsOverride')
    errors = browser.open(file.as_uri())
    found = browser.js(FACTS) | dict(errors=errors)
    for theme in 'light', 'dark': found[theme] = browser.js(f'{CONTRAST}("{theme}")')
    browser('Emulation.setDeviceMetricsOverride', width=390, height=800, deviceScaleFactor=1, mobile=True)
    return found | dict(narrow=browser.js('document.documentElement.scrollWidth - innerWidth'))


@pytest.fixture(scope='session')
def site(built): return built[0]

@pytest.fixture(scope='session')
def facts(built): return built[1]['facts']

@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    b = Browser(tmp_path_factory.mktemp('browser'))
    yield b
    b.close()


def none(found): assert not (found := list(found)), '\n'.join(map(str, found))

def html(site, page): return (site/f'{page}.html').read_text(encoding='utf-8')

# -- Built -------------------------------------------------------------------------------------------

def test_builds_without_a_warning(built):
    "Dead links, unknown citations and all other warnings of Sphinx are errors; each chapter is a page"
    assert not built[1]['failed'], built[1]['warnings']
    assert [f.stem for f in sorted(built[0].glob('*.html'))] == PAGES


def test_addresses_of_sections_are_words(site):
    "A number that is counted in a page, or one of a chapter, would move"
    for f in site.glob('*.html'): none(re.findall(r'<section id="(?:id)?\d[^"]*"', f.read_text()))


def small(root, *cells):
    "A book of one chapter and a front page"
    def cell(source):
        common = dict(id=f'c{abs(hash(source))}'[:8], metadata={}, source=source)
        if not source.startswith('#|'): return common | dict(cell_type='markdown')
        return common | dict(cell_type='code', outputs=[], execution_count=None)
    for d in ('nbs', 'docs', 'tests'): (root/d).mkdir(parents=True)
    shutil.copy(ROOT/'docs/bibliography.md', root/'docs')
    chapter = '# Law', '#| default_exp core.law', *cells
    for stem, sources in {'index': ['# Front'], '00_law': chapter}.items():
        nb = dict(cells=[cell(s) for s in sources], metadata=PLAIN, nbformat=4, nbformat_minor=5)
        (root/f'nbs/{stem}.ipynb').write_text(json.dumps(nb))
    return root


FAULTS = {   # planted -> the build's warning
    'See [the cost](06_costs.ipynb).': r"law\.ipynb.*'costs\.ipynb'",
    'See [it](00_law.ipynb#thm-none).': "law.*'thm-none' not found",
    'As in {cite}`nobody1999`.': 'law.ipynb.*nobody1999',
    '> **Theorem one (A).**<a id="thm-b"></a> One.': '00_law.ipynb: Theorem one has the anchor thm-b',
    '<!-- figure: none -->': '00_law.ipynb: no figure is called none',
    '<!-- figure: laws -->': '00_law.ipynb: the figure laws is on law.html',
    '### Three': r'law\.ipynb.*H1 to H3',
    '#| exprot\nx = 1': '00_law.ipynb.*no directive is called exprot',
}

def test_planted_faults_fail_the_build(tmp_path):
    "The warning for each planted fault names its page, and the build fails"
    made = build(tmp_path/'site', small(tmp_path/'faulty', *FAULTS))
    assert made.returncode
    none((fault, made.stderr) for fault, warning in FAULTS.items() if not re.search(warning, made.stderr))


LINKED = [
    '> **Theorem two (Twice, 3.5).**<a id="thm-two"></a> One and one.',
    '#| export\ndef twice(x):\n    "Two of them (Theorem two)"\n    return 2*x',
    "See `twice`, `specref.core.law.twice`, another's `twice`, [the front](index.ipynb), "
    "[Theorem two](00_law.ipynb#thm-two), Theorems 3.5, ten and {cite}`leviathan2023`.",
]
URLS = """
[project.urls]
Repository = "https://example.org/specref"
Documentation = "https://specref.example/"
"""
CITED = (   # of the chapter, whose number no citation has
    '<link rel="canonical" href="https://specref.example/law.html"', '  title  = {Law, in: specref',
    '<a href="https://example.org/specref">Repository</a>', '  url    = {https://specref.example/law.html},')
PROOFS = '@proves("thm-two")\ndef test_a(): pass\n@proves("thm-two")\ndef test_b(): pass\n'

def test_names_and_theorems_are_links(tmp_path):
    "A correct book builds without a message; names in prose, docstrings and tests are found and linked"
    root = small(tmp_path/'correct', *LINKED)
    (root/'tests/test_law.py').write_text(PROOFS)
    (root/'pyproject.toml').write_text(f'[project]{URLS}')
    made = build(tmp_path/'site', root)
    assert not made.returncode and not made.stderr, made.stderr
    assert {f.name for f in tmp_path.iterdir()} == {'site', 'work', 'correct'}   # no other file is left
    page = re.sub('<(?!a |/a)[^>]*>', '', html(tmp_path/'site', 'law'))
    tests = re.findall(r'checked by 2 tests\s+tests/test_law.py::test_a, ::test_b', page)
    assert 'Theorem 0.1  (two: Twice, 3.5)' in page and len(tests) == 2 and 'another’s twice' in page
    assert re.search(r'href="#thm-two">Theorem two</a>\)"', page)
    prose = r'href="#thm-two">Theorem 0.1</a>, <a [^>]*href="#thm-two">Theorem 0.1</a>, ten'
    names = r'href="#specref.core.law.twice"[^>]*>(?:specref\.core\.law\.)?twice</a>'
    assert re.search(prose, page) and len(re.findall(names, page)) == 2
    none(part for part in CITED if part not in html(tmp_path/'site', 'law'))


def test_readme_is_the_front_page():
    "README.md and its pictures are what `make site` writes"
    for file, content in stage.readme().items():
        assert (ROOT/file).read_text(encoding='utf-8') == content, f'{file}: `make site` writes it again'

def test_every_chapter_is_linked_from_the_front():
    linked = set(re.findall(r'\]\(nbs/(\w+)[.]ipynb', stage.readme()['README.md']))
    assert {nb.path.stem for nb in notebooks()} <= {*linked, 'index'}

def test_the_next_chapter_is_the_next():
    "A link called the next or the last chapter leads to it, whatever chapters were added"
    order = [nb.path.stem for nb in notebooks()]
    links = re.compile(r'\[(?:[Tt]he )?((?:next|last) chapter|chapter before)\]\((\w+)[.]ipynb')
    for i, nb in enumerate(notebooks()):
        said = ''.join(c['source'] for c in nb.cells if c['cell_type'] == 'markdown')
        for name, page in links.findall(said):
            assert page == order[i + (1 if name == 'next chapter' else -1)], (nb.path.stem, name, page)

def test_first_uses_lead_to_the_meaning_of_a_word():
    "In running prose: not in headings, code, formulas, links, quotations and tables, nor \"in a row\""
    def cell(source, kind='markdown'): return dict(cell_type=kind, source=source)
    unread = '# A round\n`round`, $round$, [round](a.ipynb), *round*, "a round"\n| round |\nthree in a row'
    cells = (cell(unread), cell('a round', 'code'), cell('Rounds, rounds and rounds. A bonus token.'),
             cell('rounds'))
    words = dict.fromkeys(('round', 'row', 'bonus token'), ('', ''))
    found = [c['source'] for c in stage.first_uses(cells, words)]
    assert found == [unread, 'a round', 'Rounds, [rounds](words.md#round) and rounds. '
                     'A [bonus token](words.md#bonus-token).', 'rounds']

OTHER_SENSES = ('On a machine that rounds', 'does not contract them', 'The chain rule', 'a Markov chain',
                'In all twelve rows', 'Leaves stand on rows', '$B$ rows at the positions', 'ten rounds',
                'What a compiler contracts', 'rows of a table', 'its residual stream', 'a round trip')
OWN_SENSES = ('after each round', 'fewer rounds', 'A contract is kept', 'a chain of two',
              "the target's rows", 'a row of $q$', 'the residual of $p$')

def test_words_lead_to_their_meaning_where_they_have_it():
    "Not the verb, nor the rows of a table: phrases on the page of words say where a word has another sense"
    def links(said):
        cells = [dict(cell_type='markdown', source=said)]
        return re.findall(r'\[([\w ]+)\]\(words', next(stage.first_uses(cells, stage.book_words()))['source'])
    none((said, links(said)) for said in OTHER_SENSES if links(said))
    none(said for said in OWN_SENSES if len(links(said)) != 1)
    assert {*stage.book_words()} == {*re.findall('^## (.+)$', (ROOT/'docs/words.md').read_text(), re.M)}

def test_addresses_are_filled_in_everywhere(tmp_path):
    "From one table of pyproject.toml: README.md, CITATION.cff, BibTeX; without it no address is written"
    shutil.copy(ROOT/'CITATION.cff', tmp_path)
    without = re.sub(r'^\[project.urls\]\n(.+\n)*', '', (ROOT/'pyproject.toml').read_text(), flags=re.M)
    def filled(urls):
        (tmp_path/'pyproject.toml').write_text(without + urls)
        (tmp_path/'CITATION.cff').write_text(stage.citation(tmp_path))
        cite, known = yaml.safe_load(stage.citation(tmp_path)), stage.addresses(tmp_path)
        url = re.search('  url    = {(.*)},', stage.bibtex('law', 'Distributions', cite, known))
        return cite.get('repository-code'), cite.get('url'), url and url[1]
    repository, site = 'https://example.org/specref', 'https://specref.example'
    assert filled(URLS) == (repository, site, f'{site}/law.html')
    assert filled(URLS.replace(f'{site}/', '')) == (repository, None, repository)
    assert filled('') == (None, None, None)
    links = re.findall(r'\]\(([^)]+)\)', stage.absolute((ROOT/'README.md').read_text(), repository))
    assert len(links) > 20
    none(link for link in links if not re.match(r'https://|#', link))

# -- Contents of the pages -----------------------------------------------------------------------------

def test_theorems_have_their_anchors_and_their_tests(site):
    "chapter.html#anchor is a numbered statement, with the tests that check it"
    proofs, found = marked('proves'), set()
    for nb in notebooks():
        page, n = html(site, stage.page(nb.path.stem)), stage.short(stage.number(nb.path.stem))
        for kind, _, anchor in stage.statements(nb):
            found.add(anchor)
            box = rf'<div class="proof {kind.lower()} admonition" id="{anchor}">(.*?)</section>'
            at = re.search(box, page, re.S)
            assert at and f'{kind} {n}.' in at[1], f'{nb.path.stem}: {anchor}'
            for t in proofs.get(anchor, ()): assert f'::{t.split("::")[1]}</span>' in at[1], f'{anchor}: {t}'
    assert {a for a, _ in anchors()} == found, 'an anchor that is no statement'
    listed = html(site, 'theorems')
    none(a for a in found if not a.startswith('def-') and f'#{a}"' not in listed)


def public_names():
    "The full names in each module's `__all__`"
    for f in modules():
        module = '.'.join(f.relative_to(ROOT).with_suffix('').parts)
        assigned = [s for s in ast.parse(f.read_text(encoding='utf-8')).body if isinstance(s, ast.Assign)]
        listed = next((s.value for s in assigned if getattr(s.targets[0], 'id', '') == '__all__'), None)
        yield from (f'{module}.{name}' for name in (ast.literal_eval(listed) if listed else ()))


def test_every_public_name_is_found(site):
    "objects.inv and the page of names hold each name, and lead to its cell; public ones are described"
    from sphinx.util.inventory import InventoryFile
    data = InventoryFile.loads((site/'objects.inv').read_bytes(), uri='').data
    listed, api = html(site, 'every_name'), html(site, 'api')
    kinds = 'py:function', 'py:class', 'py:data'
    names = {n: item.uri for kind in kinds for n, item in data.get(kind, {}).items()}
    assert names.keys() == {*public_names()}
    for name, uri in names.items():
        page, _, anchor = uri.lstrip('/').partition('#')
        defined = f'id="{anchor}"' in html(site, page.removesuffix('.html'))
        assert defined and f'href="{page}#{anchor}"' in listed, name
    assert re.findall(r'<h3>(\w+)<', api) == [*public()] and '<strong>watch</strong>' in api
    assert '<span class="pre">mean_acceptance_length</span>' in api


def code_shown(nb):
    "The code that a page shows, open or on a fold"
    return [c for c in stage.page_cells(nb, dict(proofs={}, statements={})) if stage.shown(c)]

def undefined(nb):
    "The names that the code on a page uses and no code on it defines: for functions anywhere, else before"
    found = [stage.scopes(stage.text(c['source'])) for c in code_shown(nb)]
    before = {*dir(builtins), 'display', 'get_ipython', '__file__'}
    everywhere = before.union(*(f[0] for f in found))
    for bound, read, called in found:
        yield from read - before | called - everywhere
        before |= bound

def test_code_that_is_shown_runs_without_what_is_hidden():
    "Whoever copies the code of a page, folds included, copies the imports and definitions that it needs"
    none((nb.path.stem, sorted(names)) for nb in notebooks() if (names := {*undefined(nb)}))

def test_hidden_cells_are_shown_on_a_fold_where_shown_code_needs_them(tmp_path):
    cells = ('#| hide\nfrom math import pi', '#| hide\nr = 2*pi', '#| hide\nassert r',
             '#| echo: false\ns = r', '#| hide\ndef twice(x): return x * a',
             '#| export\na = s', '#| export\ntwice(a) + unknown')
    page = Notebook(small(tmp_path/'folds', *cells)/'nbs/00_law.ipynb')
    folds = [stage.fold_of(c) for c in code_shown(page)]
    assert folds == ['Imports', 'Set-up', 'Code of this output', 'Set-up', None, None]
    assert [*undefined(page)] == ['unknown']

def test_hidden_code_is_hidden(site):
    "Checks and drawing code stay in the notebook; exported code is shown below its module's name"
    for nb in notebooks():
        page, defining = html(site, stage.page(nb.path.stem)), 0
        shown, kept = unescape(re.sub('<[^>]*>', '', page)), ''.join(c['source'] for c in code_shown(nb))
        assert '#|' not in shown, nb.path.stem
        for c in nb.code:
            dirs, source = stage.directives(c['source']), stage.DIRECTIVE.sub('', c['source']).strip()
            unnamed, last = bool(stage.HIDDEN & dirs.keys()), source.rpartition('\n')[2]
            hidden = (unnamed or dirs.get('echo') == 'false') and source not in kept
            if hidden and len(last) > 40: assert last not in shown, f'{nb.path.stem}: {last}'
            if c not in nb.exported: continue
            assert hidden or source in shown, f'{nb.path.stem}: {c["id"]}'
            defining += bool(nb.module and not unnamed)
        assert page.count('class="exported"') == defining, nb.path.stem


def test_what_docstrings_say_of_parameters_is_on_a_fold(site):
    for nb in notebooks():
        described = re.findall('^ +See also: ', ''.join(c['source'] for c in nb.exported), re.M)
        assert html(site, stage.page(nb.path.stem)).count('<details class="described"') == len(described)


def test_loads_nothing_from_the_network(site):
    "No page, style or script of the site loads from the network"
    elements = r'<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc|<link\b(?! rel="can)[^>]*\bhref'
    loads = re.compile(rf"""(?:{elements})=["']?(?:https?:)?//|url\(["']?(?:https?:)?//"""
                       r"""|@import["' ]+(?:url\()?["']?http""")
    for f in [*site.glob('*.html'), *(site/'_static').rglob('*.css')]:
        none((f.name, m[0][-90:]) for m in loads.finditer(f.read_text(encoding='utf-8')))


def test_every_formula_is_typeset(site):
    """No dollar sign outside code: what is written as mathematics is mathematics, in theorems too; no line
    ends between a formula and the full stop behind it"""
    for file in site.glob('*.html'):
        glued = re.finditer(r'class="math[^"]*">[^<]*</span>[.,;:)]', html(site, file.stem))
        none((file.stem, m[0]) for m in glued)
        prose = re.sub(r'<(pre|code|script|style)\b.*?</\1>', '', html(site, file.stem), flags=re.S)
        words = re.sub(r'<[^>]*>', '', prose)
        none((file.stem, m[0]) for m in re.finditer(r'.{0,60}\$.{0,60}', words))

FAULTY = """<html lang="fr"><main><h1>A</h1><h3 id="a">B</h3><img src="none.png">
<img src="none.png" alt="x.png">
<a id="a" href="law.html#b"><i></i></a><button type="button"></button><a href="x" title="named"></a></main>
<footer class="bd-footer-content">0.1</footer></html>"""

def test_faults_of_a_page_are_read(tmp_path):
    "What is read from the file of a page shows each planted fault, and nothing where none is"
    (tmp_path/'faulty.html').write_text(FAULTY)
    f = parsed(tmp_path/'faulty.html')
    assert f['twice'] == ['a'] and f['lang'] == 'fr' and f['headings'] == [1, 3] and len(f['nameless']) == 2
    assert len(f['wordless']) == 2 and f['empty'] == ['none.png']*2 and f['footer'].count('0.') == 1
    assert [link.rpartition('/')[2] for link in f['links']] == ['law.html#b', 'x']


@reads
def test_pages_are_read_as_a_browser_shows_them(facts, site):
    "On the pages that are opened both ways agree"
    for page in OPENED:
        read, shown = parsed(site/f'{page}.html'), facts[page]
        same = 'twice', 'lang', 'headings', 'wordless', 'empty', 'nameless', 'formulas'
        assert [read[k] for k in same] == [shown[k] for k in same], page
        assert {*read['ids']} <= {*shown['ids']}
        assert {*read['links']} == {link.removesuffix('#') for link in shown['links']}, page

# -- Opened ------------------------------------------------------------------------------------------

@reads
def test_pages_open_without_errors(facts):
    "From disk: no error or warning in the console, nothing missing or requested from the network"
    assert sorted(facts) == sorted([*PAGES, FORMULAS])
    none((page, *f['errors'], *f['empty']) for page, f in facts.items() if f['errors'] or f['empty'])


@reads
def test_links_lead_somewhere(site, facts):
    "Every link inside the site finds its page and its anchor"
    def dead(link):
        if link.startswith('http'): return False
        file, _, anchor = link.removeprefix(site.as_uri() + '/').partition('#')
        page = file.removesuffix('.html')
        return page == file or page not in facts or anchor and anchor not in facts[page]['ids']
    none((page, l) for page in PAGES for l in set(facts[page]['links']) if dead(l))


@reads
def test_mathematics_is_typeset(facts):
    assert sum(f['formulas'] for f in facts.values()) > 100
    names = 'formulas', 'typeset', 'wrong', 'raw'
    counts = {page: [f[k] for k in names] for page, f in facts.items() if 'typeset' in f}
    assert len(counts) == len(OPENED) + 1
    none((page, *n) for page, n in counts.items() if n != [n[0], n[0], [], False])


@reads
def test_pages_are_accessible(facts):
    "A language, headings in order, names for pictures and controls, unique ids, no sideways scrolling"
    for page in PAGES:
        f = facts[page]
        levels = f['headings']
        steps = [b - a for a, b in zip([0, *levels], levels)]
        assert f['lang'] == 'en' and levels.count(1) == 1 and max(steps) <= 1, (page, levels)
        none((page, x) for kind in ('wordless', 'twice', 'nameless') for x in f[kind])
        assert max(f.get('wide', 0), f.get('narrow', 0)) <= 0, (page, f['wide'], f['narrow'])
        assert 'main-content' in f['ids'] and 'Cite this page' in f['footer'] and '0.' in f['footer'], page


@reads
@pytest.mark.parametrize('theme', ['light', 'dark'])
def test_contrast(facts, theme):
    "Text stands out from its ground by 4.5 to 1, large text by 3 to 1, in the computed colours"
    assert sum(facts[page][theme]['seen'] for page in OPENED) > 1000
    none({k: v for page in OPENED for k, v in facts[page][theme]['found'].items()}.items())


@reads
def test_keyboard(site, browser):
    "Tab first reaches the link past the menus, and the element in focus is outlined"
    browser.open((site/'law.html').as_uri())
    def focused(what): return browser.js(f'(e => {what})(document.activeElement)')
    browser.press('Tab', 9)
    assert 'Skip' in focused('e.innerText') and focused('e.href').endswith('#main-content')
    for _ in range(5):
        browser.press('Tab', 9)
        style, width = (focused(f'getComputedStyle(e).outline{x}') for x in ('Style', 'Width'))
        assert style == 'solid' and float(width[:-2]) >= 2, focused('e.outerHTML')


SORTED = """(() => {
    const field = document.querySelector('label.filter input');
    const table = document.querySelector('article table');
    const first = () => name(table.tBodies[0].rows[0]);
    const name = row => row.cells[0].textContent.trim();
    const shown = () => [...table.tBodies[0].rows].filter(row => !row.hidden).map(name);
    const all = shown().length, button = table.tHead.querySelector('button');
    const names = [0, 1].map(() => (button.click(), first()));
    field.value = 'chain block';
    field.dispatchEvent(new Event('input'));
    return { all, names, found: shown(), says: field.parentNode.textContent };
})()"""

@reads
def test_long_tables_are_filtered_and_sorted(site, browser):
    "The table of all systems, by name upwards and downwards, and the rows that have two words"
    assert not browser.open((site/'systems.html').as_uri())
    got, names = browser.js(SORTED), sorted({*SYSTEMS, *BYTE_SYSTEMS}, key=str.lower)
    assert got['all'] == len(names) and got['names'][1] == names[-1]
    assert 'block verification' in got['found'] and f"{len(got['found'])} of {len(names)}" in got['says']


FOUND = {   # search term -> the pages, of which one is among the first three found
    'distribution': 'law', 'residual distribution': 'law', 'temperature': 'law', 'top-p': 'law',
    'KV cache': 'cache transformer', 'latency': 'cost slower measured', 'speed-up': 'cost',
    'draft model': 'loop models', 'bonus token': 'loop reject', 'rejection sampling': 'reject',
    'speculative sampling': 'reject', 'lossless': 'certify reject', 'test a sampler': 'samplers',
    'acceptance rate': 'rates', 'acceptance length': 'rates', 'greedy decoding': 'lenience law loop',
    'without replacement': 'siblings tree', 'multi-draft': 'siblings transport',
    'recursive rejection': 'siblings', 'optimal transport': 'transport', 'block verification': 'block',
    'Gumbel': 'coupled', 'typical acceptance': 'lenience medusa', 'lenience': 'lenience',
    'Medusa': 'medusa', 'Hydra': 'hydra', 'EAGLE': 'eagle', 'EAGLE-2': 'eagle', 'EAGLE-3': 'eagle3',
    'HASS': 'eagle3', 'multi-token prediction': 'mtp', 'DeepSeek': 'mtp', 'Falcon': 'falcon',
    'prompt lookup': 'lookup', 'n-gram': 'lookup target', 'suffix tree': 'suffix', 'REST': 'datastore',
    'Token Recycling': 'recycling', 'Jacobi': 'jacobi', 'Lookahead': 'lookahead', 'Ouroboros': 'ouroboros',
    'Sequoia': 'shapes', 'tree attention': 'attention', 'FlexAttention': 'attention',
    'CUDA graph': 'cache engine', 'Triton kernel': 'kernels', 'assisted generation': 'bridge',
    'transformers': 'bridge transformer', 'vLLM': 'traps layouts', 'cite': 'index questions',
    'residual': 'law', 'without_replacement': 'tree', 'temperature zero': 'law', 'eagle training': 'eagle',
    'ngram lookup': 'lookup', 'draft length': 'length', 'top-k tree': 'shapes', 'gpu kernel': 'kernels',
    'vllm bug': 'traps', 'roofline gpu': 'roofline', 'broken request': 'verify',
    'train medusa xyzzy': 'medusa'}

TYPED = """(queries => queries.map(query => {
    document.getElementById('search-results').replaceChildren();
    Search.performSearch(query);
    const items = [...document.querySelectorAll('#search-results ul.search > li')].slice(0, 3);
    const says = document.querySelector('#search-results .search-summary').textContent;
    return [says, ...items.map(li => [li.querySelector('a').href, li.querySelector('.context').textContent])];
}))"""

@reads
def test_search(site, browser):
    """From disk, each search term finds its page among the first three results, with the page's summary, and
    two words for a page find it together"""
    assert not browser.open(f'{(site/"search.html").as_uri()}?q=overlap')
    pages = {query: found.split() for query, found in FOUND.items()}
    for nb in notebooks():
        words, page = stage.search_words(nb), stage.page(nb.path.stem)
        for query in [*words, *map(' '.join, zip(words[1:], words))]: pages.setdefault(query, []).append(page)
    shown = dict(zip(pages, browser.js(f'{TYPED}({json.dumps([*pages])})')))
    first = {query: [re.search(r'(\w+)\.html', link)[1] for link, _ in found]
             for query, (_, *found) in shown.items()}
    none((query, pages[query], got) for query, got in first.items() if not {*pages[query]} & {*got})
    none((query, found) for query, (_, *found) in shown.items() for _, context in found if len(context) < 20)
    assert 'no page has xyzzy' in shown['train medusa xyzzy'][0] and 'no page' not in shown['gpu kernel'][0]

# -- Interactive figures -------------------------------------------------------------------------------

MOVE = """(at => { const figure = document.querySelector('[data-figure=NAME]');
    for (const [k, v] of Object.entries(at)) {
        const i = figure.querySelector(`[name=${k}]`);
        i.value = v;
        i.dispatchEvent(new Event('input'));
    }
    const values = [...figure.querySelectorAll('[data-value]')];
    return Object.fromEntries(values.map(b => [b.dataset.value, b.textContent])); })"""

def figure(site, browser, name):
    "Open a page that shows the figure, and return a function: set its sliders, read its numbers"
    page = next((p for p in PAGES if f'data-figure="{name}"' in html(site, p)), None)
    assert page, f'no chapter places `<!-- figure: {name} -->`'
    assert not browser.open((site/f'{page}.html').as_uri())
    return lambda **at: browser.js(f'{MOVE.replace("NAME", name)}({json.dumps(at)})')


WEIGHTS = [((4, 2, 2), (1, 4, 3)), ((1, 0, 0), (0, 1, 0)), ((3, 3, 3), (1, 1, 1)), ((9, 7, 0), (2, 5, 8)),
           ((0, 0, 5), (9, 9, 9))]

@reads
def test_interactive_distributions(site, browser):
    "Overlap and residual, in fractions, are those of `specref.core.law`"
    move = figure(site, browser, 'laws')
    for a, b in WEIGHTS:
        p, q = exact(*a), exact(*b)
        β, rest = overlap(p, q), ', '.join(map(str, residual(p, q)))
        weights = {f'p{i}': w for i, w in enumerate(a)} | {f'q{i}': w for i, w in enumerate(b)}
        heaviest_first = sorted(weights, key=weights.get, reverse=True)   # one weight is always positive
        found = move(**{k: weights[k] for k in heaviest_first})
        assert found == dict(beta=str(β), rest=str(1 - β), residual=rest)


@reads
def test_interactive_cost(site, browser):
    "Speed-up and best γ are those of `specref.speed.cost`"
    move = figure(site, browser, 'cost')
    for α, γ, c in [(.8, 5, .05), (.5, 1, .3), (0, 3, .5), (.99, 20, .01), (.75, 7, .02), (.9, 10, 1)]:
        g = best_gamma(α, c)
        speed, most = speedup(α, γ, c), speedup(α, g, c) if g else 1
        found = move(alpha=α, gamma=γ, c=c)
        assert found == dict(speed=f'{speed:.3f}', best=str(g), most=f'{most:.3f}'), (α, γ, c)


@reads
def test_interactive_batch(site, browser):
    "The speed-up and the largest batch that gains are those of `specref.speed.roofline`"
    move = figure(site, browser, 'batch')
    cases = (32, 500, .8, 4, .05), (1, 0, .6, 1, .5), (700, 0, .9, 6, .02), (9, 32000, .3, 9, .4)
    for batch, context, α, γ, c in cases:
        tau = capped_geometric(α, γ)
        def gain(b): return pays(SHAPES['Llama-3.1-8B'], 'H100 SXM', Workload(b, context, γ, tau), c)
        last = max((b for b in range(1, 1025) if gain(b)), default='none')
        found = move(batch=batch, context=context, alpha=α, gamma=γ, c=c)
        assert found == dict(speed=f'{gain(batch).speedup:.3f}', last=str(last)), (batch, context, α, γ, c)


@reads
def test_figures_respond_to_the_keyboard(site, browser):
    "An arrow key moves a slider, the number beside it, and the status text; the last positive weight stays"
    move = figure(site, browser, 'laws')
    before = move(p0=4, p1=2, p2=2)
    def found(css, what): return browser.js(f"document.querySelector('[data-figure=laws] {css}').{what}")
    found('[name=p0]', 'focus()')
    browser.press('ArrowRight', 39)
    assert found('[name=p0]', 'nextSibling.textContent') == '5' and move() != before
    assert 'β' in found('[role=status]', 'innerText')
    move(p0=0, p1=0, p2=0)
    assert found('[name=p2]', 'value') == '1'
