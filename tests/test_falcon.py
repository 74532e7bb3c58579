"""32b_falcon: blocks at every place and in the cache, glancing training, the trees, and the bound of a
block"""
from collections import Counter
from fractions import Fraction
from math import prod
from unittest.mock import patch

import numpy as np, pytest, torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from contracts import drafter_contract, verifier_contract
from helpers import (chain, examples, faithful, first_failure, g_test, proves, random_table, round_tokens,
                     seeds, tiny)
from networks import otherwise
from published import drafted
from specref import (block, Chain, Enumerator, exact, generate, HFModel, law_of, loop_law, normalize,
                     one_hot, reject, rounds, Seeded, StaticTree, TableModel, target_law, traversal, Tree,
                     tv_outcomes)
from specref.core.target import UnwarpedModel
from specref.core.tree import likeliest_points, to_choices
from specref.models.embedded import raw_model
from specref.models.transformer import RowTrie
from specref.train import falcon
from specref.train.falcon import (BlockDraft, Falcon, annealed_share, block_tokens, block_tree,
                                  glancing_mask, overlap_within, relaxed_causal_mask)
from specref.train.harness import StateDataset, TargetModel
from specref.train.synthetic import chain_tokens, following

def small(V=3, k=2, make=Falcon):
    "An untrained network on a tiny target; and the target"
    base = TargetModel(tiny(V))
    torch.manual_seed(1)
    net = make(base, k=k).double().eval()
    with torch.no_grad():
        for w in net.parameters(): w.mul_(2 if w.dim() > 1 else 1)
    return net, HFModel(base.model, keep=net.reads, check=False)

def text(V, n, seed=0): return tuple(np.random.default_rng(seed).integers(0, V, n).tolist())

def batch_of(target, texts):
    return StateDataset(torch.tensor(texts), {2: torch.stack([target.states(tuple(x))[2] for x in texts])})

# The network

def one_lstm_layer(net): net.lstm = nn.LSTM(2*net.base[0].d, net.base[0].d, batch_first=True)
def normed_input(net): net.layer.input_layernorm = LlamaRMSNorm(net.base[0].d)
def other_halves(net): net.lstm.reset_parameters()
class TokenFirst(Falcon):
    def run_lstm(self, f, tokens, state=None):
        out = self.lstm(torch.cat([self.base[0].embed(tokens), f], -1))
        return out[0], None

@faithful("Falcon", part="Falcon", plain={
    "one LSTM layer": otherwise(Falcon, one_lstm_layer), "an input norm": otherwise(Falcon, normed_input),
    "the token first": TokenFirst, "halves of other sizes": otherwise(Falcon, other_halves)})
def test_what_is_trained_and_what_is_shared(subject):
    "Two LSTM layers from 2d to d, feature first, both halves as large at the start"
    base = TargetModel(raw_model("target"))
    net, d = subject(base).eval(), base.d
    lstm = {f"lstm.{w}_{side}_l{i}" for w in ("weight", "bias") for side in ("ih", "hh") for i in (0, 1)}
    layer = [*(f"self_attn.{k}_proj" for k in "qkvo"), *(f"mlp.{k}_proj" for k in ("gate", "up", "down")),
             "post_attention_layernorm"]
    assert set(net.state_dict()) == lstm | {f"layer.{k}.weight" for k in layer}
    assert isinstance(net.layer.input_layernorm, nn.Identity)
    assert net.k == 2 and net.lstm.weight_ih_l0.shape == (4*d, 2*d)
    assert net.lstm.weight_ih_l1.shape == (4*d, d) and net.lstm.dropout == .1
    left, right = net.lstm.weight_ih_l0[:, :d], net.lstm.weight_ih_l0[:, d:]
    def size(h, w): return (h @ w.T).square().mean()
    feature, token = size(torch.randn(512, d), left), size(base.embed.weight, right)
    f, x = torch.randn(1, 3, d), torch.tensor([[5, 7, 9]])
    assert .5 < feature / token < 2
    assert torch.allclose(net.run_lstm(f, x)[0], net.lstm(torch.cat([f, base.embed(x)], -1))[0])

