"""A small server that computes exactly, and does one thing wrong where a test asks it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.served.preflight import check_served
from harness.served.seam import Ask, Capabilities, ServedRow
from harness.types import UNKNOWN, Check, EngineIdentity, Row

V = 97
#: What a request was: the ids, how many came before it, the temperature, how many are in flight with it.
Change = Callable[["Request", np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Request:
    ids_T: np.ndarray
    number: int
    temperature: float
    together: int


def logits_of(ids_T: np.ndarray) -> np.ndarray:
    """Counting with a bigram's noise, and a little of all that came before: float64 ``[T, V]``."""
    generator = np.random.default_rng(0)
    bigram_VV, memory_VV = 1.5 * generator.standard_normal((V, V)), 0.2 * generator.standard_normal((V, V))
    bigram_VV[np.arange(V), (np.arange(V) + 1) % V] += 6.0
    weights = 0.9 ** np.arange(len(ids_T))
    history_TV = np.stack([memory_VV[ids_T[: t + 1]].T @ weights[t::-1] for t in range(len(ids_T))])
    return np.asarray(bigram_VV[ids_T] + history_TV)


def log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    shifted = logits_TV - logits_TV.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def same(_: Request, values: np.ndarray) -> np.ndarray:
    return values


@dataclass
class Server:
    """A `ServedEngine` that computes; ``on_logits`` and ``on_answer`` are what it does wrong."""

    on_logits: Change = same
    on_answer: Callable[[Request, ServedRow], ServedRow] = lambda _, answer: answer
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    software: str = "vllm"
    context: int | None = 4096
    max_logprobs: int | None = -1
    fixed_ids: bool = True
    columns: int = V
    requests: list[Request] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            software=self.software,
            version="0",
            model="m",
            context=self.context,
            max_logprobs=self.max_logprobs,
            fixed_ids=self.fixed_ids,
        )

    @property
    def identity(self) -> EngineIdentity:
        known = {"speculative": None, "chunk_tokens": UNKNOWN, "prefix_cache": False} | self.settings
        same_for_all = dict.fromkeys(
            ("revision", "weights_sha256", "head_sha256", "tokenizer_sha256", "weights_dtype", "compute_dtype"), UNKNOWN
        )
        return EngineIdentity(
            engine=self.software, version="0", model="m", lane="served", device=UNKNOWN, settings=known, **same_for_all
        )

    def run(
        self, rows: Sequence[Row], *, k: int, ask: Ask | None = None, temperature: float = 0.0
    ) -> Iterator[ServedRow]:
        for row in rows:
            request = Request(row.ids_T, len(self.requests), temperature, len(rows))
            self.requests.append(request)
            yield self.on_answer(request, self.answer(row, request, k, ask))

    def answer(self, row: Row, request: Request, k: int, ask: Ask | None) -> ServedRow:
        logits_TV = self.on_logits(request, logits_of(row.ids_T))[:-1, : self.columns]
        logprobs_TV = log_softmax(logits_TV)
        ids_TK = np.argsort(-logprobs_TV, axis=1, kind="stable")[:, :k].astype(np.int32)
        at = np.arange(len(row.ids_T) - 1)
        asked_TM = None if ask is None else logprobs_TV[at[:, None], ask(row)]
        return ServedRow(
            index=row.index,
            echoed_ids_T=row.ids_T.copy(),
            target_logprob_T=logprobs_TV[at, row.ids_T[1:]],
            ids_TK=ids_TK,
            logprobs_TK=np.take_along_axis(logprobs_TV, ids_TK, axis=1),
            asked_TM=asked_TM,
            cached_tokens=0,
            wire_bytes=1000,
            seconds=0.01,
        )


def counting(length: int, seed: int = 0, index: int = 0) -> Row:
    """Ids that count up, with a jump at about every fifth place."""
    generator = np.random.default_rng(seed)
    steps = np.where(generator.random(length) < 0.2, generator.integers(2, V - 1, length), 1)
    return Row(index=index, ids_T=(np.cumsum(steps) % V).astype(np.int32), document="d", domain="x", sha256="")


ROWS = [counting(64, 1, 0), counting(320, 2, 1), counting(100, 3, 2)]


def check(server: Server, rows: Sequence[Row] = ROWS, k: int = 8, **options: object) -> dict[str, Check]:
    found = check_served(server, rows, k=k, vocab_size=V, **options)  # type: ignore[arg-type]
    return {line.name: line for line in found}


def answers(change: Callable[[ServedRow], ServedRow], after: int = 0) -> Server:
    """A server that spoils its answers from request ``after`` on."""
    return Server(on_answer=lambda request, answer: change(answer) if request.number >= after else answer)


# What a server can do wrong.


def scaled(request: Request, logits_TV: np.ndarray) -> np.ndarray:
    return logits_TV / request.temperature if request.temperature else logits_TV


def ends_change_beginnings(request: Request, logits_TV: np.ndarray) -> np.ndarray:
    return logits_TV + 2 * np.sin(np.arange(V)) * (len(request.ids_T) > 256)


def crowded(request: Request, logits_TV: np.ndarray) -> np.ndarray:
    return logits_TV + np.sin(np.arange(V)) * (request.together > 1)


def seam(chunk: int, at: int) -> Change:
    """The distribution at the edge of each chunk is the one of another position."""

    def change(_: Request, logits_TV: np.ndarray) -> np.ndarray:
        edges = np.arange(chunk, len(logits_TV), chunk) + at
        logits_TV[edges] = np.roll(logits_TV[edges], 5, axis=1)
        return logits_TV

    return change


def remembers(by: float) -> Change:
    """A prefix cache: from the third request on, the second half is a little off."""

    def change(request: Request, logits_TV: np.ndarray) -> np.ndarray:
        if request.number >= 2:
            logits_TV[len(logits_TV) // 2 :] += by * np.sin(np.arange(V))
        return logits_TV

    return change


def entry(name: str, at: tuple[int, ...], value: float) -> Callable[[ServedRow], ServedRow]:
    def change(answer: ServedRow) -> ServedRow:
        values = np.array(getattr(answer, name))
        values[at] = value
        return replace(answer, **{name: values})

    return change


def shifted_lists(answer: ServedRow) -> ServedRow:
    """Targets are right, the lists are those of the position before."""
    return replace(answer, ids_TK=np.roll(answer.ids_TK, 1, 0), logprobs_TK=np.roll(answer.logprobs_TK, 1, 0))
