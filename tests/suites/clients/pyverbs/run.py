#!/usr/bin/python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs pyverbs' own tests, each to an end of its own, and tells what came of every one.

    run.py FOLDER DEVICE LIMIT PART/PARTS [PREFIX...]

FOLDER holds the package's `tests`, unpacked. Of all tests, or those whose names begin with a PREFIX, every PARTS-th is
run, beginning with number PART (from 0). They run in a child process, one after another; one that crashes or takes longer
than LIMIT seconds ends that child, is told of as such, and another child goes on with the next one. A line of JSON for
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

# With what this ends where a test took too long.
LATE = 75


def flat(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flat(item)
        else:
            yield item


class Result(unittest.TestResult):
    """The outcome of one test, in the harness's words. The first bad word stays."""

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
    """In the child: runs tests and writes a line at the start and at the end of each."""
    faulthandler.enable()
    # What a test that was skipped half-way leaves behind, the collector takes apart in an order that pyverbs does not
    # survive, during whichever test comes next.
    gc.disable()
    for number, test in tests:
        os.write(pipe, f"{json.dumps({'start': number})}\n".encode())
        # Many draw lots: the same ones each time, whichever tests ran before.
        random.seed(test.id())
        result, begin = Result(), time.monotonic()
        test.run(result)
        told = {"test": test.id().removeprefix("tests."), "result": result.result, "reason": result.reason}
        told["seconds"] = round(time.monotonic() - begin, 2)
        os.write(pipe, f"{json.dumps(told)}\n".encode())


def follow(child, pipe, limit):
    """Passes a child's lines on. Returns the number of the test it did not end, and what became of that one."""
    running, rest, begin = None, b"", time.monotonic()
    while True:
        left = begin + limit - time.monotonic()
        if not select.select([pipe], [], [], max(left, 0))[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return running, "hang", f"no end after {limit} s"
        data = os.read(pipe, 65536)
        if not data:
            _, status = os.waitpid(child, 0)
            signalled = os.WIFSIGNALED(status)
            how = signal.Signals(os.WTERMSIG(status)).name if signalled else f"exit {os.WEXITSTATUS(status)}"
            return running, "crash", how
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "start" in told:
                running = told["start"]
            else:
                running = None
                print(line.decode(), flush=True)
            begin = time.monotonic()


def main():
    folder, device, limit, share, *prefixes = sys.argv[1:]
    part, parts = map(int, share.split("/"))
    sys.path[:0] = [folder, os.path.join(folder, "tests")]
    os.chdir(folder)
    # The package's argument parser takes the device from there.
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
            # What the tests print belongs to nobody's protocol.
            os.dup2(2, 1)
            run_some(tests, into)
            os._exit(0)
        os.close(into)
        unended, result, reason = follow(child, out, float(limit))
        os.close(out)
        if unended is None:
            break
        index = next(i for i, (number, _) in enumerate(tests) if number == unended)
        told = {"test": tests[index][1].id().removeprefix("tests."), "result": result, "reason": reason, "seconds": 0}
        print(json.dumps(told), flush=True)
        hung = hung or result == "hang"
        tests = tests[index + 1 :]
    # None is expected to: time is all that was missing, and whoever asked may ask again.
    sys.exit(LATE if hung else 0)


if __name__ == "__main__":
    main()
