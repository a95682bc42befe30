// SPDX-License-Identifier: MIT OR Apache-2.0

//! Extension of the ABI: programs older and newer than the module, which state their structure sizes, and 32-bit
//! programs.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::{Bed, Case, errno, expect, free, open, providers, request};
use crate::sys::{self, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "abi-sizes",
        about: "structures and elements can be shorter or longer than the module's; unknown content fails with E2BIG",
        topology: "small",
        ruins: false,
        run: sizes,
    },
    Case {
        name: "abi-spare",
        about: "reserved and spare fields that are not zero fail with EINVAL",
        topology: "small",
        ruins: false,
        run: spare,
    },
    Case {
        name: "abi-compat",
        about: "ioctls by the kernel's 32-bit entry have the same results",
        topology: "small",
        ruins: false,
        run: compat,
    },
    Case {
        name: "abi-rescan",
        about: "only CAP_SYS_ADMIN can drop the path cache that all programs share",
        topology: "small",
        ruins: false,
        run: rescan,
    },
    Case {
        name: "abi-events",
        about: "read() returns the events before one that cannot be copied; a later read() returns the rest",
        topology: "small",
        ruins: false,
        run: events,
    },
];

fn sizes(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    // A longer INFO: the module writes zeros to the part that it does not know.
    let known = size_of::<abi::p2pmem_info>() / 8;
    let mut long = [u64::MAX; 32];
    sys::sized(fd, abi::P2PMEM_IOC_INFO, 256, &mut long).map_err(errno)?;
    ensure!(
        long[known..] == [0; 32][known..],
        "not zero past the end of INFO: {long:?}"
    );
    ensure!(long[0] as u32 == abi::P2PMEM_ABI_VERSION, "{:#x}", long[0]);
    // A shorter INFO: the module writes nothing past the program's size.
    let mut short = [u64::MAX; 32];
    sys::sized(fd, abi::P2PMEM_IOC_INFO, 16, &mut short).map_err(errno)?;
    ensure!(short[..2] == long[..2] && short[2..] == [u64::MAX; 30], "{short:?}");
    expect(
        "INFO with size 0",
        sys::sized(fd, abi::P2PMEM_IOC_INFO, 0, &mut short),
        libc::EINVAL,
    )?;
    // BUFFER of a handle: longer, with and without unknown content, shorter, and too short.
    let got = super::alloc(fd, 4096).map_err(errno)?;
    let mut ask = [0u64; 32];
    ask[0] = got.handle.into();
    sys::sized(fd, abi::P2PMEM_IOC_BUFFER, 256, &mut ask).map_err(errno)?;
    ensure!(ask[1] == 4096, "{ask:?}");
    for at in [size_of::<abi::p2pmem_buffer>() / 8, 31] {
        let mut ask = [0u64; 32];
        (ask[0], ask[at]) = (got.handle.into(), 1 << 63);
        let answer = sys::sized(fd, abi::P2PMEM_IOC_BUFFER, 256, &mut ask);
        expect("BUFFER with unknown content", answer, libc::E2BIG)?;
    }
    let mut ask = [u64::MAX; 32];
    ask[0] = got.handle.into();
    sys::sized(fd, abi::P2PMEM_IOC_BUFFER, 16, &mut ask).map_err(errno)?;
    ensure!(ask[1] == 4096 && ask[2..] == [u64::MAX; 30], "{ask:?}");
    let answer = sys::sized(fd, abi::P2PMEM_IOC_BUFFER, 4, &mut ask);
    expect("BUFFER without its essential fields", answer, libc::EINVAL)?;
    free(fd, got.handle).map_err(errno)?;
    // Array elements that the module writes.
    let there = providers(fd)?;
    let first = there.first().context("a provider")?;
    for size in [8, size_of::<abi::p2pmem_provider>() as u32, 256] {
        let mut out = [0xffu8; 2048];
        let count = (2048 / size).min(8);
        let n = sys::list_sized(fd, size, count, &mut out).map_err(errno)?;
        ensure!(n as usize == there.len(), "{n} providers");
        for (index, provider) in there.iter().enumerate().take(count as usize) {
            let element = &out[index * size as usize..][..size as usize];
            ensure!(element[..4] == provider.id.to_ne_bytes(), "{element:?}");
            let known = size_of::<abi::p2pmem_provider>().min(size as usize);
            ensure!(element[known..].iter().all(|byte| *byte == 0), "{element:?}");
        }
        let end = there.len().min(count as usize) * size as usize;
        ensure!(
            out[end..].iter().all(|byte| *byte == 0xff),
            "LIST wrote past the last element"
        );
    }
    ensure!(first.id != 0);
    let mut out = [0u8; 2048];
    expect(
        "elements of 0 bytes",
        sys::list_sized(fd, 0, 1, &mut out).map(drop),
        libc::EINVAL,
    )?;
    expect(
        "elements of 3 bytes",
        sys::list_sized(fd, 3, 1, &mut out).map(drop),
        libc::EINVAL,
    )?;
    let large = abi::P2PMEM_MAX_ELEMENT + 1;
    let mut page = [0u8; 8192];
    let answer = sys::list_sized(fd, large, 1, &mut page).map(drop);
    expect("elements that are too large", answer, libc::E2BIG)?;
    // Array elements that the module reads: clients.
    let client = bed.address("nvme0")?;
    let function = (u32::from(client.devfn) << 8) | u32::from(client.bus);
    let longer = [u64::from(client.domain) | (u64::from(function) << 32), 0];
    let mut ask = request(4096);
    sys::alloc_clients(fd, &mut ask, &longer, 16).map_err(errno)?;
    free(fd, ask.handle).map_err(errno)?;
    let answer = sys::alloc_clients(fd, &mut request(4096), &[longer[0], 1], 16);
    expect("a client with unknown content", answer, libc::E2BIG)?;
    // Each ioctl that reads its structure fails if the part that the module does not know is not zero, or if the size
    // is 0.
    for call in abi::P2PMEM_IOCS.into_iter().filter(|&call| abi::ioc_reads(call)) {
        let name = format!("ioctl {:#04x}", abi::ioc_nr(call));
        ensure!(
            abi::ioc_size(call) <= 248,
            "{name}: the structure is longer than this test supports"
        );
        let mut ask = [0u64; 32];
        ask[31] = 1 << 63;
        let answer = sys::sized(fd, call, 256, &mut ask);
        expect(&format!("{name} with unknown content"), answer, libc::E2BIG)?;
        let answer = sys::sized(fd, call, 0, &mut [0; 32]);
        expect(&format!("{name} without a structure"), answer, libc::EINVAL)?;
    }
    element_sizes(bed, fd)
}

