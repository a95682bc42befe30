# shellcheck shell=bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Functions for the clients of slurm.toml, which submit jobs on node a.
set -euo pipefail
ctl=$P2PMEM_BIN/p2pmemctl

as() { "$P2PMEM_CLIENTS/slurm-as.sh" "$@"; }

# Waits until a command prints a text: await TEXT COMMAND...
await() {
    local got='' _
    for _ in {1..600}; do
        got=$("${@:2}" 2>&1) || true
        if [ "$got" = "$1" ]; then return; fi
        sleep 0.1
    done
    echo "$* does not print $1: $got" >&2
    tail -n 5 /run/slurm/*.log >&2
    return 75
}

# Waits until both nodes can run jobs, and have no rule of a job.
await_idle() {
    await 'idle' as root sinfo -h -o %T
    await '' rules
}

buffers() { "$ctl" list --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["info"]["buffers"])'; }

# The rules of jobs on this node.
rules() { "$ctl" rules list -n -o NAME | grep slurm || true; }

# The state of a job, and the reason of a job that waits.
state() { as root squeue -h -j "$1" -o '%T %r'; }

# Submits a job of a user with a GRES on node a, and prints its id: submit USER GRES COMMAND
submit() { as "$1" sbatch --parsable -w a "--gres=p2pmem:$2" -o /dev/null --wrap "$3"; }
