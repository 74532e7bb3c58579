"07_transformer: one masked pass equals n passes; its rows depend on the tree alone; models refused"
import random, re, warnings
from collections import Counter
from inspect import signature
from types import SimpleNamespace

import numpy as np, pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.masking_utils import create_chunked_causal_mask, eager_mask
from helpers import examples, proves
from house import ROOT
from specref import (autoregressive, Branching, Chain, embedded, generate, HFModel, match, PackedLlama,
                     PromptLookup, reject, Seeded, Tree, warp)
from specref.core.check import read_record
from specref.models.transformer import (CACHE_NAMES, COMPARED, RowTrie, Unservable, cache_name, given_cache,
                                        tree_mask)

V = 64
NONE = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
BASE = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2)
SMALL = dict(**BASE, num_attention_heads=4, intermediate_size=64, **NONE)
GPT = dict(vocab_size=V, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
OPT = dict(**BASE, ffn_dim=64, num_attention_heads=4, **NONE)
SUPPORTED = {   # name -> the options of its configuration
    "Llama": SMALL | dict(num_key_value_heads=4),
    "GPT2": GPT,
    "Qwen2": SMALL | dict(num_key_value_heads=2),
    "GPTNeoX": SMALL,
    "Mistral": SMALL | dict(num_key_value_heads=2),
    "OPT": OPT | dict(word_embed_proj_dim=32),
    "Phi": SMALL,
    "Gemma2": SMALL | dict(num_key_value_heads=2, head_dim=8, sliding_window=64),
}
transformers.logging.set_verbosity_error()

def small(name, attention=None, **options):
    config = getattr(transformers, name + "Config")(**options)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)

def wide(module, query, key, value, attention_mask, scaling, softcap=None, **kw):
    "transformers' eager attention, but a softmax in the model's own type (theirs is float32)"
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap: scores = torch.tanh(scores / softcap) * softcap
    return (torch.softmax(scores + attention_mask, -1) @ value).transpose(1, 2), None

AttentionInterface.register("wide", wide)
AttentionMaskInterface.register("wide", eager_mask)

def wide_norm(norm):
    "An RMSNorm in the model's own type (theirs rounds to float32, and rarely a rounding flips)"
    return lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + norm.weight)

def bare(name, dtype=torch.float64, seed=0, own=False, **kw):
    "A model with large random weights; float64 throughout, unless its `own` arithmetic is wanted"
    torch.manual_seed(seed)
    pure = dtype == torch.float64 and not own
    model = small(name, "wide" if pure and name == "Gemma2" else None, **SUPPORTED[name] | kw)
    with torch.no_grad():
        for w in model.parameters(): w.normal_(0, .3) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    for module in model.modules() if pure else ():
        if type(module).__name__.endswith("RMSNorm"): module.forward = wide_norm(module)
    return model.to(dtype).eval()

@torch.inference_mode()
def plainly(model, text):  # -> (V,)
    "The logits after `text` by the un-wrapped model, without a cache"
    ids = torch.tensor([text], device=model.device)
    return model(ids, use_cache=False).logits[0, -1].double().cpu().numpy()

def plain_rows(model, tree): return np.stack([plainly(model, tree.text(i)) for i in range(len(tree))])

def random_tree(rng, ctx, n, V=V):
    "A chain or a tree of n nodes, with equal siblings among them; some are probes"
    tree, chain = Tree(ctx), rng.random() < .5
    for i in range(n):
        u = len(tree) - 1 if chain else rng.randrange(len(tree))
        there = [tree.token[c] for c in tree.children(u)] or [0]
        x = rng.choice(there) if rng.random() < .15 else rng.randrange(V)
        tree.add(u, x, np.ones(V) / V if rng.random() < .8 else None)
    return tree

def history(seed, rounds=8, V=V):
    "The trees of a random run: accept part of a path, add a token; sometimes go back, or start another text"
    rng = random.Random(seed)
    ctx = tuple(rng.randrange(V) for _ in range(rng.randint(1, 6)))
    for _ in range(rounds):
        tree = random_tree(rng, ctx, rng.choice([0, 1, 3, 5, 8]), V)
        yield tree
        ctx = tree.text(rng.randrange(len(tree))) + (rng.randrange(V),)
        if rng.random() < .15: ctx = ctx[:rng.randint(1, len(ctx))]
        if rng.random() < .1: ctx = tuple(rng.randrange(V) for _ in range(5))

