// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of p2pmem-perf in guests, over RDMA in software (rdma_rxe), from and to host memory. The demo tests it with an
//! accelerator's memory.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::vm::Vm;
use serde_json::Value;

use crate::{Test, clean, describe, failure, sh};

/// The tests.
pub const TESTS: &[Test] = &[
    Test {
        name: "perf::every-mode-moves-every-byte",
        topology: "pair",
        alone: false,
        run: every_mode,
    },
    Test {
        name: "perf::a-terminal-shows-the-progress",
        topology: "pair",
        alone: false,
        run: progress,
    },
    Test {
        name: "perf::a-killed-peer-is-reported",
        topology: "pair",
        alone: false,
        run: left_alone,
    },
    Test {
        name: "perf::the-gauge-measures-and-stops",
        topology: "pair",
        alone: false,
        run: gauge,
    },
];

/// Makes a software NIC on an interface of its own, so that both sides of a test run on one node.
const NIC: &str = "
    set -e
    if ! rdma link show rxe0/1 >/dev/null 2>&1; then
        modprobe -a rdma_rxe dummy ib_uverbs
        ip link set lo up
        ip link add rdma0 type dummy
        ip addr add 10.99.0.1/24 dev rdma0
        ip link set rdma0 up
        rdma link add rxe0 type rxe netdev rdma0
    fi
    # Its second GID is that of the address, once the kernel has made it.
    while :; do
        case \"$(cat /sys/class/infiniband/rxe0/ports/1/gids/1 2>/dev/null)\" in
            '' | 0000:0000:0000:0000:0000:0000:0000:0000) sleep 0.1 ;;
            *) break ;;
        esac
    done";

/// Returns the path of p2pmem-perf in the build of user space.
pub fn perf() -> Result<String> {
    let folder = std::env::var_os("P2PMEM_BIN").context("P2PMEM_BIN is not set: `make test-vm` does")?;
    let path = PathBuf::from(folder).join("p2pmem-perf");
    ensure!(path.is_file(), "{} is not there: run `make user`", path.display());
    Ok(path.to_str().context("path")?.to_owned())
}

/// Returns the path of p2pmemctl in the build of user space.
pub fn ctl() -> Result<String> {
    let path = PathBuf::from(perf()?).with_file_name("p2pmemctl");
    Ok(path.to_str().context("path")?.to_owned())
}

fn node(cluster: &mut Cluster) -> Result<&mut Vm> {
    let vm = cluster.node("a")?;
    clean(vm, NIC)?;
    Ok(vm)
}

/// Runs both sides on one node, and returns the client's report. The server must end by itself, with success.
fn both(vm: &mut Vm, options: &str) -> Result<Value> {
    let perf = perf()?;
    let script = format!(
        "{perf} serve --nic rxe0 --gid-index 1 --events --timeout 150 & server=$!
        {perf} run 127.0.0.1 --json --nic rxe0 --gid-index 1 --timeout 150 --verify {options} || exit 1
        wait $server"
    );
    let outcome = clean(vm, &script)?;
    serde_json::from_slice(&outcome.stdout).context("output of p2pmem-perf")
}

