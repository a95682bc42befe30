// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-vfio-user
