// SPDX-License-Identifier: GPL-2.0
/*
 * The C side of rust/sys: inline functions and macros of the kernel, and loops over pages and blocks, as functions that
 * Rust can call.
 *
 * Functions are for process context unless their comment says otherwise, and take no locks except where named. rust/ext has
 * the safe wrappers.
 */

#include <linux/anon_inodes.h>
#include <linux/delay.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/gpu_buddy.h>
#include <linux/io.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/nodemask.h>
#include <linux/pci.h>
#include <linux/pci-p2pdma.h>
#include <linux/percpu-refcount.h>
#include <linux/pgtable.h>
#include <linux/ratelimit.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/suspend.h>
#include <linux/topology.h>
#include <linux/unroll.h>
#include <linux/vmalloc.h>

#include "helpers.h"

/* Fault::TABLE in rust/ext/vma.rs assumes that a page table is one page of eight-byte entries. */
static_assert(PMD_SIZE == PAGE_SIZE << (PAGE_SHIFT - 3));

/* Pages that one batch handles: 2 MiB for every page size. */
#define BATCH ((unsigned long)SZ_2M >> PAGE_SHIFT)

/* Words that one round of clearing stores. A page is a multiple of them. */
#define CLEAR_WORDS 32

/*
 * Struct pages of published BAR memory. A block is as many pages as one page table maps, aligned to their size. The pages
 * of a block are one folio, or single pages.
 *
 * pci_alloc_p2pmem() returns single pages with reference count 0. The first use of a page takes p2pmem's reference to it,
 * or forms a folio of its block and takes p2pmem's reference to the folio. p2pmem_pages_release() drops the references.
 * Between the two, a count is below 1 only while a block changes its form: then the count is frozen at 0, and nobody gets a
 * reference. So the p2pdma core never takes a page back from p2pmem's buddy allocator.
 */
#define BLOCK (1UL << PMD_ORDER)

/* Serialises the changes of the form of blocks: two buffers may be in one block. Nothing is taken under it. */
static DEFINE_MUTEX(blocks_lock);

/* Makes one folio of pages whose counts are 0, with p2pmem's reference. */
static void init_folio(struct page *page, struct dev_pagemap *pgmap, unsigned int order)
{
	zone_device_page_init(page, pgmap, order);
	/* The caller of zone_device_page_init() gets the folio locked, and I/O that dirties it would wait for the lock. */
	unlock_page(page);
	/* The reference from pci_alloc_p2pmem() keeps the page map for all pages of the allocation. */
	percpu_ref_put_many(&pgmap->ref, 1UL << order);
}

/*
 * Waits for get_user_pages_fast(), which may take a reference to a page that was just unmapped, and drops it when it finds
 * the page table changed. How it counts depends on the form of the block, so no such reference may be left when the form
 * changes. It disables interrupts, which delays the grace period.
 */
static void await_gup_fast(void)
{
	synchronize_rcu_expedited();
}

/*
 * Freezes the count of a folio or page at 0, once only p2pmem's reference is left. The callers know that the former users are
 * gone, so others refer to a page for a moment only, like a search through physical memory.
 */
static void freeze(struct page *page)
{
	unsigned int ms;

	for (ms = 1; !page_ref_freeze(page, 1); ms++) {
		msleep(1);
		if (ms % 10000 == 0)
			pr_warn("waiting for the last of %d references to page frame %lx\n", page_ref_count(page) - 1,
				page_to_pfn(page));
	}
}

/* Forms the folio of a block of single pages, unless somebody refers to one of them. */
static bool form_folio(struct page *head)
{
	bool used = false;

	if (!IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE))
		return false;
	for (unsigned long i = 0; i < BLOCK; i++)
		used |= page_ref_count(head + i);
	if (used)
		await_gup_fast();
	for (unsigned long i = 0; i < BLOCK; i++) {
		if (page_ref_count(head + i) && !page_ref_freeze(head + i, 1)) {
			while (i--)
				page_ref_unfreeze(head + i, 1);
			return false;
		}
	}
	init_folio(head, page_pgmap(head), PMD_ORDER);
	return true;
}

/* Makes single pages of a folio, each with p2pmem's reference. The caller called await_gup_fast(). */
static void split_folio_of(struct page *page)
{
	struct dev_pagemap *pgmap = page_pgmap(page);

	page = compound_head(page);
	freeze(page);
	/* The head comes last: until then, a look-up of a tail finds the count of its head frozen. */
	for (unsigned long i = BLOCK; i--;)
		init_folio(page + i, pgmap, 0);
}

