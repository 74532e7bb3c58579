"T4: known-wrong judges, drafters, loops and draws, each a few lines, with the place where the mistake was made for real"
from dataclasses import dataclass
from fractions import Fraction as F
from typing import Callable

import numpy as np

from helpers import CANON, constant, killer
from specref.chance import law_of
from specref.law import exact, norm, point, residual
from specref.loop import Verdict, clip, generate, loop_law, match, rounds
from specref.reject import Chain, reject
from specref.target import TableModel, random_table, target_law
from specref.tree import Tree, iid, points, without_replacement


@dataclass(frozen=True)
class Setting:
    "A target and what decodes it: `n` tokens after `ctx` by a loop `(target, drafter, verify, ctx, n, rng, stop) -> tokens`"
    target: object
    drafter: Callable
    verify: Callable
    n: int = 1
    ctx: tuple = (0,)
    stop: tuple = ()
    loop: Callable = None
    def law(self):
        if self.loop is None: return loop_law(self.target, self.drafter, self.verify, self.ctx, self.n, self.stop)
        return law_of(lambda rng: self.loop(self.target, self.drafter, self.verify, self.ctx, self.n, rng, self.stop))
    def want(self): return target_law(self.target, self.ctx, self.n, self.stop)
    def tokens(self): return law_of(lambda rng: len(next(rounds(self.target, self.drafter, self.verify, self.ctx, rng)).tokens)).mean()


@dataclass(frozen=True)
class Mutant:
    "A mistake, the right thing in its place, and how far the law is off (None: the law is kept and tokens are lost)"
    name: str
    seen: str
    wrong: Setting
    right: Setting
    tv: object


# Judges: the rule with one piece replaced

def keep(rng, r, q, x, c): return rng.coin(r[x], of=q[x], at=c)


def left(r, q, x): return residual(r, q)


def judge(keep=keep, left=left, row=lambda p, tree, i: p[i], last=None, tell=lambda tree, c: tree.law[c]):
    "`reject` from parts: when to keep a child, what is left after one, which row stands at a node, what the extra token comes from"
    def verify(p, tree, rng, i=0):
        r = row(p, tree, i)
        for c in tree.children(i):
            if keep(rng, r, q := tell(tree, c), x := tree.token[c], c): return verify(p, tree, rng, c)
            r = left(r, q, x)
        return Verdict(i, rng.pick(r if last is None or tree.children(i) else last(p, tree, i), at=i))
    return verify


def without(r, x): return norm(np.array([w*(y != x) for y, w in enumerate(r)], dtype=object)) if r[x] < 1 else r


def top(r): return point(int(np.argmax(r)), len(r), exact=True)


def top2(law): return norm(np.where(np.argsort(np.argsort(-law, kind="stable")) < 2, law, 0*law))


def redraw(after):
    "Samples the target at each node, and on a mismatch draws once more from `after(r, q)`"
    def verify(p, tree, rng, i=0):
        kids = tree.children(i)
        if not kids: return Verdict(i, rng.pick(p[i]))
        if rng.pick(p[i]) == tree.token[kids[0]]: return verify(p, tree, rng, kids[0])
        return Verdict(i, rng.pick(after(p[i], tree.law[kids[0]])))
    return verify


DRAFT, COIN = 0, 1   # the names of uniforms that are used twice


def keyed_coin(rng, a, key): return rng.pick(np.array([min(a, F(1)), max(1 - a, F(0))], dtype=object), key=key) == 0


def shared_coin(rng, r, q, x, c):
    "Every position compares with one and the same uniform"
    return keyed_coin(rng, r[x] / q[x], COIN)


def without_bonus(p, tree, rng):
    v = reject(p, tree, rng)
    return v if tree.children(v.node) or not v.node else Verdict(tree.parent[v.node], tree.token[v.node])


def first_only(p, tree, rng):
    "Accepts one token at most"
    v = reject(p, tree, rng)
    return Verdict(0, tree.token[tree.ancestors(v.node)[0]]) if v.node else v


def forgetful(p, tree, rng): return Verdict(0, rng.pick(p[0]))


@dataclass(frozen=True)
class Said(Verdict):
    "A verdict whose tokens are not a path of the tree"
    text: tuple = ()
    def tokens(self, tree): return self.text


def goes_on(p, tree, rng):
    "After a rejection it corrects the token and judges the rest of the chain by rows that followed the rejected one"
    out = ()
    for c in range(1, len(tree)):
        x, q, r = tree.token[c], tree.law[c], p[c - 1]
        out += (x if rng.coin(r[x], of=q[x]) else rng.pick(residual(r, q)),)
    return Said(len(tree) - 1, -1, (*out, rng.pick(p[len(tree) - 1])))


