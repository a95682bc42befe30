// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the runner with two guests.

use std::time::Duration;

use anyhow::{Result, ensure};
use p2pmem_guest::limits::Overrun;
use p2pmem_guest::wire::Listen;
use p2pmem_vm::cluster::{Cluster, Served};
use p2pmem_vm::vm::{Command, Outcome, Status};

use crate::{LIMIT, Test, both_clean, describe_outcome, failure, served_failure};

/// The tests.
pub const TESTS: &[Test] = &[
    Test {
        name: "runner::pair-network",
        topology: "pair",
        alone: false,
        run: network,
    },
    Test {
        name: "runner::pair-at-once",
        topology: "pair",
        alone: false,
        run: at_once,
    },
    Test {
        name: "runner::pair-servers-end",
        topology: "pair",
        alone: false,
        run: servers_end,
    },
    Test {
        name: "runner::pair-server-fails",
        topology: "pair",
        alone: false,
        run: server_fails,
    },
    Test {
        name: "runner::pair-logs",
        topology: "pair",
        alone: false,
        run: logs,
    },
    Test {
        name: "runner::pair-rdma-in-software",
        topology: "pair",
        alone: false,
        run: software,
    },
];

/// Sends its input on a port back, to one client.
const ECHO: &str = "import socket\n\
    peer = socket.create_server(('', 5201)).accept()[0]\n\
    while data := peer.recv(65536): peer.sendall(data)\n";

/// Serves any number of clients, and never ends.
const FOR_EVER: &str = "import socket\nserver = socket.create_server(('', 5201))\nwhile True: server.accept()\n";

fn shell(script: &str) -> Command {
    Command::new(["sh", "-c", script]).limit(LIMIT)
}

fn python(script: &str) -> Command {
    Command::new(["python3", "-c", script]).limit(LIMIT)
}

fn clean(outcome: &Outcome) -> Result<&Outcome> {
    if !outcome.is_clean() {
        return Err(failure(&[outcome], describe_outcome(outcome)));
    }
    Ok(outcome)
}

/// Sends megabytes in both directions, by the names of the nodes.
fn network(cluster: &mut Cluster) -> Result<()> {
    for (server, client) in [("b", "a"), ("a", "b")] {
        let script = format!(
            "import os, socket, threading\n\
             data = os.urandom(4 << 20)\n\
             peer = socket.create_connection((os.environ['P2PMEM_ADDR_{}'], 5201))\n\
             threading.Thread(target=lambda: (peer.sendall(data), peer.shutdown(socket.SHUT_WR))).start()\n\
             back = b''.join(iter(lambda: peer.recv(65536), b''))\n\
             assert back == data, len(back)\n\
             assert os.environ['P2PMEM_NODE'] == os.uname().nodename == '{client}'\n",
            server.to_uppercase()
        );
        let echo = python(ECHO).listen(Listen::Tcp(5201));
        both_clean(cluster.serve_to_the_end((server, &echo), (client, &python(&script)))?)?;
    }
    Ok(())
}

/// Each command waits for the other, so neither can end unless both run at the same time.
fn at_once(cluster: &mut Cluster) -> Result<()> {
    let script = "import os, socket, time\n\
        me = os.environ['P2PMEM_NODE']; other = 'a' if me == 'b' else 'b'\n\
        listener = socket.create_server(('', 5300))\n\
        end = time.monotonic() + 120\n\
        while time.monotonic() < end:\n\
        \x20   try: out = socket.create_connection((os.environ['P2PMEM_ADDR_' + other.upper()], 5300)); break\n\
        \x20   except ConnectionRefusedError: pass\n\
        else: raise SystemExit(75)\n\
        out.sendall(me.encode())\n\
        print(listener.accept()[0].recv(1).decode())\n";
    let outcomes = cluster.exec_all(|_| python(script))?;
    for (node, other) in [("a", b"b\n"), ("b", b"a\n")] {
        let outcome = clean(&outcomes[node])?;
        ensure!(outcome.stdout == other, "{node}: {:?}", outcome.stdout);
    }
    Ok(())
}

