"A user's script: it runs, and a type checker accepts it where the package is installed"
from specref import (Chain, Drafter, Generation, Rows, Seeded, System, TableModel, Tree, Verdict, block,
                     certify_system, exact, generate, law_of, loop_law, no_draft, points, reject, residual,
                     target_law, transport, traversal)
from specref.core.target import Target

class Repeat(Drafter):
    "Drafts the last token again"
    def __init__(self, V: int, gamma: int): self.V, self.gamma = V, gamma
    @property
    def depth(self) -> int: return self.gamma
    def __call__(self, ctx, rng):
        tree = Tree(ctx)
        for i in range(self.gamma): tree.grow(i, points([ctx[-1]], self.V, exact=True), rng)
        return tree
    def learn(self, round): return Repeat(self.V, len(round.tokens))

class Counts(TableModel):
    "A table with a method for its rows"
    def __init__(self, V: int): super().__init__(V, self.row)
    def row(self, text): return exact(*(1 + text.count(x) for x in range(self.V)))

class Flat(Target):
    "A target by itself"
    def __init__(self, V: int): self.V = V
    def __call__(self, tree): return Rows(lambda i: exact(*[1] * self.V), len(tree), self.V)

def root_alone(p, tree, rng):
    "A verifier that reads the children of node 0 and no others"
    r = p[0]
    for child in tree.children(0):
        x, q = tree.token[child], tree.law[child]
        if rng.coin(r[x], of=q[x], at=child): return Verdict(child, rng.pick(p[child], at=child))
        r = residual(r, q)
    return Verdict(0, rng.pick(r, at=0))

def with_networks(path: str) -> Generation:
    "Not called here: it needs torch"
    from specref import HFModel, embedded, prompts
    target, draft = HFModel.load(path, temperature=.7), embedded("small", top_k=5)
    text = generate(target, Chain(draft, 4), reject, prompts("english", 1)[0], 16, Seeded(0), stop={0})
    print(text.ledger.seconds["target"], [step.logprob for step in text.steps])
    return text

target = Counts(3)
text = generate(target, Chain(Flat(3), gamma=2), reject, ctx=(0,), n=8, rng=Seeded(0), watch=print)
print(text.tokens, text.ledger.mean_acceptance_length, [step.logprob for step in text.steps])
assert law_of(lambda rng: generate(target, no_draft, block, (0,), 2, rng)) == target_law(target, (0,), 2)
for verify in reject, block, traversal, transport, root_alone:
    system = System("mine", Repeat(3, gamma=1), verify)
    assert certify_system(system, target, (0,), n=2).passes
    assert loop_law(target, system.drafter, verify, (0,), 2).of(sum) == target_law(target, (0,), 2).of(sum)
