// SPDX-License-Identifier: MIT OR Apache-2.0

//! The protocol between the VM runner and the guest's init, over one virtio-serial port.
//!
//! The port carries frames: one byte of kind, four bytes of length (little endian), the payload. Commands' stdout and
//! stderr, kernel log records and control messages are separate kinds, so they never mix, and they share one stream, so
//! their order is the order in which the guest sent them: when the end of a command arrives, all its output has.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Name of the virtio-serial port.
pub const PORT_NAME: &str = "org.p2pmem.agent";

/// Largest payload of one frame, in bytes. A larger length means that the stream is corrupt.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// Start of the kernel log line by which the init marks a position in the log; a decimal number follows.
pub const KMSG_MARK: &str = "p2pmem-mark: ";

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A [`ToGuest`] or [`ToHost`] message as JSON.
    Control,
    /// Bytes a command wrote to its standard output.
    Stdout,
    /// Bytes a command wrote to its standard error.
    Stderr,
    /// One record of the kernel log, as `/dev/kmsg` gives it.
    Kmsg,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Kind::Control => 1,
            Kind::Stdout => 2,
            Kind::Stderr => 3,
            Kind::Kmsg => 4,
        }
    }

    fn from_code(code: u8) -> Option<Kind> {
        [Kind::Control, Kind::Stdout, Kind::Stderr, Kind::Kmsg]
            .into_iter()
            .find(|kind| kind.code() == code)
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The kind of the payload.
    pub kind: Kind,
    /// The payload.
    pub payload: Vec<u8>,
}

/// Writes one frame in one piece.
///
/// # Errors
///
/// Those of the writer, and `InvalidInput` for a payload longer than [`MAX_PAYLOAD`].
pub fn write_frame(to: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    if payload.len() > MAX_PAYLOAD {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "frame too long"));
    }
    let mut bytes = Vec::with_capacity(5 + payload.len());
    bytes.push(kind.code());
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(payload);
    to.write_all(&bytes)?;
    to.flush()
}

/// Writes a control message.
///
/// # Errors
///
/// Those of [`write_frame`].
pub fn write_control(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    write_frame(to, Kind::Control, &serde_json::to_vec(message)?)
}

/// Reads one frame; `None` at the end of the stream.
///
/// # Errors
///
/// Those of the reader; `UnexpectedEof` inside a frame; `InvalidData` for an unknown kind or an impossible length.
pub fn read_frame(from: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut code = [0u8; 1];
    loop {
        match from.read(&mut code) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let kind = Kind::from_code(code[0]).ok_or_else(|| bad(format!("unknown frame kind {}", code[0])))?;
    let mut len = [0u8; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_PAYLOAD {
        return Err(bad(format!("frame of {len} bytes")));
    }
    let mut payload = vec![0; len];
    from.read_exact(&mut payload)?;
    Ok(Some(Frame { kind, payload }))
}

/// The runner's data of a device of the topology.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNote {
    /// `accel`, `nvme`, `ivshmem` or `nic`.
    pub kind: String,
    /// Its PCI address (`0000:03:00.0`), as the emulator numbers it from what the guest put into the bridges.
    pub bdf: String,
    /// Size of the memory that the device can publish, in bytes: the BAR of an accelerator or ivshmem, the CMB of a
    /// drive; 0 for none.
    pub memory: u64,
}

/// A guest's place among several on one network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its own name.
    pub node: String,
    /// Names of all, itself included, in the order of their addresses.
    pub nodes: Vec<String>,
}

/// A port that a server listens on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Listen {
    /// Of TCP.
    Tcp(u16),
    /// Of the RDMA connection manager, of any port space.
    Rdma(u16),
}

/// Runner to guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ToGuest {
    /// Answer to [`ToHost::Hello`]: what to set up.
    Setup {
        /// Devices of the topology by name.
        devices: BTreeMap<String, DeviceNote>,
        /// Name of the topology.
        topology: String,
        /// The guest's place among several.
        network: Option<Network>,
        /// Whether to load the drivers of NICs and set their ports up.
        rdma: bool,
        /// The folder to have as `/lib/modules`, where it is another than the root's own.
        modules: Option<PathBuf>,
        /// By how much limits of time are longer, on a slow kernel.
        time_factor: u32,
    },
    /// Run a command.
    Exec {
        /// Number that comes back in [`ToHost::Exited`].
        id: u64,
        /// Program and arguments; the program is looked for in `PATH`.
        argv: Vec<String>,
        /// Environment added to the guest's.
        env: BTreeMap<String, String>,
        /// Working directory.
        cwd: String,
        /// Say [`ToHost::Listening`] as soon as this port is listened on.
        listen: Option<Listen>,
    },
    /// End a command that is still running.
    Stop {
        /// The command.
        id: u64,
    },
    /// The command ran out of time: write what blocks into the kernel log, then end it.
    TimedOut {
        /// The command.
        id: u64,
    },
    /// Answer to [`ToHost::Request`].
    Reply {
        /// The request's number.
        id: u64,
        /// The result of the request; the error is a message.
        result: Result<serde_json::Value, String>,
    },
    /// End the guest.
    PowerOff,
}

