// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of memory keys: as drivers create and change them, against a simple oracle, and with arbitrary input.

mod hostile;
mod oracle;

use p2pmem_proptest::config;
use proptest::prelude::*;

use super::*;
use crate::layout::constants::*;
use crate::layout::wire::{mkey_seg, wqe_data_seg, wqe_umr_ctrl_seg};
use crate::layout::{Field, ifc};

const PD: u32 = 7;
const QPN: u32 = 0x123;
const DRIVER: Issuer = Issuer {
    pd: 1,
    qpn: 0x40,
    reg_umr: true,
};
const USER: Issuer = Issuer {
    pd: PD,
    qpn: QPN,
    reg_umr: false,
};

/// All access rights.
const ALL: [(Field, u32); 5] = [(mkc::LR, 1), (mkc::LW, 1), (mkc::RR, 1), (mkc::RW, 1), (mkc::A, 1)];

fn set(bytes: &mut [u8], fields: &[(Field, u64)]) {
    for (field, value) in fields {
        field.set(bytes, *value);
    }
}

/// Builds a CREATE_MKEY command for an mkey of [`PD`] with all rights for every QP, and sets `fields` in its context.
fn create(mode: u32, fields: &[(Field, u64)], list: &[u8]) -> Vec<u8> {
    let mut command = vec![0; create_mkey_in::BYTES];
    command.extend_from_slice(list);
    create_mkey_in::PG_ACCESS.set(&mut command, 1_u32);
    create_mkey_in::TRANSLATIONS_OCTWORD_ACTUAL_SIZE.set(&mut command, (list.len() / 16) as u64);
    let entry = create_mkey_in::MEMORY_KEY_MKEY_ENTRY.of_mut(&mut command);
    for (field, value) in ALL {
        field.set(entry, value);
    }
    mkc::ACCESS_MODE_1_0.set(entry, mode & 3);
    mkc::ACCESS_MODE_4_2.set(entry, mode >> 2);
    mkc::QPN.set(entry, 0xff_ffff_u32);
    mkc::PD.set(entry, PD);
    mkc::UMR_EN.set(entry, 1_u32);
    mkc::LOG_PAGE_SIZE.set(entry, 12_u32);
    mkc::TRANSLATIONS_OCTWORD_SIZE.set(entry, (list.len() / 16) as u64);
    set(entry, fields);
    command
}

fn pages(entries: &[u64]) -> Vec<u8> {
    let mut list: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
    list.resize(list.len().next_multiple_of(64), 0);
    list
}

fn klms(entries: &[(u32, u32, u64)]) -> Vec<u8> {
    let mut list = Vec::new();
    for (count, key, address) in entries {
        list.extend_from_slice(&count.to_be_bytes());
        list.extend_from_slice(&key.to_be_bytes());
        list.extend_from_slice(&address.to_be_bytes());
    }
    list.resize(list.len().next_multiple_of(64), 0);
    list
}

fn keys() -> Mkeys {
    let mut keys = Mkeys::new(Limits::default());
    keys.enable_page_faults(true);
    keys
}

/// Creates an mkey and returns the key with its variant.
fn add(keys: &mut Mkeys, command: &[u8]) -> u32 {
    let index = keys.create(command).unwrap();
    let entry = create_mkey_in::MEMORY_KEY_MKEY_ENTRY.of(command);
    (index << 8) | mkc::MKEY_7_0.get32(entry)
}

fn access(key: u32, rights: Rights, address: u64, length: u64) -> Access {
    Access {
        key,
        address,
        length,
        rights,
        pd: PD,
        qpn: QPN,
    }
}

fn resolve(keys: &mut Mkeys, access: &Access) -> Result<Vec<(u64, u64)>, Fault> {
    let mut extents = Vec::new();
    keys.resolve(access, &mut extents)?;
    Ok(extents.iter().map(|extent| (extent.address, extent.len)).collect())
}

/// Builds a UMR work request in the driver's format and decodes it.
fn umr(key: u32, flags: u64, mask: u64, fields: &[(Field, u64)], list: &List) -> Umr {
    let mut body = vec![0; wqe_umr_ctrl_seg::BYTES + mkey_seg::BYTES];
    let octwords = match list {
        List::None => 0,
        List::Inline(bytes) => bytes.len() as u64 / 16,
        List::Memory { length, .. } => length / 16,
    };
    wqe_umr_ctrl_seg::FLAGS.set(&mut body, flags);
    wqe_umr_ctrl_seg::MKEY_MASK.set(&mut body, mask);
    wqe_umr_ctrl_seg::XLT_OCTOWORDS.set(&mut body, octwords);
    set(&mut body[wqe_umr_ctrl_seg::BYTES..], fields);
    match list {
        List::None => {}
        List::Inline(bytes) => body.extend_from_slice(bytes),
        List::Memory { key, address, length } => {
            let mut data = [0; wqe_data_seg::BYTES];
            wqe_data_seg::BYTE_COUNT.set(&mut data, *length);
            wqe_data_seg::LKEY.set(&mut data, *key);
            wqe_data_seg::ADDR.set(&mut data, *address);
            body.extend_from_slice(&data);
        }
    }
    Umr::read(key, &body).unwrap()
}

