"Drafts distilled from several sources by several divergences (`make record-distill`, hours)"
from pathlib import Path

from specref.core.check import write_record
from specref.models.embedded import DOMAINS, domain_ids, raw_model
from specref.train.distill import HeldOutTexts, PromptSource, corpus_start, distil_record

if __name__ == "__main__":
    target, folder = raw_model("target"), Path("trained/distill")
    ids, held_ids = ({d: domain_ids(d, held_out=h) for d in DOMAINS} for h in (False, True))
    held = HeldOutTexts.of(PromptSource(held_ids, target, seed=20), 32)
    start = corpus_start(target, ids, held, folder, steps=1200)
    how = dict(steps=50, peak=1e-3, pool=16, refresh=5, eval_steps=25)
    got = distil_record(start, target, ids, held_ids, folder, **how)
    write_record(Path(__file__).with_suffix(".json"), "make record-distill", got)
