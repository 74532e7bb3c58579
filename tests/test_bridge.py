"09_bridge: transformers' own `generate` runs our systems and ends where it would; its candidate generators keep, or break, the contract"
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import assume, given, settings, strategies as st
from transformers import (DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria, TextStreamer,
                          UnbatchedClassifierFreeGuidanceLogitsProcessor)
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import (AssistedCandidateGenerator, CandidateGenerator, DFlashTokenCandidateGenerator, EarlyExitCandidateGenerator,
                                                         MTPCandidateGenerator, PromptLookupCandidateGenerator)
from transformers.modeling_layers import MtpModel

from contracts import continued
from helpers import KINDS, g_test, kinds, laws, models, plans, Plan, proves, refuses, seeds, twins
from test_transformer import bare as network
from specref.models.bridge import SERVED_CONFIG, TorchEnumerator, GeneratorDrafter, TextSoFar, SpeculativeOutput, copy_generator, wrap_models, generate_law, edge_law_error, new_tokens, wrap_model, speculate, decode_rounds
from specref.core.rng import Enumerator, Seeded, tv_outcomes, law_of
from specref.core.law import exact, greedy, one_hot, tv
from specref.draft.lookup import PromptLookup
from specref.core.loop import Verdict, loop_law, match, no_draft, rounds
from specref.models.embedded import tokenizer
from specref.verify.reject import Chain, reject
from specref.verify.siblings import Branching
from specref.core.target import TableModel, random_table, target_law
from specref.models.transformer import HFModel
from specref.core.tree import Tree, iid

V = 64
EXACT = 1e-6   # transformers computes in float32 from the logits on
PROMPTS = [(1, 2, 3), (60, 5, 60, 5), (7,), tuple(range(10, 40))]


@pytest.fixture(scope="module")
def pair():
    "A target, and a draft that is the target with noise on its weights: some of what it drafts is accepted"
    target, draft = network("Llama"), network("Llama")
    with torch.no_grad():
        for w in draft.parameters(): w.add_(.03 * torch.randn_like(w))
    return target, draft


@pytest.fixture(scope="module")
def three():
    "A target and a draft on three tokens, whose laws leave something to every token"
    both = network("Llama", vocab_size=3, num_hidden_layers=1), network("Llama", seed=1, vocab_size=3, num_hidden_layers=1)
    with torch.no_grad():
        for m in both: m.lm_head.weight.mul_(.3)
    return both


def said(model, prompt, **options): return new_tokens(model, prompt, **{**dict(max_new_tokens=13, pad_token_id=0), **options})


# ---- temperature 0: the text of transformers' own generate

DRAFTERS = {
    "a model": lambda draft: draft,
    "chain": lambda draft: Chain(draft, 3),
    "tree": lambda draft: Branching(draft, (3, 2, 1)),
    "lookup": lambda draft: PromptLookup(V, 2, 5),
    "their lookup": lambda draft: GeneratorDrafter(PromptLookupCandidateGenerator(num_output_tokens=4, max_length=60), V),
    "served, its own law": lambda draft: Chain(HFModel(draft, temperature=2., check=False), 2),
}
PROCESSORS = {
    "none": {},
    "repetition_penalty": dict(repetition_penalty=1.7),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "min_new_tokens": dict(eos_token_id=list(range(0, V, 3)), min_new_tokens=6),
    "min_length": dict(eos_token_id=list(range(0, V, 3)), min_length=12),
    "forced_eos_token_id": dict(eos_token_id=63, forced_eos_token_id=63),
    "bad_words_ids": dict(bad_words_ids=[[k] for k in range(0, V, 2)] + [[1, 3], [5, 7, 9]]),
    "suppress_tokens": dict(suppress_tokens=list(range(30)), begin_suppress_tokens=list(range(30, 50))),
    "sequence_bias": dict(sequence_bias=[[[k], 5.] for k in range(5)]),
    "exponential_decay": dict(eos_token_id=9, exponential_decay_length_penalty=(3, 1.4)),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda batch, ids: [int(ids[-1] * 7 + k) % V for k in range(9)]),
    "a custom one": dict(logits_processor=LogitsProcessorList([lambda ids, z: z.masked_fill(torch.arange(V) % 5 == len(ids[0]) % 5, -float("inf"))])),
    "several": dict(repetition_penalty=1.3, no_repeat_ngram_size=3, bad_words_ids=[[4]], eos_token_id=11, min_new_tokens=4),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_identity(pair, name, drafter):
    "do_sample=False: the same tokens, also where n is no multiple of a round"
    target, draft = pair
    for prompt in PROMPTS:
        want = said(target, prompt, do_sample=False, **PROCESSORS[name])
        for verify in (reject, match):
            assert said(target, prompt, do_sample=False, custom_generate=speculate, drafter=DRAFTERS[drafter](draft), verify=verify, **PROCESSORS[name]) == want