fn spare(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    type Change = fn(&mut abi::p2pmem_request);
    let changes: [Change; 3] = [|r| r.reserved = 1, |r| r.spare[0] = 1, |r| r.spare[3] = 1 << 63];
    for change in changes {
        let mut ask = request(4096);
        change(&mut ask.req);
        let answer = sys::alloc(fd, &mut ask, Memory::Slice(&mut []));
        expect("a request with spare fields in use", answer, libc::EINVAL)?;
    }
    let mut list = abi::p2pmem_list {
        reserved: 1,
        ..Default::default()
    };
    let answer = sys::list(fd, &mut list, Memory::Slice(&mut []));
    expect("LIST with a reserved field in use", answer, libc::EINVAL)?;
    let mut rules = abi::p2pmem_rules {
        reserved: 1,
        ..Default::default()
    };
    let answer = sys::rules(fd, &mut rules, Memory::Slice(&mut []));
    expect("RULES with a reserved field in use", answer, libc::EINVAL)?;
    let mut rule = deny_rule();
    rule.reserved = 1;
    let mut rules = abi::p2pmem_rules {
        count: 1,
        ..Default::default()
    };
    let answer = sys::rules(fd, &mut rules, Memory::Slice(&mut [rule]));
    expect("a rule with a reserved field in use", answer, libc::EINVAL)?;
    rules.flags = 1;
    let answer = sys::rules(fd, &mut rules, Memory::Slice(&mut [deny_rule()]));
    expect("RULES with a flag", answer, libc::EINVAL)?;
    let stripe = |reserved, flags| {
        let mut ask = abi::p2pmem_stripe {
            req: striped(1),
            nr_parts: 1,
            reserved,
            flags,
            ..Default::default()
        };
        let parts = &mut [abi::p2pmem_part::default()];
        let answer = sys::stripe(fd, &mut ask, Memory::Slice(&mut []), Memory::Slice(parts));
        answer.and_then(|()| free(fd, parts[0].handle))
    };
    stripe(0, 0).map_err(errno).context("STRIPE")?;
    expect("STRIPE with a reserved field in use", stripe(1, 0), libc::EINVAL)?;
    expect("STRIPE with a flag", stripe(0, 1), libc::EINVAL)?;
    let got = super::alloc(fd, 4096).map_err(errno)?;
    let export = |reserved, flags| {
        let mut ask = abi::p2pmem_export {
            handle: got.handle,
            nr_ranges: 1,
            reserved,
            flags,
            ..Default::default()
        };
        let ranges = &mut [abi::p2pmem_range { offset: 0, size: 4096 }];
        sys::export(fd, &mut ask, Memory::Slice(ranges))
    };
    let dma_buf = export(0, 0).map_err(errno).context("EXPORT_DMABUF")?;
    expect("EXPORT_DMABUF with a reserved field in use", export(1, 0), libc::EINVAL)?;
    expect("EXPORT_DMABUF with a flag", export(0, 4), libc::EINVAL)?;
    for flags in [1, 1 << 31] {
        let mut ask = abi::p2pmem_import {
            fd: dma_buf.as_raw_fd(),
            flags,
            ..Default::default()
        };
        let answer = sys::plain(fd, abi::P2PMEM_IOC_IMPORT, &mut ask);
        expect("IMPORT with a flag", answer, libc::EINVAL)?;
        let mut ask = abi::p2pmem_free {
            handle: got.handle,
            flags,
        };
        let answer = sys::plain(fd, abi::P2PMEM_IOC_FREE, &mut ask);
        expect("FREE with a flag", answer, libc::EINVAL)?;
    }
    free(fd, got.handle).map_err(errno)
}

