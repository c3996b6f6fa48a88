"""cloudddp: PyTorch training on N GPU nodes of your own AWS account, in one command."""

__version__ = "0.1.0"
