"""The PyTorch side of the library.

Its path is extended so that `torch_smddp`, the backend of a real installation further down the path, is still
found. Imports nothing but torch, which every script needs anyway.
"""

from pkgutil import extend_path

from smdistributed.dataparallel.torch.distributed import get_local_rank, get_rank, get_world_size

__path__ = extend_path(__path__, __name__)
__all__ = ["get_local_rank", "get_rank", "get_world_size"]
