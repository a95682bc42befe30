// SPDX-License-Identifier: MIT OR Apache-2.0

//! Decisions and memory of the fake module.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Weak;

use p2pmem_sys as abi;

use super::machine::{lock, Decision, OpenFile, State, PAGE, SPACING};
use crate::addr::PciAddr;
use crate::types::{human_size, PathClass};

impl State {
    pub(super) fn notify_all(&mut self, event: &abi::p2pmem_event) {
        self.generation += 1;
        self.files.retain(|f| f.strong_count() > 0);
        for file in self.files.iter().filter_map(Weak::upgrade) {
            lock(&file).queue(event);
        }
    }

    /// A revoked attachment of a provider is closed: its function stopped using the memory.
    pub(super) fn confirm(&mut self, provider: u32) {
        if let Some(revoked) = self.stopped.get_mut(&provider) {
            *revoked -= 1;
            if *revoked == 0 {
                self.stopped.remove(&provider);
            }
        }
    }

    pub(super) fn path(&self, provider: abi::p2pmem_pci_addr, client: abi::p2pmem_pci_addr) -> (PathClass, u32) {
        let key = (provider.into(), client.into());
        self.paths.get(&key).copied().unwrap_or((PathClass::HostBridge, 6))
    }

    /// Chooses a provider. Of the file's own rules, only those that deny a provider are known, for any client.
    pub(super) fn decide(
        &self,
        request: &abi::p2pmem_request,
        clients: &[abi::p2pmem_pci_addr],
        own: &[abi::p2pmem_rule],
    ) -> Decision {
        let size = request.size.next_multiple_of(PAGE);
        let prefer = request.flags & abi::P2PMEM_ALLOC_PREFER != 0;
        let mut verdicts: Vec<abi::p2pmem_verdict> = Vec::new();
        for (id, provider) in &self.providers {
            let now = provider.snapshot();
            let paths: Vec<_> = clients.iter().map(|c| self.path(now.addr, *c)).collect();
            let worst = paths
                .iter()
                .enumerate()
                .max_by_key(|(i, (class, _))| (*class, std::cmp::Reverse(*i)));
            let class = worst.map_or(0, |(_, (class, _))| class.to_raw());
            let deny = own.iter().find(|rule| {
                let here = rule.flags & abi::P2PMEM_RULE_PROVIDER == 0 || rule.provider == now.addr;
                here && rule.action == abi::P2PMEM_RULE_DENY
            });
            let code = if request.provider != 0 && request.provider != *id && !prefer {
                abi::P2PMEM_VERDICT_NOT_NAMED
            } else if class == abi::P2PMEM_PATH_UNREACHABLE {
                abi::P2PMEM_VERDICT_UNREACHABLE
            } else if deny.is_some() {
                abi::P2PMEM_VERDICT_DENIED
            } else if request.max_class != 0 && class > request.max_class {
                abi::P2PMEM_VERDICT_TOO_FAR
            } else if now.size < size {
                abi::P2PMEM_VERDICT_TOO_SMALL
            } else if now.free < size {
                abi::P2PMEM_VERDICT_FULL
            } else if provider.place(size, request.align.max(PAGE)).is_none() {
                abi::P2PMEM_VERDICT_FRAGMENTED
            } else {
                0 // a candidate
            };
            verdicts.push(abi::p2pmem_verdict {
                provider: *id,
                code,
                addr: now.addr,
                worst_client: worst.map_or(0, |(i, _)| i as u32),
                class,
                hops: paths.iter().map(|p| p.1).sum(),
                size: now.size,
                free: now.free,
                largest: now.largest,
                rule_set: deny.map_or(abi::P2PMEM_RULES_NONE, |_| abi::P2PMEM_RULES_FILE),
                rule: deny.map_or_else(Default::default, |rule| rule.name),
                ..Default::default()
            });
        }
        let denied = verdicts.iter().any(|v| v.code == abi::P2PMEM_VERDICT_DENIED);
        let candidates = verdicts.iter().filter(|v| v.code == 0);
        let named = |v: &&abi::p2pmem_verdict| prefer && v.provider == request.provider;
        let best = candidates
            .min_by_key(|v| (!named(v), v.class, v.hops, v.provider))
            .copied();
        for verdict in verdicts.iter_mut().filter(|v| v.code == 0) {
            verdict.code = match &best {
                Some(best) if best.provider == verdict.provider => abi::P2PMEM_VERDICT_CHOSEN,
                Some(best) if named(&best) => abi::P2PMEM_VERDICT_NOT_NAMED,
                Some(best) if best.class < verdict.class => abi::P2PMEM_VERDICT_CLASS,
                Some(best) if best.hops < verdict.hops => abi::P2PMEM_VERDICT_HOPS,
                _ => abi::P2PMEM_VERDICT_ORDER,
            };
        }
        let full = verdicts
            .iter()
            .any(|v| [abi::P2PMEM_VERDICT_FULL, abi::P2PMEM_VERDICT_FRAGMENTED].contains(&v.code));
        let (error, text) = match &best {
            Some(best) => (0, format!("{} was chosen", PciAddr::from(best.addr))),
            None if full => (libc::ENOSPC, format!("no provider has {} free", human_size(size))),
            None if denied => (libc::EACCES, "the file's own rules deny all eligible providers".into()),
            None => (libc::ENODEV, format!("no provider can ever serve {}", human_size(size))),
        };
        Decision {
            verdicts,
            text,
            error,
            chosen: best.map_or(0, |b| b.provider),
        }
    }