const RIGHTS: [Rights; 5] = [
    Rights::LocalRead,
    Rights::LocalWrite,
    Rights::RemoteRead,
    Rights::RemoteWrite,
    Rights::RemoteAtomic,
];

#[test]
fn physical_mkey_returns_bus_addresses() {
    let mut keys = keys();
    let key = add(&mut keys, &create(0, &[(mkc::LENGTH64, 1), (mkc::MKEY_7_0, 0x5a)], &[]));
    assert_eq!(key, (FIRST << 8) | 0x5a);
    for rights in RIGHTS {
        assert_eq!(
            resolve(&mut keys, &access(key, rights, 0x1234, 0x10_0000)),
            Ok(vec![(0x1234, 0x10_0000)])
        );
    }
    assert_eq!(
        resolve(&mut keys, &access(key, Rights::LocalRead, u64::MAX, 1)),
        Ok(vec![(u64::MAX, 1)])
    );
    assert_eq!(
        resolve(&mut keys, &access(key, Rights::LocalRead, u64::MAX, 2)),
        Err(Fault::Bounds)
    );
    keys.destroy(key >> 8).unwrap();
    assert_eq!(
        resolve(&mut keys, &access(key, Rights::LocalRead, 0, 1)),
        Err(Fault::Key)
    );
    assert_eq!(keys.destroy(key >> 8), Err(MkeyError::NoKey));
}

#[test]
fn each_access_right_has_its_own_bit() {
    let mut keys = keys();
    for (i, (field, _)) in ALL.into_iter().enumerate() {
        let none = ALL.map(|(field, _)| (field, 0));
        let mut fields = none.to_vec();
        fields.extend([(field, 1), (mkc::LENGTH64, 1)]);
        let key = add(&mut keys, &create(0, &fields, &[]));
        for (j, rights) in RIGHTS.into_iter().enumerate() {
            let expected = if i == j { Ok(()) } else { Err(Fault::Rights) };
            assert_eq!(keys.check(&access(key, rights, 0, 8)), expected, "{i} {rights:?}");
        }
    }
}

#[test]
fn access_checks_key_domain_and_bounds() {
    let mut keys = keys();
    let key = add(&mut keys, &create(0, &[(mkc::LEN, 100), (mkc::START_ADDR, 50)], &[]));
    let good = access(key, Rights::RemoteWrite, 50, 100);
    assert_eq!(keys.check(&good), Ok(()));
    for (bad, fault) in [
        (Access { key: key ^ 1, ..good }, Fault::Key),
        (
            Access {
                key: key + 0x100,
                ..good
            },
            Fault::Key,
        ),
        (Access { key: 0, ..good }, Fault::Key),
        (Access { pd: PD + 1, ..good }, Fault::Domain),
        (Access { address: 49, ..good }, Fault::Bounds),
        (Access { length: 101, ..good }, Fault::Bounds),
        (
            Access {
                address: 150,
                length: 1,
                ..good
            },
            Fault::Bounds,
        ),
        (
            Access {
                length: u64::MAX,
                ..good
            },
            Fault::Bounds,
        ),
    ] {
        assert_eq!(keys.check(&bad), Err(fault), "{bad:?}");
        assert_eq!(resolve(&mut keys, &bad), Err(fault), "{bad:?}");
    }
    let bound = add(&mut keys, &create(0, &[(mkc::LEN, 100), (mkc::QPN, QPN.into())], &[]));
    assert_eq!(keys.check(&access(bound, Rights::RemoteWrite, 0, 1)), Ok(()));
    let other = Access {
        qpn: QPN + 1,
        ..access(bound, Rights::RemoteWrite, 0, 1)
    };
    assert_eq!(keys.check(&other), Err(Fault::Domain));
    let free = add(&mut keys, &create(0, &[(mkc::LEN, 100), (mkc::FREE, 1)], &[]));
    assert_eq!(keys.check(&access(free, Rights::LocalRead, 0, 1)), Err(Fault::Key));
}

