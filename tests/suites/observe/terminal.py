#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs p2pmemctl in a guest on a pseudoterminal: `top`, colors, the progress of long operations, and completions in bash.

    terminal.py FOLDER PROVIDER      FOLDER has p2pmemctl; PROVIDER is published, and is unpublished at the end
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

from exporter import Ctl
from late import LIMIT

FOLDER, PROVIDER = sys.argv[1:]
ctl = Ctl(FOLDER)


class Terminal:
    """A program on a pseudoterminal."""

    def __init__(self, *command, **environment):
        self.command, self.screen, self.deadline = command, b"", time.monotonic() + LIMIT
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm", "PATH": f"{FOLDER}:{os.environ['PATH']}", **environment})
            os.execvp(command[0], command)
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))

    def read(self):
        """Reads what the program writes; False after its end."""
        if time.monotonic() >= self.deadline:
            raise TimeoutError(f"{self.command}: {self.screen!r}")
        if not select.select([self.file], [], [], 1)[0]:
            return True
        try:
            self.screen += os.read(self.file, 65536)
        except OSError:
            return False
        return True

    def wait(self, *words):
        """Reads until the screen has all words."""
        while not all(word in self.screen for word in words):
            assert self.read(), f"{self.command}: the output does not have all of {words}: {self.screen!r}"

    def press(self, keys):
        """Types keys."""
        os.write(self.file, keys)

    def end(self):
        """Reads until the program ends, and returns the screen. Fails unless the exit code is 0."""
        while self.read():
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert code == 0, f"{self.command}: exit code {code}: {self.screen!r}"
        return self.screen


def top(*options, until=(), key=b""):
    """Runs `p2pmemctl top` until its output has all words of `until`, then presses `key`."""
    terminal = Terminal("p2pmemctl", "top", *options)
    if key:
        terminal.wait(*until)
        terminal.press(key)
    screen = terminal.end()
    assert all(word in screen for word in until), f"{options}: the output does not have all of {until}: {screen!r}"
    # The program restores the terminal: it shows the cursor and ends the alternate screen.
    assert b"\x1b[?25h" in screen and b"\x1b[?1049l" in screen, screen


holder = ctl.hold("3M", PROVIDER)
words = [PROVIDER.encode(), b"HOLDER", b"(p2pmemctl)", str(holder.pid).encode(), b"REFUSED/s"]
top("--interval", "0.1", "--count", "3", until=words)
top("--interval", "0.1", until=words, key=b"q")
top(until=words, key=b"\x03")
holder.communicate(b"\n", LIMIT)
assert holder.returncode == 0, holder

# Without a terminal, the error message names `stats --json`.
done = subprocess.run([f"{FOLDER}/p2pmemctl", "top"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=LIMIT, check=False)
assert done.returncode == 1 and "stats --json" in done.stderr, done

# Colors are for terminals, and for those who want them.
LIVE = b"\x1b[32mlive\x1b[0m"
assert LIVE in Terminal("p2pmemctl", "list").end()
for plain in (Terminal("p2pmemctl", "list", NO_COLOR="1").end(), Terminal("p2pmemctl", "list", TERM="dumb").end(), ctl("list")):
    assert b"live" in plain and b"\x1b" not in plain, plain

# Long operations show their progress on the terminal, and remove it. Programs do not see it.
TEST = ("selftest", PROVIDER, "--size", "256K")
screen = Terminal("p2pmemctl", *TEST).end()
assert b"allocating and clearing 256 KiB" in screen, screen
assert re.search(rb"testing \[[=> ]{40}\] [0-9.]+ [KM]?i?B/2.50 MiB", screen), screen
assert screen.endswith(b"passed\x1b[0m\r\n"), screen
done = subprocess.run([ctl.program, *TEST], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT, check=True)
assert done.stderr == b"" and b"testing" not in done.stdout, done

# bash completes the address of a provider, whose colons divide words, and runs the command.
shell = Terminal("bash", "--norc", "--noprofile", "-i", PS1="ready> ")
shell.wait(b"ready> ")
shell.press(b'eval "$(p2pmemctl completions bash)" && echo loaded $((6 * 7))\n')
shell.wait(b"loaded 42")
shell.press(b"p2pmemctl list -n -o +kind --device " + PROVIDER[:-1].encode() + b"\t-o driver\n")
shell.wait(f" own  p2pmem".encode())
shell.press(b"exit\n")
screen = shell.end()
assert f"--device {PROVIDER} -o driver".encode() in screen, screen

screen = Terminal("p2pmemctl", "unpublish", PROVIDER).end()
assert f"removing {PROVIDER}".encode() in screen and screen.endswith(f"{PROVIDER} is no longer published\r\n".encode()), screen
