"30a_consistency: trajectories, one packed pass, the losses, what is counted, training, and the shipped model"
import copy, json
from dataclasses import replace
from functools import cache, partial
from tempfile import TemporaryDirectory

import numpy as np, pytest, torch
from hypothesis import strategies as st

from helpers import cold, examples, faithful, proves, refuses, seeds, tiny
from specref import (autoregressive, exact, generate, HFModel, Jacobi, loop_law, match, one_hot, prompts,
                     random_table, reject, Seeded, TableModel, tv_outcomes)
from specref.draft.jacobi import jacobi, jacobi_sweep
from specref.models.embedded import DOMAINS, raw_model, stored
from specref.models.recipe import fit, llama, next_token_loss
from specref.train import consistency
from specref.train.consistency import (OBJECTIVES, ConsistencyRecipe, autoregressive_loss,
                                       collect_trajectories, compare_objectives, consistency_loss,
                                       consistency_model, convergence, correct_prefix, fast_forwarded,
                                       first_difference, global_consistency, joined, local_consistency,
                                       no_consistency, packed_logits, packed_mask, random_iterates,
                                       rounds_of, row_divergence, soft_cross_entropy, stationary,
                                       trained_places, training_trajectories, train_consistency)
from test_embedded import SEEN, plain_law

MOST_PASSES, LEAST_FORWARDED = 14.5, 1.3   # of a block of 16

# Tables: random ones, and ones that read only a part of their text

PARTS = {"whole": lambda t: t, "place": len, "last": lambda t: t[-1], "even": lambda t: (t, 0)[len(t) % 2],
         "prompt": lambda t: (len(t), t[0])}

def table(V, seed, part, sure):
    "A random table of a part of the text, with point masses if `sure`"
    make = random_table(V, seed, zeros=False)
    def law(text): return make.law((0, hash(PARTS[part](text)) % 10**6))
    return cold(TableModel(V, law)) if sure else TableModel(V, law)

tables = st.builds(table, st.integers(2, 3), seeds, st.sampled_from(sorted(PARTS)), st.booleans())
starts = st.lists(st.integers(0, 1), min_size=4, max_size=4).map(tuple)

def trajectory(target, m, start, ctx=(0,)):
    "All iterates of a block by chapter 22, the last one repeated"
    ys = jacobi(target, ctx, m, start[:m])
    return np.array([ys[min(t, len(ys) - 1)] for t in range(m + 1)])

def last_of(ys): return next(t for t in range(len(ys)) if (ys[t] == ys[-1]).all())

def test_the_example_by_hand():
    "Three sweeps, one stationary token, two fast-forwarded ones; the losses in fractions of log 2"
    def half_next(text): return np.roll(exact(2, 1, 1), 2 if len(text) == 3 else text[-1] + 1)
    model = TableModel(3, half_next)
    ys = trajectory(model, 4, (0, 0, 0, 0))
    assert ["".join("abc"[x] for x in y) for y in ys] == ["aaaa", "bbcb", "bcca", "bcca", "bcca"]
    assert correct_prefix(ys).tolist() == [0, 1, 4, 4, 4]
    assert (rounds_of(ys), fast_forwarded(ys), stationary(ys)) == (3, 2, 1)
    losses = [row_divergence(model, (0,), ys[2], y) / np.log(2) for y in ys[:2]]
    assert losses[0] == pytest.approx([0, 1/4, 0, 1/4]) and losses[1] == pytest.approx([0, 0, 0, 0])
    losses_of_rows(model, *torch.from_numpy(ys[:3]))

def losses_of_rows(model, first, second, fixed):
    "The same by the losses of the training"
    def logits(y): return torch.tensor(np.array([model.law((0, *y[:i])) for i in range(4)], float)).log()
    text = logits(fixed.tolist())
    for y, want in ((first, 1/6), (second, 0)):
        q, chosen = logits(y.tolist())[1:], trained_places(y, fixed, fixed, end=-1)
        found = soft_cross_entropy(text[1:], q, chosen) - soft_cross_entropy(text[1:], text[1:], chosen)
        assert found.item() == pytest.approx(want * np.log(2), abs=1e-6)
    loss = autoregressive_loss(text[None, None], fixed[None, None], 0., end=-1)
    assert loss.item() == pytest.approx(np.log(2))

