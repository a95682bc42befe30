// SPDX-License-Identifier: MIT OR Apache-2.0

//! The summary of `run`: what the command took.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use p2pmem::{human_size, Client, PathClass, PciAddr, Provider};
use p2pmem_near::{Refused, Registered, Snapshot, Total, SIZE};
use rustix::fs::{fcntl_add_seals, memfd_create, MemfdFlags, SealFlags};
use serde::Serialize;
use signal_hook::consts::SIGBUS;

/// The file of the counters. The programs of the command open it by its path in /proc, so that they inherit no
/// descriptor.
pub(super) struct Counters(File);

impl Counters {
    pub(super) fn new() -> io::Result<Self> {
        let file: File = memfd_create("p2pmem-run", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into();
        file.write_all_at(&Snapshot::zero().to_bytes(), 0)?;
        // The programs map the file.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self(file))
    }

    /// Returns the path by which other processes of this user open the file, as long as this process lives.
    pub(super) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    pub(super) fn read(&self) -> io::Result<Snapshot> {
        let mut bytes = [0; SIZE];
        self.0.read_exact_at(&mut bytes, 0)?;
        Snapshot::from_bytes(&bytes).ok_or_else(|| io::Error::other("a program has overwritten the counters"))
    }
}

/// The providers before the command, and after its end.
pub(super) struct Providers {
    pub(super) before: Vec<Provider>,
    /// `None` if the providers cannot be listed any more.
    pub(super) now: Option<Vec<Provider>>,
}

impl Providers {
    fn addr(&self, id: u32) -> Option<PciAddr> {
        let mut all = self.before.iter().chain(self.now.iter().flatten());
        all.find(|provider| provider.id == id).map(|provider| provider.addr)
    }

    /// Returns whether a provider was removed while the command ran.
    fn was_removed(&self, id: u32) -> bool {
        let is_there = |now: &Vec<Provider>| now.iter().any(|provider| provider.id == id);
        self.now.as_ref().is_some_and(|now| !is_there(now))
    }
}

/// Buffers in one provider with one path class.
#[derive(Debug, Serialize)]
struct Buffers {
    provider: u32,
    /// `None` if the provider was added and removed while the command ran.
    addr: Option<PciAddr>,
    class: Option<PathClass>,
    #[serde(flatten)]
    total: Numbers,
}

/// Number and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Numbers {
    count: u64,
    bytes: u64,
}

impl From<Total> for Numbers {
    fn from(total: Total) -> Self {
        let Total { count, bytes } = total;
        Self { count, bytes }
    }
}

#[derive(Debug, Serialize)]
struct Registrations {
    dmabuf: Numbers,
    other_memory: Numbers,
}

#[derive(Debug, Serialize)]
struct Refusals {
    mappings: u64,
    registrations: u64,
}

/// What the command took.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    command: String,
    exit_code: Option<i32>,
    signal: Option<i32>,
    near: Vec<Client>,
    /// Number of programs that have loaded the shim: the command and programs that it executed.
    programs: u64,
    buffers: Vec<Buffers>,
    /// Ids of the providers in `buffers` that were removed while the command ran.
    removed_providers: Vec<u32>,
    /// Buffers beyond the size of the counters' table.
    #[serde(skip_serializing_if = "Option::is_none")]
    other_buffers: Option<Numbers>,
    registrations: Registrations,
    refused: Refusals,
}

impl Summary {
    pub(super) fn new(
        counters: &Snapshot,
        command: &OsStr,
        near: Vec<Client>,
        providers: &Providers,
        status: ExitStatus,
    ) -> Self {
        let buffers = counters.buffers().map(|buffers| Buffers {
            provider: buffers.provider,
            addr: providers.addr(buffers.provider),
            class: PathClass::from_raw(buffers.class),
            total: buffers.total.into(),
        });
        let buffers: Vec<_> = buffers.collect();
        let used: BTreeSet<_> = buffers.iter().map(|buffers| buffers.provider).collect();
        let removed = used.into_iter().filter(|id| providers.was_removed(*id));
        let other = counters.other_buffers();
        Self {
            command: super::text(command),
            exit_code: status.code(),
            signal: status.signal(),
            near,
            programs: counters.programs(),
            removed_providers: removed.collect(),
            buffers,
            other_buffers: (other.count > 0).then(|| other.into()),
            registrations: Registrations {
                dmabuf: counters.registrations(Registered::Dmabuf).into(),
                other_memory: counters.registrations(Registered::OtherMemory).into(),
            },
            refused: Refusals {
                mappings: counters.refused(Refused::Mapping),
                registrations: counters.refused(Refused::Registration),
            },
        }
    }

