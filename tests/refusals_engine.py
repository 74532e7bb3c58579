"Invalid arguments of engine and cache: requests, temperatures, models, shapes, rows, accepted paths"
import copy
from functools import cache

import torch, transformers

from specref import reject
from specref.gpu.cache import StaticRows
from specref.models.transformer import given_cache

TREE = (-1, 0, 0, 0, 1, 1, 2, 4)

@cache
def net(family="Llama", **kw):
    sizes = dict(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                 num_attention_heads=2, bos_token_id=None, eos_token_id=None)
    config = getattr(transformers, family + "Config")(**sizes | kw)
    return transformers.AutoModelForCausalLM.from_config(config).eval()

def engine(target=None, draft=None, shape=TREE, *rest, **kw):
    from specref.gpu.engine import Engine
    return Engine(target or net(), net() if draft is None else draft, shape, *rest, **kw)

def request(*args): return engine().generate(*args)

def at(temperature, B=1): return engine(temperature=temperature).generate([(1,)]*B, 3, range(B))

def cut(target=None, **kw): return engine(target, **kw).generate(ONE, 3, [0])

def wrapped():
    from specref.models.transformer import HFModel
    return HFModel(net())

def few(): return net(vocab_size=4)

# the static cache: types and shapes always, values where `check=True`

def ids(x): return torch.tensor(x, dtype=torch.int64)
def table(batch=2, size=10, **kw): return StaticRows(net(), batch, size, **kw)
def window(size): return StaticRows(net("Mistral", num_key_value_heads=2, sliding_window=9), 1, size)
def unmasked(): return net()(input_ids=ids([[1, 2]]*2), use_cache=True, **given_cache(net(), table()))

def updated(**bad): return table().update(**dict(keys=NEW, values=NEW, layer_idx=0) | bad)

def grown(length):
    rows, new = table(1, check=True), torch.zeros(1, 2, 5, 4)
    rows.lengths += length
    return rows.update(new, new, 0)

def committed(**bad): return table().commit(**dict(nodes=PATHS, root=ids([0, 0]), count=ids([3, 1])) | bad)

def checked(**bad):
    rows = table(check=True)
    rows.lengths += 1
    return rows.commit(**dict(nodes=ids([[1, 8], [2, -1]]), root=ids([0, 0]), count=ids([3, 2])) | bad)

NEW, PATHS = torch.zeros(2, 2, 1, 4), ids([[1, 2], [2, -1]])
WRONG_PATHS = [[[0, 1], [2, -1]], [[2, 1], [2, -1]], [[1, 1], [2, -1]], [[1, 2], [-1, 2]],
               [[1, 9], [2, -1]], [[-3, 2], [2, -1]]]
SHAPES = [(1, 2, 1, 4), (2, 1, 1, 4), (2, 2, 1, 3), (2, 2, 11, 4), (2, 2, 0, 4)]

