/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A fake libibverbs.so.1 for the test of the library: its regions record the function that made them and its arguments. */

#include <errno.h>
#include <stdlib.h>
#include <infiniband/verbs.h>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

/* The errno of the next dma-buf registration; 0 for success. */
int fake_errno;

struct call {
	const char *function;
	uint64_t offset, iova;
	int fd, access;
} fake_last;

static struct ibv_mr *region(struct ibv_pd *pd, void *addr, size_t length)
{
	static uint32_t key;
	struct ibv_mr *mr = calloc(1, sizeof(*mr));

	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = addr;
	mr->length = length;
	mr->lkey = mr->rkey = ++key;
	return mr;
}

const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	fake_last = (struct call){ "ibv_reg_mr", 0, (uintptr_t)addr, -1, access };
	if (!addr) {
		errno = EFAULT;
		return NULL;
	}
	return region(pd, addr, length);
}

struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	fake_last = (struct call){ "ibv_reg_mr_iova", 0, iova, -1, access };
	return region(pd, addr, length);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	fake_last = (struct call){ "ibv_reg_mr_iova2", 0, iova, -1, access };
	return region(pd, addr, length);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	fake_last = (struct call){ "ibv_reg_dmabuf_mr", offset, iova, fd, access };
	if (fake_errno) {
		errno = fake_errno;
		return NULL;
	}
	/* Like the real function, which does not know the address in the program. */
	return region(pd, (void *)(uintptr_t)offset, length);
}

int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	(void)mr, (void)flags, (void)pd, (void)addr, (void)length;
	fake_last = (struct call){ "ibv_rereg_mr", 0, 0, -1, access };
	return 0;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	free(mr);
	return 0;
}
