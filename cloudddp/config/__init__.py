"""What the user asked for, and where each value came from."""
