# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a script in a guest can ask the runner of the virtual machine for."""

import json
import os
import pathlib
import socket
import sys


# With what a program ends that only lacked time: the test is then run once more.
LATE = 75
# What the runner's reason begins with where it waited in vain.
TOLD_LATE = "not in time: "


def scaled(seconds):
    """A limit of time as it is on this kernel."""
    return seconds * int(os.environ.get("P2PMEM_TIME_FACTOR", "1"))


def late(what):
    """Ends the program, as one that only lacked time."""
    print(f"{pathlib.Path(sys.argv[0]).stem}: not in time: {what}", file=sys.stderr)
    sys.exit(LATE)


def ask(request):
    """The runner's answer. Ends the program, with the reason, where the runner refuses."""
    with socket.socket(socket.AF_UNIX) as runner:
        runner.connect("/run/p2pmem/host.sock")
        runner.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(runner.makefile().readline())
    if str(answer.get("Err", "")).startswith(TOLD_LATE):
        late(f"{request}: {answer['Err']}")
    if "Ok" not in answer:
        sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: {request}: {answer}")
    return answer["Ok"]
