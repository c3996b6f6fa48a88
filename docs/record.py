"""Turn a recorded terminal into docs/demo.svg: `TERM=dumb script -qc 'make demo' demo.log; python
docs/record.py demo.log`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main(log: str) -> None:
    lines = Path(log).read_text(errors="replace").replace("\r\n", "\n").split("\n")
    first = next(n for n, line in enumerate(lines) if "cloudddp init" in line)
    # What a spinner or a progress bar overwrote is not on the screen; nor is the header of `script`.
    shown = [line.rsplit("\r", 1)[-1] for line in lines[first:] if not line.startswith("Script done")]
    text = "\n".join(shown).strip().replace(str(Path.cwd()), "~/cloudddp")
    console = Console(record=True, width=124, force_terminal=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(Text.from_ansi(text), soft_wrap=True)
    svg = console.export_svg(title="make demo")
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.S)  # no font from a foreign server
    Path(__file__).with_name("demo.svg").write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1])
