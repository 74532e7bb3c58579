"32_eagle: EAGLE's network and its training, the published tree, and the grown tree of EAGLE-2"
import json
from functools import cache
from itertools import combinations

import numpy as np, pytest, torch
from hypothesis import given, strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from helpers import constant, examples, faithful, proves, round_tokens, seeds, tiny
from networks import batch_of, otherwise, random_texts
from published import Published, having
from specref import add_paths, DynamicTree, Enumerator, exact, HFModel, prompts, StaticTree, TableModel, Tree
from specref.core.check import read_record
from specref.core.target import UnwarpedModel
from specref.core.tree import likeliest_points, to_choices
from specref.draft.shapes import expand_pool, heaviest_nodes, top_tokens, EAGLE_TREE
from specref.models.compiled import serve_model
from specref.models.embedded import DATA, DOMAINS, raw_model
from specref.train.eagle import Eagle
from specref.train.features import FeatureDraft, causal_attention
from specref.train.harness import TargetModel
from specref.train.registry import load_network
from specref.train.synthetic import branching

FOLDER = DATA/"drafters"/"eagle"

def small(V=5, make=Eagle):
    "An untrained network on a tiny target, and a batch of random texts"
    base = TargetModel(tiny(V))
    torch.manual_seed(1)
    net = make(base)
    return net, HFModel(base.model, keep=net.reads, check=False), batch_of(base, random_texts(V, 4, 12))

def shipped(temperature=1.):
    net = load_network("eagle")
    return FeatureDraft(net, serve_model(net.base[0].model, temperature, keep=net.reads, check=False))

# The network and its training

class OwnHead(Eagle):
    def __init__(self, base):
        super().__init__(base)
        self.head = nn.Linear(base.d, base.V, bias=False)
    def logits(self, f): return self.head(f)
def normed_input(net): net.layer.input_layernorm = LlamaRMSNorm(net.base[0].d)
class WithoutResidual(Eagle):   # of the fused row
    def step(self, f, tokens, at, attend):
        u = self.fc(torch.cat([self.base[0].embed(tokens), f], -1))
        return self.layer(u, f, at, attend)

@faithful("EAGLE", part="Eagle", plain={
    "a head of its own": OwnHead, "an input norm": otherwise(Eagle, normed_input)})
def test_what_is_trained_and_what_is_shared(subject):
    "fc is (d, 2d) with a bias, one decoder layer without input norm"
    base = TargetModel(raw_model("target"))
    net, x = subject(base), torch.tensor([prompts("code", 1)[0]])
    assert net.fc.weight.shape == (base.d, 2*base.d) and net.fc.bias.shape == (base.d,)
    attention = [f"self_attn.{k}_proj" for k in "qkvo"]
    mlp = [f"mlp.{k}_proj" for k in ("gate", "up", "down")]
    own = {f"layer.{k}.weight" for k in (*attention, *mlp, "post_attention_layernorm")}
    assert set(net.state_dict()) == own | {"fc.weight", "fc.bias"}
    assert isinstance(net.layer.input_layernorm, nn.Identity)
    with torch.inference_mode(): out = base.model(input_ids=x, output_hidden_states=True)
    assert torch.equal(net.logits(net.enter(dict(enumerate(out.hidden_states)))), out.logits)

@faithful("EAGLE", part="Eagle", plain={"the feature as residual": WithoutResidual})
def test_a_feature_is_read_beside_the_next_token(subject):
    """The row of x_i reads its true feature and the embedding of x_{i+1}, and is the residual of the layer;
    it is trained on the feature of x_{i+1}"""
    net, _, batch = small(make=subject)
    base, f = net.base[0], batch.states[net.reads[0]]
    at = torch.arange(11).expand(4, -1)
    u = torch.cat([base.embed(batch.x[:, 1:]), f[:, :-1]], -1) @ net.fc.weight.T + net.fc.bias
    with torch.no_grad(): out = net.layer(u, u, at, causal_attention)
    assert torch.allclose(net.guesses(batch, 1)[0], base.head(out), atol=1e-10)
    net.noise = 0
    assert abs(net.loss(batch, 0.) - net.feature_loss(out, f[:, 1:])) < 1e-10

