"Chapter 23: a nested draft has the middle model's distribution, and each place the model that K prescribes"
from dataclasses import dataclass, replace
from fractions import Fraction as F
from functools import cache

import numpy as np, pytest, torch
from hypothesis import given, strategies as st

from contracts import drafter_contract
from helpers import (cold, constant, examples, faithful, laws, models, pairs, proves, round_tokens, seeds,
                     shapes)
from published import drafted
from specref import (AcceptanceRule, add_paths, autoregressive, block, capped_geometric, Chain, embedded,
                     exact, generate, iid, Jacobi, law_of, lenient, loop_law, match, NgramModel, no_draft,
                     one_hot, overlap, prompts, random_table, Recycling, reject, Round, rounds, Seeded,
                     speedup, StaticTree, TableModel, target_law, Tree, Verdict, without_replacement)
from specref.core.loop import bounded
from specref.core.tree import edge_laws, likeliest_points
from specref.draft.cascade import (CascadeTree, InTurn, MaxGram, Nested, StagedTree, bigram_table,
                                   cs_drafting, cut_round, horizontal_speedup, lenient_inside, mean_rounds,
                                   run_lengths, vertical_speedup)
from specref.draft.shapes import drawn_at
from specref.models.embedded import DOMAINS
from specref.verify.lossy import GreedyModel, bild_rollback

contexts = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)
verifiers = st.sampled_from([reject, match, block])
BOTTOM = MaxGram((1, 2, 0), exact=True)
K = (1, 2, 3), (0, 1, 2), (0, 0, 2)

@dataclass(frozen=True)
class Alternating(Chain):
    "A chain whose length is a state: 1 after a rejection, else 2"
    def learn(self, round): return replace(self, gamma=1 + (round.verdict.node == len(round.tree) - 1))

kinds = st.sampled_from([Chain, Alternating])

def plain_tree(tree): return tree.path(len(tree) - 1), tuple(map(tuple, tree.law[1:]))

def true_edges(drafter, ctx):
    trees = law_of(lambda rng: drafter(ctx, rng))
    return all(stated == true for _, stated, true in edge_laws(trees))

# The inner decoder

@proves("thm-nested")
@examples(20, models(), contexts, st.integers(1, 3), kinds, st.integers(1, 2), verifiers)
def test_cut_it_is_the_chain_of_the_middle_model(pair, ctx, gamma, kind, k, verify):
    "The same drafts with the same edges and probabilities, and true edges"
    (v, s) = pair
    nested, chain = Nested(v, gamma, kind(s, k), verify), Chain(v, gamma)
    inner, plain = (law_of(lambda rng: plain_tree(d(ctx, rng))) for d in (nested, chain))
    assert inner == plain and true_edges(nested, ctx)
    if kind is Chain: drafter_contract(nested, ctx)

@proves("thm-nested")
@examples(8, models(), seeds, contexts, st.integers(1, 2), verifiers, st.sampled_from([reject, match]))
def test_exact_cut_or_whole(pair, seed, ctx, n, inner, outer):
    "Two tokens of three levels, a stateful inner drafter; whole rounds have true edges too"
    target, (v, s) = random_table(3, seed), pair
    for nested in (Nested(v, 2, Alternating(s, 1), inner), Nested(v, 2*n, Alternating(s, 1), inner, most=n)):
        assert true_edges(nested, ctx)
        assert loop_law(target, nested, outer, ctx, 2) == target_law(target, ctx, 2)

def only_accepted(v, s):
    "Offers the inner tokens that were accepted, and no recovered token"
    def draft(ctx, rng):
        round = next(rounds(v, Chain(s, 2), reject, ctx, rng))
        tree = Tree(ctx)
        for i, node in enumerate(round.tree.ancestors(round.verdict.node)):
            tree.add(i, round.tree.token[node], round.p[round.tree.parent[node]])
        return tree
    return draft

def test_other_cuts_anticipate():
    v, s = random_table(3, 1, zeros=False), random_table(3, 2, zeros=False)
    assert not true_edges(only_accepted(v, s), (0,))

