"""The only access to AWS: clients created once and on demand, every call through `AWS.call`, every error
translated.

AWS_ENDPOINT_URL decides where calls go: AWS, the simulator, or any other endpoint.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cloudddp import __version__, timings
from cloudddp.aws import answers
from cloudddp.aws.answers import EXPIRED, SHORTAGES, action, explain
from cloudddp.config.schema import nearest
from cloudddp.errors import AWSError, CloudDDPError, CredentialsError, UsageError
from cloudddp.text import one_line, some

_LISTED = 12  # profiles in an error message

# Services with endpoints in few regions only.
_REGION_OF = {"pricing": "us-east-1"}

T = TypeVar("T")
_MOST_PAGES = 500  # of one listing; EC2's default is 1,000 items a page

Observer = Callable[[str, str, Mapping[str, Any], Any], None]


class RegionError(UsageError):
    """There is no region, or none of that name."""


class AWS:
    """A session in one region. `observe` is called with (service, method, parameters, answer) after each
    call.

    `ask` asks for an MFA code (credentials.AskCode). `finishing`: see credentials.Credentials.
    """

    def __init__(
        self,
        *,
        region: str | None = None,
        profile: str | None = None,
        observe: Observer | None = None,
        ask: Callable[[str], str | None] = lambda _: None,
        finishing: bool = False,
    ) -> None:
        with timings.span("imports: boto3"):
            # 0.1 s, which commands that call no AWS do not need; likewise below.
            import boto3.session
            import botocore.session
            from botocore.exceptions import BotoCoreError, ProfileNotFound

            from cloudddp.aws.credentials import Credentials

        for name, url in os.environ.items():
            if url and (name == "AWS_ENDPOINT_URL" or name.startswith("AWS_ENDPOINT_URL_")):
                _require_url(url, name)
        self._clients: dict[str, Any] = {}
        self._observe = observe
        try:
            core = botocore.session.Session(profile=profile)
            core.get_scoped_config()  # raises for a profile that does not exist
            self.region: str = region or core.get_config_variable("region") or ""
            self.credentials = Credentials(core, ask, finishing=finishing)
            core.register_component("credential_provider", self.credentials)
            core.set_default_client_config(_config())  # for the clients that load credentials
        except ProfileNotFound:
            raise _no_profile(core) from None
        except BotoCoreError as error:  # an unreadable configuration file
            raise UsageError(
                f"AWS configuration: {error}", hint="fix ~/.aws/config or ~/.aws/credentials"
            ) from None
        if not self.region:
            raise RegionError(
                "no AWS region is set",
                hint="give --region us-east-1, or set AWS_REGION; to try cloudddp without an account: --sim",
            )
        require_region(self.region, core)
        core.set_config_variable("region", self.region)  # also for the clients that load credentials
        self._core = core
        self._session = boto3.session.Session(botocore_session=core)
        outputs = [partition["outputs"] for partition in core.get_data("partitions")["partitions"]]
        self._suffixes = tuple(
            f".{found[kind]}" for found in outputs for kind in ("dnsSuffix", "dualStackDnsSuffix")
        )

    def has_region(self, name: str) -> bool:
        """Return whether EC2 has a region of that name, as far as botocore knows."""
        return name in regions(self._core)

    def at(self, region: str) -> AWS:
        """Return a connection to another region with the same credentials."""
        other = copy.copy(self)
        other.region, other._clients = region, {}
        return other

    @property
    def endpoint(self) -> str:
        """The endpoint if it is not AWS's own, else ''."""
        url = str(self.client("ec2").meta.endpoint_url)
        return "" if (urlsplit(url).hostname or "").endswith(self._suffixes) else url

    @property
    def partition(self) -> str:
        """The partition of the region: aws, aws-cn, aws-us-gov and others."""
        return str(self._session.get_partition_for_region(self.region))

    @property
    def home_region(self) -> str:
        """The region of the partition that is enabled in every account."""
        partitions = self._core.get_data("partitions")["partitions"]
        return str(
            next(
                partition["outputs"]["implicitGlobalRegion"]
                for partition in partitions
                if partition["id"] == self.partition
            )
        )

    def client(self, service: str) -> Any:
        """Return the boto3 client of a service, created on first use. Raises UsageError."""
        if service not in self._clients:
            from botocore.exceptions import BotoCoreError

            try:
                where = _REGION_OF.get(service, self.region)
                with timings.span(f"AWS client: {service}"):
                    client = self._session.client(service, region_name=where, config=_config())
            except (ValueError, BotoCoreError, OSError) as error:  # for example an endpoint that is not a URL
                raise UsageError(
                    f"AWS configuration: {error}",
                    hint="check AWS_ENDPOINT_URL, the other AWS_* variables and ~/.aws/config",
                ) from None
            _require_url(str(client.meta.endpoint_url), "endpoint_url in ~/.aws/config")
            client.meta.events.register_first("needs-retry.ec2.RunInstances", _no_capacity_retries)
            self._clients[service] = client
        return self._clients[service]

    def call(self, service: str, method: str, /, **params: Any) -> Any:
        """Make one call and return its answer, for calls that change something; `read` and `listed` read.

        Raises AWSError, or UsageError for what the user mistyped.
        A call that was refused because the credentials have expired had no effect: it is repeated if there
        are others.
        """
        try:
            answer = self._call(service, method, params)
        except CredentialsError as error:
            if error.code not in EXPIRED or not self.credentials.replace_refused():
                raise
            answer = self._call(service, method, params)
        if created := answers.CREATED.get(method):
            answers.decode(answer, created[1], action(service, method), self.region, created[0])
        if self._observe:
            self._observe(service, method, params, answer)
        return answer

    def _call(self, service: str, method: str, params: Mapping[str, Any]) -> Any:
        began, code, retries = time.monotonic(), "", 0
        try:
            with explain(action(service, method), self.region, self.credentials.source.renewal, self._decode):
                answer = getattr(self.client(service), method)(**params)
            retries = int(answer.get("ResponseMetadata", {}).get("RetryAttempts") or 0)
            return answer
        except AWSError as error:
            code, retries = error.code or type(error).__name__, error.retries
            raise
        finally:
            name = f"AWS {service} {method}"
            timings.add(name, began, time.monotonic(), error=code, retries=retries)

    def _decode(self, encoded: str) -> str:
        """Return the JSON of an encoded authorization message, or '' if the caller may not decode it."""
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            answer = self.client("sts").decode_authorization_message(EncodedMessage=encoded)
        except (ClientError, BotoCoreError, ResponseParserError, CloudDDPError):
            return ""
        return str(answer.get("DecodedMessage", ""))

    def dry_run(self, service: str, method: str, /, **params: Any) -> None:
        """Ask EC2 whether it would accept a call, without making it. Raises AWSError for what it would answer
        instead."""
        try:
            self.call(service, method, **params, DryRun=True)
        except AWSError as error:
            if error.code != "DryRunOperation":
                raise
        else:
            raise CloudDDPError(
                f"{self.endpoint or 'AWS'} has made {action(service, method)} instead of a dry run",
                hint="`cloudddp down` removes what it created",
            )
        if self._observe:
            self._observe(service, method, {**params, "DryRun": True}, {})

    def read(self, service: str, method: str, kind: type[T], key: str = "", /, **params: Any) -> T:
        """Make one call and return its answer as `kind`, or what it has under `key`. Raises as `call` does,
        and AWSError for any other answer."""
        answer = self.call(service, method, **params)
        return answers.decode(answer, kind, action(service, method), self.region, key)

    def listed(
        self,
        method: str,
        kind: type[T],
        /,
        *,
        service: str = "ec2",
        key: str = "",
        absent: str = "",
        **params: Any,
    ) -> list[T]:
        """Return the items of every page of a listing, each as `kind`; none if AWS answers with an error code
        that begins with `absent`. `key` is where they are in the answer: KeyPairs for describe_key_pairs.
        Raises as `read` does."""
        call, found = action(service, method), list[T]()
        key = key or re.sub("^[A-Z][a-z]+", "", call.partition(":")[2])
        token, seen = dict[str, str](), set[str]()
        while True:
            try:
                answer = self.call(service, method, **params, **token)
            except AWSError as error:
                if not absent or not error.code.startswith(absent):
                    raise
                return []
            found += answers.decode(answer, list[kind], call, self.region, key)  # type: ignore[valid-type]
            following = answer.get("NextToken")
            if not following:
                return found
            if following in seen or len(seen) == _MOST_PAGES:
                reason = "a page names itself as the next one" if following in seen else "too many pages"
                raise answers.malformed(call, self.region, reason)
            seen.add(following)
            token = {"NextToken": following}


