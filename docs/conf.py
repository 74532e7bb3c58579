"The look of the book, and what Sphinx needs beyond its pages: definitions, numbers, statements"
import html, json, re
from functools import cache
from pathlib import Path

import pybtex.plugin
import stage
import yaml
from docutils import nodes
from sphinx.addnodes import pending_xref, toctree
from sphinx.search.en import SearchEnglish

cite = yaml.safe_load((stage.ROOT/'CITATION.cff').read_text(encoding='utf-8'))
project, version, language = 'specref', cite['version'], 'en'
extensions = ['myst_nb', 'sphinx_proof', 'sphinxcontrib.bibtex', 'sphinx_copybutton', 'sphinx.ext.mathjax',
              'sphinx-mathjax-offline']
nitpicky = True

nb_execution_mode, nb_merge_streams, nb_render_markdown_format = 'off', True, 'myst'
myst_enable_extensions = ['dollarmath', 'amsmath', 'colon_fence', 'attrs_block', 'deflist']
myst_heading_anchors = 3
bibtex_bibfiles = [str(stage.DOCS/'refs.bib')]
prf_realtyp_to_countertyp = {e.lower(): 'theorem' for e in stage.ENVS}  # one count for all in a chapter

html_theme, html_title = 'sphinx_book_theme', 'specref'
html_favicon = '_static/favicon.svg'
html_static_path, html_css_files = ['_static'], ['specref.css']
html_js_files = [(name, dict(defer='defer')) for name in ('figures.js', 'tables.js')]
html_context = dict(default_mode='auto')
html_copy_source = html_show_sphinx = html_use_index = html_domain_indices = False
html_theme_options = dict(
    logo=dict(text='specref'), home_page_in_toc=True, show_toc_level=2, use_download_button=False,
    search_bar_text='Search the book', navbar_persistent=[],
    footer_content_items=['cite.html'])
templates_path = ['_templates']

pybtex.plugin.find_plugin = cache(pybtex.plugin.find_plugin)   # else found anew for each citation


class Search(SearchEnglish):
    "English, each word stemmed once; n-gram is found as ngram too"
    @cache
    def stem(self, word): return super().stem(word)
    def split(self, said): return super().split(said) + [w.replace('-', '') for w in HYPHENED.findall(said)]

HYPHENED = re.compile(r'(?<![^\W\d_])[^\W\d_]+(?:-[^\W_]+)+')   # tried once a word


@cache
def book(app): return json.loads((Path(app.srcdir)/'book.json').read_text(encoding='utf-8'))


def define(app, doctree):
    "Exported cells show their module, and their names link to them, here and from other books (objects.inv)"
    def exported(n): return isinstance(n, nodes.container) and 'defines' in n.get('cell_metadata', {})
    for cell in doctree.findall(exported):
        module = cell['cell_metadata']['module']
        for name, kind in cell['cell_metadata']['defines'].items():
            cell['ids'].append(f'{module}.{name}')
            full = f'{module}.{name}'
            app.env.domains.python_domain.note_object(full, kind, full, location=cell)
        cell[0].insert(0, nodes.raw('', f'<div class="exported">{module}</div>', format='html'))


def home(said, before, here, book):
    "The full name that backticked words mean on this page: its own, or one of chapters up to here"
    m = re.fullmatch(r'(?:specref\.(?:\w+\.)+)?(\w+)(\.\w+)?(?:\(.*\))?', said)
    if not m or re.search("(['’]s?|own) $", before): return None   # transformers' `generate`
    def at(page): return stage.order(f'{book["pages"].get(page) or 999}_')
    found = [full for full in book['full_names'].get(m[1], ()) if at(book['defined'][full]) <= at(here)]
    own = [full for full in found if book['defined'][full] == here]
    return (own or found)[0] if len(own or found) == 1 and (not m[2] or m[1][0].isupper()) else None


CLOSED = (nodes.reference, pending_xref, nodes.title, nodes.literal, nodes.literal_block, nodes.math,
          nodes.raw)

def refer(app, doctree):
    "Links from backticked names to their cells, from `Theorem siblings` in prose to the theorem"
    known, here = book(app), app.env.docname
    def xref(domain, kind, target, inner):
        return pending_xref('', inner, refdomain=domain, reftype=kind, reftarget=target, refexplicit=True,
                            refdoc=here, refwarn=True)
    def free(node):
        while node := node.parent:
            if isinstance(node, CLOSED): return False
        return True
    for node in [n for n in doctree.findall(nodes.literal) if free(n) and 'code' not in n['classes']]:
        before = node.parent[node.parent.index(node) - 1].astext() if node.parent.index(node) else ''
        full = home(node.astext(), before, here, known)
        if full: node.replace_self(xref('py', 'obj', full, node.deepcopy()))
    for node in [n for n in doctree.findall(nodes.Text) if free(n)]:
        done, parts = 0, []
        for a, b, anchor in stage.mentions(str(node), known['statements']):
            # a reference whose text is its target reads `Theorem 5.1`
            parts += [nodes.Text(node[done:a]), xref('prf', 'ref', anchor, nodes.inline('', anchor))]
            done = b
        if parts: node.parent.replace(node, [*parts, nodes.Text(node[done:])])


