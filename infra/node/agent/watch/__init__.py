"""What is noticed of ranks that run: a stall, stragglers, ranks that never connect, notices that this node is
about to end."""
