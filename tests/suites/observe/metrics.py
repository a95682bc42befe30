#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks the metrics of p2pmem-exporter in a guest, by the OpenMetrics parser of prometheus_client.

    metrics.py FOLDER PROVIDER      FOLDER has p2pmemctl and p2pmem-exporter; PROVIDER is published and has no buffer

Unloads the module at the end.
"""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from late import LIMIT

FOLDER, PROVIDER = sys.argv[1:]
SIZE = 3 << 20


def ctl(*words, code=0):
    """Runs p2pmemctl and returns its output. Fails if the exit code is not `code`."""
    done = subprocess.run([f"{FOLDER}/p2pmemctl", *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False)
    assert done.returncode == code, f"p2pmemctl {words}: {done}"
    return done.stdout


def scrape(url):
    """Returns all samples by name and provider address; the address is None for samples of the module."""
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8", answer.headers
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, f"{family.name} has no help text"
        for sample in family.samples:
            key = (sample.name, sample.labels.get("function"))
            assert key not in samples, f"the sample {key} occurs twice"
            samples[key] = sample.value
    return samples


# Metric names of the counters in `p2pmemctl stats` and of the numbers in `p2pmemctl list`.
COUNTERS = {
    "allocs": "allocs_total",
    "frees": "frees_total",
    "failed": "refused_total",
    "alloc_bytes": "allocated_bytes_total",
    "free_bytes": "freed_bytes_total",
    "maps": "maps_total",
    "scrubbed_bytes": "scrubbed_bytes_total",
    "pinned": "pinned_buffers_total",
    "revoked": "revoked_total",
    "exports": "exports_total",
    "attaches": "attaches_total",
    "attach_failed": "attaches_refused_total",
}
NUMBERS = {
    "size": "size_bytes",
    "free": "free_bytes",
    "largest": "largest_bytes",
    "kernel_reserve": "kernel_reserve_bytes",
    "pinned": "pinned_bytes",
    "scrubbing": "scrubbing_bytes",
    "buffers": "buffers",
    "exports": "dma_bufs",
}


def check_samples(samples):
    """Fails unless the metrics have the values of `stats --json` and `list --json`. Returns the counters of the module."""
    stats = json.loads(ctl("stats", "--json"))["stats"]
    providers = json.loads(ctl("list", "--json"))["providers"]
    functions = {provider["id"]: provider["addr"] for provider in providers}
    for row in stats:
        function = functions.get(row["provider"])
        prefix = "p2pmem_provider_" if function else "p2pmem_"
        assert set(row) == {"provider", "addr", *COUNTERS}, row
        assert row["addr"] == function, row
        for counter, name in COUNTERS.items():
            assert samples[prefix + name, function] == row[counter], (counter, row, samples)
    for provider in providers:
        for number, name in NUMBERS.items():
            assert samples[f"p2pmem_provider_{name}", provider["addr"]] == provider[number], (number, provider, samples)
    assert samples["p2pmem_providers", None] == len(providers)
    return next(row for row in stats if row["provider"] is None)


exporter = subprocess.Popen([f"{FOLDER}/p2pmem-exporter", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
url = exporter.stdout.readline().split()[-1]
assert url.startswith("http://127.0.0.1:"), url

before = check_samples(scrape(url))
holder = subprocess.Popen(
    [f"{FOLDER}/p2pmemctl", "--json", "alloc", str(SIZE), "--device", PROVIDER, "--hold"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
)
# p2pmemctl prints a line once the buffer exists.
holder.stdout.readline()
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
ctl("unpublish", PROVIDER)
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
