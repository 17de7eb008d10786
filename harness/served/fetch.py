"""One answer of a server, read as it comes: limits on all of its time, on its size and on how deep its JSON is nested.

A server of somebody else may never end, or send more than fits into memory. The key for a server is read here alone.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any

import httpx

from harness.errors import UsageError

#: Most bytes of what a server tells of itself, and of one row's answer, once they are unpacked.
SMALL = 16 << 20
LARGEST = 1 << 30


def headers() -> dict[str, str]:
    """The header that lm-eval sends too; none without a key, since an empty one is no legal header.

    Raises:
        UsageError: the key holds characters that no header may hold; it is not shown.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and (key.isprintable() or not key)):
        raise UsageError("OPENAI_API_KEY holds characters that no header may hold", "set it to the server's key")
    return {"Authorization": f"Bearer {key}"} if key else {}


class TooLarge(httpx.RequestError):
    """A body that did not end in time to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Status, body, and the body's bytes as they travelled."""

    status: int
    content: bytes
    wire_bytes: int

    @property
    def json(self) -> Any:
        """The content of a good answer; None of any other, and where it is no JSON or is nested too deep."""
        if self.status != 200:
            return None
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


def fetch(method: str, url: str, *, body: Any = None, seconds: float = 30.0, most: int = SMALL) -> Fetched:
    """Ask once.

    Args:
        body: what becomes JSON.
        seconds: for the whole answer, however slowly it comes.

    Raises:
        UsageError: it is no address.
        httpx.HTTPError: nothing answers, it takes too long, or sends too much.
    """

    async def ask() -> Fetched:
        async with httpx.AsyncClient(headers=headers(), timeout=seconds) as client:
            return await read(client.build_request(method, url, json=body), client, seconds, most)

    try:
        return asyncio.run(ask())
    except httpx.InvalidURL as error:
        raise UsageError(f"{url} is no address: {error}", "give one such as http://localhost:8000") from error


async def read(request: httpx.Request, client: httpx.AsyncClient, seconds: float, most: int = LARGEST) -> Fetched:
    """The answer to a request, given up after ``seconds`` or ``most`` bytes, whichever comes first."""
    try:
        async with asyncio.timeout(seconds):
            response = await client.send(request, stream=True)
            try:
                content = await _body(response, most)
            finally:
                await response.aclose()
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no whole answer in {seconds:.0f} s", request=request) from error
    return Fetched(status=response.status_code, content=content, wire_bytes=response.num_bytes_downloaded)


async def _body(response: httpx.Response, most: int) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > most:
            raise TooLarge(f"more than {most >> 20} MiB", request=response.request)
        parts.append(part)
    return b"".join(parts)
