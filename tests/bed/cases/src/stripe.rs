// SPDX-License-Identifier: MIT OR Apache-2.0

//! Stripes: their boundaries, the providers of the parts, all or nothing; and decisions while providers are added and removed.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Result, ensure};
use p2pmem_sys as abi;

use super::busy::Busy;
use super::dmabuf::export;
use super::inflight::until;
use super::rules::AdminRule;
use super::{Bed, Case, alloc, buffer, errno, expect, explain_last, free, is_clearing, open, request};
use crate::limits::rounds;
use crate::sys::{self, BAD_POINTERS, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "stripe",
        about: "a stripe has equal parts in several providers, the nearest first, and each is a buffer of its own",
        topology: "demo",
        ruins: false,
        run: stripe,
    },
    Case {
        name: "stripe-refused",
        about: "a stripe that is not possible as a whole takes nothing, and says of which part it failed",
        topology: "demo",
        ruins: false,
        run: refused,
    },
    Case {
        name: "stripe-rules",
        about: "quotas count all parts of a stripe, and what rules avoid comes last or not at all",
        topology: "demo",
        ruins: false,
        run: rules,
    },
    Case {
        name: "decide-during-removal",
        about: "providers come and go in the middle of decisions, and every request is served whole or refused",
        topology: "demo",
        ruins: false,
        run: during_removal,
    },
];

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// Returns a request for a stripe.
fn wanted(size: u64, parts: u32) -> abi::p2pmem_stripe {
    abi::p2pmem_stripe {
        req: abi::p2pmem_request {
            size,
            parts,
            strategy: abi::P2PMEM_STRATEGY_STRIPE,
            ..Default::default()
        },
        nr_parts: abi::P2PMEM_MAX_PARTS,
        ..Default::default()
    }
}

/// Allocates a stripe near some devices.
fn near(
    bed: &Bed,
    fd: BorrowedFd<'_>,
    names: &[&str],
    mut ask: abi::p2pmem_stripe,
) -> Result<Result<Vec<abi::p2pmem_part>, i32>> {
    let mut clients = names.iter().map(|name| bed.address(name)).collect::<Result<Vec<_>>>()?;
    ask.req.nr_clients = clients.len() as u32;
    let mut parts = vec![abi::p2pmem_part::default(); abi::P2PMEM_MAX_PARTS as usize];
    let answer = sys::stripe(fd, &mut ask, Memory::Slice(&mut clients), Memory::Slice(&mut parts));
    Ok(answer.map(|()| {
        parts.truncate(ask.nr_parts as usize);
        parts
    }))
}

/// Checks a stripe of this whole size.
fn check(parts: &[abi::p2pmem_part], size: u64) -> Result<()> {
    let mut end = 0;
    for (n, part) in parts.iter().enumerate() {
        ensure!(part.offset == end && part.size > 0 && part.handle != 0, "{parts:?}");
        let last = n + 1 == parts.len();
        ensure!(
            part.size == parts[0].size || last && part.size <= parts[0].size,
            "{parts:?}"
        );
        ensure!(
            parts[..n].iter().all(|other| other.provider != part.provider),
            "{parts:?}"
        );
        end += part.size;
    }
    ensure!(end == size, "{end} bytes instead of {size}: {parts:?}");
    Ok(())
}

fn providers(parts: &[abi::p2pmem_part]) -> Vec<u32> {
    parts.iter().map(|part| part.provider).collect()
}

fn free_all(fd: BorrowedFd<'_>, parts: &[abi::p2pmem_part]) -> Result<()> {
    parts.iter().try_for_each(|part| free(fd, part.handle).map_err(errno))
}

/// Publishes all providers. Returns their ids, the nearest to nvme0 first: accel0, shm0, accel1.
fn publish(bed: &Bed) -> Result<[u32; 3]> {
    bed.publish("accel1")?;
    bed.publish("shm0")?;
    let id = |name| -> Result<u32> { Ok(bed.provider(name)?.id) };
    Ok([id("accel0")?, id("shm0")?, id("accel1")?])
}

