"""The reference trainer: distributed PyTorch training that runs under plain torchrun.

Independent of what launched it: it reads its rank from the environment or the command line, and imports
nothing beyond PyTorch and the libraries of the chosen dataset.
"""
