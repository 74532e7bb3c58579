"Batches on a GPU: flat layouts, tree attention, verification in torch and Triton, caches, an engine"
from specref import require

require("torch")
