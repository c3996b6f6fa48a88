"""[[data]] from this computer: what ranks find, and what of it is a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.jobs import direct

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
    assert cli.ok("exec", "wc -c < sets/train.bin").count("3145728") == 2
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
