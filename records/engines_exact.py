"""transformers' drafters, enumerated: the exact output distributions of `generate` on networks of few tokens

Chapter 09 has the same comparison with explanations. Every network has random weights of a stated seed."""
from types import SimpleNamespace
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models as token_models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM, DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig, GenerationConfig, Glm4MoeConfig,
    Glm4MoeForCausalLM, LlamaConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel,
    PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM)
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator, DFlashTokenCandidateGenerator, MTPCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator)
from transformers.modeling_layers import MtpModel

from specref.core.loop import loop_law
from specref.core.rng import tv_outcomes
from specref.core.tree import Tree
from specref.models.bridge import GeneratorDrafter, edge_law_error, generate_law, new_tokens
from specref.models.transformer import HFModel, given_cache
from specref.verify.reject import reject

SAMPLING = dict(do_sample=True, top_k=0, temperature=1., top_p=1.)


def llama(**config): return AutoModelForCausalLM.from_config(LlamaConfig(**config))

def tiny(V=2, seed=0, layers=1, make=llama, **more):
    "A random network of `V` tokens"
    torch.manual_seed(seed)
    sizes = dict(vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
                 num_attention_heads=2)
    none = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = make(max_position_embeddings=64, **sizes, **none, **more)
    with torch.no_grad():
        for w in model.parameters():
            if w.dim() > 1: w.normal_(0, .5)
    return model.eval()

def off(target, plain={}, ctx=(0, 1), **how):
    "The distance of three tokens from those without an assistant"
    def law(more): return generate_law(target, ctx, max_new_tokens=3, **{**SAMPLING, **plain, **more})
    return float(tv_outcomes(law({}), law(how)))

def stated_off(generator, V=2, network=None):
    "The distance of the stated distribution of an edge from that of its token"
    return float(edge_law_error(GeneratorDrafter(generator, V, network), (0, 1)))
def config(**more): return GenerationConfig(**SAMPLING, max_length=64, min_length=0, **more)


class Gemma4AssistantStandIn(torch.nn.Module):
    "A network in place of Gemma 4's assistant, which 5.23.0 does not build; the generator is transformers'"
    def __init__(self, gemma, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.config, self.device = gemma.config, gemma.device
        self.generation_config = GenerationConfig(num_assistant_tokens=2)
        self.mix, self.head = torch.nn.Linear(32, 16).double(), torch.nn.Linear(16, 2).double()
    def forward(self, inputs_embeds, **kw):
        state = self.mix(inputs_embeds).tanh()
        return SimpleNamespace(last_hidden_state=state, logits=self.head(state))


def assistant(seed):
    "A draft model that samples, and early exit"
    p, q, deep = (tiny(2, seed + k, layers).double() for k, layers in ((0, 1), (1, 1), (4, 2)))
    for m in (q, deep): m.generation_config.num_assistant_tokens = 2
    generator = AssistedCandidateGenerator(
        input_ids=torch.tensor([[0]]), assistant_model=q, generation_config=config(), model_kwargs={})
    return {"assistant model": (stated_off(generator), off(p, assistant_model=q)),
            "early exit": (None, off(deep, assistant_early_exit=1))}

def block_drafter(seed):
    p = tiny(2, seed).double()
    def make(**kw): return MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**kw))
    muse = tiny(2, seed + 5, make=make, head_dim=8, num_key_value_heads=2, layer_types=["full_attention"],
                block_size=3, mask_token_id=1, target_layer_ids=[0]).double()
    ends = dict(main_model_input_embeddings=p.get_input_embeddings(),
                main_model_output_embeddings=p.get_output_embeddings())
    generator = DFlashTokenCandidateGenerator(generation_config=config(), assistant_model=muse, **ends)
    output = off(p, assistant_model=muse, speculation_type="dflash")
    return {"DFlash block": (stated_off(generator, network=p), output)}

def heads(seed):
    experts = dict(moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1, n_group=1,
                   topk_group=1, num_key_value_heads=1, head_dim=8, first_k_dense_replace=1, num_mtp_layers=1)
    glm = tiny(2, seed, make=lambda **kw: Glm4MoeForCausalLM(Glm4MoeConfig(**kw)), **experts)
    some = tiny(2, seed + 2, make=lambda **kw: MtpModel(glm, 1))
    with mock.patch.object(MtpModel, "from_pretrained", lambda *args, **kw: some):
        generator = MTPCandidateGenerator(generation_config=config(), main_model=glm, model_kwargs={})
        return {"multi-token heads": (stated_off(generator, network=glm), off(glm, use_mtp=True))}

