/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/* The ABI of /dev/p2pmem. The kernel module, the Rust crates and C programs all use this header. */
#ifndef _UAPI_LINUX_P2PMEM_H
#define _UAPI_LINUX_P2PMEM_H

#include <linux/ioctl.h>
#include <linux/types.h>

/**
 * DOC: Rules for every structure
 *
 * The ABI can grow in both directions. An ioctl is identified by its type, direction and number; the size in the
 * command is the size of the caller's structure. If the caller's structure is shorter than the module's, the missing
 * bytes count as zero, and the module copies back the caller's size only. If it is longer, the bytes beyond the
 * module's structure must be zero, else the ioctl fails with -E2BIG; for an ioctl without input (&P2PMEM_IOC_INFO)
 * the module sets these bytes to zero. A structure that ends before its essential fields is -EINVAL.
 *
 * For each array, the caller sets the field *_size to the size of one element in bytes, from 4 to %P2PMEM_MAX_ELEMENT
 * (less is -EINVAL, more is -E2BIG). The module ignores the field for an empty array. Elements that the module writes
 * are cut to that size or filled up with zeros. Elements that the module reads follow the rule for structures.
 *
 * A program works with a module if the program's %P2PMEM_ABI_VERSION is at least the module's &struct
 * p2pmem_info.abi_compatible. &struct p2pmem_info.features lists the features that the module has.
 *
 * Fields named flags accept only the bits that are defined for them, and fields named reserved or spare must be zero,
 * else -EINVAL. User pointers are __u64. Sizes and offsets are bytes. No structure has implicit padding, and none
 * differs between 32-bit and 64-bit programs.
 *
 * For every failed ioctl the module stores a message with the reason, which &P2PMEM_IOC_EXPLAIN returns with
 * %P2PMEM_EXPLAIN_LAST, except for -EFAULT (bad pointer) and -ENOTTY (unknown ioctl).
 *
 * Version 5 is the first one that can grow. It is not compatible with earlier versions: its ioctls have another type
 * (%P2PMEM_IOC_MAGIC), so the ioctls of earlier programs fail with -ENOTTY.
 */

#define P2PMEM_ABI_VERSION	5
/* The oldest version whose programs work with a module of this version. */
#define P2PMEM_ABI_COMPATIBLE	5
/* The largest size of an array's element, in bytes. */
#define P2PMEM_MAX_ELEMENT	4096
/* The largest size of an event in any version, in bytes. */
#define P2PMEM_MAX_EVENT	256

/* The most clients of a request. */
#define P2PMEM_MAX_CLIENTS	64
/* The most ranges of a dma-buf. */
#define P2PMEM_MAX_RANGES	64
/* The most parts of a stripe. */
#define P2PMEM_MAX_PARTS	16
/* The most DMA ranges of an attachment. */
#define P2PMEM_MAX_DMA_RANGES	65536
/* The most rules of an open file. */
#define P2PMEM_MAX_RULES	32
/* The size of a rule's name in bytes, with its NUL. */
#define P2PMEM_RULE_NAME	32
/* The largest alignment of a buffer: 1 GiB. */
#define P2PMEM_MAX_ALIGN	(1ULL << 30)

/**
 * struct p2pmem_pci_addr - the address of a PCI function
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
#define P2PMEM_FEATURE_ADOPT		(1ULL << 2)	/* memory that other drivers published becomes a provider */
#define P2PMEM_FEATURE_DMABUF		(1ULL << 3)	/* buffers can be exported as dma-bufs */
#define P2PMEM_FEATURE_PAGELESS		(1ULL << 4)	/* providers without struct pages */
#define P2PMEM_FEATURE_PEER_MEMORY	(1ULL << 5)	/* ibv_reg_mr() takes mappings of buffers */
#define P2PMEM_FEATURE_RULES		(1ULL << 6)	/* rules of the administrator and of files apply */
#define P2PMEM_FEATURE_IMPORT		(1ULL << 7)	/* a dma-buf of a whole buffer can be imported as a handle */
#define P2PMEM_FEATURE_STRIPE		(1ULL << 8)	/* one request can be served by several providers */
#define P2PMEM_FEATURE_ATTACH		(1ULL << 9)	/* an own provider's function can be attached to any dma-buf */

/**
 * struct p2pmem_info - the module and its totals
 * @abi_version: %P2PMEM_ABI_VERSION of the module
 * @page_size: granularity of buffers and mappings, in bytes
 * @features: P2PMEM_FEATURE_* bits
 * @providers: number of providers
 * @buffers: number of live buffers of all files
 * @size: bytes that p2pmem manages in all providers
 * @free: free bytes in all providers
 * @generation: changes whenever a provider is added or removed, or paths are computed again
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
 * enum p2pmem_kind - the origin of a provider's memory
 * @P2PMEM_KIND_OWN: a BAR of a device bound to the p2pmem driver, published by the administrator
 * @P2PMEM_KIND_ADOPTED: memory that the device's own driver published in the kernel's pool
 * @P2PMEM_KIND_REGISTERED: memory that the device's own driver registered with p2pmem (include/linux/p2pmem.h)
 */
