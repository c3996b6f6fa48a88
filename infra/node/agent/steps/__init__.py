"""What the laptop calls: one module for each step, named like it, and `dispatch`, which runs them."""
