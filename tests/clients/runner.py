# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a script in a guest can ask the runner of the virtual machine for."""

import json
import pathlib
import socket
import sys


def ask(request):
    """The runner's answer. Ends the program, with the reason, where the runner refuses."""
    with socket.socket(socket.AF_UNIX) as runner:
        runner.connect("/run/p2pmem/host.sock")
        runner.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(runner.makefile().readline())
    if "Ok" not in answer:
        sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: {request}: {answer}")
    return answer["Ok"]
