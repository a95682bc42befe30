/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Writes chunks from device memory near a NIC to the device memory of another node, by RDMA WRITE. The other node runs
 * rdma_client. The processor fills the device memory here, where a program would have an accelerator.
 *
 *   cc -o rdma_server rdma_server.c $(pkg-config --cflags --libs p2pmem) -lrdmacm -libverbs
 *   ./rdma_server [CHUNKS]
 */

#include "rdma_peer.h"

#include <poll.h>

/* Waits for a client, and connects. */
static void accept_client(struct peer *peer)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *own;
	struct rdma_conn_param options;
	struct rdma_cm_id *listener;

	CHECK("the own address", rdma_getaddrinfo(NULL, PORT, &hints, &own));
	CHECK("listening", rdma_create_ep(&listener, own, NULL, &queue_options) || rdma_listen(listener, 1));
	CHECK("waiting for a client", rdma_get_request(listener, &peer->id));
	peer_take_offer(peer);
	options = peer_prepare(peer);
	CHECK("accepting a client", rdma_accept(peer->id, &options));
}

int main(int argc, char **argv)
{
	uint64_t chunks = argc > 1 ? strtoull(argv[1], NULL, 0) : 20000;
	struct pollfd closed = { .events = POLLIN };
	struct peer peer;

	accept_client(&peer);
	for (uint64_t chunk = 0; chunk < chunks; chunk++) {
		size_t at = chunk % SLOTS * CHUNK;
		volatile uint64_t *words = (volatile uint64_t *)(peer.memory + at);

		/* The slot is free when the client has handled the chunk that was in it. */
		if (chunk >= SLOTS)
			peer_wait_for(&peer, chunk + 1 - SLOTS);
		for (uint64_t i = 0; i < CHUNK / sizeof(*words); i++)
			words[i] = content(chunk, i);
		peer_write(&peer, at, CHUNK, at);
		peer_tell(&peer, chunk + 1);
	}
	peer_wait_for(&peer, chunks);
	printf("%" PRIu64 " chunks of %zu bytes written\n", chunks, CHUNK);
	/* The client's last message is complete when the client has closed the connection. */
	closed.fd = peer.id->channel->fd;
	return poll(&closed, 1, LIMIT * 1000) != 1;
}
