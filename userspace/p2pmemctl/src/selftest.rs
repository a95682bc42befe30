// SPDX-License-Identifier: MIT OR Apache-2.0

//! `selftest`: patterns written to a provider's memory through a mapping, and read back; a registration with a NIC.

use std::time::Instant;

use anyhow::bail;
use p2pmem::{human_size, Access, Buffer, Mapping, PciAddr, Pd, Request, Road};
use serde::Serialize;

use crate::cli::SelftestArgs;
use crate::table::{number, render, text};
use crate::{Context, Outcome};

/// Most that is tested unless asked for: reads from a BAR are slow.
const DEFAULT_MOST: u64 = 64 << 20;
/// Bytes handled at once.
const STEP: usize = 64 << 10;

/// A pattern: the word at index `i`.
type Pattern = fn(u64) -> u64;

/// Each finds another kind of fault: stuck bits, crossed data lines, address lines, and shortcuts through caches.
const PATTERNS: [(&str, Pattern); 5] = [
    ("zeros", |_| 0),
    ("ones", |_| u64::MAX),
    ("checkered", |i| {
        if i % 2 == 0 {
            0x5555_5555_5555_5555
        } else {
            0xaaaa_aaaa_aaaa_aaaa
        }
    }),
    ("addresses", |i| i),
    // The finaliser of SplitMix64: every bit of the index changes about half of the word's.
    ("mixed", |i| {
        let mut x = i.wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }),
];

#[derive(Serialize)]
struct Report {
    provider: u32,
    addr: PciAddr,
    bytes: u64,
    ok: bool,
    patterns: Vec<PatternReport>,
    /// None: no NIC was named.
    registration: Option<RegistrationReport>,
}

#[derive(Serialize)]
struct RegistrationReport {
    nic: String,
    /// How the NIC came to the memory; none where it could not.
    road: Option<Road>,
    microseconds: u64,
    error: Option<String>,
    remedy: Option<&'static str>,
}

#[derive(Serialize)]
struct PatternReport {
    pattern: &'static str,
    wrong_words: u64,
    /// Offset in the buffer of the first wrong word, in bytes.
    first_wrong: Option<u64>,
    write_mb_per_s: f64,
    read_mb_per_s: f64,
}

pub(crate) fn selftest(context: &mut Context<'_>, args: &SelftestArgs) -> anyhow::Result<Outcome> {
    let device = context.open()?;
    let provider = context.provider(&device, &args.provider)?;
    let size = args.size.unwrap_or(provider.largest.min(DEFAULT_MOST));
    if size == 0 {
        bail!("provider {} has nothing free to test", provider.id);
    }
    let pd = args.nic.as_deref().map(Pd::open).transpose()?;
    let buffer = device.alloc(&Request::new(size).provider(provider.id))?;
    let mapping = buffer.map()?;
    let bar = context.progress_bar("testing", 2 * PATTERNS.len() as u64 * buffer.size());
    let mut patterns = Vec::new();
    for (name, pattern) in PATTERNS {
        patterns.push(test(&mapping, name, pattern, &bar)?);
    }
    bar.finish_and_clear();
    let registration = pd.as_ref().map(|pd| register(&buffer, pd));
    let registered = registration.as_ref().is_none_or(|r| r.road.is_some());
    let ok = registered && patterns.iter().all(|p| p.wrong_words == 0);
    let report = Report {
        provider: provider.id,
        addr: provider.addr,
        bytes: buffer.size(),
        ok,
        patterns,
        registration,
    };
    buffer.free()?;
    if context.json {
        context.print_json(&report)?;
    } else {
        write!(context.out, "{}", render_report(&report))?;
    }
    Ok(Outcome::of(report.ok))
}

/// Registers a buffer with a NIC, for the other side to read and write, and ends that.
fn register(buffer: &Buffer, pd: &Pd) -> RegistrationReport {
    let start = Instant::now();
    let result = buffer.register(pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ);
    let report = RegistrationReport {
        nic: pd.nic(),
        road: None,
        microseconds: u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX),
        error: None,
        remedy: None,
    };
    match result {
        Ok(registration) => RegistrationReport {
            road: Some(registration.road()),
            ..report
        },
        Err(error) => RegistrationReport {
            error: Some(error.to_string()),
            remedy: error.remedy(),
            ..report
        },
    }
}

