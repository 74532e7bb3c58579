"How a draft is accepted or rejected: the lossless rules, and in `lossy` those that lose the distribution"
