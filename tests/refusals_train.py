"Invalid arguments in the chapters on trained drafters: (argument, call, words)"
from functools import cache, partial
from types import SimpleNamespace

import numpy as np, torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from kinds import at_least, number
from helpers import random_table, tiny
from specref import exact, HFModel, Tree
from specref.models import recurrent
from specref.models.recipe import llama
from specref.train import (blocks, eagle3, falcon, features, harness, hydra, masks, medusa, mtp, online,
                           registry, space, spire, synthetic)
from specref.train.harness import StateDataset, TargetModel

@cache
def base(V=5): return TargetModel(tiny(V, layers=4))

@cache
def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=5, n_embd=8, n_layer=1, n_head=2, bos_token_id=None,
                                      eos_token_id=None))

def gelu():
    "A model with the names and shapes of Llama's weights, and another layer"
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**base().config.to_dict(), "hidden_act": "gelu"}))

def soft():
    "A model whose logits are not its head's"
    class Soft(LlamaForCausalLM):
        def forward(self, **kw):
            out = super().forward(**kw)
            out.logits = out.logits.tanh()
            return out
    return Soft(base().config)

def huge():
    "A target whose states half precision cannot hold"
    model = tiny(5)
    with torch.no_grad(): model.model.norm.weight.mul_(1e6)
    return TargetModel(model)

def target(*keep, V=5): return HFModel(base(V).model, keep=keep or (4,), check=False)
def states(T):
    return StateDataset(torch.zeros(1, T, dtype=torch.long),
                        {k: torch.zeros(1, T, 16).double() for k in range(5)})
def texts(x, layers=(2,), on=None): return harness.state_dataset(on or base(), x, layers, "/nowhere/states")
def x(): return np.zeros((2, 4), np.uint16)
def path(net, *nodes):
    "A draft model's rows for a path below a context"
    tree = Tree((1, 2, 3))
    for u, y in enumerate(nodes): tree.add(u, y)
    return net(tree)
def medusa_draft(): return medusa.MedusaDraft(medusa.Medusa(base(), 3), target())
def hydra_draft(): return hydra.PathDraft(hydra.Hydra(base(), 3).double(), target())
def eagle_draft(): return features.FeatureDraft(eagle3.Hass(base()), target())
def marginals(): return medusa.HeadMarginals(medusa_draft(), 3)
def fit(**kw):
    how = dict(steps=10, peak=1e-2, folder="/nowhere/net") | kw
    return harness.train_network(medusa.Medusa(base(), 1), base(), states(9), states(9), **how)

def to_half_of_huge():
    on = huge()
    with torch.inference_mode():
        out = on.model(input_ids=torch.zeros(1, 2, dtype=torch.long), output_hidden_states=True)
    return harness.to_half(out.hidden_states[-1], 2)