def grown(ctx, nodes=()):
    tree = Tree(ctx)
    for u, x in nodes: tree.add(u % len(tree), x)
    return tree

# ---- exactly: a network of whole numbers modulo a prime, its cache, and the trie

def toy_rows(memory, edge, depth, see, start, layers=3, prime=10_007):
    "Append the rows from `start` on, each its values by layer; attention is a sum over the visible rows"
    for r in range(start, len(edge)): memory.append([(31 * edge[r][1] + 7 * depth[r] + 1) % prime])
    for layer in range(layers):
        for r in range(start, len(edge)):
            own, seen = memory[r][layer], np.flatnonzero(see[r - start])
            attended = sum(memory[j][layer] * (memory[j][layer] + own + 3) for j in seen)
            memory[r].append((own * own + depth[r] + attended) % prime)

def toy_pass(text):
    "The last row of a plain pass over one text"
    memory, n = [], len(text)
    toy_rows(memory, [(i - 1, x) for i, x in enumerate(text)], range(n), np.tri(n, dtype=bool), 0)
    return memory[-1]

def visible(trie, start):
    end, see = len(trie.edge), tree_mask(trie, start, len(trie.edge))
    return np.tri(end - start, end, start, dtype=bool) if see is None else see

@proves("thm-masked-pass", "thm-cache-looks", "cor-row-text")
@examples(60, st.integers(0, 10**9))
def test_the_cache_is_exact(seed):
    "The first call of a history is one masked pass without a cache; later calls reuse rows"
    trie, memory = RowTrie(), []
    for tree in history(seed, rounds=10, V=4):
        n, old, rows = trie.turn(tree)
        memory = memory[:n] + [memory[r] for r in old]
        start = len(memory)
        toy_rows(memory, trie.edge, trie.depth, visible(trie, start), start)
        trie.answers.update((r, True) for r in range(max(start, len(tree.ctx) - 1), len(trie.edge)))
        assert [x for _, x in trie.edge[:len(tree.ctx)]] == list(tree.ctx)
        assert trie.row == {e: r for r, e in enumerate(trie.edge)}
        for i, r in enumerate(rows): assert memory[r] == toy_pass(tree.text(i)) and r in trie.answers

# ---- real networks

@proves("thm-masked-pass")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("name", SUPPORTED)
def test_tree_pass_equals_plain_passes(name, dtype, tolerance):
    "Tolerances are relative to the largest logit; float64 is the next test"
    model = bare(name, dtype)
    HFModel(model)   # passes its own check
    tree = random_tree(random.Random(1), (3, 1, 4), 9)
    want = plain_rows(model, tree)
    assert abs(HFModel(model, check=False).logits(tree) - want).max() <= tolerance * abs(want).max()

@proves("thm-cache-looks")
@pytest.mark.parametrize("own, tolerance", [(False, 1e-10), (True, 1e-6)])
@pytest.mark.parametrize("name", SUPPORTED)
def test_cached_rows_are_those_of_plain_passes(name, own, tolerance):
    "Logits and hidden states; rows also when read after the run. `own`: with transformers' float32 softmax"
    model, laws = bare(name, own=own), []
    served = HFModel(model, temperature=.8, keep=(0, 1, 2))
    for tree in history(3):
        before, p, want = served.meter.calls, served(tree), plain_rows(model, tree)
        assert abs(served.logits(tree) - want).max() < tolerance
        laws += [(p, i, warp(z, .8)) for i, z in enumerate(want)]
        for text in {tree.text(len(tree) - 1), tree.ctx}:
            with torch.inference_mode(): plain = model(torch.tensor([text]), output_hidden_states=True)
            served(tree)
            got = served.states(text)
            assert list(got) == [0, 1, 2] and all(h.shape == (len(text), 32) for h in got.values())
            for k in got: assert abs(got[k] - plain.hidden_states[k][0]).max() < 10 * tolerance
        assert served.meter.calls <= before + 2
    assert max(abs(p[i] - want).max() for p, i, want in laws) < tolerance

