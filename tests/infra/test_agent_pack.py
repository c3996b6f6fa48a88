"""What the agent packs is what the laptop takes: files, folders, links inside; the rest is named and left out."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentnode import AGENT, Node
from hypothesis import given
from hypothesis import strategies as st

from cloudddp import safe_names
from cloudddp.untar import Member, Reader


class Names:
    """Takes a stream as the laptop does; keeps kinds and contents by name."""

    def __init__(self, data: bytes) -> None:
        self.found: dict[str, tuple[str, str | bytes]] = {}
        self._data = bytearray()
        reader = Reader(self)
        reader.feed(data)
        reader.close()

    def begin(self, member: Member) -> None:
        self._member, self._data = member, bytearray()

    def data(self, piece: memoryview) -> None:
        self._data += piece

    def end(self) -> None:
        member = self._member
        self.found[member.name] = (member.kind, member.target if member.kind == "link" else bytes(self._data))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    yield Node(tmp_path / "home")


def pack(node: Node, *names: str) -> tuple[dict[str, tuple[str, str | bytes]], list[str]]:
    done = node.call("pack", "--project=p", *names)
    assert done.returncode == 0, done.stderr
    return Names(done.stdout).found, done.stderr.decode().splitlines()


def test_each_name_of_a_file_with_two_travels_as_a_file(node: Node) -> None:
    runs = node.project / "runs"
    runs.mkdir()
    (runs / "a").write_text("weights")
    os.link(runs / "a", runs / "b")
    found, notes = pack(node, "runs")
    assert found == {"runs": ("folder", b""), "runs/a": ("file", b"weights"), "runs/b": ("file", b"weights")}
    assert notes == []


def test_links_to_what_was_not_asked_for_are_left_out(node: Node) -> None:
    runs = node.project / "runs"
    (runs / "a").mkdir(parents=True)
    for name, target in {
        "inside": "a", "absolute-inside": str(runs / "a"), "absolute": "/etc/passwd", "up": "../train.py",
        "far-up": "../../../x", "after": "a/../b", "loop": "loop",
    }.items():  # fmt: skip
        (runs / name).symlink_to(target)
    found, notes = pack(node, "runs")
    links = {name: target for name, (kind, target) in found.items() if kind == "link"}
    assert links == {"runs/inside": "a", "runs/absolute-inside": "a", "runs/loop": "loop"}
    assert sorted(note.split(":")[0] for note in notes) == [
        "left out runs/absolute", "left out runs/after", "left out runs/far-up", "left out runs/up",
    ]  # fmt: skip


def test_what_is_no_file_is_left_out_and_the_others_come(node: Node) -> None:
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
        "left out runs/checkout/.git", "left out runs/pipe", "left out runs/socket", "missing nowhere",
    ]  # fmt: skip


def test_a_note_is_one_line_whatever_the_name(node: Node) -> None:
    (node.project / "runs").mkdir()
    os.mkfifo(os.fsencode(node.project) + b"/runs/a\nmissing b\x1b[2J\xff")
    _, notes = pack(node, "runs")
    assert notes == ["left out runs/a\\nmissing b\\x1b[2J\\udcff: not a file"]


def test_only_the_first_notes_are_written(node: Node) -> None:
    (node.project / "runs").mkdir()
    for number in range(1010):
        (node.project / "runs" / f"{number:04}").symlink_to("/nowhere")
    _, notes = pack(node, "runs")
    assert len(notes) == 1001
    assert notes[-1] == "left out 10 more"


def agent() -> Any:
    described = importlib.util.spec_from_file_location("node_agent", AGENT)
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


AGENT_MODULE = agent()
words = st.lists(st.sampled_from(["a", "b", "..", ".", "", "runs"]), max_size=6).map("/".join)


@given(st.lists(st.sampled_from(["a", "b", "runs"]), min_size=1, max_size=4), words, st.sampled_from([["runs"], ["."], ["runs/a", "b"]]))  # fmt: skip
def test_agent_and_laptop_agree_which_links_stay_inside(
    name: list[str], target: str, roots: list[str]
) -> None:
    end = safe_names.link_end(tuple(name), target)
    taken = end is not None and safe_names.covers(safe_names.asked(roots), end)
    assert AGENT_MODULE.link_leads_to("/".join(name), target, roots) == taken
