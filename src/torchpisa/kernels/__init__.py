"""The local step and the consensus over lists of tensors: the plain loop, and faster ways."""
