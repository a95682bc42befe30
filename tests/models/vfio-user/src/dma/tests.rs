// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA without a client: mappings, targets, peers, and accesses that must fail.

use super::*;
use crate::memory::Memory;
use proptest::prelude::*;
use rustix::fs::MemfdFlags;

fn request(address: u64, size: u64, offset: u64, flags: u32) -> proto::DmaMap {
    proto::DmaMap {
        argsz: 32,
        flags,
        offset,
        address,
        size,
    }
}

fn memfd(size: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, size).unwrap();
    fd
}

fn file(size: u64) -> OwnedFd {
    // An unnamed file that is not a memfd, such as the memory of an ivshmem device.
    let fd = rustix::fs::open(
        std::env::temp_dir(),
        rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
    )
    .unwrap();
    rustix::fs::ftruncate(&fd, size).unwrap();
    fd
}

const RW: u32 = proto::DMA_READABLE | proto::DMA_WRITABLE;

#[test]
fn transfer_spans_mappings_and_is_counted_by_target() {
    let dma = Dma::new(None);
    dma.set_bus_master(true);
    let ram = memfd(0x4000);
    dma.map(&request(0x1000, 0x1000, 0x2000, RW), Some(ram.try_clone().unwrap()))
        .unwrap();
    dma.map(&request(0x2000, 0x1000, 0x1000, RW), Some(ram.try_clone().unwrap()))
        .unwrap();
    dma.map(&request(0x3000, 0x1000, 0, RW), Some(file(0x1000))).unwrap();
    let data: Vec<u8> = (0..0x2000_u32).map(|i| (i % 251) as u8).collect();
    dma.write(0x1800, &data).unwrap();
    let mut back = vec![0; 0x2000];
    dma.read(0x1800, &mut back).unwrap();
    assert_eq!(back, data);
    let mut raw = vec![0; 0x800];
    rustix::io::pread(&ram, &mut raw, 0x2800).unwrap();
    assert_eq!(raw, data[..0x800]);
    let counts = dma.counts();
    assert_eq!((counts.host_written, counts.peer_written), (0x1800, 0x800));
    assert_eq!(
        (counts.host_read, counts.peer_read, counts.message_read),
        (0x1800, 0x800, 0)
    );
    let memory = Memory::new("device", 0x4000).unwrap();
    dma.read_into(0x1800, &memory, 0x100, 0x2000).unwrap();
    memory.read(0x100, &mut back).unwrap();
    assert_eq!(back, data);
    dma.write_from(0x2000, &memory, 0x100, 0x10).unwrap();
    assert_eq!(
        dma.read_into(0x1800, &memory, 0x2001, 0x2000),
        Err(DmaError::Local(OutOfBounds))
    );
    assert_eq!(
        dma.segments(0x1800, 0x4000).unwrap(),
        [
            Segment {
                address: 0x1800,
                len: 0x1800,
                target: Target::Host
            },
            Segment {
                address: 0x3000,
                len: 0x1000,
                target: Target::Peer
            },
            Segment {
                address: 0x4000,
                len: 0x1800,
                target: Target::Message
            },
        ]
    );
    dma.reset_counts();
    assert_eq!(dma.counts(), DmaCounts::default());
}

#[test]
fn mapping_at_address_0_is_guest_memory() {
    let dma = Dma::new(None);
    let ram = file(0x2000);
    dma.map(&request(0x10_0000, 0x1000, 0x1000, RW), Some(ram.try_clone().unwrap()))
        .unwrap();
    assert_eq!(dma.segments(0x10_0000, 1).unwrap()[0].target, Target::Peer);
    dma.map(&request(0, 0x1000, 0, RW), Some(ram)).unwrap();
    assert_eq!(dma.segments(0x10_0000, 1).unwrap()[0].target, Target::Host);
}

#[test]
fn mapping_after_initial_ones_is_a_peer() {
    let dma = Dma::new(None);
    let ram = memfd(0x2000);
    dma.map(&request(0x1000, 0x1000, 0, RW), Some(ram.try_clone().unwrap()))
        .unwrap();
    dma.end_initial_maps();
    dma.map(&request(0x8000, 0x1000, 0, RW), Some(memfd(0x1000))).unwrap();
    dma.map(&request(0x9000, 0x1000, 0x1000, RW), Some(ram)).unwrap();
    let target = |address| dma.segments(address, 1).unwrap()[0].target;
    assert_eq!(
        [target(0x1000), target(0x8000), target(0x9000)],
        [Target::Host, Target::Peer, Target::Host]
    );
}

