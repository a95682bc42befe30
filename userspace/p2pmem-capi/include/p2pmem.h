/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* libp2pmem: PCI peer-to-peer memory for programs. Made from src/sys.rs by ../generate: do not edit. */

#ifndef P2PMEM_H
#define P2PMEM_H

#include <stddef.h>
#include <stdint.h>

/* Of infiniband/verbs.h, which programs that register memory include too. */
struct ibv_pd;
struct ibv_mr;

/**
 * The provider is only preferred: another one is taken where it cannot serve.
 */
#define P2PMEM_WANT_PREFER 1

/**
 * The kernel's own pci_p2pmem_find_many() chooses.
 */
#define P2PMEM_WANT_UPSTREAM 2

/**
 * As many parts as providers can hold one.
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
 * Anywhere that can be reached.
 */
#define P2PMEM_CLASS_SYSTEM 6

/**
 * Published by the administrator.
 */
#define P2PMEM_KIND_IS_OWN 1

/**
 * Published by the device's own driver.
 */
#define P2PMEM_KIND_IS_ADOPTED 2

/**
 * Handed to p2pmem by the device's own driver.
 */
#define P2PMEM_KIND_IS_REGISTERED 3

/**
 * Buffers in it can be exported and registered.
 */
#define P2PMEM_PROVIDER_IS_EXPORTABLE 1

/**
 * It has no struct pages: direct I/O does not work.
 */
#define P2PMEM_PROVIDER_IS_PAGELESS 2

/**
 * It is being taken away.
 */
#define P2PMEM_PROVIDER_IS_LEAVING 4

/**
 * Importers that cannot be revoked are allowed too, where the administrator says so.
 */
#define P2PMEM_EXPORT_IS_PINNED 1

/**
 * Registered by a dma-buf.
 */
#define P2PMEM_METHOD_DMABUF 1

/**
 * Registered by its addresses.
 */
#define P2PMEM_METHOD_PEER_MEMORY 2

/**
 * An allocation.
 */
typedef struct p2pmem_buf p2pmem_buf;

/**
 * An open /dev/p2pmem.
 */
typedef struct p2pmem_dev p2pmem_dev;

/**
 * A buffer in the program's address space.
 */
typedef struct p2pmem_mapping p2pmem_mapping;

/**
 * A buffer registered with an RDMA NIC.
 */
typedef struct p2pmem_reg p2pmem_reg;

/**
 * A device with published memory.
 */
typedef struct p2pmem_provider_info {
        /**
         * Its number, never 0.
         */
        uint32_t id;
        /**
         * P2PMEM_KIND_IS_*, or 0 where this library does not know the kind.
         */
        uint32_t kind;
        /**
         * P2PMEM_PROVIDER_IS_* bits.
         */
        uint32_t flags;
        /**
         * Live buffers in it.
         */
        uint32_t buffers;
        /**
         * The BAR, or -1 where it is not known.
         */
        int32_t bar;
        /**
         * NUMA node, or -1.
         */
        int32_t numa_node;
        /**
         * Bytes that p2pmem manages.
         */
        uint64_t size;
        /**
         * Bytes that are free.
         */
        uint64_t free;
        /**
         * Largest piece that can be had now, in bytes.
         */
        uint64_t largest;
        /**
         * PCI address, as "0000:03:00.0".
         */
        char address[24];
        /**
         * Driver of the device, "" where there is none.
         */
        char driver[32];
} p2pmem_provider_info;

/**
 * What a buffer has to be. Set all to 0, then what matters.
 */
typedef struct p2pmem_want {
        /**
         * Bytes, which are rounded up to pages.
         */
        uint64_t size;
        /**
         * Alignment in the BAR: 0 (a page) or a power of two up to 1 GiB.
         */
        uint64_t align;
        /**
         * Names of the devices that will do DMA with it: "mlx5_0", "nvme0", "0000:03:00.0".
         */
        const char *const *near_devices;
        /**
         * How many names there are, 64 at most.
         */
        size_t nr_near;
        /**
         * 0, or id of the provider it has to be in.
         */
        uint32_t provider;
        /**
         * P2PMEM_WANT_* bits.
         */
        uint32_t flags;
        /**
         * 0, or the farthest path class allowed: P2PMEM_CLASS_*.
         */
        uint32_t max_class;
        /**
         * For p2pmem_alloc_stripe() and p2pmem_explain(): 0 for one buffer, else P2PMEM_PARTS_ALL or how many providers to
         * divide it among, 16 at most. Must be 0 for p2pmem_alloc().
         */
        uint32_t parts;
} p2pmem_want;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of the library, as "0.1.0".
 */
