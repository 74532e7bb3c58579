"""30d_branching: the source has its stated transitions, independent drafts are bounded by the closed form,
sequential ones are not"""
from fractions import Fraction

import numpy as np, pytest, torch
from hypothesis import strategies as st

from helpers import examples, proves, round_tokens
from networks import branch_ahead, branch_row
from specref import Chain, exact, HFModel, normalize, one_hot, TableModel, Tree
from specref.train.harness import TargetModel
from specref.train.synthetic import branch_texts, branching, chain_tokens, following, most_tokens, overlap_at

sources = st.tuples(st.integers(1, 4), st.integers(1, 4))
shapes = pytest.mark.parametrize("B, tail, gamma", [(2, 1, 3), (2, 2, 3), (3, 1, 3), (2, 3, 2), (3, 2, 2)])

@examples(8, sources)
def test_the_source_is_the_transformer(source):
    """Every distribution of the model is the transition up to V e^-12, whatever the context, and its state is
    the unit vector of the token"""
    B, tail = source
    net, V = branching(B, tail), B*(tail + 1)
    model = HFModel(net, keep=(1,), check=False)
    for x in range(V):
        assert abs(model(Tree((V - 1, x)))[0] - branch_row(B, tail, x).astype(float)).max() < V*np.exp(-12)
    states, d = model.states(tuple(range(V)))[1], net.config.hidden_size
    assert torch.allclose(states, d**.5 * torch.eye(V, d, dtype=torch.float64), atol=1e-6)
    TargetModel(net)

@examples(10, sources, st.integers(0, 99))
def test_texts_follow_the_source(source, seed):
    "Each token may follow the one before; first tokens take every phase, last tokens every branch"
    B, tail = source
    x = branch_texts(B, tail, 40, 3*tail + 4, seed).astype(int)
    assert all(b in following(a, B, tail) for text in x for a, b in zip(text, text[1:]))
    assert len({t[0] % (tail + 1) for t in x}) == tail + 1 and len(set(x[:, -1] // (tail + 1))) == B

def mean_of(B, tail, gamma, law):
    "Mean tokens of enumerated rounds, started at every phase"
    target, means = TableModel(B*(tail + 1), lambda text: branch_row(B, tail, text[-1])), []
    for phase in range(tail + 1):
        before = (phase - 1) % (tail + 1)
        heads = TableModel(target.V, lambda text: law((before, phase), len(text) - 2))
        runs = [(before, x) for x in following(before, B, tail)]   # x_{t+1} is not known
        found = sum(round_tokens(target, Chain(heads, gamma), ctx=run).mean() for run in runs)
        means.append(found / Fraction(len(runs)))
    return sum(means) / (tail + 1)

@proves("thm-capped")
@shapes
def test_capped(B, tail, gamma):
    """Every path of a round enumerated, from every phase, with the best independent distributions, and with
    those that read the whole path"""
    target = TableModel(B*(tail + 1), lambda text: branch_row(B, tail, text[-1]))
    def mean(start, draft): return round_tokens(target, Chain(draft, gamma), ctx=start).mean()
    for phase in range(tail + 1):
        before = (phase - 1) % (tail + 1)
        start = (before, following(before, B, tail)[0])
        blind = TableModel(target.V, lambda text: branch_ahead(B, tail, before, len(text)))
        overlaps = [overlap_at(B, tail, phase, j) for j in range(gamma)]
        assert mean(start, blind) == 1 + sum(np.cumprod(overlaps)) and mean(start, target) == gamma + 1
    means = mean_of(B, tail, gamma, lambda start, j: branch_ahead(B, tail, start[0], j + 2))
    assert means == chain_tokens(B, tail, gamma)

@proves("thm-capped")
@pytest.mark.parametrize("B, tail", [(2, 2), (3, 1)])
def test_no_independent_distribution_does_better(B, tail):
    """Any other distribution at the place after a branch, point masses included, has at most the same mean
    overlap"""
    V, rng = B*(tail + 1), np.random.default_rng(0)
    tails = [np.eye(V)[b*(tail + 1) + 1] for b in range(B)]
    for q in (*np.eye(V), *rng.dirichlet(np.ones(V), 50)):
        assert np.mean([np.minimum(p, q).sum() for p in tails]) <= 1/B + 1e-12

@proves("thm-agreed")
@pytest.mark.parametrize("B, tail, gamma", [(2, 1, 4), (2, 2, 3), (3, 2, 2)])
def test_heads_that_agree(B, tail, gamma):
    """Heads uniform at branches and on branch 0 after them reach the bound, which lies above that of each
    place alone and below a sequential drafter's"""
    def bet(start, j):
        q = branch_ahead(B, tail, start[0], j + 2)
        return q if q[0] else one_hot(int(np.flatnonzero(q)[0]), B*(tail + 1), exact=True)
    alone, most = chain_tokens(B, tail, gamma), most_tokens(B, tail, gamma)
    assert mean_of(B, tail, gamma, bet) == most < gamma + 1
    assert alone <= most and (alone < most) == (gamma > 1 and tail > 1)

@proves("thm-agreed")
@examples(10, st.sampled_from([(2, 1, 3), (2, 2, 2), (3, 1, 2)]), st.data())
def test_no_heads_do_better(source, data):
    "Whatever distributions the heads return at each phase and depth, the mean tokens are within the bound"
    B, tail, gamma = source
    weights = st.lists(st.integers(0, 3), min_size=B*(tail + 1), max_size=B*(tail + 1)).filter(any)
    laws = {(phase, j): normalize(exact(*data.draw(weights))) for phase in range(tail + 1)
            for j in range(gamma)}
    found = mean_of(B, tail, gamma, lambda start, j: laws[start[1] % (tail + 1), j])
    assert found <= most_tokens(B, tail, gamma)