#[test]
fn pages_are_translated_and_merged() {
    let mut keys = keys();
    let list = pages(&[0x10000 | 3, 0x11000 | 3, 0x20000 | 3, 0x8000_0000_0000 | 3]);
    // The range starts in the middle of the first page.
    let fields = [(mkc::START_ADDR, 0x7000_0800), (mkc::LEN, 0x3000)];
    let key = add(&mut keys, &create(1, &fields, &list));
    let at = |address, len| access(key, Rights::LocalWrite, address, len);
    assert_eq!(
        resolve(&mut keys, &at(0x7000_0800, 0x3000)),
        Ok(vec![(0x10800, 0x1800), (0x20000, 0x1000), (0x8000_0000_0000, 0x800)])
    );
    assert_eq!(resolve(&mut keys, &at(0x7000_1fff, 1)), Ok(vec![(0x11fff, 1)]));
    assert_eq!(resolve(&mut keys, &at(0x7000_0800, 0x3001)), Err(Fault::Bounds));
    let mut output = vec![0; query_mkey_out::BYTES];
    keys.query(key >> 8, &mut output).unwrap();
    let entry = query_mkey_out::MEMORY_KEY_MKEY_ENTRY.of(&output);
    assert_eq!((mkc::LEN.get(entry), mkc::PD.get32(entry)), (0x3000, PD));
    assert_eq!(query_mkey_out::BSF0_KLM0_PAS_MTT0_1.of(&output), &list[..16]);
    assert_eq!(query_mkey_out::BSF1_KLM1_PAS_MTT2_3.of(&output), &list[16..32]);
    assert_eq!(keys.query(1, &mut output), Err(MkeyError::NoKey));
}

/// Drivers pad a page list to 64 bytes, also for an mkey of a single page.
#[test]
fn padded_page_list_is_accepted() {
    let mut keys = keys();
    let fields = [(mkc::LEN, 0x1000), (mkc::TRANSLATIONS_OCTWORD_SIZE, 1)];
    let key = add(&mut keys, &create(1, &fields, &[]));
    let list = umr(key, 0x90, 0, &[], &List::Inline(pages(&[0x10000 | 3])));
    keys.apply(&list, &[], &USER).unwrap();
    let read = access(key, Rights::LocalRead, 0, 0x1000);
    assert_eq!(resolve(&mut keys, &read), Ok(vec![(0x10000, 0x1000)]));
}

/// If `pg_access` is not set, all pages are present, also those without access flags.
#[test]
fn pages_without_access_flags_are_present() {
    let mut keys = keys();
    let mut command = create(1, &[(mkc::LEN, 0x2000)], &pages(&[0x10000, 0x20000]));
    create_mkey_in::PG_ACCESS.set(&mut command, 0_u32);
    let key = add(&mut keys, &command);
    assert_eq!(
        resolve(&mut keys, &access(key, Rights::RemoteWrite, 0, 0x2000)),
        Ok(vec![(0x10000, 0x1000), (0x20000, 0x1000)])
    );
}

#[test]
fn invalid_create_commands_are_rejected() {
    let mut keys = Mkeys::new(Limits { keys: 2, words: 16 });
    let list = pages(&[3; 8]);
    assert_eq!(keys.create(&[0; 100]), Err(MkeyError::Short));
    let mut short = create(1, &[], &list);
    short.truncate(short.len() - 1);
    assert_eq!(keys.create(&short), Err(MkeyError::Short));
    for mode in 4..32 {
        assert!(matches!(
            keys.create(&create(mode, &[], &[])),
            Err(MkeyError::Parameter(_))
        ));
    }
    for bad in [
        create(1, &[(mkc::TRANSLATIONS_OCTWORD_SIZE, 4)], &pages(&[3; 16])),
        create(1, &[(mkc::BSF_EN, 1)], &list),
    ] {
        assert!(matches!(keys.create(&bad), Err(MkeyError::Parameter(_))));
    }
    for field in [create_mkey_in::MKEY_UMEM_VALID, create_mkey_in::DATA_DIRECT] {
        let mut bad = create(1, &[], &list);
        field.set(&mut bad, 1_u32);
        assert!(matches!(keys.create(&bad), Err(MkeyError::Parameter(_))));
    }
    assert!(keys.is_empty());
    let first = keys.create(&create(1, &[], &list)).unwrap();
    keys.create(&create(1, &[], &list)).unwrap();
    assert_eq!((keys.len(), keys.words()), (2, 16));
    assert_eq!(keys.create(&create(1, &[], &list)), Err(MkeyError::Full));
    assert_eq!(keys.create(&create(0, &[], &[])), Err(MkeyError::Full));
    keys.destroy(first).unwrap();
    assert_eq!(keys.words(), 8);
    let again = keys.create(&create(1, &[], &list)).unwrap();
    assert_ne!(again, 0);
}

