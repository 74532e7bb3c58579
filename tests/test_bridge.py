"09_bridge: transformers' `generate` runs our systems under its own options; its generators as drafters"
from collections import Counter
from fractions import Fraction
from functools import cache, partial

import numpy as np, pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator, CandidateGenerator, PromptLookupCandidateGenerator)

from contracts import continued
from helpers import Plan, examples, kinds, laws, models, plans, proves, refuses, seeds, related_pair
from test_transformer import NONE, bare as network
from specref import (Branching, Chain, generate_law, greedy, HFModel, iid, law_of, loop_law, match,
                     no_draft, PromptLookup, random_table, reject, rounds, Seeded, speculate, target_law,
                     Tree, tv, tv_outcomes, Verdict)
from specref.core.drafters import round_robin
from specref.core.loop import CheckedDrafter, as_drafter
from specref.models.bridge import (SERVED_CONFIG, GeneratorDrafter, SpeculativeOutput, TextSoFar,
                                   TorchEnumerator, copy_generator, decode_rounds, edge_law_error,
                                   new_tokens, wrap_models)
from specref.models.transformer import cache_name, given_cache

V = 64
EXACT = 1e-6   # transformers computes in float32 from the logits on
PROMPTS = [(60, 5, 60, 5), (7,)]

@pytest.fixture(scope="module")
def pair():
    "A target, and a draft that is the target with noise on its weights: some of what it drafts is accepted"
    target, draft = network("Llama"), network("Llama")
    with torch.no_grad():
        for w in draft.parameters(): w.add_(.03 * torch.randn_like(w))
    return target, draft

@pytest.fixture(scope="module")
def three():
    "A target and a draft on three tokens, which give every token positive probability"
    both = [network("Llama", seed=s, vocab_size=3, num_hidden_layers=1) for s in (0, 1)]
    with torch.no_grad():
        for m in both: m.lm_head.weight.mul_(.3)
    return both

def emitted(model, prompt, **options):
    usual = dict(max_new_tokens=13, pad_token_id=0, do_sample=False)
    return new_tokens(model, prompt, **usual | options)

def ours(model, prompt, drafter, **options):
    return emitted(model, prompt, custom_generate=speculate, drafter=drafter, **options)

# ---- temperature 0: the text of transformers' own generate

def their_lookup(V, **sizes):
    return GeneratorDrafter(PromptLookupCandidateGenerator(**sizes, max_length=60), V)

DRAFTERS = {
    "a model": lambda draft: draft,
    "chain": lambda draft: Chain(draft, 3),
    "tree": lambda draft: Branching(draft, (3, 2, 1)),
    "their lookup": lambda draft: their_lookup(V, num_output_tokens=4),
    "wrapped, its own temperature": lambda draft: Chain(HFModel(draft, temperature=2., check=False), 2),
}
ENDS = list(range(0, V, 3))

def by_length(ids, z): return z.masked_fill(torch.arange(V) % 5 == len(ids[0]) % 5, -float("inf"))
def allowed(batch, ids): return [int(ids[-1] * 7 + k) % V for k in range(9)]

PROCESSORS = {
    "none": {},
    "min_length": dict(eos_token_id=ENDS, min_length=12),
    "forced_eos_token_id": dict(eos_token_id=63, forced_eos_token_id=63),
    "suppress_tokens": dict(suppress_tokens=ENDS, begin_suppress_tokens=list(range(30, 50))),
    "exponential_decay": dict(eos_token_id=9, exponential_decay_length_penalty=(3, 1.4)),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=allowed),
    "a custom one": dict(logits_processor=LogitsProcessorList([by_length])),
    "several": dict(repetition_penalty=1.3, no_repeat_ngram_size=3, eos_token_id=ENDS, min_new_tokens=6),
}
CASES = {(name, "chain") for name in PROCESSORS} | {("several", drafter) for drafter in DRAFTERS}

@pytest.mark.parametrize("name, drafter", sorted(CASES))
def test_greedy_identity(pair, name, drafter):
    "do_sample=False: the same tokens, for any list of processors and any drafter"
    target, draft = pair
    for prompt, verify in zip(PROMPTS, (reject, match)):
        want = emitted(target, prompt, **PROCESSORS[name])
        assert ours(target, prompt, DRAFTERS[drafter](draft), verify=verify, **PROCESSORS[name]) == want

