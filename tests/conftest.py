"""Fixtures shared by all tests: one small model and its sealed panel, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is loaded: threads that wait by spinning make small models many times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 Llama of 259 tokens that has learned something; never changed by a test."""
    folder = tmp_path_factory.mktemp("models") / "tiny-teacher"
    folder.mkdir()
    tiny.save_llama(folder)
    return folder


@pytest.fixture(scope="session")
def panel_folder(tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path) -> Path:
    """Four rows of 96 tokens, sealed for the teacher's tokenizer; never changed by a test."""
    from harness.panel import build_panel

    folder = tmp_path_factory.mktemp("panels") / "tiny"
    folder.mkdir()
    tiny.write_panel(folder, teacher_folder)
    build_panel(folder)
    return folder


@pytest.fixture(scope="session")
def exl3_folder(tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path) -> Path:
    """The teacher's MLPs as EXL3 at 3 bits, made by the reference encoder; never changed by a test."""
    from harness.exl3.quantize import quantize_checkpoint
    from harness.exl3.quantize_plan import QuantizeSettings

    folder = tmp_path_factory.mktemp("models") / "tiny-exl3"
    quantize_checkpoint(teacher_folder, folder, QuantizeSettings(bits=3, modules="mlp"))
    return folder