/*
 * Takes p2pmem's references to the pages of one buffer, @npages pages from @first on, that are in the block of page @index.
 * Returns the index behind the last of them. A block that is within the buffer becomes a folio. Sleeps; takes blocks_lock.
 */
static unsigned long hold_block(struct page *first, unsigned long npages, unsigned long index)
{
	unsigned long into = page_to_pfn(first + index) % BLOCK;
	unsigned long start = index - min(index, into), end = min(index - into + BLOCK, npages), i;
	bool whole = end - start == BLOCK;

	/* Nobody else has pages of a whole block, so a folio stays. */
	if (whole && PageHead(first + start))
		return end;
	mutex_lock(&blocks_lock);
	if (whole && form_folio(first + start))
		goto out;
	/* The former owner of the whole block left a folio. */
	if (PageCompound(first + start)) {
		await_gup_fast();
		split_folio_of(first + start);
	}
	for (i = start; i < end; i++)
		if (!page_ref_count(first + i))
			set_page_count(first + i, 1);
out:
	mutex_unlock(&blocks_lock);
	return end;
}

/* Takes p2pmem's references to all pages of a buffer, so that other subsystems may refer to them. Sleeps. */
void p2pmem_pages_hold(unsigned long kaddr, unsigned long npages)
{
	unsigned long i = 0;

	while (i < npages) {
		i = hold_block(virt_to_page((void *)kaddr), npages, i);
		cond_resched();
	}
}

/*
 * Returns the number of pages with references besides p2pmem's, as those of O_DIRECT in progress. A folio counts with all
 * its pages. Does not sleep.
 */
unsigned long p2pmem_pages_busy(unsigned long kaddr, unsigned long npages)
{
	struct page *page = virt_to_page((void *)kaddr);
	unsigned long i, n, busy = 0;

	for (i = 0; i < npages; i += n) {
		n = PageCompound(page + i) ? min(npages - i, BLOCK - page_to_pfn(page + i) % BLOCK) : 1;
		if (page_count(page + i) > 1)
			busy += n;
	}
	/* Orders the counts before the caller's accesses to memory that the former users wrote. */
	smp_rmb();
	return busy;
}

/*
 * Drops p2pmem's references to a range from one pci_alloc_p2pmem(), and returns the range to the core's pool as single
 * pages. Waits until nobody else refers to the pages.
 */
void p2pmem_pages_release(struct pci_dev *pdev, unsigned long kaddr, unsigned long npages)
{
	struct page *page = virt_to_page((void *)kaddr);
	bool waited = false;

	for (unsigned long i = 0; i < npages; i++) {
		if (PageHead(page + i)) {
			if (!waited)
				await_gup_fast();
			waited = true;
			split_folio_of(page + i);
		}
		if (page_ref_count(page + i))
			freeze(page + i);
		if (i % BLOCK == 0)
			cond_resched();
	}
	pci_free_p2pmem(pdev, (void *)kaddr, npages << PAGE_SHIFT);
}

static int fault_errno(vm_fault_t ret)
{
	if (ret & VM_FAULT_OOM)
		return -ENOMEM;
	return ret & VM_FAULT_ERROR ? -EFAULT : 0;
}

/* Maps a page at @addr, or with @large the folio that it is the head of, with one entry. Returns 0, -ENOMEM or -EFAULT. */
static int map_page(struct vm_fault *vmf, unsigned long addr, struct page *page, bool write, bool large)
{
	struct vm_fault at = { .vma = vmf->vma, .address = addr };
	struct folio *folio = page_folio(page);
	vm_fault_t ret = VM_FAULT_FALLBACK;
	pmd_t pmd;

	/* With this reference, no other thread changes the form of the block before the page is mapped. */
	if (!folio_try_get(folio))
		return -EFAULT;
	if (!large) {
		if (page_folio(page) == folio)
			ret = vmf_insert_page_mkwrite(&at, page, write);
	} else if (IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE) && &folio->page == page && folio_order(folio) == PMD_ORDER) {
		pmd = pmdp_get_lockless(vmf->pmd);
		/* vmf_insert_folio_pmd() warns of a page table, which a fault of another thread may have made. */
		if (pmd_none(pmd) || pmd_trans_huge(pmd))
			ret = vmf_insert_folio_pmd(vmf, folio, write);
	}
	folio_put(folio);
	return fault_errno(ret);
}

