// SPDX-License-Identifier: GPL-2.0
/*
 * The C side of the peer-memory client (rust/ext/peer_mem.rs): assertions on the layout of the interface, the module
 * parameter, and DMA mappings without a dma-buf.
 *
 * All functions are for process context. Mapping and unmapping may sleep, and the caller serialises the calls for one
 * mapping.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/build_bug.h>
#include <linux/device.h>
#include <linux/dma-buf.h>
#include <linux/dma-direction.h>
#include <linux/dma-resv.h>
#include <linux/err.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/stddef.h>
#include <linux/string.h>

#include "helpers.h"
#include "peer_mem.h"

/* The layout is the interface: the RDMA core was built with its own header, not with this one. */
#define PEER_LAYOUT(type, member, offset) static_assert(offsetof(struct type, member) == (offset))
static_assert(sizeof(struct peer_memory_client) == 136);
PEER_LAYOUT(peer_memory_client, name, 0);
PEER_LAYOUT(peer_memory_client, version, 64);
PEER_LAYOUT(peer_memory_client, acquire, 80);
PEER_LAYOUT(peer_memory_client, get_pages, 88);
PEER_LAYOUT(peer_memory_client, dma_map, 96);
PEER_LAYOUT(peer_memory_client, dma_unmap, 104);
PEER_LAYOUT(peer_memory_client, put_pages, 112);
PEER_LAYOUT(peer_memory_client, get_page_size, 120);
PEER_LAYOUT(peer_memory_client, release, 128);
static_assert(sizeof(struct peer_memory_client_ex) == 152);
PEER_LAYOUT(peer_memory_client_ex, ex_size, 136);
PEER_LAYOUT(peer_memory_client_ex, flags, 144);

static const char *const forms[] = {
	[P2PMEM_PEER_EX] = "ex",
	[P2PMEM_PEER_LEGACY] = "legacy",
	[P2PMEM_PEER_PERSISTENT] = "persistent",
	[P2PMEM_PEER_OFF] = "off",
};
static unsigned int form = P2PMEM_PEER_EX;

static int form_set(const char *val, const struct kernel_param *kp)
{
	int i = sysfs_match_string(forms, val);

	if (i < 0) {
		pr_err("peer_memory=%s: it is one of ex, legacy, persistent, off\n", val);
		return i;
	}
	form = i;
	return 0;
}

static int form_get(char *buf, const struct kernel_param *kp)
{
	return sysfs_emit(buf, "%s\n", forms[form]);
}

static const struct kernel_param_ops form_ops = {
	.set = form_set,
	.get = form_get,
};
module_param_cb(peer_memory, &form_ops, NULL, 0444);
MODULE_PARM_DESC(peer_memory, "how ibv_reg_mr() of buffers can be ended: ex, legacy, persistent (not at all), off");

unsigned int p2pmem_peer_form(void)
{
	return form;
}

const char *p2pmem_peer_symvers(void)
{
	return P2PMEM_PEER_SYMVERS;
}

bool p2pmem_module_get(void)
{
	return try_module_get(THIS_MODULE);
}

void p2pmem_module_put(void)
{
	module_put(THIS_MODULE);
}

/*
 * A mapping for one adapter. @entries are the entries whose copy the RDMA core gets; they exist until p2pmem_peer_free().
 * @mapped is the DMA mapping behind the entries, or NULL: adapters that access memory with the CPU get pages.
 *
 * The kernel maps memory of other devices only for attachments of dma-bufs (7.2). Of the attachment it reads the device,
 * and checks that the reservation is locked. @attach belongs to a dma-buf that nobody else can see, with a reservation of
 * its own.
 */
struct p2pmem_peer_map {
	struct sg_table entries;
	struct sg_table *mapped;
	struct dma_buf_attachment attach;
	struct dma_buf dma_buf;
	struct dma_resv resv;
};

/* The largest length of an entry in whole pages: lengths have 32 bits. */
#define MOST ALIGN_DOWN(UINT_MAX, PAGE_SIZE)

