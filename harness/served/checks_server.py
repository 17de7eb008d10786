"""Checks on what a server tells of itself: its caps, its settings, what it keeps from other requests, who else uses it.

What a server does not tell is ``unproven``, never 0 and never a default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import httpx

from harness.engines.models import ModelFolder
from harness.errors import EngineError
from harness.served.address import get_json
from harness.served.fetch import fetch
from harness.served.identity import base_name
from harness.served.seam import Capabilities, ServedRow
from harness.types import UNKNOWN, Check, EngineIdentity, Row

UNPROVEN = "unproven"
#: Gauges of /metrics that count requests at work or in the queue.
GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
}
#: Options that end a fault, by server.
OPTIONS: dict[str, dict[str, str]] = {
    "vllm": {
        "k": "--max-logprobs",
        "context": "--max-model-len",
        "cache": "--no-enable-prefix-caching",
        "speculative": "without --speculative-config",
        "chunk": "--max-num-batched-tokens",
    },
    "sglang": {
        "k": "a higher cap",
        "context": "--context-length",
        "cache": "--disable-radix-cache",
        "speculative": "without --speculative-algorithm",
        "chunk": "--chunked-prefill-size",
    },
}


def option(software: str, what: str) -> str:
    """The server's option for a fault, one of the keys in `OPTIONS`; the options of all where the server is unknown."""
    known = OPTIONS.get(software.lower())
    return known[what] if known else " / ".join(dict.fromkeys(options[what] for options in OPTIONS.values()))


def _untold(software: str) -> str:
    """That a server does not tell something, and what makes it tell."""
    return "the server does not tell" + (" (VLLM_SERVER_DEV_MODE=1 makes it)" if software.lower() == "vllm" else "")


def check_cap(can: Capabilities, k: int) -> Check:
    """As many tokens a position as asked for: never a quiet fall back to the server's cap."""
    cap, name = can.max_logprobs, "k within the server's cap"
    if cap is None:
        return Check(name=name, passed=True, figure=f"{k} of {UNPROVEN}", note=_untold(can.software))
    if cap != -1 and k > cap:
        raise EngineError(
            f"k = {k} is more than the server's cap of {cap} log-probabilities",
            f"start it with {option(can.software, 'k')} {k}, or ask for --k {cap}",
        )
    return Check(name=name, passed=True, figure=f"{k} of {'any' if cap == -1 else cap}")


def check_context(can: Capabilities, rows: Sequence[Row]) -> Check:
    """Every row and the one token that must be generated fit: nothing is ever cut."""
    longest, name = max((len(row.ids_T) for row in rows), default=0), "rows fit the server's context"
    if can.context is None:
        return Check(name=name, passed=True, figure=f"{longest} + 1 of {UNPROVEN}", note="the server does not tell it")
    too_long = [row.index for row in rows if len(row.ids_T) + 1 > can.context]
    if too_long:
        raise EngineError(
            f"{len(too_long)} rows do not fit the server's context of {can.context} with the one token that it "
            f"generates: rows {', '.join(map(str, too_long[:5]))}{', ...' if len(too_long) > 5 else ''}; the longest "
            f"has {longest} tokens",
            f"start it with {option(can.software, 'context')} {longest + 1} or more",
        )
    return Check(name=name, passed=True, figure=f"{longest} + 1 of {can.context} tokens")


def check_speculative(identity: EngineIdentity, software: str) -> Check:
    """Speculative decoding has reported the draft's numbers, and zeros."""
    setting, name = identity.settings.get("speculative", UNKNOWN), "speculative decoding is off"
    if setting == UNKNOWN:
        return Check(name=name, passed=True, figure=UNPROVEN, note=f"{_untold(software)}; its NLL is checked")
    if setting not in (None, False, "", "none", "None"):
        raise EngineError(
            f"the server decodes speculatively ({setting})", f"start it {option(software, 'speculative')}"
        )
    return Check(name=name, passed=True, figure="off")


def check_mode(identity: EngineIdentity) -> Check:
    """What the server says that it writes where log-probabilities are asked for."""
    name, mode = "raw log-probabilities", identity.settings.get("logprobs_mode", UNKNOWN)
    if mode in (UNKNOWN, None):
        return Check(name=name, passed=True, figure=UNPROVEN, note="the server tells no mode; the sums are checked")
    if mode != "raw_logprobs":
        raise EngineError(
            f"the server writes {mode} where log-probabilities are asked for",
            "start it with --logprobs-mode raw_logprobs",
        )
    return Check(name=name, passed=True, figure=str(mode))


