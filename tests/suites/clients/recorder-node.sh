#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Prepares this node for the recorder: publishes accel0, and writes the token. The storage node b also gets file systems on its
# drives, LUNs that are striped over them, and streams.
set -euo pipefail
export LC_ALL=C
"$P2PMEM_CLIENTS/publish-accel.sh"
[ ! -e /run/recorder.token ] || exit 0
if [ "$P2PMEM_NODE" = b ]; then
    recorder=$P2PMEM_BIN/p2pmem-recorder
    for drive in NVME0 NVME1; do
        device=P2PMEM_BLOCK_$drive folder=/run/recorder/${drive,,}
        mkfs.ext4 -q -L "p2pmem-${drive,,}" "${!device}"
        mkdir -p "$folder"
        mount -t ext4 "${!device}" "$folder"
    done
    "$recorder" lun create fast --drive /run/recorder/nvme0,/run/recorder/nvme1 --segment-size 16M --segments 24
    "$recorder" stream create fast/radar --drive /run/recorder/nvme0,/run/recorder/nvme1 --block-size 1M --channels 4
    "$recorder" stream create fast/small --drive /run/recorder/nvme0,/run/recorder/nvme1 --block-size 64K --channels 2
    # 14 blocks on each drive.
    "$recorder" lun create tiny --drive /run/recorder/nvme0,/run/recorder/nvme1 --segment-size 1M --segments 1
    "$recorder" stream create tiny/short --drive /run/recorder/nvme0,/run/recorder/nvme1 --block-size 64K
fi
(umask 077 && echo "a token of the test bed" >/run/recorder.token)
