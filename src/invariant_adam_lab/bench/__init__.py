"""Speed and memory on this machine: a module per benchmark (`step`, `one_pass`, `memory`, `peers`), all by `timing`."""
