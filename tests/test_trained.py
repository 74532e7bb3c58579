"The contract of every trained drafter, for each network of the table; wrong variants are detected"
import json
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import exp

import numpy as np, pytest, torch
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import at_once, examples, faithful, proves, refuses, tiny
from networks import batch_of, random_texts, states_of
from published import Published, drafted, verified
from specref import (autoregressive, Chain, HFModel, law_of, loop_law, prompts, Seeded, target_law, Tree,
                     tv_outcomes, typical)
from specref.core.tree import edge_laws
from specref.models.embedded import DOMAINS, raw_model, sample_texts
from specref.models.recipe import llama
from specref.models.transformer import RowTrie
from specref.train.diffusion import DFlash, DFlash2, DiffusionDraft, DSpark, SparkDraft
from specref.train.eagle import Eagle
from specref.train.eagle3 import Eagle3, Hass
from specref.train.falcon import BlockDraft, Falcon, relaxed_causal_mask
from specref.train.features import FeatureDraft, UnrolledAttention, causal_attention, unroll
from specref.train.harness import (StateDataset, TargetModel, evaluate, load_checkpoint, read_card,
                                   save_network, state_dataset, tokens_a_round, train_network)
from specref.train.hydra import Hydra, HydraPlus, MLPSpeculator, PathDraft, PrefixDraft
from specref.train.masks import PassDraft, few_texts, group_labels, label_loss, random_cuts
from specref.train.medusa import Medusa, MedusaDraft, medusa_loss
from specref.train.mtp import DeepSeek, ModuleChainDraft, RecursiveMTP, SelfDraft, shifted_loss
from specref.train.registry import RECIPES, SHIPPED_DRAFTERS, TRAINED, load_network, shipped_trainings
from specref.train.space import redraw
from specref.train.spire import ABLATIONS, OwnMemory, Spire
from specref.train.synthetic import branch_texts, branching, chain_tokens, overlap_at

V = 7

# The losses of the papers, place by place; `off` moves every label that many places

def nats(z): return -z.log_softmax(-1)

def mean_of(batch, j, term):
    "The mean of `term(n, t)` over the places t of every text n that have another token j places on"
    return torch.stack([term(n, t) for n in range(len(batch.x)) for t in range(batch.x.shape[1] - j)]).mean()

def token_terms(*weights):
    "Depth j at place t is trained on the token x_{t+2+j}"
    def loss(net, batch, off=0):
        z, y = net.guesses(batch, len(weights)), batch.x.roll(-off, 1)
        def term(j): return mean_of(batch, 2 + j, lambda n, t: nats(z[j][n, t])[y[n, t+2+j]])
        return sum(w * term(j) for j, w in enumerate(weights))
    return loss

def law_terms(net, batch, off=0):
    "Hydra++: depth j at place t is trained on the target's distribution after x_{t+1+j}"
    z, p = net.guesses(batch, 3), laws_of(net, batch).roll(-off, 1)
    return sum(mean_of(batch, 1 + j, lambda n, t: (p[n, t+1+j] * nats(z[j][n, t])).sum()) for j in range(3))

def laws_of(net, batch): return net.base[0].head(batch.states[net.base[0].layers]).softmax(-1)

def joint_terms(net, batch, off=0):
    "Medusa-2: KL(original, changed) and a fifth of the heads' loss, on the changed states"
    changed = StateDataset(batch.x, {net.reads[0]: net.adapter.states(batch.x)})
    p, q = laws_of(net, batch), laws_of(net, changed)
    return (p * (p.log() - q.log())).sum(-1).mean() + .2 * token_terms(.8, .64, .512)(net, changed, off)

def smooth(e): return torch.where(e < 1, e**2/2, e - .5).mean()   # of an absolute error

def feature_terms(steps, k=0):
    "EAGLE, HASS: step s at place t: the feature of x_{t+1+s}, its distribution, and the `k` likeliest tokens"
    def loss(net, batch, off=0):
        outs = unroll(net, batch, steps)
        f, p = batch.states[net.reads[0]].roll(-off, 1), laws_of(net, batch).roll(-off, 1)
        def term(s, n, t):
            r, z = p[n, t+1+s], nats(net.logits(outs[s][n, t]))
            best = r.topk(k).indices
            return smooth((outs[s][n, t] - f[n, t+1+s]).abs()) + .1*(r*z).sum() + (r*z)[best].sum()
        return sum(mean_of(batch, 1 + s, lambda n, t: term(s, n, t)) for s in range(steps))
    return loss

def own_features(net, batch, steps): return unroll(net, batch, steps)

def short_terms(net, batch, off=0, fade=.8, masked=True, renormalised=True, outputs=own_features):
    "EAGLE-3: the target row on the draft vocabulary, if its likeliest token is in it; step s has weight .8^s"
    outs, p, ids = outputs(net, batch, 4), laws_of(net, batch).roll(-off, 1), net.ids.tolist()
    def term(s, n, t):
        r, z = p[n, t+1+s], nats(net.logits(outs[s][n, t])[ids])
        mass = r[ids].sum() if renormalised else 1
        counts = not masked or int(r.argmax()) in ids
        return counts * (r[ids] * z).sum() / mass
    return sum(fade**s * mean_of(batch, 1 + s, lambda n, t: term(s, n, t)) for s in range(4))

def fed_by_target(net, batch, steps):
    "Every step reads the target's fused feature instead of its own"
    return unroll(net, batch, steps, between=lambda f: net.enter(batch.states)[:, :-1])

WRONG_TERMS = {"no fade": dict(fade=1.), "every place": dict(masked=False),
               "not renormalised": dict(renormalised=False),
               "the target's features": dict(outputs=fed_by_target)}

def block_terms(net, batch, off=0):
    "Falcon: row t: the feature of place t + 2, .09 KL to its row at temperature .95, .01 of the token after"
    m, f, x = (batch.x.shape[1] - 3)//2*2, batch.states[net.reads[0]], batch.x
    out, f, x = net.text_features(f[:, :m], x[:, 1:1+m]), f.roll(-off, 1), x.roll(-off, 1)
    def term(n, t):
        z, p = net.logits(out[n, t]), (net.logits(f[n, t+2])/.95).softmax(-1)
        kl = (p * (p.log() + nats(z/.95))).sum()
        return smooth((out[n, t] - f[n, t+2]).abs()) + .09*kl + .01*nats(z)[x[n, t+3]]
    return torch.stack([term(n, t) for n in range(len(x)) for t in range(m)]).mean()