fn unpublish(bed: &Bed) -> Result<()> {
    bed.unpublish("accel1")?;
    bed.unpublish("shm0")
}

fn stripe(bed: &mut Bed) -> Result<()> {
    let order = publish(bed)?;
    let file = open()?;
    let fd = file.as_fd();
    let parts = near(bed, fd, &["nvme0"], wanted(48 * MIB, 3))?.map_err(errno)?;
    check(&parts, 48 * MIB)?;
    ensure!(providers(&parts) == order, "{parts:?}, instead of {order:?}");
    let classes: Vec<u32> = parts.iter().map(|part| part.class).collect();
    ensure!(
        classes
            == [
                abi::P2PMEM_PATH_SAME_SWITCH,
                abi::P2PMEM_PATH_HOST_BRIDGE,
                abi::P2PMEM_PATH_SYSTEM
            ],
        "{classes:?}"
    );
    let (explain, verdicts, said) = explain_last(fd)?;
    let codes: Vec<_> = verdicts.iter().map(|v| (v.provider, v.code)).collect();
    ensure!(explain.error == 0 && explain.chosen == order[0], "{explain:?}");
    for id in order {
        ensure!(codes.contains(&(id, abi::P2PMEM_VERDICT_CHOSEN)), "{codes:?}");
    }
    let cmb = bed.provider("nvme1")?.id;
    ensure!(codes.contains(&(cmb, abi::P2PMEM_VERDICT_TOO_SMALL)), "{codes:?}");
    ensure!(said.contains("3 of 4 providers were chosen"), "{said:?}");
    // Each part is a separate buffer, and no dma-buf crosses a boundary.
    let maps: Vec<Mapping> = parts
        .iter()
        .map(|part| Mapping::shared(fd, part.mmap_offset, part.size as usize).map_err(errno))
        .collect::<Result<_>>()?;
    for (part, map) in parts.iter().zip(&maps) {
        let b = buffer(fd, part.handle).map_err(errno)?;
        ensure!(
            b.provider == part.provider && b.size == part.size && b.bar_offset == part.bar_offset,
            "{b:?} {part:?}"
        );
        for at in [0, part.size - 8] {
            map.set(at as usize, part.offset + at);
        }
        export(fd, part.handle, 0, &[(0, part.size)]).map_err(errno)?;
    }
    for (part, map) in parts.iter().zip(&maps) {
        for at in [0, part.size - 8] {
            ensure!(map.get(at as usize) == part.offset + at);
        }
    }
    let across = [(maps[0].address(), PAGE), (maps[1].address(), PAGE)];
    expect(
        "a dma-buf of two parts",
        export(fd, 0, abi::P2PMEM_EXPORT_MAPPED, &across),
        libc::EXDEV,
    )?;
    // The removal of a provider ends the stripe's part in it, and no other part.
    bed.unpublish("accel1")?;
    let states: Vec<u32> = parts
        .iter()
        .map(|part| buffer(fd, part.handle).map(|b| b.state).map_err(errno))
        .collect::<Result<_>>()?;
    let (live, gone) = (abi::P2PMEM_BUFFER_LIVE, abi::P2PMEM_BUFFER_GONE);
    ensure!(states == [live, live, gone], "{states:?}");
    ensure!(maps[1].get(0) == parts[1].offset);
    drop(maps);
    free_all(fd, &parts)?;
    bed.publish("accel1")?;

    // Sizes that are not multiples of the number of parts; boundaries are aligned if the parts are large enough.
    let uneven = near(bed, fd, &[], wanted(10 * PAGE - 5, 3))?.map_err(errno)?;
    check(&uneven, 10 * PAGE)?;
    let sizes: Vec<u64> = uneven.iter().map(|part| part.size / PAGE).collect();
    ensure!(sizes == [4, 4, 2], "{sizes:?}");
    free_all(fd, &uneven)?;
    let mut ask = wanted(12 * MIB + PAGE, 2);
    ask.req.align = 2 * MIB;
    let aligned = near(bed, fd, &["nvme0"], ask)?.map_err(errno)?;
    check(&aligned, 12 * MIB + PAGE)?;
    ensure!(
        aligned.iter().all(|part| part.bar_offset % (2 * MIB) == 0) && aligned[1].offset % (2 * MIB) == 0,
        "{aligned:?}"
    );
    free_all(fd, &aligned)?;

    // As many parts as possible, within the free space and no farther than allowed.
    let most = near(bed, fd, &["nvme0"], wanted(60 * MIB, 0))?.map_err(errno)?;
    check(&most, 60 * MIB)?;
    ensure!(most.len() == 3, "{most:?}");
    free_all(fd, &most)?;
    let mut ask = wanted(60 * MIB, 0);
    ask.nr_parts = 2;
    let two = near(bed, fd, &["nvme0"], ask)?.map_err(errno)?;
    ensure!(providers(&two) == order[..2], "{two:?}");
    free_all(fd, &two)?;
    let mut ask = wanted(60 * MIB, 0);
    ask.req.max_class = abi::P2PMEM_PATH_SAME_SWITCH;
    let one = near(bed, fd, &["nvme0"], ask)?.map_err(errno)?;
    ensure!(providers(&one) == order[..1], "{one:?}");
    free_all(fd, &one)?;
    // One provider can be preferred.
    let mut ask = wanted(32 * MIB, 2);
    // The provider has another id since it was published again.
    let far = bed.provider("accel1")?.id;
    (ask.req.provider, ask.req.flags) = (far, abi::P2PMEM_ALLOC_PREFER);
    let preferred = near(bed, fd, &["nvme0"], ask)?.map_err(errno)?;
    ensure!(providers(&preferred) == [far, order[0]], "{preferred:?}");
    drop(file);
    unpublish(bed)
}

