"""Training on several processes: step time, bytes on the wire, overlap; many nodes on paper."""
