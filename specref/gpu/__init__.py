"Speculative decoding on an accelerator: batches of trees, judged where they lie"
