"""A micro-batch gradient -> m and v: hooks, the update that is open, its queue, its scalars, what is refused."""
