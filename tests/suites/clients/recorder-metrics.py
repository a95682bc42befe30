#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks the metrics of a storage node while this node records, after the recording program was killed, and after a playback.

    recorder-metrics.py URL PROGRAM ARGUMENT...     URL are the metrics; PROGRAM is p2pmem-recorder, and the arguments are
                                                    those of its commands `record` and `play`: the host, channel, ...

Uses the OpenMetrics parser of prometheus_client, and `promtool check metrics`.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from runner import late, scaled

URL, PROGRAM, *ARGUMENTS = sys.argv[1:]
LIMIT = scaled(60)
CHANNEL = {"lun": "fast", "stream": "small", "channel": "0"}
BLOCK = 64 << 10
PREFIX = "p2pmem_recorder_"


def fetch():
    """Returns the text of a scrape."""
    with urllib.request.urlopen(URL, timeout=LIMIT) as answer:
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8", answer.headers
        return answer.read().decode()


class Scrape:
    """The samples of a scrape."""

    def __init__(self):
        self.samples = {}
        for family in text_string_to_metric_families(fetch()):
            assert family.documentation, f"{family.name} has no help text"
            for sample in family.samples:
                assert sample.name.startswith(PREFIX), sample
                key = sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())
                assert key not in self.samples, f"the sample {key} occurs twice"
                self.samples[key] = sample.value

    def __call__(self, name, **labels):
        """Returns the value of a sample; None if there is none."""
        return self.samples.get((name, frozenset(labels.items())))

    def blocks(self, name):
        """Returns a counter of the first NIC in blocks, which is that of the channel as well, and agrees with that in bytes."""
        count = self(f"nic_{name}_blocks_total", nic="mlx5_0")
        assert count * BLOCK == self(f"nic_{name}_bytes_total", nic="mlx5_0"), self.samples
        assert self(f"channel_{name}_blocks_total", **CHANNEL) == count, self.samples
        return count

    def sessions(self, name="sessions", direction="record"):
        """Returns a number of sessions of the first NIC."""
        return self(name, nic="mlx5_0", direction=direction)


def wait(what, condition):
    """Scrapes until the condition is true, and returns the scrape."""
    deadline = time.monotonic() + LIMIT
    while not condition(scrape := Scrape()):
        if time.monotonic() >= deadline:
            late(f"{what}: {scrape.samples}")
        time.sleep(0.1)
    return scrape


def check_names():
    """Checks names, types, and help texts. promtool reads the older text format, where the name of a counter has its suffix."""
    text = re.sub(r"(?m)^# UNIT .*\n|^# EOF\n", "", fetch())
    for name in re.findall(r"(?m)^# TYPE (\S+) counter$", text):
        text = re.sub(rf"(?m)^# (HELP|TYPE) {name} ", rf"# \1 {name}_total ", text)
    subprocess.run(["promtool", "check", "metrics"], input=text.encode(), check=True, timeout=LIMIT)


# Before the first session, the counters of NICs are 0, and a channel has none.
first = Scrape()
for counter in ("received", "acknowledged", "dropped", "played"):
    assert first(f"nic_{counter}_blocks_total", nic="mlx5_0") == 0, first.samples
    assert first(f"nic_{counter}_bytes_total", nic="mlx5_1") == 0, first.samples
assert first("channel_received_blocks_total", **CHANNEL) is None, first.samples
assert first("lun_size_bytes", lun="fast") == 2 * 24 * (16 << 20), first.samples
assert first("drive_errors_total", drive="/run/recorder/nvme1") == 0, first.samples

writer = subprocess.Popen([PROGRAM, "record", *ARGUMENTS, "--rate", "2M", "-n", "1000000"])
try:
    early = wait("no block is acknowledged", lambda now: now.sessions() == 1 and now.blocks("acknowledged") > 0)
    received = early.blocks("received")
    now = wait("no further block arrives", lambda now: now.blocks("received") > received)
    assert writer.poll() is None, "the recording program ended"
    session = CHANNEL | {"direction": "record", "nic": "mlx5_0"}
    assert now("session_buffers", **session) == 4, now.samples
    assert sum(now("session_limit", **session, limit=limit) for limit in ("peer", "drive", "rate")) == 1, now.samples
    assert now("lun_free_bytes", lun="fast") < first("lun_free_bytes", lun="fast"), now.samples
    assert now.sessions("sessions_failed_total") == 0, now.samples
    check_names()
finally:
    writer.kill()
    writer.wait()

# The session ends with an error, and the counters continue: each block that arrived is acknowledged or dropped.
ended = wait("the session does not end", lambda now: now.sessions() == 0)
assert ended.sessions("sessions_failed_total") == 1 and ended.sessions("sessions_started_total") == 1, ended.samples
assert ended.blocks("received") >= now.blocks("received"), ended.samples
assert ended.blocks("acknowledged") + ended.blocks("dropped") == ended.blocks("received"), ended.samples
assert ended("session_buffers", **session) is None, ended.samples

played = json.loads(subprocess.run([PROGRAM, "--json", "play", *ARGUMENTS], stdout=subprocess.PIPE, check=True).stdout)["sessions"][0]
after = wait("the playback does not end", lambda now: now.sessions(direction="play") == 0 and now.blocks("played") > 0)
assert after.blocks("played") == played["blocks"] == ended.blocks("acknowledged"), (played, after.samples)
assert after.blocks("received") == ended.blocks("received"), after.samples
assert after.sessions("sessions_failed_total", "play") == 0, after.samples
print(f"metrics: {int(ended.blocks('received'))} blocks received, {played['blocks']} blocks played")
