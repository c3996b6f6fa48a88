"""`sync` and `pull`: which files travel, and which do not."""

from __future__ import annotations

from typing import Any

from support.interrupts import interrupted_at
from support.jobs import direct, homes


def test_sync_sends_changes_and_deletes(cli: Any) -> None:
    """Each node is asked twice, and once where nothing has changed."""
    direct(cli, nodes=2)
    cli.write("one.py", "print(1)")
    cli.write("sub/two words.py", "print(2)")
    steps = [steps_of_sync(cli), steps_of_sync(cli)]
    (cli.cwd / "one.py").unlink()
    cli.write("three.py", "print(3)")
    steps.append(steps_of_sync(cli))
    assert steps == [["probe", "receive"], ["probe"], ["probe", "receive"]]
    for home in homes(cli):
        files = [path for path in (home / "project").rglob("*") if path.is_file()]
        assert sorted(path.name for path in files) == ["three.py", "two words.py"]


def test_interrupted_sync_names_what_to_do(cli: Any) -> None:
    """tests/node/test_sync_star.py has what the next one sends."""
    direct(cli)
    cli.write("a.py", "")
    _, err = interrupted_at(cli, "cli.actions.sync:send_files", "sync", on_call=True)
    assert "files that have arrived are kept; repeat the command to send the others" in err


def steps_of_sync(cli: Any) -> list[str]:
    lines = cli("--timings", "sync").stderr.splitlines()
    return [words[3] for line in lines if (words := line.split())[2:3] == ["agent:"]]


def test_results_are_pulled_and_not_sent_back(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write(
        "write.py",
        "import os, pathlib\n"
        "if os.environ['RANK'] == '0':\n"
        "    path = pathlib.Path('runs/a b')\n"
        "    path.mkdir(parents=True)\n"
        "    (path / 'x').write_bytes(bytes(range(256)) * 1000)\n"
        "    os.utime(path / 'x', (1, 1))\n"
        "    os.symlink(path.absolute(), 'runs/latest')\n"
        "    os.symlink('/etc/passwd', 'runs/outside')\n"
        "    os.mkfifo('runs/pipe')\n",
    )
    cli.ok("launch", "write.py")
    done = cli.exits(0, "pull")
    assert "node 0: 2 files," in done.stdout, done.stdout
    assert "left out runs/pipe" in done.stderr
    assert "left out runs/outside" in done.stderr
    (job,) = (cli.cwd / "results").iterdir()
    for folder in ("a b", "latest"):
        assert (job / "runs" / folder / "x").read_bytes() == bytes(range(256)) * 1000
    assert not (job / "runs" / "outside").exists()
    assert "up to date" in cli("sync").stderr
    cli.ok("pull", "--all-nodes", "--to", "out", "write.py")
    assert (cli.cwd / "out" / "node1" / "write.py").read_text() == (cli.cwd / "write.py").read_text()
    assert "nothing to pull" in cli.fails(1, "pull", "nowhere")
    assert "node 1: not there: nowhere" in cli.fails(1, "pull", "nowhere", "write.py", "--node", "1")
    (job,) = (cli.cwd / "results").iterdir()
    assert (job / "node1" / "write.py").is_file()


def test_file_that_a_job_changed_is_not_lost_with_the_next_sync(cli: Any) -> None:
    direct(cli)
    cli.write("train.py", "open('model.pt', 'w').write('trained')")
    cli.write("model.pt", "before")
    cli.ok("launch", "train.py")
    done = cli("sync")
    assert "warning: node 0: a job wrote model.pt, which was not pulled" in done.stderr
    assert "`cloudddp pull replaced-by-sync --node 0` copies it" in done.stderr
    assert (homes(cli)[0] / "project/model.pt").read_text() == "before"
    cli.ok("pull", "replaced-by-sync", "--node", "0")
    (found,) = (cli.cwd / "results").rglob("model.pt")
    assert found.read_text() == "trained"


def test_later_jobs_replace_what_was_put_back(cli: Any) -> None:
    """Rank 0 saves a checkpoint and all ranks read it: each job finds that of the last one on every node. No
    sync deletes it."""
    direct(cli, nodes=2)
    cli.write(
        "train.py",
        "import os\nfound = open('last.pt').read() if os.path.exists('last.pt') else '0'\n"
        "print('found', found, flush=True)\n"
        "if os.environ['RANK'] == '0':\n    open('last.pt', 'w').write(str(int(found) + 1))\n",
    )
    cli.ok("launch", "train.py")
    cli.ok("pull")
    cli.ok("exec", "rm -rf last.pt ~/.cloudddp/jobs/*")  # as on new nodes
    assert cli("sync", "job").returncode == 2
    assert "sending 1 file of" in cli("sync", "--results").stderr
    cli.write("more.py", "")
    shown = cli.ok("launch", "train.py")
    assert shown.count("found 1") == 2, shown
    assert "not copied" not in shown
    cli.ok("sync", "--results")  # what a job has written since is kept
    (kept,) = homes(cli)[0].glob("project/replaced-by-sync/*/last.pt")
    assert kept.read_text() == "2"
