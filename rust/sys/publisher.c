// SPDX-License-Identifier: GPL-2.0
/* The exported functions of include/linux/p2pmem.h. rust/ext/publisher.rs implements them. */

#include <linux/export.h>
#include <linux/p2pmem.h>

#include "helpers.h"

struct p2pmem_registration *p2pmem_register_provider(struct pci_dev *pdev, const struct p2pmem_publication *what)
{
	return p2pmem_rust_register(pdev, what);
}
EXPORT_SYMBOL_GPL(p2pmem_register_provider);

void p2pmem_unregister_provider(struct p2pmem_registration *registration)
{
	p2pmem_rust_unregister(registration);
}
EXPORT_SYMBOL_GPL(p2pmem_unregister_provider);

u32 p2pmem_registration_id(const struct p2pmem_registration *registration)
{
	return p2pmem_rust_registration_id(registration);
}
EXPORT_SYMBOL_GPL(p2pmem_registration_id);