def test_embedding_first():
    "The first half of fc reads the next token, the second the feature; at first both have the same scale"
    base = TargetModel(raw_model("target"))
    net, d = Eagle(base), base.d
    x, f, at = torch.tensor([[5, 7]]), torch.randn(1, 2, d), torch.arange(2)[None]
    with torch.no_grad():
        halves = (base.embed.weight, net.fc.weight[:, :d]), (torch.randn(512, d), net.fc.weight[:, d:])
        token, feature = [(h @ w.T).square().mean() for h, w in halves]
        assert .5 < token / feature < 2
        net.fc.weight[:, d:] = 0
        step = lambda f, x: net.step(f, x, at, causal_attention)
        assert torch.equal(step(f, x), step(-f, x)) and not torch.equal(step(f, x), step(f, x + 1))

def test_the_product_is_zero_on_the_source():
    """The elementwise product of token and feature is zero wherever they differ, so it carries no branch; nor
    does its shape fit"""
    base = TargetModel(branching(4, 3))
    with torch.inference_mode():
        f = base.model(input_ids=torch.tensor([[2, 3]]), output_hidden_states=True).hidden_states[-1][0, 1]
    assert all(abs(base.embed(torch.tensor(b*4)) * f).max() < 1e-6 for b in range(4))
    with pytest.raises(RuntimeError): Eagle(base).fc(base.embed(torch.tensor(0)) * f)

def test_noise_is_added_to_inputs_alone():
    "Uniform noise within ±.1 is added to the features that are read, not to those that are trained on"
    net, _, batch = small()
    seen, f, missed = [], batch.states[net.reads[0]], net.feature_loss
    net.step = lambda f, x, at, attend: seen.append(f) or f
    net.feature_loss = lambda out, true, counts: seen.append(true) or missed(out, true)
    for at in (0., .99): net.loss(batch, at)
    off = seen[0] - f[:, :-1]
    assert len(seen) == 4 and torch.equal(seen[1], f[:, 1:]) and not torch.equal(seen[0], seen[2])
    assert off.abs().max() <= .1 and abs(off.abs().mean() - .05) < .005 and abs(off.mean()) < .01

@proves("prop-agree")
@examples(10, seeds)
def test_both_loss_terms_have_one_minimum(seed):
    "At the true feature the loss is a tenth of the entropy and its gradient is zero"
    net, _, _ = small()
    true = torch.randn(1, 4, net.base[0].d, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(seed))
    out, p = true.clone().requires_grad_(), net.logits(true).softmax(-1)
    loss = net.feature_loss(out, true)
    loss.backward()
    assert torch.allclose(loss, -.1*(p*p.log()).sum(-1).mean(), atol=1e-12) and out.grad.abs().max() < 1e-12
    assert net.feature_loss(true + torch.randn_like(true)*.3, true) > loss

@proves("prop-told")
def test_the_mean_feature_by_hand():
    "Two branches: the best prediction of the feature without the token is the mean, its error the variance"
    base = TargetModel(branching(2, 2))
    x = torch.tensor([[2, 0], [2, 3]])
    with torch.inference_mode():
        f = base.model(input_ids=x, output_hidden_states=True).hidden_states[-1][:, 1]
    mean = f.mean(0)
    q, p = (base.head(s).softmax(-1) for s in (mean, f))
    assert torch.allclose(q[[1, 4]], torch.tensor([.5, .5], dtype=q.dtype), atol=.02)
    assert abs(sum(torch.minimum(row, q).sum() for row in p)/2 - .5) < .02
    variance = (f - mean).square().sum(-1).mean()
    for g in (f[0], f[1], 0*mean, mean + torch.randn_like(mean)):
        assert (f - g).square().sum(-1).mean() > variance + 1e-6

# The trees

def ranks(model, tree):
    "The paths of a tree as ranks of the draft's choices"
    q, known = model(tree), {0: ()}
    for i in range(1, len(tree)):
        u = tree.parent[i]
        known[i] = (*known[u], top_tokens(q[u], 512).index(tree.token[i]))
    return frozenset(known.values())

def certainty(model, tree):
    "The draft's probability of its likeliest path of two tokens"
    q = model(tree)
    return max(q[u][tree.token[c]] * q[0][tree.token[u]] for u in tree.children(0) for c in tree.children(u))

class ByToken(DynamicTree):
    "Ranked by the probability of the last token, not of the path"
    def __call__(self, ctx, rng):
        pool = {}
        for layer in expand_pool(self.model, ctx, self.width, self.depth): pool.update(layer)
        own = sorted(pool, key=lambda path: -pool[path] / pool.get(path[:-1], 1))
        return add_paths(Tree(ctx), own[:self.n], self.model.V, rng)
