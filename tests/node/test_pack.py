"""The agent packs what the laptop accepts: files, folders and links inside; other entries are skipped and
named."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from support.agentnode import Node
from support.packed import Sent, packed, sent

from agent.files.tree import Found
from agent.steps.pack import Item, Packer, listings
from cloudddp.agent.protocol import file_steps
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.file_steps import PackRequest
from cloudddp.agent.protocol.manifest import LINK, Entry


def evidence(node: Node) -> Sent:
    return sent(node, PackRequest("p", ("ranks", "flight-recorder"), node.id()))


def test_sparse_file_in_the_folder_of_a_job_is_left_out_and_named(node: Node) -> None:
    """1 TiB that takes no space on the node would fill this computer's disk."""
    (node.folder() / "ranks").mkdir(parents=True)
    (node.folder() / "flight-recorder").mkdir()
    (node.folder() / "ranks" / "0.log").write_bytes(b"a line\n")
    for name in ("flight-recorder/rank_0", "ranks/1.log"):
        with (node.folder() / name).open("wb") as file:
            file.truncate(1 << 40)
    found = evidence(node)
    assert found.files == {"ranks/0.log": "a line\n"}
    assert sorted(found.notes) == [
        f"left out {name}: 1048576 MiB, of which 0 MiB were written"
        for name in ("flight-recorder/rank_0", "ranks/1.log")
    ]


def test_log_whose_middle_was_dropped_is_sent_without_the_hole(node: Node) -> None:
    (node.folder() / "ranks").mkdir(parents=True)
    with (node.folder() / "ranks" / "0.log").open("wb") as file:
        file.write(b"a" * 4096)
        file.seek(1 << 40)
        file.write(b"b" * 10_000)
    found = evidence(node)
    assert found.files == {"ranks/0.log": "a" * 4096 + "b" * 10_000}
    assert found.notes == []


def test_file_with_a_time_that_no_frame_holds_is_sent(node: Node) -> None:
    for name, size in (("small", 1), ("large", 2 << 20)):
        path = node.project / name
        path.write_bytes(bytes(size))
        os.utime(path, (1 << 33, 1 << 33))  # the year 2242; another file system has later ones
    found = packed(node, ".")
    assert sorted(found.files) == ["large", "small"]
    assert found.times["large"] % 10**9 == 0, "so that the contents are compared"


def test_path_that_is_too_long_to_be_read_is_named(node: Node) -> None:
    half = Path(*["f" * 200] * 11)
    (node.project / half).mkdir(parents=True)
    (node.project / half / "result.pt").write_bytes(b"weights")
    (node.project / "runs" / half).mkdir(parents=True)
    (node.project / half.parts[0]).rename(node.project / "runs" / half / "rest")
    found = packed(node, "runs")
    assert [*(found.lost or {}).values()] == ["File name too long"]


def test_long_targets_of_links_are_spread_over_listings() -> None:
    info, target = os.stat_result((0o120777, *[0] * 9)), "t" * 4000
    items = [
        Item(Found(f"{number:05}", "", info, target), Entry(LINK, 0, 0, 0, target), "")
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
    packer = Packer(PackRequest("p", (".",)))
    assert [item.found.name for item in packer.found()] == ["a", "b"]
