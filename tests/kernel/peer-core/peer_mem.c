// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
/*
 * Peer memory: umems of memory that get_user_pages() refuses, from clients that other modules register.
 *
 * The test bed's own implementation of the published interface. It is stricter than others: it checks what a client
 * returns (it writes errors to the kernel log, and the registration fails), and it counts and logs every call, in order,
 * for tests: /sys/kernel/debug/ib_peer_mem/{clients,umems,log}.
 *
 * Locks: clients_lock (a mutex) is held for the list of clients and around acquire(). Each umem has a mutex, held around
 * get_pages(), dma_map(), dma_unmap() and put_pages(), and while the driver makes or revokes its MR. A client that holds
 * a lock of its own while it invalidates must not take that lock in any of these four calls: as with the vendors' cores,
 * that is a deadlock, and lockdep reports it.
 */

#define pr_fmt(fmt) "ib_peer_mem: " fmt

#include <linux/completion.h>
#include <linux/debugfs.h>
#include <linux/kref.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/sched/mm.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string_choices.h>
#include <linux/xarray.h>
#include <rdma/ib_umem.h>
#include <rdma/peer_mem.h>

#include "core_priv.h"

enum call {
	CALL_REGISTER,
	CALL_UNREGISTER,
	CALL_ACQUIRE,
	CALL_GET_PAGES,
	CALL_DMA_MAP,
	CALL_GET_PAGE_SIZE,
	CALL_DMA_UNMAP,
	CALL_PUT_PAGES,
	CALL_RELEASE,
	CALL_INVALIDATE,
	CALL_REVOKE,
	CALLS
};

static const char *const call_names[CALLS] = {
	"register", "unregister", "acquire",  "get_pages",  "dma_map", "get_page_size",
	"dma_unmap", "put_pages", "release", "invalidate", "revoke",
};

struct client {
	struct list_head list;
	const struct peer_memory_client *ops;
	char name[IB_PEER_MEMORY_NAME_MAX];
	char version[IB_PEER_MEMORY_VER_MAX];
	bool extended;
	bool invalidates;
	u32 flags;
	/* One reference of the registration, and one of each umem. */
	struct kref ref;
	struct completion unused;
	/* Protected by log_lock. */
	u64 calls[CALLS];
	u64 errors[CALLS];
};

enum state {
	STATE_NEW,
	STATE_MAPPED,
	STATE_INVALIDATED,
	STATE_ENDED,
};

static const char *const state_names[] = { "new", "mapped", "invalidated", "ended" };

struct ib_umem_peer {
	struct ib_umem umem;
	struct kref ref;
	struct client *client;
	void *context;
	/* The core context that the client passes to invalidate; also the umem's number in the log. */
	u64 id;
	pid_t pid;
	char device[IB_DEVICE_NAME_MAX];

	struct mutex lock;
	/* Whether the caller that makes or ends the MR holds the lock. Only that caller reads or writes the field. */
	bool held;
	enum state state;
	/* As dma_map() filled it in; trim() may cut it. */
	struct sg_table sgt;
	int nmap;
	struct scatterlist *first, *last;
	unsigned long first_trim, last_trim;
	int (*revoke)(void *priv);
	void *revoke_priv;
};

static DEFINE_MUTEX(clients_lock);
static LIST_HEAD(clients);

/* Umems by number. A umem in the array is alive while the array's lock is held. */
static DEFINE_XARRAY_ALLOC1(umems);
static atomic64_t next_id = ATOMIC64_INIT(0);

struct entry {
	u64 number;
	u64 id;
	enum call call;
	long result;
	unsigned long addr;
	size_t size;
	pid_t pid;
	char client[24];
	char device[IB_DEVICE_NAME_MAX];
};

#define LOG_ENTRIES 4096
static DEFINE_SPINLOCK(log_lock);
static struct entry *log_entries;
/* The number of lines ever logged, and the number of those that were cleared. */
static u64 log_count, log_cleared;
static struct dentry *debugfs;

