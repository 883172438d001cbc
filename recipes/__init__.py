"""The paper's experiments, one folder each: `python -m recipes` lists them."""
