// SPDX-License-Identifier: GPL-2.0
/*
 * Times pci_p2pmem_find_many(), which no program can call by itself: what the kernel's own choice of a provider costs.
 *
 * A write to /dev/p2pmem-find-many names the clients, domain:bus:device.function each, and a read then gives the
 * nanoseconds of the cheapest of TIMES calls and the provider that the last one chose, or "none".
 */

#include <linux/fs.h>
#include <linux/ktime.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/pci-p2pdma.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

MODULE_DESCRIPTION("Times the kernel's own choice of a provider of peer-to-peer memory");
MODULE_LICENSE("GPL");

#define TIMES		20
#define MOST_CLIENTS	32
#define LINE_LEN	1024

/* Serialises writes, and reads of what they left. */
static DEFINE_MUTEX(lock);
static char answer[64];

static struct pci_dev *function_of(const char *name)
{
	unsigned int domain, bus, device, function;

	if (sscanf(name, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
		return NULL;
	return pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(device, function));
}

static void measure(struct device **clients, int count)
{
	u64 start, took, best = U64_MAX;
	struct pci_dev *found = NULL;
	int i;

	for (i = 0; i < TIMES; i++) {
		pci_dev_put(found);
		start = ktime_get_ns();
		found = pci_p2pmem_find_many(clients, count);
		took = ktime_get_ns() - start;
		best = min(best, took);
	}
	snprintf(answer, sizeof(answer), "%llu %s\n", best, found ? pci_name(found) : "none");
	pci_dev_put(found);
}

static ssize_t find_many_write(struct file *file, const char __user *from, size_t len, loff_t *at)
{
	struct device *clients[MOST_CLIENTS];
	char *text, *rest, *name;
	int count = 0, ret = 0;

	if (!len || len > LINE_LEN)
		return -EINVAL;
	text = memdup_user_nul(from, len);
	if (IS_ERR(text))
		return PTR_ERR(text);
	rest = strim(text);
	while (!ret && (name = strsep(&rest, " "))) {
		struct pci_dev *pdev = count < MOST_CLIENTS ? function_of(name) : NULL;

		if (pdev)
			clients[count++] = &pdev->dev;
		else
			ret = -ENODEV;
	}
	if (!ret) {
		mutex_lock(&lock);
		measure(clients, count);
		mutex_unlock(&lock);
	}
	while (count)
		put_device(clients[--count]);
	kfree(text);
	return ret ?: len;
}

static ssize_t find_many_read(struct file *file, char __user *to, size_t len, loff_t *at)
{
	ssize_t ret;

	mutex_lock(&lock);
	ret = simple_read_from_buffer(to, len, at, answer, strlen(answer));
	mutex_unlock(&lock);
	return ret;
}

static const struct file_operations find_many_fops = {
	.owner = THIS_MODULE,
	.read = find_many_read,
	.write = find_many_write,
};

static struct miscdevice find_many_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "p2pmem-find-many",
	.fops = &find_many_fops,
};

module_misc_device(find_many_device);