/// Registration as mlx5_ib does it: a free mkey from a pool, then page list and context by UMR. Revocation by a list of
/// entries that are not present.
#[test]
fn registration_and_revocation_by_umr() {
    let mut keys = keys();
    let fields = [
        (mkc::FREE, 1),
        (mkc::PD, DRIVER.pd.into()),
        (mkc::TRANSLATIONS_OCTWORD_SIZE, 8),
        (mkc::MKEY_7_0, 0x11),
    ];
    let key = add(&mut keys, &create(1, &fields, &[]));
    let list = pages(&[0x10000 | 3, 0x11000 | 3, 0x12000 | 3]);
    let memory = List::Memory {
        key: 0x99,
        address: 0xabc0,
        length: list.len() as u64,
    };
    let register = umr(
        key,
        0x30,
        0x203e_20c3,
        &[
            (mkc::LR, 1),
            (mkc::LW, 1),
            (mkc::RW, 1),
            (mkc::PD, PD.into()),
            (mkc::START_ADDR, 0x5000),
            (mkc::LEN, 0x3000),
            (mkc::LOG_PAGE_SIZE, 12),
            (mkc::QPN, 0xff_ffff),
            (mkc::MKEY_7_0, 0x11),
        ],
        &memory,
    );
    assert_eq!(
        register.list_access(&DRIVER),
        Some(Access {
            key: 0x99,
            address: 0xabc0,
            length: 64,
            rights: Rights::LocalRead,
            pd: DRIVER.pd,
            qpn: DRIVER.qpn,
        })
    );
    assert_eq!(keys.apply(&register, &list[..48], &DRIVER), Err(UmrError::List));
    assert_eq!(keys.apply(&register, &list, &USER), Err(UmrError::Domain));
    keys.apply(&register, &list, &DRIVER).unwrap();
    // The mkey is not free anymore.
    assert_eq!(keys.apply(&register, &list, &DRIVER), Err(UmrError::InUse));
    let write = access(key, Rights::RemoteWrite, 0x5800, 0x2000);
    assert_eq!(resolve(&mut keys, &write), Ok(vec![(0x10800, 0x2000)]));
    assert_eq!(
        resolve(
            &mut keys,
            &Access {
                rights: Rights::RemoteRead,
                ..write
            }
        ),
        Err(Fault::Rights)
    );
    let zap = umr(key, 0x50, 0, &[], &List::Inline(pages(&[0; 3])));
    let zap_in_memory = Umr {
        list: memory.clone(),
        ..zap
    };
    keys.apply(&zap_in_memory, &pages(&[0; 3]), &DRIVER).unwrap();
    let Err(Fault::Page(token)) = resolve(&mut keys, &write) else {
        panic!("an access to revoked pages succeeded");
    };
    assert_eq!(
        keys.take_faults(),
        [PageFault {
            token,
            key,
            address: 0x5000,
            pages: 3
        }]
    );
    // Another access to these pages waits for the same fault.
    assert_eq!(resolve(&mut keys, &write), Err(Fault::Page(token)));
    assert_eq!(keys.take_faults(), []);
    assert_eq!(keys.fault_counts(), (1, 1));
    assert_eq!(keys.resume_fault(token + 1, false), None);
    assert_eq!(keys.resume_fault(token, true), Some(Resumed::Failed));
    assert_eq!(keys.resume_fault(token, true), None);
    // The access succeeds after the pages are mapped again.
    let map = umr(key, 0x50, 0, &[], &List::Inline(list.clone()));
    keys.apply(
        &Umr {
            list: memory.clone(),
            ..map
        },
        &list,
        &DRIVER,
    )
    .unwrap();
    assert_eq!(resolve(&mut keys, &write), Ok(vec![(0x10800, 0x2000)]));
    // Return the mkey to the pool.
    let disable = umr(
        key,
        0x80,
        (MLX5_MKEY_MASK_PD | MLX5_MKEY_MASK_FREE).into(),
        &[(mkc::FREE, 1), (mkc::PD, DRIVER.pd.into())],
        &List::None,
    );
    assert_eq!(
        keys.apply(
            &Umr {
                key: key ^ 1,
                ..disable.clone()
            },
            &[],
            &DRIVER
        ),
        Err(UmrError::NoKey)
    );
    keys.apply(&disable, &[], &DRIVER).unwrap();
    assert_eq!(resolve(&mut keys, &write), Err(Fault::Key));
    assert_eq!(
        keys.apply(&zap_in_memory, &pages(&[0; 3]), &DRIVER),
        Err(UmrError::Free)
    );
}

#[test]
fn only_absent_pages_are_page_faults() {
    let mut keys = keys();
    // Pages: present, read-only, not present, write-only, and two without an entry.
    let fields = [
        (mkc::LEN, 0x6000),
        (mkc::TRANSLATIONS_OCTWORD_SIZE, 4),
        (mkc::START_ADDR, 0x10_0000),
    ];
    let list = &pages(&[0x10000 | 3, 0x11000 | 1, 0, 0x13000 | 2])[..32];
    let key = add(&mut keys, &create(1, &fields, list));
    let mut fault = |rights, offset: u64, len| {
        let result = resolve(&mut keys, &access(key, rights, 0x10_0000 + offset, len));
        let faults = keys.take_faults();
        for fault in &faults {
            assert_eq!(result, Err(Fault::Page(fault.token)));
            keys.resume_fault(fault.token, false);
        }
        faults.first().map(|fault| (fault.address - 0x10_0000, fault.pages))
    };
    assert_eq!(fault(Rights::LocalRead, 0, 0x2000), None);
    assert_eq!(fault(Rights::LocalRead, 0x800, 0x1801), Some((0x2000, 1)));
    assert_eq!(fault(Rights::LocalRead, 0x2ff0, 0x3010), Some((0x2000, 4)));
    assert_eq!(fault(Rights::RemoteWrite, 0, 0x6000), Some((0x1000, 2)));
    assert_eq!(fault(Rights::RemoteAtomic, 0x1008, 8), Some((0x1000, 1)));
    assert_eq!(fault(Rights::LocalWrite, 0x3000, 0x1000), None);
    assert_eq!(fault(Rights::LocalWrite, 0x5fff, 1), Some((0x5000, 1)));
    keys.enable_page_faults(false);
    assert_eq!(
        resolve(&mut keys, &access(key, Rights::LocalWrite, 0x10_5fff, 1)),
        Err(Fault::Key)
    );
}

