// SPDX-License-Identifier: GPL-2.0
/*
 * The C side of rust/sys for rules: credentials of the current task, and charges to its dmem cgroup. No function takes a
 * lock of p2pmem.
 */

#include <linux/cgroup_dmem.h>
#include <linux/cred.h>
#include <linux/pci.h>
#include <linux/uidgid.h>
#include <linux/user_namespace.h>

#include "compat.h"
#include "helpers.h"

/* Returns the credentials of the current task, with a reference. Does not sleep. */
const struct cred *p2pmem_cred_get(void)
{
	return get_current_cred();
}

/* Returns the effective user id in the initial user namespace, as rules name users. Any context. */
u32 p2pmem_cred_uid(const struct cred *cred)
{
	return from_kuid(&init_user_ns, cred->euid);
}

/* Returns whether @gid, in the initial user namespace, is the effective or a supplementary group. Any context. */
bool p2pmem_cred_member(const struct cred *cred, u32 gid)
{
	const struct group_info *groups = cred->group_info;
	kgid_t kgid = make_kgid(&init_user_ns, gid);
	int left = 0, right = groups->ngroups;

	if (!gid_valid(kgid))
		return false;
	if (gid_eq(cred->egid, kgid))
		return true;
	/* The group list is sorted. */
	while (left < right) {
		int mid = left + (right - left) / 2;

		if (gid_gt(kgid, groups->gid[mid]))
			left = mid + 1;
		else if (gid_lt(kgid, groups->gid[mid]))
			right = mid;
		else
			return true;
	}
	return false;
}

/*
 * The dmem controller, for process context; may sleep. Without the controller in the kernel, a region is NULL, a charge
 * succeeds and sets *pool to NULL, and uncharging NULL does nothing.
 */
void *p2pmem_dmem_region(u64 size, u32 domain, u8 bus, u8 devfn)
{
	return p2pmem_dmem_register(size, "p2pmem/%04x:%02x:%02x.%d", domain, bus, PCI_SLOT(devfn), PCI_FUNC(devfn));
}

void p2pmem_dmem_region_end(void *region)
{
	dmem_cgroup_unregister_region(region);
}

int p2pmem_dmem_charge(void *region, u64 size, void **pool)
{
	struct dmem_cgroup_pool_state *charged = NULL;
	int ret = 0;

	if (region)
		ret = dmem_cgroup_try_charge(region, size, &charged, NULL);
	*pool = charged;
	return ret;
}

void p2pmem_dmem_uncharge(void *pool, u64 size)
{
	if (pool)
		dmem_cgroup_uncharge(pool, size);
}