enum p2pmem_kind {
	P2PMEM_KIND_OWN = 1,
	P2PMEM_KIND_ADOPTED = 2,
	P2PMEM_KIND_REGISTERED = 3,
};

/**
 * enum p2pmem_provider_state - the state of a provider
 * @P2PMEM_PROVIDER_LIVE: buffers can be allocated in the provider
 * @P2PMEM_PROVIDER_REVOKING: the provider is being removed and its buffers are being revoked
 */
enum p2pmem_provider_state {
	P2PMEM_PROVIDER_LIVE = 1,
	P2PMEM_PROVIDER_REVOKING = 2,
};

/* &struct p2pmem_provider.flags */
#define P2PMEM_PROVIDER_PAGELESS	(1U << 0)	/* no struct pages: O_DIRECT on mappings fails */
#define P2PMEM_PROVIDER_EXPORTABLE	(1U << 1)	/* buffers can be exported as dma-bufs */
#define P2PMEM_PROVIDER_PINNED_EXPORTS	(1U << 2)	/* the administrator allows %P2PMEM_EXPORT_PINNED */
#define P2PMEM_PROVIDER_CLEARING	(1U << 3)	/* freed memory is being cleared: @free and @largest still change */

/**
 * struct p2pmem_provider - a provider
 * @id: number of the provider, never 0, and never used again while the module is loaded
 * @kind: &enum p2pmem_kind
 * @addr: the PCI function that has the memory
 * @state: &enum p2pmem_provider_state
 * @bar: the BAR
 * @numa_node: NUMA node of the function, or -1
 * @buffers: number of live buffers
 * @bar_offset: first published byte in the BAR
 * @size: bytes that p2pmem manages; for an adopted provider, the size of the driver's pool
 * @free: free bytes of @size
 * @largest: size of a piece that one allocation can get now: @free if one can get all of it, otherwise a lower bound
 * @kernel_reserve: bytes that stay in the kernel's pool for other drivers
 * @pinned: bytes of freed buffers that DMA or page references of others still pin
 * @scrubbing: bytes of freed buffers that wait to be cleared
 * @vendor: PCI vendor id
 * @device: PCI device id
 * @class: PCI class code (24 bits)
 * @flags: P2PMEM_PROVIDER_PAGELESS and the bits defined with it
 * @exports: number of dma-bufs of the provider's buffers that are not released yet
 * @driver: name of the driver bound to the function, NUL-terminated; empty if there is none
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
	__u64 pinned;
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
 * @count: in: number of elements in @providers; out: number of providers. Providers that do not fit are counted, not
 *	written
 * @flags: must be zero
 * @provider_size: size of one element of @providers in bytes
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
 * @P2PMEM_PATH_SAME_SWITCH: below one PCIe switch; traffic stays in that switch
 * @P2PMEM_PATH_SWITCHES: below one root port, through more than one switch
 * @P2PMEM_PATH_HOST_BRIDGE: below one host bridge, through the root complex
 * @P2PMEM_PATH_NUMA_NODE: below two host bridges of one NUMA node
 * @P2PMEM_PATH_SYSTEM: below two host bridges of two NUMA nodes
 * @P2PMEM_PATH_UNREACHABLE: the client cannot reach the provider, as the kernel determines
 *
 * If ACS redirects the traffic of a path below a switch, the path counts as one through the root complex, which the
 * traffic crosses.
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
#define P2PMEM_PATH_ACS_REDIRECT	(1U << 0)	/* ACS of a port on the path redirects peer traffic upstream */
#define P2PMEM_PATH_BUS_ADDR		(1U << 1)	/* peer traffic stays below the common bridge */

/**
 * struct p2pmem_path - the path between a provider and a client
 * @provider: &struct p2pmem_provider.id
 * @client: index of the client in the request
 * @class: &enum p2pmem_path_class
 * @flags: P2PMEM_PATH_ACS_REDIRECT, P2PMEM_PATH_BUS_ADDR
 * @hops: number of links on the path
 * @distance: the kernel's pci_p2pdma_distance_many(), -1 for unreachable
 * @bandwidth: bandwidth of the narrowest link on the path in MB/s for one direction; 0 if no link reports one
 * @numa_distance: the kernel's NUMA distance between provider and client (10 is local); 0 if one has no node
 * @bridge: the lowest bridge above both; all zero if that is the root complex
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
 * struct p2pmem_paths - list the paths between all providers and the given clients
 * @clients: array of &struct p2pmem_pci_addr
 * @paths: array of &struct p2pmem_path to fill: first all clients of the first provider
 * @nr_clients: number of elements in @clients, 1 to %P2PMEM_MAX_CLIENTS
 * @nr_paths: in: number of elements in @paths; out: number of paths. Paths that do not fit are counted, not written
 * @flags: %P2PMEM_PATHS_RESCAN or zero
 * @reserved: must be zero
 * @client_size: size of one element of @clients in bytes
 * @path_size: size of one element of @paths in bytes
 *
 * Errors: -ENODEV (a client is no PCI function of this machine), -EPERM (%P2PMEM_PATHS_RESCAN without CAP_SYS_ADMIN).
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

/* &struct p2pmem_paths.flags: compute all paths again, for instance after setpci has changed ACS; requires CAP_SYS_ADMIN */
#define P2PMEM_PATHS_RESCAN		(1U << 0)

