"Invalid arguments of batches, attention, GPU verification and kernels: the argument, the call"
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import torch

from verify_helpers import siblings_of
from specref import exact, Tree
from specref.gpu import attention as at, layout as lay
from specref.gpu.layout import flat, pack
from specref.gpu.verify import Logits, Probs, verify_chains, verify_trees

def ints(x): return torch.tensor(x, dtype=torch.int32)
def doubles(x): return torch.tensor(x, dtype=torch.float64)
def on_meta(x): return x.to("meta")

def with_each(f, args, changes):
    "One row for each change: the argument, and the call of `f` with it changed"
    def row(name, change): return name, lambda: f(**args() | {name: change(args()[name])})
    return [row(name, change) for name, change in changes]

def table(f, args, bad):
    "One row for each bad value of each argument"
    changes = [(name, lambda _, x=x: x() if callable(x) else x) for name in bad for x in bad[name]]
    return with_each(f, args, changes)

# Chapter 40

@cache
def good():
    siblings_of, without = [0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0, 0]
    return flat([-1, 0, 0, 1, -1, 4, 4], [0]*7, [-1, 0, 0, -1, -1, 1, -1], without, siblings_of)

WRONG = {   # of the batch of parents -1 0 0 1 | -1 4 4, the last a probe
    "root": [[1, 4], [0, 0], [0, 7], [0, -1]],
    "token": [[-1]*7, [0, 0, 9, 0, 0, 0, 0]],
    "parent": [[-1, 0, 3, 1, -1, 4, 4], [-1, 0, 0, 1, -1, 1, 4], [-1, 0, 0, -1, -1, 4, 4],
               [-1, 0, 0, 1, 0, 4, 4], [-1, 1, 0, 1, -1, 4, 4], [-1, 0, 0, 9, -1, 4, 4]],
    "depth": [[0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 2, 0, 1, 1], [0, 1, 1, 2, 0, 1, -1]],
    "child": [[1, 3, 3, -1, 5, -1, -1], [0, 3, -1, -1, 5, -1, -1], [1, 9, -1, -1, 5, -1, -1],
              [1, 3, -1, -2, 5, -1, -1], [3, 3, -1, -1, 5, -1, -1]],
    "sibling": [[-1, 1, -1, -1, -1, -1, -1], [-1, 2, 1, -1, -1, -1, -1], [4, 2, -1, -1, -1, -1, -1],
                [-1, 3, -1, -1, -1, -1, -1], [-1, 9, -1, -1, -1, -1, -1], [-1, 2, -1, -1, -1, -1, 5],
                [-1, 2, 2, -1, -1, -1, -1]],
    "q_row": [[-1, 0, 0, -1, -1, 2, -1], [0]*7, [-1, -2, 0, -1, -1, 1, -1], [-1, 0, 0, -1, -1, 1, 1]],
}
ARRAYS = "root token parent depth child sibling q_row without_replacement".split()

def changed(name, x): return replace(good(), **{name: x(getattr(good(), name)) if callable(x) else x})
def checked(name, x): return lay.check_batch(changed(name, x), 5, 2)
def tree(*weights):
    t = Tree((0,))
    t.add(0, 1, exact(*weights))
    return t
def unpacked(ctxs, rows=slice(None), V=2):
    batch, q = pack([tree(1, 1)])
    return lay.unpack(batch, q[rows, :V], ctxs)
def positions(lengths): return lay.batch_positions(lengths, torch.zeros(3, 3, dtype=torch.long))
LENGTHS = torch.tensor([5, 0, 2])

