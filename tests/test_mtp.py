"Chapter 31b: several tokens at once, by heads on a trunk and along a chain of modules; gradients, rows, laws, mutants"
import json
from functools import cache, partial
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from helpers import faithful, proves, refuses
from specref.train.branching import branch_texts, branching, chain_tokens
from specref.core.rng import Seeded, tv_outcomes
from specref.train.features import FeatureDraft
from specref.core.law import overlap
from specref.core.loop import generate, loop_law, autoregressive, rounds
from specref.train.medusa import HeadMarginals
from specref.models.embedded import DATA, DOMAINS, raw_model, prompts, sample_texts
from specref.train.mtp import ModuleChainDraft, DeepSeek, Gloeckle, RecursiveMTP, SelfDraft, first_head_loss, backward_in_turn, shifted_loss, released_weights, load_released, trunk
from specref.verify.reject import Chain, reject
from specref.draft.shapes import DynamicTree, ParallelHeadTree
from specref.verify.siblings import Branching
from specref.core.target import target_law
from specref.train.harness import TargetModel, StateDataset, load_checkpoint, evaluate, save_network
from specref.models.recipe import optimiser
from specref.models.transformer import HFModel, RowTrie
from specref.core.tree import Tree

torch.set_num_threads(1)
V, WIDTH = 61, 32


def tiny(seed, V=V, layers=2, scale=.3, tied=False):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=WIDTH, intermediate_size=2*WIDTH, num_hidden_layers=layers, num_attention_heads=4,
                                        num_key_value_heads=2, max_position_embeddings=512, initializer_range=scale, tie_word_embeddings=tied,
                                        bos_token_id=None, eos_token_id=None, pad_token_id=None)).double()


def shaken(net, seed=0, by=.3):
    "A net whose weights are not those it began with"
    torch.manual_seed(seed)
    with torch.no_grad(): [w.add_(by * torch.randn_like(w)) for w in net.parameters()]
    return net


def lesson(model, x):
    "Lessons in the model's own precision"
    with torch.no_grad(): hidden = model(input_ids=x, output_hidden_states=True, use_cache=False).hidden_states
    return StateDataset(x, dict(enumerate(hidden)))


def text(rows=2, T=24, V=V, seed=0): return torch.randint(V, (rows, T), generator=torch.Generator().manual_seed(seed))


# The backward pass

def at_once(z, losses): sum(loss_of(z) for loss_of in losses).backward()


def gradients(model, net, x, way):
    "The gradient of every weight after one backward pass of some kind"
    model.requires_grad_(True)
    for w in (*model.parameters(), *net.parameters()): w.grad = None
    way(trunk(model)(input_ids=x, use_cache=False).last_hidden_state, [partial(first_head_loss, model, x), *net.losses(x)])
    return [w.grad for w in (*model.parameters(), *net.parameters())]


class Box:
    def __init__(self, x): self.x = x


def kept_alive(f):
    "The most tensors of V columns, larger than the head, that autograd held at once while f ran"
    boxes, most = {}, [0]
    def pack(x):
        if x.shape[-1:] != (V,) or x.numel() <= V*WIDTH: return x
        boxes.setdefault(x.untyped_storage().data_ptr(), WeakSet()).add(box := Box(x))
        most[0] = max(most[0], sum(map(bool, boxes.values())))
        return box
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.x if isinstance(x, Box) else x): f()
    return most[0]


@faithful("multi-token prediction")
@proves("thm-in-turn")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_in_turn_leaves_the_gradient_of_the_sum(tied, n):
    "Every weight of trunk and heads, to 1e-12 in double and 1e-6 in single precision; one tensor of logits is kept, not n"
    model = tiny(0, tied=tied); net = shaken(Gloeckle(TargetModel(model), n)); x = text()
    a, b = gradients(model, net, x, at_once), gradients(model, net, x, backward_in_turn)
    assert all(g is not None for g in a + b) and max(abs(u - v).max() for u, v in zip(a, b)) < 1e-12 < max(abs(u).max() for u in a)
    assert kept_alive(lambda: gradients(model, net, x, at_once)) == n and kept_alive(lambda: gradients(model, net, x, backward_in_turn)) == 1
    a, b = gradients(model.float(), net.float(), x, at_once), gradients(model, net, x, backward_in_turn)
    assert max((abs(u - v).max() / abs(u).max().clamp(min=1)).item() for u, v in zip(a, b)) < 1e-6


