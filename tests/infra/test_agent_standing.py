"""What rank 0 tells of its training reaches the laptop, and nothing it writes does harm."""

from __future__ import annotations

import json
import sys

import pytest
from agentnode import FOREVER, Node, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the agent runs on Linux only (/proc)")

TELL = "import os\nprint(os.environ.get('CLOUDDDP_STATUS_FILE'))\n"
WORDS = {"state": "running", "step": 120, "steps": 3000, "best_accuracy": 0.5, "epoch": 3, "note": "\x1b[2J"}


def writing(text: str) -> str:
    return f"import os\nopen(os.environ['CLOUDDDP_STATUS_FILE'], 'w').write({text!r})\n"


def test_rank_0_alone_is_given_a_file_in_the_jobs_own_folder(node: Node) -> None:
    node.start(TELL, TELL)
    logs = node.follow().logs
    assert logs == {0: f"{node.folder() / 'status.json'}\n".encode(), 1: b"None\n"}


def test_what_rank_0_tells_reaches_followers_the_list_of_jobs_and_who_ends_it(node: Node) -> None:
    node.start(writing(json.dumps(WORDS)) + FOREVER)
    until(lambda: node.state().get("standing"))
    known = {key: WORDS[key] for key in ("state", "step", "steps", "best_accuracy")}
    seen = [
        node.state()["standing"],
        node.follow(wait=False).state["standing"],
        node.kill()["standing"],
        node.follow().state["standing"],
    ]
    assert [{k: v for k, v in one.items() if k != "told"} for one in seen] == [known] * 4
    assert len({one["told"] for one in seen}) == 1


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
        ('{"step": 1' + "0" * 400 + ', "best_accuracy": Infinity, "state": "failed"}', {"state": "failed"}),
        ('{"step": 1.5, "best_accuracy": 1}', {"best_accuracy": 1}),
    ],
    ids=["empty", "no JSON", "a list", "deep", "long", "control", "types", "large", "kinds"],
)
def test_words_that_are_not_known_are_dropped(node: Node, text: str, left: dict[str, object]) -> None:
    node.start(writing(text))
    state = node.follow().state
    assert state["state"] == "succeeded"
    assert {k: v for k, v in (state["standing"] or {}).items() if k != "told"} == left
