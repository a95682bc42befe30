# shellcheck shell=bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Functions for scripts of node a: they attach the drives that node b exports by recorder-nvmeof.sh, and mount them in the folders
# $DRIVES. `attach` also lets the drives be detached when the script ends, because guests cannot power off while a drive of
# another one is mounted.

DRIVES=/run/nvmeof/drive0,/run/nvmeof/drive1
UUID=70327032-6d65-6d00-0000-000000000001

# Connects to the subsystem number $1, unless it is connected. If node b is gone, requests fail after 2 s, instead of after the time in
# which the kernel tries to connect again.
connect() {
    local address=P2PMEM_RDMA_ADDR_B_NIC$1
    grep -qsx "drive$1" /sys/class/nvme/nvme*/subsysnqn ||
        nvme connect -t rdma -a "${!address}" -s $((4420 + $1)) -n "drive$1" --nr-io-queues 1 --fast_io_fail_tmo 2 \
            --hostnqn "nqn.2014-08.org.nvmexpress:uuid:$UUID" --hostid "$UUID" >/dev/null
}

# Prints the device node of the drive of subsystem number $1, when it appears. The harness limits the time of this loop.
drive() {
    local folder
    while true; do
        for folder in /sys/block/nvme*n*; do
            # With multipathing in the kernel, a path to the drive is hidden: it has no device node.
            if [ "$(cat "$folder/device/subsysnqn" 2>/dev/null)" = "drive$1" ] && [ -b "/dev/${folder##*/}" ]; then
                echo "/dev/${folder##*/}"
                return
            fi
        done
    done
}

# Connects to both subsystems, and mounts their drives.
attach() {
    local number
    trap detach EXIT
    for number in 0 1; do
        connect $number
        mkdir -p /run/nvmeof/drive$number
        mount -t ext4 "$(drive $number)" /run/nvmeof/drive$number
    done
}

# Unmounts the drives.
unmount() {
    local number
    for number in 0 1; do
        ! mountpoint -q /run/nvmeof/drive$number || umount /run/nvmeof/drive$number
    done
}

# Ends the program that uses the drives, whose process is $writer, unmounts them, and disconnects. The script ends with its own code.
detach() {
    if [ -n "${writer:-}" ]; then
        kill -9 "$writer" 2>/dev/null || true
        wait "$writer" || true
    fi
    unmount || true
    nvme disconnect -n drive0 >/dev/null || true
    nvme disconnect -n drive1 >/dev/null || true
}
