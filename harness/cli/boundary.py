"""Whatever happens in a command ends in one line that says what, where and what to do, and in an exit code.

Errors of ours say it themselves. What a file system, a terminal or a library raises is said here, once. An exception
that nobody foresaw is our fault: its kind is named, and its trace goes to a file.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import typer

from harness.errors import HarnessError

INTERRUPTED = 130
REFUSED = 3

#: What an error of the system means for a file, and what to do about it.
_SYSTEM: dict[int, tuple[str, str]] = {
    errno.ENOENT: ("is not there", "check the name"),
    errno.EACCES: ("may not be read or written by this user", "change its permissions, or name another place"),
    errno.EPERM: ("may not be changed by this user", "change its permissions, or name another place"),
    errno.EROFS: ("lies on a disk that cannot be written to", "name a place that can be, with --out"),
    errno.EISDIR: ("is a folder, and a file is needed", "name the file"),
    errno.ENOTDIR: ("is a file, and a folder is needed", "name the folder"),
    errno.EEXIST: ("is there already", "name another place with --out, or remove it"),
    errno.ELOOP: ("is a link that leads to itself", "put the file itself there"),
    errno.ENAMETOOLONG: ("has a name that is too long", "give it a shorter one"),
    errno.EMFILE: ("cannot be opened: too many files are open", "raise the limit: ulimit -n 4096"),
    errno.EIO: ("cannot be read: the disk reports an error", "copy it to another disk and check its digest"),
}


def guarded(run: Callable[[], None]) -> None:
    """Run a command; whatever it raises becomes a line on stderr and an exit code."""
    try:
        run()
    except HarnessError as error:
        _end(str(error), error.exit_code)
    except SystemExit as done:
        if done.code == INTERRUPTED:
            _say("interrupted; what is finished is kept\n  repair: run the same command again to go on")
        raise
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted; what is finished is kept\n  repair: run the same command again to go on", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is left to flush has no reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _end("memory ran out\n  repair: use --memory-budget, fewer --rows, or a machine with more", REFUSED)
    except OSError as error:
        _end(of_system(error), REFUSED)
    except Exception as error:
        _end(_ours(error), REFUSED)


def of_system(error: OSError) -> str:
    """An error of the operating system in one line with its repair."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full\n  repair: free some space and run the same command again"
    what, repair = _SYSTEM.get(error.errno or 0, (f"cannot be used: {error.strerror or _first_line(error)}", "see it"))
    return f"{_place(error)} {what}\n  repair: {repair}"


def _place(error: OSError) -> str:
    """The file that an error is about, with its folder's name."""
    if not isinstance(error.filename, (str, bytes, os.PathLike)):
        return "a file"
    path = Path(os.fsdecode(error.filename))
    return f"{path.parent.name}/{path.name}" if path.parent.name else path.name


def _ours(error: Exception) -> str:
    """That an unforeseen error is our fault, its kind, and where its trace is."""
    where = "no file: none could be written"
    try:
        descriptor, where = tempfile.mkstemp(prefix="fidelity-trace-", suffix=".txt")
        with os.fdopen(descriptor, "w", errors="replace") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        pass
    kind = type(error).__name__
    return (
        f"a fault of ours, not of yours: {kind}: {_first_line(error)}\n"
        f"  repair: please report it with the trace, which is in {where}"
    )


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _end(message: str, code: int) -> None:
    _say(message)
    sys.exit(code)


def _say(message: str) -> None:
    print(f"fidelity: {printable(message)}", file=sys.stderr)
    if os.environ.get("FIDELITY_DEBUG"):
        raise


def printable(text: str) -> str:
    """Text without control sequences and marks that turn writing round, which names from files may hold."""
    return "".join(
        character if character == "\n" or character.isprintable() else f"\\x{ord(character):02x}" for character in text
    )