/**
 * enum p2pmem_strategy - how to choose among the providers that can serve a request
 * @P2PMEM_STRATEGY_NEAREST: by path class, hops, bandwidth, NUMA distance, load: see
 *	Documentation/design/placement.md
 * @P2PMEM_STRATEGY_UPSTREAM: the provider that the kernel's pci_p2pmem_find_many() returns
 * @P2PMEM_STRATEGY_SPREAD: the least loaded provider, at any distance (limited by @max_class of the request), then as
 *	NEAREST
 * @P2PMEM_STRATEGY_PACK: the most loaded provider, so that others stay empty, then as NEAREST
 * @P2PMEM_STRATEGY_STRIPE: several providers, the best ones by NEAREST, each with an equal part: for
 *	&P2PMEM_IOC_STRIPE, and for &P2PMEM_IOC_EXPLAIN to explain a stripe
 */
enum p2pmem_strategy {
	P2PMEM_STRATEGY_NEAREST = 0,
	P2PMEM_STRATEGY_UPSTREAM = 1,
	P2PMEM_STRATEGY_SPREAD = 2,
	P2PMEM_STRATEGY_PACK = 3,
	P2PMEM_STRATEGY_STRIPE = 4,
};

/* &struct p2pmem_request.flags: the named provider is preferred, not required: another one serves if it cannot */
#define P2PMEM_ALLOC_PREFER		(1U << 0)

/**
 * struct p2pmem_request - the requirements of a buffer
 * @size: size in bytes, rounded up to pages; not 0
 * @align: alignment in the BAR in bytes, a power of two up to %P2PMEM_MAX_ALIGN; 0 means a page
 * @clients: array of &struct p2pmem_pci_addr: the devices that will do DMA
 * @nr_clients: number of elements in @clients; 0 means near no particular device
 * @flags: %P2PMEM_ALLOC_PREFER or zero
 * @strategy: &enum p2pmem_strategy
 * @provider: id of the only provider to use (with %P2PMEM_ALLOC_PREFER: of the first one to try); 0 means any
 * @max_class: farthest &enum p2pmem_path_class allowed; 0 means any that is reachable
 * @parts: with %P2PMEM_STRATEGY_STRIPE, the number of parts, up to %P2PMEM_MAX_PARTS; 0 means as many as providers
 *	can serve. Must be zero with any other strategy
 * @client_size: size of one element of @clients in bytes
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
 * @handle: out: handle of the buffer on this file, never 0, and never used again on this file
 * @provider: out: id of the provider
 * @size: out: size in bytes, @req.size rounded up to pages
 * @mmap_offset: out: offset at which mmap() on this file maps the buffer
 * @bar_offset: out: first byte in the provider's BAR; all ones if it is in another BAR
 * @class: out: class of the path to the farthest client; 0 without clients
 * @reserved: must be zero
 *
 * Errors: -EINVAL (a bad field), -ENODEV (a client is no PCI function of this machine, or no provider can ever serve
 * the request: none is published, reachable or near enough), -EACCES (rules deny all providers that could serve),
 * -EDQUOT (a quota of the user, the group or the file, or a limit of the cgroup, would be exceeded), -ENOSPC (the
 * providers that could serve are full, or rules reserve their free memory for others), -E2BIG (more than
 * %P2PMEM_MAX_CLIENTS clients), -EMFILE (this file has 65,536 handles, or has used up all numbers), -ENOMEM.
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
 * struct p2pmem_free - close a handle
 * @handle: the handle
 * @flags: must be zero
 *
 * The memory becomes free when the last handle, mapping, dma-buf and registration of the buffer is gone.
 *
 * Errors: -ENOENT (no such handle on this file).
 */
struct p2pmem_free {
	__u32 handle;
	__u32 flags;
};

/**
 * enum p2pmem_buffer_state - the state of a buffer
 * @P2PMEM_BUFFER_LIVE: the buffer can be mapped and used
 * @P2PMEM_BUFFER_REVOKING: the provider is being removed, and mappings are being unmapped
 * @P2PMEM_BUFFER_GONE: the buffer has no memory any more; an access to a mapping raises SIGBUS
 */
enum p2pmem_buffer_state {
	P2PMEM_BUFFER_LIVE = 1,
	P2PMEM_BUFFER_REVOKING = 2,
	P2PMEM_BUFFER_GONE = 3,
};

/**
 * struct p2pmem_buffer - query a buffer
 * @handle: in: the handle
 * @provider: id of the provider
 * @size: size in bytes
 * @mmap_offset: offset at which mmap() on this file maps the buffer
 * @bar_offset: first byte in the provider's BAR; all ones if it is in another BAR
 * @bus_addr: address of the buffer on the provider's PCI bus; 0 for callers without CAP_SYS_ADMIN
 * @state: &enum p2pmem_buffer_state
 * @mappings: number of user mappings (VMAs)
 * @exports: number of dma-bufs of the buffer that are not released yet
 * @attachments: number of importers attached to these dma-bufs
 * @flags: must be zero
 * @handles: out: number of handles of the buffer on all files; more than one if it was imported
 *
 * Errors: -ENOENT (no such handle on this file).
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
 * @offset: first byte in the buffer, or, with %P2PMEM_EXPORT_MAPPED, an address of the caller; in whole pages
 * @size: size in bytes; in whole pages, not 0
 */
