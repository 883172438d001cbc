"""The paper's three algorithms as pure functions of tensors; README.md maps its letters."""
