"Chapter 25b: chosen rows by brute force, a draft that reads so many and no more, a roofline of three levels"
from fractions import Fraction as F
from itertools import islice

import numpy as np, pytest, torch
from hypothesis import given, strategies as st
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import rotate_half

from helpers import examples, faithful, laws, proves, seeds
from published import drafted, having
from specref import (capped_geometric, Chain, generate, HFModel, loop_law, prompts, reject, rounds, Seeded,
                     target_law, Tree, tv_outcomes)
from specref.draft.cascade import Nested
from specref.draft.sparse import (Retrieval, Selection, SnapKV, SparseModel, StreamingWindow,
                                  critical_length, sparse_speedup, triforce, triforce_speedup)
from specref.models.embedded import raw_model
from specref.models.transformer import given_cache
from specref.speed.cost import Machine, ModelSize, pass_seconds
from test_embedded import SEEN, Once, plain_law
from test_self import check_target_rows, tiny_gpt2

RULES = StreamingWindow(8, sinks=2), Retrieval(8, chunk=2), SnapKV(8, observed=3, kernel=3)
NEAR = 1e-6   # angles are rotated in single precision
TEXT = tuple(np.random.default_rng(3).integers(0, 3, 40).tolist())

def toy(seed=0, temperature=1.):
    "Two layers, four query heads on two key heads, in double precision"
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=3, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256)).double()
    with torch.no_grad(): [w.mul_(16) for w in model.parameters() if w.dim() > 1]
    return HFModel(model, temperature, check=False)

# By brute force: a fresh pass whose projections are recorded before they are rotated

def rotated(model, x, at):  # (heads, m, d), (heads, m) -> (heads, m, d)
    cos, sin = model.model.rotary_emb(x, position_ids=torch.tensor(at))
    return x*cos + rotate_half(x)*sin

def projections(model, text):  # -> {(layer, "q", "k" or "v"): (heads, n, d)}
    found = {}
    def keep(name):
        return lambda block, args, out: found.update({name: out[0].unflatten(-1, (-1, 4)).transpose(0, 1)})
    hooks = [getattr(layer.self_attn, f"{x}_proj").register_forward_hook(keep((i, x)))
             for i, layer in enumerate(model.model.layers) for x in "qkv"]
    model(input_ids=torch.tensor([text]))
    for hook in hooks: hook.remove()
    return found

def by_score(scores, k): return sorted(range(len(scores)), key=lambda i: -scores[i])[:k]