@proves("thm-cache-looks")
@examples(15, st.integers(0, 10**9), st.sampled_from([1, 3, 1024]))
def test_cached_rows_on_any_history(seed, chunk):
    model = bare("Llama")
    served = HFModel(model, chunk=chunk, check=False)
    for tree in history(seed):
        got = served.logits(tree)
        for i in (0, len(tree) - 1): assert abs(got[i] - plainly(model, tree.text(i))).max() < 1e-10

def test_each_call_feeds_only_new_tokens():
    served, fed, ctx = HFModel(bare("Llama")), [], (1, 2, 3, 10, 11, 7)
    chain = [grown((1, 2, 3), [(i, 10 + i) for i in range(k)]) for k in range(4)]
    calls = [
        *chain, chain[-1],                            # the context, a growing chain, the same again
        grown(ctx),                                   # two accepted, and another token
        grown(ctx, [(0, 5), (0, 6), (2, 8)]),
        grown((*ctx, 6, 8, 9)),                       # the second branch accepted: its rows move
        grown((*ctx, 6, 8, 9), [(0, 4), (0, 4)]),     # equal siblings share a row
        grown((1, 2, 3))]                             # an old context, its row not stored: the last token
    for tree in calls:
        before = served.meter.copy()
        served(tree)
        fed.append((served.meter - before).tokens)
    assert fed == [3, 1, 1, 1, 0, 1, 3, 1, 1, 1]
    assert served.meter.calls == 9 and served.meter.layer_tokens == 2 * sum(fed) and served.meter.kv_bytes > 0

def test_a_failed_pass_leaves_an_empty_cache(monkeypatch):
    model = bare("Llama")
    served, tree = HFModel(model), grown((1, 2, 3, 8, 9, 5), [(0, 6), (0, 7)])
    served(grown((1, 2, 3), [(0, 4)]))
    def broken(*args, **kw): raise KeyboardInterrupt
    monkeypatch.setattr(model.model.layers[1], "forward", broken)
    with pytest.raises(KeyboardInterrupt): served(tree)
    monkeypatch.undo()
    assert abs(served.logits(tree) - plain_rows(model, tree)).max() < 1e-10
    with pytest.raises(ValueError, match="token: got 64"): served(grown((1, 2), [(0, 64)]))
    assert abs(served.logits(tree) - plain_rows(model, tree)).max() < 1e-10

def test_only_the_rows_of_nodes_are_scored(monkeypatch):
    model, scored = bare("Llama"), []
    served, inner = HFModel(model), model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda h: scored.append(h.shape[1]) or inner(h))
    served(grown(range(1, 30), [(0, 4), (0, 5)]))
    served.states(range(1, 40))
    served(Tree(range(1, 45)))
    assert scored == [3, 1, 1]

def test_dropout_is_off():
    model = bare("GPT2").train()
    assert (HFModel(model).law((1, 2)) == HFModel(model).law((1, 2))).all()

# ---- distributions

@pytest.mark.parametrize("options", [
    {}, dict(temperature=.5), dict(temperature=1.3, top_k=5), dict(top_p=.7), dict(temperature=0, top_k=3),
    dict(temperature=.7, top_k=20, top_p=.9)])
def test_warps_are_those_of_chapter_0_and_raw_weights_are_unwarped(options):
    "`raw` is e^(z - max z) of the unwarped logits, read before the row or after it, in the same pass"
    model, tree = bare("Llama"), grown((3, 1), [(0, 4), (0, 1), (2, 5)])
    served = HFModel(model, **options)
    p = served(tree)
    for i, z in enumerate(plain_rows(model, tree)):
        before, law = p.raw(i), p[i]
        assert abs(law - warp(z, **options)).max() < 1e-10
        assert before.max() == 1 and abs(before - np.exp(z - z.max())).max() < 1e-10
        assert (p.raw(i) == before).all()
    assert served.meter.calls == 1

def test_a_processor_gets_the_text_of_each_node():
    model, tree = bare("Llama"), grown((3, 1), [(0, 4), (0, 5), (2, 6), (2, 4), (3, 3)])
    shared = LogitsProcessorList([
        lambda ids, z: z.mul_(1.1), RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(.6),
        MinLengthLogitsProcessor(4, 7, device="cpu"), TopKLogitsWarper(9)])
    served = HFModel(model, processors=shared)
    p = served(tree)
    for i, z in enumerate(plain_rows(model, tree)):
        z = shared(torch.tensor([tree.text(i)]), torch.tensor(z)[None])[0]
        assert abs(p[i] - torch.softmax(z, -1).numpy()).max() < 1e-10
    assert abs(served.logits(tree) - plain_rows(model, tree)).max() < 1e-10   # the raw logits do not change

