/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Allocates a stripe (parts of one size in several providers), and passes the parts to another process, which checks the
 * data and writes its answer to the same memory.
 *
 *   cc -o share share.c $(pkg-config --cflags --libs p2pmem)
 *   ./share SIZE PARTS [DEVICE...]
 */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <p2pmem.h>

#define MAX_PARTS 16

static int fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, p2pmem_last_error());
	return 1;
}

/* Returns the word with index i of a part. */
static uint64_t word(int part, size_t i)
{
	return (i + ((uint64_t)part << 48)) * 0x9e3779b97f4a7c15u;
}

/* Sends a descriptor with one byte of data. */
static int send_descriptor(int socket, int fd)
{
	char control[CMSG_SPACE(sizeof(fd))] = { 0 }, byte = 0;
	struct iovec data = { .iov_base = &byte, .iov_len = 1 };
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control),
	};
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);

	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof(fd));
	memcpy(CMSG_DATA(head), &fd, sizeof(fd));
	return sendmsg(socket, &message, 0) == 1 ? 0 : -1;
}

/* Receives a descriptor; returns -1 if there are no more. */
static int receive_descriptor(int socket)
{
	char control[CMSG_SPACE(sizeof(int))], byte;
	struct iovec data = { .iov_base = &byte, .iov_len = 1 };
	struct msghdr message = {
		.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control),
	};
	struct cmsghdr *head;
	int fd;

	if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1)
		return -1;
	head = CMSG_FIRSTHDR(&message);
	if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
		return -1;
	memcpy(&fd, CMSG_DATA(head), sizeof(fd));
	return fd;
}

/* Compares each word of a part with its expected value, inverted if `invert` is set, and inverts the word in memory. */
static int visit(const p2pmem_buf *buf, int part, int invert)
{
	uint64_t mask = invert ? UINT64_MAX : 0;
	volatile uint64_t *words;
	p2pmem_mapping *map;
	int wrong = 0;
	size_t n;

	if (p2pmem_map(buf, &map))
		return fail("map");
	words = p2pmem_map_addr(map);
	n = p2pmem_map_len(map) / sizeof(*words);
	for (size_t i = 0; i < n && !wrong; i++) {
		wrong = words[i] != (word(part, i) ^ mask);
		words[i] = ~words[i];
	}
	if (wrong)
		fprintf(stderr, "part %d differs from the data that the other process wrote\n", part);
	p2pmem_flush(map);
	p2pmem_unmap(map);
	return wrong;
}

/* The other process: opens the device itself, and receives only the descriptors of the buffers. */
static int child(int socket)
{
	p2pmem_dev *dev;
	int fd, part = 0;

	if (p2pmem_open(NULL, &dev))
		return fail("open");
	for (; (fd = receive_descriptor(socket)) >= 0; part++) {
		p2pmem_buf *buf;

		if (p2pmem_import(dev, fd, &buf))
			return fail("import");
		close(fd);
		if (visit(buf, part, 0))
			return 1;
		p2pmem_free(buf);
	}
	p2pmem_close(dev);
	printf("%d parts were read and answered by another process\n", part);
	return 0;
}

/* Writes a part and sends its descriptor. */
static int give(int socket, const p2pmem_buf *buf, int part)
{
	volatile uint64_t *words;
	p2pmem_mapping *map;
	int fd, ret;

	if (p2pmem_map(buf, &map))
		return fail("map");
	words = p2pmem_map_addr(map);
	for (size_t i = 0; i < p2pmem_map_len(map) / sizeof(*words); i++)
		words[i] = word(part, i);
	p2pmem_flush(map);
	p2pmem_unmap(map);
	fd = p2pmem_share(buf);
	if (fd < 0)
		return fail("share");
	ret = send_descriptor(socket, fd);
	if (ret)
		perror("sendmsg");
	close(fd);
	return ret;
}

int main(int argc, char **argv)
{
	p2pmem_want want = { .flags = 0 };
	p2pmem_buf *parts[MAX_PARTS];
	int ends[2], n, status;
	p2pmem_dev *dev;
	pid_t pid;

	if (argc < 3) {
		fprintf(stderr, "usage: share SIZE PARTS [DEVICE...]\n");
		return 2;
	}
	want.size = strtoull(argv[1], NULL, 0);
	want.parts = strtoul(argv[2], NULL, 0);
	want.near_devices = (const char *const *)&argv[3];
	want.nr_near = argc - 3;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) {
		perror("socketpair");
		return 1;
	}
	pid = fork();
	if (pid < 0) {
		perror("fork");
		return 1;
	}
	if (!pid) {
		close(ends[0]);
		return child(ends[1]);
	}
	close(ends[1]);
	if (p2pmem_open(NULL, &dev))
		return fail("open");
	n = p2pmem_alloc_stripe(dev, &want, parts, MAX_PARTS);
	if (n < 0)
		return fail("stripe");
	for (int i = 0; i < n; i++) {
		printf("part %d: %" PRIu64 " bytes in provider %" PRIu32 "\n", i, p2pmem_buf_size(parts[i]),
		       p2pmem_buf_provider(parts[i]));
		if (give(ends[0], parts[i], i))
			return 1;
	}
	fflush(stdout);
	close(ends[0]);
	if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status)) {
		fprintf(stderr, "the other process failed\n");
		return 1;
	}
	for (int i = 0; i < n; i++) {
		if (visit(parts[i], i, 1))
			return 1;
		p2pmem_free(parts[i]);
	}
	printf("and its answers are in %d parts\n", n);
	p2pmem_close(dev);
	return 0;
}
