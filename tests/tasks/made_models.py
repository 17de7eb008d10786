"""The tiny model that answers questions."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import save_llama


def save_tiny(folder: Path, *, seed: int = 0, context: int = 2048) -> Path:
    """The tiny Llama of tests/tiny.py with room for a question in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_llama(folder, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder
