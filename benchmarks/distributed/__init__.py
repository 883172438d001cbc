"""Training on several processes: step time, bytes on the wire, overlap; a model of many nodes."""
