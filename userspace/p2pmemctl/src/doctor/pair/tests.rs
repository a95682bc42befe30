// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;
use crate::selftest::TransferReport;
use p2pmem::fake::Fake;
use p2pmem::RegistrationMethod;

fn addr() -> PciAddr {
    "0000:03:00.0".parse().unwrap()
}

fn report(transfer: Option<TransferReport>) -> RegistrationReport {
    RegistrationReport {
        nic: "mlx5_0".into(),
        method: Some(RegistrationMethod::DmaBuf),
        microseconds: 7,
        error: None,
        remedy: None,
        transfer,
    }
}

#[test]
fn each_outcome_of_a_transfer_is_reported() {
    let good = TransferReport {
        bytes: 1 << 20,
        ..TransferReport::default()
    };
    let wrong = TransferReport {
        bytes: 1 << 20,
        wrong_words: 12,
        first_wrong: Some(64),
        error: None,
    };
    let failed = TransferReport {
        error: Some("RDMA WRITE ended with status 10".into()),
        ..TransferReport::default()
    };
    for (transfer, level, words) in [
        (Some(good), Level::Ok, "moved 1 MiB by RDMA WRITE and READ"),
        (
            Some(wrong),
            Level::Failure,
            "12 words did not arrive, the first at byte 0x40",
        ),
        (Some(failed), Level::Failure, "ended with status 10"),
        (Some(TransferReport::default()), Level::Failure, "0 words"),
        (None, Level::Failure, "no transfer"),
    ] {
        let checks = of_registration(&report(transfer), addr());
        assert_eq!(checks.len(), 2);
        assert!(
            checks[0].level == Level::Ok && checks[0].found.contains("by dma-buf in 7 us"),
            "{checks:?}"
        );
        assert!(
            checks[1].level == level && checks[1].found.contains(words),
            "{checks:?}"
        );
    }
    let refused = RegistrationReport {
        method: None,
        error: Some("registering failed".into()),
        remedy: Some("do this"),
        ..report(None)
    };
    let checks = of_registration(&refused, addr());
    assert_eq!(checks.len(), 1);
    assert!(
        checks[0].level == Level::Failure && checks[0].remedy.as_deref() == Some("do this"),
        "{checks:?}"
    );
}

#[test]
fn missing_memory_names_the_next_step() {
    let check = no_memory(None, addr());
    assert!(check.level == Level::Failure && check.remedy.unwrap().contains("p2pmemctl scan"));
}

#[test]
fn a_removed_provider_is_reported() {
    let fake = Fake::example();
    let device = fake.device();
    let provider = device.providers().unwrap().remove(0);
    let buffer = device.alloc(&Request::new(4096).provider(provider.id)).unwrap();
    assert!(of_removal(&buffer, provider.addr).is_none());
    fake.remove_provider(provider.id);
    let check = of_removal(&buffer, provider.addr).unwrap();
    assert!(
        check.level == Level::Failure
            && check.found == "the provider 0000:03:00.0 was removed during the measurement"
            && check.remedy.is_some(),
        "{check:?}"
    );
}

#[test]
fn memory_that_cannot_be_allocated_is_reported() {
    let fake = Fake::example();
    let device = fake.device();
    let provider = || device.providers().unwrap().remove(0);
    let missing = |provider: &Provider| match allocate(fake.device(), provider).unwrap() {
        Memory::Missing(check) => check,
        Memory::Buffer(..) => panic!("the memory was allocated"),
    };
    let free = provider();
    fake.fail_next(nix::errno::Errno::ENOMEM as i32);
    let check = missing(&free);
    assert!(
        check.level == Level::Failure && check.found.contains("ENOMEM"),
        "{check:?}"
    );
    let _held = device.alloc(&Request::new(free.largest).provider(free.id)).unwrap();
    let check = missing(&provider());
    assert!(
        check.level == Level::Failure && check.found.contains("has no free memory"),
        "{check:?}"
    );
}
