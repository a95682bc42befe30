/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The message that the programs of this folder move, of SIZE bytes in transfers of CHUNK bytes. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define SIZE ((size_t)4 << 20)
#define CHUNK ((size_t)1 << 20)

/* Returns the bytes that word `i` of the message has. */
static uint64_t pattern(size_t i)
{
	return (i + 1) * 0x9e3779b97f4a7c15u;
}

static void fill(volatile uint64_t *words, int with_pattern)
{
	for (size_t i = 0; i < SIZE / sizeof(*words); i++)
		words[i] = with_pattern ? pattern(i) : 0;
	/* A read from the device completes earlier writes to it. */
	(void)words[0];
}

/* Ends the program unless `words` has the message. `whose` names the memory for the error. */
static void verify(const char *program, const volatile uint64_t *words, const char *whose)
{
	for (size_t i = 0; i < SIZE / sizeof(*words); i++) {
		if (words[i] != pattern(i)) {
			fprintf(stderr, "%s: word %zu of %s is wrong\n", program, i, whose);
			exit(2);
		}
	}
}
