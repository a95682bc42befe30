/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What rdma_server.c and rdma_client.c share: memory near a NIC, the connection to the other node, and the words by which the
 * nodes report how far they are. The memory of each node has slots for chunks, an inbox, which the other node writes, and
 * an outbox, from which this node writes. Writes of one connection arrive in order: a node that sees a word in the inbox has all chunks
 * that were written before it.
 */

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <p2pmem.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define PORT "20886"
#define CHUNK ((size_t)2 << 20)
#define SLOTS 2
#define INBOX (SLOTS * CHUNK)
#define OUTBOX (INBOX + 64)
#define SIZE (INBOX + 4096)
#define LIMIT 30 /* seconds to wait for the other node */

/* What a node reports to the other one when they connect. Both have the same byte order. */
struct offer {
	uint64_t addr;
	uint32_t rkey;
};

struct peer {
	struct rdma_cm_id *id;
	p2pmem_mapping *map;
	volatile uint8_t *memory; /* the mapped device memory */
	p2pmem_reg *reg;
	struct offer own, other;
};

/* What the connection needs of its queue pair. */
static struct ibv_qp_init_attr queue_options = {
	.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
};

/* Ends the program, whose exit frees memory and objects of the NIC. */
static void fail(const char *what, const char *why)
{
	fprintf(stderr, "%s: %s\n", what, why);
	exit(1);
}

#define CHECK(what, failed) ((failed) ? fail(what, strerror(errno)) : (void)0)
#define CHECK_P2PMEM(what, failed) ((failed) ? fail(what, p2pmem_last_error()) : (void)0)

/* Allocates memory near the NIC of the connection, and registers it. Returns the parameters with which to connect. */
static struct rdma_conn_param peer_prepare(struct peer *peer)
{
	const char *nic = ibv_get_device_name(peer->id->verbs->device);
	p2pmem_want want = { .size = SIZE, .near_devices = &nic, .nr_near = 1 };
	p2pmem_dev *dev;
	p2pmem_buf *buf;

	CHECK_P2PMEM("opening p2pmem", p2pmem_open(NULL, &dev));
	CHECK_P2PMEM("allocating", p2pmem_alloc(dev, &want, &buf));
	CHECK_P2PMEM("mapping", p2pmem_map(buf, &peer->map));
	peer->memory = p2pmem_map_addr(peer->map);
	/* Before the other node has the address: the inbox says that nothing is there. */
	*(volatile uint64_t *)(peer->memory + INBOX) = 0;
	p2pmem_flush(peer->map);
	CHECK_P2PMEM("registering", p2pmem_register(buf, peer->id->pd, 0, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
						    &peer->reg));
	peer->own = (struct offer){ .addr = p2pmem_reg_addr(peer->reg), .rkey = p2pmem_reg_rkey(peer->reg) };
	return (struct rdma_conn_param){
		.private_data = &peer->own, .private_data_len = sizeof(peer->own), .retry_count = 7, .rnr_retry_count = 7,
	};
}

/* Takes the offer that came with the other node's side of the connection. */
static void peer_take_offer(struct peer *peer)
{
	const struct rdma_conn_param *conn = &peer->id->event->param.conn;

	if (conn->private_data_len < sizeof(peer->other))
		fail("connecting", "the other node offers no memory");
	memcpy(&peer->other, conn->private_data, sizeof(peer->other));
}

/* Writes a range of the memory to the other node, and returns when it has arrived there. */
static void peer_write(struct peer *peer, size_t from, size_t bytes, size_t to)
{
	void *local = (void *)(p2pmem_reg_addr(peer->reg) + from);
	struct ibv_wc done;

	p2pmem_flush(peer->map); /* what the processor wrote is in the device memory before the NIC reads it */
	CHECK("RDMA WRITE", rdma_post_write(peer->id, NULL, local, bytes, p2pmem_reg_mr(peer->reg), IBV_SEND_SIGNALED,
					    peer->other.addr + to, peer->other.rkey));
	/* The NIC's timeout and its retries end the wait. */
	CHECK("RDMA WRITE", rdma_get_send_comp(peer->id, &done) < 0);
	if (done.status)
		fail("RDMA WRITE", ibv_wc_status_str(done.status));
}

/* Writes a number to the inbox of the other node. */
static void peer_tell(struct peer *peer, uint64_t number)
{
	*(volatile uint64_t *)(peer->memory + OUTBOX) = number;
	peer_write(peer, OUTBOX, sizeof(number), INBOX);
}

/* Waits until the number in the inbox is at least `number`. */
static void peer_wait_for(const struct peer *peer, uint64_t number)
{
	time_t end = time(NULL) + LIMIT;

	while (*(volatile uint64_t *)(peer->memory + INBOX) < number)
		if (time(NULL) > end)
			fail("waiting for the other node", "nothing arrived for 30 s; has it ended?");
	/* The chunk is read after the word. Ordinary fences do not order loads from memory that is mapped write-combining. */
#if defined(__x86_64__)
	__builtin_ia32_lfence();
#elif defined(__aarch64__)
	__asm__ volatile("dmb oshld" ::: "memory");
#endif
}

/* Returns the word with an index of a chunk. */
static uint64_t content(uint64_t chunk, uint64_t index)
{
	return (chunk << 32 | index) * 0x9e3779b97f4a7c15u;
}
