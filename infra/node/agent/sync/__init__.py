"""The receiving side of a sync, and what the first node passes on to the others."""
