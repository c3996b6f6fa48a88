"""Joins a job through smdistributed.dataparallel, and prints its backend and the sum of two ones over the
ranks."""

import smdistributed.dataparallel.torch.distributed as smddp
import torch

smddp.init_process_group()
print(torch.distributed.get_backend())
values = torch.ones(2)
smddp.all_reduce(values)
print(values.tolist())