@pytest.mark.parametrize("n", [1, 5, 6])
def test_the_text_ends_inside_an_accepted_run(pair, n):
    "The target drafts for itself, all is accepted; max_new_tokens, max_length and an end token cut the text"
    target, ctx = pair[0], (1, 2, 3)
    text, chain = emitted(target, ctx), Chain(target, 4)
    want, end = text[:n], text[:text.index(text[n]) + 1]
    assert ours(target, ctx, chain, max_new_tokens=n) == want
    assert ours(target, ctx, chain, max_new_tokens=None, max_length=3 + n) == want
    assert ours(target, ctx, chain, eos_token_id=text[n]) == end

def test_max_time(pair):
    "max_time has run out after the first token, as in transformers"
    assert len(emitted(pair[0], (1, 2), max_time=1e-9)) == 1
    assert len(ours(pair[0], (1, 2), Chain(pair[0], 3), max_time=1e-9)) == 1

def cut(target, drafter, ctx, ended, rng):
    "The text of `decode_rounds` on a table, ended by a function of its tokens"
    criterion = lambda ids, scores: torch.tensor([ended(tuple(ids[0].tolist()))])
    page = TextSoFar(torch.tensor([ctx]), criterion)
    return tuple(decode_rounds(target, as_drafter(drafter), reject, ctx, rng, page))

def plainly(target, ctx, ended):
    "The distribution of plain sampling that calls `ended` after every token"
    end, now = Counter(), {(): 1}
    while now:
        after = Counter()
        for out, w in now.items():
            for x, m in enumerate(target.law(ctx + out)):
                if m > 0: (end if ended(ctx + (*out, x)) else after)[(*out, x)] += w*m
        now = after
    return end

@proves("thm-criteria")
@examples(20, models(), plans(most=2, k=1), st.sampled_from([{2}, {0, 1}, {4, 5}]), st.integers(2, 3))
def test_ended_by_any_function_of_the_text(pair, steps, sums, n):
    "Called after every token, a criterion cuts the text of any system as it cuts plain sampling: exactly"
    ended = lambda text: len(text) == 1 + n or sum(text) in sums or text[-2:] == (1, 1)
    law = law_of(lambda rng: cut(pair[0], Plan(pair[1], steps), (0,), ended, rng))
    assert law == plainly(pair[0], (0,), ended)

# ---- the distribution

SAMPLING = {
    "plain": dict(top_k=0),
    "warped": dict(top_k=2, temperature=.7, top_p=.8),
    "by the text": dict(top_k=0, repetition_penalty=1.5, no_repeat_ngram_size=2, temperature=1.3),
    "by its end": dict(top_k=0, eos_token_id=2, min_new_tokens=2, pad_token_id=0),
}

@pytest.mark.parametrize("name", SAMPLING)
def test_exact_distribution_through_generate(three, name):
    "Every path of transformers' plain `generate`, and every path of ours through the same call"
    p, q = three
    options = dict(do_sample=True, max_new_tokens=2, **SAMPLING[name])
    want = generate_law(p, (0, 1), **options)
    law = law_of(lambda rng: ours(p, (0, 1), Chain(q, 1), seed=rng, **options))
    assert tv_outcomes(law, want) < EXACT and len(want) > 2

@pytest.mark.parametrize("drafter", ["a model", "chain", "tree"])
def test_processors_act_on_target_and_draft(pair, drafter):
    "A draft that is the target, behind the same processors at every node, is always accepted"
    options = dict(do_sample=True, temperature=.6, top_k=7, repetition_penalty=1.8, no_repeat_ngram_size=2)
    ledger = output(pair[0], DRAFTERS[drafter](pair[0]), max_new_tokens=30, seed=3, **options).text.ledger
    path = sum(row.depth for row in ledger.rounds)
    assert path - 3 <= ledger.num_accepted_tokens <= path and path >= 20

