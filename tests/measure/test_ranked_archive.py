"""A rank-sliced archive through the command, by every way of loading: its KL from the dense join is nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.exl3.test_ranked import archive, change, drop, wide_experts
from tests.fault_cases.command import measured, refused

WAYS = {"decoded at load": (), "packed": ("--packed",), "layer by layer": ("--memory-budget", "auto")}


def with_tokenizer(folder: Path, source: Path) -> None:
    for file in source.glob("*token*"):
        shutil.copyfile(file, folder / file.name)


@pytest.mark.parametrize(("ranks", "shared"), [(4, False), (2, True)], ids=["four ranks", "shared scales"])
def test_an_archive_is_at_no_distance_from_its_dense_join(
    ranks: int, shared: bool, tmp_path: Path, teacher_folder: Path, panel_folder: Path
) -> None:
    model = wide_experts(tiny.VOCAB)
    tiny.learn_bigrams(model, teacher_folder)
    pack = archive(tmp_path, ranks, shared=shared, model=model)
    for folder in (pack.packed, pack.dense):
        with_tokenizer(folder, teacher_folder)
    for number, (way, options) in enumerate(WAYS.items()):
        more = ("--compute-dtype", "float32", *options)
        found = measured(tmp_path, pack.packed, pack.dense, panel_folder, f"run{number}", *more)
        assert 0 <= found["summary"]["kl_mean"] < 1e-6, way
        assert found["summary"]["top1_agreement"] == 1.0, way
    change(pack, lambda tensors: drop(tensors, ".experts.1.up_proj.rank1."))
    for options in WAYS.values():
        assert "up_proj: rank 1 of" in refused(tmp_path, pack.packed, pack.dense, panel_folder, *options)