@examples(25, models(), contexts, st.integers(1, 5), st.integers(0, 99),
          st.sampled_from([Jacobi(3, 3, exact=True), Recycling(3, 2, ((0,), (1,), (0, 0)), exact=True)]))
def test_inner_drafters_learn_while_drafting(pair, ctx, gamma, seed, inner):
    "The next drafter has the inner state of the inner loop's rounds, cut; it is a value; no draft, no change"
    v, text, state = pair[0], ctx, inner
    nested = Nested(v, gamma, inner)
    tree = nested(ctx, Seeded(seed))
    for i in range(gamma):
        if len(text) == len(ctx) + gamma: break
        round = next(rounds(v, bounded(v, state), reject, text, Seeded(seed).at(i).draft))
        round = cut_round(round, len(ctx) + gamma - len(text))
        text, state = text + round.tokens, state.learn(round)
    assert text == tree.text(gamma) and tree.after == replace(nested, inner=state)
    after = nested.learn(Round(tree, v(tree), Verdict(0, 0)))
    again = replace(nested)(ctx, Seeded(seed))
    assert after == tree.after and hash(after) == hash(again.after) and tree == again
    assert nested.learn(Round(Tree(ctx), v(Tree(ctx)), Verdict(0, 0))) == nested

def test_two_states_are_two_drafts():
    one, other = CascadeTree((0,)), CascadeTree((0,))
    other.after = Chain(random_table(3, 0), 1)
    assert one != other and len({one, other}) == 2
    target, nested = random_table(3, 0), Nested(random_table(3, 1), 2, Alternating(random_table(3, 2), 1))
    assert loop_law(target, nested, reject, (0,), 3, careful=True) == target_law(target, (0,), 3)

def test_limits_of_length_and_the_models_listed():
    "A middle model that reads nine tokens gets an empty inner draft at the end; each model is listed once"
    target, v, s = (random_table(3, i) for i in range(3))
    target.most = v.most = 9
    nested = Nested(v, 2, Chain(s, 3))
    out = generate(target, nested, reject, (0,), 8, Seeded(0))
    assert len(out) == 8 and list(out.ledger.models) == ["target", "draft", "draft1"]
    cascade = cs_drafting((v, s), K, BOTTOM)
    assert cascade.models == (v, s) and cascade.depth == 3 and cascade.V == 3

RULES = {"lenient": lenient(F(1, 3)), "strict": lenient(F(1)), "rollback": bild_rollback(.7),
         "redraw from v": AcceptanceRule(np.minimum, lambda v, s: v)}

@proves("prop-lenient-inside")
@examples(20, models(), seeds, contexts, st.sampled_from(sorted(RULES)), st.integers(1, 2))
def test_any_inner_rule_with_its_own_distribution(pair, seed, ctx, name, k):
    "True edges and the target's distribution; the rule that redraws from v included"
    target, nested = random_table(3, seed), Nested(pair[0], 2, Chain(pair[1], k), RULES[name])
    assert true_edges(nested, ctx)
    assert loop_law(target, nested, reject, ctx, 2) == target_law(target, ctx, 2)

def test_a_rule_inside_needs_chains():
    v, fork = random_table(3, 1, zeros=False), StaticTree(random_table(3, 2, zeros=False), (-1, 0, 0))
    with pytest.raises(ValueError, match="wanted a chain"):
        Nested(v, 2, fork, bild_rollback(.7))((0,), Seeded(0))

@examples(20, models(), seeds, contexts, st.fractions(1, 9, max_denominator=4))
def test_lenience_inside_never_changes_the_greedy_text(pair, seed, ctx, lenience):
    target, v = GreedyModel(random_table(3, seed)), GreedyModel(pair[0])
    drafter = cs_drafting((v, GreedyModel(pair[1])), K, BOTTOM, lenient_inside(lenience, temperature=0))
    assert generate(target, drafter, reject, ctx, 6, Seeded(0)) == autoregressive(target, ctx, 6, Seeded(0))

