"""[[data]] from this computer, and [[shared]]: what ranks find, and what of it is a result."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from support.jobs import direct, homes

READS = """
import os
folder = os.environ["CLOUDDDP_DATA_SETS"]
assert os.path.samefile(folder, "sets"), folder
print("read", len(open("sets/train.bin", "rb").read()), flush=True)
"""


def test_folder_outside_the_project_is_sent_whatever_its_size(cli: Any, tmp_path: Path) -> None:
    direct(cli, nodes=2)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes(2 << 20))
    cli.write("cloudddp.toml", f"[sync]\nmax_mb = 1\n[[data]]\nsource = {str(folder)!r}\npath = 'sets'\n")
    cli.write("train.py", READS)
    assert cli.ok("launch", "train.py").count("read 2097152") == 2
    assert "up to date" in cli("sync").stderr
    assert "nothing to pull" in cli("pull").stderr  # what was sent is no result
    (folder / "train.bin").write_bytes(bytes(3 << 20))
    cli.ok("sync")
    assert [(home / "project/sets/train.bin").stat().st_size for home in homes(cli)] == [3 << 20] * 2
    (tmp_path / "real.bin").write_text("stays here")
    (folder / "1.bin").symlink_to("../real.bin")
    cli.write("train.py", "import os; open(os.environ['CLOUDDDP_DATA_SETS'] + '/1.bin')")
    failed = cli("launch", "train.py").stderr
    assert "so the nodes do not have them: sets/1.bin -> ../real.bin; copy" in failed
    assert f"sets/1.bin leads through a link to {tmp_path / 'real.bin'}, which was not sent" in failed


def test_what_a_job_writes_in_a_folder_of_data_is_a_result(cli: Any) -> None:
    """A file of its own, and one that it has changed."""
    direct(cli)
    cli.write("data/m.pt", "old")
    cli.write(".gitignore", "data/\n")
    cli.write("cloudddp.toml", '[[data]]\nsource = "data"\n')
    cli.write("train.py", "open('data/m.pt', 'w').write('trained'); open('data/new.pt', 'w').write('new')")
    cli.ok("launch", "train.py")
    assert "data/m.pt (7 bytes), data/new.pt" in cli("jobs").stderr
    cli.ok("pull")
    found = {path.name: path.read_text() for path in (cli.cwd / "results").glob("*/data/*")}
    assert found == {"m.pt": "trained", "new.pt": "new"}


MEETS = """
import os, time
rank = int(os.environ["RANK"])
open(f"shared/rank-{rank}", "w").write("x")
while len([name for name in os.listdir("shared") if name.startswith("rank-")]) < 2:
    time.sleep(0.05)
print("all here", open("shared/setup").read())
"""


def test_ranks_share_a_folder_whose_results_are_pulled_once(cli: Any, conditions: Any) -> None:
    """The image lacks the packages of NFS."""
    conditions(boot={"no_nfs": 1})
    direct(cli, nodes=2)
    cli.write("cloudddp.toml", '[[shared]]\npath = "shared"\n[setup]\nrun = ["echo done > shared/setup"]\n')
    cli.write("train.py", MEETS)
    done = cli.exits(0, "launch", "train.py")
    assert done.stdout.count("all here done") == 2
    assert "mounting shared on all nodes" in done.stderr
    assert "a link stands in for the network file system" in done.stderr
    assert "results: node 0: shared/ (2 files" in done.stderr
    assert "node 1:" not in done.stderr.partition("results:")[2]
    cli.ok("pull", "--all-nodes")
    pulled = sorted(
        path.relative_to(cli.cwd / "results").as_posix() for path in (cli.cwd / "results").rglob("rank-*")
    )
    assert [name.split("/", 1)[1] for name in pulled] == ["shared/rank-0", "shared/rank-1"]
    cli.write("other.py", "")
    cli.ok("sync")
    assert cli.ok("exec", "echo $(ls shared)").count("rank-0 rank-1 setup") == 2


WRITES = """
import os, time
path = os.path.abspath("out/run/best.ckpt")
if os.environ["RANK"] == "1":
    os.makedirs("out/run", exist_ok=True)
    open(path, "w").close()
for _ in range(50):
    time.sleep(0.05 * (not os.path.exists(path)))
if not os.path.exists(path): raise FileNotFoundError(f"Checkpoint file not found: {path}")
"""


def test_file_that_only_another_node_has_is_named_and_can_be_shared(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("train.py", WRITES)
    done = cli.exits(1, "launch", "train.py")
    assert "only node 1 has out/run/best.ckpt; nodes share no disk: add" in done.stderr
    assert 'the lines [[shared]] and path = "out", ' in done.stderr
    shutil.rmtree(homes(cli)[1] / "project/out")
    cli.write("cloudddp.toml", '[[shared]]\npath = "out"\n')
    assert "results: node 0: out/ (" in cli.messages("launch", "train.py")
