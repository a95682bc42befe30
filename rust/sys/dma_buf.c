// SPDX-License-Identifier: GPL-2.0
/*
 * The C side of the dma-buf exporter (rust/ext/dma_buf.rs) and importer (rust/ext/dma_attachment.rs): DMA mappings of BAR
 * memory in several pieces, and properties of DMA mappings. Process context; mapping and unmapping require the dma-buf's
 * reservation lock.
 */

#include <linux/device.h>
#include <linux/dma-buf.h>
#include <linux/dma-buf-mapping.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/err.h>
#include <linux/iommu-dma.h>
#include <linux/iommu.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "helpers.h"

MODULE_IMPORT_NS("DMA_BUF");

/*
 * A DMA mapping: the table for the importer, and one table of the kernel for each piece.
 *
 * The kernel could map all pieces with one call, but behind an IOMMU it gives every piece the first bytes of the I/O
 * address range, so only a single piece is mapped correctly (7.2). @keep belongs to the caller and keeps the memory while
 * it is mapped.
 */
struct p2pmem_sgt {
	struct sg_table sgt;
	void *keep;
	unsigned int nents;
	unsigned int count;
	struct sg_table *parts[];
};

static void free_parts(struct dma_buf_attachment *attach, struct p2pmem_sgt *map, enum dma_data_direction dir)
{
	while (map->count) {
		struct sg_table *part = map->parts[--map->count];

		/*
		 * The kernel sets orig_nents to 0 to hide the entries' pages from importers, and later frees as many
		 * entries as orig_nents says, which leaks them (7.2). Restore the number.
		 */
		part->orig_nents = part->nents;
		dma_buf_free_sgt(attach, part, dir);
	}
}

/*
 * Maps @count pieces of a provider's memory for an importer, with the reservation locked. May sleep. Returns the table,
 * which owns @keep until p2pmem_dma_buf_unmap(), or an error pointer, after which @keep is the caller's.
 */
struct sg_table *p2pmem_dma_buf_map(struct dma_buf_attachment *attach, struct p2pdma_provider *provider,
				    const struct phys_vec *pieces, unsigned int count, enum dma_data_direction dir,
				    void *keep)
{
	struct scatterlist *from, *to;
	struct p2pmem_sgt *map;
	struct sg_table *part;
	unsigned int i, j;
	int ret;

	map = kzalloc(struct_size(map, parts, count), GFP_KERNEL_ACCOUNT);
	if (!map)
		return ERR_PTR(-ENOMEM);
	for (i = 0; i < count; i++) {
		struct phys_vec piece = pieces[i];

		part = dma_buf_phys_vec_to_sgt(attach, provider, &piece, 1, piece.len, dir);
		if (IS_ERR(part)) {
			ret = PTR_ERR(part);
			goto undo;
		}
		map->parts[map->count++] = part;
		map->nents += part->nents;
	}
	ret = sg_alloc_table(&map->sgt, map->nents, GFP_KERNEL_ACCOUNT);
	if (ret)
		goto undo;
	to = map->sgt.sgl;
	for (i = 0; i < count; i++) {
		for_each_sgtable_dma_sg(map->parts[i], from, j) {
			sg_dma_address(to) = sg_dma_address(from);
			sg_dma_len(to) = sg_dma_len(from);
			to = sg_next(to);
		}
	}
	/* orig_nents 0 means for importers that the entries have no pages. */
	map->sgt.orig_nents = 0;
	map->keep = keep;
	return &map->sgt;

undo:
	free_parts(attach, map, dir);
	kfree(map);
	return ERR_PTR(ret);
}

/* Ends a mapping, with the reservation locked. Returns @keep, which belongs to the caller again. */
void *p2pmem_dma_buf_unmap(struct dma_buf_attachment *attach, struct sg_table *sgt, enum dma_data_direction dir)
{
	struct p2pmem_sgt *map = container_of(sgt, struct p2pmem_sgt, sgt);
	void *keep = map->keep;

	free_parts(attach, map, dir);
	map->sgt.orig_nents = map->nents;
	sg_free_table(&map->sgt);
	kfree(map);
	return keep;
}

/*
 * Returns whether the end of a DMA mapping at @address also ends the device's access: an IOMMU translates the address, and
 * invalidates the translation when the mapping ends, not later. Bus addresses of peers are not translated even if the
 * device is behind an IOMMU; the IOMMU's addresses never equal them, because the kernel excludes the windows of host
 * bridges. The device must be bound to its driver.
 */
bool p2pmem_dma_is_translated(struct device *dev, u64 address)
{
#ifdef CONFIG_IOMMU_API
	struct iommu_domain *domain = iommu_get_domain_for_dev(dev);

	return domain && domain->type == IOMMU_DOMAIN_DMA && iommu_iova_to_phys(domain, address);
#else
	return false;
#endif
}

/*
 * Returns whether the device's DMA at @address goes to a bounce buffer, or is not coherent with the caches of the CPU, so
 * that others see it only after a dma_sync_*() call.
 */
bool p2pmem_dma_is_bounced(struct device *dev, u64 address)
{
	/* dma_need_sync() is true for all devices behind an IOMMU if DMA debugging is configured. */
	if (use_dma_iommu(dev))
		return !dev_is_dma_coherent(dev) || (dev_is_pci(dev) && to_pci_dev(dev)->untrusted);
	return dma_need_sync(dev, address);
}

/* Returns the PCI function that is @dev or its nearest ancestor on the PCI bus, or NULL. @dev keeps the function. */
struct pci_dev *p2pmem_dev_pci(struct device *dev)
{
	for (; dev; dev = dev->parent)
		if (dev_is_pci(dev))
			return to_pci_dev(dev);
	return NULL;
}
