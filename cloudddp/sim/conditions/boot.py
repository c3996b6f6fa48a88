"""How slowly and how badly nodes boot: the condition `boot`. Pure, standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Boot:
    """Applies to every boot that begins from then on. Seconds, except for numbers of GPUs."""

    ssh_seconds: float = 0.0  # from cloud-init's network stage until sshd starts; timers run meanwhile
    nologin_seconds: float = 0.0  # after sshd has started, in which /run/nologin exists
    final_seconds: float = 0.0  # after sshd has started until cloud-init's last stage (runcmd) begins
    apt_lock_seconds: float = 0.0  # after sshd has started, in which another process holds dpkg's lock
    first_import_seconds: float = 0.0  # that the first import of torch on the node takes longer
    failed_gpus: int = 0  # of the GPUs of the type: lost by nvidia-smi, and unusable in PyTorch
    unusable_gpus: int = 0  # likewise, but nvidia-smi lists them, as without a fabric manager


NAMES = tuple(field.name for field in fields(Boot))
MAX_GPUS = 16
