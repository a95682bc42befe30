// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA by message: the connection to the client, one request at a time, and the order of its users.

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tracing::{debug, warn};
use zerocopy::{FromBytes, IntoBytes};

use super::{Dma, DmaError};
use crate::proto::{self, DmaAccess, HEADER, Header, command, message};
use crate::stream;

/// Most bytes in one message; longer replies have been seen to break the client.
const MESSAGE_CHUNK: u64 = 64 << 10;
/// How long a message may take from being wanted to being answered.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Outstanding {
    id: u16,
    reply: Option<(Header, Vec<u8>)>,
}

/// The connection to the client, shared by the serving thread and the threads that do DMA.
#[derive(Debug, Default)]
pub(super) struct Link {
    stream: Option<Arc<UnixStream>>,
    server: Option<ThreadId>,
    /// A command of the client is being carried out and not answered yet.
    busy: bool,
    outstanding: Option<Outstanding>,
    next_id: u16,
    max_transfer: u64,
}

impl Dma {
    pub(super) fn link(&self) -> MutexGuard<'_, Link> {
        self.shared.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn message_chunk(&self) -> u64 {
        MESSAGE_CHUNK.min(self.link().max_transfer).max(1)
    }

    pub(super) fn message_read(&self, address: u64, data: &mut [u8]) -> Result<(), DmaError> {
        let access = DmaAccess {
            address,
            count: data.len() as u64,
        };
        let reply = self.request(command::DMA_READ, address, &[access.as_bytes()])?;
        match DmaAccess::read_from_prefix(&reply) {
            Ok((got, bytes)) if got.count == access.count && bytes.len() == data.len() => {
                data.copy_from_slice(bytes);
                Ok(())
            }
            _ => Err(DmaError::Failed(address, Errno::PROTO.raw_os_error())),
        }
    }

    pub(super) fn message_write(&self, address: u64, data: &[u8]) -> Result<(), DmaError> {
        let access = DmaAccess {
            address,
            count: data.len() as u64,
        };
        self.request(command::DMA_WRITE, address, &[access.as_bytes(), data])
            .map(drop)
    }

    /// Sends a command to the client and waits for its reply, whose body is returned.
    fn request(&self, command: u16, address: u64, parts: &[&[u8]]) -> Result<Vec<u8>, DmaError> {
        let epoch = self.epoch();
        let deadline = Instant::now() + MESSAGE_TIMEOUT;
        let mut link = self.link();
        if link.server == Some(std::thread::current().id()) {
            return Err(DmaError::WrongThread);
        }
        while link.busy || link.outstanding.is_some() {
            link = self.wait(link, epoch, deadline, address)?;
        }
        self.check_alive(&link, epoch)?;
        let Some(stream) = link.stream.clone() else {
            return Err(DmaError::Disconnected);
        };
        let id = link.next_id;
        link.next_id = link.next_id.wrapping_add(1);
        let bytes = proto::encode(
            Header {
                id,
                command,
                ..Header::default()
            },
            parts,
        );
        // Sent with the lock held: the serving thread then cannot begin with a command in between.
        if let Err(error) = stream::send(&stream, &bytes, &[]) {
            warn!(%error, "a DMA message cannot be sent");
            // The client may have got half a message, after which it could understand no other.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return Err(DmaError::Disconnected);
        }
        link.outstanding = Some(Outstanding { id, reply: None });
        loop {
            match &mut link.outstanding {
                Some(mine) if mine.id == id => {
                    if let Some((header, body)) = mine.reply.take() {
                        link.outstanding = None;
                        drop(link);
                        self.shared.changed.notify_all();
                        return check_reply(&header, body, address);
                    }
                }
                _ => return Err(DmaError::Disconnected),
            }
            link = match self.wait(link, epoch, deadline, address) {
                Ok(link) => link,
                Err(error) => {
                    // A reply that comes later is of nobody's interest.
                    let mut link = self.link();
                    if link.outstanding.as_ref().is_some_and(|mine| mine.id == id) {
                        link.outstanding = None;
                    }
                    drop(link);
                    self.shared.changed.notify_all();
                    return Err(error);
                }
            };
        }
    }

    fn check_alive(&self, link: &Link, epoch: u64) -> Result<(), DmaError> {
        if self.shared.epoch.load(Ordering::SeqCst) != epoch {
            return Err(DmaError::Aborted);
        }
        if link.stream.is_none() {
            return Err(DmaError::Disconnected);
        }
        Ok(())
    }

    fn wait<'a>(
        &'a self,
        link: MutexGuard<'a, Link>,
        epoch: u64,
        deadline: Instant,
        address: u64,
    ) -> Result<MutexGuard<'a, Link>, DmaError> {
        self.check_alive(&link, epoch)?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            warn!(address = format_args!("{address:#x}"), "no answer to a DMA message");
            return Err(DmaError::Timeout(address));
        }
        let (link, _) = self
            .shared
            .changed
            .wait_timeout(link, left)
            .unwrap_or_else(PoisonError::into_inner);
        self.check_alive(&link, epoch)?;
        Ok(link)
    }

    /// A client is there; this thread serves it.
    pub(crate) fn connect(&self, stream: Arc<UnixStream>) {
        let mut link = self.link();
        link.stream = Some(stream);
        link.server = Some(std::thread::current().id());
        link.busy = false;
        link.outstanding = None;
        link.max_transfer = proto::DEFAULT_TRANSFER;
    }

    /// Ends the connection from this side; the serving thread then sees its end.
    pub(crate) fn sever(&self) {
        if let Some(stream) = &self.link().stream {
            // Fails only if the client was faster.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// The client is gone; what waits for it fails.
    pub(super) fn hang_up(&self) {
        *self.link() = Link::default();
        self.shared.changed.notify_all();
    }

    pub(crate) fn set_max_transfer(&self, bytes: u64) {
        self.link().max_transfer = bytes;
    }

    /// From now until the value returned is dropped, no message goes to the client but the serving thread's own.
    pub(crate) fn hold(&self) -> Hold<'_> {
        self.link().busy = true;
        Hold(self)
    }

    /// A reply has arrived.
    pub(crate) fn deliver(&self, header: Header, body: Vec<u8>) {
        let mut link = self.link();
        match &mut link.outstanding {
            Some(waiting) if waiting.id == header.id => waiting.reply = Some((header, body)),
            _ => debug!(id = header.id, "a reply nobody waits for"),
        }
        drop(link);
        self.shared.changed.notify_all();
    }
}

/// Lets messages go out again when dropped.
pub(crate) struct Hold<'a>(&'a Dma);

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.link().busy = false;
        self.0.shared.changed.notify_all();
    }
}

fn check_reply(header: &Header, body: Vec<u8>, address: u64) -> Result<Vec<u8>, DmaError> {
    if header.flags & message::ERROR == 0 {
        return Ok(body);
    }
    let errno = i32::try_from(header.error).unwrap_or(i32::MAX);
    Err(match Errno::from_raw_os_error(errno.clamp(1, 4095)) {
        Errno::NODEV | Errno::FAULT | Errno::NXIO => DmaError::Unreachable(address),
        Errno::PERM | Errno::ACCESS => DmaError::Denied(address),
        _ => DmaError::Failed(address, errno),
    })
}

const _: () = assert!(HEADER + size_of::<DmaAccess>() + MESSAGE_CHUNK as usize <= proto::MAX_MESSAGE);
