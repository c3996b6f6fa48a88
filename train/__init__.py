"""The reference trainer: distributed PyTorch training that runs under plain torchrun.

This package must not know what launched it: it reads its place in the job from the environment or the command
line, and imports nothing beyond PyTorch and the libraries of the chosen dataset.
"""
