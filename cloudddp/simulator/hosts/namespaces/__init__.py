"""Namespace nodes: the simulator's own pid 1 and the computer's programs, in namespaces of root or of an
ordinary user."""
