"30d_branching: the source is what it says, independent drafts are capped at the closed form, sequential ones are not"
from fractions import Fraction
from itertools import product
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings, strategies as st
from helpers import proves, refuses
from specref.train.branching import branch_texts, branching, chain_tokens, following, most_tokens, overlap_at
from specref.core.rng import law_of
from specref.core.law import exact, normalize, one_hot
from specref.core.loop import rounds
from specref.verify.reject import Chain, reject
from specref.core.target import TableModel
from specref.train.harness import TargetModel, StateDataset, evaluate
from specref.models.transformer import HFModel
from specref.core.tree import Tree

sources = st.tuples(st.integers(1, 4), st.integers(1, 4))


def row(B, tail, x): return exact(*(int(y in following(x, B, tail)) for y in range(B*(tail + 1))))

def ahead(B, tail, x, n):
    "The law of the token n places after x"
    q = row(B, tail, x)
    for _ in range(n - 1): q = sum(w*row(B, tail, y) for y, w in enumerate(q) if w)
    return q


@settings(max_examples=12)
@given(sources)
def test_the_source_is_the_transformer(source):
    "Every law of the model is the transition up to V e^-12, whatever stands before, and its state is the unit vector of the token"
    B, tail = source
    net = branching(B, tail); model, V = HFModel(net, keep=(1,), check=False), B*(tail + 1)
    for x in range(V):
        assert abs(model(Tree((V - 1, x)))[0] - row(B, tail, x).astype(float)).max() < V*np.exp(-12)
    states, d = model.states(tuple(range(V)))[1], net.config.hidden_size
    assert torch.allclose(states, d**.5 * torch.eye(V, d, dtype=torch.float64), atol=1e-6)
    TargetModel(net)


