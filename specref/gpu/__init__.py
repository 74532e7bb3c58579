"Batches on a GPU: flat layouts, tree attention, verification in torch and in Triton, static caches, a batched engine; `bench` measures them"
