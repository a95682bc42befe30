/* SPDX-License-Identifier: GPL-2.0 */
/* The tracepoints of the group "p2pmem": events of buffers and of decisions. rust/ext/trace.rs calls them. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM p2pmem

#if !defined(P2PMEM_SYS_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define P2PMEM_SYS_TRACE_H

#include <linux/pci.h>
#include <linux/tracepoint.h>

#include "helpers.h"

/* The fields of a PCI function in a record, and their format, as lspci prints a function. */
#define P2PMEM_FUNCTION			\
	__field(u32, domain)		\
	__field(u8, bus)		\
	__field(u8, devfn)
#define P2PMEM_FUNCTION_FORMAT		"%04x:%02x:%02x.%x"
#define P2PMEM_FUNCTION_PRINT \
	__entry->domain, __entry->bus, __entry->devfn >> 3, __entry->devfn & 7

/* The fields of every event of a buffer, their assignment and their format. */
#define P2PMEM_BUFFER			\
	__field(u64, buffer)		\
	__field(u64, size)		\
	__field(u32, provider)		\
	P2PMEM_FUNCTION
#define P2PMEM_BUFFER_ASSIGN(about)			\
	do {						\
		__entry->buffer = (about)->buffer;	\
		__entry->size = (about)->size;		\
		__entry->provider = (about)->provider;	\
		__entry->domain = (about)->domain;	\
		__entry->bus = (about)->bus;		\
		__entry->devfn = (about)->devfn;	\
	} while (0)
#define P2PMEM_BUFFER_FORMAT \
	"buffer=%llu size=%llu provider=%u function=" P2PMEM_FUNCTION_FORMAT
#define P2PMEM_BUFFER_PRINT \
	__entry->buffer, __entry->size, __entry->provider, P2PMEM_FUNCTION_PRINT

TRACE_EVENT(p2pmem_alloc,
	TP_PROTO(const struct p2pmem_trace_buffer *about, u64 bar_offset, u64 file, u32 uid),
	TP_ARGS(about, bar_offset, file, uid),
	TP_STRUCT__entry(
		P2PMEM_BUFFER
		__field(u64, bar_offset)
		__field(u64, file)
		__field(u32, uid)
	),
	TP_fast_assign(
		P2PMEM_BUFFER_ASSIGN(about);
		__entry->bar_offset = bar_offset;
		__entry->file = file;
		__entry->uid = uid;
	),
	TP_printk(P2PMEM_BUFFER_FORMAT " bar_offset=0x%llx file=%llu uid=%u",
		  P2PMEM_BUFFER_PRINT, __entry->bar_offset, __entry->file, __entry->uid)
);

TRACE_EVENT(p2pmem_free,
	TP_PROTO(const struct p2pmem_trace_buffer *about),
	TP_ARGS(about),
	TP_STRUCT__entry(
		P2PMEM_BUFFER
	),
	TP_fast_assign(
		P2PMEM_BUFFER_ASSIGN(about);
	),
	TP_printk(P2PMEM_BUFFER_FORMAT, P2PMEM_BUFFER_PRINT)
);

TRACE_EVENT(p2pmem_map,
	TP_PROTO(const struct p2pmem_trace_buffer *about, u64 offset, u64 length),
	TP_ARGS(about, offset, length),
	TP_STRUCT__entry(
		P2PMEM_BUFFER
		__field(u64, offset)
		__field(u64, length)
	),
	TP_fast_assign(
		P2PMEM_BUFFER_ASSIGN(about);
		__entry->offset = offset;
		__entry->length = length;
	),
	TP_printk(P2PMEM_BUFFER_FORMAT " offset=%llu length=%llu",
		  P2PMEM_BUFFER_PRINT, __entry->offset, __entry->length)
);

/* @id is the number of the dma-buf, or of the registration if @peer is true: registered through the peer-memory interface. */
TRACE_EVENT(p2pmem_register,
	TP_PROTO(const struct p2pmem_trace_buffer *about, u64 id, u64 length, const char *device, bool peer),
	TP_ARGS(about, id, length, device, peer),
	TP_STRUCT__entry(
		P2PMEM_BUFFER
		__field(u64, id)
		__field(u64, length)
		__field(bool, peer)
		__string(device, device)
	),
	TP_fast_assign(
		P2PMEM_BUFFER_ASSIGN(about);
		__entry->id = id;
		__entry->length = length;
		__entry->peer = peer;
		__assign_str(device);
	),
	TP_printk(P2PMEM_BUFFER_FORMAT " method=%s id=%llu length=%llu device=%s",
		  P2PMEM_BUFFER_PRINT, __entry->peer ? "peer-memory" : "dma-buf", __entry->id,
		  __entry->length, __get_str(device))
);

TRACE_EVENT(p2pmem_revoke,
	TP_PROTO(const struct p2pmem_trace_buffer *about, u32 mappings, u32 exports),
	TP_ARGS(about, mappings, exports),
	TP_STRUCT__entry(
		P2PMEM_BUFFER
		__field(u32, mappings)
		__field(u32, exports)
	),
	TP_fast_assign(
		P2PMEM_BUFFER_ASSIGN(about);
		__entry->mappings = mappings;
		__entry->exports = exports;
	),
	TP_printk(P2PMEM_BUFFER_FORMAT " mappings=%u exports=%u",
		  P2PMEM_BUFFER_PRINT, __entry->mappings, __entry->exports)
);

/* @chosen is 0 if no provider can serve the request, and @error is the errno then. */
TRACE_EVENT(p2pmem_decision,
	TP_PROTO(const struct p2pmem_trace_decision *of),
	TP_ARGS(of),
	TP_STRUCT__entry(
		__field(u64, size)
		__field(u64, align)
		__field(u64, file)
		__field(u32, clients)
		__field(u32, providers)
		__field(u32, strategy)
		__field(u32, chosen)
		__field(u32, error)
		__field(bool, dry)
	),
	TP_fast_assign(
		__entry->size = of->size;
		__entry->align = of->align;
		__entry->file = of->file;
		__entry->clients = of->clients;
		__entry->providers = of->providers;
		__entry->strategy = of->strategy;
		__entry->chosen = of->chosen;
		__entry->error = of->error;
		__entry->dry = of->dry;
	),
	TP_printk("size=%llu align=%llu file=%llu clients=%u providers=%u strategy=%u chosen=%u error=%u%s",
		  __entry->size, __entry->align, __entry->file, __entry->clients, __entry->providers,
		  __entry->strategy, __entry->chosen, __entry->error, __entry->dry ? " dry" : "")
);

#endif /* P2PMEM_SYS_TRACE_H */

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE p2pmem_trace
#include <trace/define_trace.h>