@pytest.mark.parametrize("n", [1, 2, 5, 6, 11])
def test_the_number_of_tokens(pair, n):
    "max_new_tokens and max_length end the text at the token, whatever was drafted"
    for how in (dict(max_new_tokens=n), dict(max_new_tokens=None, max_length=3 + n)):
        assert said(pair[0], (1, 2, 3), do_sample=False, custom_generate=speculate, drafter=Chain(pair[0], 4), **how) == said(pair[0], (1, 2, 3), do_sample=False, max_new_tokens=n)


# ---- where a text ends

def test_an_end_token_inside_an_accepted_run(pair):
    "The target drafts for itself, all is accepted, and the text ends at the first end token"
    target = pair[0]
    text = said(target, (1, 2, 3), do_sample=False, max_new_tokens=10)
    for eos in set(text):
        want = text[:text.index(eos) + 1]
        assert said(target, (1, 2, 3), do_sample=False, max_new_tokens=10, eos_token_id=eos, custom_generate=speculate, drafter=Chain(target, 6)) == want


def test_stop_strings():
    "Each string of the text stops it where transformers' plain generate stops"
    tok, target = tokenizer(), network("Llama", vocab_size=512)
    whole = said(target, (40, 50, 60), do_sample=False, max_new_tokens=12)
    ends = set()
    for k in range(2, 12):
        stops = lambda: StoppingCriteriaList([StopStringCriteria(tok, [tok.decode(whole[k-2:k])])])
        want = said(target, (40, 50, 60), do_sample=False, max_new_tokens=12, stopping_criteria=stops())
        assert said(target, (40, 50, 60), do_sample=False, max_new_tokens=12, stopping_criteria=stops(), custom_generate=speculate, drafter=Chain(target, 5)) == want
        ends.add(len(want))
    assert len(ends) > 4   # the ends lie at many places of a round


def test_criteria_are_asked_once_after_every_token(pair):
    lengths = []
    def criterion(ids, scores):
        lengths.append(ids.shape[1])
        return torch.tensor([ids.shape[1] == 11])
    assert len(said(pair[0], (1, 2, 3), custom_generate=speculate, drafter=Chain(pair[0], 3), stopping_criteria=StoppingCriteriaList([criterion]))) == 8
    assert lengths == list(range(4, 12))


def test_a_clock(pair):
    "max_time=0 has run out after the first token, as in transformers"
    for how in ({}, dict(custom_generate=speculate, drafter=Chain(pair[0], 3))): assert len(said(pair[0], (1, 2), max_time=1e-9, **how)) == 1


def test_criteria_may_read_the_scores(pair):
    "With output_scores a criterion sees the scores of every token so far, as in transformers"
    seen = []
    def sure(ids, scores):
        seen.append(len(scores))
        return torch.tensor([scores[-1].softmax(-1)[0, ids[0, -1]].item() < .2])
    ids, options = torch.tensor([[1, 2, 3]]), dict(do_sample=False, max_new_tokens=12, return_dict_in_generate=True, output_scores=True, pad_token_id=0)
    texts = [pair[0].generate(ids, stopping_criteria=StoppingCriteriaList([sure]), **options, **how).sequences.tolist()
             for how in ({}, dict(custom_generate=speculate, drafter=Chain(pair[0], 3)))]
    n = len(texts[0][0]) - 3
    assert texts[0] == texts[1] and seen == [*range(1, n + 1)] * 2


def told(target, drafter, verify, ctx, ended, rng):
    "The text of `decode_rounds` on a table, ended by a function of its tokens"
    return tuple(decode_rounds(target, drafter, verify, ctx, rng, TextSoFar(torch.tensor([ctx]), lambda ids, scores: torch.tensor([ended(tuple(ids[0].tolist()))]))))


def plainly(target, ctx, ended):
    "The law of plain sampling that asks `ended` after every token"
    end, now = Counter(), {(): 1}
    while now:
        after = Counter()
        for out, w in now.items():
            for x, m in enumerate(target.law(ctx + out)):
                if m > 0: (end if ended(ctx + (*out, x)) else after)[(*out, x)] += w*m
        now = after
    return end


@proves("thm-criteria")
@settings(max_examples=30)
@given(models(), plans(most=2, k=1), st.sampled_from([{2}, {0, 1}, {4, 5}]), st.integers(2, 3))
def test_ended_by_any_function_of_the_text(pair, steps, sums, n):
    "Asked after every token, a criterion cuts the text of any system as it cuts plain sampling: in fractions"
    ended = lambda text: len(text) == 1 + n or sum(text) in sums or text[-2:] == (1, 1)
    got = law_of(lambda rng: told(pair[0], Plan(pair[1], steps), reject, (0,), ended, rng))
    assert got == plainly(pair[0], (0,), ended)


