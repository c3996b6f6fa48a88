"""`cloudddp report`: from a launch to the page."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from support.jobs import direct

SCRIPT = """
import json, os, sys, time
rank = int(os.environ["RANK"])
gate = sys.argv[-1]
print("<script>alert(1)</script>", flush=True)
if rank == 0:
    os.makedirs("logs/node0/ranks")
    for name in ("report.html", "node0/verdict.json", "node0/ranks/0.log"):
        with open(f"logs/{name}", "w") as file:
            file.write("of the job")
    os.makedirs("runs", exist_ok=True)
    with open("runs/metrics.jsonl", "w") as file:
        for step in range(50):
            file.write(json.dumps({"step": step, "loss": 1 / (step + 1)}) + "\\n")
    with open("runs/events.tfevents.1", "w") as file:
        file.write("of an earlier job")
    os.utime("runs/events.tfevents.1", (1e9, 1e9))
    with open(os.environ["CLOUDDDP_STATUS_FILE"], "w") as file:
        json.dump({"state": "running", "step": 50}, file)
    open(gate, "w").close()
if rank == 1:
    while not os.path.exists(gate):
        time.sleep(0.05)
    sys.exit("</pre><img src=x>")
time.sleep(60)
"""


def test_report_of_a_job(cli: Any) -> None:
    direct(cli, nodes=2)
    cli.write("train.py", "")
    for words in ("init -q", "add -A", "-c user.name=n -c user.email=n@example.com commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=cli.cwd, check=True)
    cli.write("train.py", SCRIPT)
    cli.write("keys.env", "OTHER_KEY=from-the-file\n")
    secrets = ("-e", "API_KEY=from-the-option", "--env-file", "keys.env")
    cli.fails(1, "launch", *secrets, "train.py", "--lr", "0.1", str(cli.cwd.parent / "gate"))
    cli.ok("pull")
    (folder,) = (cli.cwd / "results").iterdir()
    page = (folder / "cloudddp-logs" / "report.html").read_text()
    for part in (
        "train.py --lr 0.1", "failed, exit code 1",
        "rank 1 on node 1 exited with code 1", "&lt;/pre&gt;&lt;img src=x&gt;", "API_KEY", "OTHER_KEY",
        "<figcaption>loss", "g5.12xlarge", "Commit <code>", "starting job", "nodes ready",
        "job started on node 1", "on demand for 2 nodes", "+rank = int(os.environ", "job.rendezvous",
        "runs/events.tfevents.1</td><td>left out: written before",
    ):  # fmt: skip
        assert part in page, part
    own = [path.read_text() for path in (folder / "logs").rglob("*") if path.is_file()]
    assert own == ["of the job"] * 3
    assert '"python": "3.' in (folder / "cloudddp-logs" / "node1" / "facts.json").read_text()
    assert "from-the-" not in page
    assert "<script" not in page
    (folder / "cloudddp-logs" / "report.html").unlink()
    assert cli.ok("report") == f"results/{folder.name}/cloudddp-logs/report.html\n"
    assert (folder / "cloudddp-logs" / "report.html").read_text().partition("Written by")[
        0
    ] == page.partition("Written by")[0]
    # A report that cannot be written: results are pulled all the same.
    (folder / "cloudddp-logs" / "report.html").unlink()
    (folder / "cloudddp-logs" / "report.html").mkdir()
    assert f"warning: the report of job {folder.name} was not written: " in cli.messages("pull")


def test_report_without_results(line: Any) -> None:
    assert "no job is in results" in line.fails(1, "report")
    (line.cwd / "results").mkdir()
    (line.cwd / "results" / "20270101-000000-aaaa").write_text("a file")
    assert "no job is in results" in line.fails(1, "report", "2026")
    for job in ("20260101-000000-aaaa", "20260101-000000-bbbb", "other"):
        (line.cwd / "results" / job).mkdir(parents=True)
    assert line.ok("report") == "results/20260101-000000-bbbb/cloudddp-logs/report.html\n"
    shown = line.ok("report", "20260101-000000-a")
    assert shown == "results/20260101-000000-aaaa/cloudddp-logs/report.html\n"
    ids = "20260101-000000-aaaa, 20260101-000000-bbbb"
    for wanted, error in (("2026", "job id '2026' is ambiguous"), ("x", "job 'x' was not pulled to results")):
        found = line.fails(1, "report", wanted)
        assert error in found
        assert f"jobs: {ids}" in found
    # A link does not lead the report elsewhere.
    shutil.rmtree(line.cwd / "results" / "20260101-000000-bbbb" / "cloudddp-logs")
    (line.cwd / "results" / "20260101-000000-bbbb" / "cloudddp-logs").symlink_to(line.cwd)
    assert "cloudddp-logs: Not a directory" in line.fails(1, "report")
    assert not (line.cwd / "report.html").exists()
