#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs `p2pmemctl top` in a guest on a pseudoterminal, and checks its output and its end.

    top.py FOLDER PROVIDER      FOLDER has p2pmemctl; PROVIDER is published
"""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

from late import LIMIT

FOLDER, PROVIDER = sys.argv[1:]


def top(*options, until=(), key=b""):
    """Runs `p2pmemctl top` until its output has all words of `until`, then presses `key`. Fails unless the exit code is 0."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(f"{FOLDER}/p2pmemctl", ["p2pmemctl", "top", *options])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    screen, pressed, deadline = b"", False, time.monotonic() + LIMIT
    while True:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{options}: the output does not have all of {until}: {screen!r}")
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            screen += os.read(terminal, 65536)
        except OSError:
            # The program has ended.
            break
        if key and not pressed and all(word in screen for word in until):
            os.write(terminal, key)
            pressed = True
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f"{options}: exit code {code}: {screen!r}"
    assert all(word in screen for word in until), f"{options}: the output does not have all of {until}: {screen!r}"
    # The program restores the terminal: it shows the cursor and ends the alternate screen.
    assert b"\x1b[?25h" in screen and b"\x1b[?1049l" in screen, screen


holder = subprocess.Popen(
    [f"{FOLDER}/p2pmemctl", "--json", "alloc", "3M", "--device", PROVIDER, "--hold"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
)
holder.stdout.readline()
words = [PROVIDER.encode(), b"HOLDER", b"(p2pmemctl)", str(holder.pid).encode(), b"REFUSED/s"]
top("--interval", "0.1", "--count", "3", until=words)
top("--interval", "0.1", until=words, key=b"q")
top(until=words, key=b"\x03")
holder.communicate(b"\n", LIMIT)
assert holder.returncode == 0, holder

# Without a terminal, the error message names `stats --json`.
done = subprocess.run([f"{FOLDER}/p2pmemctl", "top"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=LIMIT, check=False)
assert done.returncode == 1 and "stats --json" in done.stderr, done
