// SPDX-License-Identifier: GPL-2.0
/*
 * A peer-memory client of the classic kind, to compare with the client of p2pmem. A registration is a list of pages of
 * 64 KiB. The client looks up each page in the page tables of the process, pins it, maps it for DMA separately, and makes
 * one entry of it.
 *
 * The driver binds to a PCI function by driver_override (p2pmem_classic) and publishes one BAR of the function (parameter
 * "bar"): mmap() of /dev/p2pmem-classic maps the BAR from offset 0 on, and ibv_reg_mr() registers the mapping. As with most
 * clients of this kind, a registration cannot be invalidated: it holds a reference to the module, and unbinding the driver
 * waits until the last registration has ended.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/dma-mapping.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/refcount.h>
#include <linux/scatterlist.h>
#include <linux/sched/mm.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/wait.h>

#include "peer_mem.h"

#define NAME		"p2pmem_classic"
#define CLASSIC_SHIFT	16
#define CLASSIC_SIZE	(1UL << CLASSIC_SHIFT)

static int bar = 2;
module_param(bar, int, 0444);
MODULE_PARM_DESC(bar, "the BAR to publish");

/* The published BAR, and its use. At most one BAR is published. */
struct published_bar {
	phys_addr_t start;
	size_t size;
	/* Number of registrations that pin each page of 64 KiB. Protected by lock. */
	u32 *pins;
	unsigned int registrations;
};

static DEFINE_MUTEX(lock);
static DECLARE_WAIT_QUEUE_HEAD(unused);
static struct published_bar *published;
static void *client_handle;
/* The address space of all files of the device; set by the first open, with a reference to the inode. */
static struct address_space *mapping;

/* A page of a registration. */
struct page_entry {
	struct list_head list;
	phys_addr_t phys;
	dma_addr_t dma;
	bool mapped;
};

struct registration {
	struct published_bar *published;
	unsigned long addr;
	size_t size;
	struct list_head pages;
	unsigned long npages;
};

static int classic_mmap(struct file *file, struct vm_area_struct *vma);

/* All files must have the same address space, that is the same device node, as remove unmaps only that address space. */
static int classic_open(struct inode *inode, struct file *file)
{
	guard(mutex)(&lock);
	if (mapping && mapping != file->f_mapping)
		return -EBUSY;
	if (!mapping) {
		ihold(inode);
		mapping = file->f_mapping;
	}
	return 0;
}

static unsigned long classic_area(struct file *file, unsigned long addr, unsigned long len, unsigned long pgoff,
				  unsigned long flags)
{
	/* Pages of 64 KiB must be aligned in the address space, too. */
	addr = mm_get_unmapped_area(file, 0, len + CLASSIC_SIZE, pgoff, flags);
	return IS_ERR_VALUE(addr) ? addr : ALIGN(addr, CLASSIC_SIZE);
}

static const struct file_operations classic_fops = {
	.owner = THIS_MODULE,
	.open = classic_open,
	.mmap = classic_mmap,
	.get_unmapped_area = classic_area,
};

static int classic_mmap(struct file *file, struct vm_area_struct *vma)
{
	size_t size = vma->vm_end - vma->vm_start;
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;

	guard(mutex)(&lock);
	if (!published)
		return -ENODEV;
	if (!(vma->vm_flags & VM_SHARED) || !IS_ALIGNED(vma->vm_start | offset, CLASSIC_SIZE) ||
	    offset > published->size || size > published->size - offset)
		return -EINVAL;
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	return io_remap_pfn_range(vma, vma->vm_start, PHYS_PFN(published->start + offset), size, vma->vm_page_prot);
}

static struct miscdevice classic_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "p2pmem-classic",
	.fops = &classic_fops,
	.mode = 0600,
};

/* --- the client --------------------------------------------------------------------------------------------------- */

/* Returns whether a whole range is mapped from this device. The caller holds the mmap lock. */
static bool is_ours(unsigned long addr, unsigned long end)
{
	struct vm_area_struct *vma;

	while (addr < end) {
		vma = vma_lookup(current->mm, addr);
		if (!vma || !vma->vm_file || vma->vm_file->f_op != &classic_fops)
			return false;
		addr = vma->vm_end;
	}
	return true;
}

