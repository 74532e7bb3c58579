"Invalid arguments of the models: chapters 07 to 09"
from copy import deepcopy
from functools import cache

import torch, transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.candidate_generator import MTPCandidateGenerator, PromptLookupCandidateGenerator

from specref import (autoregressive, certify_sampler, certify_system, Chain, CompiledLlama, embedded,
                     EncoderDecoderModel, Engine, Enumerator, generate, generate_law, HFModel, load_served,
                     loop_law, match, measure, no_draft, PackedLlama, PromptLookup, prompts, random_table,
                     rounds, Seeded, speculate, SYSTEMS, target_law, Tree)
from specref.draft.shapes import measure_rank_acceptance
from specref.models.bridge import GeneratorDrafter, TorchEnumerator
from specref.models.embedded import stored
from specref.models.transformer import cache_name

V, INF, NAN = 8, float("inf"), float("nan")
NONE = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
SIZES = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, **NONE)
IDS = torch.tensor([[1, 2, 3]])
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=2.)

@cache
def net(V=V, train=False): return LlamaForCausalLM(LlamaConfig(vocab_size=V, **SIZES)).train(train)

@cache
def t5():
    sizes = dict(vocab_size=V, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))

@cache
def mamba():
    sizes = dict(vocab_size=V, hidden_size=8, num_hidden_layers=1, num_heads=2, head_dim=8, state_size=4)
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, expand=2, n_groups=1, **NONE))

def served(**options): return lambda: HFModel(net(), **options)
def filled(x): return LogitsProcessorList([lambda ids, z: torch.full_like(z, x)])
def no_law(x): return lambda: HFModel(net(), processors=filled(x)).law((1,))
def after(ctx, x):
    tree = Tree(ctx)
    tree.add(0, x)
    return HFModel(net())(tree)

def packed(kind="llama", **config):
    made = transformers.AutoConfig.for_model(kind, vocab_size=V, **SIZES | config)
    return lambda: PackedLlama(transformers.AutoModelForCausalLM.from_config(made))
def packed_with_adapter():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, **SIZES))
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    return PackedLlama(model)

def no_callback(tokens): raise AssertionError("the error was raised after a round")

def called(model=net, **options):
    "`generate` through `speculate`, with one argument that must raise before the first round"
    usual = dict(inputs=IDS, max_new_tokens=4, pad_token_id=0, token_callback=no_callback)
    def call():
        given = {name: x() if callable(x) and name in ("drafter", "logits_processor") else x
                 for name, x in options.items()}
        return model().generate(**{**usual, "drafter": net(), **given}, custom_generate=speculate)
    return call

def noisy(): return net(V, True)
def guided(): return LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, net())])
def lookup(): return PromptLookupCandidateGenerator(num_output_tokens=3, max_length=60)
def drawn(draw):
    def call():
        with TorchEnumerator(Enumerator()): draw()
    return call

def wants_a_model(x):  # -> (argument, call)
    "The functions that want a model, with `x` there instead"
    p, q = random_table(V, 1), random_table(V, 2)
    yield from (("target", lambda f=f: f(x)) for f in (
        lambda x: generate(x, no_draft, match, (1,), 1, Seeded(0)), lambda x: target_law(x, (1,), 1),
        lambda x: rounds(x, no_draft, match, (1,), Seeded(0)),
        lambda x: loop_law(x, no_draft, match, (1,), 1),
        lambda x: certify_sampler(print, x, (1,)), lambda x: certify_system(autoregressive, x, (1,)),
        lambda x: measure(x, q, [(1,)]), lambda x: measure_rank_acceptance(x, q, [(1,)], 2)))
    yield "drafter", lambda: generate(p, x, match, (1,), 1, Seeded(0))
    name = "model" if isinstance(x, str) else "drafter"   # a network may be wrapped later, by `speculate`
    yield name, lambda: generate(p, Chain(x, 2), match, (1,), 1, Seeded(0))
    yield "draft", lambda: measure(p, x, [(1,)])
    yield "draft", lambda: SYSTEMS["prompt lookup"](x)
INSTEAD = {net: "compiled import load_served, serve_model`", t5: "import EncoderDecoderModel`",
           lambda: "path/or/name": r"load_served\(path\)"}

def compiled(how):
    "A model of a copy of the network, which `how` compiles"
    return lambda: HFModel(how(deepcopy(net())))
COMPILED = [
    torch.compile, lambda model: model.compile() or model,
    lambda model: vars(model).update(forward=torch.compile(model.forward)) or model]

DRAWS = [
    lambda: torch.rand(3), lambda: torch.randn(2), lambda: torch.zeros(3).uniform_(),
    lambda: torch.bernoulli(torch.tensor([.5])), lambda: torch.multinomial(torch.ones(3), 2),
    lambda: torch.zeros(2).exponential_()]

