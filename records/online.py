"""Draft models that are trained on streams of texts, and series of drafts (`make record-online`, hours)

The texts are those that `specref train NAME` has sampled from the target into `trained`."""
from pathlib import Path

import numpy as np

from specref.core.check import write_record
from specref.models.embedded import DOMAINS, domain_ids, raw_model
from specref.train.harness import TargetModel, state_dataset
from specref.train.online import one_domain_draft, one_layer_draft, shift_record, shifting_order
from specref.train.boosted import boost_record, sampled_domains

def streams_of(base, train, domains):  # -> rows
    "A draft of English on requests that change to code; a block has the eight requests between two updates"
    start = one_domain_draft("english", 1000, "trained/english.pt")
    for seed in (0, 1):
        order = shifting_order(domains[:768], 64, seed)
        found = shift_record(train, order[:600], base, start, seed)
        blocks = {k: np.array(rows).reshape(75, 8, 4)[..., :3].sum(1).tolist() for k, rows in found.items()}
        yield dict(seed=seed, before=64, updates=found["rejected"][-1][3], blocks=blocks)

if __name__ == "__main__":
    base = TargetModel(raw_model())
    work = next(Path("trained").glob("*-256"))
    own = np.concatenate([np.load(f) for f in sorted((work/"samples").glob("*.npy"))])
    train, held = (state_dataset(base, x, (24,), work/"states") for x in (own[:768], own[768:832]))
    domains = sampled_domains({d: domain_ids(d, held_out=False) for d in DOMAINS}, 832)
    boosts = [dict(seed=seed, domains=domains[768:].tolist(), steps=240,
                   **boost_record(one_layer_draft, base, train, held, "trained", 240, seed=seed))
              for seed in (0, 1)]
    got = dict(streams=[*streams_of(base, train, domains)], boosts=boosts)
    write_record(Path(__file__).with_suffix(".json"), "make record-online", got)