fn test(
    mapping: &Mapping,
    name: &'static str,
    pattern: Pattern,
    bar: &indicatif::ProgressBar,
) -> anyhow::Result<PatternReport> {
    let mut words = vec![0u64; STEP / 8];
    let expected = |at: usize, words: &mut [u64]| {
        for (i, word) in words.iter_mut().enumerate() {
            *word = pattern((at / 8 + i) as u64);
        }
    };
    // Buffers are whole pages, so the last step is whole words too.
    let steps = || {
        (0..mapping.len())
            .step_by(STEP)
            .map(|at| (at, (mapping.len() - at).min(STEP) / 8))
    };

    let start = Instant::now();
    for (at, n) in steps() {
        expected(at, &mut words[..n]);
        mapping.copy_from_slice(at, &words[..n])?;
        bar.inc(8 * n as u64);
    }
    mapping.flush();
    let write = start.elapsed();

    let start = Instant::now();
    let mut back = vec![0u64; STEP / 8];
    let (mut wrong_words, mut first_wrong) = (0, None);
    for (at, n) in steps() {
        expected(at, &mut words[..n]);
        mapping.copy_to_slice(at, &mut back[..n])?;
        for (i, _) in words[..n]
            .iter()
            .zip(&back[..n])
            .enumerate()
            .filter(|(_, (want, got))| want != got)
        {
            wrong_words += 1;
            first_wrong.get_or_insert((at + 8 * i) as u64);
        }
        bar.inc(8 * n as u64);
    }
    let speed = |time: std::time::Duration| mapping.len() as f64 / 1e6 / time.as_secs_f64().max(1e-9);
    Ok(PatternReport {
        pattern: name,
        wrong_words,
        first_wrong,
        write_mb_per_s: speed(write),
        read_mb_per_s: speed(start.elapsed()),
    })
}

fn render_report(report: &Report) -> String {
    let rows: Vec<_> = report
        .patterns
        .iter()
        .map(|p| {
            let verdict = match p.first_wrong {
                None => "ok".to_owned(),
                Some(at) => format!("WRONG: {} words, the first at byte {at:#x}", p.wrong_words),
            };
            vec![
                p.pattern.to_owned(),
                format!("{:.1}", p.write_mb_per_s),
                format!("{:.1}", p.read_mb_per_s),
                verdict,
            ]
        })
        .collect();
    let table = render(
        &[
            text("PATTERN"),
            number("WRITE MB/s"),
            number("READ MB/s"),
            text("RESULT"),
        ],
        &rows,
    );
    let verdict = if report.ok { "passed" } else { "FAILED" };
    let registration = match &report.registration {
        None => String::new(),
        Some(RegistrationReport {
            nic,
            road: Some(road),
            microseconds,
            ..
        }) => format!("registered with {nic} by {road} in {microseconds} us\n"),
        Some(r) => {
            let remedy = r.remedy.map(|remedy| format!("  -> {remedy}\n")).unwrap_or_default();
            format!("{}\n{remedy}", r.error.as_deref().unwrap_or_default())
        }
    };
    format!(
        "{table}\n{registration}provider {} ({}): {} {verdict}\n",
        report.provider,
        report.addr,
        human_size(report.bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_word_is_found() {
        let device = p2pmem::fake::Fake::example().device();
        let mapping = device.alloc(&Request::new(3 * 4096)).unwrap().map().unwrap();
        let bar = indicatif::ProgressBar::hidden();
        for (name, pattern) in PATTERNS {
            assert_eq!(test(&mapping, name, pattern, &bar).unwrap().wrong_words, 0, "{name}");
        }
        // A pattern that changes between writing and reading looks like memory that does not hold.
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
        assert!(text.contains("WRONG: 1 words, the first at byte 0x320"), "{text}");
        assert!(text.ends_with("provider 1 (0000:03:00.0): 12 KiB FAILED\n"), "{text}");
    }

    #[test]
    fn a_registration_tells_its_road_or_why_there_is_none() {
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
                registration: Some(register(&buffer, &nic.pd())),
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
}
