"""Bounds and estimates from part of a vocabulary, against whole distributions, mpmath and a general optimiser."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from harness.scoring import bounds


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl(lp: np.ndarray, lq: np.ndarray) -> np.ndarray:
    return (np.exp(lp) * (lp - lq)).sum(-1)


def top(logs: np.ndarray, k: int) -> np.ndarray:
    """Mask of the k largest entries of each position."""
    out = np.zeros(logs.shape, dtype=bool)
    np.put_along_axis(out, np.argsort(-logs, axis=-1)[:, :k], True, axis=-1)
    return out


def only(logs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, logs, np.nan)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Three positions of both sides over a small vocabulary, from flat to nearly certain, from close to far."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.integers(3, 60))
    teacher = rng.standard_normal((3, width)) * draw(st.sampled_from([0.0, 1.0, 4.0]))
    teacher[:, 0] += draw(st.sampled_from([0.0, 5.0, 20.0, 40.0]))
    noise = draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.3, 3.0]))
    return log_softmax(teacher), log_softmax(teacher + noise * rng.standard_normal((3, width)))


# ---- the same ids on both sides --------------------------------------------------------------------------------------


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_a_bound_grows_with_k_up_to_the_kl(pair: tuple[np.ndarray, np.ndarray]) -> None:
    lp, lq = pair
    exact, last = kl(lp, lq), np.zeros(len(lp))
    for k in range(1, lp.shape[1] + 1):
        known = top(lp, k)
        found = bounds.lower_bound(only(lp, known), only(lq, known))
        assert (found.kl >= last - 1e-7).all() and (found.kl <= exact + 1e-12).all()
        assert (found.kl >= -1e-15).all()
        np.testing.assert_allclose(found.mass_p, np.exp(lp)[known].reshape(3, k).sum(-1), atol=1e-14)
        last = found.kl
    np.testing.assert_allclose(last, exact, atol=1e-10)


@given(pairs(), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_chain_rule(pair: tuple[np.ndarray, np.ndarray], k: int) -> None:
    """KL = bound + p_T KL(tail||tail), wherever the tail has mass."""
    lp, lq = pair
    known = top(lp, min(k, lp.shape[1] - 1))
    found = bounds.lower_bound(only(lp, known), only(lq, known))
    tails = [log_softmax(np.where(known, -np.inf, side)) for side in (lp, lq)]
    with np.errstate(invalid="ignore"):
        tail = np.where(known, 0.0, np.exp(tails[0]) * (tails[0] - tails[1])).sum(-1)
    good = (found.tail_p > 1e-5) & (found.tail_q > 1e-5)
    np.testing.assert_allclose((found.kl + found.tail_p * tail)[good], kl(lp, lq)[good], rtol=1e-8, atol=1e-9)


def test_the_worked_example_of_a_renormalised_top_2() -> None:
    """The tails are equal, so the bound is the KL, 0.4159; renormalising gives 0.8318, which is no bound."""
    lp, lq = np.log([[0.4, 0.1, 0.25, 0.25]]), np.log([[0.1, 0.4, 0.25, 0.25]])
    known = np.array([[True, True, False, False]])
    assert kl(lp, lq)[0] == pytest.approx(0.415888, abs=1e-6)
    assert bounds.lower_bound(only(lp, known), only(lq, known)).kl[0] == pytest.approx(0.415888, abs=1e-6)
    assert bounds.renormalised(only(lp, known), only(lq, known))[0] == pytest.approx(0.831777, abs=1e-6)


@pytest.mark.parametrize("tail", [1e-3, 1e-8, 1e-11])
def test_digits_of_small_tails_and_small_divergences(tail: float) -> None:
    """Against 60 digits: one id holds nearly everything, and the two sides differ in the tail by one part in 1e5."""
    with mpmath.workdps(60):
        lp = [mpmath.log1p(-mpmath.mpf(tail)), mpmath.log(mpmath.mpf(tail) * 3 / 4)]
        p = [mpmath.e ** mpmath.mpf(float(v)) for v in lp]
        q = [p[0] - p[1] * mpmath.mpf("1e-5"), p[1] * (1 + mpmath.mpf("1e-5"))]
        lq = [float(mpmath.log(v)) for v in q]
        q = [mpmath.e ** mpmath.mpf(v) for v in lq]
        cells = [*zip(p, q, strict=True), (1 - sum(p), 1 - sum(q))]
        wanted = float(sum(a * mpmath.log(a / b) for a, b in cells))
    found = bounds.lower_bound(np.array([[float(v) for v in lp]]), np.array([lq]), resolution=0.0)
    # A log-probability near 0 is stored to 1e-16: that is what the tail of the candidate is known to.
    assert found.kl[0] == pytest.approx(wanted, rel=1e-4, abs=1e-16)


def test_tails_below_the_resolution_only_lower_the_bound() -> None:
    """fp32 log-probabilities of a server may add up to a little more than 1: counted, never clamped into a number."""
    rng = np.random.default_rng(0)
    teacher = rng.standard_normal((400, 50)) * 4 + np.where(np.arange(50) == 0, 12.0, 0.0)
    lp, full_q = log_softmax(teacher), log_softmax(teacher + 0.05 * rng.standard_normal((400, 50)))
    lq = full_q.astype(np.float32).astype(np.float64)
    known = top(lp, 45)
    found = bounds.lower_bound(only(lp, known), only(lq, known), resolution=bounds.FP32_RESOLUTION)
    assert (found.tail_q < 0).any() and found.rounded[found.tail_q < 0].all()
    assert np.isfinite(found.kl).all() and (found.kl <= kl(lp, full_q) + 2e-7).all()
    assert found.kl.mean() == pytest.approx(kl(lp, full_q).mean(), rel=1e-3)


def test_zeros_and_nothing_known() -> None:
    none = np.full((1, 2), np.nan)
    assert bounds.lower_bound(none, none).kl[0] == 0 and bounds.lower_bound(none, none).mass_p[0] == 0
    assert bounds.lower_bound(none[:, :0], none[:, :0]).kl[0] == 0
    lost = bounds.lower_bound(np.log([[0.5, 0.3]]), np.array([[math.log(0.7), -math.inf]]))
    assert lost.kl[0] == math.inf
    with np.errstate(divide="ignore"):
        gone = bounds.lower_bound(np.log([[0.7, 0.0]]), np.log([[0.5, 0.2]]))
    assert gone.kl[0] == pytest.approx(0.7 * math.log(0.7 / 0.5))  # the bucket holds 0.3 on both sides


# ---- different ids ---------------------------------------------------------------------------------------------------


@given(pairs(), st.integers(1, 12), st.integers(1, 12), st.booleans())
@settings(max_examples=300, deadline=None)
def test_capped_lies_between_the_bound_and_the_kl(
    pair: tuple[np.ndarray, np.ndarray], a: int, b: int, whole: bool
) -> None:
    """Two true top-k sets, or a teacher that knows every id of its own list and of the candidate's."""
    lp, lq = pair
    mine, theirs = top(lp, min(a, lp.shape[1])), top(lq, min(b, lp.shape[1]))
    known_p = mine | theirs if whole else mine
    caps = {
        "cap_p_T": np.exp(np.where(mine, lp, np.inf).min(-1)),
        "cap_q_T": np.exp(np.where(theirs, lq, np.inf).min(-1)),
    }
    found = bounds.capped_bound(only(lp, known_p), only(lq, theirs), **caps)
    plain = bounds.lower_bound(only(lp, known_p & theirs), only(lq, known_p & theirs)).kl
    assert (found >= plain - 1e-9).all() and (found <= kl(lp, lq) + 1e-9).all()