static int map_dma(struct p2pmem_peer_map *map, struct p2pdma_provider *provider, const struct phys_vec *pieces,
		   unsigned int count)
{
	struct scatterlist *from, *to;
	struct sg_table *mapped;
	unsigned int i;
	int ret;

	/* Without an acquire context, locking cannot fail. */
	dma_resv_lock(&map->resv, NULL);
	/* The owner of @map keeps the memory. */
	mapped = p2pmem_dma_buf_map(&map->attach, provider, pieces, count, DMA_BIDIRECTIONAL, NULL);
	dma_resv_unlock(&map->resv);
	if (IS_ERR(mapped))
		return PTR_ERR(mapped);
	map->mapped = mapped;
	ret = sg_alloc_table(&map->entries, mapped->nents, GFP_KERNEL_ACCOUNT);
	if (ret) {
		p2pmem_peer_unmap(map);
		return ret;
	}
	to = map->entries.sgl;
	for_each_sgtable_dma_sg(mapped, from, i) {
		sg_set_page(to, NULL, sg_dma_len(from), 0);
		sg_dma_address(to) = sg_dma_address(from);
		sg_dma_len(to) = sg_dma_len(from);
		to = sg_next(to);
	}
	return 0;
}

/* Creates entries for an adapter without a DMA device: as ib_dma_map_sg() does, their addresses are kernel addresses. */
static int map_pages(struct p2pmem_peer_map *map, const struct phys_vec *pieces, unsigned int count)
{
	struct scatterlist *to;
	unsigned int i, nents = 0;
	int ret;

	for (i = 0; i < count; i++)
		nents += DIV_ROUND_UP(pieces[i].len, MOST);
	ret = sg_alloc_table(&map->entries, nents, GFP_KERNEL_ACCOUNT);
	if (ret)
		return ret;
	to = map->entries.sgl;
	for (i = 0; i < count; i++) {
		phys_addr_t at = pieces[i].paddr;
		size_t left = pieces[i].len, len;

		for (; left; left -= len, at += len, to = sg_next(to)) {
			len = min_t(size_t, left, MOST);
			sg_set_page(to, pfn_to_page(PHYS_PFN(at)), len, 0);
			sg_dma_address(to) = (uintptr_t)sg_virt(to);
			sg_dma_len(to) = len;
		}
	}
	return 0;
}

/*
 * Maps @count pieces of a provider's memory for @dev, or as pages for an adapter without a DMA device (@dev is NULL).
 * Returns the mapping, for p2pmem_peer_free(), or an error pointer.
 */
struct p2pmem_peer_map *p2pmem_peer_map(struct device *dev, struct p2pdma_provider *provider,
					const struct phys_vec *pieces, unsigned int count)
{
	struct p2pmem_peer_map *map;
	int ret;

	map = kzalloc_obj(*map, GFP_KERNEL_ACCOUNT);
	if (!map)
		return ERR_PTR(-ENOMEM);
	dma_resv_init(&map->resv);
	map->dma_buf.resv = &map->resv;
	map->attach.dmabuf = &map->dma_buf;
	map->attach.dev = get_device(dev);
	ret = dev ? map_dma(map, provider, pieces, count) : map_pages(map, pieces, count);
	if (ret) {
		p2pmem_peer_free(map);
		return ERR_PTR(ret);
	}
	return map;
}

/* Copies the table to @sg_head. The entries stay owned by @map. */
void p2pmem_peer_entries(const struct p2pmem_peer_map *map, struct sg_table *sg_head)
{
	*sg_head = map->entries;
}

unsigned int p2pmem_peer_nents(const struct p2pmem_peer_map *map)
{
	return map->entries.nents;
}

/* Ends the DMA mapping. The entries stay readable until p2pmem_peer_free(). A second call does nothing. */
void p2pmem_peer_unmap(struct p2pmem_peer_map *map)
{
	if (!map->mapped)
		return;
	dma_resv_lock(&map->resv, NULL);
	p2pmem_dma_buf_unmap(&map->attach, map->mapped, DMA_BIDIRECTIONAL);
	dma_resv_unlock(&map->resv);
	map->mapped = NULL;
}

void p2pmem_peer_free(struct p2pmem_peer_map *map)
{
	p2pmem_peer_unmap(map);
	sg_free_table(&map->entries);
	put_device(map->attach.dev);
	dma_resv_fini(&map->resv);
	kfree(map);
}
