"""Served answers: how fast they become arrays, and what the client adds to a server that takes a fixed time.

The server of the second part is a process of its own; it sleeps, then sends the same bytes to every question. Its own
time is what a row takes a client that throws the bytes away. What our client adds is slower transfer, and whatever
parsing the server's work on the next row does not hide.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np

from harness.bench.timing import Figure, Work, interleaved, one_thread
from harness.digest import ids_digest
from harness.served.http import Answer, Line, Patience, Question
from harness.served.sglang import read_generated as read_sglang
from harness.served.vllm import completion_of
from harness.served.vllm_answers import read_completion, read_generated, with_targets
from harness.types import Row

VOCAB = 154_880


def run(
    folder: Path, tokens: int, ks: tuple[int, ...], asked: int, delays: tuple[float, ...], rounds: int
) -> list[Figure]:
    """Rows of ``tokens``; ``delays`` are the seconds of a row at each of ``ks``."""
    row = made_up_row(tokens)
    bodies = {k: completion(row, k) for k in ks}
    figures = _parsing(row, bodies, asked, rounds)
    for (k, body), delay in zip(bodies.items(), delays, strict=True):
        figures += _added(folder, row, k, body, delay, rounds)
    return figures


def _parsing(row: Row, bodies: dict[int, bytes], asked: int, rounds: int) -> list[Figure]:
    """Megabytes of an answer's body that become arrays in a second of CPU time."""
    works: dict[str, tuple[Work, int, float | None]] = {}
    for k, body in bodies.items():
        read = _work(partial(read_completion, row, k=k), body)
        works[f"vLLM prompt_logprobs, k={k}"] = (read, len(body), 50.0)
    largest = bodies[max(bodies)]
    works["the same bytes, json.loads alone"] = (lambda: json.loads(largest), len(largest), None)
    ids_TM, chosen = generated(row, asked)
    works[f"vLLM {asked} chosen ids"] = (_work(lambda a: read_generated(row, a, ids_TM, 0), chosen), len(chosen), 50.0)
    flat = sglang_flat(row, max(bodies))
    read_flat = _work(lambda a: read_sglang(row, a, max(bodies)), flat)
    works[f"SGLang base64, k={max(bodies)}"] = (read_flat, len(flat), 50.0)
    with one_thread():
        seconds = interleaved({name: work for name, (work, _, _) in works.items()}, rounds)
    return [
        Figure(name=name, value=size / seconds[name] / 1e6, unit="MB/CPU-s", least=least, note=f"{size / 1e6:.1f} MB")
        for name, (_, size, least) in works.items()
    ]


def _work(read: Callable[[Answer], object], body: bytes) -> Work:
    answer = Answer(status=200, content=body, wire_bytes=len(body), seconds=0.0)
    return lambda: read(answer)


def _added(folder: Path, row: Row, k: int, body: bytes, delay: float, rounds: int) -> list[Figure]:
    """What a row takes beyond what it takes a client that throws the bytes away, one question at a time."""
    file = folder / f"answer-{k}.json"
    file.write_bytes(body)
    rows = [row] * (rounds + 1)

    arrived: list[float] = []

    def read(_: int, answer: Answer) -> object:
        arrived.append(time.perf_counter())
        return read_completion(row, answer, k)

    with _server(file, delay) as base:
        bare = _seconds_a_row(_thrown_away(base, completion_of("bench", row, k, 0.0), len(rows)))
        questions = (completion_of("bench", each, k, 0.0) for each in rows)
        cpu = time.process_time()
        list(Line(base=base, concurrency=1, patience=Patience()).in_order(questions, read))
        cpu = (time.process_time() - cpu) / len(rows)
        full = _seconds_a_row(arrived)
    what, note = f"server of {delay:g} s, k={k}", f"{len(body) / 1e6:.1f} MB a row"
    return [
        Figure(name=f"client's share on top, {what}", value=100 * (full / bare - 1), unit="%", most=5.0, note=note),
        Figure(
            name=f"client's CPU time, {what}", value=cpu, unit="CPU-s a row", note="most of it while the server works"
        ),
    ]


