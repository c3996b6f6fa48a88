"""`cloudddp completion`: what the shells are given, and the names that they are told."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.jobs import direct, newest


def completed(cli: Any, *words: str, **env: str) -> list[str]:
    """Return what the last of these words, after `cloudddp`, can be: the kind and the value of each."""
    line = ["cloudddp", *words]
    done = cli(
        _CLOUDDDP_COMPLETE="bash_complete", COMP_WORDS=" ".join(line), COMP_CWORD=str(len(words)), **env
    )
    assert done.stderr == ""
    return list(done.stdout.split())


def test_names_of_clusters_jobs_and_nodes_are_completed_without_any_call(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("ok.py", "print('ran')")
    cli.ok("launch", "ok.py")
    job = newest(cli)["id"]
    of = f"--cluster={cli.cluster}"
    expected = {
        ("status", "-c", cli.cluster[:-1]): [f"plain,{cli.cluster}"],
        (of, "logs", job[:-2]): [f"plain,{job}"],
        (of, "logs", "--node", ""): ["plain,0", "plain,1"],
        (of, "ssh", ""): ["plain,0", "plain,1"],
        ("laun",): ["plain,launch"],
        ("launch", "tr"): ["file,tr"],  # files are left to the shell
        ("up", "--tag", "unfinished", "--requ"): ["plain,--require-efa"],
    }
    # Neither AWS nor a node answers.
    nobody = {"CLOUDDDP_SIM": "", "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "none"}
    assert {words: completed(cli, *words, **nobody) for words in expected} == expected


def test_nothing_is_completed_from_a_damaged_state(cli: Any, tmp_path: Path) -> None:
    direct(cli)
    for folder in (Path(cli.env["CLOUDDDP_HOME"]) / "clusters").iterdir():
        shutil.copytree(folder, tmp_path / "clusters" / folder.name)
    for path in (tmp_path / "clusters").rglob("*.json"):
        path.write_text("{")
    for words in (["status", "-c", ""], ["ssh", ""], ["logs", ""]):
        assert completed(cli, *words, CLOUDDDP_HOME=str(tmp_path)) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell_is_valid(cli: Any, shell: str) -> None:
    text = cli.ok("completion", shell)
    assert "_CLOUDDDP_COMPLETE" in text
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=text, text=True, check=True)


def test_shell_is_that_of_the_user_and_an_unknown_one_is_refused(cli: Any) -> None:
    assert "fish" in cli.ok("completion", SHELL="/usr/bin/fish")
    assert "no completion for the shell 'tcsh'" in cli.fails(2, "completion", SHELL="/usr/bin/tcsh")
