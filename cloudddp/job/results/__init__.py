"""Results: the files that jobs have written on the nodes, which of them were not pulled, and pulling them
safely."""