/*
 * Maps pages of a buffer, which is @npages pages from @kaddr on: page @index at the address of the fault, and the pages
 * after it to the end of the block, the page table or the area. With @large, maps the block that begins at page @index
 * with one entry at the fault's page table, all of which is in the area. Returns 0 if page @index is mapped afterwards;
 * -EFAULT for an area that is not for pages, or if there is no such folio or page table; -ENOMEM. Called in a fault, with
 * the area locked. Sleeps; takes blocks_lock.
 */
int p2pmem_pages_insert(struct vm_fault *vmf, unsigned long kaddr, unsigned long npages, unsigned long index, bool large)
{
	unsigned long addr = vmf->address, stop = pmd_addr_end(addr, vmf->vma->vm_end), end;
	struct page *page = virt_to_page((void *)kaddr);
	int ret;

	if (vmf->vma->vm_flags & (VM_MIXEDMAP | VM_PFNMAP | VM_IO))
		return -EFAULT;
	end = hold_block(page, npages, index);
	page += index;
	ret = map_page(vmf, addr, page, vmf->flags & FAULT_FLAG_WRITE, large);
	if (ret || large)
		return ret;
	while (++index < end && (addr += PAGE_SIZE) < stop)
		if (map_page(vmf, addr, ++page, false, false))
			break;
	return 0;
}

/*
 * Zeroes @npages pages of a BAR that are mapped at @kaddr. May sleep.
 *
 * Stores words of eight bytes in ascending order. With write combining they fill one buffer of the processor after the other,
 * so the device gets whole lines. Without, each word is one write: memset_io() of x86 is memset(), which on many processors
 * stores single bytes there, and takes more instructions on the others.
 *
 * Waits for each 2 MiB until the device has the zeroes. Stores to a BAR are posted, and PCIe orders them only with what
 * travels the same path: without the read, a late zero could overwrite data that a NIC below the same switch writes for
 * the next owner. wmb() empties the buffers for write combining before the read.
 */
void p2pmem_bar_clear(void *kaddr, unsigned long npages)
{
	u64 __iomem *at = (void __iomem *)kaddr, *end;
	unsigned long n;
	unsigned int i;

	for (; npages; npages -= n) {
		n = min(npages, BATCH);
		for (end = at + n * PAGE_SIZE / sizeof(*at); at < end; at += CLEAR_WORDS) {
			unrolled_count(CLEAR_WORDS)
			for (i = 0; i < CLEAR_WORDS; i++)
				__raw_writeq(0, at + i);
		}
		wmb();
		readb(end - 1);
		cond_resched();
	}
}

/*
 * Maps pages of a BAR once more, with write combining, until p2pmem_pages_unmap(). The kernel's own mapping at @kaddr is
 * uncached. On x86 a mapping by ioremap_wc() would get the same type, because the kernel tracks the type of the range; it
 * does not track vmap(). Returns 0 without memory or address space. May sleep.
 */
unsigned long p2pmem_pages_map(unsigned long kaddr, unsigned long npages)
{
	struct page *page = virt_to_page((void *)kaddr), **pages;
	void *map;

	pages = kvmalloc_array(npages, sizeof(*pages), GFP_KERNEL | __GFP_NOWARN);
	if (!pages)
		return 0;
	for (unsigned long i = 0; i < npages; i++)
		pages[i] = page + i;
	/* With memory encryption PAGE_KERNEL is encrypted, and the device has no key. */
	map = vmap(pages, npages, VM_MAP, pgprot_writecombine(pgprot_decrypted(PAGE_KERNEL)));
	kvfree(pages);
	return (unsigned long)map;
}

void p2pmem_pages_unmap(unsigned long kaddr)
{
	vunmap((void *)kaddr);
}

/* Returns the physical range of the page map that @kaddr belongs to: the argument of the driver's pci_p2pdma_add_resource(). */
void p2pmem_pages_range(unsigned long kaddr, u64 *start, u64 *len)
{
	struct dev_pagemap *pgmap = page_pgmap(virt_to_page((void *)kaddr));

	*start = pgmap->range.start;
	*len = range_len(&pgmap->range);
}

u64 p2pmem_page_phys(unsigned long kaddr)
{
	return page_to_phys(virt_to_page((void *)kaddr));
}