def run_terms(net, batch, off=0, omega=.5):
    "SPIRe: half the cross-entropy minus half the overlap, along runs of four from place 1 + n % 4 of text n"
    z, p, T = net.guesses(batch, 4), laws_of(net, batch).roll(-off, 1), batch.x.shape[1]
    def term(n, t, j):
        q = z[j][n, t-1].softmax(-1)
        return -omega*(p[n, t+j] * q.log()).sum() - (1 - omega)*torch.minimum(p[n, t+j], q).sum()
    starts = [(n, t) for n in range(len(batch.x)) for t in range(1 + n % 4, T - 7 + n % 4, 4)]
    return torch.stack([term(n, t, j) for n, t in starts for j in range(4)]).mean()

def slot_terms(net, batch, off=0):
    "PaSS: slot j behind every place t that has all labels: the token x_{t+2+j}"
    x, L = batch.x, len(net.slots)
    cuts = torch.arange(x.shape[1] - L - 1).expand(len(x), -1)
    z, y = net.groups(x, cuts, L)[1], x.roll(-off, 1)
    places = product(range(len(x)), range(cuts.shape[1]), range(L))
    return torch.stack([nats(z[n, t, j])[y[n, t+2+j]] for n, t, j in places]).mean()

def rollout_terms(shared=None, first=0):
    "P-EAGLE, PARD, UNO without dropped rows: the mean of the terms of all rows, `first` the least depth"
    def loss(net, batch, off=0):
        z, p, x = net.guesses(batch, net.k), laws_of(net, batch).roll(-off, 1), batch.x.roll(-off, 1)
        n, length = batch.x.shape
        def term(i, t, j):   # the row of depth j after x_{t+1}
            return shared(net, nats(z[j][i, t]), p[i, t+1+j], x[i, t+2+j])
        ends = [length - 2, *[length - 1 - net.k - (1 - net.first)] * (net.k - 1)]
        return torch.stack([term(i, t, j) for i in range(n) for j in range(first, net.k)
                            for t in range(ends[j])]).mean()
    return loss

def draft_terms(net, z, p, x):
    ids = net.ids
    r = p[ids] / p[ids].sum()
    return (r * z[ids]).sum() * (int(p.argmax()) in ids.tolist())

def peagle(make, base):
    ids = torch.tensor([x for x in range(base.V) if x % 4 != 1])
    reads = (1, 2, 3) if base.layers > 2 else (0, 1, 1)
    return make(base, 3, r=1., draft=len(ids), reads=reads).set_draft_vocab(ids)

def text_terms(net, batch, off=0):
    "PARD without dropped rows: row i of depth j is trained on x_{i+1+j}"
    z, length = net.rows(batch, *net.all_rows(batch.x)).chunk(net.k, 1), batch.x.shape[1]
    x = batch.x.roll(-off, 1)
    ends = [length - 1, *[length - 1 - net.k] * (net.k - 1)]
    return torch.stack([nats(z[j][n, i])[x[n, i+1+j]] for n in range(len(x)) for j in range(net.k)
                        for i in range(ends[j])]).mean()

def noise_terms(net, batch, off=0):
    "UNO: the mask j places after x_i is trained on the target's distribution after x_{i+j}"
    p, (n, length) = laws_of(net, batch).roll(-off, 1), batch.x.shape
    anchor, depth = (y[:, length:] for y in net.all_rows(batch.x))
    z = net.mask_logits(batch.x, anchor, depth)[1].chunk(net.k - 1, 1)
    return torch.stack([(p[m, i+j] * nats(z[j-1][m, i])).sum() for m in range(n) for j in range(1, net.k)
                        for i in range(length - 1 - net.k)]).mean()

def block_slot_terms(term):
    "The slots behind every anchor, the k-th with the weight exp(-k/4), on the row after the token before it"
    def loss(net, batch, off=0):
        x, D, M = batch.x, net.depth, batch.x.shape[1] - 1 - net.depth
        h = net.slot_states(batch, torch.arange(1, M + 1).expand(len(x), -1))
        p, y, w = laws_of(net, batch).roll(-off, 1), x.roll(-off, 1), [exp(-k/4) for k in range(D)]
        total = sum(w[k] * term(net, h[n, m, k], x[n, m+1+k], y[n, m+2+k], p[n, m+1+k])
                    for n in range(len(x)) for m in range(M) for k in range(D))
        return total / (len(x) * M * sum(w))
    return loss

def slot_term(net, h, read, true, p): return (p * nats(net.base[0].head(h))).sum()

def selector_term(net, h, read, true, p):
    "The unary term, and that of the candidates with the true token in place of the weakest"
    z = net.base[0].head(h)
    best = sorted(range(len(z)), key=lambda x: -z[x])[:net.top]
    if int(true) not in best: best[-1] = int(true)
    pair = net.pred.weight[read] * net.project(h)
    scores = torch.stack([z[c] + pair @ net.succ.weight[c] for c in best])
    return slot_term(net, h, read, true, p) + (p[best]/p[best].sum() * nats(scores)).sum()

def spark_term(net, h, read, true, p):
    "A tenth of the cross-entropy, nine of the total variation, and the confidence's cross-entropy"
    z = net.base[0].head(h) + net.W2.weight @ net.W1.weight[read]
    a, c = torch.minimum(p, z.softmax(-1)).sum(), net.confidence_logits(h, read)
    return .1*(p * nats(z)).sum() + .9*(1 - a) - a*c.sigmoid().log() - (1 - a)*(-c).sigmoid().log()

# The table

