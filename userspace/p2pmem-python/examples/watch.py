#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Prints events in the event loop of asyncio, and the providers after each event.

    watch.py [COUNT]        ends after so many events; without COUNT, waits for the next one until Ctrl-C
"""

import asyncio
import sys

import p2pmem


async def watch(device: p2pmem.Device, count: "int | None") -> None:
    """Prints ``count`` events, or all."""
    events = device.events()
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(events.fileno(), ready.set)
    seen = 0
    while seen != count:
        await ready.wait()
        ready.clear()
        while seen != count and (event := events.poll()) is not None:
            providers = ", ".join(provider.addr for provider in device.providers())
            print(f"{event}; providers now: {providers or 'none'}", flush=True)
            seen += 1


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else None
    with p2pmem.Device() as device:
        print("watching", flush=True)
        asyncio.run(watch(device, count))


if __name__ == "__main__":
    try:
        main()
    except p2pmem.Error as error:
        sys.exit(f"{error}\n{error.remedy or ''}".strip())
