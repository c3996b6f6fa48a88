"""The ranks of a run: how they find each other, their devices, and their collective operations."""
