/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A program that maps /dev/p2pmem, for the test of placement. Its argument is the test to run. Exits with 0 if all checks
 * hold; otherwise prints the first check that fails.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/p2pmem.h>

extern int fake_info_errno, fake_alloc_errno, fake_map_errno, fake_message_errno;
extern const char *fake_message;
extern int fake_allocs, fake_frees, fake_maps, fake_defaults;
extern struct p2pmem_pci_addr fake_clients[];
extern uint32_t fake_nr_clients;
extern uint64_t fake_size;
int fake_open(void);

#define PAGE 4096UL
#define CHECK(what)                                                                                      \
	do {                                                                                             \
		if (!(what)) {                                                                           \
			fprintf(stderr, "near.c:%d: check failed: %s (errno %d)\n", __LINE__, #what, errno); \
			exit(1);                                                                         \
		}                                                                                        \
	} while (0)

static int device;

static void *map(size_t length)
{
	return mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0);
}

/* Fails unless there was this number of allocations in all, each with one mapping and one closed handle. */
static void placed(int number)
{
	CHECK(fake_allocs == number && fake_frees == number && fake_maps == number && fake_defaults == 0);
}

static void *map_often(void *arg)
{
	(void)arg;
	for (int i = 0; i < 500; i++) {
		void *memory = map(PAGE);

		CHECK(memory != MAP_FAILED);
		CHECK(!munmap(memory, PAGE));
	}
	return NULL;
}

/* 2 clients: 0000:03:00.0 and 0000:04:00.1. */
static void test_placed(void)
{
	pthread_t threads[4];
	char *memory, *at;
	int other = memfd_create("other", 0), status;

	errno = 77;
	memory = map(3 * PAGE + 1);
	CHECK(memory != MAP_FAILED && errno == 77);
	placed(1);
	CHECK(fake_size == 3 * PAGE + 1 && fake_nr_clients == 2);
	CHECK(fake_clients[0].domain == 0 && fake_clients[0].bus == 3 && fake_clients[0].devfn == 0);
	CHECK(fake_clients[1].domain == 0 && fake_clients[1].bus == 4 && fake_clients[1].devfn == 1);
	memset(memory, 1, 3 * PAGE + 1);

	/* Both functions, and all kinds of shared mappings. */
	CHECK(mmap64(NULL, PAGE, PROT_READ, MAP_SHARED_VALIDATE, device, 0) != MAP_FAILED);
	at = mmap(memory + PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, device, 0);
	CHECK(at == memory + PAGE && memory[0] == 1 && memory[PAGE] == 0 && memory[2 * PAGE] == 1);
	placed(3);

	/* All other mappings are forwarded. */
	CHECK(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, device, 0) == MAP_FAILED && errno == EINVAL);
	CHECK(mmap(NULL, PAGE, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, device, 0) != MAP_FAILED);
	CHECK(mmap(NULL, 0, PROT_READ, MAP_SHARED, device, 0) == MAP_FAILED && errno == EINVAL);
	CHECK(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, -1, 0) == MAP_FAILED && errno == EBADF);
	CHECK(!ftruncate(other, PAGE));
	errno = 77;
	CHECK(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, other, 0) != MAP_FAILED && errno == 77);
	CHECK(fake_allocs == 3 && fake_defaults == 0);
	CHECK(mmap64(NULL, PAGE, PROT_READ, MAP_SHARED, device, 7LL << 32) != MAP_FAILED);
	CHECK(fake_allocs == 3 && fake_maps == 4);
	fake_maps = 3;

	/* Threads, and a child process. The shim does not read the environment again. */
	clearenv();
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&threads[i], NULL, map_often, NULL));
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_join(threads[i], NULL));
	placed(2003);
	if (!fork()) {
		/* Without any open file of its own. */
		for (int fd = 3; fd < 64; fd++)
			if (fd != device)
				close(fd);
		_exit(map(PAGE) == MAP_FAILED);
	}
	CHECK(wait(&status) > 0 && status == 0);
}

static void test_refused(void)
{
	fake_alloc_errno = fake_message_errno = ENOSPC;
	fake_message = "0000:03:00.0 has 4096 of 8192 bytes free";
	CHECK(map(2 * PAGE) == MAP_FAILED && errno == ENOSPC);
	/* The message of another call. */
	fake_alloc_errno = EDQUOT;
	CHECK(map(2 * PAGE) == MAP_FAILED && errno == EDQUOT);
	CHECK(fake_maps == 0 && fake_frees == 0);
	/* The system rejects the mapping. */
	fake_alloc_errno = 0;
	fake_map_errno = ENOMEM;
	CHECK(map(PAGE) == MAP_FAILED && errno == ENOMEM && fake_allocs == 1 && fake_frees == 1);
	fake_map_errno = 0;
	/* A filter of system calls rejects all ioctls. */
	fake_info_errno = fake_alloc_errno = EPERM;
	CHECK(map(PAGE) == MAP_FAILED && errno == EPERM);
	CHECK(fake_maps == 0 && fake_defaults == 0);
}

static void test_unusable(void)
{
	CHECK(map(PAGE) == MAP_FAILED && errno == ENODEV);
	CHECK(fake_allocs == 0 && fake_maps == 0 && fake_defaults == 0);
}

static void test_unset(void)
{
	CHECK(map(PAGE) != MAP_FAILED);
	CHECK(fake_allocs == 0 && fake_maps == 0 && fake_defaults == 1);
}

static void test_one(void)
{
	CHECK(map(2 * PAGE) != MAP_FAILED);
	placed(1);
}

int main(int argc, char **argv)
{
	const char *test = argc > 1 ? argv[1] : "";

	device = fake_open();
	CHECK(device >= 0);
	if (!strcmp(test, "placed"))
		test_placed();
	else if (!strcmp(test, "refused"))
		test_refused();
	else if (!strcmp(test, "unusable"))
		test_unusable();
	else if (!strcmp(test, "unset"))
		test_unset();
	else if (!strcmp(test, "one"))
		test_one();
	else if (!strcmp(test, "exec")) {
		test_one();
		execl("/proc/self/exe", argv[0], "one", NULL);
		CHECK(!"exec");
	} else {
		CHECK(!"a known test");
	}
	return 0;
}