def nothing(*at): return range(0)
def path(t, j): return range(t + 1, t + 2 + j)
def text(t, j): return range(1, t + 2 + j)
def whole_blocks(t, j): return range(1, t + 2 + j//2*2 if t else 0)
def last(t): return range(t, t + 1)
def all_before(t): return range(t + 1)
def to_last(t, j): return range(1, t + 2)
def whole_text(t, j): return range(t + 2)
def anchor(t, j): return range(t + 1, t + 2)
def anchor_and_last(t, j): return {t + 1, t + 1 + j}

@dataclass(frozen=True)
class Case:
    "A small network of a recipe, the tokens and states that entry j at place t depends on, its loss"
    make: Callable    # recipe's network, base -> network
    depth: int        # of the trees it is tested on
    tokens: Callable  # (t, j) -> places
    states: Callable  # t -> places
    loss: Callable    # (network, batch, off) -> scalar

def eagle3(make, base, **switches):
    ids = torch.tensor([x for x in range(base.V) if x % 4 != 1])
    reads = (1, 2, 3) if base.layers > 2 else (0, 1, 1)
    return make(base, len(ids), reads=reads, **switches).set_draft_vocab(ids)

SMALL = dict(block=5, reads=(1, 2, 3))
BY_HAND = {   # what the paper reads and minimises, or another size
    "medusa": Case(lambda make, b: make(b, 3), 3, nothing, last, token_terms(.8, .64, .512)),
    "medusa2": Case(lambda make, b: make(b, 3, rank=2), 3, nothing, last, joint_terms),
    "hydra": Case(lambda make, b: make(b, 3, layers=2), 3, path, last, token_terms(1, 1, 1)),
    "hydra++": Case(lambda make, b: make(b, 3), 3, path, all_before, law_terms),
    "mlp": Case(lambda make, b: make(b, 3, inner=24, scale_input=True), 3, path, last, token_terms(1, 1, 1)),
    "mtp": Case(lambda make, b: make(b, 4), 3, nothing, all_before, token_terms(1, 1, 1)),
    "chain": Case(lambda make, b: make(b, 3), 3, text, all_before, token_terms(1/3, 1/3, 1/3)),
    "deepseek": Case(lambda make, b: make(b, 3), 4, text, all_before,
                     token_terms(1/1.96, .6/1.96, .36/1.96)),
    "eagle": Case(lambda make, b: make(b), 4, text, all_before, feature_terms(1)),
    "hass": Case(lambda make, b: make(b, k=3), 4, text, all_before, feature_terms(3, k=3)),
    "eagle3": Case(eagle3, 4, text, all_before, short_terms),
    "eagle31": Case(partial(eagle3, fc_norm=True, norm_output=True), 4, text, all_before, short_terms),
    "falcon": Case(lambda make, b: make(b), 4, whole_blocks, all_before, block_terms),
    "spire": Case(lambda make, b: make(b), 4, path, all_before, run_terms),
    "pass": Case(lambda make, b: make(b, 3, cuts=99), 4, whole_text, nothing, slot_terms),
    "peagle": Case(peagle, 3, to_last, all_before, rollout_terms(draft_terms)),
    "pard": Case(lambda make, b: make(b, 3, hidden=32, inner=48, r=1.), 3, whole_text, nothing, text_terms),
    "uno": Case(lambda make, b: make(b, 3, rank=2, anchors=99), 3, whole_text, nothing, noise_terms),
    "dflash": Case(lambda make, b: make(b, **SMALL), 4, anchor, all_before, block_slot_terms(slot_term)),
    "dflash2": Case(lambda make, b: make(b, top=3, rank=4, **SMALL), 4, anchor_and_last, all_before,
                    block_slot_terms(selector_term)),
    "dspark": Case(lambda make, b: make(b, rank=4, **SMALL | dict(block=4)), 4, anchor_and_last, all_before,
                   block_slot_terms(spark_term))}
# the published modules of DeepSeek-V3, one for each depth; the recipe has one for all
MODULES = replace(RECIPES["deepseek"], make=DeepSeek, draft_model=ModuleChainDraft)
# a recipe without a line above has what holds for every network: rows, gradient, training, checkpoint, text
CASES = {name: Case(lambda make, b: make(b), 4, *[None]*3) for name in RECIPES} | BY_HAND
cases, systems = pytest.mark.parametrize("name", CASES), pytest.mark.parametrize("system", TRAINED)

def recipe_of(name): return MODULES if name == "chain" else RECIPES[name]

ONE_EACH = {entry.recipe.name: entry.name for entry in reversed(TRAINED.entries())}   # recipe: a system

HANDED = [system for name, system in ONE_EACH.items() if name in BY_HAND]

def of_systems(plain):  # {(recipe, what it is): change} -> {(system, what it is): change}
    return {(ONE_EACH[name], what): x for (name, what), x in plain.items() if name in ONE_EACH}

def drafting_by(model): return lambda recipe: replace(recipe, draft_model=model)
def made_by(make): return lambda recipe: replace(recipe, make=lambda base, *sizes, **how: make(base))
def losing(loss):
    "A recipe whose networks have another loss"
    def change(recipe):
        def make(*sizes, **how):
            net = recipe.make(*sizes, **how)
            usual = net.loss
            def once(batch, at):
                net.loss = usual
                return loss(net, batch)
            net.loss = once
            return net
        return replace(recipe, make=make)
    return change

def same(found, want, rounding=1e-10, clear=1e-4):
    "Whether two numbers are the same; an error where the difference is neither rounding nor clear"
    off = abs(found - want)
    if not (off < rounding or off > clear): raise ValueError(f"a difference of {off}")
    return off < rounding

def network(name, base, recipe=None):
    "An untrained network in double precision, all weights perturbed"
    torch.manual_seed(1)
    net = CASES[name].make((recipe or recipe_of(name)).make, base).double().eval()
    with torch.no_grad():
        for w in net.parameters(): w.add_(.3 * torch.randn_like(w))
    return net

@cache
def target_on(size): return TargetModel(tiny(size, layers=4))

def reader(name, net, temperature=1.):
    "The target that the network drafts for"
    model = net.gated[0] if hasattr(net, "gated") else recipe_of(name).target_model(net)
    return HFModel(model, temperature, keep=net.reads, check=False)

def drafting(name, size=V, temperature=1., recipe=None):
    net = network(name, target_on(size))
    return (recipe or recipe_of(name)).draft_model(net, reader(name, net, temperature))

def random_batch(base, n=2, T=9): return batch_of(base, random_texts(base.V, n, T))

# Rows: those of a plain pass, and those of training

@torch.inference_mode()
def plain_laws(net, model, tree):  # -> (nodes, V)
    "The row of every node by plain passes, without cache, over its text and random tokens after it"
    depth, later = max(tree.depth) + 1, torch.Generator().manual_seed(len(tree))
    x = torch.randint(net.base[0].V, (len(tree), len(tree.ctx) + depth + 2), generator=later)
    for i in range(len(tree)): x[i, :len(tree.text(i))] = torch.tensor(tree.text(i))
    z = net.guesses(states_of(model, x), depth)
    return torch.stack([z[d][i, len(tree.ctx) - 2] for i, d in enumerate(tree.depth)]).softmax(-1)

@torch.inference_mode()
def rows_off(draft, tree):
    "The largest difference of the draft model's rows from those of plain passes"
    found, plain = draft(tree), plain_laws(draft.net, draft.target.model, tree).numpy()
    return max(abs(found[i] - plain[i]).max() for i in range(len(tree)))

def grown(ctx, nodes, depth):
    "A tree of (parent, token), none of its nodes at `depth` or deeper"
    tree = Tree(ctx)
    for u, x in nodes:
        if tree.depth[u % len(tree)] < depth - 1: tree.add(u % len(tree), x)
    return tree

tokens = st.integers(0, V - 1)
nodes_of = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=5)
histories = st.lists(st.tuples(st.booleans(), st.integers(2, 10), nodes_of), min_size=3, max_size=5)

@proves("thm-unroll", "prop-refreshed", "prop-own-rows", "thm-chain-rows", "thm-paths", "prop-prefix-rows",
        "thm-anywhere", "thm-in-blocks")
