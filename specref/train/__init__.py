"Trained drafters: the training harness, networks on the target's features, recipes, checkpoint formats"
from specref import require

require("torch")
require("transformers")
