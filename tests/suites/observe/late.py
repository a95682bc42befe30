# SPDX-License-Identifier: MIT OR Apache-2.0
"""Has a program that fails because something took too long end with the code that says so: its test is then run once more."""

import os
import subprocess
import sys
import urllib.error

LATE = 75
# Seconds that anything may take on this kernel.
LIMIT = 60 * int(os.environ.get("P2PMEM_TIME_FACTOR", "1"))


def is_late(error):
    """Whether an exception says that time ran out."""
    if isinstance(error, urllib.error.URLError):
        error = error.reason
    return isinstance(error, (TimeoutError, subprocess.TimeoutExpired))


def hook(kind, error, trace):
    """Says what the exception was, and ends the program."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LATE if is_late(error) else 1)


sys.excepthook = hook
