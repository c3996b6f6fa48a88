"""Verbs as whole processes: `--help` and `status`, compared with other launchers."""

from __future__ import annotations

from bench.harness import Options, compare, environment, run, script, simulator


def bench_help(options: Options) -> None:
    """`cloudddp --help`, compared with `torchx --help`."""
    print("help: whole process")
    theirs = [[str(options.venv / "bin" / "torchx"), "--help"]] if options.venv else []
    compare([[script("cloudddp"), "--help"], *theirs], environment("/nonexistent"))


def bench_status(options: Options) -> None:
    """`cloudddp status` of 2 nodes on the simulator, compared with `flintrock describe`."""
    print("status: whole process, 2 nodes on the simulator")
    theirs = []
    if options.venv:
        theirs.append([str(options.venv / "bin" / "flintrock"), "describe", "--ec2-region", "us-east-1"])
    with simulator() as env:
        run([script("cloudddp"), "up", "-n", "2"], env=env)
        compare([[script("cloudddp"), "status"], *theirs], env)