def _reference(p: np.ndarray, q: np.ndarray, mine: np.ndarray, theirs: np.ndarray) -> float:
    """The same minimum by a general optimiser over the unknown masses themselves."""
    alone_p, alone_q = p[mine & ~theirs], q[theirs & ~mine]
    cap_p, cap_q = p[mine].min(), q[theirs].min()
    left_p, left_q = 1 - p[mine].sum(), 1 - q[theirs].sum()
    fixed = (p * np.log(p / q))[mine & theirs].sum()
    n = len(alone_p)

    def value(z: np.ndarray) -> float:
        x, y = z[:n], z[n:]
        r, s = left_p - y.sum(), left_q - x.sum()
        if r < 0 or s <= 0:
            return 1e3
        rest = r * np.log(r / s) if r > 0 else 0.0
        return float(fixed + (alone_p * np.log(alone_p / x)).sum() + (y * np.log(y / alone_q)).sum() + rest)

    start = np.concatenate(
        [
            np.minimum(cap_q, left_q / (n + 1)) * np.ones(n),
            np.minimum(cap_p, left_p / (len(alone_q) + 1)) * np.ones(len(alone_q)),
        ]
    )
    limits = [(1e-12, cap_q)] * n + [(1e-12, cap_p)] * len(alone_q)
    constraints = [
        {"type": "ineq", "fun": lambda z: left_q - z[:n].sum() - 1e-12},
        {"type": "ineq", "fun": lambda z: left_p - z[n:].sum() - 1e-12},
    ]
    return float(
        minimize(
            value,
            start * 0.9,
            bounds=limits,
            constraints=constraints,
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        ).fun
    )


