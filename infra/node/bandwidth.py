"""What the ranks of `cloudddp preflight --bandwidth` run: the bandwidth of all-reduce between the nodes.

First every pair of nodes, in rounds of disjoint pairs that are measured at once, then all nodes. The first
rank of each group prints a line: a mark, and JSON with its nodes and bytes a second of bus bandwidth: that of
nccl-tests (doc/PERFORMANCE.md), 2 (n - 1) / n x size / time, which does not depend on the number of ranks
where the slowest link limits it. The laptop puts this file into the command of the ranks.
"""

import json
import os
import time
from datetime import timedelta
from typing import Any, Optional

MARK = "cloudddp-bandwidth "
GPU_SIZE, CPU_SIZE = 128 << 20, 8 << 20  # bytes
TIMES = 5
GIVE_UP = timedelta(seconds=120)  # for a collective whose other ranks do not come


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return every pair of nodes once, in rounds in which no node occurs twice (the circle method)."""
    places: list[Optional[int]] = [*range(nodes), *([None] if nodes % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        facing = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]))
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def main() -> None:
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=GIVE_UP)
    nodes = [0] * dist.get_world_size()  # of each rank
    dist.all_gather_object(nodes, int(os.environ["CLOUDDDP_NODE_RANK"]))
    data = torch.zeros((GPU_SIZE if gpu else CPU_SIZE) // 4, device=device)

    def measure(ranks: list[int], group: Any = None) -> None:
        dist.all_reduce(data, group=group)  # which also connects the ranks
        data[0].item()  # waits for the GPU
        began = time.perf_counter()
        for _ in range(TIMES):
            dist.all_reduce(data, group=group)
        data[0].item()
        seconds = (time.perf_counter() - began) / TIMES
        if dist.get_rank() == ranks[0]:
            bus = 2 * (len(ranks) - 1) / len(ranks) * data.nbytes / seconds
            print(MARK + json.dumps({"nodes": sorted({nodes[one] for one in ranks}), "bus": bus}), flush=True)

    for pairs in rounds(max(nodes) + 1):
        members = [[rank for rank, node in enumerate(nodes) if node in pair] for pair in pairs]
        # On all ranks: with use_local_synchronization ranks may disagree in the name of a group (2.15).
        groups = [dist.new_group(ranks, timeout=GIVE_UP) for ranks in members]
        for ranks, group in zip(members, groups):
            if dist.get_rank() in ranks:
                measure(ranks, group)
                dist.destroy_process_group(group)
        dist.barrier()
    if len(nodes) > 1 and max(nodes) != 1:  # two nodes are a pair
        measure(list(range(len(nodes))))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
