"""The entry point: nothing heavy is imported here, so that the first instant is covered too.

Ctrl-C while the command is being imported, a machine without a home folder, and terminals that cannot show every
character are dealt with before anything else runs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

#: The shell's code for Ctrl-C.
INTERRUPTED = 130
#: What keeps the bars of other libraries out of our one progress display; they read it while they are imported.
SILENT = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def main() -> None:
    """Run the command."""
    try:
        settle()
        from harness.cli import main as run

        run()
    except KeyboardInterrupt:
        print("fidelity: interrupted before anything began", file=sys.stderr)
        sys.exit(INTERRUPTED)


def settle() -> None:
    """Streams that replace what they cannot show, a home for a user who has none, and one progress display."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    try:
        Path.home()
    except (RuntimeError, KeyError):
        os.environ["HOME"] = tempfile.gettempdir()
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    # Libraries ask for the user's name, which a container may not know.
    os.environ.setdefault("USER", "nobody")


if __name__ == "__main__":
    main()
