"""The ranks of a job on this node: the wrapper of each, the launchers, one attempt to run them, and why they
ended."""