def output(model, drafter, ids=(1, 2, 1), **options):
    usual = dict(do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    return model.generate(torch.tensor([ids]), **usual | options, custom_generate=speculate, drafter=drafter)

def test_a_misstated_temperature_is_detected(three):
    "A mutant drafts at a temperature and states q without it: detected exactly, and by `edge_law_error`"
    (p, q), options = three, dict(do_sample=True, top_k=0, max_new_tokens=2)
    hot, stated = HFModel(q, 5., check=False), HFModel(q, check=False)
    def steep(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, rng.pick(hot.law(ctx)), stated.law(ctx))
        return tree
    want = generate_law(p, (0, 1), **options)
    off = lambda d: tv_outcomes(law_of(lambda rng: ours(p, (0, 1), d, seed=rng, **options)), want)
    assert off(steep) > .1 and edge_law_error(steep, (0, 1)) > .1
    assert off(Chain(hot, 1)) < EXACT and edge_law_error(Chain(hot, 1), (0, 1)) < EXACT

def test_the_torch_seed_sets_the_draws(three):
    "The same torch seed, the same text; an explicit seed does not touch torch's generator"
    p, q = three
    once = lambda **how: ours(p, (0, 1), q, do_sample=True, max_new_tokens=20, **how)
    texts = []
    for s in (0, 0, 1, 2):
        transformers.set_seed(s)
        texts += [once(), once()]
    assert texts[:2] == texts[2:4] and len(set(texts)) >= 5
    state = torch.get_rng_state()
    assert once(seed=5) == once(seed=Seeded(5)) != once(seed=6) and torch.equal(state, torch.get_rng_state())

# ---- the output

def test_the_output_object(pair):
    "Sequences, scores and logits are those of transformers, also for a criterion that reads the scores"
    (target, draft), seen = pair, []
    def unlikely(ids, scores):
        seen.append(len(scores))
        return torch.tensor([scores[-1].softmax(-1)[0, ids[0, -1]].item() < .2])
    options = dict(max_new_tokens=11, repetition_penalty=1.4, output_scores=True, output_logits=True,
                   stopping_criteria=StoppingCriteriaList([unlikely]))
    want = target.generate(torch.tensor([[1, 2, 1]]), do_sample=False, return_dict_in_generate=True,
                           pad_token_id=0, **options)
    out = output(target, Chain(draft, 3), **options)
    n = out.sequences.shape[1] - 3
    assert isinstance(out, SpeculativeOutput) and torch.equal(out.sequences, want.sequences)
    assert seen == [*range(1, n + 1)] * 2 and 1 < n < 11
    for a, b in zip((*out.scores, *out.logits), (*want.scores, *want.logits), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and abs(a - b).max() < 1e-4
    assert out.text == tuple(out.sequences[0, 3:].tolist()) and out.text.logprobs == (0.,) * n
    ledger = out.text.ledger
    assert ledger.models["target"].calls == len(ledger.rounds) < n and ledger.num_accepted_tokens > 0

def test_the_log_probabilities_are_those_of_the_scores(pair):
    out = output(*pair, do_sample=True, top_k=5, max_new_tokens=9, seed=1, output_scores=True)
    logprobs = [z.double().log_softmax(-1)[0, x].item() for z, x in zip(out.scores, out.text)]
    assert np.allclose(out.text.logprobs, logprobs, atol=1e-5) and min(logprobs) < -.1 and out.logits is None

def test_the_given_verifier_is_used(pair):
    lazy = lambda p, tree, rng: Verdict(0, rng.pick(p[0]))
    text = output(pair[0], pair[0], max_new_tokens=5, verify=lazy).text
    assert (text.ledger.num_draft_tokens, text.ledger.num_accepted_tokens) == (20, 0)
    assert text == emitted(pair[0], (1, 2, 1), max_new_tokens=5)

def test_the_callback_gets_the_tokens_of_every_round(pair):
    parts = []
    text = ours(pair[0], (40, 50), Chain(pair[0], 3), token_callback=parts.append)
    assert tuple(torch.cat(parts).tolist()) == text and [len(t) for t in parts] == [4, 4, 4, 1]

# ---- several texts, streams, caches

IDS, MASK = torch.tensor([[0, 0, 0, 5, 60, 5], [60, 5, 60, 5, 9, 9]]), torch.tensor([[0]*3 + [1]*3, [1]*6])
BATCHES = {
    "equal lengths": dict(max_new_tokens=9),
    "one text ends first": dict(max_new_tokens=12, eos_token_id=ENDS[::2], min_new_tokens=2),
    "processors that read padding and batch": dict(
        max_new_tokens=8, repetition_penalty=1.4, min_new_tokens=5, eos_token_id=ENDS,
        prefix_allowed_tokens_fn=lambda row, ids: [int(ids.sum() * 7 + 3*k + row) % V for k in range(9)])}

@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_the_batch_of_generate(pair, name):
    "Left padding, texts that end at different lengths, copies by num_return_sequences"
    options = dict(BATCHES[name], attention_mask=MASK, do_sample=False, pad_token_id=0)
    want = pair[0].generate(IDS, **options)
    out = pair[0].generate(IDS, custom_generate=speculate, drafter=Chain(pair[1], 3),
                           return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, want) and len(out.texts) == 2
    assert all(t.ledger.num_accepted_tokens > 0 for t in out.texts)
    assert getattr(out, cache_name(pair[0])) is None

def test_a_processor_with_state_is_refused_by_name_in_a_batch(pair):
    calls = []
    def counting(ids, z): return z + len(calls) * (calls.append(1) or torch.arange(z.shape[-1]))
    with pytest.raises(ValueError, match="processors: got counting, which returns other scores"):
        pair[0].generate(IDS, attention_mask=MASK, max_new_tokens=3, pad_token_id=0, drafter=pair[1],
                         logits_processor=LogitsProcessorList([counting]), custom_generate=speculate)

def test_an_error_in_a_round_keeps_the_text(pair):
    "The exception has what was decoded before, also through transformers"
    seen = []
    def watch(tokens):
        seen.extend(tokens.tolist())
        if len(seen) > 6: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as e:
        ours(pair[0], (40, 50), Chain(pair[0], 3), token_callback=watch)
    assert e.value.decoded == tuple(seen) and len(seen) == 8

def test_a_sampled_batch_has_the_joint_distribution_of_generate(three):
    "Two texts of different lengths: every pair of results, enumerated on both sides; copies are independent"
    target, draft = three
    ids, mask = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 1], [1, 1]])
    options = dict(attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=1, repetition_penalty=1.3,
                   pad_token_id=0)
    def texts(rng, **how):
        with TorchEnumerator(rng): return tuple(target.generate(ids, **options, **how)[:, 2].tolist())
    want = law_of(texts)
    got = law_of(lambda rng: texts(rng, custom_generate=speculate, drafter=Chain(draft, 1), seed=rng))
    assert tv_outcomes(want, got) < EXACT and len(got) == 9
    copies = target.generate(ids[1:], do_sample=True, num_return_sequences=20, seed=0, max_new_tokens=4,
                             pad_token_id=0, custom_generate=speculate, drafter=draft)
    assert len({*map(tuple, copies.tolist())}) > 5

