"07_transformer: one masked pass is n passes, the cache that looks is a function of the tree, and what cannot be served is refused"
import random
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import given, settings, strategies as st
from transformers import (AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LogitsProcessorList, MinLengthLogitsProcessor,
                          RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
from transformers.masking_utils import eager_mask
from helpers import proves
from specref.core.rng import Seeded, tv_outcomes, law_of
from specref.core.law import warp
from specref.core.loop import generate, match, no_draft, autoregressive
from specref.draft.lookup import PromptLookup
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching
from specref.core.target import target_law
from specref.models.transformer import HFModel, RowCache, RowTrie, Unservable, common_prefix_len, tree_mask
from specref.core.tree import Tree

V = 64
SMALL = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)
GPT = dict(vocab_size=V, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
SERVED = {
    "Llama": lambda **kw: transformers.LlamaConfig(**{**SMALL, **kw}, num_key_value_heads=4),
    "GPT2": lambda **kw: transformers.GPT2Config(**{**GPT, **kw}),
    "Qwen2": lambda **kw: transformers.Qwen2Config(**{**SMALL, **kw}, num_key_value_heads=2),
    "GPTNeoX": lambda **kw: transformers.GPTNeoXConfig(**{**SMALL, **kw}),
    "Mistral": lambda **kw: transformers.MistralConfig(**{**SMALL, **kw}, num_key_value_heads=2),
    "OPT": lambda **kw: transformers.OPTConfig(vocab_size=V, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, bos_token_id=None, eos_token_id=None, pad_token_id=None, **kw),
    "Phi": lambda **kw: transformers.PhiConfig(**{**SMALL, **kw}),
    "Gemma2": lambda **kw: transformers.Gemma2Config(**{**SMALL, **kw}, num_key_value_heads=2, head_dim=8, sliding_window=64),
}
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def wide(module, query, key, value, attention_mask, scaling, softcap=None, **kw):
    "transformers' eager attention with its soft cap, but a softmax that stays in the model's own type (theirs is float32)"
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap: scores = torch.tanh(scores / softcap) * softcap
    return (torch.softmax(scores + attention_mask, -1) @ value).transpose(1, 2), None


AttentionInterface.register("wide", wide)
AttentionMaskInterface.register("wide", eager_mask)


def wide_norm(norm):
    "An RMSNorm that stays in the model's own type (theirs rounds to float32, and once in a hundred million times a rounding flips)"
    return lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + norm.weight)


def bare(name, dtype=torch.float64, seed=0, own=False, **kw):
    "A model with random weights, large enough that masks and positions matter; in float64 all of it is float64, unless its `own` arithmetic is wanted"
    torch.manual_seed(seed)
    pure = dtype == torch.float64 and not own
    model = AutoModelForCausalLM.from_config(SERVED[name](**kw), attn_implementation="wide" if pure and name == "Gemma2" else None)
    with torch.no_grad():
        for w in model.parameters(): w.normal_(0, .3) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    for module in model.modules() if pure else ():
        if type(module).__name__.endswith("RMSNorm"): module.forward = wide_norm(module)
    return model.to(dtype).eval()


@torch.inference_mode()
def plainly(model, text):  # -> (V,)
    "The logits after `text` by the un-wrapped model, without a cache"
    return model(torch.tensor([text], device=model.device), use_cache=False).logits[0, -1].double().cpu().numpy()


def random_tree(rng, ctx, n, V=V):
    "A chain or a tree of n nodes, with twins among the siblings; some are probes"
    tree, chain = Tree(ctx), rng.random() < .5
    for i in range(n):
        u = len(tree) - 1 if chain else rng.randrange(len(tree))
        x = rng.choice([tree.token[c] for c in range(1, len(tree)) if tree.parent[c] == u] or [0]) if rng.random() < .15 else rng.randrange(V)
        tree.add(u, x, np.ones(V) / V if rng.random() < .8 else None)
    return tree


