"""Which modules of this folder pytest collects."""

collect_ignore = ["ranks_worker.py"]  # has no doctests, and not everybody has the frameworks
