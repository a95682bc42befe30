/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Sends 8 bytes between two endpoints of one NIC by byte code. The CPU executes the byte code here. The driver of a device
 * translates the same operations to its device instead, as print_operations() does for people.
 *
 *   cc -o interpret interpret.c $(pkg-config --cflags --libs p2pmem-async)
 *   ./interpret NIC [PAYLOAD [QUEUES [TRANSPORT]]]
 *
 * PAYLOAD and QUEUES are host or accelerator, TRANSPORT is rc or ud. The defaults are host, host, and rc.
 */

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <p2pmem-async.h>

#define MESSAGE 0x0807060504030201u
#define INBOX 64 /* offset of the received message in the memory */
#define ROUTE 40 /* bytes of route before a datagram */
#define LIMIT_US 10000000
#define MAX_REGIONS 8

static uint32_t payload_place, queue_place, transport;

static int fail(const char *what)
{
	const char *remedy = p2pmem_async_last_remedy();

	fprintf(stderr, "%s: %s\n", what, p2pmem_async_last_error());
	if (*remedy)
		fprintf(stderr, "  -> %s\n", remedy);
	return 1;
}

static void print_region(const p2pmem_async_region *region)
{
	printf("region %" PRIu32 ": kind %" PRIu32 ", %zu bytes", region->id, region->kind, region->size);
	if (region->bar_offset != UINT64_MAX)
		printf(" at %#" PRIx64 " of the accelerator's BAR", region->bar_offset);
	printf("\n");
}

/* A device that executes byte code maps these regions to its own addresses. */
static int print_regions(const p2pmem_async_endpoint *endpoint)
{
	p2pmem_async_region regions[MAX_REGIONS];
	int there = p2pmem_async_endpoint_regions(endpoint, regions, MAX_REGIONS);

	if (there < 0)
		return fail("regions");
	for (int i = 0; i < there && i < MAX_REGIONS; i++)
		print_region(&regions[i]);
	return 0;
}

static int print_operations(const p2pmem_async_program *program)
{
	char text[4096];

	for (size_t i = 0; i < p2pmem_async_program_length(program); i++) {
		p2pmem_async_operation operation;

		if (p2pmem_async_program_operation(program, i, &operation))
			return fail("operation");
		printf("operation %zu: kind %" PRIu32 ", %zu bytes at %#" PRIx64 " of region %" PRIu32 ", value %#" PRIx64 "\n", i,
		       operation.kind, operation.size, operation.offset, operation.region, operation.value);
	}
	if (p2pmem_async_program_explain(program, text, sizeof(text)) < 0)
		return fail("explain");
	printf("%s", text);
	return 0;
}

/* Creates an endpoint for the CPU. */
static p2pmem_async_endpoint *create(const p2pmem_async_port *port)
{
	p2pmem_async_endpoint_options options;
	p2pmem_async_endpoint *endpoint;

	memset(&options, 0, sizeof(options));
	options.peer = "cpu";
	options.capabilities = P2PMEM_ASYNC_CAN_ALL;
	options.transport = transport;
	options.queues = queue_place;
	if (!p2pmem_async_endpoint_create(port, &options, &endpoint))
		return endpoint;
	fail("endpoint");
	return NULL;
}

static int connect_both(const p2pmem_async_endpoint *a, const p2pmem_async_endpoint *b)
{
	p2pmem_async_address address_a, address_b;

	/* Two machines exchange the addresses by a socket. */
	if (p2pmem_async_endpoint_address(a, &address_a) || p2pmem_async_endpoint_address(b, &address_b))
		return fail("address");
	if (p2pmem_async_connect(a, &address_b) || p2pmem_async_connect(b, &address_a))
		return fail("connect");
	return 0;
}

/* Consumes one completion, which the byte code has waited for. */
static int consume(const p2pmem_async_endpoint *endpoint, uint32_t queue, uint64_t id)
{
	p2pmem_async_completion completion;
	char why[128];
	int got = p2pmem_async_poll_cq(endpoint, queue, &completion, 1);

	if (got < 0)
		return fail("poll_cq");
	if (!got || completion.id != id || completion.flags & P2PMEM_ASYNC_COMPLETION_IS_FAILURE) {
		if (got)
			p2pmem_async_completion_text(&completion, why, sizeof(why));
		fprintf(stderr, "work request %" PRIu64 ": %s\n", id, got ? why : "no completion");
		return 1;
	}
	return 0;
}

/* Exports the doorbell page, which another device maps to ring. */
static int export_doorbell(const p2pmem_async_endpoint *endpoint)
{
	int fd = p2pmem_async_export_doorbell(endpoint);

	if (fd >= 0) {
		printf("the doorbell page was exported as a dma-buf\n");
		close(fd);
	} else if (fd == -EPROTONOSUPPORT || fd == -EOPNOTSUPP) {
		printf("only the CPU can ring: %s\n", p2pmem_async_last_error());
	} else {
		return fail("export");
	}
	return 0;
}

/* Sets the receiver of a datagram. */
static int address_to(p2pmem_async_send *send, const p2pmem_async_endpoint *a, const p2pmem_async_endpoint *b)
{
	p2pmem_async_address other;

	if (p2pmem_async_endpoint_address(b, &other) || p2pmem_async_endpoint_address_vector(a, &other, &send->to))
		return fail("address vector");
	send->flags |= P2PMEM_ASYNC_SEND_HAS_ADDRESS;
	return 0;
}

