// SPDX-License-Identifier: GPL-2.0
/*
 * Contains the bugs that a debug kernel must report, so that tests can check that it does. Loading the module with
 * what=WORD runs one of these bugs, and succeeds:
 *
 *   leak          allocate memory and lose the pointer (kmemleak)
 *   locks         take two mutexes in one order, and then in the other (lockdep)
 *   sleep         sleep with a spinlock held (atomic sleep check)
 *   after-free    read memory that was freed (KASAN)
 */

#include <linux/delay.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

static char *what = "";
module_param(what, charp, 0444);
MODULE_PARM_DESC(what, "leak, locks, sleep or after-free");

static DEFINE_MUTEX(one);
static DEFINE_MUTEX(other);
static DEFINE_SPINLOCK(spin);
static int sum;

static noinline void leak(void)
{
	/* The test looks for the size of the slab object, 1024 bytes. No value in the memory looks like a pointer. */
	u8 *memory = kmalloc(1000, GFP_KERNEL);

	if (memory)
		memset(memory, 0x5a, 1000);
}

static void locks(void)
{
	mutex_lock(&one);
	mutex_lock(&other);
	mutex_unlock(&other);
	mutex_unlock(&one);
	mutex_lock(&other);
	mutex_lock(&one);
	mutex_unlock(&one);
	mutex_unlock(&other);
}

static void sleep(void)
{
	spin_lock(&spin);
	msleep(1);
	spin_unlock(&spin);
}

static void after_free(void)
{
	u8 *memory = kzalloc(100, GFP_KERNEL);
	u8 *freed = memory;

	kfree(memory);
	OPTIMIZER_HIDE_VAR(freed);
	if (freed)
		sum += READ_ONCE(freed[10]);
}

static const struct {
	const char *name;
	void (*function)(void);
} provocations[] = {
	{ "leak", leak },
	{ "locks", locks },
	{ "sleep", sleep },
	{ "after-free", after_free },
};

static int __init provoke_init(void)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(provocations); i++) {
		if (!strcmp(what, provocations[i].name)) {
			provocations[i].function();
			return 0;
		}
	}
	pr_err("p2pmem_provoke: what=%s is none of what it can do\n", what);
	return -EINVAL;
}
module_init(provoke_init);

static void __exit provoke_exit(void)
{
}
module_exit(provoke_exit);

MODULE_DESCRIPTION("Does what a debug kernel is to find");
MODULE_LICENSE("GPL");
