"""The whole way of a job: up, launch of 2 x 2 gloo ranks, pull, down, and nothing is left in the account."""

from __future__ import annotations

from typing import Any

from support.harness import CommandLine, remaining

REDUCE = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
pathlib.Path("runs").mkdir(exist_ok=True)
pathlib.Path(f"runs/{dist.get_rank()}").write_text(f"{int(x)} {os.environ.get('NCCL_NET')}")
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort the interpreter's shutdown
"""


def train(cli: CommandLine, ec2: Any, *options: str) -> list[dict[str, Any]]:
    """Run a job of 2 x 2 ranks on two nodes, pull its results, and remove the cluster. Return the nodes."""
    done = cli("up", "-n", "2", *options)
    assert done.returncode == 0, done.stderr
    where = [
        {"Name": "tag:cloudddp:cluster", "Values": [cli.cluster]},
        {"Name": "instance-state-name", "Values": ["running"]},
    ]
    nodes = [i for r in ec2.describe_instances(Filters=where)["Reservations"] for i in r["Instances"]]
    assert len(nodes) == 2
    cli.write("reduce.py", REDUCE)
    cli.ok("launch", "--nproc-per-node", "2", "reduce.py")
    cli.ok("pull", "--node", "0", "--to", "of0")
    cli.ok("pull", "--node", "1", "--to", "of1")
    results = {path.name: path.read_text() for path in sorted(cli.cwd.glob("of?/**/[0-3]"))}
    assert set(results) == {"0", "1", "2", "3"}
    assert {text.split()[0] for text in results.values()} == {"6"}
    net = "Libfabric" if "--require-efa" in options else "None"
    assert {text.split()[1] for text in results.values()} == {net}
    cli.ok("down", "-y")
    assert remaining(ec2, cli.cluster).nothing
    return nodes
