// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of copies from and to memory that is gone.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use crate::sys::{memory_file, Region};

/// A mapping of two pages, of which the second has no memory, and its file.
fn half() -> (File, Region) {
    let file = memory_file(c"guard", 8192).unwrap();
    let region = Region::map(&file, 0, 8192).unwrap();
    file.set_len(4096).unwrap();
    (file, region)
}

#[test]
fn memory_that_is_gone_is_an_error_in_each_width() {
    let (file, region) = half();
    region.try_write(4090, &[1, 2, 3, 4, 5, 6]).unwrap();
    for (offset, len) in [
        (4096, 8),
        (4100, 4),
        (4102, 2),
        (4097, 1),
        (4088, 9),
        (0, 8192),
        (8191, 1),
    ] {
        let mut out = vec![0; len];
        let errno = |result: std::io::Result<()>| result.unwrap_err().raw_os_error();
        assert_eq!(errno(region.try_read(offset, &mut out)), Some(libc::EFAULT), "{offset}");
        assert_eq!(errno(region.try_write(offset, &out)), Some(libc::EFAULT), "{offset}");
        assert_eq!(errno(region.try_fill(offset, len, 7)), Some(libc::EFAULT), "{offset}");
    }
    // The page before is unharmed where it was not written, and memory that comes back can be used.
    file.set_len(8192).unwrap();
    region.try_fill(4095, 3, 9).unwrap();
    let mut out = [0; 5];
    region.try_read(4094, &mut out).unwrap();
    assert_eq!(out[1..], [9, 9, 9, 0]);
}

#[test]
fn copies_are_those_of_the_other_functions() {
    let region = Region::map(&memory_file(c"guard", 4096).unwrap(), 0, 4096).unwrap();
    let data: Vec<u8> = (0..100).collect();
    for offset in 0..9 {
        for len in [0, 1, 2, 3, 7, 8, 15, 16, 33, 100] {
            region.fill(0, 4096, 0xff);
            region.try_write(offset, &data[..len]).unwrap();
            let (mut whole, mut part) = (vec![0; 120], vec![0; len]);
            region.read(0, &mut whole);
            region.try_read(offset, &mut part).unwrap();
            assert_eq!(whole[offset..offset + len], data[..len]);
            assert_eq!(part, data[..len]);
            assert!(whole[..offset].iter().chain(&whole[offset + len..]).all(|b| *b == 0xff));
            region.try_fill(offset, len, 0x11).unwrap();
            region.read(0, &mut whole);
            assert!(whole[offset..offset + len].iter().all(|b| *b == 0x11));
            assert!(whole[..offset].iter().chain(&whole[offset + len..]).all(|b| *b == 0xff));
        }
    }
}

#[test]
fn threads_fault_at_the_same_time() {
    let (_file, region) = half();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..500 {
                    assert!(region.try_read(4000, &mut [0; 200]).is_err());
                }
            });
        }
    });
}

/// The environment variable that names the action of a child process after a guarded access.
const PART: &str = "P2PMEM_GUARD_PART";

/// Runs in a child process: a SIGBUS that is not the guard's.
#[test]
fn part() {
    let Ok(part) = std::env::var(PART) else { return };
    let (_file, region) = half();
    assert!(region.try_read(4096, &mut [0; 8]).is_err());
    match part.as_str() {
        "fault" => region.read(4096, &mut [0; 8]),
        // The first one goes to the handler of Rust's runtime, which makes the default action that of the second one.
        "sent" => (0..2).for_each(|_| {
            // SAFETY: sends a signal to this thread.
            assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
        }),
        other => panic!("{other}"),
    }
    panic!("the signal did not end the process");
}

#[test]
fn a_signal_of_another_origin_ends_the_program() {
    for what in ["fault", "sent"] {
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sys::guard::tests::part", "--nocapture"])
            .env(PART, what)
            .output()
            .unwrap();
        assert_eq!(out.status.signal(), Some(libc::SIGBUS), "{what}: {out:?}");
    }
}
