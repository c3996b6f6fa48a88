"""Make docs/demo.svg and docs/screens.md from the recordings of a terminal of 80 columns in
tests/golden/screens (tests/cli/test_screens.py makes them): `python -m docs.record`."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
SCREENS = DOCS.parent / "tests/golden/screens"
PICTURE, COMMAND = "run", "--sim run -n 2 -t g5.xlarge --max-cost 5 train.py"
TITLES = {
    "up": "Nodes that are ready to train",
    "launch": "A job, with its setup and the logs of all ranks",
    "jobs": "The jobs of the cluster",
    "status": "What it costs, and when it ends",
    "pull": "Results",
    "down": "Everything removed",
}


def picture() -> str:
    """Return the SVG of a training in one command."""
    text = (SCREENS / f"{PICTURE}.txt").read_text()
    console = Console(record=True, width=80, force_terminal=True, file=StringIO())
    for line in text.splitlines():
        style = "bold" if line.startswith("$ ") else ""
        console.print(Text(line, style=style), soft_wrap=True)
    svg = console.export_svg(title="cloudddp", unique_id="demo")
    return re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.S)  # no font from a foreign server


def page() -> str:
    """Return docs/screens.md."""
    out = [
        "# How it looks",
        "",
        "A job in the simulator, on a terminal of 80 columns. A test runs these commands and compares what",
        "is shown; ids, times and addresses were replaced.",
    ]
    for name, title in TITLES.items():
        out += ["", f"## {title}", "", "```text", (SCREENS / f"{name}.txt").read_text().rstrip(), "```"]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    (DOCS / "screens.md").write_text(page())
    (DOCS / "demo.svg").write_text(picture())
