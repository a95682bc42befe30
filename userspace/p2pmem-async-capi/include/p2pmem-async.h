/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* libp2pmem-async: RDMA that a device drives. Generated from src/sys.rs by ../generate: do not edit. */

#ifndef P2PMEM_ASYNC_H
#define P2PMEM_ASYNC_H

#include <stddef.h>
#include <stdint.h>

/*
 * Functions return 0, a count or a descriptor, or a negative errno. p2pmem_async_last_error() returns a message about the
 * last failure of the calling thread. After an error, only the output argument failed_index is written.
 *
 * A handle may be used from any thread, but not while another thread frees or changes it. Handles may be freed in any
 * order: endpoints and memory keep the NIC open, interpreters and peeks keep memory mapped. Stop the peer first, because a
 * device does not know that memory was freed. The usual order is: programs, interpreters, endpoints, memory, the port.
 */

/**
 * Reliable connection.
 */
#define P2PMEM_ASYNC_TRANSPORT_RC 1

/**
 * Unreliable datagrams, on InfiniBand only.
 */
#define P2PMEM_ASYNC_TRANSPORT_UD 2

/**
 * Memory of the host.
 */
#define P2PMEM_ASYNC_MEMORY_HOST 0

/**
 * A buffer of p2pmem near the NIC, in an accelerator.
 */
#define P2PMEM_ASYNC_MEMORY_ACCELERATOR 1

/**
 * The peer executes P2PMEM_ASYNC_FENCE.
 */
#define P2PMEM_ASYNC_CAN_FENCE 1

/**
 * The peer executes P2PMEM_ASYNC_STORE_DWORD.
 */
#define P2PMEM_ASYNC_CAN_STORE_DWORD 2

/**
 * The peer executes P2PMEM_ASYNC_STORE_QWORD, as one access of 8 bytes.
 */
#define P2PMEM_ASYNC_CAN_STORE_QWORD 4

/**
 * The peer executes P2PMEM_ASYNC_COPY_BLOCK.
 */
#define P2PMEM_ASYNC_CAN_COPY_BLOCK 8

/**
 * The peer executes P2PMEM_ASYNC_POLL_AND.
 */
#define P2PMEM_ASYNC_CAN_POLL_AND 16

/**
 * The peer executes P2PMEM_ASYNC_POLL_NOR.
 */
#define P2PMEM_ASYNC_CAN_POLL_NOR 32

/**
 * The peer executes P2PMEM_ASYNC_POLL_GEQ.
 */
#define P2PMEM_ASYNC_CAN_POLL_GEQ 64

/**
 * The peer executes all operations, as p2pmem_async_interpreter_run() does.
 */
#define P2PMEM_ASYNC_CAN_ALL 127

/**
 * Send and receive queue of a queue pair. Byte code does not access it.
 */
#define P2PMEM_ASYNC_REGION_WORK_QUEUE 1

/**
 * Doorbell record of a queue pair.
 */
#define P2PMEM_ASYNC_REGION_QP_RECORD 2

/**
 * Entries of a completion queue.
 */
#define P2PMEM_ASYNC_REGION_COMPLETIONS 3

/**
 * Doorbell record of a completion queue, and the words by which peeks report that they ended.
 */
#define P2PMEM_ASYNC_REGION_CQ_RECORD 4

/**
 * The NIC's doorbell page (UAR). Another device reaches it by p2pmem_async_export_doorbell().
 */
#define P2PMEM_ASYNC_REGION_DOORBELL 5

/**
 * Memory of the program: payload, signals, counters.
 */
#define P2PMEM_ASYNC_REGION_DATA 6

/**
 * SEND.
 */
#define P2PMEM_ASYNC_REQUEST_SEND 1

/**
 * SEND with immediate data.
 */
#define P2PMEM_ASYNC_REQUEST_SEND_IMM 2

/**
 * RDMA WRITE.
 */
#define P2PMEM_ASYNC_REQUEST_WRITE 3

/**
 * RDMA WRITE with immediate data, which consumes a receive of the other side.
 */
#define P2PMEM_ASYNC_REQUEST_WRITE_IMM 4

/**
 * RDMA READ.
 */
#define P2PMEM_ASYNC_REQUEST_READ 5

