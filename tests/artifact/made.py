"""Artifacts of headers alone at published sizes, tiny real ones, and a Hub on this machine that counts bytes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from harness.exl3.checkpoint import Checkpoint
from harness.exl3.headers import TensorHeader

HIDDEN, EXPERT = 4096, 2048
LEAVES = {"gate_proj": (HIDDEN, EXPERT), "up_proj": (HIDDEN, EXPERT), "down_proj": (EXPERT, HIDDEN)}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
_BYTES = {"I16": 2, "F16": 2, "I32": 4, "BF16": 2}


def linear(name: str, size: tuple[int, int], bits: int, codebook: str = "mcg") -> dict[str, TensorHeader]:
    """Headers of one EXL3 linear of ``(in, out)``."""
    rows, columns = size
    return {
        header.name: header
        for header in (
            _header(f"{name}.trellis", "I16", (rows // 16, columns // 16, 16 * bits)),
            _header(f"{name}.suh", "F16", (rows,)),
            _header(f"{name}.svh", "F16", (columns,)),
            _header(f"{name}.{codebook}", "I32", ()),
        )
    }


def _header(name: str, dtype: str, shape: tuple[int, ...]) -> TensorHeader:
    elements = 1
    for size in shape:
        elements *= size
    return TensorHeader(
        name=name, dtype=dtype, shape=shape, shard="model.safetensors", start=0, bytes=elements * _BYTES[dtype]
    )


def experts(bits: dict[int, int], count: int = 1, ranks: int = 0, codebook: str = "mcg") -> dict[str, TensorHeader]:
    """Routed experts of the published GLM sizes: K by layer, ``count`` experts each, in ``ranks`` slices (0: whole)."""
    tensors: dict[str, TensorHeader] = {}
    for layer, k in bits.items():
        for expert in range(count):
            for leaf, (rows, columns) in LEAVES.items():
                name = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
                if not ranks:
                    tensors |= linear(name, (rows, columns), k, codebook)
                for rank in range(ranks):
                    size = (rows // ranks, columns) if leaf == "down_proj" else (rows, columns // ranks)
                    tensors |= linear(f"{name}.rank{rank}", size, k, codebook)
    return tensors


def checkpoint(tensors: dict[str, TensorHeader], **config: Any) -> Checkpoint:
    """A checkpoint of headers, with the prediction layer proven by its own tensors."""
    prediction = _header("model.layers.45.eh_proj.weight", "BF16", (8, 8))
    return Checkpoint(
        name="published", tensors={**tensors, prediction.name: prediction}, config={"num_hidden_layers": 45, **config}
    )


class Hub:
    """A folder behind the Hub's addresses; ``sent`` counts the bytes that left, by file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent = folder, Counter[str]()
        self.ranges = True
        self.cut = 0

    def info(self) -> dict[str, Any]:
        siblings = []
        for path in sorted(self.folder.iterdir()):
            data = path.read_bytes()
            entry: dict[str, Any] = {"rfilename": path.name, "size": len(data), "blobId": "0" * 40}
            if path.suffix == ".safetensors":
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        return {"id": "someone/quant", "sha": COMMIT, "siblings": siblings}


@contextmanager
def serving(hub: Hub, monkeypatch: Any) -> Iterator[None]:
    """The Hub client asks this machine."""
    from huggingface_hub import constants

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/someone/quant"):
                return self._send(200, json.dumps(hub.info()).encode(), "application/json")
            prefix = f"/someone/quant/resolve/{COMMIT}/"
            file = hub.folder / path.removeprefix(prefix)
            if not path.startswith(prefix) or not file.is_file():
                return self._send(404, b"{}", "application/json")
            data, asked = file.read_bytes(), self.headers.get("Range")
            if asked and hub.ranges:
                start, _, end = asked.removeprefix("bytes=").partition("-")
                data = data[int(start) : int(end) + 1]
            data = data[: len(data) - hub.cut]
            hub.sent[file.name] += len(data)
            self._send(206 if asked and hub.ranges else 200, data, "application/octet-stream")

        def _send(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
