// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;

fn raw(provider: u32, code: u32) -> abi::p2pmem_verdict {
    abi::p2pmem_verdict {
        provider,
        code,
        addr: abi::p2pmem_pci_addr {
            bus: provider as u8 + 3,
            ..Default::default()
        },
        ..Default::default()
    }
}

#[test]
fn messages_name_the_deciding_rule() {
    let mut rule = [0; abi::P2PMEM_RULE_NAME as usize];
    for (to, from) in rule.iter_mut().zip(b"20-lab") {
        *to = *from as std::ffi::c_char;
    }
    let explain = abi::p2pmem_explain {
        req: abi::p2pmem_request {
            size: 16 << 20,
            ..Default::default()
        },
        ..Default::default()
    };
    let say = |code, rule_set| {
        let of_rule = abi::p2pmem_verdict {
            rule_set,
            rule,
            free: 1 << 20,
            ..raw(1, code)
        };
        Explanation::new(&explain, &[of_rule], String::new(), &[])
            .verdicts
            .remove(0)
    };
    let admin = abi::P2PMEM_RULES_ADMIN;
    assert_eq!(say(abi::P2PMEM_VERDICT_DENIED, admin).why, "denied: by rule 20-lab");
    assert_eq!(
        say(abi::P2PMEM_VERDICT_QUOTA, abi::P2PMEM_RULES_FILE).why,
        "over quota: this file's own rule 20-lab does not allow 16 MiB more"
    );
    assert_eq!(
        say(abi::P2PMEM_VERDICT_RESERVED, admin).why,
        "reserved: rule 20-lab reserves the 1 MiB of free memory for others"
    );
    assert_eq!(
        say(abi::P2PMEM_VERDICT_PREFERENCE, admin).why,
        "not preferred: rule 20-lab prefers the chosen one, or avoids this one"
    );
    let far = say(abi::P2PMEM_VERDICT_TOO_FAR, admin);
    assert!(far.why.ends_with("rule 20-lab allows less"), "{}", far.why);
    let json = serde_json::to_value(&far).unwrap();
    assert_eq!(json["rule"], serde_json::json!({ "name": "20-lab", "own": false }));
    assert_eq!(say(abi::P2PMEM_VERDICT_FULL, abi::P2PMEM_RULES_NONE).rule, None);
}