def test_a_streamer_gets_every_token(pair):
    "transformers does not pass a streamer to custom functions: ours finds it"
    class Written(list):
        put, end = (lambda self, x: self.extend(x.flatten().tolist())), lambda self: self.append("end")
    a, b = Written(), Written()
    usual = dict(attention_mask=MASK[1:], do_sample=False, max_new_tokens=7, pad_token_id=0)
    pair[0].generate(IDS[1:], streamer=a, **usual)
    pair[0].generate(IDS[1:], streamer=b, custom_generate=speculate, drafter=pair[1], **usual)
    assert a == b and len(b) == 14

def test_the_returned_cache_continues_the_text(pair):
    "The keys and values of all tokens but the last: plain generate goes on from them"
    usual = dict(do_sample=False, pad_token_id=0)
    out = pair[0].generate(IDS[1:], custom_generate=speculate, drafter=pair[1], max_new_tokens=6,
                           return_dict_in_generate=True, **usual)
    want = pair[0].generate(IDS[1:], max_new_tokens=12, **usual)
    past = given_cache(pair[0], getattr(out, cache_name(pair[0])))
    assert [cache.get_seq_length() for cache in past.values()] == [11]
    more = pair[0].generate(out.sequences, max_new_tokens=6, **past, **usual)
    assert torch.equal(more, want)

def test_a_model_is_checked_once_and_unchanged_after(monkeypatch):
    checked, fresh = [], network("Llama", seed=3, num_hidden_layers=1)
    monkeypatch.setattr(HFModel, "check", lambda self: checked.append(self.model))
    before = fresh.generation_config.to_dict()
    for _ in range(2): ours(fresh, (1, 2), fresh, max_new_tokens=2)
    assert checked == [fresh] and fresh.generation_config.to_dict() == before and torch.is_grad_enabled()

