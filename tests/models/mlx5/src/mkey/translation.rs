// SPDX-License-Identifier: MIT OR Apache-2.0

//! A key's translations: where an address of the key leads.

use p2pmem_ib::Rights;

use super::REPEAT;
use super::context::{Context, Mode};

/// Bits of a page entry: the kinds of access for which the page is present.
const PRESENT_READ: u64 = 1;
const PRESENT_WRITE: u64 = 2;
/// Bits of a page entry that are no address.
const ENTRY_FLAGS: u64 = 0xff;

/// What a page is present for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Present {
    read: bool,
    write: bool,
}

impl Present {
    pub(super) fn allows(self, rights: Rights) -> bool {
        match rights {
            Rights::LocalRead | Rights::RemoteRead => self.read,
            Rights::LocalWrite | Rights::RemoteWrite | Rights::RemoteAtomic => self.write,
        }
    }
}

/// The target of an address, and for how many bytes (`run`) it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// To the bus.
    Bus { address: u64, run: u64, present: Present },
    /// To another key.
    Key { key: u32, address: u64, run: u64 },
    /// Nowhere for now.
    Absent { run: u64 },
}

/// An entry that refers to another key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    count: u32,
    key: u32,
    address: u64,
}

impl Entry {
    fn read(bytes: &[u8]) -> Self {
        let word = |at: usize| {
            bytes[at..at + 8]
                .iter()
                .fold(0, |value, byte| (value << 8) | u64::from(*byte))
        };
        let (head, address) = (word(0), word(8));
        Self {
            // Truncated on purpose: two halves.
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

/// Translations in the order of the key's addresses. They grow with what is written; what was never written is not
/// present.
#[derive(Debug)]
pub(super) enum Translations {
    None,
    /// Page entries.
    Pages(Vec<u64>),
    KeyPages(Vec<Entry>),
    Pieces {
        entries: Vec<Entry>,
        /// Where each piece ends, counted from the key's start.
        ends: Vec<u64>,
    },
}

impl Translations {
    pub(super) fn new(mode: Mode) -> Self {
        match mode {
            Mode::Pages => Self::Pages(Vec::new()),
            Mode::KeyPages => Self::KeyPages(Vec::new()),
            Mode::Pieces => Self::Pieces {
                entries: Vec::new(),
                ends: Vec::new(),
            },
            Mode::Physical | Mode::Other => Self::None,
        }
    }

    /// Size in units of 8 bytes.
    pub(super) fn words(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::Pages(pages) => pages.len() as u64,
            Self::KeyPages(entries) | Self::Pieces { entries, .. } => 2 * entries.len() as u64,
        }
    }

    /// What [`Translations::words`] will be after a write of `len` bytes at `octword`.
    pub(super) fn words_with(&self, octword: u64, len: usize) -> u64 {
        match self {
            Self::None => 0,
            _ if len == 0 => self.words(),
            _ => self
                .words()
                .max(octword.saturating_mul(2).saturating_add(len as u64 / 16 * 2)),
        }
    }

    /// Puts translations, as the driver lays them out, from `octword` on. With `present`, pages are present whatever their
    /// entries say. A rest of less than 16 bytes is left out.
    pub(super) fn write(&mut self, octword: u64, list: &[u8], present: bool) {
        // Not truncated: the caller has compared with a limit by `words_with`.
        let at = octword as usize;
        if list.len() < 16 {
            return;
        }
        match self {
            Self::None => {}
            Self::Pages(pages) => {
                let flags = if present { PRESENT_READ | PRESENT_WRITE } else { 0 };
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
            Self::KeyPages(entries) => put(entries, at, list),
            Self::Pieces { entries, ends } => {
                put(entries, at, list);
                let mut end = 0_u64;
                ends.clear();
                ends.extend(entries.iter().map(|entry| {
                    end = end.saturating_add(entry.count.into());
                    end
                }));
            }
        }
    }

    /// 16 bytes of translations as the driver lays them out.
    pub(super) fn octword(&self, index: usize) -> [u8; 16] {
        match self {
            Self::None => [0; 16],
            Self::Pages(pages) => {
                let page = |at: usize| u128::from(pages.get(at).copied().unwrap_or(0));
                ((page(2 * index) << 64) | page(2 * index + 1)).to_be_bytes()
            }
            Self::KeyPages(entries) | Self::Pieces { entries, .. } => {
                entries.get(index).copied().unwrap_or_default().bytes()
            }
        }
    }

    /// Translates `address`, which is in the key's range, for at most `len` bytes (at least one). Returns `None` if the key has
    /// no space for a translation of the address.
    pub(super) fn find(&self, context: &Context, address: u64, len: u64) -> Option<Target> {
        match self {
            Self::None => Some(Target::Bus {
                address,
                run: len,
                present: Present {
                    read: true,
                    write: true,
                },
            }),
            Self::Pages(pages) => {
                let page = Page::new(context, address, len)?;
                let Some(entry) = usize::try_from(page.index).ok().and_then(|index| pages.get(index)) else {
                    return page.rest(context, context.octwords.saturating_mul(2), len);
                };
                Some(Target::Bus {
                    address: (entry & !ENTRY_FLAGS).wrapping_add(page.inside),
                    run: page.run,
                    present: Present {
                        read: entry & PRESENT_READ != 0,
                        write: entry & PRESENT_WRITE != 0,
                    },
                })
            }
            Self::KeyPages(entries) => {
                let page = Page::new(context, address, len)?;
                if page.index >= context.octwords {
                    return None;
                }
                let entry = entries
                    .get(usize::try_from(page.index).ok()?)
                    .copied()
                    .unwrap_or_default();
                if entry.key == 0 {
                    return Some(Target::Absent { run: page.run });
                }
                Some(Target::Key {
                    key: entry.key,
                    address: entry.address.wrapping_add(page.inside),
                    run: page.run,
                })
            }
            Self::Pieces { entries, ends } => {
                let offset = address.wrapping_sub(context.start);
                match entries.first() {
                    Some(first) if first.key == REPEAT => repeated(first, &entries[1..], offset, len),
                    _ => {
                        let index = ends.partition_point(|end| *end <= offset);
                        let (entry, end) = (entries.get(index)?, ends.get(index)?);
                        let inside = offset - (end - u64::from(entry.count));
                        Some(Target::Key {
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

fn put(entries: &mut Vec<Entry>, at: usize, list: &[u8]) {
    let end = at + list.len() / 16;
    if entries.len() < end {
        entries.resize(end, Entry::default());
    }
    for (entry, bytes) in entries[at..end].iter_mut().zip(list.chunks_exact(16)) {
        *entry = Entry::read(bytes);
    }
}

/// A place in pages of one size. The first page holds the key's start, wherever in it that is.
struct Page {
    index: u64,
    inside: u64,
    run: u64,
}

impl Page {
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

    /// What there is behind the last entry: nothing, up to the end of the `room` for entries.
    fn rest(&self, context: &Context, room: u64, len: u64) -> Option<Target> {
        let pages = room.checked_sub(self.index).filter(|pages| *pages > 0)?;
        let bytes = (u128::from(pages) << context.log_page_size) - u128::from(self.inside);
        let run = u64::try_from(bytes).map_or(len, |bytes| bytes.min(len));
        Some(Target::Absent { run })
    }
}

/// A place in pieces that repeat: the first entry says how often, and how many pieces there are; each piece has its
/// length, and how far it moves on from one time to the next.
fn repeated(first: &Entry, pieces: &[Entry], offset: u64, len: u64) -> Option<Target> {
    let cycle = u64::from(first.count);
    let (times, number) = (first.address >> 32, first.address & 0xffff);
    let time = offset.checked_div(cycle)?;
    if time >= times {
        return None;
    }
    let mut inside = offset % cycle;
    for piece in pieces.iter().take(number as usize) {
        let (stride, count) = (u64::from(piece.count >> 16), u64::from(piece.count & 0xffff));
        if inside < count {
            return Some(Target::Key {
                key: piece.key,
                address: piece
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
