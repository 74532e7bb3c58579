"30_distill: divergences and their gradients, sources of text, resumed runs, and the recorded grid"
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import inf, log

import numpy as np, pytest, torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import constant, faithful, pairs, proves, refuses, tiny, related_pair
from specref import Chain, exact, generate, law_of, overlap, reject, residual, rounds, target_law, tv
from specref.core.check import read_record
from specref.models.embedded import DOMAINS
from specref.train.distill import (GRID, LABELS, LK_LOSSES, LOSSES, TEXT_SOURCES, DistilRecipe,
                                   HeldOutTexts, PooledLoss, PromptSource, best_source, corpus_start,
                                   distil, distil_record, distillation_loss, draft_texts, forward_kl,
                                   has_peaked, hybrid_by_batch, hybrid_by_position, jensen_shannon,
                                   log_laws, log_mean_acceptance, negative_log_acceptance, remembered,
                                   reverse_kl, target_texts, texts_of_both, token_labels, total_variation)

V = 6

def logs(p):
    "The log-probabilities of a distribution in fractions"
    return torch.tensor([float(x) for x in p], dtype=torch.float64).log()

# The divergences

@given(pairs())
def test_divergences_of_a_row(pair):
    "TVD is 1 - Σ min to 1e-12; KL both ways and JSD are their sums, terms of weight 0 left out"
    p, q = pair
    a, b = map(logs, pair)
    def kl(p, q):
        if any(x and not y for x, y in zip(p, q)): return inf
        return sum(float(x) * log(x / y) for x, y in zip(p, q) if x)
    m = (p + 3*q) / Fraction(4)
    assert abs(total_variation(a, b).item() - float(1 - overlap(p, q))) < 1e-12
    assert forward_kl(a, b).item() == pytest.approx(kl(p, q), abs=1e-12)
    assert reverse_kl(a, b).item() == pytest.approx(kl(q, p), abs=1e-12)
    assert jensen_shannon(a, b, .25).item() == pytest.approx(kl(p, m)/4 + kl(q, m)*3/4, abs=1e-12)
    want = -log(overlap(p, q)) if overlap(p, q) else inf
    assert negative_log_acceptance(a, b).item() == pytest.approx(want, abs=1e-12)

@given(pairs())
@proves("prop-pinsker")
def test_bounds(pair):
    "TV is at most the root of half of KL either way, and JSD lies between TV²/2 and TV ln 2"
    a, b = map(logs, pair)
    t, kl, back, jsd = (f(a, b).item() for f in (total_variation, forward_kl, reverse_kl, jensen_shannon))
    assert 2*t*t <= min(kl, back) + 1e-12 and t*t/2 - 1e-12 <= jsd <= t*log(2) + 1e-12
    if t == 1: assert jsd == pytest.approx(log(2))

@proves("prop-lower-kl")
def test_a_lower_kl_and_fewer_accepted_tokens():
    "KL(p, q₁) < KL(p, q₂), compared as powers of fractions, and q₁ is accepted less often"
    p, q1, q2 = exact(2, 1, 1), exact(2, 3, 3), exact(8, 7, 1)
    def cross(q): return np.prod(q ** [int(4*x) for x in p])   # exp(-4 cross-entropy)
    assert (cross(q1), cross(q2)) == (Fraction(9, 1024), Fraction(7, 1024))
    assert (overlap(p, q1), overlap(p, q2)) == (Fraction(3, 4), Fraction(13, 16))
    assert forward_kl(logs(p), logs(q1)) < forward_kl(logs(p), logs(q2))

def gradient(loss, p, z):
    z = z.clone().requires_grad_()
    loss(logs(p), z.log_softmax(-1)).backward()
    return z.grad

