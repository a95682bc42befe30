// SPDX-License-Identifier: MIT OR Apache-2.0

//! Calls, values, and handles that the ABI and configfs reject, and the errno of each.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::attach::none_attached;
use super::dmabuf::{export, exported_buffer};
use super::{Bed, Case, PROVIDERS, alloc, buffer, errno, expect, free, open, providers, read, request};
use crate::sys::{self, BAD_POINTERS, Mapping, Memory, bad_argument};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "bad-calls",
        about: "unknown ioctls fail with ENOTTY, bad pointers with EFAULT",
        topology: "small",
        ruins: false,
        run: calls,
    },
    Case {
        name: "bad-requests",
        about: "a request with a bad field fails with the errno of that field",
        topology: "small",
        ruins: false,
        run: requests,
    },
    Case {
        name: "bad-handles",
        about: "calls fail for handles that do not exist, belong to other files, or are freed",
        topology: "small",
        ruins: false,
        run: handles,
    },
    Case {
        name: "bad-arrays",
        about: "LIST, PATHS and EXPLAIN reject bad arrays and counts",
        topology: "small",
        ruins: false,
        run: arrays,
    },
    Case {
        name: "bad-copy-back",
        about: "calls whose answer cannot be written fail with EFAULT, and create no handle and no descriptor",
        topology: "small",
        ruins: false,
        run: copy_back,
    },
    Case {
        name: "bad-mmap",
        about: "mmap rejects private mappings, ranges past the end and unknown offsets",
        topology: "small",
        ruins: false,
        run: mappings,
    },
    Case {
        name: "full",
        about: "a full provider fails requests with ENOSPC; freeing returns all memory",
        topology: "small",
        ruins: false,
        run: full,
    },
    Case {
        name: "bad-configfs",
        about: "configfs rejects bad values and has the reason in status",
        topology: "small",
        ruins: false,
        run: configfs,
    },
];

fn calls(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    for request in abi::P2PMEM_IOCS {
        for (bad, address) in BAD_POINTERS.iter().enumerate() {
            expect(
                &format!("call {request:#x} at {address:#x}"),
                bad_argument(fd, request, bad),
                libc::EFAULT,
            )?;
        }
        let mut any = [0u64; 32];
        // Another number, another magic, another direction.
        for other in [request + 0x40, request ^ 0x100, request ^ (3 << 30)] {
            if !abi::P2PMEM_IOCS.contains(&other) && abi::ioc_size(other) <= 256 {
                expect(
                    &format!("call {other:#x}"),
                    sys::plain(fd, other, &mut any),
                    libc::ENOTTY,
                )?;
            }
        }
    }
    Ok(())
}

type Change = fn(&mut abi::p2pmem_alloc);