@cases
@examples(8, st.lists(tokens, min_size=14, max_size=14), st.integers(0, 9), tokens, histories)
def test_rows_are_those_of_a_plain_pass(name, one, place, other, history):
    """Contexts that grow, go back, or follow a text that differs in a token, and trees of any shape: every
    row is that of a plain pass over the whole text, whatever tokens come after it"""
    draft, two = drafting(name), [*one[:place], other, *one[place+1:]]
    for first, n, nodes in history:
        some = one if first else two
        tree = grown(some[:n], [(u, some[n + x]) for u, x in nodes], CASES[name].depth)
        assert rows_off(draft, tree) < 1e-10

def script(depth):
    "Trees after each of which a whole branch is accepted"
    t, step = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 2, 6, 4, 3, 1, 2, 0), depth - 1
    for n in (5, 6 + step, 7 + 2*step):
        yield grown(t[:n], [(0, t[n]), (0, 6), (1, t[n+1]), (2, 1), (3, t[n+2])], depth)
    yield Tree((*t[:4], 2, 2, 0, 5, 1))
    yield grown((*t[:4], 0, 2, 0, 5, 1), [(0, 1), (0, 3), (1, 2), (1, 4)], depth)

class Unmarked(RowTrie):
    "Wrong: uses a drafted row, whose feature is the draft's own, as a row of the target"
    def turn(self, tree, with_answers=True):
        same = Tree(tree.ctx)
        for u, x in zip(tree.parent[1:], tree.token[1:]): same.add(u, x % V)
        return super().turn(same, with_answers)

class LateState(MedusaDraft):
    "Wrong: reads the state of x_{t+1}, which the target has not computed yet"
    def states(self, ctx): return self.target.states(ctx, self.net.reads)

class GreedyPath(PathDraft):
    "Wrong: one evaluation a depth, on the path of likeliest tokens, for all nodes of that depth"
    def answers(self, tree):
        line = Tree(tree.ctx)
        for u in range(max(tree.depth)): line.add(u, int(super().answers(line)[u].logits.argmax()))
        rows = super().answers(line)
        return [rows[d] for d in tree.depth]

class UnshiftedPath(PathDraft):
    "Wrong: reads the token before x_{t+1} instead"
    def answers(self, tree):
        return super().answers(grown((*tree.ctx[:-1], tree.ctx[-2]), zip(tree.parent[1:], tree.token[1:]), 9))

class CountedPrefix(PrefixDraft):
    "Wrong: prefix rows are counted, not compared"
    def start_state(self, ctx):
        if self.trie.text and len(ctx) - 1 <= len(self.trie.text):
            return self.memory.buffer["out"][0, len(ctx) - 2].clone()
        return super().start_state(ctx)

class RowAlone(SelfDraft):
    "Wrong: a head's rows attend to themselves alone"
    def attention_mask(self, start, end, layer): return np.eye(end - start, end, start, dtype=bool)

class EveryRow(ModuleChainDraft):
    "Wrong: a module's rows attend to rows without a state of it"
    def attention_mask(self, start, end, layer): return FeatureDraft.attention_mask(self, start, end, layer)

class ZeroState(BlockDraft):
    "Wrong, as published: the LSTM state is zero at the start of every pass"
    def row_states(self, start, *args):
        state = self.memory.buffer.get("state")
        if state is None: return super().row_states(start, *args)
        before = state.clone()
        state.zero_()
        out = super().row_states(start, *args)
        state.copy_(before)
        return out

class CausalBlock(BlockDraft):
    "Wrong: a causal mask, under which a row of a block does not attend to later ones"
    def attention_mask(self, start, end, layer):
        mask = super().attention_mask(start, end, layer)
        ends = [r for r in range(start, end) if self.draft_depth(r) % self.net.k == 0]
        for r in ends: mask[r - start, r] = False
        return mask

class SlotsShifted(PassDraft):
    "Wrong: the slots begin a place late"
    def answers(self, tree):
        rows = super().answers(tree)
        return [rows[max(d - 1, 0)] for d in range(len(rows))]

class StaleRows(DiffusionDraft):
    "Wrong: keeps as many rows as it has, whatever the new context shares with the old one"
    def denoise(self, ctx):
        if ctx != self.ctx and self.ctx: self.ctx = (*ctx[:len(self.ctx) - 1], -1)
        super().denoise(ctx)

class WithAnchor(DiffusionDraft):
    "Wrong: reads the target's state of the anchor"
    def states(self, ctx):
        return {k: s.roll(-1, 0) for k, s in self.target.states(ctx, self.net.reads).items()}

class OneRow(DiffusionDraft):
    "Wrong: attends to the last context row alone"
    def attend(self, i, q, k, v):
        n, self.memory.n = self.memory.n, min(self.memory.n, 1)
        out = super().attend(i, q, k, v)
        self.memory.n = n
        return out

WRONG_BLOCKS = {"stale rows": StaleRows, "the state of the anchor": WithAnchor, "one context row": OneRow}
def in_blocks(name, kind): return type(kind.__name__, (kind, SparkDraft), {}) if name == "dspark" else kind

def unmarked(net, target):
    kinds = {Falcon: BlockDraft, DeepSeek: ModuleChainDraft}
    draft = kinds.get(type(net), FeatureDraft)(net, target)
    draft.trie, draft.first_token = Unmarked(), (3,)   # the first token of the script
    return draft

UNMARKED = "chain", "deepseek", "eagle", "hass", "eagle3", "eagle31", "falcon"
WRONG_ROWS = of_systems({of: drafting_by(model) for of, model in {
    ("medusa", "the last state"): LateState, ("medusa2", "the last state"): LateState,
    ("hydra", "the likeliest path"): GreedyPath, ("hydra", "the token before"): UnshiftedPath,
    ("hydra++", "counted rows"): CountedPrefix,
    ("mlp", "the token before"): UnshiftedPath, ("mtp", "no attention"): RowAlone,
    ("falcon", "a zero state"): ZeroState,
    ("falcon", "a causal mask"): CausalBlock, ("pass", "slots a place late"): SlotsShifted,
    **{(name, what): in_blocks(name, kind) for what, kind in WRONG_BLOCKS.items()
       for name in ("dflash", "dflash2", "dspark")},
    **{(name, "drafted features of accepted tokens"): unmarked for name in UNMARKED}}.items()})

@proves("thm-injected", "thm-groups")
@faithful(*ONE_EACH.values(), plain=WRONG_ROWS)
def test_rows_on_one_script(subject): check_script(subject.entry.recipe.name, subject.recipe)

def check_script(name, recipe):
    "On one script, which accepts whole branches, every row is that of a plain pass"
    draft = drafting(name, recipe=recipe)
    assert same(max(rows_off(draft, tree) for tree in script(CASES[name].depth)), 0)

@pytest.mark.parametrize("name", UNMARKED)
def test_a_drafted_feature_is_wrong_once_its_token_is_accepted(name):
    "Before, the rows of the wrong draft model are correct"
    draft = drafting(name, recipe=drafting_by(unmarked)(recipe_of(name)))
    assert rows_off(draft, next(script(CASES[name].depth))) < 1e-10

