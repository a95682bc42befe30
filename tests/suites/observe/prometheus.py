#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs Prometheus in a guest: it scrapes p2pmem-exporter and evaluates the alert rules.

    prometheus.py FOLDER PROVIDER ALERTS      FOLDER has p2pmemctl and p2pmem-exporter; PROVIDER is published and has no buffer;
                                              ALERTS is the file of alert rules

Compares the series that Prometheus has stored with what p2pmemctl reports, and checks that alerts become pending.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

from exporter import Ctl, key
from late import LIMIT

FOLDER, PROVIDER, ALERTS = sys.argv[1:]
SIZE = 3 << 20
NOBODY = 65534
ctl = Ctl(FOLDER)

CONFIG = """
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: [{alerts}]
scrape_configs:
  - job_name: p2pmem
    static_configs: [{{targets: ["{target}"]}}]
"""


def free_port():
    """Returns a TCP port that no program uses."""
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, folder, target):
        self.url = f"http://127.0.0.1:{free_port()}"
        with open(f"{folder}/prometheus.yml", "w", encoding="ascii") as config:
            config.write(CONFIG.format(alerts=ALERTS, target=target))
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                "--log.level=warn",
            ],
            stdout=sys.stderr,
        )

    def get(self, path):
        """Returns the data of an answer of the HTTP API; None while Prometheus does not serve yet."""
        assert self.process.poll() is None, f"Prometheus ended: {self.process.returncode}"
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=LIMIT) as answer:
                value = json.load(answer)
        except urllib.error.HTTPError as error:
            # 503: it reads its storage.
            assert error.code == 503, error
            return None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):
                return None
            raise
        assert value["status"] == "success", value
        return value["data"]

    def query(self, expression):
        """Returns the samples of an expression: labels and value."""
        data = self.get("query?" + urllib.parse.urlencode({"query": expression})) or {"result": []}
        return [(sample["metric"], float(sample["value"][1])) for sample in data["result"]]

    def samples(self):
        """Returns the latest samples of the exporter as `Ctl.samples()` does."""
        names = '{__name__=~"p2pmem_.+", __name__!~"p2pmem_module|p2pmem_provider"}'
        return {key(labels["__name__"], labels): value for labels, value in self.query(names)}

    def alerts(self):
        """Returns the states of the alert rules by name, and fails if a rule is wrong; {} before the first evaluation."""
        data = self.get("rules")
        rules = [rule for group in data["groups"] for rule in group["rules"]] if data else []
        if any(rule["health"] == "unknown" for rule in rules):
            return {}
        assert all(rule["health"] == "ok" for rule in rules), rules
        return {rule["name"]: rule["state"] for rule in rules}


def wait(what, condition):
    """Waits until the condition returns something true, and returns it."""
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(what())
        time.sleep(0.1)
    return value


def compare(prometheus):
    """Waits until Prometheus has stored what p2pmemctl reports."""
    differences = {}

    def is_equal():
        # Samples of a scrape after this moment. Freed memory is cleared in between, which changes a counter: then again.
        now = time.time()
        wait(lambda: "no further scrape", lambda: prometheus.query(f"timestamp(p2pmem_up) > {now:f}"))
        stored, expected = prometheus.samples(), ctl.samples()
        names = stored.keys() | expected.keys()
        differences.clear()
        differences.update({name: (stored.get(name), expected.get(name)) for name in names if stored.get(name) != expected.get(name)})
        return not differences

    wait(lambda: f"stored and expected: {differences}", is_equal)


def pending(prometheus, *names):
    """Waits until alerts are pending. Other alerts must not be."""

    def states():
        return {name for name, state in prometheus.alerts().items() if state != "inactive"}

    wait(lambda: f"{names} are not pending, but {states()}", lambda: states() == set(names))


def main(folder):
    # The exporter runs as its service does: without privileges, in the group that may read the rules.
    os.chmod("/dev/p2pmem", 0o666)
    exporter = subprocess.Popen(
        [f"{FOLDER}/p2pmem-exporter", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, user=NOBODY, group=NOBODY, extra_groups=[0]
    )
    target = exporter.stdout.readline().split("/")[2]
    ctl("rules", "add", "10-quota", "--quota", str(SIZE))
    prometheus = Prometheus(folder, target)
    began = time.monotonic()
    try:
        wait(lambda: "Prometheus does not reach the exporter", lambda: prometheus.query('up{job="p2pmem"} == 1'))
        print(f"first scrape after {time.monotonic() - began:.1f} s")
        compare(prometheus)
        version = prometheus.query("p2pmem_module")
        assert version[0][0]["version"] == ctl.json("list")["info"]["version"], version
        pending(prometheus)

        # A buffer that uses the whole quota, and requests that are refused.
        holder = ctl.hold(SIZE, PROVIDER)
        for _ in range(3):
            ctl("alloc", "1M", code=1)
        compare(prometheus)
        pending(prometheus, "P2pmemAllocationsRefused", "P2pmemQuotaNear")

        ctl("unpublish", PROVIDER)
        holder.wait(LIMIT)
        compare(prometheus)
        pending(prometheus, "P2pmemAllocationsRefused", "P2pmemProviderGone")

        # A rule keeps the module loaded.
        ctl("rules", "remove", "10-quota")
        subprocess.run(["rmmod", "p2pmem"], check=True)
        wait(lambda: prometheus.samples(), lambda: prometheus.samples() == {("p2pmem_up", None): 0})
        pending(prometheus, "P2pmemAllocationsRefused", "P2pmemModuleUnavailable")
        print(f"done after {time.monotonic() - began:.1f} s")
    finally:
        prometheus.process.terminate()
        exporter.terminate()
    assert prometheus.process.wait(LIMIT) == 0 and exporter.wait(LIMIT) == 0


# The root file system is read-only.
FOLDER_OF_DATA = tempfile.mkdtemp(dir="/run")
try:
    main(FOLDER_OF_DATA)
finally:
    shutil.rmtree(FOLDER_OF_DATA)
