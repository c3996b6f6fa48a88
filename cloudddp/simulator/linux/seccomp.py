"""The seccomp filter of a node, which every program on it inherits.

Dropping capabilities is not enough. Where ordinary users may create user namespaces, a node's root can create
one, has all capabilities in it, and can mount what belongs to the whole computer, such as its cgroups. So
this filter refuses the system calls that create, join or populate namespaces, and those to parts of the
kernel that are not namespaced. Standard library only. Numbers and constants come from linux/seccomp.h,
linux/filter.h, linux/audit.h, linux/sched.h and the system call tables of each architecture.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

Instruction = tuple[int, int, int, int]  # struct sock_filter: code, jump if true, jump if false, value

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # on x86_64: the x32 ABI, the same calls under other numbers

_REFUSED = {  # name: number on x86_64, on aarch64
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_UNSHARE, _CLONE, _CLONE3, _SOCKET = (272, 97), (56, 220), (435, 435), (41, 198)

# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_NEW_TIME = 0x80  # for unshare; for clone, these bits hold the child's exit signal

# AF_UNIX, INET, INET6, NETLINK, PACKET: confined to the node's network namespace. AF_VSOCK, for one, is not.
_FAMILIES = (1, 2, 10, 16, 17)

_LOAD, _EQUALS, _AT_LEAST, _HAS_ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in struct seccomp_data; of the argument, its low half.
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_SET_SECCOMP, _FILTER = 22, 2


class _SockFilter(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _SockFprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_SockFilter)))


def install_filter() -> None:
    """Install the filter for this process and all its descendants.

    Requires no_new_privileges and a single thread. Raises OSError, also for an unknown architecture.
    """
    instructions = list(_program(os.uname().machine))
    array = (_SockFilter * len(instructions))(*(_SockFilter(*one) for one in instructions))
    program = _SockFprog(len(instructions), array)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot install a seccomp filter: {os.strerror(number)}")


def _program(architecture: str) -> Iterator[Instruction]:
    if architecture not in _ARCHITECTURE:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {architecture}")
    which = list(_ARCHITECTURE).index(architecture)
    yield (_LOAD, 0, 0, _ARCH)
    yield (_EQUALS, 1, 0, _ARCHITECTURE[architecture])
    yield _refuse(errno.EPERM)
    yield (_LOAD, 0, 0, _NUMBER)
    yield (_AT_LEAST, 0, 1, _X32)
    yield _refuse(errno.EPERM)
    for numbers in _REFUSED.values():
        yield (_EQUALS, 0, 1, numbers[which])
        yield _refuse(errno.EPERM)
    # The flags of clone3 are in memory, which a filter cannot read. On ENOSYS the C library falls back to
    # clone.
    yield (_EQUALS, 0, 1, _CLONE3[which])
    yield _refuse(errno.ENOSYS)
    for call, flags in ((_UNSHARE, _NEW_NAMESPACES | _NEW_TIME), (_CLONE, _NEW_NAMESPACES)):
        yield (_EQUALS, 0, 4, call[which])
        yield (_LOAD, 0, 0, _FIRST_ARGUMENT)
        yield (_HAS_ANY, 0, 1, flags)
        yield _refuse(errno.EPERM)
        yield (_RETURN, 0, 0, _ALLOW)
    yield (_EQUALS, 0, 2 + len(_FAMILIES), _SOCKET[which])
    yield (_LOAD, 0, 0, _FIRST_ARGUMENT)
    for position, family in enumerate(_FAMILIES):
        yield (_EQUALS, len(_FAMILIES) - position, 0, family)
    yield _refuse(errno.EAFNOSUPPORT)
    yield (_RETURN, 0, 0, _ALLOW)


def _refuse(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERROR | number)
