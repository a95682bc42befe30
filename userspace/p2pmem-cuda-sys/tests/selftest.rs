// SPDX-License-Identifier: MIT OR Apache-2.0

//! The example gpu_selftest without a GPU: a C program takes the place of libcuda.so.1 and executes the calls.
//!
//! The test thus checks that operations reach CUDA as they should. interpreter.ptx runs on GPUs only.

use std::path::Path;
use std::process::Command;

/// The functions that the example calls. Addresses of the GPU are those of the process. A stream is a thread, because some
/// waits are fulfilled by the program that enqueued them.
const CUDA: &str = r#"
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct operation { uint32_t kind, pad; uint64_t address, value; uint32_t flags, pad2; uint64_t alias, pad3; };
struct entry { uint32_t kind, length; uint64_t address, value, source; };
struct work {
	struct work *next;
	enum { BATCH, COPY, EXECUTE, ADD } what;
	struct operation operations[255];
	uint64_t a, b, limit, state, stop;
	uint32_t count, value;
};
struct stream {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	pthread_t thread;
	struct work *first, **end;
	int busy, over;
};

static int context, module, execute_function, add_function, live;

static int holds(uint32_t word, uint32_t value, int condition)
{
	switch (condition) {
	case 0: return (int32_t)(word - value) >= 0;
	case 2: return (word & value) != 0;
	case 3: return ~(word | value) != 0;
	default: abort();
	}
}

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint32_t word(uint64_t address) { return __atomic_load_n((uint32_t *)address, __ATOMIC_SEQ_CST); }

static void set(uint64_t address, uint32_t value) { __atomic_store_n((uint32_t *)address, value, __ATOMIC_SEQ_CST); }

static void execute(struct work *w)
{
	struct entry *e = (struct entry *)w->a;
	uint32_t end = word(w->stop) ? 3 : 1, i;
	for (i = 0; end == 1 && i < w->count; i++) {
		uint64_t start = now();
		switch (e[i].kind) {
		case 0: break;
		case 1: set(e[i].address, e[i].value); break;
		case 2: __atomic_store_n((uint64_t *)e[i].address, e[i].value, __ATOMIC_SEQ_CST); break;
		case 3: memcpy((void *)e[i].address, (void *)e[i].source, e[i].length); break;
		case 4: case 5: case 6:
			while (!holds(word(e[i].address), e[i].value, (int[]){2, 3, 0}[e[i].kind - 4])) {
				if (word(w->stop)) { end = 3; break; }
				if (now() - start > w->limit) { end = 2; break; }
				sched_yield();
			}
			break;
		default: end = 4;
		}
		if (end != 1)
			break;
	}
	if (end == 2 || end == 4)
		set(w->stop, 1);
	set(w->state + 4, i);
	set(w->state, end);
}

static void run(struct work *w)
{
	switch (w->what) {
	case BATCH:
		for (uint32_t i = 0; i < w->count; i++) {
			struct operation *o = &w->operations[i];
			switch (o->kind) {
			case 1: while (!holds(word(o->address), o->value, o->flags)) sched_yield(); break;
			case 2: set(o->address, o->value); break;
			case 5: __atomic_store_n((uint64_t *)o->address, o->value, __ATOMIC_SEQ_CST); break;
			default: abort();
			}
		}
		break;
	case COPY: memcpy((void *)w->a, (void *)w->b, w->count); break;
	case EXECUTE: execute(w); break;
	case ADD: for (uint32_t i = 0; i < w->count; i++) ((uint32_t *)w->a)[i] += w->value; break;
	}
}

static void *serve(void *argument)
{
	struct stream *s = argument;
	pthread_mutex_lock(&s->lock);
	while (!s->over) {
		struct work *w = s->first;
		if (!w) { pthread_cond_wait(&s->changed, &s->lock); continue; }
		s->first = w->next;
		if (!s->first) s->end = &s->first;
		s->busy = 1;
		pthread_mutex_unlock(&s->lock);
		run(w);
		free(w);
		pthread_mutex_lock(&s->lock);
		s->busy = 0;
	}
	pthread_mutex_unlock(&s->lock);
	return NULL;
}

static int submit(struct stream *s, struct work w)
{
	struct work *copy = malloc(sizeof(w));
	*copy = w;
	copy->next = NULL;
	pthread_mutex_lock(&s->lock);
	*s->end = copy;
	s->end = &copy->next;
	pthread_cond_signal(&s->changed);
	pthread_mutex_unlock(&s->lock);
	return 0;
}

