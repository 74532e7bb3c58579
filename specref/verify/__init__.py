"How a target accepts or rejects what was drafted: the lossless rules, and in `lossy` those that change the output distribution on purpose"