# Trajectories

@examples(6, st.integers(0, 50), st.integers(2, 5), st.integers(0, 4))
def test_trajectories_are_those_of_chapter_22(seed, m, start):
    "Every iterate of every block of every prompt, and the greedy text, in one batch"
    model, x = tiny(5, seed=seed), torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(seed))
    data, target = collect_trajectories(model, x, 2, m, start), HFModel(model, 0., check=False)
    assert data.prompt == 4 and data.x.dtype == np.uint16
    for row, blocks, last in zip(data.x.tolist(), data.iterates, data.last):
        assert tuple(row[4:]) == autoregressive(target, tuple(row[:4]), 2*m, Seeded(0))
        for k, ys in enumerate(blocks):
            ctx = tuple(row[:4 + k*m])
            assert (ys == trajectory(target, m, (start,)*m, ctx)).all() and last[k] == last_of(ys)
            assert tuple(row[len(ctx):len(ctx) + m]) == tuple(ys[-1])

def small_data(seed=0, m=4, V=6, n=5, blocks=3):
    model = tiny(V, seed=seed)
    x = torch.randint(V, (n, 5), generator=torch.Generator().manual_seed(seed))
    return model, collect_trajectories(model, x, blocks, m, start=1)

@proves("prop-one-pass")
@examples(8, st.integers(0, 50), st.integers(2, 4))
def test_a_packed_pass_computes_the_rows_of_decoding(seed, m):
    "Each row of the text and of two copies, as after its own prefix alone; in double precision"
    model, data = small_data(seed, m)
    batch = random_iterates(data, 2, seed)
    with torch.inference_mode():
        text, *copies = packed_logits(model, batch.x, batch.y, batch.later)
        for r, k, i in np.ndindex(2, 3, m):
            ctx = batch.x[r, :5 + k*m]
            def alone(y): return model(input_ids=torch.cat([ctx, y[:i]])[None]).logits[0, -1]
            assert torch.allclose(text[r, k, i], alone(batch.fixed[r, k]), atol=1e-9)
            for copy_, y in zip(copies, (batch.y, batch.later)) if i else ():
                assert torch.allclose(copy_[r, k, i - 1], alone(y[r, k]), atol=1e-9)

def test_the_mask_of_a_small_pass():
    seen = packed_mask(prompt=2, blocks=2, m=2, copies=2)
    assert ["".join("01"[x] for x in row) for row in seen.astype(int)] == [
        "1000000000", "1100000000", "1110000000", "1111000000", "1111100000", "1111110000",
        "1100001000", "1111000100", "1100000010", "1111000001"]

# The losses

def by_hand(model, batch, goal):
    "The mean cross-entropy at the places behind the first difference and not behind an end token"
    total, places = 0., 0
    for r, k in np.ndindex(*batch.y.shape[:2]):
        ctx, m = batch.x[r, :batch.x.shape[1] - (batch.y.shape[1] - k)*batch.y.shape[2]], batch.y.shape[2]
        def row(y, i):
            return model(input_ids=torch.cat([ctx, y[r, k, :i]])[None]).logits[0, -1].log_softmax(-1)
        fixed, f = batch.fixed[r, k].tolist(), first_difference(batch.y[r, k], goal[r, k])
        for i in (i for i in range(m) if i > f and 0 not in fixed[:i]):
            total -= (row(goal, i).detach().exp() * row(batch.y, i)).sum()
            places += 1
    return total / max(places, 1)

def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([w.grad.flatten() for w in model.parameters()])

