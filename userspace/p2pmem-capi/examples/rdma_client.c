/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Receives chunks in device memory near a NIC from rdma_server, and compares each word.
 *
 *   cc -o rdma_client rdma_client.c $(pkg-config --cflags --libs p2pmem) -lrdmacm -libverbs
 *   ./rdma_client HOST [CHUNKS]
 */

#include "rdma_peer.h"

/* Connects to the server. */
static void connect_server(struct peer *peer, const char *host)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *server;
	struct rdma_conn_param options;

	CHECK(host, rdma_getaddrinfo(host, PORT, &hints, &server));
	CHECK(host, rdma_create_ep(&peer->id, server, NULL, &queue_options));
	options = peer_prepare(peer);
	CHECK(host, rdma_connect(peer->id, &options));
	peer_take_offer(peer);
}

int main(int argc, char **argv)
{
	uint64_t chunks = argc > 2 ? strtoull(argv[2], NULL, 0) : 20000;
	struct peer peer;

	if (argc < 2)
		fail("usage", "rdma_client HOST [CHUNKS]");
	connect_server(&peer, argv[1]);
	for (uint64_t chunk = 0; chunk < chunks; chunk++) {
		volatile uint64_t *words = (volatile uint64_t *)(peer.memory + chunk % SLOTS * CHUNK);

		peer_wait_for(&peer, chunk + 1);
		for (uint64_t i = 0; i < CHUNK / sizeof(*words); i++)
			if (words[i] != content(chunk, i))
				fail("compare", "a word differs from what the server wrote");
		/* The server may write the next chunk to the slot. */
		peer_tell(&peer, chunk + 1);
	}
	printf("%" PRIu64 " chunks of %zu bytes arrived, and each word is right\n", chunks, CHUNK);
	return rdma_disconnect(peer.id) != 0;
}
