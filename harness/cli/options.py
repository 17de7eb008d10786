"""What commands about a server share: its options, and the request that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from harness.served.measure import ServedRequest

#: Engines that answer over HTTP.
SERVERS = ("vllm", "sglang")

UrlOption = Annotated[str | None, typer.Option(help="Address of the server, such as http://localhost:8000.")]
ModelOption = Annotated[str | None, typer.Option(help="Model name on the server, where it has several.")]
KOption = Annotated[int, typer.Option("--k", help="Top tokens a position to ask a server for.")]
SamplesOption = Annotated[
    int, typer.Option(help="Ids drawn from the teacher's tail, where a server scores ids of our choice.")
]
ConcurrencyOption = Annotated[int, typer.Option(help="Requests in flight; more than 1 may move a server's digits.")]


def served_request(engine: str, url: str | None, **settings: Any) -> ServedRequest:
    """The request of a command; ``settings`` are further fields of `ServedRequest`."""
    from harness.errors import UsageError
    from harness.served.measure import ServedRequest

    if engine not in SERVERS:
        raise UsageError(f"--engine {engine} is no server", f"choose one of {', '.join(SERVERS)}")
    if url is None:
        raise UsageError(f"--engine {engine} runs in a server", "give its address: --url http://localhost:8000")
    return ServedRequest(server=engine, url=url, **settings)  # type: ignore[arg-type]
