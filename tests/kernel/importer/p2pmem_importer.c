// SPDX-License-Identifier: GPL-2.0
/*
 * An importer of dma-bufs for tests. The importer attaches to a dma-buf as any PCI function, maps the dma-buf, and either
 * ends its mapping or keeps it when the exporter invalidates the mapping.
 *
 * Each open file of /dev/p2pmem-importer is one importer. A write is one command. If the kernel refuses the command, the
 * write fails with the kernel's errno:
 *
 *   attach FD DEVICE [p2p] [notify] [hold]   DEVICE: domain:bus:device.function, or "none" for a device that is no PCI
 *                                            function; p2p: allow peer-to-peer DMA; notify: accept invalidations; hold:
 *                                            keep the mapping when it is invalidated
 *   attach FD DEVICE static                  attach with dma_buf_attach(), without peer-to-peer DMA and invalidations
 *   pin | unpin | map | unmap | detach       call the dma-buf function of that name
 *   fence | signal                           add a fence to the dma-buf, as for DMA in progress, and signal it
 *   invalidate FD                            invalidate all importers' mappings, as an exporter does that is called to
 *                                            reclaim memory
 *   lock FD | unlock                         lock the reservation of a dma-buf until another importer says "unlock", or a
 *                                            fatal signal arrives
 *
 * A read returns the state, as lines of a word and numbers. Closing the file detaches the importer.
 */

#include <linux/completion.h>
#include <linux/dma-buf.h>
#include <linux/dma-fence.h>
#include <linux/dma-resv.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

MODULE_DESCRIPTION("Importer of dma-bufs for tests of p2pmem");
MODULE_LICENSE("GPL");
MODULE_IMPORT_NS("DMA_BUF");

#define COMMAND_LEN	128
#define MOST_ENTRIES	4096

static struct miscdevice importer_device;

/* Ends the command "lock", and whether this command has a reservation locked. */
static DECLARE_COMPLETION(unlocked);
static bool locked;

struct importer {
	/* Serialises commands. Taken before the reservation's lock. */
	struct mutex lock;
	struct dma_buf *dma_buf;
	struct dma_buf_attachment *attachment;
	struct pci_dev *pdev;
	struct dma_fence *fence;
	bool hold;
	/* Changed with the reservation locked. */
	struct sg_table *table;
	unsigned int pins;
	/* Number of invalidations since the file was opened. */
	unsigned int invalidated;
};

static void let_go(struct importer *im)
{
	if (im->table)
		dma_buf_unmap_attachment(im->attachment, im->table, DMA_BIDIRECTIONAL);
	im->table = NULL;
}

static void invalidate(struct dma_buf_attachment *attachment)
{
	struct importer *im = attachment->importer_priv;

	dma_resv_assert_held(attachment->dmabuf->resv);
	im->invalidated++;
	if (!im->hold)
		let_go(im);
}

static const struct dma_buf_attach_ops kinds[2][2] = {
	[false][true] = { .invalidate_mappings = invalidate },
	[true][false] = { .allow_peer2peer = true },
	[true][true] = { .allow_peer2peer = true, .invalidate_mappings = invalidate },
};

static const char *fence_name(struct dma_fence *fence)
{
	return "p2pmem-importer";
}

static const struct dma_fence_ops fence_ops = {
	.get_driver_name = fence_name,
	.get_timeline_name = fence_name,
};

