#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# Prints the number of buffers of p2pmem on this node.
set -euo pipefail
"$P2PMEM_BIN/p2pmemctl" list --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["info"]["buffers"])'