@given(pairs())
@proves("thm-overlap-gradient")
def test_gradients_with_respect_to_logits(pair):
    "Of TV: q (Q - [q < p]); of -log α the same divided by α; their sums of absolute values"
    p, q = pair
    if min(abs(p - q)) < 1e-9 or 0 in q or not overlap(p, q): return   # no ties
    below = q < p
    Q, alpha = q[below].sum(), overlap(p, q)
    want = np.array([float(x * (Q - b)) for x, b in zip(q, below)])
    of_tv, of_log = (gradient(f, p, logs(q)).numpy() for f in (total_variation, negative_log_acceptance))
    assert np.allclose(of_tv, want, atol=1e-12) and np.allclose(of_log, want / float(alpha), atol=1e-12)
    assert abs(of_tv).sum() == pytest.approx(float(2*Q*(1 - Q))) and Q <= alpha

@proves("thm-overlap-gradient")
@pytest.mark.parametrize("epsilon", [1e-2, 1e-6, 1e-60])
def test_gradients_far_from_the_target(epsilon):
    "As q leaves the support of p, the gradient of TV vanishes, that of -log α and of KL does not"
    p, z = exact(1, 1, 0, 0), logs([epsilon/4, epsilon*3/4, (1 - epsilon)/2, (1 - epsilon)/2])
    names = "TVD", "-log α", "forward KL"
    size = {name: gradient(LOSSES[name], p, z).abs().sum().item() for name in names}
    assert size["TVD"] == pytest.approx(2*epsilon*(1 - epsilon))
    assert size["-log α"] == pytest.approx(2*(1 - epsilon)) == size["forward KL"]

def test_log_overlap_does_not_underflow():
    "In single precision: the sum of min(p, q) is 0, its logarithm and the gradient are not lost"
    z = torch.tensor([0., 200.]).requires_grad_()
    loss = negative_log_acceptance(torch.tensor([0., -inf]), z.log_softmax(-1))
    loss.backward()
    assert loss.item() == pytest.approx(200) and z.grad.tolist() == pytest.approx([-1, 1])

@given(pairs())
@proves("prop-point-mass")
def test_point_mass_target(pair):
    "-log α, KL and the cross-entropy are one loss for a deterministic target; TV is 1 - q(y)"
    q, p = pair[1], exact(*np.eye(len(pair[1]), dtype=int)[0])
    if not q[0]: return
    a, b = logs(p), logs(q)
    for f in (forward_kl, negative_log_acceptance):
        assert f(a, b).item() == pytest.approx(-log(q[0]), abs=1e-12)
    assert total_variation(a, b).item() == pytest.approx(float(1 - q[0]), abs=1e-12)

def rows(n=5, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(n, V, generator=gen, dtype=torch.float64) for _ in range(2)]

@proves("prop-log-mean")
def test_the_mean_inside_the_logarithm():
    "The gradient of -log(mean α) is that of TV over α; of the mean of -log α it is another direction"
    a, b = rows()[0].log_softmax(-1), rows()[1].requires_grad_()
    def grad(loss): return torch.autograd.grad(loss(a, b.log_softmax(-1)).mean(), b)[0].flatten()
    alpha = 1 - total_variation(a, b.log_softmax(-1)).mean().item()
    of_tv, of_mean, of_rows = map(grad, (total_variation, log_mean_acceptance, negative_log_acceptance))
    assert torch.allclose(of_mean, of_tv / alpha) and torch.cosine_similarity(of_rows, of_tv, 0) < .95
    both = log_mean_acceptance, negative_log_acceptance
    inside, outside = (f(a, b.log_softmax(-1)).mean().item() for f in both)
    assert inside < outside

