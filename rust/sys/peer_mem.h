/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The peer-memory interface of RDMA cores that have it: its structures and functions, declared here as no kernel's
 * headers have them (vendors ship <rdma/peer_mem.h> with their own core), and the C side of rust/ext/peer_mem.rs.
 */
#ifndef P2PMEM_SYS_PEER_MEM_H
#define P2PMEM_SYS_PEER_MEM_H

#include <linux/types.h>

struct device;
struct module;
struct p2pdma_provider;
struct phys_vec;
struct sg_table;

/* What a client is called back for, in the order in which the calls of one registration come. */
struct peer_memory_client {
	char name[64];
	char version[16];
	int (*acquire)(unsigned long addr, size_t size, void *private_data, char *client_name, void **client_context);
	int (*get_pages)(unsigned long addr, size_t size, int write, int force, struct sg_table *sg_head,
			 void *client_context, u64 core_context);
	int (*dma_map)(struct sg_table *sg_head, void *client_context, struct device *dma_device, int dmasync,
		       int *nmap);
	int (*dma_unmap)(struct sg_table *sg_head, void *client_context, struct device *dma_device);
	void (*put_pages)(struct sg_table *sg_head, void *client_context);
	unsigned long (*get_page_size)(void *client_context);
	void (*release)(void *client_context);
};

/* The client unmaps by itself after it told the core that memory goes; the core does not call it back for that. */
#define PEER_MEM_INVALIDATE_UNMAPS	(1 << 0)

/* What a client is told by version[15] != 0 to be. */
struct peer_memory_client_ex {
	struct peer_memory_client client;
	size_t ex_size;
	u32 flags;
};

typedef int (*invalidate_peer_memory)(void *reg_handle, u64 core_context);

void *ib_register_peer_memory_client(const struct peer_memory_client *client, invalidate_peer_memory *invalidate);
void ib_unregister_peer_memory_client(void *reg_handle);

/* How the client is to be registered, by the module parameter peer_memory; an index of "ex", "legacy", ... */
#define P2PMEM_PEER_EX		0
#define P2PMEM_PEER_LEGACY	1
#define P2PMEM_PEER_PERSISTENT	2
#define P2PMEM_PEER_OFF		3
unsigned int p2pmem_peer_form(void);

/* The Module.symvers in which the interface was found when the module was built. */
const char *p2pmem_peer_symvers(void);

/* References to this module. */
bool p2pmem_module_get(void);
void p2pmem_module_put(void);

/* A mapping of pieces of a provider's memory for one adapter. */
struct p2pmem_peer_map;
struct p2pmem_peer_map *p2pmem_peer_map(struct device *dev, struct p2pdma_provider *provider,
					const struct phys_vec *pieces, unsigned int count);
void p2pmem_peer_entries(const struct p2pmem_peer_map *map, struct sg_table *sg_head);
unsigned int p2pmem_peer_nents(const struct p2pmem_peer_map *map);
void p2pmem_peer_unmap(struct p2pmem_peer_map *map);
void p2pmem_peer_free(struct p2pmem_peer_map *map);

#endif /* P2PMEM_SYS_PEER_MEM_H */