# The factors

@proves("thm-nested-cost")
@examples(15, pairs(st.integers(2, 3)), st.integers(1, 2), st.integers(1, 3))
def test_mean_calls_of_the_middle_model(vs, k, gamma):
    "The recursion gives the enumerated number of calls; without inner drafts there is one for each token"
    v, s = vs
    def calls(rng):
        middle = constant(*v)
        Nested(middle, gamma, Chain(constant(*s), k))((0,), rng)
        return middle.meter.calls
    assert mean_rounds(overlap(v, s), k, gamma) == law_of(calls).mean()
    assert mean_rounds(overlap(v, s), 0, gamma) == mean_rounds(0, k, gamma) == gamma

rates = st.fractions(0, 1, max_denominator=9)
prices = st.fractions(0, 1, max_denominator=20)

@proves("thm-nested-cost", "thm-vertical", "thm-horizontal")
@given(rates, st.integers(1, 6), prices)
def test_without_an_inner_draft_it_is_theorem_3_8(alpha, n, c):
    want = speedup(alpha, n, c)
    assert vertical_speedup(alpha, 0, n, 0, c, 0) == horizontal_speedup([alpha]*n, [c]*n) == want
    assert capped_geometric(alpha, n) / (1 + mean_rounds(F(1, 2), 0, n) * c) == want

@proves("thm-vertical")
@given(rates.filter(lambda a: a < 1), rates, st.integers(1, 4), st.integers(0, 4), prices, prices)
def test_the_generating_function(alpha, inner, n, k, c1, c2):
    "The factor as the paper writes it"
    phi = sum(w * alpha**j for j, w in enumerate(run_lengths(inner, k), 1))
    want = (1 - alpha*phi**n) / ((1 - alpha)*(1 + n*c1 + n*k*c2))
    assert vertical_speedup(alpha, inner, n, k, c1, c2) == want

def whole_rounds(p, v, s, n, k):
    drafter = Nested(constant(*v), n*(k + 1), Chain(constant(*s), k), most=n)
    return round_tokens(constant(*p), drafter).mean()

@proves("thm-vertical")
@examples(10, pairs(st.just(3)), laws(3), st.sampled_from([(1, 1), (1, 2), (2, 1)]))
def test_whole_rounds_by_enumeration(vs, p, nk):
    "Any distributions with the joint acceptance, as dependent as they are"
    v, s = vs
    joint = sum(min(a, b) * min(1, c / a) for a, b, c in zip(v, s, p) if a)
    assert vertical_speedup(overlap(p, v), overlap(v, s), *nk, 0, 0, joint) == whole_rounds(p, v, s, *nk)

@proves("thm-vertical")
@examples(5, pairs(st.just(2)), pairs(st.just(2)))
def test_independent_acceptances(one, two):
    "Tokens (a, b): s and v differ in a, v and p in b; the paper's factor is exact"
    def both(a, b): return exact(*(x * y for x in a for y in b))
    s, v, p = both(one[0], two[0]), both(one[1], two[0]), both(one[1], two[1])
    assert vertical_speedup(overlap(p, v), overlap(v, s), 2, 1, 0, 0) == whole_rounds(p, v, s, 2, 1)

@proves("thm-horizontal")
@examples(20, laws(3), laws(3), laws(3), st.integers(1, 2), st.integers(1, 2))
def test_places_by_enumeration(p, a, b, i, j):
    drafter = InTurn((Chain(constant(*a), i), Chain(constant(*b), j)))
    alphas = [overlap(p, a)]*i + [overlap(p, b)]*j
    assert horizontal_speedup(alphas, [0]*(i + j)) == round_tokens(constant(*p), drafter).mean()

