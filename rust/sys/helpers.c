// SPDX-License-Identifier: GPL-2.0
/* The C side of rust/sys: inline functions and macros of the kernel, wrapped so that Rust can call them. */

#include <linux/capability.h>
#include <linux/configfs.h>
#include <linux/fs.h>
#include <linux/fs_context.h>
#include <linux/gpu_buddy.h>
#include <linux/io.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/nodemask.h>
#include <linux/pci.h>
#include <linux/pci-p2pdma.h>
#include <linux/percpu-refcount.h>
#include <linux/pgtable.h>
#include <linux/pseudo_fs.h>
#include <linux/ratelimit.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/suspend.h>
#include <linux/timekeeping.h>
#include <linux/topology.h>
#include <linux/vmalloc.h>

#include "compat.h"
#include "helpers.h"

/* Fault::TABLE of rust/ext/vma.rs takes a page table to be one page of entries of eight bytes. */
static_assert(PMD_SIZE == PAGE_SIZE << (PAGE_SHIFT - 3));

/* Pages a batch handles at once: 2 MiB, whatever the size of a page. */
#define BATCH ((unsigned long)SZ_2M >> PAGE_SHIFT)

/*
 * The reference p2pmem keeps on each page that was ever mapped: while it is held, the count cannot reach zero, so the
 * p2pdma core does not take a page back that p2pmem's buddy allocator owns. The page counts as mapped once more meanwhile,
 * as the kernel has it mapped: so a user mapping is never its first or last one, and each of the machine's statistics of
 * mapped files (which this is none of) is spared its part of every map and unmap.
 */
static void page_hold(struct page *page)
{
	/* One of two callers at once takes it: a count that was raised meanwhile is never set back. */
	if (!atomic_cmpxchg(&page->_refcount, 0, 1))
		atomic_inc(&page->_mapcount);
}

static void page_unhold(struct page *page)
{
	atomic_dec(&page->_mapcount);
}

void p2pmem_pages_hold(unsigned long kaddr, unsigned long npages)
{
	struct page *page = virt_to_page((void *)kaddr);
	unsigned long i;

	for (i = 0; i < npages; i++)
		page_hold(page + i);
}

/* How many pages have a reference besides ours. */
unsigned long p2pmem_pages_busy(unsigned long kaddr, unsigned long npages)
{
	struct page *page = virt_to_page((void *)kaddr);
	unsigned long i, busy = 0;

	for (i = 0; i < npages; i++)
		busy += page_ref_count(page + i) > 1;
	/* Whoever acts on "none" must see what the former holders did with the memory. */
	smp_rmb();
	return busy;
}

/*
 * Gives a range that came from one pci_alloc_p2pmem() back to the core's pool, and our references with it. A page that
 * somebody still holds goes back by itself when he lets go, which costs one reference to the page map for each such
 * page and each run between them. Returns how many pages were still held.
 */
unsigned long p2pmem_pages_release(struct pci_dev *pdev, unsigned long kaddr, unsigned long npages)
{
	struct page *page = virt_to_page((void *)kaddr);
	struct percpu_ref *ref = &page_pgmap(page)->ref;
	unsigned long i, run = 0, busy = 0;

	/* Keeps the page map while the count of its references is worked out. */
	percpu_ref_get(ref);
	for (i = 0; i < npages; i++) {
		if (!page_ref_count(page + i)) {
			run++;
			continue;
		}
		page_unhold(page + i);
		if (page_ref_freeze(page + i, 1)) {
			run++;
			continue;
		}
		if (run) {
			percpu_ref_get(ref);
			pci_free_p2pmem(pdev, (void *)(kaddr + ((i - run) << PAGE_SHIFT)), run << PAGE_SHIFT);
			run = 0;
		}
		busy++;
		percpu_ref_get(ref);
		put_page(page + i);
	}
	if (run) {
		percpu_ref_get(ref);
		pci_free_p2pmem(pdev, (void *)(kaddr + ((npages - run) << PAGE_SHIFT)), run << PAGE_SHIFT);
	}
	/* The reference that pci_alloc_p2pmem() took for the whole range, and the one above. */
	percpu_ref_put(ref);
	percpu_ref_put(ref);
	return busy;
}

