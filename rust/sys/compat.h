/* SPDX-License-Identifier: GPL-2.0 */
/* Differences between the kernel series that p2pmem supports. No other C file depends on the kernel's version. */
#ifndef P2PMEM_SYS_COMPAT_H
#define P2PMEM_SYS_COMPAT_H

#include <linux/cgroup_dmem.h>
#include <linux/version.h>

/* dmem_cgroup_register_region() without a reclaim callback. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 3, 0)
#define p2pmem_dmem_register(bytes, ...) \
	dmem_cgroup_register_region(&(const struct dmem_cgroup_init){ .size = (bytes) }, __VA_ARGS__)
#else
#define p2pmem_dmem_register(bytes, ...) dmem_cgroup_register_region(bytes, __VA_ARGS__)
#endif

#endif /* P2PMEM_SYS_COMPAT_H */
