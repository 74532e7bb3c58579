"Transformers as targets and drafts: any causal model, the embedded models, transformers' own `generate`"
from specref import require

require("torch")
require("transformers")
