/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A program that registers memory. Its open() and ioctl() replace those of the C library and emulate the module for the
 * preloaded shim. Exits with 0 if all checks hold; otherwise prints the first check that fails.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <infiniband/verbs.h>
#include <linux/p2pmem.h>

extern int fake_errno;
extern struct {
	const char *function;
	uint64_t offset, iova;
	int fd, access;
} fake_last;

#define PAGE 4096UL
#define CHECK(what)                                                                                         \
	do {                                                                                                \
		if (!(what)) {                                                                              \
			fprintf(stderr, "program.c:%d: check failed: %s (errno %d)\n", __LINE__, #what, errno); \
			exit(1);                                                                            \
		}                                                                                           \
	} while (0)

/* The p2pmem memory, and the results of the emulated module. */
static char *ours;
static const size_t ours_size = 16 * PAGE;
static int open_errno, export_errno, exports, module_errno;
static const char *message = "";

int open(const char *path, int flags, ...)
{
	mode_t mode = 0;
	va_list args;

	va_start(args, flags);
	if (flags & O_CREAT)
		mode = va_arg(args, mode_t);
	va_end(args);
	if (strcmp(path, "/dev/p2pmem"))
		return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
	if (open_errno) {
		errno = open_errno;
		return -1;
	}
	CHECK(flags & O_CLOEXEC);
	return memfd_create("device", MFD_CLOEXEC);
}

static int export_dmabuf(struct p2pmem_export *export)
{
	struct p2pmem_range *range = (struct p2pmem_range *)(uintptr_t)export->ranges;
	uint64_t start = (uintptr_t)ours, end = start + ours_size;

	CHECK(export->nr_ranges == 1 && export->handle == 0 && export->flags == P2PMEM_EXPORT_MAPPED);
	CHECK(range->offset % PAGE == 0 && range->size % PAGE == 0 && range->size > 0);
	if (range->offset < start || range->offset + range->size > end) {
		errno = ENOENT;
		return -1;
	}
	if (export_errno) {
		errno = module_errno = export_errno;
		return -1;
	}
	export->fd = memfd_create("dmabuf", MFD_CLOEXEC);
	__atomic_add_fetch(&exports, 1, __ATOMIC_SEQ_CST);
	return ftruncate(export->fd, range->size);
}

int ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	void *argument;

	va_start(args, request);
	argument = va_arg(args, void *);
	va_end(args);
	switch (request) {
	case P2PMEM_IOC_EXPORT_DMABUF:
		return export_dmabuf(argument);
	case P2PMEM_IOC_EXPLAIN: {
		struct p2pmem_explain *explain = argument;

		CHECK(explain->flags == P2PMEM_EXPLAIN_LAST && explain->nr_verdicts == 0);
		explain->error = module_errno;
		snprintf((char *)(uintptr_t)explain->text, explain->text_len, "%s", message);
		return 0;
	}
	default:
		return syscall(SYS_ioctl, fd, request, argument);
	}
}

