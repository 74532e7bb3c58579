"Chapter 04: the loop, match, what generate returns"
import copy, json, pickle, re, sys
from dataclasses import FrozenInstanceError, dataclass
from fractions import Fraction
from functools import partial
from html import unescape
from itertools import pairwise

import numpy as np, pytest
from hypothesis import strategies as st

from helpers import constant, examples, models, proves, random_table, refuses, seeds
from specref import (add_paths, autoregressive, Branching, Chain, Drafter, exact, generate, generate_texts,
                     Generation, Ledger, loop_law, match, no_draft, one_hot, reject, rounds, Seeded, System,
                     SYSTEMS, TableModel, target_law, trace, Tree, tv_outcomes, Verdict)
from specref.core import loop
from specref.core.loop import as_drafter, bounded, clip, RoundCounts
from specref.core.rng import Irreproducible

names = st.sampled_from(sorted(SYSTEMS))
stops = st.sets(st.integers(0, 2), max_size=2)

def wrong_edges(seed):
    "A drafter whose edges state wrong distributions: random tokens, probes, point masses, uniform rows"
    def draft(ctx, rng):
        tree, r = Tree(ctx), np.random.default_rng([seed, *ctx])
        for _ in range(r.integers(0, 6)):
            x = int(r.integers(3))
            law = [None, one_hot(x, 3, exact=True), exact(1, 1, 1)][r.integers(3)]
            tree.add(int(r.integers(len(tree))), x, law)
        return tree
    return draft

@proves("thm-match")
@examples(20, models(), seeds, st.integers(1, 4), stops)
def test_match_is_exact_for_any_draft(pair, seed, n, stop):
    "Any tree, with wrongly stated edges, probes and equal siblings: the distribution is the target's"
    assert loop_law(pair[0], wrong_edges(seed), match, (0,), n, stop) == target_law(pair[0], (0,), n, stop)

@proves("thm-match")
def test_match_needs_independent_noise():
    "A draft that depends on the verifier's noise changes the distribution: the condition is needed"
    fair = constant(1, 1)
    def peek(ctx, rng):   # at the noise of the second token
        suits = rng.pick(exact(1, 1), key=(len(ctx), 1))
        return add_paths(Tree(ctx), [(0,), (1,)] * suits, 2, rng, exact=True)
    def keyed(p, tree, rng, i=0):
        y = rng.pick(p[i], key=(len(tree.ctx), tree.depth[i]))
        return next((keyed(p, tree, rng, c) for c in tree.children(i) if tree.token[c] == y), Verdict(i, y))
    assert loop_law(fair, no_draft, keyed, (0,), 2) == target_law(fair, (0,), 2)
    assert tv_outcomes(loop_law(fair, peek, keyed, (0,), 2), target_law(fair, (0,), 2)) == Fraction(1, 4)

def offers(*paths):
    return as_drafter(lambda draft, rng: add_paths(Tree(draft), paths, 4, rng, exact=True))   # any name

@proves("thm-cutting")
@examples(20, models(), names, st.integers(0, 2), st.integers(0, 2), stops)
def test_cutting_a_longer_text(pair, name, n, more, stop):
    "n tokens with stop tokens have the distribution of a longer text without them, cut"
    target, draft = pair
    system = SYSTEMS[name](draft, gamma=2, shape=(2,), exact=True)
    def cut(law): return law.of(lambda y: clip(y, n, stop))
    long = loop_law(target, system.drafter, system.verify, (0,), n + more)
    assert loop_law(target, system.drafter, system.verify, (0,), n, stop) == cut(long)
    assert cut(long) == cut(target_law(target, (0,), n + more)) == target_law(target, (0,), n, stop)

@st.composite
def runs(draw):
    "A generation, the tokens passed to `watch`, and the same rounds computed again"
    target, draft = draw(models())
    system = SYSTEMS[draw(names)](draft, gamma=3, shape=(2, 1), exact=True)
    n, stop, seed, seen = draw(st.integers(0, 9)), draw(stops), draw(st.integers(0, 99)), []
    text = system(target, (0, 1), n, Seeded(seed), stop=stop, watch=seen.append)
    turn = rounds(target, system.drafter, system.verify, [0, 1], Seeded(seed))
    again = [next(turn) for _ in text.ledger.rounds]
    assert text == clip(sum((r.tokens for r in again), ()), n, stop) == sum(seen, ()) and all(seen)
    assert len(text) == n or text[-1] in stop
    return target, text, seen, again

