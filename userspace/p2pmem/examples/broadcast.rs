// SPDX-License-Identifier: MIT OR Apache-2.0

//! Shares one buffer among processes: a producer writes the buffer once, and other processes and devices read it.
//!
//! Usage: broadcast SIZE READER...
//!
//! A reader is a process that receives the buffer's descriptor over a socket and imports the buffer. A reader is one
//! of:
//!
//! - `cpu`: the process reads the buffer by a mapping;
//! - a NIC (`mlx5_0`): the NIC reads the buffer, and writes it into another buffer near the NIC;
//! - a path (`/dev/nvme0n1`, or a file on this drive, which is overwritten): the drive reads the buffer.
//!
//! The producer frees its handle as soon as all readers have the buffer. The last reader frees the memory.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};

use p2pmem::rdma::Nic;
use p2pmem::{human_size, Access, Buffer, Device, DirectOptions, Mapping, Request};
use rustix::net::{
    recvmsg, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Bytes that are compared at once.
const STEP: usize = 1 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["--reader", name] => reader(name),
        [size, readers @ ..] if !readers.is_empty() => producer(size, readers),
        _ => Err("usage: broadcast SIZE (cpu | NIC | PATH)...".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("broadcast: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether a reader is a NIC, by its name.
fn is_nic(name: &str) -> bool {
    name != "cpu" && !name.contains('/')
}

fn producer(size: &str, readers: &[&str]) -> Result<()> {
    let size: u64 = size.parse().map_err(|_| format!("{size:?} is not a number of bytes"))?;
    let device = Device::open()?;
    let mut near = Vec::new();
    for name in readers.iter().filter(|name| is_nic(name)) {
        near.push(Nic::open(name)?.client().clone());
    }
    let buffer = device.alloc(&Request::new(size).near(near))?;
    let memory = buffer.map()?;
    for at in (0..memory.len()).step_by(STEP) {
        memory.copy_from_slice(at, &pattern(at, memory.len()))?;
    }
    memory.flush();
    println!(
        "{} written once, in provider {}",
        human_size(buffer.size()),
        buffer.provider()
    );

    let shared = buffer.share()?;
    let mut children = Vec::new();
    for name in readers {
        let (near, far) = UnixStream::pair()?;
        let child = Command::new(std::env::current_exe()?)
            .args(["--reader", name])
            .stdin(Stdio::from(OwnedFd::from(far)))
            .spawn()?;
        send(&near, shared.as_fd())?;
        children.push((name, child));
    }
    // From here on, only the readers hold the buffer.
    drop((memory, buffer, shared));
    for (name, mut child) in children {
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("reader {name}: {status}").into());
        }
    }
    Ok(())
}

fn reader(name: &str) -> Result<()> {
    let device = Device::open()?;
    let buffer = device.import(receive(std::io::stdin().as_fd())?)?;
    let memory = buffer.map()?;
    let how = if name == "cpu" {
        check(&memory)?;
        "by a mapping, and is what was written".to_owned()
    } else if is_nic(name) {
        fetch(&device, &buffer, name)?
    } else {
        let drive = DirectOptions::new().write(true).open(name)?;
        memory.write_to(&drive, 0, 0..memory.len())?;
        "by the drive".to_owned()
    };
    println!("process {} read it with {name}: {how}", std::process::id());
    Ok(())
}

/// Lets a NIC read the buffer, and write it into another one.
fn fetch(device: &Device, buffer: &Buffer, name: &str) -> Result<String> {
    let nic = Nic::open(name)?;
    let pd = nic.alloc_pd()?;
    let target = device.alloc(&Request::new(buffer.size()).near([nic.client().clone()]))?;
    let copy = target.map()?;
    let from = buffer.register(&pd, Access::LOCAL_READ)?;
    let to = target.register(&pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    // Both ends are on this NIC. Two nodes exchange endpoint() and remote() by a socket.
    let (mut sender, mut receiver) = (nic.queue(&pd)?, nic.queue(&pd)?);
    sender.connect(&receiver.endpoint())?;
    receiver.connect(&sender.endpoint())?;
    sender.write(&from, 0..from.len(), &to.remote(), 0)?;
    check(&copy)?;
    let provider = target.provider();
    Ok(format!(
        "into a buffer in provider {provider}, and it is what was written"
    ))
}

/// Returns the words of one step, from byte `at` on.
fn pattern(at: usize, len: usize) -> Vec<u64> {
    let end = len.min(at + STEP);
    let word = |at: usize| (at as u64 ^ 0x5a).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (at..end).step_by(8).map(word).collect()
}

fn check(memory: &Mapping) -> Result<()> {
    for at in (0..memory.len()).step_by(STEP) {
        let expected = pattern(at, memory.len());
        let mut found = vec![0u64; expected.len()];
        memory.copy_to_slice(at, &mut found)?;
        if found != expected {
            return Err(format!("the {STEP} bytes from {at:#x} on differ from the data that was written").into());
        }
    }
    Ok(())
}

fn send(stream: &UnixStream, fd: BorrowedFd<'_>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err("a message has no space for a descriptor".into());
    }
    sendmsg(stream, &[IoSlice::new(b"b")], &mut control, SendFlags::empty())?;
    Ok(())
}

fn receive(stream: BorrowedFd<'_>) -> Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            return fds.next().ok_or_else(|| "a message without a descriptor".into());
        }
    }
    Err("no descriptor was received".into())
}
