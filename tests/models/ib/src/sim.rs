// SPDX-License-Identifier: MIT OR Apache-2.0

//! Test adapters: an engine and a test host each, on a network with simulated time.

mod connected;
mod datagrams;
mod errors;
mod faults;
mod large;
mod links;
mod random;
mod rates;
mod shared;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use smallvec::smallvec;

use crate::attributes::{AccessFlags, Modify, Mtu, PortAttributes, QpConfig, ReceiveFrom, Service, State};
use crate::engine::{Engine, Next};
use crate::fabric::network::Network;
use crate::fabric::{Delivery, PortConfig, Topology};
use crate::host::{Access, Atomic, Event, Fault, Fetched, Host, Rights};
use crate::packet::Packet;
use crate::work::{
    AddressVector, Completion, Path, Payload, Queue, ReceiveWork, Received, Remote, Segment, SendFlags, SendOp,
    SendWork, Sge, Status,
};

/// Default protection domain.
const PD: u32 = 7;
/// A key that allows all accesses to all memory of a node.
const ALL_KEY: u32 = 0x1000;
/// Page size of page faults.
const PAGE: u64 = 4096;

#[derive(Clone, Copy, Debug)]
struct Key {
    pd: u32,
    start: u64,
    len: u64,
    local_write: bool,
    remote_read: bool,
    remote_write: bool,
    remote_atomic: bool,
}

/// A host with flat memory. The address space of each key is the memory itself, repeated.
struct TestHost {
    lid: u16,
    now: Rc<Cell<Duration>>,
    network: Rc<RefCell<Network>>,
    memory: Vec<u8>,
    keys: HashMap<u32, Key>,
    sends: HashMap<u32, VecDeque<SendWork>>,
    receives: HashMap<Queue, VecDeque<ReceiveWork>>,
    /// Pages that are not present.
    absent: HashSet<u64>,
    /// Requested pages, by token.
    page_requests: BTreeMap<u64, u64>,
    tokens: u64,
    local_requests: Vec<(u32, u64)>,
    local_result: Result<(), Status>,
    completions: Vec<Completion>,
    events: Vec<Event>,
    /// Sent packets, if `keeps_sent` is set.
    sent: Vec<Packet>,
    keeps_sent: bool,
    /// Number of sent packets.
    transmitted: usize,
    /// Number of calls of `write`.
    writes: usize,
    /// Number of accesses after which all keys are removed.
    remove_keys_after: Option<usize>,
    /// Results to return once instead of the next work request: for send queues and for receive queues.
    injected: (Option<Fetched<SendWork>>, Option<Fetched<ReceiveWork>>),
}

impl TestHost {
    fn allowed(&mut self, access: &Access) -> Result<std::ops::Range<usize>, Fault> {
        let key = self.keys.get(&access.key).ok_or(Fault::Key)?;
        if key.pd != access.pd {
            return Err(Fault::Domain);
        }
        let allowed = match access.rights {
            Rights::LocalRead => true,
            Rights::LocalWrite => key.local_write,
            Rights::RemoteRead => key.remote_read,
            Rights::RemoteWrite => key.remote_write,
            Rights::RemoteAtomic => key.remote_atomic,
        };
        if !allowed {
            return Err(Fault::Rights);
        }
        let end = access.address.checked_add(access.length).ok_or(Fault::Bounds)?;
        if access.address < key.start || end > key.start + key.len {
            return Err(Fault::Bounds);
        }
        assert_ne!(access.length, 0, "the engine must not request an access of length 0");
        let start = access.address as usize % self.memory.len();
        Ok(start..start + access.length as usize)
    }

    fn present(&mut self, access: &Access) -> Result<std::ops::Range<usize>, Fault> {
        match &mut self.remove_keys_after {
            Some(0) => self.keys.clear(),
            Some(left) => *left -= 1,
            None => {}
        }
        let range = self.allowed(access)?;
        for page in access.address / PAGE..=(access.address + access.length - 1) / PAGE {
            if self.absent.contains(&page) {
                self.tokens += 1;
                self.page_requests.insert(self.tokens, page);
                return Err(Fault::Page(self.tokens));
            }
        }
        Ok(range)
    }
}