class ByLayer(DynamicTree):
    "Filled layer by layer"
    def __call__(self, ctx, rng):
        *_, pool = expand_pool(self.model, ctx, self.width, self.depth)
        return add_paths(Tree(ctx), [*pool][:self.n], self.model.V, rng)

def texts(): return [t for domain in DOMAINS for t in prompts(domain, 5)]

@faithful("EAGLE", plain={"a tree for each text": "EAGLE-2"})
def test_one_static_tree(subject):
    "By ranks one tree for all texts"
    draft, static = shipped(0), frozenset(map(tuple, [(), *to_choices(EAGLE_TREE)]))
    drafter = subject(draft, temperature=0).drafter
    for text in texts(): assert ranks(UnwarpedModel(draft), drafter(text, Enumerator())) == static

@faithful("EAGLE-2", plain={"one tree for all texts": "EAGLE",
                            "the warped rows": having(model=lambda unwarped: unwarped.model)})
def test_a_dynamic_tree_for_each_text(subject):
    "The tree varies, deeper where the draft is confident, and is the same at every temperature"
    cold, hot = shipped(0), shipped()
    draft, dynamic, depth = UnwarpedModel(cold), set(), {}
    for text in texts():
        tree, same = (subject(q, temperature=0).drafter(text, Enumerator()) for q in (cold, hot))
        assert len(tree) == 26 and tree.key() == same.key()
        dynamic.add(ranks(draft, tree))
        depth[certainty(draft, tree)] = np.mean(tree.depth)
    sure = sorted(depth)
    assert len(dynamic) > 8
    assert np.mean([depth[c] for c in sure[-4:]]) > np.mean([depth[c] for c in sure[:4]]) + .5

def test_the_published_tree():
    "Twenty-five nodes in five levels, 4, 8, 8, 3 and 2 of them"
    paths = [tuple(p) for p in to_choices(EAGLE_TREE)]
    assert len(paths) == 25 and [sum(len(p) == k for p in paths) for k in range(1, 6)] == [4, 8, 8, 3, 2]
    assert all(p[:-1] in paths or len(p) == 1 for p in paths)
    assert all((*p[:-1], r) in paths for p in paths for r in range(p[-1]))

def planned_as_large(model, width, depth, n): return StaticTree(model, EAGLE_TREE[:n+1], likeliest_points)

@faithful("EAGLE-2", part="DynamicTree", plain={
    "a static tree": planned_as_large, "the last token's probability": ByToken, "layer by layer": ByLayer})
@pytest.mark.parametrize("domain", DOMAINS)
def test_the_heaviest_of_the_pool(domain, subject):
    """On real texts: the nodes are connected, and no connected choice of as many from the pool weighs more
    (all are enumerated)"""
    draft = UnwarpedModel(shipped())
    connected = lambda some: all(p[:-1] in some or len(p) == 1 for p in some)
    for text in prompts(domain, 2):
        *_, pool = (dict(p) for p in expand_pool(draft, text, 2, 3))
        for n in (3, 5):
            tree = subject(draft, 2, 3, n)(text, Enumerator())
            mine = {tree.path(i) for i in range(1, len(tree))}
            best = max(sum(pool[p] for p in some) for some in combinations(pool, n) if connected(some))
            assert len(mine) == n and connected(mine)
            assert abs(sum(pool.get(p, 0) for p in mine) - best) < 1e-12

@proves("prop-grown")
@examples(15, seeds, st.integers(1, 5))
def test_a_draft_equal_to_the_target(seed, n):
    """Where the draft is the target: EAGLE-2's weights sum to the mean number of accepted tokens, and no
    static tree has a larger one"""
    p = TableModel(3, lambda text: exact(*np.random.default_rng([seed, *text]).integers(1, 9, 3)))
    def mean(drafter): return round_tokens(p, drafter).mean()
    *_, pool = (dict(layer) for layer in expand_pool(UnwarpedModel(p), (0,), n, n))
    best = mean(DynamicTree(UnwarpedModel(p), n, n, n, exact=True))
    assert best == 1 + sum(pool[path] for path in heaviest_nodes(pool, n))
    for parent in {(-1, *[0]*min(n, 3)), (-1, *range(n)), (-1, 0, 0, 1, 1, 2)[:n+1]}:
        assert mean(StaticTree(UnwarpedModel(p), parent, likeliest_points)) <= best