#[test]
fn invalid_transfers_are_refused() {
    let dma = Dma::new(None);
    let mut data = [0; 16];
    dma.map(&request(0x1000, 0x1000, 0, proto::DMA_READABLE), Some(memfd(0x1000)))
        .unwrap();
    assert_eq!(dma.read(0x1000, &mut data), Err(DmaError::BusMasterOff));
    dma.set_bus_master(true);
    dma.read(0x1000, &mut data).unwrap();
    assert_eq!(dma.write(0x1000, &data), Err(DmaError::Denied(0x1000)));
    assert_eq!(dma.read(0x1ff8, &mut data), Err(DmaError::Disconnected));
    assert_eq!(
        dma.read(u64::MAX - 3, &mut data),
        Err(DmaError::Unreachable(u64::MAX - 3))
    );
    let pinned = dma.pinned();
    pinned.read(0x1000, &mut data).unwrap();
    dma.abort();
    assert_eq!(pinned.read(0x1000, &mut data), Err(DmaError::Aborted));
    dma.read(0x1000, &mut data).unwrap();
}

#[test]
fn separate_handle_is_aborted_alone_and_with_all() {
    let dma = Dma::new(None);
    dma.set_bus_master(true);
    dma.map(&request(0x1000, 0x1000, 0, RW), Some(memfd(0x1000))).unwrap();
    let (first, second) = (dma.separate(), dma.separate());
    // Clones, and handles with other counters, belong to the same handle.
    let works = |dma: &Dma| dma.read(0x1000, &mut [0; 8]);
    let (one, two, shared) = (first.tallied().pinned(), second.pinned(), dma.pinned());
    first.abort_separate();
    assert_eq!(works(&one), Err(DmaError::Aborted));
    for dma in [&two, &shared, &first, &first.pinned()] {
        assert_eq!(works(dma), Ok(()));
    }
    let one = first.pinned();
    dma.abort();
    for dma in [&one, &two, &shared] {
        assert_eq!(works(dma), Err(DmaError::Aborted));
    }
    // A handle that is not separate stands for all.
    let two = second.pinned();
    dma.abort_separate();
    assert_eq!(works(&two), Err(DmaError::Aborted));
}

/// A bus with peers, one of which has 64 KiB of memory.
fn among_peers(name: &str) -> (Dma, peers::PeerHandle, Arc<Memory>) {
    let peers = Peers::new();
    let memory = Arc::new(Memory::new(name, 0x10000).unwrap());
    let offer = peers.add(2, name, Arc::clone(&memory), true).unwrap();
    let dma = Dma::new(Some(peers));
    dma.set_bus_master(true);
    (dma, offer, memory)
}

#[test]
fn a_tallied_handle_counts_its_own_transfers_only() {
    let (dma, offer, _memory) = among_peers("accel0");
    dma.map(&request(0, 0x1000, 0, RW), Some(memfd(0x1000))).unwrap();
    dma.map(&request(0x10000, 0x10000, 0, RW), None).unwrap();
    offer.set_address(Some(0x10000));
    let payload = dma.tallied();
    dma.write(0, &[1; 0x10]).unwrap();
    payload.pinned().write(0x10000, &[1; 0x20]).unwrap();
    payload.clone().read(0, &mut [0; 8]).unwrap();
    let counts = |read, written, peer| DmaCounts {
        host_read: read,
        host_written: written,
        peer_written: peer,
        ..DmaCounts::default()
    };
    assert_eq!(payload.counts(), counts(8, 0, 0x20));
    assert_eq!(payload.by_target()["accel0"].written, 0x20);
    assert_eq!(dma.counts(), counts(8, 0x10, 0x20));
    payload.reset_counts();
    assert_eq!(
        (payload.counts(), dma.counts()),
        (counts(0, 0, 0), counts(8, 0x10, 0x20))
    );
}

