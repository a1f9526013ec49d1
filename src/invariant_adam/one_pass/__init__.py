"""ONE backward over a mini-batch -> mean g and mean g² of its micro-batches."""