struct p2pmem_range {
	__u64 offset;
	__u64 size;
};

/* &struct p2pmem_export.flags */
#define P2PMEM_EXPORT_PINNED		(1U << 0)	/* importers that cannot be revoked may attach */
#define P2PMEM_EXPORT_MAPPED		(1U << 1)	/* the ranges are addresses of the caller */

/**
 * struct p2pmem_export - export parts of one buffer as a dma-buf
 * @ranges: array of &struct p2pmem_range
 * @nr_ranges: number of elements in @ranges, 1 to %P2PMEM_MAX_RANGES
 * @handle: handle of the buffer on this file; 0 with %P2PMEM_EXPORT_MAPPED
 * @flags: P2PMEM_EXPORT_* bits
 * @fd: out: descriptor of the dma-buf, close-on-exec, open for reading and writing
 * @range_size: size of one element of @ranges in bytes
 * @reserved: must be zero
 *
 * The dma-buf is the concatenation of the ranges, in their order. The ranges must not overlap. With
 * %P2PMEM_EXPORT_MAPPED, each range must lie in one or more mappings of one buffer that are writable or can be made
 * writable. The buffer may have been allocated through another file.
 *
 * The dma-buf keeps the buffer's memory until the dma-buf is closed and its last importer has detached, even if the
 * handle, the mappings and the file are gone. When the provider is removed, the dma-buf is revoked: importers are
 * notified and must unmap, and later attempts to map fail with -ENODEV.
 *
 * Importers attach later, through a call of their own driver, such as ibv_reg_dmabuf_mr(). An importer that cannot do
 * peer-to-peer DMA or cannot be revoked gets -EOPNOTSUPP, and one that cannot reach the provider gets -EHOSTUNREACH.
 * The kernel log has the reason, and %P2PMEM_EXPLAIN_LAST returns it on the file that exported.
 *
 * Errors: -EINVAL (a bad field, or a range that is empty, not whole pages, beyond the buffer's end, or overlaps
 * another), -E2BIG (more than %P2PMEM_MAX_RANGES ranges), -ENOENT (no such handle on this file, or no mapping of a
 * buffer at an address), -EXDEV (mappings of two buffers), -EACCES (a mapping that cannot be made writable), -ENODEV
 * (the buffer was revoked), -EPERM (%P2PMEM_EXPORT_PINNED without the administrator's permission: configfs attribute
 * pinned_exports), -EMFILE (no descriptor is left, or this file has 65,536 dma-bufs that are not released), -ENOMEM.
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
 * @fd: descriptor of the dma-buf; the caller still has to close it
 * @flags: must be zero
 * @handle: out: a new handle of the buffer; each call returns another one
 * @provider: out: id of the provider
 * @size: out: size in bytes
 * @mmap_offset: out: offset at which mmap() on this file maps the buffer
 * @bar_offset: out: first byte in the provider's BAR; all ones if it is in another BAR
 *
 * To share a buffer with another process, export the whole buffer and pass the descriptor on (SCM_RIGHTS); the
 * receiver imports it. The new handle holds the buffer like any other: the memory becomes free when the last handle,
 * mapping, dma-buf and registration of any process is gone. Until then the buffer is charged to the user, the groups,
 * the file and the cgroup that allocated it, and rules treat importers of dma-bufs as the allocator's. A handle gives
 * the same access to the buffer as the allocator's handle.
 *
 * Errors: -EINVAL (a bad field, or the descriptor is no dma-buf), -EBADF (no such descriptor), -EXDEV (a dma-buf of
 * another driver), -EACCES (a dma-buf of parts of a buffer: the receiver was not given the rest), -ENODEV (the buffer
 * was revoked), -EMFILE (this file has 65,536 handles, or has used up all numbers), -ENOMEM.
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
 * struct p2pmem_dma_range - a part of a dma-buf, as the attached function addresses it
 * @address: address for the function's DMA: a bus address, or an I/O address that an IOMMU translates
 * @size: size in bytes
 */
struct p2pmem_dma_range {
	__u64 address;
	__u64 size;
};

/**
 * enum p2pmem_attachment_state - the state of an attachment
 * @P2PMEM_ATTACHMENT_LIVE: the function can do DMA to the ranges
 * @P2PMEM_ATTACHMENT_STOPPED: the ranges are valid, but the function can do no DMA: another attachment of the function
 *	ended while the function may still have used it, and nobody has confirmed yet that the function has stopped
 * @P2PMEM_ATTACHMENT_REVOKED: the exporter took the memory back, and there are no ranges any more
 * @P2PMEM_ATTACHMENT_GONE: the provider was removed, and there are no ranges any more
 */
