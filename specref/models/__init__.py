"Transformers as targets and drafts: any Hugging Face causal model, the embedded models, and transformers' own `generate`"
