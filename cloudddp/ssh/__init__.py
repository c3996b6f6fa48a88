"""SSH to nodes: the only package that imports paramiko. It is independent of clusters and AWS."""
