"""A stand-in for the AWS CLI with its Session Manager plugin: `aws ssm start-session` for SSH, and nothing
else."""

from __future__ import annotations

import sys
from pathlib import Path

from support.programs import program

_PROGRAM = """\
#!/bin/sh
# aws ssm start-session --target ID --document-name AWS-StartSSHSession --parameters portNumber=PORT
[ "$1 $2 $3 $5 $6 $7" = "ssm start-session --target --document-name AWS-StartSSHSession --parameters" ] || {{
    echo "usage: aws ssm start-session ..., not: $*" >&2
    exit 252
}}
echo "$4 $8" >> {log}
exec {python} -m cloudddp sim session --target "$4" --port "${{8#portNumber=}}"
"""


def install(folder: Path) -> Path:
    """Write the program `aws` to a folder. Returns a file with a line "ID portNumber=PORT" for each
    session."""
    log = folder / "sessions"
    program(folder / "aws", _PROGRAM.format(python=sys.executable, log=log))
    program(folder / "session-manager-plugin", "")  # which the AWS CLI starts
    return log