enum p2pmem_attachment_state {
	P2PMEM_ATTACHMENT_LIVE = 1,
	P2PMEM_ATTACHMENT_STOPPED = 2,
	P2PMEM_ATTACHMENT_REVOKED = 3,
	P2PMEM_ATTACHMENT_GONE = 4,
};

/* &struct p2pmem_attach.flags: the function uses no address of an attachment that has ended, and may do DMA again */
#define P2PMEM_ATTACH_QUIESCED		(1U << 0)

/* &struct p2pmem_attach.info and &struct p2pmem_attachment.info */
#define P2PMEM_ATTACHMENT_TRANSLATED	(1U << 0)	/* an IOMMU ends the function's access when the mapping ends */

/**
 * struct p2pmem_attach - attach the function of an own provider to a dma-buf, and map the dma-buf for the function's DMA
 * @fd: descriptor of the dma-buf; the caller still has to close it
 * @provider: id of the provider whose function will do the DMA; of kind %P2PMEM_KIND_OWN
 * @flags: %P2PMEM_ATTACH_QUIESCED or zero
 * @handle: out: handle of the attachment on this file, a number of its own like those of buffers
 * @ranges: array of &struct p2pmem_dma_range to fill, in the order of the dma-buf's offsets; adjacent ranges are one
 * @nr_ranges: in: number of elements in @ranges; out: number of ranges. Ranges that do not fit are counted, not written:
 *	&P2PMEM_IOC_ATTACHMENT returns them later
 * @range_size: size of one element of @ranges in bytes
 * @size: out: size of the dma-buf in bytes
 * @info: out: %P2PMEM_ATTACHMENT_TRANSLATED or zero
 * @reserved: must be zero
 *
 * The function can then read and write the memory at the ranges: the doorbell page of a NIC, memory of another device,
 * or memory of the machine. The caller needs CAP_SYS_ADMIN, or membership in the group that the administrator named in
 * the provider's configfs attribute attach_gid. The module enables the function's bus mastering while the function has
 * attachments.
 *
 * The exporter can take the memory back at any time. The module then ends the mapping, the file gets
 * %P2PMEM_EVENT_ATTACHMENT_REVOKED, and the handle stays until it is closed. The event can come before this ioctl
 * returns. An exporter that moves its memory revokes too: attach again for the new addresses.
 *
 * If no IOMMU ends the function's access (@info), the module disables the function's bus mastering whenever a mapping
 * ends and the caller did not detach: the exporter revoked, the file was closed, or the provider was removed. Bus
 * mastering stays disabled until each such handle was closed with &P2PMEM_IOC_DETACH_DMABUF, which confirms that the
 * function no longer uses the addresses; if the file was closed, until an attach with %P2PMEM_ATTACH_QUIESCED. A reset
 * or another binding of the function confirms nothing. Other attachments of the function are
 * %P2PMEM_ATTACHMENT_STOPPED meanwhile. A QUIESCED attach confirms all ends of mappings of the function, also if it
 * fails later.
 *
 * If an IOMMU ends the access, other attachments stay usable. The function can be attached again only after the same
 * confirmations, because a new mapping could get the address of the one that ended.
 *
 * Errors: -EINVAL (a bad field, the descriptor is no dma-buf, or a dma-buf of the function's own memory), -EBADF (no such
 * descriptor), -ENOENT (no such provider), -EPERM (the caller may not attach the function), -EOPNOTSUPP (the function is
 * bound to another driver, the exporter does not support such an importer, or the DMA would go through a bounce buffer),
 * -EBUSY (the end of a mapping is not confirmed, see above), -ENODEV (the provider is being removed, or the exporter has
 * taken the memory back), -EHOSTUNREACH or -EACCES (a dma-buf of p2pmem that the function cannot reach, or that rules
 * deny), -E2BIG (more than %P2PMEM_MAX_DMA_RANGES ranges), -EMFILE (this file has 65,536 handles, or has used up all
 * numbers), -EINTR, -ENOMEM, and those of the exporter.
 */
struct p2pmem_attach {
	__s32 fd;
	__u32 provider;
	__u32 flags;
	__u32 handle;
	__u64 ranges;
	__u32 nr_ranges;
	__u32 range_size;
	__u64 size;
	__u32 info;
	__u32 reserved;
};

/**
 * struct p2pmem_detach - close the handle of an attachment
 * @handle: the handle
 * @flags: must be zero
 *
 * The caller confirms that the function does no DMA to the ranges any more and will not begin: see &struct p2pmem_attach.
 *
 * Errors: -ENOENT (no such attachment on this file).
 */
struct p2pmem_detach {
	__u32 handle;
	__u32 flags;
};

/**
 * struct p2pmem_attachment - query an attachment
 * @handle: in: the handle
 * @provider: id of the provider
 * @state: &enum p2pmem_attachment_state
 * @info: %P2PMEM_ATTACHMENT_TRANSLATED or zero
 * @ranges: array of &struct p2pmem_dma_range to fill, in the order of the dma-buf's offsets
 * @nr_ranges: in: number of elements in @ranges; out: number of ranges, 0 if the mapping has ended. Ranges that do not
 *	fit are counted, not written
 * @range_size: size of one element of @ranges in bytes
 * @size: size of the dma-buf in bytes
 * @flags: must be zero
 * @reserved: must be zero
 *
 * Errors: -ENOENT (no such attachment on this file).
 */
