"""Attempts of another user of the computer to access a simulator. Run as that user; standard library only.

Reads the targets as JSON from stdin, and prints the attempts that succeeded as a list of sentences.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_PTRACE_SEIZE = 0x4206
_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_PAGES = (
    ("GET", "/_cloudddp/health", b""),
    ("GET", "/_cloudddp/nodes", b""),
    ("GET", "/_cloudddp/conditions", b""),
    ("POST", "/_cloudddp/fault", b'{"kind": "kill", "nodes": ["0"], "cluster": null}'),
    ("POST", "/_cloudddp/conditions", b'{"throttle": {"RunInstances": 1}}'),
    ("POST", "/", b"Action=DescribeInstances&Version=2016-11-15"),
    ("POST", "/moto-api/reset", b""),
)


def main() -> None:
    wanted = json.load(sys.stdin)
    found = [
        *_calls(wanted["endpoint"]),
        *_listeners(wanted["tcp"], wanted["patience"]),
        *_unix_sockets(wanted["unix"]),
        *_files(wanted["paths"]),
        *_processes(wanted["pids"]),
        *_namespaces(wanted["pids"]),  # last: a process that has entered one has lost its rights outside
    ]
    print(json.dumps(found))


def _calls(port: int) -> Iterator[str]:
    for method, path, body in _PAGES if port else ():
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        headers = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/ec2/aws4_request, Signature=b",
        }
        try:
            line.request(method, path, body, headers)
            yield f"{method} {path}: {line.getresponse().status}"
        except (OSError, http.client.HTTPException):
            pass
        finally:
            line.close()


def _listeners(addresses: list[tuple[str, int]], patience: float) -> Iterator[str]:
    """Report servers that send data, or keep the connection open for `patience` seconds."""
    for host, port in addresses:
        for sent in (b"", b"SSH-2.0-other\r\n", b"GET / HTTP/1.0\r\n\r\n"):
            try:
                with socket.create_connection((host, port), 10) as connection:
                    connection.settimeout(patience)
                    connection.sendall(sent)
                    if received := connection.recv(64):
                        yield f"{host}:{port} answers {received!r} to {sent!r}"
            except TimeoutError:
                yield f"{host}:{port} keeps a connection open after {sent!r}"
            except OSError:
                pass


def _unix_sockets(names: list[str]) -> Iterator[str]:
    for name in names:
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect(f"\0{name[1:]}" if name.startswith("@") else name)
                yield f"Unix socket {name} can be connected to"
            except OSError:
                pass


def _files(paths: list[str]) -> Iterator[str]:
    for path in paths:
        for how, flags in (("read", os.O_RDONLY), ("written", os.O_WRONLY)):
            try:
                os.close(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK))
                yield f"{path} can be {how}"
            except OSError:
                pass
        for how in ("planted", "moved"):
            planted = f"{path}/planted" if how == "planted" else f"{path}.moved"
            try:
                if how == "planted":
                    Path(planted).touch()
                    Path(planted).unlink()
                else:
                    Path(path).rename(planted)
                    Path(planted).rename(path)
                yield f"{path}: can be {how}"
            except OSError:
                pass


def _processes(pids: list[int]) -> Iterator[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    for pid in pids:
        proc = Path(f"/proc/{pid}")
        for name in ("environ", "mem", "root/etc/passwd", "root/home", "cwd/.", "fd", "map_files"):
            try:
                os.close(os.open(proc / name, os.O_RDONLY))
                yield f"process {pid}: {name} can be opened"
            except OSError:
                pass
        try:
            signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGCONT)
            yield f"process {pid}: can be sent signals"
        except OSError:
            pass
        if libc.ptrace(_PTRACE_SEIZE, pid, 0, 0) == 0:
            yield f"process {pid}: can be traced"


def _namespaces(pids: list[int]) -> Iterator[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in pids:
        for name, kind in (("user", _NEW_USER), ("net", _NEW_NETWORK), ("mnt", 0), ("pid", 0)):
            try:
                handle = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
            except OSError:
                continue
            yield f"process {pid}: its {name} namespace can be opened"
            if libc.setns(handle, kind) == 0:
                yield f"process {pid}: its {name} namespace can be entered"
            os.close(handle)


if __name__ == "__main__":
    main()
