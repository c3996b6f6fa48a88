"""Figures, not tests: `python -m bench` prints them all, `python -m bench NAME` one. Machines differ: quote ratios."""