/// Fast registration as a kernel client does it: MTTs or KLMs, inline or in memory, then local and remote invalidation.
#[test]
fn fast_registration_and_invalidation() {
    let mut keys = keys();
    let all = add(&mut keys, &create(0, &[(mkc::LENGTH64, 1), (mkc::MKEY_7_0, 3)], &[]));
    let fields = [(mkc::FREE, 1), (mkc::TRANSLATIONS_OCTWORD_SIZE, 8)];
    let key = add(&mut keys, &create(2, &fields, &[]));
    let list = klms(&[(100, all, 0x1000), (28, all, 0x1064), (300, all, 0x9000)]);
    let mask = 0x209e_2143;
    let register = |variant: u32| {
        let fields = [
            (mkc::START_ADDR, 0x40),
            (mkc::LEN, 428),
            (mkc::RR, 1),
            (mkc::LR, 1),
            (mkc::EN_RINVAL, 1),
            (mkc::MKEY_7_0, variant.into()),
        ];
        umr(
            (key & !0xff) | variant,
            0xa0,
            mask,
            &fields,
            &List::Inline(list.clone()),
        )
    };
    keys.apply(&register(0x21), &[], &USER).unwrap();
    let read = access((key & !0xff) | 0x21, Rights::RemoteRead, 0x40, 428);
    assert_eq!(resolve(&mut keys, &read), Ok(vec![(0x1000, 128), (0x9000, 300)]));
    assert_eq!(
        resolve(
            &mut keys,
            &Access {
                address: 0x40 + 100,
                length: 30,
                ..read
            }
        ),
        Ok(vec![(0x1064, 28), (0x9000, 2)])
    );
    assert_eq!(keys.invalidate(read.key ^ 1, PD, QPN), Err(Fault::Key));
    assert_eq!(keys.invalidate(read.key, PD + 1, QPN), Err(Fault::Domain));
    assert_eq!(keys.invalidate(all, PD, QPN), Err(Fault::Rights));
    keys.invalidate(read.key, PD, QPN).unwrap();
    assert_eq!(resolve(&mut keys, &read), Err(Fault::Key));
    assert_eq!(keys.invalidate(read.key, PD, QPN), Err(Fault::Key));
    keys.apply(&register(0x22), &[], &USER).unwrap();
    let read = Access {
        key: (key & !0xff) | 0x22,
        ..read
    };
    assert_eq!(resolve(&mut keys, &read).map(|extents| extents.len()), Ok(2));
    let local = |key| umr(key, 0x80, MLX5_MKEY_MASK_FREE.into(), &[(mkc::FREE, 1)], &List::None);
    assert_eq!(keys.apply(&local(read.key ^ 3), &[], &USER), Err(UmrError::NoKey));
    keys.apply(&local(read.key), &[], &USER).unwrap();
    assert_eq!(resolve(&mut keys, &read), Err(Fault::Key));
}

/// Memory windows of type 2: only the QP that they are bound to may use and unbind them.
#[test]
fn memory_windows() {
    let mut keys = keys();
    let region = add(
        &mut keys,
        &create(
            1,
            &[(mkc::LEN, 0x1000), (mkc::START_ADDR, 0x7000)],
            &pages(&[0x10000 | 3]),
        ),
    );
    let window = add(
        &mut keys,
        &create(2, &[(mkc::FREE, 1), (mkc::TRANSLATIONS_OCTWORD_SIZE, 4)], &[]),
    );
    let bind = umr(
        window | 1,
        0xb0,
        0x203c_6041,
        &[
            (mkc::RW, 1),
            (mkc::START_ADDR, 0x7100),
            (mkc::LEN, 0x200),
            (mkc::QPN, QPN.into()),
            (mkc::MKEY_7_0, 1),
        ],
        &List::Inline(klms(&[(0x200, region, 0x7100)])),
    );
    let stranger = Issuer { pd: PD + 1, ..USER };
    assert_eq!(keys.apply(&bind, &[], &stranger), Err(UmrError::Domain));
    keys.apply(&bind, &[], &USER).unwrap();
    let write = access(window | 1, Rights::RemoteWrite, 0x7180, 0x180);
    assert_eq!(resolve(&mut keys, &write), Ok(vec![(0x10180, 0x180)]));
    assert_eq!(
        resolve(&mut keys, &Access { length: 0x181, ..write }),
        Err(Fault::Bounds)
    );
    assert_eq!(
        resolve(&mut keys, &Access { qpn: QPN + 1, ..write }),
        Err(Fault::Domain)
    );
    let unbind = umr(
        window | 1,
        0x98,
        (MLX5_MKEY_MASK_FREE | MLX5_MKEY_MASK_KEY | MLX5_MKEY_MASK_QPN).into(),
        &[(mkc::FREE, 1), (mkc::QPN, 0xff_ffff)],
        &List::None,
    );
    let other = Issuer { qpn: QPN + 1, ..USER };
    assert_eq!(keys.apply(&unbind, &[], &other), Err(UmrError::Domain));
    keys.apply(&unbind, &[], &USER).unwrap();
    assert_eq!(resolve(&mut keys, &write), Err(Fault::Key));
}

