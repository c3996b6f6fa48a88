"""Results that were not pulled: `run` keeps the nodes that have them, `launch`, `pull` and `down` name them;
and `pull` of which a part fails."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.harness import TIMEOUT
from support.interrupts import interrupted_at
from support.jobs import WRITE, written


def configure(cli: Any, script: str) -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="1")
    cli.env["CLOUDDDP_OUTPUTS"] = "runs"
    cli.write("train.py", WRITE + "rank = os.environ['RANK']\n" + script)


def pulled_files(cli: Any) -> set[str]:
    """Return the files in results/ that are not the job's logs, by their paths below the job's folder."""
    folders = list((cli.cwd / "results").glob("*"))
    found = {p.relative_to(f).as_posix() for f in folders for p in f.rglob("*") if p.is_file()}
    return {name for name in found if not name.startswith("cloudddp-logs/")}


def test_run_keeps_the_cluster_if_files_are_left_on_it(cli: Any, remains: Any) -> None:
    """Beyond the limit, and those that cannot be stored here. Others outside `outputs`: see test_run.py."""
    configure(
        cli,
        "for k in range(3): write(f'runs/{k}.pt', 'x' * 1_500_000); os.utime(f'runs/{k}.pt', (k, k))\n"
        "write('runs/conf/cloudddp.toml')",
    )
    del cli.env["CLOUDDDP_OUTPUTS"]
    cli.env["CLOUDDDP_PULL_MB"] = "3"
    err = cli.fails(3, "run", "-n", "1", "train.py")
    assert len(remains().instances) == 1
    assert re.search(r"is kept until its deadline, .* UTC, at \$1\.\d+ an hour: not all", err)
    unsafe = "runs/conf/cloudddp.toml: git or cloudddp would act on it"
    assert f"node 0: runs/ (2 files, 1.4 MiB); runs/0.pt: beyond job.pull_mb = 3; {unsafe}" in err
    assert pulled_files(cli) == {"runs/1.pt", "runs/2.pt"}
    assert "node 0: not all results were copied: runs/conf/cloudddp.toml" in cli.fails(1, "pull")
    assert pulled_files(cli) == {f"runs/{k}.pt" for k in range(3)}
    assert f"not pulled from node 0: runs/ (1 byte); {unsafe}" in cli("down", "-y").stderr
    assert remains().nothing


def test_run_keeps_the_cluster_if_it_is_unknown_what_the_nodes_hold(cli: Any, remains: Any) -> None:
    configure(cli, "write('runs/log')")
    run = ("run", "-n", "1", "train.py")
    _, err = interrupted_at(cli, "cli.actions.run:collect", *run, on_call=True, code=3)
    assert "the nodes were not checked, so their files are unknown" in err
    assert "`cloudddp pull --all-nodes`, then `cloudddp down`" in err
    assert len(remains().instances) == 1


def test_launch_pull_and_down_name_what_was_not_pulled(cli: Any, remains: Any) -> None:
    """File names are shown as text, and are no options in the suggested command."""
    configure(cli, "write('runs/log') if rank == '1' else write('out/' + rank)")
    cli.write("evil.py", WRITE + "write('evil\\x1b]0;owned\\x07.txt'); write('--to=..')")
    wait = "import time; write('runs/log'); write('out/x'); print('began', flush=True); time.sleep(600)"
    cli.write("wait.py", WRITE + wait)
    cli.ok("up", "-n", "2")
    launched = cli("launch", "train.py")
    others = "results: node 1: runs (1 byte); next: `cloudddp pull --all-nodes`"
    assert others in launched.stderr
    assert "node 0: out/ (1 byte)" in launched.stderr
    assert '`cloudddp pull out` copies them; or set outputs = ["runs", "out"]' in launched.stderr
    assert others in cli("jobs").stderr
    nothing = cli.fails(1, "pull")
    assert "nothing to pull: no runs on the nodes" in nothing
    assert '[job] outputs in cloudddp.toml (now ["runs"])' in nothing
    assert others in nothing
    assert pulled_files(cli) == set()
    (verdict, _) = (cli.cwd / "results").glob("*/cloudddp-logs/*/verdict.json")  # of both nodes
    assert json.loads(verdict.read_text())["phase"] == "succeeded"
    cli.ok("pull", "--all-nodes", "runs", "out")
    assert "results:" not in cli("jobs").stderr

    done = cli("launch", "evil.py")
    assert re.search(r"cloudddp pull (\S+ )*-- (\S+ )*--to=\.\.", done.stderr), done.stderr
    assert "\x1b" not in done.stderr
    assert "evil\\x1b]0;owned\\x07.txt" in done.stderr

    job = cli.ok("launch", "-d", "wait.py").strip()
    written(cli, "began")
    _, err = cli.patient(60, "down", "-y")
    assert f"job {job} is running on nodes 0, 1" in err
    assert re.search(rf"not pulled from node 0: runs \(1 byte\), .*out/ \(1 byte\) of job .*{job}\n", err), (
        err
    )
    assert "to keep them, first: `cloudddp pull --all-nodes -- runs --to=.. out`" in err
    assert remains().nothing


def on_a_disk_of(cli: Any, size: str, *words: str) -> str:
    """Run `cloudddp` where the folder `out` is a disk of that size. It fails, and keeps nothing there. Return
    stderr."""
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
    assert done.stdout.endswith("contents:\nout\n")
    return done.stderr


def test_pull_that_fails_in_part_or_on_a_full_disk(cli: Any) -> None:
    """The failure of one node does not lose the results of another; nothing is kept on a full disk."""
    configure(
        cli,
        "for k in range(10): write(f'runs/{k:02}', rank * 100_000)\nwrite('one/large', 'x' * (4 << 20))",
    )
    cli.nodes(2)
    cli.ok("launch", "train.py")
    small = on_a_disk_of(cli, "600k", "pull", "--to", "out", "runs")
    assert "no space left on this computer's disk for the results; nothing was kept" in small
    large = on_a_disk_of(cli, "1m", "pull", "--to", "out", "one")
    assert "one/large is 4 MiB, and 1 MiB are free" in large
    (cli.cwd / "out" / "runs").write_text("in the way")
    done = cli("pull", "--all-nodes", "--to", "out")
    assert done.returncode != 0
    assert "out/runs" in done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["node 1"]
    assert (cli.cwd / "out" / "node1" / "runs" / "01").read_text() == "1" * 100_000
