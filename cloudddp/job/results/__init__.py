"""Results: what jobs have written on the nodes, what of it was not pulled, and pulling it safely."""