fn every_mode(cluster: &mut Cluster) -> Result<()> {
    let vm = node(cluster)?;
    // What client and server copy of each message.
    let (nothing, once, twice) = ([false, false], [false, true], [true, true]);
    for (options, copies) in [
        ("-n 40 --size 8,64K --handshake", nothing),
        ("-n 40 --size 4K-64K --depth 5", nothing),
        ("-n 41 --size 4K --depth 12 --batch 5", nothing),
        ("-n 30 --size 64K --mode read", nothing),
        ("-n 30 --size 12K,64K --mode send --depth 4", nothing),
        ("-n 30 --size 12K,64K --mode write-imm --depth 4", nothing),
        ("-n 30 --size 64K --mode write-imm --adaptive", nothing),
        ("-n 30 --size 8,64K --mode rpc --depth 1 --peer-waits adaptive", once),
        ("-n 40 --size 64K --mode rpc --depth 7", once),
        ("-n 30 --size 64K --staged --depth 3", twice),
        ("-n 30 --size 64K --mode tcp --depth 4", twice),
        ("-n 5 --size 256K --window 32K", nothing),
        ("-n 5 --size 256K --window 32K --mode send --depth 2", nothing),
        ("-n 1000 --volume 256K --size 64K --handshake --depth 1", nothing),
    ] {
        let report = both(vm, options)?;
        let results = report["results"].as_array().context("a report without results")?;
        ensure!(!results.is_empty(), "{options}: nothing was measured");
        for result in results {
            let nic = &result["nics"][0];
            let bytes = nic["checked"]["bytes"].as_u64().unwrap_or(0);
            ensure!(
                result["verified"] == true && bytes >= 2 * result["bytes"].as_u64().unwrap_or(u64::MAX),
                "{options}: not every byte is right: {result}"
            );
            let number = |what: &str| result[what].as_u64().with_context(|| format!("{options}: {what}"));
            let all = number("bytes")? * number("iterations")?;
            let copied = copies.map(|copies| if copies { all } else { 0 });
            ensure!(
                nic["copied_client"] == copied[0] && nic["copied_server"] == copied[1],
                "{options}: copied bytes: {nic}, expected {copied:?}"
            );
            ensure!(
                result["average_mib_per_s"].as_f64().is_some_and(|speed| speed > 0.0),
                "{options}: no speed: {result}"
            );
            let latency =
                ["p50_us", "p99_us", "p999_us", "max_us"].map(|what| nic["latency"][what].as_f64().unwrap_or(0.0));
            ensure!(
                latency[0] > 0.0 && latency.is_sorted(),
                "{options}: latencies: {result}"
            );
            // The server's processor takes part only where each message or chunk consumes a receive, and over TCP.
            let one_sided = !["handshake", "staged", "send", "write-imm", "rpc", "tcp", "window"]
                .iter()
                .any(|word| options.contains(word));
            let server = nic.get("cpu_us_server").map(Value::as_f64);
            ensure!(
                match server {
                    None => one_sided,
                    Some(time) => !one_sided && time > Some(0.0),
                } && nic["cpu_us_client"].as_f64() > Some(0.0),
                "{options}: processor time: {nic}"
            );
        }
    }
    Ok(())
}

/// Runs a program on a pseudoterminal, and returns what the terminal got.
const ON_TERMINAL: &str =
    "TERM=xterm python3 -c 'import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))'";

fn progress(cluster: &mut Cluster) -> Result<()> {
    let vm = node(cluster)?;
    let perf = perf()?;
    let register = format!("{perf} register --nic rxe0 --memory cpu --size 64K -n 20");
    let run = format!("{perf} run 127.0.0.1 --nic rxe0 --gid-index 1 --timeout 150 -n 20 --size 64K");
    let serve = format!("{perf} serve --nic rxe0 --gid-index 1 --events --timeout 150 & server=$!");
    for (script, bar) in [
        (format!("{ON_TERMINAL} {register}"), "/20 registrations"),
        (
            format!("{serve}\n{ON_TERMINAL} {run} || exit 1\nwait $server"),
            "/20 messages",
        ),
    ] {
        let said = String::from_utf8_lossy(&clean(vm, &script)?.stdout).into_owned();
        ensure!(
            said.contains("64K [") && said.contains(bar),
            "no bar with {bar:?}: {said:?}"
        );
    }
    // Without a terminal, standard error has no bar.
    let quiet = clean(vm, &register)?;
    let (out, err) = (
        String::from_utf8_lossy(&quiet.stdout),
        String::from_utf8_lossy(&quiet.stderr),
    );
    ensure!(out.contains(" 64K ") && !err.contains("registrations"), "{out} {err}");
    Ok(())
}

