// SPDX-License-Identifier: MIT OR Apache-2.0

//! A minimal adapter: memory that every key can access completely, one queue pair with a send queue, and completions
//! that go to a channel. The tests with threads use this adapter too.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use p2pmem_ib::{
    Access, AccessFlags, Atomic, Completion, Engine, Event, Fault, Fetched, Host, Modify, Mtu, Packet, Path, Payload,
    Port, PortAttributes, QpConfig, Queue, ReceiveFrom, ReceiveWork, SendFlags, SendOp, SendWork, Service, Sge, State,
    Status,
};

/// The number of the adapter's queue pair.
pub const QPN: u32 = 7;

/// The host of an engine.
pub struct Adapter {
    start: Instant,
    pub port: Port,
    pub memory: Vec<u8>,
    pub send_queue: VecDeque<SendWork>,
    completions: Sender<Completion>,
}

impl Adapter {
    /// Creates an adapter at a port, and its engine. Completions arrive at the receiver.
    pub fn new(port: Port, memory: Vec<u8>) -> (Self, Engine, Receiver<Completion>) {
        let attributes = PortAttributes {
            lid: port.lid(),
            lmc: 0,
            gids: vec![port.gid()],
            pkeys: vec![0xffff],
        };
        let (sender, completions) = mpsc::channel();
        let adapter = Self {
            start: Instant::now(),
            port,
            memory,
            send_queue: VecDeque::new(),
            completions: sender,
        };
        (adapter, Engine::new(attributes), completions)
    }

    /// Creates the queue pair and connects it to the queue pair of the adapter at `dlid`.
    pub fn connect(&mut self, engine: &mut Engine, dlid: u16) -> Result<(), Box<dyn std::error::Error>> {
        engine.create_qp(
            QPN,
            QpConfig {
                service: Service::Rc,
                pd: 1,
                send_cqn: 1,
                receive_cqn: 1,
                receive: ReceiveFrom::None,
                xrcd: 0,
                source_qpn: None,
                deaf_to_itself: false,
            },
        )?;
        for state in [State::Init, State::Rtr, State::Rts] {
            let change = Modify {
                state: Some(state),
                access: Some(AccessFlags {
                    write: true,
                    read: true,
                    atomic: false,
                }),
                mtu: Some(Mtu::B4096),
                receive_psn: Some(0),
                send_psn: Some(0),
                remote_qpn: Some(QPN),
                path: Some(Path {
                    dlid,
                    path_bits: 0,
                    sl: 0,
                    grh: None,
                }),
                retry_count: Some(7),
                ack_timeout: Some(12),
                max_initiated: Some(16),
                ..Modify::default()
            };
            engine.modify(self, QPN, &change)?;
        }
        Ok(())
    }

    fn range(&self, access: &Access) -> Result<std::ops::Range<usize>, Fault> {
        let end = access.address.checked_add(access.length).ok_or(Fault::Bounds)?;
        if end > self.memory.len() as u64 {
            return Err(Fault::Bounds);
        }
        Ok(access.address as usize..end as usize)
    }
}

impl Host for Adapter {
    fn now(&mut self) -> Duration {
        self.start.elapsed()
    }

    fn next_send(&mut self, _qpn: u32) -> Fetched<SendWork> {
        self.send_queue.pop_front().map_or(Fetched::Empty, Fetched::Work)
    }

    fn next_receive(&mut self, _queue: Queue) -> Fetched<ReceiveWork> {
        Fetched::Empty
    }

    fn read(&mut self, access: &Access, data: &mut [u8]) -> Result<(), Fault> {
        data.copy_from_slice(&self.memory[self.range(access)?]);
        Ok(())
    }

    fn write(&mut self, access: &Access, data: &[u8]) -> Result<(), Fault> {
        let range = self.range(access)?;
        self.memory[range].copy_from_slice(data);
        Ok(())
    }

    fn check(&mut self, access: &Access) -> Result<(), Fault> {
        self.range(access).map(drop)
    }

    fn atomic(&mut self, _access: &Access, _operation: Atomic) -> Result<u64, Fault> {
        Err(Fault::Rights)
    }

    fn local(&mut self, _qpn: u32, _id: u64) -> Result<(), Status> {
        Ok(())
    }

    fn invalidate(&mut self, _qpn: u32, _pd: u32, _key: u32) -> Result<(), Fault> {
        Err(Fault::Key)
    }

    fn complete(&mut self, completion: Completion) {
        // Fails only if the receiver was dropped: no completion is expected then.
        let _ = self.completions.send(completion);
    }

    fn event(&mut self, _event: Event) {}

    fn transmit(&mut self, packets: Vec<Packet>) {
        self.port.send(packets);
    }

    fn has_space(&mut self, dlid: u16) -> bool {
        self.port.has_space(dlid)
    }

    fn in_flight(&mut self, dlid: u16) -> bool {
        self.port.in_flight(dlid)
    }
}

/// Builds a signaled work request for `length` bytes of the adapter's memory from `address` on.
pub fn work(id: u64, op: SendOp, address: u64, length: u32) -> SendWork {
    let all = Sge {
        key: 1,
        address,
        length,
    };
    SendWork {
        id,
        op,
        flags: SendFlags {
            signaled: true,
            ..SendFlags::default()
        },
        payload: Payload::Memory([all].into_iter().collect()),
        to: None,
        remote_srqn: 0,
    }
}