@proves("thm-criteria")
def test_asked_once_a_round_it_would_miss():
    "The same criterion, asked only where a round ends: the law is another one"
    always, ended = TableModel(2, lambda text: one_hot(1, 2, exact=True)), lambda text: len(text) in (3, 9)
    assert told(always, Chain(always, 3), reject, (0,), ended, Seeded(0)) == (1, 1)
    text = (0,)
    while not ended(text): text += next(rounds(always, Chain(always, 3), reject, text, Seeded(0))).tokens
    assert len(text) == 9


# ---- the law

SAMPLING = {
    "plain": dict(top_k=0),
    "warped": dict(top_k=2, temperature=.7),
    "nucleus": dict(top_k=0, top_p=.8),
    "by the text": dict(top_k=0, repetition_penalty=1.5, no_repeat_ngram_size=2, temperature=1.3),
    "by its end": dict(top_k=0, eos_token_id=2, min_new_tokens=2, pad_token_id=0),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_exact_law_through_the_door(three, name):
    "Every road of transformers' plain generate, and every road of ours through the same door"
    p, q = three
    options = dict(do_sample=True, max_new_tokens=2, **SAMPLING[name])
    want = generate_law(p, (0, 1), **options)
    for drafter in (Chain(q, 1), Chain(q, 2)) if name == "plain" else (Chain(q, 1),):
        assert tv_outcomes(law_of(lambda rng: new_tokens(p, (0, 1), custom_generate=speculate, drafter=drafter, seed=rng, **options)), want) < EXACT
    assert len(want) > 2


@pytest.mark.parametrize("drafter", [lambda m: m, lambda m: Chain(m, 3), lambda m: Branching(m, (1, 1))], ids=["model", "chain", "tree"])
def test_one_list_for_both(pair, drafter):
    "A draft that is the target, behind the same processors at every node, is always kept"
    out = pair[0].generate(torch.tensor([[1, 2, 1]]), do_sample=True, temperature=.6, top_k=7, repetition_penalty=1.8, no_repeat_ngram_size=2, max_new_tokens=30, seed=3,
                           custom_generate=speculate, drafter=drafter(pair[0]), return_dict_in_generate=True, pad_token_id=0)
    assert out.text.ledger.num_accepted_tokens == out.text.ledger.num_draft_tokens >= 20


def steep(model, temperature):
    "A mutant: drafts at a temperature and states the law without it"
    true, stated = HFModel(model, temperature, check=False), HFModel(model, check=False)
    def draft(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, rng.pick(true.law(ctx)), stated.law(ctx))
        return tree
    return draft


def test_a_draft_that_hides_its_warp_is_caught(three):
    "Exactly, and by its misstatement; the honest draft passes both"
    p, q = three
    want = generate_law(p, (0, 1), do_sample=True, top_k=0, max_new_tokens=2)
    law = lambda d: law_of(lambda rng: new_tokens(p, (0, 1), custom_generate=speculate, drafter=d, seed=rng, do_sample=True, top_k=0, max_new_tokens=2))
    assert tv_outcomes(law(steep(q, 5.)), want) > .1 and edge_law_error(steep(q, 5.), (0, 1)) > .1
    assert tv_outcomes(law(Chain(HFModel(q, 5., check=False), 1)), want) < EXACT and edge_law_error(Chain(HFModel(q, 5., check=False), 1), (0, 1)) < EXACT


def test_sampled_law_through_the_public_door(three):
    "G-test at 1e-9 on two tokens, seeded by torch alone; a draft stated as the target's own law, and drawn at its coldest, fails it"
    p, q = three
    options, n = dict(do_sample=True, top_k=0, temperature=1.3, max_new_tokens=2), 1500
    want = generate_law(p, (0, 1), **options)
    own = HFModel(p, 1.3, check=False)
    def lying(ctx, rng):
        tree, law = Tree(ctx), own.law(ctx)
        tree.add(0, int(np.argmax(law)), law)
        return tree
    def test(drafter):
        torch.manual_seed(0)
        return g_test(Counter(new_tokens(p, (0, 1), custom_generate=speculate, drafter=drafter, **options) for _ in range(n)), want)
    honest, wrong = test(Chain(q, 2)), test(lying)
    print(honest, "|", wrong)
    assert honest.fits and not wrong.fits and honest.tv < .25


def test_torch_decides_the_draw(three):
    "The same torch seed, the same text; a seed of one's own leaves torch's generator alone"
    p, q = three
    once = lambda **how: new_tokens(p, (0, 1), do_sample=True, max_new_tokens=20, custom_generate=speculate, drafter=q, **how)
    texts = []
    for s in (0, 0, 1, 2):
        transformers.set_seed(s)
        texts += [once(), once()]
    assert texts[:2] == texts[2:4] and len(set(texts)) >= 5
    state = torch.get_rng_state()
    assert once(seed=5) == once(seed=5) == once(seed=Seeded(5)) != once(seed=6) and torch.equal(state, torch.get_rng_state())


# ---- what comes back

def test_the_output_object(pair):
    "Scores, logits and sequences are those of transformers; the ledger is there, and log-probabilities are of the processed law"
    target, draft = pair
    ids, options = torch.tensor([[1, 2, 3]]), dict(do_sample=False, max_new_tokens=11, repetition_penalty=1.4, return_dict_in_generate=True, output_scores=True, output_logits=True, pad_token_id=0)
    want, out = target.generate(ids, **options), target.generate(ids, **options, custom_generate=speculate, drafter=Chain(draft, 3))
    assert isinstance(out, SpeculativeOutput) and torch.equal(out.sequences, want.sequences) and out.sequences.dtype == torch.int64
    for a, b in ((out.scores, want.scores), (out.logits, want.logits)):
        assert len(a) == len(b) == 11 and all(x.shape == y.shape and x.dtype == y.dtype and abs(x - y).max() < 1e-4 for x, y in zip(a, b))
    assert out.text == tuple(out.sequences[0, 3:].tolist()) and out.text.logprobs == (0.,) * 11
    led = out.text.ledger
    assert led.num_emitted_tokens == 11 and led.models["target"].calls == len(led.rounds) < 11 and led.models["draft"].calls > 0
    assert led.num_accepted_tokens and {s.status for s in out.text.steps} <= set("AYB")
    bare = target.generate(ids, do_sample=False, max_new_tokens=4, return_dict_in_generate=True, custom_generate=speculate, drafter=draft, pad_token_id=0)
    assert bare.scores is None and bare.logits is None and bare.past_key_values is None and len(bare.text) == 4
    assert isinstance(target.generate(ids, do_sample=False, max_new_tokens=4, output_scores=True, custom_generate=speculate, drafter=draft, pad_token_id=0), torch.Tensor)


def test_the_judge_is_the_one_that_was_given(pair):
    lazy = lambda p, tree, rng: Verdict(0, rng.pick(p[0]))
    out = pair[0].generate(torch.tensor([[1, 2]]), do_sample=False, max_new_tokens=5, custom_generate=speculate, drafter=pair[0], verify=lazy, return_dict_in_generate=True, pad_token_id=0)
    assert out.text.ledger.num_draft_tokens == 20 and out.text.ledger.num_accepted_tokens == 0 and out.text == said(pair[0], (1, 2), do_sample=False, max_new_tokens=5)


def test_logprobs_of_a_sampled_text(pair):
    out = pair[0].generate(torch.tensor([[1, 2]]), do_sample=True, top_k=5, temperature=.8, max_new_tokens=9, custom_generate=speculate, drafter=pair[1], seed=1,
                           return_dict_in_generate=True, output_scores=True, pad_token_id=0)
    want = [z.double().log_softmax(-1)[0, x].item() for z, x in zip(out.scores, out.text)]
    assert np.allclose(out.text.logprobs, want, atol=1e-5) and min(out.text.logprobs) < -.1


def test_the_callback_hears_the_text_and_streams_it(capsys):
    tok, target, heard = tokenizer(), network("Llama", vocab_size=512), []
    text = said(target, (40, 50), do_sample=False, custom_generate=speculate, drafter=Chain(target, 3), token_callback=heard.append)
    assert tuple(torch.cat(heard).tolist()) == text and [len(t) for t in heard] == [4, 4, 4, 1]
    streamer = TextStreamer(tok)
    said(target, (40, 50), do_sample=False, custom_generate=speculate, drafter=Chain(target, 3), token_callback=streamer.put)
    streamer.end()
    assert capsys.readouterr().out.rstrip("\n") == tok.decode(text).rstrip("\n")


def test_nothing_is_left_behind(pair):
    "The models, their configurations and torch's modes are as before"
    before = [m.generation_config.to_dict() for m in pair]
    said(pair[0], (1, 2), custom_generate=speculate, drafter=pair[1])
    assert [m.generation_config.to_dict() for m in pair] == before and torch.is_grad_enabled() and not any(m.training for m in pair)


def test_a_model_is_checked_once(pair, monkeypatch):
    asked = []
    monkeypatch.setattr(HFModel, "check", lambda self: asked.append(self.model))
    fresh = network("Llama", seed=3, num_hidden_layers=1)
    for _ in range(2): said(fresh, (1, 2), custom_generate=speculate, drafter=fresh, max_new_tokens=2)
    assert asked == [fresh]


@dataclass(frozen=True)
class Nest:
    outer: object
    inner: tuple
    gamma: int = 2


def test_dressed(pair):
    "Bare models are found wherever they stand; a drafter without one stays the same object"
    like = lambda m: ("served", m)
    p, q = pair
    assert wrap_models(Chain(q, 2), like) == Chain(("served", q), 2)
    assert wrap_models(Nest(Chain(p, 1), (q, 3)), like) == Nest(Chain(("served", p), 1), (("served", q), 3))
    own = HFModel(q, check=False)
    for x in (PromptLookup(3), Chain(own, 2), no_draft, Nest(1, (2, 3)), Chain): assert wrap_models(x, like) is x
    assert wrap_model(q, LogitsProcessorList(), 0).temperature == 0


# ---- the door

IDS = torch.tensor([[1, 2, 3]])
BAD = {
    "num_beams": dict(num_beams=2),
    "num_return_sequences": dict(num_return_sequences=2, do_sample=True),
    "output_attentions": dict(output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": dict(output_hidden_states=True, return_dict_in_generate=True),
    "guidance_scale": dict(guidance_scale=1.5),
    "prompt_lookup_num_tokens": dict(prompt_lookup_num_tokens=3),
    "assistant_early_exit": dict(assistant_early_exit=1),
    "assistant_ensemble_weight": dict(assistant_ensemble_weight=.5),
    "input_ids": dict(inputs=IDS.repeat(2, 1)),
    "attention_mask": dict(attention_mask=torch.tensor([[0, 1, 1]])),
    "position_ids": dict(position_ids=torch.tensor([[3, 4, 5]])),
    "past_key_values": dict(past_key_values=DynamicCache()),
    "inputs_embeds": dict(inputs=None, inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64)),
    "drafter": dict(drafter=None),
    "verify": dict(verify=3),
    "seed": dict(seed=-1),
    "max_length": dict(max_new_tokens=5000),
    "ctx": dict(inputs=torch.tensor([[1, -2]])),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(pair, name):
    "Each argument by its name, before a token is said"
    heard = []
    options = {**dict(inputs=IDS, custom_generate=speculate, drafter=pair[1], max_new_tokens=4, pad_token_id=0, token_callback=heard.append), **BAD[name]}
    if name == "ctx": options["attention_mask"] = torch.ones(1, 2, dtype=torch.long)
    refuses(name, pair[0].generate, **options)
    assert not heard


@pytest.mark.parametrize("drafter", [network("Llama", vocab_size=32), PromptLookup(7), 3, "small"], ids=["model", "lookup", "number", "name"])
def test_drafters_that_are_none(pair, drafter): refuses("drafter", pair[0].generate, IDS, custom_generate=speculate, drafter=drafter, max_new_tokens=3, pad_token_id=0)


def test_models_that_are_refused(pair):
    "Dropout, and networks whose tree pass is none"
    noisy = network("Llama").train()
    refuses("model", noisy.generate, IDS, custom_generate=speculate, drafter=pair[1], max_new_tokens=3, pad_token_id=0)
    refuses("model", pair[0].generate, IDS, custom_generate=speculate, drafter=noisy, max_new_tokens=3, pad_token_id=0)
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=V, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)).eval()
    with pytest.raises(ValueError): t5.generate(IDS, custom_generate=speculate, drafter=pair[1], max_new_tokens=3)


