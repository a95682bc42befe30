/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* libp2pmem: PCI peer-to-peer memory for programs. Generated from src/sys.rs by ../generate: do not edit. */

#ifndef P2PMEM_H
#define P2PMEM_H

#include <stddef.h>
#include <stdint.h>

/* From infiniband/verbs.h, which programs that register memory include too. */
struct ibv_pd;
struct ibv_mr;

/**
 * The provider is preferred, not required: another provider serves the request if this one cannot.
 */
#define P2PMEM_WANT_PREFER 1

/**
 * The kernel's pci_p2pmem_find_many() chooses the provider.
 */
#define P2PMEM_WANT_UPSTREAM 2

/**
 * As many parts as there are providers that can hold one.
 */
#define P2PMEM_PARTS_ALL UINT32_MAX

/**
 * The same device.
 */
#define P2PMEM_CLASS_DEVICE 1

/**
 * Below one PCIe switch.
 */
#define P2PMEM_CLASS_SWITCH 2

/**
 * Below one root port.
 */
#define P2PMEM_CLASS_SWITCHES 3

/**
 * Below one host bridge.
 */
#define P2PMEM_CLASS_HOST_BRIDGE 4

/**
 * In one NUMA node.
 */
#define P2PMEM_CLASS_NUMA_NODE 5

/**
 * Any path by which the devices can reach the provider.
 */
#define P2PMEM_CLASS_SYSTEM 6

/**
 * A BAR that the administrator published.
 */
#define P2PMEM_KIND_IS_OWN 1

/**
 * Memory that the device's own driver published in the kernel's pool.
 */
#define P2PMEM_KIND_IS_ADOPTED 2

/**
 * Memory that the device's own driver registered with p2pmem.
 */
#define P2PMEM_KIND_IS_REGISTERED 3

/**
 * A BAR of a device that is bound to vfio-pci.
 */
#define P2PMEM_KIND_IS_VFIO 4

/**
 * The p2pmem module: all capabilities.
 */
#define P2PMEM_BACKEND_MODULE 1

/**
 * Memory that a driver published: the kernel's sysfs file p2pmem/allocate.
 */
#define P2PMEM_BACKEND_SYSFS 2

/**
 * BARs of devices that are bound to vfio-pci.
 */
#define P2PMEM_BACKEND_VFIO 3

/**
 * Buffers can be mapped.
 */
#define P2PMEM_CAN_MAP 1

/**
 * Direct I/O (O_DIRECT) between files and mappings.
 */
#define P2PMEM_CAN_DIRECT_IO 2

/**
 * Buffers can be exported as dma-bufs and registered with NICs.
 */
#define P2PMEM_CAN_DMABUF 4

/**
 * Rules of the administrator and of the program.
 */
#define P2PMEM_CAN_RULES 8

/**
 * Quotas.
 */
#define P2PMEM_CAN_QUOTAS 16

/**
 * Removing a provider does not wait for programs, and causes an event.
 */
#define P2PMEM_CAN_REVOKE 32

/**
 * Strategies other than nearest, and stripes.
 */
#define P2PMEM_CAN_PLACE 64

/**
 * Buffers can be passed to other processes, which can map them.
 */
#define P2PMEM_CAN_SHARE 128

/**
 * Memory is cleared before it gets a new owner.
 */
#define P2PMEM_CAN_CLEAR 256

/**
 * Buffers in the provider can be exported and registered.
 */
#define P2PMEM_PROVIDER_IS_EXPORTABLE 1

/**
 * The memory has no struct pages: direct I/O does not work.
 */
#define P2PMEM_PROVIDER_IS_PAGELESS 2

/**
 * The provider is being removed.
 */
#define P2PMEM_PROVIDER_IS_REMOVING 4

/**
 * Importers that cannot be revoked are allowed too. The administrator must permit this for the provider.
 */
#define P2PMEM_EXPORT_IS_PINNED 1

/**
 * Registered as a dma-buf.
 */
#define P2PMEM_METHOD_DMABUF 1

/**
 * Registered by its addresses with ibv_reg_mr(), through the kernel's peer-memory interface.
 */
#define P2PMEM_METHOD_PEER_MEMORY 2

/**
 * A buffer.
 */
typedef struct p2pmem_buf p2pmem_buf;

/**
 * An open /dev/p2pmem, or another backend.
 */
typedef struct p2pmem_dev p2pmem_dev;

/**
 * A dma-buf of any driver.
 */
typedef struct p2pmem_dmabuf p2pmem_dmabuf;

