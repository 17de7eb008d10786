"""The three codebooks against the published hashes, entries and moments, and an exact-fraction oracle."""

import hashlib

import numpy as np
import pytest
from numba import njit

from harness.exl3 import kernels
from harness.exl3.codebook import CODEBOOKS, MARKERS, marker_int32, table, table_fp32
from tests.exl3 import oracle

# name: (first entries, sha256 of all, rms, mean, max abs, distinct); as exllamav3 has them
PUBLISHED = {
    "3inst": (
        [0x3A25, 0xBB5B, 0x3B74, 0x34B6],
        "ad88de2dcff5bb05fff2faec37cceceb43aa1c2e8203f9d81a6fbd6dd3393eea",
        (1.24371, 0.00021, 3.9727, 10598),
    ),
    "mcg": (
        [0x3F60, 0x304E, 0xBA13, 0x3AB8],
        "95383563929baa9d1ae5de0be22490284382673620bdd85929feea7bdbef04a9",
        (1.24411, -0.00004, 3.9492, 10746),
    ),
    "mul1": (
        [0xC2E8, 0x3921, 0xB72D, 0x3239],
        "bc48d02cb1c14939dc47b90f870dd689d63e3b1ab69a157e65538db68677a6c8",
        (1.00031, -0.00193, 3.4531, 913),
    ),
}


@pytest.mark.parametrize("name", CODEBOOKS)
def test_all_entries_have_the_published_hash_and_moments(name):
    entries, digest, (rms, mean, largest, distinct) = PUBLISHED[name]
    values = table(name)
    assert values.shape == (65536,) and values.dtype == np.float16
    assert values.view(np.uint16)[:4].tolist() == entries
    assert hashlib.sha256(values.astype("<f2").tobytes()).hexdigest() == digest
    wide = values.astype(float)
    assert np.sqrt((wide**2).mean()) == pytest.approx(rms, abs=5e-6)
    assert wide.mean() == pytest.approx(mean, abs=5e-6)
    assert np.abs(wide).max() == pytest.approx(largest, abs=5e-5)
    assert len(np.unique(values)) == distinct


@pytest.mark.parametrize("name", CODEBOOKS)
def test_entries_equal_exact_fractions_rounded_once(name):
    states = range(0, 65536, 7)
    assert table(name).view(np.uint16)[::7].tolist() == [oracle.codebook(name, state) for state in states]


def test_the_affine_shortcut_of_mul1_is_another_codebook():
    """``(b - 510) * k`` instead of the fused ``h * k + c``: the classic silent bug."""
    hashed = (np.arange(65536, dtype=np.uint32) * np.uint32(MARKERS["mul1"])).view(np.uint8).reshape(-1, 4)
    shortcut = ((hashed.sum(axis=1, dtype=int) - 510) * 0.00676727294921875).astype(np.float16)
    assert (shortcut != table("mul1")).mean() > 0.5


@njit
def _computed(sums_bytes, factor, addend, out):
    u32 = np.uint32
    for state in range(65536):
        hashed = u32(u32(u32(state) * factor) + addend)
        out[state] = kernels._mul1(hashed) if sums_bytes else kernels._halves(hashed)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_kernel_computes_every_entry_bit_for_bit(name):
    bits = np.empty(65536, np.uint32)
    _computed(*kernels.HASHES[name], bits)
    assert np.array_equal(bits, table_fp32(name).view(np.uint32))


def test_tables_cannot_be_written_and_names_are_checked():
    with pytest.raises(ValueError, match="read-only"):
        table("mcg")[0] = 0
    with pytest.raises(ValueError, match="mcg2"):
        table("mcg2")


def test_markers_are_the_published_int32():
    assert marker_int32("mcg") == -877912083 and marker_int32("mul1") == -2082680531
    assert marker_int32("3inst") is None
