"62a_comparison: overlaps at the right places, intervals of pairs, and a whole record"
import json

import numpy as np, pytest, torch

from specref import Costs, prompts, Seeded
from specref.app import benchmarks, comparison as c
from specref.app.tour import TrainedContestant
from specref.models.embedded import raw_model
from specref.train.harness import TargetModel
from specref.train.registry import SHIPPED_DRAFTERS, TRAINED, load_network

TEXTS = torch.tensor(prompts("code", 2, length=40))

@pytest.fixture(scope="module")
def base(): return TargetModel(raw_model("target"))

class TargetAsDraft:
    "Predicts x_{t+2+j} by the target's own row there, or by the one `off` places away; zeros before `start`"
    def __init__(self, base, off=0, start=0): self.base, self.off, self.start = base, off, start
    def guesses(self, batch, depth):
        z = self.base.head(batch.states[self.base.layers])
        places = [z[:, 1 + self.off + j:] for j in range(depth)]
        return [torch.cat([0*z[:, :self.start], z[:, self.start:]], 1) for z in places]

@pytest.mark.parametrize("temperature", [0., .5, 1.])
def test_the_target_overlaps_with_itself(base, temperature):
    "As its own drafter and as a draft model; less one place off; positions of the prompt do not count"
    def overlaps(net, first=10): return c.depth_overlaps(net, base, TEXTS, first, temperature)
    one, late = pytest.approx([1]*4, abs=1e-5), TargetAsDraft(base, start=20)
    nets = (TargetAsDraft(base), 10), (c.DraftModelNetwork("target"), 10), (late, 20)
    for net, first in nets: assert overlaps(net, first) == one
    assert max(overlaps(TargetAsDraft(base, off=1))) < .7 and max(overlaps(late, 19)) < .999

def test_temperature_is_continuous_at_zero(base):
    cold, zero = (c.depth_overlaps(load_network("eagle"), base, TEXTS, 5, t) for t in (1e-6, 0.))
    assert cold == pytest.approx(zero, abs=1e-3)

def test_the_coverage_of_an_interval():
    "Of 300 intervals of skewed samples, 265 to 297 cover the mean: a little too narrow for 40 prompts"
    rng = np.random.default_rng(0)
    intervals = (c.interval(rng.standard_exponential(40) - 1, 1000) for _ in range(300))
    assert 265 <= sum(low <= 0 <= high for _, low, high in intervals) <= 297
    assert c.interval([2, 2, 2]) == [2, 2, 2] and c.interval([1, 5, 2]) == c.interval([1, 5, 2])

def test_claims_are_paired_differences():
    "The mean difference prompt by prompt, for each set of weights that has both systems"
    easy = np.random.default_rng(1).normal(3, 1, 20)
    tokens = {("Medusa", ""): easy, ("Hydra", ""): easy + .1, ("Medusa", "again"): easy,
              ("Hydra", "again"): easy - .2, ("HASS", "again"): easy}
    rows = {(row["claim"], row["draft"]): row["gain"] for row in c.claims(tokens)}
    claim = "Hydra over Medusa"
    assert rows == {(claim, ""): pytest.approx([.1]*3), (claim, "again"): pytest.approx([-.2]*3)}
    small = {("EAGLE-3.1", ""): easy + 1, ("speculative sampling", "small"): easy}
    assert [row["gain"][0] for row in c.claims(small)] == pytest.approx([1])

def test_the_contestants(tmp_path):
    "Plain decoding first, both chains, every trained system; retrained networks where they exist"
    names = list(c.contest())
    chains = {("speculative sampling", draft) for draft in ("small", "large")}
    assert names[0] == ("autoregressive", "") and {(name, "") for name in TRAINED} | chains <= {*names}
    (tmp_path/"eagle").symlink_to(SHIPPED_DRAFTERS/"eagle")
    more = c.contest(tmp_path)
    assert more.keys() - {*names} == {("EAGLE", "again"), ("EAGLE-2", "again")}
    (a, one), (b, two) = more["EAGLE", "again"].build(0.), TrainedContestant("EAGLE").build(0.)
    assert one(a, (1, 2, 3), 8, Seeded(0)) == two(b, (1, 2, 3), 8, Seeded(0))

@pytest.fixture
def short(tmp_path, monkeypatch):
    "A race of four systems, two of them trained twice, on one domain, with fixed costs"
    (tmp_path/"again").mkdir()
    for name in ("medusa", "hydra"): (tmp_path/"again"/name).symlink_to(SHIPPED_DRAFTERS/name)
    contestants = c.contest(tmp_path/"again")
    names = "autoregressive", "Medusa", "Hydra", "SAM"
    some = {key: contestant for key, contestant in contestants.items() if key[0] in names}
    monkeypatch.setattr(c, "DOMAINS", ("code",))
    monkeypatch.setattr(c, "contest", lambda again: some)
    monkeypatch.setattr(benchmarks, "measure", lambda *args, **kw: Costs({1: .02, 9: .03}, .01, .001))
    return some

def test_the_record_is_written_whole(short, tmp_path, capsys):
    "A row for every system, claims for both sets of weights; the file reads back to the printed table"
    c.compare(tmp_path/"deep"/"run.json", tmp_path/"again", laps=1, each=1, n=6)
    got = json.loads((tmp_path/"deep"/"run.json").read_text())
    table = c.comparison_table(got)
    assert capsys.readouterr().out.strip() == table and max(map(len, table.split("\n"))) <= 110
    assert [(row["system"], row["draft"]) for row in got["rows"]] == [*short, *short]
    for row in got["rows"]:
        assert len(row["overlaps"]) == (0 if row["system"] in ("autoregressive", "SAM") else 4)
        assert row["predicted"] > 0 and ("outside" in row) == (row["system"] not in TRAINED)
    claims = [(x["temperature"], x["claim"], x["draft"]) for x in got["claims"]]
    assert claims == [(t, "Hydra over Medusa", draft) for t in (0., 1.) for draft in ("", "again")]
    for first, again in zip(got["claims"][::2], got["claims"][1::2]): assert first["gain"] == again["gain"]
    assert got["cards"].keys() == {"Medusa", "Hydra", "Medusa again", "Hydra again"}

def test_equal_training_is_paired_at_rates_that_every_seed_has():
    "Seed 1 lacks the rate that is best with seed 0; of two shared ones the better counts"
    rows = [dict(name=name, steps=600, seed=seed, peak=peak, tokens=float(np.mean(x)), by_text=x)
            for name, seed, peak, x in (("a", 0, .1, [2, 3]), ("a", 0, .2, [8, 8]), ("a", 0, .3, [1, 1]),
                                        ("a", 1, .1, [4, 4]), ("a", 1, .3, [9, 9]), ("b", 0, .1, [1, 1]))]
    a, again, b = (c.equal_training(rows, 600, name, seed) for name, seed in (("a", 0), ("a", 1), ("b", 0)))
    assert a["by_text"] == [2, 3] and again["by_text"] == [4, 4] and c.paired_gain(a, b) == (1.5, .5)