def stepped(net, batch, steps, tokens, places, attend, next_feature):
    "Steps of a network on its own features; what may be wrong is an argument"
    f, outs = net.enter(batch.states)[:, :-1], []
    for s in range(steps):
        x = F.pad(batch.x[:, 1+s*tokens:], (0, s*tokens))
        outs.append(net.step(f, x, s*places + torch.arange(f.shape[1]).expand(len(x), -1), attend))
        f = next_feature(outs[-1], f)
    return outs

def own(out, f): return out
def normed(f): return F.rms_norm(f, f.shape[-1:])

def mixed(net, batch, steps):
    outs = stepped(net, batch, steps, 0, 0, causal_attention, lambda out, f: F.pad(out[:, :-1], (0, 0, 1, 0)))
    return [F.pad(out[:, s:], (0, 0, 0, s)) for s, out in enumerate(outs)]

WRONG_UNROLLS = {
    "own rows only": lambda net, b, n: stepped(net, b, n, 1, 1, causal_attention, own),
    "places of the first step": lambda net, b, n: stepped(net, b, n, 1, 0, UnrolledAttention(), own),
    "tokens of the first step": lambda net, b, n: stepped(net, b, n, 0, 1, UnrolledAttention(), own),
    "the first feature again": fed_by_target,
    "normed without the switch": lambda net, b, n: unroll(net, b, n, between=normed),
    "features mixed in one row": mixed}

def unrolled_by(unrolled):
    "A recipe whose networks are unrolled otherwise in training"
    def change(recipe):
        def make(*sizes, **how):
            net = recipe.make(*sizes, **how)
            net.guesses = lambda batch, depth: [net.logits(f) for f in unrolled(net, batch, depth)]
            return net
        return replace(recipe, make=make)
    return change

TOYS = {(system, what): unrolled_by(unrolled) for what, unrolled in WRONG_UNROLLS.items()
        for system in ("DeepSeek MTP", "EAGLE", "HASS", "EAGLE-3")
        if (system, what) != ("DeepSeek MTP", "normed without the switch")}

@faithful("DeepSeek MTP", "EAGLE", "HASS", "EAGLE-3", plain=TOYS)
def test_training_rows_are_those_of_drafting(subject):
    "At every depth; a wrong unrolling is correct at the first"
    name, ctx = subject.entry.recipe.name, (3, 1, 4, 1, 5, 2)
    net = network(name, target_on(V), subject.recipe)
    draft = subject.recipe.draft_model(net, reader(name, net))
    if not rows_off(draft, Tree(ctx)) < 1e-10: raise ValueError("wrong at the first depth")
    assert same(rows_off(draft, grown(ctx, [(0, 6), (1, 0)], 4)), 0)

def dependence(net, depth, T=9):  # -> [entry][place] -> (tokens, states) that move it
    "The tokens and states that change an entry, each changed alone"
    g = torch.Generator().manual_seed(3)
    x = torch.randint(V, (1, T), generator=g).repeat(2*T + 1, 1)
    states = {k: torch.randn(1, T, net.base[0].d, generator=g, dtype=torch.float64).repeat(2*T + 1, 1, 1)
              for k in net.reads}
    for k in range(T):
        x[k, k] = (x[k, k] + 1) % V
        for s in states.values(): s[T + k, k] += torch.randn(s.shape[-1], generator=g)
    with torch.no_grad(): z = net.guesses(StateDataset(x, states), depth)
    moved = [(row - row[-1:]).nan_to_num(0).abs().amax(-1) > 1e-12 for row in z]   # (2T + 1, places)
    where = lambda m, t, a: set(np.flatnonzero(m[a:a+T, t].numpy()).tolist())
    return [[(where(m, t, 0), where(m, t, T)) for t in range(m.shape[1])] for m in moved]

class WithoutToken(Hydra):
    def step(self, s, x, i):
        return super().step(s, x, i) if i else torch.cat([s, 0*self.base[0].embed(x)], -1)
class WithoutPrefix(HydraPlus):
    def enter(self, states, *args): return states[self.reads[0]]
def blind(kind):
    "The network with one token in place of all"
    class Blind(kind):
        def step(self, state, tokens, *rest): return super().step(state, 0*tokens, *rest)
    return Blind
def unshifted(kind):
    class Unshifted(kind):
        def step(self, f, tokens, *more): return super().step(f, F.pad(tokens[:, :-1], (1, 0)), *more)
    return Unshifted
class FalconWithoutTokens(Falcon):
    def run_lstm(self, f, tokens, state=None): return super().run_lstm(f, torch.zeros_like(tokens), state)
class CausalFalcon(Falcon):
    def guesses(self, batch, depth):
        u, _ = self.run_lstm(self.enter(batch.states)[:, :-1], batch.x[:, 1:])
        places = torch.arange(u.shape[1]).expand(u.shape[:2])
        g = self.logits(self.block_features(u, places, relaxed_causal_mask(1)))
        return [F.pad(g, (0, 0, 1 - r, 0))[:, :g.shape[1]] for r in range(2)][:depth]
class BlindSpire(Spire):
    def step(self, tokens, *rest): return super().step(0*tokens, *rest)
def dflash(base): return DFlash(base, **SMALL)
def dflash2(base): return DFlash2(base, top=3, rank=4, **SMALL)
def dspark(base): return DSpark(base, rank=4, **SMALL | dict(block=4))
def modules_without_tokens(base):
    net = DeepSeek(base, 3)
    for module in net.chain: module.enorm.forward = torch.zeros_like
    return net

WRONG_READERS = of_systems({of: made_by(make) for of, make in {
    ("medusa", "Hydra's heads"): lambda base: Hydra(base, 3),
    ("medusa2", "Hydra's heads"): lambda base: Hydra(base, 3),
    ("hydra", "no draft token"): WithoutToken, ("hydra", "Medusa's heads"): Medusa,
    ("hydra++", "no prefix layer"): WithoutPrefix, ("hydra++", "no token"): blind(HydraPlus),
    ("mlp", "no token"): lambda base: blind(MLPSpeculator)(base, 3, inner=24),
    ("mtp", "Medusa's heads"): Medusa,
    ("deepseek", "no token"): blind(RecursiveMTP),
    ("eagle", "no token"): blind(Eagle), ("eagle", "the token before"): unshifted(Eagle),
    ("hass", "no token"): blind(Hass),
    **{(name, "the token before"): partial(eagle3, unshifted(Eagle3)) for name in ("eagle3", "eagle31")},
    ("falcon", "no token"): FalconWithoutTokens, ("falcon", "a causal mask"): CausalFalcon,
    ("spire", "no token"): BlindSpire, ("spire", "no state of the target"): OwnMemory,
    ("pass", "heads on the last state"): Medusa, ("dflash", "a Markov head"): dspark,
    ("dflash", "a selector"): dflash2, ("dflash2", "no selector"): dflash,
    ("dspark", "no Markov head"): dflash}.items()})

