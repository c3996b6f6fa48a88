"""Before ranks start, what jobs wrote on some nodes only is copied to the others, also where nobody named
it."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from support.agentnode import Node, until
from support.gangs import Gangs, Make

from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.results import NewFilesRequest
from cloudddp.agent.protocol.snapshots import SnapshotSearch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

BY_DEFAULT = SnapshotSearch("p", (), scratch=("data",), limit=1 << 20)
FINDS = """
import os, pathlib
kept = {p.as_posix(): p.read_bytes()[:9].decode() for p in sorted(pathlib.Path().rglob('*')) if p.is_file() and p.suffix != '.py'}
print('finds', kept, flush=True)
"""  # noqa: E501
SAVES = (
    "import os\nfor name, text in {}.items():\n    os.makedirs(os.path.dirname(name) or '.', "
    "exist_ok=True)\n    open(name, 'w').write(text)\n"
)


def saves(**files: str) -> str:
    return FINDS + SAVES.format({name.replace("__", "/"): text for name, text in files.items()})


def run(
    job: Gangs, name: str, *scripts: str, search: SnapshotSearch | None = BY_DEFAULT, **more: object
) -> list[str]:
    """Run a job to its end; return what each rank found when it started last."""
    job.start(*scripts, job=name, snapshots=search, **more)
    for node in job.nodes:
        until(lambda node=node: node.state(name).phase.ended)  # type: ignore[misc]
        assert node.state(name).phase is JobPhase.SUCCEEDED
    job.gone()
    return [log(node, name).rpartition("finds ")[2].splitlines()[0] for node in job.nodes]


def log(node: Node, name: str) -> str:
    return (node.folder(name) / "ranks" / f"{node.number}.log").read_text()


def notes(job: Gangs, node: int, name: str) -> str:
    return log(job[node], name) + (job[node].folder(name) / "launcher.log").read_text()


def new(node: Node, present: Collection[str]) -> list[str]:
    reply = node.call(NewFilesRequest("p", (), (), present=tuple(present)))
    return sorted(p.name for one in reply.jobs for p in one.outputs.paths if not p.name.endswith(".py"))


def replace_writer(pair: Gangs) -> None:
    """Let another instance take the place of node 0, as `resume` does: it has nothing of the old one's
    disk."""
    (pair[0].project / "snapshot").unlink()
    first, second = pair.gang.peers
    pair.gang = replace(pair.gang, peers=(replace(first, id="i-2"), second))


@pytest.fixture
def pair(gangs: Make) -> Gangs:
    job = gangs(2)
    job.gang = replace(job.gang, peers=tuple(replace(peer, id=f"i-{peer.node}") for peer in job.gang.peers))
    return job


def test_next_job_finds_what_one_node_wrote_on_all(pair: Gangs) -> None:
    """Also its next version, although the first one was copied; and each node keeps what it wrote itself."""
    run(pair, "job-1", saves(snapshot="one", out__log="of 0"), saves(out__log="of 1", data__big="x"))
    assert run(pair, "job-2", saves(snapshot="two"), FINDS) == [
        "{'out/log': 'of 0', 'snapshot': 'one'}",
        "{'data/big': 'x', 'out/log': 'of 1', 'snapshot': 'one'}",
    ]
    assert "copying snapshot, 0.0 MB, which only some nodes have, from node 0 to node 1" in notes(
        pair, 1, "job-2"
    )
    found = run(pair, "job-3", FINDS, FINDS)
    assert "'snapshot': 'two'" in found[1]


def test_copy_is_no_result_while_its_writer_is_there(pair: Gangs) -> None:
    run(pair, "job-1", saves(snapshot="one"), FINDS)
    run(pair, "job-2", FINDS, FINDS)
    assert new(pair[1], ("i-0", "i-1")) == []
    assert new(pair[1], ("i-1",)) == ["snapshot"]
    assert new(pair[0], ("i-0", "i-1")) == ["snapshot"]
    (pair[1].project / "snapshot").write_text("changed here")
    assert new(pair[1], ("i-0", "i-1")) == ["snapshot"]


def test_deleted_file_does_not_come_back_from_its_copy(pair: Gangs) -> None:
    run(pair, "job-1", saves(old="one", snapshot="one"), FINDS)
    run(pair, "job-2", FINDS + "os.unlink('old')\n", FINDS)
    assert "old" not in run(pair, "job-3", FINDS, FINDS)[0]


def test_writer_that_was_replaced_writes_a_newer_version(pair: Gangs) -> None:
    run(pair, "job-1", saves(snapshot="one"), FINDS)
    run(pair, "job-2", FINDS, FINDS)
    replace_writer(pair)
    run(pair, "job-3", saves(snapshot="three"), FINDS)
    assert run(pair, "job-4", FINDS, FINDS) == ["{'snapshot': 'three'}"] * 2


def test_versions_that_differ_and_copies_of_deleted_files_are_named(pair: Gangs) -> None:
    run(pair, "job-1", saves(old="one", log="of 0"), saves(log="of node 1"))
    run(pair, "job-2", FINDS + "os.unlink('old')\n", FINDS)
    assert "each node keeps its own version: " in notes(pair, 0, "job-2")
    run(pair, "job-3", FINDS, FINDS)
    text = "node 1 has copies of files that node 0 does not have any more: old"
    assert text in notes(pair, 1, "job-3")


def test_permissions_are_copied(pair: Gangs) -> None:
    run(pair, "job-1", saves(key="one") + "os.chmod('key', 0o600)\n", FINDS)
    run(pair, "job-2", FINDS, FINDS)
    assert (pair[1].project / "key").stat().st_mode & 0o777 == 0o600


def test_names_that_exceed_a_message_are_left_out(pair: Gangs) -> None:
    """Each of their characters takes 12 bytes there."""
    many = "for k in range(2000): open('\U0001f600' * 55 + str(k), 'w').close()\n"
    run(pair, "job-1", "print('finds')\n" + many, "print('finds')")
    run(pair, "job-2", "print('finds')", "print('finds')")
    assert "node 0: not copied to other nodes: " in notes(pair, 0, "job-2")
    assert 100 < len(list(pair[1].project.iterdir())) < 2000, notes(pair, 1, "job-2")


def test_copy_replaces_a_writer_that_is_gone(pair: Gangs) -> None:
    """As `resume` does with a node that AWS has taken: the new one has nothing."""
    run(pair, "job-1", saves(snapshot="one"), FINDS)
    run(pair, "job-2", FINDS, FINDS)
    replace_writer(pair)
    assert run(pair, "job-3", FINDS, FINDS) == ["{'snapshot': 'one'}"] * 2
    assert new(pair[0], ("i-1", "i-2")) == []
    assert new(pair[1], ("i-1", "i-2")) == ["snapshot"]


def test_file_that_no_job_wrote_is_not_replaced(pair: Gangs) -> None:
    own = pair[1].project / "snapshot"
    own.write_text("by setup")
    run(pair, "job-1", saves(snapshot="one"), FINDS)
    assert run(pair, "job-2", FINDS, FINDS)[1] == "{'snapshot': 'by setup'}"


def test_only_outputs_are_copied_where_they_are_set(pair: Gangs) -> None:
    run(pair, "job-1", saves(out__a="one", other="two"), FINDS)
    found = run(pair, "job-2", FINDS, FINDS, search=replace(BY_DEFAULT, outputs=("./out/",)))
    assert found[1] == "{'out/a': 'one'}"


def test_no_more_is_copied_than_the_limit(pair: Gangs) -> None:
    run(pair, "job-1", saves(small="s", a__model="m" * (1 << 20)), FINDS)
    assert run(pair, "job-2", FINDS, FINDS)[1] == "{'small': 's'}"
    text = "node 0: not copied to other nodes: a/model. The limits are [job] share_mb = 1 and"
    assert text in notes(pair, 0, "job-2")


def test_what_is_in_the_way_is_not_removed(pair: Gangs, tmp_path: Path) -> None:
    run(pair, "job-1", saves(out__a="one", link__a="two", b="three"), FINDS)
    (pair[1].project / "out").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (pair[1].project / "link").symlink_to(tmp_path / "elsewhere")
    assert run(pair, "job-2", FINDS, FINDS)[1] == "{'b': 'three', 'out': 'a file'}"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert "not copied to node 1: link/a and 1 more file; link exists there" in notes(pair, 1, "job-2")


def test_damaged_file_is_not_copied(pair: Gangs) -> None:
    run(pair, "job-1", saves(broken__pt="PK", old__pt="pickle").replace("/pt", ".pt"), FINDS)
    assert run(pair, "job-2", FINDS, FINDS)[1] == "{'old.pt': 'pickle'}"
    assert "node 0: broken.pt is damaged, or has gone; it was not copied" in notes(pair, 1, "job-2")


def test_file_from_the_future_is_not_copied(pair: Gangs) -> None:
    run(pair, "job-1", saves(a="one", b="two") + "os.utime('a', (9e9, 9e9))\n", FINDS)
    assert run(pair, "job-2", FINDS, FINDS)[1] == "{'b': 'two'}"
    text = "not copied from node 0: a; the time of 'a' is more than a day in the future"
    assert text in notes(pair, 1, "job-2")


def test_restarted_ranks_find_what_one_node_wrote(pair: Gangs) -> None:
    """With nobody connected, and nothing is looked for before the first start."""
    fails = saves(snapshot="one") + "if os.environ['CLOUDDDP_ATTEMPT'] == '0': raise SystemExit(3)\n"
    waits = FINDS + "import time\nif os.environ['CLOUDDDP_ATTEMPT'] == '0': time.sleep(600)\n"
    search = replace(BY_DEFAULT, restarts_only=True)
    assert run(pair, "job-1", fails, waits, search=search, retries=1) == ["{'snapshot': 'one'}"] * 2