def test_the_published_forward():
    "nn.LSTM returns a pair, which no linear layer takes, and needs `batch_first`"
    x = torch.randn(1, 5, 8)
    theirs, ours = nn.LSTM(8, 4, num_layers=2), nn.LSTM(8, 4, num_layers=2, batch_first=True)
    with pytest.raises((TypeError, AttributeError)): nn.Linear(4, 4)(theirs(x))
    changed = x.clone()
    changed[0, 0] += 1
    same = lambda lstm: torch.equal(lstm(x)[0][0, 1:], lstm(changed)[0][0, 1:])
    assert same(theirs) and not same(ours) and small()[0].lstm.batch_first

# Blocks

@torch.inference_mode()
def plain(net, target, ctx, path):
    "The logits after a path: every pass reads the whole text, its last k rows attend to each other"
    hidden = target.model(input_ids=torch.tensor([ctx[:-1]]), output_hidden_states=True).hidden_states
    f, x, k = net.enter(dict(enumerate(hidden))), list(ctx[1:]), net.k
    for s in range(len(path)//k + 1):
        T = len(x)
        u, _ = net.lstm(torch.cat([f, net.base[0].embed(torch.tensor([x]))], -1))
        see = torch.ones(T, T, dtype=torch.bool).tril()
        see[T-k:] = True
        attend = lambda q, a, b: F.scaled_dot_product_attention(q, a, b, attn_mask=see, enable_gqa=True)
        out = net.layer(u, u, torch.arange(T)[None], attend)[:, T-k:]
        f, x = torch.cat([f, out], 1), x + list(path[s*k:(s+1)*k])
    return net.logits(out[0, len(path) % k])

def off(draft, tree):
    "The largest deviation of the rows of all nodes from those of plain passes"
    rows = draft(tree)
    law = lambda i: plain(draft.net, draft.target, tree.ctx, tree.path(i)).softmax(-1).numpy()
    return max(abs(rows[i] - law(i)).max() for i in range(len(tree)))

nodes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=6)
visits = st.tuples(nodes, st.integers(0, 6), st.integers(0, 2), st.integers(4, 11))

@proves("thm-in-blocks")
@examples(15, st.integers(1, 3), st.lists(visits, min_size=1, max_size=4))
def test_any_history(k, history):
    """After any trees, whatever of them was accepted, truncated or restarted, the rows are those of plain
    passes"""
    net, target = small(k=k)
    draft, ctx = BlockDraft(net, target), (0, 1, 2, 0)
    for some, at, x, most in history:
        tree = Tree(ctx)
        for u, y in some: tree.add(u % len(tree), y)
        assert off(draft, tree) < 1e-10
        ctx = (*tree.text(at % len(tree)), x)[:most]

def causal(k): return relaxed_causal_mask(1)

def blocks_alone(k):
    "A row attends to its own block alone"
    def attend(q, keys, values):
        block = torch.arange(q.shape[2]) // k
        see = block[:, None] == block
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=see, enable_gqa=True)
    return attend

def bidirectional(k): return relaxed_causal_mask(10**6)

def with_mask(mask):
    "Falcon, trained with another attention mask"
    class Other(Falcon):
        def text_features(self, f, tokens):
            at = torch.arange(f.shape[1]).expand(f.shape[:2])
            return self.block_features(self.run_lstm(f, tokens)[0], at, mask(self.k))
    return Other

@faithful("Falcon", part="Falcon", plain={
    "a causal mask": with_mask(causal), "independent blocks": with_mask(blocks_alone),
    "a bidirectional mask": with_mask(bidirectional)})
@proves("thm-anywhere")
@torch.inference_mode()
def test_training_blocks_are_those_of_every_place(subject):
    "The training pass, at every shift of its blocks, gives the rows that `guesses` gives at every place"
    for k in (1, 2, 3):
        net, target = small(7, k, subject)
        batch = batch_of(target, [text(7, 15)])
        z, grid = net.guesses(batch, 3*k), net.text_features(batch.states[2][:, :12], batch.x[:, 1:13])[0]
        for t in range(k - 1, 12, k):
            for r in range(k): assert (net.logits(grid[t-k+1+r]) - z[r][0, t]).abs().max() < 1e-10
        assert len(z) == 3*k and all((row[0, :k-1] == 0).all() for row in z)

