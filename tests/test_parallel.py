"Chapter 26: what is written ahead keeps its distribution, and a round costs the maximum, not the sum"
from fractions import Fraction as F
from itertools import islice, product
from math import prod

import numpy as np, pytest
from hypothesis import example, strategies as st

from contracts import drafter_contract, verifier_contract
from helpers import constant, examples, faithful, laws, models, pairs, proves, seeds
from published import drafted, verified
from specref import (Chain, embedded, generate, iid, law_of, loop_law, match, mean_of, overlap, prompts,
                     random_table, reject, residual, rounds, Seeded, TableModel, target_law)
from specref.draft.parallel import (Amusd, AheadTree, EventLog, Pearl, Saguaro, SaguaroSSD, SSD, fan_out,
                                    lines_of, outcome_weights, pearl_tokens, reject_ahead, remaining,
                                    simulate, whole_fan_out)

times = st.fractions(F(1, 4), 2, max_denominator=5)

def overlapped(model):
    "Drafters that write ahead, with a verifier that each goes with"
    return st.one_of(
        st.builds(Pearl, st.just(model), st.integers(1, 2)).map(lambda d: (d, reject_ahead)),
        st.tuples(st.builds(Amusd, st.just(model), times, st.integers(1, 3)),
                  st.sampled_from([reject_ahead, match])),
        st.tuples(st.builds(SaguaroSSD, st.just(model), st.just(1),
                            st.tuples(st.integers(0, 1), st.integers(0, 2)),
                            C=st.sampled_from([F(1, 2), F(1)])), st.just(reject)))

@st.composite
def systems(draw):
    target, model = draw(models())
    return target, *draw(overlapped(model))

def first(target, drafter, verify, ctx, k, seed=0):
    return [*islice(rounds(target, drafter, verify, ctx, Seeded(seed)), k)]

# The distribution

@proves("thm-ahead", "thm-in-flight", "thm-never-slower", "thm-saguaro")
@examples(40, systems())
def test_exact(system):
    "One round, and three tokens with all that is carried over"
    target, drafter, verify = system
    drafter_contract(drafter, (0, 1))
    verifier_contract(target, drafter, verify, (0, 1), 2)
    assert loop_law(target, drafter, verify, (0, 1), 3) == target_law(target, (0, 1), 3)

@proves("thm-ahead")
@examples(25, systems())
def test_what_is_prepared_has_the_distribution_that_it_states(system):
    "Given the emitted text, and that something is prepared: the product of the distributions on its edges"
    target, drafter, verify = system
    def prepared(rng):
        round = next(rounds(target, drafter, verify, (0,), rng))
        return drafter.learn(round).prepared
    seen = {}
    for tree, w in law_of(prepared).items():
        if tree is None: continue
        seen.setdefault(tree.ctx, []).append((tree, w))
    for group in seen.values():
        total = sum(w for _, w in group)
        for tree, w in group: assert w / total == prod(q[x] for x, q in zip(tree.token[1:], tree.law[1:]))

def test_a_line_is_compared_with_the_text():
    line = Chain(random_table(3, 0), 3)((0, 1), Seeded(0))
    text = line.text(3)
    assert remaining(line, text[:3]).path(2) == text[3:] and len(remaining(line, text)) == 1
    for other in ((0,), (*text, 0), (0, 1, (text[2] + 1) % 3)): assert remaining(line, other) is None
    lines = (remaining(line, text[:3]), line)
    assert AheadTree(line, ready=2, lines=lines) == line

# The clock

@proves("thm-two-clocks", "thm-in-flight")
@faithful("PEARL", plain={"in turn": "speculative sampling", "a bonus token of its own": verified(reject)})
@examples(20, pairs(st.just(3)), seeds, st.integers(1, 3), times)
@example(pair=(random_table(3, 0).law((0,)), random_table(3, 1).law((0,))), seed=0, gamma=2, c=F(1, 2))
def test_pearl(subject, pair, seed, gamma, c):
    """Both devices begin together; the block in flight survives with the overlap of p and q; after a wrong
    first token the correct one is there when the next target call ends"""
    p, q = pair
    target, model = constant(*p), constant(*q)
    system = subject(model, gamma=gamma)
    drafter, verify = system.drafter, system.verify
    ran = first(target, drafter, verify, (0,), 6, seed)
    log = simulate(ran, c)
    assert set(log.times) == {max(gamma*c, 1)}
    assert [call.start for call in log.of("target")] == [0, *log.ends[:-1]]
    def survives(rng):
        round = next(rounds(target, drafter, verify, (0,), rng))
        return drafter.learn(round).prepared is not None
    assert law_of(survives).get(True, 0) == overlap(p, q)
    assert all(len(round.tokens) == 1 for round in ran if not round.tree.ready)

