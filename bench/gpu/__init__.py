"""What one machine with one GPU proves and measures, in one command of at most 21 minutes: `make gpu`.

    plan      the stages in their order: budget, prediction of each figure, function
    runner    runs each stage in a process of its own, within its budget and the limit, and keeps the results
    stage     what a stage is given: its device, and where its figures go
    report    the results as the page docs/gpu.md

`plan`, `runner` and `stage` use the standard library alone, so that a broken package fails a stage and not the run.
"""