#ifdef CONFIG_ARM64_MTE
/* As below. There set_pte_at() calls what the kernel does not export to modules, so that the core has to look at each page. */
int p2pmem_pages_insert(struct vm_area_struct *vma, unsigned long addr, unsigned long kaddr, unsigned long npages)
{
	struct page *pages[16], *first = virt_to_page((void *)kaddr);
	unsigned long done = 0, n, left, i;
	int ret = 0;

	if (!(vma->vm_flags & VM_MIXEDMAP) || vma->vm_flags & VM_IO)
		return -EFAULT;
	npages = min(npages, BATCH);
	while (done < npages && !ret) {
		n = left = min(npages - done, ARRAY_SIZE(pages));
		for (i = 0; i < n; i++)
			pages[i] = first + done + i;
		ret = vm_insert_pages(vma, addr + (done << PAGE_SHIFT), pages, &left);
		done += n - left;
	}
	return done ? 0 : ret;
}
#else
/* Where pages are being mapped, and how far that is. */
struct insertion {
	struct vm_area_struct *vma;
	struct page *page;
	unsigned long done;
};

/* Called with the page table locked. */
static int insert_page(pte_t *pte, unsigned long addr, void *data)
{
	struct insertion *at = data;

	if (!pte_none(ptep_get(pte)))
		return -EBUSY;
	/* Without our reference the end of this mapping would give the page to the core's pool. */
	if (!page_ref_count(at->page))
		return -EFAULT;
	get_page(at->page);
	atomic_inc(&at->page->_mapcount);
	set_pte_at(at->vma->vm_mm, addr, pte, mk_pte(at->page, at->vma->vm_page_prot));
	at->page++;
	at->done++;
	return 0;
}

/*
 * Maps pages at @addr, up to the first that is there already. 0 when the first one is mapped afterwards. What
 * vm_insert_pages() does, without looking at each page anew: all are alike, and counted as mapped already (page_hold()), so
 * that of the core's books there is but the count of the process's pages, which is kept for all of them together.
 */
int p2pmem_pages_insert(struct vm_area_struct *vma, unsigned long addr, unsigned long kaddr, unsigned long npages)
{
	struct insertion at = { .vma = vma, .page = virt_to_page((void *)kaddr) };
	int member = mm_counter_file(page_folio(at.page));
	int ret;

	if (!(vma->vm_flags & VM_MIXEDMAP) || vma->vm_flags & VM_IO)
		return -EFAULT;
	ret = apply_to_page_range(vma->vm_mm, addr, min(npages, BATCH) << PAGE_SHIFT, insert_page, &at);
	percpu_counter_add(&vma->vm_mm->rss_stat[member], at.done);
	return at.done ? 0 : ret;
}
#endif /* CONFIG_ARM64_MTE */

/* Zeroes BAR memory, through a write-combining mapping where the memory allows it and one can be had. */
void p2pmem_pages_clear(unsigned long kaddr, unsigned long npages, bool combine)
{
	struct page *page = virt_to_page((void *)kaddr), **pages = NULL;
	unsigned long done, n, i;
	void *map;

	if (combine)
		pages = kmalloc_array(min(npages, BATCH), sizeof(*pages), GFP_KERNEL | __GFP_NOWARN);
	for (done = 0; done < npages; done += n) {
		n = min(npages - done, BATCH);
		map = NULL;
		if (pages) {
			for (i = 0; i < n; i++)
				pages[i] = page + done + i;
			map = vmap(pages, n, VM_MAP, pgprot_writecombine(PAGE_KERNEL));
		}
		memset_io((void __iomem *)(map ?: (void *)(kaddr + (done << PAGE_SHIFT))), 0, n << PAGE_SHIFT);
		wmb();
		if (map)
			vunmap(map);
		cond_resched();
	}
	kfree(pages);
}

