"""CLOUDDDP_HOME is private for any umask, and no link in it redirects a write."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import TIMEOUT, CommandLine, cannot, finished

from cloudddp.cluster import host_keys
from cloudddp.errors import UsageError
from cloudddp.files import state_home, write_atomic
from cloudddp.local_state import ClusterFolder, ClusterRecord

ID = "c-0123456789"
RECORD = ClusterRecord(ID, "demo", "us-east-1", "", "2026-11-20T14:00:00Z")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "state" / "home"
    monkeypatch.setenv("CLOUDDDP_HOME", str(path))
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def all_writes() -> list[Callable[[], object]]:
    """Return every operation that writes into the state folder."""
    folder = ClusterFolder(ID)
    return [
        lambda: folder.create(RECORD, private_key="PRIVATE\n", host_public="ssh-ed25519 AAAA"),
        lambda: folder.journal("first", step="key-pair"),
        lambda: write_atomic(folder.known_hosts, "host key\n"),
        folder.forget,
        lambda: write_atomic(state_home() / "debug.log", "traceback\n"),
    ]


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o277])
def test_new_folders_are_private_for_any_umask(home: Path, mask: int) -> None:
    home.parent.mkdir()
    before = os.umask(mask)
    try:
        for write in [*all_writes(), all_writes()[0]]:
            write()
    finally:
        os.umask(before)
    for path in (home, *home.rglob("*")):
        assert mode(path) == (0o700 if path.is_dir() else 0o644 if path.suffix == ".pub" else 0o600), path


def test_readable_folders_are_made_private(home: Path) -> None:
    (home / "clusters" / ID).mkdir(parents=True)
    for path in (home, home / "clusters", home / "clusters" / ID):
        path.chmod(0o755)
    all_writes()[1]()
    for path in (home, home / "clusters", home / "clusters" / ID):
        assert mode(path) == 0o700


@pytest.mark.parametrize("open_to", [0o777, 0o1777, 0o775, 0o757])
def test_home_writable_by_others_is_refused(home: Path, open_to: int) -> None:
    home.mkdir(parents=True)
    home.chmod(open_to)
    for write in all_writes():
        with pytest.raises(UsageError, match="other users") as caught:
            write()
        assert "chmod 700" in caught.value.hint
        assert "CLOUDDDP_HOME" in caught.value.hint
    with pytest.raises(UsageError):
        ClusterFolder(ID).login_key()
    assert list(home.iterdir()) == []


def _owned_by_another(path: Path) -> None:
    if os.geteuid():
        cannot("only root can give files away")
    os.chown(path, 65534, 65534, follow_symlinks=False)


@pytest.mark.parametrize("part", ["", "clusters", f"clusters/{ID}"])
def test_folder_of_another_user_is_refused(home: Path, part: str) -> None:
    (home / "clusters" / ID).mkdir(parents=True)
    _owned_by_another(home / part)
    for write in all_writes()[: 4 if part else 5]:
        with pytest.raises(UsageError, match="another user"):
            write()
    assert list((home / "clusters" / ID).iterdir()) == []


def test_home_behind_a_link_of_another_user_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir(0o700)
    home.parent.mkdir()
    home.symlink_to(tmp_path / "ssh")
    all_writes()[1]()  # the user's own link
    assert (tmp_path / "ssh" / "clusters").is_dir()
    _owned_by_another(home)
    with pytest.raises(UsageError, match="another user"):
        all_writes()[1]()


@pytest.mark.parametrize("part", ["clusters", f"clusters/{ID}"])
def test_link_in_place_of_a_folder_is_not_followed(home: Path, tmp_path: Path, part: str) -> None:
    away = tmp_path / "away"
    (away / ID).mkdir(parents=True)
    for folder in (away, away / ID):
        (folder / "id_ed25519").write_text("unharmed")
    away.chmod(0o755)
    (home / part).parent.mkdir(parents=True)
    (home / part).symlink_to(away)
    for write in all_writes()[:4]:
        with pytest.raises(UsageError, match="is not a folder"):
            write()
    assert {path.name for path in away.rglob("*")} == {ID, "id_ed25519"}
    assert mode(away) == 0o755


@pytest.mark.parametrize("name", ["id_ed25519", "host_key.pub", "cluster.json", "../../debug.log"])
def test_link_in_place_of_a_file_is_replaced_not_followed(home: Path, tmp_path: Path, name: str) -> None:
    folder = home / "clusters" / ID
    folder.mkdir(parents=True)
    (tmp_path / "bait").write_text("unharmed")
    (folder / name).symlink_to(tmp_path / "bait")
    for write in all_writes():
        write()
    assert (tmp_path / "bait").read_text() == "unharmed"
    assert not (folder / name).is_symlink()


def _of_another(journal: Path) -> None:
    journal.write_text("")
    _owned_by_another(journal)


@pytest.mark.parametrize(
    "make",
    [
        lambda journal: journal.symlink_to(journal.with_name("bait")),
        lambda journal: journal.symlink_to(journal.with_name("new")),
        lambda journal: journal.hardlink_to(journal.with_name("bait")),
        os.mkfifo,
        os.mkdir,
        _of_another,
    ],
)
def test_journal_must_be_a_regular_file_of_the_user(home: Path, make: Callable[[Path], None]) -> None:
    folder = home / "clusters" / ID
    folder.mkdir(parents=True)
    (folder / "bait").write_text("unharmed")
    make(folder / "journal.jsonl")
    with pytest.raises(UsageError, match=r"journal\.jsonl"):
        ClusterFolder(ID).journal("first")
    assert (folder / "bait").read_text() == "unharmed"
    assert not (folder / "new").exists()


def test_keys_and_records_behind_links_are_not_read(home: Path, tmp_path: Path) -> None:
    """With a host key chosen by another user, their machine could impersonate a node."""
    all_writes()[0]()
    folder = ClusterFolder(ID)
    (tmp_path / "theirs").write_text("ssh-ed25519 BBBB")
    folder.host_key.unlink()
    folder.host_key.symlink_to(tmp_path / "theirs")
    with pytest.raises(Exception, match="no key for cluster"):
        folder.login_key()
    folder.host_key.unlink()
    folder.host_keys.symlink_to(tmp_path / "theirs")
    with pytest.raises(Exception, match="no key for cluster"):
        folder.login_key()
    with pytest.raises(OSError, match=r"host_keys\.json"):
        host_keys.read(folder)
    (tmp_path / "record").write_bytes((folder.path / "cluster.json").read_bytes())
    (folder.path / "cluster.json").unlink()
    (folder.path / "cluster.json").symlink_to(tmp_path / "record")
    assert folder.record() is None


def test_folder_replaced_by_a_link_during_a_write_is_not_followed(home: Path, tmp_path: Path) -> None:
    """A link that appears between the look-up and the write changes nothing."""
    away = tmp_path / "away"
    away.mkdir()
    clusters = home / "clusters"
    stop = threading.Event()
    ClusterFolder(ID).journal("first")
    swapped = 0

    def swap() -> None:
        nonlocal swapped
        while not stop.is_set():
            try:
                clusters.rename(home / "aside")
                clusters.symlink_to(away)
                swapped += 1
                clusters.unlink()
                (home / "aside").rename(clusters)
            except OSError:  # the writer came in between and created a folder: remove it for the next round
                shutil.rmtree(home / "aside", ignore_errors=True)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(300):
            with contextlib.suppress(UsageError, OSError):
                ClusterFolder(ID).journal("again", number=number)
                write_atomic(ClusterFolder(ID).known_hosts, "x")
    finally:
        stop.set()
        thread.join()
    assert swapped
    assert list(away.iterdir()) == []


# -- the command line --------------------------------------------------------------------------------------


MAIN = "from cloudddp.__main__ import main\nmain()"


@pytest.fixture
def line(line: CommandLine, home: Path) -> CommandLine:
    line.env["CLOUDDDP_HOME"] = str(home)
    return line


def test_simulator_folders_and_log_are_private(line: CommandLine, home: Path, tmp_path: Path) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("asyncssh")
    (tmp_path / "bait").write_text("unharmed")
    folder = home / "sim"
    folder.mkdir(parents=True)
    for name in ("server.log", "lock", "sim.json"):
        folder.chmod(0o755)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "bait")
        started = line.start_code(f"import os\nos.umask(0)\n{MAIN}", "sim", "start", "--nodes", "process")
        _, err = started.communicate(timeout=TIMEOUT)
        try:
            assert (tmp_path / "bait").read_text() == "unharmed"
            if name == "sim.json":  # replaced
                assert started.returncode == 0, err
                assert json.loads((folder / "sim.json").read_text())["pid"]
                created = [home, folder, *folder.glob("*")]
                assert {mode(path) for path in created if path.is_dir()} == {0o700}
                assert {mode(path) for path in created if path.is_file()} == {0o600}
            else:
                assert started.returncode == 2, err
                assert name in err
        finally:
            (folder / name).unlink(missing_ok=True)
            line("sim", "stop")


def test_variables_stay_out_of_the_debug_log(line: CommandLine, home: Path) -> None:
    code = (
        "from cloudddp.job import launch\n"
        "def broken(*_, **__): raise RuntimeError('a defect')\n"
        f"launch.prepare = broken\n{MAIN}"
    )
    words = (
        "launch -e TOKEN=hunter2 --env=OTHER=hunter2 -eTHIRD=hunter2 -de FOURTH=hunter2 -meFIFTH=hunter2 x.py"
    )
    line.env["AWS_REGION"] = "us-east-1"
    process = line.start_code(code, *words.split())
    _, err = finished(process, 1)
    assert "a bug in cloudddp: RuntimeError" in err
    assert "Traceback" not in err
    text = (home / "debug.log").read_text()
    assert "hunter2" not in text + err
    assert "TOKEN=****" in text
    assert "RuntimeError" in text
