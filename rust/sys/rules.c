// SPDX-License-Identifier: GPL-2.0
/* The C side of rust/sys for rules: who is asking. */

#include <linux/cred.h>
#include <linux/uidgid.h>
#include <linux/user_namespace.h>

#include "helpers.h"

/* The caller's credentials, with a reference. */
const struct cred *p2pmem_cred_get(void)
{
	return get_current_cred();
}

/* Rules speak of users and groups by the numbers that the initial user namespace has for them. */
u32 p2pmem_cred_uid(const struct cred *cred)
{
	return from_kuid(&init_user_ns, cred->euid);
}

bool p2pmem_cred_member(const struct cred *cred, u32 gid)
{
	const struct group_info *groups = cred->group_info;
	kgid_t kgid = make_kgid(&init_user_ns, gid);
	int left = 0, right = groups->ngroups;

	if (!gid_valid(kgid))
		return false;
	if (gid_eq(cred->egid, kgid))
		return true;
	/* They are sorted. */
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
