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

use anyhow::{Context, Result};

pub use setup::Port;
use setup::{Ended, CHECK_INTERVAL};

use crate::control::{unexpected, ChannelRequest, Connection, ListedChannel, Reply, Request, Token, MAX_LISTED};
use crate::node::Node;
use crate::rdma::wait;

/// The most connections at a time.
const MAX_CONNECTIONS: usize = 64;
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
    listener.set_nonblocking(true)?;
    let open = AtomicUsize::new(0);
    thread::scope(|scope| {
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
            if open.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
                open.fetch_sub(1, Ordering::Relaxed);
                refuse(stream);
                continue;
            }
            let open = &open;
            scope.spawn(move || {
                let peer = stream
                    .peer_addr()
                    .map_or_else(|_| "unknown".into(), |address| address.to_string());
                if let Err(error) = converse(node, stream, token, ports) {
                    eprintln!("p2pmem-recorder: {peer}: {error:#}");
                }
                open.fetch_sub(1, Ordering::Relaxed);
            });
        }
        Ok(())
    })
}

fn refuse(stream: TcpStream) {
    if let Ok(mut connection) = Connection::new(stream, CHECK_INTERVAL) {
        let reason = format!("the node has {MAX_CONNECTIONS} connections, which is the limit");
        // The other side sees the end of the connection if it does not get the reason.
        let _ = connection.send(&Reply::Failed { reason });
    }
}

/// Serves one connection to its end.
fn converse(node: &Arc<Node>, stream: TcpStream, token: &Token, ports: &[Port]) -> Result<()> {
    stream.set_nonblocking(false)?;
    let mut connection = Connection::new(stream, node.options().timeout)?;
    let result = handle(node, &mut connection, token, ports);
    let reply = match &result {
        Ok(None) => return Ok(()),
        Ok(Some(ended)) => Reply::Finished { blocks: ended.blocks },
        Err(error) => Reply::Failed {
            reason: format!("{error:#}"),
        },
    };
    let sent = connection.send(&reply);
    result?;
    Ok(sent?)
}

fn handle(node: &Arc<Node>, connection: &mut Connection, token: &Token, ports: &[Port]) -> Result<Option<Ended>> {
    let peer = connection.welcome(token, &node.options().name)?;
    let port = |number: u32| {
        ports
            .get(number as usize)
            .with_context(|| format!("the node has {} NICs, and there is no number {number}", ports.len()))
    };
    loop {
        match connection.receive::<Request>()? {
            Request::List => list(node, connection)?,
            Request::Record(request) => {
                return record::record(node, connection, &peer, port(request.port)?, &request).map(Some)
            }
            Request::Play(request) => {
                return play::play(node, connection, &peer, port(request.port)?, &request).map(Some)
            }
            Request::Finish => return Ok(None),
            other => return Err(unexpected(&other).into()),
        }
    }
}

fn list(node: &Node, connection: &mut Connection) -> Result<()> {
    for lun in node.luns() {
        for stream in lun.streams {
            for channel in stream.channels {
                let skipped = channel.recordings.len().saturating_sub(MAX_LISTED);
                let listed = ListedChannel {
                    channel: ChannelRequest {
                        lun: lun.name.clone(),
                        stream: stream.name.clone(),
                        channel: channel.number,
                    },
                    block_size: stream.block_size,
                    recordings: channel.recordings.into_iter().skip(skipped).collect(),
                };
                let (channels, last) = (vec![listed], false);
                connection.send(&Reply::Listing { channels, last })?;
            }
        }
    }
    let (channels, last) = (Vec::new(), true);
    connection.send(&Reply::Listing { channels, last })?;
    Ok(())
}