/* The physical range of the page map that @kaddr belongs to: what its driver gave to pci_p2pdma_add_resource(). */
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

/* Maps a part of a BAR for the time that its provider is there: the kernel uses large pages, which cost next to nothing. */
void *p2pmem_window_map(u64 phys, size_t size, bool combine)
{
	return (void __force *)(combine ? ioremap_wc(phys, size) : ioremap(phys, size));
}

void p2pmem_window_unmap(void *kaddr)
{
	iounmap((void __iomem *)kaddr);
}

void p2pmem_window_clear(void *kaddr, size_t size)
{
	size_t done, n;

	for (done = 0; done < size; done += n) {
		n = min(size - done, BATCH << PAGE_SHIFT);
		memset_io((void __iomem *)(kaddr + done), 0, n);
		wmb();
		cond_resched();
	}
}

/* Whether p2pmem_vma_prepare() made the area one for page frames. In others they are a BUG() or refer to pages. */
bool p2pmem_vma_takes_pfns(struct vm_area_struct *vma)
{
	return vma->vm_flags & VM_MIXEDMAP && vma->vm_flags & VM_IO && !vma_is_cow_mapping(vma);
}

/* Maps page frames at @addr, up to the first that cannot be. 0 when the first one is mapped afterwards. */
int p2pmem_pfns_insert(struct vm_area_struct *vma, unsigned long addr, unsigned long pfn, unsigned long npages)
{
	unsigned long n = min(npages, BATCH), i;
	vm_fault_t ret = 0;

	if (!p2pmem_vma_takes_pfns(vma))
		return -EFAULT;
	for (i = 0; i < n; i++) {
		ret = vmf_insert_mixed(vma, addr + (i << PAGE_SHIFT), pfn + i);
		if (ret & VM_FAULT_ERROR)
			break;
	}
	if (i)
		return 0;
	return ret & VM_FAULT_OOM ? -ENOMEM : -EFAULT;
}

/*
 * Releases the lock that the core took for a fault, so that the handler can take its time. Returns the area's file with a
 * reference, which keeps the module loaded: the handler puts it, returns VM_FAULT_RETRY, and does not touch the area any more.
 * On error the lock is still held. -EAGAIN: the fault must not wait, return VM_FAULT_RETRY. -EBUSY: the core does not retry
 * this fault, or it is one of a kernel thread, serve it: a kernel thread's last reference to a file is put by another thread,
 * at any time, a program's own when the task is about to return to it, which is after the handler.
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

/* The kernel crate's own constant for this flag has the value of another one (VM_MAYEXEC) in 7.2. */
bool p2pmem_vma_may_share(struct vm_area_struct *vma)
{
	return vma->vm_flags & VM_MAYSHARE;
}

/* Whether the area could be made writable by mprotect(), whatever it is now. */
bool p2pmem_vma_may_write(struct vm_area_struct *vma)
{
	return vma->vm_flags & VM_MAYWRITE;
}

void p2pmem_vma_prepare(struct vm_area_struct *vma, bool combine, bool pages)
{
	if (pages)
		/*
		 * No VM_IO: get_user_pages() refuses it, and O_DIRECT is what these mappings are for. With VM_RAND_READ
		 * nobody notes for each page that it was used lately, of memory that is never reclaimed.
		 */
		vm_flags_set(vma, VM_MIXEDMAP | VM_DONTEXPAND | VM_DONTDUMP | VM_RAND_READ);
	else
		/*
		 * No VM_PFNMAP: VFIO type1 maps the page frames of such areas for DMA without a reference and without a
		 * notifier, and would go on after the memory became another user's. Without it, and with VM_IO, it has to pin
		 * pages, which fails with EFAULT. The entries are special ones all the same.
		 */
		vm_flags_set(vma, VM_MIXEDMAP | VM_IO | VM_DONTEXPAND | VM_DONTDUMP);
	vma->vm_page_prot = combine ? pgprot_writecombine(vma->vm_page_prot) : pgprot_noncached(vma->vm_page_prot);
}