def test_hybrids_place_by_place():
    "λ of each position is a constant of the gradient; λ of a batch is one number, and is differentiated"
    za, zb = rows()
    a, b = za.log_softmax(-1), zb.requires_grad_().log_softmax(-1)
    alpha = [1 - total_variation(x, y).item() for x, y in zip(a, b)]
    kl, t = forward_kl(a, b), total_variation(a, b)
    share = torch.tensor([np.exp(-3*x) for x in alpha])
    assert torch.allclose(hybrid_by_position(a, b), share*kl + (1 - share)*t)
    def grad(loss): return torch.autograd.grad(loss.sum(), zb, retain_graph=True)[0]
    assert torch.allclose(grad(hybrid_by_position(a, b)), grad(share*kl + (1 - share)*t))
    one = np.exp(-np.mean(alpha))
    assert torch.allclose(hybrid_by_batch(a, b), one*kl + (1 - one)*t)
    held = grad(one*kl + (1 - one)*t)
    through = held - one * (kl - t).sum().item() / len(kl) * grad(-t)   # dλ = -λ dα
    assert torch.allclose(grad(hybrid_by_batch(a, b)), through) and not torch.allclose(through, held)

def test_the_loss_counts_some_positions_at_a_temperature():
    "Only the selected rows, both distributions softened; λ of a batch is that of the selected rows"
    zp, zq = (z[None] for z in rows())
    counts = torch.tensor([[True, False, True, True, False]])
    a, b = (log_laws(z[0, [0, 2, 3]], .7) for z in (zp, zq))
    for f in LOSSES.values(): assert torch.allclose(distillation_loss(zp, zq, f, .7, counts), f(a, b).mean())
    assert distillation_loss(zp.bfloat16(), zq.bfloat16(), total_variation).dtype == torch.float32

# Which states

def expected(model, length, f):
    "The mean of f(prefix) over prefixes of `length` tokens of a table model"
    return sum(w * f(x) for x, w in target_law(model, (0,), length).items()) if length else f(())

def table_tv(target, draft): return lambda x: tv(target.law((0, *x)), draft.law((0, *x)))

def mass(target, draft, x):
    "Π min(p, q) along x"
    return np.prod([min(m[0], m[1]) for i, y in enumerate(x)
                    for m in [(target.law((0, *x[:i]))[y], draft.law((0, *x[:i]))[y])]] + [Fraction(1)])

@pytest.mark.parametrize("kind, seed", [*product(["independent", "subset", "one-hot q"], range(2))])
@proves("thm-round-states")
def test_rejections_of_a_round(kind, seed, gamma=3):
    "By enumeration: where a round rejects, bounds from both models' texts, and P(accepted) from target texts"
    target, draft = related_pair(kind, 3, seed)
    t = table_tv(target, draft)
    def ended(rng):   # the whole round, of which a text may be cut
        end = next(rounds(target, Chain(draft, gamma), reject, (0,), rng)).verdict.node
        return end, end < gamma
    found, total = law_of(ended), 0
    for j in range(gamma):
        prefixes = [*product(range(3), repeat=j)]
        rejected = sum(mass(target, draft, x) * t(x) for x in prefixes)
        assert found.get((j, True), 0) == rejected
        assert rejected <= min(expected(target, j, t), expected(draft, j, t))
        total += rejected
        def ratio(x): return mass(target, draft, x) / max(mass(target, target, x), Fraction(1, 10**9))
        assert sum(w for (k, _), w in found.items() if k >= j) == expected(target, j, ratio)
    assert 1 - total == found.get((gamma, False), 0)

@pytest.mark.parametrize("seed, n", [(0, 3), (1, 2), (2, 2)])
@proves("thm-text-rejections")
def test_rejections_of_a_text(seed, n):
    "With drafts as long as the text, the mean number of rejections is the sum of E TV over target prefixes"
    target, draft = related_pair("independent", 3, seed)
    def rejections(gamma):
        def run(rng):
            statuses = [s.status for s in generate(target, Chain(draft, gamma), reject, (0,), n, rng).steps]
            return statuses.count("Y")
        return law_of(run).mean()
    want = sum(expected(target, k, table_tv(target, draft)) for k in range(n))
    assert rejections(n) == want
    assert rejections(1) < want   # places of bonus tokens are not tested