def test_a_processor_that_remembers_is_refused(pair):
    guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, pair[0])
    refuses("logits_processor", pair[0].generate, IDS, custom_generate=speculate, drafter=pair[1], logits_processor=LogitsProcessorList([guide]), max_new_tokens=3, pad_token_id=0)


def test_every_refused_option_exists():
    "The table names options of transformers' configuration, and its defaults pass"
    assert set(SERVED_CONFIG) <= set(vars(GenerationConfig()))


# ---- chance, asked through torch

@given(laws(4))
def test_a_draw_of_torch_is_a_pick(p):
    w = torch.tensor(p.astype(float))
    def both(rng):
        with TorchEnumerator(rng): return (*torch.multinomial(torch.stack([w, w.flip(0)]), num_samples=1).flatten().tolist(), torch.multinomial(w, 1).item())
    want = law_of(lambda rng: (rng.pick(p), rng.pick(p[::-1]), rng.pick(p)))
    assert tv_outcomes(law_of(both), want) < 1e-12


def test_a_uniform_number_is_a_coin():
    def compared(rng):
        with TorchEnumerator(rng): return tuple((torch.rand_like(t := torch.tensor([.25, 1.5, 0.])) <= t).tolist())
    assert law_of(compared) == {(True, True, False): .25, (False, True, False): .75}


