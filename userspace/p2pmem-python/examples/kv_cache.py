#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Disaggregated inference: one node computes prompts, another one continues them. The cache of keys and values goes from the memory of
one node's accelerator to that of the other one, by Mooncake's transfer engine or by NIXL.

    b# LD_PRELOAD=libp2pmem_preload.so ./kv_cache.py decode --nic mlx5_0 --address 10.0.0.2
    a# LD_PRELOAD=libp2pmem_preload.so ./kv_cache.py prefill --nic mlx5_0 --address 10.0.0.1 --server 10.0.0.2 --verify
    a# ./kv_cache.py single

The model is small and not trained, and the processor computes it: what counts here is where the cache is, how it moves, and who may
write where. Both nodes need the same --engine, --path and dimensions. Exit codes: 0 success, 1 failure or other tokens than one node
computes, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from kv import control

# Other modules are imported when this node listens: the import of NumPy and of an engine takes a while, on both nodes at the same time.
if TYPE_CHECKING:
    from kv.cache import Pool
    from kv.engines import Engine
    from kv.model import Shape
    from kv.prefill import Report, Work


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    shape = argparse.ArgumentParser(add_help=False)
    shape.add_argument("--layers", type=int, default=4, help="layers of the model (default: 4)")
    shape.add_argument("--width", type=int, default=128, help="numbers that represent a token (default: 128)")
    shape.add_argument("--block", type=int, default=16, help="tokens of a block of the cache (default: 16)")

    work = argparse.ArgumentParser(add_help=False)
    work.add_argument("--requests", type=int, default=1, help="number of prompts (default: 1)")
    work.add_argument("--prompt-tokens", type=int, default=257, help="tokens of each prompt (default: 257)")
    work.add_argument("--new-tokens", type=int, default=16, help="tokens that continue each prompt (default: 16)")
    work.add_argument("--json", action="store_true", help="print a report for programs")

    node = argparse.ArgumentParser(add_help=False)
    node.add_argument("--nic", default="mlx5_0", help="RDMA device of this node, which is near the cache (default: mlx5_0)")
    node.add_argument("--address", required=True, help="IP address of this node")
    node.add_argument("--port", type=int, default=18532, help="TCP port of the node that decodes (default: 18532)")
    node.add_argument("--engine", choices=["mooncake", "nixl"], default="mooncake", help="what moves the cache (default: mooncake)")
    node.add_argument("--path", choices=["direct", "staged"], default="direct",
                      help="between accelerators, or through host memory of both nodes (default: direct)")
    node.add_argument("--timeout", type=float, default=60, metavar="SECONDS",
                      help="longest wait for the other node, and longest transfer (default: 60)")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    roles = parser.add_subparsers(dest="role", required=True)
    single = roles.add_parser("single", parents=[shape, work], help="compute everything on this node")
    single.add_argument("--near", metavar="CLIENT", help="keep the cache in memory near this device; the default is host memory")
    prefill = roles.add_parser("prefill", parents=[shape, work, node], help="compute prompts for a node that decodes")
    prefill.add_argument("--server", required=True, metavar="ADDRESS", help="the node that decodes")
    prefill.add_argument("--chunk", type=int, default=4, metavar="BLOCKS", help="most blocks of a transfer (default: 4)")
    prefill.add_argument("--verify", action="store_true",
                         help="compute the same on this node alone, and compare tokens and blocks; check that nobody writes to blocks "
                         "that are not granted")
    decode = roles.add_parser("decode", parents=[shape, node], help="continue the prompts of a node that prefills")
    decode.add_argument("--blocks", type=int, help="blocks of the cache on this node; the default is enough for all requests")
    decode.add_argument("--evict", metavar="FILE", help="keep the blocks of complete prompts on a drive until all prompts are there: a file "
                        "or a block device, which is overwritten")
    decode.add_argument("--slow", action="store_true", help="begin to decode when the other node waits for blocks, or has nothing to do")
    options = parser.parse_args()
    for name in ("chunk", "blocks", "timeout"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name} is at least 1")
    return options


def shape_of(options: argparse.Namespace) -> Shape:
    from kv.model import Shape

    return Shape(options.layers, options.width, options.block)


def work_of(options: argparse.Namespace) -> Work:
    from kv.prefill import Work

    return Work(options.requests, options.prompt_tokens, options.new_tokens)


def start(stack: contextlib.ExitStack, options: argparse.Namespace, blocks: int, guarded: bool) -> tuple[Pool, Engine]:
    """Allocates a pool near the NIC, and registers what the NIC accesses with the engine."""
    import p2pmem
    from kv.cache import Pool
    from kv.engines import ENGINES

    shape = shape_of(options)
    device = stack.enter_context(p2pmem.Device())
    buffer = stack.enter_context(device.alloc(Pool.bytes(shape, blocks), near=options.nic))
    pool = Pool(shape, buffer, blocks, staged=options.path == "staged", guarded=guarded)
    engine: Engine = ENGINES[options.engine](options.nic, options.address, options.timeout)
    engine.register(pool.window)
    return pool, engine