LAYOUT = [
    *[(name, lambda name=name, x=x: checked(name, ints(x))) for name in WRONG for x in WRONG[name]],
    ("without_replacement", lambda: checked("without_replacement", torch.ones_like)),
    *[(name, lambda name=name: checked(name, 1)) for name in ("height", "width")],
    *[(name, lambda name=name: changed(name, -1)) for name in ("height", "width")],
    *[(name, lambda name=name, f=f: changed(name, f)) for name in ARRAYS
      for f in (lambda x: x.long(), lambda x: x.float(), lambda x: x[None], lambda x: x.tolist())],
    *[(name, lambda name=name, f=f: changed(name, f)) for name in ARRAYS[2:]
      for f in (lambda x: x[:-1], on_meta)],
    ("token", lambda: changed("token", on_meta)), ("parent", lambda: changed("token", lambda x: x[:-1])),
    *[("parent", lambda parent=parent: flat(parent, [0]*len(parent))) for parent in ([-2], [0], [-1, 2, 0])],
    ("parent", lambda: flat([-1, -1, 0], [0]*3)), ("root", lambda: flat([], [])), ("trees", lambda: pack([])),
    ("trees", lambda: pack([Tree(())])), ("trees", lambda: pack([tree(1, 1), tree(1, 1, 1)])),
    ("trees", lambda: pack([tree(1, 1)], 3)), ("ctxs", lambda: unpacked([(0,), (0,)])),
    ("ctxs", lambda: unpacked([(1,)])), ("q_row", lambda: unpacked([(0,)], rows=slice(0))),
    ("token", lambda: unpacked([(0,)], V=1)),
    *[("lengths", lambda f=f: positions(f(LENGTHS)))
      for f in (lambda x: x[:1], lambda x: x[:2], lambda x: x[0], lambda x: x[:, None])],
    *[("N", lambda N=N: lay.from_bits(torch.zeros(1, 2, dtype=torch.int32), N)) for N in (65, -1)],
    ("N", lambda: lay.pad_batch(good(), 3)),
    *[("token", lambda x=x: lay.from_chains(ints([0]), x, 1)) for x in (doubles([0.]), ints([[0]]), [0])],
    ("root", lambda: lay.from_chains([0], ints([0]), 1)),
    ("q_row", lambda: lay.from_chains(ints([0]), ints([0, 1]), 1, ints([0]))),
    ("token", lambda: lay.from_draft_tokens(doubles([1.]), ints([1]), 1)),
    ("cu_num_draft_tokens", lambda: lay.from_draft_tokens(ints([1]), ints([[1]]), 1)),
    ("target_logits_indices", lambda: lay.chain_rows(good(), ints([0]*4), ints([0, 0]))),
    ("bonus_logits_indices", lambda: lay.chain_rows(good(), ints([0]*5), ints([0]))),
    *[("paths", lambda paths=paths: lay.from_paths(paths))
      for paths in ([[0, 1, 2], [0, 2, -1]], [[0, 1], [0, 3]], [[0, 2, 1]], [[1, 2]], [])],
    ("parent", lambda: lay.to_paths([-1, 2, 0])),
]

# Chapter 41

SEE, TWO = torch.ones(2, 3, 3, dtype=torch.bool), torch.tensor([1, 2])
BAD_LENGTHS = TWO.double(), TWO[:1], TWO[:, None], on_meta(TWO), [1, 2]
BAD_SEE = SEE.int(), SEE[0], SEE[:, :2], SEE[:, :, :2], torch.tensor(True), None

@cache
def layer():
    "Queries of 4 heads and 3 nodes, keys and values of 2 heads and 12 slots, their mask and their blocks"
    q, k = torch.zeros(2, 4, 3, 4, dtype=torch.float64), torch.zeros(2, 2, 12, 4, dtype=torch.float64)
    return q, k, at.slot_mask(TWO, SEE, 12), at.tree_blocks(TWO, SEE, 12)

def attend_args(): return dict(q=layer()[0], k=layer()[1], v=layer()[1], mask=layer()[2])
def flex_args(): return dict(q=layer()[0], k=layer()[1], v=layer()[1], blocks=layer()[3])
def slot_args(): return dict(lengths=TWO, ancestors=SEE, size=9)
def byte_args(): return dict(length=5, nodes=4, heads=2, width=8, itemsize=2)
def shorter(k): return at.flex_attend(layer()[0], k, k, layer()[3])

ROWS_OF_ATTENTION = [
    *[("q", f) for f in (lambda x: x[0], lambda x: x.int(), lambda x: x[:, :3], lambda x: x.numpy(),
                         lambda x: x[:, :, :0])],
    *[("k", f) for f in (lambda x: x[..., :2], lambda x: x[:1], lambda x: x.float(), on_meta)],
    *[("v", f) for f in (lambda x: x[:, :1], lambda x: x[:, :, :-1], lambda x: x.float(), on_meta)],
]
MASKS = (lambda x: x.double(), lambda x: x.int(), lambda x: x[:, 0], lambda x: x[:1], lambda x: x[..., :-1],
         lambda x: x[:, :, :-1], lambda x: x.expand(-1, 4, -1, -1), on_meta)
