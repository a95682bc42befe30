// SPDX-License-Identifier: MIT OR Apache-2.0

//! A small client of the protocol, to test devices without QEMU.
//!
//! While the client waits for a reply, it replies to the server's DMA messages by a function that the test sets, as
//! QEMU does from its memory. Each wait ends after the read timeout of the stream, [`REPLY_TIMEOUT`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use zerocopy::{FromBytes, IntoBytes};

use crate::proto::{self, DmaAccess, Header, command, message};
use crate::stream::{self, Message, ReceiveError};

/// Maximum time to wait for a reply.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server sent an error reply with this errno.
    #[error("the server refused the command with errno {0}")]
    Refused(u32),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server sent a message that is not a valid reply.
    #[error("the server sent an invalid reply: {0}")]
    Protocol(&'static str),
    /// The socket failed, or a wait timed out.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A reply.
#[derive(Debug)]
pub struct Reply {
    /// The bytes after the header.
    pub body: Vec<u8>,
    /// The file descriptors of the message.
    pub fds: Vec<OwnedFd>,
}

/// Executes a DMA access of the device: bus address, data, and whether the device writes. A read fills in the data. An
/// error is an errno.
pub type BusHandler = Box<dyn FnMut(u64, &mut [u8], bool) -> Result<(), u32> + Send>;

/// A client.
pub struct Client {
    stream: UnixStream,
    next_id: u16,
    bus: BusHandler,
}

impl Client {
    /// A client on a connected socket. DMA accesses fail with `ENODEV`, see [`Client::set_bus`].
    ///
    /// # Errors
    ///
    /// Those of setting the timeouts.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        Ok(Self {
            stream,
            next_id: 0,
            bus: Box::new(|_, _, _| Err(rustix::io::Errno::NODEV.raw_os_error() as u32)),
        })
    }

    /// Executes the device's DMA messages by `bus` from now on.
    pub fn set_bus(&mut self, bus: BusHandler) {
        self.bus = bus;
    }

    /// The socket, to send invalid messages.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a command and returns its message ID. Does not wait for the reply.
    ///
    /// # Errors
    ///
    /// Those of the socket.
    pub fn send(&mut self, command: u16, flags: u32, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> io::Result<u16> {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let header = Header {
            id,
            command,
            flags,
            ..Header::default()
        };
        stream::send(&self.stream, &proto::encode(header, parts), fds)?;
        Ok(id)
    }

    /// Sends a command and waits for the reply.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn request(&mut self, command: u16, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> Result<Reply, ClientError> {
        let id = self.send(command, 0, parts, fds)?;
        self.answer(id, command)
    }

    /// Waits for the reply to the command with this message ID.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn answer(&mut self, id: u16, command: u16) -> Result<Reply, ClientError> {
        loop {
            let Message { header, body, fds, .. } = self.receive()?;
            if header.flags & message::TYPE == 0 {
                self.serve_dma(&header, body)?;
                continue;
            }
            if (header.id, header.command) != (id, command) {
                return Err(ClientError::Protocol("reply to another command"));
            }
            if header.flags & message::ERROR != 0 {
                return Err(ClientError::Refused(header.error));
            }
            return Ok(Reply { body, fds });
        }
    }

    fn receive(&mut self) -> Result<Message, ClientError> {
        match stream::receive(&self.stream) {
            Ok(message) => Ok(message),
            Err(ReceiveError::Closed) => Err(ClientError::Closed),
            Err(ReceiveError::Io(error)) => Err(error.into()),
            Err(_) => Err(ClientError::Protocol("message with an invalid size, or incomplete")),
        }
    }

    fn serve_dma(&mut self, header: &Header, mut body: Vec<u8>) -> Result<(), ClientError> {
        let head = size_of::<DmaAccess>();
        let (access, data) =
            DmaAccess::read_from_prefix(&body).map_err(|_| ClientError::Protocol("DMA message is too short"))?;
        let count = usize::try_from(access.count).map_err(|_| ClientError::Protocol("DMA message is too long"))?;
        let write = header.command == command::DMA_WRITE;
        if write && data.len() != count || count > proto::MAX_TRANSFER {
            return Err(ClientError::Protocol("DMA message has the wrong length"));
        }
        body.resize(head + count, 0);
        let mut reply = Header {
            flags: message::REPLY,
            ..*header
        };
        let bytes = match (self.bus)(access.address, &mut body[head..], write) {
            Ok(()) if write => proto::encode(reply, &[]),
            Ok(()) => proto::encode(reply, &[&body]),
            Err(errno) => {
                reply.flags |= message::ERROR;
                reply.error = errno;
                proto::encode(reply, &[])
            }
        };
        Ok(stream::send(&self.stream, &bytes, &[])?)
    }

    /// Negotiates the protocol version, and returns the server's version data.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn version(&mut self) -> Result<serde_json::Value, ClientError> {
        let json = b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576}}\0";
        let version = proto::Version { major: 0, minor: 0 };
        let reply = self.request(command::VERSION, &[version.as_bytes(), json], &[])?;
        let json = reply.body.get(4..).and_then(|json| json.strip_suffix(&[0]));
        json.and_then(|json| serde_json::from_slice(json).ok())
            .ok_or(ClientError::Protocol("VERSION reply has no capabilities"))
    }

    /// Gets region information: the structure, the bytes of its capabilities, and the file descriptors.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn region_info(&mut self, index: u32) -> Result<(proto::RegionInfo, Vec<u8>, Vec<OwnedFd>), ClientError> {
        let request = proto::RegionInfo {
            argsz: 4096,
            index,
            ..Default::default()
        };
        let Reply { body, fds } = self.request(command::DEVICE_GET_REGION_INFO, &[request.as_bytes()], &[])?;
        let (info, rest) =
            proto::RegionInfo::read_from_prefix(&body).map_err(|_| ClientError::Protocol("reply is too short"))?;
        Ok((info, rest.to_vec(), fds))
    }

    /// Reads from a region.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), ClientError> {
        let count = u32::try_from(data.len()).map_err(|_| ClientError::Protocol("access has 4 GiB or more"))?;
        let access = proto::RegionAccess { offset, region, count };
        let reply = self.request(command::REGION_READ, &[access.as_bytes()], &[])?;
        match reply.body.get(size_of::<proto::RegionAccess>()..) {
            Some(bytes) if bytes.len() == data.len() => {
                data.copy_from_slice(bytes);
                Ok(())
            }
            _ => Err(ClientError::Protocol("REGION_READ reply has the wrong length")),
        }
    }

    /// Reads a u32 from a region.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn read32(&mut self, region: u32, offset: u64) -> Result<u32, ClientError> {
        let mut data = [0; 4];
        self.read(region, offset, &mut data)?;
        Ok(u32::from_le_bytes(data))
    }

    /// Reads a u64 from a region.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn read64(&mut self, region: u32, offset: u64) -> Result<u64, ClientError> {
        let mut data = [0; 8];
        self.read(region, offset, &mut data)?;
        Ok(u64::from_le_bytes(data))
    }

    /// Writes to a region.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let count = u32::try_from(data.len()).map_err(|_| ClientError::Protocol("access has 4 GiB or more"))?;
        let access = proto::RegionAccess { offset, region, count };
        self.request(command::REGION_WRITE, &[access.as_bytes(), data], &[])
            .map(drop)
    }

    /// Maps a range of bus addresses, with the file descriptor and offset of its memory if there is one.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn dma_map(
        &mut self,
        address: u64,
        size: u64,
        memory: Option<(BorrowedFd<'_>, u64)>,
    ) -> Result<(), ClientError> {
        let flags = proto::DMA_READABLE | proto::DMA_WRITABLE;
        let offset = memory.map_or(0, |(_, offset)| offset);
        let request = proto::DmaMap {
            argsz: size_of::<proto::DmaMap>() as u32,
            flags,
            offset,
            address,
            size,
        };
        let fd = memory.map(|(fd, _)| fd);
        self.request(command::DMA_MAP, &[request.as_bytes()], fd.as_slice())
            .map(drop)
    }

    /// Unmaps a range of bus addresses.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn dma_unmap(&mut self, address: u64, size: u64) -> Result<(), ClientError> {
        let request = proto::DmaUnmap {
            argsz: size_of::<proto::DmaUnmap>() as u32,
            flags: 0,
            address,
            size,
        };
        self.request(command::DMA_UNMAP, &[request.as_bytes()], &[]).map(drop)
    }

    /// Sends a DEVICE_SET_IRQS for MSI-X.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn set_irqs(
        &mut self,
        flags: u32,
        start: u32,
        count: u32,
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let argsz = (size_of::<proto::IrqSet>() + data.len()) as u32;
        let request = proto::IrqSet {
            argsz,
            flags,
            index: proto::MSIX_IRQ,
            start,
            count,
        };
        self.request(command::DEVICE_SET_IRQS, &[request.as_bytes(), data], fds)
            .map(drop)
    }

    /// Sets the eventfds of the MSI-X vectors from `start` on.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn arm(&mut self, start: u32, eventfds: &[OwnedFd]) -> Result<(), ClientError> {
        let fds: Vec<BorrowedFd<'_>> = eventfds.iter().map(AsFd::as_fd).collect();
        let count = u32::try_from(fds.len()).map_err(|_| ClientError::Protocol("too many vectors"))?;
        self.set_irqs(
            proto::SET_DATA_EVENTFD | proto::SET_ACTION_TRIGGER,
            start,
            count,
            &[],
            &fds,
        )
    }

    /// Resets the device.
    ///
    /// # Errors
    ///
    /// See [`ClientError`].
    pub fn reset(&mut self) -> Result<(), ClientError> {
        self.request(command::DEVICE_RESET, &[], &[]).map(drop)
    }

    /// Reads a 32-bit register repeatedly until `done` is true of its value, for at most `timeout`.
    ///
    /// # Errors
    ///
    /// See [`ClientError`]; `TimedOut` if `done` was not true in time.
    pub fn poll32(
        &mut self,
        region: u32,
        offset: u64,
        timeout: Duration,
        mut done: impl FnMut(u32) -> bool,
    ) -> Result<u32, ClientError> {
        let deadline = Instant::now() + timeout;
        loop {
            let value = self.read32(region, offset)?;
            if done(value) {
                return Ok(value);
            }
            if Instant::now() > deadline {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
        }
    }
}
