"""Where the files of a pull go, and whether they fit: those of another job, and those that are here."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.streams import FINISH, NOON_NS, StreamRunner, listed, record, runs, stream, whole

from cloudddp.agent.protocol import transfer
from cloudddp.agent.protocol.manifest import FILE, LINK, Entry
from cloudddp.agent.protocol.transfer import UNSEALED, Listing
from cloudddp.errors import CloudDDPError
from cloudddp.job.results import placing
from cloudddp.job.results.pull import pull

OTHER = "20261128-100000-aaaa"
DATA = b"12345"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "state"))


def here(path: Path, data: bytes, mtime_ns: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def test_file_of_another_job_is_compared_with_what_is_in_its_folder(tmp_path: Path) -> None:
    to, other = tmp_path / "results/job", tmp_path / "results/other"
    here(other / "runs/newer", b"mine!", NOON_NS + 1)
    here(other / "runs/same", DATA, NOON_NS)
    here(to / "runs/elsewhere", DATA, NOON_NS)
    (to / "runs/link").symlink_to("same")
    names = {
        name: Entry(FILE, 0o644, 5, NOON_NS, "") for name in ("runs/newer", "runs/same", "runs/elsewhere")
    }
    listing = Listing({**names, "runs/link": Entry(LINK, 0, 0, NOON_NS, "same")}, job=OTHER)
    pieces = [
        listing.frame(UNSEALED),
        transfer.frame(UNSEALED, transfer.DONE),
        whole(0, DATA),
        whole(2, DATA),
    ]
    runner = StreamRunner([*pieces, FINISH])
    found = pull(runner, runs(), node=0, to=to, places={OTHER: other})
    assert runner.wants.files == (0, 2)
    assert found.notes == ("replaced runs/newer, which was newer on this computer",)
    assert (found.unchanged, found.others) == (1, {OTHER: 3})
    assert {path.name: path.read_bytes() for path in (other / "runs").iterdir()} == dict.fromkeys(
        ("newer", "same", "elsewhere", "link"), DATA
    )
    assert (other / "runs/link").is_symlink()


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        ("same", 5, ""),
        ("continued", 9, ""),  # its first 5 bytes are here, and have to be copied
        ("continued", 11, "runs/continued is 11 MiB"),
        ("new", 11, "runs/new is 11 MiB"),
    ],
)
def test_what_is_here_needs_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: int, problem: str
) -> None:
    at, path, data = NOON_NS // 10**9 * 10**9, tmp_path / "to/runs" / name, DATA + b"6" * (size - 5)
    if name != "new":
        here(path, DATA, at)
    free = SimpleNamespace(f_bavail=1 if name == "same" else 10, f_frsize=1)
    monkeypatch.setattr(placing, "MIB", 1)
    monkeypatch.setattr(os, "fstatvfs", lambda _descriptor: free)
    rest = transfer.end(UNSEALED, record(0, data, mtime_ns=at), data[5:])
    runner = StreamRunner([*stream(listed(f"runs/{name}", size=size, mtime_ns=at)), rest, FINISH])
    with pytest.raises(CloudDDPError, match=problem) if problem else contextlib.nullcontext():
        pull(runner, runs(), node=0, to=tmp_path / "to")
    assert problem or path.read_bytes() == data
