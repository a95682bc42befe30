// SPDX-License-Identifier: MIT OR Apache-2.0

//! Sends and receives whole messages with their file descriptors over a UNIX domain socket.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use zerocopy::FromBytes;

use crate::proto::{HEADER, Header, MAX_FDS, MAX_MESSAGE};

/// Maximum time from the first byte of a message to its last, and for the other side to accept a message.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A received message.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    /// File descriptors were lost, because there were more than [`MAX_FDS`] or this process could not receive them.
    pub(crate) truncated: bool,
}

/// Why receiving a message failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error("the connection was closed")]
    Closed,
    #[error("the connection was closed within a message")]
    Truncated,
    #[error("a message was not received completely within {} s", STALL_TIMEOUT.as_secs())]
    Stalled,
    /// The start of the next message is unknown, so no later message can be received.
    #[error("message size {} is out of bounds", .0.size)]
    BadSize(Header),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Receives one message. Waits without limit for its first byte, and at most [`STALL_TIMEOUT`] for the rest.
pub(crate) fn receive(stream: &UnixStream) -> Result<Message, ReceiveError> {
    let mut fds = Vec::new();
    let mut truncated = false;
    let mut deadline = None;
    let mut header = [0; HEADER];
    receive_exact(stream, &mut header, &mut fds, &mut truncated, &mut deadline)?;
    let header = Header::read_from_bytes(&header).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let size = header.size as usize;
    if !(HEADER..=MAX_MESSAGE).contains(&size) {
        return Err(ReceiveError::BadSize(header));
    }
    let mut body = vec![0; size - HEADER];
    receive_exact(stream, &mut body, &mut fds, &mut truncated, &mut deadline)?;
    Ok(Message {
        header,
        body,
        fds,
        truncated,
    })
}

/// Fills `buffer`, and appends received file descriptors to `fds`. Sets `deadline` when the first byte arrives.
fn receive_exact(
    stream: &UnixStream,
    mut buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    truncated: &mut bool,
    deadline: &mut Option<Instant>,
) -> Result<(), ReceiveError> {
    while !buffer.is_empty() {
        if let Some(deadline) = *deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            match rustix::event::poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&left)) {
                Ok(0) => return Err(ReceiveError::Stalled),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = match rustix::net::recvmsg(
            stream,
            &mut [IoSliceMut::new(buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Ok(got) => got,
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::CONNRESET) => return Err(ReceiveError::Closed),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
            *truncated = true;
            fds.truncate(MAX_FDS);
        }
        if got.bytes == 0 {
            return Err(if deadline.is_some() {
                ReceiveError::Truncated
            } else {
                ReceiveError::Closed
            });
        }
        deadline.get_or_insert_with(|| Instant::now() + STALL_TIMEOUT);
        buffer = &mut buffer[got.bytes..];
    }
    Ok(())
}

/// Sends a whole message. The file descriptors go with its first byte. The socket's send timeout limits each `sendmsg`.
pub(crate) fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match rustix::net::sendmsg(
            stream.as_fd(),
            &[io::IoSlice::new(&bytes[sent..])],
            &mut control,
            SendFlags::NOSIGNAL,
        ) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => sent += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