struct p2pmem_attachment {
	__u32 handle;
	__u32 provider;
	__u32 state;
	__u32 info;
	__u64 ranges;
	__u32 nr_ranges;
	__u32 range_size;
	__u64 size;
	__u32 flags;
	__u32 reserved;
};

/**
 * struct p2pmem_part - one buffer of a stripe
 * @handle: handle of the buffer on this file
 * @provider: id of the provider
 * @offset: first byte in the stripe
 * @size: size in bytes
 * @mmap_offset: offset at which mmap() on this file maps the buffer
 * @bar_offset: first byte in the provider's BAR; all ones if it is in another BAR
 * @class: class of the path to the farthest client; 0 without clients
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
 * struct p2pmem_stripe - allocate a stripe over several providers
 * @req: the request, with %P2PMEM_STRATEGY_STRIPE. The request can prefer a provider, but not require one
 * @parts: array of &struct p2pmem_part to fill, in the order of their offsets
 * @nr_parts: in: number of elements in @parts, at least 1 and at least @req.parts; out: number of parts
 * @flags: must be zero
 * @size: out: size of the stripe in bytes, @req.size rounded up to pages
 * @part_size: size of one element of @parts in bytes
 * @reserved: must be zero
 *
 * A stripe consists of one buffer for each part, each in another provider. All parts have the same size, except for
 * the last one, which may be smaller; part n begins where part n - 1 ends. Where @req.size allows, all boundaries are
 * multiples of @req.align. Either all parts are allocated or none.
 *
 * After the allocation, each part is an independent buffer that is freed, mapped, exported and revoked by itself. No
 * dma-buf and no I/O request crosses a boundary, and the removal of a provider revokes its part alone.
 *
 * If @req.parts is 0, the stripe has as many parts as providers can serve, up to @nr_parts. Providers that rules
 * avoid are used only if no other can serve.
 *
 * Errors: those of &struct p2pmem_alloc; -EINVAL also for too few elements in @parts, for more parts than pages, and
 * for another strategy; -E2BIG also for more parts than %P2PMEM_MAX_PARTS. If fewer than @req.parts providers can
 * serve, the error is that of the next provider in the ranking.
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
 * @P2PMEM_VERDICT_CHOSEN: the provider was chosen
 * @P2PMEM_VERDICT_UNREACHABLE: a client cannot reach the provider
 * @P2PMEM_VERDICT_TOO_FAR: a path is farther than max_class of the request
 * @P2PMEM_VERDICT_TOO_SMALL: the provider could not hold the buffer even if empty
 * @P2PMEM_VERDICT_FULL: the provider has too few free bytes
 * @P2PMEM_VERDICT_FRAGMENTED: the provider has enough free bytes, but not in one piece with the alignment
 * @P2PMEM_VERDICT_REMOVING: the provider is being removed
 * @P2PMEM_VERDICT_NOT_NAMED: the request names another provider
 * @P2PMEM_VERDICT_CLASS: another provider has a nearer path class
 * @P2PMEM_VERDICT_HOPS: another provider is fewer hops away
 * @P2PMEM_VERDICT_BANDWIDTH: the narrowest link to another provider is wider
 * @P2PMEM_VERDICT_NUMA: another provider has a smaller NUMA distance
 * @P2PMEM_VERDICT_LOAD: another provider is less loaded
 * @P2PMEM_VERDICT_SPACE: another provider has a larger free piece
 * @P2PMEM_VERDICT_ORDER: the provider equals the chosen one, which comes first in the order of ids
 * @P2PMEM_VERDICT_UPSTREAM: pci_p2pmem_find_many() returned another provider
 * @P2PMEM_VERDICT_DENIED: a rule denies the provider
 * @P2PMEM_VERDICT_QUOTA: the buffer would exceed a rule's quota
 * @P2PMEM_VERDICT_RESERVED: rules reserve the free memory for others
 * @P2PMEM_VERDICT_PREFERENCE: a rule prefers another provider or avoids this one
 * @P2PMEM_VERDICT_PACKED: another provider is more loaded, with %P2PMEM_STRATEGY_PACK
 * @P2PMEM_VERDICT_CGROUP: the buffer would exceed the cgroup's limit for the provider (dmem.max)
 * @P2PMEM_VERDICT_TOO_FEW: the provider could hold a part of the stripe, but too few others can
 */
enum p2pmem_verdict_code {
	P2PMEM_VERDICT_CHOSEN = 1,
	P2PMEM_VERDICT_UNREACHABLE = 2,
	P2PMEM_VERDICT_TOO_FAR = 3,
	P2PMEM_VERDICT_TOO_SMALL = 4,
	P2PMEM_VERDICT_FULL = 5,
	P2PMEM_VERDICT_FRAGMENTED = 6,
	P2PMEM_VERDICT_REMOVING = 7,
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
	P2PMEM_VERDICT_TOO_FEW = 23,
};

