"""The head of a captured model, stored once by content: ``<captures>/heads/<sha256>.safetensors``.

A head of several captures (many panels, one teacher) is one file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harness.digest import identity_of_head
from harness.errors import CaptureError
from harness.store import atomic_path, require_space
from harness.types import Head

_AGAIN = "delete the file and run `fidelity teacher capture` again: rows that are there are kept"


def head_path(captures: Path, sha256: str) -> Path:
    return captures / "heads" / f"{sha256}.safetensors"


def save_head(captures: Path, head: Head) -> None:
    """Store a head unless a file with its content is there already.

    Raises:
        CaptureError: ``head.sha256`` is not the digest of its tensors.
        StorageError: the disk cannot hold it.
    """
    target = head_path(captures, head.sha256)
    if target.exists():
        return
    _require_digest(head)
    tensors = {"weight": head.weight_VH} | ({} if head.bias_V is None else {"bias": head.bias_V})
    shape = {"vocab_size": head.vocab_size, "softcap": head.softcap, "scale": head.scale}
    require_space(captures, sum(t.nbytes for t in tensors.values()), "the teacher's head")
    _save(target, tensors, shape)


def load_head(captures: Path, sha256: str) -> Head:
    """Read a head back and check it against the digest it is named by.

    Raises:
        CaptureError: its file is absent, unreadable, or holds other numbers.
    """
    tensors, shape = _load(head_path(captures, sha256))
    head = Head(
        weight_VH=tensors["weight"],
        bias_V=tensors.get("bias"),
        vocab_size=shape["vocab_size"],
        softcap=shape["softcap"],
        scale=shape["scale"],
        sha256=sha256,
    )
    _require_digest(head)
    return head


def _require_digest(head: Head) -> None:
    found = identity_of_head(head)
    if found != head.sha256:
        what = f"the head named {head.sha256[:12]} holds tensors with digest {found[:12]}"
        raise CaptureError(what, _AGAIN)


def _save(target: Path, tensors: dict[str, Any], shape: dict[str, Any]) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(target) as temporary:
        save_file(whole, temporary, metadata={"head": json.dumps(shape, sort_keys=True)})


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["head"])
    except FileNotFoundError as error:
        what = f"heads/{path.name} is missing: hidden states are no use without their head"
        raise CaptureError(what, "copy the `heads` folder beside the capture, or run capture again") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CaptureError(f"heads/{path.name} cannot be read: {error}", _AGAIN) from error
