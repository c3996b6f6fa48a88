"""Replies of many nodes are decoded at the same time."""

from __future__ import annotations

import subprocess
import sys

# Nested types: while msgspec reads them, Python code runs, and another thread can look at the unfinished
# outer type.
_PROGRAM = """
import dataclasses, sys, threading
from cloudddp.agent.steps import decode

sys.setswitchinterval(1e-6)
for _ in range(100):
    inner = [dataclasses.make_dataclass("Inner", [("number", int, 0)]) for _ in range(20)]
    kind = dataclasses.make_dataclass("Reply", [*((f"field{n}", one, None) for n, one in enumerate(inner)), ("last", int, 0)])
    together = threading.Barrier(4)
    found = []

    def work():
        together.wait()
        found.append(decode(b'{"last": 7}', kind).last)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7] * 4, found
"""  # noqa: E501


def test_first_replies_of_a_type_are_decoded_by_several_threads() -> None:
    """msgspec's information about a dataclass is visible to other threads before it is complete
    (msgspec/_core.c, DataclassInfo_Convert of 0.22): a second thread that decoded the same type ended the
    process with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
