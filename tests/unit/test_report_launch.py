"""What a launch records for the report: the code as git knows it, and no secret."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.repositories import git

from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config, JobSpec, SyncSpec
from cloudddp.job.launch_record import LaunchContext
from cloudddp.job.project_files import names_below, snapshot
from cloudddp.job.report import launched

CONFIG = Config(
    sync=SyncSpec(exclude=("private/",)),
    job=JobSpec(env={"KEY": "very-secret-1", "PIN": "248163", "SHORT": "lr", "LONG": "x\nline-2-of-a-key"}),
)
CLUSTER = Cluster("c", "c-0123456789", "us-east-1", {})


def facts(root: Path, config: Config = CONFIG, secret: tuple[str, ...] = ()) -> LaunchContext:
    hidden = [root / name for name in secret]
    files = snapshot(root, config, names_below(root, hidden))
    return launched.facts(CLUSTER, config, files, hidden)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project in a folder of a repository, with one commit."""
    found = tmp_path / "repository" / "project"
    (found / "private").mkdir(parents=True)
    names = "train.py .env prod.env given.txt private/notes runs.txt gone.py cloudddp.toml other.toml"
    for name in (*names.split(), ":(glob)*", "../x.py"):
        (found / name).write_text("first\n")
    git(found.parent, "init", "-q")
    git(found.parent, "add", "-fA", ".")
    git(found.parent, "commit", "-qm", "first")
    return found


def change(root: Path, *names: str, text: str = "second\n") -> None:
    for name in names:
        (root / name).write_text(text)


def test_revision_has_the_commit_and_the_changes(root: Path) -> None:
    clean = facts(root)
    assert len(clean.commit) == 40
    assert (clean.changed, clean.diff) == ((), "")
    change(root, "train.py", ":(glob)*", "new.py", "../x.py")
    (root / "gone.py").unlink()
    found = facts(root)
    assert found.commit == clean.commit
    changed = " M project/train.py, M project/:(glob)*, D project/gone.py,?? project/new.py"
    assert set(found.changed) == set(changed.split(","))
    assert found.diff.count("+second") == 2
    assert "-first" in found.diff.partition("b/train.py")[2]
    assert not any(name in found.diff for name in ("gone.py", "x.py"))


def test_changes_that_may_be_secret_are_left_out(root: Path) -> None:
    """Those that are not sent, and those that are because git tracks them; also where they are renamed. Also
    the configuration: it has former values, and those in escaped spelling."""
    names = "train.py .env given.txt private/notes cloudddp.toml other.toml".split()
    change(root, *names, text="password\n")
    (root / "prod.env").rename(root / "settings.txt")
    git(root, "add", "-fA", ".")
    found = facts(root, secret=("given.txt", "other.toml"))
    assert found.diff.count("password") == 1
    hidden = (".env", "prod.env", "given.txt", "private/notes", "cloudddp.toml", "other.toml")
    assert not any(f"/{name}" in found.diff for name in hidden)


def test_values_of_variables_are_not_recorded(root: Path) -> None:
    change(root, "train.py", text="key = 'very-secret-1'\nlr = 1 + 248163\nline-2-of-a-key\n")
    assert "+key = '****'\n+lr = 1 + ****\n+****\n" in facts(root).diff


def test_where_notifications_go_is_not_recorded(root: Path) -> None:
    """The URL of a webhook is a secret, and often in cloudddp.toml."""
    url = "https://hooks.example.com/T0/B0/very-secret"
    change(root, "train.py", text=f'notify = "{url}"\n')
    assert 'notify = "****"' in facts(root, config=Config(job=JobSpec(notify=url))).diff


def test_long_changes_are_cut(root: Path) -> None:
    change(root, "train.py", text="x" * 99 + "\n" + "y\n" * 200_000)
    change(root, "runs.txt", text="z" * (2 << 20))
    found = facts(root)
    assert len(found.diff) < launched.MAX_DIFF + 100
    assert found.diff.endswith("and more")
    assert "runs.txt" not in found.diff


def test_no_program_of_the_repository_runs(root: Path, tmp_path: Path) -> None:
    """git can be told to show changes with any program."""
    ran = tmp_path / "ran"
    for key in ("diff.external", "core.pager", "diff.x.textconv", "diff.x.command"):
        git(root, "config", key, f"touch {ran};")
    change(root, ".gitattributes", text="* diff=x\n")
    change(root, "train.py")
    assert "+second" in facts(root).diff
    assert not ran.exists()


def test_without_a_repository_or_a_commit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("first\n")
    assert facts(tmp_path).commit == ""
    git(tmp_path, "init", "-q")
    found = facts(tmp_path)
    assert (found.commit, found.changed, found.diff) == ("none yet", ("?? train.py",), "")
