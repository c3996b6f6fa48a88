"""`pull` over a real SSH connection: unchanged files are not sent again, and a broken transfer continues."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cutlink import CutLink
from support.harness import wait_for
from support.sshserver import Site
from support.streams import runs

from cloudddp.cli.console import Console
from cloudddp.cluster.connect import PROJECT
from cloudddp.errors import NodeError
from cloudddp.job.results.placing import Pulled
from cloudddp.job.results.pull import pull
from cloudddp.operations import byte_progress, reporter
from cloudddp.operations.byte_progress import ByteProgress
from cloudddp.operations.results import pull_from
from cloudddp.ssh.fleet import Fleet

LARGE = 12 << 20  # bytes
OLD_NS = 1_700_000_000_123_456_789


@dataclass
class Place:
    """A node behind a link, and the folder `to` for its results."""

    fleet: Fleet
    link: CutLink
    runs: Path
    to: Path

    def write(self, name: str, data: bytes, mtime_ns: int = OLD_NS) -> None:
        path = self.runs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(mtime_ns, mtime_ns))

    def pull(self, *, cut_at: int | None = None, **more: Any) -> Pulled:
        """Pull `runs` over a new connection, which breaks after so many bytes."""
        self.fleet.reconnect(0)
        self.link.received, self.link.cut_at = 0, cut_at
        return pull(self.fleet, runs(), node=0, to=self.to, **more)


@pytest.fixture
def place(ssh_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    home = tmp_path / "home"
    (home / PROJECT).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))  # of the commands of the SSH server
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "state"))
    link = CutLink(ssh_site.server().port)
    with contextlib.closing(link), Fleet({0: ssh_site.target(link.port)}) as fleet:
        fleet.connect()
        yield Place(fleet, link, home / PROJECT / "runs", tmp_path / "to")


def test_broken_transfer_continues_and_unchanged_files_are_not_sent_again(place: Place) -> None:
    """`pull` repeats it once itself."""
    sent = {f"a/d{k % 7}/{k}": os.urandom(20_000) for k in range(46)}
    sent |= {os.fsdecode(name): b"x" * 20_000 for name in (b"\xff\xfe", b"caf\xc3\xa9", b"a\nb", b"\x1b[2J")}
    for name, data in {**sent, "b/large": bytes(LARGE)}.items():
        place.write(name, os.urandom(LARGE) if name == "b/large" else data)
    (place.runs / "latest").symlink_to("a")
    with pytest.raises(NodeError, match="what had arrived is kept"):
        place.pull(cut_at=1_000_000 + LARGE // 3)
    (kept,) = place.to.iterdir()
    arrived = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
    assert arrived > LARGE // 6
    cuts = iter([LARGE // 3, None])
    outcome = pull_from(Console(), place.fleet, [0], lambda *_: place.pull(cut_at=next(cuts)))
    assert (outcome.all()[0].files, [*cuts]) == (52, [])
    assert place.link.received < LARGE - LARGE // 3
    assert [path.name for path in place.to.iterdir()] == ["runs"]
    assert (place.to / "runs/latest").readlink() == Path("a")
    for name in (*sent, "b/large"):
        assert (place.to / "runs" / name).read_bytes() == (place.runs / name).read_bytes()
    place.write("a/d0/0", b"changed", OLD_NS + 1)
    again = place.pull()
    assert (again.files, again.size, again.unchanged) == (1, 7, 51)
    assert place.link.received < 20_000


def test_progress_is_shown_on_lines_where_there_is_no_terminal(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a", bytes(3 << 20))
    with ByteProgress(Console()) as shown, shown.of(0) as progress:
        place.pull(progress=progress)
    assert capsys.readouterr().err == ""  # it took less than that
    place.write("a", bytes(2 << 20), OLD_NS + 1)
    for module, name in ((reporter, "LINE_SECONDS"), (byte_progress, "_SHORT"), (byte_progress, "_EVERY")):
        monkeypatch.setattr(module, name, 0.001)
    with ByteProgress(Console()) as shown, shown.of(0) as progress:
        place.pull(progress=progress)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"pulling from node 0: 2.0 MiB of 2.0 MiB, [0-9.]+ .*/s", lines[-1])


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
            zero(10, 10)  # it has sent everything
            one(4, 10)
            until("node 1 is not responding; waiting for it")
            one(10, 10)
            until("node 1 is responding again")
        with shown.of(2):  # which is silent from the beginning; the others have ended
            until("node 2 is not responding; waiting for it")
    assert len(said) == 3