SLOTS = dict(lengths=BAD_LENGTHS, ancestors=BAD_SEE, size=(2, 0, 4., None, True))
PARENTS = ([[-1, 0]], torch.tensor([-1, 0, 0]), torch.tensor([[-1., 0.]]),
           torch.empty(0, 3, dtype=torch.long))

ATTENTION = [
    *[("parent", partial(at.ancestors, bad)) for bad in PARENTS],
    *[("ancestors", partial(at.node_depths, bad)) for bad in (SEE.int(), SEE[0], torch.tensor(True), None)],
    *table(at.slot_mask, slot_args, SLOTS), *table(at.tree_blocks, slot_args, SLOTS),
    *with_each(at.attend, attend_args, [*ROWS_OF_ATTENTION, *(("mask", f) for f in MASKS)]),
    *with_each(at.flex_attend, flex_args, ROWS_OF_ATTENTION),
    ("blocks", lambda: at.flex_attend(**flex_args() | dict(q=layer()[0][:, :, :-1]))),
    ("blocks", lambda: shorter(layer()[1][:, :, :-1])),
    *[("lengths", partial(at.check_room, torch.tensor(bad), 4, 9)) for bad in ([0, 6], [-1, 2], [1.])],
    *table(at.read_bytes, byte_args, dict(length=[-1], nodes=[0], heads=[1.5], width=[0], itemsize=[0])),
]

# Chapter 42

@cache
def proper():
    batch, q = pack([siblings_of([[.5, .25, .25]]*2, [1, 2])])
    u = torch.full((3,), .5, dtype=torch.float64)
    p = torch.full((3, 3), 1/3, dtype=torch.float64)
    return dict(batch=batch, p=p, q=q, coins=u, picks=u[:1].clone())

def verified(**kw): return verify_trees(**proper() | kw)
def marked_twice():
    "The same token twice, marked as drawn without replacement"
    batch, q = pack([siblings_of([[.5, .5]]*2, [1, 1])])
    return verified(batch=replace(batch, without_replacement=batch.q_row >= 0), p=doubles([[.5, .5]]*3), q=q)
def alone(p): return verified(batch=pack([Tree((0,))], V=2)[0], p=p, q=None, coins=proper()["coins"][:1])
def denormal():
    "A row whose residual mass is a denormal number"
    batch = flat([-1, 0, 0], [0, 0, 1], [-1, 0, 0], [False, True, True])
    return verified(batch=batch, p=doubles([[.25]*4]*3), q=doubles([[1., 5e-324, 0., 0.]]))

WIDE = 2**18
VERIFY = [
    *with_each(verify_trees, proper, [
        *[("p", f) for f in (lambda x: x.long(), lambda x: x[:2], lambda x: 2*x, lambda x: -x,
                             lambda x: x * torch.nan, lambda x: "rows", lambda x: Logits(x * torch.inf),
                             lambda x: Logits(x * torch.nan), lambda x: Logits(x * -torch.inf))],
        *[("q", f) for f in (lambda x: x[:, :2], lambda x: x / 2, on_meta)],
        *[("coins", f) for f in (lambda x: x.float(), lambda x: x + .5, lambda x: x[:2])],
        *[("picks", f) for f in (lambda x: -x, lambda x: x.expand(2), lambda x: [.5])],
        ("batch", lambda x: None)]),
    ("token", marked_twice), ("token", denormal), ("token", lambda: verified(q=doubles([[.75, 0., .25]]))),
    ("token", lambda: verified(p=torch.full((3, 2), .5, dtype=torch.float64), q=proper()["q"][:, :2])),
    ("x", lambda: Logits([[1.]])),
    *[("temperature", lambda t=t: Logits(proper()["p"], t)) for t in ("hot", None, [1.])],
    *[("temperature", lambda t=t: verified(p=Logits(proper()["p"], t)))
      for t in (-1., torch.tensor([1., 1.]))],
    *[(name, lambda name=name, x=x: verified(p=Logits(proper()["p"].float(), **{name: x})))
      for name, bad in dict(top_k=(-1, 1.5, doubles([1.]*9)), top_p=(0., 1.1, doubles([1., .5])),
                            min_p=(-.1, 2., doubles([.5]*9))).items() for x in bad],
    *[(name, lambda name=name: Logits(proper()["p"], **{name: "some"}))
      for name in ("top_k", "top_p", "min_p")],
    ("x", lambda: Logits(proper()["p"], top_k=2)),   # float64
    *[(name, lambda name=name: verified(**{name: proper()[name].bfloat16()})) for name in "pq"],
    *[("row", lambda x=x: verified(p=Probs(proper()["p"], x)))
      for x in (ints([0]), doubles([0.]*3), ints([0, 0, 9]), ints([0, 0, -1]), [0, 0, 0])],
    ("row", lambda: verified(q=Probs(proper()["q"], ints([0]*3)))),
    ("q_row", lambda: verified(q=proper()["q"][:0])), ("p", lambda: alone(torch.full((1, WIDE), 1 / WIDE))),
    ("p", lambda: alone(Logits(torch.zeros(1, WIDE)))), ("p", lambda: alone(torch.zeros(1, 0))),
    ("batch", lambda: verify_chains(**proper())),
]

