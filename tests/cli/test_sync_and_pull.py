"""`sync` and `pull`: which files travel, and which do not."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from support.harness import TIMEOUT
from support.jobs import direct


def test_sync_sends_changes_and_deletes(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("one.py", "print(1)")
    cli.write("sub/two words.py", "print(2)")
    cli.ok("sync")
    (cli.cwd / "one.py").unlink()
    cli.write("three.py", "print(3)")
    cli.ok("sync")
    listed = cli.ok("exec", "find . -type f | sort")
    assert Counter(line.split("] ")[1] for line in listed.splitlines()) == {
        "./sub/two words.py": 2,
        "./three.py": 2,
    }


def test_sync_asks_each_node_twice_and_once_where_nothing_has_changed(cli: Any) -> None:
    direct(cli, nodes=2)
    found = []
    for text in ("print(1)", "", "print(2)"):
        if text:
            cli.write("one.py", text)
        lines = cli("--timings", "sync").stderr.splitlines()
        found.append([words[3] for line in lines if (words := line.split())[2:3] == ["agent:"]])
    assert found == [["probe", "receive"], ["probe"], ["probe", "receive"]]


def test_sync_starts_one_process_on_a_node(cli: Any, simulator: Any, monkeypatch: Any) -> None:
    from cloudddp.aws.client import AWS
    from cloudddp.cluster import connect, lookup
    from cloudddp.config.spec import ClusterSpec, Config
    from cloudddp.job import sync
    from cloudddp.job.project_files import of_config
    from cloudddp.ssh.connection import Connection
    from cloudddp.ssh.fleet import Fleet

    for k in range(2000):
        cli.write(f"d{k % 40}/f{k}.py", f"x = {k}\n")
    cli.ok("up", "-n", "1")
    for name, value in cli.env.items():
        monkeypatch.setenv(name, value)
    commands: list[str] = []

    start = Connection.start

    def count(connection: Connection, command: str, *args: Any, **rest: Any) -> Any:
        commands.append(command)
        return start(connection, command, *args, **rest)

    monkeypatch.setattr(Connection, "start", count)
    spec = ClusterSpec(name=cli.cluster, ssh_port=simulator.ssh_port)
    found = lookup.get(AWS(region=simulator.region), cli.cluster)
    with Fleet(connect.targets(found, spec)[0]) as fleet:
        fleet.connect()
        progress: Callable[[str], None] = lambda _: None  # noqa: E731
        sync.sync(
            fleet,
            found,
            Config(cluster=spec),
            files=of_config(cli.cwd, Config(cluster=spec)),
            progress=progress,
        )
        assert len(commands) == 1, "one process of the agent does each step"
        commands.clear()
        sync.sync(
            fleet,
            found,
            Config(cluster=spec),
            files=of_config(cli.cwd, Config(cluster=spec)),
            progress=progress,
        )
        assert commands == []


def test_pulled_results_are_not_sent_back(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write(
        "write.py",
        "import os, pathlib\nif os.environ['RANK'] == '0':\n p = pathlib.Path('runs/a b'); "
        "p.mkdir(parents=True); (p / 'x').write_bytes(bytes(range(256)) * 1000)\n",
    )
    cli.ok("launch", "write.py")
    out = cli.ok("pull")
    assert "node 0: 1 file," in out
    (job,) = (cli.cwd / "results").iterdir()
    assert (job / "runs" / "a b" / "x").read_bytes() == bytes(range(256)) * 1000
    again = cli("sync")
    assert "up to date" in again.stderr
    cli.ok("pull", "--all-nodes", "--to", "out", "write.py")
    assert (cli.cwd / "out" / "node1" / "write.py").read_text() == (cli.cwd / "write.py").read_text()


def test_file_that_a_job_changed_is_not_lost_with_the_next_sync(cli: Any) -> None:
    direct(cli)
    cli.write("train.py", "open('model.pt', 'w').write('trained')")
    cli.write("model.pt", "before")
    cli.ok("launch", "train.py")
    done = cli("sync")
    assert "warning: node 0: a job wrote model.pt, which was not pulled" in done.stderr
    assert "`cloudddp pull replaced-by-sync --node 0` copies it" in done.stderr
    assert "before" in cli.ok("exec", "cat model.pt")
    cli.ok("pull", "replaced-by-sync", "--node", "0")
    (found,) = (cli.cwd / "results").rglob("model.pt")
    assert found.read_text() == "trained"


def test_results_go_back_to_their_places_and_no_sync_deletes_them(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.env["CLOUDDDP_SHARE_MB"] = "0"
    cli.write(
        "write.py",
        "import os\nos.makedirs('ckpt'); rank = os.environ['RANK']\nopen('ckpt/' + rank + '.pt', "
        "'w').write(rank * 9)\n"
        "os.symlink(rank + '.pt', 'ckpt/last'); open('data.txt', 'a').write('job')\n",
    )
    cli.write("data.txt", "sent")
    cli.ok("launch", "write.py")
    cli.ok("pull")
    cli.ok("pull", "--all-nodes", "ckpt", "data.txt")
    cli.ok("exec", "rm -r ckpt")
    assert cli("sync", "job").returncode == 2
    assert cli("sync", "--results", "20200101-000000-none").returncode == 2
    cli.ok("sync", "--results")
    cli.write("more.py", "")
    cli.ok("sync")
    assert "are on this computer and not" not in cli("launch", "more.py").stderr
    listed = sorted(cli.ok("exec", "cat ckpt/*.pt; cat ckpt/last data.txt").splitlines())
    assert listed == ["[node 0] 000000000000000000sent", "[node 1] 000000000111111111111111111sent"], listed
    assert "results:" not in cli("jobs").stderr
    cli.write("wait.py", "import time; time.sleep(60)")
    cli.ok("launch", "-d", "wait.py")
    done = cli("sync", "--results")
    cli.ok("cancel")
    assert done.returncode == 1
    assert "is running on node 0: no results were sent" in done.stderr


def test_sync_of_results_names_files_of_a_job_that_it_replaces(cli: Any) -> None:
    direct(cli)
    cli.write("write.py", "import sys\nopen('best.pt', 'w').write(sys.argv[1])\n")
    cli.ok("launch", "write.py", "old")
    cli.ok("pull")
    cli.ok("launch", "write.py", "newer")
    sent = cli("sync", "--results")
    assert sent.returncode == 0, sent.stderr
    text = " ".join(sent.stderr.split())
    assert "a job wrote best.pt, which was not pulled" in text
    assert "pull replaced-by-sync --node 0`" in text
    assert cli.ok("exec", "cat best.pt replaced-by-sync/*/best.pt").split()[-1] == "oldnewer"


def test_pull_works_without_tarfile_filters(cli: Any) -> None:
    """Debian 12's own is 3.11.2; extraction filters came with 3.11.4."""
    direct(cli)
    cli.write(
        "make.py",
        "import os\nos.makedirs('runs')\nopen('runs/a', 'w').close()\nos.symlink('/etc', 'runs/out')\n",
    )
    cli.ok("launch", "make.py")
    code = (
        "import sys, tarfile\n"
        "tarfile._NAMED_FILTERS = {}\n"
        "for name in ('FilterError', 'data_filter'): vars(tarfile).pop(name, None)\n"
        "from cloudddp import __main__\n"
        "sys.argv = ['cloudddp', 'pull']\n"
        "__main__.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cli.cwd,
        env=cli.env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" in done.stderr
    (brought,) = (cli.cwd / "results").rglob("runs/*")
    assert brought.name == "a"


def test_pull_refuses_paths_outside_the_project(cli: Any) -> None:
    direct(cli)
    cli.write("ok.py", "")
    cli.ok("launch", "ok.py")
    assert cli("pull", "../.cloudddp").returncode == 2
    assert cli("pull", "/etc/passwd").returncode == 2


def test_bad_file_does_not_lose_other_results(cli: Any) -> None:
    direct(cli)
    cli.write(
        "write.py",
        "import os, pathlib\np = pathlib.Path('runs/a'); p.mkdir(parents=True)\n(p / "
        "'best.pt').write_text('w')\n"
        "os.symlink(os.path.abspath('runs/a'), 'runs/latest')\nos.symlink('/etc/passwd', "
        "'runs/outside')\nos.mkfifo('runs/pipe')\n",
    )
    cli.ok("launch", "write.py")
    done = cli("pull")
    assert done.returncode == 0, done.stderr
    (got,) = (cli.cwd / "results").iterdir()
    assert (got / "runs" / "a" / "best.pt").read_text() == "w"
    assert (got / "runs" / "latest" / "best.pt").read_text() == "w"
    assert not (got / "runs" / "outside").exists()
    assert "left out runs/pipe" in done.stderr
    assert "left out runs/outside" in done.stderr


def test_pull_reports_missing_and_older_files(cli: Any) -> None:
    direct(cli)
    cli.write(
        "write.py",
        "import os, pathlib\npathlib.Path('runs').mkdir()\npathlib.Path('runs/x').write_text('1')\nos.utime('runs/x', (1, 1))",  # noqa: E501
    )
    cli.write("nothing.py", "print('nothing')")
    assert cli.ok("launch", "write.py") == ""
    cli.ok("launch", "nothing.py")
    done = cli("pull")
    assert "older than job" in done.stderr
    missing = cli("pull", "nowhere")
    assert missing.returncode == 1
    assert "nothing to pull" in missing.stderr


def test_pull_of_a_job_that_has_written_nothing_yet(cli: Any) -> None:
    direct(cli)
    cli.write("wait.py", "import time; time.sleep(600)")
    job = cli.ok("launch", "-d", "wait.py").strip()
    done = cli("pull")
    assert done.returncode == 1
    assert (
        f"nothing to pull yet: job {job} is running and has not written any files in the project"
        in done.stderr
    )
    cli.ok("cancel")
    assert "yet" not in cli("pull").stderr


def test_folder_larger_than_the_memory_is_sent(cli: Any, tmp_path: Any) -> None:
    """Sparse files: what is sent, in all, is more than the process may take."""
    direct(cli, nodes=1)
    for name, size in {"data/large.bin": 300 << 20, **{f"data/{k}.bin": 3 << 20 for k in range(20)}}.items():
        path = cli.cwd / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
    cli.env["CLOUDDDP_SYNC_MAX_MB"] = "1000"
    process = cli.to_files(tmp_path, "sync")
    assert process.returncode == 0, (tmp_path / "err.txt").read_text()
    assert "sending 21 files, 360.0 MiB" in (tmp_path / "err.txt").read_text()
    assert process.peak_memory < 200e6


def test_first_launch_on_new_nodes_names_results_that_are_here(cli: Any) -> None:
    cli.write("results/20260101-000000-abcd/logs/node0/0.log", "")
    cli.write("a.py", "")
    direct(cli)
    quiet = cli("launch", "a.py")
    assert "are on this computer and not" not in quiet.stderr, "only logs"
    cli.ok("down", "-y")
    cli.write("results/20260101-000000-abcd/ckpt/1.pt", "x")
    cli.ok("up", "-n", "1")
    line = "are on this computer and not on the nodes (the newest: "
    assert line in cli("launch", "a.py").stderr
    assert line not in cli("launch", "a.py").stderr
    cli.ok("down", "-y")
    cli.ok("up", "-n", "1")
    cli.ok("sync", "--results")
    assert line not in cli("launch", "a.py").stderr
