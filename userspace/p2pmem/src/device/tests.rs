// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::addr::PciAddr;
use crate::fake::Fake;
use crate::{Buffer, PathClass};

fn client(text: &str) -> Client {
    Client::new(text.parse().unwrap())
}

#[test]
fn queries_return_module_state() {
    let device = Fake::example().device();
    let info = device.info().unwrap();
    assert_eq!((info.abi_version, info.providers), (abi::P2PMEM_ABI_VERSION, 3));
    let providers = device.providers().unwrap();
    assert_eq!(providers.iter().map(|p| p.id).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(device.stats(None).unwrap(), Stats::default());
    assert_eq!(device.explain_last().unwrap_err().errno(), Some(libc::ENODATA));
}

#[test]
fn lists_larger_than_first_buffer_are_read_completely() {
    let mut fake = Fake::new();
    for n in 0..100 {
        fake = fake.provider(
            PciAddr {
                domain: 0,
                bus: n,
                devfn: 0,
            },
            1 << 20,
        );
    }
    let device = fake.device();
    assert_eq!(device.providers().unwrap().len(), 100);
    let clients: Vec<_> = (0..130)
        .map(|n| {
            Client::new(PciAddr {
                domain: 1,
                bus: n,
                devfn: 0,
            })
        })
        .collect();
    let paths = device.rescan_paths(&clients).unwrap();
    assert_eq!(paths.len(), 100 * 130);
    assert!(paths
        .iter()
        .enumerate()
        .all(|(i, p)| (p.provider as usize, p.client) == (i / 130 + 1, i % 130)));
    let explanation = device.explain(&Request::new(4096)).unwrap();
    assert_eq!(explanation.verdicts.len(), 100);
}

#[test]
fn nearest_provider_is_chosen_and_explained() {
    let device = Fake::example().device();
    let request = Request::new(16 << 20).near([client("0000:04:00.0")]);
    let dry = device.explain(&request).unwrap();
    assert_eq!((dry.chosen, dry.errno), (Some(1), None));
    let buffer = device.alloc(&request).unwrap();
    assert_eq!((buffer.provider(), buffer.class()), (1, Some(PathClass::SameSwitch)));
    let last = device.explain_last().unwrap();
    assert_eq!(
        (last.chosen, &last.verdicts),
        (Some(1), &dry.verdicts),
        "the names of clients too"
    );
}

#[test]
fn a_refusal_carries_errno_reason_and_remedy() {
    let device = Fake::example().device();
    let error = device.alloc(&Request::new(1 << 40)).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENODEV));
    assert!(error.reason().unwrap().contains("no provider"), "{error}");
    assert!(error.remedy().is_some());
    let why = &device.explain_last().unwrap().verdicts[0].why;
    assert_eq!(why, "too small: 256 MiB in all, 1 TiB requested");
    let error = device.stats(Some(99)).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOENT));
    assert!(error.reason().unwrap().contains("99"), "{error}");
}

#[test]
fn reason_of_earlier_call_is_not_reported() {
    let fake = Fake::example();
    let device = fake.device();
    device.stats(Some(99)).unwrap_err();
    fake.fail_next(libc::EFAULT);
    assert_eq!(device.info().unwrap_err().reason(), None);
}

#[test]
fn invalid_requests_fail_before_the_ioctl() {
    let device = Fake::example().device();
    let many = (0..65).map(|n| PciAddr {
        domain: 0,
        bus: n,
        devfn: 0,
    });
    let requests = [
        Request::new(0),
        Request::new(1).align(3),
        Request::new(1).align(2 << 30),
        Request::new(1).near(many),
        Request::new(1).provider(0),
    ];
    for request in requests {
        assert!(matches!(device.alloc(&request), Err(Error::Request(_))), "{request:?}");
        assert!(
            matches!(device.explain(&request), Err(Error::Request(_))),
            "{request:?}"
        );
    }
}

#[test]
fn files_other_than_the_device_are_refused() {
    assert!(matches!(
        Device::open_path("/nonexistent/p2pmem"),
        Err(Error::Open { .. })
    ));
    let error = Device::open_path("/dev/null").unwrap_err();
    assert!(
        matches!(
            error,
            Error::Refused {
                operation: Operation::Info,
                errno: libc::ENOTTY,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn device_can_be_shared_among_threads() {
    fn check<T: Send + Sync>() {}
    check::<Device>();
    check::<Buffer>();
    check::<crate::Mapping>();
}
