"""Results that were not pulled: `run` keeps the nodes that have them, `launch`, `pull` and `down` name them;
and `pull` of which a part fails."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.harness import TIMEOUT, finished, wait_for
from support.interrupts import interrupted_at, start_interrupted
from support.jobs import WRITE

# Of torch.distributed.checkpoint: once all ranks have written their shards, rank 0 names them.
METADATA_LAST = """
import socket, time
address = os.environ["MASTER_ADDR"], 29777
if rank == "0":
    socket.create_server(address).accept()
    write("dcp/.metadata", "__0_0.distcp __1_0.distcp")
while rank == "1":
    try: socket.create_connection(address).close(); break
    except OSError: time.sleep(0.05)
"""


def configure(cli: Any, script: str, outputs: str = "runs") -> None:
    cli.env.update(CLOUDDDP_RENDEZVOUS="direct", CLOUDDDP_NPROC_PER_NODE="1", CLOUDDDP_STOP_GRACE="1")
    if outputs:
        cli.env["CLOUDDDP_OUTPUTS"] = outputs
    cli.write("train.py", WRITE + "rank = os.environ['RANK']\n" + script)


def pulled_files(cli: Any) -> set[str]:
    """Return the files in results/ that are not the job's logs, by their paths below the job's folder."""
    folders = list((cli.cwd / "results").glob("*"))
    found = {p.relative_to(f).as_posix() for f in folders for p in f.rglob("*") if p.is_file()}
    return {name for name in found if not name.startswith("cloudddp-logs/")}


def test_run_keeps_the_cluster_if_files_are_outside_the_outputs(cli: Any, remains: Any) -> None:
    configure(
        cli, "write('runs/log'); write('out/model.pt', 'w' * 2048); write('out/deep/er'); write('note.txt')"
    )
    err = cli.fails(3, "run", "-n", "1", "train.py")
    assert len(remains().instances) == 1
    assert re.search(r"is kept until its deadline, .* UTC, at \$1\.\d+ an hour: not all", err)
    assert "node 0: out/ (2 files, 2.0 KiB), note.txt (1 byte)" in err
    assert "`cloudddp pull out note.txt`, then `cloudddp down`" in err
    assert '[job] outputs of cloudddp.toml (now ["runs"])' in err
    assert pulled_files(cli) == {"runs/log"}
    cli.ok("pull", "out", "note.txt")
    assert pulled_files(cli) == {"runs/log", "out/model.pt", "out/deep/er", "note.txt"}
    assert "not pulled" not in cli.messages("down", "-y")
    assert remains().nothing


def test_run_pulls_every_new_file_by_default(cli: Any, remains: Any) -> None:
    configure(
        cli,
        "write('checkpoints/' + rank + '.pt'); write('config.txt', 'changed'); write('data/set'); "
        "write('big/set')\n"
        "os.symlink('0.pt', 'checkpoints/last') if rank == '0' else None\n"
        "write(f'dcp/__{rank}_0.distcp')\n" + METADATA_LAST,
        outputs="",
    )
    cli.write("config.txt", "sent")
    cli.write("cloudddp.toml", '[job]\nscratch = ["big"]\n')
    cli.ok("run", "-n", "2", "train.py")
    names = {"config.txt", "data/set"}
    assert pulled_files(cli) == {
        "checkpoints/0.pt",
        "checkpoints/last",
        "node1/checkpoints/1.pt",
        "dcp/.metadata",
        "dcp/__0_0.distcp",
        "dcp/__1_0.distcp",
        "node1/dcp/__1_0.distcp",
        *names,
        *(f"node1/{one}" for one in names),
    }
    assert remains().nothing


def test_half_of_a_checkpoint_keeps_no_node_and_is_not_sent_to_others(cli: Any, remains: Any) -> None:
    """Node 1 has saved nothing, and the job exits with 0."""
    configure(
        cli,
        "if rank == '0':\n    write('dcp/__0_0.distcp'); write('dcp/.metadata', '__0_0.distcp __1_0.distcp')",
        outputs="",
    )
    err = cli.fails(1, "run", "-n", "2", "train.py")
    text = "dcp is not a complete checkpoint: __1_0.distcp of job "
    assert text in err
    assert pulled_files(cli) == {"cloudddp-incomplete/dcp/.metadata", "cloudddp-incomplete/dcp/__0_0.distcp"}
    assert remains().nothing
    refused = cli.fails(2, "sync", "--results")
    assert text in refused
    assert "no other one can replace it; no results were sent" in " ".join(refused.split())


LINKED = "import tempfile; far = tempfile.mkdtemp(); os.symlink(far, 'runs')\n"


def test_files_beyond_the_limit_and_those_that_cannot_be_stored_are_not_pulled(
    cli: Any, remains: Any
) -> None:
    configure(
        cli,
        LINKED
        + "for k in range(3): write(f'runs/{k}.pt', 'x' * 1_500_000); os.utime(f'runs/{k}.pt', (k, k))\n"
        "write('runs/conf/cloudddp.toml')",
        outputs="",
    )
    cli.env["CLOUDDDP_PULL_MB"] = "3"
    err = cli.fails(3, "run", "-n", "1", "train.py")
    assert pulled_files(cli) == {"runs/1.pt", "runs/2.pt"}
    unsafe = "runs/conf/cloudddp.toml: git or cloudddp would act on it"
    assert f"node 0: runs/ (2 files, 1.4 MiB); runs/0.pt: beyond job.pull_mb = 3; {unsafe}" in err
    assert len(remains().instances) == 1
    assert "node 0: not all results were copied: runs/conf/cloudddp.toml" in cli.fails(1, "pull")
    assert pulled_files(cli) == {f"runs/{k}.pt" for k in range(3)}
    assert f"not pulled from node 0: runs/ (1 byte); {unsafe}" in cli("down", "-y").stderr
    assert remains().nothing


def test_run_discard_names_the_discarded_files(cli: Any, remains: Any) -> None:
    configure(cli, "write('out/model.pt'); raise SystemExit(7)")
    err = cli.fails(7, "run", "-n", "1", "--discard", "train.py")
    assert "discarded with the nodes:\n  node 0: out/ (" in err
    assert remains().nothing


def test_run_keeps_the_cluster_if_results_cannot_be_written(cli: Any, remains: Any) -> None:
    configure(
        cli,
        "import time; write('runs/a'); print('began', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.05)\n",
    )
    process = cli.start("run", "-n", "1", "train.py")
    assert process.stdout is not None
    assert "began" in process.stdout.readline()
    cli.write("results", "a file, where the folder of results was possible at the start")
    cli.ok("exec", "mkdir go")
    _, err = finished(process, 3)
    assert "node 0: results were not pulled" in err
    assert len(remains().instances) == 1


def test_ctrl_c_while_aws_is_queried_about_a_lost_node_keeps_the_files_of_the_other(
    cli: Any, ec2: Any, remains: Any
) -> None:
    configure(
        cli,
        "import time\nif rank == '0': write('runs/log'); write('out/best.pt')\nprint('began', flush=True); "
        "time.sleep(600)",
    )
    process = start_interrupted(
        cli, "cluster.lookup:ended_nodes", "run", "-n", "2", "train.py", caller="collect"
    )
    assert process.stdout is not None
    assert all("began" in process.stdout.readline() for _ in range(2))
    (cluster,) = json.loads(cli.ok("status", "--json"))
    ec2.terminate_instances(InstanceIds=[cluster["nodes"][1]["instance_id"]])
    _, err = finished(process, 3)
    assert "node 0: out/ (" in err
    assert pulled_files(cli) == {"runs/log"}
    wait_for(lambda: remains().instances == [cluster["nodes"][0]["instance_id"]], "only the other is left")


def test_run_keeps_the_cluster_if_it_is_unknown_what_the_nodes_hold(cli: Any, remains: Any) -> None:
    configure(cli, "write('runs/log')")
    run = ("run", "-n", "1", "train.py")
    _, err = interrupted_at(cli, "cli.actions.run:collect", *run, on_call=True, code=3)
    assert "the nodes were not checked, so their files are unknown" in err
    assert "`cloudddp pull --all-nodes`, then `cloudddp down`" in err
    assert len(remains().instances) == 1


def test_job_without_results_is_reported(cli: Any, remains: Any) -> None:
    configure(cli, "print('nothing')")
    assert "the job wrote nothing to runs (job.outputs)" in cli.messages("run", "-n", "1", "train.py")
    assert remains().nothing


def test_file_names_are_shown_as_text_and_are_no_options_in_the_suggested_command(cli: Any) -> None:
    configure(cli, "write('--to=..'); write('fine')")
    cli.write("evil.py", WRITE + "write('evil\\x1b]0;owned\\x07.txt')")
    cli.nodes(1)
    err = cli.messages("launch", "train.py")
    assert "pull -- --to=.. fine" in err or "pull -- fine --to=.." in err
    done = cli("launch", "evil.py")
    assert "\x1b" not in done.stderr
    assert "evil\\x1b]0;owned\\x07.txt" in done.stderr


def test_launch_names_new_files_and_the_command_that_pulls_them(cli: Any) -> None:
    configure(cli, "write('runs/log') if rank == '1' else write('out/' + rank)")
    cli.nodes(2)
    launched = cli("launch", "train.py")
    assert "results: node 1: runs (1 byte); next: `cloudddp pull --all-nodes`" in launched.stderr
    assert "node 0: out/ (1 byte)" in launched.stderr
    assert '`cloudddp pull out` copies them; or set outputs = ["runs", "out"]' in launched.stderr
    assert "results: node 1: runs (1 byte); next: `cloudddp pull --all-nodes`" in cli("jobs").stderr
    nothing = cli.fails(1, "pull")
    assert "nothing to pull: no runs on the nodes" in nothing
    assert '[job] outputs in cloudddp.toml (now ["runs"])' in nothing
    assert "`cloudddp pull out` copies them" in nothing
    assert "results: node 1: runs (1 byte); next: `cloudddp pull --all-nodes`" in nothing
    assert pulled_files(cli) == set()
    (verdict, _) = (cli.cwd / "results").glob("*/cloudddp-logs/*/verdict.json")  # of both nodes
    assert json.loads(verdict.read_text())["phase"] == "succeeded"
    cli.ok("pull", "--all-nodes", "runs", "out")
    assert "results:" not in cli("jobs").stderr
    assert "not pulled" not in cli("down", "-y").stderr


def test_down_names_running_jobs_and_unpulled_results(cli: Any, remains: Any) -> None:
    configure(
        cli, "import time; write('runs/log'); write('out/x'); print('began', flush=True); time.sleep(600)"
    )
    cli.ok("up", "-n", "2")
    job = cli.ok("launch", "-d", "train.py").strip()
    while cli.ok("logs").count("began") < 2:
        pass
    _, err = cli.patient(60, "down", "-y")
    assert f"job {job} is running on nodes 0, 1" in err
    assert "not pulled from node 0: runs (1 byte), out/ (1 byte) of job " + job in err
    assert "to keep them, first: `cloudddp pull --all-nodes runs out`" in err
    assert remains().nothing


def test_run_continues_from_the_newest_version_of_every_file(cli: Any, remains: Any) -> None:
    """Day 1 saves a checkpoint, day 2 writes only a log; day 3 needs both."""
    configure(
        cli,
        "import sys\nday = sys.argv[1]\nfound = [name for name in ('ck.pt', 'log') if os.path.exists(name)]\n"
        "print('rank', rank, 'found', *[open(name).read() for name in found], flush=True)\n"
        "if day == 'day1': write('ck.pt', 'of' + rank)\nwrite('log', day)\n",
        outputs="",
    )
    cli.ok("run", "-n", "2", "train.py", "day1")
    (first,) = (cli.cwd / "results").iterdir()
    second = cli.ok("run", "-n", "2", "--results", first.name, "train.py", "day2")
    third = cli.ok("run", "--results", "-n", "2", "train.py", "day3")
    for rank in "01":
        assert f"rank {rank} found of{rank} day1\n" in second
        assert f"rank {rank} found of{rank} day2\n" in third
    hint = cli("run", "--max-cost", "0.01", "train.py", "day4")
    assert hint.returncode != 0
    assert "if the script continues from them: add --results to this command" in " ".join(hint.stderr.split())
    shutil.rmtree(first)
    refused = cli.fails(2, "run", "--results", max((cli.cwd / "results").iterdir()).name, "train.py", "day4")
    assert f"continued {first.name}, of which" in refused
    assert "creating" not in hint.stderr + refused
    assert remains().nothing


def test_failure_of_one_node_does_not_lose_the_results_of_another(cli: Any) -> None:
    configure(cli, "write('runs/' + rank, 'x' * 100)")
    cli.nodes(2)
    cli.ok("launch", "train.py")
    others = "results: node 1: runs (100 bytes); next: `cloudddp pull --all-nodes`"
    assert others in cli("pull").stderr
    (cli.cwd / "out").mkdir()
    (cli.cwd / "out" / "runs").write_text("in the way")
    done = cli("pull", "--all-nodes", "--to", "out")
    assert done.returncode != 0
    assert "out/runs" in done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["node 1"]
    assert (cli.cwd / "out" / "node1" / "runs" / "1").read_text() == "x" * 100


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


def test_full_disk_is_named_and_nothing_is_kept(cli: Any) -> None:
    configure(
        cli, "for k in range(10): write(f'runs/{k:02}', 'x' * 100_000)\nwrite('one/large', 'x' * (4 << 20))"
    )
    cli.nodes(1)
    cli.ok("launch", "train.py")
    small = on_a_disk_of(cli, "600k", "pull", "--to", "out", "runs")
    assert "no space left on this computer's disk for the results; nothing was kept" in small
    large = on_a_disk_of(cli, "1m", "pull", "--to", "out", "one")
    assert "one/large is 4 MiB, and 1 MiB are free" in large
