"""Servers: what is asked of them before anything is scored."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.errors import EngineError, UsageError
from harness.served.address import find_server
from tests.fault_cases.entry import Fault


class Answering(BaseHTTPRequestHandler):
    """Lists what ``models`` says, and counts what else it is asked."""

    models: list[str] | None = None
    asked: list[str] = []

    def do_GET(self) -> None:
        known = self.path == "/v1/models" and self.models is not None
        body = json.dumps({"data": [{"id": name} for name in self.models or []]}).encode() if known else b""
        self.send_response(200 if known else 405)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.send_response(400)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def server(models: list[str] | None) -> Iterator[tuple[str, list[str]]]:
    """Address of a small server, and the list of the requests that would score something."""
    handler = type("Handler", (Answering,), {"models": models, "asked": []})
    running = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", handler.asked  # type: ignore[attr-defined]
    finally:
        running.shutdown()
        running.server_close()


def plumbing(folder: Path) -> None:
    """405 to everything, no model, an unknown model: one line each before anything is asked to score."""
    with server(None) as (address, asked), pytest.raises(UsageError, match=r"lists no models \(HTTP 405\)"):
        find_server(f"{address}/v1/completions", "m")
    assert asked == []
    with server(["right", "other"]) as (address, asked):
        with pytest.raises(UsageError, match="the server has 2 models: right, other"):
            find_server(address, None)
        with pytest.raises(EngineError, match="the server does not know null; it has right, other"):
            find_server(address, "null")
        # The address as it is written in other tools works too: it is not used verbatim.
        assert find_server(f"{address}/v1/completions", "right").root == f"{address}/v1"
    assert asked == []
    with pytest.raises(UsageError, match="nothing answers at"):
        find_server(address, None, timeout=2)


ROWS = [
    Fault(id="B43-plumbing", title="a wrong address, then no model", check=plumbing),
]
