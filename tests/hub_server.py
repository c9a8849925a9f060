"""A Hub on this machine: the real requests and exceptions of its client, without the network."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

ANSWERS: dict[str, tuple[int, str]] = {
    "/api/models/owner/there": (200, ""),
    "/api/models/owner/typo": (401, ""),  # without a token
    "/api/models/owner/gone": (404, "RepoNotFound"),  # with one
    "/api/models/owner/gated": (403, "GatedRepo"),
    "/api/models/owner/down": (503, ""),
}
"""Path -> (status, the code that the client reads)."""


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does."""

    def do_GET(self) -> None:
        status, code = ANSWERS[self.path.partition("?")[0]]
        body = json.dumps({"id": "owner/there"}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_server() -> Iterator[None]:
    """The client asks it meanwhile, although the tests are offline."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NO_PROXY", "127.0.0.1")
            patch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            huggingface_hub.close_session()
            yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        huggingface_hub.close_session()