@proves("prop-told", "prop-block-law")
@faithful(*HANDED, plain=WRONG_READERS)
def test_each_entry_reads_its_tokens_and_states(subject):
    check_entries(subject.entry.recipe.name, subject.recipe)

def check_entries(name, recipe):
    "Entry j at place t depends on each token and state of its paper, and on no other"
    case, T = CASES[name], 9
    for j, row in enumerate(dependence(network(name, target_on(V), recipe), case.depth, T)):
        for t, (x, states) in enumerate(row):
            assert x == set(case.tokens(t, j)) & set(range(T)), f"entry {j} at {t} reads the tokens {x}"
            nothing_yet = {0} if name == "falcon" and t == 0 else set()   # before the first block
            assert states == set(case.states(t)) - nothing_yet, f"entry {j} at {t}: {states}"

# The loss

def noiseless(net):
    if hasattr(net, "noise"): net.noise = 0
    return net

def on_distributions(net, batch): return HydraPlus.loss(net, batch, 1.)
def undecayed(net, batch): return medusa_loss(net.guesses(batch, 3), batch.x, 1.)
def changed_heads_alone(net, batch): return .2*medusa_loss(net(net.adapter.states(batch.x)), batch.x)
def one_token_early(net, batch):
    return sum(shifted_loss(z, batch.x, k) for k, z in enumerate(net.guesses(batch, 3), 1))
def equal_weights(net, batch):
    return sum(shifted_loss(z, batch.x, k) for k, z in enumerate(net.guesses(batch, 3), 2))/3
def features_alone(net, batch):
    out, = unroll(net, batch, 1)
    return F.smooth_l1_loss(out, batch.states[net.reads[0]][:, 1:])
def every_token(net, batch):
    net.k = V
    return net.loss(batch, 1.)
def without_the_token(net, batch):
    net.feature_loss = lambda out, true, tokens, counts: Eagle.feature_loss(net, out, true)
    return net.loss(batch, 1.)

def own_places(net, batch):
    "PaSS: every slot is trained on the token of its own place"
    L = len(net.slots)
    cuts = random_cuts(batch.x, L, net.cuts)
    return label_loss(net.groups(batch.x, cuts, L)[1], group_labels(batch.x, cuts - 1, L)).mean()
def hard_labels(net, batch): return having(labels=partial(ABLATIONS["distillation"].labels, net))(net, batch)
def having(**values):
    def loss(net, batch):
        for name, x in values.items(): setattr(net, name, x)
        return net.loss(batch, 1.)
    return loss
def terms(change):
    "The loss of blocks with other terms, `change(net, usual, h, read, true, p)`"
    def loss(net, batch): return having(terms=partial(change, net, net.terms))(net, batch)
    return loss
BLOCK_LOSSES = {
    "labels one place late": terms(lambda net, usual, h, read, true, p: usual(h, read, true, p.roll(-1, -2))),
    "equal weights": having(weights=[1.]*4), "tokens as labels": having(soft=False)}
def misses_remain(net, usual, h, read, true, p): return usual(h, read, net.unary(h).argmax(-1), p)
def unary_alone(net, usual, *given):
    net.conditional = partial(DFlash.conditional, net)
    return DFlash.terms(net, *given)
def cross_entropy_alone(net, usual, *given): return DFlash.terms(net, *given)
def anchor_for_every_slot(net, usual, h, read, *labels):
    return usual(h, read[..., :1].expand_as(read), *labels)

WRONG_LOSSES = of_systems({of: losing(loss) for of, loss in {
    ("medusa", "no decay"): undecayed, ("medusa2", "a frozen target"): lambda net, b: Medusa.loss(net, b, 1.),
    ("medusa2", "no KL"): changed_heads_alone, ("hydra", "distributions"): on_distributions,
    ("hydra++", "tokens"): lambda net, batch: Hydra.loss(net, batch, 1.),
    ("mlp", "distributions"): on_distributions, ("mtp", "one token early"): one_token_early,
    ("deepseek", "equal weights"): equal_weights, ("eagle", "the feature alone"): features_alone,
    ("hass", "EAGLE's loss"): lambda net, batch: Eagle.loss(net, batch, 1.),
    ("hass", "every token"): every_token, ("falcon", "EAGLE's loss"): without_the_token,
    ("spire", "cross-entropy alone"): partial(run_terms, omega=1.),
    ("spire", "hard labels"): hard_labels, ("pass", "the token of the slot's own place"): own_places,
    **{(name, what): loss for what, loss in BLOCK_LOSSES.items() for name in ("dflash", "dflash2", "dspark")},
    ("dflash2", "a missing token stays missing"): terms(misses_remain),
    ("dflash2", "the unary term alone"): terms(unary_alone),
    ("dspark", "cross-entropy alone"): terms(cross_entropy_alone),
    ("dspark", "the anchor for every slot"): terms(anchor_for_every_slot),
    **{(name, wrong): partial(short_terms, **terms) for name in ("eagle3", "eagle31")
       for wrong, terms in WRONG_TERMS.items()}}.items()})

@faithful(*HANDED, plain=WRONG_LOSSES)
def test_the_loss_is_the_papers(subject): check_loss(subject.entry.recipe.name, subject.recipe)

def check_loss(name, recipe):
    "Written out place by place; with labels one place early or late it is another number"
    net = noiseless(network(name, target_on(V), recipe))
    batch, hand = random_batch(net.base[0]), CASES[name].loss
    want = hand(net, batch)
    assert same(net.loss(batch, 1.), want, 1e-9*abs(want), 1e-3)
    assert all(abs(want - hand(net, batch, off)) > 1e-3 for off in (-1, 1))

@pytest.mark.parametrize("check, wrong", [
    (check_script, drafting_by(EveryRow)), (check_entries, made_by(modules_without_tokens)),
    (check_loss, losing(lambda net, batch: 3*net.loss(batch, 1.)))], ids=["rows", "entries", "loss"])
def test_a_module_for_each_depth(check, wrong):
    "The modules of DeepSeek-V3; with every row, without tokens and with a sum of losses they fail"
    check("chain", MODULES)
    with pytest.raises(AssertionError): check("chain", wrong(MODULES))