static int classic_acquire(unsigned long addr, size_t size, void *private_data, char *client_name, void **client_context)
{
	struct registration *reg;
	bool ours;

	mmap_read_lock(current->mm);
	ours = is_ours(addr, addr + size);
	mmap_read_unlock(current->mm);
	if (!ours)
		return 0;
	if (!try_module_get(THIS_MODULE))
		return 0;
	reg = kzalloc_obj(*reg);
	if (!reg) {
		module_put(THIS_MODULE);
		return 0;
	}
	INIT_LIST_HEAD(&reg->pages);
	mutex_lock(&lock);
	reg->published = published;
	if (published)
		published->registrations++;
	mutex_unlock(&lock);
	if (!reg->published) {
		module_put(THIS_MODULE);
		kfree(reg);
		return 0;
	}
	*client_context = reg;
	return 1;
}

/* Looks up the physical address of an address of the process. The caller holds the mmap lock. */
static int walk(unsigned long addr, phys_addr_t *phys)
{
	struct follow_pfnmap_args args = { .address = addr };
	int ret;

	args.vma = vma_lookup(current->mm, addr);
	if (!args.vma)
		return -EFAULT;
	ret = follow_pfnmap_start(&args);
	if (ret)
		return ret;
	*phys = PFN_PHYS(args.pfn);
	follow_pfnmap_end(&args);
	return 0;
}

static void classic_put_pages(struct sg_table *sg_head, void *client_context)
{
	struct registration *reg = client_context;
	struct page_entry *entry, *next;

	guard(mutex)(&lock);
	list_for_each_entry_safe(entry, next, &reg->pages, list) {
		reg->published->pins[(entry->phys - reg->published->start) >> CLASSIC_SHIFT]--;
		list_del(&entry->list);
		kfree(entry);
	}
	reg->npages = 0;
}

static int classic_get_pages(unsigned long addr, size_t size, int write, int force, struct sg_table *sg_head,
			     void *client_context, u64 core_context)
{
	unsigned long at = ALIGN_DOWN(addr, CLASSIC_SIZE), end = ALIGN(addr + size, CLASSIC_SIZE);
	struct registration *reg = client_context;
	struct page_entry *entry;
	int ret = 0;

	reg->addr = addr;
	reg->size = size;
	mmap_read_lock(current->mm);
	for (; at < end; at += CLASSIC_SIZE) {
		entry = kzalloc_obj(*entry);
		if (!entry) {
			ret = -ENOMEM;
			break;
		}
		ret = walk(at, &entry->phys);
		if (!ret && (entry->phys < reg->published->start ||
			     entry->phys - reg->published->start >= reg->published->size))
			ret = -EFAULT;
		if (ret) {
			kfree(entry);
			break;
		}
		mutex_lock(&lock);
		reg->published->pins[(entry->phys - reg->published->start) >> CLASSIC_SHIFT]++;
		list_add_tail(&entry->list, &reg->pages);
		reg->npages++;
		mutex_unlock(&lock);
	}
	mmap_read_unlock(current->mm);
	if (ret)
		classic_put_pages(NULL, reg);
	return ret;
}

static int classic_dma_unmap(struct sg_table *sg_head, void *client_context, struct device *dma_device)
{
	struct registration *reg = client_context;
	struct page_entry *entry;

	list_for_each_entry(entry, &reg->pages, list) {
		if (entry->mapped)
			dma_unmap_resource(dma_device, entry->dma, CLASSIC_SIZE, DMA_BIDIRECTIONAL, 0);
		entry->mapped = false;
	}
	sg_free_table(sg_head);
	return 0;
}

static int classic_dma_map(struct sg_table *sg_head, void *client_context, struct device *dma_device, int dmasync, int *nmap)
{
	struct registration *reg = client_context;
	struct page_entry *entry;
	struct scatterlist *sg;
	int ret;

	/* An adapter without a DMA device accesses memory with the CPU, through pages, and this memory has no pages. */
	if (!dma_device)
		return -EOPNOTSUPP;
	ret = sg_alloc_table(sg_head, reg->npages, GFP_KERNEL);
	if (ret)
		return ret;
	sg = sg_head->sgl;
	list_for_each_entry(entry, &reg->pages, list) {
		entry->dma = dma_map_resource(dma_device, entry->phys, CLASSIC_SIZE, DMA_BIDIRECTIONAL, 0);
		if (dma_mapping_error(dma_device, entry->dma)) {
			classic_dma_unmap(sg_head, reg, dma_device);
			return -EIO;
		}
		entry->mapped = true;
		sg_set_page(sg, NULL, CLASSIC_SIZE, 0);
		sg_dma_address(sg) = entry->dma;
		sg_dma_len(sg) = CLASSIC_SIZE;
		sg = sg_next(sg);
	}
	*nmap = reg->npages;
	return 0;
}