/// The steps by which mlx5_ib changes the page size of a dma-buf mkey in use.
#[test]
fn page_size_change_keeps_translation() {
    let mut keys = keys();
    let small: Vec<u64> = (0..512).map(|i| 0x4000_0000 + i * 0x1000 + 3).collect();
    let fields = [(mkc::LEN, 0x20_0000), (mkc::START_ADDR, 0x20_0000)];
    let key = add(&mut keys, &create(1, &fields, &pages(&small)));
    let all = access(key, Rights::RemoteRead, 0x20_0000, 0x20_0000);
    assert_eq!(resolve(&mut keys, &all), Ok(vec![(0x4000_0000, 0x20_0000)]));
    let entries = |list: Vec<u8>| umr(key, 0xd0, 0, &[], &List::Inline(list));
    let size = |shift| {
        umr(
            key,
            0xc0,
            u64::from(MLX5_MKEY_MASK_LEN | MLX5_MKEY_MASK_PAGE_SIZE | MLX5_MKEY_MASK_START_ADDR),
            &[
                (mkc::LOG_PAGE_SIZE, shift),
                (mkc::LEN, 0x20_0000),
                (mkc::START_ADDR, 0x20_0000),
            ],
            &List::None,
        )
    };
    keys.apply(&entries(pages(&[0; 8])), &[], &DRIVER).unwrap();
    keys.apply(&size(21), &[], &DRIVER).unwrap();
    assert!(matches!(resolve(&mut keys, &all), Err(Fault::Page(_))));
    assert_eq!(keys.take_faults()[0].pages, 512);
    keys.apply(&entries(pages(&[0x8000_0000 | 3])), &[], &DRIVER).unwrap();
    assert_eq!(resolve(&mut keys, &all), Ok(vec![(0x8000_0000, 0x20_0000)]));
    // Without its own mask bit, the high bit of the page size keeps its value.
    let high = umr(
        key,
        0xc0,
        MLX5_MKEY_MASK_PAGE_SIZE_5,
        &[(mkc::LOG_PAGE_SIZE, 32)],
        &List::None,
    );
    keys.apply(&high, &[], &DRIVER).unwrap();
    let mut output = vec![0; query_mkey_out::BYTES];
    keys.query(key >> 8, &mut output).unwrap();
    let entry = query_mkey_out::MEMORY_KEY_MKEY_ENTRY.of(&output);
    assert_eq!(mkc::LOG_PAGE_SIZE.get(entry), 32 + 21);
}

#[test]
fn indirect_mkey_depth_is_limited() {
    let mut keys = keys();
    let fields = [(mkc::LEN, 64), (mkc::LENGTH64, 0), (mkc::TRANSLATIONS_OCTWORD_SIZE, 4)];
    let key = add(&mut keys, &create(2, &fields, &[]));
    // A KLM mkey without entries covers no address; one that refers to itself exceeds the maximum depth.
    let read = access(key, Rights::LocalRead, 0, 64);
    assert_eq!(resolve(&mut keys, &read), Err(Fault::Bounds));
    let circle = umr(key, 0xc0, 0, &[], &List::Inline(klms(&[(64, key, 0)])));
    keys.apply(&circle, &[], &USER).unwrap();
    assert_eq!(resolve(&mut keys, &read), Err(Fault::Bounds));
    // Chains up to the maximum depth, and one that exceeds it.
    let mut last = add(&mut keys, &create(0, &[(mkc::LENGTH64, 1)], &[]));
    for depth in 1..=MAX_DEPTH {
        let fields = [(mkc::LEN, 1 << 20), (mkc::LOG_PAGE_SIZE, 16)];
        last = add(&mut keys, &create(3, &fields, &klms(&[(0, last, 0x10000); 16])));
        let result = resolve(&mut keys, &access(last, Rights::LocalRead, 0x18000, 4));
        let expected = if depth < MAX_DEPTH {
            Ok(vec![(0x18000, 4)])
        } else {
            Err(Fault::Bounds)
        };
        assert_eq!(result, expected, "{depth}");
    }
    // An inner mkey is checked for local rights and for its protection domain.
    let foreign = add(&mut keys, &create(0, &[(mkc::LENGTH64, 1), (mkc::PD, 9)], &[]));
    let readable = add(
        &mut keys,
        &create(0, &[(mkc::LENGTH64, 1), (mkc::LW, 0), (mkc::RW, 0)], &[]),
    );
    for (inner, rights, expected) in [
        (foreign, Rights::RemoteRead, Err(Fault::Domain)),
        (readable, Rights::RemoteRead, Ok(vec![(0, 8)])),
        (readable, Rights::RemoteWrite, Err(Fault::Rights)),
        (readable, Rights::RemoteAtomic, Err(Fault::Rights)),
        (0xffff_ff00, Rights::RemoteRead, Err(Fault::Key)),
    ] {
        let outer = add(&mut keys, &create(2, &[(mkc::LEN, 8)], &klms(&[(8, inner, 0)])));
        assert_eq!(resolve(&mut keys, &access(outer, rights, 0, 8)), expected, "{rights:?}");
    }
}

