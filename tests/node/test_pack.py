"""The agent packs what the laptop accepts: files, folders and links inside; other entries are skipped and
named."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from support.agentnode import Node
from support.packed import sent

from agent.files.tree import Found
from agent.steps.pack import Item, Output, Packer, listings
from cloudddp.agent.protocol import file_steps
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.file_steps import PackRequest
from cloudddp.agent.protocol.manifest import LINK, Entry


def packed(node: Node, *names: str) -> tuple[dict[str, tuple[str, str | bytes]], list[str]]:
    """Return what the laptop gets: kinds, and contents or targets, by name; and the notes."""
    found = sent(node, PackRequest("p", names))
    return found.entries, found.notes


def test_missing_paths_are_skipped(node: Node) -> None:
    (node.project / "runs" / "1").mkdir(parents=True)
    (node.project / "runs" / "1" / "m.pt").write_bytes(b"\x00weights")
    (node.project / "runs" / "latest").symlink_to("1")
    os.link(node.project / "runs" / "1" / "m.pt", node.project / "runs" / "hard")
    found, notes = packed(node, "runs", "absent")
    assert found == {
        "runs": ("folder", b""),
        "runs/1": ("folder", b""),
        "runs/1/m.pt": ("file", b"\x00weights"),
        "runs/hard": ("file", b"\x00weights"),
        "runs/latest": ("link", "1"),
    }
    assert notes == ["missing absent"]


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
    found, notes = packed(node, "runs")
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
        found, notes = packed(node, "./runs", "nowhere")
    assert sorted(found) == ["runs", "runs/checkout", "runs/checkout/x"]
    assert sorted(note.split(":")[0] for note in notes) == [
        "left out runs/checkout/.git",
        "left out runs/pipe",
        "left out runs/socket",
        "missing nowhere",
    ]


def evidence(node: Node) -> tuple[dict[str, tuple[str, str | bytes]], list[str]]:
    found = sent(node, PackRequest("p", ("ranks", "flight-recorder"), node.id()))
    return found.entries, found.notes


def test_sparse_file_in_the_folder_of_a_job_is_left_out_and_named(node: Node) -> None:
    """1 TiB that takes no space on the node would fill this computer's disk."""
    (node.folder() / "ranks").mkdir(parents=True)
    (node.folder() / "flight-recorder").mkdir()
    (node.folder() / "ranks" / "0.log").write_bytes(b"a line\n")
    for name in ("flight-recorder/rank_0", "ranks/1.log"):
        with (node.folder() / name).open("wb") as file:
            file.truncate(1 << 40)
    found, notes = evidence(node)
    assert found["ranks/0.log"] == ("file", b"a line\n")
    assert not {"flight-recorder/rank_0", "ranks/1.log"} & found.keys()
    assert notes == [
        f"left out {name}: 1048576 MiB, of which 0 MiB were written"
        for name in ("ranks/1.log", "flight-recorder/rank_0")
    ]


def test_log_whose_middle_was_dropped_is_sent_without_the_hole(node: Node) -> None:
    (node.folder() / "ranks").mkdir(parents=True)
    with (node.folder() / "ranks" / "0.log").open("wb") as file:
        file.write(b"a" * 4096)
        file.seek(1 << 40)
        file.write(b"b" * 10_000)
    found, notes = evidence(node)
    assert found["ranks/0.log"] == ("file", b"a" * 4096 + b"b" * 10_000)
    assert notes == ["missing flight-recorder"]


def test_file_with_a_time_that_no_frame_holds_is_sent(node: Node) -> None:
    for name, size in (("small", 1), ("large", 2 << 20)):
        path = node.project / name
        path.write_bytes(bytes(size))
        os.utime(path, (1 << 33, 1 << 33))  # the year 2242; another file system has later ones
    found = sent(node, PackRequest("p", (".",)))
    assert sorted(found.files) == ["large", "small"]
    assert found.records["large"].mtime_ns % 10**9 == 0, "so that the contents are compared"


def test_path_that_is_too_long_to_be_read_is_named(node: Node) -> None:
    half = Path(*["f" * 200] * 11)
    (node.project / half).mkdir(parents=True)
    (node.project / half / "result.pt").write_bytes(b"weights")
    (node.project / "runs" / half).mkdir(parents=True)
    (node.project / half.parts[0]).rename(node.project / "runs" / half / "rest")
    out = sent(node, PackRequest("p", ("runs",))).out
    assert [(one.reason, one.counts) for one in out] == [("File name too long", True)]


def test_long_targets_of_links_are_spread_over_listings() -> None:
    info, target = os.stat_result((0o120777, *[0] * 9)), "t" * 4000
    items = [
        Item(Found(f"{number:05}", "", info, target), Entry(LINK, 0, 0, 0, target))
        for number in range(10_000)
    ]
    found = list(listings(items))
    assert all(len(encode(one)) < file_steps.MAX_LEFT_OUT_TEXT for one in found)
    assert [path for one in found for path, _ in one.entries()] == [item.found.name for item in items]


def test_entry_that_a_changing_folder_yields_twice_is_listed_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (node.project / name).write_text(name)
    scandir = os.scandir
    monkeypatch.setenv("HOME", str(node.home))
    monkeypatch.setattr(
        os, "scandir", lambda path: contextlib.closing(one for one in list(scandir(path)) for _ in range(2))
    )
    packer = Packer(Output(), PackRequest("p", (".",)))
    assert [item.found.name for item in packer.found()] == ["a", "b"]