/*
 * The inode whose address space holds all user mappings of all files of /dev/p2pmem, so that one
 * unmap_mapping_range() finds every mapping of a buffer, through whatever device node its file was opened.
 */
static int p2pmem_fs_cnt;
static struct vfsmount *p2pmem_fs_mnt;

static int p2pmem_fs_init(struct fs_context *fc)
{
	return init_pseudo(fc, 0x7032706d /* "p2pm" */) ? 0 : -ENOMEM;
}

/*
 * No owner: the mount is made and undone by this module alone, and its reference to an owner would keep the module
 * from ever being unloaded.
 */
static struct file_system_type p2pmem_fs_type = {
	.name = "p2pmem",
	.init_fs_context = p2pmem_fs_init,
	.kill_sb = kill_anon_super,
};

struct inode *p2pmem_mapping_inode(void)
{
	struct inode *inode;
	int ret;

	ret = simple_pin_fs(&p2pmem_fs_type, &p2pmem_fs_mnt, &p2pmem_fs_cnt);
	if (ret)
		return ERR_PTR(ret);
	inode = alloc_anon_inode(p2pmem_fs_mnt->mnt_sb);
	if (IS_ERR(inode))
		simple_release_fs(&p2pmem_fs_mnt, &p2pmem_fs_cnt);
	return inode;
}

/* One more reference to what p2pmem_mapping_inode() returned, to be put as that one is. */
int p2pmem_mapping_inode_hold(struct inode *inode)
{
	int ret = simple_pin_fs(&p2pmem_fs_type, &p2pmem_fs_mnt, &p2pmem_fs_cnt);

	if (!ret)
		ihold(inode);
	return ret;
}

void p2pmem_mapping_inode_put(struct inode *inode)
{
	iput(inode);
	simple_release_fs(&p2pmem_fs_mnt, &p2pmem_fs_cnt);
}

struct pci_dev *p2pmem_pci_upstream_bridge(struct pci_dev *pdev)
{
	return pci_upstream_bridge(pdev);
}

u32 p2pmem_pci_domain(struct pci_dev *pdev)
{
	return pci_domain_nr(pdev->bus);
}

u32 p2pmem_pci_bus(struct pci_dev *pdev)
{
	return pdev->bus->number;
}

bool p2pmem_pci_mem_bar(struct pci_dev *pdev, int bar)
{
	return pci_resource_flags(pdev, bar) & IORESOURCE_MEM && pci_resource_len(pdev, bar);
}

bool p2pmem_pci_prefetchable(struct pci_dev *pdev, int bar)
{
	return pci_resource_flags(pdev, bar) & IORESOURCE_PREFETCH;
}

bool p2pmem_pci_is_64bit(struct pci_dev *pdev, int bar)
{
	return pci_resource_flags(pdev, bar) & IORESOURCE_MEM_64;
}

u32 p2pmem_pci_root_bus(struct pci_dev *pdev)
{
	return pci_find_host_bridge(pdev->bus)->bus->number;
}

bool p2pmem_pci_is_virtfn(struct pci_dev *pdev)
{
	return pci_physfn(pdev) != pdev;
}

static int is_device(struct device *dev, const void *data)
{
	return dev == data;
}

/*
 * The physical function of a virtual one, with a reference. NULL where @pdev is no virtual function, or was removed: then
 * its pointer may be to a device that is freed.
 */
struct pci_dev *p2pmem_pci_get_physfn(struct pci_dev *pdev)
{
	struct pci_dev *physfn = pci_physfn(pdev);
	struct device *found;

	if (physfn == pdev)
		return NULL;
	/* The pointer is compared, and not followed. */
	found = bus_find_device(&pci_bus_type, NULL, &physfn->dev, is_device);
	if (!found)
		return NULL;
	/*
	 * pci_iov_remove_virtfn() puts the physical function after the virtual one is out of sysfs. So while the virtual one is
	 * in it, that reference is there, and what was found is no other device at the same address.
	 */
	if (!device_is_registered(&pdev->dev)) {
		put_device(found);
		return NULL;
	}
	return physfn;
}