fn refused(bed: &mut Bed) -> Result<()> {
    let order = publish(bed)?;
    let file = open()?;
    let fd = file.as_fd();
    let free_bytes = || -> Result<Vec<u64>> {
        bed.settled()?;
        let mut rows = Vec::new();
        until("nothing waits to be cleared", || {
            rows = super::providers(fd)?;
            Ok(!rows.iter().any(is_clearing))
        })?;
        Ok(rows.iter().map(|p| p.free).collect())
    };
    let before = free_bytes()?;
    // More parts than providers that could hold one.
    expect("4 parts", near(bed, fd, &["nvme0"], wanted(64 * MIB, 4))?, libc::ENODEV)?;
    let (_, verdicts, said) = explain_last(fd)?;
    for id in order {
        let code = verdicts.iter().find(|v| v.provider == id).map(|v| v.code);
        ensure!(code == Some(abi::P2PMEM_VERDICT_TOO_FEW), "{verdicts:?}");
    }
    ensure!(
        said.contains(&format!("needs 4 parts of {} bytes, and 3 find a provider", 16 * MIB))
            && said.contains("is large enough for"),
        "{said:?}"
    );
    expect("5 parts", near(bed, fd, &["nvme0"], wanted(5 * PAGE, 5))?, libc::ENODEV)?;
    ensure!(
        explain_last(fd)?.2.contains("there is no other provider"),
        "{:?}",
        explain_last(fd)?.2
    );
    // One provider is full.
    let rest = bed.provider("shm0")?;
    let mut filler = Vec::new();
    let mut piece = rest.largest;
    while piece >= MIB {
        let mut a = request(piece);
        a.req.provider = rest.id;
        match sys::alloc(fd, &mut a, Memory::Slice(&mut [])) {
            Ok(()) => filler.push(a.handle),
            Err(_) => piece /= 2,
        }
    }
    expect(
        "with one full",
        near(bed, fd, &["nvme0"], wanted(48 * MIB, 3))?,
        libc::ENOSPC,
    )?;
    ensure!(
        explain_last(fd)?.2.contains("and 2 find a provider"),
        "{:?}",
        explain_last(fd)?.2
    );
    let two = near(bed, fd, &["nvme0"], wanted(48 * MIB, 0))?.map_err(errno)?;
    ensure!(providers(&two) == [order[0], order[2]], "{two:?}");
    free_all(fd, &two)?;
    for handle in filler {
        free(fd, handle).map_err(errno)?;
    }
    // Invalid requests.
    let with = |change: fn(&mut abi::p2pmem_stripe)| {
        let mut ask = wanted(8 * MIB, 2);
        change(&mut ask);
        ask
    };
    type Change = fn(&mut abi::p2pmem_stripe);
    let cases: [(&str, Change, i32); 9] = [
        (
            "another strategy",
            |a| a.req.strategy = abi::P2PMEM_STRATEGY_SPREAD,
            libc::EINVAL,
        ),
        ("too little space", |a| a.nr_parts = 1, libc::EINVAL),
        ("no space", |a| (a.nr_parts, a.req.parts) = (0, 0), libc::EINVAL),
        ("flags", |a| a.flags = 1, libc::EINVAL),
        ("more parts than there may be", |a| a.req.parts = 17, libc::E2BIG),
        ("more parts than pages", |a| a.req.size = PAGE, libc::EINVAL),
        (
            "empty parts",
            |a| (a.req.size, a.req.parts) = (5 * PAGE, 4),
            libc::EINVAL,
        ),
        ("a provider that is required", |a| a.req.provider = 1, libc::EINVAL),
        ("no bytes", |a| a.req.size = 0, libc::EINVAL),
    ];
    for (what, change, code) in cases {
        expect(what, near(bed, fd, &[], with(change))?, code)?;
        ensure!(!explain_last(fd)?.2.is_empty(), "{what}");
    }
    let mut plain = request(MIB);
    plain.req.strategy = abi::P2PMEM_STRATEGY_STRIPE;
    expect(
        "ALLOC of a stripe",
        sys::alloc(fd, &mut plain, Memory::Slice(&mut [])),
        libc::EINVAL,
    )?;
    ensure!(explain_last(fd)?.2.contains("P2PMEM_IOC_STRIPE"));
    let mut plain = request(MIB);
    plain.req.parts = 2;
    expect(
        "ALLOC of parts",
        sys::alloc(fd, &mut plain, Memory::Slice(&mut [])),
        libc::EINVAL,
    )?;
    for at in 0..BAD_POINTERS.len() {
        let mut ask = wanted(8 * MIB, 2);
        let answer = sys::stripe(fd, &mut ask, Memory::Slice(&mut []), Memory::Bad(at));
        expect("parts at a bad pointer", answer, libc::EFAULT)?;
        let answer = sys::bad_argument(fd, abi::P2PMEM_IOC_STRIPE, at);
        expect("a bad pointer", answer, libc::EFAULT)?;
    }
    super::inflight::until("nothing was taken", || Ok(free_bytes()? == before))?;
    drop(file);
    unpublish(bed)
}