static void log_call(struct client *client, enum call call, const struct ib_umem_peer *peer, long result)
{
	struct entry *entry;

	guard(spinlock)(&log_lock);
	client->calls[call]++;
	if (result < 0)
		client->errors[call]++;
	if (!log_entries)
		return;
	entry = &log_entries[log_count % LOG_ENTRIES];
	*entry = (struct entry){ .number = log_count++, .call = call, .result = result, .pid = current->tgid };
	strscpy(entry->client, client->name);
	if (peer) {
		entry->id = peer->id;
		entry->addr = peer->umem.address;
		entry->size = peer->umem.length;
		strscpy(entry->device, peer->device);
	}
}

/* --- clients ------------------------------------------------------------------------------------------------------ */

static void client_unused(struct kref *ref)
{
	complete(&container_of(ref, struct client, ref)->unused);
}

static int invalidate(void *handle, u64 core_context);

void *ib_register_peer_memory_client(const struct peer_memory_client *ops, invalidate_peer_memory *invalidate_callback)
{
	const struct peer_memory_client_ex *ex = container_of(ops, struct peer_memory_client_ex, client);
	struct client *client;

	if (!ops->acquire || !ops->get_pages || !ops->dma_map || !ops->dma_unmap || !ops->put_pages ||
	    !ops->get_page_size || !ops->release) {
		pr_err("client %.*s does not have a function\n", IB_PEER_MEMORY_NAME_MAX, ops->name);
		return NULL;
	}
	client = kzalloc_obj(*client);
	if (!client)
		return NULL;
	client->ops = ops;
	kref_init(&client->ref);
	init_completion(&client->unused);
	strscpy(client->name, ops->name);
	strscpy(client->version, ops->version);
	client->extended = ops->version[IB_PEER_MEMORY_VER_MAX - 1] != 0 &&
			   ex->ex_size >= offsetofend(struct peer_memory_client_ex, flags);
	if (client->extended)
		client->flags = ex->flags;
	if (client->flags & ~PEER_MEM_INVALIDATE_UNMAPS) {
		pr_err("client %s has flags %#x, which nobody knows\n", client->name, client->flags);
		kfree(client);
		return NULL;
	}
	client->invalidates = invalidate_callback != NULL;
	if (invalidate_callback)
		*invalidate_callback = invalidate;
	log_call(client, CALL_REGISTER, NULL, 0);
	mutex_lock(&clients_lock);
	list_add_tail(&client->list, &clients);
	mutex_unlock(&clients_lock);
	return client;
}
EXPORT_SYMBOL(ib_register_peer_memory_client);

void ib_unregister_peer_memory_client(void *handle)
{
	struct client *client = handle;

	mutex_lock(&clients_lock);
	list_del(&client->list);
	mutex_unlock(&clients_lock);
	log_call(client, CALL_UNREGISTER, NULL, 0);
	kref_put(&client->ref, client_unused);
	while (!wait_for_completion_timeout(&client->unused, 10 * HZ))
		pr_warn("client %s waits for its last registration to end\n", client->name);
	kfree(client);
}
EXPORT_SYMBOL(ib_unregister_peer_memory_client);

/* Calls acquire() of the clients in the order of their registration. Returns whether one accepted the umem. */
static bool acquire(struct ib_umem_peer *peer)
{
	struct client *client;
	int result;

	guard(mutex)(&clients_lock);
	list_for_each_entry(client, &clients, list) {
		result = client->ops->acquire(peer->umem.address, peer->umem.length, NULL, NULL, &peer->context);
		log_call(client, CALL_ACQUIRE, peer, result);
		if (result > 1)
			pr_warn("client %s: acquire() gave %d\n", client->name, result);
		if (result == 1) {
			kref_get(&client->ref);
			peer->client = client;
			return true;
		}
	}
	return false;
}

/* --- the client's list of entries --------------------------------------------------------------------------------- */