/**
 * Atomic compare and swap of 8 bytes. The old value returns to one segment of 8 bytes.
 */
#define P2PMEM_ASYNC_REQUEST_COMPARE_SWAP 6

/**
 * Atomic fetch and add of 8 bytes. The old value returns to one segment of 8 bytes.
 */
#define P2PMEM_ASYNC_REQUEST_FETCH_ADD 7

/**
 * Success causes a completion. A failure always causes one.
 */
#define P2PMEM_ASYNC_SEND_IS_SIGNALED 1

/**
 * The receiver's completion counts as solicited.
 */
#define P2PMEM_ASYNC_SEND_IS_SOLICITED 2

/**
 * The request waits for earlier READs and atomics.
 */
#define P2PMEM_ASYNC_SEND_IS_FENCED 4

/**
 * The payload is data, which is copied into the work request, at most 1023 bytes. Without, the payload is segments.
 */
#define P2PMEM_ASYNC_SEND_IS_INLINE 8

/**
 * The receiver is to. Datagrams need this flag, and connections must not have it.
 */
#define P2PMEM_ASYNC_SEND_HAS_ADDRESS 16

/**
 * The send queue.
 */
#define P2PMEM_ASYNC_QUEUE_SEND 1

/**
 * The receive queue.
 */
#define P2PMEM_ASYNC_QUEUE_RECEIVE 2

/**
 * The work request failed. p2pmem_async_completion_text() returns the cause.
 */
#define P2PMEM_ASYNC_COMPLETION_IS_FAILURE 1

/**
 * The message has immediate data.
 */
#define P2PMEM_ASYNC_COMPLETION_HAS_IMMEDIATE 2

/**
 * The 40 bytes before the payload of a datagram are a global route.
 */
#define P2PMEM_ASYNC_COMPLETION_HAS_ROUTE 4

/**
 * Earlier stores become visible to the NIC before later ones.
 */
#define P2PMEM_ASYNC_FENCE 1

/**
 * Writes the low 4 bytes of value in one access.
 */
#define P2PMEM_ASYNC_STORE_DWORD 2

/**
 * Writes the 8 bytes of value in one access.
 */
#define P2PMEM_ASYNC_STORE_QWORD 3

/**
 * Writes the bytes at data in accesses of any size and order: 8 to 1024 bytes.
 */
#define P2PMEM_ASYNC_COPY_BLOCK 4

/**
 * Waits until 4 bytes of memory are such that (memory & value) != 0.
 */
#define P2PMEM_ASYNC_POLL_AND 5

/**
 * Waits until 4 bytes of memory are such that ~(memory | value) != 0.
 */
#define P2PMEM_ASYNC_POLL_NOR 6

/**
 * Waits until 4 bytes of memory are such that (int32_t)(memory - value) >= 0.
 */
#define P2PMEM_ASYNC_POLL_GEQ 7

/**
 * The NIC reports a state that this library does not know.
 */
#define P2PMEM_ASYNC_STATE_UNKNOWN 255

/**
 * The queue pair is new.
 */
#define P2PMEM_ASYNC_STATE_RESET 0

/**
 * Receives can be posted.
 */
#define P2PMEM_ASYNC_STATE_INIT 1

/**
 * The queue pair can receive.
 */
#define P2PMEM_ASYNC_STATE_READY_TO_RECEIVE 2

/**
 * The queue pair can send and receive.
 */
#define P2PMEM_ASYNC_STATE_READY_TO_SEND 3

/**
 * The send queue drains.
 */
#define P2PMEM_ASYNC_STATE_SEND_DRAIN 4

/**
 * The send queue is in error.
 */
#define P2PMEM_ASYNC_STATE_SEND_ERROR 5

/**
 * All work requests are flushed.
 */
#define P2PMEM_ASYNC_STATE_ERROR 6

/**
 * A queue pair and its completion queues, one for sends and one for receives.
 */
typedef struct p2pmem_async_endpoint p2pmem_async_endpoint;

/**
 * The executor on the CPU.
 */
typedef struct p2pmem_async_interpreter p2pmem_async_interpreter;

/**
 * Registered memory for payload, signals, and counters.
 */
typedef struct p2pmem_async_memory p2pmem_async_memory;