@pytest.mark.parametrize("objective, goal", ((global_consistency, "fixed"), (local_consistency, "later")))
def test_the_consistency_loss_and_its_gradient(objective, goal):
    "The loss, place by place; the distributions that it aims at get no gradient"
    model, data = small_data(3)
    batch = random_iterates(data, 3, 1, corrected=.5)
    text, loss = objective(model, batch)
    want = by_hand(model, batch, getattr(batch, goal))
    assert want > 0 and loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert torch.allclose(gradient(model, loss), gradient(model, want), rtol=1e-3, atol=1e-5 * want.item())
    assert torch.allclose(text, no_consistency(model, batch)[0], atol=1e-9)

def test_the_autoregressive_loss():
    "Label smoothing of the fixed points up to their first end token; omega weighs it"
    model, data = small_data(3)
    batch = random_iterates(data, 3, 1)
    text, _ = no_consistency(model, batch)
    terms = [-(.9*z[x] + .1*z.mean()) for rows, tokens in zip(text.log_softmax(-1).flatten(0, 1),
             batch.fixed.flatten(0, 1).tolist()) for i, (z, x) in enumerate(zip(rows, tokens))
             if 0 not in tokens[:i]]
    assert len(terms) < batch.fixed.numel()
    want = torch.stack(terms).mean().item()
    assert autoregressive_loss(text, batch.fixed).item() == pytest.approx(want, rel=1e-5)
    recipe = ConsistencyRecipe(rows=3, corrected=0., omega=7.)
    alone = replace(recipe, objective="autoregressive")
    assert consistency_loss(data, alone)(model, 1).item() == pytest.approx(7*want, rel=1e-5)
    both = global_consistency(model, batch)[1].item() + 7*want
    assert consistency_loss(data, recipe)(model, 1).item() == pytest.approx(both, rel=1e-5)

def test_the_loss_has_the_numbers_of_the_recipe():
    model, data = small_data(3)
    batch = random_iterates(data, 3, 1, corrected=.5, seed=2)
    text, loss = global_consistency(model, batch)
    want = loss.item() + 7*autoregressive_loss(text, batch.fixed, .3).item()
    recipe = ConsistencyRecipe(rows=3, omega=7., corrected=.5, seed=2, smoothing=.3)
    assert consistency_loss(data, recipe)(model, 1).item() == pytest.approx(want, rel=1e-5)

def denoised(data, rows, step, **kw):
    "No noise: the last iterate of every block as the input"
    batch = random_iterates(data, rows, step, **kw)
    return replace(batch, y=batch.fixed, later=batch.fixed)

@faithful("CLLM", part="random_iterates", plain={"the last iterate as the input": denoised})
def test_training_is_on_the_iterates_before_the_fixed_point(subject):
    "All of them are met, each with the one after it; they have errors, which the loss corrects"
    model, data = small_data(3, n=2)
    met = {}
    for step in range(60):
        batch = subject(data, 2, step)
        for x, *row in zip(batch.x, batch.y, batch.later, batch.fixed):
            at = int((torch.from_numpy(data.x.astype(int)) == x).all(1).nonzero()[0, 0])
            for k, (y, later, fixed) in enumerate(zip(*row)):
                ys, T = data.iterates[at, k].tolist(), data.last[at, k]
                j = ys.index(y.tolist())
                assert j < T or T == 0
                assert later.tolist() == ys[min(j + 1, T)] and fixed.tolist() == ys[T]
                met.setdefault((at, k), set()).add(j)
    assert all(found == set(range(max(data.last[at], 1))) for at, found in met.items())
    assert gradient(model, global_consistency(model, subject(data, 2, 0))[1]).abs().max() > 0

def test_some_errors_are_corrected():
    "The share of wrong tokens that become those of the fixed point; correct ones stay"
    _, data = small_data(3, n=40)
    plain, some = (random_iterates(data, 400, 0, corrected=c) for c in (0., .3))
    assert torch.equal(plain.x, some.x) and torch.equal(plain.later, some.later)
    wrong = plain.y != plain.fixed
    assert torch.equal(some.y[~wrong], plain.y[~wrong])
    assert ((some.y == plain.y) | (some.y == some.fixed)).all()
    share = (some.y == some.fixed)[wrong].float().mean().item()
    assert abs(share - .3) < 5 * (.3*.7/wrong.sum().item())**.5

# Theorems