/**
 * A buffer in the program's address space.
 */
typedef struct p2pmem_mapping p2pmem_mapping;

/**
 * A buffer or a dma-buf registered with an RDMA NIC.
 */
typedef struct p2pmem_reg p2pmem_reg;

/**
 * A provider: a device with published memory.
 */
typedef struct p2pmem_provider_info {
        /**
         * Id of the provider, never 0.
         */
        uint32_t id;
        /**
         * P2PMEM_KIND_IS_*, or 0 if this library does not know the kind.
         */
        uint32_t kind;
        /**
         * P2PMEM_PROVIDER_IS_* bits.
         */
        uint32_t flags;
        /**
         * Number of live buffers in the provider.
         */
        uint32_t buffers;
        /**
         * Number of the BAR, or -1 if it is not known.
         */
        int32_t bar;
        /**
         * NUMA node, or -1 if it is not known.
         */
        int32_t numa_node;
        /**
         * Bytes that p2pmem manages.
         */
        uint64_t size;
        /**
         * Free bytes.
         */
        uint64_t free;
        /**
         * Size in bytes of a piece that one allocation can get now: `free` if one can get all of it, otherwise a lower bound.
         */
        uint64_t largest;
        /**
         * PCI address, such as "0000:03:00.0".
         */
        char address[24];
        /**
         * Driver of the device, or "" if the device has none.
         */
        char driver[32];
} p2pmem_provider_info;

/**
 * A request for an allocation. Set all fields to 0 first, then the needed ones.
 */
typedef struct p2pmem_want {
        /**
         * Size in bytes, rounded up to pages.
         */
        uint64_t size;
        /**
         * Alignment in the BAR in bytes: 0 (a page) or a power of two up to 1 GiB.
         */
        uint64_t align;
        /**
         * Names of the devices that will do DMA to the buffer: "mlx5_0", "nvme0", "0000:03:00.0".
         */
        const char *const *near_devices;
        /**
         * Number of names, at most 64.
         */
        size_t nr_near;
        /**
         * Id of the required provider, or 0 for any.
         */
        uint32_t provider;
        /**
         * P2PMEM_WANT_* bits.
         */
        uint32_t flags;
        /**
         * The farthest path class allowed, P2PMEM_CLASS_*, or 0 for any.
         */
        uint32_t max_class;
        /**
         * For p2pmem_alloc_stripe() and p2pmem_explain(): 0 for one buffer, the number of providers that share the request
         * (at most 16), or P2PMEM_PARTS_ALL. Must be 0 for p2pmem_alloc().
         */
        uint32_t parts;
} p2pmem_want;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the version of the library, such as "0.1.0".
 */
const char *p2pmem_version(void);

/**
 * Returns the message of the calling thread's last failed call: the operation, the errno, and the reason. Returns ""
 * before the first failure. The string is valid until the thread's next failed call.
 */
const char *p2pmem_last_error(void);

/**
 * Returns the remedy for the calling thread's last failure, or "" if none is known. The string is valid until the
 * thread's next failed call.
 */
const char *p2pmem_last_remedy(void);

/**
 * Opens the module's device at path. If path is NULL, opens /dev/p2pmem or, if the module is not loaded, another
 * backend that has memory on this machine. p2pmem_backend() returns the backend. A call that the backend does not
 * support fails with -EOPNOTSUPP.
 *
 * Errors: -ENOENT (the module is not loaded, and no other backend has memory), -EACCES, -EPROTO (module and library
 * are of incompatible versions), -ENOTTY (the file is no p2pmem device).
 *
 * # Safety
 *
 * path must be NULL or a string, out valid.
 */
int p2pmem_open(const char *path,
                struct p2pmem_dev **out);

/**
 * Opens a backend, P2PMEM_BACKEND_*.
 *
 * Errors: -EINVAL (no such backend), -ENODEV (the backend has no memory on this machine; p2pmem_last_remedy() returns
 * what the backend needs), -EACCES, -EBUSY, and the errors of p2pmem_open().
 *
 * # Safety
 *
 * out must be valid.
 */
int p2pmem_open_backend(unsigned int backend,
                        struct p2pmem_dev **out);

/**
 * Returns the backend of the device, P2PMEM_BACKEND_*.
 *
 * # Safety
 *
 * dev must be open.
 */
int p2pmem_backend(const struct p2pmem_dev *dev);

/**
 * Returns the capabilities of a backend, P2PMEM_CAN_* bits.
 *
 * Errors: -EINVAL (no such backend).
 */
