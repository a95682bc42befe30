#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Creates an nvmet subsystem with an RDMA port and a namespace without a drive. The caller sets device_path, p2pmem and enable
# of the namespace.
#
#   nvmet-target.sh SUBSYSTEM ADDRESS
set -euo pipefail
subsystem=$1 address=$2

modprobe -a nvmet nvmet-rdma
cd /sys/kernel/config/nvmet
mkdir "subsystems/$subsystem"
echo 1 >"subsystems/$subsystem/attr_allow_any_host"
mkdir "subsystems/$subsystem/namespaces/1"
mkdir ports/1
echo rdma >ports/1/addr_trtype
echo ipv4 >ports/1/addr_adrfam
echo "$address" >ports/1/addr_traddr
echo 4420 >ports/1/addr_trsvcid
# No in-capsule data, which would be in host memory.
echo 0 >ports/1/param_inline_data_size
ln -s "/sys/kernel/config/nvmet/subsystems/$subsystem" "ports/1/subsystems/$subsystem"