def check_model(identity: EngineIdentity, named: ModelFolder) -> Check:
    """The model that the server says it has read is the one whose digests go into the receipt."""
    name = "the server's model is the one named"
    known = {base_name(text) for text in (named.name, str(named.path), str(named.path.resolve()))}
    if identity.model in known:
        return Check(name=name, passed=True, figure=identity.model, note="by its name; no server tells a digest")
    return Check(
        name=name,
        passed=False,
        figure="not proven",
        note=f"the server says that it serves {identity.model}, the digests here are those of {named.name}",
    )


def check_cached(answers: Iterable[ServedRow], software: str) -> Check:
    """No token of a row was taken from another request.

    Raises:
        EngineError: a row with cached tokens; it is not valid and must not be stored.
    """
    name, told = "tokens taken from a prefix cache", 0
    rows = list(answers)
    for answer in rows:
        if answer.cached_tokens:
            raise EngineError(
                f"row {answer.index}: the server took {answer.cached_tokens} of {len(answer.echoed_ids_T)} tokens from "
                "its prefix cache, the row is not valid",
                f"start it with {option(software, 'cache')}; finished rows are kept",
            )
        told += answer.cached_tokens is not None
    if told < len(rows):
        tells = " and --enable-prompt-tokens-details" if software.lower() == "vllm" else ""
        note = f"the server does not tell; start it with {option(software, 'cache')}{tells}"
        return Check(name=name, passed=True, figure=f"{UNPROVEN} in {len(rows) - told} of {len(rows)} rows", note=note)
    return Check(name=name, passed=True, figure=f"0 in {len(rows)} rows")


def check_memory(rows: Sequence[Row], vocab_size: int | None) -> Check:
    """What log-probabilities of a whole row may take on the server, where it does not chunk them."""
    positions, name = max(len(row.ids_T) for row in rows), "the server's memory for a row's log-probabilities"
    if vocab_size is None:
        return Check(name=name, passed=True, figure=UNPROVEN, note="the size of the vocabulary is not known")
    figure = f"up to {positions} x {vocab_size} x 6 bytes = {positions * vocab_size * 6 / 1e9:.2f} GB"
    return Check(name=name, passed=True, figure=figure, note="beside weights and cache; leave it free")


def check_alone(before: int | None, after: int | None) -> Check:
    """Whether others used the server meanwhile: their requests share its batches, no failure of a model."""
    name = "nobody else uses the server"
    known = [count for count in (before, after) if count is not None]
    if not known:
        return Check(name=name, passed=True, figure=UNPROVEN, note="the server does not tell its load")
    if max(known):
        note = (
            "contaminated: other requests share its batches; times and bits may change, measure again when it is idle"
        )
        return Check(name=name, passed=False, figure=f"{max(known)} other requests", note=note)
    return Check(name=name, passed=True, figure="0 other requests before and after")


def _loads_of(base: str) -> int | None:
    """What SGLang tells at /v1/loads of requests at work and in the queue; None where it tells nothing."""
    told = get_json(f"{base}/v1/loads")
    loads = told.get("loads") if isinstance(told, dict) else None
    counts = [
        load.get(name)
        for load in (loads if isinstance(loads, list) else ())
        if isinstance(load, dict)
        for name in ("num_running_reqs", "num_waiting_reqs")
    ]
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known and len(known) == len(counts) else None


def requests_at_work(root: str) -> int | None:
    """Requests that a server has at work or queued, by its /metrics or SGLang's /v1/loads; None where it tells neither.

    Args:
        root: the server's address, with or without ``/v1``.
    """
    base = root.rstrip("/").removesuffix("/v1")
    try:
        answer = fetch("GET", f"{base}/metrics", seconds=10)
    except httpx.HTTPError:
        return None
    if answer.status != 200:
        return _loads_of(base)
    lines = re.findall(r"^([a-z:_]+)(?:\{[^\n]*\})? +([0-9.eE+]+)", answer.text, flags=re.MULTILINE)
    try:
        load = [float(value) for name, value in lines if name in GAUGES]
        return round(sum(load)) if load else None
    except (ValueError, OverflowError):
        return None


def load_of(root: str) -> Callable[[], int | None]:
    """`requests_at_work` of one server, to be called when none of our own are in flight."""
    return lambda: requests_at_work(root)


def chunk_of(identity: EngineIdentity) -> int | None:
    """Tokens in a prefill chunk as the server tells them, or None."""
    value: Any = identity.settings.get("chunk_tokens")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
