# SPDX-License-Identifier: MIT OR Apache-2.0
"""Describes module, user space and tests to rust-analyzer, and asks it, as an editor does, whether it understands them.

Called by tools/rust-analyzer. The kernel describes its own crates, in KDIR/rust-project.json or by its `make
rust-analyzer`; the module is added here. Prints "PASS name" or "FAIL name" for each check.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

TOP = pathlib.Path(__file__).resolve().parent.parent
WORKSPACES = ["userspace/Cargo.toml", "tests/Cargo.toml"]
# The kernel's crates that a module is built with, as the kernel gives them to its own drivers.
DIRECT = ["core", "kernel", "pin_init", "zerocopy", "zerocopy_derive"]
# Seconds for rust-analyzer to read everything, and for each answer: ten times what idle processors need, as a machine that is
# a guest may get few of them.
TO_READ, TO_ANSWER = 900, 300
# Files, names in them, and where their definitions are: in other crates of each of the projects.
LEADS = [
    ("rust/mem/buffer.rs", "RBTree", "kernel/rbtree.rs"),
    ("rust/ext/abi.rs", "p2pmem_alloc", "bindings_generated.rs"),
    ("userspace/p2pmemctl/src/list.rs", "human_size", "userspace/p2pmem/src/"),
    ("tests/models/fabric/src/bin/p2pmem-accel.rs", "Accel", "tests/models/accel/src/"),
]
# It believes that `Arc::pin_init(pin_init!(T { .. }), ..)` initialises fields of an Arc, and does not know that the kernel's `Arc<T>`
# becomes an `Arc<dyn Trait>` where one is expected (`CoercePointee`).
KNOWN = re.compile(r"no field `\w+` on type `Arc<\w+>`|expected Arc<dyn \w+>, found Arc<\w+>$")


def die(text):
    sys.exit(f"rust-analyzer: {text}")


def kernel_crates(kdir, obj, places):
    """The kernel's description of its crates, with the folders of this machine."""
    made = kdir / "rust-project.json"
    if not made.exists():
        # A whole source tree can be asked for it; it leaves it in the object folder.
        made = obj / "rust-project.json"
        command = ["make", "-s", "-C", str(kdir), f"M={TOP}", f"MO={obj}", "rust-analyzer"]
        if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode != 0 or not made.exists():
            die(f"{kdir} cannot describe its crates: it needs the kernel's sources")

    def moved(value):
        if isinstance(value, dict):
            return {key: moved(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [moved(inner) for inner in value]
        if isinstance(value, str):
            for old, new in places:
                if value == old or value.startswith(old + "/"):
                    return new + value[len(old) :]
        return value

    return moved(json.loads(made.read_text()))


def describe(kdir, obj, places, toolchain):
    """The module's rust-project.json: the kernel's crates that it is made of, and its own."""
    project = kernel_crates(kdir, obj, places)
    crates = project["crates"]
    by_name = {crate["display_name"]: index for index, crate in enumerate(crates)}
    needed = set()

    def need(index):
        if index not in needed:
            needed.add(index)
            for dep in crates[index]["deps"]:
                need(dep["crate"])

    direct = [name for name in DIRECT if name in by_name]
    if "kernel" not in direct:
        die(f"{kdir} describes no crate named kernel")
    for name in direct:
        need(by_name[name])
    order = sorted(needed)
    place = {old: new for new, old in enumerate(order)}
    kept = []
    for crate in (crates[old] for old in order):
        if not pathlib.Path(crate["root_module"]).exists():
            die(f"{crate['root_module']} is missing")
        crate["deps"] = [{"crate": place[dep["crate"]], "name": dep["name"]} for dep in crate["deps"]]
        # To be read, not to be worked on.
        crate["is_workspace_member"] = False
        kept.append(crate)
    bindings = obj / "rust/sys"
    if not (bindings / "bindings_generated.rs").exists():
        die(f"there are no bindings in {bindings}: build the module first (make modules)")
    kept.append(
        {
            "display_name": "p2pmem",
            "root_module": str(TOP / "rust/p2pmem_main.rs"),
            "is_workspace_member": True,
            "edition": "2021",
            "cfg": crates[by_name["kernel"]]["cfg"] + ["MODULE"] + own_cfgs(obj),
            "env": {"RUST_MODFILE": "rust/p2pmem_main", "P2PMEM_OBJ": str(obj)},
            "source": {"include_dirs": [str(TOP / "rust"), str(bindings)], "exclude_dirs": []},
            "deps": [{"crate": place[by_name[name]], "name": name} for name in direct],
        }
    )
    project["crates"] = kept
    if toolchain:
        project["sysroot"] = str(toolchain)
    return project


def kbuild_notes(obj):
    """What Kbuild noted of the last build of the module's crate: its command, and the files that it read."""
    try:
        return (obj / "rust/.p2pmem_main.o.cmd").read_text()
    except FileNotFoundError:
        return ""


def own_cfgs(obj):
    """The configuration that Kbuild gave the module's crate beyond the kernel's own."""
    return sorted(set(re.findall(r"--cfg[= ]'?(p2pmem_\w+)", kbuild_notes(obj))))


def compiled(obj):
    """The crate's files, as the compiler read them: which they are depends on the configuration."""
    names = set(re.findall(r"\s(?:\S*/)?(rust/\S+\.rs)\b", kbuild_notes(obj)))
    files = sorted(TOP / name for name in names if (TOP / name).exists())
    if not files:
        die(f"the build in {obj} notes no file that it read: build the module first (make modules)")
    return files


def put(path, value):
    """Writes a file so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.rename(path)


def settings(toolchain):
    """What an editor has to tell rust-analyzer."""
    projects = ["rust-project.json", *WORKSPACES]
    answer = {
        "linkedProjects": [str(TOP / project) for project in projects],
        "cargo": {"features": "all", "targetDir": True},
    }
    if toolchain:
        answer["cargo"]["sysroot"] = str(toolchain)
        # The wrapper would be the program that it believes to be, which is the loader.
        answer["cargo"]["buildScripts"] = {"useRustcWrapper": False}
    return answer


def flat(value, prefix):
    """Nested settings as the dotted ones of VS Code."""
    for key, inner in value.items():
        name = f"{prefix}.{key}"
        if isinstance(inner, dict):
            yield from flat(inner, name)
        else:
            yield name, inner


class Server:
    """rust-analyzer, spoken to as an editor does (Language Server Protocol on its standard streams)."""

    def __init__(self, command, options):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=TOP)
        self.changed = threading.Condition()
        self.answers, self.status, self.ended, self.number = {}, None, False, 0
        threading.Thread(target=self.listen, daemon=True).start()
        self.ask(
            "initialize",
            {
                "processId": os.getpid(),
                "rootUri": TOP.as_uri(),
                "workspaceFolders": [{"uri": TOP.as_uri(), "name": "p2pmem"}],
                "initializationOptions": options,
                "capabilities": {"experimental": {"serverStatusNotification": True}},
            },
        )
        self.send({"method": "initialized", "params": {}})

    def send(self, message):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def listen(self):
        while True:
            length = None
            while (line := self.process.stdout.readline()) not in (b"", b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if length is None:
                break
            message = json.loads(self.process.stdout.read(length))
            if "method" in message and "id" in message:
                # What it asks an editor: there are no further settings, and all it announces is fine.
                items = message.get("params", {}).get("items") if message["method"] == "workspace/configuration" else None
                self.send({"id": message["id"], "result": [None] * len(items) if items else None})
            with self.changed:
                if message.get("method") == "experimental/serverStatus":
                    self.status = message["params"]
                elif "method" not in message:
                    self.answers[message["id"]] = message
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def wait(self, condition, seconds, what):
        with self.changed:
            if not self.changed.wait_for(lambda: condition() or self.ended, seconds):
                die(f"no {what} within {seconds} s")
            if not condition():
                die(f"it ended before there was {what}")

    def ask(self, method, params):
        self.number += 1
        number = self.number
        self.send({"id": number, "method": method, "params": params})
        self.wait(lambda: number in self.answers, TO_ANSWER, f"answer to {method}")
        answer = self.answers.pop(number)
        # It read something meanwhile and wants to be asked again.
        if answer.get("error", {}).get("code") in (-32800, -32801, -32802):
            return self.ask(method, params)
        if "error" in answer:
            die(f"{method}: {answer['error']}")
        return answer["result"]

    def ready(self):
        self.wait(lambda: self.status and self.status["quiescent"], TO_READ, "end of its reading")
        return self.status

    def open(self, path, text):
        document = {"uri": path.as_uri(), "languageId": "rust", "version": 1, "text": text}
        self.send({"method": "textDocument/didOpen", "params": {"textDocument": document}})

    def definition(self, path, name):
        """Files in which it finds what a name means that stands in a file."""
        text = path.read_text()
        at = re.search(rf"\b{name}\b", text)
        if not at:
            die(f"{path.relative_to(TOP)} does not mention {name}")
        line = text.count("\n", 0, at.start())
        column = at.start() - (text.rfind("\n", 0, at.start()) + 1)
        self.open(path, text)
        position = {"line": line, "character": column}
        found = self.ask("textDocument/definition", {"textDocument": {"uri": path.as_uri()}, "position": position})
        return [place.get("uri") or place.get("targetUri") for place in found or []]

    def end(self):
        self.ask("shutdown", None)
        self.send({"method": "exit"})
        self.wait(lambda: self.ended, TO_ANSWER, "end of it")
        self.process.wait(TO_ANSWER)


def diagnose(command, project):
    """What it calls an error in the module, and in a crate beside it that has one: the check has to be able to fail."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "unresolved.rs").write_text("//! An import that leads nowhere.\nuse kernel::a_name_that_there_is_not;\n")
        own = project["crates"][-1]
        beside = {**own, "display_name": "unresolved", "root_module": str(folder / "unresolved.rs")}
        beside["source"] = {"include_dirs": [str(folder)], "exclude_dirs": []}
        put(folder / "rust-project.json", {**project, "crates": [*project["crates"], beside]})
        try:
            done = subprocess.run(
                [*command, "diagnostics", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=TO_READ,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            die(f"no end of the diagnostics within {TO_READ} s")
    errors, seen, path = {}, set(), None
    for line in done.stdout.splitlines():
        at = re.match(r"processing crate: \S+, module: (.*)", line)
        if at:
            path = pathlib.Path(at[1])
            seen.add(path)
        elif re.match(r"(Error|SyntaxError)\b", line) and path and not KNOWN.search(line):
            errors.setdefault(path, []).append(line)
    if "diagnostic scan complete" not in done.stdout:
        die(f"the diagnostics broke off:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = errors.pop(folder / "unresolved.rs", [])
    wrong = [f"{path.relative_to(TOP)}: {text}" for path, texts in errors.items() for text in texts]
    files = compiled(pathlib.Path(own["env"]["P2PMEM_OBJ"]))
    wrong += [f"{path.relative_to(TOP)} is part of no crate" for path in files if path not in seen]
    yield "module", wrong
    failed = any("unresolved import" in text for text in found)
    yield "unresolved", [] if failed else ["an import that leads nowhere was no error"]


def together(command, options):
    """Whether all three projects are read in one session, and names lead from each into other crates."""
    # Nothing is compiled for this, so that no macro of a crate can be expanded.
    options = {**options, "checkOnSave": False, "cachePriming": {"enable": False}, "procMacro": {"enable": False}}
    options["cargo"] = {**options["cargo"], "buildScripts": {"enable": False}}
    server = Server([*command], options)
    status = server.ready()
    yield "projects", [] if status["health"] != "error" else [status.get("message", "unhealthy")]
    wrong = []
    for path, name, where in LEADS:
        # What changes on the disk while it reads is read again.
        deadline = time.monotonic() + TO_ANSWER
        found = server.definition(TOP / path, name)
        while not any(where in uri for uri in found) and time.monotonic() < deadline:
            time.sleep(5)
            found = server.definition(TOP / path, name)
        if not any(where in uri for uri in found):
            wrong.append(f"{path}: {name} is not found in {where} but in {found or 'nothing'}")
    yield "definitions", wrong
    server.end()


def judge(check, began):
    """Says what came of a check's parts; whether all is well."""
    well = True
    for name, wrong in check:
        lines = [f"  {text}\n" for text in wrong[:40]]
        lines.append(f"{'FAIL' if wrong else 'PASS'} {name} ({time.monotonic() - began:.0f} s)\n")
        # In one piece, as the other half speaks too.
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
        well &= not wrong
    return well


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kdir", type=pathlib.Path, help="the kernel build folder")
    parser.add_argument("obj", type=pathlib.Path, help="the object folder that the module was built in")
    parser.add_argument("--toolchain", type=pathlib.Path, help="a folder with rust-analyzer and rustc, if not this machine's")
    parser.add_argument("--place", action="append", default=[], help="OLD=NEW: where a folder is on this machine")
    args = parser.parse_args()
    places = [place.split("=", 1) for place in args.place]
    project = describe(args.kdir.resolve(), args.obj.resolve(), places, args.toolchain)
    put(TOP / "rust-project.json", project)
    options = settings(args.toolchain)
    put(TOP / "build/rust-analyzer.json", options)
    command = str(args.toolchain / "bin/rust-analyzer") if args.toolchain else "rust-analyzer"
    if not (TOP / ".vscode/settings.json").exists():
        path = {"rust-analyzer.server.path": command} if args.toolchain else {}
        put(TOP / ".vscode/settings.json", {**path, **dict(flat(options, "rust-analyzer"))})

    # Each keeps little more than one processor busy.
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        halves = [pool.submit(judge, check, began) for check in (diagnose([command], project), together([command], options))]
        sys.exit(not all([half.result() for half in halves]))


if __name__ == "__main__":
    main()
