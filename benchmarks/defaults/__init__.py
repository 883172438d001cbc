"""Optimizers with their defaults on tasks that none was tuned for: `python -m benchmarks defaults`.

    python -m benchmarks defaults prepare   # only if the machine that trains has no scikit-learn
    python -m benchmarks defaults           # train what is not in runs/defaults.jsonl yet
    python -m benchmarks defaults report    # docs/results/defaults.json, .md and .svg

Every task belongs to one of two halves. Settings, defaults of ours among them, may be chosen on the
half `choose` only; the half `judge` says whether they are good. Which task is in which half was
decided before anything was tuned, and stays so: see `tasks.TASKS`.
"""