def history(seed, rounds=8, V=V):
    "The trees of a random run: accept part of a path, add a token; now and then go back, or start another text"
    rng = random.Random(seed)
    ctx = tuple(rng.randrange(V) for _ in range(rng.randint(1, 6)))
    for _ in range(rounds):
        tree = random_tree(rng, ctx, rng.choice([0, 1, 3, 5, 8]), V)
        yield tree
        ctx = tree.text(rng.randrange(len(tree))) + (rng.randrange(V),)
        if rng.random() < .15: ctx = ctx[:rng.randint(1, len(ctx))]
        if rng.random() < .1: ctx = tuple(rng.randrange(V) for _ in range(5))


# ---- exactly: a network of whole numbers modulo a prime, its cache, and the trie

PRIME = 10_007


def toy_rows(memory, edge, depth, see, start, layers=3):
    "Append to `memory` the rows from `start` on, each a list of its values in every layer; attention is a sum over the set of rows seen"
    for r in range(start, len(edge)): memory.append([(31 * edge[r][1] + 7 * depth[r] + 1) % PRIME])
    for layer in range(layers):
        for r in range(start, len(edge)):
            own = memory[r][layer]
            memory[r].append((own * own + depth[r] + sum(v * (v + own + 3) for v in (memory[j][layer] for j in np.flatnonzero(see[r-start])))) % PRIME)


def toy_pass(text):
    "The last row of a plain pass over one text"
    memory = []
    toy_rows(memory, [(i - 1, x) for i, x in enumerate(text)], range(len(text)), np.tri(len(text), dtype=bool), 0)
    return memory[-1]


def seen(trie, start):
    see = tree_mask(trie, start, len(trie.edge))
    return np.tri(len(trie.edge) - start, len(trie.edge), start, dtype=bool) if see is None else see


trees = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=8))


def grown(ctx, nodes):
    tree = Tree(ctx)
    for u, x in nodes: tree.add(u % len(tree), x)
    return tree


@proves("thm-masked-pass")
@given(trees)
def test_one_masked_pass_is_many_passes_exactly(drawn):
    trie, tree, memory = RowTrie(), grown(*drawn), []
    _, kept, rows = trie.turn(tree)
    assert kept == [] and len(set(trie.edge)) == len(trie.edge)
    toy_rows(memory, trie.edge, trie.depth, seen(trie, 0), 0)
    for i, r in enumerate(rows): assert memory[r] == toy_pass(tree.text(i))


@proves("thm-masked-pass")
def test_a_causal_mask_or_places_for_positions_would_not_do():
    tree, trie = grown((1,), [(0, 2), (0, 3), (2, 1)]), RowTrie()
    trie.turn(tree)
    for depth, see in (trie.depth, np.tri(4, dtype=bool)), (range(4), seen(trie, 0)):
        memory = []
        toy_rows(memory, trie.edge, depth, see, 0)
        assert [memory[i] == toy_pass(tree.text(i)) for i in range(4)] == [True, True, False, False]


@proves("thm-cache-looks", "cor-row-text")
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_the_cache_looks_exactly(seed):
    trie, memory, known = RowTrie(), [], {}
    for tree in history(seed, rounds=10, V=4):
        n, kept, rows = trie.turn(tree)
        memory = memory[:n] + [memory[r] for r in kept]
        start = len(memory)
        toy_rows(memory, trie.edge, trie.depth, seen(trie, start), start)
        trie.said.update((r, True) for r in range(max(start, len(tree.ctx) - 1), len(trie.edge)))
        assert [x for _, x in trie.edge[:len(tree.ctx)]] == list(tree.ctx)
        assert trie.row == {e: r for r, e in enumerate(trie.edge)}
        for i, r in enumerate(rows):
            text = tree.text(i)
            if text not in known: known[text] = toy_pass(text)
            assert memory[r] == known[text] and r in trie.said


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a, b):
    k = common_prefix_len(tuple(a), tuple(b))
    assert a[:k] == b[:k] and (k == min(len(a), len(b)) or a[k] != b[k])


