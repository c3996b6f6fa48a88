"""Set-up commands: run once per content, their output, and what interrupts them."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from support.harness import TIMEOUT, finished, interrupt, wait_for
from support.jobs import direct, homes, processes, still_running
from support.local_packages import package, wheel
from uv import find_uv_bin


@pytest.mark.parametrize("name", ["ignored.txt", "needs.txt/"])
def test_input_that_is_not_sent_is_refused(cli: Any, faults: Any, name: str) -> None:
    """A change of it would not run the set-up again."""
    cli.write(".gitignore", "ignored.txt\n")
    for file in ("ok.py", "ignored.txt", "needs.txt", "folder/needs.txt"):
        cli.write(file, "")
    cli.write("cloudddp.toml", f'[setup]\nrun = ["true"]\ninputs = ["{name}"]\n')
    err = cli.fails(2, "launch", "ok.py")
    assert f"setup.inputs names {name}, which is not among the files that are sent" in err
    assert faults.calls == []


WAITING = '[setup]\nrun = ["touch ../began; trap \\"\\" TERM; while [ ! -e ../go ]; do sleep 0.1; done"]\n'


def test_interrupted_setup_stops_on_every_node(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("cloudddp.toml", WAITING)
    cli.write("ok.py", "print('ran')")
    process = cli.start("launch", "ok.py")
    wait_for(lambda: all((home / "began").exists() for home in homes(cli)), "the setup runs on both nodes")
    silent = cli("logs")
    assert (silent.returncode, silent.stdout) == (0, "")
    assert "still in its setup" in silent.stderr
    assert len(still_running(cli, "../began")) >= 2
    code, _, err = interrupt(process)
    assert code == 130
    assert "it was ended; the cluster is still up" in err
    assert still_running(cli, "../began") == []
    wait_for(lambda: processes(cli) == 0, "the setup's parent ends")
    (left,) = json.loads(cli.ok("jobs", "--json"))
    assert (left["state"], left["setup"]) == ("cancelled", True)
    for home in homes(cli):
        (home / "go").touch()
    assert cli.ok("launch", "ok.py").count("] ran") == 2


def test_output_of_the_setup_is_shown_while_it_runs_and_kept(cli: Any) -> None:
    direct(cli)
    wait = "echo downloading; touch ../began; while [ ! -e ../go ]; do sleep 0.1; done; echo installed"
    cli.write("needs.txt", "a")
    cli.write("cloudddp.toml", f'[setup]\nrun = ["{wait}"]\ninputs = ["needs.txt"]\n')
    cli.write("ok.py", "print('ran')")
    process = cli.start("launch", "ok.py")
    (home,) = homes(cli)
    wait_for((home / "began").exists, "the setup runs")
    assert cli.ok("logs") == "[setup | node 0] downloading\n"
    follower = cli.start("logs", "-f")
    assert follower.stdout is not None
    first = follower.stdout.readline()
    (home / "go").touch()
    out, err = finished(process, 0)
    assert "setup" not in out
    assert [err.count(f"] {word}\n") for word in ("downloading", "installed")] == [1, 1]
    followed = first + follower.communicate(timeout=TIMEOUT)[0]
    assert follower.returncode == 0
    assert [followed.count(f"] {word}\n") for word in ("downloading", "installed", "ran")] == [1, 1, 1]
    lines = [json.loads(line) for line in cli.ok("logs", "--json").splitlines()]
    assert {"node": 0, "rank": None, "line": "installed", "setup": True} in lines
    assert "] installed" not in cli("launch", "ok.py").stderr
    cli.write("needs.txt", "b")
    assert cli("launch", "ok.py").stderr.count("] installed\n") == 1


def test_failed_setup_stays_visible(cli: Any) -> None:
    direct(cli)
    cli.write("ok.py", "print('ran')")
    cli.write("cloudddp.toml", '[setup]\nrun = ["echo the $((1 + 1))nd cause; exit 9"]\n')
    done = cli("launch", "ok.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert "exited with code 9" in done.stderr
    assert done.stderr.count("the 2nd cause") == 1
    (failed,) = json.loads(cli.ok("jobs", "--json"))
    assert (failed["state"], failed["exit_code"], failed["setup"]) == ("failed", 9, True)
    assert cli.ok("logs") == "[setup | node 0] the 2nd cause\n"
    assert "node 0: its setup failed with code 9" in cli.fails(9, "logs", "-f", failed["id"])


PROJECT = """\
[project]
name = "p"
version = "0"
requires-python = ">=3.9"
dependencies = ["greeting", "mine"]
[tool.uv.sources]
mine = {path = "libs/mine"}
"""
SHOW = """\
import importlib.util, greeting, mine
print(greeting.TEXT, mine.TEXT, bool(importlib.util.find_spec("torch")))
"""


@pytest.mark.parametrize("environment", ["requirements.txt", "uv.lock"])
def test_edited_package_is_installed_again(cli: Any, environment: str) -> None:
    """A package of the project, and a wheel of the same name. Without an index, and beside the torch of the
    image."""
    direct(cli)
    cli.write("show.py", SHOW)
    cli.write("pyproject.toml", PROJECT)
    cli.write("requirements.txt", "-r base.txt\n./libs/mine\n")
    cli.write("base.txt", "greeting\n--no-index\n--find-links wheels\n")
    cli.write("cloudddp.toml", f'[setup]\nenvironment = "{environment}"\n')
    for texts in (("1", "a"), ("22", "b")):
        wheel(cli.cwd / "wheels", "greeting", f"TEXT = {texts[0]!r}\n")
        package(cli.cwd / "libs/mine", f"TEXT = {texts[1]!r}\n")
        if texts[0] == "1" and environment == "uv.lock":
            lock = [find_uv_bin(), "lock", "--offline", "--no-index", "--find-links", "wheels"]
            subprocess.run(lock, cwd=cli.cwd, check=True)
        done = cli("launch", "show.py")
        assert f"] {' '.join(texts)} True\n" in done.stdout, done.stderr
        assert "[setup | node 0]" in done.stderr
    assert not [path for home in homes(cli) for path in home.parent.glob("tmp/tmp.*")]  # that it has left
