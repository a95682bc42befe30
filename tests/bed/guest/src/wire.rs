// SPDX-License-Identifier: MIT OR Apache-2.0

//! The protocol between the VM runner and the guest's init, over one virtio-serial port.
//!
//! The port carries frames: one byte of kind, four bytes of length (little endian), the payload. Commands' stdout and
//! stderr, kernel log records and control messages have separate kinds. All frames share one stream, which keeps the
//! order in which the guest sent them: all output of a command arrives before the message that the command ended.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The name of the virtio-serial port.
pub const PORT_NAME: &str = "org.p2pmem.agent";

/// The longest payload of a frame, in bytes. A longer length means that the reader lost the frame boundaries.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// The prefix of a kernel log line by which the init marks the end of a command. The command's decimal number follows.
pub const KMSG_MARK: &str = "p2pmem-mark: ";

/// The kind of a frame's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A [`ToGuest`] or [`ToHost`] message as JSON.
    Control,
    /// Bytes of a command's standard output.
    Stdout,
    /// Bytes of a command's standard error.
    Stderr,
    /// One record of the kernel log, in the format of `/dev/kmsg`.
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

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The kind of the payload.
    pub kind: Kind,
    /// The payload.
    pub payload: Vec<u8>,
}

/// Writes one frame with one write.
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
/// Those of the reader; `UnexpectedEof` inside a frame; `InvalidData` for an unknown kind or a length above
/// [`MAX_PAYLOAD`].
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

/// The runner's facts about a device of the topology.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNote {
    /// `accel`, `nvme`, `ivshmem` or `nic`.
    pub kind: String,
    /// The PCI address (`0000:03:00.0`). The emulator computes it from the bus numbers that the guest wrote to the
    /// bridges.
    pub bdf: String,
    /// Bytes of memory that the device can provide: the BAR of the accelerator or ivshmem, the drive's CMB; 0 for none.
    pub memory: u64,
}

/// The network of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The guest's name.
    pub node: String,
    /// The names of all guests of the network, this one included, in the order of their addresses.
    pub nodes: Vec<String>,
}

/// A port on which a server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Listen {
    /// A TCP port.
    Tcp(u16),
    /// A port of the RDMA connection manager, in any port space.
    Rdma(u16),
}

/// A message from the runner to the guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ToGuest {
    /// Answers [`ToHost::Hello`]: the guest's settings.
    Setup {
        /// The topology's devices by name.
        devices: BTreeMap<String, DeviceNote>,
        /// The topology's name.
        topology: String,
        /// The guest's network, if it has one.
        network: Option<Network>,
        /// Whether to load the drivers of NICs and set up their ports.
        rdma: bool,
        /// The directory to mount on `/lib/modules`, if it is not the root file system's own.
        modules: Option<PathBuf>,
        /// The factor for time limits, above 1 on a slow kernel.
        patience: u32,
    },
    /// Runs a command.
    Exec {
        /// The command's number, which [`ToHost::Exited`] returns.
        id: u64,
        /// Program and arguments. The guest searches `PATH` for the program.
        argv: Vec<String>,
        /// Environment variables, in addition to those of the guest.
        env: BTreeMap<String, String>,
        /// The working directory.
        cwd: String,
        /// The port on which the command listens. The guest sends [`ToHost::Listening`] when a socket listens on it.
        listen: Option<Listen>,
    },
    /// Kills a command that is still running.
    Stop {
        /// The command's number.
        id: u64,
    },
    /// The command exceeded its time limit: write the blocked tasks to the kernel log, then kill the command.
    TimedOut {
        /// The command's number.
        id: u64,
    },
    /// Answers [`ToHost::Request`].
    Reply {
        /// The request's number.
        id: u64,
        /// The result, or an error message.
        result: Result<serde_json::Value, String>,
    },
    /// Powers the guest off.
    PowerOff,
}

/// A message from the guest to the runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ToHost {
    /// The init runs, and the guest's PCI bus is enumerated.
    Hello {
        /// The kernel release.
        release: String,
    },
    /// The guest is set up.
    Ready,
    /// Setting up the guest failed.
    Failed {
        /// The reason.
        error: String,
    },
    /// A socket listens on the port of a command.
    Listening {
        /// The command's number.
        id: u64,
    },
    /// A command ended. The guest sent its output before. The part of the kernel log that belongs to the command ends
    /// with the mark of its number.
    Exited {
        /// The command's number.
        id: u64,
        /// The exit code, if the command exited.
        code: Option<i32>,
        /// The signal that killed the command, if one did.
        signal: Option<i32>,
        /// The reason why the command could not be started, if it could not.
        error: Option<String>,
    },
    /// A program in the guest sent a request.
    Request {
        /// The request's number, which [`ToGuest::Reply`] returns.
        id: u64,
        /// The request.
        request: Request,
    },
}

/// A request of a program in the guest to the runner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The topology's devices and their current addresses: a map of names to [`DeviceNote`].
    Devices,
    /// Byte counters of all devices: a map of names to counters, see the runner's documentation.
    Snapshot,
    /// Kills the process of a device model without notice to the guest: surprise removal.
    Kill {
        /// The device's name.
        name: String,
    },
    /// Unplugs a device in an orderly manner. The answer follows when the device is gone.
    DeviceDel {
        /// The device's name.
        name: String,
    },
    /// Plugs an unplugged device in again.
    DeviceAdd {
        /// The device's name.
        name: String,
    },
    /// Makes a root port report an error of its own by Advanced Error Reporting. The kernel's recovery resets the
    /// devices below the port.
    PortError {
        /// The port's name in the topology.
        name: String,
        /// The error in the notation of QEMU's monitor: `MALF_TLP`.
        error: String,
    },
    /// Forwards a request to the control socket of a device model, such as `{"link": "down"}` for a NIC.
    Control {
        /// The device's name.
        name: String,
        /// The request to the process of the device model.
        request: serde_json::Value,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_sent() {
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
    fn a_stream_out_of_step_is_an_error() {
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