impl Host for TestHost {
    fn now(&mut self) -> Duration {
        self.now.get()
    }

    fn next_send(&mut self, qpn: u32) -> Fetched<SendWork> {
        if let Some(injected) = self.injected.0.take() {
            return injected;
        }
        self.sends
            .entry(qpn)
            .or_default()
            .pop_front()
            .map_or(Fetched::Empty, Fetched::Work)
    }

    fn next_receive(&mut self, queue: Queue) -> Fetched<ReceiveWork> {
        if let Some(injected) = self.injected.1.take() {
            return injected;
        }
        let queue = self.receives.entry(queue).or_default();
        match queue.pop_front() {
            Some(mut work) => {
                work.left = queue.len() as u32;
                Fetched::Work(work)
            }
            None => Fetched::Empty,
        }
    }

    fn read(&mut self, access: &Access, data: &mut [u8]) -> Result<(), Fault> {
        let range = self.present(access)?;
        data.copy_from_slice(&self.memory[range]);
        Ok(())
    }

    fn write(&mut self, access: &Access, data: &[u8]) -> Result<(), Fault> {
        self.writes += 1;
        let range = self.present(access)?;
        self.memory[range].copy_from_slice(data);
        Ok(())
    }

    fn check(&mut self, access: &Access) -> Result<(), Fault> {
        self.allowed(access).map(drop)
    }

    fn atomic(&mut self, access: &Access, operation: Atomic) -> Result<u64, Fault> {
        let range = self.present(access)?;
        let original = u64::from_le_bytes(self.memory[range.clone()].try_into().unwrap());
        let value = match operation {
            Atomic::CompareSwap { compare, swap } if compare == original => swap,
            Atomic::CompareSwap { .. } => original,
            Atomic::FetchAdd { add } => original.wrapping_add(add),
        };
        self.memory[range].copy_from_slice(&value.to_le_bytes());
        Ok(original)
    }

    fn local(&mut self, qpn: u32, id: u64) -> Result<(), Status> {
        self.local_requests.push((qpn, id));
        self.local_result
    }

    fn invalidate(&mut self, _: u32, pd: u32, key: u32) -> Result<(), Fault> {
        match self.keys.get(&key) {
            Some(found) if found.pd != pd => Err(Fault::Domain),
            Some(_) => {
                self.keys.remove(&key);
                Ok(())
            }
            None => Err(Fault::Key),
        }
    }

    fn complete(&mut self, completion: Completion) {
        self.completions.push(completion);
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }

    fn transmit(&mut self, packets: Vec<Packet>) {
        self.transmitted += packets.len();
        if self.keeps_sent {
            self.sent.extend(packets.iter().cloned());
        }
        self.network.borrow_mut().send(self.lid, packets, self.now.get());
    }

    fn has_space(&mut self, dlid: u16) -> bool {
        self.network.borrow_mut().has_space(self.lid, dlid, self.now.get())
    }

    fn in_flight(&mut self, dlid: u16) -> bool {
        self.network.borrow_mut().in_flight(self.lid, dlid)
    }
}

/// An adapter.
struct Node {
    engine: Engine,
    host: TestHost,
    inbox: mpsc::Receiver<Delivery>,
    next: Next,
    links: Vec<bool>,
    /// Deliveries stay in the inbox.
    paused: bool,
}

struct Simulation {
    now: Rc<Cell<Duration>>,
    network: Rc<RefCell<Network>>,
    nodes: Vec<Node>,
}

impl Simulation {
    /// Creates `n` adapters with `memory` bytes each, on one switch.
    fn new(n: usize, memory: usize) -> Self {
        Self::with_seed(n, memory, 1)
    }

    fn with_seed(n: usize, memory: usize, seed: u64) -> Self {
        let topology = Topology {
            switches: vec!["sw".into()],
            links: Vec::new(),
        };
        Self::on(&topology, &vec!["sw"; n], memory, seed)
    }

