"""Programs of a few lines that take the place of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def program(path: Path, text: str) -> Path:
    """Write a program, by default a shell script, and its folder; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def first_on_path(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> None:
    """Write a program that this process and its children find before others of its name."""
    monkeypatch.setenv("PATH", str(program(path, text).parent), prepend=os.pathsep)
