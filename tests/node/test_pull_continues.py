"""`pull` over a real SSH connection: unchanged files are not sent again, and a broken transfer continues."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cutlink import CutLink
from support.harness import wait_for
from support.sshserver import Site, site

from cloudddp.cli.console import Console
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import CloudDDPError, NodeError
from cloudddp.job.results import pull as pulling
from cloudddp.job.results.pull import Pulled
from cloudddp.job.results.receive import Transfer
from cloudddp.operations import byte_progress, reporter
from cloudddp.operations.byte_progress import ByteProgress
from cloudddp.operations.results import resumed
from cloudddp.ssh.fleet import Fleet

LARGE = 12 << 20  # bytes
OVERHEAD = 100_000  # bytes of a connection and of the stream's frames
OLD_NS = 1_700_000_000_123_456_789


@dataclass
class Place:
    """A node behind a link, and the folder `to` for its results."""

    fleet: Fleet
    link: CutLink
    runs: Path
    to: Path

    def write(self, name: str, data: bytes, mtime_ns: int = OLD_NS) -> Path:
        path = self.runs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return path

    def pull(self, **more: Any) -> Pulled:
        """Pull `runs` over a new connection."""
        self.fleet.reconnect(0)
        self.link.received = 0
        return pulling.Pull(self.fleet, ["runs"], node=0, to=self.to, **more).run()

    def broken(self, at: int) -> NodeError:
        """Pull while the link breaks after so many bytes."""
        self.fleet.reconnect(0)
        self.link.received, self.link.cut_at = 0, at
        with pytest.raises(NodeError) as caught:
            pulling.Pull(self.fleet, ["runs"], node=0, to=self.to).run()
        return caught.value

    @property
    def found(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.to)): p.read_bytes() for p in self.to.rglob("*") if p.is_file()}

    @property
    def top(self) -> list[str]:
        return [path.name for path in self.to.iterdir()]

    @property
    def kept(self) -> Path:
        (found,) = self.to.glob(".cloudddp-incoming-*")
        return found


@pytest.fixture
def keys_of(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


@pytest.fixture
def place(keys_of: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    home = tmp_path / "home"
    (home / PROJECT).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))  # of the commands of the SSH server
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "state"))
    link = CutLink(keys_of.server().port)
    with contextlib.closing(link), Fleet({0: keys_of.target(link.port)}) as fleet:
        fleet.connect()
        yield Place(fleet, link, home / PROJECT / "runs", tmp_path / "to")


def test_unchanged_files_are_not_sent_again(place: Place) -> None:
    sent = {f"d{k % 7}/f{k}": os.urandom(10_000) for k in range(196)}
    sent |= {os.fsdecode(name): b"x" * 10_000 for name in (b"\xff\xfe", b"caf\xc3\xa9", b"a\nb", b"\x1b[2J")}
    for name, data in sent.items():
        place.write(name, data)
    (place.runs / "latest").symlink_to("d0")
    first = place.pull()
    assert (first.files, first.size, first.unchanged) == (201, 2_000_002, 0)
    assert place.link.received > 2_000_000
    second = place.pull()
    assert (second.files, second.size, second.unchanged) == (0, 0, 201)
    assert place.link.received < 20_000
    place.write("d0/f0", b"changed", OLD_NS + 1)
    third = place.pull()
    assert (third.files, third.size, third.unchanged) == (1, 7, 200)
    assert place.link.received < 20_000
    assert {
        name.removeprefix("runs/"): data for name, data in place.found.items() if "latest" not in name
    } == {
        **sent,
        "d0/f0": b"changed",
    }


def test_file_is_compared_by_hash_where_its_time_does_not_identify_it(place: Place) -> None:
    """Times of a whole second are set by programs that copy files. Another write in the same tick of the file
    system's clock would leave a time of now as it is. A file that has grown is continued."""
    seconds = OLD_NS // 10**9 * 10**9
    soon = time.time_ns() + 60 * 10**9 + 1  # the test may be slow
    log, rest = os.urandom(1 << 20), b"the next line\n"
    before = {"a": seconds, "b": seconds, "empty": seconds, "now": soon, "other": OLD_NS, "log": seconds}
    data = {"a": b"one", "b": os.urandom(1 << 20), "empty": b"", "now": b"one", "other": b"one", "log": log}
    for name, mtime_ns in before.items():
        place.write(name, data[name], mtime_ns)
    place.pull()
    changed = {"a": b"two", "now": b"two", "other": b"two", "log": log + rest}
    after = {"a": seconds, "now": soon, "other": OLD_NS + 1, "log": OLD_NS}
    for name, mtime_ns in after.items():
        place.write(name, changed[name], mtime_ns)
    again = place.pull()
    assert (again.files, again.unchanged) == (4, 2)
    assert place.link.received < OVERHEAD
    assert place.found == {f"runs/{name}": found for name, found in {**data, **changed}.items()}


