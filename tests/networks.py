"Shared by the tests of trained drafters: small random targets, random texts and the states of them"
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specref.train.harness import StateDataset

NO_SPECIAL = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)

def small_llama(V=32, d=32, layers=2, seed=0, heads=4, kv=2, spread=.4, **more):
    "A random Llama in double precision; weights of standard deviation `spread`"
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=d, intermediate_size=2*d, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, initializer_range=spread, **NO_SPECIAL, **more)).double()

def random_texts(V, n=2, T=14, seed=0):
    return torch.randint(V, (n, T), generator=torch.Generator().manual_seed(seed))

def states_of(model, x):
    "Texts, and the states of a plain pass over them"
    x = torch.as_tensor(np.asarray(x).astype(np.int64))
    with torch.no_grad():
        hidden = model(input_ids=x, output_hidden_states=True, use_cache=False).hidden_states
    return StateDataset(x, dict(enumerate(hidden)))

def batch_of(base, x): return states_of(base.model, x)
