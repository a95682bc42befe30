#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a program as systemd runs a service of type notify, and fails if the program does not say that it is ready.

    as-service.py COMMAND...        the exit code is that of the command, or 1 if its first message is not READY=1
"""

import os
import socket
import subprocess
import sys
import tempfile
import time

from runner import late, scaled

with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, tempfile.TemporaryDirectory(dir="/run") as folder:
    path = f"{folder}/notify"
    manager.bind(path)
    # The program may run as another user.
    os.chmod(folder, 0o755)
    os.chmod(path, 0o666)
    manager.settimeout(1)
    program = subprocess.Popen(sys.argv[1:], env=os.environ | {"NOTIFY_SOCKET": path})
    end = time.monotonic() + scaled(60)
    message = None
    while message is None:
        try:
            message = manager.recv(4096)
        except TimeoutError:
            if program.poll() is not None:
                sys.exit(f"as-service: the program ended with {program.returncode} before it was ready")
            if time.monotonic() > end:
                program.kill()
                late("the program is not ready")
    if message.splitlines() != [b"READY=1"]:
        program.kill()
        sys.exit(f"as-service: the first message is {message}")
    sys.exit(program.wait())
