// SPDX-License-Identifier: MIT OR Apache-2.0

//! Translations of an mkey: from the mkey's address space to bus addresses or other mkeys.

use p2pmem_ib::Rights;

use super::STRIDE_BLOCK_OP;
use super::context::{AccessMode, Context};

/// Access flags of an MTT entry.
const MTT_READ: u64 = 1;
const MTT_WRITE: u64 = 2;
/// Bits of an MTT entry that are not part of the address.
const MTT_FLAGS: u64 = 0xff;

/// Decoded access flags of an MTT entry. A page without a flag is not present for that direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MttFlags {
    read: bool,
    write: bool,
}

impl MttFlags {
    pub(super) fn allows(self, rights: Rights) -> bool {
        match rights {
            Rights::LocalRead | Rights::RemoteRead => self.read,
            Rights::LocalWrite | Rights::RemoteWrite | Rights::RemoteAtomic => self.write,
        }
    }
}

/// Translation of an address. `run` is the number of bytes for which the translation is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Translation {
    /// A bus address.
    Bus { address: u64, run: u64, flags: MttFlags },
    /// An address of another mkey.
    Mkey { key: u32, address: u64, run: u64 },
    /// The page is not present.
    NotPresent { run: u64 },
}

/// A KLM or KSM entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KlmEntry {
    count: u32,
    key: u32,
    address: u64,
}

impl KlmEntry {
    fn read(bytes: &[u8]) -> Self {
        let word = |at: usize| {
            bytes[at..at + 8]
                .iter()
                .fold(0, |value, byte| (value << 8) | u64::from(*byte))
        };
        let (head, address) = (word(0), word(8));
        Self {
            // Truncated on purpose: the two halves.
            count: (head >> 32) as u32,
            key: head as u32,
            address,
        }
    }

    fn bytes(self) -> [u8; 16] {
        let head = (u128::from(self.count) << 32) | u128::from(self.key);
        ((head << 64) | u128::from(self.address)).to_be_bytes()
    }
}

/// The translations of an mkey, by access mode, in the order of the addresses. The lists grow with each write; entries
/// that were never written are not present.
#[derive(Debug)]
pub(super) enum Translations {
    None,
    /// MTT entries.
    Mtt(Vec<u64>),
    Ksm(Vec<KlmEntry>),
    Klm {
        entries: Vec<KlmEntry>,
        /// End of each entry's range, relative to the start of the mkey.
        ends: Vec<u64>,
    },
}

impl Translations {
    pub(super) fn new(mode: AccessMode) -> Self {
        match mode {
            AccessMode::Mtt => Self::Mtt(Vec::new()),
            AccessMode::Ksm => Self::Ksm(Vec::new()),
            AccessMode::Klm => Self::Klm {
                entries: Vec::new(),
                ends: Vec::new(),
            },
            AccessMode::Pa | AccessMode::Other => Self::None,
        }
    }

