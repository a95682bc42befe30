# SPDX-License-Identifier: MIT OR Apache-2.0
"""The exporter's metrics as p2pmemctl reports the same numbers."""

import json
import subprocess

from late import LIMIT

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
SCHEMA = 1


class Ctl:
    """p2pmemctl in a folder."""

    def __init__(self, folder):
        self.program = f"{folder}/p2pmemctl"

    def __call__(self, *words, code=0):
        """Runs p2pmemctl and returns its output. Fails if the exit code is not `code`."""
        done = subprocess.run([self.program, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=LIMIT, check=False)
        assert done.returncode == code, f"p2pmemctl {words}: {done}"
        return done.stdout

    def json(self, *words):
        """Runs p2pmemctl and returns its JSON."""
        value = json.loads(self(*words, "--json"))
        assert value["schema"] == SCHEMA, value
        return value

    def hold(self, size, device):
        """Returns a process that holds a buffer, which exists already."""
        holder = subprocess.Popen(
            [self.program, "--json", "alloc", str(size), "--device", device, "--hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        # p2pmemctl prints a line once the buffer exists.
        holder.stdout.readline()
        return holder

    def samples(self):
        """Returns what the metrics have to be: values by name, and by provider address, name of a rule, or None."""
        stats = self.json("stats")["stats"]
        providers = self.json("list")["providers"]
        functions = {provider["id"]: provider["addr"] for provider in providers}
        samples = {("p2pmem_up", None): 1, ("p2pmem_providers", None): len(providers)}
        for row in stats:
            function = functions.get(row["provider"])
            prefix = "p2pmem_provider_" if function else "p2pmem_"
            assert set(row) == {"provider", "addr", *COUNTERS}, row
            assert row["addr"] == function, row
            samples |= {(prefix + name, function): row[counter] for counter, name in COUNTERS.items()}
        for provider in providers:
            function = provider["addr"]
            samples |= {(f"p2pmem_provider_{name}", function): provider[number] for number, name in NUMBERS.items()}
            samples["p2pmem_provider_revoking", function] = int(provider["state"] == "revoking")
        rules = [rule for rule in self.json("rules", "list")["rules"] if rule["enabled"]]
        samples["p2pmem_rules", None] = len(rules)
        for rule in rules:
            used = rule["usage"]
            users = [usage["bytes"] for usage in used if usage["of"] == "user"]
            group = sum(usage["bytes"] for usage in used if usage["of"] == "group")
            for limit, name, value in (("quota", "largest_user", max(users, default=0)), ("group_quota", "group", group)):
                if rule[limit] is not None:
                    samples[f"p2pmem_rule_{limit}_bytes", rule["name"]] = rule[limit]
                    samples[f"p2pmem_rule_{name}_bytes", rule["name"]] = value
        return samples

    def totals(self):
        """Returns the counters of the module."""
        return next(row for row in self.json("stats")["stats"] if row["provider"] is None)


def key(name, labels):
    """Returns the key of a sample in `Ctl.samples()`."""
    return name, labels.get("function", labels.get("rule"))
