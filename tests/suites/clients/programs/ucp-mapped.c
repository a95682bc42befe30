/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Gives UCX memory that /dev/p2pmem maps (ucp_mem_map), and moves data between two nodes by put and get. UCX registers the memory
 * by its address, so on a stock kernel the program needs the preload shim: run it under `p2pmemctl run --near NIC`.
 *
 *   ucp-mapped serve ERRORS PORT
 *   ucp-mapped move ERRORS PORT ADDRESS         puts, gets back, and verifies; prints "verified N bytes"
 *   ucp-mapped exhaust ERRORS PORT ADDRESS      puts until a put fails; prints the error and exits with 1
 *
 * ERRORS is "none" or "peer", the error handling of the endpoints of both nodes. With "peer", UCX 1.18 gets data by messages
 * through host memory, unless UCX_PROTO_ENABLE=n is set.
 * The nodes exchange addresses and keys by TCP. The server ends when the client disconnects. It fails unless its memory then has
 * the bytes that `move` puts.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include <ucp/api/ucp.h>
#include "message.h"

/* The first message to the other node: the sizes of the worker's address and of the key, which follow, and the memory's address. */
struct greeting {
	uint64_t worker_size, key_size, memory;
};

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_mem_h memh;
static ucp_ep_h ep;
static ucp_rkey_h rkey;
static uint64_t target;
static volatile uint64_t *words;
/* The error that UCX reported for the endpoint. */
static ucs_status_t failure;
static int handles_errors;

static void check(int ok, const char *what, const char *why)
{
	if (ok)
		return;
	fprintf(stderr, "ucp-mapped: %s: %s\n", what, why);
	exit(2);
}

static void check_ucs(ucs_status_t status, const char *what)
{
	check(status == UCS_OK, what, ucs_status_string(status));
}

static void allocate(void)
{
	ucp_mem_map_params_t params = {
		.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
		.length = SIZE,
	};
	int file = open("/dev/p2pmem", O_RDWR | O_CLOEXEC);

	check(file >= 0, "/dev/p2pmem", strerror(errno));
	params.address = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	check(params.address != MAP_FAILED, "mmap", strerror(errno));
	words = params.address;
	check_ucs(ucp_mem_map(context, &params, &memh), "ucp_mem_map");
}

static void open_worker(void)
{
	ucp_params_t params = { .field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA };
	ucp_worker_params_t worker_params = { .field_mask = 0 };

	check_ucs(ucp_init(&params, NULL, &context), "ucp_init");
	check_ucs(ucp_worker_create(context, &worker_params, &worker), "ucp_worker_create");
}

static void send_all(int peer, const void *bytes, size_t size)
{
	check(send(peer, bytes, size, MSG_NOSIGNAL) == (ssize_t)size, "send", strerror(errno));
}

static void receive_all(int peer, void *bytes, size_t size)
{
	check(recv(peer, bytes, size, MSG_WAITALL) == (ssize_t)size, "the other node", "disconnected");
}

static void on_error(void *argument, ucp_ep_h failed, ucs_status_t status)
{
	(void)argument;
	(void)failed;
	failure = status;
}

static void exchange(int peer)
{
	ucp_ep_params_t params = {
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
			      UCP_EP_PARAM_FIELD_ERR_HANDLER,
		.err_mode = handles_errors ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE,
		.err_handler.cb = on_error,
	};
	struct greeting ours, theirs;
	ucp_address_t *address;
	size_t worker_size, key_size;
	void *key, *their_address, *their_key;

	check_ucs(ucp_worker_get_address(worker, &address, &worker_size), "ucp_worker_get_address");
	check_ucs(ucp_rkey_pack(context, memh, &key, &key_size), "ucp_rkey_pack");
	ours = (struct greeting){ worker_size, key_size, (uintptr_t)words };
	send_all(peer, &ours, sizeof(ours));
	send_all(peer, address, worker_size);
	send_all(peer, key, key_size);
	receive_all(peer, &theirs, sizeof(theirs));
	their_address = malloc(theirs.worker_size);
	their_key = malloc(theirs.key_size);
	check(their_address && their_key, "malloc", strerror(errno));
	receive_all(peer, their_address, theirs.worker_size);
	receive_all(peer, their_key, theirs.key_size);
	params.address = their_address;
	target = theirs.memory;
	check_ucs(ucp_ep_create(worker, &params, &ep), "ucp_ep_create");
	check_ucs(ucp_ep_rkey_unpack(ep, their_key, &rkey), "ucp_ep_rkey_unpack");
}

