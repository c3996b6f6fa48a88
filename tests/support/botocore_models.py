"""Parses each of botocore's data files once per test process: EC2's model is 3 MB, and every boto3 session reads it again."""

from __future__ import annotations

from typing import Any

from botocore.loaders import JSONFileLoader


def keep() -> None:
    original = JSONFileLoader.load_file
    parsed: dict[str, Any] = {}

    def load_file(self: JSONFileLoader, path: str) -> Any:
        if path not in parsed:
            parsed[path] = original(self, path)
        return parsed[path]

    JSONFileLoader.load_file = load_file