/* Returns whether the entries are whole pages, and together cover the range in pages of that size. */
static int check_entries(struct ib_umem_peer *peer, unsigned long page_size)
{
	const char *name = peer->client->name;
	u64 start = ALIGN_DOWN(peer->umem.address, page_size);
	u64 want = ALIGN(peer->umem.address + peer->umem.length, page_size) - start;
	bool pages = !peer->umem.ibdev->dma_device;
	struct scatterlist *sg;
	u64 total = 0;
	int i;

	if (pages && page_size != PAGE_SIZE) {
		pr_warn("client %s: pages of %lu bytes for a device without DMA\n", name, page_size);
		return -EOPNOTSUPP;
	}
	if (peer->nmap <= 0 || !peer->sgt.sgl || (pages ? peer->sgt.orig_nents : peer->sgt.nents) != peer->nmap) {
		pr_warn("client %s: a table of %u entries, and %d mapped\n", name, peer->sgt.nents, peer->nmap);
		return -EINVAL;
	}
	for_each_sg(peer->sgt.sgl, sg, peer->nmap, i) {
		u64 at = pages ? sg->offset : sg_dma_address(sg);
		u64 length = pages ? sg->length : sg_dma_len(sg);

		if (!length || !PAGE_ALIGNED(at) || !PAGE_ALIGNED(length)) {
			pr_warn("client %s: entry %d is %#llx bytes at %#llx, no whole pages\n", name, i, length, at);
			return -EINVAL;
		}
		if (pages && !sg_page(sg)) {
			pr_warn("client %s: entry %d has no pages, and the device has no DMA\n", name, i);
			return -EOPNOTSUPP;
		}
		total += length;
	}
	if (total != want) {
		pr_warn("client %s: %llu bytes mapped instead of %llu\n", name, total, want);
		return -EINVAL;
	}
	return 0;
}

/* Cuts entries of larger pages to the range's own pages. untrim() restores them. */
static void trim(struct ib_umem_peer *peer, unsigned long page_size)
{
	unsigned long addr = peer->umem.address, end = addr + peer->umem.length;
	struct scatterlist *sg;
	int i;

	peer->first = peer->sgt.sgl;
	peer->last = NULL;
	for_each_sg(peer->sgt.sgl, sg, peer->nmap, i)
		peer->last = sg;
	peer->first_trim = ALIGN_DOWN(addr, PAGE_SIZE) - ALIGN_DOWN(addr, page_size);
	peer->last_trim = ALIGN(end, page_size) - ALIGN(end, PAGE_SIZE);
	if (peer->first_trim) {
		sg_dma_address(peer->first) += peer->first_trim;
		sg_dma_len(peer->first) -= peer->first_trim;
	}
	if (peer->last_trim)
		sg_dma_len(peer->last) -= peer->last_trim;
}

static void untrim(struct ib_umem_peer *peer)
{
	if (peer->first_trim) {
		sg_dma_address(peer->first) -= peer->first_trim;
		sg_dma_len(peer->first) += peer->first_trim;
	}
	if (peer->last_trim)
		sg_dma_len(peer->last) += peer->last_trim;
	peer->first_trim = 0;
	peer->last_trim = 0;
}

/* --- umems -------------------------------------------------------------------------------------------------------- */

static void peer_free(struct kref *ref)
{
	struct ib_umem_peer *peer = container_of(ref, struct ib_umem_peer, ref);

	mutex_destroy(&peer->lock);
	kfree(peer);
}

static void unmap(struct ib_umem_peer *peer)
{
	const struct peer_memory_client *ops = peer->client->ops;
	int result;

	untrim(peer);
	result = ops->dma_unmap(&peer->sgt, peer->context, peer->umem.ibdev->dma_device);
	log_call(peer->client, CALL_DMA_UNMAP, peer, result);
	ops->put_pages(&peer->sgt, peer->context);
	log_call(peer->client, CALL_PUT_PAGES, peer, 0);
}

