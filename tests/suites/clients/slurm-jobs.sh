# shellcheck shell=bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Functions that submit jobs on node a, for the clients of slurm.toml and for the demo of collective operations.
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

buffers() { "$P2PMEM_CLIENTS/count-buffers.sh"; }

# The rules of jobs on this node.
rules() { "$ctl" rules list -n -o NAME | grep slurm || true; }

# The state of a job, and the reason of a job that waits.
state() { as root squeue -h -j "$1" -o '%T %r'; }

# Submits a job of a user with a GRES on node a, and prints its id: submit USER GRES COMMAND
submit() { as "$1" sbatch --parsable -w a "--gres=p2pmem:$2" -o /dev/null --wrap "$3"; }

# Prints how many buffers are left when no job runs.
end_of_jobs() {
    await_idle
    echo "buffers: $(buffers)"
}

# Runs a job that allocates its bytes, one that allocates more, and one without bytes.
jobs_with_limits() {
    await_idle
    as alice srun -w a --gres=p2pmem:8M "$ctl" alloc 8M
    ! as alice srun -w a --gres=p2pmem:8M "$ctl" alloc 12M 2>&1
    ! as alice srun -w a "$ctl" alloc 1M 2>&1
    end_of_jobs
}

# Kills a job that holds memory.
killed_job() {
    local job
    await_idle
    job=$(submit alice 32M "exec $ctl alloc 32M --hold")
    await 1 buffers
    rules
    as root scancel -s KILL -f "$job"
    await '' state "$job"
    end_of_jobs
}

# Runs two jobs, each with more than half of the bytes of node a: contending_jobs BYTES
contending_jobs() {
    local first second
    await_idle
    first=$(submit alice "$1" "exec $ctl alloc $1 --hold")
    await 1 buffers
    second=$(submit bob "$1" "exec $ctl alloc $1 --hold")
    await 'PENDING Resources' state "$second"
    rules
    as root scancel -f "$first"
    await 'RUNNING None' state "$second"
    await 1 buffers
    await 50-slurm-4002 rules
    echo "the second job waited for the end of the first one"
    as root scancel -f "$second"
    end_of_jobs
}

# Starts a rank on each node, which find each other by the PMIx of Slurm: allreduce_of_job PROGRAM
allreduce_of_job() {
    await_idle
    as root srun --mpi=pmix -N 2 -n 2 --gres=p2pmem:64M "$1" \
        run --nic "$P2PMEM_RDMA_NIC0" --memory accelerator --algorithm ring --size 1M --chunk 64K -n 1 --verify
    end_of_jobs
}