/// A fault of a missing page in an inner mkey names the inner mkey and the address in it.
#[test]
fn page_faults_name_the_inner_key() {
    let mut keys = keys();
    let inner = add(
        &mut keys,
        &create(1, &[(mkc::LEN, 0x4000)], &pages(&[0x10000 | 3, 0, 0, 0])),
    );
    let outer = add(
        &mut keys,
        &create(
            3,
            &[(mkc::LEN, 0x4000), (mkc::LOG_PAGE_SIZE, 14)],
            &klms(&[(0, inner, 0)]),
        ),
    );
    let result = resolve(&mut keys, &access(outer, Rights::RemoteRead, 0x800, 0x1000));
    let faults = keys.take_faults();
    assert_eq!(result, Err(Fault::Page(faults[0].token)));
    assert_eq!((faults[0].key, faults[0].address, faults[0].pages), (inner, 0x1000, 1));
    // A fault of a KSM entry that is not present names the outer mkey.
    let empty = add(
        &mut keys,
        &create(3, &[(mkc::LEN, 0x8000), (mkc::LOG_PAGE_SIZE, 14)], &klms(&[(0, 0, 0)])),
    );
    assert!(resolve(&mut keys, &access(empty, Rights::RemoteRead, 0x4000, 0x1000)).is_err());
    assert_eq!(keys.take_faults()[0].key, empty);
}

#[test]
fn strided_klm_entries_are_translated() {
    let mut keys = keys();
    let all = add(&mut keys, &create(0, &[(mkc::LENGTH64, 1)], &[]));
    // Three cycles: 16 bytes from 0x1000 on with a stride of 100, and 8 bytes from 0x9000 on with a stride of 8.
    let list = klms(&[
        (24, STRIDE_BLOCK_OP, (3 << 32) | 2),
        ((100 << 16) | 16, all, 0x1000),
        ((8 << 16) | 8, all, 0x9000),
    ]);
    let key = add(&mut keys, &create(2, &[(mkc::LEN, 72)], &list));
    assert_eq!(
        resolve(&mut keys, &access(key, Rights::LocalRead, 0, 72)),
        Ok(vec![
            (0x1000, 16),
            (0x9000, 8),
            (0x1064, 16),
            (0x9008, 8),
            (0x10c8, 16),
            (0x9010, 8)
        ])
    );
    assert_eq!(
        resolve(&mut keys, &access(key, Rights::LocalRead, 39, 2)),
        Ok(vec![(0x1073, 1), (0x9008, 1)])
    );
    // The length of the mkey exceeds the length of its entries.
    let long = add(&mut keys, &create(2, &[(mkc::LEN, 100)], &list));
    assert_eq!(
        resolve(&mut keys, &access(long, Rights::LocalRead, 0, 73)),
        Err(Fault::Bounds)
    );
}

#[test]
fn translation_space_is_limited() {
    let mut keys = Mkeys::new(Limits { keys: 8, words: 64 });
    let key = add(
        &mut keys,
        &create(1, &[(mkc::TRANSLATIONS_OCTWORD_SIZE, u32::MAX.into())], &[]),
    );
    let at = |octword: u64| {
        let mut umr = umr(key, 0x90, 0, &[], &List::Inline(pages(&[3; 8])));
        umr.octword = octword;
        umr
    };
    keys.apply(&at(28), &[], &USER).unwrap();
    assert_eq!(keys.words(), 64);
    for octword in [29, u64::from(u32::MAX) - 4, 1 << 32, u64::MAX] {
        assert_eq!(
            keys.apply(&at(octword), &[], &USER),
            Err(UmrError::TooManyTranslations),
            "{octword}"
        );
    }
    keys.apply(&at(0), &[], &USER).unwrap();
    keys.destroy(key >> 8).unwrap();
    assert_eq!(keys.words(), 0);
    let fixed = add(&mut keys, &create(1, &[(mkc::UMR_EN, 0)], &pages(&[3; 8])));
    assert_eq!(
        keys.apply(&Umr { key: fixed, ..at(0) }, &[], &USER),
        Err(UmrError::NotAllowed)
    );
}

