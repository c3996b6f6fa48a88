"""The PyTorch side: what SageMaker's guide names without a module.

It must not hide `torch_smddp`, the backend of a real installation further down the path, which is found through
this package's extended path; nor import anything but torch, since scripts bring it along on its own.
"""

from pkgutil import extend_path

from smdistributed.dataparallel.torch.distributed import get_local_rank, get_rank, get_world_size

__path__ = extend_path(__path__, __name__)
__all__ = ["get_local_rank", "get_rank", "get_world_size"]