/* Maps a range of a BAR as I/O memory, write-combining with @combine. Returns NULL without memory. May sleep. */
void *p2pmem_window_map(u64 phys, size_t size, bool combine)
{
	return (void __force *)(combine ? ioremap_wc(phys, size) : ioremap(phys, size));
}

/*
 * Maps page frames from @pfn on at the address of the fault, up to the first failure and at most 2 MiB; with @large, as one
 * entry at the fault's page table, all of which is in the area. Returns 0 if the first one is mapped afterwards, -EFAULT for
 * an area that p2pmem_vma_prepare() did not set up for page frames, or -ENOMEM. The area is locked.
 */
int p2pmem_pfns_insert(struct vm_fault *vmf, unsigned long pfn, unsigned long npages, bool large)
{
	unsigned long n = min(npages, BATCH), i;
	struct vm_area_struct *vma = vmf->vma;
	vm_fault_t ret = VM_FAULT_FALLBACK;

	/* Inserting page frames into other areas is a BUG() or refers to pages. Private areas are VM_MAYWRITE alone. */
	if (!(vma->vm_flags & VM_MIXEDMAP) || !(vma->vm_flags & VM_IO) ||
	    (vma->vm_flags & (VM_SHARED | VM_MAYWRITE)) == VM_MAYWRITE)
		return -EFAULT;
	if (large) {
		/*
		 * A write fault needs a writable entry even if the area makes new entries read-only, as it does after the
		 * soft-dirty bits of the process were cleared. Otherwise the write faults again without end.
		 */
		if (IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE))
			ret = vmf_insert_pfn_pmd(vmf, pfn, vmf->flags & FAULT_FLAG_WRITE);
		return fault_errno(ret);
	}
	for (i = 0; i < n; i++) {
		ret = vmf_insert_mixed(vma, vmf->address + (i << PAGE_SHIFT), pfn + i);
		if (ret & VM_FAULT_ERROR)
			break;
	}
	return i ? 0 : fault_errno(ret);
}

/*
 * Releases the lock of a fault, so that the handler may sleep for long. Returns the area's file with a reference, which
 * keeps the module loaded. The caller drops the reference, returns VM_FAULT_RETRY, and does not touch the area any more.
 *
 * On error the lock is still held. -EAGAIN: the fault must not wait, return VM_FAULT_RETRY. -EBUSY: handle the fault with
 * the lock held, since the core does not retry it, or the task is a kernel thread or exits. In such a task another thread
 * releases the last reference to a file, at any time. In other tasks the release runs at the return to user space, after
 * the handler.
 */
struct file *p2pmem_fault_unlock(struct vm_fault *vmf)
{
	struct file *file;

	if (!fault_flag_allow_retry_first(vmf->flags) || current->flags & (PF_KTHREAD | PF_EXITING))
		return ERR_PTR(-EBUSY);
	if (vmf->flags & FAULT_FLAG_RETRY_NOWAIT)
		return ERR_PTR(-EAGAIN);
	file = get_file(vmf->vma->vm_file);
	release_fault_lock(vmf);
	return file;
}

/*
 * Sets flags and memory type of a new area: for pages with @pages, else for page frames; write-combining with @combine, else
 * uncached. Called in mmap(), with the mmap lock held for writing.
 */
void p2pmem_vma_prepare(struct vm_area_struct *vma, bool combine, bool pages)
{
	if (pages)
		/*
		 * No VM_IO: get_user_pages() refuses such areas, and these mappings are for O_DIRECT. No VM_MIXEDMAP: when the
		 * kernel splits a large entry of such an area, the entry's reference to the folio is lost. VM_DONTEXPAND also
		 * keeps userfaultfd, guard regions and mlock() away, whose entries are not for these pages. With VM_RAND_READ
		 * the kernel does not mark pages as recently used, which is of no use for memory that is never reclaimed.
		 */
		vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP | VM_RAND_READ);
	else
		/*
		 * No VM_PFNMAP: VFIO type1 maps the page frames of such areas for DMA without a reference and without a
		 * notifier, and would continue after the memory got another owner. In an area with VM_IO and without
		 * VM_PFNMAP it must pin pages, which fails with EFAULT. The page table entries are special in both cases.
		 */
		vm_flags_set(vma, VM_MIXEDMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP);
	/* The encryption bit of AMD and Intel processors is for RAM. */
	vma->vm_page_prot = pgprot_decrypted(vma->vm_page_prot);
	vma->vm_page_prot = combine ? pgprot_writecombine(vma->vm_page_prot) : pgprot_noncached(vma->vm_page_prot);
}