fn rules(bed: &mut Bed) -> Result<()> {
    let order = publish(bed)?;
    let file = open()?;
    let fd = file.as_fd();
    // Two parts fit; a third would exceed the quota.
    let quota = AdminRule::new("50-some", &[("quota", "40M")])?;
    expect(
        "over quota",
        near(bed, fd, &["nvme0"], wanted(48 * MIB, 3))?,
        libc::EDQUOT,
    )?;
    let said = explain_last(fd)?.2;
    ensure!(
        said.contains("rule 50-some") && said.contains("and 2 find a provider"),
        "{said:?}"
    );
    ensure!(quota.get("usage")?.is_empty(), "{}", quota.get("usage")?);
    expect(
        "over quota",
        near(bed, fd, &["nvme0"], wanted(48 * MIB, 0))?,
        libc::EDQUOT,
    )?;
    ensure!(quota.get("usage")?.is_empty(), "{}", quota.get("usage")?);
    let parts = near(bed, fd, &["nvme0"], wanted(39 * MIB, 3))?.map_err(errno)?;
    ensure!(super::rules::counted(&quota)? == 39 * MIB, "{}", quota.get("usage")?);
    free(fd, parts[1].handle).map_err(errno)?;
    ensure!(super::rules::counted(&quota)? == 26 * MIB, "{}", quota.get("usage")?);
    free(fd, parts[0].handle).map_err(errno)?;
    free(fd, parts[2].handle).map_err(errno)?;
    drop(quota);
    // A provider that rules avoid.
    let near_one = bed.device("accel0")?.bdf.clone();
    let avoid = AdminRule::new("50-not-this", &[("provider", &near_one), ("action", "avoid")])?;
    let open_end = near(bed, fd, &["nvme0"], wanted(48 * MIB, 0))?.map_err(errno)?;
    ensure!(providers(&open_end) == order[1..], "{open_end:?}");
    let verdict = explain_last(fd)?.1.into_iter().find(|v| v.provider == order[0]);
    ensure!(
        verdict.is_some_and(|v| v.code == abi::P2PMEM_VERDICT_PREFERENCE),
        "{verdict:?}"
    );
    free_all(fd, &open_end)?;
    let all = near(bed, fd, &["nvme0"], wanted(48 * MIB, 3))?.map_err(errno)?;
    ensure!(providers(&all) == [order[1], order[2], order[0]], "{all:?}");
    free_all(fd, &all)?;
    drop(avoid);
    // A provider that rules deny.
    let _deny = AdminRule::new("50-never", &[("provider", &near_one), ("action", "deny")])?;
    let without = near(bed, fd, &["nvme0"], wanted(48 * MIB, 0))?.map_err(errno)?;
    ensure!(providers(&without) == order[1..], "{without:?}");
    drop(file);
    unpublish(bed)
}

