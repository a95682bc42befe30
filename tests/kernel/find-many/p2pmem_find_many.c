// SPDX-License-Identifier: GPL-2.0
/*
 * Measures the kernel's own choice of a provider, and reads its distances. User space cannot call either.
 *
 * A write to /dev/p2pmem-find-many contains lists of clients, separated by semicolons; a client is
 * domain:bus:device.function. A read then returns three words:
 *
 *   - the nanoseconds of pci_p2pmem_find_many() for one list;
 *   - the nanoseconds of pci_p2pmem_find_many(), pci_alloc_p2pmem() and pci_free_p2pmem() of one page together;
 *   - the last provider found, or "none".
 *
 * With several lists, a time is the mean of one round over all lists. Both times are those of the fastest of TIMES rounds.
 *
 * After a write of "distances" and a provider, a read returns a line for each function of the machine: its address, and the
 * result of pci_p2pdma_distance_many(). The provider has to stay bound to its driver meanwhile.
 */

#include <linux/fs.h>
#include <linux/ktime.h>
#include <linux/math64.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/pci-p2pdma.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

MODULE_DESCRIPTION("Times the kernel's own choice of a provider of peer-to-peer memory, and reads its distances");
MODULE_LICENSE("GPL");

#define TIMES		20
#define MOST_CLIENTS	32
#define MOST_LISTS	32
#define LINE_LEN	8192
#define ANSWER_LEN	65536

struct clients {
	struct device *devices[MOST_CLIENTS];
	int count;
};

/* Protects lists and answer. */
static DEFINE_MUTEX(lock);
static struct clients lists[MOST_LISTS];
static char answer[ANSWER_LEN];

static struct pci_dev *function_of(const char *name)
{
	unsigned int domain, bus, device, function;

	if (sscanf(name, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
		return NULL;
	return pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(device, function));
}

/* Finds a provider for one list. With @take, also allocates and frees a page of the provider. Adds the time to @took. */
static int find(struct clients *list, bool take, u64 *took, struct pci_dev **found)
{
	u64 start = ktime_get_ns();
	void *page = NULL;

	*found = pci_p2pmem_find_many(list->devices, list->count);
	if (*found && take) {
		page = pci_alloc_p2pmem(*found, PAGE_SIZE);
		if (page)
			pci_free_p2pmem(*found, page, PAGE_SIZE);
	}
	*took += ktime_get_ns() - start;
	return *found && take && !page ? -ENOMEM : 0;
}

/* Returns in @best the mean nanoseconds for a list in the fastest round, and in @found a reference to the last provider. */
static int measure(int count, bool take, u64 *best, struct pci_dev **found)
{
	int round, i, ret;

	*best = U64_MAX;
	*found = NULL;
	for (round = 0; round < TIMES; round++) {
		u64 took = 0;

		for (i = 0; i < count; i++) {
			pci_dev_put(*found);
			ret = find(&lists[i], take, &took, found);
			if (ret)
				return ret;
		}
		*best = min(*best, div_u64(took, count));
	}
	return 0;
}

static int measure_both(int count)
{
	struct pci_dev *found;
	u64 decide, whole;
	int ret;

	ret = measure(count, false, &decide, &found);
	pci_dev_put(found);
	if (ret)
		return ret;
	ret = measure(count, true, &whole, &found);
	if (!ret)
		snprintf(answer, sizeof(answer), "%llu %llu %s\n", decide, whole, found ? pci_name(found) : "none");
	pci_dev_put(found);
	return ret;
}

/* Fills a list from names, separated by spaces. The list holds a reference to each of its devices, also after an error. */
static int parse(struct clients *list, char *text)
{
	char *name;

	text = strim(text);
	while ((name = strsep(&text, " "))) {
		struct pci_dev *pdev = list->count < MOST_CLIENTS ? function_of(name) : NULL;

		if (!pdev)
			return -ENODEV;
		list->devices[list->count++] = &pdev->dev;
	}
	return 0;
}

static int distances(const char *name)
{
	struct pci_dev *provider = function_of(name), *client = NULL;
	size_t used = 0;

	if (!provider)
		return -ENODEV;
	answer[0] = '\0';
	for_each_pci_dev(client) {
		struct device *dev = &client->dev;

		used += scnprintf(answer + used, sizeof(answer) - used, "%s %d\n", pci_name(client),
				  pci_p2pdma_distance_many(provider, &dev, 1, false));
	}
	pci_dev_put(provider);
	return used < sizeof(answer) - 1 ? 0 : -E2BIG;
}

static int measure_lists(char *rest)
{
	char *one;
	int count = 0, ret = 0;

	while (!ret && (one = strsep(&rest, ";")))
		ret = count < MOST_LISTS ? parse(&lists[count++], one) : -E2BIG;
	if (!ret)
		ret = measure_both(count);
	while (count) {
		struct clients *list = &lists[--count];

		while (list->count)
			put_device(list->devices[--list->count]);
	}
	return ret;
}

static ssize_t find_many_write(struct file *file, const char __user *from, size_t len, loff_t *at)
{
	size_t word;
	char *text;
	int ret;

	if (!len || len > LINE_LEN)
		return -EINVAL;
	text = memdup_user_nul(from, len);
	if (IS_ERR(text))
		return PTR_ERR(text);
	word = str_has_prefix(text, "distances ");
	mutex_lock(&lock);
	ret = word ? distances(text + word) : measure_lists(text);
	mutex_unlock(&lock);
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