    /// Creates one adapter for each entry of `switches`.
    fn on(topology: &Topology, switches: &[&str], memory: usize, seed: u64) -> Self {
        let ports: Vec<_> = switches.iter().map(|switch| (*switch, None)).collect();
        Self::with_ports(topology, &ports, memory, seed)
    }

    /// Creates one adapter for each entry of `ports`, which has the port's switch and the rate of its link.
    fn with_ports(topology: &Topology, ports: &[(&str, Option<u64>)], memory: usize, seed: u64) -> Self {
        let now = Rc::new(Cell::new(Duration::from_secs(1)));
        let network = Rc::new(RefCell::new(Network::new(topology, seed).unwrap()));
        let nodes = ports
            .iter()
            .enumerate()
            .map(|(i, (switch, rate))| {
                let (sender, inbox) = mpsc::channel();
                let config = PortConfig {
                    name: format!("port {i}"),
                    guid: 0x1234_0000 + i as u64,
                    switch: switch.to_string(),
                    bytes_per_second: rate.map(|rate| NonZeroU64::new(rate).unwrap()),
                };
                let deliver = Arc::new(move |delivery| drop(sender.send(delivery)));
                let (lid, gid) = network.borrow_mut().join(&config, deliver).unwrap();
                let port = PortAttributes {
                    lid,
                    lmc: 0,
                    gids: vec![gid],
                    pkeys: vec![0xffff],
                };
                let all = Key {
                    pd: PD,
                    start: 0,
                    len: memory as u64,
                    local_write: true,
                    remote_read: true,
                    remote_write: true,
                    remote_atomic: true,
                };
                let host = TestHost {
                    lid,
                    now: now.clone(),
                    network: network.clone(),
                    memory: vec![0; memory],
                    keys: HashMap::from([(ALL_KEY, all)]),
                    sends: HashMap::new(),
                    receives: HashMap::new(),
                    absent: HashSet::new(),
                    page_requests: BTreeMap::new(),
                    tokens: 0,
                    local_requests: Vec::new(),
                    local_result: Ok(()),
                    completions: Vec::new(),
                    events: Vec::new(),
                    sent: Vec::new(),
                    keeps_sent: true,
                    transmitted: 0,
                    writes: 0,
                    remove_keys_after: None,
                    injected: (None, None),
                };
                let engine = Engine::new(port);
                Node {
                    engine,
                    host,
                    inbox,
                    next: Next::Idle,
                    links: Vec::new(),
                    paused: false,
                }
            })
            .collect();
        Self { now, network, nodes }
    }

    fn lid(&self, node: usize) -> u16 {
        self.nodes[node].host.lid
    }

    /// Handles the inbox of an adapter and runs its engine. Returns whether there was work.
    fn work(&mut self, node: usize) -> bool {
        let node = &mut self.nodes[node];
        if node.paused {
            return false;
        }
        let mut worked = node.next == Next::More;
        while let Ok(delivery) = node.inbox.try_recv() {
            worked = true;
            match delivery {
                Delivery::Packets(burst) => node.engine.packets(&mut node.host, burst),
                Delivery::PathReady => node.engine.path_ready(),
                Delivery::Link(up) => node.links.push(up),
            }
        }
        let transmitted = node.host.transmitted;
        node.next = node.engine.run(&mut node.host);
        worked || node.host.transmitted > transmitted
    }

