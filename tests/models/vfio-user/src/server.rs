// SPDX-License-Identifier: MIT OR Apache-2.0

//! The server: executes the client's commands in order and replies to them.

use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use serde::Deserialize;
use tracing::{debug, info, warn};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::config::Msix;
use crate::device::{Bus, Device, Region};
use crate::dma::MAX_MAPS;
use crate::memory::Memory;
use crate::posted::PostedWrites;
use crate::proto::{self, Header, command, message};
use crate::stream::{self, Message, ReceiveError, STALL_TIMEOUT};

/// Why a connection ended, other than that the client closed it between messages.
#[derive(Debug, thiserror::Error)]
#[error("vfio-user connection failed: {0}")]
pub struct ServeError(String);

/// A UNIX domain socket that listens for clients. Dropping the listener removes the socket's file.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Listens at `path`. Replaces a socket on which no process listens any more; replaces no other file.
    ///
    /// # Errors
    ///
    /// Those of bind; `AddrInUse` if another process listens at `path` or the file is not a socket.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
        if is_socket && UnixStream::connect(path).is_err() {
            std::fs::remove_file(path)?;
        }
        Ok(Self {
            listener: UnixListener::bind(path)?,
            path: path.to_owned(),
        })
    }

    /// Waits for a client.
    ///
    /// # Errors
    ///
    /// Those of accept.
    pub fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.listener.accept()?.0)
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Fails if the file was removed already.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The JSON data of the client's VERSION message. A missing capability has the protocol's default.
#[derive(Debug, Default, Deserialize)]
struct ClientVersion {
    #[serde(default)]
    capabilities: ClientCapabilities,
}

#[derive(Debug, Default, Deserialize)]
struct ClientCapabilities {
    max_data_xfer_size: Option<u64>,
}

/// The reply to a command: the body, and the memory whose file descriptor is sent with it.
#[derive(Default)]
struct Reply {
    body: Vec<u8>,
    memory: Option<Arc<Memory>>,
}

impl From<Vec<u8>> for Reply {
    fn from(body: Vec<u8>) -> Self {
        Self { body, memory: None }
    }
}

/// Serves one client until it disconnects.
///
/// # Errors
///
/// [`ServeError`] if the connection breaks or the client sends a message that cannot be parsed. The device can be
/// served again in either case.
pub fn serve<D: Device + ?Sized>(stream: UnixStream, device: &mut D) -> Result<(), ServeError> {
    let stream = Arc::new(stream);
    // Without a limit, a client that does not read would block the device indefinitely.
    stream
        .set_write_timeout(Some(STALL_TIMEOUT))
        .map_err(|error| ServeError(error.to_string()))?;
    device.bus().dma.connect(Arc::clone(&stream));
    let guard = ConnectionGuard {
        bus: device.bus().clone(),
        stream: Arc::clone(&stream),
    };
    let mut session = Session {
        stream: &stream,
        device,
        negotiated: false,
        posted: PostedWrites::default(),
    };
    let result = session.run();
    session.posted.arrive();
    drop(guard);
    device.disconnected();
    result
}

/// Takes the device off the guest's bus when the connection ends, also if the device panics.
struct ConnectionGuard {
    bus: Bus,
    stream: Arc<UnixStream>,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.bus.set_bar_addresses(&[None; 6]);
        close(&self.stream);
        self.bus.dma.disconnect();
        self.bus.irqs.remove_all_eventfds();
    }
}

/// Closes a connection so that the client sees the end of the stream. Closing a socket that has unread data would reset
/// the connection, on which QEMU aborts if it waits for a reply.
fn close(mut stream: &UnixStream) {
    // Fails only if the client has closed the connection already.
    let _ = stream.shutdown(std::net::Shutdown::Both);
    let mut rest = [0; 4096];
    // Ends, because the client can send nothing after the shutdown.
    while matches!(stream.read(&mut rest), Ok(n) if n > 0) {}
}

struct Session<'a, D: ?Sized> {
    stream: &'a UnixStream,
    device: &'a mut D,
    negotiated: bool,
    /// Writes of the processor to delayed regions that have not arrived.
    posted: PostedWrites,
}