@pytest.mark.parametrize("draw", [lambda: torch.rand(3), lambda: torch.randn(2), lambda: torch.zeros(3).uniform_(), lambda: torch.bernoulli(torch.tensor([.5])), lambda: torch.zeros(2).exponential_(), lambda: torch.multinomial(torch.ones(3), 2)])
def test_a_draw_that_cannot_be_asked_is_refused(draw):
    with TorchEnumerator(Enumerator()): refuses("rng", draw)
    draw()   # outside, torch is as it was


def test_speculative_decoding_of_transformers_is_exact(three):
    "Plain and assisted, by all roads: the instrument agrees with the theorem"
    p, q = three
    q.generation_config.update(num_assistant_tokens=2)
    options = dict(do_sample=True, top_k=0, max_new_tokens=3)
    want = generate_law(p, (0, 1), **options)
    assert tv_outcomes(want, target_law(HFModel(p, check=False), (0, 1), 3)) < EXACT
    assert tv_outcomes(generate_law(p, (0, 1), assistant_model=q, **options), want) < EXACT
    assert tv_outcomes(generate_law(p, (0, 1), prompt_lookup_num_tokens=2, **options), want) < EXACT


# ---- candidate generators as drafters

def assisted(model, kind=AssistedCandidateGenerator, tokens=2, schedule="constant", threshold=.4, **changed):
    model.generation_config.update(num_assistant_tokens=tokens, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=threshold)
    config = GenerationConfig(**{**dict(do_sample=True, top_k=0, temperature=1., top_p=1., max_length=60, min_length=0), **changed})
    return kind(input_ids=torch.tensor([[0]]), assistant_model=model, generation_config=config, model_kwargs={})