@examples(25, runs())
def test_the_steps_of_a_generation(run):
    "Token, log-probability, round and status of each step, also in the trace and in a notebook"
    target, text, seen, again = run
    rows = [float(target.law((0, 1, *text[:t]))[x]) for t, x in enumerate(text)]
    ends = ["A" * (len(r.tokens) - 1) + ("Y" if r.tree.children(r.verdict.node) else "B") for r in again]
    places = [i for i, new in enumerate(seen) for _ in new]
    assert [(s.token, s.status, s.round) for s in text.steps] == [*zip(text, "".join(ends), places)]
    assert text.logprobs == tuple(s.logprob for s in text.steps) == pytest.approx([np.log(w) for w in rows])
    shown = [part for part in trace(text, "<{}>".format).replace("\n", "  ").split("  ") if ":" in part]
    assert shown == [f"{s.status}:<{s.token}> ({np.exp(s.logprob):.2f})" for s in text.steps]
    for status, tag in dict(A="span", Y="b", B="u").items():
        count, *marked = re.findall(f"<{tag}>(.*?)</{tag}>", text._repr_html_()) or ["0 "]
        mine = [str(s.token) for s in text.steps if s.status == status]
        assert " ".join(marked).split() == mine and count.startswith(f"{len(mine)} ")

@examples(25, runs())
def test_the_ledger_counts_the_rounds(run):
    "Every number, computed again from rounds and steps; probes are not counted as drafts"
    _, text, seen, again = run
    ledger, accepted = text.ledger, [0] * len(again)
    for step in text.steps: accepted[step.round] += step.status == "A"
    assert ledger.column("accepted") == accepted and ledger.column("emitted") == [*map(len, seen)]
    offered = [[r.tree.depth[c] for kids in r.tree.kids for c in kids] for r in again]
    drafted, total, deepest = sum(map(len, offered)), sum(accepted), max(sum(offered, []), default=0)
    assert (ledger.num_draft_tokens, ledger.num_accepted_tokens) == (drafted, total)
    assert ledger.num_emitted_tokens == len(text) and ledger.num_drafts == sum(map(bool, offered))
    assert ledger.draft_acceptance_rate == total / (drafted or 1)
    rates = [np.mean([k >= i for k in accepted]) for i in range(1, deepest + 1)]
    assert ledger.acceptance_rate_per_position == rates
    assert ledger.mean_acceptance_length == len(text) / (len(again) or 1)

def test_what_lies_behind_the_end_does_not_count():
    "Of five accepted draft tokens the third is a stop token, or the last that is wanted: 3 tokens in a round"
    target = TableModel(4, lambda text: one_hot(2 if len(text) == 3 else 1, 4))
    for how in (dict(n=20, stop={2}), dict(n=3)):
        ledger = generate(target, offers((1, 1, 2, 1, 1)), match, (0,), rng=Seeded(0), **how).ledger
        assert ledger.mean_acceptance_length == ledger.num_accepted_tokens == 3 < ledger.num_draft_tokens == 5
        assert ledger.acceptance_rate_per_position == [1, 1, 1, 0, 0]

@examples(10, runs())
def test_the_ledger_as_json_and_as_metrics(run):
    "The numbers of the ledger through JSON, and under the names of vLLM's metrics"
    ledger, accepted = run[1].ledger, run[1].ledger.column("accepted")
    told = json.loads(json.dumps(ledger.to_dict()))
    assert told["num_rounds"] == len(ledger.rounds) and told["num_draft_tokens"] == ledger.num_draft_tokens
    assert told["models"]["target"]["calls"] == ledger.models["target"].calls
    lines = dict(line.rsplit(" ", 1) for line in ledger.prometheus(model_name='a "b"').splitlines())
    name = r'vllm:spec_decode_num_accepted_tokens{}_total{{model_name="a \"b\""{}}}'.format
    deepest = max(ledger.column("depth"), default=0)
    at = [lines[name("_per_pos", f',position="{i}"')] for i in range(deepest)]
    assert at == [str(sum(k > i for k in accepted)) for i in range(deepest)]
    assert lines[name("", "")] == str(sum(accepted)) and len(lines) == 5 + deepest

def test_the_ledger_meters_the_models():
    "A chain calls its model once a token, a tree once a level; calls of earlier runs are not counted"
    target, draft = random_table(3, 1), random_table(3, 2)
    for drafter, calls in ((Chain(draft, 3), 3), (Branching(draft, (2, 2)), 2)):
        ledger = generate(target, drafter, reject, (0,), 9, Seeded(0)).ledger
        assert [m.calls / len(ledger.rounds) for m in ledger.models.values()] == [1, calls]