@proves("thm-text-rejections")
def test_where_rounds_begin():
    "With one draft token, a round begins after one token where the first was rejected: residual, not p"
    p, q = exact(2, 1, 1), exact(1, 2, 1)
    found = law_of(lambda rng: shape_and_token(constant(*p), constant(*q), rng))
    begins = {x: w for (n, x), w in found.items() if n == 1}
    r = residual(p, q)
    assert {x: w / sum(begins.values()) for x, w in begins.items()} == {x: r[x] for x in range(3) if r[x]}

def shape_and_token(target, draft, rng):
    text = generate(target, Chain(draft, 1), reject, (0,), 2, rng)
    return text.ledger.rounds[0].emitted, text[0]

@pytest.mark.parametrize("kind, seed", [*product(["independent", "near", "superset"], range(2))])
@proves("prop-on-policy-bound")
def test_the_on_policy_bound(kind, seed):
    "E TV at a place of the target's text is at most the sum of E TV up to this place of the draft's text"
    target, draft = related_pair(kind, 3, seed)
    t = table_tv(target, draft)
    sums = np.cumsum([expected(draft, k, t) for k in range(4)])
    assert all(expected(target, k, t) <= sums[k] for k in range(4))

# What a small draft can represent

A, B, W = exact(3, 1, 0), exact(0, 1, 3), exact(2, 1)

@given(pairs(sizes=st.just(3)))
@proves("thm-capacity")
def test_one_distribution_for_two_states(pair):
    "The mean minimises KL, the distribution of the heavier state minimises TV, exactly"
    (p, other), q = pair, exact(1, 2, 3)
    for q in (q, (p + other) / Fraction(2), other, exact(1, 1, 1)):
        def alpha(q): return W[0]*overlap(p, q) + W[1]*overlap(other, q)
        assert alpha(p) >= alpha(q)
        a, b, c = map(logs, (p, other, W[0]*p + W[1]*other))
        def kl(c): return 2*forward_kl(a, c) + forward_kl(b, c)
        assert kl(c) <= kl(logs(q)) + 1e-12

@proves("thm-capacity")
@pytest.mark.parametrize("name, want", [("forward KL", [.5, .25, .25]), ("TVD", [.75, .25, 0]),
                                        ("-log mean α", [.75, .25, 0])])
def test_minimisers_by_descent(name, want):
    "Gradient descent on three logits ends at the minimiser of its own loss"
    z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    opt = torch.optim.Adam([z], .05)
    a = torch.stack([logs(A), logs(A), logs(B)])
    for _ in range(600):
        opt.zero_grad()
        LOSSES[name](a, z.log_softmax(-1).expand(3, 3)).mean().backward()
        opt.step()
    assert z.softmax(-1).tolist() == pytest.approx(want, abs=.03)

# Texts

IDS = {d: np.random.default_rng(i).integers(V, size=500).astype(np.uint16) for i, d in enumerate(DOMAINS)}

def source(**kw): return PromptSource(IDS, tiny(V).float(), length=12, prompt=4, **kw)

def a_draft(seed=7):
    with torch.no_grad(): return tiny(V, layers=1, seed=seed).float()

def test_sources_share_their_prompts():
    "Four sources after the same prompts; the mixture has rows of both; the target's texts stay"
    at, draft = source(), a_draft()
    texts = {name: make(at, draft, 3, 8) for name, make in TEXT_SOURCES.items()}
    for x in texts.values(): assert x.shape == (8, 12) and torch.equal(x[:, :4], texts["corpus"][:, :4])
    assert torch.equal(texts["mixture"], torch.cat([texts["target"][:4], texts["draft"][4:]]))
    assert torch.equal(texts_of_both(replace(at, share=1.), draft, 3, 8), texts["target"])
    assert torch.equal(target_texts(source(), a_draft(8), 3, 8), texts["target"])
    assert not torch.equal(draft_texts(at, a_draft(8), 3, 8), texts["draft"])
    assert not torch.equal(draft_texts(at, draft, 4, 8)[:, 4:], texts["draft"][:, 4:])

