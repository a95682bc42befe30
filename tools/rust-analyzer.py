# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes the configuration of rust-analyzer for module, user space, and tests, and tests it with an editor's requests.

    rust-analyzer.py [--toolchain FOLDER] [--place OLD=NEW]... KDIR OBJ

tools/rust-analyzer runs this script. The kernel describes its crates in KDIR/rust-project.json, or with its target
`make rust-analyzer`. The script adds the module's crate. Prints "PASS name" or "FAIL name" for each check. The exit
code is 0 if all checks pass, else 1.
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
# The kernel's crates that a module depends on directly.
DIRECT = ["core", "kernel", "pin_init", "zerocopy", "zerocopy_derive"]
# Time limits in seconds for loading all projects, and for an answer: ten times the usual duration, because the machine
# may be busy.
LOAD_LIMIT, ANSWER_LIMIT = 900, 300
# (file, name in the file, part of the path of its definition). The definitions are in other crates.
DEFINITIONS = [
    ("rust/mem/buffer.rs", "RBTree", "kernel/rbtree.rs"),
    ("rust/ext/abi.rs", "p2pmem_alloc", "bindings_generated.rs"),
    ("userspace/p2pmemctl/src/alloc.rs", "human_size", "userspace/p2pmem/src/"),
    ("tests/models/fabric/src/bin/p2pmem-accel.rs", "Accel", "tests/models/accel/src/"),
]
# False errors of rust-analyzer: it takes the fields in `Arc::pin_init(pin_init!(T { .. }), ..)` for fields of Arc, and
# does not support the coercion of the kernel's `Arc<T>` to `Arc<dyn Trait>` (`CoercePointee`).
FALSE_ERRORS = re.compile(r"no field `\w+` on type `Arc<\w+>`|expected Arc<dyn \w+>, found Arc<\w+>$")


def die(message):
    sys.exit(f"rust-analyzer: {message}")


