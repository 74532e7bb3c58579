"Where drafts come from without training: tree shapes, lookup in texts and data stores, Jacobi and lookahead iterations"