@given(st.lists(st.integers(0, 5), min_size=2, max_size=6).filter(any))
def test_likeliest(w):
    "Every token that has weight once, likeliest first, the lower id among equals; fractions stay fractions"
    tree = Tree((0,))
    tree.grow(0, likeliest_points(exact(*w)), Enumerator(), 9)
    assert tree.token[1:] == sorted((x for x in range(len(w)) if w[x]), key=lambda x: -w[x])
    assert all(tree.law[c][tree.token[c]] == 1 for c in tree.children(0))
    assert likeliest_points(exact(*w))(()).dtype == object
    assert likeliest_points(np.array(w)/sum(w))(()).dtype == float

def test_unwarped():
    "At temperature 0 a row is a point mass, its raw weights the whole distribution; a table's are its rows"
    draft, text = shipped(0), Tree(prompts("english", 1)[0])
    raw = UnwarpedModel(draft)
    assert max(draft(text)[0]) == 1 > max(raw(text)[0]) and np.allclose(raw(text)[0], shipped()(text)[0])
    assert raw.meter is draft.meter and raw.V == 512
    assert tuple(UnwarpedModel(constant(1, 3))(Tree((0,)))[0]) == tuple(exact(1, 3))

# The shipped drafter

def test_the_figures_of_the_card():
    "The overlaps fall little from depth to depth, in training with noise and without"
    card = json.loads((FOLDER/"config.json").read_text())
    noise = read_record("noise")["runs"]
    assert card["overlaps"][0] > .5 and card["overlaps"][0] - card["overlaps"][3] < .06
    assert noise["0"]["recipe"] == noise["0.1"]["recipe"] | dict(name="eagle-0")
    assert np.allclose(noise["0.1"]["overlaps"], noise["0"]["overlaps"], atol=.02)

@cache
def mean_tokens(system):  # -> (texts,)
    "The expected tokens of a round after held-out prompts, given the tree of points and the target's rows"
    draft, means = shipped(), []
    drafter = system(draft, temperature=0).drafter
    for text in (t for domain in DOMAINS for t in prompts(domain, 24, seed=5)):
        tree = drafter(text, Enumerator())
        p, reached = draft.target(tree), [1.]
        for u, x in zip(tree.parent[1:], tree.token[1:]): reached.append(reached[u] * p[u][x])
        means.append(sum(reached))
    return np.array(means)

@faithful("EAGLE-2", plain={
    "the static tree": "EAGLE", "one level": having(depth=lambda levels: 1, width=lambda few: 25)})
def test_the_grown_tree_is_accepted_longer(subject):
    """Twenty-five nodes each, expectations given the tree, paired over 48 held-out prompts: EAGLE-2 emits
    more a round, by three standard errors"""
    gain = mean_tokens(subject) - mean_tokens(Published("EAGLE"))
    assert np.mean(gain) > 3*np.std(gain, ddof=1)/len(gain)**.5 > 0

@cache
def held_out_states():
    base = TargetModel(raw_model("target"))
    return base, batch_of(base, [p for d in DOMAINS for p in prompts(d, 24, length=96, seed=9)])

def sharper(scale):
    "A network with its logits times `scale`"
    def change(net):
        logits = net.logits
        net.logits = lambda f: scale * logits(f)
        return net
    return change

@faithful("EAGLE-2", plain={
    "untrained": lambda net: Eagle(net.base[0]), "logits a quarter larger": sharper(1.25),
    "logits a fifth smaller": sharper(.8)})
def test_confidence_is_acceptance(subject):
    """Point masses of the shipped drafter after true tokens, binned by its confidence: the mean acceptance
    probability is within .08 of the confidence (logits a quarter larger: .16 off)"""
    base, batch = held_out_states()
    with torch.no_grad():
        q = subject.shipped().guesses(batch, 1)[0][:, :-1].softmax(-1)
        p = base.head(batch.states[base.layers][:, 1:-1]).softmax(-1)
    stated, y = q.max(-1)
    accepted = p.gather(-1, y[..., None])[..., 0]
    bins = [(stated >= a) & (stated < b) for a, b in ((0, .2), (.2, .4), (.4, .6), (.6, .8), (.8, 1.01))]
    assert min(b.sum() for b in bins) > 300
    shares = [accepted[b].mean().item() for b in bins]
    assert shares == sorted(shares)
    assert max(abs(accepted[b].mean() - stated[b].mean()).item() for b in bins) < .08