def brute(rule, q, k):  # (group, n, d), (n, d) of one key head -> row numbers
    n = len(k)
    if isinstance(rule, StreamingWindow):
        return [*range(rule.sinks), *range(n - 1, n - 1 - rule.budget + rule.sinks, -1)]
    if isinstance(rule, Retrieval):
        c = rule.chunk
        scores = [sum(float(x[-1] @ k[i:i + c].mean(0)) for x in q) for i in range(c, n, c)]
        top = [0, *(1 + i for i in by_score(scores, rule.budget//c - 1))]
        return [j for i in top for j in range(i*c, i*c + c)]
    w, total = rule.observed, np.zeros(n - rule.observed)
    for x in q:
        for t in range(n - w, n): total += (x[t] @ k[:t + 1].T / k.shape[1]**.5).softmax(-1)[:n - w].numpy()
    side = rule.kernel // 2
    smooth = [sum(total[max(i - side, 0):i + side + 1]) for i in range(n - w)]
    return [*range(n - 1, n - 1 - w, -1), *by_score(smooth, rule.budget - w)]

@torch.inference_mode()
def brute_rows(model, rule, text, every):  # -> {layer: rows of each key head}
    n, made, heads = len(text), projections(model, text), range(2)
    if n <= rule.budget: return {i: [[*range(n)] for _ in heads] for i in range(2)}
    old = max(n // every * every, rule.budget) if rule.observed else n
    def turn(x): return rotated(model, x[:, :old], [[*range(old)]]*len(x))
    def head(i, h): return brute(rule, turn(made[i, "q"])[2*h:2*h + 2], turn(made[i, "k"])[h])
    return {i: [[*head(i, h)[:rule.budget - n + old], *range(old, n)] for h in heads] for i in range(2)}

@torch.inference_mode()
def brute_law(model, rule, every, ctx, path):
    "The row after `path` by transformers' own pass behind a cache of the chosen rows alone"
    text, past = ctx[:-1], DynamicCache()
    made, by = projections(model, text), max(len(text) - rule.budget, 0)
    for i, chosen in brute_rows(model, rule, text, every).items():
        at = [[j + by*(j < rule.turned) for j in head] for head in chosen]
        k, v = (torch.stack([made[i, x][h, head] for h, head in enumerate(chosen)]) for x in "kv")
        past.update(rotated(model, k, at)[None], v[None], i)
    new = torch.tensor([[ctx[-1], *path]])
    at = torch.arange(len(text), len(text) + new.shape[1])[None]
    return model(input_ids=new, position_ids=at, **given_cache(model, past)).logits[0, -1].softmax(-1).numpy()

# The choice

def one_head(choose): return lambda self, q, k: choose(self, q, k)[:1].expand(len(k), -1)

class OneForAllHeads(Retrieval): choose = one_head(Retrieval.choose)

class LastKey(Retrieval):
    def choose(self, queries, keys):
        last = keys.unflatten(1, (-1, self.chunk))[:, :, -1:].expand(-1, -1, self.chunk, -1)
        return super().choose(queries, last.flatten(1, 2))

class WithoutFirst(Retrieval):
    "One chunk more in place of chunk 0"
    def choose(self, queries, keys):
        more = self.budget + self.chunk
        if keys.shape[1] < more: return super().choose(queries, keys)
        return Retrieval(more, self.chunk).choose(queries, keys)[:, self.chunk:]

class OneQuery(SnapKV):
    def choose(self, queries, keys): return super().choose(queries[:, -1:].expand_as(queries), keys)

class NotSmoothed(SnapKV):
    def choose(self, queries, keys): return SnapKV(self.budget, self.observed, 1).choose(queries, keys)

class SnapForAllHeads(SnapKV): choose = one_head(SnapKV.choose)

def check_choice(rule, published):
    "The rows of each layer and head, at several lengths, where newer rows have taken places and where not"
    for seed in range(3):
        target = toy(seed)
        draft = SparseModel(target, rule, every=4, check=False)
        for n in (5, 9, 12, 13, 22, 39):
            draft.law(TEXT[:n + 1])
            want = brute_rows(target.model, published, TEXT[:n], 4)
            for i, rows in enumerate(draft.index(TEXT[:n])):
                assert [sorted(head) for head in rows.tolist()] == [sorted(head) for head in want[i]]

@faithful("TriForce", part="Retrieval", plain={
    "one choice for all heads": OneForAllHeads, "a key for a chunk": LastKey, "no chunk 0": WithoutFirst,
    "a window": lambda budget, chunk: StreamingWindow(budget)})
def test_the_top_chunks(subject):
    "Per layer and head: chunk 0 and the chunks of the largest products, newer rows in place of the last"
    check_choice(subject(8, chunk=2), RULES[1])

@faithful("MagicDec", part="SnapKV", plain={
    "the last query alone": OneQuery, "not smoothed": NotSmoothed,
    "one choice for all heads": SnapForAllHeads})
def test_the_rows_most_attended_to(subject): check_choice(subject(8, observed=3, kernel=3), RULES[2])

def test_the_window(): check_choice(RULES[0], RULES[0])

# The model

class WholeCache(SparseModel):
    "Reads all rows"
    def index(self, text): return [self.between(0, len(text))] * self.layers

class OldPositions(SparseModel):
    "Leaves the sinks where they were"
    def turn(self, by): "Not at all"

class CutText(SparseModel):
    "Reads the last tokens as if they were the whole text"
    def feed(self, tree, with_answers=True):
        short = Tree(tree.ctx[-self.rule.budget:])
        for u, x in zip(tree.parent[1:], tree.token[1:]): short.add(u, x)
        return super().feed(short, with_answers)

def read_by(make): return having(model=lambda draft: make(draft.target, draft.rule, draft.every, check=False))

@faithful("MagicDec", plain={"the whole cache": read_by(WholeCache), "a shorter text": read_by(CutText)})
def test_an_eighth_of_the_rows_is_read(subject):
    "An eighth of the longest text: SnapKV's rows, of a quarter of them observed, and chosen as often"
    target, system = subject.on(toy())
    for round in islice(rounds(target, system.drafter, system.verify, TEXT[:36], Seeded(1)), 2):
        for i in range(1, len(round.tree)):
            want = brute_law(target.model, SnapKV(32, 8), 8, round.tree.ctx, round.tree.path(i)[:-1])
            assert abs(round.tree.law[i] - want).max() < NEAR

@proves("thm-selection")
@faithful("MagicDec", part="SparseModel", plain={
    "the whole cache": WholeCache, "the sinks' own positions": OldPositions, "a shorter text": CutText})
def test_rows_are_chosen_and_shared(subject):
    "Each edge by a pass over the chosen rows alone; the target's rows by a fresh pass; bytes constant"
    for rule in RULES:
        target = toy()
        draft = subject(target, rule, every=4, check=False)
        for round in islice(rounds(target, Chain(draft, 3), reject, TEXT[:15], Seeded(1)), 4):
            tree = round.tree
            for i in range(1, len(tree)):
                want = brute_law(target.model, rule, 4, tree.ctx, tree.path(i)[:-1])
                assert abs(tree.law[i] - want).max() < NEAR
            check_target_rows(target)
        read = []
        for n in (18, 36):
            before = draft.meter.kv_bytes
            draft.law(TEXT[:n])
            read.append(draft.meter.kv_bytes - before)
        assert read == [8*target.memory.row_bytes]*2

@examples(10, seeds, st.sampled_from(RULES), st.lists(st.integers(1, 40), min_size=2, max_size=5))
def test_a_function_of_the_text(seed, rule, lengths):
    "In any order of contexts the same rows, on trees; with a budget of the context the target's"
    target = toy(seed % 5)
    draft, whole = SparseModel(target, rule, 4, False), SparseModel(target, StreamingWindow(64), check=False)
    for n in lengths:
        tree = Tree(TEXT[:n])
        for u, x in ((0, 1), (0, 2), (1, 0), (2, 2)): tree.add(u, x)
        fresh, p = SparseModel(toy(seed % 5), rule, 4, False)(tree), target(tree)
        q, dense = draft(tree), whole(tree)
        for i in range(len(tree)):
            assert abs(q[i] - fresh[i]).max() < 1e-9 and abs(p[i] - dense[i]).max() < 1e-10

def test_what_a_selection_costs():
    "A pass over the observed tokens once in `every` tokens, and never for the window"
    target = toy()
    draft = SparseModel(target, SnapKV(8, observed=3), every=4, check=False)
    generate(target, Chain(draft, 1), reject, TEXT[:17], 8, Seeded(0))
    assert draft.selecting.calls in (2, 3) and draft.selecting.tokens == 3*draft.selecting.calls
    row = target.memory.row_bytes
    again = SparseModel(target, SnapKV(8, observed=3), every=4, check=False)
    again.law(TEXT[:19])
    assert [*again.selecting] == [1, 3, 6, 13*row + 8*row, 0]
    window = SparseModel(target, StreamingWindow(8), check=False)
    window.law(TEXT[:19])
    assert window.selecting.calls == 0

def test_other_models_are_refused():
    other = HFModel(tiny_gpt2(), check=False)
    with pytest.raises(ValueError, match="^model: "): SparseModel(other, StreamingWindow(8))

@proves("thm-selection")
@pytest.mark.parametrize("rule", [StreamingWindow(8, 2), Retrieval(8, 2), SnapKV(8, 2, 3), None], ids=str)
def test_three_tokens_of_a_transformer(rule):
    "The embedded target, top 2: every path has the distribution of plain passes; `None` is TriForce"
    ctx = prompts("english", 1, length=12, seed=2)[0]
    target, small = Once("target", 1.), Once("small", 1.)
    if rule: drafter = Chain(SparseModel(target, rule, 4, check=False), 2)
    else: drafter = triforce(target, small, 2, budget=8, window=6, sinks=2, chunk=2, every=4)
    assert tv_outcomes(loop_law(target, drafter, reject, ctx, 3), plain_law(ctx, 3, 1.)) <= SEEN

class Scattered(Selection):
    "Rows that have nothing to do with the text but its length"
    observed = 1
    def choose(self, queries, keys):
        heads, n, _ = keys.shape
        return torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(h))[:self.budget]
                            for h in range(heads)])

@proves("thm-selection")
@pytest.mark.parametrize("every", (1, 5))
def test_no_selection_is_wrong(every):
    "Scattered rows, fresh or stale: the distribution of three tokens of a small transformer, temperature 2"
    target = toy(temperature=2.)
    drafter = Chain(SparseModel(target, Scattered(5), every, check=False), 2)
    found = loop_law(target, drafter, reject, TEXT[:8], 3)
    assert tv_outcomes(found, target_law(target, TEXT[:8], 3)) < 1e-9

def planted(domain, seed):  # -> context, its continuation
    passage, rest = prompts(domain, 1, 64, seed)[0], prompts(domain, 1, 300, seed + 50)[0]
    return rest[:40] + passage + rest[40:] + passage[:16], passage[16:40]

@faithful("TriForce", part="Retrieval", plain={"a window": StreamingWindow})
def test_a_planted_passage_is_found(subject):
    "With 128 of 380 rows the acceptance rate exceeds the window's by more than .05; more rows, more of it"
    target, found = HFModel(raw_model("target"), check=False), []
    for rule in (StreamingWindow(128), subject(128), subject(256)):
        draft, rates = SparseModel(target, rule, check=False), []
        for seed in range(2):
            ctx, continuation = planted("code", seed)
            tree = Tree(ctx)
            for i, x in enumerate(continuation): tree.add(i, x)
            rates.append(np.minimum(np.stack([*target(tree)]), np.stack([*draft(tree)])).sum(1).mean())
        found.append(np.mean(rates))
    assert found[0] + .05 < found[1] < found[2]

# Three levels

def not_anchored(d): return Nested(d.middle, d.gamma, d.inner)
def two_levels(d): return Chain(d.middle, d.gamma)
def no_middle(d): return Chain(d.inner.model, d.gamma)
def middle_window(model): return SparseModel(model.target, StreamingWindow(32), check=False)

@faithful("TriForce", plain={
    "the target reads drafted tokens": drafted(not_anchored), "two levels": drafted(two_levels),
    "no middle level": drafted(no_middle), "a window in the middle": having(middle=middle_window)})
def test_three_levels(subject):
    "Edges by a pass over the retrieved rows; no target call while drafting; fewer middle calls than tokens"
    (target, system), proposed = subject.on(toy(), toy(), gamma=4), 0
    drafter = system.drafter
    for n in range(34, 40):
        ctx = TEXT[:n]
        target.feed(Tree(ctx[:-1]), with_answers=False)
        before = target.meter.calls
        tree = drafter(ctx, Seeded(n))
        assert target.meter.calls == before
        proposed += len(tree) - 1
        for i in range(1, len(tree)):
            want = brute_law(target.model, Retrieval(32), 8, ctx, tree.path(i)[:-1])
            assert abs(tree.law[i] - want).max() < NEAR
    assert drafter.models[0].meter.calls < proposed

# The roofline

@proves("prop-dropped-rows")
@given(laws(5), st.lists(st.integers(-9, 9), min_size=5, max_size=5), st.integers(1, 4))
def test_the_error_of_dropped_rows(weights, values, k):
    "On the weights of one head: kept minus whole is the lost weight times the difference of the averages"
    inside, outside = weights[:k].sum(), weights[k:].sum()
    if not inside or not outside: return
    kept, dropped = weights[:k] @ values[:k] / inside, weights[k:] @ values[k:] / outside
    assert kept - weights @ values == outside * (kept - dropped)

@given(st.integers(1, 8), st.fractions(0, 1, max_denominator=9))
def test_three_levels_by_hand(gamma, alpha):
    "All inner tokens accepted: a round of k + 1 tokens each; none accepted: one token each"
    size, tiny, machine = ModelSize(F(10), 2, 3, 5), ModelSize(F(1), 2, 1, 1), Machine(F(4), F(8))
    middle, last = pass_seconds(size, machine, 8, 2), pass_seconds(size, machine, 60, gamma + 1)
    for inner, calls in ((1, (gamma + 1)//2), (0, gamma)):
        seconds = calls*(middle + pass_seconds(tiny, machine, 4)) + last
        found = triforce_speedup(size, tiny, machine, 60, 8, 4, gamma, alpha, inner)
        assert found == capped_geometric(alpha, gamma) * pass_seconds(size, machine, 60) / seconds

# The critical length

sizes = st.builds(ModelSize, st.integers(1, 50), st.integers(1, 2), st.integers(1, 9), st.just(0))
speeds = st.fractions(F(1, 4), 60, max_denominator=4)
machines = st.builds(Machine, speeds, speeds)

@proves("thm-critical-length")
@given(sizes, machines, st.integers(0, 20), st.integers(2, 6), st.fractions(F(1, 9), 1, max_denominator=9),
       st.fractions(1, 4, max_denominator=8))
def test_critical_length(size, machine, budget, gamma, alpha, factor):
    "In fractions: from S* on the speed-up never falls over the batch, below it falls between the two bounds"
    star = critical_length(size, machine, budget, gamma)
    weights, token = size.weights*size.weight_bytes / machine.bandwidth, 2*size.weights / machine.flops
    low, high = weights / (gamma + 1) / token, weights / token
    batches = sorted({low/2, low, (low + high)/2, high, 2*high, *map(F, range(1, 40))})
    def speed(rows, batches):
        return [sparse_speedup(size, machine, rows, budget, gamma, alpha, b) for b in batches]
    rising = speed(max(star*factor, budget), batches)
    assert rising == sorted(rising)
    below = budget + (star - budget)*(1 - 1/(1 + factor))
    falling = speed(below, [low, (low + high)/2, high])
    assert falling[0] > falling[1] > falling[2]

def test_a_draft_of_few_rows_by_hand():
    "The draft reads its budget, the verification all rows"
    size, machine = ModelSize(F(10), 2, 3, 5), Machine(F(4), F(8))
    speed = sparse_speedup(size, machine, 6, 2, 1, F(1, 2))
    assert speed == F(3, 2) * F(19, 2) / (F(13, 2) + pass_seconds(size, machine, 6, 2))
