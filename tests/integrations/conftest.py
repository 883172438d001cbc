"""What pytest looks at in this folder."""

collect_ignore = ["ranks_worker.py"]  # has no doctests, and not everybody has the frameworks