def test_in_turn_says_the_sum_of_the_losses():
    model = tiny(0); net = shaken(Gloeckle(TargetModel(model))); x = text(); said = []
    gradients(model, net, x, lambda z, losses: said.extend([backward_in_turn(z, losses), sum(f(z) for f in losses)]))
    assert abs(said[0] - said[1]) < 1e-12 and not said[0].requires_grad


@faithful("multi-token prediction")
def test_the_copied_listing_fails():
    "`d.requires_grad = False` and `z.backward()`: d gathers nothing, the call raises, the trunk has no gradient; sent as 1 it is another gradient"
    model = tiny(0); net = shaken(Gloeckle(TargetModel(model))); x = text()
    def copied(z, losses):
        d = z.detach(); d.requires_grad = False
        for loss_of in losses: loss_of(d).backward()
        assert d.grad is None
        with pytest.raises(RuntimeError, match="scalar"): z.backward()
        with pytest.raises(RuntimeError, match="scalar"): z.backward(gradient=d.grad)
    below = trunk(model)
    g = gradients(model, net, x, copied)
    assert all(w.grad is None for w in below.parameters()) and any(u is not None for u in g)
    def ones(z, losses):
        for loss_of in losses: loss_of(z.detach()).backward()
        z.backward(gradient=torch.ones_like(z))
    a, b = gradients(model, net, x, backward_in_turn)[0], gradients(model, net, x, ones)[0]
    assert abs(a - b).max() > 1e-3


def test_the_trunk_is_the_model_less_its_last_layer():
    model = tiny(0); x = text()
    z = trunk(model)(input_ids=x, use_cache=False).last_hidden_state
    assert torch.equal(z, model(input_ids=x, output_hidden_states=True, use_cache=False).hidden_states[1])
    assert abs(first_head_loss(model, x, z) - shifted_loss(model(input_ids=x, use_cache=False).logits, x, 1)) < 1e-12
    assert {id(w) for w in trunk(model).parameters()} < {id(w) for w in model.parameters()}
    assert len(model.model.layers) == 2 and not isinstance(model.model.norm, nn.Identity)


@faithful("multi-token prediction")
def test_untaught_heads_say_what_the_target_says():
    "Bit for bit where the arithmetic is the same, on the embedded target and on a grouped one; each head is a whole layer, norm and head are the target's"
    for model in (tiny(0), raw_model("target", torch.float64)):
        base = TargetModel(model); net = Gloeckle(base); x = text(V=base.V)
        for z in net.guesses(lesson(model, x), 3): assert abs(z - model(input_ids=x, use_cache=False).logits).max() < 1e-10
        per = sum(w.numel() for w in model.base_model.layers[-1].parameters())
        assert sum(w.numel() for w in net.parameters()) == 3*per and net.body[0].norm.weight.data_ptr() == model.base_model.norm.weight.data_ptr()


# Rows

KINDS = {"heads": (lambda b: Gloeckle(b), SelfDraft, 3), "one module": (lambda b: DeepSeek(b, 1), ModuleChainDraft, 1), "two modules": (lambda b: DeepSeek(b, 2), ModuleChainDraft, 2),
         "three modules": (lambda b: DeepSeek(b, 3), ModuleChainDraft, 3), "one again": (lambda b: RecursiveMTP(b), FeatureDraft, 4)}


