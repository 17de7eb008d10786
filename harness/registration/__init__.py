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
)

__all__ = [
    "Analysis",
    "Bar",
    "BarResult",
    "Endpoint",
    "Exclusion",
    "Provenance",
    "Registration",
    "Task",
    "analysis_deviations",
    "check_bars",
    "excluded_rows",
    "lead_time",
    "load_registration",
    "provenance",
    "register",
    "registration_block",
    "sealed_registration",
    "task_deviations",
]
