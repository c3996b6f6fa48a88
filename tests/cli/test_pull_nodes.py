"""`pull` on the command line: several nodes, a full disk."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.harness import TIMEOUT
from support.jobs import direct

WRITE = (
    "import os\nos.makedirs('runs', exist_ok=True)\n"
    "with open('runs/' + os.environ['RANK'], 'w') as file: file.write('x' * 100)\n"
)


def launched(cli: Any, code: str, nodes: int = 1) -> None:
    direct(cli, nodes=nodes)
    cli.write("write.py", code)
    cli.ok("launch", "write.py")


def test_failure_of_one_node_does_not_lose_the_results_of_another(cli: Any) -> None:
    launched(cli, WRITE, nodes=2)
    others = "results: node 1: runs/ (100 bytes); next: `cloudddp pull --all-nodes`"
    assert others in cli("pull").stderr
    (cli.cwd / "out").mkdir()
    (cli.cwd / "out" / "node0").write_text("in the way")
    done = cli("pull", "--all-nodes", "--to", "out")
    assert done.returncode != 0
    assert "out/node0 is not a folder" in done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["node 1"]
    assert (cli.cwd / "out" / "node1" / "runs" / "1").read_text() == "x" * 100


def on_a_disk_of(cli: Any, size: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `cloudddp` where the folder `out` is a disk of that size, and list its contents at the end. It
    fails."""
    (cli.cwd / "out").mkdir(exist_ok=True)
    program = shlex.join([str(Path(sys.executable).with_name("cloudddp")), *words])
    mount = f"mount -t tmpfs -o mode=0700,size={size} tmpfs out"
    script = f"{mount} || exit 99; {program}; code=$?; echo contents:; find out; exit $code"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=cli.cwd,
        env=cli.env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done


def test_full_disk_is_named_and_nothing_is_kept(cli: Any) -> None:
    launched(
        cli,
        "import os\nos.makedirs('runs')\n"
        "for k in range(10):\n with open(f'runs/{k:02}', 'wb') as file: file.write(bytes(100_000))\n"
        "os.makedirs('one')\nwith open('one/large', 'wb') as file: file.write(bytes(4 << 20))\n",
    )
    small = on_a_disk_of(cli, "600k", "pull", "--to", "out", "runs")
    assert "no space left on this computer's disk for the results; nothing was kept" in small.stderr
    assert small.stdout.endswith("contents:\nout\n")
    large = on_a_disk_of(cli, "1m", "pull", "--to", "out", "one")
    assert "one/large is 4 MiB, and 1 MiB are free" in large.stderr
    assert large.stdout.endswith("contents:\nout\n")
