// SPDX-License-Identifier: MIT OR Apache-2.0

//! A parser of the trace events of QEMU's NVMe model, which report the memory that the model reads and writes.
//!
//! The model traces a read or write command with its namespace, followed by the bus address and the length of each part
//! of its payload. The model handles commands one at a time in one thread. A part therefore belongs to the last read or
//! write that was traced, and to none if another command came in between. Events do not name the controller: the runner
//! gives every drive its own namespace number.
//!
//! QEMU's log backend flushes its file after each event, and the model traces the parts before it starts the transfer.
//! A program that has seen a command complete therefore finds its events in the file without any further flush.
//!
//! A drive that accesses a BAR behind an IOMMU translates each 8 bytes, and QEMU traces each translation: 10 MB for a
//! request of 1 MiB. A busy drive writes its trace about as fast as the runner parses it.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;

use anyhow::{Context, Result};

/// The events to enable.
pub const EVENTS: &[&str] = &[
    "pci_nvme_admin_cmd",
    "pci_nvme_io_cmd",
    "pci_nvme_read",
    "pci_nvme_write",
    "pci_nvme_map_addr",
    "pci_nvme_err_req_status",
];

/// The event to enable in a machine with an Intel IOMMU. The model translates one page at a time when a device starts a
/// transfer, and does not keep translations.
pub const TRANSLATE: &str = "vtd_dmar_translate";

/// The direction of a transfer, from the host's point of view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the drive to memory.
    Read,
    /// From memory to the drive.
    Write,
}

/// An event of the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A read or write command of a namespace.
    Command {
        /// Namespace number.
        nsid: u32,
        /// Its direction.
        direction: Direction,
    },
    /// A part of a command's payload.
    Payload {
        /// Namespace number.
        nsid: u32,
        /// The command's direction.
        direction: Direction,
        /// Its first bus address.
        address: u64,
        /// Its bytes.
        length: u64,
    },
    /// Memory that was mapped for a command that is neither a read nor a write: identify data, log pages, ranges to
    /// discard.
    Other {
        /// Its bytes.
        length: u64,
    },
    /// The IOMMU translated a page for a function.
    Translation {
        /// The requester ID of the function: bus, device and function number.
        function: u16,
        /// The first IOVA of the page.
        iova: u64,
        /// The guest-physical address of the page.
        address: u64,
        /// The bytes of the page.
        length: u64,
    },
    /// A command failed.
    Failed {
        /// Namespace number.
        nsid: u32,
    },
}

/// The parser's state between lines.
#[derive(Debug, Default)]
pub struct Parser {
    current: Option<(u32, Direction)>,
}

impl Parser {
    /// Parses one line. Returns `None` for lines that do not report a transfer.
    pub fn line(&mut self, line: &str) -> Option<Event> {
        if let Some(at) = line.find(TRANSLATE) {
            return translation(&line[at..]);
        }
        // With timestamps enabled, the name comes after a prefix that ends with a colon or a space.
        let at = line.find("pci_nvme_")?;
        let mut words = line[at..].split_ascii_whitespace();
        let name = words.next()?;
        let words: Vec<&str> = words.collect();
        let value = |key: &str| -> Option<u64> {
            let at = words.iter().position(|w| *w == key)?;
            number(words.get(at + 1)?)
        };
        match name {
            "pci_nvme_io_cmd" | "pci_nvme_admin_cmd" => {
                self.current = None;
                None
            }
            "pci_nvme_read" | "pci_nvme_write" => {
                let direction = if name == "pci_nvme_read" {
                    Direction::Read
                } else {
                    Direction::Write
                };
                let nsid = u32::try_from(value("nsid")?).ok()?;
                self.current = Some((nsid, direction));
                Some(Event::Command { nsid, direction })
            }
            "pci_nvme_map_addr" => {
                let (address, length) = (value("addr")?, value("len")?);
                Some(match self.current {
                    Some((nsid, direction)) => Event::Payload {
                        nsid,
                        direction,
                        address,
                        length,
                    },
                    None => Event::Other { length },
                })
            }
            "pci_nvme_err_req_status" => Some(Event::Failed {
                nsid: u32::try_from(value("nsid")?).ok()?,
            }),
            _ => None,
        }
    }
}

