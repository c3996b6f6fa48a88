"""The command line of the trainer, made from the records of config.py by tyro.

torch is not imported: `--help` and all checks of flags run before it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import tyro

from train.config import Config, flag, make
from train.errors import UsageError
from train.flags import DATASETS

R = TypeVar("R")
DESCRIPTION = "Train a model on one process, one node or many nodes."


def parse(
    argv: Sequence[str], *, prog: str = "train/main.py", defaults: Mapping[str, Any] | None = None
) -> Config:
    """Return the Config that the command line describes; `defaults` are flags by name, before those of the
    dataset's recipe. Where these say that the dataset or the model is `own`, it cannot be another one. Exits
    0 after --help; raises `UsageError` for bad flags."""
    given = dict(defaults or {})
    dataset = _dataset(argv, _dataset(_typed(given), "digits"))
    read = partial(parse_record, Config, prog=prog, description=DESCRIPTION)
    default = make(dataset=dataset)
    if given:
        try:
            default = read(_typed({**given, "dataset": dataset}), default=default)
        except UsageError as error:
            raise UsageError(f"defaults of this script: {error}") from None
    config = read(argv, default=default)
    for name in ("dataset", "model"):
        chosen = config.flags()[name]
        if given.get(name) == "own" and chosen != "own":
            raise UsageError(f"{flag(name)} {chosen}: this script has a {name} of its own; remove the flag")
    return config


def parse_record(
    kind: type[R], argv: Sequence[str], *, prog: str, description: str, default: R | None = None
) -> R:
    """Return the record that the command line describes: a flag for each field. Exits 0 after --help; raises
    `UsageError` for bad flags."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                kind,
                args=list(argv),
                default=kind() if default is None else default,
                prog=prog,
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except BrokenPipeError:  # of --help
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at the exit
        raise SystemExit(0) from None
    except SystemExit as end:
        if not end.code:
            raise
        raise UsageError(_sentence(errors.getvalue())) from None


def _typed(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as they are typed: the parser checks their names and values."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        elif isinstance(value, (tuple, list)):
            words += [flag(name), *map(str, value)]
        else:
            words.append(f"{flag(name)}={value}")
    return words


def _dataset(argv: Sequence[str], default: str) -> str:
    """Return the dataset that the flags name: its recipe determines their defaults. A wrong one is reported
    later."""
    found = default
    for number, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == "--dataset":
            found = value if equals else next(iter(argv[number + 1 : number + 2]), "")
    return found if found in DATASETS else default


def _sentence(box: str) -> str:
    """Return tyro's report of a wrong command line as one sentence: a title, the message and hints, separated
    by rules, in a box or, where the output has no such characters, without one. Another tyro may draw it in
    another way: hence the upper limit of its version in requirements.txt."""
    lines = [line.strip(" │|") for line in box.splitlines()]
    body = [line for line in lines[1:] if line and not line.startswith("╰")]
    if body and _RULE.fullmatch(body[0]):
        del body[0]
    end = next((number for number, line in enumerate(body) if _RULE.fullmatch(line)), len(body))
    message = " ".join(body[:end])
    similar = next((line.split()[0].rstrip(",") for line in body[end:] if line.startswith("--")), "")
    advice = f"did you mean {similar}?" if similar and "nrecognized" in message else "see --help"
    return f"{message.rstrip('.')} ({advice})"


_RULE = re.compile("[-─]{5,}")