# ---- real networks

@proves("thm-masked-pass")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("name", SERVED)
def test_tree_pass_is_plain_passes(name, dtype, tolerance):
    "The target contract, on the un-wrapped model; tolerances are relative to the largest logit"
    model = bare(name, dtype)
    served, rng = HFModel(model), random.Random(1)
    for n in (0, 4, 9):
        tree = random_tree(rng, (3, 1, 4), n)
        got, p = HFModel(model, check=False).logits(tree), served(tree)
        want = np.stack([plainly(model, tree.text(i)) for i in range(len(tree))])
        assert abs(got - want).max() <= tolerance * abs(want).max()
        if dtype == torch.float64: assert max(abs(p[i] - warp(z)).max() for i, z in enumerate(want)) < 1e-10


@proves("thm-cache-looks")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SERVED)
def test_cached_is_fresh(name, seed):
    model = bare(name)
    served = HFModel(model, temperature=.8, check=False)
    for tree in history(seed):
        before, p = served.meter.copy(), served(tree)
        fresh = HFModel(model, temperature=.8, check=False)(tree)
        assert max(abs(p[i] - fresh[i]).max() for i in range(len(tree))) < 1e-10
        assert max(abs(p[i] - warp(plainly(model, tree.text(i)), .8)).max() for i in range(len(tree))) < 1e-10
        assert (served.meter - before).calls <= 1


@proves("thm-cache-looks")
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([1, 3, 1024]))
def test_cached_is_fresh_on_any_history(seed, chunk):
    model = bare("Llama")
    served = HFModel(model, chunk=chunk, check=False)
    for tree in history(seed):
        got = served.logits(tree)
        for i in (0, len(tree) - 1): assert abs(got[i] - plainly(model, tree.text(i))).max() < 1e-10


@pytest.mark.parametrize("name", SERVED)
def test_by_its_own_arithmetic(name):
    "With transformers' float32 softmax and norms the order of the rows may show, at float32's scale and no larger"
    model = bare(name, own=True)
    served = HFModel(model)
    for tree in history(5):
        got = served.logits(tree)
        assert max(abs(got[i] - plainly(model, tree.text(i))).max() for i in range(len(tree))) < 1e-6


def test_rows_outlive_the_cache():
    "Rows read late, after the cache has moved on, are still those of their own tree"
    model = bare("Llama")
    served, asked = HFModel(model), []
    for tree in history(11): asked.append((tree, served(tree)))
    for tree, p in asked:
        for i in range(len(tree)): assert abs(p[i] - warp(plainly(model, tree.text(i)))).max() < 1e-10


def test_each_call_feeds_only_what_is_new():
    served, fed = HFModel(bare("Llama")), []
    def call(tree):
        before = served.meter.copy()
        served(tree)
        fed.append((served.meter - before).tokens)
    tree = Tree((1, 2, 3))
    call(tree)                                             # the context
    for i in range(3): tree.add(i, 10 + i); call(tree)     # a growing chain: one token a call
    call(tree)                                             # the same again: no pass
    call(grown((1, 2, 3, 10, 11, 7), []))                  # two accepted, and another token
    call(grown((1, 2, 3, 10, 11, 7), [(0, 5), (0, 6), (2, 8)]))
    call(grown((1, 2, 3, 10, 11, 7, 6, 8, 9), []))         # the second branch accepted: its rows move
    call(grown((1, 2, 3, 10, 11, 7, 6, 8, 9), [(0, 4), (0, 4)]))   # twins share a row
    call(grown((1, 2, 3), []))                             # an old context, whose answer is gone: its last token again
    assert fed == [3, 1, 1, 1, 0, 1, 3, 1, 1, 1]
    assert served.meter.calls == 9 and served.meter.layer_tokens == 2 * sum(fed) and served.meter.kv_bytes > 0


