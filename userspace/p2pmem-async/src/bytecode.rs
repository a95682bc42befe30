// SPDX-License-Identifier: MIT OR Apache-2.0

//! Byte code: what an executor does to drive a NIC. `Documentation/design/async.md` has the meaning of each operation.
//!
//! A [`Program`] names places by [`Target`]: a region and an offset. An executor maps regions to its own addresses, so the
//! same program runs on the CPU, on an accelerator, and on a GPU.

use std::fmt::{self, Write as _};

use crate::error::{Error, ExecutionFailure, Result};
use crate::region::{Region, Target};

/// Largest number of bytes of a [`Operation::CopyBlock`]: the largest work request.
pub const MAX_BLOCK: usize = 1024;

bitflags::bitflags! {
    /// What an executor can do, and what a program needs.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Capabilities: u32 {
        /// [`Operation::Fence`].
        const FENCE = 1 << 0;
        /// [`Operation::StoreDword`].
        const STORE_DWORD = 1 << 1;
        /// [`Operation::StoreQword`], as one access of 8 bytes.
        const STORE_QWORD = 1 << 2;
        /// [`Operation::CopyBlock`].
        const COPY_BLOCK = 1 << 3;
        /// [`Operation::PollAnd`].
        const POLL_AND = 1 << 4;
        /// [`Operation::PollNor`].
        const POLL_NOR = 1 << 5;
        /// [`Operation::PollGeq`].
        const POLL_GEQ = 1 << 6;
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter_names().map(|(name, _)| name).collect();
        f.write_str(&names.join(", "))
    }
}

/// An operation. Values are little-endian in memory.
///
/// Operations take effect in order, except that stores may become visible to the NIC in any order unless a fence is
/// between them. A poll ends before any later operation starts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Earlier stores become visible to the NIC before later ones.
    Fence,
    /// Writes 4 bytes in one access.
    StoreDword {
        /// A multiple of 4.
        target: Target,
        /// The value.
        value: u32,
    },
    /// Writes 8 bytes in one access.
    StoreQword {
        /// A multiple of 8.
        target: Target,
        /// The value.
        value: u64,
    },
    /// Writes bytes in accesses of any size and order.
    CopyBlock {
        /// A multiple of 8.
        target: Target,
        /// The bytes: a multiple of 8, at most [`MAX_BLOCK`].
        data: Vec<u8>,
    },
    /// Waits until `memory & value != 0`.
    PollAnd {
        /// A multiple of 4.
        target: Target,
        /// The mask.
        value: u32,
    },
    /// Waits until `!(memory | value) != 0`.
    PollNor {
        /// A multiple of 4.
        target: Target,
        /// The complement of a mask: the poll ends when a bit of the mask is 0 in memory.
        value: u32,
    },
    /// Waits until `memory - value >= 0`, where the difference wraps and is signed.
    PollGeq {
        /// A multiple of 4.
        target: Target,
        /// The value to reach.
        value: u32,
    },
}

impl Operation {
    /// Returns the capability that the operation needs.
    pub fn capability(&self) -> Capabilities {
        match self {
            Self::Fence => Capabilities::FENCE,
            Self::StoreDword { .. } => Capabilities::STORE_DWORD,
            Self::StoreQword { .. } => Capabilities::STORE_QWORD,
            Self::CopyBlock { .. } => Capabilities::COPY_BLOCK,
            Self::PollAnd { .. } => Capabilities::POLL_AND,
            Self::PollNor { .. } => Capabilities::POLL_NOR,
            Self::PollGeq { .. } => Capabilities::POLL_GEQ,
        }
    }

    /// Returns the place that the operation accesses; `None` for a fence.
    pub fn target(&self) -> Option<Target> {
        match *self {
            Self::Fence => None,
            Self::StoreDword { target, .. }
            | Self::StoreQword { target, .. }
            | Self::CopyBlock { target, .. }
            | Self::PollAnd { target, .. }
            | Self::PollNor { target, .. }
            | Self::PollGeq { target, .. } => Some(target),
        }
    }

    /// Returns the number of bytes that the operation accesses.
    pub fn size(&self) -> usize {
        match self {
            Self::Fence => 0,
            Self::StoreQword { .. } => 8,
            Self::CopyBlock { data, .. } => data.len(),
            _ => 4,
        }
    }

    /// Returns whether a poll has come true for a value in memory. Operations that do not poll are always true.
    pub fn holds(&self, memory: u32) -> bool {
        match *self {
            Self::PollAnd { value, .. } => memory & value != 0,
            Self::PollNor { value, .. } => !(memory | value) != 0,
            // The sign bit of the difference.
            Self::PollGeq { value, .. } => memory.wrapping_sub(value) >> 31 == 0,
            _ => true,
        }
    }

