"""The training status that rank 0 reports: it reaches the laptop, and invalid values are dropped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.agentnode import FOREVER, Node, until

from agent.jobs import rank_records
from agent.node import store
from cloudddp.agent.protocol.progress import TrainingState, TrainingStatus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent needs /proc")

SHOW = "import os\nprint(os.environ.get('CLOUDDDP_STATUS_FILE'))\n"
REPORT = {"state": "running", "step": 120, "steps": 3000, "best_accuracy": 0.5, "epoch": 3, "note": "\x1b[2J"}


def writing(text: str) -> str:
    return f"import os\nopen(os.environ['CLOUDDDP_STATUS_FILE'], 'w').write({text!r})\n"


def test_only_rank_0_gets_a_status_file(node: Node) -> None:
    node.start(SHOW, SHOW)
    assert node.follow().logs == {0: f"{node.folder() / 'status.json'}\n".encode(), 1: b"None\n"}


def test_report_is_in_every_reply_about_the_job(node: Node) -> None:
    node.start(writing(json.dumps(REPORT)) + FOREVER)
    first = until(lambda: node.state().training)
    assert first is not None
    assert first == TrainingStatus(first.reported, TrainingState.RUNNING, 120, 3000, 0.5)
    seen = [node.follow(wait=False).state.training, node.cancel().training, node.follow().state.training]
    assert seen == [first] * 3


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", {}),
        ("no JSON", {}),
        ("[1, 2]", {}),
        ("[" * 16000, {}),
        ('{"step": 1, "x": "' + "x" * 20000 + '"}', {}),
        ('{"state": "\\u001b[2J", "step": 7}', {"step": 7}),
        ('{"step": true, "steps": "9", "best_accuracy": NaN, "state": 3}', {}),
        ('{"step": 1, "state": ["running"]}', {"step": 1}),
        (
            '{"step": 1' + "0" * 400 + ', "best_accuracy": Infinity, "state": "failed"}',
            {"state": TrainingState.FAILED},
        ),
        ('{"step": 1.5, "best_accuracy": 1}', {"best_accuracy": 1}),
    ],
    ids=["empty", "no JSON", "a list", "deep", "long", "control", "types", "state", "large", "kinds"],
)
def test_invalid_values_are_dropped(tmp_path: Path, text: str, left: dict[str, object]) -> None:
    (tmp_path / store.STATUS_FILE).write_text(text)
    found = rank_records.training_status(tmp_path)
    fields = vars(found) if found is not None else {}
    assert {k: v for k, v in fields.items() if k != "reported" and v is not None} == left
