/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A fake module for the test of placement: functions of the C library, found after those of the preloaded shim. An open
 * /dev/p2pmem is a memory file that fstat() reports as a misc device. The buffer with handle N is at offset N * 4 GiB.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <linux/p2pmem.h>

#define FILES 64

/* Errnos of the next calls; 0 for success. */
int fake_info_errno, fake_alloc_errno, fake_map_errno;
/* The message of the last refusal, and the errno that belongs to it. */
const char *fake_message = "";
int fake_message_errno;
/* Numbers of calls: allocations, closed handles, mappings of a buffer, and mappings at offset 0. */
int fake_allocs, fake_frees, fake_maps, fake_defaults;
/* The clients and the size of the last allocation. */
struct p2pmem_pci_addr fake_clients[P2PMEM_MAX_CLIENTS];
uint32_t fake_nr_clients;
uint64_t fake_size;

static char is_device[FILES];

static int failed(int error)
{
	errno = error;
	return -1;
}

static int add(int *counter)
{
	return __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST);
}

int fake_open(void)
{
	int fd = memfd_create("device", 0);

	if (fd >= 0 && fd < FILES)
		is_device[fd] = 1;
	return fd;
}

int fstat(int fd, struct stat *stat)
{
	if (syscall(SYS_fstat, fd, stat))
		return -1;
	if (fd < FILES && is_device[fd]) {
		stat->st_mode = S_IFCHR | 0660;
		stat->st_rdev = makedev(10, 200);
	}
	return 0;
}

int stat(const char *path, struct stat *stat)
{
	if (!strcmp(path, "/dev/p2pmem")) {
		memset(stat, 0, sizeof(*stat));
		stat->st_mode = S_IFCHR | 0660;
		stat->st_rdev = makedev(10, 200);
		return 0;
	}
	return syscall(SYS_stat, path, stat);
}

static int alloc(struct p2pmem_alloc *alloc)
{
	int handle;

	if (fake_alloc_errno)
		return failed(fake_alloc_errno);
	if (alloc->req.client_size != sizeof(struct p2pmem_pci_addr) || alloc->req.nr_clients > P2PMEM_MAX_CLIENTS)
		return failed(EINVAL);
	handle = add(&fake_allocs);
	memcpy(fake_clients, (void *)(uintptr_t)alloc->req.clients, alloc->req.nr_clients * sizeof(fake_clients[0]));
	fake_nr_clients = alloc->req.nr_clients;
	fake_size = alloc->req.size;
	alloc->handle = handle;
	alloc->provider = 3;
	alloc->class = P2PMEM_PATH_SAME_SWITCH;
	alloc->size = (alloc->req.size + 4095) & ~4095ULL;
	alloc->mmap_offset = (uint64_t)handle << 32;
	return 0;
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	void *argument;

	va_start(args, request);
	argument = va_arg(args, void *);
	va_end(args);
	if (fd >= FILES || !is_device[fd])
		return failed(ENOTTY);
	switch (request) {
	case P2PMEM_IOC_INFO:
		return fake_info_errno ? failed(fake_info_errno) : 0;
	case P2PMEM_IOC_ALLOC:
		return alloc(argument);
	case P2PMEM_IOC_FREE:
		add(&fake_frees);
		return 0;
	case P2PMEM_IOC_EXPLAIN: {
		struct p2pmem_explain *explain = argument;

		explain->error = fake_message_errno;
		snprintf((char *)(uintptr_t)explain->text, explain->text_len, "%s", fake_message);
		return 0;
	}
	default:
		return failed(ENOTTY);
	}
}

void *mmap64(void *addr, size_t length, int prot, int flags, int fd, off64_t offset)
{
	void *mapped;

	if (flags & MAP_ANONYMOUS || fd < 0 || fd >= FILES || !is_device[fd])
		return (void *)syscall(SYS_mmap, addr, length, prot, flags, fd, offset);
	if (!(flags & MAP_SHARED) || fake_map_errno) {
		errno = fake_map_errno ? fake_map_errno : EINVAL;
		return MAP_FAILED;
	}
	/* Anonymous memory has no MAP_SHARED_VALIDATE. */
	flags = (flags & ~MAP_TYPE) | MAP_SHARED | MAP_ANONYMOUS;
	mapped = (void *)syscall(SYS_mmap, addr, length, prot, flags, -1, 0);
	if (mapped != MAP_FAILED)
		add(offset ? &fake_maps : &fake_defaults);
	return mapped;
}

void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
	return mmap64(addr, length, prot, flags, fd, offset);
}
