// SPDX-License-Identifier: MIT OR Apache-2.0

//! Adapters in threads, each with an inbox, on a fabric in real time.

#[path = "../examples/write/adapter.rs"]
mod adapter;

use std::num::NonZeroU64;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use p2pmem_ib::{
    Completion, Delivery, Engine, Fabric, Faults, Host, Next, PortConfig, Remote, SendOp, SendWork, Status, Topology,
};

use adapter::{QPN, work};

enum Message {
    Delivery(Delivery),
    Work(Vec<SendWork>),
    Stop,
}

fn run(mut engine: Engine, mut host: adapter::Adapter, inbox: Receiver<Message>) -> (Engine, Vec<u8>) {
    let mut stopped = false;
    let mut busy_until = None;
    loop {
        let mut next = engine.run(&mut host);
        if stopped {
            // After a stop, run on for 200 ms so that the other adapter still gets its responses.
            let until = *busy_until.get_or_insert(host.now() + Duration::from_millis(200));
            if host.now() >= until {
                return (engine, host.memory);
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
            Err(RecvTimeoutError::Disconnected) => return (engine, host.memory),
        };
        while let Some(now) = message {
            match now {
                Message::Delivery(Delivery::Packets(burst)) => engine.packets(&mut host, burst),
                Message::Delivery(Delivery::PathReady) => engine.path_ready(),
                Message::Delivery(Delivery::Link(_)) => {}
                Message::Work(work) => {
                    host.send_queue.extend(work);
                    engine.doorbell(QPN);
                }
                Message::Stop => stopped = true,
            }
            message = inbox.try_recv().ok();
        }
    }
}

/// An adapter that runs in a thread.
struct Running {
    inbox: Sender<Message>,
    completions: Receiver<Completion>,
    thread: JoinHandle<(Engine, Vec<u8>)>,
}

/// Creates two adapters on one switch, with connected queue pairs. `faults` apply to the link of the first adapter, and the
/// rate to both links.
fn pair(bytes: [Vec<u8>; 2], faults: Faults, bytes_per_second: Option<NonZeroU64>) -> [Running; 2] {
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
            bytes_per_second,
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
        let (mut host, mut engine, completions) = adapter::Adapter::new(port, bytes.next().unwrap());
        host.connect(&mut engine, lids[other]).unwrap();
        Running {
            inbox: sender,
            completions,
            thread: std::thread::spawn(move || run(engine, host, inbox)),
        }
    })
}

/// Waits until the work requests with these identifiers have completed successfully, in order.
fn expect(adapter: &Running, ids: std::ops::Range<u64>) {
    for expected in ids {
        let completion = adapter
            .completions
            .recv_timeout(Duration::from_secs(120))
            .expect("a work request must complete within 120 s");
        let Completion::Send { id, status, .. } = completion else {
            panic!("{completion:?}")
        };
        assert_eq!((id, status), (expected, Status::Success));
    }
}

fn stop(adapters: [Running; 2]) -> [(Engine, Vec<u8>); 2] {
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
fn data_is_correct_over_lossy_link() {
    let half = 8 << 20;
    let memory = |seed| [pattern(half, seed), vec![0; half]].concat();
    let faults = Faults {
        delay: Duration::from_micros(300),
        loss: 0.002,
        duplicate: 0.001,
        ..Faults::default()
    };
    let adapters = pair([memory(1), memory(2)], faults, None);
    let chunk = 100_000;
    let count = half as u64 / chunk;
    for (i, adapter) in adapters.iter().enumerate() {
        let requests = (0..count).map(|id| {
            let (own, other) = (id * chunk, half as u64 + id * chunk);
            if i == 0 {
                let remote = Remote { address: other, key: 1 };
                work(id, SendOp::Write { remote, imm: None }, own, chunk as u32)
            } else {
                // READs start where the WRITEs start and end in the lower half, which the WRITEs do not change.
                let remote = Remote { address: own, key: 1 };
                work(id, SendOp::Read { remote }, own, chunk as u32)
            }
        });
        adapter.inbox.send(Message::Work(requests.collect())).unwrap();
    }
    for adapter in &adapters {
        expect(adapter, 0..count);
    }
    let moved = (count * chunk) as usize;
    let [(first, source), (_, target)] = stop(adapters);
    assert_eq!(target[half..half + moved], source[..moved]);
    assert_eq!(target[..moved], source[..moved]);
    let counters = first.counters();
    assert!(counters.retransmissions > 0, "{counters:?}");
}

/// Prints the throughput with `cargo test -p p2pmem-ib -- --nocapture`. Checks the data, and that no timeout or
/// retransmission occurred.
#[test]
fn throughput_of_large_messages() {
    const MESSAGE: u32 = 1 << 20;
    const MESSAGES: u64 = 1024;
    let adapters = pair([pattern(16 << 20, 1), vec![0; 16 << 20]], Faults::default(), None);
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

/// Prints the throughput of links with a rate with `cargo test -p p2pmem-ib -- --nocapture`. Checks that the links are never
/// faster than their rate. How much slower the threads of a loaded machine make them is not checked.
#[test]
fn links_with_a_rate_are_not_faster() {
    const MESSAGE: u32 = 1 << 20;
    const MESSAGES: u64 = 64;
    const RATE: u64 = 64 << 20;
    let adapters = pair(
        [pattern(16 << 20, 1), vec![0; 16 << 20]],
        Faults::default(),
        NonZeroU64::new(RATE),
    );
    let begin = Instant::now();
    let all = (0..MESSAGES).map(|i| {
        let address = (i % 16) * u64::from(MESSAGE);
        let remote = Remote { address, key: 1 };
        work(i, SendOp::Write { remote, imm: None }, address, MESSAGE)
    });
    adapters[0].inbox.send(Message::Work(all.collect())).unwrap();
    expect(&adapters[0], 0..MESSAGES);
    let rate = MESSAGES as f64 * f64::from(MESSAGE) / begin.elapsed().as_secs_f64();
    println!("{:.1} % of the rate", 100.0 * rate / RATE as f64);
    assert!(rate < RATE as f64, "{rate} bytes/s");
    let [(first, source), (_, target)] = stop(adapters);
    assert_eq!(source, target);
    assert_eq!((first.counters().timeouts, first.counters().retransmissions), (0, 0));
}