int p2pmem_capabilities(unsigned int backend);

/**
 * Closes the device. Buffers that are not freed yet keep the file open. NULL is allowed.
 *
 * # Safety
 *
 * dev must be NULL, or open and not in use.
 */
void p2pmem_close(struct p2pmem_dev *dev);

/**
 * Returns the device's file descriptor, which is readable while there are events. The device owns the descriptor.
 *
 * Errors: -EINVAL (dev is NULL).
 *
 * # Safety
 *
 * dev must be open.
 */
int p2pmem_fd(const struct p2pmem_dev *dev);

/**
 * Writes at most capacity providers to out. Returns the number of all providers, which can be
 * larger.
 *
 * Errors: -EINVAL (dev or out is NULL), -ENOMEM.
 *
 * # Safety
 *
 * dev must be open, out valid for capacity elements (NULL if capacity is 0).
 */
int p2pmem_list(const struct p2pmem_dev *dev, struct p2pmem_provider_info *out, size_t capacity);

/**
 * Allocates a buffer.
 *
 * Errors: -EINVAL (an invalid request), -ENODEV (no provider can ever serve the request, or no such device), -ENOSPC
 * (the providers that could serve the request are full; the message names the users of their memory), -EACCES (rules
 * deny the memory), -EDQUOT (a quota or a limit of the cgroup would be exceeded), -EMFILE (too many buffers), -ENOMEM.
 *
 * # Safety
 *
 * dev must be open, want and its names valid, out valid.
 */
int p2pmem_alloc(const struct p2pmem_dev *dev,
                 const struct p2pmem_want *want,
                 struct p2pmem_buf **out);

/**
 * Allocates a stripe: one buffer in each of want.parts providers, want.size bytes in total. The parts are equal,
 * except for the last one, which can be smaller. Their order is that of out. Allocates all parts or none. Each part is
 * freed, mapped, exported and registered separately. Returns the number of parts, at most capacity.
 *
 * Errors: those of p2pmem_alloc(), if a part has no provider; -EINVAL also if want.parts is 0 or more than capacity.
 *
 * # Safety
 *
 * dev must be open, want and its names valid, out valid for capacity elements.
 */
int p2pmem_alloc_stripe(const struct p2pmem_dev *dev,
                        const struct p2pmem_want *want,
                        struct p2pmem_buf **out,
                        size_t capacity);

/**
 * Creates a descriptor of a buffer for another process. The process receives the descriptor (SCM_RIGHTS) and imports
 * the buffer with p2pmem_import(). The descriptor is close-on-exec. The caller closes it; it holds the buffer until
 * then.
 *
 * Errors: those of p2pmem_export().
 *
 * # Safety
 *
 * buf must be a buffer.
 */
int p2pmem_share(const struct p2pmem_buf *buf);

/**
 * Imports the buffer of a descriptor of p2pmem_share(). The caller still closes the descriptor. The memory is free
 * after all processes have freed the buffer.
 *
 * Errors: -EBADF, -EINVAL (not a dma-buf), -EXDEV (another driver's dma-buf), -EACCES (a dma-buf of parts of a
 * buffer), -ENODEV (the buffer was revoked), -EMFILE (too many buffers), -ENOMEM.
 *
 * # Safety
 *
 * dev must be open, out valid. If fd is a descriptor, it must stay open during the call.
 */
int p2pmem_import(const struct p2pmem_dev *dev,
                  int fd,
                  struct p2pmem_buf **out);

/**
 * Frees a buffer. The memory is free once the buffer's mappings, dma-bufs and registrations have ended too. NULL is
 * allowed.
 *
 * # Safety
 *
 * buf must be NULL, or a buffer that is not in use.
 */
void p2pmem_free(struct p2pmem_buf *buf);

/**
 * Returns the buffer's size in bytes; 0 for NULL.
 *
 * # Safety
 *
 * buf must be NULL or a buffer.
 */
uint64_t p2pmem_buf_size(const struct p2pmem_buf *buf);

/**
 * Returns the id of the buffer's provider; 0 for NULL.
 *
 * # Safety
 *
 * buf must be NULL or a buffer.
 */
uint32_t p2pmem_buf_provider(const struct p2pmem_buf *buf);

/**
 * Returns the offset in bytes of the buffer's first byte in the provider's BAR, for commands to the provider's DMA
 * engine; UINT64_MAX if the BAR is not known, and for NULL.
 *
 * # Safety
 *
 * buf must be NULL or a buffer.
 */
