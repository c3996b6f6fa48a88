"""Faults of a job in the lab, for docs/faults.md."""
