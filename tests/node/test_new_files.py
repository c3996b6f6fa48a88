"""Files that a job wrote and that were not pulled: which are listed, for which job and until when; what a
pull sends of them, and what it leaves out and names."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import file_modes
from support.agentnode import FOREVER, Node, until
from support.jobs import WRITE
from support.localsync import put
from support.packed import Sent, packed, sent

from agent.files import scan, tree
from agent.files.selection import NewFile, choose
from agent.files.tree import Found
from agent.node import store
from agent.steps.pack import Item, Packer, listings
from cloudddp.agent.protocol import file_steps, results
from cloudddp.agent.protocol.codec import encode
from cloudddp.agent.protocol.file_steps import PackRequest
from cloudddp.agent.protocol.manifest import LINK, Entry
from cloudddp.agent.protocol.phases import JobPhase

LINK_TO = (
    "far = os.path.abspath('../far')\n"
    "def link(target, name):\n"
    "    os.makedirs(os.path.dirname(name) or '.', exist_ok=True); os.symlink(target, name)\n"
)


def ran(node: Node, code: str, job: str = "job-1") -> None:
    node.start(WRITE + LINK_TO + code, job=job)
    assert node.follow(job).state.phase is JobPhase.SUCCEEDED


def new_files(
    node: Node, job: str = "", *, outputs: tuple[str, ...] = ("runs",), scratch: tuple[str, ...] = ()
) -> results.NewFilesReply:
    return node.call(results.NewFilesRequest("p", outputs, scratch, node.id(job) if job else ""))


def counts(found: results.NewFiles) -> dict[str, int]:
    return {path.name: path.files for path in found.paths}


CACHES = ("__pycache__/a.pyc", "pkg/b.pyc", ".pytest_cache/c", "deep/.ipynb_checkpoints/d", ".venv/lib/e")
CACHES += (".conda/lib/e", "src/p.egg-info/PKG-INFO", "venv/lib/e", "data/set", "../elsewhere")
# What a job does, where `old` and `before/old` were there -> what counts as outputs, and besides them.
LISTED: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "outputs apart": (
        "write('runs/a/b'); write('out/x/y', 'four'); write('out/z'); write('model.pt')",
        {"runs": 1},
        {"out/": 2, "model.pt": 1},
    ),
    "no caches, scratch and special files": (
        f"for name in {CACHES!r}: write(name)\nos.mkfifo('pipe'); os.makedirs('empty/folder')",
        {},
        {},
    ),
    "an old mtime": (
        "write('kept'); os.utime('kept', (1, 1)); os.utime('old', (2, 2)); os.rename('old', 'moved')",
        {},
        {"kept": 1, "moved": 1},
    ),
}


@pytest.mark.parametrize("case", LISTED)
def test_what_a_job_wrote_is_listed(node: Node, case: str) -> None:
    code, outputs, others = LISTED[case]
    put(node.project, dict.fromkeys(("old", "before/old"), "old"))
    assert new_files(node).jobs == (), "no job has run"
    ran(node, code)
    reply = new_files(node, scratch=("data/",))
    assert (reply.rank_zero, reply.complete) == (True, True)
    found = [(one.job, counts(one.outputs), counts(one.others)) for one in reply.jobs]
    assert found == ([(node.id(), outputs, others)] if outputs or others else [])


def test_synced_file_counts_only_after_a_job_changed_it(node: Node) -> None:
    node.probe()
    put(node.project, dict.fromkeys(("same.py", "src/changed.py"), "1"))
    ran(node, "write('src/changed.py', 'two'); write('src/new'); write('src/fresh/a')\n")
    manifest = {}
    for name in ("same.py", "src/changed.py"):
        info = (node.project / name).stat()
        manifest[name] = ["f", 0o644, 1, info.st_mtime_ns, ""]
    (node.store / "manifest-p.json").write_text(json.dumps(manifest))
    (node.project / "same.py").chmod(0o644)  # as a sync after the job: a new ctime
    (one,) = new_files(node).jobs
    assert counts(one.others) == {"src/changed.py": 1, "src/new": 1, "src/fresh/": 1}


def test_file_belongs_to_the_latest_job_that_could_have_written_it(node: Node) -> None:
    """Also one in a folder that is moved into the project after a pull."""
    ran(node, "write('runs/one'); write('runs/both'); write(far + '/model.pt')\n")
    ran(node, "write('runs/two'); write('runs/both')\n", job="job-2")
    found_now = {one.job: one.outputs.files for one in new_files(node).jobs}
    assert found_now == {node.id(): 1, node.id("job-2"): 2}
    assert [one.job for one in new_files(node, "job-2").jobs] == [node.id("job-2")]
    node.call(results.PulledRequest("p", (".",), new_files(node).time_ns))
    assert new_files(node).jobs == ()
    ran(node, "os.rename(far, 'runs/final')\n", job="job-3")
    found = {one.job: counts(one.outputs) for one in new_files(node).jobs}
    assert found[node.id("job-3")] == {"runs": 1}


def test_pulled_file_counts_again_only_after_a_change(node: Node) -> None:
    ran(node, "write('runs/a'); write('out/b'); write('out/c'); write('d')\n")
    at = new_files(node).time_ns

    def mark(*names: str) -> None:
        node.call(results.PulledRequest("p", names, at))

    mark("runs/", "out/b")
    (one,) = new_files(node).jobs
    assert (counts(one.outputs), counts(one.others)) == ({}, {"out/": 1, "d": 1})
    file = node.project / "runs" / "a"
    until(lambda: file.write_text("changed") and file.stat().st_ctime_ns >= at)  # its clock has a coarse tick
    assert counts(new_files(node).jobs[0].outputs) == {"runs": 1}
    at = new_files(node).time_ns + 10**9
    mark(".")
    assert new_files(node).jobs == ()


def test_running_job_is_reported(node: Node) -> None:
    node.start(FOREVER)
    assert new_files(node).running == (node.id(),)
    assert new_files(node, "job-2").running == ()


def test_reply_names_a_limited_number_of_paths(node: Node) -> None:
    ran(node, "for k in range(3000): write(f'file {k}' + 'n' * 200)\n")
    (one,) = new_files(node).jobs
    assert (one.others.files, len(one.others.paths)) == (3000, results.MAX_PLACES)


def beside(folder: Path, files: int) -> Path:
    """Return a project with a link to a folder of that many files."""
    put(folder, {f"far/{number}": "" for number in range(files)})
    (folder / "project").mkdir()
    (folder / "project" / "data").symlink_to(folder / "far")
    return folder / "project"


# -- what a pull leaves out: it is not recorded as pulled ----------------------------------------------------


def new(node: Node) -> dict[str, int]:
    found = [path for one in new_files(node).jobs for path in (*one.outputs.paths, *one.others.paths)]
    return {path.name: path.files for path in found}


NOWHERE = ("/proc", "/sys/kernel", "/dev", "/dev/null", "../..", "../.cloudddp", "/nowhere", "a/../b", "..")
# What a job does -> files, and links with their targets, and the beginnings of the notes.
SENT: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "files, and what is none": (
        "import socket; write('runs/1/m.pt'); link('1', 'runs/last'); os.link('runs/1/m.pt', 'runs/hard')\n"
        "os.makedirs('runs/1/.git/objects'); os.mkfifo('runs/pipe')\n"
        "socket.socket(socket.AF_UNIX).bind('runs/socket')",
        {"runs/1/m.pt": "x", "runs/hard": "x", "runs/last": "-> 1"},
        ["left out runs/1/.git", "left out runs/pipe", "left out runs/socket"],
    ),
    # Inside and outside the project, to a folder and a file, with links in it; one inside is kept.
    "links to files": (
        "write(far + '/a'); write(far + '2/b'); write('elsewhere/c'); write('runs/d')\n"
        "link('a', far + '/last'); link(far + '/a', far + '/absolute'); link('../far2', far + '/more')\n"
        "link('../../far', 'runs/far'); link('../../far/a', 'runs/a'); link('../elsewhere', 'runs/in')\n"
        "link('d', 'runs/last')",
        dict.fromkeys(("runs/far/a", "runs/far/more/b", "runs/a", "runs/in/c", "runs/d"), "x")
        | {"runs/far/last": "-> a", "runs/far/absolute": "-> a", "runs/last": "-> d"},
        [],
    ),
    "outputs that are a link": ("write(far + '/a'); link(far, 'runs')", {"runs/a": "x"}, []),
    "links without results": (
        f"for k, to in enumerate({NOWHERE!r}): link(to, f'runs/l{{k}}')\n"
        "os.mkdir('runs/a'); link(os.path.abspath('runs/a'), 'runs/a2'); link('loop', 'runs/loop')",
        {"runs/a2": "-> a", "runs/loop": "-> loop"},
        [f"left out runs/l{k}" for k in range(len(NOWHERE))],
    ),
    "a cycle": (
        "write(far + '/a/x'); link(far + '/b', far + '/a/b'); link('../a', far + '/b/a'); link(far, 'runs')",
        {"runs/a/x": "x", "runs/b/a": "-> ../a", "runs/a/b": "-> ../b"},
        [],
    ),
}


@pytest.mark.parametrize("case", SENT)
def test_files_are_sent_and_links_are_kept_or_followed(node: Node, case: str) -> None:
    code, files, notes = SENT[case]
    ran(node, code)
    found = packed(node, "./runs", "absent")
    assert found.files == files
    assert sorted(note.split(":")[0] for note in found.notes) == [*notes, "missing absent"]
    assert found.lost == {}
    assert new(node).get("runs", 0) >= len(files)


def test_link_to_a_data_set_brings_only_what_the_job_wrote_there(node: Node) -> None:
    far = node.home / "far"
    put(far, dict.fromkeys(("old/1", "old/2", "3"), "old"))
    ran(node, "link(far, 'runs/data'); write(far + '/new/log')")
    found = packed(node)
    assert found.files == {"runs/data/new/log": "x"}
    why = f"left out runs/data: a link to {far}: 3 files below it are older than the first job"
    assert (found.notes, found.lost) == ([why], {})
    assert len(packed(node, "runs/data", all=True).files) == 4


def test_folder_with_more_old_files_than_are_checked_counts_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result may be among those that were not checked."""
    project, out = beside(tmp_path, 4), list[tuple[str, bool]]()

    def left_out(name: str, reason: str, *, counts: bool = True) -> None:
        out.append((name, counts))

    for most in (4, 2):
        monkeypatch.setattr(tree, "MAX_OLD", most)
        assert len([*tree.Tree(str(project), ["."], left_out, since=1 << 62).below(".")]) == 1
    assert out == [("data", False), ("data", True)]


