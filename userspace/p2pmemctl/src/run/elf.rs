// SPDX-License-Identifier: MIT OR Apache-2.0

//! The few facts about an ELF file that decide whether a program loads the preload shim.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Size of the header of a 64-bit file.
const HEADER: usize = 64;
/// Size of a program header of a 64-bit file.
const PROGRAM_HEADER: usize = 56;
/// The most program headers that are read. Linkers create a dozen.
const MAX_HEADERS: u16 = 256;
/// The most bytes of a segment that are read.
const MAX_SEGMENT: u64 = 4096;

/// Which processor and C data types an ELF file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    /// 1 for 32-bit files, 2 for 64-bit files.
    class: u8,
    /// 1 for little-endian files, 2 for big-endian files.
    data: u8,
    machine: u16,
}

/// An ELF file.
#[derive(Debug)]
pub(super) struct Elf {
    pub(super) target: Target,
    /// The segments; `None` if this module does not read files of this kind.
    pub(super) segments: Option<Segments>,
}

/// Facts from the segments of an ELF file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Segments {
    /// Path of the dynamic linker. A statically linked program has none.
    pub(super) interpreter: Option<String>,
    /// Whether the Go compiler created the program.
    pub(super) is_go: bool,
}

/// Numbers of a file in its byte order.
struct Numbers {
    little_endian: bool,
}

impl Numbers {
    fn u16(&self, bytes: &[u8], at: usize) -> Option<u16> {
        let bytes = bytes.get(at..at + 2)?.try_into().ok()?;
        Some(if self.little_endian {
            u16::from_le_bytes(bytes)
        } else {
            u16::from_be_bytes(bytes)
        })
    }

    fn u32(&self, bytes: &[u8], at: usize) -> Option<u32> {
        let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(if self.little_endian {
            u32::from_le_bytes(bytes)
        } else {
            u32::from_be_bytes(bytes)
        })
    }

    fn u64(&self, bytes: &[u8], at: usize) -> Option<u64> {
        let bytes = bytes.get(at..at + 8)?.try_into().ok()?;
        Some(if self.little_endian {
            u64::from_le_bytes(bytes)
        } else {
            u64::from_be_bytes(bytes)
        })
    }
}

impl Elf {
    /// Reads an ELF file. Returns `None` for other files.
    pub(super) fn read(file: &File) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER];
        let length = read_up_to(file, &mut header, 0)?;
        let header = &header[..length];
        if !header.starts_with(b"\x7fELF") || header.len() < 20 {
            return Ok(None);
        }
        let (class, data) = (header[4], header[5]);
        let numbers = Numbers {
            little_endian: data == 1,
        };
        let Some(machine) = numbers.u16(header, 18) else {
            return Ok(None);
        };
        let segments = if class == 2 {
            Segments::read(file, header, &numbers)?
        } else {
            None
        };
        Ok(Some(Self {
            target: Target { class, data, machine },
            segments,
        }))
    }
}

impl Segments {
    fn read(file: &File, header: &[u8], numbers: &Numbers) -> io::Result<Option<Self>> {
        /// Types of segments.
        const INTERPRETER: u32 = 3;
        const NOTES: u32 = 4;
        let (Some(at), Some(size), Some(count)) = (
            numbers.u64(header, 32),
            numbers.u16(header, 54),
            numbers.u16(header, 56),
        ) else {
            return Ok(None);
        };
        if usize::from(size) != PROGRAM_HEADER || count > MAX_HEADERS {
            return Ok(None);
        }
        let mut table = vec![0; PROGRAM_HEADER * usize::from(count)];
        if read_up_to(file, &mut table, at)? < table.len() {
            return Ok(None);
        }
        let mut found = Self::default();
        for entry in table.chunks_exact(PROGRAM_HEADER) {
            let (Some(kind), Some(at), Some(size)) =
                (numbers.u32(entry, 0), numbers.u64(entry, 8), numbers.u64(entry, 32))
            else {
                return Ok(None);
            };
            if kind != INTERPRETER && kind != NOTES {
                continue;
            }
            let mut segment = vec![0; size.min(MAX_SEGMENT) as usize];
            let length = read_up_to(file, &mut segment, at)?;
            segment.truncate(length);
            if kind == INTERPRETER {
                let path = segment.split(|byte| *byte == 0).next().unwrap_or_default();
                found.interpreter = Some(String::from_utf8_lossy(path).into_owned());
            } else {
                found.is_go |= has_go_note(&segment, numbers);
            }
        }
        Ok(Some(found))
    }
}

