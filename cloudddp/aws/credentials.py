"""Loads AWS credentials with botocore's providers, and keeps them usable: the one place that asks for an MFA
code.

Role and SSO credentials are shared with the AWS CLI: they are read from and written to its cache, as the CLI
does (awscli/customizations/assumerole.py), so that one MFA code serves all commands of a session. Imported
together with botocore, when the first connection to AWS is made.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.credentials
from botocore.exceptions import ClientError, RefreshWithMFAUnsupportedError
from botocore.utils import JSONFileCache

from cloudddp.aws.credential_source import (
    WEB_IDENTITY,
    Source,
    explained,
    parse_time,
    source,
    unreadable_token,
)
from cloudddp.errors import CredentialsError, Message
from cloudddp.text import one_line, size_of

AskCode = Callable[[str], str | None]
"""Asks for an MFA code with a question. Returns None if there is no terminal, '' if the user gives none."""

_CACHE = "~/.aws/cli/cache"
_QUESTIONS = 3
_MAX_TOKEN = 100_000  # bytes; STS accepts 20,000 characters (API Reference, AssumeRoleWithWebIdentity)
_SHORTEST = timedelta(seconds=30)  # what is left of credentials that are still used
_ASKS_BEFORE_END = timedelta(minutes=15)
_WRONG_CODE = "MultiFactorAuthentication failed"


class _NoCode(CredentialsError):
    """An MFA code is needed, and was not given."""


class SharedCache:
    """The AWS CLI's cache of role and SSO credentials, for one load. It never fails: an entry that cannot be
    read does not exist, and one that cannot be written is asked for again by the next command.

    `current` are the credentials in use, if they are in the cache: not those that were needed to get them.
    botocore looks for them first.
    """

    def __init__(self) -> None:
        self._files = JSONFileCache(os.path.expanduser(_CACHE))  # noqa: PTH111  as the CLI; never raises
        self._key: str | None = None
        self.current: dict[str, Any] | None = None

    def __contains__(self, key: str) -> bool:
        found = self._read(key)
        self._key = self._key or key
        if key == self._key:
            self.current = found
        return found is not None

    def __getitem__(self, key: str) -> dict[str, Any]:
        found = self._read(key)
        if found is None:
            raise KeyError(key)
        return found

    def __setitem__(self, key: str, value: dict[str, Any]) -> None:
        if key == self._key:
            self.current = value
        with contextlib.suppress(OSError):
            self._files[key] = value

    def discard(self) -> None:
        """Remove the credentials in use: AWS no longer accepts them."""
        if self._key is not None:
            with contextlib.suppress(OSError, KeyError):
                del self._files[self._key]

    @property
    def name(self) -> str:
        """The name of the file of the credentials in use."""
        return f"{self._key}.json"

    @property
    def ends(self) -> datetime | None:
        return _end(self.current) if self.current else None

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            found = self._files[key]
        except (KeyError, RecursionError):
            return None
        keys = found.get("Credentials") if isinstance(found, dict) else None
        if not isinstance(keys, dict) or _end(found) is None:
            return None
        names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
        return found if all(isinstance(keys.get(name), str) for name in names) else None


def _end(entry: dict[str, Any]) -> datetime | None:
    expiration = entry["Credentials"].get("Expiration")
    return expiration if isinstance(expiration, datetime) else parse_time(expiration)


def _checked(keys: Any) -> Any:
    """Return credentials that can be sent. Raises ValueError for others: botocore does not look at their
    type."""
    for text in (keys.access_key, keys.secret_key, keys.token or ""):
        if not isinstance(text, str) or one_line(text) != text:
            raise ValueError("an access key or a token is not a text on one line")
    return keys


def _require_token_file(source: Source) -> None:
    """Raise UsageError for a web identity token that botocore, which reads the whole file, must not read."""
    if source.kind != WEB_IDENTITY:
        return
    try:
        found = Path(source.detail).stat()
    except (OSError, ValueError):
        return  # which botocore's own attempt reports
    if not stat.S_ISREG(found.st_mode):
        raise unreadable_token(source, "not a regular file")
    if found.st_size > _MAX_TOKEN:
        raise unreadable_token(source, f"it is {size_of(found.st_size)} long, more than a token")


class Credentials:
    """The credentials of one botocore session: its component `credential_provider`, and what that provides.

    They are loaded at the first call. `finishing`: a command that ends something uses credentials until they
    end, without asking for an MFA code before. Safe to use from any thread.
    """

    method = "cloudddp"

    def __init__(self, core: Any, ask: AskCode, *, finishing: bool = False) -> None:
        self._core, self._ask, self._finishing = core, ask, finishing
        explicit = core.instance_variables().get("profile") is not None
        self.source: Source = source(core.full_config, core.get_config_variable("profile"), explicit=explicit)
        self._lock = threading.RLock()
        self._loaded: Any = None
        self._cache = SharedCache()
        self._question = ""

    def load_credentials(self) -> Credentials:
        """Return itself, for botocore."""
        return self

    def get_deferred_property(self, name: str) -> Callable[[], Any]:
        """Return a function for a property, for botocore's endpoint rules."""
        return lambda: getattr(self._loaded, name, None)

    def get_frozen_credentials(self) -> Any:
        """Return the keys to sign a request with. Raises CredentialsError, UsageError, AWSError."""
        with self._lock:
            try:
                return _checked(self._frozen())
            except Exception as error:
                found = explained(error, self.source)
                if found is None:
                    raise
                raise found from None

    def replace_refused(self) -> bool:
        """Load other credentials than those that AWS has just refused as expired. Return False if there are
        none.

        For example the user has logged in again, or role credentials were revoked. Raises CredentialsError.
        """
        with self._lock:
            refused = self.get_frozen_credentials()
            self._cache.discard()
            self._loaded = None
            fresh = self.get_frozen_credentials()
        return bool(fresh.access_key != refused.access_key)

    def ends(self) -> datetime | None:
        """Return when the user has to log in again; None if never, or unknown. Makes no call; use it after
        one."""
        return self.source.ends(self._cache.ends)

    def renewal_now(self) -> str:
        """Return how to renew credentials that have not ended yet, as a sentence without its full stop.
        Makes no call.

        botocore asks for an MFA code only in the last 15 minutes of a cached session
        (CachedCredentialFetcher.DEFAULT_EXPIRY_WINDOW_SECONDS), so until then the session has to be removed
        first.
        """
        ends = self._cache.ends
        if not self.source.mfa or ends is None or ends - datetime.now(UTC) < _ASKS_BEFORE_END:
            return Message(f"renew them: {self.source.renewal}")
        return Message(f"renew them now: `rm {_CACHE}/{self._cache.name}`, then {self.source.renewal}")

    def _frozen(self) -> Any:
        for _ in range(_QUESTIONS):
            if self._loaded is None:
                self._load()
            try:
                return self._loaded.get_frozen_credentials()
            except RefreshWithMFAUnsupportedError:  # 10 minutes before the end
                if (usable := self._usable()) is not None:
                    return usable
                self._loaded = None
            except _NoCode:
                self._loaded = None
                if (usable := self._usable()) is not None:
                    return usable
                raise
            except ClientError as error:
                self._loaded = None
                if _WRONG_CODE not in str(error):
                    raise
                self._question = "wrong code. "
        raise CredentialsError(
            f"AWS refused {_QUESTIONS} MFA codes for {self.source.shown}",
            renew="check the clock of your MFA device, and mfa_serial in ~/.aws/config",
        )

    def _load(self) -> None:
        from botocore.exceptions import NoCredentialsError

        _require_token_file(self.source)
        self._cache = SharedCache()
        chain = botocore.credentials.create_credential_resolver(self._core, cache=self._cache)
        # botocore has no public way to set it.
        chain.get_provider("assume-role")._prompter = self._prompt
        loaded = chain.load_credentials()
        if loaded is None:
            raise NoCredentialsError
        self._loaded = loaded

    def _prompt(self, question: str) -> str:
        """Return an MFA code, for botocore, whose question is "Enter MFA code for SERIAL: "."""
        serial = one_line(question.removeprefix("Enter MFA code for ").removesuffix(": "), 200)
        needs = f"{self.source.role or 'the role'} needs a code of MFA device {serial}, and"
        no_code = _NoCode(f"{needs} none was given", renew=self.source.renewal)
        if self._finishing and self._usable() is not None:
            raise no_code
        for _ in range(_QUESTIONS):
            code = self._ask(f"{self._question}MFA code for {serial} (Enter cancels): ")
            if code is None:
                raise _NoCode(f"{needs} there is no terminal to ask on", renew=self.source.renewal)
            if not code:
                raise no_code
            if len(code) == 6 and code.isascii() and code.isdigit():
                return code
            self._question = "an MFA code has 6 digits. "
        raise no_code

    def _usable(self) -> Any:
        """Return the role credentials in use, if they have not ended yet."""
        ends = self._cache.ends
        if self._cache.current is None or ends is None or ends - datetime.now(UTC) < _SHORTEST:
            return None
        keys = self._cache.current["Credentials"]
        return botocore.credentials.ReadOnlyCredentials(
            keys["AccessKeyId"], keys["SecretAccessKey"], keys["SessionToken"]
        )