KINDS = [   # what is wrong, and each call with the arguments for which it is
    (at_least(0), (partial(spire.Spire, base()), "sinks")),
    (at_least(1), (partial(synthetic.branching, tail=1), "B"), (partial(synthetic.branching, 1), "tail"),
        (partial(synthetic.chain_tokens, 2, 2), "gamma"), (partial(synthetic.most_tokens, 2, 2), "gamma"),
        (partial(medusa.Medusa, base()), "heads"), (partial(medusa.Adapter, base()), "rank"),
        (partial(medusa.HeadMarginals, medusa_draft()), "depth"),
        (partial(hydra.Hydra, base()), "heads layers"), (partial(hydra.HydraPlus, base()), "matrices"),
        (partial(hydra.MLPSpeculator, base()), "stages"), (partial(hydra.CandidateTree, hydra_draft()), "n"),
        (partial(mtp.DeepSeek, base()), "D"), (partial(mtp.RecursiveMTP, base()), "steps"),
        (partial(eagle3.Hass, base()), "steps k"), (partial(eagle3.Eagle3, base()), "steps"),
        (partial(eagle3.frequent_tokens, [1], V=4), "n"), (partial(falcon.Falcon, base()), "k"),
        (partial(falcon.block_tree, (2,)), "k"), (partial(falcon.block_tokens, 4, 3, 2), "k"),
        (partial(spire.Spire, base()), "window k"), (registry.train_drafter, "steps")),
    (at_least(2), (partial(mtp.Gloeckle, base()), "n")), (at_least(48), (registry.train_drafter, "length")),
    (number(0), (partial(eagle3.Hass, base()), "noise"), (partial(falcon.Falcon, base()), "noise")),
    (number(0, 1), (partial(eagle3.Hass, base()), "begin"), (partial(eagle3.Eagle3, base()), "fade"),
        (partial(falcon.Falcon, base()), "glance"), (partial(spire.Spire, base()), "omega")),
    (number(0, 100), (partial(eagle3.Hass, base()), "weight")),
    (at_least(0), (partial(online.shifting_order, ["code"]), "before"),
        (partial(recurrent.refeeding, .5, 2), "lag")),
    (at_least(1), (partial(masks.PaSS, base()), "slots cuts"), (partial(space.Space, V=5), "V k"),
        (partial(blocks.PEagle, base(), reads=(0, 2, 3)), "k layers"),
        (partial(blocks.Pard, base(), hidden=32), "k layers"), (partial(blocks.Uno, base()), "rank anchors"),
        (partial(online.OnlineDrafter, random_table(3, 0)), "gamma"),
        (partial(online.OnlineDrafter, random_table(3, 0), 2), "every"),
        (partial(online.CountedDraft, random_table(3, 1)), "order weight"),
        (partial(online.NetworkVersion, base()), "steps"),
        (partial(online.retrace, (0,), [exact(1, 1)], [exact(1, 1)], rng=None), "gamma"),
        (partial(online.one_domain_draft, "english", path="/nowhere/x.pt"), "steps"),
        (partial(recurrent.refeeding, .5, lag=1), "gamma")),
    (at_least(2), (partial(blocks.Uno, base()), "k")), (at_least(6), (partial(masks.PaSS, base()), "span")),
    (number(0), (partial(blocks.parallel_gain, 2, 3, 2), "c"), (partial(online.NetworkVersion, base()), "lr"),
        (partial(recurrent.recurrent_speedup, .5, 2), "c"),
        (partial(recurrent.recurrent_speedup, .5, 2, .1, 0), "per_token")),
    (number(0, 1), (partial(blocks.PEagle, base(), reads=(0, 2, 3)), "r least"),
        (partial(blocks.Pard, base(), hidden=32), "r least"),
        (partial(recurrent.refeeding, gamma=2, lag=1), "alpha")),
]
ROWS = [
    ("target", lambda: masks.PassDraft(masks.PaSS(base()), target())),
    ("target", lambda: masks.SlotRows(base(), (5,))), ("mask", lambda: space.Space(5, 2, -1)),
    ("q", lambda: space.redraw_distance(exact(1, 1), exact(1, 1, 1))),
    ("x", lambda: masks.random_cuts(torch.zeros(1, 4, dtype=torch.long), 3, 3)),
    ("model", lambda: TargetModel(soft()), "plain head"),
    ("model", lambda: TargetModel(tiny(5).model), "LlamaModel"),
    ("layers", lambda: texts(x(), (5,)), "5"), ("layers", lambda: to_half_of_huge(), "65,504"),
    *(("x", lambda bad=bad: texts(bad)) for bad in (x()[0], x().astype(float), x()[:0], x() + 5,
                                                    x().astype(int) - 5)),
    ("steps", lambda: fit(steps=0)), ("depth", lambda: fit(depth=0)), ("rows", lambda: fit(rows=0)),
    ("depth", lambda: harness.evaluate(medusa.Medusa(base(), 2), base(), states(9), 3), "at most 2"),
    ("depth", lambda: harness.evaluate(medusa.Medusa(base(), 2), base(), states(9), 8), "at most 7"),
    ("folder", lambda: harness.read_card("/nowhere")),
    ("weights", lambda: harness.set_weights(eagle3.Hass(base()), {}), "without fc.bias"),
    ("weights", lambda: harness.set_weights(net := eagle3.Hass(base()),
                                            net.state_dict() | {"y": torch.ones(1)}), "unknown y"),
    ("weights", lambda: harness.set_weights(net := eagle3.Hass(base()),
                                            net.state_dict() | {"fc.bias": torch.ones(3)}), "fc.bias"),
    *(("target", lambda bad=bad: features.FeatureDraft(eagle3.Hass(base()), bad()))
      for bad in (lambda: base().model, lambda: target(1))),
    *(("token", lambda nodes=nodes: path(eagle_draft(), *nodes)) for nodes in ((5,), (-1,))),
    *(("token", lambda ctx=ctx: eagle_draft()(Tree(ctx))) for ctx in ((1, 5), (5, 1), (5,), (1, -1))),
    *(("depth", lambda d=d: features.unroll(eagle3.Hass(base()), states(3), d)) for d in (0, 3)),
    ("inner", lambda: features.layer_config(base(), 0)),
    ("base", lambda: medusa.Adapter(SimpleNamespace(model=nn.Sequential(head := nn.Linear(2, 3)),
                                                    head=head))),
    ("target", lambda: medusa.MedusaDraft(medusa.Medusa(base()), random_table(5, 0))),
    ("model", lambda: medusa.HeadMarginals(None, 2)), ("marginals", lambda: medusa.MedusaTree(None, ((0,),))),
    ("choices", lambda: medusa.MedusaTree(marginals(), ((0, 0),))),
    ("choices", lambda: medusa.MedusaTree(marginals(), tuple((0,)*n for n in range(1, 5))), "at most 3"),
    ("inner", lambda: hydra.MLPSpeculator(base(), inner=-1)),
    ("tree", lambda: path(hydra_draft(), 0, 0, 0), "less than 3"),
    ("ks", lambda: hydra.CandidateTree(hydra_draft(), (5, 0))),
    ("ks", lambda: hydra.CandidateTree(hydra_draft(), ())), ("model", lambda: hydra.CandidateTree(3)),
    ("base", lambda: mtp.Gloeckle(TargetModel(gpt2())), "GPT2"), ("base", lambda: mtp.trunk(gpt2()), "GPT2"),
    ("base", lambda: mtp.Gloeckle(TargetModel(gelu())), "does not copy"),
    *(("reads", lambda r=r: eagle3.Eagle3(base(), reads=r)) for r in ((1, 2, 5), (-1, 2, 3))),
    *(("draft", lambda d=d: eagle3.Eagle3(base(), draft=d, reads=(1, 2, 3))) for d in (0, True, 2., 6)),
    *(("ids", lambda i=i: eagle3.Eagle3(base(), 3, reads=(1, 2, 3)).set_draft_vocab(torch.tensor(i)))
      for i in ([0, 1], [0, 1, 1], [2, 1, 0], [0, 1, 5], [-1, 0, 1])),
    ("n", lambda: eagle3.frequent_tokens([1], 5, 4)),
    ("x", lambda: eagle3.frequent_tokens([1, 4], 2, 4)), ("x", lambda: eagle3.frequent_tokens([-1], 2, 4)),
    ("depth", lambda: eagle3.Hass(base()).loss(states(3), 0.)),
    ("shape", lambda: falcon.block_tree((2, 0), 2)),
    *(("last", lambda n=n: spire.Spire(base(), last=n)) for n in (0, 5, 1.5)),
    ("model", lambda: spire.Spire(TargetModel(gpt2()), last=1), "GPT2"),
    ("batch", lambda: spire.Spire(base()).loss(states(8), 0.), "9 or more"),
    ("system", lambda: registry.load_system("EAGLE-9"), "EAGLE-2"),
    ("name", lambda: registry.train_drafter("eagle9"), "eagle3"),
    ("folder", lambda: registry.load_system("EAGLE", folder="/nowhere")),
    ("target", lambda: registry.load_system("EAGLE", model=llama(24, 192, 512)), "head_sha256"),
    ("target", lambda: registry.train_drafter("eagle", "/nowhere"))]