    /// Returns why the operation is invalid; `None` if it is valid.
    fn invalid(&self) -> Option<String> {
        let target = self.target()?;
        let (alignment, what) = match self {
            Self::StoreQword { .. } => (8, "an 8-byte store"),
            Self::CopyBlock { .. } => (8, "a block"),
            _ => (4, "a 4-byte access"),
        };
        if target.offset % alignment != 0 {
            return Some(format!("{what} at {target} is not aligned to {alignment} bytes"));
        }
        if target.offset.checked_add(self.size() as u64).is_none() {
            return Some(format!("{what} at {target} ends after the address space"));
        }
        match self {
            Self::CopyBlock { data, .. } if data.is_empty() || data.len() % 8 != 0 || data.len() > MAX_BLOCK => {
                Some(format!(
                    "a block of {} bytes: 8 to {MAX_BLOCK} in multiples of 8 are possible",
                    data.len()
                ))
            }
            // These would never, or always, come true.
            Self::PollAnd { value: 0, .. } => Some("a poll for no bit never ends".into()),
            Self::PollNor { value: u32::MAX, .. } => Some("a poll for no bit never ends".into()),
            _ => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fence => f.write_str("FENCE"),
            Self::StoreDword { target, value } => write!(f, "STORE_DWORD {target} <- {value:#010x}"),
            Self::StoreQword { target, value } => write!(f, "STORE_QWORD {target} <- {value:#018x}"),
            Self::CopyBlock { target, data } => write!(f, "COPY_BLOCK {target} <- {} bytes", data.len()),
            Self::PollAnd { target, value } => write!(f, "POLL_AND {target} & {value:#010x} != 0"),
            Self::PollNor { target, value } => write!(f, "POLL_NOR ~({target} | {value:#010x}) != 0"),
            Self::PollGeq { target, value } => write!(f, "POLL_GEQ {target} - {value:#010x} >= 0"),
        }
    }
}

/// A list of valid operations.
///
/// ```
/// use p2pmem_async::bytecode::{Operation, Program};
/// use p2pmem_async::region::{Region, RegionKind};
/// use p2pmem_async::sys::HostMemory;
///
/// let signal = Region::new(RegionKind::Data, std::sync::Arc::new(HostMemory::new(4096)?));
/// let mut program = Program::new();
/// program.push(Operation::StoreDword { target: signal.target(0), value: 7 })?;
/// program.push(Operation::Fence)?;
/// program.push(Operation::PollGeq { target: signal.target(0), value: 5 })?;
/// assert_eq!(program.operations().len(), 3);
/// assert!(program.push(Operation::StoreQword { target: signal.target(4), value: 0 }).is_err());
/// # Ok::<(), p2pmem_async::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Program {
    operations: Vec<Operation>,
}

impl Program {
    /// Creates an empty program.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an operation.
    ///
    /// # Errors
    ///
    /// [`Error::Operation`] for an unaligned target, a block of an impossible length, or a poll that never ends.
    pub fn push(&mut self, operation: Operation) -> Result<()> {
        if let Some(why) = operation.invalid() {
            return Err(Error::Operation {
                index: self.operations.len(),
                why,
            });
        }
        self.operations.push(operation);
        Ok(())
    }

    /// Adds the operations of another program.
    pub fn append(&mut self, other: Self) {
        self.operations.extend(other.operations);
    }

    /// Returns the operations.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Returns whether the program has no operation.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Returns the capabilities that an executor needs.
    pub fn required(&self) -> Capabilities {
        self.operations
            .iter()
            .fold(Capabilities::empty(), |all, operation| all | operation.capability())
    }

    /// Returns the program as text for people, one operation a line.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        for (index, operation) in self.operations.iter().enumerate() {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{index:3}  {operation}");
        }
        text
    }
}

/// The executor that queues are created for: its abilities and limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    name: String,
    capabilities: Capabilities,
    max_operations: usize,
}

impl Peer {
    /// Describes an executor. `max_operations` is the length of its queue.
    pub fn new(name: impl Into<String>, capabilities: Capabilities, max_operations: usize) -> Self {
        Self {
            name: name.into(),
            capabilities,
            max_operations,
        }
    }