static unsigned long classic_get_page_size(void *client_context)
{
	return CLASSIC_SIZE;
}

static void classic_release(void *client_context)
{
	struct registration *reg = client_context;

	mutex_lock(&lock);
	reg->published->registrations--;
	mutex_unlock(&lock);
	wake_up_all(&unused);
	kfree(reg);
	module_put(THIS_MODULE);
}

static const struct peer_memory_client classic_client = {
	.name = NAME,
	.version = "1",
	.acquire = classic_acquire,
	.get_pages = classic_get_pages,
	.dma_map = classic_dma_map,
	.dma_unmap = classic_dma_unmap,
	.put_pages = classic_put_pages,
	.get_page_size = classic_get_page_size,
	.release = classic_release,
};

/* --- the driver --------------------------------------------------------------------------------------------------- */

static int classic_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct published_bar *new;
	int ret;

	if (bar < 0 || bar > 5 || !(pci_resource_flags(pdev, bar) & IORESOURCE_MEM) ||
	    pci_resource_len(pdev, bar) < CLASSIC_SIZE) {
		pci_err(pdev, "BAR %d cannot be published: it is no memory BAR, or too small\n", bar);
		return -EINVAL;
	}
	ret = pci_enable_device_mem(pdev);
	if (ret)
		return ret;
	new = kzalloc_obj(*new);
	if (!new) {
		ret = -ENOMEM;
		goto disable;
	}
	new->start = pci_resource_start(pdev, bar);
	new->size = ALIGN_DOWN(pci_resource_len(pdev, bar), CLASSIC_SIZE);
	new->pins = kvcalloc(new->size >> CLASSIC_SHIFT, sizeof(*new->pins), GFP_KERNEL);
	if (!new->pins) {
		ret = -ENOMEM;
		goto free;
	}
	ret = pci_request_region(pdev, bar, NAME);
	if (ret)
		goto free;
	mutex_lock(&lock);
	if (published)
		ret = -EBUSY;
	else
		published = new;
	mutex_unlock(&lock);
	if (ret) {
		pci_release_region(pdev, bar);
		goto free;
	}
	pci_set_drvdata(pdev, new);
	return 0;

free:
	kvfree(new->pins);
	kfree(new);
disable:
	pci_disable_device(pdev);
	return ret;
}

static bool is_unused(struct published_bar *old)
{
	guard(mutex)(&lock);
	return !old->registrations;
}

static void classic_remove(struct pci_dev *pdev)
{
	struct published_bar *old = pci_get_drvdata(pdev);

	mutex_lock(&lock);
	published = NULL;
	mutex_unlock(&lock);
	if (mapping)
		unmap_mapping_range(mapping, 0, 0, 1);
	while (!wait_event_timeout(unused, is_unused(old), 10 * HZ))
		pci_warn(pdev, "waiting for registrations to end\n");
	pci_release_region(pdev, bar);
	pci_disable_device(pdev);
	kvfree(old->pins);
	kfree(old);
}

/* No ids: functions are bound by driver_override only. */
static const struct pci_device_id classic_ids[] = { {} };

static struct pci_driver classic_driver = {
	.name = NAME,
	.id_table = classic_ids,
	.probe = classic_probe,
	.remove = classic_remove,
};

static int __init classic_init(void)
{
	int ret;

	ret = pci_register_driver(&classic_driver);
	if (ret)
		return ret;
	ret = misc_register(&classic_device);
	if (ret)
		goto driver;
	/* Without a place for the invalidation function, the client cannot invalidate. */
	client_handle = ib_register_peer_memory_client(&classic_client, NULL);
	if (!client_handle) {
		ret = -EINVAL;
		goto device;
	}
	return 0;

device:
	misc_deregister(&classic_device);
driver:
	pci_unregister_driver(&classic_driver);
	return ret;
}

static void __exit classic_exit(void)
{
	ib_unregister_peer_memory_client(client_handle);
	misc_deregister(&classic_device);
	pci_unregister_driver(&classic_driver);
	if (mapping)
		iput(mapping->host);
}

module_init(classic_init);
module_exit(classic_exit);

MODULE_DESCRIPTION("Peer-memory client of the classic kind, for comparison");
MODULE_LICENSE("GPL");