def test_states_that_were_not_stored_are_computed():
    stored, without = HFModel(bare("Llama"), keep=(1,)), HFModel(bare("Llama"))
    a, b = stored.states((1, 2, 3)), without.states((1, 2, 3), layers=(1, 2))
    assert abs(a[1] - b[1]).max() < 1e-10 and stored.meter.tokens == without.meter.tokens == 3
    torch.nn.Linear(32, 1).double()(a[1]).sum().backward()          # usable for training a head
    a[1].zero_()                                                    # a copy: the cache does not change
    assert abs(stored.states((1, 2, 3))[1] - b[1]).max() < 1e-10

# ---- models and lengths that are refused

HEADS = dict(head_dim=8, num_key_value_heads=2)
T5 = dict(vocab_size=V, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8)
REFUSED = {
    "recurrent state": [
        lambda: small("Mamba", **BASE),
        lambda: small("Lfm2", **SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
        lambda: small("Qwen3Next", **SMALL, **HEADS, num_experts=2,
                      layer_types=["linear_attention", "full_attention"]),
        lambda: small("Rwkv", **BASE, attention_hidden_size=32)],
    "ALiBi": [
        lambda: small("Bloom", vocab_size=V, hidden_size=32, n_layer=2, n_head=4),
        lambda: small("Mpt", vocab_size=V, d_model=32, n_layers=2, n_heads=4),
        lambda: small("Falcon", **BASE, num_attention_heads=4, alibi=True)],
    "encoder-decoder": [lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))],
    "no head": [lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL))],
}

@pytest.mark.parametrize("why, make", [(why, make) for why in REFUSED for make in REFUSED[why]])
def test_refused_by_name_and_by_the_check(why, make, monkeypatch):
    "ALiBi where one masked pass is demanded; what has no rows, always"
    model = make()
    if why != "ALiBi":
        with pytest.raises(Unservable, match=why): HFModel(model)
    with pytest.raises(Unservable, match=why): HFModel(model, paths=False)
    for name in ("why_rowless", "has_alibi"):
        monkeypatch.setattr(f"specref.models.transformer.{name}", lambda *args: "")
    if why in ("recurrent state", "ALiBi"):
        words = "off its plain passes|one that reads a tree|takes no cache"
        with pytest.raises(Unservable, match=words): HFModel(model, paths=False)
        if why == "recurrent state":
            with pytest.raises(Unservable, match=words): HFModel(model)

@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_check_detects_a_model_that_ignores_an_argument(ignored, name, dtype):
    model = bare(name, dtype, own=True)
    inner = model.forward
    model.forward = lambda *args, **kw: inner(*args, **{**kw, ignored: None})
    words = r"tree pass is [\d.e-]+ off its plain passes"
    with pytest.raises(Unservable, match=words): HFModel(model, paths=False)
    with pytest.warns(UserWarning, match=words): assert HFModel(model).by_paths

ROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.] * 4, long_factor=[2.] * 4,
            original_max_position_embeddings=9)
LONG = dict(max_position_embeddings=64, original_max_position_embeddings=9, rope_parameters=ROPE)
NEO = dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])

@pytest.mark.parametrize("why, most, name, options", [
    ("no later position", 12, "GPT2", GPT | dict(n_positions=12)),
    ("other angles", 9, "Phi3", SMALL | LONG | dict(num_key_value_heads=4, pad_token_id=0))])
def test_lengths_are_limited(why, most, name, options):
    model, ctx = small(name, **options).eval(), range(1, most)
    served = HFModel(model)
    assert abs(served.logits(grown(ctx, [(0, 3)]))[1] - plainly(model, (*ctx, 3))).max() < 1e-4
    words = f"{most + 1} tokens, drafted ones included, wanted at most {most}: .*{why}"
    with pytest.raises(Unservable, match=words): served(grown(ctx, [(0, 3), (1, 4)]))

def loud(name, **options):
    "A small model of any family in float64, with large random weights"
    torch.manual_seed(0)
    model = small(name, **options)
    with torch.no_grad():
        for w in model.parameters(): w.normal_(0, .3) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    return model.double().eval()

