"""The head of a captured model, stored once by content: ``<captures>/heads/<sha256>.safetensors``.

A head of several captures (many panels, one teacher) is one file. The final norm, where hidden states were
captured in front of it, is a small file of its own, because it is no part of a head's digest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harness.digest import identity_of_head, json_digest, tensor_digest
from harness.errors import CaptureError
from harness.store import atomic_path, require_space
from harness.types import FinalNorm, Head

_AGAIN = "delete the file and run `fidelity teacher capture` again: rows that are there are kept"


def head_path(captures: Path, sha256: str) -> Path:
    return captures / "heads" / f"{sha256}.safetensors"


def norm_path(captures: Path, sha256: str) -> Path:
    return captures / "heads" / f"norm-{sha256}.safetensors"


def norm_digest(norm: FinalNorm) -> str:
    """Digest of the norm's weight and epsilon."""
    return json_digest({"weight": tensor_digest(norm.weight_H), "eps": norm.eps})


def save_head(captures: Path, head: Head) -> None:
    """Store a head (and its norm) unless a file with its content is there already.

    Raises:
        CaptureError: ``head.sha256`` is not the digest of its tensors.
        StorageError: the disk cannot hold it.
    """
    target = head_path(captures, head.sha256)
    if not target.exists():
        _require_digest(head)
        tensors = {"weight": head.weight_VH} | ({} if head.bias_V is None else {"bias": head.bias_V})
        shape = {"vocab_size": head.vocab_size, "softcap": head.softcap, "scale": head.scale}
        require_space(captures, sum(t.nbytes for t in tensors.values()), "the teacher's head")
        _save(target, tensors, shape)
    if head.norm is not None:
        target = norm_path(captures, norm_digest(head.norm))
        if not target.exists():
            _save(target, {"weight": head.norm.weight_H}, {"eps": head.norm.eps})


def load_head(captures: Path, sha256: str, norm_sha256: str | None) -> Head:
    """Read a head back and check it against the digest it is named by.

    Raises:
        CaptureError: a file is absent, unreadable, or holds other numbers.
    """
    tensors, shape = _load(head_path(captures, sha256))
    norm = None if norm_sha256 is None else _load_norm(captures, norm_sha256)
    head = Head(
        weight_VH=tensors["weight"],
        bias_V=tensors.get("bias"),
        vocab_size=shape["vocab_size"],
        softcap=shape["softcap"],
        scale=shape["scale"],
        norm=norm,
        sha256=sha256,
    )
    _require_digest(head)
    return head


def _load_norm(captures: Path, sha256: str) -> FinalNorm:
    tensors, shape = _load(norm_path(captures, sha256))
    norm = FinalNorm(weight_H=tensors["weight"], eps=shape["eps"])
    if norm_digest(norm) != sha256:
        raise CaptureError(f"heads/norm-{sha256[:12]}... holds other numbers than its name says", _AGAIN)
    return norm


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
