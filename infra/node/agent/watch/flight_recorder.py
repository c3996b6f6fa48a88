"""The dumps of PyTorch's flight recorder, which name the collectives that each rank has joined, and PyTorch's
own analyzer, which compares them.

A dump is a pickle that a rank has written: only plain data of it is read here, and nothing executed. The
analyzer needs the dumps of all ranks: the laptop passes them on, cut and as text that it does not read, to
one node, where the Python of the job runs the analyzer.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
import re
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.node import store
from cloudddp.agent.protocol.stacks import MAX_PACKED, MAX_SENTENCE

FOLDER, ANALYSIS = "flight-recorder", "analysis.txt"  # in a job's folder, and in that
MAX_DUMP = 1 << 28  # bytes
KEPT, FRAMES = 200, 12  # of the newest entries of a rank; of an entry that is not completed
SECONDS = 90.0  # for the analyzer, which imports torch
MAX_OUTPUT = 1 << 18  # bytes
MISSING = "the torch of the ranks has no analyzer of dumps"
# Without tabulate the analyzer fails where it prints a table. It logs to stderr.
SCRIPT = f"""
import base64, json, os, pickle, sys, tempfile, types, zlib
sys.path[:] = filter(None, sys.path)
try:
    import tabulate
except ImportError:
    table = lambda rows, headers=(): "\\n".join(map(str, rows))
    sys.modules["tabulate"] = types.SimpleNamespace(tabulate=table)
try:
    from torch.distributed.flight_recorder import fr_trace
except ImportError:
    sys.exit({MISSING!r})
with tempfile.TemporaryDirectory() as folder:
    for packed in sys.stdin.read().split():
        data = zlib.decompressobj().decompress(base64.b64decode(packed), {MAX_DUMP})
        for rank, dump in json.loads(data).items():
            with open(os.path.join(folder, "rank_%d" % int(rank)), "wb") as file:
                pickle.dump(dump, file)
    fr_trace.main([folder, "--prefix", "rank_", "--allow-incomplete-ranks"])
"""
# Lines of a finding (torch/distributed/flight_recorder/components/types.py), of which the first is reported.
FINDING = re.compile(
    r"(?:Not all ranks joining|Collective sequence number|Input/output mismatch|We cannot decide what's).*"
)
DETAIL = re.compile(r"^(?:group info|collective|missing ranks|error msg): .*", re.M)


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers of them: no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")


def pack(folder: Path) -> str:
    """Return the dumps of a job's ranks on this node, without old entries, as one word; '' for none."""
    found = {}
    for path in sorted((folder / FOLDER).glob("rank_*")):
        with contextlib.suppress(Exception):  # a damaged pickle raises almost anything
            dump = _Plain(io.BytesIO(store.read_bytes(path, MAX_DUMP))).load()
            found[int(path.name[len("rank_") :])] = json.loads(json.dumps(_cut(dump)))
    packed = base64.b64encode(zlib.compress(json.dumps(found).encode())).decode() if found else ""
    return packed if len(packed) <= MAX_PACKED else ""


def _cut(dump: dict[str, Any]) -> dict[str, Any]:
    entries, groups = dump["entries"][-KEPT:], dump["pg_config"]
    unknown = {tuple(entry["process_group"]) for entry in entries if entry["process_group"][0] not in groups}
    if len(unknown) == 1 and "" in groups:  # gloo's has no name (2.15)
        ((name, title),) = unknown
        groups = {name: {**groups[""], "name": name, "desc": title}}
    shown = [{**one, "frames": one["frames"][: FRAMES * (one["state"] != "completed")]} for one in entries]
    return {"version": dump["version"], "pg_config": groups, "entries": shown}


def analyze(folder: Path, python: str, packed: Sequence[str]) -> str:
    """Run PyTorch's analyzer on the dumps of all nodes, keep what it writes, and return its conclusion."""
    try:
        done = subprocess.run(
            [python or "python3", "-c", SCRIPT],
            input="\n".join(packed).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            cwd="/",
            check=False,
        )
        output, failed = done.stdout[:MAX_OUTPUT].decode(errors="replace"), done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        output, failed = str(error), True
    with contextlib.suppress(OSError):  # a full disk
        store.replace(folder / FOLDER / ANALYSIS, output.encode(errors="replace"))
    return conclusion(output, failed=failed)


def conclusion(output: str, *, failed: bool = False) -> str:
    """Return what the analyzer has found first, as a sentence. Pure."""
    lines = ["all ranks have joined the same collectives, as far as they are recorded"]
    if failed:
        last = (output.strip().splitlines() or ["it wrote nothing"])[-1]
        lines = [last if last == MISSING else f"the analyzer failed: {last}"]
    elif found := FINDING.search(output):
        following = FINDING.search(output, found.end())
        lines = [
            found[0],
            *DETAIL.findall(output, found.end(), following.start() if following else len(output)),
        ]
    return f"flight recorder: {'; '.join(lines)}"[:MAX_SENTENCE]
