"""The laboratory behind the command line: checks of the theory and training runs that show the claim.

The paper's experiments (`invariant-adam data`, `reproduce`, `figures`), as data flow through them:

    data -> source (with augment) -> updates (with models) -> train     one run, as runs says what a run is
    grid -> workers (with cost) -> store                                many runs, each a file when it is finished
    results -> measures -> figures (with style), page                   what they show

`demo` and its `report`, `verify`, `plan` (the command `scale`) and the `bench_` modules are commands of their own;
`timing` takes time, `record` writes results.
"""
