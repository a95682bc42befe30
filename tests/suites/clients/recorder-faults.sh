# SPDX-License-Identifier: MIT OR Apache-2.0
# Functions for the clients of recorder-faults.toml, which run on a storage node b and an accelerator node a.
# shellcheck shell=bash
set -euo pipefail
export LC_ALL=C
token=/run/recorder.token
# The NIC of the accelerator node.
nic=$P2PMEM_RDMA_NIC0
acknowledged=0

request() { "$P2PMEM_CLIENTS/request" "$1" >/dev/null; }

# Makes operations of a drive fail: drive_errors DRIVE JSON-LIST
drive_errors() { request "{\"op\":\"drive-errors\",\"name\":\"$1\",\"operations\":$2}"; }

# Starts the storage node on drives: serve DRIVE,DRIVE ARGUMENT... The variable server is its process.
serve() {
    local drives=/run/recorder/${1//,/,\/run\/recorder\/}
    "$P2PMEM_BIN/p2pmem-recorder" serve --drive "$drives" --nic "$P2PMEM_RDMA_NIC0,$P2PMEM_RDMA_NIC1" --token-file $token \
        --buffers 4 "${@:2}" 2>/run/recorder.log &
    server=$!
}

# Waits for the end of the storage node. Its log has to say that a drive failed: ends_with_failed DRIVE
ends_with_failed() {
    wait $server
    cat /run/recorder.log >&2
    grep -q "the drive nvme.* at /run/recorder/$1 failed: " /run/recorder.log
}

list() { "$P2PMEM_BIN/p2pmem-recorder" list "$P2PMEM_ADDR_B" --token-file $token; }

# Waits until the latest recording of a channel has a number of blocks, and has a writer or not: await_blocks yes|no CHANNEL NUMBER
await_blocks() {
    local last blocks writing
    for _ in {1..600}; do
        last=$(list 2>/dev/null | grep "^$2 " | tail -n 1) || true
        read -r _ _ _ _ blocks writing <<<"$last" || true
        if [ "${writing:-}" = "$1" ] && ((blocks >= $3)); then return; fi
        sleep 0.1
    done
    echo "channel $2 has no $3 blocks: $last" >&2
    return 75
}

# Waits until the storage node answers.
await_node() {
    for _ in {1..600}; do
        if list >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    echo 'the storage node does not answer' >&2
    return 75
}

# Records or plays a channel: recorder record|play CHANNEL ARGUMENT...
recorder() {
    "$P2PMEM_BIN/p2pmem-recorder" "$1" "$P2PMEM_ADDR_B" --token-file $token --channel "$2" --block-size 64K --nic "$nic" --buffers 4 \
        "${@:3}"
}

# Runs a command that has to fail, and keeps how many blocks it says were acknowledged.
fails() {
    local output
    if output=$("$@" 2>&1); then
        echo "it did not fail: $output"
        exit 1
    fi
    echo "$output"
    acknowledged=$(sed -nE 's/.* ([0-9]+) blocks are acknowledged.*/\1/p' <<<"$output")
}

# Plays a channel as soon as the storage node serves it again.
plays_again() {
    local output
    for _ in {1..600}; do
        if output=$(recorder play "$1" 2>&1); then
            echo "$output"
            return
        fi
        sleep 0.1
    done
    echo "the recording is not played: $output" >&2
    return 75
}

# Plays a channel, which has at least the blocks that were acknowledged.
plays_acknowledged() {
    local output played
    output=$(recorder play "$1")
    echo "$output"
    played=$(sed -nE 's/.*: ([0-9]+) blocks of .* played .* missing$/\1/p' <<<"$output")
    ((acknowledged > 0 && played >= acknowledged)) && echo 'all acknowledged blocks were played'
}