def test_texts_at_a_temperature():
    "At temperature 0 the continuation is the argmax at every place; both models are softened alike"
    at = source(temperature=0.)
    x = target_texts(at, None, 0, 8)
    assert torch.equal(at.target(input_ids=x).logits.argmax(-1)[:, 3:-1], x[:, 4:])
    warm = source()
    assert not torch.equal(target_texts(warm, None, 0, 8), x)
    assert torch.equal(target_texts(replace(warm, temperature=0.), None, 0, 8), x)   # not those of `warm`
    z = torch.tensor([[1., 3., 2.]])
    assert torch.equal(log_laws(z, 0).exp(), torch.tensor([[0., 1., 0.]]))
    assert torch.allclose(log_laws(z, 2.), (z / 2).log_softmax(-1))

def changed(**values): return lambda recipe: replace(recipe, **values)

@faithful("DistillSpec", plain={
    "the corpus": changed(source="corpus"), "the target's texts": changed(source="target"),
    "texts sampled once": changed(refresh=40), "half of the texts": changed(source="mixture"),
    "the tokens as labels": changed(labels="tokens")})
def test_on_policy_texts_are_refreshed(subject):
    "At every refresh the texts are those that the draft as it is now generates, with the target's rows"
    at, draft, recipe = source(), a_draft(), replace(subject.method, pool=8, rows=4)
    loss = PooledLoss(at, LABELS[recipe.labels](at.target), recipe)
    for step in (0, 1, 10, 11, 20):
        loss(draft, step)
        assert step % 10 or torch.equal(loss.x, draft_texts(at, draft, step, 8))
        assert torch.equal(loss.z, at.target(input_ids=loss.x).logits)
        with torch.no_grad(): [w.add_(.3*torch.randn_like(w)) for w in draft.parameters()]

def test_no_gradient_through_sampling():
    "The gradient is the one for the same texts as constants, and none reaches the target"
    at, draft = source(), a_draft()
    r = DistilRecipe(pool=6, rows=6, refresh=2, eval_steps=2, temperature=.7)
    loss = PooledLoss(at, LABELS["target"](at.target), r)
    loss(draft, 0).backward()
    rows = torch.from_numpy(np.random.default_rng((0, 0)).choice(6, 6, replace=False))
    with torch.no_grad(): x, zp = loss.x[rows].tolist(), at.target(input_ids=loss.x[rows]).logits
    other = deepcopy(draft)
    other.zero_grad()
    zq = other(input_ids=torch.tensor(x)).logits
    laws = [log_laws(z[:, 3:11], .7).flatten(0, 1) for z in (zp, zq)]
    torch.stack([total_variation(a, b) for a, b in zip(*laws)]).mean().backward()
    for w, v in zip(draft.parameters(), other.parameters()): assert torch.allclose(w.grad, v.grad, atol=1e-6)
    assert all(w.grad is None for w in at.target.parameters()) and not loss.x.is_inference()

def test_token_labels_are_cross_entropy():
    "The point mass on the next token makes KL the loss of ordinary training"
    at, draft = source(), a_draft()
    x = target_texts(at, None, 0, 5)
    zq = draft(input_ids=x).logits[:, 3:-1]
    got = distillation_loss(token_labels(at.target)(x)[:, 3:-1], zq, forward_kl)
    assert torch.allclose(got, torch.nn.functional.cross_entropy(zq.flatten(0, 1), x[:, 4:].flatten()))

def test_remembered_labels():
    "Labels of texts seen before are not computed again, and only the last are stored"
    calls = []
    def labels(x):
        calls.append(x)
        return x + 1
    f = remembered(labels, most=2)
    for k in (0, 1, 0, 2, 0, 1): assert torch.equal(f(torch.full((2, 3), k)), torch.full((2, 3), k + 1))
    assert [x[0, 0].item() for x in calls] == [0, 1, 2, 1]

# The measure

