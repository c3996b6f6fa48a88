"""Snapshots: the state of a run at a step, on disk."""
