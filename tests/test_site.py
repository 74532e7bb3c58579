"The book, built once and read in a headless Chromium with no network: complete, linked, typeset, readable, and its figures compute what the package does"
import ast, fcntl, json, os, re, shutil, subprocess, sys
from html import unescape
from pathlib import Path

import pytest
from browser import Browser
from house import PLAIN, ROOT, anchors, marked, modules, notebooks

from specref.core.law import exact, overlap, residual

sys.path.append(str(ROOT/'docs'))
import stage

reads = pytest.mark.skipif(not shutil.which('chromium'), reason='no chromium on this machine to read the site with')
PAGES = sorted({stage.page(nb.path.stem) for nb in notebooks()} | {'symbols', 'api', 'bibliography', 'search'})

# What is asked of a page, in its own language

FACTS = r"""(() => {
  const all = (css, f) => [...document.querySelectorAll(css)].map(f), article = document.querySelector('article') ?? document.querySelector('main');
  const ids = all('[id]', e => e.id);
  return {
    lang: document.documentElement.lang, title: document.title, ids, twice: ids.filter((x, i) => ids.indexOf(x) < i),
    links: [...document.links].map(a => a.href), headings: [...article.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => +h.tagName[1]),
    wordless: [...document.images].filter(i => !i.alt || /\.(png|svg)$/.test(i.alt)).map(i => i.src), empty: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
    formulas: all('.math', e => e).length, typeset: all('.math mjx-container', e => e).length, wrong: all('[data-mml-node=merror]', e => e.textContent),
    raw: /\\[(\[]/.test(article.innerText), nameless: all('a, button, input', e => e).filter(e => !e.innerText.trim() && !e.ariaLabel && !e.title && !e.labels?.length && !e.placeholder && !e.querySelector('title') && e.checkVisibility()).map(e => e.outerHTML.slice(0, 200)),
    wide: document.documentElement.scrollWidth - innerWidth, text: article.innerText, footer: document.querySelector('footer.bd-footer-content, .bd-footer-content').innerText };
})()"""

CONTRAST = r"""(theme => {
  document.documentElement.dataset.theme = theme;
  document.head.append(Object.assign(document.createElement('style'), {textContent: '* { transition: none !important }'}));
  const parse = c => { const [r, g, b, a = 1] = c.match(/[\d.]+/g).map(Number); return c.startsWith('color(srgb') ? [r*255, g*255, b*255, a] : [r, g, b, a]; };
  const over = (top, below) => [0, 1, 2].map(i => top[i]*top[3] + below[i]*(1 - top[3])).concat(1);
  const light = c => [.2126, .7152, .0722].reduce((s, w, i) => { const v = c[i]/255; return s + w*(v <= .04045 ? v/12.92 : ((v + .055)/1.055)**2.4); }, 0);
  const ground = e => e ? over(parse(getComputedStyle(e).backgroundColor), ground(e.parentElement)) : [255, 255, 255, 1];
  const found = {}, walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, s = getComputedStyle(e);
    if (!walk.currentNode.data.trim() || !e.checkVisibility({checkVisibilityCSS: true}) || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(e.tagName) || e.closest('mjx-assistive-mml')) continue;
    const below = ground(e), [a, b] = [light(over(parse(e.closest('svg') ? s.fill : s.color), below)), light(below)];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05), size = parseFloat(s.fontSize), big = size >= 24 || size >= 18.66 && s.fontWeight >= 700;
    seen++;
    if (ratio < (big ? 3 : 4.5)) found[`${e.tagName}.${e.className} in ${e.parentElement.className}`] = [ratio.toFixed(2), s.color, below.join(), e.textContent.slice(0, 30)];
  }
  return {seen, found};
})"""


def build(place, root=ROOT):
    "`make site`, in a process of its own"
    call = [sys.executable, '-W', 'ignore', '-c', 'import sys, stage; sys.exit(stage.site(*sys.argv[1:]))', place, root, place.with_name('work')]
    return subprocess.run(call, cwd=ROOT/'docs', capture_output=True, text=True)