/// Returns a file rule that denies everything.
fn deny_rule() -> abi::p2pmem_rule {
    let mut rule = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_DENY,
        ..Default::default()
    };
    rule.name[0] = b'd' as _;
    rule
}

/// Returns a request for a stripe of `parts` parts, one page each.
fn striped(parts: u32) -> abi::p2pmem_request {
    abi::p2pmem_request {
        size: u64::from(parts) * 4096,
        strategy: abi::P2PMEM_STRATEGY_STRIPE,
        parts,
        ..Default::default()
    }
}

/// Tests elements shorter and longer than the module's in all arrays except those of LIST and of clients.
fn element_sizes(bed: &Bed, fd: BorrowedFd<'_>) -> Result<()> {
    let mut clients = [bed.address("nvme0")?];
    let provider = bed.provider("accel0")?.id;
    // The module truncates the elements that it writes, or fills them with zeros. A path and a verdict begin with the
    // provider, a part with its handle.
    let written = |name: &str, size: usize, known: usize, out: &[u8; 512], first: Option<u32>| -> Result<()> {
        let begins = first.is_none_or(|first| out[..4] == first.to_ne_bytes());
        ensure!(begins, "{name} of {size} bytes: {out:?}");
        let filled = out.get(known..size).unwrap_or_default();
        ensure!(filled.iter().all(|b| *b == 0), "{name} of {size} bytes: {out:?}");
        ensure!(
            out[size..].iter().all(|b| *b == 0xff),
            "{name}: the module wrote past {size} bytes"
        );
        Ok(())
    };
    for size in [8u32, 16, 128, 256] {
        let mut out = [0xff; 512];
        let mut paths = abi::p2pmem_paths::default();
        sys::with_elements(fd, &mut paths, &mut clients, (size, 1), &mut out).map_err(errno)?;
        written(
            "a path",
            size as usize,
            size_of::<abi::p2pmem_path>(),
            &out,
            Some(provider),
        )?;
        let mut out = [0xff; 512];
        let mut explain = abi::p2pmem_explain {
            req: request(4096).req,
            ..Default::default()
        };
        sys::with_elements(fd, &mut explain, &mut clients, (size, 1), &mut out).map_err(errno)?;
        written(
            "a verdict",
            size as usize,
            size_of::<abi::p2pmem_verdict>(),
            &out,
            Some(provider),
        )?;
        let mut out = [0xff; 512];
        let mut stripe = abi::p2pmem_stripe {
            req: striped(1),
            ..Default::default()
        };
        sys::with_elements(fd, &mut stripe, &mut clients, (size, 1), &mut out).map_err(errno)?;
        written("a part", size as usize, size_of::<abi::p2pmem_part>(), &out, None)?;
        let handle = u32::from_ne_bytes([out[0], out[1], out[2], out[3]]);
        free(fd, handle).map_err(errno).context("FREE of the part")?;
    }
    // In elements that the module reads, the unknown part has to be zero, and the missing part counts as zero.
    let got = super::alloc(fd, 4096).map_err(errno)?;
    let known = size_of::<abi::p2pmem_range>();
    for (size, stray, code) in [(16, 0, 0), (64, 0, 0), (64, 1, libc::E2BIG), (8, 0, libc::EINVAL)] {
        let mut range = [0u8; 64];
        range[8..16].copy_from_slice(&4096u64.to_ne_bytes());
        range[63] = stray;
        let answer = sys::export_sized(fd, got.handle, size, &mut range[..size as usize]);
        match code {
            // A range of 8 bytes has no size.
            0 => drop(
                answer
                    .map_err(errno)
                    .with_context(|| format!("a range of {size} bytes"))?,
            ),
            code => expect(&format!("a range of {size} bytes, {known} known"), answer, code)?,
        }
    }
    free(fd, got.handle).map_err(errno)?;
    let rule = sys::rule_bytes(&deny_rule());
    let other = open()?;
    // Without its quota, the rule is the same; without its action, the rule is invalid.
    for (size, stray, code) in [
        (72, 0, 0),
        (200, 0, 0),
        (200, 1, libc::E2BIG),
        (64, 0, 0),
        (48, 0, libc::EINVAL),
    ] {
        let mut bytes = [0u8; 200];
        bytes[..rule.len()].copy_from_slice(&rule);
        bytes[199] = stray;
        let mut ask = abi::p2pmem_rules::default();
        let answer = sys::with_elements(other.as_fd(), &mut ask, &mut [], (size, 1), &mut bytes);
        match code {
            0 => {
                answer
                    .map_err(errno)
                    .with_context(|| format!("a rule of {size} bytes"))?;
                expect(
                    "ALLOC with a file rule that denies",
                    super::alloc(other.as_fd(), 4096),
                    libc::EACCES,
                )?;
            }
            code => expect(&format!("a rule of {size} bytes"), answer, code)?,
        }
    }
    Ok(())
}