const char *p2pmem_version(void);

/**
 * What the last failed call of this thread failed with, in words: what, the errno, and why. "" before the first. It is
 * good until the thread's next call that fails.
 */
const char *p2pmem_last_error(void);

/**
 * What to do about that failure, "" where that is not known.
 */
const char *p2pmem_last_remedy(void);

/**
 * Opens the device: path, or /dev/p2pmem for NULL.
 *
 * Errors: -ENOENT (the module is not loaded), -EACCES, -EPROTO (module and library are of different versions), -ENOTTY
 * (another kind of file).
 *
 * # Safety
 *
 * path must be NULL or a string, out valid.
 */
int p2pmem_open(const char *path,
                struct p2pmem_dev **out);

/**
 * Closes the device. Buffers that are not freed yet keep it open. NULL is allowed.
 *
 * # Safety
 *
 * dev must be NULL, or open and not in use.
 */
void p2pmem_close(struct p2pmem_dev *dev);

/**
 * The device's descriptor: readable when there are events. It belongs to the device.
 *
 * # Safety
 *
 * dev must be open.
 */
int p2pmem_fd(const struct p2pmem_dev *dev);

/**
 * Writes at most capacity providers to out, and returns how many there are.
 *
 * # Safety
 *
 * dev must be open, out valid for capacity elements (NULL where capacity is 0).
 */
int p2pmem_list(const struct p2pmem_dev *dev, struct p2pmem_provider_info *out, size_t capacity);

/**
 * Allocates a buffer.
 *
 * Errors: -EINVAL (a bad want), -ENODEV (no provider could ever serve it, or no such device), -ENOSPC (those that could
 * are full: the text says who uses them).
 *
 * # Safety
 *
 * dev must be open, want and its names valid, out valid.
 */
int p2pmem_alloc(const struct p2pmem_dev *dev,
                 const struct p2pmem_want *want,
                 struct p2pmem_buf **out);

/**
 * Allocates a buffer in each of several providers, want.parts in all: together they are want.size bytes, equal parts but
 * for the last one, which may be smaller, in the order of out. All are allocated or none. Each is freed, mapped,
 * exported and registered by itself. Returns how many there are, capacity at most.
 *
 * Errors: those of p2pmem_alloc(), for the part that found no provider; -EINVAL (want.parts is 0, or more than capacity).
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
 * Makes a descriptor by which another process gets at a buffer: sent to it (SCM_RIGHTS), p2pmem_import() makes it a buffer
 * again. It is close-on-exec and the caller's to close, and holds the buffer until then.
 *
 * Errors: those of p2pmem_export().
 *
 * # Safety
 *
 * buf must be a buffer.
 */
int p2pmem_share(const struct p2pmem_buf *buf);

/**
 * Makes a buffer of a descriptor of p2pmem_share(), which stays the caller's to close. The memory is free when the last
 * process has let go of it.
 *
 * Errors: -EBADF, -EINVAL (no dma-buf), -EXDEV (a dma-buf of another driver's), -EACCES (a dma-buf of parts of a
 * buffer), -ENODEV (the buffer was revoked).
 *
 * # Safety
 *
 * dev must be open, fd a descriptor that stays open during the call, or none, out valid.
 */
int p2pmem_import(const struct p2pmem_dev *dev,
                  int fd,
                  struct p2pmem_buf **out);

/**
 * Frees a buffer. Its memory is free once its mappings, dma-bufs and registrations are gone too. NULL is allowed.
 *
 * # Safety
 *
 * buf must be NULL, or a buffer that is not in use.
 */
void p2pmem_free(struct p2pmem_buf *buf);

/**
 * The buffer's size in bytes; 0 for NULL.
 *
 * # Safety
 *
 * buf must be NULL or a buffer.
 */
uint64_t p2pmem_buf_size(const struct p2pmem_buf *buf);

/**
 * Id of the provider that the buffer is in; 0 for NULL.
 *
 * # Safety
 *
 * buf must be NULL or a buffer.
 */
uint32_t p2pmem_buf_provider(const struct p2pmem_buf *buf);

/**
 * The buffer's first byte in the provider's BAR, which a command to the provider's engine wants; UINT64_MAX where the
 * BAR is not known, and for NULL.
 *
 * # Safety
 *
 * buf must be NULL or a buffer.
 */
uint64_t p2pmem_buf_bar_offset(const struct p2pmem_buf *buf);