int p2pmem_pci_pcie_type(struct pci_dev *pdev)
{
	return pci_is_pcie(pdev) ? pci_pcie_type(pdev) : -1;
}

int p2pmem_pci_node(struct pci_dev *pdev)
{
	return dev_to_node(&pdev->dev);
}

/* A bound driver is there as long as the device is locked. Whoever has it locked binds or unbinds one, or resets the device. */
void p2pmem_pci_driver_name(struct pci_dev *pdev, char *buf, size_t len)
{
	if (!device_trylock(&pdev->dev)) {
		strscpy(buf, "", len);
		return;
	}
	strscpy(buf, pdev->dev.driver ? dev_driver_string(&pdev->dev) : "", len);
	device_unlock(&pdev->dev);
}

/* The node that everything belongs to on a machine with one node online, else none. */
int p2pmem_only_node(void)
{
	return num_online_nodes() == 1 ? first_online_node : NUMA_NO_NODE;
}

u32 p2pmem_node_distance(int a, int b)
{
	return a < 0 || b < 0 ? 0 : node_distance(a, b);
}

/*
 * Sets what the driver that a device is bound to is told of resets and errors. The kernel's Rust interface to PCI drivers has no
 * place for it. Called from the driver's probe, always with the same handlers: whoever looks at them holds the device's lock, as
 * probe does, or got hold of the device after probe.
 */
void p2pmem_pci_set_error_handlers(struct pci_dev *pdev, const struct pci_error_handlers *handlers)
{
	WRITE_ONCE(pdev->driver->err_handler, handlers);
}

/*
 * Ends mkdir() in the directory of a registered group, waiting for calls that are under way. configfs_unregister_group() does not
 * take the lock of that directory: configfs_mkdir() would find it unhashed, and use its group, which is NULL then.
 */
void p2pmem_configfs_close(struct config_group *group)
{
	struct inode *dir = d_inode(group->cg_item.ci_dentry);

	inode_lock(dir);
	dir->i_flags |= S_DEAD;
	inode_unlock(dir);
}

int p2pmem_pm_register(struct notifier_block *block)
{
	return register_pm_notifier(block);
}

void p2pmem_pm_unregister(struct notifier_block *block)
{
	unregister_pm_notifier(block);
}

/* Whether the machine is about to sleep, before tasks are frozen. */
bool p2pmem_pm_is_prepare(unsigned long action)
{
	return action == PM_SUSPEND_PREPARE || action == PM_HIBERNATION_PREPARE;
}

/* Whether it woke up, or did not come to sleep. */
bool p2pmem_pm_is_post(unsigned long action)
{
	return action == PM_POST_SUSPEND || action == PM_POST_HIBERNATION;
}

const struct bus_type *p2pmem_pci_bus_type(void)
{
	return &pci_bus_type;
}

/* Where the blocks of one allocation lie, and whether all of them were cleared. False when they are not one piece. */
bool p2pmem_buddy_extent(struct gpu_buddy *mm, struct list_head *blocks, u64 *offset, u64 *len, bool *clear)
{
	u64 start = U64_MAX, end = 0, sum = 0;
	struct gpu_buddy_block *block;

	*clear = true;
	list_for_each_entry(block, blocks, link) {
		u64 at = gpu_buddy_block_offset(block), size = gpu_buddy_block_size(mm, block);

		start = min(start, at);
		end = max(end, at + size);
		sum += size;
		*clear &= gpu_buddy_block_is_clear(block);
	}
	*offset = start;
	*len = sum;
	return sum && end - start == sum;
}

