/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The peer-memory interface of RDMA cores, and the C side of rust/ext/peer_mem.rs.
 *
 * The kernel's headers do not have the interface: vendors ship <rdma/peer_mem.h> with their own RDMA core. The structures
 * and functions are declared here with the same layout.
 */
#ifndef P2PMEM_SYS_PEER_MEM_H
#define P2PMEM_SYS_PEER_MEM_H

#include <linux/types.h>

struct device;
struct module;
struct p2pdma_provider;
struct phys_vec;
struct sg_table;

/* The callbacks of a client, in the order in which the core calls them for one registration. */
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

/* The client unmaps by itself after it has invalidated a registration; the core does not call dma_unmap then. */
#define PEER_MEM_INVALIDATE_UNMAPS	(1 << 0)

/* The extended client, which version[15] != 0 announces. */
struct peer_memory_client_ex {
	struct peer_memory_client client;
	size_t ex_size;
	u32 flags;
};

typedef int (*invalidate_peer_memory)(void *reg_handle, u64 core_context);

void *ib_register_peer_memory_client(const struct peer_memory_client *client, invalidate_peer_memory *invalidate);
void ib_unregister_peer_memory_client(void *reg_handle);

/* The form in which the client registers, from the module parameter peer_memory ("ex", "legacy", "persistent", "off"). */
#define P2PMEM_PEER_EX		0
#define P2PMEM_PEER_LEGACY	1
#define P2PMEM_PEER_PERSISTENT	2
#define P2PMEM_PEER_OFF		3
unsigned int p2pmem_peer_form(void);

/* Returns the path of the Module.symvers in which the build found the interface. */
const char *p2pmem_peer_symvers(void);

/* Take and drop a reference to this module. p2pmem_module_get() fails while the module is being unloaded. */
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