@proves("thm-horizontal")
@given(st.lists(st.tuples(rates, prices), min_size=2, max_size=6), st.integers(0, 4))
def test_the_best_order_and_the_next_place(places, i):
    "No exchange improves the decreasing order; a place helps exactly if its quotient is above the speed-up"
    ranked, i = sorted(places, reverse=True), i % (len(places) - 1)
    other = ranked[:i] + [ranked[i + 1], ranked[i]] + ranked[i + 2:]
    assert horizontal_speedup(*zip(*ranked)) >= horizontal_speedup(*zip(*other))
    before, now = (horizontal_speedup(*zip(*part)) for part in (ranked[:-1], ranked))
    product, c = np.prod([a for a, _ in ranked]), ranked[-1][1]
    assert (now > before) == (product > before * c)

# CS-Drafting

@examples(60, st.lists(st.integers(0, 3), min_size=1, max_size=14).map(tuple), st.integers(1, 6),
          st.permutations(range(4)))
def test_max_gram_by_search(text, num, bigrams):
    "The first earlier occurrence of the longest suffix; then successors by the table"
    ends = [(k, i) for k in range(1, len(text)) for i in range(len(text) - k) if text[i:i+k] == text[-k:]]
    k, i = max(ends, key=lambda ki: (ki[0], -ki[1]), default=(0, len(text)))
    want = list(text[i + k:i + k + num])
    while len(want) < num: want.append(bigrams[[*text, *want][-1]])
    drafter = MaxGram(bigrams, num, True)
    assert drafter.find(text) == tuple(want)
    drafter_contract(drafter, text)

def test_bigrams_are_the_most_frequent_successors():
    assert bigram_table([0, 1, 0, 2, 0, 1, 1, 2], 3) == (1, 0, 0)

def vertical_alone(models, K, bottom, verify=reject): return Nested(models[0], K[0][-1], bottom, verify)

def horizontal_alone(models, K, bottom, verify=reject):
    counts = np.diff((0, *K[0])).tolist()
    chains = [Chain(model, k) for model, k in zip(models, counts) if k]
    return InTurn((*chains, replace(bottom, num_draft_tokens=counts[-1])))

def chain_alone(models, K, bottom, verify=reject): return Chain(models[0], K[0][-1])

@faithful("CS-Drafting", part="cs_drafting", plain={"vertical alone": vertical_alone, "a chain": chain_alone})
def test_each_place_is_drafted_by_the_model_that_K_prescribes(subject):
    "The stated rows, place by place: of M1, of M2, and point masses of the longest match"
    for seed in range(12):
        pair = [random_table(3, 2*seed + i, zeros=False) for i in range(2)]
        a, b, c, ctx = 1 + seed % 2, seed % 3, 1 + seed % 4, (0, 1, 2, 0)[:1 + seed % 4]
        tree = subject(pair, ((a, a + b, a + b + c), (0, 1, 2), (0, 0, 2)), BOTTOM)(ctx, Seeded(seed))
        tail = replace(BOTTOM, num_draft_tokens=c).find(tree.text(a + b))
        want = [pair[i >= a].law(tree.text(i)) for i in range(a + b)]
        want += [one_hot(x, 3, exact=True) for x in tail]
        assert [*map(tuple, tree.law[1:])] == [*map(tuple, want)] and tree.path(len(tree) - 1)[a + b:] == tail

@faithful("CS-Drafting", plain={
    "the model alone": "speculative sampling",
    "vertical alone": drafted(lambda both: replace(both.parts[0], gamma=both.depth)),
    "horizontal alone": drafted(lambda both: InTurn((Chain(both.parts[0].middle, both.parts[0].gamma),
                                                     *both.parts[1:])))})
