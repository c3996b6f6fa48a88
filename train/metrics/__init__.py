"""What is measured in the steps of a run: sums over steps and ranks, and speed."""
