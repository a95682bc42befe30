/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/* The ABI of /dev/p2pmem: the one source of it, for the module, the crates and C programs alike. */
#ifndef _UAPI_LINUX_P2PMEM_H
#define _UAPI_LINUX_P2PMEM_H

#include <linux/ioctl.h>
#include <linux/types.h>

/**
 * DOC: Rules that hold for every structure here
 *
 * The ABI can grow in both directions. An ioctl is known by its type, direction and number; the size in its command is
 * the size of the caller's structure. Bytes that a shorter structure lacks count as zero, and the answer is copied back
 * to the caller's size only. A longer structure must be zero where the module's ends, else -E2BIG; in an answer without
 * input (&P2PMEM_IOC_INFO) these bytes are set to zero. A structure that ends before its essential fields is -EINVAL.
 *
 * For each array the caller states the size of one element in the field *_size, from 4 to %P2PMEM_MAX_ELEMENT bytes
 * (less is -EINVAL, more is -E2BIG). The field is ignored where the array is empty. Elements that the module writes are
 * cut to that size, or filled up with zeros. Elements that it reads follow the rule for structures.
 *
 * A program works with a module if its %P2PMEM_ABI_VERSION is at least &struct p2pmem_info.abi_compatible. What an older
 * module lacks is told by &struct p2pmem_info.features.
 *
 * Fields named flags take only the bits defined for them and fields named reserved must be zero, else -EINVAL.
 * User pointers travel as __u64. All sizes and offsets are bytes. No structure has implicit padding, and none
 * differs between 32-bit and 64-bit programs.
 *
 * Every ioctl that is refused leaves a sentence that says why: &P2PMEM_IOC_EXPLAIN with %P2PMEM_EXPLAIN_LAST.
 * -EFAULT (a bad pointer) and -ENOTTY (an unknown ioctl) leave none.
 *
 * Version 5 is the first that can grow, and is not compatible with earlier versions: the type of its ioctls
 * (%P2PMEM_IOC_MAGIC) differs, so calls of earlier programs are -ENOTTY.
 */

#define P2PMEM_ABI_VERSION	5
/* The oldest version whose programs work with a module of this version. */
#define P2PMEM_ABI_COMPATIBLE	5
/* Largest element of an array, in bytes. */
#define P2PMEM_MAX_ELEMENT	4096
/* No event is larger than this many bytes, in any version. */
#define P2PMEM_MAX_EVENT	256

/* Most clients one request may name. */
#define P2PMEM_MAX_CLIENTS	64
/* Most ranges one dma-buf may consist of. */
#define P2PMEM_MAX_RANGES	64
/* Most buffers one stripe may consist of. */
#define P2PMEM_MAX_PARTS	16
/* Most rules a file may have of its own. */
#define P2PMEM_MAX_RULES	32
/* Bytes of a rule's name, with its NUL. */
#define P2PMEM_RULE_NAME	32
/* Largest alignment of a buffer: 1 GiB. */
#define P2PMEM_MAX_ALIGN	(1ULL << 30)

/**
 * struct p2pmem_pci_addr - where a PCI function is
 * @domain: PCI domain (segment)
 * @bus: bus number
 * @devfn: device number << 3 | function number
 * @reserved: must be zero
 */
struct p2pmem_pci_addr {
	__u32 domain;
	__u8 bus;
	__u8 devfn;
	__u16 reserved;
};

/* &struct p2pmem_info.features */
#define P2PMEM_FEATURE_MMAP_PAGED	(1ULL << 0)	/* page-backed mappings: O_DIRECT works */
#define P2PMEM_FEATURE_EVENTS		(1ULL << 1)	/* read() and poll() deliver events */
#define P2PMEM_FEATURE_ADOPT		(1ULL << 2)	/* providers other drivers published are adopted */
#define P2PMEM_FEATURE_DMABUF		(1ULL << 3)	/* buffers can be exported as dma-bufs */
#define P2PMEM_FEATURE_PAGELESS		(1ULL << 4)	/* providers can do without struct pages */
#define P2PMEM_FEATURE_PEER_MEMORY	(1ULL << 5)	/* ibv_reg_mr() takes mappings of buffers */
#define P2PMEM_FEATURE_RULES		(1ULL << 6)	/* rules of the administrator and of files are obeyed */
#define P2PMEM_FEATURE_IMPORT		(1ULL << 7)	/* a dma-buf of a whole buffer can be made a handle again */
#define P2PMEM_FEATURE_STRIPE		(1ULL << 8)	/* one request can be served by several providers */

/**
 * struct p2pmem_info - what this module is, and what it holds in all
 * @abi_version: %P2PMEM_ABI_VERSION of the module
 * @page_size: granularity of buffers and mappings
 * @features: P2PMEM_FEATURE_* bits
 * @providers: providers there are now
 * @buffers: live buffers of all files
 * @size: bytes managed in all providers
 * @free: bytes free in all providers
 * @generation: changes whenever a provider comes or goes, or paths were recomputed
 * @version: the module's version, NUL-terminated
 * @abi_compatible: %P2PMEM_ABI_COMPATIBLE of the module
 * @reserved: zero
 */