#[test]
fn a_peer_is_reached_directly_and_counted_by_name() {
    let (dma, offer, memory) = among_peers("accel0");
    let ram = memfd(0x1000);
    dma.map(&request(0, 0x1000, 0, RW), Some(ram)).unwrap();
    dma.map(&request(0x1000, 0xf000, 0, RW), Some(file(0xf000))).unwrap();
    offer.set_address(Some(0x10000));
    // The client has not mapped the address, so this device may not reach it directly, even if the peer table has it.
    assert_eq!(dma.write(0x10000, &[1]), Err(DmaError::Disconnected));
    dma.map(&request(0x10000, 0x10000, 0, RW), None).unwrap();
    let data: Vec<u8> = (0..0x2000_u32).map(|i| (i % 249) as u8).collect();
    dma.write(0xff00, &data).unwrap();
    let mut back = vec![0; 0x1f00];
    memory.read(0, &mut back).unwrap();
    assert_eq!(back, data[0x100..]);
    let extents = [(0x10000, 0x1f00), (0xff00, 0x100), (0, 0x10)].map(|(address, len)| Extent { address, len });
    let mut all = vec![9];
    dma.append_extents(&extents, &mut all).unwrap();
    assert_eq!(all[1..], [&data[0x100..], &data[..0x100], &[0; 0x10]].concat());
    let moved = |read, written| Moved { read, written };
    let expected = [
        ("accel0", moved(0x1f00, 0x1f00)),
        (HOST, moved(0x10, 0)),
        (OTHER_MAPPED, moved(0x100, 0x100)),
        (MESSAGE, moved(0, 0)),
    ];
    assert_eq!(
        dma.by_target(),
        expected.map(|(name, moved)| (name.to_owned(), moved)).into()
    );
    assert_eq!((dma.counts().peer_read, dma.counts().peer_written), (0x2000, 0x2000));
    assert_eq!(
        dma.segments(0xf000, 0x2000).unwrap(),
        [Segment {
            address: 0xf000,
            len: 0x2000,
            target: Target::Peer
        }]
    );
    dma.reset_counts();
    assert_eq!(dma.by_target().len(), 3);
    assert!(dma.by_target().values().all(|moved| *moved == Moved::default()));
}

#[test]
fn moved_peer_is_reached_at_new_address() {
    let (dma, offer, memory) = among_peers("accel0");
    dma.map(&request(0x10000, 0x40000, 0, RW), None).unwrap();
    offer.set_address(Some(0x10000));
    dma.write(0x10000, b"before").unwrap();
    offer.set_address(Some(0x30000));
    assert_eq!(dma.write(0x10000, b"stale!"), Err(DmaError::Disconnected));
    let mut data = [0; 6];
    dma.read(0x30000, &mut data).unwrap();
    assert_eq!(&data, b"before");
    offer.set_address(None);
    assert_eq!(dma.read(0x30000, &mut data), Err(DmaError::Disconnected));
    offer.set_address(Some(0x20000));
    dma.read(0x20000, &mut data).unwrap();
    drop(offer);
    assert_eq!(dma.write(0x20000, b"stale!"), Err(DmaError::Disconnected));
    memory.read(0, &mut data).unwrap();
    assert_eq!(&data, b"before");
}

#[test]
fn mapping_permissions_apply_to_peers() {
    let (dma, offer, _memory) = among_peers("accel0");
    dma.map(&request(0x10000, 0x10000, 0, proto::DMA_READABLE), None)
        .unwrap();
    offer.set_address(Some(0x10000));
    let mut data = [0; 8];
    dma.read(0x10000, &mut data).unwrap();
    assert_eq!(dma.write(0x10000, &data), Err(DmaError::Denied(0x10000)));
    assert_eq!(dma.update(0x10000, |old| old), Err(DmaError::Denied(0x10000)));
    dma.set_bus_master(false);
    assert_eq!(dma.read(0x10000, &mut data), Err(DmaError::BusMasterOff));
}

#[test]
fn peer_with_descriptor_is_counted_by_name() {
    let (dma, _offer, memory) = among_peers("accel0");
    dma.end_initial_maps();
    let fd = memory.fd().try_clone_to_owned().unwrap();
    dma.map(&request(0x50000, 0x1000, 0x2000, RW), Some(fd)).unwrap();
    dma.write(0x50000, b"direct").unwrap();
    let mut data = [0; 6];
    memory.read(0x2000, &mut data).unwrap();
    assert_eq!(&data, b"direct");
    assert_eq!(dma.by_target()["accel0"].written, 6);
}

