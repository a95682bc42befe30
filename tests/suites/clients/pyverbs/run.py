#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the tests of pyverbs so that a crash or a hang affects only one test, and reports the result of each.

    run.py FOLDER DEVICE LIMIT PART/PARTS [PREFIX...]

FOLDER has the unpacked `tests` of the package. Of all tests, or those whose names begin with a PREFIX, the script runs every
PARTS-th, beginning with number PART (from 0). The tests run in a child process, one after another. A test that crashes or takes
longer than LIMIT seconds ends the child and is reported; another child continues with the next test. Prints a line of JSON for
each test: {"test", "result": pass|skip|fail|crash|hang, "reason", "seconds"}.
"""

import faulthandler
import gc
import json
import os
import random
import select
import signal
import sys
import time
import unittest

# Exit code if a test exceeded its time limit.
LATE = 75


def flat(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flat(item)
        else:
            yield item


class Result(unittest.TestResult):
    """The result of one test. The first failure is kept."""

    def __init__(self):
        super().__init__()
        self.result, self.reason = "pass", ""

    def note(self, result, reason):
        if self.result in ("pass", "skip"):
            self.result, self.reason = result, " ".join(reason.split())[:400]

    def addSkip(self, test, reason):
        self.note("skip", reason)

    def addError(self, test, error):
        self.note("fail", f"{error[0].__name__}: {error[1]}")

    addFailure = addError

    def addSubTest(self, test, subtest, error):
        if error is not None:
            self.addError(test, error)

    def addUnexpectedSuccess(self, test):
        self.note("fail", "unexpected success")


def run_some(tests, pipe):
    """Runs tests in the child, and writes a line at the start and at the end of each."""
    faulthandler.enable()
    # A test that is skipped after its setup keeps objects, which the garbage collector would destroy during a later test, in an
    # order in which pyverbs crashes.
    gc.disable()
    for number, test in tests:
        os.write(pipe, f"{json.dumps({'start': number})}\n".encode())
        # Many tests use random numbers. The seed makes them independent of the tests that ran before.
        random.seed(test.id())
        result, begin = Result(), time.monotonic()
        test.run(result)
        line_fields = {"test": test.id().removeprefix("tests."), "result": result.result, "reason": result.reason}
        line_fields["seconds"] = round(time.monotonic() - begin, 2)
        os.write(pipe, f"{json.dumps(line_fields)}\n".encode())


def follow(child, pipe, limit):
    """Prints the lines of a child. Returns the number of the test that the child did not end, its result, and the reason."""
    running, rest, begin = None, b"", time.monotonic()
    while True:
        left = begin + limit - time.monotonic()
        if not select.select([pipe], [], [], max(left, 0))[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return running, "hang", f"not finished after {limit} s"
        data = os.read(pipe, 65536)
        if not data:
            _, status = os.waitpid(child, 0)
            signalled = os.WIFSIGNALED(status)
            reason = signal.Signals(os.WTERMSIG(status)).name if signalled else f"exit {os.WEXITSTATUS(status)}"
            return running, "crash", reason
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            line_fields = json.loads(line)
            if "start" in line_fields:
                running = line_fields["start"]
            else:
                running = None
                print(line.decode(), flush=True)
            begin = time.monotonic()


def main():
    folder, device, limit, share, *prefixes = sys.argv[1:]
    part, parts = map(int, share.split("/"))
    sys.path[:0] = [folder, os.path.join(folder, "tests")]
    os.chdir(folder)
    # The argument parser of the package reads the device from sys.argv.
    sys.argv[1:] = ["--dev", device]
    from args_parser import parser

    parser.parse_args()
    names = sorted(name[:-3] for name in os.listdir("tests") if name.startswith("test_") and name.endswith(".py"))
    tests = list(enumerate(flat(unittest.defaultTestLoader.loadTestsFromNames(f"tests.{name}" for name in names))))
    if prefixes:
        names = tuple(f"tests.{prefix}" for prefix in prefixes)
        tests = [(number, test) for number, test in tests if test.id().startswith(names)]
    tests = tests[part::parts]
    hung = False
    while tests:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(out)
            # Output of the tests must not mix with the lines of JSON.
            os.dup2(2, 1)
            run_some(tests, into)
            os._exit(0)
        os.close(into)
        unfinished, result, reason = follow(child, out, float(limit))
        os.close(out)
        if unfinished is None:
            break
        index = next(i for i, (number, _) in enumerate(tests) if number == unfinished)
        line_fields = {"test": tests[index][1].id().removeprefix("tests."), "result": result, "reason": reason, "seconds": 0}
        print(json.dumps(line_fields), flush=True)
        hung = hung or result == "hang"
        tests = tests[index + 1 :]
    # No test is expected to hang, so the caller may repeat the run.
    sys.exit(LATE if hung else 0)


if __name__ == "__main__":
    main()