fn compat(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let mut info = [0u64; 32];
    sys::compat(fd, abi::P2PMEM_IOC_INFO, &mut info).map_err(errno)?;
    ensure!(info[0] as u32 == abi::P2PMEM_ABI_VERSION, "{:#x}", info[0]);
    // The request begins with the size. The handle follows the request.
    let mut ask = [0u64; 32];
    ask[0] = 4096;
    sys::compat(fd, abi::P2PMEM_IOC_ALLOC, &mut ask).map_err(errno)?;
    let at = size_of::<abi::p2pmem_request>() / 8;
    let (handle, size) = (ask[at] as u32, ask[at + 1]);
    ensure!(handle != 0 && size == 4096, "{ask:?}");
    ensure!(super::buffer(fd, handle).map_err(errno)?.size == 4096);
    let mut end = [0u64; 32];
    end[0] = handle.into();
    sys::compat(fd, abi::P2PMEM_IOC_FREE, &mut end).map_err(errno)?;
    expect(
        "FREE again",
        sys::compat(fd, abi::P2PMEM_IOC_FREE, &mut end),
        libc::ENOENT,
    )?;
    sys::by_32_bit(|| compat_arrays(bed, fd))
}

/// Calls ioctls with arrays in the address range of a 32-bit program.
fn compat_arrays(bed: &Bed, fd: BorrowedFd<'_>) -> Result<()> {
    let low = errno;
    let mut providers = sys::Low::new(4, abi::p2pmem_provider::default()).map_err(low)?;
    let mut list = abi::p2pmem_list {
        count: 4,
        ..Default::default()
    };
    sys::list(fd, &mut list, Memory::Slice(&mut providers))
        .map_err(errno)
        .context("LIST")?;
    ensure!(list.count >= 1 && providers[0].id != 0, "{list:?}");
    let id = providers[0].id;
    let mut clients = sys::Low::new(1, bed.address("nvme0")?).map_err(low)?;
    let mut verdicts = sys::Low::new(4, abi::p2pmem_verdict::default()).map_err(low)?;
    let mut text = sys::Low::new(512, 0xffu8).map_err(low)?;
    let mut explain = abi::p2pmem_explain {
        req: request(4096).req,
        nr_verdicts: 4,
        text_len: 512,
        ..Default::default()
    };
    explain.req.nr_clients = 1;
    let (near, verdict_rows, message) = (
        Memory::Slice(&mut clients[..]),
        Memory::Slice(&mut verdicts[..]),
        Memory::Slice(&mut text[..]),
    );
    sys::explain(fd, &mut explain, near, verdict_rows, message)
        .map_err(errno)
        .context("EXPLAIN")?;
    ensure!(
        explain.chosen == id && verdicts[0].code == abi::P2PMEM_VERDICT_CHOSEN,
        "{explain:?}"
    );
    let end = explain.text_len as usize;
    ensure!(
        end > 8 && text[end - 1] == 0 && text[end] == 0xff,
        "{end} bytes of text"
    );
    let mut parts = sys::Low::new(2, abi::p2pmem_part::default()).map_err(low)?;
    let mut stripe = abi::p2pmem_stripe {
        req: striped(1),
        nr_parts: 2,
        ..Default::default()
    };
    stripe.req.nr_clients = 1;
    let (near, into) = (Memory::Slice(&mut clients[..]), Memory::Slice(&mut parts[..]));
    sys::stripe(fd, &mut stripe, near, into)
        .map_err(errno)
        .context("STRIPE")?;
    ensure!(
        stripe.nr_parts == 1 && parts[0].size == 4096 && parts[1].handle == 0,
        "{stripe:?}"
    );
    let handle = parts[0].handle;
    let mut ranges = sys::Low::new(1, abi::p2pmem_range { offset: 0, size: 4096 }).map_err(low)?;
    let mut export = abi::p2pmem_export {
        handle,
        nr_ranges: 1,
        ..Default::default()
    };
    let dma_buf = sys::export(fd, &mut export, Memory::Slice(&mut ranges))
        .map_err(errno)
        .context("EXPORT_DMABUF")?;
    let mut import = abi::p2pmem_import {
        fd: dma_buf.as_raw_fd(),
        ..Default::default()
    };
    sys::plain(fd, abi::P2PMEM_IOC_IMPORT, &mut import)
        .map_err(errno)
        .context("IMPORT")?;
    ensure!(import.size == 4096 && import.provider == id, "{import:?}");
    free(fd, import.handle).map_err(errno)?;
    free(fd, handle).map_err(errno)?;
    let mut rules = sys::Low::new(1, deny_rule()).map_err(low)?;
    let mut ask = abi::p2pmem_rules {
        count: 1,
        ..Default::default()
    };
    sys::rules(fd, &mut ask, Memory::Slice(&mut rules))
        .map_err(errno)
        .context("RULES")?;
    expect(
        "ALLOC with a file rule that denies",
        super::alloc(fd, 4096),
        libc::EACCES,
    )
}

