"""Where a server is: the API below an address, the models it lists, and what it tells of itself.

Addresses and keys are in no receipt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from harness.errors import EngineError, UsageError
from harness.served.fetch import Fetched, fetch

_ADDRESS = "give the address of the server, such as http://localhost:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a server says of itself. ``root`` ends with ``/v1``; it is in no receipt.

    ``folder`` is where it says its model was read from, which can be a path.
    """

    root: str
    model: str
    context: int | None
    software: str
    version: str
    folder: str | None = None

    @property
    def base(self) -> str:
        """The address without ``/v1``, for what is no part of the OpenAI API."""
        return self.root.removesuffix("/v1")


def find_server(base_url: str, model: str | None, *, timeout: float = 30.0) -> Server:
    """Find the API below ``base_url`` and the model in it.

    Raises:
        UsageError: nothing answers there, or it is no such API.
        EngineError: the server does not know the model.
    """
    root, listed = _find_root(base_url, timeout)
    names = [str(entry.get("id")) for entry in listed]
    if model is None and len(names) != 1:
        raise UsageError(f"the server has {len(names)} models: {', '.join(names)}", "choose one with --served-model")
    if model is not None and model not in names:
        raise EngineError(f"the server does not know {model}; it has {', '.join(names)}", "correct --served-model")
    entry = next(e for e in listed if model is None or e.get("id") == model)
    return Server(
        root=root,
        model=str(entry["id"]),
        context=_context(entry),
        software=str(entry.get("owned_by") or "openai-compatible"),
        version=_version(root, timeout),
        folder=str(entry["root"]) if entry.get("root") else None,
    )


def _context(entry: dict[str, Any]) -> int | None:
    """Tokens that fit, as the list of models tells them; None where it does not.

    Raises:
        EngineError: it tells something else.
    """
    told = entry.get("max_model_len") or entry.get("context_length")
    if told is None or told == "":
        return None
    if isinstance(told, bool) or not isinstance(told, int | float) or not 1 <= told < 2**40:
        raise EngineError(
            f"the server tells a context of {str(told)[:40]!r} tokens", "check the server and its version"
        )
    return int(told)


def _find_root(base_url: str, timeout: float) -> tuple[str, list[dict[str, Any]]]:
    given = base_url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    if not given.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {base_url} is no http address", _ADDRESS)
    said = ""
    for root in dict.fromkeys((given, f"{given.removesuffix('/v1')}/v1")):
        try:
            response = fetch("GET", f"{root}/models", seconds=timeout)
        except httpx.HTTPError as error:
            raise UsageError(f"nothing answers at {base_url} ({type(error).__name__})", _ADDRESS) from error
        listed = _models(response)
        if listed:
            return root, listed
        said = f"HTTP {response.status}"
    raise UsageError(f"{base_url} lists no models ({said}): it is no OpenAI-compatible server", _ADDRESS)


def _models(response: Fetched) -> list[dict[str, Any]]:
    content = response.json
    listed = content.get("data") if isinstance(content, dict) else None
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _version(root: str, timeout: float) -> str:
    """What vLLM tells at /version; other servers tell nothing."""
    content = get_json(f"{root.removesuffix('/v1')}/version", timeout=timeout)
    return str(content.get("version", "unknown")) if isinstance(content, dict) else "unknown"


def get_json(url: str, *, timeout: float = 30.0) -> Any:
    """What a server tells at an address in JSON; None where it tells nothing."""
    try:
        return fetch("GET", url, seconds=timeout).json
    except httpx.HTTPError:
        return None
