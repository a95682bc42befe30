/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The interface for other drivers in the kernel: a driver registers memory of a device that it is bound to, and p2pmem
 * makes a provider of the memory. All functions are for process context and may sleep.
 */
#ifndef _LINUX_P2PMEM_H
#define _LINUX_P2PMEM_H

#include <linux/types.h>
#include <uapi/linux/p2pmem.h>

struct pci_dev;
struct p2pmem_registration;

/* &struct p2pmem_publication.flags */
#define P2PMEM_PUBLISH_PAGELESS	(1U << 0)	/* no struct pages: O_DIRECT on mappings fails; no kernel pool */
#define P2PMEM_PUBLISH_PINNED	(1U << 1)	/* importers that cannot be revoked may attach; unregistering waits for them */

/**
 * struct p2pmem_publication - the part of a BAR that a driver registers
 * @bar: the BAR, 0 to 5, or -1 for the largest prefetchable 64-bit BAR
 * @flags: P2PMEM_PUBLISH_* bits
 * @offset: first byte in the BAR, in whole pages; with struct pages the physical address must be a multiple of 2 MiB
 * @size: size in bytes, in whole pages, or in multiples of 2 MiB with struct pages; 0 means the rest of the BAR
 * @kernel_reserve: bytes that stay in the kernel's pool (pci_alloc_p2pmem()), in whole pages, less than @size; must
 *	be 0 with %P2PMEM_PUBLISH_PAGELESS
 * @revoked: called once for each registration, when nobody can reach the memory through p2pmem any more; may be NULL.
 *	Called in process context, by any task. It may sleep, but must not call p2pmem_register_provider() or
 *	p2pmem_unregister_provider()
 * @context: argument of @revoked
 *
 * p2pmem copies the structure. From the registration on, p2pmem gives the memory to programs, which write to it and
 * let devices write to it. The driver must not use the memory for anything else until it is revoked.
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
 * @what: the part of the BAR
 *
 * The function must stay bound during the call, as in probe(). A function is one provider at most. With struct pages,
 * the range keeps its pages until the driver is unbound (pci_p2pdma_add_resource()): after an unregistration, the
 * same range can be registered again, and another range of the function cannot.
 *
 * The registration ends with p2pmem_unregister_provider(). p2pmem revokes the memory earlier if the driver is about
 * to be unbound, before its remove(), or if the system is about to sleep, before its suspend(). Then it calls
 * @what->revoked, and the driver must still unregister. Until the system is awake again (PM_POST_SUSPEND),
 * registering fails with -EBUSY. The calling module keeps p2pmem loaded, since it uses its symbols.
 *
 * Context: process context, may sleep. The device may be locked.
 *
 * Return: the registration, or an ERR_PTR: -EINVAL (no such range, not whole pages, or unknown flags), -EEXIST (the
 * function is a provider already), -EBUSY (another range of the function has struct pages, its pool is in use, or the
 * system is about to sleep), -ENODEV (p2pmem is being loaded or unloaded), -EOPNOTSUPP (the function cannot do
 * peer-to-peer DMA), -ENOMEM. The kernel log gives the reason.
 */
struct p2pmem_registration *p2pmem_register_provider(struct pci_dev *pdev, const struct p2pmem_publication *what);

/**
 * p2pmem_unregister_provider - revoke registered memory and end the registration
 * @registration: a registration from p2pmem_register_provider() that was not unregistered yet, or NULL
 *
 * Must be called before the driver is unbound, in remove() at the latest. All buffers in the range are revoked: when
 * this returns, no program and no device can reach the memory, and the callback has been called and has returned,
 * whatever started the revocation.
 *
 * Waits for DMA in progress and for importers that do not end their mappings at once. Holders that take longer than a
 * second are named in the kernel log (Documentation/design/lifecycle.md).
 *
 * Context: process context, may sleep without a time limit. Must not be called from the callback.
 */
void p2pmem_unregister_provider(struct p2pmem_registration *registration);

/**
 * p2pmem_registration_id - get the id of the provider
 * @registration: a registration that was not unregistered yet
 *
 * Context: any context.
 *
 * Return: &struct p2pmem_provider.id, as user space knows the provider.
 */
u32 p2pmem_registration_id(const struct p2pmem_registration *registration);

#endif /* _LINUX_P2PMEM_H */
