// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;

#[test]
fn classes_round_trip_and_keep_abi_order() {
    for class in PathClass::ALL {
        assert_eq!(PathClass::from_raw(class.to_raw()), Some(class));
    }
    assert!(PathClass::ALL
        .windows(2)
        .all(|w| w[0] < w[1] && w[0].to_raw() < w[1].to_raw()));
    assert_eq!(PathClass::from_raw(0), None);
    assert_eq!(PathClass::from_raw(77), Some(PathClass::Unreachable));
    assert_eq!("sw".parse(), Ok(PathClass::SameSwitch));
    assert!("--"
        .parse::<PathClass>()
        .unwrap_err()
        .contains("DEV, SW, SWS, PHB, NODE, SYS"));
}

#[test]
fn sizes_are_formatted_with_units() {
    let sizes = [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (4096, "4 KiB"),
        (1 << 40, "1 TiB"),
        ((1 << 20) + 1, "1.0 MiB"),
    ];
    for (bytes, text) in sizes {
        assert_eq!(human_size(bytes), text);
    }
    assert_eq!(human_size(u64::MAX), "16.0 EiB");
    for (bytes, text) in [(0, "0B"), (512, "512B"), (4096, "4K"), (1500, "1.5K"), (3 << 40, "3T")] {
        assert_eq!(short_size(bytes), text);
    }
}

/// Returns the info of a module with these versions and features.
fn module(abi_version: u32, abi_compatible: u32, features: u64) -> Info {
    Info::from(abi::p2pmem_info {
        abi_version,
        abi_compatible,
        features,
        ..Default::default()
    })
}

#[test]
fn compatible_abi_versions_are_accepted() {
    let (version, compatible) = (abi::P2PMEM_ABI_VERSION, abi::P2PMEM_ABI_COMPATIBLE);
    for (abi_version, abi_compatible, works) in [
        (version, compatible, true),
        (version + 1, version, true),
        (version + 1, version + 1, false),
        // Versions before 5 have no abi_compatible, so it is zero.
        (compatible - 1, 0, false),
        (0, 0, false),
        (u32::MAX, version, true),
        (u32::MAX, u32::MAX, false),
    ] {
        assert_eq!(
            module(abi_version, abi_compatible, 0).compatible(),
            works,
            "a module of version {abi_version} that is compatible down to {abi_compatible}"
        );
    }
}

#[test]
fn missing_features_are_named() {
    let all = [
        (abi::P2PMEM_FEATURE_DMABUF, "dma-buf export"),
        (abi::P2PMEM_FEATURE_RULES, "rules"),
        (abi::P2PMEM_FEATURE_IMPORT, "import"),
        (abi::P2PMEM_FEATURE_STRIPE, "stripes"),
        (abi::P2PMEM_FEATURE_ATTACH, "attachments"),
    ];
    let bits = all.iter().fold(0, |bits, (bit, _)| bits | u64::from(*bit));
    assert!(module(5, 5, bits).missing().is_empty());
    // Unknown bits of a newer module are ignored.
    assert!(module(6, 5, u64::MAX).missing().is_empty());
    assert_eq!(module(5, 5, 0).missing(), all.map(|(_, name)| name));
    for (bit, name) in all {
        assert_eq!(module(5, 5, bits & !u64::from(bit)).missing(), [name]);
        assert_eq!(module(6, 5, !u64::from(bit)).missing(), [name]);
    }
    let peer = u64::from(abi::P2PMEM_FEATURE_PEER_MEMORY);
    assert!(module(5, 5, peer).peer_memory() && !module(5, 5, !peer).peer_memory());
}

#[test]
fn unknown_provider_values_are_unknown_or_none() {
    let mut raw = abi::p2pmem_provider {
        id: 3,
        kind: 99,
        state: 99,
        bar: -1,
        numa_node: -1,
        ..Default::default()
    };
    raw.driver = [b'x' as c_char; 32];
    let provider = Provider::from(&raw);
    assert_eq!(
        (provider.kind, provider.state),
        (ProviderKind::Unknown, ProviderState::Unknown)
    );
    assert_eq!((provider.bar, provider.numa_node), (None, None));
    assert_eq!(
        provider.driver.unwrap().len(),
        32,
        "a driver name without a NUL is taken whole"
    );
}
