/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * The peer-memory interface: how a module takes part in ibv_reg_mr() with memory that get_user_pages() refuses.
 *
 * Stock kernels do not have the interface; vendors' RDMA stacks do. This is the test bed's own declaration of the
 * published layout, on which binary modules of clients rely: the assertions below are part of it.
 *
 * For each registration whose pages get_user_pages() refuses, the core calls every client's acquire() in the order of
 * their registration, and then calls the client that returned 1: get_pages(), dma_map(), get_page_size(), and at the end
 * dma_unmap(), put_pages(), release().
 */
#ifndef RDMA_PEER_MEM_H
#define RDMA_PEER_MEM_H

#include <linux/build_bug.h>
#include <linux/scatterlist.h>
#include <linux/stddef.h>
#include <linux/types.h>

#define IB_PEER_MEMORY_NAME_MAX 64
#define IB_PEER_MEMORY_VER_MAX 16

struct device;

struct peer_memory_client {
	char name[IB_PEER_MEMORY_NAME_MAX];
	/* If the last byte is not 0, this is the first member of a struct peer_memory_client_ex. */
	char version[IB_PEER_MEMORY_VER_MAX];

	/* Returns 1 to accept the memory; 0 or a negative number refuses. Called with the core's mutex of all clients held. */
	int (*acquire)(unsigned long addr, size_t size, void *peer_mem_private_data, char *peer_mem_name,
		       void **client_context);
	/* Keeps the pages at their addresses. From here on the client may invalidate @core_context. */
	int (*get_pages)(unsigned long addr, size_t size, int write, int force, struct sg_table *sg_head,
			 void *client_context, u64 core_context);
	/*
	 * Allocates @sg_head and fills it with the DMA addresses of the range, rounded to whole pages of get_page_size(), for
	 * that device; or with struct pages if @dma_device is NULL, for devices that copy by the processor.
	 */
	int (*dma_map)(struct sg_table *sg_head, void *client_context, struct device *dma_device, int dmasync, int *nmap);
	int (*dma_unmap)(struct sg_table *sg_head, void *client_context, struct device *dma_device);
	void (*put_pages)(struct sg_table *sg_head, void *client_context);
	unsigned long (*get_page_size)(void *client_context);
	void (*release)(void *client_context);
};

enum {
	/*
	 * The client unmaps after the callback what it invalidates. Without this flag the callback calls dma_unmap() and
	 * put_pages() before it returns.
	 */
	PEER_MEM_INVALIDATE_UNMAPS = 1 << 0,
};

struct peer_memory_client_ex {
	struct peer_memory_client client;
	size_t ex_size;
	u32 flags;
};

static_assert(sizeof(struct peer_memory_client) == 136);
static_assert(offsetof(struct peer_memory_client, version) == 64);
static_assert(offsetof(struct peer_memory_client, acquire) == 80);
static_assert(offsetof(struct peer_memory_client, get_pages) == 88);
static_assert(offsetof(struct peer_memory_client, dma_map) == 96);
static_assert(offsetof(struct peer_memory_client, dma_unmap) == 104);
static_assert(offsetof(struct peer_memory_client, put_pages) == 112);
static_assert(offsetof(struct peer_memory_client, get_page_size) == 120);
static_assert(offsetof(struct peer_memory_client, release) == 128);
static_assert(sizeof(struct peer_memory_client_ex) == 152);
static_assert(offsetof(struct peer_memory_client_ex, ex_size) == 136);
static_assert(offsetof(struct peer_memory_client_ex, flags) == 144);

/*
 * The client calls this before the memory of a registration goes away. When it returns, no device does DMA to the memory.
 * May sleep. Always returns 0: a registration that has ended meanwhile is no error.
 */
typedef int (*invalidate_peer_memory)(void *reg_handle, u64 core_context);

/*
 * @invalidate_callback: receives the callback, or NULL for a client that never invalidates.
 * Returns a handle, or NULL on error.
 */
void *ib_register_peer_memory_client(const struct peer_memory_client *peer_client,
				     invalidate_peer_memory *invalidate_callback);
/* Waits until the last registration of this client's memory has ended. */
void ib_unregister_peer_memory_client(void *reg_handle);

#endif
