// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::{Request, VerdictCode};

#[test]
fn each_verdict_is_given_for_its_reason() {
    let at = |bus| PciAddr {
        domain: 0,
        bus,
        devfn: 0,
    };
    let (client, lonely) = (at(100), at(101));
    let fake = Fake::new()
        .provider(at(1), 1 << 20)
        .provider(at(2), 1 << 20)
        .provider(at(3), 1 << 20)
        .provider(at(4), 64 << 10)
        .path(at(1), client, PathClass::SameSwitch, 4)
        .path(at(2), client, PathClass::SameSwitch, 6)
        .path(at(1), lonely, PathClass::Unreachable, 0);
    let device = fake.device();
    let codes = |request: &Request| -> Vec<VerdictCode> {
        device
            .explain(request)
            .unwrap()
            .verdicts
            .iter()
            .map(|v| v.code)
            .collect()
    };
    use VerdictCode::*;
    assert_eq!(
        codes(&Request::new(512 << 10).near([client])),
        [Chosen, Hops, Class, TooSmall]
    );
    assert_eq!(
        codes(&Request::new(4096).near([lonely])),
        [Unreachable, Chosen, Order, Order]
    );
    let near = Request::new(4096).near([client]);
    assert_eq!(
        codes(&near.clone().max_class(PathClass::SameSwitch)),
        [Chosen, Hops, TooFar, TooFar]
    );
    assert_eq!(codes(&near.clone().provider(3)), [NotNamed, NotNamed, Chosen, NotNamed]);
    assert_eq!(codes(&near.prefer(3)), [NotNamed, NotNamed, Chosen, NotNamed]);
    assert_eq!(
        codes(&Request::new(1 << 20).prefer(4)),
        [Chosen, Order, Order, TooSmall]
    );

    // Free two of four buffers of provider 1 that are not neighbors: half a megabyte is free, but not in one piece.
    let request = Request::new(256 << 10).provider(1);
    let mut four: Vec<_> = (0..4).map(|_| device.alloc(&request).unwrap()).collect();
    assert_eq!(device.alloc(&request).unwrap_err().errno(), Some(libc::ENOSPC));
    assert_eq!(codes(&request)[0], Full);
    four.remove(2);
    four.remove(0);
    assert_eq!(codes(&Request::new(512 << 10).provider(1))[0], Fragmented);
}

#[test]
fn freed_memory_is_cleared() {
    let device = Fake::example().device();
    let request = Request::new(8192).provider(1);
    device
        .alloc(&request)
        .unwrap()
        .map()
        .unwrap()
        .fill(0..8192, 0xaa)
        .unwrap();
    let again = device.alloc(&request).unwrap();
    assert_eq!(again.bar_offset(), Some(0), "the same place");
    assert_eq!(again.map().unwrap().read::<u64>(4096).unwrap(), 0);
}

#[test]
fn close_frees_buffers() {
    let fake = Fake::example();
    let buffer = fake.device().alloc(&Request::new(4096)).unwrap();
    std::mem::forget(buffer.map().unwrap());
    drop(buffer);
    assert_eq!(fake.device().info().unwrap().buffers, 0);
}
