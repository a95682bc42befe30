// SPDX-License-Identifier: GPL-2.0
/*
 * The C side of rust/sys for tracepoints. Rust calls these functions if the static key of the event is enabled. They do not
 * sleep.
 */

#define CREATE_TRACE_POINTS
#include "p2pmem_trace.h"

void p2pmem_trace_alloc(const struct p2pmem_trace_buffer *about, u64 bar_offset, u64 file, u32 uid)
{
	trace_p2pmem_alloc(about, bar_offset, file, uid);
}

void p2pmem_trace_free(const struct p2pmem_trace_buffer *about)
{
	trace_p2pmem_free(about);
}

void p2pmem_trace_map(const struct p2pmem_trace_buffer *about, u64 offset, u64 length)
{
	trace_p2pmem_map(about, offset, length);
}

void p2pmem_trace_register(const struct p2pmem_trace_buffer *about, u64 id, u64 length, const char *device, bool peer)
{
	trace_p2pmem_register(about, id, length, device, peer);
}

void p2pmem_trace_revoke(const struct p2pmem_trace_buffer *about, u32 mappings, u32 exports)
{
	trace_p2pmem_revoke(about, mappings, exports);
}

void p2pmem_trace_decision(const struct p2pmem_trace_decision *of)
{
	trace_p2pmem_decision(of);
}
