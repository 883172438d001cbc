"""Federated training on Flower. What to adapt is in task.py."""