    /// Returns the size in units of 8 bytes.
    pub(super) fn words(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Mtt(pages) => pages.len() as u64,
            Self::Ksm(entries) | Self::Klm { entries, .. } => 2 * entries.len() as u64,
        }
    }

    /// Returns the size that [`Translations::words`] has after a write of `len` bytes at `octword`.
    pub(super) fn words_with(&self, octword: u64, len: usize) -> u64 {
        match self {
            Self::None => 0,
            _ if len == 0 => self.words(),
            _ => self
                .words()
                .max(octword.saturating_mul(2).saturating_add(len as u64 / 16 * 2)),
        }
    }

    /// Writes translations in the driver's format, from `octword` on. With `present`, MTT entries get both access
    /// flags. A remainder of less than 16 bytes is ignored.
    pub(super) fn write(&mut self, octword: u64, list: &[u8], present: bool) {
        // Not truncated: the caller has checked the limit by `words_with`.
        let at = octword as usize;
        if list.len() < 16 {
            return;
        }
        match self {
            Self::None => {}
            Self::Mtt(pages) => {
                let flags = if present { MTT_READ | MTT_WRITE } else { 0 };
                let list = &list[..list.len() / 16 * 16];
                let new = list
                    .chunks_exact(8)
                    .map(|entry| entry.iter().fold(0, |value, byte| (value << 8) | u64::from(*byte)) | flags);
                let end = 2 * at + list.len() / 8;
                if pages.len() < end {
                    pages.resize(end, 0);
                }
                pages[2 * at..end]
                    .iter_mut()
                    .zip(new)
                    .for_each(|(page, new)| *page = new);
            }
            Self::Ksm(entries) => write_entries(entries, at, list),
            Self::Klm { entries, ends } => {
                write_entries(entries, at, list);
                let mut end = 0_u64;
                ends.clear();
                ends.extend(entries.iter().map(|entry| {
                    end = end.saturating_add(entry.count.into());
                    end
                }));
            }
        }
    }

    /// Returns 16 bytes of translations in the driver's format.
    pub(super) fn octword(&self, index: usize) -> [u8; 16] {
        match self {
            Self::None => [0; 16],
            Self::Mtt(pages) => {
                let page = |at: usize| u128::from(pages.get(at).copied().unwrap_or(0));
                ((page(2 * index) << 64) | page(2 * index + 1)).to_be_bytes()
            }
            Self::Ksm(entries) | Self::Klm { entries, .. } => entries.get(index).copied().unwrap_or_default().bytes(),
        }
    }

    /// Translates `address`, which is within the bounds of the mkey, for at most `len` bytes (at least one). Returns
    /// `None` if the translation list cannot cover the address.
    pub(super) fn find(&self, context: &Context, address: u64, len: u64) -> Option<Translation> {
        match self {
            Self::None => Some(Translation::Bus {
                address,
                run: len,
                flags: MttFlags {
                    read: true,
                    write: true,
                },
            }),
            Self::Mtt(pages) => {
                let page = PageOffset::new(context, address, len)?;
                let Some(entry) = usize::try_from(page.index).ok().and_then(|index| pages.get(index)) else {
                    return page.not_present(context, context.octwords.saturating_mul(2), len);
                };
                Some(Translation::Bus {
                    address: (entry & !MTT_FLAGS).wrapping_add(page.inside),
                    run: page.run,
                    flags: MttFlags {
                        read: entry & MTT_READ != 0,
                        write: entry & MTT_WRITE != 0,
                    },
                })
            }
            Self::Ksm(entries) => {
                let page = PageOffset::new(context, address, len)?;
                if page.index >= context.octwords {
                    return None;
                }
                let entry = entries
                    .get(usize::try_from(page.index).ok()?)
                    .copied()
                    .unwrap_or_default();
                if entry.key == 0 {
                    return Some(Translation::NotPresent { run: page.run });
                }
                Some(Translation::Mkey {
                    key: entry.key,
                    address: entry.address.wrapping_add(page.inside),
                    run: page.run,
                })
            }
            Self::Klm { entries, ends } => {
                let offset = address.wrapping_sub(context.start);
                match entries.first() {
                    Some(first) if first.key == STRIDE_BLOCK_OP => strided(first, &entries[1..], offset, len),
                    _ => {
                        let index = ends.partition_point(|end| *end <= offset);
                        let (entry, end) = (entries.get(index)?, ends.get(index)?);
                        let inside = offset - (end - u64::from(entry.count));
                        Some(Translation::Mkey {
                            key: entry.key,
                            address: entry.address.wrapping_add(inside),
                            run: len.min(end - offset),
                        })
                    }
                }
            }
        }
    }
}

fn write_entries(entries: &mut Vec<KlmEntry>, at: usize, list: &[u8]) {
    let end = at + list.len() / 16;
    if entries.len() < end {
        entries.resize(end, KlmEntry::default());
    }
    for (entry, bytes) in entries[at..end].iter_mut().zip(list.chunks_exact(16)) {
        *entry = KlmEntry::read(bytes);
    }
}

/// Page index and offset of an address. Page 0 contains the start address of the mkey, which may be unaligned.
struct PageOffset {
    index: u64,
    inside: u64,
    run: u64,
}

impl PageOffset {
    fn new(context: &Context, address: u64, len: u64) -> Option<Self> {
        let shift = context.log_page_size;
        let index = (address >> shift).checked_sub(context.start >> shift)?;
        let inside = address & ((1 << shift) - 1);
        Some(Self {
            index,
            inside,
            run: len.min((1 << shift) - inside),
        })
    }

    /// Translation of an address after the last entry: not present, up to the maximum size of the list.
    fn not_present(&self, context: &Context, octwords: u64, len: u64) -> Option<Translation> {
        let pages = octwords.checked_sub(self.index).filter(|pages| *pages > 0)?;
        let bytes = (u128::from(pages) << context.log_page_size) - u128::from(self.inside);
        let run = u64::try_from(bytes).map_or(len, |bytes| bytes.min(len));
        Some(Translation::NotPresent { run })
    }
}

/// Translates an offset of a stride block list. The control entry holds the bytes per cycle, the number of cycles and
/// the number of entries. Each entry holds its bytes per cycle and its stride between cycles.
fn strided(first: &KlmEntry, entries: &[KlmEntry], offset: u64, len: u64) -> Option<Translation> {
    let cycle = u64::from(first.count);
    let (times, number) = (first.address >> 32, first.address & 0xffff);
    let time = offset.checked_div(cycle)?;
    if time >= times {
        return None;
    }
    let mut inside = offset % cycle;
    for entry in entries.iter().take(number as usize) {
        let (stride, count) = (u64::from(entry.count >> 16), u64::from(entry.count & 0xffff));
        if inside < count {
            return Some(Translation::Mkey {
                key: entry.key,
                address: entry
                    .address
                    .wrapping_add(time.wrapping_mul(stride))
                    .wrapping_add(inside),
                run: len.min(count - inside),
            });
        }
        inside -= count;
    }
    None
}