def test_after_a_full_acceptance_the_cache_feeds_the_token_that_was_never_fed():
    model = bare("Llama")
    target, draft = HFModel(model), HFModel(model)
    text = generate(target, Chain(draft, 3), reject, (1, 2), 16, Seeded(0))   # the draft is the target: all accepted
    assert text.ledger.num_accepted_tokens == text.ledger.num_draft_tokens == 12
    assert text.ledger.models["draft"].tokens == 2 + 1 + 1 + 3 * (2 + 1 + 1) and text.ledger.models["target"].tokens == 2 + 3 + 3 * (1 + 3)


def test_a_failed_pass_leaves_an_empty_cache(monkeypatch):
    model = bare("Llama")
    served, second = HFModel(model), model.model.layers[1]
    served(grown((1, 2, 3), [(0, 4)]))
    def broken(*args, **kw): raise KeyboardInterrupt
    monkeypatch.setattr(second, "forward", broken)
    tree = grown((1, 2, 3, 8, 9, 5), [(0, 6), (0, 7)])
    with pytest.raises(KeyboardInterrupt): served(tree)
    monkeypatch.undo()
    assert abs(served.logits(tree)[2] - plainly(model, tree.text(2))).max() < 1e-10
    for tree in history(2): assert abs(served.logits(tree)[-1] - plainly(model, tree.text(len(tree) - 1))).max() < 1e-10
    with pytest.raises(ValueError, match="token: got 64"): served(grown((1, 2), [(0, 64)]))
    with pytest.raises(ValueError, match="ctx: got an empty context"): served(Tree(()))
    assert abs(served.logits(Tree((5, 6)))[0] - plainly(model, (5, 6))).max() < 1e-10


def test_only_the_rows_that_answer_are_scored(monkeypatch):
    model, asked = bare("Llama"), []
    served, inner = HFModel(model), model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda h: asked.append(h.shape[1]) or inner(h))
    served(grown(range(1, 30), [(0, 4), (0, 5)]))
    served.states(range(1, 40))
    served(Tree(range(1, 45)))
    assert asked == [3, 1, 1]


def test_dropout_is_off():
    model = bare("GPT2").train()
    assert (HFModel(model).law((1, 2)) == HFModel(model).law((1, 2))).all()


def test_buffers_double():
    memory = RowCache()
    for k in range(200):
        memory.put("x", torch.full((1, 2, 1, 3), float(k)))
        memory.n += 1
    assert 200 <= memory.buffer["x"].shape[-2] <= 400 and memory.buffer["x"][0, 1, :200, 2].tolist() == list(range(200))
    memory.gather(2, [2, 5, 4])
    assert memory.n == 5 and memory.buffer["x"][0, 0, :5, 0].tolist() == [0, 1, 2, 5, 4]


# ---- laws

@pytest.mark.parametrize("options", [dict(temperature=.5), dict(temperature=1.3, top_k=5), dict(top_p=.7), dict(temperature=.7, top_k=20, top_p=.9), dict(temperature=0, top_k=3)])
def test_warps_are_those_of_chapter_0(options):
    model, tree = bare("Llama"), grown((3, 1), [(0, 4), (0, 1), (2, 5)])
    p, raw = HFModel(model, **options)(tree), HFModel(model).logits(tree)
    for i in range(len(tree)): assert abs(p[i] - warp(raw[i], **options)).max() < 1e-12


@pytest.mark.parametrize("options", [{}, dict(temperature=0), dict(temperature=.4, top_k=3), dict(temperature=2., top_p=.3),
                                     dict(processors=[lambda ids, z: z.mul_(-1)], top_k=1)])