/// No copy reaches an address that the peer left before the copy began.
#[test]
fn concurrent_moves_write_no_stale_address() {
    let (dma, offer, memory) = among_peers("accel0");
    dma.map(&request(0x10000, 0x20000, 0, RW), None).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let (mut landed, mut missed) = (0_u32, 0_u32);
            while !stop.load(Ordering::Relaxed) || landed == 0 || missed == 0 {
                match dma.write(0x10000, &[0xff; 0x1000]) {
                    Ok(()) => landed += 1,
                    Err(DmaError::Disconnected) => missed += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            (landed, missed)
        });
        for _ in 0..500 {
            offer.set_address(Some(0x10000));
            std::thread::yield_now();
            offer.set_address(Some(0x20000));
            // The peer is no longer at 0x10000, so no write may arrive.
            memory.write(0, &[0; 0x1000]).unwrap();
            std::thread::yield_now();
            let mut data = [0; 0x1000];
            memory.read(0, &mut data).unwrap();
            assert!(
                data.iter().all(|byte| *byte == 0),
                "a write reached the peer's memory at its old address"
            );
        }
        stop.store(true, Ordering::Relaxed);
        // The writer ends once it has seen success and failure; repeat until then.
        while !writer.is_finished() {
            offer.set_address(Some(0x10000));
            std::thread::yield_now();
            offer.set_address(None);
            std::thread::yield_now();
        }
        let (landed, missed) = writer.join().unwrap();
        assert!(landed > 0 && missed > 0);
    });
}

#[test]
fn atomics_are_atomic_between_devices_and_processors() {
    const ROUNDS: u64 = 50_000;
    let peers = Peers::new();
    let memory = Arc::new(Memory::new("shared", 0x1000).unwrap());
    let offer = peers.add(2, "shared", Arc::clone(&memory), true).unwrap();
    offer.set_address(Some(0x10000));
    let device = |fd: bool| {
        let dma = Dma::new(Some(peers.clone()));
        dma.set_bus_master(true);
        let fd = fd.then(|| memory.fd().try_clone_to_owned().unwrap());
        dma.map(&request(0x10000, 0x1000, 0, RW), fd).unwrap();
        dma
    };
    // Device `a` uses the peer table; device `b` has a mapping of its own, as a processor has.
    let (a, b) = (device(false), device(true));
    std::thread::scope(|scope| {
        for dma in [&a, &b] {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    dma.update(0x10008, |old| old + 1).unwrap();
                }
            });
        }
    });
    assert_eq!(
        a.update(0x10008, |old| if old == 2 * ROUNDS { 7 } else { old }),
        Ok(2 * ROUNDS)
    );
    let mut data = [0; 8];
    memory.read(8, &mut data).unwrap();
    assert_eq!(data, 7_u64.to_le_bytes());
    assert_eq!(a.update(0x10004, |old| old), Err(DmaError::Misaligned(0x10004)));
    let moved = a.by_target()["shared"];
    assert_eq!((moved.read, moved.written), (8 * (ROUNDS + 1), 8 * (ROUNDS + 1)));
}

#[test]
fn an_atomic_across_two_mappings_is_refused() {
    let dma = Dma::new(None);
    dma.set_bus_master(true);
    dma.map(&request(0x1000, 0xffc, 0, RW), Some(memfd(0x1000))).unwrap();
    dma.map(&request(0x1ffc, 0x1000, 0, RW), Some(memfd(0x1000))).unwrap();
    assert_eq!(dma.update(0x1ff8, |old| old + 1), Err(DmaError::Misaligned(0x1ff8)));
    // Aligned on the bus, but not in the mapping.
    assert_eq!(dma.update(0x2000, |old| old + 1), Err(DmaError::Misaligned(0x2000)));
    dma.update(0x1ff0, |old| old + 1).unwrap();
}