@proves("prop-answers")
@cases
def test_the_loss_counts_answers_alone(name):
    "With one text's tokens counted it is that text's loss; what comes after the last answer does not matter"
    net = noiseless(network(name, target_on(V)))
    batch, g = random_batch(net.base[0], 2, 19), torch.Generator().manual_seed(1)
    every = torch.ones(1, 19, dtype=torch.bool)
    alone = StateDataset(batch.x[:1], {k: s[:1] for k, s in batch.states.items()}, every)
    first = replace(batch, counts=torch.tensor([True, False])[:, None].expand(2, 19))
    want = net.loss(alone, 1.)
    assert abs(net.loss(first, 1.) - want) < 1e-9*want.abs() and abs(net.loss(batch, 1.) - want) > 1e-4
    early = replace(alone, counts=torch.arange(19)[None] < 12)
    later = {k: torch.cat([s[:, :11], torch.randn(1, 8, s.shape[-1], generator=g).double()], 1)
             for k, s in alone.states.items()}
    changed = StateDataset(torch.cat([early.x[:, :12], early.x[:, 12:].roll(1, 1)], 1), later, early.counts)
    assert abs(net.loss(changed, 1.) - net.loss(early, 1.)) < 1e-9 < abs(net.loss(early, 1.) - want)

@cases
def test_the_gradient_reaches_every_weight_and_no_weight_of_the_target(name):
    base = target_on(V)
    net = network(name, base)
    net.loss(random_batch(base), .9).backward()
    assert not [n for n, w in net.named_parameters() if w.grad is None or not w.grad.isfinite().all()
                or not w.grad.any()]
    assert all(w.grad is None and not w.requires_grad for w in base.model.parameters())
    assert not {w.data_ptr() for w in net.parameters()} & {w.data_ptr() for w in base.model.parameters()}

@cases
def test_training_lowers_the_loss_and_resumes(name, tmp_path):
    "Interrupted and resumed it ends with the same weights; the target's own do not change"
    base = TargetModel(tiny(V, layers=4).float())
    def counting(n): return states_of(base.model, (torch.arange(n)[:, None] + torch.arange(16)) % V)
    held, many, key = counting(8), counting(32), base.key
    train = StateDataset(many.x.numpy(), {k: s.numpy() for k, s in many.states.items()})
    def loss(net):
        torch.manual_seed(9)
        return net.loss(held, 0.).item()
    def run(folder, until=None):
        torch.manual_seed(0)
        net = CASES[name].make(recipe_of(name).make, base)
        return loss(net), *train_network(net, base, train, held, 20, 2e-2, tmp_path/folder,
                                         eval_steps=10, rows=8, depth=2, until=until)
    before, net, evaluations = run("whole")
    run("parts", until=10)
    _, again, same = run("parts")
    assert loss(net) < before - .02 and evaluations == same and len(same) == 2
    assert all(map(torch.equal, net.parameters(), again.parameters())) and TargetModel(base.model).key == key

class Precisions(TorchDispatchMode):
    "The types in which softmaxes and products are computed"
    def __init__(self):
        super().__init__()
        self.softmax, self.product = set(), set()
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        if f.overloadpacket in (torch.ops.aten._softmax, torch.ops.aten._log_softmax):
            self.softmax.add(out.dtype)
        if f.overloadpacket is torch.ops.aten.mm: self.product.add(out.dtype)
        return out

@pytest.mark.parametrize("name", RECIPES)
def test_no_softmax_in_half_precision(name):
    "Training multiplies in bfloat16, but every softmax of its loss is in single precision"
    torch.manual_seed(0)
    base, recipe, x = TargetModel(llama(6, 32, 64)), RECIPES[name], torch.randint(512, (2, 24))
    net = recipe.prepare(recipe.make(base, **recipe.settings), x.numpy()).train()
    batch = states_of(base.model, x)
    recurrent = any(isinstance(m, torch.nn.LSTM) for m in net.modules())
    if recurrent and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
    with Precisions() as seen, torch.autocast("cpu", torch.bfloat16): net.loss(batch, .9).backward()
    assert seen.softmax == {torch.float32} and torch.bfloat16 in seen.product

# Checkpoints

@cases
def test_save_and_load(name, tmp_path):
    "Settings and logits are the same, from half precision bit for bit"
    base = target_on(V)
    net, batch = network(name, base), random_batch(base)
    with torch.no_grad():
        for w in net.parameters(): w.copy_(w.half())
    save_network(net, base, tmp_path)
    back = load_checkpoint(type(net), base, tmp_path)
    assert json.loads(json.dumps(back.settings)) == json.loads(json.dumps(net.settings)) and not back.training
    assert all(map(torch.equal, back.guesses(batch, 3), net.guesses(batch, 3)))
    refuses("target", load_checkpoint, type(net), target_on(V + 1), tmp_path)
    refuses("folder", load_checkpoint, Medusa if name != "medusa" else Hydra, base, tmp_path)

# The distribution

def ways(make):
    "The system as at a temperature and as at temperature 0, and with a sampled chain"
    if make.name in ("DeepSeek MTP", "SPIRe", "PaSS"): return [lambda q: make(q, gamma=2)]
    def chain(q): return drafted(lambda drafter: Chain(q, 2))(make(q, gamma=3))
    return [lambda q: make(q, gamma=3), lambda q: make(q, gamma=4, temperature=0), chain]

# Medusa's rule with a threshold so low that it changes the text of every drafter
@proves("thm-selector")
@faithful(*TRAINED, plain={"typical acceptance": verified(typical(.001, .001)),
                           ("PaSS", "SPACE's released rule"): verified(redraw)})
def test_the_distribution_is_the_targets(subject):
    "Every path enumerated through network and cache: correct edges, the target's distribution to 1e-12"
    for system_of in ways(subject):
        draft, ctx = drafting(subject.entry.recipe.name, 2 if subject.name == "Falcon" else 3, .7), (0, 1, 1)
        system = system_of(draft)
        for seen, stated, true in edge_laws(law_of(lambda rng: system.drafter(ctx, rng))):
            assert np.allclose(stated, true, atol=1e-12)
        alone = HFModel(draft.target.model, .7, check=False)
        found = loop_law(draft.target, system.drafter, system.verify, ctx, 3)
        assert same(tv_outcomes(found, target_law(alone, ctx, 3)), 0, 1e-12, 1e-3)

@systems
def test_greedy_text_is_plain_text(system):
    "At temperature 0, on a random target, after one token, which has no state before it, and more, at once"
    name, make = TRAINED.entry(system).recipe.name, TRAINED[system]
    draft = drafting(name, temperature=0)
    built, ctxs = make(draft, temperature=0, depth=draft.net.depth), ((3,), (1, 2, 0, 1))
    plain = HFModel(draft.target.model, 0, check=False)
    assert at_once(*(lambda ctx=ctx: built(draft.target, ctx, 16, Seeded(0)) for ctx in ctxs)) == [
        autoregressive(plain, ctx, 16, Seeded(0)) for ctx in ctxs]

# The branching source