/**
 * The first active port of a NIC, with a protection domain.
 */
typedef struct p2pmem_async_port p2pmem_async_port;

/**
 * Byte code: a list of operations.
 */
typedef struct p2pmem_async_program p2pmem_async_program;

/**
 * A region: memory that byte code names by its id. The driver of a peer maps each region to the peer's own addresses.
 */
typedef struct p2pmem_async_region {
        /**
         * Id of the region in this process, never 0 and never used again.
         */
        uint32_t id;
        /**
         * P2PMEM_ASYNC_REGION_*, or 0 if this library does not know the kind.
         */
        uint32_t kind;
        /**
         * Address of the first byte in this process. Use volatile pointers: devices change the memory at any time. The
         * doorbell page can only be written.
         */
        void *cpu_address;
        /**
         * Length in bytes.
         */
        size_t size;
        /**
         * Offset in bytes of the first byte in the memory BAR of the accelerator that has the memory; UINT64_MAX if the region
         * is not in an accelerator, or at several places of it.
         */
        uint64_t bar_offset;
} p2pmem_async_region;

/**
 * Payload memory.
 */
typedef struct p2pmem_async_memory_info {
        /**
         * The region: id for byte code, address of this process, length, and BAR offset.
         */
        struct p2pmem_async_region region;
        /**
         * Address of the first byte in work requests, of this side and of the other side.
         */
        uint64_t address;
        /**
         * Local key, for segments of this side.
         */
        uint32_t lkey;
        /**
         * Remote key, for work requests of the other side.
         */
        uint32_t rkey;
} p2pmem_async_memory_info;

/**
 * Options of an endpoint. Set all fields to 0 first, then the needed ones.
 */
typedef struct p2pmem_async_endpoint_options {
        /**
         * Name of the peer, the executor of the byte code, for error messages. NULL for "peer".
         */
        const char *peer;
        /**
         * P2PMEM_ASYNC_CAN_* bits of the peer. A commit or a peek that the peer cannot execute is refused.
         */
        uint32_t capabilities;
        /**
         * The largest number of operations in one program, 0 for no limit.
         */
        uint32_t max_operations;
        /**
         * P2PMEM_ASYNC_TRANSPORT_*.
         */
        uint32_t transport;
        /**
         * Where the queues are, P2PMEM_ASYNC_MEMORY_*.
         */
        uint32_t queues;
        /**
         * Size of the send queue in blocks of 64 bytes: a power of two up to 32768, or 0 for 64. A work request takes 1 to 16.
         */
        uint32_t send_blocks;
        /**
         * Entries of the receive queue: a power of two up to 32768, or 0 for 64.
         */
        uint32_t receive_entries;
        /**
         * Entries of each completion queue: a power of two, or 0 for 64.
         */
        uint32_t completions;
        /**
         * Peeks of each completion queue that have not ended, or 0 for 64.
         */
        uint32_t peeks;
        /**
         * Queue key of datagrams, or 0 for 0x11111111.
         */
        uint32_t qkey;
} p2pmem_async_endpoint_options;

/**
 * What the other side needs to reach an endpoint. Integers are in the byte order of the host.
 */
typedef struct p2pmem_async_address {
        /**
         * GID of the port.
         */
        uint8_t gid[16];
        /**
         * Number of the queue pair.
         */
        uint32_t qpn;
        /**
         * Queue key of datagrams.
         */
        uint32_t qkey;
        /**
         * First packet sequence number of a connection, 24 bits.
         */
        uint32_t psn;
        /**
         * Local identifier (LID) of the port; 0 on Ethernet.
         */
        uint16_t lid;
        /**
         * Path MTU (IBV_MTU_*).
         */
        uint8_t mtu;
        /**
         * 0.
         */
        uint8_t reserved;
} p2pmem_async_address;

/**
 * The receiver of a datagram.
 */
