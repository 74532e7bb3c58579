"Where drafts come from without training: tree shapes, lookup, Jacobi and lookahead iterations"
