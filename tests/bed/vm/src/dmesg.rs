// SPDX-License-Identifier: MIT OR Apache-2.0

//! The kernel log: its records, and the search for bad lines.

use std::sync::LazyLock;

use regex::RegexSet;
use serde::Serialize;

/// One record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Record {
    /// Level, 0 (emergency) to 7 (debug).
    pub level: u8,
    /// Microseconds since the boot.
    pub time_us: u64,
    /// The line, without continuation lines.
    pub text: String,
}

impl Record {
    /// Parses a record of `/dev/kmsg`. Input of another form becomes the text of a record.
    pub fn parse(bytes: &[u8]) -> Record {
        let whole = String::from_utf8_lossy(bytes);
        let first = whole.lines().next().unwrap_or("");
        if let Some((prefix, text)) = first.split_once(';') {
            let mut fields = prefix.split(',');
            let priority = fields.next().and_then(|f| f.parse::<u32>().ok());
            let time = fields.nth(1).and_then(|f| f.parse().ok());
            if let (Some(priority), Some(time_us)) = (priority, time) {
                return Record {
                    level: (priority & 7) as u8,
                    time_us,
                    text: text.to_owned(),
                };
            }
        }
        Record {
            level: 4,
            time_us: 0,
            text: first.to_owned(),
        }
    }
}

/// Patterns of bad lines: a kernel without errors does not log them.
const BAD: &[&str] = &[
    r"\bWARNING\b",
    r"\bBUG\b",
    r"\bOops\b",
    r"Kernel panic",
    r"general protection",
    r"Call Trace:",
    r"INFO: task .* blocked",
    r"INFO: rcu|rcu: INFO|\brcu.*(stall|detected)|RCU .*stall",
    r"INFO: possible|INFO: trying to register|possible (recursive|circular) locking|possible irq lock inversion",
    r"inconsistent lock state|suspicious RCU usage|held lock freed|bad unlock balance|lock held when returning",
    r"\b(KASAN|KFENCE|KCSAN|KMSAN|UBSAN)\b|(?i-u:\bkmemleak: \d+ new)",
    r"unregister_netdevice",
    r"scheduling while atomic|sleeping function called|Voluntary context switch within",
    r"soft lockup|hard LOCKUP|Watchdog detected",
    r"refcount_t:|list_(add|del) corruption|object already initialized|ODEBUG:",
    r"Unable to handle|unable to handle|double fault|stack segment:|invalid opcode:|divide error:|stack guard page",
    r"page allocation failure|Out of memory:|Bad page|bad page|Bad rss-counter|non-zero pgtables",
    r"DMA-API:",
    r"rust_kernel: panicked|panicked at",
    r"kernel log records were lost",
    r"something it started still runs",
];

/// Patterns of lines that match [`BAD`] and are no error.
const FINE: &[&str] = &[
    // The runner turns mitigations off to save emulated instructions.
    r"Unprivileged eBPF is enabled",
    r"Spectre V2 : .*mitigations? .*off",
    // Messages about the checks of DMA-API themselves, not about an error that they found.
    r"DMA-API: (preallocated \d+ debug entries|debugging enabled by kernel config)$",
];

static BAD_SET: LazyLock<RegexSet> = LazyLock::new(|| RegexSet::new(BAD).expect("the patterns are constants"));
static FINE_SET: LazyLock<RegexSet> = LazyLock::new(|| RegexSet::new(FINE).expect("the patterns are constants"));

/// Returns whether a line is bad.
pub fn is_bad(line: &str) -> bool {
    BAD_SET.is_match(line) && !FINE_SET.is_match(line)
}

/// Returns whether a line reports a kernel panic.
pub fn is_panic(line: &str) -> bool {
    line.contains("Kernel panic - not syncing")
}

/// Returns the bad lines among records, as text with the time.
pub fn findings(records: &[Record]) -> Vec<String> {
    let seconds = |us: u64| format!("[{:5}.{:06}]", us / 1_000_000, us % 1_000_000);
    records
        .iter()
        .filter(|r| is_bad(&r.text))
        .map(|r| format!("{} {}", seconds(r.time_us), r.text))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_parsed() {
        let record = Record::parse(b"30,1234,5678901,-;nvme nvme0: 2/0/0 default/read/poll queues\n SUBSYSTEM=pci\n");
        assert_eq!(record.level, 6);
        assert_eq!(record.time_us, 5_678_901);
        assert_eq!(record.text, "nvme nvme0: 2/0/0 default/read/poll queues");
        assert_eq!(Record::parse(b"4,1,2,c,caller=T1;a;b").text, "a;b");
        assert_eq!(Record::parse(b"no record").text, "no record");
        assert_eq!(Record::parse(b"").text, "");
        assert_eq!(Record::parse(b"x,y,z,-;odd").text, "x,y,z,-;odd");
    }

    #[test]
    fn kernel_faults_are_found() {
        for line in [
            "WARNING: drivers/pci/p2pdma.c:312 at pci_p2pdma_add_resource+0x1",
            "WARNING: possible circular locking dependency detected",
            "WARNING: possible recursive locking detected",
            "BUG: unable to handle page fault for address: ffff",
            "BUG: KASAN: slab-use-after-free in p2pmem_ioctl+0x1/0x2 [p2pmem]",
            "kernel BUG at mm/memory.c:1",
            "Oops: general protection fault, probably for non-canonical address",
            "Oops: 0000 [#1] SMP",
            "Kernel panic - not syncing: sysrq triggered crash",
            "INFO: task rmmod:123 blocked for more than 20 seconds.",
            "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
            "unregister_netdevice: waiting for lo to become free",
            "UBSAN: array-index-out-of-bounds in x.c:1:2",
            "refcount_t: underflow; use-after-free.",
            "rust_kernel: panicked at p2pmem.rs:10:5:",
            "BUG: sleeping function called from invalid context at a.c:1",
            "Call Trace:",
            " possible recursive locking detected",
            "kmemleak: 3 new suspected memory leaks (see /sys/kernel/debug/kmemleak)",
            "fio: page allocation failure: order:9",
            "suspicious RCU usage",
            "DMA-API: nvme 0000:03:00.0: device driver frees DMA memory with different size",
        ] {
            assert!(is_bad(line), "{line}");
        }
    }

    #[test]
    fn harmless_lines_are_no_findings() {
        for line in [
            "Linux version 7.2.12+deb13-amd64",
            "Debugging: BUGLESS",
            "rcu: Hierarchical RCU implementation.",
            "rcu: RCU calculated value of scheduler-enlistment delay is 25 jiffies.",
            "p2pmem: loading out-of-tree module taints kernel.",
            "ACPI: Enabled 3 GPEs in block 00 to 3F",
            "Spectre V2 : WARNING: Unprivileged eBPF is enabled with eIBRS on, data leaks possible",
            "kmemleak: Kernel memory leak detector initialized (mem pool available: 15679)",
            "rcu: srcu_init: Setting srcu_struct sizes based on contention.",
            "nvme nvme0: allocated 64 MiB host memory buffer",
            "DMA-API: preallocated 65536 debug entries",
            "DMA-API: debugging enabled by kernel config",
        ] {
            assert!(!is_bad(line), "{line}");
        }
    }

    #[test]
    fn findings_have_timestamps() {
        let records = [
            Record::parse(b"4,1,1500000,-;BUG: x"),
            Record::parse(b"6,2,1600000,-;fine"),
        ];
        assert_eq!(findings(&records), ["[    1.500000] BUG: x"]);
    }
}