typedef struct p2pmem_async_address_vector {
        /**
         * Number of the other side's queue pair, 24 bits.
         */
        uint32_t qpn;
        /**
         * Queue key.
         */
        uint32_t qkey;
        /**
         * Local identifier (LID) of the other side's port.
         */
        uint16_t dlid;
        /**
         * Service level.
         */
        uint8_t sl;
        /**
         * Low bits of this side's LID.
         */
        uint8_t path_bits;
        /**
         * 1 if the datagram has a global route, the fields below; else 0.
         */
        uint8_t has_route;
        /**
         * Index of this side's GID.
         */
        uint8_t sgid_index;
        /**
         * Traffic class.
         */
        uint8_t traffic_class;
        /**
         * Hop limit.
         */
        uint8_t hop_limit;
        /**
         * Flow label, 20 bits.
         */
        uint32_t flow_label;
        /**
         * GID of the other side.
         */
        uint8_t dgid[16];
} p2pmem_async_address_vector;

/**
 * A range of registered memory of this side.
 */
typedef struct p2pmem_async_segment {
        /**
         * Address, as in p2pmem_async_memory_info.
         */
        uint64_t address;
        /**
         * Length in bytes.
         */
        uint32_t bytes;
        /**
         * Local key.
         */
        uint32_t lkey;
} p2pmem_async_segment;

/**
 * A work request for the send queue. Set all fields to 0 first, then the needed ones.
 */
typedef struct p2pmem_async_send {
        /**
         * Id that the completion returns.
         */
        uint64_t id;
        /**
         * P2PMEM_ASYNC_REQUEST_*.
         */
        uint32_t operation;
        /**
         * P2PMEM_ASYNC_SEND_* bits.
         */
        uint32_t flags;
        /**
         * The payload: source of a SEND or WRITE, destination of a READ or atomic.
         */
        const struct p2pmem_async_segment *segments;
        /**
         * Number of segments.
         */
        size_t nr_segments;
        /**
         * The payload with P2PMEM_ASYNC_SEND_IS_INLINE.
         */
        const void *data;
        /**
         * Number of bytes at data.
         */
        size_t nr_bytes;
        /**
         * Address in memory of the other side, for WRITE, READ, and atomics. Atomics need a multiple of 8.
         */
        uint64_t remote_address;
        /**
         * Remote key of this memory.
         */
        uint32_t rkey;
        /**
         * Immediate data.
         */
        uint32_t immediate;
        /**
         * The expected value of a compare and swap.
         */
        uint64_t compare;
        /**
         * The new value of a compare and swap, or the number that a fetch and add adds.
         */
        uint64_t swap_or_add;
        /**
         * The receiver with P2PMEM_ASYNC_SEND_HAS_ADDRESS.
         */
        struct p2pmem_async_address_vector to;
} p2pmem_async_send;

/**
 * A completion of a work request.
 */
typedef struct p2pmem_async_completion {
        /**
         * Id of the work request.
         */
        uint64_t id;
        /**
         * Number of the queue pair.
         */
        uint32_t qpn;
        /**
         * P2PMEM_ASYNC_QUEUE_*.
         */
        uint32_t queue;
        /**
         * P2PMEM_ASYNC_COMPLETION_* bits.
         */
        uint32_t flags;
        /**
         * Bytes that were received or read.
         */
        uint32_t bytes;
        /**
         * Immediate data, with P2PMEM_ASYNC_COMPLETION_HAS_IMMEDIATE.
         */
        uint32_t immediate;
        /**
         * Number of the sender's queue pair, for a datagram.
         */
        uint32_t source_qpn;
        /**
         * LID of the sender, for a datagram.
         */
        uint16_t source_lid;
        /**
         * Cause of a failure: the NIC's number (MLX5_CQE_SYNDROME_* of Linux), else 0.
         */
        uint8_t syndrome;
        /**
         * The vendor's code of a failure, else 0.
         */
        uint8_t vendor;
        /**
         * 0.
         */
        uint32_t reserved;
} p2pmem_async_completion;

/**
 * An operation of a program. Values are little-endian in memory. Operations execute in order, and a poll ends before any
 * later operation starts. Stores may become visible to the NIC in any order unless a fence is between them.
 */