@proves("thm-pearl-tokens")
@examples(15, laws(2), laws(2), st.integers(1, 2), st.integers(1, 3))
def test_tokens_of_pearl(p, q, gamma, k):
    "The mean over k rounds of the loop is that of the two modes, whose limit is the formula"
    a, target = overlap(p, q), constant(*p)
    def tokens(rng):
        return sum(len(r.tokens) for r in islice(rounds(target, Pearl(constant(*q), gamma), reject_ahead,
                                                        (0,), rng), k))
    post, want = F(0), F(0)   # P(tokens are prepared)
    each = sum(a**i for i in range(gamma))   # of a round that tests gamma tokens
    for _ in range(k):
        want += 1 - post + post*each
        post = (1 - post)*a + post*a**gamma
    assert mean_of(tokens) == want
    if a < 1:
        limit = a / (1 + a - a**gamma)   # of `post`
        assert pearl_tokens(a, gamma) == 1 - limit + limit*each

@proves("thm-never-slower")
@examples(25, models(), times, st.integers(1, 6), seeds)
def test_never_slower(pair, c, most, seed):
    "Every round takes one target call, so n tokens take at most n; with c = 1/k it is PEARL with k tokens"
    ran = first(pair[0], Amusd(pair[1], c, most), reject_ahead, (0,), 8, seed)
    assert simulate(ran, c).times == [1]*8 and all(round.tokens for round in ran)
    run = [generate(pair[0], d, reject_ahead, (0,), 8, Seeded(seed))
           for d in (Pearl(pair[1], most), Amusd(pair[1], F(1, most), 3*most))]
    assert run[0] == run[1]

@faithful("AMUSD", plain={"a barrier": drafted(lambda amusd: Pearl(amusd.model, int(1 / amusd.c))),
                          "in turn": drafted(lambda amusd: Chain(amusd.model, int(1 / amusd.c)))})
@pytest.mark.parametrize("c", [F(2, 9), F(3, 7)])
def test_neither_device_waits(subject, c):
    "While everything is accepted, the draft model has written all the tokens that fit into the time"
    model = random_table(3, 0)
    system = subject(model, {} if c == F(2, 9) else dict(c=c), gamma=16)
    ran = first(model, system.drafter, system.verify, (0,), 7)
    log = simulate(ran, c)
    tree = ran[-1].tree
    written = len(tree.ctx) - 1 + len(lines_of(tree)[0]) - 1
    assert log.end == 7 and written == int(7 / c)
    assert log.busy("draft") == written*c and log.busy("target") == 7

# The speculation cache

def one_outcome(drafter): return SSD(drafter.model, drafter.gamma, (0,)*drafter.gamma + (1,))
def missing(drafter): return SSD(drafter.model, drafter.gamma, (0,)*(drafter.gamma + 1))

@proves("thm-hits")
@faithful("SSD", plain={"one outcome": drafted(one_outcome), "no cache": drafted(missing)})
@pytest.mark.parametrize("seed, gamma", [(0, 1), (1, 2), (2, 3)])
def test_hits_save_the_draft(subject, seed, gamma):
    "A draft is ready exactly where the outcome was cached, also after a rejection; each hit saves one draft"
    target, c = random_table(3, seed, zeros=False), F(1, gamma + 1)
    model = TableModel(3, lambda text: (3*target.law(text) + random_table(3, seed + 1).law(text)) / F(4))
    ran = first(target, subject.drafter(model, gamma=gamma), reject, (0,), 40)
    ready = [round.tree.ready > 0 for round in ran]
    assert ready[1:] == [a.tree.ctx + a.tokens in [line.ctx for line in a.tree.lines] for a in ran[:-1]]
    after = zip(ran, ready[1:])
    assert any(hit and round.verdict.node < gamma for round, hit in after)
    assert len(ran)*(gamma*c + 1) - simulate(ran, c).end == sum(ready)*gamma*c
    for round in ran:
        tree, seen = round.tree, [line.ctx for line in round.tree.lines]
        assert len(set(seen)) == len(seen) <= 4*gamma
        assert all(tree.text(n)[:len(text)] != text for n in range(len(tree)) for text in seen)

class LeastLikely(SaguaroSSD):
    def outcomes(self, chain, n, q):
        given, k = [chain.token[c] for c in chain.children(n)], len(super().outcomes(chain, n, q))
        return [int(x) for x in np.argsort(q) if x not in given][:k]

class SameRate(SaguaroSSD):
    alpha = .6

class Unscaled(SaguaroSSD):
    def draw_at(self, n, q): return iid(q)

def ranked(row): return sorted(range(len(row)), key=lambda x: (-row[x], x))

@faithful("SSD", plain={
    "the least likely outcomes": drafted(LeastLikely), "a constant acceptance rate": drafted(SameRate),
    "draws that are not scaled": drafted(Unscaled)})