@proves("thm-anywhere")
@examples(6, st.integers(1, 3), seeds)
def test_stored_rows_do_not_depend_on_k(k, seed):
    "Keys, values and states of rows under networks of the same weights and another k are the same"
    (a, target), (b, _) = small(5, k), small(5, k + 1)
    x, at = text(5, 13, seed), torch.arange(12)[None]
    f, x = target.states(x)[2][None, :12], torch.tensor([x[1:]])
    (u, s), (v, t) = a.run_lstm(f, x), b.run_lstm(f, x)
    assert torch.equal(s, t) and all(map(torch.equal, a.keys(u, at), b.keys(v, at)))
    assert (a.text_features(f, x) - b.text_features(f, x)).abs().max() > 1e-6

def one_a_pass(net, target): return BlockDraft(small(7, 1)[0], target)
class Uncached(BlockDraft):
    def answers(self, tree):
        self.trie, self.memory.n = RowTrie(), 0
        return super().answers(tree)

@faithful("Falcon", part="BlockDraft", plain={"a pass a token": one_a_pass, "no cache": Uncached})
@proves("thm-in-blocks")
def test_passes(subject):
    "A chain of gamma takes ceil(gamma/k) passes, in every round"
    for k in (1, 2, 3):
        net, target = small(7, k)
        for gamma in (1, 4, 5):
            draft, calls = subject(net, target), []
            for _ in zip(range(4), rounds(target, Chain(draft, gamma), reject, text(7, 8), Seeded(gamma))):
                calls.append(draft.meter.calls)
            assert np.diff([0, *calls]).tolist() == [-(-gamma//k)]*4
        draft = subject(net, target)
        Chain(draft, 5)(text(7, 8), Seeded(0))
        assert draft.meter.tokens == 7 + 4//k*k
        assert draft.meter.layer_tokens == 2*draft.meter.tokens + k*(4//k + 1)

def test_siblings_are_read_together():
    "The LSTM runs once for each depth of the new rows, on all of them"
    (net, target), sizes = small(7), []
    def counted(f, tokens, state): return sizes.append(len(f)) or Falcon.run_lstm(net, f, tokens, state)
    with patch.object(net, "run_lstm", counted):
        StaticTree(BlockDraft(net, target), block_tree((3, 1, 1), 2))(text(7, 4), Seeded(0))
    assert sizes == [1]*3 + [3]*4

def test_a_short_context_and_a_failed_pass():
    "Without a block rows are uniform and no pass is made; after a failed pass rows are right"
    net, target = small(k=3)
    draft = BlockDraft(net, target)
    for ctx in ((0,), (0, 1), (0, 1, 2)):
        assert all(np.allclose(row, 1/3) for row in draft(chain(ctx, (1, 1, 1, 1))))
    assert draft.meter.calls == 0 and len(generate(target, Chain(draft, 4), reject, (0,), 9, Seeded(0))) == 9
    def fails(*args): raise KeyboardInterrupt
    ask, net.block_features = net.block_features, fails
    with pytest.raises(KeyboardInterrupt): draft(chain(text(3, 9), (1, 2, 0, 1)))
    net.block_features = ask
    assert off(draft, chain(text(3, 9), (1, 2, 0, 1))) < 1e-10

@faithful("Falcon", part="relaxed_causal_mask", plain={
    "a causal mask": causal, "independent blocks": blocks_alone, "a bidirectional mask": bidirectional})
def test_the_relaxed_mask(subject):
    "Row i attends to row j if j is before it or in its block: k x k squares on the diagonal, causal across"
    for k in (1, 2, 3):
        q, eye = torch.zeros(1, 1, 7, 4, dtype=torch.float64), torch.eye(7, dtype=torch.float64)[None, None]
        seen = subject(k)(q, q, eye)[0, 0] > 0
        assert all(seen[i, j] == (j <= i or j//k == i//k) for i in range(7) for j in range(7))

# The training

def a_coin_for_each(wrong, share): return torch.rand(wrong.shape) < share
def the_misses(wrong, share):
    "The first misses, where they are"
    return wrong & (wrong.cumsum(1) <= (share * wrong.sum(1, keepdim=True)).floor())
def a_run_of_the_text(wrong, share): return glancing_mask(torch.ones_like(wrong), share)

@faithful("Falcon", part="glancing_mask", plain={
    "a coin for each row": a_coin_for_each, "the misses themselves": the_misses,
    "a share of the text": a_run_of_the_text})
@proves("prop-glances")
@examples(25, seeds, st.integers(1, 40), st.floats(0, 1), **first_failure)
def test_a_run_of_the_misses(subject, seed, T, share):
    "In every text as many as floor(share x misses), in a row; which places were wrong does not matter"
    torch.manual_seed(seed)
    wrong = torch.rand(6, T) < torch.rand(6, 1)
    masks = []
    for misses in (wrong, wrong[:, torch.randperm(T)]):
        torch.manual_seed(seed)
        masks.append(subject(misses, share))
    assert torch.equal(*masks)
    for row, miss in zip(masks[0], wrong):
        at = row.nonzero()[:, 0]
        assert len(at) == int(np.floor(np.float32(share) * np.float32(miss.sum())))
        assert (len(at) == 0 or at[-1] - at[0] == len(at) - 1)

@proves("prop-glances")
def test_every_start_is_equally_likely():
    "A run of three in a text of eight: each of the six starts, one in six; a distance of .1 is detected"
    torch.manual_seed(0)
    masks = glancing_mask(torch.ones(6000, 8, dtype=torch.bool), 3.2/8)
    seen = Counter(row.nonzero()[0, 0].item() for row in masks)
    report = g_test(seen, {i: 1/6 for i in range(6)})
    assert sorted(seen) == list(range(6)) and report.fits and report.tv < .1
    assert [annealed_share(.4, a) for a in (0, .5, 1)] == [.4, .2, 0]

def watched(net):
    "The inputs of the two passes of a loss, and its targets"
    seen, grid, missed = [], net.text_features, net.feature_loss
    net.text_features = lambda f, x: seen.append((f, x, torch.is_grad_enabled())) or grid(f, x)
    def loss(out, true, came, counts): return seen.append((out, true, came)) or missed(out, true, came)
    net.feature_loss = loss
    return seen

class Unglanced(Falcon):
    def __init__(self, base, **kw): super().__init__(base, glance=0., **kw)

class FeaturesAlone(Falcon):
    "Reveals features without their tokens"
    def loss(self, batch, at):
        grid = self.text_features
        def half(f, tokens): return grid(f, batch.x[:, 1:1+tokens.shape[1]])
        with patch.object(self, "text_features", half): return super().loss(batch, at)

class CoinGlances(Falcon):
    def loss(self, batch, at):
        with patch.object(falcon, "glancing_mask", a_coin_for_each): return super().loss(batch, at)

class OnePass(Falcon):
    "Glances without a first pass: the share is of all rows"
    def loss(self, batch, at):
        with patch.object(falcon, "glancing_mask", a_run_of_the_text): return super().loss(batch, at)

@faithful("Falcon", part="Falcon", plain={
    "no glancing": Unglanced, "features alone": FeaturesAlone, "a coin for each row": CoinGlances,
    "a share of the text": OnePass})
@proves("prop-glances")
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pairs_are_revealed_whole(k, subject):
    "Pass one has no gradient; pass two reads, in runs of floor(.4 misses), the true pair of the row"
    net, target = small(11, k, subject)
    batch, seen = batch_of(target, [text(11, 40, s) for s in range(5)]), watched(net)
    net.loss(batch, 0.).backward()
    (f, x, first), (g, y, second), (_, true, came) = seen
    h, m = batch.states[2], f.shape[1]
    assert not first and second and m % k == 0 and 39 - k - m < k and 0 < (f - h[:, :m]).abs().max() <= .1
    assert torch.equal(true, h[:, k:k+m]) and torch.equal(came, batch.x[:, 1+k:1+k+m])
    assert torch.equal(x, batch.x[:, 1:1+m])
    shown = (g != f).any(-1)
    assert shown.any() and torch.equal(shown, (g == true).all(-1)) and torch.equal(y, x.where(~shown, came))
    with torch.no_grad(): found = net.logits(Falcon.text_features(net, f, x)).argmax(-1)
    misses = (found != net.logits(true).argmax(-1)).sum(1)
    assert shown.sum(1).tolist() == [int(.4*n) for n in misses.tolist()]

@proves("prop-glances")
def test_at_the_end_nothing_is_revealed():
    net, target = small(11)
    batch, seen = batch_of(target, [text(11, 40, s) for s in range(5)]), watched(net)
    net.loss(batch, 1.)
    assert all(map(torch.equal, seen[0][:2], seen[1][:2]))

# Trees

SHAPES = [((3, 1), 2, 12), ((4, 1, 1), 2, 24), ((2, 2), 3, 18), ((1, 1, 1, 1), 1, 4), ((2,), 4, 8)]

def siblings_anywhere(shape, k): return block_tree([n for n in shape for _ in range(k)], 1)
def branches_apart(shape, k): return block_tree((prod(shape), *[1]*(len(shape) - 1)), k)
def one_path(shape, k): return block_tree([1]*len(shape), k)

@faithful("Falcon", part="block_tree", plain={
    "siblings at every level": siblings_anywhere, "branches at the root alone": branches_apart,
    "a chain": one_path})
def test_trees_in_blocks(subject):
    "m passes, n branches, k tokens; siblings only where a block begins; a pass for every k levels"
    for shape, k, count in SHAPES:
        (net, target), paths = small(7, k), to_choices(subject(shape, k))
        assert len(paths) == count == k*sum(prod(shape[:i+1]) for i in range(len(shape)))
        assert max(map(len, paths)) == k*len(shape)
        assert all(p[-1] == 0 for p in paths if (len(p) - 1) % k)
        draft = BlockDraft(net, target)
        tree = StaticTree(UnwarpedModel(draft), subject(shape, k), likeliest_points)(text(7, 9), Enumerator())
        assert len(tree) == count + 1 and draft.meter.calls == len(shape) and off(draft, tree) < 1e-10

# The bound of a block

@proves("thm-within")
@pytest.mark.parametrize("B, tail, gamma, k", [(2, 2, 4, 2), (2, 1, 3, 2), (3, 2, 3, 3), (2, 2, 3, 1)])
def test_the_best_distributions_enumerated(B, tail, gamma, k):
    """Every path of a round with the best distributions as tables of fractions, from every phase: the mean
    tokens are those of the theorem"""
    V = B*(tail + 1)
    row, means = lambda x: exact(*(int(y in following(x, B, tail)) for y in range(V))), []
    def best(text):   # of a place of a block, given the text up to where the block begins
        j = len(text) - 2
        q = one_hot(text[len(text) - 1 - j % k], V, exact=True)
        for _ in range(j % k + 1): q = sum(w*row(x) for x, w in enumerate(q) if w)
        return q
    target, drafter = TableModel(V, lambda text: row(text[-1])), Chain(TableModel(V, best), gamma)
    for start in [(i - 1, i) if i else (V - 1, 0) for i in range(tail + 1)]:
        means.append(round_tokens(target, drafter, ctx=start).mean())
    assert sum(means) / Fraction(tail + 1) == block_tokens(B, tail, gamma, k)

@proves("thm-within")
@examples(25, st.integers(2, 5), st.data())
def test_no_better_distributions_for_two(B, data):
    """Any two distributions over the branches in a block of two accept no more than the uniform ones, of one
    draft or of both"""
    weights = st.lists(st.integers(0, 5), min_size=B, max_size=B).filter(any)
    q = [normalize(exact(*data.draw(weights))) for _ in range(2)]
    one, both = sum(min(Fraction(1, B), w) for w in q[0]), sum(min(Fraction(1, B), w)*v for w, v in zip(*q))
    assert one <= 1 and both <= Fraction(1, B)

def test_between_independent_and_sequential():
    "Blocks of one are sequential, those of two accept no more, and any block is above independent heads"
    for (B, tail), gamma in (((2, 1), 3), ((4, 3), 6), ((3, 5), 6)):
        by_k = [block_tokens(B, tail, gamma, k) for k in range(1, gamma + 1)]
        assert by_k[0] == gamma + 1 >= by_k[1] and min(by_k) > chain_tokens(B, tail, gamma)
    assert block_tokens(4, 3, 4, 2) == Fraction(17, 4) and overlap_within(4, 3, 3, 1, 2) == Fraction(1, 4)

# The distribution

def independent(law): return lambda earlier: law

WAYS = {"chain, by block": (dict(parent=(-1, 0, 1, 2)), block),
        "tree, without replacement": (dict(parent=block_tree((2,), 2)), reject),
        "tree, drawn, traversal": (dict(parent=block_tree((2,), 2), draw=independent), traversal)}

def as_if_sequential(drafter):
    "Wrong: states rows that have read their block for tokens that were drawn without"
    net, target = small(2, 1)
    rows = BlockDraft(net, target)
    def draft(ctx, rng):
        tree = drafter(ctx, rng)
        q = rows(tree)
        for i in range(1, len(tree)):
            if tree.depth[i] % 2 == 0: tree.law[i] = q[tree.parent[i]]
        return tree
    return draft

@faithful("Falcon", plain={"rows of a sequential drafter stated": drafted(as_if_sequential)})
@pytest.mark.parametrize("way", WAYS)
def test_other_verifiers(way, subject):
    """Block and traversal verification of a sampled block: three tokens of a vocabulary of two have the
    target's distribution to 1e-12"""
    (net, target), (shape, verify) = small(2), WAYS[way]
    drafter = subject.drafter(BlockDraft(net, target), shape)
    found = loop_law(target, drafter, verify, (0, 1, 1), 3)
    assert tv_outcomes(found, target_law(HFModel(target.model, check=False), (0, 1, 1), 3)) < 1e-12

def rows_of(q, k=2):
    """A table as a draft in blocks after a context of one token: a place inside a block reads the text up to
    the block, and its place"""
    def law(text):
        j = (len(text) - 1) % k
        return q.law((*text[:len(text) - j], *[0]*j))
    return TableModel(q.V, law)

@proves("thm-in-blocks")
@examples(6, seeds)
def test_tables_of_fractions(seed):
    """Distributions that do not read their own block, as tables: true edges, and one round and its
    continuation have the target's distribution exactly"""
    p, rows = random_table(3, 2*seed), rows_of(random_table(3, 2*seed + 1))
    likeliest = StaticTree(UnwarpedModel(rows), block_tree((2, 1), 2), likeliest_points)
    for drafter in (Chain(rows, 3), StaticTree(rows, block_tree((2,), 2)), likeliest):
        drafter_contract(drafter, (0,))
        verifier_contract(p, drafter, reject, (0,), 2)

def test_a_misstated_conditional():
    "The second place stated as conditional on the first: the drafter contract fails and the output is off"
    p, q = random_table(3, 4, zeros=False), random_table(3, 9, zeros=False)
    def conditional(ctx, rng):
        tree, rows = Tree(ctx), rows_of(q)
        tree.add(0, rng.pick(rows.law(ctx), at=1), rows.law(ctx))
        y = rng.pick(rows.law(tree.text(1)), at=2)
        if q.law(tree.text(1))[y] > 0: tree.add(1, y, q.law(tree.text(1)))
        return tree
    with pytest.raises(AssertionError, match="stated"): drafter_contract(conditional, (0,))
    pairs = law_of(lambda rng: tuple(generate(p, conditional, reject, (0,), 2, rng)))
    assert tv_outcomes(pairs, target_law(p, (0,), 2)) > Fraction(1, 100)