def glue(app, doctree):
    "No line ends between a formula and what stands close to it: browsers break there unless told otherwise"
    for math in [*doctree.findall(nodes.math)]:
        parent, at = math.parent, math.parent.index(math)
        after, before = parent[at + 1:at + 2], parent[at - 1:at] if at else []
        if after and isinstance(after[0], nodes.Text) and re.match(r'[^\s–—/]', after[0]):
            parent[at + 1] = nodes.Text(WORD_JOINER + after[0])
        if before and isinstance(before[0], nodes.Text) and re.search(r'[(\[“‘]$', before[0]):
            parent[at - 1] = nodes.Text(before[0] + WORD_JOINER)

WORD_JOINER = '\u2060'


def summed(app, doctree):
    "The summary of a page, which the search shows: its first paragraph"
    first = next(doctree.findall(nodes.paragraph), None)
    app.env.metadata[app.env.docname]['summary'] = first.astext() if first else ''


def searched(app, pagename, templatename, context, doctree):
    "What the search page knows of each page: its summary, and the words that readers type for it"
    if pagename != 'search': return
    words, summaries = book(app)['searched'], app.env.metadata
    pages = {page: [summaries[page].get('summary', ''), words.get(page, [])] for page in app.env.found_docs}
    said = json.dumps(pages).replace('<', r'\u003c')
    app.add_js_file(None, body=said, type='application/json', id='search-pages')
    app.add_js_file('search.js', defer='defer')


def count(app, env):
    "Number statements by chapter: the third of 05_reject is 5.3, whatever chapters are added"
    pages = {page: stage.short(number) for page, number in book(app)['pages'].items()}
    for doc, kinds in env.toc_fignumbers.items():
        for ids in kinds.values(): ids.update({anchor: (pages[doc], i) for i, anchor in enumerate(ids, 1)})


def single(app, doctree, docname):
    "Take back the one id that sphinx-proof gives to the inside of every statement"
    for section in doctree.findall(nodes.section):
        if section['ids'] == ['proof-content']: section['ids'] = []


# from `Args:` to `See also:`, which the page of names shows
DESCRIBED = re.compile(rf'(?<=\n\n)<span class="sd"> {{4}}(?:{"|".join(stage.DOC_PARTS)}):.*?\n(?=\n)', re.S)

@cache
def statement_pages(app):
    "The page of each statement, by its anchor"
    numbered = app.env.toc_fignumbers.items()
    return {anchor: doc for doc, kinds in numbered for ids in kinds.values() for anchor in ids}

def docstrings(app, pagename, templatename, context, doctree):
    "Theorems that a docstring cites are linked too; what it says of parameters, result and errors is folded"
    known, where = book(app), statement_pages(app)
    def link(m):
        out, done = '', 0
        for a, b, anchor in stage.mentions(m[0], known['statements']):
            uri = app.builder.get_relative_uri(pagename, where[anchor])
            out += f'{m[0][done:a]}<a href="{uri}#{anchor}">{m[0][a:b]}</a>'
            done = b
        return out + m[0][done:]
    strings = r'<span class="s[\w]*">[^<]*</span>'
    if 'body' not in context: return
    body = re.sub(strings, link, context['body'])
    context['body'] = DESCRIBED.sub(r'<details class="described"><summary></summary>\g<0></details>', body)


def cited(app, pagename, templatename, context, doctree):
    "What the foot of a page says of how to cite it"
    title, known = html.unescape(re.sub('<[^>]*>', '', context.get('title', ''))), book(app)
    title = title.removeprefix(f'{stage.short(known["pages"].get(pagename, ""))} ')
    context |= dict(bibtex=stage.bibtex(pagename, title, cite, known['addresses']), licence=cite['license'],
                    released=cite['date-released'], repository=known['addresses'].get('Repository'))


@cache
def contents(app):  # -> [(part, {page: title})]
    "What the sidebar of every page lists, gathered once: Sphinx would do it anew for each page"
    def title(page): return app.builder.render_partial(app.env.titles[page])['title']
    trees = app.env.master_doctree.findall(toctree)
    return [(tree.get('caption'), {page: title(page) for _, page in tree['entries']}) for tree in trees]


def listed(app, pagename, templatename, context, doctree):
    "What the template of the sidebar reads"
    context['contents'] = contents(app)


def setup(app):
    app.config.html_baseurl = book(app)['addresses'].get('Documentation', '')
    app.config.mathjax_path = 'mathjax/tex-svg.js'   # drawn glyphs: a page opened from disk may load no fonts
    app.add_search_language(Search)
    app.connect('doctree-read', define)
    app.connect('doctree-read', refer)
    app.connect('doctree-read', summed)
    app.connect('doctree-read', glue)
    app.connect('env-check-consistency', lambda app, env: count(app, env))
    app.connect('doctree-resolved', single)
    app.connect('html-page-context', docstrings)
    app.connect('html-page-context', cited)
    app.connect('html-page-context', listed)
    app.connect('html-page-context', searched)
    return dict(parallel_read_safe=True, parallel_write_safe=True)
