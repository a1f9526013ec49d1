"""One run: what it is (`runs`), what it trains on (`data`, `augment`, `source`) and how (`updates`, `train`)."""
