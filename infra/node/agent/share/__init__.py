"""What the nodes of a job copy from each other: files before ranks start, the newest snapshot before a node
ends."""
