"""The receiving side of a sync, with what a node passes on to the nodes after it."""
