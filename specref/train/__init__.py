"Trained drafters: the training harness, networks on the target's features, recipes, checkpoint formats"