#[test]
fn extents_and_data_must_have_equal_length() {
    let dma = Dma::new(None);
    dma.set_bus_master(true);
    dma.map(&request(0, 0x1000, 0, RW), Some(memfd(0x1000))).unwrap();
    let extents = |list: &[(u64, u64)]| -> Vec<Extent> {
        list.iter()
            .map(|(address, len)| Extent {
                address: *address,
                len: *len,
            })
            .collect()
    };
    let mut data = [0; 16];
    dma.read_extents(&extents(&[(0, 8), (0, 0), (8, 8)]), &mut data)
        .unwrap();
    for bad in [&[(0, 8)][..], &[(0, 8), (8, 9)], &[(0, u64::MAX), (0, 17)]] {
        assert_eq!(
            dma.read_extents(&extents(bad), &mut data),
            Err(DmaError::Local(OutOfBounds))
        );
        assert_eq!(
            dma.write_extents(&extents(bad), &data),
            Err(DmaError::Local(OutOfBounds))
        );
    }
    let beyond = extents(&[(u64::MAX, 2)]);
    assert_eq!(
        dma.append_extents(&beyond, &mut Vec::new()),
        Err(DmaError::Unreachable(u64::MAX))
    );
}

#[test]
fn invalid_mappings_are_rejected() {
    let dma = Dma::new(None);
    let try_map = |address, size, offset, fd: Option<OwnedFd>| dma.map(&request(address, size, offset, RW), fd);
    assert_eq!(try_map(0, 0, 0, None), Err(Errno::INVAL));
    assert_eq!(try_map(u64::MAX, 2, 0, None), Err(Errno::INVAL));
    assert_eq!(try_map(0, 0x2000, 0, Some(memfd(0x1000))), Err(Errno::INVAL));
    assert_eq!(try_map(0, 0x1000, u64::MAX, Some(memfd(0x1000))), Err(Errno::INVAL));
    assert_eq!(dma.map(&request(0, 1, 0, 4), None), Err(Errno::INVAL));
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    assert!(try_map(0, 0x1000, 0, Some(pipe)).is_err());
    try_map(0x1000, 0x1000, 0, None).unwrap();
    for (address, size) in [
        (0x1000, 0x1000),
        (0, 0x1001),
        (0x1fff, 1),
        (0x1800, 0x10),
        (0, u64::MAX),
    ] {
        assert_eq!(
            try_map(address, size, 0, None),
            Err(Errno::EXIST),
            "{address:#x} {size:#x}"
        );
    }
    try_map(0x2000, u64::MAX - 0x1fff, 0, None).unwrap();
    assert_eq!(dma.unmap(0x1000, 0x800), Err(Errno::INVAL));
    assert_eq!(dma.unmap(0x1800, 0x800), Err(Errno::INVAL));
    assert_eq!(dma.unmap(0x1000, 0), Err(Errno::INVAL));
    dma.unmap(0, 0x1000).unwrap();
    dma.unmap(0x1000, 0x1000).unwrap();
    try_map(0x1000, 0x1000, 0, None).unwrap();
    dma.unmap_all();
    try_map(0, u64::MAX, 0, None).unwrap();
}

proptest! {
    /// The table gives the same results as a list that is searched linearly.
    #[test]
    fn table_agrees_with_a_list(ops in proptest::collection::vec((any::<bool>(), 0_u64..64, 1_u64..16), 1..60)) {
        let dma = Dma::new(None);
        let mut list: Vec<(u64, u64)> = Vec::new();
        for (map, start, len) in ops {
            let end = start + len;
            if map {
                let clash = list.iter().any(|(s, e)| *s < end && start < *e);
                let result = dma.map(&request(start, len, 0, RW), None);
                prop_assert_eq!(result, if clash { Err(Errno::EXIST) } else { Ok(()) });
                if !clash {
                    list.push((start, end));
                }
            } else {
                let cut = list.iter().any(|(s, e)| *s < end && start < *e && (*s < start || *e > end));
                prop_assert_eq!(dma.unmap(start, len), if cut { Err(Errno::INVAL) } else { Ok(()) });
                if !cut {
                    list.retain(|(s, e)| *s < start || *e > end);
                }
            }
            let table = dma.shared.table.read().unwrap();
            for address in 0..80 {
                let inside = list.iter().find(|(s, e)| (*s..*e).contains(&address));
                let (found, run) = table.find(address, 1000);
                prop_assert_eq!(found.is_some(), inside.is_some());
                let free = list.iter().map(|(s, _)| *s).filter(|s| *s > address).min().map_or(1000, |s| s - address);
                prop_assert_eq!(run, inside.map_or(free, |(_, e)| e - address));
            }
        }
    }
}
