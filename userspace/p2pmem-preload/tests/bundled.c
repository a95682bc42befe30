/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A program whose plugin has an own copy of libibverbs, with a changed file name, as wheels have. With PLUGIN defined, this is the
 * plugin, and also the driver of the NIC. The copy and the system's library are fake_verbs.c.
 *
 *   bundled PLUGIN [SYSTEM]     loads PLUGIN, and before that SYSTEM, the system's libibverbs, for all libraries of the program
 *
 * Exits with 0 if all checks hold; otherwise prints the first check that fails.
 */

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <infiniband/verbs.h>

#undef ibv_reg_mr

#ifdef PLUGIN

int driver_poll(struct ibv_cq *queue, int number, struct ibv_wc *done)
{
	(void)queue, (void)number, (void)done;
	return 0;
}

struct ibv_mr *plugin_register(struct ibv_pd *pd, void *addr, size_t length)
{
	return ibv_reg_mr(pd, addr, length, 0);
}

#else

#define CHECK(what)                                                                                         \
	do {                                                                                                \
		if (!(what)) {                                                                              \
			fprintf(stderr, "bundled.c:%d: check failed: %s (errno %d)\n", __LINE__, #what, errno); \
			return 1;                                                                           \
		}                                                                                           \
	} while (0)

/* What fake_verbs.c records. */
struct call {
	const char *function;
};

static char memory[100];

int main(int argc, char **argv)
{
	struct ibv_device device = { .name = "mlx5_0" };
	struct ibv_context context = { .device = &device };
	struct ibv_pd pd = { .context = &context };
	struct ibv_mr *(*plugin_register)(struct ibv_pd *, void *, size_t);
	struct call *last, *of_system = NULL;
	void *plugin, *system = NULL;

	if (argc > 2) {
		system = dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL);
		CHECK(system && (of_system = dlsym(system, "fake_last")));
	}
	plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
	CHECK(plugin);
	CHECK((plugin_register = dlsym(plugin, "plugin_register")) && (last = dlsym(plugin, "fake_last")));
	CHECK((context.ops.poll_cq = dlsym(plugin, "driver_poll")));

	/* The copy of the plugin handles the call, not the system's library. */
	CHECK(plugin_register(&pd, memory, sizeof(memory)));
	CHECK(last->function && !strcmp(last->function, "ibv_reg_mr"));
	CHECK(!of_system || !of_system->function);

	/* An unknown driver: the system's library, or an error. */
	context.ops.poll_cq = NULL;
	last->function = NULL;
	errno = 0;
	if (system) {
		CHECK(plugin_register(&pd, memory, sizeof(memory)));
		CHECK(of_system->function && !strcmp(of_system->function, "ibv_reg_mr"));
	} else {
		CHECK(!plugin_register(&pd, memory, sizeof(memory)) && errno == ENOSYS);
	}
	CHECK(!last->function);
	return 0;
}

#endif