uint64_t p2pmem_buf_bar_offset(const struct p2pmem_buf *buf);

/**
 * Maps a whole buffer for reading and writing. The mapping can outlive the buffer.
 *
 * Errors: -EINVAL, -ENODEV (the buffer was revoked), -ENOMEM.
 *
 * # Safety
 *
 * buf must be a buffer, out valid.
 */
int p2pmem_map(const struct p2pmem_buf *buf, struct p2pmem_mapping **out);

/**
 * Unmaps a buffer. Registrations that use the mapping's addresses keep the memory mapped. NULL is allowed.
 *
 * # Safety
 *
 * map must be NULL, or a mapping that is not in use.
 */
void p2pmem_unmap(struct p2pmem_mapping *map);

/**
 * Returns the address of the first byte; NULL for NULL. Use volatile pointers: devices change the memory at any time.
 * After the provider is removed, an access raises SIGBUS.
 *
 * # Safety
 *
 * map must be NULL or a mapping.
 */
void *p2pmem_map_addr(const struct p2pmem_mapping *map);

/**
 * Returns the length in bytes; 0 for NULL.
 *
 * # Safety
 *
 * map must be NULL or a mapping.
 */
size_t p2pmem_map_len(const struct p2pmem_mapping *map);

/**
 * Makes earlier writes through mappings visible to devices before any later access.
 *
 * Errors: -EINVAL (map is NULL).
 *
 * # Safety
 *
 * map must be a mapping.
 */
int p2pmem_flush(const struct p2pmem_mapping *map);

/**
 * Exports length bytes of a buffer from offset as a dma-buf. Returns the descriptor, which is close-on-exec and which
 * the caller closes. offset and length are multiples of the page size; a length of 0 means the rest of the buffer.
 * flags: P2PMEM_EXPORT_IS_PINNED or 0.
 *
 * Errors: -EINVAL, -ENODEV (the buffer was revoked), -EPERM (pinned, which the administrator does not allow),
 * -EOPNOTSUPP (memory of another driver whose BAR is not known), -EMFILE.
 *
 * # Safety
 *
 * buf must be a buffer.
 */
int p2pmem_export(const struct p2pmem_buf *buf,
                  uint64_t offset,
                  uint64_t length,
                  unsigned int flags);

/**
 * Registers length bytes of a buffer from offset with the NIC of a protection domain. A length of 0 means up to the
 * end of the buffer. access: IBV_ACCESS_* bits.
 *
 * On a stock kernel this exports the buffer as a dma-buf and registers the dma-buf. If the buffer is mapped, work
 * requests use the program's addresses of its bytes; otherwise the buffer's first byte has the address 0. The
 * registration holds the memory, even if the buffer is freed. The registration must end before the protection domain
 * does.
 *
 * Errors: -EINVAL, -EOPNOTSUPP (the NIC's driver does not register dma-bufs, or no revocable ones), -EHOSTUNREACH (the
 * NIC cannot reach the provider), -ENODEV (the buffer was revoked), -ENOMEM, -ENOSYS (libibverbs is missing or too
 * old).
 *
 * # Safety
 *
 * buf must be a buffer, pd a protection domain of libibverbs.so.1, out valid.
 */
int p2pmem_register(const struct p2pmem_buf *buf,
                    struct ibv_pd *pd,
                    uint64_t offset,
                    uint64_t length,
                    unsigned int access,
                    struct p2pmem_reg **out);

/**
 * Accepts a dma-buf of any driver: from a GPU driver (CUDA's cuMemGetHandleForAddressRange()), vfio-pci, a heap, or a
 * buffer of another process. The caller still closes fd. device is the PCI address of the device that has the memory.
 * It can be NULL; p2pmem_dmabuf_path() then fails.
 *
 * Errors: -EBADF, -EINVAL (fd is not a dma-buf, or device is not a PCI address), -EMFILE.
 *
 * # Safety
 *
 * device must be NULL or a string, out valid. If fd is a descriptor, it must stay open during the call.
 */
int p2pmem_dmabuf_open(int fd,
                       const char *device,
                       struct p2pmem_dmabuf **out);

/**
 * Closes a dma-buf. Registrations of the dma-buf keep the memory. NULL is allowed.
 *
 * # Safety
 *
 * dmabuf must be NULL, or a dma-buf that is not in use.
 */
void p2pmem_dmabuf_close(struct p2pmem_dmabuf *dmabuf);

