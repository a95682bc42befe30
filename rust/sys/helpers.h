/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Functions in the C files of rust/sys that Rust calls, mostly one for each inline function or macro of the kernel. Contexts and locks
 * are in the comments of the definitions.
 */
#ifndef P2PMEM_SYS_HELPERS_H
#define P2PMEM_SYS_HELPERS_H

#include <linux/dma-direction.h>
#include <linux/p2pmem.h>
#include <linux/types.h>
#include <uapi/linux/mman.h>

#include "peer_mem.h"

struct cred;
struct page;
struct pci_dev;
struct inode;
struct vm_area_struct;
struct gpu_buddy;
struct list_head;
struct device;
struct dma_buf_attachment;
struct p2pdma_provider;
struct sg_table;
struct tracepoint;
struct vm_fault;

/* Pages of published BAR memory. @kaddr is the kernel address of the range, from pci_alloc_p2pmem(). */
void p2pmem_pages_hold(unsigned long kaddr, unsigned long npages);
unsigned long p2pmem_pages_busy(unsigned long kaddr, unsigned long npages);
void p2pmem_pages_release(struct pci_dev *pdev, unsigned long kaddr, unsigned long npages);
int p2pmem_pages_insert(struct vm_fault *vmf, unsigned long kaddr, unsigned long npages, unsigned long index, bool large);
unsigned long p2pmem_pages_map(unsigned long kaddr, unsigned long npages);
void p2pmem_pages_unmap(unsigned long kaddr);
void p2pmem_pages_range(unsigned long kaddr, u64 *start, u64 *len);
u64 p2pmem_page_phys(unsigned long kaddr);

void p2pmem_bar_clear(void *kaddr, unsigned long npages);

/* Windows: BAR memory without struct pages. */
void *p2pmem_window_map(u64 phys, size_t size, bool combine);
int p2pmem_pfns_insert(struct vm_fault *vmf, unsigned long pfn, unsigned long npages, bool large);

struct file *p2pmem_fault_unlock(struct vm_fault *vmf);
void p2pmem_vma_prepare(struct vm_area_struct *vma, bool combine, bool pages);

struct inode *p2pmem_mapping_inode(void);

u32 p2pmem_pci_domain(struct pci_dev *pdev);
int p2pmem_pci_node(struct pci_dev *pdev);
int p2pmem_only_node(void);
u32 p2pmem_node_distance(int a, int b);

struct notifier_block;
int p2pmem_pm_register(struct notifier_block *block);
void p2pmem_pm_unregister(struct notifier_block *block);

bool p2pmem_buddy_extent(struct gpu_buddy *mm, struct list_head *blocks, u64 *offset, u64 *len);
int p2pmem_buddy_free_front(struct gpu_buddy *mm, struct list_head *blocks, u64 size);
u64 p2pmem_buddy_largest(struct gpu_buddy *mm);
bool p2pmem_is_killed(void);

struct sg_table *p2pmem_dma_buf_map(struct dma_buf_attachment *attach, struct p2pdma_provider *provider,
				    const struct phys_vec *pieces, unsigned int count, enum dma_data_direction dir,
				    void *keep);
void *p2pmem_dma_buf_unmap(struct dma_buf_attachment *attach, struct sg_table *sgt, enum dma_data_direction dir);
bool p2pmem_dma_is_translated(struct device *dev, u64 address);
bool p2pmem_dma_is_bounced(struct device *dev, u64 address);
struct pci_dev *p2pmem_dev_pci(struct device *dev);

const struct cred *p2pmem_cred_get(void);
u32 p2pmem_cred_uid(const struct cred *cred);
bool p2pmem_cred_member(const struct cred *cred, u32 gid);

void *p2pmem_dmem_region(u64 size, u32 domain, u8 bus, u8 devfn);
void p2pmem_dmem_region_end(void *region);
int p2pmem_dmem_charge(void *region, u64 size, void **pool);
void p2pmem_dmem_uncharge(void *pool, u64 size);

/* Fields of the events of a buffer: the buffer's number and size in bytes, its provider's id and PCI address. */
struct p2pmem_trace_buffer {
	u64 buffer;
	u64 size;
	u32 provider;
	u32 domain;
	u8 bus;
	u8 devfn;
};

/*
 * Fields of the event of a decision. @chosen is the provider's id or 0, @error the positive errno or 0, @dry true if
 * nothing is allocated.
 */
struct p2pmem_trace_decision {
	u64 size;
	u64 align;
	u64 file;
	u32 clients;
	u32 providers;
	u32 strategy;
	u32 chosen;
	u32 error;
	bool dry;
};

/* The tracepoints. Rust reads their static keys to skip disabled events. */
extern struct tracepoint __tracepoint_p2pmem_alloc;
extern struct tracepoint __tracepoint_p2pmem_free;
extern struct tracepoint __tracepoint_p2pmem_map;
extern struct tracepoint __tracepoint_p2pmem_register;
extern struct tracepoint __tracepoint_p2pmem_revoke;
extern struct tracepoint __tracepoint_p2pmem_decision;

void p2pmem_trace_alloc(const struct p2pmem_trace_buffer *about, u64 bar_offset, u64 file, u32 uid);
void p2pmem_trace_free(const struct p2pmem_trace_buffer *about);
void p2pmem_trace_map(const struct p2pmem_trace_buffer *about, u64 offset, u64 length);
void p2pmem_trace_register(const struct p2pmem_trace_buffer *about, u64 id, u64 length, const char *device, bool peer);
void p2pmem_trace_revoke(const struct p2pmem_trace_buffer *about, u32 mappings, u32 exports);
void p2pmem_trace_decision(const struct p2pmem_trace_decision *of);

/* MAP_FIXED as a constant that bindgen translates. */
enum { P2PMEM_MAP_FIXED = MAP_FIXED };

/* Functions of rust/ext/publisher.rs, which rust/sys/publisher.c calls for other drivers. */
struct p2pmem_registration *p2pmem_rust_register(struct pci_dev *pdev, const struct p2pmem_publication *what);
void p2pmem_rust_unregister(struct p2pmem_registration *registration);
u32 p2pmem_rust_registration_id(const struct p2pmem_registration *registration);

bool p2pmem_log_allowed(void);

#endif /* P2PMEM_SYS_HELPERS_H */