def test_measures_by_hand():
    "Overlaps of every state, and products of min(1, q/p) along the target's texts, round by round"
    at, draft = source(seed=3), a_draft()
    held = HeldOutTexts.of(at, 3)
    with torch.no_grad(): p, q = (m(input_ids=held.x).logits.softmax(-1).numpy() for m in (at.target, draft))
    alphas = [[np.minimum(p[i, t], q[i, t]).sum() for t in range(3, 11)] for i in range(3)]
    assert np.allclose(held.overlaps(draft), alphas, atol=1e-6)
    total = 0
    for i in range(3):
        for t in range(3, 10):
            ratios = [min(1, q[i, s, y] / p[i, s, y]) for s in (t, t + 1) for y in [held.x[i, s + 1].item()]]
            total += 1 + ratios[0] + ratios[0]*ratios[1]
    found = held.measures(draft, gamma=2)
    assert found["tokens"] == pytest.approx(total / 21, abs=1e-4)
    assert found["alphas"] == pytest.approx(np.mean(alphas, 1).tolist(), abs=1e-4)

def test_greedy_agreement():
    "At temperature 0 the measure is the share of equal argmax tokens"
    held = HeldOutTexts.of(source(temperature=0.), 6)
    draft = a_draft()
    with torch.no_grad(): same = draft(input_ids=held.x).logits[:, 3:-1].argmax(-1) == held.x[:, 4:]
    assert torch.equal(held.overlaps(draft), same.float())
    assert held.measures(source().target)["tokens"] == 5

# The harness

def run(folder, until=None, **kw):
    at = source()
    recipe = DistilRecipe(steps=24, peak=3e-2, rows=8, pool=8, refresh=2, eval_steps=8, **kw)
    return distil(a_draft(), at, HeldOutTexts.of(source(seed=9), 8), recipe, folder, until=until)

@pytest.mark.parametrize("name", TEXT_SOURCES)
def test_distillation_raises_alpha_and_resumes(name, tmp_path):
    "Interrupted and resumed it ends with the same weights, and a higher acceptance rate"
    whole, evaluations = run(tmp_path/"whole", source=name)
    run(tmp_path/"parts", until=8, source=name)
    parts, same = run(tmp_path/"parts", source=name)
    assert [step for step, _ in evaluations] == [0, 8, 16, 24] and evaluations == same
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))
    assert max(alpha for _, alpha in evaluations) > evaluations[0][1] + .02

def test_the_highest_alpha_is_returned(tmp_path):
    "Not the last weights, and not the lowest loss: a peak that ruins the draft gives the beginning back"
    at = source()
    recipe = DistilRecipe("corpus", "TVD", steps=8, peak=1e3, rows=4, pool=4, refresh=2, eval_steps=2,
                          patience=2)
    draft, evaluations = distil(a_draft(), at, HeldOutTexts.of(source(seed=9), 8), recipe, tmp_path/"run")
    assert all(map(torch.equal, draft.parameters(), a_draft().parameters()))
    assert len(evaluations) == 3 and has_peaked([[0, .5], [1, .4], [2, .5]], 2)
    assert not has_peaked([[0, .5], [1, .4], [2, .6]], 2) and not has_peaked([[0, .5], [1, .4]], 2)

def test_refusals(tmp_path):
    for name, x in dict(source="web", divergence="KL", labels="hard", steps=0, rows=64, pool=0, eval_steps=25,
                        temperature=0.).items():
        refuses(name, DistilRecipe, **{name: x})
    refuses("temperature", log_laws, torch.zeros(2), -1)
    refuses("w", jensen_shannon, torch.zeros(2), torch.zeros(2), 1)
    held = HeldOutTexts.of(source(seed=9), 2)
    refuses("gamma", held.accepted, a_draft(), 9)
    run(tmp_path/"run", until=8)
    refuses("peak", distil, a_draft(), source(), held, DistilRecipe(steps=24, peak=1.), tmp_path/"run")

# The record

