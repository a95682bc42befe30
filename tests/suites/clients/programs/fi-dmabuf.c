/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Registers p2pmem buffers with libfabric as dma-bufs (FI_MR_DMABUF), and moves data between two nodes by RDMA WRITE and READ.
 *
 *   fi-dmabuf serve NIC ADDRESS PORT
 *   fi-dmabuf move NIC ADDRESS PORT          writes, reads back, and verifies; prints "verified N bytes"
 *   fi-dmabuf exhaust NIC ADDRESS PORT       writes until a write fails; prints the error and exits with 1
 *
 * NIC is the RDMA device near which each node allocates its buffer, ADDRESS the server's address for rdma_cm. The server ends when
 * the client disconnects. It fails unless its buffer then has the bytes that `move` writes.
 */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <p2pmem.h>
#include "message.h"

#define ACCESS (FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE)

/* Private data of the message by which the server accepts the connection. */
struct target {
	uint64_t key;
};

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_eq *eq;
static struct fid_cq *cq;
static struct fid_ep *ep;
static struct fid_mr *mr;
static struct fi_mr_dmabuf dmabuf;
static volatile uint64_t *words;

static void check(int ret, const char *what)
{
	if (ret >= 0)
		return;
	fprintf(stderr, "fi-dmabuf: %s: %s\n", what, fi_strerror(-ret));
	exit(2);
}

static void check_p2pmem(int ret, const char *what)
{
	if (ret >= 0)
		return;
	fprintf(stderr, "fi-dmabuf: %s: %s\n", what, p2pmem_last_error());
	exit(2);
}

/* Allocates a buffer near the NIC, maps it, and exports it. */
static void allocate(const char *nic)
{
	const char *near[] = { nic };
	p2pmem_want want = { .size = SIZE, .near_devices = near, .nr_near = 1 };
	p2pmem_mapping *map;
	p2pmem_dev *dev;
	p2pmem_buf *buf;

	check_p2pmem(p2pmem_open(NULL, &dev), "open");
	check_p2pmem(p2pmem_alloc(dev, &want, &buf), "alloc");
	check_p2pmem(p2pmem_map(buf, &map), "map");
	words = p2pmem_map_addr(map);
	dmabuf.fd = p2pmem_export(buf, 0, 0, 0);
	check_p2pmem(dmabuf.fd, "export");
	dmabuf.len = SIZE;
}

static void get_info(const char *address, const char *port, uint64_t flags)
{
	struct fi_info *hints = fi_allocinfo();

	if (!hints)
		check(-FI_ENOMEM, "fi_allocinfo");
	hints->caps = FI_MSG | FI_RMA;
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup("verbs");
	check(fi_getinfo(FI_VERSION(2, 0), address, port, flags, hints, &info), "fi_getinfo");
	fi_freeinfo(hints);
}

/*
 * Opens the domain of `info` and registers the buffer. The provider `verbs` uses `offset` as the address of the first byte in work
 * requests, of both sides.
 */
static void open_domain(void)
{
	struct fi_mr_attr attr = { .dmabuf = &dmabuf, .iov_count = 1, .access = ACCESS, .iface = FI_HMEM_SYSTEM };

	check(fi_domain(fabric, info, &domain, NULL), "fi_domain");
	check(fi_mr_regattr(domain, &attr, FI_MR_DMABUF, &mr), "fi_mr_regattr with FI_MR_DMABUF");
}

static void open_endpoint(void)
{
	struct fi_cq_attr attr = { .format = FI_CQ_FORMAT_CONTEXT, .size = 16 };

	check(fi_endpoint(domain, info, &ep, NULL), "fi_endpoint");
	check(fi_cq_open(domain, &attr, &cq, NULL), "fi_cq_open");
	check(fi_ep_bind(ep, &eq->fid, 0), "fi_ep_bind to the event queue");
	check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind to the completion queue");
	check(fi_enable(ep), "fi_enable");
}

/* Waits for an event of the connection. Returns the number of bytes in `entry`. */
static ssize_t wait_event(uint32_t wanted, void *entry, size_t size)
{
	struct fi_eq_err_entry error = { 0 };
	uint32_t event;
	ssize_t n;

	do {
		n = fi_eq_sread(eq, &event, entry, size, -1, 0);
	} while (n == -FI_EAGAIN || n == -FI_EINTR);
	if (n == -FI_EAVAIL) {
		check((int)fi_eq_readerr(eq, &error, 0), "fi_eq_readerr");
		check(-error.err, "connection");
	}
	check((int)n, "fi_eq_sread");
	if (event != wanted) {
		fprintf(stderr, "fi-dmabuf: event %" PRIu32 " instead of %" PRIu32 "\n", event, wanted);
		exit(2);
	}
	return n;
}