@pytest.mark.parametrize("changed", [{}, dict(temperature=.5), dict(top_p=.7), dict(repetition_penalty=1.6), dict(eos_token_id=2), dict(threshold=0.), dict(threshold=.9, tokens=3)])
def test_the_sampled_assistant_keeps_the_contract(three, changed):
    "What it states is what it draws, whatever warps it, and where it stops early too: it stops after a token that it offers"
    drafter = GeneratorDrafter(assisted(three[1], **changed), 3)
    for ctx in ((0,), (0, 1, 2)): assert edge_law_error(drafter, ctx) < EXACT
    trees = law_of(lambda rng: drafter((0, 1), rng))
    assert len(trees) >= 2 and abs(sum(trees.values()) - 1) < EXACT


def test_the_confidence_threshold_decides_the_length(three):
    depths = lambda c: set(law_of(lambda rng: len(GeneratorDrafter(assisted(three[1], threshold=c, tokens=3), 3)((0, 1), rng)) - 1))
    assert depths(0.) == {3} and min(depths(.9)) >= 1 and len(depths(.4)) > 1


def test_the_greedy_assistant_states_another_law(three):
    "The token is the argmax and the edge says softmax: exact under `match`, wrong under `reject`"
    p, q = three
    drafter, target = GeneratorDrafter(assisted(q, tokens=1, do_sample=False), 3), HFModel(p, check=False)
    law = HFModel(q, check=False).law((0, 1))
    assert abs(edge_law_error(drafter, (0, 1)) - tv(law, greedy(law))) < EXACT and edge_law_error(drafter, (0, 1)) > .05
    want = target_law(target, (0, 1), 2)
    assert tv_outcomes(loop_law(target, drafter, match, (0, 1), 2), want) < EXACT < .01 < tv_outcomes(loop_law(target, drafter, reject, (0, 1), 2), want)


def test_the_assistant_in_our_loop_is_exact(three):
    p, q = three
    target = HFModel(p, check=False)
    for generator in (assisted(q), assisted(q, schedule="heuristic", tokens=1)):
        assert tv_outcomes(loop_law(target, GeneratorDrafter(generator, 3), reject, (0, 1), 2), target_law(target, (0, 1), 2)) < EXACT


def test_early_exit_and_lookup(three):
    deep = network("Llama", seed=4, vocab_size=3)
    early = GeneratorDrafter(assisted(deep, EarlyExitCandidateGenerator, assistant_early_exit=1), 3)
    assert edge_law_error(early, (0, 1)) < EXACT and deep.config.num_hidden_layers == 2
    lookup = GeneratorDrafter(PromptLookupCandidateGenerator(num_output_tokens=3, max_matching_ngram_size=2, max_length=60), 3)
    for ctx in ((0, 1, 2, 0, 1), (0, 1, 2), (1, 1, 1)):
        assert edge_law_error(lookup, ctx) == 0 and lookup(ctx, Enumerator()) == PromptLookup(3, 2, 3)(ctx, Enumerator())
    assert lookup.learn(None) is lookup


NONE = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
SMALL = dict(vocab_size=3, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64, head_dim=8, **NONE)


def wild(make):
    torch.manual_seed(3)
    model = make().eval()
    with torch.no_grad(): [w.normal_(0, .5) for w in model.parameters() if w.dim() > 1]
    return model


