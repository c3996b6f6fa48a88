"""Files of two saves never meet in one folder of a checkpoint: who wrote each is known on the nodes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.agentnode import first_of, until
from support.gangs import Gangs

from cloudddp.agent.protocol.checkpoints import Checkpoints, refusal
from cloudddp.agent.protocol.file_steps import REPLACED
from cloudddp.agent.protocol.jobs import Verdict
from cloudddp.agent.protocol.phases import JobPhase
from cloudddp.agent.protocol.results import NewFilesRequest
from cloudddp.agent.protocol.sharing import SnapshotSearch

SEARCH = SnapshotSearch("p", (), limit=1 << 20)
LATEST = "ckpt/latest"
SHARD_0, SHARD_1, METADATA = "__0_0.distcp", "__1_0.distcp", ".metadata"
# As torch.distributed.checkpoint saves: each rank its shard, then rank 0 the file that names all.
SAVES = """
import os, pathlib, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["CLOUDDDP_ATTEMPT"])
meet = pathlib.Path({meet!r})
def barrier(name):
    (meet / f"{{name}}-{{rank}}").touch()
    while not (meet / f"{{name}}-{{1 - rank}}").exists(): time.sleep(0.01)
def write_shard(text, folder="ckpt/latest"):
    os.makedirs(folder, exist_ok=True)
    pathlib.Path(folder, f"__{{rank}}_0.distcp").write_text(text)
def save(text, folder="ckpt/latest"):
    write_shard(text, folder)
    barrier(text)
    time.sleep(0.05)
    if rank == 0:
        pathlib.Path(folder, ".tmp").write_text(f"{{text}} __0_0.distcp __1_0.distcp")
        os.rename(f"{{folder}}/.tmp", f"{{folder}}/.metadata")
    barrier(text + " end")
"""


@pytest.fixture
def saves(tmp_path: Path) -> str:
    (tmp_path / "meet").mkdir()
    return SAVES.format(meet=str(tmp_path / "meet"))


def run(job: Gangs, name: str, code: str, **more: object) -> Verdict:
    job.start(code, code, job=name, snapshots=SEARCH, **more)
    verdicts = [node.ended(name).verdict for node in job.nodes]
    job.gone()
    assert verdicts[0] is not None
    return verdicts[0]


def known(job: Gangs) -> Checkpoints:
    request = NewFilesRequest("p", (), (), present=())
    return Checkpoints({peer.node: job[peer.node].call(request).checkpoints for peer in job.gang.peers})


def have(job: Gangs, node: int) -> dict[str, str]:
    folder = job[node].project / LATEST
    return {path.name: path.read_text()[:5] for path in folder.iterdir()} if folder.exists() else {}


def test_copies_give_way_to_the_next_save_and_a_lost_half_is_named(pair: Gangs, saves: str) -> None:
    """As found: node 1 is lost after the second job has saved, and its copies of the first save are on node
    0. A node that replaces it gets nothing."""
    best = "import shutil\nshutil.copytree('ckpt/latest', 'ckpt/best', copy_function=later)\n"
    # As scripts keep the best one: the copies have the times of the originals, and come in any order.
    later = "def later(*names): time.sleep(0.05 * names[0].endswith('.distcp')); shutil.copy2(*names)\n"
    assert run(pair, "job-1", saves + "save('first')\n" + later + best).phase is JobPhase.SUCCEEDED
    assert known(pair).problems == {LATEST: "", "ckpt/best": ""}
    waits = "while not (meet / 'stop').exists(): time.sleep(0.01)\n"
    writes = f"{saves}assert len(os.listdir('ckpt/latest')) == 3\nsave('other')\n{waits}"
    pair.start(writes, writes, job="job-2", snapshots=SEARCH)
    until(lambda: have(pair, 0) == {SHARD_0: "other", METADATA: "other"})
    until(lambda: have(pair, 1) == {SHARD_1: "other"})
    (moved,) = (pair[0].project / REPLACED).glob(f"*/{LATEST}/*")
    assert (moved.name, moved.read_text()) == (SHARD_1, "first")
    until(lambda: f"moved to {REPLACED}" in pair.notes(0, "job-2"))
    (Path(saves.split("'")[1]) / "stop").touch()
    pair[0].ended("job-2")
    pair.gone()
    assert known(pair).problems[LATEST] == ""
    shutil.rmtree(pair[1].project / "ckpt")
    first, second = pair.gang.peers
    pair.gang = replace(pair.gang, peers=(first, replace(second, id="i-2")))
    run(pair, "job-3", "")
    assert have(pair, 1) == {}
    text = f"not copied: {LATEST} is not a complete checkpoint: {SHARD_1} of job "
    assert text in pair.notes(0, "job-3")


def test_ranks_do_not_start_beside_two_saves_in_one_folder(pair: Gangs, saves: str) -> None:
    """A rank fails in the middle of its second save; a restart would load half of each."""
    code = saves + (
        "if attempt == 0: save('first')\n"
        "if attempt == 0 and rank == 0:\n    write_shard('other'); raise SystemExit(3)\n"
        "if attempt == 0: time.sleep(600)\n"
    )
    verdict = run(pair, "job-1", code, retries=1)
    assert verdict.phase is JobPhase.FAILED
    text = f"a shard was written after {METADATA}: another save had begun"
    assert f"{LATEST} is not a complete checkpoint: node 0: {text}" in first_of(verdict).detail
    assert text in known(pair).problems[LATEST]


def test_attempts_are_told_apart_and_whole_numbered_checkpoints_go_on(pair: Gangs, saves: str) -> None:
    """The second attempt has written one of two numbers again."""
    first = "save('1', 'step-1'); save('2', 'step-2'); barrier('x'); raise SystemExit(3)"
    code = f"{saves}if attempt == 0: {first}\nwrite_shard('again', 'step-2') if rank else None\n"
    assert run(pair, "job-1", code, retries=1).phase is JobPhase.SUCCEEDED
    found = known(pair)
    assert found.problems["step-1"] == ""
    assert "after restart 1" in found.problems["step-2"]
    assert "the newest complete one is step-1" in refusal("step-2", found.problems)
    run(pair, "job-2", "")
    for node in range(2):
        assert len(list((pair[node].project / "step-1").iterdir())) == 3
        assert not (pair[node].project / "step-2").exists()
        moved = {path.name for path in (pair[node].project / REPLACED).glob("*/step-2/*")}
        assert f"__{node}_0.distcp" in moved
    assert f"moved to {REPLACED}: step-2 is not a complete checkpoint: " in pair.notes(0, "job-2")


OLDER = '{"copies": {"ckpt/latest/__1_0.distcp": ["i-1", 5, 5]}}'


def test_damaged_record_of_copies_makes_their_origin_unknown(pair: Gangs, saves: str) -> None:
    """Damaged, of an older version, too large: nothing is completed or deleted, and everything is pulled."""
    run(pair, "job-1", saves + "save('first')")
    run(pair, "job-2", "")
    assert have(pair, 0) == {SHARD_0: "first", SHARD_1: "first", METADATA: "first"}
    shutil.rmtree(pair[1].project / "ckpt")
    for number, record in enumerate(("{", OLDER, "x" * (65 << 20)), 3):
        (pair[0].home / ".cloudddp" / "results-p.json").write_text(record)
        assert "are of unknown origin" in known(pair).problems[LATEST]
        run(pair, f"job-{number}", "")
        assert have(pair, 1) == {}
        assert len(have(pair, 0)) == 3