typedef struct p2pmem_async_operation {
        /**
         * P2PMEM_ASYNC_FENCE, P2PMEM_ASYNC_STORE_*, P2PMEM_ASYNC_COPY_BLOCK, or P2PMEM_ASYNC_POLL_*.
         */
        uint32_t kind;
        /**
         * Id of the region that the operation accesses; 0 for a fence.
         */
        uint32_t region;
        /**
         * Offset in the region in bytes, a multiple of 4; of 8 for P2PMEM_ASYNC_STORE_QWORD and P2PMEM_ASYNC_COPY_BLOCK.
         */
        uint64_t offset;
        /**
         * The value to store or to compare with. Operations of 4 bytes use the low half.
         */
        uint64_t value;
        /**
         * The bytes of P2PMEM_ASYNC_COPY_BLOCK, which the program owns; else NULL.
         */
        const void *data;
        /**
         * Number of bytes that the operation accesses; 0 for a fence.
         */
        size_t size;
} p2pmem_async_operation;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the version of the library, such as "0.1.0".
 */
const char *p2pmem_async_version(void);

/**
 * Returns the message of the calling thread's last failed call: the operation and the reason. Returns "" before the first
 * failure. The string is valid until the thread's next failed call.
 */
const char *p2pmem_async_last_error(void);

/**
 * Returns the remedy for the calling thread's last failure, or "" if none is known. The string is valid until the
 * thread's next failed call.
 */
const char *p2pmem_async_last_remedy(void);

/**
 * Opens the first active port of a NIC by the NIC's name, such as "mlx5_0", and creates a protection domain.
 *
 * Errors: -EINVAL, -ENODEV (no such NIC), -EIO (libibverbs is not installed or failed, the kernel is without RDMA, or no
 * port is active).
 *
 * # Safety
 *
 * nic must be a string, out valid.
 */
int p2pmem_async_port_open(const char *nic,
                           struct p2pmem_async_port **out);

/**
 * Closes the port. Endpoints and memory that are not freed yet keep the NIC open. NULL is allowed.
 *
 * # Safety
 *
 * port must be NULL, or open and not in use.
 */
void p2pmem_async_port_close(struct p2pmem_async_port *port);

/**
 * Allocates at least size bytes for payload, in whole pages, and registers them for all kinds of access. place:
 * P2PMEM_ASYNC_MEMORY_*.
 *
 * Errors: -EINVAL, -ENOMEM, -EIO (libibverbs refused the registration: the message has the reason). For an accelerator
 * also those of p2pmem_open(), p2pmem_alloc(), and p2pmem_register() of p2pmem.h.
 *
 * # Safety
 *
 * port must be open, out valid.
 */
int p2pmem_async_memory_alloc(const struct p2pmem_async_port *port,
                              uint32_t place,
                              size_t size,
                              struct p2pmem_async_memory **out);

/**
 * Ends the registration and frees the memory. Interpreters that map the memory keep it mapped. NULL is allowed.
 *
 * # Safety
 *
 * memory must be NULL, or memory that neither the program, nor a peer, nor an outstanding work request uses.
 */
void p2pmem_async_memory_free(struct p2pmem_async_memory *memory);

/**
 * Writes address, length, keys, and BAR offset of the memory to out. If the memory's provider is removed, accesses of the
 * CPU raise SIGBUS.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * memory must be allocated, out valid.
 */
int p2pmem_async_memory_query(const struct p2pmem_async_memory *memory,
                              struct p2pmem_async_memory_info *out);

/**
 * Makes earlier writes of the CPU to the memory visible to devices before any later write. Call it after the payload was
 * written, and before the byte code is executed.
 *
 * Errors: -EINVAL (memory is NULL).
 *
 * # Safety
 *
 * memory must be allocated.
 */
int p2pmem_async_memory_flush(const struct p2pmem_async_memory *memory);

/**
 * Creates an endpoint for a peer. Receives can be posted before p2pmem_async_connect().
 *
 * Errors: -EINVAL (an invalid option, datagrams on Ethernet, or a NIC that is not an mlx5 NIC), -ENOMEM,
 * -EPROTONOSUPPORT (queues in an accelerator need Linux 7.2), -EPERM (the administrator does not allow pinned exports for
 * the provider), and others of the kernel and of p2pmem_alloc() of p2pmem.h.
 *
 * # Safety
 *
 * port must be open, options valid, its name of the peer NULL or a string, out valid.
 */
int p2pmem_async_endpoint_create(const struct p2pmem_async_port *port,
                                 const struct p2pmem_async_endpoint_options *options,
                                 struct p2pmem_async_endpoint **out);