    /// Runs all adapters until no work is left at the current time.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            let mut worked = false;
            for node in 0..self.nodes.len() {
                worked |= self.work(node);
            }
            let more = self.nodes.iter().any(|node| !node.paused && node.next == Next::More);
            if !worked && !more {
                return;
            }
        }
        panic!("the adapters still have work after 100,000 rounds");
    }

    /// Advances the time to the next timer or delayed packet. Returns false if there is none up to `end`.
    fn advance(&mut self, end: Duration) -> bool {
        let timers = self
            .nodes
            .iter()
            .filter(|node| !node.paused)
            .filter_map(|node| match node.next {
                Next::At(time) => Some(time),
                _ => None,
            });
        let next = timers.chain(self.network.borrow().next_due()).min();
        let Some(next) = next.filter(|next| *next <= end) else {
            self.now.set(self.now.get().max(end));
            return false;
        };
        self.now.set(self.now.get().max(next));
        self.network.borrow_mut().deliver_due(self.now.get());
        true
    }

    /// Runs for `time` of simulated time.
    fn run_for(&mut self, time: Duration) {
        let end = self.now.get() + time;
        self.settle();
        while self.advance(end) {
            self.settle();
        }
    }

    fn run(&mut self) {
        self.run_for(Duration::from_secs(60));
    }

    fn qp(&mut self, node: usize, qpn: u32, service: Service, receive: ReceiveFrom) {
        let config = QpConfig {
            service,
            pd: PD,
            send_cqn: 100 + qpn,
            receive_cqn: 200 + qpn,
            receive,
            xrcd: 3,
            source_qpn: None,
            deaf_to_itself: false,
        };
        self.nodes[node].engine.create_qp(qpn, config).unwrap();
    }

    fn modify(&mut self, node: usize, qpn: u32, change: Modify) {
        let node = &mut self.nodes[node];
        node.engine.modify(&mut node.host, qpn, &change).unwrap();
    }

    fn state(&mut self, node: usize, qpn: u32, state: State) {
        self.modify(
            node,
            qpn,
            Modify {
                state: Some(state),
                ..Modify::default()
            },
        );
    }

    fn state_of(&self, node: usize, qpn: u32) -> State {
        self.nodes[node].engine.query(qpn).unwrap().state
    }

    fn path_to(&self, node: usize) -> Path {
        Path {
            dlid: self.lid(node),
            path_bits: 0,
            sl: 0,
            grh: None,
        }
    }

    /// Takes a queue pair to RTS, connected to another one.
    fn bring_up(&mut self, node: usize, qpn: u32, to: usize, to_qpn: u32, link: Connection) {
        self.state(node, qpn, State::Init);
        let path = self.path_to(to);
        self.modify(
            node,
            qpn,
            Modify {
                state: Some(State::Rtr),
                access: Some(AccessFlags {
                    write: true,
                    read: true,
                    atomic: true,
                }),
                mtu: Some(link.mtu),
                receive_psn: Some(link.psn),
                send_psn: Some(link.psn),
                remote_qpn: Some(to_qpn),
                path: Some(path),
                min_rnr_timer: Some(12),
                rnr_retry: Some(link.rnr_retry),
                retry_count: Some(link.retry_count),
                ack_timeout: Some(14),
                max_initiated: Some(link.max_initiated),
                max_served: Some(16),
                ..Modify::default()
            },
        );
        self.state(node, qpn, State::Rts);
    }

    /// Connects queue pair 2 on node 0 and queue pair 3 on node 1.
    fn pair(&mut self, service: Service, link: Connection) {
        self.qp(0, 2, service, ReceiveFrom::Own);
        self.qp(1, 3, service, ReceiveFrom::Own);
        self.bring_up(0, 2, 1, 3, link);
        self.bring_up(1, 3, 0, 2, link);
    }

    /// Takes a datagram queue pair to RTS.
    fn datagrams_up(&mut self, node: usize, qpn: u32, qkey: u32) {
        self.modify(
            node,
            qpn,
            Modify {
                state: Some(State::Init),
                qkey: Some(qkey),
                ..Modify::default()
            },
        );
        self.state(node, qpn, State::Rtr);
        self.modify(
            node,
            qpn,
            Modify {
                state: Some(State::Rts),
                send_psn: Some(0),
                ..Modify::default()
            },
        );
    }

    fn datagram_to(&self, node: usize, qpn: u32, qkey: u32) -> AddressVector {
        AddressVector {
            path: self.path_to(node),
            qpn,
            qkey,
        }
    }

    fn post(&mut self, node: usize, qpn: u32, work: SendWork) {
        let node = &mut self.nodes[node];
        node.host.sends.entry(qpn).or_default().push_back(work);
        node.engine.doorbell(qpn);
    }

    fn receive(&mut self, node: usize, queue: Queue, id: u64, address: u64, length: u32) {
        let work = ReceiveWork {
            id,
            sges: smallvec![Sge {
                key: ALL_KEY,
                address,
                length
            }],
            left: 0,
        };
        self.nodes[node].host.receives.entry(queue).or_default().push_back(work);
    }

    /// Returns the identifiers and statuses of a node's send completions.
    fn sends(&self, node: usize) -> Vec<(u64, Status)> {
        let completions = self.nodes[node].host.completions.iter();
        completions
            .filter_map(|completion| match completion {
                Completion::Send { id, status, .. } => Some((*id, *status)),
                Completion::Receive { .. } => None,
            })
            .collect()
    }

    /// Returns the receive completions of a node: identifier, status, length, operation.
    fn received(&self, node: usize) -> Vec<(u64, Status, u32, Received)> {
        let completions = self.nodes[node].host.completions.iter();
        completions
            .filter_map(|completion| match completion {
                Completion::Receive {
                    id,
                    status,
                    length,
                    what,
                    ..
                } => Some((*id, *status, *length, *what)),
                Completion::Send { .. } => None,
            })
            .collect()
    }

    fn fill(&mut self, node: usize, address: usize, len: usize, seed: u8) -> Vec<u8> {
        let bytes: Vec<u8> = (0..len)
            .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed)
            .collect();
        self.nodes[node].host.memory[address..address + len].copy_from_slice(&bytes);
        bytes
    }

    fn bytes(&self, node: usize, address: usize, len: usize) -> &[u8] {
        &self.nodes[node].host.memory[address..address + len]
    }
}

