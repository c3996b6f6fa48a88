"""ed25519 keys in OpenSSH's formats: generates key pairs, and validates public keys from other sources.

`cryptography` is a dependency of paramiko; a pair takes 0.2 ms.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

KIND = "ssh-ed25519"
# RFC 8709: the key itself follows, 32 bytes.
HEADER = len(KIND).to_bytes(4, "big") + KIND.encode() + (32).to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class KeyPair:
    private: str  # OpenSSH private key file, no passphrase
    public: str  # "ssh-ed25519 AAAA..."


def generate() -> KeyPair:
    """Return a new key pair."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return KeyPair(private.decode(), public.decode())


def public_of(private: str) -> str:
    """Return the public key of a private one as `generate` returns it."""
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_ssh_private_key(private.encode(), password=None)
    return key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH).decode()


def public(text: str) -> str:
    """Return a public key as `ssh-ed25519 AAAA...`, without its comment. Raises ValueError."""
    parts = text.split(maxsplit=2)
    if len(text) > 1024 or len(text.splitlines()) != 1 or len(parts) < 2 or parts[0] != KIND:
        raise ValueError(f"not one line that begins with {KIND}")
    try:
        blob = base64.b64decode(parts[1], validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"not an {KIND} key") from None
    if not blob.startswith(HEADER) or len(blob) != len(HEADER) + 32:
        raise ValueError(f"not an {KIND} key")
    return f"{KIND} {base64.b64encode(blob).decode()}"