/*
 * Returns a new inode with one reference, whose address space is to contain user mappings, or an error pointer. May sleep.
 *
 * The inode is in the file system of anonymous inodes, which the kernel never unmounts, so the inode keeps nothing. Only a file
 * leads to that file system. The operations of the file are the kernel's, as the file may be released late.
 */
struct inode *p2pmem_mapping_inode(void)
{
	struct file *file = anon_inode_getfile("p2pmem", &generic_ro_fops, NULL, 0);
	struct inode *inode;

	if (IS_ERR(file))
		return ERR_CAST(file);
	inode = alloc_anon_inode(file_inode(file)->i_sb);
	fput(file);
	return inode;
}

u32 p2pmem_pci_domain(struct pci_dev *pdev)
{
	return pci_domain_nr(pdev->bus);
}

int p2pmem_pci_node(struct pci_dev *pdev)
{
	return dev_to_node(&pdev->dev);
}

/* Returns the only online node, or NUMA_NO_NODE if several are online. */
int p2pmem_only_node(void)
{
	return num_online_nodes() == 1 ? first_online_node : NUMA_NO_NODE;
}

u32 p2pmem_node_distance(int a, int b)
{
	return a < 0 || b < 0 ? 0 : node_distance(a, b);
}

int p2pmem_pm_register(struct notifier_block *block)
{
	return register_pm_notifier(block);
}

void p2pmem_pm_unregister(struct notifier_block *block)
{
	unregister_pm_notifier(block);
}

/*
 * Returns offset and length of the blocks of one allocation. Returns false if they are not contiguous and in ascending order.
 * The caller holds the allocator's lock.
 */
bool p2pmem_buddy_extent(struct gpu_buddy *mm, struct list_head *blocks, u64 *offset, u64 *len)
{
	struct gpu_buddy_block *block = list_first_entry(blocks, typeof(*block), link);

	*offset = gpu_buddy_block_offset(block);
	*len = 0;
	list_for_each_entry(block, blocks, link) {
		if (gpu_buddy_block_offset(block) != *offset + *len)
			return false;
		*len += gpu_buddy_block_size(mm, block);
	}
	return true;
}

/*
 * Frees the first @size bytes of blocks that p2pmem_buddy_extent() accepts and that have at least @size bytes. The caller
 * holds the allocator's lock. Returns -ENOMEM if a block cannot be split. Then the allocator's trees may be corrupt.
 */
int p2pmem_buddy_free_front(struct gpu_buddy *mm, struct list_head *blocks, u64 size)
{
	struct gpu_buddy_block *block, *next;

	list_for_each_entry_safe(block, next, blocks, link) {
		u64 len = gpu_buddy_block_size(mm, block), rest = gpu_buddy_block_offset(block) + size;
		LIST_HEAD(first);
		int ret;

		if (!size)
			break;
		list_move(&block->link, &first);
		if (len > size) {
			ret = gpu_buddy_block_trim(mm, &rest, len - size, &first);
			list_splice(&first, blocks);
			return ret;
		}
		gpu_buddy_free_list(mm, &first, 0);
		size -= len;
	}
	return 0;
}

/* Returns the size of the largest free block. No block is marked as cleared. The caller holds the allocator's lock. */
u64 p2pmem_buddy_largest(struct gpu_buddy *mm)
{
	for (int order = mm->max_order; order >= 0; order--)
		if (!RB_EMPTY_ROOT(&mm->free_trees[GPU_BUDDY_DIRTY_TREE][order]))
			return mm->chunk_size << order;
	return 0;
}

/* Returns whether a fatal signal is pending for the current task, for instance from the OOM killer. Any context. */
bool p2pmem_is_killed(void)
{
	return fatal_signal_pending(current);
}

/*
 * Rate-limits messages about refused requests to ten in five seconds: a program in a loop must not flood the log. Any
 * context.
 */
bool p2pmem_log_allowed(void)
{
	static DEFINE_RATELIMIT_STATE(rs, DEFAULT_RATELIMIT_INTERVAL, DEFAULT_RATELIMIT_BURST);

	return __ratelimit(&rs);
}
