"""The checks of the first call: one pass on this model and these inputs equals the loop over micro-batches."""