/**
 * Destroys the NIC's queues. Stop the peer before. Interpreters that map the endpoint, and programs of
 * p2pmem_async_peek_cq(), keep the queues' memory mapped. NULL is allowed.
 *
 * # Safety
 *
 * endpoint must be NULL, or an endpoint that neither the program nor a peer uses.
 */
void p2pmem_async_endpoint_free(struct p2pmem_async_endpoint *endpoint);

/**
 * Writes the address of the endpoint to out. The program sends it to the other side.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * endpoint must be an endpoint, out valid.
 */
int p2pmem_async_endpoint_address(const struct p2pmem_async_endpoint *endpoint,
                                  struct p2pmem_async_address *out);

/**
 * Makes the endpoint ready to send and receive. other is the address of the other side; datagrams do not use it, and it can
 * be NULL for them.
 *
 * Errors: -EINVAL (the endpoint is connected already, or a reliable connection without other), -EIO (the NIC was removed),
 * and others of the kernel.
 *
 * # Safety
 *
 * endpoint must be an endpoint, other NULL or valid.
 */
int p2pmem_async_connect(const struct p2pmem_async_endpoint *endpoint,
                         const struct p2pmem_async_address *other);

/**
 * Writes the address vector of the other side to out, for datagrams to it: to of p2pmem_async_send.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * endpoint must be an endpoint, other and out valid.
 */
int p2pmem_async_endpoint_address_vector(const struct p2pmem_async_endpoint *endpoint,
                                         const struct p2pmem_async_address *other,
                                         struct p2pmem_async_address_vector *out);

/**
 * Writes at most capacity regions to out: those that the endpoint's byte code names. Returns the number of all regions,
 * which can be larger.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * endpoint must be an endpoint, out valid for capacity elements (NULL if capacity is 0).
 */
int p2pmem_async_endpoint_regions(const struct p2pmem_async_endpoint *endpoint,
                                  struct p2pmem_async_region *out,
                                  size_t capacity);

/**
 * Exports the doorbell page as a dma-buf, by which another device rings. Returns the descriptor, which is close-on-exec and
 * which the caller closes. The importer must accept revocable dma-bufs. An importer can make the NIC read the send queue at
 * any time.
 *
 * Errors: -EINVAL, -EPROTONOSUPPORT or -EOPNOTSUPP (before Linux 7.2), -EMFILE.
 *
 * # Safety
 *
 * endpoint must be an endpoint.
 */
int p2pmem_async_export_doorbell(const struct p2pmem_async_endpoint *endpoint);

/**
 * Puts the queue pair into the error state: the NIC flushes its work requests, and posts and commits are refused. Use it if
 * the peer died in the middle of a program. why is a text for later error messages.
 *
 * Errors: -EINVAL, -EIO (the NIC was removed).
 *
 * # Safety
 *
 * endpoint must be an endpoint, why a string.
 */
int p2pmem_async_fail(const struct p2pmem_async_endpoint *endpoint,
                      const char *why);

/**
 * Queries the state of the queue pair from the NIC, P2PMEM_ASYNC_STATE_*. In an error state, posts and commits are refused
 * from now on, also if no completion has reported a failure.
 *
 * Errors: -EINVAL, -EIO (the NIC was removed).
 *
 * # Safety
 *
 * endpoint must be an endpoint.
 */
int p2pmem_async_refresh(const struct p2pmem_async_endpoint *endpoint);

/**
 * Writes a work request to the send queue, without ringing the doorbell. The NIC executes it after the byte code of the
 * next p2pmem_async_commit_qp() has been executed. After an error, nothing was posted.
 *
 * Errors: -EINVAL (an invalid work request), -ENOBUFS (the send queue or its completion queue is full: consume completions
 * with p2pmem_async_poll_cq()), -ESHUTDOWN (the queue pair is in the error state).
 *
 * # Safety
 *
 * endpoint must be an endpoint, send valid, its segments and data valid for their numbers of elements.
 */
int p2pmem_async_post_send(const struct p2pmem_async_endpoint *endpoint,
                           const struct p2pmem_async_send *send);

/**
 * Writes a work request to the receive queue, for one message. It is valid at once. Datagrams place 40 bytes of route
 * before the payload. At most 4 segments are possible.
 *
 * Errors: those of p2pmem_async_post_send().
 *
 * # Safety
 *
 * endpoint must be an endpoint, segments valid for nr_segments elements.
 */