/**
 * enum p2pmem_rule_set - the set that a rule belongs to
 * @P2PMEM_RULES_NONE: no rule
 * @P2PMEM_RULES_ADMIN: the administrator's rules, in configfs
 * @P2PMEM_RULES_FILE: the file's rules, see &P2PMEM_IOC_RULES
 */
enum p2pmem_rule_set {
	P2PMEM_RULES_NONE = 0,
	P2PMEM_RULES_ADMIN = 1,
	P2PMEM_RULES_FILE = 2,
};

/**
 * struct p2pmem_verdict - the verdict on one provider, and its inputs
 * @provider: &struct p2pmem_provider.id
 * @addr: PCI function of the provider
 * @code: &enum p2pmem_verdict_code
 * @worst_client: index of the client with the farthest path, or of one that cannot reach the provider; 0 without
 *	clients
 * @class: &enum p2pmem_path_class of that path; 0 without clients
 * @hops: sum of the hops to all clients
 * @bandwidth: bandwidth of the narrowest link on all paths in MB/s; 0 if no link reports one
 * @numa_distance: largest NUMA distance to a client; 0 if none is known
 * @size: bytes that the provider manages
 * @rule_set: &enum p2pmem_rule_set of the deciding rule, %P2PMEM_RULES_NONE if no rule decided
 * @free: free bytes at the decision
 * @largest: size of the largest free piece at the decision
 * @rule: name of the deciding rule, NUL-terminated
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

/* &struct p2pmem_explain.flags: explain the last ALLOC, refused ioctl or refused importer of this file; @req is ignored */
#define P2PMEM_EXPLAIN_LAST		(1U << 0)

/**
 * struct p2pmem_explain - explain a decision
 * @req: the request to decide, as a dry run: nothing is allocated
 * @verdicts: array of &struct p2pmem_verdict to fill, one for each provider, in the order of their ids
 * @text: buffer for a message (UTF-8, NUL-terminated); may be 0 if @text_len is 0
 * @nr_verdicts: in: number of elements in @verdicts; out: number of verdicts. Verdicts that do not fit are counted,
 *	not written
 * @text_len: in: size of @text in bytes; out: size of the message in bytes with its NUL, of which the part that fits
 *	is written. If the input is 0, the size of the longest message
 * @flags: %P2PMEM_EXPLAIN_LAST or zero
 * @error: out: the decision's errno (positive), 0 for success
 * @chosen: out: id of the chosen provider, for a stripe that of the first part, or 0
 * @verdict_size: size of one element of @verdicts in bytes
 *
 * Errors: -ENODATA (%P2PMEM_EXPLAIN_LAST without a decision or refusal on this file), and those of an invalid
 * request. A request that no provider can serve is no error of this ioctl: @error has the errno of the allocation.
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
 * struct p2pmem_stats - counters of one provider since it was added, or of the whole module
 * @provider: in: id of the provider, or 0 for the sum over all providers since the module was loaded
 * @flags: must be zero
 * @allocs: buffers allocated
 * @frees: buffers whose memory was returned
 * @failed: failed requests that named or considered the provider
 * @alloc_bytes: bytes of @allocs
 * @free_bytes: bytes of @frees
 * @maps: user mappings made
 * @scrubbed_bytes: bytes cleared between owners
 * @pinned: freed buffers that other page references pinned
 * @revoked: buffers that were revoked
 * @exports: dma-bufs exported
 * @attaches: importers attached
 * @attach_failed: importers refused
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
	__u64 pinned;
	__u64 revoked;
	__u64 exports;
	__u64 attaches;
	__u64 attach_failed;
};

/**
 * enum p2pmem_rule_action - the action of a rule for a provider
 * @P2PMEM_RULE_ALLOW: the provider is allowed
 * @P2PMEM_RULE_DENY: the provider is denied
 * @P2PMEM_RULE_PREFER: the provider is chosen before providers that are not preferred
 * @P2PMEM_RULE_AVOID: the provider is chosen only if no other can serve
 */
enum p2pmem_rule_action {
	P2PMEM_RULE_ALLOW = 1,
	P2PMEM_RULE_DENY = 2,
	P2PMEM_RULE_PREFER = 3,
	P2PMEM_RULE_AVOID = 4,
};

/* &struct p2pmem_rule.flags: the fields that are set */
#define P2PMEM_RULE_PROVIDER	(1U << 0)	/* @provider: the rule matches this provider alone */
#define P2PMEM_RULE_CLIENT	(1U << 1)	/* @client: the rule matches this client alone */
#define P2PMEM_RULE_QUOTA	(1U << 2)	/* @quota: the rule limits the bytes that the file holds */

