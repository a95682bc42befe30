# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sets the exit code of a program that fails by a timeout to LATE. The test is then repeated once."""

import os
import subprocess
import sys
import urllib.error

LATE = 75
# Time limit of each operation in seconds, scaled by the factor for this kernel.
LIMIT = 60 * int(os.environ.get("P2PMEM_TIME_FACTOR", "1"))


def is_timeout(error):
    """Whether an exception is a timeout."""
    if isinstance(error, urllib.error.URLError):
        error = error.reason
    return isinstance(error, (TimeoutError, subprocess.TimeoutExpired))


def exit_hook(kind, error, trace):
    """Prints the exception, and ends the program with LATE for a timeout, otherwise with 1."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LATE if is_timeout(error) else 1)


sys.excepthook = exit_hook