def reuses(coin=None, correction=None):
    "One draft, judged with a coin or corrected with a pick that reads a uniform for the second time"
    def verify(p, tree, rng):
        x, q = tree.token[1], tree.law[1]
        kept = rng.coin(p[0][x], of=q[x]) if coin is None else keyed_coin(rng, p[0][x] / q[x], coin)
        return Verdict(1, rng.pick(p[1])) if kept else Verdict(0, rng.pick(residual(p[0], q), key=correction))
    return verify


def siblings_by_p(p, tree, rng, i=0):
    "Every child against p itself"
    for c in tree.children(i):
        if rng.coin(p[i][tree.token[c]], of=tree.law[c][tree.token[c]]): return siblings_by_p(p, tree, rng, c)
    return Verdict(i, rng.pick(residual(p[i], tree.law[tree.children(i)[-1]]) if tree.children(i) else p[i]))


def by_elders(draw):
    "Tells the law that `draw` would have for a child, given those offered before it"
    return lambda tree, c: draw(tuple(tree.token[k] for k in tree.children(tree.parent[c]) if k < c))


# Drafters

def children(draw, k, tell=None, order=None, merge=False):
    "k children of node 0: drawn by `draw`, told as `tell(token, earlier)`, offered in an order, equal ones merged"
    def draft(ctx, rng):
        old, tree = Tree(ctx), Tree(ctx)
        old.grow(0, draw, rng, k)
        xs, laws = old.token[1:], old.law[1:]
        if tell: laws = [tell(x, tuple(xs[:j])) for j, x in enumerate(xs)]
        kids = list(zip(xs, laws)) if not merge else list(dict(zip(xs, laws)).items())
        for x, q in sorted(kids, key=order or (lambda kid: 0)): tree.add(0, x, q)
        return tree
    return draft


def states_other_rows(model, gamma, shift):
    "A chain whose edges state the row `shift` places off the one that was drawn from"
    def draft(ctx, rng):
        true, tree = Chain(model, gamma)(ctx, rng), Tree(ctx)
        for i in range(1, gamma + 1):
            q = true.law[min(max(i + shift, 1), gamma)]
            tree.add(i - 1, true.token[i], q if q[true.token[i]] else true.law[i])
        return tree
    return draft


def keyed(law): return lambda ctx, rng: offered(Tree(ctx), rng.pick(law, key=DRAFT), law)


def offered(tree, x, q):
    tree.add(len(tree) - 1, x, q)
    return tree


def drops(law, least):
    "Throws a drafted token away when it looks unlikely"
    return lambda ctx, rng: Tree(ctx) if law[x := rng.pick(law)] < least else offered(Tree(ctx), x, law)


def stale(model, gamma):
    "The draft model has not been fed the last token: honest, and one row behind"
    behind = TableModel(model.V, lambda text: model.law(text[:-1] or text))
    return Chain(behind, gamma)


# Loops

def whole(target, drafter, verify, ctx, n, rng, stop): return tuple(generate(target, drafter, verify, ctx, n, rng, stop=stop))


def past_the_stop(target, drafter, verify, ctx, n, rng, stop):
    "Looks for a stop token at the end of a block only, and never cuts inside it"
    out = ()
    for r in rounds(target, drafter, verify, ctx, rng):
        out += clip(r.tokens, n - len(out), ())
        if len(out) == n or out[-1] in stop: return out


def bonus_after_stop(target, drafter, verify, ctx, n, rng, stop):
    "Stops at the round with the stop token, and keeps one token more"
    out = ()
    for r in rounds(target, drafter, verify, ctx, rng):
        kept = clip(r.tokens, n - len(out), stop)
        if kept[-1] in stop: return out + clip(r.tokens, min(len(kept) + 1, n - len(out)), ())
        out += kept
        if len(out) == n: return out


def ignores_stop(target, drafter, verify, ctx, n, rng, stop): return whole(target, drafter, verify, ctx, n, rng, ())


# The cases

P, Q = CANON
canon_p, canon_q = constant(4, 3, 2, 1), constant(1, 2, 3, 4)
kill_p, kill_q = killer()
ord3 = constant(3, 2, 1), constant(1, 2, 3)
wide = random_table(3, 1, zeros=False), random_table(3, 2, zeros=False)


def on_canon(verify=reject, drafter=Chain(canon_q, 1)): return Setting(canon_p, drafter, verify)


def on_cut(n, verify=reject): return Setting(constant(4, 3, 0, 0), Chain(canon_q, 1), verify, n)   # the target after top-2