def test_broken_transfer_continues(place: Place) -> None:
    small = {f"a/{k}": os.urandom(20_000) for k in range(50)}
    large = os.urandom(LARGE)
    for name, data in small.items():
        place.write(name, data)
    place.write("b/large", large)
    error = place.broken(at=1_000_000 + LARGE // 2)
    assert "what had arrived is kept" in error.message
    assert place.kept.stat().st_mode & 0o777 == 0o700
    assert all(name.startswith(".cloudddp-incoming-") for name in place.top)
    arrived = sum(path.stat().st_size for path in place.kept.rglob("*") if path.is_file())
    assert arrived > LARGE // 4
    done = place.pull()
    assert (done.files, done.size) == (51, LARGE + 1_000_000)
    assert place.link.received < LARGE + 1_000_000 - arrived + OVERHEAD
    assert {name.removeprefix("runs/"): data for name, data in place.found.items()} == {
        **small,
        "b/large": large,
    }
    modes = {path.stat().st_mode & 0o777 for path in place.to.rglob("*") if path.is_file()}
    assert modes == {(place.runs / "b/large").stat().st_mode & 0o777}
    assert place.top == ["runs"]


def test_command_connects_once_more_and_continues(place: Place) -> None:
    large = os.urandom(LARGE)
    place.write("large", large)
    place.broken(at=LARGE // 3)
    place.fleet.reconnect(0)
    place.link.received, place.link.cut_at = 0, LARGE // 3
    assert resumed(place.fleet, 0, place.pull).files == 1
    assert place.found == {"runs/large": large}
    assert place.link.received < LARGE * 5 // 4
    assert place.link.cut_at is None


@pytest.mark.parametrize("change", ["another", "shorter", "a-folder"])
def test_file_that_changes_between_two_attempts_is_never_a_mix(place: Place, change: str) -> None:
    large = os.urandom(LARGE)
    place.write("large", large)
    place.broken(at=LARGE // 2)
    if change == "a-folder":
        (place.runs / "large").unlink()
        place.write("large/b", b"b")
        place.pull()
        assert place.found == {"runs/large/b": b"b"}
    else:
        new = os.urandom(LARGE) if change == "another" else large[: LARGE // 8]
        place.write("large", new, OLD_NS + 1)
        place.pull()
        assert place.found == {"runs/large": new}
    assert place.top == ["runs"]


def held(place: Place, change: Any) -> Pulled:
    """Pull, and change files on the node while the transfer stands still."""
    place.fleet.reconnect(0)
    place.link.received, place.link.hold_at = 0, 2 << 20

    def when_held() -> None:
        assert place.link.held.wait(60)
        change()
        place.link.release()

    thread = threading.Thread(target=when_held)
    thread.start()
    try:
        return pulling.Pull(place.fleet, ["runs"], node=0, to=place.to).run()
    finally:
        thread.join(60)


def test_files_that_change_and_another_pull_while_files_are_read(place: Place) -> None:
    """A file that changed is named and sent again."""
    large = place.write("large", bytes(64 << 20))  # more than is on its way
    place.write("other", b"small")
    errors: list[CloudDDPError] = []

    def change() -> None:
        with large.open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"later")
        with pytest.raises(CloudDDPError, match="another pull from this node is writing to") as caught:
            pulling.Pull(place.fleet, ["runs"], node=0, to=place.to).run()
        errors.append(caught.value)

    pulled = held(place, change)
    assert len(errors) == 1
    assert any("changed while it was copied: runs/large" in note for note in pulled.notes)
    place.pull()
    assert place.found == {"runs/large": large.read_bytes(), "runs/other": b"small"}


def test_file_that_becomes_shorter_is_left_out(place: Place) -> None:
    path = place.write("large", bytes(64 << 20))
    for name in ("before", "other"):
        place.write(name, b"small")
    pulled = held(place, lambda: os.truncate(path, 100))
    assert pulled.notes == ("left out runs/large: it became shorter while it was read",)
    assert place.found == {"runs/before": b"small", "runs/other": b"small"}


def test_progress_is_shown_on_lines_where_there_is_no_terminal(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a", bytes(3 << 20))
    with ByteProgress(Console()) as shown, shown.of(0) as progress:
        place.pull(progress=progress)
    assert capsys.readouterr().err == ""  # it took less than that
    place.write("a", bytes(2 << 20), OLD_NS + 1)
    for module, name in ((reporter, "LINE_SECONDS"), (byte_progress, "_SHORT"), (byte_progress, "_EVERY")):
        monkeypatch.setattr(module, name, 0.0)
    with ByteProgress(Console()) as shown, shown.of(0) as progress:
        place.pull(progress=progress)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"pulling from node 0: [0-9.]+ (bytes|[KM]iB) of 2.0 MiB, [0-9.]+ .*/s", lines[1])
    assert lines[-1].startswith("pulling from node 0: 2.0 MiB of 2.0 MiB, ")


def test_node_that_sends_nothing_for_a_while_is_named_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDDDP_TIME_SCALE", "0.02")  # 0.3 s instead of 15
    said: list[str] = []

    def is_reported(text: str) -> bool:
        said.extend(capsys.readouterr().err.splitlines())
        return text in said

    def until(text: str) -> None:
        wait_for(lambda: is_reported(text), text)

    with ByteProgress(Console()) as shown:
        with shown.of(0) as zero, shown.of(1) as one:
            zero(Transfer(total=10, done=10, received=10))  # it has sent everything
            one(Transfer(total=10, done=4, received=4))
            until("node 1 is not responding; waiting for it")
            one(Transfer(total=10, done=10, received=10))
            until("node 1 is responding again")
        with shown.of(2):  # which is silent from the beginning; the others have ended
            until("node 2 is not responding; waiting for it")
    assert len(said) == 3


def test_folder_of_a_transfer_that_is_not_private_is_not_used(place: Place, tmp_path: Path) -> None:
    """It is open to others, or a link."""
    place.write("large", os.urandom(LARGE))
    place.broken(at=LARGE // 2)
    away, kept = tmp_path / "away", place.kept
    for mode in (0o777, 0o700):
        kept.chmod(mode)
        if mode == 0o700:
            kept.rename(away)
            kept.symlink_to(away)
        before = sorted(tmp_path.joinpath("to").iterdir())
        with pytest.raises(CloudDDPError, match="so no results are written there") as refused:
            place.pull()
        assert "remove it" in str(refused.value.hint)
        assert sorted(tmp_path.joinpath("to").iterdir()) == before


def test_links_in_what_has_arrived_are_not_followed(place: Place, tmp_path: Path) -> None:
    """They are results as any others; files that have taken their place on the node are written beside
    them."""
    (place.runs / "a").mkdir(parents=True)
    (place.runs / "b").symlink_to("a")
    place.write("large", os.urandom(LARGE))
    place.broken(at=LARGE // 2)
    (place.runs / "b").unlink()
    place.write("b/x", b"x")
    place.pull()
    assert place.found["runs/b/x"] == b"x"
    assert not (place.to / "runs" / "b").is_symlink()
    assert list((place.to / "runs" / "a").iterdir()) == []