KINDS = ["sliding_attention", "full_attention"]
WINDOWED = dict(**SMALL, **HEADS, sliding_window=8)
# transformers 5.13: its `create_masks_for_generate` raises a TypeError for chunks, so paths are read
NO_CHUNKS = "block_sequence_ids" not in signature(create_chunked_causal_mask).parameters
WINDOWS = {   # name -> options, is it read by paths
    "Mistral": (WINDOWED, False), "Gemma3Text": (WINDOWED | dict(layer_types=KINDS), False),
    "Qwen2": (WINDOWED | dict(use_sliding_window=True, max_window_layers=1, layer_types=KINDS[::-1]), False),
    "Llama4Text": (SMALL | HEADS | dict(attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=64,
                                        layer_types=["chunked_attention", "full_attention"]), NO_CHUNKS),
    "GPTNeo": (NEO | dict(vocab_size=V, window_size=8), True),
}
BY_PATHS = {   # ALiBi, by place in memory; no position ids and no 4-D masks
    "Bloom": dict(vocab_size=V, hidden_size=32, n_layer=2, n_head=4),
    "Mpt": dict(vocab_size=V, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "Falcon": BASE | dict(num_attention_heads=4, alibi=True),
    "OpenAIGPT": dict(vocab_size=V, n_embd=32, n_layer=2, n_head=4),   # no cache: whole texts
    "Bart": dict(vocab_size=V, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64),
}

def deviation(model, served, length, seed=0):
    "Of the logits of random trees, some branches accepted, others rejected, until a text has `length` tokens"
    rng, ctx, off = random.Random(seed), (1, 2), []
    while len(ctx) < length:
        tree = random_tree(rng, ctx, 6, V)
        off.append(abs(served.logits(tree) - plain_rows(model, tree)).max())
        ctx = (*tree.text(rng.randrange(len(tree))), rng.randrange(V))
    return max(off)

@proves("thm-masked-pass")
@pytest.mark.filterwarnings("ignore:model")
@pytest.mark.parametrize("name", WINDOWS)
def test_three_windows_of_text(name):
    "Exact far past a window of 8: by one masked pass, or path by path where the window is a buffer of places"
    options, by_paths = WINDOWS[name]
    model = loud(name, **options)
    served = HFModel(model)
    assert not served.by_paths and deviation(model, served, 25) < 1e-5
    assert served.by_paths == by_paths
    narrow = HFModel(model, paths=False)
    if by_paths:
        words = "off its plain passes|unexpected keyword argument"
        with pytest.raises(Unservable, match=words): deviation(model, narrow, 25)
        with pytest.raises(Unservable, match="wanted at most 8: a sliding window"): narrow.law(range(9))

def test_a_window_as_long_as_the_last_position():
    "More rows than the window, in texts that are not longer: nothing to refuse"
    model = loud("Mistral", **WINDOWED | dict(max_position_embeddings=8))
    served, tree = HFModel(model), grown(range(7), [(0, x) for x in range(5)])
    assert abs(served.logits(tree) - plain_rows(model, tree)).max() < 1e-5 and not served.by_paths
    with pytest.raises(Unservable, match="no later position"): served.law(range(9))

def test_a_window_over_places_is_detected(monkeypatch):
    "A mutant: a tree past the window gets the mask of a tree without one"
    causal = lambda config, start, end: np.tri(end - start, end, start, dtype=bool)
    monkeypatch.setattr("specref.models.transformer.plain_masks", causal)
    served = HFModel(loud("Mistral", **WINDOWED), paths=False)
    served.law(range(8))
    with pytest.raises(Unservable, match="off its plain passes"): served(grown(range(9), [(0, 3), (0, 4)]))

@proves("thm-cache-looks")
@pytest.mark.filterwarnings("ignore:model")
@pytest.mark.parametrize("name", BY_PATHS)
def test_path_by_path(name):
    model = loud(name, **BY_PATHS[name])
    served = HFModel(model)
    assert served.by_paths and deviation(model, served, 30) < 1e-5
    tree = grown((1, 2, 3), [(0, 4), (0, 5), (1, 6), (1, 7)])   # three leaves
    served = HFModel(model)
    served(tree)
    assert served.meter.calls == 3 and served.meter.tokens == (3 + 2 + 1 + 1 if cache_name(model) else 14)
    with pytest.raises(Unservable, match="got 3 paths, wanted one"): served.feed(tree)
    assert abs(served.states((1, 2, 3), (1,))[1] - HFModel(model).states((1, 2, 3), (1,))[1]).max() < 1e-6

ROBERTA = dict(**BASE, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64,
               is_decoder=True)

def test_positions_are_those_of_generate():
    "RoBERTa numbers a text from its padding token where no positions are stated; `generate` states them"
    model = loud("Roberta", **ROBERTA)
    with pytest.warns(UserWarning, match="logits without position ids are .* off"):
        served = HFModel(model, temperature=0)
    ids = torch.tensor([[3, 1, 4]])
    own = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:]
    out = generate(served, PromptLookup(V, 2, 4), reject, (3, 1, 4), 20, Seeded(0))
    assert list(out) == own.tolist()
    bare_rows = [plainly(model, text) for text in ((3, 1), (3, 1, 4))]
    assert not served.by_paths and abs(served.logits(grown((3, 1), [(0, 4)])) - bare_rows).max() > .1

