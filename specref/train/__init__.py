"Trained drafters: one training harness, the networks on the target's features, their recipes and their checkpoint formats"
