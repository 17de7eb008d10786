"""Counts of published artifacts from headers of their sizes, to the byte, and what their cards said instead."""

from __future__ import annotations

import pytest

from harness.artifact.stated import statements
from harness.artifact.summary import Artifact, Scope, _by_kind, routed_layers
from harness.exl3.census import take_census
from tests.artifact.made import checkpoint, experts

#: The published mosaic: 43 layers with experts, the last of them the prediction layer; twelve of the rest at K=3.
SWAPPED = tuple(range(10, 22))
MOSAIC = {layer: 3 if layer in SWAPPED else 2 for layer in range(3, 46)}


def summary(bits: dict[int, int], **sizes: int) -> Artifact:
    """The receipt of one expert a layer: every rate is that of all experts."""
    census = take_census(checkpoint(experts(bits)))
    return Artifact.model_validate(
        {
            "source": {"name": "published", "commit": None, "files_sha256": ""},
            "file_bytes": sizes.get("files", census.whole.bytes),
            "index_total_bytes": sizes.get("index"),
            "scopes": {
                name: Scope(
                    tensors=rate.tensors,
                    weights=rate.weights,
                    bytes=rate.bytes,
                    mean_k=rate.mean_k,
                    bits_per_weight=rate.bits_per_weight,
                )
                for name, rate in census.scopes.items()
            },
            "bytes_by_kind": _by_kind(census),
            "codebooks": census.codebooks,
            "head": census.head,
            "ranks": 1,
            "decoder_layers": 45,
            "routed_layers": routed_layers(census),
            "mismatches": [],
        }
    )


def test_a_rank_sliced_archive_to_the_byte() -> None:
    """One layer of the published archive, 288 experts in four slices; 42 such layers are the whole."""
    tensors = experts({3: 2}, count=288, ranks=4)
    census = take_census(checkpoint(tensors))
    assert census.routed is not None
    assert len(tensors) == 288 * 3 * 4 * 4 and 42 * len(tensors) + 2_482 == 583_090
    one = [
        tensors[f"model.layers.3.mlp.experts.0.up_proj.rank0.{part}"].bytes for part in ("trellis", "suh", "svh", "mcg")
    ]
    assert one == [524_288, 8_192, 1_024, 4] and sum(one) == 533_508
    assert census.routed.bytes == 288 * 6_402_096 and 42 * census.routed.bytes == 77_439_753_216
    assert 77_439_753_216 + 33_835_039_608 == 111_274_792_824
    assert census.routed.bits_per_weight == pytest.approx(2.0352, abs=5e-5)
    assert census.routed.tensors == 288 * 3 and {group.ranks for group in census.groups} == {4}


@pytest.mark.parametrize(("bits", "size", "rate"), [(2, 6_328_332, 2.01172), (3, 9_474_060, 3.01172)])
def test_one_expert(bits: int, size: int, rate: float) -> None:
    census = take_census(checkpoint(experts({3: bits})))
    assert census.routed is not None and census.routed.bytes == size
    assert census.routed.bits_per_weight == pytest.approx(rate, abs=5e-6)


def test_main_stack_and_prediction_layer_stand_apart() -> None:
    found = summary(MOSAIC)
    every, main = found.scopes["routed experts"], found.scopes["routed experts, without MTP"]
    assert (round(every.bits_per_weight, 5), round(main.bits_per_weight, 5)) == (2.29079, 2.29744)
    assert (round(every.mean_k or 0, 5), round(main.mean_k or 0, 5)) == (2.27907, 2.28571)
    two, three = found.routed_layers
    assert (two.all, two.main, two.mtp, three.all, three.main) == (31, 30, 1, 12, 12)
    assert two.all + three.all == 43 and two.main + three.main == 42


def test_a_mixture_of_rates() -> None:
    """Six layers at K=3, one of them the prediction layer."""
    found = summary({layer: 3 if layer > 39 else 2 for layer in range(3, 46)})
    every, main = found.scopes["routed experts"], found.scopes["routed experts, without MTP"]
    assert every.mean_k == pytest.approx((37 * 2 + 6 * 3) / 43, abs=1e-12)
    assert main.mean_k == pytest.approx((37 * 2 + 5 * 3) / 42, abs=1e-12)
    assert (round(every.mean_k or 0, 4), round(main.mean_k or 0, 3)) == (2.1395, 2.119)


CARD = """# A quant
It has 2.32 bpw and is 12.756 % larger than the 2.05 bpw release; 2.29 bits per weight were counted by others.
K=2 for 33 of 45 layers, or rather 31 of 43 layers.
"""


def test_what_the_card_states_beside_what_is_counted() -> None:
    found = {line.stated: line for line in statements(CARD, summary(MOSAIC))}
    assert found["2.32 bpw"].status == "contradicts"
    assert found["2.32 bpw"].formula.startswith("(33*2.05 + 12*3.05)/45") and "2.3167" in found["2.32 bpw"].formula
    assert found["2.29 bits per weight"].status == "agrees"
    assert found["33 of 45 layers"].status == "contradicts" and "31 of 43" in found["33 of 45 layers"].counted
    assert found["31 of 43 layers"].status == "agrees"


def test_the_rate_scaled_by_sizes_is_recognised() -> None:
    """2.05 times 96.105 GB over 85.233 GB: the size that a stale index file still states."""
    made = summary(MOSAIC)
    whole = made.scopes["whole file"].model_copy(update={"bytes": 96_105_000_000})
    made = made.model_copy(update={"scopes": made.scopes | {"whole file": whole}, "index_total_bytes": 85_233_000_000})
    line = statements("2.3115 bpw", made)[0]
    assert line.status == "contradicts" and "2.05 x 96.105 / 85.233" in line.formula and "2.3115" in line.formula
    assert round(100 * (96.105 / 85.233 - 1), 3) == 12.756


def test_sizes_in_the_wrong_unit_round_and_invented_ones_contradict() -> None:
    made = summary(MOSAIC, files=96_105_000_000, index=85_137_182_940)
    found = {line.stated: line for line in statements("96.1 GB, 89.5 GiB, 89.5 GB, 85.1 GB, 70 GB", made)}
    assert [found[text].status for text in ("96.1 GB", "89.5 GiB", "89.5 GB", "85.1 GB", "70 GB")] == [
        "agrees", "agrees", "rounds", "contradicts", "contradicts",
    ]  # fmt: skip
    assert found["85.1 GB"].formula == "total_size of a stale index file"