    /// Returns the summary for people: one line, or more lines of which the first has no indentation.
    pub(super) fn text(&self) -> String {
        let command = &self.command;
        let near = super::names(&self.near);
        if self.programs == 0 {
            return format!(
                "p2pmemctl: {command} did not load the preload shim, so none of its memory was placed near {near}"
            );
        }
        let all = self
            .buffers
            .iter()
            .map(|buffers| buffers.total)
            .chain(self.other_buffers);
        let all = all.fold((0u64, 0u64), |(count, bytes), more| {
            (count.saturating_add(more.count), bytes.saturating_add(more.bytes))
        });
        let mut lines = vec![match all {
            (0, _) if self.refused.mappings > 0 => format!("p2pmemctl: {command} got no p2pmem memory near {near}:"),
            (0, _) => format!(
                "p2pmemctl: {command} took no p2pmem memory: a program has to map /dev/p2pmem for its buffers, such as \
                 fio with --mem=mmapshared:/dev/p2pmem"
            ),
            (count, bytes) => format!(
                "p2pmemctl: {command} took {} of p2pmem memory near {near} in {}:",
                human_size(bytes),
                number(count, "buffer")
            ),
        }];
        lines.extend(self.buffers.iter().map(Buffers::line));
        if let Some(other) = self.other_buffers {
            lines.push(format!(
                "{} in {} of other providers",
                human_size(other.bytes),
                number(other.count, "buffer")
            ));
        }
        let registered = |what: &str, total: Numbers| {
            let (bytes, count) = (human_size(total.bytes), number(total.count, "registration"));
            (total.count > 0).then(|| format!("{bytes} {what} in {count}"))
        };
        lines.extend(registered(
            "registered with NICs as dma-bufs",
            self.registrations.dmabuf,
        ));
        lines.extend(registered(
            "of other memory registered with NICs",
            self.registrations.other_memory,
        ));
        let Refusals {
            mappings,
            registrations,
        } = self.refused;
        lines.extend(self.removal());
        if mappings > 0 || registrations > 0 {
            let (mappings, registrations) = (number(mappings, "mapping"), number(registrations, "registration"));
            lines.push(format!("refused: {mappings}, {registrations}"));
        }
        lines.join("\n  ")
    }
}

impl Summary {
    /// Returns a line about providers that were removed while the command ran. An access to their memory raises SIGBUS.
    fn removal(&self) -> Option<String> {
        let names = self.removed_providers.iter().map(|id| {
            let buffers = self.buffers.iter().find(|buffers| buffers.provider == *id);
            match buffers.and_then(|buffers| buffers.addr) {
                Some(addr) => format!("{id} ({addr})"),
                None => id.to_string(),
            }
        });
        let names: Vec<_> = names.collect();
        let removed = match names.as_slice() {
            [] => return None,
            [name] => format!("provider {name} was removed"),
            names => format!("providers {} were removed", names.join(", ")),
        };
        Some(match self.signal {
            Some(SIGBUS) => format!("SIGBUS ended {}: {removed}", self.command),
            _ => removed,
        })
    }
}

impl Buffers {
    fn line(&self) -> String {
        let Numbers { count, bytes } = self.total;
        let mut line = format!(
            "{} in {} of provider {}",
            human_size(bytes),
            number(count, "buffer"),
            self.provider
        );
        if let Some(addr) = self.addr {
            line += &format!(" ({addr})");
        }
        if let Some(class) = self.class {
            line += &format!(", farthest path: {class} ({})", class.meaning());
        }
        line
    }
}