/**
 * struct p2pmem_rule - a rule of an open file
 * @name: name for verdicts and messages: letters, digits, dots, dashes and underscores, NUL-terminated
 * @provider: PCI function of the provider, with %P2PMEM_RULE_PROVIDER, else all zero
 * @client: PCI function of the client, with %P2PMEM_RULE_CLIENT, else all zero
 * @flags: P2PMEM_RULE_PROVIDER and the bits defined with it
 * @action: &enum p2pmem_rule_action, or 0
 * @max_class: farthest &enum p2pmem_path_class between provider and client, or 0
 * @reserved: must be zero
 * @quota: the most bytes that the file may hold, with %P2PMEM_RULE_QUOTA, else 0
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
 * struct p2pmem_rules - replace the rules of this file
 * @rules: array of &struct p2pmem_rule, in the order in which they are evaluated
 * @count: number of elements in @rules, up to %P2PMEM_MAX_RULES; 0 removes all rules of the file
 * @flags: must be zero
 * @rule_size: size of one element of @rules in bytes
 * @reserved: must be zero
 *
 * For each pair of a provider and a client and for each attribute (action, max_class, quota), the first rule that
 * matches and sets the attribute decides. The file's rules restrict what the administrator's rules allow: they cannot
 * allow a provider that the administrator denies, and prefer and avoid only order providers that the administrator's
 * rules rank equally. Existing buffers stay, whatever the new rules say.
 *
 * Errors: -EINVAL (a bad field, a name with other characters or of two rules, or a rule without effect or with
 * contradictory fields), -ENODEV (no such PCI function), -E2BIG (more than %P2PMEM_MAX_RULES rules), -ENOMEM. On
 * error, the former rules stay in force.
 */
struct p2pmem_rules {
	__u64 rules;
	__u32 count;
	__u32 flags;
	__u32 rule_size;
	__u32 reserved;
};

/**
 * enum p2pmem_event_type - the type of an event
 * @P2PMEM_EVENT_PROVIDER_ADDED: a provider was added
 * @P2PMEM_EVENT_PROVIDER_REMOVED: a provider was removed
 * @P2PMEM_EVENT_BUFFER_REVOKED: a buffer of this file was revoked
 * @P2PMEM_EVENT_LOST: events were dropped, as the reader was too slow; list the providers again
 * @P2PMEM_EVENT_ATTACHMENT_REVOKED: an attachment of this file ended: the exporter took the memory back, or the provider
 *	was removed
 * @P2PMEM_EVENT_ATTACHMENT_STOPPED: the function of an attachment of this file can do no DMA: see
 *	%P2PMEM_ATTACHMENT_STOPPED
 */
enum p2pmem_event_type {
	P2PMEM_EVENT_PROVIDER_ADDED = 1,
	P2PMEM_EVENT_PROVIDER_REMOVED = 2,
	P2PMEM_EVENT_BUFFER_REVOKED = 3,
	P2PMEM_EVENT_LOST = 4,
	P2PMEM_EVENT_ATTACHMENT_REVOKED = 5,
	P2PMEM_EVENT_ATTACHMENT_STOPPED = 6,
};

/**
 * struct p2pmem_event - an event, as read() returns it
 * @size: size of this event in bytes; the next event follows
 * @type: &enum p2pmem_event_type
 * @provider: id of the provider, 0 for %P2PMEM_EVENT_LOST
 * @handle: handle of the buffer, for %P2PMEM_EVENT_BUFFER_REVOKED, or of the attachment, for
 *	%P2PMEM_EVENT_ATTACHMENT_REVOKED and %P2PMEM_EVENT_ATTACHMENT_STOPPED, else 0. Each handle of the file has its
 *	own event. Also 0 for a buffer that was allocated through the file and whose handle is closed
 * @count: number of dropped events, for %P2PMEM_EVENT_LOST, else 0
 * @reserved: zero
 * @time_ns: time of the event, CLOCK_MONOTONIC in nanoseconds
 *
 * read() returns as many whole events as fit. A newer module may return larger events: a program reads the fields
 * that it knows and advances by @size. %P2PMEM_MAX_EVENT bytes are enough for one event of any version. If an event
 * cannot be copied, it stays in the queue, and read() returns the events before it.
 *
 * A file gets the events after it was opened. Errors of read(): -EINVAL (too small for one event), -EAGAIN
 * (O_NONBLOCK without an event).
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
#define P2PMEM_IOC_ATTACH_DMABUF	_IOWR(P2PMEM_IOC_MAGIC, 0x0c, struct p2pmem_attach)
#define P2PMEM_IOC_DETACH_DMABUF	_IOW(P2PMEM_IOC_MAGIC, 0x0d, struct p2pmem_detach)
#define P2PMEM_IOC_ATTACHMENT	_IOWR(P2PMEM_IOC_MAGIC, 0x0e, struct p2pmem_attachment)

/**
 * DOC: mmap
 *
 * mmap(MAP_SHARED) at a buffer's mmap_offset, or at an offset within the buffer, maps the buffer. At offset 0 it
 * allocates a buffer, near no particular device, that lives as long as its mappings, as the sysfs file
 * p2pmem/allocate of the kernel does.
 *
 * Mappings have pages, so O_DIRECT and other users of get_user_pages() work. Mappings of a %P2PMEM_PROVIDER_PAGELESS
 * provider have none: O_DIRECT on them fails with -EFAULT.
 *
 * Errors: -EINVAL (MAP_PRIVATE, beyond the buffer's end, or no such offset), -ENODEV (no provider, or the buffer was
 * revoked), -ENOSPC. An access to a mapping of a revoked buffer raises SIGBUS.
 */

#endif /* _UAPI_LINUX_P2PMEM_H */