def test_search_among_old_files_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROOT", tmp_path / "state")
    clock = itertools.count()
    monkeypatch.setattr(scan, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = scan.Scan(beside(tmp_path, 5), (), (), 1 << 62, seconds=4)
    assert [*found] == []
    assert found.late


def test_number_of_links_that_are_followed_inside_one_another_is_limited(node: Node) -> None:
    for k in range(1, 13):
        (node.home / f"deep{k}").mkdir()
        (node.home / f"deep{k}" / "next").symlink_to(f"../deep{k + 1}")
    (node.project / "chain").symlink_to(node.home / "deep1")
    assert [*(packed(node, "chain").lost or ())] == ["chain" + "/next" * 8]


def test_what_was_left_out_is_not_pulled(node: Node) -> None:
    ran(node, "write('runs/a'); write('runs/b/1'); write('runs/b/2')")
    at = new_files(node).time_ns + 10**9

    def pulled(name: str, *skipped: tuple[str, str]) -> None:
        node.call(
            results.PulledRequest("p", (name,), at, tuple(results.SkippedFile(*one) for one in skipped))
        )

    pulled("runs", ("runs/b", "no space"), ("runs/gone", "?"))
    reply = new_files(node)
    assert [(one.outputs.files, one.others.files) for one in reply.jobs] == [(2, 0)]
    assert reply.left == (results.SkippedFile("runs/b", "no space"),)
    pulled("runs/b/1")
    assert new(node) == {"runs": 2}, "the folder was left out"
    pulled("runs/b")
    assert new(node) == {}
    pulled("runs", *((f"runs/{k}", "?") for k in range(results.MAX_LEFT)))
    pulled("other", ("other/x", "?"))
    assert new(node) == {"runs": 3}, "more than are remembered: nothing counts as pulled"


def test_unreadable_folder_is_reported(node: Node, tmp_path: Path) -> None:
    ran(node, "write('out/a'); os.chmod('out', 0)")
    node.python = file_modes.with_modes_applied(tmp_path)
    reply = new_files(node)
    (node.project / "out").chmod(0o755)
    assert reply.left == (results.SkippedFile("out", "Permission denied"),)


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
    why = "1048576 MiB, of which 0 MiB were written"
    assert sorted(found.notes) == [
        f"left out {name}: {why}" for name in ("flight-recorder/rank_0", "ranks/1.log")
    ]


def test_log_whose_middle_was_dropped_is_sent_without_the_hole(node: Node) -> None:
    (node.folder() / "ranks").mkdir(parents=True)
    with (node.folder() / "ranks" / "0.log").open("wb") as file:
        file.write(b"a" * 4096)
        file.seek(1 << 40)
        file.write(b"b" * 10_000)
    found = evidence(node)
    assert (found.files, found.notes) == ({"ranks/0.log": "a" * 4096 + "b" * 10_000}, [])


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
    names, entry = [f"{number:05}" for number in range(10_000)], Entry(LINK, 0, 0, 0, target)
    found = list(listings([Item(Found(name, "", info, target), entry, "") for name in names]))
    assert all(len(encode(one)) < file_steps.MAX_LISTING_TEXT for one in found)
    assert [path for one in found for path, _ in one.entries()] == names


def test_more_left_out_files_than_are_named_are_announced_and_an_entry_is_listed_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that changes may yield an entry twice."""
    put(node.project, {"twice/a": "a", "twice/b": "b", "runs/x": "x"})
    for number in range(1200):
        os.mkfifo(node.project / "runs" / str(number))
    found = packed(node)
    assert (found.notes[-1], found.lost) == ("and 951 more", None)
    scandir = os.scandir
    monkeypatch.setenv("HOME", str(node.home))
    twice = lambda path: contextlib.closing(one for one in list(scandir(path)) for _ in range(2))  # noqa: E731
    monkeypatch.setattr(os, "scandir", twice)
    listed = Packer(PackRequest("p", ("twice",))).found()
    assert [item.found.name for item in listed if not item.is_folder] == ["twice/a", "twice/b"]


# -- which new files a pull takes where there are more than its limit ----------------------------------------


MIB = 1 << 20


@pytest.mark.parametrize(
    ("files", "left"),
    [
        # path: MiB; later ones are newer
        ({"a.pt": 2, "b.pt": 2, "c.pt": 2}, {"a.pt"}),
        ({"a.pt": 2, "b.npy": 2, "c.npy": 2}, {"b.npy"}),
        ({"a.pt": 6, "b.pt": 2, "log": 0}, {"a.pt"}),
        ({"dcp/1/.metadata": 0, "dcp/1/__0_0": 3, "dcp/2/.metadata": 0, "dcp/2/__0_0": 3}, {"dcp/1"}),
        ({"hf/checkpoint-5/a": 2, "hf/checkpoint-5/b/c": 2, "hf/checkpoint-10/a": 2}, {"hf/checkpoint-5"}),
        ({"data/set": 3, "runs/a.npy": 2}, {"data/set"}),
        ({"data/set": 3, "a.pt": 1}, set()),
        ({"pulled.pt": 9, "a.pt": 4}, set()),
    ],
)
def test_newest_checkpoints_come_first_and_data_folders_last(files: dict[str, int], left: set[str]) -> None:
    new = []
    for at, (name, size) in enumerate(files.items(), 1):
        info = os.stat_result([0] * 6 + [size * MIB, 0, at, 0])
        new.append(NewFile(0, "", Found(name, name, info), name == "pulled.pt"))
    taken, rest = choose(new, 4 * MIB)
    assert set(rest) == left
    found = [*taken, *(one for below in rest.values() for one in below)]
    assert sorted(one.found.name for one in found) == sorted(files)
