"""The arithmetic over tensors: each kernel has a plain-torch twin of the same signature."""