def test_a_generation_is_a_value(capsys):
    "Plain integers from arrays; no attribute can be set; a copy has steps and ledger; progress on request"
    text = autoregressive(random_table(3, 1), np.array([0, 1]), np.int64(3), Seeded(0), progress=True)
    assert "3/3" in capsys.readouterr().err
    assert all(type(x) is int for x in text) and text.tokens == text and type(text.tokens) is tuple
    with pytest.raises(FrozenInstanceError): text.ledger = None
    for again in (copy.copy(text), pickle.loads(pickle.dumps(text))):
        assert again == text and again.steps == text.steps and again.ledger.rounds == text.ledger.rounds

@dataclass(frozen=True)
class Learning(Drafter):
    "Drafts as many tokens as the last tree had nodes"
    n: int = 0
    @property
    def depth(self): return self.n
    def __call__(self, ctx, rng): return offers((1,) * self.n)(ctx, rng)
    def learn(self, round): return Learning(len(round.tree))

def test_each_round_continues_the_last():
    "Each drafter is the updated one, the context grows by the round's tokens, and the noise is new"
    first, even = Learning(), constant(1, 1, 1, 1)
    turn = rounds(even, first, match, (0,), Seeded(0))
    some = [next(turn) for _ in range(20)]
    assert [len(r.tree) for r in some] == [*range(1, 21)] and first == Learning()
    assert all(b.tree.ctx == a.tree.ctx + a.tokens for a, b in pairwise(some))
    assert {r.verdict.token for r in some} == set(range(4))
    drafts = rounds(even, Chain(even, 2), match, (0,), Seeded(0))
    assert len({next(drafts).tree.path(2) for _ in range(20)}) > 5

def test_no_draft_beyond_the_position_limit():
    "A draft where target and draft models have positions for all of it; also after `learn`"
    target, draft = random_table(4, 1), random_table(4, 2)
    target.most, draft.most = 9, 7
    drafter = bounded(target, Chain(draft, 3))
    assert [len(drafter((0,) * n, Seeded(0))) for n in (3, 4, 5, 8)] == [4, 4, 1, 1]
    learnt = bounded(target, Learning(2)).learn(next(rounds(target, Learning(3), match, (0,), Seeded(0))))
    assert learnt.depth == 4 and [len(learnt((0,) * n, Seeded(0))) for n in (5, 6)] == [5, 1]

class Remembering(Learning):
    "Drafts that are kept in a list from call to call"
    seen = []
    def __call__(self, ctx, rng):
        self.seen.append(ctx)
        return offers((1,) * (len(self.seen) % 3))(ctx, rng)
class SelfSeeded(Learning):
    "Drafts of a length that a generator of its own decides"
    noise = np.random.default_rng(0)
    def __call__(self, ctx, rng): return offers((1,) * int(self.noise.integers(3)))(ctx, rng)

@pytest.mark.parametrize("drafter", [Remembering(), SelfSeeded()])
def test_the_enumeration_refuses_drafters_that_keep_state_or_draw_outside(drafter):
    with pytest.raises(Irreproducible, match="outside its rng, or keeps state"):
        loop_law(constant(1, 1), drafter, match, (0,), 6)

class Failing(Learning):
    "Interrupted in the fifth round"
    def __call__(self, ctx, rng):
        if self.n > 4: raise KeyboardInterrupt
        return super().__call__(ctx, rng)
    def learn(self, round): return Failing(self.n + 1)

def test_an_error_in_a_round_keeps_the_text():
    "The exception has the tokens, steps and ledger of the rounds before"
    seen, target = [], random_table(4, 1)
    with pytest.raises(KeyboardInterrupt) as e:
        generate(target, Failing(), match, (0,), 50, Seeded(0), watch=seen.append)
    text = e.value.decoded
    assert text == sum(seen, ()) and len(text.steps) == len(text) >= 4
    assert len(text.ledger.rounds) == len(seen) == text.ledger.models["target"].calls
    assert f"{len(text)} tokens" in e.value.__notes__[0]

def test_the_times_of_each_part(monkeypatch):
    "Seconds of draft, target and verifier in every round; what a drafter learns counts in the next draft"
    now = [0.]
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])
    def taking(seconds, f, *args):
        now[0] += seconds
        return f(*args)
    model = TableModel(4, lambda text: exact(1, 1, 1, 1))
    monkeypatch.setattr(TableModel, "__call__", partial(taking, 2., TableModel.__call__, model))
    slow = partial(taking, 1., offers((1,)))
    ledger = generate(model, slow, partial(taking, 4., match), (0,), 9, Seeded(0)).ledger
    assert ledger.column("seconds") == [dict(draft=1., target=2., verify=4.)] * len(ledger.rounds)
    class Learning(Drafter):
        def __call__(self, ctx, rng): return slow(ctx, rng)
        def learn(self, round): return taking(8., lambda: self)
    ledger = generate(model, Learning(), match, (0,), 9, Seeded(0)).ledger
    assert [row["draft"] for row in ledger.column("seconds")] == [1., *[9.] * (len(ledger.rounds) - 1)]