def test_wrapped_models(pair):
    "Bare models are wrapped at any depth; a drafter without one stays the same object"
    like, draw, (p, q) = cache(partial(HFModel, check=False)), round_robin(iid), pair
    def nested(*models): return CheckedDrafter(Branching(models, (1,), draw))
    assert wrap_models(nested(p, q), like) == nested(like(p), like(q))
    own = Chain(HFModel(q, check=False), 2)
    for x in (PromptLookup(3), own, no_draft, Chain): assert wrap_models(x, like) is x

def test_every_refused_option_exists(): assert set(SERVED_CONFIG) <= set(vars(GenerationConfig()))

# ---- random draws through torch

@examples(20, laws(3))
def test_a_draw_of_torch_is_a_pick_and_a_uniform_number_a_coin(p):
    w, ratios = torch.tensor(p.astype(float)), torch.tensor([.25, 1.5, 0.])
    def drawn(rng):
        with TorchEnumerator(rng):
            pick = torch.multinomial(torch.stack([w, w.flip(0)]), num_samples=1).flatten().tolist()
            return (*pick, torch.multinomial(w, 1).item(), *(torch.rand_like(ratios) <= ratios).tolist())
    def want(rng):
        picks = rng.pick(p), rng.pick(p[::-1]), rng.pick(p)
        return (*picks, rng.coin(.25), True, False)
    assert tv_outcomes(law_of(drawn), law_of(want)) < 1e-12

# ---- candidate generators as drafters

def assisted(model, tokens=2, schedule="constant", threshold=.4, **changed):
    model.generation_config.update(num_assistant_tokens=tokens, num_assistant_tokens_schedule=schedule,
                                   assistant_confidence_threshold=threshold)
    usual = dict(do_sample=True, top_k=0, temperature=1., top_p=1., max_length=60, min_length=0)
    config = GenerationConfig(**usual | changed)
    generator = AssistedCandidateGenerator(torch.tensor([[0]]), model, config, {})
    return GeneratorDrafter(generator, 3)

@pytest.mark.parametrize("changed", [
    dict(temperature=.5), dict(top_p=.7), dict(repetition_penalty=1.6), dict(eos_token_id=2),
    dict(threshold=.9, tokens=3)])
def test_the_sampled_assistant_satisfies_the_contract(three, changed):
    "It states the distribution it draws from, also where it stops early: after a token that it drafts"
    drafter = assisted(three[1], **changed)
    for ctx in ((0,), (0, 1, 2)): assert edge_law_error(drafter, ctx) < EXACT

def test_the_heuristic_assistant_in_our_loop_is_exact(three):
    assert loop_error(three[0], assisted(three[1], schedule="heuristic", tokens=1)) < EXACT

def block_network(model):
    "A block drafter with large random weights, of the sizes of `model`"
    torch.manual_seed(3)
    same = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    config = transformers.MuseGlimmerAssistantConfig(
        **{name: getattr(model.config, name) for name in same}, **NONE, num_hidden_layers=1, head_dim=8,
        layer_types=["full_attention"], block_size=3, mask_token_id=2, target_layer_ids=[0])
    block = transformers.MuseGlimmerAssistantModel(config).double().eval()
    with torch.no_grad(): [w.normal_(0, .3) for w in block.parameters() if w.dim() > 1]
    return block

def block_drafter(model, block, sampled):
    config = GenerationConfig(do_sample=sampled, max_length=60)
    rows = model.get_input_embeddings(), model.get_output_embeddings()
    made = candidate_generator.DFlashTokenCandidateGenerator
    generator = made(block, *rows, config, LogitsProcessorList())
    return GeneratorDrafter(generator, 3, model)

