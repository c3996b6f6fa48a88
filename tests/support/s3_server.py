"""moto's S3 in this process, for tests that look at single requests or answer them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import boto3


def refusal(status: str, code: str, text: str = "x", **more: str) -> tuple[str, bytes]:
    """Return an answer of S3, with more elements."""
    elements = {"Code": code, "Message": text, **more}
    return status, f"<Error>{''.join(f'<{k}>{v}</{k}>' for k, v in elements.items())}</Error>".encode()


class S3:
    """moto's S3 on a port of 127.0.0.1. `answer` may answer a request instead: it gets the environ."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        moto: Any = DomainDispatcherApplication(create_backend_app)
        self.answer: Callable[[dict[str, Any]], tuple[str, bytes] | None] = lambda _: None
        self.requests: list[str] = []

        def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            self.requests.append(
                f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
            )
            found = self.answer(environ)
            if found is None:
                return list(moto(environ, start_response))
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(
                found[0], [("Content-Type", "application/xml"), ("Content-Length", str(len(found[1])))]
            )
            return [found[1]]

        self._server = make_server("127.0.0.1", 0, serve, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
