"""What a rank prints when an exception ends it: each failure of a job once, without hvdlite's own frames.

The rank where a failure began prints its traceback. Ranks that end because of it print one line each, under a launcher that
reports the failure itself. An error that all ranks raise alike (a mismatch, a stall, ranks that cannot meet) is printed by
the first rank of each host. Without a launcher's job directory every rank prints its own traceback.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from hvdlite.core.errors import DeadlockError, HvdliteError, MismatchError, PeerLeftError, PeerLostError, StallError
from hvdlite.diagnostics.stall_report import is_script

_PACKAGES: Final = frozenset({"hvdlite", "hvdlite_torch", "hvdlite_tf", "hvdlite_runner"})

_SHORT: Final = 120
"""Characters of a mismatch that all ranks repeat in their lines about it."""


def text_of(error: BaseException, *, full: bool = False) -> str:
    """Return an exception's traceback as text.

    Args:
        full: with the frames of hvdlite, and with its internal causes. Without them otherwise, unless the exception is one
            that hvdlite did not mean to raise: its innermost frame, apart from those of the standard library, is hvdlite's,
            and it is no `HvdliteError`.
    """
    text = traceback.TracebackException.from_exception(error)
    if not full:
        _shorten(text, error, set())
    return "".join(text.format())


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from."""
    passed: set[int] = set()
    while error is not None and id(error) not in passed:
        yield error
        passed.add(id(error))
        error = error.__cause__ or error.__context__


def print_failure(error: BaseException, directory: str | None, rank: int, *, full: bool = False) -> bool:
    """Print what this rank can add about the exception that ends it, to standard error.

    Args:
        directory: of the job, if there is a launcher.
        full: with hvdlite's frames, and nothing left to other ranks.

    Returns:
        Whether nobody else need print it: it was printed to the standard error of this process, or of the first rank of
        this host that raised it.
    """
    is_whole = full or directory is None or not _is_told_elsewhere(error, directory, rank)
    if is_whole:
        text = text_of(error, full=full)
    else:
        name, first_line = type(error).__name__, str(error).partition("\n")[0]
        text = f"rank {rank} ended{_place(error)}"
        if _is_consequence(error):
            text += f": {name}: {first_line}\n"
        else:
            values = first_line.partition(". ")[0]  # without what to do
            is_short = isinstance(error, MismatchError) and len(values) <= _SHORT
            text += f", with the same {name} as another rank{f': {values}' if is_short else ''}\n"
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
        return (_is_kept_to_be_printed() or sys.stderr.fileno() == 2) and (is_whole or not _is_consequence(error))
    except (OSError, ValueError, AttributeError):  # closed, replaced by the script, or None
        return False


def _is_kept_to_be_printed() -> bool:
    """Return whether torch's hook is about to print what it finds in this buffer, with the rank before each line.

    `init_process_group` installs it around the hook that it finds.
    """
    return (isinstance(sys.stderr, io.StringIO)
            and getattr(sys.excepthook, "__module__", "") == "torch.distributed.distributed_c10d")


def _is_told_elsewhere(error: BaseException, directory: str, rank: int) -> bool:
    """Return whether another process prints this failure: where it began, or the first rank of this host to raise it."""
    if not isinstance(error, HvdliteError):
        return False
    if isinstance(error, PeerLostError) and _is_consequence(error):
        return error.rank not in (-1, rank)
    digest = zlib.crc32(str(error).partition("\n")[0].encode(errors="replace"))
    try:
        os.close(os.open(Path(directory) / f"printed.{digest:08x}", os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def _is_consequence(error: BaseException) -> bool:
    """Return whether it follows from a failure of one rank; other errors of hvdlite are raised by several ranks alike."""
    return isinstance(error, PeerLostError) and not isinstance(error, StallError | DeadlockError | PeerLeftError)


def _place(error: BaseException) -> str:
    """Return where the script was: its innermost frame that is no package's, or, without one, that is not hvdlite's."""
    frames = [frame for frame, package in _frames(error.__traceback__) if package not in _PACKAGES]
    if not frames:
        return ""
    frame = next((each for each in reversed(frames) if is_script(each.filename)), frames[-1])
    return f" in {frame.name} ({frame.filename}:{frame.lineno})"


def _shorten(trace: traceback.TracebackException, error: BaseException, passed: set[int]) -> None:
    """Remove hvdlite's frames from an exception's text, and from those that it was raised from."""
    passed.add(id(error))
    packages = list(_packages(error.__traceback__))
    ours = _ours(packages)
    outside = [is_ours for is_ours, package in zip(ours, packages, strict=True) if package not in sys.stdlib_module_names]
    is_meant = isinstance(error, HvdliteError) or not (outside and outside[-1])
    if is_meant and len(ours) == len(trace.stack) and not all(ours):
        trace.stack[:] = [frame for frame, is_ours in zip(trace.stack, ours, strict=True) if not is_ours]
    for text, origin in ((trace.__cause__, error.__cause__), (trace.__context__, error.__context__)):
        if text is not None and origin is not None and id(origin) not in passed:
            _shorten(text, origin, passed)
    if isinstance(error, HvdliteError) and _is_internal(error.__cause__ or error.__context__, error):
        trace.__cause__, trace.__context__, trace.__suppress_context__ = None, _scripts_own(trace, error), False


def _scripts_own(trace: traceback.TracebackException, error: BaseException) -> traceback.TracebackException | None:
    """Return the text of the first exception behind this one that is not internal; None without one."""
    for text, origin in ((trace.__cause__, error.__cause__), (trace.__context__, error.__context__)):
        if text is not None and origin is not None:
            found = _scripts_own(text, origin) if _is_internal(origin, error) else text
            if found is not None:
                return found
    return None


def _ours(packages: Sequence[str]) -> list[bool]:
    """Return for each frame, given its package, whether it is hvdlite's, or the standard library's between two such."""
    ours = [package in _PACKAGES for package in packages]
    last = None  # frame that is not the standard library's
    for place, package in enumerate(packages):
        if package in sys.stdlib_module_names:
            continue
        if last is not None and ours[last] and ours[place]:
            ours[last:place] = [True] * (place - last)
        last = place
    return ours


def _is_internal(cause: BaseException | None, error: BaseException) -> bool:
    """Return whether hvdlite has raised and caught it itself: then it is in the text of the error that follows."""
    packages = [] if cause is None else list(_packages(cause.__traceback__))
    if packages and packages[0] in _PACKAGES and error.__cause__ is None and error.__suppress_context__:
        return True  # hidden by `from None`
    return (isinstance(cause, HvdliteError | OSError | EOFError) and bool(packages)
            and _PACKAGES.union(sys.stdlib_module_names).issuperset(packages))


def _frames(where: TracebackType | None) -> Iterator[tuple[traceback.FrameSummary, str]]:
    """Yield the frames of a traceback, outermost first, and the package of each."""
    for (frame, line), package in zip(traceback.walk_tb(where), _packages(where), strict=True):
        summary = traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
        yield summary, package


def _packages(where: TracebackType | None) -> Iterator[str]:
    """Yield the package of each frame of a traceback, outermost first."""
    for frame, _ in traceback.walk_tb(where):
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