@pytest.fixture(scope='session')
def built(tmp_path_factory):
    "The site, what its build said, and what a browser found on every page: made once, also where several workers test"
    base = tmp_path_factory.getbasetemp()
    base = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
    with open(base/'site.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base/'site.json').exists():
            made = build(base/'site')
            facts = visit(base/'site', base/'reader') if shutil.which('chromium') else {}
            (base/'site.json').write_text(json.dumps(dict(failed=made.returncode, said=made.stderr, facts=facts)))
    return base/'site', json.loads((base/'site.json').read_text())


def visit(site, home):
    "Open every page and note the facts"
    browser, facts = Browser(home), {}
    for file in sorted(site.glob('*.html')):
        complaints = browser.open(file.as_uri())
        facts[file.stem] = browser.js(FACTS) | dict(complaints=complaints) | {t: browser.js(f'{CONTRAST}("{t}")') for t in ('light', 'dark')}
        browser('Emulation.setDeviceMetricsOverride', width=390, height=800, deviceScaleFactor=1, mobile=True)
        facts[file.stem]['narrow'] = browser.js('document.documentElement.scrollWidth - innerWidth')
        browser('Emulation.clearDeviceMetricsOverride')
    browser.close()
    return facts


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

# -- Built -----------------------------------------------------------------------------------------------------------------

def test_builds_without_a_warning(built):
    "Dead links, unknown citations and whatever else Sphinx warns of are errors; each chapter is a page"
    assert not built[1]['failed'], built[1]['said']
    assert [f.stem for f in sorted(built[0].glob('*.html'))] == PAGES


def small(root, *cells):
    "A house of one chapter and a front page"
    def cell(source):
        kind = 'code' if source.startswith('#|') else 'markdown'
        return dict(cell_type=kind, id=f'c{abs(hash(source))}'[:8], metadata={}, source=source) | (dict(outputs=[], execution_count=None) if kind == 'code' else {})
    for d in ('nbs', 'docs', 'tests'): (root/d).mkdir(parents=True)
    shutil.copy(ROOT/'docs/bibliography.md', root/'docs')
    for stem, sources in {'index': ['# Front'], '00_law': ['# Law', '#| default_exp core.law', *cells]}.items():
        (root/f'nbs/{stem}.ipynb').write_text(json.dumps(dict(cells=[cell(s) for s in sources], metadata=PLAIN, nbformat=4, nbformat_minor=5)))
    return root


FAULTS = {   # planted -> what the build says of it
    'See [the cost](06_costs.ipynb).': r"law\.ipynb.*'costs\.ipynb'",
    'See [it](00_law.ipynb#thm-none).': "law.*'thm-none' not found",
    'As in {cite}`nobody1999`.': 'law.ipynb.*nobody1999',
    '<!-- figure: none -->': '00_law.ipynb: no figure is called none',
    '### Three': r'law\.ipynb.*H1 to H3',
    '#| exprot\nx = 1': '00_law.ipynb.*no directive is called exprot',
}

def test_build_has_teeth(tmp_path):
    "Each planted fault is named with its page, and fails the build"
    made = build(tmp_path/'site', small(tmp_path/'faulty', *FAULTS))
    assert made.returncode
    none((fault, made.stderr) for fault, said in FAULTS.items() if not re.search(said, made.stderr))


def test_names_and_theorems_are_links(tmp_path):
    "A sound house builds in silence; what its prose, its docstrings and its tests name is found and linked"
    root = small(tmp_path/'sound', '> **Theorem (Twice, 3.5).**<a id="thm-two"></a> One and one.', '#| export\ndef twice(x):\n    "Two of them (Theorem two)"\n    return 2*x',
                 "See `twice`, `specref.core.law.twice`, another's `twice`, [the front](index.ipynb), Theorem two, Theorems 3.5, ten and {cite}`leviathan2023`.")
    (root/'tests/test_law.py').write_text('@proves("thm-two")\ndef test_a(): pass\n@proves("thm-two")\ndef test_b(): pass\n')
    made = build(tmp_path/'site', root)
    assert not made.returncode and not made.stderr, made.stderr
    assert {f.name for f in tmp_path.iterdir()} == {'site', 'work', 'sound'}   # nothing is left beside the site
    said = re.sub('<(?!a |/a)[^>]*>', '', html(tmp_path/'site', 'law'))
    assert 'Theorem 00.1  (Twice, 3.5)' in said and said.count('checked by tests/test_law.py::test_a, ::test_b') == 2
    assert re.search(r'href="#thm-two">Theorem two</a>\)"', said) and re.search(r'href="#thm-two">Theorem two</a>, <a [^>]*href="#thm-two">Theorems 3.5</a>, ten', said)
    assert len(re.findall(r'href="#specref.core.law.twice"[^>]*>(?:specref\.core\.law\.)?twice</a>', said)) == 2 and 'another’s twice' in said


def test_readme_is_the_front_page():
    "README.md and its pictures are what `make site` writes"
    for file, content in stage.readme().items(): assert (ROOT/file).read_text(encoding='utf-8') == content, f'{file}: `make site` writes it anew'

# -- What the pages hold ---------------------------------------------------------------------------------------------------

def test_theorems_have_their_addresses_and_their_tests(site):
    "chapter.html#anchor is a numbered statement, with the tests that prove it"
    proofs = marked('proves')
    for nb in notebooks():
        found = html(site, stage.page(nb.path.stem))
        for i, (kind, title, anchor) in enumerate(stage.statements(nb), 1):
            at = re.search(rf'<div class="proof {kind.lower()} admonition" id="{anchor}">(.*?)</section>', found, re.S)
            assert at and f'{kind} {stage.number(nb.path.stem)}.' in at[1], f'{nb.path.stem}: {anchor}'
            for t in proofs.get(anchor, ()): assert f'::{t.split("::")[1]}</span>' in at[1], f'{anchor}: {t}'
    assert {a for a, _ in anchors()} == {s[2] for nb in notebooks() for s in stage.statements(nb)}, 'an anchor that is no statement'


def test_every_public_name_is_found(site, facts):
    "objects.inv and the page of names hold each module's `__all__`, and lead to where it is defined"
    from sphinx.util.inventory import InventoryFile
    inventory = InventoryFile.loads((site/'objects.inv').read_bytes(), uri='')
    names = {n: item.uri for kind in ('py:function', 'py:class', 'py:data') for n, item in inventory.data.get(kind, {}).items()}
    public = {f'{".".join(f.relative_to(ROOT).with_suffix("").parts)}.{n}' for f in modules() for s in ast.parse(f.read_text(encoding='utf-8')).body
              if isinstance(s, ast.Assign) and getattr(s.targets[0], 'id', '') == '__all__' for n in ast.literal_eval(s.value)}
    assert names.keys() == public
    api = html(site, 'api')
    for name, uri in names.items():
        page, _, anchor = uri.lstrip('/').partition('#')
        assert f'id="{anchor}"' in (site/page).read_text(encoding='utf-8') and f'href="{page}#{anchor}"' in api, name


def test_hidden_code_is_hidden(site):
    "Solutions, set-up and drawing code stay in the notebook; what is exported is shown and says where it lives"
    for nb in notebooks():
        shown = unescape(re.sub('<[^>]*>', '', html(site, stage.page(nb.path.stem))))
        assert '#|' not in shown, nb.path.stem
        for c in nb.code:
            dirs, last = stage.directives(c['source']), c['source'].splitlines()[-1:]
            hidden = 'hide' in dirs or dirs.get('echo') == 'false'
            if hidden and last and len(last[0]) > 40: assert last[0] not in shown, f'{nb.path.stem}: {last[0]}'
            if c in nb.exported and not hidden: assert stage.DIRECTIVE.sub('', c['source']).strip() in shown, f'{nb.path.stem}: {c["id"]}'
        assert html(site, stage.page(nb.path.stem)).count('class="exported"') == sum('hide' not in stage.directives(c['source']) and bool(list(stage.definitions(c))) for c in nb.exported if nb.module)


def test_asks_for_nothing_elsewhere(site):
    "No page, style or script of the site loads from the network"
    loads = re.compile(r'(?:<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc|<link\b[^>]*\bhref)=["\']?(?:https?:)?//|url\(["\']?(?:https?:)?//|@import["\' ]+(?:url\()?["\']?http')
    none((f.name, m[0][-90:]) for f in [*site.glob('*.html'), *(site/'_static').rglob('*.css')] for m in loads.finditer(f.read_text(encoding='utf-8')))

# -- Read ------------------------------------------------------------------------------------------------------------------

@reads
def test_pages_open_without_complaint(facts):
    "From disk: no error or warning in the console, nothing missing, nothing asked of the network, no picture empty"
    assert sorted(facts) == PAGES
    none((page, *f['complaints'], *f['empty']) for page, f in facts.items() if f['complaints'] or f['empty'])


@reads
def test_links_lead_somewhere(site, facts):
    "Every link inside the site finds its page and its anchor"
    def dead(link):
        file, _, anchor = link.removeprefix(site.as_uri() + '/').partition('#')
        if link.startswith('http') or not file.endswith('.html'): return not link.startswith('http')
        return file[:-5] not in facts or anchor and anchor not in facts[file[:-5]]['ids']
    none((page, l) for page, f in facts.items() for l in set(f['links']) if dead(l))


@reads
def test_mathematics_is_typeset(facts):
    assert sum(f['formulas'] for f in facts.values()) > 100
    none((page, f['formulas'], f['typeset'], f['wrong']) for page, f in facts.items() if f['formulas'] != f['typeset'] or f['wrong'] or f['raw'])


def test_no_formula_is_left_as_it_was_written(site):
    "Outside code no dollar stands on a page: what was meant as mathematics is mathematics, in theorems too"
    words = {p.stem: re.sub(r'<[^>]*>', '', re.sub(r'<(pre|code|script|style)\b.*?</\1>', '', p.read_text(encoding='utf-8'), flags=re.S)) for p in site.glob('*.html')}
    none((page, said[max(0, said.index('$') - 60):][:120]) for page, said in words.items() if '$' in said)


@reads
def test_pages_are_accessible(facts):
    "A language, one first heading and no level left out, words for every picture and control, ids given once, no sideways scrolling on a telephone"
    for page, f in facts.items():
        steps = list(zip([0, *f['headings']], f['headings']))
        assert f['lang'] == 'en' and f['headings'].count(1) == 1 and all(b <= a + 1 for a, b in steps), (page, f['headings'])
        assert not f['wordless'] and not f['twice'] and not f['nameless'], (page, f['wordless'], f['twice'], f['nameless'])
        assert f['wide'] <= 0 and f['narrow'] <= 0, (page, f['wide'], f['narrow'])
        assert 'main-content' in f['ids'] and 'To cite it' in f['footer'] and '0.' in f['footer'], page


@reads
@pytest.mark.parametrize('theme', ['light', 'dark'])
def test_contrast(facts, theme):
    "Text stands out from its ground by 4.5 to 1, large text by 3 to 1, in every colour that a page really has"
    assert sum(f[theme]['seen'] for f in facts.values()) > 1000
    none({k: v for f in facts.values() for k, v in f[theme]['found'].items()}.items())


@reads
def test_keyboard(site, browser):
    "Tab finds the way past the menus first, and what it is on is outlined"
    browser.open((site/'law.html').as_uri())
    def tab(): [browser('Input.dispatchKeyEvent', type=t, key='Tab', code='Tab', windowsVirtualKeyCode=9) for t in ('keyDown', 'keyUp')]
    def at(what): return browser.js(f'(e => {what})(document.activeElement)')
    tab()
    assert 'Skip' in at('e.innerText') and at('e.href').endswith('#main-content')
    for _ in range(5):
        tab()
        assert at('getComputedStyle(e).outlineStyle') == 'solid' and float(at('getComputedStyle(e).outlineWidth')[:-2]) >= 2, at('e.outerHTML')


@reads
@pytest.mark.parametrize('word, page', [('lenience', 'symbols'), ('residual', 'law'), ('without_replacement', 'tree')])
def test_search(site, browser, word, page):
    "The search finds a word of the prose and a name of the package, from disk"
    assert not browser.open(f'{(site/"search.html").as_uri()}?q={word}')
    found = browser.js("""new Promise(done => { const wait = setInterval(() => { const found = [...document.querySelectorAll('#search-results ul.search a')];
        if (/found|match/.test(document.querySelector('.search-summary')?.innerText)) { clearInterval(wait); done(found.map(a => a.href)); } }, 50); })""")
    assert any(Path(l.partition('?')[0].partition('#')[0]).stem == page for l in found), found

# -- The figures that move -------------------------------------------------------------------------------------------------

def figure(site, browser, name):
    "Open a page that shows the figure, and give a function: set its sliders, get its numbers"
    page = next((p for p in PAGES if f'data-figure="{name}"' in html(site, p)), None)
    assert page, f'no chapter places `<!-- figure: {name} -->`'
    assert not browser.open((site/f'{page}.html').as_uri())
    def move(**at):
        return browser.js(f"""(at => {{ const figure = document.querySelector('[data-figure={name}]');
            for (const [k, v] of Object.entries(at)) {{ const i = figure.querySelector(`[name=${{k}}]`); i.value = v; i.dispatchEvent(new Event('input')); }}
            return Object.fromEntries([...figure.querySelectorAll('[data-value]')].map(b => [b.dataset.value, b.textContent])); }})({json.dumps(at)})""")
    return move


@reads
def test_laws_can_be_moved(site, browser):
    "Overlap and residual, in fractions, are those of `specref.core.law`"
    move = figure(site, browser, 'laws')
    for a, b in [((4, 2, 2), (1, 4, 3)), ((1, 0, 0), (0, 1, 0)), ((3, 3, 3), (1, 1, 1)), ((9, 7, 0), (2, 5, 8)), ((0, 0, 5), (9, 9, 9))]:
        p, q = exact(*a), exact(*b)
        want = dict(beta=str(overlap(p, q)), rest=str(1 - overlap(p, q)), residual=', '.join(map(str, residual(p, q))))
        weights = {f'p{i}': w for i, w in enumerate(a)} | {f'q{i}': w for i, w in enumerate(b)}
        assert move(**dict(sorted(weights.items(), key=lambda kw: -kw[1]))) == want   # the heaviest first: some weight always stays


@reads
def test_cost_can_be_moved(site, browser):
    "Speed-up and best γ are those of `specref.core.cost`"
    from specref.core.cost import best_gamma, speedup
    move = figure(site, browser, 'cost')
    for α, γ, c in [(.8, 5, .05), (.5, 1, .3), (0, 3, .5), (.99, 20, .01), (.75, 7, .02), (.9, 10, 1)]:
        g = best_gamma(α, c)
        assert move(alpha=α, gamma=γ, c=c) == dict(speed=f'{speedup(α, γ, c):.3f}', best=str(g), most=f'{speedup(α, g, c) if g else 1:.3f}'), (α, γ, c)


@reads
def test_figures_obey_the_keyboard(site, browser):
    "An arrow key moves a slider, the number beside it, and what is announced; the last weight cannot be taken away"
    move = figure(site, browser, 'laws')
    before = move(p0=4, p1=2, p2=2)
    browser.js("document.querySelector('[data-figure=laws] [name=p0]').focus()")
    [browser('Input.dispatchKeyEvent', type=t, key='ArrowRight', code='ArrowRight', windowsVirtualKeyCode=39) for t in ('keyDown', 'keyUp')]
    assert browser.js("document.activeElement.nextSibling.textContent") == '5' and move() != before
    assert browser.js("document.querySelector('[data-figure=laws] [role=status]').innerText.includes('β')")
    move(p0=0, p1=0, p2=0)
    assert browser.js("document.querySelector('[data-figure=laws] [name=p2]').value") == '1'