@proves("thm-zero-loss")
@examples(60, tables, st.integers(2, 4), starts)
def test_a_loss_of_zero(target, m, start):
    "Both losses are zero together, and then each iterate is mapped to the fixed point; the converse if sure"
    ys = trajectory(target, m, start)
    T, sweep = last_of(ys), partial(jacobi_sweep, target, (0,))
    sums = [sum(row_divergence(target, (0,), ys[goal], ys[j]).sum() for j, goal in enumerate(goals))
            for goals in ([T]*T, range(1, T + 1))]
    assert (sums[0] < 1e-12) == (sums[1] < 1e-12)
    mapped = all(sweep(tuple(y)) == tuple(ys[-1]) for y in ys[:T].tolist())
    assert mapped or sums[0] > 1e-12
    if all(max(target.law((0, *y[:i]))) == 1 for y in ys.tolist() for i in range(m)):
        assert mapped == (sums[0] == 0) and all(s in (0, np.inf) for s in sums)

@proves("thm-zero-loss")
def test_the_autoregressive_loss_does_not_see_it():
    "The greedy text has probability 1 in both tables; the consistency loss is infinite in one"
    def sure(f): return TableModel(3, lambda text: one_hot(f(text) % 3, 3))
    for target, want, passes in ((sure(lambda t: t[-1] + 1), np.inf, 4), (sure(len), 0, 2)):
        ys = trajectory(target, 4, (0,)*4)
        assert all(target.law((0, *ys[-1][:i]))[x] == 1 for i, x in enumerate(ys[-1]))
        assert row_divergence(target, (0,), ys[-1], ys[0]).sum() == want and rounds_of(ys) == passes

@proves("prop-two-passes")
@examples(30, tables, st.integers(2, 4))
def test_two_passes(target, m):
    "From every start: two passes at most after one sweep, one pass exactly if all but the last are correct"
    for start in np.ndindex(*[2]*m):
        ys = trajectory(target, m, start)
        out = generate(cold(target), Jacobi(target.V, m, start, exact=True), reject, (0,), m, Seeded(0))
        assert len(out.ledger.rounds) == rounds_of(ys)
        assert (rounds_of(ys) == 1) == (start[:-1] == tuple(ys[-1][:-1]))
        assert rounds_of(ys) <= 2 or tuple(ys[1]) != tuple(ys[-1])

def counted(ys):
    "Both counts by their definitions, one token and one sweep after another"
    m, g = ys.shape[1], ys[-1].tolist()
    prefix = [next((i for i in range(m) if y[i] != g[i]), m) for y in ys.tolist()]
    still = [i for i in range(m) if any(
        i > prefix[t] and all(y[i] == g[i] for y in ys[t:].tolist()) for t in range(1, len(ys)))]
    return sum(max(0, b - a - 1) for a, b in zip(prefix, prefix[1:])), len(still)

@proves("prop-saved-sweeps")
@examples(60, tables, st.integers(2, 4), starts)
def test_every_fast_forwarded_token_saves_a_sweep(target, m, start):
    ys = trajectory(target, m, start)
    fast, still = counted(ys)
    assert (fast_forwarded(ys), stationary(ys)) == (fast, still)
    T = m - correct_prefix(ys)[0] - fast
    assert last_of(ys) == T and rounds_of(ys) in (T, T + 1)

@proves("thm-passes-per-token")
@examples(25, tables, st.integers(2, 4))
def test_passes_per_token(target, m):
    "A random prompt of three tokens: the mean passes lie between m/b and m/a, by the means given the past"
    ways = {}
    for ctx in np.ndindex(*[target.V]*3):
        out = generate(cold(target), Jacobi(target.V, m, exact=True), reject, ctx, m, Seeded(0))
        emitted = tuple(counts.emitted for counts in out.ledger.rounds)
        for t in range(len(emitted)): ways.setdefault(emitted[:t], []).append(emitted[t])
    means, n = [np.mean(found) for found in ways.values()], target.V**3
    passes = sum(map(len, ways.values())) / n
    assert m / max(means) - 1e-9 <= passes <= m / min(means) + 1e-9
    assert passes / m == pytest.approx(1 / np.mean(sum(ways.values(), [])))

