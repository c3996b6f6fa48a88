"""For how long a node has waited for the laptop: the time in which it works does not count."""

from __future__ import annotations

import subprocess
import sys

from support.agentnode import agent_file

PROGRAM = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from agent.sync.sources import Laptop
from cloudddp.agent.protocol import transfer
laptop = Laptop(b"secret")
time.sleep(0.3)
print("at work", laptop.silence)
reading = threading.Thread(target=laptop.read, daemon=True)
reading.start()
while not laptop.silence > 0.3: time.sleep(0.01)
print("waits", flush=True)
sys.stderr.close()
while laptop.pending < 10: time.sleep(0.01)
while not laptop.silence < 0.3: time.sleep(0.01)
print("hears", flush=True)
reading.join()
print("at work", laptop.silence)
"""


def test_silence_is_the_time_of_waiting_for_a_byte() -> None:
    from cloudddp.agent.protocol import transfer

    frame = transfer.frame(b"secret", transfer.ALIVE)
    command = [sys.executable, "-IS", "-c", PROGRAM, agent_file()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work 0.0\n"
        assert process.stdout.readline() == b"waits\n"
        process.stdin.write(frame[:10])
        process.stdin.flush()
        assert process.stdout.readline() == b"hears\n"
        process.stdin.write(frame[10:])
        process.stdin.flush()
        assert process.stdout.readline() == b"at work 0.0\n"