struct p2pmem_info {
	__u32 abi_version;
	__u32 page_size;
	__u64 features;
	__u32 providers;
	__u32 buffers;
	__u64 size;
	__u64 free;
	__u64 generation;
	char version[32];
	__u32 abi_compatible;
	__u32 reserved;
};

/**
 * enum p2pmem_kind - how a provider came to be one
 * @P2PMEM_KIND_OWN: a BAR of a device bound to the p2pmem driver, published by the administrator
 * @P2PMEM_KIND_ADOPTED: memory that the device's own driver published
 * @P2PMEM_KIND_REGISTERED: memory that the device's own driver handed to p2pmem (include/linux/p2pmem.h)
 */
enum p2pmem_kind {
	P2PMEM_KIND_OWN = 1,
	P2PMEM_KIND_ADOPTED = 2,
	P2PMEM_KIND_REGISTERED = 3,
};

/**
 * enum p2pmem_provider_state - what can be done with a provider
 * @P2PMEM_PROVIDER_LIVE: buffers can be allocated from it
 * @P2PMEM_PROVIDER_REVOKING: it is going away, its buffers are being revoked
 */
enum p2pmem_provider_state {
	P2PMEM_PROVIDER_LIVE = 1,
	P2PMEM_PROVIDER_REVOKING = 2,
};

/* &struct p2pmem_provider.flags */
#define P2PMEM_PROVIDER_PAGELESS	(1U << 0)	/* no struct pages: mappings are for the CPU alone, O_DIRECT fails */
#define P2PMEM_PROVIDER_EXPORTABLE	(1U << 1)	/* buffers in it can be exported as dma-bufs */
#define P2PMEM_PROVIDER_PINNED_EXPORTS	(1U << 2)	/* the administrator allows %P2PMEM_EXPORT_PINNED */
#define P2PMEM_PROVIDER_CLEARING	(1U << 3)	/* memory that was in use is being cleared: @free and @largest still change */

/**
 * struct p2pmem_provider - one provider
 * @id: its number, never 0, never used twice while the module is loaded
 * @kind: &enum p2pmem_kind
 * @addr: the PCI function whose memory it is
 * @state: &enum p2pmem_provider_state
 * @bar: the BAR, or -1 where the device's own driver published and did not say
 * @numa_node: the function's NUMA node, or -1
 * @buffers: live buffers in it
 * @bar_offset: first published byte in the BAR
 * @size: bytes that p2pmem manages; for an adopted provider the pool of the device's driver
 * @free: bytes that are free, of @size
 * @largest: largest contiguous piece that an allocation could get now
 * @kernel_reserve: bytes left in the kernel's own pool for in-kernel users
 * @parked: bytes of freed buffers that wait for DMA or page references of others to end
 * @scrubbing: bytes of freed buffers that wait to be cleared
 * @vendor: PCI vendor id
 * @device: PCI device id
 * @class: PCI class code (24 bits)
 * @flags: P2PMEM_PROVIDER_PAGELESS and the other bits of that row
 * @exports: dma-bufs of buffers in it that are not closed yet
 * @driver: name of the driver bound to the function, NUL-terminated, empty where there is none
 */
struct p2pmem_provider {
	__u32 id;
	__u32 kind;
	struct p2pmem_pci_addr addr;
	__u32 state;
	__s32 bar;
	__s32 numa_node;
	__u32 buffers;
	__u64 bar_offset;
	__u64 size;
	__u64 free;
	__u64 largest;
	__u64 kernel_reserve;
	__u64 parked;
	__u64 scrubbing;
	__u16 vendor;
	__u16 device;
	__u32 class;
	__u32 flags;
	__u32 exports;
	char driver[32];
};

/**
 * struct p2pmem_list - list the providers, in the order of their ids
 * @providers: array of &struct p2pmem_provider to fill
 * @count: in: elements in @providers; out: providers there are (more than fit are counted, not written)
 * @flags: must be zero
 * @provider_size: bytes of one element of @providers
 * @reserved: must be zero
 */
struct p2pmem_list {
	__u64 providers;
	__u32 count;
	__u32 flags;
	__u32 provider_size;
	__u32 reserved;
};

/**
 * enum p2pmem_path_class - how far a provider is from a client; smaller is nearer
 * @P2PMEM_PATH_SAME_DEVICE: the same function, or functions of one device
 * @P2PMEM_PATH_SAME_SWITCH: below one PCIe switch: traffic stays in that switch
 * @P2PMEM_PATH_SWITCHES: below one root port, through more than one switch
 * @P2PMEM_PATH_HOST_BRIDGE: through the root complex, below one host bridge
 * @P2PMEM_PATH_NUMA_NODE: two host bridges of one NUMA node
 * @P2PMEM_PATH_SYSTEM: two host bridges of two NUMA nodes
 * @P2PMEM_PATH_UNREACHABLE: the kernel says the client cannot reach the provider
 *
 * A path below a switch that ACS redirects counts as one through the root complex, which is the way its traffic takes.
 */
enum p2pmem_path_class {
	P2PMEM_PATH_SAME_DEVICE = 1,
	P2PMEM_PATH_SAME_SWITCH = 2,
	P2PMEM_PATH_SWITCHES = 3,
	P2PMEM_PATH_HOST_BRIDGE = 4,
	P2PMEM_PATH_NUMA_NODE = 5,
	P2PMEM_PATH_SYSTEM = 6,
	P2PMEM_PATH_UNREACHABLE = 255,
};