    /// Chooses providers for a stripe of at most `most_parts` parts. Returns the decision, the providers in the order
    /// of the parts, and the size in bytes of each part but the last.
    pub(super) fn decide_stripe(
        &self,
        request: &abi::p2pmem_request,
        clients: &[abi::p2pmem_pci_addr],
        own: &[abi::p2pmem_rule],
        most_parts: usize,
    ) -> (Decision, Vec<u32>, u64) {
        let size = request.size.next_multiple_of(PAGE);
        let least = (request.parts as usize).max(1);
        let most = if request.parts > 0 {
            least
        } else {
            most_parts.min(self.providers.len()).max(1)
        };
        let mut failed = (Decision::default(), Vec::new(), 0);
        for parts in (least..=most).rev() {
            let share = size.div_ceil(parts as u64).next_multiple_of(PAGE);
            if share * (parts as u64 - 1) >= size {
                continue;
            }
            let request = abi::p2pmem_request {
                size: share,
                ..*request
            };
            let mut decision = self.decide(&request, clients, own);
            let can = [
                abi::P2PMEM_VERDICT_CHOSEN,
                abi::P2PMEM_VERDICT_CLASS,
                abi::P2PMEM_VERDICT_HOPS,
                abi::P2PMEM_VERDICT_ORDER,
            ];
            let able = decision.verdicts.iter().filter(|v| can.contains(&v.code));
            let mut picks: Vec<_> = able.map(|v| (v.class, v.hops, v.provider)).collect();
            picks.sort_unstable();
            let enough = picks.len() >= parts;
            picks.truncate(parts);
            for verdict in &mut decision.verdicts {
                let picked = picks.iter().any(|pick| pick.2 == verdict.provider);
                verdict.code = match (picked, enough) {
                    (true, true) => abi::P2PMEM_VERDICT_CHOSEN,
                    (true, false) => abi::P2PMEM_VERDICT_TOO_FEW,
                    (false, _) => verdict.code,
                };
            }
            if enough {
                decision.text = format!("{parts} of {} providers were chosen", self.providers.len());
                return (decision, picks.into_iter().map(|pick| pick.2).collect(), share);
            }
            if decision.error == 0 {
                (decision.error, decision.chosen) = (libc::ENODEV, 0);
                decision.text = format!("a stripe needs {parts} parts, and {} find a provider", picks.len());
            }
            failed = (decision, Vec::new(), share);
        }
        failed
    }

    /// Allocates a buffer of a provider, for a file.
    pub(super) fn take(&mut self, file: &mut OpenFile, id: u32, size: u64, align: u64) -> Option<abi::p2pmem_buffer> {
        let provider = self.providers.get_mut(&id)?;
        let offset = provider.place(size, align.max(PAGE))?;
        provider.used.insert(offset, size);
        provider.stats.allocs += 1;
        provider.stats.alloc_bytes += size;
        file.last_handle += 1;
        let handle = file.last_handle;
        let buffer = abi::p2pmem_buffer {
            handle,
            provider: id,
            size,
            mmap_offset: u64::from(id) * SPACING + offset,
            bar_offset: if provider.raw.bar < 0 { u64::MAX } else { offset },
            state: abi::P2PMEM_BUFFER_LIVE,
            ..Default::default()
        };
        file.buffers.insert(handle, buffer);
        Some(buffer)
    }

    /// Returns (start, length) of ranges in the file that has all memory, for ranges of addresses if `mapped`; else the
    /// ranges themselves.
    pub(super) fn offsets(&self, ranges: &[abi::p2pmem_range], mapped: bool) -> Result<Vec<(u64, u64)>, String> {
        let offset = |range: &abi::p2pmem_range| {
            // The newest mapping, because a removed one can have had the same address.
            let map = self
                .maps
                .iter()
                .rev()
                .find(|m| (m.0..m.0 + m.1).contains(&range.offset));
            match map {
                _ if !mapped => Ok((range.offset, range.size)),
                Some((start, _, offset)) => Ok((offset + (range.offset - start), range.size)),
                None => Err(format!("no buffer is mapped at {:#x}", range.offset)),
            }
        };
        ranges.iter().map(offset).collect()
    }

    /// Frees the memory of a buffer after its last handle, and clears it like the module.
    pub(super) fn release(&mut self, buffer: &abi::p2pmem_buffer, memory: &File) -> io::Result<()> {
        if let Some(others) = self.imported.get_mut(&buffer.mmap_offset).filter(|n| **n > 0) {
            *others -= 1;
            return Ok(());
        }
        let Some(provider) = self.providers.get_mut(&buffer.provider) else {
            return Ok(());
        };
        provider
            .used
            .remove(&(buffer.mmap_offset - u64::from(buffer.provider) * SPACING));
        provider.stats.frees += 1;
        provider.stats.free_bytes += buffer.size;
        provider.stats.scrubbed_bytes += buffer.size;
        let zeros = vec![0; buffer.size.min(1 << 20) as usize];
        let mut done = 0;
        while done < buffer.size {
            let some = (buffer.size - done).min(zeros.len() as u64);
            memory.write_all_at(&zeros[..some as usize], buffer.mmap_offset + done)?;
            done += some;
        }
        Ok(())
    }
}