static int map(struct ib_umem_peer *peer)
{
	struct client *client = peer->client;
	const struct peer_memory_client *ops = client->ops;
	struct ib_umem *umem = &peer->umem;
	unsigned long page_size;
	int ret;

	ret = ops->get_pages(umem->address, umem->length, 1, !umem->writable, NULL, peer->context,
			     client->invalidates ? peer->id : 0);
	log_call(client, CALL_GET_PAGES, peer, ret);
	if (ret)
		return ret;
	ret = ops->dma_map(&peer->sgt, peer->context, umem->ibdev->dma_device, 0, &peer->nmap);
	log_call(client, CALL_DMA_MAP, peer, ret ?: peer->nmap);
	if (ret) {
		ops->put_pages(&peer->sgt, peer->context);
		log_call(client, CALL_PUT_PAGES, peer, 0);
		return ret;
	}
	page_size = ops->get_page_size(peer->context);
	log_call(client, CALL_GET_PAGE_SIZE, peer, page_size);
	if (page_size < PAGE_SIZE || !is_power_of_2(page_size)) {
		pr_warn("client %s: pages of %lu bytes\n", client->name, page_size);
		ret = -EINVAL;
	} else {
		ret = check_entries(peer, page_size);
	}
	if (ret) {
		unmap(peer);
		return ret;
	}
	umem->sgt_append.sgt = peer->sgt;
	umem->sgt_append.sgt.nents = peer->nmap;
	trim(peer, page_size);
	peer->state = STATE_MAPPED;
	return 0;
}

static void let_go(struct ib_umem_peer *peer)
{
	struct client *client = peer->client;

	if (client) {
		client->ops->release(peer->context);
		log_call(client, CALL_RELEASE, peer, 0);
		kref_put(&client->ref, client_unused);
	}
	kref_put(&peer->ref, peer_free);
}

/*
 * ib_peer_umem_get - Looks for a client of memory that get_user_pages() refused with @error.
 *
 * @umem is filled in except for its pages, which are accounted for. Returns a umem that replaces @umem, with its lock
 * held, or an error: @error itself if no client accepts the memory.
 */
struct ib_umem *ib_peer_umem_get(const struct ib_umem *umem, int error)
{
	struct ib_umem_peer *peer;
	int ret;

	if (list_empty_careful(&clients))
		return ERR_PTR(error);
	peer = kzalloc_obj(*peer);
	if (!peer)
		return ERR_PTR(-ENOMEM);
	kref_init(&peer->ref);
	mutex_init(&peer->lock);
	peer->umem = *umem;
	memset(&peer->umem.sgt_append, 0, sizeof(peer->umem.sgt_append));
	peer->umem.is_peer = 1;
	peer->id = atomic64_inc_return(&next_id);
	peer->pid = current->tgid;
	strscpy(peer->device, dev_name(&umem->ibdev->dev));
	if (!acquire(peer)) {
		let_go(peer);
		return ERR_PTR(error);
	}
	/* From get_pages() on, the client may invalidate the umem. The callback then waits for the lock. */
	mutex_lock(&peer->lock);
	ret = xa_insert(&umems, peer->id, peer, GFP_KERNEL);
	if (!ret) {
		ret = map(peer);
		if (ret)
			xa_erase(&umems, peer->id);
	}
	if (ret) {
		peer->state = STATE_ENDED;
		mutex_unlock(&peer->lock);
		let_go(peer);
		return ERR_PTR(ret);
	}
	peer->held = true;
	return &peer->umem;
}

static struct ib_umem_peer *to_peer(struct ib_umem *umem)
{
	return container_of(umem, struct ib_umem_peer, umem);
}

/**
 * ib_umem_peer_lock - Keeps a peer umem from being invalidated
 * @umem: the umem
 *
 * For the caller that makes or ends the MR, which may hold the lock already: ib_umem_get_peer() returns with the lock
 * held, and ib_umem_release() releases it.
 */
