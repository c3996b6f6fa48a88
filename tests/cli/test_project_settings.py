"""Where settings are read, and what is wrong with the files and folders of this computer."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from support.tagged import tagged_instance


def test_project_settings_apply_in_subfolders(cli: Any, ec2: Any) -> None:
    tagged_instance(ec2, cli.cluster)
    del cli.env["CLOUDDDP_CLUSTER"]
    cli.write("cloudddp.toml", f'[cluster]\nname = "{cli.cluster}"\nnodes = 1\n')
    subprocess.run(["git", "init", "-q", str(cli.cwd)], check=True)
    below = cli.cwd / "a" / "b"
    below.mkdir(parents=True)
    cli.cwd = below
    done = cli.exits(0, "status")
    assert cli.cluster in done.stdout
    assert "using" in done.stderr
    cli.write("train.py", "")
    assert "ranks start there, not in a/b/" in cli("launch", "train.py").stderr


def test_settings_are_not_read_from_shared_folders(cli: Any, tmp_path: Path) -> None:
    """Outside a repository and the home folder, a file in a parent folder may belong to another user."""
    (tmp_path / "cloudddp.toml").write_text("[cluster]\nnodes = 0\n")
    for verb in ("status", "pull"):
        assert "no cluster" in cli.fails(1, verb, "--region", "us-east-1")  # the bad file was not read


def test_unknown_profile_and_broken_aws_file_are_usage_errors(cli: Any, tmp_path: Path) -> None:
    assert "nope" in cli.fails(2, "status", "--profile", "nope")
    (tmp_path / "config").write_text("not [ an ini file")
    assert "AWS configuration" in cli.fails(2, "status", AWS_CONFIG_FILE=str(tmp_path / "config"))


def test_unusable_state_folder_is_named_with_the_variable_to_set(cli: Any, tmp_path: Path) -> None:
    taken = tmp_path / "a file"
    taken.touch()
    err = cli.fails(2, "--sim", "up", "-n", "1", CLOUDDDP_HOME=str(taken))
    assert f"{taken} is not a folder, so cloudddp does not use it" in err
    assert "-> set CLOUDDDP_HOME" in err
