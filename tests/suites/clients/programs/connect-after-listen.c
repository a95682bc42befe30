/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A library for LD_PRELOAD: call number N of rdma_connect() in the client waits for the end of call number N of rdma_listen() in
 * the server.
 *
 * perftest with -R connects twice. Before the second connection, client and server exchange a message, and then the server calls
 * rdma_listen() while the client calls rdma_connect(). If the client is faster, the server's kernel rejects the connection
 * (invalid service ID), and perftest 25.01 crashes when it tries again.
 *
 * The library listens on the TCP port with the number of the rdma_cm port. After each rdma_listen() it accepts one TCP connection
 * and closes this connection, which rdma_connect() waits for. The time limits of the two programs bound the waits.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <rdma/rdma_cma.h>

static void check(int ok, const char *what)
{
	if (ok)
		return;
	fprintf(stderr, "connect-after-listen: %s: %m\n", what);
	exit(2);
}

static void *next(const char *symbol)
{
	void *function = dlsym(RTLD_NEXT, symbol);

	check(!!function, symbol);
	return function;
}

/* Returns the TCP socket on which the server accepts its client. The first call opens it. */
static int listener(uint16_t port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = port };
	static int fd = -1;

	if (fd >= 0)
		return fd;
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	check(fd >= 0, "socket");
	/* Connections of the previous run may be in the state TIME_WAIT. */
	check(!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int)), "SO_REUSEADDR");
	check(!bind(fd, (struct sockaddr *)&address, sizeof(address)), "bind");
	check(!listen(fd, 1), "listen");
	return fd;
}

int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	int (*listen_next)(struct rdma_cm_id *, int) = next("rdma_listen");
	/* Opened first: a client that starts when the listener of rdma_cm exists can connect to this one too. */
	int own = listener(rdma_get_src_port(id));
	int result = listen_next(id, backlog);
	int client;

	if (result)
		return result;
	client = accept(own, NULL, NULL);
	check(client >= 0, "accept");
	close(client);
	return 0;
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *param)
{
	int (*connect_next)(struct rdma_cm_id *, struct rdma_conn_param *) = next("rdma_connect");
	struct sockaddr *server = rdma_get_peer_addr(id);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char byte;

	check(fd >= 0, "socket");
	check(!connect(fd, server, sizeof(struct sockaddr_in)), "connect");
	/* The end of the stream: the server has closed the connection. */
	check(!read(fd, &byte, 1), "read");
	close(fd);
	return connect_next(id, param);
}