impl<D: Device + ?Sized> Session<'_, D> {
    fn run(&mut self) -> Result<(), ServeError> {
        self.apply_config();
        loop {
            let message = match stream::receive(self.stream) {
                Ok(message) => message,
                Err(ReceiveError::Closed) => {
                    info!("client disconnected");
                    return Ok(());
                }
                Err(ReceiveError::BadSize(header)) => {
                    // The start of the next message is unknown: report the error and end the connection.
                    self.send_reply(&header, Err(Errno::INVAL))
                        .map_err(|error| ServeError(error.to_string()))?;
                    return Err(ServeError(ReceiveError::BadSize(header).to_string()));
                }
                Err(error) => return Err(ServeError(error.to_string())),
            };
            if message.header.flags & message::TYPE == message::REPLY {
                self.device.bus().dma.deliver(message.header, message.body);
                continue;
            }
            let dma = self.device.bus().dma.clone();
            let in_progress = dma.begin_command();
            let header = message.header;
            let result = if header.flags & message::TYPE == 0 {
                self.handle(message)
            } else {
                Err(Errno::INVAL)
            };
            if let Err(error) = &result {
                warn!(command = header.command, size = header.size, flags = header.flags, %error, "command failed");
            }
            self.send_reply(&header, result)
                .map_err(|error| ServeError(error.to_string()))?;
            drop(in_progress);
        }
    }

    fn send_reply(&mut self, request: &Header, result: Result<Reply, Errno>) -> io::Result<()> {
        if request.flags & message::NO_REPLY != 0 {
            return Ok(());
        }
        let mut header = Header {
            id: request.id,
            command: request.command,
            flags: message::REPLY,
            size: 0,
            error: 0,
        };
        match result {
            Ok(reply) => {
                let bytes = proto::encode(header, &[&reply.body]);
                let fd = reply.memory.as_ref().map(|memory| memory.fd());
                stream::send(self.stream, &bytes, fd.as_slice())
            }
            Err(error) => {
                header.flags |= message::ERROR;
                header.error = error.raw_os_error().unsigned_abs();
                stream::send(self.stream, &proto::encode(header, &[]), &[])
            }
        }
    }

    fn handle(&mut self, message: Message) -> Result<Reply, Errno> {
        let Message {
            header,
            body,
            fds,
            truncated,
        } = message;
        if truncated {
            return Err(Errno::INVAL);
        }
        if self.negotiated == (header.command == command::VERSION) {
            // VERSION must be the first command, and must not be repeated.
            return Err(Errno::INVAL);
        }
        match header.command {
            command::VERSION => self.version(&body),
            command::DMA_MAP => self.dma_map(&body, fds),
            command::DMA_UNMAP => self.dma_unmap(&body),
            command::DEVICE_GET_INFO => {
                // QEMU sends its initial DMA_MAP messages before this command.
                debug!("DEVICE_GET_INFO; the initial DMA mappings are complete");
                self.device.bus().dma.end_initial_maps();
                Ok(device_info(&body)?.into())
            }
            command::DEVICE_GET_REGION_INFO => self.region_info(&body),
            command::DEVICE_GET_IRQ_INFO => Ok(self.irq_info(&body)?.into()),
            command::DEVICE_SET_IRQS => self.set_irqs(&body, fds).map(|()| Reply::default()),
            command::REGION_READ => Ok(self.region_read(&body)?.into()),
            command::REGION_WRITE => Ok(self.region_write(&body)?.into()),
            command::REGION_WRITE_MULTI => self.region_write_multi(&body).map(|()| Reply::default()),
            command::DEVICE_RESET => {
                self.reset();
                Ok(Reply::default())
            }
            other => {
                warn!(command = other, "unknown command");
                Err(Errno::NOSYS)
            }
        }
    }

    fn version(&mut self, body: &[u8]) -> Result<Reply, Errno> {
        let (version, json) = parse::<proto::Version>(body)?;
        if version.major != 0 {
            return Err(Errno::INVAL);
        }
        let json = json.strip_suffix(&[0]).unwrap_or(json);
        let client: ClientVersion = if json.is_empty() {
            ClientVersion::default()
        } else {
            serde_json::from_slice(json).map_err(|error| {
                warn!(%error, "cannot parse the client's version data");
                Errno::INVAL
            })?
        };
        let max_transfer = client
            .capabilities
            .max_data_xfer_size
            .unwrap_or(proto::DEFAULT_TRANSFER);
        if max_transfer == 0 {
            return Err(Errno::INVAL);
        }
        debug!(minor = version.minor, ?client, "version");
        self.device.bus().dma.set_max_transfer(max_transfer);
        self.negotiated = true;
        let capabilities = serde_json::json!({
            "capabilities": {
                "max_msg_fds": proto::MAX_FDS,
                "max_data_xfer_size": proto::MAX_TRANSFER,
                "max_dma_maps": MAX_MAPS,
                "pgsizes": 4096,
                "write_multiple": true,
            }
        });
        let mut reply = proto::Version { major: 0, minor: 0 }.as_bytes().to_vec();
        reply.extend_from_slice(capabilities.to_string().as_bytes());
        reply.push(0);
        Ok(reply.into())
    }

    fn dma_map(&mut self, body: &[u8], mut fds: Vec<OwnedFd>) -> Result<Reply, Errno> {
        let (request, _) = parse::<proto::DmaMap>(body)?;
        if fds.len() > 1 {
            return Err(Errno::INVAL);
        }
        let fd = fds.pop();
        debug!(
            address = format_args!("{:#x}", request.address),
            size = format_args!("{:#x}", request.size),
            fd = fd.is_some(),
            "map"
        );
        self.device.bus().dma.map(&request, fd)?;
        Ok(Reply::default())
    }

    fn dma_unmap(&mut self, body: &[u8]) -> Result<Reply, Errno> {
        let (request, _) = parse::<proto::DmaUnmap>(body)?;
        if request.flags & !proto::DMA_UNMAP_ALL != 0 {
            return Err(Errno::INVAL);
        }
        let dma = &self.device.bus().dma;
        if request.flags & proto::DMA_UNMAP_ALL != 0 {
            dma.unmap_all();
        } else {
            dma.unmap(request.address, request.size)?;
        }
        Ok(request.as_bytes().to_vec().into())
    }

    fn region_info(&mut self, body: &[u8]) -> Result<Reply, Errno> {
        let (request, _) = parse::<proto::RegionInfo>(body)?;
        if request.index >= proto::NUM_REGIONS || (request.argsz as usize) < size_of::<proto::RegionInfo>() {
            return Err(Errno::INVAL);
        }
        let mut reply = proto::RegionInfo {
            index: request.index,
            ..Default::default()
        };
        let mut capability = Vec::new();
        let mut memory = None;
        if request.index == proto::CONFIG_REGION {
            reply.size = proto::CONFIG_SIZE;
            reply.flags = proto::REGION_READABLE | proto::REGION_WRITABLE;
        } else if let Some(region) = self.device.region(request.index) {
            reply.size = region.size();
            reply.flags = proto::REGION_READABLE | proto::REGION_WRITABLE;
            if let Some((shared, ranges)) = region.mapped() {
                // Even if all of the region can be mapped, QEMU maps it only if there is a sparse-mmap capability.
                reply.flags |= proto::REGION_MMAP | proto::REGION_CAPS;
                reply.cap_offset = size_of::<proto::RegionInfo>() as u32;
                capability = sparse_capability(ranges);
                memory = Some(Arc::clone(shared));
            }
        }
        let full = size_of::<proto::RegionInfo>() + capability.len();
        reply.argsz = u32::try_from(full).map_err(|_| Errno::OVERFLOW)?;
        let mut bytes = reply.as_bytes().to_vec();
        if request.argsz >= reply.argsz {
            bytes.extend_from_slice(&capability);
        }
        Ok(Reply { body: bytes, memory })
    }

    fn irq_info(&mut self, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let (request, _) = parse::<proto::IrqInfo>(body)?;
        if request.index >= proto::NUM_IRQS {
            return Err(Errno::INVAL);
        }
        let mut reply = proto::IrqInfo {
            argsz: size_of::<proto::IrqInfo>() as u32,
            flags: 0,
            index: request.index,
            count: 0,
        };
        if request.index == proto::MSIX_IRQ {
            reply.count = self.device.bus().irqs.vectors();
            reply.flags = proto::IRQ_EVENTFD | proto::IRQ_MASKABLE;
        }
        Ok(reply.as_bytes().to_vec())
    }

    fn set_irqs(&mut self, body: &[u8], fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let (request, data) = parse::<proto::IrqSet>(body)?;
        let proto::IrqSet {
            flags,
            index,
            start,
            count,
            ..
        } = request;
        let data_type = flags & (proto::SET_DATA_NONE | proto::SET_DATA_BOOL | proto::SET_DATA_EVENTFD);
        let action = flags & (proto::SET_ACTION_MASK | proto::SET_ACTION_UNMASK | proto::SET_ACTION_TRIGGER);
        if !data_type.is_power_of_two()
            || !action.is_power_of_two()
            || flags != data_type | action
            || index >= proto::NUM_IRQS
        {
            return Err(Errno::INVAL);
        }
        let disable_all =
            data_type == proto::SET_DATA_NONE && action == proto::SET_ACTION_TRIGGER && count == 0 && start == 0;
        let irqs = &self.device.bus().irqs;
        if index != proto::MSIX_IRQ {
            // The device has only MSI-X. Disabling another type is valid, nothing else.
            return if disable_all { Ok(()) } else { Err(Errno::INVAL) };
        }
        if disable_all {
            irqs.remove_all_eventfds();
            return Ok(());
        }
        let selected: &dyn Fn(usize) -> bool = match data_type {
            proto::SET_DATA_EVENTFD if action != proto::SET_ACTION_TRIGGER => return Err(Errno::OPNOTSUPP),
            proto::SET_DATA_EVENTFD if fds.is_empty() => return irqs.remove_eventfds(start, count),
            proto::SET_DATA_EVENTFD if fds.len() as u64 == u64::from(count) => return irqs.set_eventfds(start, fds),
            proto::SET_DATA_EVENTFD => return Err(Errno::INVAL),
            proto::SET_DATA_BOOL if (data.len() as u64) < u64::from(count) => return Err(Errno::INVAL),
            proto::SET_DATA_BOOL => &|i| data[i] != 0,
            _ => &|_| true,
        };
        match action {
            proto::SET_ACTION_TRIGGER => irqs.trigger(start, count, selected),
            proto::SET_ACTION_MASK => irqs.mask(start, count, true, selected),
            _ => irqs.mask(start, count, false, selected),
        }
    }

    /// Checks an access. Fails with `EINVAL` if it is empty, too long, or exceeds its region.
    fn check_access(&self, access: &proto::RegionAccess) -> Result<(), Errno> {
        let size = match access.region {
            proto::CONFIG_REGION => proto::CONFIG_SIZE,
            region => self.device.region(region).map_or(0, |region| region.size()),
        };
        let end = access.offset.checked_add(access.count.into()).ok_or(Errno::INVAL)?;
        if access.count == 0 || access.count as usize > proto::MAX_TRANSFER || end > size {
            return Err(Errno::INVAL);
        }
        Ok(())
    }

    fn region_read(&mut self, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let (access, _) = parse::<proto::RegionAccess>(body)?;
        self.check_access(&access)?;
        self.posted.arrive();
        let mut reply = access.as_bytes().to_vec();
        let head = reply.len();
        reply.resize(head + access.count as usize, 0);
        let data = &mut reply[head..];
        if access.region == proto::CONFIG_REGION {
            // No truncation: the offset lies in the configuration space.
            self.device.config_read(access.offset as usize, data);
            return Ok(reply);
        }
        if let Some(msix) = self.msix_part(&access) {
            match msix {
                // The client emulates the table and never reads it here, so it reads as zeros.
                MsixPart::Table => {}
                MsixPart::Pending(at) => {
                    for (i, byte) in data.iter_mut().enumerate() {
                        *byte = self.device.bus().irqs.pending((at + i) / 8).to_le_bytes()[(at + i) % 8];
                    }
                }
            }
            return Ok(reply);
        }
        let direct = self.device.region(access.region).and_then(|region| {
            let memory = region.direct(access.offset, access.count.into())?;
            Some(memory.read(access.offset, data))
        });
        match direct {
            Some(result) => {
                result.map_err(|_| Errno::INVAL)?;
                self.device.direct_access(access.region, access.count.into(), false);
            }
            None => self.device.read(access.region, access.offset, data),
        }
        Ok(reply)
    }

    fn region_write(&mut self, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let (access, data) = parse::<proto::RegionAccess>(body)?;
        if data.len() != access.count as usize {
            return Err(Errno::INVAL);
        }
        self.write_one(&access, data)?;
        Ok(access.as_bytes().to_vec())
    }

    fn region_write_multi(&mut self, body: &[u8]) -> Result<(), Errno> {
        let (count, mut rest) = parse::<u64>(body)?;
        let each = size_of::<proto::RegionAccess>() + proto::MULTI_DATA;
        if count > (rest.len() / each) as u64 {
            return Err(Errno::INVAL);
        }
        // All valid writes are executed, as if each were a message of its own. The first error is returned.
        let mut result = Ok(());
        for _ in 0..count {
            let (one, after) = rest.split_at(each);
            rest = after;
            let (access, data) = parse::<proto::RegionAccess>(one)?;
            let one = match data.get(..access.count as usize) {
                Some(data) => self.write_one(&access, data),
                None => Err(Errno::INVAL),
            };
            result = result.and(one);
        }
        result
    }

    fn write_one(&mut self, access: &proto::RegionAccess, data: &[u8]) -> Result<(), Errno> {
        self.check_access(access)?;
        let delayed = self.device.region(access.region).and_then(Region::delayed_memory);
        if let Some(memory) = delayed {
            self.posted.post(memory, access.offset, data);
            self.device.direct_access(access.region, access.count.into(), true);
            return Ok(());
        }
        self.posted.arrive();
        if access.region == proto::CONFIG_REGION {
            // No truncation: the offset lies in the configuration space.
            self.device.config_write(access.offset as usize, data);
            self.apply_config();
            return Ok(());
        }
        if self.msix_part(access).is_some() {
            return Ok(());
        }
        let direct = self.device.region(access.region).and_then(|region| {
            let memory = region.direct(access.offset, access.count.into())?;
            Some(memory.write(access.offset, data))
        });
        match direct {
            Some(result) => {
                result.map_err(|_| Errno::INVAL)?;
                self.device.direct_access(access.region, access.count.into(), true);
            }
            None => self.device.write(access.region, access.offset, data),
        }
        Ok(())
    }

    /// The MSI-X structure in which an access lies, if any.
    fn msix_part(&mut self, access: &proto::RegionAccess) -> Option<MsixPart> {
        let Msix {
            vectors,
            bar,
            table,
            pba,
            ..
        } = self.device.config().msix()?;
        if access.region != u32::from(bar) {
            return None;
        }
        let inside =
            |range: Range<u64>| range.start <= access.offset && access.offset + u64::from(access.count) <= range.end;
        let (table, pba) = (u64::from(table), u64::from(pba));
        if inside(table..table + u64::from(vectors) * 16) {
            return Some(MsixPart::Table);
        }
        if inside(pba..pba + u64::from(vectors).div_ceil(64) * 8) {
            // No truncation: the Pending Bit Array has at most 256 bytes.
            return Some(MsixPart::Pending((access.offset - pba) as usize));
        }
        None
    }

    /// Applies the configuration space: function-level reset, bus mastering, MSI-X Enable, BAR addresses.
    fn apply_config(&mut self) {
        if self.device.config().take_reset_request() {
            self.reset();
        }
        let config = self.device.config();
        let (master, msix) = (config.bus_master(), config.msix_enabled());
        let bars = config.bar_addresses();
        let bus = self.device.bus();
        bus.set_bar_addresses(&bars);
        bus.dma.set_bus_master(master);
        bus.irqs.set_enabled(msix);
    }

    fn reset(&mut self) {
        info!("reset");
        self.posted.arrive();
        self.device.bus().set_bar_addresses(&[None; 6]);
        self.device.bus().dma.abort();
        self.device.reset();
        self.device.bus().irqs.reset();
        self.device.config().reset();
        self.device.bus().dma.set_bus_master(false);
    }
}