fn left_alone(cluster: &mut Cluster) -> Result<()> {
    let vm = node(cluster)?;
    let perf = perf()?;
    let endless = "--nic rxe0 --gid-index 1 --timeout 100 -n 10000000 --size 4K --handshake";
    // Kills first one side and then the other while messages are in flight, as the NIC's own counter shows.
    let script = |killed: &str, left: &str| {
        format!(
            "{perf} serve --nic rxe0 --gid-index 1 --events --timeout 100 & server=$!
            {perf} run 127.0.0.1 {endless} & client=$!
            counter=/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts
            start=$(cat $counter)
            # Ended by this test's own limit.
            while [ $(cat $counter) -lt $((start + 200)) ]; do sleep 0.1; done
            kill -9 ${killed}
            wait ${left}"
        )
    };
    for (killed, left) in [("server", "client"), ("client", "server")] {
        let outcome = sh(vm, &script(killed, left))?;
        let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
        if !outcome.findings.is_empty() || !said.contains("the other side ended the connection") {
            let what = describe(&outcome, vm);
            let text = format!("the {killed} was killed, and the {left} did not say so: {what}");
            return Err(failure(&[&outcome], text));
        }
    }
    // The NIC of a server that is stopped still answers the client's reads of the handshake word.
    let endless = endless.replace("--timeout 100", "--timeout 10");
    let script = format!(
        "{perf} serve --nic rxe0 --gid-index 1 --events --timeout 100 & server=$!
        {perf} run 127.0.0.1 {endless} & client=$!
        counter=/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts
        start=$(cat $counter)
        # Ended by this test's own limit.
        while [ $(cat $counter) -lt $((start + 200)) ]; do sleep 0.1; done
        kill -STOP $server
        wait $client && echo no error >&2
        kill -9 $server
        wait $server"
    );
    let outcome = sh(vm, &script)?;
    let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
    if !outcome.findings.is_empty() || said.contains("no error") || !said.contains("is its p2pmem-perf stopped?") {
        let what = describe(&outcome, vm);
        let text = format!("the server was stopped, and the client did not say so: {what}");
        return Err(failure(&[&outcome], text));
    }
    // Errors that need no peer are reported immediately.
    for (command, words) in [
        (format!("{perf} run 127.0.0.1 --nic mlx9_9"), "this machine has rxe0"),
        (
            format!("{perf} run 127.0.0.1 --nic rxe0 --timeout 0.2"),
            "does `p2pmem-perf serve` run there?",
        ),
        (
            format!("{perf} run 127.0.0.1 --nic rxe0 --mode read --staged"),
            "only writes can be staged",
        ),
        (
            format!("{perf} register --nic rxe0 --memory accelerator --size 4K --dev-path /nonexistent/p2pmem"),
            "load the module",
        ),
    ] {
        let outcome = sh(vm, &command)?;
        let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
        if !said.contains(words) {
            return Err(failure(&[&outcome], format!("{command} said {said:?}, not {words:?}")));
        }
    }
    Ok(())
}

/// A viewer of the gauge: starts and stops measurements by its interface for programs, and prints the results.
const VIEWER: &str = r#"
import json, urllib.error, urllib.request

def request(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer 0123456789abcdef", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8521/api" + path, data, headers), timeout=120)

def until(condition):
    for line in request("/events"):
        if line.startswith(b"data: "):
            state = json.loads(line[6:])
            if condition(state):
                return state

run = {"memory": "cpu", "peer_memory": "cpu", "mode": "write", "size": "64K", "messages": 10000000, "nics": ["rxe0"]}
first = json.load(request("/run", run))["id"]
until(lambda state: any(sample["ports"]["rxe0"] > 0 for sample in state["history"]))
try:
    request("/run", run)
    raise SystemExit("a second run was started")
except urllib.error.HTTPError as error:
    assert error.code == 409, error
request(f"/jobs/{first}/stop", {})
idle = lambda state: state["job"] is None
until(idle)
request("/run", {**run, "size": "8,64K", "messages": 20, "verify": True})
until(idle)
matrix = {**run, "memory": ["cpu"], "peer_memory": ["cpu"], "modes": ["write", "send"], "messages": 20}
del matrix["mode"]
request("/matrix", matrix)
until(idle)
print(request("/export.json").read().decode())
"#;

fn gauge(cluster: &mut Cluster) -> Result<()> {
    let vm = node(cluster)?;
    let perf = perf()?;
    let script = format!(
        "set -e
        cd $(mktemp -d)
        echo 0123456789abcdef >token
        chmod 600 token
        {perf} serve --forever --nic rxe0 --gid-index 1 --events --timeout 100 & server=$!
        {perf} gauge --server 127.0.0.1 --gid-index 1 --timeout 100 --token-file token >page & gauge=$!
        # Ended by this test's own limit.
        while ! grep -q 'gauge at http://127.0.0.1:8521/' page; do sleep 0.1; done
        cat >viewer.py <<'END'
{VIEWER}
END
        python3 viewer.py
        kill $gauge $server"
    );
    let outcome = clean(vm, &script)?;
    let results: Value = serde_json::from_slice(&outcome.stdout).context("results of the gauge")?;
    let (stopped, complete) = (&results["runs"][1], &results["runs"][0]);
    ensure!(
        stopped["error"] == "stopped by the viewer at 127.0.0.1",
        "the first run was not stopped: {stopped}"
    );
    let sizes = complete["report"]["results"]
        .as_array()
        .context("a run without results")?;
    ensure!(
        complete["error"].is_null() && sizes.len() == 2 && sizes.iter().all(|size| size["verified"] == true),
        "the second run is not complete: {complete}"
    );
    let entries = results["matrix"]["entries"]
        .as_array()
        .context("a matrix without entries")?;
    let measured = |entry: &Value| entry["mib_per_s"].as_f64() > Some(0.0);
    ensure!(
        entries.len() == 2 && entries.iter().all(measured),
        "the matrix is not complete: {results}"
    );
    Ok(())
}
