"""Who is asked: a candidate's files and digests, what its answers depend on, and how it is opened for lm-eval."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines.base import device_kind
from harness.engines.hf import ComputeDType
from harness.engines.models import ModelFolder, locate
from harness.engines.open import (
    NO_TOKENIZER,
    EngineName,
    before_opening,
    digests_of,
    memory_budget_of,
    open_engine,
    tokenizer_of,
)
from harness.environment import environment, source_digest
from harness.errors import EngineError, UsageError
from harness.exl3.files import config_digest, require_known_model
from harness.measure.receipt import SideIdentity
from harness.measure.result import census_of
from harness.measure.run import find_candidate
from harness.measure.teacher import MODELS, read_spec
from harness.panel.tokenizer import load_tokenizer
from harness.tasks.asking import Answers
from harness.tasks.outcome import versions
from harness.types import UNKNOWN, Check, Engine

if TYPE_CHECKING:
    from harness.served.address import Server
    from harness.tasks.asking import AskingLM

#: Longest prompt, in tokens, that an engine is opened for which fixes its buffers then; longer ones are refused.
ROW_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to ask whom. ``candidate`` as in `harness.engines.models.locate`, or a teacher's TOML file.

    ``engine`` runs it in this process; ``base_url`` asks a server instead, and the candidate then gives tokenizer and
    identity.
    """

    candidate: str
    suite: str = "quick"
    revision: str | None = None
    data: Path | None = None
    limit: int | None = None
    out: Path | None = None
    compute: ComputeDType = "auto"
    device: str | None = None
    packed: bool = False
    memory_budget: str | None = None
    engine: EngineName = "reference"
    base_url: str | None = None
    served_model: str | None = None
    num_concurrent: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that is asked, before it is loaded."""

    located: ModelFolder
    weights_sha256: str
    tokenizer_sha256: str
    server: Server | None


def find_subject(request: Request) -> Subject:
    """Locate the model's files, digest them, and find the server where one is asked.

    Raises:
        EngineError: it has no tokenizer.
        UsageError: a server and an engine of this process at once.
    """
    from harness.served.address import find_server

    if request.base_url and request.engine != "reference":
        raise UsageError("--base-url asks a server, --engine runs the model here", "give one of the two")
    # The server first: a wrong address should not wait for gigabytes to be digested.
    server = find_server(request.base_url, request.served_model) if request.base_url else None
    if request.engine == "llamacpp":
        gguf = find_candidate(request.candidate, request.revision, request.engine)
        return Subject(
            located=gguf.located,
            weights_sha256=gguf.weights_sha256,
            tokenizer_sha256=gguf.tokenizer_sha256,
            server=None,
        )
    located = _locate(request)
    if server is None and request.engine == "reference":
        require_known_model(located.path)
    if tokenizer_of(located) == NO_TOKENIZER:
        raise EngineError(f"{located.name} has no tokenizer", "tasks are text: put tokenizer.json into its folder")
    if server is not None and not any(located.path.glob("*.safetensors")):
        weights, tokenizer = UNKNOWN, tokenizer_of(located)
    else:
        weights, tokenizer = digests_of(located)
    return Subject(located=located, weights_sha256=weights, tokenizer_sha256=tokenizer, server=server)


def _locate(request: Request) -> ModelFolder:
    if request.candidate.endswith(".toml"):
        spec = read_spec(Path(request.candidate).expanduser())
        return locate(spec.model, spec.revision, cache=MODELS, weights_dtype=spec.weights_dtype)
    return locate(request.candidate, request.revision, cache=MODELS)


def model_key(request: Request, subject: Subject) -> dict[str, Any]:
    """All that an answer depends on besides its prompt: A's answers can never be B's."""
    from harness.tasks.served import public_name

    server = subject.server
    return {
        "weights": subject.weights_sha256,
        "config": config_digest(subject.located.path),
        "tokenizer": subject.tokenizer_sha256,
        "compute": request.compute,
        "engine": request.engine,
        "engine_version": before_opening(request.engine),
        "packed": request.packed,
        "streamed": request.memory_budget is not None,
        "device": device_kind(request.device),
        "server": server and [public_name(server), server.software, server.version],
        "address": server.root if server and subject.weights_sha256 == UNKNOWN else None,
        "source": source_digest(),
        "environment": environment() | versions(),
    }


def open_subject(request: Request, subject: Subject, answers: Answers) -> tuple[AskingLM, SideIdentity, list[Check]]:
    """The model as lm-eval sees it, who it is, and the list that its preflight writes to."""
    from harness.tasks.asking import AskingLM
    from harness.tasks.reference_lm import ReferenceLM

    tokenizer = load_tokenizer(subject.located.path)
    if subject.server is not None:
        return _open_served(request, subject, subject.server, tokenizer, answers)
    limit = context_of(subject.located.path)
    if request.engine != "reference":
        limit = min(limit or ROW_TOKENS, ROW_TOKENS)
    engine = _engine(request, subject, limit)
    inner = ReferenceLM(engine, tokenizer)
    lm = AskingLM(inner, answers, limit=limit)
    settings = dict(engine.identity.settings) | {"kv_cache": "within a question" if inner.shares_cache else False}
    census = census_of(subject.located)
    identity = SideIdentity.model_validate(asdict(engine.identity) | {"settings": settings} | census)
    return lm, identity, []


def _engine(request: Request, subject: Subject, longest: int | None) -> Engine:
    """What runs the candidate here; ``longest`` is the most tokens of a prompt and its answer."""
    return open_engine(
        subject.located,
        engine=request.engine,
        compute=request.compute,
        device=request.device,
        packed=request.packed,
        memory_budget=memory_budget_of(request.memory_budget),
        row_tokens=longest or ROW_TOKENS,
        weights_sha256=subject.weights_sha256,
        tokenizer_sha256=subject.tokenizer_sha256,
    )


def context_of(folder: Path) -> int | None:
    """The longest context that config.json or a GGUF file's own metadata allows; None where it says nothing."""
    if folder.is_file():
        from harness.panel.gguf_metadata import gguf_scalars

        metadata = gguf_scalars(folder)
        length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
        return None if length is None else int(length)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for block in (config.get("text_config", {}), config):
        if block.get("max_position_embeddings"):
            return int(block["max_position_embeddings"])
    return None


def _open_served(
    request: Request, subject: Subject, server: Server, tokenizer: Any, answers: Answers
) -> tuple[AskingLM, SideIdentity, list[Check]]:
    from harness.tasks.asking import AskingLM
    from harness.tasks.served import ServedPreflight, adds_special_tokens, failures, open_served, public_name

    inner = open_served(server, str(subject.located.path), tokenizer, num_concurrent=request.num_concurrent)
    preflight = ServedPreflight(server, inner, tokenizer)
    # The API makes one token after every prompt.
    lm = AskingLM(inner, answers, limit=server.context, extra=1, preflights=[preflight], failures=failures())
    identity = SideIdentity(
        engine=server.software,
        version=server.version,
        model=subject.located.name,
        revision=subject.located.revision,
        weights_sha256=subject.weights_sha256,
        head_sha256=UNKNOWN,
        tokenizer_sha256=subject.tokenizer_sha256,
        config_sha256=config_digest(subject.located.path),
        weights_dtype=UNKNOWN,
        compute_dtype=UNKNOWN,
        lane="served",
        device=UNKNOWN,
        settings={
            "served_as": public_name(server),
            "context": server.context,
            "special_tokens": adds_special_tokens(tokenizer),
            "num_concurrent": request.num_concurrent,
        },
    )
    return lm, identity, preflight.checks
