"""The policy for signals, with real signals: each program in a process of its own, forked from one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.harness import ROOT, clean_environment

# Runs programs, a JSON object of name -> [the signal that it inherits as ignored, as from nohup, and the
# program], and prints what each has printed. A shell that runs the tests in the background ignores Ctrl-C,
# and that is inherited.
RUNNER = """
import json, os, signal, sys, threading

def send(*names):
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))

def notice():
    print("notice", flush=True)

from cloudddp import signals

found = {}
for name, (ignored, program) in json.load(sys.stdin).items():
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.dup2(theirs, 1)
        os.dup2(theirs, 2)
        for one in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
            signal.signal(getattr(signal, one), signal.SIG_IGN if one == ignored else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exec(program, {**globals()})
        sys.stdout.flush()
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as output:
        found[name] = output.read().split("\\n")[:-1]
    os.wait()
print(json.dumps(found))
"""
RAISED_ONCE = """
signals.arm()
try:
    send({!r})
except KeyboardInterrupt as error:
    print(type(error).__name__)
    send("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # dropped: the first one is being handled
    print("handled")
signals.arm()
try:
    send("SIGTERM")
except signals.Terminated:
    print("armed again")
"""
INTERRUPTIBLE = """
try:
    with signals.interruptible():
        {}
        print("done")
except KeyboardInterrupt:
    print("raised")
finally:
    send("SIGINT", "SIGTERM", "SIGHUP")
    print("removed")
"""
INHERITED = """
signals.arm()
send("SIGHUP")
with signals.{}(notice):
    send("SIGHUP")
print("done")
"""
OTHER_THREAD = """
signals.arm()
def work():
    with signals.{}(notice):
        print("done")
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
PROTECTED = """
signals.arm()
with signals.protected(notice):
    send("SIGINT", "SIGTERM", "SIGHUP", "SIGINT")
    print("done")
try:
    send("SIGINT")
except KeyboardInterrupt:
    print("armed as before")
"""
DEFERRED = """
signals.arm()
try:
    with signals.deferred(notice):
        send("SIGTERM", "SIGINT")
        {}
    print("not reached")
except signals.Terminated as error:
    print(type(error.__context__).__name__)
"""
WHOLE = """
signals.arm()
try:
    with signals.whole():
        send("SIGTERM", "SIGINT")
        print("whole")
    print("not reached")
except signals.Terminated:
    print("raised")
with signals.whole():
    send("SIGINT")  # dropped: the first one is being handled
signals.arm()
try:
    send("SIGINT")
except KeyboardInterrupt:
    print("armed again")
"""
# As at a pipe that nobody reads.
ENDLESS = """
ours, theirs = os.pipe()
signals.arm()
threading.Timer(0.2, send, ["SIGTERM"]).start()
try:
    with signals.whole():
        os.write(theirs, bytes(1 << 20))
except signals.Terminated:
    print("raised")
"""
WHOLE_ELSEWHERE = """
signals.arm()
inside, go = threading.Event(), threading.Event()
def work():
    with signals.whole():
        inside.set()
        go.wait(30)
worker = threading.Thread(target=work)
worker.start()
inside.wait(30)
try:
    send("SIGINT")
    print("not reached")
except KeyboardInterrupt:
    print("raised")
go.set()
worker.join()
"""
# Name -> program, and what it prints.
PROGRAMS = {
    "armed: interrupt": (RAISED_ONCE.format("SIGINT"), "KeyboardInterrupt, handled, armed again"),
    "armed: quit": (RAISED_ONCE.format("SIGQUIT"), "KeyboardInterrupt, handled, armed again"),
    "armed: termination": (RAISED_ONCE.format("SIGTERM"), "Terminated, handled, armed again"),
    "armed: hang-up": (RAISED_ONCE.format("SIGHUP"), "HungUp, handled, armed again"),
    "what follows an interruptible block is not interrupted": (INTERRUPTIBLE.format("pass"), "done, removed"),
    "nor what follows an interrupted one": (INTERRUPTIBLE.format('send("SIGINT")'), "raised, removed"),
    "protected block is not interrupted and reports once": (PROTECTED, "notice, done, armed as before"),
    "deferred signal is raised after the block": (DEFERRED.format('print("done")'), "notice, done, NoneType"),
    "deferred signal outweighs an error of the block": (
        DEFERRED.format("1 / 0"),
        "notice, ZeroDivisionError",
    ),
    "ignored phase drops every signal": (
        'signals.arm()\nsignals.ignore()\nsend("SIGINT", "SIGTERM", "SIGHUP")\nprint("done")',
        "done",
    ),
    "ignored at the start, protected": (INHERITED.format("protected"), "done"),
    "ignored at the start, deferred": (INHERITED.format("deferred"), "done"),
    "protected block of another thread": (OTHER_THREAD.format("protected"), "done"),
    "deferred block of another thread": (OTHER_THREAD.format("deferred"), "done"),
    "signal is raised after a whole block": (WHOLE, "whole, raised, armed again"),
    "block that does not end is interrupted": (ENDLESS, "raised"),
    "whole block of another thread delays no signal": (WHOLE_ELSEWHERE, "raised"),
}


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    programs = {
        name: ("SIGHUP" if name.startswith("ignored at") else "", program)
        for name, (program, _) in PROGRAMS.items()
    }
    env, text = clean_environment(PYTHONPATH=str(ROOT)), json.dumps(programs)
    out = subprocess.check_output([sys.executable, "-c", RUNNER], input=text, env=env, text=True, timeout=300)
    found: dict[str, list[str]] = json.loads(out)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_signals(name: str, printed: dict[str, list[str]]) -> None:
    assert ", ".join(printed[name]) == PROGRAMS[name][1]
