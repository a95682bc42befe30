// SPDX-License-Identifier: MIT OR Apache-2.0

//! Adapters as they are used: a thread each, with an inbox, on a fabric in real time.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use p2pmem_ib::{
    Access, AccessFlags, Atomic, Completion, Delivery, Engine, Event, Fabric, Fault, Faults, Fetched, Host, Modify,
    Mtu, Next, Packet, Path, Payload, Port, PortAttributes, PortConfig, QpConfig, Queue, ReceiveFrom, ReceiveWork,
    Remote, SendFlags, SendOp, SendWork, Service, Sge, State, Status, Topology,
};

/// The one queue pair of an adapter.
const QPN: u32 = 7;

enum Message {
    Delivery(Delivery),
    Work(Vec<SendWork>),
    Stop,
}

struct Memory {
    start: Instant,
    port: Port,
    bytes: Vec<u8>,
    sends: VecDeque<SendWork>,
    completions: Sender<Completion>,
}

impl Memory {
    fn range(&self, access: &Access) -> Result<std::ops::Range<usize>, Fault> {
        let end = access
            .address
            .checked_add(access.length)
            .filter(|end| *end <= self.bytes.len() as u64);
        end.map(|end| access.address as usize..end as usize)
            .ok_or(Fault::Bounds)
    }
}

impl Host for Memory {
    fn now(&mut self) -> Duration {
        self.start.elapsed()
    }

    fn next_send(&mut self, _: u32) -> Fetched<SendWork> {
        self.sends.pop_front().map_or(Fetched::Empty, Fetched::Work)
    }

    fn next_receive(&mut self, _: Queue) -> Fetched<ReceiveWork> {
        Fetched::Empty
    }

    fn read(&mut self, access: &Access, data: &mut [u8]) -> Result<(), Fault> {
        data.copy_from_slice(&self.bytes[self.range(access)?]);
        Ok(())
    }

    fn write(&mut self, access: &Access, data: &[u8]) -> Result<(), Fault> {
        let range = self.range(access)?;
        self.bytes[range].copy_from_slice(data);
        Ok(())
    }

    fn check(&mut self, access: &Access) -> Result<(), Fault> {
        self.range(access).map(drop)
    }

    fn atomic(&mut self, _: &Access, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::Rights)
    }

    fn local(&mut self, _: u32, _: u64) -> Result<(), Status> {
        Ok(())
    }

    fn invalidate(&mut self, _: u32, _: u32, _: u32) -> Result<(), Fault> {
        Err(Fault::Key)
    }

    fn complete(&mut self, completion: Completion) {
        // Whoever asked may have gone.
        let _ = self.completions.send(completion);
    }

    fn event(&mut self, _: Event) {}

    fn transmit(&mut self, packets: Vec<Packet>) {
        self.port.send(packets);
    }

    fn has_room(&mut self, dlid: u16) -> bool {
        self.port.has_room(dlid)
    }

    fn in_flight(&mut self, dlid: u16) -> bool {
        self.port.in_flight(dlid)
    }
}

fn run(mut engine: Engine, mut host: Memory, inbox: Receiver<Message>) -> (Engine, Vec<u8>) {
    let mut stopped = false;
    let mut busy_until = None;
    loop {
        let mut next = engine.run(&mut host);
        if stopped {
            // What the other side needs from here is still given to it.
            let until = *busy_until.get_or_insert(host.now() + Duration::from_millis(200));
            if host.now() >= until {
                return (engine, host.bytes);
            }
            next = match next {
                Next::At(time) => Next::At(time.min(until)),
                Next::More => Next::More,
                Next::Idle => Next::At(until),
            };
        }
        let wait = match next {
            Next::More => Duration::ZERO,
            Next::At(time) => time.saturating_sub(host.now()),
            Next::Idle => Duration::from_secs(60),
        };
        let mut message = match inbox.recv_timeout(wait) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return (engine, host.bytes),
        };
        while let Some(now) = message {
            match now {
                Message::Delivery(Delivery::Packets(burst)) => engine.packets(&mut host, burst),
                Message::Delivery(Delivery::Room) => engine.room(),
                Message::Delivery(Delivery::Link(_)) => {}
                Message::Work(work) => {
                    host.sends.extend(work);
                    engine.doorbell(QPN);
                }
                Message::Stop => stopped = true,
            }
            message = inbox.try_recv().ok();
        }
    }
}

struct Adapter {
    inbox: Sender<Message>,
    completions: Receiver<Completion>,
    thread: JoinHandle<(Engine, Vec<u8>)>,
}