fn requests(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let unknown = providers(fd)?.iter().map(|p| p.id).max().unwrap_or(0) + 1000;
    let cases: &[(&str, Change, i32)] = &[
        ("size 0", |a| a.req.size = 0, libc::EINVAL),
        (
            "size that overflows when rounded",
            |a| a.req.size = u64::MAX,
            libc::EINVAL,
        ),
        ("size beyond every BAR", |a| a.req.size = 1 << 50, libc::ENODEV),
        ("align 3", |a| a.req.align = 3, libc::EINVAL),
        ("align 12288", |a| a.req.align = 12288, libc::EINVAL),
        ("align 2 GiB", |a| a.req.align = 1 << 31, libc::EINVAL),
        ("align all ones", |a| a.req.align = u64::MAX, libc::EINVAL),
        ("unknown flag", |a| a.req.flags = 2, libc::EINVAL),
        ("highest flag", |a| a.req.flags = 1 << 31, libc::EINVAL),
        ("strategy 4", |a| a.req.strategy = 4, libc::EINVAL),
        ("strategy all ones", |a| a.req.strategy = u32::MAX, libc::EINVAL),
        ("max_class 7", |a| a.req.max_class = 7, libc::EINVAL),
        ("max_class 256", |a| a.req.max_class = 256, libc::EINVAL),
        ("parts without the stripe strategy", |a| a.req.parts = 1, libc::EINVAL),
        ("reserved", |a| a.reserved = 1, libc::EINVAL),
    ];
    let (free_before, buffers) = bed.settled()?;
    for (what, change, code) in cases {
        let mut a = request(4096);
        change(&mut a);
        expect(what, sys::alloc(fd, &mut a, Memory::Slice(&mut [])), *code)?;
        refused_with(fd, *code).with_context(|| (*what).to_owned())?;
    }
    let mut a = request(4096);
    a.req.provider = unknown;
    let answer = sys::alloc(fd, &mut a, Memory::Slice(&mut []));
    ensure!(
        matches!(answer, Err(libc::ENODEV | libc::ENOENT)),
        "unknown provider: {answer:?}"
    );

    let good = bed.address("nvme0")?;
    let mut many = vec![good; 65];
    let clients = |nr, clients: &mut [abi::p2pmem_pci_addr]| {
        let mut a = request(4096);
        a.req.nr_clients = nr;
        sys::alloc(fd, &mut a, Memory::Slice(clients)).map(|()| a.handle)
    };
    expect("65 clients", clients(65, &mut many), libc::E2BIG)?;
    free(fd, clients(64, &mut many).map_err(errno).context("64 clients")?).map_err(errno)?;
    many[63].reserved = 1;
    expect("reserved in the last of 64", clients(64, &mut many), libc::EINVAL)?;
    many[63] = abi::p2pmem_pci_addr { bus: 0xee, ..good };
    expect(
        "the last of 64 clients does not exist",
        clients(64, &mut many),
        libc::ENODEV,
    )?;
    let mut huge = request(4096);
    huge.req.nr_clients = u32::MAX;
    // The module rejects the count before it reads the address.
    expect("4 billion clients", alloc_bad_clients(fd, huge, 1), libc::E2BIG)?;
    for bad in 0..BAD_POINTERS.len() {
        let mut a = request(4096);
        a.req.nr_clients = 1;
        expect("clients at a bad pointer", alloc_bad_clients(fd, a, bad), libc::EFAULT)?;
    }
    for missing in [
        abi::p2pmem_pci_addr { bus: 0xee, ..good },
        abi::p2pmem_pci_addr { devfn: 0xff, ..good },
        abi::p2pmem_pci_addr {
            domain: 0x1234_5678,
            ..good
        },
    ] {
        expect("a client that does not exist", clients(1, &mut [missing]), libc::ENODEV)?;
    }
    expect(
        "reserved in a client",
        clients(1, &mut [abi::p2pmem_pci_addr { reserved: 1, ..good }]),
        libc::EINVAL,
    )?;
    ensure!(
        bed.settled()? == (free_before, buffers),
        "rejected requests changed the free bytes or buffers"
    );
    Ok(())
}

fn alloc_bad_clients(fd: std::os::fd::BorrowedFd<'_>, mut a: abi::p2pmem_alloc, bad: usize) -> Result<(), i32> {
    sys::alloc(fd, &mut a, Memory::Bad(bad))
}

/// Checks that the last explanation has a message and the errno `code`.
fn refused_with(fd: std::os::fd::BorrowedFd<'_>, code: i32) -> Result<()> {
    let (explain, _, text) = super::explain_last(fd)?;
    ensure!(
        explain.error == code as u32,
        "the explanation's errno is {}",
        explain.error
    );
    ensure!(text.len() > 8, "the explanation has no message: {text:?}");
    Ok(())
}

fn handles(_: &mut Bed) -> Result<()> {
    let (file, other) = (open()?, open()?);
    let (fd, foreign) = (file.as_fd(), other.as_fd());
    let a = alloc(fd, 4096).map_err(errno)?;
    for handle in [0, a.handle + 1, u32::MAX] {
        expect(&format!("FREE {handle}"), free(fd, handle), libc::ENOENT)?;
        expect(&format!("BUFFER {handle}"), buffer(fd, handle), libc::ENOENT)?;
    }
    expect(
        "FREE of a handle of another file",
        free(foreign, a.handle),
        libc::ENOENT,
    )?;
    expect(
        "BUFFER of a handle of another file",
        buffer(foreign, a.handle),
        libc::ENOENT,
    )?;
    expect(
        "mmap of a buffer of another file",
        Mapping::shared(foreign, a.mmap_offset, 4096),
        libc::EINVAL,
    )?;
    let mut flags = abi::p2pmem_free {
        handle: a.handle,
        flags: 1,
    };
    expect(
        "FREE with a flag",
        sys::plain(fd, abi::P2PMEM_IOC_FREE, &mut flags),
        libc::EINVAL,
    )?;
    let mut ask = abi::p2pmem_buffer {
        handle: a.handle,
        flags: 1,
        ..Default::default()
    };
    expect(
        "BUFFER with a flag",
        sys::plain(fd, abi::P2PMEM_IOC_BUFFER, &mut ask),
        libc::EINVAL,
    )?;
    let mut ask = abi::p2pmem_stats {
        flags: 1,
        ..Default::default()
    };
    expect(
        "STATS with a flag",
        sys::plain(fd, abi::P2PMEM_IOC_STATS, &mut ask),
        libc::EINVAL,
    )?;
    let mut ask = abi::p2pmem_stats {
        provider: u32::MAX,
        ..Default::default()
    };
    expect(
        "STATS of a provider that does not exist",
        sys::plain(fd, abi::P2PMEM_IOC_STATS, &mut ask),
        libc::ENOENT,
    )?;
    // The rejected calls did not free the handle.
    buffer(fd, a.handle).map_err(errno)?;
    free(fd, a.handle).map_err(errno)?;
    expect("FREE twice", free(fd, a.handle), libc::ENOENT)?;
    expect(
        "mmap after FREE",
        Mapping::shared(fd, a.mmap_offset, 4096),
        libc::EINVAL,
    )?;
    expect(
        "read with a buffer shorter than an event",
        sys::read_events(fd, 31),
        libc::EINVAL,
    )
}

