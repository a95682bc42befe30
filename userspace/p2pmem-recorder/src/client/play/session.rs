// SPDX-License-Identifier: MIT OR Apache-2.0

//! The session with one storage node during a playback.

use anyhow::Result;
use p2pmem_verbs::{Access, Remote, Request as WorkRequest, Work};

use crate::client::compute::Compute;
use crate::client::link::Link;
use crate::client::SessionRequest;
use crate::control::message::Message;
use crate::control::{unexpected, Play, Reply, Request, Start, Window};
use crate::rdma::{id, Kind};

/// What a node plays.
#[derive(Debug, Clone, Copy)]
pub(super) struct Selection {
    /// The number of the recording; `None` for the latest one.
    pub recording: Option<u64>,
    /// Where playback starts.
    pub start: Start,
    /// The most blocks; `None` for all.
    pub blocks: Option<u64>,
    /// Whether playback starts again after the last block.
    pub repeat: bool,
    /// The most bytes in a second.
    pub rate: Option<u64>,
}

/// The session with one storage node.
pub(super) struct Session {
    pub link: Link,
    /// The number of the recording.
    pub recording: u64,
    /// The memory that the node chose.
    pub memory: String,
    window: Window,
    /// The number of the node's buffers.
    pub credits: u32,
    block_size: u64,
    /// Blocks that are being read.
    pub reading: u32,
}

impl Session {
    /// Connects, and lets the node begin.
    ///
    /// # Errors
    ///
    /// The node cannot be reached, or refuses the session.
    pub(super) fn start(request: &SessionRequest, selection: Selection, compute: &dyn Compute) -> Result<Self> {
        let (buffers, block_size) = (compute.buffers(), compute.block_size());
        let mut link = Link::open(request, compute, Access::LOCAL_WRITE)?;
        link.connection.send(&Request::Play(Play {
            channel: request.channel.clone(),
            port: request.port,
            recording: selection.recording,
            start: selection.start,
            blocks: selection.blocks,
            repeat: selection.repeat,
            rate: selection.rate,
            block_size,
            address: link.endpoint.address(),
            buffers,
        }))?;
        let (recording, address, window, credits, memory) = match link.connection.receive_reply()? {
            Reply::PlayReady {
                recording,
                address,
                window,
                credits,
                memory,
                ..
            } => (recording, address, window, credits, memory),
            other => return Err(unexpected(&other).into()),
        };
        // The node announces a buffer again only after its release, so there are never more messages than credits.
        link.connect(&address, credits, buffers)?;
        link.connection.send(&Request::Ready)?;
        Ok(Self {
            link,
            recording,
            memory,
            window,
            credits,
            block_size,
            reading: 0,
        })
    }

    /// Starts to read a buffer of the node to a buffer of the accelerator.
    pub(super) fn read(&mut self, remote: u32, buffer: u32) -> Result<()> {
        self.link.endpoint.post(&[WorkRequest {
            id: id(Kind::Payload, buffer),
            local: self.link.registered.segment(buffer, self.block_size),
            work: Work::Read(Remote {
                address: self.window.address + u64::from(remote) * self.block_size,
                rkey: self.window.rkey,
            }),
            signaled: true,
        }])?;
        self.reading += 1;
        Ok(())
    }

    /// Gives a buffer back to the node.
    pub(super) fn release(&self, remote: u32) -> Result<()> {
        let endpoint = &self.link.endpoint;
        let released = Message::Released { buffer: remote };
        // The place of the message has the number of the node's buffer, which is not announced again before the release.
        endpoint.post(&[endpoint.message(remote, &released, true)])
    }
}