/// Resolves all page faults of a node: provides the pages or, if `ok` is false, fails the accesses. Returns their
/// number.
fn serve_pages(node: &mut Node, ok: bool) -> usize {
    let page_requests = std::mem::take(&mut node.host.page_requests);
    for (token, page) in &page_requests {
        if ok {
            node.host.absent.remove(page);
        }
        node.engine.resume(*token, ok);
    }
    page_requests.len()
}

/// Attributes of a connection.
#[derive(Clone, Copy, Debug)]
struct Connection {
    mtu: Mtu,
    psn: u32,
    retry_count: u8,
    rnr_retry: u8,
    max_initiated: u8,
}

impl Default for Connection {
    fn default() -> Self {
        // Packet sequence numbers wrap around after 16 packets.
        Self {
            mtu: Mtu::B1024,
            psn: 0xff_fff0,
            retry_count: 7,
            rnr_retry: 6,
            max_initiated: 4,
        }
    }
}

/// Builds a signaled work request with one scatter/gather entry.
fn work(id: u64, op: SendOp, address: u64, length: u32) -> SendWork {
    SendWork {
        id,
        op,
        flags: SendFlags {
            signaled: true,
            ..SendFlags::default()
        },
        payload: Payload::Memory(smallvec![Sge {
            key: ALL_KEY,
            address,
            length
        }]),
        to: None,
        remote_srqn: 0,
    }
}

fn send(id: u64, address: u64, length: u32) -> SendWork {
    work(id, SendOp::Send { imm: None }, address, length)
}

fn write(id: u64, address: u64, length: u32, remote: u64) -> SendWork {
    work(
        id,
        SendOp::Write {
            remote: Remote {
                address: remote,
                key: ALL_KEY,
            },
            imm: None,
        },
        address,
        length,
    )
}

fn read(id: u64, address: u64, length: u32, remote: u64) -> SendWork {
    work(
        id,
        SendOp::Read {
            remote: Remote {
                address: remote,
                key: ALL_KEY,
            },
        },
        address,
        length,
    )
}

fn ok(ids: impl IntoIterator<Item = u64>) -> Vec<(u64, Status)> {
    ids.into_iter().map(|id| (id, Status::Success)).collect()
}