ONE = [(1,)]
ROWS = [
    *[("prompts", lambda a=a: request(*a)) for a in [
        ([], 3, []), ([()], 3, [0]), ([(1,), ()], 3, [0, 1]), ([(64,)], 3, [0]), ([(-1,)], 3, [0]),
        ((1, 2), 3, [0]), (["ab"], 3, [0]), (5, 3, [0]), (None, 3, [0]), ([(1,)*3000], 1, [0]),
        ([(1,), (1,)*2042], 0, [0, 1])]],
    *[("n", lambda a=a: request(*a)) for a in [
        (ONE, -1, [0]), (ONE, 2.5, [0]), (ONE, [3, 3], [0]), (ONE, [2.5], [0]), (ONE, 10**6, [0]),
        ([(1,)*2041], 2, [0])]],
    *[("seeds", lambda s=s: request(ONE, 3, s)) for s in (None, 0, [], [0, 1], [-1], [.5])],
    *[("stop", lambda s=s: request(ONE, 3, [0], s)) for s in (None, 7, (64,), [(1,), (2,)], [("a",)])],
    *[("temperature", lambda t=t: at(t))
      for t in (-1., float("inf"), float("nan"), (1., 1.), "warm", None, [None], "1", 10**400, 1j)],
    ("temperature", lambda: at("warm", 4)),
    *[(name, lambda name=name, x=x: cut(**{name: x})) for name, wrong in dict(
        top_k=(-1, 1.5, "all", [1, 1], None), top_p=(0., 1.5, "all", [.5, .5], float("nan")),
        min_p=(-.1, 2, [.5, .5])).items() for x in wrong],
    ("top_k", lambda: cut(copy.deepcopy(net()).double(), top_k=3), "at most 32 bits"),
    ("target", lambda: engine(wrapped())), ("draft", lambda: engine(draft=few())),
    ("draft", lambda: engine(draft=wrapped())),
    ("draft", lambda: engine(draft=copy.deepcopy(net()).to("meta"))),
    *[("shape", lambda s=s: engine(shape=s)) for s in ((-1, 2, 0), (), 5, "abc")],
    ("shape", lambda: engine(draft=net(max_position_embeddings=7))),
    ("shape", lambda: engine(few(), few(), (-1, 0, 0, 0, 0, 0)), "all different"),
    ("draw", lambda: engine(net(), net(), TREE, "iid")),
    *[(name, lambda name=name, x=x: engine(**{name: x})) for name, x in (
        ("temperature", float("nan")), ("temperature", True), ("temperature", (1., -1.)), ("top_k", -1),
        ("top_p", True), ("min_p", (0., 2)))],
    *[("verify", lambda f=f: engine(verify=f), "a function like verify_trees") for f in (None, reject)],
    ("sample", lambda: engine(sample="greedy")),
    ("every", lambda: engine(every=0)),
    # the static cache
    ("model", lambda: StaticRows(net("Bloom"), 1, 8), "ALiBi"),
    ("size", lambda: window(10), "wanted at most 9: .*sliding window"),
    ("size", lambda: StaticRows(net(max_position_embeddings=12), 1, 13), "at most 12: .*no later position"),
    *[("batch", lambda b=b: table(b)) for b in (0, 1.5)],
    *[("size", lambda s=s: table(1, s)) for s in (0, True)],
    *[("dtype", lambda t=t: table(dtype=t)) for t in ("float32", float, 0)],
    *[("keys", lambda s=s: updated(keys=torch.zeros(s))) for s in SHAPES[:4]],
    *[("values", lambda s=s: updated(values=torch.zeros(s))) for s in SHAPES],
    *[("keys", lambda x=x: updated(keys=x)) for x in (NEW.double(), NEW.to("meta"))],
    *[("values", lambda x=x: updated(values=x)) for x in (NEW.double(), NEW.to("meta"))],
    *[("nodes", lambda x=x: committed(nodes=x)) for x in (
        PATHS.float(), PATHS[:1], PATHS[0], PATHS[0, 0], PATHS[..., None], PATHS.to("meta"), [[1]], None)],
    *[("root", lambda x=x: committed(root=x)) for x in ([0, 0], ids([0]), ids([0, 0]).bool())],
    *[("count", lambda x=x: committed(count=x)) for x in (3, ids([3]), ids([[3, 1]]), ids([3, 1]).double())],
    *[("nodes", lambda x=x: checked(nodes=ids(x))) for x in WRONG_PATHS],
    *[("count", lambda x=x: checked(count=ids(x))) for x in ([3, 3], [4, 1], [-1, 1])],
    ("tokens", lambda: table().check_room(7, 5)), ("tokens", lambda: grown(6)),
    *[("tokens", lambda x=x: table().check_room(x, 5)) for x in (0, -1, 2.5, True)],
    *[("nodes", lambda x=x: table().check_room(6, x)) for x in (0, -1, 2.5, True)],
    ("tokens_to_remove", lambda: table().crop(-1)), ("attention_mask", unmasked),
]
