// SPDX-License-Identifier: MIT OR Apache-2.0

//! The PCI tree of the machine, with the memory that was chosen for each session, and the paths of the payload.

use std::path::PathBuf;
use std::sync::Arc;

use axum::http::StatusCode;
use p2pmem::inventory::Inventory;
use p2pmem::{devices_in, Device, PciDevice};
use p2pmem_drawing::tree::Node as TreeNode;
use p2pmem_drawing::{Drawing, Scene, Transfer};
use p2pmem_web::ApiError;
use serde::Serialize;

use crate::node::Node;
use crate::status::{Direction, Session};

/// The most sessions whose paths are drawn. The list has all sessions.
const MAX_DRAWN: usize = 12;

/// The machine whose PCI tree is shown.
#[derive(Clone)]
pub struct Machine {
    root: PathBuf,
    open: Arc<dyn Fn() -> p2pmem::Result<Device> + Send + Sync>,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new("/", Device::open)
    }
}

impl Machine {
    /// Returns the machine whose file system is at `root`, and whose providers are those of the device that `open` opens.
    pub fn new(root: impl Into<PathBuf>, open: impl Fn() -> p2pmem::Result<Device> + Send + Sync + 'static) -> Self {
        Self {
            root: root.into(),
            open: Arc::new(open),
        }
    }
}

/// The answer.
#[derive(Serialize)]
struct Topology {
    /// The running sessions that the topology shows.
    sessions: Vec<SessionPath>,
    /// The host bridges, with everything below them.
    tree: Vec<TreeNode>,
    /// The drawing.
    svg: String,
}

/// The path of the payload of a session.
#[derive(Serialize)]
struct SessionPath {
    /// The number of the session.
    session: u64,
    /// The path in words.
    about: String,
    /// Whether the drawing has the path.
    drawn: bool,
}

/// Returns the names of functions: those of their drivers, or else the address.
fn names(devices: &[PciDevice], addrs: &[p2pmem::PciAddr]) -> String {
    let name = |addr: &p2pmem::PciAddr| {
        let device = devices.iter().find(|device| device.addr == *addr);
        device.map_or_else(|| addr.to_string(), |device| device.client().name().to_owned())
    };
    let all: Vec<String> = addrs.iter().map(name).collect();
    all.join(", ")
}

/// Returns the path of a session's payload in words, in the direction of the payload.
fn about(session: &Session, devices: &[PciDevice]) -> String {
    let channel = format!("{}/{}/{}", session.lun, session.stream, session.channel);
    let drives = match names(devices, &session.devices.drives) {
        names if names.is_empty() => format!("the drives of LUN {}", session.lun),
        names => names,
    };
    let memory = match session.devices.memory {
        // `memory` begins with the address of the device.
        Some(memory) => match names(devices, &[memory]) {
            name if name == memory.to_string() => format!("memory of {memory}"),
            name => format!("memory of {name} ({memory})"),
        },
        None => session.memory.clone(),
    };
    match session.direction {
        Direction::Record => format!(
            "Session {}, record {channel}: {} → {memory} → {drives}",
            session.id, session.nic
        ),
        Direction::Play => format!(
            "Session {}, play {channel}: {drives} → {memory} → {}",
            session.id, session.nic
        ),
    }
}

/// Returns the transfer of a session; none if it goes through host memory, or its NIC is not known.
fn transfer(session: &Session, devices: &[PciDevice]) -> Option<Transfer> {
    let (memory, nic) = (session.devices.memory?, vec![session.devices.nic?]);
    let drives = session.devices.drives.clone();
    let (sources, targets) = match session.direction {
        Direction::Record => (nic, drives),
        Direction::Play => (drives, nic),
    };
    Some(Transfer {
        number: session.id,
        name: format!("session {}", session.id),
        about: about(session, devices),
        sources,
        memory,
        targets,
    })
}

impl Machine {
    /// Draws the machine with these sessions. Fails if sysfs has no PCI bus.
    fn topology(&self, sessions: &[Session]) -> p2pmem::Result<Topology> {
        let sys = self.root.join("sys");
        let devices = devices_in(&sys)?;
        let (providers, holders, note) = match (self.open)() {
            Ok(device) => (device.providers()?, device.holders(), None),
            Err(error) => (Vec::new(), None, Some(format!("The providers are unknown: {error}"))),
        };
        let addrs: Vec<_> = providers.iter().map(|provider| provider.addr).collect();
        let known = note.is_none().then_some(addrs.as_slice());
        let mut memory_devices = Inventory::read_in(&self.root, known)?.memory_devices;
        memory_devices.retain(|memory| !addrs.contains(&memory.device.addr));
        let transfers = sessions.iter().filter_map(|session| transfer(session, &devices));
        let scene = Scene {
            notes: note.into_iter().collect(),
            providers,
            holders,
            memory_devices,
            clients: devices
                .iter()
                .filter(|device| device.is_likely_client())
                .map(PciDevice::client)
                .collect(),
            transfers: transfers.take(MAX_DRAWN).collect(),
        };
        let drawing = Drawing::new(&sys, &devices, &scene);
        let paths = sessions.iter().map(|session| SessionPath {
            session: session.id,
            about: about(session, &devices),
            drawn: scene.transfers.iter().any(|transfer| transfer.number == session.id),
        });
        Ok(Topology {
            sessions: paths.collect(),
            svg: drawing.svg(),
            tree: drawing.roots,
        })
    }
}

/// Returns the topology with the running sessions of a node, as JSON. Reads the configuration spaces of bridges, which takes
/// milliseconds each.
pub(super) fn draw(machine: &Machine, node: &Node) -> Result<String, ApiError> {
    let mut sessions = node.status().sessions;
    sessions.retain(|session| session.running);
    let failed = |error: p2pmem::Error| {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot read the topology: {error}"),
        )
    };
    let topology = machine.topology(&sessions).map_err(failed)?;
    serde_json::to_string(&topology).map_err(ApiError::internal)
}
