"""`top` and `status --watch`: readings of a job of two nodes, and a live table on a terminal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pyte
from support.jobs import direct, written
from support.processes import CLOSED, zygote
from support.terminal import Terminal

REPORTS = """
import json, os, time
rank = int(os.environ["RANK"])
status = {"state": "running", "step": 12, "steps": 30, "loss": 0.5}
reports = {"STEP": {"step": 12, "work_seconds": 0.25}, "STATUS": status}
for name, report in reports.items():
    if path := os.environ.get(f"CLOUDDDP_{name}_FILE"):
        with open(path + ".tmp", "w") as file:
            json.dump(report, file)
        os.replace(path + ".tmp", path)
print("reported", flush=True)
while True:
    sum(range(300_000))
    time.sleep(0.05)
"""


def test_top_of_a_job_on_two_nodes(cli: Any, terminal: Callable[..., Terminal]) -> None:
    direct(cli, nodes=2)
    cli.write("work.py", REPORTS)
    cli.ok("launch", "-d", "work.py")
    written(cli, "reported")
    found = json.loads(cli.ok("top", "--once", "--json"))
    training = found["job"]["training"]
    assert (found["job"]["state"], training["step"], training["steps"]) == ("running", 12, 30)
    assert found["metrics"]["loss"] == 0.5
    assert [one["state"] for one in found["nodes"]] == ["ready", "ready"]
    ranks = [rank for node in found["nodes"] for rank in node["ranks"]]
    assert [(one["rank"], one["step"], one["seconds"]) for one in ranks] == [(0, 12, 0.25), (1, 12, 0.25)]
    # Of half a second, in which a busy machine may give them nothing. test_readings.py has the values.
    assert all(one["cores"] >= 0 for one in ranks)
    training = json.loads(cli.ok("jobs", "--json"))[0]["training"]
    assert training.pop("reported").endswith("+00:00")
    assert training == {"state": "running", "step": 12, "steps": 30, "best_accuracy": None}
    assert "step 12 of 30" in cli.ok("jobs")
    # With a shell's >&- 2>&-, where sys.stdout is None.
    argv = ("-m", "cloudddp", "top", "--once")
    assert zygote().start(argv, cli.cwd, cli.env, stdout=CLOSED, stderr=CLOSED).wait(60) == 0

    window = terminal("status", "--watch")
    window.read_until(b"S/STEP")
    screen = pyte.Screen(80, 24)
    assert "the training last reported step 12 of 30" in cli.messages("cancel")
    window.read_until(b"cancelled")
    window.process.send_signal(signal.SIGINT)
    code, shown = window.read_to_the_end()
    pyte.Stream(screen).feed(shown)
    rows = [row.rstrip() for row in screen.display]
    assert code == 0
    assert rows[0].startswith(f"{cli.cluster}: ")
    assert rows[1] == "ready: nodes 0, 1"
    assert "cancelled" in rows[2]
    assert any("no GPU" in row for row in rows[3:])
    assert "Traceback" not in shown
    ended = cli.fails(130, "logs", "-f")
    assert "cancelled: cancelled" not in ended
    assert "the training last reported step 12 of 30" in ended
