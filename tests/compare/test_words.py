"""The sentence for a card, word by word."""

from __future__ import annotations

import pytest

from harness.compare.model import Difference, Estimated, Resolution, Signs
from harness.report.words import sentence


def difference(estimate: float, low: float | None, high: float | None, **change: object) -> Difference:
    signs = {"rows_lower": 505, "rows_higher": 7, "rows_tied": 0} | {
        k: change.pop(k) for k in ("rows_lower", "rows_higher", "rows_tied") if k in change
    }
    figure = Estimated(
        estimate=estimate,
        low=low,
        high=high,
        method="t",
        confidence=0.95,
        unit="row",
        n=512,
        note="" if low is not None else "one row gives no interval",
    )
    return Difference.model_validate(
        {
            "metric": "kl_mean",
            "label": "KL",
            "unit": "nats",
            "role": "primary",
            "lower_is_better": True,
            "baseline": 0.1,
            "other": 0.1 + estimate,
            "positions": 1,
            "excluded": 0,
            "difference": figure,
            "bootstrap": figure,
            "band": None,
            "pooled_ratio": None,
            "row_ratio": None,
            "margin": 0.01,
            "margin_source": "registered",
            "verdict": "better",
            "reason": "",
            "p": 0.0,
            "p_holm": None,
            "p_equivalence": 1.0,
            "non_inferior": True,
            "signs": Signs.model_validate(
                signs
                | {"units_lower": 1, "units_higher": 0, "units_tied": 0}
                | {"share_lower_low": 0.9, "share_lower_high": 1.0, "p": 0.0}
            ),
            "share": None,
            "resolution": Resolution(deviation=1.0, detectable=0.1, detectable_relative=1.0, units_for_a_tenth=10),
        }
        | change
    )


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            difference(-0.02249, -0.02431, -0.02068),
            "lower by 0.0225 nats (95 % CI 0.0207 to 0.0243), lower on 505 of 512 contexts",
        ),
        (
            difference(0.02249, 0.02068, 0.02431, rows_lower=7, rows_higher=505),
            "higher by 0.0225 nats (95 % CI 0.0207 to 0.0243), higher on 505 of 512 contexts",
        ),
        (
            difference(-0.0003, -0.001, 0.0004, rows_lower=260, rows_higher=252),
            "differs by -0.00030 nats (95 % CI -0.00100 to 0.00040), lower on 260 of 512 contexts",
        ),
        (
            difference(0.0194034, 0.016715, 0.0220918, unit="share", rows_lower=0, rows_higher=32),
            "higher by 1.94 pp (95 % CI 1.67 to 2.21), higher on 32 of 32 contexts",
        ),
        (
            difference(-0.5, None, None, rows_lower=1, rows_higher=0),
            "lower by 0.5000 nats (one row gives no interval), lower on 1 of 1 context",
        ),
        (
            difference(0.0, 0.0, 0.0, rows_lower=0, rows_higher=0, rows_tied=512),
            "differs by 0 nats (95 % CI 0 to 0), the same on 512 of 512 contexts",
        ),
    ],
)
def test_sentences(found: Difference, text: str) -> None:
    assert sentence(found) == text