ROWS = [
    ("temperature", served(temperature=-1)), ("temperature", served(temperature=NAN)),
    ("top_k", served(top_k=0)), *(("top_p", served(top_p=bad)) for bad in (0, 1.5, True)),
    *(("keep", served(keep=bad), "whole numbers from 0 to 1") for bad in ((3,), (-1,), 1)),
    ("layers", lambda: HFModel(net()).states((1,), layers=(5,)), r"got \(5,\)"),
    *(("chunk", served(chunk=bad)) for bad in (0, -3, True)),
    *((name, served(**{name: "no"}), "None, True or False") for name in ("paths", "check")),
    *(("processors", served(processors=bad), r"functions \(ids, logits\) -> logits")
      for bad in ("abc", [None], print, [lambda ids: ids])),
    *(("logits", no_law(x), "got a largest value of") for x in (NAN, INF, -INF)),
    ("ctx", lambda: HFModel(net())(Tree(())), "empty context"),
    ("token", lambda: after((1, 2), V), f"got {V}"),
    ("model", lambda: HFModel("gpt2"), "HFModel.load"), ("model", lambda: HFModel(HFModel(net())), "`model`"),
    *((name, call, words) for x, words in INSTEAD.items() for name, call in wants_a_model(x())),
    *(("model", compiled(how), "before `torch.compile`") for how in COMPILED),
    ("target", lambda: Engine(embedded("small"), net(), (-1, 0)), "as its attribute `model`"),
    ("target", lambda: Engine(torch.compile(net()), net(), (-1, 0)), "as its attribute `_orig_mod`"),
    ("model", lambda: generate_law(embedded("small"), (1,)), "as its attribute `model`"),
    *(("temprature", lambda load=load: load(stored("small"), temprature=0), "an option of HFModel, or of A")
      for load in (HFModel.load, load_served)),
    ("stepwise", lambda: HFModel.load(stored("small"), stepwise=True)),
    ("path", lambda: EncoderDecoderModel.load(stored("small"), (1,)), r"load_served\(path\)"),
    *(("V", served(V=bad)) for bad in (0, V + 1, 2.5)),
    ("processors", served(processors=[lambda ids, z: torch.rand_like(z)])),
    ("device", lambda: HFModel.load("anywhere", device="cpu", device_map="auto")),
    *(("device", lambda bad=bad: HFModel.load(stored("small"), device=bad), "can use here: cpu")
      for bad in ("gpu", "cuda:99", 1.5)),
    *(("path", lambda bad=bad: HFModel.load(bad()), words) for bad, words in (
        (lambda: None, "got None"), (lambda: 3, "got 3"), (net, r"HFModel\(x\) takes a network"),
        (lambda: "small", r"embedded\('small'\)"))),
    ("model", lambda: HFModel(t5()), "import EncoderDecoderModel`"),
    ("model", lambda: HFModel(mamba()), "import load_served, serve_model`"),
    ("path", lambda: HFModel.load("/nowhere", revision="main")),
    ("name", lambda: embedded("huge"), "wanted one of"),
    ("domain", lambda: prompts("latin", 1), "wanted one of"), ("length", lambda: prompts("code", 1, 10**7)),
    ("n", lambda: prompts("code", -1)), ("seed", lambda: prompts("code", 1, seed=-1)),
    ("model", packed("gemma"), "architecture is gemma"), ("model", packed("mistral"), "a sliding window"),
    ("model", packed(hidden_act="gelu"), "has gelu"), ("model", packed_with_adapter, "plain linear maps"),
    ("model", packed(rope_parameters=DYNAMIC), "rotation dynamic"),
    ("model", lambda: PackedLlama("gpt2"), "architecture is str"),
    ("model", lambda: CompiledLlama("gpt2"), "wanted a Llama that is compiled: its architecture is str"),
    # the arguments of `generate`
    ("num_beams", called(num_beams=2)), ("use_cache", called(use_cache=False)),
    ("pad_token_id", called(inputs=IDS.repeat(2, 1), pad_token_id=None)),
    ("output_attentions", called(output_attentions=True, return_dict_in_generate=True)),
    ("output_hidden_states", called(output_hidden_states=True, return_dict_in_generate=True)),
    ("guidance_scale", called(guidance_scale=1.5)),
    ("prompt_lookup_num_tokens", called(prompt_lookup_num_tokens=3)),
    ("assistant_early_exit", called(assistant_early_exit=1)),
    ("assistant_ensemble_weight", called(assistant_ensemble_weight=.5)),
    *((name, called(inputs=IDS.repeat(2, 1), return_dict_in_generate=True, **{name: True}), "2 texts")
      for name in ("output_scores", "output_logits")),
    *(("attention_mask", called(attention_mask=torch.tensor([mask]))) for mask in ([1, 1, 0], [1, 0, 1])),
    ("position_ids", called(position_ids=torch.tensor([[3, 4, 5]]))),
    (cache_name(net()), called(**{cache_name(net()): DynamicCache()})),
    ("inputs_embeds", called(inputs=None, inputs_embeds=torch.zeros(1, 3, 8))),
    *(("verify", called(verify=bad), "such as reject") for bad in (3, "reject")),
    ("token_callback", called(token_callback=3)), *(("seed", called(seed=bad)) for bad in (-1, True, Seeded)),
    ("max_length", called(max_new_tokens=5000)),
    ("ctx", called(inputs=torch.tensor([[1, -2]]), attention_mask=torch.ones(1, 2, dtype=torch.long))),
    ("drafter", called(drafter=None)), ("drafter", called(drafter=3)), ("drafter", called(drafter="small")),
    ("drafter", called(drafter=lambda: net(5))), ("drafter", called(drafter=lambda: PromptLookup(7))),
    ("model", called(drafter=noisy)), ("model", called(noisy)), ("encoder_outputs", called(t5)),
    ("logits_processor", called(logits_processor=guided)),
    *(("rng", drawn(draw)) for draw in DRAWS),
    # candidate generators
    ("generator", lambda: GeneratorDrafter(3, V)), ("generator", lambda: GeneratorDrafter(net(), V)),
    ("model", lambda: GeneratorDrafter(MTPCandidateGenerator.__new__(MTPCandidateGenerator), V)),
    *(("V", lambda bad=bad: GeneratorDrafter(lookup(), bad)) for bad in (0, 1.5, None)),
]
