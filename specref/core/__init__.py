"What everything else stands on: distributions, exact enumeration, draft trees, targets, the loop"