static int attach(struct importer *im, char *words)
{
	bool p2p = false, notify = false, fixed = false;
	char *fd_word = strsep(&words, " "), *name = strsep(&words, " "), *word;
	unsigned int domain, bus, slot, function;
	struct dma_buf_attachment *attachment;
	struct device *dev;
	int fd, ret;

	if (im->dma_buf)
		return -EBUSY;
	if (!fd_word || !name || kstrtoint(fd_word, 10, &fd))
		return -EINVAL;
	im->hold = false;
	while ((word = strsep(&words, " "))) {
		if (!strcmp(word, "p2p"))
			p2p = true;
		else if (!strcmp(word, "notify"))
			notify = true;
		else if (!strcmp(word, "hold"))
			im->hold = true;
		else if (!strcmp(word, "static"))
			fixed = true;
		else
			return -EINVAL;
	}
	if (!strcmp(name, "none")) {
		dev = importer_device.this_device;
	} else {
		if (sscanf(name, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
			return -EINVAL;
		im->pdev = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(slot, function));
		if (!im->pdev)
			return -ENXIO;
		dev = &im->pdev->dev;
	}
	im->dma_buf = dma_buf_get(fd);
	if (IS_ERR(im->dma_buf)) {
		ret = PTR_ERR(im->dma_buf);
		goto put_device;
	}
	if (fixed)
		attachment = dma_buf_attach(im->dma_buf, dev);
	else
		attachment = dma_buf_dynamic_attach(im->dma_buf, dev, &kinds[p2p][notify], im);
	if (IS_ERR(attachment)) {
		ret = PTR_ERR(attachment);
		dma_buf_put(im->dma_buf);
		goto put_device;
	}
	im->attachment = attachment;
	return 0;

put_device:
	im->dma_buf = NULL;
	pci_dev_put(im->pdev);
	im->pdev = NULL;
	return ret;
}

static int map(struct importer *im)
{
	struct sg_table *table;

	if (im->table)
		return -EBUSY;
	table = dma_buf_map_attachment(im->attachment, DMA_BIDIRECTIONAL);
	if (IS_ERR(table))
		return PTR_ERR(table);
	im->table = table;
	return 0;
}

static int pin(struct importer *im)
{
	int ret = im->attachment->importer_ops ? dma_buf_pin(im->attachment) : -EOPNOTSUPP;

	im->pins += !ret;
	return ret;
}

static int unpin(struct importer *im)
{
	if (!im->pins)
		return -EINVAL;
	im->pins--;
	dma_buf_unpin(im->attachment);
	return 0;
}

static int add_fence(struct importer *im)
{
	int ret;

	if (im->fence)
		return -EBUSY;
	ret = dma_resv_reserve_fences(im->dma_buf->resv, 1);
	if (ret)
		return ret;
	im->fence = kzalloc(sizeof(*im->fence), GFP_KERNEL);
	if (!im->fence)
		return -ENOMEM;
	dma_fence_init(im->fence, &fence_ops, NULL, dma_fence_context_alloc(1), 1);
	dma_resv_add_fence(im->dma_buf->resv, im->fence, DMA_RESV_USAGE_BOOKKEEP);
	return 0;
}

static int signal(struct importer *im)
{
	if (!im->fence)
		return -EINVAL;
	dma_fence_signal(im->fence);
	dma_fence_put(im->fence);
	im->fence = NULL;
	return 0;
}

static void detach(struct importer *im)
{
	dma_resv_lock(im->dma_buf->resv, NULL);
	let_go(im);
	while (im->pins)
		unpin(im);
	dma_resv_unlock(im->dma_buf->resv);
	signal(im);
	dma_buf_detach(im->dma_buf, im->attachment);
	dma_buf_put(im->dma_buf);
	pci_dev_put(im->pdev);
	im->dma_buf = NULL;
	im->attachment = NULL;
	im->pdev = NULL;
}

static struct dma_buf *named(char *words)
{
	int fd, ret;

	ret = kstrtoint(words ?: "", 10, &fd);
	return ret ? ERR_PTR(ret) : dma_buf_get(fd);
}

static int lock(char *words)
{
	struct dma_buf *dma_buf = named(words);
	int ret;

	if (IS_ERR(dma_buf))
		return PTR_ERR(dma_buf);
	reinit_completion(&unlocked);
	dma_resv_lock(dma_buf->resv, NULL);
	WRITE_ONCE(locked, true);
	ret = wait_for_completion_killable(&unlocked);
	WRITE_ONCE(locked, false);
	dma_resv_unlock(dma_buf->resv);
	dma_buf_put(dma_buf);
	return ret;
}

static int invalidate_in_reclaim(char *words)
{
	struct dma_buf *dma_buf = named(words);

	if (IS_ERR(dma_buf))
		return PTR_ERR(dma_buf);
	dma_resv_lock(dma_buf->resv, NULL);
	/* Lockdep then reports locks of importers that are held elsewhere while memory is allocated. */
	fs_reclaim_acquire(GFP_KERNEL);
	dma_buf_invalidate_mappings(dma_buf);
	fs_reclaim_release(GFP_KERNEL);
	dma_resv_unlock(dma_buf->resv);
	dma_buf_put(dma_buf);
	return 0;
}

static int command(struct importer *im, char *words)
{
	char *word = strsep(&words, " ");
	int ret = -EINVAL;

	if (!strcmp(word, "attach"))
		return attach(im, words);
	if (!strcmp(word, "invalidate"))
		return invalidate_in_reclaim(words);
	if (!strcmp(word, "lock"))
		return lock(words);
	if (!strcmp(word, "unlock")) {
		complete(&unlocked);
		return 0;
	}
	if (!im->dma_buf)
		return -ENOTCONN;
	if (!strcmp(word, "detach")) {
		detach(im);
		return 0;
	}
	dma_resv_lock(im->dma_buf->resv, NULL);
	if (!strcmp(word, "map")) {
		ret = map(im);
	} else if (!strcmp(word, "unmap")) {
		ret = im->table ? 0 : -EINVAL;
		let_go(im);
	} else if (!strcmp(word, "pin")) {
		ret = pin(im);
	} else if (!strcmp(word, "unpin")) {
		ret = unpin(im);
	} else if (!strcmp(word, "fence")) {
		ret = add_fence(im);
	} else if (!strcmp(word, "signal")) {
		ret = signal(im);
	}
	dma_resv_unlock(im->dma_buf->resv);
	return ret;
}

static ssize_t importer_write(struct file *file, const char __user *from, size_t len, loff_t *pos)
{
	struct importer *im = file->private_data;
	char line[COMMAND_LEN] = {};
	int ret;

	if (len >= sizeof(line))
		return -E2BIG;
	if (copy_from_user(line, from, len))
		return -EFAULT;
	mutex_lock(&im->lock);
	ret = command(im, strim(line));
	mutex_unlock(&im->lock);
	return ret ?: len;
}

/* Returns the whole state at each read, from any file position. */
static ssize_t importer_read(struct file *file, char __user *to, size_t len, loff_t *pos)
{
	struct importer *im = file->private_data;
	struct scatterlist *sg;
	size_t done = 0, room;
	char *text;
	int i;

	room = min_t(size_t, len, 64 * MOST_ENTRIES);
	text = kvmalloc(room, GFP_KERNEL);
	if (!text)
		return -ENOMEM;
	mutex_lock(&im->lock);
	if (im->dma_buf)
		dma_resv_lock(im->dma_buf->resv, NULL);
	done += scnprintf(text + done, room - done, "attached %d\nmapped %d\npins %u\ninvalidated %u\nlocked %d\n",
			  !!im->attachment, !!im->table, im->pins, im->invalidated, READ_ONCE(locked));
	if (im->table) {
		done += scnprintf(text + done, room - done, "orig_nents %u\nnents %u\n", im->table->orig_nents,
				  im->table->nents);
		for_each_sgtable_dma_sg(im->table, sg, i)
			done += scnprintf(text + done, room - done, "entry %#llx %#x\n", (u64)sg_dma_address(sg),
					  sg_dma_len(sg));
	}
	if (im->dma_buf)
		dma_resv_unlock(im->dma_buf->resv);
	mutex_unlock(&im->lock);
	if (copy_to_user(to, text, done))
		done = -EFAULT;
	kvfree(text);
	return done;
}

static int importer_open(struct inode *inode, struct file *file)
{
	struct importer *im = kzalloc(sizeof(*im), GFP_KERNEL);

	if (!im)
		return -ENOMEM;
	mutex_init(&im->lock);
	file->private_data = im;
	return 0;
}

static int importer_release(struct inode *inode, struct file *file)
{
	struct importer *im = file->private_data;

	if (im->dma_buf)
		detach(im);
	mutex_destroy(&im->lock);
	kfree(im);
	return 0;
}

static const struct file_operations importer_fops = {
	.owner = THIS_MODULE,
	.open = importer_open,
	.release = importer_release,
	.read = importer_read,
	.write = importer_write,
	.llseek = noop_llseek,
};

static struct miscdevice importer_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "p2pmem-importer",
	.fops = &importer_fops,
	.mode = 0600,
};
module_misc_device(importer_device);