@settings(max_examples=20)
@given(sources, st.integers(0, 99))
def test_texts_are_of_the_source(source, seed):
    "Each token may follow the one before; the phases of the beginnings and the branches are spread"
    B, tail = source
    x = branch_texts(B, tail, 40, 3*tail + 4, seed).astype(int)
    assert all(b in following(a, B, tail) for text in x for a, b in zip(text, text[1:]))
    assert len({t[0] % (tail + 1) for t in x}) == tail + 1 and len(set(x[:, -1] // (tail + 1))) == B


@proves("thm-capped")
@pytest.mark.parametrize("B, tail, gamma", [(2, 1, 3), (2, 2, 3), (3, 1, 3), (2, 3, 2), (3, 2, 2)])
def test_capped(B, tail, gamma):
    "Every path of a round enumerated, from every phase, with the best independent laws, and with those that read everything"
    V, period = B*(tail + 1), tail + 1
    target = TableModel(V, lambda text: row(B, tail, text[-1]))
    def mean(start, draft): return law_of(lambda rng: len(next(rounds(target, Chain(draft, gamma), reject, start, rng)).tokens)).mean()
    found = []
    for phase in range(period):
        start = ((phase - 1) % period, following((phase - 1) % period, B, tail)[0])
        blind = TableModel(V, lambda text: ahead(B, tail, start[0], len(text)))
        found.append(mean(start, blind))
        want, kept = Fraction(1), Fraction(1)
        for j in range(gamma): kept *= overlap_at(B, tail, phase, j); want += kept
        assert found[-1] == want and mean(start, target) == gamma + 1
    assert sum(found) / period == chain_tokens(B, tail, gamma)


@proves("thm-capped")
@pytest.mark.parametrize("B, tail", [(2, 2), (3, 1)])
def test_no_independent_law_does_better(B, tail):
    "Any other law of the place after a branch, deterministic ones among them, has the same mean overlap or less"
    V, rng = B*(tail + 1), np.random.default_rng(0)
    tails = [np.eye(V)[b*(tail + 1) + 1] for b in range(B)]
    for q in (*np.eye(V), *rng.dirichlet(np.ones(V), 50)): assert np.mean([np.minimum(p, q).sum() for p in tails]) <= 1/B + 1e-12


def mean_of(B, tail, gamma, law):
    "Mean tokens of enumerated rounds, begun at every phase; `law(start, j)` is what the head of depth j states"
    target, means = TableModel(B*(tail + 1), lambda text: row(B, tail, text[-1])), []
    for phase in range(tail + 1):
        start = ((phase - 1) % (tail + 1), following((phase - 1) % (tail + 1), B, tail)[0])
        heads = TableModel(target.V, lambda text: law(start, len(text) - 2))
        runs = [(start[0], x) for x in following(start[0], B, tail)]   # nothing of x_{t+1} is known
        means.append(sum(law_of(lambda rng: len(next(rounds(target, Chain(heads, gamma), reject, run, rng)).tokens)).mean() for run in runs) / Fraction(len(runs)))
    return sum(means) / (tail + 1)


@proves("thm-agreed")
@pytest.mark.parametrize("B, tail, gamma", [(2, 1, 4), (2, 2, 3), (3, 1, 3), (3, 2, 2), (2, 3, 3)])
def test_heads_that_agree(B, tail, gamma):
    "Uniform at branches and all on branch 0 behind them: every path enumerated gives the bound, which is above what each place alone comes to, and below what reading gives"
    V = B*(tail + 1)
    def bet(start, j):
        q = ahead(B, tail, start[0], j + 2)
        return q if q[0] else one_hot(int(np.flatnonzero(q)[0]), V, exact=True)
    alone = mean_of(B, tail, gamma, lambda start, j: ahead(B, tail, start[0], j + 2))
    assert mean_of(B, tail, gamma, bet) == most_tokens(B, tail, gamma) < gamma + 1
    assert alone == chain_tokens(B, tail, gamma) <= most_tokens(B, tail, gamma) and (alone < most_tokens(B, tail, gamma)) == (gamma > 1 and tail > 1)


@proves("thm-agreed")
@settings(max_examples=15)
@given(st.sampled_from([(2, 1, 3), (2, 2, 2), (3, 1, 2)]), st.data())
def test_no_heads_do_better(source, data):
    "Whatever laws the heads state at each phase and depth, no more tokens come than the bound"
    B, tail, gamma = source
    weights = st.lists(st.integers(0, 3), min_size=B*(tail + 1), max_size=B*(tail + 1)).filter(any)
    laws = {(phase, j): normalize(exact(*data.draw(weights))) for phase in range(tail + 1) for j in range(gamma)}
    assert mean_of(B, tail, gamma, lambda start, j: laws[start[1] % (tail + 1), j]) <= most_tokens(B, tail, gamma)


class Told(torch.nn.Module):
    "The best guesses in closed form: of x_{t+2+j} from f_t alone, or from all tokens up to its place"
    def __init__(self, B, tail, blind): super().__init__(); self.B, self.tail, self.blind, self.V = B, tail, blind, B*(tail + 1)
    def guesses(self, batch, depth):
        table = {(x, n): torch.from_numpy(ahead(self.B, self.tail, x, n).astype(float)).clamp(min=np.exp(-12)).log() for x in range(self.V) for n in range(1, depth + 2)}
        T = batch.x.shape[1]
        for j in range(depth): yield torch.stack([torch.stack([table[(int(x[t]), j + 2) if self.blind else (int(x[t+1+j]), 1)] for t in range(T - 1 - j)]) for x in batch.x])


@pytest.mark.parametrize("blind", [True, False])
def test_marks_are_the_closed_form(blind):
    "`evaluate` of the best independent guesses is `chain_tokens`, of sequential ones gamma + 1, to the error of the texts drawn"
    B, tail, gamma = 4, 3, 3
    base, x = TargetModel(branching(B, tail)), torch.from_numpy(branch_texts(B, tail, 400, 4*8 + gamma + 1).astype(np.int64))
    with torch.inference_mode(): states = base.model(input_ids=x, output_hidden_states=True).hidden_states[1]
    got, _ = evaluate(Told(B, tail, blind), base, StateDataset(x, {1: states}), gamma)
    assert abs(got - (chain_tokens(B, tail, gamma) if blind else gamma + 1)) < .02


def test_bad_requests():
    "No branches, no tail, no drafts"
    refuses("B", branching, 0, 1); refuses("tail", branching, 1, 0)
    for f in (chain_tokens, most_tokens): refuses("gamma", f, 2, 2, 0)