def run_single(options: argparse.Namespace) -> int:
    import p2pmem
    from kv.cache import Pool
    from kv.model import Model
    from kv.prefill import compute_alone

    shape, work = shape_of(options), work_of(options)
    blocks = work.all_blocks(shape)
    with contextlib.ExitStack() as stack:
        pool = None
        if options.near:
            device = stack.enter_context(p2pmem.Device())
            pool = Pool(shape, stack.enter_context(device.alloc(Pool.bytes(shape, blocks), near=options.near)), blocks)
        show(options, compute_alone(Model(shape), work, pool), None)
    return 0


def run_prefill(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(control.Channel.connect(options.server, options.port, options.timeout))
        with report_failure(channel):
            from kv.model import Model
            from kv.prefill import Prefiller, compute_alone

            shape, work = shape_of(options), work_of(options)
            pool, engine = start(stack, options, work.prompt_blocks(shape), False)
            channel.send(
                "hello", version=control.VERSION, engine=options.engine, path=options.path, **dataclasses.asdict(shape),
                requests=work.requests, prompt=work.prompt, new=work.new, verify=options.verify, node=engine.node(),
            )
            welcome = channel.receive("welcome")
            engine.connect(welcome["node"])
            model = Model(shape)
            report = Prefiller(channel, engine, model, pool, welcome, work, options.chunk, verify=options.verify).run()
        channel.close()
        engine.close()
        same = None
        if options.verify:
            same = report.tokens == compute_alone(model, work).tokens
        show(options, report, same)
        return 1 if same is False else 0


def run_decode(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        with control.listen(options.port) as server:
            from kv.cache import Drive
            from kv.decode import Decoder
            from kv.model import Model
            from kv.prefill import Work

            shape = shape_of(options)
            channel = stack.enter_context(control.Channel.accept(server, options.timeout))
        with report_failure(channel):
            hello = channel.receive("hello")
            compare(hello, {"engine": options.engine, "path": options.path, **dataclasses.asdict(shape)})
            work = Work(hello["requests"], hello["prompt"], hello["new"])
            blocks = options.blocks or work.requests * work.all_blocks(shape)
            pool, engine = start(stack, options, blocks, hello["verify"])
            engine.connect(hello["node"])
            drive = stack.enter_context(Drive(options.evict, pool)) if options.evict else None
            decoder = Decoder(channel, Model(shape), pool, work, drive=drive, slow=options.slow, verify=hello["verify"])
            channel.send(
                "welcome", version=control.VERSION, address=pool.window.address, blocks=blocks, node=engine.node()
            )
            decoder.run()
        channel.close()
        engine.close()
    print(f"decoded {work.requests} requests", flush=True)
    return 0


@contextlib.contextmanager
def report_failure(channel: control.Channel) -> Any:
    """Sends the other node the reason if this one fails."""
    try:
        yield
    except control.PeerError:
        raise
    except Exception as error:
        with contextlib.suppress(control.PeerError):
            channel.send("error", message=str(error))
        raise


def compare(hello: control.Message, ours: dict[str, Any]) -> None:
    """Raises ValueError if the nodes have different options."""
    different = [f"--{name} {hello[name]} and {value}" for name, value in ours.items() if hello[name] != value]
    if different:
        raise ValueError(f"the nodes were started with different options: {', '.join(different)}")


def show(options: argparse.Namespace, report: Report, same: bool | None) -> None:
    """Prints the report."""
    where = (options.engine, options.path) if options.role == "prefill" else ("one node", None)
    milliseconds = [round(seconds * 1e3, 3) for seconds in report.first_token]
    if options.json:
        values = {"engine": where[0], "path": where[1], **dataclasses.asdict(report), "tokens_equal": same}
        print(json.dumps(values), flush=True)
        return
    print(f"{' '.join(filter(None, where))}: {options.requests} prompts of {options.prompt_tokens} tokens")
    for request, tokens in enumerate(report.tokens):
        print(f"request {request}: first token after {milliseconds[request]:.1f} ms: {' '.join(map(str, tokens))}")
    if options.role == "prefill":
        print(f"computed for {report.computing * 1e3:.1f} ms, moved blocks for {report.moving * 1e3:.1f} ms, waited for blocks "
              f"{report.waits} times, {report.waiting * 1e3:.1f} ms")
        print(f"{report.moved} bytes of the cache moved, the processors copied {report.copied}; {report.stored} bytes went to the drive, "
              f"{report.loaded} came back")
    if same is not None:
        print("the tokens are those of one node" if same else "the tokens are not those of one node")
    sys.stdout.flush()


def main() -> int:
    options = arguments()
    run = {"single": run_single, "prefill": run_prefill, "decode": run_decode}[options.role]
    try:
        return run(options)
    except Exception as error:
        if not isinstance(error, (OSError, ValueError, RuntimeError)):
            traceback.print_exc()
        # Errors of p2pmem have a remedy.
        print(f"kv_cache: {error}", *filter(None, [getattr(error, "remedy", None)]), sep="\n", file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main()
    # Without the destructors of engines: after an error, UCX may wait for the node that failed, and the wheel's copy of libnl crashes if
    # the system's libnl is loaded too, also without p2pmem.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
