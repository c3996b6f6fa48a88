"""The policy for signals, with real signals in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.harness import ROOT, clean_environment

START = """
import os, signal, sys, threading
from cloudddp import signals

def send(*names):
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))

def notice():
    print("notice")
"""


def output(program: str, *, ignored: str = "") -> list[str]:
    """Return the lines that a program prints; `ignored` is a signal that it inherits as ignored, as from
    nohup."""
    # A shell that runs the tests in the background has Ctrl-C ignored, and that is inherited.
    before = (
        "import signal\nfor name in ('SIGINT', 'SIGTERM', 'SIGHUP', 'SIGQUIT'):\n    "
        "signal.signal(getattr(signal, name), signal.SIG_DFL)\n"
    )
    before += f"signal.signal(signal.{ignored}, signal.SIG_IGN)\n" if ignored else ""
    done = subprocess.run(
        [sys.executable, "-c", before + START + program],
        env=clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "exception"),
    [
        ("SIGINT", "KeyboardInterrupt"),
        ("SIGQUIT", "KeyboardInterrupt"),
        ("SIGTERM", "Terminated"),
        ("SIGHUP", "HungUp"),
    ],
)
def test_armed_signal_raises_once(name: str, exception: str) -> None:
    program = f"""
signals.arm()
try:
    send({name!r})
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
    assert output(program) == [exception, "handled", "armed again"]


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_follows_an_interruptible_block_is_not_interrupted(interrupted: bool) -> None:
    program = f"""
try:
    with signals.interruptible():
        if {interrupted}:
            send("SIGINT")
        print("done")
except KeyboardInterrupt:
    print("raised")
finally:
    send("SIGINT", "SIGTERM", "SIGHUP")
    print("removed")
"""
    assert output(program) == ["raised" if interrupted else "done", "removed"]


def test_protected_block_is_not_interrupted_and_reports_once() -> None:
    program = """
signals.arm()
with signals.protected(notice):
    send("SIGINT", "SIGTERM", "SIGHUP", "SIGINT")
    print("done")
try:
    send("SIGINT")
except KeyboardInterrupt:
    print("armed as before")
"""
    assert output(program) == ["notice", "done", "armed as before"]


def test_deferred_signal_raises_after_the_block() -> None:
    program = """
signals.arm()
try:
    with signals.deferred(notice):
        send("SIGTERM", "SIGINT")
        print("done")
    print("not reached")
except signals.Terminated:
    print("raised")
"""
    assert output(program) == ["notice", "done", "raised"]


def test_deferred_signal_outweighs_an_error_of_the_block() -> None:
    program = """
signals.arm()
try:
    with signals.deferred(notice):
        send("SIGINT")
        raise ValueError
except KeyboardInterrupt as error:
    print("raised", type(error.__context__).__name__)
"""
    assert output(program) == ["notice", "raised ValueError"]


def test_ignored_phase_drops_every_signal() -> None:
    assert output('signals.arm()\nsignals.ignore()\nsend("SIGINT", "SIGTERM", "SIGHUP")\nprint("done")') == [
        "done"
    ]


@pytest.mark.parametrize("block", ["protected", "deferred"])
def test_signal_that_was_ignored_at_the_start_stays_ignored(block: str) -> None:
    program = f"""
signals.arm()
send("SIGHUP")
with signals.{block}(notice):
    send("SIGHUP")
print("done")
"""
    assert output(program, ignored="SIGHUP") == ["done"]


@pytest.mark.parametrize("block", ["protected", "deferred"])
def test_blocks_of_other_threads_change_nothing(block: str) -> None:
    program = f"""
signals.arm()
def work():
    with signals.{block}(notice):
        print("done")
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    assert output(program) == ["done"]


def test_signal_is_raised_after_a_whole_block() -> None:
    program = """
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
    assert output(program) == ["whole", "raised", "armed again"]


def test_signal_interrupts_a_block_that_does_not_end() -> None:
    """A pipe that nobody reads must not keep the process from ending."""
    program = """
ours, theirs = os.pipe()
signals.arm()
threading.Timer(0.2, send, ["SIGTERM"]).start()
try:
    with signals.whole():
        os.write(theirs, bytes(1 << 20))
except signals.Terminated:
    print("raised")
"""
    assert output(program) == ["raised"]


def test_whole_block_of_another_thread_delays_no_signal() -> None:
    program = """
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
    assert output(program) == ["raised"]