def off(make, kind, depth, calls=30, seed=0, change=None):
    "The largest deviation of the answers, after a wild history, from those of a fresh cache, and along the true text from the guesses of training"
    model = tiny(0); net = shaken(make(TargetModel(model)).double()); x, rng = text(), np.random.default_rng(seed)
    target = HFModel(model, keep=(1, 2), check=False); drafter, guesses, fresh, taught = kind(net, target), net.guesses(lesson(model, x), depth), 0., 0.
    if change: change(drafter)
    for _ in range(calls):
        row, c = int(rng.integers(2)), int(rng.integers(2, 20))
        tree, path = Tree(x[row, :c].tolist()), [0]
        for j in range(depth):
            for _ in range(rng.integers(3)): tree.add(int(rng.choice(path)), int(rng.integers(V)))
            path.append(tree.add(path[-1], int(x[row, c+j])))
        with torch.inference_mode(): said, alone = drafter.answers(tree), kind(net, HFModel(model, keep=(1, 2), check=False)).answers(tree)
        fresh = max(fresh, *(abs(a.logits - b.logits).max().item() for a, b in zip(said, alone)))
        taught = max(taught, *(abs(said[path[j]].logits - guesses[j][row, c-2]).max().item() for j in range(depth)))
    deep = Tree(x[0, :4].tolist())
    for j in range(depth): deep.add(j, 1)
    assert kind is FeatureDraft or (drafter.answers(deep)[depth].logits == 0).all()
    return fresh, taught


@proves("prop-own-rows", "thm-chain-rows")
@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_a_fresh_cache_and_of_training(name):
    "After any history, with siblings, to 1e-10; beyond the last head or module the law is uniform"
    assert max(off(*KINDS[name])) < 1e-10


class Unmarked(RowTrie):
    "A trie that takes a drafted row for a true one"
    def turn(self, tree, asked=True):
        plain = Tree(tree.ctx)
        for u, x in zip(tree.parent[1:], tree.token[1:]): plain.add(u, x % V)
        return super().turn(plain, asked)


def test_stale_rows_are_caught():
    "A drafter that keeps its guessed rows after they were accepted is no longer the fresh one"
    for name in ("two modules", "three modules", "one again"):
        assert off(*KINDS[name], change=lambda d: setattr(d, "trie", Unmarked()))[0] > 1e-4


def test_rows_that_do_not_exist_are_caught():
    "A chain whose rows see those that hold no state is not the chain of training"
    class Sees(ModuleChainDraft):
        def sees(self, start, end, layer): return FeatureDraft.sees(self, start, end, layer)
    assert off(KINDS["three modules"][0], Sees, 3)[1] > 1e-4


@proves("thm-chain-rows")
def test_the_chain_runs_a_module_once_on_a_token():
    "A context of c tokens and a chain of D drafts: D layers for each row of the context, D - j for the draft at depth j"
    model = tiny(0); D, c = 3, 9
    drafter = ModuleChainDraft(DeepSeek(TargetModel(model), D), HFModel(model, keep=(2,), check=False))
    next(rounds(drafter.target, Chain(drafter, D), reject, text()[0, :c].tolist(), Seeded(0)))
    assert drafter.meter.layer_tokens == D*(c - 1) + sum(D - j for j in range(1, D)) and drafter.meter.tokens == c - 1 + D - 1


# What a guess may know, and what is shared

@faithful("DeepSeek MTP")
def test_module_k_knows_the_text_to_its_own_token():
    "The guess of module k at i notices x_(i+k) and nothing behind it; Gloeckle's heads at t notice no token behind t"
    model = tiny(0); base, x = TargetModel(model), text(1)
    for net, sees in (shaken(DeepSeek(base, 3)), 1), (shaken(Gloeckle(base)), 0):
        old = net.guesses(lesson(model, x), 3)
        for place in range(4, 12):
            y = x.clone(); y[0, place] = (y[0, place] + 1) % V
            for k, (a, b) in enumerate(zip(old, net.guesses(lesson(model, y), 3)), 1):
                moved = abs(a - b).amax(-1)[0] > 1e-9
                last = place - k*sees   # the first place i with place <= i + k
                assert not moved[:last].any() and moved[last]


