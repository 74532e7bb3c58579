"What everything else stands on: distributions, randomness and exact enumeration, draft trees, targets, the decoding loop"
