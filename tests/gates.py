"""Rules with an exception, made at random by a generator that knows nothing of the kit's rows.

python tests/gates.py [SECONDS] searches for one that the judge or the kit passes although it is wrong by more
than a stated distance on some rows."""
import sys
import time
from dataclasses import dataclass
from itertools import count

import numpy as np

from specref.core.law import exact

HALF_LINES = {   # what a condition may look at, and how its threshold is drawn
    "p(x)": lambda r: r.uniform(0, 1), "q(x)": lambda r: r.uniform(0, 1), "ratio": lambda r: 4**r.uniform(-2, 2),
    "max p": lambda r: r.uniform(.3, 1), "max q": lambda r: r.uniform(.3, 1), "entropy": lambda r: r.uniform(0, 1.1),
    "rank in p": lambda r: r.integers(1, 3), "rank in q": lambda r: r.integers(1, 3),
    "place": lambda r: r.integers(1, 10), "left": lambda r: r.integers(2, 4)}
ACTIONS = "accept", "reject", "argmax"


def features(p, q, x, place, left):
    "The same numbers as arrays or one by one: `x` is an index into the last axis"
    a, b = np.asarray(p, float), np.asarray(q, float)
    def at(row): return np.take_along_axis(row, x, -1) if isinstance(x, np.ndarray) else row[..., x]
    px, qx = at(a), at(b)
    def of(v): return v[..., None] if isinstance(x, np.ndarray) else v
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy, ratio = -np.where(a > 0, a*np.log(a), 0).sum(-1), px/qx
    def rank(row, v): return (row[..., None, :] > v[..., None]).sum(-1) if isinstance(x, np.ndarray) else (row > v).sum()
    return {"p(x)": px, "q(x)": qx, "ratio": ratio, "max p": of(a.max(-1)), "max q": of(b.max(-1)),
            "entropy": of(entropy), "rank in p": rank(a, px), "rank in q": rank(b, qx), "place": place, "left": left}


@dataclass(frozen=True)
class Gate:
    conditions: tuple   # (feature, threshold, at least or below)
    action: str
    def __str__(self):
        return f"{self.action} where " + " and ".join(
            f"{name} {'>=' if up else '<'} {t:.3g}" for name, t, up in self.conditions)
    def holds(self, found):
        parts = [found[name] >= t if up else found[name] < t for name, t, up in self.conditions]
        return parts[0] & parts[-1]
    def rule(self, p, q, draft, u):
        "As the judge calls it"
        from specref.certify.judge import choose_token, positive_part
        for i, x in enumerate(draft):
            if self.holds(features(p[i], q[i], int(x), i, len(draft) - i)):
                if self.action == "accept": continue
                if self.action == "argmax": return [*draft[:i], int(np.argmax(p[i]))]
            elif u()*q[i][x] < p[i][x]: continue
            rest = positive_part(p[i] - q[i])
            return [*draft[:i], choose_token(rest if rest.sum() > 0 else p[i], u)]
        return [*draft, choose_token(p[-1], u)]
    def verify(self, p, q, x, rng): return self.rule(p, q, x, rng.random)
    def distances(self, p, q, place, left):  # (n, V), (n, V), (n, 1), (n, 1) -> (n,)
        "The total variation of the first token on each pair of rows"
        x = np.broadcast_to(np.arange(p.shape[1]), p.shape)
        on, right = self.holds(features(p, q, x, place, left)), np.minimum(p/np.maximum(q, 1e-300), 1)
        accept = np.where(on, self.action == "accept", right)
        rest = np.maximum(p - q, 0)
        rest = np.where(rest.sum(1, keepdims=True) > 1e-15, rest, p)
        out = q*accept + (q*(1 - accept)*(~on | (self.action != "argmax"))).sum(1, keepdims=True)*(
            rest/rest.sum(1, keepdims=True))
        if self.action == "argmax": out[np.arange(len(p)), p.argmax(1)] += (q*on).sum(1)
        return abs(out - p).sum(1)/2


def random_gate(rng):
    names = rng.choice([*HALF_LINES], rng.integers(1, 3), replace=False)
    conditions = tuple((str(name), float(HALF_LINES[name](rng)), bool(rng.integers(2))) for name in names)
    return Gate(conditions, str(rng.choice(ACTIONS)))


def random_rows(rng, n=4000, V=4):  # -> p, q (n, V), place, left (n, 1)
    "Rows of all kinds: flat, sharp, alike and unlike"
    def rows(): return np.array([rng.dirichlet(np.full(V, 10**rng.uniform(-1.5, 1))) for _ in range(n)])
    p, other = rows(), rows()
    s, sharper = rng.random((n, 1)), p**(2**rng.uniform(-2, 2, (n, 1)))
    q = np.where(rng.random((n, 1)) < .5, s*sharper/sharper.sum(1, keepdims=True) + (1 - s)*other, other)
    return p, q, rng.integers(0, 10, (n, 1)), rng.integers(1, 5, (n, 1))


def judged_rows():  # -> rows of four weights, the last one 0 where the vocabulary has three tokens
    "Every pair of rows on which the judge calls a rule, with its place"
    from specref.certify.judge import JUDGE_CASES, RuleCalls, law_of_calls
    found = []
    for case in JUDGE_CASES:
        drafts = {draft for draft, _ in law_of_calls(case, RuleCalls(lambda *_: (0,)), False)}
        for y in sorted({draft[:i] for draft in drafts for i in range(case.gamma)}):
            p, q = (np.pad(case.row(side, y).astype(float), (0, 4 - case.target.V)) for side in (0, 1))
            found.append((p, q, [len(y)], [case.gamma - len(y)]))
    return map(np.array, zip(*found))


def search(seconds, seed=0, most=.05):
    "Gates that are wrong by more than `most` on random rows, and on none of the judge's; and what the kit finds"
    from specref.certify.samplers import SamplerChecks
    rng, end, mine = np.random.default_rng(seed), time.time() + seconds, [*judged_rows()]
    rows, missed = random_rows(rng), []
    for k in count(1):
        gate = random_gate(rng)
        worst = gate.distances(*rows).max()
        if worst <= most: continue
        on_judged = gate.distances(*mine).max()
        kit = SamplerChecks(gate.verify, seed=k)
        passes = kit.result("gates").passes and kit.result("distribution").passes
        if on_judged < 1e-9 or passes:
            missed.append((worst, on_judged, passes, str(gate)))
            print(f"{worst:.3f} on random rows, {on_judged:.3f} on the judge's, kit passes: {passes}: {gate}", flush=True)
        if time.time() > end: return k, missed


if __name__ == "__main__":
    tried, missed = search(float([*sys.argv, 600][1]))
    print(f"{tried} gates; not seen by the judge: {sum(d < 1e-9 for _, d, *_ in missed)}; by the kit: "
          f"{sum(p is True for *_, p, _ in missed)}, at most {max([0, *(w for w, _, p, _ in missed if p)]):.3f}")
