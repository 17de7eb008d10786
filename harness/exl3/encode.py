"""Encode one linear layer: regularise, search every tile, pack. Round-to-nearest or, with a Hessian, LDLQ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.exl3.codebook import marker_int32
from harness.exl3.layout import WIDTHS, pack_states
from harness.exl3.ldlq import ldlq_states, rotated_hessian
from harness.exl3.regularize import Regularized, best_rms, padded, random_signs, regularize
from harness.exl3.tiles import Rate as Rate
from harness.exl3.tiles import Report
from harness.exl3.tiles import decoded as decoded
from harness.exl3.tiles import search_matrix as search_matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class SignNames:
    """Names that fix the random signs; linears that share an input give the same ``input``."""

    seed: int
    input: str
    output: str


def encode_linear(
    name: str,
    weight: np.ndarray,
    rate: Rate,
    signs: SignNames,
    *,
    bias: np.ndarray | None = None,
    hessian: np.ndarray | None = None,
    threads: int | None = None,
    report: Report = lambda weights: None,
) -> dict[str, np.ndarray]:
    """The stored parts of a linear by suffix: trellis, suh, svh, the marker of its codebook, bias.

    Args:
        name: of the module, for errors.
        weight: float32 [out, in], the Hugging Face orientation, any sizes.
        rate: bits and codebook.
        signs: what the random signs follow from.
        bias: [out], stored as fp16 at the padded length.
        hessian: mean of ``x x^T`` over calibration tokens, [in, in]; None rounds to the nearest path.
        threads: of the search; all cores where None.
        report: told of progress.

    Raises:
        CheckpointError: values that are not finite or do not fit in fp16 scales.
    """
    out_features, in_features = weight.shape
    rows, columns = padded(in_features), padded(out_features)
    full = np.zeros((rows, columns), np.float32)
    full[:in_features, :out_features] = weight.T
    pair = random_signs(rows, signs.seed, signs.input), random_signs(columns, signs.seed, signs.output)
    regular = regularize(name, full, pair, best_rms(rate.bits, rate.codebook))
    del full
    if hessian is None:
        states = search_matrix(regular.rotated, rate, threads=threads, report=report)
    else:
        inner = rotated_hessian(hessian, regular.suh)
        states = ldlq_states(regular.rotated, inner, rate, threads=threads, report=report)
    return _parts(states, regular, rate, bias)


def _parts(states: np.ndarray, regular: Regularized, rate: Rate, bias: np.ndarray | None) -> dict[str, np.ndarray]:
    parts = {"trellis": pack_states(states, WIDTHS[rate.bits]), "suh": regular.suh, "svh": regular.svh}
    marker = marker_int32(rate.codebook)
    if marker is not None:
        parts[rate.codebook] = np.array(marker, np.int32)
    if bias is not None:
        parts["bias"] = np.zeros(len(regular.svh), np.float16)
        parts["bias"][: len(bias)] = bias
    return parts