def kernel_crates(kdir, obj, places):
    """Returns the kernel's description of its crates, with paths of this machine."""
    description = kdir / "rust-project.json"
    if not description.exists():
        # In a source tree, the target rust-analyzer writes the description to the object folder.
        description = obj / "rust-project.json"
        command = ["make", "-s", "-C", str(kdir), f"M={TOP}", f"MO={obj}", "rust-analyzer"]
        if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode != 0 or not description.exists():
            die(f"{kdir} has no description of its crates: use a build folder with the kernel's sources")

    def replace_paths(value):
        """Returns JSON with the paths of `places` replaced."""
        if isinstance(value, dict):
            return {key: replace_paths(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [replace_paths(inner) for inner in value]
        if isinstance(value, str):
            for old, new in places:
                if value == old or value.startswith(old + "/"):
                    return new + value[len(old) :]
        return value

    return replace_paths(json.loads(description.read_text()))


def describe(kdir, obj, places, toolchain):
    """Returns the module's rust-project.json: the crates that the module depends on, and the module's crate as the last one."""
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
        die(f"the description in {kdir} has no crate named kernel")
    for name in direct:
        need(by_name[name])
    order = sorted(needed)
    new_index = {old: new for new, old in enumerate(order)}
    kept = []
    for crate in (crates[old] for old in order):
        if not pathlib.Path(crate["root_module"]).exists():
            die(f"{crate['root_module']} is missing")
        crate["deps"] = [{"crate": new_index[dep["crate"]], "name": dep["name"]} for dep in crate["deps"]]
        # rust-analyzer reports no errors in crates that are not workspace members.
        crate["is_workspace_member"] = False
        kept.append(crate)
    bindings = obj / "rust/sys"
    if not (bindings / "bindings_generated.rs").exists():
        die(f"{bindings} has no bindings: run make modules first")
    kept.append(
        {
            "display_name": "p2pmem",
            "root_module": str(TOP / "rust/p2pmem_main.rs"),
            "is_workspace_member": True,
            "edition": "2021",
            "cfg": crates[by_name["kernel"]]["cfg"] + ["MODULE"] + module_cfgs(obj),
            "env": {"RUST_MODFILE": "rust/p2pmem_main", "P2PMEM_OBJ": str(obj)},
            "source": {"include_dirs": [str(TOP / "rust"), str(bindings)], "exclude_dirs": []},
            "deps": [{"crate": new_index[by_name[name]], "name": name} for name in direct],
        }
    )
    project["crates"] = kept
    if toolchain:
        project["sysroot"] = str(toolchain)
    return project


def kbuild_record(obj):
    """Returns Kbuild's record of the last build of the module's crate, with the command and the source files."""
    try:
        return (obj / "rust/.p2pmem_main.o.cmd").read_text()
    except FileNotFoundError:
        return ""


def module_cfgs(obj):
    """Returns the configuration flags p2pmem_* of the last build."""
    return sorted(set(re.findall(r"--cfg[= ]'?(p2pmem_\w+)", kbuild_record(obj))))


def compiled_files(obj):
    """Returns the module's files that the last build compiled. They depend on the configuration."""
    names = set(re.findall(r"\s(?:\S*/)?(rust/\S+\.rs)\b", kbuild_record(obj)))
    files = sorted(TOP / name for name in names if (TOP / name).exists())
    if not files:
        die(f"{obj} has no record of a build: run make modules first")
    return files


def write_json(path, value):
    """Writes a file and replaces an old one by a rename, so that readers never see a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=2) + "\n")
    part.rename(path)


def settings(toolchain):
    """Returns the settings for rust-analyzer."""
    projects = ["rust-project.json", *WORKSPACES]
    options = {
        "linkedProjects": [str(TOP / project) for project in projects],
        "cargo": {"features": "all", "targetDir": True},
    }
    if toolchain:
        options["cargo"]["sysroot"] = str(toolchain)
        # rust-analyzer would use its own executable as the wrapper, which is the dynamic loader here.
        options["cargo"]["buildScripts"] = {"useRustcWrapper": False}
    return options


def flat(value, prefix):
    """Yields nested settings as the dotted settings of VS Code."""
    for key, inner in value.items():
        name = f"{prefix}.{key}"
        if isinstance(inner, dict):
            yield from flat(inner, name)
        else:
            yield name, inner


class Server:
    """A running rust-analyzer, and the client side of the Language Server Protocol on its standard streams.

    A thread reads messages and stores answers in `answers` and the last server status in `status`. `changed` protects
    both.
    """

    def __init__(self, command, options):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=TOP)
        self.changed = threading.Condition()
        self.answers, self.status, self.ended, self.number = {}, None, False, 0
        threading.Thread(target=self.listen, daemon=True).start()
        self.request(
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
        """Sends a JSON-RPC message."""
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def listen(self):
        """Reads messages until rust-analyzer ends. Runs in a thread."""
        while True:
            length = None
            while (line := self.process.stdout.readline()) not in (b"", b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if length is None:
                break
            message = json.loads(self.process.stdout.read(length))
            if "method" in message and "id" in message:
                # Answer requests of the server: there are no further settings, and other requests need no result.
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

    def wait(self, condition, seconds, event):
        """Waits for a condition. Exits with a message that names the event if time is over or rust-analyzer ends."""
        with self.changed:
            if not self.changed.wait_for(lambda: condition() or self.ended, seconds):
                die(f"no {event} within {seconds} s")
            if not condition():
                die(f"rust-analyzer ended before {event}")

    def request(self, method, params):
        """Sends a request and returns its result."""
        self.number += 1
        number = self.number
        self.send({"id": number, "method": method, "params": params})
        self.wait(lambda: number in self.answers, ANSWER_LIMIT, f"answer to {method}")
        answer = self.answers.pop(number)
        # RequestCancelled, ContentModified, ServerCancelled: files changed, and the server wants the request again.
        if answer.get("error", {}).get("code") in (-32800, -32801, -32802):
            return self.request(method, params)
        if "error" in answer:
            die(f"{method}: {answer['error']}")
        return answer["result"]

    def ready(self):
        """Waits until all projects are loaded, and returns the server status."""
        self.wait(lambda: self.status and self.status["quiescent"], LOAD_LIMIT, "end of loading")
        return self.status

    def open(self, path, text):
        """Opens a file as an editor does."""
        document = {"uri": path.as_uri(), "languageId": "rust", "version": 1, "text": text}
        self.send({"method": "textDocument/didOpen", "params": {"textDocument": document}})

    def definition(self, path, name):
        """Returns the URIs of the files with the definition of a name in the file `path`."""
        text = path.read_text()
        at = re.search(rf"\b{name}\b", text)
        if not at:
            die(f"{path.relative_to(TOP)} does not contain {name}")
        line = text.count("\n", 0, at.start())
        column = at.start() - (text.rfind("\n", 0, at.start()) + 1)
        self.open(path, text)
        position = {"line": line, "character": column}
        found = self.request("textDocument/definition", {"textDocument": {"uri": path.as_uri()}, "position": position})
        return [location.get("uri") or location.get("targetUri") for location in found or []]

    def end(self):
        """Shuts rust-analyzer down and waits for its end."""
        self.request("shutdown", None)
        self.send({"method": "exit"})
        self.wait(lambda: self.ended, ANSWER_LIMIT, "end of the process")
        self.process.wait(ANSWER_LIMIT)


def check_errors(command, project):
    """Runs `rust-analyzer diagnostics` on the module.

    Yields ("module", findings): errors in the module, and files that belong to no crate. Yields ("unresolved",
    findings): a finding if rust-analyzer reports no error for a second crate whose import does not exist.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "unresolved.rs").write_text("//! An import that does not exist.\nuse kernel::name_that_does_not_exist;\n")
        module = project["crates"][-1]
        unresolved = {**module, "display_name": "unresolved", "root_module": str(folder / "unresolved.rs")}
        unresolved["source"] = {"include_dirs": [str(folder)], "exclude_dirs": []}
        write_json(folder / "rust-project.json", {**project, "crates": [*project["crates"], unresolved]})
        try:
            done = subprocess.run(
                [*command, "diagnostics", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                timeout=LOAD_LIMIT,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            die(f"rust-analyzer diagnostics did not end within {LOAD_LIMIT} s")
    errors, seen, path = {}, set(), None
    for line in done.stdout.splitlines():
        at = re.match(r"processing crate: \S+, module: (.*)", line)
        if at:
            path = pathlib.Path(at[1])
            seen.add(path)
        elif re.match(r"(Error|SyntaxError)\b", line) and path and not FALSE_ERRORS.search(line):
            errors.setdefault(path, []).append(line)
    if "diagnostic scan complete" not in done.stdout:
        die(f"rust-analyzer diagnostics failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = errors.pop(folder / "unresolved.rs", [])
    findings = [f"{path.relative_to(TOP)}: {text}" for path, texts in errors.items() for text in texts]
    files = compiled_files(pathlib.Path(module["env"]["P2PMEM_OBJ"]))
    findings += [f"{path.relative_to(TOP)} is part of no crate" for path in files if path not in seen]
    yield "module", findings
    reported = any("unresolved import" in text for text in found)
    yield "unresolved", [] if reported else ["an import that does not exist is no error"]


def check_session(command, options):
    """Loads all three projects in one session.

    Yields ("projects", findings) if loading has ended, and ("definitions", findings) for the names in DEFINITIONS.
    """
    # This check compiles nothing, and therefore expands no procedural macros.
    options = {**options, "checkOnSave": False, "cachePriming": {"enable": False}, "procMacro": {"enable": False}}
    options["cargo"] = {**options["cargo"], "buildScripts": {"enable": False}}
    server = Server([*command], options)
    status = server.ready()
    yield "projects", [] if status["health"] != "error" else [status.get("message", "unhealthy")]
    findings = []
    for path, name, expected in DEFINITIONS:
        # rust-analyzer loads files again that change meanwhile, and then has no answer for some time.
        deadline = time.monotonic() + ANSWER_LIMIT
        found = server.definition(TOP / path, name)
        while not any(expected in uri for uri in found) and time.monotonic() < deadline:
            time.sleep(5)
            found = server.definition(TOP / path, name)
        if not any(expected in uri for uri in found):
            findings.append(f"{path}: the definition of {name} is in {found or 'no file'}, expected {expected}")
    yield "definitions", findings
    server.end()


def print_results(check, began):
    """Prints the results of a check. Returns whether it has no findings."""
    passed = True
    for name, findings in check:
        lines = [f"  {finding}\n" for finding in findings[:40]]
        lines.append(f"{'FAIL' if findings else 'PASS'} {name} ({time.monotonic() - began:.0f} s)\n")
        # One write, because the other check prints at the same time.
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
        passed &= not findings
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kdir", type=pathlib.Path, help="the kernel build folder")
    parser.add_argument("obj", type=pathlib.Path, help="the object folder of the module's build")
    parser.add_argument("--toolchain", type=pathlib.Path, help="a folder with rust-analyzer and rustc to use instead of this machine's")
    parser.add_argument("--place", action="append", default=[], help="OLD=NEW: replace the path OLD by NEW in the kernel's description")
    args = parser.parse_args()
    places = [place.split("=", 1) for place in args.place]
    project = describe(args.kdir.resolve(), args.obj.resolve(), places, args.toolchain)
    write_json(TOP / "rust-project.json", project)
    options = settings(args.toolchain)
    write_json(TOP / "build/rust-analyzer.json", options)
    command = str(args.toolchain / "bin/rust-analyzer") if args.toolchain else "rust-analyzer"
    if not (TOP / ".vscode/settings.json").exists():
        path = {"rust-analyzer.server.path": command} if args.toolchain else {}
        write_json(TOP / ".vscode/settings.json", {**path, **dict(flat(options, "rust-analyzer"))})

    # The checks run at the same time, because each uses little more than one processor.
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        checks = check_errors([command], project), check_session([command], options)
        results = [pool.submit(print_results, check, began) for check in checks]
        sys.exit(not all([result.result() for result in results]))


if __name__ == "__main__":
    main()
