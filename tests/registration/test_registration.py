"""registration.toml: reading, sealing, what git says about it, and what departs from it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from harness.errors import PanelError, UsageError
from harness.panel.seal import Lock, LockCounts, LockRow, LockTokenizer, read_lock
from harness.registration import (
    Analysis,
    Registration,
    analysis_deviations,
    check_bars,
    lead_time,
    load_registration,
    provenance,
    register,
    registration_block,
    sealed_registration,
    task_deviations,
)
from harness.store import write_json

TEXT = """
question = "Is it better?"
rows = 4

[primary]
metric = "kl_mean"
margin = 0.1
margin_kind = "relative"

[[secondary]]
metric = "top1_agreement"
margin = 0.0025

[[bars]]
name = "PPL not above the base"
metric = "ppl_token_candidate"
relation = "<="
reference = "baseline"

[[bars]]
name = "at least 16 samples"
metric = "tasks.samples"
relation = ">="
value = 16

[[tasks]]
name = "mmlu"

[[tasks]]
name = "gpqa"
limit = 20

[[exclusions]]
row = 3
reason = "quotes the calibration text"
"""


@pytest.fixture
def panel(tmp_path: Path) -> Path:
    """A sealed panel of four rows, and a further seal, with a registration that is not sealed yet."""
    folder = tmp_path / "panels" / "four"
    tokenizer = LockTokenizer(name="t", sha256="a" * 64, vocabulary=16, bos_token_id=None, add_bos=False)
    lock = Lock(
        name="four",
        sha256="b" * 64,
        recipe_sha256="c" * 64,
        unit="row",
        length=8,
        bos="never",
        tokenizer=tokenizer,
        counts=LockCounts(rows=4, positions=28, documents=4, read=4, short=0, domains={"prose": 4}),
        largest_overlap=0.0,
        sources=[],
        rows=[LockRow(row=i, document=f"d{i}", domain="prose", source=0, start=0, sha256="d" * 64) for i in range(4)],
    )
    for place in (folder, folder / "seals" / "other"):
        write_json(place / "panel.lock.json", lock.sealed().model_dump())
    (folder / "registration.toml").write_text(TEXT)
    return folder


def registered(panel: Path) -> Registration:
    found = load_registration(panel)
    assert found is not None
    return found


def test_sealing_reaches_every_seal_and_comments_do_not_count(panel: Path) -> None:
    assert sealed_registration(panel) is None and registration_block(panel) is None
    sealed = register(panel)
    assert {read_lock(p).registration_sha256 for p in (panel, panel / "seals" / "other")} == {sealed.sha256}
    (panel / "registration.toml").write_text("# a remark\n" + TEXT)
    assert sealed_registration(panel) == sealed
    block = registration_block(panel)
    assert block is not None and block["sha256"] == sealed.sha256
    assert Registration.model_validate(json.loads(json.dumps(block["content"]))) == sealed


def test_a_change_after_sealing_is_refused_until_it_is_sealed_anew(panel: Path) -> None:
    first = register(panel)
    assert register(panel) == first
    (panel / "registration.toml").write_text(TEXT.replace("margin = 0.1\n", "margin = 0.2\n"))
    with pytest.raises(PanelError, match=f"registered as {first.sha256[:12]}, and registration.toml is now"):
        sealed_registration(panel)
    with pytest.raises(PanelError, match="earlier measurements deviate"):
        register(panel)
    assert register(panel, replace=True).sha256 != first.sha256
    (panel / "registration.toml").unlink()
    with pytest.raises(PanelError, match="is gone"):
        sealed_registration(panel)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("rows = 4", "rows = 4\nrow = 3"), "row: Extra inputs"),
        (('metric = "kl_mean"', 'metric = "kl"'), "primary.metric"),
        (('metric = "top1_agreement"', 'metric = "kl_mean"'), "metric kl_mean is registered twice"),
        (("margin = 0.1", "margin = 0"), "greater than 0"),
        (("value = 16", 'value = 16\nreference = "baseline"'), "either value or reference"),
        (("[primary]", "[primary"), "not TOML"),
        (('relation = ">="', 'relation = "=="'), "relation"),
    ],
)
def test_bad_registrations_are_named_by_key(panel: Path, change: tuple[str, str], complaint: str) -> None:
    (panel / "registration.toml").write_text(TEXT.replace(*change, 1))
    with pytest.raises(UsageError, match=complaint):
        load_registration(panel)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("rows = 4", "rows = 5"), "plans 5 rows, panel four has 4"),
        (("rows = 4", 'unit = "document"'), "has only rows"),
        (("row = 3", "row = 4"), "excludes row 4"),
    ],
)
def test_a_registration_that_the_panel_cannot_answer(panel: Path, change: tuple[str, str], complaint: str) -> None:
    (panel / "registration.toml").write_text(TEXT.replace(*change, 1))
    with pytest.raises(UsageError, match=complaint):
        register(panel)


def test_no_registration_at_all(tmp_path: Path, panel: Path) -> None:
    assert load_registration(tmp_path) is None
    (panel / "registration.toml").unlink()
    with pytest.raises(UsageError, match="has no registration.toml"):
        register(panel)


def test_git_says_when_it_was_registered_and_whether_it_changed_since(panel: Path) -> None:
    assert provenance(panel) is None

    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", *arguments]
        subprocess.run(command, cwd=panel, check=True, capture_output=True)

    git("init")
    assert provenance(panel) is None
    git("add", ".")
    git("commit", "-m", "register", "--date", "2026-01-01T00:00:00Z")
    known = provenance(panel)
    assert known is not None and len(known.commit) == 40 and not known.changed
    (panel / "registration.toml").write_text("# changed\n" + TEXT)
    again = provenance(panel)
    assert again is not None and again.changed and again.commit == known.commit


def test_lead_time() -> None:
    assert lead_time("2026-01-01T00:00:00+00:00", "2026-01-04T05:30:00+01:00") == "3 d 4 h before the run"
    assert lead_time("2026-01-01T00:00:00+00:00", "2026-01-01T00:07:00+00:00") == "7 min before the run"
    assert lead_time("2026-01-02T00:00:00+00:00", "2026-01-01T23:00:00+00:00") == "1 h AFTER the run began"
    assert lead_time("2026-01-02T00:00:00+00:00", "2026-01-02T00:00:01+00:00").startswith("less than a minute")


def test_another_limit_is_a_deviation(panel: Path) -> None:
    """ "Quick MMLU" was the first 20 of each subject of a registered full run."""
    assert task_deviations(registered(panel), {"mmlu": 20, "arc": None}) == [
        "task gpqa is registered and was not run",
        "task arc was run and is not registered",
        "task mmlu: the first 20 items of each task, registered all items",
    ]
    assert task_deviations(registered(panel), {"mmlu": None, "gpqa": 20}) == []


def test_another_analysis_is_a_deviation(panel: Path) -> None:
    plan = registered(panel)
    as_planned = Analysis(
        primary="kl_mean", unit="row", interval="t", confidence=0.95, resamples=10_000, seed=plan.seed
    )
    assert analysis_deviations(plan, as_planned) == []
    other = Analysis(primary="tv_mean", unit="row", interval="t", confidence=0.9, resamples=10_000, seed=1)
    assert analysis_deviations(plan, other) == [
        "primary metric tv_mean, registered is kl_mean",
        "confidence 0.9, registered is 0.95",
        f"seed 1, registered is {plan.seed}",
    ]


def test_bars(panel: Path) -> None:
    met, missing = check_bars(registered(panel), {"ppl_token_candidate": 4.0}, {"ppl_token_candidate": 4.3})
    assert (met.met, met.threshold, met.statement) == (True, 4.3, "ppl_token_candidate <= baseline")
    assert (missing.met, missing.value, missing.statement) == (None, None, "tasks.samples >= 16")
    failed = check_bars(registered(panel), {"tasks.samples": 14.0}, {})
    assert [bar.met for bar in failed] == [None, False]