@faithful("DeepSeek MTP")
def test_embedding_and_head_are_the_targets_and_the_trunk_learns():
    "The same storage, no weight of the modules; with live states every weight of the model has a gradient, the embedding one from the modules too"
    model = tiny(0); base, x = TargetModel(model), text(); net = DeepSeek(base, 2); model.requires_grad_(True)
    for module in net.chain:
        assert module.base[0].embed.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert module.base[0].head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert not {w.data_ptr() for w in net.parameters()} & {w.data_ptr() for w in model.parameters()}
    assert all(m.proj.weight.shape == (WIDTH, 2*WIDTH) for m in net.chain)
    out = model(input_ids=x, output_hidden_states=True, use_cache=False)
    net.loss(StateDataset(x, {2: out.hidden_states[-1]}), 0).backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in (*model.parameters(), *net.parameters()))
    assert RecursiveMTP(base).layers == 1 and abs(sum(RecursiveMTP(base, 3).weights) - 1) < 1e-12 and [round(w, 2) for w in RecursiveMTP(base, 3).weights] == [.51, .31, .18]


def plainly(config, layer, norm, u, at):
    "What transformers' own model of one layer makes of `u`: the layer's weights, then `norm`"
    model = LlamaModel(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})).double().eval()
    model.layers[0].load_state_dict({k: w for k, w in layer.state_dict().items() if k in model.layers[0].state_dict()})
    model.norm = norm
    return model(inputs_embeds=u, position_ids=at, use_cache=False).last_hidden_state


@faithful("DeepSeek MTP")
def test_the_modules_by_hand():
    "M_k [norm of the state; norm of the embedding], a layer of transformers' own at the places of the told tokens, handed on before the norm and said after it; the second loss teaches the first module too"
    model = tiny(0); base, x = TargetModel(model), text(); net, b = shaken(DeepSeek(base, 2)), lesson(model, text())
    rms = lambda y, w: w * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    h, guesses = b.states[2], net.guesses(b, 2)
    with torch.no_grad():
        for k, m in enumerate(net.chain, 1):
            u = torch.cat([rms(h[:, :-1], m.hnorm.weight), rms(base.embed(x[:, k:]), m.enorm.weight)], -1) @ m.proj.weight.T
            h = plainly(model.config, m, nn.Identity(), u, torch.arange(k - 1, 23)[None])
            assert abs(guesses[k-1] - base.head(rms(h, m.norm.weight))).max() < 1e-4 < abs(guesses[k-1]).max()
    shifted_loss(net.guesses(b, 2)[1], x, 3).backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for name, w in net.chain[0].named_parameters() if name != "norm.weight") and net.chain[0].norm.weight.grad is None


def test_losses():
    "DeepSeek's is the mean over depths of the token after the module's own; one application is D = 1; of three the later ones weigh .6 and .36 of the first"
    model = tiny(0); base = TargetModel(model); b = lesson(model, text())
    two = shaken(DeepSeek(base, 2)); one, again = DeepSeek(base, 1), RecursiveMTP(base, 1); again.load_state_dict(one.state_dict())
    by_hand = [nn.functional.cross_entropy(z[:, i], b.x[:, i+k+1]) for k, z in enumerate(two.guesses(b, 2), 1) for i in range(24 - k - 1)]
    assert abs(two.loss(b, 0) - (sum(by_hand[:22])/22 + sum(by_hand[22:])/21)/2) < 1e-12
    assert abs(one.loss(b, 0) - again.loss(b, 0)) < 1e-12
    three = shaken(RecursiveMTP(base, 3))
    by_hand = [shifted_loss(z, b.x, k) for k, z in enumerate(three.guesses(b, 3), 2)]
    assert abs(three.loss(b, 0) - (by_hand[0] + .6*by_hand[1] + .36*by_hand[2]) / 1.96) < 1e-12 and np.ptp([z.item() for z in by_hand]) > 1e-3


# The branching source

