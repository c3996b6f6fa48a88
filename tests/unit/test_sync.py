"""Which files of a project are sent to a node, which are refused, and what differs."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pathspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import file_modes
from support.localsync import put
from support.repositories import git

from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.config.spec import Config, JobSpec, SyncSpec
from cloudddp.errors import UsageError
from cloudddp.job import file_listing, project_files, sync
from cloudddp.job.project_files import of_config, snapshot

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def names(root: Path, *, exclude: tuple[str, ...] = (), keep_out: tuple[str, ...] = ()) -> set[str]:
    config = Config(sync=SyncSpec(exclude=exclude), job=JobSpec(outputs=keep_out))
    return set(snapshot(root, config).manifest)


@pytest.fixture(autouse=True)
def _default_git_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's own git configuration, such as a global ignore file, must not affect these tests."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def repository(folder: Path, files: dict[str, str | bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    put(folder, files)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    return folder


@needs_git
def test_files_that_git_lists_and_that_exist_are_sent(here: Path) -> None:
    tracked = ["train.py", "pkg/a.py", "kept.pt", "gone", "folder/gone", "file"]
    repository(here, dict.fromkeys(tracked, ""))
    put(here, {".gitignore": "*.pt\ndata/\n", "new.py": "", "model.pt": "", "data/x": "", "pkg/b.pt": ""})
    for name in ("gone", "file"):
        (here / name).unlink()
    shutil.rmtree(here / "folder")
    put(here, {"file/x": "", f"{REPLACED}/x": ""})  # where nodes keep what is in the way
    assert names(here) == {".gitignore", "train.py", "pkg/a.py", "kept.pt", "new.py", "file/x"}


@needs_git
def test_repository_of_a_git_hook_is_not_the_projects(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git sets these variables for hooks, aliases and `rebase --exec`."""
    repository(here, {"train.py": "a", "model.pt": "w"})
    put(here, {".gitignore": "*.pt\n"})
    other = repository(tmp_path / "other", {"other.py": "b"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert names(here) == {".gitignore", "train.py", "model.pt"}


@needs_git
def test_submodule_files_are_sent(here: Path, tmp_path: Path) -> None:
    library = repository(tmp_path / "library", {"lib.py": "", ".gitignore": "*.o\n"})
    repository(here, {"a": ""})
    git(here, "submodule", "add", "-q", str(library), "deps/library")
    put(here, {"deps/library/new.py": "", "deps/library/x.o": ""})
    of_library = {f"deps/library/{name}" for name in ("lib.py", "new.py", ".gitignore")}
    assert names(here) == {".gitmodules", "a", *of_library}


@needs_git
def test_nested_repository_has_its_own_ignore_rules(here: Path) -> None:
    repository(here, {"a": "", ".gitignore": "*.log\n"})
    repository(here / "inner", {".gitignore": "*.tmp\n", "b": ""})
    put(here, {"inner/c.tmp": "", "inner/d.log": ""})
    assert names(here) == {"a", ".gitignore", "inner/.gitignore", "inner/b", "inner/d.log"}


@needs_git
def test_project_in_a_subfolder_obeys_the_repository_rules(here: Path) -> None:
    repository(here, {".gitignore": "*.pt\n", "other/x": "", "project/train.py": "", "project/sub/y": ""})
    put(here, {"project/m.pt": ""})
    assert names(here / "project") == {"train.py", "sub/y"}


@needs_git
def test_broken_nested_repository_is_refused(here: Path) -> None:
    repository(here, {"a": ""})
    repository(here / "inner", {"b": ""})
    (here / "inner" / ".git" / "index").write_bytes(b"broken")
    with pytest.raises(UsageError, match="inner"):
        names(here)


@needs_git
@pytest.mark.parametrize(
    "rules",
    [
        *("/y/\n*.a\n!b.a\n*.d\n", "*.a\n!b.a\n", "/x\n", "x/\n", "x/*\n!x/b.a\n", "**/x\n", "x/**/b.a\n"),
        *("# c\n\\#c\n", "*\n!*/\n!*.a\n", "\ufeffx/\n"),
    ],
)
def test_walk_agrees_with_git(here: Path, tmp_path: Path, rules: str) -> None:
    """One file of rules is in a folder: its rules go before those of the folders above."""
    put(here, {".gitignore": rules, "s/.gitignore": "/d\n!f.d\n*.e\n", "#c": "", "d": "", "h.e": ""})
    put(here, dict.fromkeys(["a.a", "b.a", "x/b.a", "x/c", "x/z/b.a", "y/b.a", "y/x/b.a", "y/z/b.a"], ""))
    put(here, dict.fromkeys(["n\nl/a.a", "n\nl/x/c", "n\nl/h.e", "s/n\nl/e.d"], ""))
    put(here, dict.fromkeys(["e.d", "f.d", "s/d", "s/t/d", "s/e.d", "s/f.d", "s/h.e", "s/y/a"], ""))
    twin = tmp_path / "twin"
    shutil.copytree(here, twin)
    git(twin, "init", "-q")
    assert names(here) == names(twin)


@pytest.mark.parametrize("line", ["!", "! ", "\\", "a\\", "[z-a]"])
def test_invalid_line_of_a_gitignore_is_ignored_as_by_git(here: Path, line: str) -> None:
    put(here, {".gitignore": f"*.pt\n{line}\n", "a": "", "b.pt": ""})
    assert names(here) == {".gitignore", "a"}
    with pytest.raises(UsageError, match=r"sync\.exclude: .* is not a pattern"):
        names(here, exclude=(line,))


def test_environments_and_caches_are_never_sent(here: Path) -> None:
    never = ("__pycache__/a.pyc", "p/__pycache__/b.pyc", ".venv/bin/x", "venv/y", ".DS_Store", ".cloudddp/z")
    put(here, dict.fromkeys(("a.py", "venvs", "p/q", *never), ""))
    assert names(here) == {"a.py", "venvs", "p/q"}


def test_excluded_patterns_and_outputs_are_not_sent(here: Path) -> None:
    put(here, {"a.py": "", "big/x.bin": "", "notes.md": "", "runs/1/m.pt": "", "runs2": "", "sub/runs/y": ""})
    kept = {"a.py", "runs2", "sub/runs/y"}
    for spelling in ("runs", "runs/", "./runs"):
        assert names(here, exclude=("*.bin", "/notes.md"), keep_out=(spelling,)) == kept


def test_special_files_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)  # a socket's path is at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        with pytest.raises(UsageError, match=r"'s'.*socket"):
            names(here)
    (here / "sub").mkdir()
    os.mkfifo(here / "sub" / "pipe")
    with pytest.raises(UsageError, match=r"'sub/pipe'.*named pipe") as caught:
        names(here, exclude=("s",))
    assert ".gitignore" in caught.value.hint
    assert names(here, exclude=("pipe", "s")) == set()


@pytest.mark.parametrize("mode", [0, 0o004])
def test_unreadable_file_is_refused(here: Path, mode: int) -> None:
    put(here, {"secret": "x"})
    (here / "secret").chmod(mode)
    with pytest.raises(UsageError, match="'secret'"):
        file_modes.applied_to(lambda: names(here))


@needs_git
def test_folder_that_git_cannot_read_is_refused(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git warns of it, and lists nothing in it: the nodes' copy would be deleted."""
    (tmp_path / "bin").mkdir()
    program = file_modes.with_modes_applied(tmp_path / "bin", shutil.which("git") or "")
    monkeypatch.setenv("PATH", f"{Path(program).parent}:{os.environ['PATH']}")
    repository(here, {"train.py": "", ".gitignore": "ignored/\n"})
    put(here, {"ignored/x": "", "data/x": ""})
    (here / "ignored").chmod(0)
    assert names(here) == {".gitignore", "data/x", "train.py"}
    (here / "data").chmod(0)
    with pytest.raises(UsageError, match=r"could not open directory 'data/': Permission denied"):
        names(here)
    (here / "data").chmod(0o755)


def test_size_limit_names_the_largest_folders(here: Path) -> None:
    sizes = {"data/a": 900_000, "data/b": 900_000, "m.pt": 700_000, "s.py": 1, "t": 1}
    put(here, {name: b"x" * size for name, size in sizes.items()})
    files = snapshot(here, Config())
    sync.check_size(files, files.manifest, 2.5)
    with pytest.raises(UsageError) as caught:
        sync.check_size(files, files.manifest, 1.0)
    assert "data/ 2 MiB; m.pt 1 MiB" in caught.value.message
    assert "sync.max_mb = 1" in caught.value.message
    assert ".gitignore" in caught.value.hint
    sync.check_size(files, ["m.pt", "t"], 1.0)  # only what is sent counts


def test_project_of_too_many_files_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(here, {"a": "", **{f"data/{number}": "" for number in range(3)}})
    assert len(of_config(here, Config()).manifest) == 4
    monkeypatch.setattr(project_files, "MAX_FILES", 3)
    with pytest.raises(UsageError, match=r"4 files, more than 3: data/ 3; a 1") as refused:
        of_config(here, Config())
    assert "sync.exclude" in refused.value.hint


PARTS = ["n\nl", *"a data x .git venv .venv __pycache__ f.tmp build abc1 deep q.bin .env".split()]


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=5), end=st.sampled_from(["", "/"]))
@pytest.mark.parametrize(
    "more", [(), ("*.tmp", "/data/x", "build/", "a?c[0-9]", "# comment", "**/deep/*.bin"), ("*", "!x")]
)
def test_patterns_match_as_those_of_gitignore(more: tuple[str, ...], parts: list[str], end: str) -> None:
    patterns = (*file_listing.NEVER_SENT, *more)
    name = "/".join(parts) + end
    # As git, and unlike pathspec: a folder may have any name.
    expected = pathspec.GitIgnoreSpec.from_lines(patterns).match_file(name.replace("\n", "-"))
    assert file_listing.matcher(patterns)(name) == expected


def test_folder_that_disappears_during_the_walk_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, dict.fromkeys(("a/x", "b/x", "c"), ""))
    scandir = os.scandir

    def scan(path: Any) -> Any:
        if path == tmp_path / "a/":
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert set(snapshot(tmp_path, Config()).manifest) == {"b/x", "c"}