def gemma_pair(seed):
    sizes = dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_key_value_heads=1,
                 head_dim=8, global_head_dim=8, layer_types=["sliding_attention", "full_attention"])
    def make(**kw): return Gemma4ForCausalLM(Gemma4TextConfig(**kw, **sizes))
    gemma = tiny(2, seed + 6, 2, make=make).double()
    return gemma, Gemma4AssistantStandIn(gemma, seed + 1)

def gemma_generator(gemma, network):
    embeddings = gemma.get_input_embeddings()
    return SinglePositionMultiTokenCandidateGenerator(
        generation_config=config(), assistant_model=network, target_model_input_embeddings=embeddings)

def gemma(seed):
    model, network = gemma_pair(seed)
    stated = stated_off(gemma_generator(model, network), network=model)
    return {"Gemma 4's assistant": (stated, off(model, assistant_model=network))}


class ListedTokenizer(PreTrainedTokenizerFast):
    "A tokenizer whose `get_vocab()` lists its tokens by id, or backwards"
    step = 1
    def get_vocab(self): return dict(sorted(super().get_vocab().items(), key=lambda kv: kv[1])[::self.step])

def letters(alphabet, step=1):
    t = Tokenizer(token_models.WordLevel({c: i for i, c in enumerate(alphabet)}))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    out = ListedTokenizer(tokenizer_object=t)
    out.step = step
    return out

def two_tokenizers(seed):
    found = {}
    for name, step in {"listed by id": 1, "listed backwards": -1}.items():
        four = tiny(4, seed + 1)
        four.generation_config.num_assistant_tokens = 2
        pair = dict(assistant_model=four, tokenizer=letters(" ab"), assistant_tokenizer=letters("c ba", step))
        found[f"two tokenizers, {name}"] = None, off(tiny(3, seed).double(), **pair)
    return found

DRAFTERS = assistant, block_drafter, heads, gemma, two_tokenizers

def enumerated(seed):  # -> {name: (misstated by or None, output off by)}
    return {name: pair for made in DRAFTERS for name, pair in made(seed).items()}

def imitated(seed):
    "How far our own loop is off with Gemma 4's generator and our rule, and without a draft: 0"
    model, network = gemma_pair(seed)
    drafter, target = GeneratorDrafter(gemma_generator(model, network), 2, model), HFModel(model, check=False)
    want = generate_law(model, (0, 1), max_new_tokens=3, **SAMPLING)
    drafters = drafter, lambda ctx, rng: Tree(ctx)
    return [float(tv_outcomes(loop_law(target, d, reject, (0, 1), 3), want)) for d in drafters]

def hybrid_model():
    "A random Qwen3-Next: a layer with a recurrent state, and one with rows"
    kinds = dict(layer_types=["linear_attention", "full_attention"], head_dim=8, linear_num_value_heads=2,
                 linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0,
                 num_key_value_heads=1)
    return tiny(32, 3, 2, make=lambda **kw: Qwen3NextForCausalLM(Qwen3NextConfig(**kw, **kinds)))

@torch.no_grad()
def recurrent():
    "A hybrid with recurrent layers: is a pass after `crop` that of the text? And is it assisted?"
    hybrid = hybrid_model()
    def after(read, cropped):   # the row after 1, ..., 6, 9, where `cropped` tokens more were read between
        cache = DynamicCache(config=hybrid.config)
        cache.activate_past_recording()
        for part in read: hybrid(torch.tensor([part]), **given_cache(hybrid, cache))
        if cropped: cache.crop(-cropped)
        return hybrid(torch.tensor([[9]]), **given_cache(hybrid, cache)).logits[0, -1]
    whole = hybrid(torch.tensor([[1, 2, 3, 4, 5, 6, 9]])).logits[0, -1]
    off, control = ((after(read, cropped) - whole).abs().max().item() for read, cropped in (
        ([[1, 2, 3, 4], [5, 6, 7, 8]], 2), ([[1, 2, 3, 4], [5, 6]], 0)))
    try: new_tokens(hybrid, (0, 1), do_sample=False, max_new_tokens=4, assistant_model=tiny(32, 5))
    except ValueError as e: refused = str(e)
    assert control < 1e-4
    return "refused" if off > 1e-2 else False, (
        f"`crop(-2)` {'does not roll' if off > 1e-2 else 'rolls'} the state back (logits of a random "
        f"Qwen3-Next are off by {off:.2f}, without it by less than .0001), but generate raises: "
        f"{refused.split(',')[0]}")

if __name__ == "__main__": print(*(two_tokenizers(seed) for seed in (0, 3)), sep="\n")
