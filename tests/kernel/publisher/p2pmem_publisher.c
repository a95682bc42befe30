// SPDX-License-Identifier: GPL-2.0
/*
 * A driver that registers memory of its device with p2pmem, as an accelerator's own driver would.
 *
 * The driver binds to a device only by driver_override. With the parameter pool, a list of BARs, it then adds these BARs to
 * the kernel's pool and publishes them there, as a driver that does not know p2pmem. The device gets these attributes:
 *
 *   publish   write "BAR OFFSET SIZE RESERVE HOW", with HOW one of paged, pageless and pinned: register that range;
 *             write "off": unregister it. Reads as the provider's id, or 0 if nothing is registered.
 *   revoked   read only: number of calls of the callback that have returned
 *   hold      write 1: the callback waits until 0 is written, at most 30 s. Reads as the number of callbacks in progress,
 *             and the number of times that unregistering returned before the callback returned.
 */

#include <linux/completion.h>
#include <linux/kstrtox.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/p2pmem.h>
#include <linux/pci-p2pdma.h>
#include <linux/pci.h>

static int pool[PCI_STD_NUM_BARS];
static unsigned int pool_bars;
module_param_array(pool, int, &pool_bars, 0644);
MODULE_PARM_DESC(pool, "BARs that go to the kernel's pool when a device is bound");

struct publisher {
	struct mutex lock;	/* protects registration */
	struct p2pmem_registration *registration;
	atomic_t revoked;
	bool hold;
	struct completion released;
	atomic_t inside;
	atomic_t early;
};

static void publisher_revoked(void *context)
{
	struct publisher *p = context;

	atomic_inc(&p->inside);
	if (READ_ONCE(p->hold))
		wait_for_completion_timeout(&p->released, 30 * HZ);
	atomic_inc(&p->revoked);
	atomic_dec(&p->inside);
}

static ssize_t publish_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct publisher *p = dev_get_drvdata(dev);
	u32 id = 0;

	mutex_lock(&p->lock);
	if (p->registration)
		id = p2pmem_registration_id(p->registration);
	mutex_unlock(&p->lock);
	return sysfs_emit(buf, "%u\n", id);
}

static ssize_t publish_store(struct device *dev, struct device_attribute *attr, const char *buf, size_t count)
{
	struct publisher *p = dev_get_drvdata(dev);
	struct p2pmem_publication what = { .revoked = publisher_revoked, .context = p };
	struct p2pmem_registration *made;
	char how[16];
	int ret = 0;

	mutex_lock(&p->lock);
	if (sysfs_streq(buf, "off")) {
		p2pmem_unregister_provider(p->registration);
		p->registration = NULL;
		if (atomic_read(&p->inside))
			atomic_inc(&p->early);
	} else if (sscanf(buf, "%d %llu %llu %llu %15s", &what.bar, &what.offset, &what.size, &what.kernel_reserve,
			  how) != 5) {
		ret = -EINVAL;
	} else {
		if (!strcmp(how, "pageless"))
			what.flags = P2PMEM_PUBLISH_PAGELESS;
		else if (!strcmp(how, "pinned"))
			what.flags = P2PMEM_PUBLISH_PINNED;
		else if (strcmp(how, "paged"))
			what.flags = ~0U;
		made = p2pmem_register_provider(to_pci_dev(dev), &what);
		if (IS_ERR(made))
			ret = PTR_ERR(made);
		else
			p->registration = made;
	}
	mutex_unlock(&p->lock);
	return ret ? ret : count;
}
static DEVICE_ATTR_RW(publish);

static ssize_t revoked_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct publisher *p = dev_get_drvdata(dev);

	return sysfs_emit(buf, "%d\n", atomic_read(&p->revoked));
}
static DEVICE_ATTR_RO(revoked);

static ssize_t hold_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	struct publisher *p = dev_get_drvdata(dev);

	return sysfs_emit(buf, "%d %d\n", atomic_read(&p->inside), atomic_read(&p->early));
}

static ssize_t hold_store(struct device *dev, struct device_attribute *attr, const char *buf, size_t count)
{
	struct publisher *p = dev_get_drvdata(dev);
	bool hold;
	int ret;

	ret = kstrtobool(buf, &hold);
	if (ret)
		return ret;
	if (hold)
		reinit_completion(&p->released);
	WRITE_ONCE(p->hold, hold);
	if (!hold)
		complete_all(&p->released);
	return count;
}
static DEVICE_ATTR_RW(hold);

static struct attribute *publisher_attrs[] = {
	&dev_attr_publish.attr,
	&dev_attr_revoked.attr,
	&dev_attr_hold.attr,
	NULL
};
ATTRIBUTE_GROUPS(publisher);

static int publisher_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct publisher *p;
	unsigned int i;
	int ret;

	ret = pcim_enable_device(pdev);
	if (ret)
		return ret;
	for (i = 0; i < pool_bars; i++) {
		ret = pci_p2pdma_add_resource(pdev, pool[i], 0, 0);
		if (ret)
			return ret;
	}
	if (pool_bars)
		pci_p2pmem_publish(pdev, true);
	p = devm_kzalloc(&pdev->dev, sizeof(*p), GFP_KERNEL);
	if (!p)
		return -ENOMEM;
	mutex_init(&p->lock);
	init_completion(&p->released);
	pci_set_drvdata(pdev, p);
	return 0;
}

static void publisher_remove(struct pci_dev *pdev)
{
	struct publisher *p = pci_get_drvdata(pdev);

	/* p2pmem's bus notifier ran before this function, and has revoked the memory. */
	WARN_ON(p->registration && atomic_read(&p->revoked) == 0);
	p2pmem_unregister_provider(p->registration);
	dev_info(&pdev->dev, "removed, revoked %d times\n", atomic_read(&p->revoked));
}

/* Wants a reset after every error, also after one that left the device working. */
static pci_ers_result_t publisher_error_detected(struct pci_dev *pdev, pci_channel_state_t state)
{
	return PCI_ERS_RESULT_NEED_RESET;
}

static pci_ers_result_t publisher_slot_reset(struct pci_dev *pdev)
{
	return PCI_ERS_RESULT_RECOVERED;
}

static const struct pci_error_handlers publisher_errors = {
	.error_detected = publisher_error_detected,
	.slot_reset = publisher_slot_reset,
};

static struct pci_driver publisher_driver = {
	.name = "p2pmem-publisher",
	.probe = publisher_probe,
	.remove = publisher_remove,
	.dev_groups = publisher_groups,
	.err_handler = &publisher_errors,
};
module_pci_driver(publisher_driver);

MODULE_AUTHOR("The p2pmem developers");
MODULE_DESCRIPTION("A driver that publishes memory of its device through p2pmem, for tests");
MODULE_LICENSE("GPL");
