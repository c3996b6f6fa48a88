"""Results: what jobs have written on the nodes, what of it nobody has pulled, and pulling it safely."""