B, TAIL, GAMMA = 4, 3, 3
# the overlap of a head that does not read x_{t+1}
CAP = float(sum(overlap_at(B, TAIL, phase, 0) for phase in range(TAIL + 1)) / (TAIL + 1))
INDEPENDENT, SEQUENTIAL = float(chain_tokens(B, TAIL, GAMMA)), GAMMA + 1.
TRAINED_HERE = {   # network: constructor, tokens of a round that its family can reach, steps, rate
    "medusa": (lambda make, b: make(b, 3), INDEPENDENT, 120, 3e-2),
    "hydra++": (lambda make, b: make(b, 3, inner=32), SEQUENTIAL, 150, 1e-2),
    "mlp": (lambda make, b: make(b, 3, inner=32), SEQUENTIAL, 200, 1e-2),
    "hass": (lambda make, b: make(b), SEQUENTIAL, 120, 1e-2),
    "eagle3": (lambda make, b: make(b, reads=(0, 1, 1)), SEQUENTIAL, 120, 1e-2)}

@pytest.fixture(scope="module")
def source(tmp_path_factory):
    base, folder = TargetModel(branching(B, TAIL).float()), tmp_path_factory.mktemp("source")
    def data(n, seed): return state_dataset(base, branch_texts(B, TAIL, n, 25, seed), (0, 1), folder)
    return base, data(256, 0), data(96, 1)

def without_tokens(net):
    "The network with zeros for the token embeddings"
    if isinstance(net, MLPSpeculator):
        for table in net.emb: table.weight.data.zero_()
    base = copy(net.base[0])
    base.embed = lambda x: torch.zeros(*x.shape, base.d)
    for module in net.modules():
        if hasattr(module, "base"): module.base = (base,)
    return net

# the plainer networks are trained as well, in half the steps; the bound of their family is 1.2 tokens away
BLIND = of_systems({of: made_by(make) for of, make in {
    ("medusa", "Hydra's heads"): lambda b: Hydra(b, 3, layers=2),
    ("hydra++", "no token"): lambda b: blind(HydraPlus)(b, 3, inner=32),
    ("mlp", "no token"): lambda b: blind(MLPSpeculator)(b, 3, inner=32), ("hass", "no token"): blind(Hass),
    ("eagle3", "no token"): lambda b: blind(Eagle3)(b, reads=(0, 1, 1))}.items()})

@faithful("Medusa", "Hydra++", "MLP Speculator", "HASS", "EAGLE-3", plain=BLIND)
def test_training_reaches_the_closed_form_of_the_family(subject, source, tmp_path):
    """Training reaches the closed form of its family to .12 tokens and does not exceed it; that of the other
    family is 1.2 tokens away (other networks: in their chapters)"""
    (base, train, held), (make, reach, steps, peak) = source, TRAINED_HERE[subject.entry.recipe.name]
    torch.manual_seed(0)
    net, steps = make(subject.recipe.make, base), steps if subject == Published(subject.name) else steps // 2
    how = dict(eval_steps=steps, rows=16, depth=2)
    train_network(net, base, train, held[:16], steps, peak, tmp_path/"net", **how)
    tokens, overlaps = evaluate(net, base, held[:], GAMMA)
    assert abs(tokens - reach) < .12 < 1.2 < SEQUENTIAL - INDEPENDENT, (tokens, overlaps)
    assert evaluate(without_tokens(net), base, held[:], GAMMA)[1][0] < CAP + .02

# The shipped checkpoints

def test_the_shipped_checkpoints():
    "A card and weights for every recipe and no more; the longer trainings on one data set, as the others"
    facts = TargetModel(raw_model("target")).facts()
    cards = {name: read_card(SHIPPED_DRAFTERS/name) for name in RECIPES}
    assert sorted(f.name for f in SHIPPED_DRAFTERS.iterdir()) == sorted(RECIPES)
    assert sum(f.stat().st_size for f in SHIPPED_DRAFTERS.glob("*/*")) <= 40e6
    for name, card in cards.items():
        first = next(other for names in shipped_trainings().values() if name in names
                     for other in names if other in cards)
        check_card(name, card, facts, cards[first])

def check_card(name, card, facts, one):
    "The card of a recipe: its network, its settings, its training, and the data that it shares with `one`"
    how, made = RECIPES[name], card["recipe"]
    assert card["kind"] == how.make.__name__ and card["target"].items() <= facts.items()
    assert card["data_sha256"] == one["data_sha256"]
    assert card["settings"].items() >= json.loads(json.dumps(how.settings)).items()
    noted = tuple(made[k] for k in ("name", "peak", "rows", "corpus"))
    assert noted == (name, how.peak, how.rows, how.corpus_share)
    assert (made["texts"], made["steps"]) == (how.texts, how.steps)
    assert all(made[k] == one["recipe"][k] for k in ("length", "seed"))
    assert all(card[k] for k in ("specref", "python", "torch", "transformers"))
    best = max(mean for _, mean in card["evaluations"])   # of rounds that begin anywhere, also in the prompt
    assert .9*best < card["tokens"] < min(best + .02, 1 + sum(card["overlaps"]))

@cache
def sampled(changed):
    "Texts sampled from a target after held-out prompts, and its states"
    base = TargetModel(load_network("medusa2").adapter.merged() if changed else raw_model("target"))
    start = torch.tensor([p for d in DOMAINS for p in prompts(d, 10, seed=7)])
    x = sample_texts(base.model, start, 80, torch.Generator().manual_seed(0), half=False)
    return base, replace(states_of(base.model, x), counts=(torch.arange(80) >= 32).expand(len(x), -1))

def untrained(name):
    "Instead of a shipped network that of its recipe before the training"
    def change(shipped):
        torch.manual_seed(0)
        return RECIPES[name].make(TargetModel(raw_model("target")), **RECIPES[name].settings).eval()
    return change

def in_reverse(net):
    "The shipped heads in reverse order"
    net.heads = torch.nn.ModuleList([*net.heads][::-1])
    return net

# random slots of PaSS overlap as much as trained ones on this target, but for the last: its chapter shows it
OTHER_WEIGHTS = of_systems({(name, "untrained"): untrained(name) for name in RECIPES if name != "pass"} | {
    (name, "heads in reverse"): in_reverse for name in ("medusa", "medusa2", "mtp")})

@faithful(*ONE_EACH.values(), plain=OTHER_WEIGHTS)
def test_the_numbers_on_the_card_are_reproduced(subject):
    """On other texts of the target the shipped weights emit as many tokens as on the card, to an eighth, and
    overlap as much, to .06"""
    name, net = subject.entry.recipe.name, subject.shipped()
    card = read_card(SHIPPED_DRAFTERS/name)
    base, batch = sampled(name == "medusa2")
    if RECIPES[name].eval_data is few_texts: batch = few_texts(net, batch)   # a pass of the target each
    given = net, base, batch, min(4, len(card["overlaps"]))
    assert tokens_a_round(*given) == pytest.approx(card["tokens"], rel=.125)
    assert evaluate(*given)[1] == pytest.approx(card["overlaps"], abs=.06)
