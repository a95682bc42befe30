// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves the control connections of a node: each has a thread, and at most one session.

mod play;
mod record;
mod setup;

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{ensure, Context, Result};

pub use setup::Port;
use setup::{reason, Ended};

use crate::control::{unexpected, Connection, ListedChannel, Reply, Request, Token, LOGIN_LIMIT};
use crate::node::Node;
use crate::wait::{wait, CHECK_INTERVAL};

/// The most connections at a time whose other side has the token.
const MAX_CONNECTIONS: usize = 64;
/// The most connections at a time that are not logged in. Each of them ends soon.
const MAX_LOGINS: usize = 64;

/// The numbers of connections.
#[derive(Debug, Default)]
struct Counts {
    logins: AtomicUsize,
    connections: AtomicUsize,
}

/// Counts a connection until it is dropped.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    /// Returns `None` if the number has reached the limit.
    fn new(count: &'a AtomicUsize, most: usize) -> Option<Self> {
        let counted = Self(count);
        (count.fetch_add(1, Ordering::Relaxed) < most).then_some(counted)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves connections until [`Node::shut_down`], or until `sessions` sessions have ended. Sessions that run at a shutdown end
/// within their next step.
///
/// # Errors
///
/// The listener fails.
pub fn serve(
    node: &Arc<Node>,
    listener: &TcpListener,
    token: &Token,
    ports: &[Port],
    sessions: Option<u64>,
) -> io::Result<()> {
    let counts = Counts::default();
    thread::scope(|scope| {
        let result = accept(scope, node, listener, token, ports, sessions, &counts);
        if result.is_err() {
            node.shut_down();
        }
        result
    })
}

fn accept<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    node: &'scope Arc<Node>,
    listener: &TcpListener,
    token: &'scope Token,
    ports: &'scope [Port],
    sessions: Option<u64>,
    counts: &'scope Counts,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    while !node.is_stopping() && sessions.is_none_or(|most| node.ended_sessions() < most) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(&[listener.as_fd()], CHECK_INTERVAL)?;
                continue;
            }
            // The other side was gone before it was accepted, or a limit was reached for a moment.
            Err(error) => {
                eprintln!("p2pmem-recorder: accepting a connection failed: {error}");
                wait(&[], CHECK_INTERVAL)?;
                continue;
            }
        };
        // The connection ends if the node has too many of them, or cannot start a thread.
        let Some(login) = Counted::new(&counts.logins, MAX_LOGINS) else {
            continue;
        };
        let thread = thread::Builder::new().spawn_scoped(scope, move || {
            let peer = stream
                .peer_addr()
                .map_or_else(|_| "unknown".into(), |address| address.to_string());
            if let Err(error) = converse(node, stream, token, ports, login, counts) {
                eprintln!("p2pmem-recorder: {peer}: {}", reason(&error));
            }
        });
        if let Err(error) = thread {
            eprintln!("p2pmem-recorder: starting a thread failed: {error}");
        }
    }
    Ok(())
}

/// Serves one connection to its end.
fn converse(
    node: &Arc<Node>,
    stream: TcpStream,
    token: &Token,
    ports: &[Port],
    login: Counted<'_>,
    counts: &Counts,
) -> Result<()> {
    stream.set_nonblocking(false)?;
    let limit = node.options().timeout;
    let mut connection = Connection::new(stream, LOGIN_LIMIT.min(limit))?;
    let welcome = connection.welcome(token, &node.options().name);
    drop(login);
    let result = welcome.map_err(anyhow::Error::from).and_then(|peer| {
        connection.set_limit(limit)?;
        let counted = Counted::new(&counts.connections, MAX_CONNECTIONS);
        let _counted =
            counted.with_context(|| format!("the node has {MAX_CONNECTIONS} connections, which is the limit"))?;
        handle(node, &mut connection, &peer, ports)
    });
    match result {
        Ok(Some(ended)) => Ok(connection.send(&Reply::Finished { blocks: ended.blocks })?),
        Ok(None) => Ok(()),
        Err(error) => {
            connection.fail(&reason(&error));
            Err(error)
        }
    }
}

/// Receives a request, as long as the node does not shut down.
fn receive(node: &Node, connection: &mut Connection) -> Result<Request> {
    let deadline = Instant::now() + node.options().timeout;
    loop {
        if let Some(request) = connection.try_receive()? {
            return Ok(request);
        }
        ensure!(!node.is_stopping(), "the node shuts down");
        ensure!(
            Instant::now() < deadline,
            "no request arrived within {:?}",
            node.options().timeout
        );
        wait(&[connection.as_fd()], CHECK_INTERVAL)?;
    }
}

fn handle(node: &Arc<Node>, connection: &mut Connection, peer: &str, ports: &[Port]) -> Result<Option<Ended>> {
    let port = |number: u32| {
        ports
            .get(number as usize)
            .with_context(|| format!("the node has {} NICs, and there is no number {number}", ports.len()))
    };
    loop {
        match receive(node, connection)? {
            Request::List => list(node, connection)?,
            Request::Record(request) => {
                return record::record(node, connection, peer, port(request.port)?, &request).map(Some)
            }
            Request::Play(request) => {
                return play::play(node, connection, peer, port(request.port)?, &request).map(Some)
            }
            Request::Finish => return Ok(None),
            other => return Err(unexpected(&other).into()),
        }
    }
}

fn list(node: &Node, connection: &mut Connection) -> Result<()> {
    for listed in ListedChannel::of(node.luns()) {
        let (channels, last) = (vec![listed], false);
        connection.send(&Reply::Listing { channels, last })?;
    }
    let (channels, last) = (Vec::new(), true);
    connection.send(&Reply::Listing { channels, last })?;
    Ok(())
}