/// Returns whether notes contain the build id that the Go linker writes.
fn has_go_note(mut notes: &[u8], numbers: &Numbers) -> bool {
    while let (Some(name), Some(content)) = (numbers.u32(notes, 0), numbers.u32(notes, 4)) {
        if notes.get(12..).is_some_and(|rest| rest.starts_with(b"Go\0")) {
            return true;
        }
        let padded = |length: u32| (length as usize).checked_next_multiple_of(4);
        let next = padded(name).and_then(|name| name.checked_add(padded(content)?)?.checked_add(12));
        match next.and_then(|next| notes.get(next..)) {
            Some(rest) => notes = rest,
            None => return false,
        }
    }
    false
}

/// Reads bytes at an offset. Returns their number, which is less than requested only at the end of the file.
fn read_up_to(file: &File, bytes: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        // An offset near the end of the address space is beyond the end of any file.
        let Some(at) = at.checked_add(done as u64).filter(|at| i64::try_from(*at).is_ok()) else {
            break;
        };
        match file.read_at(&mut bytes[done..], at) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::io::Write;

    /// Returns a 64-bit file in this machine's format, with segments of these types and contents.
    pub(crate) fn file(segments: &[(u32, &[u8])]) -> Vec<u8> {
        let this = std::fs::read("/proc/self/exe").unwrap();
        let mut bytes = this[..20].to_vec();
        bytes.resize(HEADER, 0);
        bytes[32..40].copy_from_slice(&(HEADER as u64).to_ne_bytes());
        bytes[54..56].copy_from_slice(&(PROGRAM_HEADER as u16).to_ne_bytes());
        bytes[56..58].copy_from_slice(&(segments.len() as u16).to_ne_bytes());
        let mut at = HEADER + PROGRAM_HEADER * segments.len();
        for (kind, content) in segments {
            let mut entry = [0; PROGRAM_HEADER];
            entry[..4].copy_from_slice(&kind.to_ne_bytes());
            entry[8..16].copy_from_slice(&(at as u64).to_ne_bytes());
            entry[32..40].copy_from_slice(&(content.len() as u64).to_ne_bytes());
            bytes.extend(entry);
            at += content.len();
        }
        for (_, content) in segments {
            bytes.extend(*content);
        }
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Elf> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Elf::read(&file).unwrap()
    }

    #[test]
    fn this_program_is_linked_dynamically() {
        let elf = Elf::read(&File::open("/proc/self/exe").unwrap()).unwrap().unwrap();
        let interpreter = elf.segments.unwrap().interpreter.unwrap();
        assert!(interpreter.contains("/ld"), "{interpreter}");
    }

    #[test]
    fn segments_are_found() {
        let go = [4u32.to_ne_bytes(), 8u32.to_ne_bytes(), 4u32.to_ne_bytes(), *b"Go\0\0"].concat();
        let gnu = [
            4u32.to_ne_bytes(),
            4u32.to_ne_bytes(),
            3u32.to_ne_bytes(),
            *b"GNU\0",
            [1; 4],
        ]
        .concat();
        let both = [gnu.clone(), go].concat();
        let facts = |segments: &[(u32, &[u8])]| read(&file(segments)).unwrap().segments.unwrap();
        assert_eq!(facts(&[(1, b"code")]), Segments::default());
        assert_eq!(
            facts(&[(3, b"/lib/ld.so\0"), (4, &gnu)]).interpreter.as_deref(),
            Some("/lib/ld.so")
        );
        assert!(!facts(&[(4, &gnu)]).is_go);
        assert!(facts(&[(4, &both)]).is_go);
    }

    #[test]
    fn damaged_files_are_no_panic() {
        let whole = file(&[(3, b"/lib/ld.so\0"), (4, &[0xff; 64])]);
        assert!(read(&whole).is_some());
        for length in 0..whole.len() {
            let _ = read(&whole[..length]);
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] = 0xff;
            let _ = read(&bytes);
        }
        assert!(read(b"#!/bin/sh\n").is_none());
    }
}
