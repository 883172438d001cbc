"""Trust between a server and its clients: rejection of malicious updates, and privacy."""
