"""The stream of `pack` on the laptop: it takes what the agent sends in pieces of any size, refuses the rest,
and buffers little. Only what was requested is written."""

from __future__ import annotations

import contextlib
import tempfile
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import streams
from support.streams import FINISH, StreamRunner, end, file, folder, link, listed, part, runs, stream, tree

from cloudddp.agent.protocol.manifest import link_end
from cloudddp.errors import CloudDDPError, NodeError, UsageError
from cloudddp.job.results import receive, safe_names
from cloudddp.job.results.placing import Pulled
from cloudddp.job.results.pull import pull

WHOLE = [
    folder("runs/a"),
    link("runs/a/l", "../b"),
    file("runs/b", b"x" * 5000),
    listed("runs/large", size=3000),
    part(2, 0, b"y" * 2000),
    part(2, 2000, b"z" * 1000),
    end(2, b"y" * 2000 + b"z" * 1000),
    FINISH,
]
REFUSED = "node 0 sent results that cloudddp refuses: .*"
slow = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDDDP_HOME", str(tmp_path / "state"))


@pytest.fixture
def to(tmp_path: Path) -> Path:
    """The folder of a job's results, in a project; beside that is a folder into which nothing may be
    written."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "bait").write_text("unharmed\n")
    (tmp_path / "project" / "results" / "job").mkdir(parents=True)
    return tmp_path / "project" / "results" / "job"


def received(to: Path, pieces: Iterable[bytes], *names: str) -> Pulled:
    return pull(StreamRunner(pieces), runs(*names), node=0, to=to)


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


@slow
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=5))
def test_reads_what_the_agent_sends_in_any_pieces(to: Path, sizes: list[int]) -> None:
    to = Path(tempfile.mkdtemp(dir=to))
    received(to, cut(b"".join(stream(*WHOLE)), sizes))
    assert (to / "runs/a/l").readlink() == Path("../b")
    assert (to / "runs/b").read_bytes() == b"x" * 5000
    assert (to / "runs/large").read_bytes() == b"y" * 2000 + b"z" * 1000


@pytest.mark.parametrize("name", [*streams.ATTACKS, *streams.STREAMS])
def test_hostile_stream_is_refused_and_nothing_is_kept(to: Path, name: str) -> None:
    before = tree(to.parents[2])
    tracemalloc.start()
    try:
        with pytest.raises(CloudDDPError, match=(streams.STREAMS | streams.ATTACKS)[name][0]) as refused:
            received(to, streams.attack(name))
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()
    assert "nothing was kept" in str(refused.value)
    assert refused.value.hint
    assert tree(to.parents[2]) == before


@slow
@given(st.data())
def test_changed_stream_is_read_or_refused(to: Path, data: st.DataObject) -> None:
    whole = bytearray(b"".join(stream(*WHOLE)))
    at = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.binary(min_size=1, max_size=12))
    whole[at : at + len(change)] = change
    with contextlib.suppress(CloudDDPError):
        received(to, [bytes(whole)])
    assert (to.parents[2] / "elsewhere" / "bait").read_text() == "unharmed\n"


def test_number_of_files_is_limited(to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "MAX_ENTRIES", 100)
    with pytest.raises(NodeError, match=f"{REFUSED}more than 100 files"):
        received(to, stream(*(file(f"runs/{k}", b"") for k in range(101)), FINISH))


# -- what an agent may send, and this computer does not take ------------------------------------------------


def test_files_of_git_and_cloudddp_are_left_out_with_a_warning(to: Path) -> None:
    items = [*(listed(name, size=1) for name in streams.GUARDED), *map(file, streams.WELCOME), FINISH]
    found = received(to, stream(*items), ".")
    assert {str(p.relative_to(to)) for p in to.rglob("*") if p.is_file()} == set(streams.WELCOME)
    assert len(found.notes) == len(set(streams.GUARDED)) - 1  # two of them are in one folder


def test_notes_about_files_that_are_left_out_are_limited(to: Path) -> None:
    left_out = (listed(f"runs/.cloudddp-{number}") for number in range(5000))
    found = received(to, stream(file("runs/a"), *left_out, FINISH))
    assert (len(found.notes), found.notes[-1], found.left) == (51, "and 4950 more", None)


@pytest.mark.parametrize("case", sorted(streams.COLLISIONS))
def test_first_of_two_members_with_one_path_is_kept(to: Path, case: str) -> None:
    items = streams.COLLISIONS[case]
    runner = StreamRunner([])

    def pieces() -> Iterator[bytes]:
        yield from stream(*(replace(item, contents=None) for item in items))
        sent = [item for item in items if item.kind != streams.FOLDER]
        for number in runner.wants.files:
            yield from sent[number].frames(number)
        yield FINISH

    runner.stdout = pieces()
    found = pull(runner, runs(), node=0, to=to)
    assert any("left out runs/a" in note for note in found.notes)
    assert b"second" not in [path.read_bytes() for path in to.rglob("*") if path.is_file()]


def test_modes_and_times_are_restricted(to: Path) -> None:
    items = [
        file("runs/set-user-id", mode=0o6777),
        file("runs/unreadable", mode=0),
        file("runs/unreadable-and-large", bytes(2 << 20), mode=0),
        file("runs/late", mtime_ns=(1 << 60) - 1),
        file("runs/early", mtime_ns=-(1 << 60)),
        listed("runs/closed", kind=streams.FOLDER, mode=0),
        file("runs/closed/x"),
    ]
    received(to, stream(*items, FINISH))
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (to / "runs").iterdir()}
    assert modes["set-user-id"] == 0o755
    assert modes["unreadable"] == modes["unreadable-and-large"] == 0o600
    assert modes["closed"] == 0o700
    assert (to / "runs/early").stat().st_mtime_ns == 0


def test_link_in_the_target_is_not_followed(to: Path, tmp_path: Path) -> None:
    """A link to a file is replaced, and a link to a folder is left out; nothing is written to their
    targets."""
    away = tmp_path / "elsewhere"
    (to / "runs").mkdir()
    (to / "runs" / "a").symlink_to(away / "bait")
    received(to, stream(file("runs/a", b"new"), FINISH))
    assert (to / "runs" / "a").read_text() == "new"
    assert not (to / "runs" / "a").is_symlink()
    (to / "runs" / "sub").symlink_to(away)
    found = received(to, stream(folder("runs/sub"), file("runs/sub/b"), FINISH))
    assert f"{to}/runs/sub is a link or a file here and a folder in the results; remove it" in found.notes[1]
    assert [one.name for one in found.left or ()] == ["runs/sub", "runs/sub/b"]
    assert (away / "bait").read_text() == "unharmed\n"
    assert [path.name for path in away.iterdir()] == ["bait"]
    assert [path.name for path in to.iterdir()] == ["runs"]


# -- names: which were requested, where a link ends, and what git or cloudddp would act on -------------------


@pytest.mark.parametrize(
    ("names", "paths"),
    [
        (["runs"], (("runs",),)),
        (["runs/", "./runs", "runs/a"], (("runs",),)),
        (["runs/a", "runs/b", "runs-2"], (("runs-2",), ("runs", "a"), ("runs", "b"))),
        (["."], ((),)),
        (["runs", "."], ((),)),
        (["-x", "a b"], (("-x",), ("a b",))),
    ],
)
def test_requested_names(names: list[str], paths: Any) -> None:
    assert set(safe_names.requested(names)) == set(paths)


@pytest.mark.parametrize("name", ["", "/etc", "~/x", "..", "runs/../../x", "runs/../x", "a\0b"])
def test_names_outside_the_project_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a path inside the project") as refused:
        safe_names.requested(["runs", name])
    assert refused.value.message.startswith(repr(name))


@pytest.mark.parametrize(
    ("at", "target", "end"),
    [
        ("runs/l", "a", "runs/a"),
        ("runs/l", "./a//b/", "runs/a/b"),
        ("runs/x/l", "../a", "runs/a"),
        ("runs/x/l", "..", "runs"),
        ("runs/x/l", "../..", ""),
        ("runs/x/l", "../../..", None),
        ("runs/l", "a/../b", None),
        ("runs/l", "a/..", None),
        ("runs/l", "a/b/up/../../elsewhere", None),  # as in CVE-2025-4517
        ("runs/l", "/etc", None),
        ("runs/l", "", None),
        ("l", "..", None),
        ("l", "x", "x"),
    ],
)
def test_link_end(at: str, target: str, end: str | None) -> None:
    found = link_end(tuple(at.split("/")), target)
    assert found == (None if end is None else tuple(end.split("/")) if end else ())


@given(st.text(max_size=12))
def test_git_folder_is_guarded_in_any_spelling(noise: str) -> None:
    ignored = "".join(c for c in noise if safe_names.unicodedata.category(c) in ("Cf", "Cc", "Mn"))
    assert safe_names.guarded(".g" + ignored + "iT. ")
    assert safe_names.guarded(".cloudddp" + noise)
    assert safe_names.guarded("cloudddp-" + ignored + "LOGS")