# Training

def single(loss):
    "The loss in single precision, whether the processor has bfloat16 or not"
    def loss_of(model, step):
        with torch.autocast("cpu", enabled=False): return loss(model, step)
    return loss_of

@cache
def next_letter():
    "A tiny model that has been trained on texts of successive tokens, and its trajectories"
    torch.manual_seed(0)
    base, ids = llama(2, 32, 64, 4, 64), {d: (np.arange(4000) % 4).astype(np.uint16) for d in DOMAINS}
    loss = single(next_token_loss(ids, 16, 16))
    with TemporaryDirectory() as home: fit(base, loss, 120, 1e-2, f"{home}/base.pt")
    x = torch.stack([(torch.arange(8) + k) % 4 for k in range(4)]).repeat(4, 1)
    return base, x, collect_trajectories(base, x, 2, 8)

def tuned(path, make=ConsistencyRecipe, omega=10.):
    "The tiny model after 200 steps of a recipe"
    base, x, data = next_letter()
    recipe = make(rows=8, omega=omega, smoothing=0.)
    model = copy.deepcopy(base).train()
    fit(model, single(consistency_loss(data, recipe)), 200, 1e-2, path, every=10**9)
    return collect_trajectories(model, x, 2, 8)

@faithful("CLLM", part="ConsistencyRecipe", plain={
    "the autoregressive loss alone": partial(ConsistencyRecipe, objective="autoregressive")})
def test_stationary_tokens_appear(subject, tmp_path):
    "In the same number of steps; the text stays the one that the base continues"
    _, _, before = next_letter()
    after = tuned(tmp_path/"model.pt", subject)
    assert (before.x == (before.x[:, :1] + np.arange(24)) % 4).all() and (after.x == before.x).all()
    assert convergence(before)["passes"] == 7.75 == 8*convergence(before)["passes_per_token"]
    found = convergence(after)   # with four seeds 3.4 to 4.5 passes, 3.6 to 5.1 tokens fast-forwarded
    assert convergence(before)["stationary"] == 0 < found["stationary"]
    assert found["fast_forwarded"] > 1.5 and found["passes"] < 6

def test_without_the_autoregressive_loss_the_model_collapses(tmp_path):
    "With omega = 1/100: one token everywhere, consistent and useless"
    after = convergence(tuned(tmp_path/"model.pt", omega=.01))
    assert after["different"] == 1 and after["passes"] <= 2

@pytest.fixture
def small(monkeypatch):
    "The module on a tiny base and a short text"
    base, _, _ = next_letter()
    ids = (np.arange(900) % 4).astype(np.uint16)
    def ids_of(domain, held_out=True): return ids[:1].repeat(900) if held_out else ids
    def drift(model, base): return dict(bits=dict(english=1., code=1.), tv=0.)
    def found(domain, n, length=32, seed=0): return [tuple(int(x) for x in ids[:length])]*n
    parts = dict(raw_model=lambda name: base, domain_ids=ids_of)
    parts |= dict(drift=drift, prompts=found)
    for name, part in parts.items(): monkeypatch.setattr(consistency, name, part)
    return ConsistencyRecipe(texts=3, prompt=6, block=4, steps=2, rows=2)

def test_one_command(small, tmp_path):
    "Trajectories, steps, weights that load, a card with both records; a second run trains nothing"
    train_consistency(tmp_path, small)
    card = json.loads((tmp_path/"data"/"consistency"/"recipe.json").read_text())
    assert card["recipe"]["texts"] == 3 and set(card["base"]["convergence"]) == set(DOMAINS) == set(
        card["tuned"]["convergence"])
    assert HFModel.load(tmp_path/"data"/"consistency").layers == 2
    data = training_trajectories(tmp_path/"trajectories.npz", small)   # read again
    assert data.iterates.shape == (3, 2, 5, 4) and data.prompt == 6
    assert (np.diff(data.x[:, :6].astype(int)) % 4 == 1).all()   # prompts of training text
    state = tmp_path/"consistency-global-0.pt"
    before = torch.load(state, weights_only=True)
    train_consistency(tmp_path, small)
    again = torch.load(state, weights_only=True)
    assert before["step"] == again["step"] == 2
    assert all(torch.equal(w, again["model"][k]) for k, w in before["model"].items())