# What a notebook shows

class Bytes:
    "A tokenizer whose tokens are bytes: two of them make an accented letter"
    def decode(self, tokens, skip=()):
        return bytes(x for x in tokens if x not in skip).decode(errors="replace")

@examples(30, st.text("aé<&\n\ufffd", max_size=12), st.data())
def test_a_text_in_words(words, data):
    "`decode` is the tokenizer's text with its options; shown in parts, escaped, no letter cut in two"
    tokens = words.encode()
    steps = [loop.Step(x, 0., data.draw(st.sampled_from("AYB")), i//3) for i, x in enumerate(tokens)]
    found = Generation(tokens, steps).decode(Bytes())
    shown = found.html.partition('<div class="specref-text">')[2].partition("\n\n")[2].removesuffix("</div>")
    assert found == words == unescape(re.sub("</?[sbui]\\w*>", "", shown))
    assert pickle.loads(pickle.dumps(found)).html == found.html
    parts = re.findall("<(?:span|b|u)>(.*?)</", shown, re.S)
    assert all(set(unescape(part)) <= set(words) for part in parts)
    assert Generation(b"abc").decode(Bytes(), skip=b"b") == "ac"
    refuses("tokenizer", Generation(b"abc").decode, None)

def ledger(n, seconds=1.):
    time = dict(draft=seconds, target=2., verify=0.)
    return Ledger([RoundCounts(4, 4, i % 5, i % 5 + 1, time) for i in range(n)])

def test_a_ledger_in_a_notebook():
    "A bar and a row for each round, small also where there are many; no times, which no other run would have"
    html = ledger(200)._repr_html_()
    assert html == ledger(200, 5.)._repr_html_() and len(html) < 40_000
    assert html.count("<tr><td>200</td><td>4</td><td>4</td><td>4</td><td>5</td></tr>") == 1
    drawn = re.findall('<path d="(.*?)"', html)
    assert [path.count("M") for path in drawn] == [200, 160, 200]   # of five rounds one accepts nothing
    assert "the first 400 rounds" in ledger(5000)._repr_html_() and len(ledger(5000)._repr_html_()) < 80_000
    assert "0 tokens in 0 rounds" in ledger(0)._repr_html_()

def test_a_ledger_is_plotted(monkeypatch):
    "Tokens and milliseconds of each round; without matplotlib the error says what to install"
    heights = [[bar.get_height() for bar in ax.patches] for ax in ledger(5).plot()]
    assert heights == [[*range(5), *[1]*5], [*[1000.]*5, *[2000.]*5, *[0.]*5]]
    for name in "matplotlib", "matplotlib.pyplot": monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"^matplotlib: .*'specref\[plots\]'"): ledger(5).plot()

def test_a_system_in_a_notebook():
    "Drafter, verifier and papers in words, without addresses"
    nested = System("a <b>", partial(no_draft), partial(match), ("x2023",))
    deep = SYSTEMS["Gumbel coupling"](random_table(3, 1), gamma=2)
    parts = "PositionKeyed(Chain(gamma=2)), coupled, ('daliri2024',)"
    assert repr(deep) == f"System('chain of 2, coupled', {parts})"
    assert repr(nested) == "System('a <b>', no_draft, match, ('x2023',))"
    assert "<b>a &lt;b&gt;</b>" in nested._repr_html_() and "<td>no_draft</td>" in nested._repr_html_()

# Several texts

def test_several_texts(capsys):
    "Each is that of `generate` with its seed; one bar; all arguments are checked before the first text"
    target, drafter, prompts = random_table(3, 1), Chain(random_table(3, 2), 2), [(0,), (1, 2), (0,)]
    texts = generate_texts(target, drafter, reject, prompts, 5, seeds=[3, 4, 4], progress=True)
    assert texts == [generate(target, drafter, reject, p, 5, Seeded(s)) for p, s in zip(prompts, [3, 4, 4])]
    assert "15/15" in capsys.readouterr().err and all(type(text) is Generation for text in texts)

def test_an_error_keeps_the_texts():
    "Those before, and the unfinished one"
    target, made = random_table(4, 1), []
    def failing(ctx, rng):
        if len(made) == 4: raise KeyboardInterrupt
        made.append(ctx)
        return Tree(ctx)
    with pytest.raises(KeyboardInterrupt) as e:
        generate_texts(target, failing, match, [(0,), (1,)], 3, seeds=[0, 1])
    assert [len(text) for text in e.value.decoded] == [3, 1]