/// A server that does not end after its client is killed; a server that ends by itself is not.
fn servers_end(cluster: &mut Cluster) -> Result<()> {
    let client = python("import socket; socket.create_connection(('10.77.0.2', 5201)).sendall(b'x')");
    let served = cluster.serve(("b", &python(FOR_EVER).listen(Listen::Tcp(5201))), ("a", &client))?;
    if !served.client.as_ref().is_some_and(Outcome::is_clean) || served.server.status != Status::Stopped {
        return Err(served_failure(&served));
    }
    // The port is free again, and the next server is not mistaken for the previous one. A process that ends with unread
    // input resets the connection, so this client waits for its byte.
    let client = python(
        "import socket; peer = socket.create_connection(('10.77.0.2', 5201)); peer.sendall(b'x'); assert peer.recv(1) == b'x'",
    );
    let echo = python(ECHO).listen(Listen::Tcp(5201));
    both_clean(cluster.serve_to_the_end(("b", &echo), ("a", &client))?).map(drop)
}

/// If the server fails, the client does not run.
fn server_fails(cluster: &mut Cluster) -> Result<()> {
    let client = shell("echo ran");
    let dies = shell("exit 3").listen(Listen::Tcp(5999));
    let served = cluster.serve(("b", &dies), ("a", &client))?;
    if served.server.status != (Status::Exited { code: 3 }) || served.client.is_some() {
        return Err(served_failure(&served));
    }
    let mute = shell("sleep 1000")
        .limit(Duration::from_secs(2))
        .listen(Listen::Tcp(5999));
    let served = cluster.serve(("b", &mute), ("a", &client))?;
    ensure!(served.client.is_none(), "{served:?}");
    ensure!(served.server.status == Status::TimedOut, "{:?}", served.server.status);
    ensure!(
        Overrun::is(&served_failure(&served)),
        "a server that does not listen in time is not late"
    );
    // After a client that exceeds its time limit the server is no longer needed, which is no failure of the server.
    let waits = python("import time\ntime.sleep(1000)").limit(Duration::from_secs(2));
    let serves = python(FOR_EVER).listen(Listen::Tcp(5201));
    let served = cluster.serve(("b", &serves), ("a", &waits))?;
    ensure!(served.server.status == Status::Stopped, "{:?}", served.server.status);
    ensure!(Overrun::is(&served_failure(&served)), "{served:?}");
    // A command that fails is reported as failed, even if the other one is late.
    let served = cluster.serve(("b", &mute), ("a", &client))?;
    let wrong = Served {
        client: Some(cluster.exec("a", &shell("exit 1"))?),
        ..served
    };
    ensure!(!Overrun::is(&served_failure(&wrong)), "{wrong:?}");
    for (server, client_node) in [("a", "a"), ("a", "c")] {
        ensure!(cluster.serve((server, &dies), (client_node, &client)).is_err());
    }
    clean(&cluster.exec("b", &shell("true"))?).map(drop)
}

/// Log lines are reported with the node of their kernel.
fn logs(cluster: &mut Cluster) -> Result<()> {
    let outcomes = cluster.exec_all(|node| match node {
        "a" => shell("echo 'BUG: on a' >/dev/kmsg"),
        _ => shell("echo '<6>fine on b' >/dev/kmsg"),
    })?;
    ensure!(outcomes["a"].findings.len() == 1, "{:?}", outcomes["a"].findings);
    clean(&outcomes["b"])?;
    ensure!(outcomes["b"].dmesg.iter().any(|record| record.text == "fine on b"));
    let snapshot = cluster.snapshot()?;
    ensure!(
        snapshot["a"]["nvme0"]["kind"] == "nvme" && snapshot["b"]["nvme0"]["failed"] == 0,
        "{snapshot}"
    );
    Ok(())
}

/// RDMA in software (rdma_rxe) between the guests. The runner waits for servers of the connection manager too.
fn software(cluster: &mut Cluster) -> Result<()> {
    let set_up = "modprobe -a rdma_rxe rdma_ucm && rdma link add rxe0 type rxe netdev eth0 && \
        until grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state; do :; done";
    for outcome in cluster.exec_all(|_| shell(set_up))?.values() {
        clean(outcome)?;
    }
    let server = shell("rping -s -a $P2PMEM_ADDR_B -C 10 -v").listen(Listen::Rdma(7174));
    let client = shell("rping -c -a $P2PMEM_ADDR_B -C 10 -v");
    let said = both_clean(cluster.serve_to_the_end(("b", &server), ("a", &client))?)?.stdout;
    ensure!(
        String::from_utf8_lossy(&said).lines().count() == 10,
        "{}",
        String::from_utf8_lossy(&said)
    );
    Ok(())
}