def test_raw_weights_stand_before_every_warp(options):
    "e^(z - max z) of the bare logits, node by node, in their order, read before the law or after it; no pass and no count more"
    model, tree = bare("Llama"), grown((3, 1), [(0, 4), (0, 1), (2, 5)])
    served = HFModel(model, **options)
    p, meter = served(tree), served.meter.copy()
    raw = [p.raw(i) for i in range(len(tree))]
    again = served(tree)   # from the cache
    for i in range(len(tree)):
        z, law = plainly(model, tree.text(i)), p[i]
        assert raw[i].dtype == np.float64 and raw[i].min() >= 0 and raw[i].max() == 1 and abs(raw[i] - np.exp(z - z.max())).max() < 1e-10
        assert (np.argsort(-raw[i], kind="stable") == np.argsort(-z, kind="stable")).all()
        assert (p.raw(i) == raw[i]).all() and (again.raw(i) == raw[i]).all()
        assert (abs(raw[i] / raw[i].sum() - law).max() < 1e-12) == (not options)
    assert served.meter == meter and meter.calls == 1


def test_a_processor_sees_the_true_text_of_each_node():
    model, tree = bare("Llama"), grown((3, 1), [(0, 4), (0, 5), (2, 6), (2, 4), (3, 3)])
    shared = LogitsProcessorList([lambda ids, z: z.mul_(1.1), RepetitionPenaltyLogitsProcessor(1.7), MinLengthLogitsProcessor(4, 7, device="cpu"), TemperatureLogitsWarper(.6), TopKLogitsWarper(9)])
    target, draft = HFModel(model, processors=shared), HFModel(model, processors=shared)
    p, q = target(tree), draft(tree)
    for i in range(len(tree)):
        z = shared(torch.tensor([tree.text(i)]), torch.tensor(plainly(model, tree.text(i)))[None])[0]
        assert abs(p[i] - torch.softmax(z, -1).numpy()).max() < 1e-10 and (p[i] == q[i]).all()
        assert (p[i][7] == 0) == (len(tree.text(i)) < 4) or p[i][7] == 0
    assert abs(target.logits(tree)[0] - plainly(model, (3, 1))).max() < 1e-10   # the raw logits are not touched


def test_greedy_is_a_point_mass_on_the_lowest_of_equals():
    model = bare("Llama")
    with torch.no_grad(): model.lm_head.weight[7] = model.lm_head.weight[3] = 100 * model.lm_head.weight[3]
    rows = [HFModel(model, temperature=0).law((x,)) for x in range(20)]
    assert all(sorted(p)[-2:] == [0, 1] for p in rows) and any(p[3] == 1 for p in rows) and not any(p[7] == 1 for p in rows)


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_make_no_law(fill):
    spoil = LogitsProcessorList([lambda ids, z: torch.full_like(z, fill)])
    with pytest.raises(ValueError, match="logits: got a largest value of"): HFModel(bare("Llama"), processors=spoil).law((1,))


@pytest.mark.parametrize("options", [dict(temperature=-1), dict(temperature=float("nan")), dict(top_k=0), dict(top_p=0), dict(top_p=1.5), dict(keep=(3,)), dict(keep=(-1,))])
def test_bad_options(options):
    with pytest.raises(ValueError, match=next(iter(options)).replace("keep", "layers")): HFModel(bare("Llama"), **options)


@pytest.mark.parametrize("name, verify, gamma", [("Llama", reject, 2), ("GPT2", reject, 1), ("Qwen2", match, 1)])
def test_exact_law_of_speculative_sampling_on_a_transformer(name, verify, gamma):
    "Every road of a whole generation; each road sends both caches back to an earlier text"
    p, q = HFModel(bare(name, vocab_size=3)), HFModel(bare("Llama", seed=9, vocab_size=3), temperature=1.5)
    law = law_of(lambda rng: tuple(generate(p, Chain(q, gamma), verify, (0,), 2, rng)))
    assert tv_outcomes(law, target_law(p, (0,), 2)) < 1e-10 and len(law) == 9


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen2", "Mistral"])
def test_greedy_identity(name):
    model, other = bare(name), bare(name)
    with torch.no_grad():
        for w in other.parameters(): w.add_(.02 * torch.randn_like(w))
    target, draft = HFModel(model, temperature=0), HFModel(other, temperature=0)
    for prompt in ((1, 2, 3), (60, 5), (7,)):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt):].tolist()
        for drafter, verify in (no_draft, match), (Chain(draft, 4), match), (Chain(draft, 4), reject), (Chain(target, 3), reject):
            assert list(generate(target, drafter, verify, prompt, 24, Seeded(0))) == want


