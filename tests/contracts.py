"The contracts of drafters, targets and verifiers, as functions: every listed system is checked by them"
from collections import Counter
from math import prod

from specref import law_of, Streams, target_law, Tree
from specref.core.loop import clip
from specref.core.tree import edge_laws

def drafter_contract(drafter, ctx):
    "Edges state their tokens' conditional distributions, a tree has their product, no call changes the next"
    trees = law_of(lambda rng: drafter(ctx, rng))
    for seen, stated, true in edge_laws(trees):
        assert stated == true, f"{seen}: stated {stated}, drawn from {true}"
    for t, w in trees.items():
        offered = [i for i in range(1, len(t)) if t.law[i] is not None]
        assert t.ctx == ctx and w == prod(t.law[i][t.token[i]] for i in offered), t.key()
    assert trees == law_of(lambda rng: drafter(ctx, rng))

def target_contract(model, tree, same=lambda a, b: tuple(a) == tuple(b)):
    "One pass over a tree gives at every node the row of a pass over its text, in any order of reading"
    p = model(tree)
    assert len(p) == len(tree)
    for i in reversed(range(len(tree))):
        assert same(p[i], model(Tree(tree.text(i)))[0]), f"node {i}, text {tree.text(i)}"

class Sealed:
    "The rng of one side: it may be used only while `open`"
    def __init__(self, rng): self.rng, self.open = rng, True
    def draw(self, how, *args, **kw):
        assert self.open, "noise of the other side"
        return getattr(self.rng, how)(*args, **kw)
    def pick(self, *args, **kw): return self.draw("pick", *args, **kw)
    def coin(self, *args, **kw): return self.draw("coin", *args, **kw)

class Watched:
    "Rows with a copy of each from its first read"
    def __init__(self, p): self.p, self.seen = p, {}
    def __len__(self): return len(self.p)
    def __getitem__(self, i):
        if i not in self.seen: self.seen[i] = tuple(self.p[i])
        return self.p[i]
    def same(self): return all(tuple(self.p[i]) == row for i, row in self.seen.items())

def one_round(target, drafter, verify, ctx, rng):
    "The tokens of one round; asserts that the verifier violates none of its conditions"
    sides = Streams(Sealed(rng), Sealed(rng))
    tree = drafter(ctx, sides.draft)
    sides.draft.open, key, p = False, tree.key(), Watched(target(tree))
    verdict = verify(p, tree, sides.verify)
    assert tree.key() == key and p.same(), "the verifier changed its arguments"
    assert all(tree.law[i] is not None for i in tree.ancestors(verdict.node)), "a probe was accepted"
    assert 0 <= verdict.token < target.V
    return verdict.tokens(tree)

def continued(some, target, ctx, n):
    "The distribution of `n` tokens: a text with the distribution `some`, continued by the target"
    out = Counter()
    for text, w in some.items():
        for more, v in target_law(target, (*ctx, *text), n - len(text)).items(): out[text + more] += w*v
    return out

def verifier_contract(target, drafter, verify, ctx, n):
    "One round, continued by the target, has the target's distribution, for any draft with true edges"
    some = law_of(lambda rng: clip(one_round(target, drafter, verify, ctx, rng), n, ()))
    same = continued(some, target, ctx, n) == target_law(target, ctx, n)
    assert same, "another distribution, or its edges are no fractions: does the drafter take `exact`?"