/**
 * Returns the size of the dma-buf in bytes; 0 for NULL.
 *
 * # Safety
 *
 * dmabuf must be NULL or a dma-buf.
 */
uint64_t p2pmem_dmabuf_size(const struct p2pmem_dmabuf *dmabuf);

/**
 * Writes the name of the driver that exported the memory, or "" if the name is not known. Writes at most capacity
 * bytes to text, including the NUL, and returns the length of the whole text, as snprintf() does.
 *
 * # Safety
 *
 * dmabuf must be a dma-buf, text valid for capacity bytes (NULL if capacity is 0).
 */
int p2pmem_dmabuf_exporter(const struct p2pmem_dmabuf *dmabuf,
                           char *text,
                           size_t capacity);

/**
 * Returns the class of the path between the memory and a client, P2PMEM_CLASS_*. client is a name as in p2pmem_want. A
 * path through the root complex counts as reachable. If the client cannot reach the memory, the registration fails.
 *
 * Errors: -EINVAL (the device that has the memory is not known), -ENODEV (a device does not exist).
 *
 * # Safety
 *
 * dmabuf must be a dma-buf, client a string.
 */
int p2pmem_dmabuf_path(const struct p2pmem_dmabuf *dmabuf,
                       const char *client);

/**
 * Registers length bytes of a dma-buf from offset with the NIC of a protection domain; a length of 0 means the rest.
 * Work requests use offset as the address of the first byte. access: IBV_ACCESS_* bits. The registration must end
 * before the protection domain does.
 *
 * Errors: -EINVAL, -EOPNOTSUPP (the NIC's driver does not register dma-bufs, or the exporter refuses importers that it
 * cannot revoke), -EHOSTUNREACH or -EREMOTEIO (the NIC cannot reach the memory), -ENODEV (the memory was revoked),
 * -ENOMEM, -ENOSYS (libibverbs is not installed, or too old).
 *
 * # Safety
 *
 * dmabuf must be a dma-buf, pd a protection domain of libibverbs.so.1, out valid.
 */
int p2pmem_dmabuf_register(const struct p2pmem_dmabuf *dmabuf,
                           struct ibv_pd *pd,
                           uint64_t offset,
                           uint64_t length,
                           unsigned int access,
                           struct p2pmem_reg **out);

/**
 * Ends a registration. reg is invalid afterwards, also after an error. NULL is allowed.
 *
 * Errors: -EIO (memory windows are bound to the region).
 *
 * # Safety
 *
 * reg must be NULL, or a registration that no outstanding work request uses.
 */
int p2pmem_deregister(struct p2pmem_reg *reg);

/**
 * Returns the local key, for work requests of this side; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
uint32_t p2pmem_reg_lkey(const struct p2pmem_reg *reg);

/**
 * Returns the remote key, for work requests of the remote side; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
uint32_t p2pmem_reg_rkey(const struct p2pmem_reg *reg);

/**
 * Returns the address of the first byte in work requests; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
uint64_t p2pmem_reg_addr(const struct p2pmem_reg *reg);

/**
 * Returns the length in bytes; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
size_t p2pmem_reg_len(const struct p2pmem_reg *reg);

/**
 * Returns the method of the registration, P2PMEM_METHOD_*; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
int p2pmem_reg_method(const struct p2pmem_reg *reg);

/**
 * Returns the memory region, which the registration owns: do not deregister it. NULL for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
struct ibv_mr *p2pmem_reg_mr(const struct p2pmem_reg *reg);

/**
 * Explains which provider p2pmem_alloc() would choose for this request and why, with one line for each provider.
 * Allocates nothing. Writes at most capacity bytes to text, including the NUL, and returns the length of the whole
 * text in bytes without the NUL, as snprintf() does.
 *
 * Errors: -EINVAL (an invalid request), -ENODEV (no such device). A request that no provider can serve is not an
 * error.
 *
 * # Safety
 *
 * dev must be open, want and its names valid, text valid for capacity bytes (NULL if capacity is 0).
 */
int p2pmem_explain(const struct p2pmem_dev *dev,
                   const struct p2pmem_want *want,
                   char *text,
                   size_t capacity);

/**
 * Explains the last allocation through this device, or a later failure, as p2pmem_explain() does.
 *
 * Errors: -ENODATA (there is none yet).
 *
 * # Safety
 *
 * dev must be open, text valid for capacity bytes (NULL if capacity is 0).
 */
int p2pmem_explain_last(const struct p2pmem_dev *dev, char *text, size_t capacity);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* P2PMEM_H */