/* Gives back blocks that nobody has used since they were taken: what was cleared is known still. */
void p2pmem_buddy_put_back(struct gpu_buddy *mm, struct list_head *blocks)
{
	struct gpu_buddy_block *block, *next;

	list_for_each_entry_safe(block, next, blocks, link)
		gpu_buddy_free_block(mm, block);
	INIT_LIST_HEAD(blocks);
}

/* The largest block that is free as it is, without joining neighbours. */
u64 p2pmem_buddy_largest(struct gpu_buddy *mm)
{
	unsigned int tree;
	int order;

	for (order = mm->max_order; order >= 0; order--)
		for_each_free_tree(tree)
			if (!RB_EMPTY_ROOT(&mm->free_trees[tree][order]))
				return mm->chunk_size << order;
	return 0;
}

static bool is_split(const struct gpu_buddy_block *block)
{
	return (block->header & GPU_BUDDY_HEADER_STATE) == GPU_BUDDY_SPLIT;
}

/* The leftmost block below @block that is not split. */
static struct gpu_buddy_block *first_leaf(struct gpu_buddy_block *block)
{
	while (is_split(block))
		block = block->left;
	return block;
}

/* The next block to the right that is not split, below the same root; NULL where there is none. */
static struct gpu_buddy_block *next_leaf(struct gpu_buddy_block *block)
{
	while (block->parent && block == block->parent->right)
		block = block->parent;
	return block->parent ? first_leaf(block->parent->right) : NULL;
}

/* How much of the free bytes from @start to @end one allocation can have. */
static u64 run_fits(struct gpu_buddy *mm, u64 start, u64 end)
{
	u64 block;

	/*
	 * The allocator begins with an aligned block whose size is the request's, rounded down to a power of two, and takes
	 * what is missing from the neighbours.
	 */
	for (block = roundup_pow_of_two(mm->size); block > mm->chunk_size; block >>= 1)
		if (round_up(start, block) + block <= end)
			break;
	return min(end - start, 2 * block - mm->chunk_size);
}

/*
 * The largest piece that one allocation can have, once neighbours were joined that differ in whether they were cleared. It looks at
 * every block, and changes nothing.
 */
u64 p2pmem_buddy_longest(struct gpu_buddy *mm)
{
	u64 start = 0, end = 0, longest = 0;
	struct gpu_buddy_block *block;
	unsigned int i;

	for (i = 0; i < mm->n_roots; i++) {
		for (block = first_leaf(mm->roots[i]); block; block = next_leaf(block)) {
			u64 at = gpu_buddy_block_offset(block);

			if (gpu_buddy_block_is_free(block)) {
				end = at + gpu_buddy_block_size(mm, block);
				continue;
			}
			if (end > start)
				longest = max(longest, run_fits(mm, start, end));
			start = end = at + gpu_buddy_block_size(mm, block);
		}
	}
	return end > start ? max(longest, run_fits(mm, start, end)) : longest;
}

/* The largest free block that was not cleared. */
u64 p2pmem_buddy_largest_dirty(struct gpu_buddy *mm)
{
	int order;

	for (order = mm->max_order; order >= 0; order--)
		if (!RB_EMPTY_ROOT(&mm->free_trees[GPU_BUDDY_DIRTY_TREE][order]))
			return mm->chunk_size << order;
	return 0;
}

/* Whether the task is to end, as one does that the kernel killed for want of memory. */
bool p2pmem_is_killed(void)
{
	return fatal_signal_pending(current);
}

/* At most ten lines in five seconds about refused requests: a program in a loop must not flood the log. */
bool p2pmem_log_allowed(void)
{
	static DEFINE_RATELIMIT_STATE(rs, DEFAULT_RATELIMIT_INTERVAL, DEFAULT_RATELIMIT_BURST);

	return __ratelimit(&rs);
}

u64 p2pmem_now_ns(void)
{
	return ktime_get_ns();
}

bool p2pmem_capable_admin(void)
{
	return capable(CAP_SYS_ADMIN);
}

void p2pmem_current_comm(char *buf, size_t len)
{
	strscpy(buf, current->comm, len);
}
