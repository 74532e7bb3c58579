"What the batched engine refuses: requests, temperatures, models, shapes"
import copy
from functools import cache

TREE = (-1, 0, 0, 0, 1, 1, 2, 4)


@cache
def net(**kw):
    from transformers import AutoModelForCausalLM, LlamaConfig
    sizes = dict(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                 num_attention_heads=2, bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes | kw)).eval()

def engine(target=None, draft=None, shape=TREE, *rest, **kw):
    from specref.gpu.engine import Engine
    return Engine(target or net(), net() if draft is None else draft, shape, *rest, **kw)

def ask(*args): return engine().generate(*args)

def warm(temperature, B=1): return engine(temperature=temperature).generate([(1,)]*B, 3, range(B))

def wrapped():
    from specref.models.transformer import HFModel
    return HFModel(net())

def few(): return net(vocab_size=4)


ONE = [(1,)]
ROWS = [
    *[("prompts", lambda a=a: ask(*a)) for a in [
        ([], 3, []), ([()], 3, [0]), ([(1,), ()], 3, [0, 1]), ([(64,)], 3, [0]), ([(-1,)], 3, [0]),
        ((1, 2), 3, [0]), (["ab"], 3, [0]), (5, 3, [0]), (None, 3, [0]), ([(1,)*3000], 1, [0]),
        ([(1,), (1,)*2042], 0, [0, 1])]],
    *[("n", lambda a=a: ask(*a)) for a in [
        (ONE, -1, [0]), (ONE, 2.5, [0]), (ONE, [3, 3], [0]), (ONE, [2.5], [0]), (ONE, 10**6, [0]),
        ([(1,)*2041], 2, [0])]],
    *[("seeds", lambda s=s: ask(ONE, 3, s)) for s in (None, 0, [], [0, 1], [-1], [.5])],
    *[("stop", lambda s=s: ask(ONE, 3, [0], s)) for s in (None, 7, (64,), [(1,), (2,)], [("a",)])],
    *[("temperature", lambda t=t: warm(t))
      for t in (-1., float("inf"), float("nan"), (1., 1.), "warm", None, [None], "1", 10**400, 1j)],
    ("temperature", lambda: warm("warm", 4)),
    ("target", lambda: engine(wrapped())),
    ("draft", lambda: engine(draft=few())),
    ("draft", lambda: engine(draft=wrapped())),
    ("draft", lambda: engine(draft=copy.deepcopy(net()).to("meta"))),
    *[("shape", lambda s=s: engine(shape=s)) for s in ((-1, 2, 0), (), 5, "abc")],
    ("shape", lambda: engine(draft=net(max_position_embeddings=7))),
    ("shape", lambda: engine(few(), few(), (-1, 0, 0, 0, 0, 0)), "all different"),
    ("draw", lambda: engine(net(), net(), TREE, "iid")),
    ("verify", lambda: engine(verify=None)),
    ("every", lambda: engine(every=0)),
]