def reads_states(which):
    "A target, how to make a generator that reads its hidden states, and what asks `generate` for the same"
    if which == "dflash":
        model = wild(lambda: LlamaForCausalLM(LlamaConfig(**SMALL))).double()
        block = wild(lambda: MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**SMALL, num_key_value_heads=2, layer_types=["full_attention"], block_size=3,
                                                                                  mask_token_id=2, target_layer_ids=[0]))).double()
        make = lambda config: DFlashTokenCandidateGenerator(block, model.get_input_embeddings(), model.get_output_embeddings(), config, LogitsProcessorList())
        options = dict(assistant_model=block, speculation_type="dflash")
    else:
        model = wild(lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL, moe_intermediate_size=8, num_key_value_heads=1, n_routed_experts=2, num_experts_per_tok=1,
                                                              n_group=1, topk_group=1, first_k_dense_replace=1, num_mtp_layers=1)))
        make, options = lambda config: MTPCandidateGenerator(model, config, {}, LogitsProcessorList()), dict(use_mtp=True)
    return model, lambda sampled: make(GenerationConfig(do_sample=sampled, max_length=60)), options


@pytest.mark.parametrize("which", ["dflash", "heads"])
def test_generators_that_read_hidden_states(which, monkeypatch):
    "They draft what they draft inside `generate`, keep the contract and, in our loop, the law; before there is a pass they draft nothing"
    model, build, options = reads_states(which)
    if which == "heads":
        heads = wild(lambda: MtpModel(model, 1))
        monkeypatch.setattr(MtpModel, "from_pretrained", lambda *a, **kw: heads)
    kind, heard = type(build(False)), []
    answer = kind.get_candidates
    monkeypatch.setattr(kind, "get_candidates", lambda self, ids, **kw: heard.append(answer(self, ids, **kw)) or heard[-1])
    said(model, (0, 1, 2, 2), do_sample=False, max_new_tokens=4, **options)
    monkeypatch.undo()
    if which == "heads": monkeypatch.setattr(MtpModel, "from_pretrained", lambda *a, **kw: heads)
    ids, z = heard[1]                                            # the first draft: of the prompt and the target's first token
    greedily = GeneratorDrafter(build(False), 3, model)
    tree, more = greedily(tuple(ids[0, :5].tolist()), Seeded(0)), len(ids[0]) - 5
    assert 1 < more + 1 <= greedily.depth + 1 and tree.token[1:] == ids[0, 5:].tolist() and len(tree) == more + 1
    for i in range(more): assert np.abs(tree.law[i + 1] - torch.softmax(z[0, i].double(), -1).numpy()).max() < EXACT
    drafter, target = GeneratorDrafter(build(True), 3, model), HFModel(model, check=False)
    assert edge_law_error(drafter, (0, 1)) < EXACT and len(drafter((0,), Seeded(0))) == 1 and len(drafter((0, 1), Seeded(0))) > 1
    assert tv_outcomes(loop_law(target, drafter, reject, (0, 1), 2), target_law(target, (0, 1), 2)) < EXACT


def test_a_generator_is_a_value(three):
    "Drafting changes nothing in it; `learn` returns another, and the heuristic moves by what was kept"
    p, q = three
    drafter, target = GeneratorDrafter(assisted(q, schedule="heuristic", tokens=2, threshold=0.), 3), HFModel(p, check=False)
    kept = set()
    for s in range(8):
        round = next(rounds(target, drafter, reject, (0, 1), Seeded(s)))
        after, full = drafter.learn(round), round.verdict.node == 2
        assert after.generator.num_assistant_tokens == after.depth == (4 if full else 1) and drafter.generator.num_assistant_tokens == drafter.depth == 2
        assert drafter.generator.assistant_kwargs.get("past_key_values") is None and after.generator.assistant_model is q
        kept.add(full)
    assert kept == {True, False}
    assert drafter((2, 2, 1), Seeded(3)) == drafter((2, 2, 1), Seeded(3)) and copy_generator(drafter.generator).assistant_model is q


def test_the_generators_are_eight():
    "The chapter's count: every class below transformers' `CandidateGenerator` that transformers itself defines"
    below = lambda kind: {kind}.union(*map(below, kind.__subclasses__()))
    theirs = {k.__name__ for k in below(CandidateGenerator) - {CandidateGenerator} if k.__module__.split(".")[0] == "transformers"}
    assert len(theirs) == 8 and theirs == {
        "AssistedCandidateGenerator", "AssistedCandidateGeneratorDifferentTokenizers", "UniversalSpeculativeDecodingGenerator", "EarlyExitCandidateGenerator",
        "PromptLookupCandidateGenerator", "MTPCandidateGenerator", "SinglePositionMultiTokenCandidateGenerator", "DFlashTokenCandidateGenerator"}


