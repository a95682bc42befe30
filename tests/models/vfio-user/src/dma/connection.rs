// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA by message: the requests to the client, one at a time, and their order with the commands of the client.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tracing::{debug, warn};
use zerocopy::{FromBytes, IntoBytes};

use super::{Dma, DmaError, Epoch};
use crate::proto::{self, DmaAccess, HEADER, Header, command, message};
use crate::stream;

/// Maximum number of bytes in one DMA message. QEMU closes the connection on replies longer than about 200 KiB.
const MESSAGE_CHUNK: u64 = 64 << 10;
/// Maximum time for a DMA message, from the request of the device to the reply.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// A request that was sent to the client and waits for the reply.
#[derive(Debug)]
struct Outstanding {
    id: u16,
    reply: Option<(Header, Vec<u8>)>,
}

/// The connection to the client, shared by the serving thread and the threads that do DMA.
#[derive(Debug, Default)]
pub(super) struct Connection {
    stream: Option<Arc<UnixStream>>,
    serving_thread: Option<ThreadId>,
    /// The serving thread executes a command of the client and has not replied yet.
    command_in_progress: bool,
    outstanding: Option<Outstanding>,
    next_id: u16,
    /// The client's `max_data_xfer_size`.
    max_transfer: u64,
}

impl Dma {
    pub(super) fn connection(&self) -> MutexGuard<'_, Connection> {
        self.shared.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn message_chunk(&self) -> u64 {
        MESSAGE_CHUNK.min(self.connection().max_transfer).max(1)
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

    /// Sends a command to the client, waits for the reply, and returns its body.
    fn request(&self, command: u16, address: u64, parts: &[&[u8]]) -> Result<Vec<u8>, DmaError> {
        let epoch = self.epoch();
        let deadline = Instant::now() + MESSAGE_TIMEOUT;
        let mut connection = self.connection();
        if connection.serving_thread == Some(std::thread::current().id()) {
            return Err(DmaError::WrongThread);
        }
        while connection.command_in_progress || connection.outstanding.is_some() {
            connection = self.wait(connection, epoch, deadline, address)?;
        }
        self.check_connected(&connection, epoch)?;
        let Some(stream) = connection.stream.clone() else {
            return Err(DmaError::Disconnected);
        };
        let id = connection.next_id;
        connection.next_id = connection.next_id.wrapping_add(1);
        let bytes = proto::encode(
            Header {
                id,
                command,
                ..Header::default()
            },
            parts,
        );
        // Sent with the lock held, so the serving thread cannot start a command in between.
        if let Err(error) = stream::send(&stream, &bytes, &[]) {
            warn!(%error, "cannot send a DMA message; closing the connection");
            // Part of the message may have been sent. The client could not parse a message after it.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return Err(DmaError::Disconnected);
        }
        connection.outstanding = Some(Outstanding { id, reply: None });
        loop {
            match &mut connection.outstanding {
                Some(request) if request.id == id => {
                    if let Some((header, body)) = request.reply.take() {
                        connection.outstanding = None;
                        drop(connection);
                        self.shared.connection_changed.notify_all();
                        return check_reply(&header, body, address);
                    }
                }
                _ => return Err(DmaError::Disconnected),
            }
            connection = match self.wait(connection, epoch, deadline, address) {
                Ok(connection) => connection,
                Err(error) => {
                    // A late reply is ignored.
                    let mut connection = self.connection();
                    if connection.outstanding.as_ref().is_some_and(|request| request.id == id) {
                        connection.outstanding = None;
                    }
                    drop(connection);
                    self.shared.connection_changed.notify_all();
                    return Err(error);
                }
            };
        }
    }

    /// Fails if the transfer was aborted after `epoch`, or if no client is connected.
    fn check_connected(&self, connection: &Connection, epoch: Epoch) -> Result<(), DmaError> {
        if self.current_epoch() != epoch {
            return Err(DmaError::Aborted);
        }
        if connection.stream.is_none() {
            return Err(DmaError::Disconnected);
        }
        Ok(())
    }

    /// Waits until the connection changes. Fails with [`DmaError::Timeout`] after `deadline`, and as
    /// [`Dma::check_connected`] does.
    fn wait<'a>(
        &'a self,
        connection: MutexGuard<'a, Connection>,
        epoch: Epoch,
        deadline: Instant,
        address: u64,
    ) -> Result<MutexGuard<'a, Connection>, DmaError> {
        self.check_connected(&connection, epoch)?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            warn!(
                address = format_args!("{address:#x}"),
                "timeout: no reply to a DMA message"
            );
            return Err(DmaError::Timeout(address));
        }
        let (connection, _) = self
            .shared
            .connection_changed
            .wait_timeout(connection, left)
            .unwrap_or_else(PoisonError::into_inner);
        self.check_connected(&connection, epoch)?;
        Ok(connection)
    }

    /// A client has connected; the calling thread serves it.
    pub(crate) fn connect(&self, stream: Arc<UnixStream>) {
        let mut connection = self.connection();
        connection.stream = Some(stream);
        connection.serving_thread = Some(std::thread::current().id());
        connection.command_in_progress = false;
        connection.outstanding = None;
        connection.max_transfer = proto::DEFAULT_TRANSFER;
    }

    /// Shuts the socket down. The serving thread then sees the end of the stream.
    pub(crate) fn shutdown(&self) {
        if let Some(stream) = &self.connection().stream {
            // Fails only if the client has closed the connection already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// The client has disconnected; requests that wait for a reply fail.
    pub(super) fn close_connection(&self) {
        *self.connection() = Connection::default();
        self.shared.connection_changed.notify_all();
    }

    pub(crate) fn set_max_transfer(&self, bytes: u64) {
        self.connection().max_transfer = bytes;
    }

    /// Blocks DMA messages until the returned guard is dropped, while the serving thread executes a command.
    pub(crate) fn begin_command(&self) -> CommandInProgress<'_> {
        self.connection().command_in_progress = true;
        CommandInProgress(self)
    }

    /// Passes a reply to the thread that waits for it.
    pub(crate) fn deliver(&self, header: Header, body: Vec<u8>) {
        let mut connection = self.connection();
        match &mut connection.outstanding {
            Some(request) if request.id == header.id => request.reply = Some((header, body)),
            _ => debug!(id = header.id, "ignored a reply without an outstanding request"),
        }
        drop(connection);
        self.shared.connection_changed.notify_all();
    }
}

/// Blocks DMA messages until it is dropped. See [`Dma::begin_command`].
pub(crate) struct CommandInProgress<'a>(&'a Dma);

impl Drop for CommandInProgress<'_> {
    fn drop(&mut self) {
        self.0.connection().command_in_progress = false;
        self.0.shared.connection_changed.notify_all();
    }
}

/// Returns the body of a reply, or the error that an error reply stands for.
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