static ucs_status_t finish(ucs_status_ptr_t request)
{
	ucs_status_t status;

	if (!UCS_PTR_IS_PTR(request))
		return UCS_PTR_STATUS(request);
	do {
		ucp_worker_progress(worker);
		status = ucp_request_check_status(request);
	} while (status == UCS_INPROGRESS);
	ucp_request_free(request);
	return status;
}

/* Puts or gets all memory. Returns the first error, which it prints. */
static ucs_status_t transfer(int put)
{
	ucp_request_param_t params = { .op_attr_mask = UCP_OP_ATTR_FIELD_MEMH, .memh = memh };
	ucp_request_param_t none = { .op_attr_mask = 0 };
	ucs_status_t status = UCS_OK;

	for (size_t at = 0; at < SIZE && status == UCS_OK; at += CHUNK) {
		char *local = (char *)words + at;

		status = finish(put ? ucp_put_nbx(ep, local, CHUNK, target + at, rkey, &params) :
				      ucp_get_nbx(ep, local, CHUNK, target + at, rkey, &params));
	}
	/* A put is complete at the other node when the endpoint is flushed. */
	if (status == UCS_OK)
		status = finish(ucp_ep_flush_nbx(ep, &none));
	if (status == UCS_OK)
		status = failure;
	if (status != UCS_OK)
		printf("failed with %d (%s)\n", status, ucs_status_string(status));
	return status;
}

static int serve(const char *port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };
	int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0), peer;
	char byte;

	check(listener >= 0, "socket", strerror(errno));
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	check(!bind(listener, (struct sockaddr *)&address, sizeof(address)), "bind", strerror(errno));
	check(!listen(listener, 1), "listen", strerror(errno));
	peer = accept(listener, NULL, NULL);
	check(peer >= 0, "accept", strerror(errno));
	exchange(peer);
	/* UCX connects its endpoints while both nodes make progress. */
	while (recv(peer, &byte, 1, MSG_DONTWAIT) < 0)
		ucp_worker_progress(worker);
	verify("ucp-mapped", words, "the server's memory");
	return 0;
}

static int reach(const char *node, const char *port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };
	int peer = socket(AF_INET, SOCK_STREAM, 0);

	check(peer >= 0 && inet_pton(AF_INET, node, &address.sin_addr) == 1, "socket", strerror(errno));
	check(!connect(peer, (struct sockaddr *)&address, sizeof(address)), "connect", strerror(errno));
	exchange(peer);
	return peer;
}

static int move(void)
{
	fill(words, 1);
	if (transfer(1) != UCS_OK)
		return 1;
	fill(words, 0);
	if (transfer(0) != UCS_OK)
		return 1;
	verify("ucp-mapped", words, "the client's memory");
	printf("verified %zu bytes\n", SIZE);
	return 0;
}

int main(int argc, char **argv)
{
	int serves = argc == 4 && !strcmp(argv[1], "serve");

	if (!serves && argc != 5) {
		fprintf(stderr, "usage: ucp-mapped serve|move|exhaust none|peer PORT [ADDRESS]\n");
		return 2;
	}
	handles_errors = !strcmp(argv[2], "peer");
	open_worker();
	allocate();
	if (serves)
		return serve(argv[3]);
	reach(argv[4], argv[3]);
	if (!strcmp(argv[1], "move"))
		return move();
	while (transfer(1) == UCS_OK)
		;
	return 1;
}
