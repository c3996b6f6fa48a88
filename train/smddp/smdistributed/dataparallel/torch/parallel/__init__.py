"""The shorter of the two paths to DistributedDataParallel; SageMaker's guide uses both. It must not hold more."""

from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
