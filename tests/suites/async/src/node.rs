// SPDX-License-Identifier: MIT OR Apache-2.0

//! A NIC in this process: the model of the adapter, its driver, and a queue pair for a peer.
//!
//! Queues, doorbell records, and payload are in the shared memory of the model. The doorbell register page cannot be: it is a
//! register of the model. A page of the shared memory takes its place, and a thread of this module passes on what is
//! written there ([`Doorbells`]).

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use p2pmem_async::bytecode::Peer;
use p2pmem_async::queue::{AsyncCq, AsyncQp, DOORBELL_OFFSET, QP_RECORD_BYTES, QpLayout, QpParts, cq_record_bytes};
use p2pmem_async::region::{Memory, Region, RegionKind};
use p2pmem_async::wqe::{AddressVector, Segment, Transport};
use p2pmem_ib::{Fabric, Topology};
use p2pmem_mlx5::layout::constants;
use p2pmem_mlx5_driver::{Driver, ENTRIES, LOG_ENTRIES, Qp, RAM, Ring};
use p2pmem_vfio_user::Memory as SharedMemory;

/// Peeks of a completion queue that have not ended.
const PEEKS: usize = 64;
/// The queue key of [`Driver::connect`].
const QUEUE_KEY: u32 = 0x1234;
/// Offset of the payload in its pages. The route of a datagram is before it.
const PAYLOAD_OFFSET: u64 = 64;

/// The shared memory of a node, as memory of regions.
#[derive(Clone)]
pub struct Ram(pub Arc<SharedMemory>);

impl fmt::Debug for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ram({} bytes)", self.0.len())
    }
}

impl Memory for Ram {
    fn len(&self) -> usize {
        self.0.len() as usize
    }

    fn address(&self) -> u64 {
        RAM
    }

