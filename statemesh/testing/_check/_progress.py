"""What a check is at, on a terminal."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show what takes a while, until it is over: on a terminal, and nowhere else.

    In CI, in a notebook and where pytest captures it, the stream of errors is no terminal.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty() or "CI" in os.environ:
        yield
        return
    # A line that wraps could not be erased.
    width = shutil.get_terminal_size().columns - 1
    stream.write(f"\r{text[:width]}\x1b[K")
    stream.flush()
    try:
        yield
    finally:
        stream.write("\r\x1b[K")
        stream.flush()
