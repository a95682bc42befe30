# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests of scripts in a guest to the runner of the virtual machine."""

import json
import os
import pathlib
import socket
import sys


# Exit code of a program that exceeded a time limit. The test is then repeated once.
LATE = 75
# Prefix of the runner's error message if the runner exceeded a time limit.
LATE_PREFIX = "not in time: "


def scaled(seconds):
    """Scales a time limit by the factor for this kernel, P2PMEM_TIME_FACTOR."""
    return seconds * int(os.environ.get("P2PMEM_TIME_FACTOR", "1"))


def late(what):
    """Ends the program with exit code LATE and a message."""
    print(f"{pathlib.Path(sys.argv[0]).stem}: not in time: {what}", file=sys.stderr)
    sys.exit(LATE)


def request_runner(request):
    """Sends a request to the runner, and returns the result. Ends the program with a message if the request fails."""
    with socket.socket(socket.AF_UNIX) as runner:
        runner.connect("/run/p2pmem/host.sock")
        runner.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(runner.makefile().readline())
    if str(answer.get("Err", "")).startswith(LATE_PREFIX):
        late(f"{request}: {answer['Err']}")
    if "Ok" not in answer:
        sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: {request}: {answer}")
    return answer["Ok"]
