"""What a launch records for the report: the code as git knows it, and no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.repositories import git

from cloudddp.cluster.model import Cluster
from cloudddp.config.spec import Config, JobSpec, SyncSpec
from cloudddp.job import launch_record
from cloudddp.job.job_request import NewJob, Script
from cloudddp.job.launch_record import LaunchFacts
from cloudddp.job.report import launched
from cloudddp.local_state import ClusterFolder, ClusterRecord, folders_by_job

CONFIG = Config(
    sync=SyncSpec(exclude=("private/",)),
    job=JobSpec(env={"KEY": "very-secret-1", "SHORT": "lr", "LONG": "x\nline-2-of-a-key"}),
)
CLUSTER = Cluster("c", "c-0123456789", "us-east-1", {})


def facts(root: Path, *typed: str, config: Config = CONFIG, secret: tuple[str, ...] = ()) -> LaunchFacts:
    return launched.facts(typed, CLUSTER, config, root, [root / name for name in secret])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project in a folder of a repository, with one commit."""
    found = tmp_path / "repository" / "project"
    (found / "private").mkdir(parents=True)
    for name in (
        "train.py",
        ".env",
        "prod.env",
        "given.txt",
        "private/notes",
        "runs.txt",
        "gone.py",
        ":(glob)*",
        "../x.py",
    ):
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
    assert (clean.changed, clean.diff, clean.withheld) == ((), "", ())
    change(root, "train.py", ":(glob)*", "new.py", "../x.py")
    (root / "gone.py").unlink()
    found = facts(root)
    assert found.commit == clean.commit
    assert set(found.changed) == {
        " M project/train.py",
        " M project/:(glob)*",
        " D project/gone.py",
        "?? project/new.py",
    }
    assert found.diff.count("+second") == 2
    assert "-first" in found.diff.partition("b/train.py")[2]
    assert "deleted file" in found.diff
    assert "x.py" not in found.diff


def test_changes_that_may_be_secret_are_left_out(root: Path) -> None:
    """Also where git tracks them, and where they are deleted or renamed."""
    change(root, "train.py", ".env", "given.txt", "private/notes", text="password\n")
    (root / "prod.env").rename(root / "settings.txt")
    git(root, "add", "-fA", ".")
    found = facts(root, secret=("given.txt",))
    assert set(found.withheld) == {".env", "prod.env", "given.txt", "private/notes"}
    assert found.diff.count("password") == 1
    assert not any(f"/{name}" in found.diff for name in found.withheld)


def test_values_of_variables_are_not_recorded(root: Path) -> None:
    change(root, "train.py", text="key = 'very-secret-1'\nlr = 1\nline-2-of-a-key\n")
    found = facts(root, "launch", "train.py", "--key", "very-secret-1")
    assert found.typed == "cloudddp launch train.py --key '****'"
    assert "+key = '****'\n+lr = 1\n+****\n" in found.diff


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
    assert found.diff.endswith("more characters")
    assert found.withheld == ("runs.txt",)


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


def test_facts_are_kept_with_the_record_of_the_launch(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "home"))
    folder, job = ClusterFolder(CLUSTER.id), NewJob(Script("train.py"))
    folder.create(ClusterRecord(CLUSTER.id, "c", "us-east-1", "", ""), private_key="", host_public="")
    known = launch_record.of_launch(
        job, CONFIG, root=tmp_path, files=(), variables=(), env_files=(), nodes=()
    )
    record = msgspec.structs.replace(known, facts=facts(tmp_path, "launch", "train.py"))
    launch_record.keep(folder, record)
    launch_record.add_steps(folder, record, [(1.5, "sending \udc80")])
    found = launch_record.find(folder, job.id)
    assert found.facts is not None
    assert found.facts.typed == "cloudddp launch train.py"
    assert found.facts.steps == ((1.5, "sending \udc80"),)
    assert list(folders_by_job(job.id[:4])) == [job.id]
    launch_record.drop(folder, job.id)
    assert folders_by_job("") == {}