/* &struct p2pmem_path.flags */
#define P2PMEM_PATH_ACS_REDIRECT	(1U << 0)	/* a port on the way redirects peer traffic upstream */
#define P2PMEM_PATH_BUS_ADDR		(1U << 1)	/* peer traffic stays below the common bridge */

/**
 * struct p2pmem_path - the way between one provider and one client
 * @provider: &struct p2pmem_provider.id
 * @client: index into the request's clients
 * @class: &enum p2pmem_path_class
 * @flags: P2PMEM_PATH_ACS_REDIRECT, P2PMEM_PATH_BUS_ADDR
 * @hops: links crossed
 * @distance: what the kernel's pci_p2pdma_distance_many() says, -1 for unreachable
 * @bandwidth: of the narrowest link on the way, MB/s in one direction, 0 where no link tells
 * @numa_distance: kernel's NUMA distance between the two (10 = local), 0 where one has no node
 * @bridge: the lowest bridge both are below; all zero where that is the root complex
 */
struct p2pmem_path {
	__u32 provider;
	__u32 client;
	__u32 class;
	__u32 flags;
	__u32 hops;
	__s32 distance;
	__u32 bandwidth;
	__u32 numa_distance;
	struct p2pmem_pci_addr bridge;
};

/**
 * struct p2pmem_paths - the matrix of paths between all providers and the given clients
 * @clients: array of &struct p2pmem_pci_addr
 * @paths: array of &struct p2pmem_path to fill, all clients of the first provider first
 * @nr_clients: elements in @clients, 1 to %P2PMEM_MAX_CLIENTS
 * @nr_paths: in: elements in @paths; out: paths there are (more than fit are counted, not written)
 * @flags: %P2PMEM_PATHS_RESCAN or zero
 * @reserved: must be zero
 * @client_size: bytes of one element of @clients
 * @path_size: bytes of one element of @paths
 *
 * Errors: -ENODEV when a client is no PCI function of this machine, -EPERM (%P2PMEM_PATHS_RESCAN without CAP_SYS_ADMIN).

 */
struct p2pmem_paths {
	__u64 clients;
	__u64 paths;
	__u32 nr_clients;
	__u32 nr_paths;
	__u32 flags;
	__u32 reserved;
	__u32 client_size;
	__u32 path_size;
};

/* &struct p2pmem_paths.flags: forget cached paths first (after a change of ACS by setpci, say); takes CAP_SYS_ADMIN */
#define P2PMEM_PATHS_RESCAN		(1U << 0)

/**
 * enum p2pmem_strategy - who chooses among the providers
 * @P2PMEM_STRATEGY_NEAREST: path class, hops, bandwidth, NUMA, load: see Documentation/design/placement.md
 * @P2PMEM_STRATEGY_UPSTREAM: the kernel's own pci_p2pmem_find_many()
 * @P2PMEM_STRATEGY_SPREAD: the least loaded of those that can serve, however far (see @max_class of the request), then
 *	as NEAREST
 * @P2PMEM_STRATEGY_PACK: the most loaded of those that can serve, so that others stay empty, then as NEAREST
 * @P2PMEM_STRATEGY_STRIPE: several, each with an equal part, the best ones by NEAREST: for &P2PMEM_IOC_STRIPE, and for
 *	&P2PMEM_IOC_EXPLAIN to say what that would do
 */
enum p2pmem_strategy {
	P2PMEM_STRATEGY_NEAREST = 0,
	P2PMEM_STRATEGY_UPSTREAM = 1,
	P2PMEM_STRATEGY_SPREAD = 2,
	P2PMEM_STRATEGY_PACK = 3,
	P2PMEM_STRATEGY_STRIPE = 4,
};

/* &struct p2pmem_request.flags: the named provider is a wish: take another one where it cannot serve */
#define P2PMEM_ALLOC_PREFER		(1U << 0)

/**
 * struct p2pmem_request - what a buffer has to be
 * @size: bytes, rounded up to pages; not 0
 * @align: alignment in the BAR, a power of two up to %P2PMEM_MAX_ALIGN; 0 means a page
 * @clients: array of &struct p2pmem_pci_addr: the devices that will DMA
 * @nr_clients: elements in @clients; 0 means near nothing in particular
 * @flags: %P2PMEM_ALLOC_PREFER or zero
 * @strategy: &enum p2pmem_strategy
 * @provider: id of the one provider to take (with %P2PMEM_ALLOC_PREFER: to try first); 0 means any
 * @max_class: farthest &enum p2pmem_path_class allowed; 0 means any that is reachable
 * @parts: with %P2PMEM_STRATEGY_STRIPE, providers to divide it among, up to %P2PMEM_MAX_PARTS; 0 means as many as can
 *	serve. Must be zero with any other strategy
 * @client_size: bytes of one element of @clients
 * @reserved: must be zero
 * @spare: must be zero
 */
struct p2pmem_request {
	__u64 size;
	__u64 align;
	__u64 clients;
	__u32 nr_clients;
	__u32 flags;
	__u32 strategy;
	__u32 provider;
	__u32 max_class;
	__u32 parts;
	__u32 client_size;
	__u32 reserved;
	__u64 spare[4];
};