def taught(make, steps=150):
    "A net taught on the source for a moment, and the mean tokens of a chain of three"
    model = branching(4, 3).float(); base = TargetModel(model)
    texts = lambda seed: lesson(model, torch.from_numpy(branch_texts(4, 3, 16, 32, seed=seed).astype(np.int64)))
    torch.manual_seed(0)
    net = make(base); opt = optimiser(net.train(), 1e-2, 0.)
    for step in range(steps): net.loss(texts(step), 0).backward(); opt.step(); opt.zero_grad(set_to_none=True)
    return evaluate(net, base, texts(10**6), 3)[0]


class Early(Gloeckle):
    "Mutant: every label one place too early"
    def losses(self, x): return [lambda z, j=j: shifted_loss(self.guess(j, z), x, 1 + j) for j in range(self.depth)]


class Echo(DeepSeek):
    "Mutant: a module is taught the token it was told"
    def loss(self, batch, at): return sum(shifted_loss(z, batch.x, k) for k, z in enumerate(self.guesses(batch, 3), 1))


def untold(base):
    "Mutant: modules that are not told the shifted token"
    net = DeepSeek(base, 3)
    for module in net.chain: module.enorm.weight.requires_grad_(False).zero_()
    return net


CAP = float(chain_tokens(4, 3, 3))


@faithful("multi-token prediction")
def test_heads_are_capped_on_the_branching_source():
    "Near the closed form for independent heads and not above it; with labels one place early nowhere near"
    assert CAP - .15 < taught(Gloeckle) < CAP + .05
    assert taught(Early) < CAP - 1


@faithful("DeepSeek MTP")
def test_a_chain_is_not_capped_on_the_branching_source():
    "Three modules, and one applied three times, reach gamma + 1 - .1; without the shifted token the cap is back; taught the token it is told, nothing"
    assert taught(lambda b: DeepSeek(b, 3)) > 3.9 and taught(lambda b: RecursiveMTP(b, 3)) > 3.9
    assert taught(untold) < CAP + .05 and taught(lambda b: Echo(b, 3)) < CAP - 1


# The law

def three(): return tiny(2, V=3)


def drafters(model):
    base, target = TargetModel(model), HFModel(model, keep=(1, 2), check=False)
    heads, chain, again = SelfDraft(shaken(Gloeckle(base, 3), by=.5), target), ModuleChainDraft(shaken(DeepSeek(base, 2), by=.5), target), FeatureDraft(shaken(RecursiveMTP(base), by=.5), target)
    return target, {"heads": Chain(heads, 2), "slots": ParallelHeadTree(HeadMarginals(heads, 2), 3), "chain": Chain(chain, 2), "siblings": Branching(chain, (2, 1)), "again": Chain(again, 2), "grown": DynamicTree(again, 2, 2, 3)}


@pytest.mark.parametrize("name", ["heads", "slots", "chain", "siblings", "again", "grown"])
def test_the_law_is_the_targets(name):
    "Every path of a loop, nets of random weights, through the drafter's own cache, and beyond the last head"
    target, ways = drafters(three())
    assert tv_outcomes(loop_law(target, ways[name], reject, (0, 1), 2), target_law(target, (0, 1), 2)) < 1e-12


class Table(nn.Module):
    "A tabular net: the k-th guess is a row of a table, chosen by the last token it knows"
    reads, layers = (1,), 1
    def __init__(self, rows): super().__init__(); self.rows = torch.tensor(rows, dtype=torch.float64).log()   # (depth, V, V)
    def enter(self, states): return torch.zeros(*states[1].shape[:2], 1, dtype=torch.float64)
    def step(self, f, tokens, at, attend): attend(*(torch.zeros(1, 1, f.shape[1], 2, dtype=torch.float64),)*3); return tokens[..., None].double()
    def logits(self, h): return self.rows[0][h[..., 0].long()]


