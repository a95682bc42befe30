// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves the control connections of a node: each has a thread, and at most one session.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use p2pmem::{Client, Device};
use p2pmem_verbs::Nic;

use super::status::MemoryKind;
use super::{play, record, Node};
use crate::control::{unexpected, ChannelRequest, Connection, ListedChannel, Reply, Request, Token, MAX_LISTED};
use crate::memory::{drives_of, BlockMemory};
use crate::rdma::{open_nic, wait, MAX_BLOCK};
use crate::store::ChannelName;

/// The most connections at a time.
const MAX_CONNECTIONS: usize = 64;
/// The most time between two looks at what has no event, such as a request to stop.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// A NIC of the node.
#[derive(Debug, Clone)]
pub struct Port {
    pub(super) nic: Arc<Nic>,
    pub(super) client: Client,
    pub(super) gid_index: u8,
}

impl Port {
    /// Opens a NIC by its name. `gid_index` selects the entry of the port's GID table.
    ///
    /// # Errors
    ///
    /// There is no such RDMA device, or it has no PCI function.
    pub fn open(name: &str, gid_index: u8) -> Result<Self> {
        Ok(Self {
            nic: open_nic(name)?,
            client: Client::resolve(name)?,
            gid_index,
        })
    }
}

/// What a session achieved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) blocks: u64,
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
    listener.set_nonblocking(true)?;
    let open = AtomicUsize::new(0);
    thread::scope(|scope| {
        while !node.is_stopping() && sessions.is_none_or(|most| node.sessions.ended() < most) {
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
    let mut connection = Connection::new(stream, node.options.timeout)?;
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
    let peer = connection.welcome(token, &node.options.name)?;
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

impl Node {
    /// Returns the bytes of a block of the stream, which must be those that the other side has.
    pub(super) fn check_block_size(&self, name: &ChannelName, block_size: u64) -> Result<u64> {
        let streams = self.store.streams(&name.lun)?;
        let stream = streams.iter().find(|stream| stream.name == name.stream);
        let stream = stream.with_context(|| format!("there is no stream {}/{}", name.lun, name.stream))?;
        ensure!(
            stream.block_size == block_size,
            "stream {}/{} has blocks of {} bytes, not {block_size}",
            name.lun,
            name.stream,
            stream.block_size
        );
        ensure!(
            block_size <= MAX_BLOCK,
            "blocks of {block_size} bytes cannot be sent; a block has at most {MAX_BLOCK} bytes"
        );
        Ok(block_size)
    }

    /// Allocates the buffers of a session: device memory near the NIC and the drives of the LUN, or host memory if the
    /// administrator asked for it.
    pub(super) fn memory_for(
        &self,
        name: &ChannelName,
        port: &Port,
        block_size: u64,
        buffers: u32,
    ) -> Result<BlockMemory> {
        let count = buffers as usize;
        if self.options.memory == MemoryKind::Host {
            return Ok(BlockMemory::host(block_size, count)?);
        }
        let mut clients = vec![port.client.clone()];
        for (folder, _) in self.store.lun(&name.lun)?.drives {
            for client in drives_of(&folder)? {
                if !clients.contains(&client) {
                    clients.push(client);
                }
            }
        }
        let names: Vec<String> = clients.iter().map(|client| client.name().to_owned()).collect();
        let device = Device::open()?;
        let memory = BlockMemory::near(&device, clients, None, block_size, count);
        memory.with_context(|| {
            format!(
                "allocating {count} buffers of {block_size} bytes near {}; --memory host uses host memory instead",
                names.join(", ")
            )
        })
    }

    /// Describes the memory of a session for people.
    pub(super) fn describe_memory(&self, blocks: &BlockMemory) -> String {
        match (blocks.provider(), blocks.buffer()) {
            (Some(provider), Some(buffer)) => {
                let path = buffer
                    .class()
                    .map(|class| format!(", path to the farthest device: {class}"));
                format!("{}{}", provider.addr, path.unwrap_or_default())
            }
            (None, Some(buffer)) => format!("provider {}", buffer.provider()),
            _ => "host memory".into(),
        }
    }
}