def test_capped_is_the_minimum_over_everything_consistent() -> None:
    rng = np.random.default_rng(5)
    compared = 0
    for _ in range(40):
        teacher = rng.standard_normal((1, 14)) * 1.5
        lp, lq = log_softmax(teacher), log_softmax(teacher + 0.8 * rng.standard_normal((1, 14)))
        mine, theirs = top(lp, 4), top(lq, 5)
        if (mine == theirs).all():
            continue
        caps = {"cap_p_T": np.exp(lp[mine].min()), "cap_q_T": np.exp(lq[theirs].min())}
        found = bounds.capped_bound(only(lp, mine), only(lq, theirs), **caps)[0]
        wanted = _reference(np.exp(lp[0]), np.exp(lq[0]), mine[0], theirs[0])
        assert found == pytest.approx(wanted, abs=2e-6)
        compared += 1
    assert compared > 25


def test_capped_where_the_unknown_ids_take_everything() -> None:
    """No mass is left outside both lists: the rests vanish and each side has a multiplier of its own."""
    lp = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    lq = np.log(np.array([[0.5, 0.05, 0.15, 0.3]]))
    mine, theirs = np.array([[1, 1, 0, 0]], bool), np.array([[1, 0, 1, 1]], bool)
    found = bounds.capped_bound(only(lp, mine), only(lq, theirs), cap_p_T=0.3, cap_q_T=0.15)[0]
    assert bounds.lower_bound(only(lp, mine & theirs), only(lq, mine & theirs)).kl[0] < found <= kl(lp, lq)[0] + 1e-12


# ---- upper bounds and estimates --------------------------------------------------------------------------------------


