"""[[shared]] on nodes of the simulator, where a link stands in for the network file system."""

from __future__ import annotations

from typing import Any

from support.jobs import direct

SCRIPT = """
import os, time
rank = int(os.environ["RANK"])
open(f"shared/rank-{rank}", "w").write("x")
while len([name for name in os.listdir("shared") if name.startswith("rank-")]) < 2:
    time.sleep(0.05)
print("all here", open("shared/setup").read())
"""


def test_ranks_share_a_folder_whose_results_are_pulled_once(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("cloudddp.toml", '[[shared]]\npath = "shared"\n[setup]\nrun = ["echo done > shared/setup"]\n')
    cli.write("train.py", SCRIPT)
    done = cli.exits(0, "launch", "train.py")
    assert done.stdout.count("all here done") == 2
    assert "mounting shared on all nodes" in done.stderr
    assert "a link stands in for the network file system" in done.stderr
    assert "results: node 0: shared/ (2 files" in done.stderr
    assert "node 1:" not in done.stderr.partition("results:")[2]
    cli.ok("pull", "--all-nodes")
    pulled = sorted(
        path.relative_to(cli.cwd / "results").as_posix() for path in (cli.cwd / "results").rglob("rank-*")
    )
    assert [name.split("/", 1)[1] for name in pulled] == ["node0/shared/rank-0", "node0/shared/rank-1"]
    cli.write("other.py", "")
    cli.ok("sync")
    assert cli.ok("exec", "echo $(ls shared)").count("rank-0 rank-1 setup") == 2


def test_image_without_nfs_gets_its_packages(cli: Any, conditions: Any) -> None:
    conditions(boot={"no_nfs": 1})
    direct(cli, nodes=2)
    cli.write("cloudddp.toml", '[[shared]]\npath = "shared"\n[setup]\nrun = ["echo done > shared/setup"]\n')
    cli.write("train.py", SCRIPT)
    assert cli.ok("launch", "train.py").count("all here done") == 2


def test_unknown_file_system_is_refused_before_a_node_is_asked(cli: Any) -> None:
    direct(cli)
    cli.write("cloudddp.toml", '[[shared]]\npath = "shared"\nsource = "fs-0123456789abcdef0"\n')
    cli.write("train.py", "")
    assert "no file system fs-0123456789abcdef0 of EFS or FSx" in cli.fails(2, "launch", "train.py")
