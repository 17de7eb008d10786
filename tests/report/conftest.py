"""Fixtures of the report's tests: one small run folder, made once."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tests.report.fake_run import make_frame, write_run


@pytest.fixture(scope="session")
def frame() -> pd.DataFrame:
    return make_frame()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory, frame: pd.DataFrame) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, frame)
    return folder
