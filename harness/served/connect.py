"""From an address to a served engine that has been probed."""

from __future__ import annotations

from typing import Literal

from harness.errors import UsageError
from harness.served.address import find_server
from harness.served.http import Line, Patience
from harness.served.identity import ServedWeights
from harness.served.seam import ServedEngine
from harness.served.sglang import connect_sglang
from harness.served.vllm import connect_vllm

EngineName = Literal["vllm", "sglang"]


def connect(
    engine: EngineName,
    url: str,
    *,
    model: str | None = None,
    concurrency: int = 2,
    timeout: float = 600.0,
    weights: ServedWeights | None = None,
    patience: Patience | None = None,
) -> ServedEngine:
    """Find a server and see what it can do.

    Args:
        engine: whose wire format it speaks.
        url: its address, with or without ``/v1``; in no receipt. A key is taken from ``OPENAI_API_KEY``.
        model: the name it is served under; needed only where the server has several.
        concurrency: questions at the server at once.
        timeout: seconds until one answer is given up.
        weights: what the caller knows of the served weights, for the identity.
        patience: instead of ``timeout``, with how often and after what waits a question is repeated.

    Raises:
        UsageError: nothing answers there, it is no such API, or it is another engine.
        EngineError: the server does not know the model, or stopped answering.
    """
    if concurrency < 1:
        raise UsageError(f"--concurrency {concurrency} asks nothing", "ask for 1 or more")
    server = find_server(url, model)
    if server.software in ("vllm", "sglang") and server.software != engine:
        raise UsageError(f"this is a server of {server.software}, not of {engine}", f"use --engine {server.software}")
    line = Line(base=server.base, concurrency=concurrency, patience=patience or Patience(timeout=timeout))
    probe = connect_vllm if engine == "vllm" else connect_sglang
    return probe(server, line, weights or ServedWeights())
