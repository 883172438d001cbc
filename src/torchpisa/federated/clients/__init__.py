"""Clients: their data, what they do in a round, and many of them in one process."""
