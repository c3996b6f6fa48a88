"""The agent packs what the laptop accepts: files, folders and links inside; other entries are skipped and
named."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.agentnode import Node

from agent.files.tree import leads_to
from cloudddp.agent.protocol import files
from cloudddp.agent.protocol.files import End, Entry, Have, LeftOut, PackRequest, Total
from cloudddp.job.results import safe_names
from cloudddp.job.results.file_stream import Reader


class Names:
    """Takes a stream as the laptop does; keeps kinds and contents by name."""

    def __init__(self, data: bytes) -> None:
        self.found: dict[str, tuple[str, str | bytes]] = {}
        self.entries: dict[str, Entry] = {}
        self.ends: dict[str, End] = {}
        self.numbers: list[int] = []
        self.totals: list[Total] = []
        self.notes: list[str] = []
        self._data = bytearray()
        reader = Reader(self)
        reader.feed(data)
        reader.close()

    def left_out(self, one: LeftOut) -> None:
        self.notes.append(f"left out {one.name}: {one.reason}")

    def same(self, numbers: tuple[int, ...]) -> None:
        self.numbers += numbers

    def total(self, total: Total) -> None:
        self.totals.append(total)

    def begin(self, entry: Entry) -> None:
        self._entry, self._data = entry, bytearray()
        self.entries[entry.name] = entry
        if entry.kind != files.FILE:
            kind = "link" if entry.kind == files.LINK else "folder"
            self.found[entry.name] = (kind, entry.target if entry.kind == files.LINK else b"")

    def data(self, piece: memoryview) -> None:
        self._data += piece

    def end(self, end: End) -> None:
        self.ends[self._entry.name] = end
        self.found[self._entry.name] = ("file", bytes(self._data))


def packed(node: Node, *names: str, have: tuple[Have, ...] = ()) -> tuple[Names, list[str]]:
    done = node.run(PackRequest("p", names, have=have))
    assert done.returncode == 0, done.stderr
    names = Names(done.stdout)
    return names, [*done.stderr.decode().splitlines(), *names.notes]


def pack(node: Node, *names: str) -> tuple[dict[str, tuple[str, str | bytes]], list[str]]:
    found, notes = packed(node, *names)
    return found.found, notes


def test_missing_paths_are_skipped(node: Node) -> None:
    (node.project / "runs" / "1").mkdir(parents=True)
    (node.project / "runs" / "1" / "m.pt").write_bytes(b"\x00weights")
    (node.project / "runs" / "latest").symlink_to("1")
    found, notes = pack(node, "runs", "absent")
    assert found == {
        "runs": ("folder", b""),
        "runs/1": ("folder", b""),
        "runs/1/m.pt": ("file", b"\x00weights"),
        "runs/latest": ("link", "1"),
    }
    assert notes == ["missing absent"]


def test_hard_links_are_sent_as_separate_files(node: Node) -> None:
    runs = node.project / "runs"
    runs.mkdir()
    (runs / "a").write_text("weights")
    os.link(runs / "a", runs / "b")
    found, notes = pack(node, "runs")
    assert found == {"runs": ("folder", b""), "runs/a": ("file", b"weights"), "runs/b": ("file", b"weights")}
    assert notes == []


def test_links_to_other_paths_are_left_out(node: Node) -> None:
    runs = node.project / "runs"
    (runs / "a").mkdir(parents=True)
    for name, target in {
        "inside": "a",
        "absolute-inside": str(runs / "a"),
        "absolute": "/nowhere",
        "up": "../train.py",
        "far-up": "../../../x",
        "after": "a/../b",
        "loop": "loop",
    }.items():
        (runs / name).symlink_to(target)
    found, notes = pack(node, "runs")
    links = {name: target for name, (kind, target) in found.items() if kind == "link"}
    assert links == {"runs/inside": "a", "runs/absolute-inside": "a", "runs/loop": "loop"}
    assert sorted(note.split(":")[0] for note in notes) == [
        "left out runs/absolute",
        "left out runs/after",
        "left out runs/far-up",
        "left out runs/up",
    ]


def test_special_files_are_left_out(node: Node) -> None:
    runs = node.project / "runs"
    (runs / "checkout" / ".git" / "objects").mkdir(parents=True)
    (runs / "checkout" / "x").write_text("x")
    os.mkfifo(runs / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        before = Path.cwd()
        os.chdir(runs)  # a socket's path is short
        try:
            listener.bind("socket")
        finally:
            os.chdir(before)
        found, notes = pack(node, "./runs", "nowhere")
    assert sorted(found) == ["runs", "runs/checkout", "runs/checkout/x"]
    assert sorted(note.split(":")[0] for note in notes) == [
        "left out runs/checkout/.git",
        "left out runs/pipe",
        "left out runs/socket",
        "missing nowhere",
    ]


words = st.lists(st.sampled_from(["a", "b", "..", ".", "", "runs"]), max_size=6).map("/".join)


@given(
    st.lists(st.sampled_from(["a", "b", "runs"]), min_size=1, max_size=4),
    words,
    st.sampled_from([["runs"], ["."], ["runs/a", "b"]]),
)
def test_agent_and_laptop_accept_the_same_links(name: list[str], target: str, roots: list[str]) -> None:
    end = safe_names.link_end(tuple(name), target)
    taken = end is not None and safe_names.covers(safe_names.requested(roots), end)
    assert leads_to("/".join(name), target, roots) == taken


def evidence(node: Node) -> tuple[dict[str, tuple[str, str | bytes]], list[str]]:
    done = node.run(PackRequest("p", ("ranks", "flight-recorder"), node.id()))
    assert done.returncode == 0, done.stderr
    names = Names(done.stdout)
    return names.found, [*done.stderr.decode().splitlines(), *names.notes]


def test_sparse_file_in_the_folder_of_a_job_is_left_out_and_named(node: Node) -> None:
    """1 TiB that takes no space on the node would fill this computer's disk."""
    (node.folder() / "ranks").mkdir(parents=True)
    (node.folder() / "flight-recorder").mkdir()
    (node.folder() / "ranks" / "0.log").write_bytes(b"a line\n")
    with (node.folder() / "flight-recorder" / "rank_0").open("wb") as file:
        file.truncate(1 << 40)
    found, notes = evidence(node)
    assert found["ranks/0.log"] == ("file", b"a line\n")
    assert "flight-recorder/rank_0" not in found
    assert notes == ["left out flight-recorder/rank_0: 1048576 MiB, of which 0 MiB were written"]


def test_log_whose_middle_was_dropped_is_sent_without_the_hole(node: Node) -> None:
    (node.folder() / "ranks").mkdir(parents=True)
    with (node.folder() / "ranks" / "0.log").open("wb") as file:
        file.write(b"a" * 4096)
        file.seek(1 << 40)
        file.write(b"b" * 10_000)
    found, notes = evidence(node)
    middle = b"\n[cloudddp: %d bytes of this log were dropped here]\n" % ((1 << 40) - 4096)
    assert found["ranks/0.log"] == ("file", b"a" * 4096 + middle + b"b" * 10_000)
    assert notes == ["missing flight-recorder"]