#[test]
fn oversized_scatter_returns_nothing() {
    let mut keys = keys();
    let all = add(&mut keys, &create(0, &[(mkc::LENGTH64, 1)], &[]));
    let bytes: Vec<_> = (0..2048).map(|i| (1, all, i * 2)).collect();
    let first = add(&mut keys, &create(2, &[(mkc::LEN, 2048)], &klms(&bytes)));
    let lists: Vec<_> = (0..1024).map(|_| (2048, first, 0)).collect();
    let second = add(&mut keys, &create(2, &[(mkc::LEN, 1 << 21)], &klms(&lists)));
    let mut extents = vec![Extent { address: 1, len: 1 }];
    let most = access(second, Rights::LocalRead, 0, MAX_EXTENTS as u64);
    keys.resolve(&most, &mut extents).unwrap();
    assert_eq!(extents.len(), MAX_EXTENTS + 1);
    extents.truncate(1);
    let more = Access {
        length: MAX_EXTENTS as u64 + 1,
        ..most
    };
    assert_eq!(keys.resolve(&more, &mut extents), Err(Fault::Bounds));
    assert_eq!(extents.len(), 1, "a failed access must not change `extents`");
    // The number of translations is limited too, also if all ranges can be merged.
    let same = pages(&[0x10000 | 3; 512]);
    let page = add(
        &mut keys,
        &create(1, &[(mkc::LEN, 0x1000), (mkc::LOG_PAGE_SIZE, 3)], &same),
    );
    let lists: Vec<_> = (0..1 << 14).map(|_| (0x1000, page, 0)).collect();
    let many = add(&mut keys, &create(2, &[(mkc::LEN, 1 << 26)], &klms(&lists)));
    let all = access(many, Rights::LocalRead, 0, 1 << 26);
    assert_eq!(keys.resolve(&all, &mut extents), Err(Fault::Bounds));
    // One fault reports an mkey without entries as a whole, however small its pages are.
    let fields = [
        (mkc::LENGTH64, 1),
        (mkc::LOG_PAGE_SIZE, 0),
        (mkc::TRANSLATIONS_OCTWORD_SIZE, u32::MAX.into()),
    ];
    let empty = add(&mut keys, &create(1, &fields, &[]));
    let missing = keys.resolve(&access(empty, Rights::LocalRead, 0, 1 << 33), &mut extents);
    assert_eq!(missing, Err(Fault::Page(1)));
    assert_eq!(keys.take_faults()[0].pages, (1 << 20) - 1);
}

#[test]
fn truncated_umr_is_rejected() {
    let body = vec![0xff; 48 + 64 + 64];
    assert_eq!(Umr::read(0, &body), Err(UmrError::Mask(!0x8400_22be_61c3)));
    let mut body = vec![0; 48 + 64];
    assert!(Umr::read(0, &body).is_ok());
    assert_eq!(Umr::read(0, &body[..111]), Err(UmrError::Short));
    wqe_umr_ctrl_seg::XLT_OCTOWORDS.set(&mut body, 4_u32);
    assert_eq!(Umr::read(0, &body), Err(UmrError::Short));
    body.extend_from_slice(&[0; 16]);
    assert!(Umr::read(0, &body).is_ok(), "byte_count 0 means 2 GiB");
    body[48 + 64 + 3] = 63;
    assert_eq!(Umr::read(0, &body), Err(UmrError::List));
    wqe_umr_ctrl_seg::FLAGS.set(&mut body, 0x80_u32);
    assert_eq!(Umr::read(0, &body), Err(UmrError::Short));
}

#[test]
fn pending_page_faults_are_limited() {
    let mut keys = keys();
    let fields = [(mkc::LENGTH64, 1), (mkc::TRANSLATIONS_OCTWORD_SIZE, 1 << 20)];
    let key = add(&mut keys, &create(1, &fields, &[]));
    let mut pending = 0;
    let miss = |keys: &mut Mkeys, page| resolve(keys, &access(key, Rights::LocalRead, page * 4096, 1));
    while let Err(Fault::Page(_)) = miss(&mut keys, pending) {
        pending += 1;
    }
    assert_eq!(miss(&mut keys, pending), Err(Fault::Key));
    assert!(
        matches!(miss(&mut keys, 0), Err(Fault::Page(_))),
        "an access to pages of a pending fault still waits"
    );
    assert_eq!(keys.fault_counts(), (pending, pending));
    assert_eq!(keys.take_faults().len() as u64, pending);
}