# ---- hidden states

@proves("thm-cache-looks")
@pytest.mark.parametrize("name", SERVED)
def test_states_follow_the_cache(name):
    model = bare(name)
    served = HFModel(model, keep=(0, 1, 2))
    for tree in history(3):
        served(tree)
        before = served.meter.calls
        for text in {tree.text(len(tree) - 1), tree.ctx}:
            with torch.inference_mode(): want = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            served(tree); before = served.meter.calls
            got = served.states(text)
            assert served.meter.calls == before and list(got) == [0, 1, 2]
            for k in got: assert got[k].shape == (len(text), 32) and abs(got[k] - want[k][0]).max() < 1e-9
            before = served.meter.calls


def test_states_that_were_not_kept_are_computed():
    model = bare("Llama")
    kept, bare_of_states = HFModel(model, keep=(1,)), HFModel(model)
    a, b = kept.states((1, 2, 3)), bare_of_states.states((1, 2, 3), layers=(1, 2))
    assert abs(a[1] - b[1]).max() < 1e-10 and kept.meter.tokens == bare_of_states.meter.tokens == 3
    torch.nn.Linear(32, 1).double()(a[1]).sum().backward()          # usable for training a head
    kept((tree := grown((1, 2, 3), [(0, 4)]))); a[1].zero_()        # a copy: the cache does not notice
    assert abs(kept.states((1, 2, 3))[1] - b[1]).max() < 1e-10
    with pytest.raises(ValueError, match="layers: got 5"): bare_of_states.states((1,), layers=(5,))


# ---- what is refused

def small(name, **kw): return AutoModelForCausalLM.from_config(getattr(transformers, name + "Config")(**kw))


REFUSED = {
    "recurrent state": [lambda: small("Mamba", vocab_size=V, hidden_size=32, num_hidden_layers=2),
                        lambda: small("Mamba2", vocab_size=V, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=1),
                        lambda: small("RecurrentGemma", vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, lru_width=32, head_dim=8, num_key_value_heads=1),
                        lambda: small("Lfm2", **SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
                        lambda: small("Qwen3Next", **SMALL, num_key_value_heads=2, head_dim=8, layer_types=["linear_attention", "full_attention"], num_experts=2),
                        lambda: small("Rwkv", vocab_size=V, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)],
    "ALiBi": [lambda: small("Bloom", vocab_size=V, hidden_size=32, n_layer=2, n_head=4),
              lambda: small("Mpt", vocab_size=V, d_model=32, n_layers=2, n_heads=4),
              lambda: small("Falcon", vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)],
    "encoder-decoder": [lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=V, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8))],
    "HFModel.load": [lambda: "gpt2"],
    "no head": [lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL))],
}


@pytest.mark.parametrize("why, model", [(why, m) for why, models in REFUSED.items() for m in models])
def test_refused_in_words(why, model):
    with pytest.raises(Unservable, match=why): HFModel(model())


@pytest.mark.parametrize("model", REFUSED["recurrent state"] + REFUSED["ALiBi"])
def test_the_check_alone_would_refuse_them(model, monkeypatch):
    monkeypatch.setattr("specref.models.transformer.why_unservable", lambda model: "")
    with pytest.raises(Unservable, match="off its plain passes|wanted one that reads a tree"): HFModel(model())


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Phi", "GPT2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_check_measures_a_model_that_ignores_what_it_is_given(ignored, name, dtype):
    model = bare(name, dtype, own=True)
    inner = model.forward
    model.forward = lambda *args, **kw: inner(*args, **{**kw, ignored: None})
    with pytest.raises(Unservable, match=r"tree pass is [\d.e-]+ off its plain passes"): HFModel(model)