def test_where_the_cache_looks_and_how_the_draft_is_drawn(subject):
    """The likeliest other tokens after each node, as many as are best at the rate of accepted among tested
    tokens; a draft's row has the probabilities of as many likeliest ones halved"""
    target, model, gamma = random_table(8, 3, zeros=False), random_table(8, 4, zeros=False), 2
    accepted, tested, fans = 0, 0, []
    for round in first(target, subject.drafter(model, gamma=gamma), reject, (0,), 25):
        tree, end = round.tree, round.verdict.node
        fans.append(whole_fan_out((accepted + 1) / (tested + 2), gamma, 4*gamma))
        for n in range(len(tree)):
            row, given = model.law(tree.text(n)), tree.token[n + 1:n + 2]
            found = [line.ctx[-1] for line in tree.lines if line.ctx[:-1] == tree.text(n)]
            assert found == [x for x in ranked(row) if x not in given][:fans[-1][n]]
            if not given: continue
            drawn_by = fans[-2] if tree.ready else fans[-1]
            scaled = [w / 2 if x in ranked(row)[:drawn_by[n]] else w for x, w in enumerate(row)]
            assert list(tree.law[n + 1]) == [w / sum(scaled) for w in scaled]
        accepted, tested = accepted + end, tested + min(end + 1, len(tree) - 1)
    assert len(set(fans)) > 3

def test_a_backup_drafts_after_a_miss():
    "Its chain may have another length, and it counts as a model of the drafter"
    model, other = random_table(3, 1), random_table(3, 2)
    drafter = SSD(model, 1, (0, 1), backup=Chain(other, 3))
    assert drafter.models == (model, other)
    tree = drafter((0,), Seeded(0))
    assert len(tree) == 4 and [len(line) for line in tree.lines] == [2] and tree.ready == 0

@proves("thm-fan-out")
@examples(30, st.floats(.05, .95), st.integers(1, 4), st.floats(.3, 3), seeds)
def test_fan_out(alpha, gamma, r, seed):
    "The stated ratios and sum, and no other fan-out misses less; the whole numbers are the best ones"
    fan, w = np.array(fan_out(alpha, gamma, 12, r)), outcome_weights(alpha, gamma)
    power = alpha ** (np.arange(gamma + 1) / (1 + r))
    power[-1] *= (1 - alpha) ** (-1 / (1 + r))
    assert np.allclose(fan, fan[0] * power) and np.isclose(fan.sum(), 12) and np.isclose(sum(w), 1)
    def misses(fan): return sum(a * k**-r for a, k in zip(w, fan))
    for other in 12 * np.random.default_rng(seed).dirichlet(np.ones(gamma + 1), 20):
        assert misses(fan) <= misses(other) + 1e-9
    whole, most = whole_fan_out(alpha, gamma, gamma + 4, r), gamma + 4
    options = [f for f in product(range(1, 5), repeat=gamma + 1) if sum(f) == most]
    assert sum(whole) == most and np.isclose(misses(whole), min(map(misses, options)))

@proves("thm-saguaro")
@examples(40, pairs(st.just(4)), st.integers(1, 3))
def test_saguaro(pair, top):
    "The smaller C, the larger the share of the residual on the heaviest tokens; C = 1 changes nothing"
    p, q = pair
    cached, shares = np.argsort(-q, kind="stable")[:top], []
    for C in (F(1), F(1, 2), F(1, 4), F(1, 20)):
        law = Saguaro(top, C).law(q)
        assert C < 1 or (law == q).all()
        shares.append(None if (p == law).all() else residual(p, law)[cached[q[cached] > 0]].sum())
    shares = [share for share in shares if share is not None]
    assert shares == sorted(shares)

# The log, and the ledger

def test_a_device_runs_one_call_at_a_time():
    log = EventLog()
    log.add("draft", 2)
    assert log.add("draft", 2, after=1).start == 2 and log.add("target", 3, after=1).end == 4
    assert log.add("target", 1, after=6, text="x").start == 6 and log.busy("target") == 4
    assert log.bars("target") == [("plain", 1., "", ""), ("target", 3., "", ""), ("plain", 2., "", ""),
                                  ("target", 1., "x", "")]

def test_the_ledger_counts_calls_ahead():
    "PEARL's target reads what was ready and its own last token, not what is being written"
    target, draft, prompt = embedded(), embedded("small"), prompts("code", 1)[0]
    ran = first(target, Pearl(draft, 3), reject_ahead, prompt, 1)
    meter, fed = draft.meter.copy(), target.meter.tokens
    assert meter.ahead == meter.calls == 3 and fed == len(prompt)
    ran = first(target, Pearl(draft, 3), reject_ahead, prompt, 12)
    assert target.meter.tokens - fed == sum(round.tree.ready + 1 for round in ran[1:])
    ledger = generate(target, Pearl(draft, 3), reject_ahead, prompt, 8, Seeded(0)).ledger
    assert ledger.models["draft"].ahead == 3*len(ledger.rounds) == 3*ledger.models["target"].calls