    fn load_dword(&self, at: usize) -> u32 {
        assert!(at % 4 == 0, "a load at {at} is not aligned to 4 bytes");
        let mut bytes = [0; 4];
        self.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn store_dword(&self, at: usize, value: u32) {
        assert!(at % 4 == 0, "a store at {at} is not aligned to 4 bytes");
        self.write(at, &value.to_le_bytes());
    }

    fn store_qword(&self, at: usize, value: u64) {
        assert!(at % 8 == 0, "a store at {at} is not aligned to 8 bytes");
        self.write(at, &value.to_le_bytes());
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        self.0.read(at as u64, out).expect("the range is in the memory");
    }

    fn write(&self, at: usize, data: &[u8]) {
        self.0.write(at as u64, data).expect("the range is in the memory");
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// A NIC with a queue pair.
pub struct Node {
    driver: Arc<Mutex<Driver>>,
    number: Qp,
    lid: u16,
    key: u32,
    /// The queue pair.
    pub qp: AsyncQp,
    transport: Transport,
    /// The payload.
    pub payload: Region,
    /// The page that takes the place of the doorbell register page.
    doorbell: Region,
    ram: Ram,
}

fn lock(driver: &Mutex<Driver>) -> MutexGuard<'_, Driver> {
    driver.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// Creates two connected NICs in a subnet of their own. See [`Node::new`].
    ///
    /// # Errors
    ///
    /// Those of [`Node::new`], or the subnet is refused.
    pub fn pair(transport: Transport, bytes: u32, peer: &Peer) -> Result<(Self, Self)> {
        let topology = Topology {
            switches: vec!["sw".to_owned()],
            links: Vec::new(),
        };
        let subnet = Fabric::new(&topology, 1)?;
        let node = |name, guid| Self::new(name, guid, &subnet, transport, bytes, peer);
        let (a, b) = (node("a", 0x0002_c903_0000_1000)?, node("b", 0x0002_c903_0000_2000)?);
        a.connect(&b);
        b.connect(&a);
        Ok((a, b))
    }

    /// Creates a NIC in a subnet and a queue pair that `peer` drives. `bytes` is the size of the payload.
    ///
    /// # Errors
    ///
    /// The sizes of the queues are refused.
    pub fn new(name: &str, guid: u64, subnet: &Fabric, transport: Transport, bytes: u32, peer: &Peer) -> Result<Self> {
        let mut driver = Driver::new(name, guid, subnet);
        driver.init();
        let ram = Ram(driver.ram.clone());
        let region =
            |kind, address: u64, len: usize| Region::part(kind, Arc::new(ram.clone()), (address - RAM) as usize, len);
        let events = driver.event_queue(1, &[]);
        let queue = |driver: &mut Driver| -> Result<(Ring, AsyncCq)> {
            let ring = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
            let entries = region(RegionKind::Completions, ring.buffer, ENTRIES as usize * 64);
            let record = region(RegionKind::CqRecord, ring.record, cq_record_bytes(PEEKS));
            let cq = AsyncCq::new(ring.number, entries, record, peer.clone())?;
            Ok((ring, cq))
        };
        let (sends, receives) = (queue(&mut driver)?, queue(&mut driver)?);
        let service = match transport {
            Transport::Rc => constants::MLX5_QP_ST_RC,
            Transport::Ud => constants::MLX5_QP_ST_UD,
        };
        let number = driver.queue_pair_with(service, &sends.0, &receives.0);
        let layout = QpLayout {
            send_blocks: ENTRIES,
            receive_entries: ENTRIES,
        };
        let (doorbell, payload) = (driver.alloc(4096), driver.alloc(u64::from(bytes) + 4096));
        let doorbell = region(RegionKind::Doorbell, doorbell, 4096);
        let parts = QpParts {
            qpn: number.number,
            transport,
            layout,
            queue: region(RegionKind::WorkQueue, number.buffer, layout.bytes()),
            record: region(RegionKind::QpRecord, number.record, QP_RECORD_BYTES),
            doorbell: doorbell.clone(),
        };
        let qp = AsyncQp::new(parts, peer.clone(), sends.1, receives.1)?;
        Ok(Self {
            lid: driver.lid(),
            key: driver.key,
            payload: region(RegionKind::Data, payload + PAYLOAD_OFFSET, bytes as usize),
            driver: Arc::new(Mutex::new(driver)),
            number,
            qp,
            transport,
            doorbell,
            ram,
        })
    }

    /// Connects the queue pair.
    pub fn connect(&self, other: &Self) {
        self.connect_to(other.lid, other.qp.qpn());
    }

    /// Connects the queue pair to number `qpn` of the port with a LID.
    pub fn connect_to(&self, lid: u16, qpn: u32) {
        lock(&self.driver).connect(&self.number, lid, qpn);
    }

    /// Returns the LID.
    pub fn lid(&self) -> u16 {
        self.lid
    }

    /// Returns the address of this node for datagrams; none for a connection.
    pub fn address(&self) -> Option<AddressVector> {
        (self.transport == Transport::Ud).then(|| AddressVector {
            dlid: self.lid,
            sl: 0,
            path_bits: 0,
            qpn: self.qp.qpn(),
            qkey: QUEUE_KEY,
            grh: None,
        })
    }

    /// Returns the payload, as the NIC finds it when it sends.
    pub fn source(&self) -> Segment {
        Segment {
            address: self.payload.address(),
            bytes: self.payload.len() as u32,
            lkey: self.key,
        }
    }

    /// Returns where the NIC writes what it receives: the payload, and the route of a datagram before it.
    pub fn target(&self) -> Segment {
        let mut segment = self.source();
        let route = self.transport.route_bytes();
        segment.address -= u64::from(route);
        segment.bytes += route;
        segment
    }

    /// Returns all regions that an executor accesses.
    pub fn regions(&self) -> Vec<&Region> {
        let queues = [self.qp.send_cq(), self.qp.receive_cq()];
        let of_queues = queues.into_iter().flat_map(AsyncCq::regions);
        let mut regions: Vec<_> = self.qp.regions().into_iter().chain(of_queues).collect();
        regions.push(&self.payload);
        regions
    }

    /// Returns the shared memory.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }
}

/// A thread that passes on what is written to the doorbells of nodes.
pub struct Doorbells {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Doorbells {
    /// Starts the thread.
    pub fn new<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Self {
        // The driver, the page, and what was written there last.
        let bells = nodes
            .into_iter()
            .map(|node| (node.driver.clone(), node.doorbell.clone(), [0; 8]));
        let mut bells: Vec<_> = bells.collect();
        let over = Arc::new(AtomicBool::new(false));
        let end = over.clone();
        let thread = std::thread::spawn(move || {
            let at = DOORBELL_OFFSET as usize;
            while !end.load(Ordering::Acquire) {
                let mut idle = true;
                for (driver, doorbell, last) in &mut bells {
                    let mut rung = [0; 8];
                    doorbell.read(at, &mut rung);
                    // Work requests have different indices, so no doorbell writes the value of the one before.
                    if rung == *last {
                        continue;
                    }
                    *last = rung;
                    idle = false;
                    let mut driver = lock(driver);
                    let register = u64::from(driver.uar) * 4096 + DOORBELL_OFFSET;
                    driver
                        .client()
                        .write(0, register, &rung)
                        .context("the adapter does not answer")?;
                }
                if idle {
                    std::thread::yield_now();
                }
            }
            Ok(())
        });
        Self {
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for Doorbells {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("doorbells: {error:#}");
        }
    }
}
