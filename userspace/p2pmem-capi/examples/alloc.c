/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Lists providers, allocates a buffer near the named devices, writes and reads the buffer, and exports the buffer as a
 * dma-buf. If the first device is an RDMA NIC, also registers the buffer with it.
 *
 *   cc -o alloc alloc.c $(pkg-config --cflags --libs p2pmem) -libverbs
 *   ./alloc SIZE [DEVICE...]
 */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <infiniband/verbs.h>
#include <p2pmem.h>

static int fail(const char *what)
{
	const char *remedy = p2pmem_last_remedy();

	fprintf(stderr, "%s: %s\n", what, p2pmem_last_error());
	if (*remedy)
		fprintf(stderr, "  -> %s\n", remedy);
	return 1;
}

static int list(p2pmem_dev *dev)
{
	p2pmem_provider_info all[64];
	int there = p2pmem_list(dev, all, 64);

	if (there < 0)
		return fail("list");
	for (int i = 0; i < there && i < 64; i++)
		printf("provider %" PRIu32 ": %s BAR %" PRId32 ", %" PRIu64 " of %" PRIu64 " bytes free\n", all[i].id,
		       all[i].address, all[i].bar, all[i].free, all[i].size);
	return 0;
}

static int write_and_read(const p2pmem_buf *buf)
{
	p2pmem_mapping *map;
	volatile uint64_t *words;
	size_t n;

	if (p2pmem_map(buf, &map))
		return fail("map");
	words = p2pmem_map_addr(map);
	n = p2pmem_map_len(map) / sizeof(*words);
	for (size_t i = 0; i < n; i++)
		words[i] = i * 0x9e3779b97f4a7c15u;
	p2pmem_flush(map);
	for (size_t i = 0; i < n; i++) {
		if (words[i] != i * 0x9e3779b97f4a7c15u) {
			fprintf(stderr, "word %zu differs from the data that was written\n", i);
			return 1;
		}
	}
	printf("%zu words written and read back\n", n);
	p2pmem_unmap(map);
	return 0;
}

/* Opens the NIC of this name; returns NULL if there is none. */
static struct ibv_context *open_nic(const char *name)
{
	struct ibv_context *context = NULL;
	struct ibv_device **all = ibv_get_device_list(NULL);

	for (int i = 0; all && all[i]; i++)
		if (!strcmp(ibv_get_device_name(all[i]), name))
			context = ibv_open_device(all[i]);
	if (all)
		ibv_free_device_list(all);
	return context;
}

static int register_with(const p2pmem_buf *buf, struct ibv_context *nic)
{
	struct ibv_pd *pd = ibv_alloc_pd(nic);
	p2pmem_reg *reg;

	if (!pd) {
		perror("ibv_alloc_pd");
		return 1;
	}
	if (p2pmem_register(buf, pd, 0, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, &reg))
		return fail("register");
	printf("registered by %s: %zu bytes from %#" PRIx64 " on, rkey %#" PRIx32 "\n",
	       p2pmem_reg_method(reg) == P2PMEM_METHOD_DMABUF ? "dma-buf" : "peer memory", p2pmem_reg_len(reg),
	       p2pmem_reg_addr(reg), p2pmem_reg_rkey(reg));
	if (p2pmem_deregister(reg))
		return fail("deregister");
	return ibv_dealloc_pd(pd);
}

int main(int argc, char **argv)
{
	p2pmem_want want = { .size = argc > 1 ? strtoull(argv[1], NULL, 0) : 1 << 20 };
	struct ibv_context *nic = NULL;
	p2pmem_dev *dev;
	p2pmem_buf *buf;
	char why[4096];
	int fd;

	if (argc > 2) {
		want.near_devices = (const char *const *)&argv[2];
		want.nr_near = argc - 2;
		nic = open_nic(argv[2]);
	}
	if (p2pmem_open(NULL, &dev))
		return fail("open");
	if (list(dev))
		return 1;
	if (p2pmem_alloc(dev, &want, &buf))
		return fail("alloc");
	if (p2pmem_explain_last(dev, why, sizeof(why)) < 0)
		return fail("explain");
	printf("%" PRIu64 " bytes in provider %" PRIu32 "\n%s\n", p2pmem_buf_size(buf), p2pmem_buf_provider(buf), why);
	if (write_and_read(buf))
		return 1;
	fd = p2pmem_export(buf, 0, 0, 0);
	if (fd < 0)
		return fail("export");
	printf("exported as a dma-buf\n");
	close(fd);
	if (nic && (register_with(buf, nic) || ibv_close_device(nic)))
		return 1;
	p2pmem_free(buf);
	p2pmem_close(dev);
	return 0;
}
