"""Before ranks start, what jobs wrote on some nodes only is copied to the others, also where nobody named
it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from support.agentnode import Node
from support.gangs import Gangs
from support.jobs import WRITE

from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.results import NewFilesRequest
from cloudddp.agent.protocol.sharing import SnapshotSearch

BY_DEFAULT = SnapshotSearch("p", (), scratch=("data",), limit=1 << 20)
FINDS = """
import os, pathlib
kept = {p.as_posix(): p.read_bytes()[:9].decode() for p in sorted(pathlib.Path().rglob('*')) if p.is_file() and p.suffix != '.py'}
print('finds', kept, flush=True)
"""  # noqa: E501


def saves(**files: str) -> str:
    written = {name.replace("__", "/"): text for name, text in files.items()}
    return f"{FINDS}{WRITE}for file in {written}.items(): write(*file)\n"


def run(
    job: Gangs, name: str, *scripts: str, search: SnapshotSearch | None = BY_DEFAULT, **more: object
) -> list[str]:
    """Run a job to its end; return what each rank found when it started last."""
    job.start(*scripts, job=name, snapshots=search, **more)
    for node in job.nodes:
        assert node.ended(name).phase is JobPhase.SUCCEEDED
    job.gone()
    logs = [node.folder(name) / "ranks" / f"{node.number}.log" for node in job.nodes]
    return [log.read_text().rpartition("finds ")[2].splitlines()[0] for log in logs]


def new(node: Node, present: Collection[str]) -> list[str]:
    reply = node.call(NewFilesRequest("p", (), (), present=tuple(present)))
    return sorted(p.name for one in reply.jobs for p in one.outputs.paths if not p.name.endswith(".py"))


def test_next_job_finds_what_one_node_wrote_on_all(pair: Gangs) -> None:
    """Also its next version, although the first one was copied. Each node keeps what it wrote itself, and
    what was deleted does not come back from its copy."""
    of_0 = saves(snapshot="one", old="one", key="one", out__log="of 0") + "os.chmod('key', 0o600)\n"
    run(pair, "job-1", of_0, saves(out__log="of node 1", data__big="x"))
    found = run(pair, "job-2", saves(snapshot="two") + "os.unlink('old')\n", FINDS)
    assert found == [
        "{'key': 'one', 'old': 'one', 'out/log': 'of 0', 'snapshot': 'one'}",
        "{'data/big': 'x', 'key': 'one', 'old': 'one', 'out/log': 'of node 1', 'snapshot': 'one'}",
    ]
    assert "which only some nodes have, from node 0 to node 1" in pair.notes(1, "job-2")
    assert "each node keeps its own version: " in pair.notes(0, "job-2")
    assert (pair[1].project / "key").stat().st_mode & 0o777 == 0o600
    first, second = run(pair, "job-3", FINDS, FINDS)
    assert "old" not in first
    assert "'snapshot': 'two'" in second
    text = "node 1 has copies of files that node 0 no longer has: old"
    assert text in pair.notes(1, "job-3")


def test_copy_is_no_result_while_its_writer_is_there_and_replaces_one_that_is_gone(pair: Gangs) -> None:
    """As `resume` does with a node that AWS has taken: the new one has nothing of the old one's disk."""
    run(pair, "job-1", saves(snapshot="one"), FINDS)
    run(pair, "job-2", FINDS, FINDS)
    assert new(pair[1], ("i-0", "i-1")) == []
    assert new(pair[1], ("i-1",)) == ["snapshot"]
    assert new(pair[0], ("i-0", "i-1")) == ["snapshot"]
    (pair[0].project / "snapshot").unlink()
    first, second = pair.gang.peers
    pair.gang = replace(pair.gang, peers=(replace(first, id="i-2"), second))
    assert run(pair, "job-3", saves(snapshot="three"), FINDS) == ["{'snapshot': 'one'}"] * 2
    assert run(pair, "job-4", FINDS, FINDS) == ["{'snapshot': 'three'}"] * 2
    assert new(pair[1], ("i-1", "i-2")) == []
    (pair[1].project / "snapshot").write_text("changed here")
    assert new(pair[1], ("i-1", "i-2")) == ["snapshot"]


def test_large_damaged_and_future_files_are_not_copied(pair: Gangs, tmp_path: Path) -> None:
    """More than the limit, damaged and future files, files in the way, and anything but the outputs where
    these are set."""
    files = {"kept__a": "one", "small": "s", "a__model": "m" * (1 << 20), "late": "x", "snapshot": "one"}
    damaged = {"broken__pt": "PK", "old__pt": "pickle"}
    code = saves(**files, out__a="one", link__a="two") + "os.utime('late', (9e9, 9e9))\n"
    run(pair, "job-1", code + saves(**damaged).replace("/pt", ".pt"), FINDS)
    (pair[1].project / "out").write_text("a file")
    (pair[1].project / "snapshot").write_text("by setup")
    (tmp_path / "elsewhere").mkdir()
    (pair[1].project / "link").symlink_to(tmp_path / "elsewhere")
    found = run(pair, "job-2", FINDS, FINDS, search=replace(BY_DEFAULT, outputs=("./kept/",)))
    assert found[1] == "{'kept/a': 'one', 'out': 'a file', 'snapshot': 'by setup'}"
    found = run(pair, "job-3", FINDS, FINDS)
    assert found[1] == (
        "{'kept/a': 'one', 'old.pt': 'pickle', 'out': 'a file', 'small': 's', 'snapshot': 'by setup'}"
    )
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert "node 0: not copied to other nodes: a/model. The limits are [job] share_mb = 1 and" in pair.notes(
        0, "job-3"
    )
    for text in (
        "not copied to node 1: link/a and 1 more; link exists there",
        "node 0: broken.pt is damaged, or no longer exists; it was not copied",
        "not copied from node 0: late; the time of 'late' is more than a day in the future",
    ):
        assert text in pair.notes(1, "job-3")


def test_restarted_ranks_find_what_one_node_wrote(pair: Gangs) -> None:
    """With nobody connected, and nothing is looked for before the first start."""
    fails = saves(snapshot="one") + "if os.environ['CLOUDDDP_ATTEMPT'] == '0': raise SystemExit(3)\n"
    waits = FINDS + "import time\nif os.environ['CLOUDDDP_ATTEMPT'] == '0': time.sleep(600)\n"
    search = replace(BY_DEFAULT, restarts_only=True)
    assert run(pair, "job-1", fails, waits, search=search, retries=1) == ["{'snapshot': 'one'}"] * 2