/// Parses `vtd_dmar_translate dev BB:DD.FF iova 0xI -> gpa 0xG mask 0xM`.
fn translation(line: &str) -> Option<Event> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, "dev", function, "iova", iova, "->", "gpa", address, "mask", mask] = words[..] else {
        return None;
    };
    Some(Event::Translation {
        function: requester(function)?,
        iova: number(iova)?,
        address: number(address)?,
        length: number(mask)?.checked_add(1)?,
    })
}

/// Returns the requester ID of a function that is written as `BB:DD.F`, with any number of hexadecimal digits.
pub fn requester(function: &str) -> Option<u16> {
    let (bus, rest) = function.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let part = |text, most| u16::from_str_radix(text, 16).ok().filter(|n| *n <= most);
    Some((part(bus, 0xff)? << 8) | (part(device, 31)? << 3) | part(function, 7)?)
}

fn number(word: &str) -> Option<u64> {
    match word.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => word.parse().ok(),
    }
}

/// Reads complete lines of a growing trace file.
#[derive(Debug)]
pub struct Reader {
    file: File,
    rest: Vec<u8>,
    /// The previous line, if it was a translation. The same translation again reports nothing new.
    translated: Vec<u8>,
    parser: Parser,
}

impl Reader {
    /// Opens a trace file.
    ///
    /// # Errors
    ///
    /// Those of opening a file.
    pub fn open(path: &Path) -> Result<Reader> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        Ok(Reader {
            file,
            rest: Vec::new(),
            translated: Vec::new(),
            parser: Parser::default(),
        })
    }

    /// Passes to `take` every event between the last call and this one. Events that QEMU adds during the call are left
    /// for the next call, so the call ends even if QEMU writes faster than this function reads.
    ///
    /// # Errors
    ///
    /// Those of reading a file.
    pub fn read(&mut self, mut take: impl FnMut(Event)) -> io::Result<()> {
        let mut left = self.file.metadata()?.len().saturating_sub(self.file.stream_position()?);
        let mut bytes = vec![0; 1 << 20];
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
            let n = self.file.read(&mut bytes[..most])?;
            if n == 0 {
                return Ok(());
            }
            left -= n as u64;
            self.rest.extend_from_slice(&bytes[..n]);
            let Some(end) = self.rest.iter().rposition(|&b| b == b'\n') else {
                continue;
            };
            for line in self.rest[..end].split(|&b| b == b'\n') {
                if !self.translated.is_empty() && line == self.translated {
                    continue;
                }
                self.translated.clear();
                let Some(event) = std::str::from_utf8(line).ok().and_then(|line| self.parser.line(line)) else {
                    continue;
                };
                if matches!(event, Event::Translation { .. }) {
                    self.translated.extend_from_slice(line);
                }
                take(event);
            }
            self.rest.drain(..=end);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const TRACE: &str = "\
pci_nvme_admin_cmd cid 8 sqid 0 opc 0x6 opname 'NVME_ADM_CMD_IDENTIFY'
pci_nvme_map_addr addr 0x1000 len 4096
pci_nvme_io_cmd cid 1 nsid 0x2 sqid 1 opc 0x2 opname 'NVME_NVM_CMD_READ'
pci_nvme_read cid 1 nsid 2 nlb 16 count 8192 lba 0x0
pci_nvme_map_addr addr 0x380000000 len 4096
pci_nvme_map_addr addr 0x2000 len 4096
pci_nvme_io_cmd cid 2 nsid 0x1 sqid 2 opc 0x1 opname 'NVME_NVM_CMD_WRITE'
pci_nvme_write cid 2 opname 'NVME_NVM_CMD_WRITE' nsid 1 nlb 8 count 4096 lba 0x10
pci_nvme_map_addr addr 0x3000 len 4096
pci_nvme_err_req_status cid 2 nsid 1 status 0x2 opc 0x1
pci_nvme_io_cmd cid 3 nsid 0x1 sqid 2 opc 0x9 opname 'NVME_NVM_CMD_DSM'
pci_nvme_map_addr addr 0x4000 len 16
some other line
";

    fn expected() -> Vec<Event> {
        use Direction::{Read, Write};
        vec![
            Event::Other { length: 4096 },
            Event::Command {
                nsid: 2,
                direction: Read,
            },
            Event::Payload {
                nsid: 2,
                direction: Read,
                address: 0x3_8000_0000,
                length: 4096,
            },
            Event::Payload {
                nsid: 2,
                direction: Read,
                address: 0x2000,
                length: 4096,
            },
            Event::Command {
                nsid: 1,
                direction: Write,
            },
            Event::Payload {
                nsid: 1,
                direction: Write,
                address: 0x3000,
                length: 4096,
            },
            Event::Failed { nsid: 1 },
            Event::Other { length: 16 },
        ]
    }

    #[test]
    fn events_are_parsed() {
        let mut parser = Parser::default();
        let events: Vec<Event> = TRACE.lines().filter_map(|line| parser.line(line)).collect();
        assert_eq!(events, expected());
    }

    #[test]
    fn translations_are_parsed() {
        let line = "vtd_dmar_translate dev 02:01.03 iova 0xfffc0000 -> gpa 0x380000000 mask 0xfff";
        assert_eq!(
            Parser::default().line(line),
            Some(Event::Translation {
                function: 0x020b,
                iova: 0xfffc_0000,
                address: 0x3_8000_0000,
                length: 4096,
            })
        );
        let whole = "vtd_dmar_translate dev 02:00.00 iova 0x0 -> gpa 0x0 mask 0xffffffffffffffff";
        assert_eq!(Parser::default().line(whole), None);
        assert_eq!(requester("02:00.8"), None);
        assert_eq!(requester("0:02:00.0"), None);
    }

    #[test]
    fn timestamps_are_skipped_and_invalid_lines_ignored() {
        let mut parser = Parser::default();
        let line = "12@1700000000.123456:pci_nvme_read cid 1 nsid 7 nlb 1 count 512 lba 0x0";
        assert_eq!(
            parser.line(line),
            Some(Event::Command {
                nsid: 7,
                direction: Direction::Read
            })
        );
        assert_eq!(parser.line("pci_nvme_map_addr addr 0xzz len 1"), None);
        assert_eq!(parser.line("pci_nvme_map_addr addr"), None);
        assert_eq!(parser.line("pci_nvme_read"), None);
        assert_eq!(parser.line(""), None);
    }

    #[test]
    fn growing_file_is_read_incrementally() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut reader = Reader::open(file.path()).unwrap();
        let mut events = Vec::new();
        // The chunks split lines anywhere.
        for piece in TRACE.as_bytes().chunks(7) {
            file.write_all(piece).unwrap();
            file.flush().unwrap();
            reader.read(|event| events.push(event)).unwrap();
        }
        assert_eq!(events, expected());
    }

    #[test]
    fn reading_ends_although_the_file_grows() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut reader = Reader::open(file.path()).unwrap();
        writeln!(file, "pci_nvme_read cid 1 nsid 2 nlb 16 count 8192 lba 0x0").unwrap();
        for round in 0..3 {
            let mut events = 0;
            let mut grow = |_| {
                events += 1;
                writeln!(file, "pci_nvme_read cid 1 nsid 2 nlb 16 count 8192 lba 0x0").unwrap();
            };
            reader.read(&mut grow).unwrap();
            assert_eq!(events, 1, "round {round}");
        }
    }

    #[test]
    fn repeated_translation_is_reported_once() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut reader = Reader::open(file.path()).unwrap();
        let line = |iova| format!("vtd_dmar_translate dev 02:00.00 iova {iova} -> gpa 0x380000000 mask 0xfff\n");
        let lines = [line("0x1000"), line("0x1000"), line("0x2000"), line("0x1000")];
        file.write_all(lines.concat().as_bytes()).unwrap();
        let mut pages = Vec::new();
        let mut take = |event| match event {
            Event::Translation { iova, .. } => pages.push(iova),
            other => panic!("{other:?}"),
        };
        reader.read(&mut take).unwrap();
        assert_eq!(pages, [0x1000, 0x2000, 0x1000]);
    }
}