# Chapter 42a: refused before a launch (there is no device to launch on)

def launched(name, **kw):
    from specref.gpu import kernels
    p = torch.eye(2, dtype=torch.float64)
    args = dict(batch=flat([-1, 0], [0, 1], [-1, 0]), p=p, q=p[:1], coins=TWICE, picks=TWICE[:1])
    return getattr(kernels, name)(**args | kw)

TWICE = doubles([0, 0])
LAUNCHES = [
    *[("block", dict(block=bad)) for bad in (3, 0, -2, 4., "4", True, None, 2**19)],
    *[("warps", dict(warps=bad)) for bad in (0, 64, 8.)], ("batch", dict(batch=None)),
    ("coins", dict(coins=TWICE + 1)), ("coins", dict(coins=TWICE.float())), ("picks", dict(picks=TWICE)),
    ("p", dict(p=2 * torch.eye(2, dtype=torch.float64))),
    ("q", dict(q=torch.ones(1, 1, dtype=torch.float64))),
]
KERNELS = [("batch", lambda: launched("fused_verify_chains", **proper()))]
KERNELS += [(name, partial(launched, kernel, **bad))
            for kernel in ("fused_verify_trees", "fused_verify_chains") for name, bad in LAUNCHES]
KERNELS += [("programs", partial(launched, "fused_verify_trees", programs=bad)) for bad in (0, 1., 2**16)]

# Chapter 42b

def ruled(name, **kw):
    from specref.gpu import rules
    p = torch.eye(2, dtype=torch.float64)
    args = dict(batch=flat([-1, 0], [0, 1], [-1, 0]), p=p)
    given = dict(match_trees=dict(picks=TWICE), match_coupled=dict(seed=0, position=5),
                 typical_trees=dict(picks=TWICE[:1]),
                 traverse_trees=dict(q=p[1:], coins=TWICE, picks=TWICE[:1]))
    return getattr(rules, f"fused_{name}")(**args | given[name] | kw)

EACH = [("block", dict(block=3)), ("warps", dict(warps=64)), ("batch", dict(batch=None)),
        ("p", dict(p=2 * torch.eye(2, dtype=torch.float64))), ("p", dict(p=torch.eye(3).double()))]
BAD_WHOLE = (1., -1, 2**32, torch.zeros(2).long(), torch.zeros(1).int(), torch.tensor([-1]), None)
OWN = dict(match_trees=[("picks", dict(picks=TWICE + 1)), ("picks", dict(picks=TWICE[:1]))],
           match_coupled=[(name, {name: bad}) for name in ("seed", "position") for bad in BAD_WHOLE],
           traverse_trees=[(name, bad) for name, bad in LAUNCHES if name in ("coins", "picks", "q")],
           typical_trees=[("picks", dict(picks=TWICE)), ("epsilon", dict(epsilon=1.5)),
                          ("delta", dict(delta=1)), ("delta", dict(delta="x")),
                          ("gate", dict(gate=torch.eye(3).double())),
                          ("gate", dict(gate=2 * torch.eye(2).double())), ("gate", dict(gate=[1.])),
                          ("gate", dict(gate=Probs(torch.eye(2).double(), ints([0, 0]))))])
RULES = [(name, partial(ruled, rule, **bad)) for rule, own in OWN.items() for name, bad in [*EACH, *own]]

ROWS = [*LAYOUT, *ATTENTION, *VERIFY, *(KERNELS + RULES if find_spec("triton") else [])]
