"""The one door to AWS: clients made once and when needed, every call through `AWS.call`, every error translated.

Where the calls go (AWS, the simulator, any other endpoint) is the environment's business: AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloudddp import __version__
from cloudddp.aws.explain import explain
from cloudddp.errors import UsageError

Observer = Callable[[str, str, Mapping[str, Any], Any], None]


class AWS:
    """A session in one region. `observe` is told (service, method, parameters, answer) of each call."""

    def __init__(
        self, *, region: str | None = None, profile: str | None = None, observe: Observer | None = None
    ) -> None:
        import boto3
        import botocore.session
        from botocore.exceptions import BotoCoreError, ProfileNotFound

        self._clients: dict[str, Any] = {}
        self._observe = observe
        try:
            core = botocore.session.Session(profile=profile)
            core.register_component("data_loader", fast_loader(core))
            self.region: str = region or core.get_config_variable("region") or ""
            self._session = boto3.Session(botocore_session=core, region_name=self.region or None)
        except ProfileNotFound as error:
            raise UsageError(
                f"{error}", hint="`aws configure list-profiles` shows the profiles there are"
            ) from None
        except BotoCoreError as error:  # a configuration file that cannot be read
            raise UsageError(
                f"AWS configuration: {error}", hint="mend ~/.aws/config or ~/.aws/credentials"
            ) from None
        if not self.region:
            raise UsageError(
                "no AWS region is set",
                hint="give --region us-east-1, or set AWS_REGION; to try cloudddp without an account: --sim",
            )
        require_region(self.region, core)

    @property
    def endpoint(self) -> str:
        """Return the endpoint where it is not AWS's own, else ''."""
        url = str(self.client("ec2").meta.endpoint_url)
        return "" if ".amazonaws.com" in url else url

    def client(self, service: str) -> Any:
        """Return the client of a service, made on first use (its JSON model takes 0.1 s to read)."""
        if service not in self._clients:
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError

            # Said, not inherited: botocore's defaults differ between versions (3 or 5, 60 s reads).
            config = Config(
                retries={"mode": "standard", "total_max_attempts": 5},
                connect_timeout=5,
                read_timeout=30,
                user_agent_extra=f"cloudddp/{__version__}",
            )
            try:
                made = self._session.client(service, region_name=self.region, config=config)
            except (ValueError, BotoCoreError, OSError) as error:  # an endpoint that is no URL, for one
                raise UsageError(
                    f"AWS configuration: {error}",
                    hint="check AWS_ENDPOINT_URL, the other AWS_* variables and ~/.aws/config",
                ) from None
            self._clients[service] = made
        return self._clients[service]

    def call(self, service: str, method: str, /, **params: Any) -> Any:
        """Make one call and return its answer. Raises AWSError, or UsageError for what the user mistyped."""
        with explain(f"{service}:{method}", self.region):
            answer = getattr(self.client(service), method)(**params)
        if self._observe:
            self._observe(service, method, params, answer)
        return answer

    def pages(self, service: str, method: str, key: str, /, **params: Any) -> list[Any]:
        """Return the items under `key` of every page of a listing."""
        found: list[Any] = []
        token: dict[str, str] = {}
        while True:
            answer = self.call(service, method, **params, **token)
            found += answer.get(key, [])
            if not answer.get("NextToken"):
                return found
            token = {"NextToken": answer["NextToken"]}


def require_region(name: str, session: Any = None) -> None:
    """Raise UsageError for a region that EC2 does not have. Makes no call."""
    import botocore.session

    core = session or botocore.session.Session()
    known = [
        region
        for partition in ("aws", "aws-us-gov", "aws-cn")
        for region in core.get_available_regions("ec2", partition_name=partition)
    ]
    if name not in known:
        from cloudddp.spec import nearest

        raise UsageError(f"unknown AWS region {name!r}", hint=nearest(name, known))


def fast_loader(session: Any) -> Any:
    """Return botocore's own loader of service models, with msgspec to parse them.

    EC2's model is 3 MB of JSON, and its parsing was a fifth of `cloudddp status`.
    """
    from botocore.loaders import JSONFileLoader, create_loader

    class Fast(JSONFileLoader):  # type: ignore[misc]
        def _load_file(self, full_path: str, open_method: Any) -> Any:
            try:
                return _read_json(full_path, open_method)
            except FileNotFoundError:
                return None

    loader = create_loader(session.get_config_variable("data_path"))
    loader.file_loader = Fast()
    return loader


@functools.cache
def _read_json(path: str, open_method: Any) -> Any:
    """Return a JSON file of botocore's, read once in a process. Raises FileNotFoundError."""
    import msgspec

    with open_method(path, "rb") as file:
        return msgspec.json.decode(file.read())


@contextlib.contextmanager
def uninterrupted(notice: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP for the length of one call that creates something.

    An interrupt in the middle of RunInstances would leave us not knowing what it made. The signal is delivered
    right after; `notice` is called when one comes, to say so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _: object) -> None:
        held.append(number)
        notice()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, hold) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])
