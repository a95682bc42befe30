// SPDX-License-Identifier: MIT OR Apache-2.0

use super::*;

/// Copies memory as a NIC does, with or without a fault.
struct Copy<'a> {
    mapping: &'a Mapping,
    write: Fault,
    read: Fault,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The source or the target address is wrong.
    WrongAddress,
    LastWord,
}

impl Copy<'_> {
    fn copy(&self, from: usize, to: usize, len: usize, fault: Fault) -> p2pmem::Result<()> {
        let mut words = vec![0u64; len / 8];
        self.mapping.copy_to_slice(from, &mut words)?;
        match fault {
            Fault::None => {}
            Fault::WrongAddress => return Ok(()),
            Fault::LastWord => *words.last_mut().unwrap() ^= 1,
        }
        self.mapping.copy_from_slice(to, &words)
    }
}

impl RdmaAccess for Copy<'_> {
    fn write(&mut self, from: Range<usize>, to: usize) -> p2pmem::Result<()> {
        self.copy(from.start, to, from.len(), self.write)
    }

    fn read(&mut self, into: Range<usize>, from: usize) -> p2pmem::Result<()> {
        self.copy(from, into.start, into.len(), self.read)
    }
}

#[test]
fn dma_to_a_wrong_address_is_found() {
    let device = p2pmem::fake::Fake::example().device();
    let mapping = device.alloc(&Request::new(36 << 12)).unwrap().map().unwrap();
    let half = mapping.len() / 2;
    for (write, read, wrong, first) in [
        (Fault::None, Fault::None, 0, None),
        (Fault::WrongAddress, Fault::None, half / 8, Some(half)),
        (Fault::None, Fault::WrongAddress, half / 8, Some(0)),
        (Fault::LastWord, Fault::None, 2, Some(half + STEP - 8)),
        (Fault::None, Fault::LastWord, 2, Some(STEP - 8)),
    ] {
        let mut copy = Copy {
            mapping: &mapping,
            write,
            read,
        };
        let report = transfer(&mapping, &mut copy);
        assert_eq!(report.wrong_words, wrong as u64);
        assert_eq!(report.first_wrong, first.map(|at| at as u64));
        assert_eq!((report.bytes, report.ok()), (2 * half as u64, wrong == 0));
        assert_eq!(
            render_transfer("mlx5_0", &report).contains("WRONG: mlx5_0 does not"),
            wrong > 0
        );
    }
}

#[test]
fn a_wrong_word_is_found() {
    let device = p2pmem::fake::Fake::example().device();
    let mapping = device.alloc(&Request::new(3 * 4096)).unwrap().map().unwrap();
    let bar = indicatif::ProgressBar::hidden();
    for (name, pattern) in PATTERNS {
        assert_eq!(test(&mapping, name, pattern, &bar).unwrap().wrong_words, 0, "{name}");
    }
    // A pattern that changes between write and read has the effect of memory that loses data.
    thread_local!(static CALLS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });
    let bad: Pattern = |i| {
        let calls = CALLS.get();
        CALLS.set(calls + 1);
        if calls == 1536 + 100 {
            1
        } else {
            i & !1
        }
    };
    let report = test(&mapping, "bad", bad, &bar).unwrap();
    assert_eq!((report.wrong_words, report.first_wrong), (1, Some(800)));
    let report = Report {
        provider: 1,
        addr: "03:00.0".parse().unwrap(),
        bytes: 12288,
        ok: false,
        patterns: vec![PatternReport {
            write_mb_per_s: 10.0,
            read_mb_per_s: 1.0,
            ..report
        }],
        registration: None,
    };
    let text = render_report(&report);
    let text = anstream::adapter::strip_str(&text).to_string();
    let row = text.lines().find(|line| line.starts_with("bad ")).unwrap();
    let cells: Vec<_> = row.split_whitespace().collect();
    assert_eq!(cells[3..], ["WRONG", "1", "0x320"], "{text}");
    assert!(text.ends_with("provider 1 (0000:03:00.0): 12 KiB FAILED\n"), "{text}");
}

#[test]
fn a_registration_reports_its_method_or_its_error() {
    let buffer = p2pmem::fake::Fake::example()
        .device()
        .alloc(&Request::new(4096))
        .unwrap();
    let nic = p2pmem::fake::FakeNic::new("mlx5_0");
    let text = || {
        render_report(&Report {
            provider: 1,
            addr: "03:00.0".parse().unwrap(),
            bytes: 4096,
            ok: true,
            patterns: Vec::new(),
            registration: Some(register(&buffer, &nic.pd(), |_| Ok(TransferReport::default()))),
        })
    };
    assert!(text().contains("registered with mlx5_0 by dma-buf in "), "{}", text());
    nic.fail_next(95);
    let text = text();
    assert!(
        text.contains("with mlx5_0 by dma-buf failed: Operation not supported"),
        "{text}"
    );
    assert!(text.contains("-> the NIC's driver cannot register dma-bufs"), "{text}");
    assert_eq!(nic.regions(), 0);
}
