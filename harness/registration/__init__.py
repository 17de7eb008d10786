"""Registration: what will be asked of a panel, sealed before anything is measured."""

from harness.registration.deviations import (
    Analysis,
    BarResult,
    analysis_deviations,
    check_bars,
    excluded_rows,
    task_deviations,
)
from harness.registration.model import Bar, Endpoint, Exclusion, Registration, Task, load_registration
from harness.registration.seal import (
    Provenance,
    lead_time,
    provenance,
    register,
    registration_block,
    sealed_registration,
    write_registration,
)
from harness.registration.standing import UNREGISTERED, Model, Standing, Status, is_before, missing_candidates, standing

__all__ = [
    "UNREGISTERED",
    "Analysis",
    "Bar",
    "BarResult",
    "Endpoint",
    "Exclusion",
    "Model",
    "Provenance",
    "Registration",
    "Standing",
    "Status",
    "Task",
    "analysis_deviations",
    "check_bars",
    "excluded_rows",
    "is_before",
    "lead_time",
    "load_registration",
    "missing_candidates",
    "provenance",
    "register",
    "registration_block",
    "sealed_registration",
    "standing",
    "task_deviations",
    "write_registration",
]