def test_a_generator_that_reads_hidden_states(three, monkeypatch):
    "It drafts the tokens that it drafts inside `generate`, and is exact; without a pass it drafts nothing"
    model, block, found = three[0], block_network(three[0]), []
    top, sampled = (block_drafter(model, block, sample) for sample in (False, True))
    kind = candidate_generator.DFlashTokenCandidateGenerator
    answer = kind.get_candidates
    def noted(*args, **kw):
        found.append(answer(*args, **kw))
        return found[-1]
    monkeypatch.setattr(kind, "get_candidates", noted)
    emitted(model, (0, 1, 2, 2), max_new_tokens=4, assistant_model=block, speculation_type="dflash")
    ids, z = found[1]                          # the first draft: of the prompt and the target's first token
    tree = top(tuple(ids[0, :5].tolist()), Seeded(0))
    assert len(tree) > 1 and tree.token[1:] == ids[0, 5:].tolist()
    stated = z[0, :len(tree) - 1].double().softmax(-1).numpy()
    assert np.abs(np.stack(tree.law[1:]) - stated).max() < EXACT
    assert loop_error(model, sampled) < EXACT and len(sampled((0,), Seeded(0))) == 1

def loop_error(model, drafter):
    target = HFModel(model, check=False)
    return tv_outcomes(loop_law(target, drafter, reject, (0, 1), 2), target_law(target, (0, 1), 2))

def test_a_generator_is_not_changed(three):
    "Drafting changes nothing in it; `learn` returns another, whose length depends on what was accepted"
    (p, q), seen = three, set()
    drafter = assisted(q, schedule="heuristic", tokens=2, threshold=0.)
    for s in range(8):
        round = next(rounds(HFModel(p, check=False), drafter, reject, (0, 1), Seeded(s)))
        after, full = drafter.learn(round), round.verdict.node == 2
        assert after.generator.num_assistant_tokens == after.depth == (4 if full else 1)
        assert drafter.generator.num_assistant_tokens == drafter.depth == 2
        assert drafter.generator.assistant_kwargs.get(cache_name(q)) is None
        seen.add(full)
    assert seen == {True, False} and copy_generator(drafter.generator).assistant_model is q
    drafter.generator.get_candidates(torch.tensor([[0, 1]]))
    refuses("generator", GeneratorDrafter, drafter.generator, 3)   # already used
    refuses("V", GeneratorDrafter(assisted(q).generator, 4), (0, 1), Seeded(0))

def test_the_generators_are_eight():
    "The chapter's count: every class below `CandidateGenerator` that transformers itself defines"
    below = lambda kind: {kind}.union(*map(below, kind.__subclasses__()))
    assert len([k for k in below(CandidateGenerator) if k.__module__.startswith("transformers.")]) == 1 + 8

# ---- misstatement

def one_edge(true, stated):
    "The drafter of one edge that states `stated(ctx)` and draws from `true(ctx)`"
    def draft(ctx, rng):
        tree = Tree(ctx)
        tree.add(0, rng.pick(true(ctx)), stated(ctx))
        return tree
    return as_drafter(draft)

@proves("thm-misstated")
@examples(25, kinds, seeds, seeds, st.booleans(), st.booleans(), st.sampled_from([reject, match]),
          st.integers(1, 3))
def test_misstated_rounds_are_off_by_at_most_the_sum(kind, seed, other, zeros, top, verify, R):
    "R rounds continued by the target are off by at most the sum of each round's largest misstatement"
    n, (target, q) = 3, related_pair(kind, 3, seed, zeros)
    another = random_table(3, other, False)   # no zeros here: every token of q's support can be drawn
    def true(ctx):
        w = greedy(q.law(ctx)) if top else another.law(ctx) * (q.law(ctx) > 0)
        return w / w.sum()
    draft, want = one_edge(true, q.law), target_law(target, (0,), n)
    texts, worst = {(): Fraction(1)}, []   # the distribution of texts after r rounds; max TV(S, S') of each
    for r in range(R):
        open_texts = [t for t in texts if len(t) < n]
        for t in open_texts: assert edge_law_error(draft, (0, *t)) == tv(q.law((0, *t)), true((0, *t)))
        worst.append(max((edge_law_error(draft, (0, *t)) for t in open_texts), default=0))
        texts = one_more_round(target, draft, verify, texts, n)
        assert tv_outcomes(continued(texts, target, (0,), n), want) <= sum(worst) <= (r + 1) * max(worst)
    if R == n: assert texts == loop_law(target, draft, verify, (0,), n)

def one_more_round(target, draft, verify, texts, n):
    after = Counter()
    for t, w in texts.items():
        step = lambda rng: next(rounds(target, draft, verify, (0, *t), rng)).tokens
        for more, v in (law_of(step) if len(t) < n else {(): 1}).items(): after[(t + more)[:n]] += w * v
    return after
