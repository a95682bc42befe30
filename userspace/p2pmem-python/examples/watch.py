#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Prints events in the event loop of asyncio, and the providers after each event.

    watch.py [SECONDS]      ends when no event came for so long; waits without a limit by default
"""

import asyncio
import sys

import p2pmem


async def watch(device: p2pmem.Device, patience: "float | None") -> None:
    events = device.events()
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(events.fileno(), ready.set)
    while True:
        try:
            await asyncio.wait_for(ready.wait(), patience)
        except asyncio.TimeoutError:
            return
        ready.clear()
        while (event := events.poll()) is not None:
            providers = ", ".join(provider.addr for provider in device.providers())
            print(f"{event}; providers now: {providers or 'none'}", flush=True)


def main() -> None:
    patience = float(sys.argv[1]) if len(sys.argv) > 1 else None
    with p2pmem.Device() as device:
        print("watching", flush=True)
        asyncio.run(watch(device, patience))


if __name__ == "__main__":
    try:
        main()
    except p2pmem.Error as error:
        sys.exit(f"{error}\n{error.remedy or ''}".strip())