enum MsixPart {
    Table,
    /// Byte offset in the Pending Bit Array.
    Pending(usize),
}

/// Splits a structure off the start of a body. Fails with `EINVAL` if the body is too short.
fn parse<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(body).map_err(|_| Errno::INVAL)
}

fn device_info(body: &[u8]) -> Result<Vec<u8>, Errno> {
    let (request, _) = parse::<proto::DeviceInfo>(body)?;
    let reply = proto::DeviceInfo {
        argsz: size_of::<proto::DeviceInfo>() as u32,
        flags: proto::DEVICE_RESETS | proto::DEVICE_PCI,
        num_regions: proto::NUM_REGIONS,
        num_irqs: proto::NUM_IRQS,
    };
    if request.argsz < reply.argsz {
        return Err(Errno::INVAL);
    }
    Ok(reply.as_bytes().to_vec())
}

fn sparse_capability(ranges: &[Range<u64>]) -> Vec<u8> {
    let head = proto::SparseMmap {
        id: proto::SPARSE_MMAP,
        version: 1,
        next: 0,
        // No truncation: a region has few areas.
        areas: ranges.len() as u32,
        reserved: 0,
    };
    let mut bytes = head.as_bytes().to_vec();
    for range in ranges {
        let area = proto::SparseArea {
            offset: range.start,
            size: range.end - range.start,
        };
        bytes.extend_from_slice(area.as_bytes());
    }
    bytes
}