/* Waits for a completion. Returns 0, or the error of the work request, which it prints. */
static int wait_completion(void)
{
	struct fi_cq_err_entry error = { 0 };
	struct fi_cq_entry entry;
	ssize_t n;

	do {
		n = fi_cq_read(cq, &entry, 1);
	} while (n == -FI_EAGAIN);
	if (n != -FI_EAVAIL) {
		check((int)n, "fi_cq_read");
		return 0;
	}
	check((int)fi_cq_readerr(cq, &error, 0), "fi_cq_readerr");
	printf("failed with %d (%s), status %d (%s)\n", error.err, fi_strerror(error.err), error.prov_errno,
	       fi_cq_strerror(cq, error.prov_errno, error.err_data, NULL, 0));
	return error.err;
}

/* Addresses of local and remote memory are offsets in the dma-bufs: see open_domain(). */
static int write_chunk(uint64_t at, uint64_t key)
{
	check((int)fi_write(ep, (void *)(uintptr_t)at, CHUNK, fi_mr_desc(mr), 0, at, key, NULL), "fi_write");
	return wait_completion();
}

static int read_chunk(uint64_t at, uint64_t key)
{
	check((int)fi_read(ep, (void *)(uintptr_t)at, CHUNK, fi_mr_desc(mr), 0, at, key, NULL), "fi_read");
	return wait_completion();
}

static int serve(const char *address, const char *port)
{
	struct { struct fi_eq_cm_entry cm; uint8_t data[64]; } entry;
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	struct target target;
	struct fid_pep *pep;

	get_info(address, port, FI_SOURCE);
	check(fi_fabric(info->fabric_attr, &fabric, NULL), "fi_fabric");
	check(fi_eq_open(fabric, &attr, &eq, NULL), "fi_eq_open");
	check(fi_passive_ep(fabric, info, &pep, NULL), "fi_passive_ep");
	check(fi_pep_bind(pep, &eq->fid, 0), "fi_pep_bind");
	check(fi_listen(pep), "fi_listen");
	wait_event(FI_CONNREQ, &entry, sizeof(entry));
	info = entry.cm.info;
	open_domain();
	open_endpoint();
	target.key = fi_mr_key(mr);
	check(fi_accept(ep, &target, sizeof(target)), "fi_accept");
	wait_event(FI_CONNECTED, &entry, sizeof(entry));
	wait_event(FI_SHUTDOWN, &entry, sizeof(entry));
	verify("fi-dmabuf", words, "the server's buffer");
	return 0;
}

static struct target reach(const char *address, const char *port)
{
	struct { struct fi_eq_cm_entry cm; struct target target; uint8_t rest[64]; } entry;
	struct fi_eq_attr attr = { .wait_obj = FI_WAIT_UNSPEC };
	ssize_t n;

	get_info(address, port, 0);
	check(fi_fabric(info->fabric_attr, &fabric, NULL), "fi_fabric");
	check(fi_eq_open(fabric, &attr, &eq, NULL), "fi_eq_open");
	open_domain();
	open_endpoint();
	check(fi_connect(ep, info->dest_addr, NULL, 0), "fi_connect");
	n = wait_event(FI_CONNECTED, &entry, sizeof(entry));
	if ((size_t)n < sizeof(entry.cm) + sizeof(entry.target))
		check(-FI_ENODATA, "the server's key");
	return entry.target;
}

static int move(uint64_t key)
{
	fill(words, 1);
	for (size_t at = 0; at < SIZE; at += CHUNK)
		if (write_chunk(at, key))
			return 1;
	fill(words, 0);
	for (size_t at = 0; at < SIZE; at += CHUNK)
		if (read_chunk(at, key))
			return 1;
	verify("fi-dmabuf", words, "the client's buffer");
	printf("verified %zu bytes\n", SIZE);
	return 0;
}

static int exhaust(uint64_t key)
{
	size_t at = 0;

	while (!write_chunk(at, key))
		at = (at + CHUNK) % SIZE;
	return 1;
}

int main(int argc, char **argv)
{
	struct target target;
	int result;

	if (argc != 5) {
		fprintf(stderr, "usage: fi-dmabuf serve|move|exhaust NIC ADDRESS PORT\n");
		return 2;
	}
	allocate(argv[2]);
	if (!strcmp(argv[1], "serve"))
		return serve(argv[3], argv[4]);
	target = reach(argv[3], argv[4]);
	result = strcmp(argv[1], "exhaust") ? move(target.key) : exhaust(target.key);
	/* After an error, the connection has ended already. */
	if (!result)
		check(fi_shutdown(ep, 0), "fi_shutdown");
	return result;
}
