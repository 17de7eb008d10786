"""A real HTTP server with a real small model behind it: /v1/models, /v1/completions with echo, /tokenize, /version.

Its faults are switches: each is something that a server in use has done.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


@dataclass
class SmallServer:
    """What the server is and how it fails."""

    model: Any
    tokenizer: Any
    names: tuple[str, ...] = ("small",)
    context: int | None = 2048
    has_tokenize: bool = True
    has_version: bool = True
    echo: bool = True
    adds_bos: bool = False
    zeros: bool = False
    constant: bool = False
    other_ids: bool = False
    other_texts: bool = False
    token_ids: bool = False
    says: str = "prompt is too long"
    dies_after: int | None = None
    unsteady: bool = False
    served: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            entry = {"max_model_len": self.context} if self.context else {}
            return 200, {"data": [{"id": name, "owned_by": "vllm", **entry} for name in self.names]}
        if path == "/version" and self.has_version:
            return 200, {"version": "0.0.test"}
        return 404, {"detail": "Not Found"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize" and self.has_tokenize:
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return 200, {"tokens": [*ids, 1] if self.other_ids else ids}
        if path != "/v1/completions":
            return 405, {"detail": "Method Not Allowed"}
        if body["model"] not in self.names:
            return 404, {"message": f"The model {body['model']} does not exist."}
        return self.complete([int(i) for i in body["prompt"][0]])

    def complete(self, ids: list[int]) -> tuple[int, Any]:
        with self.lock:
            self.served.append(len(ids))
            if self.dies_after is not None and len(self.served) > self.dies_after:
                raise ConnectionAbortedError
            limit = self.context or 2048
            if len(ids) + 1 > limit:
                return 400, {"message": f"maximum context length is {limit} tokens: {self.says}"}
            return 200, {"choices": [self.choice([256, *ids] if self.adds_bos else ids)]}

    def choice(self, ids: list[int]) -> dict[str, Any]:
        with torch.inference_mode():
            logprobs_TV = torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        last = int(logprobs_TV[-1].argmax())
        following = [*ids[1:], last]
        values = [float(logprobs_TV[t, token]) for t, token in enumerate(following)]
        if self.zeros or self.constant:
            values = [0.0 if self.zeros else -5.0] * len(values)
        if self.unsteady:
            values = [value - len(self.served) for value in values]
        top = [{str(int(row.argmax())): float(row.max())} for row in logprobs_TV]
        texts = [self.text(token) for token in [*ids, last]]
        if not self.echo:
            return {"index": 0, "text": texts[-1], "logprobs": None}
        return {
            "index": 0,
            "logprobs": {"tokens": texts, "token_logprobs": [None, *values], "top_logprobs": [None, *top]},
        }

    def text(self, token: int) -> str:
        if self.token_ids:
            return f"token_id:{token + 1 if self.other_texts else token}"
        return str(self.tokenizer.decode([(token + 1) % 256 if self.other_texts else token]))


@contextmanager
def serving(server: SmallServer) -> Iterator[str]:
    """Run it on a free port; the address ends with /v1."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(*server.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self.answer(*server.post(self.path, body))
            except ConnectionAbortedError:
                self.close_connection = True
                self.connection.close()

        def answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            return

    http = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/v1"
    finally:
        http.shutdown()
        http.server_close()
