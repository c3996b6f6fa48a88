"""What the laptop asks a node for, and what it does with it: by what is here already."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.streams import (
    FINISH,
    NOON_NS,
    Item,
    batch,
    end,
    file,
    folder,
    listed,
    missing,
    part,
    record,
    stream,
)

from cloudddp.agent.protocol import file_steps, transfer
from cloudddp.agent.protocol.transfer import UNSEALED, Frames, Wants
from cloudddp.files import Folder
from cloudddp.job.results.incoming import Incoming
from cloudddp.job.results.receive import Receive, Transfer
from cloudddp.job.results.unpack import Notes, Refused, Truncated

SECOND = 10**9
WHOLE = NOON_NS // SECOND * SECOND  # a time that does not identify the contents
LARGE = 1 << 20


@dataclass
class Laptop:
    """The folders of a transfer."""

    at: Path
    wants: Wants | None = None
    unchanged: int = 0  # files
    seen: list[tuple[int, int, int]] = field(default_factory=list)  # total, done and received, as shown
    notes: Notes = field(default_factory=Notes)

    def put(self, name: str, data: bytes, mtime_ns: int = WHOLE, mode: int = 0o644) -> None:
        """Write a file: `target/...`, or `before/...` for what a broken transfer has left."""
        path = self.at / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        path.chmod(mode)

    def receive(self, *pieces: Item | bytes) -> None:
        self.feed(stream(*pieces))

    def feed(self, pieces: Iterable[bytes]) -> None:
        def progress(now: Transfer) -> None:
            self.seen.append((now.total, now.done, now.received))

        for name in ("target", "before", "files"):
            (self.at / name).mkdir(exist_ok=True)
        with (
            Folder.at(self.at / "target") as target,
            Folder.at(self.at / "before") as before,
            Folder.at(self.at / "files") as arrived,
            Receive(
                Incoming(arrived, before),
                target,
                [("runs",)],
                self.notes,
                node=0,
                progress=progress,
            ) as receive,
        ):
            for piece in pieces:
                receive.feed(piece)
                self.unchanged = receive.unchanged
                if answer := next(receive.answer()):
                    (frame,) = Frames(UNSEALED).feed(answer)
                    self.wants = transfer.read_wants(frame) if frame.kind == transfer.WANTS else None
            receive.close()

    def tree(self, name: str) -> dict[str, bytes]:
        base = self.at / name
        return {str(p.relative_to(base)): p.read_bytes() for p in sorted(base.rglob("*")) if p.is_file()}

    def mode(self, name: str) -> int:
        return stat.S_IMODE((self.at / name).stat().st_mode)


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    return Laptop(tmp_path)


def hex_of(data: bytes) -> str:
    return sha256(data).hexdigest()


# -- what it asks for ----------------------------------------------------------------------------------------


def test_nothing_is_asked_for_where_size_and_time_are_the_same(laptop: Laptop) -> None:
    laptop.put("target/runs/a", b"12345", NOON_NS)
    laptop.put("target/runs/b", b"", WHOLE)
    laptop.receive(listed("runs/a", size=5), listed("runs/b", size=0))
    assert laptop.wants is None
    assert laptop.unchanged == 2
    assert laptop.tree("files") == {}
    assert laptop.seen[-1] == (0, 0, 0)


BEGINNING = {"offsets": {"0": 3}, "digests": {"0": hex_of(b"123")}}
# What is here, where, with which time and mode, how long the node's file is -> offsets and digests.
ASKED: dict[str, tuple[tuple[Any, ...], int, dict[str, Any]]] = {
    "another size": (("target/runs/a", b"123", NOON_NS), 5, {}),
    "another time": (("target/runs/a", b"12345", NOON_NS + 1), 5, {}),
    "the same, at a whole second": (
        ("target/runs/a", b"12345"),
        5,
        {"offsets": {"0": 5}, "digests": {"0": hex_of(b"12345")}},
    ),
    "its beginning": (("target/runs/a", b"123"), 5, BEGINNING),
    "its beginning, from a broken transfer": (("before/runs/a", b"123"), 5, BEGINNING),
    "its beginning, unfinished": (("before/runs/a", b"123", NOON_NS, 0o200), 5, BEGINNING),
    "more than it": (("target/runs/a", b"123456"), 5, {}),
    "an empty one": (("target/runs/a", b""), 5, {}),
    "nothing": (("target/runs/other", b"123"), 5, {}),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_is_here_of_a_file_is_named(laptop: Laptop, case: str) -> None:
    here, size, expected = ASKED[case]
    laptop.put(*here)
    with pytest.raises(Truncated):
        laptop.receive(listed("runs/a", size=size))
    assert laptop.wants == Wants(files=(0,), size=size, **expected)
    assert laptop.unchanged == 0


def test_hash_of_a_hidden_file_of_the_user_goes_to_no_node(laptop: Laptop) -> None:
    laptop.put("target/runs/.env", b"123")
    laptop.put("before/runs/.cache", b"123")
    with pytest.raises(Truncated):
        laptop.receive(listed("runs/.env", size=5), listed("runs/.cache", size=5))
    assert laptop.wants == Wants(files=(0, 1), size=10, offsets={"1": 3}, digests={"1": hex_of(b"123")})


# -- what it takes -------------------------------------------------------------------------------------------


def test_file_of_the_target_stays_where_the_node_confirms_its_contents(laptop: Laptop) -> None:
    laptop.put("target/runs/a", b"12345")
    laptop.receive(listed("runs/a", size=5), end(0, b"12345"), FINISH)
    assert laptop.unchanged == 1
    assert laptop.tree("files") == {}
    assert laptop.seen[-1] == (5, 5, 0)


def test_complete_file_of_a_broken_transfer_is_taken(laptop: Laptop) -> None:
    laptop.put("before/runs/a", b"12345")
    laptop.put("before/runs/b", b"12345", NOON_NS)
    laptop.receive(listed("runs/a", size=5), listed("runs/b", size=5), end(0, b"12345"), FINISH)
    assert laptop.tree("files") == {"runs/a": b"12345", "runs/b": b"12345"}
    assert laptop.tree("before") == {}
    assert laptop.unchanged == 0
    assert (laptop.at / "files/runs/a").stat().st_mtime_ns == NOON_NS


@pytest.mark.parametrize("place", ["target", "before"])
def test_beginning_is_continued(laptop: Laptop, place: str) -> None:
    laptop.put(f"{place}/runs/d/a", b"123")
    laptop.receive(listed("runs/d/a", size=5, mode=0o777), part(0, 3, b"45"), end(0, b"12345"), FINISH)
    assert laptop.tree("files") == {"runs/d/a": b"12345"}
    assert laptop.tree(place) == ({"runs/d/a": b"123"} if place == "target" else {})
    assert laptop.mode("files/runs/d/a") == (0o755 if place == "target" else 0o644)
    assert laptop.seen[-1] == (5, 5, 2)


@pytest.mark.parametrize("place", ["target", "before"])
def test_file_with_another_beginning_is_sent_from_its_start(laptop: Laptop, place: str) -> None:
    laptop.put(f"{place}/runs/a", b"abc")
    laptop.receive(listed("runs/a", size=5), part(0, 0, b"12345"), end(0, b"12345"), FINISH)
    assert laptop.tree("files") == {"runs/a": b"12345"}
    assert laptop.seen[-1] == (5, 5, 5)


def test_file_that_has_become_shorter_is_kept_as_it_is_now(laptop: Laptop) -> None:
    laptop.put("target/runs/a", b"abc")
    now = record(0, b"1", settled=False)
    laptop.receive(listed("runs/a", size=5), batch(now, data=b"1"), FINISH)
    assert laptop.tree("files") == {"runs/a": b"1"}
    assert (laptop.at / "files/runs/a").stat().st_mtime_ns == WHOLE


def test_file_that_has_become_empty_is_empty(laptop: Laptop) -> None:
    laptop.receive(listed("runs/a", size=2 * LARGE), end(0), FINISH)
    assert laptop.tree("files") == {"runs/a": b""}


def test_file_that_disappears_while_it_is_sent_is_not_kept(laptop: Laptop) -> None:
    laptop.receive(listed("runs/a", size=5), file("runs/b", b"b"), part(0, 0, b"12"), missing(0), FINISH)
    assert laptop.tree("files") == {"runs/b": b"b"}


def test_unfinished_file_is_marked_and_a_finished_one_is_not(laptop: Laptop) -> None:
    whole = bytes(LARGE)
    with pytest.raises(Truncated, match="in the middle of 'runs/b'"):
        laptop.receive(
            *(listed(f"runs/{name}", size=LARGE) for name in "ab"),
            part(0, 0, whole),
            end(0, whole),
            part(1, 0, b"x"),
        )
    assert (laptop.mode("files/runs/a"), laptop.mode("files/runs/b")) == (0o644, 0o244)


def test_folders_are_made_and_files_that_git_would_act_on_are_not_asked_for(laptop: Laptop) -> None:
    laptop.receive(folder("runs/empty"), listed("runs/.git", size=5))
    assert laptop.wants is None
    assert (laptop.at / "files/runs/empty").is_dir()
    assert "runs/.git" in laptop.notes.lines()[0]


def test_file_that_changed_while_it_was_read_is_noted(laptop: Laptop) -> None:
    laptop.receive(
        *(listed(f"runs/{name}", size=1) for name in ("a", "b")),
        batch(record(0, b"1", changed=True), record(1, b"1"), data=b"11"),
        FINISH,
    )
    (note,) = [line for line in laptop.notes.lines() if "changed" in line]
    assert "runs/a" in note


# -- what no agent sends -------------------------------------------------------------------------------------

SENT_WRONGLY: dict[str, tuple[list[Item | bytes], str]] = {
    "a file twice": ([listed("runs/d/a", size=5), end(0, b"123"), part(0, 3, b"45")], "has come before"),
    "a continued file twice": (
        [listed("runs/d/a", size=5), part(0, 3, b"45"), end(0, b"12345"), part(0, 3, b"45")],
        "not asked for, or has come before",
    ),
    "an offset that was not offered": ([listed("runs/d/a", size=5), part(0, 2, b"345")], "that is not here"),
    "an end before the other parts": (
        [listed("runs/d/a", size=5), part(0, 3, b"4"), end(0, b"12345")],
        "differs",
    ),
    "a gap": ([listed("runs/d/a", size=5), part(0, 3, b"4"), part(0, 5, b"5")], "a part of it is missing"),
    "a missing file in another one": (
        [listed("runs/d/a", size=5), listed("runs/b", size=5), part(0, 3, b"4"), missing(1)],
        "has no end",
    ),
}


@pytest.mark.parametrize("case", SENT_WRONGLY)
def test_contents_that_do_not_fit_what_is_here_are_refused(laptop: Laptop, case: str) -> None:
    pieces, message = SENT_WRONGLY[case]
    laptop.put("before/runs/d/a", b"123")
    with pytest.raises(Refused, match=message):
        laptop.receive(*pieces, FINISH)


@pytest.mark.parametrize("more", [0, 1])
def test_number_of_files_that_are_left_out_has_a_limit(laptop: Laptop, more: int) -> None:
    one = file_steps.left_out("runs/a", "it cannot be read")
    pieces = [one] * (file_steps.MAX_LEFT_OUT + 1 + more)
    if more:
        with pytest.raises(Refused, match="are left out"):
            laptop.feed(pieces)
    else:
        laptop.feed([*pieces, FINISH])


# -- progress ------------------------------------------------------------------------------------------------


def test_progress_is_shown_while_a_file_arrives(laptop: Laptop) -> None:
    laptop.receive(listed("runs/a", size=4), part(0, 0, b"12"), part(0, 2, b"34"), end(0, b"1234"), FINISH)
    assert laptop.seen == sorted(laptop.seen)
    assert {(4, 0, 0), (4, 2, 2), (4, 4, 4)} <= set(laptop.seen)
