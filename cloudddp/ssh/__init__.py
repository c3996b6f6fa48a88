"""SSH to nodes: the only room that imports paramiko. It knows hosts, keys and commands, not clusters or AWS."""