/**
 * Maps all of a buffer. The mapping may outlive it.
 *
 * Errors: -ENODEV (the buffer was revoked), -ENOMEM.
 *
 * # Safety
 *
 * buf must be a buffer, out valid.
 */
int p2pmem_map(const struct p2pmem_buf *buf, struct p2pmem_mapping **out);

/**
 * Unmaps it. Registrations that go by its addresses keep it. NULL is allowed.
 *
 * # Safety
 *
 * map must be NULL, or a mapping that is not in use.
 */
void p2pmem_unmap(struct p2pmem_mapping *map);

/**
 * Address of the first byte; NULL for NULL. Access it through volatile pointers: devices change it at any time. When
 * the provider goes away an access raises SIGBUS.
 *
 * # Safety
 *
 * map must be NULL or a mapping.
 */
void *p2pmem_map_addr(const struct p2pmem_mapping *map);

/**
 * Length in bytes; 0 for NULL.
 *
 * # Safety
 *
 * map must be NULL or a mapping.
 */
size_t p2pmem_map_len(const struct p2pmem_mapping *map);

/**
 * Makes writes through mappings visible to devices before what follows.
 *
 * # Safety
 *
 * map must be a mapping.
 */
int p2pmem_flush(const struct p2pmem_mapping *map);

/**
 * Exports length bytes of a buffer from offset on as a dma-buf and returns its descriptor, which is close-on-exec and
 * the caller's to close. Whole pages; a length of 0 means all from offset on. flags: P2PMEM_EXPORT_IS_PINNED or 0.
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
 * Registers length bytes of a buffer from offset on with the NIC of a protection domain; a length of 0 means all from
 * offset on. access: IBV_ACCESS_* bits.
 *
 * On a stock kernel this makes a dma-buf of the buffer and registers that. Where the buffer is mapped, work requests
 * name its bytes by their addresses; else the buffer's first byte is 0. The registration keeps the memory, even where
 * the buffer is freed. It must be ended before the protection domain is.
 *
 * Errors: -EINVAL, -EOPNOTSUPP (the NIC's driver cannot take dma-bufs, or not ones that can be taken back),
 * -EHOSTUNREACH (the NIC cannot reach the provider), -ENODEV (the buffer was revoked), -ENOMEM, -ENOSYS (no libibverbs,
 * or too old a one).
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
 * Ends a registration. It is gone whatever this returns. NULL is allowed.
 *
 * Errors: -EIO (the driver refused: memory windows are bound to it).
 *
 * # Safety
 *
 * reg must be NULL, or a registration that no work request names any more.
 */
int p2pmem_deregister(struct p2pmem_reg *reg);

/**
 * The key for work requests of this side; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
uint32_t p2pmem_reg_lkey(const struct p2pmem_reg *reg);

/**
 * The key for work requests of the other side; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
uint32_t p2pmem_reg_rkey(const struct p2pmem_reg *reg);

/**
 * What work requests call the first byte; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
uint64_t p2pmem_reg_addr(const struct p2pmem_reg *reg);

/**
 * Length in bytes; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
size_t p2pmem_reg_len(const struct p2pmem_reg *reg);

/**
 * The method taken: P2PMEM_METHOD_*; 0 for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
int p2pmem_reg_method(const struct p2pmem_reg *reg);

/**
 * The region itself, which belongs to the registration: do not deregister it. NULL for NULL.
 *
 * # Safety
 *
 * reg must be NULL or a registration.
 */
struct ibv_mr *p2pmem_reg_mr(const struct p2pmem_reg *reg);

/**
 * Says which provider p2pmem_alloc() would choose for this want, and why, with a line for each provider. Writes at most
 * capacity bytes to text, with a NUL, and returns the whole text's length, as snprintf() does. Nothing is allocated.
 *
 * # Safety
 *
 * dev must be open, want and its names valid, text valid for capacity bytes (NULL where capacity is 0).
 */
int p2pmem_explain(const struct p2pmem_dev *dev,
                   const struct p2pmem_want *want,
                   char *text,
                   size_t capacity);

/**
 * Explains the last allocation through this device, or what was refused since, as p2pmem_explain() does.
 *
 * Errors: -ENODATA (there was none yet).
 *
 * # Safety
 *
 * dev must be open, text valid for capacity bytes (NULL where capacity is 0).
 */
int p2pmem_explain_last(const struct p2pmem_dev *dev,
                        char *text,
                        size_t capacity);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* P2PMEM_H */