def _require_url(url: str, origin: str) -> None:
    """Raise UsageError unless requests can be sent to a URL. urlsplit checks the port when it is read."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(
            f"AWS configuration: {one_line(origin, 60)} is not a URL: {one_line(url, 100)}",
            hint="unset it, or fix it: it has to be http://HOST:PORT or https://HOST:PORT",
        )


def require_region(name: str, session: Any = None) -> None:
    """Raise UsageError for a region that EC2 does not have. Makes no call."""
    core = session
    if core is None:
        import botocore.session

        core = botocore.session.Session()
    known = regions(core)
    if name not in known:
        raise RegionError(f"unknown AWS region {name!r}", hint=nearest(name, known))


def regions(core: Any) -> list[str]:
    """Return every region that has EC2, in all partitions: what Session.get_available_regions returns for
    each of them, in a fifth of the time."""
    found = []
    for partition in core.get_data("endpoints")["partitions"]:
        endpoints = partition["services"].get("ec2", {}).get("endpoints", {})
        found += [name for name in endpoints if name in partition["regions"]]
    return found


def _config() -> Any:
    """Return the settings of every client, explicit: botocore's defaults depend on its version (3 or 5
    attempts, 60 s read timeout)."""
    from botocore.config import Config

    return Config(
        retries={"mode": "standard", "total_max_attempts": 5},
        connect_timeout=5,
        read_timeout=30,
        user_agent_extra=f"cloudddp/{__version__}",
    )


def _no_capacity_retries(response: Any, **_: Any) -> None:
    """Keep botocore, whose handler comes next, from retrying a lack of capacity: EC2 returns HTTP 500 for it,
    and botocore would repeat the call 4 times in one zone."""
    if response is not None and response[1].get("Error", {}).get("Code") in SHORTAGES:
        response[0].status_code = 400


def _no_profile(core: Any) -> UsageError:
    """Return the error for a profile that does not exist, with similar names."""
    name = str(core.get_config_variable("profile"))
    known = sorted(map(str, core.available_profiles))
    if not known:
        hint = "there are no profiles: `aws configure sso` or `aws configure` creates one"
    elif not (hint := nearest(name, known)).startswith("did you mean"):  # there may be hundreds
        hint = one_line(f"your profiles: {some(known, _LISTED)}", 600)
    return UsageError(f"AWS profile {one_line(name, 100)!r} does not exist", hint=hint)
