"""What stands between a server and clients that lie, and between clients and those who look."""
