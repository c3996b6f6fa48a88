"""What the ranks of `cloudddp preflight --bandwidth` run: the bandwidth of all-reduce between the nodes.

First every pair of nodes, in rounds of disjoint pairs that are measured at once, then all nodes. The first
rank of each group prints a line: a mark, and JSON with its nodes, the number of its ranks, and of the size
that was fastest its bytes, the seconds of one all-reduce, and bytes a second of bus bandwidth: that of
nccl-tests (doc/PERFORMANCE.md), 2 (n - 1) / n x size / time, which does not depend on the number of ranks
where the slowest link limits it. The laptop puts this file into the command of the ranks.
"""

import json
import os
import time
from datetime import timedelta
from typing import Any, Optional

MARK = "cloudddp-bandwidth "
GPU_SIZES, CPU_SIZES = (8 << 20, 64 << 20, 256 << 20), (1 << 20, 8 << 20)
BUDGET, ENOUGH = 0.3, 2.0  # seconds for the all-reduces of one size; of one, after which none is larger
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
    own = torch.tensor([int(os.environ["CLOUDDDP_NODE_RANK"])], device=device)
    gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    nodes = [int(one) for one in gathered]  # of each rank
    for pairs in rounds(max(nodes) + 1):
        members = [[rank for rank, node in enumerate(nodes) if node in pair] for pair in pairs]
        # On all ranks: with use_local_synchronization ranks may disagree in the name of a group (2.15).
        groups = [dist.new_group(ranks, timeout=GIVE_UP) for ranks in members]
        for pair, ranks, group in zip(pairs, members, groups):
            if dist.get_rank() in ranks:
                measure(pair, ranks, group, device)
                dist.destroy_process_group(group)
        dist.barrier()
    if len(nodes) > 1:
        measure(sorted(set(nodes)), range(len(nodes)), None, device, whole=True)
    dist.destroy_process_group()


def measure(nodes: Any, ranks: Any, group: Any, device: Any, *, whole: bool = False) -> None:
    """Measure all-reduce in a group; its first rank prints the fastest size."""
    import torch
    import torch.distributed as dist

    def seconds(data: Any, times: int) -> float:
        """Return the time of one all-reduce: that of the slowest rank, so that all ranks go on alike."""
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(data, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent = torch.tensor([(time.perf_counter() - began) / times], device=device)
        dist.all_reduce(spent, dist.ReduceOp.MAX, group=group)
        return float(spent)

    found = []
    for size in GPU_SIZES if device.type == "cuda" else CPU_SIZES:
        data = torch.zeros(size // 4, device=device)
        seconds(data, 1)  # which also connects the ranks
        one = seconds(data, 1)
        spent = seconds(data, max(1, min(20, int(BUDGET / max(one, 1e-6)))))
        found.append((2 * (len(ranks) - 1) / len(ranks) * size / spent, size, spent))
        if one > ENOUGH:
            break
    if int(os.environ["RANK"]) == min(ranks):
        line = dict(
            zip(("bus", "size", "seconds"), max(found)), nodes=list(nodes), ranks=len(ranks), whole=whole
        )
        print(MARK + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
