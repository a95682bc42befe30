#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks the metrics of p2pmem-exporter in a guest, by the OpenMetrics parser of prometheus_client.

    metrics.py FOLDER PROVIDER      FOLDER has p2pmemctl and p2pmem-exporter; PROVIDER is published and has no buffer

Unloads the module at the end.
"""

import signal
import subprocess
import sys
import urllib.error
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from exporter import Ctl, key
from late import LIMIT

FOLDER, PROVIDER = sys.argv[1:]
SIZE = 3 << 20
ctl = Ctl(FOLDER)
# Samples whose labels describe something; their value is 1.
DESCRIPTIONS = {"p2pmem_module", "p2pmem_provider"}


def scrape(url):
    """Returns all samples as `Ctl.samples()` does."""
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8", answer.headers
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, f"{family.name} has no help text"
        for sample in family.samples:
            if sample.name in DESCRIPTIONS:
                assert sample.value == 1, sample
                continue
            name = key(sample.name, sample.labels)
            assert name not in samples, f"the sample {name} occurs twice"
            samples[name] = sample.value
    return samples


def check_samples(samples):
    """Fails unless the metrics have the values that p2pmemctl reports. Returns the counters of the module."""
    expected = ctl.samples()
    assert samples == expected, {name: (samples.get(name), expected.get(name)) for name in samples.keys() ^ expected.keys()} or {
        name: (value, expected[name]) for name, value in samples.items() if value != expected[name]
    }
    return ctl.totals()


exporter = subprocess.Popen([f"{FOLDER}/p2pmem-exporter", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
url = exporter.stdout.readline().split()[-1]
assert url.startswith("http://127.0.0.1:"), url

before = check_samples(scrape(url))
holder = ctl.hold(SIZE, PROVIDER)
for _ in range(3):
    ctl("alloc", "1T", code=1)
samples = scrape(url)
now = check_samples(samples)
assert samples["p2pmem_provider_buffers", PROVIDER] == 1, samples
assert now["allocs"] == before["allocs"] + 1 and now["alloc_bytes"] == before["alloc_bytes"] + SIZE, (before, now)
providers = samples["p2pmem_providers", None]
assert now["failed"] == before["failed"] + 3 * providers, (before, now)

# An unknown path, and a method that is not allowed.
for path, code in (("/other", 404), ("/metrics", 405)):
    try:
        urllib.request.urlopen(url.replace("/metrics", path), data=b"x" if code == 405 else None, timeout=LIMIT)
        raise AssertionError(f"the request for {path} succeeded")
    except urllib.error.HTTPError as error:
        assert error.code == code, error

# After the removal of the provider, only the counters of the module include its events.
ctl("unpublish", "--device", PROVIDER)
samples = scrape(url)
now = check_samples(samples)
assert now["revoked"] == before["revoked"] + 1, now
assert not any(function == PROVIDER for _, function in samples), samples
# The holder of the buffer is notified and ends.
holder.wait(LIMIT)

# Without the module, the exporter continues and reports p2pmem_up 0.
subprocess.run(["rmmod", "p2pmem"], check=True)
assert scrape(url) == {("p2pmem_up", None): 0}
exporter.send_signal(signal.SIGTERM)
assert exporter.wait(LIMIT) == 0