fn arrays(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let mut clients = [bed.address("nvme0")?];
    let mut list = abi::p2pmem_list {
        flags: 1,
        ..Default::default()
    };
    expect(
        "LIST with a flag",
        sys::list(fd, &mut list, Memory::Slice(&mut [])),
        libc::EINVAL,
    )?;
    let mut first = abi::p2pmem_explain {
        flags: abi::P2PMEM_EXPLAIN_LAST,
        ..Default::default()
    };
    let other = open()?;
    expect(
        "EXPLAIN_LAST before any request",
        explain_call(other.as_fd(), &mut first),
        libc::ENODATA,
    )?;
    for bad in 0..BAD_POINTERS.len() {
        let mut list = abi::p2pmem_list {
            count: 1,
            ..Default::default()
        };
        expect(
            "LIST to a bad pointer",
            sys::list(fd, &mut list, Memory::Bad(bad)),
            libc::EFAULT,
        )?;
        let mut paths = abi::p2pmem_paths {
            nr_clients: 1,
            nr_paths: 1,
            ..Default::default()
        };
        let answer = sys::paths(fd, &mut paths, Memory::Slice(&mut clients), Memory::Bad(bad));
        expect("PATHS to a bad pointer", answer, libc::EFAULT)?;
        let answer = sys::paths(
            fd,
            &mut paths,
            Memory::Bad(bad),
            Memory::Slice(&mut [abi::p2pmem_path::default()]),
        );
        expect("PATHS of clients at a bad pointer", answer, libc::EFAULT)?;
        let mut explain = explain(4096);
        explain.nr_verdicts = 1;
        let answer = sys::explain(
            fd,
            &mut explain,
            Memory::Slice(&mut []),
            Memory::Bad(bad),
            Memory::Slice(&mut []),
        );
        expect("EXPLAIN to a bad pointer", answer, libc::EFAULT)?;
        let mut explain = self::explain(4096);
        explain.text_len = 64;
        let answer = sys::explain(
            fd,
            &mut explain,
            Memory::Slice(&mut []),
            Memory::Slice(&mut []),
            Memory::Bad(bad),
        );
        expect("EXPLAIN with its text at a bad pointer", answer, libc::EFAULT)?;
    }
    let mut none = abi::p2pmem_paths::default();
    let answer = sys::paths(fd, &mut none, Memory::Slice(&mut []), Memory::Slice(&mut []));
    expect("PATHS without clients", answer, libc::EINVAL)?;
    let mut many = abi::p2pmem_paths {
        nr_clients: 65,
        ..Default::default()
    };
    let answer = sys::paths(
        fd,
        &mut many,
        Memory::Slice(&mut [clients[0]; 65]),
        Memory::Slice(&mut []),
    );
    expect("PATHS of 65 clients", answer, libc::E2BIG)?;
    for (flags, reserved) in [(2, 0), (1 << 31, 0), (0, 1)] {
        let mut paths = abi::p2pmem_paths {
            nr_clients: 1,
            flags,
            reserved,
            ..Default::default()
        };
        let answer = sys::paths(fd, &mut paths, Memory::Slice(&mut clients), Memory::Slice(&mut []));
        expect("PATHS with bad flags or reserved", answer, libc::EINVAL)?;
    }
    for (flags, reserved) in [(2, 0), (0, 1)] {
        let mut explain = explain(4096);
        (explain.flags, explain.req.reserved) = (flags, reserved);
        expect(
            "EXPLAIN with bad flags or reserved",
            explain_call(fd, &mut explain),
            libc::EINVAL,
        )?;
    }
    let mut bad = explain(0);
    expect("EXPLAIN of a bad request", explain_call(fd, &mut bad), libc::EINVAL)?;
    // EXPLAIN succeeds for a request that no provider can serve. A truncated text still ends with NUL.
    let mut large = explain(1 << 50);
    large.text_len = 8;
    let mut text = [0xffu8; 8];
    sys::explain(
        fd,
        &mut large,
        Memory::Slice(&mut []),
        Memory::Slice(&mut []),
        Memory::Slice(&mut text),
    )
    .map_err(errno)?;
    ensure!(
        large.error == libc::ENODEV as u32 && large.chosen == 0 && large.nr_verdicts >= 1,
        "{large:?}"
    );
    ensure!(
        large.text_len > 8 && text[7] == 0 && text[6] != 0,
        "a text cut to 8 bytes: {text:?}"
    );
    Ok(())
}