def test_lengths_are_limited():
    def refused(model, most, why):
        served = HFModel(model)
        served(Tree(range(1, most)))
        assert abs(served.logits(grown(range(1, most), [(0, 3)]))[1] - plainly(model, (*range(1, most), 3))).max() < 1e-4
        with pytest.raises(Unservable, match=f"{most + 1} tokens, drafted ones included, wanted at most {most}: .*{why}"): served(grown(range(1, most), [(0, 3), (1, 4)]))
    refused(bare("Llama", max_position_embeddings=12), 12, "no later position")
    refused(bare("GPT2", n_positions=12), 12, "no later position")
    refused(AutoModelForCausalLM.from_config(transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=9)), 9, "sliding window")
    refused(AutoModelForCausalLM.from_config(transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, sliding_window=9)), 9, "sliding window")
    refused(AutoModelForCausalLM.from_config(transformers.GPTNeoConfig(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=9)), 9, "sliding window")
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.] * 4, long_factor=[2.] * 4, original_max_position_embeddings=9)
    refused(AutoModelForCausalLM.from_config(transformers.Phi3Config(**{**SMALL, "pad_token_id": 0}, num_key_value_heads=4, max_position_embeddings=64, original_max_position_embeddings=9, rope_parameters=rope)), 9, "other angles")


@pytest.mark.parametrize("build", [lambda d: Chain(d, 4), lambda d: Branching(d, (2, 1, 1)), lambda d: PromptLookup(V, 2, 4)], ids=["chain", "tree", "lookup"])
def test_the_last_position_can_be_reached(build):
    "Where a draft no longer fits, the loop goes on without one: 12 positions hold every token but the last of 13"
    model = bare("Llama", max_position_embeddings=12)
    target, draft = HFModel(model, temperature=0), HFModel(model, temperature=0)
    ctx = (1, 2, 1, 2)
    long = generate(target, build(draft), reject, ctx, 9, Seeded(0))
    assert long == generate(target, autoregressive.drafter, match, ctx, 9, Seeded(0)) and len(long) == 9
    assert long.ledger.num_accepted_tokens > 0 and long.ledger.column("drafted")[-1] == 0
    with pytest.raises(Unservable, match="13 tokens"): generate(target, build(draft), reject, ctx, 10, Seeded(0))


# ---- checkpoints and devices

def test_load(tmp_path):
    model = bare("Llama", torch.float32)
    model.save_pretrained(tmp_path / "good")
    served = HFModel.load(tmp_path / "good", temperature=.5, dtype=torch.float64)
    assert served.V == V and abs(served.law((1, 2)) - HFModel(model, temperature=.5).law((1, 2))).max() < 1e-4
    assert HFModel.load(tmp_path / "good").model.dtype == torch.float32
    weights = tmp_path / "good" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="path: got .*good"): HFModel.load(tmp_path / "good")
    from safetensors.torch import load, save_file
    state = load(whole)
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="path: got .* without 1 weights, model.layers.1.mlp.up_proj.weight"): HFModel.load(tmp_path / "good")
    (tmp_path / "good" / "config.json").write_text("{")
    for path in tmp_path / "good", tmp_path / "none":
        with pytest.raises(ValueError, match="path: got .*, wanted a readable checkpoint"): HFModel.load(path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_cuda(dtype, tolerance):
    model = bare("Qwen2", dtype).cuda()
    served = HFModel(model, keep=(1,))
    for tree in history(0):
        got = served.logits(tree)
        want = np.stack([plainly(model, tree.text(i)) for i in range(len(tree))])
        assert abs(got - want).max() <= tolerance * abs(want).max()
        assert served.states(tree.ctx)[1].is_cuda