/// Two adapters on one switch with a connected queue pair each, and what happens on the first one's link.
fn pair(bytes: [Vec<u8>; 2], faults: Faults) -> [Adapter; 2] {
    let topology = Topology {
        switches: vec!["sw".into()],
        links: Vec::new(),
    };
    let fabric = Fabric::new(&topology, 42).unwrap();
    let mut inboxes = Vec::new();
    let mut ports = Vec::new();
    for i in 0..2 {
        let (sender, inbox) = mpsc::channel();
        let deliver = sender.clone();
        let config = PortConfig {
            name: format!("port {i}"),
            guid: 100 + i,
            switch: "sw".into(),
        };
        let port = fabric
            .join(&config, move |delivery| drop(deliver.send(Message::Delivery(delivery))))
            .unwrap();
        assert!(port.is_up());
        ports.push(port);
        inboxes.push((sender, inbox));
    }
    ports[0].set_faults(faults);
    let lids = [ports[0].lid(), ports[1].lid()];
    let mut ports = ports.into_iter();
    let mut inboxes = inboxes.into_iter();
    let mut bytes = bytes.into_iter();
    [1, 0].map(|other| {
        let (port, (sender, inbox)) = (ports.next().unwrap(), inboxes.next().unwrap());
        let (sink, completions) = mpsc::channel();
        let attributes = PortAttributes {
            lid: port.lid(),
            lmc: 0,
            gids: vec![port.gid()],
            pkeys: vec![0xffff],
        };
        let mut engine = Engine::new(attributes);
        let bytes = bytes.next().unwrap();
        let mut host = Memory {
            start: Instant::now(),
            port,
            bytes,
            sends: VecDeque::new(),
            completions: sink,
        };
        let config = QpConfig {
            service: Service::Rc,
            pd: 1,
            send_cqn: 1,
            receive_cqn: 1,
            receive: ReceiveFrom::None,
            xrcd: 0,
            source_qpn: None,
            deaf_to_itself: false,
        };
        engine.create_qp(QPN, config).unwrap();
        let change = Modify {
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
                dlid: lids[other],
                path_bits: 0,
                sl: 0,
                grh: None,
            }),
            retry_count: Some(7),
            ack_timeout: Some(12),
            max_initiated: Some(16),
            ..Modify::default()
        };
        for state in [State::Init, State::Rtr, State::Rts] {
            engine
                .modify(
                    &mut host,
                    QPN,
                    &Modify {
                        state: Some(state),
                        ..change
                    },
                )
                .unwrap();
        }
        Adapter {
            inbox: sender,
            completions,
            thread: std::thread::spawn(move || run(engine, host, inbox)),
        }
    })
}

fn work(id: u64, op: SendOp, address: u64, length: u32) -> SendWork {
    SendWork {
        id,
        op,
        flags: SendFlags {
            signaled: true,
            ..SendFlags::default()
        },
        payload: Payload::Memory(
            [Sge {
                key: 1,
                address,
                length,
            }]
            .into_iter()
            .collect(),
        ),
        to: None,
        remote_srqn: 0,
    }
}

/// Waits for the success of so many work requests, in order.
fn expect(adapter: &Adapter, ids: std::ops::Range<u64>) {
    for expected in ids {
        let completion = adapter
            .completions
            .recv_timeout(Duration::from_secs(120))
            .expect("a completion in time");
        let Completion::Send { id, status, .. } = completion else {
            panic!("{completion:?}")
        };
        assert_eq!((id, status), (expected, Status::Success));
    }
}

fn stop(adapters: [Adapter; 2]) -> [(Engine, Vec<u8>); 2] {
    for adapter in &adapters {
        adapter.inbox.send(Message::Stop).unwrap();
    }
    adapters.map(|adapter| adapter.thread.join().unwrap())
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(7) ^ (i >> 8) as u8 ^ (i >> 16) as u8 ^ seed)
        .collect()
}

#[test]
fn bytes_arrive_over_a_bad_link() {
    let half = 8 << 20;
    let memory = |seed| [pattern(half, seed), vec![0; half]].concat();
    let faults = Faults {
        delay: Duration::from_micros(300),
        loss: 0.002,
        duplicate: 0.001,
        ..Faults::default()
    };
    let adapters = pair([memory(1), memory(2)], faults);
    let piece = 100_000;
    let count = half as u64 / piece;
    for (i, adapter) in adapters.iter().enumerate() {
        let work = (0..count).map(|id| {
            let (own, other) = (id * piece, half as u64 + id * piece);
            if i == 0 {
                let remote = Remote { address: other, key: 1 };
                work(id, SendOp::Write { remote, imm: None }, own, piece as u32)
            } else {
                // From where the writes come, to where they do not go: the lower half is its own.
                let remote = Remote { address: own, key: 1 };
                work(id, SendOp::Read { remote }, own, piece as u32)
            }
        });
        adapter.inbox.send(Message::Work(work.collect())).unwrap();
    }
    for adapter in &adapters {
        expect(adapter, 0..count);
    }
    let moved = (count * piece) as usize;
    let [(first, source), (_, target)] = stop(adapters);
    assert_eq!(target[half..half + moved], source[..moved]);
    assert_eq!(target[..moved], source[..moved]);
    let counters = first.counters();
    assert!(counters.retransmissions > 0, "{counters:?}");
}

/// Prints how much goes through, with `cargo test -p p2pmem-ib -- --nocapture`; asserts that it is right.
#[test]
fn throughput_of_large_messages() {
    const MESSAGE: u32 = 1 << 20;
    const MESSAGES: u64 = 1024;
    let adapters = pair([pattern(16 << 20, 1), vec![0; 16 << 20]], Faults::default());
    for (name, base) in [("write", 0), ("read", MESSAGES)] {
        let begin = Instant::now();
        let all = (0..MESSAGES).map(|i| {
            let address = (i % 16) * u64::from(MESSAGE);
            let remote = Remote { address, key: 1 };
            let op = match name {
                "write" => SendOp::Write { remote, imm: None },
                _ => SendOp::Read { remote },
            };
            work(base + i, op, address, MESSAGE)
        });
        adapters[0].inbox.send(Message::Work(all.collect())).unwrap();
        expect(&adapters[0], base..base + MESSAGES);
        let gib = MESSAGES as f64 * f64::from(MESSAGE) / f64::from(1 << 30);
        println!("{name}: {:.2} GiB/s", gib / begin.elapsed().as_secs_f64());
    }
    let [(first, source), (_, target)] = stop(adapters);
    assert_eq!(source, target);
    assert_eq!((first.counters().timeouts, first.counters().retransmissions), (0, 0));
}