@pytest.mark.parametrize("shift, words", [
    (1e-7, ""), (.05, "by 0.0.* with the number of tokens in a pass"), (9, "")])
def test_a_quantized_model_may_depend_on_the_length_of_a_pass(shift, words, monkeypatch):
    "The logits of every pass of one token are moved: by little, by some, by more than the hidden tokens do"
    model = bare("Llama")
    inner = model.lm_head.forward
    monkeypatch.setattr(HFModel, "quantized", True)
    moved = torch.linspace(0, shift, V, dtype=torch.float64)
    model.model.register_forward_pre_hook(
        lambda m, a, kw: setattr(model.lm_head, "fed", kw["input_ids"].shape[1]), with_kwargs=True)
    model.lm_head.forward = lambda h: inner(h) + moved * (model.lm_head.fed == 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if shift > 1:
            with pytest.raises(Unservable, match="`model.dequantize"): HFModel(model)
        else: assert not HFModel(model).by_paths
    assert bool(words) == bool(said) and all(re.search(words, str(w.message)) for w in said)

def test_a_padded_vocabulary_is_cut():
    "The first V rows, before any warp; the rest has probability 0"
    model, tree = bare("Llama"), grown((3, 1), [(0, 4), (0, 1)])
    p = HFModel(model, temperature=.8, top_k=5, V=50)(tree)
    for i, z in enumerate(plain_rows(model, tree)):
        assert len(p[i]) == 50 and abs(p[i] - warp(z[:50], .8, 5)).max() < 1e-10
    target, draft = HFModel(model, temperature=0, V=50), HFModel(bare("Llama", seed=1, vocab_size=50))
    assert len(generate(target, Chain(draft, 3), reject, (1, 2), 8, Seeded(0))) == 8

def test_processors_are_functions_of_the_text():
    class Counter:
        n = 0
        def __call__(self, ids, z):
            self.n += 1
            return z / self.n
    class Cursor:
        "A grammar that reads the new tokens of each call only"
        seen, at = 0, 0
        def __call__(self, ids, z):
            self.at += int(ids[0, self.seen:].sum())
            self.seen = max(self.seen, ids.shape[1])
            return z.roll(self.at, -1)
    def grammar(ids, z): return z.roll(int(ids.sum()), -1)
    for process in (Counter(), Cursor()):
        with pytest.raises(ValueError, match=f"processors: got {type(process).__name__}, which"):
            HFModel(bare("Llama"), processors=[process])
    HFModel(bare("Llama"), processors=[grammar, RepetitionPenaltyLogitsProcessor(1.7)])

BUILD = dict(chain=lambda d: Chain(d, 4), tree=lambda d: Branching(d, (2, 1, 1)),
             lookup=lambda d: PromptLookup(V, 2, 4))

@pytest.mark.parametrize("build", BUILD)
def test_the_last_position_can_be_reached(build):
    "Where a draft no longer fits, the loop continues without one: 12 positions for 13 tokens"
    model, ctx = bare("Llama", max_position_embeddings=12), (1, 2, 1, 2)
    target, drafter = HFModel(model, temperature=0), BUILD[build](HFModel(model, temperature=0))
    out = generate(target, drafter, reject, ctx, 9, Seeded(0))
    assert out == generate(target, autoregressive.drafter, match, ctx, 9, Seeded(0)) and len(out) == 9
    assert out.ledger.num_accepted_tokens > 0 and out.ledger.column("drafted")[-1] == 0
    with pytest.raises(ValueError, match="n: got 10, wanted at most 9 after a context of 4"):
        generate(target, drafter, reject, ctx, 10, Seeded(0))

# ---- releases of transformers

GIVEN_UP = {"mems", "past_buckets_states"}   # of XLNet and Reformer, no cache of rows

def test_every_name_of_a_cache_is_known():
    "A release that renames the cache fails here, before it changes a row"
    assert {*ALL_CACHE_NAMES} - GIVEN_UP <= {*CACHE_NAMES}

def renamed(keyword, wrapped=False):
    "A Llama of a release in which caches have another name; it ignores unknown keywords"
    model = bare("Llama", own=True)
    made, own = type(model), cache_name(model)
    class Renamed(made):
        def forward(self, **kw):
            cache = kw.pop(keyword, None)
            for name in CACHE_NAMES: kw.pop(name, None)
            out = made.forward(self, **kw, **{own: cache})
            past = {keyword: getattr(out, own)}
            return SimpleNamespace(logits=out.logits, hidden_states=out.hidden_states, **past)
    call = signature(made.forward)
    named = [p.replace(name=keyword) if p.name == own else p for p in call.parameters.values()]
    Renamed.forward.__signature__ = call.replace(parameters=named)
    model.__class__ = Renamed
    return Wrapper(model) if wrapped else model

class Wrapper(torch.nn.Module):
    "As around a model with adapters: passes everything on, and names nothing"
    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config
        self.get_input_embeddings, self.get_output_embeddings = (
            model.get_input_embeddings, model.get_output_embeddings)
    @property
    def base_model(self): return self.model.base_model
    def forward(self, *args, **kw): return self.model(*args, **kw)

@pytest.mark.parametrize("kind, wrapped", [(HFModel, False), (HFModel, True), (PackedLlama, False)])
@pytest.mark.parametrize("keyword", CACHE_NAMES)
def test_rows_are_cached_under_every_name(keyword, kind, wrapped):
    served = kind(renamed(keyword, wrapped), check=None)
    plain, tree = bare("Llama", own=True), grown((1, 2, 3), [(0, 4), (0, 5)])
    served.law((1, 2))
    assert abs(served.logits(tree) - plain_rows(plain, tree)).max() < 1e-4
    assert not served.by_paths and served.meter.tokens == 2 + 3   # none of them twice

@pytest.mark.parametrize("check", [True, None, False])
@pytest.mark.parametrize("kind", [HFModel, PackedLlama])
def test_an_unknown_name_of_the_cache_is_an_error(kind, check):
    "Whatever is compared: not a model without a cache"
    words = f"uses a cache that it does not name.*{transformers.__version__}.*{re.escape(torch.__version__)}"
    with pytest.raises(Unservable, match=words): kind(renamed("rows"), check=check)
    with pytest.raises(Unservable, match="takes a cache"): given_cache(torch.nn.Linear(2, 2), None)

class Uncached(PackedLlama):
    "Reads every text from its start, behind the rows that it has stored"
    cached = False

class Unmoved(PackedLlama):
    "The rows of an accepted branch stay where they were"
    def gather(self): return []
    def feed(self, tree, with_answers=True):
        self.memory.tensors = self.gather
        return super().feed(tree, with_answers)

class Causal(PackedLlama):
    "A tree in the order of a text"
    def mask(self, start, end): return None

@pytest.mark.parametrize("wrong", [Uncached, Unmoved, Causal])
def test_one_row_at_the_start_detects_a_wrong_pass(wrong):
    "Also where no check is asked for; the error names the releases"
    with pytest.raises(Unservable, match=f"off its plain passes.*{transformers.__version__}"):
        wrong(bare("Llama", torch.float32, own=True), check=None, paths=False)

def test_a_wrong_row_is_read_by_paths(monkeypatch):
    "A release that ignores masks: the first model of a class warns, with the releases"
    model = bare("Llama")
    inner = model.forward
    model.forward = lambda *args, **kw: inner(*args, **{**kw, "attention_mask": None})
    with pytest.warns(UserWarning, match=f"off its plain passes.*{transformers.__version__}"):
        assert HFModel(model, check=None).by_paths

def test_one_row_is_compared_once():
    "And for every class and model; the embedded models do it, too"
    plain, model = [], bare("Llama", torch.float32)
    model.register_forward_pre_hook(lambda *args: plain.append(1))
    made = PackedLlama(model, check=None), PackedLlama(model, 0, check=None)
    assert len(plain) == 1 and all(m.meter.calls == len(m.trie.edge) == 0 for m in made)
    HFModel(model, check=None)
    assert len(plain) > 1
    assert type(embedded("small")) in COMPARED[embedded("small").model]

# ---- the stored runs of `make record-architectures`, `make record-recurrent` and `make compat-quantised`

SWEEPS = "architectures", "recurrent"

def outcome(row): return row["outcome"] if isinstance(row, dict) else row.partition(":")[0]

def as_stored(record): return record
def one_wrong(record): return record | dict(architectures=record["architectures"] | dict(mamba="wrong: tree"))
def miscounted(record):
    counts = record["counts"]
    return record | dict(counts=counts | {what: n + 1 for what, n in [*counts.items()][:1]})
def all_wrong(record):
    none = dict.fromkeys(record["counts"], 0) | dict(wrong=len(record["architectures"]))
    return record | dict(counts=none, architectures=dict.fromkeys(record["architectures"], "wrong"))
def outdated(record): return record | dict(versions=record["versions"] | dict(transformers="5.0.0"))

def fails(*bad): return [pytest.param(x, marks=pytest.mark.xfail(strict=True)) for x in bad]

@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("change", [as_stored, *fails(one_wrong, miscounted, all_wrong, outdated)])
def test_the_stored_sweeps(name, change):
    "Counts are those of the rows, none is wrong, and the versions are the pinned ones"
    record = change(read_record(name))
    counts = Counter(map(outcome, record["architectures"].values()))
    assert {k: n for k, n in record["counts"].items() if n} == counts
    assert not counts["wrong"] and not counts["failed"]
    pins = dict(line.split("==") for line in (ROOT/"constraints.txt").read_text().split() if "==" in line)
    assert all(pins[name] == record["versions"][name].partition("+")[0] for name in ("torch", "transformers"))

def test_the_stored_run_on_quantized_weights():
    "Weights that are not quantized give the texts of `generate`, as does every way served without a warning"
    ways = read_record("quantised")["ways"]
    whole = {name: way for name, way in ways.items() if name.startswith(("float32", "device_map"))}
    assert len(whole) == 4 and all(way["logits_off"] < 1e-3 for way in whole.values())
    assert all(way["same"] == way["of"] for way in ways.values() if way["check"] == "served")
    assert all(way["check"] == "served" for way in whole.values())

# ---- checkpoints and devices

def test_load(tmp_path):
    model, good = bare("Llama", torch.float32), tmp_path / "good"
    model.save_pretrained(good)
    served = HFModel.load(good, temperature=.5, dtype=torch.float64)
    want = HFModel(model, temperature=.5).law((1, 2))
    assert served.V == V and abs(served.law((1, 2)) - want).max() < 1e-4
    assert HFModel.load(good).model.dtype == torch.float32
    bent = HFModel.load(good, dtype="auto", attn_implementation="eager", revision="main", top_k=3)
    assert bent.model.config._attn_implementation == "eager" and sum(bent.law((1, 2)) > 0) == 3

def test_an_incomplete_checkpoint_is_refused(tmp_path):
    from safetensors.torch import load, save_file
    bare("Llama", torch.float32).save_pretrained(tmp_path)
    refused = lambda path, words: pytest.raises(ValueError, HFModel.load, path).match(words)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(tmp_path, "^path: got .*, wanted a readable checkpoint")
    state = load(whole)
    state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, weights, metadata={"format": "pt"})
    refused(tmp_path, "^path: got .* without 1 weights, model.layers.1.mlp.up_proj.weight")
    refused(tmp_path / "none", "^path: got .*, wanted a readable checkpoint")

@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float64, 1e-10), (torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_cuda(dtype, tolerance):
    model = bare("Qwen2", dtype).cuda()
    served = HFModel(model, keep=(1,))
    for tree in history(0):
        got, want = served.logits(tree), plain_rows(model, tree)
        assert abs(got - want).max() <= tolerance * abs(want).max()
        assert served.states(tree.ctx)[1].is_cuda