fn explain(size: u64) -> abi::p2pmem_explain {
    abi::p2pmem_explain {
        req: abi::p2pmem_request {
            size,
            ..Default::default()
        },
        ..Default::default()
    }
}

fn explain_call(fd: std::os::fd::BorrowedFd<'_>, explain: &mut abi::p2pmem_explain) -> Result<(), i32> {
    sys::explain(
        fd,
        explain,
        Memory::Slice(&mut []),
        Memory::Slice(&mut []),
        Memory::Slice(&mut []),
    )
}

fn copy_back(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let (own, dma_buf) = exported_buffer(fd, 4096, 0)?;
    let host = sys::host_dma_buf(4096)?;
    let attach = abi::p2pmem_attach {
        fd: host.as_raw_fd(),
        provider: bed.provider("accel0")?.id,
        ..Default::default()
    };
    let stripe = abi::p2pmem_stripe {
        req: abi::p2pmem_request {
            size: 4096,
            strategy: abi::P2PMEM_STRATEGY_STRIPE,
            parts: 1,
            ..Default::default()
        },
        nr_parts: 1,
        ..Default::default()
    };
    let import = abi::p2pmem_import {
        fd: dma_buf.as_raw_fd(),
        ..Default::default()
    };
    type Call<'a> = &'a dyn Fn() -> Result<(), i32>;
    let calls: [(&str, Call<'_>); 5] = [
        ("ALLOC", &|| alloc(fd, 4096).map(drop)),
        ("STRIPE", &|| {
            let part = &mut [abi::p2pmem_part::default()];
            sys::stripe(fd, &mut { stripe }, Memory::Slice(&mut []), Memory::Slice(part))
        }),
        ("IMPORT", &|| sys::plain(fd, abi::P2PMEM_IOC_IMPORT, &mut { import })),
        ("EXPORT_DMABUF", &|| export(fd, own.handle, 0, &[(0, 4096)]).map(drop)),
        ("ATTACH_DMABUF", &|| {
            sys::attach(fd, &mut { attach }, Memory::Slice(&mut []))
        }),
    ];
    // The free bytes and buffers of the provider, the handles and dma-bufs of the buffer, and this process's descriptors.
    let state = || -> Result<_> {
        let buffer = buffer(fd, own.handle).map_err(errno)?;
        let descriptors = fs::read_dir("/proc/self/fd")?.count();
        Ok((bed.settled()?, buffer.handles, buffer.exports, descriptors))
    };
    let before = state()?;
    for (name, call) in calls {
        expect(name, sys::from_read_only(call), libc::EFAULT)?;
        let after = state()?;
        ensure!(after == before, "{name}: {after:?}, before {before:?}");
        none_attached()?;
    }
    Ok(())
}

fn mappings(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let a = alloc(fd, 16384).map_err(errno)?;
    let both = libc::PROT_READ | libc::PROT_WRITE;
    expect(
        "private mapping",
        Mapping::new(fd, a.mmap_offset, 4096, both, libc::MAP_PRIVATE),
        libc::EINVAL,
    )?;
    expect(
        "private mapping at offset 0",
        Mapping::new(fd, 0, 4096, both, libc::MAP_PRIVATE),
        libc::EINVAL,
    )?;
    expect(
        "mapping longer than the buffer",
        Mapping::shared(fd, a.mmap_offset, 20480),
        libc::EINVAL,
    )?;
    expect(
        "mapping past the end of the buffer",
        Mapping::shared(fd, a.mmap_offset + 12288, 8192),
        libc::EINVAL,
    )?;
    expect(
        "mapping after the buffer",
        Mapping::shared(fd, a.mmap_offset + 16384, 4096),
        libc::EINVAL,
    )?;
    expect(
        "mapping before the buffer",
        Mapping::shared(fd, a.mmap_offset - 4096, 4096),
        libc::EINVAL,
    )?;
    expect("unknown offset", Mapping::shared(fd, 1 << 46, 4096), libc::EINVAL)?;
    let answer = Mapping::shared(fd, i64::MAX as u64 & !4095, 4096);
    ensure!(
        matches!(answer, Err(libc::EINVAL | libc::EOVERFLOW)),
        "the highest offset: {answer:?}"
    );
    let more = bed.provider("accel0")?.size as usize + 4096;
    let answer = Mapping::shared(fd, 0, more);
    ensure!(
        matches!(answer, Err(libc::ENOSPC | libc::ENODEV)),
        "mapping at offset 0, larger than the provider: {answer:?}"
    );
    let state = buffer(fd, a.handle).map_err(errno)?;
    ensure!(state.mappings == 0, "a rejected mapping was counted: {state:?}");
    Ok(())
}

fn full(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let before = bed.settled()?;
    // Halve the size, down to a page, whenever an allocation fails, until nothing is free.
    let mut handles = Vec::new();
    let mut size = bed.provider("accel0")?.size.next_power_of_two();
    while size >= 4096 {
        match alloc(fd, size) {
            Ok(a) => handles.push(a.handle),
            Err(libc::ENOSPC | libc::ENODEV) => size /= 2,
            Err(code) => return Err(errno(code)).with_context(|| format!("{size} bytes")),
        }
    }
    let now = bed.provider("accel0")?;
    ensure!(
        now.free == 0 && now.largest == 0 && now.buffers as usize == handles.len(),
        "{now:?}"
    );
    expect("ALLOC of a page from a full provider", alloc(fd, 4096), libc::ENOSPC)?;
    expect(
        "mapping at offset 0 with a full provider",
        Mapping::shared(fd, 0, 4096),
        libc::ENOSPC,
    )?;
    for handle in handles {
        free(fd, handle).map_err(errno)?;
    }
    ensure!(
        bed.settled()? == before,
        "after freeing all buffers, the free bytes or buffers differ from before"
    );
    let whole = bed.provider("accel0")?;
    ensure!(
        alloc(fd, whole.largest).is_ok(),
        "ALLOC of the largest free piece failed: {whole:?}"
    );
    Ok(())
}

fn configfs(bed: &mut Bed) -> Result<()> {
    for name in ["nonsense", "0000:zz:00.0", "0000:ee:1f.7", "1234567:00:00.0"] {
        let made = fs::create_dir(Path::new(PROVIDERS).join(name));
        ensure!(made.is_err(), "mkdir {name} succeeded");
    }
    let dir = bed.provider_dir("accel0")?;
    let refused = |attribute: &str, value: &str, code: i32| -> Result<()> {
        let answer = fs::write(dir.join(attribute), value).map_err(|e| e.raw_os_error().unwrap_or(0));
        expect(&format!("{attribute} = {value:?}"), answer, code)?;
        let status = read(&dir.join("status"))?;
        ensure!(!status.is_empty(), "no status after {attribute} = {value:?}");
        Ok(())
    };
    for attribute in ["bar", "offset", "size", "mode", "kernel_reserve"] {
        let value = read(&dir.join(attribute))?;
        refused(attribute, &value, libc::EBUSY).context("while published")?;
    }
    refused("enable", "2", libc::EINVAL)?;
    refused("enable", "\n", libc::EINVAL)?;
    fs::write(dir.join("enable"), "0")?;
    for (attribute, value) in [
        ("bar", "6"),
        ("bar", "-1"),
        ("bar", "x"),
        ("offset", "1"),
        ("offset", "99999999999999999999"),
        ("size", "4097"),
        ("size", "0x"),
        ("mode", "none"),
        ("kernel_reserve", "7"),
        ("enable", "yes"),
    ] {
        refused(attribute, value, libc::EINVAL)?;
    }
    // Valid numbers that describe no memory of the device.
    for (attribute, value, good) in [
        ("bar", "1", "auto"),
        ("size", "0x10000000000", "0"),
        ("offset", "0x10000000000", "0"),
    ] {
        fs::write(dir.join(attribute), value)?;
        ensure!(
            fs::write(dir.join("enable"), "1").is_err(),
            "enabled with {attribute} {value}"
        );
        ensure!(read(&dir.join("enable"))? == "0");
        fs::write(dir.join(attribute), good)?;
    }
    fs::write(dir.join("enable"), "1").with_context(|| read(&dir.join("status")).unwrap_or_default())
}
