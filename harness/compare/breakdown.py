"""Where a difference lies: rows, domains, tenths of the position, the teacher's confidence, and single positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from harness.compare.metrics import BY_NAME
from harness.compare.model import Estimated, Position, RowDifference, Settings, Slice, TopFlips
from harness.compare.pairing import Aligned
from harness.measure.summary import CONFIDENCE_EDGES
from harness.stats import Estimate, block_bootstrap, holm, p_of_difference, t_interval

WORST = 20
#: Token ids kept in front of a target.
CONTEXT = 24


def row_differences(aligned: Aligned, at: int, settings: Settings) -> list[RowDifference]:
    """Every row's KL, NLL and top-1 difference; its own interval where there are positions."""
    names = ("kl_mean", "nll_candidate", "top1_agreement")
    values = {name: found for name in names if (found := aligned.values(BY_NAME[name])) is not None}
    mask = aligned.finite_N
    means = {n: [aligned.by_rows(v[i], mask).totals.means_G for i in (0, at)] for n, v in values.items()}
    kept = aligned.by_rows(values["kl_mean"][0], mask)
    own = _row_intervals(aligned, values["kl_mean"], at, settings)
    return [
        RowDifference(
            row=aligned.rows[code].row,
            document=aligned.rows[code].document,
            domain=aligned.rows[code].domain,
            positions=int(kept.totals.counts_G[place]),
            baseline=float(means["kl_mean"][0][place]),
            other=float(means["kl_mean"][1][place]),
            difference=float(means["kl_mean"][1][place] - means["kl_mean"][0][place]),
            low=own[code].low if code in own else None,
            high=own[code].high if code in own else None,
            top1_difference=float(means["top1_agreement"][1][place] - means["top1_agreement"][0][place]),
            nll_difference=float(means["nll_candidate"][1][place] - means["nll_candidate"][0][place]),
        )
        for place, code in enumerate(kept.index_G)
    ]


def _row_intervals(aligned: Aligned, kl: Sequence[np.ndarray], at: int, settings: Settings) -> dict[int, Estimate]:
    """Moving-block interval of each row's mean difference, by row index; empty without positions."""
    if aligned.basis != "positions":
        return {}
    mask = aligned.finite_N
    difference_N, row_N = (kl[at] - kl[0])[mask], aligned.row_N[mask]
    starts = np.flatnonzero(np.r_[True, np.diff(row_N) != 0])
    parts = np.split(difference_N, starts[1:])
    return {
        int(row_N[start]): block_bootstrap(part, confidence=settings.confidence, seed=settings.seed)
        for start, part in zip(starts, parts, strict=True)
    }


def domains(aligned: Aligned, at: int, settings: Settings) -> list[Slice]:
    """One slice a domain, p values corrected over the domains."""
    domain_R = np.array([row.domain for row in aligned.rows])
    names = sorted(set(domain_R.tolist()))
    return _slices(aligned, at, settings, ((name, domain_R[aligned.row_N] == name) for name in names))


def deciles(aligned: Aligned, at: int, settings: Settings) -> list[Slice]:
    """Ten slices of the position in the row."""
    if aligned.basis != "positions":
        return []
    position_N = aligned.columns[0]["position"]
    edges = np.unique(np.linspace(0, int(position_N.max()) + 1, 11).round().astype(int))
    masks = (
        (f"{low}-{high - 1}", (position_N >= low) & (position_N < high))
        for low, high in zip(edges[:-1], edges[1:], strict=True)
    )
    return _slices(aligned, at, settings, masks)


def confidence_buckets(aligned: Aligned, at: int, settings: Settings) -> list[Slice]:
    """Slices of the teacher's largest probability; the last bucket holds 1 itself."""
    if aligned.basis != "positions":
        return []
    p_N = aligned.columns[0]["p_top1_teacher"]
    code_N = np.clip(np.searchsorted(CONFIDENCE_EDGES, p_N, side="right") - 1, 0, len(CONFIDENCE_EDGES) - 2)
    pairs = enumerate(zip(CONFIDENCE_EDGES[:-1], CONFIDENCE_EDGES[1:], strict=True))
    masks = ((f"{low:g}-{high:g}", (code_N == index) & np.isfinite(p_N)) for index, (low, high) in pairs)
    return _slices(aligned, at, settings, masks)


