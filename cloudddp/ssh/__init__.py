"""SSH to nodes: the only package that imports paramiko. It knows hosts, keys and commands, not clusters or AWS."""
