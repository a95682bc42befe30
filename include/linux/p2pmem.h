/* SPDX-License-Identifier: GPL-2.0 */
/* What p2pmem offers to other drivers in the kernel: publishing memory of a device that is bound to them. */
#ifndef _LINUX_P2PMEM_H
#define _LINUX_P2PMEM_H

#include <linux/types.h>
#include <uapi/linux/p2pmem.h>

struct pci_dev;
struct p2pmem_registration;

/* &struct p2pmem_publication.flags */
#define P2PMEM_PUBLISH_PAGELESS	(1U << 0)	/* no struct pages: O_DIRECT on mappings fails, there is no kernel's pool */
#define P2PMEM_PUBLISH_PINNED	(1U << 1)	/* importers that cannot be revoked may attach: unregistering waits for them */

/**
 * struct p2pmem_publication - the part of a BAR that a driver publishes
 * @bar: the BAR, 0 to 5, or -1 for the largest prefetchable 64-bit one
 * @flags: P2PMEM_PUBLISH_* bits
 * @offset: first byte in the BAR, whole pages; with struct pages it has to be at a multiple of 2 MiB in physical memory
 * @size: bytes, whole pages, with struct pages whole 2 MiB; 0 is the rest of the BAR
 * @kernel_reserve: bytes of it that stay in the kernel's own pool (pci_alloc_p2pmem()), whole pages, fewer than @size;
 *	0 with %P2PMEM_PUBLISH_PAGELESS
 * @revoked: called once for each registration, when nobody can reach the memory through p2pmem any more; may be NULL.
 *	It may sleep, but neither register nor unregister
 * @context: what it is called with
 *
 * The structure is copied. From registration on p2pmem hands the range out to programs, which write to it and have
 * devices write to it: the driver must not use it for anything else until it is revoked.
 */
struct p2pmem_publication {
	int bar;
	u32 flags;
	u64 offset;
	u64 size;
	u64 kernel_reserve;
	void (*revoked)(void *context);
	void *context;
};

/**
 * p2pmem_register_provider - make a part of a BAR a provider
 * @pdev: a function that the calling driver is bound to, enabled for memory access
 * @what: the part
 *
 * The function has to stay bound during the call, as it does in probe(). It is one provider at most. With struct pages
 * the range keeps them until the driver is unbound (pci_p2pdma_add_resource()): it can be registered again after it was
 * unregistered, another range of the function cannot.
 *
 * The registration ends by p2pmem_unregister_provider(), or when the driver is about to be unbound, before its
 * remove(), or the machine about to sleep, before its suspend(): then @what->revoked is called, and what is left to the
 * driver is to unregister. Until the machine is awake again (PM_POST_SUSPEND) registering fails with -EBUSY. Its module
 * keeps p2pmem loaded as long as it uses these functions.
 *
 * Return: the registration, or an ERR_PTR: -EINVAL (no such range, or no whole pages), -EEXIST (the function is a
 * provider already), -EBUSY (another range of it has struct pages, its pool is in use, or the machine is about to
 * sleep), -ENODEV (p2pmem is being loaded or unloaded), -EOPNOTSUPP (the function cannot do peer-to-peer DMA), -ENOMEM.
 * The log says why.
 */
struct p2pmem_registration *p2pmem_register_provider(struct pci_dev *pdev, const struct p2pmem_publication *what);

/**
 * p2pmem_unregister_provider - take the memory back
 * @registration: what p2pmem_register_provider() returned and was not unregistered yet, or NULL
 *
 * To be called before the driver is unbound, in remove() at the latest. All buffers in the range are revoked: no program
 * and no device can reach the memory when this returns. It waits for DMA that is under way and for importers that do
 * not let go at once, and names those in the log who take longer than a second (Documentation/design/lifecycle.md).
 * The callback was called, and has returned, when this returns, whoever began to take the memory back. So it must not be
 * called from the callback.
 */
void p2pmem_unregister_provider(struct p2pmem_registration *registration);

/**
 * p2pmem_registration_id - the number of the provider, as user space has it
 * @registration: a registration
 */
u32 p2pmem_registration_id(const struct p2pmem_registration *registration);

#endif /* _LINUX_P2PMEM_H */
