"07c_recurrent: states of texts on any history, the wrong ways to keep them, and what feeding again costs"
import random, warnings
from contextlib import contextmanager
from copy import copy, deepcopy
from fractions import Fraction
from unittest.mock import patch

import numpy as np, pytest, torch, transformers
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

import architectures as sweep
from helpers import examples, proves, refuses, tiny
from specref import (block, Branching, Chain, generate, HFModel, loop_law, PromptLookup, reject, Seeded,
                     target_law, Tree)
from specref.models.compiled import load_served, serve_model
from specref.models.recurrent import (CachedState, RecurrentModel, keeps_state, recurrent_speedup,
                                      refed_a_round, refed_merged, refeeding, tensors_in)
from specref.models.transformer import Unservable, warpers
from recurrent import CHAINS, deviation, histories, line

V = 16
BASE = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2)
HYBRID = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, pad_token_id=0)
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4, mamba_n_groups=1, mamba_expand=2,
              mamba_chunk_size=4)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
             linear_value_head_dim=8, head_dim=8)
KINDS = ["linear_attention", "full_attention"]
FAMILIES = dict(   # one pass over several tokens
    Mamba2=dict(chunk_size=4, num_heads=4, head_dim=16, state_size=4, n_groups=1, expand=2, **BASE),
    Bamba=dict(attn_layer_indices=[1], **BASE, **HYBRID, **MAMBA2),
    FalconH1=dict(mamba_d_ssm=64, head_dim=8, **BASE, **HYBRID, **MAMBA2),
    Qwen3_5=dict(layer_types=KINDS, **BASE, **HYBRID, **DELTA),
    Lfm2=dict(layer_types=["conv", "full_attention"], **BASE, **HYBRID),
    Rwkv=dict(attention_hidden_size=32, **BASE))
STEPWISE = dict(   # one token a pass
    Mamba=dict(state_size=4, **BASE),
    Jamba=dict(attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1,
               mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False, **BASE, **HYBRID),
    RecurrentGemma=dict(lru_width=32, attention_window_size=16, num_attention_heads=4, head_dim=8,
                        block_types=["recurrent", "attention"], intermediate_size=64, **BASE))

