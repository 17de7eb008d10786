"""How often the intervals and verdicts of a report are right: the published functions on simulated documents.

Rows are kinds of documents, columns their number. A family is five equal candidates against an equal baseline: it
errs where any of them is called better or worse; ``correlation`` is that of the arms' documents. ``before`` is
what each interval was before it was corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from harness.progress import phase
from harness.stats import Totals, max_t_bands, t_interval
from harness.stats.influence import Estimate
from harness.stats.means import mean_interval, unequal

DOCUMENTS = (4, 6, 8, 16, 32, 128)
FAMILY = 5
#: Positions of a document in the simulated shares.
POSITIONS = 2000
SEED = 20261203


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A kind of documents: shares of cases (0..1) by their number; ``before`` for the interval it replaced."""

    what: str
    now: dict[int, float]
    before: dict[int, float]
    flagged: dict[int, float] | None = None


Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _lognormal(sigma: float) -> Draw:
    """Documents whose mean KL is lognormal, with expectation 1."""
    return lambda rng, shape: rng.lognormal(-sigma * sigma / 2, sigma, shape)


def _heavy(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """The exponential of half a t variable of three degrees of freedom, cut at 8, with expectation 1."""
    return np.exp(0.5 * np.clip(rng.standard_t(3, shape), -8, 8)) / _HEAVY_MEAN


def _heavy_mean() -> float:
    """By quadrature over the density of t with three degrees of freedom."""
    x = np.linspace(-8, 8, 200_001)
    density = 2 / (np.pi * np.sqrt(3) * (1 + x * x / 3) ** 2)
    inside = np.trapezoid(density, x)
    ends = (1 - inside) / 2 * (np.exp(-4.0) + np.exp(4.0))
    return float(np.trapezoid(density * np.exp(0.5 * x), x) + ends)


_HEAVY_MEAN = _heavy_mean()
KINDS: dict[str, Draw] = {
    "lognormal 0.3": _lognormal(0.3),
    "lognormal 0.5": _lognormal(0.5),
    "lognormal 1.0": _lognormal(1.0),
    "t3, heavy": _heavy,
}


def simulate(replicates: int = 2000, families: int = 2000) -> Iterator[Line]:
    """Every line, each as soon as it is there; the same numbers give the same digits."""
    rng = np.random.default_rng(SEED)
    todo = (len(KINDS) + 1) * len(DOCUMENTS) * replicates + 4 * len(DOCUMENTS) * families
    with phase("coverage", total=len(KINDS) + 5, unit="cases", item="line") as advance:
        for name, draw in KINDS.items():
            yield _means(name, draw, rng, replicates)
            advance(1, todo / (len(KINDS) + 5))
        yield _shares(rng, replicates)
        advance(1, todo / (len(KINDS) + 5))
        for name, correlation, normal in (
            ("normal, correlation 0", 0.0, True),
            ("normal, correlation 0.5", 0.5, True),
            ("lognormal 0.5, correlation 0", 0.0, False),
            ("lognormal 0.5, correlation 0.5", 0.5, False),
        ):
            yield _families(name, correlation, normal, rng, families)
            advance(1, todo / (len(KINDS) + 5))


def _covers(found: Estimate, truth: float) -> bool:
    return found.low is not None and found.high is not None and found.low <= truth <= found.high


def _means(name: str, draw: Draw, rng: np.random.Generator, replicates: int) -> Line:
    now, before, flagged = {}, {}, {}
    for documents in DOCUMENTS:
        hits = plain = marked = 0
        for values_G in draw(rng, (replicates, documents)):
            totals = Totals(0.01 * values_G, np.ones(documents))
            hits += _covers(mean_interval(totals, "divergence", resamples=1000), 0.01)
            plain += _covers(t_interval(totals), 0.01)
            marked += unequal(totals) is not None
        now[documents], before[documents] = hits / replicates, plain / replicates
        flagged[documents] = marked / replicates
    return Line(what=f"mean KL of one arm, {name}", now=now, before=before, flagged=flagged)


def _shares(rng: np.random.Generator, replicates: int) -> Line:
    """Agreement of 0.9 with an intraclass correlation of 0.1."""
    now, before = {}, {}
    for documents in DOCUMENTS:
        hits = plain = 0
        for agreed_G in rng.binomial(POSITIONS, rng.beta(0.9 * 9, 0.1 * 9, (replicates, documents))):
            totals = Totals(agreed_G.astype(float), np.full(documents, float(POSITIONS)))
            hits += _covers(mean_interval(totals, "share"), 0.9)
            plain += _covers(t_interval(totals), 0.9)
        now[documents], before[documents] = hits / replicates, plain / replicates
    return Line(what="share of 0.9 (top-1 agreement)", now=now, before=before)


def _families(name: str, correlation: float, normal: bool, rng: np.random.Generator, families: int) -> Line:
    now, before = {}, {}
    for documents in DOCUMENTS:
        together = alone = 0
        for _ in range(families):
            shared = rng.standard_normal((documents, 1))
            own = rng.standard_normal((documents, FAMILY + 1))
            arms_GK = correlation**0.5 * shared + (1 - correlation) ** 0.5 * own
            arms_GK = arms_GK if normal else np.exp(0.5 * arms_GK)
            differences = [Totals(column, np.ones(documents)) for column in (arms_GK[:, 1:] - arms_GK[:, :1]).T]
            together += not all(_covers(band, 0.0) for band in max_t_bands(differences, draws=4_000))
            alone += not all(_covers(t_interval(one), 0.0) for one in differences)
        now[documents], before[documents] = together / families, alone / families
    return Line(what=f"a family of {FAMILY} equal candidates errs, {name}", now=now, before=before)


def markdown(lines: list[Line]) -> str:
    """The table of the statistics page."""
    head = ["in %", *map(str, DOCUMENTS)]
    rows = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * len(DOCUMENTS)]
    for line in lines:
        rows.append(_row(line.what, line.now))
        errs = "each interval alone" if "errs" in line.what else "Student's t"
        rows.append(_row(f"- before: {errs}", line.before))
        if line.flagged is not None:
            rows.append(_row("- reports that say so (unequal documents)", line.flagged))
    return "\n".join(rows) + "\n"


def _row(what: str, values: dict[int, float]) -> str:
    return "| " + " | ".join([what, *(f"{100 * values[documents]:.1f}" for documents in DOCUMENTS)]) + " |"
