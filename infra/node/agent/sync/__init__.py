"""The receiving side of a sync: it compares, writes, and keeps what jobs wrote."""