/* Posts a message from a to b. Returns the byte code that sends it, and waits for both completions; NULL after an error. */
static p2pmem_async_program *send_message(const p2pmem_async_endpoint *a, const p2pmem_async_endpoint *b,
					  const p2pmem_async_memory_info *info)
{
	p2pmem_async_segment from = { .address = info->address, .bytes = 8, .lkey = info->lkey };
	p2pmem_async_segment to = { .address = info->address + INBOX - ROUTE, .bytes = ROUTE + 8, .lkey = info->lkey };
	p2pmem_async_program *program, *sent, *received;
	p2pmem_async_send send;

	memset(&send, 0, sizeof(send));
	send.id = 1;
	send.operation = P2PMEM_ASYNC_REQUEST_SEND;
	send.flags = P2PMEM_ASYNC_SEND_IS_SIGNALED;
	send.segments = &from;
	send.nr_segments = 1;
	if (transport == P2PMEM_ASYNC_TRANSPORT_RC)
		to = (p2pmem_async_segment){ .address = info->address + INBOX, .bytes = 8, .lkey = info->lkey };
	else if (address_to(&send, a, b))
		return NULL;
	if (p2pmem_async_post_recv(b, 2, &to, 1) || p2pmem_async_post_send(a, &send) || p2pmem_async_commit_qp(a, &program) ||
	    p2pmem_async_peek_cq(a, P2PMEM_ASYNC_QUEUE_SEND, 1, &sent) ||
	    p2pmem_async_peek_cq(b, P2PMEM_ASYNC_QUEUE_RECEIVE, 1, &received) || p2pmem_async_program_append(program, sent) ||
	    p2pmem_async_program_append(program, received)) {
		fail("send");
		return NULL;
	}
	p2pmem_async_program_free(sent);
	p2pmem_async_program_free(received);
	return program;
}

/* Waits for a message that nothing sends: the execution ends at the time limit, and the peek is aborted. */
static int wait_in_vain(const p2pmem_async_endpoint *endpoint)
{
	p2pmem_async_interpreter *impatient;
	p2pmem_async_program *peek;
	size_t index = SIZE_MAX;
	int ret;

	if (p2pmem_async_peek_cq(endpoint, P2PMEM_ASYNC_QUEUE_RECEIVE, 1, &peek) ||
	    p2pmem_async_interpreter_create(0, &impatient) || p2pmem_async_interpreter_map_endpoint(impatient, endpoint))
		return fail("peek");
	ret = p2pmem_async_interpreter_run(impatient, peek, &index);
	printf("without a message: %s\n", p2pmem_async_last_error());
	if (ret != -ETIMEDOUT || index != 0 || p2pmem_async_abort_peek_cq(peek) != 1) {
		fprintf(stderr, "a wait in vain returned %d at operation %zu\n", ret, index);
		return 1;
	}
	p2pmem_async_interpreter_free(impatient);
	p2pmem_async_program_free(peek);
	return 0;
}

static int run(const p2pmem_async_port *port)
{
	p2pmem_async_interpreter *interpreter;
	p2pmem_async_endpoint *a, *b;
	p2pmem_async_memory_info info;
	p2pmem_async_memory *memory;
	p2pmem_async_program *program;
	volatile uint64_t *outbox, *inbox;

	if (p2pmem_async_memory_alloc(port, payload_place, 4096, &memory) || p2pmem_async_memory_query(memory, &info))
		return fail("memory");
	print_region(&info.region);
	outbox = info.region.cpu_address;
	inbox = outbox + INBOX / sizeof(*inbox);
	a = create(port);
	b = create(port);
	if (!a || !b || connect_both(a, b) || print_regions(a) || print_regions(b) || export_doorbell(a))
		return 1;
	*outbox = MESSAGE;
	*inbox = 0;
	p2pmem_async_memory_flush(memory);
	program = send_message(a, b, &info);
	if (!program || print_operations(program))
		return 1;
	if (p2pmem_async_interpreter_create(LIMIT_US, &interpreter) || p2pmem_async_interpreter_map_endpoint(interpreter, a) ||
	    p2pmem_async_interpreter_map_endpoint(interpreter, b) || p2pmem_async_interpreter_run(interpreter, program, NULL))
		return fail("execute");
	if (consume(a, P2PMEM_ASYNC_QUEUE_SEND, 1) || consume(b, P2PMEM_ASYNC_QUEUE_RECEIVE, 2))
		return 1;
	if (*inbox != MESSAGE) {
		fprintf(stderr, "the message is %#" PRIx64 ", not %#" PRIx64 "\n", *inbox, (uint64_t)MESSAGE);
		return 1;
	}
	printf("8 bytes were sent by %zu operations\n", p2pmem_async_program_length(program));
	if (wait_in_vain(b))
		return 1;
	p2pmem_async_program_free(program);
	p2pmem_async_interpreter_free(interpreter);
	p2pmem_async_endpoint_free(a);
	p2pmem_async_endpoint_free(b);
	p2pmem_async_memory_free(memory);
	return 0;
}

static uint32_t place(int argc, char **argv, int at)
{
	return argc > at && !strcmp(argv[at], "accelerator") ? P2PMEM_ASYNC_MEMORY_ACCELERATOR : P2PMEM_ASYNC_MEMORY_HOST;
}

int main(int argc, char **argv)
{
	p2pmem_async_port *port;
	int ret;

	if (argc < 2) {
		fprintf(stderr, "usage: interpret NIC [host|accelerator [host|accelerator [rc|ud]]]\n");
		return 2;
	}
	payload_place = place(argc, argv, 2);
	queue_place = place(argc, argv, 3);
	transport = argc > 4 && !strcmp(argv[4], "ud") ? P2PMEM_ASYNC_TRANSPORT_UD : P2PMEM_ASYNC_TRANSPORT_RC;
	if (p2pmem_async_port_open(argv[1], &port))
		return fail(argv[1]);
	ret = run(port);
	p2pmem_async_port_close(port);
	return ret;
}