def test_half_of_the_places_are_the_models(subject):
    "Its rows, drafted in fewer calls than places; behind them point masses of the longest match in the text"
    past, calls = (0, 1, 2, 2, 1, 0, 0, 2), []
    for seed in range(8):
        model, ctx, g = random_table(3, seed, zeros=False), (0, 1, 2, 0, 1), 3 + seed % 4
        before = model.meter.calls
        tree = subject(model, gamma=g, past=(past,), exact=True).drafter(ctx, Seeded(seed))
        calls.append(model.meter.calls - before - (own := (g + 1)//2))
        tail = MaxGram(bigram_table(past, 3), g - own, exact=True).find(tree.text(own))
        want = [*(model.law(tree.text(i)) for i in range(own)), *(one_hot(x, 3, exact=True) for x in tail)]
        assert [*map(tuple, tree.law[1:])] == [*map(tuple, want)] and tree.path(g)[own:] == tail
    assert max(calls) <= 0 > min(calls)

def test_the_levels_are_those_of_the_matrix():
    M1, M2 = random_table(3, 1), random_table(3, 2)
    first, second, tail = cs_drafting((M1, M2), ((4, 6, 9), (0, 2, 3), (0, 0, 5)), BOTTOM).parts
    assert (first.middle, first.gamma, second.middle, second.gamma, tail.depth) == (M1, 4, M2, 2, 3)
    inner, rest = first.inner.parts
    assert (inner.middle, inner.gamma, rest.depth) == (M2, 2, 1)
    assert [part.depth for d in (inner, second) for part in d.inner.parts] == [5, 5]
    assert len(cs_drafting((M1, M2), ((4, 4, 4), (0, 1, 1), (0, 0, 5)), BOTTOM).parts) == 1

def test_the_last_part_may_be_a_tree():
    "Siblings and probes of the last part are copied with their draws; an earlier part must be a chain"
    one, two = random_table(3, 1), random_table(3, 2, zeros=False)
    fork = StaticTree(two, (-1, 0, 0, 1))
    drafter_contract(InTurn((Chain(one, 1), fork)), (0,))
    tree = InTurn((Chain(one, 1), fork))((0,), Seeded(0))
    assert tree.parent == [-1, 0, 1, 1, 2] and set(tree.draw) == {0, 1, 2}
    with pytest.raises(ValueError, match="wanted a chain"): InTurn((fork, Chain(one, 1)))((0,), Seeded(0))

# Staged speculation

def two_paths(ctx, rng): return add_paths(Tree(ctx), [(0, 1), (2, 2)], 3, rng)

guesses = st.sampled_from([no_draft, two_paths,
                           StaticTree(random_table(3, 9), (-1, 0, 1, 2), likeliest_points)])
sibling_draws = st.sampled_from([iid, without_replacement])

@proves("thm-staged")
@examples(25, models(), contexts, shapes(6), guesses, sibling_draws, st.integers(0, 99))
def test_the_plain_tree_on_fewer_calls(pair, ctx, parent, guess, draw, seed):
    "The same tree from the same noise, at most as many calls"
    staged, plain = StagedTree(pair[0], parent, draw, guess), StaticTree(pair[0], parent, draw)
    def run(drafter):
        before = pair[0].meter.calls
        return drafter(ctx, Seeded(seed)), pair[0].meter.calls - before
    (tree, fewer), (same, calls) = run(staged), run(plain)
    assert tree == same and fewer <= calls and set(tree.draw) == set(same.draw)
    if len(parent) < 4: drafter_contract(staged, ctx)

@proves("thm-staged")
@examples(8, models(), seeds, contexts, guesses)
def test_staged_is_exact(pair, seed, ctx, guess):
    target, drafter = random_table(3, seed), StagedTree(pair[0], (-1, 0, 0, 1), guess=guess)
    assert loop_law(target, drafter, reject, ctx, 2) == target_law(target, ctx, 2)

# At size

def at(T, *names): return [embedded(name, dtype=torch.float64, temperature=T) for name in names]

@cache
def table(): return MaxGram(bigram_table([x for text in prompts("english", 60, seed=5) for x in text], 512))

SIZE = (3, 5, 8), (0, 2, 4), (0, 0, 4)

@faithful("CS-Drafting", part="cs_drafting", plain={
    "horizontal alone": horizontal_alone, "vertical alone": vertical_alone, "a chain": chain_alone})
@pytest.mark.parametrize("T", [0, 1])
def test_no_neural_model_decodes_token_by_token(subject, T):
    "Each draft model is called less than once for each of its own tokens; the greedy text is the target's"
    target, large, small = at(T, "target", "large", "small")
    drafter, prompt = subject((large, small), SIZE, table()), prompts("english", 1)[0]
    out = generate(target, drafter, reject, prompt, 24, Seeded(1))
    first, second, *rest = drafter.parts if isinstance(drafter, InTurn) else (drafter, drafter)
    work, n = out.ledger.models, len(out.ledger.rounds)
    assert rest and work["target"].calls == n and work["draft"].calls < 3*n
    drafted_by_small = 2*n + 2*work["draft"].calls
    assert work["draft1"].calls < drafted_by_small
    assert T or out == autoregressive(target, prompt, 24, Seeded(0))

def strict_inside(models, K, bottom, verify): return cs_drafting(models, K, bottom)

@faithful("CS-Drafting", part="cs_drafting", plain={"strict inside": strict_inside})
def test_lenience_changes_the_work_and_not_the_text(subject):
    "Temperature 0: the target's text at every inner lenience, with fewer calls of the large draft at 20"
    target, large, small = at(0, "target", "large", "small")
    starts = [prompts(domain, 1, seed=1)[0] for domain in DOMAINS]
    truths, calls = [autoregressive(target, start, 20, Seeded(0)) for start in starts], {}
    for lenience in (1, 20):
        lenient_rule = lenient_inside(lenience, temperature=0)
        drafter = subject((large, small), SIZE, table(), lenient_rule)
        outs, wrong = ([generate(target, drafter, verify, start, 20, Seeded(0)) for start in starts]
                       for verify in (reject, lenient_rule))
        assert outs == truths and (wrong == truths) == (lenience == 1)
        calls[lenience] = [tuple(m.calls for m in out.ledger.models.values()) for out in outs]
    assert calls[1] != calls[20]

@faithful("staged speculation", plain={
    "a tree of the draft model alone": drafted(lambda d: StaticTree(d.model, d.parent, d.draw)),
    "a nested chain": drafted(lambda d: Nested(d.model, 4, d.guess))})
@pytest.mark.parametrize("T", [0, 1])
def test_a_tree_whose_draft_model_is_accelerated(subject, T):
    """Siblings in the draft; the plain tree's text from the same noise, on fewer calls of the draft model. At
    temperature 1 the table's n-grams are right for both siblings too seldom: the small model guesses"""
    target, large, small = at(T, "target", "large", "small")
    prompt, guess = prompts("english", 1)[0], StaticTree(small, (-1, 0, 1), likeliest_points)
    def run(system):
        out = system(target, prompt, 20, Seeded(1))
        return out, out.ledger.models["draft"].calls
    past = prompts("english", 60, seed=5)
    system = subject(large, dict(guess=guess) if T else {}, temperature=T, past=past)
    model, draw = drawn_at(T, large)
    plain = drafted(lambda d: StaticTree(model, (-1, 0, 0, 1, 2, 3, 4, 5, 6), draw))(system)
    (out, fewer), (same, calls) = run(system), run(plain)
    assert len(system.drafter(prompt, Seeded(0)).children(0)) == 2
    assert out == same and fewer < calls
    assert T or out == autoregressive(target, prompt, 20, Seeded(0))

# Prediction alignment (BiLD)

@examples(10, seeds)
def test_an_aligned_student_agrees_with_the_large_model(seed):
    "N-grams counted in the large model's own texts predict its tokens where these were seen"
    base = random_table(3, seed, zeros=False)
    large = cold(TableModel(3, lambda text: base.law(text[-2:])))
    starts = [(a, b) for a in range(3) for b in range(3)]
    texts = [start + autoregressive(large, start, 9, Seeded(0)) for start in starts]
    student = NgramModel([x for text in texts for x in text], 3, 3)
    agreed = [np.argmax(student.law(start)) == np.argmax(large.law(start)) for start in starts]
    assert np.mean(agreed) >= 2/3