fn during_removal(bed: &mut Bed) -> Result<()> {
    publish(bed)?;
    let stays = bed.provider("accel0")?;
    // With rules, a decision has more to check.
    let _rule = AdminRule::new("50-count", &[("quota", "1G")])?;
    let bed = &*bed;
    let stripes = |busy: &Busy| -> Result<()> {
        let file = open()?;
        let fd = file.as_fd();
        while busy.goes_on() {
            match near(bed, fd, &["nvme0"], wanted(48 * MIB, 3))? {
                Ok(parts) => {
                    check(&parts, 48 * MIB)?;
                    free_all(fd, &parts)?;
                    busy.serve();
                }
                Err(code) => {
                    ensure!([libc::ENODEV, libc::ENOSPC].contains(&code), "STRIPE: {}", errno(code));
                    busy.refuse();
                }
            }
            // There is always a provider that can: as many parts as providers, at least one.
            let some = near(bed, fd, &["nvme0"], wanted(2 * MIB, 0))?.map_err(errno)?;
            check(&some, 2 * MIB)?;
            free_all(fd, &some)?;
        }
        Ok(())
    };
    let buffers = |busy: &Busy| -> Result<()> {
        let file = open()?;
        let fd = file.as_fd();
        while busy.goes_on() {
            // Spread chooses the emptiest provider, which is one of those that are added and removed.
            let mut a = request(MIB);
            a.req.strategy = abi::P2PMEM_STRATEGY_SPREAD;
            sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map_err(errno)?;
            free(fd, a.handle).map_err(errno)?;
            busy.serve();
        }
        Ok(())
    };
    let busy = Busy::during(&[&stripes, &buffers, &buffers], |busy| {
        for _ in 0..rounds(15) {
            busy.await_served(20)?;
            bed.unpublish("accel1")?;
            bed.unbind("shm0")?;
            busy.await_refused(0)?;
            publish(bed)?;
        }
        Ok(())
    })?;
    println!("{} requests served, {} refused", busy.served(), busy.refused());
    ensure!(bed.settled()? == (stays.free, stays.buffers));
    let file = open()?;
    alloc(file.as_fd(), 64 * MIB).map_err(errno)?;
    drop(file);
    unpublish(bed)
}