@proves("prop-own-rows")
def test_tables_through_the_same_code():
    "Laws of known numbers: what the drafter states is the table's row, and the loop has the target's law; a point that claims the row breaks it"
    rows = np.random.default_rng(0).dirichlet([1, 1, 1], (2, 3))
    target = HFModel(three(), keep=(1,), check=False)
    again, heads = FeatureDraft(Table(rows), target), Table(rows)
    heads.heads = [lambda z, at, attend, k=k: torch.full((1, z.shape[1], 1), k) for k in range(2)]
    heads.logits = lambda k: heads.rows[int(k), 0]
    blind = SelfDraft(heads, target)
    tree = Tree((0, 2)); tree.add(0, 1)
    assert all(np.allclose(again(tree)[i], rows[0, x], atol=1e-14) and np.allclose(blind(tree)[i], rows[i, 0], atol=1e-14) for i, x in ((0, 2), (1, 1)))
    truth = target_law(target, (0, 1), 2)
    for q in again, blind: assert tv_outcomes(loop_law(target, Chain(q, 2), reject, (0, 1), 2), truth) < 1e-12
    def claimed(ctx, rng):
        tree = Tree(ctx); tree.add(0, int(np.argmax(q := blind(tree)[0])), q); return tree
    assert tv_outcomes(loop_law(target, claimed, reject, (0, 1), 2), truth) > 1e-2


# The released layout

def test_released_layout_there_and_back():
    "Names, shared weights and halves; a matrix whose halves were not exchanged gives other guesses"
    model = tiny(0); base, b = TargetModel(model), lesson(model, text()); net = shaken(DeepSeek(base, 2)); weights = released_weights(net)
    assert {k.split(".")[2] for k in weights} == {"2", "3"} and torch.equal(weights["model.layers.3.embed_tokens.weight"], base.embed.weight)
    theirs, h, e = weights["model.layers.2.eh_proj.weight"], torch.randn(WIDTH).double(), torch.randn(WIDTH).double()
    assert torch.allclose(theirs @ torch.cat([e, h]), net.chain[0].proj.weight @ torch.cat([h, e]), atol=1e-12)
    again = load_released(DeepSeek(base, 2), weights)
    assert all(torch.equal(u, v) for u, v in zip(net.guesses(b, 2), again.guesses(b, 2)))
    swapped = load_released(DeepSeek(base, 2), {k: w.roll(WIDTH, -1) if "eh_proj" in k else w for k, w in weights.items()})
    assert abs(net.guesses(b, 1)[0] - swapped.guesses(b, 1)[0]).max() > .1


def test_a_release_that_does_not_fit():
    model = tiny(0); net = DeepSeek(TargetModel(model)); weights = released_weights(net)
    for change in (lambda w: w.pop("model.layers.2.enorm.weight"), lambda w: w.update(other=torch.zeros(1)), lambda w: w.update({"model.layers.2.eh_proj.weight": torch.zeros(3)}),
                   lambda w: w.update({"model.layers.2.embed_tokens.weight": torch.zeros(V, WIDTH)}), lambda w: w.update({"model.layers.7.enorm.weight": torch.zeros(WIDTH)})):
        w = dict(weights); change(w)
        refuses("weights", load_released, net, w)


# At size

MADE = {"mtp": (Gloeckle, SelfDraft, 3, 3.5e6), "deepseek": (RecursiveMTP, FeatureDraft, 4, 1.8e6)}
made = pytest.mark.parametrize("name", MADE)
LEAST = {"mtp": 1.25, "deepseek": 1.95}


def shipped(name, dtype=torch.float64):
    base = TargetModel(raw_model("target", dtype))
    return base, load_checkpoint(MADE[name][0], base, DATA/"drafters"/name)


@cache
def written():
    "What the target writes from held-out prompts, and thinks of it"
    model = raw_model("target", torch.float64)
    start = torch.tensor([text for d in DOMAINS for text in prompts(d, 6, seed=5)])
    return lesson(model, sample_texts(model, start, 112, torch.Generator().manual_seed(1), half=False))


