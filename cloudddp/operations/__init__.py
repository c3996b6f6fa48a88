"""What the command line and the Python API share: settings and the cluster of a call, connections to its
nodes, jobs and their results, teardown. Nothing here prints: each function reports to a Reporter."""