def canon(name, seen, tv, wrong=None, right=None, **parts):
    "A mistake with one draft of the four-token pair"
    return Mutant(name, seen, wrong or on_canon(judge(**parts)), right or on_canon(), tv)


def siblings(name, seen, tv, draw, k=2, verify=reject, **how):
    "A mistake with k children of one node"
    return Mutant(name, seen, on_canon(verify, children(draw, k, **how)), on_canon(reject, children(draw, k)), tv)


def chain(name, seen, tv, models, n, verify=reject, drafter=None, loop=None, stop=()):
    "A mistake with a chain of two, seen in the joint law of n tokens"
    target, honest = models[0], Chain(models[1], 2)
    return Mutant(name, seen, Setting(target, drafter or honest, verify, n, (0,), stop, loop), Setting(target, honest, reject, n, (0,), stop, loop and whole), tv)


swor, two, half = without_replacement(Q), top2(Q), exact(0, 0, 1, 3)
rounded = exact(205, 410, 616, 820)   # Q with eight bits each

MUTANTS = [
    canon("correction from p", "the classic", F(7, 50), left=lambda r, q, x: r),
    canon("residual |p - q|", "the classic", F(1, 5), left=lambda r, q, x: norm(abs(r - q))),
    canon("residual (q - p)+", "the letters of Leviathan and Chen mixed", F(2, 5), left=lambda r, q, x: residual(q, r)),
    canon("residual p without the token", "vllm-project/vllm#40149", F(7, 60), left=lambda r, q, x: without(r, x)),
    canon("greedy correction", "sgl-project/sglang#31214", F(1, 10), left=lambda r, q, x: top(residual(r, q))),
    canon("ratio inverted", "the letters of Leviathan and Chen mixed", F(2, 5), keep=lambda rng, r, q, x, c: rng.coin(q[x], of=r[x])),
    canon("kept iff p >= q", "a threshold for a coin", F(3, 10), keep=lambda rng, r, q, x, c: r[x] >= q[x]),
    canon("everything kept", "huggingface/transformers#28508", F(2, 5), keep=lambda rng, r, q, x, c: True),
    canon("lenience 1/2, called lossless", "SGLang's acceptance thresholds below 1", F(1, 5), keep=lambda rng, r, q, x, c: rng.coin(r[x], of=q[x]/2)),
    canon("match, then a fresh draw", "ml-explore/mlx-swift-lm#459", F(1, 25), on_canon(redraw(lambda r, q: r)), on_canon(match)),
    canon("match, then the residual", "two rules mixed", F(6, 25), on_canon(redraw(residual)), on_canon(match)),
    canon("argmax draft, soft q", "huggingface/transformers#32867", F(5, 16), on_canon(drafter=children(points([3], 4, True), 1, tell=lambda x, e: Q)),
          on_canon(drafter=children(points([3], 4, True), 1))),
    canon("warped draft, raw q", "huggingface/transformers#47932", F(11, 70), on_canon(drafter=children(iid(two), 1, tell=lambda x, e: Q)),
          on_canon(drafter=children(iid(two), 1))),
    canon("draft rounded, q not", "deepseek-ai/DeepSpec#31", None, on_canon(drafter=children(iid(rounded), 1, tell=lambda x, e: Q)),
          on_canon(drafter=children(iid(rounded), 1))),
    canon("residual of the unwarped p", "vllm-project/vllm#42744", F(3, 56), on_cut(1, judge(left=lambda r, q, x: residual(P, q))), on_cut(1)),
    canon("bonus of the unwarped p", "vllm-project/vllm#42744", F(9, 100), on_cut(2, judge(last=lambda p, t, i: P)), on_cut(2)),
    canon("draft and coin share noise", "local-inference-lab/vllm#205", None, on_canon(reuses(coin=DRAFT), keyed(Q))),
    canon("draft and correction share noise", "vllm-project/vllm#54282", None, on_canon(reuses(correction=DRAFT), keyed(Q))),
    canon("coin and correction share noise", "one uniform, two questions", None, on_canon(reuses(COIN, COIN))),
    canon("unlikely draft dropped, < .15", "ggml-org/llama.cpp#22506 if with #27694", F(6, 100), on_canon(drafter=drops(Q, F(15, 100)))),
    canon("unlikely draft dropped, < .25", "ggml-org/llama.cpp#22506 if with #27694", F(11, 100), on_canon(drafter=drops(Q, F(25, 100)))),
    canon("unlikely draft dropped, < .35", "ggml-org/llama.cpp#22506 if with #27694", F(125, 1000), on_canon(drafter=drops(Q, F(35, 100)))),
    canon("unlikely draft dropped, p = q", "ggml-org/llama.cpp#22506 if with #27694", F(3, 16), Setting(constant(3, 1), drops(exact(3, 1), F(1, 2)), reject),
          Setting(constant(3, 1), Chain(constant(3, 1), 1), reject)),
    siblings("siblings judged by p alone, k = 2", "SpecTr's warning", F(7, 50), iid(Q), verify=siblings_by_p),
    siblings("siblings judged by p alone, k = 3", "SpecTr's warning", F(49, 250), iid(Q), 3, verify=siblings_by_p),
    siblings("without replacement, told as iid", "SafeAILab/EAGLE#50, unconfirmed", F(17, 392), swor, tell=lambda x, e: Q),
    siblings("iid, told as without replacement", "the reverse", F(3, 80), iid(Q), verify=judge(tell=by_elders(swor))),
    siblings("iid siblings sorted by q", "most probable first", F(3, 50), iid(Q), order=lambda kid: -Q[kid[0]]),
    siblings("iid siblings sorted by p", "most probable first", F(3, 50), iid(Q), order=lambda kid: -P[kid[0]]),
    siblings("without replacement, sorted by q", "most probable first", F(2353, 20160), swor, verify=judge(tell=by_elders(swor)), order=lambda kid: -Q[kid[0]]),
    siblings("without replacement, sorted by p", "most probable first", F(17, 120), swor, verify=judge(tell=by_elders(swor)), order=lambda kid: -P[kid[0]]),
    siblings("equal siblings merged", "tree de-duplication", F(3, 112), iid(Q), merge=True),
    siblings("support used up, told as uniform over all", "Infini-AI-Lab/Sequoia's masked rows", None, without_replacement(half), 3,
             tell=lambda x, e: without_replacement(half)(e) if len(e) < 2 else exact(1, 1, 1, 1)),
    chain("row of q off by one", "NVIDIA/TensorRT-LLM#15098", None, wide, 3, drafter=states_other_rows(wide[1], 2, -1)),
    chain("row of p off by one", "huggingface/transformers#28166", None, wide, 3, judge(row=lambda p, tree, i: p[max(tree.parent[i], 0)])),
    chain("history of the context only", "mlx-node/mlx-node#11", None, wide, 3, judge(row=lambda p, tree, i: p[0])),
    chain("bonus from the row before", "huggingface/transformers#28166", None, wide, 3, judge(last=lambda p, tree, i: p[tree.parent[i]])),
    chain("bonus from the draft", "a row of q where p was meant", F(4, 27), ord3, 3, judge(last=lambda p, tree, i: exact(1, 2, 3))),
    chain("one uniform for all positions", "flashinfer-ai/flashinfer#424", F(1, 18), ord3, 2, judge(keep=shared_coin)),
    chain("judges on after a rejection", "a chain that is not cut", F(1, 12), (kill_p, kill_q), 2, goes_on),
    chain("stop token masked on drafted rows", "vllm-project/vllm#41493", None, (kill_p, kill_q), 3,
          judge(row=lambda p, tree, i: without(p[i], 2) if tree.children(i) else p[i]), stop=(2,)),
    chain("stop token seen at the end of a block only", "huggingface/transformers#47912", None, (kill_p, kill_q), 3, loop=past_the_stop, stop=(2,)),
    chain("one token after a stop token", "LostRuins/koboldcpp#1276", None, (kill_p, kill_q), 3, loop=bonus_after_stop, stop=(2,)),
    chain("stop token ignored", "openvinotoolkit/openvino.genai#1951", None, (kill_p, kill_q), 3, loop=ignores_stop, stop=(2,)),
]

SLOW = [   # the law is kept, tokens are lost: only an oracle of E[tokens] sees them
    chain("bonus dropped", "ohdearquant/lattice#509", 0, (kill_p, kill_q), 3, without_bonus),
    chain("one accepted token at most", "a block cut short", 0, (kill_p, kill_q), 3, first_only),
    chain("falls back to match", "as in vllm-project/vllm-ascend#15673", 0, (kill_p, kill_q), 3, match),
    chain("forgets the draft", "a silent fallback to plain decoding", 0, (kill_p, kill_q), 3, forgetful),
    chain("guesses one where two were asked", "a block cut short", 0, (kill_p, kill_q), 3, drafter=Chain(kill_q, 1)),
    chain("draft one row behind", "lablup/mlxcel#994", 0, (kill_p, kill_p), 3, drafter=stale(kill_p, 2)),
]