int p2pmem_async_post_recv(const struct p2pmem_async_endpoint *endpoint,
                           uint64_t id,
                           const struct p2pmem_async_segment *segments,
                           size_t nr_segments);

/**
 * Returns in out the byte code that submits all work requests which p2pmem_async_post_send() has posted. If nothing was
 * posted since the last commit, the program has no operation. Programs of an endpoint must be executed in the order of
 * their commits, each once.
 *
 * Errors: -EINVAL, -EOPNOTSUPP (the peer has not the capabilities), -E2BIG (the program exceeds max_operations of the
 * peer), -ESHUTDOWN (the queue pair is in the error state). After an error, the work requests stay posted.
 *
 * # Safety
 *
 * endpoint must be an endpoint, out valid.
 */
int p2pmem_async_commit_qp(const struct p2pmem_async_endpoint *endpoint,
                           struct p2pmem_async_program **out);

/**
 * Takes back all work requests that were posted to the send queue after the last commit. Writes at most capacity of their
 * ids to ids. Returns the number of all that were taken back, which can be larger.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * endpoint must be an endpoint, ids valid for capacity elements (NULL if capacity is 0).
 */
int p2pmem_async_rollback_qp(const struct p2pmem_async_endpoint *endpoint,
                             uint64_t *ids,
                             size_t capacity);

/**
 * Returns in out the byte code that waits for the next nr completions of a queue, P2PMEM_ASYNC_QUEUE_*: those after all
 * earlier peeks, and after all completions that p2pmem_async_poll_cq() has returned. The byte code also ends if these
 * completions are failures. It is executed once. A peek that will not be executed must be aborted: until then, the NIC
 * cannot reuse the entries of the queue.
 *
 * Errors: -EINVAL, -EAGAIN (the queue has not enough entries, or too many peeks have not ended), -EOPNOTSUPP or -E2BIG (the
 * peer cannot execute the byte code).
 *
 * # Safety
 *
 * endpoint must be an endpoint, out valid.
 */
int p2pmem_async_peek_cq(const struct p2pmem_async_endpoint *endpoint,
                         uint32_t queue,
                         uint32_t nr,
                         struct p2pmem_async_program **out);

/**
 * Takes back a peek whose byte code will not be executed, for example because the peer died. program is the program of
 * p2pmem_async_peek_cq(), which the caller still frees. Returns 1, or 0 if the peek has ended or was aborted already.
 *
 * Errors: -EINVAL (also if the program is not of p2pmem_async_peek_cq()).
 *
 * # Safety
 *
 * program must be a program.
 */
int p2pmem_async_abort_peek_cq(const struct p2pmem_async_program *program);

/**
 * Consumes completions of a queue, P2PMEM_ASYNC_QUEUE_*, and writes at most capacity of them to out. Returns their number,
 * 0 if there are none. Completions may be consumed before or after the peer has seen them.
 *
 * Errors: -EINVAL, -EBADMSG (a completion belongs to no work request; it was consumed).
 *
 * # Safety
 *
 * endpoint must be an endpoint, out valid for capacity elements (NULL if capacity is 0).
 */
int p2pmem_async_poll_cq(const struct p2pmem_async_endpoint *endpoint,
                         uint32_t queue,
                         struct p2pmem_async_completion *out,
                         size_t capacity);

/**
 * Writes the result of a completion as text: "success", or the cause of the failure. Writes at most capacity bytes to text,
 * including the NUL, and returns the length of the whole text in bytes without the NUL, as snprintf() does.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * completion must be valid, text valid for capacity bytes (NULL if capacity is 0).
 */
int p2pmem_async_completion_text(const struct p2pmem_async_completion *completion,
                                 char *text,
                                 size_t capacity);

/**
 * Returns in out byte code that waits until the counter in 4 bytes of payload memory has reached value: until
 * (int32_t)(memory - value) >= 0. offset is in bytes from the start of the memory, a multiple of 4.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * memory must be allocated, out valid.
 */
int p2pmem_async_wait_for(const struct p2pmem_async_memory *memory,
                          uint64_t offset,
                          uint32_t value,
                          struct p2pmem_async_program **out);