static int open_files(void)
{
	int n = 0;

	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static struct ibv_device device = { .name = "mlx5_0" };
static struct ibv_context context = { .device = &device };
static struct ibv_pd pd = { .context = &context };

static void *register_often(void *arg)
{
	(void)arg;
	for (int i = 0; i < 1000; i++) {
		struct ibv_mr *mr = ibv_reg_mr(&pd, ours + PAGE, PAGE, IBV_ACCESS_LOCAL_WRITE);

		CHECK(mr && mr->addr == ours + PAGE);
		CHECK(!ibv_dereg_mr(mr));
	}
	return NULL;
}

int main(void)
{
	/* A constant: for variables, the header's macro calls ibv_reg_mr_iova2(). */
	enum { rw = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
	int files;
	char *host = aligned_alloc(PAGE, 4 * PAGE);
	struct ibv_mr *mr;
	pthread_t threads[4];

	ours = mmap(NULL, ours_size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(ours != MAP_FAILED);
	files = open_files();

	/* Other memory: the shim calls the real function with the same arguments and does not change errno. */
	errno = 77;
	mr = ibv_reg_mr(&pd, host, 100, rw);
	CHECK(mr && mr->addr == host && mr->length == 100 && errno == 77);
	CHECK(!strcmp(fake_last.function, "ibv_reg_mr") && fake_last.access == rw);
	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, &pd, NULL, 0, 5));
	CHECK(!strcmp(fake_last.function, "ibv_rereg_mr") && fake_last.access == 5);
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, &pd, ours, PAGE, 5) == IBV_REREG_MR_ERR_INPUT);
	CHECK(!ibv_dereg_mr(mr));
	CHECK(ibv_reg_mr_iova2(&pd, host, 100, 0x7000, rw | IBV_ACCESS_RELAXED_ORDERING));
	CHECK(!strcmp(fake_last.function, "ibv_reg_mr_iova2") && fake_last.iova == 0x7000);
	CHECK(!ibv_reg_mr(&pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND) && errno == EFAULT);
	/* The shim has queried the module about the new memory of ibv_rereg_mr(). */
	CHECK(exports == 1);

	/* p2pmem memory: a dma-buf of the pages, with the address and length of the program. */
	errno = 77;
	mr = ibv_reg_mr(&pd, ours + PAGE + 100, 2 * PAGE, rw);
	CHECK(mr && mr->addr == ours + PAGE + 100 && mr->length == 2 * PAGE && errno == 77 && exports == 2);
	CHECK(!strcmp(fake_last.function, "ibv_reg_dmabuf_mr") && fake_last.offset == 100);
	CHECK(fake_last.iova == (uintptr_t)ours + PAGE + 100 && fake_last.access == rw);
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, &pd, NULL, 0, rw) == IBV_REREG_MR_ERR_INPUT);
	CHECK(errno == EOPNOTSUPP && !strcmp(fake_last.function, "ibv_reg_dmabuf_mr"));
	CHECK(!ibv_dereg_mr(mr));
	/* The macro calls ibv_reg_mr_iova2() for optional flags; the shim drops flags without a meaning for dma-bufs. */
	mr = ibv_reg_mr(&pd, ours, ours_size, rw | IBV_ACCESS_RELAXED_ORDERING | 1 << 21);
	CHECK(mr && mr->addr == ours && fake_last.access == (rw | IBV_ACCESS_RELAXED_ORDERING));
	mr = ibv_reg_mr_iova(&pd, ours + 8, 8, 0x5008, rw);
	CHECK(mr && mr->addr == ours + 8 && fake_last.offset == 8 && fake_last.iova == 0x5008);

	/* Partly p2pmem memory: the shim calls the real function and explains its error. */
	mr = ibv_reg_mr(&pd, ours + ours_size - PAGE, 2 * PAGE, rw);
	CHECK(mr && !strcmp(fake_last.function, "ibv_reg_mr"));

	/* Errors: the shim keeps errno and prints one line for each. */
	module_errno = 0;
	fake_errno = EOPNOTSUPP;
	CHECK(!ibv_reg_mr(&pd, ours, PAGE, rw) && errno == EOPNOTSUPP);
	module_errno = fake_errno = EHOSTUNREACH;
	message = "mlx5_0 cannot reach 0000:03:00.0";
	CHECK(!ibv_reg_mr(&pd, ours, PAGE, rw) && errno == EHOSTUNREACH);
	fake_errno = 0;
	CHECK(!ibv_reg_mr(&pd, ours, PAGE, rw | IBV_ACCESS_ON_DEMAND) && errno == EINVAL);
	export_errno = ENODEV;
	message = "buffer 1 was revoked";
	CHECK(!ibv_reg_mr(&pd, ours, PAGE, rw) && errno == ENODEV);
	export_errno = 0;

	/* Without the module. */
	open_errno = ENOENT;
	mr = ibv_reg_mr(&pd, ours, PAGE, rw);
	CHECK(mr && !strcmp(fake_last.function, "ibv_reg_mr"));
	open_errno = 0;

	/* Threads, and a child process. */
	unsetenv("P2PMEM_PRELOAD_LOG");
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&threads[i], NULL, register_often, NULL));
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_join(threads[i], NULL));
	if (!fork()) {
		mr = ibv_reg_mr(&pd, ours, PAGE, rw);
		_exit(mr && mr->addr == ours ? 0 : 1);
	}
	int status;
	CHECK(wait(&status) > 0 && status == 0);
	CHECK(open_files() == files);
	return 0;
}