fn rescan(bed: &mut Bed) -> Result<()> {
    let mut clients = [bed.address("nvme0")?];
    let file = open()?;
    let mut ask = abi::p2pmem_paths {
        nr_clients: 1,
        flags: abi::P2PMEM_PATHS_RESCAN,
        ..Default::default()
    };
    let mut as_user = ask;
    let fd = file.as_fd();
    sys::paths(fd, &mut ask, Memory::Slice(&mut clients), Memory::Slice(&mut [])).map_err(errno)?;
    let answer = sys::as_user(1000, 1000, &[], || {
        let mut clients = clients;
        let none = Memory::Slice(&mut []);
        let refused = sys::paths(fd, &mut as_user, Memory::Slice(&mut clients), none);
        as_user.flags = 0;
        let none = Memory::Slice(&mut []);
        (refused, sys::paths(fd, &mut as_user, Memory::Slice(&mut clients), none))
    })
    .map_err(errno)?;
    expect("PATHS_RESCAN of a user", answer.0, libc::EPERM)?;
    answer.1.map_err(errno).context("PATHS of a user")
}

fn events(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::NONBLOCK)?;
    let fd = file.as_fd();
    // Two events: the provider is removed and added.
    bed.unbind("accel0")?;
    bed.publish("accel0")?;
    let size = size_of::<abi::p2pmem_event>();
    // No event can be copied: both stay.
    expect(
        "read at a bad pointer",
        sys::read_guarded(fd, 0, size).map(drop),
        libc::EFAULT,
    )?;
    // One event can be copied: read() returns it, and the other event stays.
    let first = sys::read_guarded(fd, size, 2 * size).map_err(errno)?;
    ensure!(first.len() == 1, "{first:?}");
    let rest = sys::read_events(fd, 8 * size).map_err(errno)?;
    let kinds: Vec<_> = first.iter().chain(&rest).map(|event| event.type_).collect();
    ensure!(
        kinds == [abi::P2PMEM_EVENT_PROVIDER_REMOVED, abi::P2PMEM_EVENT_PROVIDER_ADDED],
        "{kinds:?}"
    );
    ensure!(first.iter().chain(&rest).all(|event| event.size as usize == size));
    Ok(())
}