    /// Returns the CPU, which can execute everything.
    pub fn cpu() -> Self {
        Self::new("cpu", Capabilities::all(), usize::MAX)
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the capabilities.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Checks that the executor can execute a program. `why` says what the program is for.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a missing capability, [`Error::TooLong`] if the program exceeds the executor's queue.
    pub fn check(&self, program: &Program, why: &str) -> Result<()> {
        let missing = program.required() - self.capabilities;
        if !missing.is_empty() {
            return Err(Error::Unsupported {
                peer: self.name.clone(),
                missing: missing.to_string(),
                why: why.to_owned(),
            });
        }
        let operations = program.operations.len();
        if operations > self.max_operations {
            return Err(Error::TooLong {
                peer: self.name.clone(),
                operations,
                limit: self.max_operations,
            });
        }
        Ok(())
    }
}

/// Returns the offset of `size` bytes at a target in its region of `len` bytes.
pub(crate) fn offset_in(target: Target, size: usize, len: usize) -> std::result::Result<usize, ExecutionFailure> {
    let at = usize::try_from(target.offset).ok();
    at.filter(|at| at.checked_add(size).is_some_and(|end| end <= len))
        .ok_or(ExecutionFailure::Outside { len })
}

/// Waits until the counter in 4 bytes of memory reaches a value.
///
/// # Errors
///
/// [`Error::Operation`] if the place is not aligned.
pub fn wait_for(region: &Region, offset: u64, value: u32) -> Result<Program> {
    let mut program = Program::new();
    let target = region.target(offset);
    program.push(Operation::PollGeq { target, value })?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::region::RegionKind;
    use crate::sys::HostMemory;

    fn region() -> Region {
        Region::new(RegionKind::Data, Arc::new(HostMemory::new(4096).unwrap()))
    }

    #[test]
    fn invalid_operations_are_refused_with_index_and_reason() {
        let region = region();
        let block = |at, len| Operation::CopyBlock {
            target: region.target(at),
            data: vec![0; len],
        };
        let target = region.target(2);
        let bad = [
            (Operation::StoreDword { target, value: 0 }, "not aligned to 4"),
            (Operation::PollAnd { target, value: 1 }, "not aligned to 4"),
            (
                Operation::StoreQword {
                    target: region.target(4),
                    value: 0,
                },
                "not aligned to 8",
            ),
            (
                Operation::StoreQword {
                    target: region.target(u64::MAX - 7),
                    value: 0,
                },
                "address space",
            ),
            (block(4, 8), "not aligned to 8"),
            (block(8, 0), "a block of 0 bytes"),
            (block(8, 12), "a block of 12 bytes"),
            (block(8, MAX_BLOCK + 8), "a block of 1032 bytes"),
            (
                Operation::PollAnd {
                    target: region.target(0),
                    value: 0,
                },
                "never ends",
            ),
            (
                Operation::PollNor {
                    target: region.target(0),
                    value: u32::MAX,
                },
                "never ends",
            ),
        ];
        let mut program = Program::new();
        program.push(Operation::Fence).unwrap();
        for (operation, why) in bad {
            let error = program.push(operation.clone()).unwrap_err().to_string();
            assert!(
                error.starts_with("operation 1 ") && error.contains(why),
                "{operation}: {error}"
            );
        }
        assert_eq!(program.operations().len(), 1);
    }

    #[test]
    fn polls_compare_as_specified() {
        let target = region().target(0);
        let and = Operation::PollAnd {
            target,
            value: 0x0100_0000,
        };
        assert!(and.holds(0x0100_0000) && and.holds(u32::MAX) && !and.holds(0xfeff_ffff));
        let nor = Operation::PollNor {
            target,
            value: !0x0100_0000,
        };
        assert!(nor.holds(0) && nor.holds(0xfeff_ffff) && !nor.holds(0x0100_0000) && !nor.holds(u32::MAX));
        let geq = Operation::PollGeq { target, value: 5 };
        assert!(geq.holds(5) && geq.holds(6) && !geq.holds(4) && geq.holds(0x7fff_ffff));
        assert!(!geq.holds(0x8000_0005), "half the range behind is not reached");
        let wraps = Operation::PollGeq {
            target,
            value: u32::MAX,
        };
        assert!(wraps.holds(0) && wraps.holds(u32::MAX) && !wraps.holds(u32::MAX - 1));
    }

    #[test]
    fn a_peer_refuses_what_it_cannot_execute() {
        let region = region();
        let mut program = Program::new();
        for offset in [0, 8] {
            program
                .push(Operation::StoreQword {
                    target: region.target(offset),
                    value: 1,
                })
                .unwrap();
        }
        program.push(Operation::Fence).unwrap();
        let peer = Peer::new("gpu", Capabilities::all() - Capabilities::STORE_QWORD, 8);
        let error = peer.check(&program, "the doorbell needs one 8-byte store").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the peer gpu cannot execute STORE_QWORD: the doorbell needs one 8-byte store"
        );
        let error = Peer::new("gpu", Capabilities::all(), 2)
            .check(&program, "")
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::TooLong {
                    operations: 3,
                    limit: 2,
                    ..
                }
            ),
            "{error}"
        );
        Peer::cpu().check(&program, "").unwrap();
        assert_eq!(program.required(), Capabilities::FENCE | Capabilities::STORE_QWORD);
    }

    #[test]
    fn explanation_has_one_line_for_each_operation() {
        let region = region();
        let mut program = wait_for(&region, 8, 3).unwrap();
        program.push(Operation::Fence).unwrap();
        let id = region.id().number();
        assert_eq!(
            program.explain(),
            format!("  0  POLL_GEQ data#{id}+0x8 - 0x00000003 >= 0\n  1  FENCE\n")
        );
    }
}
