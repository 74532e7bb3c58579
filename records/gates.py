"""Rules with an exception, made at random by a generator that knows nothing of the rows of any test
(`make record-gates`, a quarter of an hour): which ones are wrong and pass the judge and the kit?"""
from pathlib import Path
from dataclasses import dataclass

import numpy as np

from specref.certify.intervals import RuleCalls, choose_token, law_of_calls, positive_part
from specref.certify.judge import JUDGE_CASES
from specref.certify.calls import Plan
from specref.certify.samplers import Kit
from specref.core.check import write_record

FEATURES = {   # what a condition may look at, and how its threshold is drawn
    "p(x)": lambda r: r.uniform(0, 1), "q(x)": lambda r: r.uniform(0, 1),
    "ratio": lambda r: 4**r.uniform(-2, 2), "max p": lambda r: r.uniform(.3, 1),
    "max q": lambda r: r.uniform(.3, 1),
    "entropy": lambda r: r.uniform(0, 1.1), "rank in p": lambda r: r.integers(1, 3),
    "rank in q": lambda r: r.integers(1, 3), "place": lambda r: r.integers(1, 10),
    "left": lambda r: r.integers(2, 4)}
ACTIONS = "accept", "reject", "argmax"


def features(p, q, place, left):  # (n, V), (n, V), (n, 1), (n, 1) -> {name: (n, V)}
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy, ratio = -np.where(p > 0, p*np.log(p), 0).sum(1, keepdims=True), p/q
    ranks, tops = ((row[:, None, :] > row[..., None]).sum(-1) for row in (p, q)), (
        row.max(1, keepdims=True) for row in (p, q))
    found = p, q, ratio, *tops, entropy, *ranks, place, left
    return {name: x + 0*p for name, x in zip(FEATURES, found)}


@dataclass(frozen=True)
class Gate:
    "An exception to speculative sampling where all conditions (feature, threshold, at least or below) hold"
    conditions: tuple
    action: str
    def __str__(self):
        words = (f"{name} {'>=' if up else '<'} {t:.3g}" for name, t, up in self.conditions)
        return f"{self.action} where {' and '.join(words)}"
    def holds(self, *rows):  # -> (n, V)
        found = features(*rows)
        return np.all([found[name] >= t if up else found[name] < t for name, t, up in self.conditions], 0)
    def rule(self, p, q, draft, u):
        "As the judge calls it"
        for i, x in enumerate(draft):
            rows = (np.asarray(row, float)[None] for row in (p[i], q[i]))
            if not self.holds(*rows, i, len(draft) - i)[0, x]:
                if u()*q[i][x] < p[i][x]: continue
            elif self.action == "accept": continue
            elif self.action == "argmax": return [*draft[:i], int(np.argmax(p[i]))]
            rest = positive_part(p[i] - q[i])
            return [*draft[:i], choose_token(rest if rest.sum() > 0 else p[i], u)]
        return [*draft, choose_token(p[-1], u)]
    def verify(self, p, q, x, rng): return self.rule(p, q, x, rng.random)
    def distances(self, p, q, place, left):  # -> (n,)
        "The total variation of the first token on each pair of rows"
        on, right = self.holds(p, q, place, left), np.minimum(p/np.maximum(q, 1e-300), 1)
        accept = np.where(on, self.action == "accept", right)
        rest = np.maximum(p - q, 0)
        rest = np.where(rest.sum(1, keepdims=True) > 1e-15, rest, p)
        likely = on & (self.action == "argmax")
        recovered = (q*(1 - accept)*~likely).sum(1, keepdims=True)
        out = q*accept + recovered*rest/rest.sum(1, keepdims=True)
        out[np.arange(len(p)), p.argmax(1)] += (q*likely).sum(1)
        return abs(out - p).sum(1)/2


def random_gate(rng):
    names = rng.choice([*FEATURES], rng.integers(1, 3), replace=False)
    conditions = tuple((str(name), float(FEATURES[name](rng)), bool(rng.integers(2))) for name in names)
    return Gate(conditions, str(rng.choice(ACTIONS)))


def random_rows(rng, n=4000, V=4):  # -> p, q, place, left
    "Rows of all kinds: flat and sharp, alike and unlike"
    def rows(): return np.array([rng.dirichlet(np.full(V, 10**rng.uniform(-1.5, 1))) for _ in range(n)])
    p, other, s = rows(), rows(), rng.random((n, 1))
    sharper = p**(2**rng.uniform(-2, 2, (n, 1)))
    like = s*sharper/sharper.sum(1, keepdims=True) + (1 - s)*other
    q = np.where(rng.random((n, 1)) < .5, like, other)
    return p, q, rng.integers(0, 10, (n, 1)), rng.integers(1, 5, (n, 1))


def judged_rows():  # -> p, q, place, left; a vocabulary of three has a fourth token of probability 0
    "Every pair of rows on which the judge calls a rule"
    found = []
    for case in JUDGE_CASES:
        drafts = {draft for draft, _ in law_of_calls(case, RuleCalls(lambda *_: (0,)), False)}
        for y in sorted({draft[:i] for draft in drafts for i in range(case.gamma)}):
            p, q = (np.pad(case.row(side, y).astype(float), (0, 4 - case.target.V)) for side in (0, 1))
            found.append((p, q, [len(y)], [case.gamma - len(y)]))
    return [*map(np.array, zip(*found))]


def kit_fails(gate, seed=0):  # -> checks
    "The checks of the kit that fail"
    kit = Kit(gate.verify, Plan(seed=seed))
    return [name for name in ("distribution", "position", "gates") if kit.finding(name).passes is False]


def search(gates=50_000, seed=0, every=2_500):  # -> record
    "The kit is asked about the gates that the judge does not see, and about each `every`-th of the others"
    rng, mine = np.random.default_rng(seed), judged_rows()
    rows, found = random_rows(rng), []
    for k in range(gates):
        gate = random_gate(rng)
        distances, judged = gate.distances(*rows), gate.distances(*mine).max() >= 1e-9
        if distances.max() < 1e-9: continue
        asked = not judged or k % every == 0
        found.append(dict(gate=str(gate), largest=distances.max(), mean=distances.mean(), judged=bool(judged),
                          kit=bool(kit_fails(gate, k)) if asked else None))
    return dict(seed=seed, rows=len(rows[0]), gates=gates, wrong=len(found),
                means=[dict(least=least, **counts(found, least)) for least in (0, 1e-4, 1e-3, 1e-2)],
                passed=[one for one in found if not (one["judged"] or one["kit"])])


def counts(found, least):  # -> {name: count}, of the gates whose mean distance is at least `least`
    some = [one for one in found if one["mean"] >= least]
    unseen = [one for one in some if not one["judged"]]
    asked = [one for one in some if one["judged"] and one["kit"] is not None]
    return dict(wrong=len(some), unjudged=len(unseen), passed=sum(not one["kit"] for one in unseen),
                asked=len(asked), kit_passed=sum(not one["kit"] for one in asked))


if __name__ == "__main__":
    write_record(Path(__file__).with_suffix(".json"), "make record-gates", search())
