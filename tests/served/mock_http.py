"""A real HTTP server around a mock: connections kept open, and dropped where the mock says so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from tests.served.mock_numbers import Dropped, Faults, Numbers


class Mock(Protocol):
    """What `serving` needs of a mock; ``get`` and ``post`` give a status and what becomes JSON."""

    numbers: Numbers

    def get(self, path: str) -> tuple[int, Any]: ...

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]: ...


def before_answer(faults: Faults) -> int | None:
    """Do what `Faults` says of connections; the status to answer with instead, where there is one."""
    time.sleep(faults.delay)
    if faults.drops > 0:
        faults.drops -= 1
        raise Dropped
    return faults.statuses.pop(0) if faults.statuses else None


@contextmanager
def serving(mock: Mock, port: int = 0) -> Iterator[str]:
    """Serve the mock on this machine, on a free port or on ``port``; the address ends with ``/v1``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(*mock.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            mock.numbers.bodies.append(body)
            mock.numbers.keys.append(self.headers.get("Authorization"))
            try:
                instead = before_answer(mock.numbers.faults)
                self.answer(*((instead, {"error": {"message": "busy"}}) if instead else mock.post(self.path, body)))
            except Dropped:
                self.close_connection = True
                self.connection.close()
            except Exception as error:
                # A mistake of the mock's own must be seen in the test, not as a lost connection.
                self.answer(500, {"error": {"message": f"the mock failed: {error!r}"}})

        def answer(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            return

    http = Quiet(("127.0.0.1", port), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/v1"
    finally:
        http.shutdown()
        http.server_close()