/**
 * struct p2pmem_alloc - allocate a buffer
 * @req: the request
 * @handle: out: the buffer's handle on this file, never 0, never used twice in the file's life
 * @provider: out: id of the provider it lies in
 * @size: out: its size, @req.size rounded up to pages
 * @mmap_offset: out: the offset at which mmap() on this file maps it
 * @bar_offset: out: its first byte in the provider's BAR; all ones where the BAR is not known
 * @class: out: class of its path to the farthest client; 0 without clients
 * @reserved: must be zero
 *
 * Errors: -EINVAL (bad field), -ENODEV (a client is no PCI function here, or no provider is left that could ever
 * serve the request: none published, none reachable, none near enough), -EACCES (rules deny all that could),
 * -EDQUOT (a quota of the user, the group or the file, or a limit of the cgroup, would be broken), -ENOSPC (those that could are full, or what is
 * free is set aside for others), -E2BIG (more clients than %P2PMEM_MAX_CLIENTS), -ENOMEM.
 */
struct p2pmem_alloc {
	struct p2pmem_request req;
	__u32 handle;
	__u32 provider;
	__u64 size;
	__u64 mmap_offset;
	__u64 bar_offset;
	__u32 class;
	__u32 reserved;
};

/**
 * struct p2pmem_free - end a buffer's handle
 * @handle: the handle
 * @flags: must be zero
 *
 * The memory is free once the last mapping and the last dma-buf are gone too. Errors: -ENOENT (no such handle on this
 * file).
 */
struct p2pmem_free {
	__u32 handle;
	__u32 flags;
};

/**
 * enum p2pmem_buffer_state - a buffer's life
 * @P2PMEM_BUFFER_LIVE: it can be mapped and used
 * @P2PMEM_BUFFER_REVOKING: its provider is leaving, mappings are being taken down
 * @P2PMEM_BUFFER_GONE: its memory is another's: touching a mapping of it ends in SIGBUS
 */
enum p2pmem_buffer_state {
	P2PMEM_BUFFER_LIVE = 1,
	P2PMEM_BUFFER_REVOKING = 2,
	P2PMEM_BUFFER_GONE = 3,
};

/**
 * struct p2pmem_buffer - ask about a buffer
 * @handle: in: the handle
 * @provider: id of its provider
 * @size: bytes
 * @mmap_offset: the offset at which mmap() maps it
 * @bar_offset: its first byte in the provider's BAR; all ones where the BAR is not known
 * @bus_addr: its address on the provider's PCI bus
 * @state: &enum p2pmem_buffer_state
 * @mappings: user mappings of it (VMAs)
 * @exports: dma-bufs of it that are not closed yet
 * @attachments: importers that are attached to these dma-bufs now
 * @flags: must be zero
 * @handles: out: handles of it on all files: more than one where it was imported
 *
 * Errors: -ENOENT (no such handle on this file). @bus_addr is 0 for callers without CAP_SYS_ADMIN.
 */
struct p2pmem_buffer {
	__u32 handle;
	__u32 provider;
	__u64 size;
	__u64 mmap_offset;
	__u64 bar_offset;
	__u64 bus_addr;
	__u32 state;
	__u32 mappings;
	__u32 exports;
	__u32 attachments;
	__u32 flags;
	__u32 handles;
};

/**
 * struct p2pmem_range - a part of a buffer
 * @offset: first byte in the buffer, or with %P2PMEM_EXPORT_MAPPED an address of the caller; whole pages
 * @size: bytes; whole pages, not 0
 */
struct p2pmem_range {
	__u64 offset;
	__u64 size;
};

/* &struct p2pmem_export.flags */
#define P2PMEM_EXPORT_PINNED		(1U << 0)	/* importers that cannot be revoked may attach too */
#define P2PMEM_EXPORT_MAPPED		(1U << 1)	/* the ranges are addresses of the caller */

/**
 * struct p2pmem_export - export parts of one buffer as a dma-buf
 * @ranges: array of &struct p2pmem_range
 * @nr_ranges: elements in @ranges, 1 to %P2PMEM_MAX_RANGES
 * @handle: the buffer's handle on this file; 0 with %P2PMEM_EXPORT_MAPPED
 * @flags: P2PMEM_EXPORT_* bits
 * @fd: out: descriptor of the dma-buf, close-on-exec, open for reading and writing
 * @range_size: bytes of one element of @ranges
 * @reserved: must be zero
 *
 * The dma-buf is the concatenation of the ranges, in their order; they must not overlap. With %P2PMEM_EXPORT_MAPPED
 * each range has to lie in mappings, which may be several, of one and the same buffer, allocated through whichever
 * file, that could be made writable.
 *
 * The dma-buf keeps the buffer's memory until it is closed and its last importer is detached, longer than the handle,
 * the mappings and the file may live. When the provider leaves the dma-buf is revoked: importers are told and have to
 * unmap, and from then on mapping it ends in -ENODEV.
 *
 * Importers attach later, through their own driver's call (ibv_reg_dmabuf_mr(), say). One that cannot do peer-to-peer
 * DMA or cannot be revoked is refused with -EOPNOTSUPP, one that cannot reach the provider with -EHOSTUNREACH. The
 * reason is in the kernel's log, and %P2PMEM_EXPLAIN_LAST gives it on the file that exported.
 *
 * Errors: -EINVAL (a bad field, a range that is empty, not whole pages, past the buffer's end, or overlaps another),
 * -E2BIG (more ranges than %P2PMEM_MAX_RANGES), -ENOENT (no such handle on this file, or no mapping of a buffer at an
 * address), -EXDEV (mappings of two buffers), -EACCES (a mapping that is read-only for good), -ENODEV (the buffer was
 * revoked), -EPERM (%P2PMEM_EXPORT_PINNED where the administrator does not allow it: configfs attribute
 * pinned_exports), -EOPNOTSUPP (memory of another driver whose BAR is not known), -EMFILE (no descriptor is left, or this
 * file has 65,536 dma-bufs that are not released), -ENOMEM.
 */