int cuInit(unsigned flags) { return 0; }
int cuGetErrorString(int code, const char **text) { *text = "refused"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return ordinal; }
int cuDeviceGetName(char *name, int len, int device) { snprintf(name, len, "Test GPU"); return device != 7; }
int cuDeviceGetPCIBusId(char *name, int len, int device) { snprintf(name, len, "0000:03:00.0"); return device != 7; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	*value = attribute == 75 ? 9 : attribute == 122 || attribute == 123;
	return device != 7;
}
int cuDevicePrimaryCtxRetain(void **c, int device) { *c = &context; live++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { printf("left: %d\n", --live); fflush(stdout); return 0; }
int cuCtxSetCurrent(void *c) { return c != &context; }
int cuMemAlloc_v2(uint64_t *address, size_t size) { *address = (uint64_t)aligned_alloc(4096, size); live++; return 0; }
int cuMemFree_v2(uint64_t address) { free((void *)address); live--; return 0; }
int cuPointerSetAttribute(const void *value, int attribute, uint64_t address) { return 0; }
int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t size, int type, uint64_t flags) { return 1; }
int cuMemHostRegister_v2(void *start, size_t size, unsigned flags) { live++; return flags != 3; }
int cuMemHostUnregister(void *start) { live--; return 0; }
int cuMemHostGetDevicePointer_v2(uint64_t *address, void *start, unsigned flags) { *address = (uint64_t)start; return flags; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t len) { memcpy((void *)to, from, len); return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t len) { memcpy(to, (void *)from, len); return 0; }
int cuStreamCreate(void **stream, unsigned flags)
{
	struct stream *s = calloc(1, sizeof(*s));
	pthread_mutex_init(&s->lock, NULL);
	pthread_cond_init(&s->changed, NULL);
	s->end = &s->first;
	live++;
	*stream = s;
	return flags != 1 || pthread_create(&s->thread, NULL, serve, s);
}
int cuStreamDestroy_v2(void *stream)
{
	struct stream *s = stream;
	pthread_mutex_lock(&s->lock);
	s->over = 1;
	pthread_cond_signal(&s->changed);
	pthread_mutex_unlock(&s->lock);
	pthread_join(s->thread, NULL);
	free(s);
	live--;
	return 0;
}
int cuStreamQuery(void *stream)
{
	struct stream *s = stream;
	pthread_mutex_lock(&s->lock);
	int busy = s->busy || s->first;
	pthread_mutex_unlock(&s->lock);
	return busy ? 600 : 0;
}
int cuStreamBatchMemOp_v2(void *stream, unsigned count, struct operation *operations, unsigned flags)
{
	struct work w = { .what = BATCH, .count = count };
	if (!count || count > 255 || flags)
		return 1;
	memcpy(w.operations, operations, count * sizeof(*operations));
	return submit(stream, w);
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t len, void *stream)
{
	return submit(stream, (struct work){ .what = COPY, .a = to, .b = from, .count = len });
}
int cuModuleLoadData(void **m, const void *text)
{
	live++;
	*m = &module;
	return !strstr(text, ".entry execute") || !strstr(text, ".entry add");
}
int cuModuleUnload(void *m) { live--; return m != &module; }
int cuModuleGetFunction(void **function, void *m, const char *name)
{
	*function = !strcmp(name, "execute") ? &execute_function : &add_function;
	return m != &module;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
		   void *stream, void **p, void **extra)
{
	if (function == &add_function)
		return submit(stream, (struct work){ .what = ADD, .a = *(uint64_t *)p[0], .count = *(uint32_t *)p[1],
						     .value = *(uint32_t *)p[2] }) || gx * bx < *(uint32_t *)p[1];
	return submit(stream, (struct work){ .what = EXECUTE, .a = *(uint64_t *)p[0], .count = *(uint32_t *)p[1],
					     .limit = *(uint64_t *)p[2], .state = *(uint64_t *)p[3], .stop = *(uint64_t *)p[4] }) || gx * bx != 1;
}
"#;

#[test]
fn every_operation_reaches_cuda_and_everything_is_freed() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("cuda.c");
    std::fs::write(&source, CUDA).unwrap();
    let library = folder.path().join("libcuda.so.1");
    let compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-pthread", "-w", "-o"])
        .args([&library, &source])
        .output();
    let out = match compiler {
        Ok(out) => out,
        Err(error) if !Path::new("/src").exists() => {
            eprintln!("not tested: cc: {error}");
            return;
        }
        Err(error) => panic!("cc: {error}"),
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    // Cargo builds examples before it runs tests.
    let deps = std::env::current_exe().unwrap();
    let program = deps.parent().unwrap().with_file_name("examples").join("gpu_selftest");
    let out = Command::new(&program).env("LD_LIBRARY_PATH", folder.path()).output();
    let out = out.unwrap_or_else(|error| panic!("{}: {error}: run `cargo test -p p2pmem-cuda-sys`", program.display()));
    let (said, errors) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    assert!(out.status.success(), "{said}{errors}");
    assert_eq!(
        said.lines().filter(|line| line.starts_with("ok: ")).count(),
        10,
        "{said}"
    );
    assert!(said.ends_with("left: 0\n"), "{said}");
}