def test_the_comparison(small, tmp_path):
    "Every objective with every seed, in one file; the runs differ"
    compare_objectives(tmp_path, tmp_path/"found.json", small, seeds=(0, 1))
    found = json.loads((tmp_path/"found.json").read_text())["found"]
    assert list(found) == ["base", *(f"{o}, seed {s}" for s in (0, 1) for o in OBJECTIVES)]
    runs = [torch.load(f, weights_only=True)["model"]["model.norm.weight"] for f in tmp_path.glob("*.pt")]
    assert len(runs) == 6 and all(not torch.equal(a, b) for i, a in enumerate(runs) for b in runs[:i])

def test_several_batches_are_one():
    _, data = small_data(n=5)
    parts = joined([data[:2], data[2:]])
    assert all((getattr(parts, k) == getattr(data, k)).all() for k in ("x", "iterates"))

# The shipped model

@cache
def held_out(model, n=6):
    "Trajectories after held-out prompts"
    x = torch.tensor([p for d in DOMAINS for p in prompts(d, n, seed=5)])
    return collect_trajectories(model, x, 2)

@faithful("CLLM", plain={"the model it began with": "Jacobi"})
def test_the_tuned_model_needs_fewer_passes(subject):
    "Decoding in the loop: passes of a block of 16, and the greedy text of plain decoding"
    target, system = subject.on(HFModel(raw_model(), 0., check=False), gamma=16)
    found = convergence(held_out(target.model))
    assert found["passes"] < MOST_PASSES and found["fast_forwarded"] > LEAST_FORWARDED
    exact = HFModel(consistency_model(dtype=torch.float64), 0., check=False)
    ctx = prompts("code", 1, seed=5)[0]
    assert system(exact, ctx, 32, Seeded(0)) == autoregressive(exact, ctx, 32, Seeded(0))

@pytest.mark.parametrize("verify", (reject, match))
def test_three_tokens_of_the_tuned_model(verify):
    "Top 2 at temperature 1: every path has the distribution of plain passes of the tuned model"
    ctx = prompts("english", 1, length=12, seed=2)[0]
    target = HFModel(consistency_model(), 1., top_k=2, check=False)
    found = loop_law(target, Jacobi(512, 3), verify, ctx, 3)
    assert tv_outcomes(found, plain_law(ctx, 3, 1., consistency_model)) <= SEEN
    assert tv_outcomes(found, plain_law(ctx, 3, 1., partial(raw_model, "large"))) > .01   # not the base

def test_the_record_is_that_of_the_weights():
    "The card's recipe is the default; the counts of the shipped weights are those of the card"
    card = json.loads((stored("consistency")/"recipe.json").read_text())
    assert card["recipe"] == json.loads(json.dumps(vars(ConsistencyRecipe())))
    moved = [consistency.drift(model, raw_model("large"), 512)["tv"]
             for model in (consistency_model(), raw_model("large"))]
    assert moved == pytest.approx([card["tuned"]["tv"], 0], abs=.01)
    again = consistency.held_out_convergence(consistency_model(), n=64)
    for domain, found in again.items():
        assert found == pytest.approx(card["tuned"]["convergence"][domain], rel=.02, abs=.2)

def test_bad_input():
    model, x = tiny(5), torch.zeros(1, 3, dtype=int)
    refuses("blocks", collect_trajectories, model, x, 0)
    refuses("block", collect_trajectories, model, x, 1, 1)
    refuses("start", collect_trajectories, model, x, 1, 4, 5)
    _, data = small_data(n=1)
    for name, bad in dict(objective="both", omega=-1, corrected=2, smoothing=-.1).items():
        refuses(name, consistency_loss, data, replace(ConsistencyRecipe(), **{name: bad}))
