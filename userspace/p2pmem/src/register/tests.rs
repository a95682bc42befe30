// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::fake::{Fake, FakeNic};
use crate::{Device, Request};

fn fixture() -> (Fake, Device, FakeNic) {
    let fake = Fake::example();
    let device = fake.device();
    (fake, device, FakeNic::new("mlx5_0"))
}

#[test]
fn registration_has_mapping_address_if_mapped() {
    let (_fake, device, nic) = fixture();
    let buffer = device.alloc(&Request::new(1 << 20)).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let unmapped = buffer.register(&nic.pd(), access).unwrap();
    assert_eq!(
        (unmapped.addr(), unmapped.len(), unmapped.method()),
        (0, 1 << 20, RegistrationMethod::DmaBuf)
    );
    assert_eq!(unmapped.dmabuf().unwrap().size(), 1 << 20);

    let memory = buffer.map().unwrap();
    let at = memory.as_ptr() as u64;
    assert_eq!(buffer.register(&nic.pd(), access).unwrap().addr(), at);
    let part = RegisterOptions::new(access).range(5000..5100);
    let registration = memory.register_with(&nic.pd(), &part).unwrap();
    assert_eq!((registration.addr(), registration.len()), (at + 5000, 100));
    assert_eq!(
        registration.dmabuf().unwrap().size(),
        4096,
        "the page that the bytes are in"
    );
    assert_ne!(registration.rkey(), unmapped.rkey());
    drop(memory);
    let moved = buffer.register(&nic.pd(), access).unwrap();
    assert_eq!(
        moved.addr(),
        at,
        "a registration keeps the mapping whose addresses it uses"
    );
    drop((registration, moved));
    assert_eq!(
        buffer.register(&nic.pd(), access).unwrap().addr(),
        0,
        "no mapping is left"
    );
    assert_eq!(nic.regions(), 1);
}

#[test]
fn a_registration_ends_once_and_may_outlive_its_buffer_and_device() {
    let (fake, device, nic) = fixture();
    let buffer = device.alloc(&Request::new(4096)).unwrap();
    let first = buffer.register(&nic.pd(), Access::ALL).unwrap();
    let second = buffer.register(&nic.pd(), Access::ALL).unwrap();
    drop((buffer, device, fake));
    assert_eq!(nic.regions(), 2);
    first.deregister().unwrap();
    drop(second);
    assert_eq!(nic.regions(), 0);
}

#[test]
fn failed_deregistration_returns_error() {
    let (_fake, device, nic) = fixture();
    let buffer = device.alloc(&Request::new(4096)).unwrap();
    let registration = buffer.register(&nic.pd(), Access::LOCAL_READ).unwrap();
    nic.fail_next(libc::EBUSY);
    let error = registration.deregister().unwrap_err();
    assert_eq!(
        error.to_string(),
        "ending a registration with mlx5_0 failed: Device or resource busy (EBUSY)"
    );
    assert_eq!(nic.regions(), 1, "the region is deregistered only once");
}

#[test]
fn a_failure_names_buffer_nic_method_errno_and_remedy() {
    let (fake, device, nic) = fixture();
    let buffer = device.alloc(&Request::new(16 << 20).provider(1)).unwrap();
    nic.fail_next(libc::EOPNOTSUPP);
    let error = buffer.register(&nic.pd(), Access::ALL).unwrap_err();
    assert_eq!(
        error.to_string(),
        "registering 16 MiB of buffer 1 (16 MiB in provider 1, 0000:03:00.0 BAR 2) with mlx5_0 by dma-buf failed: \
             Operation not supported (EOPNOTSUPP)"
    );
    assert!(error.remedy().unwrap().contains("on-demand paging"));
    assert_eq!(
        error.reason(),
        None,
        "the allocation's message does not belong to the registration"
    );

    fake.refuse_importer(libc::EHOSTUNREACH, "0000:0a:00.0 cannot reach 0000:03:00.0: ACS");
    nic.fail_next(libc::EHOSTUNREACH);
    let error = buffer.register(&nic.pd(), Access::ALL).unwrap_err();
    assert_eq!(error.reason(), Some("0000:0a:00.0 cannot reach 0000:03:00.0: ACS"));
    assert!(error
        .to_string()
        .ends_with("(EHOSTUNREACH): 0000:0a:00.0 cannot reach 0000:03:00.0: ACS"));
    assert!(error.remedy().unwrap().contains("allocate near it"));
    nic.fail_next(libc::ENOMEM);
    let error = buffer.register(&nic.pd(), Access::ALL).unwrap_err();
    assert_eq!(error.reason(), None, "the driver's own error, not the module's");

    fake.remove_provider(1);
    let error = buffer.register(&nic.pd(), Access::ALL).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Refused {
                errno: libc::ENODEV,
                ..
            }
        ),
        "the export fails before the registration: {error}"
    );
    assert_eq!(nic.regions(), 0);
}

#[test]
fn invalid_registrations_fail_before_the_nic() {
    let (_fake, device, nic) = fixture();
    let buffer = device.alloc(&Request::new(8192)).unwrap();
    let what = RegisterOptions::new(Access::ALL);
    #[allow(clippy::reversed_empty_ranges)]
    let bad = [
        what.clone().range(0..0),
        what.clone().range(0..8193),
        what.clone().range(9..8),
        what.clone().range(100..200).iova(4096),
        what.clone().method(RegistrationMethod::PeerMemory),
    ];
    for what in bad {
        let error = buffer.register_with(&nic.pd(), &what).unwrap_err();
        assert!(matches!(error, Error::Request(_)), "{what:?}: {error}");
    }
    assert_eq!(nic.regions(), 0);
    let fitting = what.range(100..200).iova((7 << 12) + 100);
    assert_eq!(
        buffer.register_with(&nic.pd(), &fitting).unwrap().addr(),
        (7 << 12) + 100
    );
}

#[test]
fn peer_memory_method_is_used_if_requested() {
    let (_fake, device, nic) = fixture();
    let buffer = device.alloc(&Request::new(8192)).unwrap();
    let memory = buffer.map().unwrap();
    let what = RegisterOptions::new(Access::ALL)
        .method(RegistrationMethod::PeerMemory)
        .range(4096..8192);
    let registration = memory.register_with(&nic.pd(), &what).unwrap();
    assert_eq!(
        (registration.method(), registration.len()),
        (RegistrationMethod::PeerMemory, 4096)
    );
    assert!(registration.dmabuf().is_none());
    nic.fail_next(libc::EREMOTEIO);
    let error = memory.register_with(&nic.pd(), &what).unwrap_err();
    assert!(error.to_string().contains("by peer memory failed"), "{error}");
    assert!(error.remedy().unwrap().contains("by dma-buf"), "{error}");
}

#[test]
fn a_registration_of_a_mapping_outlives_both() {
    fn check<T: Send + Sync>() {}
    check::<Registration>();
    check::<Pd>();
    let (_fake, device, nic) = fixture();
    let buffer = device.alloc(&Request::new(8192)).unwrap();
    let memory = buffer.map().unwrap();
    let registration = memory.register(&nic.pd(), Access::ALL).unwrap();
    drop((buffer, memory));
    assert_eq!(registration.len(), 8192);
    assert!(format!("{registration:?}").contains("mlx5_0"));
}