def bare(name, dtype=torch.float64, scale=.3):
    "A tiny random model, by default with large weights"
    options, text = {**FAMILIES, **STEPWISE}[name], "TextConfig" if name == "Qwen3_5" else "Config"
    torch.manual_seed(0)
    config = getattr(transformers, name + text)(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for w in model.parameters(): w.normal_(0, scale) if w.dim() > 1 else w.add_(.1 * torch.randn_like(w))
    return model

@contextmanager
def in_double():
    "Where a network computes in float32 whatever its dtype, it computes in float64"
    scan = RecurrentGemmaRglru._rnn_scan   # its default was read when the module was imported
    with (patch.object(torch.Tensor, "float", torch.Tensor.double),
          patch.object(torch, "float32", torch.float64),
          patch.object(scan, "__defaults__", (torch.float64,))): yield

def state_of(model, text):
    "The tensors of the state after a text"
    model.feed(Tree(text))
    state = model.trie.states[len(text)]
    return [x.double() for x in tensors_in([state.cache, state.inside]) if x.is_floating_point()]

def served(name, make=RecurrentModel, **kw):
    return make(bare(name), check=False, stepwise=name in STEPWISE, **kw)

# ---- states on any history, and the wrong ways to keep them

class ToyPasses(RecurrentModel):
    "A recurrence whose state is the tuple of the tokens read: every pass is checked exactly"
    def __init__(self, lag, slots, chunk, stepwise):
        self.lag, self.slots, self.chunk, self.stepwise, self.refed = lag, slots, chunk, stepwise, 0
        self.most, self.windows, self.by_paths, self.model = np.inf, [], False, torch.nn.Module()
        self.passes = []
        self.forget()
    def pass_over(self, start, end, first):
        read = (self.trie.states[start].cache or ()) + self.trie.text[start:end]
        assert read == self.trie.text[:end] and end > start
        self.trie.states[end], self.memory.n = CachedState(read), end
        self.trie.answers.update((n, read[:n]) for n in range(first, end + 1))
        self.passes.append((start, end))

@proves("thm-state-text")
@examples(80, st.integers(0, 10**9), st.integers(0, 9), st.sampled_from([None, 2, 3]),
          st.sampled_from([1, 3, 99]), st.booleans())
def test_answers_are_those_of_the_text(seed, lag, slots, chunk, stepwise):
    "Whatever is kept, and wherever passes begin: the answer after a node is that of the node's text"
    toy = ToyPasses(lag, slots, chunk, stepwise)
    for ctx, drafted in histories(seed, rounds=12, V=3):
        tree = line(ctx, drafted)
        assert toy.answers(tree) == [tree.text(i) for i in range(len(tree))]
        assert all((state.cache or ()) == toy.trie.text[:n] for n, state in toy.trie.states.items())
        assert len(toy.trie.states) <= 1 + (slots or (2 if not stepwise else 99))

class ByReference(CachedState):
    "Wrong: a kept state is the object that the next pass changes"
    def copy(self): return self

class CopiesNothing(RecurrentModel):
    def pass_over(self, start, end, first):
        state = self.trie.states[start]
        self.trie.states[start] = ByReference(state.cache, state.inside)
        super().pass_over(start, end, first)

class ConvolutionsOnly(RecurrentModel):
    "Wrong: a rejection restores rows and convolutions, and leaves the recurrent states (transformers#49036)"
    last = None
    def given(self, state):
        layers = getattr(state.cache, "layers", ()) if self.last else ()
        for mine, last in zip(layers, getattr(self.last, "layers", ())):
            if hasattr(mine, "recurrent_states"): mine.recurrent_states = deepcopy(last.recurrent_states)
        return super().given(state)
    def pass_over(self, start, end, first):
        super().pass_over(start, end, first)
        self.last = self.trie.states[end].cache

class MissesAToken(RecurrentModel):
    "Wrong: one accepted token fewer is fed again"
    def pass_over(self, start, end, first):
        again = 0 < start < end - 1 and first > end
        super().pass_over(start, end - again, first)
        self.trie.states[end] = self.trie.states[end - again]

class KeyedByLength(RecurrentModel):
    "Wrong: a state is kept for a number of tokens, whatever they are"
    def feed(self, tree, with_answers=True):
        held = {n: s for n, s in self.trie.states.items() if n < len(tree.ctx)}
        self.trie.turn(tree.text(len(tree) - 1))
        self.trie.states |= held
        return super().feed(tree, with_answers)

def fails(*wrong): return [pytest.param(x, marks=pytest.mark.xfail(strict=True, raises=AssertionError))
                           for x in wrong]

@proves("thm-state-text", "cor-recurrent-law")
@pytest.mark.parametrize("name", ["Mamba2", "Qwen3_5"])
@pytest.mark.parametrize("make", [RecurrentModel, *fails(CopiesNothing, ConvolutionsOnly, MissesAToken,
                                                        KeyedByLength)])
def test_wrong_states_are_detected(make, name):
    with in_double():
        model = served(name, make)
        assert max(deviation(model, histories(seed)) for seed in range(3)) < 1e-10

@proves("thm-state-text")
@pytest.mark.parametrize("name", [*FAMILIES, *STEPWISE])
def test_every_family_on_any_history(name):
    "Logits and kept states are those of fresh passes, to the rounding of float64"
    with in_double():
        for seed, how in enumerate([{}, dict(lag=4), dict(slots=4, chunk=3)]):
            model = served(name, **how)
            assert deviation(model, histories(seed, rounds=9)) < 1e-10
            ctx = model.trie.text
            for n in sorted(model.trie.states)[1:]:
                fresh, state = state_of(served(name), ctx[:n]), model.trie.states[n]
                kept = [x for x in tensors_in([state.cache, state.inside]) if x.is_floating_point()]
                assert fresh and all(abs(a - b).max() < 1e-9 for a, b in zip(kept, fresh, strict=True))

@examples(12, st.integers(0, 10**9), st.sampled_from(["Mamba2", "Lfm2", "Rwkv"]), st.integers(0, 6))
def test_any_history(seed, name, lag):
    with in_double(): assert deviation(served(name, lag=lag), histories(seed, rounds=5)) < 1e-10

def test_a_window_of_attention_is_passed():
    "RecurrentGemma hides what is more than 16 tokens back; a check is made when a text is first longer"
    with in_double():
        model = RecurrentModel(bare("RecurrentGemma"), stepwise=True)
        rounds = [(tuple(i % V for i in range(n)), (3, 5)[:n % 3]) for n in (12, 15, 18, 24, 20)]
        assert model.unchecked == [16] and deviation(model, rounds) < 1e-10 and not model.unchecked

def test_rows_are_shared_and_states_are_copied():
    model = served("Bamba")
    model.feed(Tree((1, 2, 3, 4)))
    state = model.trie.states[4]
    copied, (recurrent, attention) = state.copy(), state.cache.layers
    assert copied.cache.layers[1].keys is attention.keys
    mine = copied.cache.layers[0].recurrent_states[0]
    assert mine is not recurrent.recurrent_states[0] and torch.equal(mine, recurrent.recurrent_states[0])
    assert CachedState(None, inside := [torch.ones(2)]).copy().inside[0] is not inside[0]   # of modules
    assert state.row_bytes == 2 * 2 * 8 * 8   # keys and values, heads, width, bytes
    assert state.copied_bytes == sum(x[0].nbytes for x in (recurrent.conv_states, recurrent.recurrent_states))

def test_a_failed_pass_leaves_an_empty_cache(monkeypatch):
    model = served("Mamba2")
    model.feed(line((1, 2, 3), (4,)))
    def broken(*args, **kw): raise KeyboardInterrupt
    monkeypatch.setattr(type(model.model), "forward", broken)
    with pytest.raises(KeyboardInterrupt): model.feed(line((1, 2, 5), (4,)))
    monkeypatch.undo()
    assert list(model.trie.states) == [0] and deviation(model, histories(2)) < 1e-5

@pytest.mark.parametrize("name", ["Mamba2", "Qwen3_5", "Jamba"])
def test_hidden_states(name):
    "Of every token, after rejections; stored ones, and others by a pass of their own"
    model = served(name, keep=(0, 2))
    for ctx, drafted in histories(3):
        model.feed(line(ctx, drafted))
        with torch.inference_mode(): plain = model.model(torch.tensor([ctx]), output_hidden_states=True)
        for got in (model.states(ctx), model.states(ctx, (0, 2, 1))):
            for k in got: assert (got[k] - plain.hidden_states[k][0]).abs().max() < 1e-4
        assert list(model.states(ctx)) == [0, 2]

def test_what_is_fed_again():
    "Of the example of the chapter"
    toy = ToyPasses(0, None, 99, False)
    for ctx, drafted in (((1, 1, 0), (1, 1)), ((1, 1, 0, 1, 0), (1,))): toy.feed(line(ctx, drafted))
    assert toy.passes == [(0, 2), (2, 5), (2, 4), (4, 6)] and toy.refed == 2

# ---- systems

@proves("cor-recurrent-law")
@pytest.mark.parametrize("name", ["Mamba2", "Jamba"])
def test_the_law_of_generation_is_the_targets(name):
    "Every path of three tokens, by enumeration: rejections go back to kept states in every order"
    model, draft = bare(name), bare("Rwkv")
    target = RecurrentModel(model, .9, check=False, V=3, stepwise=name in STEPWISE)
    draft, want = RecurrentModel(draft, check=False, V=3), target_law(target, (0, 1), n=3)
    systems = (Chain(draft, 2), reject), (Chain(draft, 2), block), (PromptLookup(3, 2, 3), reject)
    for drafter, verify in systems:
        law = loop_law(target, drafter, verify, (0, 1), n=3)
        assert law.keys() == want.keys() and all(abs(law[text] - want[text]) < 1e-6 for text in want)

@pytest.mark.parametrize("name", ["Bamba", "Lfm2", "Mamba"])
def test_greedy_text_is_that_of_generate(name):
    model = bare(name)
    ids = torch.tensor([sweep.PROMPT])
    own = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    target = RecurrentModel(model, 0, check=False, stepwise=name in STEPWISE)
    for make in CHAINS.values():
        draft = RecurrentModel(sweep.noisy(model), check=False, stepwise=name in STEPWISE)
        assert list(make(draft)(target, sweep.PROMPT, 16, Seeded(0))) == own[0, len(sweep.PROMPT):].tolist()

def test_trees_are_refused_or_read_by_paths():
    model, draft = served("Mamba2"), served("Rwkv")
    with pytest.raises(Unservable, match="^tree: got [234] paths, wanted one"):
        generate(model, Branching(draft, (2, 2)), reject, (1, 2), 4, Seeded(0))
    tree = line((1, 2, 3), (4, 5))
    for u, x in ((0, 6), (3, 7), (1, 8)): tree.add(u, x)
    words = "^tree: got 3 paths, wanted one: a recurrent state is that of one text"
    with pytest.raises(Unservable, match=words): model.feed(tree)
    by_paths = served("Mamba2", paths=True)
    want = np.stack([by_paths.alone(tree.text(i)) for i in range(len(tree))])
    assert abs(by_paths.logits(tree) - want).max() < 1e-5

# ---- what is served, and how

def test_who_serves_a_model(tmp_path):
    "By the model or by a checkpoint; options go to the class or to `from_pretrained`"
    for name, model, cls in (("a", bare("Mamba2"), RecurrentModel), ("b", tiny(), HFModel)):
        model.save_pretrained(tmp_path/name)
        got = load_served(tmp_path/name, temperature=.5, dtype=torch.float64)
        same = serve_model(model.double(), .5)
        assert type(got) is type(same) is cls and got.temperature == same.temperature == .5
        assert np.allclose(got.logits(line((1, 2)))[0], HFModel.alone(got, (1, 2)), atol=1e-5)
        assert keeps_state(model) == (cls is RecurrentModel)

def test_what_is_refused():
    t5 = transformers.T5Config(vocab_size=V, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8)
    for model, why in ((transformers.T5ForConditionalGeneration(t5), "it is an encoder-decoder"),
                       (transformers.Mamba2Model(bare("Mamba2").config), "it has no head"),
                       (torch.nn.Linear(2, 2), "it is no transformers model")):
        with pytest.raises(Unservable, match=f"^model: got .*{why}"): RecurrentModel(model)
    for name, value in (("lag", -1), ("slots", 1)): refuses(name, served, "Mamba2", **{name: value})
    model = served("Mamba2")
    refuses("ctx", model, Tree(()))
    refuses("token", model, Tree((1, V)))

@pytest.mark.parametrize("name, dtype", [("Mamba", torch.float64), ("Jamba", torch.float32),
                                         ("RecurrentGemma", torch.float64)])
def test_the_check_finds_models_that_read_one_token_a_pass(name, dtype):
    "A pass over several tokens from a state is wrong, a pass from the beginning is right"
    net = bare(name, dtype)
    with pytest.warns(UserWarning, match="It reads one token a pass"): model = RecurrentModel(net)
    assert model.stepwise and model.refed == model.meter.calls == 0 and deviation(model, histories(5)) < 1e-4
    wrong = RecurrentModel(net, check=False)
    assert deviation(wrong, histories(5)) > 1e-2

def test_the_check_finds_a_small_error():
    "Small weights hardly use the state: a pass that ignores it is off by less than what other checks allow"
    net = bare("Mamba", torch.float32, scale=.05)
    assert 16 * 2**-23 < deviation(RecurrentModel(net, check=False), histories(5)) < 1e-3
    with pytest.warns(UserWarning, match="It reads one token a pass"): model = RecurrentModel(net)
    assert model.stepwise and deviation(model, histories(5)) < 16 * 2**-23

@pytest.mark.parametrize("name", FAMILIES)
def test_the_check_is_silent_about_the_others(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not RecurrentModel(bare(name, torch.float32)).stepwise

def test_two_formulas_are_reported():
    "A step of one token that has no lower limit of the time step, where the scan has one"
    model = bare("Mamba2")
    def limited(low):
        for layer in model.backbone.layers: layer.mixer.time_step_limit = (low, float("inf"))
        return model
    with pytest.warns(UserWarning, match="more than rounding explains"): RecurrentModel(limited(.01))
    with pytest.raises(Unservable, match="off its plain passes; wanted the same of both; its own `generate`"):
        RecurrentModel(limited(.05))

def test_a_copy_with_other_warps_forgets():
    "What the commands do for a second temperature"
    model = served("Mamba2", temperature=1.)
    other = copy(model)
    other.forget()
    other.temperature, other.processors = .5, LogitsProcessorList(warpers(.5, None, None))
    for m in (model, other, model): assert np.isclose(m.law((1, 2)).max(), served(
        "Mamba2", temperature=m.temperature).law((1, 2)).max())

# ---- what feeding again costs

def simulated(alpha, gamma, lag, rounds, rng):
    "Tokens fed again and passes of a target, counted on texts of toy passes"
    toy, ctx, token = ToyPasses(lag, None, 10**6, False), (0,), 0
    for _ in range(rounds):
        token += gamma + 1   # all tokens differ
        drafted = tuple(range(token, token + gamma))
        toy.feed(line(ctx, drafted))
        accepted = next((i for i in range(gamma) if rng.random() >= alpha), gamma)
        ctx = ctx + drafted[:accepted] + (-token,)
    return toy.refed / rounds, len(toy.passes) / rounds

@proves("thm-refed", "thm-lag")
@pytest.mark.parametrize("alpha, gamma", [(.5, 3), (.8, 4), (.9, 1)])
@pytest.mark.parametrize("lag", [0, 3, 8, 10**6])
def test_refeeding_is_what_is_counted(alpha, gamma, lag):
    "The chain of states, simulated on the cache itself; the closed forms are its two ends"
    tokens, passes = simulated(alpha, gamma, lag, 600, random.Random(1))
    want = refeeding(alpha, gamma, min(lag, 300))
    assert abs(tokens - want[0]) < .25 * (1 + want[0]) and abs(passes - want[1]) < .08
    if lag == 0: assert np.allclose(want, (refed_a_round(alpha, gamma), 2 - alpha**gamma))
    if lag > 8: assert np.allclose(want, (refed_merged(alpha, gamma), 1))

@proves("thm-refed")
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_refed_by_enumeration(gamma):
    "Sum over the number of accepted tokens, in fractions; the example of the chapter"
    alpha = Fraction(2, 3)
    share = [(1 - alpha) * alpha**a for a in range(gamma)]
    assert refed_a_round(alpha, gamma) == sum((a + 1) * w for a, w in enumerate(share))
    assert refed_a_round(Fraction(1, 2), 3) == Fraction(11, 8) and refed_merged(Fraction(1, 2), 3) == 11
    assert refed_a_round(0, gamma) == 1 and refed_a_round(1, gamma) == 0 and refed_merged(0, gamma) == np.inf

@proves("thm-refed")
def test_a_run_feeds_again_what_it_accepted():
    "Round by round of a real run: a + 1 tokens after a rejection, none after full acceptance"
    target, draft = served("Mamba2"), RecurrentModel(sweep.noisy(bare("Mamba2")), check=False)
    run = generate(target, Chain(draft, 3), reject, (1, 2, 3), 40, Seeded(0))
    accepted = run.ledger.column("accepted")[:-1]
    again = [a + 1 for a in accepted if a < 3]
    assert target.refed == sum(again) > 0 and max(accepted) == 3
    assert target.meter.calls == 1 + len(run.ledger.rounds) + len(again)   # the prompt's, one a round, these
    merged = RecurrentModel(target.model, check=False, lag=10**6)
    assert generate(merged, Chain(draft, 3), reject, (1, 2, 3), 40, Seeded(0)) == run
    assert merged.meter.calls == len(run.ledger.rounds) and merged.refed > target.refed

@proves("prop-pays")
def test_when_it_pays():
    "With one draft token: exactly where alpha > (1 + c) / 2"
    for c in (0, .1, .3):
        at = (1 + c) / 2
        assert np.isclose(recurrent_speedup(at, 1, c), 1)
        assert recurrent_speedup(at + .01, 1, c) > 1 > recurrent_speedup(at - .01, 1, c)
    assert np.isclose(recurrent_speedup(.8, 4, .05, lag=300), 3.3616 / 1.2)
    assert recurrent_speedup(.5, 4, .05, lag=300, per_token=.1) < recurrent_speedup(.5, 4, .05, per_token=.1)
