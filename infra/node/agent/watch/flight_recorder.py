"""The dumps of PyTorch's flight recorder, which name the collectives that each rank has joined, and PyTorch's
own analyzer, which compares them.

A dump is a pickle that a rank has written: only plain data of it is read here, and nothing executed, in a
process with limits of memory and time, because a few bytes of it can stand for any amount of data. The
analyzer needs the dumps of all ranks: the laptop passes them on, cut and as text that it does not read, to
one node, where the Python of the job runs the analyzer.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import pickle
import re
import resource
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.node import store
from agent.node.commands import agent_command, outcome, run_quietly
from agent.ranks.launchers import DUMPS
from cloudddp.agent.protocol.stacks import MAX_PACKED, MAX_SENTENCE

ANALYSIS = "analysis.txt"  # beside the dumps
MAX_DUMP, MAX_MEMORY = 1 << 28, 1 << 30  # bytes: of a dump, and of the process that reads them
MAX_PIECES = 1 << 20  # numbers, texts and brackets in a dump as JSON
PACK_SECONDS = 60.0  # for that process
KEPT = 200  # of the newest entries of a rank
SECONDS = 90.0  # for the analyzer, which imports torch
# Without tabulate, which torch does not install, the analyzer fails where it prints a table.
SCRIPT = """
import base64, json, pickle, sys, tempfile, types, zlib
table = lambda rows, headers=(): "\\n".join(map(str, rows))
sys.modules["tabulate"] = types.SimpleNamespace(tabulate=table)
from torch.distributed.flight_recorder import fr_trace
with tempfile.TemporaryDirectory() as folder:
    for packed in sys.stdin.read().split():
        dump = json.loads(zlib.decompressobj().decompress(base64.b64decode(packed), 1 << 26))
        with open(f"{folder}/rank_{dump['rank']}", "wb") as file:
            pickle.dump(dump, file)
    fr_trace.main([folder, "--prefix", "rank_", "--allow-incomplete-ranks"])
"""
# Lines of the analyzer (torch/distributed/flight_recorder/components/types.py): a finding, and its details.
FOUND = re.compile(
    r"(?:Not all ranks joining|Collective sequence number|Input/output mismatch|We cannot decide what's).*"
    r"|^(?:group info|collective|missing ranks|error msg): .*",
    re.MULTILINE,
)


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers of them: no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")


def pack(folder: Path) -> str:
    """Return the dumps of a job's ranks on this node, as `packed`; '' where that exceeds a limit."""
    found = any((folder / DUMPS).glob("rank_*"))
    return run_quietly(agent_command("dumps", str(folder)), PACK_SECONDS) if found else ""


def main(folder: str) -> int:
    """In the process that reads the dumps: write them to stdout."""
    with contextlib.suppress(ValueError):  # it has less
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    sys.stdout.write(packed(Path(folder)))
    return 0


def packed(folder: Path) -> str:
    """Return dumps, a word each, without old entries and the stacks of completed ones; '' for none."""
    words = []
    for path in sorted((folder / DUMPS).glob("rank_*")):
        with contextlib.suppress(Exception):  # a damaged pickle raises almost anything
            dump = _Plain(io.BytesIO(store.read_bytes(path, MAX_DUMP))).load()
            entries = dump["entries"][-KEPT:]
            for entry in entries:
                entry["frames"] = entry["frames"] if entry["state"] != "completed" else []
            cut = {**dump, "entries": entries, "rank": int(path.name[len("rank_") :])}
            pieces = json.JSONEncoder().iterencode(cut)
            text = "".join(itertools.islice(pieces, MAX_PIECES))
            if next(pieces, None) is None:  # these are all
                words.append(base64.b64encode(zlib.compress(text.encode())).decode())
    found = " ".join(words)
    return found if len(found) <= MAX_PACKED else ""


def analyze(folder: Path, python: str, dumps: Sequence[str]) -> str:
    """Run PyTorch's analyzer on the dumps of all nodes, keep what it writes, and return its conclusion."""
    code, out, errors = outcome([python or "python3", "-c", SCRIPT], SECONDS, given=" ".join(dumps))
    output = out + errors
    with contextlib.suppress(OSError):  # a full disk
        store.replace(folder / DUMPS / ANALYSIS, output.encode(errors="replace"))
    return conclusion(output, failed=code != 0)


def conclusion(output: str, *, failed: bool = False) -> str:
    """Return what the analyzer has found, as a sentence. Pure."""
    found = "; ".join(dict.fromkeys(FOUND.findall(output)))
    if failed:
        found = f"PyTorch's analyzer failed: {''.join(output.splitlines()[-1:])}"
    found = found or "all ranks have joined the same collectives, as far as they are recorded"
    return f"flight recorder: {found}"[:MAX_SENTENCE]
