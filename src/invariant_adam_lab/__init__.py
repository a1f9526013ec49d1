"""The lab behind `invariant-adam`: the command line, the checks of the theory, the paper's experiments, benchmarks.

The lab imports the library; the library never imports the lab.

    cli/        the commands: arguments in, tables out; the work is done below
    verify, planner, demo (with demo_report)     the commands `verify`, `scale` and `demo`
    training/   one run of an experiment:       data -> source (with augment) -> updates -> train
    grids/      many runs, a file for each:     grid -> workers (with cost) -> store
    results/    what the runs show:             curves -> measures -> figures (with style), page
    bench/      the commands `bench ...`:       step, one_pass, memory, peers, timed by timing
    models      the networks that all of them train
    record      results on disk, with machine, versions and date
"""
