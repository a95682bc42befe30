#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Creates an nvmet subsystem with an RDMA port and a namespace without a drive. The caller sets device_path, p2pmem and enable
# of the namespace. Port N of nvmet (default 1) listens at the service 4419 + N.
#
#   nvmet-target.sh SUBSYSTEM ADDRESS [N]
set -euo pipefail
subsystem=$1 address=$2 port=${3:-1}

modprobe -a nvmet nvmet-rdma
cd /sys/kernel/config/nvmet
mkdir "subsystems/$subsystem"
echo 1 >"subsystems/$subsystem/attr_allow_any_host"
mkdir "subsystems/$subsystem/namespaces/1"
mkdir "ports/$port"
echo rdma >"ports/$port/addr_trtype"
echo ipv4 >"ports/$port/addr_adrfam"
echo "$address" >"ports/$port/addr_traddr"
echo $((4419 + port)) >"ports/$port/addr_trsvcid"
# No in-capsule data, which would be in host memory.
echo 0 >"ports/$port/param_inline_data_size"
ln -s "/sys/kernel/config/nvmet/subsystems/$subsystem" "ports/$port/subsystems/$subsystem"