/// Guest to runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ToHost {
    /// The init runs; devices can be looked at.
    Hello {
        /// Kernel release.
        release: String,
    },
    /// The guest is set up.
    Ready {
        /// Seconds since the kernel started, by the guest's clock.
        uptime: f64,
    },
    /// The set-up failed.
    Failed {
        /// Why.
        error: String,
    },
    /// Somebody listens on the port that belongs to a command.
    Listening {
        /// The command.
        id: u64,
    },
    /// A command ended. Its output was sent before; its kernel log ends with the mark of the same number.
    Exited {
        /// The command.
        id: u64,
        /// Exit code.
        code: Option<i32>,
        /// Signal that ended it.
        signal: Option<i32>,
        /// Why it could not be started.
        error: Option<String>,
    },
    /// A program in the guest asks for something.
    Request {
        /// Number that comes back in [`ToGuest::Reply`].
        id: u64,
        /// What it asks for.
        request: Request,
    },
}

/// An operation on a drive's image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriveOperation {
    /// Reading blocks.
    Read,
    /// Writing blocks.
    Write,
}

/// What a program in the guest may ask the runner for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The topology's devices and where they are now: a map of names to [`DeviceNote`].
    Devices,
    /// Byte counters of all devices: a map of names to counters, see the runner's documentation.
    Snapshot,
    /// Kill the process behind a device, without notice to the guest: surprise removal.
    Kill {
        /// The device.
        name: String,
    },
    /// Unplug a device in an orderly manner; answered once it is gone.
    DeviceDel {
        /// The device.
        name: String,
    },
    /// Plug a device in again that was unplugged.
    DeviceAdd {
        /// The device.
        name: String,
    },
    /// Make a root port report an error of its own by Advanced Error Reporting. The recovery resets the devices below.
    PortError {
        /// The port's name in the topology.
        name: String,
        /// The error, as QEMU's monitor names it: `MALF_TLP`.
        error: String,
    },
    /// Make every operation of some kinds on a drive's image fail with EIO, until the next such request. The drive reports
    /// errors of its medium.
    DriveErrors {
        /// The drive.
        name: String,
        /// The operations that fail; none lets all succeed.
        operations: BTreeSet<DriveOperation>,
    },
    /// Pass a request on to the control socket of a device model, such as `{"link": "down"}` for a NIC.
    Control {
        /// The device.
        name: String,
        /// The request for the device's process.
        request: serde_json::Value,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip() {
        let mut wire = Vec::new();
        for (kind, payload) in [
            (Kind::Control, &b"{}"[..]),
            (Kind::Stdout, b""),
            (Kind::Stderr, b"x"),
            (Kind::Kmsg, b"6,1,2,-;a"),
        ] {
            write_frame(&mut wire, kind, payload).unwrap();
        }
        let mut from = &wire[..];
        assert_eq!(
            read_frame(&mut from).unwrap(),
            Some(Frame {
                kind: Kind::Control,
                payload: b"{}".to_vec()
            })
        );
        assert_eq!(
            read_frame(&mut from).unwrap(),
            Some(Frame {
                kind: Kind::Stdout,
                payload: vec![]
            })
        );
        assert_eq!(
            read_frame(&mut from).unwrap(),
            Some(Frame {
                kind: Kind::Stderr,
                payload: b"x".to_vec()
            })
        );
        assert_eq!(
            read_frame(&mut from).unwrap(),
            Some(Frame {
                kind: Kind::Kmsg,
                payload: b"6,1,2,-;a".to_vec()
            })
        );
        assert_eq!(read_frame(&mut from).unwrap(), None);
    }

    #[test]
    fn malformed_frames_are_rejected() {
        assert_eq!(
            read_frame(&mut &[9u8, 0, 0, 0, 0][..]).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        assert_eq!(
            read_frame(&mut &[1u8, 255, 255, 255, 255][..]).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        assert_eq!(
            read_frame(&mut &[1u8, 4, 0, 0, 0, 1][..]).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        assert_eq!(
            read_frame(&mut &[1u8, 4][..]).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn requests_are_lines_of_json() {
        let text = r#"{"op":"device-del","name":"accel0"}"#;
        let request = Request::DeviceDel { name: "accel0".into() };
        assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        assert_eq!(serde_json::to_string(&request).unwrap(), text);
        assert!(serde_json::from_str::<Request>(r#"{"op":"reboot"}"#).is_err());
    }
}
