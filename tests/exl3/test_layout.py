"""Ring order and bit stream against the published vectors and a bit-by-bit oracle."""

import hashlib

import numpy as np
import pytest

from harness.exl3 import decode_torch
from harness.exl3.codebook import table
from harness.exl3.layout import RING_COL, RING_ROW, WIDTHS, bits_of, fresh_bits, pack_states
from tests.exl3 import oracle

# K: (states 0..3, states 254..255, sha256[:16] of the states, sha256[:16] of the mul1 tile); section 4
VECTORS = {
    1: ("ae77 5cef b9de 73bc", "6b9d d73b", "2a096bdf9ed48bdb", "1f53d45fc89fc298"),
    2: ("eaaf aabc aaf3 abce", "aeaa baab", "3e992d72fbc6ffc4", "1aed401fc5748090"),
    3: ("f0de 86f3 379c bce7", "53c3 9e1b", "f73d703bd04f7a88", "978c70dbcfbadcbe"),
    4: ("18bc 8bce bce7 ce70", "2818 818b", "d0a98d083a9aa0c8", "fe3af5cd34a61ec0"),
    5: ("9f79 ef39 e738 e703", "9327 64fb", "b6d1b8488f76de2f", "88d06cc6816bedc0"),
    6: ("1af3 bce7 39c0 7030", "8921 486b", "0813abdb185830e6", "b7a16dfe22cfe0aa"),
    7: ("ede7 f39c ce06 0303", "2457 2bdb", "a65192a7ba5719d8", "94e4001ed572cf2a"),
    8: ("4bce ce70 7030 3039", "820f 0f4b", "d83a8c1c59aea459", "890469f3dfc1bc50"),
    1.5: ("91e7 479e 8f3c 3cf3", "b23c c8f3", "ec27a3d4a2d0ad2a", "94bbe836cee63bdc"),
    2.5: ("b18f 8c79 31e7 8f39", "558c ac63", "41fab0fe02268e89", "d1b72645fe7876ee"),
    3.5: ("7e9e e9e7 4f39 f39c", "a8fd 8fd3", "050c65d2fea7ed44", "1cdca31a9c04f6bf"),
}


def vector(bits: float) -> np.ndarray:
    width = int(16 * bits)
    return ((40503 * np.arange(width) + 12345) & 0xFFFF).astype(np.uint16).view(np.int16).reshape(1, 1, width)


def short_digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def test_every_legal_rate_has_a_vector():
    assert set(VECTORS) == set(WIDTHS)


@pytest.mark.parametrize("bits", VECTORS)
def test_published_vector(bits):
    first, last, states_digest, tile_digest = VECTORS[bits]
    states = oracle.all_states(vector(bits))[0, 0]
    assert states.dtype == np.uint16
    assert " ".join(f"{s:04x}" for s in states[:4]) == first
    assert " ".join(f"{s:04x}" for s in states[254:]) == last
    assert short_digest(states) == states_digest
    tile = np.empty((16, 16), np.float16)
    tile[RING_ROW, RING_COL] = table("mul1")[states]
    assert short_digest(tile) == tile_digest


def test_ring_order():
    place = (RING_ROW * 16 + RING_COL).tolist()
    assert place[:16] == [0, 16, 128, 144, 8, 24, 136, 152, 32, 48, 160, 176, 40, 56, 168, 184]
    assert place[-8:] == [103, 119, 231, 247, 111, 127, 239, 255]
    assert sorted(place) == list(range(256))


@pytest.mark.parametrize("bits", WIDTHS)
def test_states_equal_the_bit_by_bit_oracle_and_pack_inverts(bits):
    rng = np.random.default_rng(int(bits * 2))
    trellis = rng.integers(-32768, 32768, (3, 2, WIDTHS[bits]), dtype=np.int16)
    states = oracle.all_states(trellis)
    assert states.reshape(6, 256).tolist() == [oracle.states(t, bits) for t in trellis.reshape(6, -1)]
    assert np.array_equal(pack_states(states, WIDTHS[bits]), trellis)


@pytest.mark.parametrize("bits", WIDTHS)
def test_states_in_torch_are_equal(bits):
    import torch

    trellis = np.random.default_rng(1).integers(-32768, 32768, (5, WIDTHS[bits]), dtype=np.int16)
    assert decode_torch.states(torch.from_numpy(trellis)).tolist() == oracle.all_states(trellis).tolist()


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_ring_made_from_fresh_bits_survives_packing(bits):
    """What an encoder does: choose fresh bits, form the tail-biting ring of states, pack it."""
    rng = np.random.default_rng(2)
    own = fresh_bits(WIDTHS[bits])
    state, ring = 0, []
    symbols = [int(rng.integers(1 << d)) for d in own]
    for _turn in range(2):
        ring = []
        for d, symbol in zip(own, symbols, strict=True):
            state = (state << int(d) | symbol) & 0xFFFF
            ring.append(state)
    states = np.array(ring, np.uint16)
    assert np.array_equal(oracle.all_states(pack_states(states, WIDTHS[bits])), states)


@pytest.mark.parametrize("width", [0, 8, 15, 17, 72, 136, 144])
def test_illegal_width_is_refused(width):
    with pytest.raises(ValueError, match="no legal rate"):
        bits_of(width)


def test_a_ring_has_256_states():
    with pytest.raises(ValueError, match="256"):
        pack_states(np.zeros((1, 255), np.uint16), 32)