void ib_umem_peer_lock(struct ib_umem *umem)
{
	struct ib_umem_peer *peer = to_peer(umem);

	if (!peer->held) {
		mutex_lock(&peer->lock);
		peer->held = true;
	}
}
EXPORT_SYMBOL(ib_umem_peer_lock);

/**
 * ib_umem_peer_unlock - Releases the lock of ib_umem_get_peer() or ib_umem_peer_lock()
 * @umem: the umem
 */
void ib_umem_peer_unlock(struct ib_umem *umem)
{
	struct ib_umem_peer *peer = to_peer(umem);

	peer->held = false;
	mutex_unlock(&peer->lock);
}
EXPORT_SYMBOL(ib_umem_peer_unlock);

/**
 * ib_umem_peer_set_revoke - Sets the function that stops all access to a peer umem, and marks the umem as in use
 * @umem: the umem, locked; it is unlocked
 * @revoke: called at most once, and not after the umem's release; must end all access permanently before it returns
 * @priv: argument of @revoke
 */
void ib_umem_peer_set_revoke(struct ib_umem *umem, int (*revoke)(void *priv), void *priv)
{
	struct ib_umem_peer *peer = to_peer(umem);

	lockdep_assert_held(&peer->lock);
	peer->revoke = revoke;
	peer->revoke_priv = priv;
	ib_umem_peer_unlock(umem);
}
EXPORT_SYMBOL(ib_umem_peer_set_revoke);

/**
 * ib_umem_peer_revoked - Returns whether a peer umem was invalidated
 * @umem: the umem, locked
 */
bool ib_umem_peer_revoked(struct ib_umem *umem)
{
	lockdep_assert_held(&to_peer(umem)->lock);
	return to_peer(umem)->state == STATE_INVALIDATED;
}
EXPORT_SYMBOL(ib_umem_peer_revoked);

void ib_peer_umem_release(struct ib_umem *umem)
{
	struct ib_umem_peer *peer = to_peer(umem);

	ib_umem_peer_lock(umem);
	if (peer->state == STATE_MAPPED)
		unmap(peer);
	peer->state = STATE_ENDED;
	peer->revoke = NULL;
	ib_umem_peer_unlock(umem);
	xa_erase(&umems, peer->id);
	let_go(peer);
}

/* The callback that clients call to invalidate a umem. */
static int invalidate(void *handle, u64 core_context)
{
	struct client *client = handle;
	struct ib_umem_peer *peer;
	int ret;

	xa_lock(&umems);
	peer = xa_load(&umems, core_context);
	/* The umem may be released at the same time; the reference keeps its memory until this function returns. */
	if (peer && !kref_get_unless_zero(&peer->ref))
		peer = NULL;
	xa_unlock(&umems);
	if (!peer)
		return 0;
	if (WARN_ON(peer->client != client)) {
		kref_put(&peer->ref, peer_free);
		return 0;
	}
	mutex_lock(&peer->lock);
	if (peer->state == STATE_MAPPED) {
		log_call(client, CALL_INVALIDATE, peer, 0);
		if (peer->revoke) {
			ret = peer->revoke(peer->revoke_priv);
			log_call(client, CALL_REVOKE, peer, ret);
			if (ret)
				pr_err("%s could not revoke a registration: %d\n", peer->device, ret);
			peer->revoke = NULL;
		}
		/* With the flag, only the client uses its table from here on. */
		if (client->flags & PEER_MEM_INVALIDATE_UNMAPS)
			untrim(peer);
		else
			unmap(peer);
		memset(&peer->umem.sgt_append, 0, sizeof(peer->umem.sgt_append));
		memset(&peer->sgt, 0, sizeof(peer->sgt));
		peer->state = STATE_INVALIDATED;
	}
	mutex_unlock(&peer->lock);
	kref_put(&peer->ref, peer_free);
	return 0;
}

/* --- debugfs files for tests -------------------------------------------------------------------------------------- */