def test_generators_that_are_refused(three):
    used = assisted(three[1])
    used.get_candidates(torch.tensor([[0, 1]]))
    refuses("generator", GeneratorDrafter, used, 3)
    refuses("generator", GeneratorDrafter, three[1], 3)
    refuses("model", GeneratorDrafter, MTPCandidateGenerator.__new__(MTPCandidateGenerator), 3)
    model, build, _ = reads_states("dflash")
    used = build(True)
    used.is_main_model_prefill = False
    refuses("generator", GeneratorDrafter, used, 3, model)
    for bad in (0, 1.5, None): refuses("V", GeneratorDrafter, assisted(three[1]), bad)
    refuses("V", GeneratorDrafter(assisted(three[1]), 4), (0, 1), Seeded(0))


# ---- misstatement

@proves("thm-misstated")
@settings(max_examples=60)
@given(laws(3), kinds, laws(3), laws(3), st.sampled_from([reject, match]))
def test_misstated_edges_bound_the_harm(p, kind, q, true, verify):
    "One edge that states q and is drawn from another law: the text is no further off than the two laws, in fractions, and at times as far"
    p, q = KINDS[kind](p, q)
    true = np.array([w * (s > 0) for w, s in zip(true, q)], dtype=object)
    assume(true.sum())
    true = true / true.sum()
    target = TableModel(3, lambda text: p)
    def draft(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, rng.pick(true), q)
        return tree
    assert edge_law_error(draft, (0,)) == tv(q, true)
    off = lambda d: tv_outcomes(continued(law_of(lambda rng: next(rounds(target, d, verify, (0,), rng)).tokens), target, (0,), 2), target_law(target, (0,), 2))
    assert off(draft) <= tv(q, true)


@proves("thm-misstated")
def test_misstated_argmax_attains_the_bound():
    "Target and draft agree and the argmax is offered as if drawn: the harm is the misstatement"
    p = exact(5, 3, 2)
    def draft(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, 0, p)
        return tree
    first = law_of(lambda rng: next(rounds(TableModel(3, lambda text: p), draft, reject, (0,), rng)).tokens[0])
    assert tv_outcomes(first, dict(enumerate(p))) == edge_law_error(draft, (0,)) == exact(1, 1)[0]
    assert edge_law_error(no_draft, (0,)) == 0


@proves("thm-misstated")
def test_misstated_rounds_add_up():
    "The same example decoded on: two tokens a round, each round loses half of what was right, and one round's bound does not hold for the text"
    p = exact(5, 3, 2)
    target = TableModel(3, lambda text: p)
    def draft(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, 0, p)
        return tree
    d = edge_law_error(draft, (0,))
    off = lambda n: tv_outcomes(loop_law(target, draft, reject, (0,), n), target_law(target, (0,), n))
    assert off(3) == Fraction(3, 4) > d
    for n in range(1, 6): assert off(n) == 1 - (1 - d) ** ((n + 1) // 2) <= (n + 1) // 2 * d


@proves("thm-misstated")
@settings(max_examples=40)
@given(kinds, seeds, seeds, st.booleans(), st.booleans(), st.sampled_from([reject, match]), st.integers(1, 3))
def test_misstated_rounds_are_off_by_at_most_the_sum(kind, seed, other, zeros, top, verify, R):
    "Laws that depend on the whole text: R rounds continued by the target are off by at most the sum of each round's largest misstatement, and n tokens by that of n rounds"
    n, (target, q) = 3, twins(kind, 3, seed, zeros)
    another = random_table(3, other, False)   # no zeros here: what q allows can be drawn
    def true(ctx):
        if top: return greedy(q.law(ctx))
        w = np.array([a * (b > 0) for a, b in zip(another.law(ctx), q.law(ctx))], dtype=object)
        return w / w.sum()
    def draft(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, rng.pick(true(ctx)), q.law(ctx))
        return tree
    texts, worst = {(): Fraction(1)}, []   # the law of what r rounds said, and the largest TV(S, S') of each round before n tokens are said
    want = target_law(target, (0,), n)
    for r in range(R):
        unsaid = [t for t in texts if len(t) < n]
        for t in unsaid: assert edge_law_error(draft, (0, *t)) == tv(q.law((0, *t)), true((0, *t)))
        worst.append(max((edge_law_error(draft, (0, *t)) for t in unsaid), default=0))
        after = Counter()
        for t, w in texts.items():
            said_next = law_of(lambda rng: next(rounds(target, draft, verify, (0, *t), rng)).tokens) if len(t) < n else {(): 1}
            for more, v in said_next.items(): after[(t + more)[:n]] += w * v
        texts = after
        assert tv_outcomes(continued(texts, target, (0,), n), want) <= sum(worst) <= (r + 1) * max(worst)
    if R == n: assert texts == loop_law(target, draft, verify, (0,), n)