/// Returns a number of things, such as `1 buffer` or `2 buffers`.
fn number(count: u64, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem::fake::Fake;
    use p2pmem_near::WORDS;
    use std::sync::atomic::AtomicU64;

    /// Returns the summary after `count` of a command with this status of `wait()`.
    fn summary_of(status: i32, count: impl FnOnce(&p2pmem_near::Counters<'_>)) -> Summary {
        let bytes = Snapshot::zero().to_bytes();
        let words: [AtomicU64; WORDS] = std::array::from_fn(|at| {
            let word = bytes[at * 8..][..8].try_into().unwrap();
            AtomicU64::new(u64::from_ne_bytes(word))
        });
        count(&p2pmem_near::Counters::new(&words).unwrap());
        let mut bytes = [0; SIZE];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(&words) {
            bytes.copy_from_slice(&word.load(std::sync::atomic::Ordering::Relaxed).to_ne_bytes());
        }
        let counters = Snapshot::from_bytes(&bytes).unwrap();
        let near = vec![Client::new("0000:04:00.0".parse().unwrap())];
        let before = Fake::example().device().providers().unwrap();
        // Provider 9 was added and removed while the command ran.
        let now = Some(before.iter().filter(|provider| provider.id != 2).cloned().collect());
        let providers = Providers { before, now };
        Summary::new(
            &counters,
            OsStr::new("fio"),
            near,
            &providers,
            ExitStatus::from_raw(status),
        )
    }

    fn summary(count: impl FnOnce(&p2pmem_near::Counters<'_>)) -> Summary {
        summary_of(0, count)
    }

    #[test]
    fn removed_providers_are_named() {
        let of_two = |counters: &p2pmem_near::Counters<'_>| {
            counters.program();
            counters.buffer(1, 2, 4096);
            counters.buffer(2, 2, 4096);
            counters.buffer(2, 6, 4096);
        };
        let lines = |summary: &Summary| -> Vec<_> {
            let text = summary.text();
            text.lines().map(str::trim).map(str::to_owned).collect()
        };
        // SIGBUS, and an exit code.
        let ended = summary_of(7, of_two);
        assert_eq!(
            lines(&ended).last().unwrap(),
            "SIGBUS ended fio: provider 2 (0000:08:00.0) was removed"
        );
        assert_eq!((ended.removed_providers.as_slice(), ended.signal), (&[2][..], Some(7)));
        assert_eq!(
            lines(&summary(of_two)).last().unwrap(),
            "provider 2 (0000:08:00.0) was removed"
        );
        let others = summary_of(7, |counters| {
            counters.program();
            counters.buffer(1, 2, 4096);
        });
        assert!(!others.text().contains("removed"), "{}", others.text());
        let both = summary(|counters| {
            counters.program();
            counters.buffer(2, 2, 4096);
            counters.buffer(9, 2, 4096);
        });
        assert_eq!(
            lines(&both).last().unwrap(),
            "providers 2 (0000:08:00.0), 9 were removed"
        );
        let unknown = Providers {
            before: Vec::new(),
            now: None,
        };
        assert!(
            !unknown.was_removed(1),
            "without a list of providers, none is known to be removed"
        );
    }

    #[test]
    fn the_text_has_all_that_was_counted() {
        let summary = summary(|counters| {
            counters.program();
            counters.buffer(1, 2, 1 << 20);
            counters.buffer(1, 2, 1 << 20);
            counters.buffer(9, 6, 4096);
            counters.registration(Registered::Dmabuf, 1 << 20);
            counters.registration(Registered::OtherMemory, 64);
            counters.registration(Registered::OtherMemory, 64);
            counters.refused(Refused::Mapping);
        });
        assert_eq!(
            summary.text(),
            "p2pmemctl: fio took 2.0 MiB of p2pmem memory near 0000:04:00.0 in 3 buffers:\n  \
             2 MiB in 2 buffers of provider 1 (0000:03:00.0), farthest path: SW (one PCIe switch: traffic stays in it)\n  \
             4 KiB in 1 buffer of provider 9, farthest path: SYS (two host bridges of two NUMA nodes)\n  \
             1 MiB registered with NICs as dma-bufs in 1 registration\n  \
             128 bytes of other memory registered with NICs in 2 registrations\n  \
             provider 9 was removed\n  \
             refused: 1 mapping, 0 registrations"
        );
    }

    #[test]
    fn a_command_without_memory_gets_a_hint() {
        let without = summary(|counters| counters.program()).text();
        assert!(
            without.starts_with("p2pmemctl: fio took no p2pmem memory: "),
            "{without}"
        );
        let refused = summary(|counters| {
            counters.program();
            counters.refused(Refused::Mapping);
        });
        assert_eq!(
            refused.text(),
            "p2pmemctl: fio got no p2pmem memory near 0000:04:00.0:\n  refused: 1 mapping, 0 registrations"
        );
        let without_shim = summary(|_| ()).text();
        assert!(
            without_shim.contains("fio did not load the preload shim"),
            "{without_shim}"
        );
    }

    #[test]
    fn counters_are_shared_by_their_path() {
        let counters = Counters::new().unwrap();
        let file = File::options().read(true).write(true).open(counters.path()).unwrap();
        assert!(
            file.set_len(0).is_err() && file.set_len(1 << 20).is_err(),
            "the size is sealed"
        );
        file.write_all_at(&7u64.to_ne_bytes(), 8).unwrap();
        assert_eq!(counters.read().unwrap().programs(), 7);
        file.write_all_at(&[0; 8], 0).unwrap();
        assert!(counters.read().is_err());
    }
}