static int clients_show(struct seq_file *file, void *unused)
{
	struct client *client;
	enum call call;

	guard(mutex)(&clients_lock);
	list_for_each_entry(client, &clients, list) {
		seq_printf(file, "client=%s version=%s form=%s flags=%#x invalidates=%s umems=%u", client->name, client->version,
			   client->extended ? "ex" : "legacy", client->flags, str_yes_no(client->invalidates),
			   kref_read(&client->ref) - 1);
		guard(spinlock)(&log_lock);
		for (call = CALL_ACQUIRE; call < CALLS; call++)
			seq_printf(file, " %s=%llu", call_names[call], client->calls[call]);
		for (call = CALL_ACQUIRE; call < CALLS; call++)
			if (client->errors[call])
				seq_printf(file, " %s_errors=%llu", call_names[call], client->errors[call]);
		seq_putc(file, '\n');
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(clients);

static int umems_show(struct seq_file *file, void *unused)
{
	struct ib_umem_peer *peer;
	unsigned long id;

	xa_lock(&umems);
	xa_for_each(&umems, id, peer)
		seq_printf(file, "id=%llu client=%s device=%s pid=%d addr=%#lx size=%zu entries=%d state=%s\n", peer->id,
			   peer->client->name, peer->device, peer->pid, peer->umem.address, peer->umem.length, peer->nmap,
			   state_names[peer->state]);
	xa_unlock(&umems);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(umems);

static void *log_start(struct seq_file *file, loff_t *pos)
{
	u64 *number = &((u64 *)file->private)[0];

	spin_lock(&log_lock);
	*number = max(log_cleared, log_count > LOG_ENTRIES ? log_count - LOG_ENTRIES : 0) + *pos;
	return log_entries && *number < log_count ? number : NULL;
}

static void *log_next(struct seq_file *file, void *at, loff_t *pos)
{
	u64 *number = at;

	++*pos;
	return ++*number < log_count ? number : NULL;
}

static void log_stop(struct seq_file *file, void *at)
{
	spin_unlock(&log_lock);
}

static int log_line(struct seq_file *file, void *at)
{
	const struct entry *entry = &log_entries[*(u64 *)at % LOG_ENTRIES];

	seq_printf(file, "%llu client=%s call=%s", entry->number, entry->client, call_names[entry->call]);
	if (entry->id)
		seq_printf(file, " id=%llu device=%s addr=%#lx size=%zu", entry->id, entry->device, entry->addr, entry->size);
	seq_printf(file, " pid=%d result=%ld\n", entry->pid, entry->result);
	return 0;
}

static const struct seq_operations log_operations = {
	.start = log_start,
	.next = log_next,
	.stop = log_stop,
	.show = log_line,
};

static int log_open(struct inode *inode, struct file *file)
{
	return seq_open_private(file, &log_operations, sizeof(u64));
}

/* Any write clears the log. */
static ssize_t log_write(struct file *file, const char __user *from, size_t size, loff_t *pos)
{
	guard(spinlock)(&log_lock);
	log_cleared = log_count;
	return size;
}

static const struct file_operations log_fops = {
	.owner = THIS_MODULE,
	.open = log_open,
	.read = seq_read,
	.write = log_write,
	.llseek = seq_lseek,
	.release = seq_release_private,
};

void ib_peer_mem_init(void)
{
	/* If this fails there is no log; everything else works. */
	log_entries = kvcalloc(LOG_ENTRIES, sizeof(*log_entries), GFP_KERNEL);
	debugfs = debugfs_create_dir("ib_peer_mem", NULL);
	debugfs_create_file("clients", 0400, debugfs, NULL, &clients_fops);
	debugfs_create_file("umems", 0400, debugfs, NULL, &umems_fops);
	debugfs_create_file("log", 0600, debugfs, NULL, &log_fops);
}

void ib_peer_mem_exit(void)
{
	debugfs_remove(debugfs);
	kvfree(log_entries);
}