def _thrown_away(base: str, question: Question, count: int) -> list[float]:
    """When each answer is there for a client that does the least it can, on one connection."""
    host, arrived = httpx.URL(base), []
    connection = http.client.HTTPConnection(host.host, host.port)
    for _ in range(count):
        connection.request("POST", question.path, body=question.body)
        connection.getresponse().read()
        arrived.append(time.perf_counter())
    connection.close()
    return arrived


def _seconds_a_row(arrived: list[float]) -> float:
    """From one row's arrival to the next, the least disturbed of them: a busy machine only ever adds."""
    return float(np.diff(arrived).min())


@contextmanager
def _server(file: Path, delay: float) -> Iterator[str]:
    """A server in a process of its own, which shares no interpreter with what is measured."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, file, delay), daemon=True)
    process.start()
    # Only the child holds its end now: one that cannot start raises EOFError here, and does not keep us waiting.
    there.close()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def serve(port: Connection, file: Path, delay: float) -> None:
    """Answer every question with a file, ``delay`` seconds after it came; the port is sent first."""
    body = file.read_bytes()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(delay)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_port)
    server.serve_forever()


def made_up_row(tokens: int) -> Row:
    """A row of random ids."""
    ids_T = np.random.default_rng(3).integers(0, VOCAB, tokens).astype(np.int32)
    return Row(index=0, ids_T=ids_T, document="made up", domain="bench", sha256=ids_digest(ids_T))


def _lists(tokens: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids and falling float32 log-probabilities of ``k`` tokens at each position."""
    rng = np.random.default_rng(k)
    start = rng.integers(0, VOCAB, (tokens - 1, 1))
    ids_TK = (start + np.arange(k) * 601) % VOCAB
    return ids_TK, -np.sort(rng.exponential(5, (tokens - 1, k)), axis=1).astype(np.float32)


def completion(row: Row, k: int) -> bytes:
    """vLLM's answer of ``/v1/completions`` with ``k`` prompt log-probabilities, as compact as it writes it."""
    ids_TK, logprobs_TK = _lists(len(row.ids_T), k)
    positions: list[dict[str, dict[str, object]] | None] = [None]
    for target, ids, logprobs in zip(row.ids_T[1:].tolist(), ids_TK.tolist(), logprobs_TK.tolist(), strict=True):
        own = {str(target): {"logprob": logprobs[-1] - 1.0, "rank": 900, "decoded_token": " next"}}
        top = {
            str(i): {"logprob": value, "rank": rank, "decoded_token": " token"[: 2 + i % 5]}
            for rank, (i, value) in enumerate(zip(ids, logprobs, strict=True), start=1)
            if i != target
        }
        if len(top) == k - 1:
            own[str(target)] = {"logprob": logprobs[ids.index(target)], "rank": 1, "decoded_token": " next"}
        positions.append(own | top)
    choice = {"index": 0, "text": "", "prompt_logprobs": positions, "prompt_token_ids": row.ids_T.tolist()}
    return json.dumps({"choices": [choice], "usage": None}, separators=(",", ":")).encode()


def generated(row: Row, asked: int) -> tuple[np.ndarray, bytes]:
    """Chosen ids, and vLLM's answer of ``/inference/v1/generate`` about them."""
    ids_TM, _ = _lists(len(row.ids_T), asked)
    file = io.BytesIO()
    np.save(file, np.full(with_targets(row, ids_TM).shape, -1.5, np.float32))
    scores = base64.b64encode(file.getvalue()).decode()
    content = {"prompt_token_id_logprobs": scores, "prompt_token_ids": row.ids_T.tolist()}
    return ids_TM, json.dumps(content).encode()


def sglang_flat(row: Row, k: int) -> bytes:
    """SGLang's answer with its top lists as base64."""
    ids_TK, logprobs_TK = _lists(len(row.ids_T), k)
    own = [[None, int(row.ids_T[0]), None], *([-2.5, i, None] for i in row.ids_T[1:].tolist())]
    meta = {
        "input_token_logprobs": own,
        "input_top_logprobs_val_flat_b64": base64.b64encode(logprobs_TK.tobytes()).decode(),
        "input_top_logprobs_idx_flat_b64": base64.b64encode(ids_TK.astype(np.int32).tobytes()).decode(),
        "input_top_logprobs_shape": list(ids_TK.shape),
        "input_top_logprobs_null_prefix": 1,
    }
    return json.dumps({"meta_info": meta}).encode()