struct p2pmem_export {
	__u64 ranges;
	__u32 nr_ranges;
	__u32 handle;
	__u32 flags;
	__s32 fd;
	__u32 range_size;
	__u32 reserved;
};

/**
 * struct p2pmem_import - make a dma-buf of a whole buffer a handle of this file
 * @fd: descriptor of the dma-buf, which stays the caller's to close
 * @flags: must be zero
 * @handle: out: the handle, as that of an allocation; each call makes another one, of the same buffer
 * @provider: out: id of the provider the buffer lies in
 * @size: out: its size
 * @mmap_offset: out: the offset at which mmap() on this file maps it
 * @bar_offset: out: its first byte in the provider's BAR; all ones where the BAR is not known
 *
 * This is how a buffer gets to other processes: whoever has it exports the whole of it and passes the descriptor on
 * (SCM_RIGHTS), and who gets it imports it. The handle holds the buffer as all others do: its memory is free when the
 * last handle, mapping, dma-buf and registration is gone, whoever has that. It is charged to the user, the groups, the
 * file and the cgroup that allocated it, until it is free, and rules look at importers of dma-bufs as the allocator's.
 * Who has a handle can do all with the buffer that the allocator can.
 *
 * Errors: -EINVAL (a bad field, or the descriptor is no dma-buf), -EBADF (no such descriptor), -EXDEV (a dma-buf of
 * another driver's), -EACCES (a dma-buf of parts of a buffer: its receiver was not given the rest), -ENODEV (the buffer
 * was revoked), -EMFILE (this file has used up its handles), -ENOMEM.
 */
struct p2pmem_import {
	__s32 fd;
	__u32 flags;
	__u32 handle;
	__u32 provider;
	__u64 size;
	__u64 mmap_offset;
	__u64 bar_offset;
};

/**
 * struct p2pmem_part - one buffer of a stripe
 * @handle: its handle on this file, as that of an allocation
 * @provider: id of the provider it lies in
 * @offset: its first byte in the stripe
 * @size: its size
 * @mmap_offset: the offset at which mmap() on this file maps it
 * @bar_offset: its first byte in the provider's BAR; all ones where the BAR is not known
 * @class: class of its path to the farthest client; 0 without clients
 * @reserved: zero
 */
struct p2pmem_part {
	__u32 handle;
	__u32 provider;
	__u64 offset;
	__u64 size;
	__u64 mmap_offset;
	__u64 bar_offset;
	__u32 class;
	__u32 reserved;
};

/**
 * struct p2pmem_stripe - allocate over several providers
 * @req: the request, with %P2PMEM_STRATEGY_STRIPE. A @provider can be preferred, but not required
 * @parts: array of &struct p2pmem_part to fill, in the order of their offsets
 * @nr_parts: in: elements in @parts, at least @req.parts and 1; out: parts there are
 * @flags: must be zero
 * @size: out: size of the stripe, @req.size rounded up to pages
 * @part_size: bytes of one element of @parts
 * @reserved: must be zero
 *
 * A stripe is as many buffers as it has parts, each in another provider. They are equal in size, but for the last one,
 * which may be smaller, and together the stripe: part n begins where part n - 1 ends. Where @req.size allows, all
 * boundaries are multiples of @req.align. Either all parts are allocated or none. From then on each is a buffer like any
 * other, and freed, mapped, exported and revoked by itself: no dma-buf and no I/O request reaches across a boundary, and
 * a provider that leaves takes its part with it.
 *
 * With @req.parts 0 there are as many parts as providers can serve one, up to @nr_parts; providers that rules avoid only
 * where there would be none without them.
 *
 * Errors: those of &struct p2pmem_alloc; -EINVAL also for too little room in @parts, for more parts than pages, and for
 * another strategy, -E2BIG also for more parts than %P2PMEM_MAX_PARTS. Where fewer providers than @req.parts can serve it
 * is the error of the one that came next.
 */
struct p2pmem_stripe {
	struct p2pmem_request req;
	__u64 parts;
	__u32 nr_parts;
	__u32 flags;
	__u64 size;
	__u32 part_size;
	__u32 reserved;
};