@made
def test_shipped_marks_and_size(name):
    "On texts that the target writes from held-out prompts: the tokens of a round; the checkpoint is small, and says what made it"
    base, net = shipped(name)
    assert evaluate(net, base, written(), MADE[name][2])[0] > LEAST[name]
    folder = DATA/"drafters"/name
    assert sum(f.stat().st_size for f in folder.iterdir()) < MADE[name][3]
    assert {"recipe", "data_sha256", "torch", "target"} <= json.loads((folder/"config.json").read_text()).keys()


def test_overlaps_at_size():
    "After true tokens the module beats the heads at every depth; taught with D = 1, it falls where it first meets its own state"
    heads, module = (evaluate(net, base, written(), 3)[1] for base, net in map(shipped, MADE))
    assert all(b > a + .1 for a, b in zip(heads, module)) and module[0] > module[1] + .05


@made
@pytest.mark.parametrize("domain", DOMAINS)
def test_greedy_text_is_the_targets(name, domain):
    "Temperature 0, double precision: chains, and trees of points"
    base, net = shipped(name); _, kind, depth, _ = MADE[name]
    target = HFModel(base.model, temperature=0, keep=net.reads, check=False)
    q, text = kind(net, target), prompts(domain, 1)[0]
    truth = autoregressive(target, text, 24, Seeded(0))
    for drafter in (Chain(q, depth), ParallelHeadTree(HeadMarginals(q, 3), 8) if kind is SelfDraft else DynamicTree(q, 3, 3, 8)):
        out = generate(target, drafter, reject, text, 24, Seeded(0))
        assert out == truth and len(out.ledger.rounds) < 24


@made
def test_a_chain_of_one_is_kept_with_the_overlap(name):
    "Temperature 1: the share of kept drafts is the mean of Σ min(p, q) at the same places, to five standard errors"
    base, net = shipped(name, torch.float32)
    target = HFModel(base.model, keep=net.reads, check=False)
    q = MADE[name][1](net, target)
    seen = [r for _, r in zip(range(80), rounds(target, Chain(q, 1), reject, prompts("code", 1)[0], Seeded(0)))]
    beta = np.array([overlap(np.asarray(r.p[0]), np.asarray(r.tree.law[1])) for r in seen])
    assert abs(np.mean([r.verdict.node for r in seen]) - beta.mean()) < 5 * np.sqrt((beta*(1 - beta)).sum()) / len(beta) and beta.std() > .05


# Doors

def test_doors(tmp_path):
    model = tiny(0); base = TargetModel(model)
    for bad in (1, 0, 2.5, None): refuses("n", Gloeckle, base, bad)
    for bad in (0, 1.5, None):
        refuses("D", DeepSeek, base, bad)
        refuses("steps", RecursiveMTP, base, bad)
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=WIDTH, n_layer=1, n_head=2))
    refuses("base", Gloeckle, TargetModel(gpt))
    refuses("base", trunk, gpt)
    torch.manual_seed(0)
    other = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "hidden_act": "gelu"}))   # the same names and shapes, another layer
    refuses("base", Gloeckle, TargetModel(other))
    refuses("target", SelfDraft, Gloeckle(base), HFModel(model, keep=(2,), check=False))   # the trunk's layer is 1
    refuses("target", ModuleChainDraft, DeepSeek(base), model)
    save_network(Gloeckle(base), base, tmp_path/"net", recipe={})
    assert load_checkpoint(Gloeckle, base, tmp_path/"net").depth == 3
    refuses("target", load_checkpoint, Gloeckle, TargetModel(tiny(1)), tmp_path/"net")
    refuses("folder", load_checkpoint, DeepSeek, base, tmp_path/"net")


def test_modules_serve_a_target_of_another_family():
    "A chain on a GPT-2: its own Llama layers, the target's embedding and head"
    torch.manual_seed(0)
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)).double()
    net = DeepSeek(TargetModel(gpt), 2); target = HFModel(gpt, temperature=0, keep=net.reads)
    text = (5, 2, 8)
    assert generate(target, Chain(ModuleChainDraft(net, target), 2), reject, text, 8, Seeded(0)) == autoregressive(target, text, 8, Seeded(0))
