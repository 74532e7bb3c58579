"Shared by the tests of trained drafters: small random targets, random texts and the states of them"
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM

from specref import exact
from specref.models import recipe
from specref.train.harness import StateDataset
from specref.train.synthetic import following

NO_SPECIAL = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)

def small_llama(V=32, d=32, layers=2, seed=0, heads=4, kv=2, spread=.4, **more):
    "A random Llama in double precision; weights of standard deviation `spread`"
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=d, intermediate_size=2*d, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, initializer_range=spread, **NO_SPECIAL,
        **more)).double()

def random_texts(V, n=2, T=14, seed=0):
    return torch.randint(V, (n, T), generator=torch.Generator().manual_seed(seed))

def states_of(model, x):
    "Texts, and the states of a plain pass over them"
    x = torch.as_tensor(np.asarray(x).astype(np.int64))
    with torch.no_grad():
        hidden = model(input_ids=x, output_hidden_states=True, use_cache=False).hidden_states
    return StateDataset(x, dict(enumerate(hidden)))

def batch_of(base, x): return states_of(base.model, x)

def otherwise(kind, change):
    "The networks of a class, each changed by `change(net)` once it is made"
    class Other(kind):
        def __init__(self, *given, **how):
            super().__init__(*given, **how)
            change(self)
    return Other

class Interrupted:
    "`write_whole` that fails at call number `at`, before it writes (with a partial file beside) or after"
    def __init__(self, at, early): self.left, self.early, self.write = at, early, recipe.write_whole
    def __call__(self, path, write):
        self.left -= 1
        if self.left == 0 and self.early:
            self.write(path.with_name(path.name + ".part"), lambda f: f.write_bytes(b"half"))
            raise KeyboardInterrupt
        self.write(path, write)
        if self.left == 0: raise KeyboardInterrupt

# The branching source as a table: B branches, `tail` more tokens of each

def branch_row(B, tail, x): return exact(*(int(y in following(x, B, tail)) for y in range(B*(tail + 1))))

def branch_ahead(B, tail, x, n):
    "The distribution of the token n places after x"
    q = branch_row(B, tail, x)
    for _ in range(n - 1): q = sum(w*branch_row(B, tail, y) for y, w in enumerate(q) if w)
    return q