/**
 * Frees a program. A peek that has not ended is not aborted. NULL is allowed.
 *
 * # Safety
 *
 * program must be NULL, or a program that is not in use, also not by pointers of p2pmem_async_operation.
 */
void p2pmem_async_program_free(struct p2pmem_async_program *program);

/**
 * Adds the operations of other to the end of program, so that an executor needs one program. other stays as it is: the
 * caller still frees it, and aborts its peek with it. The capabilities and max_operations of the peer are not checked
 * again.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * program and other must be programs. program must not be in use, also not by pointers of p2pmem_async_operation.
 */
int p2pmem_async_program_append(struct p2pmem_async_program *program,
                                const struct p2pmem_async_program *other);

/**
 * Returns the number of operations of a program; 0 for NULL.
 *
 * # Safety
 *
 * program must be NULL or a program.
 */
size_t p2pmem_async_program_length(const struct p2pmem_async_program *program);

/**
 * Returns the P2PMEM_ASYNC_CAN_* bits that an executor needs for a program; 0 for NULL.
 *
 * # Safety
 *
 * program must be NULL or a program.
 */
uint32_t p2pmem_async_program_required(const struct p2pmem_async_program *program);

/**
 * Writes the operation with this index, from 0 on, to out. Its data is valid until the program is freed or changed.
 *
 * Errors: -EINVAL (also if the program has no such operation), -EOPNOTSUPP (this library does not know the operation).
 *
 * # Safety
 *
 * program must be a program, out valid.
 */
int p2pmem_async_program_operation(const struct p2pmem_async_program *program,
                                   size_t index,
                                   struct p2pmem_async_operation *out);

/**
 * Writes the program as text for people, one operation a line. Writes at most capacity bytes to text, including the NUL,
 * and returns the length of the whole text in bytes without the NUL, as snprintf() does.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * program must be a program, text valid for capacity bytes (NULL if capacity is 0).
 */
int p2pmem_async_program_explain(const struct p2pmem_async_program *program,
                                 char *text,
                                 size_t capacity);

/**
 * Creates an executor on the CPU without regions. A program that runs longer than limit_us microseconds ends with an
 * error. Each poll reads memory at least once.
 *
 * Errors: -EINVAL (out is NULL).
 *
 * # Safety
 *
 * out must be valid.
 */
int p2pmem_async_interpreter_create(uint64_t limit_us,
                                    struct p2pmem_async_interpreter **out);

/**
 * Frees an interpreter. NULL is allowed.
 *
 * # Safety
 *
 * interpreter must be NULL, or an interpreter that is not in use.
 */
void p2pmem_async_interpreter_free(struct p2pmem_async_interpreter *interpreter);

/**
 * Maps the regions of an endpoint, so that programs of this endpoint can be executed. Waits until running programs have
 * ended.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * interpreter must be an interpreter, endpoint an endpoint.
 */
int p2pmem_async_interpreter_map_endpoint(const struct p2pmem_async_interpreter *interpreter,
                                          const struct p2pmem_async_endpoint *endpoint);

/**
 * Maps payload memory, so that programs of p2pmem_async_wait_for() can be executed. Waits until running programs have
 * ended.
 *
 * Errors: -EINVAL.
 *
 * # Safety
 *
 * interpreter must be an interpreter, memory allocated.
 */
int p2pmem_async_interpreter_map_memory(const struct p2pmem_async_interpreter *interpreter,
                                        const struct p2pmem_async_memory *memory);

/**
 * Executes a program on the CPU. If it fails, failed_index receives the index of the operation that failed, and the message
 * names it; the operations before it have been executed. failed_index can be NULL.
 *
 * Errors: -EINVAL, -ETIMEDOUT (the poll at failed_index did not come true in time), -EFAULT (the operation at failed_index
 * is in a region that is not mapped, or outside of its region).
 *
 * # Safety
 *
 * interpreter must be an interpreter, program a program, failed_index NULL or valid.
 */
int p2pmem_async_interpreter_run(const struct p2pmem_async_interpreter *interpreter,
                                 const struct p2pmem_async_program *program,
                                 size_t *failed_index);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* P2PMEM_ASYNC_H */