def _slices(aligned: Aligned, at: int, settings: Settings, masks: Iterator[tuple[str, np.ndarray]]) -> list[Slice]:
    """KL of both arms in each part that holds a position; Holm over the parts that have a test."""
    slices = [s for label, mask in masks if (s := _slice(aligned, at, settings, label, mask)) is not None]
    tested = [s.p for s in slices if s.p is not None]
    adjusted = iter(holm(tested))
    return [s if s.p is None else s.model_copy(update={"p_holm": next(adjusted)}) for s in slices]


def _slice(aligned: Aligned, at: int, settings: Settings, label: str, part: np.ndarray) -> Slice | None:
    kl, top1 = aligned.values(BY_NAME["kl_mean"]), aligned.values(BY_NAME["top1_agreement"])
    if kl is None or top1 is None:
        raise ValueError("every measurement has KL and top-1 agreement")
    mask = aligned.finite_N & part
    if not mask.any():
        return None
    a, b = (aligned.by_unit(kl[i], mask).totals for i in (0, at))
    agree_a, agree_b = (aligned.by_unit(top1[i], mask).totals for i in (0, at))
    estimate = t_interval(b.minus(a), confidence=settings.confidence, unit=settings.unit)
    return Slice(
        label=label,
        positions=int(aligned.weight_N[mask].sum()),
        units=len(a),
        baseline=a.mean,
        other=b.mean,
        difference=Estimated.of(estimate),
        p=p_of_difference(estimate) if estimate.has_interval else None,
        p_holm=None,
        top1_difference=agree_b.mean - agree_a.mean,
    )


def top_flips(aligned: Aligned, at: int) -> TopFlips | None:
    """Who agrees with the teacher's most likely token, position by position."""
    if aligned.basis != "positions":
        return None
    mask = aligned.finite_N
    a, b = (aligned.columns[i]["agree"][mask].astype(bool) for i in (0, at))
    return TopFlips(
        both=int((a & b).sum()),
        baseline_only=int((a & ~b).sum()),
        other_only=int((b & ~a).sum()),
        neither=int((~a & ~b).sum()),
    )


def worst_positions(aligned: Aligned, count: int = WORST) -> list[Position]:
    """The positions with the largest KL in any arm, each once, with the ids in front of them."""
    if aligned.basis != "positions":
        return []
    kl_AN = np.stack([columns["kl"] for columns in aligned.columns])
    largest_N = np.where(aligned.finite_N, kl_AN.max(axis=0, where=np.isfinite(kl_AN), initial=-np.inf), -np.inf)
    order = np.lexsort((np.arange(len(largest_N)), -largest_N))[:count]
    return [_position(aligned, int(at)) for at in order if np.isfinite(largest_N[at])]


def _position(aligned: Aligned, at: int) -> Position:
    base = aligned.columns[0]
    row = aligned.rows[int(aligned.row_N[at])]
    names = [arm.name for arm in aligned.arms]
    begin = int(np.searchsorted(base["row"], row.row))
    return Position(
        row=row.row,
        position=int(base["position"][at]),
        document=row.document,
        domain=row.domain,
        kl={n: float(c["kl"][at]) for n, c in zip(names, aligned.columns, strict=True)},
        nll={n: float(c["nll_candidate"][at]) for n, c in zip(names, aligned.columns, strict=True)},
        nll_teacher=float(base["nll_teacher"][at]),
        p_top1_teacher=float(base["p_top1_teacher"][at]),
        target=int(base["target"][at]),
        top1_teacher=int(base["top1_teacher"][at]),
        top1={n: int(c["top1_candidate"][at]) for n, c in zip(names, aligned.columns, strict=True)},
        context=base["target"][max(begin, at - CONTEXT) : at].tolist(),
    )
