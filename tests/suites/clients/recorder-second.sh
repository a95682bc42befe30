# SPDX-License-Identifier: MIT OR Apache-2.0
# For clients of recorder.toml on node a: makes node a a second storage node, with its first drive and its second NIC.
# shellcheck shell=bash
set -euo pipefail
export LC_ALL=C
drive=/run/second
# Options of each session.
# shellcheck disable=SC2034
common=(--token-file /run/recorder.token --block-size 64K --nic "$P2PMEM_RDMA_NIC0" --buffers 4)

recorder() { "$P2PMEM_BIN/p2pmem-recorder" "$@"; }

# Waits until the list of a node's channels has a line: await ADDRESS EXPRESSION
await() {
    for _ in {1..600}; do
        recorder list "$1" --token-file /run/recorder.token 2>/dev/null | grep -E "^$2 *\$" && return
        sleep 0.1
    done
    echo "node $1 has no line $2" >&2
    return 75
}

# Waits until the second drive has read 64 blocks more.
await_reads() {
    local before sectors
    before=$(awk '{print $3}' "/sys/block/${P2PMEM_BLOCK_NVME0##*/}/stat")
    for _ in {1..600}; do
        sectors=$(awk '{print $3}' "/sys/block/${P2PMEM_BLOCK_NVME0##*/}/stat")
        ((sectors < before + 64 * 128)) || return 0
        sleep 0.1
    done
    echo 'the second storage node reads no blocks' >&2
    return 75
}

# Starts the storage node. The variable second is its process.
second_node() {
    # Not the function: the shell's process id would be that of another shell.
    "$P2PMEM_BIN/p2pmem-recorder" serve --drive $drive --nic "$P2PMEM_RDMA_NIC1" --token-file /run/recorder.token --buffers 4 &
    second=$!
    await "$P2PMEM_ADDR_A" 'fast/small/1 .*'
}

# Kills the storage node, and waits for its end.
end_second() {
    kill -9 $second
    wait $second || true
}

umount $drive 2>/dev/null || true
mkfs.ext4 -q -F "$P2PMEM_BLOCK_NVME0"
mkdir -p $drive
mount -t ext4 "$P2PMEM_BLOCK_NVME0" $drive
recorder lun create fast --drive $drive --segment-size 16M --segments 4
recorder stream create fast/small --drive $drive --block-size 64K --channels 2
second_node