/**
 * enum p2pmem_verdict_code - why a provider was or was not chosen
 * @P2PMEM_VERDICT_CHOSEN: it was chosen
 * @P2PMEM_VERDICT_UNREACHABLE: a client cannot reach it
 * @P2PMEM_VERDICT_TOO_FAR: a path is farther than the request's max_class
 * @P2PMEM_VERDICT_TOO_SMALL: it could not hold the buffer were it empty
 * @P2PMEM_VERDICT_FULL: it has not enough free bytes
 * @P2PMEM_VERDICT_FRAGMENTED: it has the bytes, but not in one piece with that alignment
 * @P2PMEM_VERDICT_LEAVING: it is being revoked
 * @P2PMEM_VERDICT_NOT_NAMED: the request names another provider
 * @P2PMEM_VERDICT_CLASS: another one's path class is nearer
 * @P2PMEM_VERDICT_HOPS: another one is fewer hops away
 * @P2PMEM_VERDICT_BANDWIDTH: another one has a wider narrowest link
 * @P2PMEM_VERDICT_NUMA: another one is nearer in NUMA distance
 * @P2PMEM_VERDICT_LOAD: another one is less loaded
 * @P2PMEM_VERDICT_SPACE: another one has a larger contiguous piece left
 * @P2PMEM_VERDICT_ORDER: equal in everything to the chosen one, which came earlier
 * @P2PMEM_VERDICT_UPSTREAM: pci_p2pmem_find_many() returned another one
 * @P2PMEM_VERDICT_DENIED: a rule denies it
 * @P2PMEM_VERDICT_QUOTA: the buffer would break a rule's quota
 * @P2PMEM_VERDICT_RESERVED: rules set aside for others what is free
 * @P2PMEM_VERDICT_PREFERENCE: a rule prefers another one, or avoids this one
 * @P2PMEM_VERDICT_PACKED: another one is more loaded, and %P2PMEM_STRATEGY_PACK was asked for
 * @P2PMEM_VERDICT_CGROUP: the buffer would break the cgroup's limit (dmem.max) for it
 * @P2PMEM_VERDICT_ALONE: it could hold a part of the stripe, but too few others can
 */
enum p2pmem_verdict_code {
	P2PMEM_VERDICT_CHOSEN = 1,
	P2PMEM_VERDICT_UNREACHABLE = 2,
	P2PMEM_VERDICT_TOO_FAR = 3,
	P2PMEM_VERDICT_TOO_SMALL = 4,
	P2PMEM_VERDICT_FULL = 5,
	P2PMEM_VERDICT_FRAGMENTED = 6,
	P2PMEM_VERDICT_LEAVING = 7,
	P2PMEM_VERDICT_NOT_NAMED = 8,
	P2PMEM_VERDICT_CLASS = 9,
	P2PMEM_VERDICT_HOPS = 10,
	P2PMEM_VERDICT_BANDWIDTH = 11,
	P2PMEM_VERDICT_NUMA = 12,
	P2PMEM_VERDICT_LOAD = 13,
	P2PMEM_VERDICT_SPACE = 14,
	P2PMEM_VERDICT_ORDER = 15,
	P2PMEM_VERDICT_UPSTREAM = 16,
	P2PMEM_VERDICT_DENIED = 17,
	P2PMEM_VERDICT_QUOTA = 18,
	P2PMEM_VERDICT_RESERVED = 19,
	P2PMEM_VERDICT_PREFERENCE = 20,
	P2PMEM_VERDICT_PACKED = 21,
	P2PMEM_VERDICT_CGROUP = 22,
	P2PMEM_VERDICT_ALONE = 23,
};

/**
 * enum p2pmem_rule_set - whose rule it is
 * @P2PMEM_RULES_NONE: no rule
 * @P2PMEM_RULES_ADMIN: the administrator's, in configfs
 * @P2PMEM_RULES_OWN: one of the file's own, see &P2PMEM_IOC_RULES
 */
enum p2pmem_rule_set {
	P2PMEM_RULES_NONE = 0,
	P2PMEM_RULES_ADMIN = 1,
	P2PMEM_RULES_OWN = 2,
};

/**
 * struct p2pmem_verdict - what a decision said of one provider, and the numbers it said it from
 * @provider: &struct p2pmem_provider.id
 * @addr: the provider's PCI function
 * @code: &enum p2pmem_verdict_code
 * @worst_client: index of the client with the farthest path (or the one that cannot reach it), 0 without clients
 * @class: &enum p2pmem_path_class of that path, 0 without clients
 * @hops: sum of hops to all clients
 * @bandwidth: narrowest link on any of the paths, MB/s, 0 where no link tells
 * @numa_distance: largest NUMA distance to a client, 0 where none is known
 * @size: bytes the provider manages
 * @rule_set: &enum p2pmem_rule_set of the rule that decided, %P2PMEM_RULES_NONE where none did
 * @free: bytes that were free
 * @largest: largest contiguous piece
 * @rule: name of that rule, NUL-terminated
 */
struct p2pmem_verdict {
	__u32 provider;
	__u32 code;
	struct p2pmem_pci_addr addr;
	__u32 worst_client;
	__u32 class;
	__u32 hops;
	__u32 bandwidth;
	__u32 numa_distance;
	__u32 rule_set;
	__u64 size;
	__u64 free;
	__u64 largest;
	char rule[P2PMEM_RULE_NAME];
};

