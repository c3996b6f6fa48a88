"""An `up` whose state folder, or the key in it, goes away meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import CommandLine, finished, wait_for

Lose = Callable[[Path], Path]


@pytest.fixture
def home(cli: CommandLine, tmp_path: Path) -> Path:
    """A state folder for one test; that of the simulator stays."""
    path = tmp_path / "mount" / "state"
    path.parent.mkdir()
    cli.env["CLOUDDDP_HOME"] = str(path)
    return path


def files(home: Path, name: str) -> list[Path]:
    return list(home.glob(f"clusters/c-*/{name}"))


def key(home: Path) -> Path:
    """Remove only the key; return what has gone."""
    (path,) = files(home, "id_ed25519")
    path.unlink()
    return path


def file_system(home: Path) -> Path:
    """Remove the folder, so that it cannot be created again."""
    home.parent.rename(home.parent.with_name("unmounted"))
    home.parent.write_text("")
    return home


# What holds `up`, and the file by which it is known that it has come so far.
MOMENTS = {
    "while they boot": ({"boot": {"ssh_seconds": 4}}, "launch.json"),
    "while they are checked": ({"boot": {"first_import_seconds": 4}}, "host_keys.json"),
}


@pytest.mark.parametrize(("moment", "lose"), [*zip(MOMENTS, [file_system, key], strict=True)])
def test_up_that_loses_its_state_names_what_has_gone_and_removes_everything(
    cli: CommandLine, home: Path, conditions: Any, remains: Any, lose: Lose, moment: str
) -> None:
    condition, reached = MOMENTS[moment]
    conditions(**condition)
    process = cli.start("up", "-n", "2")
    wait_for(lambda: files(home, reached) and (moment != "while they boot" or remains().instances), moment)
    gone = lose(home)
    _, err = finished(process, 1)
    assert str(gone) in err
    assert "was removed while the cluster was being created; everything that was created has been" in err
    assert "`cloudddp up`" in err
    assert "waiting for SSH" in err
    assert remains().nothing
