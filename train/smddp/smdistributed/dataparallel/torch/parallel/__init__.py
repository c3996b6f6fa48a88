"""The shorter of the two import paths of DistributedDataParallel; SageMaker's guide uses both."""

from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