/* &struct p2pmem_explain.flags: explain this file's last ALLOC, refused ioctl or refused importer; @req is not used */
#define P2PMEM_EXPLAIN_LAST		(1U << 0)

/**
 * struct p2pmem_explain - explain a decision
 * @req: what to decide, as a dry run: nothing is allocated
 * @verdicts: array of &struct p2pmem_verdict to fill, one per provider, in the order of their ids
 * @text: buffer for a sentence (UTF-8, NUL-terminated), may be 0 where @text_len is 0
 * @nr_verdicts: in: elements in @verdicts; out: verdicts there are (more than fit are counted, not written)
 * @text_len: in: bytes in @text; out: bytes the sentence needs with its NUL (more than fit are cut off), where there was
 *	no room for any what it needs at most
 * @flags: %P2PMEM_EXPLAIN_LAST or zero
 * @error: out: the errno (positive) the decision ended or would end with, 0 for success
 * @chosen: out: id of the provider chosen, of a stripe that of its first part, 0 for none
 * @verdict_size: bytes of one element of @verdicts
 *
 * Errors: -ENODATA (with %P2PMEM_EXPLAIN_LAST: nothing was decided or refused on this file yet), and those of a bad
 * request. A request that no provider can serve is no error here: @error says what it would be.
 */
struct p2pmem_explain {
	struct p2pmem_request req;
	__u64 verdicts;
	__u64 text;
	__u32 nr_verdicts;
	__u32 text_len;
	__u32 flags;
	__u32 error;
	__u32 chosen;
	__u32 verdict_size;
};

/**
 * struct p2pmem_stats - counters of one provider since it came, or of the whole module
 * @provider: in: its id, 0 for the sum over all there ever were
 * @flags: must be zero
 * @allocs: buffers allocated
 * @frees: buffers whose memory came back
 * @failed: requests that named or considered it and got no memory from anyone
 * @alloc_bytes: bytes of @allocs
 * @free_bytes: bytes of @frees
 * @maps: user mappings made
 * @scrubbed_bytes: bytes cleared between owners
 * @parked: times a freed buffer had to wait for others' page references
 * @revoked: buffers ended by a revocation
 * @exports: dma-bufs made
 * @attaches: importers attached to them
 * @attach_failed: importers that were refused
 *
 * Errors: -ENOENT (no such provider).
 */
struct p2pmem_stats {
	__u32 provider;
	__u32 flags;
	__u64 allocs;
	__u64 frees;
	__u64 failed;
	__u64 alloc_bytes;
	__u64 free_bytes;
	__u64 maps;
	__u64 scrubbed_bytes;
	__u64 parked;
	__u64 revoked;
	__u64 exports;
	__u64 attaches;
	__u64 attach_failed;
};

/**
 * enum p2pmem_rule_action - what a rule says of a provider
 * @P2PMEM_RULE_ALLOW: it may be
 * @P2PMEM_RULE_DENY: it may not be
 * @P2PMEM_RULE_PREFER: it comes before those that are not preferred
 * @P2PMEM_RULE_AVOID: it is taken where nothing else serves
 */
enum p2pmem_rule_action {
	P2PMEM_RULE_ALLOW = 1,
	P2PMEM_RULE_DENY = 2,
	P2PMEM_RULE_PREFER = 3,
	P2PMEM_RULE_AVOID = 4,
};

/* &struct p2pmem_rule.flags: which fields of the rule are set */
#define P2PMEM_RULE_PROVIDER	(1U << 0)	/* @provider: it is about this provider alone */
#define P2PMEM_RULE_CLIENT	(1U << 1)	/* @client: it is about this client alone */
#define P2PMEM_RULE_QUOTA	(1U << 2)	/* @quota: it limits what the file holds */

/**
 * struct p2pmem_rule - one rule of a file's own
 * @name: what verdicts and sentences call it: letters, digits, dots, dashes and underscores, NUL-terminated
 * @provider: the provider's PCI function, with %P2PMEM_RULE_PROVIDER, else all zero
 * @client: the client's PCI function, with %P2PMEM_RULE_CLIENT, else all zero
 * @flags: P2PMEM_RULE_PROVIDER and the other bits of that row
 * @action: &enum p2pmem_rule_action, or 0
 * @max_class: farthest &enum p2pmem_path_class between the two, or 0
 * @reserved: must be zero
 * @quota: bytes that the file may hold in all, with %P2PMEM_RULE_QUOTA, else 0
 */
struct p2pmem_rule {
	char name[P2PMEM_RULE_NAME];
	struct p2pmem_pci_addr provider;
	struct p2pmem_pci_addr client;
	__u32 flags;
	__u32 action;
	__u32 max_class;
	__u32 reserved;
	__u64 quota;
};

