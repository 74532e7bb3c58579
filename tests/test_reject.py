"Chapter 05: speculative sampling is exact; its mean number of tokens"
from itertools import product
from math import prod

import numpy as np, pytest
from hypothesis import strategies as st

from helpers import CANON, examples, killer, models, pairs, proves
from verify_helpers import as_dict
from specref import (capped_geometric, Chain, exact, law_of, overlap, reject, rounds, Seeded, TableModel,
                     Tree, tv_outcomes, Verdict)
from specref.core.rng import verdict_tape
from specref.verify.reject import accepted_at_least, rejection_sampling_rate

def one(p, q, x, rng):  # -> Verdict on one child x from q
    tree = Tree((0,))
    tree.add(0, x, q)
    return reject([p, p], tree, rng)

def step(p, q, rng):  # -> accepted?, the first token
    x = rng.pick(q)
    verdict = one(p, q, x, rng)
    return verdict.node, x if verdict.node else verdict.token

@proves("thm-reject")
@examples(50, pairs())
def test_one_step(pq):
    "Distribution p, acceptance β; in floats too, also for q one ulp from p"
    p, q = pq
    got = law_of(lambda rng: step(p, q, rng))
    assert got.of(lambda nx: nx[1]) == as_dict(p) and got.of(lambda nx: nx[0]).get(1, 0) == overlap(p, q)
    assert all(got.get((1, x), 0) == min(a, b) for x, (a, b) in enumerate(zip(p, q)))
    p = p.astype(float)
    near = np.array([np.nextafter(x, x + (-1)**i) if x else x for i, x in enumerate(p)])
    for q in (q.astype(float), near):
        assert tv_outcomes(law_of(lambda rng: step(p, q, rng)).of(lambda nx: nx[1]), as_dict(p)) < 1e-12

@pytest.mark.parametrize("u", [0., .24999, .25, .9999])
def test_a_verdict_on_a_tape(u):
    "Strict: at u = p/q the token is rejected, weight 0 at u = 0 too; the recovered token is the tape's"
    p, q = CANON
    assert one(p, q, 3, verdict_tape([0, u], [.8, .5])) == (Verdict(1, 1) if u < .25 else Verdict(0, 1))
    assert one(exact(1, 0, 1, 0), exact(0, 1, 0, 1), 3, verdict_tape([0, 0.], [.8, 0])) == Verdict(0, 2)

def accepted(target, draft, gamma):  # -> Outcomes of a round
    return law_of(lambda rng: next(rounds(target, Chain(draft, gamma), reject, (0,), rng)).verdict.node)

@proves("thm-accepted")
@examples(25, models(), st.integers(1, 3))
def test_accepted_tokens(pair, gamma):
    "P(at least i accepted), by enumeration, is the sum over texts of the product of the smaller weights"
    got = accepted(*pair, gamma)
    def smaller(y, j): return min(model.law((0, *y[:j]))[y[j]] for model in pair)
    for i in range(gamma + 1):
        want = sum(prod(smaller(y, j) for j in range(i)) for y in product(range(3), repeat=i))
        assert sum(w for k, w in got.items() if k >= i) == accepted_at_least(*pair, (0,), i) == want

@proves("cor-capped-geometric")
@examples(20, pairs(st.integers(2, 4)), st.integers(1, 3))
def test_capped_geometric(pq, gamma):
    "With the same β after every text, rows rotated by it: (1 - α^(γ+1))/(1 - α) tokens a round"
    rotated = [TableModel(len(law), lambda text, law=law: np.roll(law, sum(text))) for law in pq]
    α, got = overlap(*pq), 1 + accepted(*rotated, gamma).mean()
    assert got == capped_geometric(α, gamma) == (gamma + 1 if α == 1 else (1 - α**(gamma + 1)) / (1 - α))

@proves("thm-rejection-sampling")
@examples(50, pairs())
def test_rejection_sampling(pq):
    "One try accepts with probability 1/M <= β, and the accepted token has distribution p"
    (p, q), rate = pq, rejection_sampling_rate(*pq)
    on = p > 0
    if (q[on] == 0).any(): return np.testing.assert_equal(rate, 0)
    M = max(p[on] / q[on])
    got = law_of(lambda rng: x if rng.coin(p[x := rng.pick(q)], of=M*q[x]) else None)
    assert 1 - got.pop(None, 0) == rate == 1/M <= overlap(p, q) and got == as_dict(p/M)

def test_chains_are_drawn_from_their_model():
    "Every edge is the model's row after its text; equal drafters compare equal, so loops can be merged"
    model = killer()[1]
    tree = Chain(model, 4)((0, 1), Seeded(0))
    assert all((tree.law[i + 1] == model.law(tree.text(i))).all() for i in range(4)) and tree.depth[-1] == 4
    assert len({Chain(model, 2), Chain(model, 2), Chain(model, 3)}) == 2