@given(pairs(), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_an_upper_bound_under_its_assumption(pair: tuple[np.ndarray, np.ndarray], k: int) -> None:
    lp, lq = pair
    k = min(k, lp.shape[1] - 1)
    mine, exact = top(lp, k), kl(lp, lq)
    ratio = np.where(mine, np.nan, lp - lq)
    spread = float((np.nanmax(ratio, -1) - np.nanmin(ratio, -1)).max())
    lower = bounds.lower_bound(only(lp, mine), only(lq, mine))
    assert (bounds.upper_bound_of_range(lower.kl, lower.tail_p, spread) >= exact - 1e-9).all()


def test_tail_estimate_is_unbiased_and_its_error_is_right() -> None:
    """4,000 repeats of 8 ids from one tail: their mean is the tail's sum, and their spread is the stated error's."""
    rng = np.random.default_rng(1)
    teacher = rng.standard_normal((1, 200))
    lp, lq = log_softmax(teacher), log_softmax(teacher + 0.5 * rng.standard_normal((1, 200)))
    known = top(lp, 10)
    tail = np.flatnonzero(~known[0])
    mass = np.exp(lp[0, tail]).sum()
    drawn = rng.choice(tail, size=(4000, 8), p=np.exp(lp[0, tail]) / mass)
    found = bounds.tail_estimate(lp[0, drawn], lq[0, drawn], np.full(4000, mass))
    wanted = kl(lp, lq)[0] - bounds.known_sum(only(lp, known), only(lq, known))[0]
    spread = found.value.std(ddof=1)
    assert abs(found.value.mean() - wanted) < 4 * spread / math.sqrt(4000)
    assert math.sqrt((found.standard_error**2).mean()) == pytest.approx(spread, rel=0.05)
    empty = bounds.tail_estimate(np.full((1, 2), np.nan), np.full((1, 2), np.nan), np.zeros(1))
    assert empty.value[0] == 0 and empty.standard_error[0] == 0
    lost = bounds.tail_estimate(np.log([[0.1, 0.1]]), np.array([[-2.0, np.nan]]), np.array([0.2]))
    assert np.isnan(lost.value[0])


def test_shortfall_guesses_the_tail() -> None:
    """For an even disturbance of a flat distribution the guess is close; it is named a guess for all others."""
    rng = np.random.default_rng(2)
    teacher = rng.standard_normal((300, 2000))
    lp, lq = log_softmax(teacher), log_softmax(teacher + 0.15 * rng.standard_normal((300, 2000)))
    known = top(lp, 64)
    lower = bounds.lower_bound(only(lp, known), only(lq, known))
    guess = bounds.shortfall(only(lp, known), only(lq, known), lower.tail_p)
    assert guess.mean() == pytest.approx((kl(lp, lq) - lower.kl).mean(), rel=0.05)


# ---- never above the KL ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounded", "resolution"),
    [(False, bounds.FLOAT64_RESOLUTION), (True, bounds.FP32_RESOLUTION)],
    ids=["float64", "a server's fp32"],
)
def test_a_lower_bound_is_never_above_the_kl(rounded: bool, resolution: float) -> None:
    """Also where the rest is as small as its rounding: the KL of each position in 50 digits."""
    rng, above = np.random.default_rng(7), []
    for _ in range(150):
        width = int(rng.integers(3, 40))
        teacher = rng.standard_normal(width) * rng.choice([0.1, 1.0, 4.0])
        teacher[0] += rng.choice([0.0, 5.0, 20.0, 40.0])
        candidate = teacher + rng.choice([0.0, 1e-3, 0.3, 3.0, 10.0]) * rng.standard_normal(width)
        lp, lq = log_softmax(teacher[None]), log_softmax(candidate[None])
        exact = kl_in_50_digits(teacher, candidate)
        for k in sorted({1, 2, width // 2, width - 1, width}):
            sent = [np.float32(side).astype(np.float64) if rounded else side for side in (lp, lq)]
            both = [only(side, top(lp, k)) for side in sent]
            own = [only(side, top(which, k)) for side, which in zip(sent, (lp, lq), strict=True)]
            caps = [np.exp(np.nanmin(side, -1)) for side in own]
            found = bounds.lower_bound(both[0], both[1], resolution=resolution).kl[0]
            capped = bounds.capped_bound(own[0], own[1], cap_p_T=caps[0], cap_q_T=caps[1], resolution=resolution)[0]
            above += [found - exact, capped - exact]
            assert found >= 0.0
    assert max(above) <= 1e-12


def kl_in_50_digits(teacher: np.ndarray, candidate: np.ndarray) -> float:
    with mpmath.workdps(50):
        p, q = ([mpmath.exp(mpmath.mpf(float(x))) for x in side] for side in (teacher, candidate))
        sums = sum(p), sum(q)
        ratios = [(a / sums[0], b / sums[1]) for a, b in zip(p, q, strict=True)]
        return float(sum(a * mpmath.log(a / b) for a, b in ratios))
