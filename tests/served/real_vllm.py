"""A real vLLM server in its own environment, started for a test and stopped after it.

``FIDELITY_VLLM_PYTHON`` names the Python of an environment in which ``import vllm`` works; without it tests skip.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

VARIABLE = "FIDELITY_VLLM_PYTHON"
#: Runs on a CPU too; float32, because bf16 of another engine differs by tenths of a nat.
ARGUMENTS = (
    *("--dtype", "float32", "--max-model-len", "2304", "--max-num-seqs", "2"),
    *("--max-logprobs", "-1", "--no-enable-prefix-caching", "--enforce-eager"),
)
#: Seconds until the server must answer; about 60 on two idle cores.
START = 420.0
STOP = 30.0


def require_vllm() -> Path:
    """The Python that has vLLM; skips the test where there is none."""
    python = os.environ.get(VARIABLE, "")
    if not python:
        pytest.skip(f"{VARIABLE} names no Python that has vLLM")
    return Path(python)


@contextmanager
def vllm_server(model: Path, *args: str) -> Iterator[str]:
    """Serve a model folder on a free port of this machine; ``args`` come after `ARGUMENTS`.

    Yields:
        The address, ending with ``/v1``.

    Raises:
        AssertionError: it did not start in time; with the end of its log.
    """
    python = require_vllm()
    port = _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *ARGUMENTS, *args]
    with tempfile.TemporaryFile() as log:
        # A session of its own: the engine's core is a child process, and must end too.
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", log.fileno())
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            _stop(server)


def _environment() -> dict[str, str]:
    """Offline, a small cache of keys and values, and nothing of this project's own environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return kept | own


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(server: subprocess.Popen[bytes], url: str, log: int) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        assert server.poll() is None, f"vLLM ended with {server.returncode}:\n{_tail(log)}"
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        time.sleep(1)
    raise AssertionError(f"vLLM does not answer after {START:.0f} s:\n{_tail(log)}")


def _tail(log: int) -> str:
    size = os.fstat(log).st_size
    return os.pread(log, 6000, max(0, size - 6000)).decode(errors="replace")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ask the whole session to end, then make it."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, sent)
            server.wait(STOP)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
