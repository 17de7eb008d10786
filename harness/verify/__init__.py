"""`fidelity verify`: everything that a receipt states, computed again from positions.parquet and the seals.

On a CPU and without weights, so that a stranger can check a published result. Floats may differ in the last digits
between machines; everything else must be equal. What cannot be checked here is said, never passed over.
"""

from harness.verify.outcome import Finding, Outcome, as_json
from harness.verify.run import verify_run

__all__ = ["Finding", "Outcome", "as_json", "verify_run"]