#[test]
fn messages_have_the_deciding_numbers() {
    let chosen = abi::p2pmem_verdict {
        class: abi::P2PMEM_PATH_SAME_SWITCH,
        hops: 4,
        bandwidth: 16000,
        numa_distance: 10,
        size: 256 << 20,
        free: 240 << 20,
        largest: 128 << 20,
        ..raw(1, abi::P2PMEM_VERDICT_CHOSEN)
    };
    let other = |code| abi::p2pmem_verdict {
        class: abi::P2PMEM_PATH_HOST_BRIDGE,
        hops: 6,
        bandwidth: 4000,
        numa_distance: 21,
        size: 64 << 20,
        free: 8 << 20,
        largest: 4 << 20,
        ..raw(2, code)
    };
    let request = abi::p2pmem_request {
        size: 16 << 20,
        ..Default::default()
    };
    let explain = abi::p2pmem_explain {
        req: request,
        chosen: 1,
        ..Default::default()
    };
    let clients = [Client::resolve_in(std::path::Path::new("/nonexistent"), "0000:01:00.0").unwrap()];
    let say = |code| {
        Explanation::new(&explain, &[chosen, other(code)], String::new(), &clients).verdicts[1]
            .why
            .clone()
    };

    let expected = [
        (
            abi::P2PMEM_VERDICT_UNREACHABLE,
            "unreachable: 0000:01:00.0 cannot reach it",
        ),
        (
            abi::P2PMEM_VERDICT_TOO_FAR,
            "too far: through the host bridge to 0000:01:00.0 (6 hops), the request allows less",
        ),
        (
            abi::P2PMEM_VERDICT_TOO_SMALL,
            "too small: 64 MiB in all, 16 MiB requested",
        ),
        (abi::P2PMEM_VERDICT_FULL, "full: 8 MiB of 64 MiB free, 16 MiB requested"),
        (
            abi::P2PMEM_VERDICT_FRAGMENTED,
            "fragmented: 8 MiB free, but the largest aligned piece is 4 MiB, 16 MiB requested",
        ),
        (abi::P2PMEM_VERDICT_REMOVING, "removing: the provider is being removed"),
        (
            abi::P2PMEM_VERDICT_NOT_NAMED,
            "not named: the request names another provider",
        ),
        (
            abi::P2PMEM_VERDICT_CLASS,
            "farther: through the host bridge to 0000:01:00.0 (6 hops), the chosen one stays in the switch",
        ),
        (
            abi::P2PMEM_VERDICT_HOPS,
            "more hops: through the host bridge to 0000:01:00.0 (6 hops), the chosen one has 4",
        ),
        (
            abi::P2PMEM_VERDICT_BANDWIDTH,
            "narrower link: 4000 MB/s, the chosen one has 16000 MB/s",
        ),
        (
            abi::P2PMEM_VERDICT_NUMA,
            "farther in NUMA distance: 21, the chosen one has 10",
        ),
        (
            abi::P2PMEM_VERDICT_LOAD,
            "busier: 56 MiB of 64 MiB in use, of the chosen one 16 MiB of 256 MiB",
        ),
        (
            abi::P2PMEM_VERDICT_SPACE,
            "less space: its largest piece is 4 MiB, the chosen one's 128 MiB",
        ),
        (
            abi::P2PMEM_VERDICT_ORDER,
            "equal: as good as the chosen one, which came earlier",
        ),
        (
            abi::P2PMEM_VERDICT_UPSTREAM,
            "not the kernel's pick: pci_p2pmem_find_many() returned another one",
        ),
        (abi::P2PMEM_VERDICT_DENIED, "denied: by a rule"),
        (
            abi::P2PMEM_VERDICT_CGROUP,
            "over the cgroup's limit: dmem.max does not allow 16 MiB more",
        ),
        (
            abi::P2PMEM_VERDICT_PACKED,
            "emptier: 56 MiB of 64 MiB in use, of the chosen one 16 MiB of 256 MiB",
        ),
        (
            abi::P2PMEM_VERDICT_TOO_FEW,
            "one of too few: it could hold a part, but not enough others can",
        ),
        (999, "verdict 999, which this program does not know"),
    ];
    for (code, text) in expected {
        assert_eq!(say(code), text);
    }
    let explanation = Explanation::new(&explain, &[chosen], String::new(), &clients);
    assert_eq!(explanation.chosen, Some(1));
    assert_eq!(
        explanation.lines(),
        [
            "0000:04:00.0 was chosen",
            "0000:04:00.0: chosen: below the same switch as 0000:01:00.0 (4 hops), 240 MiB free"
        ]
    );
}

#[test]
fn refusal_starts_with_reason_and_unknown_clients_are_numbered() {
    let explain = abi::p2pmem_explain {
        error: libc::ENODEV as u32,
        ..Default::default()
    };
    let far = abi::p2pmem_verdict {
        worst_client: 2,
        class: abi::P2PMEM_PATH_UNREACHABLE,
        ..raw(1, abi::P2PMEM_VERDICT_UNREACHABLE)
    };
    let explanation = Explanation::new(&explain, &[far], "no provider is near".into(), &[]);
    assert_eq!(
        explanation.lines(),
        [
            "refused: No such device (ENODEV): no provider is near",
            "0000:04:00.0: unreachable: client 2 cannot reach it"
        ]
    );
    let json = serde_json::to_value(&explanation).unwrap();
    assert_eq!(json["verdicts"][0]["code"], "unreachable");
    assert_eq!(json["errno"], libc::ENODEV);
}