/**
 * struct p2pmem_rules - replace the file's own rules
 * @rules: array of &struct p2pmem_rule, in the order in which they are looked at
 * @count: elements in @rules, up to %P2PMEM_MAX_RULES; 0 ends them all
 * @flags: must be zero
 * @rule_size: bytes of one element of @rules
 * @reserved: must be zero
 *
 * For each pair of a provider and a client, and for each attribute (action, max_class, quota), the first rule that
 * matches and sets it decides. The file's rules narrow what the administrator's leave: they cannot allow what those
 * deny, and of what those avoid or prefer they order only what is equal. Buffers that are there stay, whatever the new
 * rules say.
 *
 * Errors: -EINVAL (a bad field, a name of other characters or one that is there twice, a rule that says nothing or
 * contradicts itself), -ENODEV (a function that is not there), -E2BIG (more rules than %P2PMEM_MAX_RULES), -ENOMEM. With an error the rules stay as they were.
 */
struct p2pmem_rules {
	__u64 rules;
	__u32 count;
	__u32 flags;
	__u32 rule_size;
	__u32 reserved;
};

/**
 * enum p2pmem_event_type - what read() tells
 * @P2PMEM_EVENT_PROVIDER_ADDED: a provider came
 * @P2PMEM_EVENT_PROVIDER_REMOVED: a provider left
 * @P2PMEM_EVENT_BUFFER_REVOKED: a buffer of this file is gone
 * @P2PMEM_EVENT_LOST: the reader was too slow, events were dropped: list again
 */
enum p2pmem_event_type {
	P2PMEM_EVENT_PROVIDER_ADDED = 1,
	P2PMEM_EVENT_PROVIDER_REMOVED = 2,
	P2PMEM_EVENT_BUFFER_REVOKED = 3,
	P2PMEM_EVENT_LOST = 4,
};

/**
 * struct p2pmem_event - one event; read() returns as many whole ones as fit
 * @size: bytes of this event: the next one begins behind them
 * @type: &enum p2pmem_event_type
 * @provider: id of the provider, 0 for P2PMEM_EVENT_LOST
 * @handle: the buffer, for P2PMEM_EVENT_BUFFER_REVOKED, else 0. Each handle of the file has an event of its own; 0 also
 *	where the buffer was allocated through the file, and its handle ended before
 * @count: how many were dropped, for P2PMEM_EVENT_LOST, else 0
 * @reserved: zero
 * @time_ns: CLOCK_MONOTONIC
 *
 * Events may be larger with a newer module: a program takes the fields it knows, and steps by @size. Room for
 * %P2PMEM_MAX_EVENT bytes is enough for one event of any version. An event that cannot be copied stays in the queue, and
 * read() returns those before it.
 *
 * A file gets the events that come after it was opened. read() errors: -EINVAL (room for less than one event),
 * -EAGAIN (O_NONBLOCK and none there).
 */
struct p2pmem_event {
	__u32 size;
	__u32 type;
	__u32 provider;
	__u32 handle;
	__u32 count;
	__u32 reserved;
	__u64 time_ns;
};

#define P2PMEM_IOC_MAGIC	0xbc
#define P2PMEM_IOC_INFO		_IOR(P2PMEM_IOC_MAGIC, 0x00, struct p2pmem_info)
#define P2PMEM_IOC_LIST		_IOWR(P2PMEM_IOC_MAGIC, 0x01, struct p2pmem_list)
#define P2PMEM_IOC_PATHS	_IOWR(P2PMEM_IOC_MAGIC, 0x02, struct p2pmem_paths)
#define P2PMEM_IOC_ALLOC	_IOWR(P2PMEM_IOC_MAGIC, 0x03, struct p2pmem_alloc)
#define P2PMEM_IOC_FREE		_IOW(P2PMEM_IOC_MAGIC, 0x04, struct p2pmem_free)
#define P2PMEM_IOC_BUFFER	_IOWR(P2PMEM_IOC_MAGIC, 0x05, struct p2pmem_buffer)
#define P2PMEM_IOC_EXPLAIN	_IOWR(P2PMEM_IOC_MAGIC, 0x06, struct p2pmem_explain)
#define P2PMEM_IOC_STATS	_IOWR(P2PMEM_IOC_MAGIC, 0x07, struct p2pmem_stats)
#define P2PMEM_IOC_EXPORT_DMABUF	_IOWR(P2PMEM_IOC_MAGIC, 0x08, struct p2pmem_export)
#define P2PMEM_IOC_RULES	_IOW(P2PMEM_IOC_MAGIC, 0x09, struct p2pmem_rules)
#define P2PMEM_IOC_IMPORT	_IOWR(P2PMEM_IOC_MAGIC, 0x0a, struct p2pmem_import)
#define P2PMEM_IOC_STRIPE	_IOWR(P2PMEM_IOC_MAGIC, 0x0b, struct p2pmem_stripe)

/**
 * DOC: mmap
 *
 * mmap(MAP_SHARED) at a buffer's mmap_offset (or inside its range) maps it; at offset 0 it allocates a buffer near
 * nothing in particular that lives as long as its mappings, as the kernel's own p2pmem/allocate does. Mappings are
 * page-backed: O_DIRECT and other GUP users work; those of a %P2PMEM_PROVIDER_PAGELESS provider are for the CPU alone,
 * and O_DIRECT on them fails with -EFAULT. Errors: -EINVAL (private, past the buffer's end, no such offset),
 * -ENODEV (no provider, or the buffer was revoked), -ENOSPC. A mapping of a revoked buffer raises SIGBUS.
 */

#endif /* _UAPI_LINUX_P2PMEM_H */