def small_record(folder):
    at = tiny(V).float()
    held = HeldOutTexts.of(source(seed=9), 4)
    start = corpus_start(at, IDS, held, folder, sizes=(1, 32, 32), steps=3)
    return distil_record(start, at, IDS, IDS, folder, texts=4, length=12, prompt=4, steps=2, rows=2, pool=2,
                         refresh=1, eval_steps=1)

def test_the_record_at_small_size(tmp_path):
    "Every run of the grid with both seeds, the LK losses on the best source; made again it is the same"
    record = small_record(tmp_path)
    runs = [(r["source"], r["divergence"], r["labels"], r["seed"]) for r in record["rows"]]
    best = best_source(record["rows"])
    runs_of_lk = [(best, name, "target") for name in LK_LOSSES]
    want = {(*run, seed) for run in [*GRID, *runs_of_lk] for seed in (0, 1)}
    assert {*runs} == want and len(runs) == len(want) == 2*(16 + 2 + 4)
    assert small_record(tmp_path) == record
    assert len({r["evaluations"][0][1] for r in record["rows"]}) == 1   # every run begins with the same draft
    ends = {(r["labels"], r["evaluations"][-1][1]) for r in record["rows"][:2*len(GRID)]
            if (r["source"], r["divergence"], r["seed"]) == ("corpus", "forward KL", 0)}
    assert len({alpha for _, alpha in ends}) == 2   # both kinds of labels
    assert all(8*a % 1 == 0 for r in record["rows"] for a in r["greedy"]["alphas"])   # of eight tokens
    assert record["recipe"]["length"] == 12 and len(record["start"]["sampled"]["alphas"]) == 4
    assert all(1 <= r[what]["tokens"] <= 5 for r in record["rows"] for what in ("sampled", "greedy"))

def test_weights_are_chosen_on_held_out_prompts(tmp_path):
    at, held_ids = tiny(V).float(), {d: x[::-1].copy() for d, x in IDS.items()}
    record = distil_record(a_draft(), at, IDS, held_ids, tmp_path, (0,), GRID[:1], (), texts=4, length=12,
                           prompt=4, steps=1, rows=2, pool=2, refresh=1, eval_steps=1)
    held = HeldOutTexts.of(PromptSource(held_ids, at, 12, 4, seed=20), 2)
    first = record["rows"][0]["evaluations"][0][1]
    assert first == pytest.approx(held.overlaps(a_draft()).mean().item())

def test_the_best_source_is_that_of_the_targets_labels():
    rows = ("corpus", "target", .3), ("corpus", "tokens", .9), ("draft", "target", .4)
    made = [dict(source=s, labels=labels, sampled=dict(alphas=[a])) for s, labels, a in rows]
    assert best_source(made) == "draft"

def stored_alphas(record):
    "A function of source, divergence, labels: the mean α of both seeds"
    def alpha(*run):
        return [np.mean(r["sampled"]["alphas"]) for r in record["rows"]
                if (r["source"], r["divergence"], r["labels"]) == run]
    return alpha

def test_the_stored_record():
    "On both seeds, at equal steps: TVD on texts of either model raises α more than the corpus's tokens"
    alpha = stored_alphas(read_record("distill"))
    plain = alpha("corpus", "forward KL", "tokens")
    for name in ("target", "draft", "mixture"):
        mine = alpha(name, "TVD", "target")
        assert len(mine) == len(plain) == 2 and all(a > b for a, b in zip(mine, plain))

def test_the_order_of_the_losses():
    "On both seeds, with the target's texts: TVD over JSD over both KL; the logarithm of the mean is TVD"
    alpha = stored_alphas(read_record("distill"))
    best, *rest = (alpha("target", name, "target") for name in ("TVD", "JSD", "reverse KL", "forward KL"))
    for worse in rest:
        assert all(a > b for a, b in zip(best, worse))
        best = worse
    tv, log_mean = (alpha("target", name, "target") for name in ("TVD", "-log mean α"))
    assert np.allclose(tv, log_mean, atol=5e-4)
